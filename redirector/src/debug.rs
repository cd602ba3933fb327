//! Subcommands to look at the eBPF programs by hand: `load` tries them on a namespace without a proxy, `trace` reads their
//! debug records.

use std::{
    collections::BTreeMap,
    io::{self, Write},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::Context;

use crate::{
    mesh::pod::PodUid,
    redirect::{
        Count, PodNetwork,
        ebpf::{Config, observe::Observation, trace::Trace},
        rules::Rules,
    },
    sys::netns::Netns,
};

/// How often `load` prints what has changed.
const PRINT_INTERVAL: Duration = Duration::from_secs(1);

/// How often `trace` looks for records; the ring holds some thousand.
const READ_INTERVAL: Duration = Duration::from_millis(50);

/// Attaches the programs to a namespace, prints what they would do as it happens, and detaches at Ctrl-C.
///
/// `netns` is a name of `ip netns`, the PID of a process in the namespace, or a path.
pub async fn load(netns: &str, config: Config, shutdown: impl Future<Output = ()>) -> anyhow::Result<()> {
    let path = netns_path(netns);
    let netns = Netns::open(&path).with_context(|| {
        format!(
            "opening the network namespace {} (name, PID or path)",
            path.display()
        )
    })?;
    let own = Netns::current().context("reading the own network namespace")?;
    anyhow::ensure!(
        netns.id() != own.id(),
        "{} is the node's own namespace, which is never captured",
        path.display()
    );
    let pod = PodNetwork {
        uid: PodUid::from_name("load", &netns.id().ino.to_string())?,
        netns: Arc::new(netns),
        addresses: Vec::new(),
        rules: Rules::default(),
    };
    let observation = tokio::task::spawn_blocking(move || Observation::begin(&config, &pod)).await??;
    let mut out = io::stdout();
    writeln!(
        out,
        "attached to {} of {}: everything passes, and what would be done to it is counted; Ctrl-C detaches",
        observation.interfaces().join(", "),
        path.display()
    )?;
    let mut before = BTreeMap::new();
    let mut ticks = tokio::time::interval(PRINT_INTERVAL);
    tokio::pin!(shutdown);
    loop {
        tokio::select! {
            () = &mut shutdown => break,
            _ = ticks.tick() => print_changes(&mut out, &observation.counts()?, &mut before)?,
        }
    }
    print_changes(&mut out, &observation.counts()?, &mut before)?;
    // Detaching waits for the kernel.
    tokio::task::spawn_blocking(move || drop(observation)).await?;
    writeln!(out, "detached")?;
    Ok(())
}

fn print_changes(
    out: &mut impl Write,
    counts: &[Count],
    before: &mut BTreeMap<(&'static str, &'static str), u64>,
) -> io::Result<()> {
    for Count {
        program,
        verdict,
        packets,
    } in counts
    {
        let earlier = before.insert((program, verdict), *packets).unwrap_or_default();
        if *packets > earlier {
            writeln!(
                out,
                "{program:8} {verdict:12} {packets:>12}  (+{})",
                packets - earlier
            )?;
        }
    }
    out.flush()
}

fn netns_path(netns: &str) -> PathBuf {
    if netns.contains('/') {
        netns.into()
    } else if netns.chars().all(|c| c.is_ascii_digit()) {
        format!("/proc/{netns}/ns/net").into()
    } else {
        Path::new("/run/netns").join(netns)
    }
}

/// Prints the debug records of one pod's programs, or of all, until Ctrl-C.
pub async fn trace(
    bpffs_dir: &Path,
    uid: Option<&PodUid>,
    shutdown: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    let mut trace = Trace::begin(bpffs_dir, uid, &Printer)?;
    let mut out = io::stdout();
    writeln!(
        out,
        "tracing new outbound connections of {} pods; Ctrl-C ends it",
        trace.pods()
    )?;
    let mut ticks = tokio::time::interval(READ_INTERVAL);
    tokio::pin!(shutdown);
    loop {
        tokio::select! {
            () = &mut shutdown => return Ok(()),
            _ = ticks.tick() => trace.flush(),
        }
    }
}

/// Prints the programs' records to standard output, a line each.
struct Printer;

impl log::Log for Printer {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        // Who reads may have gone away; tracing ends with the next signal all the same.
        let _ = writeln!(io::stdout(), "{}", record.args());
    }

    fn flush(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_is_named_by_name_pid_or_path() {
        for (given, path) in [
            ("web", "/run/netns/web"),
            ("4711", "/proc/4711/ns/net"),
            ("/proc/self/ns/net", "/proc/self/ns/net"),
            ("cni-1234", "/run/netns/cni-1234"),
        ] {
            assert_eq!(netns_path(given), Path::new(path));
        }
    }
}
