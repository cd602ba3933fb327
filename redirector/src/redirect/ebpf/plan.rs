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
    /// Looks into the pod. `lo` is among the interfaces to attach to if it is `with_lo`.
    pub(super) fn of(pod: &PodNetwork, with_lo: bool) -> Result<Self, Error> {
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
        if with_lo {
            // First, so that its dials are known before anything is captured.
            interfaces.splice(0..0, found.iter().filter(|interface| interface.loopback).cloned());
        }
        if pod.rules.items() > Rules::MAX_ITEMS {
            return refused(format!(
                "its rules name {} ports and networks; at most {} are supported",
                pod.rules.items(),
                Rules::MAX_ITEMS
            ));
        }
        let rules = Compiled::of(&pod.rules);
        if let Some(text) = too_many(&rules) {
            return refused(text);
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

/// What to say of rules that have more entries than there is room for.
pub(super) fn too_many(rules: &Compiled) -> Option<String> {
    let entries = rules.entries.len();
    (entries > MAX_POD_RULES).then(|| {
        format!(
            "its rules come to {entries} entries; at most {MAX_POD_RULES} are supported: a port or a network is one, and a range of \
             ports is as many as there are blocks of a power of two in it, up to 30"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::redirect::rules::{Lists, Ports};

    #[test]
    fn rules_are_counted_as_the_programs_hold_them() {
        let ranges = |number: u16| Rules {
            outbound: Lists {
                not_ports: Ports((1..=number).map(|at| at * 1000 + 1..=at * 1000 + 998).collect()),
                ..Lists::default()
            },
            ..Rules::default()
        };
        assert_eq!(too_many(&Compiled::of(&ranges(20))), None);
        let rules = Compiled::of(&ranges(60));
        let text = too_many(&rules).unwrap();
        assert!(
            text.contains(&format!("{} entries; at most 512", rules.entries.len())),
            "{text}"
        );
    }
}
