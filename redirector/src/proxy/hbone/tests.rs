//! Client, pool and server against each other, over byte streams in memory.

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use bytes::Bytes;
use http::{HeaderMap, Method, Request, StatusCode};
use tokio::{io::DuplexStream, task::JoinHandle};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    client::{Dialled, Error, Stream},
    pool::{Key, Pool, PoolConfig},
    server::{self, Connect},
    window::WindowBudget,
    *,
};
use crate::{
    identity::tls::Proof,
    mesh::workload::WorkloadUid,
    proxy::copy::{Refused, Sink, Source},
};

mod faults;
mod hostile;
mod nested;
mod sharing;

const TUNNEL: &str = "10.1.2.3:15008";

/// A pool, and the far end of whatever it dials.
struct World {
    pool: Pool,
    tasks: TaskTracker,
    kill: CancellationToken,
    http2: Http2Config,
    on_connect: Arc<dyn Fn(Connect) + Send + Sync>,
    /// Connections dialled, being dialled, and most at a time.
    dials: AtomicUsize,
    dialling: AtomicUsize,
    most_dialling: AtomicUsize,
    servers: Mutex<Vec<Server>>,
}

struct Server {
    drain: CancellationToken,
    task: JoinHandle<Result<(), server::Error>>,
}

fn small() -> Http2Config {
    Http2Config {
        stream_window_bytes: 64 << 10,
        connection_window_bytes: 128 << 10,
        ..Http2Config::default()
    }
}

impl World {
    fn new(
        http2: Http2Config,
        config: PoolConfig,
        on_connect: impl Fn(Connect) + Send + Sync + 'static,
    ) -> Self {
        let (tasks, kill) = (TaskTracker::new(), CancellationToken::new());
        Self {
            pool: Pool::new(http2, config, tasks.clone(), kill.clone()),
            tasks,
            kill,
            http2,
            on_connect: Arc::new(on_connect),
            dials: AtomicUsize::new(0),
            dialling: AtomicUsize::new(0),
            most_dialling: AtomicUsize::new(0),
            servers: Mutex::default(),
        }
    }

    async fn dial(&self) -> Result<Dialled<DuplexStream>, Error> {
        let now = self.dialling.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_dialling.fetch_max(now, Ordering::SeqCst);
        // Others have every chance to begin another meanwhile.
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
        self.dialling.fetch_sub(1, Ordering::SeqCst);
        self.dials.fetch_add(1, Ordering::SeqCst);
        let (near, far) = tokio::io::duplex(64 << 10);
        let drain = CancellationToken::new();
        let (http2, token, on_connect) = (self.http2, drain.clone(), self.on_connect.clone());
        let task = tokio::spawn(async move {
            let window = WindowBudget::new(&http2).share();
            server::serve(far, http2, window, Duration::from_secs(10), &token, |connect| {
                on_connect(connect)
            })
            .await
        });
        self.servers.lock().unwrap().push(Server { drain, task });
        Ok(Dialled {
            io: near,
            peer: Some("spiffe://td/ns/shop/sa/cart".parse().unwrap()),
            proof: Proof::default(),
        })
    }

    async fn open(&self, authority: &str) -> Result<Stream, Arc<Error>> {
        self.pool.open(&key(), &request(authority), || self.dial()).await
    }

    fn dials(&self) -> usize {
        self.dials.load(Ordering::SeqCst)
    }

    fn last_server(&self) -> Server {
        self.servers.lock().unwrap().pop().unwrap()
    }
}

fn key() -> Key {
    Key {
        source: "spiffe://td/ns/shop/sa/web".parse().unwrap(),
        workload: WorkloadUid("c//Pod/shop/cart-0".into()),
        expected: ["spiffe://td/ns/shop/sa/cart".parse().unwrap()].into(),
        tunnel: TUNNEL.parse().unwrap(),
    }
}

fn request(authority: &str) -> Request<()> {
    Request::builder()
        .method(Method::CONNECT)
        .uri(authority)
        .body(())
        .unwrap()
}

/// Answers 200 and sends back what comes, then the end.
fn echo(connect: Connect) {
    tokio::spawn(async move {
        let mut stream = connect.accept(HeaderMap::new()).unwrap();
        while let Ok(Some(chunk)) = stream.source.chunk().await {
            if stream.sink.send(chunk).await.is_err() {
                return;
            }
        }
        let _ = stream.sink.finish();
    });
}

async fn read_all(source: &mut impl Source) -> io::Result<Vec<u8>> {
    let mut all = Vec::new();
    while let Some(chunk) = source.chunk().await? {
        all.extend_from_slice(&chunk);
    }
    Ok(all)
}

