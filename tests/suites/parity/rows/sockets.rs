//! Sockets that are not as most are.

use std::{
    io,
    net::{SocketAddr, TcpStream},
};

use redirector_tests::{
    app,
    capture::contains,
    mesh::PORT,
    node::{Family, Host},
};
use socket2::{Domain, Protocol, Socket, Type};

use super::{BOTH, V4, V6};
use crate::{
    scene::{Scene, Sysctl},
    table::{Answer, Outcome, Row},
};

/// `include/linux/socket.h`.
const MSG_FASTOPEN: i32 = 0x2000_0000;
/// What a kernel without Multipath TCP says to its sockets.
const EPROTONOSUPPORT: i32 = 93;

pub(super) const ROWS: &[Row] = &[
    Row {
        name: "dual_stack_socket",
        families: V4,
        what: "an IPv6 socket that connects to ::ffff:a.b.c.d",
        flow: |scene| {
            let _app = scene.serve(&scene.server, PORT, app::who);
            let to = SocketAddr::from((scene.server.v4.to_ipv6_mapped(), PORT));
            scene.asks(&scene.client.ns, to, scene.client.v4.into())
        },
        ebpf: Outcome::Hbone,
        iptables: Outcome::Hbone,
        seen: "the application sees the client's address",
        why: "",
    },
    Row {
        name: "mark_0x539",
        families: BOTH,
        what: "a socket with the proxy's mark (CAP_NET_ADMIN), to another enrolled pod",
        flow: |scene| marked(scene, 0x539),
        ebpf: Outcome::Hbone,
        iptables: Outcome::Inbound,
        seen: "",
        why: "to the programs the proxy is whoever has the agent's tag on its socket, which a pod can't set. Istio's rules go by \
              the mark, so the connection leaves in plain",
    },
    Row {
        name: "mark_0x539_to_outside",
        families: BOTH,
        what: "the same, to outside",
        flow: |scene| {
            let _app = scene.serve(&scene.node.outside, PORT, app::who);
            let to = scene.at(&scene.node.outside, PORT);
            scene.asks_by(&scene.client.ns, to, scene.client.ip(scene.family), |socket| {
                socket.set_mark(0x539)
            })
        },
        ebpf: Outcome::Outbound,
        iptables: Outcome::Untouched,
        seen: "",
        why: "as above",
    },
    Row {
        name: "mark_0x53a",
        families: BOTH,
        what: "a socket bound to the pod's address with the mark of packets that are turned back, to another enrolled pod",
        flow: |scene| marked(scene, 0x53a),
        ebpf: Outcome::Hbone,
        iptables: Outcome::Hbone,
        seen: "",
        why: "the mark's route leads to lo, and the lookup gives what arrives there to 15001. Istio's rules don't know the mark",
    },
    Row {
        name: "mark_0x53b",
        families: BOTH,
        what: "the same with the mark of the proxy's dials to the application",
        flow: |scene| marked(scene, 0x53b),
        ebpf: Outcome::Hbone,
        iptables: Outcome::Hbone,
        seen: "",
        why: "as above",
    },
    Row {
        name: "mark_0x53a_without_a_source",
        families: V4,
        what: "the same marks on a socket that is bound to no address: 0x53a",
        flow: |scene| unbound(scene, 0x53a),
        ebpf: Outcome::Refused,
        iptables: Outcome::Hbone,
        seen: "nothing of it on the wire",
        why: "the mark's route delivers within the pod, and IPv4 then takes the destination for the source as well: the connection \
              is one of the pod with itself",
    },
    Row {
        name: "mark_0x53a_without_a_source",
        families: V6,
        what: "the same",
        flow: |scene| unbound(scene, 0x53a),
        ebpf: Outcome::Hbone,
        iptables: Outcome::Hbone,
        seen: "nothing of it on the wire",
        why: "IPv6 takes the pod's address",
    },
    Row {
        name: "mark_0x53b_without_a_source",
        families: V4,
        what: "0x53b",
        flow: |scene| unbound(scene, 0x53b),
        ebpf: Outcome::Refused,
        iptables: Outcome::Hbone,
        seen: "nothing of it on the wire",
        why: "the mark's route delivers within the pod, and IPv4 then takes the destination for the source as well: the connection \
              is one of the pod with itself",
    },
    Row {
        name: "mark_0x53b_without_a_source",
        families: V6,
        what: "the same",
        flow: |scene| unbound(scene, 0x53b),
        ebpf: Outcome::Hbone,
        iptables: Outcome::Hbone,
        seen: "nothing of it on the wire",
        why: "IPv6 takes the pod's address",
    },
    Row {
        name: "mark_0x111",
        families: V4,
        what: "bound to the pod's address, with the mark that Istio's rules give to answers to ztunnel",
        flow: |scene| marked(scene, 0x111),
        ebpf: Outcome::Hbone,
        iptables: Outcome::Dropped,
        seen: "",
        why: "means nothing to the programs. Istio's rules route it to lo, where IPv4 takes its source for a martian",
    },
    Row {
        name: "mark_0x111",
        families: V6,
        what: "the same",
        flow: |scene| marked(scene, 0x111),
        ebpf: Outcome::Hbone,
        iptables: Outcome::Refused,
        seen: "",
        why: "as above; IPv6 looks for a listener of the pod's own at the port, and there is none",
    },
    Row {
        name: "bound_to_eth0",
        families: BOTH,
        what: "a socket bound to eth0 (SO_BINDTODEVICE), to another enrolled pod",
        flow: |scene| {
            let _app = scene.serve(&scene.server, PORT, app::who);
            let to = scene.at(&scene.server, PORT);
            scene.asks_by(&scene.client.ns, to, scene.client.ip(scene.family), |socket| {
                socket.bind_device(Some(b"eth0"))
            })
        },
        ebpf: Outcome::Hbone,
        iptables: Outcome::Dropped,
        seen: "the application sees the client's address",
        why: "the rules' new destination is a loopback address, which such a socket sends out by eth0, where nobody takes it",
    },
    Row {
        name: "bound_to_lo",
        families: V4,
        what: "a socket bound to lo and the pod's address, to another enrolled pod",
        flow: |scene| bound_to_lo(scene, None),
        ebpf: Outcome::Dropped,
        iptables: Outcome::Dropped,
        seen: "",
        why: "lo leads nowhere but to the pod",
    },
    Row {
        name: "bound_to_lo",
        families: V6,
        what: "the same",
        flow: |scene| bound_to_lo(scene, None),
        ebpf: Outcome::Refused,
        iptables: Outcome::Refused,
        seen: "connect itself fails",
        why: "IPv6 looks for a route by that interface and finds none",
    },
    Row {
        name: "bound_to_lo_and_marked",
        families: V4,
        what: "the same with the mark of the proxy's dials to the application",
        flow: |scene| bound_to_lo(scene, Some(0x53b)),
        ebpf: Outcome::Dropped,
        iptables: Outcome::Dropped,
        seen: "",
        why: "the mark leads it to 15001, whose answer counts as received by eth0 and so is not this socket's",
    },
    Row {
        name: "bound_to_lo_and_marked",
        families: V6,
        what: "the same",
        flow: |scene| bound_to_lo(scene, Some(0x53b)),
        ebpf: Outcome::Dropped,
        iptables: Outcome::Refused,
        seen: "",
        why: "as above; without the mark's route, connect itself fails",
    },
    Row {
        name: "fast_open_to_a_mesh_pod",
        families: BOTH,
        what: "TCP Fast Open, data in the SYN, to another enrolled pod",
        flow: |scene| fast_open(scene, &scene.server),
        ebpf: Outcome::Hbone,
        iptables: Outcome::Hbone,
        seen: "the application sees the client's address",
        why: "the proxy's listener takes no data in a SYN; the kernel sends it again after the handshake",
    },
    Row {
        name: "fast_open_to_outside",
        families: BOTH,
        what: "the same, to outside",
        flow: |scene| fast_open(scene, &scene.node.outside),
        ebpf: Outcome::Outbound,
        iptables: Outcome::Outbound,
        seen: "the data is in no SYN on the wire",
        why: "as above",
    },
    Row {
        name: "fast_open_comes_in",
        families: BOTH,
        what: "TCP Fast Open from outside",
        flow: |scene| {
            let _app = scene.serve(&scene.server, PORT, app::who);
            let _sysctl = Sysctl::set(&scene.node.outside.ns, "net/ipv4/tcp_fastopen", "5");
            let connection = open_fast(scene, &scene.node.outside, scene.at(&scene.server, PORT));
            scene.finishes(connection, scene.node.outside.ip(scene.family))
        },
        ebpf: Outcome::Inbound,
        iptables: Outcome::Inbound,
        seen: "the application sees the caller's address",
        why: "",
    },
    Row {
        name: "mptcp_to_a_mesh_pod",
        families: BOTH,
        what: "a Multipath TCP socket, to another enrolled pod",
        flow: |scene| mptcp(scene, &scene.client, &scene.server),
        ebpf: Outcome::Hbone,
        iptables: Outcome::Hbone,
        seen: "the application sees the client's address",
        why: "falls back to TCP, since the proxy's listener speaks no more",
    },
    Row {
        name: "mptcp_comes_in",
        families: BOTH,
        what: "a Multipath TCP socket from outside",
        flow: |scene| mptcp(scene, &scene.node.outside, &scene.server),
        ebpf: Outcome::Inbound,
        iptables: Outcome::Inbound,
        seen: "the application sees the caller's address",
        why: "as above",
    },
    Row {
        name: "from_a_loopback_source",
        families: V4,
        what: "a socket bound to 127.0.0.1, to outside",
        flow: from_a_loopback_source,
        ebpf: Outcome::Refused,
        iptables: Outcome::Refused,
        seen: "connect itself fails",
        why: "",
    },
    Row {
        name: "from_a_loopback_source",
        families: V6,
        what: "a socket bound to ::1, to outside",
        flow: from_a_loopback_source,
        ebpf: Outcome::Dropped,
        iptables: Outcome::Outbound,
        seen: "no packet from ::1 leaves the pod",
        why: "no answer could come back, whatever the pod's own stack has let out. The rules turn it to the proxy before, and that \
              goes on in the pod's name",
    },
    Row {
        name: "source_of_ones_own",
        families: BOTH,
        what: "a transparent socket bound to a foreign address (CAP_NET_ADMIN), to outside",
        flow: |scene| {
            let to = scene.at(&scene.node.outside, PORT);
            let foreign = scene.at(&scene.stranger, 0);
            let _app = scene.serve(&scene.node.outside, PORT, app::who);
            let capture = scene.node.capture(&scene.client);
            let answer = scene.asks_by(&scene.client.ns, to, foreign.ip(), |socket| {
                match scene.family {
                    Family::V4 => socket.set_ip_transparent_v4(true)?,
                    Family::V6 => socket.set_freebind_v6(true)?,
                }
                socket.bind(&foreign.into())
            });
            let left = capture.stop();
            let left = left.iter().any(|segment| segment.dst == to && segment.opens);
            assert!(!left, "it has left the pod");
            answer
        },
        ebpf: Outcome::Refused,
        iptables: Outcome::Dropped,
        seen: "no SYN leaves the pod",
        why: "the proxy speaks for the pod alone. With the rules its word does not even reach the client: it goes to the address's \
              true owner",
    },
];

