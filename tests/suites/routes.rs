//! Where connections go when it is not straight to a pod: through waypoints, application tunnels and network gateways, and to
//! one of several pods. Envoy and nginx are the others' side of it.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Read, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpStream},
    process::ExitCode,
    time::Duration,
};

use redirector_tests::{
    agent::{Agent, Options, Redirect},
    app::{self, App},
    ca::Root,
    capture::opened_ports,
    envoy::Envoy,
    mesh::{PORT, refused},
    node::{Family, Node, Pod},
    process::{Process, command},
    suite::{Case, Needs, case, main as suite},
    wait,
    workloads::Workloads,
};
use serde_json::json;
use socket2::SockRef;

const SHOP: &str = "shop.demo.svc.cluster.local";
const SHOP_PORT: u16 = 80;
/// Where the application behind an application tunnel listens.
const TUNNEL_PORT: u16 = 15088;

fn main() -> ExitCode {
    let backends = [("ebpf", Redirect::Ebpf), ("iptables", Redirect::IptablesNft)];
    let mut cases: Vec<Case> = vec![
        case(
            "pods_are_drawn_by_capacity_behind_addresses_and_ranges",
            pods_are_drawn_by_capacity_behind_addresses_and_ranges,
        ),
        case(
            "an_endpoint_with_only_a_name_is_resolved",
            an_endpoint_with_only_a_name_is_resolved,
        ),
    ];
    for family in Family::BOTH {
        for (backend, redirect) in backends {
            for on_loopback in [true, false] {
                let to = if on_loopback { "loopback" } else { "pod_address" };
                let options = Options {
                    redirect,
                    arguments: vec!["--localhost-app-tunnel".into(), on_loopback.to_string()],
                    ..Options::default()
                };
                let name = format!("a_waypoint_in_a_pod_{}_{backend}_{to}", family.name());
                cases.push(case(name, move || {
                    a_waypoint_in_a_pod(family, options, on_loopback)
                }));
            }
        }
        type Test = fn(Family);
        let tests: [(&str, Test); 4] = [
            ("envoy_is_a_waypoint", envoy_is_a_waypoint),
            ("nothing_gets_past_a_waypoint", nothing_gets_past_a_waypoint),
            ("nginx_learns_who_calls", nginx_learns_who_calls),
            ("another_network_behind_envoy", another_network_behind_envoy),
        ];
        for (name, test) in tests {
            cases.push(case(format!("{name}_{}", family.name()), move || test(family)));
        }
    }
    suite(Needs::Peers, 2, cases)
}

fn vip(family: Family) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::new(10, 96, 7, 1).into(),
        Family::V6 => Ipv6Addr::new(0xfd96, 0, 0, 7, 0, 0, 0, 1).into(),
    }
}

fn shop(family: Family) -> SocketAddr {
    (vip(family), SHOP_PORT).into()
}

fn with_shop(workloads: Workloads, backend: &Pod) -> Workloads {
    workloads.with_service(SHOP, &Family::BOTH.map(vip), SHOP_PORT, backend, PORT)
}

/// Reads a PROXY protocol header, a line and the end, and answers with all that it was told:
/// `<peer's IP> <source> <destination> <identity> <line>`.
fn proxied(mut stream: TcpStream, peer: SocketAddr) -> io::Result<()> {
    let mut head = [0; 16];
    stream.read_exact(&mut head)?;
    assert_eq!(&head[..12], b"\r\n\r\n\0\r\nQUIT\n");
    let mut rest = vec![0; u16::from_be_bytes([head[14], head[15]]).into()];
    stream.read_exact(&mut rest)?;
    let port = |at: usize| u16::from_be_bytes([rest[at], rest[at + 1]]);
    let v6 = |at: usize| Ipv6Addr::from(<[u8; 16]>::try_from(&rest[at..at + 16]).unwrap());
    let v4 = |at: usize| Ipv4Addr::from(<[u8; 4]>::try_from(&rest[at..at + 4]).unwrap());
    let (source, destination, end): (SocketAddr, SocketAddr, usize) = match (head[12], head[13]) {
        (0x21, 0x11) => ((v4(0), port(8)).into(), (v4(4), port(10)).into(), 12),
        (0x21, 0x21) => ((v6(0), port(32)).into(), (v6(16), port(34)).into(), 36),
        other => panic!("{other:?}"),
    };
    let (kind, length) = (rest[end], port(end + 1).into());
    let identity = std::str::from_utf8(&rest[end + 3..]).unwrap();
    assert_eq!((kind, identity.len()), (0xd0, length));
    let mut line = String::new();
    stream.read_to_string(&mut line)?;
    write!(
        stream,
        "{} {source} {destination} {identity} {}",
        peer.ip(),
        line.trim()
    )
}

