//! Connections between two pods of this node, joined in the agent: what a tunnel between them would check is checked, and then the
//! bytes go from the one's application to the other's with neither TLS nor HTTP/2 in between. Only if that is wanted.
//!
//! `outbound` asks for each connection whether its far end is such a [`Neighbour`], and takes it over HBONE if it is not. Nothing is on a
//! wire: each leg is within its pod's namespace. What the far end must check is `inbound`'s, and not repeated here.

use std::{
    collections::HashMap,
    future::pending,
    io,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, SystemTime},
};

use http::HeaderMap;
use redirector_common::consts::PORT_HBONE;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::{
    Pod,
    connections::Admitted,
    copy::{self, Cut, Leg, Meter},
    failure::Fate,
    hbone::client,
    inbound::{self, Tunnel},
    metrics::Reason,
    outbound,
    record::{Count, Record, Security},
};
use crate::{
    identity::{
        crl_file::InForce,
        tls::{self, Credentials, Proof},
    },
    mesh::{
        route::{HboneRoute, Target, Upstream},
        spiffe::SpiffeId,
        workload::Workload,
    },
};

/// The pods of this node whose proxies run, by their addresses.
#[derive(Default)]
pub struct Residents {
    pods: Mutex<HashMap<IpAddr, Vec<Weak<Pod>>>>,
    met: Met,
}

/// A pod's place among the [`Residents`], until it is dropped.
pub(super) struct Residence {
    pod: Arc<Pod>,
    addresses: Vec<IpAddr>,
}

impl Residence {
    /// `None` if nobody would look for it.
    pub(super) fn of(pod: &Arc<Pod>) -> Option<Self> {
        if !pod.shared.config.same_node_direct {
            return None;
        }
        let addresses = pod.addresses.first().iter().copied();
        let addresses: Vec<_> = addresses.filter(|ip| !ip.is_loopback()).collect();
        let mut pods = pod.shared.residents.lock();
        for address in &addresses {
            pods.entry(*address).or_default().push(Arc::downgrade(pod));
        }
        drop(pods);
        Some(Self {
            pod: Arc::clone(pod),
            addresses,
        })
    }
}

impl Drop for Residence {
    fn drop(&mut self) {
        let mut pods = self.pod.shared.residents.lock();
        let own = Arc::as_ptr(&self.pod);
        for address in &self.addresses {
            if let Some(at) = pods.get_mut(address) {
                at.retain(|pod| !std::ptr::eq(pod.as_ptr(), own));
                if at.is_empty() {
                    pods.remove(address);
                }
            }
        }
    }
}

impl Residents {
    fn lock(&self) -> MutexGuard<'_, HashMap<IpAddr, Vec<Weak<Pod>>>> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The pod at `address`. Of two that claim it, as when a pod goes and its address is given away, the network knows whose it is.
    fn at(&self, address: IpAddr) -> Result<Arc<Pod>, Elsewhere> {
        let pods = self.lock();
        let mut found = pods.get(&address).into_iter().flatten().filter_map(Weak::upgrade);
        match (found.next(), found.next()) {
            (Some(pod), None) => Ok(pod),
            (None, _) => Err(Elsewhere::NotHere),
            (Some(_), Some(_)) => Err(Elsewhere::Ambiguous),
        }
    }
}

/// Whose certificates have been found to go together, client's and server's. Holds no certificate itself: a new one, on either side, is
/// looked at anew, as it is by a new tunnel, and so are both under new revocation lists.
#[derive(Default)]
struct Met(Mutex<HashMap<Ends<SpiffeId>, Good>>);

/// What has been found good, and under which lists.
type Good = (Ends<Weak<Credentials>>, InForce);

/// Of client and server.
type Ends<T> = (T, T);

impl Met {
    /// Pairs that are kept before all are forgotten. Each is some 200 bytes; a node has a few hundred pods at most.
    const MOST: usize = 4096;

    fn check(
        &self,
        client: (&SpiffeId, &Arc<Credentials>),
        server: (&SpiffeId, &Arc<Credentials>),
    ) -> Result<(), Elsewhere> {
        let key = (client.0.clone(), server.0.clone());
        let is =
            |weak: &Weak<Credentials>, now: &Arc<Credentials>| std::ptr::eq(weak.as_ptr(), Arc::as_ptr(now));
        let lock = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Both ends have the same lists. Asked for first, so that others are never taken for these.
        let lists = client.1.in_force();
        if lock()
            .get(&key)
            .is_some_and(|((one, other), then)| is(one, client.1) && is(other, server.1) && *then == lists)
        {
            return Ok(());
        }
        client
            .1
            .would_meet(server.1, SystemTime::now())
            .map_err(Elsewhere::Certificates)?;
        let mut met = lock();
        if met.len() >= Self::MOST {
            met.clear();
        }
        let ends = (Arc::downgrade(client.1), Arc::downgrade(server.1));
        met.insert(key, (ends, lists));
        Ok(())
    }
}

