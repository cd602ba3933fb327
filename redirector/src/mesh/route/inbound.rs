//! What an inbound CONNECT request asks for, and whether the pod it came to serves that.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use redirector_common::consts::PROXY_PORTS;

use crate::mesh::{
    balance,
    index::Mesh,
    pod::Local,
    service::Service,
    wanted::Unanswered,
    workload::{GatewayAddress, GatewayDestination, Workload, canonical},
};

/// Where a tunnelled connection goes. It is always made to the pod itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Upstream {
    /// The local pod's own workload.
    pub workload: Arc<Workload>,
    /// The application's port.
    pub port: u16,
    /// For an application that wants a PROXY protocol header: the destination to name in it.
    pub proxied: Option<SocketAddr>,
}

/// Why an inbound CONNECT request is refused.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// `:authority` is not `address:port` or `hostname:port`.
    #[error("authority {0:?} is not host:port")]
    BadAuthority(String),
    /// `:authority` names another address than the one that was connected to, and the pod is no waypoint for it.
    #[error("authority names {authority}, but the connection came to {received_on}")]
    OtherAddress {
        /// The address in `:authority`.
        authority: IpAddr,
        /// The address that was connected to.
        received_on: IpAddr,
    },
    /// The mesh does not know the local pod.
    #[error(
        "the mesh has no workload for the local pod {namespace}/{name} with service account {service_account} on \
         network {network:?}"
    )]
    UnknownWorkload {
        /// Kubernetes namespace.
        namespace: String,
        /// Pod name.
        name: String,
        /// Service account.
        service_account: String,
        /// The node's network.
        network: String,
    },
    /// No service has the host name in `:authority`.
    #[error("no service is named {0:?}")]
    UnknownHostname(String),
    /// The service that `:authority` names has no such port at this pod.
    #[error("{service} has no port {port} at this pod")]
    NoPort {
        /// The service.
        service: String,
        /// The service port.
        port: u16,
    },
    /// The service that `:authority` names has no address to name in a PROXY protocol header.
    #[error("{0} has no virtual address for the PROXY protocol header")]
    NoVip(String),
    /// The application port is one of the proxy's own.
    #[error("port {0} is a port of the proxy itself")]
    ProxyPort(u16),
    /// The mesh is asked for piece by piece, and nobody answers.
    #[error(transparent)]
    Unanswered(#[from] Unanswered),
}

impl Refusal {
    /// The HTTP status that Istio's peers expect.
    pub fn status(&self) -> u16 {
        match self {
            Self::BadAuthority(_) | Self::OtherAddress { .. } => 400,
            Self::UnknownWorkload { .. }
            | Self::UnknownHostname(_)
            | Self::NoPort { .. }
            | Self::NoVip(_)
            | Self::Unanswered(_)
            | Self::ProxyPort(_) => 503,
        }
    }

    /// Whether a newer snapshot of the mesh is likely to have the answer, as for
    /// [`NoRoute::is_transient`](super::NoRoute::is_transient).
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::UnknownWorkload { .. })
    }
}

/// What a CONNECT to `authority`, received on the pod's address `received_on`, asks for.
pub fn inbound(
    mesh: &Mesh,
    local: Local<'_>,
    received_on: IpAddr,
    authority: &str,
) -> Result<Upstream, Refusal> {
    let received_on = canonical(received_on);
    let authority = Authority::parse(authority)
        .ok_or_else(|| Refusal::BadAuthority(authority.chars().take(MAX_HOSTNAME).collect()))?;
    let workload = mesh.local(local).ok_or_else(|| Refusal::UnknownWorkload {
        namespace: local.info.namespace.clone(),
        name: local.info.name.clone(),
        service_account: local.info.service_account.clone(),
        network: local.home.network.clone(),
    })?;
    let tunnel = workload.application_tunnel;
    let tunnel_port = tunnel.and_then(|tunnel| tunnel.port);
    let named = tunnel.is_some_and(|tunnel| tunnel.proxy_protocol);
    let (port, named) = match authority {
        Authority::Address(address) => {
            let ip = address.ip();
            let is_served = || tunnel.is_some() || is_waypoint_of(mesh, local, workload, received_on, ip);
            if ip != received_on && (is_special(ip) || !is_served()) {
                return Err(Refusal::OtherAddress {
                    authority: ip,
                    received_on,
                });
            }
            (tunnel_port.unwrap_or(address.port()), named.then_some(address))
        }
        Authority::Hostname(hostname, port) => {
            let service = mesh
                .service_named(hostname, &local.info.namespace)
                .ok_or_else(|| Refusal::UnknownHostname(hostname.to_owned()))?;
            let target = tunnel_port
                .or_else(|| balance::target_port(service, service.ports.get(&port).copied(), workload, port));
            let target = target.ok_or_else(|| Refusal::NoPort {
                service: service.host.to_string(),
                port,
            })?;
            let vip = || {
                let vip = vip(service, &local.home.network).map(|vip| SocketAddr::new(vip, port));
                vip.ok_or_else(|| Refusal::NoVip(service.host.to_string()))
            };
            (target, named.then(vip).transpose()?)
        }
    };
    // Whatever was asked for, this is where it would go.
    if PROXY_PORTS.contains(&port) {
        return Err(Refusal::ProxyPort(port));
    }
    Ok(Upstream {
        workload: Arc::clone(workload),
        port,
        proxied: named,
    })
}

