//! The CNI plugin: whether the container runtime calls it.

use super::Check;
use crate::{
    cni::install::{Error, Installation, Look},
    config::{Config, PodSource},
    sys::lock::{self, Holder},
    telemetry::Chain,
};

pub(super) fn checks(config: &Config) -> Vec<Check> {
    let id = "cni.plugin";
    if matches!(config.pods, PodSource::Zds(_)) {
        return vec![Check::not_asked(id, "pods are told of by ZDS (--inpod-uds)")];
    }
    let holder = lock::holder(&config.state_dir);
    let wanted = Wanted {
        by_agent: config.cni.install,
        is_running: matches!(holder, Ok(Holder::Process(_) | Holder::Hidden)),
    };
    let look = Installation::new(config.cni.installation.clone()).is_installed();
    vec![plugin(id, look, wanted)]
}

/// Who is to see to it.
#[derive(Debug, Clone, Copy)]
struct Wanted {
    /// The agent, when it runs.
    by_agent: bool,
    is_running: bool,
}

fn plugin(id: &'static str, look: Result<Look, Error>, wanted: Wanted) -> Check {
    let look = match look {
        Ok(look) => look,
        Err(error) if wanted.by_agent => {
            return Check::failed(
                id,
                Chain(&error).to_string(),
                "name the runtime's directories with --cni-conf-dir and --cni-bin-dir; docs/install.md says what is looked for",
            );
        }
        Err(_) => return not_wanted(id),
    };
    let file = look.file.display();
    let missing = match (look.has_entry, look.has_binary) {
        (true, true) => {
            let seen = format!("the runtime calls the plugin, by {file}");
            return match look.warning {
                Some(warning) => Check::warning(
                    id,
                    format!("{seen}; {warning}"),
                    "docs/install.md tells of the ways to install it",
                ),
                None => Check::ok(id, seen),
            };
        }
        (false, true) => format!("{file} lacks the plugin's entry, or another stands after it"),
        (true, false) => format!(
            "{file} has the plugin's entry, and {} is not the program that comes with this one, or cannot be executed: no pod can start",
            look.binary.display()
        ),
        (false, false) => format!("neither {file} nor {} has the plugin", look.binary.display()),
    };
    match (wanted.by_agent, wanted.is_running) {
        (true, true) => Check::failed(
            id,
            format!("{missing}, though an agent runs that is to see to it"),
            "its log and /healthz/ready say what keeps it from that; redirector install-cni tries by hand",
        ),
        (true, false) => Check::warning(
            id,
            format!("{missing}; the agent puts it there when it starts"),
            "start the agent, or run redirector install-cni",
        ),
        // Somebody has installed it, and half of it is left.
        (false, _) if look.has_entry => Check::failed(
            id,
            missing,
            "run redirector install-cni with the agent's settings",
        ),
        (false, _) => not_wanted(id),
    }
}

fn not_wanted(id: &'static str) -> Check {
    Check::not_asked(id, "these settings don't install it (--cni-install)")
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;
    use crate::doctor::State;

    #[test]
    fn it_is_judged_by_who_is_to_see_to_it() {
        let look = |has_entry, has_binary| {
            Ok(Look {
                file: "/c/10-a.conflist".into(),
                binary: "/b/redirector-cni".into(),
                has_entry,
                has_binary,
                warning: None,
            })
        };
        let failed = || {
            Err(Error::Io {
                operation: "list",
                path: "/c".into(),
                source: io::ErrorKind::NotFound.into(),
            })
        };
        for (look, by_agent, is_running, state, told) in [
            (look(true, true), true, true, State::Ok, "10-a.conflist"),
            (look(true, true), false, false, State::Ok, "10-a.conflist"),
            (
                look(false, true),
                true,
                true,
                State::Failed,
                "lacks the plugin's entry",
            ),
            (look(false, false), true, false, State::Warning, "when it starts"),
            (look(true, false), false, false, State::Failed, "no pod can start"),
            (look(false, true), false, true, State::NotAsked, "--cni-install"),
            (failed(), true, false, State::Failed, "cannot list /c"),
            (failed(), false, false, State::NotAsked, "--cni-install"),
        ] {
            let check = plugin("cni.plugin", look, Wanted { by_agent, is_running });
            assert_eq!(check.state, state, "{check:?}");
            assert!(check.seen.contains(told), "{check:?}");
        }
        let warned = Look {
            warning: Some("it was left alone".to_owned()),
            ..look(true, true).unwrap()
        };
        let wanted = Wanted {
            by_agent: true,
            is_running: true,
        };
        assert_eq!(plugin("cni.plugin", Ok(warned), wanted).state, State::Warning);
    }
}
