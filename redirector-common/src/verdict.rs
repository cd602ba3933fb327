//! What becomes of a packet or of a new connection. Pure and total; the programs load, ask here, and act.

use crate::{
    consts::{DIAL_PORT_FIRST, DIAL_PORT_LAST, PORT_DNS, PORT_HBONE},
    maps::{
        FLAG_BYPASS_INBOUND, FLAG_DNS_CAPTURE, FLAG_LOOKUP_HAS_IFINDEX, FLAG_ONE_MARK, FLAG_RELEASING,
        Listener, PodEntry, Tag,
    },
    net::Addr,
    packet::{Parsed, TcpMeta, UdpMeta},
    rules::{self, Direction, Rules},
};

/// Every way in which a program ends; one packet counter each. The order is that of the map, so new ones go last.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Counter {
    /// Egress: a new connection captured: its SYN turned back to 15001.
    EgressCaptured = 0,
    /// Egress: a later packet of a captured connection turned back.
    EgressTurnedBack = 1,
    /// Egress: the proxy's own connection.
    EgressProxy = 2,
    /// Egress: a connection that was open before enrolment, or a stray packet.
    EgressUncaptured = 3,
    /// Egress: neither TCP nor captured DNS.
    EgressOther = 4,
    /// Egress: a SYN answered with RST: the proxy is away, its socket can't be tagged, or it goes to a link-local address.
    EgressRefused = 5,
    /// Egress: dropped, being unreadable.
    EgressMalformed = 6,
    /// Ingress: not a new TCP connection.
    IngressOther = 7,
    /// Ingress: a new connection left to the socket lookup.
    IngressNew = 8,
    /// Ingress: a new connection from the reserved port range given to 15006 (kernels before 5.17).
    IngressAssigned = 9,
    /// Ingress: dropped, claiming to come from the pod itself.
    IngressSpoofed = 10,
    /// Ingress: dropped, being unreadable.
    IngressMalformed = 11,
    /// Lookup: a captured outbound connection given to 15001.
    LookupOutbound = 12,
    /// Lookup: an inbound connection given to 15006.
    LookupInbound = 13,
    /// Lookup: an HBONE connection given to 15008.
    LookupHbone = 14,
    /// Lookup: the proxy's dial to the application.
    LookupProxy = 15,
    /// Lookup: the pod calling itself, or not TCP.
    LookupOther = 16,
    /// Lookup: refused with RST, since the proxy is away.
    LookupRefused = 17,
    /// Ingress: a new connection refused: the listener of the reserved range is away, or it goes to a link-local address.
    IngressRefused = 18,
    /// Ingress: a new connection refused because the proxy is dialling the application with the same two ends just now.
    IngressCollided = 19,
    /// Egress: a new connection that the pod's rules leave alone.
    EgressExcluded = 20,
    /// Lookup: an inbound connection that the pod's rules leave alone.
    LookupExcluded = 21,
    /// Ingress: a new connection that is a probe of the node's.
    IngressProbe = 22,
    /// Lookup: a probe of the node's.
    LookupProbe = 23,
    /// Egress: a DNS query by UDP turned back to 15053.
    EgressDns = 24,
    /// Egress: a DNS query by UDP dropped, since nobody is at 15053.
    EgressDnsRefused = 25,
    /// Lookup: DNS by UDP or TCP given to 15053.
    LookupDns = 26,
    /// Ingress: a new connection from behind the pod, delivered to 15001.
    IngressRerouted = 27,
    /// Ingress: a later packet of such a connection.
    IngressReroutedLater = 28,
    /// Egress: a packet of such a connection that was forwarded all the same, for want of the rule that delivers it: a SYN is
    /// answered with RST, what comes later is dropped.
    EgressUndelivered = 29,
    /// Ingress of lo: another process's dial, as the pod's proxy, to the application.
    IngressDialled = 30,
}

/// The three programs, as a counter's label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Program {
    /// TC egress of the pod's interface.
    Egress,
    /// TC ingress of the pod's interface.
    Ingress,
    /// SK_LOOKUP of the pod's namespace.
    Lookup,
}

impl Program {
    /// As a label.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Egress => "egress",
            Self::Ingress => "ingress",
            Self::Lookup => "lookup",
        }
    }
}

