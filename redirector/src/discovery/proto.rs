//! The control plane's messages, and their way into the mesh's own types. What is empty there means a default, as Istio has it
//! (ztunnel `state/workload.rs`, `state/service.rs`).
//!
//! What cannot be understood is refused with its reason, and the reason goes back to the control plane. Of a policy, a rule that
//! cannot be understood matches nothing where it would permit and everything where it would deny: to leave it out would be to let
//! in whom it keeps out.

use std::{net::IpAddr, sync::Arc};

use prost::Message;
use redirector_common::consts::PORT_HBONE;

use crate::mesh::{
    index::{Key, Update},
    service::{CidrVip, IpFamilies, LoadBalancer, LoadBalancerMode, Scope, Service, WeightedWaypoint},
    workload::{
        ApplicationTunnel, GatewayAddress, GatewayDestination, Locality, NamespacedHostname, NetworkAddress,
        Protocol, Workload, WorkloadUid, canonical,
    },
};

pub(super) mod messages;
mod policy;

use self::messages as proto;

/// What is asked for: `Address` and `Authorization`.
pub(super) const ADDRESS: &str = "type.googleapis.com/istio.workload.Address";
pub(super) const AUTHORIZATION: &str = "type.googleapis.com/istio.security.Authorization";

/// Istio's defaults (ztunnel `config.rs`).
const DEFAULT_TRUST_DOMAIN: &str = "cluster.local";
const DEFAULT_SERVICE_ACCOUNT: &str = "default";
const DEFAULT_CLUSTER: &str = "Kubernetes";

/// Reads a resource as the client of the control plane does: an address, or a policy if `is_policy`. Returns what it changes, and
/// what is wrong with it; one of them is there.
pub fn read(is_policy: bool, bytes: &[u8]) -> (Option<Update>, Option<String>) {
    let decoded = decode(if is_policy { AUTHORIZATION } else { ADDRESS }, bytes);
    (decoded.update, decoded.problem)
}

/// A resource, as far as it is understood.
pub(super) struct Decoded {
    /// What it changes.
    pub(super) update: Option<Update>,
    /// What is wrong with it.
    pub(super) problem: Option<String>,
}

impl From<Result<Update, String>> for Decoded {
    fn from(decoded: Result<Update, String>) -> Self {
        match decoded {
            Ok(update) => Self {
                update: Some(update),
                problem: None,
            },
            Err(problem) => Self {
                update: None,
                problem: Some(problem),
            },
        }
    }
}

/// Decodes a resource of type `type_url`.
pub(super) fn decode(type_url: &str, bytes: &[u8]) -> Decoded {
    match type_url {
        ADDRESS => address(bytes).into(),
        AUTHORIZATION => policy::decode(bytes),
        other => Err(format!("resources of type {other:?} were not asked for")).into(),
    }
}

/// How to remove the resource `name` of type `type_url`.
pub(super) fn removal(type_url: &str, name: &str) -> Result<Update, String> {
    match type_url {
        AUTHORIZATION => policy::name(name).map(|name| Update::Remove(Key::Policy(name))),
        _ => Ok(Update::RemoveAddress(name.into())),
    }
}

fn address(bytes: &[u8]) -> Result<Update, String> {
    let address = proto::Address::decode(bytes).map_err(|error| error.to_string())?;
    match address.kind {
        Some(proto::AddressKind::Workload(one)) => Ok(Update::Workload(Arc::new(workload(*one)?))),
        Some(proto::AddressKind::Service(one)) => Ok(Update::Service(Arc::new(service(*one)?))),
        None => Err("it is neither a workload nor a service".to_owned()),
    }
}

