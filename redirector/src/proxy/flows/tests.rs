use serde_json::{Value, json};

use super::*;
use crate::{
    mesh::testing::{info, policy_name, service},
    proxy::record::{Record, Recorder},
};

fn recorder(flows: &Arc<Flows>, name: &str) -> Arc<Recorder> {
    Recorder::new(Arc::default(), flows.clone(), &info(name))
}

fn src() -> SocketAddr {
    "10.0.0.9:1234".parse().unwrap()
}

/// A connection that `recorder` records, open.
fn opened(recorder: &Arc<Recorder>, direction: Direction) -> Box<Record> {
    let mut record = Record::new(recorder, direction, src());
    record.facts().dst = Some("10.0.0.1:15008".parse().unwrap());
    record.facts().hbone_dst = Some("10.0.0.1:8080".into());
    record.open(Security::MutualTls);
    record
}

fn value(view: &impl serde::Serialize) -> Value {
    serde_json::to_value(view).unwrap()
}

fn failed(recorder: &Arc<Recorder>) {
    Record::new(recorder, Direction::Inbound, src()).fail(&std::io::Error::other("no"));
}

#[test]
fn a_connection_is_told_while_it_lives_and_after() {
    let flows = Arc::new(Flows::default());
    let (web, cart) = (recorder(&flows, "web"), recorder(&flows, "cart"));
    let _other = opened(&cart, Direction::Inbound);
    let record = opened(&web, Direction::Outbound);
    record.decided_by(Some(&policy_name("shop", "lets-in")));
    record.reached(Party {
        workload: Some("far".into()),
        ..Party::default()
    });
    use crate::proxy::copy::Meter as _;
    record.counts().0.add(7);

    let name = format!("{}/{}", info("web").namespace, info("web").name);
    let all = value(&flows.connections(None, 1));
    assert_eq!(
        (all["connections"].as_array().unwrap().len(), &all["total"]),
        (1, &2.into())
    );
    let of_web = value(&flows.connections(Some(&name), 10));
    assert_eq!(of_web["total"], 1);
    let told = &of_web["connections"][0];
    for (pointer, expected) in [
        ("/direction", "outbound".into()),
        ("/state", "open".into()),
        ("/security", "mutual_tls".into()),
        ("/protocol", "HBONE".into()),
        ("/src/addr", "10.0.0.9:1234".into()),
        ("/dst/addr", "10.0.0.1:15008".into()),
        ("/dst/hboneAddr", "10.0.0.1:8080".into()),
        ("/dst/workload", "far".into()),
        ("/dst/service", Value::Null),
        ("/pod/name", info("web").name.into()),
        ("/bytesSent", 7.into()),
        ("/bytesReceived", 0.into()),
        ("/policy", policy_name("shop", "lets-in").to_string().into()),
        ("/responseFlags", "-".into()),
        ("/error", Value::Null),
    ] {
        assert_eq!(told.pointer(pointer), Some(&expected), "{pointer} in {told}");
    }
    assert_eq!(
        told["started"].as_str().unwrap().len(),
        "2026-01-05T10:11:12.345Z".len()
    );

    record.end(Ok(()));
    assert_eq!(value(&flows.connections(Some(&name), 10))["total"], 0);
    let ended = value(&flows.ended(Some(0), 10));
    assert_eq!((&ended["next"], &ended["lost"]), (&1.into(), &0.into()));
    let (state, id) = (&ended["flows"][0]["state"], &ended["flows"][0]["id"]);
    assert_eq!((state, id), (&"complete".into(), &told["id"]));
}