/// Sends `data` and the end, reads to the end, and compares.
async fn echoes(stream: &mut Stream, data: &[u8]) {
    let send = async {
        for chunk in data.chunks(33_333) {
            stream.sink.send(Bytes::copy_from_slice(chunk)).await.unwrap();
        }
        stream.sink.finish().unwrap();
    };
    let both = async { tokio::join!(send, read_all(&mut stream.source)) };
    // A stream that starves would otherwise wait for ever.
    let ((), got) = timeout(Duration::from_secs(60), both)
        .await
        .expect("the stream is served");
    assert!(got.unwrap() == data);
}

fn pattern(bytes: u32) -> Vec<u8> {
    (0..bytes)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 11) as u8)
        .collect()
}

#[tokio::test]
async fn bytes_and_ends_go_both_ways() {
    let world = World::new(Http2Config::default(), PoolConfig::default(), echo);
    let mut stream = world.open("10.1.2.3:80").await.unwrap();
    assert_eq!(stream.peer().unwrap().service_account(), "cart");
    echoes(&mut stream, b"hello").await;
    // The far end speaks first, ends, and still listens.
    let (heard, mut hears) = tokio::sync::mpsc::channel(1);
    let world = World::new(Http2Config::default(), PoolConfig::default(), move |connect| {
        let heard = heard.clone();
        tokio::spawn(async move {
            let mut stream = connect.accept(HeaderMap::new()).unwrap();
            stream.sink.send(Bytes::from_static(b"220 ready")).await.unwrap();
            stream.sink.finish().unwrap();
            heard.send(read_all(&mut stream.source).await).await.unwrap();
        });
    });
    let mut stream = world.open("10.1.2.3:25").await.unwrap();
    assert_eq!(read_all(&mut stream.source).await.unwrap(), b"220 ready");
    stream.sink.send(Bytes::from_static(b"QUIT")).await.unwrap();
    stream.sink.finish().unwrap();
    assert_eq!(hears.recv().await.unwrap().unwrap(), b"QUIT");
    assert_eq!(world.dials(), 1);
}

#[tokio::test]
async fn headers_arrive_with_the_request_and_with_the_answer() {
    let world = World::new(Http2Config::default(), PoolConfig::default(), |connect| {
        let mut answer = HeaderMap::new();
        answer.insert("baggage", connect.headers()["baggage"].clone());
        tokio::spawn(async move {
            let mut stream = connect.accept(answer).unwrap();
            stream.sink.finish().unwrap();
        });
    });
    let mut request = request("10.1.2.3:80");
    request
        .headers_mut()
        .insert("baggage", "service.name=web".parse().unwrap());
    let stream = world.pool.open(&key(), &request, || world.dial()).await.unwrap();
    assert_eq!(stream.headers.unwrap()["baggage"], "service.name=web");
}

#[tokio::test]
async fn much_data_arrives_as_it_was() {
    for http2 in [Http2Config::default(), small()] {
        let world = World::new(http2, PoolConfig::default(), echo);
        let mut stream = world.open("10.1.2.3:80").await.unwrap();
        echoes(&mut stream, &pattern(12 << 20)).await;
    }
}

#[tokio::test]
async fn many_streams_share_a_connection() {
    let world = World::new(small(), PoolConfig::default(), echo);
    let echoed = (0..100).map(|i| {
        let world = &world;
        async move {
            echoes(
                &mut world.open("10.1.2.3:80").await.unwrap(),
                &pattern(10_000 + i),
            )
            .await
        }
    });
    futures_util::future::join_all(echoed).await;
    assert_eq!(world.dials(), 1);
}

#[tokio::test]
async fn a_refusal_carries_its_status() {
    let world = World::new(Http2Config::default(), PoolConfig::default(), |connect| {
        let status = connect.authority().rsplit(':').next().unwrap().parse().unwrap();
        connect.refuse(StatusCode::from_u16(status).unwrap());
    });
    for status in [400, 401, 503] {
        let error = world.open(&format!("10.1.2.3:{status}")).await.unwrap_err();
        assert!(
            matches!(&*error, Error::Status(got) if got.as_u16() == status),
            "{error}"
        );
    }
    let error = world.open("10.1.2.3:401").await.unwrap_err();
    assert_eq!(error.to_string(), "http status: 401 Unauthorized");
    assert_eq!(world.dials(), 1, "a refusal says nothing against the connection");
}

