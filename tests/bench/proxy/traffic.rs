//! The traffic of one mode in one round: bulk by iperf3, requests by wrk to nginx, short connections by our own client; and what
//! they took.

use std::{
    fs,
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use redirector_tests::{
    app, counters,
    mesh::{Mesh, PORT},
    node::Family,
    process::{self, Process},
    wait,
};
use serde_json::Value;

use super::{Results, Sizes, modes::Mode};
use crate::{
    load::Pair,
    results::{COUNT, GBITS, MICROSECONDS, PER_SECOND, SECONDS},
    usage::Cpu,
};

/// Groups of figures.
pub(crate) const BULK: &str = "bulk, one stream";
pub(crate) const MANY: &str = "requests, 32 connections";
pub(crate) const ONE: &str = "requests, one connection";
pub(crate) const SHORT: &str = "short connections";
/// Names of figures.
pub(crate) const UPLOAD: &str = "upload";
pub(crate) const DOWNLOAD: &str = "download";
pub(crate) const REQUESTS: &str = "requests";
pub(crate) const P50: &str = "p50";
pub(crate) const P99: &str = "p99";
pub(crate) const CONNECTIONS: &str = "new connections";
pub(crate) const LOST_SYNS: &str = "SYNs sent again";

/// A connection at a time that iperf3 and wrk take beyond what they were asked for.
const SPARE: Duration = Duration::from_secs(60);
/// Beside the ports of [`Pair`].
const IPERF_PORT: u16 = PORT + 10;
const HTTP_PORT: u16 = PORT + 11;

/// The servers of a mesh, which live as long as it does.
#[derive(Debug)]
pub(crate) struct Servers {
    _iperf: Process,
    _nginx: Process,
}

impl Servers {
    /// Starts them in the server's namespace, and waits until they listen.
    pub(crate) fn start(mesh: &Mesh) -> Result<Self> {
        let directory = mesh.node.directory();
        let ns = &mesh.server.ns;
        let mut iperf = process::command(ns, "iperf3");
        iperf.args(["--server", "--port", &IPERF_PORT.to_string()]);
        let config = directory.join("nginx.conf");
        // One worker, so that it is the same server whatever the machine has.
        let text = format!(
            "daemon off; master_process off; user root; pid {d}/nginx.pid; error_log stderr; events {{ worker_connections 8192; }}
             http {{ access_log off; keepalive_requests 100000000; keepalive_timeout 1h; client_body_temp_path {d}/n1;
             proxy_temp_path {d}/n2; fastcgi_temp_path {d}/n3; uwsgi_temp_path {d}/n4; scgi_temp_path {d}/n5;
             server {{ listen {HTTP_PORT}; listen [::]:{HTTP_PORT}; location / {{ return 200 'hello from the other pod\\n'; }} }} }}",
            d = directory.display()
        );
        fs::write(&config, text).with_context(|| format!("writing {}", config.display()))?;
        let mut nginx = process::command(ns, "nginx");
        nginx.arg("-c").arg(&config);
        let servers = Self {
            _iperf: Process::start(&mut iperf, &directory.join("iperf3.log"))?,
            _nginx: Process::start(&mut nginx, &directory.join("nginx.log"))?,
        };
        for port in [IPERF_PORT, HTTP_PORT] {
            let addr = SocketAddr::new(Family::V4.loopback(), port);
            // From within, so that neither the pod's enrolment nor the agent matters.
            wait::until("the servers of the benchmark", || app::connect(ns, addr).ok());
        }
        Ok(servers)
    }
}

/// Measures everything once.
pub(crate) fn measure(
    mesh: &Mesh,
    mode: Mode,
    family: Family,
    sizes: &Sizes,
    results: &mut Results,
) -> Result<()> {
    bulk(mesh, mode, family, sizes, results).context(BULK)?;
    for (group, connections) in [(MANY, sizes.keepalive), (ONE, 1)] {
        let seconds = sizes.seconds;
        let (wrk, cpu) =
            Cpu::of(mesh.agent.pid(), || wrk(mesh, family, connections, seconds)).context(group)?;
        results.add(group, REQUESTS, PER_SECOND, mode, wrk.rate);
        results.add(group, P50, MICROSECONDS, mode, wrk.p50);
        results.add(group, P99, MICROSECONDS, mode, wrk.p99);
        for (kind, seconds) in cpu.per(wrk.requests / 1e5) {
            results.add(
                group,
                &format!("CPU per 100,000 requests, {kind}"),
                SECONDS,
                mode,
                seconds,
            );
        }
    }
    short(mesh, mode, family, sizes, results).context(SHORT)
}

fn bulk(mesh: &Mesh, mode: Mode, family: Family, sizes: &Sizes, results: &mut Results) -> Result<()> {
    let mut used = Cpu::default();
    for (name, reverse) in [(UPLOAD, false), (DOWNLOAD, true)] {
        let (rate, cpu) =
            Cpu::of(mesh.agent.pid(), || iperf(mesh, family, sizes.bytes, reverse)).context(name)?;
        results.add(BULK, name, GBITS, mode, rate);
        used = used + cpu;
    }
    let gibibytes = (2 * sizes.bytes) as f64 / f64::from(1 << 30);
    for (kind, seconds) in used.per(gibibytes) {
        results.add(BULK, &cpu_per_gibibyte(kind), SECONDS, mode, seconds);
    }
    Ok(())
}

/// Name of a figure of processor time.
pub(crate) fn cpu_per_gibibyte(kind: &str) -> String {
    format!("CPU per GiB, {kind}")
}

fn short(mesh: &Mesh, mode: Mode, family: Family, sizes: &Sizes, results: &mut Results) -> Result<()> {
    let lost = || -> u64 {
        [&mesh.client, &mesh.server]
            .map(|pod| counters::kernel(&pod.ns, "TcpExt", "TCPSynRetrans"))
            .iter()
            .sum()
    };
    let pair = Pair::start(&mesh.client.ns, &mesh.server, family);
    let before = lost();
    let (rate, cpu) = Cpu::of(mesh.agent.pid(), || {
        Ok(pair.connections(sizes.connections, sizes.concurrency)?)
    })?;
    results.add(SHORT, CONNECTIONS, PER_SECOND, mode, rate);
    results.add(SHORT, LOST_SYNS, COUNT, mode, (lost() - before) as f64);
    for (kind, seconds) in cpu.per(f64::from(sizes.connections) / 1e4) {
        results.add(
            SHORT,
            &format!("CPU per 10,000 connections, {kind}"),
            SECONDS,
            mode,
            seconds,
        );
    }
    Ok(())
}

/// One byte each way.
pub(crate) fn exchange(client: &mut TcpStream, server: &mut TcpStream) -> io::Result<()> {
    server.set_read_timeout(Some(app::IO_DEADLINE))?;
    client.write_all(&[1])?;
    server.read_exact(&mut [0])?;
    server.write_all(&[1])?;
    client.read_exact(&mut [0])
}

/// Moves `bytes` over one connection: Gbit/s, as the receiver saw them.
fn iperf(mesh: &Mesh, family: Family, bytes: u64, reverse: bool) -> Result<f64> {
    let addr = mesh.server.addr(family, IPERF_PORT);
    let mut command = process::command(&mesh.client.ns, "iperf3");
    command.args([
        "--json",
        "--client",
        &addr.ip().to_string(),
        "--port",
        &addr.port().to_string(),
    ]);
    command.args(["--bytes", &bytes.to_string()]);
    if reverse {
        command.arg("--reverse");
    }
    let text = output(&mut command, SPARE)?;
    let report: Value = serde_json::from_str(&text).context("iperf3's report is not JSON")?;
    report["end"]["sum_received"]["bits_per_second"]
        .as_f64()
        .map(|bits| bits / 1e9)
        .with_context(|| format!("iperf3 reports no rate: {text}"))
}

/// What wrk says.
#[derive(Debug, PartialEq)]
struct Wrk {
    requests: f64,
    rate: f64,
    /// Microseconds.
    p50: f64,
    p99: f64,
}

fn wrk(mesh: &Mesh, family: Family, connections: u32, seconds: u32) -> Result<Wrk> {
    let addr: SocketAddr = mesh.server.addr(family, HTTP_PORT);
    let mut command = process::command(&mesh.client.ns, "wrk");
    let threads = connections.min(2);
    command.args(["--latency", "--threads", &threads.to_string()]);
    command.args(["--connections", &connections.to_string()]);
    command.args(["--duration", &format!("{seconds}s"), &format!("http://{addr}/")]);
    let text = output(&mut command, SPARE + Duration::from_secs(seconds.into()))?;
    parse_wrk(&text).with_context(|| format!("wrk says: {text}"))
}

fn output(command: &mut Command, deadline: Duration) -> Result<String> {
    let (status, text) = process::output(command, deadline);
    ensure!(status.success(), "{command:?}: {status}: {text}");
    Ok(text)
}

fn parse_wrk(text: &str) -> Result<Wrk> {
    // Refused, reset and late ones would make the rest look better than it is.
    if let Some(errors) = text
        .lines()
        .find(|line| line.contains("Socket errors") || line.contains("Non-2xx"))
    {
        bail!("not every request was answered: {}", errors.trim());
    }
    let after = |name: &str| {
        let mut lines = text.lines().map(str::trim);
        let line = lines
            .find_map(|line| line.strip_prefix(name))
            .with_context(|| format!("no line {name}"))?;
        anyhow::Ok(line.trim())
    };
    let requests = text
        .lines()
        .find_map(|line| line.split_once(" requests in "))
        .context("no number of requests")?;
    Ok(Wrk {
        requests: requests.0.trim().parse()?,
        rate: after("Requests/sec:")?.parse()?,
        p50: in_microseconds(after("50%")?)?,
        p99: in_microseconds(after("99%")?)?,
    })
}

fn in_microseconds(text: &str) -> Result<f64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let factor = match &text[digits.len()..] {
        "us" => 1.0,
        "ms" => 1e3,
        "s" => 1e6,
        other => bail!("{other:?} is no unit of time"),
    };
    Ok(digits.parse::<f64>()? * factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = "Running 1s test @ http://10.0.0.1:8091/
  1 threads and 1 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency    52.11us   15.40us   1.02ms   92.11%
    Req/Sec    18.65k     1.02k   20.30k    70.00%
  Latency Distribution
     50%   49.00us
     75%   55.00us
     90%   64.00us
     99%    1.10ms
  18574 requests in 1.00s, 3.05MB read
Requests/sec:  18573.03
Transfer/sec:      3.05MB
";

    #[test]
    fn a_report_is_read() {
        let wrk = Wrk {
            requests: 18_574.0,
            rate: 18_573.03,
            p50: 49.0,
            p99: 1_100.0,
        };
        assert_eq!(parse_wrk(REPORT).unwrap(), wrk);
    }

    #[test]
    fn a_report_of_unanswered_requests_is_no_result() {
        let errors = format!("{REPORT}  Socket errors: connect 0, read 3, write 0, timeout 0\n");
        assert!(parse_wrk(&errors).is_err());
        assert!(parse_wrk("").is_err());
    }
}
