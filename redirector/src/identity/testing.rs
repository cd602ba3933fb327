//! Certificates for unit tests, bad ones too.

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime},
};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, ExtendedKeyUsagePurpose,
    IsCa, KeyPair, SanType,
};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};

use super::Svid;
use crate::mesh::spiffe::SpiffeId;

/// `cluster.local/ns/shop/sa/<name>`
pub(crate) fn id(name: &str) -> SpiffeId {
    SpiffeId::new("cluster.local", "shop", name).unwrap()
}

/// A root, or an intermediate below it.
pub(crate) struct TestCa(CertifiedIssuer<'static, KeyPair>);

/// A certificate with its key.
pub(crate) struct Leaf {
    pub(crate) certificate: CertificateDer<'static>,
    pub(crate) key: PrivateKeyDer<'static>,
}

impl TestCa {
    pub(crate) fn new() -> Self {
        Self(CertifiedIssuer::self_signed(ca_params(), KeyPair::generate().unwrap()).unwrap())
    }

    pub(crate) fn intermediate(&self) -> Self {
        Self(CertifiedIssuer::signed_by(ca_params(), KeyPair::generate().unwrap(), &self.0).unwrap())
    }

    pub(crate) fn certificate(&self) -> CertificateDer<'static> {
        self.0.der().clone()
    }

    /// A leaf with these URI SANs, with changes.
    pub(crate) fn leaf(&self, uris: &[&str], change: impl FnOnce(&mut CertificateParams)) -> Leaf {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.subject_alt_names = uris
            .iter()
            .map(|uri| SanType::URI((*uri).try_into().unwrap()))
            .collect();
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        params.not_before = (SystemTime::now() - Duration::from_secs(60)).into();
        params.not_after = (SystemTime::now() + Duration::from_secs(3600)).into();
        change(&mut params);
        let certificate = params.signed_by(&key, &self.0).unwrap().der().clone();
        Leaf {
            certificate,
            key: PrivatePkcs8KeyDer::from(key.serialize_der()).into(),
        }
    }

    /// A good certificate.
    pub(crate) fn svid(&self, id: &SpiffeId) -> Svid {
        let leaf = self.leaf(&[&id.to_string()], |_| {});
        Svid {
            id: id.clone(),
            chain: vec![leaf.certificate],
            key: leaf.key,
            roots: vec![self.certificate()],
            federated: BTreeMap::new(),
            not_before: SystemTime::now() - Duration::from_secs(60),
            not_after: SystemTime::now() + Duration::from_secs(3600),
        }
    }
}

fn ca_params() -> CertificateParams {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params
        .distinguished_name
        .push(DnType::CommonName, format!("test CA {}", rand::random::<u64>()));
    params
}
