use prometheus_client::encoding::text::encode;

use super::*;
use crate::mesh::testing::{id, service, workload};

fn text(traffic: &Traffic) -> String {
    let mut registry = Registry::default();
    traffic.register(&mut registry);
    let mut text = String::new();
    encode(&mut text, &registry).unwrap();
    text
}

fn facts(from: &str) -> Facts {
    let party = |name: &str, address: &str| {
        let mut workload = workload(name, address);
        workload.workload_name = format!("{name}-deployment").into();
        workload.canonical_name = name.into();
        workload.canonical_revision = "v1".into();
        workload.cluster_id = "Kubernetes".into();
        workload.locality.region = "r\"1".into();
        Party::from(&Arc::new(workload))
    };
    Facts {
        source: Party {
            identity: Some(id(from)),
            ..party(from, "10.0.0.1")
        },
        destination: party("cart", "10.0.0.2"),
        service: Some(Arc::new(service("cart", "10.9.0.1"))),
        ..Facts::default()
    }
}

/// Istio's order, which dashboards do not need and comparisons do.
#[test]
fn labels_are_istios_in_their_order() {
    let (traffic, pod) = (Traffic::default(), OfPod::default());
    let facts = facts("web");
    let series = pod.series(&traffic, Direction::Outbound, Security::MutualTls, &facts);
    series.opened.fetch_add(1, Ordering::Relaxed);
    series.end(Flag::None);
    let host = &facts.service.as_ref().unwrap().host;
    let expected = format!(
        "istio_tcp_connections_opened_total{{reporter=\"source\",source_workload=\"web-deployment\",\
         source_canonical_service=\"web\",source_canonical_revision=\"v1\",source_workload_namespace=\"shop\",\
         source_principal=\"{}\",source_app=\"web\",source_version=\"v1\",source_cluster=\"Kubernetes\",\
         destination_service=\"{}\",destination_service_namespace=\"{}\",destination_service_name=\"{}\",\
         destination_workload=\"cart-deployment\",destination_canonical_service=\"cart\",\
         destination_canonical_revision=\"v1\",destination_workload_namespace=\"shop\",destination_principal=\"{}\",\
         destination_app=\"cart\",destination_version=\"v1\",destination_cluster=\"Kubernetes\",\
         request_protocol=\"tcp\",response_flags=\"-\",connection_security_policy=\"mutual_tls\",\
         source_region=\"r\\\"1\",source_zone=\"unknown\",destination_region=\"r\\\"1\",destination_zone=\"unknown\"}} 1\n",
        id("web"),
        host.hostname,
        host.namespace,
        facts.service.as_ref().unwrap().name,
        id("cart"),
    );
    let text = text(&traffic);
    assert!(text.contains(&expected), "{expected} in {text}");
    assert!(!text.contains("istio_tcp_connections_failed_total{"), "{text}");
}

#[test]
fn in_plain_nobody_has_proven_who_calls_and_the_unknown_have_no_place() {
    let (traffic, pod) = (Traffic::default(), OfPod::default());
    pod.series(&traffic, Direction::Inbound, Security::Unknown, &facts("web"));
    let told = text(&traffic);
    assert!(told.contains("source_principal=\"unknown\""), "{told}");
    let (traffic, pod) = (Traffic::default(), OfPod::default());
    pod.series(&traffic, Direction::Inbound, Security::Unknown, &Facts::default());
    let told = text(&traffic);
    let end = "request_protocol=\"tcp\",response_flags=\"-\",connection_security_policy=\"unknown\"} 0";
    assert!(told.contains(end), "{told}");
}

#[test]
fn an_end_is_counted_by_its_flag_and_a_failure_twice() {
    let (traffic, pod) = (Traffic::default(), OfPod::default());
    let series = pod.series(&traffic, Direction::Inbound, Security::Unknown, &Facts::default());
    for flag in [Flag::None, Flag::Deny, Flag::Deny] {
        series.end(flag);
    }
    let text = text(&traffic);
    let count = |name: &str, flag: &str| {
        let name = format!("istio_tcp_connections_{name}_total{{");
        let flag = format!("response_flags=\"{flag}\"");
        let line = text
            .lines()
            .find(|line| line.starts_with(&name) && line.contains(&flag));
        line.and_then(|line| line.rsplit(' ').next()).map(str::to_owned)
    };
    assert_eq!(count("closed", "-").as_deref(), Some("1"));
    assert_eq!(count("closed", "DENY").as_deref(), Some("2"));
    assert_eq!(count("failed", "DENY").as_deref(), Some("2"));
    assert_eq!(count("failed", "-"), None);
}

#[test]
fn sets_are_shared_by_pods_and_go_with_the_last() {
    let traffic = Traffic::default();
    let (one, other) = (OfPod::default(), OfPod::default());
    let of = |pod: &OfPod, from: &str| {
        pod.series(&traffic, Direction::Outbound, Security::MutualTls, &facts(from))
    };
    assert!(Arc::ptr_eq(&of(&one, "web"), &of(&one, "web")));
    assert!(Arc::ptr_eq(&of(&one, "web"), &of(&other, "web")));
    assert!(!Arc::ptr_eq(&of(&one, "web"), &of(&one, "db")));
    drop(one);
    let left = text(&traffic);
    assert!(
        left.contains("source_app=\"web\"") && !left.contains("source_app=\"db\""),
        "{left}"
    );
    // As an ended connection has it that is still remembered.
    let _remembered = of(&other, "web");
    drop(other);
    let left = text(&traffic);
    assert!(!left.contains("istio_tcp_connections_opened_total{"), "{left}");
}

#[test]
fn what_is_beyond_the_bounds_is_counted_without_names() {
    let traffic = Traffic {
        most: 3,
        ..Traffic::default()
    };
    let (one, other) = (OfPod::default(), OfPod::default());
    let of = |pod: &OfPod, from: &str| {
        pod.series(&traffic, Direction::Outbound, Security::MutualTls, &facts(from))
    };
    for from in ["a", "b", "c"] {
        of(&one, from);
    }
    let folded = of(&other, "d");
    assert!(Arc::ptr_eq(&folded, &of(&one, "e")));
    folded.opened.fetch_add(2, Ordering::Relaxed);
    let told = text(&traffic);
    assert!(told.contains("redirector_metrics_folded_total 2"), "{told}");
    let unnamed = "source_workload=\"unknown\",source_canonical_service=\"unknown\"";
    assert!(
        told.lines()
            .any(|line| line.contains(unnamed) && line.ends_with(" 2")),
        "{told}"
    );
    // Where a pod is gone there is room again.
    drop(one);
    of(&other, "f");
    assert!(text(&traffic).contains("source_app=\"f\""));

    let (traffic, greedy) = (Traffic::default(), OfPod::default());
    for number in 0..MOST_OF_POD + 5 {
        greedy.series(
            &traffic,
            Direction::Outbound,
            Security::MutualTls,
            &facts(&format!("w{number}")),
        );
    }
    assert_eq!(traffic.folded.get(), 5);
}
