//! What the proxies are told: the pods that there are, and the connections by which proxies hear of them.
//!
//! A pod is added to the proxy that came last of those that have acknowledged their snapshot, and deleted from all. One that has come,
//! and has not acknowledged it yet, hears of the pod by that; so a proxy that hangs at its start keeps no pod from the one before it.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures_util::future::join_all;
use prometheus_client::{metrics::gauge::Gauge, registry::Registry};
use prost::Message as _;
use tokio::{
    sync::{Notify, mpsc, oneshot, watch},
    time::{Instant, timeout, timeout_at},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::super::zds_proto::{
    AddWorkload, DelWorkload, KeepWorkload, Request, SnapshotSent, WorkloadInfo, WorkloadRequest,
};
use crate::{
    mesh::pod::{PodInfo, PodUid},
    redirect::Peer,
    sys::netns::{Netns, NetnsId},
};

/// Time that a new pod waits for a proxy to be there.
const WAIT_FOR_PROXY: Duration = Duration::from_secs(3);

/// Time for a request and its answer, with those that wait before it. The connection has deadlines of its own for each.
const REQUEST_DEADLINE: Duration = Duration::from_secs(10);

/// Most connections at a time: two proxies while one takes over from the other, and some that hang. The oldest gives way.
const MAX_CONNECTIONS: usize = 16;

/// Requests that wait for a connection. Who finds no place waits, for [`REQUEST_DEADLINE`].
const REQUESTS: usize = 64;

/// Why a pod has no proxy.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nobody to tell.
    #[error(
        "no proxy is connected to the ZDS socket (--ztunnel-uds), or none has acknowledged its snapshot: is ztunnel running on this \
         node, with INPOD_UDS naming that socket?"
    )]
    NoProxy,
    /// The proxy says no.
    #[error("the proxy refuses the pod: {0}")]
    Refused(String),
    /// It says nothing.
    #[error("the proxy has not acknowledged the pod within {REQUEST_DEADLINE:?}")]
    NoAnswer,
    /// The connection has ended meanwhile.
    #[error("the connection to the proxy ended before it acknowledged the pod")]
    Gone,
    /// The pod is told of in more than fits.
    #[error(
        "UID, name, namespace and service account of the pod are too long for a message of ZDS, by {0} bytes"
    )]
    TooLong(usize),
}

/// The pods, and the proxies that are connected.
#[derive(Debug)]
pub struct Proxies {
    state: Mutex<State>,
    /// Counts the connections that have acknowledged their snapshot.
    synced: watch::Sender<u64>,
    /// Told when captured pods are to be looked at.
    look: Arc<Notify>,
    /// How many proxies are connected.
    connected: Gauge,
}

#[derive(Debug, Default)]
struct State {
    pods: BTreeMap<PodUid, Told>,
    /// The one that came last is the last.
    connections: Vec<Connection>,
    last_id: u64,
    peers: Arc<[Peer]>,
}

/// What is told of a pod.
#[derive(Debug, Clone)]
pub(super) enum Told {
    /// That it is.
    Exists,
    /// All.
    Pod(Arc<PodInfo>, Arc<Netns>),
}

impl Told {
    /// What tells one state of a pod from another.
    pub(super) fn netns(&self) -> Option<NetnsId> {
        match self {
            Self::Exists => None,
            Self::Pod(_, netns) => Some(netns.id()),
        }
    }
}

#[derive(Debug)]
struct Connection {
    id: u64,
    peer: Peer,
    greeted: bool,
    synced: bool,
    requests: mpsc::Sender<Order>,
    close: CancellationToken,
}

/// A new connection's side.
pub(super) struct Registered {
    pub(super) id: u64,
    pub(super) requests: mpsc::Receiver<Order>,
    /// Another takes its place.
    pub(super) close: CancellationToken,
}

/// A request with the channel for its answer.
#[derive(Debug)]
pub(super) struct Order {
    pub(super) message: Outgoing,
    /// The pod, if it is to be deleted.
    pub(super) deletes: Option<PodUid>,
    pub(super) reply: oneshot::Sender<Result<(), Error>>,
}

/// A message to a proxy.
#[derive(Debug, Clone)]
pub(super) struct Outgoing {
    pub(super) bytes: Vec<u8>,
    pub(super) netns: Option<Arc<Netns>>,
}

impl Outgoing {
    fn of(request: Request) -> Vec<u8> {
        WorkloadRequest {
            payload: Some(request),
        }
        .encode_to_vec()
    }

