use std::{os::unix::fs::symlink, time::Duration};

use futures_util::StreamExt;

use super::*;
use crate::identity::testing::{TestCa, id};

const DEADLINE: Duration = Duration::from_secs(120);

fn write(directory: &Path, names: [&str; 3], svid: &Svid) {
    fs::create_dir_all(directory).unwrap();
    let pem = svid.to_pem();
    for (name, text) in names.into_iter().zip([pem.chain, pem.key, pem.roots]) {
        fs::write(directory.join(name), text).unwrap();
    }
}

/// Looks until a look has nothing new: a change must stand still from one look to the next.
fn settle(directory: &mut Directory) -> Option<Snapshot> {
    let looks = [directory.look(), directory.look(), directory.look()];
    looks.into_iter().flatten().last()
}

fn leaf<'a>(snapshot: &'a Snapshot, name: &str) -> Option<&'a CertificateDer<'static>> {
    snapshot.svids.get(&id(name)).map(|svid| &svid.chain[0])
}

#[test]
fn both_layouts_are_read_for_one_identity_and_for_many() {
    let ca = TestCa::new();
    for names in NAMES {
        let root = tempfile::tempdir().unwrap();
        let svid = ca.svid(&id("web"));
        write(root.path(), names, &svid);
        let snapshot = Directory::new(root.path()).look().unwrap();
        assert_eq!(leaf(&snapshot, "web"), Some(&svid.chain[0]));
        assert_eq!(snapshot.problem, None);
    }
    let root = tempfile::tempdir().unwrap();
    for (name, names) in [("web", NAMES[0]), ("cart", NAMES[1])] {
        write(&root.path().join(name), names, &ca.svid(&id(name)));
    }
    write(&root.path().join("..hidden"), NAMES[0], &ca.svid(&id("hidden")));
    fs::create_dir(root.path().join("empty")).unwrap();
    let mut directory = Directory::new(root.path());
    let snapshot = directory.look().unwrap();
    assert_eq!(
        snapshot.svids.keys().collect::<Vec<_>>(),
        [&id("cart"), &id("web")]
    );
    assert!(directory.look().is_none(), "nothing new");
    // Another one comes and one goes.
    write(&root.path().join("new"), NAMES[0], &ca.svid(&id("new")));
    fs::remove_dir_all(root.path().join("web")).unwrap();
    let snapshot = directory.look().unwrap();
    assert_eq!(
        snapshot.svids.keys().collect::<Vec<_>>(),
        [&id("cart"), &id("new")]
    );
}

#[test]
fn a_mounted_secret_is_followed_through_its_links() {
    let ca = TestCa::new();
    let root = tempfile::tempdir().unwrap();
    let path = root.path();
    let (first, second) = (ca.svid(&id("web")), ca.svid(&id("web")));
    write(&path.join("..1"), NAMES[0], &first);
    symlink("..1", path.join("..data")).unwrap();
    for name in NAMES[0] {
        symlink(Path::new("..data").join(name), path.join(name)).unwrap();
    }
    let mut directory = Directory::new(path);
    assert_eq!(leaf(&directory.look().unwrap(), "web"), Some(&first.chain[0]));
    write(&path.join("..2"), NAMES[0], &second);
    symlink("..2", path.join("..tmp")).unwrap();
    fs::rename(path.join("..tmp"), path.join("..data")).unwrap();
    let snapshot = settle(&mut directory).unwrap();
    assert_eq!(leaf(&snapshot, "web"), Some(&second.chain[0]));
    assert_eq!(snapshot.problem, None);
}

