//! Certificates by Kubernetes' API for them: a `CertificateSigningRequest` (certificates.k8s.io/v1) for each, which one signer of
//! the cluster answers.
//!
//! The signer signs what is approved: by an approver of its own, or by us where that is wanted. What its certificates lead to, the
//! API does not tell: the roots come from a file. A request's object is removed afterwards, whatever became of it, by the task
//! in `leftovers`.

use std::{path::PathBuf, sync::Arc, time::Duration};

use k8s_openapi::{
    ByteString,
    api::certificates::v1::{
        CertificateSigningRequest, CertificateSigningRequestCondition, CertificateSigningRequestSpec,
    },
};
use kube::{
    Api,
    api::{ObjectMeta, Patch, PatchParams, PostParams},
};
use rustls_pki_types::{CertificateDer, pem::PemObject};
use serde_json::json;
use tokio::time::{Instant, sleep};

use self::leftovers::Leftovers;
use super::{
    Error, Svid, csr,
    renew::{Issuer, REQUEST_DEADLINE},
};
use crate::{
    control_plane::{self, kubernetes::Kubernetes},
    mesh::spiffe::SpiffeId,
};

mod leftovers;

/// What the certificates are for, as RFC 5280 names it: both ends of TLS.
const USAGES: [&str; 4] = [
    "digital signature",
    "key encipherment",
    "server auth",
    "client auth",
];

/// Whose the objects are, for people who look.
const MANAGED_BY: (&str, &str) = ("app.kubernetes.io/managed-by", "redirector");

/// The shortest lifetime that the API lets be asked for (`spec.expirationSeconds`).
pub const MIN_LIFETIME: Duration = Duration::from_secs(600);

/// First and longest wait between two looks at whether there is an answer. Kubernetes' own signers take some milliseconds.
const LOOKS: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// How long a signer may take. Less than all of a request's time, so that what is missing can be told.
const SIGNER_DEADLINE: Duration = REQUEST_DEADLINE.saturating_sub(Duration::from_secs(5));

/// The most that is repeated of what others say, in bytes.
const TEXT_BYTES: usize = 500;

/// Who signs, and how.
#[derive(Debug, Clone)]
pub struct Config {
    /// The signer's name: a domain, `/`, a name.
    pub signer: String,
    /// File of the certificates that what it signs leads to, in PEM.
    pub roots: PathBuf,
    /// Whether requests are approved by us.
    pub approve: bool,
    /// How long certificates are asked for.
    pub lifetime: Duration,
}

/// A signer of a cluster.
#[derive(Debug)]
pub struct KubernetesCsr {
    kubernetes: Arc<Kubernetes>,
    config: Config,
    leftovers: Leftovers,
}

