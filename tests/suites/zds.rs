//! Pods from a ZDS server, as a node agent drives a proxy: one of the kit's, and an independent one in Python.

use std::{path::Path, process::ExitCode};

use redirector_tests::{
    agent::{Agent, Options, Redirect},
    app::{self, App},
    capture::opened_ports,
    mesh::PORT,
    node::{Family, Node, Pod},
    process::{Process, command},
    suite::{Needs, case, main as suite},
    wait,
    workloads::Workloads,
    zds::{ZdsConnection, ZdsServer},
};

fn main() -> ExitCode {
    let cases = vec![
        case("pods_come_by_zds", pods_come_by_zds),
        case("an_added_pod_may_be_added_again", an_added_pod_may_be_added_again),
        case("a_deleted_pod_is_released", a_deleted_pod_is_released),
        case("pods_outlive_a_connection", pods_outlive_a_connection),
        case(
            "a_snapshot_releases_those_it_does_not_name",
            a_snapshot_releases_those_it_does_not_name,
        ),
        case(
            "what_cannot_be_captured_is_refused",
            what_cannot_be_captured_is_refused,
        ),
        case("a_killed_agent_comes_back", a_killed_agent_comes_back),
        case(
            "without_redirection_there_are_listeners_only",
            without_redirection_there_are_listeners_only,
        ),
        case("an_independent_server_drives_us", an_independent_server_drives_us),
    ];
    suite(Needs::Agent, 2, cases)
}

struct Zds {
    connection: ZdsConnection,
    agent: Agent,
    server: ZdsServer,
    pods: [Pod; 2],
    node: Node,
}

impl Zds {
    /// An agent that has been sent pods `client` and `server`, and the end of the snapshot.
    fn start() -> Self {
        let node = Node::new();
        let pods = ["client", "server"].map(|name| node.pod(name));
        let server = ZdsServer::listen(&node.directory().join("zds.sock")).unwrap();
        let zds = Some(server.path().to_owned());
        let agent = Agent::start(
            &node,
            &Workloads::hbone(&pods),
            Options {
                zds,
                ..Options::default()
            },
        );
        let connection = server.accept().unwrap();
        let zds = Self {
            connection,
            agent,
            server,
            pods,
            node,
        };
        zds.send_snapshot();
        zds
    }

    fn send_snapshot(&self) {
        self.pods
            .iter()
            .for_each(|pod| self.connection.add(pod).unwrap().unwrap());
        self.connection.snapshot_sent().unwrap().unwrap();
    }

    /// They talk, and only connections to this port are opened between them.
    fn talk(&self, port_on_the_wire: u16) {
        let [client, server] = &self.pods;
        for family in Family::BOTH {
            let _app = App::start(&server.ns, (family.any(), PORT).into(), app::who);
            let capture = self.node.capture(server);
            let seen = app::ask_who(&client.ns, server.addr(family, PORT)).unwrap();
            assert_eq!(seen, client.ip(family).to_string());
            let ports = opened_ports(&capture.stop());
            assert!(ports.iter().all(|port| *port == port_on_the_wire), "{ports:?}");
        }
    }
}

fn pods_come_by_zds() {
    let zds = Zds::start();
    zds.talk(15008);
    // It is ready once the snapshot has come.
    let readiness = ([127, 0, 0, 1], 15021).into();
    wait::until("readiness", || {
        let (status, _) = app::http_get(&zds.node.host.ns, readiness, "/healthz/ready").ok()?;
        (status == 200).then_some(())
    });
}

fn an_added_pod_may_be_added_again() {
    let zds = Zds::start();
    let namespaces = || {
        zds.agent
            .descriptors()
            .iter()
            .filter(|kind| *kind == "net")
            .count()
    };
    let before = namespaces();
    for _ in 0..20 {
        zds.pods
            .iter()
            .for_each(|pod| zds.connection.add(pod).unwrap().unwrap());
    }
    zds.talk(15008);
    wait::until("no descriptor to be left over", || {
        (namespaces() <= before).then_some(())
    });
}

fn a_deleted_pod_is_released() {
    let zds = Zds::start();
    zds.talk(15008);
    zds.pods
        .iter()
        .for_each(|pod| zds.connection.del(&pod.uid).unwrap().unwrap());
    zds.connection.del("never-heard-of").unwrap().unwrap();
    zds.talk(PORT);
    for pod in &zds.pods {
        assert!(
            !pod.ns.ip_output("rule show").contains("1337"),
            "a rule is left in {}",
            pod.name
        );
    }
}

