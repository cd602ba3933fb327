//! Every path of a connection, for both families and all ways to redirect: what the application sees as its peer, what is
//! on the wire, what the access log says, and that nothing reaches what it should not.

use std::{
    io::{self, Read, Write},
    net::{IpAddr, SocketAddr, UdpSocket},
    process::ExitCode,
};

use redirector_tests::{
    agent::{Options, Redirect},
    app::{self, App},
    capture::{contains, opened_ports, tls_records},
    mesh::{Mesh, PORT, refused},
    node::{Family, Host},
    suite::{Case, Needs, case, main as suite},
    wait,
    workloads::Workloads,
};

type Path = fn(Family, Options);

const PATHS: &[(&str, Path)] = &[
    ("pod_to_pod_is_hbone", pod_to_pod_is_hbone),
    ("pod_to_service_is_hbone", pod_to_service_is_hbone),
    ("pod_to_plain_pod_is_plaintext", pod_to_plain_pod_is_plaintext),
    ("pod_to_outside_passes_through", pod_to_outside_passes_through),
    ("outside_to_pod_keeps_the_source", outside_to_pod_keeps_the_source),
    (
        "stranger_to_pod_keeps_the_source",
        stranger_to_pod_keeps_the_source,
    ),
    ("self_calls_are_left_alone", self_calls_are_left_alone),
    ("udp_is_left_alone", udp_is_left_alone),
    ("half_closed_connections_go_on", half_closed_connections_go_on),
    (
        "connections_from_before_enrolment_go_on",
        connections_from_before_enrolment_go_on,
    ),
    ("a_closed_port_is_refused", a_closed_port_is_refused),
    ("an_app_never_reaches_itself", an_app_never_reaches_itself),
    ("a_dead_agent_fails_closed", a_dead_agent_fails_closed),
    (
        "plaintext_to_the_hbone_port_is_closed",
        plaintext_to_the_hbone_port_is_closed,
    ),
    ("a_reset_is_never_an_orderly_end", a_reset_is_never_an_orderly_end),
    (
        "a_port_that_collides_is_refused_at_once",
        a_port_that_collides_is_refused_at_once,
    ),
    ("loopback_sources_never_leave", loopback_sources_never_leave),
    (
        "the_proxys_ports_are_not_forwarded",
        the_proxys_ports_are_not_forwarded,
    ),
];

/// The paths that are others in iptables mode, by the design of Istio's rules.
const OTHERWISE_WITH_IPTABLES: &[&str] = &[
    // Connection tracking begins with the rules: it takes the next packet of an older connection for the first of a new one,
    // which is redirected to a listener that does not know it, and reset.
    "connections_from_before_enrolment_go_on",
    // The dial to the application has a port of the kernel's choice, not one of a reserved range. Where it meets a port of the
    // client's own, the kernel chooses another.
    "a_port_that_collides_is_refused_at_once",
];

fn main() -> ExitCode {
    let mut cases: Vec<Case> = Vec::new();
    let clsact = Options {
        force_clsact: true,
        ..Options::default()
    };
    let iptables = |redirect| Options {
        redirect,
        ..Options::default()
    };
    for (attach, options) in [
        ("tcx", Options::default()),
        ("clsact", clsact),
        ("old_kernel", Options::old_kernel()),
        ("iptables_nft", iptables(Redirect::IptablesNft)),
        ("iptables_legacy", iptables(Redirect::IptablesLegacy)),
    ] {
        for family in Family::BOTH {
            for (name, path) in PATHS {
                if options.redirect != Redirect::Ebpf && OTHERWISE_WITH_IPTABLES.contains(name) {
                    continue;
                }
                let options = options.clone();
                let name = format!("{name}_{}_{attach}", family.name());
                cases.push(case(name, move || path(family, options)));
            }
        }
    }
    suite(Needs::Agent, 2, cases)
}

fn serve(host: &Host, family: Family, port: u16, handler: app::Handler) -> App {
    App::start(&host.ns, (family.any(), port).into(), handler)
}

/// `from` reaches the application of `to`, which sees `from`'s own address.
fn sees(from: &Host, to: &Host, family: Family) {
    let _app = serve(to, family, PORT, app::who);
    assert_eq!(
        app::ask_who(&from.ns, to.addr(family, PORT)).unwrap(),
        from.ip(family).to_string()
    );
}

