//! What most tests begin with: a node, an agent, and two enrolled pods.

use std::{io, net::SocketAddr};

use crate::{
    agent::{Agent, Options},
    app,
    netns::Namespace,
    node::{Node, Pod},
    workloads::Workloads,
};

/// The port of the pods' applications.
pub const PORT: u16 = 8080;

/// A node with a running agent and pods `client` and `server`. The agent is dropped first.
#[derive(Debug)]
pub struct Mesh {
    /// The agent.
    pub agent: Agent,
    /// An enrolled pod.
    pub client: Pod,
    /// An enrolled pod.
    pub server: Pod,
    /// A pod that is neither enrolled nor in the workload file.
    pub stranger: Pod,
    /// The node.
    pub node: Node,
}

impl Mesh {
    /// Both pods enrolled, and HBONE between them.
    pub fn hbone(options: Options) -> Self {
        Self::enrolled(options, |client, server| Workloads::hbone([client, server]))
    }

    /// Both pods enrolled, and plaintext between them.
    pub fn plaintext(options: Options) -> Self {
        Self::enrolled(options, |client, server| {
            Workloads::default().with(client, "TCP").with(server, "TCP")
        })
    }

    /// Both pods enrolled, with a workload file of the test's own.
    pub fn enrolled(options: Options, workloads: impl FnOnce(&Pod, &Pod) -> Workloads) -> Self {
        let mesh = Self::started(options, workloads);
        mesh.agent.enrol(&mesh.client);
        mesh.agent.enrol(&mesh.server);
        mesh
    }

    /// The agent runs, and no pod is enrolled yet.
    pub fn started(options: Options, workloads: impl FnOnce(&Pod, &Pod) -> Workloads) -> Self {
        let node = Node::new();
        let (client, server, stranger) = (node.pod("client"), node.pod("server"), node.pod("stranger"));
        let agent = Agent::start(&node, &workloads(&client, &server), options);
        Self {
            agent,
            client,
            server,
            stranger,
            node,
        }
    }
}

/// Tries to connect and to use the connection, and returns why that failed. Refused means: no answer, and not by waiting.
///
/// # Panics
/// When somebody answers, or when the connection hangs.
pub fn refused(ns: &Namespace, addr: SocketAddr) -> io::Error {
    let retries = |ns| crate::counters::kernel(ns, "TcpExt", "TCPSynRetrans");
    let before = retries(ns);
    let error = match app::ask(ns, addr, "hello\n") {
        Ok(answer) if answer.is_empty() => io::ErrorKind::UnexpectedEof.into(),
        Ok(answer) => panic!("{addr} answers {answer:?}"),
        Err(error) => error,
    };
    assert!(
        !matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock),
        "{addr} hangs: {error}"
    );
    assert_eq!(retries(ns), before, "a SYN to {addr} was sent again");
    error
}
