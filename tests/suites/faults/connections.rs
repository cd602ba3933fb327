//! Control planes that are there and say nothing, and those that are gone and say nothing.

use std::net::TcpListener;

use redirector_tests::{
    ads::{ADDRESS, AUTHORIZATION, Ads, deny},
    agent::Options,
    app,
    control_plane::Ground,
    istio_ca::{IstioCa, Mood},
    mesh::PORT,
    netns::Namespace,
    node::Family,
    process::command,
    wait,
    workloads::Workloads,
};

use crate::{LONG_LIFE, NOTICED, state, with_authority};

/// Nothing comes out of a namespace or into it, and nobody is told.
struct Cut<'a>(&'a Namespace);

impl<'a> Cut<'a> {
    fn new(ns: &'a Namespace) -> Self {
        nft(
            ns,
            "add table inet cut { chain in { type filter hook prerouting priority -300; policy drop; }; \
             chain out { type filter hook postrouting priority 300; policy drop; }; }",
        );
        Self(ns)
    }

    fn mend(self) {
        nft(self.0, "delete table inet cut");
    }
}

fn nft(ns: &Namespace, arguments: &str) {
    let status = command(ns, "nft").arg(arguments).status().unwrap();
    assert!(status.success(), "{arguments}");
}

pub(crate) fn a_control_plane_that_vanishes_is_noticed_and_found_again() {
    let ground = Ground::new();
    let credentials = ground.credentials();
    let late = ground.node.pod("late");
    let outside = &ground.node.outside;
    let mut ads = Ads::start_at(&outside.ns, outside.v4.into(), &credentials);
    let mut ca = IstioCa::start_at(&outside.ns, outside.v4.into(), &credentials, LONG_LIFE);
    ads.edit(|edit| edit.pods([&ground.client, &ground.server, &late]));
    let environment = [ads.environment(), ca.environment()].concat();
    let demo = ground.start(environment, &Workloads::default());
    let _who = demo.serve(Family::V4, app::who);
    demo.meets(Family::V4);

    let cut = Cut::new(&demo.node.outside.ns);
    // The host knows nothing of these connections any more; what it sends at their end is lost.
    ads.down();
    ca.down();
    // This one's request goes by the connection that leads nowhere.
    demo.agent.enrol(&late);
    let missed = || demo.agent.log().contains("the mesh stays as it is").then_some(());
    wait::within(NOTICED, "xDS to be missed", missed);
    // Not even connected: the connection from before has been given up.
    state(&demo, &late, "not connected within 5s");
    demo.meets(Family::V4);
    assert_eq!(demo.readiness().0, 200);
    let refused = app::ask_who(&late.ns, demo.server.addr(Family::V4, PORT));
    assert!(refused.is_err(), "{refused:?}");

    cut.mend();
    ads.edit(|edit| edit.policy(&deny("demo")));
    ads.up(&demo.node.outside.ns);
    ca.up(&demo.node.outside.ns);
    state(&demo, &late, "Available");
    let found = || (ads.connections() == 2).then_some(());
    wait::within(NOTICED, "xDS to be found again", found);
    assert_eq!(ads.answered(AUTHORIZATION), None);
    demo.parts(Family::V4);
    ads.edit(|edit| edit.remove(AUTHORIZATION, "demo/deny"));
    assert_eq!(ads.answered(AUTHORIZATION), None);
    demo.meets(Family::V4);
    assert_eq!(ads.connections(), 2);
    let again = ads.requests();
    let again = again.iter().rev().find(|request| request.node.is_some()).unwrap();
    assert!(
        again.type_url != ADDRESS || again.initial_resource_versions.len() == 3,
        "{again:?}"
    );
    demo.tells_no_secrets();
}

pub(crate) fn a_silent_control_plane_is_left_and_tried_again() {
    let ground = Ground::new();
    let ads = Ads::start(&ground.node.host.ns, &ground.credentials());
    ads.edit(|edit| edit.pods([&ground.client, &ground.server]));
    for url in [ADDRESS, AUTHORIZATION] {
        ads.withhold(url);
    }
    let options = Options {
        environment: ads.environment(),
        unready: true,
        ..Options::default()
    };
    let demo = ground.start_with(options, &Workloads::default());
    let _who = demo.serve(Family::V4, app::who);
    wait::within(NOTICED, "the silence to be told", || {
        demo.agent.log().contains("no answer within 60s").then_some(())
    });
    let again = || (ads.connections() == 2).then_some(());
    wait::within(NOTICED, "another try", again);
    assert_eq!(demo.readiness().0, 500);
    ads.release();
    wait::until("the agent to be ready", || {
        (demo.readiness().0 == 200).then_some(())
    });
    demo.meets(Family::V4);
    assert_eq!(ads.connections(), 2);
}

pub(crate) fn a_silent_authority_holds_up_nobody_for_ever() {
    // More than may ask at once.
    let (ca, demo, late) = with_authority::<12>(Mood::Good, LONG_LIFE);
    let _who = demo.serve(Family::V4, app::who);
    demo.meets(Family::V4);
    ca.set(Mood::Silent);
    late.iter().for_each(|pod| demo.agent.enrol(pod));
    // Who waits is told, long before the request has failed.
    let refused = app::ask_who(&late[0].ns, demo.server.addr(Family::V4, PORT));
    assert!(refused.is_err(), "{refused:?}");
    let error = wait::until("the refusal in the access log", || {
        let log = demo.agent.access_log();
        let mut errors = log.into_iter().filter_map(|mut entry| entry.remove("error"));
        errors.find(|error| error.contains(&late[0].identity()))
    });
    assert!(error.contains("did not answer within 5s"), "{error}");
    demo.meets(Family::V4);
    for pod in &late {
        let text = state(&demo, pod, "Unavailable");
        assert!(text.contains("no answer within 30s"), "{text}");
    }
    demo.meets(Family::V4);
    ca.set(Mood::Good);
    for pod in &late {
        state(&demo, pod, "Available");
    }
    // One that was given up may not have left yet when the next one comes: in the suite's case of a crowd none is given up.
    let most = ca.most_at_once();
    assert!((8..=16).contains(&most), "{most}");
    let seen = app::ask_who(&late[0].ns, demo.server.addr(Family::V4, PORT)).unwrap();
    assert_eq!(seen, late[0].v4.to_string());
}

pub(crate) fn an_authority_that_takes_connections_and_no_more_is_told() {
    let (mut ca, demo, [late]) = with_authority::<1>(Mood::Good, LONG_LIFE);
    let _who = demo.serve(Family::V4, app::who);
    demo.meets(Family::V4);
    ca.down();
    // The kernel takes what nobody will accept.
    let host = &demo.node.host.ns;
    let deaf = host.run(|| TcpListener::bind(ca.addr())).unwrap();
    demo.agent.enrol(&late);
    let text = state(&demo, &late, "Unavailable");
    for part in [
        "not connected within 5s",
        &ca.addr().to_string(),
        &late.identity(),
    ] {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
    demo.meets(Family::V4);
    drop(deaf);
    ca.up(host);
    state(&demo, &late, "Available");
}
