//! The talk with one proxy: its hello, its snapshot, and then one request after the other, each with its answer.
//!
//! Answers have no numbers, so order is all that tells whose an answer is. A proxy that does not answer in time, or speaks unasked, is out
//! of step, and its connection ends: a late answer must not be taken for the next request's. It keeps its pods, connects again, and
//! is told of all pods anew, which costs one that is in order nothing.

use std::{collections::HashMap, fmt, io, os::fd::AsFd as _, time::Duration};

use prost::Message as _;
use tokio::time::timeout;
use tracing::{debug, info, warn};

use super::{
    super::zds_proto::{Ack, Response, WorkloadResponse, ZdsHello},
    proxies::{Error, Order, Outgoing, Proxies, Registered, Told},
};
use crate::{
    mesh::pod::PodUid,
    sys::{
        netns::NetnsId,
        seqpacket::{Message, Seqpacket},
    },
};

/// Longest message, either way: ztunnel's and istio-cni's buffers.
pub(super) const MAX_MESSAGE_BYTES: usize = 1024;

/// Time for the hello, for sending a request, and for its answer. istio-cni's.
const DEADLINE: Duration = Duration::from_secs(5);

/// Why a connection ended.
#[derive(Debug)]
pub(super) enum End {
    Closed,
    NoHello,
    NoAnswer,
    NotRead,
    Socket(io::Error),
    Protocol(String),
    Replaced,
    Stopping,
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str("it was closed"),
            Self::NoHello => write!(f, "no hello within {DEADLINE:?}"),
            Self::NoAnswer => write!(f, "no answer within {DEADLINE:?}"),
            Self::NotRead => write!(f, "it has read nothing for {DEADLINE:?}"),
            Self::Socket(error) => error.fmt(f),
            Self::Protocol(text) => write!(f, "the proxy breaks the protocol: {text}"),
            Self::Replaced => f.write_str("there are too many connections, and this one is the oldest"),
            Self::Stopping => f.write_str("the agent is stopping"),
        }
    }
}

/// Talks until the connection is of no more use.
pub(super) async fn talk(socket: &Seqpacket, mut registered: Registered, proxies: &Proxies) -> End {
    let id = registered.id;
    if let Err(end) = hello(socket).await {
        return end;
    }
    proxies.greet(id);
    let pods = match snapshot(socket, id, proxies).await {
        Ok(pods) => pods,
        Err(end) => return end,
    };
    info!(connection = id, pods, "the proxy knows all pods");
    loop {
        let order = tokio::select! {
            biased;
            spoken = socket.recv(MAX_MESSAGE_BYTES) => return out_of_turn(spoken),
            order = registered.requests.recv() => order,
        };
        // The table has the other end as long as this connection is in it.
        let Some(order) = order else { return End::Stopping };
        if let Err(end) = carry_out(socket, order, proxies).await {
            return end;
        }
    }
}

async fn hello(socket: &Seqpacket) -> Result<(), End> {
    let message = match timeout(DEADLINE, socket.recv(MAX_MESSAGE_BYTES)).await {
        Err(_) => return Err(End::NoHello),
        Ok(received) => received.map_err(End::Socket)?,
    };
    if message.bytes.is_empty() {
        return Err(End::Closed);
    }
    // Of whatever version: there is one.
    match ZdsHello::decode(message.bytes.as_slice()) {
        Ok(_) if message.fds.is_empty() => Ok(()),
        Ok(_) => Err(End::Protocol("descriptors with the hello".to_owned())),
        Err(error) => Err(End::Protocol(format!("hello that cannot be decoded: {error}"))),
    }
}

