use litemap::LiteMap;
use proptest::prelude::*;

use super::*;
use crate::mesh::{
    pod::Home,
    testing::{host, id, info, ip, service, workload},
    workload::{GatewayDestination, NetworkAddress},
};

mod gateways;

/// A mesh with client `web` at 10.0.0.9, HBONE pod `a` at 10.0.0.1, plain pod `b` at 10.0.0.2, and service `cart` at
/// 10.96.0.1, of which `a` is the endpoint.
pub(super) struct World {
    workloads: LiteMap<&'static str, Workload>,
    service: Service,
    pub(super) more: Vec<Service>,
}

impl World {
    pub(super) fn new() -> Self {
        let alone = |name, address| {
            let mut made = workload(name, address);
            made.services.clear();
            made
        };
        let mut plain = alone("b", "10.0.0.2");
        plain.protocol = Protocol::Tcp;
        let workloads = LiteMap::from_iter([
            ("web", alone("web", "10.0.0.9")),
            ("a", workload("a", "10.0.0.1")),
            ("b", plain),
        ]);
        Self {
            workloads,
            service: service("cart", "10.96.0.1"),
            more: vec![],
        }
    }

    pub(super) fn change(mut self, name: &str, change: impl FnOnce(&mut Workload)) -> Self {
        change(self.workloads.get_mut(name).unwrap());
        self
    }

    /// With one more workload `name`, which is an endpoint of nothing.
    pub(super) fn with(mut self, name: &'static str, address: &str) -> Self {
        let mut made = workload(name, address);
        made.services.clear();
        self.workloads.insert(name, made);
        self
    }

    pub(super) fn change_service(mut self, change: impl FnOnce(&mut Service)) -> Self {
        change(&mut self.service);
        self
    }

    fn mesh(&self) -> Mesh {
        Mesh::new(
            self.workloads.values().cloned().collect(),
            [std::slice::from_ref(&self.service), &self.more].concat(),
        )
    }

    fn outbound(&self, destination: &str) -> Result<Route, NoRoute> {
        let info = info("web");
        let local = Local {
            info: &info,
            home: &Home::default(),
        };
        let client = ip("10.0.0.9");
        outbound(
            &self.mesh(),
            local,
            client,
            destination.parse().unwrap(),
            &mut |_| 0,
        )
    }

    pub(super) fn inbound(&self, authority: &str) -> Result<Upstream, Refusal> {
        let info = info("a");
        inbound(
            &self.mesh(),
            Local {
                info: &info,
                home: &Home::default(),
            },
            ip("10.0.0.1"),
            authority,
        )
    }
}

/// `hbone <tunnel> <authority>` or `plain <target>`.
fn text(route: Result<Route, NoRoute>) -> String {
    match route.unwrap() {
        Route::Hbone(route) => format!("hbone {} {}", route.tunnel, route.authority),
        Route::Plain(route) => format!("plain {}", route.target),
    }
}

pub(super) fn waypoint_at(address: &str) -> GatewayAddress {
    let address = NetworkAddress {
        network: Arc::default(),
        address: ip(address),
    };
    GatewayAddress {
        destination: GatewayDestination::Address(address),
        hbone_mtls_port: 15008,
    }
}

#[test]
fn destinations_decide_the_route() {
    for (destination, expected) in [
        ("10.0.0.1:7", "hbone 10.0.0.1:15008 10.0.0.1:7"),
        ("[::ffff:10.0.0.1]:7", "hbone 10.0.0.1:15008 10.0.0.1:7"),
        ("10.0.0.2:7", "plain 10.0.0.2:7"),
        ("10.96.0.1:80", "hbone 10.0.0.1:15008 10.0.0.1:8080"),
        ("192.0.2.1:443", "plain 192.0.2.1:443"),
        ("[2001:db8::1]:443", "plain [2001:db8::1]:443"),
        // HBONE that the application speaks itself.
        ("10.0.0.1:15008", "plain 10.0.0.1:15008"),
        ("192.0.2.1:15008", "plain 192.0.2.1:15008"),
        // Other pods' ports of these numbers are theirs to refuse, and the world's are just ports.
        ("10.0.0.1:15001", "hbone 10.0.0.1:15008 10.0.0.1:15001"),
        ("192.0.2.1:15001", "plain 192.0.2.1:15001"),
        ("127.0.0.1:80", "plain 127.0.0.1:80"),
    ] {
        assert_eq!(
            text(World::new().outbound(destination)),
            expected,
            "{destination}"
        );
    }
}

