use std::collections::HashMap;

use litemap::LiteMap;

use proptest::prelude::*;

use super::*;
use crate::mesh::{
    testing::{host, ip, service, workload},
    workload::{ApplicationTunnel, GatewayAddress, GatewayDestination},
};

const VIP: &str = "10.96.0.1:80";

fn chosen(
    workloads: Vec<Workload>,
    service: &Service,
    destination: &str,
) -> Result<(String, String), NoRoute> {
    let mesh = Mesh::new(workloads, vec![service.clone()]);
    let source = source();
    let destination = destination.parse().unwrap();
    endpoint(
        &mesh,
        &source,
        service,
        destination,
        Purpose::Destination,
        &mut |_| 0,
    )
    .map(|endpoint| {
        let target = endpoint
            .address
            .map(|address| SocketAddr::new(address, endpoint.port));
        (
            endpoint.workload.name.to_string(),
            target.map(|target| target.to_string()).unwrap_or_default(),
        )
    })
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
            services: LiteMap::from_iter([(host("cart"), Arc::default())]),
            ..w.clone()
        }
    });
    let mapped = with("b", "10.0.0.2", |w| {
        w.services
            .insert(host("cart"), Arc::new(LiteMap::from_iter([(80, 9090)])));
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

fn gateway() -> Option<GatewayAddress> {
    Some(GatewayAddress {
        destination: GatewayDestination::Hostname(host("gateway")),
        hbone_mtls_port: 15008,
    })
}

#[test]
fn endpoints_on_other_networks_are_alike_when_a_gateway_leads_there() {
    let cart = service("cart", "10.96.0.1");
    let near = workload("near", "10.0.0.2");
    let far = with("far", "10.0.0.1", |w| w.network = "net2".into());
    let behind = with("behind", "10.0.0.1", |w| {
        w.network = "net2".into();
        w.network_gateway = gateway().map(Box::new);
    });
    let bare = with("bare", "10.0.0.1", |w| {
        w.network = "net2".into();
        w.network_gateway = gateway().map(Box::new);
        w.addresses.clear();
    });
    let refused = NoRoute::NoGateway {
        service: cart.host.to_string(),
        workload: far.uid.to_string(),
        network: "net2".into(),
    };
    assert_eq!(chosen(vec![far.clone()], &cart, VIP), Err(refused));
    for (given, expected) in [
        (vec![&far, &near], "near"),
        (vec![&behind, &near], "behind"),
        (vec![&near, &behind], "near"),
        (vec![&bare], "bare"),
    ] {
        let found = chosen(given.into_iter().cloned().collect(), &cart, VIP);
        assert_eq!(found.unwrap().0, expected);
    }
}

#[test]
fn one_s_own_network_comes_first_when_it_is_preferred_and_the_others_keep_their_order() {
    use Scope::{Network, Region, Zone};
    let on = |name: &str, network: &str, region: &str, zone: &str| {
        with(name, "10.0.0.1", |w| {
            w.network = network.into();
            w.network_gateway = gateway().map(Box::new);
            w.locality.region = region.into();
            w.locality.zone = zone.into();
        })
    };
    let [near, far_here, far_region, far_zone] = [
        on("near", "", "r2", "z2"),
        on("here", "", "r1", "z2"),
        on("region", "net2", "r1", "z2"),
        on("zone", "net2", "r1", "z1"),
    ];
    for (mode, preferences, given, expected) in [
        (
            LoadBalancerMode::Failover,
            vec![Network, Region, Zone],
            vec![&far_zone, &near],
            Some("near"),
        ),
        (
            LoadBalancerMode::Failover,
            vec![Network, Region, Zone],
            vec![&far_zone, &near, &far_here],
            Some("here"),
        ),
        (
            LoadBalancerMode::Failover,
            vec![Network, Region, Zone],
            vec![&far_region, &far_zone],
            Some("zone"),
        ),
        (
            LoadBalancerMode::Failover,
            vec![Region, Network, Zone],
            vec![&far_zone, &near],
            Some("zone"),
        ),
        (
            LoadBalancerMode::Strict,
            vec![Network, Region],
            vec![&far_zone, &near],
            None,
        ),
        (
            LoadBalancerMode::Strict,
            vec![Network],
            vec![&far_zone, &near],
            Some("near"),
        ),
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

/// Names that were asked for, and always the same draw.
struct Known(u64, Vec<(&'static str, Vec<IpAddr>)>);

impl Chance for Known {
    fn below(&mut self, _: u64) -> u64 {
        self.0
    }

    fn resolved(&self, hostname: &str) -> Option<&[IpAddr]> {
        let (_, addresses) = self.1.iter().find(|(name, _)| *name == hostname)?;
        Some(addresses)
    }
}

#[test]
fn an_endpoint_with_a_name_and_no_address_is_where_its_name_is() {
    let named = |name: &str, hostname: &str| {
        with(name, "10.0.0.1", |w| {
            w.addresses.clear();
            w.hostname = hostname.into();
        })
    };
    let db = named("db", "db.example.org");
    let other = workload("a", "10.0.0.2");
    let (four, six) = (ip("192.0.2.1"), ip("2001:db8::1"));
    let both = || vec![("db.example.org", vec![six, four])];
    let gone = || vec![("db.example.org", vec![])];
    let only = |families| {
        let mut cart = service("cart", "10.96.0.1");
        cart.ip_families = families;
        cart
    };
    for (workloads, families, draw, names, expected) in [
        // Unasked it is drawn all the same, and to be asked for then.
        (vec![&db], IpFamilies::Any, 0, vec![], Err(())),
        (vec![&db, &other], IpFamilies::Any, 0, vec![], Err(())),
        (vec![&db, &other], IpFamilies::Any, 1, vec![], Ok("10.0.0.2:8080")),
        // The client's family first.
        (vec![&db], IpFamilies::Any, 0, both(), Ok("192.0.2.1:8080")),
        (vec![&db], IpFamilies::V6, 0, both(), Ok("[2001:db8::1]:8080")),
        // One of several.
        (
            vec![&db],
            IpFamilies::Any,
            1,
            vec![("db.example.org", vec![ip("192.0.2.1"), ip("192.0.2.2")])],
            Ok("192.0.2.2:8080"),
        ),
        (
            vec![&db, &other],
            IpFamilies::Any,
            0,
            vec![("db.example.org", vec![ip("127.0.0.1"), ip("0.0.0.0"), ip("::1")])],
            Ok("10.0.0.2:8080"),
        ),
        // A name without an address leaves the others.
        (vec![&db, &other], IpFamilies::Any, 0, gone(), Ok("10.0.0.2:8080")),
        (vec![&db], IpFamilies::Any, 0, gone(), Err(())),
        (
            vec![&db],
            IpFamilies::V6,
            0,
            vec![("db.example.org", vec![four])],
            Err(()),
        ),
    ] {
        let cart = only(families);
        let workloads: Vec<_> = workloads.into_iter().cloned().collect();
        let mesh = Mesh::new(workloads, vec![cart.clone()]);
        let (source, destination) = (source(), VIP.parse().unwrap());
        let mut known = Known(draw, names.clone());
        let found = endpoint(
            &mesh,
            &source,
            &cart,
            destination,
            Purpose::Destination,
            &mut known,
        );
        let case = format!("{draw} {names:?} {families:?}");
        match (found, expected) {
            (Ok(found), Ok(expected)) => {
                let address = SocketAddr::new(found.address.unwrap(), found.port);
                assert_eq!(address.to_string(), expected, "{case}");
            }
            (Err(error), Err(())) => {
                assert_eq!(
                    error.unresolved().map(|name| &**name),
                    Some("db.example.org"),
                    "{case}"
                );
            }
            (found, _) => panic!("{case}: {:?}", found.map(|found| found.address)),
        }
    }
}

#[test]
fn an_application_tunnel_needs_no_mapping_and_a_waypoint_with_one_no_service_port() {
    let tunnel = |port| {
        Some(ApplicationTunnel {
            proxy_protocol: true,
            port,
        })
    };
    let with_tunnel = |port| {
        with("a", "10.0.0.1", |w| {
            w.services.insert(host("cart"), Arc::default());
            w.application_tunnel = port;
        })
    };
    let mut cart = service("cart", "10.96.0.1");
    cart.ports.insert(81, 0);
    for (purpose, tunnel, port, expected) in [
        (Purpose::Destination, tunnel(Some(15088)), 81, Some(81)),
        (Purpose::Destination, tunnel(Some(15088)), 80, Some(8080)),
        (Purpose::Destination, tunnel(None), 81, None),
        (Purpose::Destination, tunnel(Some(15088)), 15008, None),
        (Purpose::Waypoint, tunnel(Some(15088)), 15008, Some(15008)),
        (Purpose::Waypoint, tunnel(None), 15008, None),
        (Purpose::Waypoint, None, 15008, None),
        (Purpose::Waypoint, None, 80, Some(8080)),
    ] {
        let mesh = Mesh::new(vec![with_tunnel(tunnel)], vec![cart.clone()]);
        let destination = SocketAddr::new(ip("10.96.0.1"), port);
        let source = source();
        let found = endpoint(&mesh, &source, &cart, destination, purpose, &mut |_| 0);
        assert_eq!(
            found.ok().map(|endpoint| endpoint.port),
            expected,
            "{purpose:?} {tunnel:?} {port}"
        );
    }
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
            let found = endpoint(&mesh, &source, &cart, VIP.parse().unwrap(), Purpose::Destination, &mut |n| {
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
