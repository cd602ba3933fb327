//! TLS to a control plane: TLS 1.3 (with Kubernetes 1.2 as well), HTTP/2 (with Kubernetes 1.1), a server that is known by its
//! host name.

use std::{path::PathBuf, sync::Arc};

use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::aws_lc_rs,
    version::{TLS12, TLS13},
};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject};

use super::{Config, Error};

/// Whom a server's certificate must lead to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Roots {
    /// A file in PEM, looked at for each connection.
    File(PathBuf),
    /// The node's own.
    System,
    /// Certificates in PEM.
    Inline(String),
}

impl Roots {
    /// `SYSTEM`, certificates in PEM, or else a path.
    pub fn from_setting(text: &str) -> Self {
        match text {
            "SYSTEM" => Self::System,
            pem if pem.contains("-----BEGIN") => Self::Inline(pem.to_owned()),
            path => Self::File(path.into()),
        }
    }

    fn origin(&self) -> String {
        match self {
            Self::File(path) => path.display().to_string(),
            Self::System => "the node's certificates".to_owned(),
            Self::Inline(_) => "the settings".to_owned(),
        }
    }

    /// The certificates as they are now.
    pub(super) async fn load(&self) -> Result<Vec<CertificateDer<'static>>, Error> {
        let certificates: Vec<_> = match self {
            Self::File(path) => {
                let pem = tokio::fs::read(path).await;
                let pem = pem.map_err(|source| Error::Read {
                    what: "the control plane's root certificates in",
                    path: path.clone(),
                    source,
                })?;
                CertificateDer::pem_slice_iter(&pem).flatten().collect()
            }
            Self::Inline(pem) => CertificateDer::pem_slice_iter(pem.as_bytes()).flatten().collect(),
            Self::System => tokio::task::spawn_blocking(rustls_native_certs::load_native_certs)
                .await
                .map(|loaded| loaded.certs)
                .unwrap_or_default(),
        };
        match certificates.is_empty() {
            true => Err(Error::NoRoots(self.origin())),
            false => Ok(certificates),
        }
    }
}

/// The configuration for a server that leads to `roots`.
pub(super) fn client_config(
    config: &Config,
    roots: &[CertificateDer<'static>],
) -> Result<Arc<ClientConfig>, Error> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let mut store = RootCertStore::empty();
    store.add_parsable_certificates(roots.iter().cloned());
    if store.is_empty() {
        return Err(Error::NoRoots(config.roots.origin()));
    }
    let alt = config
        .alt_hostname
        .as_ref()
        .map(|name| ServerName::try_from(name.clone()).map_err(|_| Error::Name(name.clone())));
    let inner = WebPkiServerVerifier::builder_with_provider(Arc::new(store), Arc::clone(&provider))
        .build()
        // The one thing that it can refuse are roots, and there are some.
        .map_err(|_| Error::NoRoots(config.roots.origin()))?;
    let verifier = Verifier {
        inner,
        alt: alt.transpose()?,
    };
    let mut client = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])
        .map_err(Error::Tls)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_no_client_auth();
    client.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Arc::new(client))
}

/// The configuration for the API server of a Kubernetes cluster that leads to `roots`, which are in `origin`; it is shown
/// `certificate`, if it asks for one.
pub(super) fn kubernetes(
    roots: &[CertificateDer<'static>],
    origin: &str,
    certificate: Option<&(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>,
) -> Result<Arc<ClientConfig>, Error> {
    let mut store = RootCertStore::empty();
    store.add_parsable_certificates(roots.iter().cloned());
    if store.is_empty() {
        return Err(Error::NoRoots(origin.to_owned()));
    }
    let client = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_protocol_versions(&[&TLS13, &TLS12])
        .map_err(Error::Tls)?
        .with_root_certificates(store);
    let mut client = match certificate {
        Some((chain, key)) => client
            .with_client_auth_cert(chain.clone(), key.clone_key())
            .map_err(Error::Tls)?,
        None => client.with_no_client_auth(),
    };
    client.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(client))
}

/// The library's own checks, for either of two names.
#[derive(Debug)]
struct Verifier {
    inner: Arc<WebPkiServerVerifier>,
    alt: Option<ServerName<'static>>,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let verify = |name: &ServerName<'_>| {
            self.inner
                .verify_server_cert(leaf, intermediates, name, ocsp, now)
        };
        let other_name = |error: &rustls::Error| {
            use CertificateError::{NotValidForName, NotValidForNameContext};
            matches!(
                error,
                rustls::Error::InvalidCertificate(NotValidForName | NotValidForNameContext { .. })
            )
        };
        match (verify(name), &self.alt) {
            (Err(error), Some(alt)) if other_name(&error) => verify(alt),
            (verified, _) => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.inner.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.inner.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}
