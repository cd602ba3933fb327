//! Pods come and go, and agents die: what must be left behind, and what must not.

#[path = "lifecycle/instances.rs"]
mod instances;

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use redirector_tests::{
    agent::{Agent, Options},
    app::{self, App},
    capture::opened_ports,
    mesh::{Mesh, PORT},
    node::{Family, Node, Pod},
    suite::{Needs, case, main as suite},
    wait,
    workloads::Workloads,
};

const CYCLES: usize = 200;

fn main() -> ExitCode {
    let mut cases = Vec::new();
    for (attach, force_clsact) in [("tcx", false), ("clsact", true)] {
        let options = move || Options {
            force_clsact,
            ..Options::default()
        };
        cases.push(case(
            format!("two_hundred_cycles_leave_nothing_{attach}"),
            move || cycles_leave_nothing(options()),
        ));
        cases.push(case(
            format!("pods_that_vanish_leave_nothing_{attach}"),
            move || vanished_leave_nothing(options()),
        ));
        cases.push(case(
            format!("pods_that_go_without_a_delete_are_released_{attach}"),
            move || gone_without_a_delete(options()),
        ));
        cases.push(case(format!("a_killed_agent_is_succeeded_{attach}"), move || {
            a_killed_agent_is_succeeded(options())
        }));
        cases.push(case(
            format!("a_stopped_agent_is_succeeded_{attach}"),
            move || a_stopped_agent_is_succeeded(options()),
        ));
        cases.push(case(format!("enrolling_is_idempotent_{attach}"), move || {
            enrolling_is_idempotent(options())
        }));
        cases.push(case(format!("what_is_removed_is_put_back_{attach}"), move || {
            what_is_removed_is_put_back(options())
        }));
    }
    cases.push(case("a_released_pod_talks_plainly", a_released_pod_talks_plainly));
    cases.push(case(
        "an_address_that_comes_later_is_captured",
        an_address_that_comes_later_is_captured,
    ));
    cases.push(case(
        "a_change_that_fails_leaves_the_pod_as_it_was",
        a_change_that_fails_leaves_the_pod_as_it_was,
    ));
    cases.push(case(
        "a_pod_whose_record_is_damaged_stays_captured",
        a_pod_whose_record_is_damaged_stays_captured,
    ));
    cases.push(case(
        "a_late_delete_spares_the_new_owner",
        a_late_delete_spares_the_new_owner,
    ));
    cases.extend(instances::cases());
    suite(Needs::Agent, 1, cases)
}

/// Everything in a pod's namespace that enrolling may change.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Traces {
    rules: [BTreeSet<String>; 2],
    routes: [String; 2],
    listeners: Vec<String>,
    filters: [String; 2],
    sysctls: Vec<String>,
}

fn traces(pod: &Pod) -> Traces {
    let listening = |file: &str| -> Vec<String> {
        let text = pod.ns.proc_net(file).unwrap();
        let lines = text
            .lines()
            .skip(1)
            .map(|line| line.split_whitespace().collect::<Vec<_>>());
        lines
            .filter(|words| words[3] == "0A")
            .map(|words| words[1].to_owned())
            .collect()
    };
    let sysctls = [
        "net/ipv4/tcp_fwmark_accept",
        "net/ipv4/fwmark_reflect",
        "net/ipv6/fwmark_reflect",
        "net/ipv4/conf/lo/accept_local",
        "net/ipv4/conf/eth0/accept_local",
        "net/ipv4/conf/all/accept_local",
    ];
    // An empty clsact qdisc may stay: others may have come to use it.
    let filters = |hook| {
        let tc = std::process::Command::new("tc")
            .args(["-n", pod.ns.name(), "filter", "show", "dev", "eth0", hook])
            .output()
            .expect("tc comes with ip");
        let text = String::from_utf8_lossy(&tc.stdout);
        // Another instance of a program has another id.
        text.lines()
            .map(|line| line.split(" id ").next().unwrap_or_default().to_owned() + "\n")
            .collect()
    };
    Traces {
        // Rules of one priority stand in the order in which they were added.
        rules: ["-4 rule show", "-6 rule show"].map(|command| {
            let text = pod.ns.ip_output(command);
            text.lines().map(str::to_owned).collect()
        }),
        // Neighbour discovery's own routes come and go with their expiry times: the tables of ours are what counts.
        routes: ["-4 route show table all", "-6 route show table all"].map(|command| {
            pod.ns
                .ip_output(command)
                .lines()
                .filter(|line| line.contains("table 1337"))
                .collect()
        }),
        listeners: ["tcp", "tcp6"].map(listening).concat(),
        filters: ["ingress", "egress"].map(filters),
        sysctls: sysctls
            .iter()
            .map(|path| format!("{path}={}", pod.ns.sysctl(path).unwrap_or_default()))
            .collect(),
    }
}

