//! Key and value of every map. All are fixed in size, without padding, and plain data.
//!
//! | map         | kind               | scope  | key               | value         |
//! |-------------|--------------------|--------|-------------------|---------------|
//! | `POD`       | array of 1         | pod    | 0                 | [`PodEntry`]  |
//! | `ADDRESSES` | hash               | pod    | [`crate::net::Addr`] | 1 (u32)       |
//! | `LISTENERS` | sockmap            | pod    | [`Listener`]      | socket        |
//! | `COUNTERS`  | per-CPU array      | pod    | [`crate::verdict::Counter`] | packets (u64) |
//! | `TAGS`      | socket storage     | node   | socket            | [`Tag`] (u32) |

use bytemuck::{Pod, Zeroable};

/// Name of the pod's own entry.
pub const POD: &str = "POD";
/// Name of the set of the pod's addresses.
pub const ADDRESSES: &str = "ADDRESSES";
/// Name of the sockmap of the proxy's listeners in the pod.
pub const LISTENERS: &str = "LISTENERS";
/// Name of the packet counters.
pub const COUNTERS: &str = "COUNTERS";
/// Name of the socket tags, shared by all pods of the node.
pub const TAGS: &str = "TAGS";

/// Most addresses that one pod may have on its interfaces.
pub const MAX_ADDRESSES: usize = 64;

/// What the programs know about the pod they serve.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct PodEntry {
    /// Which build of the object serves the pod; the programs don't read it, a restarted agent does.
    pub build: u64,
    /// Inode of the pod's network namespace; for the agent only.
    pub netns_ino: u64,
    /// Bits of `FLAG_*`.
    pub flags: u32,
    /// The sysctls that enrolment changed, a bit each, to be put back; for the agent only.
    pub changed_sysctls: u32,
}

const _: () = assert!(size_of::<PodEntry>() == 24);

/// Count, but let everything pass: `redirector load`.
pub const FLAG_OBSERVE: u32 = 1;
/// Write a debug record for each new connection.
pub const FLAG_TRACE: u32 = 1 << 1;
/// `bpf_sk_lookup.ingress_ifindex` exists (5.17 on): the proxy's own dial is told by its device, lo. Without it, by its source
/// port.
pub const FLAG_LOOKUP_HAS_IFINDEX: u32 = 1 << 2;
/// Capture nothing new: the pod is being released, and its captured connections may end in peace.
pub const FLAG_RELEASING: u32 = 1 << 3;

/// The TC programs are attached by clsact filters, not TCX links; for the agent only.
pub const FLAG_CLSACT: u32 = 1 << 4;

impl PodEntry {
    /// Whether all bits of `flag` are set.
    #[inline(always)]
    pub const fn has(&self, flag: u32) -> bool {
        self.flags & flag == flag
    }
}

/// Index of a listener in `LISTENERS`.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Listener {
    /// Port 15001.
    Outbound = 0,
    /// Port 15006.
    Inbound = 1,
    /// Port 15008.
    Hbone = 2,
}

/// Number of listeners in `LISTENERS`.
pub const LISTENER_COUNT: u32 = 3;

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
