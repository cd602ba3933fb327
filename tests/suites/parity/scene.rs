//! Where the rows play: a node with an agent and pods that rows share, one row at a time.

use std::{
    io::{self, Read, Write},
    net::{IpAddr, Shutdown, SocketAddr, TcpStream},
    sync::{Arc, Mutex, PoisonError, mpsc},
    thread,
    time::Duration,
};

use redirector_tests::{
    agent::Agent,
    app::{self, App},
    counters,
    mesh::PORT,
    netns::Namespace,
    node::{Family, Host, Node, Pod},
    workloads::Workloads,
};
use socket2::{Domain, Protocol, Socket, Type};

use crate::table::{Answer, Backend, Outcome};

/// The port of the services.
pub(crate) const SERVICE_PORT: u16 = 80;
/// Longest wait for a connection that should not come about. A SYN is sent again after one second.
const SILENCE: Duration = Duration::from_millis(400);
/// The same for an answer.
const LONG_SILENCE: Duration = Duration::from_secs(5);

/// A node. The agent is dropped first.
pub(crate) struct World {
    pub(crate) agent: Agent,
    /// An enrolled pod.
    pub(crate) client: Pod,
    /// An enrolled pod.
    pub(crate) server: Pod,
    /// A pod in the workload file that rows enrol and release.
    pub(crate) late: Pod,
    /// A pod in the workload file that takes plaintext, and is not enrolled.
    pub(crate) plain: Pod,
    /// A pod that is neither enrolled nor in the workload file.
    pub(crate) stranger: Pod,
    pub(crate) node: Node,
    /// The thread that started the agent, and must outlive it.
    _keeper: mpsc::Sender<()>,
}

impl World {
    fn new(backend: Backend) -> Self {
        // The kernel ends a program when the thread that started it ends, and the harness's threads end before its last test.
        let (made, world) = mpsc::channel();
        let (keeper, kept) = mpsc::channel();
        thread::spawn(move || {
            let _ = made.send(Self::make(backend, keeper));
            let _ = kept.recv();
        });
        world.recv().expect("a node and its agent can be made")
    }

    fn make(backend: Backend, keeper: mpsc::Sender<()>) -> Self {
        let node = Node::new();
        let pods = ["client", "server", "late", "plain", "stranger"].map(|name| node.pod(name));
        let [client, server, late, plain, stranger] = pods;
        let workloads = Workloads::hbone([&client, &server, &late])
            .with(&plain, "TCP")
            .with_service(
                "web.demo.svc.cluster.local",
                &vips(10),
                SERVICE_PORT,
                &server,
                PORT,
            )
            .with_service(
                "own.demo.svc.cluster.local",
                &vips(11),
                SERVICE_PORT,
                &client,
                PORT,
            );
        let agent = Agent::start(&node, &workloads, backend.options());
        agent.enrol(&client);
        agent.enrol(&server);
        Self {
            agent,
            client,
            server,
            late,
            plain,
            stranger,
            node,
            _keeper: keeper,
        }
    }
}

fn vips(number: u8) -> [IpAddr; 2] {
    [format!("10.96.0.{number}"), format!("fd96::{number}")]
        .map(|text| text.parse().expect("a literal address"))
}

/// A node that the rows of a backend and a family share. Removed with its last user; after a row has failed in it, made anew.
#[derive(Clone, Default)]
pub(crate) struct Shared(Arc<Mutex<Option<World>>>);

impl Shared {
    /// Runs `f` with the node to itself.
    pub(crate) fn with(&self, backend: Backend, family: Family, outcome: Outcome, f: impl FnOnce(&Scene)) {
        let mut shared = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let world = shared.take().unwrap_or_else(|| World::new(backend));
        let scene = Scene {
            world,
            backend,
            family,
            outcome,
        };
        f(&scene);
        *shared = Some(scene.world);
    }
}

/// What a row has to play with.
pub(crate) struct Scene {
    pub(crate) world: World,
    pub(crate) backend: Backend,
    pub(crate) family: Family,
    /// What is to become of the flow.
    pub(crate) outcome: Outcome,
}

impl std::ops::Deref for Scene {
    type Target = World;

    fn deref(&self) -> &World {
        &self.world
    }
}

impl Scene {
    /// A port at a host's address.
    pub(crate) fn at(&self, host: &Host, port: u16) -> SocketAddr {
        host.addr(self.family, port)
    }

    /// The service whose only endpoint is the server.
    pub(crate) fn vip(&self) -> SocketAddr {
        self.pick(vips(10))
    }

    /// The service whose only endpoint is the client.
    pub(crate) fn own_vip(&self) -> SocketAddr {
        self.pick(vips(11))
    }

    fn pick(&self, vips: [IpAddr; 2]) -> SocketAddr {
        let [v4, v6] = vips;
        let vip = if self.family == Family::V4 { v4 } else { v6 };
        (vip, SERVICE_PORT).into()
    }

