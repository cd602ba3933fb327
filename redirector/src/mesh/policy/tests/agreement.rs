//! Properties: the evaluation agrees with a second one that was written another way.

use proptest::prelude::*;

use super::*;

/// Few values, so that they meet.
fn any_text() -> impl Strategy<Value = StringMatch> {
    let texts = prop::sample::select(vec![
        "a",
        "b",
        "ab",
        "td",
        "td/ns/a",
        "td/ns/a/sa/b",
        "td/ns/ab/sa/a",
        "/sa/b",
        "b/sa/b",
    ]);
    (texts, 0..4).prop_map(|(text, form)| match form {
        0 => exact(text),
        1 => prefix(text),
        2 => suffix(text),
        _ => StringMatch::presence(),
    })
}

fn any_cidr() -> impl Strategy<Value = Cidr> {
    let ranges = prop::sample::select(vec![
        "10.0.0.1",
        "10.0.0.0/30",
        "::ffff:10.0.0.2/127",
        "0.0.0.0/0",
        "fd00::1",
        "fd00::/126",
        "::/0",
    ]);
    ranges.prop_map(cidr)
}

/// Mostly none.
fn few<T: std::fmt::Debug>(value: impl Strategy<Value = T>) -> impl Strategy<Value = Vec<T>> {
    prop::option::weighted(0.25, prop::collection::vec(value, 1..3)).prop_map(Option::unwrap_or_default)
}

fn name() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec!["a", "b", "ab"])
}

fn any_account() -> impl Strategy<Value = ServiceAccount> {
    (name(), name()).prop_map(|(namespace, name)| account(namespace, name))
}

prop_compose! {
    fn any_match()(
        texts in [few(any_text()), few(any_text()), few(any_text()), few(any_text())],
        cidrs in [few(any_cidr()), few(any_cidr()), few(any_cidr()), few(any_cidr())],
        ports in [few(1..4_u16), few(1..4_u16)],
        accounts in [few(any_account()), few(any_account())],
    ) -> Match {
        let [namespaces, not_namespaces, principals, not_principals] = texts;
        let [source_ips, not_source_ips, destination_ips, not_destination_ips] = cidrs;
        let [destination_ports, not_destination_ports] = ports;
        let [service_accounts, not_service_accounts] = accounts;
        Match {
            namespaces, not_namespaces, principals, not_principals, source_ips, not_source_ips, destination_ips,
            not_destination_ips, destination_ports, not_destination_ports, service_accounts, not_service_accounts,
        }
    }
}

prop_compose! {
    fn any_policy()(
        deny in any::<bool>(),
        dry_run in prop::bool::weighted(0.2),
        rules in prop::collection::vec(prop::collection::vec(prop::collection::vec(any_match(), 0..3), 0..3), 0..3),
    ) -> Policy {
        let mut made = policy("p", if deny { Action::Deny } else { Action::Allow }, rules);
        made.dry_run = dry_run;
        made
    }
}

/// A second evaluator, which looks for a reason against, in whole texts, where the first looks for one in favour, in parts.
mod naive {
    use super::*;

    pub(super) fn denies(policies: &[Policy], source: IpAddr, id: Option<&SpiffeId>, to: SocketAddr) -> bool {
        let mut allow_exists = false;
        let mut allowed = false;
        for policy in policies.iter().filter(|policy| !policy.dry_run) {
            let matched = policy.rules.iter().any(|rule| {
                let failing = rule
                    .iter()
                    .filter(|clause| !clause.is_empty())
                    .find(|clause| !clause.iter().any(|one| one_matches(one, source, id, to)));
                failing.is_none()
            });
            match policy.action {
                Action::Deny if matched => return true,
                Action::Deny => {}
                Action::Allow => {
                    allow_exists = true;
                    allowed |= matched;
                }
            }
        }
        allow_exists && !allowed
    }

