use super::*;
use crate::mesh::testing::{ip, policy_name};

mod agreement;

fn exact(text: &str) -> StringMatch {
    StringMatch::exact(text).unwrap()
}

fn prefix(text: &str) -> StringMatch {
    StringMatch::prefix(text).unwrap()
}

fn suffix(text: &str) -> StringMatch {
    StringMatch::suffix(text).unwrap()
}

fn cidr(text: &str) -> Cidr {
    text.parse().unwrap()
}

fn account(namespace: &str, name: &str) -> ServiceAccount {
    ServiceAccount {
        namespace: namespace.into(),
        name: name.into(),
    }
}

fn policy(name: &str, action: Action, rules: Vec<Rule>) -> Policy {
    Policy {
        key: policy_name("shop", name),
        scope: Scope::Namespace,
        action,
        dry_run: false,
        rules,
    }
}

/// Of one rule, of one clause, of one match.
fn single(name: &str, action: Action, one: Match) -> Policy {
    policy(name, action, vec![vec![vec![one]]])
}

fn in_dry_run(mut policy: Policy) -> Policy {
    policy.dry_run = true;
    policy
}

fn set(policies: impl IntoIterator<Item = Policy>) -> PolicySet {
    PolicySet::new(&policies.into_iter().map(Arc::new).collect::<Vec<_>>())
}

fn web() -> SpiffeId {
    "spiffe://cluster.local/ns/shop/sa/web".parse().unwrap()
}

/// From `web` at 10.0.1.2, or from an anonymous peer there, to 10.0.0.1:8080.
fn connection(identity: Option<&SpiffeId>) -> Connection<'_> {
    Connection::new(ip("10.0.1.2"), identity, "10.0.0.1:8080".parse().unwrap())
}

fn port(port: u16) -> Match {
    Match {
        destination_ports: vec![port],
        ..Match::default()
    }
}

/// Whether a match is met by `web`, and whether by an anonymous peer.
fn met_by(one: Match) -> (bool, bool) {
    let id = web();
    (
        one.matches(&connection(Some(&id))),
        one.matches(&connection(None)),
    )
}

const BOTH: (bool, bool) = (true, true);
const NEITHER: (bool, bool) = (false, false);
const IDENTITY: (bool, bool) = (true, false);
const ANONYMOUS: (bool, bool) = (false, true);

#[test]
fn a_principal_is_met_under_any_name_of_the_peer_s_trust_domain() {
    let domains: [Arc<str>; 3] = ["old.domain", "older", "cluster.local"].map(Into::into);
    let of = |domain: &str| SpiffeId::new(domain, "shop", "web").unwrap();
    let not = |one: StringMatch| Match {
        not_principals: vec![one],
        ..Match::default()
    };
    for (at, one, own, alias, foreign) in [
        (
            line!(),
            principals(exact("cluster.local/ns/shop/sa/web")),
            true,
            true,
            false,
        ),
        (
            line!(),
            principals(exact("old.domain/ns/shop/sa/web")),
            true,
            true,
            false,
        ),
        (
            line!(),
            principals(exact("older/ns/shop/sa/cart")),
            false,
            false,
            false,
        ),
        (
            line!(),
            principals(exact("foreign/ns/shop/sa/web")),
            false,
            false,
            true,
        ),
        (
            line!(),
            principals(prefix("cluster.local/ns/shop/")),
            true,
            true,
            false,
        ),
        (line!(), principals(prefix("olde")), true, true, false),
        (
            line!(),
            principals(suffix("domain/ns/shop/sa/web")),
            true,
            true,
            false,
        ),
        (line!(), principals(suffix("/sa/web")), true, true, true),
        (line!(), principals(StringMatch::presence()), true, true, true),
        (
            line!(),
            not(exact("cluster.local/ns/shop/sa/web")),
            false,
            false,
            true,
        ),
        (line!(), not(exact("older/ns/shop/sa/web")), false, false, true),
        (line!(), not(exact("foreign/ns/shop/sa/web")), true, true, false),
    ] {
        for (domain, expected) in [
            ("cluster.local", own),
            ("old.domain", alias),
            ("foreign", foreign),
        ] {
            let id = of(domain);
            let met = one.matches(&connection(Some(&id)).in_one_domain(&domains));
            assert_eq!(met, expected, "line {at}, {domain}");
        }
        let anonymous = one.matches(&connection(None).in_one_domain(&domains));
        assert_eq!(anonymous, one.matches(&connection(None)), "line {at}");
    }
    let id = of("old.domain");
    let one = principals(exact("cluster.local/ns/shop/sa/web"));
    assert!(!one.matches(&connection(Some(&id))), "without aliases");
}

