use prost::Message as _;
use prost_types::Any;

use super::{super::super::proto::messages::Resource, *};

const WORKLOAD: &[u8] = include_bytes!("../../proto/golden/workload.bin");
const SERVICE: &[u8] = include_bytes!("../../proto/golden/service.bin");
const POLICY: &[u8] = include_bytes!("../../proto/golden/authorization.bin");

fn session() -> Session {
    Session::new(&Identity::default(), false)
}

fn resource(url: &str, name: &str, version: &str, value: &[u8]) -> Resource {
    Resource {
        name: name.into(),
        version: version.into(),
        resource: Some(Any {
            type_url: url.into(),
            value: value.to_vec(),
        }),
        ..Resource::default()
    }
}

fn response(url: &str, nonce: &str, resources: Vec<Resource>, removed: &[&str]) -> DeltaDiscoveryResponse {
    DeltaDiscoveryResponse {
        type_url: url.into(),
        nonce: nonce.into(),
        resources,
        removed_resources: removed.iter().map(|name| (*name).to_owned()).collect(),
        ..DeltaDiscoveryResponse::default()
    }
}

fn known(session: &mut Session, url: &str) -> Vec<(String, String)> {
    let first = session
        .first_requests()
        .find(|request| request.type_url == url)
        .unwrap();
    first.initial_resource_versions.into_iter().collect()
}

#[test]
fn everything_is_asked_for_by_the_first_requests() {
    let requests: Vec<_> = session().first_requests().collect();
    let urls: Vec<_> = requests.iter().map(|request| &*request.type_url).collect();
    assert_eq!(urls.len(), 2);
    assert!(urls.contains(&ADDRESS) && urls.contains(&AUTHORIZATION));
    for request in requests {
        assert!(request.node.unwrap().id.starts_with("ztunnel~"));
        assert!(request.resource_names_subscribe.is_empty() && request.response_nonce.is_empty());
    }
}

#[tokio::test]
async fn good_resources_are_acknowledged_and_told_at_the_next_connection() {
    let mut session = session();
    let resources = vec![
        resource(ADDRESS, "w", "1", WORKLOAD),
        resource(ADDRESS, "s", "2", SERVICE),
    ];
    let Outcome { answer, updates, .. } = session.take(response(ADDRESS, "n1", resources, &[])).await;
    assert_eq!((&*answer.type_url, &*answer.response_nonce), (ADDRESS, "n1"));
    assert!(answer.error_detail.is_none() && answer.node.is_none());
    assert!(matches!(&*updates, [Update::Workload(_), Update::Service(_)]));
    assert!(!session.awaited().is_empty() && !session.has_policies());
    // A type of which there is nothing is here, too.
    session.take(response(AUTHORIZATION, "n2", vec![], &[])).await;
    assert!(session.awaited().is_empty() && session.has_policies());
    let versions = |all: &[(&str, &str)]| -> Vec<_> {
        all.iter()
            .map(|(name, version)| ((*name).to_owned(), (*version).to_owned()))
            .collect()
    };
    assert_eq!(known(&mut session, ADDRESS), versions(&[("s", "2"), ("w", "1")]));
    let Outcome { updates, .. } = session
        .take(response(ADDRESS, "n3", vec![], &["w", "never"]))
        .await;
    assert_eq!(updates[0], Update::RemoveAddress("w".into()));
    assert_eq!(known(&mut session, ADDRESS), versions(&[("s", "2")]));
}

#[tokio::test]
async fn bad_resources_are_told_each_with_its_reason_and_the_good_ones_beside_them_count() {
    let mut session = session();
    session
        .take(response(
            ADDRESS,
            "n0",
            vec![resource(ADDRESS, "bad", "0", WORKLOAD)],
            &[],
        ))
        .await;
    let resources = vec![
        resource(ADDRESS, "bad", "1", &[0xff]),
        resource(ADDRESS, "good", "1", SERVICE),
        resource(AUTHORIZATION, "other", "1", POLICY),
        Resource {
            name: "empty".into(),
            ..Resource::default()
        },
    ];
    let Outcome { answer, updates, .. } = session.take(response(ADDRESS, "n1", resources, &["gone"])).await;
    let error = answer.error_detail.unwrap();
    for name in ["bad: ", "other: it is of type", "empty: it is empty"] {
        assert!(error.message.contains(name), "{}", error.message);
    }
    assert!(!error.message.contains("good"));
    assert_eq!((error.code, error.message.matches("; ").count()), (3, 2));
    assert!(matches!(
        &*updates,
        [Update::Service(_), Update::RemoveAddress(_)]
    ));
    // Of what was refused the version before is told, so that it is sent again.
    let names: Vec<_> = known(&mut session, ADDRESS);
    assert_eq!(
        names,
        [
            ("bad".to_owned(), "0".to_owned()),
            ("good".to_owned(), "1".to_owned())
        ]
    );
    assert!(!session.accepted.contains(AUTHORIZATION));
}

