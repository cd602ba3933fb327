//! The registry of metrics and its text form.
//!
//! Each module registers its own `Metrics` here; `admin` serves the text.

use std::{fmt, fs, time::Duration};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{
        MetricType,
        counter::ConstCounter,
        family::Family,
        gauge::{ConstGauge, Gauge},
    },
    registry::Registry,
};
use tokio::runtime::Handle;

/// Content type of the OpenMetrics text form, for those who accept it.
pub const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// What the same text is to the others.
pub const PLAIN: &str = "text/plain; version=0.0.4; charset=utf-8";

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

#[derive(Debug)]
struct Process;

impl Collector for Process {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
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
        if let Ok(status) = fs::read_to_string("/proc/self/status") {
            let value = |key| status.lines().find_map(|line| number(line.strip_prefix(key)?));
            if let Some(kilobytes) = value("VmRSS:") {
                let help = "Memory that the process has in RAM";
                gauge("process_resident_memory_bytes", help, kilobytes * 1024)?;
            }
            if let Some(threads) = value("Threads:") {
                gauge("process_threads", "Threads of the process", threads)?;
            }
        }
        if let Some(times) = Times::now() {
            let help = "When the process was started, by the node's clock, since 1970";
            gauge("process_start_time_seconds", help, times.started)?;
            let help = "CPU time of the process, its own and the kernel's for it";
            seconds(&mut encoder, "process_cpu_seconds", help, times.cpu)?;
        }
        runtime(encoder)
    }
}

fn seconds(encoder: &mut DescriptorEncoder<'_>, name: &str, help: &str, value: Duration) -> fmt::Result {
    let counter = ConstCounter::new(value.as_secs_f64());
    counter.encode(encoder.encode_descriptor(name, help, None, MetricType::Counter)?)
}

/// What tokio tells of the runtime that this is called in.
fn runtime(mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
    let Ok(handle) = Handle::try_current() else {
        return Ok(());
    };
    let runtime = handle.metrics();
    let workers = runtime.num_workers();
    for (name, help, value) in [
        ("tokio_workers", "Threads that run tasks", workers),
        (
            "tokio_alive_tasks",
            "Tasks that have not ended",
            runtime.num_alive_tasks(),
        ),
        (
            "tokio_global_queue_depth",
            "Tasks that wait for any worker",
            runtime.global_queue_depth(),
        ),
    ] {
        let gauge = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
        gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
    }
    let busy = (0..workers).map(|worker| runtime.worker_total_busy_duration(worker));
    let help = "Time in which workers were not waiting, of all together";
    seconds(&mut encoder, "tokio_busy_seconds", help, busy.sum())
}

/// The first number of a text.
fn number(text: &str) -> Option<u64> {
    text.split_whitespace().next()?.parse().ok()
}

/// Times of the process.
struct Times {
    cpu: Duration,
    /// Seconds since 1970.
    started: u64,
}

impl Times {
    /// By proc_pid_stat(5) and proc_stat(5).
    fn now() -> Option<Self> {
        /// In which the kernel tells times to processes, whatever its own ticks are: USER_HZ, 100 on x86 and arm64.
        const TICKS_PER_SECOND: u64 = 100;
        let stat = fs::read_to_string("/proc/self/stat").ok()?;
        // After the program's name, which may hold anything, comes the third field.
        let fields: Vec<_> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
        let node = fs::read_to_string("/proc/stat").ok()?;
        let booted = node
            .lines()
            .find_map(|line| number(line.strip_prefix("btime")?))?;
        Some(Self {
            cpu: Duration::from_millis((field(14)? + field(15)?) * 1000 / TICKS_PER_SECOND),
            started: booted + field(22)? / TICKS_PER_SECOND,
        })
    }
}

/// The soft limit, by proc_pid_limits(5); absent when unlimited.
fn file_limit() -> Option<u64> {
    let limits = fs::read_to_string("/proc/self/limits").ok()?;
    let rest = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max open files"))?;
    number(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_process_is_described() {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry()).unwrap();
        let value = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            let value = line.unwrap_or_else(|| panic!("{name} in {text}"));
            value.trim().parse::<f64>().unwrap()
        };
        assert!(
            text.contains("istio_build{") && text.ends_with("# EOF\n"),
            "{text}"
        );
        for name in ["process_open_fds ", "process_threads ", "tokio_workers "] {
            assert!(value(name) >= 1.0, "{name}");
        }
        assert!(value("process_max_fds ") >= value("process_open_fds "));
        assert!(value("process_resident_memory_bytes ") > 1e6);
        assert!(value("tokio_busy_seconds_total ") >= 0.0);
        // Within this test's own time, which is less than that of a day.
        let now = std::time::SystemTime::now();
        let now = now.duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64();
        let age = now - value("process_start_time_seconds ");
        assert!((-5.0..86_400.0).contains(&age), "{age}");
        assert!((0.0..86_400.0).contains(&value("process_cpu_seconds_total ")));
    }
}
