//! `cargo xtask sbom`: what the shipped programs are made of, in CycloneDX's format. Beside the image's archive, too.
//!
//! By cargo's own metadata: the packages that the daemon's package needs to run, for the image's platform, with their licences, checksums of
//! the lock file, and who needs whom. It names no time and no random number, so the same tree gives the same file.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::process;

/// The package whose programs are shipped.
const SHIPPED: &str = "redirector";
const PLATFORM: &str = "x86_64-unknown-linux-gnu";

/// Writes it.
pub(crate) fn write(path: &Path) -> Result<()> {
    let mut cargo = process::cargo();
    cargo.args(["metadata", "--format-version", "1", "--locked"]);
    cargo.args(["--filter-platform", PLATFORM]);
    let metadata = process::output(&mut cargo).context("cargo metadata fails; run it to see why")?;
    let metadata: Value = serde_json::from_str(&metadata).context("reading cargo's metadata")?;
    let lock = process::root().join("Cargo.lock");
    let lock = fs::read_to_string(&lock).with_context(|| format!("reading {}", lock.display()))?;
    let made = make(&metadata, &checksums(&lock))?;
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory)?;
    }
    let text = format!("{}\n", serde_json::to_string_pretty(&made)?);
    fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}

fn make(metadata: &Value, checksums: &BTreeMap<(String, String), String>) -> Result<Value> {
    let packages: BTreeMap<&str, &Value> = items(&metadata["packages"])
        .filter_map(|package| Some((package["id"].as_str()?, package)))
        .collect();
    let nodes: BTreeMap<&str, &Value> = items(&metadata["resolve"]["nodes"])
        .filter_map(|node| Some((node["id"].as_str()?, node)))
        .collect();
    let root = packages
        .iter()
        .find(|(_, package)| package["name"] == SHIPPED)
        .map(|(id, _)| *id)
        .with_context(|| format!("there is no package {SHIPPED}"))?;
    let mut needs: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let mut open = vec![root];
    while let Some(id) = open.pop() {
        if needs.contains_key(id) {
            continue;
        }
        let node = nodes.get(id).with_context(|| format!("{id} is not resolved"))?;
        let run: BTreeSet<&str> = items(&node["deps"])
            .filter(|dependency| items(&dependency["dep_kinds"]).any(|kind| kind["kind"].is_null()))
            .filter_map(|dependency| dependency["pkg"].as_str())
            .collect();
        open.extend(&run);
        needs.insert(id, run);
    }
    let component = |id: &str| -> Result<Value> {
        let package = packages
            .get(id)
            .with_context(|| format!("{id} has no metadata"))?;
        let (name, version) = (text(&package["name"]), text(&package["version"]));
        let mut component = json!({
            "type": if id == root { "application" } else { "library" },
            "bom-ref": reference(package), "purl": reference(package), "name": name, "version": version,
        });
        if let Some(license) = package["license"].as_str() {
            // Cargo's old way of writing OR.
            component["licenses"] = json!([{ "expression": license.replace('/', " OR ") }]);
        }
        if let Some(checksum) = checksums.get(&(name.to_owned(), version.to_owned())) {
            component["hashes"] = json!([{ "alg": "SHA-256", "content": checksum }]);
        }
        Ok(component)
    };
    let others = needs.keys().filter(|id| **id != root);
    let components = others.map(|id| component(id)).collect::<Result<Vec<_>>>()?;
    ensure!(!components.is_empty(), "{SHIPPED} seems to need no package");
    let dependencies: Vec<Value> = needs
        .iter()
        .map(|(id, run)| {
            let on: Vec<_> = run.iter().map(|id| reference(packages[id])).collect();
            json!({ "ref": reference(packages[id]), "dependsOn": on })
        })
        .collect();
    Ok(json!({
        "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
        "metadata": { "component": component(root)? },
        "components": components, "dependencies": dependencies,
    }))
}

/// Package URL.
fn reference(package: &Value) -> String {
    format!(
        "pkg:cargo/{}@{}",
        text(&package["name"]),
        text(&package["version"])
    )
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// By name and version; none of our own packages.
fn checksums(lock: &str) -> BTreeMap<(String, String), String> {
    let value = |part: &str, key: &str| -> Option<String> {
        let start = format!("{key} = \"");
        let line = part.lines().find_map(|line| line.strip_prefix(&start))?;
        Some(line.trim_end_matches('"').to_owned())
    };
    lock.split("[[package]]")
        .filter_map(|part| {
            Some((
                (value(part, "name")?, value(part, "version")?),
                value(part, "checksum")?,
            ))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_runs_is_told_and_what_only_builds_or_tests_is_not() {
        let package =
            |name: &str| json!({ "id": name, "name": name, "version": "1.0.0", "license": "MIT/Apache-2.0" });
        let on = |pkg: &str, kind: Value| json!({ "pkg": pkg, "dep_kinds": [{ "kind": kind }] });
        let metadata = json!({
            "packages": [package(SHIPPED), package("used"), package("deep"), package("builder"), package("tester")],
            "resolve": { "nodes": [
                { "id": SHIPPED, "deps": [
                    on("used", Value::Null), on("builder", json!("build")), on("tester", json!("dev")),
                ] },
                { "id": "used", "deps": [on("deep", Value::Null)] },
                { "id": "deep", "deps": [] },
            ] },
        });
        let lock = "[[package]]\nname = \"deep\"\nversion = \"1.0.0\"\nchecksum = \"abc\"\n\n[[package]]\nname = \"used\"\nversion = \"2.0.0\"\nchecksum = \"d\"\n";
        let made = make(&metadata, &checksums(lock)).unwrap();
        let names: Vec<_> = items(&made["components"]).map(|one| text(&one["name"])).collect();
        assert_eq!(names, ["deep", "used"]);
        assert_eq!(made["components"][0]["hashes"][0]["content"], "abc");
        assert_eq!(made["components"][1]["hashes"], Value::Null);
        assert_eq!(
            made["components"][1]["licenses"][0]["expression"],
            "MIT OR Apache-2.0"
        );
        assert_eq!(made["dependencies"][2]["ref"], "pkg:cargo/used@1.0.0");
        assert_eq!(
            made["dependencies"][2]["dependsOn"],
            json!(["pkg:cargo/deep@1.0.0"])
        );
        assert_eq!(made["metadata"]["component"]["name"], SHIPPED);
    }
}
