//! How long enrolling and removing a pod takes: the whole, from the request to the answer, and the backend's part of it, which
//! the agent tells in its log.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufRead, BufReader, Seek, SeekFrom},
    path::Path,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use redirector_tests::{
    agent::{self, Agent},
    node::Pod,
    wait,
};

use super::{Results, modes::Mode};
use crate::{results::MILLISECONDS, stats};

pub(crate) const ONE_AT_A_TIME: &str = "one pod at a time";
/// Names of figures.
pub(crate) const ENROL_REDIRECTION: &str = "enrol, redirection part";
pub(crate) const ENROL_WHOLE: &str = "enrol, whole";
const REMOVE_REDIRECTION: &str = "remove, redirection part";
const REMOVE_WHOLE: &str = "remove, whole";
pub(crate) const ENROL_ALL_REDIRECTION: &str = "enrol all, redirection parts";
const ENROL_ALL: &str = "enrol all, whole";
const REMOVE_ALL: &str = "remove all, whole";

/// More would wait for each other at the agent's socket.
const CONCURRENCY: usize = 50;

/// What is done to a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Act {
    Enrol,
    Remove,
}

/// How long it took.
#[derive(Debug)]
pub(crate) struct Timing {
    /// Until the last answer.
    pub(crate) all: Duration,
    /// From each request to its answer, in milliseconds, sorted.
    pub(crate) whole: Vec<f64>,
    /// The backend's part of each, in milliseconds, sorted.
    pub(crate) redirection: Vec<f64>,
    /// From the begin of the first pod's backend's part to the end of the last one's, in milliseconds. Of a removal it has in it
    /// what lies between the backend's two steps.
    pub(crate) redirection_span: f64,
}

/// Name of the group of figures for `count` pods at once.
pub(crate) fn at_once(count: usize) -> String {
    format!("{count} pods at once")
}

/// Enrols and removes pods of the crowd one by one, and then `all` of them at once.
pub(crate) fn measure(
    agent: &Agent,
    mode: Mode,
    (singles, all): (&[Pod], &[Pod]),
    results: &mut Results,
) -> Result<()> {
    let one_by_one = |act| -> Result<(Vec<f64>, Vec<f64>)> {
        let (mut redirection, mut whole) = (Vec::new(), Vec::new());
        for pod in singles {
            let timing = carry_out(agent, act, std::slice::from_ref(pod))?;
            redirection.extend(timing.redirection);
            whole.extend(timing.whole);
        }
        Ok((redirection, whole))
    };
    for (act, redirection_name, whole_name) in [
        (Act::Enrol, ENROL_REDIRECTION, ENROL_WHOLE),
        (Act::Remove, REMOVE_REDIRECTION, REMOVE_WHOLE),
    ] {
        let (redirection, whole) = one_by_one(act)?;
        for (name, values) in [(redirection_name, redirection), (whole_name, whole)] {
            // Each pod counts: the rounds have equally many.
            for value in values {
                results.add(ONE_AT_A_TIME, name, MILLISECONDS, mode, value);
            }
        }
    }
    let group = at_once(all.len());
    let enrolled = carry_out(agent, Act::Enrol, all)?;
    let removed = carry_out(agent, Act::Remove, all)?;
    for (name, value) in [
        (ENROL_ALL_REDIRECTION, enrolled.redirection_span),
        (ENROL_ALL, milliseconds(enrolled.all)),
        (REMOVE_ALL, milliseconds(removed.all)),
    ] {
        results.add(&group, name, MILLISECONDS, mode, value);
    }
    for (name, timing) in [(ENROL_REDIRECTION, &enrolled), (REMOVE_REDIRECTION, &removed)] {
        let name = format!("{name}, median pod");
        results.add(
            &group,
            &name,
            MILLISECONDS,
            mode,
            stats::quantile(&timing.redirection, 0.5),
        );
    }
    Ok(())
}

