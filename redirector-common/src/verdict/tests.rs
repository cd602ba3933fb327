use std::net::IpAddr;

use bytemuck::Zeroable;
use proptest::prelude::*;

use super::*;
use crate::{
    packet::{TCP_ACK, TCP_FIN, TCP_RST, TCP_SYN, TcpMeta},
    rules::{EXCLUDED, Match, Subject, bits},
};

mod dns;
mod one_mark;
mod probes;
mod reroute;

/// Port 9 is left alone, if the pod's entry says that there are rules.
impl Rules for [Addr] {
    fn port(&self, _: Subject, port: u16) -> Match {
        if port == 9 { EXCLUDED } else { 0 }
    }

    fn address(&self, _: Subject, _: &Addr) -> Match {
        0
    }
}

/// Port 7 is probed, or dialled by a proxy that another process is, from wherever.
impl Hints for [Addr] {
    fn is_for_application(&self, connection: &Lookup) -> bool {
        connection.local_port == 7
    }
}

const POD_V4: &str = "10.0.0.1";
const POD_V6: &str = "fd00::1";
const FAR_V4: &str = "10.0.0.2";
const FAR_V6: &str = "fd00::2";

fn addr(text: &str) -> Addr {
    Addr::from(text.parse::<IpAddr>().unwrap())
}

fn own() -> [Addr; 2] {
    [addr(POD_V4), addr(POD_V6)]
}

fn pod(flags: u32) -> PodEntry {
    PodEntry {
        flags,
        ..PodEntry::zeroed()
    }
}

fn tcp(source: &str, source_port: u16, destination: &str, destination_port: u16, flags: u8) -> Parsed {
    let source = addr(source);
    Parsed::Tcp(TcpMeta {
        source,
        destination: addr(destination),
        source_port,
        destination_port,
        flags,
        l4_offset: 34,
        v4: source.is_v4(),
    })
}

const CAPTURE: Egress = Egress::Capture(Listener::Outbound);

const SOCKET: Sender = Sender {
    has_socket: true,
    has_proxy_mark: false,
    is_other_proxy: false,
    is_undelivered: false,
};
const NO_SOCKET: Sender = Sender {
    has_socket: false,
    has_proxy_mark: false,
    is_other_proxy: false,
    is_undelivered: false,
};
const MARKED: Sender = Sender {
    has_socket: true,
    has_proxy_mark: true,
    is_other_proxy: false,
    is_undelivered: false,
};

#[test]
fn a_tag_decides_alone() {
    assert_eq!(
        egress_by_tag(Some(Tag::Proxy)),
        Some(Egress::Pass(Counter::EgressProxy))
    );
    assert_eq!(
        egress_by_tag(Some(Tag::Captured)),
        Some(Egress::TurnBack(Counter::EgressTurnedBack))
    );
    assert_eq!(egress_by_tag(None), None);
    for (value, tag) in [
        (0, None),
        (1, Some(Tag::Captured)),
        (2, Some(Tag::Proxy)),
        (3, None),
        (u32::MAX, None),
    ] {
        assert_eq!(Tag::from_value(value), tag);
    }
}

