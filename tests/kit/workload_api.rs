//! A SPIFFE Workload API by tonic and the tests' own messages: it tells what it is given, over a Unix socket.

use std::{
    fs,
    path::{Path, PathBuf},
    pin::Pin,
    time::Duration,
};

use tokio::{net::UnixListener, runtime::Runtime, sync::watch};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use tokio_stream::{
    Stream, StreamExt,
    wrappers::{UnixListenerStream, WatchStream},
};
use tonic::{Request, Response, Status, transport::Server};

use crate::{
    ca::Credentials,
    proto::spiffe::{
        X509svid, X509svidRequest, X509svidResponse,
        spiffe_workload_api_server::{SpiffeWorkloadApi, SpiffeWorkloadApiServer},
    },
};

/// Time that its threads have to end.
const STOP_DEADLINE: Duration = Duration::from_secs(5);

/// The API. What it tells outlives its server.
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

    /// Tells these from now on: identity and files of each.
    pub fn tell<'a>(&self, all: impl IntoIterator<Item = (String, &'a Credentials)>) {
        let svids = all.into_iter().map(|(identity, files)| svid(identity, files));
        let response = X509svidResponse {
            svids: svids.collect(),
            ..Default::default()
        };
        self.told.send_replace(response);
    }

    /// Serves again.
    ///
    /// # Panics
    /// When it cannot.
    pub fn up(&mut self) {
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

    /// Serves nobody any more; its connections end.
    pub fn down(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(STOP_DEADLINE);
        }
    }

    /// The environment of an agent that asks it.
    pub fn environment(&self) -> Vec<(String, String)> {
        let socket = format!("unix://{}", self.socket.display());
        [
            ("SPIFFE_ENDPOINT_SOCKET", socket),
            ("FAKE_CA", "false".to_owned()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into()
    }
}

impl Drop for WorkloadApi {
    fn drop(&mut self) {
        self.down();
    }
}

fn svid(spiffe_id: String, files: &Credentials) -> X509svid {
    let certificate = |path: &Path| CertificateDer::from_pem_file(path).unwrap().to_vec();
    X509svid {
        spiffe_id,
        x509_svid: certificate(&files.certificate),
        x509_svid_key: PrivateKeyDer::from_pem_file(&files.key)
            .unwrap()
            .secret_der()
            .to_vec(),
        bundle: certificate(&files.root),
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
