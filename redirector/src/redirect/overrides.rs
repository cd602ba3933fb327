//! What one place says about a pod's rules: an entry of the rules file, or the pod's annotations. What it does not say, a weaker place
//! does.

use std::{collections::BTreeMap, fmt, marker::PhantomData, str::FromStr};

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{Error as _, SeqAccess, Visitor},
};

use super::rules::{Interfaces, InvalidList, Lists, Networks, Ports, Rules};

/// Rules as one place gives them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
pub struct Overrides {
    /// Capture only connections to these ports.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub include_outbound_ports: Option<Ports>,
    /// Leave connections to these ports alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exclude_outbound_ports: Option<Ports>,
    /// Capture only connections to these addresses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub include_outbound_networks: Option<Networks>,
    /// Leave connections to these addresses alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exclude_outbound_networks: Option<Networks>,
    /// Capture only connections to these ports of the pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub include_inbound_ports: Option<Ports>,
    /// Leave connections to these ports of the pod alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exclude_inbound_ports: Option<Ports>,
    /// Capture only connections from these addresses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub include_inbound_networks: Option<Networks>,
    /// Leave connections from these addresses alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exclude_inbound_networks: Option<Networks>,
    /// Capture nothing inbound but HBONE.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bypass_inbound_capture: Option<bool>,
    /// The pod's DNS goes to the listeners of port 15053 in the pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dns_capture: Option<bool>,
    /// What arrives by these interfaces of the pod is outbound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reroute_virtual_interfaces: Option<Interfaces>,
    /// What is captured and would go in plain is refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub strict: Option<bool>,
}

/// Before the names of our own annotations.
const PREFIX: &str = "redirector.io/";

/// Why a pod's annotations are not usable.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("annotation {name}")]
pub struct InvalidAnnotation {
    name: String,
    #[source]
    source: InvalidList,
}

impl Overrides {
    /// These, and for what they lack those of `weaker`.
    pub fn or(self, weaker: &Self) -> Self {
        let weaker = weaker.clone();
        Self {
            include_outbound_ports: self.include_outbound_ports.or(weaker.include_outbound_ports),
            exclude_outbound_ports: self.exclude_outbound_ports.or(weaker.exclude_outbound_ports),
            include_outbound_networks: self
                .include_outbound_networks
                .or(weaker.include_outbound_networks),
            exclude_outbound_networks: self
                .exclude_outbound_networks
                .or(weaker.exclude_outbound_networks),
            include_inbound_ports: self.include_inbound_ports.or(weaker.include_inbound_ports),
            exclude_inbound_ports: self.exclude_inbound_ports.or(weaker.exclude_inbound_ports),
            include_inbound_networks: self.include_inbound_networks.or(weaker.include_inbound_networks),
            exclude_inbound_networks: self.exclude_inbound_networks.or(weaker.exclude_inbound_networks),
            bypass_inbound_capture: self.bypass_inbound_capture.or(weaker.bypass_inbound_capture),
            dns_capture: self.dns_capture.or(weaker.dns_capture),
            reroute_virtual_interfaces: self
                .reroute_virtual_interfaces
                .or(weaker.reroute_virtual_interfaces),
            strict: self.strict.or(weaker.strict),
        }
    }

    /// What a pod's annotations say. Others are none of our business. Istio's own that cannot be read are ignored with a warning,
    /// as Istio does.
    ///
    /// # Errors
    /// An annotation of ours that is no list.
    pub fn from_annotations(annotations: &BTreeMap<String, String>) -> Result<Self, InvalidAnnotation> {
        Ok(Self {
            include_outbound_ports: list(annotations, "include-outbound-ports")?,
            exclude_outbound_ports: list(annotations, "exclude-outbound-ports")?,
            include_outbound_networks: list(annotations, "include-outbound-networks")?,
            exclude_outbound_networks: list(annotations, "exclude-outbound-networks")?,
            include_inbound_ports: list(annotations, "include-inbound-ports")?,
            exclude_inbound_ports: list(annotations, "exclude-inbound-ports")?,
            include_inbound_networks: list(annotations, "include-inbound-networks")?,
            exclude_inbound_networks: list(annotations, "exclude-inbound-networks")?,
            bypass_inbound_capture: switch(annotations, "ambient.istio.io/bypass-inbound-capture"),
            dns_capture: switch(annotations, "ambient.istio.io/dns-capture"),
            reroute_virtual_interfaces: parsed(
                annotations,
                "istio.io/reroute-virtual-interfaces".to_owned(),
            )?,
            strict: own_switch(annotations, "strict")?,
        })
    }

