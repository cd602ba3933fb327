//! Peers that share no code with us: curl and nginx, h2load and HAProxy in the pods, openssl, Python's h2 and Envoy as HBONE's other end.

use std::{fs, process::ExitCode, time::Duration};

use redirector_tests::{
    agent::{Agent, Options},
    app::{self, App},
    ca::{Credentials, Root},
    capture::opened_ports,
    envoy::Envoy,
    hbone_client::hbone_client,
    mesh::{Mesh, PORT},
    node::{Family, Node},
    process::{Process, command, output},
    suite::{Case, Needs, case, main as suite},
    wait,
    workloads::Workloads,
};

const DEADLINE: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let mut cases: Vec<Case> = vec![
        case("the_peers_understand_each_other", the_peers_understand_each_other),
        case("who_may_not_handshake", who_may_not_handshake),
        case("what_is_answered_to_connect", what_is_answered_to_connect),
    ];
    for family in Family::BOTH {
        let name = family.name();
        cases.push(case(format!("curl_reaches_nginx_{name}"), move || {
            curl_reaches_nginx(family)
        }));
        cases.push(case(format!("h2load_crowds_haproxy_{name}"), move || {
            h2load_crowds_haproxy(family)
        }));
        cases.push(case(format!("openssl_handshakes_{name}"), move || {
            openssl_handshakes(family)
        }));
        cases.push(case(format!("python_tunnels_to_us_{name}"), move || {
            python_tunnels_to_us(family)
        }));
        cases.push(case(format!("envoy_tunnels_to_us_{name}"), move || {
            envoy_tunnels_to_us(family)
        }));
        cases.push(case(format!("we_tunnel_to_envoy_{name}"), move || {
            we_tunnel_to_envoy(family)
        }));
    }
    suite(Needs::Peers, 2, cases)
}

fn curl_reaches_nginx(family: Family) {
    let mesh = Mesh::hbone(Options::default());
    let directory = mesh.node.directory();
    fs::create_dir_all(directory.join("www")).unwrap();
    fs::write(directory.join("www/file"), vec![b'x'; 3 << 20]).unwrap();
    let config = directory.join("nginx.conf");
    let text = format!(
        "daemon off; master_process off; user root; pid {d}/nginx.pid; error_log stderr; events {{}}
         http {{ access_log off; client_body_temp_path {d}/t1; proxy_temp_path {d}/t2; fastcgi_temp_path {d}/t3;
         uwsgi_temp_path {d}/t4; scgi_temp_path {d}/t5;
         server {{ listen {PORT}; listen [::]:{PORT}; root {d}/www;
         location = /who {{ return 200 $remote_addr; }} }} }}",
        d = directory.display()
    );
    fs::write(&config, text).unwrap();
    let mut nginx = command(&mesh.server.ns, "nginx");
    let _nginx = Process::start(nginx.arg("-c").arg(&config), &directory.join("nginx.log")).unwrap();
    let server = mesh.server.addr(family, PORT);
    let curl = |arguments: &[&str], path: &str| {
        let mut curl = command(&mesh.client.ns, "curl");
        curl.args([
            "--silent",
            "--show-error",
            "--fail",
            "--globoff",
            "--max-time",
            "30",
        ])
        .args(arguments);
        output(curl.arg(format!("http://{server}{path}")), DEADLINE)
    };
    let seen = wait::until("nginx", || {
        let (status, text) = curl(&[], "/who");
        status.success().then_some(text)
    });
    assert_eq!(seen, mesh.client.ip(family).to_string());
    let capture = mesh.node.capture(&mesh.server);
    let (status, size) = curl(
        &["--output", "/dev/null", "--write-out", "%{size_download}"],
        "/file",
    );
    assert!(status.success(), "{size}");
    assert_eq!(size, (3 << 20).to_string());
    assert!(opened_ports(&capture.stop()).iter().all(|port| *port == 15008));
}

