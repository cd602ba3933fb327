//! What the demonstration proves, and from where each fact is read. What does not hold is an error.

use std::{collections::BTreeMap, fs, net::IpAddr, path::Path, process::Command};

use anyhow::{Result, bail, ensure};
use redirector_tests::{
    capture::{Segment, contains, opened_ports, tls_records},
    netns::Namespace,
    node::{Family, Pod},
    wait,
};

use crate::Demo;

const HBONE_PORT: u16 = 15008;
const VERDICTS: &str = "redirector_verdicts_total";

/// What was counted before the traffic, and what has been seen of it.
pub(crate) struct Proof {
    verdicts: BTreeMap<[String; 3], f64>,
    tunnel_seen: bool,
}

impl Proof {
    pub(crate) fn begin(demo: &Demo) -> Self {
        Self {
            verdicts: verdicts(demo),
            tunnel_seen: false,
        }
    }

    /// Nothing but HBONE was opened between the pods, it was TLS, and the request was not to be read. The second request may
    /// use the first one's tunnel.
    pub(crate) fn wire(&mut self, segments: &[Segment], secret: &[u8]) -> Result<()> {
        let opened = opened_ports(segments);
        ensure!(
            opened.iter().all(|port| *port == HBONE_PORT),
            "connections were opened to ports {opened:?}"
        );
        ensure!(
            !contains(segments, secret),
            "the request went over the wire in plaintext"
        );
        let tls = tls_records(segments, HBONE_PORT);
        self.tunnel_seen |= tls.records > 0 && (tls.not_tls == 0 || self.tunnel_seen);
        ensure!(self.tunnel_seen, "no TLS was seen on port {HBONE_PORT}: {tls:?}");
        let tunnel = if opened.is_empty() {
            "the tunnel that was there"
        } else {
            "a new connection"
        };
        println!(
            "    on the wire: {tunnel} to port {HBONE_PORT}, {} TLS records in {} bytes, the request nowhere in plaintext",
            tls.records, tls.bytes
        );
        Ok(())
    }

    /// Both ends know each other by name, as the access log tells.
    pub(crate) fn identities(&self, demo: &Demo, family: Family) -> Result<()> {
        let client = demo.client.ip(family);
        for direction in ["outbound", "inbound"] {
            let entry = access(demo, direction, client);
            let identity = |key: &str| entry.get(key).cloned().unwrap_or_default();
            let (from, to) = (identity("src.identity"), identity("dst.identity"));
            ensure!(
                from == demo.client.identity() && to == demo.server.identity(),
                "the {direction} proxy took the ends for {from:?} and {to:?}: {entry:?}"
            );
            println!("    {direction}: {from} -> {to}, HBONE");
        }
        Ok(())
    }

    /// The programs have seen the traffic: the counters that moved since the beginning.
    pub(crate) fn counters(&self, demo: &Demo) -> Result<()> {
        let mut moved = Vec::new();
        for (labels, now) in verdicts(demo) {
            let before = self.verdicts.get(&labels).copied().unwrap_or(0.0);
            if now > before {
                moved.push((labels, now - before));
            }
        }
        ensure!(
            !moved.is_empty(),
            "no counter of the eBPF programs has moved ({VERDICTS})"
        );
        println!("\neBPF programs, packets or look-ups by verdict");
        for ([pod, program, verdict], count) in moved {
            let name = [&demo.client, &demo.server]
                .into_iter()
                .find(|known| known.uid == pod);
            let name = name.map_or(pod.as_str(), |known| known.name.as_str());
            println!("  {name:8} {program:12} {verdict:28} {count:8}");
        }
        Ok(())
    }
}

fn verdicts(demo: &Demo) -> BTreeMap<[String; 3], f64> {
    let samples = demo
        .agent
        .metrics()
        .into_iter()
        .filter(|sample| sample.name == VERDICTS);
    let label = |labels: &BTreeMap<String, String>, key: &str| labels.get(key).cloned().unwrap_or_default();
    samples
        .map(|sample| {
            (
                ["pod", "program", "verdict"].map(|key| label(&sample.labels, key)),
                sample.value,
            )
        })
        .collect()
}

/// The access log's entry for a connection of `client`; a line is written when its connection has ended.
fn access(demo: &Demo, direction: &str, client: IpAddr) -> BTreeMap<String, String> {
    let of_client = |entry: &BTreeMap<String, String>| {
        let source = entry
            .get("src.addr")
            .and_then(|addr| addr.parse().ok())
            .map(|addr: std::net::SocketAddr| addr.ip());
        source == Some(client) && entry.get("direction").is_some_and(|value| value == direction)
    };
    wait::until("the access log", || {
        demo.agent.access_log().into_iter().rfind(of_client)
    })
}

/// The last connection of `client` passed the proxy without TLS.
pub(crate) fn plain(demo: &Demo, client: IpAddr) -> Result<()> {
    // From outside it comes in, and from a pod it goes out.
    let pods = [&demo.client, &demo.server];
    let outbound = pods
        .iter()
        .any(|pod| Family::BOTH.iter().any(|family| pod.ip(*family) == client));
    let direction = if outbound { "outbound" } else { "inbound" };
    let plain = wait::until("the access log", || {
        let entry = access(demo, direction, client);
        (!entry.contains_key("src.identity")).then_some(entry)
    });
    let addr = |key: &str| plain.get(key).map_or("?", String::as_str);
    println!(
        "    {direction}: {} -> {}, plain TCP through the proxy",
        addr("src.addr"),
        addr("dst.addr")
    );
    Ok(())
}

/// No rule and no connection tracking does the work.
pub(crate) fn nothing_else_at_work(pods: &[&Pod]) -> Result<()> {
    println!("\nin the pods");
    for pod in pods {
        let rules = [nftables(&pod.ns)?, legacy_iptables(&pod.ns)?].join(", ");
        println!("  {:8} {rules}, {}", pod.name, conntrack(&pod.ns)?);
    }
    Ok(())
}

/// nftables holds the rules of iptables-nft too.
fn nftables(ns: &Namespace) -> Result<String> {
    let output = ns.run(|| Command::new("nft").args(["list", "ruleset"]).output());
    match output {
        Ok(output) if output.status.success() => {
            let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
            ensure!(text.is_empty(), "there are nftables rules:\n{text}");
            Ok("nft list ruleset is empty".to_owned())
        }
        Ok(output) => {
            let error = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            if error.contains("not supported") {
                return Ok("this kernel has no nftables".to_owned());
            }
            bail!("nft list ruleset: {error}")
        }
        Err(_) => Ok("nft is not installed, nftables not looked at".to_owned()),
    }
}

/// The kernel names the tables that somebody has made rules in.
fn legacy_iptables(ns: &Namespace) -> Result<String> {
    for file in ["ip_tables_names", "ip6_tables_names"] {
        let tables = ns.proc_net(file).unwrap_or_default();
        ensure!(
            tables.trim().is_empty(),
            "there are iptables tables: {}",
            tables.trim()
        );
    }
    Ok("no legacy iptables table".to_owned())
}

fn conntrack(ns: &Namespace) -> Result<String> {
    let count = ns.run(|| fs::read_to_string(Path::new("/proc/sys/net/netfilter/nf_conntrack_count")));
    match count {
        Ok(count) => {
            ensure!(
                count.trim() == "0",
                "connection tracking has {} entries",
                count.trim()
            );
            Ok("0 conntrack entries (nf_conntrack_count)".to_owned())
        }
        Err(_) => Ok("no conntrack entry (the kernel has no connection tracking loaded)".to_owned()),
    }
}
