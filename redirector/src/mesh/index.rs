//! The mesh as one immutable snapshot, indexed for the look-ups that routing makes.
//!
//! Sources in `discovery` make a snapshot; [`super::route`] asks it. What the answers mean for a connection is routing's
//! matter.

use std::{
    cmp::Reverse,
    collections::{BTreeSet, HashMap},
    net::IpAddr,
    sync::Arc,
};

use super::{
    pod::PodInfo,
    policy::{Policy, PolicyName, PolicySet, Scope},
    service::{CidrVip, Service},
    workload::{NamespacedHostname, NetworkAddress, Protocol, Workload, canonical},
};

/// A snapshot of the mesh. Cheap to share; a change makes a new one.
#[derive(Debug, Default)]
pub struct Mesh {
    workloads: usize,
    services: usize,
    by_pod: HashMap<PodName, Vec<Arc<Workload>>>,
    by_address: HashMap<NetworkAddress, Arc<Workload>>,
    by_vip: HashMap<NetworkAddress, Vec<Arc<Service>>>,
    by_cidr_vip: HashMap<CidrVip, Vec<Arc<Service>>>,
    /// The lengths of the prefixes in `by_cidr_vip`, longest first.
    prefix_lens: BTreeSet<Reverse<u8>>,
    by_hostname: HashMap<Arc<str>, Vec<Arc<Service>>>,
    workload_by_hostname: HashMap<NamespacedHostname, Arc<Workload>>,
    endpoints: HashMap<NamespacedHostname, Vec<Arc<Workload>>>,
    policies: Policies,
}

#[derive(Debug, Default)]
struct Policies {
    by_name: HashMap<PolicyName, Arc<Policy>>,
    global: Vec<Arc<Policy>>,
    by_namespace: HashMap<Arc<str>, Vec<Arc<Policy>>>,
    any_selected: bool,
}

/// Kubernetes namespace and pod name.
type PodName = (Arc<str>, Arc<str>);

impl Mesh {
    /// Indexes workloads and services. Of two with the same key (a workload's UID; a service's namespace and host name)
    /// the later one counts.
    pub fn new(workloads: Vec<Workload>, services: Vec<Service>) -> Self {
        let workloads = last_of_each(workloads, |workload| workload.uid.clone());
        let services = last_of_each(services, |service| service.host.clone());
        let mut mesh = Self {
            workloads: workloads.len(),
            services: services.len(),
            ..Self::default()
        };
        for workload in workloads {
            mesh.add_workload(workload);
        }
        for service in services {
            mesh.add_service(service);
        }
        mesh
    }

    /// The same mesh with these policies, instead of what it had. Of two with the same key the later one counts.
    #[must_use]
    pub fn with_policies(mut self, policies: Vec<Policy>) -> Self {
        self.policies = Policies::default();
        for policy in last_of_each(policies, |policy| policy.key.clone()) {
            let policy = Arc::new(policy);
            match policy.scope {
                Scope::Global => self.policies.global.push(Arc::clone(&policy)),
                Scope::Namespace => {
                    let namespace = Arc::clone(&policy.key.namespace);
                    let policies = self.policies.by_namespace.entry(namespace).or_default();
                    policies.push(Arc::clone(&policy));
                }
                Scope::WorkloadSelector => self.policies.any_selected |= !policy.dry_run,
            }
            self.policies.by_name.insert(policy.key.clone(), policy);
        }
        self
    }

    /// The policies that are for a pod in `namespace` which names `selected`: of everywhere, of its namespace, and those. A
    /// name that no policy has is left out.
    pub fn policies_for(&self, namespace: &str, selected: &[PolicyName]) -> PolicySet {
        let everywhere = &self.policies.global;
        let in_namespace = self.policies.by_namespace.get(namespace).into_iter().flatten();
        let is_in = |policy: &Policy| match policy.scope {
            Scope::Global => true,
            Scope::Namespace => *policy.key.namespace == *namespace,
            Scope::WorkloadSelector => false,
        };
        let named = selected
            .iter()
            .filter_map(|name| self.policies.by_name.get(name))
            .filter(|policy| !is_in(policy));
        PolicySet::new(everywhere.iter().chain(in_namespace).chain(named))
    }

