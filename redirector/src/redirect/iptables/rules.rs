//! Istio's in-pod rule set as text: what is wanted in a pod, what `iptables-save` says is there, and the input of
//! `iptables-restore --noflush` that makes the one of the other.
//!
//! Rules are written as `iptables-save` prints them, so that the two can be compared. Source of the rule set:
//! istio/istio `cni/pkg/iptables/iptables.go`, AppendInpodRules.

use std::{
    collections::BTreeMap,
    fmt::Write,
    net::{Ipv4Addr, Ipv6Addr},
    ops::RangeInclusive,
};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use redirector_common::consts::{MARK_MASK, MARK_PROXY, Mark, PORT_HBONE, PORT_INBOUND, PORT_OUTBOUND};

use crate::redirect::rules::{Lists, Networks, Ports, Rules};

/// On connections between the proxy and the pod's application, and on the application's answers: connmark and mark. Istio's
/// `cni/pkg/config/config.go`, InpodTMark.
pub(super) const MARK_TPROXY: Mark = Mark(0x111);

/// Where DNS queries are redirected: ztunnel's in-pod DNS listener.
const PORT_DNS: u16 = 15053;

/// What comes from and goes to the address under which istio-cni's host rules (which are not ours) let the node's own processes
/// reach pods: `cni/pkg/config/config.go`, HOST_PROBE_SNAT_IP and HOST_PROBE_SNAT_IPV6.
const PROBE_V4: Ipv4Addr = Ipv4Addr::new(169, 254, 7, 127);
const PROBE_V6: Ipv6Addr = Ipv6Addr::new(0xfd16, 0x9254, 0x7127, 0x1337, 0xffff, 0xffff, 0xffff, 0xffff);

/// An address family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Family {
    V4,
    V6,
}

/// The tables, in the order in which they are written: packets must find their marks when the first is redirected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Table {
    Mangle,
    Raw,
    Nat,
}

impl Table {
    const ALL: [Self; 3] = [Self::Mangle, Self::Raw, Self::Nat];

    /// As the kernel and the programs call it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Mangle => "mangle",
            Self::Raw => "raw",
            Self::Nat => "nat",
        }
    }
}

/// The kernel's chains that jump to ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Hook {
    Prerouting,
    Output,
}

impl Hook {
    const ALL: [Self; 2] = [Self::Prerouting, Self::Output];

    /// The kernel's chain.
    fn name(self) -> &'static str {
        match self {
            Self::Prerouting => "PREROUTING",
            Self::Output => "OUTPUT",
        }
    }

    /// Our chain.
    fn ours(self) -> &'static str {
        match self {
            Self::Prerouting => "ISTIO_PRERT",
            Self::Output => "ISTIO_OUTPUT",
        }
    }
}

/// Our chains with their rules, each without `-A` and the chain's name.
pub(super) type Chains = BTreeMap<(Table, Hook), Vec<String>>;

/// What is to be captured in a pod.
#[derive(Debug, Clone, Copy)]
pub(super) struct Capture<'a> {
    /// Which connections.
    pub(super) rules: &'a Rules,
    /// DNS queries too, to the proxy's DNS listener.
    pub(super) dns: bool,
    /// What arrives on these interfaces is outbound traffic of something within the pod.
    pub(super) reroute_interfaces: &'a [String],
}

impl<'a> From<&'a Rules> for Capture<'a> {
    fn from(rules: &'a Rules) -> Self {
        Self {
            rules,
            dns: false,
            reroute_interfaces: &[],
        }
    }
}

