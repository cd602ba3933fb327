//! `redirector doctor` on a node that is as it must be, and with each part broken in turn.

use std::{fs, net::TcpListener, path::Path};

use redirector_tests::{
    agent::{Options, binary},
    mesh::Mesh,
    netns::Namespace,
    node::Node,
    process::{command, output},
};
use serde_json::Value;

use super::DEADLINE;

/// What it says of a node with these settings.
struct Answer {
    code: i32,
    checks: Vec<Value>,
    text: String,
}

impl Answer {
    fn state(&self, id: &str) -> &str {
        self.check(id)["state"].as_str().expect("a state")
    }

    fn check(&self, id: &str) -> &Value {
        let found = self.checks.iter().find(|check| check["id"] == id);
        found.unwrap_or_else(|| panic!("{id} is not in {}", self.text))
    }

    /// What has failed.
    fn failed(&self) -> Vec<&str> {
        let failed = self.checks.iter().filter(|check| check["state"] == "failed");
        failed
            .map(|check| check["id"].as_str().expect("a name"))
            .collect()
    }
}

/// The settings of an agent of this node.
fn settings(node: &Node) -> Vec<String> {
    let at = |flag: &str, file: &str| format!("{flag}={}", node.directory().join(file).display());
    vec![
        at("--state-dir", "state"),
        at("--bpffs-dir", "bpf"),
        at("--cni-socket", "cni.sock"),
        at("--cni-conf-dir", "net.d"),
        at("--cni-bin-dir", "cni-bin"),
        "--metrics-addr=127.0.0.1:15020".to_owned(),
        "--readiness-addr=127.0.0.1:15021".to_owned(),
    ]
}

/// These settings, and others in the place of those of the same flags.
fn with(settings: &[String], others: &[&str]) -> Vec<String> {
    let flag = |setting: &str| setting.split('=').next().unwrap_or_default().to_owned();
    let given: Vec<_> = others.iter().map(|other| flag(other)).collect();
    let kept = settings.iter().filter(|setting| !given.contains(&flag(setting)));
    kept.cloned()
        .chain(others.iter().map(ToString::to_string))
        .collect()
}

fn doctor(ns: &Namespace, settings: &[String], more: &[&str]) -> Answer {
    let mut doctor = command(ns, binary().expect("the suite's needs include the binary"));
    doctor.args(["doctor", "-o", "json"]).args(with(settings, more));
    let (status, text) = output(&mut doctor, DEADLINE);
    let view: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    Answer {
        code: status.code().expect("no signal ends it"),
        checks: view["checks"].as_array().expect("a list").clone(),
        text,
    }
}

/// With an agent and without, nothing has failed, and each check that does not say ok says what mends it.
pub(super) fn a_good_node_is_found_good() {
    let node = Node::new();
    let answer = doctor(&node.host.ns, &settings(&node), &[]);
    assert_eq!((answer.failed(), answer.code), (vec![], 0), "{}", answer.text);
    for id in [
        "kernel.version",
        "kernel.programs",
        "process.capabilities",
        "state.directory",
        "ports.admin",
    ] {
        assert_eq!(answer.state(id), "ok", "{}", answer.text);
    }
    assert_eq!(answer.state("remote.xds"), "notAsked");

    let mesh = Mesh::hbone(Options::default());
    let answer = doctor(&mesh.node.host.ns, &settings(&mesh.node), &[]);
    assert_eq!((answer.failed(), answer.code), (vec![], 0), "{}", answer.text);
    for id in [
        "agent.ready",
        "pods.rules",
        "pods.programs",
        "certificates",
        "sockets.cni",
        "ports.admin",
    ] {
        assert_eq!(answer.state(id), "ok", "{}", answer.text);
    }
    for check in &answer.checks {
        let is_well = ["ok", "notAsked"].contains(&check["state"].as_str().unwrap());
        assert_eq!(check["hint"].is_null(), is_well, "{check}");
    }
    // What it tries leaves nothing.
    let again = doctor(&mesh.node.host.ns, &settings(&mesh.node), &["--force-clsact"]);
    let seen = again.check("kernel.programs")["seen"].as_str().unwrap();
    assert!(
        seen.contains("clsact") && again.failed().is_empty(),
        "{}",
        again.text
    );
    let mut table = command(&mesh.node.host.ns, binary().unwrap());
    table.arg("doctor").args(settings(&mesh.node));
    let (status, text) = output(&mut table, DEADLINE);
    assert!(status.success() && text.contains(" 0 failed, "), "{text}");
}

