//! Every command of the project. Each finds or installs what it needs, says so, and streams what it runs.

mod apiserver;
mod apt;
mod archive;
mod build;
mod ci;
mod fuzz;
mod image;
mod kernel;
mod process;
mod sbom;
mod test;
mod toolchain;

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand, ValueEnum};

use crate::{build::Profile, kernel::Extent, process::Step, test::Total, toolchain::Way};

/// Builds, tests and demonstrates the redirector.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    /// Build the eBPF object this way; without it, rustup's nightly is taken if it is ready, else Debian's Rust
    #[arg(long, global = true, value_enum)]
    force_toolchain: Option<Way>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Build the eBPF object alone, into target/bpf/redirector.bpf.o
    Ebpf,
    /// Show the main job on real traffic between two pods made of network namespaces (root)
    Demo {
        /// Leave the pods up, with commands to play with, until Ctrl-C
        #[arg(long)]
        keep: bool,
    },
    /// Run every test
    Test {
        /// Only what needs neither root nor the eBPF toolchain
        #[arg(long)]
        unprivileged: bool,
        /// On a kernel of Debian in a virtual machine instead: what depends on the kernel
        #[arg(long, value_enum, conflicts_with = "unprivileged")]
        kernel: Option<kernel::Choice>,
        /// On that kernel only what CI has the time for
        #[arg(long, requires = "kernel")]
        quick: bool,
        /// Against Kubernetes' API server instead, which is built from Debian's source first (once, ten minutes or more): what asks it
        #[arg(long, conflicts_with_all = ["unprivileged", "kernel"])]
        apiserver: bool,
        /// Only tests whose name contains this
        filter: Option<String>,
    },
    /// Attach to an existing pod's network namespace, without a proxy, and show live counters until Ctrl-C (root)
    Load {
        /// Name of a namespace (as `ip netns` knows it), or a process id in it
        #[arg(long, value_name = "NAME|PID")]
        netns: String,
        /// More arguments for `redirector load`
        #[arg(last = true)]
        arguments: Vec<String>,
    },
    /// Measure, on traffic between pods (root); docs/benchmarks/README.md says what
    Bench {
        /// What to measure
        #[arg(value_enum, default_value_t = Benchmark::Proxy)]
        benchmark: Benchmark,
        /// Arguments for the benchmark, e.g. --rounds N, --v6; `-- --help` has all
        #[arg(last = true)]
        arguments: Vec<String>,
    },
    /// Fuzz what others write and the agent reads, by libFuzzer, each target for a bounded time
    Fuzz {
        /// Only this target; without it, all
        target: Option<String>,
        /// Time for each
        #[arg(long, default_value_t = 60)]
        seconds: u32,
    },
    /// Build the container image without a daemon, and try it (root); or only the files that are in it
    Image {
        /// Make the image's files below DIR/image, and end
        #[arg(long, value_name = "DIR")]
        files: Option<PathBuf>,
    },
    /// What the shipped programs are made of, in CycloneDX's format, into target/sbom.cdx.json
    Sbom,
    /// All sorts of traffic at once, and faults under traffic, each for a while, with checks for what is lost or left (root)
    Soak {
        /// For how long, each
        #[arg(long, default_value_t = 10)]
        minutes: u32,
    },
    /// Make the documentation that is made of the code: docs/configuration.md
    Docs,
    /// What CI runs: format, lints, docs, licences, every test
    Ci,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Benchmark {
    /// What the detour through the proxies costs: direct, plain, HBONE
    Proxy,
    /// The ways of redirecting compared: none, iptables, eBPF; writes docs/benchmarks/redirect.*
    Redirect,
    /// The mesh at size: 100,000 workloads loaded, changed and read; writes docs/benchmarks/mesh.*
    Mesh,
}

