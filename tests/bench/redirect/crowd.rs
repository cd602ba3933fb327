//! Many pods that do nothing: they are enrolled and released. Each mode's agent takes the same ones in turn, by the path of
//! their namespace.

use std::net::{Ipv4Addr, Ipv6Addr};

use anyhow::{Context, Result, ensure};
use redirector_tests::{
    netns::{Namespace, unique_prefix},
    node::{Family, Host, Pod},
    wait,
    workloads::Workloads,
};

/// The pods, and where the other ends of their veths lie.
pub(crate) struct Crowd {
    pub(crate) pods: Vec<Pod>,
    _others: Namespace,
}

/// More would not fit into the addresses.
pub(crate) const MAX: u16 = 4_000;

impl Crowd {
    /// Makes `count` pods with addresses in 10.78.0.0/16 and fd78::/64.
    pub(crate) fn create(count: u16) -> Result<Self> {
        ensure!(count <= MAX, "a crowd has at most {MAX} pods");
        let prefix = unique_prefix();
        let others = Namespace::create(&format!("{prefix}-crowd"))?;
        let pods = (0..count)
            .map(|number| {
                ensure!(!wait::interrupted(), "interrupted");
                pod(&others, &prefix, number).with_context(|| format!("making pod {number} of the crowd"))
            })
            .collect::<Result<_>>()?;
        Ok(Self {
            pods,
            _others: others,
        })
    }

    /// The workload file's entries for all of them.
    pub(crate) fn workloads(&self, workloads: Workloads) -> Workloads {
        self.pods.iter().fold(workloads, |workloads, pod| {
            let addresses = Family::BOTH.map(|family| pod.ip(family));
            workloads.with_workload(&pod.name, &addresses, "HBONE")
        })
    }
}

fn pod(others: &Namespace, prefix: &str, number: u16) -> Result<Pod> {
    let address = number + 2;
    let v4 = Ipv4Addr::from_bits(Ipv4Addr::new(10, 78, 0, 0).to_bits() | u32::from(address));
    let v6 = Ipv6Addr::new(0xfd78, 0, 0, 0, 0, 0, 0, address);
    let name = format!("crowd{number}");
    let ns = Namespace::create(&format!("{prefix}-{name}"))?;
    let veth = format!("veth{number}");
    others.ip(&[
        format!("link add {veth} type veth peer name eth0 netns {}", ns.name()),
        format!("link set {veth} up"),
    ])?;
    ns.ip(&[
        format!("addr add {v4}/16 dev eth0"),
        format!("addr add {v6}/64 dev eth0 nodad"),
        "link set eth0 up".to_owned(),
    ])?;
    Ok(Pod {
        host: Host { ns, v4, v6 },
        uid: format!("{prefix}-{name}"),
        name,
        namespace: "demo".to_owned(),
        veth,
        // Nobody captures there.
        host_ifindex: 0,
    })
}
