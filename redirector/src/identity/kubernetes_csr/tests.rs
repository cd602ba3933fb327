//! What is asked, and what the answers mean. How it goes with an API server, tests/suites/identity.rs shows.

use super::*;
use crate::control_plane::kubernetes::Cluster;

fn config() -> Config {
    Config {
        signer: "example.com/mesh".to_owned(),
        roots: "/absent/roots.pem".into(),
        approve: false,
        lifetime: Duration::from_secs(3600),
    }
}

#[tokio::test]
async fn the_object_is_as_the_api_has_it() {
    let kubernetes = Kubernetes::new(Cluster::Kubeconfig("/absent".into()));
    let source = KubernetesCsr::new(kubernetes, config());
    let object = source.object("redirector-1", "CSR".to_owned());
    // By hand, from the API's reference; the request is base64 of PEM.
    assert_eq!(
        serde_json::to_value(object).unwrap(),
        json!({
            "apiVersion": "certificates.k8s.io/v1",
            "kind": "CertificateSigningRequest",
            "metadata": {
                "name": "redirector-1",
                "labels": { "app.kubernetes.io/managed-by": "redirector" },
            },
            "spec": {
                "request": "Q1NS",
                "signerName": "example.com/mesh",
                "expirationSeconds": 3600,
                "usages": ["digital signature", "key encipherment", "server auth", "client auth"],
            },
        })
    );
}

#[tokio::test]
async fn without_roots_nothing_is_asked() {
    let kubernetes = Kubernetes::new(Cluster::Kubeconfig("/absent".into()));
    let source = KubernetesCsr::new(kubernetes, config());
    let id = crate::identity::testing::id("web");
    let error = source.issue(&id).await.unwrap_err();
    let text = crate::telemetry::Chain(&error).to_string();
    let expected = format!(
        "certificate for {id}: reading the signer's root certificates in /absent/roots.pem: No such file"
    );
    assert!(text.starts_with(&expected), "{text}");
}

#[test]
fn what_an_object_says_of_its_request() {
    let condition = |kind: &str| json!({ "type": kind, "status": "True", "reason": "R", "message": "M" });
    let waiting = |object: serde_json::Value| match state(object) {
        State::Waiting(state) => state,
        other => panic!("{other:?}"),
    };
    assert!(waiting(json!({})).starts_with("not approved"));
    assert!(waiting(json!({ "conditions": [condition("Other")] })).starts_with("not approved"));
    let approved = json!({ "conditions": [condition("Approved")], "certificate": "" });
    assert_eq!(waiting(approved), "approved and not signed");
    let issued = json!({ "conditions": [condition("Approved")], "certificate": "UEVN" });
    assert_eq!(state(issued), State::Issued(b"PEM".to_vec()));
    for (conditions, expected) in [
        (
            json!([condition("Denied")]),
            State::Ended {
                became: "was denied",
                why: "R: M".to_owned(),
            },
        ),
        (
            // Whatever else is there.
            json!([condition("Approved"), { "type": "Failed" }]),
            State::Ended {
                became: "has failed",
                why: "no reason given: no message given".to_owned(),
            },
        ),
    ] {
        let status = json!({ "conditions": conditions, "certificate": "UEVN" });
        assert_eq!(state(status), expected);
    }
}

fn state(status: serde_json::Value) -> State {
    let mut object = json!({ "metadata": {}, "spec": { "request": "", "signerName": "" }, "status": status });
    if let Some(conditions) = object["status"]["conditions"].as_array_mut() {
        for condition in conditions {
            // The library insists on it.
            condition["status"] = "True".into();
        }
    }
    State::of(serde_json::from_value(object).unwrap())
}

#[test]
fn long_texts_of_others_are_cut() {
    assert_eq!(shortened("short"), "short");
    let long = shortened(&"ä".repeat(1000));
    assert!(long.ends_with("ä...") && long.len() <= TEXT_BYTES + 3, "{long}");
}