/// HTTP/2 within the tunnels: many streams on few connections, and each request's body both ways.
fn h2load_crowds_haproxy(family: Family) {
    const REQUESTS: u32 = 2000;
    // More than a frame, and less than what HAProxy buffers.
    const BODY: usize = 40_000;
    let mesh = Mesh::hbone(Options::default());
    let directory = mesh.node.directory();
    let (config, answer, body) = ["haproxy.cfg", "answer", "body"]
        .map(|name| directory.join(name))
        .into();
    fs::write(&answer, vec![b'a'; BODY]).unwrap();
    fs::write(&body, vec![b'b'; BODY]).unwrap();
    // The header shows what arrived of the request's body.
    let text = format!(
        "global
           tune.bufsize 65536
         defaults
           mode http
           timeout client 60s
           timeout server 60s
           timeout connect 60s
         frontend all
           bind 0.0.0.0:{PORT} proto h2
           bind [::]:{PORT} v6only proto h2
           option http-buffer-request
           http-request return status 200 content-type text/plain hdr x-from %[src] file {} if {{ req.body_size eq {BODY} }}
           http-request return status 400 content-type text/plain hdr x-from %[src] string short\n",
        answer.display()
    );
    fs::write(&config, text).unwrap();
    let mut haproxy = command(&mesh.server.ns, "haproxy");
    // Without a master: one process, which ends when it is told to.
    let haproxy = haproxy.arg("-db").arg("-f").arg(&config);
    let _haproxy = Process::start(haproxy, &directory.join("haproxy.log")).unwrap();
    let url = format!("http://{}/", mesh.server.addr(family, PORT));
    let seen = wait::until("HAProxy", || {
        let mut curl = command(&mesh.client.ns, "curl");
        curl.args([
            "--silent",
            "--globoff",
            "--max-time",
            "30",
            "--http2-prior-knowledge",
        ]);
        curl.args(["--output", "/dev/null", "--write-out", "%header{x-from}"]);
        let (status, text) = output(curl.arg(&url), DEADLINE);
        status.success().then_some(text)
    });
    assert_eq!(seen, mesh.client.ip(family).to_string());
    let capture = mesh.node.capture(&mesh.server);
    let mut h2load = command(&mesh.client.ns, "h2load");
    h2load.args(["--clients", "8", "--max-concurrent-streams", "32", "--requests"]);
    h2load
        .arg(REQUESTS.to_string())
        .arg("--data")
        .arg(&body)
        .arg(&url);
    let (status, text) = output(&mut h2load, DEADLINE);
    assert!(status.success(), "{text}");
    let all = format!("{REQUESTS} succeeded, 0 failed, 0 errored, 0 timeout");
    assert!(text.contains(&all), "{text}");
    assert!(text.contains(&format!("{REQUESTS} 2xx")), "{text}");
    assert!(opened_ports(&capture.stop()).iter().all(|port| *port == 15008));
}

/// The identity of `stranger`, and a certificate for it that the agent's pods trust.
fn stranger(mesh: &Mesh) -> Credentials {
    Root::of_agent(&mesh.agent.state_dir()).issue(
        mesh.node.directory(),
        "stranger",
        &mesh.stranger.identity(),
    )
}

fn s_client(
    mesh: &Mesh,
    family: Family,
    arguments: &[&str],
    credentials: Option<&Credentials>,
) -> (bool, String) {
    let mut openssl = command(&mesh.stranger.ns, "openssl");
    openssl
        .args([
            "s_client",
            "-connect",
            &mesh.server.addr(family, 15008).to_string(),
            "-showcerts",
        ])
        .args(arguments);
    if let Some(own) = credentials {
        openssl
            .arg("-cert")
            .arg(&own.certificate)
            .arg("-key")
            .arg(&own.key)
            .arg("-CAfile")
            .arg(&own.root);
    }
    let (status, text) = output(&mut openssl, DEADLINE);
    (status.success(), text)
}