fn pod_to_pod_is_hbone(family: Family, options: Options) {
    let mesh = Mesh::hbone(options);
    let _app = serve(&mesh.server, family, PORT, app::http);
    let capture = mesh.node.capture(&mesh.server);
    let (status, body) = app::http_get(&mesh.client.ns, mesh.server.addr(family, PORT), "/a-secret").unwrap();
    assert_eq!(status, 200);
    assert!(
        body.ends_with(&format!("you are {}\n", mesh.client.ip(family))),
        "{body}"
    );

    let segments = capture.stop();
    assert_eq!(
        opened_ports(&segments),
        [15008],
        "only HBONE goes between the pods"
    );
    assert!(!contains(&segments, b"a-secret"), "the request was on the wire");
    let tls = tls_records(&segments, 15008);
    assert!(tls.records > 0 && tls.not_tls == 0, "{tls:?}");

    for direction in ["outbound", "inbound"] {
        let entry = wait::until("the access log", || {
            mesh.agent
                .access_log()
                .into_iter()
                .find(|entry| entry.get("direction").is_some_and(|value| value == direction))
        });
        assert_eq!(entry["src.identity"], mesh.client.identity());
        assert_eq!(entry["dst.identity"], mesh.server.identity());
    }
}

fn pod_to_service_is_hbone(family: Family, options: Options) {
    let vips: [IpAddr; 2] = ["10.96.0.10".parse().unwrap(), "fd96::10".parse().unwrap()];
    let mesh = Mesh::enrolled(options, |client, server| {
        Workloads::hbone([client, server]).with_service("web.demo.svc.cluster.local", &vips, 80, server, PORT)
    });
    let _app = serve(&mesh.server, family, PORT, app::who);
    let capture = mesh.node.capture(&mesh.server);
    let vip = vips
        .into_iter()
        .find(|vip| vip.is_ipv4() == (family == Family::V4))
        .unwrap();
    let seen = app::ask_who(&mesh.client.ns, (vip, 80).into()).unwrap();
    assert_eq!(seen, mesh.client.ip(family).to_string());
    assert_eq!(opened_ports(&capture.stop()), [15008]);
}

fn pod_to_plain_pod_is_plaintext(family: Family, options: Options) {
    let mesh = Mesh::plaintext(options);
    let capture = mesh.node.capture(&mesh.server);
    sees(&mesh.client, &mesh.server, family);
    assert_eq!(opened_ports(&capture.stop()), [PORT]);
    sees(&mesh.client, &mesh.stranger, family);
}

fn pod_to_outside_passes_through(family: Family, options: Options) {
    let mesh = Mesh::hbone(options);
    sees(&mesh.client, &mesh.node.outside, family);
}

fn outside_to_pod_keeps_the_source(family: Family, options: Options) {
    let mesh = Mesh::hbone(options);
    sees(&mesh.node.outside, &mesh.server, family);
    wait::until("the access log", || {
        mesh.agent.access_log().into_iter().find(|entry| {
            let from_outside = entry
                .get("src.addr")
                .is_some_and(|src| src.contains(&mesh.node.outside.ip(family).to_string()));
            from_outside && !entry.contains_key("src.identity")
        })
    });
}

fn stranger_to_pod_keeps_the_source(family: Family, options: Options) {
    let mesh = Mesh::hbone(options);
    sees(&mesh.stranger, &mesh.server, family);
}

fn self_calls_are_left_alone(family: Family, options: Options) {
    let mesh = Mesh::hbone(options);
    sees(&mesh.server, &mesh.server, family);
    let _app = serve(&mesh.server, family, PORT + 1, app::who);
    let seen = app::ask_who(&mesh.server.ns, (family.loopback(), PORT + 1).into()).unwrap();
    assert_eq!(seen, family.loopback().to_string());
    assert!(
        mesh.agent.access_log().is_empty(),
        "{:?}",
        mesh.agent.access_log()
    );
}

fn udp_is_left_alone(family: Family, options: Options) {
    let mesh = Mesh::hbone(options);
    let bind = |host: &Host, port: u16| -> UdpSocket {
        let socket = host.ns.run(|| UdpSocket::bind((family.any(), port))).unwrap();
        socket.set_read_timeout(Some(app::IO_DEADLINE)).unwrap();
        socket
    };
    let (outside, pod) = (bind(&mesh.node.outside, 5353), bind(&mesh.client, 0));
    pod.send_to(b"question", mesh.node.outside.addr(family, 5353))
        .unwrap();
    let mut buffer = [0; 64];
    let (length, from) = outside.recv_from(&mut buffer).unwrap();
    assert_eq!(
        (&buffer[..length], from.ip()),
        (b"question".as_slice(), mesh.client.ip(family))
    );
    outside.send_to(b"answer", from).unwrap();
    let (length, _) = pod.recv_from(&mut buffer).unwrap();
    assert_eq!(&buffer[..length], b"answer");
}

