//! `--same-node-direct`: two pods of one node are joined in the agent. Nothing of it is on a wire, what refuses a connection over HBONE refuses
//! it here, and who could have no tunnel is not joined.

use std::{
    collections::BTreeMap,
    io::{self, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    process::ExitCode,
};

use redirector_common::consts::PORT_HBONE;
use redirector_tests::{
    agent::{Agent, Options, Redirect},
    app::{self, App},
    capture::{Segment, contains, opened_ports},
    cni,
    mesh::{Mesh, PORT, refused},
    node::{Family, Pod},
    suite::{Needs, Test, case, main as suite},
    wait,
    workloads::Workloads,
};
use serde_json::json;

/// What pods say to each other, and nobody else is to read.
const CANARY: &str = "canary: 2c9d75e1-between two pods of this node";

const TESTS: &[(&str, Test)] = &[
    (
        "nothing_is_on_a_wire_and_both_records_say_so",
        nothing_is_on_a_wire_and_both_records_say_so,
    ),
    ("by_a_service_and_to_itself", by_a_service_and_to_itself),
    (
        "bulk_arrives_whole_and_fin_is_fin",
        bulk_arrives_whole_and_fin_is_fin,
    ),
    ("policies_refuse_and_close", policies_refuse_and_close),
    (
        "the_end_of_either_pod_is_a_reset",
        the_end_of_either_pod_is_a_reset,
    ),
    (
        "another_account_is_refused_as_over_hbone",
        another_account_is_refused_as_over_hbone,
    ),
    (
        "an_address_that_two_pods_have_is_reached_over_hbone",
        an_address_that_two_pods_have_is_reached_over_hbone,
    ),
    ("it_is_off_by_default", it_is_off_by_default),
];

fn main() -> ExitCode {
    let mut cases = Vec::new();
    for family in Family::BOTH {
        for (name, test) in TESTS {
            let test = *test;
            cases.push(case(format!("{name}_{}", family.name()), move || {
                test(family, Options::default());
            }));
        }
        cases.push(case(
            format!("nothing_is_on_a_wire_by_iptables_{}", family.name()),
            move || {
                let options = Options {
                    redirect: Redirect::IptablesNft,
                    ..Options::default()
                };
                nothing_is_on_a_wire_and_both_records_say_so(family, options);
            },
        ));
    }
    suite(Needs::Agent, 2, cases)
}

fn direct(mut options: Options) -> Options {
    options.arguments.push("--same-node-direct".to_owned());
    options
}

/// Connections that were joined.
fn joined(agent: &Agent) -> f64 {
    let samples = agent.metrics();
    let mut found = samples
        .iter()
        .filter(|one| one.name == "redirector_connections_same_node_total");
    found.next().expect("the counter is always there").value
}

/// From now on connections from one pod to the other are joined: both have their certificates. The server echoes.
fn ready(agent: &Agent, client: &Pod, server: SocketAddr) {
    wait::until("both certificates", || {
        let before = joined(agent);
        app::ask(&client.ns, server, "ready?").ok()?;
        (joined(agent) > before).then_some(())
    });
}

/// Enrolled, with an application that echoes, and ready.
fn mesh(family: Family, options: Options) -> (Mesh, App) {
    let mesh = Mesh::hbone(direct(options));
    let app = App::start(&mesh.server.ns, (family.any(), PORT).into(), app::echo);
    ready(&mesh.agent, &mesh.client, mesh.server.addr(family, PORT));
    (mesh, app)
}

/// What the access log has of connections that carried so many bytes to the server.
fn records(agent: &Agent, bytes: usize) -> Vec<BTreeMap<String, String>> {
    let carried = |entry: &BTreeMap<String, String>| {
        let field = if entry["direction"] == "outbound" {
            "bytes_sent"
        } else {
            "bytes_recv"
        };
        entry[field] == bytes.to_string()
    };
    let log = agent.access_log();
    log.into_iter().filter(carried).collect()
}

/// Segments between the two pods.
fn between(segments: &[Segment], a: &Pod, b: &Pod, family: Family) -> usize {
    let pair = [a.ip(family), b.ip(family)];
    let is = |segment: &&Segment| pair.contains(&segment.src.ip()) && pair.contains(&segment.dst.ip());
    segments.iter().filter(is).count()
}

fn nothing_is_on_a_wire_and_both_records_say_so(family: Family, mut options: Options) {
    // Nothing is in plain on a wire: strict pods may.
    options.arguments.push("--strict".to_owned());
    let (mesh, _app) = mesh(family, options);
    let Mesh {
        client,
        server,
        agent,
        ..
    } = &mesh;
    let before = joined(agent);
    let captures = [client, server].map(|pod| mesh.node.capture(pod));
    let (whole, port) = (server.addr(family, PORT), PORT + 1);
    assert_eq!(app::ask(&client.ns, whole, CANARY).unwrap(), CANARY);
    let _who = App::start(&server.ns, (family.any(), port).into(), app::who);
    let seen = app::ask_who(&client.ns, server.addr(family, port)).unwrap();
    assert_eq!(
        seen,
        client.ip(family).to_string(),
        "the application sees who calls"
    );
    // The other way.
    let _back = App::start(&client.ns, (family.any(), PORT).into(), app::echo);
    assert_eq!(
        app::ask(&server.ns, client.addr(family, PORT), CANARY).unwrap(),
        CANARY
    );
    assert_eq!(joined(agent), before + 3.0);
    for capture in captures {
        let segments = capture.stop();
        assert!(
            !contains(&segments, CANARY.as_bytes()),
            "the canary was on the wire"
        );
        assert_eq!(
            opened_ports(&segments),
            [0_u16; 0],
            "no connection was opened on the wire"
        );
    }
    let entries = wait::until("both records of both", || {
        let entries = records(agent, CANARY.len());
        (entries.len() == 4).then_some(entries)
    });
    for entry in &entries {
        let (from, to) = if entry["src.workload"] == "client" {
            (client, server)
        } else {
            (server, client)
        };
        assert_eq!(entry["security"], "same_node", "{entry:?}");
        assert_eq!(entry["src.identity"], from.identity(), "{entry:?}");
        assert_eq!(entry["dst.identity"], to.identity(), "{entry:?}");
        assert_eq!(entry["dst.workload"], to.name, "{entry:?}");
        assert_eq!(entry["dst.addr"], to.addr(family, PORT_HBONE).to_string());
        assert_eq!(entry["dst.hbone_addr"], to.addr(family, PORT).to_string());
        assert!(entry["src.addr"].parse::<SocketAddr>().unwrap().ip() == from.ip(family));
        assert!(!entry.contains_key("error"), "{entry:?}");
    }
    let outbound = entries.iter().filter(|entry| entry["direction"] == "outbound");
    assert_eq!(outbound.count(), 2);
    for sample in agent.metrics() {
        if sample.name == "redirector_plaintext_bytes_total" {
            assert_eq!(sample.value, 0.0, "{sample:?}");
        }
    }
}

fn by_a_service_and_to_itself(family: Family, options: Options) {
    let vips = [[10, 90, 0, 1].into(), "fd90::1".parse().unwrap()];
    let mesh = Mesh::enrolled(direct(options), |client, server| {
        let workloads = Workloads::hbone([client, server]);
        workloads.with_service("echo.demo.svc.cluster.local", &vips, 80, server, PORT)
    });
    let _app = App::start(&mesh.server.ns, (family.any(), PORT).into(), app::who);
    let vip = vips
        .into_iter()
        .find(|vip| vip.is_ipv4() == family.any().is_ipv4());
    let vip = SocketAddr::new(vip.unwrap(), 80);
    ready(&mesh.agent, &mesh.client, vip);
    for pod in [&mesh.client, &mesh.server] {
        let before = joined(&mesh.agent);
        let seen = app::ask_who(&pod.ns, vip).unwrap();
        assert_eq!(seen, pod.ip(family).to_string());
        assert_eq!(joined(&mesh.agent), before + 1.0, "{}", pod.name);
    }
    let by_service = |entry: &BTreeMap<String, String>| {
        entry["direction"] == "outbound"
            && entry
                .get("dst.service")
                .is_some_and(|name| name == "echo.demo.svc.cluster.local")
            && entry.get("security").is_some_and(|is| is == "same_node")
            && entry["dst.hbone_addr"] == mesh.server.addr(family, PORT).to_string()
    };
    wait::until("both by the service's name", || {
        (mesh
            .agent
            .access_log()
            .iter()
            .filter(|one| by_service(one))
            .count()
            >= 2)
            .then_some(())
    });
}

fn bulk_arrives_whole_and_fin_is_fin(family: Family, options: Options) {
    const BYTES: u64 = 64 << 20;
    let (mesh, _app) = mesh(family, options);
    let ports = [PORT + 1, PORT + 2];
    let handlers: [app::Handler; 2] = [app::hash, app::source];
    let _apps: Vec<App> = ports
        .iter()
        .zip(handlers)
        .map(|(port, handler)| App::start(&mesh.server.ns, (family.any(), *port).into(), handler))
        .collect();
    let connect = |port| app::connect(&mesh.client.ns, mesh.server.addr(family, port)).unwrap();
    let before = joined(&mesh.agent);
    // The answer comes after the end of what was asked.
    let mut up = connect(ports[0]);
    let sent = app::write_hashed(&mut up, BYTES).unwrap();
    up.shutdown(std::net::Shutdown::Write).unwrap();
    let mut hashed = String::new();
    up.read_to_string(&mut hashed).unwrap();
    assert_eq!(hashed, sent);
    let mut down = connect(ports[1]);
    writeln!(down, "{BYTES}").unwrap();
    assert_eq!(app::read_hashed(&mut down).unwrap(), sent);
    assert_eq!(joined(&mesh.agent), before + 2.0);
}

fn is_reset(stream: &mut TcpStream) {
    let end = stream.read(&mut [0]).unwrap_err();
    assert_eq!(end.kind(), io::ErrorKind::ConnectionReset, "{end}");
}

fn talk(stream: &mut TcpStream) {
    let mut answer = [0; 4];
    stream.write_all(b"ping").unwrap();
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"ping");
}

