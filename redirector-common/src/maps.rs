//! Key and value of every map. All are fixed in size, without padding, and plain data.
//!
//! Each pod has a slot, a number that its own small programs know; what the maps hold for it is keyed by that.
//!
//! | map         | kind               | scope  | key                                              | value               |
//! |-------------|--------------------|--------|--------------------------------------------------|---------------------|
//! | `PODS`      | array              | build  | slot                                             | [`PodEntry`]        |
//! | `FACTS`     | array              | build  | slot                                             | [`Facts`]           |
//! | `TRACED`    | array              | build  | slot                                             | 1 if traced (u32)   |
//! | `ADDRESSES` | hash               | build  | [`AddressKey`]                                   | 1 (u32)             |
//! | `RULES`     | LPM trie           | build  | [`RuleKey`]                                      | [`crate::rules::Match`] (u32) |
//! | `LISTENERS` | sockmap            | build  | [`listener_index`]                               | socket              |
//! | `COUNTERS`  | per-CPU array      | build  | [`counter_index`]                                | packets (u64)       |
//! | `DECIDERS`  | program array      | build  | [`Decider`]                                      | program             |
//! | `PROBERS`   | hash               | build  | id of a cgroup, or [`crate::probes::ANY_OF_NODE`] | 1 (u32)            |
//! | `PROXIES`   | hash               | build  | id of a cgroup, or [`ANY_WITH_MARK`]             | 1 (u32)             |
//! | `HINTS`     | LRU hash           | build  | [`crate::probes::Ends`]                          | when left, in ns (u64) |
//! | `TAGS`      | socket storage     | node   | socket                                           | [`Tag`] (u32)       |

use bytemuck::{Pod, Zeroable};

use crate::{net::Addr, verdict::Counter};

/// Name of the pods' entries.
pub const PODS: &str = "PODS";
/// Name of what agents know of the pods, and programs need not.
pub const FACTS: &str = "FACTS";
/// Name of the marks of the pods that are traced.
pub const TRACED: &str = "TRACED";
/// Name of the pods' addresses.
pub const ADDRESSES: &str = "ADDRESSES";
/// Name of the pods' rules.
pub const RULES: &str = "RULES";
/// Name of the sockmap of the proxy's listeners.
pub const LISTENERS: &str = "LISTENERS";
/// Name of the packet counters.
pub const COUNTERS: &str = "COUNTERS";
/// Name of the array of the programs that decide, which the pods' own programs go on to.
pub const DECIDERS: &str = "DECIDERS";
/// Name of the set of cgroups that probe.
pub const PROBERS: &str = "PROBERS";
/// Name of the set of cgroups of proxies that other processes are.
pub const PROXIES: &str = "PROXIES";
/// Name of the hints that ingress leaves for the socket lookup.
pub const HINTS: &str = "HINTS";
/// Name of the socket tags.
pub const TAGS: &str = "TAGS";
/// Name of the constant in a pod's own programs.
pub const SLOT: &str = "SLOT";

/// Most pods that a node may have enrolled. Kubernetes' own limit is 110 by default, and some run 500.
pub const MAX_PODS: usize = 1024;
/// Slots: more than pods, since a pod's new instance is made beside the old one, and a slot rests before it is used again. So many pods
/// a second can be repaired on a full node.
pub const MAX_SLOTS: usize = MAX_PODS + 512;
/// Most addresses that one pod may have on its interfaces.
pub const MAX_ADDRESSES: usize = 64;
/// Most addresses of all pods. Memory is taken as they come.
pub const MAX_ALL_ADDRESSES: usize = 16 * MAX_SLOTS;
/// Most entries that the rules of one pod may come to.
pub const MAX_POD_RULES: usize = 512;
/// Most entries in the rules of all pods: those in force, and those of before, which stay until the next change. Memory is taken as
/// they come.
pub const MAX_ALL_RULES: usize = 2 * MAX_POD_RULES * MAX_SLOTS;
/// Most cgroups whose processes may probe.
pub const MAX_PROBERS: usize = 16;
/// Most cgroups of proxies that other processes are: two while one takes over from another.
pub const MAX_PROXIES: usize = 16;
/// In the set of the proxies' cgroups: the mark alone will do. No cgroup has this id.
pub const ANY_WITH_MARK: u64 = 0;
/// Most hints. One is needed for some microseconds; a full map forgets the oldest, whose probe is then captured. Each CPU keeps a
/// hundred free places for itself.
pub const MAX_HINTS: usize = 8192;

