//! Waypoints and network gateways.

use super::*;
use crate::mesh::service::WeightedWaypoint;

/// [`World`] with workload `way` at 10.0.0.5, alone and as the endpoint of service `ways` at 10.96.0.9 and of
/// `hidden-ways`, which has no port.
fn world() -> World {
    let mut world = World::new().with("way", "10.0.0.5").change("way", |way| {
        for name in ["ways", "hidden-ways"] {
            way.services
                .insert(host(name), Arc::new(LiteMap::from_iter([(15008, 15008)])));
        }
        way.hostname = "way.example.org".into();
    });
    for (name, vip) in [("ways", "10.96.0.9"), ("hidden-ways", "10.96.0.8")] {
        let mut ways = service(name, vip);
        ways.ports = LiteMap::from_iter([(15008, 15008)]);
        ways.subject_alt_names = vec![id("ways-alias")];
        world.more.push(ways);
    }
    world.more[1].ports.clear();
    world
}

fn named(hostname: &str) -> GatewayAddress {
    GatewayAddress {
        destination: GatewayDestination::Hostname(crate::mesh::workload::NamespacedHostname {
            namespace: "shop".into(),
            hostname: hostname.into(),
        }),
        hbone_mtls_port: 15008,
    }
}

fn hbone(route: Result<Route, NoRoute>) -> HboneRoute {
    match route {
        Ok(Route::Hbone(route)) => route,
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_is_behind_a_waypoint_is_asked_of_it_as_the_client_called_it() {
    for (waypoint, through_service) in [
        (waypoint_at("10.0.0.5"), false),
        (waypoint_at("10.96.0.9"), true),
        (named("ways.shop.svc.cluster.local"), true),
        (named("way.example.org"), false),
    ] {
        let of_service = world().change_service(|cart| cart.waypoint = Some(waypoint.clone()));
        let of_pods = world()
            .change("a", |a| a.waypoint = Some(Box::new(waypoint.clone())))
            .change("b", |b| b.waypoint = Some(Box::new(waypoint.clone())));
        for (world, destination, by_service) in [
            (&of_service, "10.96.0.1:80", true),
            // Ports are the waypoint's matter.
            (&of_service, "10.96.0.1:4711", true),
            (&of_pods, "10.0.0.1:8080", false),
            (&of_pods, "10.0.0.1:15008", false),
            (&of_pods, "10.0.0.2:8080", false),
        ] {
            let route = hbone(world.outbound(destination));
            assert_eq!(route.tunnel, "10.0.0.5:15008".parse().unwrap());
            assert_eq!(route.authority.to_string(), destination);
            assert_eq!(*route.far_end.name, *"way");
            assert_eq!(route.service.is_some(), by_service);
            let expected = match through_service {
                true => vec![id("way"), id("ways-alias")],
                false => vec![id("way")],
            };
            assert_eq!(*route.expected, *expected, "{waypoint}");
            assert!(route.inner.is_none());
        }
        // Each kind of waypoint is for its own kind of destination.
        for (world, destination, expected) in [
            (&of_service, "10.0.0.1:80", "hbone 10.0.0.1:15008 10.0.0.1:80"),
            (&of_pods, "10.96.0.1:80", "hbone 10.0.0.1:15008 10.0.0.1:8080"),
        ] {
            assert_eq!(text(world.outbound(destination)), expected);
        }
    }
}

#[test]
fn a_waypoint_that_cannot_be_used_is_an_error_that_names_it() {
    type Change = fn(World) -> World;
    let cases: [(&str, Change, GatewayAddress); 6] = [
        ("unknown address", |world| world, waypoint_at("192.0.2.9")),
        ("unknown name", |world| world, named("nobody")),
        (
            "no healthy endpoint",
            |world| world.change("way", |way| way.healthy = false),
            waypoint_at("10.96.0.9"),
        ),
        (
            "port that the service lacks",
            |world| world,
            waypoint_at("10.96.0.8"),
        ),
        (
            "no identity",
            |world| world.change("way", |way| way.trust_domain = "".into()),
            waypoint_at("10.0.0.5"),
        ),
        (
            "no address",
            |world| world.change("way", |way| way.addresses.clear()),
            named("way.example.org"),
        ),
    ];
    for (name, change, waypoint) in cases {
        let world = change(world())
            .change_service(|cart| cart.waypoint = Some(waypoint.clone()))
            .change("b", |b| b.waypoint = Some(Box::new(waypoint.clone())));
        for destination in ["10.96.0.1:80", "10.0.0.2:80"] {
            let refused = world.outbound(destination).unwrap_err();
            assert!(
                matches!(&refused, NoRoute::Waypoint { waypoint: named, .. } if *named == waypoint.to_string()),
                "{name}: {refused}"
            );
            assert!(std::error::Error::source(&refused).is_some() && !refused.is_transient());
        }
    }
    let tunnel = world()
        .change_service(|cart| cart.waypoint = Some(waypoint_at("10.96.0.8")))
        .change("way", |way| {
            way.application_tunnel = Some(crate::mesh::workload::ApplicationTunnel {
                proxy_protocol: true,
                port: Some(15088),
            });
        });
    assert_eq!(
        text(tunnel.outbound("10.96.0.1:80")),
        "hbone 10.0.0.5:15008 10.96.0.1:80"
    );
}

/// The source is the waypoint by its identity and its address, not by one of these alone.
#[test]
fn a_waypoint_reaches_what_is_behind_itself() {
    let world = |change: fn(&mut Workload)| {
        world()
            .change("web", change)
            .change("way", |way| way.service_account = "web".into())
            .change("b", |b| b.waypoint = Some(Box::new(waypoint_at("10.96.0.9"))))
    };
    let direct = "plain 10.0.0.2:80";
    let through = "hbone 10.0.0.5:15008 10.0.0.2:80";
    for (expected, change) in [
        (through, (|_| {}) as fn(&mut Workload)),
        (through, |web| web.addresses = vec![ip("10.0.0.5")]),
        (direct, |web| {
            web.services.insert(host("ways"), Arc::default());
        }),
    ] {
        assert_eq!(text(world(change).outbound("10.0.0.2:80")), expected);
    }
    // Its services' traffic goes through it like everybody's.
    let own = world(|web| {
        web.services.insert(host("ways"), Arc::default());
    })
    .change("way", |way| way.services.clear())
    .change_service(|cart| cart.waypoint = Some(waypoint_at("10.96.0.9")));
    assert_eq!(
        text(own.outbound("10.96.0.1:80")),
        "hbone 10.0.0.9:15008 10.96.0.1:80"
    );
}

/// An address of a workload's own and of a service: the service's waypoint holds, but for itself.
#[test]
fn a_workload_at_a_virtual_address_is_no_way_around_the_service_s_waypoint() {
    let world = || {
        world()
            .with("usurper", "10.96.0.1")
            .change_service(|cart| cart.waypoint = Some(waypoint_at("10.0.0.5")))
    };
    assert_eq!(
        text(world().outbound("10.96.0.1:80")),
        "hbone 10.0.0.5:15008 10.96.0.1:80"
    );
    let by_waypoint = world().change_service(|cart| cart.waypoint = Some(waypoint_at("10.0.0.9")));
    assert_eq!(
        text(by_waypoint.outbound("10.96.0.1:80")),
        "hbone 10.0.0.1:15008 10.0.0.1:8080"
    );
}

#[test]
fn weighted_waypoints_are_drawn_by_weight_before_the_one_without() {
    let world = |weights: [u32; 2], other: Option<&str>| {
        super::gateways::world()
            .with("canary", "10.0.0.6")
            .with("other", "10.0.0.7")
            .change_service(|cart| {
                cart.waypoint = other.map(waypoint_at);
                cart.weighted_waypoints = ["10.0.0.5", "10.0.0.6"]
                    .into_iter()
                    .zip(weights)
                    .map(|(address, weight)| WeightedWaypoint {
                        destination: waypoint_at(address),
                        weight,
                    })
                    .collect();
            })
    };
    let drawn = |world: &World, number: u64| {
        let info = info("web");
        let local = Local {
            info: &info,
            home: &Home::default(),
        };
        let to = "10.96.0.1:80".parse().unwrap();
        outbound(&world.mesh(), local, ip("10.0.0.9"), to, &mut |_| number)
    };
    let both = world([3, 1], Some("10.0.0.7"));
    for (number, expected) in [(0, "way"), (2, "way"), (3, "canary")] {
        assert_eq!(*hbone(drawn(&both, number)).far_end.name, *expected, "{number}");
    }
    for number in 0..3 {
        assert_eq!(
            *hbone(drawn(&world([0, 2], None), number)).far_end.name,
            *"canary"
        );
        let other = world([0, 0], Some("10.0.0.7"));
        assert_eq!(*hbone(drawn(&other, number)).far_end.name, *"other");
        assert!(matches!(
            drawn(&world([0, 0], None), number),
            Err(NoRoute::WeightlessWaypoints { .. })
        ));
    }
}

/// `a`, the only endpoint of `cart`, on network `far` behind gateway `gate` at 10.0.0.8.
fn far_world() -> World {
    world()
        .with("gate", "10.0.0.8")
        .change("gate", |gate| gate.network = "far".into())
        .change("a", |a| {
            a.network = "far".into();
            a.addresses.clear();
            a.network_gateway = Some(Box::new(far_gateway("10.0.0.8")));
        })
        .change_service(|cart| cart.subject_alt_names = vec![id("cart-alias")])
}

fn far_gateway(address: &str) -> GatewayAddress {
    let address = NetworkAddress {
        network: "far".into(),
        address: ip(address),
    };
    GatewayAddress {
        destination: GatewayDestination::Address(address),
        hbone_mtls_port: 15443,
    }
}

#[test]
fn other_networks_are_reached_by_their_gateway_and_by_the_service_s_name() {
    let route = hbone(far_world().outbound("10.96.0.1:80"));
    assert_eq!(route.tunnel, "10.0.0.8:15443".parse().unwrap());
    assert_eq!((&*route.far_end.name, &*route.workload.name), ("gate", "a"));
    assert_eq!(*route.expected, [id("gate")]);
    assert_eq!(*route.inner.unwrap(), [id("cart-alias")]);
    assert_eq!(route.authority.to_string(), "cart.shop.svc.cluster.local:80");

    // The waypoint is on the other network: the same, for the waypoint's service.
    let waypoint = far_world()
        .change("way", |way| {
            way.network = "far".into();
            way.network_gateway = Some(Box::new(far_gateway("10.0.0.8")));
        })
        .change_service(|cart| cart.waypoint = Some(waypoint_at("10.96.0.9")))
        .change("b", |b| b.waypoint = Some(Box::new(waypoint_at("10.96.0.9"))));
    let route = hbone(waypoint.outbound("10.96.0.1:4711"));
    assert_eq!((&*route.far_end.name, &*route.workload.name), ("gate", "way"));
    assert_eq!(*route.inner.unwrap(), [id("ways-alias")]);
    assert_eq!(route.authority.to_string(), "cart.shop.svc.cluster.local:4711");
    // There, workloads have no name to be called by.
    let refused = waypoint.outbound("10.0.0.2:80").unwrap_err();
    let NoRoute::Waypoint { source, .. } = refused else {
        panic!("{refused}")
    };
    assert!(matches!(*source, NoRoute::NotByService { .. }), "{source}");
}

#[test]
fn without_a_gateway_or_a_proof_other_networks_are_not_reached() {
    let refused = |world: World| world.outbound("10.96.0.1:80").unwrap_err();
    let no_gateway = refused(far_world().change("a", |a| a.network_gateway = None));
    assert!(matches!(no_gateway, NoRoute::NoGateway { .. }), "{no_gateway}");
    let no_proof = refused(far_world().change_service(|cart| cart.subject_alt_names.clear()));
    assert!(
        matches!(no_proof, NoRoute::NoServiceIdentity { .. }),
        "{no_proof}"
    );
    for world in [
        far_world().change("a", |a| {
            a.network_gateway = Some(Box::new(far_gateway("192.0.2.8")))
        }),
        far_world().change("gate", |gate| gate.network = "elsewhere".into()),
        far_world().change("gate", |gate| gate.service_account = "".into()),
    ] {
        let refused = refused(world);
        assert!(matches!(refused, NoRoute::NetworkGateway { .. }), "{refused}");
    }
}
