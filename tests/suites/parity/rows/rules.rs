//! What include and exclude lists of a pod change.

use redirector_tests::{
    cni,
    node::{Host, Pod},
};
use serde_json::{Value, json};

use super::BOTH;
use crate::{
    scene::Scene,
    table::{Answer, Outcome, Row},
};

/// Where `outside` is, in both families.
const OUTSIDE: &str = "192.0.2.0/24,fd77:ffff::/64";
const PODS: &str = "10.77.0.0/24,fd77::/64";

pub(super) const ROWS: &[Row] = &[
    Row {
        name: "excluded_port_out",
        families: BOTH,
        what: "pod to outside, to a port in exclude-outbound-ports",
        flow: |scene| outbound(scene, "exclude-outbound-ports", "8000-8100", &scene.node.outside),
        ebpf: Outcome::Untouched,
        iptables: Outcome::Untouched,
        seen: "the application sees the pod's address",
        why: "",
    },
    Row {
        name: "excluded_port_to_a_mesh_pod",
        families: BOTH,
        what: "the same, to another enrolled pod",
        flow: |scene| outbound(scene, "exclude-outbound-ports", "8080", &scene.server),
        ebpf: Outcome::Inbound,
        iptables: Outcome::Inbound,
        seen: "as above",
        why: "it leaves in plain, and the other pod's proxy takes it",
    },
    Row {
        name: "other_port_than_excluded_out",
        families: BOTH,
        what: "pod to outside, to a port that is not in exclude-outbound-ports",
        flow: |scene| {
            outbound(
                scene,
                "exclude-outbound-ports",
                "1-8079,8081-65535",
                &scene.node.outside,
            )
        },
        ebpf: Outcome::Outbound,
        iptables: Outcome::Outbound,
        seen: "as above",
        why: "",
    },
    Row {
        name: "included_port_out",
        families: BOTH,
        what: "pod to another enrolled pod, to a port in include-outbound-ports",
        flow: |scene| outbound(scene, "include-outbound-ports", "8080", &scene.server),
        ebpf: Outcome::Hbone,
        iptables: Outcome::Hbone,
        seen: "as above",
        why: "",
    },
    Row {
        name: "other_port_than_included_out",
        families: BOTH,
        what: "pod to outside, to a port that is not in include-outbound-ports",
        flow: |scene| outbound(scene, "include-outbound-ports", "8079,8081", &scene.node.outside),
        ebpf: Outcome::Untouched,
        iptables: Outcome::Untouched,
        seen: "as above",
        why: "",
    },
    Row {
        name: "excluded_network_out",
        families: BOTH,
        what: "pod to outside, which is in exclude-outbound-networks",
        flow: |scene| outbound(scene, "exclude-outbound-networks", OUTSIDE, &scene.node.outside),
        ebpf: Outcome::Untouched,
        iptables: Outcome::Untouched,
        seen: "as above",
        why: "",
    },
    Row {
        name: "other_network_than_excluded_out",
        families: BOTH,
        what: "pod to another enrolled pod, which is not in exclude-outbound-networks",
        flow: |scene| outbound(scene, "exclude-outbound-networks", OUTSIDE, &scene.server),
        ebpf: Outcome::Hbone,
        iptables: Outcome::Hbone,
        seen: "as above",
        why: "",
    },
    Row {
        name: "included_network_out",
        families: BOTH,
        what: "pod to outside, which is in include-outbound-networks",
        flow: |scene| outbound(scene, "include-outbound-networks", OUTSIDE, &scene.node.outside),
        ebpf: Outcome::Outbound,
        iptables: Outcome::Outbound,
        seen: "as above",
        why: "",
    },
    Row {
        name: "other_network_than_included_out",
        families: BOTH,
        what: "pod to outside, which is not in include-outbound-networks",
        flow: |scene| outbound(scene, "include-outbound-networks", PODS, &scene.node.outside),
        ebpf: Outcome::Untouched,
        iptables: Outcome::Untouched,
        seen: "as above",
        why: "",
    },
    Row {
        name: "excluded_port_in",
        families: BOTH,
        what: "outside to pod, to a port in exclude-inbound-ports",
        flow: |scene| inbound(scene, "exclude-inbound-ports", "8000-8100", &scene.node.outside),
        ebpf: Outcome::Untouched,
        iptables: Outcome::Untouched,
        seen: "the application sees the caller's address",
        why: "",
    },
    Row {
        name: "excluded_port_by_hbone",
        families: BOTH,
        what: "another enrolled pod to the same port",
        flow: |scene| inbound(scene, "exclude-inbound-ports", "8000-8100", &scene.client),
        ebpf: Outcome::Hbone,
        iptables: Outcome::Hbone,
        seen: "as above",
        why: "HBONE is never left alone, whatever port it leads to",
    },
    Row {
        name: "included_port_in",
        families: BOTH,
        what: "outside to pod, to a port in include-inbound-ports",
        flow: |scene| inbound(scene, "include-inbound-ports", "8080", &scene.node.outside),
        ebpf: Outcome::Inbound,
        iptables: Outcome::Inbound,
        seen: "as above",
        why: "",
    },
    Row {
        name: "other_port_than_included_in",
        families: BOTH,
        what: "outside to pod, to a port that is not in include-inbound-ports",
        flow: |scene| inbound(scene, "include-inbound-ports", "8081", &scene.node.outside),
        ebpf: Outcome::Untouched,
        iptables: Outcome::Untouched,
        seen: "as above",
        why: "",
    },
    Row {
        name: "excluded_network_in",
        families: BOTH,
        what: "outside, which is in exclude-inbound-networks, to pod",
        flow: |scene| inbound(scene, "exclude-inbound-networks", OUTSIDE, &scene.node.outside),
        ebpf: Outcome::Untouched,
        iptables: Outcome::Untouched,
        seen: "as above",
        why: "",
    },
    Row {
        name: "other_network_than_excluded_in",
        families: BOTH,
        what: "a stranger, who is not in exclude-inbound-networks, to pod",
        flow: |scene| inbound(scene, "exclude-inbound-networks", OUTSIDE, &scene.stranger),
        ebpf: Outcome::Inbound,
        iptables: Outcome::Inbound,
        seen: "as above",
        why: "",
    },
    Row {
        name: "other_network_than_included_in",
        families: BOTH,
        what: "a stranger, who is not in include-inbound-networks, to pod",
        flow: |scene| inbound(scene, "include-inbound-networks", OUTSIDE, &scene.stranger),
        ebpf: Outcome::Untouched,
        iptables: Outcome::Untouched,
        seen: "as above",
        why: "",
    },
    Row {
        name: "plaintext_to_a_gateway",
        families: BOTH,
        what: "outside to a pod with ambient.istio.io/bypass-inbound-capture",
        flow: |scene| {
            let _rules = Ruled::new(scene, &scene.server, GATEWAY, "true");
            scene.sees(&scene.node.outside, &scene.server)
        },
        ebpf: Outcome::Untouched,
        iptables: Outcome::Untouched,
        seen: "as above",
        why: "",
    },
    Row {
        name: "hbone_to_a_gateway",
        families: BOTH,
        what: "another enrolled pod to the same",
        flow: |scene| {
            let _rules = Ruled::new(scene, &scene.server, GATEWAY, "true");
            scene.sees(&scene.client, &scene.server)
        },
        ebpf: Outcome::Hbone,
        iptables: Outcome::Hbone,
        seen: "as above",
        why: "",
    },
    Row {
        name: "from_a_gateway",
        families: BOTH,
        what: "the same pod to outside",
        flow: |scene| {
            let _rules = Ruled::new(scene, &scene.server, GATEWAY, "true");
            scene.sees(&scene.server, &scene.node.outside)
        },
        ebpf: Outcome::Outbound,
        iptables: Outcome::Outbound,
        seen: "as above",
        why: "",
    },
];

