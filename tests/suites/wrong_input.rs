//! What is wrong is refused with one clear message, and nothing is half done.

use std::{
    fs,
    io::{Read, Write},
    os::unix::{fs::PermissionsExt, net::UnixStream},
    process::ExitCode,
    time::Duration,
};

use redirector_tests::{
    agent::{Agent, Options, binary},
    app::{self, App},
    capture::opened_ports,
    cni,
    footprint::pinned_below,
    mesh::{Mesh, PORT},
    node::{Family, Node},
    process,
    suite::{Needs, case, main as suite},
    workloads::Workloads,
};
use serde_json::{Value, json};

fn main() -> ExitCode {
    let cases = vec![
        case(
            "events_that_are_wrong_are_refused",
            events_that_are_wrong_are_refused,
        ),
        case(
            "requests_that_are_wrong_are_refused",
            requests_that_are_wrong_are_refused,
        ),
        case(
            "a_request_that_never_ends_is_ended",
            a_request_that_never_ends_is_ended,
        ),
        case(
            "a_second_pod_in_a_namespace_is_refused",
            a_second_pod_in_a_namespace_is_refused,
        ),
        case("the_socket_is_not_for_everybody", the_socket_is_not_for_everybody),
        case(
            "what_a_live_agent_has_is_not_taken",
            what_a_live_agent_has_is_not_taken,
        ),
        case(
            "errors_in_the_workload_file_are_named",
            errors_in_the_workload_file_are_named,
        ),
        case("without_rights_it_says_so", without_rights_it_says_so),
    ];
    suite(Needs::Agent, 2, cases)
}

/// Changes to a good event, the status they give, and what the answer must say.
fn wrong_events(node: &Node) -> Vec<(Value, u16, String)> {
    let node_ns = node.host.ns.path();
    let file = node.directory().join("workloads.yaml");
    let elsewhere =
        json!([{"Interface": 2, "Address": {"IP": "10.77.0.99", "Mask": "////AA=="}, "Gateway": ""}]);
    vec![
        (
            json!({"Netns": "/run/netns/no-such"}),
            500,
            "/run/netns/no-such".into(),
        ),
        (json!({"Netns": node_ns}), 500, "node".into()),
        (json!({"Netns": file}), 500, "namespace".into()),
        (json!({"IPs": elsewhere}), 500, "10.77.0.99".into()),
        (json!({"Netns": ""}), 400, "Netns".into()),
        (json!({"Netns": null}), 400, "Netns".into()),
        (json!({"Netns": 7}), 400, "Netns".into()),
        (json!({"PodName": null}), 400, "PodName".into()),
        (json!({"PodUID": "../../etc"}), 400, "UID".into()),
        (
            json!({"IPs": [{"Address": {"IP": "10.77.0.300", "Mask": "////AA=="}}]}),
            400,
            "10.77.0.300".into(),
        ),
        (json!({"IPs": "10.77.0.3"}), 400, "IPs".into()),
    ]
}

fn events_that_are_wrong_are_refused() {
    let mesh = Mesh::started(Options::default(), |client, server| {
        Workloads::hbone([client, server])
    });
    let rules = || mesh.client.ns.ip_output("rule show");
    let before = rules();
    for (change, status, says) in wrong_events(&mesh.node) {
        let mut event = cni::event(&mesh.client);
        for (key, value) in change.as_object().unwrap() {
            event[key] = value.clone();
        }
        let answer = mesh.agent.post("/cmdadd", &event.to_string());
        assert_eq!(answer.status, status, "{change}: {}", answer.body);
        assert!(
            answer.body.contains(&says),
            "{change}: {:?} does not say {says:?}",
            answer.body
        );
        assert_eq!(rules(), before, "{change}: a rule was left");
        assert!(
            !mesh.client.ns.proc_net("tcp6").unwrap().contains(":3A99"),
            "{change}: a listener was left"
        );
    }
    // And the pod can still be enrolled.
    mesh.agent.enrol(&mesh.client);
    let _app = App::start(&mesh.node.outside.ns, (Family::V4.any(), PORT).into(), app::who);
    app::ask_who(&mesh.client.ns, mesh.node.outside.addr(Family::V4, PORT)).unwrap();
}

