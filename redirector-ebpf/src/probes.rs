//! Where a new connection comes from, and the hints by which ingress tells the lookup.

use aya_ebpf::{
    EbpfContext as _,
    btf_maps::{HashMap, LruHashMap},
    helpers::{bpf_ktime_get_ns, bpf_skb_ancestor_cgroup_id},
    macros::btf_map,
    programs::TcContext,
};
use redirector_common::{
    maps::{MAX_HINTS, MAX_PROBERS},
    packet::TcpMeta,
    probes::{self, Ends, Origin},
    verdict::{Hints, Lookup},
};

use crate::{pod::Pod, steer};

#[btf_map]
static PROBERS: HashMap<u64, u32, MAX_PROBERS> = HashMap::new();

#[btf_map]
static HINTS: LruHashMap<Ends, u64, MAX_HINTS> = LruHashMap::new();

/// A SYN that has arrived.
struct Arrival<'a> {
    ctx: &'a TcContext,
    tcp: &'a TcpMeta,
    pod: Pod,
}

impl Origin for Arrival<'_> {
    #[inline(always)]
    fn is_prober(&self, cgroup: u64) -> bool {
        PROBERS.get_ptr(cgroup).is_some()
    }

    #[inline(always)]
    fn cgroup(&self, level: u32) -> Option<u64> {
        // SAFETY: a valid context, of which the helper takes the socket if there is one.
        let id = unsafe { bpf_skb_ancestor_cgroup_id(self.ctx.as_ptr().cast(), level as i32) };
        (id != 0).then_some(id)
    }

    #[inline(always)]
    fn is_opened_by_node(&self) -> bool {
        steer::is_opened_in(
            self.ctx,
            self.tcp,
            u64::from(self.pod.entry.node_nsid.wrapping_sub(1)),
        )
    }
}

/// Whether a SYN is a probe's. The lookup is left a hint if it is, and none if it is not.
#[inline(always)]
pub(crate) fn settle(ctx: &TcContext, tcp: &TcpMeta, pod: Pod) -> bool {
    let ends = Ends::of_packet(pod.slot, tcp);
    if pod.entry.is_probed() && probes::is_probe(&Arrival { ctx, tcp, pod }) {
        hint(tcp, pod);
        return true;
    }
    // Looking is without a lock, and nearly always all that there is to do.
    if HINTS.get_ptr(&ends).is_some() {
        let _ = HINTS.remove(&ends);
    }
    false
}

/// Tells the lookup that a new connection is for the application.
#[inline(always)]
pub(crate) fn hint(tcp: &TcpMeta, pod: Pod) {
    let ends = Ends::of_packet(pod.slot, tcp);
    // SAFETY: no precondition.
    let now = unsafe { bpf_ktime_get_ns() };
    // Without a hint, it is captured.
    let _ = HINTS.insert(&ends, now, 0);
}

impl Hints for Pod {
    #[inline(always)]
    fn is_for_application(&self, connection: &Lookup) -> bool {
        let Some(left) = HINTS.get_ptr(Ends::of_lookup(self.slot, connection)) else {
            return false;
        };
        // SAFETY: a value of the map's, of 8 bytes, which are written at once; no precondition.
        unsafe { probes::is_fresh(left.read_volatile(), bpf_ktime_get_ns()) }
    }
}
