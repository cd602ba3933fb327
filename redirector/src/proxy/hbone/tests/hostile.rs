//! Frames that a peer in its senses does not send, written byte by byte. Each has its answer, ends what it should and no more, and
//! leaves no task behind. What takes TLS and a pod is in tests/suites/hostile.rs.

use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};

use super::*;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

// Kinds, flags and error codes: RFC 9113, sections 6 and 7.
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PUSH_PROMISE: u8 = 5;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const ACK: u8 = 1;
const END_HEADERS: u8 = 4;
const PROTOCOL_ERROR: u32 = 1;
const FLOW_CONTROL_ERROR: u32 = 3;
const FRAME_SIZE_ERROR: u32 = 6;
const CANCEL: u32 = 8;
const ENHANCE_YOUR_CALM: u32 = 11;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let mut frame = vec![length[1], length[2], length[3], kind, flags];
    frame.extend_from_slice(&stream.to_be_bytes());
    frame.extend_from_slice(payload);
    frame
}

/// A header field that is not indexed (RFC 7541, section 6.2.2), by the number of its name in the static table.
fn field(name: u8, value: &str) -> Vec<u8> {
    let mut field = vec![name, u8::try_from(value.len()).unwrap()];
    field.extend_from_slice(value.as_bytes());
    field
}

/// `:method: CONNECT` and `:authority`.
fn connect_fields() -> Vec<u8> {
    [field(2, "CONNECT"), field(1, "10.1.2.3:80")].concat()
}

fn connect(stream: u32) -> Vec<u8> {
    frame(HEADERS, END_HEADERS, stream, &connect_fields())
}

fn data(stream: u32, flags: u8, bytes: &[u8]) -> Vec<u8> {
    frame(DATA, flags, stream, bytes)
}

fn reset(stream: u32) -> Vec<u8> {
    frame(RST_STREAM, 0, stream, &CANCEL.to_be_bytes())
}

fn settings(id: u16, value: u32) -> Vec<u8> {
    frame(
        SETTINGS,
        0,
        0,
        &[&id.to_be_bytes()[..], &value.to_be_bytes()].concat(),
    )
}

/// A field with a value of so many bytes, by the rules for long integers (RFC 7541, section 5.1).
fn long_field(bytes: usize) -> Vec<u8> {
    let mut field = vec![0, 1, b'x', 127];
    let mut rest = bytes - 127;
    while rest >= 128 {
        field.push(u8::try_from(rest % 128).unwrap() | 128);
        rest /= 128;
    }
    field.push(u8::try_from(rest).unwrap());
    field.resize(field.len() + bytes, b'a');
    field
}

/// What a server says to a peer's bytes.
struct Peer {
    from: ReadHalf<DuplexStream>,
    to: WriteHalf<DuplexStream>,
    server: JoinHandle<Result<(), server::Error>>,
    tasks: TaskTracker,
    requests: Arc<AtomicUsize>,
}

impl Peer {
    /// A peer of a server whose applications send back what comes, or, `stalled`, read nothing.
    fn new(stalled: bool) -> Self {
        let (io, far) = tokio::io::duplex(256 << 10);
        let (tasks, requests) = (TaskTracker::new(), Arc::<AtomicUsize>::default());
        let (tracker, counter) = (tasks.clone(), requests.clone());
        let server = tokio::spawn(async move {
            let http2 = Http2Config::default();
            let window = WindowBudget::new(&http2).share();
            let drain = CancellationToken::new();
            server::serve(far, http2, window, Duration::from_secs(10), &drain, |connect| {
                counter.fetch_add(1, Ordering::SeqCst);
                tracker.spawn(application(connect, stalled));
            })
            .await
        });
        let (from, to) = tokio::io::split(io);
        Self {
            from,
            to,
            server,
            tasks,
            requests,
        }
    }

