//! Certificates of files that are replaced, of SPIFFE Workload APIs that share no code with us (by tonic with messages of its own, by grpcio
//! with messages made by hand), and of a signer behind Kubernetes' API; and peers who are revoked, or of a trust domain with aliases.

use std::{
    fs,
    io::{ErrorKind, Read as _, Write as _},
    net::TcpStream,
    path::Path,
    process::ExitCode,
};

#[path = "identity/peers.rs"]
mod peers;
#[path = "identity/signer.rs"]
mod signer;

use redirector_tests::{
    agent::{Agent, Options},
    app::{self, App},
    ca::{Credentials, Root},
    hbone_client::hbone_client,
    mesh::PORT,
    node::{Family, Node, Pod},
    suite::{Case, Needs, case, main as suite},
    wait,
    workload_api::{Api, PythonWorkloadApi, WorkloadApi},
    workloads::Workloads,
};

fn main() -> ExitCode {
    let cases: Vec<Case> = vec![
        case(
            "certificates_come_from_files_and_are_replaced",
            certificates_come_from_files_and_are_replaced,
        ),
        case("certificates_come_from_a_workload_api_and_outlive_it", || {
            let node = Node::new();
            let api = WorkloadApi::start(node.directory().join("workload.sock"));
            certificates_come_from_a_workload_api_and_outlive_it(api, node);
        }),
        case(
            "certificates_come_from_a_workload_api_in_python_and_outlive_it",
            || {
                let node = Node::new();
                let api = PythonWorkloadApi::start(node.directory().join("workload.sock"));
                certificates_come_from_a_workload_api_and_outlive_it(api, node);
            },
        ),
        case(
            "who_is_revoked_is_refused_and_cut_off_and_comes_back",
            peers::who_is_revoked_is_refused_and_cut_off_and_comes_back,
        ),
        case(
            "an_alias_of_the_trust_domain_is_let_in_and_a_foreign_one_is_not",
            peers::an_alias_of_the_trust_domain_is_let_in_and_a_foreign_one_is_not,
        ),
        case(
            "certificates_come_from_a_signer_of_kubernetes_whatever_it_did_before",
            signer::certificates_come_from_a_signer_of_kubernetes_whatever_it_did_before,
        ),
        case(
            "requests_to_a_signer_are_approved_by_the_agent_where_that_is_wanted",
            signer::requests_to_a_signer_are_approved_by_the_agent_where_that_is_wanted,
        ),
        case(
            "a_signer_that_never_answers_is_told_and_recovers",
            signer::a_signer_that_never_answers_is_told_and_recovers,
        ),
    ];
    suite(Needs::Peers, 2, cases)
}

fn identity(pod: &Pod) -> String {
    format!("spiffe://cluster.local/ns/demo/sa/{}", pod.name)
}

/// Pods, and a root that signs for them. The agent is dropped first.
struct World {
    agent: Agent,
    root: Root,
    client: Pod,
    server: Pod,
    /// A second client.
    other: Pod,
    node: Node,
}

impl World {
    fn new(arguments: &[&str], environment: Vec<(String, String)>, node: Node) -> Self {
        Self::with(arguments, environment, node, |workloads| workloads)
    }

