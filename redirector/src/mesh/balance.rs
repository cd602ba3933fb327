//! The choice of an endpoint of a service, for [`super::route::outbound`].

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use super::{
    index::Mesh,
    route::NoRoute,
    service::{IpFamilies, LoadBalancer, LoadBalancerMode, Scope, Service},
    workload::{Workload, canonical},
};

/// What a decision leaves to chance, and to the names that were asked for. A function that draws numbers knows no names.
pub trait Chance {
    /// One of as many numbers, from 0: the sum of the candidates' weights.
    fn below(&mut self, weights: u64) -> u64;

    /// The addresses of a host name, empty when it has none; `None` when nobody has asked for them yet.
    fn resolved(&self, _hostname: &str) -> Option<&[IpAddr]> {
        None
    }
}

impl<F: FnMut(u64) -> u64> Chance for F {
    fn below(&mut self, weights: u64) -> u64 {
        self(weights)
    }
}

/// One endpoint that a connection may go to.
pub(super) struct Endpoint<'a> {
    pub(super) workload: &'a Arc<Workload>,
    /// Where it is; unknown perhaps, when it is reached through a network gateway.
    pub(super) address: Option<IpAddr>,
    pub(super) port: u16,
}

/// What is looked for behind a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// The far end of the connection, on a port of the service.
    Destination,
    /// A waypoint: nobody asked for its port by name, so one that takes everything through an application tunnel need not
    /// have it on its service.
    Waypoint,
    /// A network gateway: as a waypoint, and reached from any network.
    Gateway,
}

/// Chooses an endpoint of `service` for `source`'s connection to `destination`, by preference and weight. Of its address, only
/// the port counts for waypoints and gateways, and the family.
///
/// Endpoints on other networks are chosen like others when a gateway leads there, and are left out otherwise.
pub(super) fn endpoint<'a>(
    mesh: &'a Mesh,
    source: &Workload,
    service: &Service,
    destination: SocketAddr,
    purpose: Purpose,
    chance: &mut dyn Chance,
) -> Result<Endpoint<'a>, NoRoute> {
    let port = destination.port();
    let service_target = service.ports.get(&port).copied();
    if service_target.is_none() && purpose == Purpose::Destination {
        return Err(NoRoute::UnknownPort {
            service: service.host.to_string(),
            port,
        });
    }
    let usable = |workload: &Workload| {
        workload.capacity > 0 && (workload.healthy || service.load_balancer.allow_unhealthy)
    };
    let mut unusable = None;
    let mut candidates = Vec::new();
    let mut best = 0;
    for workload in mesh
        .endpoints(&service.host)
        .iter()
        .filter(|workload| usable(workload))
    {
        if service_target.is_none() && workload.application_tunnel.is_none() {
            continue;
        }
        let Some(target_port) = target_port(service, service_target, workload, port) else {
            continue;
        };
        let Some(rank) = rank(&service.load_balancer, source, workload) else {
            continue;
        };
        let elsewhere = purpose != Purpose::Gateway && workload.network != source.network;
        if elsewhere && workload.network_gateway.is_none() {
            unusable = Some(Unusable::NoGateway(workload));
            continue;
        }
        let place = place(workload, service.ip_families, destination.ip(), chance);
        if let Place::Nowhere = place
            && !elsewhere
        {
            unusable = unusable.or((!workload.hostname.is_empty()).then_some(Unusable::Unresolved(workload)));
            continue;
        }
        if rank > best {
            best = rank;
            candidates.clear();
        }
        if rank == best {
            let endpoint = Endpoint {
                workload,
                address: place.address(),
                port: target_port,
            };
            let is_to_be_resolved = !elsewhere && matches!(place, Place::Unasked);
            candidates.push((endpoint, is_to_be_resolved));
        }
    }
    let weights = candidates
        .iter()
        .map(|(endpoint, _)| u64::from(endpoint.workload.capacity));
    if let Some(chosen) = weighted(weights, chance) {
        return match candidates.swap_remove(chosen) {
            (endpoint, true) => Err(unresolved(endpoint.workload)),
            (endpoint, false) => Ok(endpoint),
        };
    }
    let service = service.host.to_string();
    Err(match unusable {
        Some(Unusable::NoGateway(workload)) => NoRoute::NoGateway {
            service,
            workload: workload.uid.to_string(),
            network: workload.network.to_string(),
        },
        Some(Unusable::Unresolved(workload)) => unresolved(workload),
        None => NoRoute::NoEndpoint { service, port },
    })
}

/// Why an endpoint could not be chosen that would have been otherwise.
enum Unusable<'a> {
    NoGateway(&'a Workload),
    Unresolved(&'a Workload),
}

/// The endpoint's own mapping, else the service's; 0 there is a named port, which only endpoints can map. Behind an application
/// tunnel with a port of its own the number is of no account, and stays as it is.
pub(super) fn target_port(
    service: &Service,
    service_target: Option<u16>,
    workload: &Workload,
    port: u16,
) -> Option<u16> {
    let own = workload
        .services
        .get(&service.host)
        .and_then(|ports| ports.get(&port))
        .copied();
    own.or(service_target.filter(|port| *port != 0)).or_else(|| {
        let takes_all = workload
            .application_tunnel
            .is_some_and(|tunnel| tunnel.port.is_some());
        takes_all.then_some(port)
    })
}

/// Where a workload is, as far as that is known here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    At(IpAddr),
    /// It has only a host name, which is to be resolved first.
    Unasked,
    Nowhere,
}

