//! The side of the agent that is to go on.

use std::{
    io, mem,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{
    sync::watch,
    time::{sleep, timeout},
};
use tracing::{info, warn};

use super::{
    Holdings, impossible, terms,
    wire::{self, Message, Talk},
};
use crate::{
    config::{Config, values::Takeover},
    identity::store::Store,
    mesh::pod::PodUid,
    pods::{
        launch::{Inherited, Served},
        restore::Unknown,
        status::{State, Status},
    },
    sys::{netns::NetnsId, process, seqpacket::Seqpacket},
};

/// Time for the other agent to answer: it may be talking to another one, or starting.
const WELCOME_DEADLINE: Duration = Duration::from_secs(30);
/// Time for a control plane to tell the mesh.
const MESH_DEADLINE: Duration = Duration::from_secs(60);
/// Time for the other agent to rest and to hand over a pod.
const POD_DEADLINE: Duration = Duration::from_secs(70);
/// Time for all certificates.
const CERTIFICATES_DEADLINE: Duration = Duration::from_secs(30);
/// Time between looks at them.
const CERTIFICATES_INTERVAL: Duration = Duration::from_millis(50);
/// Time for the other agent to let go, and then to close its listeners.
const YOURS_DEADLINE: Duration = Duration::from_secs(30);

/// Why this agent does not go on where another was. The other one does, unless it says otherwise itself.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The settings do not allow it.
    #[error("{0}: start this one without --takeover, when the other one has ended")]
    Impossible(&'static str),
    /// The socket.
    #[error("cannot connect to {path}, where the running agent listens", path = .path.display())]
    Connect {
        /// Where.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Somebody else listens.
    #[error("{path} is served by a process of user {uid}, and not of this agent's user", path = .path.display())]
    Stranger {
        /// Where.
        path: PathBuf,
        /// Whose.
        uid: u32,
    },
    /// It says no.
    #[error("the running agent refuses: {}", .0.join("; "))]
    Refused(Vec<String>),
    /// It has changed its mind.
    #[error("the running agent goes on: {0}")]
    Withdrawn(String),
    /// It is not understood.
    #[error("the running agent is not understood, and goes on")]
    Wire(#[from] wire::Error),
    /// What it has handed over cannot be used.
    #[error("cannot use {what} of the running agent, which goes on")]
    Unusable {
        /// Which.
        what: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// This agent could not serve as the other does.
    #[error("the running agent goes on, since this one cannot serve as it does: {0}")]
    NotReady(String),
}

/// A takeover that has begun.
pub(in crate::app) struct Taking {
    /// `None` when the other agent has died.
    talk: Option<Talk>,
    pods: Vec<PodUid>,
}

/// Asks the agent that runs with this directory of state, if there is one and it is to be asked, and gets what it holds.
pub(in crate::app) async fn begin(config: &Config) -> Result<Option<(Taking, Holdings)>, Error> {
    if config.takeover == Takeover::Never {
        return Ok(None);
    }
    if let Some(reason) = impossible(config) {
        return Err(Error::Impossible(reason));
    }
    let path = config.takeover_socket();
    let socket = match Seqpacket::connect(&path) {
        Ok(socket) => socket,
        // None, or the file of one that was killed, or one that knows nothing of this: whether it runs the locks tell.
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
            ) =>
        {
            info!(path = %path.display(), "no agent to take over from");
            return Ok(None);
        }
        Err(source) => return Err(Error::Connect { path, source }),
    };
    let talk = Talk::over(socket);
    let uid = talk.peer_uid()?;
    if uid != process::user() {
        return Err(Error::Stranger { path, uid });
    }
    talk.send(&Message::Hello(terms(config)), &[]).await?;
    match talk.recv(WELCOME_DEADLINE).await? {
        Some((Message::Welcome { version, holdings }, fds)) => {
            info!(version, "taking over from the running agent");
            let taking = Taking {
                talk: Some(talk),
                pods: Vec::new(),
            };
            Ok(Some((taking, Holdings::of(holdings, fds))))
        }
        Some((Message::Refused { reasons }, _)) => Err(Error::Refused(reasons)),
        Some((Message::Withdrawn { reason }, _)) => Err(Error::Withdrawn(reason)),
        Some((other, _)) => Err(wire::Error::unexpected(&other).into()),
        None => {
            warn!("the running agent has ended: starting in its place");
            Ok(None)
        }
    }
}

/// Something made of what was handed over.
pub(in crate::app) fn made<T>(what: &'static str, result: io::Result<T>) -> Result<T, Error> {
    result.map_err(|source| Error::Unusable { what, source })
}

impl Taking {
    /// Gets the pods' listeners, when the mesh is here: from then on the other agent changes nothing.
    pub(in crate::app) async fn pods(
        &mut self,
        mut awaited: watch::Receiver<Vec<&'static str>>,
        inherited: &Inherited,
    ) -> Result<(), Error> {
        let told = async {
            // Without a sender there is nothing to wait for.
            let late = timeout(MESH_DEADLINE, awaited.wait_for(Vec::is_empty))
                .await
                .is_err();
            if late {
                let missing = awaited.borrow().join(", no ");
                return Err(Error::NotReady(format!(
                    "the control plane has told no {missing} within {MESH_DEADLINE:?}"
                )));
            }
            Ok(())
        };
        self.unless_alone(told).await?;
        let Some(talk) = &self.talk else { return Ok(()) };
        talk.send(&Message::Pause, &[]).await?;
        loop {
            match talk.recv(POD_DEADLINE).await? {
                Some((
                    Message::Pod {
                        uid,
                        netns_dev: dev,
                        netns_ino: ino,
                    },
                    fds,
                )) => {
                    let malformed = |problem: String| wire::Error::Malformed(problem);
                    let uid: PodUid = uid.parse().map_err(|error| malformed(format!("{error}")))?;
                    let listeners = fds
                        .try_into()
                        .map_err(|_| malformed("not three listeners".into()))?;
                    self.pods.push(uid.clone());
                    let netns = NetnsId { dev, ino };
                    inherited.put(Served {
                        uid,
                        netns,
                        listeners,
                    });
                }
                Some((Message::Pods { count }, _)) if count == self.pods.len() => {
                    info!(pods = count, "the running agent has handed over its listeners");
                    return Ok(());
                }
                Some((Message::Withdrawn { reason }, _)) => return Err(Error::Withdrawn(reason)),
                Some((other, _)) => return Err(wire::Error::unexpected(&other).into()),
                None => {
                    self.alone();
                    return Ok(());
                }
            }
        }
    }

    fn alone(&mut self) {
        warn!("the running agent has ended: going on with what it has handed over");
        self.talk = None;
    }

    /// Waits for what an agent is to have before it takes over. It need not when the other one has ended, by now or meanwhile.
    async fn unless_alone(&mut self, ready: impl Future<Output = Result<(), Error>>) -> Result<(), Error> {
        let Some(talk) = &self.talk else { return Ok(()) };
        let said = tokio::select! {
            biased;
            said = talk.next() => said,
            ready = ready => match ready {
                Ok(()) => return Ok(()),
                // It may have ended just now.
                Err(error) => timeout(Duration::ZERO, talk.next()).await.map_err(|_| error)?,
            },
        };
        match said? {
            Some((Message::Withdrawn { reason }, _)) => Err(Error::Withdrawn(reason)),
            Some((other, _)) => Err(wire::Error::unexpected(&other).into()),
            None => {
                self.alone();
                Ok(())
            }
        }
    }

    /// Has the other agent let go, when the pods that it serves are ready here. When this returns they are this agent's, and connections
    /// may be accepted; for events see [`Self::closed`].
    pub(in crate::app) async fn commit(
        &mut self,
        status: watch::Receiver<Status>,
        unknown: &[Unknown],
        identities: &Arc<Store>,
        inherited: &Inherited,
    ) -> Result<(), Error> {
        let pods = mem::take(&mut self.pods);
        let ready = async {
            captured(&pods, unknown, &status.borrow())?;
            certified(identities).await
        };
        self.unless_alone(ready).await?;
        if let Some(talk) = &self.talk {
            talk.send(&Message::Commit, &[]).await?;
            match talk.recv(YOURS_DEADLINE).await? {
                Some((Message::Yours, _)) => info!("taken over from the running agent"),
                Some((Message::Withdrawn { reason }, _)) => return Err(Error::Withdrawn(reason)),
                Some((other, _)) => return Err(wire::Error::unexpected(&other).into()),
                None => self.alone(),
            }
        }
        for uid in inherited.close() {
            warn!(%uid, "the listeners of a pod that is gone are closed");
        }
        Ok(())
    }

    /// Waits until the other agent has closed its listeners: where a pod goes and comes again, the ports are free then.
    pub(in crate::app) async fn closed(&mut self) {
        if let Some(talk) = self.talk.take()
            && !matches!(talk.recv(YOURS_DEADLINE).await, Ok(None))
        {
            warn!(
                "the agent that was taken over has not closed its listeners: pods that come again may have to be tried again"
            );
        }
    }
}

/// Whether all these pods can be served. One that is gone need not be.
fn captured(pods: &[PodUid], unknown: &[Unknown], status: &Status) -> Result<(), Error> {
    if let Some(Unknown { uid, record }) = unknown.iter().find(|unknown| pods.contains(&unknown.uid)) {
        return Err(Error::NotReady(format!(
            "the record of pod {uid} cannot be used, or its namespace not be opened (see above): {}: have the pod replaced, and try \
             again; or stop the running agent first, and the pod's connections are refused until it is replaced",
            record.display()
        )));
    }
    let failed = status
        .pods
        .iter()
        .filter(|pod| pods.iter().any(|uid| uid.as_str() == pod.uid))
        .find(|pod| pod.state != State::Captured);
    failed.map_or(Ok(()), |pod| {
        Err(Error::NotReady(format!(
            "pod {}/{} is not captured: {}",
            pod.namespace,
            pod.name,
            pod.error.as_deref().unwrap_or("it took too long")
        )))
    })
}

/// Waits for the certificates of all identities.
async fn certified(identities: &Store) -> Result<(), Error> {
    let begin = Instant::now();
    loop {
        let missing = identities
            .seconds_left()
            .into_iter()
            .find(|(_, left)| left.is_none_or(|left| left <= 0));
        let Some((identity, _)) = missing else {
            return Ok(());
        };
        if begin.elapsed() > CERTIFICATES_DEADLINE {
            return Err(Error::NotReady(format!(
                "there is no certificate for {identity} after {CERTIFICATES_DEADLINE:?}"
            )));
        }
        sleep(CERTIFICATES_INTERVAL).await;
    }
}
