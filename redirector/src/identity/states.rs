//! What is known of each identity's certificate, in the shape in which Istio's tools read it of ztunnel's config dump
//! (`certificates` there: identity, state, certChain, rootCerts).

use base64::Engine as _;
use rustls_pki_types::CertificateDer;
use serde::Serialize;
use x509_parser::{
    prelude::{FromDer, X509Certificate},
    time::ASN1Time,
};

/// An identity in use.
#[derive(Debug, Serialize, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct IdentityState {
    /// The identity.
    pub identity: String,
    /// `Initializing`, `Available`, or `Unavailable: ` with the reason.
    pub state: String,
    /// Why there is no newer certificate; absent after a success.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub renewal_error: Option<String>,
    /// Leaf, then intermediates; empty without a valid certificate.
    pub cert_chain: Vec<CertificateView>,
    /// The certificates that peers must lead to.
    pub root_certs: Vec<CertificateView>,
}

/// A certificate.
#[derive(Debug, Serialize, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct CertificateView {
    /// Base64 of its PEM.
    pub pem: String,
    /// Decimal, as Istio's tools write it.
    pub serial_number: String,
    /// RFC 3339.
    pub valid_from: String,
    /// RFC 3339.
    pub expiration_time: String,
}

pub(super) fn rfc3339(time: ASN1Time) -> String {
    let time = time.to_datetime();
    let (hour, minute, second) = time.to_hms();
    format!("{}T{hour:02}:{minute:02}:{second:02}Z", time.date())
}

impl CertificateView {
    /// `None` for what is no certificate.
    pub(super) fn of(certificate: &CertificateDer<'_>) -> Option<Self> {
        let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
        let pem = super::pem("CERTIFICATE", certificate);
        Some(Self {
            pem: base64::engine::general_purpose::STANDARD.encode(pem),
            serial_number: parsed.tbs_certificate.serial.to_string(),
            valid_from: rfc3339(parsed.validity().not_before),
            expiration_time: rfc3339(parsed.validity().not_after),
        })
    }

    pub(super) fn all(certificates: &[CertificateDer<'_>]) -> Vec<Self> {
        certificates.iter().filter_map(Self::of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::testing::{TestCa, id};

    #[test]
    fn a_certificate_is_shown_as_it_is() {
        let ca = TestCa::new();
        let leaf = ca.leaf(&[&id("web").to_string()], |params| {
            params.serial_number = Some(0x0123_4567_89ab_cdef_0123_u128.to_be_bytes().to_vec().into());
            params.not_before = rcgen::date_time_ymd(2026, 3, 4);
            params.not_after = rcgen::date_time_ymd(2036, 11, 12);
        });
        let view = CertificateView::of(&leaf.certificate).unwrap();
        assert_eq!(view.serial_number, 0x0123_4567_89ab_cdef_0123_u128.to_string());
        assert_eq!(view.valid_from, "2026-03-04T00:00:00Z");
        assert_eq!(view.expiration_time, "2036-11-12T00:00:00Z");
        let pem = base64::engine::general_purpose::STANDARD
            .decode(view.pem)
            .unwrap();
        assert!(pem.starts_with(b"-----BEGIN CERTIFICATE-----\n"));
        assert_eq!(CertificateView::of(&CertificateDer::from(vec![1, 2, 3])), None);
    }
}
