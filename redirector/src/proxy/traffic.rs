//! Istio's traffic metrics: connections and bytes, by who speaks to whom.
//!
//! A set of labels is found once for each connection, which then counts by [`Series`] without looking anything up. Sets are shared by all
//! pods of the node and go with the last that has used them. There is a bound for each pod and one for all; what
//! is beyond goes into a set without names, so that the totals stay right.

use std::{
    collections::HashMap,
    fmt::{self, Write as _},
    hash::{BuildHasher, RandomState},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric, LabelSetEncoder},
    metrics::{
        MetricType,
        counter::{ConstCounter, Counter},
    },
    registry::Registry,
};

use super::{
    failure::Flag,
    flows::Facts,
    record::{Direction, Party, Security},
};
use crate::mesh::spiffe::SpiffeId;

/// Sets of labels of all pods together; each is some 2 KB, and 5 lines of a scrape.
const MOST: usize = 10_000;

/// Sets of labels of one pod.
const MOST_OF_POD: usize = 1_000;

/// What tells sets of labels apart. To look a set up, it is borrowed from whoever has it, and nothing is copied.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Values<S> {
    reporter: &'static str,
    source: Side<S>,
    /// Host name, its namespace, and name.
    service: [S; 3],
    destination: Side<S>,
    security: &'static str,
}

/// An end of connections.
#[derive(Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Side<S> {
    /// The workload's controller.
    workload: S,
    canonical_name: S,
    canonical_revision: S,
    namespace: S,
    /// Trust domain, namespace and service account.
    principal: [S; 3],
    cluster: S,
    region: S,
    zone: S,
}

impl<'a> Values<&'a str> {
    /// The source's identity is as TLS has proven it, the destination's as the mesh has it.
    fn of(direction: Direction, security: Security, facts: &'a Facts) -> Self {
        let Facts {
            source,
            destination,
            service,
            ..
        } = facts;
        let is_proven = security == Security::MutualTls;
        let parts = |id: &'a SpiffeId| [id.trust_domain(), id.namespace(), id.service_account()];
        let proven = source.identity.as_ref().filter(|_| is_proven);
        let own = destination.identity.as_ref();
        let own = own.filter(|_| direction == Direction::Inbound && is_proven);
        let of_mesh = destination.of.as_deref().map(|workload| {
            [
                &*workload.trust_domain,
                &*workload.namespace,
                &*workload.service_account,
            ]
        });
        Self {
            source: Side::of(source, proven.map(parts).unwrap_or_default()),
            service: service.as_deref().map_or([""; 3], |service| {
                [&service.host.hostname, &service.host.namespace, &service.name]
            }),
            destination: Side::of(destination, of_mesh.or(own.map(parts)).unwrap_or_default()),
            ..Self::without_names(direction, security)
        }
    }

    fn without_names(direction: Direction, security: Security) -> Self {
        Self {
            reporter: direction.reporter(),
            source: Side::default(),
            service: [""; 3],
            destination: Side::default(),
            security: security.as_str(),
        }
    }
}

impl<S> Values<S> {
    fn each<'a, T>(&'a self, make: impl Fn(&'a S) -> T + Copy) -> Values<T> {
        Values {
            reporter: self.reporter,
            source: self.source.each(make),
            service: self.service.each_ref().map(make),
            destination: self.destination.each(make),
            security: self.security,
        }
    }
}

impl<'a> Side<&'a str> {
    fn of(party: &'a Party, principal: [&'a str; 3]) -> Self {
        let Some(workload) = party.of.as_deref() else {
            return Self {
                workload: party.workload.as_deref().unwrap_or_default(),
                namespace: party.namespace.as_deref().unwrap_or_default(),
                principal,
                ..Self::default()
            };
        };
        Self {
            workload: &workload.workload_name,
            canonical_name: &workload.canonical_name,
            canonical_revision: &workload.canonical_revision,
            namespace: &workload.namespace,
            principal,
            cluster: &workload.cluster_id,
            region: &workload.locality.region,
            zone: &workload.locality.zone,
        }
    }
}

