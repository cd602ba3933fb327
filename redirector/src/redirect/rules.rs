//! Which connections of a pod are captured: include and exclude lists, as operators write them.
//!
//! `config` and pod events make them, `pods` merges a node's with a pod's, and each backend puts them in force.

use std::{fmt, net::IpAddr, ops::RangeInclusive, str::FromStr};

use ipnet::IpNet;
use redirector_common::rules::Direction;

/// The rules of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Rules {
    /// Of connections that the pod opens: destination ports and addresses.
    pub outbound: Lists,
    /// Of connections to the pod: its ports, and the clients' addresses.
    pub inbound: Lists,
    /// Nothing inbound is captured but HBONE: for ingress gateways.
    pub bypass_inbound: bool,
    /// DNS that the pod sends, UDP and TCP to port 53, goes to the listeners of port 15053 in the pod, whatever the lists say.
    pub dns_capture: bool,
    /// Names of interfaces of the pod behind which others are, e.g. a virtual machine: what arrives there on its way to elsewhere is
    /// outbound.
    pub reroute_interfaces: Interfaces,
    /// Nothing that is captured goes in plain: the proxy refuses it. The backends have no part in it.
    pub strict: bool,
}

impl Rules {
    /// Most ports and networks in all lists of a pod.
    pub const MAX_ITEMS: usize = 128;

    /// The lists of a direction.
    pub fn lists(&self, direction: Direction) -> &Lists {
        match direction {
            Direction::Outbound => &self.outbound,
            Direction::Inbound => &self.inbound,
        }
    }

    /// How many ports and networks they name.
    pub fn items(&self) -> usize {
        [&self.outbound, &self.inbound]
            .iter()
            .map(|lists| {
                let only = |len: Option<usize>| len.unwrap_or_default();
                only(lists.only_ports.as_ref().map(|list| list.0.len()))
                    + only(lists.only_networks.as_ref().map(|list| list.0.len()))
                    + lists.not_ports.0.len()
                    + lists.not_networks.0.len()
            })
            .sum()
    }
}

/// What is captured of one direction: what is in each "only" list that there is, and in no "not" list.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Lists {
    /// Capture only these ports. An empty list captures nothing.
    pub only_ports: Option<Ports>,
    /// Leave these ports alone.
    pub not_ports: Ports,
    /// Capture only these networks. An empty list captures nothing.
    pub only_networks: Option<Networks>,
    /// Leave these networks alone.
    pub not_networks: Networks,
}

/// Ports, as text: `80,443,8000-8999`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Ports(pub Vec<RangeInclusive<u16>>);

/// Networks, as text: `10.0.0.0/8,192.0.2.1,fd00::/8`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Networks(pub Vec<IpNet>);

/// Names of interfaces, as text: `k6t-eth0,docker0`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Interfaces(pub Vec<String>);

/// Why a text is no list, or no switch.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum InvalidList {
    /// Not a port.
    #[error("{0:?} is neither a port (1 to 65535) nor a range like 8000-8999")]
    Port(String),
    /// Not a network.
    #[error("{0:?} is neither an address nor a network like 10.0.0.0/8")]
    Network(String),
    /// Not an interface's name.
    #[error("{0:?} can't be the name of an interface: 1 to 15 bytes without blanks, slashes and colons")]
    Interface(String),
    /// Not a switch.
    #[error("{0:?} is neither true nor false")]
    Switch(String),
}

impl FromStr for Ports {
    type Err = InvalidList;

    fn from_str(text: &str) -> Result<Self, InvalidList> {
        items(text).map(port_range).collect::<Result<_, _>>().map(Self)
    }
}

impl FromStr for Networks {
    type Err = InvalidList;

    fn from_str(text: &str) -> Result<Self, InvalidList> {
        items(text).map(network).collect::<Result<_, _>>().map(Self)
    }
}

impl FromStr for Interfaces {
    type Err = InvalidList;

