//! Somebody else's eBPF programs (package `redirector-foreign`), beside which ours must work: they count what passes, or
//! deliver into pods past the veth.

use std::{
    env, fs,
    net::IpAddr,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use aya::{
    Ebpf,
    maps::{HashMap, PerCpuArray},
    programs::{
        LinkOrder, SchedClassifier, TcAttachType,
        tc::{self, NlOptions, SchedClassifierLink, TcAttachOptions},
    },
};
use redirector::sys::netns::Netns;

use crate::{
    netns::Namespace,
    node::{Node, Pod},
};

/// Where a program stands among the others of its hook.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// A filter of the clsact qdisc, which is added if there is none. Lower priorities run first; 0 lets the kernel choose,
    /// from 49152 down.
    Clsact(u16),
    /// A TCX link before all that are there: Linux 6.6 on.
    TcxFirst,
    /// A TCX link after all that are there.
    TcxLast,
}

/// How packets get into a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivery {
    /// bpf_redirect_peer: the node's end of the veth does not see them.
    Peer,
    /// bpf_redirect_neigh: out of the node's end, past routing and bridge.
    Neigh,
}

/// Foreign programs that stay until this value is dropped, and no longer.
#[derive(Debug)]
pub struct Foreign {
    ebpf: Ebpf,
    links: Vec<SchedClassifierLink>,
    netns: Netns,
}

/// Where xtask leaves the object.
fn object() -> PathBuf {
    let own = env::var_os("REDIRECTOR_EBPF_OBJECT").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/bpf/redirector.bpf.o"),
        PathBuf::from,
    );
    own.with_file_name("foreign.bpf.o")
}

impl Foreign {
    /// Counts the packets at a hook, and leaves them to the next program.
    ///
    /// # Panics
    /// When it cannot be attached.
    pub fn counting(ns: &Namespace, interface: &str, direction: TcAttachType, place: Place) -> Self {
        let attach = || {
            let mut foreign = Self::load(ns)?;
            foreign.attach("foreign_count", interface, direction, place)?;
            Ok::<_, anyhow::Error>(foreign)
        };
        attach().unwrap_or_else(|error| {
            panic!("attaching a foreign program to {interface} {direction:?}, {place:?}: {error:#}")
        })
    }

    /// Delivers TCP from each of the pods to each other, right behind their veths.
    ///
    /// # Panics
    /// When it cannot be attached.
    pub fn delivering(node: &Node, delivery: Delivery, pods: &[&Pod]) -> Self {
        Self::deliver(node, delivery, pods)
            .unwrap_or_else(|error| panic!("attaching foreign programs to the node: {error:#}"))
    }

    fn deliver(node: &Node, delivery: Delivery, pods: &[&Pod]) -> Result<Self> {
        let mut foreign = Self::load(&node.host.ns)?;
        let map = foreign
            .ebpf
            .map_mut("FOREIGN_PODS")
            .context("the object has no FOREIGN_PODS")?;
        let mut interfaces = HashMap::<_, [u8; 16], u32>::try_from(map)?;
        for pod in pods {
            for address in [IpAddr::from(pod.v4), pod.v6.into()] {
                let key = match address {
                    IpAddr::V4(v4) => v4.to_ipv6_mapped(),
                    IpAddr::V6(v6) => v6,
                };
                interfaces.insert(key.octets(), pod.host_ifindex, 0)?;
            }
        }
        let program = match delivery {
            Delivery::Peer => "foreign_peer",
            Delivery::Neigh => "foreign_neigh",
        };
        for pod in pods {
            let veth = node
                .host
                .ns
                .run(|| nix::net::if_::if_indextoname(pod.host_ifindex))?;
            let veth = veth.to_str()?;
            if delivery == Delivery::Neigh {
                // A port of a bridge resolves nobody by itself.
                let mac = hardware_address(pod)?;
                node.host.ns.ip(&[
                    format!("neigh replace {} lladdr {mac} dev {veth} nud permanent", pod.v4),
                    format!("neigh replace {} lladdr {mac} dev {veth} nud permanent", pod.v6),
                ])?;
            }
            foreign.attach(program, veth, TcAttachType::Ingress, Place::Clsact(1))?;
        }
        Ok(foreign)
    }

    fn load(ns: &Namespace) -> Result<Self> {
        let path = object();
        let bytes = fs::read(&path)
            .with_context(|| format!("reading {}: cargo xtask ebpf builds it", path.display()))?;
        Ok(Self {
            ebpf: Ebpf::load(&bytes)?,
            links: Vec::new(),
            netns: Netns::open(&ns.path())?,
        })
    }

    fn attach(&mut self, name: &str, interface: &str, direction: TcAttachType, place: Place) -> Result<()> {
        let program: &mut SchedClassifier = self
            .ebpf
            .program_mut(name)
            .with_context(|| format!("the object has no {name}"))?
            .try_into()?;
        if program.fd().is_err() {
            program.load()?;
        }
        let options = match place {
            Place::TcxFirst => TcAttachOptions::TcxOrder(LinkOrder::first()),
            Place::TcxLast => TcAttachOptions::TcxOrder(LinkOrder::last()),
            Place::Clsact(priority) => TcAttachOptions::Netlink(NlOptions {
                priority,
                ..NlOptions::default()
            }),
        };
        let link = self.netns.run(|| {
            if let Place::Clsact(_) = place {
                // It is there already, perhaps: then adding the filter works, and else says what is wrong.
                let _ = tc::qdisc_add_clsact(interface);
            }
            program.attach_with_options(interface, direction, options)
        })??;
        self.links.push(program.take_link(link)?);
        Ok(())
    }

    /// Packets that it has acted on so far.
    ///
    /// # Panics
    /// When its map cannot be read.
    pub fn packets(&self) -> u64 {
        let map = self.ebpf.map("FOREIGN_COUNT").expect("the object has it");
        let map = PerCpuArray::<_, u64>::try_from(map).expect("it is an array");
        map.get(&0, 0).expect("it has one element").iter().sum()
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        let links = std::mem::take(&mut self.links);
        // A filter is removed by its interface's index, which means something only in its own namespace.
        if let Err(error) = self.netns.run(|| drop(links)) {
            eprintln!("foreign programs stay attached: {error}");
        }
    }
}

/// The MAC address of a pod's eth0.
fn hardware_address(pod: &Pod) -> Result<String> {
    let text = pod.ns.ip_output("-o link show eth0");
    let mut words = text.split_whitespace().skip_while(|word| *word != "link/ether");
    let mac = words.nth(1);
    mac.map(str::to_owned)
        .with_context(|| format!("no MAC address in {text:?}"))
}