const GATEWAY: &str = "ambient.istio.io/bypass-inbound-capture";

/// A connection of the client's while it has a rule.
fn outbound(scene: &Scene, rule: &str, value: &str, to: &Host) -> Answer {
    let _rules = Ruled::new(scene, &scene.client, &format!("redirector.io/{rule}"), value);
    scene.sees(&scene.client, to)
}

/// A connection to the server while it has a rule.
fn inbound(scene: &Scene, rule: &str, value: &str, from: &Host) -> Answer {
    let _rules = Ruled::new(scene, &scene.server, &format!("redirector.io/{rule}"), value);
    scene.sees(from, &scene.server)
}

/// An enrolled pod with an annotation; without it again on drop.
struct Ruled<'a> {
    scene: &'a Scene,
    pod: &'a Pod,
}

impl<'a> Ruled<'a> {
    fn new(scene: &'a Scene, pod: &'a Pod, annotation: &str, value: &str) -> Self {
        annotate(scene, pod, &json!({ annotation: value }));
        Self { scene, pod }
    }
}

impl Drop for Ruled<'_> {
    fn drop(&mut self) {
        // A scene whose row has failed is not used again.
        if !std::thread::panicking() {
            // An event that tells of none would leave them as they are.
            annotate(self.scene, self.pod, &json!({}));
        }
    }
}

fn annotate(scene: &Scene, pod: &Pod, annotations: &Value) {
    let mut event = cni::event(pod);
    event["Annotations"] = annotations.clone();
    let answer = scene.agent.post("/cmdadd", &event.to_string());
    assert_eq!(answer.status, 200, "{}", answer.body);
}
