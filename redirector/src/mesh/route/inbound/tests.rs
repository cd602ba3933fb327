use litemap::LiteMap;

use proptest::prelude::*;

use super::*;
use crate::mesh::{
    route::tests::{World, waypoint_at},
    service::{CidrVip, WeightedWaypoint},
    testing::{host, ip, service},
    workload::{ApplicationTunnel, GatewayAddress, GatewayDestination, NetworkAddress},
};

#[test]
fn authorities_give_the_application_port_or_a_status() {
    let world = World::new().change_service(|service| {
        service.ports.insert(81, 8181);
        service.ports.insert(82, 0);
        service.ports.insert(83, 15006);
    });
    for (authority, expected) in [
        ("10.0.0.1:8080", Ok(8080)),
        ("[::ffff:10.0.0.1]:8080", Ok(8080)),
        // An address is not translated: 80 is a service port only behind a name.
        ("10.0.0.1:80", Ok(80)),
        ("cart.shop.svc.cluster.local:80", Ok(8080)),
        ("cart.shop.svc.cluster.local:81", Ok(8181)),
        ("cart.shop.svc.cluster.local:82", Err(503)),
        ("cart.shop.svc.cluster.local:99", Err(503)),
        ("other.shop.svc.cluster.local:80", Err(503)),
        ("10.0.0.2:80", Err(400)),
        ("10.96.0.1:80", Err(400)),
        ("127.0.0.1:80", Err(400)),
        ("[fd00::1]:80", Err(400)),
        ("10.0.0.1:15001", Err(503)),
        ("10.0.0.1:15006", Err(503)),
        ("10.0.0.1:15008", Err(503)),
        ("cart.shop.svc.cluster.local:83", Err(503)),
        // As a service port it is one like any other, and this service has none.
        ("cart.shop.svc.cluster.local:15008", Err(503)),
        ("", Err(400)),
        ("10.0.0.1", Err(400)),
        ("10.0.0.1:", Err(400)),
        ("10.0.0.1:0", Err(400)),
        ("10.0.0.1:65536", Err(400)),
        ("10.0.0.1:99999999999999999999", Err(400)),
        ("10.0.0.1:8080:80", Err(400)),
        ("010.0.0.1:80", Err(503)),
        // The node, and other spellings of this host.
        ("192.0.2.1:80", Err(400)),
        ("0.0.0.0:80", Err(400)),
        ("127.9.9.9:80", Err(400)),
        ("[::1]:80", Err(400)),
        ("[::]:80", Err(400)),
        ("[::ffff:127.0.0.1]:80", Err(400)),
        ("[::ffff:7f00:1]:80", Err(400)),
        ("[::127.0.0.1]:80", Err(400)),
        ("[64:ff9b::7f00:1]:80", Err(400)),
        ("localhost:80", Err(503)),
        ("127.1:80", Err(503)),
        ("2130706433:80", Err(503)),
        ("0x7f.1:80", Err(503)),
        ("169.254.169.254:80", Err(400)),
        ("[fe80::1]:80", Err(400)),
        ("[fe80::1%1]:80", Err(400)),
        ("[fe80::1%eth0]:80", Err(400)),
        ("[::ffff:10.0.0.1%0]:80", Err(400)),
        ("224.0.0.1:80", Err(400)),
        ("255.255.255.255:80", Err(400)),
        ("10.0.0.1%00:80", Err(400)),
        ("user:pass@10.0.0.1:80", Err(400)),
        ("10.0.0.1@10.0.0.2:80", Err(400)),
        ("cart.shop.svc.cluster.local", Err(400)),
        ("cart.shop.svc.cluster.local:+80", Err(400)),
        ("cart.shop.svc.cluster.local:0", Err(400)),
        (":80", Err(400)),
        ("user@cart.shop.svc.cluster.local:80", Err(400)),
        ("http://cart.shop.svc.cluster.local:80", Err(400)),
        ("fd00::1:80", Err(400)),
        ("[fd00::1:80", Err(400)),
    ] {
        assert_eq!(
            world
                .inbound(authority)
                .map(|upstream| upstream.port)
                .map_err(|refusal| refusal.status()),
            expected,
            "{authority:?}"
        );
    }
}

