//! Policies in the workload file, and their way into the mesh's own types.
//!
//! `rules` is a list of rules, which are lists of clauses, which are lists of matches. Texts to compare with are tagged:
//! `{Exact: shop}`, or with YAML's own tags `!Exact shop`, which is how ztunnel writes them.

use std::{fmt, num::NonZeroU16};

use serde::{
    Deserialize, Deserializer,
    de::{self, EnumAccess, MapAccess, VariantAccess, Visitor},
};

use super::value::{Checked, Filled, Nothing, Object, Text};
use crate::mesh::policy::{
    Action, Cidr, InvalidPattern, Match, Policy, PolicyName, Scope, ServiceAccount, StringMatch,
};

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct RawPolicy {
    name: Filled,
    namespace: Filled,
    scope: RawScope,
    action: RawAction,
    #[serde(default)]
    dry_run: bool,
    rules: Vec<Vec<Vec<Checked<Match>>>>,
}

#[derive(Deserialize)]
enum RawScope {
    Global,
    Namespace,
    WorkloadSelector,
}

#[derive(Deserialize)]
enum RawAction {
    Allow,
    Deny,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct RawMatch {
    namespaces: Vec<RawString>,
    not_namespaces: Vec<RawString>,
    principals: Vec<RawPrincipal>,
    not_principals: Vec<RawPrincipal>,
    source_ips: Vec<Text<Cidr>>,
    not_source_ips: Vec<Text<Cidr>>,
    destination_ips: Vec<Text<Cidr>>,
    not_destination_ips: Vec<Text<Cidr>>,
    destination_ports: Vec<NonZeroU16>,
    not_destination_ports: Vec<NonZeroU16>,
    service_accounts: Vec<RawServiceAccount>,
    not_service_accounts: Vec<RawServiceAccount>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RawServiceAccount {
    namespace: Filled,
    service_account: Filled,
}

impl Object for Policy {
    type Raw = RawPolicy;
    const EXPECTED: &'static str = "a policy";

    fn check(raw: RawPolicy) -> Result<Self, String> {
        let clause = |clause: Vec<Checked<Match>>| clause.into_iter().map(|one| one.0).collect();
        let rule = |rule: Vec<_>| rule.into_iter().map(clause).collect();
        Ok(Self {
            key: PolicyName {
                namespace: raw.namespace.0.into(),
                name: raw.name.0.into(),
            },
            scope: match raw.scope {
                RawScope::Global => Scope::Global,
                RawScope::Namespace => Scope::Namespace,
                RawScope::WorkloadSelector => Scope::WorkloadSelector,
            },
            action: match raw.action {
                RawAction::Allow => Action::Allow,
                RawAction::Deny => Action::Deny,
            },
            dry_run: raw.dry_run,
            rules: raw.rules.into_iter().map(rule).collect(),
        })
    }
}

impl Object for Match {
    type Raw = RawMatch;
    const EXPECTED: &'static str = "a match, such as {destinationPorts: [8080]}";

    fn check(raw: RawMatch) -> Result<Self, String> {
        let texts = |raw: Vec<RawString>| raw.into_iter().map(|raw| raw.0).collect();
        let principals = |raw: Vec<RawPrincipal>| raw.into_iter().map(|raw| raw.0).collect();
        let cidrs = |raw: Vec<Text<Cidr>>| raw.into_iter().map(|raw| raw.0).collect();
        let ports = |raw: Vec<NonZeroU16>| raw.into_iter().map(NonZeroU16::get).collect();
        let accounts = |raw: Vec<RawServiceAccount>| raw.into_iter().map(Into::into).collect();
        Ok(Self {
            namespaces: texts(raw.namespaces),
            not_namespaces: texts(raw.not_namespaces),
            principals: principals(raw.principals),
            not_principals: principals(raw.not_principals),
            source_ips: cidrs(raw.source_ips),
            not_source_ips: cidrs(raw.not_source_ips),
            destination_ips: cidrs(raw.destination_ips),
            not_destination_ips: cidrs(raw.not_destination_ips),
            destination_ports: ports(raw.destination_ports),
            not_destination_ports: ports(raw.not_destination_ports),
            service_accounts: accounts(raw.service_accounts),
            not_service_accounts: accounts(raw.not_service_accounts),
        })
    }
}

impl From<RawServiceAccount> for ServiceAccount {
    fn from(raw: RawServiceAccount) -> Self {
        Self {
            namespace: raw.namespace.0.into(),
            name: raw.service_account.0.into(),
        }
    }
}

/// A text to compare with.
struct RawString(StringMatch);

/// A text to compare a principal with.
struct RawPrincipal(StringMatch);

impl<'de> Deserialize<'de> for RawString {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Tagged(Ok)).map(Self)
    }
}

impl<'de> Deserialize<'de> for RawPrincipal {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer
            .deserialize_any(Tagged(StringMatch::for_principal))
            .map(Self)
    }
}

/// How a text is compared.
#[derive(Deserialize)]
#[serde(variant_identifier)]
enum Kind {
    Exact,
    Prefix,
    Suffix,
    Presence,
}

impl Kind {
    fn of(&self, text: &str) -> Result<StringMatch, InvalidPattern> {
        match self {
            Self::Exact => StringMatch::exact(text),
            Self::Prefix => StringMatch::prefix(text),
            Self::Suffix => StringMatch::suffix(text),
            Self::Presence => Ok(StringMatch::presence()),
        }
    }
}

/// Takes a [`StringMatch`], tagged in either way, that passes a check of its own.
struct Tagged(fn(StringMatch) -> Result<StringMatch, InvalidPattern>);

impl<'de> Visitor<'de> for Tagged {
    type Value = StringMatch;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text to compare with: {Exact: text}, {Prefix: text}, {Suffix: text} or {Presence: []}")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<StringMatch, A::Error> {
        let Some(kind) = map.next_key::<Kind>()? else {
            return Err(de::Error::invalid_length(0, &self));
        };
        let seed = Value(&kind, self.0);
        let value = map.next_value_seed(seed)?;
        match map.next_key::<de::IgnoredAny>()? {
            Some(_) => Err(de::Error::custom(
                "one text can be compared in one way only: write more of them in the list",
            )),
            None => Ok(value),
        }
    }

    fn visit_enum<A: EnumAccess<'de>>(self, tagged: A) -> Result<StringMatch, A::Error> {
        let (kind, value) = tagged.variant::<Kind>()?;
        value.newtype_variant_seed(Value(&kind, self.0))
    }
}

/// What stands behind the tag, checked while its line is known.
struct Value<'a>(&'a Kind, fn(StringMatch) -> Result<StringMatch, InvalidPattern>);

impl<'de> de::DeserializeSeed<'de> for Value<'_> {
    type Value = StringMatch;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<StringMatch, D::Error> {
        let Self(kind, check) = self;
        if let Kind::Presence = kind {
            deserializer.deserialize_any(Nothing("Presence has no text: write {Presence: []}"))?;
            return Ok(StringMatch::presence());
        }
        struct Checked<'a>(&'a Kind, fn(StringMatch) -> Result<StringMatch, InvalidPattern>);

        impl Visitor<'_> for Checked<'_> {
            type Value = StringMatch;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<StringMatch, E> {
                self.0.of(text).and_then(self.1).map_err(E::custom)
            }
        }
        deserializer.deserialize_str(Checked(kind, check))
    }
}

#[cfg(test)]
mod tests;
