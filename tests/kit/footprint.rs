//! Everything that somebody may have put into a network namespace, as text: to be compared before and after.
//!
//! And what lies pinned below a directory, by the kernel's ids: names are shared with other agents on this machine.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    process::Command,
};

use anyhow::{Context, Result, ensure};
use aya::programs::{SchedClassifier, TcAttachType};
use redirector::sys::interfaces::interfaces;
use serde_json::Value;

use crate::{netns::Namespace, wait};

/// What is in a namespace, in sections of lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Footprint(BTreeMap<String, BTreeSet<String>>);

impl Footprint {
    /// Of a namespace as it is now: qdiscs, filters and TCX programs with their ids, rules, routes, nftables, listeners, and
    /// every sysctl of the network.
    ///
    /// # Panics
    /// When it cannot be read.
    pub fn of(ns: &Namespace) -> Self {
        Self::read(ns).unwrap_or_else(|error| panic!("looking at namespace {}: {error:#}", ns.name()))
    }

    fn read(ns: &Namespace) -> Result<Self> {
        let mut sections = BTreeMap::new();
        let mut add = |name: String, lines: BTreeSet<String>| sections.insert(name, lines);
        for command in [
            "-4 rule show",
            "-6 rule show",
            "-4 route show table all",
            "-6 route show table all",
        ] {
            let text = ns.ip_output(command);
            // What neighbour discovery has learnt comes and goes.
            add(
                format!("ip {command}"),
                lines(&text, |line| !line.contains("expires")),
            );
        }
        add(
            "tc qdisc show".into(),
            lines(&tc(ns, &["qdisc", "show"])?, |_| true),
        );
        for interface in ns.run(interfaces)? {
            for (hook, direction) in [
                ("ingress", TcAttachType::Ingress),
                ("egress", TcAttachType::Egress),
            ] {
                let filters = tc(ns, &["filter", "show", "dev", &interface.name, hook])?;
                add(
                    format!("tc filter show dev {} {hook}", interface.name),
                    lines(&filters, |_| true),
                );
                add(
                    format!("tcx {} {hook}", interface.name),
                    tcx(ns, &interface.name, direction),
                );
            }
        }
        add("nft list ruleset".into(), nftables(ns)?);
        for file in ["tcp", "tcp6"] {
            let of = |line: &str| {
                let words: Vec<_> = line.split_whitespace().collect();
                (words.get(3) == Some(&"0A")).then(|| words[1].to_owned())
            };
            let text = ns.proc_net(file)?;
            add(format!("listeners {file}"), text.lines().filter_map(of).collect());
        }
        add("sysctls".into(), ns.run(|| sysctls(Path::new("/proc/sys/net"))));
        Ok(Self(sections))
    }

    /// What this has and `other` has not, and the reverse: a line each.
    pub fn differences(&self, other: &Self) -> Vec<String> {
        let none = BTreeSet::new();
        let names: BTreeSet<_> = self.0.keys().chain(other.0.keys()).collect();
        let mut found = Vec::new();
        for name in names {
            let (mine, its) = (
                self.0.get(name).unwrap_or(&none),
                other.0.get(name).unwrap_or(&none),
            );
            found.extend(mine.difference(its).map(|line| format!("{name}: - {line}")));
            found.extend(its.difference(mine).map(|line| format!("{name}: + {line}")));
        }
        found
    }

    /// The lines of the sections whose names begin with `prefix`.
    pub fn section(&self, prefix: &str) -> impl Iterator<Item = &str> {
        self.0
            .iter()
            .filter(move |(name, _)| name.starts_with(prefix))
            .flat_map(|(_, lines)| lines.iter().map(String::as_str))
    }
}

fn lines(text: &str, keep: impl Fn(&str) -> bool) -> BTreeSet<String> {
    text.lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && keep(line))
        .map(str::to_owned)
        .collect()
}

