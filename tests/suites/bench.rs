//! The benchmark of redirection works, and leaves what it says: one round with amounts so small that its figures mean nothing.

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

fn main() -> ExitCode {
    suite(
        Needs::Agent,
        1,
        vec![case(
            "redirect_writes_every_file_and_every_figure",
            redirect_writes_every_file_and_every_figure,
        )],
    )
}

fn redirect_writes_every_file_and_every_figure() {
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
        .args(["redirect", "--size", "tiny", "--rounds", "2", "--out"])
        .arg(&out);
    let mut bench =
        Process::start(&mut command, &directory.path().join("log")).expect("the benchmark starts");
    let status = bench.wait(DEADLINE).expect("the benchmark ends");
    assert!(status.success(), "{status}: {}", bench.output());

    let read = |name: &str| fs::read_to_string(out.join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
    for plot in PLOTS {
        let name = format!("redirect-{plot}.svg");
        let svg = read(&name);
        assert!(svg.contains("</svg>") && !svg.contains("NaN"), "{name}: {svg}");
        assert!(read("redirect.md").contains(&format!("]({name})")), "{name}");
    }
    let report: Value = serde_json::from_str(&read("redirect.json")).expect("it is JSON");
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
    let unmeasured: Vec<&Value> = measures(&report)
        .filter(|measure| measure["reached"].is_null())
        .collect();
    assert!(unmeasured.is_empty(), "{unmeasured:?}");
    assert!(
        measures(&report).any(|measure| measure["measure"].as_str().unwrap().contains("net of an empty")),
        "no program was measured"
    );
    no_namespace_is_left(bench.pid());
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
