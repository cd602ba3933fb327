//! Certificates that nobody is asked for: of files that are replaced, and of SPIFFE Workload APIs that share no code with us, by tonic
//! with messages of its own and by grpcio with messages made by hand.

use std::{
    fs,
    io::{ErrorKind, Read as _, Write as _},
    net::TcpStream,
    path::Path,
    process::ExitCode,
};

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
            who_is_revoked_is_refused_and_cut_off_and_comes_back,
        ),
        case(
            "an_alias_of_the_trust_domain_is_let_in_and_a_foreign_one_is_not",
            an_alias_of_the_trust_domain_is_let_in_and_a_foreign_one_is_not,
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

/// That the connection ends, and not by nobody having said anything.
fn ends(mut stream: &TcpStream) {
    match stream.read(&mut [0]) {
        Ok(0) => {}
        Ok(_) => panic!("it goes on"),
        Err(error) => assert!(
            !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut),
            "it is open still: {error}"
        ),
    }
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

/// Lists by rcgen and by openssl; all pods' certificates are of one root.
fn who_is_revoked_is_refused_and_cut_off_and_comes_back() {
    let node = Node::new();
    let [certificates, lists] = ["certificates", "crl.pem"].map(|name| node.directory().join(name));
    fs::create_dir(&certificates).unwrap();
    let arguments = [
        "--cert-dir",
        certificates.to_str().unwrap(),
        "--crl-file",
        lists.to_str().unwrap(),
    ];
    let no_ca = vec![("FAKE_CA".to_owned(), "false".to_owned())];
    let world = World::new(&arguments, no_ca, node);
    let _echo = App::start(&world.server.ns, (Family::V4.any(), PORT).into(), app::echo);
    let pods = [&world.client, &world.server, &world.other];
    let files = pods.map(|pod| world.issue(pod, &pod.name));
    for (pod, files) in pods.iter().zip(&files) {
        put(&certificates.join(&pod.name), files);
    }
    let [client, server, _] = &files;

    // Without its file, an agent lets everybody in, and says so.
    let (problem, in_force) = world.revocations();
    assert!(problem.contains("crl.pem") && in_force.is_empty(), "{problem}");
    assert!(
        world
            .agent
            .log()
            .contains("no revocation list (CRL_PATH) is in force")
    );
    world.meets();
    replace(&lists, &world.root.crl(&[]));
    wait::until("the empty list", || {
        (world.revocations() == (String::new(), vec![0])).then_some(())
    });
    world.meets();

    let (cut, stays) = (open(&world), open_from(&world, &world.other));
    echoes(&cut);
    echoes(&stays);
    replace(&lists, &world.root.crl(&[&client.serial()]));
    ends(&cut);
    echoes(&stays);
    assert!(world.ask().is_err());
    world.tells(&["tunnel closed", &identity(&world.client), &client.serial()]);
    world.tells(&[
        "TLS handshake failed",
        &identity(&world.client),
        &client.serial(),
        "has been revoked by",
    ]);
    echoes(&open_from(&world, &world.other));

    // What cannot be read lifts nothing.
    for garbage in ["-----BEGIN X509 CRL-----\nMIIB", ""] {
        replace(&lists, garbage);
        wait::until("the garbage to be told", || {
            let (problem, in_force) = world.revocations();
            assert_eq!(in_force, [1]);
            let told = if garbage.is_empty() {
                "no revocation list"
            } else {
                "cut off"
            };
            problem.contains(told).then_some(())
        });
        assert!(world.ask().is_err());
    }

    // The other side's, by somebody else's hand: the client is let in, and lets nobody answer.
    replace(
        &lists,
        &world.root.crl_by_openssl(world.node.directory(), &[server]),
    );
    wait::until("openssl's list", || {
        (world.revocations() == (String::new(), vec![1])).then_some(())
    });
    ends(&stays);
    assert!(world.ask().is_err());
    let refused = format!("{} is refused", identity(&world.server));
    world.tells(&[
        "TLS handshake with",
        &refused,
        &server.serial(),
        "has been revoked by",
    ]);

    // A new certificate is another number.
    put(
        &certificates.join(&world.server.name),
        &world.issue(&world.server, "renewed"),
    );
    world.meets();
    world.tells_no_secrets();
}

/// The client is of another trust domain than the server, whose policy names it as one of the server's own.
fn an_alias_of_the_trust_domain_is_let_in_and_a_foreign_one_is_not() {
    for (domain, is_alias) in [("old.domain", true), ("foreign.domain", false)] {
        let node = Node::new();
        let certificates = node.directory().join("certificates");
        fs::create_dir(&certificates).unwrap();
        let arguments = [
            "--cert-dir",
            certificates.to_str().unwrap(),
            "--trust-domain-alias",
            "older.domain",
            "--trust-domain-alias",
            "old.domain",
        ];
        let no_ca = vec![("FAKE_CA".to_owned(), "false".to_owned())];
        let world = World::with(&arguments, no_ca, node, |workloads| {
            let principal = serde_json::json!({"principals": [{"Exact": "cluster.local/ns/demo/sa/client"}]});
            workloads
                .with_workload_key("client", "trustDomain", domain.into())
                .with_policy("client-alone", "Allow", &[principal])
        });
        let _echo = App::start(&world.server.ns, (Family::V4.any(), PORT).into(), app::echo);
        let of_client = identity(&world.client).replace("cluster.local", domain);
        let directory = world.node.directory();
        let client = world.root.issue(directory, "client", &of_client);
        put(&certificates.join("client"), &client);
        for pod in [&world.server, &world.other] {
            put(&certificates.join(&pod.name), &world.issue(pod, &pod.name));
        }
        if is_alias {
            world.meets();
            // It is in the logs as it is; the policy does not let in just anybody.
            world.tells(&["inbound", &of_client]);
            let other = app::ask(&world.other.ns, world.server.addr(Family::V4, PORT), "hello\n");
            assert!(other.map_or(true, |answer| answer.is_empty()));
        } else {
            world.tells(&["TLS handshake failed", &of_client, "not of trust domain"]);
            assert!(world.ask().is_err());
        }
    }
}
