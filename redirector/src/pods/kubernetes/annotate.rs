//! Tells on the pods whether they are captured: an annotation, which istiod takes for a pod's ability to be called by HBONE.
//!
//! It compares what the lifecycle says with what the pod's annotations say, whenever one of them changes. `enabled` is captured,
//! `pending` not yet, and a pod that is not, and was or should be, has none (protocol of istio-cni's agent, cni/pkg/nodeagent). What a
//! captured pod lacks is told beside it ([`IMPAIRED`]): without `enabled` its peers would call it in plain (docs/decisions/0015).
//! What others tell on pods that are none of ours is left alone.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::json;
use tokio::{
    sync::{Semaphore, watch},
    task::JoinSet,
    time::{Instant, sleep_until, timeout},
};
use tracing::{debug, warn};

use super::{
    super::status::{PodStatus, State, Status},
    Turn,
    directory::{Directory, KnownPod},
    pause,
    pod::IMPAIRED,
};
use crate::{control_plane::kubernetes::Kubernetes, mesh::pod::PodUid, telemetry::Chain};

/// Requests at one time.
const AT_ONCE: usize = 8;

/// Time for a request, with the wait for its turn not counted.
const DEADLINE: Duration = Duration::from_secs(20);

/// Pause after a failure with a pod: the first, and the longest.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// Time for the watch to tell of what was written.
const ECHO: Duration = Duration::from_secs(10);

/// Time for which a capture is to be impaired before it is told. A proxy that is replaced is away from all pods at once, and soon back.
const IMPAIRED_FOR: Duration = Duration::from_secs(10);

/// Most bytes that are told of what a capture lacks.
const MAX_REASON_BYTES: usize = 512;

/// Time for what is still to be told when the agent stops: less than `app` has for all tasks.
const LAST_WORDS: Duration = Duration::from_secs(4);

/// What is told of a pod, by each annotation: a value, or that there is none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Told {
    capture: Option<&'static str>,
    impaired: Option<String>,
}

impl Told {
    fn of(pod: Option<&PodStatus>) -> Option<Self> {
        let Some(pod) = pod else {
            return Some(Self::default());
        };
        let impaired = pod.impaired.then(|| {
            let reason = pod
                .error
                .as_deref()
                .unwrap_or("its capture is not as it should be");
            reason[..reason.floor_char_boundary(MAX_REASON_BYTES)].to_owned()
        });
        match pod.state {
            State::Captured => Some(Self {
                capture: Some("enabled"),
                impaired,
            }),
            State::NotCaptured => Some(Self {
                capture: Some("pending"),
                impaired: None,
            }),
            // Until it is settled, what is told holds.
            State::Starting | State::Stopping => None,
        }
    }

    fn is_on(&self, pod: &KnownPod) -> bool {
        self.capture == pod.told.as_deref() && self.impaired == pod.impaired
    }

    /// Whether another says the same, though it may give another reason.
    fn is_like(&self, other: &Self) -> bool {
        self.capture == other.capture && self.impaired.is_some() == other.impaired.is_some()
    }
}

/// Tells while it is this agent's turn.
pub(super) async fn run(
    kubernetes: Arc<Kubernetes>,
    directory: Arc<Directory>,
    status: watch::Receiver<Status>,
    turn: Turn,
) {
    tokio::select! {
        () = turn.begin.cancelled() => {}
        () = turn.stop.cancelled() => return,
    }
    let mut changed = directory.subscribe();
    let mut annotator = Annotator {
        kubernetes,
        directory,
        status,
        jobs: JoinSet::new(),
        at_once: Arc::new(Semaphore::new(AT_ONCE)),
        busy: BTreeSet::new(),
        ours: BTreeSet::new(),
        impaired: BTreeMap::new(),
        later: BTreeMap::new(),
    };
    loop {
        annotator.compare();
        let due = annotator.due();
        tokio::select! {
            biased;
            // What is on its way is the same that the other agent tells, or is told anew by it.
            () = turn.over.cancelled() => return,
            () = turn.stop.cancelled() => break,
            Ok(()) = changed.changed() => {}
            Ok(()) = annotator.status.changed() => {}
            Some(Ok((pod, told, result))) = annotator.jobs.join_next() => annotator.finished(&pod, told, result),
            () = sleep_until(due) => {}
        }
    }
    // The pods may have been released for good.
    let _ = timeout(LAST_WORDS, annotator.finish()).await;
    annotator.jobs.shutdown().await;
}

struct Annotator {
    kubernetes: Arc<Kubernetes>,
    directory: Arc<Directory>,
    status: watch::Receiver<Status>,
    jobs: JoinSet<(Arc<KnownPod>, Told, Result<(), String>)>,
    at_once: Arc<Semaphore>,
    busy: BTreeSet<PodUid>,
    /// Pods that the lifecycle has, or had.
    ours: BTreeSet<PodUid>,
    /// Pods whose capture is impaired, and since when.
    impaired: BTreeMap<PodUid, Instant>,
    /// Pods that are left alone for a while.
    later: BTreeMap<PodUid, Later>,
}

struct Later {
    until: Instant,
    /// What was written; nothing after a failure.
    written: Option<Told>,
    failures: u32,
}

impl Annotator {
    /// When there may be something to tell though nothing changes.
    fn due(&self) -> Instant {
        let now = Instant::now();
        let told = self.impaired.values().map(|since| *since + IMPAIRED_FOR);
        let later = self.later.values().map(|later| later.until);
        let due = told.filter(|due| *due > now).chain(later).min();
        due.unwrap_or(now + BACKOFF.1)
    }

