//! Texts that come again with most workloads, such as names of namespaces and nodes, are held once.

use std::{collections::HashSet, hash::Hash, sync::Arc};

use litemap::LiteMap;

use super::{
    service::Service,
    workload::{Ports, Workload},
};

/// Fewer than these are not worth looking through.
const FEW: usize = 1024;

/// What is in use, as far as it was shared.
#[derive(Debug, Default)]
pub struct Strings {
    texts: Known<str>,
    /// The endpoints of a service have the same, as a rule.
    ports: Known<Ports>,
}

#[derive(Debug)]
struct Known<T: ?Sized> {
    values: HashSet<Arc<T>>,
    /// How many were in use when it was last looked through.
    in_use: usize,
}

impl<T: ?Sized> Default for Known<T> {
    fn default() -> Self {
        Self {
            values: HashSet::new(),
            in_use: 0,
        }
    }
}

impl<T: ?Sized + Eq + Hash> Known<T> {
    /// Puts the one that is known in the place of an equal value.
    fn share(&mut self, value: &mut Arc<T>) {
        match self.values.get(value) {
            Some(known) => *value = Arc::clone(known),
            None => {
                self.values.insert(Arc::clone(value));
            }
        }
        // Looked through when it has doubled: the cost for each value stays the same, however many come and go.
        if self.values.len() > 2 * self.in_use.max(FEW) {
            self.values.retain(|value| Arc::strong_count(value) > 1);
            self.in_use = self.values.len();
        }
    }
}

impl Strings {
    /// Lets a workload share what others have too: all but what is its own.
    pub fn share_workload(&mut self, workload: &mut Workload) {
        let locality = &mut workload.locality;
        for text in [
            &mut workload.namespace,
            &mut workload.trust_domain,
            &mut workload.service_account,
            &mut workload.network,
            &mut workload.node,
            &mut workload.cluster_id,
            &mut locality.region,
            &mut locality.zone,
            &mut locality.subzone,
            &mut workload.canonical_name,
            &mut workload.canonical_revision,
            &mut workload.workload_name,
        ] {
            self.texts.share(text);
        }
        // Equal texts keep their order, and nothing is kept for more that could come.
        let mut services = std::mem::take(&mut workload.services).into_tuple_vec();
        services.shrink_to_fit();
        for (host, ports) in &mut services {
            self.texts.share(&mut host.namespace);
            self.texts.share(&mut host.hostname);
            self.ports.share(ports);
        }
        workload.services = LiteMap::from_sorted_store_unchecked(services);
        workload.addresses.shrink_to_fit();
        for policy in &mut workload.authorization_policies {
            self.texts.share(&mut policy.namespace);
            self.texts.share(&mut policy.name);
        }
    }

    /// The same for a service; its host name is what its endpoints know it by.
    pub fn share_service(&mut self, service: &mut Service) {
        self.texts.share(&mut service.host.namespace);
        self.texts.share(&mut service.host.hostname);
        for vip in &mut service.vips {
            self.texts.share(&mut vip.network);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::testing::{service, workload};

    #[test]
    fn equal_texts_are_held_once() {
        let mut strings = Strings::default();
        let (mut first, mut second) = (workload("a", "10.0.0.1"), workload("b", "10.0.0.2"));
        let mut cart = service("cart", "10.96.0.1");
        let before = first.clone();
        strings.share_workload(&mut first);
        strings.share_workload(&mut second);
        strings.share_service(&mut cart);
        assert_eq!(first, before);
        assert!(Arc::ptr_eq(&first.namespace, &second.namespace));
        let host = |workload: &Workload| workload.services.keys().next().unwrap().hostname.clone();
        assert!(Arc::ptr_eq(&host(&first), &host(&second)));
        assert!(Arc::ptr_eq(&host(&first), &cart.host.hostname));
        let ports = |workload: &Workload| workload.services.values().next().unwrap().clone();
        assert!(Arc::ptr_eq(&ports(&first), &ports(&second)));
    }

    #[test]
    fn what_nobody_uses_is_let_go() {
        let mut strings = Strings::default();
        for number in 0..20_000 {
            strings.texts.share(&mut number.to_string().into());
        }
        assert!(strings.texts.values.len() <= 2 * FEW);
        let mut kept: Vec<Arc<str>> = (0..5000).map(|number| number.to_string().into()).collect();
        kept.iter_mut().for_each(|text| strings.texts.share(text));
        let mut again: Arc<str> = "4999".into();
        strings.texts.share(&mut again);
        assert!(Arc::ptr_eq(&again, &kept[4999]));
    }
}