impl<S> Side<S> {
    fn each<'a, T>(&'a self, make: impl Fn(&'a S) -> T + Copy) -> Side<T> {
        Side {
            workload: make(&self.workload),
            canonical_name: make(&self.canonical_name),
            canonical_revision: make(&self.canonical_revision),
            namespace: make(&self.namespace),
            principal: self.principal.each_ref().map(make),
            cluster: make(&self.cluster),
            region: make(&self.region),
            zone: make(&self.zone),
        }
    }
}

/// What is counted of the connections with one set of labels.
#[derive(Debug)]
pub(super) struct Series {
    values: Values<Box<str>>,
    text: Text,
    /// How many pods have used it: without one it is not shown, though ended connections may still be remembered with it.
    pods: AtomicUsize,
    pub(super) opened: AtomicU64,
    /// By how they ended.
    ended: [AtomicU64; Flag::ALL.len()],
    /// From clients to servers.
    pub(super) received: AtomicU64,
    /// From servers to clients.
    pub(super) sent: AtomicU64,
}

impl Series {
    fn new(values: &Values<&str>) -> Self {
        Self {
            values: values.each(|&value| value.into()),
            text: Text::of(values),
            pods: AtomicUsize::new(0),
            opened: AtomicU64::new(0),
            ended: Default::default(),
            received: AtomicU64::new(0),
            sent: AtomicU64::new(0),
        }
    }

    fn is_of(&self, values: &Values<&str>) -> bool {
        self.values.each(|value| &**value) == *values
    }

    /// One has ended so.
    pub(super) fn end(&self, flag: Flag) {
        self.ended[flag as usize].fetch_add(1, Ordering::Relaxed);
    }
}

/// Sets by the hash of their values. Few have the same.
type Sets<T> = HashMap<u64, Vec<T>>;

/// The traffic of all pods.
#[derive(Debug)]
pub(super) struct Traffic {
    sets: Arc<Mutex<All>>,
    hasher: RandomState,
    most: usize,
    /// Connections that were counted without names.
    folded: Counter,
}

#[derive(Debug, Default)]
struct All {
    by_hash: Sets<Weak<Series>>,
    count: usize,
}

impl Default for Traffic {
    fn default() -> Self {
        Self {
            sets: Arc::default(),
            hasher: RandomState::new(),
            most: MOST,
            folded: Counter::default(),
        }
    }
}

impl Traffic {
    /// Names them in `registry`.
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register_collector(Box::new(Shown(self.sets.clone())));
        registry.register(
            "redirector_metrics_folded",
            "Connections whose names are left out of the traffic metrics, since there are too many",
            self.folded.clone(),
        );
    }

    /// The set with these values, or a new one; `None` if that would be too many.
    fn set(&self, hash: u64, values: &Values<&str>, is_bound: bool) -> Option<Used> {
        let mut all = lock(&self.sets);
        let of_hash = all.by_hash.get(&hash).into_iter().flatten();
        let mut known = of_hash.filter_map(Weak::upgrade);
        if let Some(series) = known.find(|series| series.is_of(values)) {
            return Some(Used::by_a_pod(series));
        }
        if is_bound && all.count >= self.most {
            all.sweep();
            if all.count >= self.most {
                return None;
            }
        }
        let series = Arc::new(Series::new(values));
        all.by_hash.entry(hash).or_default().push(Arc::downgrade(&series));
        all.count += 1;
        Some(Used::by_a_pod(series))
    }
}

/// A set that a pod has used.
#[derive(Debug)]
struct Used(Arc<Series>);

impl Used {
    /// To be called within the lock of all sets, so that none is swept between its find and its use.
    fn by_a_pod(series: Arc<Series>) -> Self {
        series.pods.fetch_add(1, Ordering::Relaxed);
        Self(series)
    }
}

