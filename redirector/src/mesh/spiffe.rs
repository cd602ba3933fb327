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