#[test]
fn every_field_is_compared_with_its_own() {
    for (at, one, expected) in [
        // Without fields.
        (line!(), Match::default(), NEITHER),
        // Namespaces: the empty one of an anonymous peer is compared too.
        (line!(), namespaces(exact("shop")), IDENTITY),
        (line!(), namespaces(exact("sho")), NEITHER),
        (line!(), namespaces(exact("shopp")), NEITHER),
        (line!(), namespaces(exact("Shop")), NEITHER),
        (line!(), namespaces(prefix("sh")), IDENTITY),
        (line!(), namespaces(prefix("shop")), IDENTITY),
        (line!(), namespaces(prefix("shop2")), NEITHER),
        (line!(), namespaces(suffix("op")), IDENTITY),
        (line!(), namespaces(suffix("xshop")), NEITHER),
        (line!(), namespaces(StringMatch::presence()), IDENTITY),
        // Principals: without the scheme, and never of an anonymous peer.
        (
            line!(),
            principals(exact("cluster.local/ns/shop/sa/web")),
            IDENTITY,
        ),
        (line!(), principals(exact("cluster.local/ns/shop/sa/we")), NEITHER),
        (
            line!(),
            principals(exact("cluster.local/ns/shop/sa/web2")),
            NEITHER,
        ),
        (
            line!(),
            principals(exact("cluster.local/ns/shop2/sa/web")),
            NEITHER,
        ),
        (line!(), principals(exact("other/ns/shop/sa/web")), NEITHER),
        (line!(), principals(prefix("cluster.local/")), IDENTITY),
        (line!(), principals(prefix("cluster.local/ns/sh")), IDENTITY),
        (
            line!(),
            principals(prefix("cluster.local/ns/shop/sa/web")),
            IDENTITY,
        ),
        (
            line!(),
            principals(prefix("cluster.local/ns/shop/sa/web/")),
            NEITHER,
        ),
        (line!(), principals(prefix("cluster.local/ns/shop2")), NEITHER),
        (line!(), principals(suffix("/sa/web")), IDENTITY),
        (line!(), principals(suffix("p/sa/web")), IDENTITY),
        (
            line!(),
            principals(suffix("cluster.local/ns/shop/sa/web")),
            IDENTITY,
        ),
        (
            line!(),
            principals(suffix("/cluster.local/ns/shop/sa/web")),
            NEITHER,
        ),
        (line!(), principals(suffix("/sa/we")), NEITHER),
        (line!(), principals(StringMatch::presence()), IDENTITY),
        // Service accounts, in any trust domain.
        (line!(), accounts(account("shop", "web")), IDENTITY),
        (line!(), accounts(account("shop", "cart")), NEITHER),
        (line!(), accounts(account("bank", "web")), NEITHER),
        // Addresses.
        (line!(), sources("10.0.1.2"), BOTH),
        (line!(), sources("10.0.1.3"), NEITHER),
        (line!(), sources("10.0.0.0/15"), BOTH),
        (line!(), sources("10.0.1.255/24"), BOTH),
        (line!(), sources("10.0.2.0/24"), NEITHER),
        (line!(), sources("0.0.0.0/0"), BOTH),
        (line!(), sources("::ffff:10.0.1.0/120"), BOTH),
        (line!(), sources("::/0"), NEITHER),
        (line!(), destinations("10.0.0.1/32"), BOTH),
        (line!(), destinations("10.0.1.2/32"), NEITHER),
        // Ports.
        (line!(), port(8080), BOTH),
        (line!(), port(80), NEITHER),
    ] {
        assert_eq!(met_by(one.clone()), expected, "line {at}");
        // The same, negated: what has no identity is not what is named.
        let inverse = if one == Match::default() {
            NEITHER
        } else {
            (!expected.0, !expected.1)
        };
        assert_eq!(met_by(negated(one)), inverse, "line {at}, negated");
    }
}

