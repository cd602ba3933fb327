//! One record per connection: counts it, and has its access line written when it ends, however it ends.
//!
//! Bytes are as the local pod sees them: sent by its application, received by it. The metrics count by the direction of the request, as
//! Istio's do.

use std::{
    error::Error,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use prometheus_client::metrics::counter::Counter;

use super::{
    connections::{Admitted, Entry},
    copy::{Cut, Meter},
    failure::{Failure, Fate, Flag},
    flows::{Facts, Flow, Flows, Open},
    metrics::{Metrics, Reason},
    plaintext::{self, Plaintext},
    traffic::{self, Series},
};
use crate::mesh::{pod::PodInfo, policy::PolicyName, spiffe::SpiffeId, workload::Workload};

/// Which end of a connection the local pod is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Direction {
    /// The client.
    Outbound,
    /// The server.
    Inbound,
}

impl Direction {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Outbound => "outbound",
            Self::Inbound => "inbound",
        }
    }

    /// Istio's name for the proxy that reports the connection: at its source, or at its destination.
    pub(super) fn reporter(self) -> &'static str {
        match self {
            Self::Outbound => "source",
            Self::Inbound => "destination",
        }
    }
}

/// How a connection is protected between the pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Security {
    /// HBONE.
    MutualTls,
    /// Plain TCP, or whatever the application does within it; and what is joined within the node.
    Unknown,
}

impl Security {
    /// Istio's name for it.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::MutualTls => "mutual_tls",
            Self::Unknown => "unknown",
        }
    }
}

/// Counts the bytes of one direction of one connection.
#[derive(Debug)]
pub(crate) struct Count {
    bytes: AtomicU64,
    series: Arc<Series>,
    /// Which of the series' two.
    is_request: bool,
    /// Those in plain, over the wire, are counted for the pod too.
    plain: Option<Counter>,
}

impl Count {
    /// How many it has counted.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

impl Meter for Count {
    fn add(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        let total = match self.is_request {
            true => &self.series.received,
            false => &self.series.sent,
        };
        total.fetch_add(bytes, Ordering::Relaxed);
        if let Some(plain) = &self.plain {
            plain.inc_by(bytes);
        }
    }
}

/// Where the connections of one pod are recorded.
#[derive(Debug)]
pub(crate) struct Recorder {
    metrics: Arc<Metrics>,
    flows: Arc<Flows>,
    pod: Arc<PodInfo>,
    series: traffic::OfPod,
}

impl Recorder {
    /// Of `pod`, into what all pods share.
    pub(crate) fn new(metrics: Arc<Metrics>, flows: Arc<Flows>, pod: &PodInfo) -> Arc<Self> {
        Arc::new(Self {
            metrics,
            flows,
            pod: Arc::new(pod.clone()),
            series: traffic::OfPod::default(),
        })
    }
}

/// A connection's record.
pub(crate) struct Record {
    recorder: Arc<Recorder>,
    flow: Arc<Flow>,
    /// Under the pod's policies, which may cut it off.
    pub(super) admitted: Option<Arc<Entry>>,
    /// Where the pod's bytes in plain are counted; `None` of what is not in plain over the wire.
    pub(crate) plain: Option<Arc<Plaintext>>,
    /// Of the tunnel that it is in.
    fate: Option<Arc<Fate>>,
    end: End,
}

/// What is known of an end of a connection.
#[derive(Debug, Clone, Default)]
pub(crate) struct Party {
    pub(crate) workload: Option<Arc<str>>,
    pub(crate) namespace: Option<Arc<str>>,
    /// As proven by TLS, or of the local pod in TLS; within the node, as both would have proven it.
    pub(crate) identity: Option<SpiffeId>,
    /// What the mesh has of it.
    pub(crate) of: Option<Arc<Workload>>,
}

impl From<&PodInfo> for Party {
    fn from(pod: &PodInfo) -> Self {
        Self {
            workload: Some(pod.name.as_str().into()),
            namespace: Some(pod.namespace.as_str().into()),
            identity: None,
            of: None,
        }
    }
}

impl From<&Arc<Workload>> for Party {
    fn from(workload: &Arc<Workload>) -> Self {
        Self {
            workload: Some(workload.name.clone()),
            namespace: Some(workload.namespace.clone()),
            identity: None,
            of: Some(workload.clone()),
        }
    }
}

enum End {
    /// Dropped in this state, it was cut off: by a change of the policies, by the pod's end, or by a panic.
    Open,
    Closed,
    Failed(Flag, String),
    Tunnel,
}

impl Record {
    /// A connection that has come in. Boxed: it is handed on and on, and each future on the way would have room for it.
    pub(crate) fn new(recorder: &Arc<Recorder>, direction: Direction, src: SocketAddr) -> Box<Self> {
        Box::new(Self {
            recorder: recorder.clone(),
            flow: recorder.flows.begin(recorder.pod.clone(), direction, src),
            admitted: None,
            plain: None,
            fate: None,
            end: End::Open,
        })
    }

