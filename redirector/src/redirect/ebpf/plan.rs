//! What an attachment is made from: the pod's interfaces and addresses as they are, and its rules compiled.

use std::{io, net::IpAddr};

use redirector_common::maps::{MAX_ADDRESSES, MAX_POD_RULES};

use super::{reroute, trie::Compiled};
use crate::{
    redirect::{Error, PodNetwork, rules::Rules},
    sys::interfaces::{Interface, interfaces, with_default_route},
};

/// What is found in the pod, and what is asked for it.
pub(super) struct Plan {
    /// All that there are.
    pub(super) all_interfaces: Vec<Interface>,
    /// Those to attach to.
    pub(super) interfaces: Vec<Interface>,
    /// Those of `interfaces` of which what arrives is outbound.
    pub(super) rerouted: Vec<Interface>,
    /// The pod's, named or found, without loopback ones.
    pub(super) addresses: Vec<IpAddr>,
    /// Whether some are of IPv6.
    pub(super) v6: bool,
    /// As the programs look them up.
    pub(super) rules: Compiled,
}

impl Plan {
    /// Looks into the pod.
    pub(super) fn of(pod: &PodNetwork) -> Result<Self, Error> {
        let (found, outward) = pod
            .netns
            .run(|| Ok((interfaces()?, with_default_route()?)))
            .and_then(|result| result)
            .map_err(|error| Error::new(format!("reading the interfaces of {}", pod.netns.id()), error))?;
        let mut addresses = pod.addresses.clone();
        addresses.extend(found.iter().flat_map(|interface| &interface.addresses));
        let mut addresses: Vec<_> = addresses
            .iter()
            .map(IpAddr::to_canonical)
            .filter(|ip| !ip.is_loopback())
            .collect();
        addresses.sort_unstable();
        addresses.dedup();
        let refused = |text: String| {
            Err(Error::new(
                format!("planning the capture of {}", pod.uid),
                io::Error::other(text),
            ))
        };
        if addresses.len() > MAX_ADDRESSES {
            return refused(format!(
                "it has {} addresses; at most {MAX_ADDRESSES} are supported",
                addresses.len()
            ));
        }
        let rerouted = match reroute::chosen(&pod.rules.reroute_interfaces, &found, &outward) {
            Ok(rerouted) => rerouted,
            Err(text) => return refused(text),
        };
        let mut interfaces = Vec::new();
        for interface in found.clone() {
            let unused = interface.addresses.is_empty() && !rerouted.contains(&interface);
            if interface.loopback || unused {
                continue;
            }
            if !interface.ethernet {
                return refused(format!(
                    "its interface {} has addresses but no Ethernet header, and its traffic can't be captured",
                    interface.name
                ));
            }
            interfaces.push(interface);
        }
        if interfaces.is_empty() {
            return refused("none of its interfaces has an address".to_owned());
        }
        if pod.rules.items() > Rules::MAX_ITEMS {
            return refused(format!(
                "its rules name {} ports and networks; at most {} are supported",
                pod.rules.items(),
                Rules::MAX_ITEMS
            ));
        }
        let rules = Compiled::of(&pod.rules);
        if rules.entries.len() > MAX_POD_RULES {
            return refused(format!(
                "its rules come to {} entries, at most {MAX_POD_RULES} are supported: a network or a port is one, and a range of ports is \
                 one for each of the blocks with a power of two ports that it is made of",
                rules.entries.len()
            ));
        }
        let v6 = addresses.iter().any(IpAddr::is_ipv6);
        Ok(Self {
            all_interfaces: found,
            interfaces,
            rerouted,
            addresses,
            v6,
            rules,
        })
    }
}
