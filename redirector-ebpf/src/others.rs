//! Proxies that other processes are, in pods with `FLAG_ONE_MARK`.

use aya_ebpf::{
    EbpfContext as _, btf_maps::HashMap, helpers::bpf_skb_cgroup_id, macros::btf_map, programs::TcContext,
};
use redirector_common::maps::{ANY_WITH_MARK, MAX_PROXIES};

#[btf_map]
static PROXIES: HashMap<u64, u32, MAX_PROXIES> = HashMap::new();

/// Whether a packet that has the proxy's mark is a proxy's: its socket's creator was in a proxy's cgroup.
#[inline(always)]
pub(crate) fn is_proxy(ctx: &TcContext) -> bool {
    // SAFETY: a valid context, of which the helper takes the socket if there is one.
    let cgroup = unsafe { bpf_skb_cgroup_id(ctx.as_ptr().cast()) };
    // 0 is no cgroup's, and what it stands for in the map is asked for next.
    cgroup != ANY_WITH_MARK && PROXIES.get_ptr(cgroup).is_some() || PROXIES.get_ptr(ANY_WITH_MARK).is_some()
}
