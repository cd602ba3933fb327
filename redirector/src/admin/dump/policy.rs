//! Policies, with the keys and spellings of the workload file.

use serde::{Serialize, Serializer};

use crate::mesh::policy::{Action, Cidr, Clause, Match, Policy, Rule, Scope, ServiceAccount, StringMatch};

/// A policy.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PolicyView<'a> {
    name: &'a str,
    namespace: &'a str,
    scope: &'static str,
    action: &'static str,
    dry_run: bool,
    rules: Vec<RuleView<'a>>,
}

type RuleView<'a> = Vec<Vec<MatchView<'a>>>;

/// What is empty is left out, as whoever wrote the policy has done.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct MatchView<'a> {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    namespaces: Vec<Text<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    not_namespaces: Vec<Text<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    principals: Vec<Text<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    not_principals: Vec<Text<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    source_ips: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    not_source_ips: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    destination_ips: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    not_destination_ips: Vec<String>,
    #[serde(skip_serializing_if = "<[u16]>::is_empty")]
    destination_ports: &'a [u16],
    #[serde(skip_serializing_if = "<[u16]>::is_empty")]
    not_destination_ports: &'a [u16],
    #[serde(skip_serializing_if = "Vec::is_empty")]
    service_accounts: Vec<Account<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    not_service_accounts: Vec<Account<'a>>,
}

/// A text to compare with: `{"Exact": "web"}`, `{"Presence": []}`.
struct Text<'a>(&'a StringMatch);

impl Serialize for Text<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0.parts() {
            (kind, Some(text)) => serializer.collect_map([(kind, text)]),
            (kind, None) => serializer.collect_map([(kind, [(); 0])]),
        }
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Account<'a> {
    namespace: &'a str,
    service_account: &'a str,
}

impl<'a> PolicyView<'a> {
    pub(super) fn of(policy: &'a Policy) -> Self {
        let clause = |clause: &'a Clause| clause.iter().map(MatchView::of).collect();
        let rule = |rule: &'a Rule| rule.iter().map(clause).collect();
        Self {
            name: &policy.key.name,
            namespace: &policy.key.namespace,
            scope: match policy.scope {
                Scope::Global => "Global",
                Scope::Namespace => "Namespace",
                Scope::WorkloadSelector => "WorkloadSelector",
            },
            action: match policy.action {
                Action::Allow => "Allow",
                Action::Deny => "Deny",
            },
            dry_run: policy.dry_run,
            rules: policy.rules.iter().map(rule).collect(),
        }
    }
}

impl<'a> MatchView<'a> {
    fn of(one: &'a Match) -> Self {
        let texts = |texts: &'a [StringMatch]| texts.iter().map(Text).collect();
        let ranges = |ranges: &[Cidr]| ranges.iter().map(ToString::to_string).collect();
        let accounts = |accounts: &'a [ServiceAccount]| {
            let account = |account: &'a ServiceAccount| Account {
                namespace: &account.namespace,
                service_account: &account.name,
            };
            accounts.iter().map(account).collect()
        };
        Self {
            namespaces: texts(&one.namespaces),
            not_namespaces: texts(&one.not_namespaces),
            principals: texts(&one.principals),
            not_principals: texts(&one.not_principals),
            source_ips: ranges(&one.source_ips),
            not_source_ips: ranges(&one.not_source_ips),
            destination_ips: ranges(&one.destination_ips),
            not_destination_ips: ranges(&one.not_destination_ips),
            destination_ports: &one.destination_ports,
            not_destination_ports: &one.not_destination_ports,
            service_accounts: accounts(&one.service_accounts),
            not_service_accounts: accounts(&one.not_service_accounts),
        }
    }
}
