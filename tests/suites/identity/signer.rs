//! A signer behind Kubernetes' API.

use redirector_tests::{
    api_server::{ApiServer, Mood},
    app::{self, App},
    mesh::PORT,
    node::{Family, Node},
    wait,
};

use super::{World, echoes, identity, open};

/// Waits until no request is left in the cluster.
fn is_tidied(api: &ApiServer) {
    // What is not there at the first try is looked for twice more.
    wait::within(3 * wait::DEADLINE, "the requests to be removed", || {
        api.objects().is_empty().then_some(())
    });
}

pub(crate) fn certificates_come_from_a_signer_of_kubernetes_whatever_it_did_before() {
    let node = Node::new();
    let api = ApiServer::start(&node.host.ns, node.directory());
    api.set(Mood::Denying("not today"));
    let world = World::new(&["--svid-ttl", "20m"], api.environment(), node);
    let _echo = App::start(&world.server.ns, (Family::V4.any(), PORT).into(), app::echo);
    let denied = ["was denied", "tests.example/mesh", "TestsDeny: not today"];
    world.lacks(&world.client, &denied);
    for (mood, words) in [
        (
            Mood::Failing("a broken key"),
            &["has failed", "TestsFail: a broken key"][..],
        ),
        (
            Mood::Forbidding,
            &[
                "creating a CertificateSigningRequest",
                "403 Forbidden",
                "agents cannot create",
            ],
        ),
        (
            Mood::For("spiffe://cluster.local/ns/demo/sa/other".to_owned()),
            &["the certificate is for spiffe://cluster.local/ns/demo/sa/other"],
        ),
    ] {
        api.set(mood);
        world.lacks(&world.server, words);
    }
    assert!(world.ask().is_err(), "nobody has a certificate");
    api.set(Mood::Good);
    world.meets();
    let stream = open(&world);
    echoes(&stream);
    is_tidied(&api);
    let asked: Vec<_> = api
        .made()
        .iter()
        .map(|made| made["spec"]["expirationSeconds"].clone())
        .collect();
    assert!(asked.iter().all(|seconds| *seconds == 1200), "{asked:?}");

    // Another token between two requests.
    assert_eq!(api.strangers(), 0);
    api.rotate_token("rotated-secret");
    let late = world.node.pod("late");
    world.agent.enrol(&late);
    wait::until("another certificate", || {
        (world.certificate(&late)["state"] == "Available").then_some(())
    });
    is_tidied(&api);
    assert_eq!(api.strangers(), 0, "every request had the newest token");
    world.meets();
    echoes(&stream);
    world.tells_no_secrets();
    for text in [world.dump(), world.agent.log()] {
        assert!(
            !text.contains("-secret") && !text.contains("CERTIFICATE REQUEST"),
            "{text}"
        );
    }
}

pub(crate) fn requests_to_a_signer_are_approved_by_the_agent_where_that_is_wanted() {
    let node = Node::new();
    let api = ApiServer::start(&node.host.ns, node.directory());
    api.set(Mood::Waiting);
    let world = World::new(&["--kubernetes-signer-approve"], api.environment(), node);
    let _echo = App::start(&world.server.ns, (Family::V4.any(), PORT).into(), app::echo);
    world.meets();
    is_tidied(&api);
}

pub(crate) fn a_signer_that_never_answers_is_told_and_recovers() {
    let node = Node::new();
    let api = ApiServer::start(&node.host.ns, node.directory());
    api.set(Mood::Waiting);
    let world = World::new(&[], api.environment(), node);
    let _echo = App::start(&world.server.ns, (Family::V4.any(), PORT).into(), app::echo);
    // A pod that goes meanwhile takes its request with it.
    let gone = world.node.pod("gone");
    world.agent.enrol(&gone);
    let request = || {
        let mut all = api.objects().into_iter();
        all.find(|(_, whose)| *whose == identity(&gone))
    };
    wait::until("its request", request);
    world.agent.release(&gone);
    wait::until("its request to be removed", || request().is_none().then_some(()));
    let words = [
        "has not answered CertificateSigningRequest",
        "not approved",
        "--kubernetes-signer-approve",
    ];
    world.lacks(&world.client, &words);
    world.lacks(&world.server, &words);
    api.set(Mood::Good);
    world.meets();
    is_tidied(&api);
}
