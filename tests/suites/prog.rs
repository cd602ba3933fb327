//! The TC programs by BPF_PROG_TEST_RUN: crafted packets in; verdict, rewritten packet and counters out. The verifier of this
//! kernel accepts what is loaded here.

use std::{
    net::{IpAddr, Ipv6Addr, TcpListener, UdpSocket},
    os::fd::AsRawFd,
    process::ExitCode,
};

use aya::{
    Ebpf, EbpfLoader,
    maps::{Array, HashMap, PerCpuArray, ProgramArray, SockMap},
    programs::{SchedClassifier, TestRun, TestRunOptions},
};
use redirector::redirect::ebpf::object::{EGRESS, INGRESS, OBJECT, SHARED};
use redirector_common::{
    consts::{MARK_LOOP, MARK_PROXY, MARK_REROUTED, PORT_HBONE},
    maps::{
        ADDRESSES, AddressKey, COUNTERS, DECIDERS, FLAG_DNS_CAPTURE, FLAG_LOOKUP_HAS_IFINDEX, FLAG_OBSERVE,
        FLAG_RELEASING, LISTENERS, Listener, PODS, PROBERS, PodEntry, SLOT, counter_index, listener_index,
    },
    net::Addr,
    packet::{TCP_ACK, TCP_RST, TCP_SYN},
    probes::ANY_OF_NODE,
    verdict::Counter,
};
use redirector_tests::suite::{Needs, case, main as suite};

const NEXT: i32 = -1;
const DROP: i32 = 2;
const REDIRECT: i32 = 7;

/// Not the first, so that a mistaken index shows.
const POD_SLOT: u32 = 5;
const POD_V4: &str = "10.1.0.1";
const POD_V6: &str = "fd01::1";
const FAR_V4: &str = "10.1.0.2";
const FAR_V6: &str = "fd01::2";

fn main() -> ExitCode {
    suite(
        Needs::Agent,
        2,
        vec![
            case(
                "syns_are_turned_back_to_a_listener",
                syns_are_turned_back_to_a_listener,
            ),
            case(
                "syns_without_a_listener_are_answered_with_a_reset",
                syns_without_a_listener_are_answered_with_a_reset,
            ),
            case("egress_leaves_the_rest_alone", egress_leaves_the_rest_alone),
            case("ingress_guards", ingress_guards),
            case(
                "who_probes_is_asked_for_and_looked_up",
                who_probes_is_asked_for_and_looked_up,
            ),
            case("observing_changes_nothing", observing_changes_nothing),
            case("foreign_mark_bits_survive", foreign_mark_bits_survive),
            case("dns_is_turned_back_or_dropped", dns_is_turned_back_or_dropped),
            case(
                "what_comes_from_behind_is_marked",
                what_comes_from_behind_is_marked,
            ),
        ],
    )
}

/// One instance of the programs, with no interface.
struct Instance {
    ebpf: Ebpf,
    listener: Option<TcpListener>,
}

struct Outcome {
    verdict: i32,
    packet: Vec<u8>,
    mark: u32,
    counted: Vec<Counter>,
}

