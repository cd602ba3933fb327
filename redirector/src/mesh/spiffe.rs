//! SPIFFE identities of Kubernetes service accounts.

use std::{fmt, str::FromStr, sync::Arc};

/// `spiffe://<trust domain>/ns/<namespace>/sa/<service account>`
///
/// Form: Istio's, `security.istio.io`; SPIFFE-ID section 2. Comparison is exact and case-sensitive.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SpiffeId {
    trust_domain: Arc<str>,
    namespace: Arc<str>,
    service_account: Arc<str>,
}

/// Why a text is not a SPIFFE identity of this form.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{text:?} is not of the form spiffe://<trust domain>/ns/<namespace>/sa/<service account>")]
pub struct InvalidSpiffeId {
    text: String,
}

impl SpiffeId {
    /// The identity of `service_account` in `namespace`; a part that is empty, or has a character that is not in SPIFFE
    /// identities, is refused.
    pub fn new(trust_domain: &str, namespace: &str, service_account: &str) -> Result<Self, InvalidSpiffeId> {
        Self::of(trust_domain.into(), namespace.into(), service_account.into())
    }

    /// The same, of parts that are shared.
    pub fn of(
        trust_domain: Arc<str>,
        namespace: Arc<str>,
        service_account: Arc<str>,
    ) -> Result<Self, InvalidSpiffeId> {
        // SPIFFE-ID sections 2.1 and 2.2: these characters alone, of which trust domains use the small letters.
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        let usable = |part: &str| !matches!(part, "" | "." | "..") && part.chars().all(allowed);
        if ![&*trust_domain, &*namespace, &*service_account]
            .into_iter()
            .all(usable)
        {
            return Err(InvalidSpiffeId {
                text: format!("spiffe://{trust_domain}/ns/{namespace}/sa/{service_account}"),
            });
        }
        Ok(Self {
            trust_domain,
            namespace,
            service_account,
        })
    }

    /// The trust domain.
    pub fn trust_domain(&self) -> &str {
        &self.trust_domain
    }

    /// The Kubernetes namespace.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// The Kubernetes service account.
    pub fn service_account(&self) -> &str {
        &self.service_account
    }
}

/// Names of one trust domain, each as good as the others: its own first, then those that Istio's mesh configuration calls
/// `trustDomainAliases`. Empty where a trust domain has but one name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Aliases(Arc<[Arc<str>]>);

impl Aliases {
    /// Of `domain`; a name that no trust domain can have is refused.
    pub fn of<'a>(
        domain: &'a str,
        aliases: impl IntoIterator<Item = &'a str>,
    ) -> Result<Self, InvalidSpiffeId> {
        let checked = |name: &str| SpiffeId::new(name, "default", "default").map(|id| id.trust_domain);
        let mut names = vec![checked(domain)?];
        for alias in aliases {
            names.push(checked(alias)?);
        }
        Ok(match names.len() {
            1 => Self::default(),
            _ => Self(names.into()),
        })
    }

    /// The names beside its own.
    pub fn aliases(&self) -> impl Iterator<Item = &str> {
        self.0.iter().skip(1).map(|name| &**name)
    }

    /// All names of the trust domain that is called `domain`; none when it has but that one.
    pub fn names_of(&self, domain: &str) -> Arc<[Arc<str>]> {
        match self.contains(domain) {
            true => Arc::clone(&self.0),
            false => Arc::default(),
        }
    }

    /// Whether two names are of one trust domain.
    pub fn are_one(&self, one: &str, other: &str) -> bool {
        one == other || self.contains(one) && self.contains(other)
    }

    /// Whether two identities are one, whatever their trust domain is called.
    pub fn are_one_id(&self, one: &SpiffeId, other: &SpiffeId) -> bool {
        one.namespace == other.namespace
            && one.service_account == other.service_account
            && self.are_one(&one.trust_domain, &other.trust_domain)
    }

    fn contains(&self, domain: &str) -> bool {
        self.0.iter().any(|name| **name == *domain)
    }
}

