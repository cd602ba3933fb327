//! Who a pod is: the identity seam.
//!
//! A [`CertSource`] delivers certificates; [`store::Store`] keeps the current one of each identity and makes TLS
//! configurations from it; when to renew is the source's matter.

use std::{collections::BTreeMap, sync::Arc, time::SystemTime};

use base64::Engine as _;
use futures_util::stream::BoxStream;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use crate::mesh::spiffe::SpiffeId;

pub mod crl_file;
mod csr;
pub mod dev_ca;
pub mod files;
pub mod istio_ca;
pub mod kubernetes_csr;
pub mod metrics;
mod pushed;
pub mod renew;
pub mod revocation;
pub mod states;
pub mod store;
pub mod tls;
pub mod trust;
pub mod workload_api;

/// A workload's certificate.
#[derive(Debug)]
pub struct Svid {
    /// Whose it is.
    pub id: SpiffeId,
    /// Leaf, then intermediates; never the root.
    pub chain: Vec<CertificateDer<'static>>,
    /// The leaf's key.
    pub key: PrivateKeyDer<'static>,
    /// The certificates that peers must chain to.
    pub roots: Vec<CertificateDer<'static>>,
    /// Those that peers of another trust domain must chain to, by its name, where they are not `roots`.
    pub federated: BTreeMap<String, Vec<CertificateDer<'static>>>,
    /// Start of its validity.
    pub not_before: SystemTime,
    /// End of its validity.
    pub not_after: SystemTime,
}

impl Svid {
    /// The same once more; not `Clone`, so that a key is copied where it is meant alone.
    fn copy(&self) -> Self {
        Self {
            id: self.id.clone(),
            chain: self.chain.clone(),
            key: self.key.clone_key(),
            roots: self.roots.clone(),
            federated: self.federated.clone(),
            not_before: self.not_before,
            not_after: self.not_after,
        }
    }

    /// As PEM files, for programs that want them so.
    pub fn to_pem(&self) -> SvidPem {
        let certificates =
            |ders: &[CertificateDer<'_>]| ders.iter().map(|der| pem("CERTIFICATE", der)).collect();
        let label = match &self.key {
            PrivateKeyDer::Sec1(_) => "EC PRIVATE KEY",
            PrivateKeyDer::Pkcs1(_) => "RSA PRIVATE KEY",
            _ => "PRIVATE KEY",
        };
        SvidPem {
            chain: certificates(&self.chain),
            key: pem(label, self.key.secret_der()),
            roots: certificates(&self.roots),
        }
    }
}

/// An [`Svid`] as the texts of three PEM files.
pub struct SvidPem {
    /// Leaf, then intermediates.
    pub chain: String,
    /// The leaf's key.
    pub key: String,
    /// The certificates that peers must chain to.
    pub roots: String,
}

/// RFC 7468: base64 in lines of 64.
pub(crate) fn pem(label: &str, der: &[u8]) -> String {
    let text = base64::engine::general_purpose::STANDARD.encode(der);
    let mut lines = format!("-----BEGIN {label}-----\n");
    let mut rest = text.as_str();
    while !rest.is_empty() {
        let (line, left) = rest.split_at(rest.len().min(64));
        lines.push_str(line);
        lines.push('\n');
        rest = left;
    }
    lines + &format!("-----END {label}-----\n")
}

/// Certificates of workloads, as one stream per identity: an item whenever there is a new certificate or a failure to get
/// one. The stream does not end, except when the source does. A failure does not void the certificate before it.
pub trait CertSource: Send + Sync {
    /// Certificates of `id`.
    fn svids(&self, id: &SpiffeId) -> BoxStream<'static, Result<Svid, Error>>;
}

/// Why there is no certificate, or no TLS configuration.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{operation}: {source}")]
pub struct Error {
    /// What was tried, for whom.
    pub operation: String,
    /// Why it failed.
    #[source]
    pub source: Arc<dyn std::error::Error + Send + Sync>,
}

impl Error {
    /// A failure of `operation`.
    pub fn new(
        operation: impl Into<String>,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self {
            operation: operation.into(),
            source: Arc::from(source.into()),
        }
    }
}

#[cfg(test)]
pub(crate) mod testing;

#[cfg(test)]
mod tests {
    use rustls_pki_types::pem::PemObject;

    use super::{testing::TestCa, *};

    #[test]
    fn pem_is_read_back_as_it_was() {
        let svid = TestCa::new().svid(&testing::id("web"));
        let pem = svid.to_pem();
        assert_eq!(
            CertificateDer::from_pem_slice(pem.chain.as_bytes()).unwrap(),
            svid.chain[0]
        );
        assert_eq!(
            CertificateDer::from_pem_slice(pem.roots.as_bytes()).unwrap(),
            svid.roots[0]
        );
        let key = PrivateKeyDer::from_pem_slice(pem.key.as_bytes()).unwrap();
        assert_eq!(key.secret_der(), svid.key.secret_der());
        assert!(pem.chain.lines().all(|line| line.len() <= 64));
    }
}
