//! What goes wrong: programs that fail, records that say nothing, namespaces that nobody finds, rules that somebody changes.

use std::{
    fs,
    os::{
        fd::{AsFd, AsRawFd},
        unix::fs::PermissionsExt,
    },
    path::PathBuf,
    process::Command,
    sync::Arc,
    time::Duration,
};

use redirector::{
    redirect::{self, Listeners, PodNetwork, Redirector, Serving, iptables::Iptables, rules::Rules},
    sys::netns::Netns,
};
use redirector_tests::{
    agent::{Agent, Options},
    app,
    iptables::{Variant, routing},
    mesh::{Mesh, PORT},
    node::{Family, Node},
    suite::{Case, case},
    wait,
    workloads::Workloads,
};

use super::{config, talk};

/// What the agent finds at most 2 s after it was changed, with time for a busy machine; without the kernel's word it takes 30 s.
const REPAIRED: Duration = Duration::from_secs(8);

pub fn cases() -> Vec<Case> {
    type Test = fn(Variant);
    let tests: &[(&str, Test)] = &[
        (
            "a_namespace_without_a_name_is_rid_of_its_rules",
            a_namespace_without_a_name_is_rid_of_its_rules,
        ),
        (
            "a_record_that_says_nothing_means_rules_of_either_kind",
            a_record_that_says_nothing_means_rules_of_either_kind,
        ),
        (
            "rules_are_put_back_whatever_the_routes_are",
            rules_are_put_back_whatever_the_routes_are,
        ),
        (
            "what_a_failed_clean_up_leaves_stays_on_record",
            what_a_failed_clean_up_leaves_stays_on_record,
        ),
        (
            "rules_for_ipv6_that_are_refused_end_the_agent",
            rules_for_ipv6_that_are_refused_end_the_agent,
        ),
        ("rules_are_back_within_seconds", rules_are_back_within_seconds),
        (
            "programs_are_started_for_changes_only",
            programs_are_started_for_changes_only,
        ),
    ];
    let of_variant = |variant: Variant| {
        tests.iter().map(move |(name, test)| {
            let test = *test;
            case(format!("{name}_{}", variant.name()), move || test(variant))
        })
    };
    Variant::BOTH.into_iter().flat_map(of_variant).collect()
}

/// As long as it lives, a file of `ip netns` is no namespace.
struct Hidden<'a> {
    path: PathBuf,
    netns: &'a Netns,
}

impl<'a> Hidden<'a> {
    fn new(path: PathBuf, netns: &'a Netns) -> Self {
        run(Command::new("umount").arg("--lazy").arg(&path));
        Self { path, netns }
    }
}

impl Drop for Hidden<'_> {
    fn drop(&mut self) {
        let fd = self.netns.as_fd().as_raw_fd();
        let open = format!("/proc/{}/fd/{fd}", std::process::id());
        run(Command::new("mount")
            .args(["--no-canonicalize", "--bind"])
            .arg(open)
            .arg(&self.path));
    }
}

fn run(command: &mut Command) {
    let status = command.status();
    if !status.as_ref().is_ok_and(std::process::ExitStatus::success) && !std::thread::panicking() {
        panic!("{command:?}: {status:?}");
    }
}

/// Its owner has it open, and neither a name nor a process leads there.
fn a_namespace_without_a_name_is_rid_of_its_rules(variant: Variant) {
    let node = Node::new();
    let pod = node.pod("pod");
    let config = config(variant, node.directory());
    let backend = Iptables::open(&config).unwrap();
    let untouched = (variant.ours(&pod.ns), routing(&pod));
    let netns = Arc::new(Netns::open(&pod.ns.path()).unwrap());
    let network = PodNetwork {
        uid: pod.uid.parse().unwrap(),
        netns: Arc::clone(&netns),
        addresses: Family::BOTH.map(|family| pod.ip(family)).into(),
        rules: Rules::default(),
    };
    let any = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let listeners = Listeners {
        outbound: any.as_fd(),
        inbound: any.as_fd(),
        hbone: any.as_fd(),
        inherited: false,
    };
    let attached = backend.attach(&network, Serving::Own(listeners)).unwrap();
    assert_eq!(attached.lacks, None);
    drop(backend);
    assert!(!variant.ours(&pod.ns).is_empty());

    let hidden = Hidden::new(pod.ns.path(), &netns);
    let leftovers = redirect::leftovers(&node.directory().join("bpf"), config);
    let rules = leftovers
        .iter()
        .find(|left| left.backend() == "iptables")
        .unwrap();
    rules.remove(&network.uid, Some(&netns)).unwrap();
    drop(hidden);
    assert_eq!((variant.ours(&pod.ns), routing(&pod)), untouched);
    assert_eq!(rules.pods().unwrap(), []);
}

