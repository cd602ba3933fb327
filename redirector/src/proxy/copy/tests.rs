use std::sync::atomic::{AtomicU64, Ordering};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
    task::JoinHandle,
};

use super::*;

#[derive(Default)]
struct Count(AtomicU64);

impl Meter for Count {
    fn add(&self, bytes: u64) {
        self.0.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// One TCP connection: the far end, and our leg of it.
async fn leg() -> (TcpStream, Leg) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let far = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    (far, Leg::new(listener.accept().await.unwrap().0))
}

type Relayed = (bool, u64, u64);

/// A client and a server, with the copy between them.
async fn relayed() -> (TcpStream, TcpStream, JoinHandle<Relayed>) {
    let (client, mut local) = leg().await;
    let (server, mut remote) = leg().await;
    let task = tokio::spawn(async move {
        let (sent, received) = (Count::default(), Count::default());
        let result = {
            let (mut local_source, mut local_sink) = local.split();
            let (mut remote_source, mut remote_sink) = remote.split();
            both(
                (&mut local_source, &mut local_sink),
                (&mut remote_source, &mut remote_sink),
                (&sent, &received),
                Duration::from_secs(5),
            )
            .await
        };
        local.end(&result).await;
        remote.end(&result).await;
        (result.is_ok(), sent.0.into_inner(), received.0.into_inner())
    });
    (client, server, task)
}

fn is_reset(result: io::Result<usize>) -> bool {
    matches!(result, Err(error) if error.kind() == io::ErrorKind::ConnectionReset)
}

#[tokio::test]
async fn each_direction_ends_by_itself() {
    for client_first in [true, false] {
        let (client, server, task) = relayed().await;
        let (mut first, mut second) = if client_first {
            (client, server)
        } else {
            (server, client)
        };
        first.write_all(b"question").await.unwrap();
        first.shutdown().await.unwrap();
        let mut got = String::new();
        second.read_to_string(&mut got).await.unwrap();
        assert_eq!(got, "question");
        second.write_all(b"a long answer").await.unwrap();
        second.shutdown().await.unwrap();
        got.clear();
        first.read_to_string(&mut got).await.unwrap();
        assert_eq!(got, "a long answer");
        let counted = if client_first {
            (true, 8, 13)
        } else {
            (true, 13, 8)
        };
        assert_eq!(task.await.unwrap(), counted);
    }
}

#[tokio::test]
async fn many_bytes_arrive_as_they_were() {
    let (client, server, task) = relayed().await;
    let (mut client_read, mut client_write) = client.into_split();
    let (mut server_read, mut server_write) = server.into_split();
    let data = |seed: u32| -> Vec<u8> {
        (0..3_000_000_u32)
            .map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 13) as u8)
            .collect()
    };
    let (up, down) = (data(1), data(2));
    let write = async |half: &mut tokio::net::tcp::OwnedWriteHalf, bytes: &[u8]| {
        // Odd sizes, so that the bounds of buffers are not met.
        for chunk in bytes.chunks(77_777) {
            half.write_all(chunk).await.unwrap();
        }
        half.shutdown().await.unwrap();
    };
    let read = async |half: &mut tokio::net::tcp::OwnedReadHalf| {
        let mut got = Vec::new();
        half.read_to_end(&mut got).await.unwrap();
        got
    };
    let ((), (), got_up, got_down) = tokio::join!(
        write(&mut client_write, &up),
        write(&mut server_write, &down),
        read(&mut server_read),
        read(&mut client_read),
    );
    assert!(got_up == up && got_down == down);
    assert_eq!(task.await.unwrap(), (true, 3_000_000, 3_000_000));
}

#[tokio::test]
async fn a_reset_is_relayed_as_a_reset() {
    for client_resets in [true, false] {
        for half_closed in [true, false] {
            let (client, server, task) = relayed().await;
            let (mut first, mut second) = if client_resets {
                (client, server)
            } else {
                (server, client)
            };
            first.write_all(b"x").await.unwrap();
            let mut buffer = [0; 8];
            assert_eq!(second.read(&mut buffer).await.unwrap(), 1);
            if half_closed {
                // Nobody reads from `first` any more; its reset must be noticed all the same.
                first.shutdown().await.unwrap();
                assert_eq!(second.read(&mut buffer).await.unwrap(), 0);
            }
            first.set_zero_linger().unwrap();
            drop(first);
            if half_closed {
                assert!(!task.await.unwrap().0);
                let end = second.write_all(b"y").await;
                assert!(end.is_err() || second.write_all(b"y").await.is_err());
            } else {
                assert!(is_reset(second.read(&mut buffer).await));
                assert!(!task.await.unwrap().0);
            }
        }
    }
}

#[tokio::test]
async fn bytes_sent_before_a_reset_are_delivered() {
    let (client, mut server, task) = relayed().await;
    let mut client = client;
    // The server answers and closes without reading what the client sends: the kernel then resets.
    client.write_all(&[1; 10_000]).await.unwrap();
    server.peek(&mut [0; 1]).await.unwrap();
    server.write_all(&[2; 50_000]).await.unwrap();
    let mut got = vec![0; 50_000];
    client.read_exact(&mut got).await.unwrap();
    drop(server);
    assert!(is_reset(client.read(&mut [0; 1]).await));
    assert!(!task.await.unwrap().0);
}

#[tokio::test]
async fn a_cut_connection_is_reset_on_both_sides() {
    let (mut client, mut server, task) = relayed().await;
    task.abort();
    assert!(task.await.unwrap_err().is_cancelled());
    assert!(is_reset(client.read(&mut [0; 1]).await));
    assert!(is_reset(server.read(&mut [0; 1]).await));
}

#[tokio::test]
async fn an_application_that_resets_is_no_failure_of_ours() {
    assert!(
        Cut::Local(io::ErrorKind::ConnectionReset.into())
            .failure()
            .is_none()
    );
    assert!(Cut::Remote(io::ErrorKind::BrokenPipe.into()).failure().is_none());
    assert!(
        Cut::Remote(io::ErrorKind::ConnectionAborted.into())
            .failure()
            .is_some()
    );
    assert!(Cut::Remote(io::ErrorKind::TimedOut.into()).failure().is_some());
}
