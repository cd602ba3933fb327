//! Unix sockets of type SOCK_SEQPACKET: one message per packet, with descriptors alongside (SCM_RIGHTS).
//!
//! `pods::zds` and `pods::zds_server` speak over one. What a message means, and how many descriptors it may have, is its matter.

use std::{
    io::{self, IoSlice},
    mem,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    path::Path,
    ptr,
};

use nix::{
    libc,
    sys::socket::{
        AddressFamily, Backlog, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, accept4, bind,
        connect, getsockopt, listen, sendmsg, socket, sockopt,
    },
};
use tokio::io::{Interest, unix::AsyncFd};

use super::pidfd::Process;

/// The most descriptors that one message can carry: SCM_MAX_FD, include/net/scm.h. With room for all of them, none can be
/// left in the process without an owner.
const MAX_FDS: usize = 253;

/// One packet.
#[derive(Debug)]
pub struct Message {
    /// Its bytes; empty at the end of the stream.
    pub bytes: Vec<u8>,
    /// The descriptors that came with it, close-on-exec.
    pub fds: Vec<OwnedFd>,
}

/// A connected socket.
#[derive(Debug)]
pub struct Seqpacket {
    socket: AsyncFd<OwnedFd>,
}

impl Seqpacket {
    /// Connects to the listener at `path`. Does not wait: a listener whose queue is full is `WouldBlock`.
    ///
    /// # Errors
    /// Those of socket(2) and connect(2). Must be called within a tokio runtime.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let fd = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)?;
        connect(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
        Self::from_fd(fd)
    }

    /// Takes a connected, non-blocking socket.
    fn from_fd(fd: OwnedFd) -> io::Result<Self> {
        Ok(Self {
            socket: register(fd, Interest::READABLE | Interest::WRITABLE)?,
        })
    }

    /// The process that connected the other end.
    ///
    /// # Errors
    /// Those of [`Process::peer_of`].
    pub fn peer(&self) -> io::Result<Process> {
        Process::peer_of(self.socket.as_fd())
    }

    /// The user as whom the process at the other end ran when it connected, or began to listen.
    ///
    /// # Errors
    /// Those of getsockopt(2).
    pub fn peer_uid(&self) -> io::Result<u32> {
        Ok(getsockopt(&self.socket, sockopt::PeerCredentials)?.uid())
    }

    /// Receives one packet of at most `max_bytes`. Cancel-safe.
    ///
    /// # Errors
    /// `InvalidData` when the packet or its descriptors did not fit: it is lost then. Those of recvmsg(2).
    pub async fn recv(&self, max_bytes: usize) -> io::Result<Message> {
        // What is there is found at once: the runtime may not have heard of it yet.
        match recv_message(self.socket.as_fd(), max_bytes) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            received => return received,
        }
        self.socket
            .async_io(Interest::READABLE, |fd| recv_message(fd.as_fd(), max_bytes))
            .await
    }

    /// Sends one packet. Cancel-safe: it is sent whole or not at all.
    ///
    /// # Errors
    /// Those of sendmsg(2); a peer that is gone is `BrokenPipe`, without a signal.
    pub async fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.socket
            .async_io(Interest::WRITABLE, |fd| send_message(fd.as_fd(), bytes, fds))
            .await
    }
}

#[expect(unsafe_code, reason = "tokio trusts the owner to keep the descriptor open")]
fn register(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd has one open descriptor until it is dropped, and the AsyncFd owns it.
    Ok(unsafe { AsyncFd::register_with_interest(fd, interest) }?)
}

fn send_message(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let raw: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let control = if raw.is_empty() { &[][..] } else { &rights[..] };
    let packet = [IoSlice::new(bytes)];
    sendmsg::<UnixAddr>(socket.as_raw_fd(), &packet, control, MsgFlags::MSG_NOSIGNAL, None)?;
    Ok(())
}