fn pods_outlive_a_connection() {
    let mut zds = Zds::start();
    zds.connection = reconnect(&zds.server, zds.connection);
    // Nothing has been named on the new connection yet.
    zds.talk(15008);
    zds.connection.keep(&zds.pods[0].uid).unwrap().unwrap();
    zds.connection.add(&zds.pods[1]).unwrap().unwrap();
    zds.connection.snapshot_sent().unwrap().unwrap();
    zds.talk(15008);
}

fn a_snapshot_releases_those_it_does_not_name() {
    let mut zds = Zds::start();
    zds.connection = reconnect(&zds.server, zds.connection);
    zds.connection.snapshot_sent().unwrap().unwrap();
    wait::until("the pods to be released", || {
        let captured = |pod: &Pod| pod.ns.proc_net("tcp6").is_ok_and(|text| text.contains(":3A99 "));
        (!zds.pods.iter().any(captured)).then_some(())
    });
    zds.talk(PORT);
}

fn reconnect(server: &ZdsServer, connection: ZdsConnection) -> ZdsConnection {
    drop(connection);
    server.accept().unwrap()
}

fn what_cannot_be_captured_is_refused() {
    let zds = Zds::start();
    let [mut pod, _] = ["other", "unused"].map(|name| zds.node.pod(name));
    pod.uid = "../x".to_owned();
    let error = zds.connection.add(&pod).unwrap().unwrap_err();
    assert!(error.contains("UID"), "{error:?}");
    // The connection goes on.
    pod.uid = "good".to_owned();
    zds.connection.add(&pod).unwrap().unwrap();
}

fn a_killed_agent_comes_back() {
    let mut zds = Zds::start();
    zds.agent.kill();
    zds.agent.restart(&zds.node);
    zds.connection = zds.server.accept().unwrap();
    zds.send_snapshot();
    zds.talk(15008);
}

fn without_redirection_there_are_listeners_only() {
    let node = Node::new();
    let pods = ["client", "server"].map(|name| node.pod(name));
    let server = ZdsServer::listen(&node.directory().join("zds.sock")).unwrap();
    let options = Options {
        zds: Some(server.path().to_owned()),
        redirect: Redirect::None,
        ..Options::default()
    };
    let agent = Agent::start(&node, &Workloads::hbone(&pods), options);
    let connection = server.accept().unwrap();
    let rules = pods[0].ns.ip_output("rule show");
    let zds = Zds {
        connection,
        agent,
        server,
        pods,
        node,
    };
    zds.send_snapshot();
    for pod in &zds.pods {
        let listeners = pod.ns.proc_net("tcp6").unwrap();
        for port in [15001, 15006, 15008] {
            assert!(
                listeners.contains(&format!(":{port:04X} ")),
                "no listener on {port} in {}",
                pod.name
            );
        }
        assert_eq!(pod.ns.ip_output("rule show"), rules);
    }
    zds.talk(PORT);
}

fn an_independent_server_drives_us() {
    let node = Node::new();
    let pods = ["client", "server"].map(|name| node.pod(name));
    let socket = node.directory().join("zds.sock");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/zds_server.py");
    let mut python = command(&node.host.ns, "/usr/bin/python3");
    python.arg(script).arg(&socket);
    for pod in &pods {
        python
            .args([&pod.uid, &pod.name, &pod.namespace, &pod.name])
            .arg(pod.ns.path());
    }
    let server = Process::start(&mut python, &node.directory().join("zds.log")).unwrap();
    wait::until("the server to listen", || {
        server.output().contains("listening").then_some(())
    });
    let _agent = Agent::start(
        &node,
        &Workloads::hbone(&pods),
        Options {
            zds: Some(socket),
            ..Options::default()
        },
    );
    let says = "listening\nhello 0801\nadd client ack\nadd server ack\nsnapshot ack\n";
    wait::until("the snapshot's acknowledgement", || {
        server.output().contains("snapshot").then_some(())
    });
    assert_eq!(server.output(), says);
    let [client, server] = &pods;
    let _app = App::start(&server.ns, (Family::V4.any(), PORT).into(), app::who);
    let capture = node.capture(server);
    assert_eq!(
        app::ask_who(&client.ns, server.addr(Family::V4, PORT)).unwrap(),
        client.v4.to_string()
    );
    assert_eq!(opened_ports(&capture.stop()), [15008]);
}
