//! The compiler and linker of the eBPF object: looks for rustup's nightly, else for Debian's own Rust, and installs what
//! the latter lacks. docs/building.md says why there are two.

use std::{
    env, fmt, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, anyhow};

use crate::{
    apt,
    process::{self, Step},
};

/// The release that both ways use; its features name the LLVM versions it can be built with.
const BPF_LINKER: &str = "0.13.0";
const TARGET: &str = "bpfel-unknown-none";

/// How the eBPF object is built.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Way {
    /// rustup's nightly with rust-src; core is built along
    Rustup,
    /// Debian's rustc-web, which carries a built core for BPF
    Debian,
}

/// A compiler and a linker that are there.
#[derive(Debug)]
pub(crate) struct Toolchain {
    pub(crate) way: Way,
    compiler: String,
    linker: PathBuf,
}

impl fmt::Display for Toolchain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let way = match self.way {
            Way::Rustup => "rustup's nightly, building core",
            Way::Debian => "Debian's rustc-web",
        };
        write!(f, "{way}: {}; {}", self.compiler, self.linker.display())
    }
}

impl Toolchain {
    /// The cargo command that builds for BPF with this toolchain; the caller adds what to build.
    pub(crate) fn cargo_build(&self) -> Result<Command> {
        let mut command = match self.way {
            Way::Rustup => {
                let mut command = process::command("cargo");
                command.arg("+nightly");
                command
            }
            Way::Debian => process::command("/usr/bin/cargo"),
        };
        for (name, _) in env::vars_os() {
            if name.to_str().is_some_and(steers_a_build) {
                command.env_remove(name);
            }
        }
        let path = env::var_os("PATH").unwrap_or_default();
        let directory = self.linker.parent().context("a linker lies in a directory")?;
        let path = env::join_paths([directory.to_owned()].into_iter().chain(env::split_paths(&path)))?;
        command
            .env("PATH", path)
            .env(
                "RUSTFLAGS",
                "-C linker=bpf-linker -C debuginfo=2 -C link-arg=--btf",
            )
            .args(["build", "--release", "--locked", "--target", TARGET]);
        match self.way {
            Way::Rustup => {
                command.args(["-Z", "build-std=core"]);
            }
            Way::Debian => {
                command.env("RUSTC", "/usr/bin/rustc").env("RUSTC_BOOTSTRAP", "1");
            }
        }
        Ok(command)
    }

    /// A text that changes whenever the toolchain does.
    pub(crate) fn fingerprint(&self) -> String {
        format!("{} {}", self.compiler, self.linker.display())
    }
}

/// Variables of the surrounding build that would change what is compiled, or with what. The user's registry and network
/// settings stay.
fn steers_a_build(name: &str) -> bool {
    let keep = [
        "CARGO_HOME",
        "CARGO_HTTP_",
        "CARGO_NET_",
        "CARGO_REGISTR",
        "CARGO_SOURCE_",
        "CARGO_TERM_",
    ];
    let exact = [
        "RUSTC",
        "RUSTFLAGS",
        "RUSTDOC",
        "RUSTUP_TOOLCHAIN",
        "LD_LIBRARY_PATH",
    ];
    exact.contains(&name)
        || ["RUSTC_", "RUSTDOC"]
            .iter()
            .any(|prefix| name.starts_with(prefix))
        || (name.starts_with("CARGO") && !keep.iter().any(|prefix| name.starts_with(prefix)))
}

/// Finds a toolchain, or makes one.
pub(crate) fn find(forced: Option<Way>) -> Result<Toolchain> {
    match forced {
        Some(Way::Rustup) => rustup().map_err(|missing| {
            anyhow!(
                "rustup's nightly cannot build for BPF: {missing}; mend it with: {}",
                mend_rustup()
            )
        }),
        Some(Way::Debian) => debian(),
        None => rustup().or_else(|missing| {
            debian().map_err(|error| {
                anyhow!(
                    "there is no toolchain for the eBPF object; one of these two is needed\n  \
                     Debian's Rust: {error:#}\n  \
                     rustup's nightly: {missing}; mend it with: {}",
                    mend_rustup()
                )
            })
        }),
    }
}

fn mend_rustup() -> String {
    let major = nightly_version()
        .and_then(|text| llvm_major(&text))
        .map_or_else(|| "NN".to_owned(), |major| major.to_string());
    format!(
        "rustup toolchain install nightly --component rust-src && LLVM_PREFIX=/usr/lib/llvm-{major} cargo install \
         bpf-linker --version {BPF_LINKER} --no-default-features --features llvm-{major}"
    )
}

fn nightly_version() -> Option<String> {
    // `rustup run` does not install; a plain `rustc +nightly` may.
    process::output(
        process::command("rustup")
            .args(["run", "nightly", "rustc", "-vV"])
            .env_remove("RUSTUP_TOOLCHAIN"),
    )
}

