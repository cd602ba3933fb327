//! Changes of a mesh, one at a time.
//!
//! A new value takes the place of the one before under each key that both have, so that an update does not change who comes
//! first. Whatever the order of updates, what is in the mesh at the end decides: a workload may come before its services.

use std::{cmp::Reverse, net::IpAddr, sync::Arc};

use super::{
    Mesh, Network, PodName, Policies,
    bucket::{Buckets, put, take},
};
use crate::mesh::{
    policy::{Policy, PolicyName, Scope},
    service::{CidrVip, Service},
    strings::Strings,
    workload::{NamespacedHostname, Workload, canonical},
};

/// A change of a mesh.
#[derive(Debug, Clone, PartialEq)]
pub enum Update {
    /// A workload, new or in the place of the one with its UID.
    Workload(Arc<Workload>),
    /// A service, new or in the place of the one with its namespace and host name.
    Service(Arc<Service>),
    /// A policy, new or in the place of the one with its name.
    Policy(Arc<Policy>),
    /// No workload with this UID; or else no service that is called so: `namespace/hostname`.
    RemoveAddress(Arc<str>),
    /// No value with this key.
    Remove(Key),
}

/// What a value of the mesh is known by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Key {
    /// A workload's UID.
    Workload(Arc<str>),
    /// A service's namespace and host name.
    Service(NamespacedHostname),
    /// A policy's namespace and name.
    Policy(PolicyName),
}

impl Key {
    /// The update that leaves no value with this key.
    pub fn removal(&self) -> Update {
        Update::Remove(self.clone())
    }
}

impl Update {
    /// Lets the value share its texts with others.
    pub fn share(&mut self, strings: &mut Strings) {
        match self {
            Self::Workload(workload) => strings.share_workload(Arc::make_mut(workload)),
            Self::Service(service) => strings.share_service(Arc::make_mut(service)),
            Self::Policy(_) | Self::RemoveAddress(_) | Self::Remove(_) => {}
        }
    }
}

impl Mesh {
    /// The key that an update is of, by what is in this mesh; none if it removes what is not here.
    pub fn key_of(&self, update: &Update) -> Option<Key> {
        match update {
            Update::Workload(workload) => Some(Key::Workload(Arc::clone(&workload.uid.0))),
            Update::Service(service) => Some(Key::Service(service.host.clone())),
            Update::Policy(policy) => Some(Key::Policy(policy.key.clone())),
            Update::RemoveAddress(uid) if self.workloads.contains_key(uid) => {
                Some(Key::Workload(Arc::clone(uid)))
            }
            Update::RemoveAddress(name) => host_of(name)
                .filter(|host| self.services.contains_key(host))
                .map(Key::Service),
            Update::Remove(key) => Some(key.clone()),
        }
    }

    /// The value of a key, as the update that puts it there.
    pub fn get(&self, key: &Key) -> Option<Update> {
        match key {
            Key::Workload(uid) => self.workloads.get(uid).cloned().map(Update::Workload),
            Key::Service(host) => self.services.get(host).cloned().map(Update::Service),
            Key::Policy(name) => self.policies.by_name.get(name).cloned().map(Update::Policy),
        }
    }

    /// The keys of all values.
    pub fn keys(&self) -> impl Iterator<Item = Key> {
        let workloads = self.workloads.keys().map(|uid| Key::Workload(Arc::clone(uid)));
        let services = self.services.keys().map(|host| Key::Service(host.clone()));
        let policies = self.policies.by_name.keys();
        workloads
            .chain(services)
            .chain(policies.map(|name| Key::Policy(name.clone())))
    }

    /// Makes one change.
    pub fn apply(&mut self, update: Update) {
        match update {
            Update::Workload(workload) => self.put_workload(workload),
            Update::Service(service) => self.put_service(service),
            Update::Policy(policy) => self.put_policy(policy),
            Update::RemoveAddress(key) => self.remove_address(&key),
            Update::Remove(Key::Workload(uid)) => {
                self.remove_workload(&uid);
            }
            Update::Remove(Key::Service(host)) => self.remove_service(&host),
            Update::Remove(Key::Policy(name)) => self.remove_policy(&name),
        }
    }

