//! The format of the workload file, and its way into the mesh's own types.
//!
//! It is ztunnel's (`LocalConfig`), with the same keys and spellings; an unknown key is an error. What would be obeyed there
//! and is not here is refused, since to ignore it would send traffic past a policy or a waypoint.

use std::{net::IpAddr, num::NonZeroU16, sync::Arc};

use redirector_common::consts::PORT_HBONE;
use serde::{Deserialize, Deserializer};

use super::value::{Checked, Filled, Object, Text, Unique, no_endpoints, text_or_mapping};
use crate::mesh::{
    policy::{Policy, PolicyName},
    service::{CidrVip, IpFamilies, LoadBalancer, LoadBalancerMode, Scope, Service, WeightedWaypoint},
    spiffe::SpiffeId,
    workload::{
        ApplicationTunnel, GatewayAddress, GatewayDestination, Locality, NamespacedHostname, NetworkAddress,
        Protocol, Workload, WorkloadUid, canonical,
    },
};

/// Cluster of a workload whose UID is made here. Istio's default.
const DEFAULT_CLUSTER: &str = "Kubernetes";

/// The whole file.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct File {
    #[serde(default)]
    pub(super) workloads: Vec<Checked<Workload>>,
    #[serde(default)]
    pub(super) services: Vec<Checked<Service>>,
    #[serde(default, deserialize_with = "list_or_nothing")]
    pub(super) policies: Vec<Checked<Policy>>,
}

/// A key without a value is the same as an empty list.
fn list_or_nothing<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct RawWorkload {
    workload_ips: Vec<IpAddr>,
    namespace: Filled,
    services: Unique<Text<NamespacedHostname>, Unique<NonZeroU16, NonZeroU16>>,
    #[serde(default)]
    uid: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    service_account: String,
    #[serde(default)]
    trust_domain: String,
    #[serde(default)]
    network: String,
    #[serde(default)]
    protocol: RawProtocol,
    #[serde(default)]
    network_mode: NetworkMode,
    waypoint: Option<RawGateway>,
    network_gateway: Option<RawGateway>,
    #[serde(default)]
    workload_name: String,
    #[serde(default)]
    workload_type: WorkloadType,
    #[serde(default)]
    canonical_name: String,
    #[serde(default)]
    canonical_revision: String,
    #[serde(default)]
    hostname: String,
    #[serde(default)]
    node: String,
    /// Says how the workload itself does HBONE, which nobody else needs to know.
    #[serde(default, rename = "nativeTunnel")]
    _native_tunnel: bool,
    application_tunnel: Option<RawApplicationTunnel>,
    #[serde(default)]
    authorization_policies: Vec<Text<PolicyName>>,
    #[serde(default)]
    status: Status,
    #[serde(default)]
    cluster_id: String,
    locality: Option<RawLocality>,
    #[serde(default = "default_capacity")]
    capacity: u32,
}

