//! What the project wants to reach, and what was found. A goal that was missed, or that the rounds do not show, is told as such.

use super::{
    Results, Sizes, cost,
    enrol::{self, ENROL_ALL_REDIRECTION, ENROL_REDIRECTION, ONE_AT_A_TIME},
    growth,
    modes::{Mode, with_traffic},
    traffic::{BULK, CONNECTIONS, CONNTRACK, LOST_SYNS, P50, Scenario},
};
use crate::{
    results::{Better, Compared as _},
    stats::{Ratio, Summary},
    table::{Found, Goal, Target, by_ratio},
};

/// What "no growth" is held to be: the spread of single values over rounds is of this size.
const NO_GROWTH: f64 = 1.10;

/// Every measure, in the order of their subject.
pub(crate) fn all(results: &Results, modes: &[Mode], sizes: &Sizes) -> Vec<Target> {
    let context = Context {
        results,
        modes,
        ours: with_traffic(modes)
            .into_iter()
            .find(|mode| mode.is_ebpf())
            .unwrap_or(Mode::Tcx),
    };
    let mut targets = context.enrolment(sizes);
    targets.extend(context.traffic());
    targets.extend(context.nothing_left());
    targets.extend(context.programs());
    targets.extend(context.growth(sizes));
    targets
}

struct Context<'a> {
    results: &'a Results,
    modes: &'a [Mode],
    /// The eBPF mode that carries traffic.
    ours: Mode,
}

