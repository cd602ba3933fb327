//! ZDS, as ztunnel speaks it to istio-cni: the node agent listens, names the pods of the node, and passes each pod's network
//! namespace along. We connect, say hello, and answer one request after the other.
//!
//! Transport and order are here; what the requests mean for the pods is `lifecycle`'s matter. A message that breaks the
//! protocol ends its connection and no pod; another connection brings another snapshot.

use std::{
    io,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use prost::Message as _;
use tokio::{
    sync::{mpsc, oneshot},
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, info, warn};

use super::{
    Error, OnFailure, PodAdd, PodDelete, PodEvent, Reply,
    zds_proto::{Ack, AddWorkload, Request, Response, Version, WorkloadRequest, WorkloadResponse, ZdsHello},
};
use crate::{
    mesh::pod::{PodInfo, PodUid},
    sys::{
        netns::Netns,
        seqpacket::{Message, Seqpacket},
    },
    telemetry::Chain,
};

/// Longest message, either way: ztunnel's and istio-cni's buffers.
const MAX_MESSAGE_BYTES: usize = 1024;

/// Longest error text of an answer, so that the answer stays within [`MAX_MESSAGE_BYTES`].
const MAX_ERROR_BYTES: usize = 980;

/// Back-off between connections: the first, and the longest. ztunnel's.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(15));

/// Time for sending a message. istio-cni's own deadlines are 5 s.
const SEND_DEADLINE: Duration = Duration::from_secs(5);

/// Time after which a request that is still being carried out is answered with an error. istio-cni waits 5 s and would take
/// an answer that comes later for that of its next request.
const ANSWER_DEADLINE: Duration = Duration::from_millis(4500);

/// Speaks to the node agent at `path` until `stop`, through any number of connections.
pub async fn run(path: PathBuf, events: mpsc::Sender<PodEvent>, stop: CancellationToken) {
    let mut backoff = BACKOFF.0;
    loop {
        let began = Instant::now();
        let ended = tokio::select! {
            () = stop.cancelled() => return,
            ended = connection(&path, &events) => ended,
        };
        if events.send(PodEvent::Resync).await.is_err() {
            return;
        }
        if began.elapsed() >= BACKOFF.1 {
            backoff = BACKOFF.0;
        }
        match &ended {
            // Told once, at the first of a series.
            End::Connect(error) if backoff == BACKOFF.0 => {
                warn!(path = %path.display(), %error, "no node agent listens yet; trying again");
            }
            End::Connect(error) => debug!(path = %path.display(), %error, "no node agent listens yet"),
            End::Closed => info!(path = %path.display(), "the node agent closed the connection"),
            End::Socket(error) => {
                warn!(path = %path.display(), %error, "connection to the node agent failed")
            }
            End::Protocol(error) => {
                error!(path = %path.display(), error, "the node agent breaks the protocol")
            }
            End::Stopping => return,
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = sleep(backoff) => {}
        }
        backoff = (backoff * 2).min(BACKOFF.1);
    }
}

/// Why a connection ended.
#[derive(Debug)]
enum End {
    Connect(io::Error),
    Closed,
    Socket(io::Error),
    Protocol(String),
    Stopping,
}

async fn connection(path: &std::path::Path, events: &mpsc::Sender<PodEvent>) -> End {
    let socket = match Seqpacket::connect(path) {
        Ok(socket) => socket,
        Err(error) => return End::Connect(error),
    };
    info!(path = %path.display(), "connected to the node agent");
    if let Err(end) = send(
        &socket,
        ZdsHello {
            version: Version::V1 as i32,
        }
        .encode_to_vec(),
    )
    .await
    {
        return end;
    }
    loop {
        // Without a deadline: the agent speaks when it has something to say.
        let message = match socket.recv(MAX_MESSAGE_BYTES).await {
            Ok(message) => message,
            Err(error) => return End::Socket(error),
        };
        if message.bytes.is_empty() {
            return End::Closed;
        }
        // What a broken message held, descriptors too, is dropped here.
        let outcome = match parse(message) {
            Err(broken) => Err(broken),
            Ok(Parsed::Refused(text)) => Ok(text),
            Ok(Parsed::Event(event)) => carry_out(event, events).await,
        };
        let (text, end) = match outcome {
            Ok(text) => (text, None),
            Err(end @ End::Protocol(_)) => {
                let End::Protocol(text) = &end else { return end };
                (text.clone(), Some(end))
            }
            Err(end) => return end,
        };
        if let Err(end) = send(&socket, answer(text)).await {
            return end;
        }
        if let Some(end) = end {
            return end;
        }
    }
}

async fn send(socket: &Seqpacket, bytes: Vec<u8>) -> Result<(), End> {
    match timeout(SEND_DEADLINE, socket.send(&bytes, &[])).await {
        Ok(sent) => sent.map_err(End::Socket),
        Err(_) => Err(End::Socket(io::Error::new(
            io::ErrorKind::TimedOut,
            "the node agent does not read",
        ))),
    }
}

/// An answer; an empty `error` is success.
fn answer(mut error: String) -> Vec<u8> {
    error.truncate(error.floor_char_boundary(MAX_ERROR_BYTES));
    WorkloadResponse {
        payload: Some(Response::Ack(Ack { error })),
    }
    .encode_to_vec()
}

/// Reads a message that comes without a descriptor, and does nothing about it; what is wrong with it, as it would be told.
///
/// # Errors
/// When it breaks the protocol, or is of no use.
pub fn check(message: &[u8]) -> Result<(), String> {
    let message = Message {
        bytes: message.to_vec(),
        fds: Vec::new(),
    };
    match parse(message) {
        Ok(Parsed::Event(_)) => Ok(()),
        Ok(Parsed::Refused(text)) | Err(End::Protocol(text)) => Err(text),
        Err(_) => Err("the connection would end".to_owned()),
    }
}

/// Hands an event to the lifecycle. The text of its error, or none.
async fn carry_out(event: NewEvent, events: &mpsc::Sender<PodEvent>) -> Result<String, End> {
    let (reply, result) = oneshot::channel();
    if events.send(event(reply)).await.is_err() {
        return Err(End::Stopping);
    }
    Ok(match timeout(ANSWER_DEADLINE, result).await {
        Ok(Ok(Ok(()))) => String::new(),
        Ok(Ok(Err(Error::Protocol(text)))) => return Err(End::Protocol(text.to_owned())),
        Ok(Ok(Err(error))) => Chain(&error).to_string(),
        Ok(Err(_)) => return Err(End::Stopping),
        Err(_) => format!("not done within {ANSWER_DEADLINE:?}; it goes on"),
    })
}

type NewEvent = Box<dyn FnOnce(Reply) -> PodEvent + Send>;

/// What a message is.
enum Parsed {
    Event(NewEvent),
    /// Well-formed, but of no use: the text says why.
    Refused(String),
}

/// Reads a message. What breaks the protocol is an error.
fn parse(message: Message) -> Result<Parsed, End> {
    let broken = |text: &str| End::Protocol(text.to_owned());
    let request = WorkloadRequest::decode(message.bytes.as_slice())
        .map_err(|error| End::Protocol(format!("message that cannot be decoded: {error}")))?;
    let mut fds = message.fds.into_iter();
    let (fd, more) = (fds.next(), fds.len());
    if more > 0 {
        return Err(End::Protocol(format!("message with {} descriptors", more + 1)));
    }
    let request = request
        .payload
        .ok_or_else(|| broken("request without a known payload"))?;
    if fd.is_some() && !matches!(request, Request::Add(_)) {
        return Err(broken("descriptor with a message other than add"));
    }
    Ok(match request {
        Request::Add(AddWorkload { uid, workload_info }) => {
            let info = workload_info.ok_or_else(|| broken("add without workload_info"))?;
            let fd = fd.ok_or_else(|| broken("add without a descriptor"))?;
            let uid: PodUid = match uid.parse() {
                Ok(uid) => uid,
                Err(error) => return Ok(Parsed::Refused(error.to_string())),
            };
            let netns = match Netns::from_fd(fd) {
                Ok(netns) => Arc::new(netns),
                Err(error) => return Ok(Parsed::Refused(format!("descriptor of pod {uid}: {error}"))),
            };
            let add = PodAdd {
                info: PodInfo {
                    uid,
                    name: info.name,
                    namespace: info.namespace,
                    service_account: info.service_account,
                },
                netns,
                netns_path: None,
                addresses: Vec::new(),
                // ZDS says nothing of rules; the rules file may.
                rules: None,
                on_failure: OnFailure::Retry,
            };
            Parsed::Event(Box::new(move |reply| PodEvent::Add(add, reply)))
        }
        Request::Keep(keep) => with_uid(&keep.uid, PodEvent::Keep),
        Request::Del(del) => with_uid(&del.uid, |uid, reply| {
            PodEvent::Delete(PodDelete { uid, netns: None }, reply)
        }),
        Request::SnapshotSent(_) => Parsed::Event(Box::new(PodEvent::SnapshotSent)),
    })
}

fn with_uid(uid: &str, event: impl FnOnce(PodUid, Reply) -> PodEvent + Send + 'static) -> Parsed {
    match uid.parse() {
        Ok(uid) => Parsed::Event(Box::new(move |reply| event(uid, reply))),
        Err(error) => Parsed::Refused(error.to_string()),
    }
}

#[cfg(test)]
mod tests;
