//! The side of the agent that runs.

use std::{
    io,
    os::fd::AsFd as _,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{
    Holding, Holdings, impossible, terms,
    wire::{self, Message, Talk, Terms},
};
use crate::{
    config::Config,
    pods::{
        launch::Served,
        pause::{Pauser, Pauses, Rest, pauses},
        socket_file::{self, BindError, SocketFile},
    },
    sys::{
        process,
        seqpacket::{Listener, Seqpacket},
    },
    telemetry::Chain,
};

/// The flag that chooses another path.
const FLAG: &str = "--state-dir";

/// Time for who has connected to say what it wants.
const HELLO_DEADLINE: Duration = Duration::from_secs(5);
/// Time for it to get its mesh; nothing rests meanwhile.
const PREPARE_DEADLINE: Duration = Duration::from_secs(120);
/// Time for the events that have begun.
const PAUSE_DEADLINE: Duration = Duration::from_secs(60);
/// Time for it to make all pods ready, while their events wait.
const COMMIT_DEADLINE: Duration = Duration::from_secs(120);
/// Time for it to end when it has got nothing.
const END_DEADLINE: Duration = Duration::from_secs(60);
/// Time to wait when no connection can be taken, as when files run out.
const ACCEPT_BACKOFF: Duration = Duration::from_secs(1);

/// The listening socket, and what is handed over.
pub(in crate::app) struct Giver {
    listener: Listener,
    file: SocketFile,
    terms: Terms,
    refusal: Option<&'static str>,
    foreign: Arc<AtomicBool>,
    holdings: Holdings,
}

/// What rests while another agent makes the pods ready.
pub(in crate::app) struct Parts {
    cni: Pauser<()>,
    pods: Pauser<io::Result<Vec<Served>>>,
    upkeep: Pauser<()>,
}

/// Where those parts are asked to rest.
pub(in crate::app) struct Resting {
    pub(in crate::app) cni: Pauses<()>,
    pub(in crate::app) pods: Pauses<io::Result<Vec<Served>>>,
    pub(in crate::app) upkeep: Pauses<()>,
}

/// Both ends.
pub(in crate::app) fn resting() -> (Parts, Resting) {
    let (cni, cni_pauses) = pauses();
    let (pods, pods_pauses) = pauses();
    let (upkeep, upkeep_pauses) = pauses();
    (
        Parts { cni, pods, upkeep },
        Resting {
            cni: cni_pauses,
            pods: pods_pauses,
            upkeep: upkeep_pauses,
        },
    )
}

/// They rest as long as this lives.
pub(in crate::app) struct Rests(
    #[expect(dead_code, reason = "that they are there is all they say")] [Rest; 3],
);

/// A takeover, as it stands when this agent hands over no more.
pub(in crate::app) struct Given {
    /// To be dropped when no listener is open here: the other agent goes on then.
    talk: Talk,
    /// To be kept to the end.
    rests: Option<Rests>,
    is_over: bool,
    /// Whose it is counts when all is decided.
    _file: Option<SocketFile>,
}

/// Why who asked gets nothing.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Wire(#[from] wire::Error),
    /// This agent ends, then.
    #[error("a part of it has ended")]
    Ended,
    #[error("what had begun was not done within {PAUSE_DEADLINE:?}")]
    Busy,
    #[error("it cannot duplicate a listener")]
    Duplicate(#[from] io::Error),
}

impl Giver {
    /// Listens in the state directory, with mode 0600, or where the agent before this one did. When all is handed over, `foreign` says so.
    ///
    /// # Errors
    /// When the system refuses.
    pub(in crate::app) fn bind(
        config: &Config,
        before: &mut Holdings,
        foreign: &Arc<AtomicBool>,
        holdings: Holdings,
    ) -> Result<Self, BindError> {
        let path = config.takeover_socket();
        let (listener, file) = match before.take(Holding::TakeoverSocket) {
            Some(given) => {
                let inherited = |path: &Path| Ok((Listener::inherited(given)?, SocketFile::existing(path)?));
                inherited(&path).map_err(socket_file::failed("listen at", &path))?
            }
            None => socket_file::bind(&path, FLAG, 0o600, Listener::bind)?,
        };
        let mut giver = Self {
            file: file.unless(foreign),
            terms: terms(config),
            refusal: impossible(config),
            foreign: Arc::clone(foreign),
            holdings,
            listener,
        };
        let added = giver
            .holdings
            .add(Holding::TakeoverSocket, giver.listener.as_fd());
        added.map_err(socket_file::failed("duplicate", &path))?;
        Ok(giver)
    }

    /// Answers who asks, one at a time, when the agent is `ready`, until one has taken over: then nothing is this agent's any more, and its
    /// parts rest. `stop` ends it, and cuts off a takeover that is on its way. `None` when there is none.
    pub(in crate::app) async fn run(
        self,
        parts: Parts,
        ready: CancellationToken,
        stop: CancellationToken,
    ) -> Option<Given> {
        tokio::select! {
            () = ready.cancelled() => {}
            () = stop.cancelled() => return None,
        }
        loop {
            let accepted = tokio::select! {
                () = stop.cancelled() => return None,
                accepted = self.listener.accept() => accepted,
            };
            let pause = match accepted {
                Ok(socket) => match self.answer(socket, &parts, &stop).await {
                    Some(given) => {
                        return Some(Given {
                            _file: Some(self.file),
                            ..given
                        });
                    }
                    None => Duration::ZERO,
                },
                Err(error) => {
                    warn!(path = %self.file.path().display(), %error, "cannot take the connection of another agent");
                    ACCEPT_BACKOFF
                }
            };
            sleep(pause).await;
        }
    }

    async fn answer(&self, socket: Seqpacket, parts: &Parts, stop: &CancellationToken) -> Option<Given> {
        let talk = Talk::over(socket);
        let mut rests = None;
        let handed_over = tokio::select! {
            // What has been handed over at last is told before anything else.
            biased;
            result = self.hand_over(&talk, parts, &mut rests) => Some(result),
            () = stop.cancelled() => None,
        };
        let is_over = match handed_over {
            Some(Ok(true)) => true,
            Some(Ok(false)) => return None,
            None => false,
            Some(Err(Failure::Ended)) => {
                // Whoever is to take over is told nothing of it: this agent ends, as if it had died.
                stop.cancelled().await;
                false
            }
            Some(Err(failure)) => {
                let reason = Chain(&failure).to_string();
                warn!(
                    reason,
                    "another agent was to take over, and has not: this one goes on"
                );
                // It may be gone.
                let _ = talk.send(&Message::Withdrawn { reason }, &[]).await;
                // The parts go on, to rest once more.
                drop(rests);
                tokio::select! {
                    () = see_off(&talk, parts) => {}
                    () = stop.cancelled() => {}
                }
                return None;
            }
        };
        Some(Given {
            talk,
            rests,
            is_over,
            _file: None,
        })
    }

    /// Whether all is handed over; not when the other side was refused, or has gone. What `rests` does so from then on.
    async fn hand_over(
        &self,
        talk: &Talk,
        parts: &Parts,
        rests: &mut Option<Rests>,
    ) -> Result<bool, Failure> {
        let uid = talk.peer_uid()?;
        let hello = match talk.recv(HELLO_DEADLINE).await? {
            Some((Message::Hello(terms), _)) => terms,
            Some((other, _)) => return Err(wire::Error::unexpected(&other).into()),
            None => return Ok(false),
        };
        let mut reasons = self.terms.differences(&hello);
        reasons.extend(self.refusal.map(str::to_owned));
        if uid != process::user() {
            reasons.push(format!(
                "it runs as user {}, and this one as {uid}",
                process::user()
            ));
        }
        if !reasons.is_empty() {
            warn!(
                version = hello.version,
                ?reasons,
                "another agent may not take over"
            );
            talk.send(&Message::Refused { reasons }, &[]).await?;
            return Ok(false);
        }
        info!(version = hello.version, "another agent is to take over");
        let (welcome, fds) = self.holdings.welcome(&self.terms.version);
        talk.send(&welcome, &fds).await?;
        if !said(talk, PREPARE_DEADLINE, &Message::Pause).await? {
            return Ok(false);
        }
        let (served, resting) = timeout(PAUSE_DEADLINE, parts.rest())
            .await
            .map_err(|_| Failure::Busy)??;
        *rests = Some(resting);
        let count = served.len();
        for Served {
            uid,
            netns,
            listeners,
        } in served
        {
            let pod = Message::Pod {
                uid: uid.to_string(),
                netns_dev: netns.dev,
                netns_ino: netns.ino,
            };
            let listeners = listeners.each_ref().map(|listener| listener.as_fd());
            talk.send(&pod, &listeners).await?;
        }
        talk.send(&Message::Pods { count }, &[]).await?;
        if !said(talk, COMMIT_DEADLINE, &Message::Commit).await? {
            return Ok(false);
        }
        // Whoever is gone by now gets nothing. Nothing is awaited after this.
        if !talk.send(&Message::Yours, &[]).await? {
            return Ok(false);
        }
        self.foreign.store(true, Ordering::Relaxed);
        Ok(true)
    }
}

impl Given {
    /// Whether the other agent has taken over. Otherwise it is on its way, and goes on alone when its connection ends.
    pub(in crate::app) fn is_over(&self) -> bool {
        self.is_over
    }

    /// Has the other agent give up.
    pub(in crate::app) async fn withdraw(self, reason: &str) {
        warn!(reason, "another agent was to take over, and gets nothing");
        let reason = reason.to_owned();
        // It may be gone.
        let _ = self.talk.send(&Message::Withdrawn { reason }, &[]).await;
    }

    /// Has the other agent go on, when no listener is open here. What rests does so as long as what is returned lives.
    pub(in crate::app) fn let_go(self) -> Option<Rests> {
        self.rests
    }
}

/// Waits until who has got nothing is gone, and has the parts rest once more: what it has done to the pods until then is put right when
/// they go on.
async fn see_off(talk: &Talk, parts: &Parts) {
    let is_gone = |received| matches!(received, Ok(None) | Err(wire::Error::Socket { .. }));
    let gone = async { while !is_gone(talk.recv(END_DEADLINE).await) {} };
    if timeout(END_DEADLINE, gone).await.is_err() {
        warn!("the agent that has not taken over is still there: what it does to the pods is not put right");
    }
    // A part that has ended ends this agent.
    let _ = timeout(PAUSE_DEADLINE, parts.rest()).await;
}

/// Whether `expected` came, and not the end.
async fn said(talk: &Talk, deadline: Duration, expected: &Message) -> Result<bool, Failure> {
    match talk.recv(deadline).await? {
        Some((message, _)) if message == *expected => Ok(true),
        Some((other, _)) => Err(wire::Error::unexpected(&other).into()),
        None => {
            warn!("the agent that was to take over is gone: this one goes on");
            Ok(false)
        }
    }
}

impl Parts {
    /// Plugins first, whose events are then carried out by the next.
    async fn rest(&self) -> Result<(Vec<Served>, Rests), Failure> {
        let ((), cni) = self.cni.rest().await.ok_or(Failure::Ended)?;
        let (served, pods) = self.pods.rest().await.ok_or(Failure::Ended)?;
        let ((), upkeep) = self.upkeep.rest().await.ok_or(Failure::Ended)?;
        Ok((served?, Rests([cni, pods, upkeep])))
    }
}
