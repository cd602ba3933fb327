//! Clocks that differ: certificates of the future and of the past, and those that live for seconds.

use std::{
    thread,
    time::{Duration, Instant},
};

use redirector_tests::{
    app::{self, App},
    control_plane::{Demo, echoes, open},
    istio_ca::Mood,
    mesh::PORT,
    node::Family,
    wait,
};

use crate::{LONG_LIFE, state, with_authority};

/// Asks the server's echo; since the time before, the tunnel was closed, so that this takes a handshake.
fn handshake(demo: &Demo) -> std::io::Result<String> {
    thread::sleep(Duration::from_millis(400));
    app::ask(&demo.client.ns, demo.server.addr(Family::V4, PORT), "hello\n")
}

fn echo(demo: &Demo) -> App {
    demo.serve(Family::V4, app::echo)
}

pub(crate) fn a_certificate_of_the_future_is_told_and_used_when_its_time_comes() {
    let ahead = Duration::from_secs(20);
    let (_ca, demo, []) = with_authority(Mood::Ahead(ahead), LONG_LIFE);
    let _echo = echo(&demo);
    wait::until("the clock to be told", || {
        demo.agent.log().contains("a clock is wrong").then_some(())
    });
    assert!(handshake(&demo).is_err());
    let error = wait::until("the refusal in the access log", || {
        let log = demo.agent.access_log();
        log.into_iter().find_map(|mut entry| entry.remove("error"))
    });
    assert!(error.contains("not valid yet"), "{error}");
    wait::within(3 * ahead, "their time", || handshake(&demo).ok());
}

pub(crate) fn a_clock_that_goes_ahead_breaks_nothing_that_works() {
    let (ca, demo, []) = with_authority(Mood::Good, Duration::from_secs(24));
    let _echo = echo(&demo);
    wait::until("the pods to meet", || handshake(&demo).ok());
    let stream = open(&demo, Family::V4);
    ca.set(Mood::Ahead(Duration::from_secs(5)));
    let pods = [&demo.client, &demo.server];
    let chains = || pods.map(|pod| demo.certificate(pod)["certChain"].clone());
    let before = chains();
    wait::within(Duration::from_secs(120), "new certificates", || {
        handshake(&demo).expect("the old ones are good, and then the new ones");
        let now = chains();
        (now[0] != before[0] && now[1] != before[1]).then_some(())
    });
    handshake(&demo).unwrap();
    assert!(demo.agent.log().contains("a clock is wrong"));
    echoes(&stream).unwrap();
}

pub(crate) fn a_clock_that_is_behind_is_told_and_asked_again() {
    let behind = Duration::from_secs(3600);
    let (ca, demo, []) = with_authority(Mood::Behind(behind), behind / 2);
    let _echo = echo(&demo);
    let text = state(&demo, &demo.client, "Unavailable");
    for part in ["expired at 2", "a clock is wrong", &demo.client.identity()] {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
    assert!(handshake(&demo).is_err());
    // By less than their life: they serve for what is left of it.
    ca.set(Mood::Behind(behind / 3));
    wait::until("the pods to meet", || handshake(&demo).ok());
    assert_eq!(demo.certificate(&demo.server)["state"], "Available");
}

pub(crate) fn certificates_that_live_for_seconds_are_no_storm() {
    let life = Duration::from_secs(4);
    let begun = Instant::now();
    let (ca, demo, []) = with_authority(Mood::Good, life);
    let _echo = echo(&demo);
    wait::until("the pods to meet", || handshake(&demo).ok());
    let stream = open(&demo, Family::V4);
    wait::until("some lives", || {
        wait::until("the pods to meet", || handshake(&demo).ok());
        (ca.asked().len() >= 12).then_some(())
    });
    echoes(&stream).unwrap();
    // Two identities, each once a second at most.
    let (asked, seconds) = (ca.asked().len() as f64, begun.elapsed().as_secs_f64());
    assert!(asked <= 2.0 * (seconds + 1.0), "{asked} in {seconds} s");
}
