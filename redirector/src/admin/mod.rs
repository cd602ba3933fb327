//! What operators and probes ask of a running agent: admin (loopback), metrics, readiness.
//!
//! `app` builds an [`Admin`] and serves it; `client` is the other side, for the commands of `cli`.

use std::{path::PathBuf, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode, header};
use prometheus_client::registry::Registry;
use serde::Serialize;
use serde_json::Value;
use tokio::{net::TcpListener, sync::watch};
use tokio_util::sync::CancellationToken;

use crate::{
    identity::{crl_file::RevocationsView, states::IdentityState, store::Store},
    mesh::index::Mesh,
    pods::{
        kubernetes::directory::Directory,
        status::{Missed, Status},
    },
    proxy::flows::Flows,
    redirect::probers::View,
    serve::{Answer, Limits, Listener, method_not_allowed, serve, text},
    telemetry::logs,
};

pub(crate) mod certificates;
pub mod client;
mod dashboard;
mod dump;
mod flows;
mod logging;
mod origin;
mod scrape;

const LIMITS: Limits = Limits {
    connections: 32,
    body_bytes: 4 * 1024,
    header_deadline: Duration::from_secs(5),
    body_deadline: Duration::from_secs(5),
    connection_deadline: Duration::from_secs(30),
    stop_deadline: Duration::from_secs(2),
};

/// What the endpoints show and control.
pub struct Admin {
    /// The pods.
    pub pods: watch::Receiver<Status>,
    /// What Kubernetes tells of the pods, where it is asked.
    pub directory: Option<Arc<Directory>>,
    /// Pods that should be captured and are not known to the lifecycle.
    pub missed: watch::Receiver<Vec<Missed>>,
    /// Where the CNI plugin is installed, or why it is not; nothing if that is not the agent's matter.
    pub cni: Option<watch::Receiver<Result<PathBuf, String>>>,
    /// Who probes the pods from this node; nothing for a backend that can't tell.
    pub probers: watch::Receiver<Option<View>>,
    /// The mesh.
    pub mesh: watch::Receiver<Arc<Mesh>>,
    /// The types of resources of which a control plane owes the first state.
    pub awaited: watch::Receiver<Vec<&'static str>>,
    /// The pods' connections.
    pub flows: Arc<Flows>,
    /// The identities in use.
    pub identities: Arc<Store>,
    /// The metrics.
    pub registry: Arc<Registry>,
    /// The log level.
    pub logs: logs::Control,
    /// Name of the backend.
    pub backend: &'static str,
    /// The settings, without secrets.
    pub config: Value,
    /// Whose turn it is to have a config dump.
    pub dumps: dump::Turn,
    /// Whose turn it is to have the metrics.
    pub scrapes: dump::Turn,
    /// Cancelled to stop the agent.
    pub quit: CancellationToken,
    /// The agent is stopping, so it is not ready.
    pub stopping: CancellationToken,
}

/// The answer to `GET /pods`.
#[derive(Debug, Serialize, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodsView {
    /// Whether the agent is ready.
    pub ready: bool,
    /// What it waits for.
    pub pending: Vec<String>,
    /// Name of the backend.
    pub backend: String,
    /// The file by which the container runtime calls the CNI plugin, if the agent has installed it.
    #[serde(default)]
    pub cni_plugin: Option<PathBuf>,
    /// Whose connections from this node reach the pods directly; absent if the backend can't tell.
    pub probes: Option<View>,
    /// Pods that should be captured and could not even be tried.
    #[serde(default)]
    pub missed: Vec<Missed>,
    /// The pods.
    #[serde(flatten)]
    pub status: Status,
}

/// The answer to `GET /certificates`.
#[derive(Debug, Serialize)]
struct CertificatesView {
    certificates: Vec<IdentityState>,
    revocations: Option<RevocationsView>,
}

impl CertificatesView {
    fn of(identities: &Store) -> Self {
        Self {
            certificates: identities.states(),
            revocations: identities.revocations(),
        }
    }
}

/// Which of the three endpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Endpoint {
    /// Everything, for loopback alone.
    Admin,
    /// `/metrics`.
    Metrics,
    /// `/healthz/ready`.
    Readiness,
}

