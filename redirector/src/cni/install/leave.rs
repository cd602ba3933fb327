//! Whether an agent that stops is to take everything away: it is uninstalled; or to leave all as it is: another comes.
//!
//! The API of Kubernetes tells: the agent's DaemonSet is gone, goes, or no longer wants a pod on this node. Who cannot be asked
//! says nothing, and everything stays: pods that are started meanwhile wait for an agent, and none runs outside the mesh
//! unnoticed.
//!
//! Whoever uninstalls takes the agent's rights away too, and may do so before the agent is stopped; but a token is no longer good
//! either where the agent's own pod was deleted by force, or where the API server is in trouble. So the DaemonSet is watched while
//! the agent runs, and a refusal at the end counts only where it was seen to go. Absence counts only of what was seen.

use std::{
    collections::BTreeMap,
    pin::pin,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use futures_util::StreamExt as _;
use k8s_openapi::api::{apps::v1::DaemonSet, core::v1::Node};
use kube::{Api, Client, runtime::watcher};
use serde::Serialize;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use self::selection::Wanted;
use crate::{
    control_plane::{
        self,
        kubernetes::{Cluster, Kubernetes},
    },
    telemetry::Chain,
};

mod selection;

/// Time for the answer, retries included. The pods' connections get the rest of what Kubernetes gives an agent that stops.
const DEADLINE: Duration = Duration::from_secs(5);

/// Time between two tries at the end, and while the agent runs.
const RETRIES: (Duration, Duration) = (Duration::from_millis(300), Duration::from_secs(30));

/// The agent's own DaemonSet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Config {
    /// The cluster it is of.
    #[serde(serialize_with = "as_text")]
    pub cluster: Cluster,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// The node that this agent runs on.
    pub node: String,
}

fn as_text<S: serde::Serializer>(cluster: &Cluster, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(cluster)
}

/// Asks for the agent's DaemonSet.
#[derive(Debug)]
pub struct Owner {
    config: Config,
    kubernetes: Kubernetes,
    seen: Mutex<Seen>,
}

/// What was seen of the DaemonSet last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Seen {
    /// It was never there.
    Never,
    /// It is there.
    There,
    /// It goes, or is gone.
    Going,
}

