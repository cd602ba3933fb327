//! Proxies that other processes are: which of their sockets listen in a pod, and which cgroups they are in.
//!
//! Their listeners are taken hold of (pidfd_getfd) only while they are put into the sockmap, which lets go of a socket when it closes.
//! They are looked for in the processes that have come over ZDS and in no others, so that an application does not get there by taking
//! the ports for itself. While two proxies are there, of which one takes over, each port is given to the one that came last of those
//! that listen on it.

use std::{
    collections::{BTreeSet, HashMap},
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use redirector_common::{
    consts::PROXY_PORTS,
    maps::{ANY_WITH_MARK, Listener, MAX_PROXIES},
};

use super::{Ebpf, dns};
use crate::{
    redirect::{Error, Listeners, Peer, PodNetwork, maps::CgroupSet},
    sys::{
        listening::{self, Listening},
        process,
    },
};

/// The places of the proxy's listeners, in the order of [`PROXY_PORTS`].
const PLACES: [Listener; 3] = [Listener::Outbound, Listener::Inbound, Listener::Hbone];

/// What listens on the proxy's ports in a pod, and who may be its proxy.
#[derive(PartialEq, Eq)]
pub(super) struct Found {
    listening: Vec<(u16, Listening)>,
    peers: Arc<[Peer]>,
}

impl Found {
    /// Looks into the pod.
    pub(super) fn now(pod: &PodNetwork, peers: &Arc<[Peer]>) -> Result<Self, Error> {
        let found = pod.netns.run(|| listening::tcp_listening(&PROXY_PORTS));
        let listening = found.and_then(|found| found).map_err(|error| {
            let operation = format!("looking for the proxy's listeners in {}", pod.netns.id());
            Error::new(operation, error)
        })?;
        Ok(Self {
            listening,
            peers: Arc::clone(peers),
        })
    }
}

/// The proxy's listeners, held while a pod is attached to.
pub(super) struct Sockets<'a> {
    held: Vec<(Listener, Held<'a>)>,
    /// They are another process's.
    pub(super) of_others: bool,
    /// They were another agent's, and are where it has put them.
    pub(super) inherited: bool,
    /// Which of them are missing, in words.
    pub(super) lack: Option<String>,
}

enum Held<'a> {
    Own(BorrowedFd<'a>),
    Taken(OwnedFd),
}

impl<'a> Sockets<'a> {
    /// This agent's.
    pub(super) fn own(listeners: Listeners<'a>) -> Self {
        let sockets = [listeners.outbound, listeners.inbound, listeners.hbone];
        Self {
            held: PLACES.into_iter().zip(sockets.map(Held::Own)).collect(),
            of_others: false,
            inherited: listeners.inherited,
            lack: None,
        }
    }

    /// Each with its place. Places may be missing where the proxy is another process.
    pub(super) fn places(&self) -> impl Iterator<Item = (Listener, BorrowedFd<'_>)> {
        self.held.iter().map(|(place, held)| match held {
            Held::Own(socket) => (*place, *socket),
            Held::Taken(socket) => (*place, socket.as_fd()),
        })
    }
}

impl Ebpf {
    /// Takes hold of the proxies' listeners in a pod. A pod that something is in place for goes on without those that are away: it is
    /// refused until they are back.
    pub(super) fn take_listeners(
        &self,
        pod: &PodNetwork,
        peers: &[Peer],
        found: &Found,
    ) -> Result<Sockets<'static>, Error> {
        let failed = |error: io::Error| {
            let operation = format!("taking hold of the proxy's listeners in {}", pod.netns.id());
            Error::new(operation, dns::explained(error))
        };
        let inodes: Vec<_> = found.listening.iter().map(|(_, socket)| socket.inode).collect();
        let mut held: Vec<(Listener, Held<'static>)> = Vec::new();
        for peer in peers {
            if held.len() == PLACES.len() {
                break;
            }
            let mut taken = listening::take_from(&peer.process, &inodes).map_err(failed)?;
            for (place, port) in PLACES.into_iter().zip(PROXY_PORTS) {
                if held.iter().any(|(given, _)| *given == place) {
                    continue;
                }
                let here = found.listening.iter().filter(|(at, _)| *at == port);
                if let Some(socket) = best(here.map(|(_, socket)| socket), &mut taken).map_err(failed)? {
                    held.push((place, Held::Taken(socket)));
                }
            }
        }
        let missing: Vec<_> = PLACES
            .into_iter()
            .zip(PROXY_PORTS)
            .filter(|(place, _)| !held.iter().any(|(given, _)| given == place))
            .map(|(_, port)| port.to_string())
            .collect();
        let lack = (!missing.is_empty()).then(|| {
            format!(
                "no transparent socket (IP_TRANSPARENT) of the proxy's, {}, listens on {} in the pod{}",
                processes(peers),
                missing.join(", "),
                advice(process::sees_all())
            )
        });
        if let Some(lack) = &lack
            && self.pins.of(&pod.uid)?.is_empty()
        {
            return Err(Error::new(format!("capturing {}", pod.uid), lack.as_str()));
        }
        Ok(Sockets {
            held,
            of_others: true,
            inherited: false,
            lack,
        })
    }
}

/// The one of several listeners on a port that takes most: of both families before one of IPv4.
fn best<'a>(
    candidates: impl Iterator<Item = &'a Listening>,
    taken: &mut HashMap<u64, OwnedFd>,
) -> io::Result<Option<OwnedFd>> {
    let mut chosen = None;
    for candidate in candidates {
        let Some(socket) = taken.get(&candidate.inode) else {
            continue;
        };
        let abilities = listening::abilities(socket.as_fd(), candidate.v6)?;
        let families = u8::from(candidate.v6) + u8::from(abilities.v4);
        if abilities.transparent && chosen.is_none_or(|(most, _)| families > most) {
            chosen = Some((families, candidate.inode));
        }
    }
    Ok(chosen.and_then(|(_, inode)| taken.remove(&inode)))
}

