//! Probes of the node's: they reach the application directly and from the node's own address, and nobody else's connections do,
//! whatever address or port they claim. Both families, three ways to attach.

use std::{
    net::SocketAddr,
    path::PathBuf,
    process::{Command, ExitCode},
    time::Duration,
};

use nix::sys::signal::Signal;
use redirector_tests::{
    agent::{Options, binary},
    app::{self, App},
    cgroup::{self, Cgroup, mount_point},
    counters,
    mesh::{Mesh, PORT, refused},
    netns::Namespace,
    node::{Family, Host, Node, Pod},
    process::{self, Process, command},
    suite::{Case, Needs, case, main as suite},
    wait,
    workloads::Workloads,
};
use socket2::{Domain, Socket, Type};

const DEADLINE: Duration = Duration::from_secs(60);

type Test = fn(Family, Options);

const TESTS: &[(&str, Test)] = &[
    ("probes_reach_the_application", probes_reach_the_application),
    ("a_cgroup_below_probes_as_well", a_cgroup_below_probes_as_well),
    ("others_are_captured", others_are_captured),
    ("a_spoofed_probe_is_captured", a_spoofed_probe_is_captured),
    (
        "any_process_of_the_node_may_probe",
        any_process_of_the_node_may_probe,
    ),
    ("nobody_may_probe", nobody_may_probe),
    ("ports_are_used_again", ports_are_used_again),
    ("cookies_do_not_matter", cookies_do_not_matter),
    ("probes_and_others_at_once", probes_and_others_at_once),
    ("a_syn_that_is_sent_again", a_syn_that_is_sent_again),
    ("ports_of_the_dial_range", ports_of_the_dial_range),
    ("the_hbone_port_stays_hbone", the_hbone_port_stays_hbone),
    (
        "the_node_may_get_another_address",
        the_node_may_get_another_address,
    ),
    ("probes_outlive_the_agent", probes_outlive_the_agent),
];

fn main() -> ExitCode {
    let clsact = Options {
        force_clsact: true,
        ..Options::default()
    };
    let mut cases: Vec<Case> = Vec::new();
    // Where there is no cgroup2, that is what has to be shown.
    if mount_point().is_some() {
        for (attach, options) in [
            ("tcx", Options::default()),
            ("clsact", clsact),
            ("old_kernel", Options::old_kernel()),
        ] {
            for family in Family::BOTH {
                for (name, test) in TESTS {
                    let options = options.clone();
                    let name = format!("{name}_{}_{attach}", family.name());
                    cases.push(case(name, move || test(family, options)));
                }
            }
        }
        cases.push(case(
            "kubelet_is_found_and_found_again",
            kubelet_is_found_and_found_again,
        ));
        cases.push(case(
            "a_kubelet_in_the_root_is_as_good_as_none",
            a_kubelet_in_the_root_is_as_good_as_none,
        ));
        cases.push(case("a_cgroup_may_come_later", a_cgroup_may_come_later));
    }
    cases.push(case(
        "without_cgroup2_the_node_may_probe",
        without_cgroup2_the_node_may_probe,
    ));
    suite(Needs::Agent, 2, cases)
}

/// An enrolled server with an application, and who may probe it.
struct Probed {
    _app: App,
    mesh: Mesh,
    cgroup: Cgroup,
    family: Family,
}

impl Probed {
    /// Processes in a cgroup of the test's own may probe.
    fn by_cgroup(family: Family, options: Options) -> Self {
        Self::start(family, options, |cgroup| cgroup.path().display().to_string())
    }

    fn start(family: Family, mut options: Options, sources: impl FnOnce(&Cgroup) -> String) -> Self {
        let cgroup = Cgroup::new();
        options
            .arguments
            .extend(["--probe-sources".to_owned(), sources(&cgroup)]);
        let mesh = Mesh::started(options, |client, server| Workloads::hbone([client, server]));
        keep_sockets_of_bridged_packets(&mesh.node);
        mesh.agent.enrol(&mesh.server);
        let app = App::start(&mesh.server.ns, (family.any(), PORT).into(), app::http);
        Self {
            _app: app,
            mesh,
            cgroup,
            family,
        }
    }

    fn addr(&self) -> SocketAddr {
        self.mesh.server.addr(self.family, PORT)
    }

    fn node(&self) -> &Host {
        &self.mesh.node.host
    }

