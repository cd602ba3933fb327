//! Five hundred pods, each with an identity of its own.

use std::{
    thread,
    time::{Duration, Instant},
};

use redirector_tests::{
    agent::{Agent, Options},
    app,
    grpc::Credentials,
    istio_ca::{IstioCa, Mood},
    node::{Node, Pod},
    wait,
    workloads::Workloads,
};
use serde_json::Value;

use crate::LONG_LIFE;

const PODS: usize = 500;
/// The agent takes 64 events at one time.
const EVENTS_AT_ONCE: usize = 50;
/// Of the agent's, renewals or not.
const REQUESTS_AT_ONCE: usize = 8;
/// What an authority takes for a signature.
const SIGNING: Duration = Duration::from_millis(20);
/// With eight at a time all take two seconds.
const ALL: Duration = Duration::from_secs(120);

pub(crate) fn five_hundred_identities_at_one_instant_are_no_storm() {
    let node = Node::new();
    let names: Vec<_> = (0..PODS).map(|number| format!("pod{number}")).collect();
    let pods = node.pods(&names);
    let credentials = Credentials::create(node.directory(), "plane");
    let mut ca = IstioCa::start(&node.host.ns, &credentials, LONG_LIFE);
    ca.set(Mood::Slow(SIGNING));
    let options = Options {
        environment: ca.environment(),
        ..Options::default()
    };
    let agent = Agent::start(&node, &Workloads::hbone(&pods), options);

    let begun = Instant::now();
    at_once(&pods, |pod| agent.enrol(pod));
    all(&node, "Available");
    println!(
        "{PODS} pods: enrolled and with certificates in {:.1?}",
        begun.elapsed()
    );
    assert_eq!(ca.asked().len(), PODS);

    // Once more, while the authority is away: all wait for it, and find it at one instant.
    at_once(&pods, |pod| agent.release(pod));
    ca.down();
    at_once(&pods, |pod| agent.enrol(pod));
    all(&node, "Unavailable: ");
    let begun = Instant::now();
    ca.up(&node.host.ns);
    all(&node, "Available");
    println!("{PODS} identities that waited: all in {:.1?}", begun.elapsed());
    let mut asked: Vec<_> = ca.asked().split_off(PODS);
    asked.sort();
    asked.dedup();
    assert_eq!((asked.len(), ca.asked().len()), (PODS, 2 * PODS), "each once");
    let most = ca.most_at_once();
    assert!((2..=REQUESTS_AT_ONCE).contains(&most), "{most} at once");
}

fn at_once(pods: &[Pod], work: impl Fn(&Pod) + Sync) {
    thread::scope(|scope| {
        for pods in pods.chunks(PODS.div_ceil(EVENTS_AT_ONCE)) {
            scope.spawn(|| pods.iter().for_each(&work));
        }
    });
}

/// Waits until the state of every identity begins so.
fn all(node: &Node, state: &str) {
    wait::within(ALL, &format!("{PODS} identities to be {state:?}"), || {
        thread::sleep(Duration::from_millis(200));
        let admin = (std::net::Ipv4Addr::LOCALHOST, 15000).into();
        let (_, dump) = app::http_get(&node.host.ns, admin, "/config_dump").unwrap();
        let dump: Value = serde_json::from_str(&dump).unwrap();
        let states = dump["certificates"].as_array().unwrap().iter();
        let reached = states.filter(|one| one["state"].as_str().unwrap().starts_with(state));
        (reached.count() == PODS).then_some(())
    });
}