impl Capture<'_> {
    /// The chains that capture so.
    pub(super) fn chains(&self, family: Family) -> Chains {
        let mut chains = Chains::from([
            (
                (Table::Mangle, Hook::Prerouting),
                vec![format!(
                    "-m mark --mark {} -j CONNMARK --set-xmark {}",
                    masked(MARK_PROXY),
                    masked(MARK_TPROXY)
                )],
            ),
            (
                (Table::Mangle, Hook::Output),
                vec![format!(
                    "-m connmark --mark {} -j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff",
                    masked(MARK_TPROXY)
                )],
            ),
            ((Table::Nat, Hook::Prerouting), self.nat_prerouting(family)),
            ((Table::Nat, Hook::Output), self.nat_output(family)),
        ]);
        if self.dns {
            // The proxy's own queries and their answers: the same addresses and ports as a query that was redirected may have.
            let proxy = masked(MARK_PROXY);
            chains.insert(
                (Table::Raw, Hook::Output),
                vec![format!(
                    "-p udp -m udp --dport 53 -m mark --mark {proxy} -j CT --zone 1"
                )],
            );
            chains.insert(
                (Table::Raw, Hook::Prerouting),
                vec![format!(
                    "-p udp -m udp --sport 53 -m mark ! --mark {proxy} -j CT --zone 1"
                )],
            );
        }
        chains
    }

    fn nat_prerouting(&self, family: Family) -> Vec<String> {
        let mut rules = Vec::new();
        for interface in self.reroute_interfaces {
            rules.push(format!(
                "-i {interface} -p tcp -j REDIRECT --to-ports {PORT_OUTBOUND}"
            ));
            rules.push(format!("-i {interface} -p tcp -j RETURN"));
        }
        if self.rules.bypass_inbound {
            return rules;
        }
        rules.push(format!("-s {} -p tcp -m tcp -j ACCEPT", probe(family)));
        let inbound = &self.rules.inbound;
        rules.extend(returns(inbound, "-s", family));
        let redirect = |source: String| {
            format!(
                "{source}! -d {} -p tcp -m tcp ! --dport {PORT_HBONE} -m mark ! --mark {} -j REDIRECT --to-ports {PORT_INBOUND}",
                loopback(family),
                masked(MARK_PROXY),
            )
        };
        rules.extend(match &inbound.only_networks {
            None => vec![redirect(String::new())],
            Some(networks) => matches(networks, "-s", family).map(redirect).collect(),
        });
        rules
    }

    fn nat_output(&self, family: Family) -> Vec<String> {
        let (loopback, proxy) = (loopback(family), masked(MARK_PROXY));
        let mut rules = vec![format!("-d {} -p tcp -m tcp -j ACCEPT", probe(family))];
        if self.dns {
            rules.push(format!(
                "! -o lo -p udp -m udp --dport 53 -m mark ! --mark {proxy} -j REDIRECT --to-ports {PORT_DNS}"
            ));
            rules.push(format!(
                "! -d {loopback} -p tcp -m tcp --dport 53 -m mark ! --mark {proxy} -j REDIRECT --to-ports {PORT_DNS}"
            ));
        }
        rules.push(format!("-p tcp -m mark --mark {} -j ACCEPT", masked(MARK_TPROXY)));
        rules.push(format!("! -d {loopback} -o lo -j ACCEPT"));
        let outbound = &self.rules.outbound;
        rules.extend(returns(outbound, "-d", family));
        let redirect = |destination: String| {
            format!("{destination}-p tcp -m mark ! --mark {proxy} -j REDIRECT --to-ports {PORT_OUTBOUND}")
        };
        match &outbound.only_networks {
            None => rules.push(redirect(format!("! -d {loopback} "))),
            Some(networks) => {
                // A rule has room for one destination.
                rules.push(format!("-d {loopback} -j RETURN"));
                rules.extend(matches(networks, "-d", family).map(redirect));
            }
        }
        rules
    }
}

/// Rules for what is not captured, but for addresses that are in no network of a list of those that alone are.
fn returns(lists: &Lists, direction: &str, family: Family) -> Vec<String> {
    let gaps = lists.only_ports.as_ref().map(gaps).unwrap_or_default();
    let ports = lists.not_ports.0.iter().chain(&gaps);
    let ports = ports.map(|ports| match (ports.start(), ports.end()) {
        (first, last) if first == last => format!("-p tcp -m tcp --dport {first} -j RETURN"),
        (first, last) => format!("-p tcp -m tcp --dport {first}:{last} -j RETURN"),
    });
    let networks = matches(&lists.not_networks, direction, family);
    ports
        .chain(networks.map(|matched| format!("{matched}-p tcp -j RETURN")))
        .collect()
}

/// A match for each network that has addresses of the family, with a blank after it; an empty one for a network of all, as
/// iptables prints it.
fn matches(networks: &Networks, direction: &str, family: Family) -> impl Iterator<Item = String> {
    let of_family = networks
        .0
        .iter()
        .filter_map(move |network| match (family, network) {
            (Family::V4, IpNet::V4(_)) | (Family::V6, IpNet::V6(_)) => Some(*network),
            // IPv4 addresses are the IPv6 ones of ::ffff:0:0/96 that are mapped.
            (Family::V4, IpNet::V6(v6)) => mapped(*v6),
            (Family::V6, IpNet::V4(_)) => None,
        });
    of_family.map(move |network| match network.prefix_len() {
        0 => String::new(),
        _ => format!("{direction} {} ", network.trunc()),
    })
}

/// What of a network is of IPv4.
fn mapped(network: Ipv6Net) -> Option<IpNet> {
    const MAPPED: Ipv6Net = Ipv6Net::new_assert(Ipv6Addr::new(0, 0, 0, 0, 0, 0xffff, 0, 0), 96);
    if network.contains(&MAPPED) {
        return Some(Ipv4Net::default().into());
    }
    let address = network.addr().to_ipv4_mapped()?;
    Some(Ipv4Net::new_assert(address, network.prefix_len().checked_sub(96)?).into())
}

