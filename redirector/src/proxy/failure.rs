//! Why connections fail: each error says by which of Istio's response flags it is counted, and which policy was behind it.
//!
//! What an operator reads is the error's own text; the flag is for metrics, which must not have a value for each text.

use std::{error::Error, io, sync::OnceLock};

use rustls::{AlertDescription, CertificateError};

use crate::mesh::policy::PolicyName;

/// How a connection ended: the values of the label `response_flags` of Istio's metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Flag {
    /// In order.
    None,
    /// Refused or cut off by a policy, or because it would be in plain.
    Deny,
    /// Could not be made, or broke: whatever has no flag of its own.
    Connect,
    /// TLS.
    TlsFailure,
    /// HTTP/2, once TLS stood.
    Http2Failure,
    /// No answer on the HBONE port, as when a NetworkPolicy drops it.
    NetworkPolicy,
    /// No certificate to show, or none with an identity in it.
    Identity,
    /// A certificate that is on a revocation list.
    Revoked,
}

impl Flag {
    /// All, in the order of their numbers.
    pub(crate) const ALL: [Self; 8] = [
        Self::None,
        Self::Deny,
        Self::Connect,
        Self::TlsFailure,
        Self::Http2Failure,
        Self::NetworkPolicy,
        Self::Identity,
        Self::Revoked,
    ];

    /// The label's value.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::None => "-",
            Self::Deny => "DENY",
            Self::Connect => "CONNECT",
            Self::TlsFailure => "TLS_FAILURE",
            Self::Http2Failure => "H2_HANDSHAKE_FAILURE",
            Self::NetworkPolicy => "NETWORK_POLICY",
            Self::Identity => "IDENTITY_ERROR",
            Self::Revoked => "CERT_REVOKED",
        }
    }
}

/// An error that ends a connection.
pub(crate) trait Failure: Error {
    /// What it counts as.
    fn flag(&self) -> Flag {
        Flag::Connect
    }

    /// The policy that decided so, where it was one.
    fn policy(&self) -> Option<&PolicyName> {
        None
    }

    /// What an operator may look at, where the error's own text does not say.
    fn advice(&self) -> Option<&'static str> {
        None
    }
}

impl Failure for io::Error {}

/// Why a tunnel was closed by this side with all that was in it, if it was.
#[derive(Debug, Default)]
pub(crate) struct Fate(OnceLock<Box<str>>);

impl Fate {
    /// It is about to be closed, since a certificate by which it stands has been revoked.
    pub(crate) fn revoke(&self, error: &dyn Error) {
        // The first reason is the one that is told.
        let _ = self.0.set(super::record::chain(error).into());
    }

    /// Why it was.
    pub(crate) fn revoked(&self) -> Option<&str> {
        self.0.get().map(|text| &**text)
    }
}

/// What an error of a TLS handshake counts as.
pub(crate) fn of_tls(error: &io::Error) -> Flag {
    let cause = error
        .get_ref()
        .and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match cause {
        // By us, and by the peer.
        Some(
            rustls::Error::InvalidCertificate(CertificateError::Revoked)
            | rustls::Error::AlertReceived(AlertDescription::CertificateRevoked),
        ) => Flag::Revoked,
        _ => Flag::TlsFailure,
    }
}

/// Of [`handshake_reason`]: the peer's certificate is on a revocation list.
pub(crate) const PEER_REVOKED: &str = "peer_revoked";

/// Why a TLS handshake failed, in one of few words.
pub(crate) fn handshake_reason(error: &io::Error) -> &'static str {
    use rustls::Error as Tls;
    let cause = error.get_ref().and_then(|inner| inner.downcast_ref::<Tls>());
    match cause {
        None if error.kind() == io::ErrorKind::UnexpectedEof => "closed",
        None if error.kind() == io::ErrorKind::ConnectionReset => "reset",
        None => "io",
        Some(Tls::InvalidCertificate(certificate)) => match certificate {
            CertificateError::Revoked => PEER_REVOKED,
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => "peer_expired",
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                "peer_not_valid_yet"
            }
            CertificateError::UnknownIssuer => "peer_unknown_issuer",
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
                "peer_other_identity"
            }
            _ => "peer_certificate",
        },
        Some(Tls::NoCertificatesPresented) => "peer_without_certificate",
        Some(Tls::AlertReceived(alert)) => match alert {
            AlertDescription::CertificateRevoked => "refused_as_revoked",
            AlertDescription::CertificateExpired => "refused_as_expired",
            AlertDescription::UnknownCA => "refused_as_of_unknown_issuer",
            _ => "refused_by_peer",
        },
        Some(_) => "protocol",
    }
}

/// What an operator may look at after a failed TLS handshake.
pub(crate) fn advice_of_tls(error: &io::Error) -> Option<&'static str> {
    Some(match handshake_reason(error) {
        "closed" | "reset" => "the peer hung up: it may be no HBONE proxy, or may be starting or draining",
        PEER_REVOKED => "the peer's certificate is on a revocation list (--crl-file)",
        "peer_expired" => "the peer's certificate is over: its proxy gets no new one, or a clock is wrong",
        "peer_not_valid_yet" => "the peer's certificate is of the future: a clock is wrong",
        "peer_unknown_issuer" => {
            "the peer's certificate leads to none of this pod's roots: both sides must trust one authority"
        }
        "peer_other_identity" => {
            "somebody else than expected is there: the mesh may be stale, the address may be another pod's now, or the trust domains differ"
        }
        "refused_as_revoked" => "the peer has this pod's certificate on a revocation list",
        "refused_as_expired" => {
            "this pod's certificate is over for the peer: see /certificates, and the clocks of both nodes"
        }
        "refused_as_of_unknown_issuer" => "the peer does not trust the authority of this pod's certificate",
        "peer_without_certificate" => "the peer showed no certificate: it is no proxy of the mesh",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_numbered_in_their_order() {
        for (number, flag) in Flag::ALL.into_iter().enumerate() {
            assert_eq!(flag as usize, number, "{flag:?}");
        }
    }

    #[test]
    fn a_revoked_certificate_is_told_from_other_failures_of_tls() {
        for (error, flag) in [
            (
                io::Error::other(rustls::Error::InvalidCertificate(CertificateError::Revoked)),
                Flag::Revoked,
            ),
            (
                io::Error::other(rustls::Error::AlertReceived(AlertDescription::CertificateRevoked)),
                Flag::Revoked,
            ),
            (
                io::Error::other(rustls::Error::InvalidCertificate(CertificateError::Expired)),
                Flag::TlsFailure,
            ),
            (io::ErrorKind::UnexpectedEof.into(), Flag::TlsFailure),
        ] {
            assert_eq!(of_tls(&error), flag, "{error}");
        }
    }
}
