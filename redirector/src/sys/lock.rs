//! Directories that one process has to itself.

use std::{
    fs::{self, File, Metadata, TryLockError},
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::Path,
};

/// A directory that is locked for as long as this value lives. The lock is the directory's own, so it leaves no file behind,
/// and a killed process's is gone with it.
#[derive(Debug)]
pub struct DirectoryLock {
    directory: File,
}

const UNSEEN: &str = "a process that is not seen from here: as root on the node, `fuser -v` with the directory's path shows who has \
                      it open";

/// Why a directory cannot be locked.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process has it.
    #[error("locked by {}", holder.map_or(UNSEEN.to_owned(), |pid| format!("process {pid}")))]
    Held {
        /// Its process id, where it can be seen.
        holder: Option<u32>,
    },
    /// It cannot be opened, or not be locked.
    #[error(transparent)]
    System(#[from] io::Error),
}

impl DirectoryLock {
    /// Locks the directory at `path`.
    ///
    /// # Errors
    /// [`LockError::Held`] when another process has it; those of open(2) and flock(2).
    pub fn take(path: &Path) -> Result<Self, LockError> {
        Self::of(File::open(path)?)
    }

    /// Goes on with the lock of another process, which has handed over its descriptor: the lock is its open file's.
    ///
    /// # Errors
    /// `InvalidData` when it is not the directory at `path`; those of [`Self::take`].
    pub fn inherited(directory: OwnedFd, path: &Path) -> Result<Self, LockError> {
        let directory = File::from(directory);
        let id = |metadata: Metadata| (metadata.dev(), metadata.ino());
        if id(directory.metadata()?) != id(fs::metadata(path)?) {
            let problem = "another directory's lock was handed over";
            return Err(io::Error::new(io::ErrorKind::InvalidData, problem).into());
        }
        Self::of(directory)
    }

    fn of(directory: File) -> Result<Self, LockError> {
        match directory.try_lock() {
            Ok(()) => Ok(Self { directory }),
            Err(TryLockError::WouldBlock) => Err(LockError::Held {
                holder: holding_process(&directory.metadata()?, true),
            }),
            Err(TryLockError::Error(error)) => Err(error.into()),
        }
    }
}

impl AsFd for DirectoryLock {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }
}

/// Who has a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holder {
    /// It can be locked.
    Nobody,
    /// A process.
    Process(u32),
    /// Somebody who cannot be seen from here.
    Hidden,
}

