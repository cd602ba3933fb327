//! Counters of the connection to the control plane, by ztunnel's names.

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{counter::Counter, family::Family},
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
    }

    pub(super) fn terminated(&self, reason: Reason) {
        self.terminations.get_or_create(&Termination { reason }).inc();
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
