//! Which pods of this node are in the mesh, by Kubernetes' API: labels and annotations of pods and namespaces.
//!
//! `watch` keeps a [`directory`] of the node's pods and of all namespaces; [`enablement`] decides. What asks it: `admission`, by
//! [`decide`], for a pod that a plugin tells of; `reconcile`, which enrols pods that were missed and releases those that have left the mesh, also
//! while they run; `annotate`, which tells others on the pod whether it is captured.

mod annotate;
pub mod decide;
pub mod directory;
pub mod enablement;
mod find;
mod pod;
mod reconcile;
mod watch;

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::{mpsc, watch as channel},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

use self::{decide::Decider, directory::Directory, enablement::Enablement, reconcile::Reconciler};
use super::{
    PodEvent,
    status::{Missed, Status},
};
use crate::control_plane::kubernetes::Kubernetes;

/// Settings.
#[derive(Debug, Clone)]
pub struct Config {
    /// The node whose pods count.
    pub node: String,
    /// Which of them are in the mesh.
    pub enablement: Enablement,
    /// The annotation that tells whether a pod is captured; none is written where it is empty.
    pub annotation: String,
}

/// The tasks that follow Kubernetes.
pub struct Follower {
    kubernetes: Arc<Kubernetes>,
    config: Config,
    directory: Arc<Directory>,
    missed: channel::Sender<Vec<Missed>>,
}

/// When it is this agent that tells on the pods, and not the one before it or after it.
#[derive(Debug)]
pub struct Turn {
    /// From then on.
    pub begin: CancellationToken,
    /// Another agent does so: what is told stays.
    pub over: CancellationToken,
    /// The agent ends, and nobody else does: after the pods are released, if they are.
    pub stop: CancellationToken,
}

impl Follower {
    /// Of one cluster. Nothing is asked before [`Self::watch`].
    pub fn new(kubernetes: Kubernetes, config: Config) -> Self {
        Self {
            kubernetes: Arc::new(kubernetes),
            directory: Arc::new(Directory::new(
                config.enablement.clone(),
                config.annotation.clone(),
            )),
            config,
            missed: channel::Sender::default(),
        }
    }

    /// What is known.
    pub fn directory(&self) -> Arc<Directory> {
        Arc::clone(&self.directory)
    }

    /// What decides on pods that a plugin tells of.
    pub fn decider(&self) -> Decider {
        Decider::new(Arc::clone(&self.kubernetes), self.directory())
    }

    /// The pods that should be captured and could not even be tried, as they are now.
    pub fn missed(&self) -> channel::Receiver<Vec<Missed>> {
        self.missed.subscribe()
    }

    /// Starts to follow pods and namespaces, until `stop`.
    pub fn watch(&self, tasks: &mut JoinSet<()>, stop: &CancellationToken) {
        let follow = || {
            (
                Arc::clone(&self.kubernetes),
                Arc::clone(&self.directory),
                stop.clone(),
            )
        };
        let (kubernetes, directory, stop) = follow();
        tasks.spawn(watch::pods(kubernetes, self.config.node.clone(), directory, stop));
        let (kubernetes, directory, stop) = follow();
        tasks.spawn(watch::namespaces(kubernetes, directory, stop));
    }

    /// Starts to tell on the pods whether they are captured.
    pub fn annotate(&self, status: channel::Receiver<Status>, tasks: &mut JoinSet<()>, turn: Turn) {
        if !self.config.annotation.is_empty() {
            let (kubernetes, directory) = (Arc::clone(&self.kubernetes), self.directory());
            tasks.spawn(annotate::run(kubernetes, directory, status, turn));
        }
    }

    /// Enrols and releases pods until `stop`. To be called when the pods of an earlier agent are back: those would seem to be missed.
    pub async fn reconcile(
        self,
        events: mpsc::Sender<PodEvent>,
        status: channel::Receiver<Status>,
        stop: CancellationToken,
    ) {
        Reconciler::new(self.directory, events, status, self.missed)
            .run(stop)
            .await;
    }
}

/// How long to wait after so many failures in a row: the first time, doubled with each, and the longest.
fn pause((first, longest): (Duration, Duration), failures: u32) -> Duration {
    (first * 2_u32.saturating_pow(failures.min(16))).min(longest)
}
