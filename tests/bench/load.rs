//! The traffic of all benchmarks: bulk transfers, short connections, requests on an open connection. Every operation has the
//! kit's deadline, and every amount is the caller's.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    net::{Shutdown, SocketAddr, TcpStream},
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

use redirector_tests::{
    app::{self, App},
    mesh::PORT,
    netns::Namespace,
    node::{Family, Host},
    wait,
};

use crate::stats;

const BLOCK_BYTES: usize = 256 << 10;

/// Direction of a bulk transfer, seen from the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    Upload,
    Download,
}

/// The applications of a server, and the client that uses them.
pub(crate) struct Pair<'a> {
    client: &'a Namespace,
    server: &'a Host,
    family: Family,
    _apps: [App; 4],
}

impl<'a> Pair<'a> {
    /// Starts the applications.
    pub(crate) fn start(client: &'a Namespace, server: &'a Host, family: Family) -> Self {
        let serve = |offset, handler| App::start(&server.ns, (family.any(), PORT + offset).into(), handler);
        Self {
            client,
            server,
            family,
            _apps: [
                serve(0, sink),
                serve(1, source),
                serve(2, app::who),
                serve(3, app::echo),
            ],
        }
    }

    fn at(&self, offset: u16) -> SocketAddr {
        self.server.addr(self.family, PORT + offset)
    }

    /// Moves `bytes` over `streams` connections at once: Gbit/s.
    pub(crate) fn throughput(&self, way: Way, bytes: u64, streams: u32) -> io::Result<f64> {
        let share = bytes / u64::from(streams);
        let transfer = || match way {
            Way::Upload => upload(self.client, self.at(0), share),
            Way::Download => download(self.client, self.at(1), share),
        };
        let begin = Instant::now();
        at_once(streams, transfer)?;
        let moved = share * u64::from(streams);
        Ok(moved as f64 * 8.0 / 1e9 / begin.elapsed().as_secs_f64())
    }

    /// Opens, uses and closes `connections`, `concurrency` at a time: connections per second.
    pub(crate) fn connections(&self, connections: u32, concurrency: u32) -> io::Result<f64> {
        let left = AtomicU32::new(connections);
        let take = || {
            left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1))
                .is_ok()
        };
        let client = || -> io::Result<()> {
            while take() {
                // The server closes first, and keeps the TIME_WAIT: the client's ports would run out within some rounds.
                let mut stream = app::connect(self.client, self.at(2))?;
                stream.write_all(b"hello\n")?;
                io::copy(&mut stream, &mut io::sink())?;
            }
            Ok(())
        };
        let begin = Instant::now();
        at_once(concurrency, client)?;
        Ok(f64::from(connections) / begin.elapsed().as_secs_f64())
    }

    /// Sends one byte and waits for its echo, `requests` times, on several connections one after another: median and 99th
    /// percentile, in microseconds. The scheduler keeps the threads of a connection where it first put them, so that one alone
    /// would tell of its luck.
    pub(crate) fn latency(&self, requests: usize) -> io::Result<(f64, f64)> {
        const CONNECTIONS: usize = 10;
        let mut times: Vec<f64> = Vec::with_capacity(requests);
        for _ in 0..CONNECTIONS {
            let mut stream = app::connect(self.client, self.at(3))?;
            stream.set_nodelay(true)?;
            for _ in 0..requests.div_ceil(CONNECTIONS) {
                let begin = Instant::now();
                stream.write_all(&[1])?;
                stream.read_exact(&mut [0])?;
                times.push(microseconds(begin.elapsed()));
            }
        }
        times.sort_by(f64::total_cmp);
        Ok((stats::quantile(&times, 0.5), stats::quantile(&times, 0.99)))
    }
}

/// In microseconds.
pub(crate) fn microseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// Runs `work` in `count` threads, and waits for all of them.
fn at_once(count: u32, work: impl Fn() -> io::Result<()> + Sync) -> io::Result<()> {
    thread::scope(|scope| {
        let threads: Vec<_> = (0..count).map(|_| scope.spawn(&work)).collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().expect("a client does not panic"))
    })
}

fn upload(client: &Namespace, addr: SocketAddr, bytes: u64) -> io::Result<()> {
    let mut stream = app::connect(client, addr)?;
    write_bytes(&mut stream, bytes)?;
    stream.shutdown(Shutdown::Write)?;
    let mut received = String::new();
    stream.read_to_string(&mut received)?;
    arrived(bytes, received.trim().parse().unwrap_or(0))
}

fn download(client: &Namespace, addr: SocketAddr, bytes: u64) -> io::Result<()> {
    let mut stream = app::connect(client, addr)?;
    writeln!(stream, "{bytes}")?;
    arrived(bytes, io::copy(&mut stream, &mut io::sink())?)
}

fn arrived(sent: u64, received: u64) -> io::Result<()> {
    if sent == received {
        return Ok(());
    }
    Err(io::Error::other(format!(
        "{received} bytes of {sent} have arrived"
    )))
}

/// Takes everything, and then says how much it was.
fn sink(mut stream: TcpStream, _: SocketAddr) -> io::Result<()> {
    let received = io::copy(&mut stream, &mut io::sink())?;
    writeln!(stream, "{received}")
}

/// Reads a number, and sends as many bytes.
fn source(mut stream: TcpStream, _: SocketAddr) -> io::Result<()> {
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line)?;
    let bytes = line
        .trim()
        .parse()
        .map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
    write_bytes(&mut stream, bytes)
}

fn write_bytes(stream: &mut TcpStream, mut bytes: u64) -> io::Result<()> {
    let block = vec![0x5a; BLOCK_BYTES];
    while bytes > 0 {
        if wait::interrupted() {
            return Err(io::Error::other("interrupted"));
        }
        let length = usize::try_from(bytes).map_or(BLOCK_BYTES, |left| left.min(BLOCK_BYTES));
        stream.write_all(&block[..length])?;
        bytes -= length as u64;
    }
    Ok(())
}
