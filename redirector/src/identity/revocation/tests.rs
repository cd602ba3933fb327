use rcgen::{CrlDistributionPoint, CrlIssuingDistributionPoint, CrlScope};

use super::*;
use crate::identity::testing::{TestCa, id, serial};

fn roots(cas: &[&TestCa]) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    for ca in cas {
        roots.add(ca.certificate()).unwrap();
    }
    roots
}

fn leaf(ca: &TestCa) -> CertificateDer<'static> {
    ca.leaf(&[&id("web").to_string()], |_| {}).certificate
}

/// With a serial number of these bytes.
fn numbered(ca: &TestCa, serial: &[u8]) -> CertificateDer<'static> {
    let number = serial.to_vec();
    ca.leaf(&[], |params| params.serial_number = Some(number.into()))
        .certificate
}

fn lists(ders: &[&[u8]]) -> Lists {
    Lists::parse(&ders.concat()).unwrap()
}

fn point(scope: CrlScope) -> Option<CrlIssuingDistributionPoint> {
    Some(CrlIssuingDistributionPoint {
        distribution_point: CrlDistributionPoint {
            uris: vec!["http://example.org/crl".to_owned()],
        },
        scope: Some(scope),
    })
}

#[test]
fn who_is_revoked_is_what_the_authority_s_own_list_says() {
    let (ca, other) = (TestCa::named("one name"), TestCa::named("one name"));
    let elsewhere = TestCa::new();
    let (bad, good, same_number) = (leaf(&ca), leaf(&ca), TestCa::new());
    let same_number = numbered(&same_number, &serial(&bad));
    let list = ca.crl(&[&bad], |_| {});
    let foreign = elsewhere.crl(&[&bad], |_| {});
    let namesake = other.crl(&[&bad], |_| {});
    let none = ca.crl(&[], |_| {});
    let ([list, foreign, namesake, none], all) = (
        [&list, &foreign, &namesake, &none].map(|crl| &crl.der()[..]),
        [&ca, &other],
    );
    for (case, ders, certificate, revoked) in [
        ("on it", &[list][..], &bad, true),
        ("not on it", &[list], &good, false),
        (
            "another authority's certificate of the same number",
            &[list],
            &same_number,
            false,
        ),
        ("on another authority's", &[foreign], &bad, false),
        (
            "on that of another key of the same name",
            &[namesake],
            &bad,
            false,
        ),
        ("on the second of the name", &[namesake, list], &bad, true),
        ("on the older of two", &[list, none], &bad, true),
        ("on none", &[none, foreign], &bad, false),
    ] {
        let checked = lists(ders).check([certificate].into_iter(), &roots(&all));
        assert_eq!(checked.is_err(), revoked, "{case}: {checked:?}");
    }
    let Err(Barred::Leaf { serial: told, issuer }) = lists(&[list]).check([&bad].into_iter(), &roots(&all))
    else {
        panic!("not revoked");
    };
    let hexadecimal: String = serial(&bad).iter().map(|byte| format!("{byte:02X}")).collect();
    assert_eq!(
        told.trim_start_matches("00"),
        hexadecimal.trim_start_matches("00")
    );
    assert_eq!(issuer, "CN=one name");
    assert!(Lists::default().check([&bad].into_iter(), &roots(&all)).is_ok());
}

#[test]
fn the_whole_chain_is_looked_for() {
    let root = TestCa::new();
    let middle = root.intermediate();
    let leaf = leaf(&middle);
    let chain = [&leaf, &middle.certificate()];
    let (of_root, of_middle) = (root.crl(&[chain[1]], |_| {}), middle.crl(&[&leaf], |_| {}));
    let check = |list: &[u8]| lists(&[list]).check(chain.into_iter(), &roots(&[&root]));
    assert!(matches!(check(of_root.der()), Err(Barred::Authority { .. })));
    assert!(matches!(check(of_middle.der()), Err(Barred::Leaf { .. })));
    assert!(
        check(root.crl(&[&leaf], |_| {}).der()).is_ok(),
        "the root has not signed the leaf"
    );
    // Root and intermediate of one name, each with a list of its own.
    let root = TestCa::named("one name");
    let middle = root.intermediate_named("one name");
    let leaf = super::tests::leaf(&middle);
    let chain = [&leaf, &middle.certificate()];
    let check = |list: &[u8]| lists(&[list]).check(chain.into_iter(), &roots(&[&root]));
    assert!(matches!(
        check(root.crl(&[chain[1]], |_| {}).der()),
        Err(Barred::Authority { .. })
    ));
    assert!(matches!(
        check(middle.crl(&[&leaf], |_| {}).der()),
        Err(Barred::Leaf { .. })
    ));
}

#[test]
fn a_certificate_that_cannot_be_read_is_refused_where_there_are_lists() {
    let ca = TestCa::new();
    let (leaf, junk) = (leaf(&ca), CertificateDer::from(vec![1, 2, 3]));
    let chain = [&leaf, &junk];
    let list = ca.crl(&[], |_| {});
    let checked = lists(&[list.der()]).check(chain.into_iter(), &roots(&[&ca]));
    assert_eq!(checked, Err(Barred::Unreadable));
    assert!(Lists::default().check(chain.into_iter(), &roots(&[&ca])).is_ok());
}

