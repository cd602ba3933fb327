//! Processes held by a descriptor (pidfd): a number alone may be another process's by the time it is used.
//!
//! `pods::zds_server` holds the processes of the proxies that connect, and `listening` takes their sockets.

use std::{
    io,
    os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd},
    ptr,
    sync::Arc,
};

use nix::{
    errno::Errno,
    libc,
    sys::socket::{getsockopt, sockopt},
};

/// A process, or what it was: its number may be another's once it has ended, and then nothing here succeeds.
#[derive(Debug, Clone)]
pub struct Process {
    pid: u32,
    fd: Arc<OwnedFd>,
}

/// Whether they are the same hold of a process.
impl PartialEq for Process {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.fd, &other.fd)
    }
}

impl Eq for Process {}

impl Process {
    /// The one that has this number now.
    ///
    /// # Errors
    /// Those of pidfd_open(2): ESRCH when there is none.
    pub fn open(pid: u32) -> io::Result<Self> {
        let number = libc::pid_t::try_from(pid).map_err(|_| Errno::ESRCH)?;
        #[expect(unsafe_code, reason = "pidfd_open has no wrapper")]
        // SAFETY: takes two numbers and touches no memory.
        let fd = owned(unsafe { libc::syscall(libc::SYS_pidfd_open, number, 0) })?;
        Ok(Self {
            pid,
            fd: Arc::new(fd),
        })
    }

    /// The one that made the other end of a connected Unix socket.
    ///
    /// # Errors
    /// Those of getsockopt(2). `NotFound` when it has ended, or has no number here: it is in a PID namespace above or beside ours.
    pub fn peer_of(socket: BorrowedFd<'_>) -> io::Result<Self> {
        let not_found = |text: &str| io::Error::new(io::ErrorKind::NotFound, text);
        let credentials = getsockopt(&socket, sockopt::PeerCredentials)?;
        let pid = u32::try_from(credentials.pid()).ok().filter(|pid| *pid != 0);
        let pid = pid.ok_or_else(|| {
            not_found("its process is not seen from here: the agent has to be in the node's PID namespace (hostPID)")
        })?;
        let held = match getsockopt(&socket, sockopt::PeerPidfd) {
            Ok(fd) => Ok(Self {
                pid,
                fd: Arc::new(fd),
            }),
            // Before Linux 6.5.
            Err(Errno::ENOPROTOOPT) => Self::by_number(socket, pid),
            // It has ended, and is no more.
            Err(Errno::ESRCH | Errno::EINVAL) => Err(Errno::ESRCH.into()),
            Err(error) => Err(error.into()),
        };
        let held = held.and_then(|held| held.check().map(|()| held));
        held.map_err(|error| match error.raw_os_error() {
            Some(libc::ESRCH) => not_found("its process has ended"),
            _ => error,
        })
    }

    /// The same by the number that it had when it connected. As long as the other end is open the process is there, unless
    /// it has given it to another.
    fn by_number(socket: BorrowedFd<'_>, pid: u32) -> io::Result<Self> {
        let held = Self::open(pid)?;
        let mut poll = libc::pollfd {
            fd: socket.as_raw_fd(),
            events: 0,
            revents: 0,
        };
        #[expect(unsafe_code, reason = "poll(2)")]
        // SAFETY: `poll` is one pollfd, alive during the call, which does not wait.
        let ready = Errno::result(unsafe { libc::poll(&raw mut poll, 1, 0) })?;
        if ready != 0 && poll.revents & (libc::POLLHUP | libc::POLLERR) != 0 {
            return Err(Errno::ESRCH.into());
        }
        Ok(held)
    }

    /// Its number.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// What `read` tells of its number.
    ///
    /// # Errors
    /// Those of `read`; ESRCH when the process has ended, and what was read may be another's.
    pub fn read<T>(&self, read: impl FnOnce(u32) -> io::Result<T>) -> io::Result<T> {
        let result = read(self.pid);
        self.check()?;
        result
    }

    /// A descriptor of the file that it has under `number`.
    ///
    /// # Errors
    /// Those of pidfd_getfd(2): EPERM without CAP_SYS_PTRACE, EBADF when it has none, ESRCH when it has ended.
    pub fn descriptor(&self, number: i32) -> io::Result<OwnedFd> {
        #[expect(unsafe_code, reason = "pidfd_getfd has no wrapper")]
        // SAFETY: takes three numbers and touches no memory; the first is an open descriptor.
        owned(unsafe { libc::syscall(libc::SYS_pidfd_getfd, self.fd.as_raw_fd(), number, 0) })
    }

    /// ESRCH when it has ended and its number may be another's.
    fn check(&self) -> io::Result<()> {
        #[expect(unsafe_code, reason = "pidfd_send_signal has no wrapper")]
        // SAFETY: the first argument is an open descriptor; signal 0 is none, and null is what it may have for siginfo.
        let sent = unsafe {
            libc::syscall(
                libc::SYS_pidfd_send_signal,
                self.fd.as_raw_fd(),
                0,
                ptr::null::<libc::siginfo_t>(),
                0,
            )
        };
        match Errno::result(sent) {
            // That it is not ours to signal means that it is there.
            Ok(_) | Err(Errno::EPERM) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

#[expect(unsafe_code, reason = "system calls return numbers")]
fn owned(result: libc::c_long) -> io::Result<OwnedFd> {
    let fd = i32::try_from(Errno::result(result)?).map_err(|_| Errno::EBADF)?;
    // SAFETY: the system call that has just succeeded made the descriptor, and nobody else knows of it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use std::{
        os::{fd::AsFd as _, unix::net::UnixStream},
        process::{Command, Stdio},
    };

    use super::*;

    #[test]
    fn a_process_that_has_ended_is_taken_for_no_other() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let process = Process::open(child.id()).unwrap();
        assert_eq!(process.read(Ok).unwrap(), child.id());
        drop(child.stdin.take());
        child.wait().unwrap();
        // As if another had the number by now: that `read` succeeds does not do.
        assert_eq!(process.read(Ok).unwrap_err().raw_os_error(), Some(libc::ESRCH));
        assert_eq!(
            process.descriptor(0).unwrap_err().raw_os_error(),
            Some(libc::ESRCH)
        );
        assert!(Process::open(u32::MAX).is_err());
    }

    #[test]
    fn who_connected_is_held() {
        let (socket, other) = UnixStream::pair().unwrap();
        for process in [
            Process::peer_of(socket.as_fd()).unwrap(),
            // As before Linux 6.5.
            Process::by_number(socket.as_fd(), std::process::id()).unwrap(),
        ] {
            assert_eq!(process.pid(), std::process::id());
            let fd = process.descriptor(other.as_raw_fd()).unwrap();
            let inode = |fd| nix::sys::stat::fstat(fd).unwrap().st_ino;
            assert_eq!(inode(fd.as_fd()), inode(other.as_fd()));
        }
        drop(other);
        let ended = Process::by_number(socket.as_fd(), std::process::id());
        assert_eq!(ended.unwrap_err().raw_os_error(), Some(libc::ESRCH));
    }
}
