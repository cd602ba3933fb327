use litemap::LiteMap;
use proptest::prelude::*;

use super::*;
use crate::mesh::{
    policy::Action,
    testing::{host, info, ip, policy_name, service, with_policies, workload},
    workload::{NetworkAddress, WorkloadUid},
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
    assert!(mesh.pod("shop", "kubelet", &Home::default()).is_some());
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
    let mesh = with_policies(Mesh::default(), policies.iter().cloned());
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
    let mesh = with_policies(
        Mesh::default(),
        [
            policy(Scope::Global, Action::Deny),
            policy(Scope::Namespace, Action::Allow),
        ],
    );
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

/// Namesakes of the pod `web`: name, then network, node, cluster and service account.
fn namesakes(all: &[(&str, [&str; 4])]) -> Mesh {
    let make = |(uid, [network, node, cluster, account]): &(&str, [&str; 4])| {
        let mut made = workload("web", "10.0.0.1");
        made.uid = WorkloadUid((*uid).into());
        made.network = (*network).into();
        made.node = (*node).into();
        made.cluster_id = (*cluster).into();
        made.service_account = (*account).into();
        made
    };
    Mesh::new(all.iter().map(make).collect(), vec![])
}

#[test]
fn a_local_pod_is_the_one_of_its_account_on_this_network_and_node_and_rather_of_this_cluster() {
    let info = info("web");
    let at = |network: &str, node: &str, cluster: &str| Home {
        network: network.into(),
        node: node.into(),
        cluster: cluster.into(),
    };
    let all = [
        ("thief", ["", "n1", "east", "thief"]),
        ("west", ["", "n1", "west", "web"]),
        ("east", ["", "n1", "east", "web"]),
        ("moved", ["", "n2", "east", "web"]),
        ("far", ["far", "n1", "east", "web"]),
        ("untold", ["dim", "", "", "web"]),
    ];
    for (home, local, pod) in [
        (at("", "n1", "east"), Some("east"), Some("thief")),
        (at("", "n1", "west"), Some("west"), Some("west")),
        // None of this cluster: one of another that nothing else speaks against.
        (at("", "n1", "north"), Some("west"), Some("thief")),
        (at("", "n2", "west"), Some("moved"), Some("moved")),
        (at("", "n3", "east"), None, Some("untold")),
        (at("far", "n1", "east"), Some("far"), Some("far")),
        (at("dim", "n3", "east"), Some("untold"), Some("untold")),
        (at("else", "n1", "east"), None, Some("thief")),
        (Home::default(), Some("west"), Some("thief")),
    ] {
        let mesh = namesakes(&all);
        let uid = |found: Option<&Arc<Workload>>| found.map(|one| one.uid.to_string());
        let asked = Local {
            info: &info,
            home: &home,
        };
        assert_eq!(uid(mesh.local(asked)).as_deref(), local, "{home:?}");
        assert_eq!(uid(mesh.pod("shop", "web", &home)).as_deref(), pod, "{home:?}");
    }
}

/// Each way in which a value can change what is found: few names and addresses, so that they meet.
fn update() -> impl Strategy<Value = Update> {
    let name = prop::sample::select(vec!["a", "b", "c", "d"]);
    let addresses = prop::collection::vec(prop::sample::select(ADDRESSES.to_vec()), 0..3);
    let some_workload = (
        name.clone(),
        addresses.clone(),
        prop::sample::select(vec!["", "far"]),
        any::<(bool, bool, bool, bool)>(),
        prop::collection::vec(name.clone(), 0..3),
    );
    let some_workload = some_workload.prop_map(|(name, addresses, network, flags, services)| {
        let (is_pod, is_hbone, host_network, has_hostname) = flags;
        let mut made = workload(name, "10.0.0.1");
        let kind = if is_pod { "Pod" } else { "Entry" };
        made.uid = WorkloadUid(format!("c//{kind}/shop/{name}").into());
        made.addresses = addresses.into_iter().map(ip).collect();
        made.network = network.into();
        if !is_hbone {
            made.protocol = Protocol::Tcp;
        }
        made.host_network = host_network;
        if has_hostname {
            made.hostname = "db.example.org".into();
        }
        made.services = services
            .into_iter()
            .map(|name| (host(name), Arc::new(LiteMap::from_iter([(80, 8080)]))))
            .collect();
        Update::Workload(Arc::new(made))
    });
    let lengths = prop::collection::vec(prop::sample::select(vec![8_u8, 24, 32]), 0..3);
    let some_service = (name.clone(), addresses, lengths, any::<(bool, bool)>());
    let some_service = some_service.prop_map(|(name, vips, lengths, (canonical, namespace_only))| {
        let mut made = service("cart", "10.0.0.1");
        made.host.namespace = name.into();
        let vip = |address| NetworkAddress {
            network: Arc::default(),
            address: ip(address),
        };
        made.vips = vips.into_iter().map(vip).collect();
        let range = |length| CidrVip::of("".into(), ip("10.0.0.1"), length).unwrap();
        made.cidr_vips = lengths.into_iter().map(range).collect();
        (made.canonical, made.namespace_only) = (canonical, namespace_only);
        Update::Service(Arc::new(made))
    });
    let scope = prop::sample::select(vec![Scope::Global, Scope::Namespace, Scope::WorkloadSelector]);
    let some_policy = (name.clone(), scope, any::<(bool, bool)>());
    let some_policy = some_policy.prop_map(|(name, scope, (dry_run, denies))| {
        Update::Policy(Arc::new(Policy {
            key: policy_name("shop", name),
            scope,
            action: if denies { Action::Deny } else { Action::Allow },
            dry_run,
            rules: vec![],
        }))
    });
    let removal = prop_oneof![
        name.clone()
            .prop_map(|name| Update::RemoveAddress(format!("c//Pod/shop/{name}").into())),
        name.clone()
            .prop_map(|name| Update::RemoveAddress(format!("c//Entry/shop/{name}").into())),
        name.clone()
            .prop_map(|name| Update::RemoveAddress(format!("{name}/{}", host("cart").hostname).into())),
        name.prop_map(|name| Update::Remove(Key::Policy(policy_name("shop", name)))),
    ];
    prop_oneof![3 => some_workload, 2 => some_service, 1 => some_policy, 3 => removal]
}

const ADDRESSES: [&str; 3] = ["10.0.0.1", "10.0.0.2", "fd00::1"];

/// What is found by every key that [`update`] can make. Who comes first of equals is a matter of the order of updates, and so
/// what is told of them is without names.
fn answers(mesh: &Mesh) -> Vec<String> {
    let mut answers = vec![format!("{:?} {}", mesh.len(), mesh.policies())];
    let sorted = |workloads: &[Arc<Workload>]| {
        let mut uids: Vec<_> = workloads.iter().map(|one| one.uid.to_string()).collect();
        uids.sort();
        uids
    };
    for address in ADDRESSES.map(ip) {
        for network in ["", "far", "none"] {
            let found = mesh.workload_at(network, address);
            answers.push(format!("{:?}", found.map(|one| rank(one))));
            for client in ["a", "b", "x"] {
                let found = mesh.service_at(network, address, client);
                let seen = found.map(|one| (*one.host.namespace == *client, one.canonical));
                answers.push(format!("{seen:?}"));
            }
            let mut around: Vec<_> = mesh
                .services_at(network, address)
                .map(|one| one.host.to_string())
                .collect();
            around.sort();
            answers.push(format!("{around:?}"));
        }
    }
    for name in ["a", "b", "c", "d"] {
        answers.push(format!(
            "{:?} {:?}",
            sorted(mesh.pods("shop", name)),
            sorted(mesh.endpoints(&host(name)))
        ));
        answers.push(format!(
            "{}",
            mesh.service(&service("cart", "10.0.0.1").host).is_some()
        ));
        let set = mesh.policies_for("shop", &[policy_name("shop", name)]);
        // Whatever their order, equal policies take equally many letters.
        answers.push(format!(
            "{} {}",
            format!("{set:?}").len(),
            mesh.has_selected_policies()
        ));
    }
    let named = NamespacedHostname {
        namespace: "shop".into(),
        hostname: "db.example.org".into(),
    };
    answers.push(format!("{}", mesh.workload_named(&named).is_some()));
    answers
}

proptest! {
    #[test]
    fn a_mesh_that_was_changed_answers_as_one_made_of_what_is_left(
        updates in prop::collection::vec(update(), 0..60),
    ) {
        let mut changed = Mesh::default();
        for update in updates {
            let before = changed.clone();
            let told = answers(&before);
            changed.apply(update);
            // A snapshot that was handed out stays as it was.
            prop_assert_eq!(told, answers(&before));
        }
        let mut made = Mesh::default();
        for key in changed.keys() {
            made.apply(changed.get(&key).unwrap());
        }
        prop_assert_eq!(answers(&changed), answers(&made));
        for key in changed.keys().collect::<Vec<_>>() {
            changed.apply(key.removal());
        }
        prop_assert_eq!(answers(&changed), answers(&Mesh::default()));
        prop_assert!(changed.networks.is_empty() && changed.endpoints.is_empty() && changed.by_pod.is_empty());
    }
}

#[test]
fn keys_that_read_alike_are_told_apart() {
    let mut alike = workload("web", "10.0.0.1");
    alike.uid = WorkloadUid("a/b".into());
    let mut cart = service("cart", "10.96.0.1");
    cart.host = NamespacedHostname {
        namespace: "a".into(),
        hostname: "b".into(),
    };
    let mut slash = service("slash", "10.96.0.2");
    slash.host.namespace = "c/d".into();
    let keys = [
        Key::Workload("a/b".into()),
        Key::Service(cart.host.clone()),
        Key::Service(slash.host.clone()),
    ];
    let mesh = Mesh::new(vec![alike], vec![cart, slash]);
    for key in &keys {
        let mut changed = mesh.clone();
        changed.apply(key.removal());
        let left: Vec<_> = keys.iter().filter(|key| changed.get(key).is_some()).collect();
        assert!(left.len() == 2 && !left.contains(&key), "{key:?}");
    }
    // A name that could be either is the workload's first.
    let mut changed = mesh.clone();
    for left in [2, 1, 1] {
        changed.apply(Update::RemoveAddress("a/b".into()));
        assert_eq!(keys.iter().filter(|key| changed.get(key).is_some()).count(), left);
    }
}
