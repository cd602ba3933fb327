//! docs/threat-model.md names a test for each claim, and each of these is there.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// Where tests are, from the workspace.
const PLACES: [&str; 3] = ["redirector/src", "redirector/tests", "tests/suites"];

#[test]
fn each_claim_has_its_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let text = fs::read_to_string(root.join("docs/threat-model.md")).expect("the page is there");
    let mut sources = String::new();
    for place in PLACES {
        for path in files(&root.join(place)) {
            sources += &fs::read_to_string(&path).expect("it can be read");
        }
    }
    let there: BTreeSet<&str> = sources
        .split("fn ")
        .skip(1)
        .filter_map(|rest| {
            rest.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
                .next()
        })
        .collect();
    let mut claims = 0;
    for row in text.lines().filter(|line| line.starts_with("| ")) {
        let shown_by = row.trim_end_matches('|').rsplit('|').next().unwrap_or_default();
        if shown_by.trim() == "shown by" {
            continue;
        }
        claims += 1;
        let names: Vec<&str> = shown_by.split('`').skip(1).step_by(2).collect();
        assert!(!names.is_empty(), "nothing shows this: {row}");
        for name in names {
            assert!(there.contains(name), "there is no test {name}: {row}");
        }
    }
    assert!(claims > 20, "the page has {claims} claims");
}

fn files(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).expect("it can be listed") {
        let path = entry.expect("it can be listed").path();
        if path.is_dir() {
            found.extend(files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found
}
