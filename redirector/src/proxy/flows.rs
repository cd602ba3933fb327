//! The connections of all pods: those that are open, and the last that have ended.
//!
//! `record` enters and ends them, `admin` tells of them. Entering takes one lock for a moment, and so does ending; nothing is put into
//! words before somebody asks.

use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use tokio::{
    sync::{Notify, Semaphore, SemaphorePermit},
    time::Instant,
};

use super::{
    failure::Flag,
    record::{Count, Direction, Party, Security},
    traffic::Series,
};
use crate::mesh::{
    pod::{PodInfo, PodUid},
    policy::PolicyName,
    route::Target,
    service::Service,
};

mod view;

pub use self::view::{ConnectionsView, FlowsView, OfPod};

/// Ended connections that are kept: some seconds of a busy node, at some 500 bytes each, with what they hold of the mesh.
const KEPT: usize = 4_096;

/// Of these, how many are copied while those that end have to wait: some ten microseconds.
const AT_A_TIME: usize = 128;

/// Requests that wait for connections to end, at one time.
const WAITERS: usize = 8;

/// A connection of a pod of this node. Its facts are settled before it is opened, and from then on it is shared.
#[derive(Debug)]
pub(crate) struct Flow {
    pub(super) id: u64,
    pub(super) pod: Arc<PodInfo>,
    pub(super) direction: Direction,
    started: SystemTime,
    began: Instant,
    pub(super) src: SocketAddr,
    pub(super) facts: Facts,
    /// Once it is known where it goes.
    pub(super) open: Option<Open>,
    /// Who is at the far end, where only a tunnel tells.
    pub(super) reached: OnceLock<Party>,
    /// The policy that let it in, or did not.
    pub(super) policy: OnceLock<PolicyName>,
}

/// What is known of a connection when it is opened.
#[derive(Debug, Clone, Default)]
pub(crate) struct Facts {
    /// Where a client wanted to go; the same as `dst` unless a service or a tunnel is between.
    pub(crate) original_dst: Option<SocketAddr>,
    /// Of the TCP connection between the pods; for HBONE the tunnel's.
    pub(crate) dst: Option<SocketAddr>,
    /// What was asked of the tunnel's far end.
    pub(crate) hbone_dst: Option<Authority>,
    pub(crate) source: Party,
    pub(crate) destination: Party,
    pub(crate) service: Option<Arc<Service>>,
    /// Joined with that of another pod of this node, without a tunnel.
    pub(crate) same_node: bool,
    /// By a tunnel within another.
    pub(crate) nested: bool,
    /// How it came to the proxy.
    pub(crate) redirect: Option<Redirect>,
}

impl Facts {
    /// How it is protected, as it is told.
    pub(super) fn security_of(&self, security: Security) -> &'static str {
        match security {
            Security::MutualTls => security.as_str(),
            Security::Unknown if self.same_node => "same_node",
            Security::Unknown => "plaintext",
        }
    }
}

/// The `:authority` of a CONNECT request. An address, as nearly all are, has no memory of its own: thousands of ended connections are
/// kept, and each piece that was allocated while they lived would keep a page of its surroundings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Authority {
    Address(SocketAddr),
    Other(Arc<str>),
}

impl From<&str> for Authority {
    fn from(text: &str) -> Self {
        match text.parse::<SocketAddr>() {
            // Told as it was asked, and some addresses have several spellings.
            Ok(address) if address.to_string() == text => Self::Address(address),
            _ => Self::Other(text.into()),
        }
    }
}

impl From<&Target> for Authority {
    fn from(target: &Target) -> Self {
        match target {
            Target::Address(address) => Self::Address(*address),
            Target::Service(..) => Self::Other(target.to_string().into()),
        }
    }
}

impl fmt::Display for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::Other(text) => f.write_str(text),
        }
    }
}

/// To which listener the pod's redirection gave a connection, and whose it was; by the names of the verdicts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Redirect {
    /// To 15001, of the pod's own application.
    Outbound,
    /// To 15001, of somebody behind the pod.
    Rerouted,
    /// To 15006.
    Inbound,
    /// To 15008.
    Hbone,
}

impl Redirect {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Outbound => "outbound",
            Self::Rerouted => "rerouted",
            Self::Inbound => "inbound",
            Self::Hbone => "hbone",
        }
    }
}

/// What there is of a connection that is open.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) security: Security,
    pub(super) sent: Count,
    pub(super) received: Count,
    /// Where it is counted.
    pub(super) series: Arc<Series>,
}

impl Flow {
    /// Who is at the server's end.
    pub(super) fn destination(&self) -> &Party {
        self.reached.get().unwrap_or(&self.facts.destination)
    }

    pub(super) fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// What there is to tell of it now.
    fn told(&self, flag: Flag, error: Option<Arc<str>>) -> Told {
        let open = self.open.as_ref();
        let destination = self.destination().clone();
        Told {
            id: self.id,
            pod: self.pod.clone(),
            direction: self.direction,
            started: self.started,
            duration: self.elapsed(),
            src: self.src,
            facts: Facts {
                destination,
                ..self.facts.clone()
            },
            security: open.map(|open| open.security),
            bytes_sent: open.map_or(0, |open| open.sent.bytes()),
            bytes_received: open.map_or(0, |open| open.received.bytes()),
            policy: self.policy.get().cloned(),
            flag,
            error,
        }
    }
}

