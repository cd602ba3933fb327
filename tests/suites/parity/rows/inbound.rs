//! Who can call the pod's application.

use std::{
    io::{Read, Write},
    net::SocketAddr,
};

use redirector_tests::{
    app,
    mesh::PORT,
    node::Host,
    packet::{self, Handshake},
};
use socket2::Protocol;

use super::{BOTH, V4, V6};
use crate::{
    scene::{Scene, failed},
    table::{Answer, Outcome, Row},
};

pub(super) const ROWS: &[Row] = &[
    Row {
        name: "hbone_comes_in",
        families: BOTH,
        what: "a new tunnel from another pod's proxy to 15008",
        flow: |scene| {
            // A pod that was not enrolled has no tunnel yet.
            scene.agent.enrol(&scene.late);
            let answer = scene.sees(&scene.late, &scene.server);
            scene.agent.release(&scene.late);
            answer
        },
        ebpf: Outcome::Hbone,
        iptables: Outcome::Hbone,
        seen: "the application sees the client's address",
        why: "",
    },
    Row {
        name: "from_outside",
        families: BOTH,
        what: "plaintext from behind the node",
        flow: |scene| scene.sees(&scene.node.outside, &scene.server),
        ebpf: Outcome::Inbound,
        iptables: Outcome::Inbound,
        seen: "the application sees the caller's address",
        why: "",
    },
    Row {
        name: "from_a_stranger",
        families: BOTH,
        what: "plaintext from a pod of the same node that is not enrolled",
        flow: |scene| scene.sees(&scene.stranger, &scene.server),
        ebpf: Outcome::Inbound,
        iptables: Outcome::Inbound,
        seen: "as above",
        why: "",
    },
    Row {
        name: "from_the_proxys_dial_range",
        families: BOTH,
        what: "plaintext from a source port that the proxy's own dials take",
        flow: |scene| {
            let from = scene.at(&scene.stranger, 64_123);
            let _app = scene.serve(&scene.server, PORT, app::who);
            scene.asks_by(
                &scene.stranger.ns,
                scene.at(&scene.server, PORT),
                from.ip(),
                |socket| {
                    socket.set_reuse_address(true)?;
                    socket.bind(&from.into())
                },
            )
        },
        ebpf: Outcome::Inbound,
        iptables: Outcome::Inbound,
        seen: "as above",
        why: "",
    },
    Row {
        name: "plaintext_to_the_hbone_port",
        families: BOTH,
        what: "bytes that are no TLS, from outside to 15008",
        flow: |scene| {
            let connection = app::connect(&scene.node.outside.ns, scene.at(&scene.server, 15008));
            let mut stream = connection.expect("15008 accepts");
            stream
                .write_all(b"GET / HTTP/1.1\r\n\r\n")
                .expect("a new connection takes bytes");
            let mut answer = Vec::new();
            match stream.read_to_end(&mut answer) {
                // A TLS alert may come first.
                Ok(_) if !answer.starts_with(b"HTTP") => Answer::Refused,
                Ok(_) => Answer::Answered,
                Err(error) => failed(&error),
            }
        },
        ebpf: Outcome::Refused,
        iptables: Outcome::Refused,
        seen: "an alert at most",
        why: "",
    },
    Row {
        name: "to_the_proxys_ports",
        families: BOTH,
        what: "plaintext from outside to 15001 and 15006",
        flow: |scene| {
            let ask = |port| {
                scene.asks(
                    &scene.node.outside.ns,
                    scene.at(&scene.server, port),
                    scene.family.any(),
                )
            };
            let answers = [15001, 15006].map(ask);
            assert_eq!(answers[0], answers[1]);
            answers[0]
        },
        ebpf: Outcome::Refused,
        iptables: Outcome::Refused,
        seen: "",
        why: "",
    },
    Row {
        name: "to_a_closed_port",
        families: BOTH,
        what: "plaintext from outside to a port where nobody listens",
        flow: |scene| {
            scene.asks(
                &scene.node.outside.ns,
                scene.at(&scene.server, 9),
                scene.family.any(),
            )
        },
        ebpf: Outcome::Refused,
        iptables: Outcome::Refused,
        seen: "",
        why: "the proxy has accepted, so the client sees its connection reset, not refused",
    },
    Row {
        name: "in_the_pods_own_name",
        families: V4,
        what: "a SYN from the network that says it comes from the pod itself",
        flow: in_the_pods_own_name,
        ebpf: Outcome::Dropped,
        iptables: Outcome::Dropped,
        seen: "no answer, not even within the pod",
        why: "",
    },
    Row {
        name: "in_the_pods_own_name",
        families: V6,
        what: "the same",
        flow: in_the_pods_own_name,
        ebpf: Outcome::Dropped,
        iptables: Outcome::Inbound,
        seen: "as above",
        why: "IPv4 knows its own addresses for martians, IPv6 does not: the programs do it for both, the rules for neither",
    },
];

fn in_the_pods_own_name(scene: &Scene) -> Answer {
    frame_in(scene, &scene.server, scene.at(&scene.server, 20_404), None)
}

/// Sends a SYN, in a frame, from the node's end of the server's veth, and waits in `listener` for the answer.
pub(super) fn frame_in(scene: &Scene, listener: &Host, from: SocketAddr, vlan: Option<u16>) -> Answer {
    let to = scene.at(&scene.server, PORT);
    let _app = scene.serve(&scene.server, PORT, app::who);
    let frame = packet::frame(
        scene.node.host.ns.mac("br0"),
        scene.server.ns.mac("eth0"),
        vlan,
        &packet::segment(from, to, &packet::syn(from, to)),
    );
    let socket = listener
        .ns
        .run(|| packet::raw(from, Protocol::TCP))
        .expect("root makes raw sockets");
    packet::send_frames(&scene.node.host.ns, &scene.server.veth, &[frame]);
    half_open(packet::answer(&socket, from, to).expect("a raw socket can be read"))
}

/// What a SYN made by hand met.
pub(super) fn half_open(handshake: Handshake) -> Answer {
    match handshake {
        Handshake::Accepted => Answer::HalfOpen,
        Handshake::Refused => Answer::Refused,
        Handshake::Silence => Answer::Silence,
    }
}
