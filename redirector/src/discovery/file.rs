//! The mesh from a YAML file, in the format of ztunnel's LOCAL_XDS_PATH; or from its text, as in LOCAL_XDS.
//!
//! `app` opens it and runs the task that follows its changes.

use std::{
    collections::HashSet,
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use tokio::{sync::watch, time::MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use super::{Error, Location};
use crate::mesh::index::Mesh;

mod format;
mod value;

/// How often the file is looked at.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Parses the text of a workload file. `origin` is named in errors.
///
/// # Errors
/// The first thing that is wrong, with its line and the path of its field.
pub fn parse(text: &str, origin: &str) -> Result<Mesh, Error> {
    let invalid = |location, field: String, message: String| Error::Invalid {
        origin: origin.to_owned(),
        location,
        field,
        message,
    };
    // A writer that truncates first shows an empty file for a moment: not a mesh without anyone in it.
    if text.trim().is_empty() {
        let message = "is empty; a mesh with nothing in it is written `workloads: []`";
        return Err(invalid(None, "the whole file".into(), message.into()));
    }
    let yaml = serde_yaml::Deserializer::from_str(text);
    let file: format::File = serde_path_to_error::deserialize(yaml).map_err(|error| {
        let field = error.path().to_string();
        let error = error.into_inner();
        let location = error.location().map(|at| Location {
            line: at.line(),
            column: at.column(),
        });
        let message = bare_message(&error, &field);
        invalid(
            location,
            if field == "." {
                "the whole file".into()
            } else {
                field
            },
            message,
        )
    })?;

    let workloads: Vec<_> = file.workloads.into_iter().map(|workload| workload.0).collect();
    let services: Vec<_> = file.services.into_iter().map(|service| service.0).collect();
    if let Some((at, uid)) = repeated(workloads.iter().map(|workload| &workload.uid)) {
        let message = format!("{uid} is there twice; workloads need different uids, or names");
        return Err(invalid(None, format!("workloads[{at}].uid"), message));
    }
    if let Some((at, host)) = repeated(services.iter().map(|service| &service.host)) {
        let message = format!("{host} is there twice");
        return Err(invalid(None, format!("services[{at}].hostname"), message));
    }
    let mut known: HashSet<_> = services.iter().map(|service| &service.host).collect();
    for workload in &workloads {
        for host in workload.services.keys() {
            // Once for each service, however many workloads name it.
            if known.insert(host) {
                tracing::warn!(%origin, service = %host, workload = %workload.uid, "a workload names a service that is not there");
            }
        }
    }
    Ok(Mesh::new(workloads, services))
}

/// The YAML library's message without path and line, which are told apart from it.
fn bare_message(error: &serde_yaml::Error, field: &str) -> String {
    let message = error.to_string();
    // The library's own path may be shorter, since it knows nothing of an unknown key.
    let message = match message.split_once(": ") {
        Some((path, rest)) if field.starts_with(path) => rest,
        _ => &message,
    };
    let end = error
        .location()
        .map(|at| format!(" at line {} column {}", at.line(), at.column()));
    end.and_then(|end| message.strip_suffix(&end))
        .unwrap_or(message)
        .to_owned()
}

/// The first value that was there before, and where.
fn repeated<T: Eq + Hash>(values: impl Iterator<Item = T>) -> Option<(usize, T)> {
    let mut seen = HashSet::new();
    for (at, value) in values.enumerate() {
        if seen.contains(&value) {
            return Some((at, value));
        }
        seen.insert(value);
    }
    None
}

/// A workload file that is followed.
#[derive(Debug)]
pub struct FileSource {
    path: PathBuf,
    seen: Seen,
}

impl FileSource {
    /// Reads the file for the first time. Blocking.
    ///
    /// # Errors
    /// When it cannot be read, or is not what it should be.
    pub fn open(path: &Path) -> Result<(Self, Arc<Mesh>), Error> {
        let (text, seen) = read(path).map_err(|source| Error::Read {
            path: path.into(),
            source,
        })?;
        let mesh = parse(&text, &path.display().to_string())?;
        Ok((
            Self {
                path: path.into(),
                seen,
            },
            Arc::new(mesh),
        ))
    }

    /// Follows the file until `shutdown`: sends a new snapshot when its content has changed, and keeps the one before when
    /// the new content is not what it should be. Replacing the file (rename, a ConfigMap's symlinks) is the clean way to
    /// change it; of one that is written in place, only a content that stood still for a second is taken.
    pub async fn run(self, mesh: watch::Sender<Arc<Mesh>>, shutdown: CancellationToken) {
        let mut ticks = tokio::time::interval(POLL_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut follower = Follower::new(self);
        loop {
            tokio::select! {
                () = shutdown.cancelled() => return,
                _ = ticks.tick() => {}
            }
            // Reading and parsing many workloads takes seconds.
            let outcome = tokio::task::spawn_blocking(move || {
                let outcome = follower.look();
                (follower, outcome)
            });
            let (back, outcome) = match outcome.await {
                Ok(done) => done,
                Err(error) => {
                    tracing::error!(%error, "the workload file is no longer followed");
                    return;
                }
            };
            follower = back;
            match outcome {
                Ok(None) => {}
                Ok(Some(new)) => {
                    let (workloads, services) = new.len();
                    tracing::info!(path = %follower.path.display(), workloads, services, "workload file read again");
                    mesh.send_replace(Arc::new(new));
                }
                Err(error) => {
                    let error: &dyn std::error::Error = &error;
                    tracing::error!(error, "workload file not usable; the mesh stays as it was");
                }
            }
        }
    }
}

/// What is known of the file's content.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Seen {
    stamp: Stamp,
    content: u64,
}

/// What changes with the content, as a rule. Of the file itself, behind all symlinks.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    len: u64,
    modified: Option<SystemTime>,
}

impl Stamp {
    fn of(metadata: &fs::Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            len: metadata.len(),
            modified: metadata.modified().ok(),
        }
    }
}

