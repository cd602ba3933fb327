//! How a pod's packets reach the proxy's listeners: the backend seam.
//!
//! `pods::lifecycle` attaches and detaches; `proxy` asks for the original destination and has its sockets told apart.

pub mod ebpf;
pub mod iptables;
mod maps;
pub mod metrics;
pub mod moved;
pub mod none;
pub mod overrides;
pub mod probers;
mod routes;
pub mod rules;
mod sysctls;

use std::{
    io,
    net::{IpAddr, SocketAddr},
    os::fd::BorrowedFd,
    path::Path,
    sync::Arc,
};

use redirector_common::consts::Mark;

use self::rules::Rules;
use crate::{
    mesh::pod::PodUid,
    sys::{
        netns::{Netns, Place},
        pidfd::Process,
    },
};

/// A pod's network, as a backend needs to know it.
#[derive(Debug, Clone)]
pub struct PodNetwork {
    /// Which pod.
    pub uid: PodUid,
    /// Its namespace.
    pub netns: Arc<Netns>,
    /// The addresses its event named; at least one is on an interface in the namespace.
    pub addresses: Vec<IpAddr>,
    /// Which of its connections are captured.
    pub rules: Rules,
}

/// The proxy's listeners in a pod.
#[derive(Debug, Clone, Copy)]
pub struct Listeners<'a> {
    /// Port 15001.
    pub outbound: BorrowedFd<'a>,
    /// Port 15006.
    pub inbound: BorrowedFd<'a>,
    /// Port 15008.
    pub hbone: BorrowedFd<'a>,
    /// They are from another agent of this node, which has attached the pod to them.
    pub inherited: bool,
}

/// Whose listeners take a pod's connections.
#[derive(Debug, Clone)]
pub enum Serving<'a> {
    /// This agent's.
    Own(Listeners<'a>),
    /// Those of other processes, the one that came last first. Each has one mark, `0x539/0xfff`, for all its sockets, and transparent
    /// listeners on the same ports. A backend takes hold of them only while it attaches: a listener lives as long as a descriptor.
    Others(Arc<[Peer]>),
}

/// A proxy that another process is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// The process.
    pub process: Process,
    /// The id of its cgroup (version 2), by which its connections are told from the applications'; `None` where it has none that can be
    /// told.
    pub cgroup: Option<u64>,
}

/// The marks (SO_MARK) that a backend wants on the proxy's sockets in a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Marks {
    /// The 15001 listener; `None` leaves it without, so that its accepted sockets take the mark of the packet.
    pub outbound_listener: Option<Mark>,
    /// The 15006 and 15008 listeners.
    pub inbound_listeners: Option<Mark>,
    /// Connections to other pods and to the world.
    pub upstream: Option<Mark>,
    /// Connections to the pod's own application.
    pub application: Option<Mark>,
    /// Connections to the application are bound to lo, and take their source port from the reserved range.
    pub application_over_lo: bool,
}

/// How `attach` leaves a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[must_use]
pub struct Attached {
    /// What its capture lacks, though all that the backend makes is in place; for want of it connections are refused.
    pub lacks: Option<String>,
}

/// How a pod's packets reach the proxy. Blocking (netlink, bpf(2)): call `attach` and `detach` from `spawn_blocking`.
pub trait Redirector: Send + Sync {
    /// The backend's name: `ebpf`, `iptables`, `none`.
    fn name(&self) -> &'static str;

    /// The marks it wants.
    fn marks(&self) -> Marks;

    /// Why this backend takes no pod with these rules, whatever the pod; `None` if it may. What depends on the pod, `attach` tells.
    fn refuses(&self, rules: &Rules) -> Option<String>;

