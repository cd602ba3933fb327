//! Where a connection goes: pure decisions over a [`Mesh`] snapshot.
//!
//! `proxy` asks [`outbound`] for each connection that a pod opens, [`inbound()`] for each CONNECT request that a pod is sent,
//! and [`passthrough_allowed`] for plaintext. What cannot be served as the mesh says is refused: never sent another way.
//!
//! - `gateway`: which workload a waypoint or a network gateway is
//! - `inbound`: what a CONNECT request asks for
//! - `refused`: why an outbound connection goes nowhere

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use redirector_common::consts::{PORT_HBONE, PORT_INBOUND, PORT_OUTBOUND, PROXY_PORTS};

use self::gateway::{Chosen, Found};
use super::{
    balance::{self, Endpoint, Purpose},
    index::Mesh,
    pod::Local,
    service::{LoadBalancerMode, Service},
    spiffe::SpiffeId,
    workload::{ApplicationTunnel, GatewayAddress, Protocol, Workload, canonical},
};

mod gateway;
mod inbound;
mod refused;

pub use super::balance::Chance;

pub use self::{
    inbound::{Refusal, Upstream, inbound},
    refused::NoRoute,
};

/// Where an outbound connection goes.
#[derive(Debug, Clone)]
pub enum Route {
    /// Over HBONE.
    Hbone(HboneRoute),
    /// As it is, in plain TCP.
    Plain(PlainRoute),
}

/// An HBONE tunnel, and what to ask of its far end.
#[derive(Debug, Clone)]
pub struct HboneRoute {
    /// The local pod's own workload.
    pub caller: Arc<Workload>,
    /// The tunnel's far end: `podIP:15008`, or a waypoint's or network gateway's address and port.
    pub tunnel: SocketAddr,
    /// The workload there.
    pub far_end: Arc<Workload>,
    /// The identities of which the far end must show one; never empty.
    pub expected: Arc<[SpiffeId]>,
    /// The CONNECT request's `:authority`.
    pub authority: Target,
    /// A second tunnel within this one, to the other network behind the gateway at the far end: the identities of which its own
    /// far end must show one; never empty. Its `:authority` is the same.
    pub inner: Option<Arc<[SpiffeId]>>,
    /// The workload chosen: the pod, or the waypoint that will choose it.
    pub workload: Arc<Workload>,
    /// The service that was called.
    pub service: Option<Arc<Service>>,
}

/// What is asked of a tunnel's far end.
#[derive(Debug, Clone)]
pub enum Target {
    /// An address: the chosen pod's with its target port; or of a waypoint what the client itself called.
    Address(SocketAddr),
    /// A service by name, with the service port: of another network, whose addresses mean nothing here.
    Service(Arc<Service>, u16),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::Service(service, port) => write!(f, "{}:{port}", service.host.hostname),
        }
    }
}

/// A plain connection.
#[derive(Debug, Clone)]
pub struct PlainRoute {
    /// Where to.
    pub target: SocketAddr,
    /// The workload there, when the mesh knows one.
    pub workload: Option<Arc<Workload>>,
    /// The service it was chosen through.
    pub service: Option<Arc<Service>>,
}

/// Who calls.
struct Caller<'a> {
    mesh: &'a Mesh,
    source: &'a Arc<Workload>,
    /// The address that it calls from.
    client: IpAddr,
}

