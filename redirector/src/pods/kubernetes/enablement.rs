//! Which pods are in the mesh: pairs of label selectors, and what is never enrolled whatever its labels. Pure.
//!
//! Names and defaults are Istio's (cni/pkg/util/podutil.go, manifests/charts/istio-cni).

use std::{collections::BTreeMap, fmt, str::FromStr};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::core::{Selector, SelectorExt as _};
use serde::Deserialize;

/// The labels of a pod or a namespace.
pub type Labels = BTreeMap<String, String>;

/// The annotation of pods that have a proxy of their own beside the application.
pub(super) const SIDECAR: &str = "sidecar.istio.io/status";

const DEFAULT: &str = "
- podSelector: {matchLabels: {istio.io/dataplane-mode: ambient}}
- podSelector: {matchExpressions: [{key: istio.io/dataplane-mode, operator: NotIn, values: [none]}]}
  namespaceSelector: {matchLabels: {istio.io/dataplane-mode: ambient}}
";

/// What decides.
#[derive(Debug, Clone)]
pub struct Enablement {
    /// Either pair is enough.
    pub selectors: Selectors,
    /// Namespaces of which no pod is enrolled.
    pub excluded: Vec<String>,
    /// Namespaces where a pod with the label `app: ztunnel` is the mesh's own proxy.
    pub system: Vec<String>,
}

/// Pairs of selectors, for a pod and for its namespace.
#[derive(Debug, Clone)]
pub struct Selectors(Vec<(Selector, Selector)>);

/// What of a pod decides.
#[derive(Debug, Clone, Copy)]
pub struct Candidate<'a> {
    /// Its Kubernetes namespace.
    pub namespace: &'a str,
    /// Its labels.
    pub labels: &'a Labels,
    /// It is in the node's network namespace.
    pub host_network: bool,
    /// It has a proxy of its own.
    pub sidecar: bool,
}

/// Why a pod is not in the mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Left {
    /// It is in the node's network namespace.
    HostNetwork,
    /// It has a proxy of its own.
    Sidecar,
    /// Its namespace is excluded.
    Excluded,
    /// It is the mesh's own.
    Proxy,
    /// No pair of selectors matches its labels and its namespace's.
    Labels,
}

impl fmt::Display for Left {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::HostNetwork => "it uses the node's network",
            Self::Sidecar => "it has a sidecar (annotation sidecar.istio.io/status)",
            Self::Excluded => "its namespace is excluded (EXCLUDE_NAMESPACES)",
            Self::Proxy => "it is the mesh's own proxy",
            Self::Labels => "its labels and its namespace's do not ask for it",
        })
    }
}

impl Enablement {
    /// Whether a pod is in the mesh, or why not; `labels` are those of its namespace.
    pub fn decide(&self, pod: Candidate<'_>, labels: &Labels) -> Result<(), Left> {
        let is_among = |names: &[String]| names.iter().any(|name| name == pod.namespace);
        if pod.host_network {
            return Err(Left::HostNetwork);
        }
        if pod.sidecar {
            return Err(Left::Sidecar);
        }
        if is_among(&self.excluded) {
            return Err(Left::Excluded);
        }
        if is_among(&self.system) && pod.labels.get("app").is_some_and(|app| app == "ztunnel") {
            return Err(Left::Proxy);
        }
        let Selectors(pairs) = &self.selectors;
        let wanted = |(of_pod, of_namespace): &(Selector, Selector)| {
            of_pod.matches(pod.labels) && of_namespace.matches(labels)
        };
        if pairs.iter().any(wanted) {
            Ok(())
        } else {
            Err(Left::Labels)
        }
    }
}

impl Default for Selectors {
    /// Istio's: pods that ask for it, and those in namespaces that ask for it which don't refuse.
    fn default() -> Self {
        DEFAULT.parse().expect("a test reads it")
    }
}

/// Why a text is no [`Selectors`].
#[derive(Debug, thiserror::Error)]
pub enum InvalidSelectors {
    /// It is no list of pairs.
    #[error(
        "not a list in YAML of podSelector and namespaceSelector, each with matchLabels and matchExpressions"
    )]
    Yaml(#[source] serde_yaml::Error),
    /// A pair has an expression that means nothing.
    #[error(
        "pair {position}: {source}: operators are In and NotIn with values, Exists and DoesNotExist without"
    )]
    Expression {
        /// Which pair, from 1.
        position: usize,
        /// What is wrong.
        source: kube::core::ParseExpressionError,
    },
    /// Nothing would match.
    #[error("an empty list enrols no pod: give at least one pair, or switch off KUBERNETES_PODS")]
    Empty,
}

