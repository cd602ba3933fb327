//! What becomes of the figures when ever more pods are enrolled on the node: the traffic is one pod's, the others do nothing.

use std::{collections::BTreeSet, fs};

use anyhow::{Context, Result};
use redirector_tests::{mesh::Mesh, node::Family, node::Pod};

use super::{
    Results, Sizes,
    enrol::{self, Act, ENROL_REDIRECTION},
    modes::Mode,
    programs::{Counting, Id, runs_during},
    traffic::{CONNECTIONS, P50, Scenario},
};
use crate::{
    results::{COUNT, Compared as _, MIB, MICROSECONDS, MILLISECONDS, NANOSECONDS, PER_SECOND},
    usage,
};

/// Each figure is measured as often at every number of pods.
const REPEATS: usize = 3;
/// Pods enrolled one by one at every number of pods: they take milliseconds, and differ more.
const ENROLMENTS: usize = 9;

/// Name of the group of figures with `pods` enrolled.
pub(crate) fn group(pods: usize) -> String {
    match pods {
        1 => "1 pod enrolled".to_owned(),
        _ => format!("{pods} pods enrolled"),
    }
}

/// Enrols ever more of the crowd beside the mesh's client, and measures at each of `sizes.growth`. The server is released first,
/// and the crowd at the end.
pub(crate) fn measure(
    mesh: &Mesh,
    mode: Mode,
    ids: &BTreeSet<Id>,
    family: Family,
    sizes: &Sizes,
    crowd: &[Pod],
    results: &mut Results,
) -> Result<()> {
    mesh.agent.release(&mesh.server);
    let mut enrolled = 0;
    for &pods in &sizes.growth {
        let wanted = pods - 1;
        if wanted > enrolled {
            let timing = enrol::carry_out(&mesh.agent, Act::Enrol, &crowd[enrolled..wanted])?;
            enrolled = wanted;
            println!(
                "  {}: {pods} pods, the last of them in {:.1} s",
                mode.name(),
                timing.all.as_secs_f64()
            );
        }
        at(mesh, mode, ids, family, sizes, &group(pods), results)?;
        // One more, by itself: what enrolling costs when so many are there.
        if let Some(one) = crowd.get(enrolled..=enrolled) {
            for _ in 0..ENROLMENTS {
                let timing = enrol::carry_out(&mesh.agent, Act::Enrol, one)?;
                for value in timing.redirection {
                    results.add(&group(pods), ENROL_REDIRECTION, MILLISECONDS, mode, value);
                }
                enrol::carry_out(&mesh.agent, Act::Remove, one)?;
            }
        }
    }
    enrol::carry_out(&mesh.agent, Act::Remove, &crowd[..enrolled]).context("removing the crowd")?;
    Ok(())
}

fn at(
    mesh: &Mesh,
    mode: Mode,
    ids: &BTreeSet<Id>,
    family: Family,
    sizes: &Sizes,
    group: &str,
    results: &mut Results,
) -> Result<()> {
    let pair = Scenario::Outbound.pair(mesh, family);
    for _ in 0..REPEATS {
        let rate = pair
            .connections(sizes.connections, sizes.concurrency)
            .context("short connections")?;
        results.add(group, CONNECTIONS, PER_SECOND, mode, rate);
        let (p50, _) = pair.latency(sizes.requests).context("requests")?;
        results.add(group, P50, MICROSECONDS, mode, p50);
        if mode.is_ebpf() {
            let counting = Counting::start()?;
            let runs = runs_during(&counting, ids, || {
                pair.connections((sizes.connections / 2).max(1), sizes.concurrency)?;
                Ok(())
            })?;
            for (name, runs) in runs {
                if let Some(average) = runs.average_ns() {
                    results.add(group, &run_of(&name), NANOSECONDS, mode, average);
                }
            }
        }
    }
    let agent = mesh.agent.pid();
    results.add(
        group,
        "the agent's memory",
        MIB,
        mode,
        usage::resident_mib(agent)?,
    );
    let descriptors = fs::read_dir(format!("/proc/{agent}/fd"))
        .context("the agent's descriptors")?
        .count();
    results.add(group, "the agent's descriptors", COUNT, mode, descriptors as f64);
    Ok(())
}

/// Name of the figure of a program's run, counting included.
pub(crate) fn run_of(program: &str) -> String {
    format!("a run of {program}, with what counting costs")
}
