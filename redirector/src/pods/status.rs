//! What the lifecycle tells the outside: the pods as they are now, and counters.

use std::{net::IpAddr, path::PathBuf};

use prometheus_client::{
    metrics::{counter::Counter, gauge::Gauge, histogram::Histogram},
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
    /// Whether it is captured, and not as it should be: what it opens or is opened to it may be refused, or go in plain. `error` says why.
    #[serde(default)]
    pub impaired: bool,
    /// Whether what it would send or get in plain is refused, by its newest rules.
    #[serde(default)]
    pub strict: bool,
    /// Why it is not; of a pod that is, what its capture lacks, or what keeps it from its newest rules.
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
    pub(super) impaired: Gauge,
    pub(super) started: Counter,
    pub(super) stopped: Counter,
    pub(super) failed: Counter,
    pub(super) durations: Durations,
}

/// How long the backend takes with a pod: without certificate, listeners and the connections' end.
#[derive(Debug, Clone)]
pub(super) struct Durations {
    pub(super) attach: Histogram,
    pub(super) detach: Histogram,
}

impl Default for Durations {
    fn default() -> Self {
        // From a clsact filter's tenths of a millisecond to a busy node's seconds.
        let histogram = || {
            Histogram::new([
                0.000_5, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0,
            ])
        };
        Self {
            attach: histogram(),
            detach: histogram(),
        }
    }
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
        registry.register(
            "redirector_pods_impaired",
            "Pods that are captured, and not as they should be",
            self.impaired.clone(),
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
        let mut histogram = |name: &str, help: &str, metric: &Histogram| {
            registry.register(format!("redirector_{name}_seconds"), help, metric.clone());
        };
        histogram(
            "attach",
            "Time in which the redirection of a pod's traffic was set up",
            &self.durations.attach,
        );
        histogram(
            "detach",
            "Time in which the redirection of a pod's traffic was removed, without waiting for its connections",
            &self.durations.detach,
        );
    }
}
