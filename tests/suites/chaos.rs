//! Faults in an order that chance makes, under traffic: agents that die, stand still, are followed by others or have nothing left to open;
//! control planes that go or have another clock; programs that are taken away; pods that come and go meanwhile.
//!
//! Whatever happens: no canary is on the wire, whoever is answered has the source that it has, and who is kept out by a policy stays out.
//! Connections may fail while a fault lasts, and work again when it is over. At the end everything is held that was held before.
//!
//! Each fault once by default, so that CI has it; `cargo xtask soak` gives it `REDIRECTOR_SOAK_SECONDS`, and it goes on in new orders.
//! What it says of its seed makes the same order again: `REDIRECTOR_CHAOS_SEED`.

use std::{
    env, fs,
    io::{BufRead as _, BufReader, Write as _},
    net::{SocketAddr, TcpStream},
    process::{Command, ExitCode},
    sync::{
        RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use redirector_tests::{
    ads::{Ads, deny_account},
    agent::{Agent, Options},
    app::{self, App},
    capture::contains,
    cni,
    footprint::{detach_link, pinned_below},
    grpc::Credentials,
    holdings::Holdings,
    istio_ca::{IstioCa, Mood},
    mesh::PORT,
    node::{Family, Node, Pod},
    suite::{Needs, case, main as suite},
    wait::{self, Ends},
    workloads::Workloads,
};

const CANARY: &str = "canary-51c7e0";
/// Certificates are renewed meanwhile, and live longer than any fault lasts.
const LIFETIME: Duration = Duration::from_secs(60);
const RECOVERY: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(5);
/// A soft limit under any that an agent comes to by itself.
const FEW_DESCRIPTORS: usize = 4;

fn main() -> ExitCode {
    suite(Needs::Agent, 1, vec![case("whatever_happens", whatever_happens)])
}

/// What faults are made of.
struct Field<'a> {
    agent: &'a mut Agent,
    node: &'a Node,
    client: &'a Pod,
    server: &'a Pod,
    visitor: &'a Pod,
    ads: Ads,
    ca: IstioCa,
    options: Options,
    chance: fastrand::Rng,
    /// Held for writing, there is no traffic.
    traffic: &'a RwLock<()>,
}

type Fault = (&'static str, fn(&mut Field<'_>));

const FAULTS: &[Fault] = &[
    ("the agent is killed", killed),
    ("the agent is stopped", stopped),
    ("the agent is killed while pods come and go", killed_among_pods),
    ("an agent takes over", taken_over),
    ("an agent that takes over is killed", killed_as_successor),
    ("an agent that is taken over is killed", killed_as_predecessor),
    ("the agent stands still", stands_still),
    ("the agent has little time", little_time),
    ("the agent has nothing left to open", nothing_to_open),
    ("the authority is away", without_authority),
    ("the control plane is away", without_control_plane),
    ("the agent is killed while both are away", killed_alone),
    ("the authority's clock is ahead", clock_ahead),
    ("the server's programs are taken away", |field| {
        programs_taken_away(field, field.server);
    }),
    ("the client's programs are taken away", |field| {
        programs_taken_away(field, field.client);
    }),
];

fn killed(field: &mut Field<'_>) {
    field.agent.kill();
    field.a_while();
    field.agent.restart(field.node);
}

fn stopped(field: &mut Field<'_>) {
    assert!(field.agent.stop().success());
    field.a_while();
    field.agent.restart(field.node);
}

fn killed_among_pods(field: &mut Field<'_>) {
    let (socket, event) = (field.agent.cni_socket(), cni::event(field.visitor).to_string());
    let gone = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            for path in ["/cmdadd", "/cmddel"].iter().cycle() {
                if cni::post(&socket, path, &event).is_err() && gone.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        field.a_while();
        gone.store(true, Ordering::Relaxed);
        field.agent.kill();
    });
    field.agent.restart(field.node);
    field.agent.release(field.visitor);
}

fn taken_over(field: &mut Field<'_>) {
    let mut old = field.agent.taken_over(field.node);
    assert!(old.end().success());
}

