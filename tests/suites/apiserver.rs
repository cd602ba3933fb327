//! The real API server of Kubernetes, with etcd behind it and RBAC in front: what the suite kubernetes shows with the kit's own, and that
//! the agent's rights suffice and are no more than it uses. Run by `cargo xtask test --apiserver`, which builds the server.

use std::{collections::BTreeSet, fs, process::ExitCode};

#[path = "kubernetes/shared.rs"]
mod shared;

use redirector_tests::{
    agent::Options,
    app::{self, App},
    chart,
    cluster::{self, Cluster, in_mesh, out_of_mesh},
    kube_apiserver::{ACCOUNT, KubeApiserver},
    mesh::PORT,
    node::{Family, Node},
    suite::{Needs, case, main as suite},
    wait,
};
use serde_json::{Value, json};

type World = cluster::World<KubeApiserver>;

fn main() -> ExitCode {
    let mut cases = shared::cases::<KubeApiserver>();
    cases.extend([
        case(
            "a_server_that_is_killed_changes_nothing",
            a_server_that_is_killed_changes_nothing,
        ),
        case(
            "a_past_that_is_compacted_is_listed_anew",
            a_past_that_is_compacted_is_listed_anew,
        ),
        case(
            "a_token_that_is_no_longer_good_is_read_anew",
            a_token_that_is_no_longer_good_is_read_anew,
        ),
        case(
            "the_rights_suffice_and_are_no_more_than_are_used",
            the_rights_suffice_and_are_no_more_than_are_used,
        ),
        case(
            "certificates_are_asked_for_approved_and_tidied_away",
            certificates_are_asked_for_approved_and_tidied_away,
        ),
    ]);
    suite(Needs::ApiServer, 1, cases)
}

/// How often the agent has had a whole list of pods.
fn lists(world: &World) -> usize {
    world
        .agent
        .log()
        .matches("pods of this node, by Kubernetes")
        .count()
}

fn a_server_that_is_killed_changes_nothing() {
    let (mut world, mut pods) = World::new(&["first", "second"]);
    for (pod, more) in pods.iter_mut().zip([in_mesh(), json!({})]) {
        world.api.pod(pod, more);
    }
    let [first, second] = pods.as_slice() else {
        unreachable!()
    };
    world.add(first);
    world.wait_told(first, Some("enabled"));
    world.api.kill_server();
    // What it told last counts, for whoever starts too.
    assert!(world.add(second).contains("do not ask for it"));
    assert_eq!(world.state(first).as_deref(), Some("captured"));
    world.api.start_server();
    assert_eq!(world.state(first).as_deref(), Some("captured"));
    // What changes after it is known, by watches that were begun anew.
    world.api.change(first, out_of_mesh());
    world.wait_released(first);
    world.wait_told(first, None);
    world
        .api
        .namespace("demo", &json!({ "istio.io/dataplane-mode": "ambient" }));
    wait::until("the namespace's label to count", || {
        world.add(second).is_empty().then_some(())
    });
    world.wait_told(second, Some("enabled"));
}

fn a_past_that_is_compacted_is_listed_anew() {
    let (mut world, mut pods) = World::new(&["stays", "leaves", "gone", "comes"]);
    for (pod, more) in pods.iter_mut().zip([in_mesh(), in_mesh(), json!({}), json!({})]) {
        world.api.pod(pod, more);
    }
    let [stays, leaves, gone, comes] = pods.as_slice() else {
        unreachable!()
    };
    for pod in [stays, leaves] {
        world.add(pod);
        world.wait_told(pod, Some("enabled"));
    }
    let before = lists(&world);
    // Nothing of these is told: the agent has no connection when it stands still, and the server that would tell of them is gone when it goes on.
    world.api.kill_server();
    world.agent.pause();
    world.api.start_server();
    world.api.change(leaves, out_of_mesh());
    world.api.change(comes, in_mesh());
    world.api.delete(gone);
    world.api.kill_server();
    world.api.start_server();
    world.api.compact();
    world.agent.resume();
    world.wait_released(leaves);
    world.wait_told(leaves, None);
    world.add(comes);
    world.wait_told(comes, Some("enabled"));
    assert!(lists(&world) > before, "{}", world.agent.log());
    let answer = world.agent.cmdadd(gone);
    assert!(answer.body.contains("knows no such pod"), "{}", answer.body);
    assert_eq!(world.state(stays).as_deref(), Some("captured"));
}

