//! The header with which connections begin towards an application that has an application tunnel: who calls, and whom.
//!
//! PROXY protocol, version 2: <https://www.haproxy.org/download/3.2/doc/proxy-protocol.txt>, section 2.2. The caller's identity
//! is an extension of Istio's: `ApplicationTunnel` in ztunnel's workload.proto.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use crate::mesh::spiffe::SpiffeId;

const SIGNATURE: &[u8; 12] = b"\r\n\r\n\0\r\nQUIT\n";
/// Version 2, command PROXY.
const VERSION_COMMAND: u8 = 0x21;
/// TCP over IPv4, and over IPv6.
const TCP4: u8 = 0x11;
const TCP6: u8 = 0x21;
/// The caller's SPIFFE identity as a URI, in the range for applications' own use.
const TYPE_IDENTITY: u8 = 0xd0;

/// The header of a connection from `source`, who has proven to be `identity`, to `destination`.
pub fn header(source: SocketAddr, destination: SocketAddr, identity: &SpiffeId) -> Vec<u8> {
    let mut addresses = Vec::with_capacity(36);
    let family = match (source.ip(), destination.ip()) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            addresses.extend(source.octets());
            addresses.extend(destination.octets());
            TCP4
        }
        // One family for both: the older has its place in the newer.
        (source, destination) => {
            addresses.extend(v6(source).octets());
            addresses.extend(v6(destination).octets());
            TCP6
        }
    };
    addresses.extend(source.port().to_be_bytes());
    addresses.extend(destination.port().to_be_bytes());

    let identity = identity.to_string();
    // Left out where no header can hold it: the application then takes the caller for nobody.
    let tlv = u16::try_from(identity.len())
        .ok()
        .filter(|length| usize::from(*length) + addresses.len() + 3 <= usize::from(u16::MAX));
    let mut header = Vec::with_capacity(SIGNATURE.len() + 4 + addresses.len() + 3 + identity.len());
    header.extend(SIGNATURE);
    header.extend([VERSION_COMMAND, family]);
    let rest = addresses.len() + tlv.map_or(0, |length| 3 + usize::from(length));
    header.extend(
        u16::try_from(rest)
            .expect("was compared with the most that it may be")
            .to_be_bytes(),
    );
    header.extend(addresses);
    if let Some(length) = tlv {
        header.push(TYPE_IDENTITY);
        header.extend(length.to_be_bytes());
        header.extend(identity.as_bytes());
    }
    header
}

fn v6(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `spiffe://td/ns/a/sa/b` after its type and length (21).
    const IDENTITY: &[u8] = b"\xd0\x00\x15spiffe://td/ns/a/sa/b";

    #[test]
    fn headers_are_as_the_protocol_has_them_to_the_byte() {
        for (source, destination, rest) in [
            (
                "10.1.2.3:4660",
                "10.96.0.1:80",
                &b"\x21\x11\x00\x24\x0a\x01\x02\x03\x0a\x60\x00\x01\x12\x34\x00\x50"[..],
            ),
            (
                "[fd00::1]:4660",
                "[fd96::2]:443",
                b"\x21\x21\x00\x3c\xfd\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x01\xfd\x96\0\0\0\0\0\0\0\0\0\0\0\0\0\x02\x12\x34\x01\xbb",
            ),
            (
                "10.1.2.3:4660",
                "[fd96::2]:443",
                b"\x21\x21\x00\x3c\0\0\0\0\0\0\0\0\0\0\xff\xff\x0a\x01\x02\x03\xfd\x96\0\0\0\0\0\0\0\0\0\0\0\0\0\x02\x12\x34\x01\xbb",
            ),
        ] {
            let expected = [b"\x0d\x0a\x0d\x0a\x00\x0d\x0a\x51\x55\x49\x54\x0a", rest, IDENTITY].concat();
            let identity = "spiffe://td/ns/a/sa/b".parse().unwrap();
            let made = header(source.parse().unwrap(), destination.parse().unwrap(), &identity);
            assert_eq!(made, expected, "{source} {destination}");
        }
    }

    #[test]
    fn an_identity_that_fits_no_header_is_left_out() {
        for (length, fits) in [(65_000, true), (65_500, true), (65_501, false), (70_000, false)] {
            let identity = SpiffeId::new("td", "a", &"x".repeat(length)).unwrap();
            let made = header(
                "10.0.0.1:1".parse().unwrap(),
                "10.0.0.2:2".parse().unwrap(),
                &identity,
            );
            let told = usize::from(u16::from_be_bytes([made[14], made[15]]));
            assert_eq!(told, made.len() - 16);
            assert_eq!(made.len() > 28, fits, "{length}");
        }
    }
}
