//! `redirector uninstall`: removes from the node whatever agents with these directories have left, and nothing else.
//!
//! Pods are known by their records and by what is pinned: a namespace that neither names is not looked into, since another
//! agent, with directories of its own, may have put there what looks like ours. What cannot be removed is told and left, and
//! the rest goes on.

use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::fs::FileTypeExt,
    path::{Path, PathBuf},
};

use crate::{
    config::{Config, PodSource},
    identity::dev_ca,
    mesh::pod::PodUid,
    pods::records::{Record, Records, Remembered},
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
    let leftovers = redirect::leftovers(&config.bpffs_dir, config.iptables());
    release_pods(&mut report, &Records::existing(&config.state_dir), &leftovers);
    for backend in &leftovers {
        for error in backend.remove_shared().err().into_iter().flatten() {
            report.failed(Chain(&error).to_string());
        }
    }
    remove_files(&mut report, config, remove_ca);
    Ok(report)
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

fn release_pods(report: &mut Report, records: &Records, leftovers: &[Box<dyn Leftovers>]) {
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
    for backend in leftovers {
        match backend.pods() {
            Ok(uids) => uids.into_iter().for_each(|uid| {
                pods.entry(uid).or_default();
            }),
            Err(error) => report.failed(Chain(&error).to_string()),
        }
    }
    for (uid, record) in pods {
        let netns = record.and_then(|record| record.namespace().ok().flatten());
        let errors: Vec<_> = leftovers
            .iter()
            .filter_map(|backend| backend.remove(&uid, netns.as_ref()).err())
            .flatten()
            .collect();
        let whole = errors.is_empty();
        for error in errors {
            report.failed(format!("pod {uid}: {}", Chain(&error)));
        }
        if whole {
            // A record is the only way to a pod whose pins are gone: it stays until the pod is clean.
            match records.remove(&uid) {
                Ok(()) => report.released += 1,
                Err(error) => report.failed(Chain(&error).to_string()),
            }
        }
    }
}

/// Removes what the agent keeps in files, and the directories if they are empty then.
fn remove_files(report: &mut Report, config: &Config, remove_ca: bool) {
    for (path, result) in Records::existing(&config.state_dir).remove_leftovers() {
        report.tried("removing", &path, result);
    }
    if let PodSource::Cni(socket) = &config.pods {
        let is_socket = fs::symlink_metadata(socket).is_ok_and(|found| found.file_type().is_socket());
        if is_socket {
            report.tried("removing", socket, fs::remove_file(socket));
        }
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