fn a_token_that_is_no_longer_good_is_read_anew() {
    let (world, mut pods) = World::new(&["first", "second"]);
    for pod in &mut pods {
        world.api.pod(pod, in_mesh());
    }
    let [first, second] = pods.as_slice() else {
        unreachable!()
    };
    let given = world.api.give_token();
    world.add(first);
    world.wait_told(first, Some("enabled"));
    world.api.end_token(&given);
    // Captured all the same, and not told.
    world.add(second);
    wait::until("the refusal to be told", || {
        let log = world.agent.log();
        log.lines()
            .any(|line| line.contains("cannot tell on the pod") && line.contains("Unauthorized"))
            .then_some(())
    });
    assert_eq!(world.state(second).as_deref(), Some("captured"));
    assert_eq!(world.api.told(second), None);
    world.api.give_token();
    world.wait_told(second, Some("enabled"));
    let log = world.agent.log();
    assert!(!log.contains(world.api.token().trim()), "the log has the token");
}

/// What a manifest's roles grant.
fn granted(manifests: &[String]) -> BTreeSet<String> {
    let objects = manifests.iter().flat_map(|text| {
        let documents = serde_yaml::Deserializer::from_str(text);
        documents.map(|document| serde::Deserialize::deserialize(document).expect("YAML"))
    });
    chart::rights(&objects.collect::<Vec<Value>>())
}

/// Waits until the agent has asked for everything that it may ask for; nothing was refused. A watch is written down when it has ended.
fn wait_all_used(api: &KubeApiserver, granted: &BTreeSet<String>) {
    let mut told = 0;
    wait::until("every right to be used", || {
        let (asked, refused) = api.asked();
        assert_eq!(refused, Vec::<Value>::new());
        let unused: Vec<_> = granted.difference(&asked).collect();
        if told != unused.len() {
            told = unused.len();
            println!("not used yet: {unused:?}");
        }
        unused.is_empty().then_some(())
    });
}

