use super::*;
use crate::mesh::{
    pod::Home,
    route,
    service::{CidrVip, Service},
    testing::{host, info, ip, service, workload},
    workload::NetworkAddress,
};

/// What `web` calls, and by which name what lacks is asked for.
fn wanted_for(mesh: &Mesh, destination: &str) -> Option<String> {
    let (info, home) = (info("web"), Home::default());
    let local = Local {
        info: &info,
        home: &home,
    };
    let (client, destination) = (ip("10.0.0.1"), destination.parse().unwrap());
    let decided = route::outbound(mesh, local, client, destination, &mut |_| 0);
    outbound(local, client, destination, &decided).map(|name| name.to_string())
}

fn with_range(mut service: Service) -> Service {
    service
        .cidr_vips
        .push(CidrVip::of("".into(), ip("10.97.0.0"), 16).unwrap());
    service
}

fn waypoint(destination: GatewayDestination) -> Option<Box<GatewayAddress>> {
    Some(Box::new(GatewayAddress {
        destination,
        hbone_mtls_port: 15008,
    }))
}

#[test]
fn what_an_outbound_decision_lacks_has_the_names_of_istio() {
    let web = || workload("web", "10.0.0.1");
    let by_name = waypoint(GatewayDestination::Hostname(host("wp")));
    let by_address = waypoint(GatewayDestination::Address(NetworkAddress {
        network: "east".into(),
        address: ip("10.9.0.9"),
    }));
    let cart = |waypoint| {
        let mut cart = workload("cart", "10.0.0.2");
        cart.waypoint = waypoint;
        cart
    };
    let alone = Mesh::new(vec![web()], vec![]);
    for (mesh, destination, wanted) in [
        // The pod itself, before anything else.
        (Mesh::default(), "10.0.0.2:80", Some("/10.0.0.1")),
        (alone.clone(), "10.0.0.2:80", Some("/10.0.0.2")),
        (alone.clone(), "[::ffff:10.0.0.2]:80", Some("/10.0.0.2")),
        (alone.clone(), "[fd00::2]:80", Some("/fd00::2")),
        // Nobody's in any mesh.
        (alone.clone(), "127.0.0.1:80", None),
        (alone.clone(), "224.0.0.1:80", None),
        (alone.clone(), "255.255.255.255:80", None),
        // It may be a service's, though it is a link's.
        (alone, "169.254.169.254:80", Some("/169.254.169.254")),
        // Within a service's range: another may have just this address.
        (
            Mesh::new(
                vec![web(), cart(None)],
                vec![with_range(service("cart", "10.1.0.1"))],
            ),
            "10.97.0.5:80",
            Some("/10.97.0.5"),
        ),
        (
            Mesh::new(
                vec![web(), cart(None)],
                vec![with_range(service("cart", "10.1.0.1"))],
            ),
            "10.1.0.1:80",
            None,
        ),
        // All is there.
        (Mesh::new(vec![web(), cart(None)], vec![]), "10.0.0.2:80", None),
        (
            Mesh::new(vec![web(), cart(None)], vec![service("cart", "10.1.0.1")]),
            "10.1.0.1:80",
            None,
        ),
        // A service without endpoints has none: they come with it.
        (
            Mesh::new(vec![web()], vec![service("none", "10.1.0.1")]),
            "10.1.0.1:80",
            None,
        ),
        (
            Mesh::new(vec![web(), cart(by_name)], vec![]),
            "10.0.0.2:80",
            Some("shop/wp.shop.svc.cluster.local"),
        ),
        (
            Mesh::new(vec![web(), cart(by_address)], vec![]),
            "10.0.0.2:80",
            Some("east/10.9.0.9"),
        ),
    ] {
        assert_eq!(wanted_for(&mesh, destination).as_deref(), wanted, "{destination}");
    }
}

#[test]
fn what_an_inbound_decision_lacks_has_the_names_of_istio() {
    let (info, home) = (info("wp"), Home::default());
    let local = Local {
        info: &info,
        home: &home,
    };
    let received_on = ip("10.0.0.5");
    let own = || workload("wp", "10.0.0.5");
    let mut cart = workload("cart", "10.0.0.2");
    cart.waypoint = waypoint(GatewayDestination::Hostname(host("wp")));
    let behind = Mesh::new(vec![own(), cart], vec![]);
    for (mesh, authority, wanted) in [
        (&Mesh::default(), "10.0.0.5:80", &["/10.0.0.5"][..]),
        (&Mesh::new(vec![own()], vec![]), "10.0.0.5:80", &[]),
        (&Mesh::new(vec![own()], vec![]), "10.0.0.2:80", &["/10.0.0.2"]),
        (&Mesh::new(vec![own()], vec![]), "127.0.0.1:80", &[]),
        (&behind, "10.0.0.2:80", &["shop/wp.shop.svc.cluster.local"]),
        (
            &Mesh::new(vec![own()], vec![]),
            "a.b.svc.cluster.local:80",
            &["b/a.b.svc.cluster.local", "shop/a.b.svc.cluster.local"],
        ),
        (
            &Mesh::new(vec![own()], vec![]),
            "a.shop.svc.cluster.local:80",
            &["shop/a.shop.svc.cluster.local"],
        ),
        (
            &Mesh::new(vec![own()], vec![]),
            "example.com:80",
            &["shop/example.com"],
        ),
        (&Mesh::new(vec![own()], vec![]), "no authority", &[]),
    ] {
        let decided = route::inbound(mesh, local, received_on, authority);
        let names = match &decided {
            Ok(_) => Vec::new(),
            Err(refusal) => inbound(mesh, local, received_on, refusal),
        };
        let names: Vec<_> = names.iter().map(ResourceName::as_str).collect();
        assert_eq!(names, wanted, "{authority}: {decided:?}");
    }
}

#[test]
fn an_update_answers_for_every_name_of_what_it_brings() {
    let cart = Update::Workload(Arc::new(workload("cart", "10.0.0.2")));
    assert_eq!(names_of(&cart), ["/10.0.0.2"]);
    let service = Update::Service(Arc::new(service("cart", "10.1.0.1")));
    assert_eq!(
        names_of(&service),
        ["/10.1.0.1", "shop/cart.shop.svc.cluster.local"]
    );
    assert!(names_of(&Update::RemoveAddress("x".into())).is_empty());
}
