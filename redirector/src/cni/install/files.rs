//! Reads the CNI's directories and changes them, each file at once or not at all: written beside it under a name that no
//! runtime reads, brought to the disk, and renamed.
//!
//! What an installer that was killed has left is told by its name and removed by the next; whoever changes something holds the
//! directory's lock meanwhile, so that what is found then is nobody's.

use std::{
    fs::{self, File, Permissions},
    io::{self, Read, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
};

use super::{
    Error,
    plan::{Attributes, Found, Listing, Step, Taken, saved_name, taken},
};

/// What the names of unfinished files have in them.
const UNFINISHED: &str = ".redirector-tmp-";

/// Longest configuration that is read. They have some kilobytes.
const CONFIGURATION_BYTES: u64 = 1024 * 1024;

/// What is done to a directory: the seam at which tests stop an installer after any operation.
pub(super) trait Disk {
    fn create(&self, path: &Path) -> io::Result<File> {
        let mut options = File::options();
        options.write(true).create_new(true).mode(0o600).open(path)
    }

    fn write(&self, file: &mut File, bytes: &[u8]) -> io::Result<()> {
        file.write_all(bytes)
    }

    fn set_attributes(&self, file: &File, attributes: Attributes) -> io::Result<()> {
        let there = file.metadata()?;
        if let Some((user, group)) = attributes.owner
            && (there.uid(), there.gid()) != (user, group)
        {
            match fchown(file, Some(user), Some(group)) {
                // It takes CAP_CHOWN. Without it the file is root's from now on, as the runtime is that reads it.
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
                changed => changed?,
            }
        }
        file.set_permissions(Permissions::from_mode(attributes.mode))
    }

    fn sync(&self, file: &File) -> io::Result<()> {
        file.sync_all()
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }
}

/// The system's own.
pub(super) struct System;

impl Disk for System {}

/// What is in the CNI's directory of configurations.
pub(super) fn list(directory: &Path) -> Result<Listing, Error> {
    let failed = |source| Error::Io {
        operation: "read",
        path: directory.to_owned(),
        source,
    };
    let mut listing = Listing::default();
    for entry in fs::read_dir(directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        // Whoever names a file otherwise is read by no runtime that matters here.
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        match taken(&name) {
            Taken::Other => {}
            Taken::CiliumBackup => {
                listing.cilium_backups.insert(name);
            }
            Taken::Configuration => {
                listing
                    .files
                    .extend(look(&entry.path()).map(|found| (name, found)));
            }
            Taken::Saved(before) => {
                listing
                    .saved
                    .extend(look(&entry.path()).map(|found| (before, found)));
            }
        }
    }
    Ok(listing)
}

/// A file, if it is one and is still there.
fn look(path: &Path) -> Option<Found> {
    let metadata = fs::metadata(path).ok().filter(fs::Metadata::is_file)?;
    let attributes = Attributes {
        mode: metadata.mode() & 0o7777,
        owner: Some((metadata.uid(), metadata.gid())),
    };
    let text = match read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        Err(error) => Err(format!("cannot be read: {error}")),
        Ok(bytes) if bytes.len() as u64 > CONFIGURATION_BYTES => Err("is longer than 1 MiB".to_owned()),
        Ok(bytes) => String::from_utf8(bytes).map_err(|_| "is not text".to_owned()),
    };
    Some(Found { text, attributes })
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?
        .take(CONFIGURATION_BYTES + 1)
        .read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Carries out one step.
pub(super) fn carry_out(disk: &dyn Disk, directory: &Path, step: &Step) -> Result<(), Error> {
    let at = |name: &str| directory.join(name);
    match step {
        Step::Write {
            name,
            text,
            attributes,
        } => replace(disk, &at(name), text.as_bytes(), *attributes),
        Step::Save(name) => rename(disk, &at(name), &at(&saved_name(name))),
        Step::PutBack(name) => rename(disk, &at(&saved_name(name)), &at(name)),
        Step::Forget(name) => remove(disk, &at(&saved_name(name))),
        Step::Remove(name) => remove(disk, &at(name)),
    }
}

/// Writes a file anew.
pub(super) fn replace(
    disk: &dyn Disk,
    path: &Path,
    bytes: &[u8],
    attributes: Attributes,
) -> Result<(), Error> {
    let unfinished = unfinished(path);
    let written = || -> io::Result<()> {
        let mut file = disk.create(&unfinished)?;
        disk.write(&mut file, bytes)?;
        disk.set_attributes(&file, attributes)?;
        disk.sync(&file)?;
        disk.rename(&unfinished, path)
    };
    written().map_err(|source| {
        // It may be there or not; the next run looks for it too.
        let _ = disk.remove(&unfinished);
        failed("write", path)(source)
    })?;
    sync_directory(disk, path)
}

fn rename(disk: &dyn Disk, from: &Path, to: &Path) -> Result<(), Error> {
    disk.rename(from, to).map_err(failed("rename", from))?;
    sync_directory(disk, to)
}

/// Removes a file, which may be gone.
pub(super) fn remove(disk: &dyn Disk, path: &Path) -> Result<(), Error> {
    match disk.remove(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => {
            removed.map_err(failed("remove", path))?;
            sync_directory(disk, path)
        }
    }
}

fn sync_directory(disk: &dyn Disk, path: &Path) -> Result<(), Error> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    File::open(directory)
        .and_then(|opened| disk.sync(&opened))
        .map_err(failed("bring to the disk", directory))
}

/// Removes what installers have left unfinished in a directory, whose lock the caller has.
pub(super) fn remove_unfinished(disk: &dyn Disk, directory: &Path) -> Result<(), Error> {
    let entries = fs::read_dir(directory).map_err(failed("read", directory))?;
    for entry in entries {
        let path = entry.map_err(failed("read", directory))?.path();
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default();
        if name.starts_with('.') && name.contains(UNFINISHED) {
            remove(disk, &path)?;
        }
    }
    Ok(())
}

/// A name for a file that becomes the one at `path`.
fn unfinished(path: &Path) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let (pid, number) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    path.with_file_name(format!(".{name}{UNFINISHED}{pid}-{number}"))
}

pub(super) fn failed(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Io {
        operation,
        path,
        source,
    }
}

/// What tells whether a file is still the one that was looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stamp {
    device: u64,
    inode: u64,
    bytes: u64,
    mode: u32,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    /// Of the file at `path`; none if there is none.
    pub(super) fn of(path: &Path) -> io::Result<Option<Self>> {
        match fs::metadata(path) {
            Ok(metadata) => Ok(Some(Self {
                device: metadata.dev(),
                inode: metadata.ino(),
                bytes: metadata.len(),
                mode: metadata.mode(),
                modified: (metadata.mtime(), metadata.mtime_nsec()),
                changed: (metadata.ctime(), metadata.ctime_nsec()),
            })),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether everybody may run the file.
    pub(super) fn is_executable(&self) -> bool {
        self.mode & 0o555 == 0o555
    }
}

#[cfg(test)]
mod tests;
