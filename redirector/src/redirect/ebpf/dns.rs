//! The DNS listeners of a pod: whoever waits on port 15053 in its namespace, this agent or another process.
//!
//! Their sockets are the proxy's own from then on: what they send is not captured. An application must not get there by taking the
//! port for itself, so only transparent sockets count: making one takes CAP_NET_RAW or CAP_NET_ADMIN, with which a pod can send past
//! the programs anyhow.

use std::{
    io,
    net::IpAddr,
    os::fd::{AsFd, OwnedFd},
};

use redirector_common::{consts::PORT_DNS_CAPTURE, maps::Listener};

use super::{Ebpf, plan::Plan};
use crate::{
    redirect::{Error, PodNetwork, Redirector as _},
    sys::{
        listening::{self, Abilities, Listening},
        process,
    },
};

/// All places for DNS listeners.
pub(super) const PLACES: [Listener; 4] = [
    Listener::DnsTcpV4,
    Listener::DnsTcpV6,
    Listener::DnsUdpV4,
    Listener::DnsUdpV6,
];

/// The sockets for the places; several places may have the same one.
pub(super) type Sockets = Vec<(Listener, OwnedFd)>;

/// What waits on the port in the pod now.
fn candidates(pod: &PodNetwork) -> Result<Vec<Listening>, Error> {
    let found = pod.netns.run(|| listening::listening(PORT_DNS_CAPTURE));
    found.and_then(|found| found).map_err(|error| {
        Error::new(
            format!("looking for the DNS listeners in {}", pod.netns.id()),
            error,
        )
    })
}

/// Takes hold of the listeners among the candidates.
fn take(pod: &PodNetwork, candidates: &[Listening]) -> Result<Sockets, Error> {
    let failed = |error: io::Error| {
        Error::new(
            format!("taking hold of the DNS listeners in {}", pod.netns.id()),
            error,
        )
    };
    let inodes: Vec<_> = candidates.iter().map(|candidate| candidate.inode).collect();
    let taken = listening::take(&inodes, pod.netns.id()).map_err(|error| failed(explained(error)))?;
    let mut able = Vec::new();
    for candidate in candidates {
        let Some(socket) = taken.get(&candidate.inode) else {
            continue;
        };
        let abilities = listening::abilities(socket.as_fd(), candidate.v6).map_err(failed)?;
        if abilities.transparent {
            able.push((candidate, abilities, socket));
        }
    }
    let mut sockets = Vec::new();
    for place in PLACES {
        // Candidates of IPv4 come first, so that a socket of the place's own family is preferred.
        let chosen = able
            .iter()
            .find(|(candidate, abilities, _)| serves(place, candidate, *abilities));
        if let Some((_, _, socket)) = chosen {
            sockets.push((place, socket.try_clone().map_err(failed)?));
        }
    }
    Ok(sockets)
}

fn serves(place: Listener, candidate: &Listening, abilities: Abilities) -> bool {
    match place {
        Listener::DnsTcpV4 => !candidate.udp && abilities.v4,
        Listener::DnsUdpV4 => candidate.udp && abilities.v4,
        Listener::DnsTcpV6 => !candidate.udp && candidate.v6,
        Listener::DnsUdpV6 => candidate.udp && candidate.v6,
        Listener::Outbound | Listener::Inbound | Listener::Hbone => false,
    }
}

/// The first place that a pod with addresses of these families needs and that has no socket, in words.
fn missing(sockets: &Sockets, v4: bool, v6: bool) -> Option<&'static str> {
    let needed = |place| match place {
        Listener::DnsTcpV4 => v4.then_some("TCP over IPv4"),
        Listener::DnsUdpV4 => v4.then_some("UDP over IPv4"),
        Listener::DnsTcpV6 => v6.then_some("TCP over IPv6"),
        Listener::DnsUdpV6 => v6.then_some("UDP over IPv6"),
        Listener::Outbound | Listener::Inbound | Listener::Hbone => None,
    };
    PLACES
        .into_iter()
        .filter(|place| !sockets.iter().any(|(found, _)| found == place))
        .find_map(needed)
}

/// What else may be the reason that a socket is not seen.
fn advice(sees_all: bool) -> &'static str {
    if sees_all {
        ""
    } else {
        "; sockets of other processes are seen only with CAP_SYS_PTRACE and in the node's PID namespace (hostPID), and this agent lacks \
         one of them"
    }
}

