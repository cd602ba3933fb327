//! Network namespaces: held by an open descriptor, named by device and inode, entered for the time of a closure.

use std::{
    cell::Cell,
    fmt, fs, io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::fs::{MetadataExt, OpenOptionsExt},
    },
    path::Path,
    sync::OnceLock,
};

use nix::{
    sched::{CloneFlags, setns, unshare},
    sys::socket::{AddressFamily, SockFlag, SockType, socket},
};

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
        if namespace_type(fd.as_fd()) != Some(libc::CLONE_NEWNET) {
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

    /// A new namespace, with nothing in it but lo, which is down. It lives as long as the value. Blocking.
    ///
    /// # Errors
    /// Those of unshare(2); EPERM without CAP_SYS_ADMIN.
    pub fn create() -> io::Result<Self> {
        // On a thread of its own, which ends there: no thread has to be brought back.
        let created = std::thread::spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET)?;
            Self::current()
        });
        created
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("internal fault while a namespace was made")))
    }

    /// By what it can be known again. Blocking.
    ///
    /// # Errors
    /// Those of [`Self::cookie`].
    pub fn place(&self) -> io::Result<Place> {
        Ok(Place {
            ino: self.id.ino,
            cookie: self.cookie()?,
        })
    }

    /// The namespace of this inode number, if somebody still has it: by name, or a process in it.
    fn find(ino: u64) -> Option<Self> {
        let entries = |directory| fs::read_dir(directory).into_iter().flatten().flatten();
        let named = entries("/run/netns").map(|entry| entry.path());
        let of_processes = entries("/proc").map(|entry| entry.path().join("ns/net"));
        named.chain(of_processes).find_map(|path| {
            let metadata = fs::metadata(&path).ok()?;
            // It may be another by the time it is opened.
            let netns = (metadata.ino() == ino)
                .then(|| Self::open(&path).ok())
                .flatten()?;
            (netns.id.ino == ino).then_some(netns)
        })
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
        let here = Here::of_thread()?;
        if here.netns().id == self.id {
            return Ok(f());
        }
        setns(&self.fd, CloneFlags::CLONE_NEWNET)?;
        AT_HOME.set(false);
        let _return = Return(&here);
        Ok(f())
    }

    /// Its cookie: a number that the kernel gives to no other namespace until the next boot, while an inode number can come
    /// back. `None` before Linux 5.14. Blocking.
    ///
    /// # Errors
    /// Those of setns(2) and socket(2).
    pub fn cookie(&self) -> io::Result<Option<u64>> {
        let any = || {
            socket(
                AddressFamily::Unix,
                SockType::Datagram,
                SockFlag::SOCK_CLOEXEC,
                None,
            )
        };
        Ok(socket_netns_cookie(self.run(any)??.as_fd()))
    }
}

/// A namespace as it is remembered: inode numbers come back, cookies do not, within one boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Inode number.
    pub ino: u64,
    /// [`Netns::cookie`].
    pub cookie: Option<u64>,
}

/// What has become of a namespace.
#[derive(Debug)]
pub enum Fate {
    /// Somebody still has it.
    There(Netns),
    /// It is no more.
    Gone,
    /// It was not found, and may be where this process does not see.
    Unseen,
}

impl Place {
    /// Looks for the namespace. `sees_all` tells whether all that there are can be seen. Blocking.
    ///
    /// # Errors
    /// Those of [`Netns::cookie`], of a namespace that has the number.
    pub fn fate(self, sees_all: bool) -> io::Result<Fate> {
        Ok(match Netns::find(self.ino) {
            Some(found) if found.place()? == self => Fate::There(found),
            // Its number has come back.
            Some(_) => Fate::Gone,
            None if sees_all => Fate::Gone,
            None => Fate::Unseen,
        })
    }
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The namespace from which the process first went into another one: that of its threads, unless somebody else moved them.
static HOME: OnceLock<Netns> = OnceLock::new();

thread_local! {
    /// Whether the calling thread is known to be in [`HOME`]. Each connection is dialled in a pod, and asking the kernel where a
    /// thread is takes as long as going there and back.
    static AT_HOME: Cell<bool> = const { Cell::new(false) };
}

/// Where a thread is.
enum Here {
    /// In [`HOME`].
    Home(&'static Netns),
    /// Within another call of [`Netns::run`], or moved by others.
    Elsewhere(Netns),
}

impl Here {
    fn of_thread() -> io::Result<Self> {
        if AT_HOME.get()
            && let Some(home) = HOME.get()
        {
            return Ok(Self::Home(home));
        }
        let here = Netns::current()?;
        if let Some(home) = HOME.get()
            && home.id == here.id
        {
            return Ok(Self::Home(home));
        }
        Ok(match HOME.set(here) {
            Ok(()) => Self::Home(HOME.get().expect("it was set just now")),
            Err(here) => Self::Elsewhere(here),
        })
    }

    fn netns(&self) -> &Netns {
        match self {
            Self::Home(home) => home,
            Self::Elsewhere(here) => here,
        }
    }
}

/// Brings the thread back on drop, so on a panic too.
struct Return<'a>(&'a Here);

impl Drop for Return<'_> {
    fn drop(&mut self) {
        if let Err(error) = setns(&self.0.netns().fd, CloneFlags::CLONE_NEWNET) {
            tracing::error!(%error, "cannot return to the node's network namespace");
            std::process::abort();
        }
        AT_HOME.set(matches!(self.0, Here::Home(_)));
    }
}

/// The CLONE_NEW* type of a namespace descriptor (NS_GET_NSTYPE, ioctl_ns(2)); `None` for any other file.
#[expect(unsafe_code, reason = "ioctl")]
fn namespace_type(fd: BorrowedFd<'_>) -> Option<i32> {
    const NS_GET_NSTYPE: libc::c_ulong = 0xb703;
    // SAFETY: NS_GET_NSTYPE takes no argument and writes no memory; any other kind of file answers ENOTTY.
    let kind = unsafe { libc::ioctl(fd.as_raw_fd(), NS_GET_NSTYPE as _) };
    (kind >= 0).then_some(kind)
}

#[expect(unsafe_code, reason = "getsockopt of an option that nix does not have")]
fn socket_netns_cookie(socket: BorrowedFd<'_>) -> Option<u64> {
    /// include/uapi/asm-generic/socket.h
    const SO_NETNS_COOKIE: libc::c_int = 71;
    let mut cookie = 0_u64;
    let mut length = size_of::<u64>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to `cookie`, and both outlive the call.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut length,
        )
    };
    (result == 0).then_some(cookie)
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

    #[test]
    fn a_namespace_keeps_its_cookie() {
        let own = Netns::current().unwrap();
        assert_eq!(own.cookie().unwrap(), own.cookie().unwrap());
    }

    #[test]
    fn a_namespace_is_told_from_a_later_one_of_its_number() {
        let here = Netns::current().unwrap().place().unwrap();
        for sees_all in [false, true] {
            assert!(matches!(here.fate(sees_all), Ok(Fate::There(found)) if found.place().unwrap() == here));
        }
        let before = Place {
            cookie: Some(here.cookie.unwrap_or(0).wrapping_add(1)),
            ..here
        };
        assert!(matches!(before.fate(false), Ok(Fate::Gone)));
        // No namespace has the number 1.
        let nowhere = Place { ino: 1, ..here };
        assert!(matches!(nowhere.fate(false), Ok(Fate::Unseen)));
        assert!(matches!(nowhere.fate(true), Ok(Fate::Gone)));
    }
}
