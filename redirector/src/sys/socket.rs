//! The proxy's sockets: made in a pod's namespace with mark, transparency and keepalive; and what the kernel tells of
//! accepted ones.
//!
//! The functions that make sockets are synchronous, to be called within [`Netns::run`](super::netns::Netns::run): a socket
//! stays in the namespace it was made in, so everything after that, connecting included, may happen on any thread.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::Duration,
};

use bytes::BytesMut;
use nix::{
    errno::Errno,
    sys::resource::{Resource, getrlimit, setrlimit},
};
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use tokio::{
    io::Interest,
    net::{TcpSocket, TcpStream},
};

use redirector_common::consts::Mark;

/// Connections that wait to be accepted, per listener. The kernel cuts it to `net.core.somaxconn`, 4096 by default.
const BACKLOG: i32 = 4096;

/// When a silent peer is taken for gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keepalive {
    /// Whether probes are sent.
    pub enabled: bool,
    /// Silence before the first probe.
    pub idle: Duration,
    /// Time between probes.
    pub interval: Duration,
    /// Unanswered probes that end the connection.
    pub probes: u32,
    /// Also end a connection whose sent data stays unacknowledged for `idle + interval * probes` (TCP_USER_TIMEOUT); the
    /// kernel's own limit is some 15 minutes (`net.ipv4.tcp_retries2`).
    pub user_timeout: bool,
}

impl Default for Keepalive {
    /// ztunnel's values.
    fn default() -> Self {
        Self {
            enabled: true,
            idle: Duration::from_secs(180),
            interval: Duration::from_secs(180),
            probes: 9,
            user_timeout: false,
        }
    }
}

/// A socket bound to `port` on every address of the namespace, IPv4 and IPv6 alike (IPv4 alone where the kernel has no IPv6,
/// or without `ipv6`), transparent, not listening yet.
///
/// # Errors
/// EPERM without CAP_NET_ADMIN in the namespace; EADDRINUSE when another socket listens there.
pub fn bound(port: u16, mark: Option<Mark>, ipv6: bool) -> io::Result<Socket> {
    if !ipv6 {
        return bound_to((Ipv4Addr::UNSPECIFIED, port).into(), mark);
    }
    match bound_to((Ipv6Addr::UNSPECIFIED, port).into(), mark) {
        Err(error) if matches!(errno(&error), Some(Errno::EAFNOSUPPORT | Errno::EADDRNOTAVAIL)) => {
            bound_to((Ipv4Addr::UNSPECIFIED, port).into(), mark)
        }
        result => result,
    }
}

fn bound_to(address: SocketAddr, mark: Option<Mark>) -> io::Result<Socket> {
    let socket = tcp(address.ip(), mark)?;
    if address.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    set_transparent(&socket, address.ip())?;
    socket.bind(&address.into())?;
    Ok(socket)
}

/// A listening socket that another process has made by [`bound`] and [`listen`], and handed over.
///
/// # Errors
/// `InvalidData` when it does not listen on `port`.
pub fn inherited(socket: OwnedFd, port: u16) -> io::Result<Socket> {
    let socket = Socket::from(socket);
    let there = socket.local_addr()?.as_socket().map(|address| address.port());
    if there != Some(port) || !socket.is_listener()? {
        let problem = format!("a socket was handed over that does not listen on port {port}");
        return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
    }
    Ok(socket)
}

