//! Everything that a snapshot holds, in order: for who shows it. Nothing that is held is copied.

use std::sync::Arc;

use super::{Bucket, Mesh};
use crate::mesh::{
    policy::Policy,
    service::Service,
    workload::{NamespacedHostname, Workload},
};

impl Mesh {
    /// All workloads, by UID.
    pub fn sorted_workloads(&self) -> Vec<&Arc<Workload>> {
        let mut all: Vec<_> = self.workloads.values().collect();
        all.sort_unstable_by(|one, other| one.uid.cmp(&other.uid));
        all
    }

    /// All services, by host name, then namespace.
    pub fn sorted_services(&self) -> Vec<&Arc<Service>> {
        let mut all: Vec<_> = self.services.values().collect();
        all.sort_unstable_by(|one, other| order(&one.host).cmp(&order(&other.host)));
        all
    }

    /// All policies, by name.
    pub fn sorted_policies(&self) -> Vec<&Arc<Policy>> {
        let mut all: Vec<_> = self.policies.by_name.values().collect();
        all.sort_unstable_by(|one, other| one.key.cmp(&other.key));
        all
    }

    /// The services that workloads name and that are not there, by host name, and those workloads.
    pub fn awaited_services(&self) -> Vec<(&NamespacedHostname, &[Arc<Workload>])> {
        let unknown = self
            .endpoints
            .iter()
            .filter(|(host, _)| !self.services.contains_key(*host));
        let mut all: Vec<_> = unknown
            .map(|(host, endpoints)| (host, Bucket::as_slice(endpoints)))
            .collect();
        all.sort_unstable_by(|(one, _), (other, _)| order(one).cmp(&order(other)));
        all
    }
}

fn order(host: &NamespacedHostname) -> (&str, &str) {
    (&host.hostname, &host.namespace)
}
