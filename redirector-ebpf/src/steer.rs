//! The only place that turns packets back, refuses, assigns or drops.

use core::mem::size_of;

use aya_ebpf::{
    EbpfContext as _,
    bindings::{
        BPF_F_CURRENT_NETNS, BPF_F_INGRESS, BPF_SK_LOOKUP_F_NO_REUSEPORT, BPF_TCP_LISTEN, BPF_TCP_SYN_SENT,
        TC_ACT_SHOT, TC_ACT_UNSPEC, bpf_sock, bpf_sock_tuple, bpf_sock_tuple__bindgen_ty_1__bindgen_ty_1,
        bpf_sock_tuple__bindgen_ty_1__bindgen_ty_2,
        sk_action::{SK_DROP, SK_PASS},
    },
    helpers::{
        bpf_map_lookup_elem, bpf_redirect, bpf_sk_assign, bpf_sk_fullsock, bpf_sk_release,
        bpf_skb_store_bytes, bpf_skc_lookup_tcp,
    },
    programs::{SkLookupContext, TcContext},
};
use redirector_common::{
    consts::{MARK_APP, MARK_LOOP, MARK_MASK, MARK_PROXY, Mark},
    maps::Listener,
    net::Addr,
    packet::{self, Bytes as _, ETH_HLEN, Parsed, TCP_ACK, TCP_RST, TcpMeta},
    verdict::Counter,
};

use crate::{
    packet::Skb,
    pod::{LISTENERS, Pod},
    stats::count,
};

/// Not ours to decide: the next program or filter on the hook runs. TCX_NEXT has the same value.
pub(crate) const NEXT: i32 = TC_ACT_UNSPEC;
/// Dropped.
pub(crate) const DROP: i32 = TC_ACT_SHOT as i32;

/// lo has this index in every namespace (`include/net/flow.h`, LOOPBACK_IFINDEX).
pub(crate) const LOOPBACK_IFINDEX: u32 = 1;

/// Turns the packet back into the pod: marked, so that it is routed locally, and received by lo.
#[inline(always)]
pub(crate) fn turn_back(ctx: &TcContext) -> i32 {
    mark(ctx, MARK_LOOP);
    // The frame is addressed to a neighbour; lo would drop it as somebody else's (PACKET_OTHERHOST). lo's own address is zero.
    if !store(ctx, 0, &[0_u8; 6]) {
        return DROP;
    }
    // SAFETY: no precondition.
    unsafe { bpf_redirect(LOOPBACK_IFINDEX, u64::from(BPF_F_INGRESS)) as i32 }
}

/// Sets our bits of the packet's mark.
#[inline(always)]
pub(crate) fn mark(ctx: &TcContext, mark: Mark) {
    // SAFETY: a valid context; `mark` may be written by TC programs.
    unsafe {
        let skb = ctx.skb.skb;
        (*skb).mark = ((*skb).mark & !MARK_MASK) | mark.0;
    }
}

/// Whether a listener of the pod's is there.
#[inline(always)]
pub(crate) fn listener_exists(pod: Pod, listener: Listener) -> bool {
    with_listener(pod, listener, |_| ()).is_some()
}

/// Gives the packet's connection to 15006; false if that is away.
#[inline(always)]
pub(crate) fn assign_inbound(ctx: &TcContext, pod: Pod) -> bool {
    // SAFETY: the socket is held for the call.
    with_listener(pod, Listener::Inbound, |sk| unsafe {
        bpf_sk_assign(ctx.as_ptr().cast(), sk, 0) == 0
    }) == Some(true)
}

/// Runs `f` with a listener of the pod's held.
#[inline(always)]
fn with_listener<T>(pod: Pod, listener: Listener, f: impl FnOnce(*mut core::ffi::c_void) -> T) -> Option<T> {
    let index = pod.listener(listener);
    // SAFETY: map and key are valid; a socket that is found is released once and not used after.
    unsafe {
        let sk = bpf_map_lookup_elem(
            (&raw const LISTENERS).cast_mut().cast(),
            (&raw const index).cast(),
        );
        if sk.is_null() {
            return None;
        }
        let result = f(sk);
        bpf_sk_release(sk);
        Some(result)
    }
}

