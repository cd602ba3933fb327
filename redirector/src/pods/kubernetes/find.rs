//! Finds the network namespaces of pods by the processes in them, for pods of which no plugin has told.
//!
//! A namespace is taken for a pod's when a process of the pod's cgroup is in it, it is not the node's, and one of its interfaces has
//! one of the pod's addresses. Of several, the one of the oldest process counts: the sandbox's, not one that an application made
//! (istio#61211, #55170). What does not fit is closed again.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    net::IpAddr,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use crate::{
    mesh::pod::PodUid,
    sys::{
        interfaces,
        netns::{Netns, NetnsId},
    },
};

/// Where container runtimes mount the namespaces of pods.
const MOUNTS: &str = "/var/run/netns";

/// A pod that is looked for.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    /// The UIDs by which its cgroup may be named.
    pub(super) uids: Vec<PodUid>,
    /// Its addresses.
    pub(super) addresses: Vec<IpAddr>,
}

/// A namespace that was found.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) netns: Netns,
    /// Where it can be opened again.
    pub(super) path: PathBuf,
}

/// A process that may be of a pod.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Process {
    /// In ticks since the machine started.
    started: u64,
    pid: u32,
    netns: u64,
}

/// Looks for all of `wanted`, which are told apart by their first UID. Blocking: it looks at every process.
///
/// # Errors
/// Those of reading `/proc`.
pub(super) fn find(wanted: &[Wanted]) -> io::Result<Vec<Option<Found>>> {
    let mut candidates: BTreeMap<usize, BTreeSet<Process>> = BTreeMap::new();
    let node = Netns::open(Path::new("/proc/1/ns/net")).map(|netns| netns.id());
    let own = Netns::current()?.id();
    let is_node = |ino: u64| own.ino == ino || node.as_ref().is_ok_and(|id| id.ino == ino);
    let index: BTreeMap<&str, usize> = wanted
        .iter()
        .enumerate()
        .flat_map(|(index, wanted)| wanted.uids.iter().map(move |uid| (uid.as_str(), index)))
        .collect();
    for entry in fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // A process that ends meanwhile is none of a pod.
        let Some(of) = pod_of(pid).and_then(|uid| index.get(uid.as_str()).copied()) else {
            continue;
        };
        let Some(process) = look(pid).filter(|process| !is_node(process.netns)) else {
            continue;
        };
        candidates.entry(of).or_default().insert(process);
    }
    let mut mounted = None;
    let found = wanted.iter().enumerate().map(|(index, wanted)| {
        let mut seen = BTreeSet::new();
        let processes = candidates.remove(&index).unwrap_or_default();
        let mut distinct = processes.into_iter().filter(|process| seen.insert(process.netns));
        let netns = distinct.find_map(|process| open(&process, wanted))?;
        let mounts = mounted.get_or_insert_with(mounts);
        let (pid, netns) = netns;
        let path = mounts.get(&netns.id()).cloned();
        Some(Found {
            path: path.unwrap_or_else(|| format!("/proc/{pid}/ns/net").into()),
            netns,
        })
    });
    Ok(found.collect())
}

fn look(pid: u32) -> Option<Process> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    Some(Process {
        started: started(&stat)?,
        pid,
        netns: fs::metadata(format!("/proc/{pid}/ns/net")).ok()?.ino(),
    })
}

/// Field 22 of proc_pid_stat(5). The name before it may hold anything, parentheses too.
fn started(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// Opens a candidate, if it is still the process that it was, and its namespace has an address of the pod.
fn open(process: &Process, wanted: &Wanted) -> Option<(u32, Netns)> {
    let netns = Netns::open(Path::new(&format!("/proc/{}/ns/net", process.pid))).ok()?;
    // The number may be another process's by now.
    let again = pod_of(process.pid).is_some_and(|uid| wanted.uids.iter().any(|one| one.as_str() == uid));
    if !again || look(process.pid)? != *process || netns.id().ino != process.netns {
        return None;
    }
    let addresses = interfaces::interface_addresses(&netns).ok()?;
    let is_its = addresses
        .iter()
        .any(|found| !found.loopback && wanted.addresses.contains(&found.address));
    is_its.then_some((process.pid, netns))
}

/// The mounted namespaces, which outlive each single process of their pods.
fn mounts() -> BTreeMap<NetnsId, PathBuf> {
    let entries = fs::read_dir(MOUNTS).into_iter().flatten().flatten();
    let named = entries.filter_map(|entry| {
        let path = entry.path();
        Some((Netns::open(&path).ok()?.id(), path))
    });
    named.collect()
}

/// The UID of the pod that a process is of, by its cgroup.
fn pod_of(pid: u32) -> Option<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    text.lines().find_map(pod_in)
}

