//! The development CA's files: `root.pem`, and `root-key.pem` with mode 0600.
//!
//! The key is put in place before the certificate, each by a rename, under a lock that goes with its holder: who sees the
//! certificate sees a whole CA.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Write},
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant, SystemTime},
};

use rcgen::{KeyPair, PublicKeyData};
use rustls_pki_types::{CertificateDer, pem::PemObject};
use x509_parser::{certificate::X509Certificate, prelude::FromDer};

use super::Error;

pub(super) const ROOT: &str = "root.pem";
pub(super) const ROOT_KEY: &str = "root-key.pem";
const LOCK: &str = ".lock";
const UNFINISHED: &str = "pem.new";

/// How long another process may take to make a root: a key, two small files.
const LOCK_DEADLINE: Duration = Duration::from_secs(10);
const LOCK_RETRY: Duration = Duration::from_millis(20);

pub(super) struct Files {
    dir: PathBuf,
    root: PathBuf,
    key: PathBuf,
}

/// The files' contents.
pub(super) struct Pem {
    pub(super) certificate: String,
    pub(super) key: String,
}

/// A root that was checked.
pub(super) struct Root {
    pub(super) certificate: CertificateDer<'static>,
    pub(super) key: KeyPair,
    pub(super) not_after: SystemTime,
}

impl Files {
    pub(super) fn new(dir: &Path) -> Self {
        Self {
            dir: dir.to_owned(),
            root: dir.join(ROOT),
            key: dir.join(ROOT_KEY),
        }
    }

    /// The files as they are, or as `make` makes them if there are none.
    pub(super) fn load_or_create(&self, make: impl FnOnce() -> Result<Pem, Error>) -> Result<Pem, Error> {
        // Before the lock: a directory with a CA in it may be read-only.
        if let Some(pem) = self.load()? {
            return Ok(pem);
        }
        fs::create_dir_all(&self.dir).map_err(file("making directory", &self.dir))?;
        let _lock = self.lock()?;
        if let Some(pem) = self.load()? {
            return Ok(pem);
        }
        if self.key.try_exists().map_err(file("looking for", &self.key))? {
            return Err(Error::Half {
                there: self.key.clone(),
                missing: self.root.clone(),
            });
        }
        let pem = make()?;
        self.put(&self.key, &pem.key, 0o600)?;
        self.put(&self.root, &pem.certificate, 0o644)?;
        tracing::info!(path = %self.root.display(), "new root of the development CA");
        Ok(pem)
    }

    /// Removes them, and the directory if it is empty then. Tells of each what became of it.
    pub(super) fn remove(&self) -> Vec<(PathBuf, io::Result<()>)> {
        let files = [
            self.key.clone(),
            self.root.clone(),
            self.key.with_extension(UNFINISHED),
            self.root.with_extension(UNFINISHED),
            self.dir.join(LOCK),
        ];
        let mut results: Vec<_> = files
            .into_iter()
            .map(|path| {
                let removed = fs::remove_file(&path);
                (path, removed)
            })
            .collect();
        let emptied = match fs::remove_dir(&self.dir) {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
            other => other,
        };
        results.push((self.dir.clone(), emptied));
        results
    }

    fn load(&self) -> Result<Option<Pem>, Error> {
        let Some(certificate) = self.read(&self.root)? else {
            return Ok(None);
        };
        let Some(key) = self.read(&self.key)? else {
            return Err(Error::Half {
                there: self.root.clone(),
                missing: self.key.clone(),
            });
        };
        Ok(Some(Pem { certificate, key }))
    }

    fn read(&self, path: &Path) -> Result<Option<String>, Error> {
        match fs::read_to_string(path) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                Err(unusable(path, "is not a PEM file"))
            }
            Err(error) => Err(file("reading", path)(error)),
        }
    }

    fn lock(&self) -> Result<File, Error> {
        let path = self.dir.join(LOCK);
        let lock = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(file("opening", &path))?;
        let start = Instant::now();
        loop {
            match lock.try_lock() {
                Ok(()) => return Ok(lock),
                Err(TryLockError::Error(error)) => return Err(file("locking", &path)(error)),
                Err(TryLockError::WouldBlock) if start.elapsed() >= LOCK_DEADLINE => {
                    return Err(Error::Locked {
                        path,
                        waited: LOCK_DEADLINE,
                    });
                }
                Err(TryLockError::WouldBlock) => thread::sleep(LOCK_RETRY),
            }
        }
    }

    /// Writes a file so that it is there as a whole or not at all, whatever happens meanwhile. Under the lock.
    fn put(&self, path: &Path, text: &str, mode: u32) -> Result<(), Error> {
        let temporary = path.with_extension(UNFINISHED);
        // What an agent left that died here.
        match fs::remove_file(&temporary) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(file("removing", &temporary)(error));
            }
            _ => {}
        }
        let write = || {
            let mut out = OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(mode)
                .open(&temporary)?;
            out.write_all(text.as_bytes())?;
            out.sync_all()
        };
        write().map_err(file("writing", &temporary))?;
        fs::rename(&temporary, path).map_err(file("putting in place", path))?;
        File::open(&self.dir)
            .and_then(|dir| dir.sync_all())
            .map_err(file("syncing", &self.dir))
    }

    /// Whether the contents are a CA that can sign.
    pub(super) fn check(&self, pem: &Pem) -> Result<Root, Error> {
        let key =
            KeyPair::from_pem(&pem.key).map_err(|_| unusable(&self.key, "holds no usable private key"))?;
        let certificate = CertificateDer::from_pem_slice(pem.certificate.as_bytes())
            .map_err(|_| unusable(&self.root, "holds no certificate"))?;
        let (_, parsed) = X509Certificate::from_der(&certificate)
            .map_err(|_| unusable(&self.root, "holds no certificate"))?;
        if !parsed.is_ca() {
            return Err(unusable(&self.root, "is not the certificate of a CA"));
        }
        if parsed.public_key().raw != key.subject_public_key_info() {
            return Err(unusable(
                &self.root,
                &format!("does not belong to the key in {}", self.key.display()),
            ));
        }
        let seconds = u64::try_from(parsed.validity().not_after.timestamp()).unwrap_or(0);
        let not_after = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        if not_after <= SystemTime::now() {
            return Err(unusable(&self.root, "has expired"));
        }
        self.warn_of_readable_key();
        Ok(Root {
            certificate,
            key,
            not_after,
        })
    }

    fn warn_of_readable_key(&self) {
        if let Ok(metadata) = fs::metadata(&self.key)
            && metadata.permissions().mode() & 0o077 != 0
        {
            let path = self.key.display();
            tracing::warn!(%path, "the development CA's key is readable by others than its owner: chmod 600 it");
        }
    }
}

fn file(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::File {
        operation,
        path,
        source,
    }
}

fn unusable(path: &Path, problem: &str) -> Error {
    Error::Unusable {
        path: path.to_owned(),
        problem: problem.to_owned(),
    }
}
