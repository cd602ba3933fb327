//! The kernel: its version, and whether it takes the programs.

use std::{fs, path::Path};

use super::Check;
use crate::{
    config::{Config, values::Redirect},
    redirect::ebpf::{self, trial},
    telemetry::Chain,
};

/// The oldest kernel that has all that the programs use.
const OLDEST: (u32, u32) = (5, 10);

pub(super) fn checks(config: &Config) -> Vec<Check> {
    let is_ebpf = config.redirect == Redirect::Ebpf;
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut checks = vec![version(release.trim(), std::env::consts::ARCH, is_ebpf)];
    if is_ebpf {
        let tried = trial::run(&ebpf::Config {
            force_clsact: config.force_clsact,
            force_source_port: config.force_source_port,
            ..ebpf::Config::default()
        });
        checks.push(match tried {
            Ok(trial) => taken(trial),
            Err(error) => Check::failed(
                "kernel.programs",
                Chain(&error).to_string(),
                "the kernel wants CONFIG_BPF_SYSCALL, CONFIG_NET_CLS_BPF, CONFIG_NET_SCH_INGRESS and CONFIG_INET, and this process the rights \
                 below; --redirect iptables goes without them",
            ),
        });
        let jit = fs::read_to_string("/proc/sys/net/core/bpf_jit_enable").ok();
        checks.push(compiled(jit.as_deref()));
        checks.push(types(Path::new("/sys/kernel/btf/vmlinux").exists()));
    } else {
        checks.push(Check::not_asked(
            "kernel.programs",
            "only --redirect ebpf has programs",
        ));
    }
    checks
}

fn version(release: &str, machine: &str, is_ebpf: bool) -> Check {
    let id = "kernel.version";
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    let mut next = || numbers.next().and_then(|number| number.parse::<u32>().ok());
    let (Some(major), Some(minor)) = (next(), next()) else {
        return Check::warning(
            id,
            format!("the kernel calls itself {release:?}"),
            "it cannot be told from that whether it is one from 5.10 on; mount /proc",
        );
    };
    let seen = format!("Linux {release} on {machine}");
    if machine != "x86_64" && machine != "aarch64" {
        return Check::warning(
            id,
            seen,
            "this is tried on x86-64 alone, and made for little-endian machines",
        );
    }
    match (major, minor) >= OLDEST {
        true => Check::ok(id, seen),
        false if is_ebpf => Check::failed(
            id,
            seen,
            "eBPF mode wants a kernel from 5.10 on; --redirect iptables goes with older ones",
        ),
        false => Check::warning(id, seen, "nothing older than 5.10 is tried"),
    }
}

fn taken(trial: trial::Trial) -> Check {
    let attach = match trial.tcx {
        true => "attached by TCX links",
        false => "attached as clsact filters",
    };
    let dials = match trial.by_device {
        true => "its own dials told by their device",
        false => "its own dials told by their source port",
    };
    Check::ok(
        "kernel.programs",
        format!("the programs load and run: {attach}, {dials}"),
    )
}

/// `None` where the kernel has no such switch: it always compiles.
fn compiled(switch: Option<&str>) -> Check {
    let id = "kernel.jit";
    match switch.map(str::trim) {
        Some("0") => Check::warning(
            id,
            "eBPF programs are interpreted",
            "sysctl net.core.bpf_jit_enable=1 makes them several times faster",
        ),
        _ => Check::ok(id, "eBPF programs are compiled"),
    }
}

fn types(has_btf: bool) -> Check {
    let seen = match has_btf {
        true => "the kernel tells its types (BTF)",
        false => "the kernel does not tell its types (BTF), which the programs go without",
    };
    Check::ok("kernel.btf", seen)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::State;

    #[test]
    fn versions_are_compared_as_numbers() {
        for (release, machine, is_ebpf, state) in [
            ("5.10.0-28-amd64", "x86_64", true, State::Ok),
            ("6.18.5", "aarch64", true, State::Ok),
            ("5.9.16", "x86_64", true, State::Failed),
            ("4.19.0-rc1", "x86_64", true, State::Failed),
            ("4.19.0", "x86_64", false, State::Warning),
            ("10.0.1", "x86_64", true, State::Ok),
            ("6.1.0", "s390x", true, State::Warning),
            ("", "x86_64", true, State::Warning),
            ("six", "x86_64", true, State::Warning),
        ] {
            let check = version(release, machine, is_ebpf);
            assert_eq!(check.state, state, "{release} {machine} {is_ebpf}: {check:?}");
            assert_eq!(check.hint.is_some(), state != State::Ok, "{check:?}");
        }
    }

    #[test]
    fn what_only_makes_it_slower_is_no_failure() {
        assert_eq!(compiled(Some("0\n")).state, State::Warning);
        assert_eq!(compiled(Some("1\n")).state, State::Ok);
        assert_eq!(compiled(None).state, State::Ok);
        assert_eq!(types(false).state, State::Ok);
    }
}