/// The same, from whatever address the kernel chooses.
fn unbound(scene: &Scene, mark: u32) -> Answer {
    let _app = scene.serve(&scene.server, PORT, app::who);
    let (to, source) = (scene.at(&scene.server, PORT), scene.client.ip(scene.family));
    let capture = scene.node.capture(&scene.client);
    let answer = scene.asks_by(&scene.client.ns, to, source, |socket| socket.set_mark(mark));
    let left = capture.stop();
    assert!(
        left.iter().all(|segment| segment.dst != to),
        "it has left the pod"
    );
    answer
}

fn from_a_loopback_source(scene: &Scene) -> Answer {
    /// What IPv4's connect says to it.
    const EINVAL: i32 = 22;
    let to = scene.at(&scene.node.outside, PORT);
    let _app = scene.serve(&scene.node.outside, PORT, app::who);
    let source = SocketAddr::from((scene.family.loopback(), 0));
    let capture = scene.node.capture(&scene.client);
    let connected = scene.dial(&scene.client.ns, to, Protocol::TCP, |socket| {
        socket.bind(&source.into())
    });
    let answer = match connected {
        Err(error) if error.raw_os_error() == Some(EINVAL) => Answer::Refused,
        connected => scene.talks(connected, scene.client.ip(scene.family)),
    };
    let left = capture.stop();
    assert!(
        left.iter().all(|segment| segment.src.ip() != source.ip()),
        "it has left the pod"
    );
    answer
}

