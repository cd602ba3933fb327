//! A certificate authority of Istio's kind, by tonic and the tests' own messages, which can be told to misbehave.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex},
    time::{Duration, SystemTime},
};

use prost_types::value::Kind;
use rcgen::{CertificateSigningRequestParams, CertifiedIssuer, KeyPair, SanType};
use tonic::{Request, Response, Status};

use crate::{
    ca,
    grpc::{Credentials, Server},
    netns::Namespace,
    proto::auth::{
        IstioCertificateRequest, IstioCertificateResponse,
        istio_certificate_service_server::{IstioCertificateService, IstioCertificateServiceServer},
    },
};

/// What it does when it is asked.
#[derive(Debug, Clone, Default)]
pub enum Mood {
    /// It makes certificates.
    #[default]
    Good,
    /// It refuses, with this text.
    Refusing(String),
    /// Its certificates are for this identity.
    For(String),
    /// Its certificates have another key.
    OtherKey,
    /// Its answers have no root.
    NoRoot,
    /// Its answers are no certificates.
    Garbage,
    /// It takes requests and never answers.
    Silent,
    /// Its clock is ahead.
    Ahead(Duration),
    /// Its clock is behind.
    Behind(Duration),
    /// It takes its time.
    Slow(Duration),
}

/// An authority. Its root outlives its server.
#[derive(Debug)]
pub struct IstioCa {
    shared: Arc<Shared>,
    server: Option<Server>,
    addr: SocketAddr,
}

#[derive(Debug)]
struct Shared {
    credentials: Credentials,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    root: CertifiedIssuer<'static, KeyPair>,
    mood: Mood,
    lifetime: Duration,
    /// Of each request: the identity, and the time it asked for in seconds.
    asked: Vec<(String, i64)>,
    /// Requests that are under way, and how many were at most.
    open: (usize, usize),
}

impl IstioCa {
    /// Starts one on loopback of `ns`, with a root of its own; its certificates live for `lifetime`.
    pub fn start(ns: &Namespace, credentials: &Credentials, lifetime: Duration) -> Self {
        Self::start_at(ns, Ipv4Addr::LOCALHOST.into(), credentials, lifetime)
    }

    /// The same, at an address of `ns`.
    pub fn start_at(ns: &Namespace, ip: IpAddr, credentials: &Credentials, lifetime: Duration) -> Self {
        let state = State {
            root: ca::authority("mesh root"),
            mood: Mood::Good,
            lifetime,
            asked: Vec::new(),
            open: (0, 0),
        };
        let shared = Arc::new(Shared {
            credentials: credentials.clone(),
            state: Mutex::new(state),
        });
        let mut ca = Self {
            shared,
            server: None,
            addr: (ip, 0).into(),
        };
        ca.up(ns);
        ca
    }

    /// Serves again, at the same port.
    pub fn up(&mut self, ns: &Namespace) {
        let service = IstioCertificateServiceServer::new(Handler(self.shared.clone()));
        let server = Server::start(ns, self.addr, &self.shared.credentials, service);
        self.addr = server.addr;
        self.server = Some(server);
    }

    /// Serves nobody any more.
    pub fn down(&mut self) {
        self.server = None;
    }

    /// From now on.
    pub fn set(&self, mood: Mood) {
        self.shared.state().mood = mood;
    }

    /// The identities it was asked for, and for how many seconds.
    pub fn asked(&self) -> Vec<(String, i64)> {
        self.shared.state().asked.clone()
    }

    /// Where it serves, or did.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// How many requests there were at one time, at most.
    pub fn most_at_once(&self) -> usize {
        self.shared.state().open.1
    }

    /// The environment of an agent that asks it.
    pub fn environment(&self) -> Vec<(String, String)> {
        let mut environment = self.shared.credentials.environment("CA", self.addr);
        environment.push(("FAKE_CA".to_owned(), "false".to_owned()));
        environment
    }
}

impl Shared {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().expect("no test holds it in a panic")
    }
}

struct Handler(Arc<Shared>);

#[tonic::async_trait]
impl IstioCertificateService for Handler {
    async fn create_certificate(
        &self,
        request: Request<IstioCertificateRequest>,
    ) -> Result<Response<IstioCertificateResponse>, Status> {
        self.0.credentials.check(&request)?;
        if request
            .metadata()
            .get("clusterid")
            .is_none_or(|id| id != "Kubernetes")
        {
            return Err(Status::invalid_argument("no clusterid"));
        }
        let request = request.into_inner();
        let metadata = request.metadata.unwrap_or_default();
        let identity = match metadata
            .fields
            .get("ImpersonatedIdentity")
            .and_then(|value| value.kind.as_ref())
        {
            Some(Kind::StringValue(identity)) => identity.clone(),
            _ => {
                return Err(Status::permission_denied(
                    "nodes get no certificates of their own",
                ));
            }
        };
        let _open = Open::new(&self.0);
        let mood = {
            let mut state = self.0.state();
            state.asked.push((identity.clone(), request.validity_duration));
            state.mood.clone()
        };
        match mood {
            Mood::Refusing(text) => Err(Status::permission_denied(text)),
            Mood::Silent => std::future::pending().await,
            Mood::Garbage => Ok(answer(vec!["garbage".into(), "garbage".into()])),
            mood => {
                if let Mood::Slow(time) = mood {
                    tokio::time::sleep(time).await;
                }
                let csr = CertificateSigningRequestParams::from_pem(&request.csr);
                let csr = csr.map_err(|error| Status::invalid_argument(error.to_string()))?;
                self.0.state().sign(csr, &identity, &mood)
            }
        }
    }
}

/// A request that is under way, until it has been answered or given up.
struct Open(Arc<Shared>);

impl Open {
    fn new(shared: &Arc<Shared>) -> Self {
        let (now, most) = &mut shared.state().open;
        *now += 1;
        *most = (*most).max(*now);
        Self(Arc::clone(shared))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.state().open.0 -= 1;
    }
}

fn answer(cert_chain: Vec<String>) -> Response<IstioCertificateResponse> {
    Response::new(IstioCertificateResponse { cert_chain })
}

impl State {
    fn sign(
        &self,
        mut csr: CertificateSigningRequestParams,
        identity: &str,
        mood: &Mood,
    ) -> Result<Response<IstioCertificateResponse>, Status> {
        let asked = csr.params.subject_alt_names.iter().map(|san| match san {
            SanType::URI(uri) => uri.as_str(),
            _ => "",
        });
        if asked.collect::<Vec<_>>() != [identity] {
            return Err(Status::invalid_argument("the request is for somebody else"));
        }
        if let Mood::For(other) = mood {
            csr.params.subject_alt_names = vec![SanType::URI(other.as_str().try_into().unwrap())];
        }
        let now = match mood {
            Mood::Ahead(time) => SystemTime::now() + *time,
            Mood::Behind(time) => SystemTime::now() - *time,
            _ => SystemTime::now(),
        };
        csr.params.not_before = now.into();
        csr.params.not_after = (now + self.lifetime).into();
        let signed = match mood {
            Mood::OtherKey => csr.params.signed_by(&KeyPair::generate().unwrap(), &self.root),
            _ => csr.signed_by(&self.root),
        };
        let signed = signed.map_err(|error| Status::internal(error.to_string()))?;
        let mut chain = vec![signed.pem()];
        if !matches!(mood, Mood::NoRoot) {
            chain.push(self.root.pem());
        }
        Ok(answer(chain))
    }
}