/// What is known of the DaemonSet.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Answer {
    /// It is there, and wants a pod on this node.
    Wanted,
    /// It goes, or does not want one.
    Unwanted(String),
    /// It is not there.
    Absent,
    /// We may not ask.
    Refused(String),
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("Kubernetes' API cannot be asked")]
    Setup(#[from] control_plane::Error),
    #[error("Kubernetes' API does not answer as it should")]
    Asking(#[from] kube::Error),
    #[error("the watch of Kubernetes' API fails")]
    Watching(#[source] watcher::Error),
    #[error("Kubernetes' API does not answer in time")]
    Late,
}

impl Owner {
    /// Of this configuration. Asks nothing yet.
    pub fn new(config: Config) -> Self {
        Self {
            kubernetes: Kubernetes::new(config.cluster.clone()),
            config,
            seen: Mutex::new(Seen::Never),
        }
    }

    /// Watches it until `stop`, so that a refusal at the end can be understood.
    pub async fn follow(&self, stop: &CancellationToken) {
        let following = async {
            let mut was_warned = false;
            loop {
                let error = match self.watch(&mut was_warned).await {
                    Ok(()) => "the watch has ended".to_owned(),
                    Err(error) => Chain(&error).to_string(),
                };
                debug!(error, "the agent's DaemonSet cannot be watched; trying again");
                sleep(RETRIES.1).await;
            }
        };
        tokio::select! { () = following => {}, () = stop.cancelled() => {} }
    }

    /// Until something fails; the next one begins with what is there then.
    async fn watch(&self, was_warned: &mut bool) -> Result<(), Failure> {
        let client = self.kubernetes.client().await?;
        let api: Api<DaemonSet> = Api::namespaced(client, &self.config.namespace);
        let mut states = pin!(watcher::watch_object(api, &self.config.name));
        let (daemonset, namespace) = (&self.config.name, &self.config.namespace);
        while let Some(state) = states.next().await {
            let is_there = state
                .map_err(Failure::Watching)?
                .is_some_and(|daemonset| daemonset.metadata.deletion_timestamp.is_none());
            match (self.see(is_there), is_there) {
                (Seen::Never, false) if !*was_warned => {
                    *was_warned = true;
                    warn!(
                        daemonset,
                        namespace,
                        "there is no such DaemonSet: until there is, a stop of this agent is taken for a restart; --daemonset must be \
                         the name of its own"
                    );
                }
                (Seen::There, false) => info!(daemonset, namespace, "the agent's DaemonSet goes"),
                (Seen::Never | Seen::Going, true) => {
                    debug!(daemonset, namespace, "the agent's DaemonSet is known");
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Notes how it is, and tells what was seen before.
    fn see(&self, is_there: bool) -> Seen {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let before = *seen;
        *seen = match (before, is_there) {
            (_, true) => Seen::There,
            (Seen::Never, false) => Seen::Never,
            (_, false) => Seen::Going,
        };
        before
    }

    fn seen(&self) -> Seen {
        *self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this agent is stopped for good on this node. Takes some seconds at most.
    pub async fn is_gone(&self) -> bool {
        let end = Instant::now() + DEADLINE;
        let (name, namespace) = (&self.config.name, &self.config.namespace);
        let error = loop {
            let answer = timeout_at(end, self.ask()).await.unwrap_or(Err(Failure::Late));
            let seen = self.seen();
            let (gone, why) = match answer {
                Ok(Answer::Wanted) => (false, "it is there and wants a pod on this node".to_owned()),
                Ok(Answer::Unwanted(why)) => (true, why),
                Ok(Answer::Absent) if seen != Seen::Never => (true, "it is gone".to_owned()),
                Ok(Answer::Absent) => (false, "it was never seen, so --daemonset may be wrong".to_owned()),
                Ok(Answer::Refused(why)) if seen == Seen::Going => (
                    true,
                    format!("it was seen to go, and so has the right to ask for it: {why}"),
                ),
                Ok(Answer::Refused(why)) => (false, format!("it may not be asked for: {why}")),
                Err(error) if Instant::now() + RETRIES.0 < end => {
                    debug!(error = %Chain(&error), "asking again for the agent's DaemonSet");
                    sleep(RETRIES.0).await;
                    continue;
                }
                Err(error) => break error,
            };
            info!(daemonset = name, namespace, why, leaves = gone, "the agent stops");
            return gone;
        };
        info!(daemonset = name, namespace, error = %Chain(&error), leaves = false, "the agent stops");
        false
    }

    async fn ask(&self) -> Result<Answer, Failure> {
        let client = self.kubernetes.client().await?;
        let api: Api<DaemonSet> = Api::namespaced(client.clone(), &self.config.namespace);
        let daemonset = match api.get(&self.config.name).await {
            Ok(daemonset) => daemonset,
            Err(kube::Error::Api(status)) if status.code == 404 => {
                return Ok(Answer::Absent);
            }
            Err(kube::Error::Api(status)) if [401, 403].contains(&status.code) => {
                return Ok(Answer::Refused(status.to_string()));
            }
            Err(error) => return Err(error.into()),
        };
        if daemonset.metadata.deletion_timestamp.is_some() {
            return Ok(Answer::Unwanted("it is being deleted".to_owned()));
        }
        let Some(pod) = daemonset.spec.and_then(|spec| spec.template.spec) else {
            return Ok(Answer::Wanted);
        };
        let wanted = Wanted::of(&pod);
        if wanted.is_anywhere() {
            return Ok(Answer::Wanted);
        }
        // Without the labels nothing speaks against it.
        let labels = self.labels(client).await;
        let unmet = labels.and_then(|labels| wanted.unmet(&self.config.node, &labels));
        Ok(unmet.map_or(Answer::Wanted, |unmet| {
            Answer::Unwanted(format!("it does not want this node, which is not {unmet}"))
        }))
    }

    async fn labels(&self, client: Client) -> Option<BTreeMap<String, String>> {
        match Api::<Node>::all(client).get(&self.config.node).await {
            Ok(node) => Some(node.metadata.labels.unwrap_or_default()),
            Err(error) => {
                debug!(error = %Chain(&error), node = self.config.node, "the node's labels are not known");
                None
            }
        }
    }
}