/// recvmsg(2). Not nix's: its iterator yields nothing after MSG_CTRUNC, and the descriptors that had fitted would leak.
#[expect(unsafe_code, reason = "recvmsg(2) and its control messages")]
fn recv_message(socket: BorrowedFd<'_>, max_bytes: usize) -> io::Result<Message> {
    // SAFETY: pure arithmetic.
    let control_bytes = unsafe { libc::CMSG_SPACE((MAX_FDS * size_of::<RawFd>()) as u32) } as usize;
    // Of u64, so that it is aligned for cmsghdr.
    let mut control = vec![0_u64; control_bytes.div_ceil(size_of::<u64>())];
    let mut bytes = vec![0_u8; max_bytes];
    let mut packet = libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    };
    // SAFETY: msghdr is plain data for which all zeros is valid.
    let mut header: libc::msghdr = unsafe { mem::zeroed() };
    header.msg_iov = &raw mut packet;
    header.msg_iovlen = 1;
    header.msg_control = control.as_mut_ptr().cast();
    header.msg_controllen = control_bytes as _;
    // SAFETY: `header` points to `packet`, `bytes` and `control`, all alive and as long as it says.
    let received = unsafe {
        libc::recvmsg(
            socket.as_raw_fd(),
            &raw mut header,
            libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT,
        )
    };
    if received < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut fds = Vec::new();
    // SAFETY: `header` is as the kernel filled it, and `control`, to which it points, is alive.
    let mut next = unsafe { libc::CMSG_FIRSTHDR(&raw const header) };
    while !next.is_null() {
        // SAFETY: CMSG_FIRSTHDR and CMSG_NXTHDR return null or a header that lies within `control`.
        let message = unsafe { ptr::read_unaligned(next) };
        if message.cmsg_level == libc::SOL_SOCKET && message.cmsg_type == libc::SCM_RIGHTS {
            // SAFETY: pure arithmetic.
            let prefix = unsafe { libc::CMSG_LEN(0) } as usize;
            let count = (message.cmsg_len as usize).saturating_sub(prefix) / size_of::<RawFd>();
            // SAFETY: the data of a header that lies within `control`.
            let data = unsafe { libc::CMSG_DATA(next) }.cast::<RawFd>();
            for index in 0..count {
                // SAFETY: the kernel wrote `count` descriptors at `data`; each is new in this process and nobody else's.
                fds.push(unsafe { OwnedFd::from_raw_fd(ptr::read_unaligned(data.add(index))) });
            }
        }
        // SAFETY: as for CMSG_FIRSTHDR; `next` came from it or from this call.
        next = unsafe { libc::CMSG_NXTHDR(&raw const header, next) };
    }
    if header.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0 {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("message of more than {max_bytes} bytes, or with descriptors that could not be received"),
        ));
    }
    bytes.truncate(received.unsigned_abs());
    Ok(Message { bytes, fds })
}

/// A listening socket.
#[derive(Debug)]
pub struct Listener(AsyncFd<OwnedFd>);

impl Listener {
    /// Listens at `path`, where nothing may be. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// Those of socket(2), bind(2) and listen(2).
    pub fn bind(path: &Path) -> io::Result<Self> {
        /// Connections that wait to be accepted; who finds no place tries again.
        const BACKLOG: i32 = 16;
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let fd = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)?;
        bind(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
        listen(&fd, Backlog::new(BACKLOG)?)?;
        register(fd, Interest::READABLE).map(Self)
    }

    /// A listening socket that another process has made, and handed over. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// `InvalidData` when it is something else; those of getsockopt(2).
    pub fn inherited(fd: OwnedFd) -> io::Result<Self> {
        let listens = getsockopt(&fd, sockopt::AcceptConn)?
            && getsockopt(&fd, sockopt::SockType)? == SockType::SeqPacket;
        if !listens {
            let problem = "a socket was handed over that does not listen for packets";
            return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
        }
        register(fd, Interest::READABLE).map(Self)
    }

    /// The next connection. Cancel-safe.
    ///
    /// # Errors
    /// Those of accept4(2).
    pub async fn accept(&self) -> io::Result<Seqpacket> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let accept = |fd: &OwnedFd| Ok(accept4(fd.as_raw_fd(), flags)?);
        let accepted = self.0.async_io(Interest::READABLE, accept).await?;
        #[expect(unsafe_code, reason = "accept4 returns a number")]
        // SAFETY: accept4 made the descriptor for this call alone.
        let fd = unsafe { OwnedFd::from_raw_fd(accepted) };
        Seqpacket::from_fd(fd)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// For tests of this module and of its callers.
#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    /// A listening socket.
    pub(crate) struct Listener(super::Listener);

