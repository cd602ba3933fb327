//! What the detour costs: the same traffic between the same two pods without an agent in the way, in plain through the proxies,
//! over HBONE, and joined in the agent. `cargo xtask bench` builds and runs it.
//!
//! Rounds alternate between the [`modes`], so that what else the machine does weighs on all alike; what counts is the ratio.
//! [`traffic`] is what each round measures, [`memory`] comes at the end; [`targets`] says what is to be reached, [`report`]
//! writes the files.

mod memory;
mod modes;
mod report;
mod targets;
mod traffic;

use std::{collections::BTreeSet, path::PathBuf, time::Instant};

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use redirector_tests::{agent::Options, mesh::Mesh, node::Family, wait};

use self::{modes::Mode, report::Report, traffic::Servers};
use crate::{
    machine::{self, Machine},
    output::{self, Run},
    results::{self, Compared as _},
};

/// Every figure of a run.
type Results = results::Results<Mode>;

/// Arguments of `proxy`.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Rounds; each measures every mode once. 0: memory alone
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(0..=1000))]
    rounds: u32,
    /// Measure over IPv6
    #[arg(long)]
    v6: bool,
    /// Attach with clsact filters
    #[arg(long)]
    force_clsact: bool,
    /// What to compare [default: all but silent]
    #[arg(long, value_enum, value_delimiter = ',')]
    modes: Vec<Mode>,
    /// How much of everything: `tiny` shows only that the benchmark works
    #[arg(long, value_enum, default_value_t = Size::Full)]
    size: Size,
    /// Without the agent's memory
    #[arg(long)]
    no_memory: bool,
    /// Directory for proxy.json, proxy.md and proxy-*.svg
    #[arg(long, value_name = "DIRECTORY", default_value = output::DIRECTORY)]
    out: PathBuf,
}

/// How much is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Size {
    Full,
    Tiny,
}

/// Amounts: all of them are bounds, too.
#[derive(Debug, Clone)]
pub(crate) struct Sizes {
    /// Of a bulk transfer.
    pub(crate) bytes: u64,
    /// Of a run of requests.
    pub(crate) seconds: u32,
    /// Connections that requests are spread over.
    pub(crate) keepalive: u32,
    /// Short connections.
    pub(crate) connections: u32,
    /// Of these at one time.
    pub(crate) concurrency: u32,
    /// Connections that are held open.
    pub(crate) idle_connections: u32,
    /// New agents whose memory is measured.
    pub(crate) agents: u32,
}

impl Sizes {
    fn of(size: Size) -> Self {
        match size {
            Size::Full => Self {
                bytes: 1 << 30,
                seconds: 3,
                keepalive: 32,
                connections: 4_000,
                concurrency: 16,
                idle_connections: 4_000,
                agents: 3,
            },
            Size::Tiny => Self {
                bytes: 2 << 20,
                seconds: 1,
                keepalive: 4,
                connections: 40,
                concurrency: 4,
                idle_connections: 40,
                agents: 1,
            },
        }
    }
}

/// A mode with pods of its own, its agent and servers running all the time. The servers end first.
struct Contender {
    mode: Mode,
    _servers: Servers,
    mesh: Mesh,
}

/// Measures, and writes the files.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let begin = Instant::now();
    let family = if arguments.v6 { Family::V6 } else { Family::V4 };
    let sizes = Sizes::of(arguments.size);
    output::check(&arguments.out)?;
    // The connections that are held have both their ends here.
    redirector::sys::socket::raise_file_limit().context("raising the limit of open files")?;
    let options = || Options {
        force_clsact: arguments.force_clsact,
        ..Options::default()
    };
    let modes: BTreeSet<Mode> = match arguments.modes.as_slice() {
        [] => Mode::BY_DEFAULT.into(),
        modes => modes.iter().copied().collect(),
    };
    let machine = Machine::now();
    let mut contenders: Vec<Contender> = Vec::new();
    for mode in &modes {
        println!("starting {}", mode.name());
        let mesh = mode.mesh(options());
        let servers = Servers::start(&mesh).with_context(|| format!("servers of {}", mode.name()))?;
        contenders.push(Contender {
            mode: *mode,
            _servers: servers,
            mesh,
        });
    }
    println!("warming up");
    let warm_up = Sizes::of(Size::Tiny);
    for Contender { mode, mesh, .. } in &contenders {
        traffic::measure(mesh, *mode, family, &warm_up, &mut Results::default())
            .with_context(|| mode.name())?;
    }
    let mut results = Results::default();
    for round in 1..=arguments.rounds {
        for Contender { mode, mesh, .. } in &contenders {
            ensure!(!wait::interrupted(), "interrupted");
            println!("round {round} of {}: {}", arguments.rounds, mode.name());
            traffic::measure(mesh, *mode, family, &sizes, &mut results).with_context(|| mode.name())?;
        }
        // No mode is always measured right after the same other one's load, or first.
        contenders.rotate_left(1);
    }
    drop(contenders);
    if !arguments.no_memory && modes.contains(&Mode::Hbone) {
        for agent in 1..=sizes.agents {
            println!("memory: agent {agent} of {}", sizes.agents);
            memory::measure(family, options(), &sizes, &mut results).context(memory::GROUP)?;
        }
    }
    let report = Report {
        run: Run {
            machine,
            load_after: machine::load(),
            duration: begin.elapsed(),
            rounds: arguments.rounds,
            family,
            tiny: arguments.size == Size::Tiny,
        },
        targets: targets::all(&results, &sizes),
        modes: modes.into_iter().collect(),
        sizes,
        results,
    };
    report.write(&arguments.out)
}
