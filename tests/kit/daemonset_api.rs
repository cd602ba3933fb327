//! The part of Kubernetes' API that an agent asks at its end: its own DaemonSet, and the labels of its node.

use std::{
    fs,
    net::{Ipv4Addr, TcpListener},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use serde_json::{Value, json};
use tokio::{runtime::Runtime, sync::watch};

use crate::{
    api_server::{Answer, Responder, kubeconfig, serve, status, unauthorized},
    grpc::Credentials,
    netns::Namespace,
};

/// Names of the DaemonSet, its namespace, and the node.
pub const DAEMONSET: &str = "redirector";
/// Its namespace.
pub const NAMESPACE: &str = "redirector-system";
/// The node, whose labels are `mesh=on` and `os=linux`.
pub const NODE: &str = "node-a";

/// Time that its threads have to end.
const STOP_DEADLINE: Duration = Duration::from_secs(5);

/// How the API server answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mood {
    /// The DaemonSet is there, for all nodes.
    There,
    /// For nodes with this value of the label `mesh`.
    For(&'static str),
    /// It is being deleted.
    Going,
    /// It is not there.
    Gone,
    /// Nobody may ask.
    Forbidding,
    /// The token is no longer good.
    Unauthorized,
    /// The server has a fault.
    Faulty,
    /// It takes requests and does not answer.
    Silent,
}

/// An API server.
#[derive(Debug)]
pub struct DaemonSetApi {
    mood: watch::Sender<Mood>,
    answered: Arc<AtomicUsize>,
    kubeconfig: PathBuf,
    runtime: Option<Runtime>,
}

impl DaemonSetApi {
    /// Starts one in `ns`; its files are in `directory`.
    ///
    /// # Panics
    /// When it cannot.
    pub fn start(ns: &Namespace, directory: &Path, mood: Mood) -> Self {
        let credentials = Credentials::create(directory, "kubernetes");
        let listener = ns.run(|| TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).unwrap();
        let path = directory.join("kubeconfig");
        fs::write(&path, kubeconfig(listener.local_addr().unwrap(), &credentials)).unwrap();
        let (mood, moods) = watch::channel(mood);
        let answered = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&answered);
        let responder: Responder = Arc::new(move |head, _, is_known| {
            let answer = is_known.then(|| answer(*moods.borrow(), head.uri.path()));
            count.fetch_add(1, Ordering::Relaxed);
            answer.unwrap_or_else(|| Some(unauthorized()))
        });
        Self {
            mood,
            answered,
            kubeconfig: path,
            runtime: Some(serve(listener, &credentials, responder)),
        }
    }

    /// From now on.
    pub fn set(&self, mood: Mood) {
        self.mood.send_replace(mood);
    }

    /// How often it was asked.
    pub fn asked(&self) -> usize {
        self.answered.load(Ordering::Relaxed)
    }

    /// Nobody listens any more.
    pub fn stop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(STOP_DEADLINE);
        }
    }

    /// The settings of an agent that is of the DaemonSet.
    pub fn environment(&self) -> Vec<(String, String)> {
        [
            ("KUBECONFIG", self.kubeconfig.display().to_string()),
            ("POD_NAMESPACE", NAMESPACE.to_owned()),
            ("POD_NAME", format!("{DAEMONSET}-x7k2p")),
            ("NODE_NAME", NODE.to_owned()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into()
    }
}

impl Drop for DaemonSetApi {
    fn drop(&mut self) {
        self.stop();
    }
}

fn answer(mood: Mood, path: &str) -> Option<Answer> {
    let daemonset = format!("/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/{DAEMONSET}");
    if path == format!("/api/v1/nodes/{NODE}") {
        return Some((200, node()));
    }
    if path != daemonset {
        return Some(status(404, "NotFound", &format!("nothing is at {path}")));
    }
    let failure = |code, reason: &str| {
        Some(status(
            code,
            reason,
            &format!("daemonsets.apps {DAEMONSET:?}: {reason}"),
        ))
    };
    match mood {
        Mood::There => Some((200, object(None, false))),
        Mood::For(value) => Some((200, object(Some(value), false))),
        Mood::Going => Some((200, object(None, true))),
        Mood::Gone => failure(404, "NotFound"),
        Mood::Forbidding => failure(403, "Forbidden"),
        Mood::Unauthorized => Some(unauthorized()),
        Mood::Faulty => failure(503, "ServiceUnavailable"),
        Mood::Silent => None,
    }
}

fn node() -> Value {
    json!({
        "kind": "Node", "apiVersion": "v1",
        "metadata": { "name": NODE, "labels": { "os": "linux", "mesh": "on" } },
    })
}

fn object(mesh: Option<&str>, is_going: bool) -> Value {
    let mut selector = json!({ "os": "linux" });
    if let Some(mesh) = mesh {
        selector["mesh"] = mesh.into();
    }
    let mut object = json!({
        "kind": "DaemonSet", "apiVersion": "apps/v1",
        "metadata": { "name": DAEMONSET, "namespace": NAMESPACE, "uid": "uid-1" },
        "spec": {
            "selector": { "matchLabels": { "app": DAEMONSET } },
            "template": {
                "metadata": { "labels": { "app": DAEMONSET } },
                "spec": { "containers": [{ "name": "agent" }], "nodeSelector": selector },
            },
        },
    });
    if is_going {
        object["metadata"]["deletionTimestamp"] = "2026-01-02T03:04:05Z".into();
    }
    object
}
