//! A connection within a stream, through a gateway that forwards what it does not understand.

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;
use crate::proxy::hbone::nested::{Driver, StreamIo};

/// How the far end's connections ended, in order.
type Ends = tokio::sync::mpsc::UnboundedReceiver<Result<(), server::Error>>;

/// A world whose far end is a gateway: each stream to port 80 leads to a connection of its own to `on_far`; those to other ports
/// are reset once the first bytes have come.
fn gateway(on_far: impl Fn(Connect) + Send + Sync + 'static) -> (World, Ends) {
    let (ended, ends) = tokio::sync::mpsc::unbounded_channel();
    let on_far = Arc::new(on_far);
    let world = World::new(small(), PoolConfig::default(), move |connect| {
        let (on_far, ended) = (on_far.clone(), ended.clone());
        let forwards = connect.authority().ends_with(":80");
        tokio::spawn(async move {
            let mut stream = connect.accept(HeaderMap::new()).unwrap();
            if !forwards {
                stream.source.chunk().await.unwrap();
                return stream.sink.reset().await;
            }
            let (near, far) = tokio::io::duplex(8 << 10);
            tokio::spawn(async move {
                let window = WindowBudget::new(&small()).share();
                let drain = CancellationToken::new();
                let deadline = Duration::from_secs(10);
                let served =
                    server::serve(far, small(), window, deadline, &drain, |connect| on_far(connect)).await;
                let _ = ended.send(served);
            });
            let (mut read, mut write) = tokio::io::split(near);
            let (mut source, mut sink) = (stream.source, stream.sink);
            let up = async {
                while let Ok(Some(chunk)) = source.chunk().await {
                    if write.write_all(&chunk).await.is_err() {
                        return;
                    }
                }
                let _ = write.shutdown().await;
            };
            let down = async {
                let mut buffer = vec![0; 4096];
                while let Ok(bytes @ 1..) = read.read(&mut buffer).await {
                    let chunk = Bytes::copy_from_slice(&buffer[..bytes]);
                    if sink.send(chunk).await.is_err() {
                        return;
                    }
                }
                let _ = sink.finish();
            };
            tokio::join!(up, down);
        });
    });
    (world, ends)
}

async fn open_within(world: &World, authority: &str) -> Result<(Stream, Driver), Error> {
    let outer = world.open(authority).await.unwrap();
    let dialled = Dialled {
        io: StreamIo::new(outer),
        peer: Some("spiffe://td/ns/far/sa/cart".parse().unwrap()),
        proof: Proof::default(),
    };
    world
        .pool
        .open_alone(TUNNEL.parse().unwrap(), request(authority), dialled)
        .await
}

/// Opens, and has the driver run for as long as `act` and the connection last.
async fn with_stream<T>(
    world: &World,
    authority: &str,
    act: impl AsyncFnOnce(&mut Stream) -> T,
) -> (T, tokio::task::JoinHandle<()>) {
    let (mut stream, driver) = open_within(world, authority).await.unwrap();
    assert_eq!(stream.peer().unwrap().namespace(), "far");
    let driver = tokio::spawn(driver);
    (act(&mut stream).await, driver)
}

async fn ends(driver: tokio::task::JoinHandle<()>) {
    timeout(Duration::from_secs(60), driver)
        .await
        .expect("the connection ends with its stream")
        .unwrap();
}

#[tokio::test]
async fn bytes_and_ends_go_through_both_and_each_has_its_own_connection() {
    let (world, mut far) = gateway(echo);
    for round in 0..3 {
        let ((), driver) = with_stream(&world, "cart.shop:80", async |stream| {
            echoes(stream, &pattern(3 << 20)).await;
        })
        .await;
        ends(driver).await;
        let end = timeout(Duration::from_secs(60), far.recv())
            .await
            .unwrap()
            .unwrap();
        assert!(end.is_ok(), "{round}: {end:?}");
    }
    assert_eq!(world.dials(), 1, "the outer one is pooled");
}

#[tokio::test]
async fn a_half_closed_connection_goes_on_the_other_way() {
    let (heard, mut hears) = tokio::sync::mpsc::channel(1);
    let (world, _far) = gateway(move |connect| {
        let heard = heard.clone();
        tokio::spawn(async move {
            let mut stream = connect.accept(HeaderMap::new()).unwrap();
            stream.sink.send(Bytes::from_static(b"220 ready")).await.unwrap();
            stream.sink.finish().unwrap();
            heard.send(read_all(&mut stream.source).await).await.unwrap();
        });
    });
    let ((), driver) = with_stream(&world, "cart.shop:80", async |stream| {
        assert_eq!(read_all(&mut stream.source).await.unwrap(), b"220 ready");
        stream.sink.send(Bytes::from_static(b"QUIT")).await.unwrap();
        stream.sink.finish().unwrap();
        assert_eq!(hears.recv().await.unwrap().unwrap(), b"QUIT");
    })
    .await;
    ends(driver).await;
}

