//! The benchmarks. `cargo xtask bench` builds and runs them; docs/benchmarks/README.md says what they measure.
//!
//! - [`proxy`]: what the detour through the proxies costs; [`redirect`]: what the ways of redirecting cost, side by side; [`mesh`]: the
//!   mesh at size
//! - [`load`] makes the traffic, [`usage`] says what it took, [`machine`] on what; [`stats`] makes numbers of it
//! - [`results`] keeps every value, [`table`] and [`chart`] show them, [`output`] writes them

mod chart;
mod load;
mod machine;
mod mesh;
mod output;
mod proxy;
mod redirect;
mod results;
mod stats;
mod table;
mod usage;

use anyhow::Result;
use clap::{Parser, Subcommand};
use redirector_tests::wait;

#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    benchmark: Benchmark,
}

#[derive(Subcommand)]
enum Benchmark {
    /// Throughput, new connections and latency between two pods: direct, plain through the proxy, over HBONE, joined in the agent
    Proxy(proxy::Arguments),
    /// The ways of redirecting compared: none, iptables, eBPF
    Redirect(redirect::Arguments),
    /// The mesh at size: 100,000 workloads loaded, changed and read
    Mesh(mesh::Arguments),
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    wait::watch_signals()?;
    match cli.benchmark {
        Benchmark::Proxy(arguments) => proxy::run(&arguments),
        Benchmark::Redirect(arguments) => redirect::run(&arguments),
        Benchmark::Mesh(arguments) => mesh::run(&arguments),
    }
}