/// SK_LOOKUP: gives the connection to a listener, or refuses it: the kernel answers SK_DROP with a reset. It never falls
/// through to whoever else listens.
#[inline(always)]
pub(crate) fn assign(ctx: &SkLookupContext, pod: Pod, listener: Listener, counter: Counter) -> u32 {
    // This socket, and not one by the kernel's draw from its group (SO_REUSEPORT): while a proxy takes over from another, both listen.
    let flags = u64::from(BPF_SK_LOOKUP_F_NO_REUSEPORT);
    if LISTENERS
        .redirect_sk_lookup(ctx, pod.listener(listener), flags)
        .is_ok()
    {
        count(pod.slot, counter);
        SK_PASS
    } else {
        count(pod.slot, Counter::LookupRefused);
        SK_DROP
    }
}

/// Whether the pod has a socket, not merely a listener, whose local end is the packet's destination.
#[inline(always)]
pub(crate) fn far_end_is_here(ctx: &TcContext, tcp: &TcpMeta) -> bool {
    with_destination_socket(ctx, tcp, |sk| {
        // SAFETY: the socket is held for the call.
        unsafe { (*sk).state != BPF_TCP_LISTEN }
    })
}

/// Whether the application has a connection with the packet's ends: accepted from the proxy's dial, whose mark it has.
#[inline(always)]
pub(crate) fn dialled_just_now(ctx: &TcContext, tcp: &TcpMeta) -> bool {
    with_destination_socket(ctx, tcp, |sk| {
        // SAFETY: the socket is held for the call; the helper answers null for one that is not full.
        unsafe {
            let full = bpf_sk_fullsock(sk);
            !full.is_null() && (*full).state != BPF_TCP_LISTEN && (*full).mark & MARK_MASK == MARK_APP.0
        }
    })
}

/// Asks something of the socket in this namespace that would receive the packet; false if there is none.
#[inline(always)]
fn with_destination_socket(ctx: &TcContext, tcp: &TcpMeta, f: impl FnOnce(*mut bpf_sock) -> bool) -> bool {
    let from = (&tcp.source, tcp.source_port);
    let to = (&tcp.destination, tcp.destination_port);
    with_socket(ctx, BPF_F_CURRENT_NETNS as u64, tcp.v4, from, to, f)
}

/// Whether a socket of the namespace with this id is opening the packet's connection: has sent this SYN.
#[inline(always)]
pub(crate) fn is_opened_in(ctx: &TcContext, tcp: &TcpMeta, nsid: u64) -> bool {
    // The answer would go the other way.
    let from = (&tcp.destination, tcp.destination_port);
    let to = (&tcp.source, tcp.source_port);
    with_socket(ctx, nsid, tcp.v4, from, to, |sk| {
        // SAFETY: the socket is held for the call.
        unsafe { (*sk).state == BPF_TCP_SYN_SENT }
    })
}

/// Asks something of the socket in a namespace that would receive a packet with these ends; false if there is none.
#[inline(always)]
fn with_socket(
    ctx: &TcContext,
    netns: u64,
    v4: bool,
    from: (&Addr, u16),
    to: (&Addr, u16),
    f: impl FnOnce(*mut bpf_sock) -> bool,
) -> bool {
    let ((source, source_port), (destination, destination_port)) = (from, to);
    let (sport, dport) = (source_port.to_be(), destination_port.to_be());
    let mut tuple = core::mem::MaybeUninit::<bpf_sock_tuple>::zeroed();
    // SAFETY: an all-zero tuple is valid, the lengths are those of its two variants (constants, as the verifier asks), and a
    // socket that is found is released once and not used after.
    unsafe {
        let tuple = tuple.as_mut_ptr();
        let sk = if v4 {
            (*tuple).__bindgen_anon_1.ipv4 = bpf_sock_tuple__bindgen_ty_1__bindgen_ty_1 {
                saddr: source.0[3],
                daddr: destination.0[3],
                sport,
                dport,
            };
            let length = size_of::<bpf_sock_tuple__bindgen_ty_1__bindgen_ty_1>() as u32;
            bpf_skc_lookup_tcp(ctx.as_ptr(), tuple, length, netns, 0)
        } else {
            (*tuple).__bindgen_anon_1.ipv6 = bpf_sock_tuple__bindgen_ty_1__bindgen_ty_2 {
                saddr: source.0,
                daddr: destination.0,
                sport,
                dport,
            };
            let length = size_of::<bpf_sock_tuple__bindgen_ty_1__bindgen_ty_2>() as u32;
            bpf_skc_lookup_tcp(ctx.as_ptr(), tuple, length, netns, 0)
        };
        if sk.is_null() {
            return false;
        }
        let answer = f(sk);
        bpf_sk_release(sk.cast());
        answer
    }
}

