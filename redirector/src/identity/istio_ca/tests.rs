use prost::Message as _;
use rcgen::PublicKeyData as _;
use x509_parser::{certification_request::X509CertificationRequest, prelude::FromDer as _};

use super::*;
use crate::identity::{
    SvidPem,
    testing::{TestCa, id},
    tls::Credentials,
};

/// Made by Google's Python library from tests/proto/ca.proto.
const REQUEST: &str = "0a034353521880a30522310a2f0a14496d706572736f6e617465644964656e7469747912171a157370696666653a2f2f74642f6e732f612f73612f62";
const RESPONSE: &str = "0a014c0a0152";

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn the_request_asks_for_the_identity_and_for_nothing_else() {
    let id = SpiffeId::new("td", "a", "b").unwrap();
    let (key, mut made) = request(&id, Duration::from_secs(86_400)).unwrap();
    let (_, pem) = x509_parser::pem::parse_x509_pem(made.csr.as_bytes()).unwrap();
    assert_eq!(pem.label, "CERTIFICATE REQUEST");
    let (_, csr) = X509CertificationRequest::from_der(&pem.contents).unwrap();
    csr.verify_signature().unwrap();
    let info = &csr.certification_request_info;
    assert_eq!(info.subject.iter().count(), 0);
    assert_eq!(info.subject_pki.raw, key.subject_public_key_info());
    let sans: Vec<_> = csr
        .requested_extensions()
        .unwrap()
        .filter_map(|extension| match extension {
            x509_parser::extensions::ParsedExtension::SubjectAlternativeName(sans) => Some(sans),
            _ => None,
        })
        .flat_map(|sans| sans.general_names.iter().map(ToString::to_string))
        .collect();
    assert_eq!(sans, ["URI(spiffe://td/ns/a/sa/b)"]);
    let (other, _) = request(&id, Duration::from_secs(1)).unwrap();
    assert_ne!(other.serialize_der(), key.serialize_der());

    made.csr = "CSR".into();
    assert_eq!(hex(&made.encode_to_vec()), REQUEST);
    let response = IstioCertificateResponse {
        cert_chain: vec!["L".into(), "R".into()],
    };
    assert_eq!(hex(&response.encode_to_vec()), RESPONSE);
}

fn answer(parts: &[&str]) -> IstioCertificateResponse {
    IstioCertificateResponse {
        cert_chain: parts.iter().map(|part| (*part).to_owned()).collect(),
    }
}

#[test]
fn the_last_of_the_chain_is_the_roots_however_many() {
    let (root, other) = (TestCa::new(), TestCa::new());
    let intermediate = root.intermediate();
    let web = id("web");
    let svid_of = intermediate.svid(&web);
    let SvidPem { chain: leaf, .. } = svid_of.to_pem();
    let pem = |ca: &TestCa| ca.svid(&web).to_pem().roots;
    let (between, roots) = (pem(&intermediate), pem(&root) + &pem(&other));
    let rustls_pki_types::PrivateKeyDer::Pkcs8(key) = &svid_of.key else {
        panic!("another kind of key");
    };
    let key = KeyPair::try_from(key.secret_pkcs8_der()).unwrap();
    let made = svid(&web, &key, &answer(&[&leaf, &between, &roots])).unwrap();
    assert_eq!((made.chain.len(), made.roots.len()), (2, 2));
    let life = made.not_after.duration_since(made.not_before).unwrap();
    assert!((3600..=3720).contains(&life.as_secs()), "{life:?}");
    Credentials::new(&made).unwrap();

    // In another order, or without what lies between, it does not hold together.
    let swapped = svid(&web, &key, &answer(&[&between, &leaf, &roots])).unwrap();
    assert!(Credentials::new(&swapped).is_err());
    let short = svid(&web, &key, &answer(&[&leaf, &roots])).unwrap();
    assert!(Credentials::new(&short).is_err());
    let strange = svid(
        &web,
        &KeyPair::generate().unwrap(),
        &answer(&[&leaf, &between, &roots]),
    )
    .unwrap();
    assert!(Credentials::new(&strange).is_err());

    for (parts, problem) in [
        (vec![], "no certificate"),
        (vec![&*leaf], "no root"),
        (vec![&*leaf, ""], "no root"),
        (vec!["", &*roots], "no certificate"),
        (
            vec![
                &*leaf,
                "-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n",
            ],
            "cannot be read",
        ),
        (
            vec![
                "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
                &*roots,
            ],
            "cannot be read",
        ),
    ] {
        let error = svid(&web, &key, &answer(&parts)).unwrap_err().to_string();
        assert!(error.contains(problem), "{error:?} without {problem:?}");
    }
}
