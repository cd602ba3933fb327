//! Virtual interfaces: what somebody behind a pod opens to elsewhere goes through the pod's proxy, and the rest is left alone.

use std::{
    collections::BTreeSet,
    io::{Read, Write},
    net::{TcpStream, UdpSocket},
    process::ExitCode,
    time::Duration,
};

use redirector_tests::{
    agent::Options,
    app::{self, App},
    capture::{contains, opened_ports},
    cni::{self, Answer},
    counters::verdicts,
    inner::{self, INTERFACE, Link},
    mesh::{Mesh, PORT, refused},
    node::{Family, Host, Pod},
    suite::{Needs, case, main as suite, on_every_attachment},
    wait,
    workloads::Workloads,
};
use serde_json::json;
use socket2::{Domain, Protocol, Socket, Type};

/// What the agent finds at most 2 s after it is gone, with time for a busy machine.
const REPAIRED: Duration = Duration::from_secs(5);

type Test = fn(Family, Options);

const TESTS: &[(&str, Test)] = &[
    ("tcp_goes_through_the_proxy", tcp_goes_through_the_proxy),
    (
        "a_bridge_is_an_interface_as_well",
        a_bridge_is_an_interface_as_well,
    ),
    ("udp_and_icmp_are_left_alone", udp_and_icmp_are_left_alone),
    ("the_pod_is_reached_from_behind", the_pod_is_reached_from_behind),
    ("connections_from_before_go_on", connections_from_before_go_on),
    ("interfaces_may_come_and_go", interfaces_may_come_and_go),
    ("without_a_proxy_it_is_refused", without_a_proxy_it_is_refused),
    ("without_the_rule_nothing_leaves", without_the_rule_nothing_leaves),
    (
        "without_the_annotation_it_is_forwarded",
        without_the_annotation_it_is_forwarded,
    ),
];

fn main() -> ExitCode {
    let mut cases = on_every_attachment(TESTS);
    for (attach, options) in [("tcx", Options::default()), ("old_kernel", Options::old_kernel())] {
        cases.push(case(format!("interfaces_need_no_address_{attach}"), move || {
            interfaces_need_no_address(options)
        }));
    }
    cases.push(case(
        "the_pods_own_interface_is_refused",
        the_pods_own_interface_is_refused,
    ));
    suite(Needs::Agent, 2, cases)
}

fn started(options: Options) -> Mesh {
    Mesh::started(options, |client, server| Workloads::hbone([client, server]))
}

fn enrol(mesh: &Mesh, pod: &Pod, interfaces: &str) -> Answer {
    let mut event = cni::event(pod);
    event["Annotations"] = json!({"istio.io/reroute-virtual-interfaces": interfaces});
    mesh.agent.post("/cmdadd", &event.to_string())
}

/// A mesh of two enrolled pods, and somebody behind the client.
fn behind(options: Options, link: Link) -> (Host, Mesh) {
    let mesh = started(options);
    let vm = inner::behind(&mesh.node, &mesh.client, link);
    enrolled(&mesh);
    (vm, mesh)
}

fn enrolled(mesh: &Mesh) {
    let answer = enrol(mesh, &mesh.client, INTERFACE);
    assert_eq!(answer.status, 200, "{}\n{}", answer.body, mesh.agent.log());
    mesh.agent.enrol(&mesh.server);
}

fn rerouted(mesh: &Mesh) -> f64 {
    verdicts(&mesh.agent.metrics(), &mesh.client.uid, "ingress", "rerouted")
}

/// Whom the application of `to` sees when `from` calls.
fn seen(from: &Host, to: &Host, family: Family) -> String {
    let _app = App::start(&to.ns, (family.any(), PORT).into(), app::who);
    app::ask_who(&from.ns, to.addr(family, PORT)).unwrap()
}

/// The server and the outside see the pod's address, from which its proxy calls, and the wire to the server has HBONE alone.
fn captured(vm: &Host, mesh: &Mesh, family: Family) {
    let before = rerouted(mesh);
    let capture = mesh.node.capture(&mesh.server);
    let pod = mesh.client.ip(family).to_string();
    assert_eq!(seen(vm, &mesh.server, family), pod);
    let segments = capture.stop();
    // None, where a tunnel is there already.
    let opened = opened_ports(&segments);
    assert!(opened.iter().all(|port| *port == 15008), "{opened:?}");
    assert!(!contains(&segments, b"hello"));
    assert_eq!(seen(vm, &mesh.node.outside, family), pod);
    assert!(rerouted(mesh) >= before + 2.0);
}

