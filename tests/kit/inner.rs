//! Somebody behind a pod: a namespace that has the pod as its router, as a virtual machine or a container in the pod has.
//!
//! The node routes its addresses to the pod, so that what the pod only forwards comes back.

use std::net::Ipv4Addr;

use anyhow::Result;

use crate::{
    netns::Namespace,
    node::{Host, Node, Pod},
};

/// How the namespace is linked to the pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Link {
    /// By a veth whose end in the pod has the pod's address there.
    Veth,
    /// By a bridge, as KubeVirt and docker have it.
    Bridge,
    /// By a veth whose end in the pod has no address at all. IPv4 alone.
    Unnumbered,
}

/// The interface in the pod.
pub const INTERFACE: &str = "virt0";

/// Makes one behind a pod: 10.88.0.2 and fd88::2; the pod is .1 there.
///
/// # Panics
/// When it cannot be made.
pub fn behind(node: &Node, pod: &Pod, link: Link) -> Host {
    create(node, pod, link)
        .unwrap_or_else(|error| panic!("making a namespace behind {}: {error:#}", pod.name))
}

fn create(node: &Node, pod: &Pod, link: Link) -> Result<Host> {
    let ns = Namespace::create(&format!("{}-vm", pod.ns.name()))?;
    for (sysctl, value) in [
        ("net/ipv4/ip_forward", "1"),
        ("net/ipv6/conf/all/forwarding", "1"),
    ] {
        pod.ns.set_sysctl(sysctl, value)?;
    }
    let name = ns.name();
    match link {
        Link::Veth | Link::Unnumbered => pod.ns.ip(&[format!(
            "link add {INTERFACE} type veth peer name eth0 netns {name}"
        )])?,
        Link::Bridge => pod.ns.ip(&[
            format!("link add {INTERFACE} type bridge forward_delay 0 mcast_snooping 0"),
            format!("link add tap0 type veth peer name eth0 netns {name}"),
            format!("link set tap0 master {INTERFACE} up"),
        ])?,
    }
    if link == Link::Unnumbered {
        pod.ns.ip(&[
            format!("link set {INTERFACE} addrgenmode none"),
            format!("link set {INTERFACE} up"),
            format!("route add 10.88.0.2/32 dev {INTERFACE}"),
        ])?;
        // The pod answers for all addresses there.
        pod.ns
            .set_sysctl(&format!("net/ipv4/conf/{INTERFACE}/proxy_arp"), "1")?;
        ns.ip(&[
            "addr add 10.88.0.2/32 dev eth0",
            "link set eth0 up",
            "route add default dev eth0",
        ])?;
        node.host
            .ns
            .ip(&[format!("route add 10.88.0.0/24 via {}", pod.v4)])?;
        return host(ns);
    }
    pod.ns.ip(&[
        format!("link set {INTERFACE} up"),
        format!("addr add 10.88.0.1/24 dev {INTERFACE}"),
        format!("addr add fd88::1/64 dev {INTERFACE} nodad"),
    ])?;
    ns.ip(&[
        "addr add 10.88.0.2/24 dev eth0",
        "addr add fd88::2/64 dev eth0 nodad",
        "link set eth0 up",
        "route add default via 10.88.0.1",
        "route add default via fd88::1",
    ])?;
    node.host.ns.ip(&[
        format!("route add 10.88.0.0/24 via {}", pod.v4),
        format!("route add fd88::/64 via {}", pod.v6),
    ])?;
    host(ns)
}

fn host(ns: Namespace) -> Result<Host> {
    Ok(Host {
        ns,
        v4: Ipv4Addr::new(10, 88, 0, 2),
        v6: "fd88::2".parse()?,
    })
}
