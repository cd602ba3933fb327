//! Policies from the workload file, on real pods: who reaches an application over HBONE and in plain, and which connections
//! stay when the file changes.

use std::{
    collections::BTreeMap,
    io::{self, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    process::ExitCode,
};

use redirector_tests::{
    agent::{Agent, Options},
    app::{self, App},
    mesh::{PORT, refused},
    node::{Family, Host, Node, Pod},
    suite::{Case, Needs, case, main as suite},
    wait,
    workloads::Workloads,
};
use serde_json::{Value, json};

type Test = fn(Family);

const TESTS: &[(&str, Test)] = &[
    (
        "who_is_not_allowed_never_reaches_the_application",
        who_is_not_allowed_never_reaches_the_application,
    ),
    (
        "a_denied_port_is_denied_to_everybody",
        a_denied_port_is_denied_to_everybody,
    ),
    (
        "a_negated_principal_denies_all_others",
        a_negated_principal_denies_all_others,
    ),
    (
        "a_change_closes_what_it_denies_and_nothing_else",
        a_change_closes_what_it_denies_and_nothing_else,
    ),
    (
        "one_change_closes_hundreds_of_connections",
        one_change_closes_hundreds_of_connections,
    ),
    ("a_dry_run_permits", a_dry_run_permits),
    (
        "a_pod_that_the_mesh_does_not_know_takes_what_no_policy_may_deny",
        a_pod_that_the_mesh_does_not_know_takes_what_no_policy_may_deny,
    ),
];

fn main() -> ExitCode {
    let mut cases: Vec<Case> = Vec::new();
    for family in Family::BOTH {
        for (name, test) in TESTS {
            let test = *test;
            cases.push(case(format!("{name}_{}", family.name()), move || test(family)));
        }
    }
    suite(Needs::Agent, 2, cases)
}

/// A server, two that call it over HBONE, and one that does so in plain. The agent is dropped first.
struct Demo {
    agent: Agent,
    server: Pod,
    friend: Pod,
    other: Pod,
    stranger: Pod,
    node: Node,
}

impl Demo {
    /// All but the stranger are enrolled, and in the workload file that `edit` completes.
    fn new(edit: impl FnOnce(Workloads) -> Workloads) -> Self {
        let node = Node::new();
        let [server, friend, other, stranger] =
            ["server", "friend", "other", "stranger"].map(|name| node.pod(name));
        let workloads = edit(Workloads::hbone([&server, &friend, &other]));
        let options = Options {
            arguments: ["--log-level", "info,redirector::proxy::connections=debug"]
                .map(str::to_owned)
                .to_vec(),
            ..Options::default()
        };
        let agent = Agent::start(&node, &workloads, options);
        for pod in [&server, &friend, &other] {
            agent.enrol(pod);
        }
        Self {
            agent,
            server,
            friend,
            other,
            stranger,
            node,
        }
    }

    /// Changes the workload file of the running agent.
    fn rewrite(&self, edit: impl FnOnce(Workloads) -> Workloads) {
        let path = self.node.directory().join("workloads.yaml");
        edit(Workloads::hbone([&self.server, &self.friend, &self.other]))
            .write(&path)
            .unwrap();
    }

    fn serve(&self, family: Family, port: u16, handler: app::Handler) -> App {
        App::start(&self.server.ns, (family.any(), port).into(), handler)
    }

    /// These are served, and are seen by their own addresses.
    fn served(&self, family: Family, port: u16, clients: &[&Host]) {
        let _app = self.serve(family, port, app::who);
        for client in clients {
            let seen = app::ask_who(&client.ns, self.server.addr(family, port)).unwrap();
            assert_eq!(seen, client.ip(family).to_string());
        }
    }

    /// These get no answer, and the application never learns that they asked.
    fn unserved(&self, family: Family, port: u16, clients: &[&Host]) {
        let listen = || TcpListener::bind((family.any(), port));
        let application = self.server.ns.run(listen).unwrap();
        application.set_nonblocking(true).unwrap();
        for client in clients {
            refused(&client.ns, self.server.addr(family, port));
        }
        let asked = application.accept().map(|(_, by)| by);
        assert_eq!(asked.unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    /// The access log has a connection in `direction` from `client`, which ended with an error that says `text`.
    fn logged(&self, direction: &str, client: SocketAddr, text: &str) {
        let of_client = |entry: &BTreeMap<String, String>| {
            let has = |field: &str, text: &str| entry.get(field).is_some_and(|value| value.contains(text));
            has("direction", direction)
                && has("error", text)
                && entry["src.addr"]
                    .parse::<SocketAddr>()
                    .is_ok_and(|src| src.ip() == client.ip())
        };
        wait::until(&format!("an {direction} connection with {text:?}"), || {
            self.agent.access_log().into_iter().find(|entry| of_client(entry))
        });
    }
}

fn principal(name: &str) -> Value {
    json!({"Exact": format!("cluster.local/ns/demo/sa/{name}")})
}

fn who_is_not_allowed_never_reaches_the_application(family: Family) {
    let demo = Demo::new(|workloads| {
        let friend = json!({"principals": [principal("friend")]});
        workloads.with_policy("friends", "Allow", &[friend])
    });
    let Demo {
        friend,
        other,
        stranger,
        node,
        ..
    } = &demo;
    demo.unserved(family, PORT, &[other, stranger, &node.outside]);
    demo.served(family, PORT, &[friend]);
    let none = "denied by policy: none of the ALLOW policies matches: demo/friends";
    for (direction, client, error) in [
        ("inbound", &other.host, none),
        ("inbound", &stranger.host, none),
        ("outbound", &other.host, "401"),
    ] {
        demo.logged(direction, client.addr(family, 0), error);
    }
}

fn a_denied_port_is_denied_to_everybody(family: Family) {
    let demo = Demo::new(|workloads| {
        let policy = json!({"scope": "WorkloadSelector", "action": "Deny"});
        let admin = json!({"destinationPorts": [PORT + 1], "destinationIps": ["10.77.0.0/16", "fd77::/64"]});
        workloads
            .with_policy_of("no-admin", policy, &[admin])
            .naming("server", "no-admin")
    });
    let clients = [&*demo.friend, &*demo.stranger];
    demo.served(family, PORT, &clients);
    demo.unserved(family, PORT + 1, &clients);
    for client in clients {
        let error = "denied by policy: DENY policy demo/no-admin matches";
        demo.logged("inbound", client.addr(family, 0), error);
    }
    // Another pod, which does not name the policy.
    let _app = App::start(&demo.other.ns, (family.any(), PORT + 1).into(), app::who);
    app::ask_who(&demo.friend.ns, demo.other.addr(family, PORT + 1)).unwrap();
}

fn a_negated_principal_denies_all_others(family: Family) {
    let demo = Demo::new(|workloads| {
        let all_but_friend = json!({"notPrincipals": [principal("friend")]});
        workloads.with_policy("others", "Deny", &[all_but_friend])
    });
    demo.served(family, PORT, &[&demo.friend]);
    // Who proves nothing is not the friend either.
    demo.unserved(family, PORT, &[&demo.other, &demo.stranger]);
}

/// A client's connection to an application that echoes.
struct Talk(TcpStream);

impl Talk {
    fn new(client: &Host, server: SocketAddr) -> Self {
        let mut talk = Self(app::connect(&client.ns, server).unwrap());
        talk.goes_on();
        talk
    }

    fn goes_on(&mut self) {
        let mut answer = [0; 4];
        self.0.write_all(b"ping").unwrap();
        self.0.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"ping");
    }

    /// The connection is reset without our doing anything; the kit's deadline for reading is what there is to wait.
    fn is_reset(&mut self) {
        let end = self.0.read(&mut [0]).unwrap_err();
        assert_eq!(end.kind(), io::ErrorKind::ConnectionReset, "{end}");
    }
}

fn a_change_closes_what_it_denies_and_nothing_else(family: Family) {
    let demo = Demo::new(|workloads| workloads);
    let _app = demo.serve(family, PORT, app::echo);
    let talk = |client: &Host| Talk::new(client, demo.server.addr(family, PORT));
    let [mut friend, mut other, mut stranger] = [&*demo.friend, &*demo.other, &*demo.stranger].map(talk);

    // It is there, and nobody names it.
    let anonymous = |workloads: Workloads| {
        let policy = json!({"scope": "WorkloadSelector", "action": "Deny"});
        let nobody = json!({"notPrincipals": [{"Presence": []}]});
        workloads.with_policy_of("no-plaintext", policy, &[nobody])
    };
    demo.rewrite(anonymous);
    wait::until("the policy to be read", || {
        let log = demo.agent.log();
        log.lines()
            .any(|line| line.contains("workload file read again") && line.contains("policies=1"))
            .then_some(())
    });
    for talk in [&mut friend, &mut other, &mut stranger] {
        talk.goes_on();
    }

    demo.rewrite(|workloads| anonymous(workloads).naming("server", "no-plaintext"));
    stranger.is_reset();
    friend.goes_on();
    other.goes_on();

    demo.rewrite(|workloads| {
        let friend = json!({"serviceAccounts": [{"namespace": "demo", "serviceAccount": "friend"}]});
        anonymous(workloads).with_policy("friends", "Allow", &[friend])
    });
    other.is_reset();
    friend.goes_on();

    for (client, error) in [
        (&demo.stranger.host, "DENY policy demo/no-plaintext matches"),
        (
            &demo.other.host,
            "none of the ALLOW policies matches: demo/friends",
        ),
    ] {
        let error = format!("closed due to policy change: {error}");
        demo.logged("inbound", client.addr(family, 0), &error);
    }
}

/// In tunnels, which hold a hundred each, and in plain.
fn one_change_closes_hundreds_of_connections(family: Family) {
    const EACH: usize = 250;
    let demo = Demo::new(|workloads| workloads);
    let bind = |port| move || TcpListener::bind((family.any(), port));
    let applications = [PORT, PORT + 1].map(|port| demo.server.ns.run(bind(port)).unwrap());
    let open = |client: &Host, port: u16, application: &TcpListener| -> Vec<(TcpStream, TcpStream)> {
        let server = demo.server.addr(family, port);
        let connect = |_| {
            let client = app::connect(&client.ns, server).unwrap();
            let (mut application, _) = application.accept().unwrap();
            application.write_all(b"x").unwrap();
            (client, application)
        };
        (0..EACH).map(connect).collect()
    };
    for application in &applications {
        // Of accepting, too.
        let socket = socket2::SockRef::from(application);
        socket.set_read_timeout(Some(app::IO_DEADLINE)).unwrap();
    }
    let [ours, admin] = &applications;
    let mut kept = open(&demo.friend, PORT, ours);
    let mut closed = open(&demo.friend, PORT + 1, admin);
    closed.extend(open(&demo.stranger, PORT + 1, admin));
    for (client, _) in kept.iter_mut().chain(&mut closed) {
        client.read_exact(&mut [0]).unwrap();
    }

    demo.rewrite(|workloads| {
        let admin = json!({"destinationPorts": [PORT + 1]});
        workloads.with_policy("no-admin", "Deny", &[admin])
    });
    for (client, application) in &mut closed {
        for end in [client, application] {
            end.set_read_timeout(Some(app::IO_DEADLINE)).unwrap();
            let error = end.read(&mut [0]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::ConnectionReset, "{error}");
        }
    }
    for (client, application) in &mut kept {
        application.write_all(b"y").unwrap();
        client.read_exact(&mut [0]).unwrap();
    }
}

fn a_dry_run_permits(family: Family) {
    let demo = Demo::new(|workloads| {
        let dry = |action: &str| json!({"scope": "Global", "action": action, "dryRun": true});
        let ours = json!({"destinationPorts": [PORT]});
        workloads
            .with_policy_of("nobody", dry("Allow"), &[])
            .with_policy_of("closed", dry("Deny"), &[ours])
    });
    demo.served(family, PORT, &[&demo.friend, &demo.stranger]);
    let outcome = "denied: DENY policy demo/closed matches";
    wait::until("the outcome in the log", || {
        demo.agent.log().contains(outcome).then_some(())
    });
}

fn a_pod_that_the_mesh_does_not_know_takes_what_no_policy_may_deny(family: Family) {
    let admin = json!({"destinationPorts": [PORT + 1]});
    let of_namespace = |workloads: Workloads| {
        let closed = json!({"destinationPorts": [PORT + 2]});
        workloads.with_policy("closed", "Deny", &[closed])
    };
    let of_one = |workloads: Workloads| {
        let policy = json!({"scope": "WorkloadSelector", "action": "Deny"});
        of_namespace(workloads)
            .with_policy_of("no-admin", policy, std::slice::from_ref(&admin))
            .naming("friend", "no-admin")
    };
    let demo = Demo::new(of_namespace);
    // Enrolled, and not in the workload file.
    demo.agent.enrol(&demo.stranger);
    let ask = |port| app::ask_who(&demo.node.outside.ns, demo.stranger.addr(family, port));
    let _apps =
        [PORT, PORT + 2].map(|port| App::start(&demo.stranger.ns, (family.any(), port).into(), app::who));
    ask(PORT).unwrap();
    ask(PORT + 2).unwrap_err();

    // From now on a policy may be for this pod, as far as anybody knows.
    demo.rewrite(of_one);
    wait::until("the policy to be read", || ask(PORT).err());
    let unknown = "no workload for the local pod demo/stranger";
    demo.logged("inbound", demo.node.outside.addr(family, 0), unknown);

    demo.rewrite(|workloads| of_one(workloads.with(&demo.stranger, "HBONE")));
    wait::until("the pod to be known", || ask(PORT).ok());
    ask(PORT + 2).unwrap_err();
}
