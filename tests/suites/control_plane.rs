//! Control planes that share no code with us: a mesh by xDS and certificates of Istio's authority, by tonic with messages of its own
//! and by grpcio with messages made by hand; well, wrong, and away.

use std::{fs, net::Shutdown, path::Path, process::ExitCode, time::Duration};

use redirector_tests::{
    ads::{ADDRESS, AUTHORIZATION, Ads, deny, workload},
    app::{self, App},
    capture::opened_ports,
    control_plane::{Demo, Ground, echoes, open},
    envoy::python,
    istio_ca::{IstioCa, Mood},
    mesh::PORT,
    node::{Family, Pod},
    process::{Process, command},
    proto::{security, workload as proto},
    suite::{Case, Needs, case, main as suite},
    wait,
    workloads::Workloads,
};

#[path = "control_plane/on_demand.rs"]
mod on_demand;

/// Certificates that live no longer than this make a test of their end bearable.
const SHORT_LIFE: Duration = Duration::from_secs(10);
const LONG_LIFE: Duration = Duration::from_secs(24 * 3600);

fn main() -> ExitCode {
    let cases: Vec<Case> = vec![
        case(
            "the_mesh_is_as_the_control_plane_says",
            the_mesh_is_as_the_control_plane_says,
        ),
        case(
            "what_is_refused_is_told_and_the_rest_counts",
            what_is_refused_is_told_and_the_rest_counts,
        ),
        case(
            "the_mesh_outlives_its_control_plane",
            the_mesh_outlives_its_control_plane,
        ),
        case(
            "a_hundred_thousand_workloads_come_in_one_message",
            a_hundred_thousand_workloads_come_in_one_message,
        ),
        case(
            "only_what_is_called_is_asked_for",
            on_demand::only_what_is_called_is_asked_for,
        ),
        case(
            "a_service_comes_with_its_endpoints",
            on_demand::a_service_comes_with_its_endpoints,
        ),
        case(
            "certificates_come_from_the_authority",
            certificates_come_from_the_authority,
        ),
        case(
            "a_good_certificate_serves_to_its_end",
            a_good_certificate_serves_to_its_end,
        ),
        case("wrong_answers_replace_nothing", wrong_answers_replace_nothing),
        case(
            "a_control_plane_in_python_is_understood",
            a_control_plane_in_python_is_understood,
        ),
    ];
    suite(Needs::Peers, 2, cases)
}

/// The address of a service.
const VIP: [u8; 4] = [10, 96, 0, 1];

/// A pod as the endpoint of service `demo/echo.demo.svc.cluster.local`, and that service: its port 80 at [`VIP`].
fn behind_service(pod: &Pod) -> (proto::Workload, proto::Service) {
    let hostname = "echo.demo.svc.cluster.local";
    let ports = vec![proto::Port {
        service_port: 80,
        target_port: PORT.into(),
        app_protocol: 0,
    }];
    let service = proto::Service {
        name: "echo".into(),
        namespace: "demo".into(),
        hostname: hostname.into(),
        addresses: vec![proto::NetworkAddress {
            address: VIP.to_vec(),
            ..Default::default()
        }],
        ports: ports.clone(),
        ..Default::default()
    };
    let mut endpoint = workload(pod);
    let list = proto::PortList { ports };
    endpoint.services.insert(format!("demo/{hostname}"), list);
    (endpoint, service)
}

