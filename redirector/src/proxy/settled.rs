//! Decisions over a mesh that may not know everything yet: a pod is enrolled before the mesh has heard of it, or the mesh is asked for
//! piece by piece. A connection is held then for a bounded time, and never sent in plain for want of an answer.

use std::sync::Arc;

use tokio::time::{Instant, timeout_at};

use super::Pod;
use crate::{
    discovery::demand::Asker,
    mesh::{
        index::Mesh,
        wanted::{self, ResourceName, Unanswered},
    },
};

impl Pod {
    /// Asks `decide` of the mesh, and of each newer one for some seconds as long as the answer is `transient`: a pod may be
    /// enrolled, and connect, before the mesh has heard of it. Its connections are held then, and never sent in plain. Where the
    /// mesh is not fetched as a whole, what is `wanted` for the answer is asked for first.
    pub(super) async fn settled<T, E: From<Unanswered>>(
        &self,
        asker: Option<&Asker>,
        mut decide: impl FnMut(&Mesh) -> Result<T, E>,
        transient: impl Fn(&E) -> bool,
        wanted: impl Fn(&Mesh, &Result<T, E>) -> Vec<ResourceName>,
    ) -> Result<T, E> {
        let mut mesh = self.shared.mesh.clone();
        let deadline = Instant::now() + self.shared.config.mesh_deadline;
        // One leads to another: to a service, to its waypoint. In a circle they lead nowhere.
        let mut asked = Vec::new();
        loop {
            let now = mesh.borrow_and_update().clone();
            let decided = decide(&now);
            if let Some(asker) = asker
                && let Some(name) = wanted(&now, &decided)
                    .into_iter()
                    .find(|name| !asked.contains(name))
            {
                asker.ask(&name, deadline).await?;
                asked.push(name);
                continue;
            }
            let error = match decided {
                Err(error) if transient(&error) => error,
                settled => return settled,
            };
            if !matches!(timeout_at(deadline, mesh.changed()).await, Ok(Ok(()))) {
                return Err(error);
            }
        }
    }

    /// Where the mesh is asked for piece by piece: asks for the pod's own workload, so that its first connection need not.
    pub(super) async fn ask_for_itself(self: Arc<Self>) {
        let Some(asker) = &self.asker else { return };
        let home = &self.shared.config.home;
        let deadline = Instant::now() + self.shared.config.mesh_deadline;
        for address in self.addresses.first() {
            if self.mesh().local(self.local()).is_some() {
                return;
            }
            let Some(name) = wanted::at(&home.network, *address) else {
                continue;
            };
            if let Err(error) = asker.ask(&name, deadline).await {
                tracing::warn!(uid = %self.info.uid, %error, "the pod's own workload is not known yet");
                return;
            }
        }
        if self.mesh().local(self.local()).is_none() {
            tracing::warn!(
                uid = %self.info.uid, name = self.info.name, namespace = self.info.namespace,
                service_account = self.info.service_account,
                "the control plane has no workload of this name, namespace and service account: the pod's connections are refused until \
                 it has"
            );
        }
    }
}
