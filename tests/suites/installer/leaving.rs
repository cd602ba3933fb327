//! What becomes of the plugin and of the pods when an agent stops: all of it stays where another comes, and goes where it is
//! uninstalled.

use redirector_tests::{
    agent::{Agent, Options, binary},
    daemonset_api::{DAEMONSET, DaemonSetApi, Mood},
    footprint::netns_links,
    node::Node,
    process::{command, output},
    suite::{Case, case},
    wait,
    workloads::Workloads,
};

use super::{CONF, Cni, DEADLINE, LIST};

/// What the API server says while the agent runs, one after the other, what when it stops, and whether the agent leaves. None: it is
/// away.
type Row = (&'static str, &'static [Mood], Option<Mood>, bool);

const ROWS: [Row; 17] = [
    ("restart", &[Mood::There], Some(Mood::There), false),
    ("selected", &[Mood::For("on")], Some(Mood::For("on")), false),
    ("deleted", &[Mood::There], Some(Mood::Going), true),
    ("gone", &[Mood::There], Some(Mood::Gone), true),
    ("no_longer_selected", &[Mood::There], Some(Mood::For("off")), true),
    (
        "rights_go_with_it",
        &[Mood::There, Mood::Gone],
        Some(Mood::Forbidding),
        true,
    ),
    (
        "account_goes_with_it",
        &[Mood::There, Mood::Going],
        Some(Mood::Unauthorized),
        true,
    ),
    // The agent's own pod is deleted by force, or somebody has changed its rights.
    (
        "rights_alone_are_gone",
        &[Mood::There],
        Some(Mood::Forbidding),
        false,
    ),
    (
        "account_alone_is_gone",
        &[Mood::There],
        Some(Mood::Unauthorized),
        false,
    ),
    (
        "made_anew",
        &[Mood::There, Mood::Gone, Mood::There],
        Some(Mood::Unauthorized),
        false,
    ),
    ("faulty", &[Mood::There], Some(Mood::Faulty), false),
    ("silent", &[Mood::There], Some(Mood::Silent), false),
    ("away", &[Mood::There], None, false),
    (
        "never_allowed",
        &[Mood::Forbidding],
        Some(Mood::Forbidding),
        false,
    ),
    ("never_known", &[Mood::Silent], Some(Mood::Unauthorized), false),
    ("never_there", &[Mood::Gone], Some(Mood::Gone), false),
    ("never_seen", &[Mood::Silent], Some(Mood::Gone), false),
];

pub(crate) fn cases() -> Vec<Case> {
    let of = |row: Row| {
        let (name, _, _, leaves) = row;
        let what = if leaves { "leaves" } else { "stays" };
        case(format!("an_agent_that_stops_{what}_{name}"), move || {
            an_agent_stops(row)
        })
    };
    ROWS.map(of).into()
}

/// An agent with one captured pod, in a node with a CNI of one plugin.
fn begin(options: impl FnOnce(&Node, &Cni) -> Options) -> (Agent, Cni, Node, redirector_tests::node::Pod) {
    let node = Node::new();
    let cni = Cni::create(node.directory());
    cni.write("10-net.conf", CONF);
    let pod = node.pod("web");
    let options = options(&node, &cni);
    let agent = Agent::start(&node, &Workloads::hbone([&pod]), options);
    agent.enrol(&pod);
    assert!(is_captured(&agent) && cni.is_chained());
    (agent, cni, node, pod)
}

/// Whether the agent, or one before it, has something pinned for its pod.
fn is_captured(agent: &Agent) -> bool {
    let records = std::fs::read_dir(agent.state_dir().join("pods")).expect("it keeps records");
    records.count() > 0
}