impl Instance {
    fn new(flags: u32, listening: bool) -> Self {
        let mut loader = EbpfLoader::new();
        loader.override_global(SLOT, &POD_SLOT, true);
        let mut ebpf = loader.load(OBJECT).expect("loading the object");
        let entry = PodEntry {
            flags,
            ..bytemuck::Zeroable::zeroed()
        };
        set_entry(&mut ebpf, entry);
        let mut addresses =
            HashMap::<_, [u8; size_of::<AddressKey>()], u32>::try_from(ebpf.map_mut(ADDRESSES).unwrap())
                .unwrap();
        for address in [POD_V4, POD_V6] {
            let key = AddressKey {
                slot: POD_SLOT,
                address: addr(address),
            };
            addresses
                .insert(bytemuck::cast::<_, [u8; size_of::<AddressKey>()]>(key), 1, 0)
                .unwrap();
        }
        let listener = listening.then(|| {
            let listener = TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).unwrap();
            let mut map = SockMap::try_from(ebpf.map_mut(LISTENERS).unwrap()).unwrap();
            for place in [Listener::Outbound, Listener::Inbound, Listener::Hbone] {
                map.set(listener_index(POD_SLOT, place), &listener.as_raw_fd(), 0)
                    .unwrap();
            }
            listener
        });
        for name in [EGRESS, INGRESS, SHARED[0].0, SHARED[1].0] {
            let program: &mut SchedClassifier = ebpf.program_mut(name).unwrap().try_into().unwrap();
            program.load().unwrap_or_else(|error| panic!("{name}: {error}"));
        }
        for (name, place) in SHARED {
            let program: &SchedClassifier = ebpf.program(name).unwrap().try_into().unwrap();
            let fd = program.fd().unwrap().try_clone().unwrap();
            let mut map = ProgramArray::try_from(ebpf.map_mut(DECIDERS).unwrap()).unwrap();
            map.set(place as u32, &fd, 0).unwrap();
        }
        Self { ebpf, listener }
    }

    fn write(&mut self, entry: PodEntry) {
        set_entry(&mut self.ebpf, entry);
    }

    /// Makes packets of a test run count as arriving by an interface of which what arrives is outbound.
    fn reroute(&mut self) {
        let entry = PodEntry {
            flags: FLAG_LOOKUP_HAS_IFINDEX,
            // BPF_PROG_TEST_RUN has packets arrive by lo.
            rerouted: [0, 1, 0, 0, 0, 0, 0, 0],
            ..bytemuck::Zeroable::zeroed()
        };
        self.write(entry);
    }

    fn listen_for_dns(&mut self, place: Listener) -> UdpSocket {
        let socket = UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)).unwrap();
        SockMap::try_from(self.ebpf.map_mut(LISTENERS).unwrap())
            .unwrap()
            .set(listener_index(POD_SLOT, place), &socket.as_raw_fd(), 0)
            .unwrap();
        socket
    }

    fn counts(&self) -> Vec<u64> {
        let map = PerCpuArray::<_, u64>::try_from(self.ebpf.map(COUNTERS).unwrap()).unwrap();
        Counter::ALL
            .iter()
            .map(|counter| {
                map.get(&counter_index(POD_SLOT, *counter), 0)
                    .unwrap()
                    .iter()
                    .sum()
            })
            .collect()
    }

    fn run(&mut self, program: &str, packet: &[u8], mark: u32) -> Outcome {
        /// `struct __sk_buff` and, in it, `mark`.
        const CONTEXT: usize = 192;
        const MARK: std::ops::Range<usize> = 8..12;
        let before = self.counts();
        let mut context = [0; CONTEXT];
        context[MARK].copy_from_slice(&mark.to_ne_bytes());
        let (mut packet_out, mut context_out) = (vec![0; packet.len() + 64], vec![0; CONTEXT]);
        let mut options = TestRunOptions::new();
        options.data_in = Some(packet);
        options.data_out = Some(&mut packet_out);
        options.ctx_in = Some(&context);
        options.ctx_out = Some(&mut context_out);
        let program: &mut SchedClassifier = self.ebpf.program_mut(program).unwrap().try_into().unwrap();
        let result = program.test_run(options).unwrap();
        packet_out.truncate(result.data_size_out as usize);
        let counted = self.counts().into_iter().zip(before).zip(Counter::ALL);
        Outcome {
            verdict: result.return_value as i32,
            packet: packet_out,
            mark: u32::from_ne_bytes(context_out[MARK].try_into().unwrap()),
            counted: counted
                .filter(|((after, before), _)| after > before)
                .map(|(_, counter)| counter)
                .collect(),
        }
    }
}

fn set_entry(ebpf: &mut Ebpf, entry: PodEntry) {
    let bytes: [u8; size_of::<PodEntry>()] = bytemuck::cast(entry);
    Array::<_, [u8; size_of::<PodEntry>()]>::try_from(ebpf.map_mut(PODS).unwrap())
        .unwrap()
        .set(POD_SLOT, bytes, 0)
        .unwrap();
}