fn processes(peers: &[Peer]) -> String {
    let pids: Vec<_> = peers.iter().map(|peer| peer.process.pid().to_string()).collect();
    match pids.as_slice() {
        [] => "which is not connected".to_owned(),
        pids => format!("process {}", pids.join(" or ")),
    }
}

/// What else may be the reason that a socket is not seen.
fn advice(sees_all: bool) -> &'static str {
    if !sees_all {
        "; the sockets of a proxy are seen only with CAP_SYS_PTRACE and in the node's PID namespace (hostPID), and this agent lacks one \
         of them"
    } else {
        ""
    }
}

/// The cgroups of the proxies that this agent has met, and those that an earlier one had: a proxy goes on opening connections while it
/// is not connected. Ids are not used again, so one that is gone does no harm.
pub(super) struct Trusted {
    map: CgroupSet,
    /// The oldest first.
    met: Vec<u64>,
    /// What the map has.
    written: BTreeSet<u64>,
}

impl Trusted {
    /// What the map has.
    pub(super) fn new(map: CgroupSet) -> Result<Self, Error> {
        let written = map
            .members()
            .map_err(|error| Error::new("reading the proxies' cgroups", error))?;
        Ok(Self {
            met: written
                .iter()
                .copied()
                .filter(|id| *id != ANY_WITH_MARK)
                .collect(),
            map,
            written,
        })
    }

    /// The proxies that are connected now are trusted.
    pub(super) fn add(&mut self, peers: &[Peer]) -> Result<(), Error> {
        if peers.is_empty() {
            return Ok(());
        }
        let wanted = wanted(&mut self.met, peers);
        if wanted != self.written {
            self.map
                .set(&wanted)
                .map_err(|error| Error::new("writing the proxies' cgroups", error))?;
            self.written = wanted;
        }
        Ok(())
    }
}

/// The ids for the map. Where a cgroup can't be told, the mark has to do.
fn wanted(met: &mut Vec<u64>, peers: &[Peer]) -> BTreeSet<u64> {
    for id in peers.iter().rev().filter_map(|peer| peer.cgroup) {
        met.retain(|known| *known != id);
        met.push(id);
    }
    let any = peers.iter().any(|peer| peer.cgroup.is_none());
    met.drain(..met.len().saturating_sub(MAX_PROXIES - 1));
    met.iter().copied().chain(any.then_some(ANY_WITH_MARK)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::pidfd::Process;

    fn peer(cgroup: Option<u64>) -> Peer {
        let process = Process::open(std::process::id()).unwrap();
        Peer { process, cgroup }
    }

    #[test]
    fn cgroups_that_were_met_stay_trusted_and_the_mark_alone_does_only_while_it_has_to() {
        let mut met = vec![3];
        assert_eq!(wanted(&mut met, &[peer(Some(5))]), BTreeSet::from([3, 5]));
        assert_eq!(
            wanted(&mut met, &[peer(None), peer(Some(5))]),
            BTreeSet::from([ANY_WITH_MARK, 3, 5])
        );
        assert_eq!(wanted(&mut met, &[peer(Some(3))]), BTreeSet::from([3, 5]));
        assert_eq!(met, [5, 3]);
        let many: Vec<_> = (100..200).map(|id| peer(Some(id))).collect();
        let set = wanted(&mut met, &many);
        assert_eq!(set.len(), MAX_PROXIES - 1);
        // The one that came last is the first.
        assert!(set.contains(&100) && !set.contains(&199));
    }

    #[test]
    fn what_is_missing_names_the_process_and_the_right() {
        let own = std::process::id();
        let both = processes(&[peer(None), peer(None)]);
        assert_eq!(both, format!("process {own} or {own}"));
        assert!(processes(&[]).contains("not connected"));
        assert!(advice(false).contains("hostPID"));
        assert_eq!(advice(true), "");
    }
}
