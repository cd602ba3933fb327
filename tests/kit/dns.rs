//! What is expected of a DNS proxy in a pod: a small one that answers with what it sees, in the name of the server that was asked.
//!
//! It waits on port 15053 with transparent sockets. The server that a datagram was for is told by the kernel (IP_RECVORIGDSTADDR,
//! IPV6_RECVORIGDSTADDR), that of a connection is its own end; answers to datagrams come from a transparent socket that is bound to the
//! server's address.

use std::{
    io::{self, BufRead, BufReader, IoSliceMut, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket},
    os::fd::AsRawFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context, Result};
use nix::sys::socket::{
    ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, setsockopt,
    sockopt::{Ipv4OrigDstAddr, Ipv6OrigDstAddr},
};
use socket2::{Domain, Socket, Type};

use crate::{app::IO_DEADLINE, netns::Namespace};

/// The port of a pod's DNS proxy.
pub const PORT: u16 = 15053;
/// A query that begins so is sent on to the server that was asked, from the proxy's own socket.
pub const FORWARD: &str = "forward ";
/// How often the proxy looks whether it is to end.
const PAUSE: Duration = Duration::from_millis(50);

/// Which sockets a proxy has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sockets {
    /// One for both families.
    DualStack,
    /// One of each, on the loopback addresses, as ztunnel has them.
    PerFamily,
    /// Those of UDP alone.
    UdpAlone,
    /// As `DualStack`, but without the right to answer in the name of others.
    Ordinary,
}

/// A DNS proxy, until it is dropped.
#[derive(Debug)]
pub struct DnsProxy {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl DnsProxy {
    /// Starts one in a namespace.
    ///
    /// # Panics
    /// When it cannot.
    pub fn start(ns: &Namespace, sockets: Sockets) -> Self {
        Self::try_start(ns, sockets).unwrap_or_else(|error| panic!("starting a DNS proxy: {error:#}"))
    }

    fn try_start(ns: &Namespace, sockets: Sockets) -> Result<Self> {
        let stop = Arc::<AtomicBool>::default();
        let mut threads = Vec::new();
        let addresses: &[IpAddr] = match sockets {
            Sockets::PerFamily => &[IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)],
            _ => &[IpAddr::V6(Ipv6Addr::UNSPECIFIED)],
        };
        for address in addresses {
            let bind = |kind| ns.run(|| bound(kind, (*address, PORT).into(), sockets != Sockets::Ordinary));
            let udp = bind(Type::DGRAM).context("binding UDP")?;
            let (netns, stopped) = (ns.path(), Arc::clone(&stop));
            let answers = move || {
                let netns = redirector::sys::netns::Netns::open(&netns).expect("the namespace is there");
                netns
                    .run(|| answer_datagrams(&udp, &stopped))
                    .expect("the namespace can be entered");
            };
            threads.push(thread::spawn(answers));
            if sockets != Sockets::UdpAlone {
                let tcp = bind(Type::STREAM).context("binding TCP")?;
                tcp.listen(64)?;
                let stopped = Arc::clone(&stop);
                threads.push(thread::spawn(move || answer_connections(&tcp, &stopped)));
            }
        }
        Ok(Self { stop, threads })
    }
}

impl Drop for DnsProxy {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// A socket, transparent or not, that waits for [`PAUSE`] at most.
fn bound(kind: Type, address: SocketAddr, transparent: bool) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), kind, None)?;
    socket.set_reuse_address(true)?;
    socket.set_read_timeout(Some(PAUSE))?;
    if address.is_ipv6() {
        socket.set_only_v6(address.ip() == Ipv6Addr::LOCALHOST)?;
        socket.set_ip_transparent_v6(transparent)?;
    } else {
        socket.set_ip_transparent_v4(transparent)?;
    }
    if kind == Type::DGRAM {
        setsockopt(&socket, Ipv4OrigDstAddr, &true)?;
        if address.is_ipv6() {
            setsockopt(&socket, Ipv6OrigDstAddr, &true)?;
        }
    }
    socket.bind(&address.into())?;
    Ok(socket)
}

fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// A datagram: its text, its sender, and where it was sent to.
fn receive(socket: &Socket) -> io::Result<(String, SocketAddr, SocketAddr)> {
    let mut buffer = [0; 2048];
    let mut control = nix::cmsg_space!(nix::libc::sockaddr_in, nix::libc::sockaddr_in6);
    let mut parts = [IoSliceMut::new(&mut buffer)];
    let message = recvmsg::<SockaddrStorage>(
        socket.as_raw_fd(),
        &mut parts,
        Some(&mut control),
        MsgFlags::empty(),
    )?;
    let strange = |what: &str| io::Error::other(format!("a datagram without {what}"));
    let address = |storage: SockaddrStorage| -> Option<SocketAddr> {
        let v4 = storage.as_sockaddr_in().map(|v4| SocketAddr::V4((*v4).into()));
        v4.or(storage.as_sockaddr_in6().map(|v6| SocketAddr::V6((*v6).into())))
    };
    let from = message
        .address
        .and_then(address)
        .ok_or_else(|| strange("a sender"))?;
    let mut to = None;
    for found in message.cmsgs()? {
        match found {
            ControlMessageOwned::Ipv4OrigDstAddr(v4) => {
                let v4 = nix::sys::socket::SockaddrIn::from(v4);
                to = Some(SocketAddr::V4(v4.into()));
            }
            ControlMessageOwned::Ipv6OrigDstAddr(v6) => {
                let v6 = nix::sys::socket::SockaddrIn6::from(v6);
                to = Some(SocketAddr::V6(v6.into()));
            }
            _ => {}
        }
    }
    let to = to.ok_or_else(|| strange("its destination"))?;
    let length = message.bytes;
    let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
    Ok((text, canonical(from), canonical(to)))
}

