//! Services: names and virtual addresses in front of workloads.

use std::{collections::BTreeMap, sync::Arc};

use super::{
    spiffe::SpiffeId,
    workload::{GatewayAddress, NamespacedHostname, NetworkAddress},
};

/// A service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Service {
    /// Namespace and fully qualified host name: its key.
    pub host: NamespacedHostname,
    /// Kubernetes name.
    pub name: Arc<str>,
    /// Virtual addresses; none for a headless service.
    pub vips: Vec<NetworkAddress>,
    /// Service port to target port; 0 is a named port, which the endpoints map themselves.
    pub ports: BTreeMap<u16, u16>,
    /// Identities that stand for the service beside its endpoints' own.
    pub subject_alt_names: Vec<SpiffeId>,
    /// The waypoint that service-addressed traffic must go through.
    pub waypoint: Option<GatewayAddress>,
    /// How an endpoint is chosen.
    pub load_balancer: LoadBalancer,
    /// Which family an endpoint's address is taken from.
    pub ip_families: IpFamilies,
    /// Preferred among services of one host name in several namespaces.
    pub canonical: bool,
    /// Hidden from other namespaces.
    pub namespace_only: bool,
}

/// How an endpoint is chosen.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LoadBalancer {
    /// What is compared with the caller, most important first.
    pub routing_preferences: Vec<Scope>,
    /// What the preferences mean.
    pub mode: LoadBalancerMode,
    /// Unhealthy endpoints count too.
    pub allow_unhealthy: bool,
}

/// What the routing preferences mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LoadBalancerMode {
    /// All endpoints are equal.
    #[default]
    Standard,
    /// Only endpoints that match every preference.
    Strict,
    /// The endpoints that match the most leading preferences.
    Failover,
    /// No choice: the original destination, in plain.
    Passthrough,
}

/// One routing preference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Same region.
    Region,
    /// Same zone.
    Zone,
    /// Same subzone.
    Subzone,
    /// Same node.
    Node,
    /// Same cluster.
    Cluster,
    /// Same network.
    Network,
}

/// Which family an endpoint's address is taken from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum IpFamilies {
    /// Either.
    #[default]
    Any,
    /// IPv4 alone.
    V4,
    /// IPv6 alone.
    V6,
}
