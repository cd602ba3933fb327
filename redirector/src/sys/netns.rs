//! Network namespaces: held by an open descriptor, named by device and inode, entered for the time of a closure.

use std::{
    fmt, fs, io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::{MetadataExt, OpenOptionsExt},
    },
    path::Path,
};

use nix::sched::{CloneFlags, setns};

/// Which namespace: device and inode of its nsfs file. Unique as long as the namespace is held open.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NetnsId {
    /// Device of the nsfs.
    pub dev: u64,
    /// Inode within it.
    pub ino: u64,
}

impl fmt::Display for NetnsId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "net:[{}]", self.ino)
    }
}

impl fmt::Debug for NetnsId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A network namespace, held open: neither it nor its inode number goes away before this value does.
#[derive(Debug)]
pub struct Netns {
    fd: OwnedFd,
    id: NetnsId,
}

impl Netns {
    /// Opens the namespace file at `path`.
    ///
    /// # Errors
    /// Those of open(2); `InvalidInput` for a file that is not a network namespace.
    pub fn open(path: &Path) -> io::Result<Self> {
        // Without O_NONBLOCK, a path that is a FIFO would hold the caller for ever.
        let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
        Self::from_fd(
            fs::OpenOptions::new()
                .read(true)
                .custom_flags(flags)
                .open(path)?
                .into(),
        )
    }

    /// Takes a descriptor that another process sent.
    ///
    /// # Errors
    /// `InvalidInput` when it is not a network namespace.
    pub fn from_fd(fd: OwnedFd) -> io::Result<Self> {
        let file = fs::File::from(fd);
        let metadata = file.metadata()?;
        let fd = OwnedFd::from(file);
        if super::netlink::namespace_type(fd.as_fd()) != Some(libc::CLONE_NEWNET) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "not a network namespace",
            ));
        }
        Ok(Self {
            fd,
            id: NetnsId {
                dev: metadata.dev(),
                ino: metadata.ino(),
            },
        })
    }

    /// The namespace of the calling thread.
    pub fn current() -> io::Result<Self> {
        Self::open(Path::new("/proc/thread-self/ns/net"))
    }

    /// A value that names the namespace `ino` and cannot be entered, for tests of what only keeps account of them.
    #[cfg(test)]
    pub(crate) fn stand_in(ino: u64) -> Self {
        Self {
            fd: fs::File::open("/dev/null").unwrap().into(),
            id: NetnsId { dev: 0, ino },
        }
    }

    /// Device and inode.
    pub fn id(&self) -> NetnsId {
        self.id
    }

    /// Runs `f` with the calling thread in this namespace, and brings the thread back. Not async on purpose: no await can
    /// be inside.
    ///
    /// # Errors
    /// Those of setns(2); EPERM without CAP_SYS_ADMIN. `f` has not run then.
    ///
    /// # Aborts
    /// When the thread cannot be brought back: it would go on to serve others from within a pod.
    pub fn run<T>(&self, f: impl FnOnce() -> T) -> io::Result<T> {
        let home = Self::current()?;
        if home.id == self.id {
            return Ok(f());
        }
        setns(&self.fd, CloneFlags::CLONE_NEWNET)?;
        let _restore = Restore(home);
        Ok(f())
    }
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Brings the thread back on drop, so on a panic too.
struct Restore(Netns);

impl Drop for Restore {
    fn drop(&mut self) {
        if let Err(error) = setns(&self.0.fd, CloneFlags::CLONE_NEWNET) {
            tracing::error!(%error, "cannot return to the node's network namespace");
            std::process::abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_no_namespace_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(
            Netns::open(file.path()).unwrap_err().kind(),
            io::ErrorKind::InvalidInput
        );
        let directory = tempfile::tempdir().unwrap();
        let fifo = directory.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(
            Netns::open(&fifo).unwrap_err().kind(),
            io::ErrorKind::InvalidInput
        );
        let mount = Netns::open(Path::new("/proc/self/ns/mnt"));
        assert_eq!(mount.unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn the_own_namespace_needs_no_right_to_enter() {
        let own = Netns::current().unwrap();
        assert_eq!(own.run(|| Netns::current().unwrap().id()).unwrap(), own.id());
    }
}
