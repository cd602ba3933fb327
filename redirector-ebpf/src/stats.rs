//! Packet counters, one per way in which a program ends.

use aya_ebpf::{btf_maps::PerCpuArray, macros::btf_map};
use redirector_common::verdict::Counter;

#[btf_map]
static COUNTERS: PerCpuArray<u64, { Counter::ALL.len() }> = PerCpuArray::new();

/// One more packet.
#[inline(always)]
pub(crate) fn count(counter: Counter) {
    if let Some(packets) = COUNTERS.get_ptr_mut(counter as u32) {
        // SAFETY: a slot of this CPU's own, and programs are not preempted by another that counts.
        unsafe { *packets += 1 };
    }
}
