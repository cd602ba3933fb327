//! The subcommands beside `agent`, as somebody at a terminal uses them: `load`, `trace`, `status`.

use std::{fs, process::ExitCode, time::Duration};

use aya::maps::{Array, Map, MapData};
use nix::sys::signal::Signal;
use redirector_common::maps::{PODS, PodEntry};
use redirector_tests::{
    agent::{Options, binary},
    app::{self, App},
    footprint::pinned_below,
    mesh::{Mesh, PORT},
    node::{Family, Node},
    process::{Process, command, output},
    suite::{Needs, case, main as suite},
    wait,
};

const DEADLINE: Duration = Duration::from_secs(20);

fn main() -> ExitCode {
    suite(
        Needs::Agent,
        2,
        vec![
            case("load_counts_and_leaves_nothing_tcx", || {
                load_counts_and_leaves_nothing(&[])
            }),
            case("load_counts_and_leaves_nothing_clsact", || {
                load_counts_and_leaves_nothing(&["--force-clsact"])
            }),
            case(
                "load_refuses_the_nodes_own_namespace",
                load_refuses_the_nodes_own_namespace,
            ),
            case(
                "load_touches_nothing_of_a_live_agent",
                load_touches_nothing_of_a_live_agent,
            ),
            case(
                "trace_can_be_switched_on_and_off",
                trace_can_be_switched_on_and_off,
            ),
            case("status_shows_pods_and_counters", status_shows_pods_and_counters),
            case("every_metric_is_documented", every_metric_is_documented),
        ],
    )
}

fn redirector() -> std::path::PathBuf {
    binary().expect("the suite's needs include the binary")
}

/// The programs count a connection that they would capture, it passes all the same, and SIGINT takes them away.
fn load_counts_and_leaves_nothing(flags: &[&str]) {
    let node = Node::new();
    let (client, server) = (node.pod("client"), node.pod("server"));
    let _app = App::start(&server.ns, (Family::V4.any(), PORT).into(), app::who);
    let filters = || {
        let tc = std::process::Command::new("tc")
            .args(["-n", client.ns.name(), "filter", "show", "dev", "eth0", "egress"])
            .output();
        String::from_utf8_lossy(&tc.expect("tc comes with ip").stdout).into_owned()
    };
    let mut load = command(&node.host.ns, redirector());
    load.args(["load", "--netns", client.ns.name(), "--bpffs-dir"])
        .arg(node.directory().join("bpf"))
        .args(flags);
    let mut load = Process::start(&mut load, &node.directory().join("load.log")).unwrap();
    wait::until("the programs to be attached", || {
        load.output().contains("attached to eth0").then_some(())
    });
    let seen = app::ask_who(&client.ns, server.addr(Family::V4, PORT)).unwrap();
    assert_eq!(seen, client.v4.to_string());
    let counted = |output: &str| output.lines().any(|line| line.starts_with("egress   captured"));
    wait::until("the connection to be counted", || {
        counted(&load.output()).then_some(())
    });
    load.signal(Signal::SIGINT);
    let status = load.wait(DEADLINE).expect("it ends at SIGINT");
    assert!(
        status.success() && load.output().ends_with("detached\n"),
        "{status}: {}",
        load.output()
    );
    assert_eq!(filters(), "");
}

/// Beside its pods, with the directory that it has locked.
fn load_touches_nothing_of_a_live_agent() {
    let mesh = Mesh::hbone(Options::default());
    let _app = App::start(&mesh.server.ns, (Family::V4.any(), PORT).into(), app::who);
    let connect = || app::ask_who(&mesh.client.ns, mesh.server.addr(Family::V4, PORT)).unwrap();
    connect();
    let pinned = || pinned_below(&mesh.agent.bpffs_dir());
    let before = pinned();
    let mut load = command(&mesh.node.host.ns, redirector());
    load.args(["load", "--netns", mesh.stranger.ns.name(), "--bpffs-dir"])
        .arg(mesh.agent.bpffs_dir());
    let mut load = Process::start(&mut load, &mesh.node.directory().join("load.log")).unwrap();
    wait::until("the programs to be attached", || {
        load.output().contains("attached to eth0").then_some(())
    });
    assert_eq!(pinned(), before);
    assert_eq!(connect(), mesh.client.v4.to_string());
    load.signal(Signal::SIGINT);
    assert!(load.wait(DEADLINE).expect("it ends at SIGINT").success());
    assert_eq!(connect(), mesh.client.v4.to_string());
}

fn load_refuses_the_nodes_own_namespace() {
    let node = Node::new();
    for netns in [node.host.ns.name(), "1", "no-such-namespace"] {
        let mut load = command(&node.host.ns, redirector());
        load.args(["load", "--netns", netns, "--bpffs-dir"])
            .arg(node.directory().join("bpf"));
        let (status, text) = output(&mut load, DEADLINE);
        assert_eq!(status.code(), Some(1), "{netns}: {text}");
        assert_eq!(text.lines().count(), 1, "{netns}: {text}");
    }
}

