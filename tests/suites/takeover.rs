//! An agent takes over from one that runs, again and again, under load; and either of them dies on the way.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::{SocketAddr, TcpStream},
    os::fd::AsFd as _,
    path::PathBuf,
    process::ExitCode,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use aya::maps::{Array, Map, MapData};
use redirector::sys::seqpacket::Seqpacket;
use redirector_common::maps::{FLAG_RELEASING, PODS, PodEntry};
use redirector_tests::{
    agent::{Agent, Options, binary},
    app::{self, App},
    capture::{contains, opened_ports},
    cni, counters,
    mesh::{Mesh, PORT},
    node::{Family, Pod},
    process,
    suite::{Case, Needs, case, main as suite},
    wait::{self, Ends},
    workloads::Workloads,
};
use serde_json::{Value, json};

type MakeMesh = fn(Options) -> Mesh;

/// Takeovers under load. `REDIRECTOR_TAKEOVERS` says another number, for machines that are too slow for this one.
const TAKEOVERS: usize = 100;
const CLIENTS: usize = 4;
/// Each client's pause between two connections; together they open some hundreds in a second.
const PAUSE: Duration = Duration::from_millis(5);
/// In what the clients send; on the wire it is to be seen in plain only where that is meant.
const CANARY: &str = "canary-8c1f";
const DEADLINE: Duration = Duration::from_secs(30);
/// Longest time that a successor waits for certificates, and some.
const UNCERTIFIED: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let mut cases: Vec<Case> = Vec::new();
    let clsact = Options {
        force_clsact: true,
        ..Options::default()
    };
    let meshes: [(&str, MakeMesh, &[u16]); 2] = [
        ("hbone", Mesh::hbone, &[15008]),
        ("plaintext", Mesh::plaintext, &[PORT]),
    ];
    for (kind, mesh, ports) in meshes {
        cases.push(case(format!("nothing_is_lost_{kind}"), move || {
            nothing_is_lost(mesh(Options::default()), ports, takeovers())
        }));
        let options = clsact.clone();
        cases.push(case(format!("nothing_is_lost_{kind}_clsact"), move || {
            nothing_is_lost(mesh(options), ports, takeovers().div_ceil(10))
        }));
    }
    cases.push(case("what_is_open_goes_on", what_is_open_goes_on));
    cases.push(case(
        "who_asks_and_goes_is_not_missed",
        who_asks_and_goes_is_not_missed,
    ));
    cases.push(case(
        "a_successor_that_dies_is_not_missed",
        a_successor_that_dies_is_not_missed,
    ));
    cases.push(case(
        "a_successors_rules_go_with_it",
        a_successors_rules_go_with_it,
    ));
    let forced = Options {
        force_clsact: true,
        ..Options::default()
    };
    let by_port = Options {
        force_source_port: true,
        ..Options::default()
    };
    for (name, old, new) in [
        ("by_clsact", Options::default(), forced.clone()),
        ("by_links", forced, Options::default()),
        ("by_source_port", Options::default(), by_port),
    ] {
        cases.push(case(format!("a_successors_hooks_go_with_it_{name}"), move || {
            a_successors_hooks_go_with_it(old, &new)
        }));
    }
    cases.push(case(
        "what_is_done_after_the_withdrawal_is_put_right",
        what_is_done_after_the_withdrawal_is_put_right,
    ));
    cases.push(case(
        "pins_that_a_successor_has_removed_are_made_anew",
        pins_that_a_successor_has_removed_are_made_anew,
    ));
    cases.push(case(
        "an_agent_that_dies_meanwhile_is_succeeded",
        an_agent_that_dies_meanwhile_is_succeeded,
    ));
    cases.push(case("what_differs_is_refused", what_differs_is_refused));
    cases.push(case(
        "an_agent_that_is_stopped_meanwhile_is_succeeded",
        an_agent_that_is_stopped_meanwhile_is_succeeded,
    ));
    cases.push(case(
        "an_agent_that_releases_its_pods_meanwhile_is_not_taken_over",
        an_agent_that_releases_its_pods_meanwhile_is_not_taken_over,
    ));
    cases.push(case(
        "a_successor_that_waits_ends_when_it_is_told",
        a_successor_that_waits_ends_when_it_is_told,
    ));
    cases.push(case(
        "a_successor_that_waits_goes_on_alone",
        a_successor_that_waits_goes_on_alone,
    ));
    cases.push(case(
        "a_pod_whose_record_is_damaged_stays_served",
        a_pod_whose_record_is_damaged_stays_served,
    ));
    cases.push(case(
        "an_agent_that_drains_holds_nobody_up",
        an_agent_that_drains_holds_nobody_up,
    ));
    suite(Needs::Agent, 1, cases)
}

