//! What a pod says and hears in plain through its proxy: whether it may, and how many bytes it was.
//!
//! `outbound` and `passthrough` ask before they carry a connection over the wire in plain, and end it when the answer changes. What
//! a pod says to itself is on no wire: it is neither refused nor counted.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};
use tokio::sync::watch;

use super::{
    failure::{Failure, Flag},
    metrics::Metrics,
    record::Direction,
};
use crate::mesh::pod::PodInfo;

/// Why a connection is refused that would be in plain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the pod is strict, and this connection would be in plain; who is at its other end is to be enrolled, or the connection to be left \
     alone by the rules"
)]
pub(super) struct Refused;

impl Failure for Refused {
    fn flag(&self) -> Flag {
        Flag::Deny
    }
}

/// The bytes of all pods' connections in plain.
#[derive(Debug, Default)]
pub(super) struct Bytes {
    family: Family<Labels, Counter>,
    /// How many proxies there are of a pod: one that is being stopped and its successor may meet.
    holders: Mutex<HashMap<Key, usize>>,
}

/// Namespace, name and UID.
type Key = [String; 3];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    namespace: String,
    pod: String,
    direction: Opened,
    pod_name: String,
    uid: String,
}

/// Who opened the connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "the names are the labels' values")]
enum Opened {
    inbound,
    outbound,
}

impl Bytes {
    /// Names them in `registry`.
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register(
            "redirector_plaintext_bytes",
            "Bytes, both ways, of the connections that an enrolled pod opened (outbound) or got (inbound) in plain",
            self.family.clone(),
        );
    }
}

fn labels([namespace, name, uid]: &Key) -> [Labels; 2] {
    [Opened::inbound, Opened::outbound].map(|direction| Labels {
        namespace: namespace.clone(),
        pod: name.clone(),
        direction,
        pod_name: name.clone(),
        uid: uid.clone(),
    })
}

/// A pod's share in [`Bytes`]. Its series are there from the beginning, so that none is proven by a zero, and go with it.
struct Series {
    metrics: Arc<Metrics>,
    key: Key,
    inbound: Counter,
    outbound: Counter,
}

impl Series {
    fn of(metrics: Arc<Metrics>, pod: &PodInfo) -> Self {
        let key = [pod.namespace.clone(), pod.name.clone(), pod.uid.to_string()];
        let bytes = &metrics.plaintext;
        let mut holders = bytes.holders.lock().unwrap_or_else(PoisonError::into_inner);
        *holders.entry(key.clone()).or_default() += 1;
        let [inbound, outbound] = labels(&key).map(|labels| bytes.family.get_or_create(&labels).clone());
        drop(holders);
        Self {
            metrics,
            key,
            inbound,
            outbound,
        }
    }
}

impl Drop for Series {
    fn drop(&mut self) {
        let bytes = &self.metrics.plaintext;
        let mut holders = bytes.holders.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(left) = holders.get_mut(&self.key) else {
            return;
        };
        *left -= 1;
        if *left == 0 {
            holders.remove(&self.key);
            for labels in labels(&self.key) {
                bytes.family.remove(&labels);
            }
        }
    }
}

/// Whether a pod may speak in plain, and what it did.
pub(super) struct Plaintext {
    strict: watch::Sender<bool>,
    series: Series,
}

impl Plaintext {
    /// Of a pod that is `strict` or not.
    pub(super) fn new(metrics: Arc<Metrics>, pod: &PodInfo, strict: bool) -> Self {
        Self {
            strict: watch::Sender::new(strict),
            series: Series::of(metrics, pod),
        }
    }

    /// Allows or refuses it from now on.
    pub(super) fn set_strict(&self, strict: bool) {
        self.strict
            .send_if_modified(|now| std::mem::replace(now, strict) != strict);
    }

    /// Whether it is refused now.
    pub(super) fn is_refused(&self) -> bool {
        *self.strict.borrow()
    }

    /// Waits until it is refused. Cancel-safe.
    pub(super) async fn refused(&self) {
        let mut strict = self.strict.subscribe();
        // The sender is there as long as this is.
        let _ = strict.wait_for(|&strict| strict).await;
    }

    /// Runs `connection` to its end. One that is `on_wire` is dropped when it is refused: what it holds, its legs and its record,
    /// must say so then.
    pub(super) async fn unless_refused(&self, on_wire: bool, connection: impl Future<Output = ()>) {
        tokio::select! {
            biased;
            () = self.refused(), if on_wire => {}
            () = connection => {}
        }
    }

    /// Where the bytes are counted of connections that were opened so.
    pub(super) fn counter(&self, direction: Direction) -> &Counter {
        match direction {
            Direction::Inbound => &self.series.inbound,
            Direction::Outbound => &self.series.outbound,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(name: &str) -> PodInfo {
        PodInfo {
            uid: "u-1".parse().unwrap(),
            name: name.into(),
            namespace: "shop".into(),
            service_account: "web".into(),
        }
    }

    fn text(metrics: &Metrics) -> String {
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        text
    }

    #[test]
    fn series_are_there_from_the_first_and_until_the_last_proxy_of_a_pod() {
        let metrics = Arc::new(Metrics::default());
        let line = |name: &str, direction: &str, bytes: u64| {
            format!(
                "redirector_plaintext_bytes_total{{namespace=\"shop\",pod=\"{name}\",direction=\"{direction}\",pod_name=\"{name}\",uid=\"u-1\"}} {bytes}"
            )
        };
        let old = Plaintext::new(metrics.clone(), &pod("db-0"), false);
        let other = Plaintext::new(metrics.clone(), &pod("web"), false);
        assert!(text(&metrics).contains(&line("db-0", "inbound", 0)));
        old.counter(Direction::Outbound).inc_by(7);
        let new = Plaintext::new(metrics.clone(), &pod("db-0"), false);
        drop(old);
        new.counter(Direction::Outbound).inc_by(2);
        assert!(text(&metrics).contains(&line("db-0", "outbound", 9)));
        drop(new);
        let left = text(&metrics);
        assert!(!left.contains("db-0"), "{left}");
        assert!(left.contains(&line("web", "outbound", 0)), "{left}");
        drop(other);
        assert!(metrics.plaintext.holders.lock().unwrap().is_empty());
    }

    #[tokio::test]
    async fn whoever_waits_is_told_of_a_change_and_of_what_was_before() {
        let plaintext = Plaintext::new(Arc::default(), &pod("web"), false);
        assert!(!plaintext.is_refused());
        let waits = plaintext.refused();
        let changes = async {
            tokio::task::yield_now().await;
            plaintext.set_strict(true);
        };
        tokio::join!(waits, changes);
        plaintext.refused().await;
        assert!(plaintext.is_refused());
        plaintext.set_strict(false);
        assert!(!plaintext.is_refused());
    }
}
