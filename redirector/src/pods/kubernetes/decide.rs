//! Decides on a pod that a plugin tells of. That a pod is not in the mesh for its labels is the one answer that lets it out in plain, so
//! its namespace's are asked for anew first: a watch that died unnoticed has the old ones for minutes.

use std::{sync::Arc, time::Duration};

use k8s_openapi::api::core::v1::Namespace;
use kube::Api;
use tokio::time::timeout;
use tracing::{debug, info, warn};

use super::{
    directory::{Decided, Directory, Unknown},
    enablement::{Labels, Left},
};
use crate::{control_plane::kubernetes::Kubernetes, mesh::pod::PodUid, telemetry::Chain};

/// Time for the answer, which a pod outside the mesh waits for: a server that is away must not keep such pods from starting.
const DEADLINE: Duration = Duration::from_secs(2);

/// Decides by what is known, and asks where that may be old.
#[derive(Clone)]
pub struct Decider {
    kubernetes: Arc<Kubernetes>,
    directory: Arc<Directory>,
}

impl Decider {
    pub(super) fn new(kubernetes: Arc<Kubernetes>, directory: Arc<Directory>) -> Self {
        Self {
            kubernetes,
            directory,
        }
    }

    /// What is known.
    pub fn directory(&self) -> &Directory {
        &self.directory
    }

    /// The pod, and whether it is in the mesh, as [`Directory::find`] finds it. Where the server does not answer, what it told last counts.
    ///
    /// # Errors
    /// When the pod does not become known.
    pub async fn find(&self, namespace: &str, name: &str, uid: Option<&PodUid>) -> Result<Decided, Unknown> {
        let found = self.directory.find(namespace, name, uid).await?;
        if found.left != Some(Left::Labels) {
            return Ok(found);
        }
        let asked = timeout(DEADLINE, self.labels(namespace)).await;
        match asked.unwrap_or_else(|_| Err(format!("no answer within {DEADLINE:?}"))) {
            Ok(Some(labels)) if self.directory.learn_namespace(namespace, &labels) => {
                info!(namespace, "the namespace's labels were not known as they are");
                self.directory.find(namespace, name, uid).await
            }
            Ok(Some(_)) => Ok(found),
            Ok(None) => {
                debug!(namespace, "the namespace is gone");
                Ok(found)
            }
            Err(error) => {
                warn!(
                    namespace,
                    name,
                    error,
                    "cannot ask Kubernetes whether the namespace's labels are still as it told last, by which the pod is not in the mesh"
                );
                Ok(found)
            }
        }
    }

    /// A namespace's labels as they are now; nothing if there is none.
    async fn labels(&self, namespace: &str) -> Result<Option<Labels>, String> {
        let text = |error: &(dyn std::error::Error + 'static)| Chain(error).to_string();
        let client = self.kubernetes.client().await.map_err(|error| text(&error))?;
        let asked = Api::<Namespace>::all(client).get_metadata_opt(namespace).await;
        let found = asked.map_err(|error| text(&error))?;
        Ok(found.map(|found| found.metadata.labels.unwrap_or_default()))
    }
}
