//! The messages of discovery: `envoy.service.discovery.v3` (discovery.proto), `istio.workload` (workload.proto of ztunnel) and
//! `istio.security` (authorization.proto of ztunnel), as far as they are read or sent here. Written by hand: a field is left out where
//! nobody asks for it.

use std::collections::{BTreeMap, HashMap};

use prost::{Enumeration, Message, Oneof};
use prost_types::{Any, Struct};

/// Asks for resources, and answers a response.
#[derive(Clone, PartialEq, Message)]
pub(in crate::discovery) struct DeltaDiscoveryRequest {
    #[prost(message, optional, tag = "1")]
    pub(in crate::discovery) node: Option<Node>,
    #[prost(string, tag = "2")]
    pub(in crate::discovery) type_url: String,
    #[prost(string, repeated, tag = "3")]
    pub(in crate::discovery) resource_names_subscribe: Vec<String>,
    #[prost(string, repeated, tag = "4")]
    pub(in crate::discovery) resource_names_unsubscribe: Vec<String>,
    #[prost(btree_map = "string, string", tag = "5")]
    pub(in crate::discovery) initial_resource_versions: BTreeMap<String, String>,
    #[prost(string, tag = "6")]
    pub(in crate::discovery) response_nonce: String,
    #[prost(message, optional, tag = "7")]
    pub(in crate::discovery) error_detail: Option<Status>,
}

/// Brings resources.
#[derive(Clone, PartialEq, Message)]
pub(in crate::discovery) struct DeltaDiscoveryResponse {
    #[prost(string, tag = "1")]
    pub(in crate::discovery) system_version_info: String,
    #[prost(message, repeated, tag = "2")]
    pub(in crate::discovery) resources: Vec<Resource>,
    #[prost(string, tag = "4")]
    pub(in crate::discovery) type_url: String,
    #[prost(string, tag = "5")]
    pub(in crate::discovery) nonce: String,
    #[prost(string, repeated, tag = "6")]
    pub(in crate::discovery) removed_resources: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
pub(in crate::discovery) struct Resource {
    #[prost(string, tag = "1")]
    pub(in crate::discovery) version: String,
    #[prost(message, optional, tag = "2")]
    pub(in crate::discovery) resource: Option<Any>,
    #[prost(string, tag = "3")]
    pub(in crate::discovery) name: String,
    #[prost(string, repeated, tag = "4")]
    pub(in crate::discovery) aliases: Vec<String>,
}

/// Who asks.
#[derive(Clone, PartialEq, Message)]
pub(in crate::discovery) struct Node {
    #[prost(string, tag = "1")]
    pub(in crate::discovery) id: String,
    #[prost(message, optional, tag = "3")]
    pub(in crate::discovery) metadata: Option<Struct>,
}

/// `google.rpc.Status`.
#[derive(Clone, PartialEq, Message)]
pub(in crate::discovery) struct Status {
    #[prost(int32, tag = "1")]
    pub(in crate::discovery) code: i32,
    #[prost(string, tag = "2")]
    pub(in crate::discovery) message: String,
}

/// A workload or a service.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Address {
    #[prost(oneof = "AddressKind", tags = "1, 2")]
    pub(super) kind: Option<AddressKind>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum AddressKind {
    #[prost(message, tag = "1")]
    Workload(Box<Workload>),
    #[prost(message, tag = "2")]
    Service(Box<Service>),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Workload {
    #[prost(string, tag = "20")]
    pub(super) uid: String,
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(string, tag = "2")]
    pub(super) namespace: String,
    #[prost(bytes = "vec", repeated, tag = "3")]
    pub(super) addresses: Vec<Vec<u8>>,
    #[prost(string, tag = "21")]
    pub(super) hostname: String,
    #[prost(string, tag = "4")]
    pub(super) network: String,
    #[prost(enumeration = "TunnelProtocol", tag = "5")]
    pub(super) tunnel_protocol: i32,
    #[prost(string, tag = "6")]
    pub(super) trust_domain: String,
    #[prost(string, tag = "7")]
    pub(super) service_account: String,
    #[prost(message, optional, tag = "8")]
    pub(super) waypoint: Option<GatewayAddress>,
    #[prost(message, optional, tag = "19")]
    pub(super) network_gateway: Option<GatewayAddress>,
    #[prost(string, tag = "9")]
    pub(super) node: String,
    #[prost(string, tag = "10")]
    pub(super) canonical_name: String,
    #[prost(string, tag = "11")]
    pub(super) canonical_revision: String,
    #[prost(enumeration = "WorkloadType", tag = "12")]
    pub(super) workload_type: i32,
    #[prost(string, tag = "13")]
    pub(super) workload_name: String,
    #[prost(message, optional, tag = "23")]
    pub(super) application_tunnel: Option<ApplicationTunnel>,
    #[prost(map = "string, message", tag = "22")]
    pub(super) services: HashMap<String, PortList>,
    #[prost(string, repeated, tag = "16")]
    pub(super) authorization_policies: Vec<String>,
    #[prost(enumeration = "WorkloadStatus", tag = "17")]
    pub(super) status: i32,
    #[prost(string, tag = "18")]
    pub(super) cluster_id: String,
    #[prost(message, optional, tag = "24")]
    pub(super) locality: Option<Locality>,
    #[prost(enumeration = "NetworkMode", tag = "25")]
    pub(super) network_mode: i32,
    /// `google.protobuf.UInt32Value`.
    #[prost(message, optional, tag = "27")]
    pub(super) capacity: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Enumeration)]
