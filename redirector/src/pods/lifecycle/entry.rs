//! A pod in the lifecycle's table.

use std::collections::VecDeque;

use tokio::time::Instant;

use super::super::{
    Error, PodAdd, PodDelete, Reply,
    status::{PodStatus, State},
    work::Captured,
};
use crate::{mesh::pod::PodUid, redirect::overrides::Overrides, telemetry::Chain};

/// A pod in the table: captured, or with something to do. Its queue is bounded by its senders, of which each waits for its
/// answer (the connections of the CNI socket, or the one of ZDS).
pub(super) struct Entry<P> {
    pub(super) pod: Option<Captured<P>>,
    pub(super) job: Option<Job>,
    pub(super) queue: VecDeque<(Request, Option<Reply>)>,
    /// What was wanted last, if it is to be tried again, and why it failed. A success or a delete ends it.
    pub(super) retry: Option<(PodAdd, String)>,
    /// What was found to be wrong with the captured pod last.
    pub(super) fault: Option<Fault>,
}

/// What is wrong with a captured pod, and could not be mended yet.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Fault {
    pub(super) text: String,
    /// It is wrong with the capture, and not only with the newest rules, without which the capture is whole.
    pub(super) impairs: bool,
}

impl Fault {
    /// Of a captured pod, after a job; `looked` is why a look failed.
    pub(super) fn of<P>(pod: &Captured<P>, looked: Option<&Error>) -> Option<Self> {
        let lacks = pod.attached.lacks.as_ref();
        let (text, impairs) = match (looked, lacks) {
            (None | Some(Error::NewRules(_)), Some(lacks)) => (lacks.clone(), true),
            (Some(error), _) => (Chain(error).to_string(), !matches!(error, Error::NewRules(_))),
            (None, None) => return None,
        };
        Some(Self { text, impairs })
    }
}

impl<P> Default for Entry<P> {
    fn default() -> Self {
        Self {
            pod: None,
            job: None,
            queue: VecDeque::new(),
            retry: None,
            fault: None,
        }
    }
}

pub(super) struct Job {
    pub(super) request: Request,
    pub(super) reply: Option<Reply>,
    pub(super) began: Instant,
    /// The pod was captured when it began.
    pub(super) was_captured: bool,
}

pub(super) enum Request {
    Add(PodAdd),
    Delete(PodDelete),
    /// Look whether this captured pod is still so.
    Check(PodAdd),
}

impl<P> Entry<P> {
    /// Whether a delete names a namespace that is not the pod's: the pod has got another since.
    pub(super) fn is_late(&self, delete: &PodDelete) -> bool {
        let Some(named) = &delete.netns else { return false };
        let add = self
            .pod
            .as_ref()
            .map(|pod| &pod.add)
            .or_else(|| self.retry.as_ref().map(|(add, _)| add));
        let Some(add) = add else { return false };
        let same_path = add.netns_path.as_ref().is_none_or(|path| *path == named.path);
        !same_path && named.id != Some(add.netns.id())
    }

    /// What the pod said last of its own rules, so far as it is known here.
    pub(super) fn rules(&self) -> Option<Box<Overrides>> {
        let wanted = self.retry.as_ref().and_then(|(add, _)| add.rules.clone());
        wanted.or_else(|| self.pod.as_ref()?.add.rules.clone())
    }

    /// What is not as it should be with a captured pod.
    fn lacks(&self) -> Option<String> {
        let untaken = || self.retry.as_ref().map(|(_, error)| error.clone());
        let fault = self.fault.as_ref().map(|fault| fault.text.clone());
        fault.or_else(untaken)
    }

    /// What is told of it. `strict` tells what its rules say.
    pub(super) fn status(&self, uid: &PodUid, strict: impl Fn(&PodAdd) -> bool) -> Option<PodStatus> {
        let job = self.job.as_ref().map(|job| &job.request);
        let queued = self.queue.iter().map(|(request, _)| request);
        let requested = job.into_iter().chain(queued).find_map(|request| match request {
            Request::Add(add) | Request::Check(add) => Some(add),
            Request::Delete(_) => None,
        });
        let captured = self.pod.as_ref().map(|pod| &pod.add);
        let (add, state, error) = match (job, captured, &self.retry) {
            (Some(Request::Add(add)), _, _) => (add, State::Starting, None),
            (Some(Request::Check(add)), _, _) => (add, State::Captured, self.lacks()),
            (None, Some(captured), _) => (captured, State::Captured, self.lacks()),
            (None, None, Some((add, error))) => (add, State::NotCaptured, Some(error.clone())),
            (Some(Request::Delete(_)), _, _) | (None, None, None) => (requested?, State::Stopping, None),
        };
        let PodAdd {
            info,
            netns,
            netns_path,
            addresses,
            ..
        } = add;
        let addresses = self.pod.as_ref().map_or(addresses, |pod| &pod.network.addresses);
        Some(PodStatus {
            uid: uid.to_string(),
            name: info.name.clone(),
            namespace: info.namespace.clone(),
            service_account: info.service_account.clone(),
            netns: netns.id().ino,
            netns_path: netns_path.clone(),
            addresses: addresses.clone(),
            state,
            impaired: state == State::Captured && self.fault.as_ref().is_some_and(|fault| fault.impairs),
            strict: strict(add),
            error,
        })
    }
}
