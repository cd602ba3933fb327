//! A file of revocation lists, followed as it changes: what cannot be used replaces nothing.
//!
//! `app` opens it; [`super::trust`] asks what it says now, for each handshake, and open connections wait for its changes.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Weak},
};

use serde::Serialize;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;
use tracing::{error, info, warn};

use super::revocation::{Invalid, ListView, Lists};
use crate::{
    sys::follow::{Followed, POLL_INTERVAL},
    telemetry::Chain,
};

/// What is revoked, as of now. Without a file, nothing ever is.
#[derive(Debug, Clone, Default)]
pub struct Revocations(Option<Arc<Shared>>);

#[derive(Debug)]
struct Shared {
    path: PathBuf,
    state: watch::Receiver<State>,
    _task: AbortOnDropHandle<()>,
}

#[derive(Debug, Clone, Default)]
struct State {
    lists: Arc<Lists>,
    /// Why the file's newest content is not in force.
    problem: Option<Arc<str>>,
}

/// The file and its lists, as they are shown.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RevocationsView {
    /// The file.
    pub path: PathBuf,
    /// Why its newest content is not in force.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// What is in force.
    pub lists: Vec<ListView>,
}

impl Revocations {
    /// Reads the file, and follows it. While there was no good content yet, nothing is revoked: the file may be mended, or come
    /// later, as an optional mount does. Blocking at first; must be called within a tokio runtime.
    pub fn follow(path: &Path) -> Self {
        let mut file = File {
            path: path.to_owned(),
            followed: None,
            state: State::default(),
            told_overdue: 0,
        };
        file.look();
        if file.state.lists.is_empty() {
            error!(path = %path.display(), "no revocation list (CRL_PATH) is in force: whoever is revoked is let in");
        }
        let (sender, receiver) = watch::channel(file.state.clone());
        Self(Some(Arc::new(Shared {
            path: path.to_owned(),
            state: receiver,
            _task: AbortOnDropHandle::new(tokio::spawn(run(file, sender))),
        })))
    }

    /// The lists that are in force now, if there can be any.
    pub(super) fn lists(&self) -> Option<Arc<Lists>> {
        let shared = self.0.as_ref()?;
        Some(Arc::clone(&shared.state.borrow().lists))
    }

    /// Tells of changes from now on, if there can be any.
    pub(super) fn changes(&self) -> Option<Changes> {
        let shared = Arc::clone(self.0.as_ref()?);
        Some(Changes {
            state: shared.state.clone(),
            _shared: shared,
        })
    }

    /// These lists, which stay as they are until the sender has others.
    #[cfg(test)]
    pub(crate) fn fixed(content: &[u8]) -> (Self, Publisher) {
        let (sender, state) = watch::channel(State::default());
        let publisher = Publisher(sender);
        publisher.publish(content);
        let shared = Shared {
            path: PathBuf::new(),
            state,
            _task: AbortOnDropHandle::new(tokio::spawn(std::future::pending())),
        };
        (Self(Some(Arc::new(shared))), publisher)
    }

    /// Which lists are in force now.
    pub(super) fn in_force(&self) -> InForce {
        InForce(self.lists().map(|lists| Arc::downgrade(&lists)))
    }

    /// The file and its lists.
    pub fn view(&self) -> Option<RevocationsView> {
        let shared = self.0.as_ref()?;
        let state = shared.state.borrow().clone();
        Some(RevocationsView {
            path: shared.path.clone(),
            problem: state.problem.as_deref().map(str::to_owned),
            lists: state.lists.views(),
        })
    }
}

/// Which lists were in force: the same as others are, or not.
#[derive(Debug, Clone, Default)]
pub struct InForce(Option<Weak<Lists>>);

impl PartialEq for InForce {
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (None, None) => true,
            // As long as one of them is here, no other lists have the same place.
            (Some(one), Some(other)) => Weak::ptr_eq(one, other),
            _ => false,
        }
    }
}

