//! From headers to [`TcpMeta`] and [`UdpMeta`]: IPv4 with options, IPv6 with a bounded number of extension headers, TCP and UDP.

use crate::net::Addr;

/// EtherType of IPv4.
pub const ETH_P_IP: u16 = 0x0800;
/// EtherType of IPv6.
pub const ETH_P_IPV6: u16 = 0x86dd;
/// EtherType of a frame with a VLAN tag (802.1Q).
pub const ETH_P_8021Q: u16 = 0x8100;
/// EtherType of a frame with an outer VLAN tag (802.1ad).
pub const ETH_P_8021AD: u16 = 0x88a8;
/// Length of an Ethernet header.
pub const ETH_HLEN: u32 = 14;

/// Most IPv6 extension headers that are walked. Linux itself gives hosts 8 options per header and real traffic has one or
/// two; a packet with more is dropped, since letting it pass unread would be a way around the proxy.
pub const MAX_EXTENSION_HEADERS: usize = 8;

/// Shortest TCP header, RFC 9293 section 3.1. A first fragment that holds less hides the flags from whoever looks at it (RFC 1858).
const TCP_HLEN: u32 = 20;

const IPPROTO_HOPOPTS: u8 = 0;
const IPPROTO_TCP: u8 = 6;
const IPPROTO_UDP: u8 = 17;
const IPPROTO_ROUTING: u8 = 43;
const IPPROTO_FRAGMENT: u8 = 44;
const IPPROTO_AH: u8 = 51;
const IPPROTO_DSTOPTS: u8 = 60;
const IPPROTO_MH: u8 = 135;

/// TCP flag bits, byte 13 of the header.
pub const TCP_FIN: u8 = 0x01;
/// See [`TCP_FIN`].
pub const TCP_SYN: u8 = 0x02;
/// See [`TCP_FIN`].
pub const TCP_RST: u8 = 0x04;
/// See [`TCP_FIN`].
pub const TCP_ACK: u8 = 0x10;

/// Where packet bytes come from: a `__sk_buff` in the programs, a slice in tests.
pub trait Bytes {
    /// `N` bytes at `offset`, counted from the start of the Ethernet header; `None` past the packet's end.
    fn load<const N: usize>(&self, offset: u32) -> Option<[u8; N]>;
}

impl Bytes for [u8] {
    fn load<const N: usize>(&self, offset: u32) -> Option<[u8; N]> {
        let start = usize::try_from(offset).ok()?;
        self.get(start..start.checked_add(N)?)?.try_into().ok()
    }
}

/// What the verdicts need of a TCP packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpMeta {
    /// Source address.
    pub source: Addr,
    /// Destination address.
    pub destination: Addr,
    /// Source port, host byte order.
    pub source_port: u16,
    /// Destination port, host byte order.
    pub destination_port: u16,
    /// TCP flags.
    pub flags: u8,
    /// Offset of the TCP header from the start of the Ethernet header.
    pub l4_offset: u32,
    /// IPv4, not IPv6.
    pub v4: bool,
}

impl TcpMeta {
    /// The first packet of a connection: SYN without ACK, RST or FIN.
    #[inline(always)]
    pub const fn is_initial_syn(&self) -> bool {
        is_initial_syn(self.flags)
    }
}

#[inline(always)]
const fn is_initial_syn(flags: u8) -> bool {
    flags & (TCP_SYN | TCP_ACK | TCP_RST | TCP_FIN) == TCP_SYN
}

/// Bytes of a frame of TCP over IPv4 without options of IP's, to the end of TCP's fixed header.
pub const PLAIN_V4: usize = 54;
/// Bytes of a frame of TCP over IPv6 without extension headers, to the end of TCP's fixed header.
pub const PLAIN_V6: usize = 74;

