//! A file that is followed as it changes. Replacing it (rename, a ConfigMap's symlinks) is the clean way to change it; of one
//! that is written in place, only a content that stood still from one look to the next is taken.
//!
//! Sources of configuration use it, and decide what a change means.

use std::{
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    io::{self, Read as _},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

/// How often a file is to be looked at.
pub const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Longest file that is read: a mesh of a million workloads.
const MAX_BYTES: u64 = 512 << 20;

/// What is known of the file's content.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Seen {
    stamp: Stamp,
    content: u64,
}

/// What changes with the content, as a rule. Of the file itself, behind all symlinks.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    len: u64,
    modified: Option<SystemTime>,
}

impl Stamp {
    fn of(metadata: &fs::Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            len: metadata.len(),
            modified: metadata.modified().ok(),
        }
    }
}

fn read(path: &Path) -> io::Result<(Vec<u8>, Seen)> {
    // Opening a FIFO would wait for somebody who writes to it, and a device may have no end.
    let mut options = fs::OpenOptions::new();
    let file = options.read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "it is not a regular file",
        ));
    }
    let stamp = Stamp::of(&metadata);
    if stamp.len > MAX_BYTES {
        let text = format!("it has {} bytes; at most {MAX_BYTES} are read", stamp.len);
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, text));
    }
    let mut content = Vec::new();
    file.take(MAX_BYTES).read_to_end(&mut content)?;
    let mut hasher = DefaultHasher::new();
    content.hash(&mut hasher);
    Ok((
        content,
        Seen {
            stamp,
            content: hasher.finish(),
        },
    ))
}

fn text(content: Vec<u8>) -> io::Result<String> {
    String::from_utf8(content).map_err(|_| {
        io::Error::new(
            io::ErrorKind::InvalidData,
            "it is not text: it holds what is not UTF-8",
        )
    })
}

/// A file that is followed; when it is looked at is its owner's matter.
#[derive(Debug)]
pub struct Followed {
    path: PathBuf,
    /// What was handed on last, whether or not it was usable.
    taken: Seen,
    /// A change that has yet to stand still.
    pending: Option<Stamp>,
    /// The file could not be read, and that has been told.
    unreadable: bool,
}

impl Followed {
    /// Reads the file for the first time. Blocking.
    ///
    /// # Errors
    /// Those of reading.
    pub fn open(path: &Path) -> io::Result<(Self, String)> {
        let (followed, content) = Self::open_bytes(path)?;
        Ok((followed, text(content)?))
    }

    /// The same, of a file that need not be text.
    ///
    /// # Errors
    /// Those of reading.
    pub fn open_bytes(path: &Path) -> io::Result<(Self, Vec<u8>)> {
        let (content, seen) = read(path)?;
        let followed = Self {
            path: path.to_owned(),
            taken: seen,
            pending: None,
            unreadable: false,
        };
        Ok((followed, content))
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Looks at the file: its new content, when there is one. Blocking.
    ///
    /// # Errors
    /// Those of reading, each once until the file is readable again.
    pub fn look(&mut self) -> io::Result<Option<String>> {
        self.look_as(text)
    }

    /// The same, of a file that need not be text. Blocking.
    ///
    /// # Errors
    /// Those of reading, each once until the file is readable again.
    pub fn look_bytes(&mut self) -> io::Result<Option<Vec<u8>>> {
        self.look_as(Ok)
    }

    fn look_as<T>(&mut self, convert: impl Fn(Vec<u8>) -> io::Result<T>) -> io::Result<Option<T>> {
        let stamp = match fs::metadata(&self.path) {
            Ok(metadata) => Stamp::of(&metadata),
            Err(error) => return self.unreadable(error),
        };
        if stamp == self.taken.stamp && !self.unreadable {
            self.pending = None;
            return Ok(None);
        }
        if self.pending.as_ref() != Some(&stamp) {
            self.pending = Some(stamp);
            return Ok(None);
        }
        let looked = read(&self.path).and_then(|(content, seen)| Ok((convert(content)?, seen)));
        let (content, seen) = match looked {
            Ok(looked) => looked,
            Err(error) => return self.unreadable(error),
        };
        if self.pending.as_ref() != Some(&seen.stamp) {
            self.pending = Some(seen.stamp);
            return Ok(None);
        }
        self.pending = None;
        self.unreadable = false;
        let same = seen.content == self.taken.content;
        self.taken = seen;
        Ok((!same).then_some(content))
    }

    fn unreadable<T>(&mut self, error: io::Error) -> io::Result<Option<T>> {
        self.pending = None;
        if std::mem::replace(&mut self.unreadable, true) {
            return Ok(None);
        }
        Err(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_no_end_is_not_read() {
        let directory = tempfile::tempdir().unwrap();
        let fifo = directory.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let endless = directory.path().join("endless");
        std::os::unix::fs::symlink("/dev/zero", &endless).unwrap();
        let long = directory.path().join("long");
        fs::File::create(&long).unwrap().set_len(MAX_BYTES + 1).unwrap();
        let cases: [(&Path, &str); 4] = [
            (&fifo, "not a regular file"),
            (&endless, "not a regular file"),
            (directory.path(), "not a regular file"),
            (&long, "at most 536870912 are read"),
        ];
        for (path, why) in cases {
            let error = read(path).unwrap_err().to_string();
            assert!(error.contains(why), "{}: {error}", path.display());
        }
    }
}
