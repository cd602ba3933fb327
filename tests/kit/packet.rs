//! Packets made by hand, for what no TCP socket sends: fragments, tags, a SYN without a connection behind it.
//!
//! [`send`] and [`handshake`] use raw IP sockets, which pass the pod's output hooks; [`send_frames`] uses a packet socket, which
//! passes its traffic control only.

use std::{
    io::{self, Read},
    net::{IpAddr, SocketAddr},
    path::Path,
    time::{Duration, Instant},
};

use socket2::{Domain, Protocol, Socket, Type};

use crate::{
    netns::Namespace,
    process::{command, output},
};

const TCP: u8 = 6;
const FRAGMENT: u8 = 44;
const ICMP_V4: u8 = 1;
const ICMP_V6: u8 = 58;
/// EtherType of a VLAN tag (802.1Q).
const VLAN: u16 = 0x8100;
/// How long the answer to a packet made by hand is waited for. All is on one machine; there is no retry behind it.
const ANSWER_DEADLINE: Duration = Duration::from_millis(400);
const PYTHON: &str = "/usr/bin/python3";

/// A TCP SYN of 40 bytes: 20 of them options, so that it can be cut where a fragment may end.
pub fn syn(from: SocketAddr, to: SocketAddr) -> Vec<u8> {
    let mut segment = [from.port().to_be_bytes(), to.port().to_be_bytes()].concat();
    // Sequence number, no acknowledgement, 10 words of header, SYN, window, checksum, no urgent data.
    segment.extend([1, 2, 3, 4, 0, 0, 0, 0, 0xa0, 0x02, 0xfa, 0xf0, 0, 0, 0, 0]);
    // MSS 1400, and no-operations.
    segment.extend([2, 4, 5, 0x78]);
    segment.extend([1; 16]);
    let sum = checksum(&pseudo_header(from.ip(), to.ip(), TCP, &segment), &segment);
    segment[16..18].copy_from_slice(&sum.to_be_bytes());
    segment
}

/// An IP packet. Addresses of one family.
///
/// # Panics
/// When they are not.
pub fn ip(from: IpAddr, to: IpAddr, protocol: u8, payload: &[u8]) -> Vec<u8> {
    header(from, to, protocol, payload.len(), 0)
        .into_iter()
        .chain(payload.iter().copied())
        .collect()
}

/// A TCP segment as one IP packet.
pub fn segment(from: SocketAddr, to: SocketAddr, segment: &[u8]) -> Vec<u8> {
    ip(from.ip(), to.ip(), TCP, segment)
}

/// A TCP segment as two fragments, the first with `first` bytes of it, a multiple of 8.
pub fn fragments(from: SocketAddr, to: SocketAddr, segment: &[u8], first: usize) -> [Vec<u8>; 2] {
    const MORE_V4: u16 = 0x2000;
    const MORE_V6: u16 = 1;
    let (head, tail) = segment.split_at(first);
    let offset = u16::try_from(first).expect("a segment is short");
    match from.ip() {
        IpAddr::V4(_) => [(head, MORE_V4), (tail, offset / 8)].map(|(part, flags)| {
            let mut packet = header(from.ip(), to.ip(), TCP, part.len(), flags);
            packet.extend(part);
            packet
        }),
        IpAddr::V6(_) => [(head, MORE_V6), (tail, offset)].map(|(part, flags)| {
            let mut payload = vec![TCP, 0];
            payload.extend(flags.to_be_bytes());
            payload.extend([0, 0, 0x52, 0x44]);
            payload.extend(part);
            ip(from.ip(), to.ip(), FRAGMENT, &payload)
        }),
    }
}

/// An IP header. `flags` are IPv4's three bits and fragment offset.
fn header(from: IpAddr, to: IpAddr, protocol: u8, length: usize, flags: u16) -> Vec<u8> {
    let length = u16::try_from(length).expect("a packet is short");
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let mut header = vec![0x45, 0];
            header.extend((length + 20).to_be_bytes());
            header.extend([0x52, 0x44]);
            header.extend(flags.to_be_bytes());
            header.extend([64, protocol, 0, 0]);
            header.extend(from.octets());
            header.extend(to.octets());
            let sum = checksum(&[], &header);
            header[10..12].copy_from_slice(&sum.to_be_bytes());
            header
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            let mut header = vec![0x60, 0, 0, 0];
            header.extend(length.to_be_bytes());
            header.extend([protocol, 64]);
            header.extend(from.octets());
            header.extend(to.octets());
            header
        }
        _ => panic!("{from} and {to} are of two families"),
    }
}

