//! The watches of Kubernetes' API that keep a [`Directory`]: the pods of this node, and the labels of all namespaces.
//!
//! The library lists, watches, and lists anew when the server no longer has the past; what is known stays until the new list is
//! complete. While the server is away, what it told last counts.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures_util::{Stream, StreamExt as _};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::{
    Api,
    core::{ApiResource, PartialObjectMeta},
    runtime::watcher::{self, Config, Event},
};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::{
    directory::Directory,
    pause,
    pod::{KnownPod, Wire},
};
use crate::{control_plane::kubernetes::Kubernetes, telemetry::Chain};

/// Length of a watch, in seconds: a connection that has died unnoticed is given up by the library 5 s after it.
const WATCH_SECONDS: u32 = 120;

/// Time for each page of a list.
const PAGE_DEADLINE: Duration = Duration::from_secs(60);

/// Pause after a failure: the first, and the longest. With jitter, since all nodes lose the server at one time.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(15));

/// Failures in a row after which the client is made anew, from the files as they are then.
const FAILURES: u32 = 3;

/// Follows the pods of `node` until `stop`.
pub(super) async fn pods(
    kubernetes: Arc<Kubernetes>,
    node: String,
    directory: Arc<Directory>,
    stop: CancellationToken,
) {
    let resource = ApiResource::erase::<Pod>(&());
    let config = || config().fields(&format!("spec.nodeName={node}"));
    let watch = |client| watcher::watcher(Api::<Wire>::all_with(client, &resource), config());
    let mut listed = BTreeMap::new();
    let read = |object: Wire| {
        let name = object.metadata.name.clone().unwrap_or_default();
        let known = KnownPod::of(object, directory.annotation());
        known
            .inspect_err(|error| {
                warn!(
                    pod = name,
                    error, "a pod of Kubernetes cannot be understood, and is passed over"
                )
            })
            .ok()
    };
    let take = |event| match event {
        Event::Init => listed.clear(),
        Event::InitApply(object) => {
            listed.extend(read(object).map(|pod| (pod.info.uid.clone(), Arc::new(pod))));
        }
        Event::InitDone => {
            info!(pods = listed.len(), "pods of this node, by Kubernetes");
            directory.replace_pods(std::mem::take(&mut listed));
        }
        Event::Apply(object) => {
            if let Some(pod) = read(object) {
                directory.put_pod(pod);
            }
        }
        Event::Delete(object) => {
            if let Some(uid) = object.metadata.uid.and_then(|uid| uid.parse().ok()) {
                directory.remove_pod(&uid);
            }
        }
    };
    tokio::select! {
        () = stop.cancelled() => {}
        () = follow("pods", &kubernetes, watch, take) => {}
    }
}

/// Follows all namespaces until `stop`.
pub(super) async fn namespaces(
    kubernetes: Arc<Kubernetes>,
    directory: Arc<Directory>,
    stop: CancellationToken,
) {
    let watch = |client| watcher::watcher(Api::<PartialObjectMeta<Namespace>>::all(client), config());
    let mut listed = BTreeMap::new();
    let read = |object: PartialObjectMeta<Namespace>| {
        let labels = object.metadata.labels.unwrap_or_default();
        Some((object.metadata.name?, labels))
    };
    let take = |event| match event {
        Event::Init => listed.clear(),
        Event::InitApply(object) => listed.extend(read(object)),
        Event::InitDone => directory.replace_namespaces(std::mem::take(&mut listed)),
        Event::Apply(object) => {
            if let Some((name, labels)) = read(object) {
                directory.put_namespace(name, labels);
            }
        }
        Event::Delete(object) => {
            if let Some((name, _)) = read(object) {
                directory.remove_namespace(&name);
            }
        }
    };
    tokio::select! {
        () = stop.cancelled() => {}
        () = follow("namespaces", &kubernetes, watch, take) => {}
    }
}

fn config() -> Config {
    Config::default().timeout(WATCH_SECONDS)
}

/// Watches for ever.
async fn follow<K, S: Stream<Item = watcher::Result<Event<K>>>>(
    what: &'static str,
    kubernetes: &Kubernetes,
    watch: impl Fn(kube::Client) -> S,
    mut take: impl FnMut(Event<K>),
) {
    let mut backoff = Backoff::default();
    loop {
        let client = match kubernetes.client().await {
            Ok(client) => client,
            Err(error) => {
                let text = Chain(&error).to_string();
                backoff.failed(what, text).await;
                continue;
            }
        };
        let mut events = std::pin::pin!(watch(client));
        let (mut failures, mut lists) = (0, true);
        while failures < FAILURES {
            // For a watch, the library has a deadline; a quiet one is no failure.
            let next = match lists {
                true => timeout(PAGE_DEADLINE, events.next()).await,
                false => Ok(events.next().await),
            };
            let Ok(Some(event)) = next else { break };
            match event {
                Ok(event) => {
                    lists = matches!(event, Event::Init | Event::InitApply(_));
                    // A list has begun, and not come yet.
                    if !matches!(event, Event::Init) {
                        (failures, backoff) = (0, Backoff::default());
                    }
                    take(event);
                }
                Err(error) => {
                    failures += 1;
                    let text = Chain(&error).to_string();
                    backoff.failed(what, text).await;
                }
            }
        }
        debug!(what, "beginning anew to follow Kubernetes");
    }
}

/// Pauses between failures, each longer than the one before.
#[derive(Default)]
struct Backoff(u32);

impl Backoff {
    async fn failed(&mut self, what: &'static str, error: String) {
        // Told at the first of a series, and now and then.
        if self.0.is_multiple_of(20) {
            warn!(
                what,
                error, "cannot follow Kubernetes; trying again, and what it told last counts"
            );
        } else {
            debug!(what, error, "cannot follow Kubernetes");
        }
        let pause = pause(BACKOFF, self.0);
        self.0 += 1;
        let jitter = rand::random_range(0.5..1.0);
        sleep(pause.mul_f64(jitter)).await;
    }
}
