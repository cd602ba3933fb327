//! Every figure of a run: values by figure and mode, in the order of the rounds.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::stats::{Ratio, Summary, median};

/// What is compared.
pub(crate) trait Compared: Copy + Ord {
    /// Name in tables and files.
    fn name(self) -> &'static str;

    /// Red, green and blue in plots.
    fn colour(self) -> (u8, u8, u8);
}

/// Which way a figure gets better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Better {
    More,
    Less,
}

/// Values of one figure.
#[derive(Debug, Clone)]
pub(crate) struct Figure<M> {
    /// What was done: a scenario.
    pub(crate) group: String,
    /// What was measured of it.
    pub(crate) name: String,
    pub(crate) unit: &'static str,
    pub(crate) better: Better,
    values: BTreeMap<M, Vec<f64>>,
}

impl<M: Compared> Figure<M> {
    /// The values of a mode, in the order they were measured.
    pub(crate) fn values(&self, mode: M) -> &[f64] {
        self.values.get(&mode).map_or(&[], Vec::as_slice)
    }

    pub(crate) fn summary(&self, mode: M) -> Option<Summary> {
        Summary::of(self.values(mode))
    }

    /// Of the modes, the one with the best median.
    pub(crate) fn best(&self, modes: impl IntoIterator<Item = M>) -> Option<M> {
        let medians = modes
            .into_iter()
            .filter_map(|mode| Some((mode, median(self.values(mode))?)));
        let worse_first = |a: &(M, f64), b: &(M, f64)| match self.better {
            Better::More => a.1.total_cmp(&b.1),
            Better::Less => b.1.total_cmp(&a.1),
        };
        medians.max_by(worse_first).map(|(mode, _)| mode)
    }

    /// How often as much `mode` has as `by`, round by round.
    pub(crate) fn ratio(&self, mode: M, by: M) -> Option<Ratio> {
        Ratio::of(self.values(mode), self.values(by))
    }
}

/// All figures, in the order in which they were first measured.
#[derive(Debug)]
pub(crate) struct Results<M>(Vec<Figure<M>>);

impl<M> Default for Results<M> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<M: Compared> Results<M> {
    /// Adds a value.
    pub(crate) fn add(&mut self, group: &str, name: &str, (unit, better): Unit, mode: M, value: f64) {
        let place = self.0.iter().position(|f| f.group == group && f.name == name);
        let place = place.unwrap_or_else(|| {
            self.0.push(Figure {
                group: group.to_owned(),
                name: name.to_owned(),
                unit,
                better,
                values: BTreeMap::new(),
            });
            self.0.len() - 1
        });
        self.0[place].values.entry(mode).or_default().push(value);
    }

    pub(crate) fn find(&self, group: &str, name: &str) -> Option<&Figure<M>> {
        self.0.iter().find(|f| f.group == group && f.name == name)
    }

    /// The figures of a group.
    pub(crate) fn group<'a>(&'a self, group: &'a str) -> impl Iterator<Item = &'a Figure<M>> {
        self.0.iter().filter(move |figure| figure.group == group)
    }

    /// The groups, in order.
    pub(crate) fn groups(&self) -> Vec<&str> {
        let mut groups: Vec<&str> = Vec::new();
        for figure in &self.0 {
            if !groups.contains(&figure.group.as_str()) {
                groups.push(&figure.group);
            }
        }
        groups
    }

    /// Every value.
    pub(crate) fn to_json(&self) -> Value {
        let figure = |figure: &Figure<M>| {
            let modes = figure.values.iter().map(|(mode, values)| {
                let summary = figure.summary(*mode).map(|s| {
                    json!({
                        "least": s.least, "lower_quartile": s.lower_quartile, "median": s.median,
                        "upper_quartile": s.upper_quartile, "most": s.most,
                    })
                });
                (
                    mode.name().to_owned(),
                    json!({"rounds": values, "summary": summary}),
                )
            });
            json!({
                "group": figure.group, "name": figure.name, "unit": figure.unit,
                "better": if figure.better == Better::More { "more" } else { "less" },
                "modes": Value::Object(modes.collect()),
            })
        };
        self.0.iter().map(figure).collect()
    }
}

/// A unit, and which way its figures get better.
pub(crate) type Unit = (&'static str, Better);

pub(crate) const GBITS: Unit = ("Gbit/s", Better::More);
pub(crate) const PER_SECOND: Unit = ("1/s", Better::More);
pub(crate) const MICROSECONDS: Unit = ("us", Better::Less);
pub(crate) const MILLISECONDS: Unit = ("ms", Better::Less);
pub(crate) const NANOSECONDS: Unit = ("ns", Better::Less);
pub(crate) const SECONDS: Unit = ("s", Better::Less);
pub(crate) const MIB: Unit = ("MiB", Better::Less);
pub(crate) const COUNT: Unit = ("", Better::Less);

#[cfg(test)]
pub(crate) mod testing {
    /// What tests compare.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
    pub(crate) enum Mode {
        Direct,
        Ours,
        Theirs,
    }

    impl super::Compared for Mode {
        fn name(self) -> &'static str {
            match self {
                Self::Direct => "direct",
                Self::Ours => "ours",
                Self::Theirs => "theirs",
            }
        }

        fn colour(self) -> (u8, u8, u8) {
            match self {
                Self::Direct => (0, 0, 0),
                Self::Ours => (0, 0x5a, 0xa0),
                Self::Theirs => (0xff, 0, 0),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{testing::Mode, *};

    #[test]
    fn the_better_mode_depends_on_the_figure() {
        let mut results = Results::default();
        for (mode, rate, time) in [(Mode::Theirs, 10.0, 5.0), (Mode::Ours, 12.0, 7.0)] {
            results.add("g", "rate", PER_SECOND, mode, rate);
            results.add("g", "time", MICROSECONDS, mode, time);
        }
        let best = |name| {
            results
                .find("g", name)
                .unwrap()
                .best([Mode::Theirs, Mode::Ours, Mode::Direct])
        };
        assert_eq!(best("rate"), Some(Mode::Ours));
        assert_eq!(best("time"), Some(Mode::Theirs));
        assert_eq!(results.find("g", "rate").unwrap().best([Mode::Direct]), None);
        assert_eq!(results.groups(), ["g"]);
        assert!(results.find("g", "none").is_none());
    }
}
