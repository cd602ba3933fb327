//! `cargo xtask test --kernel`: the suites' cases that depend on the kernel, on real kernels of Debian in virtual machines.
//!
//! - [`packages`]: kernels out of the archive; [`version`]: which of them
//! - [`plan`]: what runs, and what a kernel cannot have
//! - [`initramfs`] and [`modules`]: the machine's file system
//! - [`vm`]: one boot; [`report`]: what came of it

mod initramfs;
mod modules;
mod packages;
mod plan;
mod report;
mod version;
mod vm;

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail};

pub(crate) use self::plan::Extent;
use self::{
    plan::{Plan, Suite},
    report::Report,
};
use crate::{
    apt,
    build::{self, Profile},
    process::{self, Step},
    test::Total,
    toolchain::Way,
};

/// Longest time of a machine: that of its slowest case, and for each more than most take on a busy host.
const DEADLINE: Duration = Duration::from_secs(600);
const DEADLINE_PER_CASE: Duration = Duration::from_secs(40);

/// A kernel to test on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Choice {
    /// Debian 11's first: its verifier refuses reads of stack that was not written, which newer ones of 5.10 allow
    #[value(name = "5.10-oldest")]
    V5_10Oldest,
    /// Debian 11's newest
    #[value(name = "5.10")]
    V5_10,
    /// Debian 12's newest
    #[value(name = "6.1")]
    V6_1,
    /// Debian 13's newest
    #[value(name = "6.12")]
    V6_12,
    /// Debian unstable's
    #[value(name = "7.2")]
    V7_2,
    /// All of these
    All,
}

/// What a series is called, and where it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Kernel {
    label: &'static str,
    series: &'static str,
    suites: &'static [&'static str],
    oldest: bool,
}

const BULLSEYE: &[&str] = &["bullseye", "bullseye-security"];

impl Choice {
    fn kernels(self) -> Vec<Kernel> {
        let kernel = |label, series, suites| Kernel {
            label,
            series,
            suites,
            oldest: false,
        };
        match self {
            Self::V5_10Oldest => vec![Kernel {
                oldest: true,
                ..kernel("5.10-oldest", "5.10", BULLSEYE)
            }],
            Self::V5_10 => vec![kernel("5.10", "5.10", BULLSEYE)],
            Self::V6_1 => vec![kernel("6.1", "6.1", &["bookworm", "bookworm-security"])],
            Self::V6_12 => vec![kernel("6.12", "6.12", &["trixie", "trixie-security"])],
            Self::V7_2 => vec![kernel("7.2", "7.2", &["sid", "forky"])],
            Self::All => [
                Self::V5_10Oldest,
                Self::V5_10,
                Self::V6_1,
                Self::V6_12,
                Self::V7_2,
            ]
            .into_iter()
            .flat_map(Self::kernels)
            .collect(),
        }
    }
}

/// Boots each of the kernels, and adds what came of it to `total`.
pub(crate) fn run(
    choice: Choice,
    way: Option<Way>,
    extent: Extent,
    filter: Option<&str>,
    total: &mut Total,
) -> Result<()> {
    if std::env::consts::ARCH != "x86_64" {
        bail!("the kernels are tried with this machine's own binaries, on x86_64 only so far");
    }
    apt::require(apt::KERNELS)?;
    let object = build::ebpf_object(way)?;
    let bins = build::binaries(&object, Profile::Release)?;
    let built = build::suites(&object, Profile::Release, &plan::suites().collect::<Vec<_>>())?;
    let suites = plan::suites()
        .map(|name| Suite::list(name, built.find(name)?))
        .collect::<Result<Vec<_>>>()?;
    let agent = bins.find("redirector")?;
    let mut reports = Vec::new();
    for kernel in choice.kernels() {
        match boot(&kernel, agent, &suites, extent, filter) {
            Ok(Some(report)) => reports.push(report),
            Ok(None) => println!("kernel {}: no chosen case matches the filter", kernel.label),
            Err(error) if process::interrupted() => return Err(error),
            Err(error) => total.broken(format!("kernel {}: {error:#}", kernel.label)),
        }
    }
    for report in &reports {
        print!("{report}");
        let counts = report.counts();
        total.count(
            counts.passed,
            counts.failed + counts.missing,
            counts.not_applicable,
        );
    }
    if !reports.is_empty() {
        println!("{}", table(&reports));
    }
    Ok(())
}

/// One kernel, from the archive to its report; `None` when nothing is to run.
fn boot(
    kernel: &Kernel,
    agent: &Path,
    suites: &[Suite],
    extent: Extent,
    filter: Option<&str>,
) -> Result<Option<Report>> {
    let unpacked = packages::fetch(kernel)?;
    let version = version::major_minor(&unpacked.version)
        .with_context(|| format!("version {} of the package has no two numbers", unpacked.version))?;
    let plan = Plan::make(suites, version, filter, extent)?;
    if plan.cases.is_empty() {
        return Ok(None);
    }
    let step = Step::start(format!(
        "kernel {} ({}): {} cases",
        kernel.label,
        unpacked.version,
        plan.cases.len()
    ));
    let cases = u32::try_from(plan.cases.len()).context("so many cases")?;
    let deadline = DEADLINE + DEADLINE_PER_CASE * cases;
    let directory = cache().join(format!("vm-{}", kernel.label));
    remove(&directory)?;
    let initramfs = initramfs::build(
        &initramfs::Contents {
            kernel: &unpacked,
            agent,
            suites: suites
                .iter()
                .map(|suite| (suite.name, suite.binary.as_path()))
                .collect(),
            plan: &plan,
            churn: extent.churn(),
        },
        &directory,
    );
    let console = cache().join(format!("console-{}.log", kernel.label));
    let mut report = Report::new(kernel.label.to_owned(), plan);
    let ran =
        initramfs.and_then(|initramfs| vm::run(&unpacked.image, &initramfs, deadline, &console, &mut report));
    remove(&directory)?;
    ran?;
    step.done();
    println!("its console is in {}", console.display());
    Ok(Some(report))
}

/// All kernels, in Markdown.
fn table(reports: &[Report]) -> String {
    let suites: Vec<&str> = plan::suites().collect();
    let head = format!(
        "| series | kernel | {} |\n|---|---|{}",
        suites.join(" | "),
        "---|".repeat(suites.len())
    );
    let rows = reports.iter().map(|report| report.row(&suites));
    [head].into_iter().chain(rows).collect::<Vec<_>>().join("\n")
}

/// Where kernels and their consoles are kept.
fn cache() -> PathBuf {
    process::root().join("target/kernels")
}

/// Everything below a directory, parents before what they contain; symbolic links are not followed.
fn entries(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let listing = fs::read_dir(directory).with_context(|| format!("reading {}", directory.display()))?;
    for entry in listing {
        let entry = entry?;
        let path = entry.path();
        found.push(path.clone());
        if entry.file_type()?.is_dir() {
            found.extend(entries(&path)?);
        }
    }
    Ok(found)
}

/// The files below directories that may not be there, in a fixed order.
fn files(directories: &[PathBuf]) -> Vec<PathBuf> {
    let all = directories.iter().filter_map(|directory| entries(directory).ok());
    let mut files: Vec<PathBuf> = all.flatten().filter(|path| path.is_file()).collect();
    files.sort();
    files
}

fn file_name(path: &Path) -> &str {
    path.file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default()
}

/// Removes a directory that may not be there.
fn remove(directory: &Path) -> Result<()> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("removing {}", directory.display()))
        }
        _ => Ok(()),
    }
}
