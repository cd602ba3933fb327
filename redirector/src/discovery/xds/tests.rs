//! The connection, against a server of h2 alone; what is said on it is the session's matter.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use http::{HeaderMap, HeaderValue};
use prost::Message as _;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::task::AbortOnDropHandle;

use super::{
    super::{proto, state::State},
    *,
};
use crate::control_plane::{Auth, Roots};

/// Nothing here takes this long.
const DEADLINE: Duration = Duration::from_secs(60);

/// What a server does with a stream.
#[derive(Debug, Clone, Copy)]
enum Manner {
    /// Ends it at once.
    Ends,
    /// Tells of an empty mesh, and ends it when that was answered.
    TellsAndEnds,
}

struct Server {
    port: u16,
    streams: Arc<AtomicUsize>,
    _task: AbortOnDropHandle<()>,
}

impl Server {
    async fn start(manner: Manner) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let streams = Arc::new(AtomicUsize::new(0));
        let counted = streams.clone();
        let task = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                tokio::spawn(serve(stream, manner, counted.clone()));
            }
        });
        Self {
            port,
            streams,
            _task: AbortOnDropHandle::new(task),
        }
    }

    fn streams(&self) -> usize {
        self.streams.load(Ordering::Relaxed)
    }
}

async fn serve(stream: TcpStream, manner: Manner, streams: Arc<AtomicUsize>) {
    let Ok(mut connection) = h2::server::handshake(stream).await else {
        return;
    };
    while let Some(Ok((request, mut respond))) = connection.accept().await {
        streams.fetch_add(1, Ordering::Relaxed);
        let response = http::Response::builder().header("content-type", "application/grpc");
        let mut body = respond.send_response(response.body(()).unwrap(), false).unwrap();
        if let Manner::TellsAndEnds = manner {
            for type_url in [proto::ADDRESS, proto::AUTHORIZATION] {
                let message = DeltaDiscoveryResponse {
                    type_url: type_url.into(),
                    ..DeltaDiscoveryResponse::default()
                };
                body.send_data(framed(&message), false).unwrap();
            }
        }
        let end = async move {
            if let Manner::TellsAndEnds = manner {
                answered(request.into_body()).await;
            }
            let trailers = HeaderMap::from_iter([("grpc-status".parse().unwrap(), HeaderValue::from(0))]);
            // The client may have gone.
            let _ = body.send_trailers(trailers);
        };
        tokio::spawn(end);
    }
}

/// Waits for the two first requests and an answer to each.
async fn answered(mut body: h2::RecvStream) {
    let mut bytes = BytesMut::new();
    let mut messages = 0;
    while let Some(Ok(data)) = body.data().await {
        bytes.extend_from_slice(&data);
        while let Some(length) = bytes.get(1..5) {
            let length = u32::from_be_bytes(length.try_into().unwrap()) as usize;
            if bytes.len() < 5 + length {
                break;
            }
            bytes.advance(5 + length);
            messages += 1;
        }
        if messages == 4 {
            return;
        }
    }
}

/// gRPC: not compressed, the length, the message.
fn framed(message: &DeltaDiscoveryResponse) -> Bytes {
    let mut frame = BytesMut::new();
    frame.put_u8(0);
    frame.put_u32(u32::try_from(message.encoded_len()).unwrap());
    message.encode(&mut frame).unwrap();
    frame.freeze()
}

/// A client of the server, which runs, and what tells the types of which it lacks the first state.
fn client(server: &Server) -> (Awaited, [AbortOnDropHandle<()>; 2]) {
    let config = control_plane::Config {
        address: format!("http://127.0.0.1:{}", server.port).parse().unwrap(),
        roots: Roots::System,
        alt_hostname: None,
        auth: Auth::default(),
    };
    let stop = CancellationToken::new();
    let (state, handle, _) = State::new(None);
    let (client, awaited) = Client::new(config, Identity::default(), handle, None, Arc::default());
    let tasks = [
        tokio::spawn(state.run(stop.clone())),
        tokio::spawn(client.run(stop)),
    ];
    (awaited, tasks.map(AbortOnDropHandle::new))
}

#[tokio::test]
async fn a_server_that_ends_what_it_takes_is_asked_ever_more_seldom() {
    let server = Server::start(Manner::Ends).await;
    let (awaited, _tasks) = client(&server);
    let first = async {
        while server.streams() == 0 {
            sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(DEADLINE, first).await.unwrap();
    sleep(Duration::from_secs(1)).await;
    // Without a growing wait there would be some hundred.
    let streams = server.streams();
    assert!(streams < 16, "{streams}");
    assert_eq!(*awaited.borrow(), [proto::ADDRESS, proto::AUTHORIZATION]);
}

#[tokio::test]
async fn a_server_that_has_answered_is_asked_again_and_its_state_stays_the_first() {
    let server = Server::start(Manner::TellsAndEnds).await;
    let (mut awaited, _tasks) = client(&server);
    timeout(DEADLINE, awaited.wait_for(Vec::is_empty))
        .await
        .unwrap()
        .unwrap();
    let many = async {
        while server.streams() < 6 {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(DEADLINE, many).await.unwrap();
    assert!(awaited.borrow().is_empty());
}

#[test]
fn ends_are_told_apart() {
    let status = |code, text: &str| End::Stream(Status::new(code, text));
    for (end, ordinary, reason) in [
        (End::Complete, true, Reason::Complete),
        (status(Code::Unknown, ""), true, Reason::Reconnect),
        (status(Code::DeadlineExceeded, ""), true, Reason::Reconnect),
        (
            status(Code::Unavailable, "received prior goaway: 0"),
            true,
            Reason::Reconnect,
        ),
        (status(Code::Unavailable, "no capacity"), false, Reason::Error),
        (status(Code::PermissionDenied, ""), false, Reason::Error),
        (
            End::Connect(Status::new(Code::Unauthenticated, "")),
            false,
            Reason::ConnectionError,
        ),
        (End::Silent, false, Reason::ConnectionError),
    ] {
        assert_eq!((end.is_ordinary(), end.reason()), (ordinary, reason), "{end}");
    }
}