fn killed_as_successor(field: &mut Field<'_>) {
    let given = |agent: &Agent| agent.log().matches("another agent has taken over").count();
    let before = given(field.agent);
    let mut old = field.agent.succeed(field.node);
    thread::sleep(field.span(1_200));
    field.agent.kill();
    let end = Instant::now() + Duration::from_secs(1);
    while given(&old) == before && Instant::now() < end {
        thread::sleep(PAUSE);
    }
    if given(&old) == before {
        *field.agent = old;
    } else {
        assert!(old.end().success());
        field.agent.restart(field.node);
    }
}

fn killed_as_predecessor(field: &mut Field<'_>) {
    let mut old = field.agent.succeed(field.node);
    thread::sleep(field.span(1_200));
    old.kill();
}

fn stands_still(field: &mut Field<'_>) {
    field.agent.pause();
    field.a_while();
    field.agent.resume();
}

fn little_time(field: &mut Field<'_>) {
    for _ in 0..20 {
        field.agent.pause();
        thread::sleep(Duration::from_millis(90));
        field.agent.resume();
        thread::sleep(Duration::from_millis(10));
    }
}

fn nothing_to_open(field: &mut Field<'_>) {
    let limits = fs::read_to_string(format!("/proc/{}/limits", field.agent.pid())).unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max open files"));
    let soft = line.and_then(|line| line.split_whitespace().nth(3)).unwrap();
    let limit = |soft: &str| {
        let pid = field.agent.pid().to_string();
        let limited = Command::new("prlimit")
            .args(["--pid", &pid, &format!("--nofile={soft}:")])
            .status();
        assert!(limited.unwrap().success());
    };
    limit(&(field.agent.descriptors().len() + FEW_DESCRIPTORS).to_string());
    // More than there is room for; and a pod, which is told of that, or has been in time.
    let open = |_| app::connect(&field.client.ns, field.server.addr(Family::V4, PORT));
    let open: Vec<_> = (0..2 * FEW_DESCRIPTORS).map(open).collect();
    let answer = cni::post(
        &field.agent.cni_socket(),
        "/cmdadd",
        &cni::event(field.visitor).to_string(),
    );
    println!(
        "with few descriptors a pod is answered {:?}",
        answer.map(|answer| answer.status)
    );
    drop(open);
    limit(soft);
    field.agent.release(field.visitor);
}

fn without_authority(field: &mut Field<'_>) {
    field.ca.down();
    field.goes_on();
    field.a_while();
    field.ca.up(&field.node.host.ns);
}

fn without_control_plane(field: &mut Field<'_>) {
    field.ads.down();
    field.goes_on();
    field.a_while();
    field.ads.up(&field.node.host.ns);
}

/// It knows no policies, so nobody is let in before the control plane is back.
fn killed_alone(field: &mut Field<'_>) {
    field.agent.kill();
    field.ads.down();
    field.ca.down();
    let unready = Options {
        unready: true,
        ..field.options.clone()
    };
    field.agent.restart_with(field.node, unready);
    field.a_while();
    let refused = ask(field.client, field.server, Family::V4);
    assert!(refused.is_none(), "{refused:?}");
    field.ads.up(&field.node.host.ns);
    field.ca.up(&field.node.host.ns);
}

fn clock_ahead(field: &mut Field<'_>) {
    field.ca.set(Mood::Ahead(Duration::from_secs(2)));
    field.a_while();
    field.ca.set(Mood::Good);
}

/// Root can do that, and a pod with CAP_NET_ADMIN; what it says in the seconds until the agent looks is its own affair.
fn programs_taken_away(field: &mut Field<'_>, pod: &Pod) {
    let _silence = field.traffic.write().unwrap();
    let repairs = || -> f64 {
        let samples = field.agent.metrics();
        let of = samples
            .iter()
            .filter(|sample| sample.name == "redirector_repairs_total");
        of.map(|sample| sample.value).sum()
    };
    let before = repairs();
    let is_the_pods = |path: &fs::DirEntry| {
        path.file_name()
            .to_string_lossy()
            .ends_with(&format!("-{}", pod.uid))
    };
    let pins = directories(&field.agent.bpffs_dir())
        .find(is_the_pods)
        .expect("it is captured");
    let links = pinned_below(&pins.path())
        .into_iter()
        .filter(|(kind, _)| *kind == "link");
    links.for_each(|(_, id)| detach_link(id));
    // Where there is no TCX, they are filters.
    let _ = pod.ns.run(|| {
        Command::new("tc")
            .args(["qdisc", "del", "dev", "eth0", "clsact"])
            .output()
    });
    wait::until("the repair", || (repairs() > before).then_some(()));
}

