//! The pod event of a CNI plugin: the message that istio-cni's plugin posts to its agent (Go's encoding of
//! `CNIPluginAddEvent`, cni/pkg/nodeagent), with three optional keys of ours.
//!
//! `cni::plugin` writes it, `cni_server` reads it. As in Go, keys are case-insensitive and unknown ones are ignored.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    path::{Path, PathBuf},
};

use base64::{Engine, engine::general_purpose::STANDARD};
use serde_json::{Map, Value, json};

use crate::mesh::pod::PodUid;

/// A pod event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// Path of the pod's network namespace: absolute.
    pub netns: Option<PathBuf>,
    /// Pod name.
    pub name: String,
    /// Kubernetes namespace.
    pub namespace: String,
    /// Addresses of the pod.
    pub addresses: Vec<Address>,
    /// Pod UID (`PodUID`), when the sender knows it.
    pub uid: Option<PodUid>,
    /// Service account (`ServiceAccount`), when the sender knows it.
    pub service_account: Option<String>,
    /// Annotations (`Annotations`), when the sender knows them: none are not the same as unknown ones.
    pub annotations: Option<BTreeMap<String, String>>,
}

/// An address of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Address {
    /// The address, in canonical form.
    pub ip: IpAddr,
    /// Length of its prefix, when told.
    pub prefix: Option<u8>,
}

