//! What a decision lacked of the mesh: the names by which a control plane is asked for single entries of it, where the whole is not
//! fetched (on-demand discovery).

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use super::{
    index::{Mesh, Update},
    pod::Local,
    route::{HboneRoute, NoRoute, PlainRoute, Refusal, Route},
    service::Service,
    workload::{GatewayAddress, GatewayDestination, canonical},
};

/// A name of Istio's address resources: `<network>/<address>`, or `<namespace>/<hostname>`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ResourceName(Arc<str>);

impl ResourceName {
    /// Of whatever has an address.
    pub fn address(network: &str, address: IpAddr) -> Self {
        Self(format!("{network}/{}", canonical(address)).into())
    }

    /// Of a service.
    fn service(namespace: &str, hostname: &str) -> Self {
        Self(format!("{namespace}/{hostname}").into())
    }

    fn gateway(gateway: &GatewayAddress) -> Self {
        match &gateway.destination {
            GatewayDestination::Address(at) => Self::address(&at.network, at.address),
            GatewayDestination::Hostname(host) => Self::service(&host.namespace, &host.hostname),
        }
    }

    /// As text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for ResourceName {
    fn from(name: &str) -> Self {
        Self(name.into())
    }
}

impl std::borrow::Borrow<str> for ResourceName {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ResourceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why nobody knows whether the mesh has something.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("whether the mesh has {name} only the control plane knows: {reason}")]
pub struct Unanswered {
    /// What it was to be asked for.
    pub name: ResourceName,
    /// Why there is no answer.
    pub reason: &'static str,
}

/// The names by which what an update brings may have been asked for, beside its own.
pub fn names_of(update: &Update) -> Vec<String> {
    let name = |network: &str, address| ResourceName::address(network, address).to_string();
    match update {
        Update::Workload(workload) => {
            let addresses = workload.addresses.iter();
            addresses
                .map(|address| name(&workload.network, *address))
                .collect()
        }
        Update::Service(service) => {
            let vips = service.vips.iter().map(|vip| name(&vip.network, vip.address));
            let host = ResourceName::service(&service.host.namespace, &service.host.hostname);
            vips.chain([host.to_string()]).collect()
        }
        _ => Vec::new(),
    }
}

/// What would have to be known before `decided` is more than a guess: it was decided for a connection of `local`, made from its
/// address `client`, to `destination`.
pub fn outbound(
    local: Local<'_>,
    client: IpAddr,
    destination: SocketAddr,
    decided: &Result<Route, NoRoute>,
) -> Option<ResourceName> {
    let network = &local.home.network;
    match decided {
        Ok(Route::Plain(route)) if route.workload.is_none() && route.service.is_none() => {
            at(network, destination.ip())
        }
        Ok(Route::Plain(PlainRoute { service, .. }) | Route::Hbone(HboneRoute { service, .. })) => {
            // One that has a range in which the address is comes after one that has the address itself.
            let has = |service: &Arc<Service>| {
                let mut vips = service.vips.iter();
                vips.any(|vip| vip.address == canonical(destination.ip()))
            };
            match service {
                Some(service) if !has(service) => at(network, destination.ip()),
                _ => None,
            }
        }
        Err(error) => match error.root() {
            NoRoute::UnknownSource { .. } => Some(ResourceName::address(network, client)),
            NoRoute::UnknownGateway(gateway) => Some(ResourceName::gateway(gateway)),
            _ => None,
        },
    }
}

/// The same for a request that came to an address of `local`. There may be several; one that is known by now is none of them.
pub fn inbound(mesh: &Mesh, local: Local<'_>, received_on: IpAddr, refusal: &Refusal) -> Vec<ResourceName> {
    let network = local.home.network.as_str();
    match refusal {
        Refusal::UnknownWorkload { .. } => vec![ResourceName::address(network, received_on)],
        // A service of Kubernetes says its namespace; others are known in their callers'.
        Refusal::UnknownHostname(hostname) => {
            let mut labels = hostname.split('.').skip(1);
            let named = match (labels.next(), labels.next()) {
                (Some(namespace), Some("svc")) => Some(namespace),
                _ => None,
            };
            let own = local.info.namespace.as_str();
            let namespaces = named.into_iter().chain((named != Some(own)).then_some(own));
            namespaces
                .map(|namespace| ResourceName::service(namespace, hostname))
                .collect()
        }
        // The pod may be the waypoint of who has it.
        Refusal::OtherAddress { authority, .. } if may_be_known(*authority) => {
            let workload = mesh.workload_at(network, *authority);
            let services: Vec<_> = mesh.services_at(network, *authority).collect();
            if workload.is_none() && services.is_empty() {
                return vec![ResourceName::address(network, *authority)];
            }
            let of_services = services.iter().flat_map(|service| service.waypoints());
            workload
                .and_then(|workload| workload.waypoint.as_deref())
                .into_iter()
                .chain(of_services)
                .filter(|waypoint| !knows(mesh, waypoint))
                .map(ResourceName::gateway)
                .collect()
        }
        _ => Vec::new(),
    }
}

/// The name of what may be in the mesh at an address; none where nothing can be.
pub fn at(network: &str, address: IpAddr) -> Option<ResourceName> {
    may_be_known(address).then(|| ResourceName::address(network, address))
}

/// Whether an address can be that of somebody in the mesh: these are everybody's own, or nobody's. A link's may be in it, by a
/// ServiceEntry for the cloud's metadata for example.
fn may_be_known(address: IpAddr) -> bool {
    let address = canonical(address);
    let is_broadcast = matches!(address, IpAddr::V4(ip) if ip.is_broadcast());
    !(address.is_loopback() || address.is_unspecified() || address.is_multicast() || is_broadcast)
}

fn knows(mesh: &Mesh, gateway: &GatewayAddress) -> bool {
    match &gateway.destination {
        GatewayDestination::Address(at) => {
            mesh.workload_at(&at.network, at.address).is_some()
                || mesh.services_at(&at.network, at.address).next().is_some()
        }
        GatewayDestination::Hostname(host) => {
            mesh.service(host).is_some() || mesh.workload_named(host).is_some()
        }
    }
}

#[cfg(test)]
mod tests;