    fn put_workload(&mut self, new: Arc<Workload>) {
        let old = self.workloads.insert(Arc::clone(&new.uid.0), Arc::clone(&new));
        let old = old.as_ref();
        if let Some(old) = old {
            self.forget_workload(old, Some(&new));
        }
        for address in addresses(&new) {
            let network = self.networks.entry(Arc::clone(&new.network)).or_default();
            put(&mut network.by_address, address, old, &new);
        }
        for service in new.services.keys() {
            put(&mut self.endpoints, service.clone(), old, &new);
        }
        if let Some(host) = own_host(&new) {
            put(&mut self.workload_by_hostname, host, old, &new);
        }
        put(&mut self.by_pod, pod_name(&new), old, &new);
    }

    /// Takes `old` from under every key that it has and `new` doesn't: where both have it, one takes the other's place.
    fn forget_workload(&mut self, old: &Arc<Workload>, new: Option<&Workload>) {
        for address in addresses(old) {
            let stays = new.is_some_and(|new| {
                new.network == old.network && addresses(new).any(|other| other == address)
            });
            if !stays {
                self.change_network(&old.network, |network| {
                    take(&mut network.by_address, &address, old)
                });
            }
        }
        for service in old.services.keys() {
            if !new.is_some_and(|new| new.services.contains_key(service)) {
                take(&mut self.endpoints, service, old);
            }
        }
        if let Some(host) = own_host(old)
            && new.and_then(own_host).as_ref() != Some(&host)
        {
            take(&mut self.workload_by_hostname, &host, old);
        }
        let name = pod_name(old);
        if new.map(pod_name).as_ref() != Some(&name) {
            take(&mut self.by_pod, &name, old);
        }
    }

    fn put_service(&mut self, new: Arc<Service>) {
        let old = self.services.insert(new.host.clone(), Arc::clone(&new));
        let old = old.as_ref();
        if let Some(old) = old {
            self.forget_service(old, Some(&new));
        }
        for vip in distinct(&new.vips) {
            let network = self.networks.entry(Arc::clone(&vip.network)).or_default();
            put(&mut network.by_vip, canonical(vip.address), old, &new);
        }
        for range in distinct(&new.cidr_vips) {
            let network = self.networks.entry(Arc::clone(&range.first.network)).or_default();
            network.put_range(range, old, &new);
        }
        put(&mut self.by_hostname, Arc::clone(&new.host.hostname), old, &new);
    }

    fn forget_service(&mut self, old: &Arc<Service>, new: Option<&Service>) {
        for vip in &old.vips {
            if !new.is_some_and(|new| new.vips.contains(vip)) {
                let address = canonical(vip.address);
                self.change_network(&vip.network, |network| take(&mut network.by_vip, &address, old));
            }
        }
        for range in &old.cidr_vips {
            if !new.is_some_and(|new| new.cidr_vips.contains(range)) {
                self.change_network(&range.first.network, |network| network.take_range(range, old));
            }
        }
        if new.is_none() {
            take(&mut self.by_hostname, &old.host.hostname, old);
        }
    }

    fn remove_address(&mut self, key: &str) {
        if !self.remove_workload(key)
            && let Some(host) = host_of(key)
        {
            self.remove_service(&host);
        }
    }

    /// Returns whether there was one.
    fn remove_workload(&mut self, uid: &str) -> bool {
        let old = self.workloads.remove(uid);
        if let Some(old) = &old {
            self.forget_workload(old, None);
        }
        old.is_some()
    }

    fn remove_service(&mut self, host: &NamespacedHostname) {
        if let Some(old) = self.services.remove(host) {
            self.forget_service(&old, None);
        }
    }

