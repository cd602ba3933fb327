//! The HTTP/2 connections of one pod to its peers, shared by all of its tunnelled connections.
//!
//! `proxy::outbound` asks for a stream and says how to reach the peer, should a new connection be needed. Per peer at most
//! one connection is being made at a time; whoever waits meanwhile shares its outcome.

use std::{
    collections::HashMap,
    future::Future,
    net::SocketAddr,
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures_util::FutureExt;
use http::Request;
use prometheus_client::metrics::gauge::Gauge;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::{Instant, sleep_until, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    Http2Config,
    client::{self, Connection, Dialled, Driver, Error, Lease, Stream},
    nested,
    window::WindowBudget,
};
use crate::{
    mesh::{spiffe::SpiffeId, workload::WorkloadUid},
    proxy::metrics::Counted,
};

/// Settings of the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolConfig {
    /// Streams on one connection, if the peer does not ask for fewer.
    pub max_streams_per_connection: usize,
    /// Time after which a connection without streams is closed.
    pub unused_release: Duration,
    /// Time that a connection waits for one to its peer to be made, by itself or by others before it.
    pub acquire_deadline: Duration,
    /// Time from TCP to HTTP/2: for TLS and HTTP/2 each.
    pub handshake_deadline: Duration,
    /// Time in which a peer answers CONNECT; it must reach its application in that time.
    pub response_deadline: Duration,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self {
            max_streams_per_connection: 100,
            unused_release: Duration::from_secs(300),
            acquire_deadline: Duration::from_secs(30),
            handshake_deadline: Duration::from_secs(10),
            // Istio's peers wait up to 5 s for the workload and 10 s for its application.
            response_deadline: Duration::from_secs(25),
        }
    }
}

/// Which connections are alike: same caller, same wanted identities, same workload, same place. An address alone is not a peer:
/// it may belong to another pod by now, even to one of the same identity, and the connections to the one before it may not have
/// noticed.
///
/// Istio's proxy has the caller's address in the key too. Here each pod has a pool of its own, and dials from its own
/// namespace, where the kernel takes the source address that leads to the tunnel's: the rest of the key says it already.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub(crate) source: SpiffeId,
    /// Who is at the far end: the pod, the waypoint, or the gateway.
    pub(crate) workload: WorkloadUid,
    /// In order: the order is the route's, and the same route makes the same.
    pub(crate) expected: Arc<[SpiffeId]>,
    pub(crate) tunnel: SocketAddr,
}

/// The pool.
#[derive(Debug)]
pub(crate) struct Pool {
    peers: Arc<Peers>,
    /// Numbers connections in the order in which they are begun.
    numbers: AtomicU64,
    http2: Http2Config,
    windows: WindowBudget,
    config: PoolConfig,
    tasks: TaskTracker,
    kill: CancellationToken,
    /// Counts the connections of all pods' pools.
    open: Gauge,
}

#[derive(Debug, Default)]
struct Peers(Mutex<HashMap<Key, Peer>>);

#[derive(Debug, Default)]
struct Peer {
    /// Usable ones, and full ones that will be usable again. At most as many as carry all of the pod's connections.
    connections: Vec<Arc<Connection>>,
    /// Held by whoever makes a connection.
    turn: Arc<tokio::sync::Mutex<()>>,
    /// Attempts to make a connection that are over.
    attempts: u64,
    /// The latest that was in vain, and which it was.
    failure: Option<(u64, Arc<Error>)>,
}

impl Pool {
    /// A pool whose connections all end when `kill` is cancelled; their tasks are among `tasks`.
    pub(crate) fn new(
        http2: Http2Config,
        config: PoolConfig,
        tasks: TaskTracker,
        kill: CancellationToken,
    ) -> Self {
        Self {
            peers: Arc::default(),
            numbers: AtomicU64::new(1),
            windows: WindowBudget::new(&http2),
            http2,
            config,
            tasks,
            kill,
            open: Gauge::default(),
        }
    }

    /// The same, whose connections are counted by `open` as long as they live.
    pub(crate) fn counted_by(self, open: Gauge) -> Self {
        Self { open, ..self }
    }

    /// Opens a stream to the peer that `key` names, by a connection of the pool or by one that `dial` makes. A connection of
    /// the pool that turns out to be lost is replaced, once.
    pub(crate) async fn open<IO, F>(
        &self,
        key: &Key,
        request: &Request<()>,
        dial: impl Fn() -> F,
    ) -> Result<Stream, Arc<Error>>
    where
        IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        F: Future<Output = Result<Dialled<IO>, Error>>,
    {
        let (lease, is_new) = self.lease(key, 0, &dial).await?;
        let number = lease.0.number;
        match lease
            .request(request.clone(), self.config.response_deadline)
            .await
        {
            Err(error) if error.is_connection_lost() => {
                self.discard(key, number);
                if is_new {
                    return Err(Arc::new(error));
                }
                tracing::debug!(tunnel = %key.tunnel, %error, "pooled connection was lost; trying another");
                // Of the others in the pool those that are no younger may be lost too, and not know it.
                let (lease, _) = self.lease(key, number + 1, &dial).await?;
                lease
                    .request(request.clone(), self.config.response_deadline)
                    .await
                    .map_err(Arc::new)
            }
            result => result.map_err(Arc::new),
        }
    }

