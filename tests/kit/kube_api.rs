//! The part of Kubernetes' API that tells of pods and namespaces: lists in pages, watches with bookmarks, a past that ends, and merge
//! patches of a pod's status; and a server that can be told to fail. By hyper and JSON, after the API's reference ("API
//! Concepts": efficient detection of changes, resource versions).

use std::{
    collections::BTreeMap,
    fs,
    net::{Ipv4Addr, TcpListener},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use hyper::http::request::Parts;
use serde_json::{Value, json};
use tokio::{runtime::Runtime, sync::mpsc};

use crate::{
    api_server::{Body, StreamingResponder, kubeconfig, serve_streams, status, unauthorized},
    cluster::{Cluster, NODE},
    grpc::Credentials,
    node::{Family, Node, Pod},
};

/// Objects in one page of a list: so few that each list has several.
const PAGE: usize = 2;

/// Time that its threads have to end.
const STOP_DEADLINE: Duration = Duration::from_secs(5);

/// An API server.
#[derive(Debug)]
pub struct KubeApi {
    state: Arc<Mutex<State>>,
    kubeconfig: PathBuf,
    runtime: Option<Runtime>,
}

#[derive(Debug, Default)]
struct State {
    version: u64,
    /// By kind (`pods`, `namespaces`) and key.
    objects: BTreeMap<(&'static str, String), Value>,
    /// Changes by version; those up to `forgotten` are no more.
    past: Vec<(u64, &'static str, Value)>,
    forgotten: u64,
    watchers: Vec<(&'static str, mpsc::UnboundedSender<Value>)>,
    faulty: bool,
    lists: usize,
    patches: Vec<Value>,
}

impl Cluster for KubeApi {
    fn start(node: &Node) -> Self {
        let (ns, directory) = (&node.host.ns, node.directory());
        let credentials = Credentials::create(directory, "kubernetes");
        let listener = ns.run(|| TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).unwrap();
        let path = directory.join("kubeconfig");
        fs::write(&path, kubeconfig(listener.local_addr().unwrap(), &credentials)).unwrap();
        let state = Arc::new(Mutex::new(State::default()));
        let responder = Arc::clone(&state);
        let responder: StreamingResponder = Arc::new(move |head, body, is_known| {
            let (code, body) = match is_known {
                true => return Some(lock(&responder).answer(head, &body)),
                false => unauthorized(),
            };
            Some((code, Body::Whole(body)))
        });
        let api = Self {
            runtime: Some(serve_streams(listener, &credentials, responder)),
            state,
            kubeconfig: path,
        };
        api.namespace("demo", &json!({}));
        api
    }

    fn namespace(&self, name: &str, labels: &Value) {
        let object = json!({ "metadata": { "name": name, "uid": format!("ns-{name}"), "labels": labels } });
        self.state().put("namespaces", name.to_owned(), object);
    }

    fn pod(&self, pod: &mut Pod, more: Value) {
        let mut object = object(pod);
        object["metadata"]["uid"] = pod.uid.as_str().into();
        merge(&mut object, more);
        self.state().put("pods", key(pod), object);
    }

    fn change(&self, pod: &Pod, patch: Value) {
        let mut state = self.state();
        let mut object = state.objects[&("pods", key(pod))].clone();
        merge(&mut object, patch);
        state.put("pods", key(pod), object);
    }

    fn replace(&self, old: &Pod, new: &mut Pod, more: Value) {
        self.change(
            old,
            json!({ "metadata": { "deletionTimestamp": "2026-01-01T00:00:00Z" } }),
        );
        self.delete(old);
        self.pod(new, more);
    }

    fn delete(&self, pod: &Pod) {
        self.state().delete(&key(pod));
    }

    fn annotation(&self, pod: &Pod, name: &str) -> Option<String> {
        let state = self.state();
        let object = state.objects.get(&("pods", key(pod)))?;
        Some(object["metadata"]["annotations"][name].as_str()?.to_owned())
    }

    fn patches(&self) -> Vec<Value> {
        self.state().patches.clone()
    }

    fn environment(&self) -> Vec<(String, String)> {
        environment(&self.kubeconfig)
    }
}

/// The settings of an agent that asks the server of this kubeconfig.
pub(crate) fn environment(kubeconfig: &Path) -> Vec<(String, String)> {
    [
        ("KUBECONFIG", kubeconfig.display().to_string()),
        ("KUBERNETES_PODS", "true".to_owned()),
        ("NODE_NAME", NODE.to_owned()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into()
}

/// A pod that runs, as it is told of.
pub(crate) fn object(pod: &Pod) -> Value {
    let ips: Vec<_> = Family::BOTH
        .iter()
        .map(|family| json!({ "ip": pod.ip(*family) }))
        .collect();
    json!({
        "kind": "Pod", "apiVersion": "v1",
        "metadata": { "name": pod.name, "namespace": pod.namespace, "labels": {}, "annotations": {} },
        "spec": {
            "nodeName": NODE, "serviceAccountName": pod.name,
            "containers": [{ "name": "app", "image": "app" }],
        },
        "status": { "phase": "Running", "podIP": pod.ip(Family::V4), "podIPs": ips },
    })
}

impl KubeApi {
    /// Gives a namespace these labels, of which no watch tells, as if their connections were dead.
    ///
    /// # Panics
    /// When there is no such namespace.
    pub fn namespace_untold(&self, name: &str, labels: &Value) {
        let mut state = self.state();
        let object = state.objects.get_mut(&("namespaces", name.to_owned()));
        object.expect("a namespace that was made")["metadata"]["labels"] = labels.clone();
    }

    /// How often something was listed from the beginning.
    pub fn lists(&self) -> usize {
        self.state().lists
    }

    /// Whether all requests fail from now on. Watches end.
    pub fn set_faulty(&self, faulty: bool) {
        let mut state = self.state();
        state.faulty = faulty;
        state.watchers.clear();
    }

    /// Ends all watches, as the server does now and then.
    pub fn cut(&self) {
        self.state().watchers.clear();
    }

    /// Tells all who watch how far they are.
    pub fn bookmark(&self) {
        let mut state = self.state();
        let version = state.version.to_string();
        state.watchers.retain(|(kind, watcher)| {
            let object = json!({
                "kind": kind_of(kind), "apiVersion": "v1", "metadata": { "resourceVersion": version },
            });
            watcher
                .send(json!({ "type": "BOOKMARK", "object": object }))
                .is_ok()
        });
    }

    /// Ends all watches, and forgets what there was to watch: who asks for it is told to list.
    pub fn forget(&self) {
        let mut state = self.state();
        // An unseen change, so that nobody is up to date.
        state.version += 1;
        state.forgotten = state.version;
        state.past.clear();
        state.watchers.clear();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl Drop for KubeApi {
    fn drop(&mut self) {
        self.state().watchers.clear();
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(STOP_DEADLINE);
        }
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().expect("nobody panics with it")
}

fn key(pod: &Pod) -> String {
    format!("{}/{}", pod.namespace, pod.name)
}

fn kind_of(plural: &str) -> &'static str {
    if plural == "pods" { "Pod" } else { "Namespace" }
}

/// RFC 7386.
pub(crate) fn merge(into: &mut Value, patch: Value) {
    let Value::Object(patch) = patch else {
        *into = patch;
        return;
    };
    if !into.is_object() {
        *into = json!({});
    }
    for (key, value) in patch {
        let object = into.as_object_mut().expect("it is one now");
        match value {
            Value::Null => drop(object.remove(&key)),
            value => merge(object.entry(key).or_insert(Value::Null), value),
        }
    }
}

impl State {
    fn put(&mut self, kind: &'static str, key: String, mut object: Value) {
        object["kind"] = kind_of(kind).into();
        object["apiVersion"] = "v1".into();
        let is_new = !self.objects.contains_key(&(kind, key.clone()));
        self.tell(kind, if is_new { "ADDED" } else { "MODIFIED" }, &mut object);
        self.objects.insert((kind, key), object);
    }

    fn delete(&mut self, key: &str) {
        if let Some(mut object) = self.objects.remove(&("pods", key.to_owned())) {
            self.tell("pods", "DELETED", &mut object);
        }
    }

    fn tell(&mut self, kind: &'static str, what: &str, object: &mut Value) {
        self.version += 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        let event = json!({ "type": what, "object": object });
        self.watchers
            .retain(|(watched, watcher)| *watched != kind || watcher.send(event.clone()).is_ok());
        self.past.push((self.version, kind, event));
    }

    fn answer(&mut self, head: &Parts, body: &Value) -> (u16, Body) {
        let whole = |(code, body)| (code, Body::Whole(body));
        if self.faulty {
            return whole(status(503, "ServiceUnavailable", "so told by the test"));
        }
        let query: BTreeMap<&str, &str> = head
            .uri
            .query()
            .unwrap_or_default()
            .split('&')
            .filter_map(|pair| pair.split_once('='))
            .collect();
        let path: Vec<&str> = head.uri.path().trim_matches('/').split('/').collect();
        let kind = match (head.method.as_str(), path.as_slice()) {
            ("GET", ["api", "v1", "namespaces"]) => "namespaces",
            ("GET", ["api", "v1", "namespaces", name]) => {
                let found = self.objects.get(&("namespaces", (*name).to_owned()));
                return whole(found.map_or_else(
                    || status(404, "NotFound", "no such namespace"),
                    |object| (200, object.clone()),
                ));
            }
            // Only this node's pods may be asked for: all pods of a cluster are many.
            ("GET", ["api", "v1", "pods"])
                if query.get("fieldSelector").is_some_and(|selector| {
                    *selector == format!("spec.nodeName={NODE}")
                        || *selector == format!("spec.nodeName%3D{NODE}")
                }) =>
            {
                "pods"
            }
            ("PATCH", ["api", "v1", "namespaces", namespace, "pods", name, "status"])
                if head
                    .headers
                    .get("content-type")
                    .is_some_and(|kind| kind == "application/merge-patch+json") =>
            {
                return whole(self.patch(&format!("{namespace}/{name}"), body));
            }
            (method, _) => {
                let text = format!("{method} {} is not for agents", head.uri);
                return whole(status(403, "Forbidden", &text));
            }
        };
        if matches!(query.get("watch"), Some(&"true" | &"1")) {
            let since = query.get("resourceVersion").and_then(|text| text.parse().ok());
            return (200, Body::Stream(self.watch(kind, since.unwrap_or(0))));
        }
        whole(self.list(kind, query.get("continue").copied()))
    }

    /// A page. Its token has the version of the first, from which a watch goes on, and where the next begins.
    fn list(&mut self, kind: &'static str, token: Option<&str>) -> (u16, Value) {
        let token = token.and_then(|token| token.split_once('.'));
        let (version, from) = match token {
            Some((version, from)) => (version.to_owned(), from.parse().unwrap_or(0)),
            None => (self.version.to_string(), 0),
        };
        self.lists += usize::from(from == 0);
        let all: Vec<&Value> = self
            .objects
            .iter()
            .filter(|((of, _), _)| *of == kind)
            .map(|(_, object)| object)
            .collect();
        let page: Vec<_> = all.iter().skip(from).take(PAGE).collect();
        let mut metadata = json!({ "resourceVersion": version });
        if from + PAGE < all.len() {
            metadata["continue"] = format!("{version}.{}", from + PAGE).into();
        }
        let list = json!({ "kind": format!("{}List", kind_of(kind)), "apiVersion": "v1", "metadata": metadata, "items": page });
        (200, list)
    }

    fn watch(&mut self, kind: &'static str, since: u64) -> mpsc::UnboundedReceiver<Value> {
        let (sender, receiver) = mpsc::unbounded_channel();
        if since < self.forgotten {
            let (_, gone) = status(410, "Expired", "too old resource version");
            let _ = sender.send(json!({ "type": "ERROR", "object": gone }));
            return receiver;
        }
        let missed = self
            .past
            .iter()
            .filter(|(version, of, _)| *version > since && *of == kind);
        for (_, _, event) in missed {
            let _ = sender.send(event.clone());
        }
        self.watchers.push((kind, sender));
        receiver
    }

    fn patch(&mut self, key: &str, patch: &Value) -> (u16, Value) {
        let Some(mut object) = self.objects.get(&("pods", key.to_owned())).cloned() else {
            return status(404, "NotFound", &format!("pods {key:?} not found"));
        };
        self.patches.push(patch.clone());
        let uid = &patch["metadata"]["uid"];
        if !uid.is_null() && *uid != object["metadata"]["uid"] {
            return status(409, "Conflict", "the UID in the precondition is another");
        }
        merge(&mut object, patch.clone());
        self.put("pods", key.to_owned(), object.clone());
        (200, object)
    }
}