impl Admin {
    /// Serves one endpoint until `stop`.
    pub async fn serve(self: Arc<Self>, endpoint: Endpoint, listener: TcpListener, stop: CancellationToken) {
        let handler = move |request| {
            let admin = Arc::clone(&self);
            async move { admin.answer(endpoint, &request).await }
        };
        serve(Listener::Tcp(listener), LIMITS, stop, handler).await;
    }

    async fn answer(&self, endpoint: Endpoint, request: &Request<Bytes>) -> Answer {
        if endpoint == Endpoint::Admin
            && let Err(foreign) = origin::check(request.headers())
        {
            return text(StatusCode::FORBIDDEN, format!("{foreign}\n"));
        }
        match (endpoint, request.uri().path()) {
            (Endpoint::Admin, "/connections" | "/flows") => flows::answer(self, request).await,
            (Endpoint::Admin, "/config_dump") if request.method() == Method::GET => dump::answer(self).await,
            (Endpoint::Admin, "/certificates") if request.method() == Method::GET => {
                self.certificates().await
            }
            (Endpoint::Admin, "/config_dump" | "/certificates") => method_not_allowed(&Method::GET),
            (Endpoint::Admin | Endpoint::Metrics, "/metrics" | "/stats/prometheus") => {
                match *request.method() {
                    Method::GET => self.metrics(request.headers().clone()).await,
                    _ => method_not_allowed(&Method::GET),
                }
            }
            _ => self.handle(endpoint, request),
        }
    }

    /// To read many certificates takes a while.
    async fn certificates(&self) -> Answer {
        let identities = Arc::clone(&self.identities);
        blocking(move || json_answer(&CertificatesView::of(&identities))).await
    }

    /// Thousands of series are megabytes of text.
    async fn metrics(&self, headers: HeaderMap) -> Answer {
        let Some(turn) = self.scrapes.take().await else {
            return text(
                StatusCode::SERVICE_UNAVAILABLE,
                "others are being answered: ask again\n",
            );
        };
        let registry = Arc::clone(&self.registry);
        blocking(move || {
            let answer = scrape::answer(&registry, &headers);
            drop(turn);
            answer
        })
        .await
    }

    fn handle(&self, endpoint: Endpoint, request: &Request<Bytes>) -> Answer {
        let (allowed, answer): (Method, &dyn Fn() -> Answer) = match (endpoint, request.uri().path()) {
            (Endpoint::Admin | Endpoint::Readiness, "/healthz/ready") => (Method::GET, &|| self.readiness()),
            // Being able to answer is all it says: what the agent waits for is no reason to start it anew.
            (Endpoint::Admin | Endpoint::Readiness, "/healthz/live") => {
                (Method::GET, &|| text(StatusCode::OK, "alive\n"))
            }
            (Endpoint::Admin, "/") => (Method::GET, &|| match dashboard::is_for(request.headers()) {
                true => dashboard::page(),
                false => text(StatusCode::OK, INDEX),
            }),
            (Endpoint::Admin, "/debug/pprof/profile") => {
                (Method::GET, &|| text(StatusCode::NOT_IMPLEMENTED, NO_PROFILE))
            }
            (Endpoint::Admin, "/debug/pprof/heap") => {
                (Method::GET, &|| text(StatusCode::NOT_IMPLEMENTED, NO_HEAP))
            }
            (Endpoint::Admin, "/dashboard.css") => (Method::GET, &dashboard::style),
            (Endpoint::Admin, "/dashboard.js") => (Method::GET, &dashboard::script),
            (Endpoint::Admin, "/version") => (Method::GET, &|| json_answer(&dump::VERSION)),
            (Endpoint::Admin, "/config") => (Method::GET, &|| json_answer(&self.config)),
            (Endpoint::Admin, "/pods") => (Method::GET, &|| json_answer(&self.pods_view())),
            (Endpoint::Admin, "/logging") => (Method::POST, &|| {
                logging::answer(&self.logs, request.uri().query().unwrap_or_default())
            }),
            (Endpoint::Admin, "/quitquitquit") => (Method::POST, &|| {
                self.quit.cancel();
                text(StatusCode::OK, "shutdown now\n")
            }),
            _ => return text(StatusCode::NOT_FOUND, "no such path\n"),
        };
        if *request.method() == allowed {
            answer()
        } else {
            method_not_allowed(&allowed)
        }
    }

