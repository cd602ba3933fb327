//! What others have in the namespaces of this node's pods, and in the node's own, where it gets in the way of ours.

use std::time::{Duration, Instant};

use super::Check;
use crate::{
    config::{Config, values::Redirect},
    pods::records::{Records, Remembered},
    redirect::{Error, ebpf::strangers::strangers, iptables::strangers::istio_chains},
    sys::netns::Netns,
    telemetry::Chain,
};

/// Pods are looked into for so long, and the rest is told as such: an answer must be there by the deadline.
const BUDGET: Duration = Duration::from_secs(8);

/// Names in one line.
const NAMED: usize = 3;

pub(super) fn checks(config: &Config) -> Vec<Check> {
    if config.redirect != Redirect::Ebpf {
        return vec![Check::not_asked(
            "pods.rules",
            "rules are in the pods by intent, with this --redirect",
        )];
    }
    let node = Netns::current()
        .map_err(|error| Error::new("opening the node's namespace", error))
        .and_then(|node| istio_chains(&node));
    let mut checks = vec![in_node(node)];
    let Recorded { pods, broken } = match Records::existing(&config.state_dir).look() {
        Ok(remembered) => Recorded::of(remembered),
        Err(error) => {
            checks.push(Check::failed(
                "pods.records",
                Chain(&error).to_string(),
                "run it as root, and look at what --state-dir names: an agent that starts there reads them too",
            ));
            return checks;
        }
    };
    if pods.is_empty() && broken == 0 {
        checks.push(Check::not_asked("pods.rules", "no pod of an agent is recorded"));
        return checks;
    }
    let (mut rules, mut programs) = (Found::default(), Found::default());
    let end = Instant::now() + BUDGET;
    for (name, netns) in &pods {
        if Instant::now() > end {
            break;
        }
        rules.add(name, istio_chains(netns));
        let strangers = strangers(netns);
        programs.add(
            name,
            strangers.map(|all| all.iter().map(ToString::to_string).collect()),
        );
    }
    checks.push(in_pods(&rules, pods.len()));
    checks.push(beside(&programs, pods.len()));
    if broken > 0 {
        checks.push(Check::warning(
            "pods.records",
            format!("{broken} pods have a record that cannot be used, or a namespace that cannot be opened"),
            "run it in the node's mount and PID namespaces; else an agent that starts tells of them",
        ));
    }
    checks
}

/// The pods of an agent.
struct Recorded {
    /// Those that are there, by name.
    pods: Vec<(String, Netns)>,
    /// How many can't be looked into.
    broken: usize,
}

impl Recorded {
    fn of(remembered: Vec<Remembered>) -> Self {
        let (mut pods, mut broken) = (Vec::new(), 0);
        for remembered in remembered {
            let Remembered::Pod(record) = remembered else {
                broken += 1;
                continue;
            };
            let Ok(info) = record.info() else {
                broken += 1;
                continue;
            };
            match record.namespace() {
                Ok(Some(netns)) => pods.push((format!("{}/{}", info.namespace, info.name), netns)),
                // It is gone, or was told by its descriptor.
                Ok(None) => {}
                Err(_) => broken += 1,
            }
        }
        Self { pods, broken }
    }
}

/// What was found in several pods.
#[derive(Debug, Default)]
struct Found {
    looked_at: usize,
    /// Each pod that has something, and what.
    pods: Vec<(String, Vec<String>)>,
    failure: Option<String>,
}

impl Found {
    fn add(&mut self, pod: &str, found: Result<Vec<String>, Error>) {
        match found {
            Ok(found) => {
                self.looked_at += 1;
                if !found.is_empty() {
                    self.pods.push((pod.to_owned(), found));
                }
            }
            Err(error) => {
                self.failure.get_or_insert_with(|| Chain(&error).to_string());
            }
        }
    }

    /// The first of them, in words.
    fn named(&self) -> String {
        let of = |(pod, found): &(String, Vec<String>)| {
            let more = found.len().saturating_sub(NAMED);
            let mut text = found.iter().take(NAMED).cloned().collect::<Vec<_>>().join(", ");
            if more > 0 {
                text.push_str(&format!(" and {more} more"));
            }
            format!("{pod} ({text})")
        };
        let named: Vec<_> = self.pods.iter().take(NAMED).map(of).collect();
        let more = self.pods.len().saturating_sub(NAMED);
        match more {
            0 => named.join("; "),
            more => format!("{}; and {more} more pods", named.join("; ")),
        }
    }

    fn of(&self, all: usize) -> String {
        match self.looked_at == all {
            true => format!("{all} pods"),
            false => format!("{} of {all} pods that were looked into", self.looked_at),
        }
    }
}