    /// The rules, where nobody says anything else.
    pub fn into_rules(self) -> Rules {
        Rules {
            outbound: Lists {
                only_ports: self.include_outbound_ports,
                not_ports: self.exclude_outbound_ports.unwrap_or_default(),
                only_networks: self.include_outbound_networks,
                not_networks: self.exclude_outbound_networks.unwrap_or_default(),
            },
            inbound: Lists {
                only_ports: self.include_inbound_ports,
                not_ports: self.exclude_inbound_ports.unwrap_or_default(),
                only_networks: self.include_inbound_networks,
                not_networks: self.exclude_inbound_networks.unwrap_or_default(),
            },
            bypass_inbound: self.bypass_inbound_capture.unwrap_or_default(),
            dns_capture: self.dns_capture.unwrap_or_default(),
            reroute_interfaces: self.reroute_virtual_interfaces.unwrap_or_default(),
            strict: self.strict.unwrap_or_default(),
        }
    }
}

fn list<T: FromStr<Err = InvalidList>>(
    annotations: &BTreeMap<String, String>,
    name: &str,
) -> Result<Option<T>, InvalidAnnotation> {
    parsed(annotations, format!("{PREFIX}{name}"))
}

fn parsed<T: FromStr<Err = InvalidList>>(
    annotations: &BTreeMap<String, String>,
    name: String,
) -> Result<Option<T>, InvalidAnnotation> {
    let parsed = annotations.get(&name).map(|text| text.parse()).transpose();
    parsed.map_err(|source| InvalidAnnotation { name, source })
}

/// A switch of ours. A word that is none must not leave the pod less strict than it was meant to be.
fn own_switch(annotations: &BTreeMap<String, String>, name: &str) -> Result<Option<bool>, InvalidAnnotation> {
    let name = format!("{PREFIX}{name}");
    let Some(text) = annotations.get(&name) else {
        return Ok(None);
    };
    match truth(text) {
        Some(value) => Ok(Some(value)),
        None => Err(InvalidAnnotation {
            name,
            source: InvalidList::Switch(text.clone()),
        }),
    }
}

/// The words that Go's strconv.ParseBool takes.
fn truth(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "TRUE" | "true" | "True" => Some(true),
        "0" | "f" | "F" | "FALSE" | "false" | "False" => Some(false),
        _ => None,
    }
}

/// A switch of Istio's.
fn switch(annotations: &BTreeMap<String, String>, name: &str) -> Option<bool> {
    let text = annotations.get(name)?;
    let value = truth(text);
    if value.is_none() {
        tracing::warn!(annotation = name, value = text, "neither true nor false: ignored");
    }
    value
}

/// Lists are read as text, as a number, or as a sequence of these; they are written as text.
macro_rules! as_list {
    ($($list:ty),*) => {
        $(
            impl<'de> Deserialize<'de> for $list {
                fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                    let text = deserializer.deserialize_any(Items(PhantomData::<Self>))?;
                    text.parse().map_err(D::Error::custom)
                }
            }

            impl Serialize for $list {
                fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                    serializer.collect_str(self)
                }
            }
        )*
    };
}

as_list!(Ports, Networks, Interfaces);

/// Reads a list's text.
struct Items<T>(PhantomData<T>);

