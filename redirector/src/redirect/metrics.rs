//! The backend as metrics: its programs' packet counters, its maps and its repairs; read whenever somebody asks.

use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
    registry::Registry,
};

use super::Redirector;

/// Namespaces and names of pods, by UID.
pub type Names = HashMap<String, (String, String)>;

/// Registers the metrics of `redirector`, whose pods have `names`.
pub fn register(
    registry: &mut Registry,
    redirector: Arc<dyn Redirector>,
    names: impl Fn() -> Names + Send + Sync + 'static,
) {
    registry.register_collector(Box::new(Shown {
        redirector,
        names: Box::new(names),
    }));
}

/// How full a map is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Occupancy {
    /// What is in it.
    pub map: &'static str,
    /// How many there are.
    pub entries: usize,
    /// How many there may be.
    pub most: usize,
}

/// What was put back that somebody had taken away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Repair {
    /// Programs or pins of a pod.
    Hooks,
    /// Rules, routes or sysctls of a pod.
    Routing,
    /// What all pods share.
    Shared,
}

/// How often that was so.
#[derive(Debug, Default)]
pub struct Repairs([AtomicU64; 3]);

impl Repairs {
    const LABELS: [&'static str; 3] = ["hooks", "routing", "shared"];

    /// It was so once more.
    pub(super) fn add(&self, repair: Repair) {
        self.0[repair as usize].fetch_add(1, Ordering::Relaxed);
    }

    fn counts(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let counts = self.0.iter().map(|count| count.load(Ordering::Relaxed));
        Self::LABELS.into_iter().zip(counts)
    }
}

struct Shown {
    redirector: Arc<dyn Redirector>,
    names: Box<dyn Fn() -> Names + Send + Sync>,
}

impl fmt::Debug for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Shown({})", self.redirector.name())
    }
}

impl Collector for Shown {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.verdicts(&mut encoder)?;
        let maps = self.redirector.occupancy();
        if !maps.is_empty() {
            let mut gauge = |name: &str, help: &str, value: fn(&Occupancy) -> usize| {
                let mut gauge = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
                maps.iter().try_for_each(|map| {
                    let value = ConstGauge::new(i64::try_from(value(map)).unwrap_or(i64::MAX));
                    value.encode(gauge.encode_family(&[("map", map.map)])?)
                })
            };
            gauge("redirector_map_entries", "What the programs' maps hold", |map| {
                map.entries
            })?;
            gauge(
                "redirector_map_max_entries",
                "What the programs' maps can hold",
                |map| map.most,
            )?;
        }
        let Some(repairs) = self.redirector.repairs() else {
            return Ok(());
        };
        let mut counter = encoder.encode_descriptor(
            "redirector_repairs",
            "What of the pods' capture was put back after somebody had taken it away",
            None,
            MetricType::Counter,
        )?;
        for (what, count) in repairs.counts() {
            ConstCounter::new(count).encode(counter.encode_family(&[("what", what)])?)?;
        }
        Ok(())
    }
}

impl Shown {
    fn verdicts(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let pods = match self.redirector.attached() {
            Ok(pods) => pods,
            Err(error) => {
                tracing::warn!(%error, "the packet counters are not readable");
                return Ok(());
            }
        };
        let mut counter = encoder.encode_descriptor(
            "redirector_verdicts",
            "Packets, by what a program in the pod made of them",
            None,
            MetricType::Counter,
        )?;
        let names = (self.names)();
        for pod in pods {
            let uid = pod.as_str();
            // What an earlier agent left for a pod that is gone has no name any more.
            let (namespace, name) = names
                .get(uid)
                .map_or(("", ""), |(namespace, name)| (namespace, name));
            // A pod that was detached in between has none.
            for count in self.redirector.counts(&pod).unwrap_or_default() {
                let labels = [
                    ("pod", uid),
                    ("program", count.program),
                    ("verdict", count.verdict),
                    ("namespace", namespace),
                    ("pod_name", name),
                    ("uid", uid),
                ];
                ConstCounter::new(count.packets).encode(counter.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}
