//! What tests of control planes begin with: a node with two pods, and an agent that was told where its control plane is.

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
};

use serde_json::Value;

use crate::{
    agent::{Agent, Options},
    app::{self, App},
    capture::opened_ports,
    grpc::Credentials,
    mesh::{PORT, refused},
    node::{Family, Node, Pod},
    wait,
    workloads::Workloads,
};

/// A node with two pods and an agent that was told of a control plane. The agent is dropped first.
#[derive(Debug)]
pub struct Demo {
    /// The agent.
    pub agent: Agent,
    /// An enrolled pod.
    pub client: Pod,
    /// An enrolled pod.
    pub server: Pod,
    /// The node.
    pub node: Node,
}

/// A node and its pods, before there is an agent.
#[derive(Debug)]
pub struct Ground {
    /// The node.
    pub node: Node,
    /// A pod.
    pub client: Pod,
    /// A pod.
    pub server: Pod,
}

impl Default for Ground {
    fn default() -> Self {
        Self::new()
    }
}

impl Ground {
    /// Two pods on a node.
    pub fn new() -> Self {
        let node = Node::new();
        let [client, server] = ["client", "server"].map(|name| node.pod(name));
        Self { node, client, server }
    }

    /// What a control plane of this node shows, and is shown.
    pub fn credentials(&self) -> Credentials {
        Credentials::create(self.node.directory(), "plane")
    }

    /// Starts the agent with a workload file beside what is in `environment`, and enrols both pods.
    pub fn start(self, environment: Vec<(String, String)>, workloads: &Workloads) -> Demo {
        let options = Options {
            environment,
            ..Options::default()
        };
        self.start_with(options, workloads)
    }

    /// The same, with more options.
    pub fn start_with(self, mut options: Options, workloads: &Workloads) -> Demo {
        // Each connection that comes after another's end makes a tunnel, and so a handshake.
        let arguments = ["--pool-unused-release-timeout", "100ms"];
        options.arguments.extend(arguments.map(str::to_owned));
        let Self { node, client, server } = self;
        let agent = Agent::start(&node, workloads, options);
        agent.enrol(&client);
        agent.enrol(&server);
        Demo {
            agent,
            client,
            server,
            node,
        }
    }
}

impl Demo {
    /// Asks the server who calls.
    pub fn ask(&self, family: Family) -> std::io::Result<String> {
        app::ask_who(&self.client.ns, self.server.addr(family, PORT))
    }

    /// An application of the server's.
    pub fn serve(&self, family: Family, handler: app::Handler) -> App {
        App::start(&self.server.ns, (family.any(), PORT).into(), handler)
    }

    /// Waits until the server is reached, by HBONE and by nothing else.
    ///
    /// # Panics
    /// Else.
    pub fn meets(&self, family: Family) {
        let capture = self.node.capture(&self.server);
        let seen = wait::until("the pods to meet", || self.ask(family).ok());
        assert_eq!(seen, self.client.ip(family).to_string());
        let ports = opened_ports(&capture.stop());
        assert!(ports.iter().all(|port| *port == 15008), "{ports:?}");
        let entry = wait::until("the access log", || {
            let log = self.agent.access_log();
            log.into_iter().rev().find(|entry| !entry.contains_key("error"))
        });
        assert!(entry.contains_key("dst.hbone_addr"), "{entry:?}");
    }

    /// Waits until the pods don't meet, and returns what the access log says last.
    ///
    /// # Panics
    /// Else.
    pub fn parts(&self, family: Family) -> String {
        wait::until("the pods to be parted", || {
            self.ask(family).is_err().then_some(())
        });
        refused(&self.client.ns, self.server.addr(family, PORT));
        let log = self.agent.access_log();
        let mut errors = log.iter().rev().filter_map(|entry| entry.get("error"));
        errors.next().cloned().unwrap_or_default()
    }

    /// Waits until the log gives this as a reason.
    ///
    /// # Panics
    /// When it does not.
    pub fn tells(&self, reason: &str) {
        wait::until(reason, || self.agent.log().contains(reason).then_some(()));
    }

    /// How many workloads the agent knows.
    ///
    /// # Panics
    /// When it does not say.
    pub fn workloads(&self) -> u64 {
        self.dump()["counts"]["workloads"].as_u64().unwrap()
    }

    /// Status and text of the readiness endpoint.
    ///
    /// # Panics
    /// When there are none.
    pub fn readiness(&self) -> (u16, String) {
        let readiness = (std::net::Ipv4Addr::LOCALHOST, 15021).into();
        app::http_get(&self.node.host.ns, readiness, "/healthz/ready").unwrap()
    }

    /// What the config dump says of the certificate of a pod's identity.
    ///
    /// # Panics
    /// When there is nothing.
    pub fn certificate(&self, pod: &Pod) -> Value {
        let dump = self.dump();
        let all = dump["certificates"].as_array().unwrap();
        let one = all.iter().find(|one| one["identity"] == pod.identity());
        one.unwrap_or_else(|| panic!("{} is not in {all:?}", pod.name))
            .clone()
    }

    /// The config dump.
    ///
    /// # Panics
    /// When there is none.
    pub fn dump(&self) -> Value {
        serde_json::from_str(&self.dumped()).unwrap()
    }

    fn dumped(&self) -> String {
        let admin = (std::net::Ipv4Addr::LOCALHOST, 15000).into();
        app::http_get(&self.node.host.ns, admin, "/config_dump")
            .unwrap()
            .1
    }

    /// Nobody reads a token or a key where everybody may look.
    ///
    /// # Panics
    /// Else.
    pub fn tells_no_secrets(&self) {
        for text in [self.dumped(), self.agent.log()] {
            assert!(
                !text.contains("plane-secret") && !text.contains("PRIVATE KEY"),
                "{text}"
            );
        }
    }
}

/// A connection to an echo, which is in use.
///
/// # Panics
/// When it is refused.
pub fn open(demo: &Demo, family: Family) -> TcpStream {
    let stream = app::connect(&demo.client.ns, demo.server.addr(family, PORT)).unwrap();
    stream.set_read_timeout(Some(app::IO_DEADLINE)).unwrap();
    stream
}

/// Uses it.
pub fn echoes(mut stream: &TcpStream) -> std::io::Result<()> {
    stream.write_all(b"ping")?;
    stream.read_exact(&mut [0; 4])
}
