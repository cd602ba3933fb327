//! Packet counters, one per way in which a program ends.

use aya_ebpf::{btf_maps::PerCpuArray, macros::btf_map};
use redirector_common::{
    maps::{COUNTER_STRIDE, MAX_SLOTS, counter_index},
    verdict::Counter,
};

#[btf_map]
static COUNTERS: PerCpuArray<u64, { MAX_SLOTS * COUNTER_STRIDE as usize }> = PerCpuArray::new();

/// One more packet of the pod in `slot`.
#[inline(always)]
pub(crate) fn count(slot: u32, counter: Counter) {
    if let Some(packets) = COUNTERS.get_ptr_mut(counter_index(slot, counter)) {
        // SAFETY: a slot of this CPU's own, and programs are not preempted by another that counts.
        unsafe { *packets += 1 };
    }
}
