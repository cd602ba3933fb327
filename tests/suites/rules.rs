//! Include and exclude rules, of a pod and of the node: which connections are captured, and that a change touches no open one.

use std::{
    collections::BTreeMap,
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    path::Path,
    process::ExitCode,
};

use redirector_tests::{
    agent::{Agent, Options, Redirect},
    app::{self, App},
    cni,
    counters::verdicts,
    mesh::{Mesh, PORT},
    node::{Family, Host, Node, Pod},
    suite::{Needs, case, main as suite, on_every_attachment},
    wait,
    workloads::Workloads,
};
use serde_json::json;

type Test = fn(Family, Options);

const TESTS: &[(&str, Test)] = &[
    ("outbound_ports", outbound_ports),
    ("outbound_networks", outbound_networks),
    ("inbound_ports", inbound_ports),
    ("inbound_networks", inbound_networks),
    ("a_gateway_takes_hbone_alone", a_gateway_takes_hbone_alone),
    ("the_rules_file_changes_live", the_rules_file_changes_live),
    ("annotations_change_live", annotations_change_live),
    ("rules_outlive_the_agent", rules_outlive_the_agent),
];

fn main() -> ExitCode {
    let mut cases = on_every_attachment(TESTS);
    cases.push(case("a_wrong_rule_is_refused", a_wrong_rule_is_refused));
    cases.push(case("a_wrong_rules_file_is_told", a_wrong_rules_file_is_told));
    cases.push(case(
        "a_rules_file_that_becomes_wrong_changes_nothing",
        a_rules_file_that_becomes_wrong_changes_nothing,
    ));
    cases.push(case(
        "a_pod_that_cannot_have_new_rules_is_still_repaired",
        a_pod_that_cannot_have_new_rules_is_still_repaired,
    ));
    suite(Needs::Agent, 2, cases)
}

/// A mesh whose client and server are enrolled with annotations.
fn annotated(options: Options, client: &[(&str, &str)], server: &[(&str, &str)]) -> Mesh {
    let mesh = Mesh::started(options, |client, server| Workloads::hbone([client, server]));
    enrol(&mesh, &mesh.client, client);
    enrol(&mesh, &mesh.server, server);
    mesh
}

fn enrol(mesh: &Mesh, pod: &Pod, annotations: &[(&str, &str)]) {
    let answer = mesh.agent.post("/cmdadd", &event(pod, annotations));
    assert_eq!(answer.status, 200, "{}", answer.body);
}

fn event(pod: &Pod, annotations: &[(&str, &str)]) -> String {
    let mut event = cni::event(pod);
    event["Annotations"] = annotations
        .iter()
        .map(|(name, value)| ((*name).to_owned(), json!(value)))
        .collect();
    event.to_string()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Through the pod's proxy.
    Captured,
    /// Past it.
    LeftAlone,
}

/// Opens a connection, uses it, and looks which way it went as far as `pod` is concerned; the answering application sees the caller.
fn way(mesh: &Mesh, pod: &Pod, program: &str, from: &Host, to: SocketAddr) -> Way {
    let count = || {
        let samples = mesh.agent.metrics();
        let of = |verdict: &str| verdicts(&samples, &pod.uid, program, verdict);
        let captured = if program == "egress" {
            of("captured")
        } else {
            of("inbound") + of("hbone")
        };
        (captured, of("excluded"))
    };
    let before = count();
    let family = if to.is_ipv4() { Family::V4 } else { Family::V6 };
    assert_eq!(app::ask_who(&from.ns, to).unwrap(), from.ip(family).to_string());
    let after = count();
    match (after.0 > before.0, after.1 > before.1) {
        (true, false) => Way::Captured,
        (false, true) => Way::LeftAlone,
        other => panic!(
            "from {} to {to}: captured and excluded: {other:?}",
            from.ip(family)
        ),
    }
}

fn serve(host: &Host, family: Family, port: u16) -> App {
    App::start(&host.ns, (family.any(), port).into(), app::who)
}

fn outbound_ports(family: Family, options: Options) {
    let exclude = annotated(
        options.clone(),
        &[("redirector.io/exclude-outbound-ports", "8081, 9000-9010")],
        &[],
    );
    let include = annotated(
        options,
        &[("redirector.io/include-outbound-ports", "8081, 9000-9010")],
        &[],
    );
    for (port, listed) in [
        (8080, false),
        (8081, true),
        (8999, false),
        (9000, true),
        (9010, true),
        (9011, false),
    ] {
        for (mesh, captured) in [(&exclude, !listed), (&include, listed)] {
            let expected = if captured { Way::Captured } else { Way::LeftAlone };
            for to in [&mesh.node.outside, &*mesh.server] {
                let _app = serve(to, family, port);
                let found = way(mesh, &mesh.client, "egress", &mesh.client, to.addr(family, port));
                assert_eq!(found, expected, "port {port} of {}", to.ip(family));
            }
        }
    }
}

