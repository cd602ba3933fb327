//! The built eBPF object against tables of kernel versions: nothing that is newer than the oldest supported kernel, but for
//! what is probed. It needs no root, only the object.

use std::{fs, process::ExitCode};

use redirector_tests::{
    bpf::{
        Version,
        check::{Finding, Probed, findings, violations},
        object::{self, Loaded},
    },
    suite::{Needs, case, main as suite},
};

const OLDEST: Version = Version(5, 10);

/// What is used only where a probe has shown that it can be.
const PROBED: &[Probed] = &[Probed {
    program: "redir_lookup",
    what: "bpf_sk_lookup.ingress_ifindex",
    probe: "redirect/ebpf/object.rs loads this program, and takes redir_lookup_old where it is refused",
}];

fn main() -> ExitCode {
    let cases = vec![
        case("the_object_needs_nothing_newer_than_5_10", needs_nothing_newer),
        case(
            "the_walk_finds_what_the_object_is_known_to_do",
            finds_what_is_known,
        ),
    ];
    suite(Needs::Object, 2, cases)
}

fn read() -> Vec<Finding> {
    let path = object::path();
    let file = fs::read(&path).unwrap_or_else(|error| panic!("reading {}: {error}", path.display()));
    let loaded = Loaded::read(&file).unwrap_or_else(|error| panic!("{}: {error:#}", path.display()));
    findings(&loaded)
}

fn needs_nothing_newer() {
    let findings = read();
    for finding in &findings {
        println!("{finding}");
    }
    for entry in PROBED {
        println!("{} may use {}: {}", entry.program, entry.what, entry.probe);
    }
    let wrong = violations(&findings, OLDEST, PROBED);
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

/// So that a walk that has gone blind does not pass.
fn finds_what_is_known() {
    let findings = read();
    for what in [
        "bpf_redirect",
        "bpf_sk_assign",
        "bpf_skc_lookup_tcp",
        "bpf_sk_storage_get",
        "bpf_map_lookup_elem on sockmap",
        "__sk_buff.mark",
        "__sk_buff.mark, written",
        "__sk_buff.sk",
        "bpf_sk_lookup.remote_port",
        "bpf_sk_lookup.local_ip6",
        "map type sk_storage",
        "map flag clone",
    ] {
        assert!(
            findings.iter().any(|finding| finding.what == what),
            "{what} is not found"
        );
    }
}
