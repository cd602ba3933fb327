//! The three programs and their maps.

use aya_ebpf::{
    bindings::bpf_redir_neigh,
    btf_maps::{HashMap, PerCpuArray},
    helpers::{bpf_redirect_neigh, bpf_redirect_peer},
    macros::{btf_map, classifier},
    programs::TcContext,
};

/// TC_ACT_UNSPEC and TCX_NEXT: the next program decides.
const NEXT: i32 = -1;

const ETH_P_IP: u16 = 0x0800;
const ETH_P_IPV6: u16 = 0x86dd;
const ETHERNET_LENGTH: usize = 14;
const PROTOCOL_TCP: u8 = 6;
const AF_INET: u32 = 2;
const AF_INET6: u32 = 10;

/// Packets that a program has acted on.
#[btf_map]
static FOREIGN_COUNT: PerCpuArray<u64, 1> = PerCpuArray::new();

/// Interfaces of the node by the address of the pod behind them; IPv4 as ::ffff:a.b.c.d.
#[btf_map]
static FOREIGN_PODS: HashMap<[u8; 16], u32, 16> = HashMap::new();

fn count() {
    if let Some(count) = FOREIGN_COUNT.get_ptr_mut(0) {
        // SAFETY: the value is this CPU's own, and no program of ours interrupts another on it.
        unsafe { *count += 1 };
    }
}

#[classifier]
pub fn foreign_count(_: TcContext) -> i32 {
    count();
    NEXT
}

/// On the node's end of a veth, ingress: TCP goes straight to the far end of its destination's veth.
#[classifier]
pub fn foreign_peer(ctx: TcContext) -> i32 {
    let Some((_, interface)) = destination(&ctx) else {
        return NEXT;
    };
    // Before 6.x the packet keeps the type that this interface gave it: to another host.
    const PACKET_HOST: u32 = 0;
    let _ = ctx.skb.change_type(PACKET_HOST);
    count();
    // SAFETY: takes two numbers, whatever they are.
    unsafe { bpf_redirect_peer(interface, 0) as i32 }
}

/// The same by way of the node's end of its destination's veth, with the neighbour that this has.
#[classifier]
pub fn foreign_neigh(ctx: TcContext) -> i32 {
    let Some((address, interface)) = destination(&ctx) else {
        return NEXT;
    };
    // SAFETY: plain integers, for which zero is a value.
    let mut next: bpf_redir_neigh = unsafe { core::mem::zeroed() };
    if address[..12] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff] {
        next.nh_family = AF_INET;
        next.__bindgen_anon_1.ipv4_nh =
            u32::from_ne_bytes([address[12], address[13], address[14], address[15]]);
    } else {
        next.nh_family = AF_INET6;
        let word =
            |at: usize| u32::from_ne_bytes([address[at], address[at + 1], address[at + 2], address[at + 3]]);
        next.__bindgen_anon_1.ipv6_nh = [word(0), word(4), word(8), word(12)];
    }
    count();
    // SAFETY: `next` is of the length that is told, and outlives the call.
    unsafe { bpf_redirect_neigh(interface, &mut next, size_of::<bpf_redir_neigh>() as i32, 0) as i32 }
}

/// Where a TCP packet goes, and the interface of the pod that has this address.
#[inline(always)]
fn destination(ctx: &TcContext) -> Option<([u8; 16], u32)> {
    let ether_type = u16::from_be(ctx.load(12).ok()?);
    let mut address = [0; 16];
    match ether_type {
        ETH_P_IP => {
            let protocol: u8 = ctx.load(ETHERNET_LENGTH + 9).ok()?;
            if protocol != PROTOCOL_TCP {
                return None;
            }
            let v4: [u8; 4] = ctx.load(ETHERNET_LENGTH + 16).ok()?;
            address[10] = 0xff;
            address[11] = 0xff;
            address[12..].copy_from_slice(&v4);
        }
        ETH_P_IPV6 => {
            let protocol: u8 = ctx.load(ETHERNET_LENGTH + 6).ok()?;
            if protocol != PROTOCOL_TCP {
                return None;
            }
            address = ctx.load(ETHERNET_LENGTH + 24).ok()?;
        }
        _ => return None,
    }
    // SAFETY: the value is copied at once, and the kit writes the map only before the program is attached.
    let interface = unsafe { FOREIGN_PODS.get(&address) }.copied()?;
    Some((address, interface))
}
