//! Services: names and virtual addresses in front of workloads.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use litemap::LiteMap;

use super::{
    spiffe::SpiffeId,
    workload::{GatewayAddress, NamespacedHostname, NetworkAddress, canonical},
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
    /// Ranges of virtual addresses.
    pub cidr_vips: Vec<CidrVip>,
    /// Service port to target port; 0 is a named port, which the endpoints map themselves.
    pub ports: LiteMap<u16, u16>,
    /// Identities that stand for the service beside its endpoints' own.
    pub subject_alt_names: Vec<SpiffeId>,
    /// The waypoint that service-addressed traffic must go through.
    pub waypoint: Option<GatewayAddress>,
    /// Waypoints with weights, by which one is drawn for each connection; they go before `waypoint`.
    pub weighted_waypoints: Vec<WeightedWaypoint>,
    /// How an endpoint is chosen.
    pub load_balancer: LoadBalancer,
    /// Which family an endpoint's address is taken from.
    pub ip_families: IpFamilies,
    /// Preferred among services of one host name in several namespaces.
    pub canonical: bool,
    /// Hidden from other namespaces.
    pub namespace_only: bool,
}

impl Service {
    /// All waypoints that its traffic may go through.
    pub fn waypoints(&self) -> impl Iterator<Item = &GatewayAddress> {
        let weighted = self.weighted_waypoints.iter().map(|one| &one.destination);
        weighted.chain(&self.waypoint)
    }
}

/// A range of virtual addresses.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CidrVip {
    /// Network and first address of the range.
    pub first: NetworkAddress,
    /// Leading bits that the range has in common.
    pub prefix_len: u8,
}

impl CidrVip {
    /// The range of `prefix_len` bits that holds `address`; `None` when an address has fewer bits.
    pub fn of(network: Arc<str>, address: IpAddr, prefix_len: u8) -> Option<Self> {
        let address = Self::first_of(address, prefix_len)?;
        Some(Self {
            first: NetworkAddress { network, address },
            prefix_len,
        })
    }

    /// The first address of that range.
    pub(super) fn first_of(address: IpAddr, prefix_len: u8) -> Option<IpAddr> {
        Some(match canonical(address) {
            IpAddr::V4(address) => {
                let shift = 32_u32.checked_sub(prefix_len.into())?;
                IpAddr::V4(Ipv4Addr::from_bits(
                    address.to_bits() & u32::MAX.checked_shl(shift).unwrap_or(0),
                ))
            }
            IpAddr::V6(address) => {
                let shift = 128_u32.checked_sub(prefix_len.into())?;
                IpAddr::V6(Ipv6Addr::from_bits(
                    address.to_bits() & u128::MAX.checked_shl(shift).unwrap_or(0),
                ))
            }
        })
    }
}

/// One of several waypoints of a service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightedWaypoint {
    /// The waypoint.
    pub destination: GatewayAddress,
    /// Its share of the connections, in proportion to the others'; 0 is none.
    pub weight: u32,
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
