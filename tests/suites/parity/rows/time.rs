//! Connections that live longer than a request, begin before enrolment, or come again and again.

use std::{
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr, TcpStream},
    sync::{
        Barrier,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::Duration,
};

use redirector_tests::{app, counters, mesh::PORT, netns::Namespace, node::Host};
use socket2::{Domain, Protocol, Socket, Type};

use super::BOTH;
use crate::{
    scene::{Scene, Sysctl, failed},
    table::{Answer, Outcome, Row},
};

/// So many ports that each is used again and again, and so few that the row is short.
const NARROW: &str = "40000 40127";
/// More than the proxy's dials have ports: 61000 to 65535.
const MORE_THAN_DIAL_PORTS: u32 = 5_000;
/// Several times as many as [`NARROW`] has ports.
const MORE_THAN_NARROW: u32 = 600;
const AT_ONE_INSTANT: usize = 200;

pub(super) const ROWS: &[Row] = &[
    Row {
        name: "open_before_enrolment_out",
        families: BOTH,
        what: "a connection of the pod's to outside, opened before the pod was enrolled",
        flow: |scene| before_enrolment(scene, &scene.late, &scene.node.outside),
        ebpf: Outcome::Untouched,
        iptables: Outcome::Refused,
        seen: "bytes go both ways before, after enrolment, and after release",
        why: "to connection tracking, which begins with the rules, its next packet is new, and is redirected to a socket that does \
              not know it: a reset. The programs have no tag on its socket and no socket at its far end, and let it pass",
    },
    Row {
        name: "open_before_enrolment_to_a_mesh_pod",
        families: BOTH,
        what: "the same, to an enrolled pod",
        flow: |scene| {
            let _app = scene.serve(&scene.server, PORT, app::echo);
            let stream = app::connect(&scene.late.ns, scene.at(&scene.server, PORT));
            over_enrolment(scene, stream)
        },
        ebpf: Outcome::Inbound,
        iptables: Outcome::Refused,
        seen: "as above; the enrolled pod has captured it",
        why: "as above",
    },
    Row {
        name: "open_before_enrolment_in",
        families: BOTH,
        what: "a connection from outside, opened before the pod was enrolled",
        flow: |scene| before_enrolment(scene, &scene.node.outside, &scene.late),
        ebpf: Outcome::Untouched,
        iptables: Outcome::Refused,
        seen: "bytes go both ways before, after enrolment, and after release",
        why: "as above",
    },
    Row {
        name: "half_closed_to_a_mesh_pod",
        families: BOTH,
        what: "a client that has said all, and waits longer than any timer of the namespace for an answer",
        flow: |scene| half_closed(scene, &scene.client, &scene.server),
        ebpf: Outcome::Hbone,
        iptables: Outcome::Dropped,
        seen: "the whole answer comes. The timers of half-closed connections (tcp_fin_timeout; connection tracking's, 60 s by \
               default) are set to a second",
        why: "the programs keep no state that can expire. To connection tracking the connection is gone, and the answer belongs to \
              none that it knows",
    },
    Row {
        name: "half_closed_comes_in",
        families: BOTH,
        what: "the same, outside to pod",
        flow: |scene| half_closed(scene, &scene.node.outside, &scene.server),
        ebpf: Outcome::Inbound,
        iptables: Outcome::Dropped,
        seen: "as above",
        why: "as above",
    },
    Row {
        name: "ports_used_again_to_a_mesh_pod",
        families: BOTH,
        what: "5,000 connections in turn out of 128 client ports: each leg meets the TIME_WAIT of earlier ones",
        flow: |scene| {
            let _narrow = Sysctl::set(&scene.client.ns, "net/ipv4/ip_local_port_range", NARROW);
            again(scene, &scene.client, &scene.server, MORE_THAN_DIAL_PORTS)
        },
        ebpf: Outcome::Hbone,
        iptables: Outcome::Hbone,
        seen: "every connection is answered; with the programs, TCPSynRetrans stays as it was in every namespace",
        why: "",
    },
    Row {
        name: "ports_used_again_to_outside",
        families: BOTH,
        what: "600 connections in turn out of 128 ports for application and proxy together",
        flow: |scene| {
            let _narrow = Sysctl::set(&scene.client.ns, "net/ipv4/ip_local_port_range", NARROW);
            again(scene, &scene.client, &scene.node.outside, MORE_THAN_NARROW)
        },
        ebpf: Outcome::Outbound,
        iptables: Outcome::Outbound,
        seen: "as above",
        why: "",
    },
    Row {
        name: "ports_used_again_come_in",
        families: BOTH,
        what: "600 connections in turn out of 128 ports of the caller",
        flow: |scene| {
            let _narrow = Sysctl::set(&scene.node.outside.ns, "net/ipv4/ip_local_port_range", NARROW);
            again(scene, &scene.node.outside, &scene.server, MORE_THAN_NARROW)
        },
        ebpf: Outcome::Inbound,
        iptables: Outcome::Inbound,
        seen: "as above",
        why: "",
    },
    Row {
        name: "syn_cookies_to_a_mesh_pod",
        families: BOTH,
        what: "connections whose every leg is accepted by SYN cookie",
        flow: |scene| {
            let _forced = cookies(scene);
            // A pod that was not enrolled has no tunnel yet, so that 15008 too is asked.
            scene.agent.enrol(&scene.late);
            let answer = scene.sees(&scene.late, &scene.server);
            scene.agent.release(&scene.late);
            assert_eq!(scene.sees(&scene.client, &scene.server), answer);
            answer
        },
        ebpf: Outcome::Hbone,
        iptables: Outcome::Hbone,
        seen: "the application sees the client's address; the kernel has sent and taken cookies in both pods",
        why: "",
    },
    Row {
        name: "syn_cookies_to_outside",
        families: BOTH,
        what: "the same, to outside",
        flow: |scene| {
            let _forced = cookies(scene);
            by_an_unused_port(scene, &scene.client, &scene.node.outside)
        },
        ebpf: Outcome::Outbound,
        iptables: Outcome::Outbound,
        seen: "as above",
        why: "",
    },
    Row {
        name: "syn_cookies_come_in",
        families: BOTH,
        what: "the same, outside to pod",
        flow: |scene| {
            let _forced = cookies(scene);
            by_an_unused_port(scene, &scene.node.outside, &scene.server)
        },
        ebpf: Outcome::Inbound,
        iptables: Outcome::Inbound,
        seen: "as above",
        why: "",
    },
    Row {
        name: "at_one_instant_to_a_mesh_pod",
        families: BOTH,
        what: "200 connections at one instant",
        flow: |scene| at_once(scene, &scene.client, &scene.server),
        ebpf: Outcome::Hbone,
        iptables: Outcome::Hbone,
        seen: "every connection is answered",
        why: "",
    },
    Row {
        name: "at_one_instant_to_outside",
        families: BOTH,
        what: "the same, to outside",
        flow: |scene| at_once(scene, &scene.client, &scene.node.outside),
        ebpf: Outcome::Outbound,
        iptables: Outcome::Outbound,
        seen: "as above",
        why: "",
    },
    Row {
        name: "at_one_instant_come_in",
        families: BOTH,
        what: "the same, outside to pod",
        flow: |scene| at_once(scene, &scene.node.outside, &scene.server),
        ebpf: Outcome::Inbound,
        iptables: Outcome::Inbound,
        seen: "as above",
        why: "",
    },
    Row {
        name: "both_ends_open",
        families: BOTH,
        what: "pod and outside connect to each other's port at the same time (RFC 9293, 3.5)",
        flow: both_ends_open,
        ebpf: Outcome::Refused,
        iptables: Outcome::Refused,
        seen: "neither end gets a byte of the other",
        why: "between two ends without a listener no proxy can stand: it accepts the pod's connection, has no one to connect to, \
              and resets",
    },
];

