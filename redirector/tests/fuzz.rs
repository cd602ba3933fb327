//! The fuzz targets' bodies (fuzz/bodies.rs) on their seeds, on seeds that were tampered with, and on any bytes: what of fuzzing needs
//! neither a nightly compiler nor much time. `cargo xtask fuzz` runs the same under libFuzzer.

use std::{
    fs,
    path::{Path, PathBuf},
};

use proptest::{prelude::*, test_runner::Config};

#[path = "../../fuzz/bodies.rs"]
mod bodies;

fn fuzz() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz")
}

fn seeds(target: &str) -> Vec<Vec<u8>> {
    let directory = fuzz().join("seeds").join(target);
    let entries = fs::read_dir(&directory).unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.iter().map(|path| fs::read(path).unwrap()).collect()
}

#[test]
fn every_target_has_a_binary_and_small_seeds() {
    for (name, _) in bodies::TARGETS {
        let binary = fs::read_to_string(fuzz().join("fuzz_targets").join(name).with_extension("rs")).unwrap();
        assert!(binary.contains(&format!("bodies::run(\"{name}\"")), "{name}");
        let seeds = seeds(name);
        assert!(!seeds.is_empty(), "{name}");
        assert!(seeds.iter().all(|seed| seed.len() <= 4096), "{name}");
    }
    let manifest = fs::read_to_string(fuzz().join("Cargo.toml")).unwrap();
    assert_eq!(manifest.matches("[[bin]]").count(), bodies::TARGETS.len());
}

#[test]
fn seeds_pass() {
    for (name, _) in bodies::TARGETS {
        for seed in seeds(name) {
            bodies::run(name, &seed);
        }
    }
}

/// A change to a seed: bytes at a place are replaced by others.
fn tampering() -> impl Strategy<Value = Vec<(usize, usize, Vec<u8>)>> {
    let interesting = prop_oneof![
        any::<Vec<u8>>().prop_map(|mut bytes| {
            bytes.truncate(8);
            bytes
        }),
        "[ -~]{0,6}".prop_map(String::into_bytes),
    ];
    prop::collection::vec((any::<usize>(), 0..6_usize, interesting), 0..5)
}

proptest! {
    #![proptest_config(Config { cases: 2000, failure_persistence: None, ..Config::default() })]

    #[test]
    fn tampered_seeds_are_read_or_refused(which in any::<prop::sample::Index>(), changes in tampering()) {
        for (name, _) in bodies::TARGETS {
            let mut bytes = which.get(&seeds(name)).clone();
            for (at, drop, put) in &changes {
                let at = at % (bytes.len() + 1);
                let end = (at + drop).min(bytes.len());
                bytes.splice(at..end, put.iter().copied());
            }
            bodies::run(name, &bytes);
        }
    }

    #[test]
    fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        for (name, _) in bodies::TARGETS {
            bodies::run(name, &bytes);
        }
    }
}