pub(super) fn what_is_broken_is_named() {
    let node = Node::new();
    let ns = &node.host.ns;
    let settings = settings(&node);
    let failed = |more: &[&str]| {
        let answer = doctor(ns, &settings, more);
        assert_eq!(answer.code, 1, "{more:?}: {}", answer.text);
        answer.failed().join(" ")
    };
    // A port that somebody has.
    let _taken = redirector::sys::netns::Netns::open(&ns.path())
        .unwrap()
        .run(|| TcpListener::bind("127.0.0.1:15000"))
        .unwrap()
        .unwrap();
    assert_eq!(failed(&[]), "ports.admin");
    let free = ["--admin-addr=127.0.0.1:15009"];
    assert_eq!(doctor(ns, &settings, &free).code, 0);
    // A state directory that is none, and one that cannot be.
    let file = node.directory().join("file");
    fs::write(&file, "").unwrap();
    let state = format!("--state-dir={}", file.display());
    assert!(failed(&[free[0], &state]).contains("state.directory"));
    // A socket's path that something else has.
    let socket = format!("--cni-socket={}", file.display());
    assert_eq!(failed(&[free[0], &socket]), "sockets.cni");
    // Nobody there.
    let nobody = ["--xds-address=http://127.0.0.1:9", "--inpod-uds=/no/such/socket"];
    assert_eq!(failed(&[free[0], nobody[0], nobody[1]]), "sockets.zds remote.xds");
    // A right that is missing.
    let mut weak = command(ns, "setpriv");
    weak.args(["--bounding-set", "-net_raw", "--inh-caps", "-all", "--"])
        .arg(binary().unwrap())
        .args(["doctor"])
        .args(&settings)
        .arg(free[0]);
    let (status, text) = output(&mut weak, DEADLINE);
    assert!(
        status.code() == Some(1) && text.contains("lacks CAP_NET_RAW"),
        "{text}"
    );
    // Settings that contradict each other are bad settings, not a bad node.
    let mut wrong = command(ns, binary().unwrap());
    let (status, text) = output(wrong.args(["doctor", "--xds-on-demand"]), DEADLINE);
    assert_eq!((status.code(), text.lines().count()), (Some(1), 1), "{text}");
    let mut wrong = command(ns, binary().unwrap());
    let (status, _) = output(wrong.args(["doctor", "--deadline", "soon"]), DEADLINE);
    assert_eq!(status.code(), Some(2));
}

