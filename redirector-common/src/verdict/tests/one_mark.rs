//! Pods whose proxy is another process, with one mark for all its sockets.

use super::*;

const OTHER_PROXY: Sender = Sender {
    is_other_proxy: true,
    ..MARKED
};

#[test]
fn its_new_connections_leave_and_those_of_nobody_known_do_not() {
    let (own_one, refused) = (Egress::Own, Egress::Refuse(Counter::EgressRefused));
    let uncaptured = Egress::Pass(Counter::EgressUncaptured);
    let one_mark = FLAG_ONE_MARK;
    for (what, sender, flags, port, expected) in [
        ("the proxy's", OTHER_PROXY, one_mark, 80, own_one),
        ("its DNS", OTHER_PROXY, one_mark | FLAG_DNS_CAPTURE, 53, own_one),
        ("the mark alone", MARKED, one_mark, 80, refused),
        ("an application's", SOCKET, one_mark, 80, CAPTURE),
        ("forwarded in the pod's name", NO_SOCKET, one_mark, 80, CAPTURE),
        ("of a proxy that is not this pod's", OTHER_PROXY, 0, 80, CAPTURE),
        ("releasing", MARKED, one_mark | FLAG_RELEASING, 80, uncaptured),
    ] {
        for (source, far) in [(POD_V4, FAR_V4), (POD_V6, FAR_V6)] {
            let packet = tcp(source, 4000, far, port, TCP_SYN);
            let verdict = egress(&packet, sender, &pod(flags), own().as_slice());
            assert_eq!(verdict, expected, "{what}");
        }
    }
}

#[test]
fn a_mark_on_a_later_packet_proves_nothing() {
    for sender in [OTHER_PROXY, MARKED, SOCKET, NO_SOCKET] {
        for flags in [TCP_ACK, TCP_SYN | TCP_ACK, TCP_RST, TCP_FIN | TCP_ACK] {
            let packet = tcp(POD_V4, 80, FAR_V4, 4000, flags);
            let verdict = egress(&packet, sender, &pod(FLAG_ONE_MARK), own().as_slice());
            assert_eq!(verdict, Egress::AskSocketTable);
        }
    }
}

#[test]
fn its_questions_leave_and_the_applications_are_captured() {
    let entry = pod(FLAG_ONE_MARK | FLAG_DNS_CAPTURE);
    let query = Parsed::Udp(crate::packet::UdpMeta {
        source: addr(POD_V4),
        destination: addr(FAR_V4),
        destination_port: 53,
        v4: true,
    });
    for (sender, expected) in [
        (OTHER_PROXY, Egress::Pass(Counter::EgressProxy)),
        (MARKED, Egress::CaptureDns(Listener::DnsUdpV4)),
        (SOCKET, Egress::CaptureDns(Listener::DnsUdpV4)),
    ] {
        assert_eq!(egress(&query, sender, &entry, own().as_slice()), expected);
    }
}

#[test]
fn only_its_dials_to_the_application_leave_a_hint() {
    let pass = Ingress::Pass(Counter::IngressOther);
    let flags = FLAG_ONE_MARK;
    for (what, packet, marked, flags, expected) in [
        (
            "a dial",
            tcp(FAR_V4, 4000, POD_V4, 80, TCP_SYN),
            true,
            flags,
            Ingress::Dialled,
        ),
        (
            "a dial, v6",
            tcp(FAR_V6, 61_000, POD_V6, 80, TCP_SYN),
            true,
            flags,
            Ingress::Dialled,
        ),
        (
            "turned back, or the application's",
            tcp(FAR_V4, 4000, POD_V4, 80, TCP_SYN),
            false,
            flags,
            pass,
        ),
        ("later", tcp(FAR_V4, 4000, POD_V4, 80, TCP_ACK), true, flags, pass),
        (
            "an answer",
            tcp(FAR_V4, 80, POD_V4, 4000, TCP_SYN | TCP_ACK),
            true,
            flags,
            pass,
        ),
        (
            "the pod's own",
            tcp(POD_V4, 4000, POD_V4, 80, TCP_SYN),
            true,
            flags,
            pass,
        ),
        (
            "to elsewhere",
            tcp(POD_V4, 4000, FAR_V4, 80, TCP_SYN),
            true,
            flags,
            pass,
        ),
        (
            "loopback",
            tcp("127.0.0.1", 4000, "127.0.0.1", 80, TCP_SYN),
            true,
            flags,
            pass,
        ),
        (
            "with this agent's proxy",
            tcp(FAR_V4, 4000, POD_V4, 80, TCP_SYN),
            true,
            0,
            pass,
        ),
        ("unreadable", Parsed::Malformed, true, flags, pass),
    ] {
        let verdict = ingress_of_lo(&packet, marked, &pod(flags), own().as_slice());
        assert_eq!(verdict, expected, "{what}");
    }
}

#[test]
fn what_comes_from_outside_takes_a_hint_away() {
    for port in [4000, 61_000] {
        let syn = tcp(FAR_V4, port, POD_V4, 80, TCP_SYN);
        let verdict = ingress(&syn, &pod(FLAG_ONE_MARK), own().as_slice());
        assert_eq!(verdict, Ingress::AskOrigin, "{port}");
        let verdict = ingress_by_origin(false, port, &pod(FLAG_ONE_MARK));
        assert_eq!(verdict, Ingress::Pass(Counter::IngressNew), "{port}");
    }
}

#[test]
fn the_lookup_goes_by_the_hint_and_by_no_port() {
    let dial = Choice::Pass(Counter::LookupProxy);
    for flags in [FLAG_ONE_MARK, FLAG_ONE_MARK | FLAG_LOOKUP_HAS_IFINDEX] {
        for (what, connection, expected) in [
            ("hinted", connection(POD_V4, 7, FAR_V4, 4000, false), dial),
            ("hinted, v6", connection(POD_V6, 7, FAR_V6, 4000, false), dial),
            ("not", connection(POD_V4, 80, FAR_V4, 4000, false), INBOUND),
            (
                "from where this agent dials",
                connection(POD_V4, 80, FAR_V4, 61_000, false),
                INBOUND,
            ),
            ("captured", connection(FAR_V4, 7, POD_V4, 4000, true), OUTBOUND),
        ] {
            let choice = lookup(&connection, &pod(flags), own().as_slice());
            assert_eq!(choice, expected, "{what}");
        }
    }
}
