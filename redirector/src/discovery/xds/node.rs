//! Who the agent is to a control plane: what Istio reads of a ztunnel's node.

use std::collections::BTreeMap;

use prost_types::{Struct, Value, value::Kind};

use super::super::proto::messages::Node;

/// What a control plane is told of the agent. Its names are those of Kubernetes' downward API.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Identity {
    /// The agent's own pod.
    pub pod_name: String,
    /// Its namespace.
    pub pod_namespace: String,
    /// Its address.
    pub instance_ip: String,
    /// The node, by which the control plane chooses what is told first.
    pub node_name: String,
    /// More, by name: a text, or any JSON.
    pub metadata: BTreeMap<String, serde_json::Value>,
}

/// An address for those who have none. ztunnel's (`xds/client.rs`).
const NO_ADDRESS: &str = "1.1.1.1";

impl Identity {
    /// As it is sent.
    pub(super) fn node(&self) -> Node {
        let ip = match self.instance_ip.as_str() {
            "" => NO_ADDRESS,
            ip => ip,
        };
        let (name, namespace) = (&self.pod_name, &self.pod_namespace);
        let own = [
            ("NAME", name),
            ("NAMESPACE", namespace),
            ("INSTANCE_IPS", &self.instance_ip),
            ("NODE_NAME", &self.node_name),
        ];
        let own = own.map(|(name, text)| (name.to_owned(), Kind::StringValue(text.clone())));
        let more = self
            .metadata
            .iter()
            .map(|(name, json)| (name.clone(), kind(json)));
        let fields = own.into_iter().chain(more);
        Node {
            // The cluster's domain is always this one there.
            id: format!("ztunnel~{ip}~{name}.{namespace}~{namespace}.svc.cluster.local"),
            metadata: Some(Struct {
                fields: fields.map(|(name, kind)| (name, value(kind))).collect(),
            }),
        }
    }
}

fn value(kind: Kind) -> Value {
    Value { kind: Some(kind) }
}

fn kind(json: &serde_json::Value) -> Kind {
    use serde_json::Value as Json;
    match json {
        Json::Null => Kind::NullValue(0),
        Json::Bool(flag) => Kind::BoolValue(*flag),
        Json::Number(number) => Kind::NumberValue(number.as_f64().unwrap_or_default()),
        Json::String(text) => Kind::StringValue(text.clone()),
        Json::Array(all) => Kind::ListValue(prost_types::ListValue {
            values: all.iter().map(|one| value(kind(one))).collect(),
        }),
        Json::Object(all) => Kind::StructValue(Struct {
            fields: all
                .iter()
                .map(|(name, one)| (name.clone(), value(kind(one))))
                .collect(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_node_is_what_istio_reads() {
        let identity = Identity {
            pod_name: "agent-x".into(),
            pod_namespace: "istio-system".into(),
            instance_ip: "10.0.0.7".into(),
            node_name: "node-1".into(),
            metadata: BTreeMap::from([
                ("CLUSTER_ID".into(), "east".into()),
                ("LABELS".into(), serde_json::json!({"a": [1, true, null]})),
                ("NODE_NAME".into(), "other".into()),
            ]),
        };
        let node = identity.node();
        assert_eq!(
            node.id,
            "ztunnel~10.0.0.7~agent-x.istio-system~istio-system.svc.cluster.local"
        );
        let fields = node.metadata.unwrap().fields;
        let text = |name: &str| match &fields[name].kind {
            Some(Kind::StringValue(text)) => text.clone(),
            other => panic!("{name}: {other:?}"),
        };
        assert_eq!(
            (text("NAME"), text("NAMESPACE")),
            ("agent-x".into(), "istio-system".into())
        );
        assert_eq!(
            (text("INSTANCE_IPS"), text("CLUSTER_ID")),
            ("10.0.0.7".into(), "east".into())
        );
        // What is given by name goes before what is known otherwise.
        assert_eq!(text("NODE_NAME"), "other");
        let Some(Kind::StructValue(labels)) = &fields["LABELS"].kind else {
            panic!("no mapping");
        };
        let Some(Kind::ListValue(list)) = &labels.fields["a"].kind else {
            panic!("no list");
        };
        let kinds: Vec<_> = list.values.iter().map(|one| one.kind.clone().unwrap()).collect();
        assert_eq!(
            kinds,
            [Kind::NumberValue(1.0), Kind::BoolValue(true), Kind::NullValue(0)]
        );
        assert!(Identity::default().node().id.starts_with("ztunnel~1.1.1.1~."));
    }
}