impl Place {
    pub(super) fn address(self) -> Option<IpAddr> {
        match self {
            Self::At(address) => Some(address),
            Self::Unasked | Self::Nowhere => None,
        }
    }
}

/// Its [`address()`], or one of its name's, drawn, rather of the family that is `wanted`.
pub(super) fn place(
    workload: &Workload,
    families: IpFamilies,
    wanted: IpAddr,
    chance: &mut dyn Chance,
) -> Place {
    if let Some(address) = address(workload, families, wanted) {
        return Place::At(address);
    }
    if workload.hostname.is_empty() {
        return Place::Nowhere;
    }
    let Some(addresses) = chance.resolved(&workload.hostname) else {
        return Place::Unasked;
    };
    let mut usable: Vec<_> = addresses
        .iter()
        .copied()
        .map(canonical)
        // A name that leads to whoever asks leads nowhere.
        .filter(|address| !(address.is_loopback() || address.is_unspecified() || address.is_multicast()))
        .filter(|address| allows(families, *address))
        .collect();
    if usable.iter().any(|address| address.is_ipv4() == wanted.is_ipv4()) {
        usable.retain(|address| address.is_ipv4() == wanted.is_ipv4());
    }
    let drawn = weighted(usable.iter().map(|_| 1), chance);
    drawn.map_or(Place::Nowhere, |drawn| Place::At(usable[drawn]))
}

/// Of a workload that has only a host name.
pub(super) fn unresolved(workload: &Workload) -> NoRoute {
    NoRoute::Unresolved {
        workload: workload.uid.to_string(),
        hostname: workload.hostname.clone(),
    }
}

fn allows(families: IpFamilies, address: IpAddr) -> bool {
    match families {
        IpFamilies::Any => true,
        IpFamilies::V4 => address.is_ipv4(),
        IpFamilies::V6 => address.is_ipv6(),
    }
}

/// The address that the client named, when the workload has it; else the first of the client's family, else the first.
fn address(workload: &Workload, families: IpFamilies, wanted: IpAddr) -> Option<IpAddr> {
    let allowed = |address: &IpAddr| allows(families, *address);
    let own = || workload.addresses.iter().copied().map(canonical);
    own()
        .find(|address| *address == wanted)
        .or_else(|| own().find(|address| allowed(address) && address.is_ipv4() == wanted.is_ipv4()))
        .or_else(|| own().find(allowed))
}

/// How well an endpoint fits; only the best fitting are chosen from. `None` when it must not be chosen at all.
fn rank(balancer: &LoadBalancer, source: &Workload, workload: &Workload) -> Option<usize> {
    let preferences = &balancer.routing_preferences;
    let leading = |preferences: &[Scope]| {
        preferences
            .iter()
            .take_while(|scope| matches(**scope, source, workload))
            .count()
    };
    match balancer.mode {
        LoadBalancerMode::Standard | LoadBalancerMode::Passthrough => Some(0),
        LoadBalancerMode::Strict => (leading(preferences) == preferences.len()).then_some(0),
        LoadBalancerMode::Failover => Some(match preferences.split_first() {
            // Any endpoint on the source's own network comes before all others, which then still have an order.
            Some((Scope::Network, rest)) if matches(Scope::Network, source, workload) => {
                preferences.len() + leading(rest)
            }
            Some((Scope::Network, rest)) => leading(rest),
            _ => leading(preferences),
        }),
    }
}

/// Each scope stands alone, as in Istio: equal zones match whatever the regions are, and untold equals untold.
fn matches(scope: Scope, source: &Workload, workload: &Workload) -> bool {
    let (a, b) = (source, workload);
    match scope {
        Scope::Region => a.locality.region == b.locality.region,
        Scope::Zone => a.locality.zone == b.locality.zone,
        Scope::Subzone => a.locality.subzone == b.locality.subzone,
        Scope::Node => a.node == b.node,
        Scope::Cluster => a.cluster_id == b.cluster_id,
        Scope::Network => a.network == b.network,
    }
}

/// One of as many as there are weights, drawn by these; `None` when there is none that weighs anything.
pub(super) fn weighted(weights: impl Iterator<Item = u64> + Clone, chance: &mut dyn Chance) -> Option<usize> {
    let total: u64 = weights.clone().sum();
    if total == 0 {
        return None;
    }
    let mut left = chance.below(total) % total;
    weights
        .into_iter()
        .position(|weight| match left.checked_sub(weight) {
            Some(rest) => {
                left = rest;
                false
            }
            None => true,
        })
}

#[cfg(test)]
mod tests;
