//! Workloads: the pods of the mesh, on any node, as discovery tells of them.

use std::{fmt, net::IpAddr, sync::Arc};

use litemap::LiteMap;

use super::{
    policy::PolicyName,
    spiffe::{InvalidSpiffeId, SpiffeId},
};

/// A workload's unique name, e.g. `Kubernetes//Pod/shop/web-0`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkloadUid(pub Arc<str>);

impl fmt::Display for WorkloadUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// An address within a network; the empty network is the default one.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NetworkAddress {
    /// Network name.
    pub network: Arc<str>,
    /// Address; IPv4-mapped IPv6 is always held as IPv4.
    pub address: IpAddr,
}

impl fmt::Display for NetworkAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.network, self.address)
    }
}

/// A name within a Kubernetes namespace, e.g. `shop/cart.shop.svc.cluster.local`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NamespacedHostname {
    /// Kubernetes namespace.
    pub namespace: Arc<str>,
    /// Fully qualified host name.
    pub hostname: Arc<str>,
}

impl fmt::Display for NamespacedHostname {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.hostname)
    }
}

/// How a workload takes connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Protocol {
    /// Plain TCP.
    #[default]
    Tcp,
    /// HTTP/2 CONNECT over mTLS on port 15008.
    Hbone,
}

/// A waypoint or a network gateway.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayAddress {
    /// Where it is.
    pub destination: GatewayDestination,
    /// Port of its HBONE listener.
    pub hbone_mtls_port: u16,
}

impl fmt::Display for GatewayAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.destination {
            GatewayDestination::Address(address) => address.fmt(f),
            GatewayDestination::Hostname(name) => name.fmt(f),
        }
    }
}

/// Where a [`GatewayAddress`] is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GatewayDestination {
    /// By address.
    Address(NetworkAddress),
    /// By name.
    Hostname(NamespacedHostname),
}

/// How a workload's application takes what comes over HBONE, when not as plain connections to the port that was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ApplicationTunnel {
    /// Each connection begins with a PROXY protocol header that says who calls whom.
    pub proxy_protocol: bool,
    /// The port that takes all of it.
    pub port: Option<u16>,
}

/// Service port to target port.
pub type Ports = LiteMap<u16, u16>;

/// Where a node is; empty parts are not told.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Locality {
    /// Region.
    pub region: Arc<str>,
    /// Zone.
    pub zone: Arc<str>,
    /// Subzone.
    pub subzone: Arc<str>,
}

/// A workload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Workload {
    /// Unique name.
    pub uid: WorkloadUid,
    /// Pod name.
    pub name: Arc<str>,
    /// Kubernetes namespace.
    pub namespace: Arc<str>,
    /// Trust domain of its identity.
    pub trust_domain: Arc<str>,
    /// Service account of its identity.
    pub service_account: Arc<str>,
    /// Its addresses, all in `network`.
    pub addresses: Vec<IpAddr>,
    /// Its host name, when it has one of its own; a workload may have a name and no address.
    pub hostname: Arc<str>,
    /// Its network; empty is the default one.
    pub network: Arc<str>,
    /// How it takes connections.
    pub protocol: Protocol,
    /// On the node's own network: its addresses are the node's and don't name it.
    pub host_network: bool,
    /// Node name; empty when not told.
    pub node: Arc<str>,
    /// Cluster.
    pub cluster_id: Arc<str>,
    /// Where its node is.
    pub locality: Locality,
    /// The waypoint that workload-addressed traffic must go through.
    pub waypoint: Option<Box<GatewayAddress>>,
    /// The gateway by which other networks reach it.
    pub network_gateway: Option<Box<GatewayAddress>>,
    /// How its application takes what comes over HBONE, when that is special.
    pub application_tunnel: Option<ApplicationTunnel>,
    /// Whether load balancing may choose it.
    pub healthy: bool,
    /// Weight in load balancing; 0 is never chosen.
    pub capacity: u32,
    /// The services it is an endpoint of, with service port to target port.
    pub services: LiteMap<NamespacedHostname, Arc<Ports>>,
    /// Canonical name, for labels.
    pub canonical_name: Arc<str>,
    /// Canonical revision, for labels.
    pub canonical_revision: Arc<str>,
    /// Name of the controller, for labels.
    pub workload_name: Arc<str>,
    /// `deployment`, `cronjob`, `pod` or `job`: the key of its name in baggage.
    pub workload_type: &'static str,
    /// The policies that are for it, beside those of its namespace and of everywhere.
    pub authorization_policies: Vec<PolicyName>,
}

impl Workload {
    /// Its identity.
    pub fn identity(&self) -> Result<SpiffeId, InvalidSpiffeId> {
        let [trust_domain, namespace, service_account] =
            [&self.trust_domain, &self.namespace, &self.service_account].map(Arc::clone);
        SpiffeId::of(trust_domain, namespace, service_account)
    }

    /// Whether `address` is one of its own.
    pub fn has_address(&self, address: IpAddr) -> bool {
        let wanted = canonical(address);
        self.addresses.iter().any(|own| canonical(*own) == wanted)
    }

    /// Whether it is a Kubernetes pod, by the kind in its UID.
    pub fn is_pod(&self) -> bool {
        self.uid.0.contains("//Pod/")
    }
}

/// `::ffff:a.b.c.d` is `a.b.c.d`.
pub fn canonical(address: IpAddr) -> IpAddr {
    address.to_canonical()
}
