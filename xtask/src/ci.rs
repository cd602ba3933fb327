//! What CI runs, the same on a laptop. It goes on after a failure and tells all of them at the end.

use anyhow::{Result, bail};

use crate::{
    kernel::{self, Choice, Extent},
    process::{self, Step},
    test::{self, Total},
    toolchain::Way,
};

const CARGO_DENY: &str = "0.20.2";
/// The two that differ most from a new one: neither has TCX links, and one lacks the device in SK_LOOKUP.
const KERNELS: [Choice; 2] = [Choice::V5_10, Choice::V6_1];

/// Every check, then every test.
pub(crate) fn run(way: Option<Way>) -> Result<()> {
    let mut failed = Vec::new();
    let checks: [(&str, &[&str]); 4] = [
        ("format", &["fmt", "--all", "--check"]),
        (
            "lints",
            &[
                "clippy",
                "--locked",
                "--workspace",
                "--all-targets",
                "--",
                "-D",
                "warnings",
            ],
        ),
        (
            "documentation",
            &[
                "doc",
                "--locked",
                "--workspace",
                "--no-deps",
                "--document-private-items",
            ],
        ),
        (
            "licences and sources",
            &["deny", "--locked", "check", "bans", "licenses", "sources"],
        ),
    ];
    for (what, arguments) in checks {
        if arguments[0] == "deny"
            && let Err(error) = cargo_deny()
        {
            failed.push(format!("{what}, not run: {error:#}"));
            continue;
        }
        let step = Step::start(what);
        let result = process::run(
            process::cargo()
                .args(arguments)
                .env("RUSTDOCFLAGS", "-D warnings"),
        );
        step.done();
        match result {
            _ if process::interrupted() => bail!("interrupted"),
            Err(error) => failed.push(format!("{what}: {error:#}")),
            Ok(()) => {}
        }
    }
    let mut total = Total::default();
    test::unit(&mut total, None)?;
    if nix::unistd::geteuid().is_root() {
        test::privileged(way, &mut total, None)?;
    } else {
        failed.push("the privileged tests were not run: they need root".to_owned());
    }
    // Each is told apart from the other, so that one that can't be had does not hide what the other shows.
    for choice in KERNELS {
        match kernel::run(choice, way, Extent::Quick, None, &mut total) {
            Err(error) if process::interrupted() => return Err(error),
            Err(error) => failed.push(format!("other kernels: {error:#}")),
            Ok(()) => {}
        }
    }
    for failure in &failed {
        println!("FAILED {failure}");
    }
    total.finish()?;
    if !failed.is_empty() {
        bail!("{} of the checks failed", failed.len());
    }
    Ok(())
}

/// Installs cargo-deny below target/ when it is nowhere.
fn cargo_deny() -> Result<()> {
    if process::find("cargo-deny").is_some() {
        return Ok(());
    }
    let step = Step::start(format!("building cargo-deny {CARGO_DENY} (once, some minutes)"));
    process::run(
        process::cargo()
            .args([
                "install",
                "cargo-deny",
                "--version",
                CARGO_DENY,
                "--locked",
                "--root",
            ])
            .arg(process::tools()),
    )?;
    step.done();
    Ok(())
}
