//! Strict pods: nothing that is captured goes in plain, either way, and what does not stand for it goes on. Shown by the wire, by the
//! access log and by the counters. Both families, by eBPF and by iptables.

use std::{
    fs, io,
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    path::Path,
    process::ExitCode,
};

use redirector_tests::{
    agent::{Agent, Options, Redirect},
    app::{self, App},
    capture::contains,
    cni,
    mesh::{Mesh, PORT, refused},
    netns::Namespace,
    node::{Family, Pod},
    suite::{Needs, Test, case, main as suite},
    wait,
    workloads::Workloads,
};
use serde_json::json;

/// What pods say to each other, and nobody else is to read.
const CANARY: &str = "canary: 6e1f4ac0-the pods' own secret";
/// A port that the rules of the client leave alone.
const EXCLUDED: u16 = 9001;
const TOLD: &str = "the pod is strict, and this connection would be in plain";

const TESTS: &[(&str, Test)] = &[
    ("nothing_goes_in_plain", nothing_goes_in_plain),
    (
        "a_pod_becomes_strict_while_it_runs",
        a_pod_becomes_strict_while_it_runs,
    ),
    (
        "the_counter_tells_what_went_in_plain",
        the_counter_tells_what_went_in_plain,
    ),
];

fn main() -> ExitCode {
    let mut cases = Vec::new();
    for (by, redirect) in [("ebpf", Redirect::Ebpf), ("iptables", Redirect::IptablesNft)] {
        for family in Family::BOTH {
            for (name, test) in TESTS {
                let (test, options) = (
                    *test,
                    Options {
                        redirect,
                        ..Options::default()
                    },
                );
                cases.push(case(format!("{name}_{}_{by}", family.name()), move || {
                    test(family, options)
                }));
            }
        }
    }
    cases.push(case("the_node_may_still_probe", the_node_may_still_probe));
    suite(Needs::Agent, 2, cases)
}

fn with(mut options: Options, arguments: &[&str]) -> Options {
    options
        .arguments
        .extend(arguments.iter().map(|&argument| argument.to_owned()));
    options
}

/// A mesh whose pods are strict since the node is; the client has an excluded port.
fn strict(options: Options) -> Mesh {
    let mesh = Mesh::started(options, |client, server| Workloads::hbone([client, server]));
    let mut event = cni::event(&mesh.client);
    event["Annotations"] = json!({"redirector.io/exclude-outbound-ports": EXCLUDED.to_string()});
    let answer = mesh.agent.post("/cmdadd", &event.to_string());
    assert_eq!(answer.status, 200, "{}", answer.body);
    mesh.agent.enrol(&mesh.server);
    mesh
}

/// Bytes of a pod's connections in plain: inbound and outbound.
fn plaintext(agent: &Agent, pod: &Pod) -> [f64; 2] {
    let samples = agent.metrics();
    ["inbound", "outbound"].map(|direction| {
        let of_pod = |labels: &std::collections::BTreeMap<String, String>| {
            labels.get("pod") == Some(&pod.name)
                && labels.get("direction").is_some_and(|told| told == direction)
        };
        let found = samples
            .iter()
            .find(|sample| sample.name == "redirector_plaintext_bytes_total" && of_pod(&sample.labels));
        found.expect("an enrolled pod has both series").value
    })
}

fn refusals(agent: &Agent) -> f64 {
    let samples = agent.metrics();
    let mut refusals = samples.iter().filter(|sample| {
        let reason = sample.labels.get("reason");
        sample.name == "redirector_connections_refused_total"
            && reason.is_some_and(|reason| reason == "plaintext")
    });
    refusals.next().map_or(0.0, |sample| sample.value)
}

/// Says the canary, and nobody answers.
fn is_refused(from: &Namespace, to: SocketAddr) {
    match app::ask(from, to, CANARY) {
        Ok(answer) => assert_eq!(answer, "", "{to} answers"),
        Err(error) => assert!(
            !matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock),
            "{to} hangs: {error}"
        ),
    }
}

fn serve(ns: &Namespace, family: Family, port: u16) -> App {
    App::start(ns, (family.any(), port).into(), app::echo)
}

fn nothing_goes_in_plain(family: Family, options: Options) {
    let mesh = strict(with(options, &["--strict"]));
    let (client, server, outside) = (&mesh.client, &mesh.server, &mesh.node.outside);
    let _apps = [&client.ns, &server.ns, &outside.ns, &mesh.stranger.ns].map(|ns| serve(ns, family, PORT));
    let _excluded = serve(&outside.ns, family, EXCLUDED);
    let captures = [client, server].map(|pod| mesh.node.capture(pod));
    for (from, to) in [(client, server), (server, client)] {
        assert_eq!(app::ask(&from.ns, to.addr(family, PORT), CANARY).unwrap(), CANARY);
    }
    // On no wire: the pod's own address.
    assert_eq!(
        app::ask(&client.ns, client.addr(family, PORT), CANARY).unwrap(),
        CANARY
    );
    // Out, to the world and to a pod that is not enrolled.
    for to in [outside.addr(family, PORT), mesh.stranger.addr(family, PORT)] {
        is_refused(&client.ns, to);
    }
    // In. What these say is in plain before it comes to the pod, so it is no secret.
    for from in [&mesh.stranger.ns, &outside.ns] {
        refused(from, server.addr(family, PORT));
    }
    // The named exclusion.
    let open = app::ask(&client.ns, outside.addr(family, EXCLUDED), "no secret");
    assert_eq!(open.unwrap(), "no secret");
    for capture in captures {
        let segments = capture.stop();
        assert!(
            !contains(&segments, CANARY.as_bytes()),
            "the canary was on the wire"
        );
    }
    wait::until("the refusals in the log", || {
        (mesh.agent.log().matches(TOLD).count() >= 4).then_some(())
    });
    assert!(refusals(&mesh.agent) >= 4.0);
    for pod in [client, server] {
        assert_eq!(plaintext(&mesh.agent, pod), [0.0, 0.0], "{}", pod.name);
    }
    assert!(mesh.agent.pods().iter().all(|pod| pod["strict"] == true));
    // The series goes with the pod.
    mesh.agent.release(client);
    let left = mesh
        .agent
        .metrics()
        .into_iter()
        .filter(|sample| sample.name == "redirector_plaintext_bytes_total");
    assert_eq!(left.count(), 2);
}

