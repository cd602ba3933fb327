//! What the agent remembers of captured pods across its own restarts: a file per pod under the state directory.
//!
//! `work` writes and removes them, `restore` reads them at start.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    net::IpAddr,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::PodAdd;
use crate::{
    mesh::pod::{PodInfo, PodUid},
    redirect::overrides::Overrides,
    sys::netns::NetnsId,
    telemetry::Chain,
};

/// A captured pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Record {
    uid: String,
    name: String,
    namespace: String,
    service_account: String,
    /// Where the namespace was opened; absent for pods that came over ZDS, which their agent names again.
    #[serde(skip_serializing_if = "Option::is_none")]
    netns_path: Option<PathBuf>,
    netns_dev: u64,
    netns_ino: u64,
    /// Inode numbers come back; cookies do not, within one boot.
    #[serde(skip_serializing_if = "Option::is_none")]
    netns_cookie: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    boot_id: Option<String>,
    addresses: Vec<IpAddr>,
    #[serde(default, skip_serializing_if = "is_default")]
    rules: Overrides,
}

fn is_default(rules: &Overrides) -> bool {
    *rules == Overrides::default()
}

impl Record {
    /// The record of `add`. Blocking.
    pub fn of(add: &PodAdd) -> Self {
        let PodInfo {
            uid,
            name,
            namespace,
            service_account,
        } = add.info.clone();
        Self {
            uid: uid.to_string(),
            name,
            namespace,
            service_account,
            netns_path: add.netns_path.clone(),
            netns_dev: add.netns.id().dev,
            netns_ino: add.netns.id().ino,
            netns_cookie: add.netns.cookie().ok().flatten(),
            boot_id: boot_id(),
            addresses: add.addresses.clone(),
            rules: (*add.rules).clone(),
        }
    }

    /// Who the pod is.
    pub fn info(&self) -> Result<PodInfo, crate::mesh::pod::InvalidPodUid> {
        Ok(PodInfo {
            uid: self.uid.parse()?,
            name: self.name.clone(),
            namespace: self.namespace.clone(),
            service_account: self.service_account.clone(),
        })
    }

    /// Where its namespace was opened.
    pub fn netns_path(&self) -> Option<&Path> {
        self.netns_path.as_deref()
    }

    /// Its addresses.
    pub fn addresses(&self) -> &[IpAddr] {
        &self.addresses
    }

    /// What the pod said of its rules.
    pub fn rules(&self) -> &Overrides {
        &self.rules
    }

    /// Whether a namespace is the recorded one, and not one that has its inode number now.
    pub fn is_of(&self, id: NetnsId, cookie: Option<u64>) -> bool {
        (self.netns_dev, self.netns_ino) == (id.dev, id.ino)
            && self.boot_id == boot_id()
            && (self.netns_cookie.is_none() || self.netns_cookie == cookie)
    }
}

/// The kernel's random id of this boot.
fn boot_id() -> Option<String> {
    fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .ok()
        .map(|id| id.trim().to_owned())
}

/// The directory of records. All methods block.
#[derive(Debug, Clone)]
pub struct Records {
    directory: PathBuf,
}

/// Why a record could not be written or removed.
#[derive(Debug, thiserror::Error)]
#[error("{operation} {path}", path = .path.display())]
pub struct Error {
    operation: &'static str,
    path: PathBuf,
    #[source]
    source: io::Error,
}

const SUFFIX: &str = ".json";
/// Of a record that is being written.
const UNFINISHED: &str = ".tmp";
/// Of what was found to be no record.
const ASIDE: &str = ".bad";

