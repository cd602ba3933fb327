//! Workloads and services, with the keys and spellings of the workload file.

use std::{fmt, net::IpAddr, sync::Arc};

use serde::{Serialize, Serializer, ser::SerializeMap as _};

use crate::mesh::{
    index::Mesh,
    service::{CidrVip, IpFamilies, LoadBalancer, LoadBalancerMode, Scope, Service, WeightedWaypoint},
    workload::{GatewayAddress, NamespacedHostname, Ports, Protocol, Workload},
};

/// A workload.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct WorkloadView<'a> {
    uid: &'a str,
    name: &'a str,
    namespace: &'a str,
    service_account: &'a str,
    trust_domain: &'a str,
    workload_ips: &'a [IpAddr],
    hostname: &'a str,
    network: &'a str,
    network_mode: &'static str,
    protocol: &'static str,
    node: &'a str,
    cluster_id: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    locality: Option<LocalityView<'a>>,
    status: &'static str,
    capacity: u32,
    workload_name: &'a str,
    workload_type: &'static str,
    canonical_name: &'a str,
    canonical_revision: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    waypoint: Option<Gateway<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    network_gateway: Option<Gateway<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    application_tunnel: Option<Tunnel>,
    authorization_policies: Shown<'a, crate::mesh::policy::PolicyName>,
    services: Services<'a>,
}

#[derive(Serialize)]
struct LocalityView<'a> {
    region: &'a str,
    zone: &'a str,
    subzone: &'a str,
}

#[derive(Serialize)]
struct Tunnel {
    protocol: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    port: Option<u16>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Gateway<'a> {
    #[serde(serialize_with = "destination")]
    destination: &'a GatewayAddress,
    hbone_mtls_port: u16,
}

fn destination<S: Serializer>(gateway: &&GatewayAddress, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(gateway)
}

impl<'a> From<&'a GatewayAddress> for Gateway<'a> {
    fn from(gateway: &'a GatewayAddress) -> Self {
        Self {
            destination: gateway,
            hbone_mtls_port: gateway.hbone_mtls_port,
        }
    }
}

/// Values as their texts.
struct Shown<'a, T>(&'a [T]);

impl<T: fmt::Display> Serialize for Shown<'_, T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().map(ToString::to_string))
    }
}

/// The services that a workload is an endpoint of, with their ports.
struct Services<'a>(&'a Workload);

impl Serialize for Services<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let services = self.0.services.iter();
        serializer.collect_map(services.map(|(host, ports)| (host.to_string(), PortsView(ports))))
    }
}

struct PortsView<'a>(&'a Ports);

impl Serialize for PortsView<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter())
    }
}

impl<'a> WorkloadView<'a> {
    pub(super) fn of(workload: &'a Workload) -> Self {
        let place = &workload.locality;
        Self {
            uid: &workload.uid.0,
            name: &workload.name,
            namespace: &workload.namespace,
            service_account: &workload.service_account,
            trust_domain: &workload.trust_domain,
            workload_ips: &workload.addresses,
            hostname: &workload.hostname,
            network: &workload.network,
            network_mode: if workload.host_network {
                "HostNetwork"
            } else {
                "Standard"
            },
            protocol: match workload.protocol {
                Protocol::Hbone => "HBONE",
                Protocol::Tcp => "TCP",
            },
            node: &workload.node,
            cluster_id: &workload.cluster_id,
            locality: (*place != Default::default()).then_some(LocalityView {
                region: &place.region,
                zone: &place.zone,
                subzone: &place.subzone,
            }),
            status: status(workload),
            capacity: workload.capacity,
            workload_name: &workload.workload_name,
            workload_type: workload.workload_type,
            canonical_name: &workload.canonical_name,
            canonical_revision: &workload.canonical_revision,
            waypoint: workload.waypoint.as_deref().map(Into::into),
            network_gateway: workload.network_gateway.as_deref().map(Into::into),
            application_tunnel: workload.application_tunnel.map(|tunnel| Tunnel {
                protocol: if tunnel.proxy_protocol { "PROXY" } else { "NONE" },
                port: tunnel.port,
            }),
            authorization_policies: Shown(&workload.authorization_policies),
            services: Services(workload),
        }
    }
}

fn status(workload: &Workload) -> &'static str {
    if workload.healthy { "Healthy" } else { "Unhealthy" }
}