impl Counter {
    /// All counters, in the order of the map.
    pub const ALL: [Self; 31] = [
        Self::EgressCaptured,
        Self::EgressTurnedBack,
        Self::EgressProxy,
        Self::EgressUncaptured,
        Self::EgressOther,
        Self::EgressRefused,
        Self::EgressMalformed,
        Self::IngressOther,
        Self::IngressNew,
        Self::IngressAssigned,
        Self::IngressSpoofed,
        Self::IngressMalformed,
        Self::LookupOutbound,
        Self::LookupInbound,
        Self::LookupHbone,
        Self::LookupProxy,
        Self::LookupOther,
        Self::LookupRefused,
        Self::IngressRefused,
        Self::IngressCollided,
        Self::EgressExcluded,
        Self::LookupExcluded,
        Self::IngressProbe,
        Self::LookupProbe,
        Self::EgressDns,
        Self::EgressDnsRefused,
        Self::LookupDns,
        Self::IngressRerouted,
        Self::IngressReroutedLater,
        Self::EgressUndelivered,
        Self::IngressDialled,
    ];

    /// Which program counts it, and under what name.
    pub const fn label(self) -> (Program, &'static str) {
        match self {
            Self::EgressCaptured => (Program::Egress, "captured"),
            Self::EgressTurnedBack => (Program::Egress, "turned_back"),
            Self::EgressProxy => (Program::Egress, "proxy"),
            Self::EgressUncaptured => (Program::Egress, "uncaptured"),
            Self::EgressOther => (Program::Egress, "other"),
            Self::EgressRefused => (Program::Egress, "refused"),
            Self::EgressMalformed => (Program::Egress, "malformed"),
            Self::IngressOther => (Program::Ingress, "other"),
            Self::IngressNew => (Program::Ingress, "new"),
            Self::IngressAssigned => (Program::Ingress, "assigned"),
            Self::IngressSpoofed => (Program::Ingress, "spoofed"),
            Self::IngressMalformed => (Program::Ingress, "malformed"),
            Self::IngressRefused => (Program::Ingress, "refused"),
            Self::IngressCollided => (Program::Ingress, "collided"),
            Self::LookupOutbound => (Program::Lookup, "outbound"),
            Self::LookupInbound => (Program::Lookup, "inbound"),
            Self::LookupHbone => (Program::Lookup, "hbone"),
            Self::LookupProxy => (Program::Lookup, "proxy"),
            Self::LookupOther => (Program::Lookup, "other"),
            Self::LookupRefused => (Program::Lookup, "refused"),
            Self::EgressExcluded => (Program::Egress, "excluded"),
            Self::LookupExcluded => (Program::Lookup, "excluded"),
            Self::IngressProbe => (Program::Ingress, "probe"),
            Self::LookupProbe => (Program::Lookup, "probe"),
            Self::EgressDns => (Program::Egress, "dns"),
            Self::EgressDnsRefused => (Program::Egress, "dns_refused"),
            Self::LookupDns => (Program::Lookup, "dns"),
            Self::IngressRerouted => (Program::Ingress, "rerouted"),
            Self::IngressReroutedLater => (Program::Ingress, "rerouted_later"),
            Self::EgressUndelivered => (Program::Egress, "undelivered"),
            Self::IngressDialled => (Program::Ingress, "dialled"),
        }
    }
}

/// Egress, first step: the sending socket's tag alone decides for nearly every packet, unread.
#[inline(always)]
pub const fn egress_by_tag(tag: Option<Tag>) -> Option<Egress> {
    match tag {
        Some(Tag::Proxy) => Some(Egress::Pass(Counter::EgressProxy)),
        Some(Tag::Captured) => Some(Egress::TurnBack(Counter::EgressTurnedBack)),
        None => None,
    }
}

/// What becomes of a packet that the pod sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Egress {
    /// It leaves.
    Pass(Counter),
    /// It is dropped.
    Drop(Counter),
    /// It goes back into the pod, to the proxy.
    TurnBack(Counter),
    /// A new connection: its socket is tagged and the packet turned back to this listener, or refused without it.
    Capture(Listener),
    /// A new connection of a proxy that another process is: its socket is tagged, and it leaves.
    Own,
    /// A DNS query by UDP: turned back to this listener, or dropped without it.
    CaptureDns(Listener),
    /// A new connection that can't be captured and must not leave: it is refused.
    Refuse(Counter),
    /// It goes back if the pod has a socket at its far end, since only a captured connection has one; else it leaves.
    AskSocketTable,
}