fn takeovers() -> usize {
    match std::env::var("REDIRECTOR_TAKEOVERS") {
        Ok(number) => number.parse().expect("REDIRECTOR_TAKEOVERS is a number"),
        Err(_) => TAKEOVERS,
    }
}

fn ask(from: &Pod, to: &Pod) -> std::io::Result<String> {
    let answer = app::ask(&from.ns, to.addr(Family::V4, PORT), &format!("{CANARY}\n"))?;
    Ok(answer.trim_end().to_owned())
}

/// What a client gets that has asked.
fn answer(from: &Pod) -> String {
    format!("{CANARY} {}", from.v4)
}

/// Runs `work` while clients open connections from `from` to `to`, and returns how many there were. None may fail.
fn under_load<T>(from: &Pod, to: &Pod, work: impl FnOnce() -> T) -> (T, usize) {
    let (over, opened) = (AtomicBool::new(false), AtomicUsize::new(0));
    let failures = Mutex::new(Vec::new());
    let expected = answer(from);
    let result = thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    let number = opened.fetch_add(1, Ordering::Relaxed);
                    match ask(from, to) {
                        Ok(answer) if answer == expected => {}
                        wrong => failures.lock().unwrap().push(format!("{number}: {wrong:?}")),
                    }
                    thread::sleep(PAUSE);
                }
            });
        }
        let _over = Ends(&over);
        work()
    });
    let failures = failures.into_inner().unwrap();
    let opened = opened.into_inner();
    assert!(
        failures.is_empty(),
        "{} of {opened} connections failed: {:#?}",
        failures.len(),
        &failures[..failures.len().min(10)]
    );
    (result, opened)
}

/// Neither a connection nor an event: pods come and go all the while.
fn nothing_is_lost(mut mesh: Mesh, ports: &[u16], times: usize) {
    let _app = App::start(&mesh.server.ns, (Family::V4.any(), PORT).into(), app::who);
    let visitor = mesh.node.pod("visitor");
    let capture = mesh.node.capture(&mesh.server);
    let Mesh {
        agent,
        client,
        server,
        node,
        ..
    } = &mut mesh;
    let retransmitted = || counters::kernel(&client.ns, "TcpExt", "TCPSynRetrans");
    let (before, socket) = (retransmitted(), agent.cni_socket());
    let over = AtomicBool::new(false);
    let (visits, opened) = thread::scope(|scope| {
        let visiting = scope.spawn(|| {
            let event = cni::event(&visitor).to_string();
            let mut visits = 0;
            while !over.load(Ordering::Relaxed) {
                for path in ["/cmdadd", "/cmddel"] {
                    let answer = cni::post(&socket, path, &event).unwrap();
                    assert_eq!(answer.status, 200, "{path}: {}", answer.body);
                }
                visits += 1;
            }
            visits
        });
        let ((), opened) = under_load(client, server, || {
            for number in 0..times {
                let mut old = agent.taken_over(node);
                let status = old.end();
                assert!(status.success(), "{number}: {status}");
            }
        });
        over.store(true, Ordering::Relaxed);
        (visiting.join().unwrap(), opened)
    });
    println!("{times} takeovers, {opened} connections, {visits} pods that came and went");
    assert_eq!(retransmitted(), before, "SYNs were lost");
    let segments = capture.stop();
    assert_eq!(opened_ports(&segments), ports);
    assert_eq!(contains(&segments, CANARY.as_bytes()), ports == [PORT]);
    // The last one is whole: pods, readiness and its end are its own.
    assert!(agent.pods().len() >= 2);
    assert!(agent.stop().success());
    assert!(!socket.exists() && !agent.state_dir().join("takeover.sock").exists());
}

