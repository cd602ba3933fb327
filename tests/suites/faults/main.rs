//! Control planes that go wrong: gone without a word, silent, with another token, with a clock of their own, and with five hundred
//! identities at one instant.

mod clocks;
mod connections;
mod crowd;
mod tokens;

use std::{process::ExitCode, time::Duration};

use redirector_tests::{
    control_plane::{Demo, Ground},
    istio_ca::{IstioCa, Mood},
    node::Pod,
    suite::{Needs, case, main as suite},
    wait,
    workloads::Workloads,
};

const LONG_LIFE: Duration = Duration::from_secs(24 * 3600);

/// For what waits for a deadline of the agent's own: HTTP/2's pings and requests have some 40 s, and then comes a wait of up to 22 s.
const NOTICED: Duration = Duration::from_secs(240);

fn main() -> ExitCode {
    let cases = vec![
        case(
            "five_hundred_identities_at_one_instant_are_no_storm",
            crowd::five_hundred_identities_at_one_instant_are_no_storm,
        ),
        case(
            "a_control_plane_that_vanishes_is_noticed_and_found_again",
            connections::a_control_plane_that_vanishes_is_noticed_and_found_again,
        ),
        case(
            "a_silent_control_plane_is_left_and_tried_again",
            connections::a_silent_control_plane_is_left_and_tried_again,
        ),
        case(
            "a_silent_authority_holds_up_nobody_for_ever",
            connections::a_silent_authority_holds_up_nobody_for_ever,
        ),
        case(
            "an_authority_that_takes_connections_and_no_more_is_told",
            connections::an_authority_that_takes_connections_and_no_more_is_told,
        ),
        case(
            "a_token_that_is_refused_is_told_and_the_next_one_is_used",
            tokens::a_token_that_is_refused_is_told_and_the_next_one_is_used,
        ),
        case(
            "a_certificate_of_the_future_is_told_and_used_when_its_time_comes",
            clocks::a_certificate_of_the_future_is_told_and_used_when_its_time_comes,
        ),
        case(
            "a_clock_that_goes_ahead_breaks_nothing_that_works",
            clocks::a_clock_that_goes_ahead_breaks_nothing_that_works,
        ),
        case(
            "a_clock_that_is_behind_is_told_and_asked_again",
            clocks::a_clock_that_is_behind_is_told_and_asked_again,
        ),
        case(
            "certificates_that_live_for_seconds_are_no_storm",
            clocks::certificates_that_live_for_seconds_are_no_storm,
        ),
        case(
            "a_wrong_first_answer_is_asked_for_again_whatever_its_life",
            a_wrong_first_answer_is_asked_for_again_whatever_its_life,
        ),
    ];
    suite(Needs::Agent, 2, cases)
}

/// An agent in a mesh of a file, with an authority's certificates; and pods that are known and not enrolled.
fn with_authority<const LATE: usize>(mood: Mood, lifetime: Duration) -> (IstioCa, Demo, [Pod; LATE]) {
    let ground = Ground::new();
    let ca = IstioCa::start(&ground.node.host.ns, &ground.credentials(), lifetime);
    ca.set(mood);
    let late = std::array::from_fn(|number| ground.node.pod(&format!("late{number}")));
    let pods = [&ground.client, &ground.server].into_iter().chain(&late);
    let workloads = Workloads::hbone(pods);
    let demo = ground.start(ca.environment(), &workloads);
    (ca, demo, late)
}

/// Waits until the config dump says this of the state of a pod's identity, and returns all it says.
fn state(demo: &Demo, pod: &Pod, part: &str) -> String {
    wait::within(NOTICED, &format!("{} to be {part:?}", pod.name), || {
        let state = demo.certificate(pod)["state"].as_str().unwrap().to_owned();
        state.contains(part).then_some(state)
    })
}

fn a_wrong_first_answer_is_asked_for_again_whatever_its_life() {
    let wrong = [
        (
            Mood::For("spiffe://cluster.local/ns/demo/sa/other".into()),
            "is for spiffe://cluster.local/ns/demo/sa/other",
        ),
        (Mood::OtherKey, "cannot be used"),
        (Mood::NoRoot, "no root"),
        (Mood::Garbage, "has no"),
    ];
    let (ca, demo, late) = with_authority::<4>(Mood::Good, LONG_LIFE);
    for ((mood, told), pod) in wrong.into_iter().zip(&late) {
        ca.set(mood);
        demo.agent.enrol(pod);
        let text = state(&demo, pod, "Unavailable");
        assert!(text.contains(told) && text.contains(&pod.identity()), "{text}");
        ca.set(Mood::Good);
        state(&demo, pod, "Available");
    }
    demo.tells_no_secrets();
}