/// A pod that gets its connections with a PROXY header is the waypoint of a service and of a pod.
fn a_waypoint_in_a_pod(family: Family, options: Options, on_loopback: bool) {
    let node = Node::new();
    let pods = ["client", "server", "way"].map(|name| node.pod(name));
    let [client, server, way] = &pods;
    let waypoint = json!({"destination": format!("/{}", way.ip(family)), "hboneMtlsPort": 15008});
    let workloads = with_shop(Workloads::hbone(&pods), server)
        .with_service_key(SHOP, "waypoint", waypoint.clone())
        .with_workload_key("server", "waypoint", waypoint)
        .with_workload_key(
            "way",
            "applicationTunnel",
            json!({"protocol": "PROXY", "port": TUNNEL_PORT}),
        );
    let agent = Agent::start(&node, &workloads, options);
    for pod in &pods {
        agent.enrol(pod);
    }
    let address = if on_loopback {
        family.loopback()
    } else {
        way.ip(family)
    };
    let _waypoint = App::start(&way.ns, (address, TUNNEL_PORT).into(), proxied);
    let _server = App::start(&server.ns, (family.any(), PORT).into(), app::who);

    let at_server = node.capture(server);
    for called in [
        shop(family),
        (vip(family), 4711).into(),
        server.addr(family, PORT),
    ] {
        let told = app::ask(&client.ns, called, "hello\n").unwrap();
        let told: Vec<&str> = told.split(' ').collect();
        let [peer, source, destination, identity, "hello"] = told[..] else {
            panic!("{told:?}\n{}", agent.log())
        };
        let expected = if on_loopback {
            family.loopback()
        } else {
            client.ip(family)
        };
        assert_eq!(peer, expected.to_string());
        assert_eq!(source.parse::<SocketAddr>().unwrap().ip(), client.ip(family));
        assert_eq!(destination, called.to_string());
        assert_eq!(identity, client.identity());
    }
    assert_eq!(
        opened_ports(&at_server.stop()),
        [0_u16; 0],
        "nothing went around it"
    );
    // The waypoint itself goes on to the pod.
    let seen = app::ask_who(&way.ns, server.addr(family, PORT)).unwrap();
    assert_eq!(seen, way.ip(family).to_string());
}

fn envoy_is_a_waypoint(family: Family) {
    let node = Node::new();
    let pods = ["client", "server", "way"].map(|name| node.pod(name));
    let [client, server, way] = &pods;
    let ways = "ways.demo.svc.cluster.local";
    let workloads = with_shop(Workloads::hbone(&pods), server)
        .with_service(ways, &[], 15008, way, 15008)
        .with_service_key(SHOP, "waypoint", json!({"destination": format!("demo/{ways}")}));
    let agent = Agent::start(&node, &workloads, Options::default());
    agent.enrol(client);
    let own = Root::of_agent(&agent.state_dir()).issue(node.directory(), "way", &way.identity());
    let app = App::start(&way.ns, (family.loopback(), PORT).into(), app::who);
    let _envoy = Envoy::terminate(&way.ns, node.directory(), &own, &client.identity(), app.addr);
    let at_way = node.capture(way);
    let seen = app::ask_who(&client.ns, shop(family)).unwrap();
    assert_eq!(seen, family.loopback().to_string());
    assert_eq!(opened_ports(&at_way.stop()), [15008]);
}