fn main() -> ExitCode {
    process::watch_signals();
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            if process::interrupted() {
                eprintln!("interrupted; what was begun has been removed");
                return ExitCode::from(130);
            }
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> Result<()> {
    let way = cli.force_toolchain;
    match &cli.command {
        Command::Ebpf => {
            let object = build::ebpf_object(way)?;
            println!("{}", object.display());
            Ok(())
        }
        Command::Demo { keep } => demo(way, *keep),
        Command::Test {
            kernel: Some(choice),
            quick,
            filter,
            ..
        } => {
            let extent = if *quick { Extent::Quick } else { Extent::Whole };
            let mut total = Total::default();
            kernel::run(*choice, way, extent, filter.as_deref(), &mut total)?;
            total.finish()
        }
        Command::Test {
            apiserver: true,
            filter,
            ..
        } => {
            let mut total = Total::default();
            apiserver::run(way, filter.as_deref(), &mut total)?;
            total.finish()
        }
        Command::Test {
            unprivileged,
            filter,
            kernel: None,
            ..
        } => {
            let total = test::run(way, *unprivileged, filter.as_deref())?;
            total.finish()
        }
        Command::Load { netns, arguments } => load(way, netns, arguments),
        Command::Bench { benchmark, arguments } => bench(way, *benchmark, arguments),
        Command::Fuzz { target, seconds } => fuzz::run(target.as_deref(), *seconds),
        Command::Image {
            files: Some(directory),
        } => image::lay_out(way, directory),
        Command::Image { files: None } => {
            need_root("image")?;
            image::run(way)
        }
        Command::Sbom => {
            let path = process::root().join("target/sbom.cdx.json");
            sbom::write(&path)?;
            println!("{}", path.display());
            Ok(())
        }
        Command::Soak { minutes } => soak(way, *minutes),
        Command::Docs => docs(),
        Command::Ci => ci::run(way),
    }
}

fn demo(way: Option<Way>, keep: bool) -> Result<()> {
    need_root("demo")?;
    apt::require(apt::DEMO)?;
    let object = build::ebpf_object(way)?;
    let bins = build::binaries(&object, Profile::Release)?;
    let mut command = process::command(bins.find("redirector-demo")?);
    command.env("REDIRECTOR_BIN", bins.find("redirector")?);
    if keep {
        command.arg("--keep");
    }
    let step = Step::start("demonstration");
    process::run(&mut command)?;
    step.done();
    Ok(())
}

fn bench(way: Option<Way>, benchmark: Benchmark, arguments: &[String]) -> Result<()> {
    need_root("bench")?;
    apt::require(apt::BENCH)?;
    let object = build::ebpf_object(way)?;
    let bins = build::binaries(&object, Profile::Release)?;
    let mut command = process::command(bins.find("redirector-bench")?);
    let daemon = build::shipped_daemon(&object)?;
    command.env("REDIRECTOR_BIN", daemon.find("redirector")?);
    command.arg(match benchmark {
        Benchmark::Proxy => "proxy",
        Benchmark::Redirect => "redirect",
        Benchmark::Mesh => "mesh",
    });
    let step = Step::start("benchmark");
    process::run(command.args(arguments))?;
    step.done();
    Ok(())
}

fn soak(way: Option<Way>, minutes: u32) -> Result<()> {
    need_root("soak")?;
    apt::require(apt::DEMO)?;
    let object = build::ebpf_object(way)?;
    let bins = build::binaries(&object, Profile::Release)?;
    let names = ["soak", "chaos"];
    let suites = build::suites(&object, Profile::Release, &names)?;
    for name in names {
        let mut command = process::command(suites.find(name)?);
        command
            .env("REDIRECTOR_BIN", bins.find("redirector")?)
            .env("REDIRECTOR_REQUIRE_ROOT", "1")
            .env("REDIRECTOR_SOAK_SECONDS", (u64::from(minutes) * 60).to_string())
            .current_dir(process::root().join("tests"));
        let step = Step::start(format!("{name}, {minutes} min"));
        process::run(&mut command)?;
        step.done();
    }
    Ok(())
}

fn docs() -> Result<()> {
    let program = ["--quiet", "--locked", "-p", "redirector", "--bin", "redirector"];
    process::run(process::cargo().arg("build").args(program))?;
    let mut reference = process::cargo();
    reference.arg("run").args(program).args(["--", "reference"]);
    let text = process::output(&mut reference).context("the program does not tell its settings")?;
    let path = process::root().join("docs/configuration.md");
    std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
    println!("{}", path.display());
    Ok(())
}

fn load(way: Option<Way>, netns: &str, arguments: &[String]) -> Result<()> {
    need_root("load")?;
    let object = build::ebpf_object(way)?;
    let bins = build::binaries(&object, Profile::Release)?;
    process::run(
        process::command(bins.find("redirector")?)
            .args(["load", "--netns", netns])
            .args(arguments),
    )
}

/// Network namespaces and eBPF want root; said before anything is built.
fn need_root(subcommand: &str) -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        let given: Vec<String> = std::env::args().skip(1).collect();
        bail!(
            "`{subcommand}` needs root; mend it with: sudo env PATH=\"$PATH\" HOME=\"$HOME\" cargo xtask {}",
            given.join(" ")
        );
    }
    Ok(())
}