/// Runs in the pod's namespace, since it makes sockets.
fn answer_datagrams(socket: &Socket, stop: &AtomicBool) {
    // Who waits for the answer to a query that was sent on.
    let mut waiting = None;
    while !stop.load(Ordering::Relaxed) {
        let Ok((text, from, to)) = receive(socket) else {
            continue;
        };
        // Whatever cannot be sent is a query without an answer, which the test will notice.
        let _ = match (text.strip_prefix(FORWARD), waiting) {
            (Some(query), _) => {
                waiting = Some((from, to));
                let dual = socket.local_addr().is_ok_and(|own| own.is_ipv6());
                socket
                    .send_to(query.as_bytes(), &mapped(to, dual).into())
                    .map(drop)
            }
            (None, Some((client, server))) if from == server => reply(server, client, &text),
            (None, _) => reply(to, from, &format!("udp {to} {text}")),
        };
    }
}

fn mapped(address: SocketAddr, dual: bool) -> SocketAddr {
    match address.ip() {
        IpAddr::V4(v4) if dual => (v4.to_ipv6_mapped(), address.port()).into(),
        _ => address,
    }
}

/// Sends in the name of a server.
fn reply(server: SocketAddr, client: SocketAddr, text: &str) -> io::Result<()> {
    let socket = bound(Type::DGRAM, server, true)?;
    socket.send_to(text.as_bytes(), &client.into()).map(drop)
}

fn answer_connections(listener: &Socket, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        let Ok((connection, _)) = listener.accept() else {
            continue;
        };
        let answer = |connection: Socket| -> io::Result<()> {
            let mut stream = TcpStream::from(connection);
            stream.set_read_timeout(Some(IO_DEADLINE))?;
            let server = canonical(stream.local_addr()?);
            let mut query = String::new();
            BufReader::new(&stream).read_line(&mut query)?;
            write!(stream, "tcp {server} {}", query.trim())
        };
        // A client that goes away is the client's matter.
        let _ = answer(connection);
    }
}

/// A server that answers datagrams with what it sees.
#[derive(Debug)]
pub struct DnsServer {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl DnsServer {
    /// Starts one at an address; it answers `<query> from <client>`.
    ///
    /// # Panics
    /// When it cannot.
    pub fn start(ns: &Namespace, address: SocketAddr) -> Self {
        let socket = ns
            .run(|| UdpSocket::bind(address))
            .unwrap_or_else(|error| panic!("binding {address}: {error}"));
        socket.set_read_timeout(Some(PAUSE)).expect("a pause is no zero");
        let stop = Arc::<AtomicBool>::default();
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let mut buffer = [0; 2048];
            while !stopped.load(Ordering::Relaxed) {
                if let Ok((length, client)) = socket.recv_from(&mut buffer) {
                    let query = String::from_utf8_lossy(&buffer[..length]);
                    let _ = socket.send_to(format!("{query} from {client}").as_bytes(), client);
                }
            }
        });
        Self {
            stop,
            thread: Some(thread),
        }
    }
}

impl Drop for DnsServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A resolver's socket: connected, and told of errors at once, as those of C libraries are.
pub fn resolver(ns: &Namespace, server: SocketAddr) -> io::Result<UdpSocket> {
    let socket = ns.run(|| {
        let any: IpAddr = if server.is_ipv4() {
            Ipv4Addr::UNSPECIFIED.into()
        } else {
            Ipv6Addr::UNSPECIFIED.into()
        };
        let socket = UdpSocket::bind((any, 0))?;
        if server.is_ipv4() {
            setsockopt(&socket, nix::sys::socket::sockopt::Ipv4RecvErr, &true)?;
        } else {
            setsockopt(&socket, nix::sys::socket::sockopt::Ipv6RecvErr, &true)?;
        }
        socket.connect(server)?;
        io::Result::Ok(socket)
    })?;
    socket.set_read_timeout(Some(IO_DEADLINE))?;
    Ok(socket)
}

/// Asks a server by UDP. The answer must come from the server's own address.
pub fn ask(ns: &Namespace, server: SocketAddr, query: &str) -> io::Result<String> {
    let socket = resolver(ns, server)?;
    socket.send(query.as_bytes())?;
    let mut buffer = [0; 2048];
    let length = socket.recv(&mut buffer)?;
    Ok(String::from_utf8_lossy(&buffer[..length]).into_owned())
}