/// As in a container that lacks the node's bpffs, its cgroups and a /proc that can be written.
pub(super) fn a_missing_mount_is_named() {
    let node = Node::new();
    let mut alone = command(&node.host.ns, "unshare");
    alone
        .args(["--mount", "sh", "-c"])
        .arg(r#"mount -t tmpfs none /sys/fs/bpf && mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys || exit; for at in $(awk '$3 == "cgroup2" { print $2 }' /proc/mounts); do umount -l "$at"; done; exec "$@""#)
        .arg("sh")
        .arg(binary().unwrap())
        .arg("doctor")
        .args(with(&settings(&node), &["--bpffs-dir=/sys/fs/bpf/redirector"]));
    let (_, text) = output(&mut alone, DEADLINE);
    let line = |id: &str| {
        text.lines()
            .find(|line| line.contains(id))
            .unwrap_or_default()
            .to_owned()
    };
    // With switches that it cannot set it is in a container, and what it mounts ends with that.
    assert!(line("process.sysctls").starts_with("FAILED"), "{text}");
    assert!(line("mounts.bpffs").starts_with("FAILED"), "{text}");
    assert!(line("mounts.cgroup2").starts_with("warning"), "{text}");
    assert!(
        text.contains("-> on the node: mount -t bpf bpf /sys/fs/bpf"),
        "{text}"
    );
}

/// Rules and filters of others in a pod.
pub(super) fn what_others_have_in_a_pod_is_named() {
    let mesh = Mesh::hbone(Options::default());
    let run = |program: &str, arguments: &[&str]| {
        let mut other = command(&mesh.client.ns, program);
        let (status, text) = output(other.args(arguments), DEADLINE);
        assert!(status.success(), "{program} {arguments:?}: {text}");
    };
    run("iptables-nft", &["-t", "nat", "-N", "ISTIO_OUTPUT"]);
    run("tc", &["qdisc", "replace", "dev", "eth0", "clsact"]);
    // It matches nothing.
    let filter = "filter add dev eth0 egress prio 5 protocol all u32 match u32 0xdeadbeef 0xffffffff at 0";
    run("tc", &filter.split(' ').collect::<Vec<_>>());
    let answer = doctor(&mesh.node.host.ns, &settings(&mesh.node), &[]);
    assert_eq!(
        (answer.failed(), answer.code),
        (vec!["pods.rules"], 1),
        "{}",
        answer.text
    );
    let seen = answer.check("pods.rules")["seen"].as_str().unwrap();
    assert!(seen.contains("demo/client (ISTIO_OUTPUT)"), "{seen}");
    assert_eq!(answer.state("pods.programs"), "warning", "{}", answer.text);
    let seen = answer.check("pods.programs")["seen"].as_str().unwrap();
    assert!(
        seen.contains("demo/client (filter of priority 5 on eth0 egress)"),
        "{seen}"
    );
}

/// The runtime's configuration, with the plugin's entry and without.
pub(super) fn a_missing_plugin_is_named() {
    const CONF: &str = r#"{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"bridge"}]}"#;
    let node = Node::new();
    let (conf, bin) = (node.directory().join("net.d"), node.directory().join("cni-bin"));
    for directory in [&conf, &bin] {
        fs::create_dir(directory).unwrap();
    }
    let settings = settings(&node);
    let ask = || doctor(&node.host.ns, &settings, &["--cni-install"]);
    assert_eq!(
        ask().state("cni.plugin"),
        "failed",
        "without a configuration of the CNI's"
    );
    fs::write(conf.join("10-net.conflist"), CONF).unwrap();
    assert_eq!(
        ask().state("cni.plugin"),
        "warning",
        "the agent will put it there"
    );
    let mut install = command(&node.host.ns, binary().unwrap());
    let (status, text) = output(install.arg("install-cni").args(&settings), DEADLINE);
    assert!(status.success(), "{text}");
    assert_eq!(ask().state("cni.plugin"), "ok");
    assert_eq!(doctor(&node.host.ns, &settings, &[]).state("cni.plugin"), "ok");
    spoil(&bin.join("redirector-cni"));
    let answer = doctor(&node.host.ns, &settings, &[]);
    assert_eq!(
        (answer.state("cni.plugin"), answer.code),
        ("failed", 1),
        "{}",
        answer.text
    );
    fs::write(conf.join("10-net.conflist"), CONF).unwrap();
    assert_eq!(
        ask().state("cni.plugin"),
        "warning",
        "somebody has written it anew"
    );
}

fn spoil(program: &Path) {
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    fs::set_permissions(program, mode).unwrap();
}

/// An agent that stands still is found out within the deadline, and the rest is told.
pub(super) fn an_agent_that_stands_still_is_named() {
    let mesh = Mesh::hbone(Options::default());
    mesh.agent.pause();
    let answer = doctor(&mesh.node.host.ns, &settings(&mesh.node), &["--deadline=10s"]);
    mesh.agent.resume();
    assert_eq!(answer.state("agent.ready"), "failed", "{}", answer.text);
    assert_eq!(answer.state("kernel.programs"), "ok", "{}", answer.text);
}