#[test]
fn egress_table() {
    use Counter::{EgressMalformed, EgressOther, EgressProxy, EgressRefused, EgressUncaptured};
    let ask = Egress::AskSocketTable;
    for (what, packet, sender, flags, expected) in [
        (
            "a new connection",
            tcp(POD_V4, 4000, FAR_V4, 80, TCP_SYN),
            SOCKET,
            0,
            CAPTURE,
        ),
        (
            "a new connection",
            tcp(POD_V6, 4000, FAR_V6, 80, TCP_SYN),
            SOCKET,
            0,
            CAPTURE,
        ),
        (
            "one to HBONE is no exception",
            tcp(POD_V4, 4000, FAR_V4, 15008, TCP_SYN),
            SOCKET,
            0,
            CAPTURE,
        ),
        (
            "a mark lets no SYN out",
            tcp(POD_V4, 4000, FAR_V4, 80, TCP_SYN),
            MARKED,
            0,
            CAPTURE,
        ),
        (
            "raw SYN, own address",
            tcp(POD_V4, 4000, FAR_V4, 80, TCP_SYN),
            NO_SOCKET,
            0,
            CAPTURE,
        ),
        (
            "forwarded",
            tcp("172.17.0.2", 4000, FAR_V4, 80, TCP_SYN),
            NO_SOCKET,
            0,
            Egress::Pass(EgressUncaptured),
        ),
        (
            "releasing",
            tcp(POD_V4, 4000, FAR_V4, 80, TCP_SYN),
            SOCKET,
            FLAG_RELEASING,
            Egress::Pass(EgressUncaptured),
        ),
        (
            "data without a tag",
            tcp(POD_V4, 4000, FAR_V4, 80, TCP_ACK),
            SOCKET,
            0,
            ask,
        ),
        (
            "data while releasing",
            tcp(POD_V4, 4000, FAR_V4, 80, TCP_ACK),
            SOCKET,
            FLAG_RELEASING,
            ask,
        ),
        ("reset", tcp(POD_V4, 4000, FAR_V4, 80, TCP_RST), NO_SOCKET, 0, ask),
        (
            "SYN and ACK",
            tcp(POD_V4, 80, FAR_V4, 4000, TCP_SYN | TCP_ACK),
            NO_SOCKET,
            0,
            ask,
        ),
        (
            "the proxy's answer",
            tcp(POD_V4, 80, FAR_V4, 4000, TCP_SYN | TCP_ACK),
            MARKED,
            0,
            Egress::Pass(EgressProxy),
        ),
        (
            "odd: SYN and FIN",
            tcp(POD_V4, 4000, FAR_V4, 80, TCP_SYN | TCP_FIN),
            SOCKET,
            0,
            ask,
        ),
        (
            "to loopback",
            tcp(POD_V4, 4000, "127.0.0.1", 80, TCP_SYN),
            SOCKET,
            0,
            Egress::Pass(EgressOther),
        ),
        (
            "from loopback, whatever it carries",
            tcp("::1", 4000, FAR_V6, 80, TCP_SYN),
            SOCKET,
            0,
            Egress::Drop(EgressMalformed),
        ),
        (
            "to a link-local address",
            tcp(POD_V6, 4000, "fe80::2", 80, TCP_SYN),
            SOCKET,
            0,
            Egress::Refuse(EgressRefused),
        ),
        (
            "other protocols",
            Parsed::Other,
            SOCKET,
            0,
            Egress::Pass(EgressOther),
        ),
        (
            "fragments",
            Parsed::Fragment,
            SOCKET,
            0,
            Egress::Pass(EgressOther),
        ),
        ("tagged", Parsed::Tagged, SOCKET, 0, Egress::Drop(EgressMalformed)),
        (
            "unreadable",
            Parsed::Malformed,
            SOCKET,
            0,
            Egress::Drop(EgressMalformed),
        ),
        (
            "hidden behind headers",
            Parsed::TooManyHeaders,
            SOCKET,
            0,
            Egress::Drop(EgressMalformed),
        ),
    ] {
        assert_eq!(
            egress(&packet, sender, &pod(flags), own().as_slice()),
            expected,
            "{what}: {packet:?}"
        );
    }
    assert_eq!(
        egress_by_socket_table(true),
        Egress::TurnBack(Counter::EgressTurnedBack)
    );
    assert_eq!(egress_by_socket_table(false), Egress::Pass(EgressUncaptured));
}

