//! The data path: three listeners in each pod, and what becomes of a connection on each.
//!
//! `pods::lifecycle` starts and stops a [`PodProxy`] per pod.
//!
//! - `accept`: the accept loop that the listeners share
//! - `addresses`: which are the pod's own
//! - `outbound`: 15001, the pod's own connections; over HBONE or plain
//! - `inbound`: 15008, HBONE from other pods
//! - `passthrough`: 15006, plain connections from outside
//! - `same_node`: from 15001 to another pod of this node without a tunnel, if that is wanted
//! - `connections`: the inbound connections, under the pod's policies
//! - `hbone`, `dial`, `copy`: tunnels, connections, and the bytes between them
//! - `peers`: what one peer may have of a pod's proxy
//! - `plaintext`: what must not be in plain, and what is
//! - `baggage`, `proxy_protocol`: what is told of callers to other proxies, and to applications
//! - `record`: a connection's entry in the counters and in the access log; `access_log`: its line there; `metrics`, `traffic`: what is
//!   counted; `flows`: what is open and what has ended; `failure`: why

use std::{
    io,
    net::IpAddr,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use redirector_common::consts::{Mark, PORT_HBONE, PORT_INBOUND, PORT_OUTBOUND};
use tokio::{
    net::TcpListener,
    sync::watch,
    time::{Instant, error::Elapsed, timeout},
};
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};

use self::{
    accept::Listener,
    addresses::OwnAddresses,
    baggage::OwnBaggage,
    connections::Connections,
    dial::DialPorts,
    flows::Flows,
    hbone::{pool::Pool, window::WindowBudget},
    peers::Peers,
    plaintext::Plaintext,
    record::{Direction, Party, Recorder},
    same_node::Residence,
};
use crate::{
    discovery::demand::{Asker, Demand},
    identity::store::{Held, Store},
    mesh::{
        index::Mesh,
        pod::{Home, Local, PodInfo},
    },
    redirect::{Listeners, Redirector},
    sys::{
        netns::Netns,
        socket::{self, Keepalive},
    },
};

mod accept;
pub mod access_log;
mod addresses;
pub mod baggage;
mod connections;
mod copy;
mod dial;
mod draw;
mod failure;
pub mod flows;
mod hbone;
mod inbound;
mod metrics;
mod names;
mod outbound;
mod passthrough;
mod peers;
mod plaintext;
pub mod proxy_protocol;
mod record;
mod relay;
mod same_node;
mod settled;
mod traffic;

#[cfg(test)]
mod tests;

pub use self::{
    hbone::{Http2Config, pool::PoolConfig},
    metrics::Metrics,
    names::Names,
    peers::PeerConfig,
    same_node::Residents,
};

/// The header that names a caller's address, and the service that it called.
const FORWARDED: &str = "forwarded";

/// The header by which a caller on another network says which that is: its address means nothing here.
const FORWARDED_NETWORK: &str = "x-forwarded-network";

/// Settings of the data path.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where this node is.
    pub home: Home,
    /// Whether the listeners take IPv6.
    pub ipv6: bool,
    /// Time in which a connection to another pod or to the application must stand.
    pub connect_deadline: Duration,
    /// Time in which a peer must be through with TLS on 15008, and again with HTTP/2.
    pub handshake_deadline: Duration,
    /// Time for which bytes that a broken connection had sent are still delivered.
    pub tail_deadline: Duration,
    /// Time for which a connection of a pod that the mesh does not know yet is held. ztunnel's.
    pub mesh_deadline: Duration,
    /// Connections that a pod may have open at a time on each of its three listeners, and as many tunnelled to its
    /// application. More wait in the listener's backlog; of the tunnelled, more are refused. The default is half of the
    /// source ports that one client has towards one server: no pod that works comes near it, and one that loops leaves the
    /// node's other pods alive.
    pub max_connections: usize,
    /// What one peer may have of them.
    pub peers: PeerConfig,
    /// Whether applications that want PROXY protocol headers are called on loopback, rather than on the pod's address.
    pub loopback_application_tunnel: bool,
    /// Whether callers are told of the workload that they have reached, and what they tell of themselves is used in logs.
    pub response_baggage: bool,
    /// Whether connections between two pods of this node are joined here, without TLS, after the same checks.
    pub same_node_direct: bool,
    /// When a silent peer is taken for gone.
    pub keepalive: Keepalive,
    /// HTTP/2.
    pub http2: Http2Config,
    /// Tunnels to other pods.
    pub pool: PoolConfig,
}

