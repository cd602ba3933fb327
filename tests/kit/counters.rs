//! What was counted: by the kernel in a namespace, and by the daemon in its metrics.

use std::collections::BTreeMap;

use crate::netns::Namespace;

/// A counter of /proc/net/netstat or /proc/net/snmp, by group and name: `("TcpExt", "TCPSynRetrans")`.
///
/// # Panics
/// When there is none of that name.
pub fn kernel(ns: &Namespace, group: &str, name: &str) -> u64 {
    let text = ["netstat", "snmp"]
        .map(|file| ns.proc_net(file).expect("the kernel's counters can be read"))
        .concat();
    find(&text, group, name).unwrap_or_else(|| panic!("no counter {group} {name}"))
}

/// The files have pairs of lines: names, then values.
fn find(text: &str, group: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines();
    while let (Some(names), Some(values)) = (lines.next(), lines.next()) {
        let of_group = names.split_once(": ").filter(|(found, _)| *found == group);
        let Some(((_, names), (_, values))) = of_group.zip(values.split_once(": ")) else {
            continue;
        };
        let found = names
            .split_whitespace()
            .zip(values.split_whitespace())
            .find(|(found, _)| *found == name);
        if let Some((_, value)) = found {
            return value.parse().ok();
        }
    }
    None
}

/// A sample of the daemon's metrics.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Metric name.
    pub name: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Its value.
    pub value: f64,
}

/// Reads the text format of metrics; label values with escapes or commas are not expected here.
pub fn parse_metrics(text: &str) -> Vec<Sample> {
    text.lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(parse_sample)
        .collect()
}

fn parse_sample(line: &str) -> Option<Sample> {
    let (series, value) = line.rsplit_once(' ')?;
    let (name, labels) = match series.split_once('{') {
        Some((name, labels)) => (name, labels.strip_suffix('}')?),
        None => (series, ""),
    };
    let label = |text: &str| {
        let (name, value) = text.split_once('=')?;
        Some((name.to_owned(), value.trim_matches('"').to_owned()))
    };
    let labels = labels
        .split(',')
        .filter(|text| !text.is_empty())
        .map(label)
        .collect::<Option<_>>()?;
    Some(Sample {
        name: name.to_owned(),
        labels,
        value: value.parse().ok()?,
    })
}

/// How many packets of a pod the programs gave a verdict of this name.
pub fn verdicts(samples: &[Sample], uid: &str, program: &str, verdict: &str) -> f64 {
    let wanted = [("pod", uid), ("program", program), ("verdict", verdict)];
    samples
        .iter()
        .filter(|sample| sample.name == "redirector_verdicts_total")
        .filter(|sample| {
            wanted
                .iter()
                .all(|(label, value)| sample.labels.get(*label).is_some_and(|found| found == value))
        })
        .map(|sample| sample.value)
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_found_in_their_group() {
        let text = "TcpExt: A TCPSynRetrans\nTcpExt: 1 7\nIpExt: A B\nIpExt: 3 4\n";
        assert_eq!(find(text, "TcpExt", "TCPSynRetrans"), Some(7));
        assert_eq!(find(text, "IpExt", "A"), Some(3));
        assert_eq!(find(text, "TcpExt", "B"), None);
    }

    #[test]
    fn samples_are_read() {
        let text = "# TYPE x counter\nx_total{pod=\"a\",program=\"e\"} 3\nup 1\n# EOF\n";
        let samples = parse_metrics(text);
        assert_eq!(samples.len(), 2);
        assert_eq!(samples[0].labels["program"], "e");
        assert!((samples[1].value - 1.0).abs() < f64::EPSILON);
    }
}
