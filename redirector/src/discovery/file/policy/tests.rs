use std::{fs, net::SocketAddr, sync::Arc};

use super::super::parse;
use crate::mesh::{
    pod::Home,
    policy::{Action, Connection, Match, Policy, PolicySet, Scope, ServiceAccount, StringMatch},
    testing::policy_name,
};

const FULL: &str = r#"
workloads:
- workloadIps: ["10.0.0.1"]
  namespace: shop
  name: cart-0
  authorizationPolicies: [shop/no-admin]
  services: {}
policies:
- name: no-admin
  namespace: shop
  scope: WorkloadSelector
  action: Deny
  dryRun: false
  rules:
  - - - destinationPorts: [9090]
- name: callers
  namespace: shop
  scope: Namespace
  action: Allow
  dryRun: true
  rules:
  - - - namespaces: [{Exact: shop}, !Prefix sh]
        notNamespaces: [{Suffix: -test}, {Presence: []}]
        principals: [{Presence: }, !Presence , {Exact: cluster.local/ns/shop/sa/web}]
        notPrincipals: [!Suffix /sa/default]
      - sourceIps: [10.0.0.0/8, "::ffff:10.0.0.9", "fd00::/8"]
        notSourceIps: [10.1.2.3/16]
        destinationIps: ["fd00::1"]
        notDestinationIps: [192.0.2.0/24]
    - - destinationPorts: [80, 8080]
        notDestinationPorts: [443]
        serviceAccounts: [{namespace: shop, serviceAccount: web}]
        notServiceAccounts: [{namespace: bank, serviceAccount: web}]
  - []
- {name: nobody, namespace: elsewhere, scope: Namespace, action: Allow, rules: []}
"#;

#[test]
fn policies_arrive() {
    let mesh = parse(FULL, "mesh.yaml").unwrap();
    assert_eq!(mesh.policies(), 3);
    let cart = mesh.pod("shop", "cart-0", &Home::default()).unwrap();
    assert_eq!(cart.authorization_policies, [policy_name("shop", "no-admin")]);

    let policy = |name: &str, scope, action, dry_run, rules| {
        Arc::new(Policy {
            key: policy_name("shop", name),
            scope,
            action,
            dry_run,
            rules,
        })
    };
    let text = |make: fn(&str) -> Result<StringMatch, _>, text: &str| make(text).unwrap();
    let cidrs = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
    let web = |namespace: &str| ServiceAccount {
        namespace: namespace.into(),
        name: "web".into(),
    };
    let admin = Match {
        destination_ports: vec![9090],
        ..Match::default()
    };
    let who = Match {
        namespaces: vec![text(StringMatch::exact, "shop"), text(StringMatch::prefix, "sh")],
        not_namespaces: vec![text(StringMatch::suffix, "-test"), StringMatch::presence()],
        principals: vec![
            StringMatch::presence(),
            StringMatch::presence(),
            text(StringMatch::exact, "cluster.local/ns/shop/sa/web"),
        ],
        not_principals: vec![text(StringMatch::suffix, "/sa/default")],
        ..Match::default()
    };
    let addresses = Match {
        source_ips: cidrs(&["10.0.0.0/8", "10.0.0.9/32", "fd00::/8"]),
        not_source_ips: cidrs(&["10.1.0.0/16"]),
        destination_ips: cidrs(&["fd00::1/128"]),
        not_destination_ips: cidrs(&["192.0.2.0/24"]),
        ..Match::default()
    };
    let ports = Match {
        destination_ports: vec![80, 8080],
        not_destination_ports: vec![443],
        service_accounts: vec![web("shop")],
        not_service_accounts: vec![web("bank")],
        ..Match::default()
    };
    let callers = policy(
        "callers",
        Scope::Namespace,
        Action::Allow,
        true,
        vec![vec![vec![who, addresses], vec![ports]], vec![]],
    );
    let no_admin = policy(
        "no-admin",
        Scope::WorkloadSelector,
        Action::Deny,
        false,
        vec![vec![vec![admin]]],
    );
    assert_eq!(
        mesh.policies_for("shop", &cart.authorization_policies),
        PolicySet::new(&[callers, no_admin])
    );
}

#[test]
fn the_documentation_s_example_is_a_file() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/policy.md");
    let page = fs::read_to_string(page).unwrap();
    let example = page
        .split("```yaml\n")
        .nth(1)
        .and_then(|rest| rest.split("```").next());
    let mesh = parse(example.unwrap(), "mesh.yaml").unwrap();
    assert_eq!(mesh.policies(), 3);
    let cart = mesh.pod("shop", "cart-0", &Home::default()).unwrap();
    let policies = mesh.policies_for("shop", &cart.authorization_policies);
    let to: SocketAddr = "10.0.0.1:80".parse().unwrap();
    let from = |identity: Option<&str>, port| {
        let identity = identity.map(|id| format!("spiffe://cluster.local/ns/{id}").parse().unwrap());
        let to = SocketAddr::new(to.ip(), port);
        let connection = Connection::new("10.0.9.9".parse().unwrap(), identity.as_ref(), to);
        policies.denial(&connection).is_none()
    };
    for (identity, port, is_permitted) in [
        (Some("shop/sa/web"), 80, true),
        (Some("gateways/sa/public"), 80, true),
        (Some("gateways/sa/other"), 80, false),
        (None, 80, false),
        (Some("shop/sa/web"), 9090, false),
        (Some("ops/sa/monitoring"), 9090, true),
        (Some("ops/sa/other"), 9090, false),
    ] {
        assert_eq!(from(identity, port), is_permitted, "{identity:?} {port}");
    }
}