/// Why a message is not an event.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nothing was sent.
    #[error("the body is empty: expected a JSON object with Netns, PodName, PodNamespace and IPs")]
    Empty,
    /// Not JSON.
    #[error("the body is not JSON")]
    Json(#[source] serde_json::Error),
    /// JSON, but no object.
    #[error("the body is not a JSON object")]
    NotAnObject,
    /// A key is missing or empty.
    #[error("{key} is missing or empty")]
    Missing {
        /// Which.
        key: &'static str,
    },
    /// A key has a value that cannot be.
    #[error("{key} is not {expected}: {value}")]
    Invalid {
        /// Which.
        key: String,
        /// What it should be.
        expected: &'static str,
        /// What it is.
        value: String,
    },
    /// The UID is not usable.
    #[error("PodUID is not usable")]
    Uid(#[source] crate::mesh::pod::InvalidPodUid),
}

impl Event {
    /// Reads an event. The namespace may be absent; whether that is right depends on the request.
    pub fn parse(body: &[u8]) -> Result<Self, Error> {
        if body.iter().all(u8::is_ascii_whitespace) {
            return Err(Error::Empty);
        }
        let value: Value = serde_json::from_slice(body).map_err(Error::Json)?;
        let object = value.as_object().ok_or(Error::NotAnObject)?;
        let required = |key| string(object, key)?.ok_or(Error::Missing { key });
        let netns = string(object, "Netns")?.map(PathBuf::from);
        if let Some(path) = netns.as_deref().filter(|path| !usable(path)) {
            return Err(invalid(
                "Netns",
                "an absolute path",
                &json!(path.to_string_lossy()),
            ));
        }
        Ok(Self {
            netns,
            name: required("PodName")?,
            namespace: required("PodNamespace")?,
            addresses: addresses(object)?,
            uid: string(object, "PodUID")?
                .map(|uid| uid.parse())
                .transpose()
                .map_err(Error::Uid)?,
            service_account: string(object, "ServiceAccount")?,
            annotations: annotations(object)?,
        })
    }

    /// Writes it.
    pub fn to_json(&self) -> String {
        let ips: Vec<_> = self.addresses.iter().map(|address| address.to_json()).collect();
        let mut event = json!({
            "Netns": self.netns.as_deref().map(Path::to_string_lossy).unwrap_or_default(),
            "PodName": self.name,
            "PodNamespace": self.namespace,
            "IPs": ips,
        });
        if let Some(uid) = &self.uid {
            event["PodUID"] = uid.as_str().into();
        }
        if let Some(service_account) = &self.service_account {
            event["ServiceAccount"] = service_account.as_str().into();
        }
        if let Some(annotations) = &self.annotations {
            event["Annotations"] = json!(annotations);
        }
        event.to_string()
    }
}

fn usable(path: &Path) -> bool {
    path.is_absolute() && !path.as_os_str().as_encoded_bytes().contains(&0)
}

impl Address {
    fn to_json(self) -> Value {
        let width: u8 = if self.ip.is_ipv4() { 32 } else { 128 };
        let prefix = self.prefix.unwrap_or(width).min(width);
        let mask: Vec<u8> = (0..width / 8)
            .map(|byte| {
                u8::MAX
                    .checked_shl(u32::from(8 - prefix.saturating_sub(byte * 8).min(8)))
                    .unwrap_or(0)
            })
            .collect();
        json!({
            "Interface": null,
            "Address": { "IP": self.ip.to_string(), "Mask": STANDARD.encode(mask) },
            "Gateway": "",
        })
    }

    /// Go's encoding of net.IPNet: the mask is the base64 of its bytes. It steers nothing here; one that cannot be read is
    /// refused all the same, since it means that the sender speaks of something else.
    fn parse(position: usize, value: &Value) -> Result<Self, Error> {
        let key = |rest: &str| format!("IPs[{position}]{rest}");
        let entry = value
            .as_object()
            .ok_or_else(|| invalid(key(""), "an object", value))?;
        let address = field(entry, "Address").unwrap_or(&Value::Null);
        let address = address
            .as_object()
            .ok_or_else(|| invalid(key(".Address"), "an object", address))?;
        let ip = field(address, "IP").unwrap_or(&Value::Null);
        let ip: IpAddr = ip
            .as_str()
            .and_then(|text| text.parse().ok())
            .ok_or_else(|| invalid(key(".Address.IP"), "an IP address", ip))?;
        let prefix = match field(address, "Mask") {
            None => None,
            Some(mask) => Some(
                mask.as_str()
                    .and_then(|text| STANDARD.decode(text).ok())
                    .and_then(|bytes| prefix(&bytes))
                    .ok_or_else(|| {
                        invalid(key(".Address.Mask"), "the base64 of 4 or 16 bytes of mask", mask)
                    })?,
            ),
        };
        Ok(Self {
            ip: ip.to_canonical(),
            prefix,
        })
    }
}

/// Length of the prefix that a mask stands for.
fn prefix(mask: &[u8]) -> Option<u8> {
    let bits = match *mask {
        [a, b, c, d] => u128::from(u32::from_be_bytes([a, b, c, d])) << 96,
        _ => u128::from_be_bytes(mask.try_into().ok()?),
    };
    let ones = bits.leading_ones();
    (bits.count_ones() == ones).then_some(ones as u8)
}

fn addresses(object: &Map<String, Value>) -> Result<Vec<Address>, Error> {
    let Some(value) = field(object, "IPs") else {
        return Ok(Vec::new());
    };
    let list = value.as_array().ok_or_else(|| invalid("IPs", "a list", value))?;
    list.iter()
        .enumerate()
        .map(|(position, entry)| Address::parse(position, entry))
        .collect()
}

fn annotations(object: &Map<String, Value>) -> Result<Option<BTreeMap<String, String>>, Error> {
    let Some(value) = field(object, "Annotations") else {
        return Ok(None);
    };
    let expected = "an object of texts";
    let map = value
        .as_object()
        .ok_or_else(|| invalid("Annotations", expected, value))?;
    map.iter()
        .map(|(name, value)| match value {
            Value::String(text) => Ok((name.clone(), text.clone())),
            other => Err(invalid(format!("Annotations[{name:?}]"), "a text", other)),
        })
        .collect::<Result<_, _>>()
        .map(Some)
}

/// A key's value as Go finds it: the exact key, else one that differs in case. `null` is as good as absent.
fn field<'a>(object: &'a Map<String, Value>, key: &str) -> Option<&'a Value> {
    let similar = || {
        object
            .iter()
            .find(|(found, _)| found.eq_ignore_ascii_case(key))
            .map(|(_, value)| value)
    };
    object.get(key).or_else(similar).filter(|value| !value.is_null())
}

/// A text; an empty one is as good as absent.
fn string(object: &Map<String, Value>, key: &str) -> Result<Option<String>, Error> {
    match field(object, key) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone()).filter(|text| !text.is_empty())),
        Some(other) => Err(invalid(key, "a text", other)),
    }
}

