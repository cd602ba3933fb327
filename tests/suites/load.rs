//! Volume and churn: a whole gigabyte each way, and as many short connections as it takes to meet every port's TIME_WAIT.

use std::{
    io::{Read, Write},
    net::{Shutdown, SocketAddr},
    process::ExitCode,
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::Duration,
};

use redirector_tests::{
    agent::Options,
    app::{self, App},
    counters,
    mesh::{Mesh, PORT},
    netns::Namespace,
    node::Family,
    suite::{Case, Needs, case, main as suite},
    wait,
};

type MakeMesh = fn(Options) -> Mesh;

const TRANSFER_BYTES: u64 = 1 << 30;
/// More than an ephemeral port range has: with fewer than some 4,000 no port is used again. `REDIRECTOR_CHURN` says another
/// number, for machines that are too slow for this one; the ports are as many fewer then.
const CONNECTIONS: u32 = 30_000;
const CONCURRENCY: u32 = 32;

fn main() -> ExitCode {
    let mut cases: Vec<Case> = Vec::new();
    let meshes: [(&str, MakeMesh); 2] = [("hbone", Mesh::hbone), ("plaintext", Mesh::plaintext)];
    for (kind, mesh) in meshes {
        for family in Family::BOTH {
            let name = family.name();
            cases.push(case(format!("a_gigabyte_each_way_{kind}_{name}"), move || {
                a_gigabyte_each_way(mesh, family)
            }));
            cases.push(case(format!("no_syn_is_lost_{kind}_{name}"), move || {
                no_syn_is_lost(mesh, family)
            }));
        }
    }
    cases.push(case(
        "applications_that_do_not_read_cost_a_bounded_amount",
        applications_that_do_not_read_cost_a_bounded_amount,
    ));
    suite(Needs::Agent, 1, cases)
}

fn a_gigabyte_each_way(mesh: MakeMesh, family: Family) {
    let mesh = mesh(Options::default());
    let _hash = App::start(&mesh.server.ns, (family.any(), PORT).into(), app::hash);
    let _source = App::start(&mesh.server.ns, (family.any(), PORT + 1).into(), app::source);

    let mut up = app::connect(&mesh.client.ns, mesh.server.addr(family, PORT)).unwrap();
    let sent = app::write_hashed(&mut up, TRANSFER_BYTES).unwrap();
    up.shutdown(Shutdown::Write).unwrap();
    let mut received = String::new();
    up.read_to_string(&mut received).unwrap();
    assert_eq!(received, sent);

    let mut down = app::connect(&mesh.client.ns, mesh.server.addr(family, PORT + 1)).unwrap();
    writeln!(down, "{TRANSFER_BYTES}").unwrap();
    // The source sends the same bytes as were sent up.
    assert_eq!(app::read_hashed(&mut down).unwrap(), sent);
}

fn no_syn_is_lost(mesh: MakeMesh, family: Family) {
    let mesh = mesh(Options::default());
    let _app = App::start(&mesh.server.ns, (family.any(), PORT).into(), app::who);
    let seen = mesh.client.ip(family).to_string();
    let connections = match std::env::var("REDIRECTOR_CHURN") {
        Ok(number) => {
            let number = number.parse().expect("REDIRECTOR_CHURN is a number");
            let range = format!("20000 {}", 20_000 + number / 4);
            mesh.client
                .ns
                .set_sysctl("net/ipv4/ip_local_port_range", &range)
                .unwrap();
            number
        }
        Err(_) => CONNECTIONS,
    };
    churn(
        &mesh.client.ns,
        mesh.server.addr(family, PORT),
        &seen,
        connections,
    );
    for (name, pod) in [("client", &mesh.client), ("server", &mesh.server)] {
        assert_eq!(
            counters::kernel(&pod.ns, "TcpExt", "TCPSynRetrans"),
            0,
            "SYNs were lost in the {name}'s pod"
        );
    }
}

/// Short connections whose server closes first; every one is answered.
fn churn(ns: &Namespace, addr: SocketAddr, seen: &str, connections: u32) {
    let left = AtomicU32::new(connections);
    let take = || {
        left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1))
            .is_ok()
    };
    let client = || {
        while take() {
            let mut stream = app::connect(ns, addr).unwrap();
            stream.write_all(b"hello\n").unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            assert_eq!(answer.strip_prefix("hello "), Some(seen));
        }
    };
    thread::scope(|scope| {
        for _ in 0..CONCURRENCY {
            scope.spawn(client);
        }
    });
}

/// What a pod's applications leave unread lies in the agent's memory, up to the pod's budget of windows and not beyond.
fn applications_that_do_not_read_cost_a_bounded_amount() {
    const STALLED: usize = 300;
    /// 256 MiB of windows beyond the first 16 MiB of each of a few tunnels, 400 KiB of send buffer per stream, and the agent
    /// itself. Without a budget it was some 1,400.
    const BOUND_MIB: u64 = 800;
    let mesh = Mesh::hbone(Options::default());
    let addr = mesh.server.addr(Family::V4, PORT);
    let listener = mesh
        .server
        .ns
        .run(|| std::net::TcpListener::bind(("0.0.0.0", PORT)))
        .unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            for stream in listener.incoming().take(STALLED) {
                let mut stream = stream.unwrap();
                stream.set_write_timeout(Some(Duration::from_secs(3))).unwrap();
                scope.spawn(move || {
                    let block = vec![1; 64 << 10];
                    // Until nobody takes more.
                    while stream.write_all(&block).is_ok() {}
                });
            }
        });
        let held: Vec<_> = (0..STALLED)
            .map(|_| app::connect(&mesh.client.ns, addr).unwrap())
            .collect();
        let mut most = 0;
        wait::until("the senders to be stopped", || {
            let now = resident_mib(mesh.agent.pid());
            let still = now <= most;
            most = most.max(now);
            thread::sleep(Duration::from_secs(1));
            (still && now > 100).then_some(())
        });
        assert!(most < BOUND_MIB, "{most} MiB");
        drop(held);
    });
}

fn resident_mib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() >> 10
}
