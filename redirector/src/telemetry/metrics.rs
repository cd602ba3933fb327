//! The registry of metrics and its text form.
//!
//! Each module registers its own `Metrics` here; `admin` serves the text.

use std::fs;

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric, text::encode},
    metrics::{family::Family, gauge::ConstGauge, gauge::Gauge},
    registry::Registry,
};

/// Content type of the OpenMetrics text form.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// A registry with what is true of any process.
pub fn registry() -> Registry {
    let mut registry = Registry::default();
    let build = Family::<Vec<(&str, &str)>, Gauge>::default();
    build
        .get_or_create(&vec![
            ("component", "redirector"),
            ("tag", env!("CARGO_PKG_VERSION")),
        ])
        .set(1);
    registry.register("istio_build", "Version of this component", build);
    registry.register_collector(Box::new(Process));
    registry
}

/// The metrics as text.
pub fn text(registry: &Registry) -> String {
    let mut text = String::new();
    // Writing to a String does not fail.
    let _ = encode(&mut text, registry);
    text
}

#[derive(Debug)]
struct Process;

impl Collector for Process {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let mut gauge = |name: &str, help: &str, value: u64| {
            let metric = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
            metric.encode(encoder.encode_descriptor(name, help, None, metric.metric_type())?)
        };
        if let Ok(open) = fs::read_dir("/proc/self/fd") {
            gauge("process_open_fds", "Open file descriptors", open.count() as u64)?;
        }
        if let Some(limit) = file_limit() {
            gauge("process_max_fds", "Limit of open file descriptors", limit)?;
        }
        Ok(())
    }
}

/// The soft limit, by proc_pid_limits(5); absent when unlimited.
fn file_limit() -> Option<u64> {
    let limits = fs::read_to_string("/proc/self/limits").ok()?;
    let rest = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max open files"))?;
    rest.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_process_is_described() {
        let text = text(&registry());
        for name in ["istio_build{", "process_open_fds ", "process_max_fds ", "# EOF"] {
            assert!(text.contains(name), "{name} in {text}");
        }
    }
}
