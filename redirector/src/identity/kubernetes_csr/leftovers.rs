//! Removes the objects of requests that are over: answered, failed, or given up at any point.
//!
//! Whoever makes an object has a [`Leftover`]; when that is dropped, be it since its task was aborted, one task removes the object.
//! What cannot be removed, Kubernetes' own cleaner does, within an hour of an answer and within a day without.

use std::{sync::Arc, time::Duration};

use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use kube::{Api, api::DeleteParams};
use tokio::{
    sync::mpsc,
    time::{sleep, timeout},
};
use tracing::{debug, warn};

use crate::{control_plane::kubernetes::Kubernetes, telemetry::Chain};

/// Objects that wait to be removed. Beyond it they are left to Kubernetes.
const WAITING: usize = 256;

/// Time for one try.
const DEADLINE: Duration = Duration::from_secs(10);

/// Pauses before the second and the third try.
const PAUSES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(5)];

/// The way to the task that removes. The task ends when this and all [`Leftover`]s are gone and it has done what it had to.
#[derive(Debug)]
pub(super) struct Leftovers(mpsc::Sender<Object>);

#[derive(Debug)]
struct Object {
    name: String,
    /// Whether the API server has said that it is there; it may be on its way as well.
    exists: bool,
}

impl Leftovers {
    /// Must be called within a tokio runtime.
    pub(super) fn start(kubernetes: Arc<Kubernetes>) -> Self {
        let (sender, receiver) = mpsc::channel(WAITING);
        tokio::spawn(run(kubernetes, receiver));
        Self(sender)
    }

    /// An object of this name is about to be made.
    pub(super) fn expect(&self, name: String) -> Leftover {
        Leftover {
            object: Some(Object { name, exists: false }),
            sender: self.0.clone(),
        }
    }
}

/// An object that is removed when this is dropped.
pub(super) struct Leftover {
    object: Option<Object>,
    sender: mpsc::Sender<Object>,
}

impl Leftover {
    /// It has been made.
    pub(super) fn exists(&mut self) {
        if let Some(object) = &mut self.object {
            object.exists = true;
        }
    }

    /// It has not been made.
    pub(super) fn forget(&mut self) {
        self.object = None;
    }
}

impl Drop for Leftover {
    fn drop(&mut self) {
        let Some(object) = self.object.take() else {
            return;
        };
        if let Err(error) = self.sender.try_send(object) {
            let Object { name, .. } = error.into_inner();
            debug!(name, "too many objects to remove: this one is left to Kubernetes");
        }
    }
}

async fn run(kubernetes: Arc<Kubernetes>, mut objects: mpsc::Receiver<Object>) {
    while let Some(object) = objects.recv().await {
        let mut pauses = PAUSES.into_iter();
        let failure = loop {
            let removing = timeout(DEADLINE, remove(&kubernetes, &object));
            let removed = removing
                .await
                .unwrap_or_else(|_| Err(format!("no answer within {DEADLINE:?}")));
            match (removed, pauses.next()) {
                (Ok(()), _) => break None,
                (Err(error), None) => break Some(error),
                (Err(_), Some(pause)) => sleep(pause).await,
            }
        };
        let Object { name, exists } = object;
        match failure {
            None => {}
            Some(error) if exists => {
                warn!(
                    name,
                    error, "a CertificateSigningRequest is left behind; Kubernetes removes it within a day"
                );
            }
            // Most likely it was never made.
            Some(error) => debug!(name, error, "a CertificateSigningRequest may be left behind"),
        }
    }
}

async fn remove(kubernetes: &Kubernetes, object: &Object) -> Result<(), String> {
    let client = kubernetes.client().await;
    let client = client.map_err(|error| Chain(&error).to_string())?;
    let api: Api<CertificateSigningRequest> = Api::all(client);
    match api.delete(&object.name, &DeleteParams::default()).await {
        Ok(_) => Ok(()),
        // Somebody else was first.
        Err(kube::Error::Api(status)) if status.code == 404 && object.exists => Ok(()),
        Err(kube::Error::Api(status)) => Err(super::shortened(&status.message)),
        Err(error) => Err(Chain(&error).to_string()),
    }
}