impl Drop for Used {
    fn drop(&mut self) {
        self.0.pods.fetch_sub(1, Ordering::Relaxed);
    }
}

impl All {
    /// Forgets what no pod has used that is still there.
    fn sweep(&mut self) {
        let is_used = |series: Arc<Series>| series.pods.load(Ordering::Relaxed) > 0;
        self.by_hash.retain(|_, sets| {
            sets.retain(|set| set.upgrade().is_some_and(is_used));
            !sets.is_empty()
        });
        self.count = self.by_hash.values().map(Vec::len).sum();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each critical section leaves what is in it whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The sets that one pod has used.
#[derive(Debug, Default)]
pub(super) struct OfPod(Mutex<Own>);

#[derive(Debug, Default)]
struct Own {
    by_hash: Sets<Used>,
    count: usize,
}

impl OfPod {
    /// Where a connection is counted.
    pub(super) fn series(
        &self,
        traffic: &Traffic,
        direction: Direction,
        security: Security,
        facts: &Facts,
    ) -> Arc<Series> {
        let values = Values::of(direction, security, facts);
        let mut own = lock(&self.0);
        if let Some(series) = own.series(traffic, &values, true) {
            return series;
        }
        traffic.folded.inc();
        // There are four of these: they need no bound.
        let unnamed = own.series(traffic, &Values::without_names(direction, security), false);
        unnamed.expect("without a bound there is one")
    }
}

impl Own {
    /// The set with these values; `None` if that would be one too many.
    fn series(&mut self, traffic: &Traffic, values: &Values<&str>, is_bound: bool) -> Option<Arc<Series>> {
        let hash = traffic.hasher.hash_one(values);
        let mut known = self.by_hash.get(&hash).into_iter().flatten();
        if let Some(Used(series)) = known.find(|Used(series)| series.is_of(values)) {
            return Some(series.clone());
        }
        if is_bound && self.count >= MOST_OF_POD {
            return None;
        }
        let used = traffic.set(hash, values, is_bound)?;
        let series = used.0.clone();
        self.by_hash.entry(hash).or_default().push(used);
        self.count += 1;
        Some(series)
    }
}

/// A set's labels as they are written, all but the one value that differs within it. Written once, copied by each scrape.
#[derive(Debug)]
struct Text {
    /// Up to the name of `response_flags`.
    before: Box<str>,
    /// From there to the name of the last label.
    after: Box<str>,
    /// Its value, raw.
    last: Box<str>,
}

impl Text {
    fn of(values: &Values<&str>) -> Self {
        let Values {
            reporter,
            source,
            service: [host, host_namespace, service_name],
            destination,
            security,
        } = values;
        let mut before = String::new();
        write_labels(&mut before, "", &[("reporter", reporter)]);
        source.write(&mut before, "source_");
        let service = [
            ("service", *host),
            ("service_namespace", host_namespace),
            ("service_name", service_name),
        ];
        write_labels(&mut before, "destination_", &service);
        destination.write(&mut before, "destination_");
        write_labels(&mut before, "", &[("request_protocol", "tcp")]);
        before.push_str(",response_flags");
        // As Istio has it: nobody knows where those are of whom the mesh knows nothing.
        let is_known = !(source.canonical_name.is_empty() && destination.canonical_name.is_empty());
        let mut after = String::new();
        let last = if is_known {
            let rest = [
                ("connection_security_policy", *security),
                ("source_region", source.region),
                ("source_zone", source.zone),
                ("destination_region", destination.region),
            ];
            write_labels(&mut after, "", &rest);
            after.push_str(",destination_zone");
            destination.zone
        } else {
            after.push_str("connection_security_policy");
            security
        };
        Self {
            before: before.into(),
            after: after.into(),
            last: or_unknown(last).into(),
        }
    }
}

impl Side<&str> {
    /// Writes its labels, but for its place.
    fn write(&self, text: &mut String, prefix: &str) {
        let [domain, namespace, account] = self.principal;
        let principal = match domain {
            "" => String::new(),
            _ => format!("spiffe://{domain}/ns/{namespace}/sa/{account}"),
        };
        let labels = [
            ("workload", self.workload),
            ("canonical_service", self.canonical_name),
            ("canonical_revision", self.canonical_revision),
            ("workload_namespace", self.namespace),
            ("principal", &principal),
            ("app", self.canonical_name),
            ("version", self.canonical_revision),
            ("cluster", self.cluster),
        ];
        write_labels(text, prefix, &labels);
    }
}

fn or_unknown(value: &str) -> &str {
    if value.is_empty() { "unknown" } else { value }
}

fn write_labels(text: &mut String, prefix: &str, labels: &[(&str, &str)]) {
    for (name, value) in labels {
        let comma = if text.is_empty() { "" } else { "," };
        // Writing to a String does not fail.
        let _ = write!(text, "{comma}{prefix}{name}=\"");
        for c in or_unknown(value).chars() {
            match c {
                '\\' => text.push_str("\\\\"),
                '"' => text.push_str("\\\""),
                '\n' => text.push_str("\\n"),
                c => text.push(c),
            }
        }
        text.push('"');
    }
}

/// A set's labels with one value of `response_flags`.
#[derive(Debug)]
struct Labels<'a>(&'a Text, Flag);

impl EncodeLabelSet for Labels<'_> {
    /// What is written before the last equals sign is all the name to the encoder, which takes names as they are.
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> fmt::Result {
        let Text { before, after, last } = self.0;
        for (name, value) in [(before, self.1.as_str()), (after, last)] {
            let mut label = encoder.encode_label();
            let mut key = label.encode_label_key()?;
            key.write_str(name)?;
            let mut written = key.encode_label_value()?;
            written.write_str(value)?;
            written.finish()?;
        }
        Ok(())
    }
}