/// A connection that is open, between pods whose agent gives it the time that it takes; and the server's applications.
fn with_a_long_connection() -> (Mesh, [App; 2], TcpStream) {
    let mesh = Mesh::hbone(Options {
        arguments: vec!["--connection-termination-deadline=60s".to_owned()],
        ..Options::default()
    });
    let echo = App::start(&mesh.server.ns, (Family::V4.any(), PORT + 1).into(), app::echo);
    let who = App::start(&mesh.server.ns, (Family::V4.any(), PORT).into(), app::who);
    let long = app::connect(&mesh.client.ns, mesh.server.addr(Family::V4, PORT + 1)).unwrap();
    says(&long, "before");
    (mesh, [echo, who], long)
}

/// A connection from before is carried by the old agent until it ends, and that agent ends then.
fn what_is_open_goes_on() {
    let (mut mesh, _apps, long) = with_a_long_connection();
    let mut old = mesh.agent.taken_over(&mesh.node);
    for _ in 0..20 {
        says(&long, "after");
        assert_eq!(ask(&mesh.client, &mesh.server).unwrap(), answer(&mesh.client));
    }
    assert!(old.ended().is_none(), "it ended before its connection");
    drop(long);
    assert!(old.end().success());
    works(&mesh);
}

fn says(mut stream: &TcpStream, text: &str) {
    use std::io::{Read as _, Write as _};
    stream.write_all(text.as_bytes()).unwrap();
    let mut answer = vec![0; text.len()];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(answer, text.as_bytes());
}

/// Connections and events are served.
fn works(mesh: &Mesh) {
    assert_eq!(ask(&mesh.client, &mesh.server).unwrap(), answer(&mesh.client));
    mesh.agent.enrol(&mesh.stranger);
    mesh.agent.release(&mesh.stranger);
}

/// One that speaks as an agent would.
struct Asker {
    socket: Seqpacket,
    runtime: tokio::runtime::Runtime,
}

impl Asker {
    fn connect(agent: &Agent) -> Self {
        Self::try_connect(agent).unwrap()
    }

    /// Whether an agent would hand over: it has not done so yet.
    fn welcomed(agent: &Agent) -> bool {
        let Ok(asker) = Self::try_connect(agent) else {
            return false;
        };
        let hello = Self::hello(&BTreeMap::new());
        let said = asker.runtime.block_on(asker.socket.send(hello.as_bytes(), &[]));
        said.is_ok() && asker.hear().0["message"] == "welcome"
    }

    fn try_connect(agent: &Agent) -> std::io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let path = agent.state_dir().join("takeover.sock");
        let socket = runtime.block_on(async { Seqpacket::connect(&path) })?;
        Ok(Self { socket, runtime })
    }

    fn say(&self, message: &str) {
        let sent = self.runtime.block_on(self.socket.send(message.as_bytes(), &[]));
        sent.unwrap();
    }

    /// The next message, and its descriptors; `Null` at the end.
    fn hear(&self) -> (Value, Vec<std::os::fd::OwnedFd>) {
        let receive = async {
            // What it has left unread is told before what it has said.
            match self.socket.recv(1 << 16).await {
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {
                    self.socket.recv(1 << 16).await
                }
                received => received,
            }
        };
        let received = self
            .runtime
            .block_on(async { tokio::time::timeout(DEADLINE, receive).await });
        let message = received.expect("an answer in time").unwrap();
        let value = match message.bytes.is_empty() {
            true => Value::Null,
            false => serde_json::from_slice(&message.bytes).unwrap(),
        };
        (value, message.fds)
    }

    fn hello(settings: &BTreeMap<&str, &str>) -> String {
        json!({"message": "hello", "protocol": 1, "version": "of the test", "settings": settings}).to_string()
    }
}

