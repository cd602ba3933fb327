//! Measures to reach, what was found of them, and the cells of tables.

use std::fmt::Write;

use serde_json::{Value, json};

use crate::stats::{Ratio, Summary};

/// A goal.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Goal {
    AtLeast(f64),
    AtMost(f64),
}

/// What was found of a measure.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Found {
    /// Over the rounds. The median counts.
    pub(crate) summary: Summary,
    /// What a reader must know of it.
    pub(crate) note: String,
}

/// A measure to reach.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Target {
    pub(crate) measure: String,
    pub(crate) unit: &'static str,
    pub(crate) goal: Goal,
    /// `None`: this run has not measured it.
    pub(crate) found: Option<Found>,
}

impl Target {
    /// `None` where it was not measured.
    pub(crate) fn reached(&self) -> Option<bool> {
        let median = self.found.as_ref()?.summary.median;
        Some(match self.goal {
            Goal::AtLeast(goal) => median >= goal,
            Goal::AtMost(goal) => median <= goal,
        })
    }
}

/// What the rounds say of two modes.
pub(crate) fn by_ratio(ratio: Ratio) -> Found {
    let shown = if ratio.is_shown() {
        ""
    } else {
        "; **no difference is shown**"
    };
    Found {
        summary: ratio.summary,
        note: format!("more in {}, less in {} pairs{shown}", ratio.more, ratio.less),
    }
}

/// A measure, for a file.
pub(crate) fn target_json(target: &Target) -> Value {
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
}

/// The measures to reach, as a table.
pub(crate) fn targets_table(targets: &[Target]) -> String {
    let mut text = String::from("| measure | goal | found (quartiles) | |\n|---|---|---|---|\n");
    for target in targets {
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

/// `=`: the rounds do not tell the modes apart.
pub(crate) fn ratio_cell(ratio: &Ratio) -> String {
    let equal = if ratio.is_shown() { "" } else { " =" };
    format!("{:.2}{equal}", ratio.summary.median)
}

/// Median and quartiles.
pub(crate) fn spread(summary: &Summary) -> String {
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

/// For headings.
pub(crate) fn capitalised(text: &str) -> String {
    let mut chars = text.chars();
    chars
        .next()
        .map(|first| first.to_uppercase().chain(chars).collect())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
