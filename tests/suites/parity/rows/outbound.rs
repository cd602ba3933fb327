//! Where the pod's application can call.

use std::net::IpAddr;

use redirector_tests::{
    app,
    capture::opened_ports,
    mesh::PORT,
    netns::{Namespace, unique_prefix},
    node::{Family, Host},
};

use super::{BOTH, V4};
use crate::{
    scene::{Scene, Sysctl},
    table::{Answer, Outcome, Row},
};

pub(super) const ROWS: &[Row] = &[
    Row {
        name: "to_a_mesh_pod",
        families: BOTH,
        what: "pod to another enrolled pod",
        flow: |scene| scene.sees(&scene.client, &scene.server),
        ebpf: Outcome::Hbone,
        iptables: Outcome::Hbone,
        seen: "the application sees the client's address",
        why: "",
    },
    Row {
        name: "to_a_service",
        families: BOTH,
        what: "pod to the virtual address of a service of enrolled pods",
        flow: |scene| {
            let _app = scene.serve(&scene.server, PORT, app::who);
            scene.asks(&scene.client.ns, scene.vip(), scene.client.ip(scene.family))
        },
        ebpf: Outcome::Hbone,
        iptables: Outcome::Hbone,
        seen: "the application sees the client's address; no packet to the virtual address on the wire",
        why: "",
    },
    Row {
        name: "to_a_plain_mesh_pod",
        families: BOTH,
        what: "pod to a pod that the mesh knows as plaintext",
        flow: |scene| once(scene, &scene.plain),
        ebpf: Outcome::Outbound,
        iptables: Outcome::Outbound,
        seen: "the application sees the client's address; one SYN on the wire, the proxy's",
        why: "",
    },
    Row {
        name: "to_a_stranger",
        families: BOTH,
        what: "pod to a pod of the same node that the mesh does not know",
        flow: |scene| once(scene, &scene.stranger),
        ebpf: Outcome::Outbound,
        iptables: Outcome::Outbound,
        seen: "as above",
        why: "",
    },
    Row {
        name: "to_outside",
        families: BOTH,
        what: "pod to an address behind the node",
        flow: |scene| once(scene, &scene.node.outside),
        ebpf: Outcome::Outbound,
        iptables: Outcome::Outbound,
        seen: "as above: the proxy's own connection is not captured again",
        why: "",
    },
    Row {
        name: "to_the_node",
        families: BOTH,
        what: "pod to a process of its node",
        flow: |scene| once(scene, &scene.node.host),
        ebpf: Outcome::Outbound,
        iptables: Outcome::Outbound,
        seen: "as above",
        why: "",
    },
    Row {
        name: "to_own_ip",
        families: BOTH,
        what: "pod to its own address",
        flow: |scene| scene.sees(&scene.client, &scene.client),
        ebpf: Outcome::Untouched,
        iptables: Outcome::Untouched,
        seen: "the application sees the pod's address; nothing on the wire",
        why: "",
    },
    Row {
        name: "to_own_vip",
        families: BOTH,
        what: "pod to a virtual address whose endpoint is the pod itself",
        flow: |scene| {
            let _app = scene.serve(&scene.client, PORT, app::who);
            scene.asks(&scene.client.ns, scene.own_vip(), scene.client.ip(scene.family))
        },
        ebpf: Outcome::Hbone,
        iptables: Outcome::Hbone,
        seen: "the application sees the pod's address",
        why: "the proxy's tunnel to its own 15008 stays on lo",
    },
    Row {
        name: "to_localhost",
        families: BOTH,
        what: "pod to 127.0.0.1 or ::1",
        flow: |scene| {
            let _app = scene.serve(&scene.client, PORT, app::who);
            let loopback = scene.family.loopback();
            scene.asks(&scene.client.ns, (loopback, PORT).into(), loopback)
        },
        ebpf: Outcome::Untouched,
        iptables: Outcome::Untouched,
        seen: "the application sees the loopback address",
        why: "",
    },
    Row {
        name: "to_another_loopback_address",
        families: V4,
        what: "pod to 127.0.0.2",
        flow: |scene| {
            let _app = scene.serve(&scene.client, PORT, app::who);
            let to = "127.0.0.2:8080".parse().expect("a literal address");
            scene.asks(&scene.client.ns, to, Family::V4.loopback())
        },
        ebpf: Outcome::Untouched,
        iptables: Outcome::Untouched,
        seen: "the application sees 127.0.0.1",
        why: "Istio's rules name 127.0.0.1/32 alone; the rest of 127/8 leaves by lo, which they accept",
    },
    Row {
        name: "to_the_proxys_ports_on_localhost",
        families: BOTH,
        what: "pod to 15001 and 15006 of its loopback address",
        flow: |scene| {
            let answers = [15001, 15006].map(|port| {
                scene.asks(
                    &scene.client.ns,
                    (scene.family.loopback(), port).into(),
                    scene.family.any(),
                )
            });
            both(answers)
        },
        ebpf: Outcome::Refused,
        iptables: Outcome::Refused,
        seen: "",
        why: "the proxy has them and lets go: it would be calling itself",
    },
    Row {
        name: "to_the_proxys_ports_of_another_pod",
        families: BOTH,
        what: "pod to 15001 and 15006 of another enrolled pod",
        flow: |scene| {
            let answers = [15001, 15006].map(|port| {
                scene.asks(
                    &scene.client.ns,
                    scene.at(&scene.server, port),
                    scene.family.any(),
                )
            });
            both(answers)
        },
        ebpf: Outcome::Refused,
        iptables: Outcome::Refused,
        seen: "",
        why: "captured like all; the far proxy refuses its own ports",
    },
    Row {
        name: "to_a_closed_port_of_a_mesh_pod",
        families: BOTH,
        what: "pod to a port of another enrolled pod where nobody listens",
        flow: |scene| scene.asks(&scene.client.ns, scene.at(&scene.server, 9), scene.family.any()),
        ebpf: Outcome::Refused,
        iptables: Outcome::Refused,
        seen: "",
        why: "the proxy has accepted, so the client sees its connection reset, not refused",
    },
    Row {
        name: "to_a_closed_port_outside",
        families: BOTH,
        what: "pod to a port outside where nobody listens",
        flow: |scene| {
            scene.asks(
                &scene.client.ns,
                scene.at(&scene.node.outside, 9),
                scene.family.any(),
            )
        },
        ebpf: Outcome::Refused,
        iptables: Outcome::Refused,
        seen: "",
        why: "as above",
    },
    Row {
        name: "the_callers_own_port_elsewhere",
        families: BOTH,
        what: "pod that listens at a port to the same port of a host where nobody listens",
        flow: |scene| {
            let _own = scene.serve(&scene.client, PORT, app::who);
            scene.asks(
                &scene.client.ns,
                scene.at(&scene.node.outside, PORT),
                scene.family.any(),
            )
        },
        ebpf: Outcome::Refused,
        iptables: Outcome::Refused,
        seen: "the pod's own application, which listens on all addresses, is not given the connection",
        why: "",
    },
    Row {
        name: "no_route_on_the_node",
        families: BOTH,
        what: "pod to an address that the node has no route to",
        flow: |scene| {
            scene.asks(
                &scene.client.ns,
                (nowhere(scene), PORT).into(),
                scene.family.any(),
            )
        },
        ebpf: Outcome::Refused,
        iptables: Outcome::Refused,
        seen: "",
        why: "the proxy hears of it by ICMP and resets",
    },
    Row {
        name: "no_route_in_the_pod",
        families: BOTH,
        what: "pod to an address that the pod has no route to",
        flow: |scene| {
            let route = format!("unreachable {}", nowhere(scene));
            scene
                .client
                .ns
                .ip(&[format!("route add {route}")])
                .expect("the pod's routes can be changed");
            let answer = scene.asks(
                &scene.client.ns,
                (nowhere(scene), PORT).into(),
                scene.family.any(),
            );
            scene
                .client
                .ns
                .ip(&[format!("route del {route}")])
                .expect("the pod's routes can be changed");
            answer
        },
        ebpf: Outcome::Refused,
        iptables: Outcome::Refused,
        seen: "connect itself fails",
        why: "the kernel refuses before a packet is made: neither rules nor programs see it",
    },
    Row {
        name: "no_neighbour",
        families: BOTH,
        what: "pod to an address of its own network that nobody has",
        flow: no_neighbour,
        ebpf: Outcome::Refused,
        iptables: Outcome::Refused,
        seen: "with the programs, no entry in the access log: connect itself fails",
        why: "traffic control comes after the neighbour's address is resolved, the rules before: with them the proxy has the \
              connection and resets it",
    },
    Row {
        name: "from_behind_the_pod",
        families: BOTH,
        what: "a namespace behind the pod, as a nested container has it, to outside",
        flow: |scene| {
            let behind = Behind::new(scene);
            let _app = scene.serve(&scene.node.outside, PORT, app::who);
            scene.asks(&behind.ns, scene.at(&scene.node.outside, PORT), behind.address)
        },
        ebpf: Outcome::Untouched,
        iptables: Outcome::Refused,
        seen: "the application sees the nested container's address",
        why: "it is neither from nor to the pod, and forwarded. The rules take all that comes into the pod for calls to its \
              application, and there is none at that address; Istio has ambient.istio.io/reroute-virtual-interfaces for it",
    },
];

