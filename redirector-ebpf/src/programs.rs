//! A pod's own programs, loaded anew for each pod and therefore small: load, verdict, act. What the TC programs cannot tell from the
//! socket's tag alone they hand on to `deciders`.

use aya_ebpf::{
    EbpfContext as _,
    bindings::{bpf_sk_lookup, sk_action::SK_PASS},
    macros::{classifier, sk_lookup},
    programs::{SkLookupContext, TcContext},
};
use redirector_common::{
    maps::{Decider, FLAG_DNS_CAPTURE, FLAG_OBSERVE},
    net::Addr,
    verdict::{self, Choice, Counter, Egress, Lookup},
};

use crate::{
    packet::Skb,
    pod::{DECIDERS, Pod},
    stats::count,
    steer::{self, DROP, NEXT},
    tags,
};

/// What the pod's interface sends.
#[classifier]
pub fn redir_egress(ctx: TcContext) -> i32 {
    let Some(pod) = Pod::own() else {
        return DROP;
    };
    match verdict::egress_by_tag(tags::tag(tags::sender(&ctx))) {
        Some(Egress::TurnBack(counter)) => {
            count(pod.slot, counter);
            if pod.entry.has(FLAG_OBSERVE) {
                NEXT
            } else {
                steer::turn_back(&ctx)
            }
        }
        Some(Egress::Pass(counter)) => {
            count(pod.slot, counter);
            NEXT
        }
        _ => hand_on(&ctx, pod, Decider::Egress),
    }
}

/// What arrives at the pod's interface; where its proxy is another process, also at its lo.
#[classifier]
pub fn redir_ingress(ctx: TcContext) -> i32 {
    let Some(pod) = Pod::own() else {
        return DROP;
    };
    // What arrives from behind the pod may be a later packet that is to be delivered here.
    let skb = Skb(&ctx);
    if !pod.entry.reroutes(skb.interface()) && skb.is_plain_later() {
        count(pod.slot, Counter::IngressOther);
        return NEXT;
    }
    hand_on(&ctx, pod, Decider::Ingress)
}

#[inline(always)]
fn hand_on(ctx: &TcContext, pod: Pod, decider: Decider) -> i32 {
    pod.leave_with(ctx);
    // SAFETY: nothing on this program's stack has a destructor. If the call fails, this program goes on.
    unsafe { DECIDERS.tail_call(ctx, decider as u32) };
    // Nobody can decide: nothing passes unseen.
    DROP
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
    let Some(pod) = Pod::own() else {
        return SK_PASS;
    };
    let ctx_fields: *const bpf_sk_lookup = ctx.as_ptr().cast();
    // SAFETY: the kernel passes a valid context; the field is read at its declared width.
    let protocol = unsafe { (&raw const (*ctx_fields).protocol).read_volatile() };
    let udp = protocol == IPPROTO_UDP;
    // Nearly all datagrams are nobody's affair.
    if udp && !pod.entry.has(FLAG_DNS_CAPTURE) || !udp && protocol != IPPROTO_TCP {
        return SK_PASS;
    }
    let connection = connection::<HAS_IFINDEX>(ctx_fields, pod);
    let choice = if udp {
        verdict::lookup_udp(&connection, pod.entry, &pod)
    } else {
        verdict::lookup(&connection, pod.entry, &pod)
    };
    match choice {
        Choice::Pass(counter) => {
            count(pod.slot, counter);
            SK_PASS
        }
        Choice::Assign(_, counter) if pod.entry.has(FLAG_OBSERVE) => {
            count(pod.slot, counter);
            SK_PASS
        }
        Choice::Assign(listener, counter) => steer::assign(ctx, pod, listener, counter),
    }
}

const IPPROTO_TCP: u32 = 6;
const IPPROTO_UDP: u32 = 17;

/// Reads the program's context.
#[inline(always)]
fn connection<const HAS_IFINDEX: bool>(ctx: *const bpf_sk_lookup, pod: Pod) -> Lookup {
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
        // AF_INET is 2 and AF_INET6 is 10. Without a branch, since the verifier follows both of one to the program's end.
        let mapped = ((field!(family) >> 3 & 1) ^ 1) * 0xffff_u32.to_be();
        let address = |v4: u32, [a, b, c, d]: [u32; 4]| Addr([a, b, c | mapped, d | v4]);
        let (local, remote) = (address(local_v4, local_v6), address(remote_v4, remote_v6));
        let device = if HAS_IFINDEX { field!(ingress_ifindex) } else { 0 };
        Lookup {
            local,
            remote,
            local_port: field!(local_port) as u16,
            remote_port: u16::from_be(field!(remote_port)),
            by_lo: device == LOOPBACK_IFINDEX,
            rerouted: pod.entry.reroutes(device),
        }
    }
}