/// An HTTP/2 client that is not ours, on a connection to our server.
async fn plain_client(world: &World) -> h2::client::SendRequest<Bytes> {
    let io = world.dial().await.unwrap().io;
    let (sender, connection) = h2::client::handshake(io).await.unwrap();
    tokio::spawn(connection);
    sender
}

#[tokio::test]
async fn other_methods_are_bad_requests_and_failures_are_bare() {
    let world = World::new(Http2Config::default(), PoolConfig::default(), |connect| {
        connect.refuse(StatusCode::SERVICE_UNAVAILABLE);
    });
    let mut sender = plain_client(&world).await.ready().await.unwrap();
    let get = Request::get("http://10.1.2.3:80/").body(()).unwrap();
    for (request, end, status) in [
        (get.clone(), true, 400),
        (get, false, 400),
        (request("10.1.2.3:80"), false, 503),
    ] {
        let response = sender.send_request(request, end).unwrap().0.await.unwrap();
        assert_eq!(response.status(), status);
        assert!(response.headers().is_empty());
        assert!(response.body().is_end_stream());
    }
}

#[tokio::test]
async fn a_peer_that_does_not_speak_http2_is_left() {
    tokio::time::pause();
    let (_silent, far) = tokio::io::duplex(1024);
    let drain = CancellationToken::new();
    let served = server::serve(
        far,
        Http2Config::default(),
        WindowBudget::new(&Http2Config::default()).share(),
        Duration::from_secs(10),
        &drain,
        |_| {},
    )
    .await;
    assert!(matches!(served, Err(server::Error::HandshakeTimeout { .. })));
}

/// Answers 200 and does nothing more; the streams are kept.
fn stall() -> impl Fn(Connect) + Send + Sync + 'static {
    let kept = Mutex::new(Vec::new());
    move |connect| {
        if connect.authority().ends_with(":80") {
            echo(connect);
        } else {
            kept.lock()
                .unwrap()
                .push(connect.accept(HeaderMap::new()).unwrap());
        }
    }
}

/// Sends until the stream takes no more.
async fn fill(sink: &mut impl Sink) -> usize {
    let mut sent = 0;
    let filled = async {
        loop {
            sink.send(Bytes::from_static(&[7; 4096])).await.unwrap();
            sent += 4096;
        }
    };
    let never: Result<(), _> = timeout(Duration::from_secs(5), filled).await;
    assert!(never.is_err());
    sent
}

#[tokio::test(start_paused = true)]
async fn streams_that_nobody_reads_do_not_stop_others() {
    let world = World::new(small(), PoolConfig::default(), stall());
    let mut stalled = Vec::new();
    for _ in 0..30 {
        let mut stream = world.open("10.1.2.3:99").await.unwrap();
        assert!(
            fill(&mut stream.sink).await >= 64 << 10,
            "each has its own window"
        );
        stalled.push(stream);
    }
    echoes(&mut world.open("10.1.2.3:80").await.unwrap(), &pattern(1 << 20)).await;
    assert_eq!(world.dials(), 1);
}

#[tokio::test(start_paused = true)]
async fn streams_that_the_client_does_not_read_do_not_stop_others() {
    let world = World::new(small(), PoolConfig::default(), |connect| {
        if connect.authority().ends_with(":80") {
            return echo(connect);
        }
        tokio::spawn(async move {
            let mut stream = connect.accept(HeaderMap::new()).unwrap();
            fill(&mut stream.sink).await;
            std::future::pending::<()>().await;
        });
    });
    let mut stalled = Vec::new();
    for _ in 0..30 {
        stalled.push(world.open("10.1.2.3:99").await.unwrap());
    }
    sleep(Duration::from_secs(6)).await;
    echoes(&mut world.open("10.1.2.3:80").await.unwrap(), &pattern(1 << 20)).await;
    assert_eq!(world.dials(), 1);
}

#[tokio::test(start_paused = true)]
async fn cancelled_streams_give_their_window_back() {
    // Whoever drops it, with a full window unread, and whoever had sent that.
    let world = World::new(small(), PoolConfig::default(), |connect| {
        match connect.authority().rsplit(':').next().unwrap() {
            "80" => echo(connect),
            "81" => drop(tokio::spawn(async move {
                let mut stream = connect.accept(HeaderMap::new()).unwrap();
                while stream.sink.send(Bytes::from_static(&[7; 4096])).await.is_ok() {}
            })),
            _ => drop(tokio::spawn(async move {
                let _stream = connect.accept(HeaderMap::new()).unwrap();
                sleep(Duration::from_secs(6)).await;
            })),
        }
    });
    for _ in 0..40 {
        let stream = world.open("10.1.2.3:81").await.unwrap();
        sleep(Duration::from_secs(1)).await;
        drop(stream);
        let mut stream = world.open("10.1.2.3:82").await.unwrap();
        fill(&mut stream.sink).await;
        drop(stream);
    }
    echoes(&mut world.open("10.1.2.3:80").await.unwrap(), &pattern(1 << 20)).await;
    assert_eq!(world.dials(), 1);
}

