//! The commands that ask a running agent, in each form of their output, and what they say where there is none.

use std::{
    fs,
    io::{Read, Write},
    net::TcpStream,
    os::unix::fs::PermissionsExt,
    process::{ExitCode, Stdio},
    time::Duration,
};

use redirector_tests::{
    agent::{Options, binary},
    app::{self, App},
    mesh::{Mesh, PORT, refused},
    netns::Namespace,
    node::{Family, Node},
    process::{Process, command, output},
    suite::{Needs, case, main as suite},
    wait,
};
use serde_json::Value;

mod doctor;

const DEADLINE: Duration = Duration::from_secs(20);

fn main() -> ExitCode {
    suite(
        Needs::Agent,
        2,
        vec![
            case("status_and_pods_in_every_form", status_and_pods_in_every_form),
            case(
                "connections_are_shown_while_they_are_open_and_flows_after",
                connections_are_shown_while_they_are_open_and_flows_after,
            ),
            case("flows_are_followed_until_the_agent_stops", flows_are_followed),
            case("certs_tell_what_ends_soon", certs_tell_what_ends_soon),
            case("dump_and_version", dump_and_version),
            case("drain_waits_for_connections_and_the_end", drain_waits),
            case("drain_ends_at_its_deadline", drain_ends_at_its_deadline),
            case("without_an_agent_each_says_so_in_a_line", without_an_agent),
            case("scripts_and_pages_need_no_agent", scripts_and_pages),
            case("doctor_finds_a_good_node_good", doctor::a_good_node_is_found_good),
            case("doctor_names_what_is_broken", doctor::what_is_broken_is_named),
            case("doctor_names_a_missing_mount", doctor::a_missing_mount_is_named),
            case(
                "doctor_names_what_others_have_in_a_pod",
                doctor::what_others_have_in_a_pod_is_named,
            ),
            case("doctor_names_a_missing_plugin", doctor::a_missing_plugin_is_named),
            case(
                "doctor_names_an_agent_that_stands_still",
                doctor::an_agent_that_stands_still_is_named,
            ),
        ],
    )
}

/// Runs redirector in a namespace; returns its exit code and what it printed on both outputs.
fn run(ns: &Namespace, arguments: &[&str]) -> (i32, String) {
    let mut redirector = command(ns, binary().expect("the suite's needs include the binary"));
    let (status, text) = output(redirector.args(arguments), DEADLINE);
    (status.code().expect("no signal ends it"), text)
}

/// The same, of what must end well.
fn good(ns: &Namespace, arguments: &[&str]) -> String {
    let (code, text) = run(ns, arguments);
    assert_eq!(code, 0, "{arguments:?}: {text}");
    text
}

fn json(ns: &Namespace, arguments: &[&str]) -> Value {
    let text = good(ns, arguments);
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{arguments:?}: {error}: {text}"))
}

fn yaml(ns: &Namespace, arguments: &[&str]) -> Value {
    let text = good(ns, arguments);
    serde_yaml::from_str(&text).unwrap_or_else(|error| panic!("{arguments:?}: {error}: {text}"))
}

fn names(view: &Value) -> Vec<&str> {
    let pods = view["pods"].as_array().expect("a list");
    pods.iter()
        .map(|pod| pod["name"].as_str().expect("a name"))
        .collect()
}

