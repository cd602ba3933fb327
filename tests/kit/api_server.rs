//! The part of Kubernetes' API that certificates are asked for by, and a signer behind it, which can be told to misbehave. By
//! hyper and plain JSON, after the API's reference: `CertificateSigningRequest` of certificates.k8s.io/v1.

use std::{
    collections::BTreeMap,
    fs,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, SystemTime},
};

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use http_body_util::{BodyExt as _, Either, Full, StreamBody};
use hyper::{
    Method, Request, Response,
    body::{Bytes, Frame, Incoming},
    http::request::Parts,
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use rcgen::{CertificateSigningRequestParams, CertifiedIssuer, KeyPair, SanType};
use serde_json::{Value, json};
use tokio::{runtime::Runtime, sync::mpsc};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        ServerConfig,
        crypto::aws_lc_rs,
        pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    },
};

use crate::{
    ca,
    grpc::{Credentials, NAME},
    netns::Namespace,
};

/// The signer's name.
pub const SIGNER: &str = "tests.example/mesh";

const COLLECTION: &str = "/apis/certificates.k8s.io/v1/certificatesigningrequests";

/// Time that its threads have to end.
const STOP_DEADLINE: Duration = Duration::from_secs(5);

/// What becomes of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Mood {
    /// It is approved and signed.
    Good,
    /// It is signed once somebody has approved it.
    Waiting,
    /// Its approver says no, with this message.
    Denying(&'static str),
    /// It cannot be signed, with this message.
    Failing(&'static str),
    /// It is signed for this identity.
    For(String),
    /// The API server forbids it to be made.
    Forbidding,
}

/// An API server and a signer.
#[derive(Debug)]
pub struct ApiServer {
    shared: Arc<Shared>,
    directory: PathBuf,
    runtime: Option<Runtime>,
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
    objects: BTreeMap<String, Value>,
    /// Each object as it was made, in their order.
    made: Vec<Value>,
    /// Tokens that were not good.
    strangers: usize,
}

/// An answer: code and body.
pub(crate) type Answer = (u16, Value);

/// What answers a request with this head and body, of somebody whose token is good or not. None is no answer at all.
pub(crate) type Responder = Arc<dyn Fn(&Parts, Value, bool) -> Option<Answer> + Send + Sync>;

impl ApiServer {
    /// Starts one in `ns`. Its files are in `directory`: a kubeconfig, and the signer's root.
    ///
    /// # Panics
    /// When it cannot.
    pub fn start(ns: &Namespace, directory: &Path) -> Self {
        let credentials = Credentials::create(directory, "kubernetes");
        let root = ca::authority("signer");
        fs::write(directory.join("signer-root.pem"), root.pem()).unwrap();
        let listener = ns.run(|| TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).unwrap();
        let addr = listener.local_addr().unwrap();
        fs::write(directory.join("kubeconfig"), kubeconfig(addr, &credentials)).unwrap();
        let state = State {
            root,
            mood: Mood::Good,
            objects: BTreeMap::new(),
            made: Vec::new(),
            strangers: 0,
        };
        let shared = Arc::new(Shared {
            credentials,
            state: Mutex::new(state),
        });
        let responder = Arc::clone(&shared);
        let responder: Responder = Arc::new(move |head, body, is_known| {
            let mut state = responder.state();
            if !is_known {
                state.strangers += 1;
                return Some(unauthorized());
            }
            let content_type = head
                .headers
                .get("content-type")
                .and_then(|value| value.to_str().ok());
            Some(state.answer(&head.method, head.uri.path(), content_type, body))
        });
        Self {
            runtime: Some(serve(listener, &shared.credentials, responder)),
            shared,
            directory: directory.to_owned(),
        }
    }

    /// From now on.
    pub fn set(&self, mood: Mood) {
        self.shared.state().mood = mood;
    }

    /// Takes another token than before, which is in the file that clients read.
    ///
    /// # Panics
    /// When it cannot be written.
    pub fn rotate_token(&self, token: &str) {
        let credentials = &self.shared.credentials;
        // Shown before it is all that counts: a request may come between.
        fs::write(&credentials.token, token).unwrap();
        fs::write(&credentials.accepted, token).unwrap();
    }

    /// The objects that are there: the name of each, and the identity that it asks for.
    pub fn objects(&self) -> Vec<(String, String)> {
        let state = self.shared.state();
        let all = state.objects.iter();
        all.map(|(name, object)| (name.clone(), identity(&object["spec"]).expect("it is valid")))
            .collect()
    }

    /// All objects as they were made.
    pub fn made(&self) -> Vec<Value> {
        self.shared.state().made.clone()
    }

    /// How many requests had another token than they should.
    pub fn strangers(&self) -> usize {
        self.shared.state().strangers
    }

    /// The environment of an agent whose certificates come from the signer.
    pub fn environment(&self) -> Vec<(String, String)> {
        let file = |name| self.directory.join(name).display().to_string();
        [
            ("CERT_SIGNER_NAME", SIGNER.to_owned()),
            ("CERT_SIGNER_ROOT_CA", file("signer-root.pem")),
            ("KUBECONFIG", file("kubeconfig")),
            ("FAKE_CA", "false".to_owned()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into()
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(STOP_DEADLINE);
        }
    }
}

/// How a server at `addr` is reached.
pub(crate) fn kubeconfig(addr: SocketAddr, credentials: &Credentials) -> String {
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "tests",
        "contexts": [{ "name": "tests", "context": { "cluster": "tests", "user": "agent" } }],
        "clusters": [{ "name": "tests", "cluster": {
            "server": format!("https://{addr}"),
            "certificate-authority": credentials.root,
            "tls-server-name": NAME,
        } }],
        "users": [{ "name": "agent", "user": { "tokenFile": credentials.token } }],
    })
    .to_string()
}