/// Enrols or removes pods, up to [`CONCURRENCY`] at a time.
pub(crate) fn carry_out(agent: &Agent, act: Act, pods: &[Pod]) -> Result<Timing> {
    let log_end = agent.log_file().metadata().context("the agent's log")?.len();
    let next = AtomicUsize::new(0);
    let worker = || -> Result<Vec<f64>> {
        let mut times = Vec::new();
        while let Some(pod) = pods.get(next.fetch_add(1, Ordering::Relaxed)) {
            ensure!(!wait::interrupted(), "interrupted");
            let begin = Instant::now();
            let answer = match act {
                Act::Enrol => agent.cmdadd(pod),
                Act::Remove => agent.cmddel(pod),
            };
            ensure!(answer.status == 200, "{act:?} {}: {}", pod.name, answer.body);
            times.push(milliseconds(begin.elapsed()));
        }
        Ok(times)
    };
    let begin = Instant::now();
    let mut whole = Vec::with_capacity(pods.len());
    thread::scope(|scope| {
        let workers: Vec<_> = (0..pods.len().min(CONCURRENCY))
            .map(|_| scope.spawn(worker))
            .collect();
        workers.into_iter().try_for_each(|worker| {
            whole.extend(worker.join().expect("the agent answers")?);
            anyhow::Ok(())
        })
    })?;
    let all = begin.elapsed();
    let steps = wait::until("the agent's log to tell how long each pod took", || {
        let steps = steps_since(agent.log_file(), log_end, act).expect("the agent's log can be read");
        pods.iter()
            .all(|pod| steps.contains_key(&pod.uid))
            .then_some(steps)
    });
    let of_pods = || pods.iter().map(|pod| steps[&pod.uid]);
    let first = of_pods()
        .map(|step| step.end_us - step.elapsed_us)
        .min()
        .unwrap_or(0);
    let last = of_pods().map(|step| step.end_us).max().unwrap_or(0);
    let mut redirection: Vec<f64> = of_pods().map(|step| step.elapsed_us as f64 / 1e3).collect();
    redirection.sort_by(f64::total_cmp);
    whole.sort_by(f64::total_cmp);
    Ok(Timing {
        all,
        whole,
        redirection,
        redirection_span: (last - first) as f64 / 1e3,
    })
}

pub(crate) fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// The backend's work for one pod: when it ended, on the agent's clock, and how long it took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Step {
    end_us: i64,
    elapsed_us: i64,
}

/// What the log tells from `offset` on, by the pod's UID.
fn steps_since(log: &Path, offset: u64, act: Act) -> Result<BTreeMap<String, Step>> {
    let mut file = File::open(log).with_context(|| format!("opening {}", log.display()))?;
    file.seek(SeekFrom::Start(offset))?;
    let message = match act {
        Act::Enrol => "\tredirection attached\t",
        Act::Remove => "\tredirection detached\t",
    };
    let mut steps = BTreeMap::new();
    for line in BufReader::new(file).split(b'\n') {
        let line = String::from_utf8_lossy(&line?).into_owned();
        if line.contains(message) {
            let (uid, step) = step(&line)?;
            steps.insert(uid, step);
        }
    }
    Ok(steps)
}

/// `2026-01-05T10:11:12.345678Z debug pods::work redirection attached uid=… elapsed_us=…`, with tabs.
fn step(line: &str) -> Result<(String, Step)> {
    let fields = agent::fields(line);
    let elapsed = fields.get("elapsed_us").and_then(|text| text.parse().ok());
    let time = line.split('\t').next().and_then(microseconds_of_day);
    let (Some(uid), Some(elapsed_us), Some(end_us)) = (fields.get("uid"), elapsed, time) else {
        bail!("a line of the agent's log is not understood: {line}");
    };
    Ok((uid.clone(), Step { end_us, elapsed_us }))
}

/// Of an RFC 3339 time. A run over midnight UTC has one wrong span.
fn microseconds_of_day(time: &str) -> Option<i64> {
    let (_, time) = time.strip_suffix('Z')?.split_once('T')?;
    let mut parts = time.split([':', '.']);
    let mut next = || parts.next()?.parse::<i64>().ok();
    let (hours, minutes, seconds, micros) = (next()?, next()?, next()?, next()?);
    Some(((hours * 60 + minutes) * 60 + seconds) * 1_000_000 + micros)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agents_lines_are_read() {
        let line =
            "2026-01-05T10:11:12.345678Z\tdebug\tpods::work\tredirection attached\tuid=a-b.1 elapsed_us=4321";
        let (uid, read) = step(line).unwrap();
        assert_eq!(uid, "a-b.1");
        let expected = Step {
            end_us: 36_672_345_678,
            elapsed_us: 4321,
        };
        assert_eq!(read, expected);
        assert!(step("2026-01-05T10:11:12.345678Z\tdebug\tpods::work\tredirection attached\tuid=a").is_err());
        assert!(step("x\tdebug\tpods::work\tredirection attached\tuid=a elapsed_us=1").is_err());
    }
}