impl FromStr for SpiffeId {
    type Err = InvalidSpiffeId;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid = || InvalidSpiffeId {
            text: text.to_owned(),
        };
        let rest = text.strip_prefix("spiffe://").ok_or_else(invalid)?;
        match *rest.split('/').collect::<Vec<_>>() {
            [trust_domain, "ns", namespace, "sa", service_account] => {
                Self::new(trust_domain, namespace, service_account).map_err(|_| invalid())
            }
            _ => Err(invalid()),
        }
    }
}

impl fmt::Display for SpiffeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "spiffe://{}/ns/{}/sa/{}",
            self.trust_domain, self.namespace, self.service_account
        )
    }
}

impl fmt::Debug for SpiffeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printing_and_parsing_agree() {
        let text = "spiffe://cluster.local/ns/shop/sa/web";
        let id: SpiffeId = text.parse().unwrap();
        assert_eq!(
            (id.trust_domain(), id.namespace(), id.service_account()),
            ("cluster.local", "shop", "web")
        );
        assert_eq!(id.to_string(), text);
    }

    #[test]
    fn aliases_are_one_trust_domain_and_no_other_is() {
        let aliases = Aliases::of("here", ["old.domain", "older"]).unwrap();
        let id = |domain: &str, account: &str| SpiffeId::new(domain, "shop", account).unwrap();
        for (one, other, expected) in [
            (id("here", "web"), id("here", "web"), true),
            (id("old.domain", "web"), id("here", "web"), true),
            (id("here", "web"), id("older", "web"), true),
            (id("old.domain", "web"), id("older", "web"), true),
            (id("old.domain", "web"), id("here", "cart"), false),
            (id("foreign", "web"), id("here", "web"), false),
            (id("old.domain", "web"), id("foreign", "web"), false),
            (id("foreign", "web"), id("foreign", "web"), true),
            (id("domain", "web"), id("here", "web"), false),
            (id("Old.domain", "web"), id("here", "web"), false),
        ] {
            assert_eq!(aliases.are_one_id(&one, &other), expected, "{one} {other}");
            let none = Aliases::default().are_one_id(&one, &other);
            assert_eq!(none, one == other, "{one} {other}");
        }
        let elsewhere = SpiffeId::new("here", "ops", "web").unwrap();
        assert!(!aliases.are_one_id(&id("older", "web"), &elsewhere));
        let all = ["here", "old.domain", "older"].map(Arc::from);
        for (domain, expected) in [("here", &all[..]), ("older", &all), ("foreign", &[])] {
            assert_eq!(*aliases.names_of(domain), *expected, "{domain}");
        }
        let none = Aliases::of("here", []).unwrap();
        assert_eq!((none.names_of("here").len(), none.aliases().count()), (0, 0));
        for bad in ["", "a b", "a/b", "spiffe://a"] {
            assert!(Aliases::of("here", [bad]).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn other_forms_are_refused() {
        for bad in [
            "",
            "cluster.local/ns/shop/sa/web",
            "spiffe://cluster.local/ns/shop/sa/",
            "spiffe:///ns/shop/sa/web",
            "spiffe://cluster.local/ns//sa/web",
            "spiffe://cluster.local/ns/shop/sa/web/x",
            "spiffe://cluster.local/sa/web/ns/shop",
            "SPIFFE://cluster.local/ns/shop/sa/web",
            "https://cluster.local/ns/shop/sa/web",
            "spiffe://cluster.local/ns/shop/sa/we b",
            "spiffe://cluster.local/ns/shop/sa/w\n",
            "spiffe://cluster.local/ns/shop/sa/ü",
            "spiffe://cluster.local/ns/../sa/web",
            "spiffe://cluster.local/ns/shop/sa/%2e",
        ] {
            assert!(bad.parse::<SpiffeId>().is_err(), "{bad:?}");
        }
    }
}
