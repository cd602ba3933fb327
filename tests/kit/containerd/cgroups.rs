//! The pods' cgroups: a parent of a test's own in each hierarchy of the machine, as runc makes them there. Whoever is in them can be found
//! and ended, also when the runtime that put them there is gone.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{
    netns::{left_by_the_dead, unique_prefix},
    proto::cri::LinuxPodSandboxConfig,
};

/// How long killed processes may take to be gone.
const LEAVE_DEADLINE: Duration = Duration::from_secs(20);

/// The parent of the pods' cgroups; runc makes it.
#[derive(Debug)]
pub(super) struct PodCgroups {
    name: String,
}

impl PodCgroups {
    pub(super) fn new() -> Self {
        Self {
            name: unique_prefix(),
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// What has a sandbox made in it.
    pub(super) fn config(&self) -> LinuxPodSandboxConfig {
        LinuxPodSandboxConfig {
            cgroup_parent: format!("/{}", self.name),
        }
    }

    /// Who is in it.
    pub(super) fn processes(&self) -> BTreeSet<i32> {
        self.places().iter().flat_map(|place| processes(place)).collect()
    }

    fn places(&self) -> Vec<PathBuf> {
        let places = hierarchies().into_iter().map(|root| root.join(&self.name));
        places.filter(|place| place.is_dir()).collect()
    }

    /// Ends who is in it, and removes it.
    pub(super) fn end(&self) {
        for place in self.places() {
            end_all(&place);
            remove(&place);
        }
    }
}

/// Removes what dead processes left. What they left in cgroups that are not of pods is ended, and removed by their owner.
pub(super) fn sweep() {
    for root in hierarchies() {
        let entries = fs::read_dir(root).into_iter().flatten().flatten();
        for entry in entries.filter(|entry| entry.file_name().to_str().is_some_and(left_by_the_dead)) {
            end_all(&entry.path());
            remove(&entry.path());
        }
    }
}

/// Ends all that is in a cgroup and below it, and waits until it is gone.
pub(super) fn end_all(cgroup: &Path) {
    let end = Instant::now() + LEAVE_DEADLINE;
    loop {
        let found = processes(cgroup);
        if found.is_empty() {
            return;
        }
        if Instant::now() > end {
            eprintln!("{}: {found:?} do not end", cgroup.display());
            return;
        }
        for pid in found {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// The hierarchies of this machine, of either version.
fn hierarchies() -> Vec<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let fields = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    fields
        .filter(|fields| matches!(fields.get(2), Some(&("cgroup" | "cgroup2"))))
        .map(|fields| fields[1].into())
        .collect()
}

fn processes(cgroup: &Path) -> BTreeSet<i32> {
    let own = fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
    let mut found: BTreeSet<i32> = own.lines().filter_map(|line| line.parse().ok()).collect();
    found.extend(below(cgroup).iter().flat_map(|child| processes(child)));
    found
}

fn below(cgroup: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(cgroup).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    paths.filter(|path| path.is_dir()).collect()
}

/// From the bottom up; a cgroup is busy until its last process has been taken leave of.
fn remove(cgroup: &Path) {
    below(cgroup).iter().for_each(|child| remove(child));
    let end = Instant::now() + LEAVE_DEADLINE;
    loop {
        match fs::remove_dir(cgroup) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && Instant::now() < end => {
                thread::sleep(Duration::from_millis(10));
            }
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                eprintln!("removing {}: {error}", cgroup.display());
                return;
            }
            _ => return,
        }
    }
}
