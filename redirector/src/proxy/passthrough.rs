//! 15006: plain connections from outside, handed to the application with their client's address, if the pod's policies
//! permit them.

use std::{io, net::SocketAddr, os::fd::AsFd, sync::Arc};

use tokio::net::TcpStream;

use super::{
    Pod,
    connections::{Denied, Flow},
    copy::Leg,
    dial, plaintext,
    record::{Direction, Reason, Record, Security},
    relay,
};
use crate::mesh::{index::Mesh, route};

/// Why a connection is refused, whatever the pod's policies say.
#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error("cannot tell where the connection was going")]
    OriginalDst(#[source] io::Error),
    #[error("{0} is a port of the proxy itself")]
    ProxyPort(SocketAddr),
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
    let mut record = Record::new(pod.shared.metrics.clone(), Direction::Inbound, peer);
    let destination = match pod.shared.redirector.original_dst(client.as_fd()) {
        Ok(destination) => destination,
        Err(error) => return record.fail(&Refused::OriginalDst(error)),
    };
    record.dst = Some(destination);
    if !route::passthrough_allowed(destination) {
        return record.fail(&Refused::ProxyPort(destination));
    }
    record.source = pod
        .mesh()
        .workload_at(&pod.shared.config.network, peer.ip())
        .map(|workload| workload.as_ref().into())
        .unwrap_or_default();
    record.destination = (&pod.info).into();
    let on_wire = !pod.is_self(peer.ip());
    if on_wire && pod.plaintext.is_refused() {
        return record.refuse(Reason::plaintext, &plaintext::Refused);
    }
    record.plain = on_wire.then(|| pod.plaintext.clone());
    record.open(Security::unknown);
    // Nobody proves an identity here. Whether a policy is for this pod alone is known once the mesh knows the pod: the
    // connection is held until then, and refused in the end. A mesh without such policies holds nothing up.
    let flow = Flow {
        source: peer.ip(),
        identity: None,
        destination,
    };
    let admit = |_: &Mesh| pod.connections.admit(flow.clone());
    let admitted = match pod.settled(admit, Denied::is_transient).await {
        Ok(admitted) => admitted,
        // Dropped, the client's leg is reset.
        Err(denied) => return record.fail(&denied),
    };
    let carried = async {
        let dialled = tokio::select! {
            biased;
            denied = admitted.revoked() => return record.fail(&denied),
            dialled = dial::application(&pod, peer, destination) => dialled,
        };
        let application = match dialled {
            Ok(application) => Leg::new(application),
            // Refused, as without a proxy.
            Err(error) => return record.fail(&error),
        };
        record.admitted = Some(admitted.entry());
        let relayed = relay::plain(application, client, record, pod.shared.config.tail_deadline);
        admitted.run(relayed).await;
    };
    tokio::select! {
        biased;
        // Both legs are reset, and the record says why.
        () = pod.plaintext.refused(), if on_wire => {}
        () = carried => {}
    }
}