#[test]
fn serial_numbers_are_numbers() {
    let ca = TestCa::new();
    for number in [&[1][..], &[0x7f], &[0x80], &[0xff, 1], &[0xff; 20], &[0, 1]] {
        let certificate = numbered(&ca, number);
        let list = ca.crl(&[&certificate], |_| {});
        let checked = lists(&[list.der()]).check([&certificate].into_iter(), &roots(&[&ca]));
        assert!(matches!(checked, Err(Barred::Leaf { .. })), "{number:?}");
    }
}

#[test]
fn an_overdue_list_and_one_of_a_part_count() {
    let ca = TestCa::new();
    let bad = leaf(&ca);
    let overdue = ca.crl(&[&bad], |params| {
        params.next_update = (std::time::SystemTime::now() - std::time::Duration::from_secs(9)).into()
    });
    let part = ca.crl(&[&bad], |params| {
        params.issuing_distribution_point = point(CrlScope::UserCertsOnly)
    });
    for (list, is_overdue) in [(&overdue, true), (&part, false)] {
        let lists = lists(&[list.der()]);
        assert!(lists.check([&bad].into_iter(), &roots(&[&ca])).is_err());
        let [view] = &*lists.views() else {
            panic!("not one")
        };
        assert_eq!((view.is_overdue, view.revoked), (is_overdue, 1));
        assert!(view.issuer.starts_with("CN=test CA") && view.next_update.is_some());
    }
}

#[test]
fn lists_are_read_in_either_form_and_what_is_bad_is_refused_as_a_whole() {
    let (one, other) = (TestCa::new(), TestCa::new());
    let (one, other) = (one.crl(&[], |_| {}), other.crl(&[], |_| {}));
    let (pem, der) = (
        [one.pem().unwrap(), other.pem().unwrap()],
        [&one.der()[..], &other.der()[..]],
    );
    let changed = |scope, from: &[u8], to: &[u8]| {
        let list = TestCa::new().crl(&[], |params| params.issuing_distribution_point = scope);
        let mut der = list.der().to_vec();
        let at = der.windows(from.len()).position(|part| part == from).unwrap();
        der[at..at + to.len()].copy_from_slice(to);
        der
    };
    // 2.5.29.27 for the list's number, which is not critical here.
    let delta = changed(None, &[0x55, 0x1d, 20], &[0x55, 0x1d, 27]);
    let unknown = changed(
        point(CrlScope::UserCertsOnly),
        &[0x55, 0x1d, 28],
        &[0x55, 0x1d, 99],
    );
    // Tag 4 for tag 1.
    let indirect = changed(point(CrlScope::UserCertsOnly), &[0x81, 1, 0xff], &[0x84, 1, 0xff]);
    // ecdsa-with-SHA256, outside: with a curve's number that there is none of.
    let strange = changed(
        None,
        &[0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 3, 2],
        &[0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 3, 9],
    );
    let strange = {
        let mut der = strange;
        let known = [0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 3, 2];
        let at = der.windows(8).position(|part| part == known).unwrap();
        der[at + 7] = 9;
        der
    };
    let certificate = TestCa::new().certificate();
    let certificate = crate::identity::pem("CERTIFICATE", &certificate);
    let cut = &pem[1][..pem[1].len() / 2];
    let cases: [(&str, Vec<u8>, Result<usize, &str>); 15] = [
        ("PEM", pem[0].clone().into(), Ok(1)),
        ("two in PEM", pem.concat().into(), Ok(2)),
        (
            "with text and others between",
            format!("text\n{}\n{certificate}{}", pem[0], pem[1]).into(),
            Ok(2),
        ),
        ("DER", der[0].to_vec(), Ok(1)),
        ("two in DER", der.concat(), Ok(2)),
        ("nothing", vec![], Err("no revocation list")),
        ("text", b"soon".to_vec(), Err("no revocation list")),
        ("others", certificate.into(), Err("no revocation list")),
        ("cut PEM", format!("{}{cut}", pem[0]).into(), Err("cut off")),
        (
            "cut DER",
            [der[0], &der[1][..40]].concat(),
            Err("list 2 of it: it is cut off"),
        ),
        (
            "junk behind",
            [der[0], b"junk"].concat(),
            Err("what follows is no list"),
        ),
        ("delta", delta, Err("delta")),
        ("unknown", unknown, Err("critical extension")),
        ("indirect", indirect, Err("several authorities")),
        ("strange", strange, Err("not supported")),
    ];
    for (case, content, expected) in cases {
        match (Lists::parse(&content), expected) {
            (Ok(lists), Ok(count)) => assert_eq!(lists.len(), count, "{case}"),
            (Err(error), Err(text)) => assert!(error.to_string().contains(text), "{case}: {error}"),
            (found, _) => panic!("{case}: {found:?}"),
        }
    }
}
