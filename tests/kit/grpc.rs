//! A control plane's server: gRPC over TLS 1.3, in a namespace, in threads of its own.

use std::{
    convert::Infallible,
    fs,
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    time::Duration,
};

use rcgen::{CertificateParams, KeyPair};
use tokio::runtime::Runtime;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{
    Request, Status,
    body::Body,
    codegen::{Service, http},
    server::NamedService,
    transport::{Identity, Server as Transport, ServerTlsConfig},
};

use crate::{ca, netns::Namespace};

/// The name that its certificate has.
pub const NAME: &str = "istiod.istio-system.svc";

/// Time that its threads have to end.
const STOP_DEADLINE: Duration = Duration::from_secs(5);

/// Certificate and token of a control plane, as files that an agent may be given.
#[derive(Debug, Clone)]
pub struct Credentials {
    certificate: String,
    key: String,
    /// The root that the certificate leads to.
    pub root: PathBuf,
    /// What an agent is to show.
    pub token: PathBuf,
    /// What servers take; at first it is the same.
    pub accepted: PathBuf,
}

impl Credentials {
    /// New ones, in files that begin with `name`.
    ///
    /// # Panics
    /// When they cannot be written.
    pub fn create(directory: &Path, name: &str) -> Self {
        let root = ca::authority(name);
        let key = KeyPair::generate().unwrap();
        let leaf = CertificateParams::new([NAME.to_owned()])
            .unwrap()
            .signed_by(&key, &root)
            .unwrap();
        let credentials = Self {
            certificate: leaf.pem(),
            key: key.serialize_pem(),
            root: directory.join(format!("{name}-root.pem")),
            token: directory.join(format!("{name}-token")),
            accepted: directory.join(format!("{name}-accepted-token")),
        };
        fs::write(&credentials.root, root.pem()).unwrap();
        for file in [&credentials.token, &credentials.accepted] {
            fs::write(file, format!("{name}-secret")).unwrap();
        }
        credentials
    }

    /// Certificate chain and key in PEM.
    pub fn pem(&self) -> (&str, &str) {
        (&self.certificate, &self.key)
    }

    /// The environment of an agent that asks the server at `addr`, whose variables begin with `prefix`.
    pub fn environment(&self, prefix: &str, addr: SocketAddr) -> Vec<(String, String)> {
        let file = |path: &Path| path.display().to_string();
        [
            (format!("{prefix}_ADDRESS"), format!("https://{addr}")),
            (format!("{prefix}_ROOT_CA"), file(&self.root)),
            (format!("ALT_{prefix}_HOSTNAME"), NAME.to_owned()),
            ("AUTH_TOKEN".to_owned(), file(&self.token)),
        ]
        .into()
    }

    /// Whether a request shows the token that servers take now.
    ///
    /// # Errors
    /// UNAUTHENTICATED, when it does not.
    pub fn check<T>(&self, request: &Request<T>) -> Result<(), Status> {
        let shown = request.metadata().get("authorization");
        match self.is_shown(shown.and_then(|value| value.to_str().ok())) {
            true => Ok(()),
            false => Err(Status::unauthenticated("the token is not good")),
        }
    }

    /// Whether this header of authorization is that of the token which servers take now.
    pub fn is_shown(&self, header: Option<&str>) -> bool {
        let token = fs::read_to_string(&self.accepted).unwrap_or_default();
        header == Some(&format!("Bearer {token}"))
    }
}

/// A server that runs until it is dropped; its connections end with it.
#[derive(Debug)]
pub struct Server {
    /// Where it listens.
    pub addr: SocketAddr,
    runtime: Option<Runtime>,
}

impl Server {
    /// Serves `service` in `ns` at `addr`, at any port if that has none.
    ///
    /// # Panics
    /// When the port is taken.
    pub fn start<S>(ns: &Namespace, addr: SocketAddr, credentials: &Credentials, service: S) -> Self
    where
        S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>,
        S: NamedService + Clone + Send + Sync + 'static,
        S::Future: Send + 'static,
    {
        let listener = ns.run(|| TcpListener::bind(addr));
        let listener = listener.unwrap_or_else(|error| panic!("listening on {addr}: {error}"));
        listener.set_nonblocking(true).unwrap();
        let addr = listener.local_addr().unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let identity = Identity::from_pem(&credentials.certificate, &credentials.key);
        runtime.spawn(async move {
            let incoming = TcpListenerStream::new(tokio::net::TcpListener::from_std(listener).unwrap());
            let mut server = Transport::builder()
                .tls_config(ServerTlsConfig::new().identity(identity))
                .unwrap();
            server
                .add_service(service)
                .serve_with_incoming(incoming)
                .await
                .unwrap();
        });
        Self {
            addr,
            runtime: Some(runtime),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(STOP_DEADLINE);
        }
    }
}
