//! The benchmarks work, and leave what they say: a round or two with amounts so small that their figures mean nothing.

use std::{
    collections::BTreeSet,
    fs,
    path::Path,
    process::{Command, ExitCode},
    time::Duration,
};

use redirector_tests::{
    netns::{Directory, unique_prefix},
    process::Process,
    suite::{Needs, case, main as suite},
};
use serde_json::Value;

/// It takes some seconds on an idle machine.
const DEADLINE: Duration = Duration::from_secs(240);

const PLOTS: [&str; 7] = [
    "connections",
    "cpu",
    "enrolment",
    "growth",
    "latency",
    "programs",
    "throughput",
];

const PROXY_PLOTS: [&str; 6] = [
    "connections",
    "cpu",
    "latency",
    "memory",
    "requests",
    "throughput",
];

fn main() -> ExitCode {
    suite(
        Needs::Agent,
        1,
        vec![
            case(
                "redirect_writes_every_file_and_every_figure",
                redirect_writes_every_file_and_every_figure,
            ),
            case("mesh_writes_every_figure", mesh_writes_every_figure),
            case(
                "proxy_writes_every_file_and_every_figure",
                proxy_writes_every_file_and_every_figure,
            ),
        ],
    )
}

/// Runs a benchmark with tiny amounts: its files, whose plots and page go together, and its values.
fn tiny(name: &str, rounds: u32, plots: &[&str]) -> Value {
    let directory = Directory::create(&unique_prefix()).expect("a directory for the files");
    let out = directory.path().join("out");
    // At Ctrl-C it cleans up by itself, as the terminal tells it too.
    let mut command = Command::new("setpriv");
    command
        .args([
            "--pdeathsig",
            "TERM",
            "--",
            env!("CARGO_BIN_EXE_redirector-bench"),
        ])
        .args([name, "--size", "tiny", "--rounds", &rounds.to_string(), "--out"])
        .arg(&out);
    let mut bench =
        Process::start(&mut command, &directory.path().join("log")).expect("the benchmark starts");
    let status = bench.wait(DEADLINE).expect("the benchmark ends");
    assert!(status.success(), "{status}: {}", bench.output());

    let read = |name: &str| fs::read_to_string(out.join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
    let page = read(&format!("{name}.md"));
    assert!(page.contains("A trial") && !page.contains("\n\n\n"), "{page}");
    for plot in plots {
        let file = format!("{name}-{plot}.svg");
        let svg = read(&file);
        assert!(svg.contains("</svg>") && !svg.contains("NaN"), "{file}: {svg}");
        assert!(page.contains(&format!("]({file})")), "{file}");
    }
    let report: Value = serde_json::from_str(&read(&format!("{name}.json"))).expect("it is JSON");
    let unmeasured: Vec<&Value> = measures(&report)
        .filter(|measure| measure["reached"].is_null())
        .collect();
    assert!(unmeasured.is_empty(), "{unmeasured:?}");
    no_namespace_is_left(bench.pid());
    report
}

fn proxy_writes_every_file_and_every_figure() {
    let report = tiny("proxy", 1, &PROXY_PLOTS);
    let modes: BTreeSet<String> = texts(&report["modes"]).collect();
    assert!(
        modes.contains("direct") && modes.contains("plain") && modes.contains("HBONE"),
        "{modes:?}"
    );
    for (group, figure) in [
        ("bulk, one stream", "upload"),
        ("bulk, one stream", "CPU per GiB, the agent's own"),
        ("requests, one connection", "p50"),
        ("requests, 32 connections", "requests"),
        ("short connections", "new connections"),
    ] {
        let figure = find(&report, group, figure);
        let measured = figure["modes"].as_object().expect("modes");
        assert_eq!(measured.len(), modes.len(), "{figure}");
        for (mode, values) in measured {
            let rounds = values["rounds"].as_array().expect("rounds");
            assert_eq!(rounds.len(), 1, "{mode}: {figure}");
        }
    }
}

fn redirect_writes_every_file_and_every_figure() {
    let report = tiny("redirect", 2, &PLOTS);
    let modes: BTreeSet<String> = texts(&report["modes"]).collect();
    assert!(modes.contains("none") && modes.iter().any(|mode| mode.starts_with("ebpf")));
    for group in ["outbound, plain", "inbound, plain", "pod to pod, HBONE"] {
        for figure in [
            "new connections",
            "request, p50",
            "upload, 4 streams",
            "CPU per GiB, total",
        ] {
            let figure = find(&report, group, figure);
            let measured = figure["modes"].as_object().expect("modes").values();
            let rounds: Vec<usize> = measured
                .map(|mode| mode["rounds"].as_array().expect("rounds").len())
                .collect();
            // Clsact filters are measured where they differ from TCX links alone.
            assert!(
                rounds.len() + 1 >= modes.len() && rounds.iter().all(|count| *count == 2),
                "{figure}"
            );
        }
    }
    let enrolment = find(&report, "one pod at a time", "enrol, redirection part");
    assert_eq!(
        enrolment["modes"].as_object().map(serde_json::Map::len),
        Some(modes.len() - 1),
        "all but none: {enrolment}"
    );
    assert!(
        measures(&report).any(|measure| measure["measure"].as_str().unwrap().contains("net of an empty")),
        "no program was measured"
    );
}

fn texts(list: &Value) -> impl Iterator<Item = String> {
    let list = list.as_array().expect("a list").iter();
    list.map(|text| text.as_str().expect("a text").to_owned())
}

fn measures(report: &Value) -> impl Iterator<Item = &Value> {
    report["measures_to_reach"].as_array().expect("a list").iter()
}

fn find<'a>(report: &'a Value, group: &str, name: &str) -> &'a Value {
    let figures = report["figures"].as_array().expect("a list");
    figures
        .iter()
        .find(|figure| figure["group"] == group && figure["name"] == name)
        .unwrap_or_else(|| panic!("no figure {name} of {group}"))
}

/// Their names begin with the process id of their maker.
fn no_namespace_is_left(pid: u32) {
    let left: Vec<_> = fs::read_dir(Path::new("/run/netns"))
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with(&format!("rdr{pid}x")))
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

fn mesh_writes_every_figure() {
    let values = tiny("mesh", 2, &[]);
    let figures = values["figures"].as_object().unwrap();
    assert_eq!(figures.len(), 10);
    for (name, figure) in figures {
        let values = figure["values"].as_array().unwrap();
        let is_more_than_nothing = |value: &Value| value.as_f64().is_some_and(|value| value >= 0.0);
        assert!(
            values.len() == 2 && values.iter().all(is_more_than_nothing),
            "{name}: {figure}"
        );
    }
    assert_eq!(values["measures_to_reach"].as_array().unwrap().len(), 3);
}
