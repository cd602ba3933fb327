//! `redirector uninstall`: removes from the node whatever agents with these directories have left, and nothing else.
//!
//! Pods are known by their records and by what is pinned: a namespace that neither names is not looked into, since another
//! agent, with directories of its own, may have put there what looks like ours. What cannot be removed is told and left, and
//! the rest goes on.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use crate::{
    cni::install::{self, Whose},
    config::{Config, PodSource},
    identity::dev_ca,
    mesh::pod::PodUid,
    pods::{
        cni_server,
        records::{Record, Records, Remembered},
        socket_file::{self, BindError},
    },
    redirect::{self, Leftovers},
    sys::lock::{DirectoryLock, LockError},
    telemetry::Chain,
};

/// Why nothing was removed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An agent runs.
    #[error(
        "{path} ({flag}) is in use: {source}; stop the agent first, or name the directories of another one",
        path = .path.display()
    )]
    AgentRuns {
        /// What it holds.
        path: PathBuf,
        /// The flag that names another.
        flag: &'static str,
        /// Who.
        source: LockError,
    },
    /// It cannot be found out whether one runs.
    #[error("cannot lock {path} ({flag})", path = .path.display())]
    Lock {
        /// What.
        path: PathBuf,
        /// The flag that names another.
        flag: &'static str,
        /// Why not.
        #[source]
        source: LockError,
    },
}

/// What became of it.
#[derive(Debug, Default)]
pub struct Report {
    /// Pods of which nothing of ours is left.
    pub released: usize,
    /// What could not be removed, and why: a line each.
    pub failures: Vec<String>,
}

impl Report {
    fn failed(&mut self, what: impl Into<String>) {
        self.failures.push(what.into());
    }

    fn tried(&mut self, what: &str, path: &Path, result: io::Result<()>) {
        match result {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                self.failed(format!("{what} {}: {error}", path.display()));
            }
            _ => {}
        }
    }
}

/// Removes everything: the capture of every pod, what all pods share, and the agent's files; the development CA's too if
/// `remove_ca`. Blocking.
///
/// # Errors
/// Only those for which nothing was done; what went wrong after that is in the report.
pub fn run(config: &Config, remove_ca: bool) -> Result<Report, Error> {
    let _state = lock(&config.state_dir, "--state-dir")?;
    let _pins = lock(&config.bpffs_dir, "--bpffs-dir")?;
    let mut report = Report::default();
    remove_socket_and_plugin(&mut report, config);
    let leftovers = redirect::leftovers(&config.bpffs_dir, config.iptables());
    release(&mut report, &Records::existing(&config.state_dir), &leftovers);
    remove_files(&mut report, config, remove_ca);
    Ok(report)
}

/// Before the pods are let go: a pod that starts meanwhile would wait for an agent that is gone. Where somebody serves the socket,
/// both are theirs.
fn remove_socket_and_plugin(report: &mut Report, config: &Config) {
    // Whose pods come from elsewhere has neither.
    let PodSource::Cni(socket) = &config.pods else {
        return;
    };
    match socket_file::remove_stale(socket, cni_server::FLAG) {
        // What is no socket is not ours.
        Ok(()) | Err(BindError::NotASocket { .. }) => {}
        Err(error) => return report.failed(Chain(&error).to_string()),
    }
    if let Err(error) = install::patiently(|| install::remove(&config.cni.installation, Whose::Socket)) {
        report.failed(Chain(&error).to_string());
    }
}

/// Keeps an agent away; a directory that is not there is nobody's.
fn lock(path: &Path, flag: &'static str) -> Result<Option<DirectoryLock>, Error> {
    let path = path.to_owned();
    match DirectoryLock::take(&path) {
        Ok(lock) => Ok(Some(lock)),
        Err(LockError::System(error)) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source @ LockError::Held { .. }) => Err(Error::AgentRuns { path, flag, source }),
        Err(source) => Err(Error::Lock { path, flag, source }),
    }
}

/// Releases all pods, and removes what they share. What leads to a pod stays until the pod is clean: its record, and with all that is
/// shared what a backend has of it.
fn release(report: &mut Report, records: &Records, leftovers: &[Box<dyn Leftovers>]) {
    let remembered = records.load().unwrap_or_else(|error| {
        report.failed(Chain(&error).to_string());
        Vec::new()
    });
    let mut pods: BTreeMap<PodUid, Option<Box<Record>>> = BTreeMap::new();
    for remembered in remembered {
        match remembered {
            Remembered::Pod(record) => pods.extend(record.info().ok().map(|info| (info.uid, Some(record)))),
            Remembered::Name(uid) => pods.extend([(uid, None)]),
        }
    }
    let mut clean = vec![true; leftovers.len()];
    for (backend, clean) in leftovers.iter().zip(&mut clean) {
        let found = backend.pods().unwrap_or_else(|error| {
            report.failed(Chain(&error).to_string());
            *clean = false;
            Vec::new()
        });
        for uid in found {
            pods.entry(uid).or_default();
        }
    }
    for (uid, record) in pods {
        let netns = match record.map_or(Ok(None), |record| record.namespace()) {
            Ok(netns) => netns,
            Err(error) => {
                report.failed(format!(
                    "pod {uid}: its namespace cannot be opened, and nothing of it is removed: {error}"
                ));
                clean.fill(false);
                continue;
            }
        };
        let mut whole = true;
        for (backend, clean) in leftovers.iter().zip(&mut clean) {
            for error in backend.remove(&uid, netns.as_ref()).err().into_iter().flatten() {
                report.failed(format!("pod {uid}: {}", Chain(&error)));
                (whole, *clean) = (false, false);
            }
        }
        if whole {
            match records.remove(&uid) {
                Ok(()) => report.released += 1,
                Err(error) => report.failed(Chain(&error).to_string()),
            }
        }
    }
    for (backend, _) in leftovers.iter().zip(clean).filter(|(_, clean)| *clean) {
        for error in backend.remove_shared().err().into_iter().flatten() {
            report.failed(Chain(&error).to_string());
        }
    }
}

