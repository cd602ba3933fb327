//! The chart, by Helm's own engine: what it makes of values.

use std::{
    collections::BTreeSet,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde_json::{Value, json};

use crate::envoy::python;

/// What came of some values.
pub struct Rendered {
    /// Each file's text, in the order of installation.
    pub objects: Vec<String>,
    /// What Helm's linter finds, with its severity.
    pub lint: Vec<Value>,
}

/// The script that speaks to Helm's engine.
pub fn script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/chart.py")
}

/// Renders the chart.
///
/// # Errors
/// What Helm says against the values.
///
/// # Panics
/// When Helm's engine does not run.
pub fn render(values: &Value) -> Result<Rendered, String> {
    let mut helm = Command::new(python());
    helm.arg(script()).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut helm = helm.spawn().expect("Python starts");
    let asked = json!([values]).to_string();
    let mut stdin = helm.stdin.take().expect("it is a pipe");
    stdin.write_all(asked.as_bytes()).unwrap();
    drop(stdin);
    let output = helm.wait_with_output().expect("Python ends");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stdout)
    );
    let mut answer: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let answer = answer[0].take();
    match answer["error"].as_str() {
        Some(error) => Err(error.to_owned()),
        None => Ok(Rendered {
            objects: items(&answer["objects"])
                .map(|object| text(object).to_owned())
                .collect(),
            lint: items(&answer["lint"]).cloned().collect(),
        }),
    }
}

/// What the roles grant, as `VERB RESOURCE`, or with the one name that it is for.
///
/// # Panics
/// When a role is none.
pub fn rights(objects: &[Value]) -> BTreeSet<String> {
    let mut rights = BTreeSet::new();
    let roles = objects
        .iter()
        .filter(|object| text(&object["kind"]).ends_with("Role"));
    for rule in roles.flat_map(|role| items(&role["rules"])) {
        let names: Vec<_> = items(&rule["resourceNames"])
            .map(|name| format!(" {}", text(name)))
            .collect();
        let names = if names.is_empty() {
            vec![String::new()]
        } else {
            names
        };
        for verb in items(&rule["verbs"]) {
            for resource in items(&rule["resources"]) {
                rights.extend(
                    names
                        .iter()
                        .map(|name| format!("{} {}{name}", text(verb), text(resource))),
                );
            }
        }
    }
    rights
}

/// A text.
///
/// # Panics
/// When it is none.
pub fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("{value} is no text"))
}

/// The items of a list; none of one that is not there.
pub fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}
