//! What the project wants to reach with its proxy, and what was found.

use super::{
    Results, Sizes, memory,
    modes::Mode,
    traffic::{BULK, CONNECTIONS, DOWNLOAD, MANY, ONE, P50, REQUESTS, SHORT, UPLOAD, cpu_per_gibibyte},
};
use crate::table::{Found, Goal, Target, by_ratio};

/// Every measure.
pub(crate) fn all(results: &Results, sizes: &Sizes) -> Vec<Target> {
    let by_direct = |group: &str, name: &str, mode: Mode, goal: Goal| Target {
        measure: format!(
            "{group}, {name}: {} by direct",
            crate::results::Compared::name(mode)
        ),
        unit: "times",
        goal,
        found: results
            .find(group, name)
            .and_then(|figure| figure.ratio(mode, Mode::Direct))
            .map(by_ratio),
    };
    let absolute = |group: &str, name: &str, unit: &'static str, goal: Goal| Target {
        measure: format!("{group}, {name}, {}", crate::results::Compared::name(Mode::Hbone)),
        unit,
        goal,
        found: results
            .find(group, name)
            .and_then(|figure| figure.summary(Mode::Hbone))
            .map(|summary| Found {
                summary,
                note: String::new(),
            }),
    };
    vec![
        by_direct(BULK, UPLOAD, Mode::Hbone, Goal::AtLeast(0.40)),
        by_direct(BULK, DOWNLOAD, Mode::Hbone, Goal::AtLeast(0.40)),
        by_direct(BULK, UPLOAD, Mode::SameNode, Goal::AtLeast(0.55)),
        by_direct(BULK, DOWNLOAD, Mode::SameNode, Goal::AtLeast(0.55)),
        by_direct(MANY, REQUESTS, Mode::Hbone, Goal::AtLeast(0.38)),
        by_direct(ONE, P50, Mode::Hbone, Goal::AtMost(3.0)),
        by_direct(SHORT, CONNECTIONS, Mode::Hbone, Goal::AtLeast(0.50)),
        absolute(BULK, &cpu_per_gibibyte("the agent's own"), "s", Goal::AtMost(1.8)),
        absolute(memory::GROUP, memory::IDLE, "MiB", Goal::AtMost(10.0)),
        absolute(
            memory::GROUP,
            &memory::with_connections(sizes.idle_connections),
            "MiB",
            Goal::AtMost(18.0),
        ),
        Target {
            measure: "memory 20 s after a burst, by that right after it".to_owned(),
            unit: "times",
            goal: Goal::AtMost(0.9),
            found: memory::shrinking(results),
        },
    ]
}