    /// Changes a network that is there; one in which nothing is left is dropped.
    fn change_network(&mut self, name: &Arc<str>, change: impl FnOnce(&mut Network)) {
        let Some(network) = self.networks.get_mut(name) else {
            return;
        };
        change(network);
        if network.by_address.is_empty() && network.by_vip.is_empty() && network.by_range.is_empty() {
            self.networks.remove(name);
        }
    }

    fn put_policy(&mut self, new: Arc<Policy>) {
        self.remove_policy(&new.key);
        let policies = Arc::make_mut(&mut self.policies);
        match new.scope {
            Scope::Global => policies.global.push(Arc::clone(&new)),
            Scope::Namespace => put(
                &mut policies.by_namespace,
                Arc::clone(&new.key.namespace),
                None,
                &new,
            ),
            Scope::WorkloadSelector => policies.selected += usize::from(!new.dry_run),
        }
        policies.by_name.insert(new.key.clone(), new);
    }

    fn remove_policy(&mut self, name: &PolicyName) {
        if !self.policies.by_name.contains_key(name) {
            return;
        }
        let policies = Arc::make_mut(&mut self.policies);
        if let Some(old) = policies.by_name.remove(name) {
            policies.forget(&old);
        }
    }
}

impl Policies {
    fn forget(&mut self, old: &Arc<Policy>) {
        match old.scope {
            Scope::Global => self.global.remove(old),
            Scope::Namespace => take(&mut self.by_namespace, &old.key.namespace, old),
            Scope::WorkloadSelector => self.selected -= usize::from(!old.dry_run),
        }
    }
}

impl Network {
    fn put_range(&mut self, range: &CidrVip, old: Option<&Arc<Service>>, new: &Arc<Service>) {
        let (ranges, key) = (&mut self.by_range, range_key(range));
        let before = ranges.len();
        put(ranges, key, old, new);
        if ranges.len() > before {
            *self.prefix_lens.entry(Reverse(range.prefix_len)).or_default() += 1;
        }
    }

    fn take_range(&mut self, range: &CidrVip, old: &Arc<Service>) {
        let ranges: &mut Buckets<_, _> = &mut self.by_range;
        let before = ranges.len();
        take(ranges, &range_key(range), old);
        if ranges.len() < before
            && let Some(count) = self.prefix_lens.get_mut(&Reverse(range.prefix_len))
        {
            *count -= 1;
            if *count == 0 {
                self.prefix_lens.remove(&Reverse(range.prefix_len));
            }
        }
    }
}

/// The addresses that a workload is found by, each once.
fn addresses(workload: &Workload) -> impl Iterator<Item = IpAddr> {
    let all = if workload.host_network {
        &[][..]
    } else {
        &workload.addresses
    };
    let is_first = |at: usize, address| all[..at].iter().all(|before| canonical(*before) != address);
    all.iter().enumerate().filter_map(move |(at, address)| {
        let address = canonical(*address);
        is_first(at, address).then_some(address)
    })
}

/// Each value once, of a list that is short.
fn distinct<T: PartialEq>(all: &[T]) -> impl Iterator<Item = &T> {
    let all_before = |at: usize| &all[..at];
    let each = all.iter().enumerate();
    each.filter_map(move |(at, one)| (!all_before(at).contains(one)).then_some(one))
}

fn own_host(workload: &Workload) -> Option<NamespacedHostname> {
    (!workload.hostname.is_empty()).then(|| NamespacedHostname {
        namespace: Arc::clone(&workload.namespace),
        hostname: Arc::clone(&workload.hostname),
    })
}

/// The service that is called `namespace/hostname`.
fn host_of(name: &str) -> Option<NamespacedHostname> {
    let (namespace, hostname) = name.split_once('/')?;
    Some(NamespacedHostname {
        namespace: namespace.into(),
        hostname: hostname.into(),
    })
}

fn pod_name(workload: &Workload) -> PodName {
    PodName(Arc::clone(&workload.namespace), Arc::clone(&workload.name))
}

fn range_key(range: &CidrVip) -> (IpAddr, u8) {
    (range.first.address, range.prefix_len)
}
