//! The figures as bars, one SVG per subject.

use anyhow::Result;

use super::{
    cost::Load,
    enrol, growth,
    modes::Mode,
    report::Report,
    traffic::{self, BULK, CONNECTIONS, P50, P99, Scenario},
};
use crate::chart::{self, draw_all};

type Plot = chart::Plot<Mode>;
type Group = chart::Group<Mode>;

/// File names and contents.
pub(crate) fn all(report: &Report) -> Result<Vec<(String, String)>> {
    let mut plots = traffic_plots(report);
    plots.push(enrolment(report));
    plots.push(programs(report));
    plots.push(growing(report));
    draw_all(&plots, &report.modes)
}

fn traffic_plots(report: &Report) -> Vec<Plot> {
    let scenarios = |names: &[&str]| -> Vec<Group> {
        Scenario::ALL
            .iter()
            .flat_map(|scenario| names.iter().map(move |name| (scenario.name(), *name)))
            .map(|(scenario, name)| {
                let label = match names.len() {
                    1 => scenario.to_owned(),
                    _ => format!("{scenario}\n{name}"),
                };
                group(report, scenario, name, label)
            })
            .collect()
    };
    let plot = |file, title: &str, unit, groups| Plot {
        file,
        title: title.to_owned(),
        unit,
        logarithmic: false,
        groups,
    };
    let bulk = BULK.map(|(name, _, _)| name);
    let cpu = [
        traffic::cpu_per_gibibyte("total"),
        traffic::cpu_per_connections("total"),
    ];
    vec![
        plot(
            "redirect-connections.svg",
            "New connections per second",
            "1/s",
            scenarios(&[CONNECTIONS]),
        ),
        plot(
            "redirect-latency.svg",
            "Request and answer on an open connection",
            "us",
            scenarios(&[P50, P99]),
        ),
        plot(
            "redirect-throughput.svg",
            "Throughput",
            "Gbit/s",
            scenarios(&bulk),
        ),
        plot(
            "redirect-cpu.svg",
            "Processor time of the whole machine, load included",
            "s",
            scenarios(&cpu.each_ref().map(String::as_str)),
        ),
    ]
}

fn enrolment(report: &Report) -> Plot {
    let at_once = enrol::at_once(report.sizes.at_once);
    let groups = [enrol::ONE_AT_A_TIME, at_once.as_str()]
        .iter()
        .flat_map(|name| report.results.group(name).map(move |figure| (name, figure)))
        .map(|(name, figure)| {
            Group::of(
                figure,
                &report.modes,
                format!("{name}\n{}", figure.name.replace(", ", "\n")),
            )
        })
        .collect();
    Plot {
        file: "redirect-enrolment.svg",
        title: "Enrolling and removing pods".to_owned(),
        unit: "ms",
        logarithmic: true,
        groups,
    }
}

fn programs(report: &Report) -> Plot {
    let groups = Load::ALL
        .iter()
        .flat_map(|load| {
            report
                .results
                .group(load.group())
                .map(move |figure| (load, figure))
        })
        .map(|(load, figure)| Group::of(figure, &report.modes, format!("{}\n{}", load.name(), figure.name)))
        .collect();
    Plot {
        file: "redirect-programs.svg",
        title: "A run of an eBPF program, with what counting costs (see the empty one)".to_owned(),
        unit: "ns",
        logarithmic: false,
        groups,
    }
}

fn growing(report: &Report) -> Plot {
    let groups = report.sizes.growth.iter().map(|pods| {
        let name = growth::group(*pods);
        group(report, &name, CONNECTIONS, name.clone())
    });
    Plot {
        file: "redirect-growth.svg",
        title: "New connections per second of one pod while others are enrolled".to_owned(),
        unit: "1/s",
        logarithmic: false,
        groups: groups.collect(),
    }
}

fn group(report: &Report, group: &str, name: &str, label: String) -> Group {
    Group::found(&report.results, &report.modes, (group, name), label)
}