impl Records {
    /// Opens, and makes if need be, the directory `pods` in `state_dir`.
    pub fn open(state_dir: &Path) -> Result<Self, Error> {
        let directory = state_dir.join("pods");
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&directory)
            .map_err(|source| Error {
                operation: "create directory",
                path: directory.clone(),
                source,
            })?;
        Ok(Self { directory })
    }

    /// The directory of an agent that has made it, or not.
    pub fn existing(state_dir: &Path) -> Self {
        Self {
            directory: state_dir.join("pods"),
        }
    }

    /// Removes what is left when the records are removed, and the directory if it is empty then. Tells of each what became of
    /// it.
    pub fn remove_leftovers(&self) -> Vec<(PathBuf, io::Result<()>)> {
        let entries = fs::read_dir(&self.directory).into_iter().flatten().flatten();
        let left = |path: &PathBuf| {
            let name = path.as_os_str().as_encoded_bytes();
            [UNFINISHED, ASIDE]
                .iter()
                .any(|suffix| name.ends_with(suffix.as_bytes()))
        };
        let mut results: Vec<_> = entries
            .map(|entry| entry.path())
            .filter(left)
            .map(|path| {
                let removed = fs::remove_file(&path);
                (path, removed)
            })
            .collect();
        let emptied = match fs::remove_dir(&self.directory) {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
            other => other,
        };
        results.push((self.directory.clone(), emptied));
        results
    }

    fn path(&self, uid: &PodUid) -> PathBuf {
        self.directory.join(format!("{uid}{SUFFIX}"))
    }

    /// Writes a record, in place of an older one of the same pod: whole or not at all.
    pub fn save(&self, record: &Record) -> Result<(), Error> {
        let path = self.directory.join(format!("{}{SUFFIX}", record.uid));
        let write = || {
            // The next try writes over the leftover of one that was cut off.
            let unfinished = self.directory.join(format!("{}{UNFINISHED}", record.uid));
            let mut file = File::create(&unfinished)?;
            serde_json::to_writer_pretty(&mut file, record)?;
            file.write_all(b"\n")?;
            file.sync_all()?;
            fs::rename(&unfinished, &path)?;
            File::open(&self.directory)?.sync_all()
        };
        write().map_err(|source| Error {
            operation: "write",
            path: path.clone(),
            source,
        })
    }

    /// Removes the record of a pod; there need be none.
    pub fn remove(&self, uid: &PodUid) -> Result<(), Error> {
        let path = self.path(uid);
        match fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => Err(Error {
                operation: "remove",
                path,
                source,
            }),
            _ => Ok(()),
        }
    }

    /// The pods that have records.
    pub fn uids(&self) -> Vec<PodUid> {
        self.files()
            .iter()
            .filter_map(|path| path.file_name()?.to_str()?.strip_suffix(SUFFIX)?.parse().ok())
            .collect()
    }

    /// All records that can be read. One that cannot be is told and put aside (`.bad`): it stops neither the others nor the
    /// agent.
    pub fn load(&self) -> Vec<Record> {
        let mut records = Vec::new();
        for path in self.files() {
            match read(&path) {
                Ok(record) => records.push(record),
                Err(error) => {
                    tracing::error!(path = %path.display(), error = %Chain(&error), "bad record of a pod, put aside");
                    let mut aside = path.clone().into_os_string();
                    aside.push(ASIDE);
                    if let Err(error) = fs::rename(&path, &aside) {
                        tracing::warn!(path = %path.display(), %error, "cannot put the record aside");
                    }
                }
            }
        }
        records
    }

    fn files(&self) -> Vec<PathBuf> {
        let entries = match fs::read_dir(&self.directory) {
            Ok(entries) => entries,
            // `existing` has made none.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Vec::new(),
            Err(error) => {
                tracing::error!(path = %self.directory.display(), %error, "cannot list the records of pods");
                return Vec::new();
            }
        };
        let mut files: Vec<_> = entries
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| path.as_os_str().as_encoded_bytes().ends_with(SUFFIX.as_bytes()))
            .collect();
        files.sort();
        files
    }
}

/// Longest file that is taken for a record.
const MAX_BYTES: u64 = 64 * 1024;

