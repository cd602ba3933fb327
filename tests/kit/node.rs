//! A node: a namespace with a bridge, pods whose eth0 is a veth on it, and a namespace `outside` behind a route.
//!
//! All addresses are private to these namespaces, so every node has the same:
//! pods 10.77.0.0/16 and fd77::/64 (the node is .0.1), outside 192.0.2.2 and fd77:ffff::2.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::Path,
    sync::atomic::{AtomicU16, Ordering},
    thread,
};

use anyhow::Result;

use crate::{
    capture::Capture,
    netns::{Directory, Namespace, sweep, unique_prefix},
};

/// An address family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// Both.
    pub const BOTH: [Self; 2] = [Self::V4, Self::V6];

    /// `v4` or `v6`, for names of tests.
    pub fn name(self) -> &'static str {
        match self {
            Self::V4 => "v4",
            Self::V6 => "v6",
        }
    }

    /// The wildcard address.
    pub fn any(self) -> IpAddr {
        match self {
            Self::V4 => Ipv4Addr::UNSPECIFIED.into(),
            Self::V6 => Ipv6Addr::UNSPECIFIED.into(),
        }
    }

    /// The loopback address.
    pub fn loopback(self) -> IpAddr {
        match self {
            Self::V4 => Ipv4Addr::LOCALHOST.into(),
            Self::V6 => Ipv6Addr::LOCALHOST.into(),
        }
    }
}

/// A namespace with an address of each family.
#[derive(Debug)]
pub struct Host {
    /// Its namespace.
    pub ns: Namespace,
    /// Its addresses.
    pub v4: Ipv4Addr,
    /// Its addresses.
    pub v6: Ipv6Addr,
}

impl Host {
    /// Its address of a family.
    pub fn ip(&self, family: Family) -> IpAddr {
        match family {
            Family::V4 => self.v4.into(),
            Family::V6 => self.v6.into(),
        }
    }

    /// A port at its address of a family.
    pub fn addr(&self, family: Family, port: u16) -> SocketAddr {
        (self.ip(family), port).into()
    }
}

/// A pod.
#[derive(Debug)]
pub struct Pod {
    /// Its namespace and addresses.
    pub host: Host,
    /// Pod name; its service account has the same.
    pub name: String,
    /// Kubernetes namespace.
    pub namespace: String,
    /// Kubernetes UID.
    pub uid: String,
    /// Name, in the node's namespace, of the other end of its eth0.
    pub veth: String,
    /// Index of that.
    pub host_ifindex: u32,
}

impl std::ops::Deref for Pod {
    type Target = Host;

    fn deref(&self) -> &Host {
        &self.host
    }
}

impl Pod {
    /// Its identity.
    pub fn identity(&self) -> String {
        format!("spiffe://cluster.local/ns/{}/sa/{}", self.namespace, self.name)
    }
}

/// A node with its pods' network; the pods are values of their own.
#[derive(Debug)]
pub struct Node {
    /// The node's own namespace: the agent runs here.
    pub host: Host,
    /// A namespace that is not on the pods' network: the rest of the world.
    pub outside: Host,
    prefix: String,
    directory: Directory,
    pods: AtomicU16,
}

impl Node {
    /// Makes a node without pods.
    ///
    /// # Panics
    /// When it cannot be made.
    pub fn new() -> Self {
        Self::create().unwrap_or_else(|error| panic!("making a node of namespaces: {error:#}"))
    }

    /// Makes a node without pods; first removes what dead processes left.
    pub fn create() -> Result<Self> {
        sweep();
        let prefix = unique_prefix();
        let directory = Directory::create(&prefix)?;
        let node = Namespace::create(&format!("{prefix}-node"))?;
        for (sysctl, value) in [
            ("net/ipv4/ip_forward", "1"),
            ("net/ipv6/conf/all/forwarding", "1"),
        ] {
            node.set_sysctl(sysctl, value)?;
        }
        let outside = Namespace::create(&format!("{prefix}-outside"))?;
        node.ip(&[
            // With an address of its own: a bridge that has none takes the lowest of its ports', and a pod that comes later would leave the
            // others with one that is nobody's any more.
            "link add br0 address 02:00:00:00:00:01 type bridge forward_delay 0 mcast_snooping 0",
            "addr add 10.77.0.1/16 dev br0",
            "addr add fd77::1/64 dev br0 nodad",
            "link set br0 up",
            &format!("link add out0 type veth peer name eth0 netns {}", outside.name()),
            "addr add 192.0.2.1/24 dev out0",
            "addr add fd77:ffff::1/64 dev out0 nodad",
            "link set out0 up",
        ])?;
        outside.ip(&[
            "addr add 192.0.2.2/24 dev eth0",
            "addr add fd77:ffff::2/64 dev eth0 nodad",
            "link set eth0 up",
            "route add default via 192.0.2.1",
            "route add default via fd77:ffff::1",
        ])?;
        Ok(Self {
            host: Host {
                ns: node,
                v4: Ipv4Addr::new(10, 77, 0, 1),
                v6: "fd77::1".parse()?,
            },
            outside: Host {
                ns: outside,
                v4: Ipv4Addr::new(192, 0, 2, 2),
                v6: "fd77:ffff::2".parse()?,
            },
            prefix,
            directory,
            pods: AtomicU16::new(10),
        })
    }

