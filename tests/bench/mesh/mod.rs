//! The mesh at size: how long a whole one takes to load, what a workload takes in memory, what an update costs, and what readers notice
//! of a writer at full speed. In this process, by the library that the agent is made of; no root needed. `cargo xtask bench` runs it.

mod measure;

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, ValueEnum};
use redirector_tests::node::Family;
use serde_json::{Map, Value, json};

use crate::{
    machine::{self, Machine},
    output::{self, Run},
    stats::Summary,
    table::{Found, Goal, Target},
};

/// Arguments of `mesh`.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Rounds; each begins with an empty mesh
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// How much of everything: `tiny` shows only that the benchmark works
    #[arg(long, value_enum, default_value_t = Size::Full)]
    size: Size,
    /// Directory for mesh.json and mesh.md
    #[arg(long, value_name = "DIRECTORY", default_value = output::DIRECTORY)]
    out: PathBuf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Size {
    Full,
    Tiny,
}

/// How much is measured.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    workloads: u32,
    services: u32,
    updates: u32,
}

/// A figure: its name, its unit, what is to be reached, and a value for each round.
type Figures = Vec<(&'static str, &'static str, Option<Goal>, Vec<f64>)>;

/// Measures, and writes what was found.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    output::check(&arguments.out)?;
    let tiny = arguments.size == Size::Tiny;
    let sizes = match arguments.size {
        Size::Full => Sizes {
            workloads: 100_000,
            services: 10_000,
            updates: 20_000,
        },
        Size::Tiny => Sizes {
            workloads: 500,
            services: 50,
            updates: 200,
        },
    };
    let (machine, begun) = (Machine::now(), std::time::Instant::now());
    let mut figures: Figures = Vec::new();
    for round in 1..=arguments.rounds {
        println!("round {round} of {}", arguments.rounds);
        for (name, unit, goal, value) in measure::round(sizes)? {
            match figures.iter_mut().find(|figure| figure.0 == name) {
                Some(figure) => figure.3.push(value),
                None => figures.push((name, unit, goal, vec![value])),
            }
        }
    }
    let run = Run {
        machine,
        load_after: machine::load(),
        duration: begun.elapsed(),
        rounds: arguments.rounds,
        family: Family::V4,
        tiny,
    };
    let targets: Vec<_> = figures.iter().filter_map(target).collect();
    let values: Map<String, Value> = figures
        .iter()
        .map(|(name, unit, _, values)| ((*name).to_owned(), json!({"unit": unit, "values": values})))
        .collect();
    let json = run.to_json(&targets, json!({"figures": values}))?;
    output::write(
        &arguments.out,
        "mesh",
        &json,
        &[],
        &page(&run, sizes, &figures, &targets),
        &targets,
    )
}

fn target(
    (name, unit, goal, values): &(&'static str, &'static str, Option<Goal>, Vec<f64>),
) -> Option<Target> {
    Some(Target {
        measure: (*name).to_owned(),
        unit,
        goal: (*goal)?,
        found: Summary::of(values).map(|summary| Found {
            summary,
            note: String::new(),
        }),
    })
}

fn page(run: &Run, sizes: Sizes, figures: &Figures, targets: &[Target]) -> String {
    let mut page = run.head("The mesh at size", "mesh");
    page += &format!(
        "Per round: {} workloads in {} services (two each), then {} updates one by one.\n\n## Measures to reach\n\n{}\n## Every \
         figure\n\n| figure | unit | median (quartiles) |\n|---|---|---|\n",
        sizes.workloads,
        sizes.services,
        sizes.updates,
        crate::table::targets_table(targets)
    );
    for (name, unit, _, values) in figures {
        if let Some(summary) = Summary::of(values) {
            let Summary {
                median,
                lower_quartile,
                upper_quartile,
                ..
            } = summary;
            page +=
                &format!("| {name} | {unit} | {median:.3} ({lower_quartile:.3} to {upper_quartile:.3}) |\n");
        }
    }
    page
}
