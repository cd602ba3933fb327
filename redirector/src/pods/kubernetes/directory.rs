//! What is known of this node's pods and of all namespaces, and whether a pod is in the mesh.
//!
//! `watch` fills it; whoever reads it is woken by each change.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    sync::watch,
    time::{Instant, timeout_at},
};

use super::enablement::{Enablement, Labels, Left};
pub use super::pod::KnownPod;
use crate::mesh::pod::PodUid;

/// Time for a pod to become known: kubelet has it from the API server, and begins before the watch may have told us.
const KNOWN_DEADLINE: Duration = Duration::from_secs(5);

/// The pods of this node, and the namespaces.
#[derive(Debug)]
pub struct Directory {
    enablement: Enablement,
    /// The annotation that tells of a pod's capture.
    annotation: String,
    state: Mutex<State>,
    /// Counts the changes.
    changed: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct State {
    /// `None` until all have been told once.
    pods: Option<BTreeMap<PodUid, Arc<KnownPod>>>,
    namespaces: Option<BTreeMap<String, Labels>>,
}

/// A pod, and whether it is in the mesh.
#[derive(Debug, Clone)]
pub struct Decided {
    /// The pod.
    pub pod: Arc<KnownPod>,
    /// Why it is not.
    pub left: Option<Left>,
}

/// Why nothing can be said of a pod.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Unknown {
    /// The API server has not told of all yet.
    #[error(
        "the API server of Kubernetes has not told of the {0} yet: the pod is tried again; if it goes on, see the agent's log"
    )]
    NotSynced(&'static str),
    /// It knows no such pod.
    #[error(
        "the API server of Kubernetes knows no such pod on this node (NODE_NAME): the pod is tried again, and not let through while that is so"
    )]
    Pod,
    /// It knows no such namespace.
    #[error("the API server of Kubernetes knows no namespace {0}: the pod is tried again")]
    Namespace(String),
}

impl Directory {
    /// An empty one.
    pub(super) fn new(enablement: Enablement, annotation: String) -> Self {
        Self {
            enablement,
            annotation,
            state: Mutex::default(),
            changed: watch::Sender::default(),
        }
    }

    /// The annotation that tells of a pod's capture.
    pub(super) fn annotation(&self) -> &str {
        &self.annotation
    }

