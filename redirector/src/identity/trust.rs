//! Whose certificates count for which trust domain. A federated domain's own roots vouch for it and for nobody else; all other
//! identities are the own roots' matter.

use std::{collections::BTreeMap, sync::Arc};

use rustls::RootCertStore;
use rustls_pki_types::CertificateDer;

use super::{
    Svid,
    crl_file::{Changes, InForce, Revocations},
    tls::Error,
};
use crate::mesh::spiffe::{Aliases, SpiffeId};

/// What is asked of all peers beside a chain to the roots.
#[derive(Debug, Clone, Default)]
pub struct PeerRules {
    /// Names that are of one trust domain.
    pub aliases: Aliases,
    /// Who is refused in spite of a good chain.
    pub revocations: Revocations,
}

/// The roots that come with a certificate, and what else is asked of peers.
#[derive(Debug)]
pub(super) struct Trust {
    domain: String,
    rules: PeerRules,
    own: Arc<RootCertStore>,
    federated: BTreeMap<String, Arc<RootCertStore>>,
}

impl Trust {
    /// # Errors
    /// When there are no own roots. A federated domain without any usable one is like any domain that is not federated.
    pub(super) fn new(svid: &Svid, rules: &PeerRules) -> Result<Self, Error> {
        let store = |certificates: &[_]| {
            let mut roots = RootCertStore::empty();
            let (_, unusable) = roots.add_parsable_certificates(certificates.iter().cloned());
            if unusable > 0 {
                tracing::warn!(id = %svid.id, unusable, "root certificates that cannot be parsed are left out");
            }
            roots
        };
        let own = store(&svid.roots);
        if own.is_empty() {
            return Err(Error::NoRoots);
        }
        let federated = svid.federated.iter();
        let federated = federated.map(|(domain, roots)| (domain.clone(), Arc::new(store(roots))));
        Ok(Self {
            domain: svid.id.trust_domain().to_owned(),
            rules: rules.clone(),
            own: Arc::new(own),
            federated: federated.filter(|(_, roots)| !roots.is_empty()).collect(),
        })
    }

    pub(super) fn domain(&self) -> &str {
        &self.domain
    }

    pub(super) fn own(&self) -> &Arc<RootCertStore> {
        &self.own
    }

    pub(super) fn federated(&self) -> &BTreeMap<String, Arc<RootCertStore>> {
        &self.federated
    }

    /// The federated domain whose roots a peer with these identities must lead to; the own ones when there is none. The first
    /// identity decides: it is the one that the peer is taken for.
    pub(super) fn federation_of(&self, found: &[SpiffeId]) -> Option<&str> {
        self.federation(found.first()?)
    }

    fn federation(&self, id: &SpiffeId) -> Option<&str> {
        let (domain, _) = self.federated.get_key_value(id.trust_domain())?;
        Some(domain)
    }

    /// The roots that a peer with these identities must lead to.
    pub(super) fn roots_of(&self, found: &[SpiffeId]) -> &RootCertStore {
        let federated = self
            .federation_of(found)
            .and_then(|domain| self.federated.get(domain));
        federated.unwrap_or(&self.own)
    }

    /// Of these identities, those that the roots of [`Self::roots_of`] may vouch for: a federated authority must not name somebody of
    /// here in a second place.
    pub(super) fn vouched(&self, mut found: Vec<SpiffeId>) -> Vec<SpiffeId> {
        let federation = self.federation_of(&found).map(str::to_owned);
        found.retain(|id| self.federation(id) == federation.as_deref());
        found
    }

    /// Whether a client with these identities is of the own trust domain, by whatever name, or of a federated one.
    pub(super) fn accepts_client(&self, found: &[SpiffeId]) -> bool {
        let is_own = |domain: &str| self.rules.aliases.are_one(&self.domain, domain);
        match self.federation_of(found) {
            Some(_) => true,
            None => found.iter().any(|id| is_own(id.trust_domain())),
        }
    }

    /// Whether one of these identities is one of those expected; the trust domain may have another name in the one than in the other.
    pub(super) fn expects(&self, expected: &[SpiffeId], found: &[SpiffeId]) -> bool {
        let is_wanted = |id| {
            expected
                .iter()
                .any(|wanted| self.rules.aliases.are_one_id(wanted, id))
        };
        found.iter().any(is_wanted)
    }

