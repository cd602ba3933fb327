//! The golden bytes were made by Google's Python library from the tests' own `.proto` files (tests/proto).

use litemap::LiteMap;
use proptest::prelude::*;

use super::{
    messages::{DeltaDiscoveryRequest, DeltaDiscoveryResponse},
    *,
};
use crate::mesh::{
    policy::{Action, Cidr, Match, Policy, PolicyName, Scope as PolicyScope, ServiceAccount, StringMatch},
    testing::{host, ip, policy_name},
};

const WORKLOAD: &[u8] = include_bytes!("golden/workload.bin");
const SERVICE: &[u8] = include_bytes!("golden/service.bin");
const POLICY: &[u8] = include_bytes!("golden/authorization.bin");

fn at(network: &str, address: &str) -> NetworkAddress {
    NetworkAddress {
        network: network.into(),
        address: ip(address),
    }
}

fn good(type_url: &str, bytes: &[u8]) -> Update {
    let decoded = decode(type_url, bytes);
    assert_eq!(decoded.problem, None);
    decoded.update.unwrap()
}

#[test]
fn every_field_of_a_workload_is_read() {
    let way = NamespacedHostname {
        namespace: "shop".into(),
        hostname: "way.shop.svc.cluster.local".into(),
    };
    let expected = Workload {
        uid: WorkloadUid("east//Pod/shop/web-0".into()),
        name: "web-0".into(),
        namespace: "shop".into(),
        trust_domain: "td.example".into(),
        service_account: "web".into(),
        addresses: vec![ip("10.0.0.1"), ip("fd00::1")],
        hostname: "web.example.org".into(),
        network: "net-1".into(),
        protocol: Protocol::Hbone,
        host_network: true,
        node: "node-1".into(),
        cluster_id: "east".into(),
        locality: Locality {
            region: "r".into(),
            zone: "z".into(),
            subzone: "s".into(),
        },
        waypoint: Some(Box::new(GatewayAddress {
            destination: GatewayDestination::Hostname(way),
            hbone_mtls_port: 15009,
        })),
        network_gateway: Some(Box::new(GatewayAddress {
            destination: GatewayDestination::Address(at("net-2", "192.0.2.1")),
            hbone_mtls_port: 15008,
        })),
        application_tunnel: Some(ApplicationTunnel {
            proxy_protocol: true,
            port: Some(15088),
        }),
        healthy: false,
        capacity: 7,
        services: LiteMap::from_iter([(host("cart"), Arc::new(LiteMap::from_iter([(80, 8080), (443, 0)])))]),
        canonical_name: "web".into(),
        canonical_revision: "v1".into(),
        workload_name: "web".into(),
        workload_type: "cronjob",
        authorization_policies: vec![policy_name("shop", "no-admin")],
    };
    assert_eq!(good(ADDRESS, WORKLOAD), Update::Workload(Arc::new(expected)));
}

#[test]
fn every_field_of_a_service_is_read() {
    let way = GatewayDestination::Hostname(host("way"));
    let expected = Service {
        host: host("cart"),
        name: "cart".into(),
        vips: vec![at("net-1", "10.96.0.1"), at("", "fd96::1")],
        cidr_vips: vec![CidrVip::of("".into(), ip("10.97.1.0"), 24).unwrap()],
        ports: LiteMap::from_iter([(80, 8080), (443, 0)]),
        subject_alt_names: vec!["spiffe://td.example/ns/shop/sa/cart".parse().unwrap()],
        waypoint: Some(GatewayAddress {
            destination: GatewayDestination::Address(at("net-1", "10.0.0.9")),
            hbone_mtls_port: 15008,
        }),
        weighted_waypoints: vec![WeightedWaypoint {
            destination: GatewayAddress {
                destination: way,
                hbone_mtls_port: 15008,
            },
            weight: 3,
        }],
        load_balancer: LoadBalancer {
            routing_preferences: vec![
                Scope::Network,
                Scope::Region,
                Scope::Zone,
                Scope::Subzone,
                Scope::Node,
                Scope::Cluster,
            ],
            mode: LoadBalancerMode::Failover,
            allow_unhealthy: true,
        },
        ip_families: IpFamilies::V4,
        canonical: true,
        namespace_only: true,
    };
    assert_eq!(good(ADDRESS, SERVICE), Update::Service(Arc::new(expected)));
}