    /// An application of a host.
    pub(crate) fn serve(&self, host: &Host, port: u16, handler: app::Handler) -> App {
        App::start(&host.ns, (self.family.any(), port).into(), handler)
    }

    /// `from` asks the application of `to`, which must see `from`'s address.
    pub(crate) fn sees(&self, from: &Host, to: &Host) -> Answer {
        let _app = self.serve(to, PORT, app::who);
        self.asks(&from.ns, self.at(to, PORT), from.ip(self.family))
    }

    /// Asks the application at `to`, which must see `source`.
    pub(crate) fn asks(&self, ns: &Namespace, to: SocketAddr, source: IpAddr) -> Answer {
        self.asks_by(ns, to, source, |_| Ok(()))
    }

    /// Asks by a socket with options of its own.
    pub(crate) fn asks_by(
        &self,
        ns: &Namespace,
        to: SocketAddr,
        source: IpAddr,
        set: impl FnOnce(&Socket) -> io::Result<()>,
    ) -> Answer {
        self.talks(self.dial(ns, to, Protocol::TCP, set), source)
    }

    /// Connects by a socket with options of its own.
    pub(crate) fn dial(
        &self,
        ns: &Namespace,
        to: SocketAddr,
        protocol: Protocol,
        set: impl FnOnce(&Socket) -> io::Result<()>,
    ) -> io::Result<TcpStream> {
        // What should not come about is not waited for as long as what should.
        let (connect, read) = match self.outcome {
            Outcome::Dropped => (SILENCE, LONG_SILENCE),
            _ => (app::CONNECT_DEADLINE, app::IO_DEADLINE),
        };
        let socket = ns.run(|| Socket::new(Domain::for_address(to), Type::STREAM, Some(protocol)))?;
        set(&socket)?;
        socket.set_read_timeout(Some(read))?;
        socket.set_write_timeout(Some(read))?;
        let sent_again = || counters::kernel(ns, "TcpExt", "TCPSynRetrans");
        let before = sent_again();
        let connected = socket.connect_timeout(&to.into(), connect);
        // With the programs, what is refused is refused at once.
        if self.backend.is_ebpf() && self.outcome != Outcome::Dropped {
            assert_eq!(sent_again(), before, "a SYN to {to} was sent again");
        }
        connected?;
        Ok(socket.into())
    }

    /// Asks by a connection, if it came about: the application must see `source`.
    pub(crate) fn talks(&self, connection: io::Result<TcpStream>, source: IpAddr) -> Answer {
        let asked = connection.and_then(|mut stream| {
            stream.write_all(b"hello\n")?;
            Ok(stream)
        });
        self.finishes(asked, source)
    }

    /// Takes the answer of a connection that has asked, if it came about.
    pub(crate) fn finishes(&self, asked: io::Result<TcpStream>, source: IpAddr) -> Answer {
        let answer = asked.and_then(|mut stream| {
            stream.shutdown(Shutdown::Write)?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            Ok(answer)
        });
        heard(answer, source)
    }
}

/// Judges what the `who` application said: it must have seen `source`.
pub(crate) fn heard(answer: io::Result<String>, source: IpAddr) -> Answer {
    match answer {
        Ok(answer) if answer.is_empty() => Answer::Refused,
        Ok(answer) => {
            assert_eq!(answer, format!("hello {source}"), "what the application sees");
            Answer::Answered
        }
        Err(error) => failed(&error),
    }
}

/// Tells a refusal from silence.
pub(crate) fn failed(error: &io::Error) -> Answer {
    match error.kind() {
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => Answer::Silence,
        io::ErrorKind::ConnectionRefused
        | io::ErrorKind::ConnectionReset
        | io::ErrorKind::BrokenPipe
        | io::ErrorKind::NotConnected
        | io::ErrorKind::HostUnreachable
        | io::ErrorKind::NetworkUnreachable => Answer::Refused,
        _ => panic!("neither refused nor silent: {error}"),
    }
}

/// A sysctl with another value, put back on drop.
pub(crate) struct Sysctl<'a> {
    ns: &'a Namespace,
    path: &'static str,
    before: String,
}

impl<'a> Sysctl<'a> {
    /// Sets it; `None` when the namespace has none of that name.
    pub(crate) fn try_set(ns: &'a Namespace, path: &'static str, value: &str) -> Option<Self> {
        let before = ns.sysctl(path).ok()?;
        ns.set_sysctl(path, value)
            .unwrap_or_else(|error| panic!("setting {path} to {value}: {error}"));
        Some(Self { ns, path, before })
    }

    /// Sets it.
    pub(crate) fn set(ns: &'a Namespace, path: &'static str, value: &str) -> Self {
        Self::try_set(ns, path, value).unwrap_or_else(|| panic!("there is no {path}"))
    }
}

impl Drop for Sysctl<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.ns.set_sysctl(self.path, &self.before) {
            eprintln!("putting {} back: {error}", self.path);
        }
    }
}
