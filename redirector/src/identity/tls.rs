//! rustls configurations for HBONE: mutual TLS in which SPIFFE identities, not host names, are checked.
//!
//! [`super::store`] makes the configurations; `proxy` uses them and asks for the peer's identity.

use std::{
    collections::BTreeMap,
    fmt,
    future::pending,
    net::Ipv4Addr,
    sync::{Arc, LazyLock},
    time::{Duration, SystemTime},
};

use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, OtherError, RootCertStore,
    ServerConfig, SignatureScheme,
    client::{
        Resumption,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
        verify_server_cert_signed_by_trust_anchor,
    },
    crypto::{CryptoProvider, aws_lc_rs, verify_tls13_signature},
    server::{
        NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
    sign::{CertifiedKey, SingleCertAndKey},
    version::TLS13,
};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use x509_parser::{extensions::GeneralName, prelude::FromDer};

use super::{
    Svid,
    crl_file::{Changes, InForce},
    revocation::Barred,
    trust::{PeerRules, Trust},
};
use crate::mesh::spiffe::SpiffeId;

/// The one protocol that HBONE speaks.
const ALPN: &[u8] = b"h2";

/// Istio's suites in Istio's order (ztunnel `tls/lib.rs`); key exchange is the library's default.
pub(super) static PROVIDER: LazyLock<Arc<CryptoProvider>> = LazyLock::new(|| {
    Arc::new(CryptoProvider {
        cipher_suites: vec![
            aws_lc_rs::cipher_suite::TLS13_AES_256_GCM_SHA384,
            aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256,
        ],
        ..aws_lc_rs::default_provider()
    })
});

