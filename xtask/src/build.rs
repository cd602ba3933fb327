//! Building: the eBPF object, then the binaries that embed it.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::{
    process::{self, Step},
    toolchain::{self, Toolchain, Way},
};

/// Of our own programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Profile {
    /// Optimised.
    Release,
    /// Optimised as a whole: what is shipped, and minutes longer to build.
    Dist,
}

/// Builds the object. Where rustup's nightly looked usable but fails, Debian's Rust is tried, unless one was forced; the
/// failure is remembered until the toolchain changes.
pub(crate) fn ebpf_object(forced: Option<Way>) -> Result<PathBuf> {
    let refused = process::root().join("target/bpf-build/.nightly-refused");
    let toolchain = toolchain::find(forced)?;
    let known_bad = || fs::read_to_string(&refused).is_ok_and(|text| text == toolchain.fingerprint());
    if toolchain.way == Way::Rustup && forced.is_none() {
        if !known_bad() {
            match compile(&toolchain) {
                Err(error) if !process::interrupted() => {
                    eprintln!(
                        "rustup's nightly could not build the object ({error:#}); trying Debian's Rust"
                    );
                    fs::create_dir_all(refused.parent().expect("it has one"))?;
                    fs::write(&refused, toolchain.fingerprint())?;
                }
                other => return other,
            }
        }
        return compile(&toolchain::find(Some(Way::Debian))?);
    }
    compile(&toolchain)
}

/// What is built for BPF: package, which names its program too, and the file of its object in target/bpf.
const OBJECTS: [(&str, &str); 2] = [
    ("redirector-ebpf", "redirector.bpf.o"),
    // Of the suites, which attach it beside ours.
    ("redirector-foreign", "foreign.bpf.o"),
];

/// Builds all objects, and returns where the daemon's own is.
fn compile(toolchain: &Toolchain) -> Result<PathBuf> {
    let step = Step::start(format!("eBPF objects, with {toolchain}"));
    let target = process::root().join("target/bpf-build");
    let packages = OBJECTS.iter().flat_map(|(package, _)| ["--package", package]);
    process::run(
        toolchain
            .cargo_build()?
            .args(packages)
            .arg("--target-dir")
            .arg(&target),
    )?;
    let directory = process::root().join("target/bpf");
    for (package, object) in OBJECTS {
        let built = target.join("bpfel-unknown-none/release").join(package);
        let object = directory.join(object);
        let bytes = fs::read(&built).with_context(|| format!("reading {}", built.display()))?;
        if !bytes.starts_with(b"\x7fELF") {
            bail!("{} is not an object file", built.display());
        }
        // Untouched when it is the same, so that what embeds it is not built anew.
        if fs::read(&object).ok().as_ref() != Some(&bytes) {
            fs::create_dir_all(&directory)?;
            fs::write(&object, &bytes).with_context(|| format!("writing {}", object.display()))?;
        }
    }
    step.done();
    Ok(directory.join(OBJECTS[0].1))
}

/// What cargo built, by target name.
#[derive(Debug, Default)]
pub(crate) struct Built {
    executables: Vec<Executable>,
}

#[derive(Debug)]
struct Executable {
    target: String,
    /// `bin`, `lib`, `test`.
    kind: String,
    path: PathBuf,
}

impl Built {
    pub(crate) fn find(&self, name: &str) -> Result<&Path> {
        let found = self
            .executables
            .iter()
            .find(|executable| executable.target == name);
        found
            .map(|executable| executable.path.as_path())
            .with_context(|| format!("cargo built no {name}"))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &Path)> {
        self.executables
            .iter()
            .map(|executable| (executable.target.as_str(), executable.path.as_path()))
    }
}

/// The daemon, the plugin and the demonstration.
pub(crate) fn binaries(object: &Path, profile: Profile) -> Result<Built> {
    let step = Step::start("daemon, plugin and demonstration");
    let built = cargo_executables(
        &[
            "build",
            "--package",
            "redirector",
            "--package",
            "redirector-tests",
            "--bins",
        ],
        object,
        profile,
    )?;
    step.done();
    Ok(built)
}

/// The daemon as it is shipped.
pub(crate) fn shipped_daemon(object: &Path) -> Result<Built> {
    let step = Step::start("daemon as it is shipped, which takes some minutes");
    let arguments = ["build", "--package", "redirector", "--bin", "redirector"];
    let built = cargo_executables(&arguments, object, Profile::Dist)?;
    step.done();
    Ok(built)
}

/// Target of what is linked statically: named, so that what runs while building is not.
const STATIC_TARGET: &str = "x86_64-unknown-linux-gnu";

/// Daemon and plugin as they are in the image: as they are shipped, and without any library beside them. Of what is for debuggers, the
/// names of functions stay.
pub(crate) fn static_programs(object: &Path) -> Result<Built> {
    let step = Step::start("static daemon and plugin, which takes some minutes");
    let flags = std::env::var("RUSTFLAGS").unwrap_or_default();
    let flags = format!("{flags} -C target-feature=+crt-static");
    let arguments = [
        "build",
        "--package",
        "redirector",
        "--bins",
        "--target",
        STATIC_TARGET,
    ];
    let environment = [
        ("RUSTFLAGS", flags.trim()),
        ("CARGO_PROFILE_DIST_STRIP", "debuginfo"),
    ];
    let built = cargo_executables_with(&arguments, object, Profile::Dist, &environment)?;
    step.done();
    Ok(built)
}

/// The suites that need root: those of these names, or all when none is named.
pub(crate) fn suites(object: &Path, profile: Profile, names: &[&str]) -> Result<Built> {
    let step = Step::start("privileged test suites");
    let mut arguments = vec!["test", "--no-run", "--package", "redirector-tests"];
    if names.is_empty() {
        arguments.push("--tests");
    }
    arguments.extend(names.iter().flat_map(|name| ["--test", name]));
    let mut built = cargo_executables(&arguments, object, profile)?;
    // Cargo builds the package's library and programs along with them.
    built.executables.retain(|executable| executable.kind == "test");
    step.done();
    Ok(built)
}

fn cargo_executables(arguments: &[&str], object: &Path, profile: Profile) -> Result<Built> {
    cargo_executables_with(arguments, object, profile, &[])
}

fn cargo_executables_with(
    arguments: &[&str],
    object: &Path,
    profile: Profile,
    environment: &[(&str, &str)],
) -> Result<Built> {
    let mut built = Built::default();
    let mut cargo = process::cargo();
    cargo
        .args(arguments)
        .args(["--locked", "--message-format=json-render-diagnostics"])
        .env("REDIRECTOR_EBPF_OBJECT", object)
        .env("REDIRECTOR_REQUIRE_EBPF", "1")
        .envs(environment.iter().copied());
    match profile {
        Profile::Release => cargo.arg("--release"),
        Profile::Dist => cargo.args(["--profile", "dist"]),
    };
    process::run_lines(&mut cargo, |line| {
        let Ok(message) = serde_json::from_str::<Value>(line) else {
            return;
        };
        let target = &message["target"];
        let (name, kind) = (target["name"].as_str(), target["kind"][0].as_str());
        if let (Some(name), Some(kind), Some(path)) = (name, kind, message["executable"].as_str()) {
            built.executables.push(Executable {
                target: name.to_owned(),
                kind: kind.to_owned(),
                path: path.into(),
            });
        }
    })?;
    Ok(built)
}
