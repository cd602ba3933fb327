//! Ports, marks and routing numbers, each with what fixes it.

/// A socket or packet mark (SO_MARK, `skb->mark`). Only the bits of [`MARK_MASK`] are ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Mark(pub u32);

/// The bits of a mark that are ours; the others belong to the CNI. Istio's in-pod mask.
pub const MARK_MASK: u32 = 0xfff;

/// On the proxy's own sockets towards other pods. Istio's in-pod mark: `cni/pkg/config/config.go`, InpodMark.
pub const MARK_PROXY: Mark = Mark(0x539);

/// On packets of captured connections that are turned back into the pod.
pub const MARK_LOOP: Mark = Mark(0x53a);

/// On the proxy's sockets towards the pod's own application.
pub const MARK_APP: Mark = Mark(0x53b);

/// On new connections, and on later packets of captured ones, that arrive by an interface behind which somebody else's programs
/// are. Accepted sockets take it over (`net.ipv4.tcp_fwmark_accept`); it selects the local table on that interface only, so that
/// their answers go the usual way.
pub const MARK_REROUTED: Mark = Mark(0x53c);

/// Routing table in the pod's namespace that delivers everything locally. Istio's in-pod table is 100.
pub const ROUTE_TABLE: u32 = 1337;

/// Priority of the rules that select [`ROUTE_TABLE`] by mark. Istio's in-pod rule has 32764.
pub const RULE_PRIORITY: u32 = 32763;

/// Outbound capture. Istio: `pilot/pkg/model`, ztunnel's inpod listeners.
pub const PORT_OUTBOUND: u16 = 15001;

/// Inbound plaintext capture.
pub const PORT_INBOUND: u16 = 15006;

/// HBONE.
pub const PORT_HBONE: u16 = 15008;

/// DNS, as captured by [`crate::maps::FLAG_DNS_CAPTURE`]: Istio's and ztunnel's port.
pub const PORT_DNS_CAPTURE: u16 = 15053;

/// DNS.
pub const PORT_DNS: u16 = 53;

/// The proxy's own ports in a pod: a connection to one of them is never forwarded.
pub const PROXY_PORTS: [u16; 3] = [PORT_OUTBOUND, PORT_INBOUND, PORT_HBONE];

/// First source port of the proxy's dials to the application. The range lies above the default of
/// `net.ipv4.ip_local_port_range` (32768 to 60999), so that those dials never take a port that the client's own kernel
/// chose for a real connection to the same application.
pub const DIAL_PORT_FIRST: u16 = 61_000;

/// Last source port of the proxy's dials to the application.
pub const DIAL_PORT_LAST: u16 = 65_535;