/// Tells when the lists may have changed.
#[derive(Debug)]
pub(super) struct Changes {
    state: watch::Receiver<State>,
    /// Whoever waits keeps the file followed.
    _shared: Arc<Shared>,
}

impl Changes {
    /// Only what comes from now on is a change.
    pub(super) fn mark_seen(&mut self) {
        self.state.mark_unchanged();
    }

    /// Waits for a change. `false` when there will be none. Cancel-safe.
    pub(super) async fn changed(&mut self) -> bool {
        self.state.changed().await.is_ok()
    }
}

struct File {
    path: PathBuf,
    followed: Option<Followed>,
    state: State,
    /// Lists of which it has been told that they are overdue.
    told_overdue: usize,
}

/// Why a content is not used.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("cannot read {}", .0.display())]
    Read(PathBuf, #[source] std::io::Error),
    #[error("{}", .0.display())]
    Content(PathBuf, #[source] Invalid),
}

impl File {
    /// Whether there is something new to tell. Blocking.
    fn look(&mut self) -> bool {
        let is_new = match self.read() {
            Ok(None) => false,
            Ok(Some(lists)) => {
                info!(path = %self.path.display(), lists = lists.len(), revoked = lists.revoked(), "revocation lists read");
                self.told_overdue = 0;
                self.state = State {
                    lists: Arc::new(lists),
                    problem: None,
                };
                true
            }
            Err(failure) => {
                let problem = Chain(&failure).to_string();
                let is_new = self.state.problem.as_deref() != Some(&*problem);
                if is_new {
                    let in_force = self.state.lists.len();
                    warn!(error = %problem, in_force, "the file of revocation lists is not used; the lists before it stay");
                }
                self.state.problem = Some(problem.into());
                is_new
            }
        };
        self.tell_overdue();
        is_new
    }

    fn tell_overdue(&mut self) {
        let views = self.state.lists.views().into_iter();
        let overdue: Vec<_> = views.filter(|list| list.is_overdue).collect();
        if overdue.len() > self.told_overdue {
            for ListView {
                issuer, next_update, ..
            } in &overdue
            {
                let due = next_update.as_deref();
                warn!(
                    issuer,
                    due,
                    "a revocation list is overdue: it counts, and whoever was revoked since is not on it"
                );
            }
        }
        self.told_overdue = overdue.len();
    }

    fn read(&mut self) -> Result<Option<Lists>, Failure> {
        let read = |source| Failure::Read(self.path.clone(), source);
        let content = match self.followed.take() {
            None => {
                let (followed, content) = Followed::open_bytes(&self.path).map_err(read)?;
                self.followed = Some(followed);
                Some(content)
            }
            // Not put back after a failure: the file is read anew from the next look on, though it may be as it was.
            Some(mut followed) => {
                let content = followed.look_bytes().map_err(read)?;
                self.followed = Some(followed);
                content
            }
        };
        let lists = content.map(|content| Lists::parse(&content)).transpose();
        lists.map_err(|invalid| Failure::Content(self.path.clone(), invalid))
    }
}

async fn run(mut file: File, state: watch::Sender<State>) {
    loop {
        tokio::time::sleep(POLL_INTERVAL).await;
        let looked = tokio::task::spawn_blocking(move || {
            let is_new = file.look();
            (file, is_new)
        });
        let Ok((back, is_new)) = looked.await else {
            error!("internal fault: looking at the file of revocation lists has failed; those in force stay");
            return;
        };
        file = back;
        if is_new {
            state.send_replace(file.state.clone());
        }
    }
}

/// For tests, the end that says what is revoked.
#[cfg(test)]
pub(crate) struct Publisher(watch::Sender<State>);

#[cfg(test)]
impl Publisher {
    pub(crate) fn publish(&self, content: &[u8]) {
        self.0
            .send_modify(|state| state.lists = Arc::new(Lists::parse(content).unwrap()));
    }
}

#[cfg(test)]
mod tests;