#[tokio::test]
async fn a_stream_cut_short_is_reset_after_what_was_sent() {
    let (ends, mut end) = tokio::sync::mpsc::channel(1);
    let world = World::new(Http2Config::default(), PoolConfig::default(), move |connect| {
        let ends = ends.clone();
        tokio::spawn(async move {
            let mut stream = connect.accept(HeaderMap::new()).unwrap();
            let word = stream.source.chunk().await.unwrap().unwrap();
            stream.sink.send(Bytes::from_static(b"last words")).await.unwrap();
            if *word == *b"read" {
                ends.send(read_all(&mut stream.source).await).await.unwrap();
            } else {
                stream.sink.reset().await;
            }
        });
    });
    // The far end resets it.
    let mut stream = world.open("10.1.2.3:80").await.unwrap();
    stream.sink.send(Bytes::from_static(b"drop")).await.unwrap();
    assert_eq!(stream.source.chunk().await.unwrap().unwrap(), &b"last words"[..]);
    assert_eq!(
        stream.source.chunk().await.unwrap_err().kind(),
        io::ErrorKind::ConnectionReset
    );
    assert!(
        matches!(stream.sink.refused().await, Refused::Broken(error) if error.kind() == io::ErrorKind::ConnectionReset)
    );
    assert!(stream.sink.send(Bytes::from_static(b"x")).await.is_err());
    // We do, and then by dropping it.
    let mut stream = world.open("10.1.2.3:80").await.unwrap();
    stream.sink.send(Bytes::from_static(b"read")).await.unwrap();
    assert_eq!(stream.source.chunk().await.unwrap().unwrap(), &b"last words"[..]);
    stream.sink.send(Bytes::from_static(b"our last")).await.unwrap();
    stream.sink.reset().await;
    assert_eq!(
        end.recv().await.unwrap().unwrap_err().kind(),
        io::ErrorKind::ConnectionReset
    );
    let mut stream = world.open("10.1.2.3:80").await.unwrap();
    stream.sink.send(Bytes::from_static(b"read")).await.unwrap();
    assert!(stream.source.chunk().await.unwrap().is_some());
    drop(stream);
    assert_eq!(
        end.recv().await.unwrap().unwrap_err().kind(),
        io::ErrorKind::ConnectionReset
    );
    assert_eq!(world.dials(), 1);
}

#[tokio::test]
async fn a_far_end_that_has_heard_enough_is_no_error() {
    let world = World::new(Http2Config::default(), PoolConfig::default(), |connect| {
        tokio::spawn(async move {
            let mut stream = connect.accept(HeaderMap::new()).unwrap();
            stream.sink.send(Bytes::from_static(b"answer")).await.unwrap();
            // Dropped with its own direction ended: RST_STREAM(NO_ERROR).
            stream.sink.finish().unwrap();
        });
    });
    let mut stream = world.open("10.1.2.3:80").await.unwrap();
    assert!(matches!(stream.sink.refused().await, Refused::Unwanted));
    assert_eq!(read_all(&mut stream.source).await.unwrap(), b"answer");
}

#[tokio::test]
async fn a_lost_connection_is_an_abort_and_is_replaced() {
    let world = World::new(Http2Config::default(), PoolConfig::default(), echo);
    let mut stream = world.open("10.1.2.3:80").await.unwrap();
    let server = world.last_server();
    server.task.abort();
    // Nothing has been read from the connection since; the pool cannot know.
    let mut other = world.open("10.1.2.3:80").await.unwrap();
    echoes(&mut other, b"hello").await;
    assert_eq!(world.dials(), 2);
    assert_eq!(
        stream.source.chunk().await.unwrap_err().kind(),
        io::ErrorKind::ConnectionAborted
    );
}

