//! A mesh that is asked for by name: nothing else is fetched, and what nobody can tell is not guessed.

use std::net::{IpAddr, SocketAddr};

use redirector_tests::{
    ads::{ADDRESS, Ads, workload},
    app::{self, App},
    control_plane::Ground,
    mesh::{PORT, refused},
    node::Family,
    proto::workload as proto,
    wait,
    workloads::Workloads,
};

use super::{VIP, behind_service};

/// Every name that was asked for so far, in its order.
fn asked(ads: &Ads) -> Vec<String> {
    let requests = ads.requests().into_iter();
    let names = requests.filter(|request| request.type_url == ADDRESS);
    names
        .flat_map(|request| request.resource_names_subscribe)
        .filter(|name| name != "*")
        .collect()
}

fn name(address: IpAddr) -> String {
    format!("/{address}")
}

pub(crate) fn only_what_is_called_is_asked_for() {
    const OTHERS: u32 = 500;
    let ground = Ground::new();
    let mut ads = Ads::start(&ground.node.host.ns, &ground.credentials());
    ads.edit(|edit| {
        edit.pods([&ground.client, &ground.server]);
        for number in 0..OTHERS {
            let mut one = workload(&ground.client);
            one.name = format!("other-{number}");
            one.uid = format!("Kubernetes//Pod/demo/{}", one.name);
            one.addresses = vec![(0x6440_0000 + number).to_be_bytes().to_vec()];
            edit.workload(one);
        }
    });
    let mut environment = ads.environment();
    environment.push(("XDS_ON_DEMAND".into(), "true".into()));
    let plain = ground.node.pod("plain");
    let demo = ground.start(environment, &Workloads::default());
    assert_eq!(demo.readiness().0, 200);
    let _who = demo.serve(Family::V4, app::who);
    demo.meets(Family::V4);
    let both = [name(demo.client.ip(Family::V4)), name(demo.server.ip(Family::V4))];
    // Each asks for itself as it is enrolled.
    let mut once = asked(&ads);
    once.sort();
    once.dedup();
    let mut sorted = both.to_vec();
    sorted.sort();
    assert_eq!(once, sorted);
    assert_eq!(demo.workloads(), 2);

    // Nothing has this address, as the control plane knows: it is called as it is, and asked for once.
    let _outside = App::start(&plain.ns, (Family::V4.any(), PORT).into(), app::who);
    let outside = plain.addr(Family::V4, PORT);
    for _ in 0..3 {
        let seen = app::ask_who(&demo.client.ns, outside).unwrap();
        assert_eq!(seen, demo.client.ip(Family::V4).to_string());
    }
    let of_outside = name(plain.ip(Family::V4));
    assert!(asked(&ads).contains(&of_outside));

    // Then something has it, of which the control plane does not tell unasked.
    ads.edit(|edit| {
        let mut late = workload(&plain);
        late.waypoint = Some(waypoint("demo", "gone.demo.svc.cluster.local"));
        edit.workload(late);
    });
    wait::until("the new owner to be known", || {
        app::ask_who(&demo.client.ns, outside).is_err().then_some(())
    });
    refused(&demo.client.ns, outside);
    demo.tells("waypoint demo/gone.demo.svc.cluster.local");
    assert!(asked(&ads).contains(&"demo/gone.demo.svc.cluster.local".to_owned()));
    ads.edit(|edit| edit.remove(ADDRESS, &workload(&plain).uid));
    assert_eq!(ads.answered(ADDRESS), None);
    app::ask_who(&demo.client.ns, outside).unwrap();

    // While nobody can tell, what is known goes on, and what is not known goes nowhere.
    ads.down();
    wait::until("the loss to be noticed", || {
        demo.agent.log().contains("the mesh stays as it is").then_some(())
    });
    demo.meets(Family::V4);
    app::ask_who(&demo.client.ns, outside).unwrap();
    let strange: SocketAddr = plain.addr(Family::V6, PORT);
    let _strange = App::start(&plain.ns, (Family::V6.any(), PORT + 1).into(), app::who);
    let strange = SocketAddr::new(strange.ip(), PORT + 1);
    refused(&demo.client.ns, strange);
    demo.tells("only the control plane knows");

    // Back again it is told of every name, and has answers.
    let before = ads.requests().len();
    ads.up(&demo.node.host.ns);
    wait::until("the strange address", || {
        app::ask_who(&demo.client.ns, strange).ok()
    });
    let again = ads.requests().split_off(before);
    let of_addresses: Vec<_> = again
        .iter()
        .filter(|request| request.type_url == ADDRESS)
        .collect();
    assert_eq!(of_addresses[0].initial_resource_versions.len(), 2);
    for known in &both {
        let mut names = of_addresses
            .iter()
            .flat_map(|request| &request.resource_names_subscribe);
        assert!(names.any(|name| name == known), "{again:?}");
    }
    demo.meets(Family::V4);
}

fn waypoint(namespace: &str, hostname: &str) -> proto::GatewayAddress {
    let hostname = proto::NamespacedHostname {
        namespace: namespace.into(),
        hostname: hostname.into(),
    };
    proto::GatewayAddress {
        destination: Some(proto::gateway_address::Destination::Hostname(hostname)),
        hbone_mtls_port: 15008,
    }
}

pub(crate) fn a_service_comes_with_its_endpoints() {
    let ground = Ground::new();
    let ads = Ads::start(&ground.node.host.ns, &ground.credentials());
    let (server, service) = behind_service(&ground.server);
    ads.edit(|edit| {
        edit.workload(server);
        edit.workload(workload(&ground.client));
        edit.service(service);
    });
    let mut environment = ads.environment();
    environment.push(("XDS_ON_DEMAND".into(), "true".into()));
    let demo = ground.start(environment, &Workloads::default());
    let _echo = demo.serve(Family::V4, app::echo);
    let at_service = || app::ask(&demo.client.ns, (VIP, 80).into(), "hello\n").ok();
    assert_eq!(wait::until("the service", at_service), "hello\n");
    assert!(asked(&ads).contains(&name(VIP.into())));
    // Its endpoint came along, and goes with the control plane's word alone.
    ads.edit(|edit| edit.remove(ADDRESS, &workload(&demo.server).uid));
    assert_eq!(ads.answered(ADDRESS), None);
    wait::until("the endpoint to be gone", || at_service().is_none().then_some(()));
}
