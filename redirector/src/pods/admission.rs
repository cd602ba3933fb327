//! Who decides on the pods that a CNI plugin tells of, and what is known of them beside their event.

use std::sync::Arc;

use tokio::sync::watch;

use super::{
    kubernetes::{decide::Decider, directory::Unknown},
    wire::Event,
};
use crate::{
    mesh::{
        index::Mesh,
        pod::{Home, InvalidPodUid, PodInfo, PodUid},
    },
    redirect::overrides::{InvalidAnnotation, Overrides},
};

/// Who decides.
#[derive(Clone)]
pub enum Admission {
    /// The sender: every pod that is told of is enrolled.
    Sender {
        /// Knows the service accounts that events don't tell.
        mesh: watch::Receiver<Arc<Mesh>>,
        /// Where this node is.
        home: Home,
        /// Kubernetes namespaces whose pods are let through all the same.
        excluded: Vec<String>,
    },
    /// Kubernetes' API.
    Kubernetes(Decider),
}

/// What is decided of a pod.
#[derive(Debug)]
pub(super) enum Decision {
    /// It is enrolled, with these rules if they are known.
    Enrol(PodInfo, Option<Box<Overrides>>),
    /// It is none of ours, for this reason.
    Leave(String),
}

/// Why nothing is decided.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("no usable UID can be made of PodNamespace and PodName")]
    Uid(#[source] InvalidPodUid),
    #[error(transparent)]
    Annotation(#[from] InvalidAnnotation),
    #[error("the pod's annotations are wrong: {0}")]
    Annotations(String),
    #[error(
        "ServiceAccount is missing and the workload file has no workload {namespace}/{name}: send ServiceAccount, or add \
         the workload to the file"
    )]
    NoServiceAccount { namespace: String, name: String },
    #[error(transparent)]
    Unknown(#[from] Unknown),
}

impl Admission {
    /// Decides on the pod of an event. It may take seconds.
    pub(super) async fn decide(&self, event: &Event) -> Result<Decision, Error> {
        match self {
            Self::Sender { mesh, home, excluded } => {
                if excluded.contains(&event.namespace) {
                    return Ok(Decision::Leave(
                        "its namespace is excluded (EXCLUDE_NAMESPACES)".to_owned(),
                    ));
                }
                let rules = event.annotations.as_ref().map(Overrides::from_annotations);
                let rules = rules.transpose()?.map(Box::new);
                let (namespace, name) = (&event.namespace, &event.name);
                let known = || {
                    let mesh = mesh.borrow();
                    let workload = mesh.pod(namespace, name, home)?;
                    Some(workload.service_account.to_string())
                };
                let service_account = event.service_account.clone().or_else(known);
                let info = PodInfo {
                    uid: own_uid(event)?,
                    name: name.clone(),
                    namespace: namespace.clone(),
                    service_account: service_account.ok_or_else(|| Error::NoServiceAccount {
                        namespace: namespace.clone(),
                        name: name.clone(),
                    })?,
                };
                Ok(Decision::Enrol(info, rules))
            }
            Self::Kubernetes(decider) => {
                let found = decider
                    .find(&event.namespace, &event.name, event.uid.as_ref())
                    .await?;
                Ok(match (found.left, &found.pod.rules) {
                    (Some(left), _) => Decision::Leave(left.to_string()),
                    (None, Ok(rules)) => {
                        Decision::Enrol(found.pod.info.clone(), Some(Box::new(rules.clone())))
                    }
                    (None, Err(error)) => return Err(Error::Annotations(error.clone())),
                })
            }
        }
    }

    /// The UID under which the pod of an event is enrolled, if it is.
    pub(super) fn uid(&self, event: &Event) -> Result<PodUid, Error> {
        match (self, &event.uid) {
            (Self::Kubernetes(decider), Some(uid)) => Ok(decider.directory().uid_of(uid)),
            (Self::Kubernetes(decider), None) => Ok(decider
                .directory()
                .going(&event.namespace, &event.name)
                .map_or_else(|| own_uid(event), Ok)?),
            (Self::Sender { .. }, _) => own_uid(event),
        }
    }

    /// The same, of a pod that goes. A name alone is not enough where pods are known by their UIDs: the pod that has it by now may be
    /// the next one.
    pub(super) fn uid_to_delete(&self, event: &Event) -> Result<Option<PodUid>, Error> {
        let is_vague = event.uid.is_none() && event.netns.is_none();
        if is_vague && matches!(self, Self::Kubernetes(_)) {
            return Ok(None);
        }
        self.uid(event).map(Some)
    }
}

fn own_uid(event: &Event) -> Result<PodUid, Error> {
    match &event.uid {
        Some(uid) => Ok(uid.clone()),
        None => PodUid::from_name(&event.namespace, &event.name).map_err(Error::Uid),
    }
}