fn outbound_networks(family: Family, options: Options) {
    let networks = "192.0.2.0/30,fd77:ffff::/64";
    let exclude = annotated(
        options.clone(),
        &[("redirector.io/exclude-outbound-networks", networks)],
        &[],
    );
    let include = annotated(
        options.clone(),
        &[("redirector.io/include-outbound-networks", networks)],
        &[],
    );
    // What is excluded stays so within what is included.
    let both = annotated(
        options,
        &[
            ("redirector.io/include-outbound-networks", "*"),
            ("redirector.io/exclude-outbound-networks", networks),
        ],
        &[],
    );
    for (mesh, outside, server) in [
        (&exclude, Way::LeftAlone, Way::Captured),
        (&include, Way::Captured, Way::LeftAlone),
        (&both, Way::LeftAlone, Way::Captured),
    ] {
        for (to, expected) in [(&mesh.node.outside, outside), (&*mesh.server, server)] {
            let _app = serve(to, family, PORT);
            let found = way(mesh, &mesh.client, "egress", &mesh.client, to.addr(family, PORT));
            assert_eq!(found, expected, "{}", to.ip(family));
        }
    }
}

fn inbound_ports(family: Family, options: Options) {
    let exclude = annotated(
        options.clone(),
        &[],
        &[("redirector.io/exclude-inbound-ports", "8081-8082")],
    );
    let include = annotated(
        options,
        &[],
        &[("redirector.io/include-inbound-ports", "8081-8082")],
    );
    for (port, listed) in [(8080, false), (8081, true), (8082, true), (8083, false)] {
        for (mesh, captured) in [(&exclude, !listed), (&include, listed)] {
            let expected = if captured { Way::Captured } else { Way::LeftAlone };
            let _app = serve(&mesh.server, family, port);
            for from in [&mesh.node.outside, &*mesh.stranger] {
                let found = way(mesh, &mesh.server, "lookup", from, mesh.server.addr(family, port));
                assert_eq!(found, expected, "port {port} from {}", from.ip(family));
            }
            // HBONE is never left alone, whatever it leads to. It goes by the connection that is there.
            let at = mesh.server.addr(family, port);
            assert_eq!(
                app::ask_who(&mesh.client.ns, at).unwrap(),
                mesh.client.ip(family).to_string()
            );
            wait::until("the access log", || {
                let tunnelled =
                    |entry: &BTreeMap<String, String>| entry.get("dst.hbone_addr") == Some(&at.to_string());
                mesh.agent.access_log().iter().any(tunnelled).then_some(())
            });
        }
    }
}

fn inbound_networks(family: Family, options: Options) {
    let networks = "192.0.2.2,fd77:ffff::2";
    let exclude = annotated(
        options.clone(),
        &[],
        &[("redirector.io/exclude-inbound-networks", networks)],
    );
    let include = annotated(
        options,
        &[],
        &[("redirector.io/include-inbound-networks", networks)],
    );
    for (mesh, outside, stranger) in [
        (&exclude, Way::LeftAlone, Way::Captured),
        (&include, Way::Captured, Way::LeftAlone),
    ] {
        let _app = serve(&mesh.server, family, PORT);
        for (from, expected) in [(&mesh.node.outside, outside), (&*mesh.stranger, stranger)] {
            let found = way(mesh, &mesh.server, "lookup", from, mesh.server.addr(family, PORT));
            assert_eq!(found, expected, "{}", from.ip(family));
        }
    }
}

fn a_gateway_takes_hbone_alone(family: Family, options: Options) {
    let mesh = annotated(
        options,
        &[],
        &[("ambient.istio.io/bypass-inbound-capture", "true")],
    );
    let _app = serve(&mesh.server, family, PORT);
    let at = mesh.server.addr(family, PORT);
    assert_eq!(
        way(&mesh, &mesh.server, "lookup", &mesh.stranger, at),
        Way::LeftAlone
    );
    assert_eq!(
        way(&mesh, &mesh.server, "lookup", &mesh.client, at),
        Way::Captured
    );
    let _outside = serve(&mesh.node.outside, family, PORT);
    let out = mesh.node.outside.addr(family, PORT);
    assert_eq!(
        way(&mesh, &mesh.server, "egress", &mesh.server, out),
        Way::Captured
    );
}