fn default_capacity() -> u32 {
    1
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct RawService {
    name: Filled,
    namespace: Filled,
    hostname: Filled,
    vips: Vec<Text<NetworkAddress>>,
    ports: Unique<NonZeroU16, u16>,
    #[serde(default)]
    cidr_vips: Vec<Checked<CidrVip>>,
    #[serde(default, rename = "endpoints", deserialize_with = "no_endpoints")]
    _endpoints: (),
    #[serde(default)]
    subject_alt_names: Vec<Text<SpiffeId>>,
    waypoint: Option<RawGateway>,
    #[serde(default)]
    weighted_waypoints: Vec<RawWeightedWaypoint>,
    load_balancer: Option<RawLoadBalancer>,
    ip_families: Option<RawIpFamilies>,
    #[serde(default)]
    canonical: bool,
    #[serde(default)]
    visibility: Visibility,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RawGateway {
    destination: Text<GatewayDestination>,
    hbone_mtls_port: Option<u16>,
}

/// The waypoint as in the protobuf message, a mapping within the mapping, or with its keys beside the weight.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RawWeightedWaypoint {
    #[serde(deserialize_with = "text_or_mapping::<_, GatewayDestination, _>")]
    destination: RawGateway,
    hbone_mtls_port: Option<u16>,
    weight: u32,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct RawCidrVip {
    cidr: Filled,
    #[serde(default)]
    network: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RawLoadBalancer {
    #[serde(default)]
    routing_preferences: Vec<RawScope>,
    #[serde(default)]
    mode: RawMode,
    #[serde(default)]
    health_policy: HealthPolicy,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RawApplicationTunnel {
    #[serde(default)]
    protocol: TunnelProtocol,
    port: Option<u16>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RawLocality {
    region: String,
    zone: String,
    subzone: String,
}

#[derive(Deserialize, Default, PartialEq)]
enum RawProtocol {
    #[serde(rename = "HBONE")]
    Hbone,
    #[default]
    #[serde(rename = "TCP")]
    Tcp,
}

#[derive(Deserialize, Default, PartialEq)]
enum NetworkMode {
    #[default]
    Standard,
    HostNetwork,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "lowercase")]
enum WorkloadType {
    #[default]
    #[serde(alias = "Deployment", alias = "DEPLOYMENT", alias = "")]
    Deployment,
    #[serde(alias = "CronJob", alias = "Cronjob", alias = "CRONJOB")]
    Cronjob,
    #[serde(alias = "Pod", alias = "POD")]
    Pod,
    #[serde(alias = "Job", alias = "JOB")]
    Job,
}

#[derive(Deserialize, Default, PartialEq)]
enum Status {
    #[default]
    Healthy,
    Unhealthy,
}

#[derive(Deserialize, Default, PartialEq)]
enum TunnelProtocol {
    #[default]
    #[serde(rename = "NONE")]
    None,
    #[serde(rename = "PROXY")]
    Proxy,
}

#[derive(Deserialize)]
enum RawScope {
    Region,
    Zone,
    Subzone,
    Node,
    Cluster,
    Network,
}

#[derive(Deserialize, Default)]
enum RawMode {
    #[default]
    Standard,
    Strict,
    Failover,
    Passthrough,
}

#[derive(Deserialize, Default, PartialEq)]
enum HealthPolicy {
    #[default]
    OnlyHealthy,
    AllowAll,
}

#[derive(Deserialize)]
enum RawIpFamilies {
    Dual,
    IPv4,
    IPv6,
}

#[derive(Deserialize, Default, PartialEq)]
enum Visibility {
    #[default]
    Public,
    Namespace,
}

impl Object for Workload {
    type Raw = RawWorkload;
    const EXPECTED: &'static str = "a workload";

    fn check(raw: RawWorkload) -> Result<Self, String> {
        if raw.protocol == RawProtocol::Hbone {
            for (part, value) in [
                ("trustDomain", &raw.trust_domain),
                ("serviceAccount", &raw.service_account),
            ] {
                if value.is_empty() {
                    return Err(format!(
                        "workload {} has protocol HBONE, and so needs a {part}: write it out, the file has no default for it",
                        raw.label()
                    ));
                }
            }
            SpiffeId::new(&raw.trust_domain, &raw.namespace.0, &raw.service_account)
                .map_err(|error| format!("identity of workload {}: {error}", raw.label()))?;
        }
        let uid = match (&*raw.uid, &*raw.name, raw.workload_ips.first()) {
            ("", "", None) => {
                return Err(format!(
                    "workload {} needs a uid, a name or workloadIps, by which to tell it from others",
                    raw.label()
                ));
            }
            ("", "", Some(address)) => {
                format!(
                    "{}//Address/{}/{}/{address}",
                    raw.cluster(),
                    raw.namespace.0,
                    raw.network
                )
            }
            ("", name, _) => format!("{}//Pod/{}/{name}", raw.cluster(), raw.namespace.0),
            (uid, ..) => uid.to_owned(),
        };
        let application_tunnel = raw.application_tunnel.map(|tunnel| ApplicationTunnel {
            proxy_protocol: tunnel.protocol == TunnelProtocol::Proxy,
            port: tunnel.port.filter(|port| *port != 0),
        });
        let services = raw.services.0.into_iter();
        Ok(Self {
            uid: WorkloadUid(uid.into()),
            name: raw.name.into(),
            namespace: raw.namespace.0.into(),
            trust_domain: raw.trust_domain.into(),
            service_account: raw.service_account.into(),
            addresses: raw.workload_ips.into_iter().map(canonical).collect(),
            hostname: raw.hostname.into(),
            network: raw.network.into(),
            protocol: match raw.protocol {
                RawProtocol::Hbone => Protocol::Hbone,
                RawProtocol::Tcp => Protocol::Tcp,
            },
            host_network: raw.network_mode == NetworkMode::HostNetwork,
            node: raw.node.into(),
            cluster_id: raw.cluster_id.into(),
            locality: raw.locality.map_or_else(Locality::default, |locality| Locality {
                region: locality.region.into(),
                zone: locality.zone.into(),
                subzone: locality.subzone.into(),
            }),
            waypoint: raw.waypoint.map(|one| Box::new(one.into())),
            network_gateway: raw.network_gateway.map(|one| Box::new(one.into())),
            application_tunnel,
            healthy: raw.status == Status::Healthy,
            capacity: raw.capacity,
            services: services
                .map(|(host, ports)| (host.0, Arc::new(ports.into_ports(NonZeroU16::get))))
                .collect(),
            canonical_name: raw.canonical_name.into(),
            canonical_revision: raw.canonical_revision.into(),
            workload_name: raw.workload_name.into(),
            workload_type: match raw.workload_type {
                WorkloadType::Deployment => "deployment",
                WorkloadType::Cronjob => "cronjob",
                WorkloadType::Pod => "pod",
                WorkloadType::Job => "job",
            },
            authorization_policies: raw
                .authorization_policies
                .into_iter()
                .map(|name| name.0)
                .collect(),
        })
    }
}

impl RawWorkload {
    /// What its author will know it by.
    fn label(&self) -> String {
        match (&*self.uid, &*self.name) {
            ("", name) => format!("\"{}/{name}\"", self.namespace.0),
            (uid, _) => format!("{uid:?}"),
        }
    }

    fn cluster(&self) -> &str {
        if self.cluster_id.is_empty() {
            DEFAULT_CLUSTER
        } else {
            &self.cluster_id
        }
    }
}

impl Object for Service {
    type Raw = RawService;
    const EXPECTED: &'static str = "a service";

    fn check(raw: RawService) -> Result<Self, String> {
        let balancer = raw
            .load_balancer
            .map_or_else(LoadBalancer::default, |balancer| LoadBalancer {
                routing_preferences: balancer.routing_preferences.into_iter().map(Into::into).collect(),
                mode: balancer.mode.into(),
                allow_unhealthy: balancer.health_policy == HealthPolicy::AllowAll,
            });
        Ok(Self {
            host: NamespacedHostname {
                namespace: raw.namespace.0.into(),
                hostname: raw.hostname.0.into(),
            },
            name: raw.name.0.into(),
            vips: raw.vips.into_iter().map(|vip| vip.0).collect(),
            cidr_vips: raw.cidr_vips.into_iter().map(|vip| vip.0).collect(),
            ports: raw.ports.into_ports(|port| port),
            subject_alt_names: raw.subject_alt_names.into_iter().map(|san| san.0).collect(),
            waypoint: raw.waypoint.map(Into::into),
            weighted_waypoints: raw.weighted_waypoints.into_iter().map(Into::into).collect(),
            load_balancer: balancer,
            ip_families: match raw.ip_families {
                None | Some(RawIpFamilies::Dual) => IpFamilies::Any,
                Some(RawIpFamilies::IPv4) => IpFamilies::V4,
                Some(RawIpFamilies::IPv6) => IpFamilies::V6,
            },
            canonical: raw.canonical,
            namespace_only: raw.visibility == Visibility::Namespace,
        })
    }
}

impl From<RawGateway> for GatewayAddress {
    fn from(raw: RawGateway) -> Self {
        let port = raw.hbone_mtls_port.filter(|port| *port != 0);
        Self {
            destination: raw.destination.0,
            hbone_mtls_port: port.unwrap_or(PORT_HBONE),
        }
    }
}

impl From<Text<GatewayDestination>> for RawGateway {
    fn from(destination: Text<GatewayDestination>) -> Self {
        Self {
            destination,
            hbone_mtls_port: None,
        }
    }
}

impl From<RawWeightedWaypoint> for WeightedWaypoint {
    fn from(raw: RawWeightedWaypoint) -> Self {
        let port = raw.destination.hbone_mtls_port.or(raw.hbone_mtls_port);
        Self {
            destination: RawGateway {
                hbone_mtls_port: port,
                ..raw.destination
            }
            .into(),
            weight: raw.weight,
        }
    }
}

impl Object for CidrVip {
    type Raw = RawCidrVip;
    const EXPECTED: &'static str = "a range: {cidr: address/length, network: name}";

    fn check(raw: RawCidrVip) -> Result<Self, String> {
        let text = &raw.cidr.0;
        let range = text.split_once('/').and_then(|(address, length)| {
            let address: IpAddr = address.parse().ok()?;
            Self::of(raw.network.as_str().into(), address, length.parse().ok()?)
        });
        range.ok_or_else(|| format!("cidr {text:?} is not of the form address/length, like 10.1.0.0/16"))
    }
}

impl From<RawScope> for Scope {
    fn from(raw: RawScope) -> Self {
        match raw {
            RawScope::Region => Self::Region,
            RawScope::Zone => Self::Zone,
            RawScope::Subzone => Self::Subzone,
            RawScope::Node => Self::Node,
            RawScope::Cluster => Self::Cluster,
            RawScope::Network => Self::Network,
        }
    }
}

impl From<RawMode> for LoadBalancerMode {
    fn from(raw: RawMode) -> Self {
        match raw {
            RawMode::Standard => Self::Standard,
            RawMode::Strict => Self::Strict,
            RawMode::Failover => Self::Failover,
            RawMode::Passthrough => Self::Passthrough,
        }
    }
}
