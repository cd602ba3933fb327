//! A key, the request for its certificate, and what the answer makes of them: for the sources that ask by PKCS #10.

use std::collections::BTreeMap;

use rcgen::{
    CertificateParams, DistinguishedName, KeyPair, PKCS_ECDSA_P256_SHA256, SanType, string::Ia5String,
};
use rustls_pki_types::{CertificateDer, PrivatePkcs8KeyDer};

use super::{Svid, tls};
use crate::mesh::spiffe::SpiffeId;

/// A new key, and the request for its certificate in PEM.
pub(super) fn request(id: &SpiffeId) -> Result<(KeyPair, String), rcgen::Error> {
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
    let mut params = CertificateParams::default();
    // The identity and nothing else, in the one place where it counts.
    params.distinguished_name = DistinguishedName::new();
    params.subject_alt_names = vec![SanType::URI(Ia5String::try_from(id.to_string())?)];
    let request = params.serialize_request(&key)?.pem()?;
    Ok((key, request))
}

/// The certificate that was asked for, leaf first in its chain. Whose it is, and whether it leads to the roots, the store
/// looks at.
///
/// # Errors
/// What the answer has, or lacks.
pub(super) fn svid(
    id: &SpiffeId,
    key: &KeyPair,
    chain: Vec<CertificateDer<'static>>,
    roots: Vec<CertificateDer<'static>>,
) -> Result<Svid, &'static str> {
    let leaf = chain.first().ok_or("no certificate")?;
    let (not_before, not_after) = tls::validity(leaf).ok_or("a certificate that cannot be read")?;
    Ok(Svid {
        id: id.clone(),
        key: PrivatePkcs8KeyDer::from(key.serialize_der()).into(),
        chain,
        roots,
        federated: BTreeMap::new(),
        not_before,
        not_after,
    })
}
