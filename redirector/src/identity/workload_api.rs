//! Certificates of a SPIFFE agent on this node, SPIRE's for example: the Workload API's stream of X.509-SVIDs, over its Unix socket.
//!
//! One stream tells all certificates that the agent may have; which is whose, their identities say. Forms: SPIFFE's
//! `SPIFFE_Workload_API.md` sections 4 and 5, and `X509-SVID.md`.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use futures_util::stream::BoxStream;
use http::uri::PathAndQuery;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio_util::task::AbortOnDropHandle;
use tonic::{Extensions, Request, Status, metadata::MetadataValue};
use tonic_prost::ProstCodec;
use tracing::{info, warn};
use x509_parser::prelude::{FromDer, X509Certificate};

use super::{
    CertSource, Error, Svid,
    pushed::{self, Publisher, Pushed, Snapshot},
    tls::{self, Credentials},
};
use crate::{
    control_plane::{self, Address, Auth, Channel, Roots, explain},
    mesh::spiffe::SpiffeId,
    telemetry::Chain,
};

/// The service has no package.
const METHOD: PathAndQuery = PathAndQuery::from_static("/SpiffeWorkloadAPI/FetchX509SVID");

/// Without it a server must refuse: whoever is tricked into calling the socket cannot send it. Section 6.
const SECURITY_HEADER: (&str, &str) = ("workload.spiffe.io", "true");

/// Longest message: some thousands of certificates with their bundles.
const MAX_MESSAGE: usize = 64 << 20;

/// First and longest wait before the next try.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(5));

#[derive(Clone, PartialEq, prost::Message)]
struct X509SvidRequest {}

#[derive(Clone, PartialEq, prost::Message)]
struct X509SvidResponse {
    #[prost(message, repeated, tag = "1")]
    svids: Vec<X509Svid>,
    /// Nobody sends them yet.
    #[prost(bytes = "vec", repeated, tag = "2")]
    crl: Vec<Vec<u8>>,
    /// Trust domain, `spiffe://` before it, to certificates one after another.
    #[prost(btree_map = "string, bytes", tag = "3")]
    federated_bundles: BTreeMap<String, Vec<u8>>,
}

#[derive(Clone, PartialEq, prost::Message)]
// A key must not get into a log by `Debug`.
#[prost(skip_debug)]
struct X509Svid {
    #[prost(string, tag = "1")]
    spiffe_id: String,
    /// DER, one after another.
    #[prost(bytes = "vec", tag = "2")]
    x509_svid: Vec<u8>,
    /// DER of PKCS #8.
    #[prost(bytes = "vec", tag = "3")]
    x509_svid_key: Vec<u8>,
    /// DER, one after another.
    #[prost(bytes = "vec", tag = "4")]
    bundle: Vec<u8>,
    #[prost(string, tag = "5")]
    hint: String,
}

impl std::fmt::Debug for X509Svid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("X509Svid").field(&self.spiffe_id).finish()
    }
}

/// Why there is nothing from the agent.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("the Workload API cannot be asked")]
    Setup(#[from] control_plane::Error),
    #[error("the Workload API answered {0}")]
    Refused(String),
    #[error("the Workload API has ended its stream")]
    Ended,
}

