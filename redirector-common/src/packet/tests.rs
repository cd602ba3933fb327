use std::{net::IpAddr, vec, vec::Vec};

use proptest::prelude::*;

use super::*;

const SOURCE_PORT: u16 = 40_000;
const DESTINATION_PORT: u16 = 443;

fn tcp_header(flags: u8) -> Vec<u8> {
    let mut header = vec![0; 20];
    header[0..2].copy_from_slice(&SOURCE_PORT.to_be_bytes());
    header[2..4].copy_from_slice(&DESTINATION_PORT.to_be_bytes());
    header[12] = 5 << 4;
    header[13] = flags;
    header
}

fn v4(options_words: u8, fragment: u16, protocol: u8, payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![0; 14 + 20 + usize::from(options_words) * 4];
    frame[12..14].copy_from_slice(&ETH_P_IP.to_be_bytes());
    frame[14] = 0x40 | (5 + options_words);
    frame[20..22].copy_from_slice(&fragment.to_be_bytes());
    frame[23] = protocol;
    frame[26..30].copy_from_slice(&[10, 0, 0, 1]);
    frame[30..34].copy_from_slice(&[10, 0, 0, 2]);
    frame.extend_from_slice(payload);
    let total_length = u16::try_from(frame.len() - 14).unwrap();
    frame[16..18].copy_from_slice(&total_length.to_be_bytes());
    frame
}

/// Each extension header as (its number, its bytes after the next-header byte).
fn v6(extensions: &[(u8, Vec<u8>)], last: u8, payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![0; 14 + 40];
    frame[12..14].copy_from_slice(&ETH_P_IPV6.to_be_bytes());
    frame[14] = 0x60;
    frame[20] = extensions.first().map_or(last, |(number, _)| *number);
    frame[22] = 0xfd;
    frame[37] = 1;
    frame[38] = 0xfd;
    frame[53] = 2;
    for (i, (_, bytes)) in extensions.iter().enumerate() {
        frame.push(extensions.get(i + 1).map_or(last, |(number, _)| *number));
        frame.extend_from_slice(bytes);
    }
    frame.extend_from_slice(payload);
    let payload_length = u16::try_from(frame.len() - 54).unwrap();
    frame[18..20].copy_from_slice(&payload_length.to_be_bytes());
    frame
}

fn options(number: u8, units: u8) -> (u8, Vec<u8>) {
    let mut bytes = vec![0; 7 + usize::from(units) * 8];
    bytes[0] = units;
    (number, bytes)
}

fn fragment(offset_units: u16, more: bool) -> (u8, Vec<u8>) {
    let field = (offset_units << 3) | u16::from(more);
    let mut bytes = vec![0; 7];
    bytes[1..3].copy_from_slice(&field.to_be_bytes());
    (44, bytes)
}

fn parse_frame(frame: &[u8]) -> Parsed {
    parse(frame)
}

fn tcp(frame: &[u8]) -> TcpMeta {
    match parse_frame(frame) {
        Parsed::Tcp(tcp) => tcp,
        other => panic!("{other:?}"),
    }
}

#[test]
fn tcp_is_found_behind_ipv4_options() {
    for words in [0, 1, 10] {
        let meta = tcp(&v4(words, 0, 6, &tcp_header(TCP_SYN)));
        assert_eq!(meta.l4_offset, 34 + u32::from(words) * 4);
        assert_eq!(
            (meta.source_port, meta.destination_port),
            (SOURCE_PORT, DESTINATION_PORT)
        );
        assert_eq!(IpAddr::from(meta.source), "10.0.0.1".parse::<IpAddr>().unwrap());
        assert_eq!(
            IpAddr::from(meta.destination),
            "10.0.0.2".parse::<IpAddr>().unwrap()
        );
        assert!(meta.v4 && meta.is_initial_syn());
    }
}

#[test]
fn tcp_is_found_behind_ipv6_extension_headers() {
    let ah = (51, {
        let mut bytes = vec![0; 23];
        bytes[0] = 4;
        bytes
    });
    for extensions in [
        vec![],
        vec![options(0, 0)],
        vec![options(60, 3)],
        vec![options(0, 0), options(43, 2), options(60, 1), options(135, 0)],
        vec![ah],
        vec![fragment(0, true)],
        (0..8).map(|_| options(60, 0)).collect(),
    ] {
        let meta = tcp(&v6(&extensions, 6, &tcp_header(TCP_SYN)));
        let length: usize = extensions.iter().map(|(_, bytes)| bytes.len() + 1).sum();
        assert_eq!(meta.l4_offset as usize, 54 + length, "{extensions:?}");
        assert_eq!(
            IpAddr::from(meta.destination),
            "fd00::2".parse::<IpAddr>().unwrap()
        );
        assert!(!meta.v4);
    }
}

