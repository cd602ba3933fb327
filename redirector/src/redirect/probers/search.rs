//! The search for a node's probers: kubelet by its process or its unit, or the cgroups that the operator names.

use std::{
    collections::BTreeSet,
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use redirector_common::probes::ANY_OF_NODE;

use super::{Rule, Sources, View};
use crate::sys::{
    cgroups::{self, Hierarchy},
    netns::NetnsId,
};

/// Names of processes that are, or hold, a kubelet, as the kernel tells them: at most 15 bytes. k3s names its process after its role.
const KUBELETS: [&str; 6] = [
    "kubelet",
    "kubelite",
    "k3s-server",
    "k3s-agent",
    "k0s",
    "hyperkube",
];

/// The units of kubelets: of kubeadm's packages, EKS, Talos, k3s, RKE2, k0s and MicroK8s.
const UNITS: [&str; 10] = [
    "system.slice/kubelet.service",
    "runtime.slice/kubelet.service",
    "podruntime/kubelet",
    "system.slice/k3s.service",
    "system.slice/k3s-agent.service",
    "system.slice/rke2-server.service",
    "system.slice/rke2-agent.service",
    "system.slice/k0sworker.service",
    "system.slice/k0scontroller.service",
    "system.slice/snap.microk8s.daemon-kubelite.service",
];

/// Looks without a search of all processes, after one that found no kubelet: it takes some ten milliseconds per thousand.
const LOOKS_WITHOUT_SEARCH: u32 = 2;

/// A cgroup of probers.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Prober {
    /// The process by which it was found.
    pid: Option<u32>,
    directory: PathBuf,
    id: u64,
}

/// Looks for the probers, again and again: a kubelet that is restarted may have another cgroup.
pub(in crate::redirect) struct Search {
    sources: Sources,
    node: NetnsId,
    hierarchy: Option<Hierarchy>,
    known: Vec<Prober>,
    reason: String,
    /// Why a kubelet that there is can't be told from others.
    untold: Option<String>,
    /// Looks until the next search, as long as there was nothing to find.
    rest: u32,
}

impl Search {
    /// Begins; `node` is the namespace whose processes are the node's.
    pub(in crate::redirect) fn new(sources: Sources, node: NetnsId) -> io::Result<Self> {
        Ok(Self {
            hierarchy: Hierarchy::find()?,
            sources,
            node,
            known: Vec::new(),
            reason: String::new(),
            untold: None,
            rest: 0,
        })
    }

    /// Looks: what the set of probers is now, for the programs and for people.
    pub(in crate::redirect) fn look(&mut self) -> (BTreeSet<u64>, View) {
        let view = |rule, reason: &str| View {
            rule,
            cgroups: Vec::new(),
            reason: reason.to_owned(),
            as_asked: true,
        };
        let any = BTreeSet::from([ANY_OF_NODE]);
        match (&self.sources, self.hierarchy.clone()) {
            (Sources::None, _) => return (BTreeSet::new(), view(Rule::None, "so configured")),
            (Sources::Node, _) => return (any, view(Rule::Node, "so configured")),
            (Sources::Auto | Sources::Cgroups(_), None) => {
                let reason =
                    "no cgroup2 is mounted here, so the node's processes can't be told from each other";
                let view = View {
                    as_asked: false,
                    ..view(Rule::Node, reason)
                };
                return (any, view);
            }
            (Sources::Cgroups(paths), Some(hierarchy)) => {
                let exists = |path: &PathBuf| {
                    let directory = hierarchy.resolve(path);
                    let id = cgroups::id(&directory).ok()?;
                    Some(Prober {
                        pid: None,
                        directory,
                        id,
                    })
                };
                self.known = paths.iter().filter_map(exists).collect();
                self.reason = match paths.len() - self.known.len() {
                    0 => "so configured".to_owned(),
                    missing => format!("so configured; {missing} do not exist"),
                };
            }
            (Sources::Auto, Some(hierarchy)) => {
                self.look_for_kubelet(&hierarchy);
                if self.reason.is_empty() {
                    let reason = self.untold.as_deref().unwrap_or("no kubelet has been found");
                    let view = View {
                        as_asked: self.untold.is_none(),
                        ..view(Rule::Node, reason)
                    };
                    return (any, view);
                }
            }
        }
        let cgroups = self.known.iter().map(|prober| prober.directory.clone()).collect();
        let wanted = match &self.sources {
            Sources::Cgroups(paths) => paths.len(),
            _ => 1,
        };
        let untold = self.untold.iter().map(|why| format!("; but {why}"));
        let reason = self.reason.clone() + &untold.collect::<String>();
        let view = View {
            cgroups,
            as_asked: self.known.len() >= wanted && self.untold.is_none(),
            ..view(Rule::Cgroups, &reason)
        };
        (self.known.iter().map(|prober| prober.id).collect(), view)
    }