fn policies_refuse_and_close(family: Family, options: Options) {
    let (mesh, _app) = mesh(family, options);
    let server = mesh.server.addr(family, PORT);
    let mut open = app::connect(&mesh.client.ns, server).unwrap();
    talk(&mut open);
    let path = mesh.node.directory().join("workloads.yaml");
    let client = json!({"principals": [{"Exact": "cluster.local/ns/demo/sa/client"}]});
    Workloads::hbone([&mesh.client, &mesh.server])
        .with_policy("no-client", "Deny", &[client])
        .write(&path)
        .unwrap();
    is_reset(&mut open);
    let before = joined(&mesh.agent);
    refused(&mesh.client.ns, server);
    assert_eq!(joined(&mesh.agent), before + 1.0, "refused by the same way");
    for (direction, text) in [
        (
            "inbound",
            "closed due to policy change: DENY policy demo/no-client matches",
        ),
        ("inbound", "denied by policy: DENY policy demo/no-client matches"),
        ("outbound", "http status: 401 Unauthorized"),
    ] {
        wait::until(text, || {
            let log = mesh.agent.access_log();
            let told = |entry: &&BTreeMap<String, String>| {
                entry["direction"] == direction
                    && entry.get("security").is_some_and(|is| is == "same_node")
                    && entry.get("error").is_some_and(|error| error.contains(text))
            };
            log.iter().find(told).map(|_| ())
        });
    }
    // Undone, it is open again.
    Workloads::hbone([&mesh.client, &mesh.server])
        .write(&path)
        .unwrap();
    wait::until("the policy to be gone", || {
        (app::ask(&mesh.client.ns, server, "again").ok()? == "again").then_some(())
    });
}