fn namespaces(value: StringMatch) -> Match {
    Match {
        namespaces: vec![value],
        ..Match::default()
    }
}

fn principals(value: StringMatch) -> Match {
    Match {
        principals: vec![value],
        ..Match::default()
    }
}

fn accounts(value: ServiceAccount) -> Match {
    Match {
        service_accounts: vec![value],
        ..Match::default()
    }
}

fn sources(value: &str) -> Match {
    Match {
        source_ips: vec![cidr(value)],
        ..Match::default()
    }
}

fn destinations(value: &str) -> Match {
    Match {
        destination_ips: vec![cidr(value)],
        ..Match::default()
    }
}

/// Every field and its negation change places.
fn negated(one: Match) -> Match {
    Match {
        namespaces: one.not_namespaces,
        not_namespaces: one.namespaces,
        principals: one.not_principals,
        not_principals: one.principals,
        source_ips: one.not_source_ips,
        not_source_ips: one.source_ips,
        destination_ips: one.not_destination_ips,
        not_destination_ips: one.destination_ips,
        destination_ports: one.not_destination_ports,
        not_destination_ports: one.destination_ports,
        service_accounts: one.not_service_accounts,
        not_service_accounts: one.service_accounts,
    }
}

#[test]
fn values_of_a_field_are_alternatives_and_fields_are_not() {
    let of = |ports: &[u16], not: &[u16]| Match {
        destination_ports: ports.to_vec(),
        not_destination_ports: not.to_vec(),
        ..Match::default()
    };
    for (one, expected) in [
        (of(&[80, 8080], &[]), BOTH),
        (of(&[80, 81], &[]), NEITHER),
        (of(&[], &[80, 8080]), NEITHER),
        (of(&[], &[80, 81]), BOTH),
        (of(&[8080], &[8080]), NEITHER),
        (of(&[8080], &[80]), BOTH),
        (
            Match {
                destination_ports: vec![8080],
                principals: vec![suffix("/web")],
                ..Match::default()
            },
            IDENTITY,
        ),
        (
            Match {
                destination_ports: vec![80],
                principals: vec![suffix("/web")],
                ..Match::default()
            },
            NEITHER,
        ),
        (
            Match {
                destination_ports: vec![8080],
                not_principals: vec![suffix("/web")],
                ..Match::default()
            },
            ANONYMOUS,
        ),
    ] {
        assert_eq!(met_by(one.clone()), expected, "{one:?}");
    }
}

#[test]
fn rules_are_alternatives_and_their_clauses_are_not() {
    let (yes, no, nothing) = (port(8080), port(80), Match::default());
    for (rules, expected) in [
        (vec![], false),
        // A rule without clauses, and a clause without matches, match everything; a match without fields, nothing.
        (vec![vec![]], true),
        (vec![vec![vec![]]], true),
        (vec![vec![vec![nothing.clone()]]], false),
        (vec![vec![vec![nothing.clone(), yes.clone()]]], true),
        (vec![vec![vec![], vec![nothing]]], false),
        (vec![vec![vec![yes.clone()]]], true),
        (vec![vec![vec![no.clone(), yes.clone()]]], true),
        (vec![vec![vec![yes.clone()], vec![no.clone()]]], false),
        (vec![vec![vec![yes.clone()], vec![]]], true),
        (vec![vec![vec![no.clone()]], vec![vec![yes]]], true),
        (vec![vec![vec![no.clone()]], vec![vec![no]]], false),
    ] {
        assert_eq!(
            policy("p", Action::Allow, rules.clone()).matches(&connection(None)),
            expected,
            "{rules:?}"
        );
    }
}