fn in_node(chains: Result<Vec<String>, Error>) -> Check {
    let id = "node.rules";
    match chains {
        Ok(chains) if chains.is_empty() => Check::ok(id, "no rules of Istio's are in the node's namespace"),
        Ok(chains) => Check::warning(
            id,
            format!(
                "Istio's CNI agent has rules in the node's namespace: {}",
                chains.join(", ")
            ),
            "see to it that its pods are not this agent's as well: docs/kubernetes.md has the ways to go beside it",
        ),
        Err(error) => unreadable(id, &Chain(&error).to_string()),
    }
}

fn unreadable(id: &'static str, why: &str) -> Check {
    Check::not_asked(id, format!("rules cannot be read: {why}"))
}

fn in_pods(found: &Found, all: usize) -> Check {
    let id = "pods.rules";
    match (&found.failure, found.pods.is_empty()) {
        (_, false) => Check::failed(
            id,
            format!(
                "Istio's rules are in {}, and redirect the same connections",
                found.named()
            ),
            "let Istio's CNI agent let go of these pods, or start them anew; the rules also go with iptables-nft and iptables-legacy in the \
             pod's namespace",
        ),
        (Some(why), true) => unreadable(id, why),
        (None, true) => Check::ok(id, format!("no rules of Istio's in {}", found.of(all))),
    }
}

fn beside(found: &Found, all: usize) -> Check {
    let id = "pods.programs";
    match (&found.failure, found.pods.is_empty()) {
        (_, false) => Check::warning(
            id,
            format!("others have TC programs in {}", found.named()),
            "they stay as they are; one that takes packets away before ours keeps them from being captured",
        ),
        (Some(why), true) => Check::failed(
            id,
            format!("what is attached in the pods cannot be read: {why}"),
            "run it as root, where the agent runs",
        ),
        (None, true) => Check::ok(id, format!("no TC programs of others in {}", found.of(all))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::{planes::Environment, settings::Settings},
        doctor::State,
    };

    fn found(pods: &[(&str, &[&str])]) -> Found {
        let mut found = Found::default();
        for (pod, what) in pods {
            found.add(pod, Ok(what.iter().map(ToString::to_string).collect()));
        }
        found
    }

    #[test]
    fn what_is_in_the_way_is_named_and_told_from_what_is_beside() {
        let many = found(&[
            ("a/b", &["W", "X", "Y", "Z"]),
            ("c/d", &[]),
            ("e/f", &["X"]),
            ("g/h", &["X"]),
            ("i/j", &["X"]),
        ]);
        let named = "a/b (W, X, Y and 1 more); e/f (X); g/h (X); and 1 more pods";
        let check = in_pods(&many, 5);
        assert_eq!(check.state, State::Failed);
        assert!(check.seen.contains(named), "{check:?}");
        assert_eq!(beside(&many, 5).state, State::Warning);
        let none = found(&[("a/b", &[])]);
        assert_eq!(in_pods(&none, 1).state, State::Ok);
        assert!(in_pods(&none, 3).seen.contains("1 of 3 pods"));
        let mut failing = Found::default();
        failing.add("a/b", Err(Error::new("running x", "no such program")));
        assert_eq!(in_pods(&failing, 1).state, State::NotAsked);
        assert_eq!(beside(&failing, 1).state, State::Failed);
    }

    #[test]
    fn records_that_cannot_be_listed_are_told_and_bad_ones_stay_as_they_are() {
        let directory = tempfile::tempdir().unwrap();
        let settings = Settings {
            state_dir: Some(directory.path().to_owned()),
            ..Settings::default()
        };
        let config = Config::load(settings, None, &Environment::new()).unwrap();
        let state = |id: &str| {
            let checks = checks(&config);
            let named = checks.into_iter().find(|check| check.id == id);
            named.map(|check| check.state)
        };
        assert_eq!(state("pods.rules"), Some(State::NotAsked));
        let records = directory.path().join("pods");
        std::fs::write(&records, "no directory").unwrap();
        assert_eq!(state("pods.records"), Some(State::Failed));
        std::fs::remove_file(&records).unwrap();
        std::fs::create_dir(&records).unwrap();
        std::fs::write(records.join("u-1.json"), "no JSON").unwrap();
        assert_eq!(state("pods.records"), Some(State::Warning));
        let left: Vec<_> = std::fs::read_dir(&records)
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert_eq!(left, ["u-1.json"], "a look changes nothing");
    }

    #[test]
    fn rules_of_the_node_are_a_warning() {
        assert_eq!(in_node(Ok(Vec::new())).state, State::Ok);
        assert_eq!(in_node(Ok(vec!["ISTIO_POSTRT".to_owned()])).state, State::Warning);
        assert_eq!(in_node(Err(Error::new("x", "y"))).state, State::NotAsked);
    }
}