    /// Probes from the node and the test's cgroup.
    fn probe(&self, arguments: &[&str]) -> String {
        let curl = curl(&self.node().ns, self.addr(), arguments);
        run(&mut self.cgroup.command(&curl))
    }

    /// A SYN with the node's address and this port, from somebody else.
    fn spoof(&self, from: &Host, port: u16) -> Seen {
        let looked_up = || {
            let count = |verdict: &str| verdicts(&self.mesh, &self.mesh.server, "lookup", verdict);
            count("probe") + count("inbound")
        };
        let before = looked_up();
        self.seen(|| {
            send_syn(from, self.node().addr(self.family, port), self.addr());
            wait::until("the SYN to arrive", || (looked_up() > before).then_some(()));
        })
    }

    /// What the server's programs made of what `f` does: probes and captured inbound connections, as ingress and the lookup see them.
    fn seen(&self, f: impl FnOnce()) -> Seen {
        let count = |program: &str, verdict: &str| verdicts(&self.mesh, &self.mesh.server, program, verdict);
        let now = || Seen {
            ingress: count("ingress", "probe"),
            lookup: count("lookup", "probe"),
            captured: count("lookup", "inbound"),
        };
        let before = now();
        f();
        let after = now();
        Seen {
            ingress: after.ingress - before.ingress,
            lookup: after.lookup - before.lookup,
            captured: after.captured - before.captured,
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Seen {
    ingress: u64,
    lookup: u64,
    captured: u64,
}

const ONE_PROBE: Seen = Seen {
    ingress: 1,
    lookup: 1,
    captured: 0,
};
const ONE_CAPTURED: Seen = Seen {
    ingress: 0,
    lookup: 0,
    captured: 1,
};

/// A bridge that asks netfilter drops the sender's socket from the packet, which makes it easy to tell pods from the node.
fn keep_sockets_of_bridged_packets(node: &Node) {
    for family in ["iptables", "ip6tables"] {
        // Absent where bridges can't ask.
        let _ = node
            .host
            .ns
            .set_sysctl(&format!("net/bridge/bridge-nf-call-{family}"), "0");
    }
}

fn verdicts(mesh: &Mesh, pod: &Pod, program: &str, verdict: &str) -> u64 {
    let samples = mesh.agent.metrics();
    let sample = samples.iter().find(|sample| {
        let label = |name: &str| sample.labels.get(name).map(String::as_str);
        sample.name == "redirector_verdicts_total"
            && label("pod") == Some(&pod.uid)
            && label("program") == Some(program)
            && label("verdict") == Some(verdict)
    });
    sample
        .unwrap_or_else(|| panic!("no counter {program}/{verdict} of {}", pod.name))
        .value as u64
}

fn curl(ns: &Namespace, addr: SocketAddr, arguments: &[&str]) -> Command {
    let mut curl = command(ns, "curl");
    curl.args(["-q", "-sS", "--noproxy", "*", "--max-time", "50"])
        .args(arguments)
        .arg(format!("http://{addr}/"));
    curl
}

/// What a command prints; it must succeed.
fn run(command: &mut Command) -> String {
    let (status, text) = process::output(command, DEADLINE);
    assert!(status.success(), "{status}: {text}");
    text
}

fn you_are(text: &str, ip: impl ToString) -> bool {
    text.ends_with(&format!("you are {}\n", ip.to_string()))
}

/// Sends a SYN from an address that is not the sender's: the answers go elsewhere.
fn send_syn(from: &Host, source: SocketAddr, to: SocketAddr) {
    from.ns.run(|| {
        let socket = Socket::new(Domain::for_address(to), Type::STREAM, None).unwrap();
        match source {
            SocketAddr::V4(_) => socket.set_ip_transparent_v4(true).unwrap(),
            SocketAddr::V6(_) => socket.set_freebind_v6(true).unwrap(),
        }
        socket.bind(&source.into()).unwrap();
        socket.set_nonblocking(true).unwrap();
        let error = socket.connect(&to.into()).expect_err("it is under way");
        assert_eq!(error.raw_os_error(), Some(nix::libc::EINPROGRESS), "{error}");
    });
}

fn probes_reach_the_application(family: Family, options: Options) {
    let probed = Probed::by_cgroup(family, options);
    let seen = probed.seen(|| {
        let text = probed.probe(&[]);
        assert!(you_are(&text, probed.node().ip(family)), "{text}");
    });
    assert_eq!(seen, ONE_PROBE);
    assert!(probed.mesh.agent.access_log().is_empty());
    // A port where nobody listens is refused by the pod, not by the proxy.
    let seen = probed.seen(|| {
        let curl = curl(&probed.node().ns, probed.mesh.server.addr(family, 9), &[]);
        let (status, _) = process::output(&mut probed.cgroup.command(&curl), DEADLINE);
        assert_eq!(status.code(), Some(7), "curl's \"could not connect\"");
    });
    assert_eq!(seen, ONE_PROBE);
}

fn a_cgroup_below_probes_as_well(family: Family, options: Options) {
    let probed = Probed::by_cgroup(family, options);
    let child = probed.cgroup.child();
    let seen = probed.seen(|| {
        run(&mut child.command(&curl(&probed.node().ns, probed.addr(), &[])));
    });
    assert_eq!(seen, ONE_PROBE);
}

fn others_are_captured(family: Family, options: Options) {
    let probed = Probed::by_cgroup(family, options);
    let mesh = &probed.mesh;
    for (what, from, in_cgroup) in [
        ("another process of the node", probed.node(), false),
        ("another pod", &*mesh.stranger, false),
        ("outside", &mesh.node.outside, false),
        (
            "another pod whose process is in the probers' cgroup",
            &*mesh.stranger,
            true,
        ),
    ] {
        let mut curl = curl(&from.ns, probed.addr(), &[]);
        if in_cgroup {
            curl = probed.cgroup.command(&curl);
        }
        let seen = probed.seen(|| assert!(you_are(&run(&mut curl), from.ip(family)), "{what}"));
        assert_eq!(seen, ONE_CAPTURED, "{what}");
    }
}

/// Where packets with the node's address can come from. A node drops them when they come to itself: IPv4 as martians.
fn spoofers(mesh: &Mesh, family: Family) -> Vec<&Host> {
    match family {
        Family::V4 => vec![&mesh.stranger],
        Family::V6 => vec![&mesh.stranger, &mesh.node.outside],
    }
}

/// The address, and even the port, of a probe before: from a pod of the node, and from another node.
fn a_spoofed_probe_is_captured(family: Family, options: Options) {
    let probed = Probed::by_cgroup(family, options);
    let server = &probed.mesh.server;
    // The application closes first. What the pod would remember of a probe must not stand between the next SYN and the lookup.
    server.ns.set_sysctl("net/ipv4/tcp_max_tw_buckets", "0").unwrap();
    for (port, from) in (45_001..).zip(spoofers(&probed.mesh, family)) {
        let seen = probed.seen(|| drop(probed.probe(&["--local-port", &port.to_string()])));
        assert_eq!(seen, ONE_PROBE);
        // The very ends of the probe, and others.
        for source in [port, port + 100] {
            assert_eq!(probed.spoof(from, source), ONE_CAPTURED, "from {source}");
        }
    }
}

fn any_process_of_the_node_may_probe(family: Family, options: Options) {
    let probed = Probed::start(family, options, |_| "node".to_owned());
    let seen = probed.seen(|| {
        let text = app::http_get(&probed.node().ns, probed.addr(), "/").unwrap().1;
        assert!(you_are(&text, probed.node().ip(family)), "{text}");
    });
    assert_eq!(seen, ONE_PROBE);
    for from in [&*probed.mesh.stranger, &probed.mesh.node.outside] {
        let seen = probed.seen(|| drop(app::http_get(&from.ns, probed.addr(), "/").unwrap()));
        assert_eq!(seen, ONE_CAPTURED);
    }
    for from in spoofers(&probed.mesh, family) {
        assert_eq!(probed.spoof(from, 45_000), ONE_CAPTURED);
    }
}

fn nobody_may_probe(family: Family, options: Options) {
    let probed = Probed::start(family, options, |_| "none".to_owned());
    let seen = probed.seen(|| drop(probed.probe(&[])));
    assert_eq!(seen, ONE_CAPTURED);
}

/// Probes, one after the other. The application closes first, so the pod remembers each pair of ends for a minute.
fn many(probed: &Probed, count: u32, ports: &str) {
    let urls = format!("http://{}/[1-{count}]", probed.addr());
    let mut curl = command(&probed.node().ns, "curl");
    curl.args([
        "-q",
        "-sS",
        "--noproxy",
        "*",
        "--max-time",
        "50",
        "--ignore-content-length",
    ]);
    curl.args(["--local-port", ports, &urls]);
    let seen = probed.seen(|| {
        let text = run(&mut probed.cgroup.command(&curl));
        let answer = format!("you are {}\n", probed.node().ip(probed.family));
        assert_eq!(text.matches(&answer).count(), count as usize);
    });
    assert_eq!((seen.ingress, seen.captured), (count.into(), 0));
    // With cookies, the last packet of the handshake is looked up as well.
    assert!(seen.lookup >= count.into(), "{seen:?}");
    let lost = counters::kernel(&probed.node().ns, "TcpExt", "TCPSynRetrans");
    assert_eq!(lost, 0, "SYNs were lost");
}

fn ports_are_used_again(family: Family, options: Options) {
    many(&Probed::by_cgroup(family, options), 2_000, "46000-46099");
}

fn cookies_do_not_matter(family: Family, options: Options) {
    let probed = Probed::by_cgroup(family, options);
    let server = &probed.mesh.server.ns;
    server.set_sysctl("net/ipv4/tcp_syncookies", "2").unwrap();
    // With ends that the pod remembers, it would do without a cookie.
    server.set_sysctl("net/ipv4/tcp_max_tw_buckets", "0").unwrap();
    many(&probed, 300, "46000-46999");
    assert_eq!(counters::kernel(server, "TcpExt", "SyncookiesRecv"), 300);
}

/// Many SYNs pass ingress before the first of them looks for its listener, and each finds its own.
fn probes_and_others_at_once(family: Family, options: Options) {
    const COUNT: u64 = 500;
    let probed = Probed::by_cgroup(family, options);
    let log = |name: &str| probed.mesh.node.directory().join(name);
    let curl = || {
        let mut curl = curl(
            &probed.node().ns,
            probed.addr(),
            &["--parallel", "--parallel-max", "40"],
        );
        curl.arg(format!("http://{}/[2-{COUNT}]", probed.addr()));
        curl
    };
    let seen = probed.seen(|| {
        let probes = Process::start(&mut probed.cgroup.command(&curl()), &log("probes.out")).unwrap();
        let others = Process::start(&mut curl(), &log("others.out")).unwrap();
        for mut process in [probes, others] {
            let status = process.wait(DEADLINE).expect("it ends");
            assert!(status.success(), "{status}: {}", process.output());
        }
    });
    let expected = Seen {
        ingress: COUNT,
        lookup: COUNT,
        captured: COUNT,
    };
    assert_eq!(seen, expected);
}

/// The pod can't answer the first SYN, and the kernel sends it again.
fn a_syn_that_is_sent_again(family: Family, options: Options) {
    let probed = Probed::by_cgroup(family, options);
    let (pod, node) = (&probed.mesh.server, probed.node());
    let route = |verb: &str| {
        let length = if family == Family::V4 { 32 } else { 128 };
        let command = format!("route {verb} blackhole {}/{length}", node.ip(family));
        pod.ns.ip(&[command]).unwrap();
    };
    let before = verdicts(&probed.mesh, pod, "ingress", "probe");
    route("add");
    let log = probed.mesh.node.directory().join("curl.out");
    let curl = curl(&node.ns, probed.addr(), &[]);
    let mut process = Process::start(&mut probed.cgroup.command(&curl), &log).unwrap();
    wait::until("the first SYN", || {
        (verdicts(&probed.mesh, pod, "ingress", "probe") > before).then_some(())
    });
    route("del");
    assert!(
        process.wait(DEADLINE).expect("it ends").success(),
        "{}",
        process.output()
    );
    assert!(counters::kernel(&node.ns, "TcpExt", "TCPSynRetrans") > 0);
    assert_eq!(verdicts(&probed.mesh, pod, "lookup", "inbound"), 0);
}

fn ports_of_the_dial_range(family: Family, options: Options) {
    let probed = Probed::by_cgroup(family, options);
    let arguments = ["--local-port", "61000-61999"];
    // For such a port ingress looks into the socket table, which asks the lookup program once more.
    let seen = probed.seen(|| drop(probed.probe(&arguments)));
    assert_eq!((seen.ingress, seen.lookup), (1, 1));
    assert!(probed.mesh.agent.access_log().is_empty());
    // From such a port, too, others are captured; on old kernels ingress does it, and the lookup is not asked. There, the port must not
    // be the same: docs/decisions/0004.
    let arguments = ["--local-port", "62000-65535"];
    let seen = probed.seen(|| drop(run(&mut curl(&probed.node().ns, probed.addr(), &arguments))));
    assert_eq!((seen.ingress, seen.lookup), (0, 0));
    wait::until("the access log", || probed.mesh.agent.access_log().pop());
}

fn the_hbone_port_stays_hbone(family: Family, options: Options) {
    let probed = Probed::by_cgroup(family, options);
    let hbone = || verdicts(&probed.mesh, &probed.mesh.server, "lookup", "hbone");
    let before = hbone();
    let seen = probed.seen(|| {
        let curl = curl(&probed.node().ns, probed.mesh.server.addr(family, 15008), &[]);
        let (status, text) = process::output(&mut probed.cgroup.command(&curl), DEADLINE);
        assert!(!status.success(), "{text}");
    });
    assert_eq!((seen.ingress, seen.lookup, hbone() - before), (0, 0, 1));
}

fn the_node_may_get_another_address(family: Family, options: Options) {
    let probed = Probed::by_cgroup(family, options);
    let (address, flags) = match family {
        Family::V4 => ("10.77.0.201", "/24 dev br0"),
        Family::V6 => ("fd77::201", "/64 dev br0 nodad"),
    };
    probed
        .node()
        .ns
        .ip(&[format!("addr add {address}{flags}")])
        .unwrap();
    let seen = probed.seen(|| {
        let text = probed.probe(&["--interface", address]);
        assert!(you_are(&text, address), "{text}");
    });
    assert_eq!(seen, ONE_PROBE);
}

fn probes_outlive_the_agent(family: Family, options: Options) {
    let mut probed = Probed::by_cgroup(family, options);
    probed.mesh.agent.kill();
    let text = probed.probe(&[]);
    assert!(you_are(&text, probed.node().ip(family)), "{text}");
    refused(&probed.node().ns, probed.addr());
    probed.mesh.agent.restart(&probed.mesh.node);
    assert_eq!(probed.seen(|| drop(probed.probe(&[]))), ONE_PROBE);
}

/// A program in a cgroup that has kubelet's name.
fn kubelet(node: &Node, cgroup: &Cgroup) -> Process {
    Process::start(
        &mut cgroup.command(&named_kubelet(node)),
        &node.directory().join("kubelet.out"),
    )
    .unwrap()
}

fn named_kubelet(node: &Node) -> Command {
    let named = node.directory().join("kubelet");
    if !named.exists() {
        std::os::unix::fs::symlink("/bin/sleep", &named).unwrap();
    }
    let mut sleep = command(&node.host.ns, &named);
    sleep.arg("300");
    sleep
}

fn status(mesh: &Mesh) -> String {
    let mut status = command(
        &mesh.node.host.ns,
        binary().expect("the suite's needs include it"),
    );
    run(status.arg("status"))
}

fn rule_is(mesh: &Mesh, expected: &str) {
    wait::until(&format!("status to tell of {expected:?}"), || {
        status(mesh)
            .lines()
            .any(|line| line.contains("reach the pods directly") && line.contains(expected))
            .then_some(())
    });
}

fn kubelet_is_found_and_found_again() {
    let second = Cgroup::new();
    let probed = Probed::start(Family::V4, Options::default(), |_| "auto".to_owned());
    let mesh = &probed.mesh;
    rule_is(mesh, "any process of the node (no kubelet has been found)");
    let node = || drop(run(&mut curl(&probed.node().ns, probed.addr(), &[])));
    assert_eq!(probed.seen(node), ONE_PROBE);

    let first = kubelet(&mesh.node, &probed.cgroup);
    rule_is(
        mesh,
        &format!(
            "{} (kubelet's, found by its process)",
            probed.cgroup.path().display()
        ),
    );
    assert_eq!(probed.seen(node), ONE_CAPTURED);
    assert_eq!(probed.seen(|| drop(probed.probe(&[]))), ONE_PROBE);

    // Away for a while: nobody else gets its right.
    first.signal(Signal::SIGKILL);
    rule_is(mesh, "no cgroup at present");
    assert_eq!(probed.seen(node), ONE_CAPTURED);

    let _again = kubelet(&mesh.node, &second);
    rule_is(mesh, &second.path().display().to_string());
    assert_eq!(probed.seen(|| drop(probed.probe(&[]))), ONE_CAPTURED);
    let again = || {
        drop(run(&mut second.command(&curl(
            &probed.node().ns,
            probed.addr(),
            &[],
        ))))
    };
    assert_eq!(probed.seen(again), ONE_PROBE);
}

/// Where the root of all cgroups is a kubelet's, it is everybody's, and that is said.
fn a_kubelet_in_the_root_is_as_good_as_none() {
    let probed = Probed::start(Family::V4, Options::default(), |_| "auto".to_owned());
    let mesh = &probed.mesh;
    let root = mount_point().expect("there is one: the pods' cgroups were made in it");
    let in_root = cgroup::command_in(&root, &named_kubelet(&mesh.node));
    let in_root = Process::start(&mut { in_root }, &mesh.node.directory().join("root.out")).unwrap();
    let why = format!(
        "kubelet (process {}) is in the root of all cgroups",
        in_root.pid()
    );
    rule_is(mesh, &format!("any process of the node ({why}"));
    let log = mesh.agent.log();
    assert!(
        log.lines()
            .any(|line| line.contains("\twarn\t") && line.contains(&why)),
        "{log}"
    );
    let probe = |from: &Namespace| drop(run(&mut curl(from, probed.addr(), &[])));
    assert_eq!(probed.seen(|| probe(&probed.node().ns)), ONE_PROBE);
    // Its processes are in that cgroup as well.
    assert_eq!(probed.seen(|| probe(&mesh.stranger.ns)), ONE_CAPTURED);

    // One that can be told from others is enough, and the other one is not forgotten.
    let _told = kubelet(&mesh.node, &probed.cgroup);
    let told = probed.cgroup.path().display();
    rule_is(
        mesh,
        &format!("{told} (kubelet's, found by its process; but {why}"),
    );
    assert_eq!(probed.seen(|| probe(&probed.node().ns)), ONE_CAPTURED);
    in_root.signal(Signal::SIGKILL);
    rule_is(mesh, &format!("{told} (kubelet's, found by its process)"));
}

fn a_cgroup_may_come_later() {
    let path = |cgroup: &Cgroup| -> PathBuf { cgroup.path().join("child") };
    let probed = Probed::start(Family::V6, Options::default(), |cgroup| {
        path(cgroup).display().to_string()
    });
    rule_is(
        &probed.mesh,
        "no cgroup at present (so configured; 1 do not exist)",
    );
    assert_eq!(probed.seen(|| drop(probed.probe(&[]))), ONE_CAPTURED);
    let child = probed.cgroup.child();
    rule_is(
        &probed.mesh,
        &format!("{} (so configured)", path(&probed.cgroup).display()),
    );
    let probe = || {
        drop(run(&mut child.command(&curl(
            &probed.node().ns,
            probed.addr(),
            &[],
        ))))
    };
    assert_eq!(probed.seen(probe), ONE_PROBE);
}

/// Whatever was asked for; and it is said, once.
fn without_cgroup2_the_node_may_probe() {
    for sources in ["auto", "/system.slice/kubelet.service"] {
        let options = Options {
            without_cgroup2: true,
            arguments: vec!["--probe-sources".to_owned(), sources.to_owned()],
            ..Options::default()
        };
        let mesh = Mesh::started(options, |client, server| Workloads::hbone([client, server]));
        mesh.agent.enrol(&mesh.server);
        let _app = App::start(&mesh.server.ns, (Family::V4.any(), PORT).into(), app::http);
        rule_is(&mesh, "any process of the node (no cgroup2 is mounted");
        let probes = || verdicts(&mesh, &mesh.server, "lookup", "probe");
        for (from, probed) in [(&mesh.node.host, 1), (&*mesh.stranger, 0)] {
            let before = probes();
            app::http_get(&from.ns, mesh.server.addr(Family::V4, PORT), "/").unwrap();
            assert_eq!(probes() - before, probed);
        }
        // More than one look later.
        std::thread::sleep(Duration::from_secs(6));
        let log = mesh.agent.log();
        let warnings = log.lines().filter(|line| line.contains("no cgroup2")).count();
        assert_eq!(warnings, 1, "{log}");
    }
}
