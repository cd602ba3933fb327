//! The plugin's entry in the CNI configuration: what the installer writes and the plugin reads.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// The plugin's `type`: the name of its binary in the CNI's directory of binaries.
pub const TYPE: &str = "redirector-cni";

/// Where the agent listens if the configuration does not say.
pub const DEFAULT_AGENT_SOCKET: &str = "/run/redirector/cni.sock";

/// Our keys of the entry; the runtime adds its own when it calls the plugin, which are left alone.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Entry {
    /// Where the agent listens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent_socket: Option<PathBuf>,
    /// Kubernetes namespaces whose pods are let through untold, whether or not an agent is there.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub exclude_namespaces: Vec<String>,
    /// The agent's own pods, which are let through too: they could not wait for themselves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent_pod: Option<AgentPod>,
    /// Where the plugin writes its log; it tells the agent in any case.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log_file: Option<PathBuf>,
    /// What goes to the log: error, warn, info or debug.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log_level: Option<String>,
}

/// How the agent's own pods are told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentPod {
    /// Their Kubernetes namespace.
    pub namespace: String,
    /// What their names begin with.
    pub name_prefix: String,
}

impl Entry {
    /// Where the agent listens.
    pub fn socket(&self) -> &Path {
        self.agent_socket
            .as_deref()
            .unwrap_or(Path::new(DEFAULT_AGENT_SOCKET))
    }
}
