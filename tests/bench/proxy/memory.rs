//! The agent's memory: idle, with many idle connections, and after a burst.

use std::{
    net::{SocketAddr, TcpListener, TcpStream},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use redirector_tests::{
    agent::Options,
    app,
    mesh::{Mesh, PORT},
    node::Family,
    wait,
};

use super::{Results, Sizes, modes::Mode, traffic};
use crate::{
    load::{Pair, Way},
    results::MIB,
    stats::Ratio,
    table::{Found, by_ratio},
    usage::resident_mib,
};

/// Group of figures, and their names.
pub(crate) const GROUP: &str = "memory of the agent";
pub(crate) const IDLE: &str = "idle, two pods";
pub(crate) const BUSY: &str = "right after bulk and short connections";
pub(crate) const RESTED: &str = "20 s later";

/// What is freed is given back after a while.
const REST: Duration = Duration::from_secs(20);
/// Beside the ports of [`Pair`].
const HOLD_PORT: u16 = PORT + 20;

/// Name of a figure.
pub(crate) fn with_connections(connections: u32) -> String {
    format!("with {connections} idle connections")
}

/// Name of a figure.
pub(crate) fn after_connections() -> String {
    "20 s after these were closed".to_owned()
}

/// What is left of a burst's memory, by what it took.
pub(crate) fn shrinking(results: &Results) -> Option<Found> {
    let values = |name| Some(results.find(GROUP, name)?.values(Mode::Hbone));
    Ratio::of(values(RESTED)?, values(BUSY)?).map(by_ratio)
}

/// Measures a new agent, over HBONE.
pub(crate) fn measure(family: Family, options: Options, sizes: &Sizes, results: &mut Results) -> Result<()> {
    let mesh = Mode::Hbone.mesh(options);
    let mut add = |name: &str| -> Result<()> {
        let mib = resident_mib(mesh.agent.pid())?;
        results.add(GROUP, name, MIB, Mode::Hbone, mib);
        Ok(())
    };
    thread::sleep(Duration::from_secs(3));
    add(IDLE)?;

    let held = hold(&mesh, family, sizes.idle_connections).context("idle connections")?;
    thread::sleep(Duration::from_secs(3));
    add(&with_connections(sizes.idle_connections))?;
    drop(held);
    thread::sleep(REST);
    add(&after_connections())?;

    {
        let pair = Pair::start(&mesh.client.ns, &mesh.server, family);
        for way in [Way::Upload, Way::Download] {
            pair.throughput(way, sizes.bytes, 4)?;
        }
        pair.connections(sizes.connections, sizes.concurrency)?;
    }
    add(BUSY)?;
    thread::sleep(REST);
    add(RESTED)
}

/// Both ends of connections over which one byte went each way.
fn hold(mesh: &Mesh, family: Family, count: u32) -> Result<Vec<(TcpStream, TcpStream)>> {
    let listener = mesh
        .server
        .ns
        .run(|| TcpListener::bind(SocketAddr::new(family.any(), HOLD_PORT)))
        .context("listening")?;
    let addr = mesh.server.addr(family, HOLD_PORT);
    let mut held = Vec::new();
    for _ in 0..count {
        ensure!(!wait::interrupted(), "interrupted");
        let mut client = app::connect(&mesh.client.ns, addr)?;
        let (mut server, _) = listener.accept()?;
        traffic::exchange(&mut client, &mut server)?;
        held.push((client, server));
    }
    Ok(held)
}