fn before_enrolment(scene: &Scene, from: &Host, to: &Host) -> Answer {
    let _app = scene.serve(to, PORT, app::echo);
    over_enrolment(scene, app::connect(&from.ns, scene.at(to, PORT)))
}

/// Talks over a connection before, during and after the time in which `late` is enrolled.
fn over_enrolment(scene: &Scene, stream: io::Result<TcpStream>) -> Answer {
    let mut stream = stream.expect("an unenrolled pod connects");
    let mut talk = || -> io::Result<()> {
        // More than one segment, so that the answer has several packets each way.
        let said = [7; 20_000];
        let mut heard = [0; 20_000];
        stream.write_all(&said)?;
        stream.read_exact(&mut heard)?;
        assert_eq!(heard, said);
        Ok(())
    };
    talk().expect("an unenrolled pod talks");
    scene.agent.enrol(&scene.late);
    let enrolled = talk();
    scene.agent.release(&scene.late);
    match enrolled.and_then(|()| talk()) {
        Ok(()) => Answer::Answered,
        Err(error) => failed(&error),
    }
}

fn half_closed(scene: &Scene, from: &Host, to: &Host) -> Answer {
    /// Waits until timers of a second have run out, and answers with who asked.
    fn slow(mut stream: TcpStream, peer: SocketAddr) -> io::Result<()> {
        let mut line = Vec::new();
        stream.read_to_end(&mut line)?;
        thread::sleep(Duration::from_millis(2500));
        write!(stream, "hello {}", peer.ip())
    }
    let timers = [
        "net/ipv4/tcp_fin_timeout",
        "net/netfilter/nf_conntrack_tcp_timeout_close_wait",
        "net/netfilter/nf_conntrack_tcp_timeout_fin_wait",
        "net/netfilter/nf_conntrack_tcp_timeout_last_ack",
    ];
    let _short: Vec<Sysctl<'_>> = [&scene.client, &scene.server]
        .into_iter()
        .flat_map(|pod| timers.map(|timer| Sysctl::try_set(&pod.ns, timer, "1")))
        .flatten()
        .collect();
    let _app = scene.serve(to, PORT, slow);
    scene.asks(&from.ns, scene.at(to, PORT), from.ip(scene.family))
}