fn invalid(key: impl Into<String>, expected: &'static str, value: &Value) -> Error {
    Error::Invalid {
        key: key.into(),
        expected,
        value: value.to_string().chars().take(100).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::Chain;

    #[test]
    fn the_event_of_istios_plugin_is_read() {
        let event = Event::parse(
            br#"{"Netns":"/var/run/netns/cni-7d3","PodName":"web-0","PodNamespace":"shop","IPs":[
                {"Interface":2,"Address":{"IP":"10.4.1.9","Mask":"////AA=="},"Gateway":"10.4.1.1"},
                {"Interface":null,"Address":{"IP":"fd00::9","Mask":"//////////8AAAAAAAAAAA=="},"Gateway":""}]}"#,
        )
        .unwrap();
        assert_eq!(event.netns.unwrap(), Path::new("/var/run/netns/cni-7d3"));
        assert_eq!((event.name.as_str(), event.namespace.as_str()), ("web-0", "shop"));
        assert_eq!(
            event.addresses,
            [
                Address {
                    ip: "10.4.1.9".parse().unwrap(),
                    prefix: Some(24)
                },
                Address {
                    ip: "fd00::9".parse().unwrap(),
                    prefix: Some(64)
                },
            ]
        );
        assert_eq!((event.uid, event.service_account), (None, None));
    }

    #[test]
    fn keys_are_read_as_go_reads_them() {
        let event = Event::parse(
            br#"{"netns":"/n","PODNAME":"wrong","PodName":"p","podnamespace":"ns","ips":null,"Extra":{"a":[1]},
                "poduid":"u-1","serviceaccount":"sa","Labels":null}"#,
        )
        .unwrap();
        assert_eq!((event.name.as_str(), event.namespace.as_str()), ("p", "ns"));
        assert_eq!(event.uid.unwrap().as_str(), "u-1");
        assert_eq!(event.service_account.unwrap(), "sa");
        assert!(event.addresses.is_empty());
    }

    #[test]
    fn mapped_addresses_are_canonical() {
        let event = Event::parse(
            br#"{"PodName":"p","PodNamespace":"n","IPs":[{"Address":{"IP":"::ffff:10.0.0.1"}}]}"#,
        );
        assert_eq!(event.unwrap().addresses[0].ip, IpAddr::from([10, 0, 0, 1]));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let table: [(&str, &str); 16] = [
            ("", "empty"),
            (" \n", "empty"),
            ("{", "not JSON"),
            ("[]", "not a JSON object"),
            ("null", "not a JSON object"),
            (r#"{"PodNamespace":"n"}"#, "PodName is missing"),
            (r#"{"PodName":"","PodNamespace":"n"}"#, "PodName is missing"),
            (r#"{"PodName":"p"}"#, "PodNamespace is missing"),
            (r#"{"PodName":7,"PodNamespace":"n"}"#, "PodName is not a text: 7"),
            (
                r#"{"Netns":"run/x","PodName":"p","PodNamespace":"n"}"#,
                "Netns is not an absolute path",
            ),
            (
                r#"{"Netns":"/x\u0000","PodName":"p","PodNamespace":"n"}"#,
                "Netns is not an absolute path",
            ),
            (
                r#"{"PodName":"p","PodNamespace":"n","IPs":{}}"#,
                "IPs is not a list",
            ),
            (
                r#"{"PodName":"p","PodNamespace":"n","IPs":[{}]}"#,
                "IPs[0].Address is not an object",
            ),
            (
                r#"{"PodName":"p","PodNamespace":"n","IPs":[{"Address":{"IP":"x"}}]}"#,
                "IPs[0].Address.IP is not",
            ),
            (
                r#"{"PodName":"p","PodNamespace":"n","IPs":[{"Address":{"IP":"1.1.1.1","Mask":"!"}}]}"#,
                "IPs[0].Address.Mask is not",
            ),
            (
                r#"{"PodName":"p","PodNamespace":"n","PodUID":"../x"}"#,
                "PodUID is not usable",
            ),
        ];
        for (body, expected) in table {
            let error = Event::parse(body.as_bytes()).unwrap_err();
            let text = Chain(&error).to_string();
            assert!(text.contains(expected), "{body:?}: {text}");
        }
    }

    #[test]
    fn what_is_written_is_read_back() {
        let event = Event {
            netns: Some("/var/run/netns/x".into()),
            name: "web-0".into(),
            namespace: "shop".into(),
            addresses: vec![
                Address {
                    ip: "10.4.1.9".parse().unwrap(),
                    prefix: Some(25),
                },
                Address {
                    ip: "fd00::9".parse().unwrap(),
                    prefix: Some(128),
                },
                Address {
                    ip: "fd00::a".parse().unwrap(),
                    prefix: Some(0),
                },
            ],
            uid: Some("u".parse().unwrap()),
            service_account: Some("web".into()),
            annotations: None,
        };
        let some = BTreeMap::from([("redirector.io/exclude-inbound-ports".into(), "22".into())]);
        for annotations in [None, Some(BTreeMap::new()), Some(some)] {
            let event = Event {
                annotations,
                ..event.clone()
            };
            assert_eq!(Event::parse(event.to_json().as_bytes()).unwrap(), event);
        }
    }
}