/// An address of a pod.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Pod, Zeroable)]
pub struct AddressKey {
    /// Whose.
    pub slot: u32,
    /// The address.
    pub address: Addr,
}

const _: () = assert!(size_of::<AddressKey>() == 20);

/// A port or an address that a pod has a rule for; in the trie, the leading bits of one.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Pod, Zeroable)]
pub struct RuleKey {
    /// Whose.
    pub slot: u32,
    /// One of [`crate::rules::Subject`].
    pub subject: u8,
    /// Which of two sets of rules: one is in force, the other was before or is being made.
    pub generation: u8,
    /// Zero.
    pub zero: [u8; 2],
    /// A port in its first two bytes, or an address; in network byte order.
    pub value: [u8; 16],
}

const _: () = assert!(size_of::<RuleKey>() == 24);

/// Bits of a [`RuleKey`] before its value.
pub const RULE_KEY_PREFIX: u32 = 64;

/// Index of a pod's listener in `LISTENERS`.
#[inline(always)]
pub const fn listener_index(slot: u32, listener: Listener) -> u32 {
    slot * LISTENER_STRIDE + listener as u32
}

/// Listeners that a slot has room for.
pub const LISTENER_STRIDE: u32 = 8;

/// Index of a pod's counter in `COUNTERS`.
#[inline(always)]
pub const fn counter_index(slot: u32, counter: Counter) -> u32 {
    slot * COUNTER_STRIDE + counter as u32
}

/// Counters that a slot has room for.
pub const COUNTER_STRIDE: u32 = 32;

const _: () = assert!(Counter::ALL.len() <= COUNTER_STRIDE as usize);

/// The programs that decide, each loaded once for all pods. A pod's own programs go on to them by tail call, with the slot in
/// the packet's control buffer.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decider {
    /// What a pod sends.
    Egress = 0,
    /// What arrives at a pod.
    Ingress = 1,
}

/// Number of deciders.
pub const DECIDER_COUNT: usize = 2;

/// What the programs know about the pod they serve.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct PodEntry {
    /// Bits of `FLAG_*`.
    pub flags: u32,
    /// Bits of [`crate::rules`]: which rules there are.
    pub rules: u32,
    /// The id of the node's namespace in the pod's, plus 1 (ip-netns(8), "nsid"); 0 if nobody's connections are probes.
    pub node_nsid: u32,
    /// Indexes of the interfaces of which what arrives is outbound; 0 is none.
    pub rerouted: [u32; MAX_REROUTED],
}

const _: () = assert!(size_of::<PodEntry>() == 44);

/// Most interfaces of a pod of which what arrives is outbound.
pub const MAX_REROUTED: usize = 8;

/// Count, but let everything pass: `redirector load`.
pub const FLAG_OBSERVE: u32 = 1;
/// `bpf_sk_lookup.ingress_ifindex` exists (5.17 on): the proxy's own dial is told by its device, lo. Without it, by its source
/// port.
pub const FLAG_LOOKUP_HAS_IFINDEX: u32 = 1 << 1;
/// Capture nothing new: the pod is being released, and its captured connections may end in peace.
pub const FLAG_RELEASING: u32 = 1 << 2;
/// Capture nothing inbound but HBONE: the pod is an ingress gateway.
pub const FLAG_BYPASS_INBOUND: u32 = 1 << 3;
/// The pod's DNS goes to the listeners of port 15053.
pub const FLAG_DNS_CAPTURE: u32 = 1 << 4;
/// The pod's proxy is another process, whose sockets all have one mark, [`crate::consts::MARK_PROXY`], and are otherwise not told.
pub const FLAG_ONE_MARK: u32 = 1 << 5;

