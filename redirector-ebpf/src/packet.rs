//! Header bytes out of a `__sk_buff`.

use core::mem::MaybeUninit;

use aya_ebpf::{EbpfContext as _, helpers::bpf_skb_load_bytes, programs::TcContext};
use redirector_common::packet::{self, Bytes, PLAIN_V4, PLAIN_V6};

/// A packet as [`Bytes`]. `bpf_skb_load_bytes` reads the paged part of a packet too, and needs no bounds that the verifier of
/// an old kernel could lose sight of.
pub(crate) struct Skb<'a>(pub(crate) &'a TcContext);

impl Skb<'_> {
    /// The packet's mark.
    #[inline(always)]
    pub(crate) fn mark(&self) -> u32 {
        // SAFETY: the kernel passes a valid context.
        unsafe { (*self.0.skb.skb).mark }
    }

    /// The index of the interface that it is on.
    #[inline(always)]
    pub(crate) fn interface(&self) -> u32 {
        // SAFETY: the kernel passes a valid context.
        unsafe { (*self.0.skb.skb).ifindex }
    }

    /// Whether it came in by some interface; on egress: it is forwarded, and not sent from here.
    #[inline(always)]
    pub(crate) fn has_arrived(&self) -> bool {
        // SAFETY: the kernel passes a valid context.
        unsafe { (*self.0.skb.skb).ingress_ifindex != 0 }
    }

    /// Whether its frame is addressed to the interface it arrived by, and not on its way past this host.
    #[inline(always)]
    pub(crate) fn is_for_this_host(&self) -> bool {
        /// `include/uapi/linux/if_packet.h`
        const PACKET_HOST: u32 = 0;
        // SAFETY: the kernel passes a valid context.
        unsafe { (*self.0.skb.skb).pkt_type == PACKET_HOST }
    }
}

impl Skb<'_> {
    /// Whether the packet is, at a glance, TCP that opens no connection: nearly every one is. Read where it lies, for as much of it
    /// as lies in one piece.
    #[inline(always)]
    pub(crate) fn is_plain_later(&self) -> bool {
        let (start, end) = (self.0.data(), self.0.data_end());
        // SAFETY: within the bounds that the kernel gives; bytes have no alignment.
        unsafe {
            if start + PLAIN_V4 > end {
                return false;
            }
            if packet::is_plain_later_v4(&*(start as *const [u8; PLAIN_V4])) {
                return true;
            }
            start + PLAIN_V6 <= end && packet::is_plain_later_v6(&*(start as *const [u8; PLAIN_V6]))
        }
    }
}

impl Bytes for Skb<'_> {
    #[inline(always)]
    fn load<const N: usize>(&self, offset: u32) -> Option<[u8; N]> {
        let mut bytes = MaybeUninit::<[u8; N]>::uninit();
        // SAFETY: `bytes` has room for N bytes, and is used only if the helper has filled it.
        unsafe {
            let failed = bpf_skb_load_bytes(
                self.0.as_ptr().cast(),
                offset,
                bytes.as_mut_ptr().cast(),
                N as u32,
            );
            (failed == 0).then(|| bytes.assume_init())
        }
    }
}
