//! What others have attached to the interfaces of a namespace, where ours are or would be.

use std::{collections::HashMap, fmt};

use aya::programs::{TcAttachType, loaded_programs};

use super::{
    filters::filters,
    in_netns,
    object::{EGRESS, INGRESS},
};
use crate::{
    redirect::Error,
    sys::{
        bpf::{self, Hook},
        interfaces::{Interface, interfaces},
        netlink::Netlink,
        netns::Netns,
    },
};

/// A TC program or filter of somebody else.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stranger {
    interface: String,
    arriving: bool,
    what: String,
}

impl fmt::Display for Stranger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let direction = if self.arriving { "ingress" } else { "egress" };
        let Self { interface, what, .. } = self;
        write!(f, "{what} on {interface} {direction}")
    }
}

/// Those in `netns`. Blocking.
///
/// # Errors
/// Those of netlink and of bpf(2).
pub fn strangers(netns: &Netns) -> Result<Vec<Stranger>, Error> {
    let names = names()?;
    in_netns(netns, || {
        let failed = |error| Error::new("listing what is attached to interfaces", error);
        let mut netlink = Netlink::open().map_err(failed)?;
        let mut found = Vec::new();
        for interface in interfaces()
            .map_err(failed)?
            .iter()
            .filter(|found| !found.loopback)
        {
            for arriving in [true, false] {
                by_filters(&mut netlink, interface, arriving, &mut found).map_err(failed)?;
                by_tcx(interface, arriving, &names, &mut found);
            }
        }
        // Some are told in several parts.
        found.dedup();
        Ok(found)
    })
}

/// All programs that are loaded, by their ids.
fn names() -> Result<HashMap<u32, String>, Error> {
    let failed = |error| Error::new("listing the programs that are loaded", error);
    loaded_programs()
        .map(|program| {
            let program = program.map_err(failed)?;
            Ok((program.id(), program.name_as_str().unwrap_or_default().to_owned()))
        })
        .collect()
}

fn is_ours(name: &str) -> bool {
    [EGRESS, INGRESS].contains(&name)
}

fn by_filters(
    netlink: &mut Netlink,
    interface: &Interface,
    arriving: bool,
    found: &mut Vec<Stranger>,
) -> std::io::Result<()> {
    let direction = match arriving {
        true => TcAttachType::Ingress,
        false => TcAttachType::Egress,
    };
    for filter in filters(netlink, interface.index, direction)? {
        let name = filter.name.as_deref();
        // What all filters of a priority have in common is no filter.
        if filter.handle == 0 || name.is_some_and(is_ours) {
            continue;
        }
        let named = name.map_or_else(String::new, |name| format!(" {name}"));
        found.push(Stranger {
            interface: interface.name.clone(),
            arriving,
            what: format!("filter{named} of priority {}", filter.priority),
        });
    }
    Ok(())
}

/// A kernel without TCX has none.
fn by_tcx(interface: &Interface, arriving: bool, names: &HashMap<u32, String>, found: &mut Vec<Stranger>) {
    let hook = match arriving {
        true => Hook::TcxIngress(interface.index),
        false => Hook::TcxEgress(interface.index),
    };
    for id in bpf::attached(hook).unwrap_or_default() {
        let name = names.get(&id).map_or("", String::as_str);
        if !is_ours(name) {
            found.push(Stranger {
                interface: interface.name.clone(),
                arriving,
                what: format!("TCX program {id} {name}").trim_end().to_owned(),
            });
        }
    }
}