fn pseudo_header(from: IpAddr, to: IpAddr, protocol: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("a packet is short");
    let mut pseudo = match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => [from.octets(), to.octets()].concat(),
        (IpAddr::V6(from), IpAddr::V6(to)) => [from.octets(), to.octets()].concat(),
        _ => panic!("{from} and {to} are of two families"),
    };
    pseudo.extend(length.to_be_bytes());
    pseudo.extend([0, 0, 0, protocol]);
    pseudo
}

/// RFC 1071. `pseudo` has an even length.
fn checksum(pseudo: &[u8], bytes: &[u8]) -> u16 {
    let words = pseudo.chunks(2).chain(bytes.chunks(2));
    let mut sum: u32 = words
        .map(|word| u32::from(word[0]) << 8 | u32::from(word.get(1).copied().unwrap_or(0)))
        .sum();
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    !u16::try_from(sum).expect("folded")
}

/// An Ethernet frame around an IP packet, with a VLAN tag of that id and priority 5 if there is one.
pub fn frame(from: [u8; 6], to: [u8; 6], vlan: Option<u16>, packet: &[u8]) -> Vec<u8> {
    let mut frame = [to, from].concat();
    if let Some(id) = vlan {
        frame.extend(VLAN.to_be_bytes());
        frame.extend((5 << 13 | id).to_be_bytes());
    }
    frame.extend(if packet[0] >> 4 == 4 {
        [0x08, 0x00]
    } else {
        [0x86, 0xdd]
    });
    frame.extend(packet);
    frame
}

/// Sends frames by a packet socket from an interface.
///
/// # Panics
/// When they can't be sent.
pub fn send_frames(ns: &Namespace, interface: &str, frames: &[Vec<u8>]) {
    let hex = |frame: &Vec<u8>| -> String { frame.iter().map(|byte| format!("{byte:02x}")).collect() };
    let mut python = python(ns);
    python.args(["frames", interface]).args(frames.iter().map(hex));
    let (status, text) = output(&mut python, crate::app::IO_DEADLINE);
    assert!(status.success(), "sending frames: {text}");
}

/// Connects a TCP socket with one more option, given by numbers, asks with a line, and returns the answer or what went wrong.
pub fn ask_with_option(
    ns: &Namespace,
    to: SocketAddr,
    level: i32,
    option: i32,
    value: &[u8],
) -> io::Result<String> {
    let hex: String = value.iter().map(|byte| format!("{byte:02x}")).collect();
    let mut python = python(ns);
    python
        .args(["ask", &to.ip().to_string(), &to.port().to_string()])
        .args([level.to_string(), option.to_string(), hex]);
    let (status, text) = output(&mut python, crate::app::IO_DEADLINE);
    if status.success() {
        Ok(text)
    } else {
        Err(io::Error::other(text))
    }
}

fn python(ns: &Namespace) -> std::process::Command {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/sockets.py");
    let mut python = command(ns, PYTHON);
    // Nothing of the site's packages is wanted, and they take their time.
    python.args(["-I", "-S"]).arg(script);
    python
}

/// What came back for a SYN made by hand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Handshake {
    /// SYN and ACK: a listener.
    Accepted,
    /// RST.
    Refused,
    /// Nothing.
    Silence,
}

/// Sends whole IP packets out of a namespace by a raw socket, and waits for a TCP answer from `to` to `from`.
pub fn handshake(
    ns: &Namespace,
    from: SocketAddr,
    to: SocketAddr,
    packets: &[Vec<u8>],
) -> io::Result<Handshake> {
    let socket = ns.run(|| raw(from, Protocol::TCP))?;
    for packet in packets {
        send(&socket, packet, to)?;
    }
    answer(&socket, from, to)
}

/// Waits, at a raw socket, for a TCP answer from `to` to `from`.
pub fn answer(socket: &Socket, from: SocketAddr, to: SocketAddr) -> io::Result<Handshake> {
    let end = Instant::now() + ANSWER_DEADLINE;
    let mut bytes = [0; 2048];
    while let Some(left) = end
        .checked_duration_since(Instant::now())
        .filter(|left| !left.is_zero())
    {
        socket.set_read_timeout(Some(left))?;
        let mut reader = socket;
        let length = match reader.read(&mut bytes) {
            Ok(length) => length,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                break;
            }
            Err(error) => return Err(error),
        };
        // IPv4's raw sockets give the header as well, IPv6's don't.
        let start = if from.is_ipv4() {
            usize::from(bytes[0] & 0xf) * 4
        } else {
            0
        };
        let Some(tcp) = bytes[..length].get(start..start + 14) else {
            continue;
        };
        let ports = [to.port().to_be_bytes(), from.port().to_be_bytes()].concat();
        match tcp[13] & 0x16 {
            _ if tcp[..4] != ports => {}
            0x12 => return Ok(Handshake::Accepted),
            flags if flags & 0x04 != 0 => return Ok(Handshake::Refused),
            _ => {}
        }
    }
    Ok(Handshake::Silence)
}