fn the_rights_suffice_and_are_no_more_than_are_used() {
    let node = Node::new();
    let mut pods = [node.pod("web")];
    let directory = node.directory().to_owned();
    let place = |name: &str| {
        let path = directory.join(name);
        fs::create_dir(&path).unwrap();
        path.display().to_string()
    };
    let arguments = [
        "--cni-install",
        "--daemonset",
        ACCOUNT.0,
        "--log-level",
        "info,redirector::cni=debug",
    ]
    .map(str::to_owned);
    let places = [
        "--cni-conf-dir".to_owned(),
        place("net.d"),
        "--cni-bin-dir".to_owned(),
        place("cni-bin"),
    ];
    let list = json!({ "cniVersion": "1.0.0", "name": "net", "plugins": [{ "type": "bridge" }] });
    fs::write(directory.join("net.d/10-net.conflist"), list.to_string()).unwrap();
    let options = Options {
        arguments: [arguments.as_slice(), &places].concat(),
        environment: [("POD_NAMESPACE", ACCOUNT.1), ("POD_NAME", "redirector-x7k2p")]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into(),
        ..Options::default()
    };
    let mut world = World::with(node, &pods, options);
    world.api.pod(&mut pods[0], json!({}));
    let [web] = &pods;
    // Out of the mesh, by a look at its namespace; and in it.
    assert!(world.add(web).contains("do not ask for it"));
    world.api.change(web, in_mesh());
    wait::until("the label to count", || world.add(web).is_empty().then_some(()));
    world.wait_told(web, Some("enabled"));
    wait::until("its DaemonSet to be known", || {
        world.agent.log().contains("DaemonSet is known").then_some(())
    });
    assert!(world.agent.stop().success());
    assert!(
        world
            .agent
            .log()
            .contains("it is there and wants a pod on this node"),
        "{}",
        world.agent.log()
    );
    let manifest = include_str!("../../deploy/manifests/redirector.yaml");
    wait_all_used(&world.api, &granted(&[manifest.to_owned()]));

    // Of more it has nothing.
    let token = world.api.token();
    let pod = format!("/api/v1/namespaces/demo/pods/{}", web.name);
    for (method, path) in [
        ("GET", "/api/v1/secrets"),
        ("GET", "/api/v1/namespaces/redirector-system/configmaps"),
        ("GET", "/api/v1/nodes"),
        ("GET", "/apis/apps/v1/namespaces/redirector-system/daemonsets"),
        (
            "GET",
            "/apis/apps/v1/namespaces/kube-system/daemonsets/redirector",
        ),
        ("GET", "/apis/certificates.k8s.io/v1/certificatesigningrequests"),
        ("PATCH", &pod),
        ("DELETE", &pod),
        ("DELETE", "/api/v1/namespaces/demo"),
        (
            "DELETE",
            "/apis/apps/v1/namespaces/redirector-system/daemonsets/redirector",
        ),
        ("PATCH", "/api/v1/nodes/node-a/status"),
    ] {
        let (status, body) = world.api.as_agent(&token, method, path);
        assert_eq!(status, 403, "{method} {path}: {body}");
    }
}

fn certificates_are_asked_for_approved_and_tidied_away() {
    const SIGNER: &str = "example.com/mesh";
    let values = json!({ "certificates": {
        "source": "signer", "signer": { "name": SIGNER, "approve": true, "rootConfigMap": "roots" },
    } });
    let rendered = chart::render(&values).unwrap_or_else(|error| panic!("{error}"));
    let manifest = [
        vec!["{kind: Namespace, apiVersion: v1, metadata: {name: redirector-system}}".to_owned()],
        rendered.objects,
    ]
    .concat();
    let node = Node::new();
    let api = KubeApiserver::with(&node, &manifest);
    let root = api.signer();
    let mut pods = ["client", "server"].map(|name| node.pod(name));
    for pod in &mut pods {
        api.pod(pod, in_mesh());
    }
    let options = Options {
        arguments: vec!["--kubernetes-signer-approve".to_owned()],
        environment: api.signer_environment(SIGNER),
        ..Options::default()
    };
    let world = World::of(node, api, &pods, options);
    let [client, server] = &pods;
    for pod in [client, server] {
        world.add(pod);
    }
    let _app = App::start(&server.ns, (Family::V4.any(), PORT).into(), app::who);
    wait::until("a connection with certificates of the signer", || {
        world.api.sign(&root);
        let seen = app::ask_who(&client.ns, server.addr(Family::V4, PORT)).ok()?;
        seen.contains(&client.ip(Family::V4).to_string()).then_some(())
    });
    let log = world.agent.access_log();
    let is_theirs = |line: &&std::collections::BTreeMap<String, String>| {
        line.get("src.identity")
            .is_some_and(|id| *id == client.identity())
    };
    assert!(log.iter().any(|line| is_theirs(&line)), "{log:?}");
    wait::until("the requests to be removed", || {
        (world.api.sign(&root) == 0).then_some(())
    });
    let granted = granted(&manifest);
    let asked_for = |right: &&String| right.contains("certificatesigningrequests");
    wait_all_used(&world.api, &granted.iter().filter(asked_for).cloned().collect());
    // The right over the signer is for the approval, which the server would refuse without.
    let approve = format!("approve signers {SIGNER}");
    assert!(granted.contains(&approve), "{granted:?}");
}
