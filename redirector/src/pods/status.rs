//! What the lifecycle tells the outside: the pods as they are now, and counters.

use std::{net::IpAddr, path::PathBuf};

use prometheus_client::{
    metrics::{counter::Counter, gauge::Gauge},
    registry::Registry,
};
use serde::{Deserialize, Serialize};

/// The pods of this node, as they are now.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    /// All pods that exist have been named by the source of events, and each was tried.
    pub synced: bool,
    /// The pods, by UID.
    pub pods: Vec<PodStatus>,
}

/// A pod, as it is now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodStatus {
    /// UID.
    pub uid: String,
    /// Pod name.
    pub name: String,
    /// Kubernetes namespace.
    pub namespace: String,
    /// Kubernetes service account.
    pub service_account: String,
    /// Inode of its network namespace.
    pub netns: u64,
    /// Where that was opened, if by path.
    pub netns_path: Option<PathBuf>,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// Whether its traffic is captured.
    pub state: State,
    /// Why it is not.
    pub error: Option<String>,
}

/// Whether a pod's traffic is captured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum State {
    /// It is being made so.
    Starting,
    /// It is.
    Captured,
    /// It is not: the last try failed, and another comes.
    NotCaptured,
    /// It is being released.
    Stopping,
}

/// Counters of the lifecycle. Names of ztunnel's where it has one.
#[derive(Debug, Clone, Default)]
pub struct Metrics {
    pub(super) active: Gauge,
    pub(super) pending: Gauge,
    pub(super) started: Counter,
    pub(super) stopped: Counter,
    pub(super) failed: Counter,
}

impl Metrics {
    /// Registers them.
    pub fn register(&self, registry: &mut Registry) {
        let prefix = "workload_manager_";
        let mut gauge = |name: &str, help: &str, metric: &Gauge| {
            registry.register(format!("{prefix}{name}"), help, metric.clone());
        };
        gauge("active_proxy_count", "Pods that are captured", &self.active);
        gauge(
            "pending_proxy_count",
            "Pods whose capture failed and is tried again",
            &self.pending,
        );
        let mut counter = |name: &str, help: &str, metric: &Counter| {
            registry.register(format!("{prefix}{name}"), help, metric.clone());
        };
        counter("proxies_started", "Pods that were captured", &self.started);
        counter("proxies_stopped", "Pods that were released", &self.stopped);
        counter(
            "enrolments_failed",
            "Tries to capture a pod that failed",
            &self.failed,
        );
    }
}
