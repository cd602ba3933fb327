//! Certificates in files that somebody else keeps fresh: cert-manager's CSI driver, a mounted secret, Vault's agent.
//!
//! A directory holds one set of key, chain and roots, or directories that hold one each. Whose a set is, its certificate says.
//! Files are looked at once a second, replaced ones (a mount's `..data`) as well as rewritten ones. What does not hold together, as in the
//! midst of a change, replaces nothing.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use futures_util::stream::BoxStream;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use tokio_util::task::AbortOnDropHandle;
use tracing::{info, warn};

use super::{
    CertSource, Error, Svid,
    pushed::{self, Publisher, Pushed, Snapshot},
    tls::{self, Credentials},
};
use crate::{
    mesh::spiffe::SpiffeId,
    sys::follow::{Followed, POLL_INTERVAL},
    telemetry::Chain,
};

/// Names of chain, key and roots: those of Kubernetes' secrets and cert-manager, and Istio's.
const NAMES: [[&str; 3]; 2] = [
    ["tls.crt", "tls.key", "ca.crt"],
    ["cert-chain.pem", "key.pem", "root-cert.pem"],
];

/// Sets that are looked at; more is a mistake.
const MAX_SETS: usize = 4096;

/// A directory of certificates.
pub struct Files {
    pushed: Pushed,
    _task: AbortOnDropHandle<()>,
}

impl Files {
    /// Follows `directory`. What is wrong with it is told to whom asks, since it may be mended. Must be called within a tokio
    /// runtime.
    pub fn follow(directory: &Path) -> Self {
        let (publisher, pushed) = pushed::channel(directory.display().to_string());
        let directory = Directory::new(directory);
        Self {
            pushed,
            _task: AbortOnDropHandle::new(tokio::spawn(run(directory, publisher))),
        }
    }
}

impl CertSource for Files {
    fn svids(&self, id: &SpiffeId) -> BoxStream<'static, Result<Svid, Error>> {
        self.pushed.svids(id)
    }
}