/// Where a connection of `local`, made from its address `client`, to `destination` goes. What is not decided by
/// the mesh is up to `chance`, which also has the addresses of host names. For a name that it has not, the answer is
/// [`NoRoute::Unresolved`].
///
/// A virtual address comes before a workload's own. Where both are the same, that differs from Istio's proxy in one point: the
/// service's waypoint holds for it there too, so that nobody gets past its policy by giving a workload that address.
pub fn outbound(
    mesh: &Mesh,
    local: Local<'_>,
    client: IpAddr,
    destination: SocketAddr,
    chance: &mut dyn Chance,
) -> Result<Route, NoRoute> {
    let destination = SocketAddr::new(canonical(destination.ip()), destination.port());
    // On loopback only: an application that speaks HBONE itself may call port 15008 of others.
    if destination.ip().is_loopback() && PROXY_PORTS.contains(&destination.port()) {
        return Err(NoRoute::ProxyPort(destination));
    }
    let network = local.home.network.as_str();
    let source = mesh.local(local).ok_or_else(|| NoRoute::UnknownSource {
        namespace: local.info.namespace.clone(),
        name: local.info.name.clone(),
        service_account: local.info.service_account.clone(),
        network: network.to_owned(),
    })?;
    let caller = Caller { mesh, source, client };
    let workload_at = || mesh.workload_at(network, destination.ip());
    if let Some(service) = mesh.service_at(network, destination.ip(), &local.info.namespace) {
        if let Some(waypoint) = drawn_waypoint(service, chance)? {
            // Behind the waypoint the address is the workload's.
            let is_behind = workload_at().is_some() && gateway::is_caller(&caller, waypoint);
            if !is_behind {
                return through_waypoint(&caller, waypoint, destination, Found::Service(service), chance);
            }
        }
        if service.load_balancer.mode == LoadBalancerMode::Passthrough {
            return direct(source, None, destination, Some(service));
        }
        let purpose = Purpose::Destination;
        let endpoint = balance::endpoint(mesh, source, service, destination, purpose, chance)?;
        match endpoint.address {
            Some(address) if endpoint.workload.network == source.network => {
                let target = SocketAddr::new(address, endpoint.port);
                direct(source, Some(endpoint.workload), target, Some(service))
            }
            _ => {
                let chosen = Chosen {
                    endpoint,
                    service: Some(service),
                };
                through_network_gateway(&caller, &chosen, destination, service, chance)
            }
        }
    } else if let Some(workload) = workload_at() {
        match &workload.waypoint {
            Some(waypoint) if !gateway::is_caller(&caller, waypoint) => {
                through_waypoint(&caller, waypoint, destination, Found::Workload(workload), chance)
            }
            _ => direct(source, Some(workload), destination, None),
        }
    } else {
        direct(source, None, destination, None)
    }
}

/// To `target` itself.
fn direct(
    source: &Arc<Workload>,
    workload: Option<&Arc<Workload>>,
    target: SocketAddr,
    service: Option<&Arc<Service>>,
) -> Result<Route, NoRoute> {
    // The pod's own 15001 and 15006 would bring a plain connection here again, and again.
    if matches!(target.port(), PORT_OUTBOUND | PORT_INBOUND) && source.has_address(target.ip()) {
        return Err(NoRoute::ProxyPort(target));
    }
    match workload {
        // An HBONE workload's port 15008 is its HBONE listener, so the application speaks HBONE itself: a tunnel within the
        // tunnel would be refused at the other end.
        Some(workload) if workload.protocol == Protocol::Hbone && target.port() != PORT_HBONE => {
            Ok(Route::Hbone(HboneRoute {
                caller: Arc::clone(source),
                tunnel: SocketAddr::new(target.ip(), PORT_HBONE),
                far_end: Arc::clone(workload),
                expected: expected(workload, service)?,
                authority: Target::Address(target),
                inner: None,
                workload: Arc::clone(workload),
                service: service.cloned(),
            }))
        }
        _ => Ok(Route::Plain(PlainRoute {
            target,
            workload: workload.cloned(),
            service: service.cloned(),
        })),
    }
}

/// The waypoint that this connection to the service is to go through. `None` when it has none.
fn drawn_waypoint<'a>(
    service: &'a Service,
    chance: &mut dyn Chance,
) -> Result<Option<&'a GatewayAddress>, NoRoute> {
    let weights = service.weighted_waypoints.iter().map(|one| u64::from(one.weight));
    match balance::weighted(weights, chance) {
        Some(drawn) => Ok(Some(&service.weighted_waypoints[drawn].destination)),
        None if service.waypoint.is_none() && !service.weighted_waypoints.is_empty() => {
            Err(NoRoute::WeightlessWaypoints {
                service: service.host.to_string(),
            })
        }
        None => Ok(service.waypoint.as_ref()),
    }
}