fn bound_to_lo(scene: &Scene, mark: Option<u32>) -> Answer {
    let _app = scene.serve(&scene.server, PORT, app::who);
    let own = scene.at(&scene.client, 0);
    scene.asks_by(
        &scene.client.ns,
        scene.at(&scene.server, PORT),
        own.ip(),
        |socket| {
            if let Some(mark) = mark {
                socket.set_mark(mark)?;
            }
            socket.bind_device(Some(b"lo"))?;
            socket.bind(&own.into())
        },
    )
}

/// A connection to the server with a mark, from the pod's own address.
fn marked(scene: &Scene, mark: u32) -> Answer {
    let _app = scene.serve(&scene.server, PORT, app::who);
    let own = scene.at(&scene.client, 0);
    scene.asks_by(
        &scene.client.ns,
        scene.at(&scene.server, PORT),
        own.ip(),
        |socket| {
            socket.set_mark(mark)?;
            socket.bind(&own.into())
        },
    )
}

fn mptcp(scene: &Scene, from: &Host, to: &Host) -> Answer {
    let _app = scene.serve(to, PORT, app::who);
    let dial = |protocol| scene.dial(&from.ns, scene.at(to, PORT), protocol, |_| Ok(()));
    let connection = match dial(Protocol::MPTCP) {
        // A kernel without it shows that of TCP.
        Err(error) if error.raw_os_error() == Some(EPROTONOSUPPORT) => dial(Protocol::TCP),
        connection => connection,
    };
    scene.talks(connection, from.ip(scene.family))
}