#[repr(i32)]
pub(super) enum TunnelProtocol {
    None = 0,
    Hbone = 1,
    LegacyIstioMtls = 2,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Enumeration)]
#[repr(i32)]
pub(super) enum WorkloadType {
    Deployment = 0,
    Cronjob = 1,
    Pod = 2,
    Job = 3,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Enumeration)]
#[repr(i32)]
pub(super) enum WorkloadStatus {
    Healthy = 0,
    Unhealthy = 1,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Enumeration)]
#[repr(i32)]
pub(super) enum NetworkMode {
    Standard = 0,
    HostNetwork = 1,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Locality {
    #[prost(string, tag = "1")]
    pub(super) region: String,
    #[prost(string, tag = "2")]
    pub(super) zone: String,
    #[prost(string, tag = "3")]
    pub(super) subzone: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Service {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(string, tag = "2")]
    pub(super) namespace: String,
    #[prost(string, tag = "3")]
    pub(super) hostname: String,
    #[prost(message, repeated, tag = "4")]
    pub(super) addresses: Vec<NetworkAddress>,
    #[prost(message, repeated, tag = "5")]
    pub(super) ports: Vec<Port>,
    #[prost(string, repeated, tag = "6")]
    pub(super) subject_alt_names: Vec<String>,
    #[prost(message, optional, tag = "7")]
    pub(super) waypoint: Option<GatewayAddress>,
    #[prost(message, optional, tag = "8")]
    pub(super) load_balancing: Option<LoadBalancing>,
    #[prost(enumeration = "IpFamilies", tag = "9")]
    pub(super) ip_families: i32,
    #[prost(bool, tag = "11")]
    pub(super) canonical: bool,
    #[prost(message, repeated, tag = "13")]
    pub(super) weighted_waypoints: Vec<WeightedWaypoint>,
    #[prost(enumeration = "Visibility", tag = "14")]
    pub(super) visibility: i32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Enumeration)]
#[repr(i32)]
pub(super) enum IpFamilies {
    Automatic = 0,
    Ipv4Only = 1,
    Ipv6Only = 2,
    Dual = 3,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Enumeration)]
#[repr(i32)]
pub(super) enum Visibility {
    Public = 0,
    Namespace = 1,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct WeightedWaypoint {
    #[prost(message, optional, tag = "1")]
    pub(super) destination: Option<GatewayAddress>,
    #[prost(uint32, tag = "2")]
    pub(super) weight: u32,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LoadBalancing {
    #[prost(enumeration = "RoutingScope", repeated, tag = "1")]
    pub(super) routing_preference: Vec<i32>,
    #[prost(enumeration = "BalancingMode", tag = "2")]
    pub(super) mode: i32,
    #[prost(enumeration = "HealthPolicy", tag = "3")]
    pub(super) health_policy: i32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Enumeration)]
#[repr(i32)]
pub(super) enum RoutingScope {
    Unspecified = 0,
    Region = 1,
    Zone = 2,
    Subzone = 3,
    Node = 4,
    Cluster = 5,
    Network = 6,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Enumeration)]
#[repr(i32)]
pub(super) enum BalancingMode {
    Unspecified = 0,
    Strict = 1,
    Failover = 2,
    Passthrough = 3,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Enumeration)]