/// All below one, at whatever depth.
fn directories(directory: &std::path::Path) -> impl Iterator<Item = fs::DirEntry> + use<> {
    let mut left = vec![directory.to_owned()];
    std::iter::from_fn(move || {
        let entries = fs::read_dir(left.pop()?).into_iter().flatten().flatten();
        let inner: Vec<_> = entries.filter(|entry| entry.path().is_dir()).collect();
        left.extend(inner.iter().map(fs::DirEntry::path));
        Some(inner)
    })
    .flatten()
}

impl Field<'_> {
    /// At most so many milliseconds.
    fn span(&mut self, most: u64) -> Duration {
        Duration::from_millis(self.chance.u64(0..most))
    }

    fn a_while(&mut self) {
        thread::sleep(self.span(1_500));
    }

    fn goes_on(&self) {
        for family in Family::BOTH {
            assert!(
                ask(self.client, self.server, family).is_some(),
                "{}",
                family.name()
            );
        }
    }

    /// All is as before, and pods come and go.
    fn recovers(&mut self) {
        for family in Family::BOTH {
            let works = || ask(self.client, self.server, family);
            wait::within(RECOVERY, "the pods to meet", works);
        }
        // A successor takes events when it serves, and not before.
        let event = cni::event(self.visitor).to_string();
        wait::within(RECOVERY, "pods to be taken", || {
            let answer = cni::post(&self.agent.cni_socket(), "/cmdadd", &event).ok()?;
            (answer.status == 200).then_some(())
        });
        let meets = || ask(self.visitor, self.server, Family::V6);
        wait::within(RECOVERY, "a new pod to be answered", meets);
        self.agent.release(self.visitor);
        let pods = self.agent.pods();
        let captured = pods
            .iter()
            .filter(|pod| pod["state"] == "captured" && pod["impaired"] == false);
        assert_eq!((captured.count(), pods.len()), (3, 3), "{pods:?}");
    }
}

/// Tells who has said what.
fn answers(mut stream: TcpStream, peer: SocketAddr) -> std::io::Result<()> {
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line)?;
    writeln!(stream, "{} {}", line.trim_end(), peer.ip().to_canonical())
}

/// Asks once, by a connection of its own. It may fail; an answer is the right one.
fn ask(from: &Pod, to: &Pod, family: Family) -> Option<()> {
    let answer = app::ask(&from.ns, to.addr(family, PORT), &format!("{CANARY}\n")).ok()?;
    // An end without an answer is a failure as well.
    let answer = answer.lines().next()?;
    assert_eq!(answer, format!("{CANARY} {}", from.ip(family)));
    Some(())
}

/// Runs `act` until the end, while nobody wants silence.
fn repeat(over: &AtomicBool, traffic: &RwLock<()>, mut act: impl FnMut()) {
    let _ends = Ends(over);
    while !over.load(Ordering::Relaxed) {
        let talk = traffic.read().unwrap();
        act();
        drop(talk);
        thread::sleep(PAUSE);
    }
}

