//! The traffic of one mode in one round: connections, requests and bulk, in plain and over HBONE, and what they took.

use anyhow::{Context, Result};
use redirector_tests::{
    counters,
    mesh::Mesh,
    netns::Namespace,
    node::{Family, Host},
};

use super::{Results, Sizes, modes::Mode};
use crate::{
    load::{Pair, Way},
    results::{COUNT, Compared as _, GBITS, MICROSECONDS, PER_SECOND, SECONDS},
    usage::Cpu,
};

/// Names of figures.
pub(crate) const CONNECTIONS: &str = "new connections";
pub(crate) const P50: &str = "request, p50";
pub(crate) const P99: &str = "request, p99";
pub(crate) const LOST_SYNS: &str = "SYNs sent again";
pub(crate) const CONNTRACK: &str = "conntrack entries";
/// Name, way and number of streams of the bulk transfers.
pub(crate) const BULK: [(&str, Way, u32); 4] = [
    ("upload, 1 stream", Way::Upload, 1),
    ("download, 1 stream", Way::Download, 1),
    ("upload, 4 streams", Way::Upload, 4),
    ("download, 4 streams", Way::Download, 4),
];

/// Who talks to whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scenario {
    /// An enrolled pod to the outside.
    Outbound,
    /// The outside to an enrolled pod.
    Inbound,
    /// An enrolled pod to another.
    Hbone,
}

impl Scenario {
    pub(crate) const ALL: [Self; 3] = [Self::Outbound, Self::Inbound, Self::Hbone];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Outbound => "outbound, plain",
            Self::Inbound => "inbound, plain",
            Self::Hbone => "pod to pod, HBONE",
        }
    }

    /// Client and server.
    pub(crate) fn ends(self, mesh: &Mesh) -> (&Namespace, &Host) {
        match self {
            Self::Outbound => (&mesh.client.ns, &mesh.node.outside),
            Self::Inbound => (&mesh.node.outside.ns, &mesh.server),
            Self::Hbone => (&mesh.client.ns, &mesh.server),
        }
    }

    /// Its applications and their client.
    pub(crate) fn pair(self, mesh: &Mesh, family: Family) -> Pair<'_> {
        let (client, server) = self.ends(mesh);
        Pair::start(client, server, family)
    }
}

/// Measures every scenario once.
pub(crate) fn measure(
    mesh: &Mesh,
    mode: Mode,
    family: Family,
    sizes: &Sizes,
    results: &mut Results,
) -> Result<()> {
    for scenario in Scenario::ALL {
        one(mesh, scenario, mode, family, sizes, results)
            .with_context(|| format!("{}, {}", mode.name(), scenario.name()))?;
    }
    Ok(())
}

fn one(
    mesh: &Mesh,
    scenario: Scenario,
    mode: Mode,
    family: Family,
    sizes: &Sizes,
    results: &mut Results,
) -> Result<()> {
    let group = scenario.name();
    let pair = scenario.pair(mesh, family);
    let agent = mesh.agent.pid();

    let before = lost_syns(mesh);
    let (rate, cpu) = Cpu::of(agent, || {
        Ok(pair.connections(sizes.connections, sizes.concurrency)?)
    })
    .context("short connections")?;
    results.add(group, CONNECTIONS, PER_SECOND, mode, rate);
    results.add(group, LOST_SYNS, COUNT, mode, (lost_syns(mesh) - before) as f64);
    results.add(group, CONNTRACK, COUNT, mode, conntrack_entries(mesh) as f64);
    for (kind, seconds) in cpu.per(f64::from(sizes.connections) / 1e4) {
        results.add(group, &cpu_per_connections(kind), SECONDS, mode, seconds);
    }

    let (p50, p99) = pair.latency(sizes.requests).context("requests")?;
    results.add(group, P50, MICROSECONDS, mode, p50);
    results.add(group, P99, MICROSECONDS, mode, p99);

    let mut bulk = Cpu::default();
    for (name, way, streams) in BULK {
        let (rate, cpu) = Cpu::of(agent, || Ok(pair.throughput(way, sizes.bytes, streams)?)).context(name)?;
        bulk = bulk + cpu;
        results.add(group, name, GBITS, mode, rate);
    }
    let gibibytes = (sizes.bytes * BULK.len() as u64) as f64 / f64::from(1 << 30);
    for (kind, seconds) in bulk.per(gibibytes) {
        results.add(group, &cpu_per_gibibyte(kind), SECONDS, mode, seconds);
    }
    Ok(())
}

/// Name of a figure of processor time.
pub(crate) fn cpu_per_connections(kind: &str) -> String {
    format!("CPU per 10,000 connections, {kind}")
}

/// Name of a figure of processor time.
pub(crate) fn cpu_per_gibibyte(kind: &str) -> String {
    format!("CPU per GiB, {kind}")
}

/// SYNs that were sent again so far by anybody who takes part.
fn lost_syns(mesh: &Mesh) -> u64 {
    [&mesh.client.ns, &mesh.server.ns, &mesh.node.outside.ns]
        .map(|ns| counters::kernel(ns, "TcpExt", "TCPSynRetrans"))
        .iter()
        .sum()
}

/// Connections that the two pods' connection tracking holds now. A kernel without it has none.
fn conntrack_entries(mesh: &Mesh) -> u64 {
    let count = |ns: &Namespace| {
        ns.sysctl("net/netfilter/nf_conntrack_count")
            .ok()?
            .parse::<u64>()
            .ok()
    };
    [&mesh.client.ns, &mesh.server.ns]
        .iter()
        .filter_map(|ns| count(ns))
        .sum::<u64>()
}