    /// Brings the pod to the captured state, whatever state it is in; adopts what an earlier agent left. New rules are for new
    /// connections: open ones go on as they began.
    fn attach(&self, pod: &PodNetwork, serving: Serving<'_>) -> Result<Attached, Error>;

    /// Captures nothing new from now on; connections that are captured go on. `detach` follows, once they have ended.
    fn release(&self, pod: &PodNetwork) -> Result<(), Error>;

    /// Removes what `attach` made, and with it the captured connections that are left. Goes on after a failure and reports
    /// every one. A namespace that is gone is success.
    fn detach(&self, pod: &PodNetwork) -> Result<(), Vec<Error>>;

    /// Removes what an earlier agent left for a pod that is no longer here.
    fn forget(&self, uid: &PodUid) -> Result<(), Vec<Error>>;

    /// The pod `from` has the UID `to`, which nothing is in place for, from now on. What is in place for it stays so all the while.
    fn rename(&self, from: &PodUid, to: &PodUid) -> Result<(), Error>;

    /// The pods for which something is in place, whoever attached them.
    fn attached(&self) -> Result<Vec<PodUid>, Error>;

    /// Where the client of an accepted connection wanted to go: an error, never a guess.
    fn original_dst(&self, connection: BorrowedFd<'_>) -> io::Result<SocketAddr>;

    /// Whether an accepted outbound connection is of somebody behind the pod, by one of the interfaces that its rules name. Its client
    /// has an address that is not the pod's.
    fn is_rerouted(&self, connection: BorrowedFd<'_>) -> io::Result<bool>;

    /// What the pod's programs have counted; nothing for a backend without programs.
    fn counts(&self, uid: &PodUid) -> Result<Vec<Count>, Error>;

    /// How full its maps are; nothing for a backend without maps.
    fn occupancy(&self) -> Vec<metrics::Occupancy> {
        Vec::new()
    }

    /// What it has put back; `None` for a backend that looks after nothing.
    fn repairs(&self) -> Option<&metrics::Repairs> {
        None
    }

    /// Looks who probes the pods from this node, and leaves their connections alone from now on; `None` for a backend that can't
    /// tell. Blocking; to be called before the first pod is attached, and then every few seconds.
    fn look_for_probers(&self) -> Result<Option<probers::View>, Error> {
        Ok(None)
    }

    /// Does ahead what the next pods would have to wait for, and puts back what all pods share. Blocking; to be called before the
    /// first pod is attached, and then every second or two.
    fn make_ready(&self) -> Result<(), Error> {
        Ok(())
    }

    /// Forgets what it remembers of pods and reads again what is in place: another agent has had them meanwhile, and has not kept them.
    /// Blocking; nothing is attached or released at that time.
    fn reread(&self) -> Result<(), Error> {
        Ok(())
    }

    /// Tells a socket of the proxy's own, before it connects or listens, from the applications'.
    fn own_socket(&self, socket: BorrowedFd<'_>) -> io::Result<()>;
}

/// What a backend has left in pods: found and removed without opening the backend, and so whatever this kernel can, and
/// whichever backend serves the pods now. All methods block.
pub trait Leftovers: Send + Sync {
    /// The backend's name, as [`Redirector::name`] has it.
    fn backend(&self) -> &'static str;

    /// The pods for which something is in place, whoever attached them.
    fn pods(&self) -> Result<Vec<PodUid>, Error>;

    /// Removes all there is for a pod, as [`Redirector::detach`] does: in its namespace `netns`, or in the one it was attached
    /// to, if that is still there.
    fn remove(&self, uid: &PodUid, netns: Option<&Netns>) -> Result<(), Vec<Error>>;

    /// Removes what all pods share, and the directories; after the last pod's.
    fn remove_shared(&self) -> Result<(), Vec<Error>>;
}

/// Those of all backends that leave something.
pub fn leftovers(bpffs_dir: &Path, iptables: iptables::Config) -> Vec<Box<dyn Leftovers>> {
    vec![
        Box::new(ebpf::leftovers::Pinned::new(bpffs_dir)),
        Box::new(iptables::leftovers::Recorded::new(iptables)),
    ]
}

fn place_of(netns: &Netns) -> Result<Place, Error> {
    let place = netns.place();
    place.map_err(|error| Error::new(format!("reading the cookie of {}", netns.id()), error))
}

/// Packets counted by one program for one reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Count {
    /// `egress`, `ingress` or `lookup`.
    pub program: &'static str,
    /// What became of them.
    pub verdict: &'static str,
    /// How many, since the pod was attached.
    pub packets: u64,
}

/// Why a backend could not do something.
#[derive(Debug, thiserror::Error)]
#[error("{operation}: {source}")]
pub struct Error {
    /// What was tried, with its object.
    pub operation: String,
    /// Why it failed.
    #[source]
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

impl Error {
    /// `operation` failed because of `source`.
    pub fn new(
        operation: impl Into<String>,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self {
            operation: operation.into(),
            source: source.into(),
        }
    }
}
