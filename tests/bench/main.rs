//! What the detour costs: the same traffic between the same two pods without an agent, in plain through the proxies, and over
//! HBONE. `cargo xtask bench` builds and runs it.
//!
//! Rounds alternate between the modes, so that what else the machine does weighs on all alike; what counts is the ratio.

use std::{
    fs,
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr, TcpStream},
    path::PathBuf,
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use clap::Parser;
use redirector_tests::{
    agent::Options,
    app::{self, App},
    counters,
    mesh::{Mesh, PORT},
    netns::Namespace,
    node::Family,
    wait,
    workloads::Workloads,
};
use serde_json::{Value, json};

/// Measures throughput, new connections and latency between two pods: direct, plain through the proxy, over HBONE.
#[derive(Parser)]
struct Arguments {
    /// Rounds; each measures every mode once
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Measure over IPv6
    #[arg(long)]
    v6: bool,
    /// Attach with clsact filters
    #[arg(long)]
    force_clsact: bool,
    /// Write every figure to this file as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

const BYTES: u64 = 512 << 20;
const CONNECTIONS: u32 = 3_000;
const CONCURRENCY: u32 = 16;
const REQUESTS: usize = 3_000;

/// The figures of one mode in one round, in the order of [`UNITS`].
type Figures = [f64; 5];

/// Name, and whether more is better.
const UNITS: [(&str, bool); 5] = [
    ("upload, Gbit/s", true),
    ("download, Gbit/s", true),
    ("new connections/s, 16 at once", true),
    ("request on an open connection, p50, us", false),
    ("request on an open connection, p99, us", false),
];

struct Mode {
    name: &'static str,
    mesh: Mesh,
    rounds: Vec<Figures>,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    wait::watch_signals()?;
    let family = if arguments.v6 { Family::V6 } else { Family::V4 };
    let options = || Options {
        force_clsact: arguments.force_clsact,
        ..Options::default()
    };
    let direct = Mesh::started(options(), |client, server| Workloads::hbone([client, server]));
    let mut modes = [
        ("direct", direct),
        ("plain", Mesh::plaintext(options())),
        ("hbone", Mesh::hbone(options())),
    ]
    .map(|(name, mesh)| Mode {
        name,
        mesh,
        rounds: Vec::new(),
    });
    for round in 1..=arguments.rounds {
        for mode in &mut modes {
            println!("round {round} of {}: {}", arguments.rounds, mode.name);
            mode.rounds.push(measure(&mode.mesh, family)?);
        }
    }
    print_table(&modes);
    if let Some(path) = arguments.json {
        let text = serde_json::to_string_pretty(&to_json(&modes, family))?;
        fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

fn measure(mesh: &Mesh, family: Family) -> Result<Figures> {
    let serve = |port, handler| App::start(&mesh.server.ns, (family.any(), port).into(), handler);
    let (_sink, _source) = (serve(PORT, sink), serve(PORT + 1, source));
    let (_who, _echo) = (serve(PORT + 2, app::who), serve(PORT + 3, app::echo));
    let (client, at) = (&mesh.client.ns, |port| mesh.server.addr(family, port));
    let upload = gigabits(|| {
        let mut stream = app::connect(client, at(PORT))?;
        write_bytes(&mut stream)?;
        stream.shutdown(Shutdown::Write)?;
        stream.read_exact(&mut [0])
    });
    let download = gigabits(|| io::copy(&mut app::connect(client, at(PORT + 1))?, &mut io::sink()).map(drop));
    let resent =
        || [&mesh.client, &mesh.server].map(|pod| counters::kernel(&pod.ns, "TcpExt", "TCPSynRetrans"));
    let before = resent();
    let rate = connections_per_second(client, at(PORT + 2)).context("short connections")?;
    if resent() != before {
        println!(
            "  SYNs were sent again (client, server): {before:?} before, {:?} after",
            resent()
        );
    }
    let (p50, p99) = latency(client, at(PORT + 3)).context("requests on one connection")?;
    Ok([
        upload.context("upload")?,
        download.context("download")?,
        rate,
        p50,
        p99,
    ])
}

/// Takes everything, and then says so.
fn sink(mut stream: TcpStream, _: SocketAddr) -> io::Result<()> {
    io::copy(&mut stream, &mut io::sink())?;
    stream.write_all(&[1])
}

fn source(mut stream: TcpStream, _: SocketAddr) -> io::Result<()> {
    write_bytes(&mut stream)
}

fn write_bytes(stream: &mut TcpStream) -> io::Result<()> {
    let block = vec![0x5a; 256 << 10];
    for _ in 0..BYTES / block.len() as u64 {
        stream.write_all(&block)?;
    }
    Ok(())
}

fn gigabits(transfer: impl FnOnce() -> io::Result<()>) -> io::Result<f64> {
    let begin = Instant::now();
    transfer()?;
    Ok(BYTES as f64 * 8.0 / 1e9 / begin.elapsed().as_secs_f64())
}

fn connections_per_second(ns: &Namespace, addr: SocketAddr) -> io::Result<f64> {
    let left = AtomicU32::new(CONNECTIONS);
    let take = || {
        left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1))
            .is_ok()
    };
    let client = || -> io::Result<()> {
        while take() {
            // The server closes first, and keeps the TIME_WAIT: the client's ports would run out within some rounds.
            let mut stream = app::connect(ns, addr)?;
            stream.write_all(b"hello\n")?;
            io::copy(&mut stream, &mut io::sink())?;
        }
        Ok(())
    };
    let begin = Instant::now();
    thread::scope(|scope| {
        let clients: Vec<_> = (0..CONCURRENCY).map(|_| scope.spawn(client)).collect();
        clients
            .into_iter()
            .try_for_each(|client| client.join().expect("a client does not panic"))
    })?;
    Ok(f64::from(CONNECTIONS) / begin.elapsed().as_secs_f64())
}

/// Median and 99th percentile, in microseconds.
fn latency(ns: &Namespace, addr: SocketAddr) -> io::Result<(f64, f64)> {
    let mut stream = app::connect(ns, addr)?;
    stream.set_nodelay(true)?;
    let mut times: Vec<Duration> = Vec::with_capacity(REQUESTS);
    for _ in 0..REQUESTS {
        let begin = Instant::now();
        stream.write_all(&[1])?;
        stream.read_exact(&mut [0])?;
        times.push(begin.elapsed());
    }
    times.sort_unstable();
    let at = |part: f64| times[((REQUESTS - 1) as f64 * part) as usize].as_secs_f64() * 1e6;
    Ok((at(0.5), at(0.99)))
}

/// Median, least and most of one figure over the rounds of a mode.
fn spread(mode: &Mode, figure: usize) -> (f64, f64, f64) {
    let mut values: Vec<f64> = mode.rounds.iter().map(|figures| figures[figure]).collect();
    values.sort_by(f64::total_cmp);
    (values[values.len() / 2], values[0], values[values.len() - 1])
}

fn print_table(modes: &[Mode; 3]) {
    println!("\nmedian (least to most); in brackets: times as good as direct, by medians\n");
    for (figure, (name, more_is_better)) in UNITS.iter().enumerate() {
        println!("{name}");
        let (direct, _, _) = spread(&modes[0], figure);
        for mode in modes {
            let (median, least, most) = spread(mode, figure);
            let ratio = if *more_is_better {
                median / direct
            } else {
                direct / median
            };
            println!(
                "  {:8} {median:10.1}   ({least:.1} to {most:.1})   [{ratio:.2}]",
                mode.name
            );
        }
    }
}

fn to_json(modes: &[Mode; 3], family: Family) -> Value {
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let cpus = thread::available_parallelism().map_or(0, usize::from);
    let rounds = |mode: &Mode| {
        let figures = |figure: usize| mode.rounds.iter().map(|round| round[figure]).collect::<Vec<_>>();
        let named = UNITS
            .iter()
            .enumerate()
            .map(|(figure, (name, _))| ((*name).to_owned(), json!(figures(figure))));
        (mode.name.to_owned(), Value::Object(named.collect()))
    };
    json!({
        "kernel": kernel.trim(), "cpus": cpus, "family": family.name(), "bytes": BYTES,
        "connections": CONNECTIONS, "concurrency": CONCURRENCY, "requests": REQUESTS,
        "modes": Value::Object(modes.iter().map(rounds).collect()),
    })
}