/// Written in part, or by a later agent.
fn a_record_that_says_nothing_means_rules_of_either_kind(variant: Variant) {
    let other = Variant::BOTH.into_iter().find(|other| *other != variant).unwrap();
    let mut mesh = Mesh::hbone(variant.options());
    let records = mesh.agent.state_dir().join("iptables");
    let record = records.join(format!("{}.json", mesh.client.uid));
    for (text, options) in [("{", variant), (r#"{"netnsIno":"later"}"#, other)] {
        mesh.agent.kill();
        fs::write(&record, text).unwrap();
        mesh.agent.restart_with(&mesh.node, options.options());
        assert!(fs::read_to_string(&record).unwrap().contains(options.name()));
        talk(&mesh);
    }
    assert_eq!(variant.ours(&mesh.client.ns), [""; 0], "captured twice");

    // Nobody tells the next agent which namespace that pod had: its rules and its record stay.
    mesh.agent.kill();
    let whole = other.ours(&mesh.client.ns);
    fs::write(&record, "").unwrap();
    let pods = mesh.agent.state_dir().join("pods");
    fs::remove_file(pods.join(format!("{}.json", mesh.client.uid))).unwrap();
    mesh.agent.restart(&mesh.node);
    let says = || {
        mesh.agent
            .log()
            .contains(&format!("making sense of {}", record.display()))
    };
    wait::until("the agent to say so", || says().then_some(()));
    assert_eq!(other.ours(&mesh.client.ns), whole);
    assert_eq!(fs::read_to_string(&record).unwrap(), "");
    // Until its event comes.
    mesh.agent.enrol(&mesh.client);
    mesh.agent.release(&mesh.client);
    assert_eq!(other.ours(&mesh.client.ns), [""; 0]);
    assert!(!record.exists());
}

fn rules_are_put_back_whatever_the_routes_are(variant: Variant) {
    let mesh = Mesh::hbone(variant.options());
    let whole = variant.ours(&mesh.client.ns);
    // Somebody's rule takes the marked packets, and it is not ours to remove.
    mesh.client
        .ns
        .ip(&[
            "route add unreachable default table 99",
            "rule add fwmark 0x111/0xfff lookup 99 priority 100",
        ])
        .unwrap();
    for family in Family::BOTH {
        variant.run(&mesh.client.ns, family, "", "-t nat -F ISTIO_OUTPUT");
    }
    wait::until("the rules to be put back", || {
        (variant.ours(&mesh.client.ns) == whole).then_some(())
    });
    mesh.client.ns.ip(&["rule del priority 100"]).unwrap();
    wait::until("the pod to be captured in full", || {
        let pods = mesh.agent.pods();
        let whole = pods.iter().all(|pod| pod["error"].is_null());
        whole.then_some(())
    });
    talk(&mesh);
}

/// An agent whose programs do as usual, but for what the scripts say that come before them.
fn with_programs(node: &Node, variant: Variant, scripts: &[(&str, String)]) -> Options {
    let directory = node.directory().join("programs");
    fs::create_dir_all(&directory).unwrap();
    for (name, script) in scripts {
        let name = name.replace("tables", &format!("tables-{}", variant.name()));
        let path = directory.join(&name);
        fs::write(
            &path,
            format!("#!/bin/sh\n{script}\nexec /usr/sbin/{name} \"$@\"\n"),
        )
        .unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    Options {
        programs: Some(directory),
        ..variant.options()
    }
}

fn what_a_failed_clean_up_leaves_stays_on_record(variant: Variant) {
    let node = Node::new();
    let (client, server) = (node.pod("client"), node.pod("server"));
    let [fails, failed] = ["fails", "failed"].map(|name| node.directory().join(name));
    // IPv6's rules are refused once, and nothing can be read after that.
    let (fails_at, failed_at) = (fails.display(), failed.display());
    let scripts = [
        (
            "ip6tables-restore",
            format!("[ ! -e {fails_at} ] || {{ touch {failed_at}; exit 1; }}"),
        ),
        ("iptables-save", format!("[ ! -e {failed_at} ] || exit 1")),
    ];
    let options = with_programs(&node, variant, &scripts);
    let workloads = Workloads::hbone([&client, &server]);
    let mut agent = Agent::start(&node, &workloads, options);
    let records = || fs::read_dir(agent.state_dir().join("iptables")).unwrap().count();
    fs::write(&fails, "").unwrap();
    let answer = agent.cmdadd(&client);
    assert_eq!(answer.status, 500, "{}", answer.body);
    assert!(
        failed.exists() && answer.body.contains("ip6tables"),
        "{}",
        answer.body
    );
    assert!(!variant.ours(&client.ns).is_empty(), "the test leaves something");
    assert_eq!(records(), 1);
    // So the next agent knows.
    fs::remove_file(&fails).unwrap();
    fs::remove_file(&failed).unwrap();
    let records = agent.state_dir().join("iptables");
    agent.kill();
    agent.restart(&node);
    wait::until("the rules to go", || {
        variant.ours(&client.ns).is_empty().then_some(())
    });
    wait::until("the record to go", || {
        (fs::read_dir(&records).unwrap().count() == 0).then_some(())
    });
}

/// They may do so for now only, as without memory, and the agent would leave IPv6 alone for as long as it runs.
fn rules_for_ipv6_that_are_refused_end_the_agent(variant: Variant) {
    let node = Node::new();
    let pod = node.pod("pod");
    let options = with_programs(
        &node,
        variant,
        &[("ip6tables-restore", "echo no memory >&2; exit 1".into())],
    );
    let error = Agent::try_start(&node, &Workloads::hbone([&pod]), options).unwrap_err();
    let error = format!("{error:#}");
    assert!(
        error.contains("ip6tables") && error.contains("no memory"),
        "{error}"
    );
}

fn rules_are_back_within_seconds(variant: Variant) {
    let mesh = Mesh::hbone(variant.options());
    let ns = &mesh.client.ns;
    let whole = variant.ours(ns);
    for change in [
        "-t nat -F",
        "-t nat -D ISTIO_OUTPUT 1",
        "-t nat -I ISTIO_PRERT -p tcp --dport 80 -j ACCEPT",
        // As many rules, of the same length.
        "-t mangle -R ISTIO_PRERT 1 -m mark --mark 0x538/0xfff -j CONNMARK --set-xmark 0x111/0xfff",
        "-t mangle -D OUTPUT -j ISTIO_OUTPUT",
    ] {
        for family in Family::BOTH {
            variant.run(ns, family, "", change);
            assert_ne!(variant.ours(ns), whole, "{change}");
            wait::within(REPAIRED, &format!("{change} to be undone"), || {
                (variant.ours(ns) == whole).then_some(())
            });
        }
    }
    talk(&mesh);
}

fn programs_are_started_for_changes_only(variant: Variant) {
    let node = Node::new();
    let (client, server) = (node.pod("client"), node.pod("server"));
    let log = node.directory().join("runs");
    let script = format!("echo \"$0\" >> {}", log.display());
    let options = with_programs(&node, variant, &[("iptables-save", script)]);
    let agent = Agent::start(&node, &Workloads::hbone([&client, &server]), options);
    agent.enrol(&client);
    let runs = || fs::read_to_string(&log).unwrap().lines().count();
    let rule = "rule del priority 32764";
    let whole = routing(&client);
    // What comes after this was seen by a later look than what comes before.
    let looked_at = || {
        client.ns.ip(&[rule]).unwrap();
        wait::within(REPAIRED, "a look", || (routing(&client) == whole).then_some(()));
    };
    looked_at();
    looked_at();
    let before = runs();
    // The rules count packets.
    for family in Family::BOTH {
        let _ = app::connect(&client.ns, server.addr(family, PORT));
    }
    for _ in 0..3 {
        looked_at();
    }
    assert_eq!(runs(), before);
    variant.run(
        &client.ns,
        Family::V6,
        "",
        "-t nat -A OUTPUT -p tcp --dport 7 -j RETURN",
    );
    looked_at();
    assert!(runs() > before, "a change of others is looked at");
    let before = runs();
    looked_at();
    assert_eq!(runs(), before, "once");
}
