//! No redirection of ours: for pods in which others' rules redirect (istio-cni's iptables), and for tests.

use std::{io, net::SocketAddr, os::fd::BorrowedFd};

use redirector_common::consts::MARK_PROXY;

use super::{Attached, Count, Error, Marks, PodNetwork, Redirector, Serving, rules::Rules};
use crate::{mesh::pod::PodUid, sys::socket};

/// Does nothing to a pod.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoRedirect;

impl Redirector for NoRedirect {
    fn name(&self) -> &'static str {
        "none"
    }

    fn marks(&self) -> Marks {
        // Istio's rules know its proxy by one mark, listeners included.
        let mark = Some(MARK_PROXY);
        Marks {
            outbound_listener: mark,
            inbound_listeners: mark,
            upstream: mark,
            application: mark,
            application_over_lo: false,
        }
    }

    fn refuses(&self, _: &Rules) -> Option<String> {
        None
    }

    fn attach(&self, _: &PodNetwork, _: Serving<'_>) -> Result<Attached, Error> {
        Ok(Attached::default())
    }

    fn release(&self, _pod: &PodNetwork) -> Result<(), Error> {
        Ok(())
    }

    fn is_rerouted(&self, _: BorrowedFd<'_>) -> io::Result<bool> {
        Ok(false)
    }

    fn counts(&self, _uid: &PodUid) -> Result<Vec<Count>, Error> {
        Ok(Vec::new())
    }

    fn detach(&self, _: &PodNetwork) -> Result<(), Vec<Error>> {
        Ok(())
    }

    fn forget(&self, _: &PodUid) -> Result<(), Vec<Error>> {
        Ok(())
    }

    fn attached(&self) -> Result<Vec<PodUid>, Error> {
        Ok(Vec::new())
    }

    fn original_dst(&self, connection: BorrowedFd<'_>) -> io::Result<SocketAddr> {
        // REDIRECT rules change the destination and conntrack remembers it; TPROXY and socket lookup leave it.
        match socket::so_original_dst(connection)? {
            Some(destination) => Ok(destination),
            None => socket::local_addr(connection),
        }
    }

    fn own_socket(&self, _: BorrowedFd<'_>) -> io::Result<()> {
        Ok(())
    }
}