fn the_end_of_either_pod_is_a_reset(family: Family, options: Options) {
    let (mesh, _app) = mesh(family, options);
    let port = PORT + 1;
    let bind = || TcpListener::bind((family.any(), port));
    let application = mesh.server.ns.run(bind).unwrap();
    let connect = || {
        let mut client = app::connect(&mesh.client.ns, mesh.server.addr(family, port)).unwrap();
        let (mut server, _) = application.accept().unwrap();
        server.set_read_timeout(Some(app::IO_DEADLINE)).unwrap();
        server.write_all(b"x").unwrap();
        client.read_exact(&mut [0]).unwrap();
        (client, server)
    };
    for pod in [&mesh.server, &mesh.client] {
        let before = joined(&mesh.agent);
        let (mut client, mut server) = connect();
        assert_eq!(joined(&mesh.agent), before + 1.0);
        mesh.agent.release(pod);
        // The released pod's own leg is no longer captured: what its kernel has to say goes nowhere.
        is_reset(if pod.name == "server" {
            &mut client
        } else {
            &mut server
        });
        mesh.agent.enrol(pod);
        ready(&mesh.agent, &mesh.client, mesh.server.addr(family, PORT));
    }
}

fn another_account_is_refused_as_over_hbone(family: Family, options: Options) {
    let mesh = Mesh::started(direct(options), |client, server| {
        Workloads::hbone([client, server])
    });
    mesh.agent.enrol(&mesh.client);
    let mut event = cni::event(&mesh.server);
    event["ServiceAccount"] = json!("admin");
    let answer = mesh.agent.post("/cmdadd", &event.to_string());
    assert_eq!(answer.status, 200, "{}", answer.body);
    let _app = App::start(&mesh.server.ns, (family.any(), PORT).into(), app::echo);
    refused(&mesh.client.ns, mesh.server.addr(family, PORT));
    let text =
        "the server is spiffe://cluster.local/ns/demo/sa/admin, not spiffe://cluster.local/ns/demo/sa/server";
    wait::until("the refusal in the log", || {
        mesh.agent.log().contains(text).then_some(())
    });
    // There has been a handshake: it is not for want of certificates that they are not joined.
    refused(&mesh.client.ns, mesh.server.addr(family, PORT));
    assert_eq!(joined(&mesh.agent), 0.0);
}

