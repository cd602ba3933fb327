//! The mesh from a control plane: delta ADS, as Istio's ztunnel speaks it (`xds/client.rs`).
//!
//! Policies are asked for whole; so are workloads and services, unless they are asked for [by name](super::demand). What has come stays
//! for as long as the agent runs, however long the control plane is away; at the next connection it is told which versions are here, and
//! tells what has gone meanwhile. `app` runs the client.

use std::{sync::Arc, time::Duration};

use http::uri::PathAndQuery;
use rand::Rng as _;
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep, sleep_until, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Extensions, Request, Status};
use tonic_prost::ProstCodec;

use super::{
    demand::{Changes, Demand},
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

/// Time until the log says which types have not come, and then twice as long each time, up to the longest: whoever asks why an
/// agent is not ready looks there.
const LACK_TOLD: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(600));

/// Requests that wait to be sent; there is one for each response, and responses are taken one by one. Names gather meanwhile.
const REQUESTS: usize = 8;

/// Tells the types of which the first state has not come.
pub type Awaited = watch::Receiver<Vec<&'static str>>;

/// The client.
#[derive(Debug)]
pub struct Client {
    channel: Channel,
    identity: Identity,
    mesh: Handle,
    demand: Option<Demand>,
    metrics: Arc<Metrics>,
    /// The types of which the first state has not come.
    awaited: watch::Sender<Vec<&'static str>>,
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
    /// A client that has not connected yet, and what it waits for. With `demand`, workloads and services are asked for by name.
    pub fn new(
        config: control_plane::Config,
        identity: Identity,
        mesh: Handle,
        demand: Option<Demand>,
        metrics: Arc<Metrics>,
    ) -> (Self, Awaited) {
        let (awaited, receiver) = watch::channel(Session::new(&identity, demand.is_some()).awaited());
        let client = Self {
            channel: Channel::new(config),
            identity,
            mesh,
            demand,
            metrics,
            awaited,
        };
        (client, receiver)
    }

    /// Keeps the mesh as the control plane says, until `stop`.
    pub async fn run(self, stop: CancellationToken) {
        let following = async { tokio::join!(self.follow(), self.tell_lack()) };
        tokio::select! {
            () = stop.cancelled() => {}
            _ = following => {}
        }
    }

    /// Says what the agent waits for, until all has come.
    async fn tell_lack(&self) {
        let mut awaited = self.awaited.subscribe();
        let (mut pause, longest) = LACK_TOLD;
        while timeout(pause, awaited.wait_for(Vec::is_empty)).await.is_err() {
            let types = self.awaited.borrow().join(", ");
            tracing::warn!(address = %self.channel.address(), %types, "not ready: the control plane's first state of these types has not come, or was refused");
            pause = (pause * 2).min(longest);
        }
    }

    async fn follow(&self) {
        let mut session = Session::new(&self.identity, self.demand.is_some());
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
                self.metrics.failed();
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
        let _connected = self.metrics.connected();
        let first_answer = Instant::now() + FIRST_ANSWER;
        let _here = self.demand.as_ref().map(Here);
        if let Some(demand) = &self.demand {
            for request in session.names(demand.connected()) {
                if let Err(end) = send(&requests, request).await {
                    return end;
                }
            }
        }
        loop {
            let response = tokio::select! {
                response = responses.message() => response,
                // A server that is gone is noticed by HTTP/2's pings; one that has nothing to say may be silent for ever.
                () = sleep_until(first_answer), if !*answered => return End::Silent,
                changes = names(self.demand.as_ref()) => {
                    for request in Session::name_changes(changes) {
                        if let Err(end) = send(&requests, request).await {
                            return end;
                        }
                    }
                    continue;
                }
            };
            let response = match response {
                Ok(Some(response)) => response,
                Ok(None) => return End::Complete,
                Err(status) => return End::Stream(status),
            };
            *answered = true;
            self.metrics.received(&response);
            let had_policies = session.has_policies();
            let outcome = session.take(response).await;
            if let Err(stopped) = self.mesh.apply(outcome.updates).await {
                return stopped.into();
            }
            if !had_policies
                && session.has_policies()
                && let Err(stopped) = self.mesh.policies_told().await
            {
                return stopped.into();
            }
            if let Some(demand) = &self.demand {
                demand.answer(&outcome.answers);
            }
            let awaited = session.awaited();
            let is_news = self.awaited.send_if_modified(|before| {
                let is_news = *before != awaited;
                *before = awaited;
                is_news
            });
            if is_news && self.awaited.borrow().is_empty() {
                tracing::info!("the control plane's first state is complete");
            }
            if let Err(end) = send(&requests, outcome.answer).await {
                return end;
            }
        }
    }
}

/// There is somebody to ask, until it is dropped.
struct Here<'a>(&'a Demand);

impl Drop for Here<'_> {
    fn drop(&mut self) {
        self.0.disconnected();
    }
}

/// A server that reads no requests would be waited for without an end.
async fn send(
    requests: &mpsc::Sender<DeltaDiscoveryRequest>,
    request: DeltaDiscoveryRequest,
) -> Result<(), End> {
    match timeout(FIRST_ANSWER, requests.send(request)).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(_)) => Err(End::Complete),
        Err(_) => Err(End::Silent),
    }
}

/// The names that count from now on and did not before, or the other way round.
async fn names(demand: Option<&Demand>) -> Changes {
    let Some(demand) = demand else {
        return std::future::pending().await;
    };
    demand.changed().await;
    demand.take()
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