#[test]
fn what_does_not_hold_together_replaces_nothing_and_is_told() {
    let (ca, other) = (TestCa::new(), TestCa::new());
    let root = tempfile::tempdir().unwrap();
    let path = root.path();
    let svid = ca.svid(&id("web"));
    write(path, NAMES[0], &svid);
    let mut directory = Directory::new(path);
    directory.look().unwrap();
    let pem = svid.to_pem();
    let nobody = SvidLike::nobody(&ca);
    let half = pem.chain[..pem.chain.len() / 2].to_owned();
    let cases = [
        (
            "tls.key",
            other.svid(&id("web")).to_pem().key,
            "do not belong together",
        ),
        ("tls.key", "soon".to_owned(), "holds no private key"),
        ("tls.crt", String::new(), "tls.crt: it holds no certificate"),
        ("tls.crt", half, "tls.crt: it "),
        ("tls.crt", nobody, "has no URI of the form"),
        ("tls.crt", pem.roots.clone(), "nothing but roots"),
        (
            "ca.crt",
            other.svid(&id("web")).to_pem().roots,
            "do not belong together",
        ),
    ];
    for (name, text, told) in cases {
        let good = fs::read(path.join(name)).unwrap();
        fs::write(path.join(name), text).unwrap();
        let snapshot = settle(&mut directory).unwrap();
        let problem = snapshot.problem.as_deref().unwrap_or_default();
        assert!(problem.contains(told), "{name}: {problem}");
        assert!(!problem.contains("soon"), "a key's text is repeated: {problem}");
        assert_eq!(leaf(&snapshot, "web"), Some(&svid.chain[0]), "{name}");
        fs::write(path.join(name), good).unwrap();
        assert_eq!(settle(&mut directory).unwrap().problem, None, "{name}");
    }
    fs::remove_file(path.join("tls.key")).unwrap();
    let snapshot = settle(&mut directory).unwrap();
    assert!(snapshot.problem.unwrap().contains("tls.key: No such file"));
    assert_eq!(snapshot.svids.len(), 1);
    let renewed = ca.svid(&id("web"));
    write(path, NAMES[0], &renewed);
    assert_eq!(
        leaf(&settle(&mut directory).unwrap(), "web"),
        Some(&renewed.chain[0])
    );
}

/// A certificate without an identity.
struct SvidLike;

impl SvidLike {
    fn nobody(ca: &TestCa) -> String {
        let leaf = ca.leaf(&["spiffe://cluster.local/agent"], |_| {});
        let mut svid = ca.svid(&id("web"));
        svid.chain = vec![leaf.certificate];
        svid.to_pem().chain
    }
}

#[test]
fn a_root_behind_the_chain_is_left_out_and_intermediates_stay() {
    let ca = TestCa::new();
    let between = ca.intermediate();
    let mut svid = between.svid(&id("web"));
    svid.chain.extend([between.certificate(), ca.certificate()]);
    svid.roots = vec![ca.certificate()];
    let root = tempfile::tempdir().unwrap();
    write(root.path(), NAMES[0], &svid);
    let snapshot = Directory::new(root.path()).look().unwrap();
    assert_eq!(snapshot.problem, None);
    assert_eq!(snapshot.svids[&id("web")].chain, svid.chain[..2]);
}

#[tokio::test]
async fn an_identity_gets_its_own_and_hears_what_is_missing() {
    let ca = TestCa::new();
    let root = tempfile::tempdir().unwrap();
    let files = Files::follow(root.path());
    let (mut web, mut cart) = (files.svids(&id("web")), files.svids(&id("cart")));
    let next = async |stream: &mut BoxStream<'static, Result<Svid, Error>>| {
        tokio::time::timeout(DEADLINE, stream.next())
            .await
            .unwrap()
            .unwrap()
    };
    let error = next(&mut web).await.unwrap_err().to_string();
    for part in [
        "spiffe://cluster.local/ns/shop/sa/web",
        "no certificate",
        "must hold tls.crt, tls.key and ca.crt",
    ] {
        assert!(error.contains(part), "{part:?} is not in {error:?}");
    }
    next(&mut cart).await.unwrap_err();
    let svid = ca.svid(&id("web"));
    // The key last, as by a program that writes in that order: only the whole is taken.
    let pem = svid.to_pem();
    fs::write(root.path().join("ca.crt"), pem.roots).unwrap();
    fs::write(root.path().join("tls.crt"), pem.chain).unwrap();
    fs::write(root.path().join("tls.key"), pem.key).unwrap();
    let got = loop {
        if let Ok(svid) = next(&mut web).await {
            break svid;
        }
    };
    assert_eq!(got.chain, svid.chain);
    let error = loop {
        let error = next(&mut cart).await.unwrap_err().to_string();
        if error.contains("none for this identity") {
            break error;
        }
    };
    assert!(
        error.contains("among 1: spiffe://cluster.local/ns/shop/sa/web"),
        "{error}"
    );
}
