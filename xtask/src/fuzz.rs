//! The fuzz targets under libFuzzer, each for a bounded time. The flags are cargo-fuzz's for `--sanitizer none`: what is fuzzed is safe
//! Rust, so a panic is what there is to find, and the workspace's own compiler will do. What was found once and is worth keeping
//! becomes a seed by hand.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result, bail, ensure};

use crate::process::{self, Step};

/// What cargo-fuzz 0.13 sets for coverage.
const FLAGS: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Cdebug-assertions -Ccodegen-units=1 --cfg fuzzing";
/// Longest time for one input. The machine may be shared and busy.
const INPUT_SECONDS: u32 = 20;

/// Runs one target, or all, for so many seconds each.
pub(crate) fn run(target: Option<&str>, seconds: u32) -> Result<()> {
    ensure!(
        process::find("c++").is_some(),
        "fuzzing needs a C++ compiler for libFuzzer; mend it with: apt-get install g++"
    );
    let directory = process::root().join("fuzz");
    let mut targets = Vec::new();
    for entry in fs::read_dir(directory.join("fuzz_targets")).context("listing fuzz/fuzz_targets")? {
        let path = entry?.path();
        targets.extend(path.file_stem().and_then(|stem| stem.to_str()).map(str::to_owned));
    }
    targets.sort();
    if let Some(wanted) = target {
        if !targets.iter().any(|known| known == wanted) {
            bail!(
                "there is no fuzz target {wanted:?}; there are: {}",
                targets.join(", ")
            );
        }
        targets.retain(|known| known == wanted);
    }
    let step = Step::start("building the fuzz targets");
    let host = host()?;
    let output = process::root().join("target/fuzz");
    process::run(
        process::cargo()
            .args(["build", "--release", "--locked", "--bins", "--target", &host])
            .arg("--manifest-path")
            .arg(directory.join("Cargo.toml"))
            .arg("--target-dir")
            .arg(&output)
            .env("RUSTFLAGS", FLAGS),
    )?;
    step.done();
    let mut failed = Vec::new();
    for name in &targets {
        let step = Step::start(format!("fuzzing {name} for {seconds} s"));
        let corpus = work_directory(&output, "corpus", name)?;
        let artifacts = work_directory(&output, "artifacts", name)?;
        let mut command = process::command(output.join(&host).join("release").join(name));
        command
            .arg(format!("-max_total_time={seconds}"))
            .arg(format!("-timeout={INPUT_SECONDS}"))
            .args([
                "-max_len=4096",
                "-rss_limit_mb=1024",
                "-print_final_stats=1",
                "-verbosity=0",
            ])
            .arg(format!("-artifact_prefix={}/", artifacts.display()))
            // What is found goes to the first; the seeds are read only.
            .arg(&corpus)
            .arg(directory.join("seeds").join(name));
        let result = process::run(&mut command);
        step.done();
        match result {
            _ if process::interrupted() => bail!("interrupted"),
            Err(error) => failed.push(format!(
                "{name}: {error:#}; the input is in {}",
                artifacts.display()
            )),
            Ok(()) => {}
        }
    }
    ensure!(failed.is_empty(), "{}", failed.join("\n"));
    Ok(())
}

fn work_directory(output: &std::path::Path, kind: &str, target: &str) -> Result<PathBuf> {
    let directory = output.join(kind).join(target);
    fs::create_dir_all(&directory).with_context(|| format!("making {}", directory.display()))?;
    Ok(directory)
}

/// The compiler's own platform. Told as a target, it keeps the flags from build scripts and macros.
fn host() -> Result<String> {
    let version =
        process::output(process::command("rustc").arg("-vV")).context("asking rustc for its version")?;
    let line = version.lines().find_map(|line| line.strip_prefix("host: "));
    line.map(str::to_owned).context("rustc names no host")
}