    /// Leaves the reason empty if there has never been one. Once there was, the rule stays as narrow as it is.
    fn look_for_kubelet(&mut self, hierarchy: &Hierarchy) {
        let same = |prober: &Prober| match prober.pid {
            Some(pid) => matches!(self.of_kubelet(hierarchy, pid), Some(Ok(found)) if found == *prober),
            None => cgroups::id(&prober.directory).is_ok_and(|id| id == prober.id),
        };
        let settled = !self.known.is_empty() && self.known.iter().all(same);
        if settled && self.untold.is_none() {
            return;
        }
        if self.rest > 0 {
            self.rest -= 1;
            return;
        }
        let kubelets = processes().filter_map(|pid| self.of_kubelet(hierarchy, pid));
        let kubelets = kubelets.collect();
        self.take(kubelets, || {
            UNITS.iter().find_map(|unit| {
                let directory = hierarchy.resolve(Path::new(unit));
                let id = cgroups::id(&directory).ok()?;
                Some(Prober {
                    pid: None,
                    directory,
                    id,
                })
            })
        });
    }

    /// Takes over what a search has found: kubelets, or why one can't be told from others; without any, a unit.
    fn take(&mut self, kubelets: Vec<Result<Prober, String>>, unit: impl FnOnce() -> Option<Prober>) {
        let mut found: Vec<Prober> = Vec::new();
        self.untold = None;
        for kubelet in kubelets {
            match kubelet {
                Ok(prober) if found.iter().any(|other| other.id == prober.id) => {}
                Ok(prober) if found.len() < Sources::MAX_CGROUPS => found.push(prober),
                Ok(_) => {}
                Err(why) => self.untold = Some(why),
            }
        }
        let mut reason = "kubelet's, found by its process";
        if found.is_empty() {
            reason = "kubelet's, found by its unit";
            found.extend(unit());
        }
        if !found.is_empty() {
            self.reason = reason.to_owned();
        } else if !self.reason.is_empty() {
            self.reason = "kubelet's, which is gone; it is looked for".to_owned();
        }
        if self.untold.is_some() || self.reason.is_empty() {
            self.rest = LOOKS_WITHOUT_SEARCH;
        }
        self.known = found;
    }

    /// The cgroup of a process, if it is a kubelet, or why that does not tell it from others. Its name is its own word, so it must be
    /// root's as well, and in the node's namespaces: a pod on the node's network has processes of its own.
    fn of_kubelet(&self, hierarchy: &Hierarchy, pid: u32) -> Option<Result<Prober, String>> {
        let process = PathBuf::from(format!("/proc/{pid}"));
        let comm = fs::read_to_string(process.join("comm")).ok()?;
        if !KUBELETS.contains(&comm.trim_end()) {
            return None;
        }
        let netns = fs::metadata(process.join("ns/net")).ok()?;
        let of_node = (netns.dev(), netns.ino()) == (self.node.dev, self.node.ino)
            && is_roots_and_not_nested(&fs::read_to_string(process.join("status")).ok()?);
        if !of_node {
            return None;
        }
        let found = hierarchy
            .of_process(pid)
            .and_then(|(_, directory)| Ok((cgroups::id(&directory)?, directory)));
        match found {
            Ok((_, directory)) if cgroups::is_root(&directory) => Some(Err(format!(
                "kubelet (process {pid}) is in the root of all cgroups, where all processes are"
            ))),
            Ok((id, directory)) => Some(Ok(Prober {
                pid: Some(pid),
                directory,
                id,
            })),
            // It has ended meanwhile.
            Err(_) if !process.exists() => None,
            Err(error) => Some(Err(format!(
                "the cgroup of kubelet (process {pid}) can't be told: {error}"
            ))),
        }
    }
}