#[test]
fn every_field_of_a_policy_is_read() {
    let cidr = |text: &str| text.parse::<Cidr>().unwrap();
    let account = |name: &str| ServiceAccount {
        namespace: "shop".into(),
        name: name.into(),
    };
    let one = Match {
        namespaces: vec![
            StringMatch::exact("shop").unwrap(),
            StringMatch::prefix("op").unwrap(),
        ],
        not_namespaces: vec![StringMatch::suffix("x").unwrap()],
        principals: vec![StringMatch::presence()],
        not_principals: vec![StringMatch::exact("td/ns/a/sa/b").unwrap()],
        source_ips: vec![cidr("10.0.0.0/8")],
        not_source_ips: vec![cidr("10.1.0.0/16")],
        destination_ips: vec![cidr("fd00::/8")],
        not_destination_ips: vec![cidr("10.0.0.7/32")],
        destination_ports: vec![80, 8080],
        not_destination_ports: vec![9090],
        service_accounts: vec![account("web")],
        not_service_accounts: vec![account("old")],
    };
    let expected = Policy {
        key: policy_name("shop", "no-admin"),
        scope: PolicyScope::WorkloadSelector,
        action: Action::Deny,
        dry_run: true,
        rules: vec![vec![vec![one]], vec![]],
    };
    assert_eq!(good(AUTHORIZATION, POLICY), Update::Policy(Arc::new(expected)));
}

#[test]
fn the_protocol_s_own_messages_are_those_of_the_other_library() {
    let bytes = include_bytes!("golden/request.bin");
    let request = DeltaDiscoveryRequest::decode(&bytes[..]).unwrap();
    let node = request.node.as_ref().unwrap();
    assert_eq!(node.id, "ztunnel~1.1.1.1~a.b~b.svc.cluster.local");
    assert_eq!(node.metadata.as_ref().unwrap().fields.len(), 1);
    assert_eq!((&*request.type_url, &*request.response_nonce), ("t", "n"));
    assert_eq!(request.resource_names_subscribe, ["s"]);
    assert_eq!(request.resource_names_unsubscribe, ["u"]);
    assert_eq!(request.initial_resource_versions["b"], "2");
    let status = request.error_detail.as_ref().unwrap();
    assert_eq!((status.code, &*status.message), (3, "why"));
    assert_eq!(request.encode_to_vec(), bytes);

    let response = DeltaDiscoveryResponse::decode(&include_bytes!("golden/response.bin")[..]).unwrap();
    assert_eq!((&*response.system_version_info, &*response.nonce), ("v", "n"));
    assert_eq!(response.removed_resources, ["r"]);
    let resource = &response.resources[0];
    assert_eq!((&*resource.name, &*resource.version), ("x", "1"));
    assert_eq!(resource.resource.as_ref().unwrap().value, [1, 2]);
}

/// A workload with a change.
fn workload_with(change: impl FnOnce(&mut proto::Workload)) -> Result<Update, String> {
    let mut raw = proto::Workload {
        uid: "u".into(),
        ..proto::Workload::default()
    };
    change(&mut raw);
    let kind = Some(proto::AddressKind::Workload(Box::new(raw)));
    address(&proto::Address { kind }.encode_to_vec())
}

fn service_with(change: impl FnOnce(&mut proto::Service)) -> Result<Update, String> {
    let mut raw = proto::Service {
        hostname: "h".into(),
        ..proto::Service::default()
    };
    change(&mut raw);
    let kind = Some(proto::AddressKind::Service(Box::new(raw)));
    address(&proto::Address { kind }.encode_to_vec())
}

#[test]
fn what_is_empty_is_istio_s_default() {
    let Update::Workload(made) = workload_with(|_| {}).unwrap() else {
        panic!("a workload");
    };
    assert_eq!(
        (&*made.trust_domain, &*made.service_account),
        ("cluster.local", "default")
    );
    assert_eq!((&*made.cluster_id, made.capacity), ("Kubernetes", 1));
    assert_eq!((made.protocol, made.healthy), (Protocol::Tcp, true));
    assert!(made.application_tunnel.is_none() && made.waypoint.is_none() && !made.host_network);
    let Update::Workload(made) = workload_with(|raw| raw.capacity = Some(0)).unwrap() else {
        panic!("a workload");
    };
    assert_eq!(made.capacity, 0);
}

