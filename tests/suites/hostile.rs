//! Peers in bad faith at a running agent: requests that are none, handshakes that lead nowhere, and more of them than anybody needs. Each
//! gets its answer, the others are served meanwhile, and nothing of it is left. Frames that are none are in the proxy's own tests.

use std::{
    fs, io,
    io::{Read, Write},
    net::TcpStream,
    path::Path,
    process::ExitCode,
    time::{Duration, Instant},
};

use redirector_tests::{
    agent::{Agent, Options},
    app::{self, App},
    ca::{Credentials, Root},
    envoy::python,
    mesh::{Mesh, PORT},
    node::Family,
    process::{command, output},
    suite::{Needs, case, main as suite},
    wait,
};

const DEADLINE: Duration = Duration::from_secs(120);
/// Handshakes from one address that the proxy has under way at a time (`proxy::PeerConfig`).
const HANDSHAKES: usize = 1024;

fn main() -> ExitCode {
    let mut cases = Vec::new();
    for family in Family::BOTH {
        let name = family.name();
        cases.push(case(format!("requests_in_bad_faith_{name}"), move || {
            requests_in_bad_faith(family)
        }));
        cases.push(case(format!("handshakes_that_lead_nowhere_{name}"), move || {
            handshakes_that_lead_nowhere(family)
        }));
    }
    cases.push(case("certificates_in_bad_faith", certificates_in_bad_faith));
    suite(Needs::Peers, 2, cases)
}

fn credentials(mesh: &Mesh) -> Credentials {
    let root = Root::of_agent(&mesh.agent.state_dir());
    root.issue(mesh.node.directory(), "stranger", &mesh.stranger.identity())
}

type Headers<'a> = Vec<(&'a str, &'a str)>;

