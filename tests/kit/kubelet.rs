//! The cgroups that a kubelet makes for its pods, below one of the test's own, with processes in them.

use std::{
    fs,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use crate::{
    cgroup::{Cgroup, command_in},
    netns::Namespace,
    node::Node,
    process::{Process, command},
    wait,
};

/// Cgroups and processes of pods; they end with it.
pub struct Kubelet {
    processes: Vec<Process>,
    directories: Vec<PathBuf>,
    root: Cgroup,
    logs: PathBuf,
}

impl Kubelet {
    /// One of a node, without pods.
    ///
    /// # Panics
    /// When there can be no cgroup.
    pub fn new(node: &Node) -> Self {
        let root = Cgroup::new();
        let kubepods = root.path().join("kubepods");
        fs::create_dir(&kubepods).unwrap();
        Self {
            processes: Vec::new(),
            directories: vec![kubepods],
            root,
            logs: node.directory().to_owned(),
        }
    }

    /// The cgroup of the pod with `uid`.
    ///
    /// # Panics
    /// When it cannot be made.
    pub fn cgroup(&mut self, uid: &str) -> PathBuf {
        let directory = self.root.path().join("kubepods").join(format!("pod{uid}"));
        if !directory.exists() {
            fs::create_dir(&directory).unwrap();
            self.directories.push(directory.clone());
        }
        directory
    }

    /// Starts a process in the cgroup of the pod with `uid`, in the namespace of `place`.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn run(&mut self, uid: &str, place: &Namespace) {
        let directory = self.cgroup(uid);
        let mut sleep = command(place, "sleep");
        sleep.arg("1000");
        let log = self.logs.join(format!("sleep-{}.log", self.processes.len()));
        let process = Process::start(&mut command_in(&directory, &sleep), &log).unwrap();
        let pid = process.pid().to_string();
        let procs = directory.join("cgroup.procs");
        wait::until("the process to be in its cgroup", || {
            let listed = fs::read_to_string(&procs).unwrap();
            let named = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            (listed.lines().any(|line| line == pid) && named == "sleep\n").then_some(())
        });
        self.processes.push(process);
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        self.processes.clear();
        for directory in self.directories.iter().rev() {
            // The kernel takes leave of processes that have ended after their parent has.
            let end = Instant::now() + Duration::from_secs(5);
            while fs::remove_dir(directory).is_err() && Instant::now() < end {
                thread::sleep(Duration::from_millis(10));
            }
        }
    }
}