#[test]
fn a_stranger_s_text_is_cut_in_errors() {
    let refusal = World::new()
        .inbound(&format!("{}:80", "x".repeat(60_000)))
        .unwrap_err();
    assert_eq!(refusal.status(), 400);
    assert!(refusal.to_string().len() < 300);
}

#[test]
fn a_service_port_of_the_proxy_s_numbers_is_only_refused_after_translation() {
    let world = World::new().change("a", |a| {
        a.services.insert(
            host("cart"),
            Arc::new(LiteMap::from_iter([(15008, 8080), (80, 15008)])),
        );
    });
    let upstream = world.inbound("cart.shop.svc.cluster.local:15008").unwrap();
    assert_eq!((upstream.port, upstream.proxied), (8080, None));
    assert_eq!(
        world.inbound("cart.shop.svc.cluster.local:80"),
        Err(Refusal::ProxyPort(15008))
    );
}

#[test]
fn a_local_pod_that_cannot_be_served_is_a_503() {
    let unknown = World::new().change("a", |a| a.service_account = "other".into());
    let refusal = unknown.inbound("10.0.0.1:80").unwrap_err();
    assert!(refusal.is_transient() && refusal.status() == 503, "{refusal}");
}

/// Every way in which `a` may be the waypoint of 10.96.0.1, of 10.97.0.0/16, or of `b` at 10.0.0.2.
#[test]
fn a_waypoint_is_asked_for_what_is_behind_it_and_for_nothing_else() {
    let by_name = |name: &str| GatewayAddress {
        destination: GatewayDestination::Hostname(host(name)),
        hbone_mtls_port: 15008,
    };
    let mut ways = service("ways", "10.96.0.9");
    ways.cidr_vips = vec![CidrVip::of("".into(), ip("10.98.0.0"), 16).unwrap()];
    for (waypoint, is_a) in [
        (waypoint_at("10.0.0.1"), true),
        (waypoint_at("10.96.0.9"), true),
        (waypoint_at("10.98.7.7"), true),
        (by_name("ways"), true),
        (by_name("a-itself"), true),
        (waypoint_at("10.0.0.2"), false),
        (waypoint_at("10.96.0.1"), false),
        (waypoint_at("192.0.2.1"), false),
        (by_name("cart"), false),
        (by_name("nobody"), false),
    ] {
        let world = || {
            let mut world = World::new()
                .change("a", |a| {
                    a.services = LiteMap::from_iter([(ways.host.clone(), Arc::default())]);
                    a.hostname = host("a-itself").hostname;
                })
                .change_service(|cart| {
                    cart.namespace_only = true;
                    cart.host.namespace = "other".into();
                    cart.cidr_vips = vec![CidrVip::of("".into(), ip("10.97.0.0"), 16).unwrap()];
                });
            world.more.push(ways.clone());
            world
        };
        let weighted = |weight| WeightedWaypoint {
            destination: waypoint.clone(),
            weight,
        };
        let of_service = world().change_service(|cart| cart.waypoint = Some(waypoint.clone()));
        let by_weight =
            world().change_service(|cart| cart.weighted_waypoints = vec![weighted(0), weighted(1)]);
        let of_pod = world().change("b", |b| b.waypoint = Some(Box::new(waypoint.clone())));
        for (world, authority, is_behind) in [
            (&of_service, "10.96.0.1:4711", true),
            (&of_service, "10.97.3.4:4711", true),
            (&of_service, "10.0.0.2:4711", false),
            (&by_weight, "10.96.0.1:4711", true),
            (&of_pod, "10.0.0.2:4711", true),
            (&of_pod, "10.96.0.1:4711", false),
            (&of_pod, "192.0.2.1:4711", false),
        ] {
            let expected = if is_a && is_behind {
                Ok((4711, None))
            } else {
                Err(400)
            };
            let found = world
                .inbound(authority)
                .map(|upstream| (upstream.port, upstream.proxied))
                .map_err(|refusal| refusal.status());
            assert_eq!(found, expected, "{waypoint} {authority}");
        }
        assert_eq!(
            of_service
                .inbound("10.96.0.1:15006")
                .map(|upstream| upstream.port)
                .map_err(|refusal| refusal.status()),
            Err(if is_a { 503 } else { 400 })
        );
    }
}