#[test]
fn a_service_endpoint_s_hbone_port_is_not_tunnelled_either() {
    let world = World::new().change_service(|service| {
        service.ports.insert(15008, 15008);
    });
    assert_eq!(text(world.outbound("10.96.0.1:15008")), "plain 10.0.0.1:15008");
}

#[test]
fn the_far_end_must_be_the_workload_or_stand_for_the_service() {
    let world = World::new().change_service(|service| service.subject_alt_names = vec![id("cart"), id("a")]);
    for (destination, expected) in [
        ("10.0.0.1:80", vec![id("a")]),
        ("10.96.0.1:80", vec![id("a"), id("cart")]),
    ] {
        let Ok(Route::Hbone(route)) = world.outbound(destination) else {
            panic!("{destination}")
        };
        assert_eq!(*route.expected, *expected, "{destination}");
        assert_eq!(route.service.is_some(), destination.contains("96"));
        assert_eq!(*route.workload.name, *"a");
    }
}

#[test]
fn calls_to_the_proxy_s_own_ports_are_refused() {
    let own_endpoint = World::new()
        .change("a", |a| a.services.clear())
        .change("web", |web| {
            web.protocol = Protocol::Tcp;
            web.services
                .insert(host("cart"), Arc::new(LiteMap::from_iter([(80, 15001)])));
        });
    for (world, destination, refused) in [
        (&World::new(), "127.0.0.1:15001", "127.0.0.1:15001"),
        (&World::new(), "127.9.9.9:15006", "127.9.9.9:15006"),
        (&World::new(), "[::1]:15008", "[::1]:15008"),
        (&World::new(), "[::ffff:127.0.0.1]:15008", "127.0.0.1:15008"),
        (&World::new(), "10.0.0.9:15001", "10.0.0.9:15001"),
        (&World::new(), "10.0.0.9:15006", "10.0.0.9:15006"),
        (&own_endpoint, "10.96.0.1:80", "10.0.0.9:15001"),
    ] {
        let expected = NoRoute::ProxyPort(refused.parse().unwrap());
        assert_eq!(
            world.outbound(destination).unwrap_err(),
            expected,
            "{destination}"
        );
    }
}

#[test]
fn a_source_that_the_mesh_does_not_know_gets_no_route_even_to_unknown_destinations() {
    let world = World::new().change("web", |web| web.service_account = "other".into());
    for destination in ["10.0.0.1:80", "10.96.0.1:80", "192.0.2.1:443"] {
        let refused = world.outbound(destination).unwrap_err();
        assert!(matches!(refused, NoRoute::UnknownSource { .. }), "{refused}");
        assert!(refused.is_transient());
    }
}

#[test]
fn what_is_behind_a_waypoint_that_nobody_knows_is_not_reached_around_it() {
    let behind = World::new()
        .change("a", |a| a.waypoint = Some(Box::new(waypoint_at("192.0.2.9"))))
        .change("b", |b| b.waypoint = Some(Box::new(waypoint_at("192.0.2.9"))));
    for destination in ["10.0.0.1:80", "10.0.0.1:15008", "10.0.0.2:80"] {
        let refused = behind.outbound(destination).unwrap_err();
        assert!(
            matches!(refused, NoRoute::Waypoint { .. }),
            "{destination}: {refused}"
        );
        assert!(!refused.is_transient());
    }
    // The pods' own waypoints are for traffic to the pods, not to their services.
    assert_eq!(
        text(behind.outbound("10.96.0.1:80")),
        "hbone 10.0.0.1:15008 10.0.0.1:8080"
    );

    for mode in [LoadBalancerMode::Standard, LoadBalancerMode::Passthrough] {
        let service = World::new().change_service(|service| {
            service.waypoint = Some(waypoint_at("192.0.2.9"));
            service.load_balancer.mode = mode;
        });
        assert!(matches!(
            service.outbound("10.96.0.1:80"),
            Err(NoRoute::Waypoint { .. })
        ));
    }
}