#[tokio::test]
async fn resets_go_through_both_after_what_was_sent() {
    let (ended, mut far_end) = tokio::sync::mpsc::channel(1);
    let (world, _far) = gateway(move |connect| {
        let ended = ended.clone();
        tokio::spawn(async move {
            let mut stream = connect.accept(HeaderMap::new()).unwrap();
            let word = stream.source.chunk().await.unwrap().unwrap();
            if *word == *b"reset" {
                stream.sink.send(Bytes::from_static(b"last words")).await.unwrap();
                stream.sink.reset().await;
            } else {
                stream.sink.send(Bytes::from_static(b"here")).await.unwrap();
                ended.send(read_all(&mut stream.source).await).await.unwrap();
            }
        });
    });
    let ((), driver) = with_stream(&world, "cart.shop:80", async |stream| {
        stream.sink.send(Bytes::from_static(b"reset")).await.unwrap();
        assert_eq!(stream.source.chunk().await.unwrap().unwrap(), &b"last words"[..]);
        let end = stream.source.chunk().await.unwrap_err();
        assert_eq!(end.kind(), io::ErrorKind::ConnectionReset);
    })
    .await;
    ends(driver).await;
    for resets in [true, false] {
        // Reset, or the whole connection dropped in the middle.
        let (mut stream, driver) = open_within(&world, "cart.shop:80").await.unwrap();
        let driver = tokio::spawn(driver);
        stream.sink.send(Bytes::from_static(b"stay")).await.unwrap();
        assert_eq!(stream.source.chunk().await.unwrap().unwrap(), &b"here"[..]);
        if resets {
            stream.sink.reset().await;
            drop(stream);
            ends(driver).await;
        } else {
            driver.abort();
            drop(stream);
        }
        let end = timeout(Duration::from_secs(60), far_end.recv())
            .await
            .unwrap()
            .unwrap();
        let kind = end.unwrap_err().kind();
        let expected = if resets {
            io::ErrorKind::ConnectionReset
        } else {
            io::ErrorKind::ConnectionAborted
        };
        assert_eq!(kind, expected, "resets: {resets}");
    }
}

/// A gateway may give up what it has not passed on when a stream is reset, though it has ended: so it is not, until the far end
/// has ended it as well.
#[tokio::test(start_paused = true)]
async fn the_outer_stream_is_kept_until_the_far_end_has_ended_too() {
    let (resets, mut was_reset) = tokio::sync::mpsc::channel(1);
    let world = World::new(small(), PoolConfig::default(), move |connect| {
        let resets = resets.clone();
        tokio::spawn(async move {
            let stream = connect.accept(HeaderMap::new()).unwrap();
            let (mut source, mut sink) = (stream.source, stream.sink);
            let (near, far) = tokio::io::duplex(64 << 10);
            tokio::spawn(async move {
                let window = WindowBudget::new(&small()).share();
                let drain = CancellationToken::new();
                server::serve(far, small(), window, Duration::from_secs(10), &drain, echo).await
            });
            let (mut read, mut write) = tokio::io::split(near);
            let down = tokio::spawn(async move {
                let mut buffer = vec![0; 4096];
                while let Ok(bytes @ 1..) = read.read(&mut buffer).await {
                    let chunk = Bytes::copy_from_slice(&buffer[..bytes]);
                    sink.send(chunk).await.unwrap();
                }
                sink
            });
            while let Some(chunk) = source.chunk().await.unwrap() {
                write.write_all(&chunk).await.unwrap();
            }
            // A gateway that is slow to pass on the end.
            sleep(Duration::from_secs(5)).await;
            write.shutdown().await.unwrap();
            let mut sink = down.await.unwrap();
            let reset = timeout(Duration::from_secs(1), sink.refused()).await.is_ok();
            sink.finish().unwrap();
            resets.send(reset).await.unwrap();
        });
    });
    let ((), driver) = with_stream(&world, "cart.shop:80", async |stream| {
        echoes(stream, &pattern(100_000)).await;
    })
    .await;
    let was_reset = timeout(Duration::from_secs(60), was_reset.recv()).await;
    assert_eq!(was_reset.expect("the gateway passes the end on"), Some(false));
    ends(driver).await;
}

#[tokio::test]
async fn what_the_far_end_refuses_and_what_the_gateway_cuts_off_are_errors() {
    let (world, mut far) = gateway(|connect| connect.refuse(StatusCode::UNAUTHORIZED));
    let error = open_within(&world, "cart.shop:80").await.err().unwrap();
    assert!(
        matches!(error, Error::Status(StatusCode::UNAUTHORIZED)),
        "{error}"
    );
    // Nothing of it is left.
    timeout(Duration::from_secs(60), far.recv())
        .await
        .unwrap()
        .unwrap()
        .ok();
    let error = open_within(&world, "cart.shop:99").await.err().unwrap();
    assert!(matches!(error, Error::Http2 { .. }), "{error}");
    assert_eq!(world.dials(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_inner_connection_that_nobody_reads_stops_no_other() {
    let (world, _far) = gateway(|connect| {
        tokio::spawn(async move {
            let mut stream = connect.accept(HeaderMap::new()).unwrap();
            if connect_is_stalled(&mut stream).await {
                std::future::pending::<()>().await;
            }
            while let Ok(Some(chunk)) = stream.source.chunk().await {
                if stream.sink.send(chunk).await.is_err() {
                    return;
                }
            }
            let _ = stream.sink.finish();
        });
    });
    let mut stalled = Vec::new();
    for _ in 0..10 {
        let (mut stream, driver) = open_within(&world, "cart.shop:80").await.unwrap();
        let driver = tokio::spawn(driver);
        stream.sink.send(Bytes::from_static(b"stall")).await.unwrap();
        assert!(fill(&mut stream.sink).await >= 60 << 10);
        stalled.push((stream, driver));
    }
    let ((), driver) = with_stream(&world, "cart.shop:80", async |stream| {
        stream.sink.send(Bytes::from_static(b"go on")).await.unwrap();
        echoes(stream, &pattern(1 << 20)).await;
    })
    .await;
    ends(driver).await;
    assert_eq!(world.dials(), 1);
}

async fn connect_is_stalled(stream: &mut server::Stream) -> bool {
    let word = stream.source.chunk().await.unwrap().unwrap();
    word.starts_with(b"stall")
}