    /// The same, past the handshake.
    async fn begun(stalled: bool) -> Self {
        let mut peer = Self::new(stalled);
        let hello = [PREFACE, &frame(SETTINGS, 0, 0, &[])].concat();
        peer.says(&hello).await.unwrap();
        let ours = hears(&mut peer.from, |kind, flags, _, _| {
            (kind == SETTINGS && flags & ACK == 0).then_some(())
        });
        assert_eq!(ours.await, Some(()));
        peer.says(&frame(SETTINGS, ACK, 0, &[])).await.unwrap();
        peer
    }

    async fn says(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.to.write_all(bytes).await
    }

    /// A stream that is opened now carries bytes and its end, both ways.
    async fn is_served(&mut self, stream: u32) {
        let hello = data(stream, END_STREAM, b"hello");
        self.says(&[connect(stream), hello].concat()).await.unwrap();
        let mut heard = Vec::new();
        let ended = hears(&mut self.from, |kind, flags, id, payload| {
            assert!(kind != GOAWAY && !(kind == RST_STREAM && id == stream));
            if kind == DATA && id == stream {
                heard.extend_from_slice(payload);
                return (flags & END_STREAM != 0).then_some(());
            }
            None
        })
        .await;
        assert_eq!((ended, heard.as_slice()), (Some(()), b"hello".as_slice()));
    }

    /// Its connection and its streams' tasks end, once the peer has gone.
    async fn leaves(self) -> Result<(), server::Error> {
        drop((self.from, self.to));
        let ended = timeout(Duration::from_secs(120), self.server)
            .await
            .expect("the connection ends")
            .unwrap();
        self.tasks.close();
        timeout(Duration::from_secs(120), self.tasks.wait())
            .await
            .expect("no stream's task is left");
        ended
    }
}

/// Reads until a frame that `wanted` takes; `None` at the end.
async fn hears<T>(
    from: &mut ReadHalf<DuplexStream>,
    mut wanted: impl FnMut(u8, u8, u32, &[u8]) -> Option<T>,
) -> Option<T> {
    let next = async {
        loop {
            let mut head = [0; 9];
            from.read_exact(&mut head).await.ok()?;
            let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
            from.read_exact(&mut payload).await.ok()?;
            let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
            if let Some(found) = wanted(head[3], head[4], stream, &payload) {
                return Some(found);
            }
        }
    };
    timeout(Duration::from_secs(120), next)
        .await
        .expect("the server answers or leaves")
}

async fn application(connect: Connect, stalled: bool) {
    let Ok(mut stream) = connect.accept(HeaderMap::new()) else {
        return;
    };
    if stalled {
        stream.sink.refused().await;
        return;
    }
    while let Ok(Some(chunk)) = stream.source.chunk().await {
        if stream.sink.send(chunk).await.is_err() {
            return;
        }
    }
    let _ = stream.sink.finish();
}

fn reason(payload: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(payload[at..at + 4].try_into().unwrap())
}

/// What a peer's bytes lead to.
#[derive(Debug, PartialEq, Eq)]
enum Answer {
    /// The connection ends.
    Goaway(u32),
    /// The stream ends, and others go on.
    Reset(u32),
}