/// rustup's nightly, or what it lacks.
fn rustup() -> Result<Toolchain, String> {
    let version = nightly_version().ok_or("there is no nightly")?;
    let sysroot =
        process::output(process::command("rustup").args(["run", "nightly", "rustc", "--print", "sysroot"]))
            .ok_or("it does not run")?;
    if !Path::new(sysroot.trim())
        .join("lib/rustlib/src/rust/library/core/Cargo.toml")
        .is_file()
    {
        return Err("it has no rust-src component".into());
    }
    let llvm = llvm_major(&version).ok_or("it does not tell its LLVM version")?;
    let linker = linkers()
        .into_iter()
        .find(|linker| linker_llvm(linker).is_none_or(|major| major >= llvm));
    let linker = linker.ok_or_else(|| format!("there is no bpf-linker {BPF_LINKER} for its LLVM {llvm}"))?;
    Ok(Toolchain {
        way: Way::Rustup,
        compiler: first_line(&version),
        linker,
    })
}

/// Debian's Rust with a linker of its LLVM; installs what is not there.
fn debian() -> Result<Toolchain> {
    let rust = ["rustc-web", "cargo-web", "libstd-rust-web-dev-bpf"].map(str::to_owned);
    apt::install(&apt::missing(&rust))?;
    let version = process::output(process::command("/usr/bin/rustc").arg("-vV"))
        .context("/usr/bin/rustc of rustc-web does not run")?;
    let llvm = llvm_major(&version).context("/usr/bin/rustc -vV does not tell its LLVM version")?;
    let linker = match linkers()
        .into_iter()
        .find(|linker| linker_llvm(linker) == Some(llvm))
    {
        Some(linker) => linker,
        None => build_linker(llvm)?,
    };
    Ok(Toolchain {
        way: Way::Debian,
        compiler: first_line(&version),
        linker,
    })
}

/// Builds bpf-linker with Debian's LLVM, below target/: nothing of the user's is replaced.
fn build_linker(llvm: u32) -> Result<PathBuf> {
    let libraries = [
        &format!("llvm-{llvm}-dev"),
        &format!("libpolly-{llvm}-dev"),
        "zlib1g-dev",
        "libzstd-dev",
    ]
    .map(str::to_owned);
    apt::install(&apt::missing(&libraries))?;
    let step = Step::start(format!(
        "building bpf-linker {BPF_LINKER} with LLVM {llvm} (once, a minute or two)"
    ));
    let feature = format!("llvm-{llvm}");
    process::run(
        process::cargo()
            .args([
                "install",
                "bpf-linker",
                "--version",
                BPF_LINKER,
                "--locked",
                "--no-default-features",
            ])
            .args(["--features", &feature, "--root"])
            .arg(process::tools())
            .env_remove("RUSTFLAGS")
            .env_remove("CARGO_TARGET_DIR")
            .env_remove("CARGO_BUILD_TARGET")
            // Without it the link step asks for a libLLVM without a version.
            .env("LLVM_PREFIX", format!("/usr/lib/llvm-{llvm}")),
    )?;
    step.done();
    Ok(process::tools().join("bin/bpf-linker"))
}

/// Every bpf-linker of the right release.
fn linkers() -> Vec<PathBuf> {
    let home = env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| env::var_os("HOME").map(|home| Path::new(&home).join(".cargo")));
    let places = [
        Some(process::tools().join("bin/bpf-linker")),
        process::find("bpf-linker"),
        home.map(|home| home.join("bin/bpf-linker")),
    ];
    let right = |linker: &PathBuf| {
        let version = process::output(Command::new(linker).arg("--version"));
        version.is_some_and(|version| version.trim() == format!("bpf-linker {BPF_LINKER}"))
    };
    places
        .into_iter()
        .flatten()
        .filter(|linker| fs::exists(linker).unwrap_or(false))
        .filter(right)
        .collect()
}

/// The LLVM that a linker was linked with, by the shared library it wants; `None` when it has its own inside.
fn linker_llvm(linker: &Path) -> Option<u32> {
    let libraries = process::output(Command::new("ldd").arg(linker))?;
    let (_, rest) = libraries.split_once("libLLVM")?;
    leading_number(rest.trim_start_matches(|c: char| !c.is_ascii_digit()))
}

/// `LLVM version: 22.1.8` of `rustc -vV`.
fn llvm_major(version: &str) -> Option<u32> {
    leading_number(
        version
            .lines()
            .find_map(|line| line.strip_prefix("LLVM version: "))?,
    )
}

fn leading_number(text: &str) -> Option<u32> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text[..end].parse().ok()
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_llvm_version_is_read_from_rustc() {
        assert_eq!(
            llvm_major("rustc 1.96.0\nhost: x\nLLVM version: 22.1.8\n"),
            Some(22)
        );
        assert_eq!(llvm_major("rustc 1.96.0\n"), None);
    }

    #[test]
    fn a_child_build_keeps_the_registry_and_loses_the_flags() {
        for kept in [
            "CARGO_HOME",
            "CARGO_HTTP_CAINFO",
            "CARGO_REGISTRIES_X_INDEX",
            "CARGO_NET_OFFLINE",
            "HOME",
            "PATH",
        ] {
            assert!(!steers_a_build(kept), "{kept}");
        }
        for lost in [
            "CARGO",
            "CARGO_TARGET_DIR",
            "CARGO_ENCODED_RUSTFLAGS",
            "RUSTC_WRAPPER",
            "RUSTFLAGS",
            "RUSTUP_TOOLCHAIN",
        ] {
            assert!(steers_a_build(lost), "{lost}");
        }
    }
}
