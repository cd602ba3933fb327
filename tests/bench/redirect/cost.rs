//! What the eBPF programs cost under each kind of load, by run and by what was done, beside an empty program under the same load.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};
use redirector_tests::{mesh::Mesh, node::Family};

use super::{
    Results, Sizes,
    modes::Mode,
    programs::{Counting, Empty, Id, Runs, runs_during},
    traffic::Scenario,
};
use crate::{
    load::{Pair, Way},
    results::{COUNT, Figure, NANOSECONDS},
    stats::Summary,
};

/// The empty program's name in the results; it is measured in mode [`Mode::None`].
pub(crate) const EMPTY: &str = "empty";

/// A kind of load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Load {
    Connections,
    Requests,
    Bulk,
}

impl Load {
    pub(crate) const ALL: [Self; 3] = [Self::Connections, Self::Requests, Self::Bulk];

    /// Its name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Connections => "short connections",
            Self::Requests => "requests",
            Self::Bulk => "bulk",
        }
    }

    /// What is counted of it.
    fn unit(self) -> &'static str {
        match self {
            Self::Connections => "connection",
            Self::Requests => "request",
            Self::Bulk => "GiB",
        }
    }

    /// Name of the group of figures of a run.
    pub(crate) fn group(self) -> &'static str {
        match self {
            Self::Connections => "a run of a program, short connections",
            Self::Requests => "a run of a program, requests on an open connection",
            Self::Bulk => "a run of a program, bulk",
        }
    }

    /// Puts it on a pair; returns how much was done of it.
    fn put(self, pair: &Pair<'_>, sizes: &Sizes) -> Result<f64> {
        match self {
            Self::Connections => {
                let connections = (sizes.connections / 2).max(1);
                pair.connections(connections, sizes.concurrency)?;
                Ok(f64::from(connections))
            }
            Self::Requests => {
                let requests = (sizes.requests / 2).max(1);
                pair.latency(requests)?;
                Ok(requests as f64)
            }
            Self::Bulk => {
                let bytes = (sizes.bytes / 2).max(1);
                pair.throughput(Way::Upload, bytes, 1)?;
                pair.throughput(Way::Download, bytes, 1)?;
                Ok(2.0 * bytes as f64 / f64::from(1 << 30))
            }
        }
    }
}

/// The average of fewer runs says how cold the caches were: SK_LOOKUP runs but once per connection.
const MIN_RUNS: u64 = 100;

/// Group of the figures over all kinds of load together.
pub(crate) const ALL_LOADS: &str = "a run of a program, all these loads together";

/// Puts every kind of load, outbound and inbound in plain, on the pods whose programs have these ids. In mode
/// [`Mode::None`] the pods get the empty program for that time instead.
pub(crate) fn measure(
    mesh: &Mesh,
    mode: Mode,
    ids: &BTreeSet<Id>,
    family: Family,
    sizes: &Sizes,
    results: &mut Results,
) -> Result<()> {
    let empty = match mode {
        Mode::None => Some([&mesh.client.ns, &mesh.server.ns].map(Empty::attach)),
        _ => None,
    };
    let empty = empty
        .map(|both| both.into_iter().collect::<Result<Vec<_>>>())
        .transpose()?;
    let empty_ids = empty
        .iter()
        .flatten()
        .flat_map(|empty| empty.ids.iter().copied())
        .collect();
    let ids = if mode == Mode::None { &empty_ids } else { ids };
    let counting = Counting::start()?;
    let mut together: BTreeMap<String, Runs> = BTreeMap::new();
    for load in Load::ALL {
        let mut amount = 0.0;
        let runs = runs_during(&counting, ids, || {
            for scenario in [Scenario::Outbound, Scenario::Inbound] {
                amount += load.put(&scenario.pair(mesh, family), sizes)?;
            }
            Ok(())
        })
        .with_context(|| format!("cost of programs, {}", load.group()))?;
        for (name, runs) in runs {
            let sum = together.entry(name.clone()).or_default();
            sum.count += runs.count;
            sum.time_ns += runs.time_ns;
            let runs_of = format!("{name}, runs per {}", load.unit());
            results.add(RUNS, &runs_of, COUNT, mode, runs.count as f64 / amount);
            if let Some(average) = runs.average_ns().filter(|_| runs.count >= MIN_RUNS) {
                results.add(load.group(), &name, NANOSECONDS, mode, average);
            }
        }
    }
    for (name, runs) in together {
        if let Some(average) = runs.average_ns() {
            results.add(ALL_LOADS, &name, NANOSECONDS, mode, average);
        }
    }
    Ok(())
}

/// Group of the figures that say how often programs run.
pub(crate) const RUNS: &str = "how often a program runs";

/// Nanoseconds of a run beyond those of the empty program in the same round.
pub(crate) fn net(results: &Results, figure: &Figure<Mode>, mode: Mode) -> Option<Summary> {
    let empty = results.find(&figure.group, EMPTY)?.values(Mode::None);
    let net: Vec<f64> = figure
        .values(mode)
        .iter()
        .zip(empty)
        .map(|(gross, empty)| gross - empty)
        .collect();
    Summary::of(&net)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_empty_program_of_the_same_round_is_subtracted() {
        let mut results = Results::default();
        for (empty, gross) in [(100.0, 130.0), (110.0, 150.0), (90.0, 140.0)] {
            results.add(ALL_LOADS, EMPTY, NANOSECONDS, Mode::None, empty);
            results.add(ALL_LOADS, "egress", NANOSECONDS, Mode::Tcx, gross);
        }
        let figure = results.find(ALL_LOADS, "egress").unwrap();
        let net = net(&results, figure, Mode::Tcx).unwrap();
        assert_eq!((net.least, net.median, net.most), (30.0, 40.0, 50.0));
        assert_eq!(super::net(&results, figure, Mode::Clsact), None);
    }
}
