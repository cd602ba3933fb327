//! Embeds the eBPF object, which `cargo xtask` builds: `OUT_DIR/redirector.bpf.o`. Without one an empty file takes its
//! place, so that checking, linting and unit tests need no eBPF toolchain; the loader knows it by its length.
//! And tells the build itself, for the config dump.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

fn main() {
    println!("cargo::rerun-if-env-changed=REDIRECTOR_EBPF_OBJECT");
    println!("cargo::rerun-if-env-changed=REDIRECTOR_REQUIRE_EBPF");
    let required = env::var_os("REDIRECTOR_REQUIRE_EBPF").is_some_and(|value| value == "1");
    let named = env::var_os("REDIRECTOR_EBPF_OBJECT")
        .filter(|value| !value.is_empty())
        .map(PathBuf::from);
    // What `cargo xtask ebpf` leaves, for a plain `cargo build` after it.
    let usual = Path::new(&variable("CARGO_MANIFEST_DIR")).join("../target/bpf/redirector.bpf.o");
    println!(
        "cargo::rerun-if-changed={}",
        named.as_deref().unwrap_or(&usual).display()
    );

    let object = match &named {
        Some(path) => fs::read(path).unwrap_or_else(|error| {
            panic!(
                "REDIRECTOR_EBPF_OBJECT names {}, which cannot be read: {error}",
                path.display()
            )
        }),
        None => fs::read(&usual).unwrap_or_default(),
    };
    assert!(
        !(required && object.is_empty()),
        "there is no eBPF object to embed, and REDIRECTOR_REQUIRE_EBPF=1 wants one: run `cargo xtask ebpf` first"
    );
    let embedded = Path::new(&variable("OUT_DIR")).join("redirector.bpf.o");
    fs::write(&embedded, object).unwrap_or_else(|error| panic!("writing {}: {error}", embedded.display()));

    println!(
        "cargo::rustc-env=REDIRECTOR_BUILD_PROFILE={}",
        variable("PROFILE")
    );
    println!("cargo::rustc-env=REDIRECTOR_RUST_VERSION={}", rust_version());
}

/// Such as `1.90.0`.
fn rust_version() -> String {
    let told = Command::new(variable("RUSTC")).arg("--version").output();
    let told = told.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    let version = told
        .ok()
        .and_then(|text| text.split(' ').nth(1).map(str::to_owned));
    version.unwrap_or_else(|| "unknown".to_owned())
}

fn variable(name: &str) -> String {
    env::var(name).unwrap_or_else(|error| panic!("cargo sets {name} for build scripts: {error}"))
}
