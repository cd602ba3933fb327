//! Addresses as the programs hold them.

use core::net::{IpAddr, Ipv6Addr};

use bytemuck::{Pod, Zeroable};

/// An IPv6 or IPv4-mapped address, as four words in network byte order: the form in which the kernel hands addresses to
/// SK_LOOKUP programs (`struct bpf_sk_lookup`, `local_ip6`).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Pod, Zeroable)]
pub struct Addr(pub [u32; 4]);

const _: () = assert!(size_of::<Addr>() == 16);

/// What tells an IPv4-mapped address, after 64 zeros.
const V4_MAPPED: u32 = 0xffff_u32.to_be();

// One comparison for all words: each branch is a path that the verifier follows for every pod, to whatever comes after.

impl Addr {
    /// `::`, which is no address of any host.
    pub const UNSPECIFIED: Self = Self([0; 4]);

    /// From an IPv4 address in network byte order.
    #[inline(always)]
    pub const fn from_v4_be(address: u32) -> Self {
        Self([0, 0, V4_MAPPED, address])
    }

    /// From the bytes of an IPv4 header.
    #[inline(always)]
    pub const fn from_v4_bytes(bytes: [u8; 4]) -> Self {
        Self::from_v4_be(u32::from_ne_bytes(bytes))
    }

    /// From the bytes of an IPv6 header.
    #[inline(always)]
    pub const fn from_v6_bytes(b: [u8; 16]) -> Self {
        Self([
            u32::from_ne_bytes([b[0], b[1], b[2], b[3]]),
            u32::from_ne_bytes([b[4], b[5], b[6], b[7]]),
            u32::from_ne_bytes([b[8], b[9], b[10], b[11]]),
            u32::from_ne_bytes([b[12], b[13], b[14], b[15]]),
        ])
    }

    /// The 16 bytes as on the wire.
    #[inline(always)]
    pub const fn to_bytes(&self) -> [u8; 16] {
        let [a, b, c, d] = [
            self.0[0].to_ne_bytes(),
            self.0[1].to_ne_bytes(),
            self.0[2].to_ne_bytes(),
            self.0[3].to_ne_bytes(),
        ];
        [
            a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], c[0], c[1], c[2], c[3], d[0], d[1], d[2], d[3],
        ]
    }

    /// Whether it is IPv4-mapped.
    #[inline(always)]
    pub const fn is_v4(&self) -> bool {
        self.0[0] | self.0[1] | (self.0[2] ^ V4_MAPPED) == 0
    }

    /// 127.0.0.0/8 or ::1.
    #[inline(always)]
    pub const fn is_loopback(&self) -> bool {
        let [a, b, c, d] = self.0;
        let v4 = a | b | (c ^ V4_MAPPED) | ((d & 0xff00_0000_u32.to_be()) ^ 0x7f00_0000_u32.to_be());
        let v6 = a | b | c | (d ^ 1_u32.to_be());
        v4 == 0 || v6 == 0
    }

    /// Whether it is `other`.
    #[inline(always)]
    pub const fn is(&self, other: &Self) -> bool {
        let ([a, b, c, d], [e, f, g, h]) = (self.0, other.0);
        (a ^ e) | (b ^ f) | (c ^ g) | (d ^ h) == 0
    }
}

impl Addr {
    /// fe80::/10. Such an address means something only together with an interface.
    #[inline(always)]
    pub const fn is_v6_link_local(&self) -> bool {
        let [first, second, _, _] = self.0[0].to_ne_bytes();
        first == 0xfe && second & 0xc0 == 0x80
    }
}

impl From<IpAddr> for Addr {
    fn from(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(v4) => Self::from_v4_bytes(v4.octets()),
            IpAddr::V6(v6) => Self::from_v6_bytes(v6.octets()),
        }
    }
}

impl From<Addr> for IpAddr {
    fn from(address: Addr) -> Self {
        IpAddr::V6(Ipv6Addr::from(address.to_bytes())).to_canonical()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn loopback_is_127_slash_8_and_colon_colon_1() {
        for (address, loopback) in [
            ("127.0.0.1", true),
            ("127.255.255.254", true),
            ("::1", true),
            ("::ffff:127.0.0.1", true),
            ("128.0.0.1", false),
            ("::", false),
            ("::127.0.0.1", false),
            ("10.0.0.127", false),
            ("fe80::1", false),
        ] {
            let address: IpAddr = address.parse().unwrap();
            assert_eq!(Addr::from(address).is_loopback(), loopback, "{address}");
        }
    }

    #[test]
    fn link_local_is_fe80_slash_10() {
        for (address, link_local) in [
            ("fe80::1", true),
            ("febf::1", true),
            ("fec0::1", false),
            ("fd00::1", false),
            ("::1", false),
            ("169.254.1.1", false),
        ] {
            let address: IpAddr = address.parse().unwrap();
            assert_eq!(Addr::from(address).is_v6_link_local(), link_local, "{address}");
        }
    }

    proptest! {
        #[test]
        fn addresses_survive_the_way_there_and_back(bytes: [u8; 16], v4: [u8; 4]) {
            let v6 = IpAddr::from(bytes).to_canonical();
            prop_assert_eq!(IpAddr::from(Addr::from(v6)), v6);
            let v4 = IpAddr::from(v4);
            prop_assert_eq!(IpAddr::from(Addr::from(v4)), v4);
            prop_assert!(Addr::from(v4).is_v4());
        }

        #[test]
        fn an_address_is_itself_and_no_other(words: [u32; 4], word in 0_usize..4, bit in 0_u32..32) {
            let address = Addr(words);
            let mut other = address;
            other.0[word] ^= 1 << bit;
            prop_assert!(address.is(&address) && !address.is(&other));
        }
    }
}