/// Who has the directory at `path` locked. Where that cannot be seen it is locked for a moment, which is no hindrance to others who ask.
///
/// # Errors
/// Those of open(2) and flock(2).
pub fn holder(path: &Path) -> io::Result<Holder> {
    let directory = File::open(path)?;
    let metadata = directory.metadata()?;
    if let Some(pid) = holding_process(&metadata, false) {
        return Ok(Holder::Process(pid));
    }
    match directory.try_lock_shared() {
        Ok(()) => Ok(Holder::Nobody),
        Err(TryLockError::WouldBlock) => {
            Ok(holding_process(&metadata, true).map_or(Holder::Hidden, Holder::Process))
        }
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// A process that has a file locked; `None` when it is in another PID namespace. It need not be the one that has locked it first: that
/// one may have handed the lock over and ended, and its id may be another's by now. So each is asked for its descriptors: those of the
/// first, and of all others if it is to be `searched`, which takes a while.
fn holding_process(metadata: &Metadata, searched: bool) -> Option<u32> {
    let device = metadata.dev();
    // proc_locks(5): major and minor in hexadecimal, inode in decimal.
    let file = format!(
        "{:02x}:{:02x}:{}",
        libc::major(device),
        libc::minor(device),
        metadata.ino()
    );
    let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
    let first = locks.lines().find_map(|line| locker(line, &file));
    first.filter(|pid| has_lock(*pid, &file)).or_else(|| {
        let all = fs::read_dir("/proc").ok().filter(|_| searched)?;
        let mut pids = all.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        pids.find(|pid| has_lock(*pid, &file))
    })
}

/// Whether one of a process's descriptors is of the open file that has `file` locked: proc_pid_fdinfo(5).
fn has_lock(pid: u32, file: &str) -> bool {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fdinfo"));
    descriptors.into_iter().flatten().flatten().any(|entry| {
        let info = fs::read_to_string(entry.path()).unwrap_or_default();
        let mut locks = info.lines().filter_map(|line| line.strip_prefix("lock:"));
        locks.any(|lock| locker(lock, file).is_some())
    })
}

/// Who has locked `file` by flock(2), if this line says so: `1: FLOCK  ADVISORY  WRITE 4711 00:1a:5 0 EOF`, with `->` before the kind if
/// it waits. The id is not positive where it cannot be told.
fn locker(line: &str, file: &str) -> Option<u32> {
    let words: Vec<_> = line.split_whitespace().collect();
    match words[..] {
        [_, "FLOCK", _, _, pid, id, ..] if id == file => Some(pid.parse().unwrap_or_default()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::{
        thread,
        time::{Duration, Instant},
    };

    use super::*;

    /// What `ask` finds in the end. Other tests start programs, and until such a child is one it has our descriptors as well: so a lock
    /// that was closed here is free a moment later.
    fn in_a_moment<T>(mut ask: impl FnMut() -> Option<T>) -> T {
        let end = Instant::now() + Duration::from_secs(10);
        loop {
            if let Some(found) = ask() {
                return found;
            }
            assert!(Instant::now() < end, "it is not free");
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn is_free(directory: &Path) -> Option<()> {
        (holder(directory).unwrap() == Holder::Nobody).then_some(())
    }

    #[test]
    fn a_locked_directory_names_its_holder() {
        let directory = tempfile::tempdir().unwrap();
        let lock = DirectoryLock::take(directory.path()).unwrap();
        let error = DirectoryLock::take(directory.path()).unwrap_err();
        let own = std::process::id();
        assert!(
            matches!(error, LockError::Held { holder: None })
                || error.to_string() == format!("locked by process {own}"),
            "{error}"
        );
        let seen = holder(directory.path()).unwrap();
        assert!(
            matches!(seen, Holder::Hidden) || seen == Holder::Process(own),
            "{seen:?}"
        );
        drop(lock);
        in_a_moment(|| is_free(directory.path()));
        in_a_moment(|| DirectoryLock::take(directory.path()).ok());
    }

    #[test]
    fn a_lock_is_handed_over_with_its_descriptor() {
        let (directory, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let lock = DirectoryLock::take(directory.path()).unwrap();
        let duplicate = || lock.as_fd().try_clone_to_owned().unwrap();
        let error = DirectoryLock::inherited(duplicate(), other.path()).unwrap_err();
        assert!(matches!(error, LockError::System(_)), "{error}");
        let inherited = DirectoryLock::inherited(duplicate(), directory.path()).unwrap();
        // One that is not of the same open file does not lock.
        let stranger = File::open(directory.path()).unwrap().into();
        let error = DirectoryLock::inherited(stranger, directory.path()).unwrap_err();
        assert!(matches!(error, LockError::Held { .. }), "{error}");
        drop(lock);
        DirectoryLock::take(directory.path()).unwrap_err();
        drop(inherited);
        in_a_moment(|| DirectoryLock::take(directory.path()).ok());
    }

    #[test]
    fn a_lock_that_was_handed_over_is_not_of_who_locked_it() {
        let directory = tempfile::tempdir().unwrap();
        // A child locks the directory by a descriptor of this process's, and ends.
        let ours = File::open(directory.path()).unwrap();
        let mut child = std::process::Command::new("flock");
        child.args(["--exclusive", "0"]).stdin(ours.try_clone().unwrap());
        assert!(child.status().unwrap().success());
        drop(child);
        let own = std::process::id();
        let error = DirectoryLock::take(directory.path()).unwrap_err();
        let seen = holder(directory.path()).unwrap();
        match seen {
            // As where the device of locks is not the directory's.
            Holder::Hidden => assert!(matches!(error, LockError::Held { holder: None }), "{error}"),
            seen => {
                assert_eq!(seen, Holder::Process(own));
                assert_eq!(error.to_string(), format!("locked by process {own}"));
            }
        }
        drop(ours);
        in_a_moment(|| is_free(directory.path()));
    }

    #[test]
    fn the_holder_is_found_among_others() {
        for (line, expected) in [
            ("1: POSIX  ADVISORY  WRITE 7 00:1a:5 0 EOF", None),
            ("2: FLOCK  ADVISORY  WRITE 42 00:1a:5 0 EOF", Some(42)),
            ("\t2: FLOCK  ADVISORY  WRITE -1 00:1a:5 0 EOF", Some(0)),
            ("2: -> FLOCK  ADVISORY  WRITE 43 00:1a:5 0 EOF", None),
            ("3: FLOCK  ADVISORY  WRITE 42 00:1a:7 0 EOF", None),
        ] {
            assert_eq!(locker(line, "00:1a:5"), expected, "{line}");
        }
    }

    #[test]
    fn one_that_cannot_be_seen_is_told_how_to_be_found() {
        let error = LockError::Held { holder: None }.to_string();
        assert!(error.contains("fuser -v"), "{error}");
    }
}