    fn from_str(text: &str) -> Result<Self, InvalidList> {
        let mut names = Vec::new();
        for name in items(text) {
            // As the kernel's dev_valid_name has it; IFNAMSIZ is 16 with the zero at the end.
            let bad = |c: char| c == '/' || c == ':' || c.is_whitespace();
            if name.len() > 15 || name == "." || name == ".." || name.contains(bad) {
                return Err(InvalidList::Interface(name.to_owned()));
            }
            if !names.iter().any(|known| known == name) {
                names.push(name.to_owned());
            }
        }
        Ok(Self(names))
    }
}

/// The parts of a list. A lone `*` is all there is.
fn items(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|item| !item.is_empty())
}

fn port_range(text: &str) -> Result<RangeInclusive<u16>, InvalidList> {
    let invalid = || InvalidList::Port(text.to_owned());
    if text == "*" {
        return Ok(1..=u16::MAX);
    }
    let port = |text: &str| match text.trim().parse() {
        Ok(0) | Err(_) => Err(invalid()),
        Ok(port) => Ok(port),
    };
    let range = match text.split_once('-') {
        Some((first, last)) => port(first)?..=port(last)?,
        None => port(text)?..=port(text)?,
    };
    if range.is_empty() {
        Err(invalid())
    } else {
        Ok(range)
    }
}

/// `*` is every IPv4 and IPv6 network: `::/0`, of which the mapped addresses are a part.
fn network(text: &str) -> Result<IpNet, InvalidList> {
    if text == "*" {
        return Ok(IpNet::V6(ipnet::Ipv6Net::default()));
    }
    let parsed = text
        .parse::<IpNet>()
        .or_else(|_| text.parse::<IpAddr>().map(IpNet::from));
    parsed
        .map(|network| network.trunc())
        .map_err(|_| InvalidList::Network(text.to_owned()))
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |range: &RangeInclusive<u16>| match (range.start(), range.end()) {
            (first, last) if first == last => first.to_string(),
            (first, last) => format!("{first}-{last}"),
        };
        f.write_str(&self.0.iter().map(text).collect::<Vec<_>>().join(","))
    }
}

impl fmt::Display for Interfaces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join(","))
    }
}

impl fmt::Display for Networks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts: Vec<_> = self.0.iter().map(IpNet::to_string).collect();
        f.write_str(&texts.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_and_written() {
        for (text, written) in [
            ("80, 443,8000-8999", "80,443,8000-8999"),
            ("", ""),
            ("*", "1-65535"),
            ("7-7", "7"),
        ] {
            assert_eq!(text.parse::<Ports>().unwrap().to_string(), written);
        }
        for (text, written) in [
            (
                "10.1.2.3/8,192.0.2.1 , fd00::1/16",
                "10.0.0.0/8,192.0.2.1/32,fd00::/16",
            ),
            ("*", "::/0"),
        ] {
            assert_eq!(text.parse::<Networks>().unwrap().to_string(), written);
        }
        let interfaces: Interfaces = "k6t-eth0, docker0,,docker0".parse().unwrap();
        assert_eq!(interfaces.to_string(), "k6t-eth0,docker0");
    }

    #[test]
    fn what_is_no_list_is_told() {
        for bad in ["0", "65536", "9-8", "http", "80;81", "-5", "1-2-3", "80-"] {
            assert_eq!(bad.parse::<Ports>(), Err(InvalidList::Port(bad.to_owned())));
        }
        for bad in [
            "10.0.0.0/33",
            "example.org",
            "10.0.0",
            "fd00::/129",
            "10.0.0.0-10.0.0.9",
        ] {
            assert_eq!(bad.parse::<Networks>(), Err(InvalidList::Network(bad.to_owned())));
        }
        for bad in ["a/b", "eth0:1", "a b", "..", "sixteen-letters-"] {
            assert_eq!(
                bad.parse::<Interfaces>(),
                Err(InvalidList::Interface(bad.to_owned()))
            );
        }
    }
}