/// The sets, for a scrape.
#[derive(Debug)]
struct Shown(Arc<Mutex<All>>);

impl Collector for Shown {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut sets: Vec<Arc<Series>> = {
            let mut all = lock(&self.0);
            all.sweep();
            let sets = all.by_hash.values().flatten();
            sets.filter_map(Weak::upgrade).collect()
        };
        // So that two scrapes can be compared.
        sets.sort_unstable_by(|one, other| one.values.cmp(&other.values));
        let mut family =
            |name: &str, help: &str, flags: &[Flag], value: &dyn Fn(&Series, Flag) -> Option<u64>| {
                let mut encoder = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
                for set in &sets {
                    for &flag in flags {
                        if let Some(value) = value(set, flag) {
                            let labels = Labels(&set.text, flag);
                            ConstCounter::new(value).encode(encoder.encode_family(&labels)?)?;
                        }
                    }
                }
                Ok(())
            };
        let load = |value: &AtomicU64| value.load(Ordering::Relaxed);
        let ended = |set: &Series, flag| Some(load(&set.ended[flag as usize])).filter(|&value| value > 0);
        const OPEN: &[Flag] = &[Flag::None];
        family(
            "istio_tcp_connections_opened",
            "Connections that began",
            OPEN,
            &|set, _| Some(load(&set.opened)),
        )?;
        family(
            "istio_tcp_connections_closed",
            "Connections that ended",
            &Flag::ALL,
            &ended,
        )?;
        family(
            "istio_tcp_connections_failed",
            "Connections that ended by a failure",
            &Flag::ALL[1..],
            &ended,
        )?;
        family(
            "istio_tcp_received_bytes",
            "Bytes from clients to servers",
            OPEN,
            &|set, _| Some(load(&set.received)),
        )?;
        family(
            "istio_tcp_sent_bytes",
            "Bytes from servers to clients",
            OPEN,
            &|set, _| Some(load(&set.sent)),
        )
    }
}

#[cfg(test)]
mod tests;
