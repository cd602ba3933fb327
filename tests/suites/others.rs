//! Living with others: programs and filters of somebody else in the same hooks, somebody who removes ours, and what is left
//! when we go: all of theirs, and nothing of ours.

#[path = "others/leaving.rs"]
mod leaving;

use std::{
    collections::BTreeSet,
    fs,
    path::PathBuf,
    process::{Command, ExitCode},
    time::Duration,
};

use aya::{
    maps::{Map, MapData, ProgramArray},
    programs::TcAttachType,
    util::KernelVersion,
};
use redirector_common::maps::{DECIDERS, Decider};
use redirector_tests::{
    agent::Options,
    app::{self, App},
    footprint::{Footprint, detach_link, netns_links, pinned_below},
    foreign::{Delivery, Foreign, Place},
    mesh::{Mesh, PORT},
    node::{Family, Pod},
    suite::{Case, Needs, case, main as suite},
    wait,
    workloads::Workloads,
};

/// What is removed must be noticed within 2 s; the rest is for a machine that does much else.
const REPAIRED: Duration = Duration::from_secs(5);
const KILLS: u32 = 100;

const DIRECTIONS: [TcAttachType; 2] = [TcAttachType::Ingress, TcAttachType::Egress];

type Test = fn(Options);

const EITHER_WAY: &[(&str, Test)] = &[
    (
        "foreign_programs_run_beside_ours",
        foreign_programs_run_beside_ours,
    ),
    (
        "a_foreign_filter_at_our_place_stays",
        a_foreign_filter_at_our_place_stays,
    ),
    (
        "what_goes_is_back_within_seconds",
        what_goes_is_back_within_seconds,
    ),
    (
        "a_hundred_kills_leave_one_of_each",
        a_hundred_kills_leave_one_of_each,
    ),
];

fn main() -> ExitCode {
    let mut cases: Vec<Case> = Vec::new();
    for (attach, force_clsact) in [("tcx", false), ("clsact", true)] {
        let options = Options {
            force_clsact,
            ..Options::default()
        };
        for (name, test) in EITHER_WAY {
            let options = options.clone();
            cases.push(case(format!("{name}_{attach}"), move || test(options)));
        }
        for (how, delivery) in [("peer", Delivery::Peer), ("neigh", Delivery::Neigh)] {
            for family in Family::BOTH {
                let options = options.clone();
                let name = format!(
                    "delivery_by_redirect_{how}_is_captured_{}_{attach}",
                    family.name()
                );
                cases.push(case(name, move || {
                    delivery_is_captured(options, delivery, family)
                }));
            }
        }
    }
    cases.push(case(
        "an_ingress_qdisc_is_no_place_for_ours",
        an_ingress_qdisc_is_no_place_for_ours,
    ));
    cases.extend(leaving::cases());
    suite(Needs::Agent, 2, cases)
}

/// Programs at the beginning and the end of each hook, of each kind that the kernel has.
fn foreigners(pod: &Pod) -> Vec<(String, Foreign)> {
    let mut places = vec![Place::Clsact(1), Place::Clsact(60_000), Place::Clsact(0)];
    if KernelVersion::current().is_ok_and(|version| version >= KernelVersion::new(6, 6, 0)) {
        places.extend([Place::TcxFirst, Place::TcxLast]);
    }
    let mut found = Vec::new();
    for direction in DIRECTIONS {
        for place in &places {
            found.push((
                format!("{place:?} {direction:?}"),
                Foreign::counting(&pod.ns, "eth0", direction, *place),
            ));
        }
    }
    found
}

/// All of them see the packets of the proxies, which pass ours in both directions.
fn all_run(mesh: &Mesh, foreigners: &[&[(String, Foreign)]]) {
    let packets = || -> Vec<u64> {
        let all = foreigners.iter().flat_map(|group| group.iter());
        all.map(|(_, foreign)| foreign.packets()).collect()
    };
    let before = packets();
    hbone_works(mesh);
    let names = foreigners
        .iter()
        .flat_map(|group| group.iter().map(|(name, _)| name));
    let idle: Vec<_> = names
        .zip(before.iter().zip(packets()))
        .filter(|(_, (before, after))| after <= before)
        .collect();
    assert!(idle.is_empty(), "these foreign programs did not run: {idle:?}");
}