fn read(path: &Path) -> io::Result<(String, Seen)> {
    let mut file = fs::File::open(path)?;
    let stamp = Stamp::of(&file.metadata()?);
    let text = io::read_to_string(&mut file)?;
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    Ok((
        text,
        Seen {
            stamp,
            content: hasher.finish(),
        },
    ))
}

/// The steps of following a file, apart from when they are made.
struct Follower {
    path: PathBuf,
    /// What was parsed last, whether or not it was usable.
    taken: Seen,
    /// A change that has yet to stand still.
    pending: Option<Stamp>,
    /// The file could not be read, and that has been told.
    unreadable: bool,
}

impl Follower {
    fn new(source: FileSource) -> Self {
        Self {
            path: source.path,
            taken: source.seen,
            pending: None,
            unreadable: false,
        }
    }

    /// Looks at the file: a new mesh, when there is one; each failure once.
    fn look(&mut self) -> Result<Option<Mesh>, Error> {
        let stamp = match fs::metadata(&self.path) {
            Ok(metadata) => Stamp::of(&metadata),
            Err(error) => return self.unreadable(error),
        };
        if stamp == self.taken.stamp && !self.unreadable {
            self.pending = None;
            return Ok(None);
        }
        if self.pending.as_ref() != Some(&stamp) {
            self.pending = Some(stamp);
            return Ok(None);
        }
        let (text, seen) = match read(&self.path) {
            Ok(read) => read,
            Err(error) => return self.unreadable(error),
        };
        if self.pending.as_ref() != Some(&seen.stamp) {
            self.pending = Some(seen.stamp);
            return Ok(None);
        }
        self.pending = None;
        self.unreadable = false;
        let same = seen.content == self.taken.content;
        self.taken = seen;
        if same {
            Ok(None)
        } else {
            parse(&text, &self.path.display().to_string()).map(Some)
        }
    }

    fn unreadable(&mut self, source: io::Error) -> Result<Option<Mesh>, Error> {
        self.pending = None;
        if std::mem::replace(&mut self.unreadable, true) {
            return Ok(None);
        }
        Err(Error::Read {
            path: self.path.clone(),
            source,
        })
    }
}

#[cfg(test)]
mod tests;