fn tcp_goes_through_the_proxy(family: Family, options: Options) {
    let (vm, mesh) = behind(options, Link::Veth);
    captured(&vm, &mesh, family);
    // More than a handful of packets, both ways.
    let _app = App::start(&mesh.server.ns, (family.any(), PORT + 1).into(), app::hash);
    let mut stream = app::connect(&vm.ns, mesh.server.addr(family, PORT + 1)).unwrap();
    let sent = app::write_hashed(&mut stream, 20_000_000).unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert_eq!(answer, sent);
    // The pod's own are as ever.
    assert_eq!(
        seen(&mesh.client, &mesh.server, family),
        mesh.client.ip(family).to_string()
    );
    refused(&vm.ns, mesh.server.addr(family, 9));

    // No trace of it once the pod is released.
    mesh.agent.release(&mesh.client);
    assert_eq!(seen(&vm, &mesh.node.outside, family), vm.ip(family).to_string());
    let flag = if family == Family::V4 { "-4" } else { "-6" };
    let rules = mesh.client.ns.ip_output(&format!("{flag} rule show"));
    assert!(!rules.contains("1337"), "{rules}");
}

fn a_bridge_is_an_interface_as_well(family: Family, options: Options) {
    let (vm, mesh) = behind(options, Link::Bridge);
    captured(&vm, &mesh, family);
}

fn udp_and_icmp_are_left_alone(family: Family, options: Options) {
    let (vm, mesh) = behind(options, Link::Veth);
    let bind = |host: &Host, port: u16| -> UdpSocket {
        let socket = host.ns.run(|| UdpSocket::bind((family.any(), port))).unwrap();
        socket.set_read_timeout(Some(app::IO_DEADLINE)).unwrap();
        socket
    };
    let (outside, inside) = (bind(&mesh.node.outside, 5353), bind(&vm, 0));
    inside
        .send_to(b"question", mesh.node.outside.addr(family, 5353))
        .unwrap();
    let mut buffer = [0; 64];
    let (length, from) = outside.recv_from(&mut buffer).unwrap();
    assert_eq!(
        (&buffer[..length], from.ip()),
        (b"question".as_slice(), vm.ip(family))
    );
    outside.send_to(b"answer", from).unwrap();
    let (length, _) = inside.recv_from(&mut buffer).unwrap();
    assert_eq!(&buffer[..length], b"answer");
    ping(&vm, &mesh.node.outside, family);
}

/// An echo request, and its answer.
fn ping(from: &Host, to: &Host, family: Family) {
    // Type, code, checksum, identifier, sequence; the kernel sums up for ICMPv6. RFC 792, RFC 4443.
    let (domain, protocol, request, reply) = match family {
        Family::V4 => {
            let sum = !(0x0800_u16 + 0x1234 + 0x0001);
            let [high, low] = sum.to_be_bytes();
            (
                Domain::IPV4,
                Protocol::ICMPV4,
                [8, 0, high, low, 0x12, 0x34, 0, 1],
                0,
            )
        }
        Family::V6 => (
            Domain::IPV6,
            Protocol::ICMPV6,
            [128, 0, 0, 0, 0x12, 0x34, 0, 1],
            129,
        ),
    };
    let socket = from
        .ns
        .run(|| Socket::new(domain, Type::RAW, Some(protocol)))
        .unwrap();
    socket.set_read_timeout(Some(app::IO_DEADLINE)).unwrap();
    socket.connect(&to.addr(family, 0).into()).unwrap();
    socket.send(&request).unwrap();
    let mut buffer = [0; 256];
    loop {
        let length = (&socket).read(&mut buffer).expect("an answer");
        // IPv4 comes with its header.
        let start = if family == Family::V4 { 20 } else { 0 };
        if buffer[start] == reply && buffer[start + 4..length] == request[4..] {
            return;
        }
    }
}