fn whatever_happens() {
    let seed = match env::var("REDIRECTOR_CHAOS_SEED") {
        Ok(seed) => seed.parse().expect("REDIRECTOR_CHAOS_SEED is a number"),
        Err(_) => fastrand::u64(..),
    };
    println!("REDIRECTOR_CHAOS_SEED={seed}");
    let lasting = env::var("REDIRECTOR_SOAK_SECONDS").ok();
    let lasting = lasting.map(|text| text.parse().expect("REDIRECTOR_SOAK_SECONDS is a number"));
    let end = Instant::now() + Duration::from_secs(lasting.unwrap_or(0));

    let node = Node::new();
    let [client, server, visitor, stranger] =
        ["client", "server", "visitor", "stranger"].map(|name| node.pod(name));
    let credentials = Credentials::create(node.directory(), "plane");
    let ads = Ads::start(&node.host.ns, &credentials);
    let ca = IstioCa::start(&node.host.ns, &credentials, LIFETIME);
    ads.edit(|edit| edit.pods([&client, &server, &visitor, &stranger]));
    let options = Options {
        arguments: ["--pool-unused-release-timeout", "100ms"]
            .map(str::to_owned)
            .into(),
        environment: [ads.environment(), ca.environment()].concat(),
        ..Options::default()
    };
    let mut agent = Agent::start(&node, &Workloads::default(), options.clone());
    for pod in [&client, &server, &stranger] {
        agent.enrol(pod);
    }
    let _apps = Family::BOTH.map(|family| App::start(&server.ns, (family.any(), PORT).into(), answers));
    // It is the policy that keeps it out, and nothing else.
    wait::until("the stranger to be answered", || {
        ask(&stranger, &server, Family::V4)
    });
    ads.edit(|edit| edit.policy(&deny_account(&stranger)));
    wait::until("the policy", || {
        ask(&stranger, &server, Family::V4).is_none().then_some(())
    });
    let traffic = RwLock::new(());
    let mut field = Field {
        agent: &mut agent,
        node: &node,
        client: &client,
        server: &server,
        visitor: &visitor,
        ads,
        ca,
        options,
        chance: fastrand::Rng::with_seed(seed),
        traffic: &traffic,
    };
    // Once through, so that what is made once is made.
    field.recovers();
    killed(&mut field);
    field.recovers();
    field.agent.settle();
    let before = Holdings::of(field.agent, &node);

    let (over, seen) = (AtomicBool::new(false), AtomicU64::new(0));
    let counts = ["answered", "failed"].map(|name| (name, AtomicU64::new(0)));
    let mut rounds = 0;
    thread::scope(|scope| {
        let _ends = Ends(&over);
        let (over, traffic, counts, client, server) = (&over, &traffic, &counts, &client, &server);
        let (stranger, node, seen) = (&stranger, &node, &seen);
        for family in Family::BOTH {
            scope.spawn(move || {
                repeat(over, traffic, || {
                    let (_, count) = &counts[usize::from(ask(client, server, family).is_none())];
                    count.fetch_add(1, Ordering::Relaxed);
                });
            });
        }
        scope.spawn(move || {
            repeat(over, traffic, || {
                let heard = ask(stranger, server, Family::V4);
                assert!(heard.is_none(), "the policy keeps it out");
            });
        });
        scope.spawn(move || {
            let _ends = Ends(over);
            while !over.load(Ordering::Relaxed) {
                // A look at the wire after the other: a capture is in memory.
                let capture = node.capture(server);
                thread::sleep(Duration::from_secs(1));
                let segments = capture.stop();
                seen.fetch_add(segments.len() as u64, Ordering::Relaxed);
                let plain = contains(&segments, CANARY.as_bytes());
                assert!(!plain, "a canary was on the wire");
            }
        });
        loop {
            let mut order: Vec<_> = FAULTS.iter().collect();
            field.chance.shuffle(&mut order);
            for (name, fault) in order {
                println!("{name}");
                fault(&mut field);
                field.recovers();
                assert!(!wait::interrupted(), "interrupted");
                assert!(
                    !over.load(Ordering::Relaxed),
                    "after {name:?}, what is said below"
                );
            }
            rounds += 1;
            if Instant::now() >= end {
                break;
            }
        }
    });
    let [answered, failed] = counts.map(|(_, count)| count.into_inner());
    println!("{answered} answered, {failed} failed; each fault {rounds} times");
    let seen = seen.into_inner();
    assert!(answered > 0 && seen > 0, "{seen} segments on the wire");

    let mut identities = 0;
    for entry in field.agent.access_log() {
        let (Some(from), Some(identity)) = (entry.get("src.addr"), entry.get("src.identity")) else {
            continue;
        };
        let from: SocketAddr = from.parse().unwrap();
        let pods = [&client, &server, &visitor, &stranger];
        let of = |pod: &&&Pod| {
            Family::BOTH
                .iter()
                .any(|family| pod.ip(*family) == from.ip().to_canonical())
        };
        let pod = pods.iter().find(of).unwrap_or_else(|| panic!("{entry:?}"));
        assert_eq!(*identity, pod.identity(), "{entry:?}");
        identities += 1;
    }
    assert!(identities > 0, "the access log tells of identities");
    let log = field.agent.log();
    assert_eq!(log.matches("panicked").count(), 0);
    field.agent.settle();
    let after = Holdings::settle(field.agent, &node, &before);
    println!("{}", after.line());
}
