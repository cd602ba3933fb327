//! Which pods are in the mesh, by an API server that lists in pages, watches, forgets its past and goes away: decided when a plugin
//! tells of a pod, changed while pods run, and told on the pods.

use std::{
    fs,
    path::PathBuf,
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use redirector_tests::{
    agent::{Agent, Options},
    app::{self, App},
    cgroup::{Cgroup, command_in},
    kube_api::{ANNOTATION, IMPAIRED, KubeApi},
    mesh::PORT,
    node::{Family, Node, Pod},
    process::{Process, command},
    suite::{Case, Needs, case, main as suite},
    wait,
    workloads::Workloads,
};
use serde_json::{Value, json};

/// Pods of a namespace whose label comes and goes.
const FLIPPED: usize = 250;

/// For all of these: a kernel with TCX links attaches one at a time.
const FLIP_DEADLINE: Duration = Duration::from_secs(180);

fn main() -> ExitCode {
    let cases: Vec<Case> = vec![
        case(
            "labels_decide_and_are_told_on_the_pod",
            labels_decide_and_are_told_on_the_pod,
        ),
        case(
            "a_missed_pod_is_found_from_a_container",
            a_missed_pod_is_found_from_a_container,
        ),
        case("pods_that_were_missed_are_found", pods_that_were_missed_are_found),
        case(
            "what_is_not_the_pod_s_is_not_taken_for_it",
            what_is_not_the_pod_s_is_not_taken_for_it,
        ),
        case(
            "annotations_count_while_the_pod_runs",
            annotations_count_while_the_pod_runs,
        ),
        case(
            "what_a_capture_lacks_is_told_on_the_pod",
            what_a_capture_lacks_is_told_on_the_pod,
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
            "an_agent_that_starts_brings_pods_to_what_is_said",
            an_agent_that_starts_brings_pods_to_what_is_said,
        ),
        case(
            "a_name_and_addresses_that_come_back_are_another_pod",
            a_name_and_addresses_that_come_back_are_another_pod,
        ),
        case(
            "a_label_flips_for_two_hundred_and_fifty_pods",
            a_label_flips_for_two_hundred_and_fifty_pods,
        ),
    ];
    suite(Needs::Agent, 2, cases)
}

fn in_mesh() -> Value {
    json!({ "metadata": { "labels": { "istio.io/dataplane-mode": "ambient" } } })
}

fn out_of_mesh() -> Value {
    json!({ "metadata": { "labels": { "istio.io/dataplane-mode": null } } })
}

/// A node in a cluster. The agent is dropped first.
struct World {
    agent: Agent,
    api: KubeApi,
    node: Node,
}

impl World {
    fn new(names: &[&str]) -> (Self, Vec<Pod>) {
        let node = Node::new();
        let pods: Vec<_> = names.iter().map(|name| node.pod(name)).collect();
        (Self::with(node, &pods, None), pods)
    }

    fn with(node: Node, pods: &[Pod], cgroup: Option<PathBuf>) -> Self {
        let api = KubeApi::start(&node.host.ns, node.directory());
        let options = Options {
            environment: api.environment(),
            cgroup,
            ..Options::default()
        };
        let agent = Agent::start(&node, &Workloads::hbone(pods), options);
        Self { agent, api, node }
    }

    fn state(&self, pod: &Pod) -> Option<String> {
        let pods = self.agent.pods();
        let found = pods.iter().find(|known| known["uid"] == pod.uid.as_str())?;
        found["state"].as_str().map(str::to_owned)
    }

    fn wait_captured(&self, pod: &Pod) {
        wait::until(
            &format!("{} to be captured\n{}", pod.name, self.agent.log()),
            || (self.state(pod).as_deref() == Some("captured")).then_some(()),
        );
    }

    fn wait_released(&self, pod: &Pod) {
        wait::until(&format!("{} to be released", pod.name), || {
            self.state(pod).is_none().then_some(())
        });
    }

    fn wait_told(&self, pod: &Pod, expected: Option<&str>) {
        wait::until(&format!("{} to be told {expected:?}", pod.name), || {
            (self.api.told(pod).as_deref() == expected).then_some(())
        });
    }

    /// Tells of a pod as its plugin does, and returns what is answered.
    fn add(&self, pod: &Pod) -> String {
        let answer = self.agent.cmdadd(pod);
        assert_eq!(answer.status, 200, "{}: {}", pod.name, answer.body);
        answer.body
    }

    /// What is told of pods that could not even be tried.
    fn missed(&self) -> Vec<Value> {
        let (status, body) = app::http_get(&self.node.host.ns, "127.0.0.1:15000".parse().unwrap(), "/pods")
            .expect("the agent answers");
        assert_eq!(status, 200, "{body}");
        let mut view: Value = serde_json::from_str(&body).expect("JSON");
        serde_json::from_value(view["missed"].take()).expect("a list")
    }
}

/// The cgroups that a kubelet would make, below one of the test's own, with a process of each pod.
struct Kubelet {
    processes: Vec<Process>,
    directories: Vec<PathBuf>,
    root: Cgroup,
    logs: PathBuf,
}

impl Kubelet {
    fn new(node: &Node) -> Self {
        let root = Cgroup::new();
        let kubepods = root.path().join("kubepods");
        fs::create_dir(&kubepods).unwrap();
        Self {
            processes: Vec::new(),
            directories: vec![kubepods],
            root,
            logs: node.directory().to_owned(),
        }
    }

    /// The cgroup of the pod with `uid`.
    fn cgroup(&mut self, uid: &str) -> PathBuf {
        let directory = self.root.path().join("kubepods").join(format!("pod{uid}"));
        if !directory.exists() {
            fs::create_dir(&directory).unwrap();
            self.directories.push(directory.clone());
        }
        directory
    }

    /// Starts a process in the cgroup of the pod with `uid`, in the namespace of `place`.
    fn run(&mut self, uid: &str, place: &redirector_tests::netns::Namespace) {
        let directory = self.cgroup(uid);
        let mut sleep = command(place, "sleep");
        sleep.arg("1000");
        let log = self.logs.join(format!("sleep-{}.log", self.processes.len()));
        let process = Process::start(&mut command_in(&directory, &sleep), &log).unwrap();
        let pid = process.pid().to_string();
        let procs = directory.join("cgroup.procs");
        wait::until("the process to be in its cgroup", || {
            let listed = fs::read_to_string(&procs).unwrap();
            let named = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            (listed.lines().any(|line| line == pid) && named == "sleep\n").then_some(())
        });
        self.processes.push(process);
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        self.processes.clear();
        for directory in self.directories.iter().rev() {
            // The kernel takes leave of processes that have ended after their parent has.
            let end = Instant::now() + Duration::from_secs(5);
            while fs::remove_dir(directory).is_err() && Instant::now() < end {
                thread::sleep(Duration::from_millis(10));
            }
        }
    }
}

fn labels_decide_and_are_told_on_the_pod() {
    let (world, pods) = World::new(&["inside", "outer", "host", "sidecar", "refusing"]);
    let [inside, outside, host, sidecar, refusing] = pods.as_slice() else {
        unreachable!()
    };
    let api = &world.api;
    api.pod(inside, in_mesh());
    api.pod(outside, json!({}));
    let mut more = in_mesh();
    more["spec"] = json!({ "hostNetwork": true });
    api.pod(host, more);
    let mut more = in_mesh();
    more["metadata"]["annotations"] = json!({ "sidecar.istio.io/status": "{}" });
    api.pod(sidecar, more);
    api.pod(
        refusing,
        json!({ "metadata": {
            "labels": { "istio.io/dataplane-mode": "none" },
            // As another agent may have told.
            "annotations": { ANNOTATION: "enabled" },
        } }),
    );

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
    // One that says that it has ended may still run.
    api.change(inside, json!({ "status": { "phase": "Succeeded" } }));
    api.bookmark();
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

fn pods_that_were_missed_are_found() {
    let (world, pods) = World::new(&["early", "late", "lost"]);
    let [early, late, lost] = pods.as_slice() else {
        unreachable!()
    };
    let mut kubelet = Kubelet::new(&world.node);
    kubelet.run(&early.uid, &early.ns);
    kubelet.run(&late.uid, &late.ns);
    world.api.pod(lost, in_mesh());
    world.api.pod(early, in_mesh());
    world.api.pod(late, json!({}));
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

fn a_missed_pod_is_found_from_a_container() {
    let node = Node::new();
    let pods = [node.pod("early")];
    let mut kubelet = Kubelet::new(&node);
    // To the agent, the cgroups of others lead up and out of its own.
    let own = kubelet.cgroup("agent");
    kubelet.run(&pods[0].uid, &pods[0].ns);
    let world = World::with(node, &pods, Some(own));
    world.api.pod(&pods[0], in_mesh());
    world.wait_captured(&pods[0]);
}

fn what_is_not_the_pod_s_is_not_taken_for_it() {
    let (world, pods) = World::new(&["web", "other"]);
    let [web, other] = pods.as_slice() else {
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

fn annotations_count_while_the_pod_runs() {
    let (world, pods) = World::new(&["client"]);
    let client = &pods[0];
    let strict = |value: Value| json!({ "metadata": { "annotations": { "redirector.io/strict": value } } });
    let mut more = in_mesh();
    more["metadata"]["annotations"] = json!({ "redirector.io/strict": "perhaps" });
    world.api.pod(client, more);
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

fn what_a_capture_lacks_is_told_on_the_pod() {
    let (world, pods) = World::new(&["client"]);
    let client = &pods[0];
    world.api.pod(client, in_mesh());
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

fn labels_that_no_watch_told_count_before_a_pod_is_let_out() {
    let (world, pods) = World::new(&["late", "outer"]);
    let [late, outside] = pods.as_slice() else {
        unreachable!()
    };
    let api = &world.api;
    for pod in [late, outside] {
        api.pod(pod, json!({}));
    }
    // The server is away, and what it told last counts: that keeps no pod outside the mesh from starting.
    assert!(world.add(outside).contains("do not ask for it"));
    api.set_faulty(true);
    assert!(world.add(outside).contains("do not ask for it"));
    api.set_faulty(false);
    assert_eq!(world.state(outside), None);

    api.namespace_untold("demo", &json!({ "istio.io/dataplane-mode": "ambient" }));
    world.add(late);
    assert_eq!(world.state(late).as_deref(), Some("captured"));
    world.wait_told(late, Some("enabled"));
}

fn an_api_server_that_fails_changes_nothing() {
    let (world, pods) = World::new(&["first", "second", "third", "fourth"]);
    let [first, second, third, fourth] = pods.as_slice() else {
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
    for pod in [first, second, third] {
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

fn an_agent_that_starts_brings_pods_to_what_is_said() {
    let (mut world, pods) = World::new(&["stays", "leaves", "comes"]);
    let [stays, leaves, comes] = pods.as_slice() else {
        unreachable!()
    };
    let mut kubelet = Kubelet::new(&world.node);
    kubelet.run(&comes.uid, &comes.ns);
    for pod in [stays, leaves] {
        world.api.pod(pod, in_mesh());
        world.add(pod);
    }
    world.wait_told(leaves, Some("enabled"));
    world.agent.kill();
    world.api.change(leaves, out_of_mesh());
    world.api.pod(comes, in_mesh());
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

fn a_name_and_addresses_that_come_back_are_another_pod() {
    let (world, mut pods) = World::new(&["db-0"]);
    let old = pods.remove(0);
    world.api.pod(&old, in_mesh());
    world.add(&old);
    world.wait_told(&old, Some("enabled"));
    // The same name, account and addresses, another UID and namespace, before the old one's end is told.
    let mut new = world.node.twin(&old, "db-0-again");
    new.name.clone_from(&old.name);
    world.api.change(
        &old,
        json!({ "metadata": { "deletionTimestamp": "2026-01-01T00:00:00Z" } }),
    );
    world.api.pod(&new, in_mesh());
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

fn a_label_flips_for_two_hundred_and_fifty_pods() {
    let node = Node::new();
    let names: Vec<_> = (0..FLIPPED).map(|number| format!("pod{number}")).collect();
    let pods = node.pods(&names);
    let world = World::with(node, &pods, None);
    let mut kubelet = Kubelet::new(&world.node);
    for pod in &pods {
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
