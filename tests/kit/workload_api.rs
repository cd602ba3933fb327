//! SPIFFE Workload APIs that tell what they are given, over a Unix socket: one by tonic and the tests' own messages, and one by
//! grpcio with messages made by hand.

use std::{
    fs,
    path::{Path, PathBuf},
    pin::Pin,
    time::Duration,
};

use serde_json::json;
use tokio::{net::UnixListener, runtime::Runtime, sync::watch};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use tokio_stream::{
    Stream, StreamExt,
    wrappers::{UnixListenerStream, WatchStream},
};
use tonic::{Request, Response, Status, transport::Server};

use crate::{
    ca::Credentials,
    envoy::python,
    netns::{Namespace, unique_prefix},
    process::{Process, command},
    proto::spiffe::{
        X509svid, X509svidRequest, X509svidResponse,
        spiffe_workload_api_server::{SpiffeWorkloadApi, SpiffeWorkloadApiServer},
    },
    wait,
};

/// Time that its threads have to end.
const STOP_DEADLINE: Duration = Duration::from_secs(5);

/// An API. What it tells outlives its server.
pub trait Api: Send {
    /// Tells these from now on: identity and files of each; and of other trust domains the files of their roots.
    fn tell(&self, all: &[(String, &Credentials)], federated: &[(&str, &Path)]);

    /// Serves again.
    ///
    /// # Panics
    /// When it cannot.
    fn up(&mut self);

    /// Serves nobody any more; its connections end.
    fn down(&mut self);

    /// Where it is.
    fn socket(&self) -> &Path;

    /// The environment of an agent that asks it.
    fn environment(&self) -> Vec<(String, String)> {
        let socket = format!("unix://{}", self.socket().display());
        [
            ("SPIFFE_ENDPOINT_SOCKET", socket),
            ("FAKE_CA", "false".to_owned()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into()
    }
}

/// The one by tonic.
#[derive(Debug)]
pub struct WorkloadApi {
    socket: PathBuf,
    told: watch::Sender<X509svidResponse>,
    runtime: Option<Runtime>,
}

impl WorkloadApi {
    /// Serves at `socket`; it knows nobody yet.
    pub fn start(socket: PathBuf) -> Self {
        let mut api = Self {
            socket,
            told: watch::Sender::default(),
            runtime: None,
        };
        api.up();
        api
    }
}

impl Api for WorkloadApi {
    fn tell(&self, all: &[(String, &Credentials)], federated: &[(&str, &Path)]) {
        let svids = all.iter().map(|(identity, files)| svid(identity.clone(), files));
        let federated = federated
            .iter()
            .map(|(domain, roots)| ((*domain).to_owned(), der(roots)));
        let response = X509svidResponse {
            svids: svids.collect(),
            federated_bundles: federated.collect(),
            ..Default::default()
        };
        self.told.send_replace(response);
    }

    fn up(&mut self) {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let _ = fs::remove_file(&self.socket);
        let listener = {
            let _entered = runtime.enter();
            UnixListener::bind(&self.socket).unwrap()
        };
        let service = SpiffeWorkloadApiServer::new(Handler(self.told.subscribe()));
        runtime.spawn(
            Server::builder()
                .add_service(service)
                .serve_with_incoming(UnixListenerStream::new(listener)),
        );
        self.runtime = Some(runtime);
    }

    fn down(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(STOP_DEADLINE);
        }
    }

    fn socket(&self) -> &Path {
        &self.socket
    }
}

impl Drop for WorkloadApi {
    fn drop(&mut self) {
        self.down();
    }
}

fn der(certificate: &Path) -> Vec<u8> {
    CertificateDer::from_pem_file(certificate).unwrap().to_vec()
}

fn svid(spiffe_id: String, files: &Credentials) -> X509svid {
    X509svid {
        spiffe_id,
        x509_svid: der(&files.certificate),
        x509_svid_key: PrivateKeyDer::from_pem_file(&files.key)
            .unwrap()
            .secret_der()
            .to_vec(),
        bundle: der(&files.root),
        hint: String::new(),
    }
}

struct Handler(watch::Receiver<X509svidResponse>);

#[tonic::async_trait]
impl SpiffeWorkloadApi for Handler {
    type FetchX509SVIDStream = Pin<Box<dyn Stream<Item = Result<X509svidResponse, Status>> + Send>>;

    async fn fetch_x509svid(
        &self,
        request: Request<X509svidRequest>,
    ) -> Result<Response<Self::FetchX509SVIDStream>, Status> {
        let header = request.metadata().get("workload.spiffe.io");
        if header.is_none_or(|value| value != "true") {
            return Err(Status::invalid_argument("security header missing"));
        }
        if self.0.borrow().svids.is_empty() {
            return Err(Status::permission_denied("no identity issued"));
        }
        Ok(Response::new(Box::pin(WatchStream::new(self.0.clone()).map(Ok))))
    }
}

/// The one by grpcio.
#[derive(Debug)]
pub struct PythonWorkloadApi {
    ns: Namespace,
    socket: PathBuf,
    process: Option<Process>,
}

impl PythonWorkloadApi {
    /// Serves at `socket`; it knows nobody yet.
    ///
    /// # Panics
    /// When it cannot.
    pub fn start(socket: PathBuf) -> Self {
        let mut api = Self {
            // It needs no network.
            ns: Namespace::create(&format!("{}-api", unique_prefix())).unwrap(),
            socket,
            process: None,
        };
        api.up();
        api
    }

    /// The file by which it is told.
    fn file(&self) -> PathBuf {
        self.socket.with_extension("json")
    }
}

impl Api for PythonWorkloadApi {
    fn tell(&self, all: &[(String, &Credentials)], federated: &[(&str, &Path)]) {
        let svids = all
            .iter()
            .map(|(identity, files)| json!([identity, files.certificate, files.key, files.root]));
        let federated: serde_json::Map<_, _> = federated
            .iter()
            .map(|(domain, roots)| ((*domain).to_owned(), json!(roots)))
            .collect();
        let told = json!({"svids": svids.collect::<Vec<_>>(), "federated": federated});
        // In one step: it is read at any time.
        let new = self.socket.with_extension("new");
        fs::write(&new, told.to_string()).unwrap();
        fs::rename(&new, self.file()).unwrap();
    }

    fn up(&mut self) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/workload_api.py");
        let mut server = command(&self.ns, python());
        server.arg(script).arg(&self.socket).arg(self.file());
        let log = self.socket.with_extension("log");
        let _ = fs::remove_file(&log);
        let process = Process::start(&mut server, &log).unwrap();
        wait::until("the Workload API", || {
            process.output().contains("ready").then_some(())
        });
        self.process = Some(process);
    }

    fn down(&mut self) {
        self.process = None;
    }

    fn socket(&self) -> &Path {
        &self.socket
    }
}