/// A line for each request.
fn ask(mesh: &Mesh, family: Family, own: &Credentials, requests: &[Headers<'_>]) -> Vec<String> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/hostile.py");
    let file = mesh.node.directory().join("requests.json");
    fs::write(&file, serde_json::to_string(requests).unwrap()).unwrap();
    let mut client = command(&mesh.stranger.ns, python());
    client
        .arg(script)
        .args([mesh.server.ip(family).to_string(), "15008".to_owned()])
        .arg(mesh.server.addr(family, PORT).to_string())
        .args([&own.certificate, &own.key, &own.root])
        .stdin(fs::File::open(&file).unwrap());
    let (status, text) = output(&mut client, DEADLINE);
    assert!(status.success(), "{text}");
    text.lines().map(str::to_owned).collect()
}

fn talk(stream: &mut TcpStream) {
    let mut buffer = [0; 4];
    stream.write_all(b"ping").unwrap();
    stream.read_exact(&mut buffer).unwrap();
    assert_eq!(&buffer, b"ping");
}

/// At rest it has no more descriptors than before.
fn holds_as_before(agent: &Agent, before: &[String]) {
    wait::until("the agent to let go of all", || {
        (agent.descriptors().len() <= before.len()).then_some(())
    });
}

fn requests_in_bad_faith(family: Family) {
    let mesh = Mesh::hbone(Options::default());
    let own = credentials(&mesh);
    let _app = App::start(&mesh.server.ns, (family.any(), PORT).into(), app::echo);
    let good = mesh.server.addr(family, PORT).to_string();
    let (ip, other) = (mesh.server.ip(family), mesh.client.addr(family, PORT).to_string());
    let host = if ip.is_ipv6() {
        format!("[{ip}]")
    } else {
        ip.to_string()
    };
    let (user, password) = (format!("user@{good}"), format!("user:password@{good}"));
    let ports = ["0", "65536", "-1", "+8080", "8080x", "", " 8080"].map(|port| format!("{host}:{port}"));
    let long = "a".repeat(70_000);
    let connect = |authority| vec![(":method", "CONNECT"), (":authority", authority)];
    let mut requests = vec![
        (
            "GET",
            vec![
                (":method", "GET"),
                (":scheme", "https"),
                (":path", "/"),
                (":authority", &*good),
            ],
        ),
        ("a path", [connect(&good), vec![(":path", "/")]].concat()),
        ("a scheme", [connect(&good), vec![(":scheme", "https")]].concat()),
        (
            "an extended CONNECT",
            [
                connect(&good),
                vec![(":protocol", "websocket"), (":scheme", "https"), (":path", "/")],
            ]
            .concat(),
        ),
        ("no authority", vec![(":method", "CONNECT")]),
        (
            "a header of a connection",
            [connect(&good), vec![("connection", "close")]].concat(),
        ),
        (
            "a long header",
            [connect(&good), vec![("x-long", &long)]].concat(),
        ),
        ("another pod", connect(&other)),
        ("a user", connect(&user)),
        ("a password", connect(&password)),
        ("no port", connect(&host)),
    ];
    requests.extend(ports.iter().map(|authority| ("a port", connect(authority))));
    for authority in [
        "127.0.0.1:8080",
        "127.1:8080",
        "2130706433:8080",
        "0x7f000001:8080",
        "0.0.0.0:8080",
        "localhost:8080",
        "[::1]:8080",
        "[::]:8080",
        "[::ffff:127.0.0.1]:8080",
        "[0:0:0:0:0:0:0:1]:8080",
        "169.254.169.254:80",
        "[fe80::1]:8080",
        "[fe80::1%eth0]:8080",
        "[fe80::1%25eth0]:8080",
        "255.255.255.255:8080",
        "224.0.0.1:8080",
        ":8080",
        "8080",
        "a b:8080",
    ] {
        requests.push(("an authority", connect(authority)));
    }
    // A tunnel of the agent's own to the same pod lives through it all.
    let mut neighbour = app::connect(&mesh.client.ns, mesh.server.addr(family, PORT)).unwrap();
    talk(&mut neighbour);
    mesh.agent.settle();
    let before = mesh.agent.descriptors();
    let all: Vec<_> = requests.iter().map(|(_, headers)| headers.clone()).collect();
    let answers = ask(&mesh, family, &own, &all);
    assert_eq!(answers.len(), requests.len());
    for ((what, headers), answer) in requests.iter().zip(&answers) {
        let authority = headers.iter().find(|(name, _)| *name == ":authority");
        let told = format!("{what} {authority:?}: {answer}");
        let (got, then) = answer.split_once(", then ").unwrap();
        // 4xx, or 503 for what could be a service's name, or PROTOCOL_ERROR for what is no request.
        let refused = got.starts_with("status 4") || got == "status 503" || got == "reset 1";
        assert!(refused && then == "status 200", "{told}");
    }
    // Nothing but the good requests and the neighbour has reached an application.
    let reached = |entry: &std::collections::BTreeMap<String, String>| {
        entry.get("direction").is_some_and(|way| way == "inbound")
            && !entry.contains_key("error")
            && entry.get("dst.hbone_addr") != Some(&good)
    };
    assert!(!mesh.agent.access_log().iter().any(reached));
    talk(&mut neighbour);
    holds_as_before(&mesh.agent, &before);
}

fn handshakes_that_lead_nowhere(family: Family) {
    let mesh = Mesh::hbone(Options::default());
    let _app = App::start(&mesh.server.ns, (family.any(), PORT).into(), app::echo);
    let to = mesh.server.addr(family, 15008);
    mesh.agent.settle();
    let before = mesh.agent.descriptors();
    // Half of a record's header, so that it is TLS so far.
    let stalled: Vec<TcpStream> = (0..HANDSHAKES + 100)
        .filter_map(|_| {
            // One that is refused may be reset before its connect() has returned.
            let mut stream = match app::connect(&mesh.stranger.ns, to) {
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return None,
                connected => connected.unwrap(),
            };
            let _ = stream.write_all(&[0x16, 3]);
            Some(stream)
        })
        .collect();
    // Others are served at once, by a new tunnel.
    let mut other = app::connect(&mesh.client.ns, mesh.server.addr(family, PORT)).unwrap();
    talk(&mut other);
    let refusals = || {
        let samples = mesh.agent.metrics();
        let refused = |sample: &&redirector_tests::counters::Sample| {
            sample.name == "redirector_connections_refused_total"
                && sample
                    .labels
                    .get("reason")
                    .is_some_and(|reason| reason == "handshakes")
        };
        samples.iter().find(refused).map_or(0.0, |sample| sample.value)
    };
    // The first may have been given up by now on a slow machine, but then there is room for as many of the last.
    wait::until("refusals", || (refusals() > 0.0).then_some(()));
    let begun = Instant::now();
    for mut stream in stalled {
        // An alert and the end, or a reset.
        if let Err(error) = stream.read_to_end(&mut Vec::new()) {
            let after = begun.elapsed();
            assert_eq!(error.kind(), io::ErrorKind::ConnectionReset, "after {after:?}");
        }
    }
    talk(&mut other);
    drop(other);
    // The other's tunnel stays in the pool, at both ends.
    wait::until("the agent to let go of the handshakes", || {
        (mesh.agent.descriptors().len() <= before.len() + 2).then_some(())
    });
}

fn certificates_in_bad_faith() {
    let mesh = Mesh::hbone(Options::default());
    let _app = App::start(&mesh.server.ns, (Family::V4.any(), PORT).into(), app::echo);
    let (directory, identity) = (mesh.node.directory(), mesh.stranger.identity());
    let root = Root::of_agent(&mesh.agent.state_dir());
    let mut neighbour = app::connect(&mesh.client.ns, mesh.server.addr(Family::V4, PORT)).unwrap();
    for (what, own) in [
        ("expired", root.issue_expired(directory, "expired", &identity)),
        ("by itself", Root::create(directory).as_credentials()),
    ] {
        let mut openssl = command(&mesh.stranger.ns, "openssl");
        openssl.args([
            "s_client",
            "-connect",
            &mesh.server.addr(Family::V4, 15008).to_string(),
        ]);
        openssl.args(["-alpn", "h2", "-ign_eof"]);
        openssl
            .arg("-cert")
            .arg(&own.certificate)
            .arg("-key")
            .arg(&own.key);
        let (_, text) = output(&mut openssl, DEADLINE);
        assert!(text.contains("alert"), "{what}: {text}");
        talk(&mut neighbour);
    }
}
