//! The agent as a whole: builds every part, hands it over, starts and stops them in order.
//!
//! Start: rights, sockets, mesh, identities, backend, pods. Where an agent runs that is to be taken over (`takeover`), what it holds
//! comes before all that, and goes into each part. The CNI socket is bound first of all, so that a second agent
//! touches no pod of the first, and served last, when the pods of an earlier agent are back. Stop: not ready, no new events,
//! proxies drain, the rest. Where the agent is uninstalled, the CNI plugin goes first of all, and the pods are released.

mod installer;
mod table;
mod takeover;
mod upkeep;

use std::{
    fs,
    future::pending,
    io,
    net::{Ipv4Addr, SocketAddr},
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::DirBuilderExt,
    },
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use futures_util::{FutureExt as _, future::FusedFuture as _};
use prometheus_client::registry::Registry;
use tokio::{
    net::TcpListener,
    signal::unix::{Signal, SignalKind, signal},
    sync::{Notify, mpsc, oneshot, watch},
    task::{JoinError, JoinSet},
    time::{Duration, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{debug, error, info, warn};

use self::{
    installer::Installer,
    table::Table,
    takeover::{Given, Giver, Holding, Holdings, Parts, made},
    upkeep::Upkeep,
};
use crate::{
    admin::{Admin, Endpoint},
    config::{Config, MeshSource, PodSource, planes::Certificates, values::Redirect},
    control_plane::kubernetes::Kubernetes,
    discovery::{
        self,
        demand::Demand,
        file::{self, FileSource},
        state::State,
        xds,
    },
    identity::{
        self, CertSource,
        crl_file::Revocations,
        dev_ca::{self, DevCa},
        files::Files,
        istio_ca::IstioCa,
        kubernetes_csr::{self, KubernetesCsr},
        renew::Renewing,
        store::Store,
        trust::PeerRules,
        workload_api::WorkloadApi,
    },
    mesh::index::Mesh,
    pods::{
        PodEvent,
        admission::Admission,
        cni_server::CniServer,
        kubernetes::Follower,
        launch::{Inherited, PodProxies},
        lifecycle,
        others::OtherProxies,
        pause::{Pauses, pauses},
        records::{self, Records},
        restore,
        rules::{self, NodeRules, RulesFile},
        socket_file::BindError,
        status::{self, PodStatus, Status},
        zds,
        zds_server::{Proxies, ZdsServer},
    },
    proxy::{self, Shared, flows::Flows},
    redirect::{self, Redirector, ebpf, iptables, moved::Moved, none::NoRedirect},
    sys::{
        lock::{DirectoryLock, LockError},
        process, socket,
    },
    telemetry::{Chain, logs, metrics},
};

/// Events on their way to the lifecycle. Each sender waits for its answer, so there are never more than their number.
const EVENTS: usize = 64;

/// Time that the tasks which only serve get to end, after the pods have.
const STOP_DEADLINE: Duration = Duration::from_secs(5);

/// Time between looks at whether each pod's capture is still whole: what somebody takes away is back within 2 s, looks and
/// repairs included. A look at a pod that is as it was costs about a tenth of a millisecond.
const CHECK_INTERVAL: Duration = Duration::from_millis(1500);

/// Why the agent does not run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The process lacks rights.
    #[error(
        "this process lacks {}: run it as root, or give it these capabilities",
        .missing.join(", ")
    )]
    Capabilities {
        /// Which.
        missing: Vec<&'static str>,
    },
    /// Something about this process or the node cannot be found out.
    #[error("cannot {operation}")]
    System {
        /// What was tried.
        operation: &'static str,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// The state directory cannot be made.
    #[error("cannot make the state directory {path} (--state-dir)", path = .path.display())]
    StateDir {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Another agent has it.
    #[error("{path} ({flag}) is in use by another agent: stop that one, or give this one a directory of its own", path = .path.display())]
    InUse {
        /// Which.
        path: PathBuf,
        /// The flag that chooses another.
        flag: &'static str,
        /// Who has it.
        #[source]
        source: LockError,
    },
    /// A directory cannot be locked.
    #[error("cannot lock {path} ({flag})", path = .path.display())]
    Lock {
        /// Which.
        path: PathBuf,
        /// The flag that chooses another.
        flag: &'static str,
        /// Why.
        #[source]
        source: LockError,
    },
    /// An address cannot be listened on.
    #[error("cannot listen on {address} ({flag})")]
    Listen {
        /// Which.
        address: SocketAddr,
        /// The flag that chooses another.
        flag: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The CNI socket.
    #[error("cannot serve the CNI socket")]
    CniSocket(#[source] BindError),
    /// The ZDS socket.
    #[error("cannot serve the ZDS socket")]
    ZdsSocket(#[source] BindError),
    /// The workload file.
    #[error("cannot use the workload file")]
    Workloads(#[source] discovery::Error),
    /// The development CA.
    #[error("cannot use the development CA")]
    DevCa(#[source] dev_ca::Error),
    /// The rules file.
    #[error("cannot use the rules file (--rules)")]
    Rules(#[source] rules::Error),
    /// The records of pods.
    #[error("cannot keep records of pods")]
    Records(#[source] records::Error),
    /// The backend.
    #[error("cannot redirect traffic")]
    Redirect(#[source] redirect::Error),
    /// Another agent is not taken over.
    #[error("cannot take over (--takeover)")]
    Takeover(#[from] takeover::Error),
    /// The socket of those who take over.
    #[error("cannot listen for who takes over")]
    TakeoverSocket(#[source] BindError),
    /// A part of the agent ended by itself.
    #[error("internal fault: a part of the agent ended")]
    Ended,
}

/// Runs an agent until a signal, or until `/quitquitquit`.
pub async fn run(config: Config, logs: logs::Control) -> Result<(), Error> {
    let mut signals = Signals::new()?;
    check_rights()?;
    raise_limits();
    if let Err(error) = process::forbid_core_files() {
        warn!(%error, "core files of this process may be written, with the keys of its pods in them");
    }
    info!(config = %serde_json::to_string(&config).unwrap_or_default(), "effective configuration");

    let (mut taking, mut before) = takeover::begin(&config).await?.unzip();
    let before = before.get_or_insert_default();
    // As long as another agent serves the pods, what is in place is left to it.
    let foreign = Arc::new(AtomicBool::new(taking.is_some()));
    let mut holdings = Holdings::default();
    let endpoints = Endpoints::bind(&config, before, &mut holdings).await?;
    let pod_source = BoundSource::bind(&config.pods, before, &mut holdings, &foreign)?;
    let look = Arc::new(Notify::new());
    let proxies = Arc::new(Proxies::new(Arc::clone(&look)));
    let others = match &config.ztunnel_uds {
        Some(path) => Some(ZdsServer::bind(path, Arc::clone(&proxies)).map_err(Error::ZdsSocket)?),
        None => None,
    };
    make_state_dir(&config)?;
    let given = before.take(Holding::StateDir);
    let state = lock(&config.state_dir, "--state-dir", given)?;
    hold(&mut holdings, Holding::StateDir, &state)?;
    let records = Records::open(&config.state_dir).map_err(Error::Records)?;

    // What serves: ended after the pods.
    let serving = CancellationToken::new();
    let mut tasks = JoinSet::new();
    let mut registry = metrics::registry();
    let demand = config.xds_on_demand.then(Demand::default);
    let (mesh, awaited) = start_mesh(&config, demand.clone(), &mut registry, &mut tasks, &serving)?;
    let rules = PeerRules {
        aliases: config.trust_domain_aliases.clone(),
        revocations: config
            .crl_file
            .as_deref()
            .map(Revocations::follow)
            .unwrap_or_default(),
    };
    let identities = Store::new(certificates(&config)?, rules);
    identity::metrics::register(&mut registry, Arc::clone(&identities));
    let inherited = Arc::<Inherited>::default();
    if let Some(taking) = &mut taking {
        taking.pods(awaited.clone(), &inherited).await?;
    }
    let prepared = {
        let config = config.clone();
        tokio::task::spawn_blocking(move || prepare_redirector(&config))
            .await
            .map_err(|_| Error::Ended)?
    };
    prepared?;
    // Before anything is changed there, and whatever the backend: the pins of an earlier agent are removed pod by pod, those of another
    // one must not be.
    let given = before.take(Holding::BpffsDir);
    let pins = match lock(&config.bpffs_dir, "--bpffs-dir", given) {
        Err(Error::Lock {
            source: LockError::System(error),
            ..
        }) if error.kind() == io::ErrorKind::NotFound => None,
        locked => Some(locked?),
    };
    if let Some(pins) = &pins {
        hold(&mut holdings, Holding::BpffsDir, pins)?;
    }
    let giver = Giver::bind(&config, before, &foreign, holdings).map_err(Error::TakeoverSocket)?;
    let redirector = {
        let config = config.clone();
        tokio::task::spawn_blocking(move || build_redirector(&config))
            .await
            .map_err(|_| Error::Ended)??
    };

    let (upkeep, probers) = Upkeep::begin(Arc::clone(&redirector)).await;

    let flows = Arc::<Flows>::default();
    let listening = TaskTracker::new();
    // Cancelled when it is this agent that serves.
    let open = CancellationToken::new();
    if taking.is_none() {
        open.cancel();
    }
    let shared = Arc::new(Shared {
        mesh: mesh.clone(),
        identities: Arc::clone(&identities),
        redirector: Arc::clone(&redirector),
        config: config.proxy(),
        metrics: proxy_metrics(&config, &mut registry),
        flows: Arc::clone(&flows),
        residents: proxy::Residents::default(),
        demand,
        names: proxy::Names::default(),
        open: open.clone(),
        listening: listening.clone(),
    });
    let pod_metrics = status::Metrics::default();
    pod_metrics.register(&mut registry);
    let release_on_exit = Arc::new(AtomicBool::new(config.release_on_exit));
    let settings = lifecycle::Config {
        node: process::node_namespaces().map_err(|source| Error::System {
            operation: "open the node's network namespace",
            source,
        })?,
        release_grace: config.release_grace.0,
        shutdown_grace: config.shutdown_grace.0,
        check_interval: CHECK_INTERVAL,
        look,
        release_on_exit: Arc::clone(&release_on_exit),
        strict: config.strict,
        rules: start_rules(&config, &redirector, &mut tasks, &serving)?,
    };
    let backend = redirector.name();
    let (cni_pauser, cni_pauses) = pauses();
    let (pods_pauser, pods_pauses) = pauses();
    let (upkeep_pauser, upkeep_pauses) = pauses();
    let parts = Parts {
        cni: cni_pauser,
        pods: pods_pauser,
        upkeep: upkeep_pauser,
    };
    tasks.spawn(upkeep.run(upkeep_pauses, serving.clone()));
    let (quit, stopping) = (CancellationToken::new(), CancellationToken::new());
    // What takes and carries out events: ended first.
    let (events, receiver) = mpsc::channel(EVENTS);
    let table = Table {
        redirector: Arc::clone(&redirector),
        records: records.clone(),
        settings,
        metrics: pod_metrics,
        events: receiver,
        pauses: pods_pauses,
        stop: stopping.clone(),
    };
    let (lifecycle, pods_status) = match others {
        Some(server) => {
            proxies.register_metrics(&mut registry);
            // Before the first proxy comes: it goes on with the pods that an earlier agent has told it of.
            proxies.expect(records.uids().map_err(Error::Records)?);
            tasks.spawn(server.run(serving.clone()));
            table.of(OtherProxies::new(proxies))
        }
        None => table.of(PodProxies::new(
            shared,
            config.trust_domain.clone(),
            Arc::clone(&inherited),
        )),
    };
    status::register_states(&mut registry, pods_status.clone());
    let named = pods_status.clone();
    redirect::metrics::register(&mut registry, redirector, move || {
        let pods = &named.borrow().pods;
        let name = |pod: &PodStatus| (pod.uid.clone(), (pod.namespace.clone(), pod.name.clone()));
        pods.iter().map(name).collect()
    });
    let follower = config.kubernetes_pods.as_ref().map(|pods| {
        let follower = Follower::new(Kubernetes::new(pods.cluster.clone()), pods.config.clone());
        follower.watch(&mut tasks, &serving);
        follower.annotate(pods_status.clone(), &mut tasks, &serving);
        follower
    });
    let (installer, cni) = Installer::begin(&config, pods_status.clone(), open.clone());
    let admin = Arc::new(Admin {
        directory: follower.as_ref().map(Follower::directory),
        missed: follower
            .as_ref()
            .map_or_else(|| watch::channel(Vec::new()).1, Follower::missed),
        pods: pods_status.clone(),
        cni,
        probers,
        mesh: mesh.clone(),
        awaited,
        flows,
        identities: Arc::clone(&identities),
        registry: Arc::new(registry),
        logs,
        backend,
        config: serde_json::to_value(&config).unwrap_or_default(),
        dumps: Default::default(),
        scrapes: Default::default(),
        quit: quit.clone(),
        stopping: stopping.clone(),
    });
    // Ended before the proxies when another agent has taken over.
    let answering = serving.child_token();
    endpoints.serve(&admin, &mut tasks, &open, &answering);
    tasks.spawn(release_memory(serving.clone()));

    let mut lifecycle = tokio::spawn(lifecycle);
    let mut sources = JoinSet::new();
    let admission = match &follower {
        Some(follower) => Admission::Kubernetes(follower.decider()),
        None => Admission::Sender {
            mesh,
            home: config.home(),
            excluded: config.exclude_namespaces.0.clone(),
        },
    };
    // Cancelled when the pods of an earlier agent are back, too.
    let ready = CancellationToken::new();
    let (restored, back) = oneshot::channel();
    let source = pod_source.run(
        records,
        (events, pods_status.clone()),
        admission,
        follower,
        (restored, ready.clone(), cni_pauses),
        stopping.clone(),
    );
    sources.spawn(source);
    let withdraw = CancellationToken::new();
    info!(backend, "agent started");
    let mut giving = tokio::spawn(giver.run(parts, ready.clone(), withdraw.clone())).fuse();
    let opened = async {
        // A source that has ended tells nothing.
        if back.await.is_ok() {
            // It lives as long as the pods' table where that fails: the other agent goes on when nothing is done here any more.
            if let Some(taking) = &mut taking {
                taking.commit(pods_status, &identities, &inherited).await?;
                foreign.store(false, Ordering::Relaxed);
                open.cancel();
                taking.closed().await;
            }
            ready.cancel();
        }
        pending::<Result<(), takeover::Error>>().await
    };

    let mut why = tokio::select! {
        name = signals.next() => {
            info!(signal = name, "stopping");
            End::Asked
        }
        () = quit.cancelled() => {
            info!("asked to stop");
            End::Asked
        }
        given = &mut giving => match given {
            Ok(Some(given)) => End::Given(given),
            given => End::fault(given.map(drop)),
        },
        Err(error) = opened => End::Fault(Error::Takeover(error)),
        ended = &mut lifecycle => End::fault(ended),
        Some(ended) = sources.join_next() => End::fault(ended),
        Some(ended) = tasks.join_next() => End::fault(ended),
    };
    withdraw.cancel();
    // It may have handed over in the meantime.
    if !giving.is_terminated()
        && let Ok(Some(given)) = giving.await
    {
        why = End::Given(given);
    }
    let (result, _rests) = match why {
        End::Asked => (Ok(()), None),
        End::Fault(error) => (Err(error), None),
        End::Given(Given { talk, rests }) => {
            info!(grace = ?config.shutdown_grace.0, "another agent has taken over: this one ends with its connections");
            release_on_exit.store(false, Ordering::Relaxed);
            stopping.cancel();
            answering.cancel();
            listening.close();
            if timeout(STOP_DEADLINE, listening.wait()).await.is_err() {
                warn!("some listeners are still open");
            }
            drop(talk);
            (Ok(()), Some(rests))
        }
    };
    if foreign.load(Ordering::Relaxed) {
        release_on_exit.store(false, Ordering::Relaxed);
        installer.end().await;
    } else if result.is_err() {
        installer.end().await;
    } else if installer.leave().await {
        // While it asked, all went on as before.
        release_on_exit.store(true, Ordering::Relaxed);
    }
    stopping.cancel();
    if !lifecycle.is_finished() {
        // It has deadlines of its own, for each of its steps.
        let _ = lifecycle.await;
    }
    serving.cancel();
    end(sources).await;
    end(tasks).await;
    info!("agent stopped");
    result
}

/// Why an agent ends.
enum End {
    /// It was asked to.
    Asked,
    /// Another one has taken over; what it has taken rests.
    Given(Given),
    /// It cannot go on.
    Fault(Error),
}

impl End {
    /// A part has ended that should not.
    fn fault(ended: Result<(), JoinError>) -> Self {
        error!(?ended, "a part of the agent ended by itself");
        Self::Fault(Error::Ended)
    }
}

async fn end(mut tasks: JoinSet<()>) {
    let all = async { while tasks.join_next().await.is_some() {} };
    if timeout(STOP_DEADLINE, all).await.is_err() {
        warn!("some tasks did not end in time and are aborted");
    }
    tasks.shutdown().await;
}

/// Makes what is to be locked before the backend may change it. Blocking.
fn prepare_redirector(config: &Config) -> Result<(), Error> {
    if config.redirect == Redirect::Ebpf {
        ebpf::Ebpf::prepare(&config.bpffs_dir).map_err(Error::Redirect)?;
    }
    Ok(())
}

/// The backend that the configuration names, with what an earlier agent left of another. Blocking.
fn build_redirector(config: &Config) -> Result<Arc<dyn Redirector>, Error> {
    let build = || -> Result<Arc<dyn Redirector>, redirect::Error> {
        let now: Box<dyn Redirector> = match config.redirect {
            Redirect::None => Box::new(NoRedirect),
            Redirect::Ebpf => Box::new(ebpf::Ebpf::open(&ebpf::Config {
                bpffs_dir: config.bpffs_dir.clone(),
                force_clsact: config.force_clsact,
                force_source_port: config.force_source_port,
                rcu_expedited: config.rcu_expedited,
                probes: config.probe_sources.clone(),
            })?),
            Redirect::Iptables => Box::new(iptables::Iptables::open(&config.iptables())?),
        };
        let mut before = Vec::new();
        for other in redirect::leftovers(&config.bpffs_dir, config.iptables()) {
            if other.backend() == now.name() {
                continue;
            }
            let pods = other.pods()?.len();
            if pods > 0 {
                info!(
                    pods,
                    from = other.backend(),
                    to = now.name(),
                    "pods were captured by an earlier agent otherwise, and are moved"
                );
                before.push(other);
            }
        }
        Ok(if before.is_empty() {
            now.into()
        } else {
            Arc::new(Moved::new(now, before))
        })
    };
    build().map_err(Error::Redirect)
}

fn proxy_metrics(config: &Config, registry: &mut Registry) -> Arc<proxy::Metrics> {
    let metrics = Arc::new(proxy::Metrics::new(config.access_log()));
    metrics.register(registry);
    metrics
}

/// Whether the files that the configuration names, and that end an agent at its start when they are wrong, are right. What they ask
/// of the backend is not looked at.
///
/// # Errors
/// What is wrong with the first.
pub fn check_files(config: &Config) -> Result<(), Error> {
    match &config.mesh {
        MeshSource::File(path) => drop(FileSource::open(path).map_err(Error::Workloads)?),
        MeshSource::Inline(text) => drop(file::parse(text, "LOCAL_XDS").map_err(Error::Workloads)?),
        MeshSource::None => {}
    }
    if let Some(path) = &config.rules {
        RulesFile::open(path, Arc::new(NoRedirect)).map_err(Error::Rules)?;
    }
    Ok(())
}

/// Whether the process may do what capturing pods needs.
///
/// # Errors
/// What it lacks, by name.
pub fn check_rights() -> Result<(), Error> {
    let missing = process::missing_capabilities().map_err(|source| Error::System {
        operation: "find out the process's capabilities",
        source,
    })?;
    if !missing.is_empty() {
        return Err(Error::Capabilities { missing });
    }
    Ok(())
}

fn raise_limits() {
    match socket::raise_file_limit() {
        Ok(limit) => info!(limit, "limit of open files"),
        Err(error) => warn!(%error, "cannot raise the limit of open files"),
    }
    // Where it is too low, loading the programs says so.
    if let Err(error) = process::raise_memlock_limit() {
        debug!(%error, "cannot raise the limit of locked memory");
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

/// Gives back soon what a burst has left.
async fn release_memory(stop: CancellationToken) {
    const INTERVAL: Duration = Duration::from_secs(10);
    while timeout(INTERVAL, stop.cancelled()).await.is_err() {
        // It holds up whoever allocates at that moment, for some milliseconds per gigabyte.
        let _ = tokio::task::spawn_blocking(process::release_memory).await;
    }
}

/// Keeps a directory to this agent for as long as the returned value lives: two agents would release each other's pods. The lock may be
/// `given` by another.
fn lock(path: &Path, flag: &'static str, given: Option<OwnedFd>) -> Result<DirectoryLock, Error> {
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
fn hold(holdings: &mut Holdings, holding: Holding, of: &impl AsFd) -> Result<(), Error> {
    holdings.add(holding, of.as_fd()).map_err(|source| Error::System {
        operation: "duplicate a descriptor",
        source,
    })
}

/// The mesh as it is now, and the tasks that follow it; and whether the control plane's part is here.
fn start_mesh(
    config: &Config,
    demand: Option<Demand>,
    registry: &mut Registry,
    tasks: &mut JoinSet<()>,
    stop: &CancellationToken,
) -> Result<(watch::Receiver<Arc<Mesh>>, xds::Awaited), Error> {
    let (source, file) = match &config.mesh {
        MeshSource::File(path) => {
            let (source, mesh) = FileSource::open(path).map_err(Error::Workloads)?;
            (Some(source), Some(mesh))
        }
        MeshSource::Inline(text) => {
            let mesh = file::parse(text, "LOCAL_XDS").map_err(Error::Workloads)?;
            (None, Some(mesh))
        }
        MeshSource::None => (None, None),
    };
    if file.is_none() && config.xds.is_none() {
        warn!(
            "neither a workload file (--workloads) nor a control plane (XDS_ADDRESS): no workload is known, so every connection of an \
             enrolled pod is refused"
        );
    }
    let (mut state, handle, receiver) = State::new(file);
    if config.xds.is_some() {
        state.await_policies();
    }
    tasks.spawn(state.run(stop.clone()));
    if let Some(source) = source {
        tasks.spawn(source.run(handle.clone(), stop.clone()));
    }
    log_mesh(&receiver);
    let Some(plane) = &config.xds else {
        return Ok((receiver, watch::channel(Vec::new()).1));
    };
    let metrics = Arc::new(xds::Metrics::default());
    metrics.register(registry);
    let (client, awaited) = xds::Client::new(
        plane.0.clone(),
        config.xds_identity.clone(),
        handle,
        demand,
        metrics,
    );
    tasks.spawn(client.run(stop.clone()));
    Ok((receiver, awaited))
}

/// The rules for the pods, and the task that follows their file.
fn start_rules(
    config: &Config,
    redirector: &Arc<dyn Redirector>,
    tasks: &mut JoinSet<()>,
    stop: &CancellationToken,
) -> Result<watch::Receiver<Arc<NodeRules>>, Error> {
    let Some(path) = &config.rules else {
        return Ok(watch::channel(Arc::default()).1);
    };
    let (file, rules) = RulesFile::open(path, Arc::clone(redirector)).map_err(Error::Rules)?;
    let (sender, receiver) = watch::channel(Arc::new(rules));
    tasks.spawn(file.run(sender, stop.clone()));
    Ok(receiver)
}

fn log_mesh(mesh: &watch::Receiver<Arc<Mesh>>) {
    let mesh = mesh.borrow();
    let ((workloads, services), policies) = (mesh.len(), mesh.policies());
    info!(workloads, services, policies, "mesh loaded");
}

/// Where certificates come from. Sources that tell them unasked begin to be followed.
fn certificates(config: &Config) -> Result<Arc<dyn CertSource>, Error> {
    let lifetime = config.svid_ttl.0;
    let by_default = match &config.certificates {
        Certificates::Authority(plane) => {
            return Ok(Arc::new(Renewing::new(IstioCa::new(plane.0.clone(), lifetime))));
        }
        Certificates::Signer(signer) => {
            let config = kubernetes_csr::Config {
                signer: signer.name.clone(),
                roots: signer.roots.clone(),
                approve: signer.approve,
                lifetime,
            };
            let kubernetes = Kubernetes::new(signer.cluster.clone());
            return Ok(Arc::new(Renewing::new(KubernetesCsr::new(kubernetes, config))));
        }
        Certificates::Directory(path) => return Ok(Arc::new(Files::follow(path))),
        Certificates::WorkloadApi(address) => return Ok(Arc::new(WorkloadApi::follow(address.clone()))),
        Certificates::DevCa { by_default } => *by_default,
    };
    if by_default {
        warn!(
            directory = %config.ca_dir.display(),
            "no CA is configured: certificates come from the built-in development CA, whose key lies on this node; only \
             nodes that share it can talk to each other (FAKE_CA=true says that this is meant)"
        );
    }
    let settings = dev_ca::Config { lifetime };
    let ca = DevCa::load_or_create(&config.ca_dir, settings).map_err(Error::DevCa)?;
    Ok(Arc::new(Renewing::new(ca)))
}

/// The listeners of admin, metrics and readiness.
struct Endpoints(Vec<(Endpoint, TcpListener)>);

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
    fn serve(
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
enum BoundSource {
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

    async fn run(
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

/// The signals that stop an agent.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> Result<Self, Error> {
        let listen = |kind| {
            signal(kind).map_err(|source| Error::System {
                operation: "listen for signals",
                source,
            })
        };
        Ok(Self {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
        })
    }

    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

/// The one line that says why an agent does not run.
pub fn explain(error: &Error) -> String {
    let mut line = Chain(error).to_string();
    if let Error::Listen { source, .. } = error
        && source.kind() == io::ErrorKind::AddrInUse
    {
        line.push_str(": another process, perhaps another agent, listens there");
    }
    line
}
