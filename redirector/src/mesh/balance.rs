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
    pub(super) target: SocketAddr,
}

/// Chooses an endpoint of `service` for `source`'s connection to `destination`, by preference and weight.
///
/// Endpoints on other networks are left out while there is one on the source's own, and make an error of their own otherwise:
/// network gateways are not supported.
pub(super) fn endpoint<'a>(
    mesh: &'a Mesh,
    source: &Workload,
    service: &Service,
    destination: SocketAddr,
    choose: &mut dyn FnMut(u64) -> u64,
) -> Result<Endpoint<'a>, NoRoute> {
    let port = destination.port();
    let Some(&service_target) = service.ports.get(&port) else {
        return Err(NoRoute::UnknownPort {
            service: service.host.to_string(),
            port,
        });
    };
    let usable = |workload: &Workload| {
        workload.capacity > 0 && (workload.healthy || service.load_balancer.allow_unhealthy)
    };
    let mut elsewhere = None;
    let mut candidates = Vec::new();
    let mut best = 0;
    for workload in mesh
        .endpoints(&service.host)
        .iter()
        .filter(|workload| usable(workload))
    {
        let Some(target_port) = target_port(service, service_target, workload, port) else {
            continue;
        };
        let Some(rank) = rank(&service.load_balancer, source, workload) else {
            continue;
        };
        if workload.network != source.network {
            elsewhere = Some(&workload.network);
            continue;
        }
        let Some(address) = address(workload, service.ip_families, destination.ip()) else {
            continue;
        };
        if rank > best {
            best = rank;
            candidates.clear();
        }
        if rank == best {
            candidates.push(Endpoint {
                workload,
                target: SocketAddr::new(address, target_port),
            });
        }
    }
    weighted(candidates, choose).ok_or_else(|| {
        let service = service.host.to_string();
        match elsewhere {
            Some(network) => NoRoute::OtherNetwork {
                service,
                network: network.to_string(),
            },
            None => NoRoute::NoEndpoint { service, port },
        }
    })
}

/// The endpoint's own mapping, else the service's; 0 there is a named port, which only endpoints can map.
pub(super) fn target_port(
    service: &Service,
    service_target: u16,
    workload: &Workload,
    port: u16,
) -> Option<u16> {
    let own = workload
        .services
        .get(&service.host)
        .and_then(|ports| ports.get(&port))
        .copied();
    own.or(Some(service_target)).filter(|port| *port != 0)
}