/// Connections whose server closes first, and no SYN of which may be lost.
fn again(scene: &Scene, from: &Host, to: &Host, connections: u32) -> Answer {
    const CONCURRENCY: u32 = 16;
    let _app = scene.serve(to, PORT, app::who);
    let (addr, source) = (scene.at(to, PORT), from.ip(scene.family));
    let lost = || {
        [&scene.client.ns, &scene.server.ns, &scene.node.outside.ns]
            .map(|ns| counters::kernel(ns, "TcpExt", "TCPSynRetrans"))
    };
    let before = lost();
    let left = AtomicU32::new(connections);
    let client = || -> io::Result<()> {
        let take = |left: u32| left.checked_sub(1);
        while left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, take)
            .is_ok()
        {
            let mut stream = app::connect(&from.ns, addr)?;
            stream.write_all(b"hello\n")?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            assert_eq!(answer, format!("hello {source}"));
        }
        Ok(())
    };
    let ended: Vec<io::Result<()>> = thread::scope(|scope| {
        let clients: Vec<_> = (0..CONCURRENCY).map(|_| scope.spawn(client)).collect();
        clients
            .into_iter()
            .map(|client| client.join().expect("a client ends"))
            .collect()
    });
    // Connection tracking loses one now and then.
    if scene.backend.is_ebpf() {
        assert_eq!(lost(), before, "SYNs were lost in client, server or outside");
    }
    match ended.into_iter().find_map(Result::err) {
        None => Answer::Answered,
        Some(error) => failed(&error),
    }
}

