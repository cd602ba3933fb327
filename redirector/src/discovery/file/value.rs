//! The kinds of values that the workload file is made of. Each refuses what is wrong with it while the YAML library still
//! knows the line.

use std::{collections::BTreeMap, fmt, marker::PhantomData, net::IpAddr};

use litemap::LiteMap;

use serde::{
    Deserialize, Deserializer,
    de::{self, DeserializeOwned, IgnoredAny, MapAccess, SeqAccess, Visitor, value::MapAccessDeserializer},
};

use crate::mesh::{
    policy::{Cidr, PolicyName},
    spiffe::SpiffeId,
    workload::{GatewayDestination, NamespacedHostname, NetworkAddress, canonical},
};

/// A value that is written as a mapping and has rules over several of its keys.
pub(super) trait Object: Sized {
    /// The mapping.
    type Raw: DeserializeOwned;
    /// What it is, for errors.
    const EXPECTED: &'static str;

    /// Checks and converts it.
    fn check(raw: Self::Raw) -> Result<Self, String>;
}

/// An [`Object`], checked within its mapping: errors of the check then have the line of the mapping.
#[derive(Debug)]
pub(super) struct Checked<T>(pub(super) T);

impl<'de, T: Object> Deserialize<'de> for Checked<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Mapping<T>(PhantomData<T>);

        impl<'de, T: Object> Visitor<'de> for Mapping<T> {
            type Value = Checked<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(T::EXPECTED)
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                let raw = T::Raw::deserialize(MapAccessDeserializer::new(map))?;
                T::check(raw).map(Checked).map_err(de::Error::custom)
            }
        }

        deserializer.deserialize_map(Mapping(PhantomData))
    }
}

/// A text that is not empty.
pub(super) struct Filled(pub(super) String);

impl<'de> Deserialize<'de> for Filled {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        if text.is_empty() {
            Err(de::Error::custom("must not be empty"))
        } else {
            Ok(Self(text))
        }
    }
}

/// A mapping in which no key may come twice: the YAML library would let the last one win.
pub(super) struct Unique<K, V>(pub(super) BTreeMap<K, V>);

impl<K: Into<u16>, V> Unique<K, V> {
    /// As ports, with the values converted.
    pub(super) fn into_ports(self, value: impl Fn(V) -> u16) -> LiteMap<u16, u16> {
        self.0
            .into_iter()
            .map(|(from, to)| (from.into(), value(to)))
            .collect()
    }
}

impl<'de, K, V> Deserialize<'de> for Unique<K, V>
where
    K: Deserialize<'de> + Ord + fmt::Display,
    V: Deserialize<'de>,
{
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Mapping<K, V>(PhantomData<(K, V)>);

        impl<'de, K, V> Visitor<'de> for Mapping<K, V>
        where
            K: Deserialize<'de> + Ord + fmt::Display,
            V: Deserialize<'de>,
        {
            type Value = Unique<K, V>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a mapping")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = BTreeMap::new();
                while let Some(key) = map.next_key::<K>()? {
                    if entries.contains_key(&key) {
                        return Err(de::Error::custom(format_args!("key {key} comes twice")));
                    }
                    entries.insert(key, map.next_value()?);
                }
                Ok(Unique(entries))
            }
        }

        deserializer.deserialize_map(Mapping(PhantomData))
    }
}

/// A value that is written as a text of its own form.
pub(super) trait FromText: Sized {
    /// Parses it; the error says what would be right.
    fn from_text(text: &str) -> Result<Self, String>;
}

/// A [`FromText`] value.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Text<T>(pub(super) T);

impl<T: fmt::Display> fmt::Display for Text<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<'de, T: FromText> Deserialize<'de> for Text<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Parse<T>(PhantomData<T>);

        impl<T: FromText> Visitor<'_> for Parse<T> {
            type Value = Text<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
                T::from_text(text).map(Text).map_err(E::custom)
            }
        }

        deserializer.deserialize_str(Parse(PhantomData))
    }
}

