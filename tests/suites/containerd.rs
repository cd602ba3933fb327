//! The CNI plugin under a real container runtime: containerd and runc make pods on a bridge, with addresses by host-local, and our plugin
//! is chained behind. The agent is the real one.

use std::{
    fs,
    process::{ExitCode, ExitStatus},
    thread,
    time::Instant,
};

use redirector::cni::entry::TYPE;
use redirector_tests::{
    agent::{Agent, Options, binary},
    app::{self, App},
    capture::{Capture, contains, opened_ports},
    containerd::{AGENT_POD, Containerd, EXCLUDED, Sandbox},
    mesh::PORT,
    node::{Family, Node},
    process::{command, output},
    suite::{Needs, case, main as suite},
    wait,
    workloads::Workloads,
};
use serde_json::{Value, json};

fn main() -> ExitCode {
    suite(
        Needs::Agent,
        2,
        vec![
            case(
                "pods_of_the_runtime_are_in_the_mesh",
                pods_of_the_runtime_are_in_the_mesh,
            ),
            case("without_an_agent_no_pod_starts", without_an_agent_no_pod_starts),
            case(
                "some_pods_start_without_an_agent",
                some_pods_start_without_an_agent,
            ),
            case("restarts_change_nothing", restarts_change_nothing),
            case("many_pods_come_at_once", many_pods_come_at_once),
            case(
                "the_plugin_prints_one_document_and_nothing_else",
                the_plugin_prints_one_document_and_nothing_else,
            ),
        ],
    )
}

/// A node with a runtime and an agent. What is dropped first is told by the fields' order.
struct Cluster {
    containerd: Containerd,
    agent: Agent,
    node: Node,
}

/// The addresses that the pods get, one after the other.
fn address(position: usize) -> [std::net::IpAddr; 2] {
    [
        format!("10.77.200.{}", position + 1).parse().unwrap(),
        format!("fd77::c8:{:x}", position + 1).parse().unwrap(),
    ]
}

impl Cluster {
    /// The mesh knows pods of these names, with the addresses of the first that come.
    fn start(names: &[&str]) -> Self {
        let node = Node::new();
        let containerd = Containerd::start(&node);
        let workloads = names
            .iter()
            .enumerate()
            .fold(Workloads::default(), |workloads, (position, name)| {
                workloads.with_workload(name, &address(position), "HBONE")
            });
        let options = Options {
            mounts: Some(containerd.mounts()),
            ..Options::default()
        };
        let agent = Agent::start(&node, &workloads, options);
        Self {
            containerd,
            agent,
            node,
        }
    }

    fn run(&self, name: &str) -> Sandbox {
        self.containerd
            .run("demo", name)
            .unwrap_or_else(|error| panic!("pod {name}: {error:#}\n{}", self.agent.log()))
    }

    fn remove(&self, pod: Sandbox) {
        self.containerd
            .remove(&pod.id)
            .unwrap_or_else(|error| panic!("removing {}: {error:#}", pod.uid));
    }

    /// The UIDs of the agent's pods that are captured, as they are now.
    fn captured(&self) -> Vec<String> {
        let pods = self.agent.pods().into_iter();
        pods.filter(|pod| pod["state"] == "captured")
            .map(|pod| pod["uid"].as_str().unwrap().to_owned())
            .collect()
    }

    /// Waits for what an agent does that nobody waits for: it restores its pods, and lets go of them.
    fn comes_to(&self, pods: &[&Sandbox]) {
        let expected: Vec<&str> = pods.iter().map(|pod| pod.uid.as_str()).collect();
        wait::until("the agent's pods", || {
            let same = self.agent.pods().len() == expected.len() && self.captured() == expected;
            same.then_some(())
        });
    }

    fn nothing_is_left(&self) {
        self.comes_to(&[]);
        let left = self.containerd.left(&self.node);
        assert!(left.is_empty(), "{left:#?}");
    }

    /// From one pod to the other it is HBONE, and the application sees the client's address.
    fn talk(&self, client: &Sandbox, server: &Sandbox) {
        let link = server.host.ns.ip_output("-o link show eth0");
        let peer = link
            .split("eth0@if")
            .nth(1)
            .and_then(|rest| rest.split(':').next());
        let peer = peer.and_then(|index| index.parse().ok()).expect("a veth");
        for family in Family::BOTH {
            let _app = App::start(&server.host.ns, (family.any(), PORT).into(), app::http);
            let capture = Capture::start(&self.node.host.ns, peer).expect("capturing");
            let (status, body) =
                app::http_get(&client.host.ns, server.host.addr(family, PORT), "/a-secret").unwrap();
            let segments = capture.stop();
            assert_eq!(status, 200);
            let expected = format!("you are {}\n", client.host.ip(family));
            assert!(body.ends_with(&expected), "{body}");
            // The tunnel may be the one of before.
            assert!(opened_ports(&segments).iter().all(|port| *port == 15008));
            assert!(!segments.is_empty() && !contains(&segments, b"a-secret"));
        }
    }
}

