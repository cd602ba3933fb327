//! What the lifecycle tells the outside: the pods as they are now, and counters.

use std::{fmt, net::IpAddr, path::PathBuf};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{
        MetricType,
        counter::Counter,
        gauge::{ConstGauge, Gauge},
        histogram::Histogram,
    },
    registry::Registry,
};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

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

/// A pod that should be captured and could not even be tried.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Missed {
    /// UID.
    pub uid: String,
    /// Kubernetes namespace.
    pub namespace: String,
    /// Pod name.
    pub name: String,
    /// Why.
    pub error: String,
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
    /// From a pod's turn until it is captured: certificate, listeners, redirection and record.
    pub(super) enrolment: Enrolment,
}

/// A histogram of its own kind, for its `Default`.
#[derive(Debug, Clone)]
pub(super) struct Enrolment(pub(super) Histogram);

impl Default for Enrolment {
    fn default() -> Self {
        // From a certificate that is here to an authority that is slow.
        let buckets = [
            0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0,
        ];
        Self(Histogram::new(buckets))
    }
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
        histogram(
            "enrolment",
            "Time in which a pod was captured, from its turn on: certificate, listeners, redirection and record",
            &self.enrolment.0,
        );
    }
}

/// Names the state of each pod of `pods`, and of those that were `missed`, in `registry`. Series go with their pods.
pub fn register_states(
    registry: &mut Registry,
    pods: watch::Receiver<Status>,
    missed: watch::Receiver<Vec<Missed>>,
) {
    registry.register_collector(Box::new(States { pods, missed }));
}

#[derive(Debug)]
struct States {
    pods: watch::Receiver<Status>,
    missed: watch::Receiver<Vec<Missed>>,
}

impl Collector for States {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let status = self.pods.borrow().clone();
        let mut missed = self.missed.borrow().clone();
        // Who has just been told of is still missed for a moment, and has one state.
        missed.retain(|missed| status.pods.iter().all(|pod| pod.uid != missed.uid));
        if status.pods.is_empty() && missed.is_empty() {
            return Ok(());
        }
        let mut states = encoder.encode_descriptor(
            "redirector_pod_state",
            "1 with the state that a pod's capture has",
            None,
            MetricType::Gauge,
        )?;
        for pod in &status.pods {
            let [namespace, name, uid] = labels(&pod.namespace, &pod.name, &pod.uid);
            let labels = [namespace, name, uid, ("state", pod.state.as_str())];
            ConstGauge::new(1_i64).encode(states.encode_family(&labels)?)?;
        }
        for pod in &missed {
            let [namespace, name, uid] = labels(&pod.namespace, &pod.name, &pod.uid);
            let labels = [namespace, name, uid, ("state", "missed")];
            ConstGauge::new(1_i64).encode(states.encode_family(&labels)?)?;
        }
        let mut impaired = encoder.encode_descriptor(
            "redirector_pod_impaired",
            "1 for a pod that is captured, and not as it should be: /pods says why",
            None,
            MetricType::Gauge,
        )?;
        for pod in &status.pods {
            let value = ConstGauge::new(i64::from(pod.impaired));
            let labels = labels(&pod.namespace, &pod.name, &pod.uid);
            value.encode(impaired.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

fn labels<'a>(namespace: &'a str, name: &'a str, uid: &'a str) -> [(&'static str, &'a str); 3] {
    [("namespace", namespace), ("pod_name", name), ("uid", uid)]
}

impl State {
    fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Captured => "captured",
            Self::NotCaptured => "not_captured",
            Self::Stopping => "stopping",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_pod_has_the_series_of_its_state_as_long_as_it_is_there() {
        let pod = |name: &str, state, error: Option<&str>| PodStatus {
            uid: format!("u-{name}"),
            name: name.into(),
            namespace: "shop".into(),
            service_account: "web".into(),
            netns: 1,
            netns_path: None,
            addresses: vec![],
            state,
            impaired: state == State::Captured && error.is_some(),
            strict: false,
            error: error.map(Into::into),
        };
        let (status, view) = watch::channel(Status::default());
        let (missed, missed_view) = watch::channel(Vec::new());
        let mut registry = Registry::default();
        register_states(&mut registry, view, missed_view);
        let text = || {
            let mut text = String::new();
            prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
            text
        };
        assert_eq!(text(), "# EOF\n");
        status.send_modify(|status| {
            let impaired = pod("web", State::Captured, Some("a hook is gone"));
            status.pods = vec![impaired, pod("db", State::NotCaptured, Some("no"))];
        });
        let told = text();
        let lines: Vec<_> = told.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(
            lines,
            [
                "redirector_pod_state{namespace=\"shop\",pod_name=\"web\",uid=\"u-web\",state=\"captured\"} 1",
                "redirector_pod_state{namespace=\"shop\",pod_name=\"db\",uid=\"u-db\",state=\"not_captured\"} 1",
                "redirector_pod_impaired{namespace=\"shop\",pod_name=\"web\",uid=\"u-web\"} 1",
                "redirector_pod_impaired{namespace=\"shop\",pod_name=\"db\",uid=\"u-db\"} 0",
            ]
        );
        status.send_modify(|status| drop(status.pods.remove(1)));
        assert!(!text().contains("u-db"));
        let miss = |name: &str| Missed {
            uid: format!("u-{name}"),
            namespace: "shop".into(),
            name: name.into(),
            error: "no namespace".into(),
        };
        missed.send_replace(vec![miss("lost"), miss("web")]);
        let told = text();
        assert!(told.contains("uid=\"u-lost\",state=\"missed\"} 1"), "{told}");
        assert_eq!(
            told.matches("redirector_pod_state{").count(),
            2,
            "each pod has one state: {told}"
        );
        missed.send_replace(Vec::new());
        assert!(!text().contains("missed"));
    }
}
