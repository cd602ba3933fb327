//! Debian packages, installed by name when something is missing.

use anyhow::{Result, bail};

use crate::process::{self, Step};

/// A program and the package that brings it.
pub(crate) type Program = (&'static str, &'static str);

/// What the demonstration runs.
pub(crate) const DEMO: &[Program] = &[
    ("ip", "iproute2"),
    ("nsenter", "util-linux"),
    ("curl", "curl"),
    ("nft", "nftables"),
];

/// What the benchmarks run.
pub(crate) const BENCH: &[Program] = &[
    ("ip", "iproute2"),
    ("nsenter", "util-linux"),
    ("iptables-nft-restore", "iptables"),
    ("iperf3", "iperf3"),
    ("wrk", "wrk"),
    ("nginx", "nginx-light"),
];

/// What the privileged tests run, peers included.
pub(crate) const TESTS: &[Program] = &[
    ("ip", "iproute2"),
    ("nsenter", "util-linux"),
    ("curl", "curl"),
    ("bpftool", "bpftool"),
    ("nft", "nftables"),
    ("iptables-nft-restore", "iptables"),
    ("nginx", "nginx-light"),
    ("haproxy", "haproxy"),
    ("h2load", "nghttp2-client"),
    ("openssl", "openssl"),
    ("ethtool", "ethtool"),
    ("/usr/bin/python3", "python3"),
    // The container runtime with its usual seccomp profile, the network of its pods, and what builds images without a daemon.
    ("containerd", "containerd"),
    ("runc", "runc"),
    ("/usr/lib/cni/bridge", "containernetworking-plugins"),
    ("busybox", "busybox-static"),
    (
        "/usr/share/containers/seccomp.json",
        "golang-github-containers-common",
    ),
    ("buildah", "buildah"),
    // A browser for the dashboard, and what drives it.
    ("chromium", "chromium"),
    ("chromedriver", "chromium-driver"),
    // Of the benchmarks, which are tried with small amounts.
    ("iperf3", "iperf3"),
    ("wrk", "wrk"),
];

/// What an image takes from the machine that builds it: the roots of public authorities.
pub(crate) const IMAGE: &[Program] = &[("/etc/ssl/certs/ca-certificates.crt", "ca-certificates")];

/// What tests on other kernels run: fetching them, and making and emulating a machine.
pub(crate) const KERNELS: &[Program] = &[
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("busybox", "busybox-static"),
    ("strip", "binutils"),
    ("xz", "xz-utils"),
    ("zstd", "zstd"),
    ("ip", "iproute2"),
    ("tc", "iproute2"),
    ("nsenter", "util-linux"),
    (
        "/usr/share/keyrings/debian-archive-keyring.gpg",
        "debian-archive-keyring",
    ),
];

/// What the API server of Kubernetes is built and run with, beside a compiler of its own.
pub(crate) const API_SERVER: &[Program] = &[
    ("etcd", "etcd-server"),
    ("make", "make"),
    ("rsync", "rsync"),
    ("jq", "jq"),
    ("dpkg-source", "dpkg-dev"),
    (
        "/usr/share/keyrings/debian-archive-keyring.gpg",
        "debian-archive-keyring",
    ),
];

/// Sees to it that the programs are there.
pub(crate) fn require(programs: &[Program]) -> Result<()> {
    let there = |program: &str| match program.strip_prefix('/') {
        Some(_) => std::path::Path::new(program).is_file(),
        None => process::find(program).is_some(),
    };
    let missing: Vec<&str> = programs
        .iter()
        .filter(|(program, _)| !there(program))
        .map(|(_, package)| *package)
        .collect();
    install(&missing)
}

/// Those of the packages that are not installed.
pub(crate) fn missing(packages: &[String]) -> Vec<String> {
    let installed =
        process::output(process::command("dpkg-query").args(["-W", "-f=${Package} ${db:Status-Status}\n"]));
    let installed = installed.unwrap_or_default();
    packages
        .iter()
        .filter(|package| {
            !installed
                .lines()
                .any(|line| line == format!("{package} installed"))
        })
        .cloned()
        .collect()
}

/// Installs packages; one error that says how to mend it where it can't.
pub(crate) fn install(packages: &[impl AsRef<str>]) -> Result<()> {
    if packages.is_empty() {
        return Ok(());
    }
    let names = packages.iter().map(AsRef::as_ref).collect::<Vec<_>>().join(" ");
    if process::find("apt-get").is_none() {
        bail!("missing here: {names} (names of Debian 12), and there is no apt-get to install them");
    }
    if !nix::unistd::geteuid().is_root() {
        bail!("missing here: {names}; mend it with: sudo apt-get update && sudo apt-get install -y {names}");
    }
    let step = Step::start(format!("installing {names}"));
    // Index files that are too old name packages that are gone, so the second try has fresh ones.
    if apt_install(&names, false).is_err() && !process::interrupted() {
        process::run(apt_get().args(["update", "-qq"]))?;
        apt_install(&names, true)?;
    }
    step.done();
    Ok(())
}

fn apt_install(names: &str, loud: bool) -> Result<()> {
    let mut command = apt_get();
    command
        .args(["install", "-y", "-qq", "--no-install-recommends"])
        .args(names.split(' '));
    if !loud {
        command.stderr(std::process::Stdio::null());
    }
    command.stdout(std::process::Stdio::null());
    process::run(&mut command)
}

fn apt_get() -> std::process::Command {
    let mut command = process::command("apt-get");
    // No service is started by an installation: the tests start what they need, in namespaces of their own.
    command
        .env("DEBIAN_FRONTEND", "noninteractive")
        .env("RUNLEVEL", "1")
        .args(["-o", "DPkg::Lock::Timeout=120"]);
    command
}
