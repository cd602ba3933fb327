//! The mesh from a YAML file, in the format of ztunnel's LOCAL_XDS_PATH; or from its text, as in LOCAL_XDS.
//!
//! `app` opens it and runs the task that follows its changes.

use std::{collections::HashSet, hash::Hash, path::Path, sync::Arc};

use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use super::{Error, Location, state::Handle};
use crate::{
    mesh::{
        index::{Mesh, Update},
        strings::Strings,
    },
    sys::follow::{Followed, POLL_INTERVAL},
};

mod format;
mod policy;
mod value;

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
    let policies: Vec<_> = file.policies.into_iter().map(|policy| policy.0).collect();
    if let Some((at, uid)) = repeated(workloads.iter().map(|workload| &workload.uid)) {
        let message = format!("{uid} is there twice; workloads need different uids, or names");
        return Err(invalid(None, format!("workloads[{at}].uid"), message));
    }
    if let Some((at, host)) = repeated(services.iter().map(|service| &service.host)) {
        let message = format!("{host} is there twice");
        return Err(invalid(None, format!("services[{at}].hostname"), message));
    }
    if let Some((at, key)) = repeated(policies.iter().map(|policy| &policy.key)) {
        let message = format!("{key} is there twice");
        return Err(invalid(None, format!("policies[{at}].name"), message));
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
    let mut known: HashSet<_> = policies.iter().map(|policy| &policy.key).collect();
    for workload in &workloads {
        for policy in &workload.authorization_policies {
            if known.insert(policy) {
                tracing::warn!(%origin, %policy, workload = %workload.uid, "a workload names a policy that is not there");
            }
        }
    }
    let mut mesh = Mesh::default();
    let mut strings = Strings::default();
    let workloads = workloads.into_iter().map(|one| Update::Workload(Arc::new(one)));
    let services = services.into_iter().map(|one| Update::Service(Arc::new(one)));
    let policies = policies.into_iter().map(|one| Update::Policy(Arc::new(one)));
    for mut update in workloads.chain(services).chain(policies) {
        update.share(&mut strings);
        mesh.apply(update);
    }
    Ok(mesh)
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
pub struct FileSource(Followed);

impl FileSource {
    /// Reads the file for the first time. Blocking.
    ///
    /// # Errors
    /// When it cannot be read, or is not what it should be.
    pub fn open(path: &Path) -> Result<(Self, Mesh), Error> {
        let (followed, text) = Followed::open(path).map_err(|source| Error::Read {
            path: path.into(),
            source,
        })?;
        let mesh = parse(&text, &path.display().to_string())?;
        Ok((Self(followed), mesh))
    }

    /// Follows the file until `shutdown`: hands in what it holds when its content has changed, and nothing when the new content
    /// is not what it should be.
    pub async fn run(self, mesh: Handle, shutdown: CancellationToken) {
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
                    let policies = new.policies();
                    tracing::info!(path = %follower.0.path().display(), workloads, services, policies, "workload file read again");
                    if mesh.replace_file(new).await.is_err() {
                        return;
                    }
                }
                Err(error) => {
                    let error: &dyn std::error::Error = &error;
                    tracing::error!(error, "workload file not usable; the mesh stays as it was");
                }
            }
        }
    }
}

/// The file as it is followed, apart from when it is looked at.
struct Follower(Followed);

impl Follower {
    fn new(source: FileSource) -> Self {
        Self(source.0)
    }

    /// Looks at the file: a new mesh, when there is one; each failure once.
    fn look(&mut self) -> Result<Option<Mesh>, Error> {
        let path = self.0.path().to_owned();
        let changed = self.0.look().map_err(|source| Error::Read {
            path: path.clone(),
            source,
        })?;
        changed
            .map(|text| parse(&text, &path.display().to_string()))
            .transpose()
    }
}

#[cfg(test)]
mod tests;