fn an_agent_stops((_, while_it_runs, at_end, leaves): Row) {
    let (first, later) = while_it_runs.split_first().expect("it says something");
    let mut started = None;
    let (mut agent, cni, _node, pod) = begin(|node, cni| {
        let api = DaemonSetApi::start(&node.host.ns, node.directory(), *first);
        let environment = api.environment();
        started = Some(api);
        Options {
            environment,
            ..cni.agent(&[
                "--daemonset",
                DAEMONSET,
                "--log-level",
                "info,redirector::cni=debug",
            ])
        }
    });
    let mut api = started.expect("it was started");
    assert!(
        cni.read("10-net.conflist")
            .contains("\"namePrefix\": \"redirector-\"")
    );
    wait::until("the agent to ask", || (api.asked() > 0).then_some(()));
    let learn = |text: &str, times: usize| {
        wait::until(text, || {
            (agent.log().matches(text).count() == times).then_some(())
        });
    };
    match first {
        Mood::Forbidding => learn("DaemonSet cannot be watched", 1),
        Mood::Gone => learn("there is no such DaemonSet", 1),
        Mood::Silent => {}
        _ => learn("DaemonSet is known", 1),
    }
    for mood in later {
        api.set(*mood);
        match mood {
            Mood::There => learn("DaemonSet is known", 2),
            _ => learn("DaemonSet goes", 1),
        }
    }
    match at_end {
        Some(mood) => api.set(mood),
        None => api.stop(),
    }
    let links = netns_links(&pod.ns);
    let status = agent.stop();
    assert!(status.success(), "{status}");
    assert_eq!(cni.is_chained(), !leaves, "{:?}\n{}", cni.names(), agent.log());
    assert_eq!(cni.has_binary(), !leaves);
    assert_eq!(is_captured(&agent), !leaves, "{}", agent.log());
    if leaves {
        assert_eq!(cni.names(), ["10-net.conf"], "nothing of ours is left");
        assert_eq!(cni.read("10-net.conf"), CONF);
        assert_eq!(netns_links(&pod.ns), Vec::<u64>::new());
    } else {
        assert_eq!(netns_links(&pod.ns), links, "capture outlives the agent");
    }
}

pub(crate) fn uninstall_takes_the_plugin_away() {
    let (mut agent, cni, node, _pod) = begin(|_, cni| cni.agent(&[]));
    let (status, said) = agent.uninstall(&node, &[]);
    assert_eq!(status.code(), Some(3), "an agent runs: {said}");
    // One with other directories, which does not see that, sees the socket.
    let mut other = command(&node.host.ns, binary().expect("the agent runs by it"));
    other
        .arg("uninstall")
        .args(cni.arguments())
        .arg("--cni-socket")
        .arg(agent.cni_socket());
    for flag in ["--state-dir", "--bpffs-dir"] {
        other.arg(flag).arg(node.directory().join("another"));
    }
    let (status, said) = output(&mut other, DEADLINE);
    assert!(
        status.code() == Some(1) && said.contains("is served by a running agent"),
        "{said}"
    );
    assert!(cni.is_chained() && cni.has_binary());
    agent.stop();
    assert!(cni.is_chained() && cni.has_binary());
    // What another agent has put there is not ours.
    cni.write(
        "20-other.conflist",
        &LIST.replace(
            "\"bridge\"",
            "\"redirector-cni\", \"agentSocket\": \"/other.sock\"}, {\"type\": \"bridge\"",
        ),
    );
    let other = cni.read("20-other.conflist");
    let (status, said) = agent.uninstall(&node, &[]);
    assert!(status.success(), "{said}");
    assert_eq!(
        cni.names(),
        ["10-net.conf", "20-other.conflist", "redirector-cni"]
    );
    assert_eq!(
        (cni.read("10-net.conf"), cni.read("20-other.conflist")),
        (CONF.to_owned(), other)
    );
    std::fs::remove_file(cni.conf.join("20-other.conflist")).unwrap();
    let (status, said) = agent.uninstall(&node, &[]);
    assert!(status.success(), "{said}");
    assert_eq!(cni.names(), ["10-net.conf"]);
}