#[tokio::test(start_paused = true)]
async fn wrong_frames_end_their_stream_or_their_connection() {
    use Answer::{Goaway, Reset};
    let window = |stream, by: u32| frame(WINDOW_UPDATE, 0, stream, &by.to_be_bytes());
    let started = |rest: Vec<u8>| [connect(1), rest].concat();
    let half = frame(HEADERS, 0, 1, &connect_fields());
    // Where RFC 9113 has a narrower code, or ends the stream alone, h2 says PROTOCOL_ERROR and ends the connection: the peer is the
    // one that broke the rules.
    let table: Vec<(&str, Vec<u8>, Answer)> = vec![
        (
            "CONTINUATION without end",
            [half.clone(), frame(CONTINUATION, 0, 1, &[]).repeat(50)].concat(),
            Goaway(ENHANCE_YOUR_CALM),
        ),
        (
            "DATA within headers",
            [half, data(1, 0, b"x")].concat(),
            Goaway(PROTOCOL_ERROR),
        ),
        (
            "headers of a megabyte",
            frame(HEADERS, END_HEADERS, 1, &long_field((1 << 20) - 100)),
            Goaway(ENHANCE_YOUR_CALM),
        ),
        (
            "headers that cannot be decoded",
            frame(HEADERS, END_HEADERS, 1, &[0xff; 20]),
            Goaway(PROTOCOL_ERROR),
        ),
        (
            "the windows of a connection run over",
            window(0, i32::MAX as u32),
            Goaway(FLOW_CONTROL_ERROR),
        ),
        (
            "the window of a stream runs over",
            started(window(1, i32::MAX as u32)),
            Reset(FLOW_CONTROL_ERROR),
        ),
        ("no window at all", started(window(1, 0)), Goaway(PROTOCOL_ERROR)),
        (
            "windows that cannot be",
            settings(4, 1 << 31),
            Goaway(PROTOCOL_ERROR),
        ),
        ("frames that cannot be", settings(5, 1), Goaway(PROTOCOL_ERROR)),
        (
            "SETTINGS of a stream",
            frame(SETTINGS, 0, 1, &[]),
            Goaway(PROTOCOL_ERROR),
        ),
        (
            "half a setting",
            frame(SETTINGS, 0, 0, &[0; 3]),
            Goaway(PROTOCOL_ERROR),
        ),
        ("a short PING", frame(PING, 0, 0, &[0; 7]), Goaway(PROTOCOL_ERROR)),
        (
            "a frame that is too long",
            vec![0xff, 0xff, 0xff, DATA, 0, 0, 0, 0, 1],
            Goaway(FRAME_SIZE_ERROR),
        ),
        (
            "a promise of a client",
            started(frame(PUSH_PROMISE, END_HEADERS, 1, &[0, 0, 0, 2])),
            Goaway(PROTOCOL_ERROR),
        ),
        ("a server's stream", connect(2), Goaway(PROTOCOL_ERROR)),
        ("DATA before a request", data(1, 0, b"x"), Goaway(PROTOCOL_ERROR)),
        (
            "DATA after the end",
            started([data(1, END_STREAM, b"x"), data(1, 0, b"y")].concat()),
            Goaway(PROTOCOL_ERROR),
        ),
        (
            "DATA without bytes, again and again",
            started(data(1, 0, b"").repeat(200)),
            Goaway(ENHANCE_YOUR_CALM),
        ),
        (
            "CONNECT with a path",
            frame(
                HEADERS,
                END_HEADERS,
                1,
                &[connect_fields(), field(4, "/")].concat(),
            ),
            Reset(PROTOCOL_ERROR),
        ),
        (
            "requests taken back at once",
            (0..20_000)
                .flat_map(|n| [connect(2 * n + 1), reset(2 * n + 1)].concat())
                .collect(),
            Goaway(ENHANCE_YOUR_CALM),
        ),
    ];
    for (what, bytes, expected) in table {
        let mut peer = Peer::begun(false).await;
        let answer = {
            // Whoever is told to go may not be read to the end.
            let says = async { drop(peer.to.write_all(&bytes).await) };
            let hears = hears(&mut peer.from, |kind, _, stream, payload| match kind {
                GOAWAY => Some(Goaway(reason(payload, 4))),
                RST_STREAM if stream == 1 => Some(Reset(reason(payload, 0))),
                _ => None,
            });
            tokio::join!(says, hears).1
        };
        assert_eq!(answer.as_ref(), Some(&expected), "{what}");
        match expected {
            Reset(_) => peer.is_served(3).await,
            Goaway(_) => {
                let more = hears(&mut peer.from, |_, _, _, _| None::<()>).await;
                assert_eq!(more, None, "{what}: the connection ends");
            }
        }
        let _ = peer.leaves().await;
    }
}

/// Over the announced 64 KiB, and not so far that it is an attack.
#[tokio::test(start_paused = true)]
async fn long_headers_are_refused_and_the_connection_lives_on() {
    let mut peer = Peer::begun(false).await;
    let headers = [connect_fields(), long_field(70_000)].concat();
    peer.says(&frame(HEADERS, END_HEADERS, 1, &headers))
        .await
        .unwrap();
    let refused = hears(&mut peer.from, |kind, flags, stream, _| {
        (kind == HEADERS && stream == 1).then_some(flags & END_STREAM != 0)
    });
    assert_eq!(refused.await, Some(true));
    peer.is_served(3).await;
    assert_eq!(
        peer.requests.load(Ordering::SeqCst),
        1,
        "the long one is no request"
    );
    let _ = peer.leaves().await;
}

