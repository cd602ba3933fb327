//! Where a connection goes: pure decisions over a [`Mesh`] snapshot.
//!
//! `proxy` asks [`outbound`] for each connection that a pod opens, [`inbound`] for each CONNECT request that a pod is sent,
//! and [`passthrough_allowed`] for plaintext. What cannot be served as the mesh says is refused: never sent another way.

use std::{
    fmt::Display,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use redirector_common::consts::{PORT_HBONE, PORT_INBOUND, PORT_OUTBOUND, PROXY_PORTS};

use super::{
    balance,
    index::Mesh,
    pod::PodInfo,
    service::{LoadBalancerMode, Service},
    spiffe::{InvalidSpiffeId, SpiffeId},
    workload::{GatewayAddress, Protocol, Workload, canonical},
};

/// The local pod that a decision is for.
#[derive(Debug, Clone, Copy)]
pub struct Local<'a> {
    /// Who it is.
    pub info: &'a PodInfo,
    /// Its network.
    pub network: &'a str,
}

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
    /// The tunnel's far end, `podIP:15008`.
    pub tunnel: SocketAddr,
    /// The CONNECT request's `:authority`, `podIP:targetPort`.
    pub authority: SocketAddr,
    /// The identities of which the far end must show one; never empty.
    pub expected: Arc<[SpiffeId]>,
    /// The workload chosen.
    pub workload: Arc<Workload>,
    /// The service it was chosen through.
    pub service: Option<Arc<Service>>,
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
    /// The destination must be reached through a waypoint.
    #[error("{destination} must be reached through waypoint {waypoint}, and waypoints are not supported yet")]
    Waypoint {
        /// Workload or service.
        destination: String,
        /// Its waypoint.
        waypoint: String,
    },
    /// All endpoints are on other networks.
    #[error(
        "{service} has endpoints on network {network:?} only, and network gateways are not supported yet"
    )]
    OtherNetwork {
        /// The service.
        service: String,
        /// One of the networks.
        network: String,
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
    #[error("workload {workload} takes HBONE, but has no identity")]
    NoIdentity {
        /// The workload's UID.
        workload: String,
        /// What its identity lacks.
        #[source]
        source: InvalidSpiffeId,
    },
}

impl NoRoute {
    /// Whether a newer snapshot of the mesh is likely to have the answer: the local pod has only just been enrolled, and
    /// is not in it yet. Worth waiting for, for a bounded time.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::UnknownSource { .. })
    }
}

/// Why an inbound CONNECT request is refused.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// `:authority` is not `address:port` or `hostname:port`.
    #[error("authority {0:?} is not host:port")]
    BadAuthority(String),
    /// `:authority` names another address than the one that was connected to.
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
    /// The local pod takes its traffic through an application tunnel.
    #[error("workload {0} has an application tunnel, and these are not supported yet")]
    ApplicationTunnel(String),
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
    /// The application port is one of the proxy's own.
    #[error("port {0} is a port of the proxy itself")]
    ProxyPort(u16),
}

impl Refusal {
    /// The HTTP status that Istio's peers expect.
    pub fn status(&self) -> u16 {
        match self {
            Self::BadAuthority(_) | Self::OtherAddress { .. } => 400,
            Self::UnknownWorkload { .. }
            | Self::ApplicationTunnel(_)
            | Self::UnknownHostname(_)
            | Self::NoPort { .. }
            | Self::ProxyPort(_) => 503,
        }
    }

    /// Whether a newer snapshot of the mesh is likely to have the answer, as for [`NoRoute::is_transient`].
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::UnknownWorkload { .. })
    }
}