/// Who sent a packet on egress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sender {
    /// `skb->sk` is a full socket of this pod. It is none, or only a request or TIME_WAIT socket, for a reset, for an answer of
    /// the handshake, and for a forwarded packet.
    pub has_socket: bool,
    /// The packet has the proxy's mark. Applications with CAP_NET_ADMIN can set it too, so it never lets a SYN out.
    pub has_proxy_mark: bool,
    /// It has that mark, and was sent from the cgroup of a proxy that another process is. Only looked at with [`FLAG_ONE_MARK`].
    pub is_other_proxy: bool,
    /// It arrived from behind the pod and was marked for delivery here ([`Ingress::Reroute`], [`Ingress::AskFarEnd`]), and is on its way
    /// out all the same.
    pub is_undelivered: bool,
}

/// The addresses of the pod's interfaces: a map in the programs, a slice in tests.
pub trait Addresses {
    /// Whether `address` is one of them.
    fn owns(&self, address: &Addr) -> bool;
}

impl Addresses for [Addr] {
    fn owns(&self, address: &Addr) -> bool {
        self.contains(address)
    }
}

/// Egress, second step: a packet whose socket has no tag.
#[inline(always)]
pub fn egress<P: Addresses + Rules + ?Sized>(
    parsed: &Parsed,
    sender: Sender,
    pod: &PodEntry,
    known: &P,
) -> Egress {
    let tcp = match parsed {
        Parsed::Tcp(tcp) => tcp,
        Parsed::Udp(udp) => return egress_udp(udp, sender, pod, known),
        // A captured connection's fragments carry its socket, so its tag has decided before. Another's are its business.
        Parsed::Other | Parsed::Fragment => return Egress::Pass(Counter::EgressOther),
        Parsed::Malformed | Parsed::TooManyHeaders | Parsed::Tagged => {
            return Egress::Drop(Counter::EgressMalformed);
        }
    };
    // The policy rule that delivers it is missing. A connection that is open outlives that.
    if sender.is_undelivered {
        return if tcp.is_initial_syn() {
            Egress::Refuse(Counter::EgressUndelivered)
        } else {
            Egress::Drop(Counter::EgressUndelivered)
        };
    }
    if tcp.destination.is_loopback() {
        return Egress::Pass(Counter::EgressOther);
    }
    // No answer can come back, but a SYN may carry data (TCP Fast Open). IPv6 lets a socket bound to ::1 send it.
    if tcp.source.is_loopback() {
        return Egress::Drop(Counter::EgressMalformed);
    }
    if tcp.is_initial_syn() {
        if pod.has(FLAG_RELEASING) {
            return Egress::Pass(Counter::EgressUncaptured);
        }
        // With the mark alone it could be the proxy's all the same, of a cgroup that is not known yet: captured, it would be dialled
        // for ever.
        if pod.has(FLAG_ONE_MARK) && sender.has_proxy_mark {
            return if sender.is_other_proxy {
                Egress::Own
            } else {
                Egress::Refuse(Counter::EgressRefused)
            };
        }
        // DNS has a switch of its own, and the rules are about the rest.
        if dns_is_captured(tcp.destination_port, pod)
            && (sender.has_socket || known.owns(&tcp.source))
            && !tcp.destination.is_v6_link_local()
        {
            return Egress::Capture(Listener::dns_tcp(tcp.v4));
        }
        if rules::excluded(
            Direction::Outbound,
            tcp.destination_port,
            &tcp.destination,
            pod,
            known,
        ) {
            return Egress::Pass(Counter::EgressExcluded);
        }
        // The proxy could not say by which interface to go on.
        if tcp.destination.is_v6_link_local() {
            return Egress::Refuse(Counter::EgressRefused);
        }
        // Without a socket it is forwarded for somebody behind the pod, unless it uses the pod's own address.
        return if sender.has_socket || known.owns(&tcp.source) {
            Egress::Capture(Listener::Outbound)
        } else {
            Egress::Pass(Counter::EgressUncaptured)
        };
    }
    // Where all of the proxy's sockets have one mark, the application's have it too: those that were accepted from the proxy's dial
    // (`net.ipv4.tcp_fwmark_accept`), and resets of it (`fwmark_reflect`).
    if sender.has_proxy_mark && !pod.has(FLAG_ONE_MARK) {
        return Egress::Pass(Counter::EgressProxy);
    }
    Egress::AskSocketTable
}