#[test]
fn ingress_table() {
    use Counter::{IngressMalformed, IngressNew, IngressOther, IngressRefused, IngressSpoofed};
    let device = FLAG_LOOKUP_HAS_IFINDEX;
    for (what, packet, flags, expected) in [
        (
            "new",
            tcp(FAR_V4, 4000, POD_V4, 80, TCP_SYN),
            device,
            Ingress::Pass(IngressNew),
        ),
        (
            "new",
            tcp(FAR_V6, 4000, POD_V6, 80, TCP_SYN),
            0,
            Ingress::Pass(IngressNew),
        ),
        (
            "later",
            tcp(FAR_V4, 4000, POD_V4, 80, TCP_ACK),
            0,
            Ingress::Pass(IngressOther),
        ),
        (
            "from a dial port",
            tcp(FAR_V4, 61_000, POD_V4, 80, TCP_SYN),
            device,
            Ingress::AskSocketTable,
        ),
        (
            "from a dial port, old kernel",
            tcp(FAR_V4, 61_000, POD_V4, 80, TCP_SYN),
            0,
            Ingress::AskSocketTable,
        ),
        (
            "the same, v6",
            tcp(FAR_V6, 65_535, POD_V6, 80, TCP_SYN),
            0,
            Ingress::AskSocketTable,
        ),
        (
            "just below",
            tcp(FAR_V4, 60_999, POD_V4, 80, TCP_SYN),
            0,
            Ingress::Pass(IngressNew),
        ),
        (
            "to HBONE",
            tcp(FAR_V4, 61_000, POD_V4, 15008, TCP_SYN),
            0,
            Ingress::Pass(IngressNew),
        ),
        (
            "through the pod",
            tcp(FAR_V4, 61_000, "10.9.9.9", 80, TCP_SYN),
            0,
            Ingress::Pass(IngressNew),
        ),
        (
            "releasing",
            tcp(FAR_V4, 61_000, POD_V4, 80, TCP_SYN),
            FLAG_RELEASING,
            Ingress::Pass(IngressNew),
        ),
        (
            "from the pod itself",
            tcp(POD_V6, 4000, POD_V6, 80, TCP_SYN),
            device,
            Ingress::Drop(IngressSpoofed),
        ),
        (
            "to a link-local address",
            tcp(FAR_V6, 4000, "fe80::1", 80, TCP_SYN),
            device,
            Ingress::Refuse(IngressRefused),
        ),
        (
            "from a link-local address",
            tcp("fe80::2", 4000, POD_V6, 80, TCP_SYN),
            0,
            Ingress::Refuse(IngressRefused),
        ),
        ("other protocols", Parsed::Other, 0, Ingress::Pass(IngressOther)),
        ("fragments", Parsed::Fragment, 0, Ingress::Pass(IngressOther)),
        ("tagged", Parsed::Tagged, 0, Ingress::Pass(IngressOther)),
        (
            "unreadable",
            Parsed::Malformed,
            0,
            Ingress::Drop(IngressMalformed),
        ),
        (
            "hidden behind headers",
            Parsed::TooManyHeaders,
            0,
            Ingress::Drop(IngressMalformed),
        ),
    ] {
        assert_eq!(
            ingress(&packet, &pod(flags), own().as_slice()),
            expected,
            "{what}: {packet:?}"
        );
    }
}

#[test]
fn a_connection_from_the_dial_range_is_taken_or_refused_by_the_socket_table() {
    let device = pod(FLAG_LOOKUP_HAS_IFINDEX);
    for entry in [&device, &pod(0), &probed(0)] {
        assert_eq!(
            ingress_by_socket_table(true, 61_000, entry),
            Ingress::Refuse(Counter::IngressCollided)
        );
    }
    assert_eq!(
        ingress_by_socket_table(false, 61_000, &device),
        Ingress::Pass(Counter::IngressNew)
    );
    assert_eq!(
        ingress_by_socket_table(false, 61_000, &pod(0)),
        Ingress::AssignInbound
    );
    assert_eq!(
        ingress_by_socket_table(false, 61_000, &probed(0)),
        Ingress::AskOrigin
    );
}

/// The entry of a pod for which somebody's connections are probes.
fn probed(flags: u32) -> PodEntry {
    PodEntry {
        node_nsid: 1,
        ..pod(flags)
    }
}

fn connection(local: &str, local_port: u16, remote: &str, remote_port: u16, by_lo: bool) -> Lookup {
    Lookup {
        local: addr(local),
        remote: addr(remote),
        local_port,
        remote_port,
        by_lo,
        rerouted: false,
    }
}

const OUTBOUND: Choice = Choice::Assign(Listener::Outbound, Counter::LookupOutbound);
const INBOUND: Choice = Choice::Assign(Listener::Inbound, Counter::LookupInbound);
const HBONE: Choice = Choice::Assign(Listener::Hbone, Counter::LookupHbone);
const DIAL: Choice = Choice::Pass(Counter::LookupProxy);
const OTHER: Choice = Choice::Pass(Counter::LookupOther);

