//! Interfaces of which what arrives is outbound: others are behind them, e.g. a virtual machine.
//!
//! They carry the pod's programs, whether they have addresses or not, and are named in the pod's entry.

use redirector_common::maps::MAX_REROUTED;

use crate::{redirect::rules::Interfaces, sys::interfaces::Interface};

/// Those of the `found` that are named; in words, why one can't be. A default route goes by those in `outward`.
pub(super) fn chosen(
    Interfaces(named): &Interfaces,
    found: &[Interface],
    outward: &[String],
) -> Result<Vec<Interface>, String> {
    if named.len() > MAX_REROUTED {
        return Err(format!(
            "its rules name {} interfaces to reroute; at most {MAX_REROUTED} are supported",
            named.len()
        ));
    }
    let mut chosen = Vec::new();
    for interface in found.iter().filter(|interface| named.contains(&interface.name)) {
        let why_not = if interface.loopback || outward.contains(&interface.name) {
            "is the pod's own: name those behind which others are"
        } else if !interface.ethernet {
            "has no Ethernet header, and what arrives there can't be rerouted"
        } else {
            chosen.push(interface.clone());
            continue;
        };
        return Err(format!(
            "its rules say to reroute {}, which {why_not}",
            interface.name
        ));
    }
    Ok(chosen)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interfaces_that_are_named_and_there_are_chosen() {
        let interface = |name: &str, ethernet| Interface {
            name: name.into(),
            index: 2,
            ethernet,
            loopback: name == "lo",
            addresses: Vec::new(),
        };
        let found = ["lo", "eth0", "tun0", "tap0"].map(|name| interface(name, name != "tun0"));
        for (named, expected) in [
            ("", Ok(vec![])),
            ("tap0,tap1", Ok(vec!["tap0"])),
            ("tap0,lo", Err("lo, which is the pod's own")),
            ("eth0", Err("eth0, which is the pod's own")),
            ("tun0", Err("tun0, which has no Ethernet header")),
            ("a,b,c,d,e,f,g,h,i", Err("at most 8")),
        ] {
            match (
                chosen(&named.parse().unwrap(), &found, &["eth0".into()]),
                expected,
            ) {
                (Ok(chosen), Ok(expected)) => {
                    let names: Vec<_> = chosen.iter().map(|interface| &interface.name).collect();
                    assert_eq!(names, expected);
                }
                (Err(text), Err(expected)) => assert!(text.contains(expected), "{text}"),
                (found, _) => panic!("{named}: {found:?}"),
            }
        }
    }
}