/// Whether a frame is, at a glance, a whole TCP packet over IPv4 that opens no connection. What it says no to, [`parse`] tells.
#[inline(always)]
pub const fn is_plain_later_v4(frame: &[u8; PLAIN_V4]) -> bool {
    let total_length = u16::from_be_bytes([frame[16], frame[17]]);
    u16::from_be_bytes([frame[12], frame[13]]) == ETH_P_IP
        // Version 4, and a header of five words.
        && frame[14] == 0x45
        && (total_length == 0 || total_length as usize >= PLAIN_V4 - ETH_HLEN as usize)
        // Neither an offset nor more fragments.
        && u16::from_be_bytes([frame[20], frame[21]]) & 0x3fff == 0
        && frame[23] == IPPROTO_TCP
        && !is_initial_syn(frame[47])
}

/// The same over IPv6.
#[inline(always)]
pub const fn is_plain_later_v6(frame: &[u8; PLAIN_V6]) -> bool {
    let payload_length = u16::from_be_bytes([frame[18], frame[19]]) as u32;
    u16::from_be_bytes([frame[12], frame[13]]) == ETH_P_IPV6
        && (payload_length == 0 || payload_length >= TCP_HLEN)
        && frame[20] == IPPROTO_TCP
        && !is_initial_syn(frame[67])
}

/// What the verdicts need of a UDP datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UdpMeta {
    /// Source address.
    pub source: Addr,
    /// Destination address.
    pub destination: Addr,
    /// Destination port, host byte order.
    pub destination_port: u16,
    /// IPv4, not IPv6.
    pub v4: bool,
}

/// What a packet is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parsed {
    /// TCP, with its header.
    Tcp(TcpMeta),
    /// UDP, whole: what was cut into fragments is [`Parsed::Other`].
    Udp(UdpMeta),
    /// Another protocol: not ours.
    Other,
    /// A fragment without the TCP header.
    Fragment,
    /// Too short for what its headers claim.
    Malformed,
    /// More extension headers than [`MAX_EXTENSION_HEADERS`].
    TooManyHeaders,
    /// A VLAN tag in the frame itself, where only a packet socket puts it: the kernel keeps its own tags beside the frame.
    Tagged,
}

/// Reads the headers of an Ethernet frame. Its own type counts: the one that the kernel keeps beside it is the sender's word.
#[inline(always)]
pub fn parse<B: Bytes + ?Sized>(bytes: &B) -> Parsed {
    let Some(ethertype) = bytes.load::<2>(12) else {
        return Parsed::Malformed;
    };
    match u16::from_be_bytes(ethertype) {
        ETH_P_IP => parse_v4(bytes),
        ETH_P_IPV6 => parse_v6(bytes),
        ETH_P_8021Q | ETH_P_8021AD => Parsed::Tagged,
        _ => Parsed::Other,
    }
}

#[inline(always)]
fn parse_v4<B: Bytes + ?Sized>(bytes: &B) -> Parsed {
    let Some(header) = bytes.load::<20>(ETH_HLEN) else {
        return Parsed::Malformed;
    };
    let udp = header[9] == IPPROTO_UDP;
    if header[9] != IPPROTO_TCP && !udp {
        return Parsed::Other;
    }
    // 13 bits of fragment offset; above them is the bit that says that more follow.
    let fragment = u16::from_be_bytes([header[6], header[7]]);
    if udp && fragment & 0x3fff != 0 {
        return Parsed::Other;
    }
    if fragment & 0x1fff != 0 {
        return Parsed::Fragment;
    }
    let header_length = u32::from(header[0] & 0x0f) * 4;
    if udp {
        let source = Addr::from_v4_bytes([header[12], header[13], header[14], header[15]]);
        let destination = Addr::from_v4_bytes([header[16], header[17], header[18], header[19]]);
        return parse_udp(bytes, source, destination, ETH_HLEN + header_length, true);
    }
    if header_length < 20 {
        return Parsed::Malformed;
    }
    // 0 stands for a length beyond 16 bits, of packets that are segmented later.
    let total_length = u32::from(u16::from_be_bytes([header[2], header[3]]));
    if total_length != 0 && total_length < header_length + TCP_HLEN {
        return Parsed::Malformed;
    }
    let source = Addr::from_v4_bytes([header[12], header[13], header[14], header[15]]);
    let destination = Addr::from_v4_bytes([header[16], header[17], header[18], header[19]]);
    parse_tcp(bytes, source, destination, ETH_HLEN + header_length, true)
}