#[tokio::test]
async fn a_first_state_with_something_bad_is_not_the_first_state() {
    let mut session = session();
    session.take(response(ADDRESS, "n", vec![], &[])).await;
    let bad = vec![resource(AUTHORIZATION, "shop/p", "1", &[0xff])];
    session.take(response(AUTHORIZATION, "n", bad, &[])).await;
    assert!(!session.awaited().is_empty());
    session
        .take(response(AUTHORIZATION, "n", vec![], &["shop/p"]))
        .await;
    assert!(session.awaited().is_empty());
}

#[tokio::test]
async fn what_was_not_asked_for_is_acknowledged_and_passed_over() {
    let mut session = session();
    let Outcome { answer, updates, .. } = session
        .take(response(
            "other",
            "n",
            vec![resource("other", "x", "1", &[])],
            &[],
        ))
        .await;
    assert_eq!(
        (&*answer.type_url, &*answer.response_nonce, updates.len()),
        ("other", "n", 0)
    );
    assert!(answer.error_detail.is_none());
}

#[tokio::test]
async fn very_many_resources_are_taken_and_very_many_problems_told_in_short() {
    let mut session = session();
    let many = (0..2000).map(|number| resource(ADDRESS, &format!("bad-{number}"), "1", &[0xff]));
    let good = resource(ADDRESS, "good", "1", WORKLOAD);
    let Outcome { answer, updates, .. } = session
        .take(response(ADDRESS, "n", many.chain([good]).collect(), &[]))
        .await;
    assert_eq!(updates.len(), 1);
    let message = answer.error_detail.as_ref().unwrap().message.clone();
    assert!(
        message.contains("bad-0: ") && message.contains(" more"),
        "{message}"
    );
    assert!(answer.encoded_len() < 2 * MAX_EXPLANATION);
}

/// Policy shop/p: a rule with a clause with a match whose extension is "new".
const UNKNOWN_CONDITION: &[u8] = b"\x0a\x01p\x12\x04shop\x2a\x0b\x0a\x09\x12\x07\x6a\x05\x0a\x03new";

#[tokio::test]
async fn what_counts_in_part_is_told_without_its_version() {
    let mut session = session();
    let partly = vec![resource(AUTHORIZATION, "shop/p", "7", UNKNOWN_CONDITION)];
    let Outcome { answer, updates, .. } = session.take(response(AUTHORIZATION, "n", partly, &[])).await;
    assert!(answer.error_detail.is_some());
    assert!(matches!(&*updates, [Update::Policy(_)]));
    // So that it comes again, and its removal is told.
    let told = ("shop/p".to_owned(), String::new());
    assert_eq!(known(&mut session, AUTHORIZATION), [told]);
}

#[tokio::test]
async fn of_more_than_can_be_told_the_first_response_is_everything() {
    let mut session = session();
    let name = |number: usize| format!("Kubernetes//Pod/namespace/deployment-5d4f8c7b9d-{number:06}");
    let resources = |numbers: std::ops::Range<usize>| {
        let make = |number| resource(ADDRESS, &name(number), "2026-12-02/1", WORKLOAD);
        numbers.map(make).collect::<Vec<_>>()
    };
    let count = MAX_VERSIONS / 60;
    session
        .take(response(ADDRESS, "n", resources(0..count), &[]))
        .await;
    for request in session.first_requests() {
        assert!(request.encoded_len() < 4 << 20);
        assert!(request.initial_resource_versions.is_empty());
    }
    let mut again = resources(0..count - 3);
    // What is there and cannot be understood is not gone.
    again.push(resource(ADDRESS, &name(count - 3), "2", &[0xff]));
    let Outcome { answer, updates, .. } = session.take(response(ADDRESS, "n", again, &[])).await;
    assert_eq!(answer.error_detail.unwrap().message.matches(": ").count(), 2);
    let gone: Vec<_> = updates
        .into_iter()
        .filter(|update| !matches!(update, Update::Workload(_)))
        .collect();
    let expected = [count - 2, count - 1].map(|number| Update::RemoveAddress(name(number).into()));
    assert_eq!(gone, expected);
    // The next one is a change like any other.
    let Outcome { updates, .. } = session.take(response(ADDRESS, "n", resources(0..1), &[])).await;
    assert_eq!(updates.len(), 1);
}