fn status_and_pods_in_every_form() {
    let mesh = Mesh::hbone(Options::default());
    let node = &mesh.node.host.ns;
    let text = good(node, &["status"]);
    assert!(
        text.starts_with("agent at 127.0.0.1:15000: ready; backend "),
        "{text}"
    );
    assert!(text.contains("\ncounters that are not zero:\n"), "{text}");
    // No terminal, no colours.
    assert!(!text.contains('\u{1b}'), "{text:?}");
    let status = json(node, &["status", "-o", "json"]);
    assert_eq!(status["ready"], true);
    assert_eq!(status["counters"]["workload_manager_active_proxy_count"], 2);
    assert_eq!(names(&yaml(node, &["status", "--output=yaml"])), names(&status));

    let text = good(node, &["pods"]);
    let heads = "NAMESPACE  NAME    STATE     STRICT  ADDRESSES";
    assert!(text.starts_with(heads) && text.lines().count() == 3, "{text}");
    let wide = good(node, &["pods", "-o", "wide"]);
    let inode = mesh.client.ns.path();
    let inode = std::os::unix::fs::MetadataExt::ino(&fs::metadata(inode).unwrap());
    assert!(
        wide.contains(&format!("net:[{inode}]")) && !text.contains("net:["),
        "{wide}"
    );
    let mut all = names(&json(node, &["pods", "-o", "json"])).join(" ");
    assert!(
        ["client server", "server client"].contains(&all.as_str()),
        "{all}"
    );
    for (filter, expected) in [
        (&["client"][..], "client"),
        (&["demo/client"], "client"),
        (&["other/client"], ""),
        (&["--namespace", "demo", "server"], "server"),
        (&["--state", "not-captured", "--state", "starting"], ""),
        (&["--state", "captured", "server"], "server"),
    ] {
        let arguments = [&["pods", "-o", "json"], filter].concat();
        all = names(&json(node, &arguments)).join(" ");
        assert_eq!(all, expected, "{filter:?}");
    }
}

fn connections_are_shown_while_they_are_open_and_flows_after() {
    let mesh = Mesh::hbone(Options::default());
    let node = &mesh.node.host.ns;
    let _app = App::start(&mesh.server.ns, (Family::V4.any(), PORT).into(), app::echo);
    let mut stream = app::connect(&mesh.client.ns, mesh.server.addr(Family::V4, PORT)).unwrap();
    say_hello(&mut stream);
    let text = wait::until("both ends to be in the table", || {
        let text = good(node, &["connections"]);
        (text.lines().count() == 3).then_some(text)
    });
    assert!(
        text.contains("demo/client  outbound") && text.contains("demo/server  inbound"),
        "{text}"
    );
    assert!(text.contains("mutual_tls") && text.contains("5 B"), "{text}");
    let wide = good(node, &["connections", "-o", "wide", "--direction", "inbound"]);
    assert!(
        wide.contains(&mesh.client.identity()) && wide.lines().count() == 2,
        "{wide}"
    );
    let count = |arguments: &[&str]| {
        let view = json(node, &[&["connections", "-o", "json"], arguments].concat());
        assert_eq!(view["total"], 2);
        view["connections"].as_array().expect("a list").len()
    };
    assert_eq!(count(&[]), 2);
    assert_eq!(count(&["--pod", "demo/client"]), 1);
    assert_eq!(count(&["--security", "plaintext"]), 0);
    assert_eq!(good(node, &["flows"]), "");

    drop(stream);
    wait::until("the connection to end", || {
        (good(node, &["flows"]).lines().count() == 2).then_some(())
    });
    let closed = mesh.server.addr(Family::V4, PORT + 1);
    refused(&mesh.client.ns, closed);
    let failed = wait::until("the refused one to be told", || {
        let text = good(node, &["flows", "--failed", "--direction", "outbound"]);
        (text.lines().count() == 1).then_some(text)
    });
    assert!(
        failed.contains(&closed.to_string()) && failed.contains("  failed ["),
        "{failed}"
    );
    let text = good(
        node,
        &[
            "flows",
            "-o",
            "json",
            "--security",
            "mutual_tls",
            "--pod",
            "client",
            "--last",
            "1",
        ],
    );
    let flow: Value = serde_json::from_str(text.trim_end()).unwrap_or_else(|error| panic!("{error}: {text}"));
    assert_eq!(flow["pod"]["name"], "client");
    reads_no_further(node);
}

/// Whoever reads no further is no fault.
fn reads_no_further(node: &Namespace) {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut status = command(node, binary().unwrap());
    let status = status.arg("status").stdout(writer).stderr(Stdio::piped()).spawn();
    let ended = status.unwrap().wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(
        ended.status.success() && said.is_empty(),
        "{}: {said}",
        ended.status
    );
}