fn the_mesh_is_as_the_control_plane_says() {
    let ground = Ground::new();
    let ads = Ads::start(&ground.node.host.ns, &ground.credentials());
    let mut environment = ads.environment();
    for (name, value) in [
        ("NODE_NAME", "node-1"),
        ("POD_NAME", "agent-x"),
        ("POD_NAMESPACE", "system"),
    ] {
        environment.push((name.to_owned(), value.to_owned()));
    }
    let demo = ground.start(environment, &Workloads::default());
    let first = ads.requests();
    for url in [ADDRESS, AUTHORIZATION] {
        let request = first.iter().find(|request| request.type_url == url).unwrap();
        let node = request.node.as_ref().unwrap();
        assert_eq!(node.id, "ztunnel~1.1.1.1~agent-x.system~system.svc.cluster.local");
        let metadata = &node.metadata.as_ref().unwrap().fields;
        let name = Some(prost_types::value::Kind::StringValue("node-1".into()));
        assert_eq!(metadata["NODE_NAME"].kind, name);
        assert!(
            request.resource_names_subscribe.is_empty(),
            "everything is asked for"
        );
    }

    let _echo = demo.serve(Family::V4, app::echo);
    // A workload before its service, and a service by its address.
    let (server, service) = behind_service(&demo.server);
    ads.edit(|edit| {
        edit.workload(server);
        edit.workload(workload(&demo.client));
    });
    assert_eq!(ads.answered(ADDRESS), None);
    ads.edit(|edit| edit.service(service));
    assert_eq!(ads.answered(ADDRESS), None);
    let at_service = || app::ask(&demo.client.ns, (VIP, 80).into(), "hello\n").ok();
    assert_eq!(wait::until("the service", at_service), "hello\n");
    let capture = demo.node.capture(&demo.server);
    let stream = open(&demo, Family::V4);
    echoes(&stream).unwrap();
    assert!(opened_ports(&capture.stop()).iter().all(|port| *port == 15008));

    // A policy reaches what is open and what is new; without it all is as before.
    ads.edit(|edit| edit.policy(&deny("demo")));
    assert_eq!(ads.answered(AUTHORIZATION), None);
    wait::until("the open connection to be closed", || {
        echoes(&stream).is_err().then_some(())
    });
    assert!(demo.parts(Family::V4).contains("401"));
    ads.edit(|edit| edit.remove(AUTHORIZATION, "demo/deny"));
    assert_eq!(ads.answered(AUTHORIZATION), None);
    assert_eq!(wait::until("the service", at_service), "hello\n");

    // Without endpoints, a service is nobody's.
    ads.edit(|edit| edit.remove(ADDRESS, &format!("Kubernetes//Pod/demo/{}", demo.server.name)));
    assert_eq!(ads.answered(ADDRESS), None);
    wait::until("the service to be gone", || at_service().is_none().then_some(()));
    assert_eq!(ads.connections(), 1);
    demo.tells_no_secrets();
}

fn what_is_refused_is_told_and_the_rest_counts() {
    let ground = Ground::new();
    let ads = Ads::start(&ground.node.host.ns, &ground.credentials());
    let demo = ground.start(ads.environment(), &Workloads::default());
    let _who = demo.serve(Family::V6, app::who);
    ads.edit(|edit| {
        let mut bad = workload(&demo.client);
        bad.uid = "bad".into();
        bad.addresses = vec![vec![1, 2, 3]];
        edit.workload(bad);
        edit.put(ADDRESS, "garbage", vec![0xff; 40]);
        edit.pods([&demo.client, &demo.server]);
    });
    let problem = ads.answered(ADDRESS).unwrap();
    assert!(
        problem.contains("bad: an address has 4 or 16 bytes, not 3") && problem.contains("garbage: "),
        "{problem}"
    );
    demo.meets(Family::V6);
    // A policy whose condition nobody here knows keeps out everybody, rather than nobody.
    let mut unknown = deny("elsewhere");
    unknown.rules[0].clauses[0].matches[0].extensions = vec![security::Extension {
        name: "new".into(),
        config: None,
    }];
    ads.edit(|edit| edit.policy(&unknown));
    let problem = ads.answered(AUTHORIZATION).unwrap();
    assert!(
        problem.contains("demo/deny: rules[0]") && problem.contains("\"new\""),
        "{problem}"
    );
    demo.parts(Family::V6);
    ads.edit(|edit| edit.policy(&deny("elsewhere")));
    assert_eq!(ads.answered(AUTHORIZATION), None);
    demo.meets(Family::V6);
}

