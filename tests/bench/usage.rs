//! What a load took: processor time of the machine by kind, and of one process; its memory and descriptors.

use std::{
    fs,
    ops::{Add, Sub},
};

use anyhow::{Context, Result};
use nix::unistd::{SysconfVar, sysconf};

/// Processor time in seconds. Resolution: the kernel's tick, 10 ms as a rule.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Cpu {
    /// The machine, in user space.
    pub(crate) user: f64,
    /// The machine, in the kernel but for the next.
    pub(crate) system: f64,
    /// The machine, in soft interrupts, where most of networking happens.
    pub(crate) softirq: f64,
    /// The agent, in user space and in the kernel.
    pub(crate) agent: f64,
}

impl Cpu {
    /// Since the machine and the process started.
    pub(crate) fn now(agent: u32) -> Result<Self> {
        let ticks_per_second =
            sysconf(SysconfVar::CLK_TCK)?.context("the kernel's tick is not known")? as f64;
        let read = |path: &str| fs::read_to_string(path).with_context(|| format!("reading {path}"));
        let (stat, own) = (read("/proc/stat")?, read(&format!("/proc/{agent}/stat"))?);
        let [user, system, softirq] =
            machine_ticks(&stat).context("/proc/stat has no line of all processors")?;
        let agent = process_ticks(&own).context("the agent's stat has no times")?;
        let seconds = |ticks: u64| ticks as f64 / ticks_per_second;
        Ok(Self {
            user: seconds(user),
            system: seconds(system),
            softirq: seconds(softirq),
            agent: seconds(agent),
        })
    }

    /// What `work` took.
    pub(crate) fn of<T>(agent: u32, work: impl FnOnce() -> Result<T>) -> Result<(T, Self)> {
        let before = Self::now(agent)?;
        let result = work()?;
        Ok((result, Self::now(agent)? - before))
    }

    /// By name, per unit of which there were `amount`.
    pub(crate) fn per(self, amount: f64) -> [(&'static str, f64); 5] {
        [
            ("user", self.user / amount),
            ("system", self.system / amount),
            ("softirq", self.softirq / amount),
            ("total", (self.user + self.system + self.softirq) / amount),
            ("the agent's own", self.agent / amount),
        ]
    }
}

impl Sub for Cpu {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self {
            user: self.user - before.user,
            system: self.system - before.system,
            softirq: self.softirq - before.softirq,
            agent: self.agent - before.agent,
        }
    }
}

impl Add for Cpu {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            user: self.user + other.user,
            system: self.system + other.system,
            softirq: self.softirq + other.softirq,
            agent: self.agent + other.agent,
        }
    }
}

/// `cpu  user nice system idle iowait irq softirq …`: user with nice, system with irq, softirq.
fn machine_ticks(stat: &str) -> Option<[u64; 3]> {
    let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let ticks: Vec<u64> = line
        .split_whitespace()
        .map_while(|text| text.parse().ok())
        .collect();
    match ticks.as_slice() {
        [user, nice, system, _idle, _iowait, irq, softirq, ..] => Some([user + nice, system + irq, *softirq]),
        _ => None,
    }
}

/// Fields 14 and 15 of proc_pid_stat(5); the second, a name in brackets, may hold anything.
fn process_ticks(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut times = rest.split_whitespace().skip(11);
    let mut next = || times.next()?.parse::<u64>().ok();
    Some(next()? + next()?)
}

/// Memory of a process that is in use now, in MiB.
pub(crate) fn resident_mib(pid: u32) -> Result<f64> {
    let path = format!("/proc/{pid}/status");
    let status = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    let kib = resident_kib(&status).with_context(|| format!("{path} has no VmRSS"))?;
    Ok(kib as f64 / 1024.0)
}

fn resident_kib(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_read() {
        let stat = "cpu  10 1 20 1000 5 2 30 0 0 0\ncpu0 1 1 1 1 1 1 1 0 0 0\n";
        assert_eq!(machine_ticks(stat), Some([11, 22, 30]));
        assert_eq!(machine_ticks("cpu  10 1\n"), None);
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 100 0 0 0 123 45 0 0 20 0 5 0 100";
        assert_eq!(process_ticks(stat), Some(168));
        assert_eq!(process_ticks("7 (a"), None);
        assert_eq!(resident_kib("Name:\tx\nVmRSS:\t  2048 kB\n"), Some(2048));
    }

    #[test]
    fn work_takes_time() {
        let own = std::process::id();
        let before = Cpu::now(own).unwrap();
        let after = Cpu::now(own).unwrap();
        assert!((after - before).agent >= 0.0 && before.user > 0.0);
        assert!(resident_mib(own).unwrap() > 0.0);
    }
}
