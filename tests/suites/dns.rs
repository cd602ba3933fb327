//! DNS capture: what a flagged pod asks of port 53 goes to whoever waits on 15053 in it, and to nobody when that is away.

use std::{collections::BTreeSet, fs, io, net::SocketAddr, process::ExitCode};

use redirector_tests::{
    agent::Options,
    app::{self, App},
    cni::{self, Answer},
    counters::verdicts,
    dns::{self, DnsProxy, DnsServer, FORWARD, Sockets},
    mesh::{Mesh, refused},
    node::{Family, Host, Pod},
    suite::{Needs, case, main as suite, on_every_attachment},
    wait,
    workloads::Workloads,
};
use serde_json::json;

type Test = fn(Family, Options);

const TESTS: &[(&str, Test)] = &[
    ("queries_are_answered_in_the_pod", queries_are_answered_in_the_pod),
    ("sockets_of_one_family_will_do", sockets_of_one_family_will_do),
    (
        "without_the_flag_dns_is_as_all_else",
        without_the_flag_dns_is_as_all_else,
    ),
    ("the_proxys_own_queries_pass", the_proxys_own_queries_pass),
    (
        "servers_of_the_pod_are_left_alone",
        servers_of_the_pod_are_left_alone,
    ),
    ("a_proxy_that_is_away_is_refused", a_proxy_that_is_away_is_refused),
    ("dns_outlives_the_agent", dns_outlives_the_agent),
];

fn main() -> ExitCode {
    let mut cases = on_every_attachment(TESTS);
    cases.push(case(
        "the_flag_is_refused_without_a_proxy",
        the_flag_is_refused_without_a_proxy,
    ));
    cases.push(case(
        "what_goes_is_put_back_even_while_dns_can_not_be_captured",
        what_goes_is_put_back_while_dns_can_not_be_captured,
    ));
    suite(Needs::Agent, 2, cases)
}

/// A mesh whose client has a DNS proxy, and the flag. The proxy ends before its pod.
fn flagged(options: Options, sockets: Sockets) -> (DnsProxy, Mesh) {
    let mesh = Mesh::started(options, |client, server| Workloads::hbone([client, server]));
    let proxy = DnsProxy::start(&mesh.client.ns, sockets);
    let answer = enrol(&mesh, &mesh.client);
    assert_eq!(answer.status, 200, "{}\n{}", answer.body, mesh.agent.log());
    mesh.agent.enrol(&mesh.server);
    (proxy, mesh)
}

fn enrol(mesh: &Mesh, pod: &Pod) -> Answer {
    let mut event = cni::event(pod);
    event["Annotations"] = json!({"ambient.istio.io/dns-capture": "true"});
    mesh.agent.post("/cmdadd", &event.to_string())
}

/// What a pod asks, as `host` with these answers.
fn asks(pod: &Host, server: SocketAddr) -> io::Result<String> {
    dns::ask(&pod.ns, server, "who?")
}

fn counted(mesh: &Mesh, program: &str, verdict: &str) -> f64 {
    verdicts(&mesh.agent.metrics(), &mesh.client.uid, program, verdict)
}

fn queries_are_answered_in_the_pod(family: Family, options: Options) {
    let (_proxy, mesh) = flagged(options, Sockets::DualStack);
    let _outside = DnsServer::start(&mesh.node.outside.ns, mesh.node.outside.addr(family, 53));
    // Whether there is a server or not.
    for host in [&mesh.node.outside, &*mesh.stranger, &*mesh.server] {
        let server = host.addr(family, 53);
        assert_eq!(asks(&mesh.client, server).unwrap(), format!("udp {server} who?"));
        assert_eq!(
            app::ask(&mesh.client.ns, server, "who?\n").unwrap(),
            format!("tcp {server} who?")
        );
    }
    // One socket, several servers, several queries under way.
    let socket = mesh
        .client
        .ns
        .run(|| std::net::UdpSocket::bind((family.any(), 0)))
        .unwrap();
    socket.set_read_timeout(Some(app::IO_DEADLINE)).unwrap();
    let servers = [&mesh.node.outside, &*mesh.stranger].map(|host| host.addr(family, 53));
    for server in servers {
        socket.send_to(b"who?", server).unwrap();
    }
    let mut answers: Vec<_> = servers.map(|_| answer(&socket)).into();
    answers.sort_by_key(|(from, _)| servers.iter().position(|server| server == from));
    let expected = servers.map(|server| (server, format!("udp {server} who?")));
    assert_eq!(answers, expected);
    assert!(counted(&mesh, "egress", "dns") >= 5.0);
    assert!(counted(&mesh, "lookup", "dns") >= 8.0);

    // Other ports are as without the flag.
    let _other = DnsServer::start(&mesh.node.outside.ns, mesh.node.outside.addr(family, 5353));
    let seen = asks(&mesh.client, mesh.node.outside.addr(family, 5353)).unwrap();
    assert!(
        seen.contains(&mesh.client.ip(family).to_string()),
        "{seen}: not from the pod"
    );
    let _app = App::start(&mesh.server.ns, (family.any(), 8080).into(), app::who);
    let seen = app::ask_who(&mesh.client.ns, mesh.server.addr(family, 8080)).unwrap();
    assert_eq!(seen, mesh.client.ip(family).to_string());

    mesh.agent.release(&mesh.client);
    let seen = asks(&mesh.client, mesh.node.outside.addr(family, 53)).unwrap();
    assert!(seen.starts_with("who? from "), "{seen}");
}