fn openssl_handshakes(family: Family) {
    let mesh = Mesh::hbone(Options::default());
    let own = stranger(&mesh);
    let (_, text) = s_client(&mesh, family, &["-alpn", "h2", "-tls1_3"], Some(&own));
    for says in ["Verify return code: 0 (ok)", "ALPN protocol: h2", "TLSv1.3"] {
        assert!(text.contains(says), "{says}: {text}");
    }
    // Leaf and no root: one certificate.
    assert_eq!(text.matches("BEGIN CERTIFICATE").count(), 1, "{text}");
}

fn who_may_not_handshake() {
    let mesh = Mesh::hbone(Options::default());
    let own = stranger(&mesh);
    let directory = mesh.node.directory();
    let foreign = Root::create(directory).issue(directory, "foreign", &mesh.stranger.identity());
    let agents = Root::of_agent(&mesh.agent.state_dir());
    let other_domain = agents.issue(directory, "domain", "spiffe://elsewhere/ns/demo/sa/stranger");
    let no_spiffe = agents.issue(directory, "plain", "https://example.invalid/");
    let alpn = ["-alpn", "h2", "-ign_eof"];
    for (what, arguments, credentials) in [
        ("no certificate", alpn.as_slice(), None),
        ("another root", alpn.as_slice(), Some(&foreign)),
        ("another trust domain", alpn.as_slice(), Some(&other_domain)),
        ("no SPIFFE identity", alpn.as_slice(), Some(&no_spiffe)),
        (
            "TLS 1.2",
            ["-alpn", "h2", "-ign_eof", "-tls1_2"].as_slice(),
            Some(&own),
        ),
        (
            "HTTP/1.1",
            ["-alpn", "http/1.1", "-ign_eof"].as_slice(),
            Some(&own),
        ),
    ] {
        let (_, text) = s_client(&mesh, Family::V4, arguments, credentials);
        assert!(
            text.contains("alert") || text.contains("unexpected eof"),
            "{what}: {text}"
        );
    }
}

fn python_tunnels_to_us(family: Family) {
    let mesh = Mesh::hbone(Options::default());
    let own = stranger(&mesh);
    let _app = App::start(&mesh.server.ns, (family.any(), PORT).into(), app::who);
    let authority = mesh.server.addr(family, PORT).to_string();
    let to = (mesh.server.ip(family).to_string(), 15008);
    let text = hbone_client(
        &mesh.stranger,
        to,
        &authority,
        &own,
        &mesh.server.identity(),
        "CONNECT",
    );
    assert_eq!(
        text,
        format!("status 200\nbody hello {}\n", mesh.stranger.ip(family))
    );
}

fn what_is_answered_to_connect() {
    let mesh = Mesh::hbone(Options::default());
    let own = stranger(&mesh);
    let _app = App::start(&mesh.server.ns, (Family::V4.any(), PORT).into(), app::who);
    let ip = mesh.server.v4;
    for (authority, method, status) in [
        (format!("{ip}:{PORT}"), "CONNECT", 200),
        (format!("{ip}:{PORT}"), "GET", 400),
        (format!("{}:{PORT}", mesh.client.v4), "CONNECT", 400),
        (format!("192.0.2.2:{PORT}"), "CONNECT", 400),
        (format!("127.0.0.1:{PORT}"), "CONNECT", 400),
        (format!("127.9.9.9:{PORT}"), "CONNECT", 400),
        (format!("[::1]:{PORT}"), "CONNECT", 400),
        (format!("[::ffff:127.0.0.1]:{PORT}"), "CONNECT", 400),
        (format!("0.0.0.0:{PORT}"), "CONNECT", 400),
        (format!("[fe80::1]:{PORT}"), "CONNECT", 400),
        (format!("169.254.1.1:{PORT}"), "CONNECT", 400),
        (format!("user@{ip}:{PORT}"), "CONNECT", 400),
        (format!("{ip}:0"), "CONNECT", 400),
        (format!("localhost:{PORT}"), "CONNECT", 503),
        (format!("127.1:{PORT}"), "CONNECT", 503),
        (ip.to_string(), "CONNECT", 400),
        (format!("{ip}:99999"), "CONNECT", 400),
        ("unknown.demo.svc.cluster.local:80".to_owned(), "CONNECT", 503),
        (format!("{ip}:9"), "CONNECT", 503),
        (format!("{ip}:15001"), "CONNECT", 503),
        (format!("{ip}:15006"), "CONNECT", 503),
        (format!("{ip}:15008"), "CONNECT", 503),
    ] {
        let to = (ip.to_string(), 15008);
        let text = hbone_client(
            &mesh.stranger,
            to,
            &authority,
            &own,
            &mesh.server.identity(),
            method,
        );
        assert!(
            text.starts_with(&format!("status {status}\n")),
            "{method} {authority}: {text}"
        );
    }
}

