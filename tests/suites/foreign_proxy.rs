//! Pods whose proxy is another process, with one mark for all its sockets, which this agent tells of the pods by ZDS: an independent
//! one in Python, and another agent of ours. Both families, three ways to attach.

use std::{
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;
use redirector_common::consts::MARK_PROXY;
use redirector_tests::{
    agent::{self, Agent, Options},
    app::{self, App},
    capture::opened_ports,
    cgroup::{self, Cgroup},
    counters::verdicts,
    footprint::Footprint,
    mesh::{PORT, refused},
    node::{Family, Node, Pod},
    process::{Process, command},
    suite::{Needs, Test, case, main as suite, on_every_attachment},
    wait,
    workloads::Workloads,
};
use socket2::{Domain, Socket, Type};

const TESTS: &[(&str, Test)] = &[
    ("connections_go_through_it", connections_go_through_it),
    ("without_it_all_is_refused", without_it_all_is_refused),
    ("what_it_cannot_reach_is_told", what_it_cannot_reach_is_told),
    ("its_mark_alone_lets_nothing_out", its_mark_alone_lets_nothing_out),
];

fn main() -> ExitCode {
    let mut cases = on_every_attachment(TESTS);
    cases.extend([
        case(
            "another_takes_over_and_gives_back",
            another_takes_over_and_gives_back,
        ),
        case("hostile_clients_hold_up_nobody", hostile_clients_hold_up_nobody),
        case(
            "it_goes_on_while_the_agent_is_away",
            it_goes_on_while_the_agent_is_away,
        ),
        case(
            "without_a_proxy_no_pod_is_captured",
            without_a_proxy_no_pod_is_captured,
        ),
        case("what_it_has_open_ends_with_it", what_it_has_open_ends_with_it),
        case(
            "pods_that_are_released_are_as_before",
            pods_that_are_released_are_as_before,
        ),
        case("another_agent_of_ours_serves", another_agent_of_ours_serves),
        case(
            "the_agents_own_proxy_takes_its_place_and_gives_it_back",
            the_agents_own_proxy_takes_its_place_and_gives_it_back,
        ),
    ]);
    suite(Needs::Agent, 2, cases)
}

/// A node with an agent that speaks ZDS, and two pods that are to be enrolled.
struct Scene {
    agent: Agent,
    pods: [Pod; 2],
    node: Node,
}

impl Scene {
    fn start(mut options: Options) -> Self {
        let node = Node::new();
        let pods = ["client", "server"].map(|name| node.pod(name));
        options.arguments.extend(arguments(&node));
        let agent = Agent::start(&node, &Workloads::hbone(&pods), options);
        Self { agent, pods, node }
    }

    /// With a proxy that serves both pods.
    fn served(options: Options) -> (Self, Process) {
        let scene = Self::start(options);
        let proxy = scene.proxy("one");
        says(&proxy, "snapshot");
        scene.pods.iter().for_each(|pod| scene.agent.enrol(pod));
        (scene, proxy)
    }

    fn arguments(&self) -> [String; 2] {
        arguments(&self.node)
    }

    fn socket(&self) -> PathBuf {
        socket(&self.node)
    }

    fn python(&self, arguments: &[&str]) -> std::process::Command {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/foreign_proxy.py");
        let mut python = command(&self.node.host.ns, "/usr/bin/python3");
        python.arg(script).arg(self.socket()).args(arguments);
        python
    }

    fn proxy(&self, name: &str) -> Process {
        self.run(&mut self.python(&[]), name)
    }

    fn run(&self, command: &mut std::process::Command, name: &str) -> Process {
        let log = self.node.directory().join(format!("{name}.log"));
        Process::start(command, &log).unwrap()
    }

    /// An application on the server pod, for the time of a call.
    fn with_app(&self, family: Family, act: impl FnOnce(SocketAddr)) {
        let [_, server] = &self.pods;
        let _app = App::start(&server.ns, (family.any(), PORT).into(), app::who);
        act(server.addr(family, PORT));
    }

    /// From pod to pod, and from outside: each reaches the application, which sees it by its own address.
    fn talk(&self, family: Family) {
        let [client, _] = &self.pods;
        let outside = &self.node.outside;
        self.with_app(family, |server| {
            for (ns, ip) in [(&client.ns, client.ip(family)), (&outside.ns, outside.ip(family))] {
                assert_eq!(app::ask_who(ns, server).unwrap(), ip.to_string());
            }
        });
    }
}

fn socket(node: &Node) -> PathBuf {
    node.directory().join("ztunnel.sock")
}

/// What makes an agent speak ZDS.
fn arguments(node: &Node) -> [String; 2] {
    ["--ztunnel-uds".to_owned(), socket(node).display().to_string()]
}

fn says(process: &Process, text: &str) {
    let what = format!("{text:?} of {:?}", process.output());
    wait::until(&what, || process.output().contains(text).then_some(()));
}

/// What a proxy has passed on: outbound and inbound.
fn passed(proxy: &Process) -> [usize; 2] {
    let output = proxy.output();
    ["outbound ", "inbound "].map(|word| output.lines().filter(|line| line.starts_with(word)).count())
}

fn connections_go_through_it(family: Family, options: Options) {
    let (scene, proxy) = Scene::served(options);
    let [client, server] = &scene.pods;
    scene.talk(family);
    let output = proxy.output();
    let (from, to) = (client.ip(family), server.addr(family, PORT));
    let outside = scene.node.outside.ip(family);
    for line in [
        format!("outbound {from} to {} {PORT}", to.ip()),
        format!("inbound {from} to {} {PORT}", to.ip()),
        format!("inbound {outside} to {} {PORT}", to.ip()),
    ] {
        assert!(output.lines().any(|said| said == line), "{line}:\n{output}");
    }
    assert_eq!(passed(&proxy), [1, 2]);
    // More than one packet, both ways, and often.
    let _app = App::start(&server.ns, (family.any(), PORT + 1).into(), app::hash);
    for _ in 0..20 {
        let mut stream = app::connect(&client.ns, server.addr(family, PORT + 1)).unwrap();
        let sent = app::write_hashed(&mut stream, 3 << 20).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut received = String::new();
        stream.read_to_string(&mut received).unwrap();
        assert_eq!(received, sent);
    }
    // To the world outside, which has no proxy.
    let outside = &scene.node.outside;
    let _app = App::start(&outside.ns, (family.any(), PORT).into(), app::who);
    let seen = app::ask_who(&client.ns, outside.addr(family, PORT)).unwrap();
    assert_eq!(seen, client.ip(family).to_string());
    // The pod's calls of itself go by nobody.
    let before = passed(&proxy);
    let _app = App::start(&client.ns, (family.any(), PORT).into(), app::who);
    app::ask_who(&client.ns, client.addr(family, PORT)).unwrap();
    app::ask_who(&client.ns, (family.loopback(), PORT).into()).unwrap();
    assert_eq!(passed(&proxy), before);
    let metrics = scene.agent.metrics();
    let count = |pod: &Pod, program, verdict| verdicts(&metrics, &pod.uid, program, verdict);
    assert_eq!(count(server, "ingress", "dialled"), 22.0);
    assert_eq!(count(server, "lookup", "proxy"), 22.0);
    assert_eq!(count(client, "egress", "refused"), 0.0);
}

fn without_it_all_is_refused(family: Family, options: Options) {
    let (scene, mut proxy) = Scene::served(options);
    let [client, server] = &scene.pods;
    scene.talk(family);
    proxy.signal(Signal::SIGKILL);
    proxy.wait(wait::DEADLINE).expect("a killed process ends");
    scene.with_app(family, |addr| {
        let capture = scene.node.capture(server);
        refused(&client.ns, addr);
        assert_eq!(
            opened_ports(&capture.stop()),
            [] as [u16; 0],
            "nothing leaves in plain"
        );
        refused(&scene.node.outside.ns, addr);
    });
    // Both are told to lack it, by the one's look at the latest.
    let lacking = || {
        let pods = scene.agent.pods();
        let lacks = |pod: &&serde_json::Value| {
            let error = pod["error"].as_str().unwrap_or_default();
            pod["impaired"] == true && error.contains("listens on 15001, 15006, 15008")
        };
        pods.iter().filter(lacks).count()
    };
    wait::until("both pods to be told to lack it", || {
        (lacking() == 2).then_some(())
    });
    assert!(scene.agent.log().contains("is not captured as it should be"));
    // The next is told of both pods, and has their connections as soon as it has said that it knows them.
    let proxy = scene.proxy("two");
    says(&proxy, "snapshot");
    scene.with_app(family, |addr| {
        wait::until("the connections to go through it", || {
            app::ask_who(&client.ns, addr).ok()
        });
    });
    wait::until("no pod to be told to lack it", || (lacking() == 0).then_some(()));
    scene.talk(family);
}

fn what_it_cannot_reach_is_told(family: Family, options: Options) {
    let (scene, proxy) = Scene::served(options);
    let [client, server] = &scene.pods;
    // Nobody listens: the application's kernel says so to the proxy, and that to the client.
    for from in [&client.ns, &scene.node.outside.ns] {
        refused(from, server.addr(family, PORT));
    }
    says(&proxy, "failed");
    // The proxy's own ports are not forwarded to from outside; a call of them ends.
    refused(&scene.node.outside.ns, server.addr(family, 15008));
    scene.talk(family);
}

/// Connects with a mark.
fn ask_marked(from: &Pod, family: Family, to: SocketAddr, mark: u32) -> io::Result<String> {
    from.ns.run(|| {
        let domain = if family == Family::V4 {
            Domain::IPV4
        } else {
            Domain::IPV6
        };
        let socket = Socket::new(domain, Type::STREAM, None)?;
        socket.set_mark(mark)?;
        socket.set_read_timeout(Some(wait::DEADLINE))?;
        socket.connect_timeout(&to.into(), wait::DEADLINE)?;
        (&socket).write_all(b"hello\n")?;
        let mut answer = String::new();
        (&socket).read_to_string(&mut answer)?;
        Ok(answer)
    })
}

fn its_mark_alone_lets_nothing_out(family: Family, options: Options) {
    let cgroup = cgroup::mount_point().map(|_| Cgroup::new());
    let scene = Scene::start(options);
    let proxy = match &cgroup {
        Some(cgroup) => scene.run(&mut cgroup.command(&scene.python(&[])), "one"),
        None => scene.proxy("one"),
    };
    says(&proxy, "snapshot");
    scene.pods.iter().for_each(|pod| scene.agent.enrol(pod));
    scene.talk(family);
    let [client, server] = &scene.pods;
    let before = passed(&proxy);
    scene.with_app(family, |addr| {
        let answer = ask_marked(client, family, addr, MARK_PROXY.0);
        if cgroup.is_some() {
            assert!(answer.is_err(), "{answer:?}");
            assert_eq!(passed(&proxy), before);
        } else {
            // Nothing tells the application from the proxy then; the agent says so.
            assert!(scene.agent.log().contains("cgroup can't be told"));
        }
        // Later packets with the mark are no way out either.
        let answer = ask_marked(client, family, addr, 0x7000).unwrap();
        assert!(answer.contains(&client.ip(family).to_string()), "{answer}");
    });
    // Nor is the mark a way in past the proxy: the pod's own calls are all that comes over lo.
    scene.with_app(family, |addr| {
        let before = passed(&proxy)[1];
        app::ask_who(&scene.node.outside.ns, addr).unwrap();
        assert_eq!(passed(&proxy)[1], before + 1);
    });
    let refusals = verdicts(&scene.agent.metrics(), &client.uid, "egress", "refused");
    assert_eq!(refusals > 0.0, cgroup.is_some());
    drop((proxy, server));
}

fn another_takes_over_and_gives_back() {
    let (scene, old) = Scene::served(Options::default());
    let [client, _] = &scene.pods;
    let connected = || {
        let samples = scene.agent.metrics();
        let found = samples.iter().find(|sample| sample.name == "ztunnel_connected");
        found.expect("an agent with a ZDS socket has it").value
    };
    assert_eq!(connected(), 1.0);
    scene.talk(Family::V4);
    let mut new = scene.proxy("two");
    says(&new, "snapshot");
    assert_eq!(connected(), 2.0);
    // Both listen on the same ports. The newest has them as soon as it knows all pods.
    scene.with_app(Family::V4, |addr| {
        wait::until("the newest to have the connections", || {
            app::ask_who(&client.ns, addr).unwrap();
            (passed(&new).iter().all(|passed| *passed > 0)).then_some(())
        });
    });
    let before = passed(&old);
    for family in Family::BOTH {
        scene.talk(family);
    }
    assert_eq!(
        passed(&old),
        before,
        "the old one has none of the new connections"
    );
    let third = scene.node.pod("third");
    scene.agent.enrol(&third);
    assert!(new.output().contains("add third"), "{}", new.output());
    assert!(!old.output().contains("add third"), "{}", old.output());
    scene.agent.release(&third);
    for proxy in [&new, &old] {
        assert!(
            proxy.output().contains(&format!("del {}", third.uid)),
            "{}",
            proxy.output()
        );
    }
    // An upgrade that is taken back: what the old one still listens on is used again.
    new.signal(Signal::SIGKILL);
    new.wait(wait::DEADLINE).expect("a killed process ends");
    scene.with_app(Family::V4, |addr| {
        wait::until("the old one to have the connections", || {
            app::ask_who(&client.ns, addr).ok()
        });
    });
    scene.talk(Family::V6);
    assert_ne!(passed(&old), before);
    scene.agent.enrol(&third);
    assert!(old.output().contains("add third"), "{}", old.output());
}

fn hostile_clients_hold_up_nobody() {
    let (scene, proxy) = Scene::served(Options::default());
    let hostile = ["silent", "garbage", "mute", "unasked", "storm"]
        .map(|behaviour| (behaviour, scene.run(&mut scene.python(&[behaviour]), behaviour)));
    for (behaviour, client) in &hostile {
        says(
            client,
            if *behaviour == "storm" {
                "done"
            } else {
                "connected"
            },
        );
    }
    for number in 0..5 {
        let pod = scene.node.pod(&format!("pod{number}"));
        scene.agent.enrol(&pod);
        assert!(
            proxy.output().contains(&format!("add {}", pod.name)),
            "{}",
            proxy.output()
        );
        scene.talk(Family::V4);
        // It waits for those that don't answer as long as they may be silent.
        scene.agent.release(&pod);
        assert!(
            proxy.output().contains(&format!("del {}", pod.uid)),
            "{}",
            proxy.output()
        );
    }
    for (behaviour, client) in &hostile {
        if *behaviour != "storm" {
            says(client, "closed");
        }
    }
    // A new one finds its way through all that.
    let new = scene.proxy("two");
    says(&new, "snapshot");
    for pod in &scene.pods {
        assert!(
            new.output().contains(&format!("add {}", pod.name)),
            "{}",
            new.output()
        );
    }
    scene.talk(Family::V6);
}

fn it_goes_on_while_the_agent_is_away() {
    let (mut scene, proxy) = Scene::served(Options::default());
    let [client, server] = &scene.pods;
    let _app = App::start(&server.ns, (Family::V4.any(), PORT + 1).into(), app::echo);
    let mut open = app::connect(&client.ns, server.addr(Family::V4, PORT + 1)).unwrap();
    let mut goes_on = |text: &str| {
        open.write_all(text.as_bytes()).unwrap();
        let mut back = vec![0; text.len()];
        open.read_exact(&mut back).unwrap();
        assert_eq!(back, text.as_bytes());
    };
    goes_on("before");
    scene.agent.kill();
    for family in Family::BOTH {
        scene.talk(family);
    }
    goes_on("without");
    scene.agent.restart(&scene.node);
    says(&proxy, "the node agent has gone");
    wait::until("another snapshot", || {
        (proxy.output().matches("snapshot").count() == 2).then_some(())
    });
    assert!(!proxy.output().contains("gone "), "{}", proxy.output());
    goes_on("after");
    for family in Family::BOTH {
        scene.talk(family);
    }
    // The same by an agent that ends in peace.
    scene.agent.stop();
    goes_on("stopped");
    scene.talk(Family::V4);
    assert!(!proxy.output().contains("del "), "{}", proxy.output());
}

fn without_a_proxy_no_pod_is_captured() {
    let scene = Scene::start(Options::default());
    let [client, server] = &scene.pods;
    let answer = scene.agent.cmdadd(client);
    assert_ne!(answer.status, 200);
    assert!(answer.body.contains("INPOD_UDS"), "{}", answer.body);
    assert!(!client.ns.ip_output("rule show").contains("1337"));
    let proxy = scene.proxy("one");
    says(&proxy, "snapshot");
    assert!(!proxy.output().contains("add"), "{}", proxy.output());
    // What listens there, and is not the proxy's, is not taken for it.
    for pod in [client, server] {
        scene.agent.enrol(pod);
    }
    scene.talk(Family::V4);
}

/// Answers what came, and speaks on until it is told not to.
fn speaks_on(mut stream: TcpStream, _peer: SocketAddr) -> io::Result<()> {
    stream.read_exact(&mut [0])?;
    let begin = Instant::now();
    while begin.elapsed() < wait::DEADLINE {
        stream.write_all(b"still here")?;
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// What the application has open by the proxy's dial ends with the proxy: none of it goes on to the client past it.
fn what_it_has_open_ends_with_it() {
    for family in Family::BOTH {
        let (scene, mut proxy) = Scene::served(Options::default());
        let [_, server] = &scene.pods;
        let port = PORT + 2;
        let _app = App::start(&server.ns, (family.any(), port).into(), speaks_on);
        let capture = scene.node.capture(server);
        let mut open = app::connect(&scene.node.outside.ns, server.addr(family, port)).unwrap();
        open.write_all(b"x").unwrap();
        open.read_exact(&mut [0; 10]).unwrap();
        let client = open.local_addr().unwrap();
        proxy.signal(Signal::SIGKILL);
        proxy.wait(wait::DEADLINE).expect("a killed process ends");
        // It ends, by whatever sign.
        let _ = open.read_to_end(&mut Vec::new());
        let application = |local: &str| local.contains(&format!(":{port:04X} "));
        wait::until("the application's connection to end", || {
            let tables = ["tcp", "tcp6"].map(|table| server.ns.proc_net(table).unwrap());
            let established =
                |line: &&str| application(line) && line.split_ascii_whitespace().nth(3) == Some("01");
            (!tables
                .iter()
                .flat_map(|table| table.lines())
                .any(|line| established(&line)))
            .then_some(())
        });
        let segments = capture.stop();
        assert!(
            segments
                .iter()
                .any(|segment| segment.dst == client && !segment.payload.is_empty())
        );
        for segment in segments.iter().filter(|segment| segment.src.port() == port) {
            assert_eq!(
                segment.dst, client,
                "an answer to the proxy's dial has left the pod: {segment:?}"
            );
        }
    }
}

fn pods_that_are_released_are_as_before() {
    for options in [Options::default(), Options::old_kernel()] {
        let (scene, proxy) = Scene::served(options);
        let [_, server] = &scene.pods;
        scene.talk(Family::V4);
        for pod in &scene.pods {
            scene.agent.release(pod);
            assert!(!pod.ns.ip_output("rule show").contains("1337"));
            let left = pod.ns.proc_net("tcp6").unwrap();
            assert!(!left.contains(":3A9E 0"), "{left}");
        }
        let before = passed(&proxy);
        scene.talk(Family::V4);
        assert_eq!(passed(&proxy), before);
        scene.agent.enrol(server);
        scene.talk(Family::V6);
        assert_ne!(passed(&proxy), before);
    }
}

/// What of ours is on lo of a pod.
fn on_lo(pod: &Pod) -> usize {
    let found = Footprint::of(&pod.ns);
    let sections = ["tcx lo ", "tc filter show dev lo "];
    let lines = sections.iter().flat_map(|section| found.section(section));
    lines.filter(|line| line.contains("redir_")).count()
}

/// The agent's own proxy takes the pods over from it and gives them back, and nothing of how it was told is left on lo.
fn the_agents_own_proxy_takes_its_place_and_gives_it_back() {
    for options in [Options::default(), Options::old_kernel()] {
        let (mut scene, mut proxy) = Scene::served(options.clone());
        scene.talk(Family::V4);
        let with = scene.arguments();
        assert!(scene.pods.iter().all(|pod| on_lo(pod) == 1));
        scene.agent.stop();
        proxy.signal(Signal::SIGKILL);
        proxy.wait(wait::DEADLINE).expect("a killed process ends");
        scene.agent.restart_with(&scene.node, options.clone());
        scene.with_app(Family::V6, |addr| {
            let [client, server] = &scene.pods;
            let capture = scene.node.capture(server);
            app::ask_who(&client.ns, addr).unwrap();
            assert_eq!(opened_ports(&capture.stop()), [15008]);
        });
        assert!(scene.pods.iter().all(|pod| on_lo(pod) == 0));
        scene.agent.stop();
        let mut options = options;
        options.arguments.extend(with);
        let mut proxy = scene.proxy("two");
        scene.agent.restart_with(&scene.node, options);
        says(&proxy, "snapshot");
        scene.with_app(Family::V4, |addr| {
            let [client, _] = &scene.pods;
            wait::until("the pods to be served", || app::ask_who(&client.ns, addr).ok());
        });
        scene.talk(Family::V6);
        assert!(proxy.ended().is_none());
    }
}

/// An agent of ours in ztunnel's place, in a namespace where its ports are free.
fn another_agent_of_ours_serves() {
    let scene = Scene::start(Options::default());
    let directory = scene.node.directory();
    let mut ours = command(&scene.node.outside.ns, agent::binary().expect("xtask builds it"));
    ours.args(["agent", "--redirect", "none", "--inpod-uds"])
        .arg(scene.socket());
    for (flag, file) in [
        ("--state-dir", "other-state"),
        ("--bpffs-dir", "other-bpf"),
        ("--workloads", "workloads.yaml"),
    ] {
        ours.arg(flag).arg(directory.join(file));
    }
    ours.env("XDS_ADDRESS", "")
        .env("CA_ADDRESS", "")
        .env("FAKE_CA", "true");
    let ours = scene.run(&mut ours, "other-agent");
    says(&ours, "snapshot of pods received");
    scene.pods.iter().for_each(|pod| scene.agent.enrol(pod));
    let [client, server] = &scene.pods;
    for family in Family::BOTH {
        scene.with_app(family, |addr| {
            let capture = scene.node.capture(server);
            let seen = app::ask_who(&client.ns, addr).unwrap();
            assert_eq!(seen, client.ip(family).to_string());
            let ports = opened_ports(&capture.stop());
            assert!(
                ports.iter().all(|port| *port == 15008) && !ports.is_empty(),
                "{ports:?}"
            );
        });
        scene.talk(family);
    }
}