/// Why a certificate cannot be used, the own one or a peer's.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// None of the roots is a certificate.
    #[error("there is no usable root certificate")]
    NoRoots,
    /// The key, or the chain, is not what TLS needs.
    #[error("certificate and key cannot be used for TLS")]
    Unusable(#[source] rustls::Error),
    /// The leaf is not the identity's.
    #[error("the certificate is for {}, not for {wanted}", list(found))]
    OtherIdentity {
        /// Whose it should be.
        wanted: SpiffeId,
        /// Whose it is.
        found: Vec<SpiffeId>,
    },
    /// The leaf doesn't lead to the roots that came with it.
    #[error("the certificate does not chain to its own roots")]
    Unchained(#[source] rustls::Error),
    /// One end of a connection would refuse the other.
    #[error("one would refuse the other's certificate")]
    Peer(#[source] rustls::Error),
    /// A client without an identity of the own trust domain.
    #[error("the client is {}, not of trust domain {trust_domain:?}", list(found))]
    OtherTrustDomain {
        /// The own one.
        trust_domain: String,
        /// Whose the certificate is.
        found: Vec<SpiffeId>,
    },
    /// Somebody whose certificate has been taken back.
    #[error("{} is refused: {reason}", list(who))]
    Revoked {
        /// Whose the certificate is.
        who: Vec<SpiffeId>,
        /// What has been revoked. No source: the library's error is one text.
        reason: Barred,
    },
    /// A server that is not who was wanted.
    #[error("the server is {}, not {}", list(found), list(expected))]
    OtherServer {
        /// Who it may be.
        expected: Vec<SpiffeId>,
        /// Whose the certificate is.
        found: Vec<SpiffeId>,
    },
}

fn list(ids: &[SpiffeId]) -> String {
    if ids.is_empty() {
        return "nobody".to_owned();
    }
    ids.iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(" or ")
}

/// What both sides' configurations are made of: a certificate that was checked once.
#[derive(Debug)]
pub struct Credentials {
    id: SpiffeId,
    key: Arc<CertifiedKey>,
    trust: Arc<Trust>,
}

impl Credentials {
    /// Checks that certificate, key, identity and roots belong together. Whether it is in its time is left to the caller. Of peers
    /// no more is asked than a chain and an identity.
    ///
    /// # Errors
    /// When they do not: a peer would refuse it, or take it for another's.
    pub fn new(svid: &Svid) -> Result<Self, Error> {
        Self::under(svid, &PeerRules::default())
    }

    /// The same, for use under these rules.
    ///
    /// # Errors
    /// As for [`Self::new`].
    pub fn under(svid: &Svid, rules: &PeerRules) -> Result<Self, Error> {
        let trust = Trust::new(svid, rules)?;
        let key = CertifiedKey::from_der(svid.chain.clone(), svid.key.clone_key(), &PROVIDER)
            .map_err(Error::Unusable)?;
        let leaf = key.end_entity_cert().map_err(Error::Unusable)?;
        let found = identities(leaf);
        // The first is what peers take it for.
        if found.first() != Some(&svid.id) {
            return Err(Error::OtherIdentity {
                wanted: svid.id.clone(),
                found,
            });
        }
        // In the middle of its time, so that this asks for the chain alone.
        let validity = svid.not_after.duration_since(svid.not_before).unwrap_or_default();
        let middle = unix_time(svid.not_before + validity / 2);
        verify_chain(leaf, &svid.chain[1..], trust.own(), middle).map_err(Error::Unchained)?;
        Ok(Self {
            id: svid.id.clone(),
            key: Arc::new(key),
            trust: Arc::new(trust),
        })
    }

    /// For the server side: the client must show a certificate with an identity of the own trust domain.
    ///
    /// # Errors
    /// When the library refuses the roots.
    pub fn server_config(&self) -> Result<ServerConfig, Error> {
        let verifier = self.client_verifier()?;
        let mut config = ServerConfig::builder_with_provider(Arc::clone(&PROVIDER))
            .with_protocol_versions(&[&TLS13])
            .map_err(Error::Unusable)?
            .with_client_cert_verifier(Arc::new(verifier))
            .with_cert_resolver(Arc::new(SingleCertAndKey::from(Arc::clone(&self.key))));
        config.alpn_protocols = vec![ALPN.to_vec()];
        // A resumed session would carry a client past the end of its certificate, or past its revocation; HBONE's clients do not ask for one.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(config)
    }

    /// For the client side: the server must show one of `expected`. Any server name will do for the handshake: none is
    /// sent, and none is checked.
    ///
    /// # Errors
    /// When the library refuses the protocol versions.
    pub fn client_config(&self, expected: &[SpiffeId]) -> Result<ClientConfig, Error> {
        let verifier = self.server_verifier(expected);
        let mut config = ClientConfig::builder_with_provider(Arc::clone(&PROVIDER))
            .with_protocol_versions(&[&TLS13])
            .map_err(Error::Unusable)?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_client_cert_resolver(Arc::new(SingleCertAndKey::from(Arc::clone(&self.key))));
        config.alpn_protocols = vec![ALPN.to_vec()];
        config.enable_sni = false;
        // A resumed session would not show the server's certificate again.
        config.resumption = Resumption::disabled();
        Ok(config)
    }

    /// Whether a handshake with `server`, with `self` as the client, would succeed at `now`: each side's own verifier looks at the
    /// other's certificate, and each takes the other for whom it is here.
    ///
    /// # Errors
    /// What the side that refuses would say.
    pub fn would_meet(&self, server: &Self, now: SystemTime) -> Result<(), Error> {
        let now = unix_time(now);
        // Not looked at, as in a handshake.
        let name = ServerName::IpAddress(Ipv4Addr::UNSPECIFIED.into());
        let leaf = server.key.end_entity_cert().map_err(Error::Unusable)?;
        self.server_verifier(std::slice::from_ref(&server.id))
            .verify_server_cert(leaf, &server.key.cert[1..], &name, &[], now)
            .map_err(Error::Peer)?;
        let leaf = self.key.end_entity_cert().map_err(Error::Unusable)?;
        server
            .client_verifier()?
            .verify_client_cert(leaf, &self.key.cert[1..], now)
            .map_err(Error::Peer)?;
        Ok(())
    }

    /// For a connection with a peer that has shown `chain` in a handshake under these credentials.
    pub fn proof(&self, chain: &[CertificateDer<'_>]) -> Proof {
        Proof(self.trust.changes().map(|changes| {
            Box::new(Proven {
                chain: chain.iter().map(|der| der.clone().into_owned()).collect(),
                trust: Arc::clone(&self.trust),
                changes,
            })
        }))
    }

    /// Which revocation lists are in force now.
    pub fn in_force(&self) -> InForce {
        self.trust.in_force()
    }

    /// Leaf, then intermediates.
    pub fn chain(&self) -> &[CertificateDer<'static>] {
        &self.key.cert
    }

    fn client_verifier(&self) -> Result<ClientVerifier, Error> {
        let verifier = |roots: &Arc<RootCertStore>| {
            WebPkiClientVerifier::builder_with_provider(Arc::clone(roots), Arc::clone(&PROVIDER))
                .build()
                // Without revocation lists there is no other reason.
                .map_err(|_| Error::NoRoots)
        };
        let own = verifier(self.trust.own())?;
        let mut hints = own.root_hint_subjects().to_vec();
        let mut federated = BTreeMap::new();
        for (trust_domain, roots) in self.trust.federated() {
            let chain = verifier(roots)?;
            hints.extend_from_slice(chain.root_hint_subjects());
            federated.insert(trust_domain.clone(), chain);
        }
        Ok(ClientVerifier {
            own,
            federated,
            hints,
            trust: Arc::clone(&self.trust),
        })
    }

    fn server_verifier(&self, expected: &[SpiffeId]) -> ServerVerifier {
        ServerVerifier {
            trust: Arc::clone(&self.trust),
            expected: expected.to_vec(),
        }
    }
}

/// What a peer has proven itself with, for as long as its connection lasts. By default, nothing that can be revoked.
#[derive(Debug, Default)]
pub struct Proof(Option<Box<Proven>>);

#[derive(Debug)]
struct Proven {
    chain: Vec<CertificateDer<'static>>,
    trust: Arc<Trust>,
    changes: Changes,
}

impl Proof {
    /// Waits until it has been revoked, and says why. Cancel-safe.
    pub async fn revoked(&mut self) -> Error {
        let Some(Proven {
            chain,
            trust,
            changes,
        }) = self.0.as_deref_mut()
        else {
            return pending().await;
        };
        loop {
            changes.mark_seen();
            if let [leaf, intermediates @ ..] = &**chain
                && let Err(error) = trust.check_revoked(&identities(leaf), leaf, intermediates)
            {
                return error;
            }
            if !changes.changed().await {
                return pending().await;
            }
        }
    }
}

/// The peer's identity: the first URI SAN of the leaf that is a SPIFFE identity.
pub fn peer_identity(chain: &[CertificateDer<'_>]) -> Option<SpiffeId> {
    identities(chain.first()?).into_iter().next()
}

/// When a certificate is valid: from and to. `None` when it cannot be read, or is of a time before 1970.
pub fn validity(certificate: &CertificateDer<'_>) -> Option<(SystemTime, SystemTime)> {
    let (_, certificate) = x509_parser::certificate::X509Certificate::from_der(certificate).ok()?;
    let time = |time: x509_parser::time::ASN1Time| {
        let seconds = u64::try_from(time.timestamp()).ok()?;
        SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds))
    };
    let validity = certificate.validity();
    Some((time(validity.not_before)?, time(validity.not_after)?))
}

/// The URI SANs of a certificate that are SPIFFE identities; others are passed over.
fn identities(certificate: &CertificateDer<'_>) -> Vec<SpiffeId> {
    let Ok((_, certificate)) = x509_parser::certificate::X509Certificate::from_der(certificate) else {
        return Vec::new();
    };
    // A certificate with two such extensions is malformed, and says nothing.
    let Ok(Some(sans)) = certificate.subject_alternative_name() else {
        return Vec::new();
    };
    let uri = |name: &GeneralName<'_>| match name {
        GeneralName::URI(uri) => uri.parse().ok(),
        _ => None,
    };
    sans.value.general_names.iter().filter_map(uri).collect()
}

fn verify_chain(
    leaf: &CertificateDer<'_>,
    intermediates: &[CertificateDer<'_>],
    roots: &RootCertStore,
    now: UnixTime,
) -> Result<(), rustls::Error> {
    let leaf = ParsedCertificate::try_from(leaf)?;
    let algorithms = PROVIDER.signature_verification_algorithms.all;
    verify_server_cert_signed_by_trust_anchor(&leaf, roots, intermediates, now, algorithms)
}

fn unix_time(time: SystemTime) -> UnixTime {
    let since = time.duration_since(SystemTime::UNIX_EPOCH);
    UnixTime::since_unix_epoch(since.unwrap_or(Duration::ZERO))
}

fn refused(error: Error) -> rustls::Error {
    CertificateError::Other(OtherError(Arc::new(Verdict(error)))).into()
}

/// The library prints a verifier's own errors by `Debug`: this one reads the same in both ways.
#[derive(thiserror::Error)]
#[error(transparent)]
struct Verdict(Error);

impl fmt::Debug for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Checks a server: chain, time and usage, that it is not revoked, and that it is one of those expected.
struct ServerVerifier {
    trust: Arc<Trust>,
    expected: Vec<SpiffeId>,
}

impl fmt::Debug for ServerVerifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerVerifier")
            .field("expected", &self.expected)
            .finish_non_exhaustive()
    }
}