fn addr(text: &str) -> Addr {
    Addr::from(text.parse::<IpAddr>().unwrap())
}

/// A TCP packet with true checksums.
fn tcp(source: (&str, u16), destination: (&str, u16), flags: u8) -> Vec<u8> {
    let mut segment = vec![0; 40];
    segment[0..2].copy_from_slice(&source.1.to_be_bytes());
    segment[2..4].copy_from_slice(&destination.1.to_be_bytes());
    segment[4..8].copy_from_slice(&0xffff_ffff_u32.to_be_bytes());
    segment[12] = 10 << 4;
    segment[13] = flags;
    // An MSS option, then padding: as a real SYN, longer than its fixed header.
    segment[20..24].copy_from_slice(&[2, 4, 0x05, 0xb4]);
    segment[24..40].fill(1);
    let (source, destination) = (addr(source.0), addr(destination.0));
    let v4 = source.is_v4();
    let mut frame = vec![2, 0, 0, 0, 0, 0xbb, 2, 0, 0, 0, 0, 0xaa];
    if v4 {
        frame.extend([0x08, 0x00, 0x45, 0, 0, 60, 0, 1, 0x40, 0, 64, 6, 0, 0]);
        frame.extend(&source.to_bytes()[12..]);
        frame.extend(&destination.to_bytes()[12..]);
        let sum = checksum(&frame[14..34], 0);
        frame[24..26].copy_from_slice(&sum.to_be_bytes());
    } else {
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 40, 6, 64]);
        frame.extend(source.to_bytes());
        frame.extend(destination.to_bytes());
    }
    frame.extend(segment);
    let l4 = l4_offset(&frame);
    let sum = tcp_checksum(&frame);
    frame[l4 + 16..l4 + 18].copy_from_slice(&sum.to_be_bytes());
    frame
}

fn l4_offset(frame: &[u8]) -> usize {
    if frame[12] == 0x08 { 34 } else { 54 }
}

