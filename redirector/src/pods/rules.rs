//! The rules of the node's pods: a file, followed as it changes, and what pods say of themselves.
//!
//! ```yaml
//! node:                          # for all pods
//!   excludeOutboundPorts: [22]
//! pods:                          # in order; the later of two that fit a pod is the stronger
//! - namespace: shop
//!   name: db-0                   # without a name, all pods of the namespace
//!   rules:
//!     excludeInboundPorts: 5432,6000-6010
//!     excludeInboundNetworks: 10.0.0.0/8
//! ```
//!
//! `app` opens it and runs the task that follows it; `work` asks what applies to a pod.

use std::{io, path::Path, path::PathBuf, sync::Arc};

use serde::Deserialize;
use tokio::{
    sync::watch,
    time::{MissedTickBehavior, interval},
};
use tokio_util::sync::CancellationToken;

use crate::{
    mesh::pod::PodInfo,
    redirect::{Redirector, overrides::Overrides, rules::Rules},
    sys::follow::{Followed, POLL_INTERVAL},
    telemetry::Chain,
};

/// The rules for all pods of a node, from its rules file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NodeRules {
    node: Overrides,
    pods: Vec<Entry>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    namespace: String,
    name: Option<String>,
    rules: Overrides,
}

/// Why the rules file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It cannot be read.
    #[error("reading the rules file {path}", path = .path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It is not what it should be.
    #[error("{path}: {field}: {problem}", path = .path.display())]
    Invalid {
        /// Which.
        path: PathBuf,
        /// Path of the value, e.g. `pods[0].rules`.
        field: String,
        /// What is wrong, and where.
        problem: String,
    },
}

impl NodeRules {
    /// What applies to a pod that says `own` of itself, where `weakest` is what holds if nobody says anything.
    pub fn of(&self, pod: &PodInfo, own: &Overrides, weakest: &Overrides) -> Rules {
        self.said_of(&pod.namespace, Some(&pod.name), own)
            .or(weakest)
            .into_rules()
    }

    /// What applies to a pod of this name; without one, to those that no entry names.
    fn said_of(&self, namespace: &str, name: Option<&str>, own: &Overrides) -> Overrides {
        let fits = |entry: &&Entry| {
            entry.namespace == namespace && (entry.name.is_none() || entry.name.as_deref() == name)
        };
        let mut said = own.clone();
        for entry in self.pods.iter().rev().filter(fits) {
            said = said.or(&entry.rules);
        }
        said.or(&self.node)
    }

    /// The first rules that no pod could have, by their key, and why.
    fn impossible(&self, refuses: impl Fn(&Rules) -> Option<String>) -> Option<(String, String)> {
        let why = |rules: &Rules| {
            let (items, most) = (rules.items(), Rules::MAX_ITEMS);
            let too_many = || {
                format!(
                    "{items} ports and networks, with what else the file says of these pods; at most {most} are supported"
                )
            };
            (items > most).then(too_many).or_else(|| refuses(rules))
        };
        let of_node = why(&self.node.clone().into_rules()).map(|why| ("node".to_owned(), why));
        let mut entries = self.pods.iter().enumerate();
        of_node.or_else(|| {
            entries.find_map(|(index, entry)| {
                let rules = self.said_of(&entry.namespace, entry.name.as_deref(), &Overrides::default());
                Some((format!("pods[{index}].rules"), why(&rules.into_rules())?))
            })
        })
    }

    fn parse(text: &str, path: &Path, refuses: impl Fn(&Rules) -> Option<String>) -> Result<Self, Error> {
        let blank = |line: &str| line.trim().is_empty() || line.trim_start().starts_with('#');
        let invalid = |field: String, problem: String| Error::Invalid {
            path: path.to_owned(),
            field,
            problem,
        };
        // A writer that truncates first shows an empty file for a moment.
        if text.lines().all(blank) {
            let problem = "is empty; a file without rules is written `pods: []`";
            return Err(invalid("the whole file".into(), problem.into()));
        }
        let yaml = serde_yaml::Deserializer::from_str(text);
        let rules: Self = serde_path_to_error::deserialize(yaml).map_err(|error| {
            let field = match error.path().to_string() {
                path if path == "." => "the whole file".to_owned(),
                path => path,
            };
            invalid(field, error.into_inner().to_string())
        })?;
        match rules.impossible(refuses) {
            Some((field, problem)) => Err(invalid(field, problem)),
            None => Ok(rules),
        }
    }
}