/// The pod's UID in a line of `/proc/PID/cgroup`. With kubelet's driver cgroupfs it is `kubepods/[QOS/]pod<uid>`, with systemd's
/// `…kubepods.slice/[…-QOS.slice/]…-pod<uid>.slice`, where `_` stands for `-` (kubelet's `cm/cgroup_manager_linux.go`). Names
/// further down are the pod's own choice, and could be another's.
fn pod_in(line: &str) -> Option<String> {
    let path = line.splitn(3, ':').nth(2)?;
    let slice = |part: &str| Some(part.strip_suffix(".slice")?.to_owned());
    let is_root =
        |part: &&str| *part == "kubepods" || slice(part).is_some_and(|name| name.ends_with("kubepods"));
    let of = |part: &str| match slice(part) {
        Some(name) => Some(name.rsplit_once("-pod")?.1.replace('_', "-")),
        None => part.strip_prefix("pod").map(str::to_owned),
    };
    let mut below = path.split('/').skip_while(|part| !is_root(part)).skip(1);
    let (first, second) = (below.next()?, below.next());
    let uid = of(first).or_else(|| {
        let name = slice(first).unwrap_or_else(|| first.to_owned());
        let is_qos = ["burstable", "besteffort"].iter().any(|qos| name.ends_with(qos));
        second.filter(|_| is_qos).and_then(of)
    });
    uid.filter(|uid| !uid.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_s_pod_is_in_its_cgroup() {
        const UID: &str = "0c1e7a3f-11aa-4bbb-8ccc-0123456789ab";
        for (line, expected) in [
            (format!("0::/kubepods/burstable/pod{UID}/abc"), Some(UID)),
            (format!("0::/kubepods/pod{UID}"), Some(UID)),
            (
                format!(
                    "0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{}.slice/cri-containerd-x.scope",
                    UID.replace('-', "_")
                ),
                Some(UID),
            ),
            (format!("4:memory:/kubepods/besteffort/pod{UID}/x"), Some(UID)),
            (format!("0::/kind/kubelet/kubepods/pod{UID}/x"), Some(UID)),
            (
                format!(
                    "0::/docker/1/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/\
                     kubelet-kubepods-burstable-pod{}.slice/cri-containerd-x.scope",
                    UID.replace('-', "_")
                ),
                Some(UID),
            ),
            (format!("0::/../kubelet/kubepods/pod{UID}/x"), Some(UID)),
            // What a pod makes below its own.
            (format!("0::/kubepods/pod{UID}/kubepods/podother"), Some(UID)),
            ("0::/kubepods/burstable/x/podother".to_owned(), None),
            ("0::/kubepods/x/podother".to_owned(), None),
            ("0::/user.slice/podother".to_owned(), None),
            ("0::/system.slice/containerd.service".to_owned(), None),
            ("0::/kubepods/pod".to_owned(), None),
            ("0::/".to_owned(), None),
            (String::new(), None),
        ] {
            assert_eq!(pod_in(&line).as_deref(), expected, "{line}");
        }
    }

    #[test]
    fn the_start_of_a_process_is_read_past_its_name() {
        let fields: Vec<String> = (3..=30).map(|field| field.to_string()).collect();
        let stat = format!("77 (a) b (c)) {}", fields.join(" "));
        assert_eq!(started(&stat), Some(22));
        assert_eq!(started("77 (a"), None);
        let own = fs::read_to_string("/proc/self/stat").unwrap();
        assert!(started(&own).unwrap() > 0);
    }

    #[test]
    fn who_is_not_there_is_not_found() {
        let wanted = Wanted {
            uids: vec!["no-such-pod".parse().unwrap()],
            addresses: vec![[10, 0, 0, 1].into()],
        };
        let found = find(&[wanted]).unwrap();
        assert!(matches!(found.as_slice(), [None]));
    }
}
