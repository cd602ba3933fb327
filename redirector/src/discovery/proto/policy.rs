//! Policies of the control plane.

use std::sync::Arc;

use prost::Message;

use super::{Decoded, ip, known, messages as proto, u16_port};
use crate::mesh::{
    index::Update,
    policy::{
        Action, Cidr, Clause, InvalidPattern, Match, Policy, PolicyName, Rule, Scope, ServiceAccount,
        StringMatch,
    },
};

/// A policy's key: `namespace/name`.
pub(super) fn name(text: &str) -> Result<PolicyName, String> {
    let (namespace, name) = text
        .split_once('/')
        .ok_or_else(|| format!("policy {text:?} is not of the form namespace/name"))?;
    Ok(PolicyName {
        namespace: namespace.into(),
        name: name.into(),
    })
}

/// Decodes a policy; one with rules that cannot be understood errs to the side of refusing, and says so.
pub(super) fn decode(bytes: &[u8]) -> Decoded {
    match policy(bytes) {
        Ok((policy, problems)) => Decoded {
            update: Some(Update::Policy(Arc::new(policy))),
            problem: (!problems.is_empty()).then(|| problems.join(", ")),
        },
        Err(problem) => Err(problem).into(),
    }
}

fn policy(bytes: &[u8]) -> Result<(Policy, Vec<String>), String> {
    let raw = proto::Authorization::decode(bytes).map_err(|error| error.to_string())?;
    if raw.name.is_empty() {
        return Err("the policy has no name".to_owned());
    }
    let mut problems = Vec::new();
    let mut rules = Vec::new();
    let action = match known("action", raw.action) {
        Ok(proto::Action::Allow) => Action::Allow,
        Ok(proto::Action::Deny) => Action::Deny,
        Err(problem) => {
            problems.push(format!("{problem}; it denies everybody until it is understood"));
            rules.push(Rule::new());
            Action::Deny
        }
    };
    let scope = match known("scope", raw.scope) {
        Ok(proto::Scope::Global) => Scope::Global,
        Ok(proto::Scope::Namespace) => Scope::Namespace,
        Ok(proto::Scope::WorkloadSelector) => Scope::WorkloadSelector,
        Err(problem) => {
            problems.push(format!(
                "{problem}; it is for its whole namespace until it is understood"
            ));
            Scope::Namespace
        }
    };
    let (told, instead) = match action {
        Action::Allow => ("permits nobody", None),
        // Without clauses: everything.
        Action::Deny => ("denies everybody", Some(Rule::new())),
    };
    if let Some(extension) = raw.extensions.first() {
        // It may say anything of the rules: none of them is understood.
        let name = &extension.name;
        problems.push(format!(
            "extension {name:?} is not known; the policy {told} until it is understood"
        ));
        rules = instead.into_iter().collect();
    } else {
        for (at, raw) in raw.rules.iter().enumerate() {
            match rule(raw) {
                Ok(rule) => rules.push(rule),
                Err(problem) => {
                    problems.push(format!(
                        "rules[{at}]: {problem}; it {told} until it is understood"
                    ));
                    rules.extend(instead.clone());
                }
            }
        }
    }
    let policy = Policy {
        key: PolicyName {
            namespace: raw.namespace.into(),
            name: raw.name.into(),
        },
        scope,
        action,
        dry_run: raw.dry_run,
        rules,
    };
    Ok((policy, problems))
}

fn rule(raw: &proto::Rule) -> Result<Rule, String> {
    let clause = |raw: &proto::Clause| raw.matches.iter().map(one_match).collect::<Result<Clause, _>>();
    raw.clauses.iter().map(clause).collect()
}

fn one_match(raw: &proto::Match) -> Result<Match, String> {
    if let Some(extension) = raw.extensions.first() {
        return Err(format!("extension {:?} is not known", extension.name));
    }
    Ok(Match {
        namespaces: each("namespaces", &raw.namespaces, text)?,
        not_namespaces: each("not_namespaces", &raw.not_namespaces, text)?,
        // Not refused with spiffe:// at its beginning, as it is in a file: it is understood, and matches nobody.
        principals: each("principals", &raw.principals, text)?,
        not_principals: each("not_principals", &raw.not_principals, text)?,
        source_ips: each("source_ips", &raw.source_ips, cidr)?,
        not_source_ips: each("not_source_ips", &raw.not_source_ips, cidr)?,
        destination_ips: each("destination_ips", &raw.destination_ips, cidr)?,
        not_destination_ips: each("not_destination_ips", &raw.not_destination_ips, cidr)?,
        destination_ports: each("destination_ports", &raw.destination_ports, port)?,
        not_destination_ports: each("not_destination_ports", &raw.not_destination_ports, port)?,
        service_accounts: each("service_accounts", &raw.service_accounts, account)?,
        not_service_accounts: each("not_service_accounts", &raw.not_service_accounts, account)?,
    })
}

fn each<R, T>(field: &str, raw: &[R], convert: impl Fn(&R) -> Result<T, String>) -> Result<Vec<T>, String> {
    let converted = raw.iter().map(convert).collect::<Result<_, _>>();
    converted.map_err(|problem| format!("{field}: {problem}"))
}

fn text(raw: &proto::StringMatch) -> Result<StringMatch, String> {
    let made: Result<_, InvalidPattern> = match &raw.kind {
        Some(proto::StringKind::Exact(text)) => StringMatch::exact(text),
        Some(proto::StringKind::Prefix(text)) => StringMatch::prefix(text),
        Some(proto::StringKind::Suffix(text)) => StringMatch::suffix(text),
        Some(proto::StringKind::Presence(())) => Ok(StringMatch::presence()),
        None => return Err("a text to compare with is not there".to_owned()),
    };
    made.map_err(|error| error.to_string())
}

fn cidr(raw: &proto::Cidr) -> Result<Cidr, String> {
    // With its own bytes: the length counts the bits of these, mapped or not.
    let address = match <[u8; 16]>::try_from(&*raw.address) {
        Ok(bytes) => bytes.into(),
        Err(_) => ip(&raw.address)?,
    };
    Cidr::new(address, raw.length).map_err(|error| error.to_string())
}

fn port(raw: &u32) -> Result<u16, String> {
    match u16_port(*raw)? {
        0 => Err("0 is no port".to_owned()),
        port => Ok(port),
    }
}

fn account(raw: &proto::ServiceAccountMatch) -> Result<ServiceAccount, String> {
    if raw.service_account.is_empty() {
        return Err("a service account has no name".to_owned());
    }
    Ok(ServiceAccount {
        namespace: raw.namespace.as_str().into(),
        name: raw.service_account.as_str().into(),
    })
}