fn envoy_tunnels_to_us(family: Family) {
    let mesh = Mesh::hbone(Options::default());
    let own = stranger(&mesh);
    let _app = App::start(&mesh.server.ns, (family.any(), PORT).into(), app::who);
    let to = (mesh.server.addr(family, 15008), mesh.server.identity());
    let authority = mesh.server.addr(family, PORT).to_string();
    let _envoy = Envoy::originate(
        &mesh.stranger.ns,
        mesh.node.directory(),
        &own,
        (to.0, &to.1),
        &authority,
        9000,
    );
    let seen = app::ask_who(&mesh.stranger.ns, (Family::V4.loopback(), 9000).into()).unwrap();
    assert_eq!(seen, mesh.stranger.ip(family).to_string());
}

fn we_tunnel_to_envoy(family: Family) {
    let node = Node::new();
    let (client, peer) = (node.pod("client"), node.pod("peer"));
    let agent = Agent::start(&node, &Workloads::hbone([&client, &peer]), Options::default());
    agent.enrol(&client);
    let own = Root::of_agent(&agent.state_dir()).issue(node.directory(), "peer", &peer.identity());
    let app = App::start(&peer.ns, (family.loopback(), PORT).into(), app::who);
    let _envoy = Envoy::terminate(&peer.ns, node.directory(), &own, &client.identity(), app.addr);
    let capture = node.capture(&peer);
    // Envoy dials its application from its own address.
    let seen = app::ask_who(&client.ns, peer.addr(family, PORT)).unwrap();
    assert_eq!(seen, family.loopback().to_string());
    assert_eq!(opened_ports(&capture.stop()), [15008]);
}

/// The peers with one another, without us: if this fails, the fault is not ours.
fn the_peers_understand_each_other() {
    let node = Node::new();
    let (client, server) = (node.pod("client"), node.pod("server"));
    let directory = node.directory();
    let root = Root::create(directory);
    let [own, theirs] = [&client, &server].map(|pod| root.issue(directory, &pod.name, &pod.identity()));
    let app = App::start(&server.ns, (Family::V4.loopback(), PORT).into(), app::who);
    let _server = Envoy::terminate(&server.ns, directory, &theirs, &client.identity(), app.addr);
    for family in Family::BOTH {
        let authority = server.addr(family, PORT).to_string();
        let to = (server.ip(family).to_string(), 15008);
        let text = hbone_client(&client, to, &authority, &own, &server.identity(), "CONNECT");
        assert_eq!(text, "status 200\nbody hello 127.0.0.1\n");
        let port = if family == Family::V4 { 9004 } else { 9006 };
        let to = (server.addr(family, 15008), server.identity());
        let _client = Envoy::originate(&client.ns, directory, &own, (to.0, &to.1), &authority, port);
        let seen = app::ask_who(&client.ns, (Family::V4.loopback(), port).into()).unwrap();
        assert_eq!(seen, "127.0.0.1");
    }
}
