//! What an earlier agent left for a pod: made by another build, only half to be read, or of a namespace whose number has come back.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use aya::maps::{Array, Map, MapData};
use redirector_common::maps::{FACT_ADDED_CLSACT, FACT_CLSACT, FACTS, Facts, PODS};
use redirector_tests::{
    agent::{Agent, Options},
    footprint::pinned_below,
    mesh::Mesh,
    node::{Node, Pod},
    suite::{Case, case},
    wait,
    workloads::Workloads,
};

use super::{paths, pins, traces, works_over_hbone};

type Test = fn(Options);

const EITHER_WAY: &[(&str, Test)] = &[
    (
        "earlier_instances_of_another_build_are_replaced",
        of_another_build_is_replaced,
    ),
    (
        "earlier_instances_that_can_not_be_replaced_stay",
        what_can_not_be_replaced_stays,
    ),
    (
        "earlier_instances_are_replaced_whatever_the_routes_are",
        what_is_routed_elsewhere_gets_its_hooks,
    ),
    (
        "earlier_instances_that_could_not_be_removed_are",
        what_could_not_be_removed_is,
    ),
    (
        "earlier_instances_leave_a_number_that_came_back",
        a_number_that_comes_back_is_spared,
    ),
];

pub fn cases() -> Vec<Case> {
    let clsact = Options {
        force_clsact: true,
        ..Options::default()
    };
    let mut cases = Vec::new();
    for (attach, options) in [("tcx", Options::default()), ("clsact", clsact.clone())] {
        for (name, test) in EITHER_WAY {
            let options = options.clone();
            cases.push(case(format!("{name}_{attach}"), move || test(options)));
        }
    }
    let filters: [(&str, Test); 2] = [
        (
            "earlier_instances_get_their_filters_back",
            a_failed_replacement_gives_the_filters_back,
        ),
        (
            "earlier_instances_leave_no_filter_on_other_interfaces",
            filters_of_a_former_interface_go,
        ),
    ];
    for (name, test) in filters {
        let options = clsact.clone();
        cases.push(case(name, move || test(options)));
    }
    cases.push(case("grace_periods_are_put_back_after_a_kill", || {
        grace_periods_are_put_back(Options::default());
    }));
    cases
}

fn mesh_without_pods(options: Options) -> Mesh {
    Mesh::started(options, |client, server| Workloads::hbone([client, server]))
}

/// The one build that something is pinned for.
fn build(agent: &Agent) -> PathBuf {
    let mut builds = fs::read_dir(agent.bpffs_dir().join("builds")).unwrap();
    let only = builds.next().unwrap().unwrap().path();
    assert!(builds.next().is_none(), "one build");
    only
}

/// Makes the present build another one, whose maps this one can't read.
fn becomes_another_build(agent: &Agent, unreadable: &[&str]) -> PathBuf {
    let other = agent.bpffs_dir().join("builds/00000000000000aa");
    fs::rename(build(agent), &other).unwrap();
    for map in unreadable {
        fs::remove_file(other.join("maps").join(map)).unwrap();
    }
    other
}

/// The pods' directories of a build.
fn instances(build: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(build.join("pods")).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}

fn instance(build: &Path, pod: &Pod) -> PathBuf {
    let own = |path: &PathBuf| path.display().to_string().ends_with(&format!("-{}", pod.uid));
    let mut found = instances(build).into_iter().filter(own);
    found
        .next()
        .unwrap_or_else(|| panic!("nothing is pinned for {}", pod.name))
}

fn of_another_build_is_replaced(options: Options) {
    let mut mesh = mesh_without_pods(options);
    let untouched = [&mesh.client, &mesh.server].map(traces);
    for pod in [&mesh.client, &mesh.server] {
        mesh.agent.enrol(pod);
    }
    mesh.agent.kill();
    let other = becomes_another_build(&mesh.agent, &[PODS]);
    mesh.agent.restart(&mesh.node);
    works_over_hbone(&mesh);
    assert_eq!(instances(&other), [] as [PathBuf; 0]);
    for pod in [&mesh.client, &mesh.server] {
        mesh.agent.release(pod);
    }
    assert_eq!([&mesh.client, &mesh.server].map(traces), untouched);
}