#[tokio::test]
async fn a_connection_that_goes_away_keeps_its_streams_and_gets_no_more() {
    let world = World::new(Http2Config::default(), PoolConfig::default(), echo);
    let mut stream = world.open("10.1.2.3:80").await.unwrap();
    stream.sink.send(Bytes::from_static(b"one")).await.unwrap();
    assert_eq!(stream.source.chunk().await.unwrap().unwrap(), &b"one"[..]);
    let server = world.last_server();
    server.drain.cancel();
    let mut other = world.open("10.1.2.3:80").await.unwrap();
    // It may have been opened before the peer's word came; soon it is not.
    while world.dials() == 1 {
        echoes(&mut other, b"x").await;
        other = world.open("10.1.2.3:80").await.unwrap();
    }
    echoes(&mut stream, b"two").await;
    drop(stream);
    assert!(server.task.await.unwrap().is_ok(), "it ends with its last stream");
    echoes(&mut other, b"three").await;
    assert_eq!(world.dials(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_black_hole_ends_by_ping() {
    let world = World::new(Http2Config::default(), PoolConfig::default(), echo);
    // The far end of the first connection takes everything and says nothing after its first answer.
    let (near, far) = tokio::io::duplex(1 << 20);
    let io = Mutex::new(Some(near));
    let hole = tokio::spawn(async move {
        let mut connection = h2::server::handshake(far).await.unwrap();
        let (_, mut respond) = connection.accept().await.unwrap().unwrap();
        respond.send_response(http::Response::new(()), false).unwrap();
        let answered = timeout(Duration::from_secs(1), connection.accept()).await;
        assert!(answered.is_err());
        std::future::pending::<()>().await;
        drop((connection, respond));
    });
    let (key, request) = (key(), request("10.1.2.3:80"));
    let dial = async || {
        Ok(Dialled {
            io: io.lock().unwrap().take().unwrap(),
            peer: None,
            proof: Proof::default(),
        })
    };
    let mut stream = world.pool.open(&key, &request, dial).await.unwrap();
    let begun = tokio::time::Instant::now();
    assert_eq!(
        stream.source.chunk().await.unwrap_err().kind(),
        io::ErrorKind::ConnectionAborted
    );
    assert!(
        begun.elapsed() <= Duration::from_secs(31),
        "{:?}",
        begun.elapsed()
    );
    echoes(&mut world.open("10.1.2.3:80").await.unwrap(), b"hello").await;
    assert_eq!(world.dials(), 1);
    hole.abort();
}

#[tokio::test(start_paused = true)]
async fn a_server_leaves_a_client_that_answers_no_ping() {
    let world = World::new(Http2Config::default(), PoolConfig::default(), echo);
    let io = world.dial().await.unwrap().io;
    let (_sender, connection) = h2::client::Builder::new()
        .handshake::<_, Bytes>(io)
        .await
        .unwrap();
    // Never polled again.
    let _connection = connection;
    let end = world.last_server().task.await.unwrap();
    assert!(matches!(end, Err(server::Error::Dead { .. })), "{end:?}");
}

#[test]
fn the_connection_window_is_never_less_than_its_streams_can_hold() {
    let config = Http2Config::default();
    assert_eq!(config.connection_window(0), 16 << 20);
    assert_eq!(config.connection_window(3), 16 << 20);
    assert_eq!(config.connection_window(4), 20 << 20);
    assert_eq!(config.connection_window(200), 201 * (4 << 20));
    assert_eq!(config.connection_window(usize::MAX), (1 << 31) - 1);
}

#[tokio::test]
async fn requests_given_up_are_noticed_and_are_no_attack() {
    let (given_up, mut noticed) = tokio::sync::mpsc::channel(100);
    let world = World::new(
        Http2Config::default(),
        PoolConfig::default(),
        move |mut connect| {
            if connect.authority().ends_with(":80") {
                return echo(connect);
            }
            let given_up = given_up.clone();
            tokio::spawn(async move {
                connect.abandoned().await;
                given_up.send(()).await.unwrap();
            });
        },
    );
    let mut first = world.open("10.1.2.3:80").await.unwrap();
    // Some are given up once the far end has them, and a crowd at the instant they are made.
    let mut waiting = Box::pin(world.open("10.1.2.3:99"));
    assert!(timeout(Duration::from_millis(50), &mut waiting).await.is_err());
    drop(waiting);
    noticed.recv().await.unwrap();
    for _ in 0..3 {
        let mut crowd: Vec<_> = (0..99).map(|_| Box::pin(world.open("10.1.2.3:99"))).collect();
        for request in &mut crowd {
            assert!(futures_util::poll!(request).is_pending());
        }
        drop(crowd);
        tokio::task::yield_now().await;
    }
    echoes(&mut first, b"still here").await;
    echoes(
        &mut world.open("10.1.2.3:80").await.unwrap(),
        b"and so is the connection",
    )
    .await;
    assert_eq!(world.dials(), 1);
}
