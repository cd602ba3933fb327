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
    choose: &mut dyn FnMut(u64) -> u64,
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
        let address = address(workload, service.ip_families, destination.ip());
        if address.is_none() && !elsewhere {
            unusable = unusable.or((!workload.hostname.is_empty()).then_some(Unusable::Unresolved(workload)));
            continue;
        }
        if rank > best {
            best = rank;
            candidates.clear();
        }
        if rank == best {
            candidates.push(Endpoint {
                workload,
                address,
                port: target_port,
            });
        }
    }
    let weights = candidates
        .iter()
        .map(|endpoint| u64::from(endpoint.workload.capacity));
    if let Some(chosen) = weighted(weights, choose) {
        return Ok(candidates.swap_remove(chosen));
    }
    let service = service.host.to_string();
    Err(match unusable {
        Some(Unusable::NoGateway(workload)) => NoRoute::NoGateway {
            service,
            workload: workload.uid.to_string(),
            network: workload.network.to_string(),
        },
        Some(Unusable::Unresolved(workload)) => NoRoute::Unresolved {
            workload: workload.uid.to_string(),
            hostname: workload.hostname.to_string(),
        },
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

/// The address that the client named, when the workload has it; else the first of the client's family, else the first.
pub(super) fn address(workload: &Workload, families: IpFamilies, wanted: IpAddr) -> Option<IpAddr> {
    let allowed = |address: &IpAddr| match families {
        IpFamilies::Any => true,
        IpFamilies::V4 => address.is_ipv4(),
        IpFamilies::V6 => address.is_ipv6(),
    };
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
pub(super) fn weighted(
    weights: impl Iterator<Item = u64> + Clone,
    choose: &mut dyn FnMut(u64) -> u64,
) -> Option<usize> {
    let total: u64 = weights.clone().sum();
    if total == 0 {
        return None;
    }
    let mut left = choose(total) % total;
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
