//! The programs that decide: loaded once for all pods, and reached by tail call from each pod's own. A parser of headers takes the
//! verifier tens of milliseconds, which no pod should wait for.

use aya_ebpf::{macros::classifier, programs::TcContext};
use aya_log_ebpf::debug;
use redirector_common::{
    consts::{MARK_MASK, MARK_PROXY, MARK_REROUTED},
    maps::{FLAG_OBSERVE, FLAG_ONE_MARK, Listener, Tag},
    packet::{self, Parsed, TcpMeta},
    verdict::{self, Counter, Egress, Ingress, Sender},
};

use crate::{
    others,
    packet::Skb,
    pod::Pod,
    probes,
    stats::count,
    steer::{self, DROP, LOOPBACK_IFINDEX, NEXT},
    tags,
};

/// A packet that a pod sends, and whose socket has no tag.
#[classifier]
pub fn redir_out_decide(ctx: TcContext) -> i32 {
    let Some(pod) = Pod::of(&ctx) else {
        return DROP;
    };
    let sender = tags::sender(&ctx);
    let verdict = untagged(&ctx, sender, pod);
    act_on_egress(&ctx, sender, pod, verdict)
}

#[inline(always)]
fn untagged(ctx: &TcContext, sender: tags::SenderSocket, pod: Pod) -> Egress {
    let skb = Skb(ctx);
    let parsed = packet::parse(&skb);
    let mark = skb.mark() & MARK_MASK;
    let one_mark = pod.entry.has(FLAG_ONE_MARK);
    let has_proxy_mark = mark == MARK_PROXY.0;
    let who = Sender {
        has_socket: !sender.is_null(),
        has_proxy_mark,
        is_other_proxy: one_mark && has_proxy_mark && others::is_proxy(ctx),
        // Answers to somebody behind the pod have this mark too, and are sent from here.
        is_undelivered: mark == MARK_REROUTED.0 && skb.has_arrived(),
    };
    let verdict = verdict::egress(&parsed, who, pod.entry, &pod);
    // By reference, and no tuple of options anywhere: a kernel before 5.10.222 or 6.1.100 refuses to read the padding and the unset
    // halves that such moves copy.
    match (verdict, &parsed) {
        (Egress::AskSocketTable, Parsed::Tcp(tcp)) => {
            let here = steer::far_end_is_here(ctx, tcp);
            if here && one_mark {
                // The application's answer to the proxy's dial. It goes back from now on even if the proxy is gone and nothing is left
                // of its socket; where it can't be tagged, it is looked up each time.
                let _ = tags::set(sender, Tag::Captured);
            }
            verdict::egress_by_socket_table(here)
        }
        (Egress::Capture(_), Parsed::Tcp(tcp)) => {
            if pod.is_traced() {
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
fn act_on_egress(ctx: &TcContext, sender: tags::SenderSocket, pod: Pod, verdict: Egress) -> i32 {
    let observe = pod.entry.has(FLAG_OBSERVE);
    match verdict {
        Egress::Pass(counter) => {
            count(pod.slot, counter);
            NEXT
        }
        Egress::Drop(counter) => {
            count(pod.slot, counter);
            if observe { NEXT } else { DROP }
        }
        Egress::TurnBack(counter) => {
            count(pod.slot, counter);
            if observe { NEXT } else { steer::turn_back(ctx) }
        }
        Egress::Own => {
            // Untagged, its later packets are looked up in the socket table, to the same end.
            let _ = tags::set(sender, Tag::Proxy);
            count(pod.slot, Counter::EgressProxy);
            NEXT
        }
        Egress::Capture(_) if observe => {
            count(pod.slot, Counter::EgressCaptured);
            NEXT
        }
        // Without a listener it is dropped, and the kernel tells so at once to a sender that wants to know (IP_RECVERR, as
        // resolvers have it): ENOBUFS.
        Egress::CaptureDns(listener) => {
            if !steer::listener_exists(pod, listener) {
                count(pod.slot, Counter::EgressDnsRefused);
                return DROP;
            }
            count(pod.slot, Counter::EgressDns);
            steer::turn_back(ctx)
        }
        Egress::Capture(listener) => {
            // Fail closed, and fast: without the proxy the connection is refused, not lost, and never let out; nor is one whose
            // later packets could not be told (the socket's option memory is full).
            if !steer::listener_exists(pod, listener) || !tags::set(sender, Tag::Captured) {
                count(pod.slot, Counter::EgressRefused);
                return steer::refuse(ctx);
            }
            count(pod.slot, Counter::EgressCaptured);
            steer::turn_back(ctx)
        }
        Egress::Refuse(counter) => {
            count(pod.slot, counter);
            if observe { NEXT } else { steer::refuse(ctx) }
        }
        // `untagged` has answered it; a packet that is no TCP has no such verdict.
        Egress::AskSocketTable => NEXT,
    }
}

/// What arrives, by the interface that it arrives by.
#[inline(always)]
fn arriving(skb: &Skb<'_>, parsed: &Parsed, pod: Pod) -> Ingress {
    if let Parsed::Tcp(tcp) = parsed
        && pod.entry.reroutes(skb.interface())
        && skb.is_for_this_host()
        && let Some(verdict) = verdict::reroute(tcp, pod.entry, &pod)
    {
        return verdict;
    }
    verdict::ingress(parsed, pod.entry, &pod)
}

/// A packet that arrives at a pod.
#[classifier]
pub fn redir_in_decide(ctx: TcContext) -> i32 {
    let Some(pod) = Pod::of(&ctx) else {
        return DROP;
    };
    let skb = Skb(&ctx);
    let parsed = packet::parse(&skb);
    let observe = pod.entry.has(FLAG_OBSERVE);
    // By reference, as in `untagged`.
    let mut verdict = if pod.entry.has(FLAG_ONE_MARK) && skb.interface() == LOOPBACK_IFINDEX {
        let has_proxy_mark = skb.mark() & MARK_MASK == MARK_PROXY.0;
        verdict::ingress_of_lo(&parsed, has_proxy_mark, pod.entry, &pod)
    } else {
        arriving(&skb, &parsed, pod)
    };
    if let (Ingress::AskFarEnd, Parsed::Tcp(tcp)) = (verdict, &parsed) {
        verdict = if steer::far_end_is_here(&ctx, tcp) {
            steer::mark(&ctx, MARK_REROUTED);
            Ingress::Pass(Counter::IngressReroutedLater)
        } else {
            Ingress::Pass(Counter::IngressOther)
        };
    }
    if let (Ingress::AskSocketTable, Parsed::Tcp(tcp)) = (verdict, &parsed) {
        let dialled = steer::dialled_just_now(&ctx, tcp);
        verdict = verdict::ingress_by_socket_table(dialled, tcp.source_port, pod.entry);
    }
    if let (Ingress::AskOrigin, Parsed::Tcp(tcp)) = (verdict, &parsed) {
        let probe = probes::settle(&ctx, tcp, pod);
        verdict = verdict::ingress_by_origin(probe, tcp.source_port, pod.entry);
    }
    match verdict {
        Ingress::Probe => {
            count(pod.slot, Counter::IngressProbe);
            NEXT
        }
        Ingress::Dialled => {
            if let Parsed::Tcp(tcp) = &parsed {
                probes::hint(tcp, pod);
            }
            count(pod.slot, Counter::IngressDialled);
            NEXT
        }
        Ingress::Pass(counter) => {
            count(pod.slot, counter);
            NEXT
        }
        Ingress::Drop(counter) => {
            count(pod.slot, counter);
            if observe { NEXT } else { DROP }
        }
        Ingress::Refuse(counter) => {
            count(pod.slot, counter);
            if observe { NEXT } else { steer::refuse(&ctx) }
        }
        Ingress::Reroute => {
            if steer::listener_exists(pod, Listener::Outbound) {
                count(pod.slot, Counter::IngressRerouted);
                steer::mark(&ctx, MARK_REROUTED);
                NEXT
            } else {
                count(pod.slot, Counter::IngressRefused);
                steer::refuse(&ctx)
            }
        }
        // They have been answered above.
        Ingress::AskSocketTable | Ingress::AskOrigin | Ingress::AskFarEnd => NEXT,
        Ingress::AssignInbound if observe => {
            count(pod.slot, Counter::IngressAssigned);
            NEXT
        }
        Ingress::AssignInbound => {
            if steer::assign_inbound(&ctx, pod) {
                count(pod.slot, Counter::IngressAssigned);
                NEXT
            } else {
                count(pod.slot, Counter::IngressRefused);
                steer::refuse(&ctx)
            }
        }
    }
}