fn workload(raw: proto::Workload) -> Result<Workload, String> {
    if raw.uid.is_empty() {
        return Err("the workload has no uid".to_owned());
    }
    let protocol = match known("tunnel_protocol", raw.tunnel_protocol)? {
        proto::TunnelProtocol::None => Protocol::Tcp,
        proto::TunnelProtocol::Hbone => Protocol::Hbone,
        proto::TunnelProtocol::LegacyIstioMtls => {
            return Err("tunnel_protocol LEGACY_ISTIO_MTLS is not supported".to_owned());
        }
    };
    let addresses: Vec<_> = raw
        .addresses
        .iter()
        .map(|bytes| ip(bytes))
        .collect::<Result<_, _>>()?;
    let services = raw
        .services
        .into_iter()
        .map(|(name, ports)| Ok((host(&name)?, Arc::new(port_map(&ports.ports)?))));
    Ok(Workload {
        uid: WorkloadUid(raw.uid.into()),
        name: raw.name.into(),
        namespace: raw.namespace.into(),
        trust_domain: or_default(raw.trust_domain, DEFAULT_TRUST_DOMAIN),
        service_account: or_default(raw.service_account, DEFAULT_SERVICE_ACCOUNT),
        addresses,
        hostname: raw.hostname.into(),
        network: raw.network.into(),
        protocol,
        host_network: proto::NetworkMode::HostNetwork == known("network_mode", raw.network_mode)?,
        node: raw.node.into(),
        cluster_id: or_default(raw.cluster_id, DEFAULT_CLUSTER),
        locality: raw.locality.map_or_else(Locality::default, |locality| Locality {
            region: locality.region.into(),
            zone: locality.zone.into(),
            subzone: locality.subzone.into(),
        }),
        waypoint: raw.waypoint.map(gateway).transpose()?.map(Box::new),
        network_gateway: raw.network_gateway.map(gateway).transpose()?.map(Box::new),
        application_tunnel: raw.application_tunnel.map(application_tunnel).transpose()?,
        healthy: proto::WorkloadStatus::Healthy == known("status", raw.status)?,
        capacity: raw.capacity.unwrap_or(1),
        services: services.collect::<Result<_, String>>()?,
        canonical_name: raw.canonical_name.into(),
        canonical_revision: raw.canonical_revision.into(),
        workload_name: raw.workload_name.into(),
        workload_type: match known("workload_type", raw.workload_type)? {
            proto::WorkloadType::Deployment => "deployment",
            proto::WorkloadType::Cronjob => "cronjob",
            proto::WorkloadType::Pod => "pod",
            proto::WorkloadType::Job => "job",
        },
        authorization_policies: raw
            .authorization_policies
            .iter()
            .map(|text| policy::name(text))
            .collect::<Result<_, _>>()?,
    })
}

fn service(raw: proto::Service) -> Result<Service, String> {
    if raw.hostname.is_empty() {
        return Err("the service has no hostname".to_owned());
    }
    let (mut vips, mut cidr_vips) = (Vec::new(), Vec::new());
    for address in raw.addresses {
        let (length, range) = (address.length, network_address(address)?);
        let full = if range.address.is_ipv4() { 32 } else { 128 };
        match length {
            Some(length) if length != full => {
                let range = u8::try_from(length)
                    .ok()
                    .and_then(|length| CidrVip::of(range.network.clone(), range.address, length));
                cidr_vips.push(range.ok_or_else(|| format!("a range cannot have {length} bits"))?);
            }
            _ => vips.push(range),
        }
    }
    let weighted = raw.weighted_waypoints.into_iter().map(|one| {
        let destination = one.destination.ok_or("a weighted waypoint has no destination")?;
        Ok(WeightedWaypoint {
            destination: gateway(destination)?,
            weight: one.weight,
        })
    });
    Ok(Service {
        host: NamespacedHostname {
            namespace: raw.namespace.into(),
            hostname: raw.hostname.into(),
        },
        name: raw.name.into(),
        vips,
        cidr_vips,
        ports: port_map(&raw.ports)?,
        // A name that is not of this form is nobody's: nothing that it stands for could be reached.
        subject_alt_names: raw
            .subject_alt_names
            .iter()
            .filter_map(|san| san.parse().ok())
            .collect(),
        waypoint: raw.waypoint.map(gateway).transpose()?,
        weighted_waypoints: weighted.collect::<Result<_, String>>()?,
        load_balancer: raw
            .load_balancing
            .map_or_else(|| Ok(LoadBalancer::default()), load_balancer)?,
        ip_families: match known("ip_families", raw.ip_families)? {
            proto::IpFamilies::Automatic | proto::IpFamilies::Dual => IpFamilies::Any,
            proto::IpFamilies::Ipv4Only => IpFamilies::V4,
            proto::IpFamilies::Ipv6Only => IpFamilies::V6,
        },
        canonical: raw.canonical,
        namespace_only: proto::Visibility::Namespace == known("visibility", raw.visibility)?,
    })
}