/// Both families go through the proxies, and the application sees the client.
fn hbone_works(mesh: &Mesh) {
    for family in Family::BOTH {
        let _app = App::start(&mesh.server.ns, (family.any(), PORT).into(), app::who);
        let seen = app::ask_who(&mesh.client.ns, mesh.server.addr(family, PORT)).unwrap();
        assert_eq!(seen, mesh.client.ip(family).to_string());
        wait::until("the connection in the access log", || {
            recorded(mesh, "inbound", &mesh.client, family)
                .filter(|identity| *identity == mesh.client.identity())
        });
    }
}

/// The identity with which a connection to the server is recorded: empty for none. `None` when there is no record.
fn recorded(mesh: &Mesh, direction: &str, client: &Pod, family: Family) -> Option<String> {
    let source = client.ip(family).to_string();
    let log = mesh.agent.access_log();
    let found = log.iter().rev().find(|entry| {
        entry.get("direction").is_some_and(|found| found == direction)
            && entry
                .get("src.addr")
                .and_then(|addr| addr.parse::<std::net::SocketAddr>().ok())
                .is_some_and(|addr| addr.ip().to_string() == source)
    });
    found.map(|entry| entry.get("src.identity").cloned().unwrap_or_default())
}

/// What is ours in a hook: every program that is not foreign.
fn ours(pod: &Pod) -> Vec<String> {
    let footprint = Footprint::of(&pod.ns);
    let hooks = ["tc filter show dev eth0", "tcx eth0"].map(|prefix| {
        let programs = footprint.section(prefix).filter(|line| line.contains(" id "));
        programs
            .filter(|line| !line.contains("foreign"))
            .map(str::to_owned)
            .collect::<Vec<_>>()
    });
    hooks.concat()
}

/// One program in each direction, and one for new connections.
fn assert_one_of_each(pod: &Pod) {
    let found = ours(pod);
    for direction in ["ingress", "egress"] {
        let here = found.iter().filter(|line| line.contains(direction)).count();
        assert_eq!(here, 1, "{direction} of {}: {found:?}", pod.name);
    }
    assert_eq!(found.len(), 2, "{found:?}");
    assert_eq!(netns_links(&pod.ns).len(), 1, "links of SK_LOOKUP");
}

