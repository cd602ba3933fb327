//! DNS capture.

use super::*;

const DNS: u32 = FLAG_DNS_CAPTURE;

fn udp(source: &str, destination: &str, destination_port: u16) -> Parsed {
    let source = addr(source);
    Parsed::Udp(UdpMeta {
        source,
        destination: addr(destination),
        destination_port,
        v4: source.is_v4(),
    })
}

fn sent(packet: &Parsed, sender: Sender, flags: u32) -> Egress {
    egress(packet, sender, &pod(flags), own().as_slice())
}

#[test]
fn queries_are_captured_where_the_flag_says_so() {
    let (v4, v6) = (Listener::DnsUdpV4, Listener::DnsUdpV6);
    let other = Egress::Pass(Counter::EgressOther);
    for (what, packet, sender, flags, expected) in [
        ("v4", udp(POD_V4, FAR_V4, 53), SOCKET, DNS, Egress::CaptureDns(v4)),
        ("v6", udp(POD_V6, FAR_V6, 53), SOCKET, DNS, Egress::CaptureDns(v6)),
        (
            "any source",
            udp("10.9.9.9", FAR_V4, 53),
            SOCKET,
            DNS,
            Egress::CaptureDns(v4),
        ),
        (
            "a mark is no way out",
            udp(POD_V4, FAR_V4, 53),
            MARKED,
            DNS,
            Egress::CaptureDns(v4),
        ),
        (
            "raw, own address",
            udp(POD_V4, FAR_V4, 53),
            NO_SOCKET,
            DNS,
            Egress::CaptureDns(v4),
        ),
        ("forwarded", udp("10.9.9.9", FAR_V4, 53), NO_SOCKET, DNS, other),
        ("no flag", udp(POD_V4, FAR_V4, 53), SOCKET, 0, other),
        ("another port", udp(POD_V4, FAR_V4, 54), SOCKET, DNS, other),
        ("loopback", udp(POD_V4, "127.0.0.53", 53), SOCKET, DNS, other),
        ("link-local", udp(POD_V6, "fe80::1", 53), SOCKET, DNS, other),
        (
            "releasing",
            udp(POD_V4, FAR_V4, 53),
            SOCKET,
            DNS | FLAG_RELEASING,
            other,
        ),
    ] {
        assert_eq!(sent(&packet, sender, flags), expected, "{what}");
    }
    assert_eq!(
        ingress(&udp(FAR_V4, POD_V4, 53), &pod(DNS), own().as_slice()),
        Ingress::Pass(Counter::IngressOther)
    );
}

#[test]
fn tcp_to_port_53_goes_to_its_listener_whatever_the_rules_say() {
    let rules = bits(Subject::OutboundPort, true);
    let entry = |flags| PodEntry { rules, ..pod(flags) };
    let packet = tcp(POD_V4, 4000, FAR_V4, 53, TCP_SYN);
    let own = own();
    assert_eq!(
        egress(&packet, SOCKET, &entry(DNS), own.as_slice()),
        Egress::Capture(Listener::DnsTcpV4)
    );
    assert_eq!(
        egress(&packet, SOCKET, &entry(0), own.as_slice()),
        Egress::Pass(Counter::EgressExcluded)
    );
    let v6 = tcp(POD_V6, 4000, FAR_V6, 53, TCP_SYN);
    assert_eq!(sent(&v6, SOCKET, DNS), Egress::Capture(Listener::DnsTcpV6));
    assert_eq!(sent(&v6, SOCKET, 0), CAPTURE);
    assert_eq!(
        sent(&tcp(POD_V4, 4000, FAR_V4, 80, TCP_SYN), SOCKET, DNS),
        CAPTURE
    );
    assert_eq!(
        sent(&tcp(POD_V6, 4000, "fe80::1", 53, TCP_SYN), SOCKET, DNS),
        Egress::Refuse(Counter::EgressRefused)
    );
}

#[test]
fn what_egress_turns_back_is_what_the_lookup_takes() {
    let pass = Choice::Pass(Counter::LookupOther);
    for device in [0, FLAG_LOOKUP_HAS_IFINDEX] {
        for (what, (local, port, remote), flags, by_lo, expected) in [
            ("v4", (FAR_V4, 53, POD_V4), DNS, true, Some(Listener::DnsUdpV4)),
            ("v6", (FAR_V6, 53, POD_V6), DNS, true, Some(Listener::DnsUdpV6)),
            ("no flag", (FAR_V4, 53, POD_V4), 0, true, None),
            ("another port", (FAR_V4, 54, POD_V4), DNS, true, None),
            ("the pod's own server", (POD_V4, 53, FAR_V4), DNS, false, None),
            ("the pod asks itself", (POD_V4, 53, POD_V4), DNS, true, None),
            ("over lo", ("127.0.0.53", 53, "127.0.0.1"), DNS, true, None),
            (
                "releasing",
                (FAR_V4, 53, POD_V4),
                DNS | FLAG_RELEASING,
                true,
                None,
            ),
        ] {
            let datagram = connection(local, port, remote, 4000, by_lo);
            let expected = expected.map_or(pass, |listener| Choice::Assign(listener, Counter::LookupDns));
            let found = lookup_udp(&datagram, &pod(flags | device), own().as_slice());
            assert_eq!(found, expected, "{what}");
        }
        for (local, remote, listener) in [
            (FAR_V4, POD_V4, Listener::DnsTcpV4),
            (FAR_V6, POD_V6, Listener::DnsTcpV6),
        ] {
            let to_53 = connection(local, 53, remote, 4000, true);
            let found = |flags| lookup(&to_53, &pod(flags | device), own().as_slice());
            assert_eq!(found(DNS), Choice::Assign(listener, Counter::LookupDns));
            assert_eq!(found(0), OUTBOUND);
        }
    }
    // Where the device is known, only what egress has turned back counts.
    let from_outside = connection(FAR_V4, 53, POD_V4, 4000, false);
    let entry = pod(DNS | FLAG_LOOKUP_HAS_IFINDEX);
    assert_eq!(lookup_udp(&from_outside, &entry, own().as_slice()), pass);
}
