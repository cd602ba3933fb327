//! What arrives from behind the pod.

use super::*;

/// An address behind the pod.
const INNER_V4: &str = "10.88.0.2";
const INNER_V6: &str = "fd88::2";

fn decided(packet: &Parsed, flags: u32) -> Option<Ingress> {
    let Parsed::Tcp(tcp) = packet else {
        panic!("{packet:?} is not TCP")
    };
    let entry = PodEntry {
        rules: bits(Subject::OutboundPort, false),
        ..pod(flags)
    };
    reroute(tcp, &entry, own().as_slice())
}

#[test]
fn connections_to_elsewhere_are_rerouted() {
    let pass = Some(Ingress::Pass(Counter::IngressNew));
    for (what, packet, flags, expected) in [
        (
            "v4",
            tcp(INNER_V4, 4000, FAR_V4, 80, TCP_SYN),
            0,
            Some(Ingress::Reroute),
        ),
        (
            "v6",
            tcp(INNER_V6, 4000, FAR_V6, 80, TCP_SYN),
            0,
            Some(Ingress::Reroute),
        ),
        (
            "later",
            tcp(INNER_V4, 4000, FAR_V4, 80, TCP_ACK),
            0,
            Some(Ingress::AskFarEnd),
        ),
        (
            "reset",
            tcp(INNER_V4, 4000, FAR_V4, 80, TCP_RST),
            0,
            Some(Ingress::AskFarEnd),
        ),
        ("to the pod", tcp(INNER_V4, 4000, POD_V4, 80, TCP_SYN), 0, None),
        (
            "to the pod, later",
            tcp(INNER_V6, 4000, POD_V6, 80, TCP_ACK),
            0,
            None,
        ),
        (
            "to a neighbour",
            tcp(INNER_V6, 4000, "fe80::1", 80, TCP_SYN),
            0,
            None,
        ),
        ("left alone", tcp(INNER_V4, 4000, FAR_V4, 9, TCP_SYN), 0, pass),
        (
            "releasing",
            tcp(INNER_V4, 4000, FAR_V4, 80, TCP_SYN),
            FLAG_RELEASING,
            pass,
        ),
        (
            "in the pod's name",
            tcp(POD_V6, 4000, FAR_V6, 80, TCP_SYN),
            0,
            Some(Ingress::Drop(Counter::IngressSpoofed)),
        ),
    ] {
        assert_eq!(decided(&packet, flags), expected, "{what}");
    }
}

#[test]
fn the_lookup_gives_them_to_15001() {
    for device in [0, FLAG_LOOKUP_HAS_IFINDEX] {
        let from = |remote, local, port| Lookup {
            rerouted: device != 0,
            ..connection(local, port, remote, 4000, false)
        };
        // Port 53 is for the pod's own DNS.
        let entry = pod(device | FLAG_DNS_CAPTURE);
        for (connection, expected) in [
            (from(INNER_V4, FAR_V4, 80), OUTBOUND),
            (from(INNER_V6, FAR_V6, 15008), OUTBOUND),
            (from(INNER_V4, FAR_V4, 53), OUTBOUND),
            (from(INNER_V4, POD_V4, 80), INBOUND),
            (from(INNER_V4, POD_V4, 15008), HBONE),
        ] {
            assert_eq!(
                lookup(&connection, &entry, own().as_slice()),
                expected,
                "{connection:?}"
            );
        }
    }
}

#[test]
fn an_interface_is_one_of_those_named() {
    let mut entry = pod(0);
    assert!(!entry.reroutes(0) && !entry.reroutes(7));
    entry.rerouted[7] = 7;
    assert!(!entry.reroutes(0) && entry.reroutes(7) && !entry.reroutes(8));
}

#[test]
fn what_was_to_be_delivered_here_never_leaves() {
    let undelivered = Sender {
        is_undelivered: true,
        ..NO_SOCKET
    };
    let refused = Egress::Refuse(Counter::EgressUndelivered);
    let dropped = Egress::Drop(Counter::EgressUndelivered);
    for (inner, own_address, far) in [(INNER_V4, POD_V4, FAR_V4), (INNER_V6, POD_V6, FAR_V6)] {
        // The pod may have written its own address over the sender's (masquerading), and port 9 is left alone: what is, has no mark.
        for source in [inner, own_address] {
            for port in [9, 53, 80] {
                for (flags, tcp_flags, expected) in [
                    (0, TCP_SYN, refused),
                    (FLAG_DNS_CAPTURE, TCP_SYN, refused),
                    (FLAG_RELEASING, TCP_SYN, refused),
                    (0, TCP_ACK, dropped),
                    (0, TCP_RST, dropped),
                    (FLAG_RELEASING, TCP_FIN | TCP_ACK, dropped),
                ] {
                    let entry = PodEntry {
                        rules: bits(Subject::OutboundPort, false),
                        ..pod(flags)
                    };
                    let packet = tcp(source, 4000, far, port, tcp_flags);
                    let verdict = egress(&packet, undelivered, &entry, own().as_slice());
                    assert_eq!(verdict, expected, "{packet:?}");
                }
            }
        }
    }
}
