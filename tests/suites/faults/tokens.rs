//! A token whose time is over.

use std::fs;

use redirector_tests::{
    ads::{AUTHORIZATION, Ads, deny},
    app,
    control_plane::Ground,
    istio_ca::IstioCa,
    node::Family,
    wait,
    workloads::Workloads,
};

use crate::{LONG_LIFE, NOTICED, state};

pub(crate) fn a_token_that_is_refused_is_told_and_the_next_one_is_used() {
    let ground = Ground::new();
    let credentials = ground.credentials();
    let late = ground.node.pod("late");
    let mut ads = Ads::start(&ground.node.host.ns, &credentials);
    let ca = IstioCa::start(&ground.node.host.ns, &credentials, LONG_LIFE);
    ads.edit(|edit| edit.pods([&ground.client, &ground.server, &late]));
    let environment = [ads.environment(), ca.environment()].concat();
    let demo = ground.start(environment, &Workloads::default());
    let _who = demo.serve(Family::V4, app::who);
    demo.meets(Family::V4);

    fs::write(&credentials.accepted, "plane-secret-of-today").unwrap();
    // A stream shows its token when it begins.
    ads.down();
    ads.up(&demo.node.host.ns);
    demo.agent.enrol(&late);
    let text = state(&demo, &late, "Unavailable");
    for part in [
        "Unauthenticated: the token is not good",
        &late.identity(),
        "https://",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
    wait::until("xDS to be refused", || {
        let log = demo.agent.log();
        let mut lines = log
            .lines()
            .filter(|line| line.contains("the mesh stays as it is"));
        lines
            .any(|line| line.contains("Unauthenticated: the token is not good"))
            .then_some(())
    });
    demo.meets(Family::V4);
    assert_eq!((ads.connections(), demo.readiness().0), (1, 200));

    // As a mount's is, with a line's end more or less.
    fs::write(&credentials.token, "plane-secret-of-today\n").unwrap();
    state(&demo, &late, "Available");
    let found = || (ads.connections() == 2).then_some(());
    wait::within(NOTICED, "xDS to be taken up again", found);
    ads.edit(|edit| edit.policy(&deny("demo")));
    assert_eq!(ads.answered(AUTHORIZATION), None);
    demo.parts(Family::V4);
    demo.tells_no_secrets();
}
