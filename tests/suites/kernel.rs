//! What the agent takes of this kernel: the best there is, and what it is forced to. The other suites' cases are named after
//! ways to attach; these show that the agent really went that way.

use std::{collections::BTreeMap, process::ExitCode};

use redirector_tests::{
    agent::Options,
    mesh::Mesh,
    suite::{Needs, case, main as suite},
};

/// Since when TC programs attach by TCX links.
const TCX: (u32, u32) = (6, 6);
/// Since when SK_LOOKUP tells the device of a packet.
const DEVICE: (u32, u32) = (5, 17);

fn main() -> ExitCode {
    suite(
        Needs::Agent,
        1,
        vec![
            case("tcx_is_taken_where_there_is_tcx", || {
                taken(Options::default(), "tc_mode", "Tcx", TCX, "Clsact")
            }),
            case("the_device_is_taken_where_it_is_told", || {
                taken(Options::default(), "dial_rule", "Device", DEVICE, "SourcePort")
            }),
            case("clsact_can_be_forced", || {
                let options = Options {
                    force_clsact: true,
                    ..Options::default()
                };
                assert_eq!(chosen(options)["tc_mode"], "Clsact");
            }),
            case("the_source_port_can_be_forced", || {
                assert_eq!(chosen(Options::old_kernel())["dial_rule"], "SourcePort");
            }),
        ],
    )
}

/// The agent's choice is the better one from a version on, and the other one before.
fn taken(options: Options, what: &str, better: &str, since: (u32, u32), other: &str) {
    let version = version();
    let expected = if version >= since { better } else { other };
    assert_eq!(chosen(options)[what], expected, "on kernel {version:?}");
}

/// What the agent says that it chose, once a pod is enrolled.
fn chosen(options: Options) -> BTreeMap<String, String> {
    let mesh = Mesh::hbone(options);
    let log = mesh.agent.log();
    let line = log.lines().find(|line| line.contains("accepted by this kernel"));
    let line = line.unwrap_or_else(|| panic!("the agent does not say what it chose:\n{log}"));
    line.split_whitespace()
        .filter_map(|word| word.split_once('='))
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect()
}

/// The first two numbers of this kernel's release.
fn version() -> (u32, u32) {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").expect("proc is mounted");
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .map(|number| number.parse().expect("a release begins with numbers"));
    let mut next = || numbers.next().expect("a release has two numbers");
    (next(), next())
}
