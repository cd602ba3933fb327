//! The CNI plugin on this node: where it goes, how it is chained, and what it is told.

use std::path::{Path, PathBuf, absolute};

use serde::Serialize;

use super::Error;
use crate::{
    cni::{
        entry::{AgentPod, Entry, TYPE},
        install::{Config, Mode, leave},
    },
    control_plane::kubernetes::Cluster,
    discovery::xds,
};

/// The CNI plugin.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Cni {
    /// The agent keeps it installed.
    pub install: bool,
    /// How.
    #[serde(flatten)]
    pub installation: Config,
}

/// What the settings say of it.
pub(super) struct Given<'a> {
    pub(super) install: Option<bool>,
    pub(super) conf_dir: Option<PathBuf>,
    pub(super) conf_name: Option<String>,
    pub(super) bin_dir: Option<PathBuf>,
    pub(super) chained: Option<bool>,
    pub(super) owned: Option<bool>,
    pub(super) owned_name: Option<String>,
    pub(super) plugin: Option<PathBuf>,
    pub(super) daemonset: Option<&'a str>,
    pub(super) socket: &'a Path,
    pub(super) state_dir: &'a Path,
    /// Pods come from elsewhere than the socket.
    pub(super) has_other_source: bool,
    pub(super) exclude_namespaces: &'a [String],
    pub(super) pod: &'a xds::Identity,
}

impl Given<'_> {
    pub(super) fn cni(self) -> Result<Cni, Error> {
        let setting = |text: &str| Err(Error::Setting(text.to_owned()));
        let install = self.install.unwrap_or(false);
        if install && self.has_other_source {
            return setting(
                "CNI_INSTALL (--cni-install) and INPOD_UDS (--inpod-uds) are both given: pods come by the plugin or from a node agent; \
                 leave one out",
            );
        }
        let agent_pod = self.agent_pod();
        let name = self.conf_name.filter(|name| !name.is_empty());
        check_name(
            "CNI_CONF_NAME (--cni-conf-name)",
            name.as_deref(),
            &["conflist", "conf", "json"],
        )?;
        let mode = match (self.chained.unwrap_or(true), self.owned.unwrap_or(false)) {
            (false, true) => {
                return setting(
                    "ISTIO_OWNED_CNI_CONFIG (--cni-owned-config) is a way to chain the plugin, and CHAINED_CNI_PLUGIN (--cni-chained) is \
                     false: leave one out",
                );
            }
            (false, false) => Mode::Standalone {
                file: name.unwrap_or_else(|| format!("YYY-{TYPE}.conf")),
            },
            (true, false) => Mode::Chained { file: name },
            (true, true) => {
                let copy = self.owned_name.filter(|name| !name.is_empty());
                let copy = copy.unwrap_or_else(|| "02-redirector.conflist".to_owned());
                let what = "ISTIO_OWNED_CNI_CONFIG_FILENAME (--cni-owned-config-filename)";
                check_name(what, Some(&copy), &["conflist"])?;
                Mode::Owned { copy, file: name }
            }
        };
        // The plugin is run wherever the runtime is.
        let path = |path: &Path| absolute(path).unwrap_or_else(|_| path.to_owned());
        let entry = Entry {
            agent_socket: Some(path(self.socket)),
            log_file: Some(path(self.state_dir).join("cni.log")),
            exclude_namespaces: self.exclude_namespaces.to_vec(),
            agent_pod,
            ..Entry::default()
        };
        Ok(Cni {
            install,
            installation: Config {
                conf_dir: self.conf_dir.unwrap_or_else(|| "/etc/cni/net.d".into()),
                bin_dir: self.bin_dir.unwrap_or_else(|| "/opt/cni/bin".into()),
                plugin: self.plugin.unwrap_or_else(beside_this_program),
                mode,
                entry,
            },
        })
    }

    /// How the agent's own pods are told: by the DaemonSet's name, or by this pod's, which ends in five letters of its own.
    fn agent_pod(&self) -> Option<AgentPod> {
        let of_pod = || self.pod.pod_name.rsplit_once('-').map(|(before, _)| before);
        let name = self.daemonset.filter(|name| !name.is_empty()).or_else(of_pod)?;
        let namespace = &self.pod.pod_namespace;
        (!namespace.is_empty() && !name.is_empty()).then(|| AgentPod {
            namespace: namespace.clone(),
            name_prefix: format!("{name}-"),
        })
    }
}

