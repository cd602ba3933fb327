//! L4 authorization: which connections a pod takes. Values that discovery fills, and their evaluation.
//!
//! `proxy` asks [`evaluate`] for each inbound connection, and again for the open ones when the policies have changed. The
//! semantics are Istio's for ztunnel (security.istio.io AuthorizationPolicy, as pushed to it); docs/policy.md has them in
//! short, with what is refused here that is dropped there.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use super::{spiffe::SpiffeId, workload::canonical};

mod pattern;

pub use self::pattern::{Cidr, InvalidPattern, StringMatch};

/// A policy's key, e.g. `shop/no-admin`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PolicyName {
    /// Kubernetes namespace.
    pub namespace: Arc<str>,
    /// Name.
    pub name: Arc<str>,
}

impl fmt::Display for PolicyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// Its key.
    pub key: PolicyName,
    /// Which workloads it is for.
    pub scope: Scope,
    /// What becomes of a connection that it matches.
    pub action: Action,
    /// For logs only: it decides nothing, and is no ALLOW policy that there is.
    pub dry_run: bool,
    /// It matches what one of them matches; none matches nothing.
    pub rules: Vec<Rule>,
}

/// Matches what each of its clauses matches; without any, everything.
pub type Rule = Vec<Clause>;

/// Matches what one of its matches does; without any, everything.
pub type Clause = Vec<Match>;

/// Which workloads a policy is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// All.
    Global,
    /// All in the policy's namespace.
    Namespace,
    /// Those that name it.
    WorkloadSelector,
}

/// What becomes of a connection that a policy matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// It is permitted, unless a DENY policy matches it too. That there is such a policy denies the rest.
    Allow,
    /// It is denied.
    Deny,
}

/// What a connection must be like, in every field that is not empty. Of a field's values one must be met; of a negated
/// field's, none. With no field at all it matches nothing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Match {
    /// Kubernetes namespace of the peer's identity; empty without one.
    pub namespaces: Vec<StringMatch>,
    /// Negated.
    pub not_namespaces: Vec<StringMatch>,
    /// The peer's identity without `spiffe://`, under any name of its trust domain; never met without one.
    pub principals: Vec<StringMatch>,
    /// Negated.
    pub not_principals: Vec<StringMatch>,
    /// The peer's address.
    pub source_ips: Vec<Cidr>,
    /// Negated.
    pub not_source_ips: Vec<Cidr>,
    /// The pod's address.
    pub destination_ips: Vec<Cidr>,
    /// Negated.
    pub not_destination_ips: Vec<Cidr>,
    /// The application's port.
    pub destination_ports: Vec<u16>,
    /// Negated.
    pub not_destination_ports: Vec<u16>,
    /// The peer's service account, in any trust domain.
    pub service_accounts: Vec<ServiceAccount>,
    /// Negated.
    pub not_service_accounts: Vec<ServiceAccount>,
}

/// A Kubernetes service account.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceAccount {
    /// Kubernetes namespace.
    pub namespace: Arc<str>,
    /// Name.
    pub name: Arc<str>,
}

/// What policies see of a connection.
#[derive(Debug, Clone, Copy)]
pub struct Connection<'a> {
    source: IpAddr,
    identity: Option<&'a SpiffeId>,
    /// All names of the trust domain that the identity is of, where it has several.
    domains: &'a [Arc<str>],
    destination: SocketAddr,
}

impl<'a> Connection<'a> {
    /// A connection from `source`, which proved to be `identity`, to `destination`: the pod's address and the port of its
    /// application. IPv4-mapped addresses are IPv4.
    pub fn new(source: IpAddr, identity: Option<&'a SpiffeId>, destination: SocketAddr) -> Self {
        Self {
            source: canonical(source),
            identity,
            domains: &[],
            destination: SocketAddr::new(canonical(destination.ip()), destination.port()),
        }
    }

    /// The same, where these are names of one trust domain: an identity of it meets a principal under any of them.
    pub fn in_one_domain(mut self, domains: &'a [Arc<str>]) -> Self {
        let is_of = |id: &SpiffeId| domains.iter().any(|domain| **domain == *id.trust_domain());
        if self.identity.is_some_and(is_of) {
            self.domains = domains;
        }
        self
    }
}

/// The policies of one pod, ready to be evaluated. Equal sets decide equally.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PolicySet {
    enforced: ByAction,
    /// All of them, when some are for logs only.
    with_dry_run: Option<ByAction>,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct ByAction {
    deny: Vec<Arc<Policy>>,
    allow: Vec<Arc<Policy>>,
}

/// What the policies of a pod say of a connection.
#[derive(Debug, PartialEq, Eq)]
pub struct Decision<'a> {
    /// What happens.
    pub verdict: Verdict<'a>,
    /// What would happen were the policies enforced that are for logs only; `None` when there are none.
    pub dry_run: Option<Verdict<'a>>,
}

/// An outcome, and by which policy.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict<'a> {
    /// By this ALLOW policy; `None` when there is none to ask.
    Permitted(Option<&'a PolicyName>),
    /// Not permitted.
    Denied(Denial),
}

