//! Whether this kernel takes the programs, found out by trying: they are loaded, and attached in a network namespace that is made for it
//! and ends with it. Nothing is pinned, and no pod is touched.

use super::{
    Config,
    hooks::{self, Earlier, TcMode},
    in_netns,
    object::{self, DialRule, Object},
};
use crate::{
    redirect::Error,
    sys::{
        interfaces::{Interface, interfaces},
        netns::Netns,
    },
};

/// What this kernel has of what there are two ways for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trial {
    /// TC programs are attached by TCX links, not as clsact filters.
    pub tcx: bool,
    /// SK_LOOKUP tells the device of a connection.
    pub by_device: bool,
}

/// Tries. Blocking.
///
/// # Errors
/// What the kernel refuses, or a missing right.
pub fn run(config: &Config) -> Result<Trial, Error> {
    object::check_embedded(object::OBJECT)?;
    let netns = Netns::create().map_err(|error| Error::new("making a network namespace", error))?;
    let mode = TcMode::of_kernel(config.force_clsact);
    let object = Object::prepare([], config.force_source_port)?;
    let mut ebpf = object.load(0)?;
    object.load_own(&mut ebpf)?;
    object::load_shared(&mut ebpf)?;
    let _lookup = hooks::attach_lookup(&mut ebpf, object.dial_rule, &netns)?;
    in_netns(&netns, || {
        let found = interfaces().map_err(|error| Error::new("listing interfaces", error))?;
        // There is but lo, and it is to be attached to as a pod's eth0 is.
        let as_pods = |interface: Interface| Interface {
            loopback: false,
            ..interface
        };
        let interfaces: Vec<_> = found.into_iter().map(as_pods).collect();
        if mode == TcMode::Clsact {
            hooks::add_clsact(&interfaces)?;
        }
        for interface in &interfaces {
            // Dropped here, where the interface's index means it.
            drop(hooks::attach_tc(&mut ebpf, mode, interface, Earlier::Refused)?);
        }
        Ok(())
    })?;
    Ok(Trial {
        tcx: mode == TcMode::Tcx,
        by_device: object.dial_rule == DialRule::Device,
    })
}