fn the_pod_is_reached_from_behind(family: Family, options: Options) {
    let (vm, mesh) = behind(options, Link::Veth);
    assert_eq!(seen(&vm, &mesh.client, family), vm.ip(family).to_string());
    // And the other way round.
    assert_eq!(
        seen(&mesh.client, &vm, family),
        match family {
            Family::V4 => "10.88.0.1",
            Family::V6 => "fd88::1",
        }
    );
}

fn talk(streams: &mut [TcpStream]) {
    for stream in streams {
        let mut buffer = [0; 4];
        stream.write_all(b"ping").unwrap();
        stream.read_exact(&mut buffer).unwrap();
        assert_eq!(&buffer, b"ping");
    }
}

fn connections_from_before_go_on(family: Family, options: Options) {
    let mesh = started(options);
    let vm = inner::behind(&mesh.node, &mesh.client, Link::Veth);
    let _apps = [&*mesh.server, &mesh.node.outside]
        .map(|host| App::start(&host.ns, (family.any(), PORT).into(), app::echo));
    let connect = |to: &Host| app::connect(&vm.ns, to.addr(family, PORT)).unwrap();
    let mut before = [connect(&mesh.server), connect(&mesh.node.outside)];
    talk(&mut before);
    enrolled(&mesh);
    talk(&mut before);
    let mut after = [connect(&mesh.server), connect(&mesh.node.outside)];
    talk(&mut after);
    assert!(rerouted(&mesh) >= 2.0);
    talk(&mut before);
    // What the file or the pod says anew is for new connections.
    let answer = enrol(&mesh, &mesh.client, "");
    assert_eq!(answer.status, 200, "{}", answer.body);
    talk(&mut before);
    assert_eq!(
        seen(&vm, &mesh.stranger, family),
        vm.ip(family).to_string(),
        "the pod's new rules name no interface"
    );
}

fn interfaces_may_come_and_go(family: Family, options: Options) {
    let mesh = started(options);
    // Enrolled before there is such an interface.
    enrolled(&mesh);
    for _ in 0..2 {
        let vm = inner::behind(&mesh.node, &mesh.client, Link::Veth);
        let _app = App::start(&mesh.node.outside.ns, (family.any(), PORT).into(), app::who);
        let pod = mesh.client.ip(family).to_string();
        wait::until("the interface to be found", || {
            let seen = app::ask_who(&vm.ns, mesh.node.outside.addr(family, PORT)).ok()?;
            (seen == pod).then_some(())
        });
        drop(_app);
        captured(&vm, &mesh, family);
        mesh.client.ns.ip(&[format!("link del {INTERFACE}")]).unwrap();
        mesh.node
            .host
            .ns
            .ip(&["route del 10.88.0.0/24", "route del fd88::/64"])
            .unwrap();
        drop(vm);
        assert_eq!(
            seen(&mesh.client, &mesh.server, family),
            mesh.client.ip(family).to_string()
        );
    }
}

fn interfaces_need_no_address(options: Options) {
    let mesh = started(options);
    let vm = inner::behind(&mesh.node, &mesh.client, Link::Unnumbered);
    enrolled(&mesh);
    captured(&vm, &mesh, Family::V4);
    // And are let go of.
    let answer = enrol(&mesh, &mesh.client, "");
    assert_eq!(answer.status, 200, "{}", answer.body);
    let packets = || {
        let samples = mesh.agent.metrics();
        ["rerouted", "rerouted_later"]
            .map(|verdict| verdicts(&samples, &mesh.client.uid, "ingress", verdict) as u64)
    };
    let before = packets();
    assert_eq!(
        seen(&vm, &mesh.node.outside, Family::V4),
        vm.ip(Family::V4).to_string()
    );
    assert_eq!(packets(), before);
    // Named once more, it is captured once more.
    let answer = enrol(&mesh, &mesh.client, INTERFACE);
    assert_eq!(answer.status, 200, "{}", answer.body);
    captured(&vm, &mesh, Family::V4);
}

