//! What runs on a kernel: cases of the suites, chosen by name. What the kernel cannot have is told with its reason, by name.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::process;

/// Cases by suite: those whose names begin so.
type Chosen = &'static [(&'static str, &'static [&'static str])];

/// What a virtual machine has the time for.
///
/// An emulated processor is some thirty times slower than a real one, and what differs between kernels is what the verifier
/// accepts, how programs attach, and which socket a packet finds. The suites of protocols, wrong input and volume show nothing
/// more here than on the machine's own kernel.
const WHOLE: Chosen = &[
    ("prog", &[""]),
    ("kernel", &[""]),
    (
        "e2e",
        &[
            "pod_to_pod_is_hbone",
            "pod_to_outside_passes_through",
            "outside_to_pod_keeps_the_source",
            "self_calls_are_left_alone",
            "udp_is_left_alone",
            "connections_from_before_enrolment_go_on",
            "a_closed_port_is_refused",
            "a_dead_agent_fails_closed",
        ],
    ),
    (
        "lifecycle",
        &[
            "a_killed_agent_is_succeeded",
            "a_stopped_agent_is_succeeded",
            "what_is_removed_is_put_back",
            "pods_that_vanish_leave_nothing",
        ],
    ),
    (
        "load",
        &["no_syn_is_lost_hbone_v4", "no_syn_is_lost_plaintext_v6"],
    ),
];

/// What CI has the time for, some three minutes a kernel.
const QUICK: Chosen = &[
    ("prog", &[""]),
    ("kernel", &[""]),
    (
        "e2e",
        &[
            "pod_to_pod_is_hbone",
            "outside_to_pod_keeps_the_source_v6",
            "a_dead_agent_fails_closed_v4",
        ],
    ),
    ("lifecycle", &["a_killed_agent_is_succeeded"]),
    ("load", &["no_syn_is_lost_hbone_v4"]),
];

/// Endings of cases that CI has no time for: the ways of others to redirect.
const NOT_QUICK: &[&str] = &["_iptables_nft", "_iptables_legacy"];

/// How much runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Extent {
    Whole,
    Quick,
}

impl Extent {
    fn chosen(self) -> Chosen {
        match self {
            Self::Whole => WHOLE,
            Self::Quick => QUICK,
        }
    }

    fn takes(self, name: &str) -> bool {
        self == Self::Whole || !NOT_QUICK.iter().any(|ending| name.ends_with(ending))
    }

    /// Connections of the test with many of them. More than there are ports for the proxy to dial from (61000 to 65535), so
    /// that each is used again within its TIME_WAIT; or only as many as make the client use each of its own again.
    pub(crate) fn churn(self) -> u32 {
        match self {
            Self::Whole => 6000,
            Self::Quick => 2000,
        }
    }
}

/// What not every kernel has, and the cases that would only repeat others without it.
struct Feature {
    what: &'static str,
    since: (u32, u32),
    /// Suite, and how the names of its cases end.
    needed_by: &'static [(&'static str, &'static str)],
}

const FEATURES: &[Feature] = &[
    Feature {
        what: "TCX links",
        since: (6, 6),
        needed_by: &[("e2e", "_tcx"), ("lifecycle", "_tcx")],
    },
    // Those that end with `_old_kernel` have clsact without it.
    Feature {
        what: "the device of a packet in SK_LOOKUP (ingress_ifindex)",
        since: (5, 17),
        needed_by: &[("e2e", "_clsact")],
    },
];

/// A test of a suite.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Case {
    pub(crate) suite: String,
    pub(crate) name: String,
}

impl std::fmt::Display for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.suite, self.name)
    }
}

/// What is to run, and what cannot.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    pub(crate) cases: Vec<Case>,
    pub(crate) not_applicable: Vec<(Case, String)>,
}

/// A suite's binary and all of its cases.
#[derive(Debug)]
pub(crate) struct Suite {
    pub(crate) name: &'static str,
    pub(crate) binary: PathBuf,
    cases: Vec<String>,
}

impl Suite {
    /// Asks the binary for its cases.
    pub(crate) fn list(name: &'static str, binary: &Path) -> Result<Self> {
        let listing = process::output(process::command(binary).arg("--list"));
        let listing = listing.with_context(|| format!("{} does not list its cases", binary.display()))?;
        Ok(Self {
            name,
            binary: binary.to_owned(),
            cases: listing.lines().filter_map(listed).collect(),
        })
    }
}

/// The names of the suites that are chosen from.
pub(crate) fn suites() -> impl Iterator<Item = &'static str> {
    WHOLE.iter().map(|(name, _)| *name)
}

/// The name in a line of `--list`. What cannot run here, for want of root, has the reason in front.
fn listed(line: &str) -> Option<String> {
    let name = line.strip_suffix(": test")?;
    let name = name.rsplit_once("] ").map_or(name, |(_, name)| name);
    Some(name.to_owned())
}

