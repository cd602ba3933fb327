//! Peers whose certificate is good and who are refused all the same, or let in under another name.

use std::fs;

use redirector_tests::{
    app::{self, App},
    mesh::PORT,
    node::{Family, Node},
    wait,
};

use super::{World, echoes, identity, is_cut, open, open_from, put, replace};

/// Lists by rcgen and by openssl; all pods' certificates are of one root.
pub(crate) fn who_is_revoked_is_refused_and_cut_off_and_comes_back() {
    let node = Node::new();
    let [certificates, lists] = ["certificates", "crl.pem"].map(|name| node.directory().join(name));
    fs::create_dir(&certificates).unwrap();
    let arguments = [
        "--cert-dir",
        certificates.to_str().unwrap(),
        "--crl-file",
        lists.to_str().unwrap(),
    ];
    let no_ca = vec![("FAKE_CA".to_owned(), "false".to_owned())];
    let world = World::new(&arguments, no_ca, node);
    let _echo = App::start(&world.server.ns, (Family::V4.any(), PORT).into(), app::echo);
    let pods = [&world.client, &world.server, &world.other];
    let files = pods.map(|pod| world.issue(pod, &pod.name));
    for (pod, files) in pods.iter().zip(&files) {
        put(&certificates.join(&pod.name), files);
    }
    let [client, server, _] = &files;

    // Without its file, an agent lets everybody in, and says so.
    let (problem, in_force) = world.revocations();
    assert!(problem.contains("crl.pem") && in_force.is_empty(), "{problem}");
    assert!(
        world
            .agent
            .log()
            .contains("no revocation list (CRL_PATH) is in force")
    );
    world.meets();
    replace(&lists, &world.root.crl(&[]));
    wait::until("the empty list", || {
        (world.revocations() == (String::new(), vec![0])).then_some(())
    });
    world.meets();

    let (cut, stays) = (open(&world), open_from(&world, &world.other));
    echoes(&cut);
    echoes(&stays);
    replace(&lists, &world.root.crl(&[&client.serial()]));
    is_cut(&cut);
    echoes(&stays);
    assert!(world.ask().is_err());
    world.tells(&["tunnel closed", &identity(&world.client), &client.serial()]);
    world.tells(&[
        "TLS handshake failed",
        &identity(&world.client),
        &client.serial(),
        "has been revoked by",
    ]);
    echoes(&open_from(&world, &world.other));

    // What cannot be read lifts nothing.
    for garbage in ["-----BEGIN X509 CRL-----\nMIIB", ""] {
        replace(&lists, garbage);
        wait::until("the garbage to be told", || {
            let (problem, in_force) = world.revocations();
            assert_eq!(in_force, [1]);
            let told = if garbage.is_empty() {
                "no revocation list"
            } else {
                "cut off"
            };
            problem.contains(told).then_some(())
        });
        assert!(world.ask().is_err());
    }

    // The other side's, by somebody else's hand: the client is let in, and lets nobody answer.
    replace(
        &lists,
        &world.root.crl_by_openssl(world.node.directory(), &[server]),
    );
    wait::until("openssl's list", || {
        (world.revocations() == (String::new(), vec![1])).then_some(())
    });
    is_cut(&stays);
    assert!(world.ask().is_err());
    let refused = format!("{} is refused", identity(&world.server));
    world.tells(&[
        "TLS handshake with",
        &refused,
        &server.serial(),
        "has been revoked by",
    ]);

    // A new certificate is another number.
    put(
        &certificates.join(&world.server.name),
        &world.issue(&world.server, "renewed"),
    );
    world.meets();
    world.tells_no_secrets();
}

/// The client is of another trust domain than the server, whose policy names it as one of the server's own.
pub(crate) fn an_alias_of_the_trust_domain_is_let_in_and_a_foreign_one_is_not() {
    for (domain, is_alias) in [("old.domain", true), ("foreign.domain", false)] {
        let node = Node::new();
        let certificates = node.directory().join("certificates");
        fs::create_dir(&certificates).unwrap();
        let arguments = [
            "--cert-dir",
            certificates.to_str().unwrap(),
            "--trust-domain-alias",
            "older.domain",
            "--trust-domain-alias",
            "old.domain",
        ];
        let no_ca = vec![("FAKE_CA".to_owned(), "false".to_owned())];
        let world = World::with(&arguments, no_ca, node, |workloads| {
            let principal = serde_json::json!({"principals": [{"Exact": "cluster.local/ns/demo/sa/client"}]});
            workloads
                .with_workload_key("client", "trustDomain", domain.into())
                .with_policy("client-alone", "Allow", &[principal])
        });
        let _echo = App::start(&world.server.ns, (Family::V4.any(), PORT).into(), app::echo);
        let of_client = identity(&world.client).replace("cluster.local", domain);
        let directory = world.node.directory();
        let client = world.root.issue(directory, "client", &of_client);
        put(&certificates.join("client"), &client);
        for pod in [&world.server, &world.other] {
            put(&certificates.join(&pod.name), &world.issue(pod, &pod.name));
        }
        if is_alias {
            world.meets();
            // It is in the logs as it is; the policy does not let in just anybody.
            world.tells(&["inbound", &of_client]);
            let other = app::ask(&world.other.ns, world.server.addr(Family::V4, PORT), "hello\n");
            assert!(other.map_or(true, |answer| answer.is_empty()));
        } else {
            world.tells(&["TLS handshake failed", &of_client, "not of trust domain"]);
            assert!(world.ask().is_err());
        }
    }
}