/// Tells of all pods, and says so; how many there are.
async fn snapshot(socket: &Seqpacket, id: u64, proxies: &Proxies) -> Result<usize, End> {
    let mut told = HashMap::new();
    while let Some((uid, pod)) = proxies.untold(&told) {
        tell(socket, id, uid, &pod, &mut told).await?;
    }
    if let Err(text) = request(socket, &Outgoing::snapshot_sent()).await? {
        warn!(
            connection = id,
            error = text,
            "the proxy refuses the end of the snapshot"
        );
    }
    while let Some((uid, pod)) = proxies.synced(id, &told) {
        match pod {
            // A proxy takes it for a breach of the protocol after the snapshot; and it serves what it has.
            Told::Exists => {
                told.insert(uid, None);
            }
            Told::Pod(..) => tell(socket, id, uid, &pod, &mut told).await?,
        }
    }
    Ok(told.len())
}

async fn tell(
    socket: &Seqpacket,
    id: u64,
    uid: PodUid,
    pod: &Told,
    told: &mut HashMap<PodUid, Option<NetnsId>>,
) -> Result<(), End> {
    // What is wrong with one pod is no reason to keep the others from the proxy.
    if let Err(text) = request(socket, &Outgoing::pod(&uid, pod)).await? {
        warn!(connection = id, %uid, error = text, "the proxy refuses a pod of the snapshot");
    }
    told.insert(uid, pod.netns());
    Ok(())
}

async fn carry_out(socket: &Seqpacket, order: Order, proxies: &Proxies) -> Result<(), End> {
    let Order {
        message,
        deletes,
        reply,
    } = order;
    // It has come back while the request waited, and may be told of already.
    if let Some(uid) = deletes.filter(|uid| proxies.has(uid)) {
        debug!(%uid, "late delete of a pod that is back: ignored");
        let _ = reply.send(Ok(()));
        return Ok(());
    }
    // Who asked may have given up.
    match request(socket, &message).await {
        Ok(answer) => {
            let _ = reply.send(answer.map_err(Error::Refused));
            Ok(())
        }
        Err(end) => {
            let _ = reply.send(Err(match end {
                End::NoAnswer | End::NotRead => Error::NoAnswer,
                _ => Error::Gone,
            }));
            Err(end)
        }
    }
}

/// One request and its answer; the text of a refusal.
async fn request(socket: &Seqpacket, message: &Outgoing) -> Result<Result<(), String>, End> {
    // What is there already is the answer to nothing.
    if let Ok(spoken) = timeout(Duration::ZERO, socket.recv(MAX_MESSAGE_BYTES)).await {
        return Err(out_of_turn(spoken));
    }
    let netns = message.netns.as_ref().map(|netns| netns.as_fd());
    let sent = timeout(DEADLINE, socket.send(&message.bytes, netns.as_slice())).await;
    sent.map_err(|_| End::NotRead)?.map_err(End::Socket)?;
    let answer = timeout(DEADLINE, socket.recv(MAX_MESSAGE_BYTES)).await;
    let answer = answer.map_err(|_| End::NoAnswer)?.map_err(End::Socket)?;
    if answer.bytes.is_empty() {
        return Err(End::Closed);
    }
    parse(&answer).map_err(End::Protocol)
}

fn out_of_turn(spoken: io::Result<Message>) -> End {
    match spoken {
        Err(error) => End::Socket(error),
        Ok(message) if message.bytes.is_empty() => End::Closed,
        Ok(_) => End::Protocol("it speaks without being asked".to_owned()),
    }
}

/// Reads an answer: acknowledged, or refused with a text. What breaks the protocol is an error.
fn parse(message: &Message) -> Result<Result<(), String>, String> {
    if !message.fds.is_empty() {
        return Err("descriptors with an answer".to_owned());
    }
    let response = WorkloadResponse::decode(message.bytes.as_slice())
        .map_err(|error| format!("answer that cannot be decoded: {error}"))?;
    match response.payload {
        Some(Response::Ack(Ack { error })) if error.is_empty() => Ok(Ok(())),
        Some(Response::Ack(Ack { error })) => Ok(Err(error)),
        None => Err("answer without a known payload".to_owned()),
    }
}

/// Reads an answer, and does nothing about it; what is wrong with it.
///
/// # Errors
/// When it breaks the protocol, or refuses.
pub fn check(answer: &[u8]) -> Result<(), String> {
    parse(&Message {
        bytes: answer.to_vec(),
        fds: Vec::new(),
    })?
}