/// Makes a [`bound`] socket listen. Its connections have what [`tune`] sets from the start: the kernel copies the listener's
/// options (tcp_create_openreq_child, inet_csk_clone_lock), which spares some system calls for each.
pub fn listen(socket: Socket, keepalive: Keepalive) -> io::Result<std::net::TcpListener> {
    tune(&socket, keepalive)?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// An unconnected socket for a connection to `destination`, another pod or the world; its source is the pod's own address.
pub fn upstream(destination: IpAddr, mark: Option<Mark>) -> io::Result<Socket> {
    tcp(destination, mark)
}

/// How a connection to the pod's own application is to look.
#[derive(Debug, Clone, Copy)]
pub struct Application {
    /// The source, which need not be an address of the namespace; `None` leaves it to the kernel.
    pub source: Option<SocketAddr>,
    /// Mark.
    pub mark: Option<Mark>,
    /// Bound to lo, so that the kernel's lookup sees it come in there.
    pub over_lo: bool,
}

/// An unconnected socket for a connection to the pod's application at `destination`.
///
/// # Errors
/// EADDRINUSE when the source port is taken by a socket that does not share it; EPERM without CAP_NET_ADMIN when `source` is
/// not an address of the namespace.
pub fn application(destination: IpAddr, options: Application) -> io::Result<Socket> {
    let socket = tcp(destination, options.mark)?;
    if options.over_lo {
        socket.bind_device(Some(b"lo"))?;
    }
    let Some(source) = options.source else {
        return Ok(socket);
    };
    match set_transparent(&socket, source.ip()) {
        // Without the right, the bind below decides: it fails just when the address is not a local one.
        Err(error) if errno(&error) == Some(Errno::EPERM) => {}
        result => result?,
    }
    socket.bind(&source.into())?;
    Ok(socket)
}

fn tcp(family_of: IpAddr, mark: Option<Mark>) -> io::Result<Socket> {
    let domain = if family_of.is_ipv4() {
        Domain::IPV4
    } else {
        Domain::IPV6
    };
    let socket = Socket::new(domain, Type::STREAM.nonblocking().cloexec(), Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    if let Some(Mark(mark)) = mark {
        socket.set_mark(mark)?;
    }
    Ok(socket)
}

fn set_transparent(socket: &Socket, family_of: IpAddr) -> io::Result<()> {
    // Implies what IP_FREEBIND would allow.
    if family_of.is_ipv4() {
        socket.set_ip_transparent_v4(true)
    } else {
        socket.set_ip_transparent_v6(true)
    }
}

/// Connects a socket made by [`upstream`] or [`application`]. The deadline is the caller's matter: dropping the future closes
/// the socket.
pub async fn connect(socket: Socket, destination: SocketAddr) -> io::Result<TcpStream> {
    TcpSocket::from_std_stream(socket.into())
        .connect(destination)
        .await
}

/// Sets on a connection what every connection of the proxy has: no delay of small writes, and keepalive.
pub fn tune(connection: &impl AsFd, keepalive: Keepalive) -> io::Result<()> {
    let socket = SockRef::from(connection);
    socket.set_tcp_nodelay(true)?;
    let Keepalive {
        enabled,
        idle,
        interval,
        probes,
        user_timeout,
    } = keepalive;
    if enabled {
        socket.set_tcp_keepalive(
            &TcpKeepalive::new()
                .with_time(idle)
                .with_interval(interval)
                .with_retries(probes),
        )?;
    }
    if user_timeout {
        socket.set_tcp_user_timeout(Some(idle + interval * probes))?;
    }
    Ok(())
}

/// Whether closing the socket resets its connection (SO_LINGER of 0 seconds), or ends it in order.
///
/// # Errors
/// Those of setsockopt(2).
pub fn reset_when_dropped(socket: BorrowedFd<'_>, reset: bool) -> io::Result<()> {
    SockRef::from(&socket).set_linger(reset.then_some(Duration::ZERO))
}

/// The number by which the kernel knows a socket and never another, until the next boot.
///
/// # Errors
/// Those of getsockopt(2).
pub fn cookie(socket: BorrowedFd<'_>) -> io::Result<u64> {
    SockRef::from(&socket).cookie()
}

/// The socket's mark: of an accepted one, where the namespace says so (`tcp_fwmark_accept`), that of the packet that opened it.
///
/// # Errors
/// Those of getsockopt(2).
pub fn mark(socket: BorrowedFd<'_>) -> io::Result<u32> {
    SockRef::from(&socket).mark()
}

/// The connection's end on this side (getsockname); `::ffff:a.b.c.d` is `a.b.c.d`.
pub fn local_addr(connection: BorrowedFd<'_>) -> io::Result<SocketAddr> {
    let address = SockRef::from(&connection).local_addr()?;
    address
        .as_socket()
        .map(canonical)
        .ok_or_else(|| io::Error::other("not an IP socket"))
}

/// Where the connection went before a netfilter rule redirected it to this socket; `None` when conntrack knows nothing of
/// it.
pub fn so_original_dst(connection: BorrowedFd<'_>) -> io::Result<Option<SocketAddr>> {
    let socket = SockRef::from(&connection);
    // A dual-stack socket is asked by the family of its peer, and conntrack keeps IPv4 under IPPROTO_IP.
    let answer = if local_addr(connection)?.is_ipv4() {
        socket.original_dst_v4()
    } else {
        socket.original_dst_v6()
    };
    match answer {
        Ok(address) => Ok(address.as_socket().map(canonical)),
        Err(error) => match errno(&error) {
            // ENOPROTOOPT: no conntrack in this kernel or namespace. EOPNOTSUPP: the same, for some socket families.
            Some(Errno::ENOENT | Errno::ENOPROTOOPT | Errno::EOPNOTSUPP) => Ok(None),
            _ => Err(error),
        },
    }
}

/// `::ffff:a.b.c.d` is `a.b.c.d`.
pub fn canonical(address: SocketAddr) -> SocketAddr {
    match address {
        SocketAddr::V6(v6) => match v6.ip().to_ipv4_mapped() {
            Some(v4) => (v4, v6.port()).into(),
            None => address,
        },
        SocketAddr::V4(_) => address,
    }
}

/// Bytes written to the connection that its peer has not acknowledged yet.
#[expect(unsafe_code, reason = "ioctl")]
pub fn unacknowledged_bytes(connection: BorrowedFd<'_>) -> io::Result<usize> {
    use std::os::fd::AsRawFd;
    let mut bytes: libc::c_int = 0;
    // SAFETY: TIOCOUTQ (SIOCOUTQ of tcp(7)) writes one int, to a place that lives until the call returns.
    let result = unsafe { libc::ioctl(connection.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    Errno::result(result)?;
    Ok(usize::try_from(bytes).unwrap_or(0))
}

/// The addresses that the interfaces of the calling thread's namespace have now.
///
/// # Errors
/// Those of getifaddrs(3).
pub fn own_addresses() -> io::Result<Vec<IpAddr>> {
    Ok(nix::ifaddrs::getifaddrs()?
        .filter_map(|interface| interface.address)
        .filter_map(|found| {
            let v4 = found.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
            let v6 = found.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip()));
            v4.or(v6)
        })
        .collect())
}

/// Reads what there is into the spare capacity of `buffer`; 0 is the end of the bytes.
///
/// A read that does not fill the buffer has taken all, and the stream then counts as not ready until more comes. That saves the
/// read that would only say so (epoll(7), questions and answers: "a read that returned less"). That a peer has ended, or broken,
/// the connection is not forgotten by it.
///
/// # Errors
/// Those of recv(2); `WouldBlock` when there is nothing.
#[expect(unsafe_code, reason = "the kernel fills memory that is not initialised")]
pub fn try_read(stream: &TcpStream, buffer: &mut BytesMut) -> io::Result<usize> {
    let mut read = 0;
    let outcome = stream.try_io(Interest::READABLE, || {
        let spare = buffer.spare_capacity_mut();
        let room = spare.len();
        read = SockRef::from(stream).recv(spare)?;
        let filled = buffer.len() + read;
        // SAFETY: recv has written `read` bytes to the spare capacity, from its begin on, so that `filled` are initialised and
        // within the capacity.
        unsafe { buffer.set_len(filled) };
        if (1..room).contains(&read) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(())
    });
    match outcome {
        Err(error) if read == 0 => Err(error),
        _ => Ok(read),
    }
}

/// Says that no more bytes come. A connection that is gone already needs no such word.
///
/// # Errors
/// Those of shutdown(2).
pub fn shutdown_write(socket: BorrowedFd<'_>) -> io::Result<()> {
    match SockRef::from(&socket).shutdown(Shutdown::Write) {
        Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(()),
        outcome => outcome,
    }
}

/// Raises the process's limit of open files as far as it may go, and returns it. Every connection through the proxy takes two
/// files, and the usual limit is 1024.
pub fn raise_file_limit() -> io::Result<u64> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if soft < hard {
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    }
    Ok(hard)
}

fn errno(error: &io::Error) -> Option<Errno> {
    error.raw_os_error().map(Errno::from_raw)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_addresses_are_ipv4() {
        for (given, expected) in [
            ("[::ffff:10.1.2.3]:80", "10.1.2.3:80"),
            ("[::10.1.2.3]:80", "[::a01:203]:80"),
            ("[fd00::1]:80", "[fd00::1]:80"),
            ("10.1.2.3:80", "10.1.2.3:80"),
        ] {
            assert_eq!(canonical(given.parse().unwrap()).to_string(), expected);
        }
    }

    #[test]
    fn the_local_address_of_a_dual_stack_connection_is_canonical() {
        let socket = Socket::new(Domain::IPV6, Type::STREAM, Some(Protocol::TCP)).unwrap();
        socket.set_only_v6(false).unwrap();
        socket
            .bind(&SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)).into())
            .unwrap();
        let listener = listen(socket, Keepalive::default()).unwrap();
        let target = SocketAddr::from((Ipv4Addr::LOCALHOST, listener.local_addr().unwrap().port()));
        let _client = std::net::TcpStream::connect(target).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        assert_eq!(local_addr(accepted.as_fd()).unwrap(), target);
    }

    #[test]
    fn a_connection_that_nothing_redirected_has_no_other_destination() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let target = listener.local_addr().unwrap();
        let _client = std::net::TcpStream::connect(target).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        // Where the machine's own rules make conntrack follow loopback, it answers with the address itself.
        let address = so_original_dst(accepted.as_fd()).unwrap();
        assert!(address.is_none_or(|address| address == target), "{address:?}");
    }

    #[test]
    fn interfaces_are_asked_for_addresses() {
        let own = own_addresses().unwrap();
        assert!(own.contains(&Ipv4Addr::LOCALHOST.into()));
        assert!(!own.contains(&"192.0.2.77".parse().unwrap()));
    }

    #[test]
    fn options_are_set_on_a_connection_and_inherited_from_a_listener() {
        let keepalive = Keepalive {
            user_timeout: true,
            ..Keepalive::default()
        };
        let listener = listen(bound(0, None, false).unwrap(), keepalive).unwrap();
        let target = (Ipv4Addr::LOCALHOST, listener.local_addr().unwrap().port());
        let client = std::net::TcpStream::connect(target).unwrap();
        tune(&client, keepalive).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        for connection in [client, accepted] {
            let socket = SockRef::from(&connection);
            assert!(socket.tcp_nodelay().unwrap());
            assert!(socket.keepalive().unwrap());
            assert_eq!(socket.tcp_keepalive_time().unwrap(), Duration::from_secs(180));
            assert_eq!(socket.tcp_keepalive_interval().unwrap(), Duration::from_secs(180));
            assert_eq!(socket.tcp_keepalive_retries().unwrap(), 9);
            assert_eq!(
                socket.tcp_user_timeout().unwrap(),
                Some(Duration::from_secs(1800))
            );
        }
    }

    #[test]
    fn the_file_limit_goes_to_its_hard_bound() {
        let hard = raise_file_limit().unwrap();
        assert_eq!(getrlimit(Resource::RLIMIT_NOFILE).unwrap(), (hard, hard));
    }
}