/// What there is to tell of a connection. Of those that have ended it is all that is kept, side by side: what was allocated for each while
/// it lived lies among what else was then, and would keep all of that from being given back to the system.
#[derive(Debug, Clone)]
struct Told {
    id: u64,
    pod: Arc<PodInfo>,
    direction: Direction,
    started: SystemTime,
    duration: Duration,
    src: SocketAddr,
    /// With the destination that was reached.
    facts: Facts,
    /// Once it was known where it goes.
    security: Option<Security>,
    bytes_sent: u64,
    bytes_received: u64,
    policy: Option<PolicyName>,
    flag: Flag,
    error: Option<Arc<str>>,
}

/// The table of all connections.
#[derive(Debug, Default)]
pub struct Flows {
    ids: AtomicU64,
    table: Mutex<Table>,
    /// Another one has ended.
    more: Notify,
    waiters: Waiters,
}

/// Places for those that wait for more: each holds a connection of the admin port, which others must still find free.
#[derive(Debug)]
struct Waiters(Semaphore);

impl Default for Waiters {
    fn default() -> Self {
        Self(Semaphore::new(WAITERS))
    }
}

#[derive(Debug, Default)]
struct Table {
    live: BTreeMap<u64, Arc<Flow>>,
    ended: VecDeque<Told>,
    /// How many have ended: the number of the next that does.
    next: u64,
}

impl Table {
    /// The number of the oldest that is kept.
    fn first(&self) -> u64 {
        self.next - self.ended.len() as u64
    }
}

impl Flows {
    /// A connection that has come in, not in the table yet.
    pub(super) fn begin(&self, pod: Arc<PodInfo>, direction: Direction, src: SocketAddr) -> Arc<Flow> {
        Arc::new(Flow {
            id: self.ids.fetch_add(1, Ordering::Relaxed),
            pod,
            direction,
            started: SystemTime::now(),
            began: Instant::now(),
            src,
            facts: Facts::default(),
            open: None,
            reached: OnceLock::new(),
            policy: OnceLock::new(),
        })
    }

    /// It is open from now on.
    pub(super) fn enter(&self, flow: &Arc<Flow>) {
        self.lock().live.insert(flow.id, flow.clone());
    }

    /// It has ended, open or not.
    pub(super) fn end(&self, flow: &Arc<Flow>, flag: Flag, error: Option<Arc<str>>) {
        let ended = flow.told(flag, error);
        let forgotten = {
            let mut table = self.lock();
            table.live.remove(&flow.id);
            let forgotten = (table.ended.len() == KEPT).then(|| table.ended.pop_front());
            table.ended.push_back(ended);
            table.next += 1;
            forgotten
        };
        // What it held is given back without the lock.
        drop(forgotten);
        self.more.notify_waiters();
    }

    /// Those that are open, of `pod` (`namespace/name`) alone if one is named: the oldest, up to `limit`.
    pub fn connections(&self, pod: Option<&str>, limit: usize) -> ConnectionsView {
        let wanted = |flow: &&Arc<Flow>| pod.is_none_or(|pod| is_named(&flow.pod, pod));
        let (flows, total) = {
            let table = self.lock();
            let of_pod = table.live.values().filter(wanted);
            let flows: Vec<_> = of_pod.clone().take(limit).cloned().collect();
            (flows, of_pod.count())
        };
        ConnectionsView::of(&flows, total)
    }

    /// Those that are open, by the UIDs of their pods.
    pub fn by_pod(&self) -> BTreeMap<PodUid, OfPod> {
        let live: Vec<_> = self.lock().live.values().cloned().collect();
        let mut pods = BTreeMap::<_, OfPod>::new();
        for flow in &live {
            pods.entry(flow.pod.uid.clone()).or_default().add(flow);
        }
        pods
    }

    /// Those that have ended since `after`, the oldest first, up to `limit`; without it the last.
    pub fn ended(&self, after: Option<u64>, limit: usize) -> FlowsView {
        let (mut next, lost) = {
            let table = self.lock();
            let (first, next) = (table.first(), table.next);
            let from = match after {
                // A number that is not given out yet is of an agent before this one.
                Some(after) if after <= next => after.max(first),
                Some(_) => first,
                None => first.max(next.saturating_sub(limit as u64)),
            };
            (from, after.map_or(0, |after| first.saturating_sub(after)))
        };
        let mut ended = Vec::new();
        while ended.len() < limit {
            let table = self.lock();
            // Forgotten since: the next request is told of it.
            let Some(skipped) = next.checked_sub(table.first()) else {
                break;
            };
            // No more than are kept.
            let skipped = usize::try_from(skipped).unwrap_or(usize::MAX);
            let some = (limit - ended.len()).min(AT_A_TIME);
            let before = ended.len();
            ended.extend(table.ended.iter().skip(skipped).take(some).cloned());
            let found = ended.len() - before;
            next += found as u64;
            if found < some {
                break;
            }
        }
        FlowsView::of(&ended, next, lost)
    }

    /// A place to wait at; none while too many do.
    pub fn waiter(&self) -> Option<SemaphorePermit<'_>> {
        self.waiters.0.try_acquire().ok()
    }

    /// Waits until one has ended since `after`. Cancel-safe.
    pub async fn ended_since(&self, after: u64) {
        loop {
            // Before the look, so that none is missed between the two.
            let more = self.more.notified();
            if self.lock().next != after {
                return;
            }
            more.await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        // Each critical section leaves the table whole.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_named(pod: &PodInfo, name: &str) -> bool {
    name.split_once('/') == Some((&pod.namespace, &pod.name))
}

#[cfg(test)]
mod tests;
