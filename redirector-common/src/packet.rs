//! From headers to [`TcpMeta`]: IPv4 with options, IPv6 with a bounded number of extension headers, TCP.

use crate::net::Addr;

/// EtherType of IPv4.
pub const ETH_P_IP: u16 = 0x0800;
/// EtherType of IPv6.
pub const ETH_P_IPV6: u16 = 0x86dd;
/// Length of an Ethernet header.
pub const ETH_HLEN: u32 = 14;

/// Most IPv6 extension headers that are walked. Linux itself gives hosts 8 options per header and real traffic has one or
/// two; a packet with more is dropped, since letting it pass unread would be a way around the proxy.
pub const MAX_EXTENSION_HEADERS: usize = 8;

const IPPROTO_HOPOPTS: u8 = 0;
const IPPROTO_TCP: u8 = 6;
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
        self.flags & (TCP_SYN | TCP_ACK | TCP_RST | TCP_FIN) == TCP_SYN
    }
}

/// What a packet is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parsed {
    /// TCP, with its header.
    Tcp(TcpMeta),
    /// Another protocol: not ours.
    Other,
    /// A fragment without the TCP header.
    Fragment,
    /// Too short for what its headers claim.
    Malformed,
    /// More extension headers than [`MAX_EXTENSION_HEADERS`].
    TooManyHeaders,
}

/// Reads the headers of an Ethernet frame of type `ethertype` (host byte order).
#[inline(always)]
pub fn parse<B: Bytes + ?Sized>(ethertype: u16, bytes: &B) -> Parsed {
    match ethertype {
        ETH_P_IP => parse_v4(bytes),
        ETH_P_IPV6 => parse_v6(bytes),
        _ => Parsed::Other,
    }
}

#[inline(always)]
fn parse_v4<B: Bytes + ?Sized>(bytes: &B) -> Parsed {
    let Some(header) = bytes.load::<20>(ETH_HLEN) else {
        return Parsed::Malformed;
    };
    if header[9] != IPPROTO_TCP {
        return Parsed::Other;
    }
    // 13 bits of fragment offset; the flag bits above them don't matter.
    if u16::from_be_bytes([header[6], header[7]]) & 0x1fff != 0 {
        return Parsed::Fragment;
    }
    let header_length = u32::from(header[0] & 0x0f) * 4;
    if header_length < 20 {
        return Parsed::Malformed;
    }
    let source = Addr::from_v4_bytes([header[12], header[13], header[14], header[15]]);
    let destination = Addr::from_v4_bytes([header[16], header[17], header[18], header[19]]);
    parse_tcp(bytes, source, destination, ETH_HLEN + header_length, true)
}

#[inline(always)]
fn parse_v6<B: Bytes + ?Sized>(bytes: &B) -> Parsed {
    let Some(next) = bytes.load::<1>(ETH_HLEN + 6) else {
        return Parsed::Malformed;
    };
    let Some(source) = bytes.load::<16>(ETH_HLEN + 8) else {
        return Parsed::Malformed;
    };
    let Some(destination) = bytes.load::<16>(ETH_HLEN + 24) else {
        return Parsed::Malformed;
    };
    let source = Addr::from_v6_bytes(source);
    let destination = Addr::from_v6_bytes(destination);
    let mut next = next[0];
    let mut offset = ETH_HLEN + 40;
    let mut walked = 0;
    // One turn more than headers allowed: the last turn may only find the payload.
    while walked <= MAX_EXTENSION_HEADERS {
        match next {
            IPPROTO_TCP => return parse_tcp(bytes, source, destination, offset, false),
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
                if u16::from_be_bytes([header[2], header[3]]) & 0xfff8 != 0 {
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

#[cfg(test)]
mod tests;