#[test]
fn more_extension_headers_than_are_walked_are_told_apart_from_other_protocols() {
    let nine: Vec<_> = (0..9).map(|_| options(60, 0)).collect();
    assert_eq!(
        parse_frame(&v6(&nine, 6, &tcp_header(TCP_SYN))),
        Parsed::TooManyHeaders
    );
    assert_eq!(parse_frame(&v6(&[options(60, 0)], 58, &[0; 8])), Parsed::Other);
}

#[test]
fn later_fragments_have_no_tcp_header() {
    assert_eq!(parse_frame(&v4(0, 100, 6, &[0xff; 40])), Parsed::Fragment);
    assert_eq!(
        parse_frame(&v6(&[fragment(100, false)], 6, &[0xff; 40])),
        Parsed::Fragment
    );
    assert_eq!(
        parse_frame(&v6(&[fragment(100, false)], 17, &[0xff; 40])),
        Parsed::Other
    );
    // More-fragments and don't-fragment alone are no offset.
    assert!(matches!(
        parse_frame(&v4(0, 0x6000, 6, &tcp_header(TCP_SYN))),
        Parsed::Tcp(_)
    ));
}

#[test]
fn other_protocols_and_short_packets() {
    for (frame, expected) in [
        (v4(0, 0, 17, &[0; 3]), Parsed::Other),
        (v4(0, 0, 1, &[0; 8]), Parsed::Other),
        (v4(0, 0, 6, &[0; 19]), Parsed::Malformed),
        (v4(0, 0, 6, &[0; 20]), Parsed::Tcp(tcp(&v4(0, 0, 6, &[0; 20])))),
        (v6(&[], 6, &[0; 19]), Parsed::Malformed),
        (v4(0, 0, 6, &[])[..33].to_vec(), Parsed::Malformed),
        (v6(&[], 58, &[0; 8]), Parsed::Other),
        (v6(&[options(0, 9)], 6, &[])[..60].to_vec(), Parsed::Malformed),
        (v6(&[], 6, &[])[..53].to_vec(), Parsed::Malformed),
    ] {
        // An IPv4 header length below 5 words is malformed whatever follows.
        if frame[14] >> 4 == 4 && frame.len() > 40 {
            let mut short = frame.clone();
            short[14] = 0x44;
            if short[23] == 6 {
                assert_eq!(parse_frame(&short), Parsed::Malformed);
            }
        }
        assert_eq!(parse_frame(&frame), expected, "{frame:02x?}");
    }
    let mut arp = v4(0, 0, 6, &tcp_header(TCP_SYN));
    arp[12..14].copy_from_slice(&0x0806_u16.to_be_bytes());
    assert_eq!(parse_frame(&arp), Parsed::Other);
}

#[test]
fn a_datagrams_ends_are_read_and_its_fragments_are_left_alone() {
    let payload = [0x9c, 0x40, 0, 53, 0, 8, 0, 0];
    for (frame, source, destination) in [
        (v4(0, 0x4000, 17, &payload), "10.0.0.1", "10.0.0.2"),
        (v4(3, 0, 17, &payload), "10.0.0.1", "10.0.0.2"),
        (v6(&[], 17, &payload), "fd00::1", "fd00::2"),
        (
            v6(&[options(0, 1), options(60, 0)], 17, &payload),
            "fd00::1",
            "fd00::2",
        ),
        (v6(&[fragment(0, false)], 17, &payload), "fd00::1", "fd00::2"),
    ] {
        let Parsed::Udp(udp) = parse_frame(&frame) else {
            panic!("{frame:02x?}")
        };
        assert_eq!(IpAddr::from(udp.source), source.parse::<IpAddr>().unwrap());
        assert_eq!(
            IpAddr::from(udp.destination),
            destination.parse::<IpAddr>().unwrap()
        );
        assert_eq!((udp.destination_port, udp.v4), (53, source.contains('.')));
    }
    for frame in [
        v4(0, 0x2000, 17, &payload),
        v4(0, 100, 17, &payload),
        v6(&[fragment(0, true)], 17, &payload),
        v6(&[fragment(100, false)], 17, &payload),
    ] {
        assert_eq!(parse_frame(&frame), Parsed::Other, "{frame:02x?}");
    }
}