/// A raw socket whose packets bring their IP header, in the namespace of the calling thread.
pub fn raw(like: SocketAddr, protocol: Protocol) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(like), Type::RAW, Some(protocol))?;
    if like.is_ipv4() {
        socket.set_header_included_v4(true)?;
    } else {
        socket.set_header_included_v6(true)?;
    }
    Ok(socket)
}

/// Sends a whole IP packet by a [`raw`] socket.
pub fn send(socket: &Socket, packet: &[u8], to: SocketAddr) -> io::Result<()> {
    // IPv6's raw sockets take the port of the address for a protocol, and refuse another.
    socket
        .send_to(packet, &SocketAddr::new(to.ip(), 0).into())
        .map(|_| ())
}

/// Sends an ICMP echo request, and whether it was answered.
pub fn ping(ns: &Namespace, from: IpAddr, to: IpAddr) -> io::Result<bool> {
    let (protocol, request, reply) = match to {
        IpAddr::V4(_) => (ICMP_V4, 8, 0),
        IpAddr::V6(_) => (ICMP_V6, 128, 129),
    };
    let body = b"rdr-echo";
    let mut message = vec![request, 0, 0, 0];
    message.extend(body);
    // IPv6's checksum covers the addresses; IPv4's does not.
    let pseudo = match to {
        IpAddr::V4(_) => Vec::new(),
        IpAddr::V6(_) => pseudo_header(from, to, protocol, &message),
    };
    let sum = checksum(&pseudo, &message);
    message[2..4].copy_from_slice(&sum.to_be_bytes());

    let like = SocketAddr::new(from, 0);
    let socket = ns.run(|| raw(like, Protocol::from(i32::from(protocol))))?;
    send(&socket, &ip(from, to, protocol, &message), SocketAddr::new(to, 0))?;
    let end = Instant::now() + crate::app::IO_DEADLINE;
    let mut bytes = [0; 2048];
    while let Some(left) = end
        .checked_duration_since(Instant::now())
        .filter(|left| !left.is_zero())
    {
        socket.set_read_timeout(Some(left))?;
        let mut reader = &socket;
        let length = reader.read(&mut bytes)?;
        let start = if from.is_ipv4() {
            usize::from(bytes[0] & 0xf) * 4
        } else {
            0
        };
        let message = bytes[..length].get(start..).unwrap_or_default();
        if message.first() == Some(&reply) && message.get(4..) == Some(body) {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends(v4: bool) -> (SocketAddr, SocketAddr) {
        if v4 {
            ("10.0.0.1:1000".parse().unwrap(), "10.0.0.2:80".parse().unwrap())
        } else {
            ("[fd00::1]:1000".parse().unwrap(), "[fd00::2]:80".parse().unwrap())
        }
    }

    #[test]
    fn checksums_come_out_even() {
        // RFC 1071: over data and its checksum the sum is all ones.
        for v4 in [true, false] {
            let (from, to) = ends(v4);
            let segment = syn(from, to);
            assert_eq!(segment.len(), 40);
            assert_eq!(
                checksum(&pseudo_header(from.ip(), to.ip(), TCP, &segment), &segment),
                0
            );
        }
        let (from, to) = ends(true);
        assert_eq!(checksum(&[], &header(from.ip(), to.ip(), TCP, 7, 0)), 0);
    }

    #[test]
    fn fragments_hold_the_segment() {
        for (v4, header) in [(true, 20), (false, 48)] {
            let (from, to) = ends(v4);
            let segment = syn(from, to);
            let [first, second] = fragments(from, to, &segment, 24);
            assert_eq!(first[header..], segment[..24]);
            assert_eq!(second[header..], segment[24..]);
            let offset = if v4 { &second[6..8] } else { &second[42..44] };
            assert_eq!(offset, if v4 { [0, 3] } else { [0, 24] });
        }
    }

    #[test]
    fn a_tag_is_between_the_addresses_and_the_type() {
        let (from, to) = ends(false);
        let packet = segment(from, to, &syn(from, to));
        let tagged = frame([1; 6], [2; 6], Some(7), &packet);
        assert_eq!(tagged[..6], [2; 6]);
        assert_eq!(tagged[12..18], [0x81, 0, 0xa0, 7, 0x86, 0xdd]);
        assert_eq!(frame([1; 6], [2; 6], None, &packet)[12..14], [0x86, 0xdd]);
    }
}