impl PodEntry {
    /// Whether all bits of `flag` are set.
    #[inline(always)]
    pub const fn has(&self, flag: u32) -> bool {
        self.flags & flag == flag
    }

    /// Whether some connections to the pod are left alone as probes.
    #[inline(always)]
    pub const fn is_probed(&self) -> bool {
        self.node_nsid != 0
    }

    /// Whether what arrives by the interface of this index is outbound.
    #[inline(always)]
    pub const fn reroutes(&self, ifindex: u32) -> bool {
        let mut at = 0;
        // Left at the first hit: a flag that is carried through all turns has the verifier follow each of its 256 histories.
        while at < MAX_REROUTED {
            if self.rerouted[at] == ifindex {
                return ifindex != 0;
            }
            at += 1;
        }
        false
    }
}

/// What an agent has to know of a pod's programs to take them over, to replace them or to remove them; no program reads it.
///
/// Agents of every build read it of every other, so its size and the members that it has stay as they are. What comes to be
/// needed takes of `reserved`, from its beginning, where zero has to mean that nobody has said anything; `version` then counts up, for
/// people who look.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Facts {
    /// [`Self::VERSION`]; 0 where nothing was written yet.
    pub version: u32,
    /// Bits of `FACT_*`.
    pub flags: u32,
    /// Inode of the pod's network namespace; 0 when the slot is nobody's any more.
    pub netns_ino: u64,
    /// Cookie of that namespace; 0 where the kernel has none (before 5.14).
    pub netns_cookie: u64,
    /// The sysctls that enrolment changed, a bit each, to be put back.
    pub changed_sysctls: u32,
    /// Zero.
    pub zero: u32,
    /// Zero.
    pub reserved: [u64; 4],
}

const _: () = assert!(size_of::<Facts>() == 64);

impl Facts {
    /// Of the members that there are.
    pub const VERSION: u32 = 1;

    /// Whether all bits of `flag` are set.
    pub const fn has(&self, flag: u32) -> bool {
        self.flags & flag == flag
    }
}

/// The TC programs are attached by clsact filters, not TCX links.
pub const FACT_CLSACT: u32 = 1;
/// The agent has added the clsact qdisc that its filters hang on, and not found it there.
pub const FACT_ADDED_CLSACT: u32 = 1 << 1;
/// The pod's DNS is captured.
pub const FACT_DNS_CAPTURE: u32 = 1 << 2;

/// A listener of the proxy's in a pod.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Listener {
    /// Port 15001.
    Outbound = 0,
    /// Port 15006.
    Inbound = 1,
    /// Port 15008.
    Hbone = 2,
    /// Port 15053 of TCP, for IPv4.
    DnsTcpV4 = 3,
    /// Port 15053 of TCP, for IPv6; one socket may be both.
    DnsTcpV6 = 4,
    /// Port 15053 of UDP, for IPv4.
    DnsUdpV4 = 5,
    /// Port 15053 of UDP, for IPv6; one socket may be both.
    DnsUdpV6 = 6,
}

impl Listener {
    /// The listener for DNS over TCP.
    #[inline(always)]
    pub const fn dns_tcp(v4: bool) -> Self {
        if v4 { Self::DnsTcpV4 } else { Self::DnsTcpV6 }
    }

    /// The listener for DNS over UDP.
    #[inline(always)]
    pub const fn dns_udp(v4: bool) -> Self {
        if v4 { Self::DnsUdpV4 } else { Self::DnsUdpV6 }
    }
}

const _: () = assert!((Listener::DnsUdpV6 as u32) < LISTENER_STRIDE);

/// What a socket was found or declared to be; kept with the socket itself, so that nothing can evict or forge it.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tag {
    /// The application's, and captured at its SYN.
    Captured = 1,
    /// The proxy's own: declared by the agent before it connects or listens.
    Proxy = 2,
}

impl Tag {
    /// From a map value.
    #[inline(always)]
    pub const fn from_value(value: u32) -> Option<Self> {
        match value {
            1 => Some(Self::Captured),
            2 => Some(Self::Proxy),
            _ => None,
        }
    }
}
