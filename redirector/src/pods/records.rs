//! What the agent remembers of captured pods across its own restarts: a file per pod under the state directory.
//!
//! `work` writes and removes them, `restore` reads them at start. They are extended, never changed: each version reads those of every
//! other, and leaves out what it does not know.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    net::IpAddr,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value, json};

use super::{PodAdd, work::is_absence};
use crate::{
    mesh::pod::{PodInfo, PodUid},
    redirect::overrides::Overrides,
    sys::netns::{Netns, NetnsId},
    telemetry::Chain,
};

/// A captured pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
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
    #[serde(default, skip_serializing_if = "is_default", deserialize_with = "known_rules")]
    rules: Overrides,
}

fn is_default(rules: &Overrides) -> bool {
    *rules == Overrides::default()
}

/// The rules that this version knows. Without one of the others more is captured, not less.
fn known_rules<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Overrides, D::Error> {
    let mut known = Overrides::default();
    for (name, value) in Map::<String, Value>::deserialize(deserializer)? {
        match serde_json::from_value::<Overrides>(json!({ name.as_str(): value })) {
            Ok(rule) => known = known.or(&rule),
            Err(error) => {
                tracing::warn!(rule = name, %error, "unknown rule in the record of a pod, left out")
            }
        }
    }
    Ok(known)
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
            rules: add.rules.as_deref().cloned().unwrap_or_default(),
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

    /// Its namespace; `None` when that is gone, or was not opened by path. An error says neither.
    pub fn namespace(&self) -> io::Result<Option<Netns>> {
        let Some(path) = &self.netns_path else {
            return Ok(None);
        };
        match Netns::open(path).and_then(|netns| Ok((netns.cookie()?, netns))) {
            Ok((cookie, netns)) => Ok(self.is_of(netns.id(), cookie).then_some(netns)),
            Err(error) if is_absence(&error) => Ok(None),
            Err(error) => Err(error),
        }
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
    fn is_of(&self, id: NetnsId, cookie: Option<u64>) -> bool {
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

/// What is remembered of a captured pod.
#[derive(Debug, PartialEq, Eq)]
pub enum Remembered {
    /// All.
    Pod(Box<Record>),
    /// That there is one: its record cannot be used.
    Name(PodUid),
}

const SUFFIX: &str = ".json";
/// Of a record that is being written.
const UNFINISHED: &str = ".tmp";
/// Added to the name of what was found to be no record.
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

    fn aside(&self, uid: &PodUid) -> PathBuf {
        self.directory.join(format!("{uid}{SUFFIX}{ASIDE}"))
    }

    /// The file of a pod's record, which may have been put aside.
    pub fn file(&self, uid: &PodUid) -> PathBuf {
        let (path, aside) = (self.path(uid), self.aside(uid));
        if !path.exists() && aside.exists() {
            aside
        } else {
            path
        }
    }

    /// Writes a record, in place of an older one of the same pod: whole or not at all.
    pub fn save(&self, record: &Record) -> Result<(), Error> {
        let path = self.directory.join(format!("{}{SUFFIX}", record.uid));
        let write = || {
            let mut text = serde_json::to_vec_pretty(record)?;
            text.push(b'\n');
            if text.len() as u64 > MAX_BYTES {
                let problem = format!(
                    "{} bytes, of which at most {MAX_BYTES} would be read again",
                    text.len()
                );
                return Err(io::Error::new(io::ErrorKind::FileTooLarge, problem));
            }
            // The next try writes over the leftover of one that was cut off.
            let unfinished = self.directory.join(format!("{}{UNFINISHED}", record.uid));
            let mut file = File::create(&unfinished)?;
            file.write_all(&text)?;
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

    /// Removes the record of a pod, one that was put aside too; there need be none.
    pub fn remove(&self, uid: &PodUid) -> Result<(), Error> {
        for path in [self.path(uid), self.aside(uid)] {
            match fs::remove_file(&path) {
                Err(source) if source.kind() != io::ErrorKind::NotFound => {
                    return Err(Error {
                        operation: "remove",
                        path,
                        source,
                    });
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The pods that have records, usable or not.
    pub fn uids(&self) -> Result<Vec<PodUid>, Error> {
        let failed = |source| Error {
            operation: "list",
            path: self.directory.clone(),
            source,
        };
        let entries = match fs::read_dir(&self.directory) {
            // `existing` has made none.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(failed)?,
        };
        let mut uids = Vec::new();
        for entry in entries {
            let name = entry.map_err(failed)?.file_name();
            let name = name.to_str().map(|name| name.strip_suffix(ASIDE).unwrap_or(name));
            let uid = name.and_then(|name| name.strip_suffix(SUFFIX)?.parse().ok());
            uids.extend(uid);
        }
        uids.sort();
        uids.dedup();
        Ok(uids)
    }

    /// All that is remembered. A record that cannot be used is told, and stops neither the others nor the agent. What is no JSON is put
    /// aside, for whoever wants to look at it, and tells of its pod all the same.
    ///
    /// # Errors
    /// When the directory cannot be listed: nobody knows then which pods there are.
    pub fn load(&self) -> Result<Vec<Remembered>, Error> {
        self.all(|uid, error| {
            tracing::error!(
                %uid, path = %self.path(uid).display(), error = %Chain(error),
                "the record of a pod cannot be used: what is captured stays so, and its connections are refused until the pod is \
                 added again or deleted"
            );
            if let Unusable::NotJson(_) = error
                && let Err(error) = fs::rename(self.path(uid), self.aside(uid))
            {
                tracing::warn!(%uid, %error, "cannot put the record aside");
            }
        })
    }

    /// All that is remembered, as [`Self::load`] has it, for one who only looks: nothing is told, and nothing put aside.
    ///
    /// # Errors
    /// When the directory cannot be listed.
    pub fn look(&self) -> Result<Vec<Remembered>, Error> {
        self.all(|_, _| {})
    }

    fn all(&self, unusable: impl Fn(&PodUid, &Unusable)) -> Result<Vec<Remembered>, Error> {
        let remembered = self.uids()?.into_iter().map(|uid| match self.read(&uid) {
            Ok(record) => Remembered::Pod(Box::new(record)),
            Err(error) => {
                unusable(&uid, &error);
                Remembered::Name(uid)
            }
        });
        Ok(remembered.collect())
    }

    /// What a pod said of its rules when it was recorded, if it was so in this namespace.
    pub fn rules_of(&self, uid: &PodUid, netns: &Netns) -> Option<Box<Overrides>> {
        let record = self.read(uid).ok()?;
        let same = record.is_of(netns.id(), netns.cookie().ok().flatten());
        same.then(|| Box::new(record.rules))
    }

    fn read(&self, uid: &PodUid) -> Result<Record, Unusable> {
        let path = self.path(uid);
        // A FIFO would hold up whoever opens it, and a device has no end.
        let metadata = match fs::metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(Unusable::Aside),
            metadata => metadata?,
        };
        if !metadata.is_file() || metadata.len() > MAX_BYTES {
            return Err(Unusable::Kind);
        }
        let mut text = Vec::new();
        File::open(path)?.take(MAX_BYTES).read_to_end(&mut text)?;
        let value: Value = serde_json::from_slice(&text).map_err(Unusable::NotJson)?;
        let record: Record = serde_json::from_value(value).map_err(Unusable::Form)?;
        if record.uid != uid.as_str() {
            return Err(Unusable::Name(record.uid));
        }
        Ok(record)
    }
}

/// Longest record.
const MAX_BYTES: u64 = 64 * 1024;

/// Why a record cannot be used.
#[derive(Debug, thiserror::Error)]
enum Unusable {
    #[error(transparent)]
    System(#[from] io::Error),
    #[error("not a regular file of at most {MAX_BYTES} bytes")]
    Kind,
    #[error("not JSON")]
    NotJson(#[source] serde_json::Error),
    #[error("an earlier agent found it not to be JSON, and put it aside ({ASIDE})")]
    Aside,
    #[error("not in the form that this version knows")]
    Form(#[source] serde_json::Error),
    #[error("names pod {0:?}, which is not the file's name")]
    Name(String),
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
            rules: Some(Box::new(Overrides {
                exclude_outbound_ports: Some("22,80-90".parse().unwrap()),
                ..Overrides::default()
            })),
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
        assert_eq!(records.load().unwrap(), [pod(&a), pod(&b)]);
        assert_eq!(
            records.uids().unwrap(),
            [a.info().unwrap().uid, b.info().unwrap().uid]
        );
        records.remove(&"a".parse().unwrap()).unwrap();
        records.remove(&"a".parse().unwrap()).unwrap();
        assert_eq!(Records::open(state.path()).unwrap().load().unwrap(), [pod(&b)]);
    }

    fn pod(record: &Record) -> Remembered {
        Remembered::Pod(Box::new(record.clone()))
    }

    #[test]
    fn a_record_that_cannot_be_used_still_tells_of_its_pod() {
        let state = tempfile::tempdir().unwrap();
        let records = Records::open(state.path()).unwrap();
        let good = Record::of(&add("good"));
        records.save(&good).unwrap();
        let directory = state.path().join("pods");
        let text = fs::read_to_string(directory.join("good.json")).unwrap();
        let own = |uid: &str| text.replace("\"good\"", &format!("\"{uid}\""));
        // The text, and whether it is put aside.
        let bad = [
            ("cut", own("cut")[..text.len() / 2].to_owned(), true),
            ("empty", String::new(), true),
            ("form", own("form").replace("10.0.0.1", "elsewhere"), false),
            (
                "lacks",
                own("lacks").replace("\"netnsIno\"", "\"netnsNumber\""),
                false,
            ),
            ("long", " ".repeat(65 * 1024) + &own("long"), false),
            ("other", text.clone(), false),
        ];
        for (uid, text, _) in &bad {
            fs::write(directory.join(format!("{uid}.json")), text).unwrap();
        }
        fs::create_dir(directory.join("directory.json")).unwrap();
        fs::write(directory.join("no uid.json"), "").unwrap();
        let name = |uid: &str| Remembered::Name(uid.parse().unwrap());
        let expected = [
            name("cut"),
            name("directory"),
            name("empty"),
            name("form"),
            pod(&good),
            name("lacks"),
            name("long"),
            name("other"),
        ];
        // Neither does the agent after the next forget them.
        for _ in 0..2 {
            assert_eq!(records.load().unwrap(), expected);
            for (uid, _, aside) in &bad {
                let file = directory.join(format!("{uid}.json"));
                assert_eq!(file.exists(), !aside, "{uid}");
                assert_eq!(file.with_extension("json.bad").exists(), *aside, "{uid}");
            }
        }
        // They go with their pod.
        for (uid, ..) in &bad {
            records.remove(&uid.parse().unwrap()).unwrap();
        }
        assert_eq!(records.load().unwrap(), [name("directory"), pod(&good)]);
    }

    #[test]
    fn what_a_later_version_adds_is_left_out() {
        let state = tempfile::tempdir().unwrap();
        let records = Records::open(state.path()).unwrap();
        let record = Record::of(&add("a"));
        records.save(&record).unwrap();
        let file = state.path().join("pods/a.json");
        let text = fs::read_to_string(&file).unwrap();
        let later = text
            .replacen("\"uid\"", "\"color\": {\"of\": [1]}, \"uid\"", 1)
            .replacen(
                "\"rules\": {",
                "\"rules\": {\"excludeColors\": \"red\", \"excludeInboundPorts\": {\"new\": 1},",
                1,
            );
        assert_ne!(later.matches("red").count() + later.matches("color").count(), 0);
        fs::write(&file, later).unwrap();
        assert_eq!(records.load().unwrap(), [pod(&record)]);
    }

    #[test]
    fn what_would_not_be_read_again_is_not_written() {
        let state = tempfile::tempdir().unwrap();
        let records = Records::open(state.path()).unwrap();
        let record = Record::of(&add("a"));
        records.save(&record).unwrap();
        let long = Record {
            service_account: "x".repeat(65 * 1024),
            ..record.clone()
        };
        let error = Chain(&records.save(&long).unwrap_err()).to_string();
        assert!(
            error.contains("pods/a.json: ") && error.contains("at most 65536"),
            "{error}"
        );
        assert_eq!(records.load().unwrap(), [pod(&record)]);
    }

    #[test]
    fn a_directory_that_cannot_be_listed_is_not_an_empty_one() {
        let state = tempfile::tempdir().unwrap();
        let records = Records::open(state.path()).unwrap();
        fs::remove_dir(state.path().join("pods")).unwrap();
        assert_eq!(records.load().unwrap(), []);
        fs::write(state.path().join("pods"), "").unwrap();
        records.load().unwrap_err();
        records.uids().unwrap_err();
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
