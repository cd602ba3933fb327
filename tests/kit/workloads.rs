//! The workload file, in the format of ztunnel's LOCAL_XDS_PATH.

use std::{fs, net::IpAddr, path::Path};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use serde_yaml::Value as Yaml;

use crate::node::{Family, Pod};

/// The workloads and services of the mesh.
#[derive(Debug, Clone, Default)]
pub struct Workloads {
    workloads: Vec<Value>,
    services: Vec<Value>,
    policies: Vec<Value>,
}

impl Workloads {
    /// Every pod as a workload that takes HBONE.
    pub fn hbone<'a>(pods: impl IntoIterator<Item = &'a Pod>) -> Self {
        pods.into_iter()
            .fold(Self::default(), |workloads, pod| workloads.with(pod, "HBONE"))
    }

    /// Adds a pod that takes `protocol`: `HBONE` or `TCP`.
    #[must_use]
    pub fn with(self, pod: &Pod, protocol: &str) -> Self {
        let addresses = Family::BOTH.map(|family| pod.ip(family));
        self.with_workload(&pod.name, &addresses, protocol)
    }

    /// Adds a workload by name, in Kubernetes namespace `demo`.
    #[must_use]
    pub fn with_workload(mut self, name: &str, addresses: &[IpAddr], protocol: &str) -> Self {
        self.workloads.push(json!({
            "uid": format!("Kubernetes//Pod/demo/{name}"),
            "name": name,
            "namespace": "demo",
            "serviceAccount": name,
            "trustDomain": "cluster.local",
            "workloadIps": addresses,
            "protocol": protocol,
            "services": {},
        }));
        self
    }

    /// Adds a service in front of one pod.
    #[must_use]
    pub fn with_service(
        mut self,
        hostname: &str,
        vips: &[IpAddr],
        port: u16,
        backend: &Pod,
        target_port: u16,
    ) -> Self {
        let vips: Vec<String> = vips.iter().map(|vip| format!("/{vip}")).collect();
        let ports = json!({port.to_string(): target_port}); // JSON's keys are texts; to_yaml makes them numbers.
        let name = hostname.split('.').next().unwrap_or(hostname);
        self.services.push(
            json!({"name": name, "namespace": "demo", "hostname": hostname, "vips": vips, "ports": ports}),
        );
        for workload in self
            .workloads
            .iter_mut()
            .filter(|workload| workload["name"] == backend.name.as_str())
        {
            workload["services"][format!("demo/{hostname}")] = ports.clone();
        }
        self
    }

    /// Adds a policy for namespace `demo`, and with it for every workload here, whose rules each are one match.
    #[must_use]
    pub fn with_policy(self, name: &str, action: &str, matches: &[Value]) -> Self {
        self.with_policy_of(
            name,
            json!({"scope": "Namespace", "action": action, "dryRun": false}),
            matches,
        )
    }

    /// Adds a policy in namespace `demo` with other fields than [`Self::with_policy`] gives it.
    #[must_use]
    pub fn with_policy_of(mut self, name: &str, mut fields: Value, matches: &[Value]) -> Self {
        fields["name"] = name.into();
        fields["namespace"] = "demo".into();
        fields["rules"] = matches.iter().map(|one| json!([[one]])).collect();
        self.policies.push(fields);
        self
    }

    /// Has a workload name a policy of namespace `demo`.
    #[must_use]
    pub fn naming(mut self, workload: &str, policy: &str) -> Self {
        for workload in self.workloads.iter_mut().filter(|one| one["name"] == workload) {
            workload["authorizationPolicies"] = json!([format!("demo/{policy}")]);
        }
        self
    }

    /// Sets a key of a workload.
    ///
    /// # Panics
    /// When there is no workload of that name.
    #[must_use]
    pub fn with_workload_key(mut self, name: &str, key: &str, value: Value) -> Self {
        set(&mut self.workloads, "name", name, key, value);
        self
    }

    /// Sets a key of a service.
    ///
    /// # Panics
    /// When there is no service of that host name.
    #[must_use]
    pub fn with_service_key(mut self, hostname: &str, key: &str, value: Value) -> Self {
        set(&mut self.services, "hostname", hostname, key, value);
        self
    }

    /// The file's text.
    pub fn to_yaml(&self) -> String {
        let file = json!({"workloads": self.workloads, "services": self.services, "policies": self.policies});
        let yaml = serde_yaml::to_value(&file)
            .map(numeric_keys)
            .and_then(|value| serde_yaml::to_string(&value));
        yaml.expect("JSON values can be written as YAML")
    }

    /// Writes the file.
    pub fn write(&self, path: &Path) -> Result<()> {
        fs::write(path, self.to_yaml()).with_context(|| format!("writing {}", path.display()))
    }
}

fn set(among: &mut [Value], by: &str, named: &str, key: &str, value: Value) {
    let found = among.iter_mut().find(|one| one[by] == named);
    found.unwrap_or_else(|| panic!("nothing is named {named}"))[key] = value;
}

/// Ports are keys, and numbers.
fn numeric_keys(value: Yaml) -> Yaml {
    let key = |key: Yaml| match key.as_str().and_then(|text| text.parse::<u16>().ok()) {
        Some(number) => number.into(),
        None => key,
    };
    match value {
        Yaml::Mapping(map) => {
            Yaml::Mapping(map.into_iter().map(|(k, v)| (key(k), numeric_keys(v))).collect())
        }
        Yaml::Sequence(list) => Yaml::Sequence(list.into_iter().map(numeric_keys).collect()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_numbers_and_hosts_are_not() {
        let value = json!({"services": [{"hostname": "8080", "ports": {"80": 8080}}]});
        let text = serde_yaml::to_string(&numeric_keys(serde_yaml::to_value(value).unwrap())).unwrap();
        assert!(
            text.contains("80: 8080") && text.contains("hostname: '8080'"),
            "{text}"
        );
    }
}
