//! What a run leaves: every value as JSON, and tables for people.

use std::{fmt::Write, time::Duration};

use anyhow::Result;
use redirector_tests::node::Family;
use serde_json::{Value, json};

use super::{Results, Sizes, cost, modes::Mode};
use crate::{
    machine::Machine,
    results::{Compared as _, Figure},
    stats::Ratio,
    table::{Target, capitalised, ratio_cell, spread, target_json, targets_table},
};

/// A run.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) machine: Machine,
    pub(crate) load_after: String,
    pub(crate) duration: Duration,
    pub(crate) rounds: u32,
    pub(crate) family: Family,
    /// With amounts too small to mean anything.
    pub(crate) tiny: bool,
    pub(crate) modes: Vec<Mode>,
    pub(crate) sizes: Sizes,
    pub(crate) results: Results,
    pub(crate) targets: Vec<Target>,
}

impl Report {
    /// Every value, and what they were measured on.
    pub(crate) fn to_json(&self) -> Result<String> {
        let mut machine = self.machine.to_json();
        machine["load_after"] = json!(self.load_after);
        let value = json!({
            "machine": machine,
            "seconds": self.duration.as_secs(),
            "rounds": self.rounds,
            "tiny": self.tiny,
            "family": self.family.name(),
            "modes": self.modes.iter().map(|mode| mode.name()).collect::<Vec<_>>(),
            "amounts": {
                "bytes": self.sizes.bytes, "connections": self.sizes.connections,
                "concurrency": self.sizes.concurrency, "requests": self.sizes.requests,
                "pods_one_by_one": self.sizes.singles, "pods_at_once": self.sizes.at_once,
                "pods_growing": self.sizes.growth,
            },
            "figures": self.results.to_json(),
            "measures_to_reach": self.targets.iter().map(target_json).collect::<Vec<Value>>(),
        });
        Ok(serde_json::to_string_pretty(&value)? + "\n")
    }

    /// The tables, with the plots of these file names.
    pub(crate) fn to_markdown(&self, plots: &[&str]) -> String {
        let mut text = self.head();
        text.push_str("\n## Measures to reach\n\n");
        text.push_str(&targets_table(&self.targets));
        if !plots.is_empty() {
            text.push_str("\n## Plots\n\nBars are medians, whiskers go from the least to the most.\n\n");
            for plot in plots {
                let name = plot.trim_end_matches(".svg").trim_start_matches("redirect-");
                let _ = writeln!(text, "![{}]({plot})\n", name.replace('-', " "));
            }
        }
        text.push_str(
            "\n## Every figure\n\nMedian (lower to upper quartile). The last column is the median of the single rounds' \
             ratios of eBPF to the better iptables backend of that line; `=` where the rounds do not tell them apart (sign \
             test, 5 %).\n",
        );
        for group in self.results.groups() {
            text.push_str(&self.group_table(group));
        }
        // One empty line at a time.
        while text.contains("\n\n\n") {
            text = text.replace("\n\n\n", "\n\n");
        }
        text.trim_end().to_owned() + "\n"
    }

    fn head(&self) -> String {
        let Self { machine, sizes, .. } = self;
        let mut text = String::from("# Ways of redirecting compared\n\n");
        text.push_str(
            "Written by `cargo xtask bench redirect`; every value is in [redirect.json](redirect.json), what is measured and \
             how in [README.md](README.md).\n\n",
        );
        if self.tiny {
            text.push_str("**A trial with tiny amounts: the figures mean nothing.**\n\n");
        }
        let _ = writeln!(
            text,
            "Linux {}, {}, {} processors, {} MiB; load {} before and {} after; {} rounds in {} min {} s, {}.",
            machine.kernel,
            machine.cpu,
            machine.cpus,
            machine.memory_mib,
            machine.load,
            self.load_after,
            self.rounds,
            self.duration.as_secs() / 60,
            self.duration.as_secs() % 60,
            match self.family {
                Family::V4 => "IPv4",
                Family::V6 => "IPv6",
            },
        );
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
    use super::*;
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
            machine: Machine::now(),
            load_after: "0.5".into(),
            duration: Duration::from_secs(61),
            rounds: 10,
            family: Family::V4,
            tiny: true,
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
        assert!(text.contains("A trial") && text.contains("1 min 1 s") && !text.contains("\n\n\n"));
        let json: Value = serde_json::from_str(&report.to_json().unwrap()).unwrap();
        assert_eq!(json["figures"][0]["modes"]["ebpf, TCX"]["rounds"][9], 5009.0);
        assert_eq!(json["rounds"], 10);
    }
}