/// Whether `/proc/PID/status` is that of a process of root's that is not in a PID namespace below ours (proc(5)).
fn is_roots_and_not_nested(status: &str) -> bool {
    let values = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        Some(line.split_ascii_whitespace().collect::<Vec<_>>())
    };
    let roots = values("Uid:").is_some_and(|uids| !uids.is_empty() && uids.iter().all(|uid| *uid == "0"));
    roots && values("NSpid:").is_some_and(|pids| pids.len() == 1)
}

/// The processes that there are.
fn processes() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::netns::Netns;

    #[test]
    fn a_kubelet_is_roots_and_the_nodes() {
        for (uids, pids, expected) in [
            ("0\t0\t0\t0", "812", true),
            ("1000\t0\t0\t0", "812", false),
            ("0\t0\t0\t1000", "812", false),
            ("0\t0\t0\t0", "812\t7", false),
            ("", "812", false),
        ] {
            let status = format!("Name:\tkubelet\nUid:\t{uids}\nGid:\t0\nNSpid:\t{pids}\n");
            assert_eq!(is_roots_and_not_nested(&status), expected, "{status}");
        }
        assert!(!is_roots_and_not_nested("Uid:\t0\t0\t0\t0\n"));
    }

    fn search(sources: Sources, hierarchy: Option<Hierarchy>) -> Search {
        Search {
            hierarchy,
            ..Search::new(sources, Netns::current().unwrap().id()).unwrap()
        }
    }

    #[test]
    fn without_cgroup2_any_process_of_the_node_will_do() {
        for (sources, rule, any) in [
            (Sources::Auto, Rule::Node, true),
            ("/x".parse().unwrap(), Rule::Node, true),
            (Sources::Node, Rule::Node, true),
            (Sources::None, Rule::None, false),
        ] {
            let (ids, view) = search(sources, None).look();
            assert_eq!(view.rule, rule);
            assert_eq!(ids.contains(&ANY_OF_NODE), any);
        }
    }

    #[test]
    fn a_kubelet_that_cannot_be_told_from_others_is_told_of() {
        let Some(hierarchy) = Hierarchy::find().unwrap() else {
            return;
        };
        let mut search = search(Sources::Auto, Some(hierarchy));
        let kubelet = |id| Prober {
            pid: Some(7),
            directory: "/a/kubelet".into(),
            id,
        };
        let untold = || Err("its cgroup can't be told".to_owned());
        let (any, one) = (BTreeSet::from([ANY_OF_NODE]), BTreeSet::from([5]));
        let node = "those of any process of the node (";
        for (found, ids, said, as_asked) in [
            (vec![], any.clone(), format!("{node}no kubelet has been found)"), true),
            (
                vec![untold()],
                any,
                format!("{node}its cgroup can't be told)"),
                false,
            ),
            (
                vec![Ok(kubelet(5)), Ok(kubelet(5))],
                one.clone(),
                "those of /a/kubelet (kubelet's, found by its process)".to_owned(),
                true,
            ),
            (
                vec![untold(), Ok(kubelet(5))],
                one,
                "those of /a/kubelet (kubelet's, found by its process; but its cgroup can't be told)".to_owned(),
                false,
            ),
            // Once there was one, nobody else gets its right.
            (
                vec![untold()],
                BTreeSet::new(),
                "those of no cgroup at present (kubelet's, which is gone; it is looked for; but its cgroup can't be told)"
                    .to_owned(),
                false,
            ),
        ] {
            search.take(found, || None);
            // So that the next look does not search.
            search.rest = 1;
            let (set, view) = search.look();
            assert_eq!(view.to_string(), said);
            assert_eq!((set, view.as_asked), (ids, as_asked), "{said}");
        }
    }

    #[test]
    fn a_cgroup_that_is_not_there_lets_nobody_in() {
        let hierarchy = Hierarchy::find().unwrap();
        if hierarchy.is_none() {
            return;
        }
        let (ids, view) = search("/no/such/cgroup".parse().unwrap(), hierarchy).look();
        assert_eq!((ids.len(), view.rule), (0, Rule::Cgroups));
        assert_eq!(
            view.to_string(),
            "those of no cgroup at present (so configured; 1 do not exist)"
        );
    }
}