/// Answers a SYN with a reset in the name of its destination: the caller sees "connection refused" at once. The packet itself is
/// rewritten and received by the interface it was leaving from, or sent back by the one it came from.
///
/// The kernel can't do it: it sends no reset from an address that is not its own.
#[inline(always)]
pub(crate) fn refuse(ctx: &TcContext) -> i32 {
    let skb = Skb(ctx);
    let Parsed::Tcp(tcp) = packet::parse(&skb) else {
        return DROP;
    };
    let Some(macs) = skb.load::<12>(0) else {
        return DROP;
    };
    let Some(ports_seq_ack) = skb.load::<14>(tcp.l4_offset) else {
        return DROP;
    };
    let m = macs;
    let swapped_macs = [
        m[6], m[7], m[8], m[9], m[10], m[11], m[0], m[1], m[2], m[3], m[4], m[5],
    ];
    let addresses_written = if tcp.v4 {
        // Swapping leaves both checksums as they are.
        store(ctx, ETH_HLEN + 12, &tcp.destination.0[3].to_ne_bytes())
            && store(ctx, ETH_HLEN + 16, &tcp.source.0[3].to_ne_bytes())
    } else {
        store(ctx, ETH_HLEN + 8, &tcp.destination.0) && store(ctx, ETH_HLEN + 24, &tcp.source.0)
    };
    let h = ports_seq_ack;
    let swapped_ports = [h[2], h[3], h[0], h[1]];
    let old_seq = [h[4], h[5], h[6], h[7]];
    let old_ack = [h[8], h[9], h[10], h[11]];
    // RFC 9293, 3.10.7.3: a reset of a SYN is acceptable if it acknowledges it; its own sequence number is then 0.
    let new_ack = u32::from_be_bytes(old_seq).wrapping_add(1).to_be_bytes();
    let old_flags = [h[12], h[13]];
    let new_flags = [h[12], TCP_RST | TCP_ACK];
    let l4 = tcp.l4_offset;
    let written = addresses_written
        && store(ctx, 0, &swapped_macs)
        && store(ctx, l4, &swapped_ports)
        && replace(ctx, l4, 4, old_seq, [0; 4])
        && replace(ctx, l4, 8, old_ack, new_ack)
        && replace(ctx, l4, 12, old_flags, new_flags);
    if !written {
        return DROP;
    }
    // SAFETY: a valid context, whose `mark` may be written; no precondition.
    unsafe {
        let skb = ctx.skb.skb;
        let arriving = (*skb).ingress_ifindex == (*skb).ifindex;
        // What is sent back passes egress, which would give a reset without a socket to the proxy's dial that has its ends.
        mark(ctx, MARK_PROXY);
        bpf_redirect(
            (*skb).ifindex,
            if arriving { 0 } else { u64::from(BPF_F_INGRESS) },
        ) as i32
    }
}

/// Overwrites bytes of the TCP header and keeps its checksum true.
#[inline(always)]
fn replace<const N: usize>(ctx: &TcContext, l4: u32, offset: u32, old: [u8; N], new: [u8; N]) -> bool {
    /// Offset of the checksum in a TCP header.
    const CHECKSUM: u32 = 16;
    let (from, to) = match N {
        4 => (
            u64::from(u32::from_ne_bytes([old[0], old[1], old[2], old[3]])),
            u64::from(u32::from_ne_bytes([new[0], new[1], new[2], new[3]])),
        ),
        _ => (
            u64::from(u16::from_ne_bytes([old[0], old[1]])),
            u64::from(u16::from_ne_bytes([new[0], new[1]])),
        ),
    };
    store(ctx, l4 + offset, &new)
        && ctx
            .l4_csum_replace((l4 + CHECKSUM) as usize, from, to, N as u64)
            .is_ok()
}

#[inline(always)]
fn store<T>(ctx: &TcContext, offset: u32, bytes: &T) -> bool {
    // SAFETY: `bytes` is plain data of its own size.
    unsafe {
        bpf_skb_store_bytes(
            ctx.as_ptr().cast(),
            offset,
            (&raw const *bytes).cast(),
            size_of::<T>() as u32,
            0,
        ) == 0
    }
}