fn pods_of_the_runtime_are_in_the_mesh() {
    let cluster = Cluster::start(&["client", "server"]);
    let (client, server) = (cluster.run("client"), cluster.run("server"));
    assert_eq!(cluster.captured(), [client.uid.clone(), server.uid.clone()]);
    for (position, pod) in [&client, &server].into_iter().enumerate() {
        let expected = address(position);
        assert_eq!(Family::BOTH.map(|family| pod.host.ip(family)), expected);
        let known = &cluster.agent.pods()[position];
        assert_eq!(known["addresses"], json!(expected), "{known}");
        assert_eq!(known["namespace"], "demo");
    }
    cluster.talk(&client, &server);
    // As CRI-O asks; containerd does not. A pod that the agent does not know was not to be captured.
    let conf = json!({"cniVersion": "1.0.0", "agentSocket": cluster.node.directory().join("cni.sock"),
        "logFile": cluster.containerd.plugin_log_file(), "prevResult": {"cniVersion": "1.0.0"}});
    for uid in [client.uid.as_str(), "unknown"] {
        let args = format!("K8S_POD_NAMESPACE=demo;K8S_POD_NAME=client;K8S_POD_UID={uid}");
        let (status, text) = call_plugin(&cluster.node, "CHECK", &args, &conf.to_string());
        assert!(status.success() && text.is_empty(), "{status}: {text}");
    }
    let log = cluster.containerd.plugin_log();
    assert!(
        log.iter().all(|record| record["command"] != "CHECK"),
        "the agent has answered: {log:?}"
    );
    cluster.remove(client);
    cluster.comes_to(&[&server]);
    cluster.remove(server);
    cluster.nothing_is_left();
    // Each call is in the plugin's file, and in the agent's log.
    let told = |record: &Value| (record["command"].clone(), record["pod"].clone());
    let log: Vec<_> = cluster.containerd.plugin_log().iter().map(told).collect();
    let both = |command: &str| ["client", "server"].map(|pod| (json!(command), json!(pod)));
    for expected in both("ADD").iter().chain(&both("DEL")) {
        assert!(log.contains(expected), "{expected:?} is not in {log:?}");
    }
    wait::until("the plugin's records in the agent's log", || {
        let log = cluster.agent.log();
        let lines = log.lines().filter(|line| line.contains("\tcni_plugin\t"));
        (lines.count() >= 4).then_some(())
    });
}

fn without_an_agent_no_pod_starts() {
    let mut cluster = Cluster::start(&["client", "server"]);
    cluster.agent.stop();
    let error = cluster
        .containerd
        .run("demo", "client")
        .expect_err("there is no agent")
        .to_string();
    assert!(
        error.contains("redirector-cni") && error.contains("the redirector's agent cannot be reached at"),
        "{error}"
    );
    let left = cluster.containerd.left(&cluster.node);
    assert!(left.is_empty(), "{left:#?}");
    // Nor when it refuses: it cannot know the service account of a pod that is not in the mesh.
    cluster.agent.restart(&cluster.node);
    let error = cluster
        .containerd
        .run("demo", "stranger")
        .expect_err("the agent refuses it")
        .to_string();
    assert!(error.contains("the redirector's agent answers 500"), "{error}");
    cluster.nothing_is_left();
    let pod = cluster.run("client");
    assert_eq!(cluster.captured(), std::slice::from_ref(&pod.uid));
    // A pod goes without an agent too, and is not there any more for the next one.
    cluster.agent.stop();
    cluster.remove(pod);
    let left = cluster.containerd.left(&cluster.node);
    assert!(left.is_empty(), "{left:#?}");
    cluster.agent.restart(&cluster.node);
    cluster.comes_to(&[]);
    // Nor does an agent that hangs keep it from going; it hears of it when it can.
    let pod = cluster.run("server");
    cluster.agent.pause();
    cluster.remove(pod);
    cluster.agent.resume();
    cluster.nothing_is_left();
}

fn some_pods_start_without_an_agent() {
    let mut cluster = Cluster::start(&[]);
    cluster.agent.stop();
    let (namespace, prefix) = AGENT_POD;
    let own = format!("{prefix}x7k2p");
    let mut pods = Vec::new();
    for (namespace, name) in [(EXCLUDED, "coredns"), (namespace, own.as_str())] {
        let pod = cluster.containerd.run(namespace, name);
        pods.push(pod.unwrap_or_else(|error| panic!("{namespace}/{name}: {error:#}")));
    }
    // Another one of the agent's namespace is nothing special.
    cluster
        .containerd
        .run(namespace, "other")
        .expect_err("there is no agent");
    cluster.agent.restart(&cluster.node);
    cluster.comes_to(&[]);
    for pod in pods {
        cluster.remove(pod);
    }
    cluster.nothing_is_left();
}