fn grace_periods_are_put_back(options: Options) {
    let switch = || fs::read_to_string("/sys/kernel/rcu_expedited").unwrap();
    let mut mesh = mesh_without_pods(options);
    let mark = mesh.agent.bpffs_dir().join("shared/rcu_expedited");
    for pod in [&mesh.client, &mesh.server] {
        mesh.agent.enrol(pod);
    }
    assert!(!mark.exists(), "nobody attaches");
    mesh.agent.kill();
    // As an agent leaves it that is killed while it attaches; that the switch is on too is not for a test to do to its machine.
    fs::create_dir(&mark).unwrap();
    mesh.agent.restart(&mesh.node);
    assert!(!mark.exists(), "it is looked for at the start");
    works_over_hbone(&mesh);
    for pod in [&mesh.client, &mesh.server] {
        mesh.agent.release(pod);
    }
    wait::until("the switch to be off", || (switch().trim() == "0").then_some(()));
    assert!(!mark.exists(), "nobody removes");
}

fn what_can_not_be_replaced_stays(options: Options) {
    let mut mesh = mesh_without_pods(options);
    for pod in [&mesh.client, &mesh.server] {
        mesh.agent.enrol(pod);
    }
    works_over_hbone(&mesh);
    mesh.agent.kill();
    let other = becomes_another_build(&mesh.agent, &[PODS, FACTS]);
    // More addresses than a pod may have: no attachment succeeds.
    let many = |what: &str| {
        for number in 1..=64 {
            let command = format!("addr {what} 10.99.0.{number}/32 dev eth0");
            mesh.client.ns.ip_output(&command);
        }
    };
    many("add");
    let (mut left, pinned) = (traces(&mesh.client), instance(&other, &mesh.client));
    // The agent is not there, and what it waits with neither.
    left.listeners.clear();
    let programs = pinned_below(&pinned);
    mesh.agent.restart(&mesh.node);
    wait::until("an attempt to fail", || {
        let log = mesh.agent.log();
        log.lines()
            .any(|line| line.contains("at most 64 are supported") && line.contains(&mesh.client.uid))
            .then_some(())
    });
    let mut now = traces(&mesh.client);
    now.listeners.clear();
    assert_eq!(now, left);
    assert_eq!(pinned_below(&pinned), programs);
    many("del");
    works_over_hbone(&mesh);
    wait::until("the other build's instance to be gone", || {
        (!pinned.exists()).then_some(())
    });
}

/// A fault of the routes is told, and does not keep a captured pod from its hooks.
fn what_is_routed_elsewhere_gets_its_hooks(options: Options) {
    let mut mesh = mesh_without_pods(options);
    for pod in [&mesh.client, &mesh.server] {
        mesh.agent.enrol(pod);
    }
    mesh.agent.kill();
    let other = becomes_another_build(&mesh.agent, &[PODS]);
    let pinned = instance(&other, &mesh.client);
    // Somebody's rule that comes before ours.
    mesh.client.ns.ip_output("-4 rule add priority 100 lookup main");
    mesh.agent.restart(&mesh.node);
    wait::until("the other build's instance to be replaced", || {
        (!pinned.exists()).then_some(())
    });
    let replaced = pins(&mesh.agent).iter().any(|path| {
        let path = path.to_string_lossy();
        path.contains(&mesh.client.uid) && path.contains("/link_")
    });
    assert!(replaced, "{:?}", pins(&mesh.agent));
    let log = mesh.agent.log();
    assert!(log.contains("still go elsewhere"), "{log}");
    mesh.client.ns.ip_output("-4 rule del priority 100");
    works_over_hbone(&mesh);
}