/// Sends something and gets it back.
fn talk(stream: &mut TcpStream) {
    let mut buffer = [0; 4];
    stream.write_all(b"ping").unwrap();
    stream.read_exact(&mut buffer).unwrap();
    assert_eq!(&buffer, b"ping");
}

/// Changes the rules to and fro; a connection from each time in between goes on to the end.
fn changes_live(mesh: &Mesh, family: Family, change: impl Fn(bool)) {
    let _echo = App::start(&mesh.node.outside.ns, (family.any(), PORT).into(), app::echo);
    let _who = serve(&mesh.node.outside, family, PORT + 1);
    let (to, asked) = (
        mesh.node.outside.addr(family, PORT),
        mesh.node.outside.addr(family, PORT + 1),
    );
    let mut streams = Vec::new();
    for excluded in [false, true, false, true] {
        change(excluded);
        let expected = if excluded { Way::LeftAlone } else { Way::Captured };
        wait::until("the new rules", || {
            (way(mesh, &mesh.client, "egress", &mesh.client, asked) == expected).then_some(())
        });
        streams.push(app::connect(&mesh.client.ns, to).unwrap());
        streams.iter_mut().for_each(talk);
    }
    let resets = redirector_tests::counters::kernel(&mesh.client.ns, "Tcp", "EstabResets");
    assert_eq!(resets, 0);
}

fn the_rules_file_changes_live(family: Family, options: Options) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("rules.yaml");
    let write = |excluded: bool| {
        let ports = if excluded { "[8080, 8081]" } else { "[]" };
        let text =
            format!("pods:\n- {{namespace: demo, name: client, rules: {{excludeOutboundPorts: {ports}}}}}\n");
        let new = directory.path().join("new");
        fs::write(&new, text).unwrap();
        fs::rename(new, &path).unwrap();
    };
    write(false);
    let arguments = vec!["--rules".to_owned(), path.display().to_string()];
    let mesh = Mesh::hbone(Options { arguments, ..options });
    changes_live(&mesh, family, write);
}

fn annotations_change_live(family: Family, options: Options) {
    let mesh = Mesh::hbone(options);
    changes_live(&mesh, family, |excluded| {
        let ports = if excluded { "8080-8081" } else { "" };
        enrol(
            &mesh,
            &mesh.client,
            &[("redirector.io/exclude-outbound-ports", ports)],
        );
    });
}

fn rules_outlive_the_agent(family: Family, options: Options) {
    let annotations = [("redirector.io/exclude-outbound-ports", "8081")];
    let mut mesh = annotated(options, &annotations, &[]);
    let _apps = [8080, 8081].map(|port| serve(&mesh.node.outside, family, port));
    let alone = mesh.node.outside.addr(family, 8081);
    mesh.agent.kill();
    // What is excluded needs no proxy.
    app::ask_who(&mesh.client.ns, alone).unwrap();
    mesh.agent.restart(&mesh.node);
    assert_eq!(
        way(&mesh, &mesh.client, "egress", &mesh.client, alone),
        Way::LeftAlone
    );
    let captured = mesh.node.outside.addr(family, 8080);
    assert_eq!(
        way(&mesh, &mesh.client, "egress", &mesh.client, captured),
        Way::Captured
    );
}

fn a_wrong_rule_is_refused() {
    let mesh = Mesh::started(Options::default(), |client, server| {
        Workloads::hbone([client, server])
    });
    let many: Vec<_> = (0..200).map(|port| (port * 2 + 1).to_string()).collect();
    for (name, value, status, text) in [
        (
            "redirector.io/exclude-outbound-ports",
            "http",
            400,
            "neither a port",
        ),
        (
            "redirector.io/include-inbound-networks",
            "10.0.0.0/40",
            400,
            "neither an address nor a network",
        ),
        (
            "redirector.io/exclude-outbound-ports",
            &many.join(","),
            500,
            "at most 128",
        ),
    ] {
        let answer = mesh.agent.post("/cmdadd", &event(&mesh.client, &[(name, value)]));
        assert_eq!(answer.status, status, "{}", answer.body);
        assert!(answer.body.contains(text), "{}", answer.body);
    }
    // A captured pod keeps the rules that it has.
    enrol(
        &mesh,
        &mesh.client,
        &[("redirector.io/exclude-outbound-ports", "8081")],
    );
    let answer = mesh.agent.post(
        "/cmdadd",
        &event(
            &mesh.client,
            &[("redirector.io/exclude-outbound-ports", &many.join(","))],
        ),
    );
    assert_eq!(answer.status, 500, "{}", answer.body);
    let _app = serve(&mesh.node.outside, Family::V4, 8081);
    let to = mesh.node.outside.addr(Family::V4, 8081);
    assert_eq!(
        way(&mesh, &mesh.client, "egress", &mesh.client, to),
        Way::LeftAlone
    );
}