/// Forces SYN cookies in both pods, and counts them.
fn cookies<'a>(scene: &'a Scene) -> impl Drop + 'a {
    struct Forced<'a> {
        namespaces: [&'a Namespace; 2],
        before: [u64; 2],
        _sysctls: Vec<Sysctl<'a>>,
    }
    fn taken(ns: &Namespace) -> u64 {
        counters::kernel(ns, "TcpExt", "SyncookiesRecv")
    }
    impl Drop for Forced<'_> {
        fn drop(&mut self) {
            let after = self.namespaces.map(taken);
            // Each row has a leg in one of the pods at least.
            assert!(
                thread::panicking() || after.iter().sum::<u64>() > self.before.iter().sum(),
                "no SYN cookie was taken: {after:?}"
            );
        }
    }
    let namespaces = [&scene.client.ns, &scene.server.ns];
    let mut sysctls: Vec<Sysctl<'a>> = Vec::new();
    for ns in [&scene.client.ns, &scene.server.ns, &scene.late.ns] {
        sysctls.push(Sysctl::set(ns, "net/ipv4/tcp_syncookies", "2"));
    }
    Forced {
        namespaces,
        before: namespaces.map(taken),
        _sysctls: sysctls,
    }
}

/// Asks from a port that no connection before had. A SYN that meets TIME_WAIT gets no cookie, whatever the sysctl says:
/// tcp_conn_request goes on from the old connection's sequence numbers (net/ipv4/tcp_input.c, v6.18, `isn`).
fn by_an_unused_port(scene: &Scene, from: &Host, to: &Host) -> Answer {
    /// Neither the kernel nor the proxy gives this out.
    const UNUSED: u16 = 20_012;
    let _app = scene.serve(to, PORT, app::who);
    let source = from.ip(scene.family);
    scene.asks_by(&from.ns, scene.at(to, PORT), source, |socket| {
        socket.set_reuse_address(true)?;
        socket.bind(&SocketAddr::new(source, UNUSED).into())
    })
}

fn at_once(scene: &Scene, from: &Host, to: &Host) -> Answer {
    let _app = scene.serve(to, PORT, app::who);
    let (addr, source) = (scene.at(to, PORT), from.ip(scene.family));
    let together = Barrier::new(AT_ONE_INSTANT);
    let answers: Vec<Answer> = thread::scope(|scope| {
        let client = || {
            together.wait();
            scene.asks(&from.ns, addr, source)
        };
        let clients: Vec<_> = (0..AT_ONE_INSTANT).map(|_| scope.spawn(client)).collect();
        clients
            .into_iter()
            .map(|client| client.join().expect("a client ends"))
            .collect()
    });
    let odd = answers.iter().find(|answer| **answer != Answer::Answered);
    *odd.unwrap_or(&Answer::Answered)
}

fn both_ends_open(scene: &Scene) -> Answer {
    /// Neither the kernel nor the proxy gives these out.
    const PORTS: [u16; 2] = [20_010, 20_011];
    const DEADLINE: Duration = Duration::from_secs(5);
    let ends = [&*scene.client, &scene.node.outside];
    let addrs = [0, 1].map(|at| scene.at(ends[at], PORTS[at]));
    // Both are bound before one begins, so that nothing but the connections can fail while they wait for each other.
    let sockets = [0, 1].map(|at| {
        let socket = ends[at]
            .ns
            .run(|| Socket::new(Domain::for_address(addrs[at]), Type::STREAM, Some(Protocol::TCP)));
        let socket = socket.expect("there are sockets");
        socket.set_reuse_address(true).expect("the socket is new");
        socket
            .set_read_timeout(Some(DEADLINE))
            .expect("the time is valid");
        socket.bind(&addrs[at].into()).expect("the port is free");
        socket
    });
    let together = Barrier::new(2);
    let talk = |socket: Socket, to: SocketAddr| -> io::Result<usize> {
        together.wait();
        socket.connect_timeout(&to.into(), DEADLINE)?;
        let mut stream = TcpStream::from(socket);
        stream.write_all(b"hello\n")?;
        stream.shutdown(Shutdown::Write)?;
        stream.read(&mut [0; 64])
    };
    let [here, there] = sockets;
    let heard = thread::scope(|scope| {
        let talk = &talk;
        let talkers = [(here, addrs[1]), (there, addrs[0])];
        let talkers = talkers.map(|(socket, to)| scope.spawn(move || talk(socket, to)));
        talkers.map(|talker| talker.join().expect("a talker ends"))
    });
    match heard {
        [Ok(0) | Err(_), Ok(0) | Err(_)] => Answer::Refused,
        _ => Answer::Answered,
    }
}