/// The address that the client named, when the workload has it; else the first of the client's family, else the first.
fn address(workload: &Workload, families: IpFamilies, wanted: IpAddr) -> Option<IpAddr> {
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
    let leading = || {
        preferences
            .iter()
            .take_while(|scope| matches(**scope, source, workload))
            .count()
    };
    match balancer.mode {
        LoadBalancerMode::Standard | LoadBalancerMode::Passthrough => Some(0),
        LoadBalancerMode::Failover => Some(leading()),
        LoadBalancerMode::Strict => (leading() == preferences.len()).then_some(0),
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

/// A candidate by capacity.
fn weighted<'a>(
    mut candidates: Vec<Endpoint<'a>>,
    choose: &mut dyn FnMut(u64) -> u64,
) -> Option<Endpoint<'a>> {
    let weight = |endpoint: &Endpoint<'_>| u64::from(endpoint.workload.capacity);
    let total: u64 = candidates.iter().map(weight).sum();
    if total == 0 {
        return None;
    }
    let mut left = choose(total) % total;
    let chosen = candidates
        .iter()
        .position(|endpoint| match left.checked_sub(weight(endpoint)) {
            Some(rest) => {
                left = rest;
                false
            }
            None => true,
        });
    chosen.map(|at| candidates.swap_remove(at))
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, HashMap};

    use proptest::prelude::*;

    use super::*;
    use crate::mesh::testing::{host, ip, service, workload};

    const VIP: &str = "10.96.0.1:80";

    fn chosen(
        workloads: Vec<Workload>,
        service: &Service,
        destination: &str,
    ) -> Result<(String, String), NoRoute> {
        let mesh = Mesh::new(workloads, vec![service.clone()]);
        let source = source();
        endpoint(&mesh, &source, service, destination.parse().unwrap(), &mut |_| 0)
            .map(|endpoint| (endpoint.workload.name.to_string(), endpoint.target.to_string()))
    }

    fn source() -> Workload {
        let mut source = workload("client", "10.0.0.9");
        source.services.clear();
        source.node = "n1".into();
        source.locality.region = "r1".into();
        source.locality.zone = "z1".into();
        source
    }

    fn with(name: &str, address: &str, change: impl FnOnce(&mut Workload)) -> Workload {
        let mut made = workload(name, address);
        change(&mut made);
        made
    }

    fn target(found: Result<(String, String), NoRoute>) -> String {
        found.unwrap().1
    }

    #[test]
    fn ports_come_from_the_endpoint_then_from_the_service() {
        let mut cart = service("cart", "10.96.0.1");
        let unmapped = with("a", "10.0.0.1", |w| {
            *w = Workload {
                services: BTreeMap::from([(host("cart"), BTreeMap::new())]),
                ..w.clone()
            }
        });
        let mapped = with("b", "10.0.0.2", |w| {
            w.services.insert(host("cart"), BTreeMap::from([(80, 9090)]));
        });
        assert_eq!(target(chosen(vec![mapped.clone()], &cart, VIP)), "10.0.0.2:9090");
        assert_eq!(
            target(chosen(vec![unmapped.clone()], &cart, VIP)),
            "10.0.0.1:8080"
        );

        cart.ports.insert(80, 0);
        assert_eq!(
            target(chosen(vec![unmapped.clone(), mapped], &cart, VIP)),
            "10.0.0.2:9090"
        );
        let none = NoRoute::NoEndpoint {
            service: cart.host.to_string(),
            port: 80,
        };
        assert_eq!(chosen(vec![unmapped], &cart, VIP), Err(none));
    }

    #[test]
    fn a_port_that_the_service_does_not_list_is_refused() {
        let cart = service("cart", "10.96.0.1");
        let found = chosen(vec![workload("a", "10.0.0.1")], &cart, "10.96.0.1:81");
        assert_eq!(
            found,
            Err(NoRoute::UnknownPort {
                service: cart.host.to_string(),
                port: 81
            })
        );
    }

    #[test]
    fn unhealthy_endpoints_and_those_without_capacity_are_not_chosen() {
        let mut cart = service("cart", "10.96.0.1");
        let sick = with("sick", "10.0.0.1", |w| w.healthy = false);
        let idle = with("idle", "10.0.0.2", |w| w.capacity = 0);
        assert!(matches!(
            chosen(vec![sick.clone(), idle.clone()], &cart, VIP),
            Err(NoRoute::NoEndpoint { .. })
        ));
        cart.load_balancer.allow_unhealthy = true;
        assert_eq!(chosen(vec![idle, sick], &cart, VIP).unwrap().0, "sick");
    }

    #[test]
    fn preferences_rank_or_exclude() {
        use LoadBalancerMode::{Failover, Standard, Strict};
        use Scope::{Node, Region, Zone};
        let near = with("near", "10.0.0.1", |w| {
            w.locality = source().locality;
            w.node = "n2".into();
        });
        let region = with("region", "10.0.0.2", |w| w.locality.region = "r1".into());
        let far = with("far", "10.0.0.3", |w| w.node = "n1".into());
        for (mode, preferences, given, expected) in [
            (Standard, vec![Region], vec![&far, &near], Some("far")),
            (
                Failover,
                vec![Region, Zone],
                vec![&far, &region, &near],
                Some("near"),
            ),
            (Failover, vec![Region, Zone], vec![&far, &region], Some("region")),
            (Failover, vec![Region, Zone], vec![&far], Some("far")),
            // The node matches, but the scope before it does not.
            (Failover, vec![Region, Node], vec![&far, &region], Some("region")),
            (Failover, vec![Node, Region], vec![&region, &far], Some("far")),
            (
                Strict,
                vec![Region, Zone],
                vec![&far, &region, &near],
                Some("near"),
            ),
            (Strict, vec![Region, Zone], vec![&far, &region], None),
            (Strict, vec![], vec![&far], Some("far")),
        ] {
            let mut cart = service("cart", "10.96.0.1");
            cart.load_balancer.mode = mode;
            cart.load_balancer.routing_preferences = preferences.clone();
            let found = chosen(given.into_iter().cloned().collect(), &cart, VIP)
                .ok()
                .map(|found| found.0);
            assert_eq!(found.as_deref(), expected, "{mode:?} {preferences:?}");
        }
    }

    #[test]
    fn addresses_follow_the_client_s_family_within_what_the_service_allows() {
        let dual = with("dual", "10.0.0.1", |w| {
            w.addresses = vec![ip("10.0.0.1"), ip("fd00::1"), ip("fd00::2")]
        });
        for (families, destination, expected) in [
            (IpFamilies::Any, "10.96.0.1:80", Some("10.0.0.1:8080")),
            (IpFamilies::Any, "[fd96::1]:80", Some("[fd00::1]:8080")),
            (IpFamilies::V6, "10.96.0.1:80", Some("[fd00::1]:8080")),
            (IpFamilies::V4, "[fd96::1]:80", Some("10.0.0.1:8080")),
            // What the client named itself is taken as it is.
            (IpFamilies::V4, "[fd00::2]:80", Some("[fd00::2]:8080")),
        ] {
            let mut cart = service("cart", "10.96.0.1");
            cart.ip_families = families;
            let found = chosen(vec![dual.clone()], &cart, destination)
                .ok()
                .map(|found| found.1);
            assert_eq!(found.as_deref(), expected, "{families:?} {destination}");
        }
        let mut v6_only = service("cart", "10.96.0.1");
        v6_only.ip_families = IpFamilies::V6;
        let found = chosen(vec![workload("a", "10.0.0.1")], &v6_only, VIP);
        assert!(matches!(found, Err(NoRoute::NoEndpoint { .. })));
    }

    #[test]
    fn endpoints_on_other_networks_are_a_refusal_only_when_there_is_no_other() {
        let cart = service("cart", "10.96.0.1");
        let far = with("far", "10.0.0.1", |w| w.network = "net2".into());
        let refused = NoRoute::OtherNetwork {
            service: cart.host.to_string(),
            network: "net2".into(),
        };
        assert_eq!(chosen(vec![far.clone()], &cart, VIP), Err(refused));
        assert_eq!(
            chosen(vec![far, workload("near", "10.0.0.2")], &cart, VIP)
                .unwrap()
                .0,
            "near"
        );
    }

    proptest! {
        #[test]
        fn each_endpoint_is_chosen_as_often_as_it_has_capacity(
            capacities in prop::collection::vec(0_u32..6, 1..8)
        ) {
            let workloads = capacities
                .iter()
                .enumerate()
                .map(|(at, capacity)| with(&format!("w{at}"), &format!("10.0.0.{at}"), |w| w.capacity = *capacity));
            let cart = service("cart", "10.96.0.1");
            let mesh = Mesh::new(workloads.collect(), vec![cart.clone()]);
            let total: u32 = capacities.iter().sum();
            let mut times: HashMap<String, u32> = HashMap::new();
            for number in 0..u64::from(total) {
                let source = source();
                let found = endpoint(&mesh, &source, &cart, VIP.parse().unwrap(), &mut |n| {
                    assert_eq!(n, u64::from(total));
                    number
                });
                *times.entry(found.ok().unwrap().workload.name.to_string()).or_default() += 1;
            }
            for (at, capacity) in capacities.iter().enumerate() {
                prop_assert_eq!(times.get(&format!("w{at}")).copied().unwrap_or(0), *capacity);
            }
        }
    }
}