/// Why there is no certificate.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("making a key and a request")]
    Request(#[source] rcgen::Error),
    #[error("reading the signer's root certificates in {}", .0.display())]
    Roots(PathBuf, #[source] std::io::Error),
    #[error("there is no usable root certificate in {}: it must hold those of signer {signer} in PEM", path.display())]
    NoRoots { path: PathBuf, signer: String },
    #[error("Kubernetes' API cannot be asked")]
    Setup(#[from] control_plane::Error),
    #[error("{operation}: the API server answered {code} {reason}: {message}")]
    Refused {
        operation: &'static str,
        code: u16,
        reason: String,
        message: String,
    },
    #[error("{operation}")]
    Asking {
        operation: &'static str,
        #[source]
        source: kube::Error,
    },
    #[error("CertificateSigningRequest {name} {became} by signer {signer} or its approver: {why}")]
    Ended {
        name: String,
        became: &'static str,
        signer: String,
        why: String,
    },
    #[error(
        "signer {signer} has not answered CertificateSigningRequest {name} within {SIGNER_DEADLINE:?}: it was {state}"
    )]
    Unanswered {
        name: String,
        signer: String,
        state: &'static str,
    },
    #[error("the certificate of signer {0} cannot be read")]
    Unreadable(String, #[source] rustls_pki_types::pem::Error),
    #[error("the answer of signer {0} has {1}")]
    Answer(String, &'static str),
}

impl KubernetesCsr {
    /// The signer that `config` names. Must be called within a tokio runtime.
    pub fn new(kubernetes: Kubernetes, config: Config) -> Self {
        let kubernetes = Arc::new(kubernetes);
        Self {
            leftovers: Leftovers::start(Arc::clone(&kubernetes)),
            kubernetes,
            config,
        }
    }

    async fn try_issue(&self, id: &SpiffeId) -> Result<Svid, Failure> {
        let Config { signer, approve, .. } = &self.config;
        let end = Instant::now() + SIGNER_DEADLINE;
        let (key, csr) = csr::request(id).map_err(Failure::Request)?;
        // Before anything is made in the cluster that would be of no use without.
        let roots = self.roots().await?;
        let api: Api<CertificateSigningRequest> = Api::all(self.kubernetes.client().await?);
        // Named by us, not by the API server, so that it can be removed when the answer to its creation is lost.
        let name = format!("redirector-{:016x}", rand::random::<u64>());
        let mut leftover = self.leftovers.expect(name.clone());
        let object = self.object(&name, csr);
        let created = api.create(&PostParams::default(), &object).await;
        // A server that failed may have made it all the same.
        if let Err(kube::Error::Api(status)) = &created
            && (400..500).contains(&status.code)
        {
            leftover.forget();
        }
        let created = created.map_err(asking("creating a CertificateSigningRequest"))?;
        leftover.exists();
        if *approve {
            let approval = Patch::Strategic(approval(created.metadata.uid));
            let approved = api
                .patch_approval(&name, &PatchParams::default(), &approval)
                .await;
            approved.map_err(asking("approving a CertificateSigningRequest"))?;
        }
        let pem = self.answer(&api, &name, end).await?;
        let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
        let mut chain = chain.map_err(|error| Failure::Unreadable(signer.clone(), error))?;
        // Some signers put the root behind the intermediates as well; peers have it, or must not take it from us.
        chain.retain(|certificate| !roots.contains(certificate));
        csr::svid(id, &key, chain, roots).map_err(|lack| Failure::Answer(signer.clone(), lack))
    }

    async fn roots(&self) -> Result<Vec<CertificateDer<'static>>, Failure> {
        let path = &self.config.roots;
        let pem = tokio::fs::read(path).await;
        let pem = pem.map_err(|error| Failure::Roots(path.clone(), error))?;
        let roots: Vec<_> = CertificateDer::pem_slice_iter(&pem).flatten().collect();
        match roots.is_empty() {
            false => Ok(roots),
            true => Err(Failure::NoRoots {
                path: path.clone(),
                signer: self.config.signer.clone(),
            }),
        }
    }

    fn object(&self, name: &str, csr: String) -> CertificateSigningRequest {
        let seconds = self.config.lifetime.as_secs();
        CertificateSigningRequest {
            metadata: ObjectMeta {
                name: Some(name.to_owned()),
                labels: Some([(MANAGED_BY.0.to_owned(), MANAGED_BY.1.to_owned())].into()),
                ..ObjectMeta::default()
            },
            spec: CertificateSigningRequestSpec {
                request: ByteString(csr.into_bytes()),
                signer_name: self.config.signer.clone(),
                usages: Some(USAGES.map(str::to_owned).into()),
                expiration_seconds: Some(i32::try_from(seconds).unwrap_or(i32::MAX)),
                ..CertificateSigningRequestSpec::default()
            },
            status: None,
        }
    }

    /// Looks again and again, and not by a watch: that would take the right to list everybody's requests.
    async fn answer(
        &self,
        api: &Api<CertificateSigningRequest>,
        name: &str,
        end: Instant,
    ) -> Result<Vec<u8>, Failure> {
        let mut wait = LOOKS.0;
        loop {
            sleep(wait.min(end.saturating_duration_since(Instant::now()))).await;
            let object = api.get(name).await;
            let object = object.map_err(asking("looking at a CertificateSigningRequest"))?;
            let state = match State::of(object) {
                State::Issued(pem) => return Ok(pem),
                State::Ended { became, why } => {
                    return Err(Failure::Ended {
                        name: name.to_owned(),
                        became,
                        signer: self.config.signer.clone(),
                        why,
                    });
                }
                State::Waiting(state) => state,
            };
            if Instant::now() >= end {
                return Err(Failure::Unanswered {
                    name: name.to_owned(),
                    signer: self.config.signer.clone(),
                    state,
                });
            }
            wait = (wait * 2).min(LOOKS.1);
        }
    }
}

impl Issuer for KubernetesCsr {
    async fn issue(&self, id: &SpiffeId) -> Result<Svid, Error> {
        let issued = self.try_issue(id).await;
        issued.map_err(|error| Error::new(format!("certificate for {id}"), error))
    }
}

/// How far a request has come.
#[derive(Debug, PartialEq)]
enum State {
    Issued(Vec<u8>),
    Ended { became: &'static str, why: String },
    Waiting(&'static str),
}

impl State {
    fn of(object: CertificateSigningRequest) -> Self {
        let status = object.status.unwrap_or_default();
        let conditions = status.conditions.unwrap_or_default();
        // These can only be true, says the API.
        let find = |kind: &str| conditions.iter().find(|condition| condition.type_ == kind);
        for (kind, became) in [("Denied", "was denied"), ("Failed", "has failed")] {
            if let Some(condition) = find(kind) {
                let why = why(condition);
                return Self::Ended { became, why };
            }
        }
        match status.certificate {
            Some(ByteString(pem)) if !pem.is_empty() => Self::Issued(pem),
            _ if find("Approved").is_some() => Self::Waiting("approved and not signed"),
            _ => Self::Waiting(
                "not approved: see to it that somebody approves it, or let us (--kubernetes-signer-approve)",
            ),
        }
    }
}

fn why(condition: &CertificateSigningRequestCondition) -> String {
    let reason = condition.reason.as_deref().unwrap_or("no reason given");
    let message = condition.message.as_deref().unwrap_or("no message given");
    format!("{}: {}", shortened(reason), shortened(message))
}

/// The condition that an approver sets, on the object of this UID and no other that was put in its place. When it was set, the API server
/// adds.
fn approval(uid: Option<String>) -> serde_json::Value {
    let condition = json!({
        "type": "Approved",
        "status": "True",
        "reason": "RedirectorApproves",
        "message": "asked for by the node's agent, which is set up to approve its requests",
    });
    let metadata = ObjectMeta {
        uid,
        ..ObjectMeta::default()
    };
    json!({ "metadata": metadata, "status": { "conditions": [condition] } })
}

/// What the library says, without the dumps of whole values in it.
fn asking(operation: &'static str) -> impl FnOnce(kube::Error) -> Failure {
    move |error| match error {
        kube::Error::Api(status) => Failure::Refused {
            operation,
            code: status.code,
            reason: shortened(&status.reason),
            message: shortened(&status.message),
        },
        source => Failure::Asking { operation, source },
    }
}

/// The begin of a text.
fn shortened(text: &str) -> String {
    let end = text.floor_char_boundary(TEXT_BYTES);
    let dots = if end < text.len() { "..." } else { "" };
    format!("{}{dots}", &text[..end])
}

#[cfg(test)]
mod tests;