    /// Adds a pod.
    ///
    /// # Panics
    /// When it cannot be made.
    pub fn pod(&self, name: &str) -> Pod {
        self.create_pod(name)
            .unwrap_or_else(|error| panic!("making pod {name}: {error:#}"))
    }

    /// Adds pods, some at a time. A bridge has a thousand ports.
    ///
    /// # Panics
    /// When one cannot be made.
    pub fn pods(&self, names: &[String]) -> Vec<Pod> {
        const AT_A_TIME: usize = 4;
        let share = names.len().div_ceil(AT_A_TIME).max(1);
        thread::scope(|scope| {
            let make = |names: &[String]| names.iter().map(|name| self.pod(name)).collect::<Vec<_>>();
            let makers: Vec<_> = names
                .chunks(share)
                .map(|names| scope.spawn(move || make(names)))
                .collect();
            let made = makers.into_iter().map(|maker| maker.join().expect("makes pods"));
            made.flatten().collect()
        })
    }

    /// Adds a pod, in Kubernetes namespace `demo`.
    pub fn create_pod(&self, name: &str) -> Result<Pod> {
        let number = self.pods.fetch_add(1, Ordering::Relaxed);
        let [high, low] = number.to_be_bytes();
        let addresses = (
            Ipv4Addr::new(10, 77, high, low),
            format!("fd77::{number}").parse::<Ipv6Addr>()?,
        );
        self.build(name, number, addresses, true)
    }

    /// Adds a pod with the addresses of another, as one that gets them before that is known to be gone. It is on no bridge, so
    /// that the other, if it is still there, keeps its traffic.
    ///
    /// # Panics
    /// When it cannot be made.
    pub fn twin(&self, of: &Pod, name: &str) -> Pod {
        let number = self.pods.fetch_add(1, Ordering::Relaxed);
        self.build(name, number, (of.v4, of.v6), false)
            .unwrap_or_else(|error| panic!("making pod {name}: {error:#}"))
    }

    fn build(&self, name: &str, number: u16, (v4, v6): (Ipv4Addr, Ipv6Addr), on_bridge: bool) -> Result<Pod> {
        let ns = Namespace::create(&format!("{}-{name}", self.prefix))?;
        let veth = format!("veth{number}");
        let master = if on_bridge { "master br0" } else { "" };
        self.host.ns.ip(&[
            format!("link add {veth} type veth peer name eth0 netns {}", ns.name()),
            format!("link set {veth} {master} up"),
        ])?;
        ns.ip(&[
            format!("addr add {v4}/16 dev eth0"),
            format!("addr add {v6}/64 dev eth0 nodad"),
            "link set eth0 up".to_owned(),
            "route add default via 10.77.0.1".to_owned(),
            "route add default via fd77::1".to_owned(),
        ])?;
        let host_ifindex = self
            .host
            .ns
            .run(|| nix::net::if_::if_nametoindex(veth.as_str()))?;
        Ok(Pod {
            host: Host { ns, v4, v6 },
            name: name.to_owned(),
            namespace: "demo".to_owned(),
            uid: format!("{}-{name}-{number}", self.prefix),
            veth,
            host_ifindex,
        })
    }

    /// A directory for files that belong to this node, removed with it.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Records what goes over the pod's veth, from the node's end.
    ///
    /// # Panics
    /// When it cannot.
    pub fn capture(&self, pod: &Pod) -> Capture {
        Capture::start(&self.host.ns, pod.host_ifindex)
            .unwrap_or_else(|error| panic!("capturing at {}: {error:#}", pod.name))
    }
}

impl Default for Node {
    fn default() -> Self {
        Self::new()
    }
}