/// What answers a request: a document, or one after the other for as long as there are any.
pub(crate) enum Body {
    Whole(Value),
    Stream(mpsc::UnboundedReceiver<Value>),
}

/// As [`Responder`], with bodies of either form.
pub(crate) type StreamingResponder = Arc<dyn Fn(&Parts, Value, bool) -> Option<(u16, Body)> + Send + Sync>;

/// Serves HTTP over TLS in threads of its own, until the runtime is dropped.
pub(crate) fn serve(listener: TcpListener, credentials: &Credentials, responder: Responder) -> Runtime {
    let whole: StreamingResponder = Arc::new(move |head, body, is_known| {
        let (code, body) = responder(head, body, is_known)?;
        Some((code, Body::Whole(body)))
    });
    serve_streams(listener, credentials, whole)
}

/// The same, with answers that may go on.
pub(crate) fn serve_streams(
    listener: TcpListener,
    credentials: &Credentials,
    responder: StreamingResponder,
) -> Runtime {
    let (certificate, key) = credentials.pem();
    let chain = vec![CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap()];
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    listener.set_nonblocking(true).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let credentials = credentials.clone();
    runtime.spawn(async move {
        let listener = tokio::net::TcpListener::from_std(listener).unwrap();
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let (acceptor, credentials, responder) =
                (acceptor.clone(), credentials.clone(), Arc::clone(&responder));
            tokio::spawn(async move {
                let Ok(stream) = acceptor.accept(stream).await else {
                    return;
                };
                let service = service_fn(|request| answer(&credentials, &responder, request));
                let _ = http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service)
                    .await;
            });
        }
    });
    runtime
}

type Sent = Either<Full<Bytes>, StreamBody<Lines>>;

/// Documents, a line each.
struct Lines(mpsc::UnboundedReceiver<Value>);

impl tokio_stream::Stream for Lines {
    type Item = Result<Frame<Bytes>, std::convert::Infallible>;

    fn poll_next(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        let next = self.0.poll_recv(cx);
        next.map(|value| value.map(|value| Ok(Frame::data(format!("{value}\n").into()))))
    }
}

