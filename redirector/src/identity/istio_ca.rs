//! Certificates of Istio's certificate authority: `istio.v1.auth.IstioCertificateService` (security/v1alpha1/ca.proto of Istio's API).
//!
//! The agent asks for its pods in its own name, by impersonation: the authority grants what runs on the token's node. A pod that
//! the API server doesn't show there yet is refused at first, and asked for again.

use std::time::Duration;

use http::uri::PathAndQuery;
use prost_types::{Struct, Value, value::Kind};
use rcgen::KeyPair;
use rustls_pki_types::{CertificateDer, pem::PemObject};
use tonic::{Extensions, Request, Status};
use tonic_prost::ProstCodec;

use super::{Error, Svid, csr, renew::Issuer};
use crate::{
    control_plane::{self, Channel, explain},
    mesh::spiffe::SpiffeId,
};

const METHOD: PathAndQuery =
    PathAndQuery::from_static("/istio.v1.auth.IstioCertificateService/CreateCertificate");

/// Key of the metadata in which the identity stands that a certificate is for.
const IMPERSONATED: &str = "ImpersonatedIdentity";

/// A certificate authority.
#[derive(Debug)]
pub struct IstioCa {
    channel: Channel,
    lifetime: Duration,
}

#[derive(Clone, PartialEq, prost::Message)]
struct IstioCertificateRequest {
    /// PEM, PKCS #10.
    #[prost(string, tag = "1")]
    csr: String,
    /// Seconds.
    #[prost(int64, tag = "3")]
    validity_duration: i64,
    #[prost(message, optional, tag = "4")]
    metadata: Option<Struct>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct IstioCertificateResponse {
    /// PEM: the leaf, intermediates, and in the last one the roots.
    #[prost(string, repeated, tag = "1")]
    cert_chain: Vec<String>,
}

/// Why there is no certificate.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("making a key and a request")]
    Request(#[source] rcgen::Error),
    #[error("the certificate authority cannot be asked")]
    Setup(#[from] control_plane::Error),
    #[error("{address} answered {}", explain(status))]
    Refused { address: String, status: Box<Status> },
    #[error("the certificate authority's answer has {0}")]
    Answer(&'static str),
    #[error("the certificate authority's answer cannot be read")]
    Unreadable(#[source] rustls_pki_types::pem::Error),
}

impl IstioCa {
    /// The authority that `config` leads to, which is asked for certificates of this lifetime.
    pub fn new(config: control_plane::Config, lifetime: Duration) -> Self {
        Self {
            channel: Channel::new(config),
            lifetime,
        }
    }

    async fn try_issue(&self, id: &SpiffeId) -> Result<Svid, Failure> {
        let (key, request) = request(id, self.lifetime).map_err(Failure::Request)?;
        let metadata = self.channel.metadata().await?;
        let mut service = self.channel.service().await?;
        let refused = |status| Failure::Refused {
            address: self.channel.address().to_string(),
            status: Box::new(status),
        };
        let ready = service.ready().await;
        ready.map_err(|error| refused(Status::from_error(error.into())))?;
        let request = Request::from_parts(metadata, Extensions::default(), request);
        let codec = ProstCodec::<_, IstioCertificateResponse>::default();
        let answer = service.unary(request, METHOD, codec).await.map_err(refused)?;
        svid(id, &key, &answer.into_inner())
    }
}

impl Issuer for IstioCa {
    async fn issue(&self, id: &SpiffeId) -> Result<Svid, Error> {
        let issued = self.try_issue(id).await;
        issued.map_err(|error| Error::new(format!("certificate for {id}"), error))
    }
}

/// A new key, and the request for its certificate.
fn request(id: &SpiffeId, lifetime: Duration) -> Result<(KeyPair, IstioCertificateRequest), rcgen::Error> {
    let (key, csr) = csr::request(id)?;
    let impersonated = Value {
        kind: Some(Kind::StringValue(id.to_string())),
    };
    let request = IstioCertificateRequest {
        csr,
        validity_duration: i64::try_from(lifetime.as_secs()).unwrap_or(i64::MAX),
        metadata: Some(Struct {
            fields: [(IMPERSONATED.to_owned(), impersonated)].into(),
        }),
    };
    Ok((key, request))
}

/// The certificate in an answer.
fn svid(id: &SpiffeId, key: &KeyPair, answer: &IstioCertificateResponse) -> Result<Svid, Failure> {
    let certificates = |pem: &String| {
        let parsed = CertificateDer::pem_slice_iter(pem.as_bytes());
        parsed.collect::<Result<Vec<_>, _>>().map_err(Failure::Unreadable)
    };
    let (roots, chain) = match answer.cert_chain.as_slice() {
        [] => return Err(Failure::Answer("no certificate")),
        [_] => return Err(Failure::Answer("no root beside the certificate")),
        [chain @ .., roots] => (certificates(roots)?, chain),
    };
    if roots.is_empty() {
        return Err(Failure::Answer("no root beside the certificate"));
    }
    let chain: Vec<_> = chain
        .iter()
        .map(certificates)
        .collect::<Result<Vec<_>, _>>()?
        .concat();
    csr::svid(id, key, chain, roots).map_err(Failure::Answer)
}

#[cfg(test)]
mod tests;
