//! Which pods are in the mesh, by an API server that lists in pages, watches, forgets its past and goes away: decided when a plugin
//! tells of a pod, changed while pods run, and told on the pods.

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

#[path = "kubernetes/shared.rs"]
mod shared;

use redirector_tests::{
    agent::Options,
    cluster::{self, Cluster as _, in_mesh, out_of_mesh},
    kube_api::KubeApi,
    kubelet::Kubelet,
    node::Node,
    suite::{Needs, case, main as suite},
    wait,
};
use serde_json::{Value, json};

type World = cluster::World<KubeApi>;

/// Pods of a namespace whose label comes and goes.
const FLIPPED: usize = 250;

/// For all of these: a kernel with TCX links attaches one at a time.
const FLIP_DEADLINE: Duration = Duration::from_secs(180);

fn main() -> ExitCode {
    let mut cases = shared::cases::<KubeApi>();
    cases.extend([
        case(
            "a_missed_pod_is_found_from_a_container",
            a_missed_pod_is_found_from_a_container,
        ),
        case(
            "what_is_not_the_pod_s_is_not_taken_for_it",
            what_is_not_the_pod_s_is_not_taken_for_it,
        ),
        case(
            "labels_that_no_watch_told_count_before_a_pod_is_let_out",
            labels_that_no_watch_told_count_before_a_pod_is_let_out,
        ),
        case(
            "an_api_server_that_fails_changes_nothing",
            an_api_server_that_fails_changes_nothing,
        ),
        case(
            "a_label_flips_for_two_hundred_and_fifty_pods",
            a_label_flips_for_two_hundred_and_fifty_pods,
        ),
    ]);
    suite(Needs::Agent, 2, cases)
}

fn a_missed_pod_is_found_from_a_container() {
    let node = Node::new();
    let mut pods = [node.pod("early")];
    let mut kubelet = Kubelet::new(&node);
    // To the agent, the cgroups of others lead up and out of its own.
    let own = kubelet.cgroup("agent");
    kubelet.run(&pods[0].uid, &pods[0].ns);
    let options = Options {
        cgroup: Some(own),
        ..Options::default()
    };
    let world = World::with(node, &pods, options);
    world.api.pod(&mut pods[0], in_mesh());
    world.wait_captured(&pods[0]);
}

fn what_is_not_the_pod_s_is_not_taken_for_it() {
    let (world, mut pods) = World::new(&["web", "other"]);
    let [web, other] = pods.as_mut_slice() else {
        unreachable!()
    };
    let mut kubelet = Kubelet::new(&world.node);
    // Processes of the pod's cgroup in the node's namespace, and in one without its addresses, older than its own.
    kubelet.run(&web.uid, &world.node.host.ns);
    kubelet.run(&web.uid, &other.ns);
    world.api.pod(web, in_mesh());
    wait::until("the pod to be told of", || {
        (world.missed().len() == 1).then_some(())
    });
    assert_eq!(world.state(web), None);
    kubelet.run(&web.uid, &web.ns);
    wait::within(Duration::from_secs(90), "the pod to be found", || {
        (world.state(web).as_deref() == Some("captured")).then_some(())
    });
    let pods = world.agent.pods();
    assert_eq!(pods.len(), 1);
    assert_eq!(pods[0]["netns"], web.ns.netns().id().ino);
}

fn labels_that_no_watch_told_count_before_a_pod_is_let_out() {
    let (world, mut pods) = World::new(&["late", "outer"]);
    let api = &world.api;
    for pod in &mut pods {
        api.pod(pod, json!({}));
    }
    let [late, outside] = pods.as_slice() else {
        unreachable!()
    };
    // The server is away, and what it told last counts: that keeps no pod outside the mesh from starting.
    assert!(world.add(outside).contains("do not ask for it"));
    api.set_faulty(true);
    assert!(world.add(outside).contains("do not ask for it"));
    api.set_faulty(false);
    assert_eq!(world.state(outside), None);

    api.namespace_untold("demo", &json!({ "istio.io/dataplane-mode": "ambient" }));
    world.add(late);
    world.wait_captured(late);
    world.wait_told(late, Some("enabled"));
}

fn an_api_server_that_fails_changes_nothing() {
    let (world, mut pods) = World::new(&["first", "second", "third", "fourth"]);
    let [first, second, third, fourth] = pods.as_mut_slice() else {
        unreachable!()
    };
    let api = &world.api;
    api.pod(first, in_mesh());
    world.add(first);
    world.wait_told(first, Some("enabled"));

    // A watch that ends is taken up where it was.
    let lists = api.lists();
    api.bookmark();
    api.cut();
    api.pod(second, in_mesh());
    world.add(second);
    world.wait_told(second, Some("enabled"));
    assert_eq!(api.lists(), lists, "nothing was listed anew");

    // One whose past is forgotten lists, in pages, and misses nothing that went meanwhile.
    api.forget();
    api.pod(third, in_mesh());
    world.add(third);
    assert!(api.lists() > lists);
    world.wait_told(third, Some("enabled"));

    // While it is away what is captured stays, and who is not known does not start.
    api.set_faulty(true);
    api.pod(fourth, in_mesh());
    let answer = world.agent.cmdadd(fourth);
    assert_eq!(answer.status, 500, "{}", answer.body);
    assert!(answer.body.contains("knows no such pod"), "{}", answer.body);
    for pod in [&*first, second, third] {
        assert_eq!(world.state(pod).as_deref(), Some("captured"));
    }
    api.change(first, out_of_mesh());
    api.delete(second);
    api.set_faulty(false);
    world.wait_released(first);
    wait::until("the new pod to be known", || {
        (world.agent.cmdadd(fourth).status == 200).then_some(())
    });
    // Its object is gone, and its namespace is not: nobody knows that it has ended.
    assert_eq!(world.state(second).as_deref(), Some("captured"));
}

fn a_label_flips_for_two_hundred_and_fifty_pods() {
    let node = Node::new();
    let names: Vec<_> = (0..FLIPPED).map(|number| format!("pod{number}")).collect();
    let mut pods = node.pods(&names);
    let world = World::with(node, &pods, Options::default());
    let mut kubelet = Kubelet::new(&world.node);
    for pod in &mut pods {
        kubelet.run(&pod.uid, &pod.ns);
        world.api.pod(pod, json!({}));
    }
    let captured = || {
        let table = world.agent.pods();
        table.iter().filter(|pod| pod["state"] == "captured").count()
    };
    let told = |expected: Option<&str>| pods.iter().all(|pod| world.api.told(pod).as_deref() == expected);
    for round in 0..2 {
        for (labels, count, annotation) in [
            (
                json!({ "istio.io/dataplane-mode": "ambient" }),
                FLIPPED,
                Some("enabled"),
            ),
            (json!({}), 0, None),
        ] {
            let begun = Instant::now();
            world.api.namespace("demo", &labels);
            // Changed again at once, and back: the last word counts.
            world.api.namespace("demo", &json!({}));
            world.api.namespace("demo", &labels);
            wait::within(FLIP_DEADLINE, &format!("{count} pods to be captured"), || {
                (captured() == count).then_some(())
            });
            let took = begun.elapsed();
            wait::within(FLIP_DEADLINE, "all to be told", || told(annotation).then_some(()));
            println!(
                "round {round}: {count} of {FLIPPED} captured after {took:.1?}, told after {:.1?}",
                begun.elapsed()
            );
        }
    }
    assert_eq!(world.agent.pods(), Vec::<Value>::new());
}