fn answer(socket: &std::net::UdpSocket) -> (SocketAddr, String) {
    let mut buffer = [0; 2048];
    let (length, from) = socket.recv_from(&mut buffer).unwrap();
    (from, String::from_utf8_lossy(&buffer[..length]).into_owned())
}

fn sockets_of_one_family_will_do(family: Family, options: Options) {
    let (_proxy, mesh) = flagged(options, Sockets::PerFamily);
    let server = mesh.node.outside.addr(family, 53);
    assert_eq!(asks(&mesh.client, server).unwrap(), format!("udp {server} who?"));
    assert_eq!(
        app::ask(&mesh.client.ns, server, "who?\n").unwrap(),
        format!("tcp {server} who?")
    );
}

fn without_the_flag_dns_is_as_all_else(family: Family, options: Options) {
    let mesh = Mesh::hbone(options);
    let _proxy = DnsProxy::start(&mesh.client.ns, Sockets::DualStack);
    let server = mesh.node.outside.addr(family, 53);
    let _udp = DnsServer::start(&mesh.node.outside.ns, server);
    let _tcp = App::start(&mesh.node.outside.ns, server, app::who);
    let seen = asks(&mesh.client, server).unwrap();
    assert!(seen.contains(&mesh.client.ip(family).to_string()), "{seen}");
    // By the pod's proxy, as any connection.
    let before = counted(&mesh, "lookup", "outbound");
    let seen = app::ask_who(&mesh.client.ns, server).unwrap();
    assert_eq!(seen, mesh.client.ip(family).to_string());
    assert!(counted(&mesh, "lookup", "outbound") > before);
    assert!(counted(&mesh, "lookup", "dns") < 1.0);
}

fn the_proxys_own_queries_pass(family: Family, options: Options) {
    let (_proxy, mesh) = flagged(options, Sockets::DualStack);
    let server = mesh.node.outside.addr(family, 53);
    let _outside = DnsServer::start(&mesh.node.outside.ns, server);
    let seen = dns::ask(&mesh.client.ns, server, &format!("{FORWARD}who?")).unwrap();
    let own = SocketAddr::from((mesh.client.ip(family), dns::PORT));
    assert_eq!(seen, format!("who? from {own}"));
}

fn servers_of_the_pod_are_left_alone(family: Family, options: Options) {
    let (_proxy, mesh) = flagged(options, Sockets::DualStack);
    let own = mesh.client.addr(family, 53);
    let _server = DnsServer::start(&mesh.client.ns, own);
    let _local = DnsServer::start(&mesh.client.ns, (family.loopback(), 53).into());
    for (from, to) in [
        (&*mesh.client, own),
        (&*mesh.client, (family.loopback(), 53).into()),
        (&*mesh.stranger, own),
        (&mesh.node.outside, own),
    ] {
        let seen = asks(from, to).unwrap();
        assert!(seen.starts_with("who? from "), "{to}: {seen}");
    }
}

fn a_proxy_that_is_away_is_refused(family: Family, options: Options) {
    let (proxy, mesh) = flagged(options, Sockets::DualStack);
    let server = mesh.node.outside.addr(family, 53);
    let _udp = DnsServer::start(&mesh.node.outside.ns, server);
    let _tcp = App::start(&mesh.node.outside.ns, server, app::who);
    assert!(asks(&mesh.client, server).is_ok());
    drop(proxy);
    // A sender that wants to know of errors learns of it as it sends.
    let socket = dns::resolver(&mesh.client.ns, server).unwrap();
    // The agent, which looks at the proxy's sockets just then, may keep one a moment longer.
    let error = wait::until("queries to be refused", || socket.send(b"who?").err());
    assert_eq!(error.raw_os_error(), Some(nix::libc::ENOBUFS), "{error}");
    refused(&mesh.client.ns, server);
    assert!(counted(&mesh, "egress", "dns_refused") >= 1.0);
    // One that is back is found within seconds.
    let _proxy = DnsProxy::start(&mesh.client.ns, Sockets::PerFamily);
    let seen = wait::until("the new DNS proxy to be found", || {
        socket.send(b"who?").ok()?;
        let mut buffer = [0; 2048];
        let length = socket.recv(&mut buffer).unwrap();
        Some(String::from_utf8_lossy(&buffer[..length]).into_owned())
    });
    assert_eq!(seen, format!("udp {server} who?"));
    assert_eq!(
        app::ask(&mesh.client.ns, server, "who?\n").unwrap(),
        format!("tcp {server} who?")
    );
}

