//! Brings what is captured to what Kubernetes says: enrols pods of which no plugin has told, or which were labelled while they run,
//! gives them the rules that their annotations say now, and releases those that have left the mesh.
//!
//! It compares whenever one side changes, so what was missed is found by the next change, and what fails is tried again. A pod
//! whose object is gone, or says that it has ended, is not released by that: until its namespace is gone too, its processes may still
//! run.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use tokio::{
    sync::{Semaphore, mpsc, oneshot, watch},
    task::JoinSet,
    time::{Instant, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{
    super::{
        Error, OnFailure, PodAdd, PodDelete, PodEvent, Reply,
        status::{Missed, PodStatus, State, Status},
        work::blocking,
    },
    directory::{Decided, Directory, KnownPod},
    enablement::Left,
    find::{Found, Wanted, find},
    pause,
};
use crate::{mesh::pod::PodUid, redirect::overrides::Overrides, sys::netns::Netns, telemetry::Chain};

/// Events that are sent and not answered yet: one pod must not wait for all others.
const AT_ONCE: usize = 8;

/// Time for an answer, after which another pod has its turn.
const TURN: Duration = Duration::from_secs(60);

/// Pause after a failure with a pod: the first, and the longest.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));

/// Compares, and sends the events.
pub(super) struct Reconciler {
    directory: Arc<Directory>,
    events: mpsc::Sender<PodEvent>,
    status: watch::Receiver<Status>,
    missed: watch::Sender<Vec<Missed>>,
    jobs: JoinSet<Finished>,
    at_once: Arc<Semaphore>,
    /// The pods of which a job runs.
    busy: BTreeSet<PodUid>,
    /// Pods that failed, until they no longer do.
    trouble: BTreeMap<PodUid, Trouble>,
    /// The rules that captured pods were given from here.
    rules: BTreeMap<PodUid, Overrides>,
}

struct Trouble {
    tries: u32,
    next: Instant,
    error: String,
}

/// What a job leaves.
enum Finished {
    /// Namespaces were looked for.
    Found(Vec<(Arc<KnownPod>, Result<Found, String>)>),
    /// An event was answered.
    Answered(PodUid, Result<Option<Box<Overrides>>, String>),
}

/// What is to be done about a pod.
#[derive(Debug)]
enum Step {
    Enrol(Arc<KnownPod>),
    Change(Arc<KnownPod>, PodStatus),
    Release(PodUid, Left),
}

impl Step {
    fn uid(&self) -> &PodUid {
        match self {
            Self::Enrol(pod) | Self::Change(pod, _) => &pod.info.uid,
            Self::Release(uid, _) => uid,
        }
    }
}

impl Reconciler {
    pub(super) fn new(
        directory: Arc<Directory>,
        events: mpsc::Sender<PodEvent>,
        status: watch::Receiver<Status>,
        missed: watch::Sender<Vec<Missed>>,
    ) -> Self {
        Self {
            directory,
            events,
            status,
            missed,
            jobs: JoinSet::new(),
            at_once: Arc::new(Semaphore::new(AT_ONCE)),
            busy: BTreeSet::new(),
            trouble: BTreeMap::new(),
            rules: BTreeMap::new(),
        }
    }

    /// Compares until `stop`.
    pub(super) async fn run(mut self, stop: CancellationToken) {
        let mut changed = self.directory.subscribe();
        loop {
            self.compare();
            let due = self.trouble.values().map(|trouble| trouble.next).min();
            let due = due.unwrap_or_else(|| Instant::now() + BACKOFF.1);
            tokio::select! {
                () = stop.cancelled() => break,
                Ok(()) = changed.changed() => {}
                Ok(()) = self.status.changed() => {}
                Some(finished) = self.jobs.join_next() => match finished {
                    Ok(finished) => self.finished(finished),
                    // The jobs only wait for others, which catch their panics.
                    Err(error) => warn!(%error, "internal fault while pods were compared"),
                },
                () = sleep_until(due) => {}
            }
        }
        self.jobs.shutdown().await;
    }

    /// Starts what is to be done now.
    fn compare(&mut self) {
        let decided = self.directory.pods();
        let status = self.status.borrow_and_update().pods.clone();
        let now = Instant::now();
        let known: BTreeSet<&PodUid> = decided.iter().map(|one| &one.pod.info.uid).collect();
        self.trouble.retain(|uid, _| known.contains(uid));
        self.rules.retain(|uid, _| known.contains(uid));
        let steps: Vec<_> = decided
            .iter()
            .filter_map(|decided| {
                self.step(
                    decided,
                    status.iter().find(|pod| pod.uid == decided.pod.info.uid.as_str()),
                )
            })
            .collect();
        let wanting: BTreeSet<PodUid> = steps.iter().map(|step| step.uid().clone()).collect();
        self.trouble
            .retain(|uid, _| wanting.contains(uid) || self.busy.contains(uid));
        let mut search = Vec::new();
        for step in steps {
            let uid = step.uid();
            let waits = self.trouble.get(uid).is_some_and(|trouble| trouble.next > now);
            if waits || !self.busy.insert(uid.clone()) {
                continue;
            }
            match step {
                Step::Enrol(pod) => search.push(pod),
                Step::Change(pod, status) => self.change(pod, &status),
                Step::Release(uid, reason) => {
                    info!(%uid, %reason, "the pod is no longer in the mesh: releasing it");
                    let delete = PodDelete {
                        uid: uid.clone(),
                        netns: None,
                    };
                    self.send(uid, None, |reply| PodEvent::Delete(delete, reply));
                }
            }
        }
        if !search.is_empty() {
            self.jobs.spawn(search_for(search));
        }
        self.publish(&decided);
    }

    /// What is to be done about a pod, whose capture is as `status` says.
    fn step(&self, Decided { pod, left }: &Decided, status: Option<&PodStatus>) -> Option<Step> {
        match (status, left) {
            (Some(status), None) => {
                // What plugins gave, or an earlier agent, is not remembered here: each is given its rules once, which changes nothing
                // where they are the same. One that failed by its old ones may do with others.
                let given = self.rules.get(&pod.info.uid).map(Ok);
                let differ = given != Some(pod.rules.as_ref());
                let is_settled = matches!(status.state, State::Captured | State::NotCaptured);
                (differ && is_settled).then(|| Step::Change(Arc::clone(pod), status.clone()))
            }
            (Some(status), Some(left)) if status.state != State::Stopping => {
                Some(Step::Release(pod.info.uid.clone(), *left))
            }
            // Until it has an address, its plugin may still be at it; when it goes, it may have been released already.
            (None, None) if !pod.ended && !pod.deleting && !pod.addresses.is_empty() => {
                Some(Step::Enrol(Arc::clone(pod)))
            }
            _ => None,
        }
    }

    fn change(&mut self, pod: Arc<KnownPod>, status: &PodStatus) {
        let uid = pod.info.uid.clone();
        let netns = match &status.netns_path {
            Some(path) => Netns::open(path).map_err(|error| error.to_string()),
            None => Err("its namespace has no path".to_owned()),
        };
        match netns {
            Ok(netns) if netns.id().ino == status.netns => {
                let found = Found {
                    netns,
                    path: status.netns_path.clone().unwrap_or_default(),
                };
                self.enrol(&pod, found);
            }
            // It is going, or comes back as another: there will be other news of it.
            _ => {
                self.busy.remove(&uid);
            }
        }
    }

    fn finished(&mut self, finished: Finished) {
        match finished {
            Finished::Found(found) => {
                for (pod, found) in found {
                    match found {
                        Ok(found) => self.enrol(&pod, found),
                        Err(error) => self.answered(pod.info.uid.clone(), Err(error)),
                    }
                }
            }
            Finished::Answered(uid, result) => self.answered(uid, result),
        }
    }

    fn enrol(&mut self, pod: &KnownPod, Found { netns, path }: Found) {
        let uid = pod.info.uid.clone();
        let rules = match &pod.rules {
            Ok(rules) => Box::new(rules.clone()),
            Err(error) => return self.answered(uid, Err(error.clone())),
        };
        let add = PodAdd {
            info: pod.info.clone(),
            netns: Arc::new(netns),
            netns_path: Some(path),
            addresses: pod.addresses.clone(),
            rules: Some(rules.clone()),
            on_failure: OnFailure::Retry,
        };
        self.send(uid, Some(rules), |reply| PodEvent::Add(add, reply));
    }

    fn answered(&mut self, uid: PodUid, result: Result<Option<Box<Overrides>>, String>) {
        self.busy.remove(&uid);
        let error = match result {
            Ok(rules) => {
                self.trouble.remove(&uid);
                self.rules.extend(rules.map(|rules| (uid, *rules)));
                return;
            }
            Err(error) => error,
        };
        let tries = self.trouble.get(&uid).map_or(0, |trouble| trouble.tries);
        let is_new = self
            .trouble
            .get(&uid)
            .is_none_or(|trouble| trouble.error != error);
        if is_new {
            warn!(%uid, error, "the pod is not as Kubernetes says it should be; trying again");
        }
        let trouble = Trouble {
            tries: tries + 1,
            next: Instant::now() + pause(BACKOFF, tries),
            error,
        };
        self.trouble.insert(uid, trouble);
    }

    /// Sends an event; `rules` are those that the pod has if it is carried out.
    fn send(
        &mut self,
        uid: PodUid,
        rules: Option<Box<Overrides>>,
        event: impl FnOnce(Reply) -> PodEvent + Send + 'static,
    ) {
        let (events, at_once) = (self.events.clone(), Arc::clone(&self.at_once));
        self.jobs.spawn(async move {
            let permit = at_once.acquire().await;
            let (reply, mut answer) = oneshot::channel();
            let answered = match events.send(event(reply)).await {
                Ok(()) => timeout(TURN, &mut answer).await,
                Err(_) => Ok(Ok(Err(Error::Stopping))),
            };
            let answered = match answered {
                Ok(answered) => answered,
                Err(_) => {
                    warn!(%uid, "a step of the pod takes more than {TURN:?}; others go on");
                    drop(permit);
                    // It has deadlines of its own. Asked again meanwhile, it would have that to do too.
                    answer.await
                }
            };
            let result = answered.unwrap_or(Err(Error::Stopping));
            let result = result.map_err(|error| Chain(&error).to_string());
            Finished::Answered(uid, result.map(|()| rules))
        });
    }

    /// Tells of the pods that are in trouble and that the lifecycle does not know.
    fn publish(&self, decided: &[Decided]) {
        let status = self.status.borrow();
        let missed = decided.iter().filter_map(|Decided { pod, .. }| {
            let trouble = self.trouble.get(&pod.info.uid)?;
            let is_known = status.pods.iter().any(|known| known.uid == pod.info.uid.as_str());
            (!is_known).then(|| Missed {
                uid: pod.info.uid.to_string(),
                namespace: pod.info.namespace.clone(),
                name: pod.info.name.clone(),
                error: trouble.error.clone(),
            })
        });
        let missed: Vec<_> = missed.collect();
        self.missed.send_if_modified(|old| {
            let changed = *old != missed;
            *old = missed;
            changed
        });
    }
}

/// One look at all processes for all of them.
async fn search_for(pods: Vec<Arc<KnownPod>>) -> Finished {
    let wanted: Vec<_> = pods
        .iter()
        .map(|pod| Wanted {
            uids: std::iter::once(&pod.info.uid)
                .chain(&pod.local_uid)
                .cloned()
                .collect(),
            addresses: pod.addresses.clone(),
        })
        .collect();
    let found = blocking("look for the pods' namespaces", move || Ok(find(&wanted))).await;
    let found = match found {
        Ok(Ok(found)) => found
            .into_iter()
            .map(|found| found.ok_or_else(not_found))
            .collect(),
        Ok(Err(error)) => all_failed(&pods, &error),
        Err(error) => all_failed(&pods, &error),
    };
    Finished::Found(pods.into_iter().zip(found).collect())
}

fn all_failed(
    pods: &[Arc<KnownPod>],
    error: &(dyn std::error::Error + 'static),
) -> Vec<Result<Found, String>> {
    let text = format!("cannot look for its namespace: {}", Chain(error));
    pods.iter().map(|_| Err(text.clone())).collect()
}

fn not_found() -> String {
    "no process of it is in a network namespace with its addresses (the agent must see the node's processes: hostPID)".to_owned()
}

#[cfg(test)]
mod tests;