fn requests_that_are_wrong_are_refused() {
    let mesh = Mesh::started(Options::default(), |_, _| Workloads::default());
    for (path, body, status) in [
        ("/cmdadd", "", 400),
        ("/cmdadd", "{", 400),
        ("/cmdadd", "[]", 400),
        ("/cmdadd", "null", 400),
        ("/cmdadd", "\u{feff}{}", 400),
        ("/cmddel", "{", 400),
        ("/cmddel", "{}", 400),
        ("/nothing", "{}", 404),
        ("/", "{}", 404),
    ] {
        let answer = mesh.agent.post(path, body);
        assert_eq!(answer.status, status, "{path} {body:?}: {}", answer.body);
        assert!(!answer.body.trim().is_empty(), "{path} {body:?} has no text");
    }
    let huge = format!("{{\"PodName\": \"{}\"}}", "x".repeat(200 << 10));
    let answer = mesh.agent.post("/cmdadd", &huge);
    assert!([400, 413].contains(&answer.status), "{answer:?}");
    let get = b"GET /cmdadd HTTP/1.1\r\nHost: unix\r\nConnection: close\r\n\r\n";
    assert_eq!(cni::exchange(&mesh.agent.cni_socket(), get).unwrap().status, 405);
    mesh.agent.enrol(&mesh.client);
}

fn a_request_that_never_ends_is_ended() {
    let mesh = Mesh::started(Options::default(), |_, _| Workloads::default());
    let mut streams: Vec<UnixStream> = (0..20)
        .map(|_| {
            let mut stream = UnixStream::connect(mesh.agent.cni_socket()).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            stream
                .write_all(b"POST /cmdadd HTTP/1.1\r\nHost: unix\r\nContent-Length: 100\r\n\r\n{")
                .unwrap();
            stream
        })
        .collect();
    // Others are served meanwhile.
    mesh.agent.enrol(&mesh.client);
    for stream in &mut streams {
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).expect("the agent ends it");
        assert!(!String::from_utf8_lossy(&answer).contains(" 200 "));
    }
}

fn a_second_pod_in_a_namespace_is_refused() {
    let mut mesh = Mesh::hbone(Options::default());
    let first = mesh.client.uid.clone();
    mesh.client.uid = format!("{first}-other");
    let answer = mesh.agent.cmdadd(&mesh.client);
    assert_eq!(answer.status, 500, "{answer:?}");
    assert!(
        answer.body.contains(&first),
        "{answer:?} does not name the pod that is there"
    );
    let _app = App::start(&mesh.server.ns, (Family::V4.any(), PORT).into(), app::who);
    app::ask_who(&mesh.client.ns, mesh.server.addr(Family::V4, PORT)).unwrap();
}

fn the_socket_is_not_for_everybody() {
    let mut mesh = Mesh::started(Options::default(), |_, _| Workloads::default());
    let mode = |agent: &Agent| fs::metadata(agent.cni_socket()).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&mesh.agent), 0o660);
    // The file that a killed agent leaves is replaced.
    mesh.agent.kill();
    assert!(mesh.agent.cni_socket().exists());
    mesh.agent.restart(&mesh.node);
    assert_eq!(mode(&mesh.agent), 0o660);
    // Where somebody has opened it to all, only root is heard.
    let socket = mesh.agent.cni_socket();
    for (path, mode) in [(mesh.node.directory(), 0o711), (socket.as_path(), 0o666)] {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }
    let event = cni::event(&mesh.client).to_string();
    for path in ["cmdadd", "cmddel", "cmdcheck", "log"] {
        let mut curl = std::process::Command::new("setpriv");
        curl.args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "--"])
            .args(["curl", "-sS", "-w", "%{http_code}", "-d", &event, "--unix-socket"])
            .arg(&socket)
            .arg(format!("http://unix/{path}"));
        let (status, said) = process::output(&mut curl, Duration::from_secs(30));
        assert!(status.success(), "{said}");
        assert!(
            said.contains("only root") && said.contains("65534") && said.ends_with("403"),
            "{path}: {said}"
        );
    }
    assert_eq!(mesh.agent.pods(), Vec::<Value>::new());
    mesh.agent.enrol(&mesh.client);
}