/// More items than a pod may have.
fn too_many() -> String {
    let ports: Vec<_> = (1..130).map(|number| (2 * number).to_string()).collect();
    format!("node: {{excludeOutboundPorts: [{}]}}\n", ports.join(","))
}

fn a_wrong_rules_file_is_told() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("rules.yaml");
    for (redirect, text, says) in [
        (
            Redirect::Ebpf,
            "node: {excludeOutboundPorts: [x]}\n",
            "rules.yaml: node.excludeOutboundPorts: ",
        ),
        (
            Redirect::Ebpf,
            &too_many(),
            "rules.yaml: node: 129 ports and networks",
        ),
        (
            Redirect::IptablesNft,
            "pods: [{namespace: a, rules: {dnsCapture: true}}]\n",
            "rules.yaml: pods[0].rules: DNS capture and interfaces to reroute are not for iptables mode",
        ),
    ] {
        fs::write(&path, text).unwrap();
        let node = Node::new();
        let options = Options {
            redirect,
            arguments: vec!["--rules".to_owned(), path.display().to_string()],
            ..Options::default()
        };
        let error = Agent::try_start(&node, &Workloads::default(), options).unwrap_err();
        let text = format!("{error:#}");
        assert!(text.contains(says), "{text}");
    }
}

/// A mesh whose client leaves port 8081 alone, by a file, and what writes another such file.
fn by_a_file(directory: &Path) -> (Mesh, impl Fn(&str)) {
    let (path, new) = (directory.join("rules.yaml"), directory.join("new"));
    let arguments = vec!["--rules".to_owned(), path.display().to_string()];
    let write = move |text: &str| {
        fs::write(&new, text).unwrap();
        fs::rename(&new, &path).unwrap();
    };
    write(LEAVE_ALONE);
    let options = Options {
        arguments,
        ..Options::default()
    };
    (Mesh::hbone(options), write)
}

const LEAVE_ALONE: &str = "node: {excludeOutboundPorts: 8081}\n";

fn a_rules_file_that_becomes_wrong_changes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let (mesh, write) = by_a_file(directory.path());
    let _app = serve(&mesh.node.outside, Family::V4, 8081);
    let to = mesh.node.outside.addr(Family::V4, 8081);
    let told = |times: usize| {
        wait::until("the error to be told", || {
            let log = mesh.agent.log();
            (log.matches("rules file not usable").count() == times).then_some(())
        });
        assert_eq!(
            way(&mesh, &mesh.client, "egress", &mesh.client, to),
            Way::LeftAlone
        );
    };
    write(&too_many());
    told(1);
    fs::remove_file(directory.path().join("rules.yaml")).unwrap();
    told(2);
    write("node: {excludeOutboundPorts: []}\n");
    wait::until("the new rules", || {
        (way(&mesh, &mesh.client, "egress", &mesh.client, to) == Way::Captured).then_some(())
    });
}

/// Nobody answers its DNS, which the new rules want captured.
fn a_pod_that_cannot_have_new_rules_is_still_repaired() {
    let directory = tempfile::tempdir().unwrap();
    let (mesh, write) = by_a_file(directory.path());
    let _app = serve(&mesh.node.outside, Family::V4, 8081);
    let to = mesh.node.outside.addr(Family::V4, 8081);
    let errors = || -> Vec<String> {
        let pods = mesh.agent.pods();
        let errors = pods.iter().filter_map(|pod| pod["error"].as_str());
        errors.map(str::to_owned).collect()
    };
    write("node: {dnsCapture: true}\n");
    wait::until("both pods to be refused", || (errors().len() == 2).then_some(()));
    for error in errors() {
        assert!(
            error.contains("the pod's newest rules are refused") && error.contains("port 15053"),
            "{error}"
        );
    }
    for command in ["-4 rule del priority 32763", "-4 route flush table 1337"] {
        mesh.client.ns.ip_output(command);
    }
    wait::until("what was removed to be put back", || {
        let rules = mesh.client.ns.ip_output("-4 rule show");
        let routes = mesh.client.ns.ip_output("-4 route show table 1337");
        (rules.contains("32763:") && !routes.trim().is_empty()).then_some(())
    });
    assert_eq!(errors().len(), 2);
    assert_eq!(
        way(&mesh, &mesh.client, "egress", &mesh.client, to),
        Way::LeftAlone
    );
    let told = mesh.agent.log();
    assert_eq!(told.matches("newest rules are refused").count(), 2, "{told}");
    write(LEAVE_ALONE);
    wait::until("the pods to be as they should be", || {
        errors().is_empty().then_some(())
    });
}