#[tokio::test(start_paused = true)]
async fn small_frames_that_nobody_reads_end_the_connection_before_they_fill_the_memory() {
    let mut peer = Peer::begun(true).await;
    // A byte takes 255 in memory; 4 MiB of such would fit into the stream's window.
    let bytes = [connect(1), data(1, 0, b"x").repeat(100_000)].concat();
    let answer = {
        let says = async { drop(peer.to.write_all(&bytes).await) };
        let hears = hears(&mut peer.from, |kind, _, _, payload| {
            (kind == GOAWAY).then(|| reason(payload, 4))
        });
        tokio::join!(says, hears).1
    };
    assert_eq!(answer, Some(ENHANCE_YOUR_CALM));
    let _ = peer.leaves().await;
}

/// The answers are not read, so they would pile up.
#[tokio::test(start_paused = true)]
async fn who_does_not_read_answers_is_read_no_further() {
    for (what, asks) in [
        ("PING", frame(PING, 0, 0, &[7; 8])),
        ("SETTINGS", settings(4, 70_000)),
        ("requests that are refused", Vec::new()),
    ] {
        let mut peer = Peer::begun(false).await;
        let flood: Vec<u8> = if asks.is_empty() {
            // Each gets a status of 400: GET is no CONNECT.
            let get = [vec![0x82, 0x87, 0x84], field(1, "10.1.2.3:80")].concat();
            (0..400_000)
                .flat_map(|n| frame(HEADERS, END_HEADERS | END_STREAM, 2 * n + 1, &get))
                .collect()
        } else {
            asks.repeat(400_000)
        };
        let written = timeout(Duration::from_secs(15), peer.says(&flood)).await;
        assert!(!matches!(written, Ok(Ok(()))), "{what}: all was taken");
        // Its own pings get no answer either.
        let ended = timeout(Duration::from_secs(120), &mut peer.server).await;
        assert!(ended.expect("the connection ends").unwrap().is_err(), "{what}");
        peer.tasks.close();
        timeout(Duration::from_secs(120), peer.tasks.wait())
            .await
            .expect("no stream's task is left");
    }
}

#[tokio::test(start_paused = true)]
async fn pings_every_ten_seconds_are_welcome() {
    let mut peer = Peer::begun(false).await;
    for round in 0..360_u32 {
        tokio::time::sleep(Duration::from_secs(10)).await;
        let opaque = u64::from(round).to_be_bytes();
        peer.says(&frame(PING, 0, 0, &opaque)).await.unwrap();
        // The server's own are answered on the way.
        let mut asked = None;
        let answered = hears(&mut peer.from, |kind, flags, _, payload| {
            assert_ne!(kind, GOAWAY);
            if kind == PING && flags & ACK == 0 {
                asked = Some(payload.to_vec());
            }
            (kind == PING && flags & ACK != 0 && payload == opaque).then_some(())
        });
        assert_eq!(answered.await, Some(()));
        if let Some(payload) = asked {
            peer.says(&frame(PING, ACK, 0, &payload)).await.unwrap();
        }
    }
    peer.is_served(1).await;
    let _ = peer.leaves().await;
}

#[tokio::test(start_paused = true)]
async fn who_stalls_in_the_preface_or_speaks_another_language_is_left() {
    for preface in [
        &b""[..],
        &PREFACE[..10],
        b"GET / HTTP/1.1\r\nHost: pod\r\n\r\n",
        &[0x16, 3, 1, 0, 200],
    ] {
        let mut peer = Peer::new(false);
        peer.says(preface).await.unwrap();
        let ended = timeout(Duration::from_secs(11), &mut peer.server).await;
        let ended = ended.expect("its time is over").unwrap();
        assert!(ended.is_err(), "{preface:?}");
    }
}
