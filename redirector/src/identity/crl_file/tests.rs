use std::{fs, os::unix::fs::symlink};

use super::*;
use crate::identity::testing::{TestCa, id};

fn file(path: &Path) -> File {
    File {
        path: path.to_owned(),
        followed: None,
        state: State::default(),
        told_overdue: 0,
    }
}

/// Looks until a change that has yet to stand still has been seen twice.
fn look(file: &mut File) -> bool {
    let first = file.look();
    file.look() || first
}

fn revoked(file: &File) -> (usize, usize) {
    (file.state.lists.len(), file.state.lists.revoked())
}

fn problem(file: &File) -> &str {
    file.state.problem.as_deref().unwrap_or_default()
}

#[test]
fn what_cannot_be_used_replaces_nothing_and_is_told_until_it_is_mended() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("crl.pem");
    let ca = TestCa::new();
    let leaf = ca.leaf(&[&id("web").to_string()], |_| {}).certificate;
    let (one, none) = (ca.crl(&[&leaf], |_| {}), ca.crl(&[], |_| {}));
    let mut file = file(&path);
    assert!(look(&mut file), "that it is not there is news");
    assert!(problem(&file).contains("crl.pem") && file.state.lists.is_empty());
    assert!(!look(&mut file), "but once");

    let pem = one.pem().unwrap();
    for (content, expected, told) in [
        (pem.as_bytes(), (1, 1), ""),
        (&pem.as_bytes()[..pem.len() / 2], (1, 1), "cut off"),
        (b"", (1, 1), "no revocation list"),
        // As it was before.
        (pem.as_bytes(), (1, 1), ""),
        (none.der(), (1, 0), ""),
        (one.der(), (1, 1), ""),
        (b"\xff\xfe", (1, 1), "no revocation list"),
        (none.pem().unwrap().as_bytes(), (1, 0), ""),
    ] {
        fs::write(&path, content).unwrap();
        assert!(look(&mut file), "{content:?}");
        assert_eq!(revoked(&file), expected, "{content:?}");
        assert!(
            problem(&file).contains(told) && problem(&file).is_empty() == told.is_empty(),
            "{}",
            problem(&file)
        );
        assert!(!look(&mut file), "the same is no news");
    }
    fs::write(&path, one.der()).unwrap();
    assert!(look(&mut file));
    fs::remove_file(&path).unwrap();
    assert!(look(&mut file) && problem(&file).contains("cannot read"));
    assert_eq!(revoked(&file), (1, 1), "what was read stays");
    fs::write(&path, one.der()).unwrap();
    assert!(
        look(&mut file) && problem(&file).is_empty(),
        "it is back as it was"
    );
}

#[test]
fn a_mount_s_links_are_followed() {
    let directory = tempfile::tempdir().unwrap();
    let ca = TestCa::new();
    let leaf = ca.leaf(&[], |_| {}).certificate;
    for (version, list) in [("v1", ca.crl(&[], |_| {})), ("v2", ca.crl(&[&leaf], |_| {}))] {
        fs::create_dir(directory.path().join(version)).unwrap();
        fs::write(
            directory.path().join(version).join("ca-crl.pem"),
            list.pem().unwrap(),
        )
        .unwrap();
    }
    let data = directory.path().join("..data");
    symlink("v1", &data).unwrap();
    symlink("..data/ca-crl.pem", directory.path().join("ca-crl.pem")).unwrap();
    let mut file = file(&directory.path().join("ca-crl.pem"));
    assert!(look(&mut file));
    assert_eq!(revoked(&file), (1, 0));
    symlink("v2", directory.path().join("..next")).unwrap();
    fs::rename(directory.path().join("..next"), &data).unwrap();
    assert!(look(&mut file));
    assert_eq!(revoked(&file), (1, 1));
}

#[tokio::test]
async fn others_are_told_from_those_before() {
    let ca = TestCa::new();
    let (none, again) = (ca.crl(&[], |_| {}), ca.crl(&[], |_| {}));
    let (revocations, publisher) = Revocations::fixed(none.der());
    let before = revocations.in_force();
    assert!(before == revocations.in_force());
    assert!(before != Revocations::default().in_force());
    publisher.publish(again.der());
    assert!(before != revocations.in_force());
    assert!(Revocations::default().in_force() == Revocations::default().in_force());
}
