use std::{fs, os::unix::fs::PermissionsExt};

use futures_util::StreamExt;
use tokio::time::Instant;
use x509_parser::prelude::FromDer;

use super::*;
use crate::identity::{
    CertSource,
    renew::Renewing,
    testing::id,
    tls::{Credentials, peer_identity},
};

fn ca(dir: &Path) -> Result<DevCa, Error> {
    DevCa::load_or_create(dir, Config::default())
}

#[test]
fn a_certificate_says_what_spiffe_wants_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let svid = ca(dir.path()).unwrap().issue(&id("web")).unwrap();
    assert_eq!(peer_identity(&svid.chain), Some(id("web")));
    let (_, leaf) = x509_parser::certificate::X509Certificate::from_der(&svid.chain[0]).unwrap();
    assert_eq!(leaf.subject().iter().count(), 0);
    let sans = leaf.subject_alternative_name().unwrap().unwrap();
    assert!(sans.critical, "RFC 5280, 4.2.1.6: with an empty subject");
    assert_eq!(sans.value.general_names.len(), 1);
    let usage = leaf.extended_key_usage().unwrap().unwrap().value;
    assert!(usage.client_auth && usage.server_auth && !leaf.is_ca());
    let times = [svid.not_before, svid.not_after]
        .map(|time| i64::try_from(time.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs()).unwrap());
    assert_eq!(
        times,
        [
            leaf.validity().not_before.timestamp(),
            leaf.validity().not_after.timestamp()
        ]
    );
    assert_eq!(times[1] - times[0], 24 * 3600 + 300);
    assert!(svid.not_before < SystemTime::now() - Duration::from_secs(200));
    Credentials::new(&svid).unwrap();
}

#[test]
fn no_certificate_outlives_the_root() {
    let dir = tempfile::tempdir().unwrap();
    let ca = ca(dir.path()).unwrap();
    let late = SystemTime::now() + ROOT_LIFETIME - Duration::from_secs(60);
    assert_eq!(
        ca.issue_at(&id("web"), late).unwrap().not_after,
        ca.root_not_after
    );
}

#[test]
fn the_root_is_made_once_and_taken_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state/ca");
    let first = ca(&path).unwrap();
    let second = ca(&path).unwrap();
    assert_eq!(first.root_pem(), second.root_pem());
    let mode = |name: &str| fs::metadata(path.join(name)).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode("root-key.pem"), 0o600);
    // What the second issues, the first trusts.
    let mut svid = second.issue(&id("web")).unwrap();
    svid.roots = first.issue(&id("web")).unwrap().roots;
    Credentials::new(&svid).unwrap();
    let names: Vec<_> = fs::read_dir(&path)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(names.len(), 3, "{names:?}");
}

#[test]
fn agents_that_start_together_end_up_with_one_root() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ca");
    let roots: Vec<String> = std::thread::scope(|scope| {
        let agents: Vec<_> = (0..16)
            .map(|_| scope.spawn(|| ca(&path).unwrap().root_pem().to_owned()))
            .collect();
        agents.into_iter().map(|agent| agent.join().unwrap()).collect()
    });
    assert!(roots.iter().all(|root| *root == roots[0]));
}

#[test]
fn two_directories_are_two_cas() {
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let [own, foreign] = dirs.each_ref().map(|dir| ca(dir.path()).unwrap());
    let mut svid = foreign.issue(&id("web")).unwrap();
    svid.roots = own.issue(&id("web")).unwrap().roots;
    assert!(Credentials::new(&svid).is_err());
}

#[test]
fn files_that_are_no_ca_are_told_with_the_way_out() {
    let other = tempfile::tempdir().unwrap();
    ca(other.path()).unwrap();
    let other_key = fs::read_to_string(other.path().join("root-key.pem")).unwrap();
    let (old_root, old_key) = new_root(SystemTime::now() - 2 * ROOT_LIFETIME).unwrap();
    let leaf = ca(other.path()).unwrap().issue(&id("web")).unwrap().to_pem();
    for (case, root, key, expected) in [
        (
            "no key",
            None,
            Some(None),
            "root-key.pem: restore the missing file, or delete both",
        ),
        (
            "no certificate",
            Some(None),
            None,
            "root.pem: restore the missing file, or delete both",
        ),
        (
            "cut certificate",
            Some(Some("-----BEGIN CERT".to_owned())),
            None,
            "root.pem holds no certificate",
        ),
        (
            "empty certificate",
            Some(Some(String::new())),
            None,
            "root.pem holds no certificate",
        ),
        (
            "empty key",
            None,
            Some(Some(String::new())),
            "root-key.pem holds no usable private key",
        ),
        (
            "other key",
            None,
            Some(Some(other_key)),
            "does not belong to the key",
        ),
        (
            "expired",
            Some(Some(old_root.pem())),
            Some(Some(old_key.serialize_pem())),
            "root.pem has expired",
        ),
        (
            "a leaf",
            Some(Some(leaf.chain)),
            Some(Some(leaf.key)),
            "is not the certificate of a CA",
        ),
    ] {
        let dir = tempfile::tempdir().unwrap();
        ca(dir.path()).unwrap();
        for (name, change) in [("root.pem", root), ("root-key.pem", key)] {
            match change {
                Some(Some(text)) => fs::write(dir.path().join(name), text).unwrap(),
                Some(None) => fs::remove_file(dir.path().join(name)).unwrap(),
                None => {}
            }
        }
        let error = ca(dir.path())
            .err()
            .unwrap_or_else(|| panic!("{case}"))
            .to_string();
        assert!(
            error.contains(expected) && error.contains("restart all agents"),
            "{case}: {error}"
        );
    }
}

#[test]
fn what_an_agent_left_that_died_is_no_hindrance() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("root-key.pem.new"), "half a k").unwrap();
    fs::write(dir.path().join(".lock"), "").unwrap();
    ca(dir.path()).unwrap();
}

#[test]
fn a_file_in_place_of_the_directory_is_named() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let error = ca(file.path()).err().unwrap().to_string();
    assert!(error.contains(&file.path().display().to_string()), "{error}");
}

#[test]
fn a_lifetime_without_time_for_renewal_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let config = Config {
        lifetime: Duration::from_millis(1999),
    };
    assert!(matches!(
        DevCa::load_or_create(dir.path(), config),
        Err(Error::Lifetime(_))
    ));
}

#[tokio::test(start_paused = true)]
async fn certificates_are_renewed_about_half_way() {
    let dir = tempfile::tempdir().unwrap();
    let config = Config {
        lifetime: Duration::from_secs(1000),
    };
    let ca = DevCa::load_or_create(dir.path(), config).unwrap();
    let mut svids = Renewing::new(ca).svids(&id("web"));
    let mut before = svids.next().await.unwrap().unwrap();
    for _ in 0..5 {
        let start = Instant::now();
        let after = svids.next().await.unwrap().unwrap();
        let waited = start.elapsed().as_secs_f64();
        assert!((400.0..=600.1).contains(&waited), "{waited}");
        assert_ne!(before.chain, after.chain);
        assert_ne!(before.key.secret_der(), after.key.secret_der());
        before = after;
    }
}