/// Whether the pod's traffic to this port is DNS that goes to port 15053.
#[inline(always)]
const fn dns_is_captured(port: u16, pod: &PodEntry) -> bool {
    port == PORT_DNS && pod.has(FLAG_DNS_CAPTURE)
}

/// Egress of UDP: only DNS is ours, and only where the pod's is captured.
#[inline(always)]
fn egress_udp<P: Addresses + ?Sized>(udp: &UdpMeta, sender: Sender, pod: &PodEntry, known: &P) -> Egress {
    if !dns_is_captured(udp.destination_port, pod) || pod.has(FLAG_RELEASING) {
        return Egress::Pass(Counter::EgressOther);
    }
    if pod.has(FLAG_ONE_MARK) && sender.is_other_proxy {
        return Egress::Pass(Counter::EgressProxy);
    }
    // Nobody could answer in the name of an address that is good on one interface only.
    if udp.destination.is_loopback() || udp.destination.is_v6_link_local() {
        return Egress::Pass(Counter::EgressOther);
    }
    // As for TCP: others' datagrams are only forwarded.
    if sender.has_socket || known.owns(&udp.source) {
        Egress::CaptureDns(Listener::dns_udp(udp.v4))
    } else {
        Egress::Pass(Counter::EgressOther)
    }
}

/// Egress, last step: whether the pod has a connected socket whose local end is the packet's destination.
#[inline(always)]
pub const fn egress_by_socket_table(far_end_is_here: bool) -> Egress {
    if far_end_is_here {
        Egress::TurnBack(Counter::EgressTurnedBack)
    } else {
        Egress::Pass(Counter::EgressUncaptured)
    }
}

/// What becomes of a packet that arrives at the pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ingress {
    /// It goes on.
    Pass(Counter),
    /// It is dropped.
    Drop(Counter),
    /// It is answered with a reset.
    Refuse(Counter),
    /// It is a new connection that the lookup would take for the proxy's own: 15006 gets it here.
    AssignInbound,
    /// It is a new connection from the range that the proxy dials from: if one of the proxy's dials has the same ends, the
    /// kernel would take this SYN for a stray of that one, and answer where nobody listens.
    AskSocketTable,
    /// It is a new connection that may be a probe of the node's.
    AskOrigin,
    /// It is a probe of the node's: the lookup is to leave it alone.
    Probe,
    /// It is the dial to the application of a proxy that another process is: the lookup is left a hint.
    Dialled,
    /// It is a new connection from behind the pod to elsewhere: it is marked, so that it is delivered here and 15001 gets it.
    Reroute,
    /// It is a later packet from behind the pod to elsewhere: it is delivered here if the pod has a socket at its far end, since
    /// only a connection that was rerouted has one.
    AskFarEnd,
}

/// Ingress of an interface whose traffic is outbound: what arrives there on its way to elsewhere. `None` is for what goes to the
/// pod itself, which is for [`ingress`] to decide.
#[inline(always)]
pub fn reroute<P: Addresses + Rules + ?Sized>(tcp: &TcpMeta, pod: &PodEntry, known: &P) -> Option<Ingress> {
    if known.owns(&tcp.destination) || tcp.destination.is_loopback() || tcp.destination.is_v6_link_local() {
        return None;
    }
    if !tcp.is_initial_syn() {
        return Some(Ingress::AskFarEnd);
    }
    if known.owns(&tcp.source) {
        return Some(Ingress::Drop(Counter::IngressSpoofed));
    }
    if pod.has(FLAG_RELEASING)
        || rules::excluded(
            Direction::Outbound,
            tcp.destination_port,
            &tcp.destination,
            pod,
            known,
        )
    {
        return Some(Ingress::Pass(Counter::IngressNew));
    }
    Some(Ingress::Reroute)
}