    /// What is to be known of the connection before it is [open](Self::open).
    pub(crate) fn facts(&mut self) -> &mut Facts {
        let flow = Arc::get_mut(&mut self.flow);
        &mut flow
            .expect("a connection is not shared before it is opened")
            .facts
    }

    /// What was known of it then.
    pub(crate) fn known(&self) -> &Facts {
        &self.flow.facts
    }

    /// Who is at its far end, told by the tunnel.
    pub(crate) fn reached(&self, far_end: Party) {
        // Told once.
        let _ = self.flow.reached.set(far_end);
    }

    /// It is in the pod, under its policies.
    pub(super) fn admitted(&mut self, admitted: &Admitted) {
        self.admitted = Some(admitted.entry());
        self.decided_by(admitted.policy());
    }

    /// By a policy, if there was one to ask.
    pub(super) fn decided_by(&self, policy: Option<&PolicyName>) {
        if let Some(policy) = policy {
            // The first is the one that let it in, and whoever ends it says so in the error.
            let _ = self.flow.policy.set(policy.clone());
        }
    }

    /// It shares the fate of a tunnel.
    pub(crate) fn in_tunnel(&mut self, fate: Arc<Fate>) {
        self.fate = Some(fate);
    }

    /// It is known where the connection goes. Before that it is not counted, as by Istio.
    pub(crate) fn open(&mut self, security: Security) {
        let direction = self.flow.direction;
        let recorder = &self.recorder;
        let facts = &self.flow.facts;
        let series = recorder
            .series
            .series(&recorder.metrics.traffic, direction, security, facts);
        series.opened.fetch_add(1, Ordering::Relaxed);
        let count = |is_request| Count {
            bytes: AtomicU64::new(0),
            series: series.clone(),
            is_request,
            plain: self.plain.as_ref().map(|plain| plain.counter(direction).clone()),
        };
        let is_client = direction == Direction::Outbound;
        let open = Open {
            security,
            sent: count(is_client),
            received: count(!is_client),
            series,
        };
        let flow = Arc::get_mut(&mut self.flow);
        flow.expect("a connection is opened once").open = Some(open);
        self.recorder.flows.enter(&self.flow);
        self.recorder.metrics.access_log.opened(&self.flow);
    }

    /// Counters of the bytes that the local pod sends and receives. The connection must be [open](Self::open).
    pub(crate) fn counts(&self) -> (&Count, &Count) {
        let open = self
            .flow
            .open
            .as_ref()
            .expect("a connection is opened before it is copied");
        (&open.sent, &open.received)
    }

    /// It is a tunnel now: its streams have records of their own.
    pub(crate) fn into_tunnel(mut self) {
        self.end = End::Tunnel;
    }