fn fast_open(scene: &Scene, to: &Host) -> Answer {
    let _app = scene.serve(to, PORT, app::who);
    // As a client (1), and without a cookie (4).
    let _sysctl = Sysctl::set(&scene.client.ns, "net/ipv4/tcp_fastopen", "5");
    let capture = scene.node.capture(&scene.client);
    let connection = open_fast(scene, &scene.client, scene.at(to, PORT));
    let answer = scene.finishes(connection, scene.client.ip(scene.family));
    let syns: Vec<_> = capture
        .stop()
        .into_iter()
        .filter(|segment| segment.opens)
        .collect();
    assert!(!contains(&syns, b"hello"), "the data left in a SYN");
    answer
}

/// Sends a line in the SYN.
fn open_fast(scene: &Scene, from: &Host, to: SocketAddr) -> io::Result<TcpStream> {
    let domain = match scene.family {
        Family::V4 => Domain::IPV4,
        Family::V6 => Domain::IPV6,
    };
    let socket = from
        .ns
        .run(|| Socket::new(domain, Type::STREAM, Some(Protocol::TCP)))?;
    socket.set_read_timeout(Some(app::IO_DEADLINE))?;
    let sent = socket.send_to_with_flags(b"hello\n", &to.into(), MSG_FASTOPEN)?;
    assert_eq!(sent, 6, "the kernel puts the data into the SYN");
    Ok(socket.into())
}