/// Why a connection is denied.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Denial {
    /// By a DENY policy.
    #[error("DENY policy {0} matches")]
    Matched(PolicyName),
    /// By there being ALLOW policies.
    #[error("none of the ALLOW policies matches: {}", listed(.0))]
    NotAllowed(Vec<PolicyName>),
}

/// The first of many names: an access line has room for some.
fn listed(names: &[PolicyName]) -> String {
    const SHOWN: usize = 5;
    let mut text = names
        .iter()
        .take(SHOWN)
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(", ");
    if names.len() > SHOWN {
        text += &format!(" and {} more", names.len() - SHOWN);
    }
    text
}

impl fmt::Display for Verdict<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Permitted(None) => f.write_str("permitted: there is no ALLOW policy"),
            Self::Permitted(Some(policy)) => write!(f, "permitted: ALLOW policy {policy} matches"),
            Self::Denied(denial) => write!(f, "denied: {denial}"),
        }
    }
}

/// What `policies` say of `connection`. A DENY policy that matches comes before everything else; without ALLOW policies the
/// rest is permitted, and with some, what one of them matches.
pub fn evaluate<'a>(policies: &'a PolicySet, connection: &Connection<'_>) -> Decision<'a> {
    Decision {
        verdict: policies.enforced.verdict(connection),
        dry_run: policies
            .with_dry_run
            .as_ref()
            .map(|policies| policies.verdict(connection)),
    }
}

impl PolicySet {
    /// The policies that are for one pod, in the order in which they are asked.
    pub fn new<'a>(policies: impl IntoIterator<Item = &'a Arc<Policy>>) -> Self {
        let (mut enforced, mut all) = (ByAction::default(), ByAction::default());
        let mut any_dry_run = false;
        for policy in policies {
            all.add(policy);
            if policy.dry_run {
                any_dry_run = true;
            } else {
                enforced.add(policy);
            }
        }
        Self {
            enforced,
            with_dry_run: any_dry_run.then_some(all),
        }
    }

    /// [`evaluate`], for who has no use for what policies would do that are for logs only.
    pub fn denial(&self, connection: &Connection<'_>) -> Option<Denial> {
        match self.enforced.verdict(connection) {
            Verdict::Permitted(_) => None,
            Verdict::Denied(denial) => Some(denial),
        }
    }
}

impl ByAction {
    fn add(&mut self, policy: &Arc<Policy>) {
        match policy.action {
            Action::Allow => self.allow.push(Arc::clone(policy)),
            Action::Deny => self.deny.push(Arc::clone(policy)),
        }
    }

    fn verdict(&self, connection: &Connection<'_>) -> Verdict<'_> {
        let matches = |policy: &&Arc<Policy>| policy.matches(connection);
        if let Some(policy) = self.deny.iter().find(matches) {
            return Verdict::Denied(Denial::Matched(policy.key.clone()));
        }
        if self.allow.is_empty() {
            return Verdict::Permitted(None);
        }
        match self.allow.iter().find(matches) {
            Some(policy) => Verdict::Permitted(Some(&policy.key)),
            None => {
                let names = self.allow.iter().map(|policy| policy.key.clone());
                Verdict::Denied(Denial::NotAllowed(names.collect()))
            }
        }
    }
}

impl Policy {
    fn matches(&self, connection: &Connection<'_>) -> bool {
        let clause = |clause: &Clause| clause.is_empty() || clause.iter().any(|one| one.matches(connection));
        self.rules.iter().any(|rule| rule.iter().all(clause))
    }
}

impl Match {
    fn matches(&self, connection: &Connection<'_>) -> bool {
        // By destructuring, a field that is added cannot be forgotten.
        let Self {
            namespaces,
            not_namespaces,
            principals,
            not_principals,
            source_ips,
            not_source_ips,
            destination_ips,
            not_destination_ips,
            destination_ports,
            not_destination_ports,
            service_accounts,
            not_service_accounts,
        } = self;
        let Connection {
            source,
            identity,
            domains,
            destination,
        } = *connection;
        let namespace = identity.map_or("", SpiffeId::namespace);
        let is_principal = |value: &StringMatch| {
            identity.is_some_and(|id| {
                let of = |domain: &str| {
                    value.matches(&[domain, "/ns/", id.namespace(), "/sa/", id.service_account()])
                };
                of(id.trust_domain()) || domains.iter().any(|domain| of(domain))
            })
        };
        let is_account = |value: &ServiceAccount| {
            identity
                .is_some_and(|id| *id.namespace() == *value.namespace && *id.service_account() == *value.name)
        };
        // The cheapest to tell come first.
        *self != Self::default()
            && met(destination_ports, not_destination_ports, |port| {
                *port == destination.port()
            })
            && met(source_ips, not_source_ips, |cidr| cidr.contains(source))
            && met(destination_ips, not_destination_ips, |cidr| {
                cidr.contains(destination.ip())
            })
            && met(namespaces, not_namespaces, |value| value.matches(&[namespace]))
            && met(service_accounts, not_service_accounts, is_account)
            && met(principals, not_principals, is_principal)
    }
}

/// Whether a field and its negation are met.
fn met<T>(values: &[T], negated: &[T], is_met: impl Fn(&T) -> bool) -> bool {
    (values.is_empty() || values.iter().any(&is_met)) && !negated.iter().any(&is_met)
}

#[cfg(test)]
mod tests;