    /// It must not be.
    pub(crate) fn refuse(self, reason: Reason, error: &dyn Failure) {
        self.recorder.metrics.refused(reason);
        self.fail(error);
    }

    /// It did not come about.
    pub(crate) fn fail(mut self, error: &dyn Failure) {
        self.decided_by(error.policy());
        let text = match error.advice() {
            None => chain(error),
            Some(advice) => format!("{} ({advice})", chain(error)),
        };
        self.end = End::Failed(error.flag(), text);
    }

    /// It was copied, and ended so.
    pub(crate) fn end(mut self, result: Result<(), Cut>) {
        self.end = match result {
            Ok(()) => End::Closed,
            Err(cut) => self.revoked().unwrap_or_else(|| match cut.failure() {
                None => End::Closed,
                Some(error) => End::Failed(error.flag(), chain(&error)),
            }),
        };
    }

    /// The end that it has with its tunnel, if that is closed for a revocation.
    fn revoked(&self) -> Option<End> {
        let why = self.fate.as_ref()?.revoked()?;
        self.recorder.metrics.revoked(self.flow.direction);
        Some(End::Failed(
            Flag::Revoked,
            format!("closed by a revocation: {why}"),
        ))
    }

    /// How it ended, if not as a connection should.
    fn failure(&mut self) -> Option<(Flag, String)> {
        match std::mem::replace(&mut self.end, End::Closed) {
            End::Closed | End::Tunnel => None,
            End::Failed(flag, error) => Some((flag, error)),
            End::Open => {
                if let Some(End::Failed(flag, error)) = self.revoked() {
                    return Some((flag, error));
                }
                let denied = self.admitted.as_ref().and_then(|entry| entry.denied());
                let refused = self.plain.as_ref().is_some_and(|plain| plain.is_refused());
                if denied.is_none() && refused {
                    self.recorder.metrics.refused(Reason::plaintext);
                }
                Some(match denied {
                    Some(denied) => (denied.flag(), chain(&denied)),
                    None if refused => (plaintext::Refused.flag(), plaintext::Refused.to_string()),
                    None => (Flag::Connect, "cut off by the proxy".to_owned()),
                })
            }
        }
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        if let End::Tunnel = self.end {
            return;
        }
        let (flag, error) = match self.failure() {
            None => (Flag::None, None),
            Some((flag, error)) => (flag, Some(Arc::<str>::from(error))),
        };
        let (flow, metrics) = (&self.flow, &self.recorder.metrics);
        self.recorder.flows.end(flow, flag, error.clone());
        match &flow.open {
            Some(open) => open.series.end(flag),
            None => {
                metrics.denied.inc();
            }
        }
        metrics.access_log.ended(flow, flag, error.as_deref());
    }
}

/// An error with all its causes, on one line.
pub(crate) fn chain(error: &dyn Error) -> String {
    let causes = std::iter::successors(Some(error), |&error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;
    use crate::mesh::testing::info;

    fn metrics_of(act: impl FnOnce(Box<Record>)) -> String {
        let metrics = Arc::new(Metrics::default());
        let recorder = Recorder::new(metrics.clone(), Arc::default(), &info("web"));
        act(Record::new(
            &recorder,
            Direction::Inbound,
            "10.1.2.3:4".parse().unwrap(),
        ));
        super::super::metrics::text(&metrics)
            .lines()
            .filter(|line| line.starts_with("istio_tcp") || line.contains("_connections_"))
            .filter(|line| !line.starts_with('#'))
            .collect::<Vec<_>>()
            .join("\n")
    }

    #[test]
    fn every_end_is_counted() {
        const LABELS: &str = "{reporter=\"destination\",connection_security_policy=\"unknown\"}";
        let open = |mut record: Box<Record>| {
            record.open(Security::Unknown);
            record.counts().0.add(5);
            record
        };
        let reset = || io::Error::from(io::ErrorKind::ConnectionReset);
        let lost = || io::Error::from(io::ErrorKind::ConnectionAborted);
        let failed = format!("istio_tcp_connections_failed_total{LABELS} 1");
        for (name, is_failure, act) in [
            (
                "in order",
                false,
                Box::new(move |record| open(record).end(Ok(()))) as Box<dyn FnOnce(Box<Record>)>,
            ),
            (
                "by an application's reset",
                false,
                Box::new(move |record| open(record).end(Err(Cut::Local(reset())))),
            ),
            (
                "by a lost tunnel",
                true,
                Box::new(move |record| open(record).end(Err(Cut::Remote(lost())))),
            ),
            (
                "by a failure",
                true,
                Box::new(move |record| open(record).fail(&lost())),
            ),
            ("cut off", true, Box::new(move |record| drop(open(record)))),
        ] {
            let text = metrics_of(act);
            assert_eq!(text.contains(&failed), is_failure, "{name}: {text}");
            for counter in ["connections_opened_total", "connections_closed_total"] {
                assert!(
                    text.contains(&format!("istio_tcp_{counter}{LABELS} 1")),
                    "{name}: {text}"
                );
            }
            // What a server sends is the response.
            assert!(
                text.contains(&format!("istio_tcp_sent_bytes_total{LABELS} 5")),
                "{name}: {text}"
            );
            assert!(
                text.contains("redirector_connections_denied_total 0"),
                "{name}: {text}"
            );
        }
    }

    #[test]
    fn what_is_in_a_tunnel_that_is_closed_for_a_revocation_says_so() {
        let reset = || Cut::Remote(io::ErrorKind::ConnectionReset.into());
        for (name, is_told, act) in [
            ("cut off", true, Box::new(drop) as Box<dyn FnOnce(Box<Record>)>),
            ("reset", true, Box::new(move |record| record.end(Err(reset())))),
            ("over before", false, Box::new(|record| record.end(Ok(())))),
        ] {
            let metrics = Arc::new(Metrics::default());
            let flows = Arc::<Flows>::default();
            let recorder = Recorder::new(metrics.clone(), flows.clone(), &info("web"));
            let mut record = Record::new(&recorder, Direction::Inbound, "10.1.2.3:4".parse().unwrap());
            let fate = Arc::<Fate>::default();
            record.in_tunnel(fate.clone());
            record.open(Security::MutualTls);
            fate.revoke(&io::Error::other("on a list"));
            act(record);
            let ended = serde_json::to_value(flows.ended(None, 1)).unwrap();
            let ended = &ended["flows"][0];
            let (flag, error) = match is_told {
                true => ("CERT_REVOKED", "closed by a revocation: on a list".into()),
                false => ("-", serde_json::Value::Null),
            };
            assert_eq!(
                (&ended["responseFlags"], &ended["error"]),
                (&flag.into(), &error),
                "{name}"
            );
            let rejected = super::super::metrics::text(&metrics);
            let line = "istio_crl_policy_rejections_total{reporter=\"destination\"} 1";
            assert_eq!(rejected.contains(line), is_told, "{name}: {rejected}");
        }
    }

    #[test]
    fn a_connection_that_was_not_opened_is_denied_and_a_tunnel_is_none() {
        let denied = metrics_of(|record| record.fail(&io::Error::other("no")));
        const REST: &str = "redirector_connections_same_node_total 0";
        assert_eq!(denied, format!("redirector_connections_denied_total 1\n{REST}"));
        assert_eq!(
            metrics_of(|record| record.into_tunnel()),
            format!("redirector_connections_denied_total 0\n{REST}")
        );
    }

    #[test]
    fn an_error_is_written_with_its_causes() {
        #[derive(Debug, thiserror::Error)]
        #[error("cannot dial")]
        struct Outer(#[source] io::Error);
        assert_eq!(chain(&Outer(io::Error::other("no port"))), "cannot dial: no port");
    }
}