async fn run(mut directory: Directory, publisher: Publisher) {
    loop {
        let looked = tokio::task::spawn_blocking(move || {
            let news = directory.look();
            (directory, news)
        });
        let Ok((back, news)) = looked.await else {
            publisher.fail("internal fault: looking at the files has failed".to_owned());
            return;
        };
        directory = back;
        if let Some(snapshot) = news {
            publisher.publish(snapshot);
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Why a set cannot be used.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{}: {problem}", path.display())]
    Content { path: PathBuf, problem: &'static str },
    #[error("{}: key, certificate and roots do not belong together", path.display())]
    Apart {
        path: PathBuf,
        #[source]
        source: tls::Error,
    },
}

struct Directory {
    path: PathBuf,
    sets: BTreeMap<PathBuf, Set>,
    /// What was told last.
    told: Option<Option<Arc<str>>>,
}

impl Directory {
    fn new(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            sets: BTreeMap::new(),
            told: None,
        }
    }

    /// What there is, when it is not what it was. Blocking.
    fn look(&mut self) -> Option<Snapshot> {
        let mut problems = Vec::new();
        let mut changed = false;
        match set_directories(&self.path) {
            Ok(found) => {
                let before = self.sets.len();
                self.sets.retain(|path, _| found.contains(path));
                changed |= self.sets.len() != before;
                for path in found {
                    self.sets.entry(path).or_default();
                }
            }
            // What was found before is still looked at: the next look may find it again.
            Err(source) => problems.push(
                Chain(&Failure::Read {
                    path: self.path.clone(),
                    source,
                })
                .to_string(),
            ),
        }
        if self.sets.is_empty() && problems.is_empty() {
            let [[chain, key, roots], [chain2, key2, roots2]] = NAMES;
            problems.push(format!(
                "{} holds no certificates: it, or each directory in it, must hold {chain}, {key} and {roots}, or {chain2}, \
                 {key2} and {roots2}",
                self.path.display()
            ));
        }
        for (path, set) in &mut self.sets {
            changed |= set.look(path);
            problems.extend(set.problem.clone());
        }
        let problem: Option<Arc<str>> = (!problems.is_empty()).then(|| problems.join("; ").into());
        let news = changed || self.told.as_ref() != Some(&problem);
        self.told = Some(problem.clone());
        news.then(|| Snapshot {
            svids: self.svids(),
            problem,
            told: true,
        })
    }

    /// Of several sets of one identity, the one that is good for longest.
    fn svids(&self) -> BTreeMap<SpiffeId, Arc<Svid>> {
        let mut svids: BTreeMap<SpiffeId, Arc<Svid>> = BTreeMap::new();
        for svid in self.sets.values().filter_map(|set| set.good.as_ref()) {
            let before = svids.get(&svid.id);
            if before.is_none_or(|before| before.not_after < svid.not_after) {
                svids.insert(svid.id.clone(), Arc::clone(svid));
            }
        }
        svids
    }
}

/// The directories that hold a set: `path` itself, or those in it. Names with a dot are a mount's own.
fn set_directories(path: &Path) -> io::Result<Vec<PathBuf>> {
    if names(path).is_some() {
        return Ok(vec![path.to_owned()]);
    }
    let mut found = Vec::new();
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        let below = entry.path();
        if !entry.file_name().as_encoded_bytes().starts_with(b".") && names(&below).is_some() {
            found.push(below);
        }
        if found.len() > MAX_SETS {
            let text = format!("more than {MAX_SETS} directories of certificates");
            return Err(io::Error::other(text));
        }
    }
    found.sort();
    Ok(found)
}

/// Under which names a set is in `path`, if one is: a part of it is enough.
fn names(path: &Path) -> Option<[&'static str; 3]> {
    NAMES
        .into_iter()
        .find(|[chain, key, _]| path.join(chain).exists() || path.join(key).exists())
}

/// Key, chain and roots of one identity.
#[derive(Default)]
struct Set {
    files: Option<[(Followed, String); 3]>,
    /// The newest that held together.
    good: Option<Arc<Svid>>,
    problem: Option<String>,
}

impl Set {
    /// Whether there is a new certificate. Blocking.
    fn look(&mut self, path: &Path) -> bool {
        let svid = match self.read(path) {
            Ok(true) => self.parse(path),
            Ok(false) => return false,
            Err(failure) => Err(failure),
        };
        match svid {
            Ok(svid) => {
                info!(id = %svid.id, directory = %path.display(), "certificate read");
                self.good = Some(Arc::new(svid));
                self.problem = None;
                true
            }
            Err(failure) => {
                let problem = Chain(&failure).to_string();
                if self.problem.as_ref() != Some(&problem) {
                    warn!(error = %problem, has_one = self.good.is_some(), "a certificate in files is not used");
                }
                self.problem = Some(problem);
                false
            }
        }
    }

    /// Whether the files say something else than before.
    fn read(&mut self, path: &Path) -> Result<bool, Failure> {
        let Some(files) = &mut self.files else {
            let names = names(path).unwrap_or(NAMES[0]);
            let open = |name| {
                let path = path.join(name);
                Followed::open(&path).map_err(|source| Failure::Read { path, source })
            };
            let [chain, key, roots] = names;
            self.files = Some([open(chain)?, open(key)?, open(roots)?]);
            return Ok(true);
        };
        let mut changed = false;
        for (file, text) in files {
            match file.look() {
                Ok(Some(new)) => {
                    *text = new;
                    changed = true;
                }
                Ok(None) => {}
                Err(source) => {
                    let path = file.path().to_owned();
                    // Anew from the next look on, under whatever names.
                    self.files = None;
                    return Err(Failure::Read { path, source });
                }
            }
        }
        Ok(changed)
    }

    fn parse(&self, path: &Path) -> Result<Svid, Failure> {
        let Some([(chain_file, chain), (key_file, key), (roots_file, roots)]) = &self.files else {
            let source = io::ErrorKind::NotFound.into();
            return Err(Failure::Read {
                path: path.to_owned(),
                source,
            });
        };
        let content = |file: &Followed, problem| Failure::Content {
            path: file.path().to_owned(),
            problem,
        };
        let certificates = |file: &Followed, text: &str| {
            let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text.as_bytes()).collect();
            let all = all.map_err(|_| content(file, "it is cut off, or no PEM"))?;
            match all.is_empty() {
                true => Err(content(file, "it holds no certificate in PEM")),
                false => Ok(all),
            }
        };
        let roots = certificates(roots_file, roots)?;
        let mut chain = certificates(chain_file, chain)?;
        // Some put the root behind the intermediates as well; peers have it, or must not take it from us.
        chain.retain(|certificate| !roots.contains(certificate));
        // Whatever the parser says of a key's text is not repeated.
        let key = PrivateKeyDer::from_pem_slice(key.as_bytes())
            .map_err(|_| content(key_file, "it holds no private key in PEM"))?;
        let leaf = chain
            .first()
            .ok_or_else(|| content(chain_file, "it holds nothing but roots"))?;
        let id = tls::peer_identity(&chain).ok_or_else(|| {
            content(
                chain_file,
                "its first certificate has no URI of the form spiffe://<trust domain>/ns/<namespace>/sa/<service account>",
            )
        })?;
        let (not_before, not_after) =
            tls::validity(leaf).ok_or_else(|| content(chain_file, "its first certificate cannot be read"))?;
        let svid = Svid {
            id,
            key,
            chain,
            roots,
            federated: BTreeMap::new(),
            not_before,
            not_after,
        };
        let apart = |source| Failure::Apart {
            path: path.to_owned(),
            source,
        };
        Credentials::new(&svid).map_err(apart)?;
        Ok(svid)
    }
}

#[cfg(test)]
mod tests;
