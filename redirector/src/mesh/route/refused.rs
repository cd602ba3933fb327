//! Why an outbound connection goes nowhere.

use std::{net::SocketAddr, sync::Arc};

use crate::mesh::{spiffe::InvalidSpiffeId, wanted::Unanswered, workload::GatewayAddress};

/// Why an outbound connection goes nowhere. It is then closed, and never sent in plain.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum NoRoute {
    /// A call to one of the proxy's own ports, on loopback or on the pod's own address: it would come back here.
    #[error("{0} is a port of the proxy itself")]
    ProxyPort(SocketAddr),
    /// The mesh does not know the local pod, so perhaps not the destination either.
    #[error(
        "the mesh has no workload for the local pod {namespace}/{name} with service account {service_account} on \
         network {network:?}"
    )]
    UnknownSource {
        /// Kubernetes namespace.
        namespace: String,
        /// Pod name.
        name: String,
        /// Service account.
        service_account: String,
        /// The node's network.
        network: String,
    },
    /// The destination must be reached through a waypoint, and that cannot be reached.
    #[error("{destination} must be reached through waypoint {waypoint}")]
    Waypoint {
        /// Workload or service.
        destination: String,
        /// Its waypoint.
        waypoint: String,
        /// What is wrong with it.
        #[source]
        source: Box<Self>,
    },
    /// The service has waypoints, of which none may be chosen.
    #[error("all waypoints of {service} have weight 0")]
    WeightlessWaypoints {
        /// The service.
        service: String,
    },
    /// The workload must be reached through a network gateway, and that cannot be reached.
    #[error("{workload} on network {network:?} must be reached through gateway {gateway}")]
    NetworkGateway {
        /// The workload's UID.
        workload: String,
        /// Its network.
        network: String,
        /// Its gateway.
        gateway: String,
        /// What is wrong with it.
        #[source]
        source: Box<Self>,
    },
    /// No gateway leads to a workload on another network.
    #[error("{workload} of {service} is on network {network:?}, and has no networkGateway")]
    NoGateway {
        /// The service.
        service: String,
        /// The workload's UID.
        workload: String,
        /// Its network.
        network: String,
    },
    /// A waypoint or gateway that the mesh does not know.
    #[error("the mesh has no service or workload {0}")]
    UnknownGateway(GatewayAddress),
    /// Only services can be asked for on other networks.
    #[error(
        "waypoint {waypoint} of {destination} is on another network, where workloads cannot be asked for"
    )]
    NotByService {
        /// The workload's UID.
        destination: String,
        /// Its waypoint's UID.
        waypoint: String,
    },
    /// Nobody on another network could prove to stand for the service.
    #[error("nothing on network {network:?} can prove to be {service}: it has no subjectAltNames")]
    NoServiceIdentity {
        /// The service.
        service: String,
        /// The other network.
        network: String,
    },
    /// The workload has a name and no address, and the name has not been asked for, or has no address that may be used.
    #[error("workload {workload} has no address but only the hostname {hostname:?}, and that has none")]
    Unresolved {
        /// The workload's UID.
        workload: String,
        /// Its host name.
        hostname: Arc<str>,
    },
    /// The service does not have the port.
    #[error("{service} has no port {port}")]
    UnknownPort {
        /// The service.
        service: String,
        /// The port.
        port: u16,
    },
    /// Nothing is behind the service.
    #[error("{service} has no healthy endpoint for port {port}")]
    NoEndpoint {
        /// The service.
        service: String,
        /// The service port.
        port: u16,
    },
    /// Nobody could prove to be the workload.
    #[error("workload {workload} is to be reached over HBONE, but has no identity")]
    NoIdentity {
        /// The workload's UID.
        workload: String,
        /// What its identity lacks.
        #[source]
        source: InvalidSpiffeId,
    },
    /// The mesh is asked for piece by piece, and nobody answers.
    #[error(transparent)]
    Unanswered(#[from] Unanswered),
}

impl NoRoute {
    /// Whether a newer snapshot of the mesh is likely to have the answer: the local pod has only just been enrolled, and
    /// is not in it yet. Worth waiting for, for a bounded time.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::UnknownSource { .. })
    }

    /// The host name that has to be asked for first.
    pub fn unresolved(&self) -> Option<&Arc<str>> {
        match self.root() {
            Self::Unresolved { hostname, .. } => Some(hostname),
            _ => None,
        }
    }

    /// What is wrong in the end, with whomever the destination must be reached through.
    pub(in crate::mesh) fn root(&self) -> &Self {
        match self {
            Self::Waypoint { source, .. } | Self::NetworkGateway { source, .. } => source.root(),
            own => own,
        }
    }
}