    /// The workload file as `changed`.
    fn with(
        arguments: &[&str],
        environment: Vec<(String, String)>,
        node: Node,
        changed: impl FnOnce(Workloads) -> Workloads,
    ) -> Self {
        let [client, server, other] = ["client", "server", "other"].map(|name| node.pod(name));
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
        let pods = [&client, &server, &other];
        let agent = Agent::start(&node, &changed(Workloads::hbone(pods)), options);
        for pod in pods {
            agent.enrol(pod);
        }
        let root = Root::create(node.directory());
        Self {
            agent,
            root,
            client,
            server,
            other,
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

    /// What it says of the revocation lists: what is wrong, and how many certificates are on each.
    fn revocations(&self) -> (String, Vec<u64>) {
        let dump: serde_json::Value = serde_json::from_str(&self.dump()).unwrap();
        let shown = &dump["revocations"];
        let lists = shown["lists"].as_array().unwrap().iter();
        (
            shown["problem"].as_str().unwrap_or_default().to_owned(),
            lists.map(|list| list["revoked"].as_u64().unwrap()).collect(),
        )
    }

    /// Waits until the agent has told something of what it was refused, or has refused.
    fn tells(&self, texts: &[&str]) {
        let told = || {
            let _ = self.ask();
            let log = self.agent.log();
            log.lines()
                .any(|line| texts.iter().all(|text| line.contains(text)))
                .then_some(())
        };
        wait::until(&format!("{texts:?} in the log"), told);
    }

    /// Waits until the config dump says of a pod that it has no certificate, with these words.
    fn lacks(&self, pod: &Pod, words: &[&str]) {
        // A signer that is silent is waited for.
        wait::within(3 * wait::DEADLINE, &format!("{words:?} to be told"), || {
            let state = self.certificate(pod)["state"].to_string();
            let told = state.contains("Unavailable") && words.iter().all(|word| state.contains(word));
            told.then_some(())
        });
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
    open_from(world, &world.client)
}

fn open_from(world: &World, client: &Pod) -> TcpStream {
    let stream = app::connect(&client.ns, world.server.addr(Family::V4, PORT)).unwrap();
    stream.set_read_timeout(Some(app::IO_DEADLINE)).unwrap();
    stream
}

fn echoes(mut stream: &TcpStream) {
    stream.write_all(b"ping").unwrap();
    stream.read_exact(&mut [0; 4]).unwrap();
}

/// That the connection is cut while it is in use. Kept in use, since an echo that is idle for long ends by itself.
fn is_cut(mut stream: &TcpStream) {
    let error = wait::until("the connection to be cut", || {
        let sent = stream.write_all(b"ping");
        sent.and_then(|()| stream.read_exact(&mut [0; 4])).err()
    });
    assert!(
        !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut),
        "it is open still: {error}"
    );
}

/// As a mount is changed: at once.
fn replace(path: &Path, content: &str) {
    let next = path.with_extension("next");
    fs::write(&next, content).unwrap();
    fs::rename(&next, path).unwrap();
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

fn certificates_come_from_a_workload_api_and_outlive_it(mut api: impl Api, node: Node) {
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
    api.tell(&[(identity(pods[0]), &files[0])], &[]);
    wait::until("the lack to be told", || {
        let state = world.certificate(&world.server)["state"].to_string();
        state.contains("none for this identity among 1").then_some(())
    });
    let all = [0, 1].map(|one| (identity(pods[one]), &files[one]));
    api.tell(&all, &[]);
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
    let all = [0, 1].map(|one| (identity(pods[one]), &renewed[one]));
    api.tell(&all, &[]);
    api.up();
    wait::until("the new certificate", || {
        (world.certificate(&world.server)["certChain"] != before).then_some(())
    });
    world.meets();

    // Who comes from another trust domain is let in while its roots are told, and by nobody else's word.
    let directory = world.node.directory().join("far");
    fs::create_dir(&directory).unwrap();
    let (stranger, far_root) = (world.node.pod("stranger"), Root::create(&directory));
    let issue = |root: &Root, name| root.issue(&directory, name, "spiffe://far.test/ns/demo/sa/far");
    let (far, false_one) = (issue(&far_root, "far"), issue(&world.root, "false"));
    let call = |own: &Credentials| {
        let to = (world.server.v4.to_string(), 15008);
        let authority = world.server.addr(Family::V4, PORT).to_string();
        // By the server's own roots they know whom they call.
        let own = Credentials {
            root: files[1].root.clone(),
            ..own.clone()
        };
        let identity = identity(&world.server);
        hbone_client(&stranger, to, &authority, &own, &identity, "CONNECT")
    };
    let is_let_in = |own| call(own) == "status 200\nbody hello\n\n";
    assert!(!is_let_in(&far));
    api.tell(&all, &[("spiffe://far.test", &far.root)]);
    wait::until("the far one to be let in", || is_let_in(&far).then_some(()));
    assert!(!is_let_in(&false_one));
    world.meets();
    api.tell(&all, &[]);
    wait::until("the far one to be kept out", || (!is_let_in(&far)).then_some(()));
    world.meets();
    echoes(&stream);
    world.tells_no_secrets();
}
