//! The node's own probes of a pod, kubelet's above all: they go to the application past the proxy. Pure; the ingress and lookup
//! programs and the agent share it.
//!
//! Ingress knows who sent a SYN, and the socket lookup, which picks the listener, does not. So ingress leaves a hint under the
//! connection's two ends. It is not taken away when it is used: with SYN cookies, the handshake's ACK is looked up once more.

use bytemuck::{Pod, Zeroable};

use crate::{net::Addr, packet::TcpMeta, verdict::Lookup};

/// In the set of the probers' cgroups: any process of the node will do. No cgroup has this id.
pub const ANY_OF_NODE: u64 = 0;

/// How far below the root of all cgroups a prober's is looked for. systemd's units are at level 2, and 4 in a container.
pub const MAX_CGROUP_DEPTH: u32 = 16;

/// How long a hint is good, in nanoseconds: the time between a SYN and the last of its handshake. Who retries, leaves a new one.
pub const HINT_LIFETIME_NS: u64 = 10_000_000_000;

/// The two ends of a connection to a pod.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Pod, Zeroable)]
pub struct Ends {
    /// Which pod's.
    pub slot: u32,
    /// The pod's address.
    pub local: Addr,
    /// The other's.
    pub remote: Addr,
    /// The pod's port, host byte order.
    pub local_port: u16,
    /// The other's.
    pub remote_port: u16,
}

const _: () = assert!(size_of::<Ends>() == 40);

impl Ends {
    /// Those of a packet that arrives.
    #[inline(always)]
    pub const fn of_packet(slot: u32, tcp: &TcpMeta) -> Self {
        Self {
            slot,
            local: tcp.destination,
            remote: tcp.source,
            local_port: tcp.destination_port,
            remote_port: tcp.source_port,
        }
    }

    /// Those of a connection that looks for its listener.
    #[inline(always)]
    pub const fn of_lookup(slot: u32, connection: &Lookup) -> Self {
        Self {
            slot,
            local: connection.local,
            remote: connection.remote,
            local_port: connection.local_port,
            remote_port: connection.remote_port,
        }
    }
}

/// Where a SYN comes from: what the kernel knows of its sender, in the programs; a table in tests.
pub trait Origin {
    /// Whether this cgroup, or [`ANY_OF_NODE`], is in the set of probers.
    fn is_prober(&self, cgroup: u64) -> bool;
    /// The sending socket's cgroup at a level, 0 being the root of all; `None` below its own, and without a socket.
    fn cgroup(&self, level: u32) -> Option<u64>;
    /// Whether a socket of the node's own namespace is opening just this connection.
    fn is_opened_by_node(&self) -> bool;
}

/// Whether a new connection is a probe of the node's. The cgroup alone does not tell: pods can be below a prober's, and a packet
/// that another pod sends over a bridge still has its socket.
#[inline(always)]
pub fn is_probe<O: Origin + ?Sized>(origin: &O) -> bool {
    (origin.is_prober(ANY_OF_NODE) || in_probers_cgroup(origin)) && origin.is_opened_by_node()
}

#[inline(always)]
fn in_probers_cgroup<O: Origin + ?Sized>(origin: &O) -> bool {
    let mut level = 0;
    while level < MAX_CGROUP_DEPTH {
        match origin.cgroup(level) {
            Some(cgroup) if origin.is_prober(cgroup) => return true,
            Some(_) => level += 1,
            None => return false,
        }
    }
    false
}

/// Whether a hint left at `left` still counts at `now`, both in nanoseconds of the kernel's monotonic clock. Another CPU's may be
/// a little ahead.
#[inline(always)]
pub const fn is_fresh(left: u64, now: u64) -> bool {
    now.saturating_sub(left) < HINT_LIFETIME_NS
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sender.
    #[derive(Default)]
    struct Sender {
        probers: &'static [u64],
        cgroups: &'static [u64],
        of_node: bool,
    }

    impl Origin for Sender {
        fn is_prober(&self, cgroup: u64) -> bool {
            self.probers.contains(&cgroup)
        }

        fn cgroup(&self, level: u32) -> Option<u64> {
            self.cgroups.get(level as usize).copied()
        }

        fn is_opened_by_node(&self) -> bool {
            self.of_node
        }
    }

    #[test]
    fn probes_are_of_a_probers_cgroup_and_of_the_node() {
        const DEEP: &[u64] = &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17];
        for (what, probers, cgroups, of_node, expected) in [
            ("kubelet", &[9][..], &[1, 5, 9][..], true, true),
            ("kubelet's child", &[9], &[1, 5, 9, 12], true, true),
            ("the last level looked at", &[16], DEEP, true, true),
            ("one below that", &[17], DEEP, true, false),
            ("another unit", &[9], &[1, 5, 8], true, false),
            ("a parent of kubelet's", &[9], &[1, 5], true, false),
            ("a pod below kubelet's cgroup", &[9], &[1, 5, 9, 12], false, false),
            ("no socket: from another node", &[9], &[], false, false),
            ("no socket, whatever the node does", &[9], &[], true, false),
            ("the root of all, and the node", &[1], &[1, 5, 9], true, true),
            ("the root of all, and a pod", &[1], &[1, 5, 9], false, false),
            ("any of the node", &[ANY_OF_NODE], &[1], true, true),
            ("any, its socket lost on the way", &[ANY_OF_NODE], &[], true, true),
            ("any, but a pod's", &[ANY_OF_NODE], &[1, 7], false, false),
            ("nobody is one", &[], &[1, 5, 9], true, false),
        ] {
            let sender = Sender {
                probers,
                cgroups,
                of_node,
            };
            assert_eq!(is_probe(&sender), expected, "{what}");
        }
    }

    #[test]
    fn hints_age() {
        for (left, now, fresh) in [
            (5, 5, true),
            (6, 5, true),
            (0, HINT_LIFETIME_NS - 1, true),
            (0, HINT_LIFETIME_NS, false),
        ] {
            assert_eq!(is_fresh(left, now), fresh, "{left} {now}");
        }
    }

    #[test]
    fn packet_and_lookup_have_the_same_ends() {
        let (source, destination) = (Addr([1, 2, 3, 4]), Addr([5, 6, 7, 8]));
        let packet = TcpMeta {
            source,
            destination,
            source_port: 4000,
            destination_port: 80,
            flags: 2,
            l4_offset: 54,
            v4: false,
        };
        let lookup = Lookup {
            local: destination,
            remote: source,
            local_port: 80,
            remote_port: 4000,
            by_lo: false,
            rerouted: false,
        };
        assert_eq!(Ends::of_packet(7, &packet), Ends::of_lookup(7, &lookup));
        assert_ne!(Ends::of_packet(7, &packet), Ends::of_lookup(8, &lookup));
    }
}