/// All files below the directory of pins.
fn paths(agent: &Agent) -> BTreeSet<PathBuf> {
    fn walk(directory: &Path, found: &mut BTreeSet<PathBuf>) {
        for path in fs::read_dir(directory)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path())
        {
            if path.is_dir() {
                walk(&path, found);
            }
            found.insert(path);
        }
    }
    let mut found = BTreeSet::new();
    walk(&agent.bpffs_dir(), &mut found);
    found
}

/// The same without the slots of the pods, of which an instance that is made anew has another.
fn pins(agent: &Agent) -> BTreeSet<PathBuf> {
    let without_slot = |path: PathBuf| {
        let parts = path
            .iter()
            .map(|part| match part.to_str().and_then(|part| part.split_once('-')) {
                Some((slot, uid)) if slot.parse::<u32>().is_ok() => OsStr::new(uid),
                _ => part,
            });
        parts.collect()
    };
    paths(agent).into_iter().map(without_slot).collect()
}

/// What the agent holds is again what it held: descriptors of closed connections may take a moment.
fn holds_no_more_than(agent: &Agent, before: &[String]) {
    let mut last = Vec::new();
    let end = std::time::Instant::now() + wait::DEADLINE;
    while std::time::Instant::now() < end {
        last = agent.descriptors();
        if last.len() <= before.len() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    panic!("descriptors before: {before:?}\nafter: {last:?}");
}

fn programs_in_kernel() -> usize {
    aya::programs::loaded_programs().count()
}

fn cycles_leave_nothing(options: Options) {
    let mesh = Mesh::started(options, |client, server| Workloads::hbone([client, server]));
    let pods = [&mesh.client, &mesh.server];
    let _app = App::start(&mesh.server.ns, (Family::V4.any(), PORT).into(), app::who);
    let cycle = |talk: bool| {
        pods.iter().for_each(|pod| mesh.agent.enrol(pod));
        if talk {
            app::ask_who(&mesh.client.ns, mesh.server.addr(Family::V4, PORT)).unwrap();
        }
        pods.iter().for_each(|pod| mesh.agent.release(pod));
    };
    let untouched = pods.map(traces);
    cycle(true); // What is made once for all pods is there after this.
    mesh.agent.settle();
    let (descriptors, pinned, programs) = (mesh.agent.descriptors(), pins(&mesh.agent), programs_in_kernel());
    for number in 0..CYCLES / 2 {
        cycle(number % 10 == 0);
    }
    assert_eq!(pods.map(traces), untouched);
    assert_eq!(pins(&mesh.agent), pinned);
    holds_no_more_than(&mesh.agent, &descriptors);
    wait::until("the kernel to free the programs", || {
        (programs_in_kernel() <= programs).then_some(())
    });
}

fn vanished_leave_nothing(options: Options) {
    let node = Node::new();
    let agent = Agent::start(&node, &Workloads::default(), options);
    let visit = |name: String| {
        let pod = node.pod(&name);
        agent.enrol(&pod);
        let event = redirector_tests::cni::event(&pod).to_string();
        drop(pod);
        let answer = agent.post("/cmddel", &event);
        assert_eq!(answer.status, 200, "{}", answer.body);
    };
    visit("first".into());
    agent.settle();
    let (descriptors, pinned) = (agent.descriptors(), pins(&agent));
    (0..20).for_each(|number| visit(format!("pod{number}")));
    assert_eq!(pins(&agent), pinned);
    holds_no_more_than(&agent, &descriptors);
}

/// Nobody tells that a pod is gone: its name is removed, and no process is in it.
fn gone_without_a_delete(options: Options) {
    let node = Node::new();
    let agent = Agent::start(&node, &Workloads::default(), options);
    let (stays, goes) = (node.pod("stays"), node.pod("goes"));
    agent.enrol(&stays);
    agent.settle();
    let (descriptors, pinned) = (agent.descriptors(), pins(&agent));
    agent.enrol(&goes);
    drop(goes);
    wait::until("the pod to be released", || {
        (pins(&agent) == pinned).then_some(())
    });
    holds_no_more_than(&agent, &descriptors);
}

fn works_over_hbone(mesh: &Mesh) {
    for family in Family::BOTH {
        let _app = App::start(&mesh.server.ns, (family.any(), PORT).into(), app::who);
        let capture = mesh.node.capture(&mesh.server);
        let seen = wait::until("traffic over HBONE", || {
            app::ask_who(&mesh.client.ns, mesh.server.addr(family, PORT)).ok()
        });
        assert_eq!(seen, mesh.client.ip(family).to_string());
        // A tunnel from before may serve; nothing else may be opened.
        assert!(opened_ports(&capture.stop()).iter().all(|port| *port == 15008));
    }
}

fn a_killed_agent_is_succeeded(options: Options) {
    let mut mesh = Mesh::hbone(options);
    works_over_hbone(&mesh);
    let pinned = pins(&mesh.agent);
    for _ in 0..3 {
        mesh.agent.kill();
        mesh.agent.restart(&mesh.node);
        works_over_hbone(&mesh);
        assert_eq!(pins(&mesh.agent), pinned);
    }
    let (client, server) = (&mesh.client, &mesh.server);
    mesh.agent.release(client);
    mesh.agent.release(server);
    assert!(
        [client, server]
            .map(traces)
            .iter()
            .all(|left| left.listeners.is_empty() && left.routes.concat().is_empty())
    );
}

fn a_stopped_agent_is_succeeded(options: Options) {
    let mut mesh = Mesh::hbone(options);
    works_over_hbone(&mesh);
    let status = mesh.agent.stop();
    assert!(status.success(), "{status}\n{}", mesh.agent.log());
    mesh.agent.restart(&mesh.node);
    works_over_hbone(&mesh);
}

fn enrolling_is_idempotent(options: Options) {
    let mesh = Mesh::hbone(options);
    works_over_hbone(&mesh);
    let (descriptors, pinned) = (mesh.agent.descriptors(), pins(&mesh.agent));
    for _ in 0..10 {
        mesh.agent.enrol(&mesh.client);
        mesh.agent.enrol(&mesh.server);
    }
    works_over_hbone(&mesh);
    assert_eq!(pins(&mesh.agent), pinned);
    holds_no_more_than(&mesh.agent, &descriptors);
}

/// Somebody removes what capture rests on, one thing after the other.
fn what_is_removed_is_put_back(options: Options) {
    let mesh = Mesh::hbone(options);
    works_over_hbone(&mesh);
    let pod = &mesh.client;
    let (whole, pinned) = (traces(pod), pins(&mesh.agent));
    let remove_hooks = || {
        // Links go with their pins, filters with their qdisc.
        for path in paths(&mesh.agent)
            .iter()
            .filter(|path| path.to_string_lossy().contains("/link_"))
        {
            fs::remove_file(path).unwrap();
        }
        let mut tc = std::process::Command::new("tc");
        let _ = tc
            .args(["-n", pod.ns.name(), "qdisc", "del", "dev", "eth0", "clsact"])
            .output();
    };
    let run = |commands: &[&str]| {
        for command in commands {
            pod.ns.ip_output(command);
        }
    };
    let sabotages: [(&str, &dyn Fn()); 4] = [
        ("the rules", &|| {
            run(&["-4 rule del priority 32763", "-6 rule del priority 32763"])
        }),
        ("the routes", &|| {
            run(&["-4 route flush table 1337", "-6 route flush table 1337"])
        }),
        ("a sysctl", &|| {
            pod.ns.set_sysctl("net/ipv4/tcp_fwmark_accept", "0").unwrap()
        }),
        ("the hooks", &remove_hooks),
    ];
    for (what, sabotage) in sabotages {
        sabotage();
        wait::until(&format!("{what} to be put back"), || {
            (traces(pod) == whole && pins(&mesh.agent) == pinned).then_some(())
        });
        works_over_hbone(&mesh);
    }
}

fn a_released_pod_talks_plainly() {
    let mesh = Mesh::hbone(Options::default());
    works_over_hbone(&mesh);
    mesh.agent.release(&mesh.client);
    mesh.agent.release(&mesh.server);
    let _app = App::start(&mesh.server.ns, (Family::V4.any(), PORT).into(), app::who);
    let capture = mesh.node.capture(&mesh.server);
    let seen = app::ask_who(&mesh.client.ns, mesh.server.addr(Family::V4, PORT)).unwrap();
    assert_eq!(seen, mesh.client.v4.to_string());
    assert_eq!(opened_ports(&capture.stop()), [PORT]);
}

/// Traffic to an address that the pod gets after its enrolment goes through the proxy, as to its others.
fn an_address_that_comes_later_is_captured() {
    // Where the device is told, the programs capture it even before the agent has seen it.
    let mesh = Mesh::hbone(Options::old_kernel());
    let later = "10.77.0.200";
    mesh.server
        .ns
        .ip(&[format!("addr add {later}/16 dev eth0")])
        .unwrap();
    let _app = App::start(&mesh.server.ns, (Family::V4.any(), PORT).into(), app::who);
    let target = format!("{later}:{PORT}").parse().unwrap();
    wait::until("the new address to be captured", || {
        let seen = app::ask_who(&mesh.stranger.ns, target).ok();
        assert!(seen.is_none_or(|seen| seen == mesh.stranger.v4.to_string()));
        let inbound = |record: &BTreeMap<String, String>| {
            record.get("dst.addr").is_some_and(|dst| dst.starts_with(later))
        };
        mesh.agent.access_log().iter().any(inbound).then_some(())
    });
}

/// The namespace and addresses of a pod go to a new pod of another UID before the old one's delete has come.
fn a_late_delete_spares_the_new_owner() {
    let mut mesh = Mesh::hbone(Options::default());
    let old = redirector_tests::cni::event(&mesh.client).to_string();
    mesh.agent.release(&mesh.client);
    mesh.client.uid.push_str("-new");
    mesh.agent.enrol(&mesh.client);
    let answer = mesh.agent.post("/cmddel", &old);
    assert_eq!(answer.status, 200, "{}", answer.body);
    works_over_hbone(&mesh);
}

/// The pod's new record cannot be written: there is a directory in its place.
fn a_change_that_fails_leaves_the_pod_as_it_was() {
    let mesh = Mesh::hbone(Options::default());
    works_over_hbone(&mesh);
    let record = mesh
        .agent
        .state_dir()
        .join(format!("pods/{}.json", mesh.client.uid));
    fs::remove_file(&record).unwrap();
    fs::create_dir(&record).unwrap();
    let mut event = redirector_tests::cni::event(&mesh.client);
    event["ServiceAccount"] = "another".into();
    let answer = mesh.agent.post("/cmdadd", &event.to_string());
    assert_eq!(answer.status, 500, "{}", answer.body);
    works_over_hbone(&mesh);
    fs::remove_dir(&record).unwrap();
    mesh.agent.enrol(&mesh.client);
    works_over_hbone(&mesh);
}

/// It fails closed, whatever number of agents comes and goes, until it is added again.
fn a_pod_whose_record_is_damaged_stays_captured() {
    let mut mesh = Mesh::hbone(Options::default());
    works_over_hbone(&mesh);
    let _app = App::start(&mesh.node.outside.ns, (Family::V4.any(), PORT).into(), app::who);
    let outside = mesh.node.outside.addr(Family::V4, PORT);
    app::ask_who(&mesh.client.ns, outside).unwrap();
    let pinned = pins(&mesh.agent);
    mesh.agent.kill();
    let record = mesh
        .agent
        .state_dir()
        .join(format!("pods/{}.json", mesh.client.uid));
    fs::write(&record, &fs::read(&record).unwrap()[..20]).unwrap();
    for _ in 0..2 {
        mesh.agent.restart(&mesh.node);
        // The other pod has a record, and is served.
        wait::until("the other pod to be captured", || {
            (mesh.agent.pods().len() == 1).then_some(())
        });
        assert_eq!(pins(&mesh.agent), pinned);
        let refused = app::ask_who(&mesh.client.ns, outside).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused, "{refused}");
        mesh.agent.kill();
    }
    assert!(mesh.agent.log().contains("the record of a pod cannot be used"));
    mesh.agent.restart(&mesh.node);
    mesh.agent.enrol(&mesh.client);
    works_over_hbone(&mesh);
    app::ask_who(&mesh.client.ns, outside).unwrap();
}