/// A pair. Keys that nobody knows are refused: a selector that is left out, or misspelt, matches everything.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Pair {
    #[serde(default)]
    pod_selector: Written,
    #[serde(default)]
    namespace_selector: Written,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct Written {
    match_labels: Labels,
    match_expressions: Vec<Requirement>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Requirement {
    key: String,
    operator: String,
    values: Option<Vec<String>>,
}

impl Written {
    fn selector(self) -> Result<Selector, kube::core::ParseExpressionError> {
        use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelectorRequirement;
        let requirements = self
            .match_expressions
            .into_iter()
            .map(|written| LabelSelectorRequirement {
                key: written.key,
                operator: written.operator,
                values: written.values,
            });
        LabelSelector {
            match_labels: Some(self.match_labels),
            match_expressions: Some(requirements.collect()),
        }
        .try_into()
    }
}

impl FromStr for Selectors {
    type Err = InvalidSelectors;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let pairs: Vec<Pair> = serde_yaml::from_str(text).map_err(InvalidSelectors::Yaml)?;
        if pairs.is_empty() {
            return Err(InvalidSelectors::Empty);
        }
        let selectors = pairs.into_iter().enumerate().map(|(index, pair)| {
            let selectors = pair
                .pod_selector
                .selector()
                .and_then(|pod| Ok((pod, pair.namespace_selector.selector()?)));
            selectors.map_err(|source| InvalidSelectors::Expression {
                position: index + 1,
                source,
            })
        });
        selectors.collect::<Result<_, _>>().map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(text: &str) -> Labels {
        let pairs = text.split(',').filter_map(|pair| pair.split_once('='));
        pairs
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .collect()
    }

    fn decide(selectors: Selectors, pod: &str, namespace: &str) -> bool {
        let enablement = Enablement {
            selectors,
            excluded: Vec::new(),
            system: Vec::new(),
        };
        let candidate = Candidate {
            namespace: "shop",
            labels: &labels(pod),
            host_network: false,
            sidecar: false,
        };
        enablement.decide(candidate, &labels(namespace)).is_ok()
    }

    #[test]
    fn by_default_istios_labels_decide() {
        const MODE: &str = "istio.io/dataplane-mode";
        for (pod, namespace, expected) in [
            ("", "", false),
            ("", "ambient", true),
            ("ambient", "", true),
            ("ambient", "none", true),
            ("none", "ambient", false),
            ("", "none", false),
            ("other", "ambient", true),
            ("other", "", false),
        ] {
            let label = |value: &str| match value {
                "" => String::new(),
                value => format!("{MODE}={value}"),
            };
            let decided = decide(Selectors::default(), &label(pod), &label(namespace));
            assert_eq!(decided, expected, "pod {pod:?} in namespace {namespace:?}");
        }
    }

    #[test]
    fn what_is_never_enrolled_is_told() {
        let enablement = Enablement {
            selectors: "- {}".parse().unwrap(),
            excluded: vec!["kube-system".into()],
            system: vec!["istio-system".into()],
        };
        let ztunnel = labels("app=ztunnel");
        let none = Labels::new();
        let pod = |namespace, labels| Candidate {
            namespace,
            labels,
            host_network: false,
            sidecar: false,
        };
        for (candidate, expected) in [
            (pod("shop", &none), Ok(())),
            (pod("shop", &ztunnel), Ok(())),
            (pod("istio-system", &none), Ok(())),
            (pod("istio-system", &ztunnel), Err(Left::Proxy)),
            (pod("kube-system", &none), Err(Left::Excluded)),
            (
                Candidate {
                    host_network: true,
                    ..pod("shop", &none)
                },
                Err(Left::HostNetwork),
            ),
            (
                Candidate {
                    sidecar: true,
                    ..pod("shop", &none)
                },
                Err(Left::Sidecar),
            ),
        ] {
            assert_eq!(enablement.decide(candidate, &none), expected, "{candidate:?}");
        }
    }

    #[test]
    fn selectors_are_read_as_kubernetes_reads_them() {
        for (text, pod, namespace, expected) in [
            ("- {}", "", "", true),
            ("- podSelector: {matchLabels: {a: b, c: d}}", "a=b", "", false),
            ("- podSelector: {matchLabels: {a: b, c: d}}", "a=b,c=d", "", true),
            (
                "- namespaceSelector: {matchExpressions: [{key: a, operator: Exists}]}",
                "a=b",
                "",
                false,
            ),
            (
                "- namespaceSelector: {matchExpressions: [{key: a, operator: Exists}]}",
                "",
                "a=b",
                true,
            ),
            (
                "- podSelector: {matchExpressions: [{key: a, operator: DoesNotExist}]}",
                "a=b",
                "",
                false,
            ),
            (
                "- podSelector: {matchExpressions: [{key: a, operator: In, values: [b, c]}]}",
                "a=c",
                "",
                true,
            ),
            (
                "[{podSelector: {matchLabels: {a: b}}}, {namespaceSelector: {matchLabels: {c: d}}}]",
                "",
                "c=d",
                true,
            ),
        ] {
            assert_eq!(decide(text.parse().unwrap(), pod, namespace), expected, "{text}");
        }
    }

    #[test]
    fn selectors_that_would_say_something_else_are_refused() {
        for (text, expected) in [
            ("[]", "enrols no pod"),
            ("{}", "not a list"),
            ("- podSelecter: {matchLabels: {a: b}}", "not a list"),
            ("- podSelector: {matchLabel: {a: b}}", "not a list"),
            (
                "- podSelector: {matchExpressions: [{key: a, operator: in, values: [b]}]}",
                "pair 1",
            ),
            (
                "[{}, {podSelector: {matchExpressions: [{key: a, operator: In}]}}]",
                "pair 2",
            ),
        ] {
            let error = text.parse::<Selectors>().unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