#[test]
fn lookup_table() {
    // (what, connection, by device, by source port)
    for (what, connection, by_device, by_port) in [
        (
            "captured",
            connection(FAR_V4, 80, POD_V4, 4000, true),
            OUTBOUND,
            OUTBOUND,
        ),
        (
            "captured",
            connection(FAR_V6, 80, POD_V6, 4000, true),
            OUTBOUND,
            OUTBOUND,
        ),
        (
            "captured, from a dial port",
            connection(FAR_V4, 80, POD_V4, 61_000, true),
            OUTBOUND,
            OUTBOUND,
        ),
        (
            "captured, to HBONE",
            connection(FAR_V4, 15008, POD_V4, 4000, true),
            OUTBOUND,
            OUTBOUND,
        ),
        (
            "from outside",
            connection(POD_V4, 80, FAR_V4, 4000, false),
            INBOUND,
            INBOUND,
        ),
        (
            "from outside",
            connection(POD_V6, 80, FAR_V6, 4000, false),
            INBOUND,
            INBOUND,
        ),
        (
            "from outside to 15001",
            connection(POD_V4, 15001, FAR_V4, 4000, false),
            INBOUND,
            INBOUND,
        ),
        (
            "from outside, a dial port",
            connection(POD_V4, 80, FAR_V4, 61_000, false),
            INBOUND,
            DIAL,
        ),
        (
            "HBONE",
            connection(POD_V4, 15008, FAR_V4, 4000, false),
            HBONE,
            HBONE,
        ),
        (
            "HBONE, a dial port",
            connection(POD_V4, 15008, FAR_V4, 61_000, false),
            HBONE,
            HBONE,
        ),
        (
            "the proxy's dial",
            connection(POD_V4, 80, FAR_V4, 61_000, true),
            DIAL,
            DIAL,
        ),
        (
            "the proxy's dial",
            connection(POD_V6, 80, FAR_V6, 65_535, true),
            DIAL,
            DIAL,
        ),
        ("self", connection(POD_V4, 80, POD_V4, 4000, false), OTHER, OTHER),
        (
            "self, a dial port",
            connection(POD_V4, 80, POD_V4, 61_000, false),
            OTHER,
            OTHER,
        ),
        (
            "loopback",
            connection("127.0.0.1", 80, "127.0.0.1", 4000, true),
            OTHER,
            OTHER,
        ),
        (
            "loopback",
            connection("::1", 15008, "::1", 4000, true),
            OTHER,
            OTHER,
        ),
        (
            "an address that came later, to itself",
            connection("10.0.0.7", 80, "10.0.0.7", 4000, false),
            OTHER,
            OTHER,
        ),
        (
            "an address that came later",
            connection("10.0.0.7", 80, FAR_V4, 4000, false),
            INBOUND,
            OUTBOUND,
        ),
    ] {
        let own = own();
        let ask = |flags| lookup(&connection, &pod(flags), own.as_slice());
        assert_eq!(ask(FLAG_LOOKUP_HAS_IFINDEX), by_device, "{what}: {connection:?}");
        assert_eq!(ask(0), by_port, "{what}, by source port: {connection:?}");
        assert_eq!(
            ask(FLAG_LOOKUP_HAS_IFINDEX | FLAG_RELEASING),
            OTHER,
            "{what}, releasing"
        );
    }
}

#[test]
fn counters_are_the_slots_of_the_map_and_have_names_of_their_own() {
    for (slot, counter) in Counter::ALL.into_iter().enumerate() {
        assert_eq!(counter as usize, slot);
    }
    let labels: std::collections::HashSet<_> = Counter::ALL
        .iter()
        .map(|counter| (counter.label().0.as_str(), counter.label().1))
        .collect();
    assert_eq!(labels.len(), Counter::ALL.len());
}

prop_compose! {
    fn any_address()(v4: bool, bytes: [u8; 16], own in 0_usize..4) -> Addr {
        match (own, v4) {
            (0, _) => addr(POD_V4),
            (1, _) => addr(POD_V6),
            (_, true) => Addr::from_v4_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
            (_, false) => Addr::from_v6_bytes(bytes),
        }
    }
}