impl FromText for NamespacedHostname {
    fn from_text(text: &str) -> Result<Self, String> {
        match text.split_once('/') {
            Some((namespace, hostname))
                if !namespace.is_empty() && !hostname.is_empty() && !hostname.contains('/') =>
            {
                Ok(Self {
                    namespace: namespace.into(),
                    hostname: hostname.into(),
                })
            }
            _ => Err(format!("{text:?} is not of the form namespace/hostname")),
        }
    }
}

impl FromText for NetworkAddress {
    fn from_text(text: &str) -> Result<Self, String> {
        text.split_once('/')
            .and_then(|(network, address)| {
                let address: IpAddr = address.parse().ok()?;
                Some(Self {
                    network: network.into(),
                    address: canonical(address),
                })
            })
            .ok_or_else(|| {
                format!(
                    "{text:?} is not of the form network/address; the default network is empty: \"/10.0.0.1\""
                )
            })
    }
}

impl FromText for GatewayDestination {
    fn from_text(text: &str) -> Result<Self, String> {
        NetworkAddress::from_text(text)
            .map(Self::Address)
            .or_else(|_| NamespacedHostname::from_text(text).map(Self::Hostname))
            .map_err(|_| format!("{text:?} is neither network/address nor namespace/hostname"))
    }
}

impl FromText for PolicyName {
    fn from_text(text: &str) -> Result<Self, String> {
        match text.split_once('/') {
            Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() && !name.contains('/') => {
                Ok(Self {
                    namespace: namespace.into(),
                    name: name.into(),
                })
            }
            _ => Err(format!("{text:?} is not of the form namespace/name")),
        }
    }
}

impl FromText for Cidr {
    fn from_text(text: &str) -> Result<Self, String> {
        text.parse()
            .map_err(|error: crate::mesh::policy::InvalidPattern| error.to_string())
    }
}

impl FromText for SpiffeId {
    fn from_text(text: &str) -> Result<Self, String> {
        text.parse()
            .map_err(|error: crate::mesh::spiffe::InvalidSpiffeId| error.to_string())
    }
}

pub(super) fn no_endpoints<'de, D: Deserializer<'de>>(deserializer: D) -> Result<(), D::Error> {
    deserializer.deserialize_any(Nothing(
        "endpoints are named by the workloads: list the service in their services",
    ))
}

/// A value that is written as a mapping, or as the text of its main part alone.
pub(super) fn text_or_mapping<'de, D, T, M>(deserializer: D) -> Result<M, D::Error>
where
    D: Deserializer<'de>,
    T: FromText,
    M: Deserialize<'de> + From<Text<T>>,
{
    struct Either<T, M>(PhantomData<(T, M)>);

    impl<'de, T: FromText, M: Deserialize<'de> + From<Text<T>>> Visitor<'de> for Either<T, M> {
        type Value = M;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a text or a mapping")
        }

        fn visit_str<E: de::Error>(self, text: &str) -> Result<M, E> {
            T::from_text(text)
                .map(|value| M::from(Text(value)))
                .map_err(E::custom)
        }

        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<M, A::Error> {
            M::deserialize(MapAccessDeserializer::new(map))
        }
    }

    deserializer.deserialize_any(Either(PhantomData))
}

/// Takes null, an empty list or an empty mapping; says of anything else why not.
pub(super) struct Nothing(pub(super) &'static str);

impl<'de> Visitor<'de> for Nothing {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "nothing ({})", self.0)
    }

    fn visit_unit<E: de::Error>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        match seq.next_element::<IgnoredAny>()? {
            Some(_) => Err(de::Error::custom(self.0)),
            None => Ok(()),
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        match map.next_key::<IgnoredAny>()? {
            Some(_) => Err(de::Error::custom(self.0)),
            None => Ok(()),
        }
    }
}
