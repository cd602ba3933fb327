//! The mesh as a snapshot, indexed for the look-ups that routing makes.
//!
//! A snapshot is never changed under its readers: its owner, in `discovery`, changes a clone and hands that out. The maps share
//! what has not changed, so that both cost little. [`super::route`] asks; what the answers mean for a connection is its matter.
//! No look-up allocates.

use std::{cmp::Reverse, collections::BTreeMap, net::IpAddr, sync::Arc};

use equivalent::Equivalent;
use imbl::HashMap;

use super::{
    pod::{Home, Local},
    policy::{Policy, PolicyName, PolicySet, Scope},
    service::{CidrVip, Service},
    workload::{NamespacedHostname, Protocol, Workload, canonical},
};

mod bucket;
mod list;
mod update;

use self::bucket::Bucket;
pub use self::update::{Key, Update};

/// A snapshot of the mesh. Cheap to clone, and to change where it is alone.
#[derive(Debug, Clone, Default)]
pub struct Mesh {
    /// By UID.
    workloads: HashMap<Arc<str>, Arc<Workload>>,
    services: HashMap<NamespacedHostname, Arc<Service>>,
    by_pod: HashMap<PodName, Bucket<Workload>>,
    /// By name.
    networks: HashMap<Arc<str>, Network>,
    by_hostname: HashMap<Arc<str>, Bucket<Service>>,
    workload_by_hostname: HashMap<NamespacedHostname, Bucket<Workload>>,
    endpoints: HashMap<NamespacedHostname, Bucket<Workload>>,
    policies: Arc<Policies>,
}

/// What is known by addresses of one network.
#[derive(Debug, Clone, Default)]
struct Network {
    by_address: HashMap<IpAddr, Bucket<Workload>>,
    by_vip: HashMap<IpAddr, Bucket<Service>>,
    /// By first address and length.
    by_range: HashMap<(IpAddr, u8), Bucket<Service>>,
    /// The lengths in `by_range`, longest first, and how many ranges have them.
    prefix_lens: BTreeMap<Reverse<u8>, usize>,
}

#[derive(Debug, Clone, Default)]
struct Policies {
    by_name: HashMap<PolicyName, Arc<Policy>>,
    global: Bucket<Policy>,
    by_namespace: HashMap<Arc<str>, Bucket<Policy>>,
    /// How many are enforced and only for those who name them.
    selected: usize,
    /// There may be more: somebody who has some has not told them.
    are_awaited: bool,
}

/// Kubernetes namespace and pod name.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct PodName(Arc<str>, Arc<str>);

/// A [`PodName`] to look for.
#[derive(Hash)]
struct PodNameRef<'a>(&'a str, &'a str);

impl Equivalent<PodName> for PodNameRef<'_> {
    fn equivalent(&self, name: &PodName) -> bool {
        *self.0 == *name.0 && *self.1 == *name.1
    }
}

impl Mesh {
    /// Indexes workloads and services. Of two with the same key (a workload's UID; a service's namespace and host name)
    /// the later one counts.
    pub fn new(workloads: Vec<Workload>, services: Vec<Service>) -> Self {
        let mut mesh = Self::default();
        for workload in workloads {
            mesh.apply(Update::Workload(Arc::new(workload)));
        }
        for service in services {
            mesh.apply(Update::Service(Arc::new(service)));
        }
        mesh
    }

    /// The policies that are for a pod in `namespace` which names `selected`: of everywhere, of its namespace, and those. A
    /// name that no policy has is left out.
    pub fn policies_for(&self, namespace: &str, selected: &[PolicyName]) -> PolicySet {
        let everywhere = self.policies.global.as_slice();
        let in_namespace = self.policies.by_namespace.get(namespace);
        let is_in = |policy: &Policy| match policy.scope {
            Scope::Global => true,
            Scope::Namespace => *policy.key.namespace == *namespace,
            Scope::WorkloadSelector => false,
        };
        let named = selected
            .iter()
            .filter_map(|name| self.policies.by_name.get(name))
            .filter(|policy| !is_in(policy));
        let in_namespace = in_namespace.map_or(&[][..], Bucket::as_slice);
        PolicySet::new(everywhere.iter().chain(in_namespace).chain(named))
    }

    /// Whether some policy that is enforced is only for the workloads that name it: then the policies of a pod are not known
    /// before its workload is.
    pub fn has_selected_policies(&self) -> bool {
        self.policies.selected > 0
    }

    /// Says whether there may be policies that have not been told.
    pub fn set_policies_awaited(&mut self, are_awaited: bool) {
        Arc::make_mut(&mut self.policies).are_awaited = are_awaited;
    }

    /// Whether there may be policies that have not been told: then what the mesh permits is not known.
    pub fn policies_are_awaited(&self) -> bool {
        self.policies.are_awaited
    }