proptest! {
    /// However a new connection looks, it reaches an application only by way of the proxy, from the pod itself, or as the
    /// proxy's own dial, which outsiders can't make: it comes by lo, or (old kernels) ingress has taken its port range away.
    #[test]
    fn nobody_outside_reaches_an_application_past_the_proxy(
        local in any_address(), remote in any_address(), local_port: u16, remote_port: u16, device: bool, probed: bool
    ) {
        let own = own();
        let flags = if device { FLAG_LOOKUP_HAS_IFINDEX } else { 0 };
        let packet = Parsed::Tcp(TcpMeta {
            source: remote, destination: local, source_port: remote_port, destination_port: local_port,
            flags: TCP_SYN, l4_offset: 34, v4: remote.is_v4(),
        });
        prop_assume!(local.is_v4() == remote.is_v4());
        // The kernel drops what comes over a wire from or to loopback addresses as martian.
        prop_assume!(!local.is_loopback() && !remote.is_loopback());
        // A land attack on an address that the pod got later is the kernel's to drop.
        prop_assume!(local.0 != remote.0 || own.contains(&local));
        prop_assume!(local_port != 7);
        let entry = if probed { super::tests::probed(flags) } else { pod(flags) };
        let mut asked = ingress(&packet, &entry, own.as_slice());
        if asked == Ingress::AskSocketTable {
            asked = ingress_by_socket_table(false, remote_port, &entry);
        }
        if asked == Ingress::AskOrigin {
            asked = ingress_by_origin(false, remote_port, &entry);
        }
        match asked {
            Ingress::AskSocketTable
            | Ingress::AskOrigin
            | Ingress::Probe
            | Ingress::Dialled
            | Ingress::Reroute
            | Ingress::AskFarEnd => prop_assert!(false, "{asked:?}"),
            Ingress::Drop(_) | Ingress::Refuse(_) | Ingress::AssignInbound => {}
            Ingress::Pass(_) => {
                let connection = Lookup { local, remote, local_port, remote_port, by_lo: false, rerouted: false };
                let choice = lookup(&connection, &entry, own.as_slice());
                prop_assert!(matches!(choice, Choice::Assign(..)), "{choice:?}");
            }
        }
    }

    /// A socket of the pod that has no tag never lets the SYN of a connection to another host out.
    #[test]
    fn no_new_connection_leaves_uncaptured(destination in any_address(), ports: (u16, u16), has_proxy_mark: bool, extra: u8) {
        prop_assume!(!destination.is_loopback());
        let source = if destination.is_v4() { addr(POD_V4) } else { addr(POD_V6) };
        let packet = Parsed::Tcp(TcpMeta {
            source, destination, source_port: ports.0, destination_port: ports.1,
            flags: TCP_SYN | (extra & 0b1110_1000), l4_offset: 34, v4: source.is_v4(),
        });
        for has_socket in [true, false] {
            let sender = Sender { has_socket, has_proxy_mark, is_other_proxy: false, is_undelivered: false };
            let verdict = egress(&packet, sender, &pod(0), own().as_slice());
            prop_assert!(matches!(verdict, Egress::Capture(_) | Egress::Refuse(_)), "{:?}", verdict);
        }
    }
}

#[test]
fn rules_leave_connections_alone() {
    let rules = bits(Subject::OutboundPort, false) | bits(Subject::InboundPort, false);
    for (far, own_address) in [(FAR_V4, POD_V4), (FAR_V6, POD_V6)] {
        let own = own();
        for (port, flags, alone) in [(9, 0, true), (10, 0, false), (9, FLAG_LOOKUP_HAS_IFINDEX, true)] {
            let entry = PodEntry { rules, ..pod(flags) };
            let out = egress(
                &tcp(own_address, 1000, far, port, TCP_SYN),
                MARKED,
                &entry,
                own.as_slice(),
            );
            let expected = if alone {
                Egress::Pass(Counter::EgressExcluded)
            } else {
                CAPTURE
            };
            assert_eq!(out, expected);
            // From the range that the proxy dials from, too.
            for remote_port in [1000, DIAL_PORT_FIRST] {
                let packet = tcp(far, remote_port, own_address, port, TCP_SYN);
                let asked = ingress(&packet, &entry, own.as_slice()) == Ingress::AskSocketTable;
                assert_eq!(asked, !alone && remote_port == DIAL_PORT_FIRST);
                let connection = Lookup {
                    local: addr(own_address),
                    remote: addr(far),
                    local_port: port,
                    remote_port,
                    by_lo: false,
                    rerouted: false,
                };
                let passed = matches!(lookup(&connection, &entry, own.as_slice()), Choice::Pass(_));
                let taken_for_the_proxy =
                    remote_port == DIAL_PORT_FIRST && !entry.has(FLAG_LOOKUP_HAS_IFINDEX);
                assert_eq!(passed, alone || taken_for_the_proxy);
            }
        }
    }
}

#[test]
fn a_gateway_takes_hbone_alone() {
    let own = own();
    for flags in [FLAG_BYPASS_INBOUND, FLAG_BYPASS_INBOUND | FLAG_LOOKUP_HAS_IFINDEX] {
        for (port, expected) in [
            (80, Choice::Pass(Counter::LookupExcluded)),
            (PORT_HBONE, Choice::Assign(Listener::Hbone, Counter::LookupHbone)),
        ] {
            let connection = Lookup {
                local: addr(POD_V4),
                remote: addr(FAR_V4),
                local_port: port,
                remote_port: 1000,
                by_lo: false,
                rerouted: false,
            };
            assert_eq!(lookup(&connection, &pod(flags), own.as_slice()), expected);
        }
        let syn = tcp(FAR_V4, DIAL_PORT_FIRST, POD_V4, 80, TCP_SYN);
        assert_eq!(
            ingress(&syn, &pod(flags), own.as_slice()),
            Ingress::Pass(Counter::IngressNew)
        );
        let out = egress(
            &tcp(POD_V4, 1000, FAR_V4, 80, TCP_SYN),
            SOCKET,
            &pod(flags),
            own.as_slice(),
        );
        assert_eq!(out, CAPTURE);
    }
}
