//! Certificates that nobody is asked for: of files that are replaced, and of a SPIFFE Workload API that is of no code of ours.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::TcpStream,
    path::Path,
    process::ExitCode,
};

use redirector_tests::{
    agent::{Agent, Options},
    app::{self, App},
    ca::{Credentials, Root},
    mesh::PORT,
    node::{Family, Node, Pod},
    suite::{Case, Needs, case, main as suite},
    wait,
    workload_api::WorkloadApi,
    workloads::Workloads,
};

fn main() -> ExitCode {
    let cases: Vec<Case> = vec![
        case(
            "certificates_come_from_files_and_are_replaced",
            certificates_come_from_files_and_are_replaced,
        ),
        case(
            "certificates_come_from_a_workload_api_and_outlive_it",
            certificates_come_from_a_workload_api_and_outlive_it,
        ),
    ];
    suite(Needs::Agent, 2, cases)
}

fn identity(pod: &Pod) -> String {
    format!("spiffe://cluster.local/ns/demo/sa/{}", pod.name)
}

/// Two pods, and a root that signs for them. The agent is dropped first.
struct World {
    agent: Agent,
    root: Root,
    client: Pod,
    server: Pod,
    node: Node,
}

impl World {
    fn new(arguments: &[&str], environment: Vec<(String, String)>, node: Node) -> Self {
        let [client, server] = ["client", "server"].map(|name| node.pod(name));
        let tunnels = ["--pool-unused-release-timeout", "100ms"];
        let options = Options {
            environment,
            // Each connection that comes after another's end makes a tunnel, and so a handshake.
            arguments: arguments
                .iter()
                .chain(&tunnels)
                .map(|&text| text.to_owned())
                .collect(),
            ..Options::default()
        };
        let agent = Agent::start(&node, &Workloads::hbone([&client, &server]), options);
        agent.enrol(&client);
        agent.enrol(&server);
        let root = Root::create(node.directory());
        Self {
            agent,
            root,
            client,
            server,
            node,
        }
    }

    fn issue(&self, pod: &Pod, name: &str) -> Credentials {
        self.root.issue(self.node.directory(), name, &identity(pod))
    }

    fn ask(&self) -> std::io::Result<String> {
        app::ask(&self.client.ns, self.server.addr(Family::V4, PORT), "hello\n")
    }

    fn meets(&self) {
        assert_eq!(wait::until("the pods to meet", || self.ask().ok()), "hello\n");
    }

    /// What the config dump says of a pod's certificate.
    fn certificate(&self, pod: &Pod) -> serde_json::Value {
        let dump = self.dump();
        let dump: serde_json::Value = serde_json::from_str(&dump).unwrap();
        let all = dump["certificates"].as_array().unwrap();
        let one = all.iter().find(|one| one["identity"] == identity(pod));
        one.unwrap_or_else(|| panic!("{} is not in {all:?}", pod.name))
            .clone()
    }

    fn dump(&self) -> String {
        let admin = (std::net::Ipv4Addr::LOCALHOST, 15000).into();
        app::http_get(&self.node.host.ns, admin, "/config_dump")
            .unwrap()
            .1
    }

    fn tells_no_secrets(&self) {
        for text in [self.dump(), self.agent.log()] {
            assert!(!text.contains("PRIVATE KEY"), "{text}");
        }
    }
}

/// A connection to the server's echo, which is in use.
fn open(world: &World) -> TcpStream {
    let stream = app::connect(&world.client.ns, world.server.addr(Family::V4, PORT)).unwrap();
    stream.set_read_timeout(Some(app::IO_DEADLINE)).unwrap();
    stream
}

fn echoes(mut stream: &TcpStream) {
    stream.write_all(b"ping").unwrap();
    stream.read_exact(&mut [0; 4]).unwrap();
}

/// Puts a set where the agent looks for it, one file after another.
fn put(directory: &Path, files: &Credentials) {
    fs::create_dir_all(directory).unwrap();
    for (from, name) in [
        (&files.root, "ca.crt"),
        (&files.certificate, "tls.crt"),
        (&files.key, "tls.key"),
    ] {
        fs::copy(from, directory.join(name)).unwrap();
    }
}

fn certificates_come_from_files_and_are_replaced() {
    let node = Node::new();
    let directory = node.directory().join("certificates");
    fs::create_dir(&directory).unwrap();
    let no_ca = vec![("FAKE_CA".to_owned(), "false".to_owned())];
    let world = World::new(&["--cert-dir", directory.to_str().unwrap()], no_ca, node);
    let _echo = App::start(&world.server.ns, (Family::V4.any(), PORT).into(), app::echo);
    wait::until("the lack to be told", || {
        let state = world.certificate(&world.client)["state"].to_string();
        (state.contains("Unavailable") && state.contains("must hold tls.crt")).then_some(())
    });
    assert!(world.ask().is_err(), "nobody has a certificate");
    for pod in [&world.client, &world.server] {
        put(&directory.join(&pod.name), &world.issue(pod, &pod.name));
    }
    world.meets();
    let stream = open(&world);
    echoes(&stream);

    let before = world.certificate(&world.server);
    assert_eq!(before["state"], "Available");
    // Half of another: it changes nothing and is told.
    let renewed = world.issue(&world.server, "renewed");
    let place = directory.join(&world.server.name);
    fs::copy(&renewed.key, place.join("tls.key")).unwrap();
    wait::until("the half to be told", || {
        let now = world.certificate(&world.server);
        let error = now["renewalError"].to_string();
        assert_eq!(now["certChain"], before["certChain"]);
        error.contains("do not belong together").then_some(())
    });
    world.meets();
    put(&place, &renewed);
    wait::until("the new certificate", || {
        let now = world.certificate(&world.server);
        (now["certChain"] != before["certChain"] && now["renewalError"].is_null()).then_some(())
    });
    world.meets();
    echoes(&stream);
    world.tells_no_secrets();
}

fn certificates_come_from_a_workload_api_and_outlive_it() {
    let node = Node::new();
    let mut api = WorkloadApi::start(node.directory().join("workload.sock"));
    let world = World::new(&[], api.environment(), node);
    let _echo = App::start(&world.server.ns, (Family::V4.any(), PORT).into(), app::echo);
    wait::until("the refusal to be told", || {
        let state = world.certificate(&world.client)["state"].to_string();
        state
            .contains("PermissionDenied: no identity issued")
            .then_some(())
    });
    let pods = [&world.client, &world.server];
    let files = pods.map(|pod| world.issue(pod, &pod.name));
    // One alone: the other hears whom there is.
    api.tell([(identity(pods[0]), &files[0])]);
    wait::until("the lack to be told", || {
        let state = world.certificate(&world.server)["state"].to_string();
        state.contains("none for this identity among 1").then_some(())
    });
    api.tell([0, 1].map(|one| (identity(pods[one]), &files[one])));
    world.meets();
    let stream = open(&world);
    echoes(&stream);

    api.down();
    wait::until("the loss to be told", || {
        let now = world.certificate(&world.server);
        assert_eq!(now["state"], "Available");
        now["renewalError"].is_string().then_some(())
    });
    world.meets();
    // Back, with others.
    let before = world.certificate(&world.server)["certChain"].clone();
    let renewed = pods.map(|pod| world.issue(pod, &format!("new-{}", pod.name)));
    api.tell([0, 1].map(|one| (identity(pods[one]), &renewed[one])));
    api.up();
    wait::until("the new certificate", || {
        (world.certificate(&world.server)["certChain"] != before).then_some(())
    });
    world.meets();
    echoes(&stream);
    world.tells_no_secrets();
}