fn talk(stream: &mut TcpStream) {
    let mut buffer = [0; 4];
    stream.write_all(b"ping").unwrap();
    stream.read_exact(&mut buffer).unwrap();
    assert_eq!(&buffer, b"ping");
}

fn write_rules(path: &Path, strict: bool) {
    let text = format!("pods:\n- {{namespace: demo, name: client, rules: {{strict: {strict}}}}}\n");
    let new = path.with_extension("new");
    fs::write(&new, text).unwrap();
    fs::rename(new, path).unwrap();
}

fn a_pod_becomes_strict_while_it_runs(family: Family, options: Options) {
    let directory = tempfile::tempdir().unwrap();
    let rules = directory.path().join("rules.yaml");
    write_rules(&rules, false);
    // What is said of the pod counts, and not what is said of the node.
    let mesh = Mesh::hbone(with(
        options,
        &["--strict", "--rules", &rules.display().to_string()],
    ));
    let (client, outside) = (&mesh.client, mesh.node.outside.addr(family, PORT));
    let _apps = [&client.ns, &mesh.server.ns, &mesh.node.outside.ns].map(|ns| serve(ns, family, PORT));
    let mut plain = [
        app::connect(&client.ns, outside).unwrap(),
        app::connect(&mesh.stranger.ns, client.addr(family, PORT)).unwrap(),
    ];
    let mut tunnelled = [
        app::connect(&client.ns, mesh.server.addr(family, PORT)).unwrap(),
        app::connect(&mesh.server.ns, client.addr(family, PORT)).unwrap(),
    ];
    plain.iter_mut().chain(&mut tunnelled).for_each(talk);
    let before = plaintext(&mesh.agent, client);
    write_rules(&rules, true);
    for stream in &mut plain {
        // Within the deadline of a read, which is what the kit's streams have.
        let error = stream.read(&mut [0; 1]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    }
    tunnelled.iter_mut().for_each(talk);
    is_refused(&client.ns, outside);
    refused(&mesh.stranger.ns, client.addr(family, PORT));
    assert_eq!(plaintext(&mesh.agent, client), before);
    let told = |entry: &std::collections::BTreeMap<String, String>| {
        entry.get("error").is_some_and(|error| error.contains(TOLD))
    };
    wait::until("the connections that were cut", || {
        (mesh.agent.access_log().iter().filter(|entry| told(entry)).count() == 2).then_some(())
    });
    write_rules(&rules, false);
    wait::until("the pod to be free again", || {
        (app::ask(&client.ns, outside, "again").ok()? == "again").then_some(())
    });
    tunnelled.iter_mut().for_each(talk);
}

fn the_counter_tells_what_went_in_plain(family: Family, options: Options) {
    let mesh = Mesh::hbone(options);
    let _apps = [&mesh.client.ns, &mesh.server.ns, &mesh.node.outside.ns].map(|ns| serve(ns, family, PORT));
    let capture = mesh.node.capture(&mesh.client);
    assert_eq!(
        app::ask(&mesh.client.ns, mesh.server.addr(family, PORT), "by HBONE").unwrap(),
        "by HBONE"
    );
    assert_eq!(plaintext(&mesh.agent, &mesh.client), [0.0, 0.0]);
    let text = "seventeen letters";
    let mut open = app::connect(&mesh.client.ns, mesh.node.outside.addr(family, PORT)).unwrap();
    open.write_all(text.as_bytes()).unwrap();
    open.read_exact(&mut vec![0; text.len()]).unwrap();
    // While it is open, and both ways.
    let both = 2.0 * text.len() as f64;
    wait::until("the bytes", || {
        (plaintext(&mesh.agent, &mesh.client) == [0.0, both]).then_some(())
    });
    app::ask(&mesh.stranger.ns, mesh.client.addr(family, PORT), text).unwrap();
    wait::until("the bytes", || {
        (plaintext(&mesh.agent, &mesh.client) == [both, both]).then_some(())
    });
    assert_eq!(plaintext(&mesh.agent, &mesh.server), [0.0, 0.0]);
    assert!(
        contains(&capture.stop(), text.as_bytes()),
        "what is plain can be seen"
    );
    assert_eq!(refusals(&mesh.agent), 0.0);
}

fn the_node_may_still_probe() {
    for family in Family::BOTH {
        let mesh = strict(with(Options::default(), &["--strict", "--probe-sources", "node"]));
        let _app = serve(&mesh.server.ns, family, PORT);
        let answer = app::ask(
            &mesh.node.host.ns,
            mesh.server.addr(family, PORT),
            "are you well?",
        );
        assert_eq!(answer.unwrap(), "are you well?");
        assert_eq!(plaintext(&mesh.agent, &mesh.server), [0.0, 0.0]);
    }
}
