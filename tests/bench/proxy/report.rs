//! What a run leaves: every value as JSON, a page of tables, plots.

use std::{fmt::Write, path::Path};

use anyhow::Result;
use serde_json::json;

use super::{
    Results, Sizes, memory,
    modes::Mode,
    traffic::{BULK, CONNECTIONS, DOWNLOAD, MANY, ONE, P50, P99, REQUESTS, SHORT, UPLOAD, cpu_per_gibibyte},
};
use crate::{
    chart::{Group, Plot, draw_all},
    output::{self, Run, plots_section},
    results::{Compared as _, Figure},
    table::{Target, capitalised, ratio_cell, spread, targets_table},
};

/// A run.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) run: Run,
    pub(crate) modes: Vec<Mode>,
    pub(crate) sizes: Sizes,
    pub(crate) results: Results,
    pub(crate) targets: Vec<Target>,
}

impl Report {
    /// Writes the files.
    pub(crate) fn write(&self, directory: &Path) -> Result<()> {
        let plots = self.plots()?;
        let names: Vec<&str> = plots.iter().map(|(name, _)| name.as_str()).collect();
        output::write(
            directory,
            "proxy",
            &self.to_json()?,
            &plots,
            &self.page(&names),
            &self.targets,
        )
    }

    fn to_json(&self) -> Result<String> {
        let Sizes {
            bytes,
            seconds,
            keepalive,
            connections,
            concurrency,
            idle_connections,
            agents,
        } = self.sizes;
        self.run.to_json(
            &self.targets,
            json!({
                "modes": self.modes.iter().map(|mode| mode.name()).collect::<Vec<_>>(),
                "amounts": {
                    "bytes": bytes, "seconds_of_requests": seconds, "keepalive_connections": keepalive,
                    "connections": connections, "concurrency": concurrency, "idle_connections": idle_connections,
                    "agents_of_memory": agents,
                },
                "figures": self.results.to_json(),
            }),
        )
    }

    fn page(&self, plots: &[&str]) -> String {
        let sizes = &self.sizes;
        let mut text = self
            .run
            .head("What the detour through the proxies costs", "proxy");
        let _ = writeln!(
            text,
            "Per round and mode: {} MiB each way over one stream (iperf3); {} s of requests over {} connections and over one \
             (wrk, nginx); {} short connections, {} at a time, whose server closes first. Memory is that of {} new agents.",
            sizes.bytes >> 20,
            sizes.seconds,
            sizes.keepalive,
            sizes.connections,
            sizes.concurrency,
            sizes.agents,
        );
        text.push_str("\n## Measures to reach\n\n");
        text.push_str(&targets_table(&self.targets));
        text.push_str(&plots_section(plots, "proxy"));
        text.push_str(
            "\n## Every figure\n\nMedian (lower to upper quartile). The columns \"by direct\" are the medians of the single \
             rounds' ratios; `=` where the rounds do not tell the two apart (sign test, 5 %).\n",
        );
        for group in self.results.groups() {
            text.push_str(&self.group_table(group));
        }
        text
    }

    fn group_table(&self, group: &str) -> String {
        let figures: Vec<&Figure<Mode>> = self.results.group(group).collect();
        let has_values = |mode: &Mode| figures.iter().any(|figure| !figure.values(*mode).is_empty());
        let modes: Vec<Mode> = self.modes.iter().copied().filter(has_values).collect();
        let compared: Vec<Mode> = match modes.first() {
            Some(Mode::Direct) => modes[1..].to_vec(),
            _ => Vec::new(),
        };
        let mut heads = vec![String::new()];
        heads.extend(modes.iter().map(|mode| mode.name().to_owned()));
        heads.extend(compared.iter().map(|mode| format!("{} by direct", mode.name())));
        let mut text = format!(
            "\n### {}\n\n| {} |\n|{}\n",
            capitalised(group),
            heads.join(" | "),
            "---|".repeat(heads.len())
        );
        for figure in figures {
            let mut cells = vec![match figure.unit {
                "" => figure.name.clone(),
                unit => format!("{}, {unit}", figure.name),
            }];
            cells.extend(
                modes
                    .iter()
                    .map(|mode| figure.summary(*mode).map_or("-".to_owned(), |s| spread(&s))),
            );
            cells.extend(compared.iter().map(|mode| {
                let ratio = figure.ratio(*mode, Mode::Direct);
                ratio.map_or("-".to_owned(), |ratio| ratio_cell(&ratio))
            }));
            let _ = writeln!(text, "| {} |", cells.join(" | "));
        }
        text
    }

    fn plots(&self) -> Result<Vec<(String, String)>> {
        let plot = |file, title: &str, unit, figures: &[(&str, &str)]| Plot {
            file,
            title: title.to_owned(),
            unit,
            logarithmic: false,
            groups: figures
                .iter()
                .map(|(group, name)| {
                    Group::found(
                        &self.results,
                        &self.modes,
                        (group, name),
                        format!("{group}\n{name}"),
                    )
                })
                .collect(),
        };
        let cpu = [cpu_per_gibibyte("total"), cpu_per_gibibyte("the agent's own")];
        let idle = memory::with_connections(self.sizes.idle_connections);
        let after = memory::after_connections();
        let memory =
            [memory::IDLE, &idle, &after, memory::BUSY, memory::RESTED].map(|name| (memory::GROUP, name));
        let plots = [
            plot(
                "proxy-throughput.svg",
                "Throughput",
                "Gbit/s",
                &[(BULK, UPLOAD), (BULK, DOWNLOAD)],
            ),
            plot(
                "proxy-requests.svg",
                "Requests per second",
                "1/s",
                &[(MANY, REQUESTS), (ONE, REQUESTS)],
            ),
            plot(
                "proxy-latency.svg",
                "Request and answer",
                "us",
                &[(ONE, P50), (ONE, P99), (MANY, P50), (MANY, P99)],
            ),
            plot(
                "proxy-connections.svg",
                "New connections per second",
                "1/s",
                &[(SHORT, CONNECTIONS)],
            ),
            plot(
                "proxy-cpu.svg",
                "Processor time",
                "s",
                &cpu.each_ref().map(|name| (BULK, name.as_str())),
            ),
            plot("proxy-memory.svg", "Memory of the agent", "MiB", &memory),
        ];
        draw_all(&plots, &self.modes)
    }
}
