//! Runs a row and looks at everything that its outcome must show: the ends' answer, the access log, the wire, the counters.

use std::collections::BTreeMap;

use redirector_tests::{
    app,
    capture::{Capture, Segment, contains, opened_ports},
    wait,
};

use crate::{
    scene::Scene,
    table::{Answer, Outcome, Row},
};

/// Nobody listens there. Its entry in the access log says that all earlier connections have theirs.
const FENCE_PORT: u16 = 7;

type Entry = BTreeMap<String, String>;

/// Packets by pod's name, program and verdict.
type Counts = BTreeMap<(String, String, String), u64>;

/// What was seen beside the ends.
struct Evidence {
    entries: Vec<Entry>,
    /// Of all three pods' interfaces, seen from the node.
    wire: Vec<Segment>,
    /// That part of it which comes from the client.
    sent_by_client: Vec<Segment>,
    /// What the programs counted meanwhile; `None` without programs.
    counts: Option<Counts>,
}

/// Makes a row's flow, and judges it.
pub(crate) fn judge(row: &Row, scene: &Scene) {
    let log_before = scene.agent.access_log().len();
    let counts_before = counts(scene);
    let captures = [&scene.client, &scene.server, &scene.late].map(|pod| scene.node.capture(pod));
    let answer = (row.flow)(scene);
    let counts = counts_before.map(|before| difference(&before, &counts(scene).unwrap_or_default()));
    fence(scene);
    let mut wire: Vec<Segment> = captures.into_iter().flat_map(Capture::stop).collect();
    wire.retain(|segment| segment.dst.port() != FENCE_PORT && segment.src.port() != FENCE_PORT);
    let log = scene.agent.access_log();
    let mut entries: Vec<Entry> = log.into_iter().skip(log_before).collect();
    entries.retain(|entry| !is_fence(entry));
    let client = scene.client.ip(scene.family);
    let sent_by_client = wire.iter().filter(|segment| segment.src.ip() == client).cloned();
    let evidence = Evidence {
        entries,
        sent_by_client: sent_by_client.collect(),
        wire,
        counts,
    };
    evidence.show(scene.outcome, answer);
}

/// A connection through the agent, and its entry in the access log.
fn fence(scene: &Scene) {
    let fences = || {
        let log = scene.agent.access_log();
        log.iter().filter(|entry| is_fence(entry)).count()
    };
    let before = fences();
    let to = scene.at(&scene.node.outside, FENCE_PORT);
    let answer = app::ask(&scene.client.ns, to, "");
    assert!(
        !answer.is_ok_and(|answer| !answer.is_empty()),
        "somebody answers at {to}"
    );
    wait::until("the fence's entry in the access log", || {
        (fences() > before).then_some(())
    });
}

fn is_fence(entry: &Entry) -> bool {
    let port = entry.get("dst.addr").and_then(|addr| addr.rsplit_once(':'));
    port.is_some_and(|(_, port)| port.parse() == Ok(FENCE_PORT))
}

fn counts(scene: &Scene) -> Option<Counts> {
    if !scene.backend.is_ebpf() {
        return None;
    }
    let mut counts = Counts::new();
    let pods = [&scene.client, &scene.server, &scene.late];
    for sample in scene.agent.metrics() {
        let label = |name: &str| sample.labels.get(name).cloned().unwrap_or_default();
        let Some(pod) = pods.iter().find(|pod| pod.uid == label("pod")) else {
            continue;
        };
        if sample.name == "redirector_verdicts_total" {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a count of packets"
            )]
            let value = sample.value as u64;
            counts.insert((pod.name.clone(), label("program"), label("verdict")), value);
        }
    }
    assert!(
        !counts.is_empty(),
        "the agent's metrics have the programs' counters"
    );
    Some(counts)
}

