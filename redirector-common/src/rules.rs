//! Include and exclude rules: which connections of an enrolled pod are captured. Pure; the programs and the agent share it.
//!
//! Per direction there are four lists: ports and networks, to capture only those or to leave those alone. A connection is captured
//! if it is in each "only" list that there is, and in no "not" list. A trie holds for each port or network the union of what all
//! rules say about it, so that one lookup of a subject answers.

use crate::{maps::PodEntry, net::Addr};

/// Which way a connection is opened, as the pod sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// By the pod: rules are about the destination's port and address.
    Outbound,
    /// To the pod: rules are about the pod's port and the client's address.
    Inbound,
}

/// What a rule is about.
#[repr(u8)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Subject {
    /// The destination's port.
    OutboundPort = 1,
    /// The destination's address.
    OutboundNetwork = 2,
    /// The pod's port.
    InboundPort = 3,
    /// The client's address.
    InboundNetwork = 4,
}

impl Subject {
    /// The subject of a direction's port rules.
    #[inline(always)]
    pub const fn port(direction: Direction) -> Self {
        match direction {
            Direction::Outbound => Self::OutboundPort,
            Direction::Inbound => Self::InboundPort,
        }
    }

    /// The subject of a direction's network rules.
    #[inline(always)]
    pub const fn network(direction: Direction) -> Self {
        match direction {
            Direction::Outbound => Self::OutboundNetwork,
            Direction::Inbound => Self::InboundNetwork,
        }
    }

    /// The bit of [`PodEntry::rules`] that says that there is a list of what alone is captured.
    #[inline(always)]
    const fn only(self) -> u32 {
        1 << (self as u32)
    }
}

/// What the rules say about a port or an address: bits of [`INCLUDED`] and [`EXCLUDED`].
pub type Match = u32;
/// In a list of what alone is captured.
pub const INCLUDED: Match = 1;
/// In a list of what is left alone.
pub const EXCLUDED: Match = 1 << 1;

/// Bit of [`PodEntry::rules`]: the generation of rules in force.
pub const GENERATION: u32 = 1;
const ANY_OUTBOUND: u32 = 1 << 8;
const ANY_INBOUND: u32 = 1 << 9;

/// The generation of rules in force.
#[inline(always)]
pub const fn generation(rules: u32) -> u8 {
    (rules & GENERATION) as u8
}

/// The bits of [`PodEntry::rules`] for one subject that has rules; `only` if some say what alone is captured.
pub const fn bits(subject: Subject, only: bool) -> u32 {
    let any = match subject {
        Subject::OutboundPort | Subject::OutboundNetwork => ANY_OUTBOUND,
        Subject::InboundPort | Subject::InboundNetwork => ANY_INBOUND,
    };
    if only { any | subject.only() } else { any }
}

/// The rules of a pod: a trie in the programs, a list in tests.
pub trait Rules {
    /// What they say about a port, host byte order.
    fn port(&self, subject: Subject, port: u16) -> Match;
    /// What they say about an address.
    fn address(&self, subject: Subject, address: &Addr) -> Match;
}

/// Whether the rules leave a connection alone. `port` and `address` are those that the direction's rules are about.
#[inline(always)]
pub fn excluded<R: Rules + ?Sized>(
    direction: Direction,
    port: u16,
    address: &Addr,
    pod: &PodEntry,
    rules: &R,
) -> bool {
    let any = match direction {
        Direction::Outbound => ANY_OUTBOUND,
        Direction::Inbound => ANY_INBOUND,
    };
    if pod.rules & any == 0 {
        return false;
    }
    let (ports, networks) = (Subject::port(direction), Subject::network(direction));
    let by_port = rules.port(ports, port);
    let by_address = rules.address(networks, address);
    let not = |found: Match, subject: Subject| {
        found & EXCLUDED != 0 || pod.rules & subject.only() != 0 && found & INCLUDED == 0
    };
    not(by_port, ports) || not(by_address, networks)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is said about port 80 and 10.0.0.1; nothing is said about others.
    struct Said {
        port: Match,
        address: Match,
    }

    impl Rules for Said {
        fn port(&self, subject: Subject, port: u16) -> Match {
            if subject == Subject::OutboundPort && port == 80 {
                self.port
            } else {
                0
            }
        }

        fn address(&self, subject: Subject, address: &Addr) -> Match {
            if subject == Subject::OutboundNetwork && *address == ADDRESS {
                self.address
            } else {
                0
            }
        }
    }

    const ADDRESS: Addr = Addr::from_v4_be(u32::from_ne_bytes([10, 0, 0, 1]));
    const OTHER: Addr = Addr::from_v4_be(u32::from_ne_bytes([10, 0, 0, 2]));

    #[test]
    fn a_connection_is_in_every_only_list_and_in_no_other() {
        let entry = |rules| PodEntry {
            rules,
            ..bytemuck::Zeroable::zeroed()
        };
        let (ports, networks) = (Subject::OutboundPort, Subject::OutboundNetwork);
        let (not_port, only_port) = (bits(ports, false), bits(ports, true));
        let (not_net, only_net) = (bits(networks, false), bits(networks, true));
        // What there is, what is said of port 80 and 10.0.0.1, and whether (80, .1), (81, .1), (80, .2), (81, .2) are left alone.
        let table = [
            (0, EXCLUDED, EXCLUDED, [false; 4]),
            (not_port, EXCLUDED, 0, [true, false, true, false]),
            (only_port, INCLUDED, 0, [false, true, false, true]),
            (only_port, INCLUDED | EXCLUDED, 0, [true, true, true, true]),
            (not_net, 0, EXCLUDED, [true, true, false, false]),
            (only_net, 0, INCLUDED, [false, false, true, true]),
            (
                only_port | only_net,
                INCLUDED,
                INCLUDED,
                [false, true, true, true],
            ),
            (only_port | not_net, INCLUDED, EXCLUDED, [true, true, false, true]),
            (not_port | not_net, EXCLUDED, EXCLUDED, [true, true, true, false]),
        ];
        for (rules, port, address, expected) in table {
            let said = Said { port, address };
            let found = [(80, ADDRESS), (81, ADDRESS), (80, OTHER), (81, OTHER)]
                .map(|(port, address)| excluded(Direction::Outbound, port, &address, &entry(rules), &said));
            assert_eq!(found, expected, "{rules:#x} {port} {address}");
            assert!(!excluded(Direction::Inbound, 80, &ADDRESS, &entry(rules), &said));
        }
    }

    #[test]
    fn the_bits_do_not_overlap() {
        let subjects = [
            Subject::OutboundPort,
            Subject::OutboundNetwork,
            Subject::InboundPort,
            Subject::InboundNetwork,
        ];
        for (position, subject) in subjects.into_iter().enumerate() {
            assert_eq!(subject.only() & (GENERATION | ANY_INBOUND | ANY_OUTBOUND), 0);
            for other in &subjects[position + 1..] {
                assert_eq!(subject.only() & other.only(), 0);
            }
        }
    }
}