fn half_closed_connections_go_on(family: Family, options: Options) {
    let mesh = Mesh::hbone(options);
    let _app = serve(&mesh.server, family, PORT, app::source);
    let mut stream = app::connect(&mesh.client.ns, mesh.server.addr(family, PORT)).unwrap();
    stream.write_all(b"3000000\n").unwrap();
    // The request's end reaches the application long before the answer does the client.
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let expected = app::write_hashed(&mut io::sink(), 3_000_000).unwrap();
    assert_eq!(app::read_hashed(&mut stream).unwrap(), expected);
}

fn connections_from_before_enrolment_go_on(family: Family, options: Options) {
    let mesh = Mesh::started(options, |client, server| Workloads::hbone([client, server]));
    let _apps = [&*mesh.server, &mesh.node.outside].map(|host| serve(host, family, PORT, app::echo));
    let mut streams = [
        app::connect(&mesh.client.ns, mesh.node.outside.addr(family, PORT)).unwrap(),
        app::connect(&mesh.client.ns, mesh.server.addr(family, PORT)).unwrap(),
        app::connect(&mesh.node.outside.ns, mesh.server.addr(family, PORT)).unwrap(),
    ];
    let mut talk = || {
        for stream in &mut streams {
            let mut buffer = [0; 4];
            stream.write_all(b"ping").unwrap();
            stream.read_exact(&mut buffer).unwrap();
            assert_eq!(&buffer, b"ping");
        }
    };
    talk();
    mesh.agent.enrol(&mesh.client);
    mesh.agent.enrol(&mesh.server);
    talk();
    mesh.agent.release(&mesh.client);
    mesh.agent.release(&mesh.server);
    talk();
}

fn a_closed_port_is_refused(family: Family, options: Options) {
    let mesh = Mesh::hbone(options);
    for from in [&*mesh.client, &*mesh.stranger, &mesh.node.outside] {
        refused(&from.ns, mesh.server.addr(family, 9));
    }
    refused(&mesh.client.ns, mesh.node.outside.addr(family, 9));
}

fn an_app_never_reaches_itself(family: Family, options: Options) {
    let mut mesh = Mesh::hbone(options);
    // The application that dials listens on the wildcard at the very port that it dials elsewhere.
    let _own = serve(&mesh.client, family, 80, app::who);
    let nobody: [SocketAddr; 2] = [mesh.node.outside.addr(family, 80), mesh.server.addr(family, 80)];
    nobody
        .iter()
        .for_each(|addr| drop(refused(&mesh.client.ns, *addr)));
    mesh.agent.kill();
    nobody
        .iter()
        .for_each(|addr| drop(refused(&mesh.client.ns, *addr)));
}

fn a_dead_agent_fails_closed(family: Family, options: Options) {
    let mut mesh = Mesh::hbone(options);
    let _apps = [&*mesh.server, &mesh.node.outside].map(|host| serve(host, family, PORT, app::who));
    app::ask_who(&mesh.client.ns, mesh.server.addr(family, PORT)).unwrap();
    mesh.agent.kill();
    let captures = [mesh.node.capture(&mesh.client), mesh.node.capture(&mesh.server)];
    for (from, to) in [
        (&*mesh.client, &*mesh.server),
        (&*mesh.client, &mesh.node.outside),
        (&*mesh.stranger, &*mesh.server),
        (&mesh.node.outside, &*mesh.server),
    ] {
        let error = refused(&from.ns, to.addr(family, PORT));
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused, "{error}");
    }
    let [client, server] = captures.map(redirector_tests::capture::Capture::stop);
    assert_eq!(opened_ports(&client), [0_u16; 0], "something left the pod");
    assert!(!contains(&client, b"hello") && !contains(&server, b"hello"));
}

fn plaintext_to_the_hbone_port_is_closed(family: Family, options: Options) {
    let mesh = Mesh::hbone(options);
    for from in [&*mesh.stranger, &mesh.node.outside] {
        let mut stream = app::connect(&from.ns, mesh.server.addr(family, 15008)).unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let mut answer = Vec::new();
        // An alert may come first; then the end, or a reset.
        let end = stream.read_to_end(&mut answer);
        assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
        assert!(end.is_ok() || end.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionReset));
    }
}