/// A rules file that is followed.
pub struct RulesFile {
    file: Followed,
    /// Puts the rules in force, and may refuse some.
    redirector: Arc<dyn Redirector>,
}

impl RulesFile {
    /// Reads the file for the first time, for pods of `redirector`. Blocking.
    ///
    /// # Errors
    /// When it cannot be read, is not what it should be, or has rules that no pod could have.
    pub fn open(path: &Path, redirector: Arc<dyn Redirector>) -> Result<(Self, NodeRules), Error> {
        let (file, text) = Followed::open(path).map_err(|source| Error::Read {
            path: path.to_owned(),
            source,
        })?;
        let rules = NodeRules::parse(&text, path, |rules| redirector.refuses(rules))?;
        Ok((Self { file, redirector }, rules))
    }

    /// Follows the file until `stop`. Of one that cannot be used, the rules before stay in force.
    pub async fn run(mut self, rules: watch::Sender<Arc<NodeRules>>, stop: CancellationToken) {
        let mut ticks = interval(POLL_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = ticks.tick() => {}
            }
            // A small file: reading it takes less than handing it to another thread.
            match self.look() {
                Ok(None) => {}
                Ok(Some(new)) => {
                    tracing::info!(path = %self.file.path().display(), pods = new.pods.len(), "rules file read again");
                    rules.send_replace(Arc::new(new));
                }
                Err(error) => {
                    tracing::error!(error = %Chain(&error), "rules file not usable; the rules stay as they were");
                }
            }
        }
    }

    fn look(&mut self) -> Result<Option<NodeRules>, Error> {
        let path = self.file.path().to_owned();
        let changed = self.file.look().map_err(|source| Error::Read {
            path: path.clone(),
            source,
        })?;
        changed
            .map(|text| NodeRules::parse(&text, &path, |rules| self.redirector.refuses(rules)))
            .transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::redirect::none::NoRedirect;

    fn pod(namespace: &str, name: &str) -> PodInfo {
        PodInfo {
            uid: "u".parse().unwrap(),
            name: name.into(),
            namespace: namespace.into(),
            service_account: "default".into(),
        }
    }

    fn parse(text: &str) -> Result<NodeRules, Error> {
        let refuses = |rules: &Rules| rules.dns_capture.then(|| "no DNS capture here".to_owned());
        NodeRules::parse(text, Path::new("rules.yaml"), refuses)
    }

    #[test]
    fn the_nearest_word_counts() {
        let rules = parse(
            "node: {excludeOutboundPorts: 1, excludeInboundPorts: 1}\n\
             pods:\n\
             - {namespace: shop, rules: {excludeOutboundPorts: 2}}\n\
             - {namespace: shop, name: db, rules: {excludeOutboundPorts: 3}}\n\
             - {namespace: shop, name: db, rules: {bypassInboundCapture: true}}\n",
        )
        .unwrap();
        let own = Overrides {
            exclude_outbound_ports: Some("4".parse().unwrap()),
            ..Overrides::default()
        };
        for (namespace, name, own, outbound, bypass) in [
            ("other", "db", Overrides::default(), "1", false),
            ("shop", "web", Overrides::default(), "2", false),
            ("shop", "db", Overrides::default(), "3", true),
            ("shop", "db", own, "4", true),
        ] {
            let found = rules.of(&pod(namespace, name), &own, &Overrides::default());
            assert_eq!(
                found.outbound.not_ports.to_string(),
                outbound,
                "{namespace}/{name}"
            );
            assert_eq!(found.inbound.not_ports.to_string(), "1");
            assert_eq!(found.bypass_inbound, bypass);
        }
    }

    #[test]
    fn how_strict_a_pod_is_is_said_by_the_nearest_that_says_it() {
        let file = parse(
            "pods: [{namespace: shop, rules: {strict: true}}, {namespace: old, rules: {strict: false}}]",
        );
        let strict = |strict| Overrides {
            strict,
            ..Overrides::default()
        };
        for (namespace, own, node, expected) in [
            ("other", None, false, false),
            ("other", None, true, true),
            ("shop", None, false, true),
            ("old", None, true, false),
            ("old", Some(true), false, true),
            ("shop", Some(false), true, false),
        ] {
            let rules = file.as_ref().unwrap();
            let found = rules.of(&pod(namespace, "db"), &strict(own), &strict(Some(node)));
            assert_eq!(found.strict, expected, "{namespace} {own:?} {node}");
        }
    }

    #[test]
    fn a_wrong_file_says_what_is_wrong() {
        for (text, problem) in [
            ("", "rules.yaml: the whole file: is empty"),
            ("nodes: {}", "unknown field `nodes`"),
            ("pods: [{name: a, rules: {}}]", "rules.yaml: pods[0]: "),
            ("node: {strict: maybe}", "rules.yaml: node.strict: "),
            (
                "node: {excludeOutboundPorts: [1, x]}",
                "rules.yaml: node.excludeOutboundPorts: ",
            ),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(problem), "{error}");
        }
    }

    #[test]
    fn rules_that_no_pod_could_have_are_refused_by_their_key() {
        let list = |items: usize| {
            (1..=items)
                .map(|port| (2 * port).to_string())
                .collect::<Vec<_>>()
                .join(",")
        };
        let (few, many) = (list(100), list(129));
        let too_many =
            "129 ports and networks, with what else the file says of these pods; at most 128 are supported";
        for (text, problem) in [
            (
                format!("node: {{excludeOutboundPorts: '{many}'}}"),
                format!("rules.yaml: node: {too_many}"),
            ),
            (
                format!(
                    "pods: [{{namespace: a, rules: {{}}}}, {{namespace: a, name: b, rules: {{includeInboundPorts: '{many}'}}}}]"
                ),
                format!("rules.yaml: pods[1].rules: {too_many}"),
            ),
            // Each by itself would do.
            (
                format!(
                    "{{node: {{excludeOutboundPorts: '{few}'}}, pods: [{{namespace: a, rules: {{excludeInboundPorts: '{few}'}}}}]}}"
                ),
                "rules.yaml: pods[0].rules: 200 ports".to_owned(),
            ),
            (
                "node: {dnsCapture: true}".to_owned(),
                "rules.yaml: node: no DNS capture here".to_owned(),
            ),
            (
                "pods: [{namespace: a, rules: {dnsCapture: true}}]".to_owned(),
                "rules.yaml: pods[0].rules: no DNS capture here".to_owned(),
            ),
        ] {
            let error = parse(&text).unwrap_err().to_string();
            assert!(error.contains(&problem), "{error}");
        }
        // The lists of the entry take the place of the node's.
        let replaced = format!(
            "{{node: {{excludeOutboundPorts: '{few}'}}, pods: [{{namespace: a, rules: {{excludeOutboundPorts: '{few}'}}}}]}}"
        );
        parse(&replaced).unwrap();
    }

    #[test]
    fn a_change_is_followed_and_a_bad_one_changes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("rules.yaml");
        let write = |text: &str| {
            let new = directory.path().join("new");
            std::fs::write(&new, text).unwrap();
            std::fs::rename(new, &path).unwrap();
        };
        write("node: {excludeOutboundPorts: 1}");
        let (mut file, before) = RulesFile::open(&path, Arc::new(NoRedirect)).unwrap();
        let mut settle = || file.look().and_then(|first| Ok(first.or(file.look()?)));
        assert_eq!(settle().unwrap(), None);
        write("node: {excludeOutboundPorts: 2}");
        assert_ne!(settle().unwrap().unwrap(), before);
        write("node: 5");
        assert!(matches!(settle(), Err(Error::Invalid { .. })));
        assert_eq!(settle().unwrap(), None);
        write("node: {excludeOutboundPorts: 1}");
        assert_eq!(settle().unwrap().unwrap(), before);
    }

    #[test]
    fn a_file_that_goes_is_told_once_and_changes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("rules.yaml");
        std::fs::write(&path, "node: {excludeOutboundPorts: 1}").unwrap();
        let (mut file, before) = RulesFile::open(&path, Arc::new(NoRedirect)).unwrap();
        // What cannot be read, whoever asks: tests may run as root.
        for unreadable in [false, true] {
            std::fs::remove_file(&path).unwrap();
            if unreadable {
                std::fs::create_dir(&path).unwrap();
            }
            let told: Vec<_> = (0..6).filter_map(|_| file.look().err()).collect();
            assert!(matches!(told.as_slice(), [Error::Read { .. }]), "{told:?}");
            if unreadable {
                std::fs::remove_dir(&path).unwrap();
            }
            std::fs::write(&path, "node: {excludeOutboundPorts: 1}").unwrap();
            for _ in 0..3 {
                assert_eq!(file.look().unwrap(), None, "the same rules are back");
            }
        }
        std::fs::write(&path, "node: {excludeOutboundPorts: 2}").unwrap();
        let changed = (0..3).find_map(|_| file.look().unwrap());
        assert_ne!(changed.unwrap(), before);
    }
}