fn the_mesh_outlives_its_control_plane() {
    let ground = Ground::new();
    let mut ads = Ads::start(&ground.node.host.ns, &ground.credentials());
    ads.edit(|edit| {
        edit.pods([&ground.client, &ground.server]);
        edit.policy(&deny("demo"));
    });
    let demo = ground.start(ads.environment(), &Workloads::default());
    let _who = demo.serve(Family::V4, app::who);
    demo.parts(Family::V4);
    ads.edit(|edit| edit.remove(AUTHORIZATION, "demo/deny"));
    assert_eq!(ads.answered(AUTHORIZATION), None);
    demo.meets(Family::V4);
    ads.down();
    wait::until("the loss to be noticed", || {
        demo.agent.log().contains("the mesh stays as it is").then_some(())
    });
    demo.meets(Family::V4);
    assert_eq!(demo.readiness().0, 200);
    // What changes meanwhile is told when it is back, and what is the same is not told again.
    let stranger = demo.node.pod("late");
    ads.edit(|edit| {
        edit.workload(workload(&stranger));
        edit.policy(&deny("demo"));
        edit.remove(ADDRESS, "never");
    });
    let before = ads.requests().len();
    ads.up(&demo.node.host.ns);
    assert_eq!(ads.answered(AUTHORIZATION), None);
    let again = ads.requests().split_off(before);
    let addresses = again.iter().find(|request| request.type_url == ADDRESS).unwrap();
    assert_eq!(addresses.initial_resource_versions.len(), 2, "{addresses:?}");
    demo.parts(Family::V4);
    assert_eq!(ads.connections(), 2);
    assert_eq!(demo.readiness().0, 200);
}

fn a_hundred_thousand_workloads_come_in_one_message() {
    const WORKLOADS: u32 = 100_000;
    let ground = Ground::new();
    let ads = Ads::start(&ground.node.host.ns, &ground.credentials());
    ads.edit(|edit| {
        for number in 0..WORKLOADS {
            let mut one = workload(&ground.client);
            one.name = format!("deployment-5d4f8c7b9d-{number:05}");
            one.uid = format!("Kubernetes//Pod/namespace-{}/{}", number % 500, one.name);
            one.namespace = format!("namespace-{}", number % 500);
            // Not those of the node's own pods.
            one.addresses = vec![(0x6440_0000 + number).to_be_bytes().to_vec()];
            edit.workload(one);
        }
        edit.pods([&ground.client, &ground.server]);
    });
    // It is ready only when all of it is here.
    let demo = ground.start(ads.environment(), &Workloads::default());
    let _who = demo.serve(Family::V4, app::who);
    assert_eq!(ads.answered(ADDRESS), None);
    demo.meets(Family::V4);
    let metrics = demo.agent.metrics();
    let is_large = |value: f64| value > f64::from(4 << 20);
    let mut bytes = metrics
        .iter()
        .filter(|sample| sample.name == "istio_xds_message_bytes_total");
    assert!(bytes.any(|sample| is_large(sample.value)), "{metrics:?}");
    assert_eq!(ads.connections(), 1);
}

/// What an agent in a mesh of a file, with certificates of an authority, begins with.
fn with_authority(lifetime: Duration) -> (IstioCa, Demo) {
    let ground = Ground::new();
    let ca = IstioCa::start(&ground.node.host.ns, &ground.credentials(), lifetime);
    let workloads = Workloads::hbone([&ground.client, &ground.server]);
    let demo = ground.start(ca.environment(), &workloads);
    (ca, demo)
}

fn certificates_come_from_the_authority() {
    let (ca, demo) = with_authority(LONG_LIFE);
    let _who = demo.serve(Family::V4, app::who);
    demo.meets(Family::V4);
    let mut asked = ca.asked();
    asked.sort();
    let expected =
        ["client", "server"].map(|name| (format!("spiffe://cluster.local/ns/demo/sa/{name}"), 86_400));
    assert_eq!(asked, expected);
    let entry = demo.agent.access_log().pop().unwrap();
    assert_eq!(entry["src.identity"], "spiffe://cluster.local/ns/demo/sa/client");
    demo.tells_no_secrets();
}

/// Asks the client's own echo, now and then: between two times the tunnel is closed, so that each takes a handshake.
fn ask_back(demo: &Demo) -> std::io::Result<String> {
    std::thread::sleep(Duration::from_millis(400));
    app::ask(&demo.server.ns, demo.client.addr(Family::V4, PORT), "hello\n")
}