fn difference(before: &Counts, after: &Counts) -> Counts {
    let grown = after.iter().map(|(key, value)| {
        // A pod that was enrolled anew counts from zero.
        let before = before.get(key).copied().unwrap_or(0);
        (key.clone(), value.saturating_sub(before))
    });
    grown.filter(|(_, value)| *value > 0).collect()
}

impl Evidence {
    fn show(&self, outcome: Outcome, answer: Answer) {
        let expected: &[Answer] = match outcome {
            Outcome::Hbone => &[Answer::Answered],
            Outcome::Outbound | Outcome::Inbound | Outcome::Untouched => {
                &[Answer::Answered, Answer::HalfOpen]
            }
            Outcome::Refused => &[Answer::Refused],
            Outcome::Dropped => &[Answer::Silence],
        };
        let context = || {
            format!(
                "{outcome:?}, {answer:?}\naccess log: {:#?}\nSYNs: {:?}\ncounted: {:?}",
                self.entries,
                self.wire
                    .iter()
                    .filter(|segment| segment.opens)
                    .map(|segment| (segment.src, segment.dst))
                    .collect::<Vec<_>>(),
                self.counts
            )
        };
        assert!(expected.contains(&answer), "{}", context());
        let half_open = answer == Answer::HalfOpen;
        let shown = match outcome {
            Outcome::Hbone => {
                self.has_entry("outbound", true)
                    && self.has_entry("inbound", true)
                    && opened_ports(&self.wire).iter().all(|port| *port == 15008)
                    && !contains(&self.wire, b"hello")
                    && self.counted("lookup", &["outbound", "hbone"])
            }
            Outcome::Outbound => {
                (half_open || self.has_entry("outbound", false) && self.counted("egress", &["proxy"]))
                    && self.counted("egress", &["captured"])
                    && self.counted("lookup", &["outbound"])
            }
            Outcome::Inbound => {
                (half_open || self.has_entry("inbound", false))
                    && (self.counted("lookup", &["inbound"]) || self.counted("ingress", &["assigned"]))
            }
            Outcome::Untouched => {
                self.entries.is_empty()
                    && self.counted_none("egress", &["captured", "refused"])
                    && self.counted_none("lookup", &["outbound"])
                    && self.counted_none("ingress", &["assigned", "refused"])
                    // When egress asks the socket table, the kernel asks the lookup program too, and does nothing with the answer. It
                    // asks so of a last answer on a tunnel of an earlier row, too, which comes from a socket in TIME_WAIT.
                    && self.count("lookup", &["inbound", "hbone", "refused"]) <= self.count("egress", &["uncaptured"])
            }
            Outcome::Refused | Outcome::Dropped => !contains(&self.sent_by_client, b"hello"),
        };
        assert!(shown, "{}", context());
    }

    fn has_entry(&self, direction: &str, identities: bool) -> bool {
        self.entries.iter().any(|entry| {
            let both = entry.contains_key("src.identity") && entry.contains_key("dst.identity");
            let none = !entry.contains_key("src.identity") && !entry.contains_key("dst.identity");
            entry.get("direction").is_some_and(|value| value == direction)
                && !entry.contains_key("error")
                && if identities { both } else { none }
        })
    }

    /// Packets with one of the verdicts, of all pods.
    fn count(&self, program: &str, verdicts: &[&str]) -> u64 {
        let counts = self.counts.iter().flatten();
        let these =
            counts.filter(|((_, of, verdict), _)| of == program && verdicts.contains(&verdict.as_str()));
        these.map(|(_, count)| count).sum()
    }

    /// Whether one of the verdicts was counted; true where nothing counts.
    fn counted(&self, program: &str, verdicts: &[&str]) -> bool {
        self.counts.is_none() || self.count(program, verdicts) > 0
    }

    /// Whether none of the verdicts was counted; true where nothing counts.
    fn counted_none(&self, program: &str, verdicts: &[&str]) -> bool {
        self.count(program, verdicts) == 0
    }
}