/// Ingress of lo, in a pod with [`FLAG_ONE_MARK`]: what the pod sends to itself, and what egress has turned back. Nothing from outside
/// comes this way, and nothing is held up.
#[inline(always)]
pub fn ingress_of_lo<P: Addresses + ?Sized>(
    parsed: &Parsed,
    has_proxy_mark: bool,
    pod: &PodEntry,
    known: &P,
) -> Ingress {
    match parsed {
        Parsed::Tcp(tcp)
            if has_proxy_mark
                && pod.has(FLAG_ONE_MARK)
                && tcp.is_initial_syn()
                && known.owns(&tcp.destination)
                && !known.owns(&tcp.source) =>
        {
            Ingress::Dialled
        }
        _ => Ingress::Pass(Counter::IngressOther),
    }
}

/// Whether an inbound connection is left alone, by the pod's rules or altogether.
#[inline(always)]
fn left_alone<R: Rules + ?Sized>(port: u16, client: &Addr, pod: &PodEntry, rules: &R) -> bool {
    pod.has(FLAG_BYPASS_INBOUND) || rules::excluded(Direction::Inbound, port, client, pod, rules)
}

/// Ingress: guards what the lookup program believes.
#[inline(always)]
pub fn ingress<P: Addresses + Rules + ?Sized>(parsed: &Parsed, pod: &PodEntry, known: &P) -> Ingress {
    let tcp = match parsed {
        Parsed::Tcp(tcp) => tcp,
        Parsed::Udp(_) | Parsed::Other | Parsed::Fragment | Parsed::Tagged => {
            return Ingress::Pass(Counter::IngressOther);
        }
        // The pod's stack would read more extension headers than we do, and put a header together from fragments.
        Parsed::Malformed | Parsed::TooManyHeaders => return Ingress::Drop(Counter::IngressMalformed),
    };
    if !tcp.is_initial_syn() {
        return Ingress::Pass(Counter::IngressOther);
    }
    // IPv4 drops a packet from one of the host's own addresses as a martian; IPv6 has no such check.
    if known.owns(&tcp.source) {
        return Ingress::Drop(Counter::IngressSpoofed);
    }
    let hbone = tcp.destination_port == PORT_HBONE;
    if pod.has(FLAG_RELEASING) || !hbone && left_alone(tcp.destination_port, &tcp.source, pod, known) {
        return Ingress::Pass(Counter::IngressNew);
    }
    // The proxy could not dial the application in the client's name: that name is good on one interface only.
    if tcp.destination.is_v6_link_local() || tcp.source.is_v6_link_local() {
        return Ingress::Refuse(Counter::IngressRefused);
    }
    if hbone || !known.owns(&tcp.destination) {
        return Ingress::Pass(Counter::IngressNew);
    }
    if is_dial_port(tcp.source_port) && !pod.has(FLAG_ONE_MARK) {
        return Ingress::AskSocketTable;
    }
    // A hint of such a proxy's dial with the same ends may be left, and must not serve this one.
    if pod.is_probed() || pod.has(FLAG_ONE_MARK) {
        return Ingress::AskOrigin;
    }
    Ingress::Pass(Counter::IngressNew)
}

/// Ingress, a further step, for a connection from the dial range: whether the application has a connection, by the proxy's dial,
/// with these ends.
#[inline(always)]
pub const fn ingress_by_socket_table(dialled: bool, source_port: u16, pod: &PodEntry) -> Ingress {
    if dialled {
        Ingress::Refuse(Counter::IngressCollided)
    } else if pod.is_probed() {
        Ingress::AskOrigin
    } else {
        ingress_by_origin(false, source_port, pod)
    }
}

/// Ingress, last step, for a connection that may be a probe: whether it is one.
#[inline(always)]
pub const fn ingress_by_origin(probe: bool, source_port: u16, pod: &PodEntry) -> Ingress {
    if probe {
        Ingress::Probe
    } else if is_dial_port(source_port) && !pod.has(FLAG_LOOKUP_HAS_IFINDEX) && !pod.has(FLAG_ONE_MARK) {
        Ingress::AssignInbound
    } else {
        Ingress::Pass(Counter::IngressNew)
    }
}

/// A new connection for which the kernel looks for a listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lookup {
    /// The address connected to.
    pub local: Addr,
    /// The address it comes from.
    pub remote: Addr,
    /// The port connected to, host byte order.
    pub local_port: u16,
    /// The port it comes from, host byte order.
    pub remote_port: u16,
    /// It arrived by lo. Only believed with [`FLAG_LOOKUP_HAS_IFINDEX`].
    pub by_lo: bool,
    /// It arrived by one of the interfaces of which what arrives is outbound. Only known with [`FLAG_LOOKUP_HAS_IFINDEX`].
    pub rerouted: bool,
}