/// Addresses that mean something else to everybody, and so are nobody's to ask another for.
fn is_special(ip: IpAddr) -> bool {
    let is_link_local = match ip {
        IpAddr::V4(ip) => ip.is_link_local() || ip.is_broadcast(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    ip.is_loopback() || ip.is_unspecified() || ip.is_multicast() || is_link_local
}

/// Whether traffic to `address` goes through a waypoint that `workload` is, or is part of.
fn is_waypoint_of(
    mesh: &Mesh,
    local: Local<'_>,
    workload: &Workload,
    received_on: IpAddr,
    address: IpAddr,
) -> bool {
    let is_here = |waypoint: &GatewayAddress| {
        let is_part = |service: &Arc<Service>| workload.services.contains_key(&service.host);
        let is_it = |other: &Arc<Workload>| other.has_address(received_on);
        match &waypoint.destination {
            GatewayDestination::Address(at) => {
                mesh.services_at(&at.network, at.address).any(is_part)
                    || mesh.workload_at(&at.network, at.address).is_some_and(is_it)
            }
            GatewayDestination::Hostname(host) => {
                mesh.service(host).is_some_and(is_part) || mesh.workload_named(host).is_some_and(is_it)
            }
        }
    };
    let at = mesh.workload_at(&local.home.network, address);
    at.and_then(|at| at.waypoint.as_deref()).is_some_and(is_here)
        || mesh
            .services_at(&local.home.network, address)
            .any(|service| service.waypoints().any(is_here))
}

/// The address by which the service is named in a PROXY protocol header.
fn vip(service: &Service, network: &str) -> Option<IpAddr> {
    let vips = service.vips.iter();
    // The first of several minima is taken.
    let best = vips.min_by_key(|vip| (*vip.network != *network, !vip.address.is_ipv4()));
    best.map(|vip| vip.address)
}

/// Longest host name (RFC 1035, 2.3.4, as text). What is longer is a stranger's text, and is cut in errors.
const MAX_HOSTNAME: usize = 253;

/// What a CONNECT request asks for.
enum Authority<'a> {
    Address(SocketAddr),
    Hostname(&'a str, u16),
}

impl<'a> Authority<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let parsed = match text.parse::<SocketAddr>() {
            // A zone is nothing that could be said to somebody else.
            Ok(_) if text.contains('%') => return None,
            Ok(address) => Self::Address(SocketAddr::new(canonical(address.ip()), address.port())),
            Err(_) => {
                let (hostname, port) = text.rsplit_once(':')?;
                // u16's own parser takes a sign.
                let port = port
                    .bytes()
                    .all(|byte| byte.is_ascii_digit())
                    .then(|| port.parse().ok())??;
                Self::Hostname(hostname, port)
            }
        };
        match parsed {
            Self::Address(address) if address.port() == 0 => None,
            Self::Hostname(_, 0) => None,
            Self::Hostname(hostname, _) if !is_hostname(hostname) => None,
            parsed => Some(parsed),
        }
    }
}

/// Letters, digits, `-`, `_` and `.`: so no user name, no path, no half of an IPv6 address.
fn is_hostname(text: &str) -> bool {
    (1..=MAX_HOSTNAME).contains(&text.len())
        && text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'))
}

#[cfg(test)]
mod tests;