fn check_name(what: &str, name: Option<&str>, endings: &[&str]) -> Result<(), Error> {
    let Some(name) = name else { return Ok(()) };
    let ending = name.rsplit_once('.').map(|(_, ending)| ending);
    if name.contains('/') || !ending.is_some_and(|ending| endings.contains(&ending)) {
        return Err(Error::Setting(format!(
            "{what}: {name:?} must be a file's name, without a directory, that ends in .{}",
            endings.join(" or .")
        )));
    }
    Ok(())
}

fn beside_this_program() -> PathBuf {
    let own = std::env::current_exe().unwrap_or_default();
    own.with_file_name(TYPE)
}

/// The agent's own DaemonSet, if it has one.
pub(super) fn daemonset(
    name: Option<String>,
    pod: &xds::Identity,
    cluster: impl FnOnce() -> Result<Cluster, Error>,
) -> Result<Option<leave::Config>, Error> {
    let Some(name) = name.filter(|name| !name.is_empty()) else {
        return Ok(None);
    };
    let missing = |what: &str| Error::Setting(format!("--daemonset: {what}"));
    let given = |text: &str, what: &str| match text.is_empty() {
        true => Err(missing(&format!(
            "{what} is missing, without which the DaemonSet cannot be asked for"
        ))),
        false => Ok(text.to_owned()),
    };
    Ok(Some(leave::Config {
        cluster: cluster()?,
        namespace: given(&pod.pod_namespace, "POD_NAMESPACE (--pod-namespace)")?,
        node: given(&pod.node_name, "NODE_NAME (--node-name)")?,
        name,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, planes::Environment, settings::Settings};

    fn load(variables: &[(&str, &str)]) -> Result<Config, String> {
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        let environment: Environment = variables.iter().map(owned).collect();
        let daemonset = environment.get("DAEMONSET").cloned();
        let flags = Settings {
            daemonset,
            ..Settings::default()
        };
        Config::load(flags, None, &environment).map_err(|error| error.to_string())
    }

    #[test]
    fn the_way_of_installing_follows_the_settings() {
        let chained = |file: Option<&str>| Mode::Chained {
            file: file.map(str::to_owned),
        };
        for (variables, expected) in [
            (&[][..], chained(None)),
            (&[("CNI_CONF_NAME", "10-a.conf")], chained(Some("10-a.conf"))),
            (
                &[("CHAINED_CNI_PLUGIN", "false")],
                Mode::Standalone {
                    file: "YYY-redirector-cni.conf".into(),
                },
            ),
            (
                &[("ISTIO_OWNED_CNI_CONFIG", "true")],
                Mode::Owned {
                    copy: "02-redirector.conflist".into(),
                    file: None,
                },
            ),
        ] {
            let config = load(variables).unwrap();
            assert_eq!(config.cni.installation.mode, expected, "{variables:?}");
            assert!(!config.cni.install);
        }
        for (variables, expected) in [
            (&[("CNI_CONF_NAME", "../a.conf")][..], "CNI_CONF_NAME"),
            (&[("CNI_CONF_NAME", "a.txt")], "must be a file's name"),
            (&[("CNI_INSTALL", "true"), ("INPOD_UDS", "/x")], "INPOD_UDS"),
            (
                &[
                    ("ISTIO_OWNED_CNI_CONFIG", "true"),
                    ("CHAINED_CNI_PLUGIN", "false"),
                ],
                "leave one out",
            ),
            (
                &[
                    ("ISTIO_OWNED_CNI_CONFIG", "true"),
                    ("ISTIO_OWNED_CNI_CONFIG_FILENAME", "02-a.conf"),
                ],
                ".conflist",
            ),
            (&[("DAEMONSET", "redirector")], "no Kubernetes is known"),
            (
                &[("DAEMONSET", "redirector"), ("KUBECONFIG", "/k")],
                "POD_NAMESPACE",
            ),
        ] {
            let error = load(variables).unwrap_err();
            assert!(error.contains(expected), "{variables:?}: {error}");
        }
    }

    #[test]
    fn the_agents_own_pods_are_told_by_its_daemonset_or_its_pods_name() {
        let pod = [
            ("POD_NAMESPACE", "mesh"),
            ("NODE_NAME", "n"),
            ("KUBECONFIG", "/k"),
        ];
        for (more, expected) in [
            (("POD_NAME", "redirector-x7k2p"), Some("redirector-")),
            (("DAEMONSET", "agent"), Some("agent-")),
            (("POD_IP", ""), None),
        ] {
            let config = load(&[&pod[..], &[more]].concat()).unwrap();
            let found = config.cni.installation.entry.agent_pod;
            assert_eq!(
                found.as_ref().map(|pod| pod.name_prefix.as_str()),
                expected,
                "{more:?}"
            );
        }
    }
}