#[test]
fn only_a_bare_syn_is_initial() {
    for flags in 0..=u8::MAX {
        let initial = tcp(&v4(0, 0, 6, &tcp_header(flags))).is_initial_syn();
        // PSH, URG, ECE and CWR may come with it.
        assert_eq!(initial, flags & 0b1_0111 == TCP_SYN, "{flags:08b}");
    }
}

/// RFC 1858: a first fragment with less than a TCP header, the rest of which comes with the next. What lies behind the packet in
/// the frame is no part of it, however much it looks like a header.
#[test]
fn a_header_that_is_not_all_in_the_packet_is_malformed_whatever_follows_it() {
    let whole = tcp_header(TCP_ACK);
    let mut first = v4(0, 0x2000, 6, &whole);
    first[16..18].copy_from_slice(&28_u16.to_be_bytes());
    assert_eq!(parse_frame(&first), Parsed::Malformed);
    let mut first = v6(&[fragment(0, true)], 6, &whole);
    first[18..20].copy_from_slice(&16_u16.to_be_bytes());
    assert_eq!(parse_frame(&first), Parsed::Malformed);
    // Super-packets of more than 64 KiB have no length in their headers.
    let (mut big_v4, mut big_v6) = (v4(0, 0, 6, &whole), v6(&[], 6, &whole));
    big_v4[16..18].fill(0);
    big_v6[18..20].fill(0);
    assert!(matches!(parse_frame(&big_v4), Parsed::Tcp(_)));
    assert!(matches!(parse_frame(&big_v6), Parsed::Tcp(_)));
}

#[test]
fn tags_in_the_frame_are_told() {
    for ethertype in [ETH_P_8021Q, ETH_P_8021AD] {
        let mut frame = v4(0, 0, 6, &tcp_header(TCP_SYN));
        frame[12..14].copy_from_slice(&ethertype.to_be_bytes());
        assert_eq!(parse_frame(&frame), Parsed::Tagged);
    }
    assert_eq!(parse_frame(&[0; 13]), Parsed::Malformed);
}

proptest! {
    #[test]
    fn any_bytes_are_parsed_without_panic(frame in prop::collection::vec(any::<u8>(), 14..200), v6: bool) {
        let (mut frame, ethertype) = (frame, if v6 { ETH_P_IPV6 } else { ETH_P_IP });
        frame[12..14].copy_from_slice(&ethertype.to_be_bytes());
        if let Parsed::Tcp(meta) = parse(frame.as_slice()) {
            prop_assert!(meta.l4_offset as usize + 14 <= frame.len());
            prop_assert_eq!(meta.v4, !v6);
        }
    }

    #[test]
    fn truncation_never_turns_tcp_into_another_connection(units in prop::collection::vec(0_u8..4, 0..8), cut in 0_usize..300) {
        let extensions: Vec<_> = units.into_iter().map(|units| options(60, units)).collect();
        let frame = v6(&extensions, 6, &tcp_header(TCP_SYN));
        let whole = parse_frame(&frame);
        let part = parse(&frame[..cut.min(frame.len()).max(14)]);
        prop_assert!(part == whole || part == Parsed::Malformed);
    }
}

proptest! {
    /// Frames that are nearly plain TCP: what a glance takes for a later packet is one.
    #[test]
    fn a_glance_sees_what_the_parser_sees(
        v6 in any::<bool>(),
        flags in any::<u8>(),
        changes in prop::collection::vec((12..74_usize, prop_oneof![any::<u8>(), Just(0), Just(6), Just(0x45)]), 0..3),
    ) {
        let mut frame = [0; PLAIN_V6];
        if v6 {
            frame[12..15].copy_from_slice(&[0x86, 0xdd, 0x60]);
            frame[18..21].copy_from_slice(&[0, 20, IPPROTO_TCP]);
            frame[67] = flags;
        } else {
            frame[12..18].copy_from_slice(&[0x08, 0x00, 0x45, 0, 0, 40]);
            frame[23] = IPPROTO_TCP;
            frame[47] = flags;
        }
        let unchanged = changes.is_empty();
        for (at, byte) in changes {
            frame[at] = byte;
        }
        let first: &[u8; PLAIN_V4] = frame[..PLAIN_V4].try_into().unwrap();
        let glance = is_plain_later_v4(first) || is_plain_later_v6(&frame);
        let later = matches!(parse(frame.as_slice()), Parsed::Tcp(tcp) if !tcp.is_initial_syn());
        prop_assert!(!glance || later);
        if unchanged {
            prop_assert_eq!(glance, later);
        }
    }
}