/// `from` the client to a host, with exactly one SYN on the wire.
fn once(scene: &Scene, to: &Host) -> Answer {
    let capture = scene.node.capture(&scene.client);
    let answer = scene.sees(&scene.client, to);
    let segments = capture.stop();
    let opened = segments.iter().filter(|segment| segment.opens).count();
    assert_eq!((opened, opened_ports(&segments)), (1, vec![PORT]));
    answer
}

/// The answer that two flows have in common.
fn both(answers: [Answer; 2]) -> Answer {
    let [first, second] = answers;
    assert_eq!(first, second);
    first
}

/// An address of the documentation's, which no route leads to.
fn nowhere(scene: &Scene) -> IpAddr {
    match scene.family {
        Family::V4 => "203.0.113.9",
        Family::V6 => "2001:db8:ffff::9",
    }
    .parse()
    .expect("a literal address")
}

fn no_neighbour(scene: &Scene) -> Answer {
    let (sysctl, nobody) = match scene.family {
        Family::V4 => ("net/ipv4/neigh/eth0/retrans_time_ms", "10.77.0.250:8080"),
        Family::V6 => ("net/ipv6/neigh/eth0/retrans_time_ms", "[fd77::250]:8080"),
    };
    // Three requests go unanswered, a second apart by default.
    let _faster = Sysctl::set(&scene.client.ns, sysctl, "50");
    let log = scene.agent.access_log().len();
    let answer = scene.asks(
        &scene.client.ns,
        nobody.parse().expect("a literal address"),
        scene.family.any(),
    );
    if scene.backend.is_ebpf() {
        assert_eq!(scene.agent.access_log().len(), log);
    }
    answer
}