/// An error of looking into other processes, with the right that is missing.
pub(super) fn explained(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            io::Error::new(error.kind(), format!("{error}; the agent needs CAP_SYS_PTRACE"))
        }
        _ => error,
    }
}

impl Ebpf {
    /// Whether those that wait on the DNS port are the ones that the slot was given; always, if the pod's DNS is not captured.
    pub(super) fn still_has_dns(&self, pod: &PodNetwork, slot: u32) -> Result<bool, Error> {
        if !pod.rules.dns_capture {
            return Ok(true);
        }
        // Looked for before the maps are locked: that may take long, and no other pod should wait for it.
        let found = candidates(pod)?;
        Ok(self.store().dns_candidates(slot) == Some(&found[..]))
    }

    /// Gives a slot the pod's DNS listeners, if its DNS is captured. A pod that `had` them goes on without those that are away: its
    /// queries are refused until they are back.
    pub(super) fn give_dns(&self, pod: &PodNetwork, plan: &Plan, slot: u32, had: bool) -> Result<(), Error> {
        if !pod.rules.dns_capture {
            return self.store().set_dns(slot, None, &Vec::new());
        }
        let found = candidates(pod)?;
        if had && self.store().dns_candidates(slot) == Some(&found[..]) {
            return Ok(());
        }
        let sockets = take(pod, &found)?;
        let v4 = plan.addresses.iter().any(IpAddr::is_ipv4);
        let v6 = plan.addresses.iter().any(|address| match address {
            IpAddr::V4(_) => false,
            IpAddr::V6(v6) => !v6.is_unicast_link_local(),
        });
        if let Some(missing) = missing(&sockets, v4, v6) {
            let advice = advice(process::sees_all());
            let text = format!(
                "no transparent socket (IP_TRANSPARENT) that this agent can see waits for {missing} on port {PORT_DNS_CAPTURE} in the \
                 pod: start the DNS proxy there first, or leave DNS capture off{advice}"
            );
            if !had {
                return Err(Error::new(format!("capturing the DNS of {}", pod.uid), text));
            }
            tracing::warn!(uid = %pod.uid, "the pod's DNS is refused: {text}");
        }
        for (_, socket) in &sockets {
            self.own_socket(socket.as_fd())
                .map_err(|error| Error::new("tagging a DNS listener", error))?;
        }
        self.store().set_dns(slot, Some(found), &sockets)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_serve_the_families_that_they_take() {
        let socket = |udp, v6, v4| {
            let candidate = Listening { udp, v6, inode: 1 };
            let abilities = Abilities {
                transparent: true,
                v4,
            };
            PLACES.map(|place| serves(place, &candidate, abilities))
        };
        for (found, expected) in [
            (socket(false, false, true), [true, false, false, false]),
            (socket(true, false, true), [false, false, true, false]),
            (socket(false, true, false), [false, true, false, false]),
            (socket(false, true, true), [true, true, false, false]),
            (socket(true, true, true), [false, false, true, true]),
        ] {
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn the_right_to_see_sockets_is_named_where_it_may_be_missing() {
        assert_eq!(advice(true), "");
        assert!(advice(false).contains("CAP_SYS_PTRACE"));
        let denied = explained(io::Error::from_raw_os_error(libc::EPERM));
        assert!(denied.to_string().contains("CAP_SYS_PTRACE"), "{denied}");
        let other = explained(io::Error::from_raw_os_error(libc::EMFILE));
        assert!(!other.to_string().contains("CAP_SYS_PTRACE"), "{other}");
    }

    #[test]
    fn what_is_missing_is_said_for_the_pods_own_families() {
        let all = |places: &[Listener]| -> Sockets {
            let file = || std::fs::File::open("/dev/null").unwrap().into();
            places.iter().map(|place| (*place, file())).collect()
        };
        let v4 = all(&[Listener::DnsTcpV4, Listener::DnsUdpV4]);
        assert_eq!(missing(&v4, true, false), None);
        assert_eq!(missing(&v4, true, true), Some("TCP over IPv6"));
        assert_eq!(
            missing(
                &v4[..1]
                    .iter()
                    .map(|(p, s)| (*p, s.try_clone().unwrap()))
                    .collect(),
                true,
                false
            ),
            Some("UDP over IPv4")
        );
        assert_eq!(missing(&all(&PLACES), true, true), None);
    }
}