#[test]
fn the_open_connections_of_each_pod_are_told_as_ztunnel_does() {
    let flows = Arc::new(Flows::default());
    let (web, cart) = (recorder(&flows, "web"), recorder(&flows, "cart"));
    let mut outbound = Record::new(&web, Direction::Outbound, src());
    let facts = outbound.facts();
    facts.original_dst = Some("10.9.0.1:80".parse().unwrap());
    facts.dst = Some("10.0.0.1:15008".parse().unwrap());
    facts.hbone_dst = Some("10.0.0.1:8080".into());
    facts.nested = true;
    outbound.open(Security::MutualTls);
    let mut called = Record::new(&cart, Direction::Inbound, src());
    let facts = called.facts();
    facts.dst = Some("10.0.0.1:15008".parse().unwrap());
    facts.hbone_dst = Some("10.0.0.1:8080".into());
    facts.service = Some(Arc::new(service("cart", "10.9.0.1")));
    called.open(Security::MutualTls);
    let mut plain = Record::new(&cart, Direction::Inbound, src());
    plain.facts().dst = Some("10.0.0.1:8080".parse().unwrap());
    plain.open(Security::Unknown);

    let ends = |original: Option<&str>, actual: &str, protocol: &str| json!({"src": src(), "originalDst": original, "actualDst": actual, "protocol": protocol});
    let by_pod = flows.by_pod();
    let told: BTreeMap<_, _> = by_pod
        .iter()
        .map(|(uid, of_pod)| (uid.as_str(), of_pod))
        .collect();
    assert_eq!(
        value(&told),
        json!({
            "web": {
                "inbound": [],
                "outbound": [ends(Some("10.9.0.1:80"), "10.0.0.1:15008", "DOUBLEHBONE")],
            },
            "cart": {
                "inbound": [
                    ends(Some("cart.shop.svc.cluster.local"), "10.0.0.1:8080", "HBONE"),
                    ends(None, "10.0.0.1:8080", "TCP"),
                ],
                "outbound": [],
            },
        })
    );
}

#[test]
fn what_failed_before_it_was_opened_is_told_too_and_a_tunnel_is_not() {
    let flows = Arc::new(Flows::default());
    let web = recorder(&flows, "web");
    failed(&web);
    Record::new(&web, Direction::Inbound, src()).into_tunnel();
    let ended = value(&flows.ended(None, 10));
    assert_eq!(ended["next"], 1);
    let told = &ended["flows"][0];
    assert_eq!(
        (
            &told["state"],
            &told["error"],
            &told["security"],
            &told["responseFlags"]
        ),
        (&"failed".into(), &"no".into(), &Value::Null, &"CONNECT".into())
    );
}

#[test]
fn the_ring_keeps_the_newest_and_says_what_it_lost() {
    let flows = Arc::new(Flows::default());
    let web = recorder(&flows, "web");
    for _ in 0..KEPT + 10 {
        failed(&web);
    }
    let all = KEPT as u64 + 10;
    for (after, limit, first, count, next, lost) in [
        // From the beginning, from what is kept, page by page, and from the end on.
        (Some(0), KEPT, 10, KEPT, all, 10),
        (Some(12), 5, 12, 5, 17, 0),
        (Some(all), 5, 0, 0, all, 0),
        // Of another agent.
        (Some(all + 1), 5, 10, 5, 15, 0),
        (None, 5, all - 5, 5, all, 0),
    ] {
        let page = value(&flows.ended(after, limit));
        let told = page["flows"].as_array().unwrap();
        assert_eq!(
            (told.len(), &page["next"], &page["lost"]),
            (count, &next.into(), &lost.into()),
            "{after:?}"
        );
        if let Some(one) = told.first() {
            assert_eq!(one["id"], first, "{after:?}");
        }
    }
}

#[tokio::test]
async fn whoever_waits_for_the_next_gets_it() {
    let flows = Arc::new(Flows::default());
    let web = recorder(&flows, "web");
    failed(&web);
    // Not for what has come already.
    flows.ended_since(0).await;
    let waits = flows.ended_since(1);
    let ends = async {
        tokio::task::yield_now().await;
        failed(&web);
    };
    tokio::join!(waits, ends);
    assert_eq!(value(&flows.ended(Some(1), 10))["next"], 2);
}