#[test]
fn a_service_without_endpoints_is_a_refusal_but_a_passthrough_service_needs_none() {
    let empty = World::new().change("a", |a| a.services.clear());
    assert!(matches!(
        empty.outbound("10.96.0.1:80"),
        Err(NoRoute::NoEndpoint { .. })
    ));
    let passthrough =
        World::new().change_service(|service| service.load_balancer.mode = LoadBalancerMode::Passthrough);
    assert_eq!(text(passthrough.outbound("10.96.0.1:80")), "plain 10.96.0.1:80");
    assert_eq!(
        text(passthrough.outbound("10.96.0.1:4711")),
        "plain 10.96.0.1:4711"
    );
}

#[test]
fn an_hbone_workload_without_an_identity_is_not_reached() {
    let world = World::new().change("a", |a| a.trust_domain = "".into());
    assert!(matches!(
        world.outbound("10.0.0.1:80"),
        Err(NoRoute::NoIdentity { .. })
    ));
}

#[test]
fn plaintext_does_not_pass_to_the_proxy_s_ports_nor_to_a_tunnel_that_believes_its_headers() {
    let info = info("web");
    let tunnel = |proxy_protocol, port| ApplicationTunnel { proxy_protocol, port };
    for (destination, tunnel, allowed) in [
        ("10.0.0.1:80", None, true),
        ("10.0.0.1:15001", None, false),
        ("10.0.0.1:15006", None, false),
        ("[fd00::1]:15008", None, false),
        ("[fd00::1]:15009", None, true),
        ("10.0.0.1:8080", Some(tunnel(true, Some(8080))), false),
        ("10.0.0.1:80", Some(tunnel(true, Some(8080))), true),
        ("10.0.0.1:8080", Some(tunnel(true, None)), true),
        ("10.0.0.1:8080", Some(tunnel(false, Some(8080))), true),
    ] {
        let mut web = workload("web", "10.0.0.1");
        web.application_tunnel = tunnel;
        let mesh = Mesh::new(vec![web], vec![]);
        let local = Local {
            info: &info,
            home: &Home::default(),
        };
        let destination = destination.parse().unwrap();
        assert_eq!(
            passthrough_allowed(&mesh, local, destination),
            allowed,
            "{destination} {tunnel:?}"
        );
    }
}

prop_compose! {
    /// A workload of a small world, in which addresses, services and networks meet often.
    fn any_workload()(
        name in 0_u8..4,
        address in 0_u8..4,
        hbone in any::<bool>(),
        far in prop::bool::weighted(0.2),
        waypoint_ in prop::bool::weighted(0.2),
        endpoint in any::<bool>(),
        healthy in any::<bool>(),
        capacity in 0_u32..3,
    ) -> Workload {
        let mut made = workload(&format!("w{name}"), &format!("10.0.0.{address}"));
        made.protocol = if hbone { Protocol::Hbone } else { Protocol::Tcp };
        made.network = if far { "far".into() } else { Arc::default() };
        made.waypoint = waypoint_.then(|| Box::new(waypoint_at("10.0.0.2")));
        if !endpoint {
            made.services.clear();
        }
        made.healthy = healthy;
        made.capacity = capacity;
        made
    }
}