/// Why a connection goes over HBONE.
#[derive(Debug, thiserror::Error)]
pub(super) enum Elsewhere {
    #[error("it goes by a waypoint or a gateway")]
    NotDirect,
    #[error("the client has another address than its pod has for others")]
    ForeignClient,
    #[error("no pod of this agent has the address")]
    NotHere,
    #[error("several pods of this agent have the address")]
    Ambiguous,
    #[error("the pod at the address is not the workload that the mesh has there")]
    OtherPod,
    #[error("the pod at the address is {0}, which is not expected there")]
    OtherIdentity(SpiffeId),
    #[error("{0} has no certificate now")]
    NoCertificate(SpiffeId),
    #[error("the pods' certificates do not go together")]
    Certificates(#[source] tls::Error),
}

/// A pod of this node that a connection is for. It waits for the connection's end before it is gone.
pub(super) struct Neighbour {
    server: Arc<Pod>,
    /// What a tunnel would be asked for.
    destination: SocketAddr,
    /// Of client and server.
    proofs: Ends<Proof>,
    /// Of the server's tasks.
    stays: TaskTrackerToken,
}

/// Whom `route` leads to, if that can be told beyond doubt and both pods could have a tunnel between them now. Nobody is waited for: where
/// something is missing, it is HBONE that waits for it, or fails.
pub(super) fn find(client: &Pod, peer: SocketAddr, route: &HboneRoute) -> Result<Neighbour, Elsewhere> {
    let destination = direct(route).ok_or(Elsewhere::NotDirect)?;
    // The far end sees where a tunnel comes from, which is the pod's own address whomever it reroutes. By the mesh's word, and not
    // the pod's: it may give itself any address within its namespace, while a tunnel from there would not come about.
    let is_own = route.caller.has_address(peer.ip());
    if !is_own || peer.is_ipv4() != destination.is_ipv4() {
        return Err(Elsewhere::ForeignClient);
    }
    let shared = &client.shared;
    let server = shared.residents.at(destination.ip())?;
    // In this order: either the pod waits for this token when it ends, or it is seen to end here.
    let stays = server.tasks.token();
    if server.drain.is_cancelled() {
        return Err(Elsewhere::NotHere);
    }
    if !is_pod_of(&server, &route.workload) {
        return Err(Elsewhere::OtherPod);
    }
    let (from, to) = (client.identity.id(), server.identity.id());
    if !route.expected.contains(to) {
        return Err(Elsewhere::OtherIdentity(to.clone()));
    }
    let current = |pod: &Pod| {
        let certificate = pod.identity.current();
        certificate.ok_or_else(|| Elsewhere::NoCertificate(pod.identity.id().clone()))
    };
    let (own, theirs) = (current(client)?, current(&server)?);
    shared.residents.met.check((from, &own), (to, &theirs))?;
    Ok(Neighbour {
        server,
        destination,
        proofs: (theirs.proof(own.chain()), own.proof(theirs.chain())),
        stays,
    })
}

/// What is asked of the pod that `route` leads to, if nobody is in between.
fn direct(route: &HboneRoute) -> Option<SocketAddr> {
    let Target::Address(asked) = route.authority else {
        return None;
    };
    let is_direct = route.inner.is_none()
        && Arc::ptr_eq(&route.workload, &route.far_end)
        && route.tunnel == SocketAddr::new(asked.ip(), PORT_HBONE)
        && route.workload.has_address(asked.ip());
    is_direct.then_some(asked)
}

/// Whether `workload` is what the mesh says of `pod`.
fn is_pod_of(pod: &Pod, workload: &Workload) -> bool {
    let info = &pod.info;
    !workload.host_network
        && *workload.network == *pod.shared.config.home.network
        && *workload.name == *info.name
        && *workload.namespace == *info.namespace
        && *workload.service_account == *info.service_account
}

/// Serves the connection of `client`'s application to a neighbour to its end. Both pods' ends are its own.
pub(super) async fn join(
    neighbour: Neighbour,
    client: &Pod,
    application: Leg,
    peer: SocketAddr,
    record: Box<Record>,
) {
    // Declared first, dropped last: the server is not gone before all that is its own here.
    let _stays = neighbour.stays;
    let server = neighbour.server;
    let (mut of_client, mut of_server) = neighbour.proofs;
    let fate = Arc::<Fate>::default();
    let joined = joined(
        &server,
        neighbour.destination,
        client,
        application,
        (peer, fate.clone()),
        record,
    );
    let revoked = async {
        let error = tokio::select! {
            error = of_client.revoked() => error,
            error = of_server.revoked() => error,
        };
        // Before both records are dropped.
        fate.revoke(&error);
        error
    };
    // Cut off, both legs are reset, and both records say so.
    tokio::select! {
        () = joined => {}
        () = server.kill.cancelled() => {}
        error = revoked => tracing::warn!(uid = %server.info.uid, src.addr = %peer, %error, "connection closed"),
    }
}

async fn joined(
    server: &Pod,
    destination: SocketAddr,
    client: &Pod,
    caller: Leg,
    (peer, fate): (SocketAddr, Arc<Fate>),
    mut outbound: Box<Record>,
) {
    let identity = client.identity.id().clone();
    let tunnel = Tunnel {
        peer,
        streams: server.peers.streams_of(&identity),
        identity,
        local: SocketAddr::new(destination.ip(), PORT_HBONE),
        fate,
    };
    let authority = destination.to_string();
    outbound.in_tunnel(tunnel.fate.clone());
    outbound.facts().destination.identity = Some(server.identity.id().clone());
    let mut inbound = inbound::record_of(server, &tunnel, &authority, &HeaderMap::new());
    for record in [&mut outbound, &mut inbound] {
        record.facts().same_node = true;
        record.open(Security::Unknown);
    }
    client.shared.metrics.same_node.inc();

    let _permits = match inbound::permits(server, &tunnel) {
        Ok(permits) => permits,
        Err(error) => {
            outbound.fail(&client::Error::Status(error.status()));
            return inbound.refuse(Reason::streams, &error);
        }
    };
    let found = tokio::select! {
        biased;
        _ = caller.broken() => {
            outbound.fail(&outbound::Error::Abandoned);
            return inbound.fail(&inbound::Error::Abandoned);
        }
        found = reach(server, &tunnel, &authority) => found,
    };
    let (application, admitted) = match found {
        Ok(found) => found,
        Err(error) => {
            outbound.fail(&client::Error::Status(error.status()));
            return inbound.fail(&error);
        }
    };
    inbound.decided_by(admitted.policy());
    relay(
        (caller, outbound),
        (application, inbound),
        admitted,
        client.shared.config.tail_deadline,
    )
    .await;
}

/// The connection to the server's application, which has been told what it wants to know.
async fn reach(server: &Pod, tunnel: &Tunnel, authority: &str) -> Result<(Leg, Admitted), inbound::Error> {
    let found = inbound::application(server, tunnel, authority, pending::<()>()).await?;
    let (mut application, upstream, admitted): (Leg, Upstream, Admitted) = found;
    inbound::introduce(&mut application, tunnel, &upstream).await?;
    Ok((application, admitted))
}

/// Between the two applications, while the server's policies permit it. Each side's record ends as it would have with a tunnel between.
async fn relay(
    (mut caller, outbound): (Leg, Box<Record>),
    (mut application, inbound): (Leg, Box<Record>),
    admitted: Admitted,
    tail_deadline: Duration,
) {
    let ((requests, responses), (answered, asked)) = (outbound.counts(), inbound.counts());
    let (up, down) = (Both(requests, asked), Both(responses, answered));
    let copied = async move {
        let result = {
            let (mut caller, mut application) = (caller.split(), application.split());
            copy::both(
                (&mut caller.0, &mut caller.1),
                (&mut application.0, &mut application.1),
                (&up, &down),
                tail_deadline,
            )
            .await
        };
        tokio::join!(caller.end(&result), application.end(&result));
        result
    };
    let ended = tokio::select! {
        biased;
        denied = admitted.revoked() => Err(denied),
        result = copied => Ok(result),
    };
    match ended {
        Ok(result) => {
            inbound.end(result.as_ref().map_err(turned).copied());
            outbound.end(result);
        }
        // Both legs have been reset. The client's side knows no more than that.
        Err(denied) => {
            inbound.fail(&denied);
            outbound.end(Err(Cut::Remote(io::ErrorKind::ConnectionReset.into())));
        }
    }
}

/// The same end, as the other side sees it.
fn turned(cut: &Cut) -> Cut {
    let same = |error: &io::Error| match error.raw_os_error() {
        Some(code) => io::Error::from_raw_os_error(code),
        None => io::Error::new(error.kind(), error.to_string()),
    };
    match cut {
        Cut::Local(error) => Cut::Remote(same(error)),
        Cut::Remote(error) => Cut::Local(same(error)),
    }
}

/// Counts the same bytes for both records.
struct Both<'a>(&'a Count, &'a Count);

impl Meter for Both<'_> {
    fn add(&self, bytes: u64) {
        self.0.add(bytes);
        self.1.add(bytes);
    }
}

#[cfg(test)]
mod tests;
