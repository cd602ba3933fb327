//! The files of the agent's Unix sockets: made with their directory, in place of what a killed agent has left, and removed at the end.

use std::{
    fs, io,
    os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use socket2::{Domain, SockAddr, Socket, Type};

/// Why a socket is not there.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Another process listens.
    #[error("{path} is served by a running agent: stop that one, or choose another path ({flag})", path = .path.display())]
    InUse {
        /// Where.
        path: PathBuf,
        /// The flag that chooses another.
        flag: &'static str,
    },
    /// Something that is not ours to remove is there.
    #[error("{path} exists and is not a socket: choose another path ({flag})", path = .path.display())]
    NotASocket {
        /// Where.
        path: PathBuf,
        /// The flag that chooses another.
        flag: &'static str,
    },
    /// The system refuses.
    #[error("{operation} {path}", path = .path.display())]
    System {
        /// What was tried.
        operation: &'static str,
        /// Where.
        path: PathBuf,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
}

/// That `operation` on `path` failed.
pub fn failed(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> BindError {
    let path = path.to_owned();
    move |source| BindError::System {
        operation,
        path,
        source,
    }
}

/// Listens at `path` by `listen`; the socket has this mode. One that nobody serves any more is replaced.
///
/// # Errors
/// When somebody serves it, it is no socket, or the system refuses.
pub fn bind<L>(
    path: &Path,
    flag: &'static str,
    mode: u32,
    listen: impl FnOnce(&Path) -> io::Result<L>,
) -> Result<(L, SocketFile), BindError> {
    if let Some(directory) = path.parent() {
        let mut builder = fs::DirBuilder::new();
        let made = builder.recursive(true).mode(0o750).create(directory);
        made.map_err(failed("create directory of", path))?;
    }
    remove_stale(path, flag)?;
    let listener = listen(path).map_err(failed("listen at", path))?;
    let mode = fs::Permissions::from_mode(mode);
    fs::set_permissions(path, mode).map_err(failed("set mode of", path))?;
    let file = SocketFile::existing(path).map_err(failed("look at", path))?;
    Ok((listener, file))
}

/// Removes the socket's file that a killed agent has left; there need be none. `flag` chooses another path.
///
/// # Errors
/// When somebody serves it, or it is no socket.
pub fn remove_stale(path: &Path, flag: &'static str) -> Result<(), BindError> {
    let path_and_flag = || (path.to_owned(), flag);
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed("look at", path)(error)),
        Ok(metadata) if !metadata.file_type().is_socket() => {
            let (path, flag) = path_and_flag();
            return Err(BindError::NotASocket { path, flag });
        }
        Ok(_) => {}
    }
    // Does not wait: of one that accepts nothing any more, the queue may be full.
    let connected = Socket::new(Domain::UNIX, Type::STREAM.nonblocking(), None)
        .and_then(|socket| socket.connect(&SockAddr::unix(path)?));
    match connected {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).map_err(failed("remove stale socket", path))
        }
        // Somebody listens with sockets of another type: unix(7).
        Err(error)
            if error.kind() != io::ErrorKind::WouldBlock
                && error.raw_os_error() != Some(libc::EPROTOTYPE) =>
        {
            Err(failed("connect to existing socket", path)(error))
        }
        _ => {
            let (path, flag) = path_and_flag();
            Err(BindError::InUse { path, flag })
        }
    }
}

/// The socket's file; removed on drop, if it is still this one and this agent's.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    id: (u64, u64),
    others: Arc<AtomicBool>,
}

impl SocketFile {
    /// The file that is at `path`.
    ///
    /// # Errors
    /// When there is none.
    pub fn existing(path: &Path) -> io::Result<Self> {
        let metadata = fs::symlink_metadata(path)?;
        Ok(Self {
            path: path.to_owned(),
            id: (metadata.dev(), metadata.ino()),
            others: Arc::default(),
        })
    }

    /// It is not removed while `others` says that it is another agent's.
    #[must_use]
    pub fn unless(mut self, others: &Arc<AtomicBool>) -> Self {
        self.others = Arc::clone(others);
        self
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.others.load(Ordering::Relaxed) {
            return;
        }
        let now = fs::symlink_metadata(&self.path).map(|metadata| (metadata.dev(), metadata.ino()));
        if now.is_ok_and(|id| id == self.id) {
            let _ = fs::remove_file(&self.path);
        }
    }
}