    /// Of a pod: all of it with its namespace, or that it is.
    pub(super) fn pod(uid: &PodUid, told: &Told) -> Self {
        let uid = uid.to_string();
        match told {
            Told::Exists => Self {
                bytes: Self::of(Request::Keep(KeepWorkload { uid })),
                netns: None,
            },
            Told::Pod(info, netns) => {
                let workload_info = Some(WorkloadInfo {
                    name: info.name.clone(),
                    namespace: info.namespace.clone(),
                    service_account: info.service_account.clone(),
                });
                Self {
                    bytes: Self::of(Request::Add(AddWorkload { uid, workload_info })),
                    netns: Some(Arc::clone(netns)),
                }
            }
        }
    }

    pub(super) fn delete(uid: &PodUid) -> Self {
        Self {
            bytes: Self::of(Request::Del(DelWorkload { uid: uid.to_string() })),
            netns: None,
        }
    }

    pub(super) fn snapshot_sent() -> Self {
        Self {
            bytes: Self::of(Request::SnapshotSent(SnapshotSent {})),
            netns: None,
        }
    }
}

impl Proxies {
    /// Nobody yet. `look` is notified when captured pods are to be looked at: a proxy has come, or has gone.
    pub fn new(look: Arc<Notify>) -> Self {
        Self {
            state: Mutex::default(),
            synced: watch::channel(0).0,
            look,
            connected: Gauge::default(),
        }
    }