#[test]
fn what_cannot_be_understood_is_refused_with_its_reason() {
    let port = |service_port, target_port| proto::Port {
        service_port,
        target_port,
    };
    let no_gateway = Some(proto::GatewayAddress::default());
    let list = |ports| proto::PortList { ports };
    let balanced = |routing_preference, mode| {
        Some(proto::LoadBalancing {
            routing_preference,
            mode,
            health_policy: 0,
        })
    };
    let vip = |address: &[u8], length| proto::NetworkAddress {
        network: String::new(),
        address: address.to_vec(),
        length,
    };
    let service_name = |name: &str, ports| {
        let services = [(name.to_owned(), list(ports))];
        workload_with(|raw| raw.services = services.into())
    };
    for (decoded, reason) in [
        (workload_with(|raw| raw.uid.clear()), "no uid"),
        (workload_with(|raw| raw.tunnel_protocol = 2), "LEGACY_ISTIO_MTLS"),
        (
            workload_with(|raw| raw.tunnel_protocol = 9),
            "tunnel_protocol: 9 is not known",
        ),
        (
            workload_with(|raw| raw.addresses = vec![vec![1; 5]]),
            "4 or 16 bytes, not 5",
        ),
        (workload_with(|raw| raw.addresses = vec![vec![]]), "not 0"),
        (
            workload_with(|raw| raw.waypoint = no_gateway.clone()),
            "neither address nor hostname",
        ),
        (
            workload_with(|raw| raw.network_gateway = no_gateway.clone()),
            "neither",
        ),
        (workload_with(|raw| raw.workload_type = 8), "workload_type: 8"),
        (
            workload_with(|raw| raw.authorization_policies = vec!["p".into()]),
            "namespace/name",
        ),
        (service_name("cart", vec![]), "namespace/hostname"),
        (service_name("a/cart", vec![port(70_000, 1)]), "70000 is no port"),
        (service_name("a/cart", vec![port(0, 1)]), "0 is no port"),
        (service_with(|raw| raw.hostname.clear()), "no hostname"),
        (
            service_with(|raw| raw.load_balancing = balanced(vec![0], 0)),
            "not specified",
        ),
        (
            service_with(|raw| raw.load_balancing = balanced(vec![], 7)),
            "mode: 7",
        ),
        (
            service_with(|raw| raw.addresses = vec![vip(&[10, 0, 0, 0], Some(33))]),
            "33 bits",
        ),
        (
            service_with(|raw| raw.addresses = vec![vip(&[10], None)]),
            "not 1",
        ),
        (
            service_with(|raw| raw.weighted_waypoints = vec![proto::WeightedWaypoint::default()]),
            "no destination",
        ),
        (service_with(|raw| raw.visibility = 5), "visibility: 5"),
        (address(&[]), "neither a workload nor a service"),
        (address(&[0xff]), ""),
    ] {
        let problem = decoded.unwrap_err();
        assert!(problem.contains(reason), "{problem:?} without {reason:?}");
    }
    assert!(
        decode("type.googleapis.com/other", &[])
            .problem
            .unwrap()
            .contains("not asked for")
    );
}

/// A policy of one rule with one match, and a good one after it.
fn policy_with(action: proto::Action, one: proto::Match) -> (Policy, Option<String>) {
    let rule = |matches| proto::Rule {
        clauses: vec![proto::Clause { matches }],
    };
    let good = proto::Match {
        destination_ports: vec![80],
        ..proto::Match::default()
    };
    let raw = proto::Authorization {
        name: "p".into(),
        namespace: "shop".into(),
        action: action.into(),
        rules: vec![rule(vec![one]), rule(vec![good])],
        ..proto::Authorization::default()
    };
    let decoded = decode(AUTHORIZATION, &raw.encode_to_vec());
    let Some(Update::Policy(policy)) = decoded.update else {
        panic!("a policy");
    };
    (Policy::clone(&policy), decoded.problem)
}

#[test]
fn a_rule_that_cannot_be_understood_permits_nobody_or_denies_everybody() {
    let text = |kind| proto::StringMatch { kind };
    let range = |address: &[u8], length| proto::Cidr {
        address: address.to_vec(),
        length,
    };
    let account = proto::ServiceAccountMatch {
        namespace: "a".into(),
        service_account: String::new(),
    };
    let bad = [
        (
            proto::Match {
                principals: vec![text(None)],
                ..Default::default()
            },
            "principals",
        ),
        (
            proto::Match {
                not_namespaces: vec![text(Some(proto::StringKind::Prefix(String::new())))],
                ..Default::default()
            },
            "not_namespaces",
        ),
        (
            proto::Match {
                source_ips: vec![range(&[10, 0, 0], 8)],
                ..Default::default()
            },
            "source_ips",
        ),
        (
            proto::Match {
                not_destination_ips: vec![range(&[10, 0, 0, 0], 33)],
                ..Default::default()
            },
            "33",
        ),
        (
            proto::Match {
                destination_ports: vec![0],
                ..Default::default()
            },
            "destination_ports",
        ),
        (
            proto::Match {
                not_destination_ports: vec![70_000],
                ..Default::default()
            },
            "70000",
        ),
        (
            proto::Match {
                service_accounts: vec![account],
                ..Default::default()
            },
            "service_accounts",
        ),
        (
            proto::Match {
                destination_ports: vec![80],
                extensions: vec![proto::Extension { name: "new".into() }],
                ..Default::default()
            },
            "\"new\"",
        ),
    ];
    for (one, reason) in bad {
        let (policy, problem) = policy_with(proto::Action::Allow, one.clone());
        let problem = problem.unwrap();
        assert!(
            problem.contains(reason) && problem.contains("permits nobody"),
            "{problem}"
        );
        assert_eq!(policy.rules.len(), 1, "the rule that is understood");
        let (policy, problem) = policy_with(proto::Action::Deny, one);
        assert!(problem.unwrap().contains("rules[0]"));
        assert_eq!((policy.rules.len(), policy.rules[0].len()), (2, 0));
    }
    // Understood, and matches nobody: identities are compared without their scheme.
    let scheme = proto::Match {
        principals: vec![text(Some(proto::StringKind::Exact(
            "spiffe://td/ns/a/sa/b".into(),
        )))],
        ..Default::default()
    };
    assert_eq!(policy_with(proto::Action::Allow, scheme).1, None);
}

