//! Rules as entries of the trie `RULES`.

use std::{collections::BTreeMap, ops::RangeInclusive};

use ipnet::IpNet;
use redirector_common::{
    net::Addr,
    rules::{self, Direction, EXCLUDED, INCLUDED, Match, Subject},
};

use crate::redirect::rules::{Networks, Ports, Rules};

/// The rules of a pod, as the programs look them up.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Compiled {
    /// Bits of `PodEntry::rules` but the generation.
    pub(super) bits: u32,
    /// What is said about each prefix.
    pub(super) entries: BTreeMap<Prefix, Match>,
}

/// The leading bits of a port or an address, in network byte order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Prefix {
    pub(super) subject: u8,
    pub(super) value: [u8; 16],
    pub(super) length: u32,
}

impl Prefix {
    fn covers(&self, other: &Self) -> bool {
        let bits = |prefix: &Self| u128::from_be_bytes(prefix.value);
        // A length of zero shifts all bits out.
        let differ = (bits(self) ^ bits(other))
            .checked_shr(128 - self.length)
            .unwrap_or(0);
        self.subject == other.subject && self.length <= other.length && differ == 0
    }
}

impl Compiled {
    /// Compiles rules. The trie answers with the longest prefix alone, so each entry says what all that cover it say.
    pub(super) fn of(rules: &Rules) -> Self {
        let mut said: Vec<(Prefix, Match)> = Vec::new();
        let mut bits = 0;
        for direction in [Direction::Outbound, Direction::Inbound] {
            let lists = rules.lists(direction);
            let (ports, networks) = (Subject::port(direction), Subject::network(direction));
            let mut say = |subject: Subject, prefixes: Vec<Prefix>, only: bool| {
                // An "only" list that is empty says something, too.
                if only || !prefixes.is_empty() {
                    bits |= rules::bits(subject, only);
                }
                let what = if only { INCLUDED } else { EXCLUDED };
                said.extend(prefixes.into_iter().map(|prefix| (prefix, what)));
            };
            if let Some(list) = &lists.only_ports {
                say(ports, port_prefixes(ports, list), true);
            }
            if let Some(list) = &lists.only_networks {
                say(networks, network_prefixes(networks, list), true);
            }
            say(ports, port_prefixes(ports, &lists.not_ports), false);
            say(networks, network_prefixes(networks, &lists.not_networks), false);
        }
        let whole = |prefix: &Prefix| {
            said.iter()
                .filter(|(other, _)| other.covers(prefix))
                .fold(0, |all, (_, what)| all | what)
        };
        let entries = said.iter().map(|(prefix, _)| (*prefix, whole(prefix))).collect();
        Self { bits, entries }
    }
}

fn port_prefixes(subject: Subject, ports: &Ports) -> Vec<Prefix> {
    let prefix = |(first, length): (u16, u32)| {
        let mut value = [0; 16];
        value[..2].copy_from_slice(&first.to_be_bytes());
        Prefix {
            subject: subject as u8,
            value,
            length,
        }
    };
    ports.0.iter().flat_map(aligned_blocks).map(prefix).collect()
}

/// A range of ports as blocks of a power of two, each at a multiple of its size: first port and bits in common.
fn aligned_blocks(range: &RangeInclusive<u16>) -> Vec<(u16, u32)> {
    let (mut first, end) = (u32::from(*range.start()), u32::from(*range.end()) + 1);
    let mut blocks = Vec::new();
    while first < end {
        let aligned = if first == 0 { 16 } else { first.trailing_zeros() };
        let size = aligned.min((end - first).ilog2());
        blocks.push((first as u16, 16 - size));
        first += 1 << size;
    }
    blocks
}