/// A namespace behind the client: the client forwards for it, and the node knows the way back.
struct Behind<'a> {
    ns: Namespace,
    address: IpAddr,
    node: &'a Namespace,
}

/// The network behind the client, and the client's address in that of the pods.
const ROUTES: [(&str, &str); 2] = [("10.78.0.0/24", "10.77.0.10"), ("fd78::/64", "fd77::10")];

impl<'a> Behind<'a> {
    fn new(scene: &'a Scene) -> Self {
        let ns = Namespace::create(&format!("{}-behind", unique_prefix())).expect("root makes namespaces");
        let client = &scene.client.ns;
        for sysctl in ["net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"] {
            client.set_sysctl(sysctl, "1").expect("the pod can forward");
        }
        let link = format!("link add behind0 type veth peer name eth0 netns {}", ns.name());
        let commands = [
            &link,
            "addr add 10.78.0.1/24 dev behind0",
            "addr add fd78::1/64 dev behind0 nodad",
            "link set behind0 up",
        ];
        client.ip(&commands).expect("the pod takes another interface");
        let commands = [
            "addr add 10.78.0.2/24 dev eth0",
            "addr add fd78::2/64 dev eth0 nodad",
            "link set eth0 up",
            "route add default via 10.78.0.1",
            "route add default via fd78::1",
        ];
        ns.ip(&commands).expect("a new namespace takes addresses");
        let node = &scene.node.host.ns;
        let routes = ROUTES.map(|(network, via)| format!("route add {network} via {via}"));
        node.ip(&routes).expect("the node takes routes");
        let address = match scene.family {
            Family::V4 => "10.78.0.2",
            Family::V6 => "fd78::2",
        };
        let address = address.parse().expect("a literal address");
        Self { ns, address, node }
    }
}

impl Drop for Behind<'_> {
    fn drop(&mut self) {
        // The veth goes with its other end.
        let routes = ROUTES.map(|(network, _)| format!("route del {network}"));
        if let Err(error) = self.node.ip(&routes) {
            eprintln!("{error:#}");
        }
    }
}