/// The pods' entries.
fn entries(mesh: &Mesh) -> Vec<[u8; size_of::<PodEntry>()]> {
    let mut builds = fs::read_dir(mesh.agent.bpffs_dir().join("builds")).unwrap();
    let maps = builds.next().unwrap().unwrap().path().join("maps");
    let map = MapData::from_pin(maps.join(PODS)).unwrap();
    let entries = Array::<_, [u8; size_of::<PodEntry>()]>::try_from(Map::Array(map)).unwrap();
    entries.iter().map(Result::unwrap).collect()
}

fn trace_can_be_switched_on_and_off() {
    let mesh = Mesh::hbone(Options::default());
    let _app = App::start(&mesh.server.ns, (Family::V4.any(), PORT).into(), app::who);
    let connect = || app::ask_who(&mesh.client.ns, mesh.server.addr(Family::V4, PORT)).unwrap();
    let capture = format!(":{PORT}");
    let before = entries(&mesh);
    for round in 0..2 {
        // What happens with nobody tracing is not told later either.
        connect();
        let mut trace = command(&mesh.node.host.ns, redirector());
        trace.arg("trace").arg("--bpffs-dir").arg(mesh.agent.bpffs_dir());
        let log = mesh.node.directory().join(format!("trace{round}.log"));
        let mut trace = Process::start(&mut trace, &log).unwrap();
        wait::until("records of new connections", || {
            connect();
            let output = trace.output();
            let told = |line: &str| line.starts_with("captured 10.77.0.") && line.contains(&capture);
            output.lines().any(told).then_some(())
        });
        // What the agent writes is nobody else's to write.
        assert_eq!(entries(&mesh), before);
        trace.signal(Signal::SIGTERM);
        assert!(trace.wait(DEADLINE).expect("it ends at SIGTERM").success());
    }
}

fn status_shows_pods_and_counters() {
    let mesh = Mesh::hbone(Options::default());
    let _app = App::start(&mesh.server.ns, (Family::V4.any(), PORT).into(), app::who);
    app::ask_who(&mesh.client.ns, mesh.server.addr(Family::V4, PORT)).unwrap();
    let mut status = command(&mesh.node.host.ns, redirector());
    let (code, text) = output(status.arg("status"), DEADLINE);
    assert!(code.success(), "{text}");
    for pod in [&mesh.client, &mesh.server] {
        assert!(
            text.contains(&pod.v4.to_string()) && text.contains(&pod.uid),
            "{text}"
        );
    }
    assert!(text.contains("redirector_verdicts"), "{text}");
    // Where no agent runs.
    let mut status = command(&mesh.stranger.ns, redirector());
    let (code, text) = output(status.arg("status"), DEADLINE);
    assert_eq!((code.code(), text.lines().count()), (Some(1), 1), "{text}");
}

/// What a scrape has is in docs/metrics.md with its type and labels, and what that says is there is in a scrape, or is known to be there
/// at other times alone.
fn every_metric_is_documented() {
    /// What happens to no connection of this test.
    const ELSEWHEN: [&str; 4] = [
        "istio_crl_policy_rejections",
        "redirector_connections_refused",
        "redirector_handshake_failures",
        "redirector_detach_seconds",
    ];
    let text = include_str!("../../docs/metrics.md");
    let rows: Vec<Vec<&str>> = text
        .lines()
        .filter(|line| line.starts_with("| `"))
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect();
    let name = |row: &Vec<&str>| row[0].trim_matches('`').to_owned();
    let mesh = Mesh::hbone(Options::default());
    let _app = App::start(&mesh.server.ns, (Family::V4.any(), PORT).into(), app::who);
    for from in [&mesh.client, &mesh.stranger] {
        app::ask_who(&from.ns, mesh.server.addr(Family::V4, PORT)).unwrap();
    }
    let admin = "127.0.0.1:15000".parse().unwrap();
    let (status, scrape) = app::http_get(&mesh.node.host.ns, admin, "/metrics").unwrap();
    assert_eq!(status, 200);
    let types: Vec<(&str, &str)> = scrape
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '))
        .collect();
    assert!(types.len() > 15, "{scrape}");
    for (metric, kind) in &types {
        let row = rows.iter().find(|row| name(row) == *metric);
        let row = row.unwrap_or_else(|| panic!("{metric} is not in docs/metrics.md"));
        assert_eq!(row[1], *kind, "the type of {metric}");
        if row[2] == "traffic" {
            continue;
        }
        let is_of = |line: &&str| {
            let rest = line.strip_prefix(metric).unwrap_or_default();
            rest.starts_with(['{', ' ', '_'])
        };
        let lines = scrape.lines().filter(is_of);
        let labels = lines.filter_map(|line| Some(line.split_once('{')?.1.split_once('}')?.0));
        for label in labels.flat_map(|labels| labels.split(',')) {
            let label = label.split('=').next().unwrap_or_default();
            let is_told = row[2].split(", ").any(|told| told == label);
            assert!(is_told || label == "le", "{label} of {metric} is not told");
        }
    }
    for row in &rows {
        let is_there = types.iter().any(|(metric, _)| *metric == name(row));
        let at_other_times = row[3].contains("alone") || ELSEWHEN.contains(&name(row).as_str());
        assert!(
            is_there || at_other_times,
            "{} is in docs/metrics.md, and not in a scrape:\n{scrape}",
            name(row)
        );
    }
}