const PAUSE_MESSAGE: &str = r#"{"message":"pause"}"#;

/// At whatever step it goes, or says what it should not.
fn who_asks_and_goes_is_not_missed() {
    let mut mesh = Mesh::hbone(Options::default());
    let _app = App::start(&mesh.server.ns, (Family::V4.any(), PORT).into(), app::who);
    let hello = Asker::hello(&BTreeMap::new());
    let Mesh {
        agent,
        client,
        server,
        ..
    } = &mesh;
    under_load(client, server, || {
        for steps in 0..4 {
            let asker = Asker::connect(agent);
            if steps > 0 {
                asker.say(&hello);
                let (welcome, fds) = asker.hear();
                assert_eq!(welcome["message"], "welcome", "{welcome}");
                assert_eq!(fds.len(), 7, "{welcome}");
            }
            if steps > 1 {
                asker.say(PAUSE_MESSAGE);
            }
            if steps > 2 {
                let pods: Vec<_> = (0..3).map(|_| asker.hear()).collect();
                let kinds = pods
                    .iter()
                    .map(|(message, fds)| (message["message"].as_str().unwrap(), fds.len()));
                assert!(kinds.eq([("pod", 3), ("pod", 3), ("pods", 0)]), "{pods:?}");
                let listening = redirector::sys::socket::local_addr(pods[0].1[0].as_fd()).unwrap();
                assert_eq!(SocketAddr::port(&listening), 15001);
            }
        }
        for (words, expected) in [
            (&["{}"][..], "no message"),
            (&[PAUSE_MESSAGE], "out of turn"),
            (&[hello.as_str(), r#"{"message":"commit"}"#], "out of turn"),
            (&[hello.as_str(), "pause"], "no message"),
        ] {
            let asker = Asker::connect(agent);
            for word in words {
                asker.say(word);
            }
            let (mut heard, _) = asker.hear();
            if heard["message"] == "welcome" {
                (heard, _) = asker.hear();
            }
            assert_eq!(heard["message"], "withdrawn", "{words:?}: {heard}");
            let reason = heard["reason"].as_str().unwrap();
            assert!(reason.contains(expected), "{words:?}: {reason}");
        }
    });
    works(&mesh);
    let mut old = mesh.agent.taken_over(&mesh.node);
    assert!(old.end().success());
    works(&mesh);
}

/// Killed at whatever time: the other one goes on, and nobody notices, unless it had handed over by then.
fn a_successor_that_dies_is_not_missed() {
    let mut mesh = Mesh::hbone(Options::default());
    let _app = App::start(&mesh.server.ns, (Family::V4.any(), PORT).into(), app::who);
    for life in lives() {
        let old = mesh.agent.succeed(&mesh.node);
        thread::sleep(life);
        mesh.agent.kill();
        mesh.agent = old;
        if Asker::welcomed(&mesh.agent) {
            under_load(&mesh.client, &mesh.server, || thread::sleep(PAUSE * 10));
        } else {
            assert!(mesh.agent.end().success());
            mesh.agent.restart(&mesh.node);
        }
        works(&mesh);
    }
}

/// Starts a successor that makes the pods ready and never has a certificate, so that it does not ask for the rest; returns when it is so
/// far, with the agent that rests.
fn half_taken_over(mesh: &mut Mesh, mut options: Options) -> Agent {
    let empty = mesh.node.directory().join("no-certificates");
    fs::create_dir_all(&empty).unwrap();
    let directory = ["--cert-dir".to_owned(), empty.display().to_string()];
    options.arguments.extend(directory);
    options
        .environment
        .push(("FAKE_CA".to_owned(), "false".to_owned()));
    let ready = |agent: &Agent| agent.log().matches("pods of an earlier agent").count();
    let before = ready(&mesh.agent);
    let old = mesh.agent.succeed_with(&mesh.node, options);
    wait::until("the successor to have the pods", || {
        assert!(mesh.agent.ended().is_none(), "it ended:\n{}", mesh.agent.log());
        (ready(&mesh.agent) > before).then_some(())
    });
    old
}

/// Whether what the client sends is to be read on the wire.
fn in_plain(mesh: &Mesh) -> bool {
    let capture = mesh.node.capture(&mesh.server);
    assert_eq!(ask(&mesh.client, &mesh.server).unwrap(), answer(&mesh.client));
    contains(&capture.stop(), CANARY.as_bytes())
}

fn is_captured_again(mesh: &Mesh) {
    wait::until("the client to be captured again", || {
        (!in_plain(mesh)).then_some(())
    });
    works(mesh);
}

/// They were in force in the pods when it died, or gave up by itself.
fn a_successors_rules_go_with_it() {
    let mut mesh = Mesh::hbone(Options::default());
    let _app = App::start(&mesh.server.ns, (Family::V4.any(), PORT).into(), app::who);
    let rules = mesh.node.directory().join("other-rules.yaml");
    let text =
        format!("pods:\n- {{namespace: demo, name: client, rules: {{excludeOutboundPorts: [{PORT}]}}}}\n");
    fs::write(&rules, text).unwrap();
    for killed in [true, false] {
        assert!(!in_plain(&mesh));
        let options = Options {
            arguments: vec!["--rules".to_owned(), rules.display().to_string()],
            ..Options::default()
        };
        let old = half_taken_over(&mut mesh, options);
        assert!(in_plain(&mesh), "the successor's rules were not in force");
        if killed {
            mesh.agent.kill();
        } else {
            let status = wait::within(UNCERTIFIED, "the successor to give up", || mesh.agent.ended());
            assert!(!status.success(), "{status}");
            let log = mesh.agent.log();
            assert!(log.contains("there is no certificate for"), "{log}");
        }
        mesh.agent = old;
        is_captured_again(&mesh);
    }
}

/// The hooks of the same build, of another kind, and their slots: to the successor those of the programs that the old agent has ready
/// were free.
fn a_successors_hooks_go_with_it(old: Options, new: &Options) {
    let mut mesh = Mesh::hbone(old);
    let _app = App::start(&mesh.server.ns, (Family::V4.any(), PORT).into(), app::who);
    let visitors: Vec<_> = (0..12)
        .map(|number| mesh.node.pod(&format!("v{number}")))
        .collect();
    let capture = mesh.node.capture(&mesh.server);
    mesh.agent.settle();
    for round in 0..3 {
        let old = half_taken_over(&mut mesh, new.clone());
        under_load(&mesh.client, &mesh.server, || mesh.agent.kill());
        mesh.agent = old;
        under_load(&mesh.client, &mesh.server, || {
            for visitor in &visitors {
                mesh.agent.enrol(visitor);
            }
        });
        // The looks are over when each pod has one slot.
        wait::until("each pod to have a slot of its own", || {
            let slots = slots(&mesh.agent);
            let uids: BTreeSet<_> = slots.iter().map(|(_, uid)| uid).collect();
            let numbers: BTreeSet<_> = slots.iter().map(|(slot, _)| slot).collect();
            assert_eq!(uids.len(), visitors.len() + 2, "{slots:?}");
            (numbers.len() == uids.len() && slots.len() == uids.len()).then_some(())
        });
        assert_eq!(impaired(&mesh.agent), 0, "{round}");
        works(&mesh);
        for visitor in &visitors {
            mesh.agent.release(visitor);
        }
    }
    let segments = capture.stop();
    assert_eq!(opened_ports(&segments), [15008]);
    assert!(!contains(&segments, CANARY.as_bytes()));
    let log = mesh.agent.log();
    for fault in ["have the same slot", "pins beside", "clean-up incomplete"] {
        assert!(!log.contains(fault), "{log}");
    }
    let mut old = mesh.agent.taken_over(&mesh.node);
    assert!(old.end().success());
    works(&mesh);
}

fn impaired(agent: &Agent) -> usize {
    let whole = |pod: &Value| pod["state"] == "captured" && pod["impaired"] != true;
    agent.pods().iter().filter(|pod| !whole(pod)).count()
}

/// The only build of the programs that something is pinned for.
fn build(agent: &Agent) -> PathBuf {
    let mut builds = fs::read_dir(agent.bpffs_dir().join("builds")).unwrap();
    let only = builds.next().unwrap().unwrap().path();
    assert!(builds.next().is_none(), "one build");
    only
}

/// What is pinned for pods: slots, and UIDs.
fn slots(agent: &Agent) -> Vec<(u32, String)> {
    let pinned = fs::read_dir(build(agent).join("pods")).unwrap();
    let read = |entry: std::io::Result<fs::DirEntry>| {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let (slot, uid) = name.split_once('-').unwrap();
        (slot.parse().unwrap(), uid.to_owned())
    };
    pinned.map(read).collect()
}

/// A successor that is too slow, and does not hear that it has got nothing, goes on with the pods for a while.
fn what_is_done_after_the_withdrawal_is_put_right() {
    let mesh = Mesh::hbone(Options::default());
    let _app = App::start(&mesh.server.ns, (Family::V4.any(), PORT).into(), app::who);
    let asker = Asker::connect(&mesh.agent);
    asker.say(&Asker::hello(&BTreeMap::new()));
    asker.hear();
    asker.say(PAUSE_MESSAGE);
    while asker.hear().0["message"] != "pods" {}
    asker.say("{}");
    assert_eq!(asker.hear().0["message"], "withdrawn");
    let client = |(slot, uid): (u32, String)| (uid == mesh.client.uid).then_some(slot);
    let slot = slots(&mesh.agent).into_iter().find_map(client).unwrap();
    let map = MapData::from_pin(build(&mesh.agent).join("maps").join(PODS)).unwrap();
    let mut pods = Array::<_, [u8; size_of::<PodEntry>()]>::try_from(Map::Array(map)).unwrap();
    // Until the other one has looked and goes by what it remembers.
    wait::until("the client to be left alone", || {
        let mut entry = pods.get(&slot, 0).unwrap();
        entry[..4].copy_from_slice(&FLAG_RELEASING.to_ne_bytes());
        pods.set(slot, entry, 0).unwrap();
        in_plain(&mesh).then_some(())
    });
    drop(asker);
    is_captured_again(&mesh);
}

/// One of another build removes what serves no pod.
fn pins_that_a_successor_has_removed_are_made_anew() {
    let mesh = Mesh::started(Options::default(), |client, server| {
        Workloads::hbone([client, server])
    });
    let _app = App::start(&mesh.server.ns, (Family::V4.any(), PORT).into(), app::who);
    mesh.agent.settle();
    let asker = Asker::connect(&mesh.agent);
    asker.say(&Asker::hello(&BTreeMap::new()));
    asker.hear();
    asker.say(PAUSE_MESSAGE);
    assert_eq!(asker.hear().0["message"], "pods");
    let build = build(&mesh.agent);
    for directory in ["maps", "deciders", "pods"] {
        for pin in fs::read_dir(build.join(directory)).unwrap() {
            fs::remove_file(pin.unwrap().path()).unwrap();
        }
        fs::remove_dir(build.join(directory)).unwrap();
    }
    fs::remove_dir(&build).unwrap();
    drop(asker);
    for pod in [&mesh.client, &mesh.server] {
        mesh.agent.enrol(pod);
    }
    assert!(!in_plain(&mesh));
    works(&mesh);
    assert_eq!(fs::read_dir(build.join("deciders")).unwrap().count(), 2);
}

fn lives() -> impl Iterator<Item = Duration> {
    (0..20).map(|step| Duration::from_millis(step * 60))
}

/// Killed at whatever time: the other one goes on by itself.
fn an_agent_that_dies_meanwhile_is_succeeded() {
    an_agent_that_ends_meanwhile_is_succeeded(Agent::kill);
}

/// Stopped at whatever time, likewise, and it leaves in place what the other one goes on with.
fn an_agent_that_is_stopped_meanwhile_is_succeeded() {
    an_agent_that_ends_meanwhile_is_succeeded(|old| assert!(old.stop().success(), "{}", old.log()));
}

fn an_agent_that_ends_meanwhile_is_succeeded(end: fn(&mut Agent)) {
    let mut mesh = Mesh::hbone(Options::default());
    let _app = App::start(&mesh.server.ns, (Family::V4.any(), PORT).into(), app::who);
    for life in lives() {
        // Otherwise it could end before anybody asks, and there is nobody to go on then.
        let mut old = asked(&mut mesh, &[]);
        thread::sleep(life);
        end(&mut old);
        wait::until("the successor to serve", || {
            assert!(mesh.agent.ended().is_none(), "{life:?}:\n{}", mesh.agent.log());
            (ask(&mesh.client, &mesh.server).ok()? == answer(&mesh.client)).then_some(())
        });
        wait::until("the successor to take events", || {
            let answer = cni::post(
                &mesh.agent.cni_socket(),
                "/cmdadd",
                &cni::event(&mesh.client).to_string(),
            );
            (answer.ok()?.status == 200).then_some(())
        });
        works(&mesh);
    }
}

/// Starts a successor of one with the default options, and waits until it is welcomed; returns the agent that it takes over from. They have one log.
fn asked(mesh: &mut Mesh, environment: &[(&str, &str)]) -> Agent {
    let times = |agent: &Agent| agent.log().matches("taking over from the running agent").count();
    let before = times(&mesh.agent);
    let mut options = Options::default();
    let more = environment
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    options.environment.extend(more);
    let old = mesh.agent.succeed_with(&mesh.node, options);
    wait::until("the successor to be welcomed", || {
        assert!(mesh.agent.ended().is_none(), "{}", mesh.agent.log());
        (times(&mesh.agent) > before).then_some(())
    });
    old
}

/// A control plane that nobody reaches, which a successor waits for.
const NOBODY: (&str, &str) = ("XDS_ADDRESS", "http://127.0.0.1:9");

/// The successor ends with what is wrong, and the other one goes on.
fn what_differs_is_refused() {
    let mesh = Mesh::hbone(Options::default());
    let _app = App::start(&mesh.server.ns, (Family::V4.any(), PORT).into(), app::who);
    let directory = mesh.node.directory();
    for (flag, value, expected) in [
        (
            "--metrics-addr",
            "127.0.0.1:15999",
            "--metrics-addr is 127.0.0.1:15020 there",
        ),
        ("--redirect", "none", "--redirect is ebpf there, and none here"),
        ("--ipv6-enabled", "false", "--ipv6-enabled is true there"),
        (
            "--ztunnel-uds",
            "zds.sock",
            "with --ztunnel-uds the listeners are other",
        ),
    ] {
        let mut second = process::command(&mesh.node.host.ns, binary().unwrap());
        second.args(["agent", "--takeover=auto", "--fake-ca"]);
        second.arg("--workloads").arg(directory.join("workloads.yaml"));
        for (flag, file) in [
            ("--cni-socket", "cni.sock"),
            ("--state-dir", "state"),
            ("--bpffs-dir", "bpf"),
        ] {
            second.arg(flag).arg(directory.join(file));
        }
        let mut addresses = BTreeMap::from([
            ("--admin-addr", "127.0.0.1:15000"),
            ("--metrics-addr", "127.0.0.1:15020"),
            ("--readiness-addr", "127.0.0.1:15021"),
        ]);
        addresses.insert(flag, value);
        for (flag, value) in addresses {
            second.arg(format!("{flag}={value}"));
        }
        let (status, text) = process::output(&mut second, DEADLINE);
        assert!(!status.success(), "{flag}: {text}");
        let last = text.lines().last().unwrap_or_default();
        assert!(last.contains(expected), "{flag}: {text}");
        works(&mesh);
    }
}

/// Whoever has not got it all by then gets nothing, and touches nothing.
fn an_agent_that_releases_its_pods_meanwhile_is_not_taken_over() {
    let mut mesh = Mesh::hbone(Options {
        arguments: vec!["--release-on-exit".to_owned()],
        ..Options::default()
    });
    let asker = Asker::connect(&mesh.agent);
    asker.say(&Asker::hello(&BTreeMap::new()));
    assert_eq!(asker.hear().0["message"], "welcome");
    assert!(mesh.agent.stop().success());
    let withdrawn = asker.hear().0;
    let reason = "it is being stopped, and releases its pods";
    assert_eq!(withdrawn["reason"], reason, "{withdrawn}");
    drop(asker);
    let _app = App::start(&mesh.server.ns, (Family::V4.any(), PORT).into(), app::who);
    mesh.agent.restart(&mesh.node);
    for pod in [&mesh.client, &mesh.server] {
        mesh.agent.enrol(pod);
    }
    works(&mesh);
}

/// The other one goes on as if nobody had asked.
fn a_successor_that_waits_ends_when_it_is_told() {
    let mut mesh = Mesh::hbone(Options::default());
    let _app = App::start(&mesh.server.ns, (Family::V4.any(), PORT).into(), app::who);
    let old = asked(&mut mesh, &[NOBODY]);
    let status = mesh.agent.stop();
    assert!(status.success(), "{status}:\n{}", mesh.agent.log());
    mesh.agent = old;
    works(&mesh);
}

/// Without what it waits for: there is nobody else.
fn a_successor_that_waits_goes_on_alone() {
    let mut mesh = Mesh::hbone(Options::default());
    let back = |agent: &Agent| agent.log().matches("pods of an earlier agent").count();
    let before = back(&mesh.agent);
    let mut old = asked(&mut mesh, &[NOBODY]);
    old.kill();
    wait::until("the successor to have the pods", || {
        assert!(mesh.agent.ended().is_none(), "{}", mesh.agent.log());
        (back(&mesh.agent) > before).then_some(())
    });
    mesh.agent.enrol(&mesh.stranger);
    assert!(mesh.agent.stop().success());
}

/// The successor says which it is, and its listeners stay with the agent that has them.
fn a_pod_whose_record_is_damaged_stays_served() {
    let mut mesh = Mesh::hbone(Options::default());
    let _app = App::start(&mesh.server.ns, (Family::V4.any(), PORT).into(), app::who);
    let record = mesh
        .agent
        .state_dir()
        .join(format!("pods/{}.json", mesh.server.uid));
    let whole = std::fs::read(&record).unwrap();
    std::fs::write(&record, &whole[..whole.len() / 2]).unwrap();
    let old = mesh.agent.succeed(&mesh.node);
    let status = mesh.agent.end();
    let log = mesh.agent.log();
    assert!(!status.success(), "{status}:\n{log}");
    let expected = format!("the record of pod {}", mesh.server.uid);
    let said = |line: &str| line.contains(&expected) && line.contains(".json.bad");
    assert!(log.lines().any(said), "{log}");
    mesh.agent = old;
    works(&mesh);
    // With what it was, all is well again.
    std::fs::write(&record, &whole).unwrap();
    let mut old = mesh.agent.taken_over(&mesh.node);
    assert!(old.end().success());
    works(&mesh);
}

/// Nor does it keep the directories: the one that has taken over can be followed at once when it dies.
fn an_agent_that_drains_holds_nobody_up() {
    let (mut mesh, _apps, long) = with_a_long_connection();
    let mut old = mesh.agent.taken_over(&mesh.node);
    // When events are taken, the old one has let go of all.
    works(&mesh);
    mesh.agent.kill();
    mesh.agent.restart(&mesh.node);
    wait::until("the pods to be back", || ask(&mesh.client, &mesh.server).ok());
    works(&mesh);
    says(&long, "after");
    assert!(old.ended().is_none(), "it ended before its connection");
    drop(long);
    assert!(old.end().success());
    works(&mesh);
}