/// A release fails half way, and the next agent ends it.
fn what_could_not_be_removed_is(options: Options) {
    let mut mesh = mesh_without_pods(options);
    let untouched = traces(&mesh.client);
    mesh.agent.enrol(&mesh.client);
    let pinned = instance(&build(&mesh.agent), &mesh.client);
    let in_the_way = pinned.join("x");
    fs::create_dir(&in_the_way).unwrap();
    let answer = mesh.agent.cmddel(&mesh.client);
    assert_eq!(answer.status, 500, "{}", answer.body);
    assert!(pinned.exists());
    mesh.agent.kill();
    fs::remove_dir(&in_the_way).unwrap();
    mesh.agent.restart(&mesh.node);
    wait::until("the rest to be removed", || (!pinned.exists()).then_some(()));
    assert_eq!(traces(&mesh.client), untouched);
}

/// Changes what is known of a pod.
fn change_facts(build: &Path, pod: &Pod, change: impl FnOnce(&mut Facts)) {
    let name = instance(build, pod);
    let name = name.file_name().unwrap().to_str().unwrap();
    let slot: u32 = name.split_once('-').unwrap().0.parse().unwrap();
    let map = MapData::from_pin(build.join("maps").join(FACTS)).unwrap();
    let mut map = Array::<_, [u8; size_of::<Facts>()]>::try_from(Map::Array(map)).unwrap();
    let mut facts: Facts = bytemuck::cast(map.get(&slot, 0).unwrap());
    change(&mut facts);
    map.set(slot, bytemuck::cast::<_, [u8; size_of::<Facts>()]>(facts), 0)
        .unwrap();
}

fn one_is_left(agent: &Agent) {
    wait::until("what was left to be removed", || {
        (instances(&build(agent)).len() == 1).then_some(())
    });
}

/// One pod goes while no agent is there, and what is known of it names the namespace of another, or of nobody of ours.
fn a_number_that_comes_back_is_spared(options: Options) {
    let node = Node::new();
    let mut agent = Agent::start(&node, &Workloads::default(), options);
    let (stays, stranger) = (node.pod("stays"), node.pod("stranger"));
    let untouched = traces(&stays);
    agent.enrol(&stays);
    let captured = traces(&stays);
    let strange = traces(&stranger);
    let ino = |pod: &Pod| pod.ns.netns().id().ino;
    let cookie = |pod: &Pod| pod.ns.netns().cookie().unwrap();
    let gone = |facts: &mut Facts, of: &Pod, netns_cookie: u64| {
        *facts = Facts {
            flags: FACT_CLSACT | FACT_ADDED_CLSACT,
            netns_ino: ino(of),
            netns_cookie,
            changed_sysctls: facts.changed_sysctls,
            ..*facts
        };
    };
    for of in [&stays, &stranger] {
        let Some(cookie) = cookie(of) else {
            continue; // A kernel before 5.14: nothing tells them apart.
        };
        let goes = node.pod("goes");
        agent.enrol(&goes);
        agent.kill();
        change_facts(&build(&agent), &goes, |facts| gone(facts, of, cookie ^ 1));
        drop(goes);
        agent.restart(&node);
        one_is_left(&agent);
        assert_eq!(
            (traces(&stays), traces(&stranger)),
            (captured.clone(), strange.clone())
        );
    }
    // Of the very same namespace: as before 5.14, or where two pods were said to have it. What was changed for the one that goes is
    // put back with the other.
    let goes = node.pod("goes");
    agent.enrol(&goes);
    agent.kill();
    let same = cookie(&stays).unwrap_or(0);
    change_facts(&build(&agent), &goes, |facts| gone(facts, &stays, same));
    change_facts(&build(&agent), &stays, |facts| facts.changed_sysctls = 0);
    drop(goes);
    agent.restart(&node);
    one_is_left(&agent);
    assert_eq!(traces(&stays), captured);
    agent.release(&stays);
    assert_eq!(traces(&stays), untouched);

    // Without an agent.
    if let Some(cookie) = cookie(&stranger) {
        let goes = node.pod("goes");
        agent.enrol(&goes);
        agent.kill();
        change_facts(&build(&agent), &goes, |facts| gone(facts, &stranger, cookie ^ 1));
        drop(goes);
        let (status, output) = agent.uninstall(&node, &[]);
        assert!(status.success(), "{output}");
        assert_eq!(traces(&stranger), strange);
    }
}

