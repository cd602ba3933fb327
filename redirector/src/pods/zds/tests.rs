use std::os::{
    fd::{AsFd, BorrowedFd},
    unix::fs::MetadataExt,
};

use tokio::task::JoinHandle;

use super::{super::zds_proto::*, *};
use crate::sys::{
    netns::NetnsId,
    seqpacket::testing::{Listener, open_on},
};

/// A node agent, and the client that connects to it.
struct Node {
    listener: Listener,
    events: mpsc::Receiver<PodEvent>,
    stop: CancellationToken,
    client: JoinHandle<()>,
    _directory: tempfile::TempDir,
}

impl Node {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ztunnel.sock");
        let listener = Listener::bind(&path);
        let (sender, events) = mpsc::channel(4);
        let stop = CancellationToken::new();
        let client = tokio::spawn(run(path, sender, stop.clone()));
        Self {
            listener,
            events,
            stop,
            client,
            _directory: directory,
        }
    }

    /// The next connection, past its hello.
    async fn accept(&self) -> Seqpacket {
        let connection = within(self.listener.accept()).await;
        assert_eq!(receive(&connection).await, [0x08, 0x01]);
        connection
    }

    async fn event(&mut self) -> PodEvent {
        within(self.events.recv()).await.unwrap()
    }

    async fn stop(self) {
        self.stop.cancel();
        within(self.client).await.unwrap();
    }
}

async fn within<F: Future>(future: F) -> F::Output {
    timeout(Duration::from_secs(20), future).await.unwrap()
}

async fn receive(connection: &Seqpacket) -> Vec<u8> {
    let message = within(connection.recv(2048)).await.unwrap();
    assert!(message.fds.is_empty());
    message.bytes
}