    fn one_matches(one: &Match, source: IpAddr, id: Option<&SpiffeId>, to: SocketAddr) -> bool {
        let principal = id.map(|id| id.to_string().replacen("spiffe://", "", 1));
        let namespace = id.map_or_else(String::new, |id| id.namespace().to_owned());
        let text = |value: &StringMatch, text: &str| value.matches(&[text]);
        let in_range = |range: &Cidr, address: IpAddr| {
            let (net, bits) = range.to_string().split_once('/').map(parts).unwrap();
            net.is_ipv4() == address.is_ipv4() && leading(net, bits) == leading(address, bits)
        };
        let mut fields = 0;
        let mut failed = false;
        let mut field = |values: Vec<bool>, negated: Vec<bool>| {
            fields += values.len() + negated.len();
            failed |= !values.is_empty() && !values.contains(&true);
            failed |= negated.contains(&true);
        };
        let each = |values: &[StringMatch], of: &Option<String>| {
            let met = |value| of.as_ref().is_some_and(|of| text(value, of));
            values.iter().map(met).collect::<Vec<_>>()
        };
        let ranges = |values: &[Cidr], address| values.iter().map(|range| in_range(range, address)).collect();
        let ports = |values: &[u16]| values.iter().map(|port| *port == to.port()).collect();
        let accounts = |values: &[ServiceAccount]| {
            let of = |value: &ServiceAccount| {
                let tail = format!("/ns/{}/sa/{}", value.namespace, value.name);
                principal.as_ref().is_some_and(|principal| {
                    let (_, after) = principal.split_once('/').unwrap();
                    format!("/{after}") == tail
                })
            };
            values.iter().map(of).collect()
        };
        let namespace = Some(namespace);
        field(
            each(&one.namespaces, &namespace),
            each(&one.not_namespaces, &namespace),
        );
        field(
            each(&one.principals, &principal),
            each(&one.not_principals, &principal),
        );
        field(
            ranges(&one.source_ips, source),
            ranges(&one.not_source_ips, source),
        );
        field(
            ranges(&one.destination_ips, to.ip()),
            ranges(&one.not_destination_ips, to.ip()),
        );
        field(ports(&one.destination_ports), ports(&one.not_destination_ports));
        field(
            accounts(&one.service_accounts),
            accounts(&one.not_service_accounts),
        );
        fields > 0 && !failed
    }

    fn parts((net, bits): (&str, &str)) -> (IpAddr, u32) {
        (net.parse().unwrap(), bits.parse().unwrap())
    }

    /// The first bits of an address, as text.
    fn leading(address: IpAddr, bits: u32) -> String {
        let all = match address {
            IpAddr::V4(address) => format!("{:032b}", address.to_bits()),
            IpAddr::V6(address) => format!("{:0128b}", address.to_bits()),
        };
        all[..bits as usize].to_owned()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn two_evaluators_agree(
        policies in prop::collection::vec(any_policy(), 0..5),
        identity in prop::option::of((name(), name())),
        source in prop::sample::select(vec!["10.0.0.1", "10.0.0.3", "192.0.2.1", "fd00::1", "fd00::9"]),
        destination in prop::sample::select(vec!["10.0.0.1", "10.0.0.2", "fd00::1"]),
        port in 1..4_u16,
    ) {
        let identity = identity.map(|(namespace, account)| SpiffeId::new("td", namespace, account).unwrap());
        let (source, destination) = (ip(source), SocketAddr::new(ip(destination), port));
        let connection = Connection::new(source, identity.as_ref(), destination);
        let expected = naive::denies(&policies, source, identity.as_ref(), destination);
        let set = set(policies.clone());
        let decision = evaluate(&set, &connection);
        prop_assert_eq!(matches!(decision.verdict, Verdict::Denied(_)), expected);
        prop_assert_eq!(set.denial(&connection).is_some(), expected);
        // With what is in dry run enforced.
        let enforced: Vec<_> = policies.iter().cloned().map(|mut policy| { policy.dry_run = false; policy }).collect();
        let would = naive::denies(&enforced, source, identity.as_ref(), destination);
        prop_assert_eq!(decision.dry_run.is_some(), policies.iter().any(|policy| policy.dry_run));
        if let Some(outcome) = decision.dry_run {
            prop_assert_eq!(matches!(outcome, Verdict::Denied(_)), would);
        }
    }

    /// A text in parts is the same text.
    #[test]
    fn parts_make_no_difference(value in any_text(), parts in prop::collection::vec("[ab/]{0,2}|td|/ns/|/sa/", 0..6)) {
        let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
        prop_assert_eq!(value.matches(&parts), value.matches(&[&parts.concat()]));
    }
}