fn an_address_that_two_pods_have_is_reached_over_hbone(family: Family, options: Options) {
    let (mesh, _app) = mesh(family, options);
    let server = mesh.server.addr(family, PORT);
    // It is on no bridge, so the network knows whose the address is.
    let twin = mesh.node.twin(&mesh.server, "twin");
    mesh.agent.enrol(&twin);
    let before = joined(&mesh.agent);
    let capture = mesh.node.capture(&mesh.client);
    assert_eq!(app::ask(&mesh.client.ns, server, CANARY).unwrap(), CANARY);
    assert_eq!(joined(&mesh.agent), before);
    let segments = capture.stop();
    assert!(between(&segments, &mesh.client, &mesh.server, family) > 0);
    assert!(!contains(&segments, CANARY.as_bytes()));
    mesh.agent.release(&twin);
    assert_eq!(app::ask(&mesh.client.ns, server, CANARY).unwrap(), CANARY);
    assert_eq!(joined(&mesh.agent), before + 1.0);
}

fn it_is_off_by_default(family: Family, options: Options) {
    let mesh = Mesh::hbone(options);
    let _app = App::start(&mesh.server.ns, (family.any(), PORT).into(), app::echo);
    let capture = mesh.node.capture(&mesh.client);
    for _ in 0..3 {
        assert_eq!(
            app::ask(&mesh.client.ns, mesh.server.addr(family, PORT), CANARY).unwrap(),
            CANARY
        );
    }
    assert_eq!(opened_ports(&capture.stop()), [PORT_HBONE]);
    assert_eq!(joined(&mesh.agent), 0.0);
    let entries = wait::until("all records", || {
        let entries = records(&mesh.agent, CANARY.len());
        (entries.len() == 6).then_some(entries)
    });
    assert!(entries.iter().all(|entry| entry["security"] != "same_node"));
}
