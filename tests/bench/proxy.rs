//! What the detour costs: the same traffic between the same two pods without an agent, in plain through the proxies, and over
//! HBONE. `cargo xtask bench` builds and runs it.
//!
//! Rounds alternate between the modes, so that what else the machine does weighs on all alike; what counts is the ratio.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use redirector_tests::{agent::Options, counters, mesh::Mesh, node::Family, workloads::Workloads};
use serde_json::{Value, json};

use crate::{
    load::{Pair, Way},
    machine,
    stats::Summary,
};

/// Arguments of `proxy`.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Rounds; each measures every mode once
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Measure over IPv6
    #[arg(long)]
    v6: bool,
    /// Attach with clsact filters
    #[arg(long)]
    force_clsact: bool,
    /// Write every figure to this file as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

const BYTES: u64 = 512 << 20;
const CONNECTIONS: u32 = 3_000;
const CONCURRENCY: u32 = 16;
const REQUESTS: usize = 3_000;

/// The figures of one mode in one round, in the order of [`UNITS`].
type Figures = [f64; 5];

/// Name, and whether more is better.
const UNITS: [(&str, bool); 5] = [
    ("upload, Gbit/s", true),
    ("download, Gbit/s", true),
    ("new connections/s, 16 at once", true),
    ("request on an open connection, p50, us", false),
    ("request on an open connection, p99, us", false),
];

struct Mode {
    name: &'static str,
    mesh: Mesh,
    rounds: Vec<Figures>,
}

/// Measures, and prints a table.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let family = if arguments.v6 { Family::V6 } else { Family::V4 };
    let options = || Options {
        force_clsact: arguments.force_clsact,
        ..Options::default()
    };
    let direct = Mesh::started(options(), |client, server| Workloads::hbone([client, server]));
    let mut modes = [
        ("direct", direct),
        ("plain", Mesh::plaintext(options())),
        ("hbone", Mesh::hbone(options())),
    ]
    .map(|(name, mesh)| Mode {
        name,
        mesh,
        rounds: Vec::new(),
    });
    for round in 1..=arguments.rounds {
        for mode in &mut modes {
            println!("round {round} of {}: {}", arguments.rounds, mode.name);
            mode.rounds.push(measure(&mode.mesh, family)?);
        }
    }
    print_table(&modes);
    if let Some(path) = &arguments.json {
        let text = serde_json::to_string_pretty(&to_json(&modes, family))?;
        fs::write(path, text).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

fn measure(mesh: &Mesh, family: Family) -> Result<Figures> {
    let pair = Pair::start(&mesh.client.ns, &mesh.server, family);
    let upload = pair.throughput(Way::Upload, BYTES, 1).context("upload")?;
    let download = pair.throughput(Way::Download, BYTES, 1).context("download")?;
    let resent =
        || [&mesh.client, &mesh.server].map(|pod| counters::kernel(&pod.ns, "TcpExt", "TCPSynRetrans"));
    let before = resent();
    let rate = pair
        .connections(CONNECTIONS, CONCURRENCY)
        .context("short connections")?;
    if resent() != before {
        println!(
            "  SYNs were sent again (client, server): {before:?} before, {:?} after",
            resent()
        );
    }
    let (p50, p99) = pair.latency(REQUESTS).context("requests")?;
    Ok([upload, download, rate, p50, p99])
}

/// One figure over the rounds of a mode.
fn spread(mode: &Mode, figure: usize) -> Summary {
    let values: Vec<f64> = mode.rounds.iter().map(|figures| figures[figure]).collect();
    Summary::of(&values).expect("there is at least one round")
}

fn print_table(modes: &[Mode; 3]) {
    println!("\nmedian (least to most); in brackets: times as good as direct, by medians\n");
    for (figure, (name, more_is_better)) in UNITS.iter().enumerate() {
        println!("{name}");
        let direct = spread(&modes[0], figure).median;
        for mode in modes {
            let Summary {
                median, least, most, ..
            } = spread(mode, figure);
            let ratio = if *more_is_better {
                median / direct
            } else {
                direct / median
            };
            println!(
                "  {:8} {median:10.1}   ({least:.1} to {most:.1})   [{ratio:.2}]",
                mode.name
            );
        }
    }
}

fn to_json(modes: &[Mode; 3], family: Family) -> Value {
    let rounds = |mode: &Mode| {
        let figures = |figure: usize| mode.rounds.iter().map(|round| round[figure]).collect::<Vec<_>>();
        let named = UNITS
            .iter()
            .enumerate()
            .map(|(figure, (name, _))| ((*name).to_owned(), json!(figures(figure))));
        (mode.name.to_owned(), Value::Object(named.collect()))
    };
    json!({
        "kernel": machine::kernel(), "cpus": machine::cpus(), "family": family.name(), "bytes": BYTES,
        "connections": CONNECTIONS, "concurrency": CONCURRENCY, "requests": REQUESTS,
        "modes": Value::Object(modes.iter().map(rounds).collect()),
    })
}
