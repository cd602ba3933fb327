//! The maps and the three entry points: load, verdict, act.

use aya_ebpf::{
    EbpfContext as _,
    bindings::{bpf_sk_lookup, sk_action::SK_PASS},
    btf_maps::{Array, HashMap, SockMap},
    macros::{btf_map, classifier, sk_lookup},
    programs::{SkLookupContext, TcContext},
};
use aya_log_ebpf::debug;
use redirector_common::{
    consts::{MARK_MASK, MARK_PROXY},
    maps::{FLAG_OBSERVE, FLAG_TRACE, LISTENER_COUNT, MAX_ADDRESSES, PodEntry, Tag},
    net::Addr,
    packet::{self, Parsed, TcpMeta},
    verdict::{self, Addresses, Choice, Counter, Egress, Ingress, Lookup, Sender},
};

use crate::{
    packet::Skb,
    stats::count,
    steer::{self, NEXT},
    tags,
};

#[btf_map]
pub(crate) static POD: Array<PodEntry, 1> = Array::new();

#[btf_map]
pub(crate) static LISTENERS: SockMap<{ LISTENER_COUNT as usize }> = SockMap::new();

#[btf_map]
static ADDRESSES: HashMap<Addr, u32, MAX_ADDRESSES> = HashMap::new();

/// The pod's addresses, by the map `ADDRESSES`.
struct PodAddresses;

impl Addresses for PodAddresses {
    #[inline(always)]
    fn owns(&self, address: &Addr) -> bool {
        ADDRESSES.get_ptr(address).is_some()
    }
}

/// What the pod's interface sends.
#[classifier]
pub fn redir_egress(ctx: TcContext) -> i32 {
    let Some(pod) = POD.get(0) else {
        return NEXT;
    };
    let sender = tags::sender(&ctx);
    let verdict = match verdict::egress_by_tag(tags::tag(sender)) {
        Some(verdict) => verdict,
        None => untagged(&ctx, sender, pod),
    };
    act_on_egress(&ctx, sender, pod, verdict)
}

#[inline(always)]
fn untagged(ctx: &TcContext, sender: tags::SenderSocket, pod: &PodEntry) -> Egress {
    let skb = Skb(ctx);
    let parsed = packet::parse(&skb);
    let who = Sender {
        has_socket: !sender.is_null(),
        has_proxy_mark: skb.mark() & MARK_MASK == MARK_PROXY.0,
    };
    let verdict = verdict::egress(&parsed, who, pod, &PodAddresses);
    // By reference, and no tuple of options anywhere: a kernel before 5.10.222 or 6.1.100 refuses to read the padding and the unset
    // halves that such moves copy.
    match (verdict, &parsed) {
        (Egress::AskSocketTable, Parsed::Tcp(tcp)) => {
            verdict::egress_by_socket_table(steer::far_end_is_here(ctx, tcp))
        }
        (Egress::Capture, Parsed::Tcp(tcp)) => {
            if pod.has(FLAG_TRACE) {
                trace_capture(ctx, tcp);
            }
            verdict
        }
        _ => verdict,
    }
}

/// Out of line: formatting takes more instructions than all else.
#[inline(never)]
fn trace_capture(ctx: &TcContext, tcp: &TcpMeta) {
    let (source_port, destination_port) = (tcp.source_port, tcp.destination_port);
    if tcp.v4 {
        let (source, destination) = (u32::from_be(tcp.source.0[3]), u32::from_be(tcp.destination.0[3]));
        debug!(
            ctx,
            "captured {:i}:{} to {:i}:{}", source, source_port, destination, destination_port
        );
    } else {
        let (source, destination) = (tcp.source.to_bytes(), tcp.destination.to_bytes());
        debug!(
            ctx,
            "captured [{:i}]:{} to [{:i}]:{}", source, source_port, destination, destination_port
        );
    }
}

#[inline(always)]
fn act_on_egress(ctx: &TcContext, sender: tags::SenderSocket, pod: &PodEntry, verdict: Egress) -> i32 {
    let observe = pod.has(FLAG_OBSERVE);
    match verdict {
        Egress::Pass(counter) => {
            count(counter);
            NEXT
        }
        Egress::Drop(counter) => {
            count(counter);
            if observe { NEXT } else { steer::DROP }
        }
        Egress::TurnBack(counter) => {
            count(counter);
            if observe { NEXT } else { steer::turn_back(ctx) }
        }
        Egress::Capture if observe => {
            count(Counter::EgressCaptured);
            NEXT
        }
        Egress::Capture => {
            // Fail closed, and fast: without the proxy the connection is refused, not lost, and never let out; nor is one whose
            // later packets could not be told (the socket's option memory is full).
            if !steer::outbound_listener_exists() || !tags::set(sender, Tag::Captured) {
                count(Counter::EgressRefused);
                return steer::refuse(ctx);
            }
            count(Counter::EgressCaptured);
            steer::turn_back(ctx)
        }
        Egress::Refuse(counter) => {
            count(counter);
            if observe { NEXT } else { steer::refuse(ctx) }
        }
        // `untagged` has answered it; a packet that is no TCP has no such verdict.
        Egress::AskSocketTable => NEXT,
    }
}

