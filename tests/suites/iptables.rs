//! Iptables mode beyond the paths that it shares with eBPF (`e2e`): what it writes, leaves alone, puts back and removes, with
//! the programs for nftables and with those for the tables of before.

#[path = "iptables/faults.rs"]
mod faults;

use std::{
    fs,
    io::{Read, Write},
    net::TcpStream,
    os::fd::AsFd,
    path::Path,
    process::ExitCode,
    sync::Arc,
};

use redirector::{
    redirect::{
        Listeners, PodNetwork, Redirector, Serving,
        iptables::{Backend, Config, Iptables},
        rules::{Lists, Networks, Ports, Rules},
    },
    sys::netns::Netns,
};
use redirector_tests::{
    agent::Options,
    app::{self, App},
    capture::opened_ports,
    iptables::{Variant, routing},
    mesh::{Mesh, PORT, refused},
    netns::{Namespace, unique_prefix},
    node::{Family, Node, Pod},
    process::command,
    suite::{Case, Needs, case, main as suite},
    wait,
    workloads::Workloads,
};

const CYCLES: usize = 20;

fn main() -> ExitCode {
    type Test = fn(Variant);
    let tests: &[(&str, Test)] = &[
        ("rules_in_place_are_left_alone", rules_in_place_are_left_alone),
        ("what_was_changed_is_put_back", what_was_changed_is_put_back),
        ("others_rules_stay", others_rules_stay),
        (
            "what_an_earlier_agent_left_is_removed",
            what_an_earlier_agent_left_is_removed,
        ),
        ("rules_move_to_the_other_tables", rules_move_to_the_other_tables),
        (
            "a_draining_pod_captures_nothing_new",
            a_draining_pod_captures_nothing_new,
        ),
        ("cycles_leave_nothing", cycles_leave_nothing),
        ("pods_that_vanish_leave_nothing", pods_that_vanish_leave_nothing),
        (
            "the_nodes_own_connections_keep_their_source",
            the_nodes_own_connections_keep_their_source,
        ),
        ("lo_without_ipv6_gets_it", lo_without_ipv6_gets_it),
        (
            "pods_move_to_ebpf_and_back_and_are_captured_once",
            pods_move_to_ebpf_and_back_and_are_captured_once,
        ),
        (
            "a_change_of_rules_touches_no_open_connection",
            a_change_of_rules_touches_no_open_connection,
        ),
        (
            "lists_of_ports_and_networks_hold",
            lists_of_ports_and_networks_hold,
        ),
    ];
    let mut cases: Vec<Case> = Vec::new();
    for variant in Variant::BOTH {
        for (name, test) in tests {
            cases.push(case(format!("{name}_{}", variant.name()), move || test(variant)));
        }
    }
    for variant in Variant::BOTH {
        cases.push(case(
            format!("golden_rules_are_printed_as_they_are_written_{}", variant.name()),
            move || golden_rules_are_printed_as_they_are_written(variant),
        ));
    }
    cases.push(case(
        "an_enrolment_that_fails_is_undone",
        an_enrolment_that_fails_is_undone,
    ));
    cases.extend(faults::cases());
    suite(Needs::Agent, 2, cases)
}

fn config(variant: Variant, directory: &Path) -> Config {
    Config {
        backend: match variant {
            Variant::Nft => Backend::Nft,
            Variant::Legacy => Backend::Legacy,
        },
        state_dir: directory.join("state"),
    }
}

fn talk(mesh: &Mesh) {
    for family in Family::BOTH {
        let _app = App::start(&mesh.server.ns, (family.any(), PORT).into(), app::who);
        let capture = mesh.node.capture(&mesh.server);
        let seen = app::ask_who(&mesh.client.ns, mesh.server.addr(family, PORT)).unwrap();
        assert_eq!(seen, mesh.client.ip(family).to_string());
        assert_eq!(opened_ports(&capture.stop()), [15008]);
    }
}

fn started(options: Options) -> Mesh {
    Mesh::started(options, |client, server| Workloads::hbone([client, server]))
}