fn without_a_proxy_it_is_refused(family: Family, options: Options) {
    let (vm, mut mesh) = behind(options, Link::Veth);
    let _apps = [&*mesh.server, &mesh.node.outside]
        .map(|host| App::start(&host.ns, (family.any(), PORT).into(), app::who));
    captured_once(&vm, &mesh, family);
    mesh.agent.kill();
    let capture = mesh.node.capture(&mesh.client);
    for host in [&*mesh.server, &mesh.node.outside] {
        refused(&vm.ns, host.addr(family, PORT));
    }
    assert_eq!(
        opened_ports(&capture.stop()),
        [0_u16; 0],
        "something left the pod"
    );
    mesh.agent.restart(&mesh.node);
    captured_once(&vm, &mesh, family);
}

/// Somebody removes the policy rule that delivers what arrives.
fn without_the_rule_nothing_leaves(family: Family, options: Options) {
    let (vm, mesh) = behind(options, Link::Veth);
    // Else packets of open connections are delivered by what their socket remembers, without a question to the rules.
    mesh.client
        .ns
        .set_sysctl("net/ipv4/tcp_early_demux", "0")
        .unwrap();
    let hosts = [&*mesh.server, &mesh.node.outside];
    let _apps = hosts.map(|host| {
        [
            App::start(&host.ns, (family.any(), PORT).into(), app::who),
            App::start(&host.ns, (family.any(), PORT + 1).into(), app::echo),
        ]
    });
    let mut open = hosts.map(|host| app::connect(&vm.ns, host.addr(family, PORT + 1)).unwrap());
    talk(&mut open);
    let flag = if family == Family::V4 { "-4" } else { "-6" };
    let rules = || {
        let shown = mesh.client.ns.ip_output(&format!("{flag} rule show"));
        shown.lines().map(str::to_owned).collect::<BTreeSet<_>>()
    };
    let whole = rules();

    // The agent can't put it back, and the proxy's listeners are there.
    mesh.agent.pause();
    mesh.client
        .ns
        .ip_output(&format!("{flag} rule del priority 32763 iif {INTERFACE}"));
    let capture = mesh.node.capture(&mesh.client);
    for stream in &mut open {
        stream.write_all(b"a secret").unwrap();
    }
    for host in hosts {
        refused(&vm.ns, host.addr(family, PORT));
    }
    let segments = capture.stop();
    assert_eq!(opened_ports(&segments), [0_u16; 0], "something left the pod");
    assert!(!contains(&segments, b"a secret"), "something left the pod");

    mesh.agent.resume();
    wait::within(REPAIRED, "the rule to be put back", || {
        (rules() == whole).then_some(())
    });
    for stream in &mut open {
        let mut buffer = [0; 8];
        stream.read_exact(&mut buffer).unwrap();
        assert_eq!(&buffer, b"a secret");
    }
    let undelivered = verdicts(&mesh.agent.metrics(), &mesh.client.uid, "egress", "undelivered");
    assert!(undelivered >= 4.0, "{undelivered}");
    captured_once(&vm, &mesh, family);
}

fn captured_once(vm: &Host, mesh: &Mesh, family: Family) {
    let seen = app::ask_who(&vm.ns, mesh.server.addr(family, PORT)).unwrap();
    assert_eq!(seen, mesh.client.ip(family).to_string());
}

fn without_the_annotation_it_is_forwarded(family: Family, options: Options) {
    let mesh = Mesh::hbone(options);
    let vm = inner::behind(&mesh.node, &mesh.client, Link::Veth);
    assert_eq!(seen(&vm, &mesh.node.outside, family), vm.ip(family).to_string());
    // Others can't use the pod's proxy by sending there.
    refused(&vm.ns, mesh.client.addr(family, 15001));
}

fn the_pods_own_interface_is_refused() {
    let mesh = started(Options::default());
    for (interfaces, status, why) in [
        ("eth0", 500, "eth0, which is the pod's own"),
        ("lo", 500, "lo, which is the pod's own"),
        ("a,b,c,d,e,f,g,h,i", 500, "at most 8 are supported"),
        ("no/name", 400, "no/name"),
    ] {
        let answer = enrol(&mesh, &mesh.client, interfaces);
        assert_eq!(answer.status, status, "{}", answer.body);
        assert!(answer.body.contains(why), "{}", answer.body);
        let rules = mesh.client.ns.ip_output("rule show");
        assert!(!rules.contains("1337"), "{rules}");
    }
}
