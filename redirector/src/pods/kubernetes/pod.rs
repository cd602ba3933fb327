//! A pod as Kubernetes' API has it, cut down to what matters here.
//!
//! Only what is used is read, and nothing but the names must be there: a pod with a field that this program does not understand is
//! no reason to lose sight of the others.

use std::{collections::BTreeMap, net::IpAddr};

use kube::core::Object;
use serde::Deserialize;

use super::enablement::{Candidate, Labels, SIDECAR};
use crate::{
    mesh::pod::{PodInfo, PodUid},
    redirect::overrides::Overrides,
    telemetry::Chain,
};

/// Kubelet's annotation of the API's image of a pod that it has from a file: the UID under which it runs.
const MIRROR: &str = "kubernetes.io/config.mirror";

/// The annotation that says of a captured pod what its capture lacks.
pub(super) const IMPAIRED: &str = "redirector.io/impaired";

/// The object, as it is read.
pub(super) type Wire = Object<Spec, Status>;

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Spec {
    service_account_name: Option<String>,
    host_network: Option<bool>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Status {
    phase: Option<String>,
    #[serde(rename = "podIP")]
    pod_ip: Option<String>,
    #[serde(rename = "podIPs")]
    pod_ips: Option<Vec<PodIp>>,
}

#[derive(Debug, Clone, Deserialize)]
struct PodIp {
    ip: Option<String>,
}

/// A pod of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownPod {
    /// Who it is.
    pub info: PodInfo,
    /// The UID under which kubelet runs it, where that is another: a static pod's.
    pub local_uid: Option<PodUid>,
    /// Its labels.
    pub labels: Labels,
    /// It is in the node's network namespace.
    pub host_network: bool,
    /// It has a proxy of its own.
    pub sidecar: bool,
    /// Its containers have ended, and are not started again.
    pub ended: bool,
    /// It is being deleted.
    pub deleting: bool,
    /// Its addresses, once kubelet has told of them: after its network was made.
    pub addresses: Vec<IpAddr>,
    /// What its annotations say of its rules, or what is wrong with them.
    pub rules: Result<Overrides, String>,
    /// What its annotation tells of its capture.
    pub told: Option<String>,
    /// What it tells that this lacks.
    pub impaired: Option<String>,
}

impl KnownPod {
    /// Of an object; `annotation` is the one that tells of its capture.
    ///
    /// # Errors
    /// What makes it unusable.
    pub(super) fn of(object: Wire, annotation: &str) -> Result<Self, String> {
        let Object {
            metadata,
            spec,
            status,
            ..
        } = object;
        let status = status.unwrap_or_default();
        let missing = |key: &str| format!("it has no {key}");
        let uid = metadata.uid.ok_or_else(|| missing("uid"))?;
        let annotations = metadata.annotations.unwrap_or_default();
        let listed = status
            .pod_ips
            .unwrap_or_default()
            .into_iter()
            .filter_map(|ip| ip.ip);
        let mut addresses: Vec<IpAddr> = Vec::new();
        for text in listed.chain(status.pod_ip) {
            let address: IpAddr = text
                .parse()
                .map_err(|_| format!("its address {text:?} is none"))?;
            if !addresses.contains(&address.to_canonical()) {
                addresses.push(address.to_canonical());
            }
        }
        let service_account = spec.service_account_name.filter(|name| !name.is_empty());
        Ok(Self {
            info: PodInfo {
                uid: uid.parse().map_err(|error| Chain(&error).to_string())?,
                name: metadata.name.ok_or_else(|| missing("name"))?,
                namespace: metadata.namespace.ok_or_else(|| missing("namespace"))?,
                service_account: service_account.unwrap_or_else(|| "default".to_owned()),
            },
            local_uid: annotations.get(MIRROR).and_then(|uid| uid.parse().ok()),
            labels: metadata.labels.unwrap_or_default(),
            host_network: spec.host_network.unwrap_or(false),
            sidecar: annotations.contains_key(SIDECAR),
            ended: matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")),
            deleting: metadata.deletion_timestamp.is_some(),
            addresses,
            rules: rules(&annotations),
            told: annotations.get(annotation).cloned(),
            impaired: annotations.get(IMPAIRED).cloned(),
        })
    }

