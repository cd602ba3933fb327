//! Which nodes a DaemonSet wants a pod on: by the labels of its nodeSelector and by the affinity that scheduling requires, as
//! Kubernetes' API describes both (core/v1, `PodSpec.nodeSelector` and `NodeSelector`). Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{NodeSelectorRequirement, NodeSelectorTerm, PodSpec};

type Labels = BTreeMap<String, String>;

/// What a pod's specification asks of its node.
pub(super) struct Wanted<'a> {
    selector: Option<&'a Labels>,
    terms: Option<&'a [NodeSelectorTerm]>,
}

impl<'a> Wanted<'a> {
    pub(super) fn of(pod: &'a PodSpec) -> Self {
        let affinity = pod
            .affinity
            .as_ref()
            .and_then(|affinity| affinity.node_affinity.as_ref());
        let required =
            affinity.and_then(|node| node.required_during_scheduling_ignored_during_execution.as_ref());
        Self {
            selector: pod.node_selector.as_ref().filter(|selector| !selector.is_empty()),
            terms: required.map(|selector| &selector.node_selector_terms[..]),
        }
    }

    /// Whether any node will do.
    pub(super) fn is_anywhere(&self) -> bool {
        self.selector.is_none() && self.terms.is_none()
    }

    /// What the node `name` would have to be and is not.
    pub(super) fn unmet(&self, name: &str, labels: &Labels) -> Option<String> {
        let mut selector = self.selector.into_iter().flatten();
        let unmet = selector.find(|(key, value)| labels.get(*key) != Some(value));
        if let Some((key, value)) = unmet {
            return Some(format!("{key}={value}"));
        }
        let terms = self.terms?;
        let fits = terms.iter().any(|term| fits(term, name, labels));
        (!fits).then(|| "what its nodeAffinity requires".to_owned())
    }
}

/// One term; an empty one fits no node.
fn fits(term: &NodeSelectorTerm, name: &str, labels: &Labels) -> bool {
    let (expressions, fields) = (
        term.match_expressions.as_deref().unwrap_or_default(),
        term.match_fields.as_deref().unwrap_or_default(),
    );
    let field = |one: &NodeSelectorRequirement| (one.key == "metadata.name").then_some(name);
    (!expressions.is_empty() || !fields.is_empty())
        && expressions
            .iter()
            .all(|one| holds(one, labels.get(&one.key).map(String::as_str)))
        && fields.iter().all(|one| holds(one, field(one)))
}

/// One requirement on a value, which may be missing. What cannot be understood holds: nothing is removed for that.
fn holds(requirement: &NodeSelectorRequirement, value: Option<&str>) -> bool {
    let values = requirement.values.as_deref().unwrap_or_default();
    let is_among = value.is_some_and(|value| values.iter().any(|one| one == value));
    let number = |text: &str| text.parse::<i64>().ok();
    let numbers = || {
        value
            .and_then(number)
            .zip(values.first().and_then(|text| number(text)))
    };
    match requirement.operator.as_str() {
        "In" => is_among,
        "NotIn" => !is_among,
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => numbers().is_some_and(|(value, bound)| value > bound),
        "Lt" => numbers().is_some_and(|(value, bound)| value < bound),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_node_is_wanted_by_every_label_and_one_of_the_terms() {
        let labels: Labels = [("os", "linux"), ("mesh", "on"), ("cpus", "8")]
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into();
        let terms = |terms: Value| {
            json!({ "affinity": { "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": { "nodeSelectorTerms": terms } } } })
        };
        let expression = |key: &str, operator: &str, values: &[&str]| {
            terms(json!([{ "matchExpressions": [{ "key": key, "operator": operator, "values": values }] }]))
        };
        let required = Some("what its nodeAffinity requires");
        for (pod, expected) in [
            (json!({}), None),
            (json!({ "nodeSelector": {} }), None),
            (json!({ "nodeSelector": { "os": "linux", "mesh": "on" } }), None),
            (
                json!({ "nodeSelector": { "os": "linux", "mesh": "off" } }),
                Some("mesh=off"),
            ),
            (json!({ "nodeSelector": { "zone": "a" } }), Some("zone=a")),
            (expression("mesh", "In", &["off", "on"]), None),
            (expression("mesh", "In", &["off"]), required),
            (expression("zone", "In", &["a"]), required),
            (expression("mesh", "NotIn", &["off"]), None),
            (expression("mesh", "NotIn", &["on"]), required),
            (expression("zone", "NotIn", &["a"]), None),
            (expression("mesh", "Exists", &[]), None),
            (expression("zone", "Exists", &[]), required),
            (expression("zone", "DoesNotExist", &[]), None),
            (expression("mesh", "DoesNotExist", &[]), required),
            (expression("cpus", "Gt", &["4"]), None),
            (expression("cpus", "Gt", &["8"]), required),
            (expression("cpus", "Lt", &["9"]), None),
            (expression("mesh", "Lt", &["9"]), required),
            (expression("mesh", "Newer", &["9"]), None),
            (terms(json!([])), required),
            (terms(json!([{}])), required),
            (
                terms(
                    json!([{}, { "matchFields": [{ "key": "metadata.name", "operator": "In", "values": ["n"] }] }]),
                ),
                None,
            ),
            (
                terms(
                    json!([{ "matchFields": [{ "key": "metadata.name", "operator": "NotIn", "values": ["n"] }] }]),
                ),
                required,
            ),
        ] {
            let mut whole = pod.clone();
            whole["containers"] = json!([]);
            let spec: PodSpec = serde_json::from_value(whole).unwrap();
            let wanted = Wanted::of(&spec);
            assert_eq!(wanted.unmet("n", &labels).as_deref(), expected, "{pod}");
            assert!(expected.is_none() || !wanted.is_anywhere(), "{pod}");
        }
    }
}