fn restarts_change_nothing() {
    let mut cluster = Cluster::start(&["client", "server"]);
    let (client, server) = (cluster.run("client"), cluster.run("server"));
    cluster.talk(&client, &server);
    cluster.agent.stop();
    cluster.agent.restart(&cluster.node);
    cluster.comes_to(&[&client, &server]);
    cluster.talk(&client, &server);
    cluster.containerd.restart(&cluster.node);
    let list = cluster.containerd.list().expect("containerd answers");
    assert!(
        list.len() == 2 && list.iter().all(|(_, ready)| *ready),
        "{list:?}"
    );
    cluster.talk(&client, &server);
    assert_eq!(cluster.captured(), [client.uid.clone(), server.uid.clone()]);
    cluster.agent.kill();
    cluster.agent.restart(&cluster.node);
    for pod in [client, server] {
        cluster.remove(pod);
    }
    cluster.nothing_is_left();
}

fn many_pods_come_at_once() {
    const PODS: usize = 10;
    let names: Vec<String> = (0..PODS).map(|number| format!("pod{number}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let cluster = Cluster::start(&names);
    let start = Instant::now();
    let pods: Vec<Sandbox> = thread::scope(|scope| {
        let makers: Vec<_> = names
            .iter()
            .map(|name| scope.spawn(|| cluster.run(name)))
            .collect();
        makers
            .into_iter()
            .map(|maker| maker.join().expect("a pod"))
            .collect()
    });
    let took = start.elapsed();
    let mut uids: Vec<String> = pods.iter().map(|pod| pod.uid.clone()).collect();
    uids.sort();
    assert_eq!(cluster.captured(), uids);
    let log = cluster.containerd.plugin_log();
    let mut added: Vec<u64> = log
        .iter()
        .filter(|record| record["command"] == "ADD")
        .map(|record| record["ms"].as_str().and_then(|ms| ms.parse().ok()).unwrap())
        .collect();
    added.sort_unstable();
    assert_eq!(added.len(), PODS);
    println!(
        "{PODS} pods at once took {took:.1?}; the plugin waited for the agent for {added:?} ms, {} in the middle",
        added[PODS / 2]
    );
    thread::scope(|scope| {
        for pod in pods {
            scope.spawn(|| cluster.remove(pod));
        }
    });
    cluster.nothing_is_left();
}

/// Calls the plugin by hand; returns how it ended, and what it printed on both outputs.
fn call_plugin(node: &Node, name: &str, args: &str, input: &str) -> (ExitStatus, String) {
    let file = node.directory().join("input.json");
    fs::write(&file, input).unwrap();
    let plugin = binary().expect("xtask says where").with_file_name(TYPE);
    let mut call = command(&node.host.ns, &plugin);
    call.env("CNI_COMMAND", name)
        .env("CNI_ARGS", args)
        .env("CNI_NETNS", node.host.ns.path())
        .stdin(fs::File::open(&file).unwrap());
    output(&mut call, wait::DEADLINE)
}

/// The real binary, called by hand with what a runtime would not send.
fn the_plugin_prints_one_document_and_nothing_else() {
    let node = Node::new();
    let absent = json!({"cniVersion": "1.0.0", "agentSocket": node.directory().join("absent.sock"),
        "logFile": "/dev/stdout", "logLevel": "debug", "prevResult": {"cniVersion": "1.0.0", "x": [1.50, "ü"]}});
    let pod = "K8S_POD_NAMESPACE=demo;K8S_POD_NAME=client";
    let passed = absent["prevResult"].clone();
    for (name, args, input, expected) in [
        ("VERSION", pod, String::new(), Ok(Some("supportedVersions"))),
        ("ADD", "", absent.to_string(), Ok(Some("x"))),
        ("ADD", pod, absent.to_string(), Err(11)),
        ("ADD", pod, "}".to_owned(), Err(6)),
        ("ADD", pod, "[".repeat(1 << 20), Err(6)),
        ("DEL", pod, absent.to_string(), Ok(None)),
        ("DEL", pod, "}".to_owned(), Ok(None)),
        ("CHECK", pod, absent.to_string(), Ok(None)),
        ("GC", pod, absent.to_string(), Ok(None)),
        ("STATUS", "", absent.to_string(), Ok(None)),
        ("", pod, absent.to_string(), Err(4)),
    ] {
        let (status, text) = call_plugin(&node, name, args, &input);
        let what = format!("{name} {args}: {status}: {text}");
        let document =
            || serde_json::from_str::<Value>(&text).unwrap_or_else(|error| panic!("{error}: {what}"));
        assert_eq!(status.success(), expected.is_ok(), "{what}");
        match expected {
            Ok(None) => assert_eq!(text, "", "{what}"),
            Ok(Some("x")) => assert_eq!(document(), passed, "{what}"),
            Ok(Some(key)) => assert!(document()[key].is_array(), "{what}"),
            Err(code) => assert_eq!(document()["code"], code, "{what}"),
        }
    }
}
