//! 15006: plain connections from outside, handed to the application with their client's address, if the pod's policies
//! permit them.

use std::{io, net::SocketAddr, os::fd::AsFd, pin::pin, sync::Arc};

use tokio::net::TcpStream;

use super::{
    Pod,
    connections::{Admitted, Denied, Flow},
    copy::Leg,
    dial,
    failure::{Failure, Flag},
    flows::Redirect,
    metrics::Reason,
    plaintext,
    record::{Direction, Record, Security},
    relay,
};
use crate::mesh::{index::Mesh, policy::PolicyName, route, wanted::ResourceName};

/// Why a connection is refused.
#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error("cannot tell where the connection was going")]
    OriginalDst(#[source] io::Error),
    #[error("{0} is a port of the proxy itself, or that of an application tunnel, and not for plaintext")]
    NotInPlain(SocketAddr),
    #[error(transparent)]
    Plaintext(#[from] plaintext::Refused),
    #[error(transparent)]
    Denied(#[from] Denied),
    #[error(transparent)]
    Dial(#[from] dial::Error),
}

impl Failure for Refused {
    fn flag(&self) -> Flag {
        match self {
            Self::Plaintext(refused) => refused.flag(),
            Self::Denied(denied) => denied.flag(),
            Self::OriginalDst(_) | Self::NotInPlain(_) | Self::Dial(_) => Flag::Connect,
        }
    }

    fn policy(&self) -> Option<&PolicyName> {
        match self {
            Self::Denied(denied) => denied.policy(),
            _ => None,
        }
    }
}

/// Serves one accepted connection to its end.
pub(super) async fn connection(pod: Arc<Pod>, client: TcpStream, peer: SocketAddr) {
    let left = pod.peers.at(peer.ip());
    let Ok(_connection) = left.plain.try_acquire() else {
        let metrics = &pod.shared.metrics;
        return pod
            .peers
            .refuse(&pod.info.uid, metrics, Reason::plain_connections, &client, peer);
    };
    let client = Leg::new(client);
    let mut record = Record::new(&pod.recorder, Direction::Inbound, peer);
    let on_wire = !pod.is_self(peer.ip());
    // Boxed, since it takes many times what lives as long as the connection. Dropped, the client's leg is reset: refused, as
    // without a proxy.
    let (application, admitted) = match Box::pin(open(&pod, &client, peer, on_wire, &mut record)).await {
        Ok(opened) => opened,
        Err(Refused::Plaintext(refused)) => return record.refuse(Reason::plaintext, &refused),
        Err(error) => return record.fail(&error),
    };
    let relayed = relay::plain(application, client, record, pod.shared.config.tail_deadline);
    // By reference: what is handed to an async fn by value is held twice.
    let relayed = pin!(relayed);
    let relayed = pin!(admitted.run(relayed));
    pod.plaintext.unless_refused(on_wire, relayed).await;
}

/// The connection to the application, if it may be.
async fn open(
    pod: &Pod,
    client: &Leg,
    peer: SocketAddr,
    on_wire: bool,
    record: &mut Record,
) -> Result<(Leg, Admitted), Refused> {
    let destination = pod.shared.redirector.original_dst(client.as_fd());
    let destination = destination.map_err(Refused::OriginalDst)?;
    let facts = record.facts();
    facts.dst = Some(destination);
    facts.redirect = Some(Redirect::Inbound);
    if !route::passthrough_allowed(&pod.mesh(), pod.local(), destination) {
        return Err(Refused::NotInPlain(destination));
    }
    let facts = record.facts();
    facts.source = pod
        .mesh()
        .workload_at(&pod.shared.config.home.network, peer.ip())
        .map(|workload| workload.into())
        .unwrap_or_default();
    facts.destination = pod.own_party();
    if on_wire && pod.plaintext.is_refused() {
        return Err(plaintext::Refused.into());
    }
    record.plain = on_wire.then(|| pod.plaintext.clone());
    record.open(Security::Unknown);
    // Nobody proves an identity here. Whether a policy is for this pod alone is known once the mesh knows the pod: the
    // connection is held until then, and refused in the end. A mesh without such policies holds nothing up.
    let flow = Flow {
        source: peer.ip(),
        identity: None,
        destination,
    };
    let admit = |_: &Mesh| pod.connections.admit(flow.clone());
    let own = |_: &Mesh, admitted: &Result<_, Denied>| match admitted {
        Err(Denied::UnknownWorkload { .. }) => {
            let network = &pod.shared.config.home.network;
            vec![ResourceName::address(network, destination.ip())]
        }
        _ => Vec::new(),
    };
    let admitted = pod
        .settled(pod.asker_of_peers.as_ref(), admit, Denied::is_transient, own)
        .await?;
    let dialled = tokio::select! {
        biased;
        () = pod.plaintext.refused(), if on_wire => return Err(plaintext::Refused.into()),
        denied = admitted.revoked() => return Err(denied.into()),
        dialled = dial::application(pod, peer, destination) => dialled?,
    };
    record.admitted(&admitted);
    Ok((Leg::new(dialled), admitted))
}