/// Nobody knows the waypoint, or it does not prove who it is: then nothing is reached, in the mesh or in plain.
fn nothing_gets_past_a_waypoint(family: Family) {
    let node = Node::new();
    let pods = ["client", "server", "way"].map(|name| node.pod(name));
    let [client, server, way] = &pods;
    let unknown = json!({"destination": "demo/nobody.demo.svc.cluster.local"});
    let workloads = with_shop(Workloads::hbone(&pods), server)
        .with_service_key(
            SHOP,
            "waypoint",
            json!({"destination": format!("/{}", way.ip(family))}),
        )
        .with_workload_key("server", "waypoint", unknown);
    let agent = Agent::start(&node, &workloads, Options::default());
    agent.enrol(client);
    agent.enrol(server);
    let _server = App::start(&server.ns, (family.any(), PORT).into(), app::who);
    let impostor = Root::of_agent(&agent.state_dir()).issue(node.directory(), "way", &server.identity());
    let _envoy = Envoy::terminate(
        &way.ns,
        node.directory(),
        &impostor,
        &client.identity(),
        server.addr(family, PORT),
    );
    let at_server = node.capture(server);
    for called in [server.addr(family, PORT), shop(family)] {
        refused(&client.ns, called);
    }
    assert_eq!(opened_ports(&at_server.stop()), [0_u16; 0]);
    for says in ["must be reached through waypoint demo/nobody", "TLS handshake"] {
        assert!(agent.log().contains(says), "{says}: {}", agent.log());
    }
}

fn nginx_learns_who_calls(family: Family) {
    let node = Node::new();
    let pods = ["client", "server"].map(|name| node.pod(name));
    let [client, server] = &pods;
    let workloads = with_shop(Workloads::hbone(&pods), server).with_workload_key(
        "server",
        "applicationTunnel",
        json!({"protocol": "PROXY", "port": TUNNEL_PORT}),
    );
    let agent = Agent::start(&node, &workloads, Options::default());
    for pod in &pods {
        agent.enrol(pod);
    }
    let directory = node.directory();
    let config = directory.join("nginx.conf");
    let text = format!(
        "daemon off; master_process off; user root; pid {d}/nginx.pid; error_log stderr; events {{}}
         http {{ access_log off; client_body_temp_path {d}/t1; proxy_temp_path {d}/t2; fastcgi_temp_path {d}/t3;
         uwsgi_temp_path {d}/t4; scgi_temp_path {d}/t5;
         server {{ listen 127.0.0.1:{TUNNEL_PORT} proxy_protocol; listen [::1]:{TUNNEL_PORT} proxy_protocol;
         location / {{ return 200 '$proxy_protocol_addr $proxy_protocol_server_addr $proxy_protocol_server_port'; }} }} }}",
        d = directory.display()
    );
    fs::write(&config, text).unwrap();
    let mut nginx = command(&server.ns, "nginx");
    let _nginx = Process::start(nginx.arg("-c").arg(&config), &directory.join("nginx.log")).unwrap();
    let port = format!(":{TUNNEL_PORT:04X} ");
    wait::until("nginx to listen", || {
        let tcp = server.ns.proc_net("tcp6").unwrap_or_default();
        tcp.contains(&port).then_some(())
    });
    // By the pod's address as by the service's: what the far end is asked for is the pod's either way.
    for (called, asked) in [
        (server.addr(family, 4711), server.addr(family, 4711)),
        (shop(family), server.addr(family, PORT)),
    ] {
        let (status, told) = app::http_get(&client.ns, called, "/").unwrap();
        let expected = format!("{} {} {}", client.ip(family), asked.ip(), asked.port());
        assert_eq!((status, told.as_str()), (200, expected.as_str()));
    }
}

