//! The kit itself, without an agent: what the other suites rest on holds.

use std::{path::Path, process::ExitCode, time::Duration};

use redirector_tests::{
    app::{self, App},
    capture::{contains, opened_ports},
    counters, netns,
    node::{Family, Node},
    process,
    suite::{Needs, case, main as suite},
};

fn main() -> ExitCode {
    let mut cases = vec![
        case("a_node_leaves_nothing", a_node_leaves_nothing),
        case(
            "what_a_dead_process_left_is_swept",
            what_a_dead_process_left_is_swept,
        ),
        case("programs_run_in_their_namespace", programs_run_in_their_namespace),
        case("a_refused_connection_is_counted", a_refused_connection_is_counted),
    ];
    for family in Family::BOTH {
        let name = family.name();
        cases.push(case(format!("everybody_reaches_everybody_{name}"), move || {
            everybody_reaches_everybody(family)
        }));
        cases.push(case(format!("plaintext_is_seen_on_the_wire_{name}"), move || {
            plaintext_is_seen(family)
        }));
        cases.push(case(format!("hashes_agree_over_the_wire_{name}"), move || {
            hashes_agree(family)
        }));
    }
    suite(Needs::Root, 2, cases)
}

fn everybody_reaches_everybody(family: Family) {
    let node = Node::new();
    let (client, server) = (node.pod("client"), node.pod("server"));
    let hosts = [&*client, &*server, &node.outside, &node.host];
    for to in hosts {
        let _app = App::start(&to.ns, (family.any(), 8080).into(), app::who);
        for from in hosts {
            let seen = app::ask_who(&from.ns, to.addr(family, 8080)).unwrap();
            let gateway = ["10.77.0.1", "192.0.2.1", "fd77::1", "fd77:ffff::1"].contains(&seen.as_str());
            assert!(seen == from.ip(family).to_string() || gateway, "{seen}");
        }
    }
}

fn plaintext_is_seen(family: Family) {
    let node = Node::new();
    let (client, server) = (node.pod("client"), node.pod("server"));
    let _app = App::start(&server.ns, (family.any(), 8080).into(), app::http);
    let capture = node.capture(&server);
    let (status, body) = app::http_get(&client.ns, server.addr(family, 8080), "/a-secret").unwrap();
    let segments = capture.stop();
    assert_eq!(
        (status, body),
        (
            200,
            format!("GET /a-secret HTTP/1.1\nyou are {}\n", client.ip(family))
        )
    );
    assert!(contains(&segments, b"GET /a-secret"));
    assert_eq!(opened_ports(&segments), [8080]);
}

fn hashes_agree(family: Family) {
    let node = Node::new();
    let (client, server) = (node.pod("client"), node.pod("server"));
    let _app = App::start(&server.ns, (family.any(), 8080).into(), app::hash);
    let mut stream = app::connect(&client.ns, server.addr(family, 8080)).unwrap();
    let sent = app::write_hashed(&mut stream, 8 << 20).unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut received = String::new();
    std::io::Read::read_to_string(&mut stream, &mut received).unwrap();
    assert_eq!(received, sent);
}

fn a_node_leaves_nothing() {
    let node = Node::new();
    let pod = node.pod("a");
    let files = [pod.ns.path(), node.host.ns.path(), node.directory().to_owned()];
    assert!(files.iter().all(|file| file.exists()));
    drop((pod, node));
    assert!(!files.iter().any(|file| file.exists()));
}

fn what_a_dead_process_left_is_swept() {
    // A process id above the kernel's highest: nobody has it.
    let name = "rdr4194305x0-left";
    std::mem::forget(netns::Namespace::create(name).unwrap());
    assert!(Path::new("/run/netns").join(name).exists());
    netns::sweep();
    assert!(!Path::new("/run/netns").join(name).exists());
}

fn programs_run_in_their_namespace() {
    let node = Node::new();
    let pod = node.pod("a");
    let mut ip = process::command(&pod.ns, "/usr/sbin/ip");
    let (status, text) = process::output(
        ip.args(["-4", "-o", "addr", "show", "eth0"]),
        Duration::from_secs(10),
    );
    assert!(status.success());
    assert!(text.contains(&pod.v4.to_string()), "{text}");
}

fn a_refused_connection_is_counted() {
    let node = Node::new();
    let (client, server) = (node.pod("client"), node.pod("server"));
    let before = counters::kernel(&server.ns, "Tcp", "OutRsts");
    app::connect(&client.ns, server.addr(Family::V4, 1)).unwrap_err();
    assert_eq!(counters::kernel(&server.ns, "Tcp", "OutRsts"), before + 1);
    assert_eq!(counters::kernel(&client.ns, "TcpExt", "TCPSynRetrans"), 0);
}
