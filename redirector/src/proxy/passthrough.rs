//! 15006: plain connections from outside, handed to the application with their client's address.

use std::{io, net::SocketAddr, os::fd::AsFd, sync::Arc};

use tokio::net::TcpStream;

use super::{
    Pod,
    copy::Leg,
    dial,
    record::{Direction, Record, Security},
    relay,
};
use crate::mesh::route;

/// Why a connection is refused before the application is asked.
#[derive(Debug, thiserror::Error)]
enum Denied {
    #[error("cannot tell where the connection was going")]
    OriginalDst(#[source] io::Error),
    #[error("{0} is a port of the proxy itself")]
    ProxyPort(SocketAddr),
}

/// Serves one accepted connection to its end.
pub(super) async fn connection(pod: Arc<Pod>, client: TcpStream, peer: SocketAddr) {
    let client = Leg::new(client);
    let mut record = Record::new(pod.shared.metrics.clone(), Direction::Inbound, peer);
    let destination = match pod.shared.redirector.original_dst(client.as_fd()) {
        Ok(destination) => destination,
        Err(error) => return record.fail(&Denied::OriginalDst(error)),
    };
    record.dst = Some(destination);
    if !route::passthrough_allowed(destination) {
        return record.fail(&Denied::ProxyPort(destination));
    }
    record.source = pod
        .mesh()
        .workload_at(&pod.shared.config.network, peer.ip())
        .map(|workload| workload.as_ref().into())
        .unwrap_or_default();
    record.destination = (&pod.info).into();
    record.open(Security::unknown);
    let application = match dial::application(&pod, peer, destination).await {
        Ok(application) => Leg::new(application),
        // Dropped, the client's leg is reset: refused, as without a proxy.
        Err(error) => return record.fail(&error),
    };
    relay::plain(application, client, record, pod.shared.config.tail_deadline).await;
}