prop_compose! {
    fn any_service()(
        vip in 0_u8..6,
        waypoint_ in prop::bool::weighted(0.2),
        passthrough in prop::bool::weighted(0.2),
    ) -> Service {
        let mut made = service("cart", &format!("10.0.0.{vip}"));
        made.waypoint = waypoint_.then(|| waypoint_at("10.0.0.2"));
        if passthrough {
            made.load_balancer.mode = LoadBalancerMode::Passthrough;
        }
        made
    }
}

proptest! {
    /// The rules that must never be broken, said of results and not of the way to them.
    #[test]
    fn nothing_of_the_mesh_is_reached_around_its_protection(
        workloads in prop::collection::vec(any_workload(), 1..6),
        service in any_service(),
        address in 0_u8..7,
        port in prop_oneof![Just(80_u16), Just(15001), Just(15006), Just(15008), any::<u16>()],
        number in any::<u64>(),
    ) {
        let mesh = Mesh::new(workloads, vec![service.clone()]);
        let destination = SocketAddr::new(ip(&format!("10.0.0.{address}")), port);
        let info = info("w0");
        let local = Local { info: &info, home: &Home::default() };
        let source = mesh.local(local).cloned();
        let client = source.as_ref().map_or(ip("10.0.0.9"), |source| source.addresses[0]);
        let route = outbound(&mesh, local, client, destination, &mut |total| number % total);
        let to_service = service.vips[0].address == destination.ip();
        let at = mesh.workload_at("", destination.ip());
        let of_workload = at.and_then(|at| at.waypoint.as_deref());
        let waypoint = if to_service { service.waypoint.as_ref() } else { of_workload };
        let waypoints = match waypoint {
            None => Vec::new(),
            Some(_) if service.vips[0].address == ip("10.0.0.2") => mesh.endpoints(&service.host).to_vec(),
            Some(_) => mesh.workload_at("", ip("10.0.0.2")).into_iter().cloned().collect(),
        };
        let is_waypoint = waypoints.iter().any(|one| Some(one) == source.as_ref());
        let is_exempt = waypoint.is_none() || (is_waypoint && at.is_some());
        match route {
            Ok(Route::Hbone(route)) => {
                let Target::Address(authority) = route.authority else {
                    panic!("there are no gateways")
                };
                prop_assert!(route.expected.contains(&route.far_end.identity().unwrap()));
                prop_assert!(route.far_end.has_address(route.tunnel.ip()));
                prop_assert!(route.far_end.network.is_empty() && route.inner.is_none());
                prop_assert_eq!(route.tunnel.port(), 15008);
                prop_assert_eq!(&route.far_end, &route.workload);
                prop_assert_eq!(route.service.is_some(), to_service);
                if is_exempt {
                    prop_assert_eq!(route.tunnel.ip(), authority.ip());
                    prop_assert!(authority.port() != 15008);
                    prop_assert!(!to_service || (route.workload.healthy && route.workload.capacity > 0));
                } else {
                    prop_assert!(waypoints.contains(&route.far_end));
                    prop_assert_eq!(authority, destination);
                }
            }
            Ok(Route::Plain(_)) if !is_exempt => prop_assert!(false, "around a waypoint"),
            Ok(Route::Plain(route)) => {
                let native = route.target.port() == 15008;
                match (&route.workload, to_service) {
                    (Some(workload), _) => prop_assert!(native || workload.protocol == Protocol::Tcp),
                    (None, true) => prop_assert!(
                        service.load_balancer.mode == LoadBalancerMode::Passthrough
                    ),
                    (None, false) => prop_assert!(at.is_none() && route.target == destination),
                }
            }
            Err(NoRoute::UnknownSource { .. }) => prop_assert!(mesh.local(local).is_none()),
            Err(NoRoute::ProxyPort(target)) => prop_assert!([15001, 15006].contains(&target.port())),
            // Only what the mesh knows is refused for another reason.
            Err(_) => prop_assert!(to_service || at.is_some()),
        }
    }
}
