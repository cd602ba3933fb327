//! The mesh from a control plane: delta ADS, as Istio's ztunnel speaks it (`xds/client.rs`).
//!
//! Both types are asked for whole. What has come stays for as long as the agent runs, however long the control plane is away; at
//! the next connection it is told which versions are here, and tells what has gone meanwhile. `app` runs the client.

use std::{sync::Arc, time::Duration};

use http::uri::PathAndQuery;
use rand::Rng as _;
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Extensions, Request, Status};
use tonic_prost::ProstCodec;

use super::{
    proto::messages::{DeltaDiscoveryRequest, DeltaDiscoveryResponse},
    state::{Handle, Stopped},
};
use crate::{
    control_plane::{self, Channel, explain},
    telemetry::Chain,
};

mod backoff;
mod metrics;
mod node;
mod session;

use self::{backoff::Backoff, metrics::Reason, session::Session};
pub use self::{metrics::Metrics, node::Identity};

const METHOD: PathAndQuery = PathAndQuery::from_static(
    "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources",
);

/// Longest message, in bytes, that is taken: all of a large mesh comes in one. ztunnel's limit.
const MAX_MESSAGE: usize = 200 << 20;

/// Time until a server must have begun to answer, or to read. A large control plane may have much to gather for its first response.
const FIRST_ANSWER: Duration = Duration::from_secs(60);

/// Answers that wait to be sent; there is one for each response, and responses are taken one by one.
const REQUESTS: usize = 8;

/// The client.
#[derive(Debug)]
pub struct Client {
    channel: Channel,
    identity: Identity,
    mesh: Handle,
    metrics: Arc<Metrics>,
    /// Whether every type has come once.
    synced: watch::Sender<bool>,
}

/// How a connection ended.
#[derive(Debug, thiserror::Error)]
enum End {
    #[error("the control plane cannot be asked")]
    Setup(#[source] control_plane::Error),
    #[error("{}", explain(.0))]
    Connect(Status),
    #[error("{}", explain(.0))]
    Stream(Status),
    #[error("no answer within {FIRST_ANSWER:?}")]
    Silent,
    #[error("the control plane has ended the stream")]
    Complete,
    #[error(transparent)]
    Stopped(#[from] Stopped),
}

impl Client {
    /// A client that has not connected yet, and what tells when the first state of every type is here.
    pub fn new(
        config: control_plane::Config,
        identity: Identity,
        mesh: Handle,
        metrics: Arc<Metrics>,
    ) -> (Self, watch::Receiver<bool>) {
        let (synced, receiver) = watch::channel(false);
        let client = Self {
            channel: Channel::new(config),
            identity,
            mesh,
            metrics,
            synced,
        };
        (client, receiver)
    }

    /// Keeps the mesh as the control plane says, until `stop`.
    pub async fn run(self, stop: CancellationToken) {
        let following = self.follow();
        tokio::select! {
            () = stop.cancelled() => {}
            () = following => {}
        }
    }

    async fn follow(&self) {
        let mut session = Session::new(&self.identity);
        let mut backoff = Backoff::default();
        loop {
            let begun = Instant::now();
            let mut answered = false;
            let end = self.connection(&mut session, &mut answered).await;
            self.metrics.terminated(end.reason());
            if let End::Stopped(_) = end {
                return;
            }
            let is_ordinary = answered && end.is_ordinary();
            let pause = backoff.after(begun.elapsed(), is_ordinary);
            // By half less or more: agents that lost one control plane don't find the next one at one instant.
            let pause = pause.mul_f64(rand::rng().random_range(0.5..1.5));
            let address = self.channel.address();
            let error: &dyn std::error::Error = &end;
            if is_ordinary {
                tracing::info!(%address, reason = %Chain(error), lasted = ?begun.elapsed(), retry = ?pause, "xDS stream ended");
            } else {
                tracing::warn!(%address, error = %Chain(error), retry = ?pause, "xDS connection failed; the mesh stays as it is");
            }
            sleep(pause).await;
        }
    }

    /// One connection, to its end.
    async fn connection(&self, session: &mut Session, answered: &mut bool) -> End {
        let opened = async {
            let metadata = self.channel.metadata().await.map_err(End::Setup)?;
            let service = self.channel.service().await.map_err(End::Setup)?;
            let mut service = service.max_decoding_message_size(MAX_MESSAGE);
            let ready = service.ready().await;
            ready.map_err(|error| End::Connect(Status::from_error(error.into())))?;
            let (requests, outgoing) = mpsc::channel(REQUESTS);
            for request in session.first_requests() {
                // There is room for these.
                let _ = requests.send(request).await;
            }
            let request = Request::from_parts(metadata, Extensions::default(), ReceiverStream::new(outgoing));
            let codec = ProstCodec::<DeltaDiscoveryRequest, DeltaDiscoveryResponse>::default();
            let responses = service
                .streaming(request, METHOD, codec)
                .await
                .map_err(End::Connect)?;
            Ok((requests, responses.into_inner()))
        };
        let (requests, mut responses) = match timeout(FIRST_ANSWER, opened).await {
            Ok(Ok(opened)) => opened,
            Ok(Err(end)) => return end,
            Err(_) => return End::Silent,
        };
        tracing::info!(address = %self.channel.address(), "connected to the control plane");
        loop {
            // A server that is gone is noticed by HTTP/2's pings; one that has nothing to say may be silent for ever.
            let response = match *answered {
                true => responses.message().await,
                false => match timeout(FIRST_ANSWER, responses.message()).await {
                    Ok(response) => response,
                    Err(_) => return End::Silent,
                },
            };
            let response = match response {
                Ok(Some(response)) => response,
                Ok(None) => return End::Complete,
                Err(status) => return End::Stream(status),
            };
            *answered = true;
            self.metrics.received(&response);
            let (answer, updates) = session.take(response).await;
            if let Err(stopped) = self.mesh.apply(updates).await {
                return stopped.into();
            }
            if session.is_synced() && !self.synced.send_replace(true) {
                tracing::info!("the control plane's first state is complete");
            }
            // A server that reads no answers would be waited for without an end.
            match timeout(FIRST_ANSWER, requests.send(answer)).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return End::Complete,
                Err(_) => return End::Silent,
            }
        }
    }
}

impl End {
    fn reason(&self) -> Reason {
        match self {
            Self::Setup(_) | Self::Connect(_) | Self::Silent => Reason::ConnectionError,
            Self::Stream(_) if self.is_ordinary() => Reason::Reconnect,
            Self::Stream(_) => Reason::Error,
            Self::Complete | Self::Stopped(_) => Reason::Complete,
        }
    }

    /// What happens whenever a control plane is replaced or sheds load.
    fn is_ordinary(&self) -> bool {
        match self {
            Self::Complete => true,
            Self::Stream(status) => match status.code() {
                Code::Unknown | Code::Cancelled | Code::DeadlineExceeded => true,
                Code::Unavailable => ["transport is closing", "received prior goaway"]
                    .iter()
                    .any(|text| status.message().contains(text)),
                _ => false,
            },
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests;