    /// Whether the policies are those of `other`, for sure: then nobody has to be asked again.
    pub fn has_policies_of(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.policies, &other.policies)
    }

    /// Number of policies.
    pub fn policies(&self) -> usize {
        self.policies.by_name.len()
    }

    /// The workload of a pod of this node, by Kubernetes namespace and pod name. Names repeat over clusters: the one that is
    /// nearest home counts.
    pub fn pod(&self, namespace: &str, name: &str, home: &Home) -> Option<&Arc<Workload>> {
        let here = self
            .pods(namespace, name)
            .iter()
            .filter(|pod| may_be_at(pod, home));
        // The first of several minima is taken.
        here.min_by_key(|pod| (*pod.network != *home.network, *pod.cluster_id != *home.cluster))
    }

    /// The workload that a local pod is: by namespace, name and service account, so that a pod which took over another's
    /// name doesn't take over its identity; of several clusters' pods, one in this network and on no other node, and rather
    /// one of this cluster.
    pub fn local(&self, Local { info, home }: Local<'_>) -> Option<&Arc<Workload>> {
        let is_it = |pod: &&Arc<Workload>| {
            *pod.service_account == *info.service_account
                && *pod.network == *home.network
                && may_be_at(pod, home)
        };
        let pods = self.pods(&info.namespace, &info.name).iter().filter(is_it);
        pods.min_by_key(|pod| *pod.cluster_id != *home.cluster)
    }

    /// The workload at an address; of several, a pod with HBONE is preferred, then any pod, then any with HBONE. Workloads
    /// on their node's network are not found: the address is the node's.
    pub fn workload_at(&self, network: &str, address: IpAddr) -> Option<&Arc<Workload>> {
        let holders = self.networks.get(network)?.by_address.get(&canonical(address))?;
        // The first of several minima is taken.
        holders
            .as_slice()
            .iter()
            .min_by_key(|holder| Reverse(rank(holder)))
    }

    /// The service with a virtual address, as a client in `namespace` sees it; else the one with a range that holds the
    /// address: the client's namespace comes before the longer prefix.
    pub fn service_at(&self, network: &str, address: IpAddr, namespace: &str) -> Option<&Arc<Service>> {
        let network = self.networks.get(network)?;
        let exact = network.by_vip.get(&canonical(address));
        exact
            .and_then(|services| preferred(services.as_slice(), namespace))
            .or_else(|| {
                let holders = network.around(address);
                let seen = holders.filter_map(|services| preferred(services, namespace));
                // The first of several minima is taken: the longest.
                seen.min_by_key(|service| *service.host.namespace != *namespace)
            })
    }

    /// All services with this virtual address or a range that holds it, whoever may see them.
    pub fn services_at(&self, network: &str, address: IpAddr) -> impl Iterator<Item = &Arc<Service>> {
        let network = self.networks.get(network).into_iter();
        network.flat_map(move |network| {
            let exact = network.by_vip.get(&canonical(address));
            let exact = exact.map_or(&[][..], Bucket::as_slice);
            std::iter::once(exact).chain(network.around(address)).flatten()
        })
    }

    /// The service of a fully qualified host name, as a client in `namespace` sees it.
    pub fn service_named(&self, hostname: &str, namespace: &str) -> Option<&Arc<Service>> {
        preferred(self.by_hostname.get(hostname)?.as_slice(), namespace)
    }

    /// The service of exactly this name.
    pub fn service(&self, host: &NamespacedHostname) -> Option<&Arc<Service>> {
        self.services.get(host)
    }

    /// The workload that has this host name itself.
    pub fn workload_named(&self, host: &NamespacedHostname) -> Option<&Arc<Workload>> {
        self.workload_by_hostname.get(host)?.as_slice().first()
    }

    /// The workloads that are endpoints of a service, healthy or not.
    pub fn endpoints(&self, service: &NamespacedHostname) -> &[Arc<Workload>] {
        self.endpoints.get(service).map_or(&[], Bucket::as_slice)
    }

    /// Number of workloads and of services.
    pub fn len(&self) -> (usize, usize) {
        (self.workloads.len(), self.services.len())
    }

    fn pods(&self, namespace: &str, name: &str) -> &[Arc<Workload>] {
        self.by_pod
            .get(&PodNameRef(namespace, name))
            .map_or(&[], Bucket::as_slice)
    }
}

impl Network {
    /// The services with each range that holds the address, longest first.
    fn around(&self, address: IpAddr) -> impl Iterator<Item = &[Arc<Service>]> {
        self.prefix_lens.keys().filter_map(move |Reverse(prefix_len)| {
            let first = CidrVip::first_of(address, *prefix_len)?;
            self.by_range.get(&(first, *prefix_len)).map(Bucket::as_slice)
        })
    }
}

/// Whether a workload is on this node, as far as both say where they are.
fn may_be_at(workload: &Workload, home: &Home) -> bool {
    workload.node.is_empty() || home.node.is_empty() || *workload.node == *home.node
}

/// What an address stands for when several workloads have it: a pod's own entry rather than another object's.
fn rank(workload: &Workload) -> (bool, bool) {
    (workload.is_pod(), workload.protocol == Protocol::Hbone)
}

/// Of services that share an address or a name: the client's namespace, then the canonical one, then the first.
fn preferred<'a>(services: &'a [Arc<Service>], namespace: &str) -> Option<&'a Arc<Service>> {
    let own = |service: &Service| *service.host.namespace == *namespace;
    services
        .iter()
        .filter(|service| own(service) || !service.namespace_only)
        // The first of several minima is taken.
        .min_by_key(|service| (!own(service), !service.canonical))
}

#[cfg(test)]
mod tests;