/// Connections that a pod may have open on a listener, where nothing else is said.
const MAX_CONNECTIONS: usize = 16_384;

impl Default for Config {
    fn default() -> Self {
        Self {
            home: Home::default(),
            ipv6: true,
            connect_deadline: Duration::from_secs(10),
            handshake_deadline: Duration::from_secs(10),
            tail_deadline: Duration::from_secs(30),
            mesh_deadline: Duration::from_secs(5),
            max_connections: MAX_CONNECTIONS,
            peers: PeerConfig::of(MAX_CONNECTIONS),
            loopback_application_tunnel: true,
            response_baggage: true,
            same_node_direct: false,
            keepalive: Keepalive::default(),
            http2: Http2Config::default(),
            pool: PoolConfig::default(),
        }
    }
}

/// What all pods' proxies share.
pub struct Shared {
    /// The mesh as it is now.
    pub mesh: watch::Receiver<Arc<Mesh>>,
    /// Certificates.
    pub identities: Arc<Store>,
    /// The backend, for marks and original destinations.
    pub redirector: Arc<dyn Redirector>,
    /// Settings.
    pub config: Config,
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// Connections that are open, and that have ended.
    pub flows: Arc<Flows>,
    /// The pods that are served.
    pub residents: Residents,
    /// Where the mesh is not fetched as a whole: by whom it is asked for what is not here.
    pub demand: Option<Demand>,
    /// Addresses of workloads that have only names.
    pub names: Names,
    /// Cancelled when connections may be accepted: until then they wait in the queues of the listeners.
    pub open: CancellationToken,
    /// Tracks the listeners: it is empty when all are closed.
    pub listening: TaskTracker,
}

/// The pod that a proxy serves.
pub struct PodContext {
    /// Who it is.
    pub info: PodInfo,
    /// Its identity, kept supplied with a certificate.
    pub identity: Held,
    /// Its namespace.
    pub netns: Arc<Netns>,
    /// Its addresses: those of its event, and those that its interfaces have now.
    pub addresses: Vec<IpAddr>,
    /// Whether it is refused to speak in plain; [`PodProxy::set_strict`] changes it.
    pub strict: bool,
    /// Listeners that another agent has handed over, on ports 15001, 15006 and 15008; without them they are made.
    pub listeners: Option<[OwnedFd; 3]>,
}

/// The proxy of one pod: its listeners and its connections.
pub struct PodProxy {
    pod: Arc<Pod>,
    outbound: Listener,
    inbound: Listener,
    hbone: Listener,
    /// The listeners are from another agent.
    inherited: bool,
    residence: Option<Residence>,
    /// A proxy that is dropped, rather than stopped, ends as well, though nobody waits for it.
    ended: DropGuard,
}

/// Why a pod's proxy could not start.
#[derive(Debug, thiserror::Error)]
#[error("{operation}: {source}")]
pub struct StartError {
    /// What was tried.
    pub operation: String,
    /// Why it failed.
    #[source]
    pub source: std::io::Error,
}

/// What the connections of a pod share.
struct Pod {
    shared: Arc<Shared>,
    info: PodInfo,
    /// Who it is, in records.
    party: Party,
    recorder: Arc<Recorder>,
    identity: Held,
    netns: Arc<Netns>,
    /// For the windows of the tunnels that come in.
    inbound_windows: WindowBudget,
    addresses: OwnAddresses,
    pool: Pool,
    dial_ports: DialPorts,
    /// What comes in, under the pod's policies.
    connections: Arc<Connections>,
    baggage: OwnBaggage,
    asker: Option<Asker>,
    /// For what its peers have it ask.
    asker_of_peers: Option<Asker>,
    /// Bounds the connections that are tunnelled to the application.
    tunnelled: Arc<tokio::sync::Semaphore>,
    /// Bounds what each peer has of the pod.
    peers: Peers,
    /// Whether it may speak in plain.
    plaintext: Arc<Plaintext>,
    /// Accept loops and connections.
    tasks: TaskTracker,
    /// Tunnels of the pool, and the task that follows the policies: what ends with the pod, not with its connections.
    tunnels: TaskTracker,
    /// No new connections.
    drain: CancellationToken,
    /// No connections; cancels `drain` too.
    kill: CancellationToken,
}

