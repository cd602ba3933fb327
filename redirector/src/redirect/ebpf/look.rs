//! Whether a pod is still as the last attachment left it: what is asked of every pod all the time, and so what must be cheap.

use std::path::PathBuf;

use super::{
    hooks::{Programs, TcMode},
    others::Found,
    routes::ROUTING,
};
use crate::{
    redirect::{Attached, Error, Listeners, PodNetwork, Serving, sysctls::OpenSysctls},
    sys::{
        interfaces::{Interface, interfaces},
        netlink::Netlink,
        socket,
    },
};

/// A pod as the last attachment left it.
pub(super) struct Known {
    /// Who, and with which rules.
    pub(super) pod: PodNetwork,
    /// Where it is pinned.
    pub(super) directory: PathBuf,
    /// Its slot.
    pub(super) slot: u32,
    /// All that were there.
    pub(super) interfaces: Vec<Interface>,
    /// Those that the programs are on.
    pub(super) captured: Vec<Interface>,
    /// Whether it has IPv6.
    pub(super) v6: bool,
    /// The proxy's listeners.
    pub(super) listening: Listening,
    /// What is attached.
    pub(super) programs: Programs,
    /// Its sysctls.
    pub(super) sysctls: OpenSysctls,
    /// What was told of it.
    pub(super) attached: Attached,
}

impl Known {
    /// Whether the same is wanted of `pod`, and all that its capture rests on is in place. Enters the namespace once, reads, and
    /// writes nothing.
    pub(super) fn still_holds(&self, pod: &PodNetwork, listening: &Listening, mode: TcMode) -> bool {
        let PodNetwork {
            netns,
            addresses,
            rules,
            ..
        } = &self.pod;
        if (netns.id(), addresses, rules) != (pod.netns.id(), &pod.addresses, &pod.rules)
            || self.listening != *listening
            || !self.directory.exists()
            || !self.sysctls.are_set()
            || !self.programs.look_up_in(netns)
        {
            return false;
        }
        let in_place = netns.run(|| {
            let mut netlink = Netlink::open().ok()?;
            let mut captured = self.captured.iter();
            let whole = interfaces().ok()? == self.interfaces
                && captured.all(|interface| self.programs.are_on(&mut netlink, mode, interface))
                && ROUTING.in_place(&mut netlink, self.v6, &rules.reroute_interfaces.0);
            Some(whole)
        });
        in_place.ok().flatten().unwrap_or(false)
    }
}

/// The proxy's listeners, as they are compared.
#[derive(PartialEq, Eq)]
pub(super) enum Listening {
    /// This agent's, by their cookies.
    Own([u64; 3]),
    /// Those of other processes.
    Others(Found),
}

impl Listening {
    /// Those that are there now.
    pub(super) fn now(pod: &PodNetwork, serving: &Serving<'_>) -> Result<Self, Error> {
        match serving {
            Serving::Own(listeners) => cookies(*listeners).map(Self::Own),
            Serving::Others(peers) => Found::now(pod, peers).map(Self::Others),
        }
    }
}

/// The cookies of the listeners.
fn cookies(listeners: Listeners<'_>) -> Result<[u64; 3], Error> {
    let cookie =
        |listener| socket::cookie(listener).map_err(|error| Error::new("reading a listener's cookie", error));
    Ok([
        cookie(listeners.outbound)?,
        cookie(listeners.inbound)?,
        cookie(listeners.hbone)?,
    ])
}
