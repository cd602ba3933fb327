//! Packets that are not as most are, and protocols that are not TCP.

use std::net::{SocketAddr, UdpSocket};

use redirector_tests::{app, mesh::PORT, node::Host, packet};

use super::{
    BOTH, V4, V6,
    inbound::{frame_in, half_open},
};
use crate::{
    scene::{Scene, failed},
    table::{Answer, Outcome, Row},
};

/// `include/uapi/linux/in.h`, `include/uapi/linux/in6.h`.
const IPPROTO_IP: i32 = 0;
const IP_OPTIONS: i32 = 4;
const IPPROTO_IPV6: i32 = 41;
const IPV6_HOPOPTS: i32 = 54;
const IPV6_DSTOPTS: i32 = 59;
/// A hop-by-hop or destination options header with padding alone: next header (filled in), no further words, PadN of 4 bytes.
const PADDING: [u8; 8] = [0, 0, 1, 4, 0, 0, 0, 0];
/// No-operations and the end of the list.
const NO_OPTIONS: [u8; 4] = [1, 1, 1, 0];

pub(super) const ROWS: &[Row] = &[
    Row {
        name: "icmp_out",
        families: BOTH,
        what: "ICMP echo, pod to outside",
        flow: |scene| ping(scene, &scene.client, &scene.node.outside),
        ebpf: Outcome::Untouched,
        iptables: Outcome::Untouched,
        seen: "the reply comes",
        why: "",
    },
    Row {
        name: "icmp_in",
        families: BOTH,
        what: "ICMP echo, outside to pod",
        flow: |scene| ping(scene, &scene.node.outside, &scene.server),
        ebpf: Outcome::Untouched,
        iptables: Outcome::Untouched,
        seen: "the reply comes",
        why: "",
    },
    Row {
        name: "udp_out",
        families: BOTH,
        what: "UDP, pod to outside and back",
        flow: |scene| udp(scene, &scene.client, &scene.node.outside, 5353, 40),
        ebpf: Outcome::Untouched,
        iptables: Outcome::Untouched,
        seen: "the peer sees the pod's address",
        why: "",
    },
    Row {
        name: "udp_in",
        families: BOTH,
        what: "UDP, outside to pod and back",
        flow: |scene| udp(scene, &scene.node.outside, &scene.server, 5353, 40),
        ebpf: Outcome::Untouched,
        iptables: Outcome::Untouched,
        seen: "the application sees the caller's address",
        why: "",
    },
    Row {
        name: "udp_to_a_mesh_pod",
        families: BOTH,
        what: "UDP, pod to another enrolled pod and back",
        flow: |scene| udp(scene, &scene.client, &scene.server, 5353, 40),
        ebpf: Outcome::Untouched,
        iptables: Outcome::Untouched,
        seen: "the application sees the caller's address",
        why: "",
    },
    Row {
        name: "dns_by_udp",
        families: BOTH,
        what: "UDP to port 53 outside, without DNS capture",
        flow: |scene| udp(scene, &scene.client, &scene.node.outside, 53, 40),
        ebpf: Outcome::Untouched,
        iptables: Outcome::Untouched,
        seen: "the server sees the pod's address",
        why: "",
    },
    Row {
        name: "dns_by_tcp",
        families: BOTH,
        what: "TCP to port 53 outside, without DNS capture",
        flow: |scene| {
            let _app = scene.serve(&scene.node.outside, 53, app::who);
            let to = scene.at(&scene.node.outside, 53);
            scene.asks(&scene.client.ns, to, scene.client.ip(scene.family))
        },
        ebpf: Outcome::Outbound,
        iptables: Outcome::Outbound,
        seen: "the server sees the pod's address",
        why: "a TCP connection like others",
    },
    Row {
        name: "udp_in_fragments",
        families: BOTH,
        what: "UDP of 5,000 bytes, pod to outside and back, in fragments",
        flow: |scene| udp(scene, &scene.client, &scene.node.outside, 5353, 5000),
        ebpf: Outcome::Untouched,
        iptables: Outcome::Untouched,
        seen: "the bytes are the same",
        why: "",
    },
    Row {
        name: "syn_by_raw_socket",
        families: BOTH,
        what: "a SYN that an application with CAP_NET_RAW made itself, to outside",
        flow: |scene| by_hand(scene, None),
        ebpf: Outcome::Outbound,
        iptables: Outcome::Outbound,
        seen: "the proxy answers it; nothing on the wire",
        why: "",
    },
    Row {
        name: "syn_in_fragments",
        families: BOTH,
        what: "the same in two fragments",
        flow: |scene| by_hand(scene, Some(24)),
        ebpf: Outcome::Dropped,
        iptables: Outcome::Outbound,
        seen: "no SYN on the wire",
        why: "no TCP stack sends such a SYN. The programs see the fragment with the header and turn it back; the other one leaves \
              alone, and is no connection. The rules see what connection tracking has put together",
    },
    Row {
        name: "tiny_first_fragment",
        families: V4,
        what: "the same, with the flags in the second fragment (RFC 1858)",
        flow: |scene| by_hand(scene, Some(8)),
        ebpf: Outcome::Dropped,
        iptables: Outcome::Outbound,
        seen: "the first fragment is not on the wire",
        why: "as above; a first fragment without the whole TCP header is dropped",
    },
    Row {
        name: "tiny_first_fragment",
        families: V6,
        what: "the same",
        flow: |scene| by_hand(scene, Some(8)),
        ebpf: Outcome::Dropped,
        iptables: Outcome::Dropped,
        seen: "as above",
        why: "",
    },
    Row {
        name: "syn_in_fragments_comes_in",
        families: BOTH,
        what: "a SYN in two fragments, outside to pod",
        flow: |scene| {
            let (from, to) = (
                scene.at(&scene.node.outside, 20_001),
                scene.at(&scene.server, PORT),
            );
            let _app = scene.serve(&scene.server, PORT, app::who);
            let packets = packet::fragments(from, to, &packet::syn(from, to), 24);
            half_open(
                packet::handshake(&scene.node.outside.ns, from, to, &packets)
                    .expect("root sends raw packets"),
            )
        },
        ebpf: Outcome::Inbound,
        iptables: Outcome::Inbound,
        seen: "the proxy answers it",
        why: "the lookup comes after the kernel has put them together",
    },
    Row {
        name: "ip_options_to_a_mesh_pod",
        families: V4,
        what: "a connection with IP options, to another enrolled pod",
        flow: |scene| {
            with_option(
                scene,
                &scene.client,
                &scene.server,
                IPPROTO_IP,
                IP_OPTIONS,
                &NO_OPTIONS,
            )
        },
        ebpf: Outcome::Hbone,
        iptables: Outcome::Hbone,
        seen: "the application sees the client's address",
        why: "the options end at the proxy",
    },
    Row {
        name: "ip_options_to_outside",
        families: V4,
        what: "the same, to outside",
        flow: |scene| {
            with_option(
                scene,
                &scene.client,
                &scene.node.outside,
                IPPROTO_IP,
                IP_OPTIONS,
                &NO_OPTIONS,
            )
        },
        ebpf: Outcome::Outbound,
        iptables: Outcome::Outbound,
        seen: "as above",
        why: "",
    },
    Row {
        name: "ip_options_come_in",
        families: V4,
        what: "the same, outside to pod",
        flow: |scene| {
            with_option(
                scene,
                &scene.node.outside,
                &scene.server,
                IPPROTO_IP,
                IP_OPTIONS,
                &NO_OPTIONS,
            )
        },
        ebpf: Outcome::Inbound,
        iptables: Outcome::Inbound,
        seen: "the application sees the caller's address",
        why: "",
    },
    Row {
        name: "hop_by_hop_to_a_mesh_pod",
        families: V6,
        what: "a connection with a hop-by-hop header, to another enrolled pod",
        flow: |scene| {
            with_option(
                scene,
                &scene.client,
                &scene.server,
                IPPROTO_IPV6,
                IPV6_HOPOPTS,
                &PADDING,
            )
        },
        ebpf: Outcome::Hbone,
        iptables: Outcome::Hbone,
        seen: "the application sees the client's address",
        why: "the header ends at the proxy",
    },
    Row {
        name: "hop_by_hop_comes_in",
        families: V6,
        what: "the same, outside to pod",
        flow: |scene| {
            with_option(
                scene,
                &scene.node.outside,
                &scene.server,
                IPPROTO_IPV6,
                IPV6_HOPOPTS,
                &PADDING,
            )
        },
        ebpf: Outcome::Inbound,
        iptables: Outcome::Inbound,
        seen: "the application sees the caller's address",
        why: "",
    },
    Row {
        name: "destination_options_to_a_mesh_pod",
        families: V6,
        what: "a connection with destination options, to another enrolled pod",
        flow: |scene| {
            with_option(
                scene,
                &scene.client,
                &scene.server,
                IPPROTO_IPV6,
                IPV6_DSTOPTS,
                &PADDING,
            )
        },
        ebpf: Outcome::Hbone,
        iptables: Outcome::Hbone,
        seen: "the application sees the client's address",
        why: "the header ends at the proxy",
    },
    Row {
        name: "destination_options_to_outside",
        families: V6,
        what: "the same, to outside",
        flow: |scene| {
            with_option(
                scene,
                &scene.client,
                &scene.node.outside,
                IPPROTO_IPV6,
                IPV6_DSTOPTS,
                &PADDING,
            )
        },
        ebpf: Outcome::Outbound,
        iptables: Outcome::Outbound,
        seen: "as above",
        why: "",
    },
    Row {
        name: "destination_options_come_in",
        families: V6,
        what: "the same, outside to pod",
        flow: |scene| {
            with_option(
                scene,
                &scene.node.outside,
                &scene.server,
                IPPROTO_IPV6,
                IPV6_DSTOPTS,
                &PADDING,
            )
        },
        ebpf: Outcome::Inbound,
        iptables: Outcome::Inbound,
        seen: "the application sees the caller's address",
        why: "",
    },
    Row {
        name: "syn_by_packet_socket",
        families: BOTH,
        what: "a SYN by packet socket (CAP_NET_RAW), to outside",
        flow: |scene| frame_out(scene, None),
        ebpf: Outcome::Outbound,
        iptables: Outcome::Untouched,
        seen: "with the programs, nothing on the wire",
        why: "packet sockets pass traffic control, but not the rules",
    },
    Row {
        name: "priority_tagged_syn_by_packet_socket",
        families: BOTH,
        what: "the same with a VLAN tag of id 0, which receivers ignore",
        flow: |scene| frame_out(scene, Some(0)),
        ebpf: Outcome::Dropped,
        iptables: Outcome::Untouched,
        seen: "with the programs, nothing on the wire",
        why: "no socket of the pod sends tagged frames; the programs drop them rather than read past the tag",
    },
    Row {
        name: "vlan_tagged_syn_by_packet_socket",
        families: BOTH,
        what: "the same with a VLAN tag of id 7",
        flow: |scene| frame_out(scene, Some(7)),
        ebpf: Outcome::Dropped,
        iptables: Outcome::Dropped,
        seen: "with the programs, nothing on the wire",
        why: "with the rules it leaves the pod, for whoever has that VLAN",
    },
    Row {
        name: "syn_by_packet_socket_comes_in",
        families: BOTH,
        what: "a SYN by packet socket, node to pod",
        flow: |scene| {
            frame_in(
                scene,
                &scene.node.outside,
                scene.at(&scene.node.outside, 20_002),
                None,
            )
        },
        ebpf: Outcome::Inbound,
        iptables: Outcome::Inbound,
        seen: "the proxy answers it",
        why: "",
    },
    Row {
        name: "priority_tagged_syn_comes_in",
        families: BOTH,
        what: "the same with a VLAN tag of id 0",
        flow: |scene| {
            frame_in(
                scene,
                &scene.node.outside,
                scene.at(&scene.node.outside, 20_003),
                Some(0),
            )
        },
        ebpf: Outcome::Inbound,
        iptables: Outcome::Inbound,
        seen: "the proxy answers it",
        why: "the kernel takes the tag off before the programs run",
    },
    Row {
        name: "vlan_tagged_syn_comes_in",
        families: BOTH,
        what: "the same with a VLAN tag of id 7",
        flow: |scene| {
            frame_in(
                scene,
                &scene.node.outside,
                scene.at(&scene.node.outside, 20_004),
                Some(7),
            )
        },
        ebpf: Outcome::Dropped,
        iptables: Outcome::Dropped,
        seen: "",
        why: "the pod has no such VLAN",
    },
];