/// The programs of our filters on an interface, by id.
fn filters(pod: &Pod, interface: &str) -> Vec<u64> {
    let of = |hook: &str| {
        let tc = Command::new("tc")
            .args(["-n", pod.ns.name(), "filter", "show", "dev", interface, hook])
            .output()
            .expect("tc comes with ip");
        let text = String::from_utf8_lossy(&tc.stdout).into_owned();
        let ids = text.lines().filter(|line| line.contains("redir_"));
        let id = |line: &str| line.split(" id ").nth(1)?.split_whitespace().next()?.parse().ok();
        ids.filter_map(id).collect::<Vec<u64>>()
    };
    let mut found = [of("ingress"), of("egress")].concat();
    found.sort_unstable();
    found
}

/// The TC programs that are pinned for a pod.
fn tc_programs(build: &Path, pod: &Pod) -> Vec<u64> {
    let objects = pinned_below(&instance(build, pod)).into_iter();
    let mut found: Vec<_> = objects
        .filter(|(kind, _)| *kind == "prog")
        .map(|(_, id)| id)
        .collect();
    found.sort_unstable();
    found
}

/// A second interface comes on which filters can't be had: those of the first are the earlier instance's again.
fn a_failed_replacement_gives_the_filters_back(options: Options) {
    let mesh = Mesh::hbone(options);
    let build = build(&mesh.agent);
    let programs = tc_programs(&build, &mesh.client);
    assert_eq!(filters(&mesh.client, "eth0"), programs);
    let pinned = pins(&mesh.agent);
    let tc = |command: &str| {
        let mut tc = Command::new("tc");
        tc.args(["-n", mesh.client.ns.name()])
            .args(command.split_whitespace());
        assert!(tc.status().unwrap().success(), "tc {command}");
    };
    mesh.client.ns.ip_output("link add x1 type veth peer name x2");
    // Of a shared block, which takes no filters by way of an interface.
    tc("qdisc add dev x1 egress_block 22 clsact");
    mesh.client.ns.ip_output("addr add 10.99.0.1/24 dev x1");
    // The third begins when two have failed.
    wait::until("three attempts", || {
        (mesh.agent.log().matches("attaching anew").count() > 2).then_some(())
    });
    mesh.client.ns.ip_output("addr del 10.99.0.1/24 dev x1");
    works_over_hbone(&mesh);
    assert_eq!(pins(&mesh.agent), pinned);
    assert_eq!(tc_programs(&build, &mesh.client), programs);
    assert_eq!(filters(&mesh.client, "eth0"), programs);
}

fn filters_of_a_former_interface_go(options: Options) {
    let mut mesh = mesh_without_pods(options);
    for command in [
        "link add x1 type veth peer name x2",
        "addr add 10.99.0.1/24 dev x1",
        "link set x1 up",
    ] {
        mesh.client.ns.ip_output(command);
    }
    for pod in [&mesh.client, &mesh.server] {
        mesh.agent.enrol(pod);
    }
    assert_eq!(filters(&mesh.client, "x1").len(), 2);
    mesh.agent.kill();
    becomes_another_build(&mesh.agent, &[]);
    mesh.client.ns.ip_output("addr flush dev x1");
    mesh.agent.restart(&mesh.node);
    works_over_hbone(&mesh);
    let own = paths(&mesh.agent);
    assert!(
        own.iter()
            .any(|path| path.display().to_string().ends_with(&mesh.client.uid))
    );
    assert_eq!(filters(&mesh.client, "x1"), [] as [u64; 0]);
    assert_eq!(filters(&mesh.client, "eth0").len(), 2);
}