impl ServerCertVerifier for ServerVerifier {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let found = identities(leaf);
        verify_chain(leaf, intermediates, self.trust.roots_of(&found), now)?;
        self.trust
            .check_revoked(&found, leaf, intermediates)
            .map_err(refused)?;
        let found = self.trust.vouched(found);
        if self.trust.expects(&self.expected, &found) {
            Ok(ServerCertVerified::assertion())
        } else {
            Err(refused(Error::OtherServer {
                expected: self.expected.clone(),
                found,
            }))
        }
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("TLS 1.2 was not offered".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(
            message,
            certificate,
            signature,
            &PROVIDER.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        PROVIDER.signature_verification_algorithms.supported_schemes()
    }
}

/// Checks a client: chain, time and usage, that it is not revoked, and that it is of the own trust domain, an alias of it, or a federated one.
#[derive(Debug)]
struct ClientVerifier {
    own: Arc<dyn ClientCertVerifier>,
    /// Those of other trust domains with roots of their own.
    federated: BTreeMap<String, Arc<dyn ClientCertVerifier>>,
    hints: Vec<DistinguishedName>,
    trust: Arc<Trust>,
}

impl ClientCertVerifier for ClientVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &self.hints
    }

    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let found = identities(leaf);
        let federated = self.trust.federation_of(&found);
        let chain = federated.and_then(|trust_domain| self.federated.get(trust_domain));
        let verified = chain
            .unwrap_or(&self.own)
            .verify_client_cert(leaf, intermediates, now)?;
        self.trust
            .check_revoked(&found, leaf, intermediates)
            .map_err(refused)?;
        if self.trust.accepts_client(&found) {
            Ok(verified)
        } else {
            Err(refused(Error::OtherTrustDomain {
                trust_domain: self.trust.domain().to_owned(),
                found,
            }))
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.own.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.own.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.own.supported_verify_schemes()
    }
}

#[cfg(test)]
mod tests;