#[tokio::test]
async fn as_much_as_can_be_told_is_told() {
    let mut session = session();
    let make = |number| resource(ADDRESS, &format!("w-{number}"), "1", WORKLOAD);
    session
        .take(response(ADDRESS, "n", (0..1000).map(make).collect(), &[]))
        .await;
    assert_eq!(known(&mut session, ADDRESS).len(), 1000);
    let Outcome { updates, .. } = session.take(response(ADDRESS, "n", vec![], &[])).await;
    assert_eq!(updates, []);
    // No entry is longer than it is taken for.
    let long = ("n".repeat(2000), "v".repeat(100));
    let request = DeltaDiscoveryRequest {
        initial_resource_versions: [long.clone()].into(),
        ..DeltaDiscoveryRequest::default()
    };
    assert!(request.encoded_len() <= entry_bytes(&long.0, &long.1));
}

#[tokio::test]
async fn on_demand_only_names_are_asked_for_and_policies_are_the_first_state() {
    let mut session = Session::new(&Identity::default(), true);
    let first = |session: &mut Session| {
        let mut of = |url| session.first_requests().find(|one| one.type_url == url).unwrap();
        (of(ADDRESS), of(AUTHORIZATION))
    };
    let (addresses, policies) = first(&mut session);
    assert_eq!(addresses.resource_names_subscribe, ["*"]);
    assert_eq!(addresses.resource_names_unsubscribe, ["*"]);
    assert!(policies.resource_names_subscribe.is_empty() && policies.resource_names_unsubscribe.is_empty());
    assert_eq!(session.names(Vec::new()).count(), 0);

    session.take(response(AUTHORIZATION, "n1", vec![], &[])).await;
    assert!(session.awaited().is_empty());
    let mut bad = resource(ADDRESS, "w", "1", &[0xff]);
    bad.aliases = vec!["/10.0.0.1".into()];
    let resources = vec![bad, resource(ADDRESS, "s", "2", SERVICE)];
    let outcome = session
        .take(response(ADDRESS, "n2", resources, &["/10.0.0.9"]))
        .await;
    assert!(outcome.answer.error_detail.is_some());
    let Answers {
        present,
        absent,
        refused,
    } = outcome.answers;
    assert_eq!(absent, ["/10.0.0.9"]);
    // What is not understood is not nothing.
    assert_eq!(refused, ["w", "/10.0.0.1"].map(str::to_owned).into());
    let Update::Service(service) = &outcome.updates[0] else {
        panic!("no service");
    };
    for name in ["s", &service.host.to_string()] {
        assert!(present.contains(name), "{name}: {present:?}");
    }

    // At the next connection, what came by another name than it was asked for is asked for as well.
    let (addresses, _) = first(&mut session);
    assert_eq!(addresses.initial_resource_versions["s"], "2");
    let names: Vec<_> = session.names(vec!["/10.0.0.1".to_owned()]).collect();
    assert_eq!(names.len(), 1);
    assert_eq!(names[0].resource_names_subscribe, ["/10.0.0.1", "s"]);
}

#[test]
fn many_names_are_asked_for_in_requests_that_every_server_takes() {
    let session = Session::new(&Identity::default(), true);
    let all: Vec<_> = (0..100_000)
        .map(|number| format!("Kubernetes//Pod/some-namespace/some-deployment-{number:08}"))
        .collect();
    let requests: Vec<_> = session.names(all.clone()).collect();
    assert!(
        requests
            .iter()
            .all(|request| request.encoded_len() < 5 * MAX_NAMES / 4)
    );
    let asked: Vec<_> = requests
        .into_iter()
        .flat_map(|request| request.resource_names_subscribe)
        .collect();
    assert_eq!(asked, all);
}

#[test]
fn what_is_given_up_is_told_before_what_is_asked_for() {
    let texts = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    for (unsubscribe, subscribe, requests) in [
        (&[][..], &[][..], 0),
        (&["a"], &[], 1),
        (&[], &["a"], 1),
        (&["a"], &["a"], 2),
    ] {
        let changes = Changes {
            unsubscribe: texts(unsubscribe),
            subscribe: texts(subscribe),
        };
        let told: Vec<_> = Session::name_changes(changes).collect();
        assert_eq!(told.len(), requests);
        assert!(
            told.iter()
                .all(|one| one.type_url == ADDRESS && one.node.is_none())
        );
        if let [first, second] = &*told {
            assert_eq!(first.resource_names_unsubscribe, ["a"]);
            assert_eq!(second.resource_names_subscribe, ["a"]);
        }
    }
}
