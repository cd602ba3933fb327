//! What iptables programs say of a namespace, and tell it.

use crate::{
    agent::{Options, Redirect},
    netns::Namespace,
    node::{Family, Pod},
    process::command,
};

/// Which of the iptables programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    /// Those that write nftables.
    Nft,
    /// Those that write the tables of before.
    Legacy,
}

impl Variant {
    /// Both.
    pub const BOTH: [Self; 2] = [Self::Nft, Self::Legacy];

    /// `nft` or `legacy`, for names of tests.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nft => "nft",
            Self::Legacy => "legacy",
        }
    }

    /// An agent that redirects by them.
    pub fn options(self) -> Options {
        let redirect = match self {
            Self::Nft => Redirect::IptablesNft,
            Self::Legacy => Redirect::IptablesLegacy,
        };
        Options {
            redirect,
            ..Options::default()
        }
    }

    /// What a program of a family says in a namespace, e.g. `-save` with `-c`.
    ///
    /// # Panics
    /// When it fails.
    pub fn run(self, ns: &Namespace, family: Family, what: &str, arguments: &str) -> String {
        let family = match family {
            Family::V4 => "iptables",
            Family::V6 => "ip6tables",
        };
        let program = format!("{family}-{}{what}", self.name());
        let output = command(ns, &program)
            .args(arguments.split_whitespace())
            .output()
            .expect("the package iptables is installed");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{program} {arguments}: {said}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// All rules and chains of a namespace, both families', without counters and comments.
    pub fn saved(self, ns: &Namespace) -> String {
        let text = Family::BOTH
            .map(|family| self.run(ns, family, "-save", ""))
            .concat();
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        lines
            .map(|line| line.split(" [").next().unwrap_or_default().to_owned() + "\n")
            .collect()
    }

    /// The lines of these that are ours.
    pub fn ours(self, ns: &Namespace) -> Vec<String> {
        let saved = self.saved(ns);
        saved
            .lines()
            .filter(|line| line.contains("ISTIO"))
            .map(str::to_owned)
            .collect()
    }
}

/// Policy rules and the routes of the tables that are Istio's.
pub fn routing(pod: &Pod) -> String {
    let rules = ["-4 rule show", "-6 rule show"].map(|command| pod.ns.ip_output(command));
    let routes = ["-4", "-6"].map(|family| {
        let all = pod.ns.ip_output(&format!("{family} route show table all"));
        let of_table = all.lines().filter(|line| line.contains("table 100 "));
        of_table.map(|line| line.to_owned() + "\n").collect::<String>()
    });
    [rules, routes].concat().concat()
}