/// To `destination`, a service or a workload, through its waypoint. A waypoint holds policy: what is behind one is not reached
/// around it, even when it cannot be reached itself.
fn through_waypoint(
    caller: &Caller<'_>,
    waypoint: &GatewayAddress,
    destination: SocketAddr,
    called: Found<'_>,
    chance: &mut dyn Chance,
) -> Result<Route, NoRoute> {
    let mut route = || {
        let chosen = gateway::choose(caller, waypoint, Purpose::Waypoint, destination.ip(), chance)?;
        let Endpoint {
            workload,
            address,
            port,
        } = chosen.endpoint;
        match (address, called) {
            (Some(address), called) if workload.network == caller.source.network => {
                Ok(Route::Hbone(HboneRoute {
                    caller: Arc::clone(caller.source),
                    tunnel: SocketAddr::new(address, port),
                    far_end: Arc::clone(workload),
                    expected: expected(workload, chosen.service)?,
                    authority: Target::Address(destination),
                    inner: None,
                    workload: Arc::clone(workload),
                    service: called.service().cloned(),
                }))
            }
            (_, Found::Service(service)) => {
                through_network_gateway(caller, &chosen, destination, service, chance)
            }
            (_, Found::Workload(behind)) => Err(NoRoute::NotByService {
                destination: behind.uid.to_string(),
                waypoint: workload.uid.to_string(),
            }),
        }
    };
    route().map_err(|source| NoRoute::Waypoint {
        destination: called.to_string(),
        waypoint: waypoint.to_string(),
        source: Box::new(source),
    })
}

/// To a chosen pod or waypoint of `service` on another network: by its gateway, and a second tunnel through that. Who is chosen
/// behind the gateway is up to the other side, so only what stands for the service as a whole can be proven.
fn through_network_gateway(
    caller: &Caller<'_>,
    chosen: &Chosen<'_>,
    destination: SocketAddr,
    service: &Arc<Service>,
    chance: &mut dyn Chance,
) -> Result<Route, NoRoute> {
    let workload = chosen.endpoint.workload;
    let network = || workload.network.to_string();
    let stands_for = chosen.service.unwrap_or(service);
    let Some(gateway) = &workload.network_gateway else {
        return Err(NoRoute::NoGateway {
            service: stands_for.host.to_string(),
            workload: workload.uid.to_string(),
            network: network(),
        });
    };
    let inner: Arc<[SpiffeId]> = chosen
        .service
        .map_or(&[][..], |service| &service.subject_alt_names)
        .into();
    if inner.is_empty() {
        return Err(NoRoute::NoServiceIdentity {
            service: stands_for.host.to_string(),
            network: network(),
        });
    }
    let mut resolved = || {
        let found = gateway::choose(caller, gateway, Purpose::Gateway, destination.ip(), chance)?;
        let far_end = found.endpoint.workload;
        let expected = expected(far_end, found.service)?;
        // A gateway without an address is refused where it is chosen.
        let address = found.endpoint.address;
        let address = address.ok_or_else(|| NoRoute::UnknownGateway((**gateway).clone()))?;
        Ok((SocketAddr::new(address, found.endpoint.port), far_end, expected))
    };
    let (tunnel, far_end, expected) = resolved().map_err(|source| NoRoute::NetworkGateway {
        workload: workload.uid.to_string(),
        network: network(),
        gateway: gateway.to_string(),
        source: Box::new(source),
    })?;
    Ok(Route::Hbone(HboneRoute {
        caller: Arc::clone(caller.source),
        tunnel,
        far_end: Arc::clone(far_end),
        expected,
        authority: Target::Service(Arc::clone(service), destination.port()),
        inner: Some(inner),
        workload: Arc::clone(workload),
        service: Some(Arc::clone(service)),
    }))
}

/// The identities of which the far end must show one: the workload's own, and those that stand for the service.
fn expected(workload: &Workload, service: Option<&Arc<Service>>) -> Result<Arc<[SpiffeId]>, NoRoute> {
    let own = workload.identity().map_err(|source| NoRoute::NoIdentity {
        workload: workload.uid.to_string(),
        source,
    })?;
    let mut expected = vec![own];
    for san in service.map_or(&[][..], |service| &service.subject_alt_names) {
        if !expected.contains(san) {
            expected.push(san.clone());
        }
    }
    Ok(expected.into())
}

/// Whether plaintext that came to `destination` may pass to the application of `local`: not to one of the proxy's ports, and not to
/// the port of an application tunnel whose connections begin with a word on who calls: anybody could write that.
pub fn passthrough_allowed(mesh: &Mesh, local: Local<'_>, destination: SocketAddr) -> bool {
    let tunnel = mesh.local(local).and_then(|workload| workload.application_tunnel);
    let is_tunnel = |tunnel: ApplicationTunnel| {
        tunnel.proxy_protocol && tunnel.port.is_some_and(|port| port == destination.port())
    };
    !PROXY_PORTS.contains(&destination.port()) && !tunnel.is_some_and(is_tunnel)
}

#[cfg(test)]
mod tests;