#[test]
fn a_policy_that_is_not_there_is_passed_over() {
    let text = FULL.replace("[shop/no-admin]", "[shop/other]");
    let mesh = parse(&text, "mesh.yaml").unwrap();
    let cart = mesh.pod("shop", "cart-0", &Home::default()).unwrap();
    assert_eq!(cart.authorization_policies, [policy_name("shop", "other")]);
    assert_eq!(
        mesh.policies_for("shop", &cart.authorization_policies),
        mesh.policies_for("shop", &[])
    );
}

#[test]
fn errors_name_file_line_and_field() {
    for (from, to, expected) in [
        (
            "authorizationPolicies: [shop/no-admin]",
            "authorizationPolicies: [no-admin]",
            "mesh.yaml, line 6, column 27: workloads[0].authorizationPolicies[0]: \"no-admin\" is not of the form namespace/name",
        ),
        (
            "- name: no-admin",
            "- name: ''",
            "policies[0].name: must not be empty",
        ),
        (
            "  scope: WorkloadSelector\n",
            "",
            "policies[0]: missing field `scope`",
        ),
        (
            "scope: WorkloadSelector",
            "scope: Workload",
            "policies[0].scope: unknown variant `Workload`",
        ),
        (
            "action: Deny",
            "action: DENY",
            "policies[0].action: unknown variant `DENY`, expected `Allow` or `Deny`",
        ),
        (
            "  rules:\n  - - - destinationPorts: [9090]\n",
            "",
            "policies[0]: missing field `rules`",
        ),
        (
            "  - - - destinationPorts: [9090]",
            "  - destinationPorts: [9090]",
            "policies[0].rules[0]: invalid type: map, expected a sequence",
        ),
        (
            "- - - destinationPorts: [9090]",
            "- - - destinationPort: [9090]",
            "line 15, column 9: policies[0].rules[0][0][0].destinationPort: unknown field `destinationPort`",
        ),
        (
            "destinationPorts: [9090]",
            "destinationPorts: [0]",
            "policies[0].rules[0][0][0].destinationPorts[0]: invalid value: integer `0`",
        ),
        (
            "destinationPorts: [9090]",
            "destinationPorts: [75000]",
            "policies[0].rules[0][0][0].destinationPorts[0]: invalid value: integer `75000`",
        ),
        (
            "{Exact: shop}",
            "{Exact: ''}",
            "line 22, column 30: policies[1].rules[0][0][0].namespaces[0].Exact: must not be empty",
        ),
        (
            "{Exact: shop}",
            "{exact: shop}",
            "policies[1].rules[0][0][0].namespaces[0].exact: unknown variant `exact`",
        ),
        (
            "{Exact: shop}",
            "shop",
            "policies[1].rules[0][0][0].namespaces[0]: invalid type: string \"shop\", expected a text to compare with",
        ),
        (
            "{Exact: shop}",
            "{Exact: shop, Prefix: x}",
            "one text can be compared in one way only",
        ),
        (
            "{Exact: shop}",
            "{}",
            "policies[1].rules[0][0][0].namespaces[0]: invalid length 0, expected a text to compare with",
        ),
        ("{Presence: []}", "{Presence: [x]}", "Presence has no text"),
        (
            "!Prefix sh",
            "!Prefix ''",
            "policies[1].rules[0][0][0].namespaces[1].Prefix: must not be empty",
        ),
        (
            "{Exact: cluster.local/",
            "{Exact: spiffe://cluster.local/",
            "policies[1].rules[0][0][0].principals[2].Exact: \"spiffe://cluster.local/ns/shop/sa/web\" begins with spiffe://",
        ),
        (
            "10.0.0.0/8,",
            "10.0.0.0/33,",
            "line 26, column 21: policies[1].rules[0][0][1].sourceIps[0]: an address range of 10.0.0.0 cannot have 33 bits",
        ),
        (
            "10.0.0.0/8,",
            "10.0.0/8,",
            "policies[1].rules[0][0][1].sourceIps[0]: \"10.0.0/8\" is not an address range, such as 10.0.0.0/8 or fd00::/8",
        ),
        (
            "serviceAccount: web}]\n        not",
            "name: web}]\n        not",
            "policies[1].rules[0][1][0].serviceAccounts[0].name: unknown field `name`",
        ),
        (
            "- name: callers",
            "- name: no-admin",
            "policies[1].name: shop/no-admin is there twice",
        ),
    ] {
        assert!(FULL.contains(from), "{from}");
        let error = parse(&FULL.replacen(from, to, 1), "mesh.yaml")
            .unwrap_err()
            .to_string();
        assert!(error.contains(expected), "{from} -> {to}: {error}");
        assert!(
            error.starts_with("mesh.yaml, line") || from == "- name: callers",
            "{error}"
        );
    }
}