fn tc(ns: &Namespace, arguments: &[&str]) -> Result<String> {
    let output = Command::new("tc")
        .args(["-n", ns.name()])
        .args(arguments)
        .output()?;
    // A hook without a qdisc is no hook yet.
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The TCX programs of a hook, in their order; none on a kernel that has no TCX.
fn tcx(ns: &Namespace, interface: &str, direction: TcAttachType) -> BTreeSet<String> {
    let found = ns.run(|| SchedClassifier::query_tcx(interface, direction));
    let programs = found.map(|(_, programs)| programs).unwrap_or_default();
    programs
        .iter()
        .map(|program| format!("{} id {}", program.name_as_str().unwrap_or("?"), program.id()))
        .collect()
}

/// What the iptables programs make where it is not there, and leave: tables with the kernel's own chains, without a rule.
const FRAME: [&str; 9] = [
    "table ",
    "chain PREROUTING",
    "chain INPUT",
    "chain FORWARD",
    "chain OUTPUT",
    "chain POSTROUTING",
    "type ",
    "# ",
    "}",
];

fn nftables(ns: &Namespace) -> Result<BTreeSet<String>> {
    let output = ns.run(|| Command::new("nft").args(["list", "ruleset"]).output());
    match output {
        Ok(output) => Ok(lines(&String::from_utf8_lossy(&output.stdout), |line| {
            !FRAME.iter().any(|frame| line.starts_with(frame))
        })),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(BTreeSet::new()),
        Err(error) => Err(error).context("starting nft"),
    }
}

fn sysctls(directory: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            found.extend(sysctls(&path));
        } else if let Ok(value) = fs::read_to_string(&path) {
            // Some are for writing only. A count is no setting.
            if !path.ends_with("nf_conntrack_count") {
                found.insert(format!("{} = {}", path.display(), value.trim()));
            }
        }
    }
    found
}

/// Objects of the kernel: kind (`prog`, `map`, `link`) and id. No id is given again soon.
pub type Objects = BTreeSet<(&'static str, u64)>;

const KINDS: [&str; 3] = ["prog", "map", "link"];

/// The objects that are pinned below `directory`, and the maps that pinned programs use.
///
/// # Panics
/// When bpftool fails.
pub fn pinned_below(directory: &Path) -> Objects {
    let mut found = Objects::new();
    for kind in KINDS {
        for object in bpftool(&["-f", "-j", kind, "show"]) {
            let pins = object["pinned"].as_array().into_iter().flatten();
            let ours = pins
                .filter_map(Value::as_str)
                .any(|pin| Path::new(pin).starts_with(directory));
            if !ours {
                continue;
            }
            found.extend(object["id"].as_u64().map(|id| (kind, id)));
            let used = object["map_ids"].as_array().into_iter().flatten();
            found.extend(used.filter_map(Value::as_u64).map(|id| ("map", id)));
        }
    }
    found
}

/// Those of `objects` that the kernel still has.
///
/// # Panics
/// When bpftool fails.
pub fn alive(objects: &Objects) -> Objects {
    let there: Objects = KINDS
        .into_iter()
        .flat_map(|kind| {
            let ids = bpftool(&["-j", kind, "show"]);
            ids.into_iter()
                .filter_map(move |object| Some((kind, object["id"].as_u64()?)))
        })
        .collect();
    objects.intersection(&there).copied().collect()
}

/// The links that programs have to a namespace itself.
///
/// # Panics
/// When bpftool fails.
pub fn netns_links(ns: &Namespace) -> Vec<u64> {
    let of = |link: &Value| link["netns_ino"].as_u64() == Some(ns.netns().id().ino);
    let links = bpftool(&["-j", "link", "show"]);
    links
        .iter()
        .filter(|link| of(link))
        .filter_map(|link| link["id"].as_u64())
        .collect()
}

/// Detaches a link, as its owner could, and anybody else who may use bpf(2). One that the agent has replaced meanwhile is gone as well.
///
/// # Panics
/// When bpftool fails otherwise.
pub fn detach_link(id: u64) {
    let output = Command::new("bpftool")
        .args(["link", "detach", "id", &id.to_string()])
        .output()
        .expect("bpftool runs");
    let said = String::from_utf8_lossy(&[output.stderr, output.stdout].concat()).into_owned();
    assert!(
        output.status.success() || said.contains("No such file or directory"),
        "{said}"
    );
}

fn bpftool(arguments: &[&str]) -> Vec<Value> {
    let run = || -> Result<Vec<Value>> {
        let output = Command::new("bpftool")
            .args(arguments)
            .output()
            .context("starting bpftool")?;
        ensure!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stdout)
        );
        Ok(serde_json::from_slice(&output.stdout)?)
    };
    // It stumbles over what goes away while it lists.
    wait::until("bpftool to list all objects", || run().ok())
}