    /// Registers the metric of the proxies, by istio-cni's name.
    pub fn register_metrics(&self, registry: &mut Registry) {
        let help = "Proxies that are connected to the ZDS socket and have said hello";
        registry.register("ztunnel_connected", help, self.connected.clone());
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Pods that there are, of which the rest is still to be found out: proxies that serve them go on.
    pub fn expect(&self, pods: impl IntoIterator<Item = PodUid>) {
        let mut state = self.state();
        for uid in pods {
            state.pods.entry(uid).or_insert(Told::Exists);
        }
    }

    /// The proxies that are connected, the one that came last first.
    pub fn peers(&self) -> Arc<[Peer]> {
        Arc::clone(&self.state().peers)
    }

    /// Has a proxy begin to serve a pod. Returns when its listeners are bound.
    ///
    /// # Errors
    /// Then it is told of no more, unless it was expected; and if it was asked, it is told to let go of it.
    pub async fn add(&self, info: &PodInfo, netns: &Arc<Netns>) -> Result<(), Error> {
        let uid = &info.uid;
        let told = Told::Pod(Arc::new(info.clone()), Arc::clone(netns));
        let message = Outgoing::pod(uid, &told);
        let excess = message
            .bytes
            .len()
            .saturating_sub(super::connection::MAX_MESSAGE_BYTES);
        if excess > 0 {
            return Err(Error::TooLong(excess));
        }
        let before = self.state().pods.insert(uid.clone(), told);
        let added = self.ask_newest(message).await;
        if added.is_err() {
            match before {
                Some(Told::Exists) => {
                    self.state().pods.insert(uid.clone(), Told::Exists);
                }
                // A proxy that has refused it would try again, and not be ready meanwhile.
                _ => self.remove(uid).await,
            }
        }
        added
    }

    async fn ask_newest(&self, message: Outgoing) -> Result<(), Error> {
        let mut synced = self.synced.subscribe();
        let deadline = Instant::now() + WAIT_FOR_PROXY;
        let requests = loop {
            synced.borrow_and_update();
            if let Some(requests) = self.newest_synced() {
                break requests;
            }
            match timeout_at(deadline, synced.changed()).await {
                Ok(Ok(())) => {}
                _ => return Err(Error::NoProxy),
            }
        };
        ask(&requests, message, None).await
    }

    fn newest_synced(&self) -> Option<mpsc::Sender<Order>> {
        let state = self.state();
        let newest = state
            .connections
            .iter()
            .rev()
            .find(|connection| connection.synced);
        newest.map(|connection| connection.requests.clone())
    }

    /// Has all proxies let go of a pod. What fails is logged: the end of a connection brings another snapshot.
    pub async fn remove(&self, uid: &PodUid) {
        let connections: Vec<_> = {
            let mut state = self.state();
            state.pods.remove(uid);
            let all = state.connections.iter();
            all.map(|connection| (connection.id, connection.requests.clone()))
                .collect()
        };
        let asked = connections.into_iter().map(async |(id, requests)| {
            let deleted = ask(&requests, Outgoing::delete(uid), Some(uid.clone())).await;
            if let Err(error) = deleted {
                warn!(connection = id, %uid, %error, "a proxy was not told in time that the pod is gone");
            }
        });
        join_all(asked).await;
    }

    /// A connection begins. It is known before its hello is read, so that it misses no delete.
    pub(super) fn register(&self, peer: Peer) -> Registered {
        let (sender, requests) = mpsc::channel(REQUESTS);
        let close = CancellationToken::new();
        let mut state = self.state();
        if state.connections.len() >= MAX_CONNECTIONS {
            state.connections[0].close.cancel();
        }
        state.last_id += 1;
        let id = state.last_id;
        state.connections.push(Connection {
            id,
            peer,
            greeted: false,
            synced: false,
            requests: sender,
            close: close.clone(),
        });
        Registered { id, requests, close }
    }

    /// A connection has said hello: its process is a proxy.
    pub(super) fn greet(&self, id: u64) {
        self.change(id, |connection| connection.greeted = true);
    }

    /// A connection has ended.
    pub(super) fn unregister(&self, id: u64) {
        let mut state = self.state();
        state.connections.retain(|connection| connection.id != id);
        self.tell_peers(&mut state);
        drop(state);
        // What listens now may be another's.
        self.look.notify_one();
    }

    fn change(&self, id: u64, change: impl FnOnce(&mut Connection)) {
        let mut state = self.state();
        if let Some(connection) = state
            .connections
            .iter_mut()
            .find(|connection| connection.id == id)
        {
            change(connection);
        }
        self.tell_peers(&mut state);
    }

    fn tell_peers(&self, state: &mut State) {
        state.tell_peers();
        self.connected.set(state.peers.len() as i64);
    }

    /// A pod of which a connection has been told nothing, or what is true no more.
    pub(super) fn untold(&self, told: &HashMap<PodUid, Option<NetnsId>>) -> Option<(PodUid, Told)> {
        self.state().untold(told)
    }

    /// A connection has acknowledged its snapshot. If there are new pods meanwhile, one of them is returned, and it is not taken for
    /// complete.
    pub(super) fn synced(&self, id: u64, told: &HashMap<PodUid, Option<NetnsId>>) -> Option<(PodUid, Told)> {
        let mut state = self.state();
        if let Some(untold) = state.untold(told) {
            return Some(untold);
        }
        let connection = state
            .connections
            .iter_mut()
            .find(|connection| connection.id == id);
        if let Some(connection) = connection {
            connection.synced = true;
        }
        drop(state);
        debug!(
            connection = id,
            pods = told.len(),
            "the proxy has acknowledged its snapshot"
        );
        self.synced.send_modify(|count| *count += 1);
        self.look.notify_one();
        None
    }

    /// How many connections have ever acknowledged their snapshot.
    #[cfg(test)]
    pub(super) fn synced_ever(&self) -> u64 {
        *self.synced.borrow()
    }

    /// Whether there is such a pod.
    pub(super) fn has(&self, uid: &PodUid) -> bool {
        self.state().pods.contains_key(uid)
    }
}

impl State {
    fn tell_peers(&mut self) {
        let greeted = self
            .connections
            .iter()
            .rev()
            .filter(|connection| connection.greeted);
        let peers: Vec<_> = greeted.map(|connection| connection.peer.clone()).collect();
        if *self.peers != *peers {
            self.peers = peers.into();
        }
    }

    fn untold(&self, told: &HashMap<PodUid, Option<NetnsId>>) -> Option<(PodUid, Told)> {
        let known = |uid: &PodUid, pod: &Told| match told.get(uid) {
            // That it exists says less than what was told.
            Some(netns) => pod.netns().is_none() || *netns == pod.netns(),
            None => false,
        };
        let mut pods = self.pods.iter();
        let (uid, pod) = pods.find(|(uid, pod)| !known(uid, pod))?;
        Some((uid.clone(), pod.clone()))
    }
}

async fn ask(
    requests: &mpsc::Sender<Order>,
    message: Outgoing,
    deletes: Option<PodUid>,
) -> Result<(), Error> {
    let (reply, answer) = oneshot::channel();
    let asked = async {
        let order = Order {
            message,
            deletes,
            reply,
        };
        requests.send(order).await.map_err(|_| Error::Gone)?;
        answer.await.unwrap_or(Err(Error::Gone))
    };
    timeout(REQUEST_DEADLINE, asked)
        .await
        .unwrap_or(Err(Error::NoAnswer))
}