async fn answer(
    credentials: &Credentials,
    responder: &StreamingResponder,
    request: Request<Incoming>,
) -> Result<Response<Sent>, hyper::Error> {
    let (head, body) = request.into_parts();
    let body = body.collect().await?.to_bytes();
    let shown = head
        .headers
        .get("authorization")
        .and_then(|value| value.to_str().ok());
    let is_known = credentials.is_shown(shown);
    let Some((code, body)) = responder(&head, serde_json::from_slice(&body).unwrap_or_default(), is_known)
    else {
        return std::future::pending().await;
    };
    let answer = Response::builder()
        .status(code)
        .header("content-type", "application/json");
    let body = match body {
        Body::Whole(value) => Either::Left(Full::from(value.to_string())),
        Body::Stream(values) => Either::Right(StreamBody::new(Lines(values))),
    };
    Ok(answer.body(body).unwrap())
}

/// To whom is not known.
pub(crate) fn unauthorized() -> Answer {
    status(401, "Unauthorized", "Unauthorized")
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no test holds it in a panic")
    }
}

/// A failure, as the API tells it.
pub(crate) fn status(code: u16, reason: &str, message: &str) -> Answer {
    let body = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason, "code": code,
    });
    (code, body)
}

fn condition(kind: &str, reason: &str, message: &str) -> Value {
    json!({ "type": kind, "status": "True", "reason": reason, "message": message })
}

impl State {
    fn answer(&mut self, method: &Method, path: &str, content_type: Option<&str>, body: Value) -> Answer {
        let Some(rest) = path.strip_prefix(COLLECTION) else {
            return status(
                404,
                "NotFound",
                "the server could not find the requested resource",
            );
        };
        let parts: Vec<_> = rest.split('/').skip(1).collect();
        match (method.as_str(), parts.as_slice(), content_type) {
            ("POST", [], Some("application/json")) => self.create(body),
            ("GET", [name], _) => self.look(name),
            ("DELETE", [name], _) => match self.objects.remove(*name) {
                Some(_) => (
                    200,
                    json!({ "kind": "Status", "apiVersion": "v1", "status": "Success" }),
                ),
                None => not_found(name),
            },
            ("PATCH", [name, "approval"], Some("application/strategic-merge-patch+json")) => {
                self.approve(name, body)
            }
            (_, _, content_type) => {
                let what = format!("{method} {path} {content_type:?}");
                status(405, "MethodNotAllowed", &what)
            }
        }
    }

    fn create(&mut self, mut object: Value) -> Answer {
        if self.mood == Mood::Forbidding {
            return status(
                403,
                "Forbidden",
                "agents cannot create certificatesigningrequests",
            );
        }
        let made = object.clone();
        let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        if let Err(message) = valid(&object) {
            return status(422, "Invalid", &format!("{name:?} is invalid: {message}"));
        }
        if self.objects.contains_key(&name) {
            return status(409, "AlreadyExists", &format!("{name:?} already exists"));
        }
        object["metadata"]["uid"] = format!("uid-{}", self.made.len()).into();
        object["spec"]["username"] = "system:serviceaccount:tests:agent".into();
        object["status"] = json!({});
        self.objects.insert(name, object.clone());
        self.made.push(made);
        (201, object)
    }

    /// The object as it is, after which its approver and its signer go on: the first look sees nothing of them.
    fn look(&mut self, name: &str) -> Answer {
        let Some(object) = self.objects.get(name).cloned() else {
            return not_found(name);
        };
        let mut next = object.clone();
        let conditions = next["status"]["conditions"].as_array().cloned();
        let mut conditions = conditions.unwrap_or_default();
        let is_signed = next["status"]["certificate"].is_string();
        let is_approved = conditions.iter().any(|one| one["type"] == "Approved");
        match &self.mood {
            Mood::Denying(message) => conditions = vec![condition("Denied", "TestsDeny", message)],
            Mood::Failing(message) => {
                conditions = vec![
                    condition("Approved", "TestsApprove", ""),
                    condition("Failed", "TestsFail", message),
                ];
            }
            Mood::Waiting if !is_approved => {}
            _ if is_signed => {}
            mood => {
                if !is_approved {
                    conditions.push(condition("Approved", "TestsApprove", ""));
                }
                let other = match mood {
                    Mood::For(other) => Some(other.as_str()),
                    _ => None,
                };
                let pem = sign(&self.root, &object["spec"], other);
                next["status"]["certificate"] = BASE64.encode(pem).into();
            }
        }
        next["status"]["conditions"] = conditions.into();
        self.objects.insert(name.to_owned(), next);
        (200, object)
    }