    fn compare(&mut self) {
        let now = Instant::now();
        let decided = self.directory.pods();
        let known: BTreeSet<&PodUid> = decided.iter().map(|one| &one.pod.info.uid).collect();
        self.later
            .retain(|uid, later| known.contains(uid) && (later.until > now || later.failures > 0));
        self.ours.retain(|uid| known.contains(uid));
        self.impaired.retain(|uid, _| known.contains(uid));
        let status = self.status.borrow_and_update().clone();
        // Until the pods of an earlier agent are back it is not known what they are.
        if !status.synced {
            return;
        }
        for decided in decided {
            let pod = decided.pod;
            let uid = &pod.info.uid;
            let found = status.pods.iter().find(|known| known.uid == uid.as_str());
            if found.is_some() {
                self.ours.insert(uid.clone());
            }
            if found.is_none() && decided.left.is_some() && !self.ours.contains(uid) {
                continue;
            }
            let Some(mut wanted) = Told::of(found) else {
                continue;
            };
            if wanted.impaired.is_none() {
                self.impaired.remove(uid);
            } else if now < *self.impaired.entry(uid.clone()).or_insert(now) + IMPAIRED_FOR {
                wanted.impaired = pod.impaired.clone();
            }
            let waits = self.later.get(uid).is_some_and(|later| {
                let as_written = |written: &Told| written.is_like(&wanted);
                later.until > now && later.written.as_ref().is_none_or(as_written)
            });
            if wanted.is_on(&pod) || waits || !self.busy.insert(uid.clone()) {
                continue;
            }
            self.write(pod, wanted);
        }
    }

    /// Tells what there is to tell, once.
    async fn finish(&mut self) {
        self.compare();
        while let Some(finished) = self.jobs.join_next().await {
            if let Ok((pod, told, result)) = finished {
                self.finished(&pod, told, result);
                self.compare();
            }
        }
    }

    fn write(&mut self, pod: Arc<KnownPod>, told: Told) {
        let (kubernetes, at_once) = (Arc::clone(&self.kubernetes), Arc::clone(&self.at_once));
        let annotation = self.directory.annotation().to_owned();
        self.jobs.spawn(async move {
            let _permit = at_once.acquire().await;
            let result = match timeout(DEADLINE, write(&kubernetes, &pod, &annotation, &told)).await {
                Ok(result) => result,
                Err(_) => Err(format!("no answer within {DEADLINE:?}")),
            };
            (pod, told, result)
        });
    }

    fn finished(&mut self, pod: &KnownPod, told: Told, result: Result<(), String>) {
        let uid = &pod.info.uid;
        self.busy.remove(uid);
        let failures = self.later.get(uid).map_or(0, |later| later.failures);
        let (pause, written, failures) = match result {
            Ok(()) => (ECHO, Some(told), 0),
            Err(error) => {
                if failures == 0 {
                    let annotation = self.directory.annotation();
                    warn!(%uid, annotation, error, "cannot tell on the pod whether it is captured; trying again");
                }
                (pause(BACKOFF, failures), None, failures + 1)
            }
        };
        let until = Instant::now() + pause;
        self.later.insert(
            uid.clone(),
            Later {
                until,
                written,
                failures,
            },
        );
    }
}

/// Writes both annotations. The UID is in it so that a pod of the same name that came meanwhile refuses it.
async fn write(kubernetes: &Kubernetes, pod: &KnownPod, annotation: &str, told: &Told) -> Result<(), String> {
    let client = kubernetes
        .client()
        .await
        .map_err(|error| Chain(&error).to_string())?;
    let pods = Api::<Pod>::namespaced(client, &pod.info.namespace);
    let annotations = json!({ annotation: told.capture, IMPAIRED: told.impaired });
    let patch = json!({ "metadata": { "uid": pod.info.uid.as_str(), "annotations": annotations } });
    let written = pods
        .patch_status(&pod.info.name, &PatchParams::default(), &Patch::Merge(patch))
        .await;
    match written {
        Ok(_) => Ok(()),
        // It is gone, or it is another by now: the watch tells.
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {
            debug!(uid = %pod.info.uid, "the pod is gone, and needs no annotation");
            Ok(())
        }
        Err(error) => Err(Chain(&error).to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(state: State, impaired: bool, error: Option<&str>) -> PodStatus {
        PodStatus {
            uid: "u-1".to_owned(),
            name: "web".to_owned(),
            namespace: "shop".to_owned(),
            service_account: "web".to_owned(),
            netns: 1,
            netns_path: None,
            addresses: Vec::new(),
            state,
            impaired,
            strict: false,
            error: error.map(str::to_owned),
        }
    }

    #[test]
    fn what_a_capture_lacks_is_told_beside_that_there_is_one() {
        let long = "é".repeat(MAX_REASON_BYTES);
        for (state, impaired, error, expected) in [
            (State::Captured, false, None, Some((Some("enabled"), None))),
            // The capture is whole, and only its newest rules are refused.
            (
                State::Captured,
                false,
                Some("refused"),
                Some((Some("enabled"), None)),
            ),
            (
                State::Captured,
                true,
                Some("no listener"),
                Some((Some("enabled"), Some("no listener"))),
            ),
            (
                State::Captured,
                true,
                Some(&long),
                Some((Some("enabled"), Some(&long[..MAX_REASON_BYTES]))),
            ),
            (
                State::NotCaptured,
                false,
                Some("no device"),
                Some((Some("pending"), None)),
            ),
            (State::Starting, false, None, None),
            (State::Stopping, false, None, None),
        ] {
            let told = Told::of(Some(&pod(state, impaired, error)));
            let told = told.as_ref().map(|told| (told.capture, told.impaired.as_deref()));
            assert_eq!(told, expected, "{state:?} {error:?}");
        }
        assert_eq!(Told::of(None), Some(Told::default()));
    }
}
