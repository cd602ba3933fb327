//! Which pods are enrolled, and who says so.

use std::path::PathBuf;

use serde::{Serialize, Serializer, ser::SerializeStruct};

use super::{Error, planes, planes::Environment, values::Names};
use crate::{
    control_plane::kubernetes::Cluster,
    pods::kubernetes::{
        self,
        enablement::{Enablement, Selectors},
    },
    telemetry::Chain,
};

/// Istio's annotation (its api/annotation, `AmbientRedirection`).
const DEFAULT_ANNOTATION: &str = "ambient.istio.io/redirection";

/// Kubernetes' API says which pods are enrolled.
#[derive(Debug, Clone)]
pub struct Pods {
    /// The cluster.
    pub cluster: Cluster,
    /// What is asked of it.
    pub config: kubernetes::Config,
    /// The selectors as they were given; Istio's where nothing is.
    selectors: Option<String>,
}

/// What the settings say of it.
pub(super) struct Given<'a> {
    pub(super) wanted: bool,
    pub(super) selectors: Option<String>,
    pub(super) excluded: &'a Names,
    pub(super) annotation: Option<String>,
    pub(super) system_namespace: Option<String>,
    pub(super) own_namespace: &'a str,
    pub(super) node: &'a str,
    pub(super) kubeconfig: Option<PathBuf>,
    pub(super) environment: &'a Environment,
}

impl Given<'_> {
    /// What is to be asked of Kubernetes; none if it is not to be asked.
    pub(super) fn pods(self) -> Result<Option<Pods>, Error> {
        const SWITCH: &str = "KUBERNETES_PODS (--kubernetes-pods)";
        let setting = |text: String| Err(Error::Setting(text));
        let selectors = self.selectors.filter(|text| !text.trim().is_empty());
        if !self.wanted {
            // Whoever gives these expects that not all pods are enrolled.
            return match selectors {
                Some(_) => setting(format!(
                    "AMBIENT_ENABLEMENT_SELECTOR (--enablement-selectors) is for {SWITCH}, which is off: give both, or neither"
                )),
                None => Ok(None),
            };
        }
        if self.node.is_empty() {
            return setting(format!(
                "{SWITCH} needs the node's name: give NODE_NAME (--node-name)"
            ));
        }
        let parsed = selectors.as_deref().map(str::parse::<Selectors>).transpose();
        let parsed = parsed.map_err(|error| {
            Error::Setting(format!(
                "AMBIENT_ENABLEMENT_SELECTOR (--enablement-selectors): {}",
                Chain(&error)
            ))
        })?;
        let system = self.system_namespace.unwrap_or_else(|| "istio-system".to_owned());
        let own = Some(self.own_namespace.to_owned()).filter(|name| !name.is_empty());
        Ok(Some(Pods {
            cluster: planes::cluster(self.kubeconfig, self.environment, SWITCH)?,
            config: kubernetes::Config {
                node: self.node.to_owned(),
                enablement: Enablement {
                    selectors: parsed.unwrap_or_default(),
                    excluded: self.excluded.0.clone(),
                    system: std::iter::once(system).chain(own).collect(),
                },
                annotation: self.annotation.unwrap_or_else(|| DEFAULT_ANNOTATION.to_owned()),
            },
            selectors,
        }))
    }
}

impl Serialize for Pods {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut shown = serializer.serialize_struct("Pods", 4)?;
        shown.serialize_field("cluster", &self.cluster.to_string())?;
        shown.serialize_field("node", &self.config.node)?;
        shown.serialize_field("selectors", &self.selectors)?;
        shown.serialize_field("annotation", &self.config.annotation)?;
        shown.end()
    }
}
