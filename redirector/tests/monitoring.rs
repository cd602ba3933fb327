//! What deploy/ has for Prometheus and Grafana names metrics and labels that there are: those of docs/metrics.md, which a suite holds
//! against a scrape.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

const METRICS: &str = include_str!("../../docs/metrics.md");
const ALERTS: &str = include_str!("../../deploy/chart/redirector/files/alerts.yaml");
const DASHBOARD: &str = include_str!("../../deploy/grafana/redirector.json");

/// Labels that whoever scrapes adds, and that of a histogram's buckets.
const ADDED: [&str; 3] = ["instance", "job", "le"];

/// Words of PromQL that are neither metrics nor labels.
const WORDS: [&str; 18] = [
    "sum",
    "min",
    "max",
    "count",
    "by",
    "rate",
    "increase",
    "and",
    "on",
    "ignoring",
    "group_left",
    "topk",
    "bottomk",
    "histogram_quantile",
    "label_values",
    "__rate_interval",
    "reporter",
    "instance",
];

/// Of each name on the wire, its labels.
fn documented() -> BTreeMap<String, BTreeSet<String>> {
    let traffic = traffic_labels();
    let rows = METRICS.lines().filter(|line| line.starts_with("| `"));
    let mut found = BTreeMap::new();
    for row in rows {
        let cells: Vec<_> = row.trim_matches('|').split('|').map(str::trim).collect();
        let (name, labels) = (cells[0].trim_matches('`'), cells[2]);
        let labels: BTreeSet<String> = match labels {
            "traffic" => traffic.clone(),
            labels => labels.split(", ").map(str::to_owned).collect(),
        };
        let endings: &[&str] = match cells[1] {
            "counter" => &["_total"],
            "histogram" => &["_bucket", "_sum", "_count"],
            "gauge" => &[""],
            other => panic!("{other} is no type"),
        };
        for ending in endings {
            found.insert(format!("{name}{ending}"), labels.clone());
        }
    }
    assert!(found.len() > 40);
    found
}

/// Of the sentence that lists them: those in backquotes, and those of one end for the other.
fn traffic_labels() -> BTreeSet<String> {
    let list = METRICS.split("The labels of traffic are").nth(1).unwrap();
    let list = list.split("What is not known").next().unwrap();
    let named = list.split('`').skip(1).step_by(2).map(str::to_owned);
    let mut labels: BTreeSet<_> = named.collect();
    for label in labels.clone() {
        labels.extend(
            label
                .strip_prefix("source_")
                .map(|rest| format!("destination_{rest}")),
        );
    }
    assert!(labels.contains("destination_canonical_service"), "{labels:?}");
    labels
}

/// Metrics that an expression names, and words in it that must be their labels.
fn read(expression: &str) -> (BTreeSet<String>, BTreeSet<String>) {
    let mut bare = String::new();
    // Without the values of labels, and durations.
    for (at, part) in expression.split('"').enumerate() {
        bare.push_str(if at % 2 == 0 { part } else { " " });
    }
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let words = bare
        .split(|c| !is_word(c))
        .filter(|word| word.starts_with(|c: char| c.is_ascii_lowercase() || c == '_'));
    let (metrics, labels): (BTreeSet<_>, BTreeSet<_>) = words
        .filter(|word| !WORDS.contains(word) && word.len() > 1)
        .map(str::to_owned)
        .partition(|word| {
            [
                "istio_",
                "redirector_",
                "workload_",
                "ztunnel_",
                "process_",
                "tokio_",
            ]
            .iter()
            .any(|prefix| word.starts_with(prefix))
        });
    (metrics, labels)
}

fn check(what: &str, expression: &str) {
    for [open, close] in [['(', ')'], ['{', '}'], ['[', ']']] {
        let count = |c| expression.matches(c).count();
        assert_eq!(count(open), count(close), "{what}: {expression}");
    }
    let documented = documented();
    let (metrics, labels) = read(expression);
    assert!(!metrics.is_empty(), "{what}: {expression} names no metric");
    let mut known: BTreeSet<&str> = ADDED.into();
    for metric in &metrics {
        let of_it = documented.get(metric);
        let of_it = of_it.unwrap_or_else(|| panic!("{what}: {metric} is not in docs/metrics.md"));
        known.extend(of_it.iter().map(String::as_str));
    }
    for label in &labels {
        assert!(
            known.contains(label.as_str()),
            "{what}: {label} is no label in {expression}"
        );
    }
}

#[test]
fn alerts_name_metrics_and_labels_that_there_are() {
    let file: Value = serde_yaml::from_str(ALERTS).unwrap();
    let groups = file["groups"].as_array().unwrap();
    let rules: Vec<_> = groups
        .iter()
        .flat_map(|group| group["rules"].as_array().unwrap())
        .collect();
    let mut names = BTreeSet::new();
    for rule in &rules {
        let name = rule["alert"].as_str().unwrap();
        assert!(names.insert(name), "{name} twice");
        let expression = rule["expr"].as_str().unwrap();
        check(name, expression);
        let severity = rule["labels"]["severity"].as_str().unwrap();
        assert!(
            ["info", "warning", "critical"].contains(&severity),
            "{name}: {severity}"
        );
        // What the text asks for is left by the expression.
        let summary = rule["annotations"]["summary"].as_str().unwrap();
        for label in summary.split("$labels.").skip(1) {
            let label = label
                .split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
                .next()
                .unwrap();
            let is_lost = expression.contains(" by (") && !expression.contains(label);
            assert!(!is_lost, "{name}: {label} is not left by {expression}");
        }
    }
    assert!(names.len() > 8);
}

#[test]
fn the_dashboard_names_metrics_and_labels_that_there_are() {
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let (mut ids, mut expressions) = (BTreeSet::new(), 0);
    for panel in dashboard["panels"].as_array().unwrap() {
        let title = panel["title"].as_str().unwrap();
        assert!(
            ids.insert(panel["id"].as_u64().unwrap()),
            "{title}: its id is another's"
        );
        let place = |key: &str| panel["gridPos"][key].as_u64().unwrap();
        assert!(place("x") + place("w") <= 24, "{title} is too wide");
        for target in panel["targets"].as_array().into_iter().flatten() {
            check(title, target["expr"].as_str().unwrap());
            expressions += 1;
        }
    }
    for variable in dashboard["templating"]["list"].as_array().unwrap() {
        if let Some(query) = variable["query"]["query"].as_str() {
            check("variables", query);
        }
    }
    assert!(expressions > 30);
}

/// The check itself finds what is wrong.
#[test]
fn what_is_not_there_is_found() {
    for wrong in [
        "redirector_no_such_thing",
        "rate(istio_tcp_sent_bytes[5m])",
        "sum by (colour) (redirector_pod_impaired)",
        "redirector_pod_impaired{colour=\"red\"}",
        "sum(redirector_pod_impaired",
        "1 > 0",
    ] {
        let found = std::panic::catch_unwind(|| check("a wrong one", wrong));
        assert!(found.is_err(), "{wrong}");
    }
}