fn read(path: &Path) -> io::Result<Record> {
    let invalid = |reason: String| io::Error::new(io::ErrorKind::InvalidData, reason);
    // A FIFO would hold up whoever opens it, and a device has no end.
    let metadata = fs::metadata(path)?;
    if !metadata.is_file() {
        return Err(invalid("not a regular file".to_owned()));
    }
    if metadata.len() > MAX_BYTES {
        return Err(invalid(format!("longer than {MAX_BYTES} bytes")));
    }
    let record: Record = serde_json::from_reader(io::BufReader::new(File::open(path)?.take(MAX_BYTES)))?;
    if record.info().is_err() || path.file_stem().and_then(|stem| stem.to_str()) != Some(&record.uid) {
        return Err(invalid(format!(
            "names pod {:?}, which is not the file's name",
            record.uid
        )));
    }
    Ok(record)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{pods::OnFailure, sys::netns::Netns};

    fn add(uid: &str) -> PodAdd {
        PodAdd {
            info: PodInfo {
                uid: uid.parse().unwrap(),
                name: "web-0".into(),
                namespace: "shop".into(),
                service_account: "web".into(),
            },
            netns: Arc::new(Netns::current().unwrap()),
            netns_path: Some("/var/run/netns/x".into()),
            addresses: vec!["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()],
            rules: Box::new(Overrides {
                exclude_outbound_ports: Some("22,80-90".parse().unwrap()),
                ..Overrides::default()
            }),
            on_failure: OnFailure::Report,
        }
    }

    #[test]
    fn records_are_read_as_they_were_written() {
        let state = tempfile::tempdir().unwrap();
        let records = Records::open(state.path()).unwrap();
        let (a, b) = (Record::of(&add("a")), Record::of(&add("b")));
        records.save(&b).unwrap();
        records.save(&a).unwrap();
        records.save(&a).unwrap();
        assert_eq!(records.load(), [a.clone(), b.clone()]);
        assert_eq!(records.uids(), [a.info().unwrap().uid, b.info().unwrap().uid]);
        records.remove(&"a".parse().unwrap()).unwrap();
        records.remove(&"a".parse().unwrap()).unwrap();
        assert_eq!(Records::open(state.path()).unwrap().load(), [b]);
    }

    #[test]
    fn a_bad_file_is_put_aside_and_stops_nothing() {
        let state = tempfile::tempdir().unwrap();
        let records = Records::open(state.path()).unwrap();
        let good = Record::of(&add("good"));
        records.save(&good).unwrap();
        let directory = state.path().join("pods");
        let text = fs::read_to_string(directory.join("good.json")).unwrap();
        let bad = [
            ("empty", String::new()),
            ("cut", text[..text.len() / 2].to_owned()),
            ("other", text.clone()),
            ("unknown", text.replacen("\"uid\"", "\"key\": 1, \"uid\"", 1)),
            ("long", " ".repeat(65 * 1024) + &text),
        ];
        for (name, text) in &bad {
            fs::write(directory.join(format!("{name}.json")), text).unwrap();
        }
        fs::create_dir(directory.join("directory.json")).unwrap();
        assert_eq!(records.load(), [good]);
        assert_eq!(records.uids().len(), 1);
        for (name, _) in &bad {
            assert!(directory.join(format!("{name}.json.bad")).exists(), "{name}");
        }
    }

    #[test]
    fn another_namespace_with_the_same_inode_is_not_the_pods() {
        let own = Netns::current().unwrap();
        let cookie = own.cookie().unwrap();
        let record = Record::of(&add("a"));
        assert!(record.is_of(own.id(), cookie));
        assert!(!record.is_of(
            NetnsId {
                ino: own.id().ino + 1,
                ..own.id()
            },
            cookie
        ));
        assert!(
            !Record {
                boot_id: Some("earlier".into()),
                ..record.clone()
            }
            .is_of(own.id(), cookie)
        );
        assert!(
            !Record {
                netns_cookie: Some(u64::MAX),
                ..record
            }
            .is_of(own.id(), cookie)
        );
    }
}
