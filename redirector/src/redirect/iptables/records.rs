//! Which pods have rules: a file per pod in the state directory, for the agent after this one. The rules themselves don't say
//! whose they are.

use std::{
    fs::{self, DirBuilder, File},
    io::{self, Read, Write},
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::run::Variant;
use crate::{mesh::pod::PodUid, redirect::Error, sys::netns::Netns};

const SUFFIX: &str = ".json";

/// Longest file that is taken for a record.
const MAX_BYTES: u64 = 4096;

/// A pod that has rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Record {
    pub(super) netns_ino: u64,
    /// Inode numbers come back; cookies do not, within one boot. None before Linux 5.14.
    netns_cookie: Option<u64>,
    /// What its rules are written to.
    pub(super) variant: Variant,
    /// The sysctls that were changed, a bit each.
    pub(super) changed_sysctls: u32,
}

impl Record {
    /// The record of a pod in `netns` where nothing was changed yet.
    pub(super) fn of(netns: &Netns, variant: Variant) -> Self {
        Self {
            netns_ino: netns.id().ino,
            netns_cookie: netns.cookie().ok().flatten(),
            variant,
            changed_sysctls: 0,
        }
    }

    /// Whether this namespace is meant.
    pub(super) fn is_of(&self, netns: &Netns) -> bool {
        self.netns_ino == netns.id().ino && self.netns_cookie == netns.cookie().ok().flatten()
    }
}

/// The directory of records. All methods block.
#[derive(Debug)]
pub(super) struct Records {
    directory: PathBuf,
}

impl Records {
    /// Opens the directory, and makes it if need be.
    pub(super) fn open(directory: &Path) -> Result<Self, Error> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .map_err(|error| Error::new(format!("making {}", directory.display()), error))?;
        Ok(Self::existing(directory))
    }

    /// The directory as it is; it need not be there.
    pub(super) fn existing(directory: &Path) -> Self {
        Self {
            directory: directory.to_owned(),
        }
    }

    fn path(&self, uid: &PodUid) -> PathBuf {
        self.directory.join(format!("{uid}{SUFFIX}"))
    }

    /// Writes a record, whole or not at all.
    pub(super) fn save(&self, uid: &PodUid, record: &Record) -> Result<(), Error> {
        let path = self.path(uid);
        let write = || {
            let unfinished = self.directory.join(format!("{uid}.tmp"));
            let mut file = File::create(&unfinished)?;
            file.write_all(&serde_json::to_vec(record)?)?;
            fs::rename(&unfinished, &path)
        };
        write().map_err(|error| Error::new(format!("writing {}", path.display()), error))
    }

    /// The record of a pod, if it has one. One that cannot be read is told, and is none: what is in the pod is found there.
    pub(super) fn load(&self, uid: &PodUid) -> Result<Option<Record>, Error> {
        let path = self.path(uid);
        let read = || -> io::Result<Record> {
            let mut bytes = Vec::new();
            File::open(&path)?.take(MAX_BYTES).read_to_end(&mut bytes)?;
            Ok(serde_json::from_slice(&bytes)?)
        };
        match read() {
            Ok(record) => Ok(Some(record)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error)
                if error.kind() == io::ErrorKind::InvalidData
                    || error.kind() == io::ErrorKind::UnexpectedEof =>
            {
                tracing::error!(path = %path.display(), %error, "bad record of a pod's rules");
                Ok(None)
            }
            Err(error) => Err(Error::new(format!("reading {}", path.display()), error)),
        }
    }

    /// Removes the record of a pod; there need be none.
    pub(super) fn remove(&self, uid: &PodUid) -> Result<(), Error> {
        match fs::remove_file(self.path(uid)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Error::new(
                format!("removing {}", self.path(uid).display()),
                error,
            )),
            _ => Ok(()),
        }
    }

    /// The pods that have records.
    pub(super) fn uids(&self) -> Result<Vec<PodUid>, Error> {
        let failed = |error| Error::new(format!("listing {}", self.directory.display()), error);
        let mut uids = Vec::new();
        let entries = match fs::read_dir(&self.directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(uids),
            entries => entries.map_err(failed)?,
        };
        for entry in entries {
            let name = entry.map_err(failed)?.file_name();
            let uid = name.to_str().and_then(|name| name.strip_suffix(SUFFIX));
            uids.extend(uid.and_then(|uid| uid.parse::<PodUid>().ok()));
        }
        Ok(uids)
    }

    /// Whether another pod has the namespace of this number.
    pub(super) fn others_have(&self, uid: &PodUid, netns_ino: u64) -> Result<bool, Error> {
        for other in self.uids()?.iter().filter(|other| *other != uid) {
            if self
                .load(other)?
                .is_some_and(|record| record.netns_ino == netns_ino)
            {
                return Ok(true);
            }
        }
        Ok(false)
    }
}
