//! Findings on hand-made programs.

use std::collections::BTreeMap;

use super::*;
use crate::bpf::{insn::Insn, object::Program};

const OLDEST: Version = Version(5, 10);

fn insn(code: u8, dst: u8, src: u8, off: i16, imm: i32) -> Insn {
    Insn {
        code,
        dst,
        src,
        off,
        imm,
    }
}

/// A program of these instructions, and an exit.
fn object(kind: Kind, insns: &[Insn], maps: &[(&str, u32, u32)]) -> Loaded {
    let exit = [insn(0xb7, 0, 0, 0, 0), insn(0x95, 0, 0, 0, 0)];
    let program = Program {
        kind,
        insns: [insns, &exit].concat(),
    };
    let maps = maps.iter().zip(1..).map(|((name, map_type, flags), fd)| {
        let map = Map {
            name: (*name).to_owned(),
            map_type: *map_type,
            flags: *flags,
        };
        (fd, map)
    });
    Loaded {
        programs: BTreeMap::from([("prog".to_owned(), program)]),
        maps: maps.collect(),
    }
}

/// `r2 = *(bytes *)(r1 + off)`.
fn load(bytes: u8, off: i16) -> Insn {
    let size = match bytes {
        1 => 0x71,
        2 => 0x69,
        4 => 0x61,
        _ => 0x79,
    };
    insn(size, 2, 1, off, 0)
}

fn call(id: i32) -> Insn {
    insn(0x85, 0, 0, 0, id)
}

fn wrong(kind: Kind, insns: &[Insn], maps: &[(&str, u32, u32)]) -> Vec<String> {
    violations(&findings(&object(kind, insns, maps)), OLDEST, &[])
}

#[test]
fn what_the_oldest_kernel_has_is_right() {
    let insns = [load(4, 8), insn(0x63, 1, 2, 8, 0), load(8, 168), call(95)];
    assert!(wrong(Kind::Classifier, &insns, &[]).is_empty());
    assert!(wrong(Kind::Lookup, &[load(4, 36), load(2, 36), load(4, 60)], &[]).is_empty());
}

#[test]
fn what_is_wrong_is_told() {
    let table: &[(Kind, &[Insn], &str)] = &[
        (Kind::Classifier, &[load(2, 8)], "2 bytes read at offset 8"),
        (Kind::Classifier, &[load(1, 16)], "1 bytes read"),
        (Kind::Classifier, &[load(8, 8)], "8 bytes read"),
        (Kind::Classifier, &[load(4, 168)], "4 bytes read"),
        (Kind::Lookup, &[load(1, 36)], "1 bytes read"),
        (Kind::Lookup, &[load(2, 38)], "2 bytes read"),
        (Kind::Lookup, &[load(2, 60)], "2 bytes read"),
        (Kind::Lookup, &[load(2, 62)], "2 bytes read"),
        (Kind::Lookup, &[load(4, 64)], "there since 5.17"),
        (Kind::Lookup, &[load(4, 68)], "not in the tables"),
        (Kind::Classifier, &[load(1, 180)], "there since 5.18"),
        (Kind::Classifier, &[load(8, 184)], "there since 5.16"),
        (Kind::Classifier, &[load(4, 88)], "not in the tables"),
        (Kind::Classifier, &[insn(0x63, 1, 1, 0, 0)], "may not write"),
        (Kind::Classifier, &[insn(0x6b, 1, 1, 8, 0)], "2 bytes written"),
        (Kind::Lookup, &[insn(0x63, 1, 1, 8, 0)], "may not write"),
        (Kind::Classifier, &[call(163)], "bpf_check_mtu"),
        (Kind::Classifier, &[call(122)], "there since 6.15"),
        (Kind::Lookup, &[call(122)], "no kernel of the tables"),
        (Kind::Lookup, &[call(107)], "no kernel of the tables"),
        (Kind::Classifier, &[call(9999)], "helper 9999"),
        (
            Kind::Classifier,
            &[insn(0xd4, 1, 0, 0, 16), insn(0xd7, 1, 0, 0, 16)],
            "there since 6.6",
        ),
        (Kind::Classifier, &[insn(0x85, 0, 2, 0, 7)], "KernelFunction"),
        (Kind::Classifier, &[insn(0x2f, 1, 1, 0, 0), load(4, 0)], ""),
        (
            Kind::Classifier,
            &[insn(0x0f, 1, 2, 0, 0), load(4, 0)],
            "offset that is computed",
        ),
        (Kind::Classifier, &[insn(0xff, 0, 0, 0, 0)], "not known"),
    ];
    for (kind, insns, expected) in table {
        let wrong = wrong(*kind, insns, &[]);
        match *expected {
            // What is multiplied is no pointer any more, and the verifier's matter.
            "" => assert!(wrong.is_empty(), "{insns:?}: {wrong:?}"),
            _ => assert!(
                wrong.len() == 1 && wrong[0].contains(expected),
                "{insns:?}: {wrong:?}"
            ),
        }
    }
}

#[test]
fn maps_are_looked_up() {
    assert!(wrong(Kind::Lookup, &[], &[("A", 11, 1), ("B", 24, 0x201)]).is_empty());
    let table = [
        (("A", 30, 0), "bloom_filter"),
        (("A", 99, 0), "not in the tables"),
        (("A", 1, 1 << 13), "map flag link"),
        (("A", 1, 1 << 30), "map flag 30"),
    ];
    for (map, expected) in table {
        let wrong = wrong(Kind::Lookup, &[], &[map]);
        assert!(wrong.len() == 1 && wrong[0].contains(expected), "{wrong:?}");
    }
}

#[test]
fn a_look_up_of_a_socket_has_a_version_of_its_own() {
    let insns = [insn(0x18, 1, 1, 0, 1), insn(0, 0, 0, 0, 0), call(1)];
    let found = findings(&object(Kind::Lookup, &insns, &[("SOCKETS", 15, 0)]));
    let pair = found
        .iter()
        .find(|finding| finding.what == "bpf_map_lookup_elem on sockmap")
        .unwrap();
    assert_eq!(pair.since.unwrap().0, Version(5, 8));
}

#[test]
fn what_is_probed_may_be_new_and_must_be_used() {
    let found = findings(&object(Kind::Lookup, &[load(4, 64)], &[]));
    let entry = |program, what| Probed {
        program,
        what,
        probe: "somewhere",
    };
    let allowed = entry("prog", "bpf_sk_lookup.ingress_ifindex");
    assert_eq!(violations(&found, OLDEST, &[allowed]), Vec::<String>::new());
    // In another program it is as new as before.
    let elsewhere = entry("other", "bpf_sk_lookup.ingress_ifindex");
    assert_eq!(violations(&found, OLDEST, &[elsewhere]).len(), 2);
    // What is old needs no probe.
    let old = entry("prog", "program type Lookup");
    assert_eq!(violations(&found, OLDEST, &[allowed, old]).len(), 1);
    // A probe does not mend what is wrong on every kernel.
    let narrow = findings(&object(Kind::Lookup, &[load(2, 64)], &[]));
    assert_eq!(violations(&narrow, OLDEST, &[allowed]).len(), 1);
}