    /// Whether a peer that has shown this, which leads to the roots that it must lead to, has been revoked by now.
    ///
    /// # Errors
    /// When it has.
    pub(super) fn check_revoked<'a>(
        &self,
        found: &[SpiffeId],
        leaf: &'a CertificateDer<'a>,
        intermediates: &'a [CertificateDer<'a>],
    ) -> Result<(), Error> {
        let Some(lists) = self.rules.revocations.lists() else {
            return Ok(());
        };
        let chain = std::iter::once(leaf).chain(intermediates);
        lists
            .check(chain, self.roots_of(found))
            .map_err(|reason| Error::Revoked {
                who: found.to_vec(),
                reason,
            })
    }

    /// Tells when somebody may have been revoked, if that can be.
    pub(super) fn changes(&self) -> Option<Changes> {
        self.rules.revocations.changes()
    }

    pub(super) fn in_force(&self) -> InForce {
        self.rules.revocations.in_force()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::testing::{TestCa, id};

    #[test]
    fn an_authority_vouches_for_its_own_domain_alone() {
        let (ca, abroad) = (TestCa::new(), TestCa::new());
        let foreign = SpiffeId::new("other.domain", "shop", "cart").unwrap();
        let unknown = SpiffeId::new("third.domain", "shop", "cart").unwrap();
        let mut svid = ca.svid(&id("web"));
        svid.federated = [("other.domain".to_owned(), vec![abroad.certificate()])].into();
        let trust = Trust::new(&svid, &PeerRules::default()).unwrap();
        // Found in a certificate, who vouches, what counts of it, and whether it is a client's.
        let (cart, abroad) = (id("cart"), Some("other.domain"));
        let table = [
            (vec![&cart], None, vec![&cart], true),
            (vec![&foreign], abroad, vec![&foreign], true),
            (vec![&foreign, &cart], abroad, vec![&foreign], true),
            (vec![&cart, &foreign], None, vec![&cart], true),
            (vec![&unknown], None, vec![&unknown], false),
            (vec![], None, vec![], false),
        ];
        for (found, federation, counts, client) in table {
            let found: Vec<_> = found.into_iter().cloned().collect();
            assert_eq!(trust.federation_of(&found), federation, "{found:?}");
            assert_eq!(trust.accepts_client(&found), client, "{found:?}");
            let own = std::ptr::eq(trust.roots_of(&found), &**trust.own());
            assert_eq!(own, federation.is_none(), "{found:?}");
            assert!(trust.vouched(found).iter().eq(counts));
        }
    }

    #[test]
    fn an_alias_is_the_own_domain_and_its_roots_vouch_for_it() {
        let (ca, abroad) = (TestCa::new(), TestCa::new());
        let old = |name: &str| SpiffeId::new("old.domain", "shop", name).unwrap();
        let foreign = SpiffeId::new("foreign", "shop", "web").unwrap();
        let rules = PeerRules {
            aliases: Aliases::of("cluster.local", ["old.domain"]).unwrap(),
            ..PeerRules::default()
        };
        let mut svid = ca.svid(&id("web"));
        let trust = Trust::new(&svid, &rules).unwrap();
        assert!(
            trust.accepts_client(&[old("cart")]) && !trust.accepts_client(std::slice::from_ref(&foreign))
        );
        assert!(std::ptr::eq(trust.roots_of(&[old("cart")]), &**trust.own()));
        for (expected, found, is) in [
            (vec![id("web")], vec![old("web")], true),
            (vec![old("web")], vec![id("web")], true),
            (
                vec![id("cart"), id("web")],
                vec![foreign.clone(), old("web")],
                true,
            ),
            (vec![id("cart")], vec![old("web")], false),
            (vec![id("web")], vec![foreign], false),
            (vec![], vec![old("web")], false),
        ] {
            assert_eq!(trust.expects(&expected, &found), is, "{expected:?} {found:?}");
        }
        // Who has roots of its own for it has said who vouches for it.
        svid.federated = [("old.domain".to_owned(), vec![abroad.certificate()])].into();
        let trust = Trust::new(&svid, &rules).unwrap();
        assert!(!std::ptr::eq(trust.roots_of(&[old("cart")]), &**trust.own()));
        assert!(trust.accepts_client(&[old("cart")]));
    }
}
