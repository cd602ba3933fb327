//! On what was measured: kernel, processors, load.

use std::{fs, thread};

use serde_json::{Value, json};

/// The kernel's release.
pub(crate) fn kernel() -> String {
    read("/proc/sys/kernel/osrelease")
}

/// Whether the kernel's release is this one or a later one.
pub(crate) fn kernel_is_at_least(wanted: (u32, u32)) -> bool {
    release(&kernel()).is_some_and(|release| release >= wanted)
}

/// `6.18.44-something`.
fn release(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split(|c: char| !c.is_ascii_digit());
    let mut next = || numbers.next()?.parse().ok();
    Some((next()?, next()?))
}

/// Processors this process may use.
pub(crate) fn cpus() -> usize {
    thread::available_parallelism().map_or(0, usize::from)
}

/// A machine, as it was at one time.
#[derive(Debug, Clone)]
pub(crate) struct Machine {
    pub(crate) kernel: String,
    pub(crate) cpu: String,
    pub(crate) cpus: usize,
    pub(crate) memory_mib: u64,
    /// Processes that ran or waited for a processor, on average of the last minute.
    pub(crate) load: String,
}

impl Machine {
    /// Now.
    pub(crate) fn now() -> Self {
        Self {
            kernel: kernel(),
            cpu: cpu_model(&read("/proc/cpuinfo")).unwrap_or_else(|| "unknown".to_owned()),
            cpus: cpus(),
            memory_mib: total_memory_kib(&read("/proc/meminfo")).unwrap_or(0) / 1024,
            load: load(),
        }
    }

    pub(crate) fn to_json(&self) -> Value {
        json!({
            "kernel": self.kernel, "cpu": self.cpu, "cpus": self.cpus, "memory_mib": self.memory_mib,
            "load_before": self.load,
        })
    }
}

/// Average load of the last minute.
pub(crate) fn load() -> String {
    read("/proc/loadavg")
        .split(' ')
        .next()
        .unwrap_or_default()
        .to_owned()
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

fn cpu_model(cpuinfo: &str) -> Option<String> {
    let line = cpuinfo.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

fn total_memory_kib(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_is_read() {
        assert_eq!(release("6.1.0-53-amd64"), Some((6, 1)));
        assert!(release("6.18.44-x").unwrap() >= (6, 6) && release("x").is_none());
        assert_eq!(
            cpu_model("processor\t: 0\nmodel name\t: A B @ 2.00GHz\n").as_deref(),
            Some("A B @ 2.00GHz")
        );
        assert_eq!(
            total_memory_kib("MemTotal:        4026548 kB\nMemFree: 1 kB\n"),
            Some(4_026_548)
        );
    }
}
