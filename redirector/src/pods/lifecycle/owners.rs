//! One namespace is one pod's: what an event gets whose namespace another UID has.
//!
//! Refused, as a rule. But one pod may have two UIDs here: an event without one is given one that is made of the pod's name, and
//! Kubernetes' API, asked from a later start on, knows the real one. Then what is in place is handed over, and stays in place.

use tracing::{debug, info, warn};

use super::{
    super::{Error, OnFailure, PodAdd, PodDelete, Reply, launch::Launch},
    Lifecycle, answer,
    entry::{Entry, Request},
};
use crate::{
    mesh::pod::{PodInfo, PodUid},
    sys::netns::NetnsId,
    telemetry::Chain,
};

impl<L: Launch> Lifecycle<L> {
    pub(super) fn enqueue_add(&mut self, add: PodAdd, reply: Option<Reply>) {
        let (uid, netns) = (add.info.uid.clone(), add.netns.id());
        let Some(owner) = self.owner_of(netns, &uid) else {
            return self.enqueue(uid, Request::Add(add), reply);
        };
        if is_made_of_name(&owner, &add.info) && self.hand_over(&owner, &uid) {
            info!(%uid, before = %owner, "the pod's real UID has become known");
            return self.enqueue(uid, Request::Add(add), reply);
        }
        if is_made_of_name(&uid, &add.info) && self.is_captured_pod(&owner, &add.info) {
            debug!(%uid, real = %owner, "the pod is captured by its real UID, and this one is forgotten");
            let delete = PodDelete {
                uid: uid.clone(),
                netns: None,
            };
            self.enqueue(uid, Request::Delete(delete), None);
            return answer(reply, Ok(()));
        }
        let error = Error::Duplicate { netns, owner };
        warn!(%uid, error = %Chain(&error), "cannot capture the pod");
        self.metrics.failed.inc();
        if add.on_failure == OnFailure::Retry {
            self.table.entry(uid).or_default().retry = Some((add, error.to_string()));
        }
        answer(reply, Err(error));
    }

    /// The other pod that has `netns`, or is about to.
    fn owner_of(&self, netns: NetnsId, uid: &PodUid) -> Option<PodUid> {
        let wants = |request: &Request| matches!(request, Request::Add(add) | Request::Check(add) if add.netns.id() == netns);
        let owns = |entry: &Entry<L::Proxy>| {
            entry.pod.as_ref().is_some_and(|pod| pod.add.netns.id() == netns)
                || entry.job.as_ref().is_some_and(|job| wants(&job.request))
                || entry.queue.iter().any(|(request, _)| wants(request))
        };
        self.table
            .iter()
            .find(|(other, entry)| *other != uid && owns(entry))
            .map(|(other, _)| other.clone())
    }

    /// Moves a captured pod from one UID to another, if nothing is being done by either.
    fn hand_over(&mut self, from: &PodUid, to: &PodUid) -> bool {
        let idle = |entry: &Entry<L::Proxy>| entry.job.is_none() && entry.queue.is_empty();
        let is_free = |entry: &Entry<L::Proxy>| idle(entry) && entry.pod.is_none();
        if !self.table.get(to).is_none_or(is_free) || !self.table.get(from).is_some_and(idle) {
            return false;
        }
        let Some(pod) = self.table.remove(from).and_then(|entry| entry.pod) else {
            return false;
        };
        self.table.entry(to.clone()).or_default().pod = Some(pod);
        true
    }

    /// Whether a captured pod has these names.
    fn is_captured_pod(&self, uid: &PodUid, info: &PodInfo) -> bool {
        let entry = self.table.get(uid);
        let known = entry.and_then(|entry| match (&entry.pod, &entry.job) {
            (Some(pod), _) => Some(&pod.add.info),
            (None, Some(job)) if job.was_captured => match &job.request {
                Request::Add(add) | Request::Check(add) => Some(&add.info),
                Request::Delete(_) => None,
            },
            _ => None,
        });
        known.is_some_and(|known| (&known.namespace, &known.name) == (&info.namespace, &info.name))
    }
}

fn is_made_of_name(uid: &PodUid, info: &PodInfo) -> bool {
    PodUid::from_name(&info.namespace, &info.name).is_ok_and(|made| made == *uid)
}
