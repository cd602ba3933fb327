//! Pod lifecycle: events in, captured pods out.
//!
//! Sources of events ([`cni_server`], [`zds`], [`restore`]) send [`PodEvent`]s; [`lifecycle`] carries them out and answers
//! each, with proxies of this agent's ([`launch`]) or of other processes ([`others`], over [`zds_server`]). What a captured pod's connections do is `proxy`'s matter, how they get there `redirect`'s.

use std::{io, net::IpAddr, path::PathBuf, sync::Arc};

use tokio::sync::oneshot;

use crate::{
    mesh::pod::{PodInfo, PodUid},
    proxy,
    redirect::{self, overrides::Overrides},
    sys::netns::{Netns, NetnsId},
    telemetry::Chain,
};

pub mod admission;
pub mod cni_server;
pub mod kubernetes;
pub mod launch;
pub mod lifecycle;
pub mod others;
pub mod pause;
pub mod records;
pub mod restore;
pub mod rules;
pub mod socket_file;
pub mod status;
pub mod wire;
mod work;
pub mod zds;
mod zds_proto;
pub mod zds_server;

/// A pod that is to be captured.
#[derive(Debug, Clone)]
pub struct PodAdd {
    /// Who it is.
    pub info: PodInfo,
    /// Its namespace.
    pub netns: Arc<Netns>,
    /// Where the namespace was opened, when it was opened by path.
    pub netns_path: Option<PathBuf>,
    /// The addresses its event named; empty when the event has none (ZDS).
    pub addresses: Vec<IpAddr>,
    /// What it says of its own rules; `None` where the event does not tell, and what was told before holds.
    pub rules: Option<Box<Overrides>>,
    /// What happens when it fails.
    pub on_failure: OnFailure,
}

/// What becomes of a pod whose capture failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnFailure {
    /// It is reported, and the sender of the event tries again or gives up.
    Report,
    /// It is reported, and tried again until it works or the pod is deleted.
    Retry,
}

/// A pod that is to be released.
#[derive(Debug, Clone)]
pub struct PodDelete {
    /// Which.
    pub uid: PodUid,
    /// The namespace that it had, when the event names one: the delete of a namespace that the pod has left is late, and
    /// releases nothing.
    pub netns: Option<NetnsRef>,
}

/// A namespace as a delete names it; it may be gone already.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetnsRef {
    /// Its path.
    pub path: PathBuf,
    /// What is there now.
    pub id: Option<NetnsId>,
}

/// The channel for an event's answer.
pub type Reply = oneshot::Sender<Result<(), Error>>;

/// What a source of pod events tells.
#[derive(Debug)]
pub enum PodEvent {
    /// Capture this pod.
    Add(PodAdd, Reply),
    /// This pod exists, though its namespace is not known yet.
    Keep(PodUid, Reply),
    /// Release this pod.
    Delete(PodDelete, Reply),
    /// All pods that exist have been named: release the others.
    SnapshotSent(Reply),
    /// The source begins anew: another snapshot comes. Until its end nothing is released.
    Resync,
}

/// Why an event could not be carried out.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The namespace is the node's.
    #[error("{netns} is the node's own network namespace, not a pod's")]
    NodeNamespace {
        /// Which.
        netns: NetnsId,
    },
    /// Another pod has the namespace.
    #[error(
        "{netns} already belongs to the pod with UID {owner}: release that first (/cmddel with this PodUID)"
    )]
    Duplicate {
        /// Which.
        netns: NetnsId,
        /// Whose it is.
        owner: PodUid,
    },
    /// The event's address is not the pod's.
    #[error("address {address} is on no interface in {netns}, which has {found}")]
    AddressNotFound {
        /// The address.
        address: IpAddr,
        /// The namespace.
        netns: NetnsId,
        /// What is there.
        found: String,
    },
    /// The pod cannot be reached.
    #[error("{netns} has no address yet that others could reach: its interfaces have {found}")]
    NoAddress {
        /// The namespace.
        netns: NetnsId,
        /// What is there.
        found: String,
    },
    /// The namespace was deleted.
    #[error("{path} is no longer {netns}: the pod's namespace is gone", path = .path.display())]
    NamespaceGone {
        /// Where it was.
        path: PathBuf,
        /// Which it was.
        netns: NetnsId,
    },
    /// The namespace cannot be entered.
    #[error("cannot look into {netns}")]
    Inspect {
        /// Which.
        netns: NetnsId,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The pod has no usable identity.
    #[error("pod {pod} has no usable identity")]
    Identity {
        /// Namespace and name.
        pod: String,
        /// Why.
        #[source]
        source: crate::mesh::spiffe::InvalidSpiffeId,
    },
    /// The proxy did not start.
    #[error("cannot start the proxy in the pod")]
    Start(#[source] proxy::StartError),
    /// A proxy that is another process does not serve the pod.
    #[error("no proxy serves the pod")]
    OtherProxy(#[source] zds_server::Error),
    /// What only this agent's own proxy can do.
    #[error(
        "the rules want the pod to be strict, which a proxy that is another process (--ztunnel-uds) is not told: leave it to the mesh's \
         policies (PeerAuthentication)"
    )]
    StrictByAnother,
    /// The backend could not attach.
    #[error("cannot capture the pod's traffic")]
    Attach(#[source] redirect::Error),
    /// What is in place could not be given the pod's real UID.
    #[error("cannot give the pod its real UID")]
    Rename(#[source] redirect::Error),
    /// The backend refuses rules that have come since the pod was captured.
    #[error("the pod's newest rules are refused, and those from before stay in force")]
    NewRules(#[source] Box<Error>),
    /// The backend could not detach.
    #[error("cannot release the pod: {}", .0.iter().map(|error| Chain(error).to_string()).collect::<Vec<_>>().join("; "))]
    Detach(Vec<redirect::Error>),
    /// The pod's record could not be written or removed.
    #[error("cannot keep the record of the pod")]
    Record(#[source] records::Error),
    /// A fault of ours.
    #[error("internal fault: {step} panicked")]
    Panicked {
        /// What was being done.
        step: &'static str,
    },
    /// The event breaks the protocol's rules.
    #[error("{0}")]
    Protocol(&'static str),
    /// The agent is stopping.
    #[error("the agent is stopping")]
    Stopping,
}

impl Error {
    /// Whether another event for the same pod may do where this one failed.
    fn is_of_the_event(&self) -> bool {
        matches!(
            self,
            Self::NodeNamespace { .. }
                | Self::AddressNotFound { .. }
                | Self::NamespaceGone { .. }
                | Self::Identity { .. }
        )
    }
}