fn ping(scene: &Scene, from: &Host, to: &Host) -> Answer {
    match packet::ping(&from.ns, from.ip(scene.family), to.ip(scene.family)) {
        Ok(true) => Answer::Answered,
        Ok(false) => Answer::Silence,
        Err(error) => failed(&error),
    }
}

/// A datagram there and the same one back.
fn udp(scene: &Scene, from: &Host, to: &Host, port: u16, bytes: usize) -> Answer {
    let bind = |host: &Host, port: u16| -> UdpSocket {
        let socket = host
            .ns
            .run(|| UdpSocket::bind((scene.family.any(), port)))
            .expect("the port is free");
        socket
            .set_read_timeout(Some(app::IO_DEADLINE))
            .expect("a valid time");
        socket
    };
    let (server, client) = (bind(to, port), bind(from, 0));
    let sent: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
    let mut buffer = vec![0; 8192];
    client
        .send_to(&sent, scene.at(to, port))
        .expect("UDP can be sent");
    let (length, source) = match server.recv_from(&mut buffer) {
        Ok(received) => received,
        Err(error) => return failed(&error),
    };
    assert_eq!(
        (source.ip(), &buffer[..length]),
        (from.ip(scene.family), &sent[..])
    );
    server.send_to(&sent, source).expect("UDP can be sent");
    match client.recv(&mut buffer) {
        Ok(length) => {
            assert_eq!(buffer[..length], sent);
            Answer::Answered
        }
        Err(error) => failed(&error),
    }
}

