//! `cargo xtask test --apiserver`: the suite apiserver, against Kubernetes' own API server.
//!
//! Debian has no package of it, but the source that kubectl comes from, which is taken with the Go compiler of the same release, both
//! unpacked below target/tools and removed when the server is there. It is built once. The suite is not in CI.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    apt,
    archive::{Archive, Kinds},
    build::{self, Profile},
    process::{self, Step},
    test::{self, Total},
    toolchain::Way,
};

/// What the source package of [`SUITE`] is a release of.
const VERSION: &str = "1.20.2";
const SUITE: &str = "bookworm";
const SOURCE: &str = "kubernetes";
/// The compiler of the suite, and a library: the source's own copy of it asks Go's runtime for what changed in 1.18, and the server would
/// crash with it.
const GO: [&str; 2] = ["golang-1.19-go", "golang-1.19-src"];
const LIBRARY: (&str, &str) = (
    "golang-github-modern-go-reflect2-dev",
    "github.com/modern-go/reflect2",
);

/// Builds what is not there, and runs the suite.
pub(crate) fn run(way: Option<Way>, filter: Option<&str>, total: &mut Total) -> Result<()> {
    crate::need_root("test")?;
    if std::env::consts::ARCH != "x86_64" {
        bail!("the compiler is taken for x86_64 only so far");
    }
    apt::require(apt::TESTS)?;
    apt::require(apt::API_SERVER)?;
    let server = server()?;
    let python = test::python_peers()?;
    let object = build::ebpf_object(way)?;
    let bins = build::binaries(&object, Profile::Release)?;
    let suites = build::suites(&object, Profile::Release, &["apiserver"])?;
    let mut suite = test::suite(suites.find("apiserver")?, &object, &bins, &python)?;
    suite.env("REDIRECTOR_KUBE_APISERVER", server).args(filter);
    total.add("suite apiserver", &mut suite)
}

/// The server's program.
fn server() -> Result<PathBuf> {
    let program = process::tools().join(format!("kube-apiserver-{VERSION}"));
    if program.is_file() {
        return Ok(program);
    }
    let directory = process::tools().join("kube-apiserver-build");
    let built = build(&directory).with_context(|| {
        format!(
            "building Kubernetes' API server in {}; a next try goes on there, and without that directory it begins anew",
            directory.display()
        )
    })?;
    // At once, so that what is there is whole.
    let copy = program.with_extension("new");
    fs::copy(&built, &copy).with_context(|| format!("copying {}", built.display()))?;
    fs::rename(&copy, &program)?;
    fs::remove_dir_all(&directory).with_context(|| format!("removing {}", directory.display()))?;
    Ok(program)
}

fn build(directory: &Path) -> Result<PathBuf> {
    let root = directory.join("apt");
    let archive = Archive::open(root, Kinds::WithSources, &[SUITE], "sources")?;
    let compiler = directory.join("go");
    unpack_once(&compiler, |into| {
        let step = Step::start(format!("fetching {} and {}", GO.join(", "), LIBRARY.0));
        archive.unpack(&[GO.as_slice(), &[LIBRARY.0]].concat(), into)?;
        step.done();
        Ok(())
    })?;
    let sources = directory.join("source");
    unpack_once(&sources, |into| {
        let step = Step::start(format!("fetching the source of {SOURCE}"));
        process::run(
            archive
                .command("apt-get")
                .args(["source", "-qq", "--only-source", SOURCE])
                .current_dir(into),
        )?;
        let source = only_directory(into)?;
        let library = source.join("vendor").join(LIBRARY.1);
        fs::remove_dir_all(&library).with_context(|| format!("removing {}", library.display()))?;
        let newer = compiler.join("usr/share/gocode/src").join(LIBRARY.1);
        process::run(process::command("cp").arg("-r").arg(&newer).arg(&library))?;
        step.done();
        Ok(())
    })?;
    let source = only_directory(&sources)?;
    let version = source
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    ensure!(
        version.contains(VERSION),
        "the archive's {SOURCE} in {SUITE} is {version} by now, and {VERSION} is wanted: xtask/src/apiserver.rs names it"
    );
    let step = Step::start(format!(
        "building kube-apiserver {VERSION} (once, ten minutes or more)"
    ));
    process::run(&mut make(directory, &compiler, &source)?)?;
    step.done();
    let built = source.join("_output/bin/kube-apiserver");
    ensure!(
        built.is_file(),
        "make has succeeded, and there is no {}",
        built.display()
    );
    Ok(built)
}

/// As debian/rules of the source does, for the one program. What the source's scripts would be misled by is left out.
fn make(directory: &Path, compiler: &Path, source: &Path) -> Result<Command> {
    let go = fs::canonicalize(compiler)?.join("usr/lib/go-1.19");
    let paths = source.join(".go");
    let linked = paths.join("src/k8s.io");
    fs::create_dir_all(&linked)?;
    let link = linked.join("kubernetes");
    if !link.exists() {
        std::os::unix::fs::symlink("../../..", &link)?;
    }
    let mut make = process::command("make");
    let path = std::env::var("PATH").unwrap_or_default();
    make.arg("WHAT=cmd/kube-apiserver")
        .current_dir(source)
        .env("PATH", format!("{}:{path}", go.join("bin").display()))
        .env("GOROOT", &go)
        .env("GOPATH", &paths)
        .env("GOCACHE", directory.join("cache"))
        // More at one time than this would take gigabytes.
        .env("GOFLAGS", "-p=2")
        .env("CGO_ENABLED", "0")
        .env_remove("GO111MODULE")
        .env_remove("MAKEFLAGS");
    Ok(make)
}

/// Fills a directory, unless it is there: under another name until it is whole.
fn unpack_once(directory: &Path, fill: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    if directory.is_dir() {
        return Ok(());
    }
    let half = directory.with_extension("half");
    if half.exists() {
        fs::remove_dir_all(&half).with_context(|| format!("removing {}", half.display()))?;
    }
    fs::create_dir_all(&half).with_context(|| format!("making {}", half.display()))?;
    fill(&half)?;
    fs::rename(&half, directory).with_context(|| format!("making {}", directory.display()))
}

/// The one directory in a directory.
fn only_directory(parent: &Path) -> Result<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(parent).with_context(|| format!("reading {}", parent.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            found.push(path);
        }
    }
    match <[PathBuf; 1]>::try_from(found) {
        Ok([only]) => Ok(only),
        Err(found) => bail!(
            "one directory is wanted in {}, and there are {}",
            parent.display(),
            found.len()
        ),
    }
}