/// Who gets a new connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// One of the proxy's listeners, and nobody if that is away.
    Assign(Listener, Counter),
    /// Whoever listens.
    Pass(Counter),
}

/// What ingress has left for the lookup: a map in the programs, a list in tests.
pub trait Hints {
    /// Whether the last SYN of this connection was a probe's, or a dial's of the proxy's that another process is.
    fn is_for_application(&self, connection: &Lookup) -> bool;
}

/// SK_LOOKUP: the listener of a new TCP connection.
#[inline(always)]
pub fn lookup<P: Addresses + Rules + Hints + ?Sized>(
    connection: &Lookup,
    pod: &PodEntry,
    known: &P,
) -> Choice {
    let Lookup {
        local,
        remote,
        local_port,
        remote_port,
        by_lo,
        rerouted,
    } = connection;
    // A captured connection's destination is never loopback (egress) nor its own source.
    if local.is_loopback() || remote.is_loopback() || local.is(remote) || pod.has(FLAG_RELEASING) {
        return Choice::Pass(Counter::LookupOther);
    }
    let to_this_pod = known.owns(local);
    // The source tells the pod's own from what was rerouted, whose DNS is left to 15001.
    let outbound = if dns_is_captured(*local_port, pod) && known.owns(remote) {
        Choice::Assign(Listener::dns_tcp(local.is_v4()), Counter::LookupDns)
    } else {
        Choice::Assign(Listener::Outbound, Counter::LookupOutbound)
    };
    if pod.has(FLAG_LOOKUP_HAS_IFINDEX) {
        // Local delivery reports the device of the address; lo itself is reported for a packet that egress turned
        // back, and for a socket bound to lo, as the proxy's dials are.
        if *by_lo {
            return if to_this_pod {
                Choice::Pass(Counter::LookupProxy)
            } else {
                outbound
            };
        }
        if *rerouted && !to_this_pod {
            return outbound;
        }
    } else if !to_this_pod {
        return outbound;
    }
    if *local_port == PORT_HBONE {
        return Choice::Assign(Listener::Hbone, Counter::LookupHbone);
    }
    if known.owns(remote) {
        return Choice::Pass(Counter::LookupOther);
    }
    let one_mark = pod.has(FLAG_ONE_MARK);
    if (pod.is_probed() || one_mark) && known.is_for_application(connection) {
        // Ingress has counted which of the two.
        return Choice::Pass(if one_mark {
            Counter::LookupProxy
        } else {
            Counter::LookupProbe
        });
    }
    if !pod.has(FLAG_LOOKUP_HAS_IFINDEX) && !one_mark && is_dial_port(*remote_port) {
        // From outside, ingress has given it to 15006 already, and this program is not asked.
        return Choice::Pass(Counter::LookupProxy);
    }
    if left_alone(*local_port, remote, pod, known) {
        return Choice::Pass(Counter::LookupExcluded);
    }
    Choice::Assign(Listener::Inbound, Counter::LookupInbound)
}

/// SK_LOOKUP: the socket of a UDP datagram that no connected one takes, in a pod whose DNS is captured.
#[inline(always)]
pub fn lookup_udp<P: Addresses + ?Sized>(datagram: &Lookup, pod: &PodEntry, known: &P) -> Choice {
    let by_lo = datagram.by_lo || !pod.has(FLAG_LOOKUP_HAS_IFINDEX);
    if by_lo
        && dns_is_captured(datagram.local_port, pod)
        && !pod.has(FLAG_RELEASING)
        // What the pod asks of itself has not left it.
        && !datagram.local.is_loopback()
        && !known.owns(&datagram.local)
    {
        Choice::Assign(Listener::dns_udp(datagram.local.is_v4()), Counter::LookupDns)
    } else {
        Choice::Pass(Counter::LookupOther)
    }
}

/// Whether `port` is in the range that the proxy takes the source ports of its dials from.
#[inline(always)]
pub const fn is_dial_port(port: u16) -> bool {
    // The range ends with the last port.
    const { assert!(DIAL_PORT_LAST == u16::MAX) };
    port >= DIAL_PORT_FIRST
}

#[cfg(test)]
mod tests;
