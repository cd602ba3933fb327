//! Makes the proxy's connections: to other pods and the world, and to the pod's own application.
//!
//! All are made in the pod's namespace with the backend's marks, and end within the connect deadline.

use std::{
    future::Future,
    io,
    net::SocketAddr,
    ops::RangeInclusive,
    os::fd::AsFd,
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use redirector_common::consts::{DIAL_PORT_FIRST, DIAL_PORT_LAST};
use socket2::Socket;
use tokio::{net::TcpStream, time::timeout};

use super::Pod;
use crate::sys::socket;

/// Why a connection could not be made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The socket: resources, rights, or a source that it cannot have.
    #[error("cannot make a socket for {destination}")]
    Socket {
        destination: SocketAddr,
        #[source]
        source: io::Error,
    },
    /// Refused or unreachable.
    #[error("cannot connect to {destination}")]
    Connect {
        destination: SocketAddr,
        #[source]
        source: io::Error,
    },
    /// No answer.
    #[error("connection to {destination} timed out after {after:?}")]
    TimedOut {
        destination: SocketAddr,
        after: Duration,
    },
    /// Every source port that was tried is taken.
    #[error("no free source port to {destination} from {client}: {tries} were tried")]
    NoPort {
        client: SocketAddr,
        destination: SocketAddr,
        tries: u32,
    },
}

/// A connection to another pod or to the world, from the pod's own address.
pub(crate) async fn upstream(pod: &Pod, destination: SocketAddr) -> Result<TcpStream, Error> {
    let make = || socket::upstream(destination.ip(), pod.shared.redirector.marks().upstream);
    let socket = in_pod(pod, make).map_err(|source| Error::Socket { destination, source })?;
    let connected = socket::connect(socket, destination);
    finish(
        pod,
        destination,
        within(pod.shared.config.connect_deadline, destination, connected).await,
    )
}

/// A connection to the pod's application at `destination`, from the address of `client`: the application sees who calls.
pub(crate) async fn application(
    pod: &Pod,
    client: SocketAddr,
    destination: SocketAddr,
) -> Result<TcpStream, Error> {
    let marks = pod.shared.redirector.marks();
    let make = |source| {
        let options = socket::Application {
            source,
            mark: marks.application,
            over_lo: marks.application_over_lo && source.is_some(),
        };
        in_pod(pod, || socket::application(destination.ip(), options))
    };
    let connected = async {
        // The pod calls itself: the kernel's choice of source is right, and the lookup leaves such calls alone. Bound to lo, the
        // socket would miss the answers: what goes to an address of eth0 counts as received by eth0, though it goes over lo.
        if pod.knows_address(client.ip()) {
            let socket = make(None).map_err(|source| Error::Socket { destination, source })?;
            let connected = socket::connect(socket, destination).await;
            return connected.map_err(|source| Error::Connect { destination, source });
        }
        let ports = marks.application_over_lo.then_some(&pod.dial_ports);
        from_client(ports, client, destination, |source| make(Some(source))).await
    };
    let after = pod.shared.config.connect_deadline;
    let connected = timeout(after, connected)
        .await
        .unwrap_or(Err(Error::TimedOut { destination, after }));
    finish(pod, destination, connected)
}

/// A connection to the pod's application on loopback, from there: it is for applications that are told their clients by a PROXY
/// protocol header. Loopback is nobody's to capture, and the lookup leaves it alone.
pub(crate) async fn loopback(pod: &Pod, destination: SocketAddr) -> Result<TcpStream, Error> {
    let options = socket::Application {
        source: None,
        mark: pod.shared.redirector.marks().application,
        over_lo: false,
    };
    let make = || socket::application(destination.ip(), options);
    let socket = in_pod(pod, make).map_err(|source| Error::Socket { destination, source })?;
    let connected = socket::connect(socket, destination);
    let after = pod.shared.config.connect_deadline;
    finish(pod, destination, within(after, destination, connected).await)
}

fn in_pod(pod: &Pod, make: impl FnOnce() -> io::Result<Socket>) -> io::Result<Socket> {
    let socket = pod.netns.run(make)??;
    pod.shared.redirector.own_socket(socket.as_fd())?;
    // Whoever waits for it may give up when the kernel has it connected already: then the far end must not take it for a
    // connection that was opened and ended in order.
    socket::reset_when_dropped(socket.as_fd(), true)?;
    Ok(socket)
}

async fn within(
    after: Duration,
    destination: SocketAddr,
    connected: impl Future<Output = io::Result<TcpStream>>,
) -> Result<TcpStream, Error> {
    timeout(after, connected)
        .await
        .map_err(|_| Error::TimedOut { destination, after })?
        .map_err(|source| Error::Connect { destination, source })
}

fn finish(
    pod: &Pod,
    destination: SocketAddr,
    connected: Result<TcpStream, Error>,
) -> Result<TcpStream, Error> {
    let stream = connected?;
    socket::tune(&stream, pod.shared.config.keepalive)
        .map_err(|source| Error::Socket { destination, source })?;
    Ok(stream)
}

/// Source ports that are tried before giving up. While half of the range is free, the chance to miss is nil; when all is
/// taken, a client has some 4,500 connections open to one port, and trying on would only hold up the others.
const PORT_TRIES: u32 = 256;