/// Removes what the agent keeps in files, and the directories if they are empty then.
fn remove_files(report: &mut Report, config: &Config, remove_ca: bool) {
    for (path, result) in Records::existing(&config.state_dir).remove_leftovers() {
        report.tried("removing", &path, result);
    }
    match socket_file::remove_stale(&config.takeover_socket(), "--state-dir") {
        Ok(()) | Err(BindError::NotASocket { .. }) => {}
        Err(error) => report.failed(Chain(&error).to_string()),
    }
    if remove_ca {
        for (path, result) in dev_ca::remove(&config.ca_dir) {
            report.tried("removing", &path, result);
        }
    }
    match fs::remove_dir(&config.state_dir) {
        // The development CA's key, or what is not ours.
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {}
        result => report.tried("removing", &config.state_dir, result),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    };

    use super::*;
    use crate::{
        mesh::pod::PodInfo,
        pods::{OnFailure, PodAdd},
        redirect,
        sys::netns::Netns,
    };

    /// A backend with something in each of its pods, which it cannot remove while it is `stuck`.
    struct Backend {
        pods: Vec<PodUid>,
        stuck: Arc<AtomicBool>,
        shared: Arc<AtomicBool>,
    }

    impl Backend {
        fn new(pods: &[&str]) -> Self {
            Self {
                pods: pods.iter().map(|uid| uid.parse().unwrap()).collect(),
                stuck: Arc::default(),
                shared: Arc::new(AtomicBool::new(true)),
            }
        }
    }

    impl Leftovers for Backend {
        fn backend(&self) -> &'static str {
            "test"
        }

        fn pods(&self) -> Result<Vec<PodUid>, redirect::Error> {
            Ok(self.pods.clone())
        }

        fn remove(&self, uid: &PodUid, _: Option<&Netns>) -> Result<(), Vec<redirect::Error>> {
            if self.stuck.load(Ordering::Relaxed) && self.pods.contains(uid) {
                return Err(vec![redirect::Error::new("removing a rule", "no")]);
            }
            Ok(())
        }

        fn remove_shared(&self) -> Result<(), Vec<redirect::Error>> {
            self.shared.store(false, Ordering::Relaxed);
            Ok(())
        }
    }

    fn record(uid: &str, netns_path: &Path) -> Record {
        Record::of(&PodAdd {
            info: PodInfo {
                uid: uid.parse().unwrap(),
                name: uid.to_owned(),
                namespace: "shop".into(),
                service_account: "sa".into(),
            },
            netns: Arc::new(Netns::current().unwrap()),
            netns_path: Some(netns_path.to_owned()),
            addresses: Vec::new(),
            rules: None,
            on_failure: OnFailure::Report,
        })
    }

    fn released(records: &Records, leftovers: &[Box<dyn Leftovers>]) -> Report {
        let mut report = Report::default();
        release(&mut report, records, leftovers);
        report
    }

    #[test]
    fn what_leads_to_a_pod_stays_until_the_pod_is_clean() {
        let state = tempfile::tempdir().unwrap();
        let records = Records::open(state.path()).unwrap();
        let gone = Path::new("/nonexistent/netns");
        records.save(&record("a", gone)).unwrap();
        records.save(&record("b", gone)).unwrap();
        let (stuck, idle) = (Backend::new(&["a", "unrecorded"]), Backend::new(&[]));
        stuck.stuck.store(true, Ordering::Relaxed);
        let (switch, shared) = (
            Arc::clone(&stuck.stuck),
            [&stuck, &idle].map(|backend| Arc::clone(&backend.shared)),
        );
        let there = || shared.each_ref().map(|shared| shared.load(Ordering::Relaxed));
        let leftovers: [Box<dyn Leftovers>; 2] = [Box::new(stuck), Box::new(idle)];
        for pods in [1, 0] {
            let report = released(&records, &leftovers);
            assert_eq!(report.released, pods, "the other pod is no hindrance");
            assert_eq!(
                report.failures,
                [
                    "pod a: removing a rule: no",
                    "pod unrecorded: removing a rule: no"
                ],
                "whenever it is tried"
            );
            assert_eq!(records.uids().unwrap(), ["a".parse().unwrap()]);
            assert_eq!(there(), [true, false]);
        }
        switch.store(false, Ordering::Relaxed);
        let report = released(&records, &leftovers);
        assert_eq!((report.released, report.failures), (2, vec![]));
        assert_eq!(records.uids().unwrap(), []);
        assert_eq!(there(), [false, false]);
    }

    #[test]
    fn a_namespace_that_cannot_be_opened_is_not_taken_for_gone() {
        let state = tempfile::tempdir().unwrap();
        let records = Records::open(state.path()).unwrap();
        let endless = state.path().join("endless");
        std::os::unix::fs::symlink(&endless, &endless).unwrap();
        records.save(&record("a", &endless)).unwrap();
        let backend = Backend::new(&["a"]);
        let shared = Arc::clone(&backend.shared);
        let leftovers: [Box<dyn Leftovers>; 1] = [Box::new(backend)];
        let report = released(&records, &leftovers);
        assert!(
            report.failures[0].contains("pod a: its namespace cannot be opened"),
            "{report:?}"
        );
        assert!(shared.load(Ordering::Relaxed));
        assert_eq!(records.uids().unwrap().len(), 1);
    }
}