    /// Its value changes with each change.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// What has not been told yet.
    pub fn awaited(&self) -> Vec<&'static str> {
        let state = self.state();
        let missing = [
            (state.pods.is_none(), "pods"),
            (state.namespaces.is_none(), "namespaces"),
        ];
        missing
            .into_iter()
            .filter_map(|(is, what)| is.then_some(what))
            .collect()
    }

    /// The pod that a plugin tells of, and whether it is in the mesh. It is waited for, for some seconds. Of several pods of one name
    /// (an old one may still be going) the UID decides; without one only a pod that is not going will do.
    ///
    /// # Errors
    /// When it does not become known.
    pub async fn find(&self, namespace: &str, name: &str, uid: Option<&PodUid>) -> Result<Decided, Unknown> {
        let deadline = Instant::now() + KNOWN_DEADLINE;
        let mut changed = self.subscribe();
        loop {
            let found = self.look(namespace, name, uid);
            if found.is_ok() || !matches!(timeout_at(deadline, changed.changed()).await, Ok(Ok(()))) {
                return found;
            }
        }
    }

    fn look(&self, namespace: &str, name: &str, uid: Option<&PodUid>) -> Result<Decided, Unknown> {
        let state = self.state();
        let pods = state.pods.as_ref().ok_or(Unknown::NotSynced("pods"))?;
        let is_it = |pod: &&Arc<KnownPod>| {
            pod.info.namespace == namespace
                && pod.info.name == name
                && uid.map_or(!pod.ended && !pod.deleting, |uid| pod.has_uid(uid))
        };
        let pod = pods.values().find(is_it).ok_or(Unknown::Pod)?;
        let namespaces = state
            .namespaces
            .as_ref()
            .ok_or(Unknown::NotSynced("namespaces"))?;
        let labels = namespaces
            .get(namespace)
            .ok_or_else(|| Unknown::Namespace(namespace.to_owned()))?;
        Ok(self.decided(pod, labels))
    }

    /// All pods of which it can be said whether they are in the mesh; none while not all is known.
    pub fn pods(&self) -> Vec<Decided> {
        let state = self.state();
        let (Some(pods), Some(namespaces)) = (&state.pods, &state.namespaces) else {
            return Vec::new();
        };
        let decided = pods.values().filter_map(|pod| {
            let labels = namespaces.get(&pod.info.namespace)?;
            Some(self.decided(pod, labels))
        });
        decided.collect()
    }

    /// The UID by which a pod is known here, of the one that the node uses.
    pub fn uid_of(&self, uid: &PodUid) -> PodUid {
        let state = self.state();
        let mut pods = state.pods.iter().flat_map(BTreeMap::values);
        let known = pods.find(|pod| pod.local_uid.as_ref() == Some(uid));
        known.map_or_else(|| uid.clone(), |pod| pod.info.uid.clone())
    }

    /// The UID of the pod of this name that goes, as far as its name tells.
    pub fn going(&self, namespace: &str, name: &str) -> Option<PodUid> {
        let state = self.state();
        let pods = state.pods.iter().flat_map(BTreeMap::values);
        let named = pods.filter(|pod| pod.info.namespace == namespace && pod.info.name == name);
        let going = named.max_by_key(|pod| (pod.ended, pod.deleting));
        going.map(|pod| pod.info.uid.clone())
    }

    fn decided(&self, pod: &Arc<KnownPod>, labels: &Labels) -> Decided {
        Decided {
            left: self.enablement.decide(pod.candidate(), labels).err(),
            pod: Arc::clone(pod),
        }
    }

    /// From now on these are all pods.
    pub(super) fn replace_pods(&self, pods: BTreeMap<PodUid, Arc<KnownPod>>) {
        self.change(|state| state.pods = Some(pods));
    }

    /// A pod is new, or another than before.
    pub(super) fn put_pod(&self, pod: KnownPod) {
        self.change(|state| {
            if let Some(pods) = &mut state.pods {
                pods.insert(pod.info.uid.clone(), Arc::new(pod));
            }
        });
    }

    /// A pod is gone.
    pub(super) fn remove_pod(&self, uid: &PodUid) {
        self.change(|state| {
            if let Some(pods) = &mut state.pods {
                pods.remove(uid);
            }
        });
    }

    /// From now on these are all namespaces.
    pub(super) fn replace_namespaces(&self, namespaces: BTreeMap<String, Labels>) {
        self.change(|state| state.namespaces = Some(namespaces));
    }

    /// A namespace is new, or has other labels.
    pub(super) fn put_namespace(&self, name: String, labels: Labels) {
        self.change(|state| {
            if let Some(namespaces) = &mut state.namespaces {
                namespaces.insert(name, labels);
            }
        });
    }

    /// A namespace's labels were asked for; whether they are other than known.
    pub(super) fn learn_namespace(&self, name: &str, labels: &Labels) -> bool {
        let state = self.state();
        let known = state
            .namespaces
            .as_ref()
            .and_then(|namespaces| namespaces.get(name));
        let differ = known.is_none_or(|known| known != labels);
        drop(state);
        if differ {
            self.put_namespace(name.to_owned(), labels.clone());
        }
        differ
    }

    /// A namespace is gone.
    pub(super) fn remove_namespace(&self, name: &str) {
        self.change(|state| {
            if let Some(namespaces) = &mut state.namespaces {
                namespaces.remove(name);
            }
        });
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state());
        self.changed.send_modify(|count| *count += 1);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{super::pod::tests::pod, *};

    fn directory() -> Directory {
        let enablement = Enablement {
            selectors: "- podSelector: {matchLabels: {mesh: 'yes'}}".parse().unwrap(),
            excluded: Vec::new(),
            system: Vec::new(),
        };
        Directory::new(enablement, String::new())
    }

    fn full() -> Directory {
        let directory = directory();
        directory.replace_pods(BTreeMap::new());
        directory.replace_namespaces(BTreeMap::from([("shop".to_owned(), Labels::new())]));
        directory
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_is_waited_for_and_then_decided() {
        let directory = Arc::new(full());
        let found = directory.find("shop", "web", None).await;
        assert_eq!(found.unwrap_err(), Unknown::Pod);
        let (asking, telling) = (Arc::clone(&directory), Arc::clone(&directory));
        let asked = tokio::spawn(async move { asking.find("shop", "web", None).await });
        tokio::time::sleep(Duration::from_secs(1)).await;
        telling.put_pod(pod("web", json!({ "metadata": { "labels": { "mesh": "yes" } } })));
        assert_eq!(asked.await.unwrap().unwrap().left, None);
        telling.put_pod(pod("web", json!({})));
        let found = directory.find("shop", "web", None).await.unwrap();
        assert_eq!(found.left, Some(Left::Labels));
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_said_before_all_is_known() {
        let directory = directory();
        directory.put_pod(pod("web", json!({})));
        assert_eq!(directory.awaited(), ["pods", "namespaces"]);
        let found = directory.find("shop", "web", None).await;
        assert_eq!(found.unwrap_err(), Unknown::NotSynced("pods"));
        directory.replace_pods(BTreeMap::new());
        directory.put_pod(pod("web", json!({})));
        let found = directory.find("shop", "web", None).await;
        assert_eq!(found.unwrap_err(), Unknown::NotSynced("namespaces"));
        assert!(directory.pods().is_empty());
        directory.replace_namespaces(BTreeMap::new());
        let found = directory.find("shop", "web", None).await;
        assert_eq!(found.unwrap_err(), Unknown::Namespace("shop".to_owned()));
        assert!(directory.awaited().is_empty() && directory.pods().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_name_that_comes_back_is_another_pod() {
        let directory = full();
        let going = json!({ "metadata": { "uid": "a-old", "deletionTimestamp": "2026-01-01T00:00:00Z" } });
        directory.put_pod(pod("db-0", going));
        directory.put_pod(pod("db-0", json!({ "metadata": { "uid": "b-new" } })));
        let found = async |uid: Option<&str>| {
            let uid = uid.map(|uid| uid.parse().unwrap());
            let found = directory.find("shop", "db-0", uid.as_ref()).await;
            found.map(|found| found.pod.info.uid.to_string())
        };
        assert_eq!(found(None).await.unwrap(), "b-new");
        assert_eq!(directory.going("shop", "db-0").unwrap().as_str(), "a-old");
        assert_eq!(found(Some("a-old")).await.unwrap(), "a-old");
        assert_eq!(found(Some("c-newer")).await, Err(Unknown::Pod));
        directory.remove_pod(&"b-new".parse().unwrap());
        assert_eq!(found(None).await, Err(Unknown::Pod), "the next one is waited for");
    }

    #[test]
    fn a_static_pod_has_two_uids() {
        let directory = full();
        let mirror = json!({ "metadata": { "annotations": { "kubernetes.io/config.mirror": "hash" } } });
        directory.put_pod(pod("etcd", mirror));
        let of = |uid: &str| directory.uid_of(&uid.parse().unwrap()).to_string();
        assert_eq!((of("hash").as_str(), of("other").as_str()), ("uid-etcd", "other"));
    }
}