fn say_hello(stream: &mut TcpStream) {
    stream.write_all(b"hello").unwrap();
    let mut echoed = [0; 5];
    stream.read_exact(&mut echoed).unwrap();
}

fn flows_are_followed() {
    let mut mesh = Mesh::hbone(Options::default());
    let _app = App::start(&mesh.server.ns, (Family::V4.any(), PORT).into(), app::who);
    let connect = || app::ask_who(&mesh.client.ns, mesh.server.addr(Family::V4, PORT)).unwrap();
    let mut follow = command(&mesh.node.host.ns, binary().unwrap());
    follow.args(["flows", "--follow", "-o", "json", "--direction", "outbound"]);
    let mut follow = Process::start(&mut follow, &mesh.node.directory().join("follow.log")).unwrap();
    for round in 1..4 {
        connect();
        wait::until("the flow to be told", || {
            (follow.output().lines().count() == round).then_some(())
        });
    }
    for line in follow.output().lines() {
        let flow: Value = serde_json::from_str(line).unwrap();
        assert_eq!(
            (&flow["direction"], &flow["state"]),
            (&"outbound".into(), &"complete".into())
        );
    }
    mesh.agent.stop();
    let ended = follow.wait(DEADLINE).expect("it ends with the agent");
    let text = follow.output();
    let last = text.lines().last().expect("it says why");
    assert_eq!(ended.code(), Some(1), "{text}");
    assert!(last.starts_with("redirector: "), "{text}");
}

fn certs_tell_what_ends_soon() {
    let mesh = Mesh::hbone(Options {
        arguments: vec!["--svid-ttl=2h".to_owned()],
        ..Options::default()
    });
    let node = &mesh.node.host.ns;
    let text = good(node, &["certs"]);
    for pod in [&mesh.client, &mesh.server] {
        assert!(text.contains(&pod.identity()), "{text}");
    }
    assert!(
        text.contains("in 1 h 59 min") && text.contains("Available"),
        "{text}"
    );
    good(node, &["certs", "--warn-within", "1h"]);
    let (code, text) = run(node, &["certs", "--warn-within", "3h", "-o", "wide"]);
    assert!(code == 4 && text.contains("SERIAL"), "{code} {text}");
    let view = yaml(node, &["certs", "-o", "yaml"]);
    assert_eq!(view["certificates"].as_array().map(Vec::len), Some(2));
}

fn dump_and_version() {
    let mesh = Mesh::hbone(Options::default());
    let node = &mesh.node.host.ns;
    let dump = json(node, &["dump"]);
    assert!(
        dump["config"]["stateDir"].is_string() && dump["certificates"].is_array(),
        "{dump}"
    );
    let file = mesh.node.directory().join("dump.json");
    assert_eq!(good(node, &["dump", "--file", file.to_str().unwrap()]), "");
    let written: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert_eq!(written["config"], dump["config"]);
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let (code, text) = run(node, &["dump", "--file", "/proc/no/where"]);
    assert!(
        code == 1 && text.starts_with("redirector: cannot write /proc/no/where"),
        "{text}"
    );
    let version = json(node, &["version", "-o", "json"]);
    assert!(
        version["version"].is_string() && version["version"] == version["agent"],
        "{version}"
    );
    let version = json(&mesh.stranger.ns, &["version", "-o", "json"]);
    assert_eq!(version["agent"], Value::Null);
    assert!(good(&mesh.stranger.ns, &["version"]).contains("none at 127.0.0.1:15000"));
}

