//! `GET /config_dump`: all that the agent knows, in the shape that Istio's `istioctl ztunnel-config` reads of ztunnel.
//!
//! With many workloads that is a lot of text. It is made by a thread that may block, piece by piece as it is read, from a snapshot that
//! nobody else waits for; so a dump costs neither the data path its threads nor the node the memory for all of it.

use std::{collections::BTreeMap, io, mem, sync::Arc, time::Duration};

use bytes::{Bytes, BytesMut};
use futures_util::StreamExt as _;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::Frame;
use serde::{Serialize, Serializer};
use serde_json::Value;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    time::timeout,
};
use tokio_stream::wrappers::ReceiverStream;

use super::{Admin, PodsView};
use crate::{
    identity::{crl_file::RevocationsView, states::IdentityState, store::Store},
    mesh::index::Mesh,
    pods::status::State,
    proxy::flows::{Flows, OfPod},
    serve::{Answer, text},
};

mod mesh;
mod policy;

use self::{
    mesh::{ServiceView, Staged, WorkloadView},
    policy::PolicyView,
};

/// For so long one may wait for the dump of somebody else to end.
const WAIT: Duration = Duration::from_secs(10);

/// Bytes in one piece of the answer.
const PIECE_BYTES: usize = 64 * 1024;

/// Pieces that wait to be read.
const PIECES: usize = 4;

/// Lets one be made at a time.
#[derive(Debug)]
pub struct Turn(Arc<Semaphore>);

impl Turn {
    /// Waits for it, for as long as one may.
    pub(super) async fn take(&self) -> Option<OwnedSemaphorePermit> {
        timeout(WAIT, Arc::clone(&self.0).acquire_owned())
            .await
            .ok()?
            .ok()
    }
}

impl Default for Turn {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(1)))
    }
}

/// All that is told, not put into words yet.
struct Snapshot {
    pods: PodsView,
    mesh: Arc<Mesh>,
    flows: Arc<Flows>,
    identities: Arc<Store>,
    config: Value,
}

/// The answer.
pub(super) async fn answer(admin: &Admin) -> Answer {
    let Some(turn) = admin.dumps.take().await else {
        return text(
            StatusCode::SERVICE_UNAVAILABLE,
            "somebody else's dump is still being made: ask again\n",
        );
    };
    let snapshot = Snapshot {
        pods: admin.pods_view(),
        mesh: Arc::clone(&admin.mesh.borrow()),
        flows: Arc::clone(&admin.flows),
        identities: Arc::clone(&admin.identities),
        config: admin.config.clone(),
    };
    let (sender, pieces) = mpsc::channel(PIECES);
    // It ends with the reader, at the latest when the connection has taken as long as it may.
    tokio::task::spawn_blocking(move || {
        let mut out = Pieces::to(sender);
        let written = serde_json::to_writer_pretty(&mut out, &Dump::of(&snapshot)).map_err(io::Error::from);
        if let Err(error) = written.and_then(|()| out.finish()) {
            tracing::debug!(%error, "config dump not read to its end");
        }
        drop(turn);
    });
    let body = StreamBody::new(ReceiverStream::new(pieces).map(|piece| Ok(Frame::data(piece))));
    let mut answer = Response::new(body.boxed_unsync());
    let kind = HeaderValue::from_static("application/json");
    answer.headers_mut().insert(header::CONTENT_TYPE, kind);
    answer
}

/// Hands on in pieces what is written.
struct Pieces {
    sender: mpsc::Sender<Bytes>,
    piece: BytesMut,
}

impl Pieces {
    fn to(sender: mpsc::Sender<Bytes>) -> Self {
        Self {
            sender,
            piece: BytesMut::new(),
        }
    }

    fn send(&mut self) -> io::Result<()> {
        let piece = mem::take(&mut self.piece).freeze();
        let sent = self.sender.blocking_send(piece);
        sent.map_err(|_| io::Error::new(io::ErrorKind::BrokenPipe, "the reader is gone"))
    }

