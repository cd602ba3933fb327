//! What holds with any server of Kubernetes' API: the kit's own, and the real one.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use redirector_tests::{
    agent::Options,
    app::{self, App},
    capture::opened_ports,
    cluster::{ANNOTATION, Cluster, IMPAIRED, World, in_mesh, out_of_mesh},
    cni,
    kubelet::Kubelet,
    mesh::PORT,
    node::Family,
    suite::{Case, case},
    wait,
};
use serde_json::{Value, json};

/// The cases, with a cluster of this kind for each.
pub(crate) fn cases<C: Cluster + 'static>() -> Vec<Case> {
    vec![
        case(
            "labels_decide_and_are_told_on_the_pod",
            labels_decide_and_are_told_on_the_pod::<C>,
        ),
        case(
            "pods_that_were_missed_are_found",
            pods_that_were_missed_are_found::<C>,
        ),
        case(
            "annotations_count_while_the_pod_runs",
            annotations_count_while_the_pod_runs::<C>,
        ),
        case(
            "what_a_capture_lacks_is_told_on_the_pod",
            what_a_capture_lacks_is_told_on_the_pod::<C>,
        ),
        case(
            "an_agent_that_starts_brings_pods_to_what_is_said",
            an_agent_that_starts_brings_pods_to_what_is_said::<C>,
        ),
        case(
            "a_pod_that_was_told_of_without_its_uid_gets_it",
            a_pod_that_was_told_of_without_its_uid_gets_it::<C>,
        ),
        case(
            "a_name_and_addresses_that_come_back_are_another_pod",
            a_name_and_addresses_that_come_back_are_another_pod::<C>,
        ),
    ]
}

fn labels_decide_and_are_told_on_the_pod<C: Cluster>() {
    let (world, mut pods) = World::<C>::new(&["inside", "outer", "host", "sidecar", "refusing"]);
    let api = &world.api;
    let [mut in_node_network, mut with_sidecar] = [in_mesh(), in_mesh()];
    in_node_network["spec"] = json!({ "hostNetwork": true });
    with_sidecar["metadata"]["annotations"] = json!({ "sidecar.istio.io/status": "{}" });
    let refuses = json!({ "metadata": {
        "labels": { "istio.io/dataplane-mode": "none" },
        // As another agent may have told.
        "annotations": { ANNOTATION: "enabled" },
    } });
    let told = [in_mesh(), json!({}), in_node_network, with_sidecar, refuses];
    for (pod, more) in pods.iter_mut().zip(told) {
        api.pod(pod, more);
    }
    let [inside, outside, host, sidecar, refusing] = pods.as_slice() else {
        unreachable!()
    };

    assert_eq!(world.add(inside), "");
    world.wait_told(inside, Some("enabled"));
    for (pod, reason) in [
        (outside, "labels"),
        (host, "node's network"),
        (sidecar, "sidecar"),
        (refusing, "labels"),
    ] {
        let answer = world.add(pod);
        assert!(
            answer.starts_with("not in the mesh: ") && answer.contains(reason),
            "{}: {answer}",
            pod.name
        );
        assert_eq!(world.state(pod), None, "{}", pod.name);
    }

    // A namespace asks for all of its pods but those that refuse.
    api.namespace("demo", &json!({ "istio.io/dataplane-mode": "ambient" }));
    wait::until("the namespace's label to count", || {
        world.add(outside).is_empty().then_some(())
    });
    world.wait_told(outside, Some("enabled"));
    assert!(world.add(refusing).starts_with("not in the mesh"));

    // They talk, and the one that leaves is released, though it runs.
    let server = App::start(&outside.ns, (Family::V4.any(), PORT).into(), app::who);
    let seen = app::ask_who(&inside.ns, outside.addr(Family::V4, PORT)).unwrap();
    assert!(seen.contains(&inside.ip(Family::V4).to_string()), "{seen}");
    drop(server);
    api.namespace("demo", &json!({}));
    world.wait_released(outside);
    world.wait_told(outside, None);
    // One that says that it has ended may still run. What comes after it is known later.
    api.change(inside, json!({ "status": { "phase": "Succeeded" } }));
    api.change(outside, in_mesh());
    wait::until("the change after it to count", || {
        world.add(outside).is_empty().then_some(())
    });
    assert_eq!(world.state(inside).as_deref(), Some("captured"));
    assert_eq!(world.agent.cmddel(inside).status, 200);
    world.wait_released(inside);
    world.wait_told(inside, None);
    assert_eq!(
        api.told(refusing).as_deref(),
        Some("enabled"),
        "not ours to take away"
    );
    for patch in api.patches() {
        assert!(
            patch["metadata"]["uid"].is_string(),
            "of another pod of that name too: {patch}"
        );
    }
}

