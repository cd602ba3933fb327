//! `redirector doctor`: what an agent with these settings needs of this node, looked at one by one, each with what was seen and with what
//! mends it. Nothing is changed: what is tried is tried in places made for it.
//!
//! - `kernel`: its version and features, by trying the programs
//! - `process`: rights, limits and switches
//! - `mounts`: the bpffs, cgroups, the state directory
//! - `agents`: agents that run, ports and sockets
//! - `pods`: what others have in the namespaces of the pods and of the node
//! - `plugin`: the CNI plugin
//! - `remote`: control plane, certificate authority, Kubernetes, the clock
//! - `certificates`: those of the agent that runs
//!
//! What was read and what follows from it are apart: the second is pure, and tested by tables.

use std::{
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use serde::Serialize;

use crate::config::Config;

mod agents;
mod certificates;
mod kernel;
mod mounts;
mod plugin;
mod pods;
mod process;
mod remote;

/// Longest time for a group of checks, where nothing else is asked for.
pub const DEADLINE: Duration = Duration::from_secs(15);

/// How it stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum State {
    /// As it must be.
    Ok,
    /// An agent runs with it, and not as well as it could, or perhaps not for long.
    Warning,
    /// An agent does not run with it, or does not do what it is there for.
    Failed,
    /// These settings don't need it, or it cannot be asked here.
    NotAsked,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// Its name, which stays the same.
    pub id: &'static str,
    /// How it stands.
    pub state: State,
    /// What was seen.
    pub seen: String,
    /// What mends it; absent where there is nothing to mend.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

impl Check {
    /// All is well.
    pub(crate) fn ok(id: &'static str, seen: impl Into<String>) -> Self {
        Self::new(id, State::Ok, seen, None)
    }

    fn not_asked(id: &'static str, seen: impl Into<String>) -> Self {
        Self::new(id, State::NotAsked, seen, None)
    }

    fn warning(id: &'static str, seen: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::new(id, State::Warning, seen, Some(hint.into()))
    }

    /// It is to be mended.
    pub(crate) fn failed(id: &'static str, seen: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::new(id, State::Failed, seen, Some(hint.into()))
    }

    fn new(id: &'static str, state: State, seen: impl Into<String>, hint: Option<String>) -> Self {
        Self {
            id,
            state,
            seen: seen.into(),
            hint,
        }
    }
}

/// Checks that are made one after the other.
type Group = (&'static str, fn(&Config) -> Vec<Check>);

const GROUPS: [Group; 8] = [
    ("kernel", kernel::checks),
    ("process", process::checks),
    ("mounts", mounts::checks),
    ("agents", agents::checks),
    ("pods", pods::checks),
    ("plugin", plugin::checks),
    ("remote", remote::checks),
    ("certificates", certificates::checks),
];

/// Makes all checks, group beside group. Blocking.
///
/// What a group has not told by its deadline is told as failed, and is left to itself: it may be in the hands of the kernel.
pub fn run(config: &Config, deadline: Duration) -> Vec<Check> {
    run_groups(&GROUPS, config, deadline)
}

fn run_groups(groups: &[Group], config: &Config, deadline: Duration) -> Vec<Check> {
    let end = Instant::now() + deadline;
    let answers: Vec<_> = groups
        .iter()
        .map(|(name, checks)| {
            let (sender, receiver) = mpsc::channel();
            let (config, checks) = (config.clone(), *checks);
            thread::spawn(move || {
                // Nobody waits any more after the deadline.
                let _ = sender.send(checks(&config));
            });
            (*name, receiver)
        })
        .collect();
    let told = |(name, receiver): (&'static str, mpsc::Receiver<Vec<Check>>)| match receiver
        .recv_timeout(end.saturating_duration_since(Instant::now()))
    {
        Ok(checks) => checks,
        Err(RecvTimeoutError::Timeout) => vec![Check::failed(
            name,
            format!("no answer within {deadline:?}"),
            "look at the load of this node, or give it longer with --deadline",
        )],
        Err(RecvTimeoutError::Disconnected) => vec![Check::failed(
            name,
            "the check itself ended by a fault",
            "what it said is on standard error; please tell its makers",
        )],
    };
    answers.into_iter().flat_map(told).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{planes::Environment, settings::Settings};

    #[test]
    fn a_group_that_says_nothing_or_ends_by_a_fault_fails_alone() {
        let config = Config::load(Settings::default(), None, &Environment::new()).unwrap();
        let groups: [Group; 2] = [
            ("good", |_| vec![Check::ok("good", "it is")]),
            ("faulty", |_| panic!("on purpose")),
        ];
        let states = |groups: &[Group], deadline| {
            let checks = run_groups(groups, &config, deadline);
            let states = checks.iter().map(|check| (check.id, check.state));
            states.collect::<Vec<_>>()
        };
        assert_eq!(
            states(&groups, Duration::from_secs(60)),
            [("good", State::Ok), ("faulty", State::Failed)]
        );
        let silent: Group = ("silent", |_| {
            loop {
                thread::park();
            }
        });
        assert_eq!(states(&[silent], Duration::ZERO), [("silent", State::Failed)]);
    }
}