    /// What the agent still waits for. Pods whose capture failed are not among it: one of them must not make the node unready
    /// for all others. They are in `/pods` and in the metrics.
    fn pending(&self) -> Vec<String> {
        let mut pending = Vec::new();
        if !self.pods.borrow().synced {
            pending.push("workload proxy manager".to_owned());
        }
        let awaited = self.awaited.borrow();
        if !awaited.is_empty() {
            // ztunnel's name of it, and what it waits for.
            pending.push(format!("state manager (no {} yet)", awaited.join(", no ")));
        }
        let unknown = self.directory.as_ref().map(|directory| directory.awaited());
        if let Some(unknown) = unknown.filter(|unknown| !unknown.is_empty()) {
            pending.push(format!("Kubernetes (no {} yet)", unknown.join(", no ")));
        }
        if let Some(Err(why)) = self.cni.as_ref().map(|cni| cni.borrow().clone()) {
            pending.push(format!("CNI plugin not installed yet: {why}"));
        }
        if self.stopping.is_cancelled() {
            pending.push("shutdown".to_owned());
        }
        pending.sort();
        pending
    }

    fn readiness(&self) -> Answer {
        let pending = self.pending();
        if pending.is_empty() {
            return text(StatusCode::OK, "ready\n");
        }
        text(
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("not ready, pending: {}\n", pending.join(", ")),
        )
    }

    fn pods_view(&self) -> PodsView {
        let pending = self.pending();
        let status = self.pods.borrow().clone();
        PodsView {
            ready: pending.is_empty(),
            pending,
            backend: self.backend.to_owned(),
            cni_plugin: self.cni.as_ref().and_then(|cni| cni.borrow().clone().ok()),
            probes: self.probers.borrow().clone(),
            missed: self.missed.borrow().clone(),
            status,
        }
    }
}

const INDEX: &str = "\
GET  /                the dashboard, for browsers
GET  /pods            pods and their capture state
GET  /connections     what is open; ?pod=NAMESPACE/NAME, ?limit=N
GET  /flows           what has ended; ?after=NEXT&wait=SECONDS waits for more
GET  /certificates    identities, their certificates, and revocation lists
GET  /version         what was built
GET  /config          the settings in force
GET  /config_dump     everything, as istioctl ztunnel-config reads it
GET  /metrics         counters
GET  /healthz/ready   readiness
GET  /healthz/live    whether it answers
POST /logging         log level; ?level=LEVEL or ?level=MODULE=LEVEL,... changes it, ?reset undoes that
POST /quitquitquit    stop the agent
";

/// A profiler within would interrupt, by signals, the threads that carry everybody's connections.
const NO_PROFILE: &str = "\
there is no profiler in the agent; on the node, as root, this sees it with the kernel's share:
  perf record -F 99 -g -p $(pgrep -x redirector) -- sleep 10
";

const NO_HEAP: &str = "\
the allocator keeps no profile; on the node, as root, these tell how much memory is in use, and who asks for it:
  grep -E 'Rss|Swap' /proc/$(pgrep -x redirector)/smaps_rollup
  perf trace -e brk,mmap,munmap -p $(pgrep -x redirector)
";

/// An answer that takes a while to make: not on a thread that carries connections.
async fn blocking(make: impl FnOnce() -> Answer + Send + 'static) -> Answer {
    let made = tokio::task::spawn_blocking(make).await;
    made.unwrap_or_else(|error| text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")))
}

fn json_answer(value: &impl Serialize) -> Answer {
    match serde_json::to_string_pretty(value) {
        Ok(mut body) => {
            body.push('\n');
            let mut answer = text(StatusCode::OK, body);
            answer
                .headers_mut()
                .insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
            answer
        }
        Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
    }
}

#[cfg(test)]
mod tests;
