//! What a run leaves: every value as JSON, and tables for people.

use std::{fmt::Write, time::Duration};

use anyhow::Result;
use redirector_tests::node::Family;
use serde_json::{Value, json};

use super::{
    Sizes, cost,
    modes::Mode,
    results::{Figure, Results},
    targets::{Goal, Target},
};
use crate::{
    machine::Machine,
    stats::{Ratio, Summary},
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
        let target = |target: &Target| {
            let (kind, goal) = match target.goal {
                Goal::AtLeast(goal) => ("at_least", goal),
                Goal::AtMost(goal) => ("at_most", goal),
            };
            json!({
                "measure": target.measure, "unit": target.unit, kind: goal, "reached": target.reached(),
                "found": target.found.as_ref().map(|found| found.summary.median),
                "lower_quartile": target.found.as_ref().map(|found| found.summary.lower_quartile),
                "upper_quartile": target.found.as_ref().map(|found| found.summary.upper_quartile),
                "note": target.found.as_ref().map(|found| &found.note),
            })
        };
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
            "measures_to_reach": self.targets.iter().map(target).collect::<Vec<Value>>(),
        });
        Ok(serde_json::to_string_pretty(&value)? + "\n")
    }

    /// The tables, with the plots of these file names.
    pub(crate) fn to_markdown(&self, plots: &[&str]) -> String {
        let mut text = self.head();
        text.push_str("\n## Measures to reach\n\n");
        text.push_str(&self.targets_table());
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

    /// The measures to reach, as a table.
    pub(crate) fn targets_table(&self) -> String {
        let mut text = String::from("| measure | goal | found (quartiles) | |\n|---|---|---|---|\n");
        for target in &self.targets {
            let goal = match target.goal {
                Goal::AtLeast(goal) => format!("at least {}", number(goal)),
                Goal::AtMost(goal) => format!("at most {}", number(goal)),
            };
            let verdict = match target.reached() {
                None => "not measured",
                Some(true) => "reached",
                Some(false) => "**missed**",
            };
            let (found, note) = match &target.found {
                None => ("-".to_owned(), ""),
                Some(found) => (spread(&found.summary), found.note.as_str()),
            };
            let verdict = if note.is_empty() {
                verdict.to_owned()
            } else {
                format!("{verdict}; {note}")
            };
            let _ = writeln!(
                text,
                "| {} | {} | {found} | {verdict} |",
                target.measure,
                format!("{goal} {}", target.unit).trim_end(),
            );
        }
        text
    }

    fn group_table(&self, group: &str) -> String {
        let figures: Vec<&Figure> = self.results.group(group).collect();
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

    fn compared(&self, figures: &[&Figure]) -> bool {
        figures.iter().any(|figure| self.ratio(figure).is_some())
    }

    /// Of the first eBPF mode that has the figure, TCX before clsact, to the better iptables backend.
    fn ratio(&self, figure: &Figure) -> Option<Ratio> {
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

fn ratio_cell(ratio: &Ratio) -> String {
    let equal = if ratio.is_shown() { "" } else { " =" };
    format!("{:.2}{equal}", ratio.summary.median)
}

fn spread(summary: &Summary) -> String {
    let Summary {
        lower_quartile,
        median,
        upper_quartile,
        ..
    } = *summary;
    if lower_quartile == upper_quartile {
        return number(median);
    }
    format!(
        "{} ({} to {})",
        number(median),
        number(lower_quartile),
        number(upper_quartile)
    )
}

/// Three digits, more where there are more before the point.
pub(crate) fn number(value: f64) -> String {
    let digits = match value.abs() {
        0.0 => 0,
        size if size >= 99.95 => 0,
        size if size >= 9.995 => 1,
        size if size >= 0.9995 => 2,
        _ => 3,
    };
    let text = format!("{value:.digits$}");
    let (sign, rest) = text
        .strip_prefix('-')
        .map_or(("", text.as_str()), |rest| ("-", rest));
    let (whole, fraction) = rest.split_once('.').unwrap_or((rest, ""));
    let mut grouped = String::new();
    for (place, digit) in whole.chars().enumerate() {
        if place > 0 && (whole.len() - place).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    match fraction.trim_end_matches('0') {
        "" => format!("{sign}{grouped}"),
        fraction => format!("{sign}{grouped}.{fraction}"),
    }
}

fn capitalised(text: &str) -> String {
    let mut chars = text.chars();
    chars
        .next()
        .map(|first| first.to_uppercase().chain(chars).collect())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::{
        super::results::{COUNT, MICROSECONDS, PER_SECOND},
        *,
    };

    #[test]
    fn numbers_have_as_many_digits_as_mean_something() {
        for (value, expected) in [
            (0.0, "0"),
            (0.123_45, "0.123"),
            (1.0, "1"),
            (1.239, "1.24"),
            (12.34, "12.3"),
            (123.4, "123"),
            (1234.5, "1,234"),
            (1_234_567.0, "1,234,567"),
            (-12.34, "-12.3"),
        ] {
            assert_eq!(number(value), expected);
        }
    }

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
