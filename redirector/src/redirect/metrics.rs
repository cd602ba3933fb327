//! The programs' packet counters as metrics: read from the kernel whenever somebody asks.

use std::{fmt, sync::Arc};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{MetricType, counter::ConstCounter},
    registry::Registry,
};

use super::Redirector;

/// Registers `redirector_verdicts_total{pod, program, verdict}`: packets of each pod, by what a program made of them.
pub fn register(registry: &mut Registry, redirector: Arc<dyn Redirector>) {
    registry.register_collector(Box::new(Verdicts(redirector)));
}

struct Verdicts(Arc<dyn Redirector>);

impl fmt::Debug for Verdicts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Verdicts({})", self.0.name())
    }
}

impl Collector for Verdicts {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let pods = match self.0.attached() {
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
        for pod in pods {
            // A pod that was detached in between has none.
            for count in self.0.counts(&pod).unwrap_or_default() {
                let labels = [
                    ("pod", pod.as_str()),
                    ("program", count.program),
                    ("verdict", count.verdict),
                ];
                ConstCounter::new(count.packets).encode(counter.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}
