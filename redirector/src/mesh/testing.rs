//! Workloads and services for unit tests: all in namespace `shop`, with names made from one word.

use std::{net::IpAddr, sync::Arc};

use litemap::LiteMap;

use super::{
    index::{Mesh, Update},
    pod::PodInfo,
    policy::{Policy, PolicyName},
    service::{IpFamilies, LoadBalancer, Service},
    spiffe::SpiffeId,
    workload::{Locality, NamespacedHostname, NetworkAddress, Protocol, Workload, WorkloadUid},
};

pub(crate) fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// The identity of [`workload`].
pub(crate) fn id(name: &str) -> SpiffeId {
    SpiffeId::new("cluster.local", "shop", name).unwrap()
}

/// The local pod [`workload`] of that name.
pub(crate) fn info(name: &str) -> PodInfo {
    PodInfo {
        uid: name.parse().unwrap(),
        name: name.into(),
        namespace: "shop".into(),
        service_account: name.into(),
    }
}

pub(crate) fn policy_name(namespace: &str, name: &str) -> PolicyName {
    PolicyName {
        namespace: namespace.into(),
        name: name.into(),
    }
}

pub(crate) fn host(name: &str) -> NamespacedHostname {
    NamespacedHostname {
        namespace: "shop".into(),
        hostname: format!("{name}.shop.svc.cluster.local").into(),
    }
}

/// A healthy HBONE pod with service account `name`, endpoint of service `cart` with port 80 at 8080.
pub(crate) fn workload(name: &str, address: &str) -> Workload {
    Workload {
        uid: WorkloadUid(format!("Kubernetes//Pod/shop/{name}").into()),
        name: name.into(),
        namespace: "shop".into(),
        trust_domain: "cluster.local".into(),
        service_account: name.into(),
        addresses: vec![ip(address)],
        hostname: Arc::default(),
        network: Arc::default(),
        protocol: Protocol::Hbone,
        host_network: false,
        node: Arc::default(),
        cluster_id: Arc::default(),
        locality: Locality::default(),
        waypoint: None,
        network_gateway: None,
        application_tunnel: None,
        healthy: true,
        capacity: 1,
        services: LiteMap::from_iter([(host("cart"), Arc::new(LiteMap::from_iter([(80, 8080)])))]),
        canonical_name: Arc::default(),
        canonical_revision: Arc::default(),
        workload_name: Arc::default(),
        workload_type: "deployment",
        authorization_policies: vec![],
    }
}

/// A service with port 80 at 8080.
pub(crate) fn service(name: &str, vip: &str) -> Service {
    Service {
        host: host(name),
        name: name.into(),
        vips: vec![NetworkAddress {
            network: Arc::default(),
            address: ip(vip),
        }],
        cidr_vips: vec![],
        ports: LiteMap::from_iter([(80, 8080)]),
        subject_alt_names: vec![],
        waypoint: None,
        weighted_waypoints: vec![],
        load_balancer: LoadBalancer::default(),
        ip_families: IpFamilies::Any,
        canonical: false,
        namespace_only: false,
    }
}

/// The same mesh with these policies too.
pub(crate) fn with_policies(mut mesh: Mesh, policies: impl IntoIterator<Item = Policy>) -> Mesh {
    for policy in policies {
        mesh.apply(Update::Policy(Arc::new(policy)));
    }
    mesh
}