#[repr(i32)]
pub(super) enum HealthPolicy {
    OnlyHealthy = 0,
    AllowAll = 1,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct GatewayAddress {
    #[prost(oneof = "GatewayDestination", tags = "1, 2")]
    pub(super) destination: Option<GatewayDestination>,
    #[prost(uint32, tag = "3")]
    pub(super) hbone_mtls_port: u32,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum GatewayDestination {
    #[prost(message, tag = "1")]
    Hostname(NamespacedHostname),
    #[prost(message, tag = "2")]
    Address(NetworkAddress),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct NetworkAddress {
    #[prost(string, tag = "1")]
    pub(super) network: String,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) address: Vec<u8>,
    /// Leading bits, of a range.
    #[prost(uint32, optional, tag = "3")]
    pub(super) length: Option<u32>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct NamespacedHostname {
    #[prost(string, tag = "1")]
    pub(super) namespace: String,
    #[prost(string, tag = "2")]
    pub(super) hostname: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ApplicationTunnel {
    #[prost(enumeration = "ApplicationProtocol", tag = "1")]
    pub(super) protocol: i32,
    #[prost(uint32, tag = "2")]
    pub(super) port: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Enumeration)]
#[repr(i32)]
pub(super) enum ApplicationProtocol {
    None = 0,
    Proxy = 1,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct PortList {
    #[prost(message, repeated, tag = "1")]
    pub(super) ports: Vec<Port>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Port {
    #[prost(uint32, tag = "1")]
    pub(super) service_port: u32,
    #[prost(uint32, tag = "2")]
    pub(super) target_port: u32,
}

/// A policy.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Authorization {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(string, tag = "2")]
    pub(super) namespace: String,
    #[prost(enumeration = "Scope", tag = "3")]
    pub(super) scope: i32,
    #[prost(enumeration = "Action", tag = "4")]
    pub(super) action: i32,
    #[prost(message, repeated, tag = "5")]
    pub(super) rules: Vec<Rule>,
    #[prost(bool, tag = "6")]
    pub(super) dry_run: bool,
    /// What else there is to it, of kinds that are not known here.
    #[prost(message, repeated, tag = "7")]
    pub(super) extensions: Vec<Extension>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Enumeration)]
#[repr(i32)]
pub(super) enum Scope {
    Global = 0,
    Namespace = 1,
    WorkloadSelector = 2,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Enumeration)]
#[repr(i32)]
pub(super) enum Action {
    Allow = 0,
    Deny = 1,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Rule {
    #[prost(message, repeated, tag = "1")]
    pub(super) clauses: Vec<Clause>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Clause {
    #[prost(message, repeated, tag = "2")]
    pub(super) matches: Vec<Match>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Match {
    #[prost(message, repeated, tag = "1")]
    pub(super) namespaces: Vec<StringMatch>,
    #[prost(message, repeated, tag = "2")]
    pub(super) not_namespaces: Vec<StringMatch>,
    #[prost(message, repeated, tag = "3")]
    pub(super) principals: Vec<StringMatch>,
    #[prost(message, repeated, tag = "4")]
    pub(super) not_principals: Vec<StringMatch>,
    #[prost(message, repeated, tag = "5")]
    pub(super) source_ips: Vec<Cidr>,
    #[prost(message, repeated, tag = "6")]
    pub(super) not_source_ips: Vec<Cidr>,
    #[prost(message, repeated, tag = "7")]
    pub(super) destination_ips: Vec<Cidr>,
    #[prost(message, repeated, tag = "8")]
    pub(super) not_destination_ips: Vec<Cidr>,
    #[prost(uint32, repeated, tag = "9")]
    pub(super) destination_ports: Vec<u32>,
    #[prost(uint32, repeated, tag = "10")]
    pub(super) not_destination_ports: Vec<u32>,
    #[prost(message, repeated, tag = "11")]
    pub(super) service_accounts: Vec<ServiceAccountMatch>,
    #[prost(message, repeated, tag = "12")]
    pub(super) not_service_accounts: Vec<ServiceAccountMatch>,
    /// Conditions of kinds that are not known here.
    #[prost(message, repeated, tag = "13")]
    pub(super) extensions: Vec<Extension>,
}

/// `istio.security.Extension`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Extension {
    #[prost(string, tag = "1")]
    pub(super) name: String,
}

/// `istio.security.Address`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Cidr {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) address: Vec<u8>,
    #[prost(uint32, tag = "2")]
    pub(super) length: u32,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ServiceAccountMatch {
    #[prost(string, tag = "1")]
    pub(super) namespace: String,
    #[prost(string, tag = "2")]
    pub(super) service_account: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct StringMatch {
    #[prost(oneof = "StringKind", tags = "1, 2, 3, 4")]
    pub(super) kind: Option<StringKind>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum StringKind {
    #[prost(string, tag = "1")]
    Exact(String),
    #[prost(string, tag = "2")]
    Prefix(String),
    #[prost(string, tag = "3")]
    Suffix(String),
    #[prost(message, tag = "4")]
    Presence(()),
}