fn dns_outlives_the_agent(family: Family, options: Options) {
    let (proxy, mut mesh) = flagged(options, Sockets::DualStack);
    let server = mesh.node.outside.addr(family, 53);
    let expected = format!("udp {server} who?");
    mesh.agent.kill();
    assert_eq!(asks(&mesh.client, server).unwrap(), expected);
    mesh.agent.restart(&mesh.node);
    assert_eq!(asks(&mesh.client, server).unwrap(), expected);
    assert_eq!(
        app::ask(&mesh.client.ns, server, "who?\n").unwrap(),
        format!("tcp {server} who?")
    );
    // The new agent knows of the listeners as the old one did: those that go leave the map.
    drop(proxy);
    let socket = dns::resolver(&mesh.client.ns, server).unwrap();
    // A look that is under way may keep one a moment longer.
    wait::until("queries to be refused", || socket.send(b"who?").err());
    refused(&mesh.client.ns, server);
}

fn the_flag_is_refused_without_a_proxy() {
    let mesh = Mesh::started(Options::default(), |client, server| {
        Workloads::hbone([client, server])
    });
    let server = mesh.node.outside.addr(Family::V4, 53);
    let _outside = DnsServer::start(&mesh.node.outside.ns, server);
    let refused = |why: &str| {
        let answer = enrol(&mesh, &mesh.client);
        assert_eq!(answer.status, 500, "{}", answer.body);
        for text in [why, "port 15053", "start the DNS proxy there first"] {
            assert!(answer.body.contains(text), "{}", answer.body);
        }
        // Nothing half done.
        assert!(asks(&mesh.client, server).unwrap().starts_with("who? from "));
        let rules = mesh.client.ns.ip_output("rule show");
        assert!(!rules.contains("1337"), "{rules}");
    };
    refused("TCP over IPv4");
    let udp = DnsProxy::start(&mesh.client.ns, Sockets::UdpAlone);
    refused("TCP over IPv4");
    drop(udp);
    // What any application could make is nobody's proxy.
    let ordinary = DnsProxy::start(&mesh.client.ns, Sockets::Ordinary);
    refused("transparent");
    drop(ordinary);
    let _proxy = DnsProxy::start(&mesh.client.ns, Sockets::DualStack);
    let answer = enrol(&mesh, &mesh.client);
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert_eq!(asks(&mesh.client, server).unwrap(), format!("udp {server} who?"));
}

/// The node's rules come to want the DNS of a pod that has no DNS proxy: they fail, and the rest is looked after all the same.
fn what_goes_is_put_back_while_dns_can_not_be_captured() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("rules.yaml");
    let write = |dns: bool| {
        let new = directory.path().join("new");
        let text = format!("pods:\n- {{namespace: demo, name: client, rules: {{dnsCapture: {dns}}}}}\n");
        fs::write(&new, text).unwrap();
        fs::rename(new, &path).unwrap();
    };
    write(false);
    let mesh = Mesh::hbone(Options {
        arguments: vec!["--rules".to_owned(), path.display().to_string()],
        ..Options::default()
    });
    let server = mesh.node.outside.addr(Family::V4, 53);
    let _outside = DnsServer::start(&mesh.node.outside.ns, server);
    write(true);
    wait::until("the rules to fail", || {
        mesh.agent
            .log()
            .contains("start the DNS proxy there first")
            .then_some(())
    });
    // Those of one priority stand in the order in which they were added.
    let rules = || -> BTreeSet<String> {
        let text = mesh.client.ns.ip_output("-4 rule show");
        text.lines().map(str::to_owned).collect()
    };
    let whole = rules();
    mesh.client.ns.ip_output("-4 rule del priority 32763");
    assert_ne!(rules(), whole);
    wait::until("the rule to be put back", || (rules() == whole).then_some(()));
    // Its DNS is not captured half.
    assert!(asks(&mesh.client, server).unwrap().starts_with("who? from "));
    let _proxy = DnsProxy::start(&mesh.client.ns, Sockets::DualStack);
    wait::until("the DNS to be captured", || {
        (asks(&mesh.client, server).ok()? == format!("udp {server} who?")).then_some(())
    });
}
