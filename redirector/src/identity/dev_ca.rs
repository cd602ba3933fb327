//! The development CA: certificates without a control plane, from a root that the first agent makes.
//!
//! Agents that share its directory trust each other's pods. `app` chooses it; the tests' peers get certificates from it, or
//! from another one to be refused. What the files are and how they come to be is in `files`.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, SanType, string::Ia5String,
};
use rustls_pki_types::{CertificateDer, PrivatePkcs8KeyDer};

use super::{Error as SourceError, Svid};
use crate::mesh::spiffe::SpiffeId;

mod files;

/// How long a root is valid. There is nobody to replace it: long enough to be forgotten.
const ROOT_LIFETIME: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// How far certificates begin in the past, for peers whose clocks are behind.
const BACKDATE: Duration = Duration::from_secs(5 * 60);

/// Below it there is no time for renewal.
const MIN_LIFETIME: Duration = Duration::from_secs(2);

/// Settings of the development CA.
#[derive(Debug, Clone)]
pub struct Config {
    /// How long workload certificates are valid; each is replaced at about half of it. At least two seconds.
    pub lifetime: Duration,
}

impl Default for Config {
    fn default() -> Self {
        // Istio's SECRET_TTL.
        Self {
            lifetime: Duration::from_secs(24 * 3600),
        }
    }
}

/// Removes the files of the CA in `dir`, and the directory if nothing else is in it. Tells of each what became of it; one that
/// is not there is an error of the kind `NotFound`. Agents that share it can no longer start.
pub fn remove(dir: &Path) -> Vec<(PathBuf, std::io::Result<()>)> {
    files::Files::new(dir).remove()
}

/// A CA whose key is on this machine.
#[derive(Clone)]
pub struct DevCa {
    root: CertificateDer<'static>,
    root_pem: String,
    root_not_after: SystemTime,
    issuer: Arc<Issuer<'static, KeyPair>>,
    config: Config,
}

/// Why there is no development CA, or no certificate from it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file or directory of the CA.
    #[error("{operation} {}", path.display())]
    File {
        /// What was tried.
        operation: &'static str,
        /// With which file.
        path: PathBuf,
        /// Why it failed.
        #[source]
        source: std::io::Error,
    },
    /// One file without the other.
    #[error(
        "the development CA has {} but not {}: restore the missing file, or delete both and restart all agents that share them",
        there.display(), missing.display()
    )]
    Half {
        /// The file that is there.
        there: PathBuf,
        /// The file that is not.
        missing: PathBuf,
    },
    /// A file that does not hold what it should.
    #[error(
        "{} {problem}: restore it, or delete {} and {} and restart all agents that share them",
        path.display(), files::ROOT, files::ROOT_KEY
    )]
    Unusable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// Another agent is making the root, and does not get done.
    #[error("another process has held {} for {waited:?}: end it, or see why it does not go on", path.display())]
    Locked {
        /// The lock file.
        path: PathBuf,
        /// How long it was waited for.
        waited: Duration,
    },
    /// The certificate library.
    #[error("{operation}")]
    Certificate {
        /// What was tried.
        operation: String,
        /// Why it failed.
        #[source]
        source: rcgen::Error,
    },
    /// A lifetime that leaves no time for renewal.
    #[error("a certificate lifetime of {0:?} is too short: at least two seconds")]
    Lifetime(Duration),
}

impl DevCa {
    /// Takes the root in `dir`, or makes one there if there is none. Of several processes that do so at once, one makes it
    /// and the others take it. Blocking.
    ///
    /// # Errors
    /// When the files can't be read or written, or are not a CA; the error says what to do.
    pub fn load_or_create(dir: &Path, config: Config) -> Result<Self, Error> {
        if config.lifetime < MIN_LIFETIME {
            return Err(Error::Lifetime(config.lifetime));
        }
        let files = files::Files::new(dir);
        let pem = files.load_or_create(|| {
            let (certificate, key) = new_root(SystemTime::now())?;
            Ok(files::Pem {
                certificate: certificate.pem(),
                key: key.serialize_pem(),
            })
        })?;
        let root = files.check(&pem)?;
        let issuer =
            Issuer::from_ca_cert_der(&root.certificate, root.key).map_err(|source| Error::Certificate {
                operation: "reading the root certificate".into(),
                source,
            })?;
        Ok(Self {
            root: root.certificate,
            root_pem: pem.certificate,
            root_not_after: root.not_after,
            issuer: Arc::new(issuer),
            config,
        })
    }

    /// The root certificate, as PEM.
    pub fn root_pem(&self) -> &str {
        &self.root_pem
    }

    /// A new certificate for `id`, with a key of its own.
    ///
    /// # Errors
    /// Those of the certificate library.
    pub fn issue(&self, id: &SpiffeId) -> Result<Svid, Error> {
        self.issue_at(id, SystemTime::now())
    }

    fn issue_at(&self, id: &SpiffeId, now: SystemTime) -> Result<Svid, Error> {
        let failed = |source| Error::Certificate {
            operation: format!("issuing a certificate for {id}"),
            source,
        };
        let not_before = whole_seconds(now - BACKDATE);
        let not_after = whole_seconds(now + self.config.lifetime).min(self.root_not_after);
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(failed)?;
        let mut params = CertificateParams::default();
        params.not_before = not_before.into();
        params.not_after = not_after.into();
        // SPIFFE X.509-SVID: exactly one URI SAN, and no subject that could say otherwise.
        params.distinguished_name = DistinguishedName::new();
        params.subject_alt_names = vec![SanType::URI(Ia5String::try_from(id.to_string()).map_err(failed)?)];
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        params.use_authority_key_identifier_extension = true;
        let leaf = params.signed_by(&key, &self.issuer).map_err(failed)?;
        Ok(Svid {
            id: id.clone(),
            chain: vec![leaf.der().clone()],
            key: PrivatePkcs8KeyDer::from(key.serialize_der()).into(),
            roots: vec![self.root.clone()],
            federated: BTreeMap::new(),
            not_before,
            not_after,
        })
    }
}

impl super::renew::Issuer for DevCa {
    async fn issue(&self, id: &SpiffeId) -> Result<Svid, SourceError> {
        let issued = self.issue(id);
        issued.map_err(|error| SourceError::new(format!("certificate for {id}"), error))
    }
}

/// A self-signed root, made at `now`.
fn new_root(now: SystemTime) -> Result<(rcgen::Certificate, KeyPair), Error> {
    let failed = |source| Error::Certificate {
        operation: "making a root certificate".into(),
        source,
    };
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(failed)?;
    let mut params = CertificateParams::default();
    params.not_before = whole_seconds(now - BACKDATE).into();
    params.not_after = whole_seconds(now + ROOT_LIFETIME).into();
    params.distinguished_name = DistinguishedName::new();
    // Each has a name of its own: a peer of another root is then "of an unknown issuer", not "of a bad signature".
    let name = format!("redirector development CA {:08x}", rand::random::<u32>());
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let root = params.self_signed(&key).map_err(failed)?;
    Ok((root, key))
}

/// X.509 has no fractions: the time that the certificate really says.
fn whole_seconds(time: SystemTime) -> SystemTime {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    SystemTime::UNIX_EPOCH + Duration::from_secs(since.as_secs())
}

#[cfg(test)]
mod tests;
