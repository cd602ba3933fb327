//! Istio's traffic metrics: connections and bytes, by who speaks to whom.
//!
//! A set of labels is found once for each connection, which then counts by [`Series`] without looking anything up. Sets are shared by all
//! pods of the node and live as long as a pod that has used them, or a connection. There is a bound for each pod and one for all; what
//! is beyond goes into a set without names, so that the totals stay right.

use std::{
    collections::HashMap,
    fmt::{self, Write as _},
    hash::{BuildHasher, RandomState},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
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
use crate::mesh::workload::Workload;

/// Sets of labels of all pods together; each is some 2 KB, and 5 lines of a scrape.
const MOST: usize = 10_000;

/// Sets of labels of one pod.
const MOST_OF_POD: usize = 1_000;

/// The values that tell sets of labels apart, borrowed from whoever has them: to look a set up copies nothing.
type Values<'a> = [&'a str; 25];

/// What is counted of the connections with one set of labels.
#[derive(Debug)]
pub(super) struct Series {
    values: Box<[Box<str>]>,
    text: Text,
    pub(super) opened: AtomicU64,
    /// By how they ended.
    ended: [AtomicU64; Flag::ALL.len()],
    /// From clients to servers.
    pub(super) received: AtomicU64,
    /// From servers to clients.
    pub(super) sent: AtomicU64,
}

impl Series {
    fn new(values: &Values<'_>) -> Self {
        Self {
            values: values.iter().map(|&value| value.into()).collect(),
            text: Text::of(values),
            opened: AtomicU64::new(0),
            ended: Default::default(),
            received: AtomicU64::new(0),
            sent: AtomicU64::new(0),
        }
    }

