//! The part of Kubernetes' API by which an agent knows whether it is uninstalled: its own DaemonSet, to get, list and watch, and the
//! labels of its node.

use std::{
    fs,
    net::{Ipv4Addr, TcpListener},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use serde_json::{Value, json};
use tokio::{runtime::Runtime, sync::mpsc};

use crate::{
    api_server::{Answer, Body, StreamingResponder, kubeconfig, serve_streams, status, unauthorized},
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
    state: Arc<Mutex<State>>,
    kubeconfig: PathBuf,
    runtime: Option<Runtime>,
}

#[derive(Debug)]
struct State {
    mood: Mood,
    asked: usize,
    watchers: Vec<mpsc::UnboundedSender<Value>>,
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
        let state = Arc::new(Mutex::new(State {
            mood,
            asked: 0,
            watchers: Vec::new(),
        }));
        let responder = Arc::clone(&state);
        let responder: StreamingResponder = Arc::new(move |head, _, is_known| {
            let mut state = lock(&responder);
            state.asked += 1;
            let whole = |(code, body)| Some((code, Body::Whole(body)));
            if !is_known {
                return whole(unauthorized());
            }
            let path = head.uri.path();
            let query = head.uri.query().unwrap_or_default();
            if path == COLLECTION && query.contains("watch=true") && state.mood.is_told() {
                let (sender, events) = mpsc::unbounded_channel();
                state.watchers.push(sender);
                return Some((200, Body::Stream(events)));
            }
            // Whoever may see one alone may list it alone.
            let selector = query.contains(&format!("metadata.name%3D{DAEMONSET}"))
                || query.contains(&format!("metadata.name={DAEMONSET}"));
            whole(answer(state.mood, path, selector)?)
        });
        Self {
            runtime: Some(serve_streams(listener, &credentials, responder)),
            state,
            kubeconfig: path,
        }
    }

    /// From now on. Who watches is told of what becomes of the DaemonSet; refusals and silence are for new requests.
    pub fn set(&self, mood: Mood) {
        let mut state = lock(&self.state);
        state.mood = mood;
        let (what, object) = match mood {
            Mood::There => ("MODIFIED", object(None, false)),
            Mood::For(value) => ("MODIFIED", object(Some(value), false)),
            Mood::Going => ("MODIFIED", object(None, true)),
            Mood::Gone => ("DELETED", object(None, false)),
            _ => return,
        };
        let event = json!({ "type": what, "object": object });
        state
            .watchers
            .retain(|watcher| watcher.send(event.clone()).is_ok());
    }

    /// How often it was asked.
    pub fn asked(&self) -> usize {
        lock(&self.state).asked
    }

    /// Nobody listens any more.
    pub fn stop(&mut self) {
        lock(&self.state).watchers.clear();
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

impl Mood {
    /// Whether it is an answer about the DaemonSet.
    fn is_told(self) -> bool {
        matches!(self, Self::There | Self::For(_) | Self::Going | Self::Gone)
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().expect("nobody panics with it")
}

const COLLECTION: &str = "/apis/apps/v1/namespaces/redirector-system/daemonsets";

fn answer(mood: Mood, path: &str, is_for_one: bool) -> Option<Answer> {
    if path == format!("/api/v1/nodes/{NODE}") {
        return Some((200, node()));
    }
    let lists = path == COLLECTION && is_for_one;
    if !lists && path != format!("{COLLECTION}/{DAEMONSET}") {
        return Some(status(403, "Forbidden", &format!("{path} is not for agents")));
    }
    if lists && mood.is_told() {
        let items: Vec<Value> = answer(mood, &format!("{COLLECTION}/{DAEMONSET}"), false)
            .filter(|(code, _)| *code == 200)
            .map(|(_, object)| object)
            .into_iter()
            .collect();
        let list = json!({
            "kind": "DaemonSetList", "apiVersion": "apps/v1", "metadata": { "resourceVersion": "1" }, "items": items,
        });
        return Some((200, list));
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
        "metadata": { "name": DAEMONSET, "namespace": NAMESPACE, "uid": "uid-1", "resourceVersion": "1" },
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
