//! What the eBPF backend wants of a pod's routes and sysctls: marked packets are delivered to the pod itself, and answers take the
//! mark of what they answer.

use redirector_common::consts::{MARK_APP, MARK_LOOP, MARK_REROUTED, ROUTE_TABLE, RULE_PRIORITY};

use crate::redirect::{routes::Routing, sysctls::Sysctl};

/// The bits of `Facts::changed_sysctls` are those of the sysctls here, in this order.
pub(super) const ROUTING: Routing = Routing {
    table: ROUTE_TABLE,
    priority: RULE_PRIORITY,
    marks: &[MARK_LOOP, MARK_APP],
    arriving: Some(MARK_REROUTED),
    sysctls: &[
        // The application's accepted sockets take the mark of the proxy's dial, so that their answers come back by lo.
        sysctl("net/ipv4/tcp_fwmark_accept", true, false),
        // Resets and other packets without a socket take the mark of what they answer.
        sysctl("net/ipv4/fwmark_reflect", true, false),
        sysctl("net/ipv6/fwmark_reflect", true, true),
        // A turned-back packet arrives on lo with the pod's own address as its source.
        sysctl("net/ipv4/conf/lo/accept_local", true, false),
        // lo must receive what the pod's interface sends.
        sysctl("net/ipv6/conf/lo/disable_ipv6", false, true),
    ],
};

const fn sysctl(name: &'static str, wanted: bool, v6: bool) -> Sysctl {
    Sysctl { name, wanted, v6 }
}