/// A service.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ServiceView<'a> {
    name: &'a str,
    namespace: &'a str,
    hostname: &'a str,
    vips: Shown<'a, crate::mesh::workload::NetworkAddress>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    cidr_vips: Vec<Range<'a>>,
    ports: PortsView<'a>,
    endpoints: Endpoints<'a>,
    subject_alt_names: Shown<'a, crate::mesh::spiffe::SpiffeId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    waypoint: Option<Gateway<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    weighted_waypoints: Vec<Weighted<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    load_balancer: Option<Balancer>,
    ip_families: &'static str,
    canonical: bool,
    visibility: &'static str,
}

#[derive(Serialize)]
struct Range<'a> {
    cidr: String,
    network: &'a str,
}

#[derive(Serialize)]
struct Weighted<'a> {
    destination: Gateway<'a>,
    weight: u32,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Balancer {
    routing_preferences: Vec<&'static str>,
    mode: &'static str,
    health_policy: &'static str,
}

impl<'a> ServiceView<'a> {
    pub(super) fn of(service: &'a Service, endpoints: &'a [Arc<Workload>]) -> Self {
        let is_default = service.load_balancer == LoadBalancer::default();
        Self {
            name: &service.name,
            namespace: &service.host.namespace,
            hostname: &service.host.hostname,
            vips: Shown(&service.vips),
            cidr_vips: service.cidr_vips.iter().map(Into::into).collect(),
            ports: PortsView(&service.ports),
            endpoints: Endpoints {
                service: &service.host,
                workloads: endpoints,
            },
            subject_alt_names: Shown(&service.subject_alt_names),
            waypoint: service.waypoint.as_ref().map(Into::into),
            weighted_waypoints: service.weighted_waypoints.iter().map(Into::into).collect(),
            load_balancer: (!is_default).then(|| (&service.load_balancer).into()),
            ip_families: match service.ip_families {
                IpFamilies::Any => "Dual",
                IpFamilies::V4 => "IPv4",
                IpFamilies::V6 => "IPv6",
            },
            canonical: service.canonical,
            visibility: if service.namespace_only {
                "Namespace"
            } else {
                "Public"
            },
        }
    }
}

impl<'a> From<&'a CidrVip> for Range<'a> {
    fn from(range: &'a CidrVip) -> Self {
        Self {
            cidr: format!("{}/{}", range.first.address, range.prefix_len),
            network: &range.first.network,
        }
    }
}

impl<'a> From<&'a WeightedWaypoint> for Weighted<'a> {
    fn from(waypoint: &'a WeightedWaypoint) -> Self {
        Self {
            destination: (&waypoint.destination).into(),
            weight: waypoint.weight,
        }
    }
}

impl From<&LoadBalancer> for Balancer {
    fn from(balancer: &LoadBalancer) -> Self {
        let preference = |scope: &Scope| match scope {
            Scope::Region => "Region",
            Scope::Zone => "Zone",
            Scope::Subzone => "Subzone",
            Scope::Node => "Node",
            Scope::Cluster => "Cluster",
            Scope::Network => "Network",
        };
        Self {
            routing_preferences: balancer.routing_preferences.iter().map(preference).collect(),
            mode: match balancer.mode {
                LoadBalancerMode::Standard => "Standard",
                LoadBalancerMode::Strict => "Strict",
                LoadBalancerMode::Failover => "Failover",
                LoadBalancerMode::Passthrough => "Passthrough",
            },
            health_policy: if balancer.allow_unhealthy {
                "AllowAll"
            } else {
                "OnlyHealthy"
            },
        }
    }
}

/// The endpoints of a service, by UID.
struct Endpoints<'a> {
    service: &'a NamespacedHostname,
    workloads: &'a [Arc<Workload>],
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct EndpointView<'a> {
    workload_uid: &'a str,
    port: Option<PortsView<'a>>,
    status: &'static str,
}

impl Serialize for Endpoints<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut sorted: Vec<_> = self.workloads.iter().collect();
        sorted.sort_unstable_by(|one, other| one.uid.cmp(&other.uid));
        serializer.collect_map(sorted.into_iter().map(|workload| {
            let ports = workload.services.get(self.service);
            let endpoint = EndpointView {
                workload_uid: &workload.uid.0,
                port: ports.map(|ports| PortsView(ports)),
                status: status(workload),
            };
            (&*workload.uid.0, endpoint)
        }))
    }
}

/// The endpoints of services that are not there, by service.
pub(super) struct Staged<'a>(pub(super) &'a Mesh);

impl Serialize for Staged<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for (service, workloads) in self.0.awaited_services() {
            map.serialize_entry(&service.to_string(), &Endpoints { service, workloads })?;
        }
        map.end()
    }
}