    /// What of it decides.
    pub(super) fn candidate(&self) -> Candidate<'_> {
        Candidate {
            namespace: &self.info.namespace,
            labels: &self.labels,
            host_network: self.host_network,
            sidecar: self.sidecar,
        }
    }

    /// Whether a UID that the node uses is this pod's.
    pub(super) fn has_uid(&self, uid: &PodUid) -> bool {
        self.info.uid == *uid || self.local_uid.as_ref() == Some(uid)
    }
}

fn rules(annotations: &BTreeMap<String, String>) -> Result<Overrides, String> {
    Overrides::from_annotations(annotations).map_err(|error| Chain(&error).to_string())
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// A pod as the API tells of it, with `more` over it.
    pub(in super::super) fn pod(name: &str, more: Value) -> KnownPod {
        let mut object = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": name, "namespace": "shop", "uid": format!("uid-{name}"), "annotations": {} },
            "spec": { "nodeName": "n", "containers": [{ "name": "app", "image": "app" }] },
            "status": { "phase": "Running", "podIP": "10.0.0.1", "podIPs": [{ "ip": "10.0.0.1" }, { "ip": "fd00::1" }] },
        });
        merge(&mut object, more);
        KnownPod::of(serde_json::from_value(object).unwrap(), "example.com/told").unwrap()
    }

    fn merge(into: &mut Value, from: Value) {
        match (into, from) {
            (Value::Object(into), Value::Object(from)) => {
                for (key, value) in from {
                    merge(into.entry(key).or_insert(Value::Null), value);
                }
            }
            (into, from) => *into = from,
        }
    }

    #[test]
    fn what_matters_is_read() {
        let known = pod(
            "web",
            json!({
                "metadata": {
                    "labels": { "a": "b" },
                    "annotations": {
                        "example.com/told": "enabled", "kubernetes.io/config.mirror": "abc", SIDECAR: "{}",
                        "redirector.io/strict": "true", "redirector.io/impaired": "why",
                    },
                    "deletionTimestamp": "2026-01-01T00:00:00Z",
                },
                "spec": { "serviceAccountName": "web", "hostNetwork": true, "unheardOf": [1] },
                "status": { "phase": "Failed", "podIPs": null },
            }),
        );
        assert_eq!(
            (known.info.name.as_str(), known.info.service_account.as_str()),
            ("web", "web")
        );
        assert_eq!(known.labels["a"], "b");
        assert!(known.host_network && known.sidecar && known.ended && known.deleting);
        assert_eq!(known.addresses, ["10.0.0.1".parse::<IpAddr>().unwrap()]);
        assert_eq!(known.rules.as_ref().unwrap().strict, Some(true));
        assert_eq!(known.told.as_deref(), Some("enabled"));
        assert_eq!(known.impaired.as_deref(), Some("why"));
        assert!(known.has_uid(&"abc".parse().unwrap()) && known.has_uid(&"uid-web".parse().unwrap()));
    }

    #[test]
    fn what_is_not_there_has_its_default() {
        let known = pod("web", json!({ "status": null }));
        assert_eq!(known.info.service_account, "default");
        assert!(!known.host_network && !known.sidecar && !known.ended && !known.deleting);
        assert!(known.addresses.is_empty());
        assert_eq!(pod("web", json!({})).addresses.len(), 2);
    }

    #[test]
    fn annotations_that_are_wrong_are_kept_for_who_asks() {
        let more = json!({ "metadata": { "annotations": { "redirector.io/strict": "maybe" } } });
        assert!(
            pod("web", more)
                .rules
                .unwrap_err()
                .contains("redirector.io/strict")
        );
    }
}
