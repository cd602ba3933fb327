//! What the runtime passes: the network configuration with the result of the plugins before, and the pod.

use std::{
    io::{self, Read},
    net::IpAddr,
    path::PathBuf,
};

use serde::Deserialize;
use serde_json::{Value, json, value::RawValue};
use socket2::SockAddr;

use super::{Environment, error::Error};
use crate::{
    cni::entry::Entry,
    mesh::pod::PodUid,
    pods::wire::{Address, Event},
};

/// CNI versions that the plugin speaks; the result is another plugin's, so there is little to differ in.
pub(super) const VERSIONS: [&str; 6] = ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0", "1.2.0"];

/// The version of what is told before it is known which is asked for.
pub(super) const DEFAULT_VERSION: &str = "1.0.0";

/// Longest configuration.
const MAX_BYTES: u64 = 1024 * 1024;

/// The network configuration. Keys that are not named here or in [`Entry`] are the runtime's and are left alone.
pub(super) struct Network<'a> {
    pub(super) version: String,
    pub(super) entry: Entry,
    /// As it was written: it is passed on, not understood.
    prev_result: Option<&'a RawValue>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Frame<'a> {
    #[serde(default)]
    cni_version: String,
    #[serde(borrow, default)]
    prev_result: Option<&'a RawValue>,
}

/// Reads standard input to its end.
pub(super) fn read(input: &mut dyn Read) -> Result<Vec<u8>, Error> {
    let mut text = Vec::new();
    let read = input.take(MAX_BYTES + 1).read_to_end(&mut text);
    match read.map_err(Error::Input)? as u64 > MAX_BYTES {
        true => Err(Error::Input(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("it has more than {MAX_BYTES} bytes"),
        ))),
        false => Ok(text),
    }
}

/// The version that a text asks for, if it can be had.
pub(super) fn asked_version(text: &[u8]) -> Option<String> {
    let frame: Frame<'_> = serde_json::from_slice(text).ok()?;
    VERSIONS
        .contains(&frame.cni_version.as_str())
        .then_some(frame.cni_version)
}

impl<'a> Network<'a> {
    pub(super) fn parse(text: &'a [u8]) -> Result<Self, Error> {
        let Frame {
            cni_version: version,
            prev_result,
        } = serde_json::from_slice(text).map_err(Error::Config)?;
        if !VERSIONS.contains(&version.as_str()) {
            return Err(Error::Version(version));
        }
        Ok(Self {
            version,
            entry: serde_json::from_slice(text).map_err(Error::Config)?,
            prev_result,
        })
    }

    /// Whether the plugin can work by it.
    pub(super) fn check(&self) -> Result<(), Error> {
        let socket = self.entry.socket();
        let problem = if socket.is_absolute() {
            SockAddr::unix(socket).err().map(|error| {
                format!(
                    "is {}, which no socket can be bound to: {error}",
                    socket.display()
                )
            })
        } else {
            Some(format!(
                "is {:?}: it has to be an absolute path",
                socket.display()
            ))
        };
        match problem {
            None => Ok(()),
            Some(problem) => Err(Error::Key {
                key: "agentSocket",
                problem,
            }),
        }
    }

    /// The result of the plugins before.
    pub(super) fn prev_result(&self) -> Result<Option<Value>, Error> {
        let Some(raw) = self.prev_result else {
            return Ok(None);
        };
        let value: Value = serde_json::from_str(raw.get()).map_err(Error::Config)?;
        match value.is_object() {
            true => Ok(Some(value)),
            false => Err(Error::Key {
                key: "prevResult",
                problem: "is not an object".to_owned(),
            }),
        }
    }

    /// What ADD prints: the result of the plugins before, byte for byte. One that names another version than the one asked for,
    /// which runtimes do not send, is told to be of the latter.
    pub(super) fn result(&self) -> Result<String, Error> {
        match (self.prev_result()?, self.prev_result) {
            (Some(value), Some(raw)) if value["cniVersion"] == self.version => Ok(raw.get().to_owned()),
            (Some(mut value), _) => {
                value["cniVersion"] = self.version.as_str().into();
                Ok(value.to_string())
            }
            (None, _) => Ok(json!({ "cniVersion": self.version }).to_string()),
        }
    }

    /// The pod's addresses in the result of the plugins before; where none went before, they are not known.
    pub(super) fn addresses(&self) -> Result<Vec<Address>, Error> {
        let invalid = |key: String, expected| Error::PrevResult { key, expected };
        let result = self.prev_result()?.unwrap_or_default();
        let Some(ips) = result.get("ips").filter(|ips| !ips.is_null()) else {
            return Ok(Vec::new());
        };
        let ips = ips.as_array().ok_or_else(|| invalid("ips".into(), "a list"))?;
        let parse = |text: &str| {
            let (ip, prefix) = text.split_once('/')?;
            Some(Address {
                ip: ip.parse::<IpAddr>().ok()?.to_canonical(),
                prefix: Some(prefix.parse().ok()?),
            })
        };
        ips.iter()
            .enumerate()
            .map(|(position, ip)| {
                let address = ip.get("address").and_then(Value::as_str).and_then(parse);
                address.ok_or_else(|| invalid(format!("ips[{position}].address"), "an address with a prefix"))
            })
            .collect()
    }
}

/// The pod, by what kubelet has its runtime put into CNI_ARGS.
#[derive(Clone)]
pub(super) struct Pod {
    pub(super) namespace: String,
    pub(super) name: String,
    uid: Option<PodUid>,
}

impl Pod {
    /// The pod; none when this is no pod of Kubernetes.
    pub(super) fn parse(environment: Environment<'_>) -> Result<Option<Self>, Error> {
        let args = environment("CNI_ARGS").unwrap_or_default();
        let arg = |name: &str| {
            let mut pairs = args.split(';').filter_map(|pair| pair.split_once('='));
            let found = pairs.find(|(key, _)| *key == name);
            found
                .map(|(_, value)| value.to_owned())
                .filter(|value| !value.is_empty())
        };
        let invalid = |problem: String| Error::Environment {
            name: "CNI_ARGS",
            problem,
        };
        let (namespace, name) = match (arg("K8S_POD_NAMESPACE"), arg("K8S_POD_NAME")) {
            (None, None) => return Ok(None),
            (Some(namespace), Some(name)) => (namespace, name),
            (None, _) => return Err(invalid("has K8S_POD_NAME and no K8S_POD_NAMESPACE".to_owned())),
            (_, None) => return Err(invalid("has K8S_POD_NAMESPACE and no K8S_POD_NAME".to_owned())),
        };
        let uid = arg("K8S_POD_UID").map(|uid| uid.parse()).transpose();
        Ok(Some(Self {
            namespace,
            name,
            uid: uid.map_err(|error| invalid(format!("has an unusable K8S_POD_UID: {error}")))?,
        }))
    }

    /// What the agent is told of it.
    pub(super) fn event(self, netns: Option<PathBuf>, addresses: Vec<Address>) -> Event {
        Event {
            netns,
            name: self.name,
            namespace: self.namespace,
            addresses,
            uid: self.uid,
            service_account: None,
            annotations: None,
        }
    }
}

/// A variable that must be set.
pub(super) fn required(environment: Environment<'_>, name: &'static str) -> Result<String, Error> {
    environment(name)
        .filter(|value| !value.is_empty())
        .ok_or_else(|| Error::Environment {
            name,
            problem: "is not set".to_owned(),
        })
}