    impl Listener {
        /// Listens at `path`.
        pub(crate) fn bind(path: &Path) -> Self {
            Self(super::Listener::bind(path).unwrap())
        }

        /// The next connection.
        pub(crate) async fn accept(&self) -> Seqpacket {
            self.0.accept().await.unwrap()
        }
    }

    /// Two sockets that are connected.
    pub(crate) fn pair() -> (Seqpacket, Seqpacket) {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let (a, b) =
            nix::sys::socket::socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags).unwrap();
        (Seqpacket::from_fd(a).unwrap(), Seqpacket::from_fd(b).unwrap())
    }

    /// Number of descriptors that are open on the file with this device and inode.
    pub(crate) fn open_on(dev: u64, ino: u64) -> usize {
        use std::os::unix::fs::MetadataExt;
        std::fs::read_dir("/proc/self/fd")
            .unwrap()
            .filter_map(|entry| std::fs::metadata(entry.unwrap().path()).ok())
            .filter(|metadata| (metadata.dev(), metadata.ino()) == (dev, ino))
            .count()
    }
}

#[cfg(test)]
mod tests {
    use std::{fs::File, os::unix::fs::MetadataExt};

    use super::{
        testing::{Listener, open_on},
        *,
    };

    async fn pair(directory: &Path) -> (Seqpacket, Seqpacket) {
        let path = directory.join("s");
        let listener = Listener::bind(&path);
        let client = Seqpacket::connect(&path).unwrap();
        (client, listener.accept().await)
    }

    #[tokio::test]
    async fn packets_keep_their_bounds_and_their_descriptors() {
        let directory = tempfile::tempdir().unwrap();
        let (a, b) = pair(directory.path()).await;
        let file = tempfile::NamedTempFile::new().unwrap();
        a.send(b"one", &[]).await.unwrap();
        a.send(b"two", &[file.as_file().as_fd()]).await.unwrap();
        let first = b.recv(16).await.unwrap();
        assert_eq!((first.bytes.as_slice(), first.fds.len()), (b"one".as_slice(), 0));
        let second = b.recv(16).await.unwrap();
        assert_eq!(
            (second.bytes.as_slice(), second.fds.len()),
            (b"two".as_slice(), 1)
        );
        let received = File::from(second.fds.into_iter().next().unwrap());
        let flags = nix::fcntl::fcntl(&received, nix::fcntl::FcntlArg::F_GETFD).unwrap();
        assert_eq!(flags & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
        assert_eq!(
            received.metadata().unwrap().ino(),
            file.as_file().metadata().unwrap().ino()
        );
        drop(a);
        assert!(b.recv(16).await.unwrap().bytes.is_empty(), "end of stream");
    }

    #[tokio::test]
    async fn what_does_not_fit_is_an_error_and_leaks_no_descriptor() {
        let directory = tempfile::tempdir().unwrap();
        let (a, b) = pair(directory.path()).await;
        let file = tempfile::NamedTempFile::new().unwrap();
        let metadata = file.as_file().metadata().unwrap();
        let before = open_on(metadata.dev(), metadata.ino());
        let fds = [file.as_file().as_fd(); 200];
        a.send(&[7; 17], &fds).await.unwrap();
        assert_eq!(b.recv(16).await.unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert_eq!(open_on(metadata.dev(), metadata.ino()), before);
        a.send(&[7; 16], &fds).await.unwrap();
        assert_eq!(b.recv(16).await.unwrap().fds.len(), 200);
        assert_eq!(open_on(metadata.dev(), metadata.ino()), before);
    }

    #[tokio::test]
    async fn sending_to_nobody_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let (a, b) = pair(directory.path()).await;
        drop(b);
        assert_eq!(
            a.send(b"x", &[]).await.unwrap_err().kind(),
            io::ErrorKind::BrokenPipe
        );
        assert!(Seqpacket::connect(&directory.path().join("none")).is_err());
    }
}