/// The service's pod is on network `far`, behind a gateway that hands each stream to the pod's own HBONE port.
fn another_network_behind_envoy(family: Family) {
    let node = Node::new();
    let pods = ["client", "server", "gate"].map(|name| node.pod(name));
    let [client, server, gate] = &pods;
    // The server as itself, as its own proxy knows it; and as what the client's side of the mesh knows of the far network.
    let ports = json!({SHOP_PORT.to_string(): PORT, (SHOP_PORT + 1).to_string(): PORT + 1});
    let workloads = with_shop(Workloads::hbone([client, server]), client)
        .with_service_key(SHOP, "ports", ports.clone())
        .with_workload("far-server", &[], "HBONE")
        .with_workload_key("far-server", "network", json!("far"))
        .with_workload_key(
            "far-server",
            "networkGateway",
            json!({"destination": format!("far/{}", gate.ip(family)), "hboneMtlsPort": 15008}),
        )
        .with_workload_key("client", "services", json!({}))
        .with_workload_key("far-server", "services", json!({format!("demo/{SHOP}"): ports}))
        .with_workload("gate", &Family::BOTH.map(|family| gate.ip(family)), "HBONE")
        .with_workload_key("gate", "network", json!("far"))
        .with_service_key(SHOP, "subjectAltNames", json!([server.identity()]));
    let agent = Agent::start(&node, &workloads, Options::default());
    agent.enrol(client);
    agent.enrol(server);
    let own = Root::of_agent(&agent.state_dir()).issue(node.directory(), "gate", &gate.identity());
    let inner = server.addr(family, 15008);
    let _envoy = Envoy::terminate(&gate.ns, node.directory(), &own, &client.identity(), inner);
    let _server = App::start(&server.ns, (family.any(), PORT).into(), app::hash);
    let _resetting = App::start(&server.ns, (family.any(), PORT + 1).into(), reset);

    let (at_gate, at_server) = (node.capture(gate), node.capture(server));
    for _ in 0..3 {
        let mut stream = app::connect(&client.ns, shop(family)).unwrap();
        let sent = app::write_hashed(&mut stream, 3 << 20).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut got = String::new();
        stream.read_to_string(&mut got).unwrap();
        assert_eq!(got, sent, "{}", agent.log());
    }
    let mut stream = app::connect(&client.ns, (vip(family), SHOP_PORT + 1).into()).unwrap();
    stream.write_all(b"x").unwrap();
    let mut word = [0; 3];
    stream.read_exact(&mut word).unwrap();
    assert_eq!(&word, b"bye");
    let end = stream.read(&mut word).unwrap_err();
    assert_eq!(end.kind(), io::ErrorKind::ConnectionReset);
    assert_eq!(opened_ports(&at_server.stop()), [15008]);
    let at_gate = at_gate.stop();
    assert!(opened_ports(&at_gate).contains(&15008));
    // Who is not the service is not spoken to.
    let other = workloads.with_service_key(SHOP, "subjectAltNames", json!([client.identity()]));
    other.write(&node.directory().join("workloads.yaml")).unwrap();
    wait::until("the new workloads to be in force", || {
        app::ask(&client.ns, shop(family), "x").is_err().then_some(())
    });
    let says = "within the one to gateway";
    assert!(agent.log().contains(says), "{}", agent.log());
}

