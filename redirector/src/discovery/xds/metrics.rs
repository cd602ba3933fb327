//! Counters of the connection to the control plane, by ztunnel's names.

use std::time::SystemTime;

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};
use prost::Message as _;

use super::super::proto::{ADDRESS, AUTHORIZATION, messages::DeltaDiscoveryResponse};

/// What has come, and how connections have ended.
#[derive(Debug, Default)]
pub struct Metrics {
    terminations: Family<Termination, Counter>,
    messages: Family<Url, Counter>,
    bytes: Family<Url, Counter>,
    connected: Gauge,
    last_failure: Gauge,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Termination {
    reason: Reason,
}

/// How a connection ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
pub(super) enum Reason {
    /// It was not made.
    ConnectionError,
    /// By a failure.
    Error,
    /// As it ends now and then.
    Reconnect,
    /// In good order.
    Complete,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Url {
    url: &'static str,
}

impl Metrics {
    /// Registers them.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "istio_xds_connection_terminations",
            "Ends of connections to the control plane, by reason",
            self.terminations.clone(),
        );
        registry.register(
            "istio_xds_message",
            "Messages of the control plane, by type",
            self.messages.clone(),
        );
        registry.register(
            "istio_xds_message_bytes",
            "Bytes in messages of the control plane, by type",
            self.bytes.clone(),
        );
        registry.register(
            "redirector_xds_connected",
            "1 while there is a connection to the control plane",
            self.connected.clone(),
        );
        registry.register(
            "redirector_xds_last_failure_timestamp_seconds",
            "When a connection to the control plane failed last, since 1970; 0: never. The log has the reason",
            self.last_failure.clone(),
        );
    }

    pub(super) fn terminated(&self, reason: Reason) {
        self.terminations.get_or_create(&Termination { reason }).inc();
    }

    /// There is a connection, until the value is dropped.
    pub(super) fn connected(&self) -> Connected<'_> {
        self.connected.set(1);
        Connected(self)
    }

    /// Something failed that must not.
    pub(super) fn failed(&self) {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let seconds = now.unwrap_or_default().as_secs();
        self.last_failure.set(i64::try_from(seconds).unwrap_or(i64::MAX));
    }

    pub(super) fn received(&self, message: &DeltaDiscoveryResponse) {
        // Bounded, whatever is sent.
        let known = [ADDRESS, AUTHORIZATION].into_iter();
        let url = known
            .clone()
            .find(|url| *url == message.type_url)
            .unwrap_or("other");
        self.messages.get_or_create(&Url { url }).inc();
        self.bytes
            .get_or_create(&Url { url })
            .inc_by(message.encoded_len() as u64);
    }
}

/// A connection that is there.
pub(super) struct Connected<'a>(&'a Metrics);

impl Drop for Connected<'_> {
    fn drop(&mut self) {
        self.0.connected.set(0);
    }
}