impl Plan {
    /// Chooses the cases for a kernel of this version. `filter` is part of a name, or a suite.
    pub(crate) fn make(
        suites: &[Suite],
        version: (u32, u32),
        filter: Option<&str>,
        extent: Extent,
    ) -> Result<Self> {
        let mut plan = Self::default();
        for (suite, beginnings) in extent.chosen() {
            let suite = suites
                .iter()
                .find(|known| known.name == *suite)
                .with_context(|| format!("there is no suite {suite}"))?;
            for beginning in *beginnings {
                let mut cases = suite
                    .cases
                    .iter()
                    .filter(|name| name.starts_with(beginning))
                    .peekable();
                if cases.peek().is_none() {
                    bail!(
                        "no case of suite {} begins with `{beginning}`: the list in xtask/src/kernel/plan.rs is old",
                        suite.name
                    );
                }
                cases
                    .filter(|name| extent.takes(name))
                    .filter(|name| filter.is_none_or(|filter| filter == suite.name || name.contains(filter)))
                    .for_each(|name| plan.add(suite.name, name, version));
            }
        }
        Ok(plan)
    }

    fn add(&mut self, suite: &str, name: &str, version: (u32, u32)) {
        let case = Case {
            suite: suite.to_owned(),
            name: name.to_owned(),
        };
        let lacking = FEATURES.iter().find(|feature| {
            let needs = |(by, ending): &(&str, &str)| *by == suite && name.ends_with(ending);
            version < feature.since && feature.needed_by.iter().any(needs)
        });
        match lacking {
            Some(Feature { what, since, .. }) => {
                let reason = format!("{what} came with {}.{}", since.0, since.1);
                self.not_applicable.push((case, reason));
            }
            None => self.cases.push(case),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every suite that is chosen from, with what is chosen in every way to attach.
    fn all() -> Vec<Suite> {
        WHOLE
            .iter()
            .map(|(name, beginnings)| Suite {
                name,
                binary: PathBuf::new(),
                cases: beginnings
                    .iter()
                    .flat_map(|beginning| {
                        [
                            "v4_tcx",
                            "v6_tcx",
                            "v4_clsact",
                            "v4_old_kernel",
                            "v4_iptables_nft",
                        ]
                        .map(|ending| format!("{beginning}_{ending}"))
                    })
                    .collect(),
            })
            .collect()
    }

    #[test]
    fn what_a_kernel_lacks_is_told_by_name() {
        let suites = all();
        let old = Plan::make(&suites, (5, 10), None, Extent::Whole).unwrap();
        let gone =
            |case: &Case| case.suite == "e2e" && ["_tcx", "_clsact"].iter().any(|by| case.name.ends_with(by));
        assert!(!old.cases.iter().any(gone));
        let told = |plan: &Plan, name: &str| {
            plan.not_applicable
                .iter()
                .any(|(case, reason)| case.name == name && !reason.is_empty())
        };
        assert!(told(&old, "pod_to_pod_is_hbone_v4_tcx") && told(&old, "pod_to_pod_is_hbone_v4_clsact"));
        let middle = Plan::make(&suites, (6, 1), None, Extent::Whole).unwrap();
        assert!(told(&middle, "pod_to_pod_is_hbone_v4_tcx"));
        assert!(!told(&middle, "pod_to_pod_is_hbone_v4_clsact"));
        let new = Plan::make(&suites, (6, 12), None, Extent::Whole).unwrap();
        assert!(new.not_applicable.is_empty());
        assert_eq!(new.cases.len(), old.cases.len() + old.not_applicable.len());
    }

    #[test]
    fn a_name_that_is_gone_is_an_error() {
        let mut suites = all();
        suites
            .iter_mut()
            .for_each(|suite| suite.cases.retain(|name| !name.contains("succeeded")));
        let error = Plan::make(&suites, (6, 1), None, Extent::Whole)
            .unwrap_err()
            .to_string();
        assert!(error.contains("a_killed_agent_is_succeeded"), "{error}");
    }

    #[test]
    fn the_quick_ones_are_among_all() {
        let whole = Plan::make(&all(), (6, 12), None, Extent::Whole).unwrap();
        let quick = Plan::make(&all(), (6, 12), None, Extent::Quick).unwrap();
        assert!(quick.cases.iter().all(|case| whole.cases.contains(case)));
        assert!(!quick.cases.iter().any(|case| case.name.contains("iptables")));
        assert!(suites().all(|suite| quick.cases.iter().any(|case| case.suite == suite)));
        let filtered = Plan::make(&all(), (6, 12), Some("killed"), Extent::Quick).unwrap();
        assert!(filtered.cases.len() < quick.cases.len() && !filtered.cases.is_empty());
    }

    #[test]
    fn listings_are_read() {
        assert_eq!(listed("a_case: test").as_deref(), Some("a_case"));
        assert_eq!(listed("[needs root] a_case: test").as_deref(), Some("a_case"));
        assert_eq!(listed("3 tests"), None);
    }
}
