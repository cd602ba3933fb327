//! Bytes by the megabyte, with the interfaces' offloads on and off.

use std::{
    io::{Read, Write},
    net::Shutdown,
};

use redirector_tests::{
    app, counters,
    mesh::PORT,
    netns::Namespace,
    node::Host,
    process::{command, output},
};

use super::BOTH;
use crate::{
    scene::Scene,
    table::{Answer, Outcome, Row},
};

const BYTES: u64 = 8 << 20;
/// What the kernel or a card may do for TCP: checksums, cutting a super-packet, putting one together.
const OFFLOADS: [&str; 6] = ["rx", "tx", "sg", "tso", "gso", "gro"];
const SEEN: &str = "8 MiB each way have the same hash; InCsumErrors stays as it was in every namespace";

pub(super) const ROWS: &[Row] = &[
    Row {
        name: "offloads_on_to_a_mesh_pod",
        families: BOTH,
        what: "bulk with all offloads, to another enrolled pod",
        flow: |scene| bulk(scene, &scene.client, &scene.server),
        ebpf: Outcome::Hbone,
        iptables: Outcome::Hbone,
        seen: SEEN,
        why: "",
    },
    Row {
        name: "offloads_on_to_outside",
        families: BOTH,
        what: "the same, to outside",
        flow: |scene| bulk(scene, &scene.client, &scene.node.outside),
        ebpf: Outcome::Outbound,
        iptables: Outcome::Outbound,
        seen: SEEN,
        why: "",
    },
    Row {
        name: "offloads_on_come_in",
        families: BOTH,
        what: "the same, outside to pod",
        flow: |scene| bulk(scene, &scene.node.outside, &scene.server),
        ebpf: Outcome::Inbound,
        iptables: Outcome::Inbound,
        seen: SEEN,
        why: "",
    },
    Row {
        name: "offloads_off_to_a_mesh_pod",
        families: BOTH,
        what: "bulk without any offload, to another enrolled pod",
        flow: |scene| {
            let _off = Off::all(scene);
            bulk(scene, &scene.client, &scene.server)
        },
        ebpf: Outcome::Hbone,
        iptables: Outcome::Hbone,
        seen: SEEN,
        why: "",
    },
    Row {
        name: "offloads_off_to_outside",
        families: BOTH,
        what: "the same, to outside",
        flow: |scene| {
            let _off = Off::all(scene);
            bulk(scene, &scene.client, &scene.node.outside)
        },
        ebpf: Outcome::Outbound,
        iptables: Outcome::Outbound,
        seen: SEEN,
        why: "",
    },
    Row {
        name: "offloads_off_come_in",
        families: BOTH,
        what: "the same, outside to pod",
        flow: |scene| {
            let _off = Off::all(scene);
            bulk(scene, &scene.node.outside, &scene.server)
        },
        ebpf: Outcome::Inbound,
        iptables: Outcome::Inbound,
        seen: SEEN,
        why: "",
    },
];

fn bulk(scene: &Scene, from: &Host, to: &Host) -> Answer {
    let wrong = || {
        [&scene.client.ns, &scene.server.ns, &scene.node.outside.ns]
            .map(|ns| counters::kernel(ns, "Tcp", "InCsumErrors"))
    };
    let before = wrong();
    let _hash = scene.serve(to, PORT, app::hash);
    let _source = scene.serve(to, PORT + 1, app::source);

    let mut up = app::connect(&from.ns, scene.at(to, PORT)).expect("the application answers");
    let sent = app::write_hashed(&mut up, BYTES).expect("bytes go up");
    up.shutdown(Shutdown::Write).expect("the connection stands");
    let mut received = String::new();
    up.read_to_string(&mut received).expect("the hash comes back");
    assert_eq!(received, sent);

    let mut down = app::connect(&from.ns, scene.at(to, PORT + 1)).expect("the application answers");
    writeln!(down, "{BYTES}").expect("the request goes up");
    // The source sends the same bytes as were sent up.
    assert_eq!(app::read_hashed(&mut down).expect("bytes come down"), sent);
    assert_eq!(
        wrong(),
        before,
        "checksums were wrong in client, server or outside"
    );
    Answer::Answered
}

/// Both ends of all veths of a scene without offloads; put back on drop.
struct Off<'a>(Vec<(&'a Namespace, &'a str)>);

impl<'a> Off<'a> {
    fn all(scene: &'a Scene) -> Self {
        let node = &scene.node.host.ns;
        let off = Self(vec![
            (&scene.client.ns, "eth0"),
            (&scene.server.ns, "eth0"),
            (&scene.node.outside.ns, "eth0"),
            (node, &scene.client.veth),
            (node, &scene.server.veth),
            (node, "out0"),
        ]);
        for (ns, interface) in &off.0 {
            set(ns, interface, "off");
        }
        off
    }
}

impl Drop for Off<'_> {
    fn drop(&mut self) {
        for (ns, interface) in &self.0 {
            set(ns, interface, "on");
        }
    }
}

fn set(ns: &Namespace, interface: &str, value: &str) {
    let mut ethtool = command(ns, "ethtool");
    ethtool.args(["-K", interface]);
    ethtool.args(OFFLOADS.iter().flat_map(|offload| [*offload, value]));
    let (status, text) = output(&mut ethtool, app::IO_DEADLINE);
    assert!(
        status.success() || std::thread::panicking(),
        "ethtool -K {interface}: {text}"
    );
}
