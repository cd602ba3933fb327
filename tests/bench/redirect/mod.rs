//! The ways of redirecting, side by side: none, iptables, eBPF; with the same proxy, on the same traffic, alternating.
//! `cargo xtask bench redirect` builds and runs it.
//!
//! [`modes`] says what is compared. A round measures every mode once: [`traffic`], [`enrol`] with the pods of a [`crowd`], and
//! [`cost`] of the [`programs`]. [`growth`] comes once, at the end. [`targets`] holds every value against
//! what the project wants to reach, and [`report`] and [`plot`] write the files.

mod cost;
mod crowd;
mod enrol;
mod growth;
mod modes;
mod plot;
mod programs;
mod report;
mod targets;
mod traffic;

use std::{collections::BTreeSet, path::PathBuf, time::Instant};

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use redirector_tests::{mesh::Mesh, node::Family, wait, workloads::Workloads};

use self::{crowd::Crowd, modes::Mode, programs::Id, report::Report};
use crate::{
    machine::{self, Machine},
    output::{self, Run},
    results::{self, Compared as _},
};

/// Every figure of a run.
type Results = results::Results<Mode>;

/// Arguments of `redirect`.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Rounds; each measures every mode once
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Measure over IPv6
    #[arg(long)]
    v6: bool,
    /// What to compare [default: everything that this kernel can have]
    #[arg(long, value_enum, value_delimiter = ',')]
    modes: Vec<Mode>,
    /// How much of everything: `tiny` shows only that the benchmark works
    #[arg(long, value_enum, default_value_t = Size::Full)]
    size: Size,
    /// Without the part that enrols ever more pods
    #[arg(long)]
    no_growth: bool,
    /// Directory for redirect.json, redirect.md and redirect-*.svg
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
    /// Of each bulk transfer.
    pub(crate) bytes: u64,
    /// Short connections of a scenario.
    pub(crate) connections: u32,
    /// Of these at one time.
    pub(crate) concurrency: u32,
    /// Requests, on ten connections in turn.
    pub(crate) requests: usize,
    /// Pods enrolled one by one.
    pub(crate) singles: usize,
    /// Pods enrolled at once.
    pub(crate) at_once: usize,
    /// Numbers of enrolled pods, rising from 1.
    pub(crate) growth: Vec<usize>,
}

impl Sizes {
    fn of(size: Size) -> Self {
        match size {
            Size::Full => Self {
                bytes: 384 << 20,
                connections: 3_000,
                concurrency: 16,
                requests: 3_000,
                singles: 5,
                at_once: 50,
                growth: vec![1, 100, 500],
            },
            Size::Tiny => Self {
                bytes: 2 << 20,
                connections: 40,
                concurrency: 4,
                requests: 40,
                singles: 1,
                at_once: 3,
                growth: vec![1, 4],
            },
        }
    }

    /// Enough to have everything in place before the first round: certificates, tunnels, caches.
    fn warm_up(&self) -> Self {
        Self {
            growth: Vec::new(),
            ..Self::of(Size::Tiny)
        }
    }

    /// Pods that do nothing. The mesh's client is one of those enrolled, so there is always one left to be enrolled by itself.
    fn crowd(&self) -> usize {
        let most = self.growth.iter().copied().max().unwrap_or(0);
        most.max(self.at_once).max(self.singles)
    }
}

/// A mode with pods of its own, its agent running all the time.
struct Contender {
    mode: Mode,
    mesh: Mesh,
    /// The eBPF programs that came with its agent and pods.
    programs: BTreeSet<Id>,
}

impl Contender {
    fn start(mode: Mode, crowd: &Crowd) -> Result<Self> {
        println!("starting {}", mode.name());
        let before = programs::loaded()?;
        let workloads = |client: &_, server: &_| crowd.workloads(Workloads::hbone([client, server]));
        let mesh = match mode {
            Mode::None => Mesh::started(mode.options(), workloads),
            _ => Mesh::enrolled(mode.options(), workloads),
        };
        mode.verify(&mesh)?;
        let programs = &programs::loaded()? - &before;
        Ok(Self { mode, mesh, programs })
    }
}

/// Measures, and writes the files.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let begin = Instant::now();
    let family = if arguments.v6 { Family::V6 } else { Family::V4 };
    let mut sizes = Sizes::of(arguments.size);
    if arguments.no_growth {
        sizes.growth.clear();
    }
    let modes = chosen(&arguments.modes);
    output::check(&arguments.out)?;
    let machine = Machine::now();
    println!("making {} pods that do nothing", sizes.crowd());
    let crowd = Crowd::create(u16::try_from(sizes.crowd())?)?;
    let mut contenders: Vec<Contender> = modes
        .iter()
        .map(|mode| Contender::start(*mode, &crowd))
        .collect::<Result<_>>()?;

    let with_traffic = modes::with_traffic(&modes);
    let mut results = Results::default();
    println!("warming up");
    for contender in &contenders {
        measure(
            contender,
            &with_traffic,
            &crowd,
            family,
            &sizes.warm_up(),
            &mut Results::default(),
        )?;
    }
    for round in 1..=arguments.rounds {
        for contender in &contenders {
            ensure!(!wait::interrupted(), "interrupted");
            println!("round {round} of {}: {}", arguments.rounds, contender.mode.name());
            measure(contender, &with_traffic, &crowd, family, &sizes, &mut results)?;
        }
        // No mode is always measured right after the same other one's load, or first.
        contenders.rotate_left(1);
    }
    if !sizes.growth.is_empty() {
        contenders.sort_by_key(|contender| contender.mode);
        let growing = contenders
            .iter()
            .filter(|contender| contender.mode != Mode::None && with_traffic.contains(&contender.mode));
        for Contender { mode, mesh, programs } in growing {
            println!("growth: {}", mode.name());
            growth::measure(mesh, *mode, programs, family, &sizes, &crowd.pods, &mut results)
                .with_context(|| format!("growth, {}", mode.name()))?;
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
        targets: targets::all(&results, &modes, &sizes),
        modes,
        sizes,
        results,
    };
    report.write(&arguments.out)
}

/// One mode's part of a round.
fn measure(
    contender: &Contender,
    with_traffic: &[Mode],
    crowd: &Crowd,
    family: Family,
    sizes: &Sizes,
    results: &mut Results,
) -> Result<()> {
    let Contender { mode, mesh, programs } = contender;
    if with_traffic.contains(mode) {
        traffic::measure(mesh, *mode, family, sizes, results)?;
        if mode.is_ebpf() || (*mode == Mode::None && modes::has_tcx()) {
            cost::measure(mesh, *mode, programs, family, sizes, results)?;
        }
    }
    if *mode != Mode::None {
        let pods = &crowd.pods;
        enrol::measure(
            &mesh.agent,
            *mode,
            (&pods[..sizes.singles], &pods[..sizes.at_once]),
            results,
        )
        .with_context(|| format!("enrolling pods, {}", mode.name()))?;
    }
    Ok(())
}

/// The modes that were asked for, each once, in the order of the tables.
fn chosen(modes: &[Mode]) -> Vec<Mode> {
    if modes.is_empty() {
        return Mode::available();
    }
    modes
        .iter()
        .copied()
        .collect::<BTreeSet<_>>()
        .into_iter()
        .collect()
}