fn pods_that_were_missed_are_found<C: Cluster>() {
    let (world, mut pods) = World::<C>::new(&["early", "late", "lost"]);
    for pod in &mut pods {
        world.api.pod(pod, json!({}));
    }
    let [early, late, lost] = pods.as_slice() else {
        unreachable!()
    };
    let mut kubelet = Kubelet::new(&world.node);
    kubelet.run(&early.uid, &early.ns);
    kubelet.run(&late.uid, &late.ns);
    world.api.change(lost, in_mesh());
    world.api.change(early, in_mesh());
    world.wait_captured(early);
    world.wait_told(early, Some("enabled"));
    // One that cannot be found is told of, and is no annotation's.
    wait::until("the lost pod to be told of", || {
        let missed = world.missed();
        (missed.len() == 1 && missed[0]["uid"] == lost.uid.as_str()).then_some(())
    });
    assert_eq!(world.api.told(lost), None);
    // A label on a pod that runs, and off again, and on.
    for _ in 0..2 {
        world.api.change(late, in_mesh());
        world.wait_captured(late);
        world.api.change(late, out_of_mesh());
        world.wait_released(late);
        world.wait_told(late, None);
    }
    // The lost one's process comes.
    kubelet.run(&lost.uid, &lost.ns);
    wait::within(Duration::from_secs(90), "the lost pod to be found", || {
        (world.state(lost).as_deref() == Some("captured")).then_some(())
    });
    assert_eq!(world.missed(), Vec::<Value>::new());
}

fn annotations_count_while_the_pod_runs<C: Cluster>() {
    let (world, mut pods) = World::<C>::new(&["client"]);
    let strict = |value: Value| json!({ "metadata": { "annotations": { "redirector.io/strict": value } } });
    let mut more = in_mesh();
    more["metadata"]["annotations"] = json!({ "redirector.io/strict": "perhaps" });
    world.api.pod(&mut pods[0], more);
    let client = &pods[0];
    // What cannot be understood stops the pod from starting, and says so.
    let answer = world.agent.cmdadd(client);
    assert_ne!(answer.status, 200);
    assert!(answer.body.contains("redirector.io/strict"), "{}", answer.body);
    world.api.change(client, strict(Value::Null));
    wait::until("the pod to be enrolled", || {
        (world.agent.cmdadd(client).status == 200).then_some(())
    });
    // The newest rules show while they are being put in force.
    let is = |strict: bool| {
        let pod = world.agent.pods().remove(0);
        (pod["strict"] == strict && pod["state"] == "captured").then_some(())
    };
    let server = App::start(&world.node.outside.ns, (Family::V4.any(), PORT).into(), app::who);
    let outside = world.node.outside.addr(Family::V4, PORT);
    app::ask_who(&client.ns, outside).expect("in plain to the outside");
    world.api.change(client, strict(json!("true")));
    wait::until("the annotation to count", || is(true));
    app::ask_who(&client.ns, outside).expect_err("nothing in plain");
    world.api.change(client, strict(json!("false")));
    wait::until("the annotation to count", || is(false));
    app::ask_who(&client.ns, outside).expect("in plain again");
    drop(server);
}

fn what_a_capture_lacks_is_told_on_the_pod<C: Cluster>() {
    let (world, mut pods) = World::<C>::new(&["client"]);
    world.api.pod(&mut pods[0], in_mesh());
    let client = &pods[0];
    world.add(client);
    world.wait_told(client, Some("enabled"));
    // More addresses than a pod may have: what it opens from the last ones would not be captured.
    let more: Vec<_> = (0..70)
        .map(|last| format!("addr add 10.77.0.{last}/32 dev eth0"))
        .collect();
    client.ns.ip(&more).unwrap();
    let impaired = || world.agent.pods()[0]["impaired"] == true;
    let told = || world.api.annotation(client, IMPAIRED);
    wait::until("the agent to find it", || impaired().then_some(()));
    let why = wait::until("the pod to tell of it", told);
    assert!(why.contains("at most 64 are supported"), "{why}");
    // Without it, its peers would call it in plain.
    assert_eq!(world.api.told(client).as_deref(), Some("enabled"));
    assert_eq!(world.state(client).as_deref(), Some("captured"));
    let warned = world
        .agent
        .log()
        .matches("is not captured as it should be")
        .count();
    assert_eq!(warned, 1, "once, and not at each look\n{}", world.agent.log());
    let less: Vec<_> = more.iter().map(|line| line.replace(" add ", " del ")).collect();
    client.ns.ip(&less).unwrap();
    wait::until("the agent to mend it", || (!impaired()).then_some(()));
    wait::until("the pod to tell of it no more", || told().is_none().then_some(()));
    assert_eq!(world.api.told(client).as_deref(), Some("enabled"));
}