/// Why a certificate is not used.
#[derive(Debug, thiserror::Error)]
enum Unusable {
    #[error("{0} cannot be read")]
    Unreadable(&'static str),
    #[error("key, certificate and bundle do not belong together")]
    Apart(#[source] tls::Error),
}

/// The Workload API of this node.
pub struct WorkloadApi {
    pushed: Pushed,
    _task: AbortOnDropHandle<()>,
}

impl WorkloadApi {
    /// Follows the API at `address`. Must be called within a tokio runtime.
    pub fn follow(address: Address) -> Self {
        let (publisher, pushed) = pushed::channel(address.to_string());
        let channel = Channel::new(control_plane::Config {
            address,
            // A socket has no TLS.
            roots: Roots::System,
            alt_hostname: None,
            auth: Auth::default(),
        });
        Self {
            pushed,
            _task: AbortOnDropHandle::new(tokio::spawn(run(channel, publisher))),
        }
    }
}

impl CertSource for WorkloadApi {
    fn svids(&self, id: &SpiffeId) -> BoxStream<'static, Result<Svid, Error>> {
        self.pushed.svids(id)
    }
}

async fn run(channel: Channel, publisher: Publisher) {
    let (first, longest) = BACKOFF;
    let (mut backoff, mut known) = (first, Known::default());
    loop {
        let before = backoff;
        let failure = follow(&channel, &publisher, &mut known, || backoff = first).await;
        let problem = Chain(&failure).to_string();
        warn!(address = %channel.address(), error = %problem, "no news of certificates; those that are here stay");
        publisher.fail(problem);
        if backoff == before {
            backoff = (backoff * 2).min(longest);
        }
        tokio::time::sleep(backoff.mul_f64(rand::random_range(0.8..1.2))).await;
    }
}

/// A certificate, by what it was told as with which federated bundles: what is told again is the same.
type Told = (X509Svid, BTreeMap<String, Vec<u8>>, Arc<Svid>);

/// What was told before.
#[derive(Default)]
struct Known {
    svids: BTreeMap<SpiffeId, Told>,
    /// Identities that are no service account's.
    strangers: BTreeSet<String>,
}

/// Takes what the API tells until it stops.
async fn follow(
    channel: &Channel,
    publisher: &Publisher,
    known: &mut Known,
    mut told: impl FnMut(),
) -> Failure {
    let refused = |status: &Status| Failure::Refused(explain(status));
    let mut service = match channel.service().await {
        Ok(service) => service.max_decoding_message_size(MAX_MESSAGE),
        Err(error) => return error.into(),
    };
    if let Err(error) = service.ready().await {
        return refused(&Status::from_error(error.into()));
    }
    let mut request = Request::from_parts(Default::default(), Extensions::default(), X509SvidRequest {});
    let (name, value) = SECURITY_HEADER;
    request
        .metadata_mut()
        .insert(name, MetadataValue::from_static(value));
    let codec = ProstCodec::<_, X509SvidResponse>::default();
    let answer = service.server_streaming(request, METHOD, codec).await;
    let mut messages = match answer {
        Ok(answer) => answer.into_inner(),
        Err(status) => return refused(&status),
    };
    loop {
        match messages.message().await {
            Ok(Some(response)) => {
                told();
                publisher.publish(take(response, known));
            }
            Ok(None) => return Failure::Ended,
            Err(status) => return refused(&status),
        }
    }
}

/// What there is by a message: all that is not in it is no more. A bad certificate is told, and replaces nothing.
fn take(response: X509SvidResponse, known: &mut Known) -> Snapshot {
    let mut problems = Vec::new();
    let mut before = std::mem::take(known);
    let bundles = response.federated_bundles;
    let federated = federated(&bundles, &mut problems);
    for svid in response.svids {
        let Ok(id) = svid.spiffe_id.parse::<SpiffeId>() else {
            // Others' workloads may have names of their own form; they are none of the pods, and no pod's problem.
            if !before.strangers.contains(&svid.spiffe_id) {
                info!(
                    id = svid.spiffe_id,
                    "a certificate for whom is no service account is passed over"
                );
            }
            known.strangers.insert(svid.spiffe_id);
            continue;
        };
        // The first of an identity is the default.
        if known.svids.contains_key(&id) {
            continue;
        }
        let old = before.svids.remove(&id);
        let same = old.as_ref().is_some_and(|old| old.0 == svid && old.1 == bundles);
        if let Some(old) = old.clone().filter(|_| same) {
            known.svids.insert(id, old);
            continue;
        }
        match parse(&id, &svid, &federated) {
            Ok(parsed) => {
                info!(%id, "certificate of the Workload API");
                known.svids.insert(id, (svid, bundles.clone(), Arc::new(parsed)));
            }
            Err(error) => {
                let problem = format!("{id}: {}", Chain(&error));
                warn!(error = %problem, has_one = old.is_some(), "a certificate of the Workload API is not used");
                problems.push(problem);
                known.svids.extend(old.map(|old| (id, old)));
            }
        }
    }
    Snapshot {
        svids: known
            .svids
            .iter()
            .map(|(id, (_, _, svid))| (id.clone(), Arc::clone(svid)))
            .collect(),
        problem: (!problems.is_empty()).then(|| problems.join("; ").into()),
        told: true,
    }
}

/// Bundles of other trust domains, those that can be used.
fn federated(
    bundles: &BTreeMap<String, Vec<u8>>,
    problems: &mut Vec<String>,
) -> BTreeMap<String, Vec<CertificateDer<'static>>> {
    let mut usable = BTreeMap::new();
    for (name, bundle) in bundles {
        let trust_domain = name.strip_prefix("spiffe://").unwrap_or(name);
        match certificates(bundle) {
            Some(bundle) => {
                usable.insert(trust_domain.to_owned(), bundle);
            }
            None => problems.push(format!(
                "the bundle of trust domain {trust_domain:?} cannot be read"
            )),
        }
    }
    usable
}

fn parse(
    id: &SpiffeId,
    svid: &X509Svid,
    federated: &BTreeMap<String, Vec<CertificateDer<'static>>>,
) -> Result<Svid, Unusable> {
    let chain = certificates(&svid.x509_svid).ok_or(Unusable::Unreadable("the certificate"))?;
    let roots = certificates(&svid.bundle).ok_or(Unusable::Unreadable("the bundle"))?;
    let leaf = chain.first().ok_or(Unusable::Unreadable("the certificate"))?;
    let (not_before, not_after) = tls::validity(leaf).ok_or(Unusable::Unreadable("the certificate"))?;
    let mut federated = federated.clone();
    federated.remove(id.trust_domain());
    let svid = Svid {
        id: id.clone(),
        chain,
        key: PrivateKeyDer::from(PrivatePkcs8KeyDer::from(svid.x509_svid_key.clone())),
        roots,
        federated,
        not_before,
        not_after,
    };
    Credentials::new(&svid).map_err(Unusable::Apart)?;
    Ok(svid)
}

/// Certificates one after another; `None` when there is none, or something else among them.
fn certificates(mut der: &[u8]) -> Option<Vec<CertificateDer<'static>>> {
    let mut found = Vec::new();
    while !der.is_empty() {
        let (rest, _) = X509Certificate::from_der(der).ok()?;
        found.push(CertificateDer::from(der[..der.len() - rest.len()].to_vec()));
        der = rest;
    }
    (!found.is_empty()).then_some(found)
}

#[cfg(test)]
mod tests;