/// A second agent that shares anything with the first would release its pods, or take them over.
fn what_a_live_agent_has_is_not_taken() {
    let mesh = Mesh::hbone(Options::default());
    let directory = mesh.node.directory();
    let pinned = || pinned_below(&mesh.agent.bpffs_dir());
    let before = pinned();
    for (shared, named) in [
        ("--cni-socket", "cni.sock"),
        ("--state-dir", "--state-dir"),
        ("--bpffs-dir", "--bpffs-dir"),
    ] {
        let mut second = process::command(&mesh.node.outside.ns, binary().unwrap());
        second.args(["agent", "--release-on-exit", "--fake-ca"]);
        second.arg("--workloads").arg(directory.join("workloads.yaml"));
        for (flag, file) in [
            ("--cni-socket", "cni.sock"),
            ("--state-dir", "state"),
            ("--bpffs-dir", "bpf"),
        ] {
            let own = if flag == shared {
                file.to_owned()
            } else {
                format!("second-{file}")
            };
            second.arg(flag).arg(directory.join(own));
        }
        let (status, text) = process::output(&mut second, Duration::from_secs(30));
        assert!(!status.success(), "{shared}: {text}");
        let last = text.lines().last().unwrap_or_default();
        assert!(last.contains(named) && last.contains("agent"), "{shared}: {text}");
    }
    // Not even for a moment: what all pods go on to is as it was.
    assert_eq!(pinned(), before);
    let _app = App::start(&mesh.server.ns, (Family::V4.any(), PORT).into(), app::who);
    let capture = mesh.node.capture(&mesh.server);
    app::ask_who(&mesh.client.ns, mesh.server.addr(Family::V4, PORT)).unwrap();
    assert_eq!(opened_ports(&capture.stop()), [15008]);
}

fn errors_in_the_workload_file_are_named() {
    let node = Node::new();
    let good = "workloads:\n- workloadIps: [10.77.0.10]\n  namespace: demo\n  services: {}\n";
    let files = [
        (format!("{good}  protocl: HBONE\n"), vec!["protocl", "line 5"]),
        (format!("{good}  protocol: HBON\n"), vec!["HBON", "line 5"]),
        (
            good.replace("10.77.0.10", "10.77.0.300"),
            vec!["workloadIps[0]", "line 2"],
        ),
        (
            good.replace("  namespace: demo\n", ""),
            vec!["namespace", "workloads[0]"],
        ),
        (format!("{good}sevices: []\n"), vec!["sevices", "line 5"]),
        ("workloads: [".to_owned(), vec!["line "]),
    ];
    for (text, says) in files {
        let file = node.directory().join("wrong.yaml");
        fs::write(&file, &text).unwrap();
        let mut agent = process::command(&node.host.ns, binary().unwrap());
        agent.arg("agent").arg("--workloads").arg(&file);
        for (flag, file) in [
            ("--cni-socket", "cni.sock"),
            ("--state-dir", "state"),
            ("--bpffs-dir", "bpf"),
        ] {
            agent.arg(flag).arg(node.directory().join(file));
        }
        agent
            .env("XDS_ADDRESS", "")
            .env("CA_ADDRESS", "")
            .env("FAKE_CA", "true");
        let (status, said) = process::output(&mut agent, Duration::from_secs(30));
        assert!(!status.success(), "accepted: {text}");
        for word in ["wrong.yaml"].iter().chain(&says) {
            assert!(
                said.contains(word),
                "{said:?} does not say {word:?} about:\n{text}"
            );
        }
    }
}

fn without_rights_it_says_so() {
    let node = Node::new();
    let mut agent = std::process::Command::new("setpriv");
    agent
        .args(["--bounding-set", "-all", "--"])
        .arg(binary().unwrap())
        .arg("agent");
    for (flag, file) in [
        ("--cni-socket", "cni.sock"),
        ("--state-dir", "state"),
        ("--bpffs-dir", "bpf"),
    ] {
        agent.arg(flag).arg(node.directory().join(file));
    }
    agent.args([
        "--admin-addr",
        "127.0.0.1:0",
        "--metrics-addr",
        "127.0.0.1:0",
        "--readiness-addr",
        "127.0.0.1:0",
    ]);
    let (status, text) = process::output(&mut agent, Duration::from_secs(30));
    assert!(!status.success());
    assert!(text.contains("root") || text.contains("CAP_"), "{text}");
}