fn an_agent_that_starts_brings_pods_to_what_is_said<C: Cluster>() {
    let (mut world, mut pods) = World::<C>::new(&["stays", "leaves", "comes"]);
    for (pod, more) in pods.iter_mut().zip([in_mesh(), in_mesh(), json!({})]) {
        world.api.pod(pod, more);
    }
    let [stays, leaves, comes] = pods.as_slice() else {
        unreachable!()
    };
    let mut kubelet = Kubelet::new(&world.node);
    kubelet.run(&comes.uid, &comes.ns);
    for pod in [stays, leaves] {
        world.add(pod);
    }
    world.wait_told(leaves, Some("enabled"));
    world.agent.kill();
    world.api.change(leaves, out_of_mesh());
    world.api.change(comes, in_mesh());
    world.agent.restart(&world.node);
    world.wait_captured(stays);
    world.wait_released(leaves);
    world.wait_told(leaves, None);
    world.wait_captured(comes);
    // One that only stops leaves its pods captured, and told so; one that lets them go takes its word back.
    world.wait_told(comes, Some("enabled"));
    assert!(world.agent.stop().success());
    assert_eq!(world.api.told(comes).as_deref(), Some("enabled"));
    let options = Options {
        environment: world.api.environment(),
        arguments: vec!["--release-on-exit".to_owned()],
        ..Options::default()
    };
    world.agent.restart_with(&world.node, options);
    world.wait_captured(comes);
    assert!(world.agent.stop().success());
    for pod in [stays, comes] {
        assert_eq!(world.api.told(pod), None, "{}", pod.name);
    }
}

fn a_pod_that_was_told_of_without_its_uid_gets_it<C: Cluster>() {
    let (mut world, mut pods) = World::<C>::new(&["client", "server"]);
    for pod in &mut pods {
        world.api.pod(pod, in_mesh());
    }
    let [client, server] = pods.as_slice() else {
        unreachable!()
    };
    let with_api = Options {
        environment: world.api.environment(),
        ..Options::default()
    };
    world.agent.stop();
    world.agent.restart_with(&world.node, Options::default());
    for pod in &pods {
        let mut event = cni::event(pod);
        event.as_object_mut().unwrap().remove("PodUID");
        let answer = world.agent.post("/cmdadd", &event.to_string());
        assert_eq!(answer.status, 200, "{}", answer.body);
    }
    assert_eq!(world.agent.pods()[0]["uid"], "demo_client");
    let app = App::start(&server.ns, (Family::V4.any(), PORT).into(), app::who);
    let to = server.addr(Family::V4, PORT);
    app::ask_who(&client.ns, to).expect("over HBONE");

    // With the API, which knows both by their real UIDs; the client asks all the while.
    let mut kubelet = Kubelet::new(&world.node);
    for pod in &pods {
        kubelet.run(&pod.uid, &pod.ns);
    }
    let capture = world.node.capture(server);
    world.agent.stop();
    let changed = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !changed.load(Ordering::Relaxed) {
                // While its proxy is away, it is refused.
                let _ = app::ask_who(&client.ns, to);
            }
        });
        world.agent.restart_with(&world.node, with_api);
        for pod in &pods {
            world.wait_captured(pod);
            world.wait_told(pod, Some("enabled"));
        }
        wait::until("the connections to go on", || app::ask_who(&client.ns, to).ok());
        changed.store(true, Ordering::Relaxed);
    });
    drop(app);
    assert_eq!(opened_ports(&capture.stop()), [15008], "nothing goes in plain");
    assert_eq!(world.agent.pods().len(), 2, "and none is there twice");
    assert_eq!(world.missed(), Vec::<Value>::new());
    // What was handed over is released as all else.
    for pod in &pods {
        world.api.change(pod, out_of_mesh());
        world.wait_released(pod);
        world.wait_told(pod, None);
    }
}

fn a_name_and_addresses_that_come_back_are_another_pod<C: Cluster>() {
    let (world, mut pods) = World::<C>::new(&["db-0"]);
    let mut old = pods.remove(0);
    world.api.pod(&mut old, in_mesh());
    world.add(&old);
    world.wait_told(&old, Some("enabled"));
    // The same name, account and addresses, another UID and namespace, before the old one has ended.
    let mut new = world.node.twin(&old, "db-0-again");
    new.name.clone_from(&old.name);
    world.api.replace(&old, &mut new, in_mesh());
    world.add(&new);
    world.wait_told(&new, Some("enabled"));
    assert_eq!(world.state(&old).as_deref(), Some("captured"), "it may still run");
    // A delete that names neither UID nor namespace could be anybody's, and the late one is the old one's.
    let vague = json!({ "PodName": old.name, "PodNamespace": old.namespace }).to_string();
    assert_eq!(world.agent.post("/cmddel", &vague).status, 200);
    assert_eq!(world.agent.cmddel(&old).status, 200);
    world.wait_released(&old);
    assert_eq!(world.state(&new).as_deref(), Some("captured"));
}
