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

/// Why a directory cannot be locked.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process has it.
    #[error("locked by {}", holder.map_or("another process".to_owned(), |pid| format!("process {pid}")))]
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
                holder: holding_process(&directory.metadata()?),
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
    if let Some(pid) = holding_process(&directory.metadata()?) {
        return Ok(Holder::Process(pid));
    }
    match directory.try_lock_shared() {
        Ok(()) => Ok(Holder::Nobody),
        Err(TryLockError::WouldBlock) => Ok(Holder::Hidden),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// The process that has a file locked; `None` when it is in another PID namespace, or has handed the lock over and ended.
fn holding_process(metadata: &Metadata) -> Option<u32> {
    let locks = fs::read_to_string("/proc/locks").ok()?;
    let device = metadata.dev();
    // proc_locks(5): major and minor in hexadecimal, inode in decimal.
    let file = format!(
        "{:02x}:{:02x}:{}",
        libc::major(device),
        libc::minor(device),
        metadata.ino()
    );
    find_holder(&locks, &file).filter(|pid| Path::new("/proc").join(pid.to_string()).exists())
}

/// `1: FLOCK  ADVISORY  WRITE 4711 00:1a:5 0 EOF`; a line of one who waits has `->` before the kind.
fn find_holder(locks: &str, file: &str) -> Option<u32> {
    let of = |line: &str| {
        let words: Vec<_> = line.split_whitespace().collect();
        match words[..] {
            [_, "FLOCK", _, _, pid, id, ..] if id == file => pid.parse().ok(),
            _ => None,
        }
    };
    locks.lines().find_map(of).filter(|pid| *pid > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(holder(directory.path()).unwrap(), Holder::Nobody);
        DirectoryLock::take(directory.path()).unwrap();
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
        DirectoryLock::take(directory.path()).unwrap();
    }

    #[test]
    fn the_holder_is_found_among_others() {
        let locks = "1: POSIX  ADVISORY  WRITE 7 00:1a:5 0 EOF\n\
                     2: FLOCK  ADVISORY  WRITE 42 00:1a:5 0 EOF\n\
                     2: -> FLOCK  ADVISORY  WRITE 43 00:1a:6 0 EOF\n\
                     3: FLOCK  ADVISORY  WRITE 0 00:1a:7 0 EOF\n";
        assert_eq!(find_holder(locks, "00:1a:5"), Some(42));
        assert_eq!(find_holder(locks, "00:1a:6"), None);
        assert_eq!(find_holder(locks, "00:1a:7"), None);
    }
}