/// What arrives at the pod's interface.
#[classifier]
pub fn redir_ingress(ctx: TcContext) -> i32 {
    let Some(pod) = POD.get(0) else {
        return NEXT;
    };
    let skb = Skb(&ctx);
    let parsed = packet::parse(&skb);
    let observe = pod.has(FLAG_OBSERVE);
    // By reference, as in `untagged`.
    let verdict = match (verdict::ingress(&parsed, pod, &PodAddresses), &parsed) {
        (Ingress::AskSocketTable, Parsed::Tcp(tcp)) => {
            verdict::ingress_by_socket_table(steer::dialled_just_now(&ctx, tcp), pod)
        }
        (verdict, _) => verdict,
    };
    match verdict {
        Ingress::Pass(counter) => {
            count(counter);
            NEXT
        }
        Ingress::Drop(counter) => {
            count(counter);
            if observe { NEXT } else { steer::DROP }
        }
        Ingress::Refuse(counter) => {
            count(counter);
            if observe { NEXT } else { steer::refuse(&ctx) }
        }
        // `ingress_by_socket_table` has answered it.
        Ingress::AskSocketTable => NEXT,
        Ingress::AssignInbound if observe => {
            count(Counter::IngressAssigned);
            NEXT
        }
        Ingress::AssignInbound => {
            if steer::assign_inbound(&ctx) {
                count(Counter::IngressAssigned);
                NEXT
            } else {
                count(Counter::IngressRefused);
                steer::refuse(&ctx)
            }
        }
    }
}

/// A new connection that looks for its listener in the pod's namespace. For kernels that tell the device, 5.17 on.
#[sk_lookup]
pub fn redir_lookup(ctx: SkLookupContext) -> u32 {
    lookup::<true>(&ctx)
}

/// The same for older kernels, whose verifier refuses a program that reads the device.
#[sk_lookup]
pub fn redir_lookup_old(ctx: SkLookupContext) -> u32 {
    lookup::<false>(&ctx)
}

#[inline(always)]
fn lookup<const HAS_IFINDEX: bool>(ctx: &SkLookupContext) -> u32 {
    let Some(pod) = POD.get(0) else {
        return SK_PASS;
    };
    let Some(connection) = connection::<HAS_IFINDEX>(ctx.as_ptr().cast()) else {
        return SK_PASS;
    };
    match verdict::lookup(&connection, pod, &PodAddresses) {
        Choice::Pass(counter) => {
            count(counter);
            SK_PASS
        }
        Choice::Assign(_, counter) if pod.has(FLAG_OBSERVE) => {
            count(counter);
            SK_PASS
        }
        Choice::Assign(listener, counter) => steer::assign(ctx, listener, counter),
    }
}

/// Reads the program's context. Only TCP: the same ports of UDP are not ours.
#[inline(always)]
fn connection<const HAS_IFINDEX: bool>(ctx: *const bpf_sk_lookup) -> Option<Lookup> {
    const IPPROTO_TCP: u32 = 6;
    const AF_INET: u32 = 2;
    const LOOPBACK_IFINDEX: u32 = 1;
    macro_rules! field {
        ($field:ident $([$index:literal])?) => {
            (&raw const (*ctx).$field$([$index])?).read_volatile()
        };
    }
    // SAFETY: the kernel passes a valid context; each field is read at its declared width, as the verifier asks. The addresses
    // of both families are read before the family is looked at, since the compiler merges reads in two branches into one with
    // a computed context offset, which the verifier refuses; those of the other family read as zero.
    unsafe {
        let (local_v4, remote_v4) = (field!(local_ip4), field!(remote_ip4));
        let local_v6 = [
            field!(local_ip6[0]),
            field!(local_ip6[1]),
            field!(local_ip6[2]),
            field!(local_ip6[3]),
        ];
        let remote_v6 = [
            field!(remote_ip6[0]),
            field!(remote_ip6[1]),
            field!(remote_ip6[2]),
            field!(remote_ip6[3]),
        ];
        if field!(protocol) != IPPROTO_TCP {
            return None;
        }
        let (local, remote) = if field!(family) == AF_INET {
            (Addr::from_v4_be(local_v4), Addr::from_v4_be(remote_v4))
        } else {
            (Addr(local_v6), Addr(remote_v6))
        };
        Some(Lookup {
            local,
            remote,
            local_port: field!(local_port) as u16,
            remote_port: u16::from_be(field!(remote_port)),
            by_lo: HAS_IFINDEX && field!(ingress_ifindex) == LOOPBACK_IFINDEX,
        })
    }
}
