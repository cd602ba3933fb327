//! The values that policies compare with: texts and address ranges. What would match nothing or everything by mistake cannot
//! be made.

use std::{fmt, net::IpAddr, str::FromStr};

use ipnet::{IpNet, Ipv4Net, PrefixLenError};

use crate::mesh::workload::canonical;

/// Why something is not a [`StringMatch`] or a [`Cidr`].
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum InvalidPattern {
    /// An empty text is what nobody is called, and the beginning and the end of every name.
    #[error("must not be empty; what matches every name that is not empty is Presence")]
    Empty,
    /// A principal with a scheme would match nobody.
    #[error("{text:?} begins with spiffe://, and principals are compared without it: leave it out")]
    Scheme {
        /// The text.
        text: String,
    },
    /// Not an address, or not one with a length.
    #[error("{text:?} is not an address range, such as 10.0.0.0/8 or fd00::/8")]
    NotCidr {
        /// The text.
        text: String,
    },
    /// More bits than the address has.
    #[error("an address range of {address} cannot have {length} bits")]
    Length {
        /// The address.
        address: IpAddr,
        /// The bits.
        length: u32,
    },
    /// IPv4-mapped addresses are IPv4 everywhere, so that a range must be of the one or of the other.
    #[error("{address}/{length} holds IPv4-mapped addresses among others: write 0.0.0.0/0 and IPv6 ranges")]
    Mapped {
        /// The address.
        address: IpAddr,
        /// The bits.
        length: u32,
    },
}

/// What a text must be like.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct StringMatch(Form);

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Form {
    Exact(Box<str>),
    Prefix(Box<str>),
    Suffix(Box<str>),
    Presence,
}

impl StringMatch {
    /// This text.
    pub fn exact(text: &str) -> Result<Self, InvalidPattern> {
        Ok(Self(Form::Exact(filled(text)?)))
    }

    /// A text that begins so.
    pub fn prefix(text: &str) -> Result<Self, InvalidPattern> {
        Ok(Self(Form::Prefix(filled(text)?)))
    }

    /// A text that ends so.
    pub fn suffix(text: &str) -> Result<Self, InvalidPattern> {
        Ok(Self(Form::Suffix(filled(text)?)))
    }

    /// Any text that is not empty.
    pub fn presence() -> Self {
        Self(Form::Presence)
    }

    /// The name of the way in which it compares, and with what.
    pub fn parts(&self) -> (&'static str, Option<&str>) {
        match &self.0 {
            Form::Exact(text) => ("Exact", Some(text)),
            Form::Prefix(text) => ("Prefix", Some(text)),
            Form::Suffix(text) => ("Suffix", Some(text)),
            Form::Presence => ("Presence", None),
        }
    }

    /// As what a principal is compared with.
    pub fn for_principal(self) -> Result<Self, InvalidPattern> {
        match &self.0 {
            Form::Exact(text) | Form::Prefix(text) if text.starts_with("spiffe:") => {
                Err(InvalidPattern::Scheme {
                    text: text.as_ref().to_owned(),
                })
            }
            _ => Ok(self),
        }
    }

    /// Whether the text is like that which `parts` make together.
    pub(super) fn matches(&self, parts: &[&str]) -> bool {
        match &self.0 {
            Form::Exact(text) => {
                let rest = parts
                    .iter()
                    .try_fold(&**text, |rest, part| rest.strip_prefix(part));
                rest == Some("")
            }
            Form::Prefix(text) => {
                let mut rest = &**text;
                for part in parts {
                    match rest.strip_prefix(part) {
                        Some(after) => rest = after,
                        None => return part.starts_with(rest),
                    }
                }
                rest.is_empty()
            }
            Form::Suffix(text) => {
                let mut rest = &**text;
                for part in parts.iter().rev() {
                    match rest.strip_suffix(part) {
                        Some(before) => rest = before,
                        None => return part.ends_with(rest),
                    }
                }
                rest.is_empty()
            }
            Form::Presence => parts.iter().any(|part| !part.is_empty()),
        }
    }
}

fn filled(text: &str) -> Result<Box<str>, InvalidPattern> {
    if text.is_empty() {
        return Err(InvalidPattern::Empty);
    }
    Ok(text.into())
}

/// A range of addresses of one family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Cidr(IpNet);

impl Cidr {
    /// The addresses that begin with the first `length` bits of `address`. Those of IPv4-mapped addresses are IPv4.
    pub fn new(address: IpAddr, length: u32) -> Result<Self, InvalidPattern> {
        /// Bits before the IPv4 address in a mapped one (RFC 4291, 2.5.5.2).
        const MAPPED_BITS: u32 = 96;
        let wrong = |_: PrefixLenError| InvalidPattern::Length { address, length };
        let bits = u8::try_from(length).map_err(|_| InvalidPattern::Length { address, length })?;
        let net = IpNet::new(address, bits).map_err(wrong)?.trunc();
        let net = match (net, canonical(address)) {
            (IpNet::V6(_), IpAddr::V4(mapped)) if length >= MAPPED_BITS => {
                let bits = bits - 96;
                IpNet::V4(Ipv4Net::new(mapped, bits).map_err(wrong)?.trunc())
            }
            (IpNet::V6(_), IpAddr::V4(_)) => return Err(InvalidPattern::Mapped { address, length }),
            _ => net,
        };
        Ok(Self(net))
    }

    /// Whether `address` is in it. IPv4 is in no range of IPv6.
    pub fn contains(self, address: IpAddr) -> bool {
        match (self.0, address) {
            (IpNet::V4(net), IpAddr::V4(address)) => net.contains(&address),
            (IpNet::V6(net), IpAddr::V6(address)) => net.contains(&address),
            _ => false,
        }
    }
}

impl FromStr for Cidr {
    type Err = InvalidPattern;

    /// `address/length`, or an address alone.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let not = || InvalidPattern::NotCidr {
            text: text.to_owned(),
        };
        let (address, length) = text.split_once('/').map_or((text, None), |(a, l)| (a, Some(l)));
        let address: IpAddr = address.parse().map_err(|_| not())?;
        let length = match length {
            None => IpNet::from(address).prefix_len().into(),
            // The number's own parser takes a sign.
            Some(length) if length.bytes().all(|byte| byte.is_ascii_digit()) => {
                length.parse().map_err(|_| not())?
            }
            Some(_) => return Err(not()),
        };
        Self::new(address, length)
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