/// Rules that are written again have counted nothing.
fn rules_in_place_are_left_alone(variant: Variant) {
    let mut mesh = Mesh::hbone(variant.options());
    talk(&mesh);
    let counted = |family| -> u64 {
        let saved = variant.run(&mesh.client.ns, family, "-save", "-c");
        let rule = saved.lines().find(|line| line.contains("--to-ports 15001"));
        let packets = rule.and_then(|line| line.strip_prefix('[')?.split(':').next());
        packets.unwrap_or_else(|| panic!("{saved}")).parse().unwrap()
    };
    let before = Family::BOTH.map(counted);
    assert!(before.iter().all(|packets| *packets > 0), "{before:?}");
    mesh.agent.kill();
    mesh.agent.restart(&mesh.node);
    mesh.agent.enrol(&mesh.client);
    let counted = Family::BOTH.map(|family| {
        let saved = variant.run(&mesh.client.ns, family, "-save", "-c");
        saved
            .lines()
            .any(|line| line.contains("--to-ports 15001") && !line.starts_with("[0:"))
    });
    assert_eq!(counted, [true; 2]);
    talk(&mesh);
}

fn what_was_changed_is_put_back(variant: Variant) {
    let mut mesh = Mesh::hbone(variant.options());
    let (whole, routes) = (variant.ours(&mesh.client.ns), routing(&mesh.client));
    let changes = [
        "-t nat -F ISTIO_OUTPUT",
        "-t nat -D OUTPUT -j ISTIO_OUTPUT",
        "-t mangle -A PREROUTING -j ISTIO_PRERT",
        "-t nat -I ISTIO_PRERT -p tcp --dport 80 -j ACCEPT",
    ];
    for change in changes {
        mesh.agent.kill();
        for family in Family::BOTH {
            variant.run(&mesh.client.ns, family, "", change);
        }
        mesh.client
            .ns
            .ip(&["rule del priority 32764", "route flush table 100"])
            .unwrap();
        assert_ne!(variant.ours(&mesh.client.ns), whole, "{change}");
        mesh.agent.restart(&mesh.node);
        assert_eq!(variant.ours(&mesh.client.ns), whole, "{change}");
        assert_eq!(routing(&mesh.client), routes);
    }
    talk(&mesh);
}