/// Connects from the address of `client`, with a port of `ports`, or one of the kernel's choice.
async fn from_client(
    ports: Option<&DialPorts>,
    client: SocketAddr,
    destination: SocketAddr,
    make: impl Fn(SocketAddr) -> io::Result<Socket>,
) -> Result<TcpStream, Error> {
    for tried in 0..PORT_TRIES {
        let mut source = client;
        source.set_port(ports.map_or(0, |ports| ports.next(tried)));
        let socket = match make(source) {
            Ok(socket) => socket,
            Err(error) if ports.is_some() && error.kind() == io::ErrorKind::AddrInUse => continue,
            Err(source) => return Err(Error::Socket { destination, source }),
        };
        match socket::connect(socket, destination).await {
            Ok(stream) => return Ok(stream),
            // The kernel's word for a connection of the same two ends, open or not long gone.
            Err(error) if ports.is_some() && error.kind() == io::ErrorKind::AddrNotAvailable => {}
            Err(source) => return Err(Error::Connect { destination, source }),
        }
    }
    Err(Error::NoPort {
        client,
        destination,
        tries: PORT_TRIES,
    })
}

/// The source ports of a pod's dials to its application, in turn: the one that was used last comes last again, when its
/// TIME_WAIT is the furthest gone.
#[derive(Debug)]
pub(crate) struct DialPorts {
    range: RangeInclusive<u16>,
    next: AtomicU32,
}

impl Default for DialPorts {
    /// The reserved range, from a random port on: after a restart the ports that were used last are not used first.
    fn default() -> Self {
        Self::new(DIAL_PORT_FIRST..=DIAL_PORT_LAST, rand::random())
    }
}

impl DialPorts {
    fn new(range: RangeInclusive<u16>, start: u32) -> Self {
        Self {
            range,
            next: AtomicU32::new(start),
        }
    }

    /// The port for a connection's next try. After some neighbours were taken, it leaps: connections that live long lie
    /// side by side.
    fn next(&self, tried: u32) -> u16 {
        let ports = u32::from(self.range.end() - self.range.start()) + 1;
        let step = if tried < 8 {
            1
        } else {
            rand::random_range(1..=ports)
        };
        let offset = self.next.fetch_add(step, Ordering::Relaxed) % ports;
        self.range.start() + u16::try_from(offset).expect("below the size of a range of u16")
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::HashSet, net::TcpListener};

    use super::*;

    #[test]
    fn every_port_of_the_range_has_its_turn() {
        for start in [0, 3, u32::MAX - 2] {
            let ports = DialPorts::new(100..=109, start);
            let taken: HashSet<u16> = (0..10).map(|_| ports.next(0)).collect();
            // The counter's own overflow may repeat some, once in four thousand million.
            assert!(taken.iter().all(|port| (100..=109).contains(port)));
            assert!(taken.len() == 10 || start > u32::MAX - 10, "{taken:?}");
        }
        let reserved = DialPorts::default();
        assert!(
            (0..10_000)
                .map(|tried| reserved.next(tried))
                .all(|port| port >= DIAL_PORT_FIRST)
        );
    }

    fn make(source: SocketAddr) -> io::Result<Socket> {
        let options = socket::Application {
            source: Some(source),
            mark: None,
            over_lo: false,
        };
        socket::application(source.ip(), options)
    }

    /// A port that nothing uses, out of the ones that the kernel hands out.
    fn free_port() -> u16 {
        TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port()
    }

    #[tokio::test]
    async fn a_port_in_use_is_passed_over() {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let destination = server.local_addr().unwrap();
        // 127.0.0.2 stands for the client: it can be bound without rights.
        let client: SocketAddr = "127.0.0.2:999".parse().unwrap();
        let first = free_port();
        let ports = DialPorts::new(first..=first.saturating_add(7), 0);
        let mut open = Vec::new();
        for _ in 0..4 {
            let stream = from_client(Some(&ports), client, destination, make)
                .await
                .unwrap();
            assert_eq!(stream.local_addr().unwrap().ip(), client.ip());
            assert!(ports.range.contains(&stream.local_addr().unwrap().port()));
            open.push(stream);
            // Begin again at the port that is taken now.
            ports.next.store(0, Ordering::Relaxed);
        }
    }

    #[tokio::test]
    async fn a_range_in_use_ends_the_search() {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let destination = server.local_addr().unwrap();
        let client: SocketAddr = "127.0.0.3:999".parse().unwrap();
        let port = free_port();
        let ports = DialPorts::new(port..=port, 0);
        let _held = from_client(Some(&ports), client, destination, make)
            .await
            .unwrap();
        let end = from_client(Some(&ports), client, destination, make).await;
        assert!(
            matches!(
                end,
                Err(Error::NoPort {
                    tries: PORT_TRIES,
                    ..
                })
            ),
            "{end:?}"
        );
    }

    #[tokio::test]
    async fn a_refusal_is_not_tried_again() {
        let destination = (std::net::Ipv4Addr::LOCALHOST, free_port()).into();
        let ports = DialPorts::default();
        let before = ports.next.load(Ordering::Relaxed);
        let client: SocketAddr = "127.0.0.4:999".parse().unwrap();
        let end = from_client(Some(&ports), client, destination, make).await;
        assert!(matches!(end, Err(Error::Connect { .. })), "{end:?}");
        assert_eq!(ports.next.load(Ordering::Relaxed), before.wrapping_add(1));
    }

    #[tokio::test]
    async fn a_source_that_cannot_be_had_is_an_error() {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let destination = server.local_addr().unwrap();
        let client: SocketAddr = "[fd00::7]:999".parse().unwrap();
        let make = |source| {
            let options = socket::Application {
                source: Some(source),
                mark: None,
                over_lo: false,
            };
            socket::application(destination.ip(), options)
        };
        let end = from_client(Some(&DialPorts::default()), client, destination, make).await;
        assert!(matches!(end, Err(Error::Socket { .. })), "{end:?}");
    }
}
