//! The demonstration: the main job on real traffic, in a node made of namespaces, with a short proof of what happened.
//!
//! `cargo xtask demo` builds everything and starts this. All that is made is removed at the end, after a failure, and on
//! Ctrl-C at any moment.
#![forbid(unsafe_code)]

mod proof;

use std::{
    panic,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Result, bail, ensure};
use clap::Parser;
use redirector_tests::{
    agent::{Agent, Options},
    app::{self, App},
    mesh::PORT,
    node::{Family, Host, Node, Pod},
    process::{command, output},
    wait,
    workloads::Workloads,
};

use crate::proof::Proof;

/// Shows the redirector's main job on real traffic between network namespaces.
#[derive(Parser)]
struct Cli {
    /// Leave everything up until Ctrl-C, and print commands to play with
    #[arg(long)]
    keep: bool,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    if let Err(error) = wait::watch_signals() {
        eprintln!("error: watching signals: {error}");
        return ExitCode::FAILURE;
    }
    // Waits end by a panic when we are interrupted; that is no fault to report.
    let report = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        if !wait::interrupted() {
            report(info);
        }
    }));
    match panic::catch_unwind(|| run(cli.keep)) {
        Ok(Ok(())) => ExitCode::SUCCESS,
        _ if wait::interrupted() => {
            eprintln!("interrupted; everything has been removed");
            ExitCode::from(130)
        }
        Ok(Err(error)) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
        Err(_) => ExitCode::FAILURE,
    }
}

/// Everything that is up; the agent goes first.
struct Demo {
    agent: Agent,
    client: Pod,
    server: Pod,
    node: Node,
}

fn run(keep: bool) -> Result<()> {
    ensure!(
        nix::unistd::geteuid().is_root(),
        "network namespaces and eBPF need root: sudo cargo xtask demo"
    );
    println!("\nThe redirector on real traffic: two pods, their node, and the world outside.\n");
    let demo = set_up()?;
    let _apps = [&*demo.server, &demo.node.outside]
        .into_iter()
        .flat_map(|host| {
            Family::BOTH.map(|family| App::start(&host.ns, (family.any(), PORT).into(), app::http))
        })
        .collect::<Vec<_>>();
    let mut proof = Proof::begin(&demo);
    pod_to_pod(&demo, &mut proof)?;
    through(&demo, "outside to pod", &demo.node.outside, &demo.server)?;
    through(&demo, "pod to outside", &demo.client, &demo.node.outside)?;
    proof.counters(&demo)?;
    proof::nothing_else_at_work(&[&demo.client, &demo.server])?;
    if keep {
        play(&demo);
        wait::until_interrupted();
        println!("\nremoving everything");
        return Ok(());
    }
    println!(
        "\nAll of it held. Everything has been removed; `cargo xtask demo --keep` leaves it up to play with."
    );
    Ok(())
}

fn set_up() -> Result<Demo> {
    let node = Node::create()?;
    go_on()?;
    let (client, server) = (node.create_pod("client")?, node.create_pod("server")?);
    for (what, host) in [
        ("client", &*client),
        ("server", &*server),
        ("outside", &node.outside),
        ("node", &node.host),
    ] {
        println!("  {what:8} {:32} {:15} {}", host.ns.name(), host.v4, host.v6);
    }
    go_on()?;
    let start = Instant::now();
    let agent = Agent::try_start(&node, &Workloads::hbone([&client, &server]), Options::default())?;
    println!(
        "\n  agent    process {}, ready after {:.0?}",
        agent.pid(),
        start.elapsed()
    );
    for pod in [&client, &server] {
        go_on()?;
        let start = Instant::now();
        let answer = agent.cmdadd(pod);
        ensure!(
            answer.status == 200,
            "enrolling {}: {}\n{}",
            pod.name,
            answer.body,
            agent.log()
        );
        println!(
            "  enrolled {} in {:.1?}, by POST /cmdadd on the agent's Unix socket",
            pod.name,
            start.elapsed()
        );
    }
    Ok(Demo {
        agent,
        client,
        server,
        node,
    })
}

fn go_on() -> Result<()> {
    if wait::interrupted() {
        bail!("interrupted");
    }
    Ok(())
}

/// An HTTP request by curl; the answer tells whom the application saw.
fn request(from: &Host, to: &Host, family: Family, path: &str) -> Result<String> {
    go_on()?;
    let url = format!("http://{}{path}", to.addr(family, PORT));
    let mut curl = command(&from.ns, "curl");
    curl.args([
        "--silent",
        "--show-error",
        "--fail",
        "--globoff",
        "--max-time",
        "20",
        &url,
    ]);
    let (status, text) = output(&mut curl, Duration::from_secs(30));
    ensure!(
        status.success(),
        "curl {url} in {}: {}",
        from.ns.name(),
        text.trim()
    );
    let seen = text
        .lines()
        .find_map(|line| line.strip_prefix("you are "))
        .unwrap_or_default();
    let own = from.ip(family).to_string();
    ensure!(seen == own, "the application saw {seen}, and not {own}");
    Ok(url)
}

fn pod_to_pod(demo: &Demo, proof: &mut Proof) -> Result<()> {
    println!("\npod to pod");
    for family in Family::BOTH {
        let path = format!("/a-secret-{}", family.name());
        let capture = demo.node.capture(&demo.server);
        let url = request(&demo.client, &demo.server, family, &path)?;
        let segments = capture.stop();
        println!(
            "  curl {url}\n    the application saw {}, the client's own address",
            demo.client.ip(family)
        );
        proof.wire(&segments, path.as_bytes())?;
        proof.identities(demo, family)?;
    }
    Ok(())
}

fn through(demo: &Demo, what: &str, from: &Host, to: &Host) -> Result<()> {
    println!("\n{what}");
    for family in Family::BOTH {
        let url = request(from, to, family, "/")?;
        let own = from.ip(family);
        println!("  curl {url}\n    the application saw {own}, the client's own address");
        proof::plain(demo, own)?;
    }
    Ok(())
}

fn play(demo: &Demo) {
    let [client, server, node] = [&demo.client.ns, &demo.server.ns, &demo.node.host.ns].map(|ns| ns.name());
    let directory = demo.node.directory().display();
    let socket = demo.agent.cni_socket();
    let event = redirector_tests::cni::event(&demo.client);
    println!(
        "
It stays up until Ctrl-C. To play with it, as root in another terminal:
  ip netns exec {client} curl http://{server_addr}/anything
  ip netns exec {node} tcpdump -ni any tcp port 15008
  ip netns exec {node} curl -s http://127.0.0.1:15020/metrics
  ip netns exec {server} ss -ltn
  tail -f {directory}/agent.log
  $EDITOR {directory}/workloads.yaml
  curl --unix-socket {socket} http://unix/cmddel -d '{event}'
  kill -9 {pid}      # captured pods are refused from then on",
        server_addr = demo.server.addr(Family::V4, PORT),
        socket = socket.display(),
        pid = demo.agent.pid(),
    );
}