/// The ports in none of the ranges.
fn gaps(ports: &Ports) -> Vec<RangeInclusive<u16>> {
    let mut ports = ports.0.clone();
    ports.sort_unstable_by_key(|range| *range.start());
    let (mut gaps, mut next) = (Vec::new(), Some(0));
    for range in ports {
        let Some(free) = next else { break };
        if *range.start() > free {
            gaps.push(free..=range.start() - 1);
        }
        next = free
            .max(*range.end())
            .checked_add(u16::from(free <= *range.end()));
    }
    gaps.extend(next.map(|free| free..=u16::MAX));
    gaps
}

fn masked(mark: Mark) -> String {
    format!("{:#x}/{MARK_MASK:#x}", mark.0)
}

fn loopback(family: Family) -> &'static str {
    match family {
        Family::V4 => "127.0.0.1/32",
        Family::V6 => "::1/128",
    }
}

fn probe(family: Family) -> String {
    match family {
        Family::V4 => format!("{PROBE_V4}/32"),
        Family::V6 => format!("{PROBE_V6}/128"),
    }
}

/// What of ours is in a namespace, for one family.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Found {
    /// Our chains.
    pub(super) chains: Chains,
    /// How often the kernel's chains jump to them.
    jumps: BTreeMap<(Table, Hook), usize>,
}

impl Found {
    /// Reads what `iptables-save` printed.
    pub(super) fn parse(saved: &str) -> Self {
        let mut found = Self::default();
        let mut table = None;
        for line in saved.lines() {
            if let Some(name) = line.strip_prefix('*') {
                table = Table::ALL.into_iter().find(|table| table.name() == name);
                continue;
            }
            let Some(table) = table else { continue };
            for hook in Hook::ALL {
                let (name, ours) = (hook.name(), hook.ours());
                let after = |prefix: &str| line.strip_prefix(prefix)?.strip_prefix(ours)?.strip_prefix(' ');
                if after(":").is_some() {
                    found.chains.entry((table, hook)).or_default();
                } else if let Some(rule) = after("-A ") {
                    found
                        .chains
                        .entry((table, hook))
                        .or_default()
                        .push(rule.to_owned());
                } else if line == format!("-A {name} -j {ours}") {
                    *found.jumps.entry((table, hook)).or_default() += 1;
                }
            }
        }
        found
    }

    /// Whether just these chains are there, each with its one jump.
    pub(super) fn is(&self, chains: &Chains) -> bool {
        self.chains == *chains
            && self.jumps.len() == chains.len()
            && chains.keys().all(|key| self.jumps.get(key) == Some(&1))
    }

    /// Whether chains with as many rules are there, each with its one jump: the same ones, however they are printed.
    pub(super) fn has_form_of(&self, chains: &Chains) -> bool {
        self.is(&self.chains)
            && self.chains.keys().eq(chains.keys())
            && self
                .chains
                .values()
                .map(Vec::len)
                .eq(chains.values().map(Vec::len))
    }

    /// Input of `iptables-restore --noflush` that leaves just `chains` of ours; empty when nothing of ours is and is to be there.
    /// A table is changed as a whole or not at all.
    pub(super) fn to(&self, chains: &Chains) -> String {
        let mut text = String::new();
        for table in Table::ALL {
            let (mut declared, mut lines) = (String::new(), String::new());
            for hook in Hook::ALL {
                let key = (table, hook);
                let (name, ours) = (hook.name(), hook.ours());
                let jumps = self.jumps.get(&key).copied().unwrap_or(0);
                let surplus = match chains.get(&key) {
                    Some(rules) => {
                        // Without --flush, this empties a chain that is there.
                        let _ = writeln!(declared, ":{ours} - [0:0]");
                        rules.iter().for_each(|rule| {
                            let _ = writeln!(lines, "-A {ours} {rule}");
                        });
                        if jumps == 0 {
                            let _ = writeln!(lines, "-A {name} -j {ours}");
                        }
                        jumps.saturating_sub(1)
                    }
                    None => jumps,
                };
                for _ in 0..surplus {
                    let _ = writeln!(lines, "-D {name} -j {ours}");
                }
                if self.chains.contains_key(&key) && !chains.contains_key(&key) {
                    let _ = writeln!(lines, "-F {ours}\n-X {ours}");
                }
            }
            if !declared.is_empty() || !lines.is_empty() {
                let _ = writeln!(text, "*{}\n{declared}{lines}COMMIT", table.name());
            }
        }
        text
    }
}

#[cfg(test)]
mod tests;
