//! What a run leaves: every value as JSON, and tables for people.

use std::{fmt::Write, path::Path};

use anyhow::Result;
use serde_json::json;

use super::{Results, Sizes, cost, modes::Mode, plot};
use crate::{
    output::{self, Run, plots_section},
    results::{Compared as _, Figure},
    stats::Ratio,
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
        let plots = plot::all(self)?;
        let names: Vec<&str> = plots.iter().map(|(name, _)| name.as_str()).collect();
        output::write(
            directory,
            "redirect",
            &self.to_json()?,
            &plots,
            &self.to_markdown(&names),
            &self.targets,
        )
    }

    /// Every value, and what they were measured on.
    fn to_json(&self) -> Result<String> {
        self.run.to_json(
            &self.targets,
            json!({
                "modes": self.modes.iter().map(|mode| mode.name()).collect::<Vec<_>>(),
                "amounts": {
                    "bytes": self.sizes.bytes, "connections": self.sizes.connections,
                    "concurrency": self.sizes.concurrency, "requests": self.sizes.requests,
                    "pods_one_by_one": self.sizes.singles, "pods_at_once": self.sizes.at_once,
                    "pods_growing": self.sizes.growth,
                },
                "figures": self.results.to_json(),
            }),
        )
    }

    /// The tables, with the plots of these file names.
    pub(crate) fn to_markdown(&self, plots: &[&str]) -> String {
        let mut text = self.head();
        text.push_str("\n## Measures to reach\n\n");
        text.push_str(&targets_table(&self.targets));
        text.push_str(&plots_section(plots, "redirect"));
        text.push_str(
            "\n## Every figure\n\nMedian (lower to upper quartile). The last column is the median of the single rounds' \
             ratios of eBPF to the better iptables backend of that line; `=` where the rounds do not tell them apart (sign \
             test, 5 %).\n",
        );
        for group in self.results.groups() {
            text.push_str(&self.group_table(group));
        }
        text
    }

    fn head(&self) -> String {
        let sizes = &self.sizes;
        let mut text = self.run.head("Ways of redirecting compared", "redirect");
        let _ = writeln!(
            text,
            "Per round and scenario: {} connections, {} at a time; {} requests on ten connections; {} MiB each way, over 1 \
             and over 4 streams. {} pods enrolled one by one, {} at once.",
            sizes.connections,
            sizes.concurrency,
            sizes.requests,
            sizes.bytes >> 20,
            sizes.singles,
            sizes.at_once,
        );
        text
    }

    fn group_table(&self, group: &str) -> String {
        let figures: Vec<&Figure<Mode>> = self.results.group(group).collect();
        let modes: Vec<Mode> = self
            .modes
            .iter()
            .copied()
            .filter(|mode| figures.iter().any(|figure| !figure.values(*mode).is_empty()))
            .collect();
        let compared = self.compared(&figures);
        let net = figures.iter().any(|figure| figure.name == cost::EMPTY);
        let mut heads = vec![String::new()];
        heads.extend(modes.iter().map(|mode| mode.name().to_owned()));
        if net {
            heads.push("net of the empty program".to_owned());
        }
        if compared {
            heads.push("eBPF by iptables".to_owned());
        }
        let mut text = format!("\n### {}\n\n", capitalised(group));
        let _ = writeln!(text, "| {} |", heads.join(" | "));
        let _ = writeln!(text, "|{}", "---|".repeat(heads.len()));
        for figure in figures {
            let mut cells = vec![match figure.unit {
                "" => figure.name.clone(),
                unit => format!("{}, {unit}", figure.name),
            }];
            let cell = |mode: &Mode| figure.summary(*mode).map_or("-".to_owned(), |s| spread(&s));
            cells.extend(modes.iter().map(cell));
            if net {
                let net = modes
                    .iter()
                    .filter(|mode| mode.is_ebpf())
                    .find_map(|mode| cost::net(&self.results, figure, *mode));
                cells.push(net.map_or("-".to_owned(), |s| spread(&s)));
            }
            if compared {
                cells.push(
                    self.ratio(figure)
                        .map_or("-".to_owned(), |ratio| ratio_cell(&ratio)),
                );
            }
            let _ = writeln!(text, "| {} |", cells.join(" | "));
        }
        text
    }

    fn compared(&self, figures: &[&Figure<Mode>]) -> bool {
        figures.iter().any(|figure| self.ratio(figure).is_some())
    }

    /// Of the first eBPF mode that has the figure, TCX before clsact, to the better iptables backend.
    fn ratio(&self, figure: &Figure<Mode>) -> Option<Ratio> {
        let ours = self
            .modes
            .iter()
            .rev()
            .copied()
            .find(|mode| mode.is_ebpf() && !figure.values(*mode).is_empty())?;
        let best = figure.best(self.modes.iter().copied().filter(|mode| mode.is_iptables()))?;
        figure.ratio(ours, best)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use redirector_tests::node::Family;
    use serde_json::Value;

    use super::*;
    use crate::machine::Machine;
    use crate::results::{COUNT, MICROSECONDS, PER_SECOND};

    #[test]
    fn the_tables_have_every_mode_and_every_figure() {
        let mut results = Results::default();
        for round in 0..10 {
            let round = f64::from(round);
            for (mode, rate) in [(Mode::None, 9_000.0), (Mode::Nft, 4_000.0), (Mode::Tcx, 5_000.0)] {
                results.add("outbound", "new connections", PER_SECOND, mode, rate + round);
                results.add("outbound", "request", MICROSECONDS, mode, 100.0);
            }
            results.add("outbound", "entries", COUNT, Mode::Nft, 7.0);
        }
        let report = Report {
            run: Run {
                machine: Machine::now(),
                load_after: "0.5".into(),
                duration: Duration::from_secs(61),
                rounds: 10,
                family: Family::V4,
                tiny: true,
            },
            modes: vec![Mode::None, Mode::Nft, Mode::Tcx],
            sizes: Sizes::of(super::super::Size::Tiny),
            targets: super::super::targets::all(
                &results,
                &[Mode::Nft, Mode::Tcx],
                &Sizes::of(super::super::Size::Tiny),
            ),
            results,
        };
        let text = report.to_markdown(&["redirect-latency.svg"]);
        for line in [
            "| new connections, 1/s | 9,004 (9,002 to 9,007) | 4,004 (4,002 to 4,007) | 5,004 (5,002 to 5,007) | 1.25 |",
            "| request, us | 100 | 100 | 100 | 1.00 = |",
            "| entries | - | 7 | - | - |",
            "![latency](redirect-latency.svg)",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
        assert!(text.contains("A trial") && text.contains("1 min 1 s"));
        let json: Value = serde_json::from_str(&report.to_json().unwrap()).unwrap();
        assert_eq!(json["figures"][0]["modes"]["ebpf, TCX"]["rounds"][9], 5009.0);
        assert_eq!(json["rounds"], 10);
    }
}
