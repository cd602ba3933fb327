//! What operators and probes ask of a running agent: admin (loopback), metrics, readiness.
//!
//! `app` builds an [`Admin`] and serves it; `client` is the other side, for `redirector status`.

use std::{fmt::Write as _, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderValue, Method, Request, StatusCode, header};
use prometheus_client::registry::Registry;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::watch};
use tokio_util::sync::CancellationToken;

use crate::{
    identity::store::Store,
    mesh::index::Mesh,
    pods::{
        kubernetes::{Missed, directory::Directory},
        status::{State, Status},
    },
    proxy::flows::Flows,
    redirect::probers::View,
    serve::{Answer, Limits, Listener, method_not_allowed, serve, text},
    telemetry::{Chain, logs, metrics},
};

pub mod client;
mod flows;
mod origin;

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
    pub registry: Registry,
    /// The log level.
    pub logs: logs::Control,
    /// Name of the backend.
    pub backend: &'static str,
    /// The settings, without secrets.
    pub config: Value,
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
        match flows::answer(self, endpoint, request).await {
            Some(answer) => answer,
            None => self.handle(endpoint, request),
        }
    }

    fn handle(&self, endpoint: Endpoint, request: &Request<Bytes>) -> Answer {
        let (allowed, answer): (Method, &dyn Fn() -> Answer) = match (endpoint, request.uri().path()) {
            (Endpoint::Admin | Endpoint::Metrics, "/metrics" | "/stats/prometheus") => {
                (Method::GET, &|| self.metrics())
            }
            (Endpoint::Admin | Endpoint::Readiness, "/healthz/ready") => (Method::GET, &|| self.readiness()),
            // Being able to answer is all it says: what the agent waits for is no reason to start it anew.
            (Endpoint::Admin | Endpoint::Readiness, "/healthz/live") => {
                (Method::GET, &|| text(StatusCode::OK, "alive\n"))
            }
            (Endpoint::Admin, "/") => (Method::GET, &|| text(StatusCode::OK, INDEX)),
            (Endpoint::Admin, "/pods") => (Method::GET, &|| json_answer(&self.pods_view())),
            (Endpoint::Admin, "/config_dump") => (Method::GET, &|| json_answer(&self.dump())),
            (Endpoint::Admin, "/logging") => (Method::POST, &|| self.logging(request.uri().query())),
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

    fn metrics(&self) -> Answer {
        let mut answer = text(StatusCode::OK, metrics::text(&self.registry));
        answer.headers_mut().insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static(metrics::CONTENT_TYPE),
        );
        answer
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

    fn dump(&self) -> Value {
        let (workloads, services) = self.mesh.borrow().len();
        json!({
            "version": { "version": env!("CARGO_PKG_VERSION") },
            "workloads": workloads,
            "services": services,
            "pods": self.pods_view(),
            "certificates": self.identities.states(),
            "revocations": self.identities.revocations(),
            "config": self.config,
        })
    }

    /// `?level=` sets the level, as does `?MODULE=LEVEL,...`; with neither the present one is told.
    fn logging(&self, query: Option<&str>) -> Answer {
        let wanted = match query.unwrap_or_default() {
            "" => None,
            "reset" => Some(logs::Filter::default().to_string()),
            query => Some(
                query
                    .strip_prefix("level=")
                    .unwrap_or(query)
                    .replace("%3D", "=")
                    .replace("%2C", ","),
            ),
        };
        if let Some(wanted) = wanted {
            match wanted.parse() {
                Ok(filter) => self.logs.set_filter(&filter),
                Err(error) => return text(StatusCode::BAD_REQUEST, format!("{}\n", Chain(&error))),
            }
        }
        text(
            StatusCode::OK,
            format!("current log level is {}\n", self.logs.filter()),
        )
    }
}

const INDEX: &str = "\
GET  /pods            pods and their capture state
GET  /connections     what is open; ?pod=NAMESPACE/NAME, ?limit=N
GET  /flows           what has ended; ?after=NEXT&wait=SECONDS waits for more
GET  /config_dump     mesh, pods and settings
GET  /metrics         counters
GET  /healthz/ready   readiness
GET  /healthz/live    whether it answers
POST /logging         log level; ?level=LEVEL sets it
POST /quitquitquit    stop the agent
";

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

/// The state of an agent as `redirector status` prints it.
pub fn render(address: SocketAddr, view: &PodsView, metrics: &str) -> String {
    let mut out = String::new();
    // Writing to a String does not fail.
    let ready = if view.ready {
        "ready".to_owned()
    } else {
        format!("not ready: {}", view.pending.join(", "))
    };
    let _ = writeln!(
        out,
        "agent at {address}: {ready}; backend {}; pods {}",
        view.backend,
        view.status.pods.len()
    );
    if let Some(file) = &view.cni_plugin {
        let _ = writeln!(out, "CNI plugin installed in {}", file.display());
    }
    if let Some(probes) = &view.probes {
        let _ = writeln!(
            out,
            "connections from this node that reach the pods directly: {probes}"
        );
    }
    for pod in &view.status.pods {
        let state = match pod.state {
            State::Starting => "starting",
            State::Captured => "captured",
            State::NotCaptured => "NOT CAPTURED",
            State::Stopping => "stopping",
        };
        let addresses: Vec<_> = pod.addresses.iter().map(ToString::to_string).collect();
        let (namespace, name) = (&pod.namespace, &pod.name);
        let _ = write!(
            out,
            "  {namespace}/{name}  {state}  {}  sa {}",
            addresses.join(","),
            pod.service_account
        );
        let _ = write!(out, "  uid {}  net:[{}]", pod.uid, pod.netns);
        let _ = write!(out, "{}", if pod.strict { "  strict" } else { "" });
        let _ = match &pod.error {
            Some(error) => writeln!(out, "  {error}"),
            None => writeln!(out),
        };
    }
    for pod in &view.missed {
        let Missed {
            uid,
            namespace,
            name,
            error,
        } = pod;
        let _ = writeln!(out, "  {namespace}/{name}  NOT CAPTURED  uid {uid}  {error}");
    }
    let _ = writeln!(out, "counters that are not zero:");
    let told = |line: &&str| !line.starts_with('#') && !line.is_empty() && !line.ends_with(" 0");
    for line in metrics.lines().filter(told) {
        let _ = writeln!(out, "  {line}");
    }
    out
}

#[cfg(test)]
mod tests;