fn pods_are_drawn_by_capacity_behind_addresses_and_ranges() {
    let node = Node::new();
    let pods = ["client", "big", "small", "idle"].map(|name| node.pod(name));
    let [client, servers @ ..] = &pods;
    let membership = json!({format!("demo/{SHOP}"): {SHOP_PORT.to_string(): PORT}});
    let mut workloads = with_shop(Workloads::hbone(&pods), client)
        .with_workload_key("client", "services", json!({}))
        .with_service_key(
            SHOP,
            "cidrVips",
            json!([{"cidr": "10.97.0.0/16"}, {"cidr": "fd97::/32"}]),
        );
    for (server, capacity) in servers.iter().zip([3, 1, 0]) {
        workloads = workloads
            .with_workload_key(&server.name, "services", membership.clone())
            .with_workload_key(&server.name, "capacity", json!(capacity));
    }
    let agent = Agent::start(&node, &workloads, Options::default());
    for pod in &pods {
        agent.enrol(pod);
    }
    let _apps: Vec<App> = servers
        .iter()
        .flat_map(|server| {
            Family::BOTH.map(|family| App::start(&server.ns, server.addr(family, PORT), local))
        })
        .collect();
    for called in [
        shop(Family::V4),
        shop(Family::V6),
        "10.97.200.3:80".parse().unwrap(),
        "[fd97::5]:80".parse().unwrap(),
    ] {
        let family = if called.is_ipv4() { Family::V4 } else { Family::V6 };
        let mut times: BTreeMap<String, usize> = BTreeMap::new();
        // The odds that the small one is never drawn are one to 10^10.
        for _ in 0..80 {
            *times
                .entry(app::ask(&client.ns, called, "").unwrap())
                .or_default() += 1;
        }
        let [big, small, idle] = servers;
        let of = |pod: &Pod| times.get(&pod.ip(family).to_string()).copied().unwrap_or(0);
        assert!(of(big) > 0 && of(small) > 0, "{called}: {times:?}");
        assert_eq!((of(big) + of(small), of(idle)), (80, 0), "{called}: {times:?}");
    }
}

/// Answers a byte, and resets.
/// An address is its own name, so nobody's resolver is asked.
fn an_endpoint_with_only_a_name_is_resolved() {
    let node = Node::new();
    let pods = ["client", "server"].map(|name| node.pod(name));
    let [client, server] = &pods;
    let db = node.pod("db");
    let named = |name: &str| {
        let workloads = Workloads::hbone(&pods).with_workload("db", &[], "TCP");
        with_shop(workloads, server)
            .with_workload_key("server", "services", json!({}))
            .with_workload_key(
                "db",
                "services",
                json!({format!("demo/{SHOP}"): {SHOP_PORT.to_string(): PORT}}),
            )
            .with_workload_key("db", "hostname", json!(name))
    };
    let at_db = db.ip(Family::V6).to_string();
    let agent = Agent::start(&node, &named(&at_db), Options::default());
    for pod in &pods {
        agent.enrol(pod);
    }
    let _db = App::start(&db.ns, (Family::V6.any(), PORT).into(), local);
    // From one family to the other, where the name has only that.
    for family in Family::BOTH {
        assert_eq!(app::ask(&client.ns, shop(family), "").unwrap(), at_db);
    }

    // A pod of the mesh is reached by HBONE, by whatever name.
    let at_server = server.ip(Family::V4).to_string();
    let by_name = with_shop(Workloads::hbone(&pods), server)
        .with_workload_key("server", "workloadIps", json!([]))
        .with_workload_key("server", "hostname", json!(at_server));
    let file = node.directory().join("workloads.yaml");
    by_name.write(&file).unwrap();
    let _server = App::start(&server.ns, (Family::V4.any(), PORT).into(), local);
    let capture = node.capture(server);
    wait::until("the pod behind its name", || {
        let answer = app::ask(&client.ns, shop(Family::V4), "").ok()?;
        (answer == at_server).then_some(())
    });
    assert_eq!(opened_ports(&capture.stop()), [15008]);

    named("no such name").write(&file).unwrap();
    wait::until("the name that nothing has", || {
        app::ask(&client.ns, shop(Family::V4), "").is_err().then_some(())
    });
    refused(&client.ns, shop(Family::V4));
    wait::until("the reason", || {
        agent.log().contains("cannot be resolved").then_some(())
    });
}

fn reset(mut stream: TcpStream, _peer: SocketAddr) -> io::Result<()> {
    stream.read_exact(&mut [0])?;
    stream.write_all(b"bye")?;
    SockRef::from(&stream).set_linger(Some(Duration::ZERO))
}

/// Tells its own address.
fn local(mut stream: TcpStream, _peer: SocketAddr) -> io::Result<()> {
    let own = stream.local_addr()?.ip();
    write!(stream, "{own}")
}