#[inline(always)]
fn parse_v6<B: Bytes + ?Sized>(bytes: &B) -> Parsed {
    let Some([high, low, next]) = bytes.load::<3>(ETH_HLEN + 4) else {
        return Parsed::Malformed;
    };
    // 0 stands for a jumbogram.
    let payload_length = u32::from(u16::from_be_bytes([high, low]));
    let Some(source) = bytes.load::<16>(ETH_HLEN + 8) else {
        return Parsed::Malformed;
    };
    let Some(destination) = bytes.load::<16>(ETH_HLEN + 24) else {
        return Parsed::Malformed;
    };
    let source = Addr::from_v6_bytes(source);
    let destination = Addr::from_v6_bytes(destination);
    let mut next = next;
    let mut offset = ETH_HLEN + 40;
    let mut walked = 0;
    // One turn more than headers allowed: the last turn may only find the payload.
    while walked <= MAX_EXTENSION_HEADERS {
        match next {
            IPPROTO_TCP if payload_length != 0 && offset + TCP_HLEN > ETH_HLEN + 40 + payload_length => {
                return Parsed::Malformed;
            }
            IPPROTO_TCP => return parse_tcp(bytes, source, destination, offset, false),
            IPPROTO_UDP => return parse_udp(bytes, source, destination, offset, false),
            IPPROTO_HOPOPTS | IPPROTO_ROUTING | IPPROTO_DSTOPTS | IPPROTO_MH => {
                let Some(header) = bytes.load::<2>(offset) else {
                    return Parsed::Malformed;
                };
                next = header[0];
                offset += (u32::from(header[1]) + 1) * 8;
            }
            IPPROTO_AH => {
                let Some(header) = bytes.load::<2>(offset) else {
                    return Parsed::Malformed;
                };
                next = header[0];
                // RFC 4302, 2.2: in words of 4 bytes, less 2.
                offset += (u32::from(header[1]) + 2) * 4;
            }
            IPPROTO_FRAGMENT => {
                let Some(header) = bytes.load::<8>(offset) else {
                    return Parsed::Malformed;
                };
                next = header[0];
                let fragment = u16::from_be_bytes([header[2], header[3]]);
                // The last bit says that more follow.
                if next == IPPROTO_UDP && fragment & 0xfff9 != 0 {
                    return Parsed::Other;
                }
                if fragment & 0xfff8 != 0 {
                    return if next == IPPROTO_TCP {
                        Parsed::Fragment
                    } else {
                        Parsed::Other
                    };
                }
                offset += 8;
            }
            _ => return Parsed::Other,
        }
        walked += 1;
    }
    Parsed::TooManyHeaders
}

#[inline(always)]
fn parse_tcp<B: Bytes + ?Sized>(
    bytes: &B,
    source: Addr,
    destination: Addr,
    l4_offset: u32,
    v4: bool,
) -> Parsed {
    let Some(header) = bytes.load::<14>(l4_offset) else {
        return Parsed::Malformed;
    };
    Parsed::Tcp(TcpMeta {
        source,
        destination,
        source_port: u16::from_be_bytes([header[0], header[1]]),
        destination_port: u16::from_be_bytes([header[2], header[3]]),
        flags: header[13],
        l4_offset,
        v4,
    })
}

/// What is too short for UDP is nobody's query, and was never ours.
#[inline(always)]
fn parse_udp<B: Bytes + ?Sized>(
    bytes: &B,
    source: Addr,
    destination: Addr,
    l4_offset: u32,
    v4: bool,
) -> Parsed {
    let Some(ports) = bytes.load::<4>(l4_offset) else {
        return Parsed::Other;
    };
    Parsed::Udp(UdpMeta {
        source,
        destination,
        destination_port: u16::from_be_bytes([ports[2], ports[3]]),
        v4,
    })
}

#[cfg(test)]
mod tests;