#[test]
fn deny_comes_first_and_allow_is_asked_only_when_there_is_one() {
    let all = || Match {
        not_destination_ports: vec![1],
        ..Match::default()
    };
    let allow = |name| single(name, Action::Allow, all());
    let deny = |name| single(name, Action::Deny, all());
    let other = |name, action| single(name, action, port(80));
    let empty = |name, action| policy(name, action, vec![]);
    let denied_by = |name: &str| Some(Denial::Matched(policy_name("shop", name)));
    let not_allowed = |names: &[&str]| {
        let names = names.iter().map(|name| policy_name("shop", name));
        Some(Denial::NotAllowed(names.collect()))
    };
    for (policies, permitted_by, denial) in [
        (vec![], None, None),
        (vec![allow("a")], Some("a"), None),
        (vec![deny("d")], None, denied_by("d")),
        (vec![allow("a"), deny("d")], None, denied_by("d")),
        (vec![other("d", Action::Deny)], None, None),
        (vec![other("d", Action::Deny), allow("a")], Some("a"), None),
        (
            vec![other("d", Action::Deny), deny("e"), deny("f")],
            None,
            denied_by("e"),
        ),
        (
            vec![other("a", Action::Allow), allow("b"), allow("c")],
            Some("b"),
            None,
        ),
        (
            vec![other("a", Action::Allow), other("b", Action::Allow)],
            None,
            not_allowed(&["a", "b"]),
        ),
        // Without rules: ALLOW denies everything, DENY nothing.
        (vec![empty("a", Action::Allow)], None, not_allowed(&["a"])),
        (vec![empty("d", Action::Deny)], None, None),
        (vec![empty("a", Action::Allow), allow("b")], Some("b"), None),
    ] {
        let policies = set(policies);
        let decision = evaluate(&policies, &connection(None));
        let by = permitted_by.map(|name| policy_name("shop", name));
        let expected = match &denial {
            None => Verdict::Permitted(by.as_ref()),
            Some(denial) => Verdict::Denied(denial.clone()),
        };
        assert_eq!(decision.verdict, expected, "{policies:?}");
        assert_eq!(decision.dry_run, None);
        assert_eq!(policies.denial(&connection(None)), denial);
    }
}

#[test]
fn a_dry_run_decides_nothing_and_says_what_it_would() {
    let all = || vec![vec![]];
    let allow_nobody = || policy("a", Action::Allow, vec![]);
    for (policies, is_permitted, would) in [
        (
            vec![in_dry_run(policy("d", Action::Deny, all()))],
            true,
            "denied: DENY policy shop/d matches",
        ),
        // It is no ALLOW policy that there is.
        (
            vec![in_dry_run(allow_nobody())],
            true,
            "denied: none of the ALLOW policies matches: shop/a",
        ),
        (
            vec![in_dry_run(policy("a", Action::Allow, all()))],
            true,
            "permitted: ALLOW policy shop/a matches",
        ),
        (
            vec![in_dry_run(policy("d", Action::Deny, vec![]))],
            true,
            "permitted: there is no ALLOW policy",
        ),
        // Nor does it permit what the others do not.
        (
            vec![allow_nobody(), in_dry_run(policy("b", Action::Allow, all()))],
            false,
            "permitted: ALLOW policy shop/b matches",
        ),
        (
            vec![
                policy("d", Action::Deny, all()),
                in_dry_run(policy("b", Action::Allow, all())),
            ],
            false,
            "denied: DENY policy shop/d matches",
        ),
    ] {
        let policies = set(policies);
        let decision = evaluate(&policies, &connection(None));
        let permitted = matches!(decision.verdict, Verdict::Permitted(_));
        assert_eq!(permitted, is_permitted, "{policies:?}");
        assert_eq!(decision.dry_run.unwrap().to_string(), would, "{policies:?}");
    }
}

