//! The CNI plugin on this node, as long as the agent runs: kept installed, and taken away when the agent is stopped for good.
//!
//! The plugin asks the agent of every pod, so at a fresh install it is put into the CNI's configuration only when the pods of an
//! earlier agent are back, after which the agent's socket is served; and an agent that leaves takes it out before it lets go of its
//! pods.

use std::sync::Arc;

use tokio::{
    sync::watch,
    task::{JoinSet, spawn_blocking},
};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use crate::{
    cni::install::{
        self, Whose,
        leave::Owner,
        watch::{Keeper, State},
    },
    config::Config,
    pods::status::Status,
    telemetry::Chain,
};

/// The tasks, and what is to be known at their end.
pub(super) struct Installer {
    installation: Option<install::Config>,
    owner: Option<Arc<Owner>>,
    tasks: JoinSet<()>,
    stop: CancellationToken,
}

impl Installer {
    /// Begins as the settings say, when the pods are back and this agent's (`open`). Also returns how the installation stands, if there
    /// is to be one.
    pub(super) fn begin(
        config: &Config,
        mut pods: watch::Receiver<Status>,
        open: CancellationToken,
    ) -> (Self, Option<watch::Receiver<State>>) {
        let (mut tasks, stop) = (JoinSet::new(), CancellationToken::new());
        let owner = config
            .daemonset
            .clone()
            .map(|daemonset| Arc::new(Owner::new(daemonset)));
        if let Some(owner) = owner.clone() {
            let stop = stop.clone();
            tasks.spawn(async move { owner.follow(&stop).await });
        }
        let installation = config.cni.install.then(|| config.cni.installation.clone());
        let view = installation.clone().map(|installation| {
            let (keeper, view) = Keeper::new(installation);
            let stop = stop.clone();
            tasks.spawn(async move {
                let synced = async {
                    open.cancelled().await;
                    pods.wait_for(|status| status.synced).await.is_ok()
                };
                tokio::select! {
                    synced = synced => if !synced { return },
                    () = stop.cancelled() => return,
                }
                keeper.run(stop).await;
            });
            view
        });
        let installer = Self {
            installation,
            owner,
            tasks,
            stop,
        };
        (installer, view)
    }

    /// Whether the agent is stopped for good. Takes some seconds at most.
    pub(super) async fn is_gone(&self) -> bool {
        match &self.owner {
            Some(owner) => owner.is_gone().await,
            None => false,
        }
    }

    /// Ends, and installs the plugin no longer.
    pub(super) async fn leave(self) {
        let installation = self.installation.clone();
        self.end().await;
        let Some(installation) = installation else {
            return;
        };
        let removed =
            spawn_blocking(move || install::patiently(|| install::remove(&installation, Whose::Own)));
        match removed.await {
            Ok(Ok(removed)) => {
                info!("CNI plugin removed");
                for file in removed.left {
                    warn!(file = %file.display(), "left there: the entry of another agent's CNI plugin");
                }
            }
            Ok(Err(error)) => error!(
                error = %Chain(&error),
                "the CNI plugin cannot be removed, and pods cannot start on this node while it is there: `redirector install-cni \
                 --remove` removes it"
            ),
            Err(error) => error!(%error, "internal fault: the CNI plugin is not removed"),
        }
    }

    /// Changes nothing from now on, and has still to be ended.
    pub(super) fn rest(&self) {
        self.stop.cancel();
    }

    /// Ends, and leaves all as it is.
    pub(super) async fn end(mut self) {
        self.stop.cancel();
        super::end(std::mem::take(&mut self.tasks)).await;
    }
}