fn others_rules_stay(variant: Variant) {
    let mesh = started(variant.options());
    let ns = &mesh.client.ns;
    for family in Family::BOTH {
        for rule in [
            "-t nat -N OTHER",
            "-t nat -A OTHER -p tcp --dport 7 -j RETURN",
            "-t nat -A OUTPUT -j OTHER",
            "-t mangle -A PREROUTING -p udp --dport 7 -j ACCEPT",
            "-t raw -A OUTPUT -p udp --dport 7 -j NOTRACK",
            "-t filter -A INPUT -p tcp --dport 7 -j DROP",
        ] {
            variant.run(ns, family, "", rule);
        }
    }
    ns.ip(&[
        "rule add fwmark 0x111 lookup 99 priority 32764",
        "route add local 192.0.2.99 dev lo table 100",
    ])
    .unwrap();
    let (saved, routes) = (variant.saved(ns), routing(&mesh.client));
    mesh.agent.enrol(&mesh.client);
    mesh.agent.enrol(&mesh.server);
    let during = variant.saved(ns);
    for line in saved.lines() {
        assert!(
            during.lines().any(|there| there == line),
            "{line} is gone:\n{during}"
        );
    }
    talk(&mesh);
    mesh.agent.release(&mesh.client);
    let tables = |text: &str| -> Vec<String> {
        let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    assert_eq!(tables(&variant.saved(ns)), tables(&saved));
    assert_eq!(routing(&mesh.client), routes);
}

fn what_an_earlier_agent_left_is_removed(variant: Variant) {
    let mut mesh = started(variant.options());
    let routes = routing(&mesh.client);
    mesh.agent.enrol(&mesh.client);
    mesh.agent.kill();
    assert!(!variant.ours(&mesh.client.ns).is_empty());
    // Nobody tells the next agent of the pod, and its rules are there.
    let record = mesh
        .agent
        .state_dir()
        .join("pods")
        .join(format!("{}.json", mesh.client.uid));
    fs::remove_file(record).unwrap();
    mesh.agent.restart(&mesh.node);
    wait::until("the rules to go", || {
        variant.ours(&mesh.client.ns).is_empty().then_some(())
    });
    wait::until("the routes to go", || {
        (routing(&mesh.client) == routes).then_some(())
    });
    let records = mesh.agent.state_dir().join("iptables");
    wait::until("the record to go", || {
        (fs::read_dir(&records).unwrap().count() == 0).then_some(())
    });
}

/// The agent comes back with the other programs, which don't see what the first ones wrote.
fn rules_move_to_the_other_tables(variant: Variant) {
    let other = Variant::BOTH.into_iter().find(|other| *other != variant).unwrap();
    let mut mesh = Mesh::hbone(variant.options());
    talk(&mesh);
    mesh.agent.kill();
    mesh.agent.restart_with(&mesh.node, other.options());
    assert_eq!(variant.ours(&mesh.client.ns), [""; 0]);
    assert!(!other.ours(&mesh.client.ns).is_empty());
    talk(&mesh);
}

fn a_draining_pod_captures_nothing_new(variant: Variant) {
    let mesh = Mesh::hbone(Options {
        arguments: vec!["--drain".into(), "20s".into()],
        ..variant.options()
    });
    let _apps =
        Family::BOTH.map(|family| App::start(&mesh.server.ns, (family.any(), PORT).into(), app::echo));
    let connect = |ns: &Namespace, family| app::connect(ns, mesh.server.addr(family, PORT)).unwrap();
    let echo = |stream: &mut TcpStream| {
        let mut buffer = [0; 4];
        stream.write_all(b"ping").unwrap();
        stream.read_exact(&mut buffer).unwrap();
        assert_eq!(&buffer, b"ping");
    };
    // Captured on the way out and in, and in only.
    let mut captured = Family::BOTH
        .map(|family| {
            [
                connect(&mesh.client.ns, family),
                connect(&mesh.stranger.ns, family),
            ]
        })
        .into_iter()
        .flatten()
        .collect::<Vec<_>>();
    captured.iter_mut().for_each(echo);
    std::thread::scope(|scope| {
        let releases = [&mesh.client, &mesh.server].map(|pod| scope.spawn(|| mesh.agent.release(pod)));
        let nat = |pod: &Pod| variant.ours(&pod.ns).iter().any(|line| line.contains("REDIRECT"));
        wait::until("the rules that redirect to go", || {
            (!nat(&mesh.client) && !nat(&mesh.server)).then_some(())
        });
        let capture = mesh.node.capture(&mesh.server);
        for family in Family::BOTH {
            echo(&mut connect(&mesh.client.ns, family));
        }
        assert_eq!(
            opened_ports(&capture.stop()),
            [PORT],
            "new connections are nobody's"
        );
        assert!(
            releases.iter().all(|release| !release.is_finished()),
            "the pods still drain"
        );
        captured.iter_mut().for_each(echo);
        captured.clear();
        for release in releases {
            release.join().unwrap();
        }
    });
    assert_eq!(variant.ours(&mesh.client.ns), [""; 0]);
}

fn cycles_leave_nothing(variant: Variant) {
    let mesh = started(variant.options());
    let pods = [&mesh.client, &mesh.server];
    let cycle = |talks: bool| {
        pods.iter().for_each(|pod| mesh.agent.enrol(pod));
        if talks {
            talk(&mesh);
        }
        pods.iter().for_each(|pod| mesh.agent.release(pod));
    };
    let untouched = pods.map(routing);
    cycle(true);
    let descriptors = mesh.agent.descriptors().len();
    (0..CYCLES).for_each(|number| cycle(number % 10 == 9));
    for pod in pods {
        assert_eq!(variant.ours(&pod.ns), [""; 0]);
    }
    assert_eq!(pods.map(routing), untouched);
    wait::until("the descriptors to be as before", || {
        (mesh.agent.descriptors().len() <= descriptors).then_some(())
    });
    let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", mesh.agent.pid())).unwrap();
    assert_eq!(children, "", "programs that were not waited for");
}

fn pods_that_vanish_leave_nothing(variant: Variant) {
    let mesh = started(variant.options());
    let records = mesh.agent.state_dir().join("iptables");
    for _ in 0..3 {
        let pod = mesh.node.pod("vanishing");
        mesh.agent.enrol(&pod);
        let event = redirector_tests::cni::event(&pod).to_string();
        assert_eq!(fs::read_dir(&records).unwrap().count(), 1);
        drop(pod);
        let answer = mesh.agent.post("/cmddel", &event);
        assert_eq!(answer.status, 200, "{}", answer.body);
        assert_eq!(fs::read_dir(&records).unwrap().count(), 0);
    }
}

/// A kubelet's probe is such a connection.
fn the_nodes_own_connections_keep_their_source(variant: Variant) {
    let mesh = Mesh::hbone(variant.options());
    for family in Family::BOTH {
        let _app = App::start(&mesh.server.ns, (family.any(), PORT).into(), app::who);
        let seen = app::ask_who(&mesh.node.host.ns, mesh.server.addr(family, PORT)).unwrap();
        assert_eq!(seen, mesh.node.host.ip(family).to_string());
    }
    wait::until("the access log", || {
        let through_the_proxy = mesh.agent.access_log().len() == 2;
        through_the_proxy.then_some(())
    });
}

fn lo_without_ipv6_gets_it(variant: Variant) {
    const SYSCTL: &str = "net/ipv6/conf/lo/disable_ipv6";
    let mesh = started(variant.options());
    mesh.client.ns.set_sysctl(SYSCTL, "1").unwrap();
    mesh.agent.enrol(&mesh.client);
    mesh.agent.enrol(&mesh.server);
    talk(&mesh);
    mesh.agent.release(&mesh.client);
    assert_eq!(mesh.client.ns.sysctl(SYSCTL).unwrap(), "1");
}

fn pods_move_to_ebpf_and_back_and_are_captured_once(variant: Variant) {
    const SYSCTL: &str = "net/ipv6/conf/lo/disable_ipv6";
    let mut mesh = started(variant.options());
    let gone = mesh.node.pod("gone");
    // Both backends want it, and each puts it back.
    mesh.client.ns.set_sysctl(SYSCTL, "1").unwrap();
    let untouched = routing(&mesh.client);
    for pod in [&mesh.client, &mesh.server, &gone] {
        mesh.agent.enrol(pod);
    }
    let rules = variant.ours(&mesh.client.ns);
    let routes = routing(&mesh.client);
    let is_ebpf = |pod: &Pod| {
        assert_eq!(variant.ours(&pod.ns), [""; 0]);
        let routing = routing(pod);
        assert!(
            routing.contains("1337") && !routing.contains("0x111"),
            "{routing}"
        );
    };
    let instances = |directory: &Path| {
        let builds = fs::read_dir(directory.join("builds"))
            .into_iter()
            .flatten()
            .flatten();
        builds
            .map(|build| fs::read_dir(build.path().join("pods")).unwrap().count())
            .sum::<usize>()
    };
    for _ in 0..2 {
        talk(&mesh);
        mesh.agent.kill();
        // One that nobody names any more.
        fs::remove_file(
            mesh.agent
                .state_dir()
                .join("pods")
                .join(format!("{}.json", gone.uid)),
        )
        .unwrap();
        mesh.agent.restart_with(&mesh.node, Options::default());
        is_ebpf(&mesh.client);
        is_ebpf(&mesh.server);
        let records = mesh.agent.state_dir().join("iptables");
        // The record is the last to go.
        wait::until("what is left of the other pod to go", || {
            let recorded = fs::read_dir(&records).unwrap().count();
            (variant.ours(&gone.ns).is_empty() && recorded == 0).then_some(())
        });
        talk(&mesh);
        mesh.agent.enrol(&gone);
        mesh.agent.kill();
        fs::remove_file(
            mesh.agent
                .state_dir()
                .join("pods")
                .join(format!("{}.json", gone.uid)),
        )
        .unwrap();
        mesh.agent.restart_with(&mesh.node, variant.options());
        assert_eq!(variant.ours(&mesh.client.ns), rules);
        assert_eq!(routing(&mesh.client), routes);
        wait::until("all programs to go", || {
            (instances(&mesh.agent.bpffs_dir()) == 0).then_some(())
        });
        wait::until("the other pod's routes to go", || {
            let left = gone.ns.ip_output("rule show");
            (!left.contains("1337")).then_some(())
        });
        mesh.agent.enrol(&gone);
    }
    talk(&mesh);
    mesh.agent.release(&mesh.client);
    assert_eq!(mesh.client.ns.sysctl(SYSCTL).unwrap(), "1");
    assert_eq!(routing(&mesh.client), untouched);
}

/// Without an agent, what is captured is refused and what is left alone passes.
fn lists_of_ports_and_networks_hold(variant: Variant) {
    let node = Node::new();
    let pod = node.pod("pod");
    let backend = Iptables::open(&config(variant, node.directory())).unwrap();
    let untouched = (variant.ours(&pod.ns), routing(&pod));
    let own: Vec<App> = Family::BOTH
        .into_iter()
        .flat_map(|family| {
            [&*pod, &node.outside].into_iter().flat_map(move |host| {
                [PORT, PORT + 1].map(|port| App::start(&host.ns, (family.any(), port).into(), app::who))
            })
        })
        .collect();
    let ports = |text: &str| text.parse::<Ports>().unwrap();
    let networks = |text: &str| text.parse::<Networks>().unwrap();
    // What the lists are, and which of PORT and PORT + 1 pass.
    let only_ports = |text| Lists {
        only_ports: Some(ports(text)),
        ..Lists::default()
    };
    let only_networks = |text| Lists {
        only_networks: Some(networks(text)),
        ..Lists::default()
    };
    let not_networks = |text| Lists {
        not_networks: networks(text),
        ..Lists::default()
    };
    let table = [
        (Lists::default(), [false, false]),
        (
            Lists {
                not_ports: ports("7,8080"),
                ..Lists::default()
            },
            [true, false],
        ),
        (only_ports("8000-8080"), [false, true]),
        (only_ports(""), [true, true]),
        (only_ports("*"), [false, false]),
        (not_networks("192.0.2.0/25,fd77:ffff::/64"), [true, true]),
        (not_networks("192.0.2.128/25,fd77:fffe::/64"), [false, false]),
        (not_networks("*"), [true, true]),
        (only_networks("192.0.2.2,fd77:ffff::2"), [false, false]),
        (only_networks("192.0.2.3,fd77:ffff::3"), [true, true]),
        (only_networks("*"), [false, false]),
        (only_networks(""), [true, true]),
        (
            Lists {
                only_ports: Some(ports("8080-8081")),
                not_ports: ports("8081"),
                only_networks: Some(networks("192.0.2.0/24,fd77::/16")),
                not_networks: networks("10.0.0.0/8"),
            },
            [false, true],
        ),
    ];
    let sets = table.into_iter().flat_map(|(lists, passes)| {
        let outbound = Rules {
            outbound: lists.clone(),
            ..Rules::default()
        };
        let inbound = Rules {
            inbound: lists,
            ..Rules::default()
        };
        [(outbound, passes, [false; 2]), (inbound, [false; 2], passes)]
    });
    let bypass = Rules {
        bypass_inbound: true,
        ..Rules::default()
    };
    let netns = Arc::new(Netns::open(&pod.ns.path()).unwrap());
    let any = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let listeners = Listeners {
        outbound: any.as_fd(),
        inbound: any.as_fd(),
        hbone: any.as_fd(),
        inherited: false,
    };
    let network = |rules| PodNetwork {
        uid: pod.uid.parse().unwrap(),
        netns: Arc::clone(&netns),
        addresses: Family::BOTH.map(|family| pod.ip(family)).into(),
        rules,
    };
    for (rules, outbound, inbound) in sets.chain([(bypass, [false; 2], [true; 2])]) {
        backend
            .attach(&network(rules.clone()), Serving::Own(listeners))
            .map(drop)
            .unwrap();
        for family in Family::BOTH {
            for (index, port) in [PORT, PORT + 1].into_iter().enumerate() {
                for (from, to, passes) in [
                    (&*pod, &node.outside, outbound[index]),
                    (&node.outside, &*pod, inbound[index]),
                ] {
                    let answer = app::ask_who(&from.ns, to.addr(family, port));
                    assert_eq!(
                        answer.is_ok(),
                        passes,
                        "{rules:?}: {} to {port}: {answer:?}",
                        from.ip(family)
                    );
                }
            }
        }
    }
    let last = network(Rules::default());
    backend.release(&last).unwrap();
    backend.detach(&last).unwrap();
    assert_eq!((variant.ours(&pod.ns), routing(&pod)), untouched);
    assert_eq!(backend.attached().unwrap(), []);
    drop(own);
}

fn a_change_of_rules_touches_no_open_connection(variant: Variant) {
    let mesh = Mesh::hbone(variant.options());
    let _apps =
        Family::BOTH.map(|family| App::start(&mesh.server.ns, (family.any(), PORT).into(), app::echo));
    let enrol = |excluded: &str| {
        let mut event = redirector_tests::cni::event(&mesh.client);
        event["Annotations"]["redirector.io/exclude-outbound-ports"] = excluded.into();
        let answer = mesh.agent.post("/cmdadd", &event.to_string());
        assert_eq!(answer.status, 200, "{}", answer.body);
    };
    let mut open: Vec<TcpStream> = Vec::new();
    // Captured, left alone, and captured again; each time all that are open go on.
    for (excluded, passes) in [("", false), ("8000-8100", true), ("", false)] {
        enrol(excluded);
        let capture = mesh.node.capture(&mesh.server);
        for family in Family::BOTH {
            open.push(app::connect(&mesh.client.ns, mesh.server.addr(family, PORT)).unwrap());
        }
        for stream in &mut open {
            let mut buffer = [0; 4];
            stream.write_all(b"ping").unwrap();
            stream.read_exact(&mut buffer).unwrap();
            assert_eq!(&buffer, b"ping");
        }
        assert_eq!(
            opened_ports(&capture.stop()).contains(&PORT),
            passes,
            "{excluded:?}"
        );
    }
}

/// IPv6's rules can't be written: IPv4's don't stay alone, and the pod is not half captured.
fn an_enrolment_that_fails_is_undone() {
    let variant = Variant::Nft;
    let mesh = started(variant.options());
    let nft = |arguments: &str| {
        let status = command(&mesh.client.ns, "nft").arg(arguments).status().unwrap();
        assert!(status.success(), "{arguments}");
    };
    // A table of the name that iptables has for its own, and not of its kind.
    nft("add table ip6 nat");
    nft("add chain ip6 nat OUTPUT { type route hook output priority 0; }");
    let routes = routing(&mesh.client);
    let answer = mesh.agent.cmdadd(&mesh.client);
    assert_eq!(answer.status, 500, "{}", answer.body);
    assert!(answer.body.contains("ip6tables-nft-restore"), "{}", answer.body);
    let v4 = variant.run(&mesh.client.ns, Family::V4, "-save", "");
    assert!(!v4.contains("ISTIO"), "{v4}");
    assert_eq!(routing(&mesh.client), routes);
    assert_eq!(
        fs::read_dir(mesh.agent.state_dir().join("iptables"))
            .unwrap()
            .count(),
        0
    );
    refused(&mesh.client.ns, mesh.server.addr(Family::V4, 9));
    nft("delete table ip6 nat");
    mesh.agent.enrol(&mesh.client);
    mesh.agent.enrol(&mesh.server);
    talk(&mesh);
}

/// What is in place is compared with what is wanted as text.
fn golden_rules_are_printed_as_they_are_written(variant: Variant) {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../redirector/src/redirect/iptables/golden");
    let mut files: Vec<_> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    assert!(files.len() >= 2, "{files:?}");
    let prefix = unique_prefix();
    for (number, file) in files.iter().enumerate() {
        let ns = Namespace::create(&format!("{prefix}-{number}")).unwrap();
        let family = match file.extension() {
            Some(extension) if extension == "v4" => Family::V4,
            _ => Family::V6,
        };
        // Twice: what is there is replaced.
        for _ in 0..2 {
            variant.run(&ns, family, "-restore", &format!("--noflush {}", file.display()));
        }
        let saved = variant.run(&ns, family, "-save", "");
        let golden = fs::read_to_string(file).unwrap();
        for rule in golden.lines().filter(|line| line.starts_with("-A ISTIO")) {
            // All ports are printed as no match at all.
            let rule = rule.replace(" --dport 0:65535", "");
            let times = |text: &str| text.lines().filter(|line| *line == rule).count();
            let expected = golden.replace(" --dport 0:65535", "");
            assert_eq!(
                times(&saved),
                times(&expected),
                "{}: {rule}\n{saved}",
                file.display()
            );
        }
        let rules = |text: &str| text.lines().filter(|line| line.starts_with("-A ISTIO")).count();
        assert_eq!(rules(&saved), rules(&golden), "{}\n{saved}", file.display());
    }
}