fn load_balancer(raw: proto::LoadBalancing) -> Result<LoadBalancer, String> {
    let preferences = raw.routing_preference.into_iter().map(|scope| {
        Ok(match known("routing_preference", scope)? {
            proto::RoutingScope::Region => Scope::Region,
            proto::RoutingScope::Zone => Scope::Zone,
            proto::RoutingScope::Subzone => Scope::Subzone,
            proto::RoutingScope::Node => Scope::Node,
            proto::RoutingScope::Cluster => Scope::Cluster,
            proto::RoutingScope::Network => Scope::Network,
            proto::RoutingScope::Unspecified => {
                return Err("a routing preference is not specified".to_owned());
            }
        })
    });
    Ok(LoadBalancer {
        routing_preferences: preferences.collect::<Result<_, _>>()?,
        mode: match known("mode", raw.mode)? {
            proto::BalancingMode::Unspecified => LoadBalancerMode::Standard,
            proto::BalancingMode::Strict => LoadBalancerMode::Strict,
            proto::BalancingMode::Failover => LoadBalancerMode::Failover,
            proto::BalancingMode::Passthrough => LoadBalancerMode::Passthrough,
        },
        allow_unhealthy: proto::HealthPolicy::AllowAll == known("health_policy", raw.health_policy)?,
    })
}

fn gateway(raw: proto::GatewayAddress) -> Result<GatewayAddress, String> {
    let destination = match raw.destination {
        Some(proto::GatewayDestination::Address(address)) => {
            GatewayDestination::Address(network_address(address)?)
        }
        Some(proto::GatewayDestination::Hostname(name)) => GatewayDestination::Hostname(NamespacedHostname {
            namespace: name.namespace.into(),
            hostname: name.hostname.into(),
        }),
        None => return Err("a waypoint or gateway has neither address nor hostname".to_owned()),
    };
    let hbone_mtls_port = match raw.hbone_mtls_port {
        0 => PORT_HBONE,
        port => u16_port(port)?,
    };
    Ok(GatewayAddress {
        destination,
        hbone_mtls_port,
    })
}

fn application_tunnel(raw: proto::ApplicationTunnel) -> Result<ApplicationTunnel, String> {
    let port = u16_port(raw.port)?;
    Ok(ApplicationTunnel {
        proxy_protocol: proto::ApplicationProtocol::Proxy
            == known("application_tunnel.protocol", raw.protocol)?,
        port: (port != 0).then_some(port),
    })
}

fn network_address(raw: proto::NetworkAddress) -> Result<NetworkAddress, String> {
    Ok(NetworkAddress {
        address: ip(&raw.address)?,
        network: raw.network.into(),
    })
}

/// By their number of bytes, the canonical address.
fn ip(bytes: &[u8]) -> Result<IpAddr, String> {
    let address = match bytes.len() {
        4 => <[u8; 4]>::try_from(bytes).map(IpAddr::from),
        16 => <[u8; 16]>::try_from(bytes).map(IpAddr::from),
        length => return Err(format!("an address has 4 or 16 bytes, not {length}")),
    };
    Ok(canonical(address.map_err(|error| error.to_string())?))
}

/// Ports from and to; 0 as target is a port that somebody else names.
fn port_map<M: FromIterator<(u16, u16)>>(ports: &[proto::Port]) -> Result<M, String> {
    let port = |port: &proto::Port| match (u16_port(port.service_port)?, u16_port(port.target_port)?) {
        (0, _) => Err("0 is no port of a service".to_owned()),
        ports => Ok(ports),
    };
    ports.iter().map(port).collect()
}

fn u16_port(port: u32) -> Result<u16, String> {
    u16::try_from(port).map_err(|_| format!("{port} is no port"))
}

/// The service that is called `namespace/hostname`.
fn host(name: &str) -> Result<NamespacedHostname, String> {
    let (namespace, hostname) = name
        .split_once('/')
        .ok_or_else(|| format!("service {name:?} is not of the form namespace/hostname"))?;
    Ok(NamespacedHostname {
        namespace: namespace.into(),
        hostname: hostname.into(),
    })
}

fn or_default(text: String, default: &str) -> Arc<str> {
    match text.is_empty() {
        true => default.into(),
        false => text.into(),
    }
}

/// The value of an enumeration.
fn known<T: TryFrom<i32>>(field: &str, value: i32) -> Result<T, String> {
    T::try_from(value).map_err(|_| format!("{field}: {value} is not known"))
}

#[cfg(test)]
mod tests;