impl<'de, T> Visitor<'de> for Items<T> {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list, as text with commas or as a sequence")
    }

    fn visit_str<E>(self, text: &str) -> Result<String, E> {
        Ok(text.to_owned())
    }

    fn visit_u64<E>(self, number: u64) -> Result<String, E> {
        Ok(number.to_string())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<String, A::Error> {
        /// An item, of either form.
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "a text or a number")]
        enum Item {
            Number(u64),
            Text(String),
        }
        let mut texts = Vec::new();
        while let Some(item) = items.next_element()? {
            texts.push(match item {
                Item::Number(number) => number.to_string(),
                Item::Text(text) => text,
            });
        }
        Ok(texts.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn annotations(given: &[(&str, &str)]) -> BTreeMap<String, String> {
        given
            .iter()
            .map(|(name, value)| ((*name).into(), (*value).into()))
            .collect()
    }

    #[test]
    fn annotations_are_read() {
        let said = Overrides::from_annotations(&annotations(&[
            ("redirector.io/exclude-outbound-ports", "3306,5000-5010"),
            ("redirector.io/include-inbound-networks", ""),
            ("ambient.istio.io/bypass-inbound-capture", "T"),
            ("ambient.istio.io/dns-capture", "true"),
            ("istio.io/reroute-virtual-interfaces", "k6t-eth0,docker0"),
            ("redirector.io/strict", "true"),
            ("other.example/exclude-outbound-ports", "x"),
        ]));
        let rules = said.unwrap().into_rules();
        assert_eq!(rules.outbound.not_ports.to_string(), "3306,5000-5010");
        assert_eq!(rules.inbound.only_networks, Some(Networks::default()));
        assert_eq!(rules.inbound.only_ports, None);
        assert!(rules.bypass_inbound && rules.dns_capture && rules.strict);
        assert_eq!(rules.reroute_interfaces.0, ["k6t-eth0", "docker0"]);
    }

    #[test]
    fn what_cannot_be_read_is_told_or_ignored() {
        let bad = annotations(&[("redirector.io/exclude-inbound-networks", "10.0.0.0/99")]);
        let error = Overrides::from_annotations(&bad).unwrap_err();
        assert_eq!(
            error.to_string(),
            "annotation redirector.io/exclude-inbound-networks"
        );
        let error =
            Overrides::from_annotations(&annotations(&[("redirector.io/strict", "yes")])).unwrap_err();
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert_eq!(source, "\"yes\" is neither true nor false");
        let bad = annotations(&[("ambient.istio.io/bypass-inbound-capture", "yes")]);
        assert_eq!(Overrides::from_annotations(&bad).unwrap(), Overrides::default());
    }

    #[test]
    fn the_stronger_says_what_it_says() {
        let read = |text: &str| serde_yaml::from_str::<Overrides>(text).unwrap();
        let strong = read("{excludeOutboundPorts: [80, 8000-8010], bypassInboundCapture: false}");
        let weak = read("{excludeOutboundPorts: 22, excludeInboundPorts: '9', bypassInboundCapture: true}");
        let both = strong.or(&weak);
        assert_eq!(
            both,
            read(
                "{excludeOutboundPorts: '80,8000-8010', excludeInboundPorts: 9, bypassInboundCapture: false}"
            )
        );
        let written = serde_yaml::to_string(&both).unwrap();
        assert_eq!(read(&written), both, "{written}");
    }

    #[test]
    fn a_file_that_is_wrong_says_where() {
        for (text, problem) in [
            ("excludeOutboundPorts: 70000", "70000"),
            ("excludeOutboundPorts: {a: b}", "a list, as text with commas"),
            ("excludeOutboundPort: 1", "excludeOutboundPort"),
            ("excludeInboundNetworks: [10.0.0.0/8, x]", "\"x\""),
        ] {
            let error = serde_yaml::from_str::<Overrides>(text).unwrap_err().to_string();
            assert!(error.contains(problem), "{error}");
        }
    }
}