#[test]
fn many_policies_are_not_all_told() {
    let names: Vec<_> = (0..8)
        .map(|n| policy(&format!("p{n}"), Action::Allow, vec![]))
        .collect();
    let denial = set(names).denial(&connection(None)).unwrap();
    assert_eq!(
        denial.to_string(),
        "none of the ALLOW policies matches: shop/p0, shop/p1, shop/p2, shop/p3, shop/p4 and 3 more"
    );
}

#[test]
fn mapped_addresses_are_ipv4() {
    let mapped = Connection::new(
        ip("::ffff:10.0.1.2"),
        None,
        "[::ffff:10.0.0.1]:8080".parse().unwrap(),
    );
    let v6 = Connection::new(ip("fd00::1"), None, "[fd00::2]:8080".parse().unwrap());
    for (range, of_mapped, of_v6) in [
        ("10.0.1.0/24", true, false),
        ("::ffff:10.0.1.0/120", true, false),
        ("::ffff:0.0.0.0/96", true, false),
        ("::/0", false, true),
        ("fd00::/8", false, true),
        ("fd00::1", false, true),
        ("fd00::3/126", false, true),
        ("fd01::/16", false, false),
        ("0.0.0.0/0", true, false),
    ] {
        assert_eq!(sources(range).matches(&mapped), of_mapped, "{range}");
        assert_eq!(sources(range).matches(&v6), of_v6, "{range}");
    }
    assert!(destinations("10.0.0.1").matches(&mapped));
    assert!(destinations("fd00::2").matches(&v6));
}

#[test]
fn patterns_that_would_match_by_mistake_are_refused() {
    for (text, expected) in [
        ("", "\"\" is not an address range"),
        ("10.0.0.0/", "is not an address range"),
        ("/8", "is not an address range"),
        ("10.0.0/8", "is not an address range"),
        ("10.0.0.0/+8", "is not an address range"),
        ("10.0.0.0/8/8", "is not an address range"),
        ("10.0.0.0/255.0.0.0", "is not an address range"),
        ("10.0.0.0/99999999999", "is not an address range"),
        ("fe80::1%eth0/64", "is not an address range"),
        ("shop", "is not an address range"),
        ("10.0.0.0/33", "10.0.0.0 cannot have 33 bits"),
        ("fd00::/129", "fd00:: cannot have 129 bits"),
        ("10.0.0.0/264", "10.0.0.0 cannot have 264 bits"),
        ("::ffff:10.0.0.0/8", "holds IPv4-mapped addresses among others"),
        ("::ffff:0.0.0.0/95", "holds IPv4-mapped addresses among others"),
    ] {
        let error = text.parse::<Cidr>().unwrap_err().to_string();
        assert!(error.contains(expected), "{text}: {error}");
    }
    for make in [StringMatch::exact, StringMatch::prefix, StringMatch::suffix] {
        assert_eq!(make("").unwrap_err(), InvalidPattern::Empty);
    }
    for (value, is_refused) in [
        (exact("spiffe://cluster.local/ns/shop/sa/web"), true),
        (prefix("spiffe://"), true),
        (prefix("spiffe:/"), true),
        (suffix("spiffe://x"), false),
        (exact("cluster.local/ns/shop/sa/web"), false),
        (StringMatch::presence(), false),
    ] {
        assert_eq!(value.clone().for_principal().is_err(), is_refused, "{value:?}");
    }
}

#[test]
fn ranges_are_written_as_what_they_hold() {
    for (text, expected) in [
        ("10.1.2.3/8", "10.0.0.0/8"),
        ("10.1.2.3", "10.1.2.3/32"),
        ("fd00::1", "fd00::1/128"),
        ("::ffff:10.1.2.3", "10.1.2.3/32"),
        ("::ffff:10.1.2.3/104", "10.0.0.0/8"),
    ] {
        assert_eq!(cidr(text).to_string(), expected);
    }
}