/// Where a connection of `local` to `destination` goes. `choose` picks one of `n` weighted candidates: given the sum of
/// the weights, it returns a number below it (random in production, fixed in tests).
pub fn outbound(
    mesh: &Mesh,
    local: Local<'_>,
    destination: SocketAddr,
    choose: &mut dyn FnMut(u64) -> u64,
) -> Result<Route, NoRoute> {
    let destination = SocketAddr::new(canonical(destination.ip()), destination.port());
    // On loopback only: an application that speaks HBONE itself may call port 15008 of others.
    if destination.ip().is_loopback() && PROXY_PORTS.contains(&destination.port()) {
        return Err(NoRoute::ProxyPort(destination));
    }
    let source = mesh
        .local(local.info, local.network)
        .ok_or_else(|| NoRoute::UnknownSource {
            namespace: local.info.namespace.clone(),
            name: local.info.name.clone(),
            service_account: local.info.service_account.clone(),
            network: local.network.to_owned(),
        })?;
    let (workload, target, service) =
        if let Some(service) = mesh.service_at(local.network, destination.ip(), &local.info.namespace) {
            through_waypoint(&service.host, service.waypoint.as_ref())?;
            if service.load_balancer.mode == LoadBalancerMode::Passthrough {
                (None, destination, Some(service))
            } else {
                let endpoint = balance::endpoint(mesh, source, service, destination, choose)?;
                (Some(endpoint.workload), endpoint.target, Some(service))
            }
        } else if let Some(workload) = mesh.workload_at(local.network, destination.ip()) {
            through_waypoint(&workload.uid, workload.waypoint.as_ref())?;
            (Some(workload), destination, None)
        } else {
            (None, destination, None)
        };
    // The pod's own 15001 and 15006 would bring a plain connection here again, and again.
    let own = source
        .addresses
        .iter()
        .any(|address| canonical(*address) == target.ip());
    if own && matches!(target.port(), PORT_OUTBOUND | PORT_INBOUND) {
        return Err(NoRoute::ProxyPort(target));
    }
    match workload {
        // An HBONE workload's port 15008 is its HBONE listener, so the application speaks HBONE itself: a tunnel within the
        // tunnel would be refused at the other end.
        Some(workload) if workload.protocol == Protocol::Hbone && target.port() != PORT_HBONE => {
            Ok(Route::Hbone(HboneRoute {
                tunnel: SocketAddr::new(target.ip(), PORT_HBONE),
                authority: target,
                expected: expected(workload, service.map(|service| &**service))?,
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

/// A waypoint holds policy: what is behind one is not reached around it.
fn through_waypoint(destination: &dyn Display, waypoint: Option<&GatewayAddress>) -> Result<(), NoRoute> {
    match waypoint {
        Some(waypoint) => Err(NoRoute::Waypoint {
            destination: destination.to_string(),
            waypoint: waypoint.to_string(),
        }),
        None => Ok(()),
    }
}

/// The identities of which the far end must show one: the workload's own, and those that stand for the service.
fn expected(workload: &Workload, service: Option<&Service>) -> Result<Arc<[SpiffeId]>, NoRoute> {
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

/// The application port that a CONNECT to `authority`, received on the pod's address `received_on`, asks for. The connection
/// is always made to the pod's own address.
pub fn inbound(mesh: &Mesh, local: Local<'_>, received_on: IpAddr, authority: &str) -> Result<u16, Refusal> {
    let received_on = canonical(received_on);
    let authority = Authority::parse(authority)
        .ok_or_else(|| Refusal::BadAuthority(authority.chars().take(MAX_HOSTNAME).collect()))?;
    let workload = mesh
        .local(local.info, local.network)
        .ok_or_else(|| Refusal::UnknownWorkload {
            namespace: local.info.namespace.clone(),
            name: local.info.name.clone(),
            service_account: local.info.service_account.clone(),
            network: local.network.to_owned(),
        })?;
    if workload.application_tunnel {
        return Err(Refusal::ApplicationTunnel(workload.uid.to_string()));
    }
    let port = match authority {
        Authority::Address(address) if address.ip() == received_on => address.port(),
        Authority::Address(address) => {
            return Err(Refusal::OtherAddress {
                authority: address.ip(),
                received_on,
            });
        }
        Authority::Hostname(hostname, port) => {
            let service = mesh
                .service_named(hostname, &local.info.namespace)
                .ok_or_else(|| Refusal::UnknownHostname(hostname.to_owned()))?;
            let service_target = service.ports.get(&port).copied().unwrap_or(0);
            balance::target_port(service, service_target, workload, port).ok_or_else(|| Refusal::NoPort {
                service: service.host.to_string(),
                port,
            })?
        }
    };
    if PROXY_PORTS.contains(&port) {
        return Err(Refusal::ProxyPort(port));
    }
    Ok(port)
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

/// Whether plaintext that came to `destination` may pass to the application: not to one of the proxy's ports.
pub fn passthrough_allowed(destination: SocketAddr) -> bool {
    !PROXY_PORTS.contains(&destination.port())
}

#[cfg(test)]
mod tests;