fn a_good_certificate_serves_to_its_end() {
    let (mut ca, demo) = with_authority(SHORT_LIFE);
    let _echo = demo.serve(Family::V4, app::echo);
    let _echo_back = App::start(&demo.client.ns, (Family::V4.any(), PORT).into(), app::echo);
    wait::until("the pods to meet", || ask_back(&demo).ok());
    let stream = open(&demo, Family::V4);
    echoes(&stream).unwrap();
    // Renewed while the connection is open.
    let asked = ca.asked().len();
    wait::until("a renewal", || (ca.asked().len() >= asked + 2).then_some(()));
    echoes(&stream).unwrap();
    ca.down();
    wait::until("the authority to be missed", || {
        demo.agent.log().contains("no new certificate").then_some(())
    });
    // New handshakes go on until the end, and then fail with all that there is to know.
    let error = wait::until("the certificates' end", || {
        let _ = ask_back(&demo);
        let log = demo.agent.access_log();
        let mut errors = log.iter().rev().filter_map(|entry| entry.get("error"));
        errors.find(|error| error.contains("expired at")).cloned()
    });
    let log = demo.agent.log();
    let of_missing = log.find("no new certificate").unwrap();
    let served = log[of_missing..].split("expired at").next().unwrap();
    assert!(
        served.contains("connection complete"),
        "a good certificate was not used to its end:\n{log}"
    );
    for part in [
        "spiffe://cluster.local/ns/demo/sa/",
        "expired at 2",
        "Unavailable",
        "refused",
    ] {
        assert!(error.contains(part), "{part:?} is not in {error:?}");
    }
    echoes(&stream).unwrap();
    // Back: within seconds, whoever asks.
    ca.up(&demo.node.host.ns);
    wait::until("the pods to meet after all", || ask_back(&demo).ok());
    echoes(&stream).unwrap();
    stream.shutdown(Shutdown::Both).unwrap();
}

fn wrong_answers_replace_nothing() {
    let (ca, demo) = with_authority(SHORT_LIFE);
    let _who = demo.serve(Family::V6, app::who);
    wait::until("the pods to meet", || demo.ask(Family::V6).ok());
    for (mood, told) in [
        (
            Mood::For("spiffe://cluster.local/ns/demo/sa/other".into()),
            "is for spiffe://cluster.local/ns/demo/sa/other",
        ),
        (Mood::OtherKey, "cannot be used"),
        (Mood::NoRoot, "no root"),
        (Mood::Garbage, "has no"),
        (
            Mood::Refusing("no such pod on this node".into()),
            "no such pod on this node",
        ),
    ] {
        let before = demo.agent.log().len();
        ca.set(mood);
        wait::until("the wrong answer to be told", || {
            demo.agent.log()[before..].contains(told).then_some(())
        });
        ca.set(Mood::Good);
        wait::until("the pods to meet", || demo.ask(Family::V6).ok());
    }
    demo.tells_no_secrets();
}

fn a_control_plane_in_python_is_understood() {
    let ground = Ground::new();
    let credentials = ground.credentials();
    let directory = ground.node.directory().to_owned();
    let (certificate, key) = (directory.join("plane.pem"), directory.join("plane.key"));
    fs::write(&certificate, credentials.pem().0).unwrap();
    fs::write(&key, credentials.pem().1).unwrap();
    let port = 15012;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/control_plane.py");
    let mut server = command(&ground.node.host.ns, python());
    server
        .arg(script)
        .arg(port.to_string())
        .args([&certificate, &key, &credentials.token, &directory]);
    for pod in [&ground.client, &ground.server] {
        let addresses = Family::BOTH.map(|family| pod.ip(family).to_string());
        server.arg(format!("{}={}", pod.name, addresses.join(",")));
    }
    let server = Process::start(&mut server, &directory.join("plane.log")).unwrap();
    wait::until("the control plane", || {
        server.output().contains("ready").then_some(())
    });
    let addr = (std::net::Ipv4Addr::LOCALHOST, port).into();
    let mut environment = credentials.environment("XDS", addr);
    environment.extend(credentials.environment("CA", addr));
    environment.push(("FAKE_CA".into(), "false".into()));
    let demo = ground.start(environment, &Workloads::default());
    let _who = demo.serve(Family::V4, app::who);
    demo.meets(Family::V4);
    let log = server.output();
    for line in [
        "asked type.googleapis.com/istio.workload.Address ztunnel~1.1.1.1~",
        "asked type.googleapis.com/istio.security.Authorization ztunnel~",
        "answered type.googleapis.com/istio.workload.Address \n",
        "answered type.googleapis.com/istio.security.Authorization \n",
        "issued spiffe://cluster.local/ns/demo/sa/client 86400",
        "issued spiffe://cluster.local/ns/demo/sa/server 86400",
    ] {
        assert!(log.contains(line), "{line:?} is not in\n{log}");
    }
    assert!(!log.contains(" names"), "{log}");
}
