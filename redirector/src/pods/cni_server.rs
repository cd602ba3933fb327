//! The socket on which CNI plugins (ours, or any HTTP client) tell of pods: `POST /cmdadd` and `POST /cmddel` over a Unix
//! stream socket, `POST /cmdcheck` to ask after one, and `POST /log` with what they log.
//!
//! An add is answered with 200 only when the pod is captured. What is told is in `wire`; what becomes of it is
//! `lifecycle`'s matter.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use bytes::Bytes;
use http::{Method, Request, StatusCode};
use tokio::{
    net::UnixListener,
    sync::{mpsc, oneshot, watch},
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;

use self::plugin_log::PluginLog;
use super::{
    Error, NetnsRef, OnFailure, PodAdd, PodDelete, PodEvent,
    admission::{self, Admission, Decision},
    pause::Pauses,
    socket_file::{self, BindError, SocketFile},
    status::{State, Status},
    wire::{self, Event},
    work::blocking,
};
use crate::{
    serve::{Answer, Caller, Limits, Listener, method_not_allowed, serve, text},
    sys::{netns::Netns, process},
    telemetry::Chain,
};

mod plugin_log;

/// The flag that chooses another path.
pub const FLAG: &str = "--cni-socket";

/// Time for capturing a pod. It goes on after that; the sender is told to try again.
const ADD_DEADLINE: Duration = Duration::from_secs(30);

const LIMITS: Limits = Limits {
    connections: 64,
    body_bytes: 64 * 1024,
    header_deadline: Duration::from_secs(5),
    body_deadline: Duration::from_secs(5),
    connection_deadline: Duration::from_secs(60),
    // What has begun is finished, before another agent may take over.
    stop_deadline: Duration::from_secs(25),
};

/// The listening socket.
#[derive(Debug)]
pub struct CniServer {
    listener: Listener,
    file: SocketFile,
}

impl CniServer {
    /// Listens at `path`, with mode 0660. A socket that nobody serves any more is replaced. Must be called within a tokio
    /// runtime.
    ///
    /// # Errors
    /// When somebody serves it, it is no socket, or the system refuses.
    pub fn bind(path: &Path) -> Result<Self, BindError> {
        let (listener, file) = socket_file::bind(path, FLAG, 0o660, |path| UnixListener::bind(path))?;
        let listener = Listener::Unix(listener);
        Ok(Self { listener, file })
    }

    /// Goes on with the listener that another agent had at `path`, and has handed over. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// When it is no such listener, or nothing is at `path`.
    pub fn inherited(path: &Path, listener: OwnedFd) -> io::Result<Self> {
        let listener = std::os::unix::net::UnixListener::from(listener);
        listener.set_nonblocking(true)?;
        Ok(Self {
            listener: Listener::Unix(UnixListener::from_std(listener)?),
            file: SocketFile::existing(path)?,
        })
    }

    /// The socket's file stays at the end if `others` says then that it is another agent's.
    #[must_use]
    pub fn unless(mut self, others: &Arc<AtomicBool>) -> Self {
        self.file = self.file.unless(others);
        self
    }

    /// Serves until `stop`, then removes the socket. When it is asked to rest, who connects waits in the socket's queue.
    pub async fn run(
        self,
        events: mpsc::Sender<PodEvent>,
        pods: watch::Receiver<Status>,
        admission: Admission,
        mut pauses: Pauses<()>,
        stop: CancellationToken,
    ) {
        let Self { listener, file } = self;
        let handler = Handler {
            events,
            pods,
            admission,
            plugin_log: Arc::new(PluginLog::new(Instant::now())),
        };
        let handle = move |request| {
            let handler = handler.clone();
            async move { handler.handle(request).await }
        };
        loop {
            let round = stop.child_token();
            let served = serve(&listener, LIMITS, round.clone(), handle.clone());
            tokio::pin!(served);
            let pause = tokio::select! {
                () = &mut served => break,
                pause = pauses.next() => pause,
            };
            round.cancel();
            served.await;
            if !pause.rest((), &stop).await {
                break;
            }
        }
        drop((listener, file));
    }
}

impl AsFd for CniServer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

/// Why a request was not carried out.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(
        "only root may tell of pods here, and the caller's user is {uid}: call it as root, as container runtimes call CNI plugins"
    )]
    Caller { uid: u32 },
    #[error(transparent)]
    Body(#[from] wire::Error),
    #[error(transparent)]
    Admission(#[from] admission::Error),
    #[error("cannot open the pod's network namespace {path}", path = .path.display())]
    Netns {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Lifecycle(#[from] Error),
    #[error("{0}")]
    NotCaptured(String),
    #[error(transparent)]
    Log(#[from] plugin_log::Error),
    #[error("not done within {ADD_DEADLINE:?}; it goes on: ask again for the result")]
    Late,
}

impl Failure {
    fn status(&self) -> StatusCode {
        match self {
            Self::Body(_)
            | Self::Log(_)
            | Self::Admission(admission::Error::Uid(_) | admission::Error::Annotation(_)) => {
                StatusCode::BAD_REQUEST
            }
            Self::Caller { .. } => StatusCode::FORBIDDEN,
            Self::NotCaptured(_) => StatusCode::CONFLICT,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

#[derive(Clone)]
struct Handler {
    events: mpsc::Sender<PodEvent>,
    pods: watch::Receiver<Status>,
    admission: Admission,
    plugin_log: Arc<PluginLog>,
}

impl Handler {
    async fn handle(self, request: Request<Bytes>) -> Answer {
        let post = request.method() == Method::POST;
        let result = match (request.uri().path(), may_tell(&request)) {
            ("/cmdadd" | "/cmddel" | "/cmdcheck" | "/log", _) if !post => {
                return method_not_allowed(&Method::POST);
            }
            ("/cmdadd" | "/cmddel" | "/cmdcheck" | "/log", Err(failure)) => Err(failure),
            ("/cmdadd", Ok(())) => self.add(request.body()).await,
            ("/cmddel", Ok(())) => self.delete(request.body()).await,
            ("/cmdcheck", Ok(())) => self.check(request.body()),
            ("/log", Ok(())) => self
                .plugin_log
                .take(request.body(), Instant::now())
                .map(|()| String::new())
                .map_err(Failure::Log),
            _ => {
                return text(
                    StatusCode::NOT_FOUND,
                    "no such path: there are /cmdadd, /cmddel, /cmdcheck and /log\n",
                );
            }
        };
        match result {
            Ok(told) => text(StatusCode::OK, told),
            Err(failure) => {
                let status = failure.status();
                // What the lifecycle refuses it tells itself.
                if !matches!(failure, Failure::Lifecycle(_)) {
                    tracing::warn!(path = request.uri().path(), error = %Chain(&failure), "pod event refused");
                }
                text(status, format!("{}\n", Chain(&failure)))
            }
        }
    }

    /// Enrols a pod, or tells why that is left.
    async fn add(&self, body: &[u8]) -> Result<String, Failure> {
        let event = Event::parse(body)?;
        let path = event.netns.clone().ok_or(wire::Error::Missing { key: "Netns" })?;
        let (info, rules) = match self.admission.decide(&event).await? {
            Decision::Enrol(info, rules) => (info, rules),
            Decision::Leave(reason) => {
                let (namespace, name) = (&event.namespace, &event.name);
                tracing::debug!(namespace, name, reason, "the pod is not in the mesh");
                return Ok(format!("not in the mesh: {reason}\n"));
            }
        };
        let netns = open(path.clone()).await?.map_err(|source| Failure::Netns {
            path: path.clone(),
            source,
        })?;
        let add = PodAdd {
            info,
            netns: Arc::new(netns),
            netns_path: Some(path),
            addresses: event.addresses.iter().map(|address| address.ip).collect(),
            rules,
            on_failure: OnFailure::Report,
        };
        self.carry_out(|reply| PodEvent::Add(add, reply)).await
    }

    async fn delete(&self, body: &[u8]) -> Result<String, Failure> {
        let event = Event::parse(body)?;
        let Some(uid) = self.admission.uid_to_delete(&event)? else {
            return Ok("left to its namespace: neither PodUID nor Netns is given\n".to_owned());
        };
        let netns = match event.netns {
            None => None,
            Some(path) => {
                let there = open(path.clone()).await?.ok();
                Some(NetnsRef {
                    path,
                    id: there.map(|netns| netns.id()),
                })
            }
        };
        self.carry_out(|reply| PodEvent::Delete(PodDelete { uid, netns }, reply))
            .await
    }

    /// Refuses a pod whose capture has failed. One that is not in the table was not to be captured.
    fn check(&self, body: &[u8]) -> Result<String, Failure> {
        let uid = self.admission.uid(&Event::parse(body)?)?;
        let status = self.pods.borrow();
        let pod = status.pods.iter().find(|pod| pod.uid == uid.as_str());
        match pod.filter(|pod| pod.state == State::NotCaptured) {
            None => Ok(String::new()),
            Some(pod) => Err(Failure::NotCaptured(
                pod.error
                    .clone()
                    .unwrap_or_else(|| "it is tried again".to_owned()),
            )),
        }
    }

    async fn carry_out(&self, event: impl FnOnce(super::Reply) -> PodEvent) -> Result<String, Failure> {
        let (reply, result) = oneshot::channel();
        let done = async {
            // The lifecycle is there as long as this server is; without it the agent is stopping.
            self.events
                .send(event(reply))
                .await
                .map_err(|_| Error::Stopping)?;
            result.await.unwrap_or(Err(Error::Stopping))
        };
        timeout(ADD_DEADLINE, done).await.map_err(|_| Failure::Late)??;
        Ok(String::new())
    }
}

/// Whether the caller is one who may rule the pods' networks anyhow. The socket's mode says so too, as long as nobody changes it.
fn may_tell(request: &Request<Bytes>) -> Result<(), Failure> {
    let uid = request.extensions().get::<Caller>().map(|caller| caller.uid);
    match uid {
        Some(uid) if uid == 0 || uid == process::own_uid() => Ok(()),
        // Of a Unix socket, it is always known.
        uid => Err(Failure::Caller {
            uid: uid.unwrap_or(u32::MAX),
        }),
    }
}

/// Opens a namespace where it may block.
async fn open(path: PathBuf) -> Result<io::Result<Netns>, Error> {
    blocking("open the pod's namespace", move || Ok(Netns::open(&path))).await
}

#[cfg(test)]
mod tests;