    /// Opens a stream of its own connection, which `dialled` leads to and nobody else uses. The caller runs the driver.
    pub(crate) async fn open_alone<IO>(
        &self,
        tunnel: SocketAddr,
        request: Request<()>,
        dialled: Dialled<IO>,
    ) -> Result<(Stream, nested::Driver), Error>
    where
        IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let window = self.windows.share();
        nested::open(dialled, tunnel, request, self.http2, window, self.config).await
    }

    /// A lease on a connection with a number of at least `oldest`, and whether it was made for this call.
    async fn lease<IO, F>(
        &self,
        key: &Key,
        oldest: u64,
        dial: &impl Fn() -> F,
    ) -> Result<(Lease, bool), Arc<Error>>
    where
        IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        F: Future<Output = Result<Dialled<IO>, Error>>,
    {
        let limit = self.config.max_streams_per_connection;
        // Dropped after the turn.
        let _forget = Forget {
            peers: &self.peers,
            key,
        };
        let (turn, seen) = {
            let mut peers = self.peers.lock();
            let peer = peers.entry(key.clone()).or_default();
            if let Some(lease) = peer.lease(oldest, limit) {
                return Ok((lease, false));
            }
            (peer.turn.clone(), peer.attempts)
        };
        let after = self.config.acquire_deadline;
        let busy = |_| {
            Arc::new(Error::Busy {
                tunnel: key.tunnel,
                after,
            })
        };
        let _turn = timeout(after, turn.lock_owned()).await.map_err(busy)?;
        {
            let mut peers = self.peers.lock();
            let peer = peers.entry(key.clone()).or_default();
            if let Some(lease) = peer.lease(oldest, limit) {
                return Ok((lease, false));
            }
            match &peer.failure {
                // It ended after this call began: trying again at once would tell nothing new.
                Some((attempt, error)) if *attempt > seen => return Err(error.clone()),
                _ => {}
            }
        }
        // Boxed, since it takes several kilobytes that most connections, which find a tunnel, would carry with them.
        let made = Box::pin(self.connect(key, dial)).await;
        let mut peers = self.peers.lock();
        let peer = peers.entry(key.clone()).or_default();
        peer.attempts += 1;
        match made {
            Ok((connection, driver)) => {
                let lease = connection.lease(limit);
                peer.connections.push(connection.clone());
                let (peers, kill) = (self.peers.clone(), self.kill.clone());
                let counted = Counted::by(&self.open);
                let running = run(
                    key.clone(),
                    driver,
                    connection,
                    peers,
                    self.config.unused_release,
                    kill,
                );
                self.tasks.spawn(running.map(move |()| drop(counted)));
                lease.map(|lease| (lease, true)).ok_or_else(|| {
                    let source = h2::Reason::REFUSED_STREAM.into();
                    Arc::new(Error::Http2 {
                        tunnel: key.tunnel,
                        source,
                    })
                })
            }
            Err(error) => {
                let error = Arc::new(error);
                peer.failure = Some((peer.attempts, error.clone()));
                Err(error)
            }
        }
    }

    async fn connect<IO, F>(
        &self,
        key: &Key,
        dial: &impl Fn() -> F,
    ) -> Result<(Arc<Connection>, Driver<IO>), Error>
    where
        IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        F: Future<Output = Result<Dialled<IO>, Error>>,
    {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        let dialled = dial().await?;
        let tunnel = key.tunnel;
        let after = self.config.handshake_deadline;
        let limit = self.config.max_streams_per_connection;
        timeout(
            after,
            client::handshake(dialled, number, tunnel, limit, self.http2, self.windows.share()),
        )
        .await
        .map_err(|_| Error::HandshakeTimeout { tunnel, after })?
        .map_err(|source| Error::Http2 { tunnel, source })
    }

    /// Peers that the pool knows of.
    #[cfg(test)]
    pub(super) fn peer_count(&self) -> usize {
        self.peers.lock().len()
    }

    fn discard(&self, key: &Key, number: u64) {
        if let Some(peer) = self.peers.lock().get_mut(key) {
            peer.connections.retain(|connection| {
                let other = connection.number != number;
                if !other {
                    connection.retire();
                }
                other
            });
        }
    }
}

impl Peers {
    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Peer>> {
        // Every critical section leaves the map whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets a peer without connections, unless somebody waits for one: their turn must be one and the same for all.
    fn forget(&self, key: &Key) {
        let mut peers = self.lock();
        let unused = |peer: &Peer| peer.connections.is_empty() && Arc::strong_count(&peer.turn) == 1;
        if peers.get(key).is_some_and(unused) {
            peers.remove(key);
        }
    }
}

/// Forgets a peer that a call has left without a connection, however the call ended.
struct Forget<'a> {
    peers: &'a Peers,
    key: &'a Key,
}

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        self.peers.forget(self.key);
    }
}

impl Peer {
    fn lease(&self, oldest: u64, limit: usize) -> Option<Lease> {
        self.connections
            .iter()
            .filter(|connection| connection.number >= oldest)
            .find_map(|connection| connection.lease(limit))
    }
}

/// Drives a connection to its end: its own, idleness, or the pod's; then forgets it.
async fn run<IO: AsyncRead + AsyncWrite + Unpin>(
    key: Key,
    driver: Driver<IO>,
    connection: Arc<Connection>,
    peers: Arc<Peers>,
    unused_release: Duration,
    kill: CancellationToken,
) {
    {
        let mut driver = pin!(driver.run());
        let mut check = Instant::now() + unused_release;
        loop {
            tokio::select! {
                () = &mut driver => break,
                () = kill.cancelled() => break,
                () = sleep_until(check), if !connection.is_retired() => {
                    // Under the lock, so that nobody is given a stream in between.
                    let _peers = peers.lock();
                    let now = Instant::now();
                    check = connection.idle_since().unwrap_or(now) + unused_release;
                    if check <= now {
                        connection.retire();
                    }
                }
            }
        }
    }
    connection.retire();
    if let Some(peer) = peers.lock().get_mut(&key) {
        peer.connections.retain(|other| !Arc::ptr_eq(other, &connection));
    }
    peers.forget(&key);
}