fn the_proxys_ports_are_not_forwarded(family: Family, options: Options) {
    let mesh = Mesh::hbone(options);
    for port in [15001, 15006] {
        refused(&mesh.node.outside.ns, mesh.server.addr(family, port));
        refused(&mesh.stranger.ns, mesh.server.addr(family, port));
        refused(&mesh.client.ns, mesh.server.addr(family, port));
    }
    for port in [15001, 15006] {
        let answer = app::ask(&mesh.client.ns, (family.loopback(), port).into(), "hello\n");
        assert!(
            answer.as_deref().unwrap_or_default().is_empty(),
            "port {port}: {answer:?}"
        );
    }
}

/// However early the client resets: the server must not take an aborted request for an empty one that ended in order.
fn a_reset_is_never_an_orderly_end(family: Family, options: Options) {
    let mesh = Mesh::hbone(options);
    let (said, heard) = std::sync::mpsc::channel();
    let said = std::sync::Mutex::new(said);
    let listener = mesh
        .server
        .ns
        .run(|| std::net::TcpListener::bind((family.any(), PORT)))
        .unwrap();
    let server = std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut first = [0];
            match stream.read(&mut first) {
                Ok(1) if first == [0] => return,
                Ok(0) => said.lock().unwrap().send("an orderly end").unwrap(),
                _ => said.lock().unwrap().send("a reset, or data before it").unwrap(),
            }
        }
    });
    let connect = || app::connect(&mesh.client.ns, mesh.server.addr(family, PORT)).unwrap();
    for _ in 0..30 {
        let mut stream = connect();
        stream.write_all(&[1; 20_000]).unwrap();
        socket2::SockRef::from(&stream)
            .set_linger(Some(std::time::Duration::ZERO))
            .unwrap();
    }
    // The last one, so that the server's thread ends. Connections whose reset came before the dial never reach it.
    connect().write_all(&[0]).unwrap();
    server.join().unwrap();
    assert!(heard.try_iter().all(|end| end != "an orderly end"));
}

/// The client's own port is the one from which the proxy dials the application in this client's name for another connection. Two
/// connections can't have the same ends, so the second is refused at once and the first goes on.
fn a_port_that_collides_is_refused_at_once(family: Family, options: Options) {
    fn tells_port_and_echoes(mut stream: std::net::TcpStream, peer: SocketAddr) -> io::Result<()> {
        writeln!(stream, "{}", peer.port())?;
        app::echo(stream, peer)
    }
    let mesh = Mesh::hbone(options);
    let _app = serve(&mesh.server, family, PORT, tells_port_and_echoes);
    let target = mesh.server.addr(family, PORT);
    let mut first = io::BufReader::new(app::connect(&mesh.stranger.ns, target).unwrap());
    let mut line = String::new();
    io::BufRead::read_line(&mut first, &mut line).unwrap();
    let taken: u16 = line.trim().parse().unwrap();
    assert!(taken >= 61_000, "{taken}");
    let second = mesh.stranger.ns.run(|| {
        let socket =
            socket2::Socket::new(socket2::Domain::for_address(target), socket2::Type::STREAM, None).unwrap();
        socket
            .bind(&SocketAddr::from((mesh.stranger.ip(family), taken)).into())
            .unwrap();
        socket.connect_timeout(&target.into(), std::time::Duration::from_secs(10))
    });
    assert_eq!(second.unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    first.get_mut().write_all(b"on\n").unwrap();
    line.clear();
    io::BufRead::read_line(&mut first, &mut line).unwrap();
    assert_eq!(line, "on\n");
}

/// IPv6 sends the SYN of a socket bound to ::1, and TCP Fast Open puts data into it.
fn loopback_sources_never_leave(family: Family, options: Options) {
    const MSG_FASTOPEN: i32 = 0x2000_0000;
    let mesh = Mesh::hbone(options);
    let capture = mesh.node.capture(&mesh.server);
    let target = mesh.server.addr(family, PORT);
    mesh.client.ns.run(|| {
        let socket =
            socket2::Socket::new(socket2::Domain::for_address(target), socket2::Type::STREAM, None).unwrap();
        socket
            .bind(&SocketAddr::from((family.loopback(), 0)).into())
            .unwrap();
        socket.set_nonblocking(true).unwrap();
        // Whether the kernel sends it at all is its affair.
        let _ = socket.send_to_with_flags(b"a-secret", &target.into(), MSG_FASTOPEN);
        let _ = socket.connect(&target.into());
    });
    // Something that is captured, so that what went before it would be too.
    let _app = serve(&mesh.server, family, PORT, app::who);
    app::ask_who(&mesh.client.ns, target).unwrap();
    let segments = capture.stop();
    assert!(!contains(&segments, b"a-secret"));
    assert_eq!(opened_ports(&segments), [15008]);
}
