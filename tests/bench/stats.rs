//! Statistics of a benchmark: quantiles, the spread of a figure over the rounds, and the ratio of two modes round by round.
//! Pure; everything that reports a number uses these.

/// A figure over the rounds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Summary {
    pub(crate) least: f64,
    pub(crate) lower_quartile: f64,
    pub(crate) median: f64,
    pub(crate) upper_quartile: f64,
    pub(crate) most: f64,
}

impl Summary {
    /// Of at least one value.
    pub(crate) fn of(values: &[f64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let at = |part| quantile(&sorted, part);
        (!sorted.is_empty()).then(|| Self {
            least: at(0.0),
            lower_quartile: at(0.25),
            median: at(0.5),
            upper_quartile: at(0.75),
            most: at(1.0),
        })
    }
}

/// The median of at least one value.
pub(crate) fn median(values: &[f64]) -> Option<f64> {
    Summary::of(values).map(|summary| summary.median)
}

/// The value below which `part` (0 to 1) of the sorted values lie, interpolated between neighbours; 0 of no values.
pub(crate) fn quantile(sorted: &[f64], part: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else {
        return 0.0;
    };
    let position = part.clamp(0.0, 1.0) * last as f64;
    let below = position.floor() as usize;
    let above = (below + 1).min(last);
    sorted[below] + (sorted[above] - sorted[below]) * position.fract()
}

/// How often as much one mode has as another.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Ratio {
    /// Over the ratios of the single rounds: what weighed on a round weighed on both modes.
    pub(crate) summary: Summary,
    /// Rounds in which it was more than one.
    pub(crate) more: usize,
    /// Rounds in which it was less than one.
    pub(crate) less: usize,
}

impl Ratio {
    /// Of two modes' values, which belong together by their order. `None` when no round has both, or none can be divided by.
    pub(crate) fn of(values: &[f64], by: &[f64]) -> Option<Self> {
        let ratios: Vec<f64> = values
            .iter()
            .zip(by)
            .filter(|(_, by)| **by != 0.0)
            .map(|(value, by)| value / by)
            .collect();
        Some(Self {
            summary: Summary::of(&ratios)?,
            more: ratios.iter().filter(|ratio| **ratio > 1.0).count(),
            less: ratios.iter().filter(|ratio| **ratio < 1.0).count(),
        })
    }

    /// Whether the rounds tell the modes apart: by a two-sided sign test, a split at least as one-sided as this would come by
    /// chance in fewer than one run of twenty.
    pub(crate) fn is_shown(&self) -> bool {
        sign_test(self.more, self.less) < 0.05
    }
}

/// Probability of a split of `more + less` fair coins at least as one-sided.
fn sign_test(more: usize, less: usize) -> f64 {
    let coins = more + less;
    let mut probability = 0.5_f64.powi(i32::try_from(coins).unwrap_or(i32::MAX));
    let mut tail = 0.0;
    for heads in 0..=more.min(less) {
        tail += probability;
        probability *= (coins - heads) as f64 / (heads + 1) as f64;
    }
    (2.0 * tail).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-9
    }

    #[test]
    fn quantiles_lie_between_neighbours() {
        let table: [(&[f64], f64, f64); 7] = [
            (&[], 0.5, 0.0),
            (&[7.0], 0.99, 7.0),
            (&[1.0, 2.0], 0.5, 1.5),
            (&[1.0, 2.0, 4.0], 0.5, 2.0),
            (&[1.0, 2.0, 4.0], 0.75, 3.0),
            (&[1.0, 2.0, 4.0], 2.0, 4.0),
            (&[1.0, 2.0, 4.0], 0.0, 1.0),
        ];
        for (values, part, expected) in table {
            assert!(near(quantile(values, part), expected), "{values:?} at {part}");
        }
    }

    #[test]
    fn a_summary_does_not_depend_on_order() {
        let summary = Summary::of(&[5.0, 1.0, 4.0, 2.0, 3.0]).unwrap();
        assert_eq!(
            summary,
            Summary {
                least: 1.0,
                lower_quartile: 2.0,
                median: 3.0,
                upper_quartile: 4.0,
                most: 5.0
            }
        );
        assert_eq!(Summary::of(&[]), None);
    }

    #[test]
    fn ratios_are_taken_round_by_round() {
        // The second round was slow for both: the ratio of the medians would be 1.
        let ratio = Ratio::of(&[12.0, 6.0, 24.0], &[10.0, 5.0, 12.0]).unwrap();
        assert!(near(ratio.summary.median, 1.2));
        assert_eq!((ratio.more, ratio.less), (3, 0));
        assert_eq!(Ratio::of(&[1.0], &[0.0]), None);
        assert_eq!(Ratio::of(&[1.0], &[]), None);
    }

    #[test]
    fn few_rounds_show_nothing_and_many_one_sided_ones_do() {
        for (more, less, expected) in [
            (1, 0, 1.0),
            (5, 0, 0.0625),
            (6, 0, 0.03125),
            (9, 1, 22.0 / 1024.0),
            (8, 2, 112.0 / 1024.0),
            (0, 0, 1.0),
        ] {
            assert!(near(sign_test(more, less), expected), "{more}:{less}");
            assert!(near(sign_test(less, more), expected), "{less}:{more}");
        }
    }
}
