//! What this process may do: rights, limits, and the kernel's switches.

use std::io;

use nix::sys::resource::{Resource, getrlimit};

use super::Check;
use crate::{config::Config, sys::process};

/// Files for a node of some hundred pods: two for a connection, and some for each pod.
const FEW_FILES: u64 = 65_536;

pub(super) fn checks(_config: &Config) -> Vec<Check> {
    vec![
        rights(process::missing_capabilities()),
        files(
            getrlimit(Resource::RLIMIT_NOFILE)
                .map(|(_, hard)| hard)
                .map_err(io::Error::from),
        ),
        switches(process::switches_can_be_set()),
    ]
}

fn rights(missing: io::Result<Vec<&'static str>>) -> Check {
    let id = "process.capabilities";
    match missing {
        Ok(missing) if missing.is_empty() => {
            Check::ok(id, "this process has the capabilities that an agent needs")
        }
        Ok(missing) => Check::failed(
            id,
            format!("this process lacks {}", missing.join(", ")),
            "run it as root or in the agent's container, or give it these capabilities",
        ),
        Err(error) => Check::failed(
            id,
            format!("cannot find out the capabilities: {error}"),
            "mount /proc",
        ),
    }
}

fn files(hard: io::Result<u64>) -> Check {
    let id = "process.files";
    match hard {
        Ok(hard) if hard >= FEW_FILES => Check::ok(id, format!("up to {hard} open files")),
        Ok(hard) => Check::warning(
            id,
            format!("up to {hard} open files, of which a connection takes two"),
            format!(
                "raise the hard limit to {FEW_FILES} at least (LimitNOFILE= of systemd, ulimit -Hn, the container runtime's limits)"
            ),
        ),
        Err(error) => Check::warning(
            id,
            format!("cannot find out the limit of open files: {error}"),
            "mount /proc",
        ),
    }
}

fn switches(can_be_set: bool) -> Check {
    let id = "process.sysctls";
    match can_be_set {
        true => Check::ok(
            id,
            format!("the kernel's switches can be set in {}", process::sysctls()),
        ),
        false => Check::failed(
            id,
            "/proc/sys is read-only, and the pods' switches cannot be set",
            "in a container, mount the node's /proc at /host/proc",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::State;

    #[test]
    fn what_is_missing_is_named_with_what_mends_it() {
        for (check, state, told) in [
            (rights(Ok(Vec::new())), State::Ok, "has the capabilities"),
            (rights(Ok(vec!["CAP_A", "CAP_B"])), State::Failed, "CAP_A, CAP_B"),
            (
                rights(Err(io::ErrorKind::NotFound.into())),
                State::Failed,
                "cannot find out",
            ),
            (files(Ok(FEW_FILES)), State::Ok, "65536"),
            (files(Ok(1024)), State::Warning, "1024"),
            (switches(true), State::Ok, "/proc/sys"),
            (switches(false), State::Failed, "read-only"),
        ] {
            assert_eq!(check.state, state, "{check:?}");
            assert!(check.seen.contains(told), "{check:?}");
            assert_eq!(check.hint.is_some(), state != State::Ok, "{check:?}");
        }
    }
}
