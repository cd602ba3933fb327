use prost::Message as _;

use super::*;
use crate::identity::testing::{TestCa, id};

/// Made from SPIFFE's workload.proto without any library of ours.
const RESPONSE: &str = "0a230a157370696666653a2f2f74642f6e732f612f73612f6212014c1a014b2201522a01681201431a130a0e7370696666653a2f2f6f74686572120142";

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn messages_are_the_workload_api_s() {
    let response = X509SvidResponse {
        svids: vec![X509Svid {
            spiffe_id: "spiffe://td/ns/a/sa/b".into(),
            x509_svid: b"L".into(),
            x509_svid_key: b"K".into(),
            bundle: b"R".into(),
            hint: "h".into(),
        }],
        crl: vec![b"C".into()],
        federated_bundles: [("spiffe://other".to_owned(), b"B".to_vec())].into(),
    };
    assert_eq!(hex(&response.encode_to_vec()), RESPONSE);
    assert_eq!(
        X509SvidResponse::decode(&*response.encode_to_vec()).unwrap(),
        response
    );
    assert!(X509SvidRequest {}.encode_to_vec().is_empty());
    assert!(
        !format!("{response:?}").contains("75"),
        "a key is shown: {response:?}"
    );
}

fn concat(ders: &[CertificateDer<'_>]) -> Vec<u8> {
    ders.iter().flat_map(|der| der.to_vec()).collect()
}

fn told(svid: &Svid) -> X509Svid {
    X509Svid {
        spiffe_id: svid.id.to_string(),
        x509_svid: concat(&svid.chain),
        x509_svid_key: svid.key.secret_der().to_vec(),
        bundle: concat(&svid.roots),
        hint: String::new(),
    }
}

fn response(svids: Vec<X509Svid>) -> X509SvidResponse {
    X509SvidResponse {
        svids,
        ..X509SvidResponse::default()
    }
}

#[test]
fn chains_and_bundles_are_taken_apart() {
    let (ca, next) = (TestCa::new(), TestCa::new());
    let between = ca.intermediate();
    let mut svid = between.svid(&id("web"));
    svid.chain.push(between.certificate());
    svid.roots = vec![ca.certificate(), next.certificate()];
    let mut known = Known::default();
    let snapshot = take(response(vec![told(&svid)]), &mut known);
    let taken = &snapshot.svids[&id("web")];
    assert_eq!((&taken.chain, &taken.roots), (&svid.chain, &svid.roots));
    assert_eq!(snapshot.problem, None);
    for bad in [&b""[..], b"garbage", &[svid.roots[0].as_ref(), b"0"].concat()] {
        assert_eq!(certificates(bad), None);
    }
}

/// What is told, and how a good message is changed.
type Case = (&'static str, fn(&mut X509Svid, &TestCa));

#[test]
fn what_is_wrong_replaces_nothing_and_the_rest_counts() {
    let (ca, other) = (TestCa::new(), TestCa::new());
    let (web, cart) = (ca.svid(&id("web")), ca.svid(&id("cart")));
    let mut known = Known::default();
    let first = take(response(vec![told(&web), told(&cart)]), &mut known);
    let again = take(response(vec![told(&web), told(&cart)]), &mut known);
    for name in ["web", "cart"] {
        assert!(
            Arc::ptr_eq(&first.svids[&id(name)], &again.svids[&id(name)]),
            "the same is no news"
        );
    }
    let renewed = ca.svid(&id("cart"));
    let wrong: [Case; 6] = [
        ("the certificate cannot be read", |svid, _| svid.x509_svid.clear()),
        ("the bundle cannot be read", |svid, _| svid.bundle = b"x".to_vec()),
        ("do not belong together", |svid, _| {
            svid.x509_svid_key = b"x".to_vec()
        }),
        ("do not belong together", |svid, other| {
            svid.x509_svid_key = other.svid(&id("web")).key.secret_der().to_vec();
        }),
        ("do not belong together", |svid, other| {
            svid.bundle = other.certificate().to_vec()
        }),
        ("is for spiffe://cluster.local/ns/shop/sa/cart", |svid, other| {
            *svid = told(&other.svid(&id("cart")));
            svid.spiffe_id = id("web").to_string();
        }),
    ];
    for (why, change) in wrong {
        let mut bad = told(&ca.svid(&id("web")));
        change(&mut bad, &other);
        let snapshot = take(response(vec![bad, told(&renewed)]), &mut known);
        let problem = snapshot.problem.unwrap();
        assert!(problem.contains(why), "{why:?} is not in {problem:?}");
        assert!(
            Arc::ptr_eq(&first.svids[&id("web")], &snapshot.svids[&id("web")]),
            "{why}"
        );
        assert_eq!(snapshot.svids[&id("cart")].chain, renewed.chain);
    }
    // The first of an identity is the default; names of another form are passed over; what is not told is no more.
    let mut foreign = told(&web);
    foreign.spiffe_id = "spiffe://cluster.local/host".into();
    let snapshot = take(response(vec![foreign, told(&renewed), told(&cart)]), &mut known);
    assert_eq!(snapshot.svids.keys().collect::<Vec<_>>(), [&id("cart")]);
    assert_eq!(snapshot.svids[&id("cart")].chain, renewed.chain);
    // Nor is that a problem of the others.
    assert_eq!(snapshot.problem, None);
    assert!(known.strangers.iter().eq(["spiffe://cluster.local/host"]));
}

#[test]
fn a_peer_of_a_federated_domain_must_lead_to_that_domain_s_bundle() {
    use std::time::SystemTime;

    let (ca, abroad) = (TestCa::new(), TestCa::new());
    let foreign = SpiffeId::new("other.domain", "shop", "cart").unwrap();
    let credentials = |ca: &TestCa, id: &SpiffeId, others: &[(&str, &TestCa)]| {
        let others = others
            .iter()
            .map(|(domain, ca)| (format!("spiffe://{domain}"), ca.certificate().to_vec()));
        let message = X509SvidResponse {
            federated_bundles: others.collect(),
            ..response(vec![told(&ca.svid(id))])
        };
        let snapshot = take(message, &mut Known::default());
        Credentials::new(&snapshot.svids[id]).unwrap()
    };
    let own = [("cluster.local", &ca)];
    let theirs = [("other.domain", &abroad)];
    let web = credentials(&ca, &id("web"), &theirs);
    for (what, server, meets) in [
        ("federated", credentials(&abroad, &foreign, &own), true),
        (
            "of our own root, in their name",
            credentials(&ca, &foreign, &[]),
            false,
        ),
        (
            "of their root, in our name",
            credentials(&abroad, &id("cart"), &own),
            false,
        ),
        ("ours", credentials(&ca, &id("cart"), &[]), true),
        (
            "federated by us alone",
            credentials(&abroad, &foreign, &[]),
            false,
        ),
    ] {
        let forth = web.would_meet(&server, SystemTime::now());
        let back = server.would_meet(&web, SystemTime::now());
        assert_eq!(
            (forth.is_ok(), back.is_ok()),
            (meets, meets),
            "{what}: {forth:?} {back:?}"
        );
    }
}