#[test]
fn an_application_tunnel_takes_everything_on_its_port() {
    let with = |proxy_protocol, port| {
        World::new()
            .change("a", |a| {
                a.application_tunnel = Some(ApplicationTunnel { proxy_protocol, port });
            })
            .change_service(|cart| {
                cart.ports.insert(81, 0);
                cart.vips = [("far", "10.96.0.7"), ("", "fd96::1"), ("", "10.96.0.1")]
                    .map(|(network, address)| NetworkAddress {
                        network: network.into(),
                        address: ip(address),
                    })
                    .into();
            })
    };
    const NAME: &str = "cart.shop.svc.cluster.local";
    for (proxy, port, authority, expected) in [
        (true, Some(15088), "10.0.0.1:80", Ok((15088, Some("10.0.0.1:80")))),
        (true, Some(15088), "10.9.9.9:80", Ok((15088, Some("10.9.9.9:80")))),
        (
            true,
            Some(15088),
            "[fd00::7]:15008",
            Ok((15088, Some("[fd00::7]:15008"))),
        ),
        (true, None, "10.9.9.9:80", Ok((80, Some("10.9.9.9:80")))),
        (true, None, "10.9.9.9:15008", Err(503)),
        (true, Some(15006), "10.9.9.9:80", Err(503)),
        (false, Some(15088), "10.9.9.9:80", Ok((15088, None))),
        (false, None, "10.9.9.9:80", Ok((80, None))),
        // A name is translated for an application without a port of its own; the header has what was asked for.
        (
            true,
            Some(15088),
            "cart.shop.svc.cluster.local:80",
            Ok((15088, Some("10.96.0.1:80"))),
        ),
        (
            true,
            Some(15088),
            "cart.shop.svc.cluster.local:81",
            Ok((15088, Some("10.96.0.1:81"))),
        ),
        (
            true,
            None,
            "cart.shop.svc.cluster.local:80",
            Ok((8080, Some("10.96.0.1:80"))),
        ),
        (true, None, "cart.shop.svc.cluster.local:81", Err(503)),
        (true, Some(15088), "nobody.shop.svc.cluster.local:81", Err(503)),
        // Nobody's to ask another for.
        (true, Some(15088), "127.0.0.1:80", Err(400)),
        (true, Some(15088), "[::ffff:127.0.0.1]:80", Err(400)),
        (true, Some(15088), "[::1]:80", Err(400)),
        (true, Some(15088), "0.0.0.0:80", Err(400)),
        (true, Some(15088), "169.254.1.1:80", Err(400)),
        (true, Some(15088), "[fe80::1]:80", Err(400)),
        (true, Some(15088), "224.0.0.1:80", Err(400)),
    ] {
        let found = with(proxy, port).inbound(authority);
        let found = found
            .map(|upstream| (upstream.port, upstream.proxied))
            .map_err(|refusal| refusal.status());
        let expected = expected.map(|(port, proxied)| (port, proxied.map(|at: &str| at.parse().unwrap())));
        assert_eq!(found, expected, "{proxy} {port:?} {authority}");
    }
    let headless = with(true, Some(15088)).change_service(|cart| cart.vips.clear());
    let refused = headless.inbound(&format!("{NAME}:80")).unwrap_err();
    assert!(
        matches!(refused, Refusal::NoVip(_)) && refused.status() == 503,
        "{refused}"
    );
    let foreign = with(true, Some(15088)).change_service(|cart| cart.vips.truncate(2));
    let proxied = foreign.inbound(&format!("{NAME}:80")).unwrap().proxied;
    assert_eq!(proxied, Some("[fd96::1]:80".parse().unwrap()));
}

proptest! {
    #[test]
    fn no_authority_reaches_a_proxy_port_or_panics(
        authority in prop_oneof![
            any::<String>(),
            (prop_oneof![Just("10.0.0.1"), Just("cart.shop.svc.cluster.local")], any::<u16>())
                .prop_map(|(host, port)| format!("{host}:{port}")),
        ],
    ) {
        if let Ok(Upstream { port, .. }) = World::new().inbound(&authority) {
            prop_assert!(port != 0 && !PROXY_PORTS.contains(&port));
        }
    }
}