impl PodProxy {
    /// Binds the listeners in the pod's namespace, or takes those that are given, and begins to accept. Must be called within a tokio
    /// runtime.
    ///
    /// # Errors
    /// When a port is taken, the namespace cannot be entered, or a right is missing; nothing is left behind then.
    pub fn start(shared: Arc<Shared>, mut pod: PodContext) -> Result<Self, StartError> {
        let marks = shared.redirector.marks();
        let listeners = pod.listeners.take();
        let inherited = listeners.is_some();
        let mut given = listeners.into_iter().flatten();
        let mut listen = |port, mark| listen(&shared, &pod.netns, port, mark, given.next());
        let outbound = listen(PORT_OUTBOUND, marks.outbound_listener)?;
        let inbound = listen(PORT_INBOUND, marks.inbound_listeners)?;
        let hbone = listen(PORT_HBONE, marks.inbound_listeners)?;

        let pod = Pod::new(shared, pod);
        if pod.asker.is_some() {
            let asking = Arc::clone(&pod).ask_for_itself();
            pod.tunnels
                .spawn(pod.kill.clone().run_until_cancelled_owned(asking));
        }
        Ok(Self {
            ended: pod.kill.clone().drop_guard(),
            outbound: Listener::start(&pod, outbound, Direction::Outbound, outbound::connection),
            inbound: Listener::start(&pod, inbound, Direction::Inbound, passthrough::connection),
            hbone: Listener::start(&pod, hbone, Direction::Inbound, inbound::connection),
            inherited,
            // Last: it is found by others from here on.
            residence: Residence::of(&pod),
            pod,
        })
    }

    /// The listeners, for the backend.
    pub fn listeners(&self) -> Listeners<'_> {
        Listeners {
            outbound: self.outbound.as_fd(),
            inbound: self.inbound.as_fd(),
            hbone: self.hbone.as_fd(),
            inherited: self.inherited,
        }
    }

    /// Refuses what the pod would send or get in plain from now on, or allows it. Open connections in plain are reset when it is
    /// refused; those over HBONE go on, and so does what the pod says to itself.
    pub fn set_strict(&self, strict: bool) {
        self.pod.plaintext.set_strict(strict);
    }

    /// Stops accepting, asks HBONE peers to go elsewhere (GOAWAY), waits up to `grace` for connections to end, and
    /// closes the rest. A `grace` of zero closes all at once. Returns when no task and no socket of the pod is left.
    pub async fn stop(self, grace: Duration) {
        let Self {
            pod,
            outbound,
            inbound,
            hbone,
            residence,
            ended,
            ..
        } = self;
        pod.drain.cancel();
        drop(residence);
        // The accept loops drop their share of the listeners meanwhile.
        drop((outbound, inbound, hbone));
        pod.tasks.close();
        pod.tunnels.close();
        if timeout(grace, pod.tasks.wait()).await.is_err() && !grace.is_zero() {
            tracing::warn!(uid = %pod.info.uid, ?grace, connections = pod.tasks.len(), "closing connections that outlast the drain");
        }
        drop(ended);
        // Killed: every task ends at its next await.
        pod.tasks.wait().await;
        pod.tunnels.wait().await;
    }
}

fn listen(
    shared: &Shared,
    netns: &Netns,
    port: u16,
    mark: Option<Mark>,
    given: Option<OwnedFd>,
) -> Result<TcpListener, StartError> {
    let listener = || -> std::io::Result<TcpListener> {
        let socket = match given {
            Some(given) => socket::inherited(given, port)?,
            None => netns.run(|| socket::bound(port, mark, shared.config.ipv6))??,
        };
        shared.redirector.own_socket(socket.as_fd())?;
        TcpListener::from_std(socket::listen(socket, shared.config.keepalive)?)
    };
    listener().map_err(|source| StartError {
        operation: format!("listening on port {port} in {}", netns.id()),
        source,
    })
}

