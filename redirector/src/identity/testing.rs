//! Certificates for unit tests, bad ones too.

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime},
};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationList, CertificateRevocationListParams,
    CertifiedIssuer, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, KeyIdMethod, KeyPair,
    RevokedCertParams, SanType,
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
        Self::named(&unique())
    }

    /// A root. Others may have the same name.
    pub(crate) fn named(name: &str) -> Self {
        Self(CertifiedIssuer::self_signed(ca_params(name), KeyPair::generate().unwrap()).unwrap())
    }

    pub(crate) fn intermediate(&self) -> Self {
        self.intermediate_named(&unique())
    }

    pub(crate) fn intermediate_named(&self, name: &str) -> Self {
        Self(CertifiedIssuer::signed_by(ca_params(name), KeyPair::generate().unwrap(), &self.0).unwrap())
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

    /// A list of the certificates that it has taken back, with changes.
    pub(crate) fn crl(
        &self,
        revoked: &[&CertificateDer<'_>],
        change: impl FnOnce(&mut CertificateRevocationListParams),
    ) -> CertificateRevocationList {
        let now = SystemTime::now();
        let revoked = revoked.iter().map(|certificate| RevokedCertParams {
            serial_number: serial(certificate).into(),
            revocation_time: now.into(),
            reason_code: None,
            invalidity_date: None,
        });
        let mut params = CertificateRevocationListParams {
            this_update: (now - Duration::from_secs(60)).into(),
            next_update: (now + Duration::from_secs(3600)).into(),
            crl_number: 1.into(),
            issuing_distribution_point: None,
            revoked_certs: revoked.collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        change(&mut params);
        params.signed_by(&self.0).unwrap()
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

/// The serial number of a certificate, as it is in there.
pub(crate) fn serial(certificate: &CertificateDer<'_>) -> Vec<u8> {
    use x509_parser::prelude::{FromDer, X509Certificate};
    let (_, parsed) = X509Certificate::from_der(certificate).unwrap();
    parsed.raw_serial().to_vec()
}

fn unique() -> String {
    format!("test CA {}", rand::random::<u64>())
}

fn ca_params(name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name.push(DnType::CommonName, name);
    params
}
