//! What becomes of new connections to a pod that the node may probe.

use super::*;

#[test]
fn only_what_would_be_captured_is_asked_for_its_origin() {
    let device = FLAG_LOOKUP_HAS_IFINDEX;
    let new = Ingress::Pass(Counter::IngressNew);
    for (what, packet, flags, expected) in [
        (
            "new",
            tcp(FAR_V4, 4000, POD_V4, 80, TCP_SYN),
            device,
            Ingress::AskOrigin,
        ),
        (
            "new, v6",
            tcp(FAR_V6, 4000, POD_V6, 80, TCP_SYN),
            0,
            Ingress::AskOrigin,
        ),
        (
            "from a dial port",
            tcp(FAR_V4, 61_000, POD_V4, 80, TCP_SYN),
            device,
            Ingress::AskSocketTable,
        ),
        ("to HBONE", tcp(FAR_V4, 4000, POD_V4, 15008, TCP_SYN), device, new),
        (
            "through the pod",
            tcp(FAR_V4, 4000, "10.9.9.9", 80, TCP_SYN),
            device,
            new,
        ),
        (
            "releasing",
            tcp(FAR_V4, 4000, POD_V4, 80, TCP_SYN),
            device | FLAG_RELEASING,
            new,
        ),
        (
            "nothing inbound is captured",
            tcp(FAR_V4, 4000, POD_V4, 80, TCP_SYN),
            device | FLAG_BYPASS_INBOUND,
            new,
        ),
        (
            "later",
            tcp(FAR_V4, 4000, POD_V4, 80, TCP_ACK),
            device,
            Ingress::Pass(Counter::IngressOther),
        ),
        (
            "from the pod itself",
            tcp(POD_V6, 4000, POD_V6, 80, TCP_SYN),
            device,
            Ingress::Drop(Counter::IngressSpoofed),
        ),
    ] {
        assert_eq!(
            ingress(&packet, &probed(flags), own().as_slice()),
            expected,
            "{what}"
        );
    }
    for port in [4000, 61_000] {
        assert_eq!(ingress_by_origin(true, port, &probed(0)), Ingress::Probe);
        assert_eq!(ingress_by_origin(false, port, &probed(device)), new);
    }
    assert_eq!(ingress_by_origin(false, 4000, &probed(0)), new);
    assert_eq!(
        ingress_by_origin(false, 61_000, &probed(0)),
        Ingress::AssignInbound
    );
}

#[test]
fn a_hint_counts_for_what_would_be_captured_inbound() {
    let probe = Choice::Pass(Counter::LookupProbe);
    for (what, connection, entry, expected) in [
        (
            "a probe",
            connection(POD_V4, 7, FAR_V4, 4000, false),
            probed(FLAG_LOOKUP_HAS_IFINDEX),
            probe,
        ),
        (
            "a probe, v6",
            connection(POD_V6, 7, FAR_V6, 4000, false),
            probed(0),
            probe,
        ),
        (
            "from a dial port",
            connection(POD_V4, 7, FAR_V4, 61_000, false),
            probed(0),
            probe,
        ),
        (
            "none",
            connection(POD_V4, 80, FAR_V4, 4000, false),
            probed(0),
            INBOUND,
        ),
        (
            "of before it was switched off",
            connection(POD_V4, 7, FAR_V4, 4000, false),
            pod(0),
            INBOUND,
        ),
        (
            "captured outbound",
            connection(FAR_V4, 7, POD_V4, 4000, true),
            probed(0),
            OUTBOUND,
        ),
        (
            "the proxy's dial",
            connection(POD_V4, 7, FAR_V4, 61_000, true),
            probed(FLAG_LOOKUP_HAS_IFINDEX),
            DIAL,
        ),
    ] {
        assert_eq!(lookup(&connection, &entry, own().as_slice()), expected, "{what}");
    }
}