    fn is_of(&self, values: &Values<'_>) -> bool {
        self.values
            .iter()
            .map(|value| &**value)
            .eq(values.iter().copied())
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
    fn set(&self, hash: u64, values: &Values<'_>, is_bound: bool) -> Option<Arc<Series>> {
        let mut all = lock(&self.sets);
        let of_hash = all.by_hash.get(&hash).into_iter().flatten();
        let mut known = of_hash.filter_map(Weak::upgrade);
        if let Some(series) = known.find(|series| series.is_of(values)) {
            return Some(series);
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
        Some(series)
    }
}

impl All {
    /// Forgets what nobody holds.
    fn sweep(&mut self) {
        self.by_hash.retain(|_, sets| {
            sets.retain(|set| set.strong_count() > 0);
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
pub(super) struct OfPod(Mutex<(Sets<Arc<Series>>, usize)>);

impl OfPod {
    /// Where a connection is counted.
    pub(super) fn series(
        &self,
        traffic: &Traffic,
        direction: Direction,
        security: Security,
        facts: &Facts,
    ) -> Arc<Series> {
        let principals = Principals::of(direction, security, facts);
        let values = values(direction, security, facts, &principals);
        let hash = traffic.hasher.hash_one(values);
        let mut own = lock(&self.0);
        let mut known = own.0.get(&hash).into_iter().flatten();
        if let Some(series) = known.find(|series| series.is_of(&values)) {
            return series.clone();
        }
        let found = (own.1 < MOST_OF_POD)
            .then(|| traffic.set(hash, &values, true))
            .flatten();
        let (hash, series) = match found {
            Some(series) => (hash, series),
            None => {
                traffic.folded.inc();
                let values = without_names(direction, security);
                let hash = traffic.hasher.hash_one(values);
                let mut known = own.0.get(&hash).into_iter().flatten();
                if let Some(series) = known.find(|series| series.is_of(&values)) {
                    return series.clone();
                }
                // There are four of these: they need no bound.
                let series = traffic.set(hash, &values, false);
                (hash, series.expect("without a bound there is one"))
            }
        };
        own.0.entry(hash).or_default().push(series.clone());
        own.1 += 1;
        series
    }
}

/// Who the ends are: the source as TLS has proven it, the destination as the mesh has it, both in their three parts.
struct Principals<'a> {
    source: [&'a str; 3],
    destination: [&'a str; 3],
}

impl<'a> Principals<'a> {
    fn of(direction: Direction, security: Security, facts: &'a Facts) -> Self {
        let proven = facts
            .source
            .identity
            .as_ref()
            .filter(|_| security == Security::mutual_tls);
        let own = facts.destination.identity.as_ref();
        let own = own.filter(|_| direction == Direction::Inbound && security == Security::mutual_tls);
        let parts =
            |id: &'a crate::mesh::spiffe::SpiffeId| [id.trust_domain(), id.namespace(), id.service_account()];
        let of_mesh = facts.destination.of.as_deref().map(|workload| {
            [
                &*workload.trust_domain,
                &*workload.namespace,
                &*workload.service_account,
            ]
        });
        Self {
            source: proven.map(parts).unwrap_or_default(),
            destination: of_mesh.or(own.map(parts)).unwrap_or_default(),
        }
    }
}

fn reporter(direction: Direction) -> &'static str {
    match direction {
        Direction::Outbound => "source",
        Direction::Inbound => "destination",
    }
}

fn policy(security: Security) -> &'static str {
    match security {
        Security::mutual_tls => "mutual_tls",
        Security::unknown => "unknown",
    }
}

fn values<'a>(
    direction: Direction,
    security: Security,
    facts: &'a Facts,
    principals: &Principals<'a>,
) -> Values<'a> {
    /// Controller, canonical name and revision, namespace, cluster, region, zone.
    fn of(party: &Party) -> [&str; 7] {
        let Some(workload) = party.of.as_deref() else {
            let namespace = party.namespace.as_deref().unwrap_or_default();
            return [
                party.workload.as_deref().unwrap_or_default(),
                "",
                "",
                namespace,
                "",
                "",
                "",
            ];
        };
        let Workload {
            workload_name,
            canonical_name,
            canonical_revision,
            namespace,
            cluster_id,
            locality,
            ..
        } = workload;
        [
            workload_name,
            canonical_name,
            canonical_revision,
            namespace,
            cluster_id,
            &locality.region,
            &locality.zone,
        ]
    }
    let [
        s_name,
        s_canonical,
        s_revision,
        s_namespace,
        s_cluster,
        s_region,
        s_zone,
    ] = of(&facts.source);
    let [
        d_name,
        d_canonical,
        d_revision,
        d_namespace,
        d_cluster,
        d_region,
        d_zone,
    ] = of(&facts.destination);
    let [s_domain, s_owner, s_account] = principals.source;
    let [d_domain, d_owner, d_account] = principals.destination;
    let service = facts.service.as_deref();
    let [host, host_namespace, service_name] = service.map_or([""; 3], |service| {
        [&service.host.hostname, &service.host.namespace, &service.name]
    });
    [
        reporter(direction),
        s_name,
        s_canonical,
        s_revision,
        s_namespace,
        s_domain,
        s_owner,
        s_account,
        s_cluster,
        host,
        host_namespace,
        service_name,
        d_name,
        d_canonical,
        d_revision,
        d_namespace,
        d_domain,
        d_owner,
        d_account,
        d_cluster,
        policy(security),
        s_region,
        s_zone,
        d_region,
        d_zone,
    ]
}

fn without_names(direction: Direction, security: Security) -> Values<'static> {
    let mut values = [""; 25];
    values[0] = reporter(direction);
    values[20] = policy(security);
    values
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
    fn of(values: &Values<'_>) -> Self {
        let [
            reporter,
            s_name,
            s_canonical,
            s_revision,
            s_namespace,
            s_domain,
            s_owner,
            s_account,
            s_cluster,
            host,
            host_namespace,
            service_name,
            d_name,
            d_canonical,
            d_revision,
            d_namespace,
            d_domain,
            d_owner,
            d_account,
            d_cluster,
            security,
            locality @ ..,
        ] = *values;
        let principal = |domain: &str, namespace: &str, account: &str| {
            if domain.is_empty() {
                return String::new();
            }
            format!("spiffe://{domain}/ns/{namespace}/sa/{account}")
        };
        let s_principal = principal(s_domain, s_owner, s_account);
        let d_principal = principal(d_domain, d_owner, d_account);
        let before = labels(&[
            ("reporter", reporter),
            ("source_workload", s_name),
            ("source_canonical_service", s_canonical),
            ("source_canonical_revision", s_revision),
            ("source_workload_namespace", s_namespace),
            ("source_principal", &s_principal),
            ("source_app", s_canonical),
            ("source_version", s_revision),
            ("source_cluster", s_cluster),
            ("destination_service", host),
            ("destination_service_namespace", host_namespace),
            ("destination_service_name", service_name),
            ("destination_workload", d_name),
            ("destination_canonical_service", d_canonical),
            ("destination_canonical_revision", d_revision),
            ("destination_workload_namespace", d_namespace),
            ("destination_principal", &d_principal),
            ("destination_app", d_canonical),
            ("destination_version", d_revision),
            ("destination_cluster", d_cluster),
            ("request_protocol", "tcp"),
        ]);
        // As Istio has it: nobody knows where those are of whom the mesh knows nothing.
        let is_known = !(s_canonical.is_empty() && d_canonical.is_empty());
        let [s_region, s_zone, d_region, d_zone] = locality;
        let (after, last) = if is_known {
            let after = labels(&[
                ("connection_security_policy", security),
                ("source_region", s_region),
                ("source_zone", s_zone),
                ("destination_region", d_region),
            ]);
            (format!("{after},destination_zone"), d_zone)
        } else {
            ("connection_security_policy".to_owned(), security)
        };
        Self {
            before: format!("{before},response_flags").into(),
            after: after.into(),
            last: or_unknown(last).into(),
        }
    }
}

fn or_unknown(value: &str) -> &str {
    if value.is_empty() { "unknown" } else { value }
}

fn labels(labels: &[(&str, &str)]) -> String {
    let mut text = String::new();
    for (index, (name, value)) in labels.iter().enumerate() {
        let comma = if index == 0 { "" } else { "," };
        // Writing to a String does not fail.
        let _ = write!(text, "{comma}{name}=\"");
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
    text
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