    fn approve(&mut self, name: &str, patch: Value) -> Answer {
        let Some(object) = self.objects.get_mut(name) else {
            return not_found(name);
        };
        let added = patch["status"]["conditions"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        let is_good = |one: &Value| {
            one["type"] == "Approved"
                && one["status"] == "True"
                && one["reason"].as_str().is_some_and(|text| !text.is_empty())
        };
        if added.is_empty() || !added.iter().all(is_good) {
            return status(422, "Invalid", "this is no approval");
        }
        object["status"]["conditions"] = added.into();
        (200, object.clone())
    }
}

fn not_found(name: &str) -> Answer {
    let message = format!("certificatesigningrequests.certificates.k8s.io {name:?} not found");
    status(404, "NotFound", &message)
}

/// What the API server looks at, and what this signer wants of a request.
fn valid(object: &Value) -> Result<(), String> {
    let named = |key: &str, wanted: &str| match object[key] == wanted {
        true => Ok(()),
        false => Err(format!("{key}: {}", object[key])),
    };
    named("apiVersion", "certificates.k8s.io/v1")?;
    named("kind", "CertificateSigningRequest")?;
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    let is_name = |text: &str| {
        let is_good = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        !text.is_empty() && text.len() <= 253 && text.chars().all(is_good) && !text.starts_with('-')
    };
    if !is_name(name) {
        return Err(format!("metadata.name: {name:?}"));
    }
    if object["metadata"]["labels"]["app.kubernetes.io/managed-by"] != "redirector" {
        return Err("it is nobody's".to_owned());
    }
    let spec = &object["spec"];
    if spec["signerName"] != SIGNER {
        return Err(format!("spec.signerName: {}", spec["signerName"]));
    }
    if spec["expirationSeconds"]
        .as_i64()
        .is_none_or(|seconds| seconds < 600)
    {
        return Err("spec.expirationSeconds: may not specify a duration less than 600 seconds".to_owned());
    }
    let mut usages: Vec<_> = spec["usages"]
        .as_array()
        .ok_or("spec.usages: required")?
        .iter()
        .filter_map(Value::as_str)
        .collect();
    usages.sort_unstable();
    if usages
        != [
            "client auth",
            "digital signature",
            "key encipherment",
            "server auth",
        ]
    {
        return Err(format!("spec.usages: {usages:?}"));
    }
    identity(spec).map(|_| ())
}

/// Whom a request is for.
fn identity(spec: &Value) -> Result<String, String> {
    match request(spec)?.params.subject_alt_names.as_slice() {
        [SanType::URI(uri)] if uri.as_str().starts_with("spiffe://") => Ok(uri.to_string()),
        others => Err(format!("spec.request: {others:?} is not one URI")),
    }
}

fn request(spec: &Value) -> Result<CertificateSigningRequestParams, String> {
    let pem = BASE64
        .decode(spec["request"].as_str().unwrap_or_default())
        .map_err(|error| error.to_string())?;
    let pem = String::from_utf8(pem).map_err(|error| error.to_string())?;
    CertificateSigningRequestParams::from_pem(&pem).map_err(|error| format!("spec.request: {error}"))
}

/// The certificate of a request that is valid, and the root behind it, which is more than is asked for.
pub(crate) fn sign(root: &CertifiedIssuer<'static, KeyPair>, spec: &Value, other: Option<&str>) -> String {
    let mut csr = request(spec).expect("it is valid");
    if let Some(other) = other {
        csr.params.subject_alt_names = vec![SanType::URI(other.try_into().unwrap())];
    }
    let seconds = spec["expirationSeconds"].as_u64().expect("it is valid");
    let now = SystemTime::now();
    csr.params.not_before = now.into();
    csr.params.not_after = (now + Duration::from_secs(seconds)).into();
    format!(
        "what others wrote\n{}{}",
        csr.signed_by(root).unwrap().pem(),
        root.pem()
    )
}