    /// Whether some policy that is enforced is only for the workloads that name it: then the policies of a pod are not known
    /// before its workload is.
    pub fn has_selected_policies(&self) -> bool {
        self.policies.any_selected
    }

    /// Number of policies.
    pub fn policies(&self) -> usize {
        self.policies.by_name.len()
    }

    /// The workload of a local pod, by Kubernetes namespace and pod name. Names repeat over clusters: the first one counts.
    pub fn pod(&self, namespace: &str, name: &str) -> Option<&Arc<Workload>> {
        self.pods(namespace, name).first()
    }

    /// The workload that a local pod is: by namespace, name and service account, so that a pod which took over another's
    /// name doesn't take over its identity; of several clusters' pods, the one in `network`.
    pub fn local(&self, info: &PodInfo, network: &str) -> Option<&Arc<Workload>> {
        let is_it = |workload: &&Arc<Workload>| {
            *workload.service_account == *info.service_account && *workload.network == *network
        };
        self.pods(&info.namespace, &info.name).iter().find(is_it)
    }

    /// The workload at an address; of several, a pod with HBONE is preferred, then any pod, then any with HBONE. Workloads
    /// on their node's network are not found: the address is the node's.
    pub fn workload_at(&self, network: &str, address: IpAddr) -> Option<&Arc<Workload>> {
        self.by_address.get(&key(network, address))
    }

    /// The service with a virtual address, as a client in `namespace` sees it; else the one with a range that holds the
    /// address: the client's namespace comes before the longer prefix.
    pub fn service_at(&self, network: &str, address: IpAddr, namespace: &str) -> Option<&Arc<Service>> {
        let exact = self.by_vip.get(&key(network, address));
        exact
            .and_then(|services| preferred(services, namespace))
            .or_else(|| self.service_around(network, address, namespace))
    }

    /// All services with this virtual address or a range that holds it, whoever may see them.
    pub fn services_at(&self, network: &str, address: IpAddr) -> impl Iterator<Item = &Arc<Service>> {
        let exact = self.by_vip.get(&key(network, address));
        let ranges = self.prefix_lens.iter().filter_map(move |Reverse(prefix_len)| {
            self.by_cidr_vip
                .get(&CidrVip::of(network.into(), address, *prefix_len)?)
        });
        exact.into_iter().chain(ranges).flatten()
    }

    fn service_around(&self, network: &str, address: IpAddr, namespace: &str) -> Option<&Arc<Service>> {
        let holders = self.prefix_lens.iter().filter_map(|Reverse(prefix_len)| {
            let range = CidrVip::of(network.into(), address, *prefix_len)?;
            preferred(self.by_cidr_vip.get(&range)?, namespace)
        });
        // The first of several minima is taken: the longest.
        holders.min_by_key(|service| *service.host.namespace != *namespace)
    }

    /// The service of a fully qualified host name, as a client in `namespace` sees it.
    pub fn service_named(&self, hostname: &str, namespace: &str) -> Option<&Arc<Service>> {
        preferred(self.by_hostname.get(hostname)?, namespace)
    }

    /// The service of exactly this name.
    pub fn service(&self, host: &NamespacedHostname) -> Option<&Arc<Service>> {
        let mut named = self.by_hostname.get(&host.hostname)?.iter();
        named.find(|service| service.host.namespace == host.namespace)
    }

    /// The workload that has this host name itself.
    pub fn workload_named(&self, host: &NamespacedHostname) -> Option<&Arc<Workload>> {
        self.workload_by_hostname.get(host)
    }

    /// The workloads that are endpoints of a service, healthy or not.
    pub fn endpoints(&self, service: &NamespacedHostname) -> &[Arc<Workload>] {
        self.endpoints.get(service).map_or(&[], Vec::as_slice)
    }

    /// Number of workloads and of services.
    pub fn len(&self) -> (usize, usize) {
        (self.workloads, self.services)
    }

    fn pods(&self, namespace: &str, name: &str) -> &[Arc<Workload>] {
        self.by_pod
            .get(&(namespace.into(), name.into()))
            .map_or(&[], Vec::as_slice)
    }