/// A SYN by raw socket from the client to outside, in fragments with `first` bytes in the first.
fn by_hand(scene: &Scene, first: Option<usize>) -> Answer {
    let (from, to) = ends_out(scene);
    let _app = scene.serve(&scene.node.outside, PORT, app::who);
    let capture = scene.node.capture(&scene.client);
    let syn = packet::syn(from, to);
    let packets = match first {
        Some(first) => packet::fragments(from, to, &syn, first).to_vec(),
        None => vec![packet::segment(from, to, &syn)],
    };
    let answer =
        half_open(packet::handshake(&scene.client.ns, from, to, &packets).expect("root sends raw packets"));
    let left = capture.stop();
    let escaped = left.iter().any(|segment| segment.src == from && segment.opens);
    assert!(!escaped, "it has left the pod");
    answer
}

/// A SYN by packet socket from the client to outside.
fn frame_out(scene: &Scene, vlan: Option<u16>) -> Answer {
    let (from, to) = ends_out(scene);
    let _app = scene.serve(&scene.node.outside, PORT, app::who);
    let frame = packet::frame(
        scene.client.ns.mac("eth0"),
        scene.node.host.ns.mac("br0"),
        vlan,
        &packet::segment(from, to, &packet::syn(from, to)),
    );
    let socket = scene
        .client
        .ns
        .run(|| packet::raw(from, socket2::Protocol::TCP))
        .expect("root makes raw sockets");
    let capture = scene.node.capture(&scene.client);
    packet::send_frames(&scene.client.ns, "eth0", &[frame]);
    let answer = half_open(packet::answer(&socket, from, to).expect("a raw socket can be read"));
    let left = capture
        .stop()
        .iter()
        .any(|segment| segment.src == from && segment.opens);
    assert_eq!(left, !scene.backend.is_ebpf(), "whether it has left the pod");
    answer
}

/// From a port of the client that no other row uses, to outside.
fn ends_out(scene: &Scene) -> (SocketAddr, SocketAddr) {
    (
        scene.at(&scene.client, 20_000),
        scene.at(&scene.node.outside, PORT),
    )
}

/// A connection by a socket with one more option.
fn with_option(scene: &Scene, from: &Host, to: &Host, level: i32, option: i32, value: &[u8]) -> Answer {
    let _app = scene.serve(to, PORT, app::who);
    let answer = packet::ask_with_option(&from.ns, scene.at(to, PORT), level, option, value);
    let answer = answer.unwrap_or_else(|error| panic!("asking with the option: {error}"));
    crate::scene::heard(Ok(answer), from.ip(scene.family))
}
