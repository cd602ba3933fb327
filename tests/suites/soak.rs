//! All sorts of traffic at once, for a while: large and small, half-closed, reset, plain and by HBONE, while pods come and go and
//! certificates are renewed. Every byte arrives, no canary is on the wire, and at the end the agent holds what it held at the beginning.
//!
//! Short by default, so that CI has it; `cargo xtask soak --minutes N` gives it `REDIRECTOR_SOAK_SECONDS`.

use std::{
    collections::BTreeMap,
    env,
    io::{Read, Write},
    net::{Shutdown, TcpStream},
    process::ExitCode,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use redirector_tests::{
    agent::{Agent, Options},
    app::{self, App},
    capture::contains,
    holdings::Process,
    node::{Family, Host, Node, Pod},
    suite::{Needs, case, main as suite},
    wait::{self, Ends},
    workloads::Workloads,
};

const SHORT: Duration = Duration::from_secs(20);
/// Applications in every pod and outside.
const ECHO: u16 = 8080;
const HASH: u16 = 8081;
const SOURCE: u16 = 8082;
const CANARY: &str = "canary: b7d20f54-said between pods alone";
/// What the allocator and the kernel may keep of a burst.
const SLACK_KIB: u64 = 64 << 10;
const TTL: &str = "15s";

fn main() -> ExitCode {
    suite(
        Needs::Agent,
        1,
        vec![case("all_sorts_of_traffic", all_sorts_of_traffic)],
    )
}

fn duration() -> Duration {
    match env::var("REDIRECTOR_SOAK_SECONDS") {
        Ok(text) => Duration::from_secs(text.parse().expect("REDIRECTOR_SOAK_SECONDS is a number")),
        Err(_) => SHORT,
    }
}

/// A kind of traffic: once there and back, or a panic.
type Kind = (&'static str, fn(&Host, &Host, Family, u64));

/// Between enrolled pods.
const KINDS: &[Kind] = &[
    ("a canary", canary),
    ("much to the server", upload),
    ("much from the server", download),
    ("a long talk", long_talk),
    ("a half-closed one", half_closed),
    ("a reset", reset),
];

fn canary(from: &Host, to: &Host, family: Family, _: u64) {
    assert_eq!(app::ask(&from.ns, to.addr(family, ECHO), CANARY).unwrap(), CANARY);
}

fn upload(from: &Host, to: &Host, family: Family, round: u64) {
    let mut stream = app::connect(&from.ns, to.addr(family, HASH)).unwrap();
    let sent = app::write_hashed(&mut stream, 1 + (round * 77_777) % (6 << 20)).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut heard = String::new();
    stream.read_to_string(&mut heard).unwrap();
    assert_eq!(heard, sent);
}

fn download(from: &Host, to: &Host, family: Family, round: u64) {
    let bytes = 1 + (round * 99_991) % (6 << 20);
    let mut stream = app::connect(&from.ns, to.addr(family, SOURCE)).unwrap();
    writeln!(stream, "{bytes}").unwrap();
    let heard = app::read_hashed(&mut stream).unwrap();
    // The source is the same each time.
    assert_eq!(heard, app::write_hashed(&mut std::io::sink(), bytes).unwrap());
}

fn talk(stream: &mut TcpStream, text: &[u8]) {
    let mut heard = vec![0; text.len()];
    stream.write_all(text).unwrap();
    stream.read_exact(&mut heard).unwrap();
    assert_eq!(heard, text);
}

fn long_talk(from: &Host, to: &Host, family: Family, round: u64) {
    let mut stream = app::connect(&from.ns, to.addr(family, ECHO)).unwrap();
    for turn in 0..50 {
        talk(&mut stream, format!("{CANARY} {round} {turn}").as_bytes());
        thread::sleep(Duration::from_millis(5));
    }
}

fn half_closed(from: &Host, to: &Host, family: Family, round: u64) {
    let text = format!("{CANARY} {round}").repeat(200);
    assert_eq!(app::ask(&from.ns, to.addr(family, ECHO), &text).unwrap(), text);
}

fn reset(from: &Host, to: &Host, family: Family, round: u64) {
    let mut stream = app::connect(&from.ns, to.addr(family, ECHO)).unwrap();
    talk(&mut stream, b"then gone");
    if round.is_multiple_of(2) {
        // Unread bytes, so that the kernel resets it as well.
        stream.write_all(&[b'x'; 4096]).unwrap();
    }
    socket2::SockRef::from(&stream)
        .set_linger(Some(Duration::ZERO))
        .unwrap();
}

fn serve(host: &Host) -> Vec<App> {
    let handlers: [(u16, app::Handler); 3] = [(ECHO, app::echo), (HASH, app::hash), (SOURCE, app::source)];
    let of = |family: Family| {
        handlers.map(|(port, handler)| App::start(&host.ns, (family.any(), port).into(), handler))
    };
    Family::BOTH.into_iter().flat_map(of).collect()
}

/// Runs `act` until the end, and counts; a panic ends the others too.
fn repeat(stop: &AtomicBool, count: &AtomicU64, mut act: impl FnMut(u64)) {
    let _stops = Ends(stop);
    let mut round = 0;
    while !stop.load(Ordering::Relaxed) && !wait::interrupted() {
        act(round);
        round += 1;
        count.fetch_add(1, Ordering::Relaxed);
    }
}

/// Comes, talks, and goes.
fn visit(agent: &Agent, visitor: &Pod, server: &Host, round: u64) {
    agent.enrol(visitor);
    let family = Family::BOTH[(round % 2) as usize];
    canary(visitor, server, family, round);
    let mut open = app::connect(&visitor.ns, server.addr(family, ECHO)).unwrap();
    talk(&mut open, CANARY.as_bytes());
    agent.release(visitor);
    // What is open goes with the pod.
    assert!(matches!(open.read(&mut [0; 1]), Err(_) | Ok(0)));
}

fn at_rest(agent: &Agent) -> (Vec<String>, Process) {
    agent.settle();
    (agent.descriptors(), Process::of(agent))
}

fn all_sorts_of_traffic() {
    let arguments = ["--svid-ttl", TTL, "--pool-unused-release-timeout", "3s"];
    let options = Options {
        arguments: arguments.map(str::to_owned).to_vec(),
        ..Options::default()
    };
    let node = Node::new();
    let [client, server, visitor] = ["client", "server", "visitor"].map(|name| node.pod(name));
    let agent = Agent::start(&node, &Workloads::hbone([&client, &server, &visitor]), options);
    for pod in [&client, &server] {
        agent.enrol(pod);
    }
    let _apps = [&*client, &*server, &node.outside].map(serve);
    // Once through, so that what is made once is made.
    for (family, (_, kind)) in Family::BOTH
        .into_iter()
        .flat_map(|family| KINDS.iter().map(move |kind| (family, kind)))
    {
        kind(&client, &server, family, 1);
    }
    visit(&agent, &visitor, &server, 0);
    thread::sleep(Duration::from_secs(5));
    let before = at_rest(&agent);

    let stop = AtomicBool::new(false);
    let counts: BTreeMap<&str, AtomicU64> = KINDS
        .iter()
        .map(|(name, _)| *name)
        .chain(["plain", "visits"])
        .map(|name| (name, AtomicU64::new(0)))
        .collect();
    let end = Instant::now() + duration();
    thread::scope(|scope| {
        let watched = &server;
        let (stop, counts, agent, client, server, node) = (&stop, &counts, &agent, &*client, &*server, &node);
        for (number, (name, kind)) in KINDS.iter().enumerate() {
            let (from, to) = if number % 2 == 0 {
                (client, server)
            } else {
                (server, client)
            };
            scope.spawn(move || {
                repeat(stop, &counts[name], |round| {
                    kind(from, to, Family::BOTH[(round % 2) as usize], round);
                });
            });
        }
        scope.spawn(move || {
            repeat(stop, &counts["plain"], |round| {
                let text = format!("not secret {round}").repeat(100);
                let to = node.outside.addr(Family::BOTH[(round % 2) as usize], ECHO);
                assert_eq!(app::ask(&client.ns, to, &text).unwrap(), text);
            });
        });
        let visitor = &visitor;
        scope.spawn(move || {
            repeat(stop, &counts["visits"], |round| {
                visit(agent, visitor, server, round)
            })
        });
        while Instant::now() < end && !stop.load(Ordering::Relaxed) && !wait::interrupted() {
            // A look at the wire now and then: a capture is in memory.
            let capture = node.capture(watched);
            thread::sleep(Duration::from_secs(1));
            assert!(!contains(&capture.stop(), b"canary"), "a canary was on the wire");
        }
        stop.store(true, Ordering::Relaxed);
    });
    for (name, count) in &counts {
        println!("{name}: {} times", count.load(Ordering::Relaxed));
    }
    assert!(
        counts.values().all(|count| count.load(Ordering::Relaxed) > 0),
        "every kind had its turn"
    );
    let renewed = agent.log().matches("new certificate").count();
    assert!(renewed > 4, "certificates were renewed meanwhile: {renewed}");
    let mut last = Vec::new();
    wait::until("the agent to hold what it held before", || {
        last = agent.descriptors();
        (last.len() <= before.0.len()).then_some(())
    });
    let resident = Process::of(&agent).resident_kib;
    println!(
        "resident: {} KiB before, {resident} KiB after",
        before.1.resident_kib
    );
    assert!(
        resident < before.1.resident_kib + SLACK_KIB,
        "{resident} KiB, {} before",
        before.1.resident_kib
    );
    let panics = agent.log().matches("panicked").count();
    assert_eq!(panics, 0);
}