    fn add_workload(&mut self, workload: Workload) {
        let workload = Arc::new(workload);
        if !workload.host_network {
            for address in &workload.addresses {
                let holder = self
                    .by_address
                    .entry(key(&workload.network, *address))
                    .or_insert_with(|| Arc::clone(&workload));
                if rank(&workload) > rank(holder) {
                    *holder = Arc::clone(&workload);
                }
            }
        }
        for service in workload.services.keys() {
            self.endpoints
                .entry(service.clone())
                .or_default()
                .push(Arc::clone(&workload));
        }
        if !workload.hostname.is_empty() {
            let host = NamespacedHostname {
                namespace: Arc::clone(&workload.namespace),
                hostname: Arc::clone(&workload.hostname),
            };
            self.workload_by_hostname
                .entry(host)
                .or_insert_with(|| Arc::clone(&workload));
        }
        let name = (Arc::clone(&workload.namespace), Arc::clone(&workload.name));
        self.by_pod.entry(name).or_default().push(workload);
    }

    fn add_service(&mut self, service: Service) {
        let service = Arc::new(service);
        for vip in &service.vips {
            self.by_vip
                .entry(key(&vip.network, vip.address))
                .or_default()
                .push(Arc::clone(&service));
        }
        for vip in &service.cidr_vips {
            self.prefix_lens.insert(Reverse(vip.prefix_len));
            self.by_cidr_vip
                .entry(vip.clone())
                .or_default()
                .push(Arc::clone(&service));
        }
        self.by_hostname
            .entry(Arc::clone(&service.host.hostname))
            .or_default()
            .push(service);
    }
}

fn key(network: &str, address: IpAddr) -> NetworkAddress {
    NetworkAddress {
        network: network.into(),
        address: canonical(address),
    }
}