/// It stops the agent, lets what is open end, and leaves the pods captured.
fn drain_waits() {
    let mut mesh = Mesh::hbone(Options {
        arguments: vec!["--connection-termination-deadline=60s".to_owned()],
        ..Options::default()
    });
    let _app = App::start(&mesh.server.ns, (Family::V4.any(), PORT).into(), app::echo);
    let server = mesh.server.addr(Family::V4, PORT);
    let mut stream = app::connect(&mesh.client.ns, server).unwrap();
    say_hello(&mut stream);
    let mut drain = command(&mesh.node.host.ns, binary().unwrap());
    let mut drain = Process::start(drain.arg("drain"), &mesh.node.directory().join("drain.log")).unwrap();
    wait::until("the agent to be asked", || {
        drain.output().contains("its 2 pods stay captured").then_some(())
    });
    wait::until("the agent to stop", || {
        mesh.agent.log().contains("asked to stop").then_some(())
    });
    say_hello(&mut stream);
    assert!(drain.ended().is_none(), "{}", drain.output());
    drop(stream);
    let ended = drain.wait(DEADLINE).expect("it ends with the agent");
    assert!(
        ended.success() && drain.output().contains("has stopped, after "),
        "{}",
        drain.output()
    );
    // Nobody holds the directories any more.
    refused(&mesh.client.ns, server);
    mesh.agent.stop();
    mesh.agent.restart(&mesh.node);
    wait::until("the pods to be back", || {
        app::connect(&mesh.client.ns, server).ok()
    });
}

fn drain_ends_at_its_deadline() {
    let mesh = Mesh::hbone(Options {
        arguments: vec!["--connection-termination-deadline=60s".to_owned()],
        ..Options::default()
    });
    let _app = App::start(&mesh.server.ns, (Family::V4.any(), PORT).into(), app::echo);
    let mut stream = app::connect(&mesh.client.ns, mesh.server.addr(Family::V4, PORT)).unwrap();
    say_hello(&mut stream);
    let (code, text) = run(&mesh.node.host.ns, &["drain", "--deadline", "1s"]);
    assert_eq!(code, 1, "{text}");
    assert!(
        text.contains("is not gone after 1 s: 2 connections are open"),
        "{text}"
    );
    drop(stream);
}

fn without_an_agent() {
    let node = Node::new();
    for arguments in [
        &["status"][..],
        &["pods", "-o", "json"],
        &["connections"],
        &["flows", "--follow"],
        &["certs"],
        &["dump"],
        &["drain"],
    ] {
        let (code, text) = run(&node.host.ns, arguments);
        assert_eq!((code, text.lines().count()), (1, 1), "{arguments:?}: {text}");
        assert!(
            text.starts_with("redirector: no agent answers at 127.0.0.1:15000: is it running"),
            "{text}"
        );
    }
    for arguments in [
        &[][..],
        &["statu"],
        &["status", "-o", "xml"],
        &["status", "--timeout", "soon"],
        &["pods", "--state", "free"],
        &["flows", "--last", "-1"],
        &["connections", "--security", "none"],
        &["certs", "--warn-within", "1"],
        &["drain", "--deadline", "never"],
        &["completions", "cmd"],
    ] {
        let (code, text) = run(&node.host.ns, arguments);
        assert!(code == 2 && !text.is_empty(), "{arguments:?}: {code} {text}");
    }
}

fn scripts_and_pages() {
    let node = Node::new();
    for (shell, word) in [
        ("bash", "complete -F _redirector"),
        ("zsh", "#compdef redirector"),
        ("fish", "complete -c redirector"),
    ] {
        let script = good(&node.host.ns, &["completions", shell]);
        assert!(
            script.contains(word) && script.contains("install-cni"),
            "{shell}: {script}"
        );
    }
    let mut checked = command(&node.host.ns, "bash");
    checked
        .args(["-c", r#""$0" completions bash | bash -n"#])
        .arg(binary().unwrap())
        .stderr(Stdio::null());
    let (status, text) = output(&mut checked, DEADLINE);
    assert!(status.success(), "{text}");
    assert!(good(&node.host.ns, &["man"]).contains(".TH redirector 1"));
    let directory = node.directory().join("man");
    good(&node.host.ns, &["man", "--dir", directory.to_str().unwrap()]);
    let page = fs::read_to_string(directory.join("redirector-certs.1")).unwrap();
    assert!(page.contains("warn\\-within"), "{page}");
}
