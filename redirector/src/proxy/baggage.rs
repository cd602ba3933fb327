//! What proxies tell each other of the workloads at a connection's ends, for labels: the `baggage` header.
//!
//! The keys are Istio's. What comes from a peer is its own word, and good for logs alone.

use std::sync::{Arc, Mutex, PoisonError};

use http::{HeaderMap, HeaderValue};

use crate::mesh::workload::Workload;

/// Name of the header.
pub const BAGGAGE: &str = "baggage";

/// Longest value, in characters, that is taken from a peer; names in Kubernetes have 253 characters at most.
pub const MAX_VALUE: usize = 253;

/// A workload as a header. `None` when nothing is known of it, or what is known cannot be in a header: it serves labels only.
fn header(workload: &Workload) -> Option<HeaderValue> {
    let workload_key = format!("k8s.{}.name", workload.workload_type);
    let members = [
        ("k8s.cluster.name", &workload.cluster_id),
        ("k8s.namespace.name", &workload.namespace),
        (workload_key.as_str(), &workload.workload_name),
        ("service.name", &workload.canonical_name),
        ("service.version", &workload.canonical_revision),
        ("cloud.region", &workload.locality.region),
        ("cloud.availability_zone", &workload.locality.zone),
    ];
    let text = members
        .into_iter()
        .filter(|(_, value)| !value.is_empty())
        .map(|(key, value)| format!("{key}={value}"))
        .collect::<Vec<_>>()
        .join(",");
    HeaderValue::try_from(text).ok().filter(|text| !text.is_empty())
}

/// The header of the local pod's workload, made once for as long as the mesh holds the same.
#[derive(Debug, Default)]
pub(super) struct OwnBaggage(Mutex<Option<(Arc<Workload>, Option<HeaderValue>)>>);

impl OwnBaggage {
    pub(super) fn header(&self, own: &Arc<Workload>) -> Option<HeaderValue> {
        let mut made = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match &*made {
            Some((of, header)) if Arc::ptr_eq(of, own) => header.clone(),
            _ => {
                let header = header(own);
                *made = Some((Arc::clone(own), header.clone()));
                header
            }
        }
    }
}

/// What a peer says of a workload, as far as it is of use here.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Told {
    /// Kubernetes namespace.
    pub namespace: Option<String>,
    /// Name of the controller, or of the pod.
    pub workload: Option<String>,
}

impl Told {
    /// From all `baggage` headers together; of a key that comes again, the last one counts.
    pub fn by(headers: &HeaderMap) -> Self {
        let mut told = Self::default();
        let texts = headers
            .get_all(BAGGAGE)
            .iter()
            .filter_map(|value| value.to_str().ok());
        for member in texts.flat_map(|text| text.split(',')) {
            let Some((key, value)) = member.split_once('=') else {
                continue;
            };
            let value: String = value.trim().chars().take(MAX_VALUE).collect();
            let value = Some(value).filter(|value| !value.is_empty());
            match key.trim() {
                "k8s.namespace.name" => told.namespace = value,
                "k8s.deployment.name" | "k8s.cronjob.name" | "k8s.pod.name" | "k8s.job.name" => {
                    told.workload = value;
                }
                _ => {}
            }
        }
        told
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::testing::workload;

    #[test]
    fn all_that_is_known_is_told_in_istio_s_order() {
        let mut web = workload("web-0", "10.0.0.1");
        web.cluster_id = "Kubernetes".into();
        web.workload_name = "web".into();
        web.canonical_name = "web".into();
        assert_eq!(
            header(&web).unwrap(),
            "k8s.cluster.name=Kubernetes,k8s.namespace.name=shop,k8s.deployment.name=web,service.name=web"
        );
        web.workload_type = "cronjob";
        web.canonical_revision = "v1".into();
        web.locality.region = "r".into();
        web.locality.zone = "z".into();
        assert_eq!(
            header(&web).unwrap(),
            "k8s.cluster.name=Kubernetes,k8s.namespace.name=shop,k8s.cronjob.name=web,service.name=web,\
             service.version=v1,cloud.region=r,cloud.availability_zone=z"
        );
        web.canonical_name = "we\nb".into();
        assert_eq!(header(&web), None);
    }

    #[test]
    fn it_is_made_anew_for_a_new_workload_only() {
        let own = OwnBaggage::default();
        let [first, second] = ["a", "b"].map(|name| {
            let mut made = workload(name, "10.0.0.1");
            made.workload_name = name.into();
            Arc::new(made)
        });
        for (workload, says) in [(&first, "name=a"), (&first, "name=a"), (&second, "name=b")] {
            let header = own.header(workload).unwrap();
            assert!(header.to_str().unwrap().ends_with(says), "{header:?}");
        }
    }

    #[test]
    fn peers_may_say_anything() {
        let long = format!("k8s.pod.name={}", "x".repeat(1000));
        for (given, namespace, workload) in [
            (&[][..], None, None),
            (
                &["k8s.namespace.name=shop,k8s.pod.name=web,x=y"],
                Some("shop"),
                Some("web"),
            ),
            (
                &["k8s.namespace.name=a,k8s.job.name=b", "k8s.namespace.name=c"],
                Some("c"),
                Some("b"),
            ),
            (&["k8s.namespace.name=a,k8s.namespace.name="], None, None),
            (
                &[" k8s.namespace.name = a ,,=,k8s.deployment.name"],
                Some("a"),
                None,
            ),
            (&["k8s.pod.name=a=b"], None, Some("a=b")),
            (&[&long], None, Some(&long[13..13 + MAX_VALUE])),
        ] {
            let mut headers = HeaderMap::new();
            for value in given {
                headers.append(BAGGAGE, value.parse().unwrap());
            }
            let told = Told::by(&headers);
            assert_eq!(
                (told.namespace.as_deref(), told.workload.as_deref()),
                (namespace, workload),
                "{given:?}"
            );
        }
    }
}