impl Context<'_> {
    fn enrolment(&self, sizes: &Sizes) -> Vec<Target> {
        let mut targets = Vec::new();
        let group = enrol::at_once(sizes.at_once);
        for (mode, goal) in [(Mode::Clsact, 3.0), (Mode::Tcx, 20.0)] {
            targets.push(self.absolute(
                &format!("enrolment of a pod, redirection part, p50, {}", mode.name()),
                (ONE_AT_A_TIME, ENROL_REDIRECTION, mode),
                "ms",
                Goal::AtMost(goal),
            ));
        }
        for mode in [Mode::Clsact, Mode::Tcx] {
            targets.push(self.absolute(
                &format!("{group} enrolled, redirection part, {}", mode.name()),
                (&group, ENROL_ALL_REDIRECTION, mode),
                "ms",
                Goal::AtMost(300.0),
            ));
        }
        for mode in [Mode::Clsact, Mode::Tcx] {
            for (other, goal) in [(Mode::Nft, 10.0), (Mode::Legacy, 1.0)] {
                let figure = self.results.find(ONE_AT_A_TIME, ENROL_REDIRECTION);
                targets.push(Target {
                    measure: format!(
                        "enrolment, redirection part: {} takes times as long as {}",
                        other.name(),
                        mode.name()
                    ),
                    unit: "times",
                    goal: Goal::AtLeast(goal),
                    found: figure.and_then(|f| f.ratio(other, mode)).map(by_ratio),
                });
            }
        }
        targets
    }

    fn traffic(&self) -> Vec<Target> {
        let mut targets = Vec::new();
        for scenario in Scenario::ALL {
            let goal = if scenario == Scenario::Hbone { 1.1 } else { 1.2 };
            targets.push(self.against_iptables(scenario, CONNECTIONS, Goal::AtLeast(goal)));
        }
        for scenario in Scenario::ALL {
            targets.push(self.against_iptables(scenario, P50, Goal::AtMost(0.85)));
        }
        for (scenario, goal) in [(Scenario::Inbound, 1.1), (Scenario::Outbound, 1.0)] {
            for (name, _, _) in BULK {
                targets.push(self.against_iptables(scenario, name, Goal::AtLeast(goal)));
            }
        }
        targets
    }

    /// Our mode's figure by the better iptables backend's.
    fn against_iptables(&self, scenario: Scenario, name: &str, goal: Goal) -> Target {
        let figure = self.results.find(scenario.name(), name);
        let found = figure.and_then(|figure| {
            let best = figure.best(self.modes.iter().copied().filter(|mode| mode.is_iptables()))?;
            let mut found = by_ratio(figure.ratio(self.ours, best)?);
            found.note = format!("against {}; {}", best.name(), found.note);
            Some(found)
        });
        Target {
            measure: format!("{}, {name}: eBPF by the better iptables", scenario.name()),
            unit: "times",
            goal,
            found,
        }
    }

    fn nothing_left(&self) -> Vec<Target> {
        [(CONNTRACK, "conntrack entries"), (LOST_SYNS, "lost SYNs")]
            .map(|(name, text)| {
                let values: Vec<f64> = Scenario::ALL
                    .iter()
                    .filter_map(|scenario| self.results.find(scenario.name(), name))
                    .flat_map(|figure| figure.values(self.ours).iter().copied())
                    .collect();
                // All rounds count, not the middle one.
                let worst = values.iter().copied().fold(0.0, f64::max);
                Target {
                    measure: format!("{text} in any round, {}", self.ours.name()),
                    unit: "",
                    goal: Goal::AtMost(0.0),
                    found: (!values.is_empty()).then(|| Found {
                        summary: Summary::of(&[worst]).expect("of one value"),
                        note: format!("the most of {} measurements", values.len()),
                    }),
                }
            })
            .into()
    }

    fn programs(&self) -> Vec<Target> {
        let figures = self.results.group(cost::ALL_LOADS);
        figures
            .filter(|figure| figure.name != cost::EMPTY)
            .map(|figure| Target {
                measure: format!("a run of {}, net of an empty program", figure.name),
                unit: "ns",
                goal: Goal::AtMost(100.0),
                found: cost::net(self.results, figure, self.ours).map(|summary| Found {
                    summary,
                    note: "connections, requests and bulk together".to_owned(),
                }),
            })
            .collect()
    }

    fn growth(&self, sizes: &Sizes) -> Vec<Target> {
        let (Some(&few), Some(&many)) = (sizes.growth.first(), sizes.growth.last()) else {
            return Vec::new();
        };
        let (few_group, many_group) = (growth::group(few), growth::group(many));
        let compare = |name: &str| {
            let values = |group: &str| Some(self.results.find(group, name)?.values(self.ours));
            let (few, many) = (values(&few_group)?, values(&many_group)?);
            Some((Summary::of(few)?, Ratio::of(many, few)?))
        };
        let names = self.results.group(&few_group).filter(|figure| {
            figure.name == CONNECTIONS
                || figure.name == P50
                || figure.name == ENROL_REDIRECTION
                || figure.name.starts_with("a run of ")
        });
        names
            .map(|figure| Target {
                measure: format!("{}: {many} pods by {few}, {}", figure.name, self.ours.name()),
                unit: "times",
                goal: match figure.better {
                    Better::More => Goal::AtLeast(1.0 / NO_GROWTH),
                    Better::Less => Goal::AtMost(NO_GROWTH),
                },
                found: compare(&figure.name).map(|(few, ratio)| Found {
                    summary: ratio.summary,
                    note: format!(
                        "values with {}: {:.0} % apart from each other",
                        few_group,
                        (few.most / few.least - 1.0) * 100.0
                    ),
                }),
            })
            .collect()
    }

    fn absolute(
        &self,
        measure: &str,
        (group, name, mode): (&str, &str, Mode),
        unit: &'static str,
        goal: Goal,
    ) -> Target {
        let summary = self
            .results
            .find(group, name)
            .and_then(|figure| figure.summary(mode));
        Target {
            measure: measure.to_owned(),
            unit,
            goal,
            found: summary.map(|summary| Found {
                summary,
                note: String::new(),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::PER_SECOND;

    #[test]
    fn our_mode_is_held_against_the_better_iptables() {
        let mut results = Results::default();
        let group = Scenario::Outbound.name();
        for _ in 0..10 {
            for (mode, rate) in [(Mode::Nft, 100.0), (Mode::Legacy, 110.0), (Mode::Tcx, 121.0)] {
                results.add(group, CONNECTIONS, PER_SECOND, mode, rate);
            }
        }
        let context = Context {
            results: &results,
            modes: &[Mode::Nft, Mode::Legacy, Mode::Tcx],
            ours: Mode::Tcx,
        };
        let target = context.against_iptables(Scenario::Outbound, CONNECTIONS, Goal::AtLeast(1.2));
        let found = target.found.clone().unwrap();
        assert!((found.summary.median - 1.1).abs() < 1e-9);
        assert_eq!(found.note, "against iptables-legacy; more in 10, less in 0 pairs");
        assert_eq!(target.reached(), Some(false));
        let absent = context.against_iptables(Scenario::Hbone, CONNECTIONS, Goal::AtLeast(1.1));
        assert_eq!(absent.reached(), None);
    }

    #[test]
    fn one_bad_round_counts_where_nothing_may_be_left() {
        let mut results = Results::default();
        for value in [0.0, 0.0, 1.0] {
            results.add(
                Scenario::Inbound.name(),
                LOST_SYNS,
                ("", Better::Less),
                Mode::Tcx,
                value,
            );
        }
        let context = Context {
            results: &results,
            modes: &[Mode::Tcx],
            ours: Mode::Tcx,
        };
        let reached: Vec<_> = context.nothing_left().iter().map(Target::reached).collect();
        assert_eq!(reached, [None, Some(false)]);
    }
}
