//! Many pods on one node, and many that come and go: the end state is the desired set, and what was held comes back.

use std::{
    collections::BTreeSet,
    io,
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use redirector_tests::{
    agent::{Agent, Options},
    app::{self, App},
    capture::opened_ports,
    churn::{ORDERS, Pace, Visitor, captured},
    cni,
    holdings::{Holdings, Process, in_pod},
    mesh::PORT,
    node::{Family, Node, Pod},
    suite::{Needs, case, main as suite},
    wait,
    workloads::Workloads,
};

/// On one node; the bridge takes a thousand.
const PODS: usize = 500;
/// Of these, enrolled and released at one time.
const AT_ONCE: usize = 50;
/// Pairs of pods that talk.
const PAIRS: usize = 6;
/// Enrolments and removals in every order.
const CYCLES: usize = 1000;
const CYCLES_PER_SECOND: u32 = 50;
/// Names of pods that come and go at one time; the agent takes 64 events at one time, and some of these send two.
const VISITORS: usize = 16;
/// How long the agent with all pods is watched doing nothing: two of its looks at them.
const IDLE: Duration = Duration::from_secs(10);
/// What may stay of memory: allocators keep some, and what is read once. With the scrapes of five hundred pods it is 2 to 5 MiB.
const MEMORY_KIB: u64 = 12 * 1024;

fn main() -> ExitCode {
    let cases = vec![
        case("five_hundred_pods_are_captured_and_released", many_pods),
        case(
            "a_thousand_enrolments_in_every_order_leave_the_desired_set",
            every_order,
        ),
        case(
            "a_pod_whose_namespace_has_the_inode_of_one_that_is_gone_is_another",
            inode_of_another,
        ),
    ];
    suite(Needs::Agent, 1, cases)
}

fn names(what: &str, count: usize) -> Vec<String> {
    (0..count).map(|number| format!("{what}{number}")).collect()
}

/// Runs `work` on every pod, `threads` at one time, and returns how long each took, in order of length.
fn timed(pods: &[Pod], threads: usize, work: impl Fn(&Pod) + Sync) -> Vec<Duration> {
    let share = pods.len().div_ceil(threads).max(1);
    let mut times: Vec<Duration> = thread::scope(|scope| {
        let one = |pod: &Pod| {
            let begun = Instant::now();
            work(pod);
            begun.elapsed()
        };
        let workers: Vec<_> = pods
            .chunks(share)
            .map(|pods| scope.spawn(move || pods.iter().map(one).collect::<Vec<_>>()))
            .collect();
        workers
            .into_iter()
            .flat_map(|worker| worker.join().expect("every pod is worked on"))
            .collect()
    });
    times.sort_unstable();
    times
}

fn quantiles(times: &[Duration]) -> String {
    let at = |part: usize| times[(times.len() - 1) * part / 100].as_secs_f64() * 1e3;
    format!(
        "p50 {:.1} ms, p99 {:.1} ms, longest {:.1} ms",
        at(50),
        at(99),
        at(100)
    )
}

fn many_pods() {
    let node = Node::new();
    let begun = Instant::now();
    let pods = node.pods(&names("pod", PODS));
    println!("{PODS} pods made in {:.1} s", begun.elapsed().as_secs_f64());
    let agent = Agent::start(&node, &Workloads::hbone(&pods), Options::default());
    let sample: Vec<&Pod> = pods.iter().step_by(PODS / 10).collect();
    let untouched: Vec<_> = sample.iter().map(|pod| in_pod(pod)).collect();

    // What is made once for all pods is there after the first ones.
    let (first, rest) = pods.split_at(AT_ONCE);
    timed(first, 8, |pod| agent.enrol(pod));
    talk(&agent, &node, first);
    timed(first, 8, |pod| agent.release(pod));
    agent.settle();
    let before = Holdings::of(&agent, &node);
    let process = Process::of(&agent);
    println!("before: {}; {process:?}", before.line());

    let cpu = Process::of(&agent).cpu;
    let one_by_one = timed(rest, 1, |pod| agent.enrol(pod));
    println!(
        "enrolled one after another: {}, processor {:.1} ms",
        quantiles(&one_by_one),
        (Process::of(&agent).cpu - cpu).as_secs_f64() * 1e3 / rest.len() as f64
    );
    let begun = Instant::now();
    let at_once = timed(first, AT_ONCE, |pod| agent.enrol(pod));
    println!(
        "enrolled {AT_ONCE} at once: {} ms for all, each {}",
        begun.elapsed().as_millis(),
        quantiles(&at_once)
    );
    let uids: BTreeSet<String> = pods.iter().map(|pod| pod.uid.clone()).collect();
    assert_eq!(captured(&agent), uids);
    println!("with {PODS} pods: {}", Holdings::of(&agent, &node).line());
    idle(&agent);

    talk(&agent, &node, &pods);
    scrape(&node);

    let begun = Instant::now();
    let released = timed(&pods, 16, |pod| agent.release(pod));
    println!(
        "released 16 at a time: {:.1} s for all, each {}",
        begun.elapsed().as_secs_f64(),
        quantiles(&released)
    );
    assert_eq!(captured(&agent), BTreeSet::new());
    let left: Vec<_> = sample.iter().map(|pod| in_pod(pod)).collect();
    assert_eq!(left, untouched);
    comes_back(&agent, &node, &before, process);
    let begun = Instant::now();
    drop(pods);
    println!("{PODS} pods removed in {:.1} s", begun.elapsed().as_secs_f64());
}

/// Pods over the whole range talk, and only tunnels are on the wire.
fn talk(agent: &Agent, node: &Node, pods: &[Pod]) {
    for pair in 0..PAIRS {
        let family = Family::BOTH[pair % 2];
        let client = &pods[pair * (pods.len() / 2) / PAIRS];
        let server = &pods[pods.len() - 1 - pair * (pods.len() / 2) / PAIRS];
        let _app = App::start(&server.ns, (family.any(), PORT).into(), app::who);
        let capture = node.capture(server);
        // Of five hundred that have just come, a neighbour may not have answered yet; what is refused is refused otherwise.
        let seen = wait::until("the neighbour to be found", || {
            let seen = app::ask_who(&client.ns, server.addr(family, PORT));
            let unknown = |error: &io::Error| error.kind() == io::ErrorKind::HostUnreachable;
            (!seen.as_ref().is_err_and(unknown)).then_some(seen)
        });
        let seen = seen.unwrap_or_else(|error| {
            panic!(
                "{} to {} by {}: {error}\n{}",
                client.name,
                server.name,
                family.name(),
                agent.log()
            )
        });
        assert_eq!(seen, client.ip(family).to_string());
        assert_eq!(opened_ports(&capture.stop()), [15008]);
    }
}

/// What a scrape has of all of them, and what it takes.
fn scrape(node: &Node) {
    const TIMES: usize = 20;
    let metrics = "127.0.0.1:15020".parse().expect("an address");
    let mut took = Vec::new();
    for time in 0..TIMES {
        let begun = Instant::now();
        let (status, text) = app::http_get(&node.host.ns, metrics, "/metrics").unwrap();
        took.push(begun.elapsed());
        assert_eq!(status, 200);
        let states = text
            .lines()
            .filter(|line| line.starts_with("redirector_pod_state{") && line.contains("state=\"captured\""));
        assert_eq!(states.count(), PODS);
        if time == 0 {
            println!("a scrape with {PODS} pods has {} KiB", text.len() / 1024);
        }
    }
    took.sort();
    println!("scraped {TIMES} times: {}", quantiles(&took));
}

fn idle(agent: &Agent) {
    let (before, begun) = (Process::of(agent), Instant::now());
    let mut threads = 0;
    while begun.elapsed() < IDLE {
        thread::sleep(Duration::from_millis(200));
        threads = threads.max(Process::of(agent).threads);
    }
    let after = Process::of(agent);
    let used = (after.cpu - before.cpu).as_secs_f64() / begun.elapsed().as_secs_f64();
    println!(
        "idle with {PODS} pods: {} MiB resident, {:.1} % of a processor, up to {threads} threads",
        after.resident_kib / 1024,
        used * 100.0
    );
}

/// Everything is held again that was held before, and no more.
fn comes_back(agent: &Agent, node: &Node, before: &Holdings, process: Process) {
    let now = Holdings::settle(agent, node, before);
    let threads = wait::until("the agent's threads to end", || {
        let now = Process::of(agent).threads;
        (now <= process.threads).then_some(now)
    });
    // Memory is given back every ten seconds.
    let (mut resident, begun) = (Process::of(agent).resident_kib, Instant::now());
    while resident > process.resident_kib + MEMORY_KIB && begun.elapsed() < IDLE * 3 {
        thread::sleep(Duration::from_millis(200));
        resident = Process::of(agent).resident_kib;
    }
    println!(
        "after: {}; {resident} KiB resident, {threads} threads",
        now.line()
    );
    assert!(
        resident <= process.resident_kib + MEMORY_KIB,
        "{} KiB resident before, {resident} after",
        process.resident_kib
    );
}

fn every_order() {
    let node = Node::new();
    let pods = node.pods(&names("visitor", VISITORS));
    let agent = Agent::start(&node, &Workloads::hbone(&pods), Options::default());
    let untouched: Vec<_> = pods.iter().map(in_pod).collect();
    let warm_up = Pace::new(CYCLES_PER_SECOND);
    let visitors = pods
        .into_iter()
        .map(|pod| Visitor::new(&agent, &node, &warm_up, pod));
    let mut visitors: Vec<_> = visitors.collect();
    rounds(&mut visitors, ORDERS);
    agent.settle();
    let before = Holdings::of(&agent, &node);
    let process = Process::of(&agent);
    println!("before: {}; {process:?}", before.line());

    let pace = Pace::new(CYCLES_PER_SECOND);
    visitors.iter_mut().for_each(|visitor| visitor.set_pace(&pace));
    rounds(&mut visitors, CYCLES.div_ceil(VISITORS));
    // Every other one stays.
    visitors.iter_mut().step_by(2).for_each(Visitor::stay);
    println!("{}", pace.line());

    let stay = || visitors.iter().step_by(2).map(Visitor::pod);
    let desired: BTreeSet<String> = stay().map(|pod| pod.uid.clone()).collect();
    assert_eq!(captured(&agent), desired);
    let recorded = Holdings::of(&agent, &node).records.len();
    assert_eq!(recorded - before.records.len(), desired.len());
    ends_meet(&node, &visitors);

    visitors.iter().step_by(2).for_each(Visitor::leave);
    assert_eq!(captured(&agent), BTreeSet::new());
    let left: Vec<_> = visitors.iter().map(|visitor| in_pod(visitor.pod())).collect();
    assert_eq!(left, untouched);
    comes_back(&agent, &node, &before, process);
}

/// The kernel gives the lowest free number to a new namespace, so one that is gone lends it soon.
fn inode_of_another() {
    const TRIES: usize = 20;
    let node = Node::new();
    let like = node.pod("like");
    let agent = Agent::start(&node, &Workloads::hbone([&like]), Options::default());
    let mut lent = 0;
    for time in 0..TRIES {
        let old = node.twin(&like, &format!("old-{time}"));
        let (inode, event) = (old.ns.netns().id().ino, cni::event(&old).to_string());
        agent.enrol(&old);
        // While the agent has the namespace, its number is nobody else's; a delete that names it by path frees it.
        let answer = agent.post("/cmddel", &event);
        assert_eq!(answer.status, 200, "{}", answer.body);
        drop(old);
        let Some(new) = with_inode(&node, &like, inode) else {
            continue;
        };
        agent.enrol(&new);
        let late = agent.post("/cmddel", &event);
        assert_eq!(late.status, 200, "{}", late.body);
        assert_eq!(captured(&agent), BTreeSet::from([new.uid.clone()]));
        agent.release(&new);
        lent += 1;
        if lent == 3 {
            return;
        }
    }
    assert!(lent > 0, "no namespace had the inode of one that was gone");
}

/// A pod in a namespace with this inode, unless somebody else's has got it.
fn with_inode(node: &Node, like: &Pod, inode: u64) -> Option<Pod> {
    // The lower numbers that are free go first, and are kept from coming again.
    const OTHERS: usize = 25;
    let mut others = Vec::new();
    while others.len() < OTHERS {
        let new = node.twin(like, &format!("new-{}", others.len()));
        if new.ns.netns().id().ino == inode {
            return Some(new);
        }
        others.push(new);
        thread::sleep(Duration::from_millis(20));
    }
    None
}

/// All visitors at one time, each in an order of its own of the orders.
fn rounds(visitors: &mut [Visitor<'_>], count: usize) {
    thread::scope(|scope| {
        for (number, visitor) in visitors.iter_mut().enumerate() {
            scope.spawn(move || {
                // 3 and the number of orders have no common divisor: each visitor comes through all of them.
                (0..count).for_each(|round| visitor.visit((number + round * 3) % ORDERS));
            });
        }
    });
}

/// Those that stayed talk by tunnels, and those that left in plain.
fn ends_meet(node: &Node, visitors: &[Visitor<'_>]) {
    for (client, server, port) in [(0, 2, 15008), (4, 6, 15008), (1, 3, PORT), (5, 7, PORT)] {
        let (client, server) = (visitors[client].pod(), visitors[server].pod());
        for family in Family::BOTH {
            let _app = App::start(&server.ns, (family.any(), PORT).into(), app::who);
            let capture = node.capture(server);
            let seen = app::ask_who(&client.ns, server.addr(family, PORT)).unwrap();
            assert_eq!(seen, client.ip(family).to_string());
            // A tunnel that is there already serves the other family too.
            assert!(opened_ports(&capture.stop()).iter().all(|opened| *opened == port));
        }
    }
}
