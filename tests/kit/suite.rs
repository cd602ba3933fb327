//! The harness of the suites: libtest's look, and tests that cannot run here are told as ignored, with the reason.
//! Where nothing may be skipped (`CI=true`, `REDIRECTOR_REQUIRE_ROOT=1`) they fail instead.

use std::{env, process::ExitCode};

use libtest_mimic::{Arguments, Failed, Trial};

use crate::{agent, agent::Options, bpf::object, kube_apiserver, node::Family, wait};

/// A test.
pub struct Case {
    name: String,
    run: Box<dyn FnOnce() + Send>,
}

/// Names a test.
pub fn case(name: impl Into<String>, run: impl FnOnce() + Send + 'static) -> Case {
    Case {
        name: name.into(),
        run: Box::new(run),
    }
}

/// A test for a family, with an agent started in a certain way.
pub type Test = fn(Family, Options);

/// Each test for both families, with every way to attach: by TCX, by clsact, and as on an old kernel. Named `test_v4_tcx` and so on.
pub fn on_every_attachment(tests: &[(&str, Test)]) -> Vec<Case> {
    let clsact = Options {
        force_clsact: true,
        ..Options::default()
    };
    let mut cases = Vec::new();
    for (attach, options) in [
        ("tcx", Options::default()),
        ("clsact", clsact),
        ("old_kernel", Options::old_kernel()),
    ] {
        for family in Family::BOTH {
            for (name, test) in tests {
                let (options, test) = (options.clone(), *test);
                let name = format!("{name}_{}_{attach}", family.name());
                cases.push(case(name, move || test(family, options)));
            }
        }
    }
    cases
}

/// What a suite needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Needs {
    /// The eBPF object, as a file.
    Object,
    /// Namespaces.
    Root,
    /// Namespaces, and the daemon with its eBPF object.
    Agent,
    /// The same, and other people's programs from the Python package index.
    Peers,
    /// The same, and Kubernetes' API server, which takes so long to build that its lack is no failure anywhere.
    ApiServer,
}

/// Runs a suite, `threads` tests at a time unless the command line says otherwise.
pub fn main(needs: Needs, threads: usize, cases: Vec<Case>) -> ExitCode {
    // Some hold more connections at a time than the usual limit of 1,024 files allows.
    if let Err(error) = redirector::sys::socket::raise_file_limit() {
        eprintln!("the limit of open files stays as it is: {error}");
    }
    let mut arguments = Arguments::from_args();
    // Ctrl-C ends the tests that run by a panic, so that they remove what they made; the others do not begin.
    if let Err(error) = wait::watch_signals() {
        eprintln!("watching signals: {error}");
        return ExitCode::FAILURE;
    }
    arguments.test_threads.get_or_insert(threads);
    let lacking = lacking(needs);
    let may_lack = needs == Needs::ApiServer && env::var_os(kube_apiserver::PROGRAM).is_none();
    let strict = !may_lack
        && ["CI", "REDIRECTOR_REQUIRE_ROOT"].iter().any(|name| {
            let value = env::var(name).unwrap_or_default();
            value == "true" || value == "1"
        });
    let trials = cases
        .into_iter()
        .map(|case| trial(case, lacking, strict))
        .collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn trial(case: Case, lacking: Option<&'static str>, strict: bool) -> Trial {
    match lacking {
        None => Trial::test(case.name, move || {
            if wait::interrupted() {
                return Err(Failed::from("interrupted"));
            }
            (case.run)();
            Ok(())
        }),
        Some(reason) if strict => Trial::test(case.name, move || Err(Failed::from(reason))),
        Some(reason) => Trial::test(case.name, || Ok(()))
            .with_kind(reason)
            .with_ignored_flag(true),
    }
}

fn lacking(needs: Needs) -> Option<&'static str> {
    if needs == Needs::Object {
        let there = object::path().is_file();
        return (!there).then_some("needs the eBPF object: cargo xtask ebpf");
    }
    if !nix::unistd::geteuid().is_root() {
        return Some("needs root");
    }
    let built =
        || env::var_os("REDIRECTOR_BIN").is_some() || (agent::binary().is_some() && object::path().is_file());
    if needs != Needs::Root && !built() {
        return Some("needs the eBPF object: cargo xtask test");
    }
    if needs == Needs::ApiServer && env::var_os(kube_apiserver::PROGRAM).is_none() {
        return Some("needs Kubernetes' API server: cargo xtask test --apiserver");
    }
    let peers = [Needs::Peers, Needs::ApiServer].contains(&needs);
    (peers && env::var_os("REDIRECTOR_PYTHON").is_none())
        .then_some("needs Python's h2 and Envoy: cargo xtask test")
}