async fn ask(connection: &Seqpacket, request: Request, fds: &[BorrowedFd<'_>]) {
    let bytes = WorkloadRequest {
        payload: Some(request),
    }
    .encode_to_vec();
    connection.send(&bytes, fds).await.unwrap();
}

/// The text of the next answer.
async fn answered(connection: &Seqpacket) -> String {
    let bytes = receive(connection).await;
    assert!(bytes.len() < MAX_MESSAGE_BYTES, "{} bytes", bytes.len());
    let Some(Response::Ack(ack)) = WorkloadResponse::decode(bytes.as_slice()).unwrap().payload else {
        panic!("an answer without payload");
    };
    ack.error
}

fn add(uid: &str) -> Request {
    let info = WorkloadInfo {
        name: "web-0".into(),
        namespace: "shop".into(),
        service_account: "web".into(),
    };
    Request::Add(AddWorkload {
        uid: uid.into(),
        workload_info: Some(info),
    })
}

fn own_netns() -> Netns {
    Netns::current().unwrap()
}

#[tokio::test]
async fn events_are_handed_over_and_answered_one_by_one() {
    let mut node = Node::start();
    let agent = node.accept().await;
    let netns = own_netns();

    ask(&agent, add("u-1"), &[netns.as_fd()]).await;
    let PodEvent::Add(pod, reply) = node.event().await else {
        panic!()
    };
    assert_eq!((pod.info.uid.as_str(), pod.info.name.as_str()), ("u-1", "web-0"));
    assert_eq!(
        (pod.info.namespace.as_str(), pod.info.service_account.as_str()),
        ("shop", "web")
    );
    assert_eq!((pod.netns.id(), pod.on_failure), (netns.id(), OnFailure::Retry));
    reply.send(Ok(())).unwrap();
    assert_eq!(answered(&agent).await, "");

    ask(&agent, Request::Keep(KeepWorkload { uid: "u-2".into() }), &[]).await;
    let PodEvent::Keep(uid, reply) = node.event().await else {
        panic!()
    };
    assert_eq!(uid.as_str(), "u-2");
    reply.send(Ok(())).unwrap();
    assert_eq!(answered(&agent).await, "");

    ask(&agent, Request::SnapshotSent(SnapshotSent {}), &[]).await;
    let PodEvent::SnapshotSent(reply) = node.event().await else {
        panic!()
    };
    reply.send(Ok(())).unwrap();
    assert_eq!(answered(&agent).await, "");

    ask(&agent, Request::Del(DelWorkload { uid: "u-1".into() }), &[]).await;
    let PodEvent::Delete(delete, reply) = node.event().await else {
        panic!()
    };
    assert_eq!((delete.uid.as_str(), delete.netns), ("u-1", None));
    reply.send(Ok(())).unwrap();
    assert_eq!(answered(&agent).await, "");
    node.stop().await;
}

#[tokio::test]
async fn errors_are_answered_and_end_nothing() {
    let mut node = Node::start();
    let agent = node.accept().await;
    let netns = own_netns();

    ask(&agent, add("u-1"), &[netns.as_fd()]).await;
    let PodEvent::Add(_, reply) = node.event().await else {
        panic!()
    };
    reply
        .send(Err(Error::NodeNamespace {
            netns: NetnsId { dev: 1, ino: 7 },
        }))
        .unwrap();
    assert!(answered(&agent).await.contains("net:[7] is the node's own"));

    // Longer than a message may be, with characters of several bytes.
    ask(&agent, add("u-1"), &[netns.as_fd()]).await;
    let PodEvent::Add(_, reply) = node.event().await else {
        panic!()
    };
    let path = "ü".repeat(2000).into();
    reply
        .send(Err(Error::NamespaceGone {
            path,
            netns: NetnsId { dev: 1, ino: 7 },
        }))
        .unwrap();
    let text = answered(&agent).await;
    assert!(
        text.starts_with("üü") && text.len() > MAX_ERROR_BYTES - 4,
        "{}",
        text.len()
    );

    let file = tempfile::NamedTempFile::new().unwrap();
    ask(&agent, add("u-1"), &[file.as_file().as_fd()]).await;
    assert!(answered(&agent).await.contains("not a network namespace"));
    ask(&agent, add("../u"), &[netns.as_fd()]).await;
    assert!(answered(&agent).await.contains("is not usable"));
    ask(&agent, Request::Keep(KeepWorkload { uid: String::new() }), &[]).await;
    assert!(answered(&agent).await.contains("is not usable"));
    assert!(node.events.try_recv().is_err(), "nothing of it came through");
    node.stop().await;
}

#[tokio::test]
async fn what_breaks_the_protocol_ends_its_connection_only() {
    // Not a namespace, of which other tests in this process have descriptors of their own: nobody looks before the message is whole.
    let file = tempfile::NamedTempFile::new().unwrap();
    let metadata = file.as_file().metadata().unwrap();
    let open = || open_on(metadata.dev(), metadata.ino());
    let request = |payload| {
        WorkloadRequest {
            payload: Some(payload),
        }
        .encode_to_vec()
    };
    let without_info = Request::Add(AddWorkload {
        uid: "u".into(),
        workload_info: None,
    });
    // The message, its number of descriptors, and what its answer says; none is answered when it could not be received.
    let table: [(Vec<u8>, usize, Option<&str>); 9] = [
        (request(add("u")), 0, Some("add without a descriptor")),
        (request(add("u")), 2, Some("message with 2 descriptors")),
        (request(add("u")), 200, Some("message with 200 descriptors")),
        (request(without_info), 1, Some("add without workload_info")),
        (
            request(Request::Keep(KeepWorkload { uid: "u".into() })),
            1,
            Some("descriptor with a message other than add"),
        ),
        (
            request(Request::SnapshotSent(SnapshotSent {})),
            1,
            Some("descriptor with a message other than add"),
        ),
        (vec![0xff; 10], 0, Some("cannot be decoded")),
        (vec![0x22, 0x00], 0, Some("request without a known payload")),
        (request(add(&"u".repeat(1100))), 1, None),
    ];
    for (bytes, fds, expected) in table {
        // A node of its own for each: the back-off grows.
        let mut node = Node::start();
        let agent = node.accept().await;
        agent
            .send(&bytes, &vec![file.as_file().as_fd(); fds])
            .await
            .unwrap();
        if let Some(expected) = expected {
            let text = answered(&agent).await;
            assert!(text.contains(expected), "{text}");
        }
        assert!(receive(&agent).await.is_empty(), "the connection ends");
        assert!(matches!(node.event().await, PodEvent::Resync));
        assert_eq!(open(), 1, "{expected:?} leaks descriptors");
        drop(node.accept().await);
        node.stop().await;
    }
    // The lifecycle's view of the protocol counts as well.
    let mut node = Node::start();
    let agent = node.accept().await;
    ask(&agent, Request::Keep(KeepWorkload { uid: "u".into() }), &[]).await;
    let PodEvent::Keep(_, reply) = node.event().await else {
        panic!()
    };
    reply
        .send(Err(Error::Protocol("keep after the end of the snapshot")))
        .unwrap();
    assert_eq!(answered(&agent).await, "keep after the end of the snapshot");
    assert!(receive(&agent).await.is_empty());
    node.stop().await;
}

#[tokio::test]
async fn a_lost_connection_is_made_anew() {
    let mut node = Node::start();
    for _ in 0..3 {
        let agent = node.accept().await;
        drop(agent);
        assert!(matches!(node.event().await, PodEvent::Resync));
    }
    drop(node.accept().await);
    node.stop().await;
}
