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
use crate::{
    mesh::pod::PodUid,
    redirect::{Error, place_of},
    sys::netns::{Netns, Place},
};

const SUFFIX: &str = ".json";

/// Longest file that is taken for a record.
const MAX_BYTES: u64 = 4096;

/// A pod that has rules.
///
/// What a later agent may have added is passed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Record {
    pub(super) netns_ino: u64,
    /// Inode numbers come back; cookies do not, within one boot. None before Linux 5.14.
    netns_cookie: Option<u64>,
    /// What its rules are written to; `None` is not known.
    pub(super) variant: Option<Variant>,
    /// The sysctls that were changed, a bit each.
    pub(super) changed_sysctls: u32,
}

impl Record {
    /// The record of a pod in `netns` where nothing was changed yet.
    pub(super) fn of(netns: &Netns, variant: Variant) -> Result<Self, Error> {
        Ok(Self {
            variant: Some(variant),
            ..Self::blank(netns)?
        })
    }

    /// Stands for a record that says nothing, of a pod in `netns`: which rules there are has to be found out.
    pub(super) fn unknown(uid: &PodUid, netns: &Netns, error: &Error) -> Result<Self, Error> {
        tracing::warn!(%uid, %error, "rules of either kind are looked for, and sysctls stay as they are");
        Self::blank(netns)
    }

    fn blank(netns: &Netns) -> Result<Self, Error> {
        let place = place_of(netns)?;
        Ok(Self {
            netns_ino: place.ino,
            netns_cookie: place.cookie,
            variant: None,
            changed_sysctls: 0,
        })
    }

    /// Whether this namespace is meant.
    pub(super) fn is_of(&self, netns: &Netns) -> Result<bool, Error> {
        Ok(self.place() == place_of(netns)?)
    }

    /// The namespace that is meant.
    pub(super) fn place(&self) -> Place {
        Place {
            ino: self.netns_ino,
            cookie: self.netns_cookie,
        }
    }

    /// What its rules may be written to.
    pub(super) fn variants(&self) -> Vec<Variant> {
        self.variant
            .map_or(Variant::ALL.to_vec(), |variant| vec![variant])
    }
}

/// What there is for a pod.
#[derive(Debug)]
pub(super) enum Loaded {
    /// No record: it has no rules.
    Nothing,
    /// Its record.
    Record(Record),
    /// A record that says nothing: a later agent's, or damaged. The pod has, or may have, rules.
    Unknown(Error),
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

    /// The file of a pod's record.
    pub(super) fn path(&self, uid: &PodUid) -> PathBuf {
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

    /// Reads the record of a pod.
    pub(super) fn load(&self, uid: &PodUid) -> Result<Loaded, Error> {
        let path = self.path(uid);
        let read = || -> io::Result<Record> {
            let mut bytes = Vec::new();
            File::open(&path)?.take(MAX_BYTES).read_to_end(&mut bytes)?;
            Ok(serde_json::from_slice(&bytes)?)
        };
        match read() {
            Ok(record) => Ok(Loaded::Record(record)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Loaded::Nothing),
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof
                ) =>
            {
                Ok(Loaded::Unknown(Error::new(
                    format!("making sense of {}", path.display()),
                    error,
                )))
            }
            Err(error) => Err(Error::new(format!("reading {}", path.display()), error)),
        }
    }

    /// Gives the record of a pod another name; there need be none.
    pub(super) fn rename(&self, from: &PodUid, to: &PodUid) -> Result<(), Error> {
        match fs::rename(self.path(from), self.path(to)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Error::new(
                format!("renaming {}", self.path(from).display()),
                error,
            )),
            _ => Ok(()),
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

    /// Whether another pod has the namespace of this number, by its record.
    pub(super) fn others_have(&self, uid: &PodUid, netns_ino: u64) -> Result<bool, Error> {
        let uids = self.uids()?;
        let mut others = uids.iter().filter(|other| *other != uid);
        // One that can't be read is no reason to leave this pod's rules.
        let has =
            |other| matches!(self.load(other), Ok(Loaded::Record(record)) if record.netns_ino == netns_ino);
        Ok(others.any(has))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_read_is_not_taken_for_none() {
        let directory = tempfile::tempdir().unwrap();
        let records = Records::open(directory.path()).unwrap();
        let uid: PodUid = "a-pod".parse().unwrap();
        let read = || match records.load(&uid).unwrap() {
            Loaded::Record(record) => record,
            other => panic!("{other:?}"),
        };
        assert!(matches!(records.load(&uid), Ok(Loaded::Nothing)));
        let record = Record {
            netns_ino: 5,
            netns_cookie: Some(6),
            variant: Some(Variant::Legacy),
            changed_sysctls: 1,
        };
        records.save(&uid, &record).unwrap();
        assert_eq!(read(), record);
        let whole = fs::read_to_string(records.path(&uid)).unwrap();
        // As a later agent writes it.
        fs::write(records.path(&uid), whole.replacen('{', r#"{"later":[1],"#, 1)).unwrap();
        assert_eq!(read(), record);
        for bad in ["", "{", "null", &whole.replace("legacy", "later")] {
            fs::write(records.path(&uid), bad).unwrap();
            let Loaded::Unknown(error) = records.load(&uid).unwrap() else {
                panic!("{bad} was read");
            };
            assert!(error.to_string().contains("a-pod.json"), "{error}");
            assert_eq!(records.uids().unwrap(), std::slice::from_ref(&uid));
            // Another's record is none of its business.
            assert!(!records.others_have(&"b-pod".parse().unwrap(), 5).unwrap());
        }
    }
}