/// RFC 1071, over `bytes` and a sum that is carried in.
fn checksum(bytes: &[u8], carried: u32) -> u16 {
    let words = bytes
        .chunks(2)
        .map(|word| u32::from(word[0]) << 8 | u32::from(*word.get(1).unwrap_or(&0)));
    let mut sum = words.sum::<u32>() + carried;
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// What a TCP checksum should be; 0 over a packet that holds the true one.
fn tcp_checksum(frame: &[u8]) -> u16 {
    let l4 = l4_offset(frame);
    let addresses = if l4 == 34 { &frame[26..34] } else { &frame[22..54] };
    let pseudo = !checksum(addresses, 6 + (frame.len() - l4) as u32);
    checksum(&frame[l4..], u32::from(pseudo))
}

/// An address and a port.
type End = (&'static str, u16);

fn flows() -> [(End, End); 2] {
    [((POD_V4, 4000), (FAR_V4, 80)), ((POD_V6, 4000), (FAR_V6, 80))]
}

fn syns_are_turned_back_to_a_listener() {
    let mut instance = Instance::new(FLAG_LOOKUP_HAS_IFINDEX, true);
    for (pod, far) in flows() {
        let packet = tcp(pod, far, TCP_SYN);
        let outcome = instance.run(EGRESS, &packet, 0);
        assert_eq!(outcome.verdict, REDIRECT);
        assert_eq!(outcome.mark, MARK_LOOP.0);
        assert_eq!(outcome.counted, [Counter::EgressCaptured]);
        assert_eq!(
            outcome.packet[..6],
            [0; 6],
            "lo takes only frames to its own, zero, address"
        );
        assert_eq!(outcome.packet[6..], packet[6..]);
    }
    // The listener's end is the capture's end.
    instance.listener = None;
    let (pod, far) = flows()[0];
    assert_eq!(
        instance.run(EGRESS, &tcp(pod, far, TCP_SYN), 0).counted,
        [Counter::EgressRefused]
    );
}

fn syns_without_a_listener_are_answered_with_a_reset() {
    let mut instance = Instance::new(FLAG_LOOKUP_HAS_IFINDEX, false);
    for (pod, far) in flows() {
        let packet = tcp(pod, far, TCP_SYN);
        assert_eq!(tcp_checksum(&packet), 0, "the crafted packet is sound");
        let outcome = instance.run(EGRESS, &packet, 0);
        assert_eq!(
            (outcome.verdict, outcome.counted.as_slice()),
            (REDIRECT, [Counter::EgressRefused].as_slice())
        );
        let mut expected = tcp(far, pod, TCP_RST | TCP_ACK);
        expected[..12].copy_from_slice(&[2, 0, 0, 0, 0, 0xaa, 2, 0, 0, 0, 0, 0xbb]);
        let l4 = l4_offset(&expected);
        // Sequence 0, acknowledging 0xffffffff + 1.
        expected[l4 + 4..l4 + 12].fill(0);
        expected[l4 + 16..l4 + 18].fill(0);
        let sum = tcp_checksum(&expected);
        expected[l4 + 16..l4 + 18].copy_from_slice(&sum.to_be_bytes());
        assert_eq!(outcome.packet, expected);
    }
}

fn egress_leaves_the_rest_alone() {
    let mut udp = tcp((POD_V4, 4000), (FAR_V4, 53), TCP_SYN);
    udp[23] = 17;
    let mut later_fragment = tcp((POD_V4, 4000), (FAR_V4, 80), TCP_SYN);
    later_fragment[21] = 100;
    let mut arp = tcp((POD_V4, 4000), (FAR_V4, 80), TCP_SYN);
    arp[13] = 0x06;
    let short = tcp((POD_V4, 4000), (FAR_V4, 80), TCP_SYN)[..40].to_vec();
    let mut tagged = tcp((POD_V4, 4000), (FAR_V4, 80), TCP_SYN);
    tagged[12..14].copy_from_slice(&[0x81, 0x00]);
    // The flags come with the next fragment; what looks like them here is behind the packet's end.
    let mut tiny_fragment = tcp((POD_V4, 4000), (FAR_V4, 80), TCP_ACK);
    tiny_fragment[16..18].copy_from_slice(&28_u16.to_be_bytes());
    tiny_fragment[20] = 0x20;
    let syn = |flow: usize| tcp(flows()[flow].0, flows()[flow].1, TCP_SYN);
    let ack = |flow: usize| tcp(flows()[flow].0, flows()[flow].1, TCP_ACK);
    for (what, flags, packet, mark, verdict, counter) in [
        ("UDP", 0, udp, 0, NEXT, Counter::EgressOther),
        (
            "a later fragment",
            0,
            later_fragment,
            0,
            NEXT,
            Counter::EgressOther,
        ),
        ("ARP", 0, arp, 0, NEXT, Counter::EgressOther),
        (
            "a connection from before",
            0,
            ack(0),
            0,
            NEXT,
            Counter::EgressUncaptured,
        ),
        (
            "a connection from before, v6",
            0,
            ack(1),
            0,
            NEXT,
            Counter::EgressUncaptured,
        ),
        (
            "the proxy's answer",
            0,
            ack(0),
            MARK_PROXY.0 | 0x1000,
            NEXT,
            Counter::EgressProxy,
        ),
        (
            "releasing",
            FLAG_RELEASING,
            syn(0),
            0,
            NEXT,
            Counter::EgressUncaptured,
        ),
        ("unreadable", 0, short, 0, DROP, Counter::EgressMalformed),
        ("a tag in the frame", 0, tagged, 0, DROP, Counter::EgressMalformed),
        (
            "a tiny first fragment",
            0,
            tiny_fragment,
            0,
            DROP,
            Counter::EgressMalformed,
        ),
        (
            "a forged mark",
            0,
            syn(1),
            MARK_PROXY.0,
            REDIRECT,
            Counter::EgressCaptured,
        ),
    ] {
        let outcome = Instance::new(flags, true).run(EGRESS, &packet, mark);
        assert_eq!(
            (outcome.verdict, outcome.counted),
            (verdict, vec![counter]),
            "{what}"
        );
        if verdict == NEXT {
            assert_eq!((outcome.packet, outcome.mark), (packet, mark), "{what}");
        }
    }
}

fn ingress_guards() {
    let syn = |from, to| tcp(from, to, TCP_SYN);
    let device = FLAG_LOOKUP_HAS_IFINDEX;
    for (what, flags, packet, verdict, counter) in [
        (
            "new",
            device,
            syn((FAR_V4, 4000), (POD_V4, 80)),
            NEXT,
            Counter::IngressNew,
        ),
        (
            "new, v6",
            0,
            syn((FAR_V6, 4000), (POD_V6, 80)),
            NEXT,
            Counter::IngressNew,
        ),
        (
            "later",
            0,
            tcp((FAR_V4, 4000), (POD_V4, 80), TCP_ACK),
            NEXT,
            Counter::IngressOther,
        ),
        (
            "a dial port",
            device,
            syn((FAR_V4, 62_000), (POD_V4, 80)),
            NEXT,
            Counter::IngressNew,
        ),
        (
            "HBONE",
            0,
            syn((FAR_V4, 62_000), (POD_V4, PORT_HBONE)),
            NEXT,
            Counter::IngressNew,
        ),
        (
            "the pod's own address",
            device,
            syn((POD_V6, 4000), (POD_V6, 80)),
            DROP,
            Counter::IngressSpoofed,
        ),
    ] {
        let outcome = Instance::new(flags, true).run(INGRESS, &packet, 0);
        assert_eq!(
            (outcome.verdict, outcome.counted),
            (verdict, vec![counter]),
            "{what}"
        );
        assert_eq!(outcome.packet, packet, "{what}");
    }
    // Without the device, the port range decides, and the proxy's absence is answered at once.
    let outcome = Instance::new(0, false).run(INGRESS, &syn((FAR_V4, 62_000), (POD_V4, 80)), 0);
    assert_eq!(outcome.counted, [Counter::IngressRefused]);
    let l4 = l4_offset(&outcome.packet);
    assert_eq!(outcome.packet[l4 + 13], TCP_RST | TCP_ACK);
}

/// No socket has sent these packets, so they are no probes even where anybody of the node may probe.
fn who_probes_is_asked_for_and_looked_up() {
    let mut instance = Instance::new(FLAG_LOOKUP_HAS_IFINDEX, true);
    instance.write(PodEntry {
        flags: FLAG_LOOKUP_HAS_IFINDEX,
        node_nsid: 1,
        ..bytemuck::Zeroable::zeroed()
    });
    let mut probers = HashMap::<_, u64, u32>::try_from(instance.ebpf.map_mut(PROBERS).unwrap()).unwrap();
    probers.insert(ANY_OF_NODE, 1, 0).unwrap();
    for (source, destination) in [
        ((FAR_V4, 4000), (POD_V4, 80)),
        ((FAR_V6, 4000), (POD_V6, 80)),
        ((FAR_V4, 62_000), (POD_V4, 80)),
        ((FAR_V6, 62_000), (POD_V6, 80)),
    ] {
        let outcome = instance.run(INGRESS, &tcp(source, destination, TCP_SYN), 0);
        assert_eq!(
            (outcome.verdict, outcome.counted.as_slice()),
            (NEXT, [Counter::IngressNew].as_slice())
        );
    }
}

fn observing_changes_nothing() {
    let mut instance = Instance::new(FLAG_OBSERVE, true);
    for (pod, far) in flows() {
        let packet = tcp(pod, far, TCP_SYN);
        let outcome = instance.run(EGRESS, &packet, 0x77);
        assert_eq!(
            (outcome.verdict, &outcome.packet, outcome.mark),
            (NEXT, &packet, 0x77)
        );
        assert_eq!(outcome.counted, [Counter::EgressCaptured]);
    }
    let spoofed = tcp((POD_V6, 4000), (POD_V6, 80), TCP_SYN);
    let outcome = instance.run(INGRESS, &spoofed, 0);
    assert_eq!(
        (outcome.verdict, outcome.counted.as_slice()),
        (NEXT, [Counter::IngressSpoofed].as_slice())
    );
}

fn foreign_mark_bits_survive() {
    let (pod, far) = flows()[0];
    let outcome = Instance::new(0, true).run(EGRESS, &tcp(pod, far, TCP_SYN), 0xabcd_e123);
    assert_eq!(outcome.mark, 0xabcd_e000 | MARK_LOOP.0);
}

/// A datagram; its checksum is nobody's matter here.
fn udp(source: End, destination: End) -> Vec<u8> {
    let mut frame = tcp(source, destination, TCP_SYN);
    let protocol = if l4_offset(&frame) == 34 { 23 } else { 20 };
    frame[protocol] = 17;
    frame
}

fn dns_is_turned_back_or_dropped() {
    let query = |pod: End, far: End| udp(pod, (far.0, 53));
    for ((pod, far), place) in flows().into_iter().zip([Listener::DnsUdpV4, Listener::DnsUdpV6]) {
        let packet = query(pod, far);
        let mut instance = Instance::new(FLAG_DNS_CAPTURE, true);
        let outcome = instance.run(EGRESS, &packet, 0);
        assert_eq!(
            (outcome.verdict, outcome.counted),
            (DROP, vec![Counter::EgressDnsRefused])
        );
        let listener = instance.listen_for_dns(place);
        let outcome = instance.run(EGRESS, &packet, 0);
        assert_eq!(
            (outcome.verdict, outcome.mark, outcome.counted),
            (REDIRECT, MARK_LOOP.0, vec![Counter::EgressDns])
        );
        assert_eq!(outcome.packet[6..], packet[6..]);
        // The other family has none.
        let (other_pod, other_far) = flows()[usize::from(place == Listener::DnsUdpV4)];
        let outcome = instance.run(EGRESS, &query(other_pod, other_far), 0);
        assert_eq!(outcome.counted, [Counter::EgressDnsRefused]);
        drop(listener);
        assert_eq!(
            instance.run(EGRESS, &packet, 0).counted,
            [Counter::EgressDnsRefused]
        );
        // By TCP it is refused as all connections are; the listeners for the rest are no help.
        let outcome = instance.run(EGRESS, &tcp(pod, (far.0, 53), TCP_SYN), 0);
        assert_eq!(
            (outcome.verdict, outcome.counted),
            (REDIRECT, vec![Counter::EgressRefused])
        );
        let outcome = Instance::new(0, true).run(EGRESS, &packet, 0);
        assert_eq!(
            (outcome.verdict, outcome.counted),
            (NEXT, vec![Counter::EgressOther])
        );
    }
}

fn what_comes_from_behind_is_marked() {
    for (inner, (own, far)) in [("10.88.0.2", flows()[0]), ("fd88::2", flows()[1])] {
        for (listening, to, flags, verdict, mark, counter) in [
            (
                true,
                far,
                TCP_SYN,
                NEXT,
                MARK_REROUTED.0,
                Counter::IngressRerouted,
            ),
            (
                false,
                far,
                TCP_SYN,
                REDIRECT,
                MARK_PROXY.0,
                Counter::IngressRefused,
            ),
            (true, far, TCP_ACK, NEXT, 0, Counter::IngressOther),
            (true, own, TCP_SYN, NEXT, 0, Counter::IngressNew),
        ] {
            let mut instance = Instance::new(0, listening);
            instance.reroute();
            let mut packet = tcp((inner, 4000), to, flags);
            // For this host: lo's address is zero.
            packet[..6].fill(0);
            let outcome = instance.run(INGRESS, &packet, 0x77000);
            assert_eq!(
                (outcome.verdict, outcome.mark, outcome.counted),
                (verdict, 0x77000 | mark, vec![counter]),
                "{inner} {flags:#x}"
            );
            if verdict == NEXT {
                assert_eq!(outcome.packet, packet);
            }
        }
        // On its way past this host.
        let mut instance = Instance::new(0, true);
        instance.reroute();
        let outcome = instance.run(INGRESS, &tcp((inner, 4000), far, TCP_SYN), 0);
        assert_eq!((outcome.verdict, outcome.mark), (NEXT, 0));
    }
}