/// The values in their order, less those whose key comes again later.
fn last_of_each<T, K: Eq + std::hash::Hash>(values: Vec<T>, key: impl Fn(&T) -> K) -> Vec<T> {
    let last: HashMap<K, usize> = values
        .iter()
        .enumerate()
        .map(|(at, value)| (key(value), at))
        .collect();
    let is_last = |at: usize, value: &T| last.get(&key(value)) == Some(&at);
    values
        .into_iter()
        .enumerate()
        .filter_map(|(at, value)| is_last(at, &value).then_some(value))
        .collect()
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
mod tests {
    use super::*;
    use crate::mesh::{
        policy::Action,
        testing::{ip, policy_name, service, workload},
        workload::WorkloadUid,
    };

    #[test]
    fn a_pod_with_hbone_is_preferred_at_a_shared_address() {
        let make = |uid: &str, protocol| {
            let mut made = workload("x", "10.0.0.1");
            made.uid = WorkloadUid(uid.into());
            made.protocol = protocol;
            made
        };
        let [other, hbone, pod, hbone_pod] = [
            make("c//Entry/ns/a", Protocol::Tcp),
            make("c//Entry/ns/b", Protocol::Hbone),
            make("c//Pod/ns/c", Protocol::Tcp),
            make("c//Pod/ns/d", Protocol::Hbone),
        ];
        for (given, expected) in [
            (vec![&other, &hbone, &pod, &hbone_pod], &hbone_pod),
            (vec![&hbone_pod, &pod, &hbone, &other], &hbone_pod),
            (vec![&hbone, &pod], &pod),
            (vec![&other, &hbone], &hbone),
        ] {
            let mesh = Mesh::new(given.into_iter().cloned().collect(), vec![]);
            assert_eq!(mesh.workload_at("", ip("10.0.0.1")).unwrap().uid, expected.uid);
        }
    }

    #[test]
    fn addresses_are_looked_up_within_their_network_and_canonically() {
        let mut far = workload("far", "10.0.0.1");
        far.network = "far".into();
        let mesh = Mesh::new(vec![workload("near", "10.0.0.1"), far], vec![]);
        assert_eq!(
            *mesh.workload_at("", ip("::ffff:10.0.0.1")).unwrap().name,
            *"near"
        );
        assert_eq!(*mesh.workload_at("far", ip("10.0.0.1")).unwrap().name, *"far");
        assert_eq!(mesh.workload_at("else", ip("10.0.0.1")), None);
    }

    #[test]
    fn host_network_workloads_are_not_found_by_address() {
        let mut host = workload("kubelet", "192.0.2.1");
        host.host_network = true;
        let mesh = Mesh::new(vec![host], vec![]);
        assert_eq!(mesh.workload_at("", ip("192.0.2.1")), None);
        assert!(mesh.pod("shop", "kubelet").is_some());
    }

    #[test]
    fn the_later_of_one_key_counts_and_leaves_nothing_of_the_earlier() {
        let mut moved = workload("web", "10.0.0.2");
        moved.services.clear();
        let mesh = Mesh::new(
            vec![workload("web", "10.0.0.1"), moved],
            vec![service("cart", "10.96.0.1"), service("cart", "10.96.0.2")],
        );
        assert_eq!(mesh.len(), (1, 1));
        assert_eq!(mesh.workload_at("", ip("10.0.0.1")), None);
        assert!(mesh.workload_at("", ip("10.0.0.2")).is_some());
        assert_eq!(mesh.service_at("", ip("10.96.0.1"), "shop"), None);
        assert!(mesh.service_at("", ip("10.96.0.2"), "shop").is_some());
        assert_eq!(mesh.endpoints(&service("cart", "10.96.0.2").host), &[]);
    }

    #[test]
    fn of_services_at_one_address_the_client_s_namespace_comes_first_then_the_canonical() {
        let make = |namespace: &str, canonical, namespace_only| {
            let mut made = service("cart", "10.96.0.1");
            made.host.namespace = namespace.into();
            made.canonical = canonical;
            made.namespace_only = namespace_only;
            made
        };
        let mesh = Mesh::new(
            vec![],
            vec![
                make("a", false, false),
                make("b", true, false),
                make("c", false, true),
            ],
        );
        for (client, expected) in [("a", "a"), ("b", "b"), ("c", "c"), ("d", "b")] {
            let by_vip = mesh.service_at("", ip("10.96.0.1"), client).unwrap();
            let by_name = mesh.service_named("cart.shop.svc.cluster.local", client).unwrap();
            assert_eq!(
                (&*by_vip.host.namespace, &*by_name.host.namespace),
                (expected, expected),
                "{client}"
            );
        }
        let hidden = Mesh::new(vec![], vec![make("c", false, true)]);
        assert_eq!(hidden.service_at("", ip("10.96.0.1"), "d"), None);
    }

    #[test]
    fn the_policies_of_a_pod_are_those_of_everywhere_of_its_namespace_and_those_it_names() {
        let policy = |namespace: &str, name: &str, scope| Policy {
            key: policy_name(namespace, name),
            scope,
            action: Action::Deny,
            dry_run: false,
            rules: vec![],
        };
        let policies = [
            policy("shop", "selected", Scope::WorkloadSelector),
            policy("shop", "of-shop", Scope::Namespace),
            policy("istio-system", "global", Scope::Global),
            policy("bank", "of-bank", Scope::Namespace),
            policy("istio-system", "selected", Scope::WorkloadSelector),
            policy("nowhere", "of-nowhere", Scope::Namespace),
        ];
        let mesh = Mesh::default().with_policies(policies.to_vec());
        assert_eq!((mesh.policies(), mesh.has_selected_policies()), (6, true));
        let name = |text: &str| {
            let (namespace, name) = text.split_once('/').unwrap();
            policy_name(namespace, name)
        };
        for (namespace, selected, expected) in [
            ("shop", vec![], vec![2, 1]),
            ("bank", vec![], vec![2, 3]),
            ("empty", vec![], vec![2]),
            ("shop", vec!["shop/selected"], vec![2, 1, 0]),
            (
                "shop",
                vec!["istio-system/selected", "shop/selected"],
                vec![2, 1, 4, 0],
            ),
            ("shop", vec!["shop/unknown"], vec![2, 1]),
            // What holds anyway does not hold twice; what is another namespace's holds for who names it.
            (
                "shop",
                vec!["shop/of-shop", "istio-system/global", "bank/of-bank"],
                vec![2, 1, 3],
            ),
        ] {
            let selected: Vec<_> = selected.into_iter().map(name).collect();
            let expected: Vec<_> = expected
                .into_iter()
                .map(|at: usize| Arc::new(policies[at].clone()))
                .collect();
            assert_eq!(
                mesh.policies_for(namespace, &selected),
                PolicySet::new(&expected),
                "{namespace} {selected:?}"
            );
        }
    }

    #[test]
    fn the_later_of_two_policies_of_one_name_counts() {
        let policy = |scope, action| Policy {
            key: policy_name("shop", "p"),
            scope,
            action,
            dry_run: false,
            rules: vec![vec![]],
        };
        let mesh = Mesh::default().with_policies(vec![
            policy(Scope::Global, Action::Deny),
            policy(Scope::Namespace, Action::Allow),
        ]);
        assert_eq!((mesh.policies(), mesh.has_selected_policies()), (1, false));
        assert_eq!(mesh.policies_for("bank", &[]), PolicySet::default());
        assert_ne!(mesh.policies_for("shop", &[]), PolicySet::default());
    }

    #[test]
    fn ranges_are_found_after_addresses_by_namespace_and_then_by_length() {
        let make = |namespace: &str, ranges: &[(&str, u8)]| {
            let mut made = service("cart", "10.96.0.1");
            made.host.namespace = namespace.into();
            made.vips.clear();
            made.cidr_vips = ranges
                .iter()
                .map(|(address, len)| CidrVip::of("".into(), ip(address), *len).unwrap())
                .collect();
            made
        };
        let mut exact = make("exact", &[]);
        exact.vips = service("cart", "10.96.0.1").vips;
        let mut hidden = make("hidden", &[("10.98.0.0", 32)]);
        hidden.namespace_only = true;
        let mesh = Mesh::new(
            vec![],
            vec![
                make("all", &[("0.0.0.0", 0)]),
                make("wide", &[("10.96.0.0", 12), ("fd00::", 8)]),
                make("narrow", &[("10.96.255.255", 16), ("fd00:1::", 32)]),
                exact,
                hidden,
            ],
        );
        for (address, client, expected) in [
            ("10.96.0.1", "x", Some("exact")),
            ("10.96.0.1", "wide", Some("exact")),
            ("10.96.0.2", "x", Some("narrow")),
            ("::ffff:10.96.0.2", "x", Some("narrow")),
            ("10.96.0.2", "wide", Some("wide")),
            ("10.96.0.2", "all", Some("all")),
            ("10.97.0.2", "x", Some("wide")),
            ("10.98.0.0", "hidden", Some("hidden")),
            ("10.98.0.0", "x", Some("wide")),
            ("192.0.2.1", "x", Some("all")),
            ("fd00:1::2", "x", Some("narrow")),
            ("fd01::2", "x", Some("wide")),
            ("fd00::2", "x", Some("wide")),
            ("2001:db8::1", "x", None),
        ] {
            let found = mesh.service_at("", ip(address), client);
            assert_eq!(
                found.map(|service| &*service.host.namespace),
                expected,
                "{address} {client}"
            );
        }
        assert_eq!(mesh.service_at("far", ip("10.96.0.2"), "x"), None);
        assert_eq!(CidrVip::of("".into(), ip("10.0.0.0"), 33), None);
        assert_eq!(CidrVip::of("".into(), ip("fd00::"), 129), None);
    }

    #[test]
    fn exact_names_are_looked_up_in_their_namespace() {
        let mut named = workload("db", "10.0.0.1");
        named.hostname = "db.example.org".into();
        let mesh = Mesh::new(vec![named], vec![service("cart", "10.96.0.1")]);
        let host = |namespace: &str, hostname: &str| NamespacedHostname {
            namespace: namespace.into(),
            hostname: hostname.into(),
        };
        for (namespace, service, workload) in [("shop", true, true), ("other", false, false)] {
            let cart = host(namespace, "cart.shop.svc.cluster.local");
            assert_eq!(mesh.service(&cart).is_some(), service);
            let db = host(namespace, "db.example.org");
            assert_eq!(mesh.workload_named(&db).is_some(), workload);
        }
        assert_eq!(mesh.workload_named(&host("shop", "")), None);
    }

    #[test]
    fn a_local_pod_is_known_by_its_service_account_too() {
        let mesh = Mesh::new(vec![workload("web", "10.0.0.1")], vec![]);
        let mut info = crate::mesh::testing::info("web");
        assert!(mesh.local(&info, "").is_some());
        assert!(mesh.local(&info, "far").is_none());
        info.service_account = "other".into();
        assert!(mesh.local(&info, "").is_none());
    }
}