    fn finish(mut self) -> io::Result<()> {
        self.piece.extend_from_slice(b"\n");
        self.send()
    }
}

impl io::Write for Pieces {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.piece.extend_from_slice(bytes);
        if self.piece.len() >= PIECE_BYTES {
            self.send()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The whole object: what is short comes first.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Dump<'a> {
    version: Version,
    config: &'a Value,
    counts: Counts,
    pods: &'a PodsView,
    certificates: Vec<IdentityState>,
    revocations: Option<RevocationsView>,
    workload_state: BTreeMap<&'a str, PodState<'a>>,
    #[serde(serialize_with = "policies")]
    policies: &'a Mesh,
    #[serde(serialize_with = "services")]
    services: &'a Mesh,
    staged_services: Staged<'a>,
    #[serde(serialize_with = "workloads")]
    workloads: &'a Mesh,
}

/// Of what a reader may only want the number.
#[derive(Serialize)]
struct Counts {
    workloads: usize,
    services: usize,
    policies: usize,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Version {
    version: &'static str,
    git_revision: &'static str,
    rust_version: &'static str,
    build_profile: &'static str,
    crypto_provider: &'static str,
}

pub(super) const VERSION: Version = Version {
    version: env!("CARGO_PKG_VERSION"),
    git_revision: match option_env!("REDIRECTOR_GIT_REVISION") {
        Some(revision) => revision,
        None => "unknown",
    },
    rust_version: env!("REDIRECTOR_RUST_VERSION"),
    build_profile: env!("REDIRECTOR_BUILD_PROFILE"),
    crypto_provider: "aws-lc-rs",
};

/// A pod of this node, and its connections.
#[derive(Serialize)]
struct PodState<'a> {
    state: &'static str,
    connections: OfPod,
    info: Info<'a>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Info<'a> {
    name: &'a str,
    namespace: &'a str,
    service_account: &'a str,
}

impl<'a> Dump<'a> {
    fn of(snapshot: &'a Snapshot) -> Self {
        let Snapshot {
            pods,
            mesh,
            flows,
            identities,
            config,
        } = snapshot;
        let (workloads, services) = mesh.len();
        let mut connections: BTreeMap<_, _> = flows
            .by_pod()
            .into_iter()
            .map(|(uid, of_pod)| (uid.to_string(), of_pod))
            .collect();
        let pod_states = pods.status.pods.iter().map(|pod| {
            let state = PodState {
                state: state_name(pod.state),
                connections: connections.remove(&pod.uid).unwrap_or_default(),
                info: Info {
                    name: &pod.name,
                    namespace: &pod.namespace,
                    service_account: &pod.service_account,
                },
            };
            (&*pod.uid, state)
        });
        Self {
            version: VERSION,
            config,
            counts: Counts {
                workloads,
                services,
                policies: mesh.policies(),
            },
            certificates: identities.states(),
            revocations: identities.revocations(),
            workload_state: pod_states.collect(),
            policies: mesh,
            services: mesh,
            staged_services: Staged(mesh),
            workloads: mesh,
            pods,
        }
    }
}

/// ztunnel's names.
fn state_name(state: State) -> &'static str {
    match state {
        State::Captured => "Up",
        State::Starting | State::NotCaptured => "Pending",
        State::Stopping => "Draining",
    }
}

fn workloads<S: Serializer>(mesh: &Mesh, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(
        mesh.sorted_workloads()
            .into_iter()
            .map(|one| WorkloadView::of(one)),
    )
}

fn services<S: Serializer>(mesh: &Mesh, serializer: S) -> Result<S::Ok, S::Error> {
    let services = mesh.sorted_services().into_iter();
    serializer.collect_seq(services.map(|one| ServiceView::of(one, mesh.endpoints(&one.host))))
}

fn policies<S: Serializer>(mesh: &Mesh, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(mesh.sorted_policies().into_iter().map(|one| PolicyView::of(one)))
}

#[cfg(test)]
mod tests;