impl Pod {
    /// A pod without listeners. Its tasks end when it is killed.
    fn new(shared: Arc<Shared>, pod: PodContext) -> Arc<Self> {
        let PodContext {
            info,
            identity,
            netns,
            addresses,
            strict,
            listeners: _,
        } = pod;
        let (tunnels, kill) = (TaskTracker::new(), CancellationToken::new());
        let pool = Pool::new(
            shared.config.http2,
            shared.config.pool,
            tunnels.clone(),
            kill.clone(),
        )
        .counted_by(shared.metrics.tunnels.clone());
        let connections = Connections::new(info.clone(), shared.config.home.clone(), shared.mesh.clone());
        let connections = Arc::new(connections.in_one_domain(identity.domains().clone()));
        tunnels.spawn(
            kill.clone()
                .run_until_cancelled_owned(connections.clone().follow()),
        );
        Arc::new(Self {
            pool,
            connections,
            peers: Peers::new(shared.config.peers),
            plaintext: Arc::new(Plaintext::new(shared.metrics.clone(), &info, strict)),
            party: (&info).into(),
            recorder: Recorder::new(shared.metrics.clone(), shared.flows.clone(), &info),
            info,
            identity,
            netns,
            addresses: OwnAddresses::new(addresses),
            inbound_windows: WindowBudget::new(&shared.config.http2),
            dial_ports: DialPorts::default(),
            baggage: OwnBaggage::default(),
            asker: shared.demand.as_ref().map(Demand::asker),
            asker_of_peers: shared.demand.as_ref().map(Demand::asker_of_peers),
            tunnelled: Arc::new(tokio::sync::Semaphore::new(shared.config.max_connections)),
            tasks: TaskTracker::new(),
            tunnels,
            drain: kill.child_token(),
            kill,
            shared,
        })
    }

    /// Runs `task` until it ends or the pod's connections are killed. A panic ends that task alone.
    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let kill = self.kill.clone();
        // Boxed, or it would be held several times: as what is captured, and as what is awaited.
        self.tasks.spawn(kill.run_until_cancelled_owned(Box::pin(task)));
    }

    fn local(&self) -> Local<'_> {
        Local {
            info: &self.info,
            home: &self.shared.config.home,
        }
    }

    /// Who the pod is, and what the mesh has of it now.
    fn own_party(&self) -> Party {
        let mesh = self.shared.mesh.borrow();
        Party {
            of: mesh.local(self.local()).cloned(),
            ..self.party.clone()
        }
    }

    /// Counts a TLS handshake that is over, or was not in time.
    fn count_handshake<T>(
        &self,
        direction: Direction,
        began: Instant,
        result: &Result<io::Result<T>, Elapsed>,
    ) {
        let failed = match result {
            Ok(Ok(_)) => None,
            Ok(Err(error)) => Some(failure::handshake_reason(error)),
            Err(_) => Some("timeout"),
        };
        if failed == Some(failure::PEER_REVOKED) {
            self.shared.metrics.revoked(direction);
        }
        let handshakes = &self.shared.metrics.handshakes;
        handshakes.over(direction, began.elapsed(), failed);
    }

    fn mesh(&self) -> Arc<Mesh> {
        self.shared.mesh.borrow().clone()
    }

    /// Whether `address` is the pod's own, so that what goes there is on no wire.
    fn is_self(&self, address: IpAddr) -> bool {
        address.is_loopback() || address.is_unspecified() || self.has_address(address)
    }

    /// Whether `address` is one of the pod's own, as far as that is known without asking.
    fn knows_address(&self, address: IpAddr) -> bool {
        self.addresses.known_to_have(address)
    }

    /// Whether `address` is one of the pod's own.
    fn has_address(&self, address: IpAddr) -> bool {
        self.addresses.have(address, || {
            let asked = self.netns.run(socket::own_addresses);
            asked.and_then(|found| found).map_err(|error| {
                tracing::warn!(uid = %self.info.uid, %error, "cannot list the pod's addresses");
            })
        })
    }
}