fn network_prefixes(subject: Subject, networks: &Networks) -> Vec<Prefix> {
    let prefix = |network: &IpNet| Prefix {
        subject: subject as u8,
        value: Addr::from(network.network()).to_bytes(),
        length: match network {
            // Mapped, as the programs hold it.
            IpNet::V4(v4) => 96 + u32::from(v4.prefix_len()),
            IpNet::V6(v6) => u32::from(v6.prefix_len()),
        },
    };
    networks.0.iter().map(prefix).collect()
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use proptest::prelude::*;
    use redirector_common::{
        maps::PodEntry,
        rules::{Rules as Ask, excluded},
    };

    use super::*;
    use crate::redirect::rules::Lists;

    /// As the kernel's trie: the longest prefix that covers.
    impl Ask for Compiled {
        fn port(&self, subject: Subject, port: u16) -> Match {
            let mut value = [0; 16];
            value[..2].copy_from_slice(&port.to_be_bytes());
            self.longest(Prefix {
                subject: subject as u8,
                value,
                length: 16,
            })
        }

        fn address(&self, subject: Subject, address: &Addr) -> Match {
            self.longest(Prefix {
                subject: subject as u8,
                value: address.to_bytes(),
                length: 128,
            })
        }
    }

    impl Compiled {
        fn longest(&self, wanted: Prefix) -> Match {
            let covering = self.entries.iter().filter(|(prefix, _)| prefix.covers(&wanted));
            covering
                .max_by_key(|(prefix, _)| prefix.length)
                .map_or(0, |(_, what)| *what)
        }
    }

    #[test]
    fn ranges_are_split_at_their_sizes() {
        for (range, blocks) in [
            (1..=u16::MAX, 16),
            (80..=80, 1),
            (8000..=8999, 6),
            (0..=u16::MAX, 1),
            (65_535..=65_535, 1),
        ] {
            assert_eq!(aligned_blocks(&range).len(), blocks, "{range:?}");
        }
    }

    fn lists() -> impl Strategy<Value = Lists> {
        // Few values, so that they meet.
        let ports = || {
            let range = (1..40_u16, 0..20_u16).prop_map(|(first, more)| first..=first + more);
            prop::collection::vec(range, 0..3).prop_map(Ports)
        };
        let networks = || {
            let v4 = (any::<bool>(), 24..33_u8).prop_map(|(other, length)| {
                let text = format!("10.0.0.{}/{length}", if other { 8 } else { 1 });
                text.parse::<IpNet>().unwrap().trunc()
            });
            let v6 = (0..129_u8).prop_map(|length| {
                format!("::ffff:10.0.0.1/{length}")
                    .parse::<IpNet>()
                    .unwrap()
                    .trunc()
            });
            prop::collection::vec(prop_oneof![v4, v6], 0..3).prop_map(Networks)
        };
        (
            prop::option::of(ports()),
            ports(),
            prop::option::of(networks()),
            networks(),
        )
            .prop_map(|(only_ports, not_ports, only_networks, not_networks)| Lists {
                only_ports,
                not_ports,
                only_networks,
                not_networks,
            })
    }

    fn holds(network: &IpNet, address: IpAddr) -> bool {
        let mapped = |address: IpAddr| match address {
            IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            IpAddr::V6(v6) => v6,
        };
        match network {
            IpNet::V6(v6) => v6.contains(&mapped(address)),
            IpNet::V4(_) => network.contains(&address),
        }
    }

    proptest! {
        #[test]
        fn the_trie_says_what_the_lists_say(lists in lists(), port in 1..70_u16, last in 0..12_u8, v6 in any::<bool>()) {
            let text = if v6 { format!("fd00::{last}") } else { format!("10.0.0.{last}") };
            let address: IpAddr = text.parse().unwrap();
            let ports = |list: &Ports| list.0.iter().any(|range| range.contains(&port));
            let networks = |list: &Networks| list.0.iter().any(|network| holds(network, address));
            let captured = lists.only_ports.as_ref().is_none_or(ports)
                && lists.only_networks.as_ref().is_none_or(networks)
                && !ports(&lists.not_ports)
                && !networks(&lists.not_networks);
            let compiled = Compiled::of(&Rules { inbound: lists, ..Rules::default() });
            let entry = PodEntry { rules: compiled.bits, ..bytemuck::Zeroable::zeroed() };
            let left_alone = excluded(Direction::Inbound, port, &Addr::from(address), &entry, &compiled);
            prop_assert_eq!(left_alone, !captured);
            prop_assert!(!excluded(Direction::Outbound, port, &Addr::from(address), &entry, &compiled));
        }
    }
}
