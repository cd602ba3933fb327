//! Kubernetes' objects, parsed strictly: k8s-openapi passes over what it does not know, so what it has read is written again and must be
//! all that was there.

use std::collections::BTreeMap;

use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{ConfigMap, Namespace, ResourceQuota, Service, ServiceAccount},
    networking::v1::NetworkPolicy,
    rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding},
};
use redirector_tests::chart::text;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

/// The Prometheus operator's, as far as the chart writes it.
#[derive(serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct PodMonitor {
    api_version: String,
    kind: String,
    metadata: k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta,
    spec: PodMonitorSpec,
}

#[derive(serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct PodMonitorSpec {
    selector: k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector,
    pod_metrics_endpoints: Vec<PodMetricsEndpoint>,
}

#[derive(serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct PodMetricsEndpoint {
    port: String,
    path: String,
    honor_labels: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    interval: Option<String>,
}

#[derive(serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct PrometheusRule {
    api_version: String,
    kind: String,
    metadata: k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta,
    spec: RuleGroups,
}

#[derive(serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleGroups {
    groups: Vec<RuleGroup>,
}

#[derive(serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleGroup {
    name: String,
    rules: Vec<Rule>,
}

#[derive(serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    alert: String,
    expr: String,
    #[serde(rename = "for", skip_serializing_if = "Option::is_none")]
    lasting: Option<String>,
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
}

/// The objects of some text.
///
/// # Panics
/// Where something is not what it should be.
pub(crate) fn parse(text: &str) -> Vec<Value> {
    let documents = serde_yaml::Deserializer::from_str(text);
    let mut objects = Vec::new();
    for document in documents {
        let object: Value = serde::Deserialize::deserialize(document).expect("YAML");
        if !object.is_null() {
            strictly(&object).unwrap_or_else(|error| panic!("{error}\n{object:#}"));
            objects.push(object);
        }
    }
    objects
}

fn strictly(object: &Value) -> Result<(), String> {
    let (version, kind) = (text(&object["apiVersion"]), text(&object["kind"]));
    match (version, kind) {
        ("v1", "Namespace") => again::<Namespace>(object),
        ("v1", "ResourceQuota") => again::<ResourceQuota>(object),
        ("v1", "ServiceAccount") => again::<ServiceAccount>(object),
        ("v1", "ConfigMap") => again::<ConfigMap>(object),
        ("v1", "Service") => again::<Service>(object),
        ("networking.k8s.io/v1", "NetworkPolicy") => again::<NetworkPolicy>(object),
        ("rbac.authorization.k8s.io/v1", "ClusterRole") => again::<ClusterRole>(object),
        ("rbac.authorization.k8s.io/v1", "ClusterRoleBinding") => again::<ClusterRoleBinding>(object),
        ("rbac.authorization.k8s.io/v1", "Role") => again::<Role>(object),
        ("rbac.authorization.k8s.io/v1", "RoleBinding") => again::<RoleBinding>(object),
        ("apps/v1", "DaemonSet") => again::<DaemonSet>(object),
        ("monitoring.coreos.com/v1", "PodMonitor") => again::<PodMonitor>(object),
        ("monitoring.coreos.com/v1", "PrometheusRule") => again::<PrometheusRule>(object),
        _ => Err(format!("{version} {kind} is not known here")),
    }
}

fn again<T: DeserializeOwned + Serialize>(object: &Value) -> Result<(), String> {
    let read: T = serde_json::from_value(object.clone()).map_err(|error| error.to_string())?;
    let written = serde_json::to_value(read).map_err(|error| error.to_string())?;
    same(object, &written, "")
}

fn same(given: &Value, read: &Value, at: &str) -> Result<(), String> {
    match (given, read) {
        (Value::Object(given), Value::Object(read)) => given.iter().try_for_each(|(key, value)| {
            let at = format!("{at}.{key}");
            match read.get(key) {
                Some(read) => same(value, read, &at),
                None => Err(format!("{at} is no field, or says nothing: {value}")),
            }
        }),
        (Value::Array(given), Value::Array(read)) if given.len() == read.len() => given
            .iter()
            .zip(read)
            .enumerate()
            .try_for_each(|(index, (given, read))| same(given, read, &format!("{at}[{index}]"))),
        _ if given == read => Ok(()),
        _ => Err(format!("{at} is {given}, and is read as {read}")),
    }
}

/// The only object of a kind.
///
/// # Panics
/// When there is none, or another.
pub(crate) fn only<'a>(objects: &'a [Value], kind: &str) -> &'a Value {
    let mut found = objects.iter().filter(|object| object["kind"] == kind);
    match (found.next(), found.next()) {
        (Some(object), None) => object,
        (first, second) => panic!("one {kind} is wanted: {first:?}, {second:?}"),
    }
}
