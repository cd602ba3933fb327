//! The chart and the manifest: rendered by Helm's own engine, parsed strictly, and held against what the agent really takes, needs and
//! uses; and the agent in a container as the DaemonSet describes it.

mod chart;
mod container;
mod image;
mod objects;
mod ways;

use std::process::ExitCode;

use redirector_tests::suite::{Needs, case, main as suite};

fn main() -> ExitCode {
    let mut cases = vec![
        case(
            "the_manifest_is_the_chart_with_its_defaults",
            chart::the_manifest_is_the_chart_with_its_defaults,
        ),
        case(
            "schema_and_values_name_the_same_settings",
            chart::schema_and_values_name_the_same_settings,
        ),
        case("contradictions_are_refused", chart::contradictions_are_refused),
        case(
            "wrong_settings_are_told_by_check",
            chart::wrong_settings_are_told_by_check,
        ),
        case(
            "agents_have_the_rights_that_the_way_needs",
            chart::agents_have_the_rights_that_the_way_needs,
        ),
        case(
            "the_image_is_built_from_the_containerfile",
            image::the_image_is_built_from_the_containerfile,
        ),
        case(
            "the_agent_works_as_the_daemonset_says",
            container::the_agent_works_as_the_daemonset_says,
        ),
        case(
            "rules_of_iptables_can_be_written_from_the_container",
            container::rules_of_iptables_can_be_written_from_the_container,
        ),
        case(
            "a_proxy_in_another_container_serves_the_pods",
            container::a_proxy_in_another_container_serves_the_pods,
        ),
        case(
            "what_the_daemonset_leaves_out_is_missed",
            container::what_the_daemonset_leaves_out_is_missed,
        ),
    ];
    cases.extend(ways::WAYS.iter().map(|way| {
        case(format!("objects_are_right_{}", way.name), || {
            chart::objects_are_right(way)
        })
    }));
    suite(Needs::Peers, 2, cases)
}