fn assert_unchanged(before: &Footprint, pod: &Pod, when: &str) {
    // A socket that is being closed may listen for a moment more.
    let mut differences = Vec::new();
    for _ in 0..50 {
        differences = before.differences(&Footprint::of(&pod.ns));
        if differences.is_empty() {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("{} {when}:\n{}", pod.name, differences.join("\n"));
}

fn foreign_programs_run_beside_ours(options: Options) {
    let mut mesh = Mesh::started(options, |client, server| Workloads::hbone([client, server]));
    let before = [foreigners(&mesh.client), foreigners(&mesh.server)];
    let untouched = [&mesh.client, &mesh.server].map(|pod| Footprint::of(&pod.ns));
    for pod in [&mesh.client, &mesh.server] {
        mesh.agent.enrol(pod);
    }
    all_run(&mesh, &[&before[0], &before[1]]);
    let after = [foreigners(&mesh.client), foreigners(&mesh.server)];
    let everybody = [&before[0][..], &before[1], &after[0], &after[1]];
    all_run(&mesh, &everybody);
    for pod in [&mesh.client, &mesh.server] {
        assert_one_of_each(pod);
    }

    remove_our_hooks(&mesh, &mesh.server);
    wait::within(REPAIRED, "our hooks to be back", || {
        (ours(&mesh.server).len() == 2 && netns_links(&mesh.server.ns).len() == 1).then_some(())
    });
    all_run(&mesh, &everybody);
    mesh.agent.kill();
    mesh.agent.restart(&mesh.node);
    all_run(&mesh, &everybody);
    for pod in [&mesh.client, &mesh.server] {
        assert_one_of_each(pod);
    }

    mesh.agent.release(&mesh.client);
    mesh.agent.stop();
    let (status, output) = mesh.agent.uninstall(&mesh.node, &[]);
    assert!(status.success(), "{output}");
    // Theirs are all there, and each still counts: with ours gone, plain packets.
    let counts: Vec<u64> = everybody
        .iter()
        .flat_map(|group| group.iter().map(|(_, foreign)| foreign.packets()))
        .collect();
    let _app = App::start(&mesh.server.ns, (Family::V4.any(), PORT).into(), app::who);
    app::ask_who(&mesh.client.ns, mesh.server.addr(Family::V4, PORT)).unwrap();
    let all = everybody.iter().flat_map(|group| group.iter());
    for ((name, foreign), before) in all.zip(counts) {
        assert!(foreign.packets() > before, "{name} no longer runs");
    }
    drop((after, _app));
    for (pod, before) in [&mesh.client, &mesh.server].into_iter().zip(&untouched) {
        assert_unchanged(before, pod, "is not as before the enrolment");
    }
}

/// Somebody has the priority and the handle that ours would have.
fn a_foreign_filter_at_our_place_stays(options: Options) {
    let mut mesh = Mesh::started(options, |client, server| Workloads::hbone([client, server]));
    let other_kind = [
        "qdisc add dev eth0 clsact",
        // Of another kind, and matching no packet.
        "filter add dev eth0 ingress prio 1337 protocol all u32 match u32 0xdeadbeef 0xffffffff at 0",
        "filter add dev eth0 egress prio 1337 protocol all u32 match u32 0xdeadbeef 0xffffffff at 0",
    ];
    for command in other_kind {
        tc(&mesh.client, command);
    }
    let same_kind: Vec<_> = DIRECTIONS
        .into_iter()
        .map(|direction| {
            (
                format!("{direction:?}"),
                Foreign::counting(&mesh.server.ns, "eth0", direction, Place::Clsact(1337)),
            )
        })
        .collect();
    let pods = [&mesh.client, &mesh.server];
    let untouched = pods.map(|pod| Footprint::of(&pod.ns));
    for pod in pods {
        mesh.agent.enrol(pod);
    }
    all_run(&mesh, &[&same_kind]);
    for pod in [&mesh.client, &mesh.server] {
        assert_one_of_each(pod);
        remove_our_hooks(&mesh, pod);
    }
    for pod in [&mesh.client, &mesh.server] {
        wait::within(REPAIRED, "our hooks to be back", || {
            (ours(pod).len() == 2 && netns_links(&pod.ns).len() == 1).then_some(())
        });
    }
    all_run(&mesh, &[&same_kind]);
    mesh.agent.kill();
    mesh.agent.restart(&mesh.node);
    for pod in [&mesh.client, &mesh.server] {
        assert_one_of_each(pod);
        mesh.agent.release(pod);
    }
    for (pod, before) in [&mesh.client, &mesh.server].into_iter().zip(&untouched) {
        assert_unchanged(before, pod, "is not as before the enrolment");
    }
}

/// A qdisc of the older kind takes a filter for what is sent, and shows it what arrives.
fn an_ingress_qdisc_is_no_place_for_ours() {
    let options = Options {
        force_clsact: true,
        ..Options::default()
    };
    let mesh = Mesh::started(options, |client, server| Workloads::hbone([client, server]));
    mesh.agent.enrol(&mesh.server);
    tc(&mesh.client, "qdisc add dev eth0 ingress");
    let before = Footprint::of(&mesh.client.ns);
    let answer = mesh.agent.cmdadd(&mesh.client);
    assert_eq!(answer.status, 500, "{}", answer.body);
    assert!(answer.body.contains("tc qdisc del dev"), "{}", answer.body);
    assert_unchanged(&before, &mesh.client, "is not as before it was refused");
    tc(&mesh.client, "qdisc del dev eth0 ingress");
    mesh.agent.enrol(&mesh.client);
    hbone_works(&mesh);
}

fn delivery_is_captured(options: Options, delivery: Delivery, family: Family) {
    let mesh = Mesh::hbone(options);
    let foreign = Foreign::delivering(
        &mesh.node,
        delivery,
        &[&mesh.client, &mesh.server, &mesh.stranger],
    );
    let _app = App::start(&mesh.server.ns, (family.any(), PORT).into(), app::who);
    for (client, identity) in [
        (&mesh.client, mesh.client.identity()),
        (&mesh.stranger, String::new()),
    ] {
        let before = foreign.packets();
        let seen = app::ask_who(&client.ns, mesh.server.addr(family, PORT)).unwrap();
        assert_eq!(seen, client.ip(family).to_string());
        // The handshake, request, answer and end of one connection, each way.
        assert!(
            foreign.packets() >= before + 6,
            "the foreign program did not deliver"
        );
        let recorded = wait::until("the connection in the access log", || {
            recorded(&mesh, "inbound", client, family)
        });
        assert_eq!(recorded, identity, "{}", client.name);
    }
    // And the other way: what the pod opens itself.
    let _theirs = App::start(&mesh.stranger.ns, (family.any(), PORT).into(), app::who);
    let seen = app::ask_who(&mesh.client.ns, mesh.stranger.addr(family, PORT)).unwrap();
    assert_eq!(seen, mesh.client.ip(family).to_string());
    let to = mesh.stranger.addr(family, PORT).to_string();
    wait::until("the connection in the access log", || {
        let log = mesh.agent.access_log();
        log.into_iter().find(|entry| {
            entry.get("direction").is_some_and(|found| found == "outbound")
                && entry.get("dst.addr") == Some(&to)
        })
    });
}

fn tc(pod: &Pod, command: &str) {
    let output = Command::new("tc")
        .args(["-n", pod.ns.name()])
        .args(command.split_whitespace())
        .output()
        .expect("tc comes with ip");
    assert!(
        output.status.success(),
        "tc {command}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Takes our programs from the pod's hooks, as somebody would who thinks they are his.
fn remove_our_hooks(mesh: &Mesh, pod: &Pod) {
    for hook in ["ingress", "egress"] {
        let footprint = Footprint::of(&pod.ns);
        let filters: Vec<_> = footprint
            .section(&format!("tc filter show dev eth0 {hook}"))
            .filter(|line| line.contains(" id ") && !line.contains("foreign"))
            .map(|line| {
                let word = |after: &str| {
                    let mut words = line.split_whitespace().skip_while(|word| *word != after);
                    words.nth(1).expect("tc prints it").to_owned()
                };
                (word("pref"), word("handle"))
            })
            .collect();
        for (priority, handle) in filters {
            tc(
                pod,
                &format!("filter del dev eth0 {hook} prio {priority} handle {handle} bpf"),
            );
        }
    }
    our_links(mesh, pod).into_iter().for_each(detach_link);
}

/// Where what is the pod's own is pinned.
fn pod_pins(mesh: &Mesh, pod: &Pod) -> PathBuf {
    let own =
        |path: &PathBuf| path.is_dir() && path.display().to_string().ends_with(&format!("-{}", pod.uid));
    let found = pins(mesh).into_iter().find(own);
    found.unwrap_or_else(|| panic!("nothing is pinned for {}", pod.name))
}

/// The links of a pod.
fn our_links(mesh: &Mesh, pod: &Pod) -> Vec<u64> {
    let objects = pinned_below(&pod_pins(mesh, pod));
    let links = objects.into_iter().filter(|(kind, _)| *kind == "link");
    links.map(|(_, id)| id).collect()
}

/// Takes the programs out of the array that all pods' programs go on by.
fn empty_deciders(mesh: &Mesh) {
    let array = pins(mesh).into_iter().find(|path| path.ends_with(DECIDERS));
    let map = MapData::from_pin(array.expect("it is pinned")).unwrap();
    let mut array = ProgramArray::try_from(Map::ProgramArray(map)).unwrap();
    for decider in [Decider::Egress, Decider::Ingress] {
        array.clear_index(&(decider as u32)).unwrap();
    }
}

type Sabotage<'a> = Box<dyn Fn() + 'a>;

/// One thing after the other that capture rests on is removed or changed.
fn what_goes_is_back_within_seconds(options: Options) {
    let clsact = options.force_clsact;
    let mesh = Mesh::hbone(options);
    hbone_works(&mesh);
    let pod = &mesh.client;
    let ip = |command: &str| {
        pod.ns.ip_output(command);
    };
    let sysctl = |path: &str, value: &str| pod.ns.set_sysctl(path, value).unwrap();
    let unpin = || fs::remove_dir_all(pod_pins(&mesh, pod)).unwrap();
    let map_pins = || {
        for path in pins(&mesh) {
            if path.parent().is_some_and(|directory| directory.ends_with("maps")) {
                fs::remove_file(path).unwrap();
            }
        }
    };
    let mut sabotages: Vec<(&str, Sabotage<'_>)> = vec![
        ("the shared programs", Box::new(|| empty_deciders(&mesh))),
        ("the hooks", Box::new(|| remove_our_hooks(&mesh, pod))),
        (
            "the lookup",
            Box::new(|| netns_links(&pod.ns).into_iter().for_each(detach_link)),
        ),
        ("the pins", Box::new(unpin)),
        ("the pins of the maps", Box::new(map_pins)),
        (
            "the pins of the maps, and the pod's",
            Box::new(move || {
                map_pins();
                unpin();
            }),
        ),
        ("a rule", Box::new(move || ip("-4 rule del priority 32763"))),
        (
            "the IPv6 rules",
            Box::new(move || {
                ip("-6 rule del priority 32763");
                ip("-6 rule del priority 32763");
            }),
        ),
        ("the route", Box::new(move || ip("-4 route flush table 1337"))),
        (
            "the IPv6 route",
            Box::new(move || ip("-6 route flush table 1337")),
        ),
        (
            "the kind of a route",
            Box::new(move || {
                ip("-4 route flush table 1337");
                ip("-4 route add unreachable default table 1337");
            }),
        ),
    ];
    for (path, value) in [
        ("net/ipv4/tcp_fwmark_accept", "0"),
        ("net/ipv4/fwmark_reflect", "0"),
        ("net/ipv6/fwmark_reflect", "0"),
        ("net/ipv4/conf/lo/accept_local", "0"),
        ("net/ipv6/conf/lo/disable_ipv6", "1"),
    ] {
        sabotages.push((path, Box::new(move || sysctl(path, value))));
    }
    if clsact {
        sabotages.push(("the qdisc", Box::new(|| tc(pod, "qdisc del dev eth0 clsact"))));
    }
    // Two routes of one table are ours no longer; what somebody added stays when ours is back.
    let whole = state(&mesh, pod);
    for (what, sabotage) in sabotages {
        sabotage();
        wait::within(REPAIRED, &format!("{what} to be put back"), || {
            let now = state(&mesh, pod);
            whole.is_subset(&now).then_some(())
        });
        if what == "the kind of a route" {
            ip("-4 route del unreachable default table 1337");
        }
        if what.contains("disable_ipv6") {
            // ::1 went with IPv6.
            assert!(pod.ns.ip_output("-6 addr show lo").contains("::1"));
        }
        hbone_works(&mesh);
        assert_one_of_each(pod);
    }
}

/// What capture rests on, without the numbers that another instance has others of.
fn state(mesh: &Mesh, pod: &Pod) -> BTreeSet<String> {
    let footprint = Footprint::of(&pod.ns);
    let mut found = BTreeSet::new();
    for prefix in ["ip ", "sysctls", "listeners"] {
        found.extend(footprint.section(prefix).map(str::to_owned));
    }
    for prefix in ["tc filter", "tcx"] {
        let programs = footprint.section(prefix).filter(|line| line.contains(" id "));
        found.extend(programs.filter_map(|line| Some(line.split_once(" id ")?.0.to_owned())));
    }
    found.insert(format!("{} SK_LOOKUP links", netns_links(&pod.ns).len()));
    // Another instance has another slot.
    let own = pins(mesh)
        .into_iter()
        .filter(|path| path.display().to_string().contains(&pod.uid));
    found.extend(own.filter_map(|path| Some(path.display().to_string().split_once(&pod.uid)?.1.to_owned())));
    found
}

/// All files below the directory of pins.
fn pins(mesh: &Mesh) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    let mut directories = vec![mesh.agent.bpffs_dir()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            if entry.path().is_dir() {
                directories.push(entry.path());
            }
            found.insert(entry.path());
        }
    }
    found
}

fn a_hundred_kills_leave_one_of_each(options: Options) {
    let mut mesh = Mesh::hbone(options);
    hbone_works(&mesh);
    let pinned = pins(&mesh);
    mesh.agent.kill();
    for number in 0..KILLS {
        // At every moment of its start, and soon after.
        mesh.agent
            .restart_for(&mesh.node, Duration::from_millis(u64::from(number) * 4));
    }
    mesh.agent.restart(&mesh.node);
    hbone_works(&mesh);
    for pod in [&mesh.client, &mesh.server] {
        assert_one_of_each(pod);
    }
    assert_eq!(pins(&mesh), pinned);
}