#[test]
fn a_policy_with_an_extension_permits_nobody_or_denies_everybody() {
    for (action, rules, told) in [
        (proto::Action::Allow, 0, "permits nobody"),
        (proto::Action::Deny, 1, "denies everybody"),
    ] {
        let port = proto::Match {
            destination_ports: vec![80],
            ..proto::Match::default()
        };
        let raw = proto::Authorization {
            name: "p".into(),
            namespace: "shop".into(),
            scope: proto::Scope::Namespace.into(),
            action: action.into(),
            rules: vec![proto::Rule {
                clauses: vec![proto::Clause { matches: vec![port] }],
            }],
            dry_run: false,
            extensions: vec![proto::Extension { name: "new".into() }],
        };
        let decoded = decode(AUTHORIZATION, &raw.encode_to_vec());
        let Some(Update::Policy(policy)) = decoded.update else {
            panic!("a policy");
        };
        assert_eq!(policy.rules.len(), rules);
        assert!(policy.rules.iter().all(Vec::is_empty), "without a condition");
        let problem = decoded.problem.unwrap();
        assert!(problem.contains("\"new\"") && problem.contains(told), "{problem}");
    }
}

#[test]
fn removals_are_by_key() {
    assert_eq!(
        removal(ADDRESS, "a//Pod/b/c").unwrap(),
        Update::RemoveAddress("a//Pod/b/c".into())
    );
    let name = PolicyName {
        namespace: "shop".into(),
        name: "p/q".into(),
    };
    assert_eq!(
        removal(AUTHORIZATION, "shop/p/q").unwrap(),
        Update::Remove(Key::Policy(name))
    );
    assert!(removal(AUTHORIZATION, "p").is_err());
}

proptest! {
    /// Whatever comes is understood or refused.
    #[test]
    fn any_bytes_are_read_or_refused(
        which in 0..3_usize, at in any::<prop::sample::Index>(), cut in 0..6_usize, put in prop::collection::vec(any::<u8>(), 0..6),
    ) {
        let (url, bytes) = [(ADDRESS, WORKLOAD), (ADDRESS, SERVICE), (AUTHORIZATION, POLICY)][which];
        let mut bytes = bytes.to_vec();
        let from = at.index(bytes.len());
        let to = (from + cut).min(bytes.len());
        bytes.splice(from..to, put);
        let decoded = decode(url, &bytes);
        prop_assert!(decoded.update.is_some() || decoded.problem.is_some());
    }
}

#[test]
fn a_policy_of_an_unknown_kind_errs_to_the_side_of_refusing() {
    let read = |change: &dyn Fn(&mut proto::Authorization)| {
        let mut raw = proto::Authorization {
            name: "p".into(),
            namespace: "shop".into(),
            ..proto::Authorization::default()
        };
        change(&mut raw);
        let decoded = decode(AUTHORIZATION, &raw.encode_to_vec());
        let Some(Update::Policy(policy)) = decoded.update else {
            panic!("a policy");
        };
        (policy, decoded.problem.unwrap())
    };
    let (policy, problem) = read(&|raw| raw.action = 7);
    assert!(
        problem.contains("action: 7 is not known; it denies everybody"),
        "{problem}"
    );
    assert_eq!((policy.action, &policy.rules), (Action::Deny, &vec![vec![]]));
    let (policy, problem) = read(&|raw| raw.scope = 9);
    assert!(
        problem.contains("scope: 9 is not known; it is for its whole namespace"),
        "{problem}"
    );
    assert_eq!(
        (policy.scope, policy.action),
        (PolicyScope::Namespace, Action::Allow)
    );
}
