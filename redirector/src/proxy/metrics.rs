//! What is counted of all pods' connections. Names and labels are Istio's where it has them.

use std::time::Duration;

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

use super::{
    access_log::{self, AccessLog},
    plaintext,
    record::Direction,
    traffic::Traffic,
};

/// Counters of all pods' connections, and the log of them.
#[derive(Debug, Default)]
pub struct Metrics {
    pub(super) access_log: AccessLog,
    pub(super) traffic: Traffic,
    pub(super) denied: Counter,
    pub(super) same_node: Counter,
    pub(super) plaintext: plaintext::Bytes,
    pub(super) handshakes: Handshakes,
    /// Tunnels of the pods' pools that are open.
    pub(super) tunnels: Gauge,
    refused: Family<Refused, Counter>,
    sockets: Family<Reported, Gauge>,
    revoked: Family<Reported, Counter>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reported {
    reporter: &'static str,
}

/// Why the proxy itself refuses what it could carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "the names are the labels' values")]
pub(crate) enum Reason {
    /// The pod is strict.
    plaintext,
    /// The peer, or all together, are in the middle of too many handshakes.
    handshakes,
    /// The peer has too many connections, to 15008.
    tunnels,
    /// The peer has too many connections, to 15006.
    plain_connections,
    /// The peer, or all together, have too many requests open.
    streams,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Refused {
    reason: Reason,
}

impl Metrics {
    /// With an access log of which `access_log` says what is written.
    pub fn new(access_log: access_log::Config) -> Self {
        Self {
            access_log: AccessLog::new(access_log),
            ..Self::default()
        }
    }

    /// Names them in `registry`. Counters get `_total` when they are written.
    pub fn register(&self, registry: &mut Registry) {
        self.traffic.register(registry);
        self.access_log.register(registry);
        registry.register(
            "istio_tcp_sockets_open",
            "Connections that are open on the pods' listeners",
            self.sockets.clone(),
        );
        registry.register(
            "redirector_connections_denied",
            "Connections refused before it was known where they go",
            self.denied.clone(),
        );
        registry.register(
            "redirector_connections_refused",
            "Connections and requests that the proxy could carry and must not",
            self.refused.clone(),
        );
        registry.register(
            "istio_crl_policy_rejections",
            "Handshakes refused and connections closed, since the peer's certificate is on a revocation list",
            self.revoked.clone(),
        );
        registry.register(
            "redirector_connections_same_node",
            "Connections between two pods of this node that were joined without a tunnel",
            self.same_node.clone(),
        );
        registry.register(
            "redirector_tunnels_open",
            "Tunnels to other pods that are kept for their connections",
            self.tunnels.clone(),
        );
        self.handshakes.register(registry);
        self.plaintext.register(registry);
    }

    /// Counts what was refused.
    pub(crate) fn refused(&self, reason: Reason) {
        self.refused.get_or_create(&Refused { reason }).inc();
    }

    /// Counts what a revocation has ended, or has kept from coming about.
    pub(super) fn revoked(&self, direction: Direction) {
        let reporter = direction.reporter();
        self.revoked.get_or_create(&Reported { reporter }).inc();
    }

    /// Counts a socket for as long as the value lives.
    pub(super) fn socket(&self, direction: Direction) -> Counted {
        let reporter = direction.reporter();
        Counted::by(&self.sockets.get_or_create_owned(&Reported { reporter }))
    }
}

/// One of those that a gauge counts.
#[derive(Debug)]
pub(super) struct Counted(Gauge);

impl Counted {
    pub(super) fn by(gauge: &Gauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// TLS handshakes.
#[derive(Debug, Clone)]
pub(super) struct Handshakes {
    durations: Family<Side, Histogram>,
    failures: Family<HandshakeFailure, Counter>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Side {
    reporter: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct HandshakeFailure {
    reporter: &'static str,
    reason: &'static str,
}

impl Default for Handshakes {
    fn default() -> Self {
        // From within a node to a peer that is all but out of reach.
        let histogram = || {
            Histogram::new([
                0.000_5, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0,
            ])
        };
        Self {
            durations: Family::new_with_constructor(histogram),
            failures: Family::default(),
        }
    }
}

impl Handshakes {
    fn register(&self, registry: &mut Registry) {
        registry.register(
            "redirector_handshake_seconds",
            "Time of the TLS handshakes that came about, of the pods as clients (source) and as servers (destination)",
            self.durations.clone(),
        );
        registry.register(
            "redirector_handshake_failures",
            "TLS handshakes that did not come about",
            self.failures.clone(),
        );
    }

    /// One is over.
    pub(super) fn over(&self, direction: Direction, took: Duration, failed: Option<&'static str>) {
        let reporter = direction.reporter();
        match failed {
            None => self
                .durations
                .get_or_create(&Side { reporter })
                .observe(took.as_secs_f64()),
            Some(reason) => {
                let _ = self
                    .failures
                    .get_or_create(&HandshakeFailure { reporter, reason })
                    .inc();
            }
        }
    }
}

/// The metrics as text, for tests; of the labels of traffic only those that a test without a mesh has, in their order.
#[cfg(test)]
pub(super) fn text(metrics: &Metrics) -> String {
    let mut registry = Registry::default();
    metrics.register(&mut registry);
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
    let is_told =
        |label: &&str| label.starts_with("reporter=") || label.starts_with("connection_security_policy=");
    let brief = |line: &str| match line.split_once('{').zip(line.rsplit_once('}')) {
        Some(((name, labels), (_, value))) if name.starts_with("istio_tcp_") => {
            let labels = labels
                .split(['}', ','])
                .filter(is_told)
                .collect::<Vec<_>>()
                .join(",");
            format!("{name}{{{labels}}}{value}\n")
        }
        _ => format!("{line}\n"),
    };
    text.lines().map(brief).collect()
}
