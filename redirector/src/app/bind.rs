//! What only one agent on the node can have: its listeners, and the directory of its state.

use std::{
    fs, io,
    net::Ipv4Addr,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::DirBuilderExt,
    },
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicBool},
};

use tokio::{
    net::TcpListener,
    sync::{Notify, mpsc, oneshot, watch},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;
use tracing::error;

use super::{
    Error,
    takeover::{Holding, Holdings, Succession, made},
};
use crate::{
    admin::{Admin, Endpoint},
    config::{Config, PodSource},
    pods::{
        PodEvent,
        admission::Admission,
        cni_server::CniServer,
        kubernetes::Follower,
        pause::Pauses,
        records::Records,
        restore,
        status::Status,
        zds,
        zds_server::{Proxies, ZdsServer},
    },
    sys::lock::{DirectoryLock, LockError},
    telemetry::Chain,
};

/// All of it. The CNI socket is bound before anything is touched, so that a second agent touches no pod of the first.
pub(super) struct Bound {
    pub(super) endpoints: Endpoints,
    pub(super) pod_source: BoundSource,
    /// For proxies that are processes of their own.
    pub(super) others: Option<ZdsServer>,
    pub(super) proxies: Arc<Proxies>,
    /// Each pod is to be looked at.
    pub(super) look: Arc<Notify>,
    pub(super) state: DirectoryLock,
    pub(super) records: Records,
    /// Duplicates, for who takes over.
    pub(super) holdings: Holdings,
}

impl Bound {
    pub(super) async fn bind(config: &Config, succession: &mut Succession) -> Result<Self, Error> {
        let mut holdings = Holdings::default();
        let Succession { before, foreign, .. } = succession;
        let endpoints = Endpoints::bind(config, before, &mut holdings).await?;
        let pod_source = BoundSource::bind(&config.pods, before, &mut holdings, foreign)?;
        let look = Arc::new(Notify::new());
        let proxies = Arc::new(Proxies::new(Arc::clone(&look)));
        let others = match &config.ztunnel_uds {
            Some(path) => Some(ZdsServer::bind(path, Arc::clone(&proxies)).map_err(Error::ZdsSocket)?),
            None => None,
        };
        make_state_dir(config)?;
        let given = before.take(Holding::StateDir);
        let state = lock(&config.state_dir, "--state-dir", given)?;
        hold(&mut holdings, Holding::StateDir, &state)?;
        let records = Records::open(&config.state_dir).map_err(Error::Records)?;
        Ok(Self {
            endpoints,
            pod_source,
            others,
            proxies,
            look,
            state,
            records,
            holdings,
        })
    }
}

fn make_state_dir(config: &Config) -> Result<(), Error> {
    let path = &config.state_dir;
    let made = fs::DirBuilder::new().recursive(true).mode(0o750).create(path);
    made.map_err(|source| Error::StateDir {
        path: path.clone(),
        source,
    })
}

/// Keeps a directory to this agent for as long as the returned value lives: two agents would release each other's pods. The lock may be
/// `given` by another.
pub(super) fn lock(path: &Path, flag: &'static str, given: Option<OwnedFd>) -> Result<DirectoryLock, Error> {
    let path = path.to_owned();
    let locked = match given {
        Some(given) => DirectoryLock::inherited(given, &path),
        None => DirectoryLock::take(&path),
    };
    locked.map_err(|source| match source {
        LockError::Held { .. } => Error::InUse { path, flag, source },
        LockError::System(_) => Error::Lock { path, flag, source },
    })
}

/// Keeps a duplicate for who takes over.
pub(super) fn hold(holdings: &mut Holdings, holding: Holding, of: &impl AsFd) -> Result<(), Error> {
    holdings.add(holding, of.as_fd()).map_err(|source| Error::System {
        operation: "duplicate a descriptor",
        source,
    })
}

/// The listeners of admin, metrics and readiness.
pub(super) struct Endpoints(Vec<(Endpoint, TcpListener)>);

impl Endpoints {
    /// Those of the agent `before`, or new ones.
    async fn bind(config: &Config, before: &mut Holdings, holdings: &mut Holdings) -> Result<Self, Error> {
        let mut bound = Vec::new();
        for (endpoint, holding, address, flag) in [
            (Endpoint::Admin, Holding::Admin, config.admin_addr, "--admin-addr"),
            (
                Endpoint::Metrics,
                Holding::Metrics,
                config.metrics_addr,
                "--metrics-addr",
            ),
            (
                Endpoint::Readiness,
                Holding::Readiness,
                config.readiness_addr,
                "--readiness-addr",
            ),
        ] {
            let listener = match before.take(holding) {
                Some(given) => tcp_listener(given),
                None => match TcpListener::bind(address).await {
                    Err(error)
                        if address.ip().is_unspecified() && address.is_ipv6() && lacks_ipv6(&error) =>
                    {
                        TcpListener::bind((Ipv4Addr::UNSPECIFIED, address.port())).await
                    }
                    bound => bound,
                },
            };
            let listener = listener.map_err(|source| Error::Listen {
                address,
                flag,
                source,
            })?;
            hold(holdings, holding, &listener)?;
            bound.push((endpoint, listener));
        }
        Ok(Self(bound))
    }

    /// Serves them from `open` on: until then they are another agent's, or wait.
    pub(super) fn serve(
        self,
        admin: &Arc<Admin>,
        tasks: &mut JoinSet<()>,
        open: &CancellationToken,
        stop: &CancellationToken,
    ) {
        for (endpoint, listener) in self.0 {
            let (admin, open, stop) = (Arc::clone(admin), open.clone(), stop.clone());
            tasks.spawn(async move {
                tokio::select! {
                    () = open.cancelled() => {}
                    () = stop.cancelled() => return,
                }
                admin.serve(endpoint, listener, stop).await;
            });
        }
    }
}

/// A listener that another agent has handed over.
fn tcp_listener(given: OwnedFd) -> io::Result<TcpListener> {
    let listener = std::net::TcpListener::from(given);
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

/// The kernel has no IPv6, or it is switched off.
fn lacks_ipv6(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EAFNOSUPPORT) || error.kind() == io::ErrorKind::AddrNotAvailable
}

/// The source of pod events, ready to run.
pub(super) enum BoundSource {
    Cni(CniServer),
    Zds(PathBuf),
}

impl BoundSource {
    fn bind(
        source: &PodSource,
        before: &mut Holdings,
        holdings: &mut Holdings,
        foreign: &Arc<AtomicBool>,
    ) -> Result<Self, Error> {
        Ok(match source {
            PodSource::Cni(path) => {
                let server = match before.take(Holding::CniSocket) {
                    Some(given) => made("the CNI socket", CniServer::inherited(path, given))?,
                    None => CniServer::bind(path).map_err(Error::CniSocket)?,
                };
                let server = server.unless(foreign);
                hold(holdings, Holding::CniSocket, &server)?;
                Self::Cni(server)
            }
            PodSource::Zds(path) => Self::Zds(path.clone()),
        })
    }

    pub(super) async fn run(
        self,
        records: Records,
        (events, pods): (mpsc::Sender<PodEvent>, watch::Receiver<Status>),
        admission: Admission,
        follower: Option<Follower>,
        (restored, ready, pauses): (oneshot::Sender<()>, CancellationToken, Pauses<()>),
        stop: CancellationToken,
    ) {
        match self {
            Self::Cni(server) => {
                tokio::select! {
                    restored = restore::restore(records, events.clone()) => if let Err(error) = restored {
                        error!(error = %Chain(&error), "cannot restore the pods of an earlier agent: they stay as they are");
                        return;
                    },
                    () = stop.cancelled() => return,
                }
                let _ = restored.send(());
                tokio::select! {
                    () = ready.cancelled() => {}
                    () = stop.cancelled() => return,
                }
                let served = server.run(events.clone(), pods.clone(), admission, pauses, stop.clone());
                match follower {
                    Some(follower) => {
                        tokio::join!(served, follower.reconcile(events, pods, stop));
                    }
                    None => served.await,
                }
            }
            Self::Zds(path) => {
                let _ = restored.send(());
                zds::run(path, events, stop).await;
            }
        }
    }
}
