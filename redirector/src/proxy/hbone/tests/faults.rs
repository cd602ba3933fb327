//! A link, or a peer behind it, that fails at any byte and at any frame. Whatever happens: every request ends with a stream or an
//! error in its time, what arrives is a prefix of what was sent, its end is never taken for a clean one when it is none, and
//! nothing is left of it in the pool.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::*;

/// What becomes of one direction of a link, after so many bytes of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// Nothing arrives any more, and nobody says so.
    Stall,
    /// The direction ends as if all had been said.
    Truncate,
    /// The link breaks, both ways.
    Reset,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    ToServer,
    ToClient,
}

/// What a link does wrong.
#[derive(Debug, Clone, Copy)]
enum Wrong {
    Nothing,
    Bytes {
        fault: Fault,
        way: Way,
        after: usize,
    },
    /// The server says GOAWAY before its frame of this number.
    Goaway {
        before: usize,
        last_stream: u32,
        reason: u32,
    },
}

/// The client's end of a link that does something wrong.
struct Link {
    /// `None` once it is broken.
    io: Option<DuplexStream>,
    wrong: Wrong,
    read: usize,
    written: usize,
    /// From the server: frames so far, bytes of an unfinished one, and what the client has not read yet.
    frames: usize,
    partial: Vec<u8>,
    ready: Vec<u8>,
}

impl Link {
    fn new(io: DuplexStream, wrong: Wrong) -> Self {
        Self {
            io: Some(io),
            wrong,
            read: 0,
            written: 0,
            frames: 0,
            partial: Vec::new(),
            ready: Vec::new(),
        }
    }

    /// What happens to a direction that has carried `carried` bytes, and how many it may carry yet.
    fn fault(&self, on: Way, carried: usize) -> (Option<Fault>, usize) {
        match self.wrong {
            Wrong::Bytes { fault, way, after } if way == on => (
                Some(fault).filter(|_| carried >= after),
                after.saturating_sub(carried),
            ),
            _ => (None, usize::MAX),
        }
    }

    /// Takes whole frames from the server over to the client, a GOAWAY before one of them.
    fn sort(&mut self) {
        const HEADER: usize = 9;
        while self.partial.len() >= HEADER {
            let length = u32::from_be_bytes([0, self.partial[0], self.partial[1], self.partial[2]]) as usize;
            if self.partial.len() < HEADER + length {
                return;
            }
            if let Wrong::Goaway {
                before,
                last_stream,
                reason,
            } = self.wrong
                && before == self.frames
            {
                self.ready.extend_from_slice(&[0, 0, 8, 7, 0, 0, 0, 0, 0]);
                self.ready.extend_from_slice(&last_stream.to_be_bytes());
                self.ready.extend_from_slice(&reason.to_be_bytes());
            }
            self.frames += 1;
            self.ready.extend(self.partial.drain(..HEADER + length));
        }
    }
}

fn broken() -> io::Error {
    io::ErrorKind::ConnectionReset.into()
}

impl AsyncRead for Link {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let link = &mut *self;
        let (fault, left) = link.fault(Way::ToClient, link.read);
        match fault {
            Some(Fault::Stall) => return Poll::Pending,
            Some(Fault::Truncate) => return Poll::Ready(Ok(())),
            Some(Fault::Reset) => link.io = None,
            None => {}
        }
        loop {
            if !link.ready.is_empty() {
                let count = link.ready.len().min(out.remaining()).min(left);
                out.put_slice(&link.ready[..count]);
                link.ready.drain(..count);
                link.read += count;
                return Poll::Ready(Ok(()));
            }
            let Some(io) = &mut link.io else {
                return Poll::Ready(Err(broken()));
            };
            let mut bytes = [0; 4096];
            let mut buffer = ReadBuf::new(&mut bytes);
            ready!(Pin::new(io).poll_read(cx, &mut buffer))?;
            if buffer.filled().is_empty() {
                return Poll::Ready(Ok(()));
            }
            link.partial.extend_from_slice(buffer.filled());
            link.sort();
        }
    }
}

impl AsyncWrite for Link {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let link = &mut *self;
        let (fault, left) = link.fault(Way::ToServer, link.written);
        match fault {
            Some(Fault::Stall) => return Poll::Pending,
            Some(Fault::Truncate) => {
                // The server reads an end; the client learns nothing of it.
                if let Some(io) = &mut link.io {
                    let _ = Pin::new(io).poll_shutdown(cx);
                }
                return Poll::Ready(Ok(bytes.len()));
            }
            Some(Fault::Reset) => link.io = None,
            None => {}
        }
        let Some(io) = &mut link.io else {
            return Poll::Ready(Err(broken()));
        };
        let count = ready!(Pin::new(io).poll_write(cx, &bytes[..bytes.len().min(left)]))?;
        link.written += count;
        Poll::Ready(Ok(count))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.io {
            Some(io) => Pin::new(io).poll_shutdown(cx),
            None => Poll::Ready(Ok(())),
        }
    }
}

/// What one end has heard, and whether the end of it was a clean one.
type Heard = (Vec<u8>, bool);

/// A client with a pool, whose first link does something wrong; every other one is sound.
struct Trial {
    pool: Pool,
    wrong: Wrong,
    dials: AtomicUsize,
    tasks: TaskTracker,
    kill: CancellationToken,
    heard: Arc<Mutex<Vec<Heard>>>,
}

impl Trial {
    fn new(wrong: Wrong) -> Self {
        let (tasks, kill) = (TaskTracker::new(), CancellationToken::new());
        Self {
            pool: Pool::new(small(), PoolConfig::default(), tasks.clone(), kill.clone()),
            wrong,
            dials: AtomicUsize::new(0),
            tasks,
            kill,
            heard: Arc::default(),
        }
    }

    async fn dial(&self) -> Result<Dialled<Link>, Error> {
        let first = self.dials.fetch_add(1, Ordering::SeqCst) == 0;
        let (near, far) = tokio::io::duplex(16 << 10);
        let (tasks, heard) = (self.tasks.clone(), self.heard.clone());
        self.tasks.spawn(async move {
            let window = WindowBudget::new(&small()).share();
            let drain = CancellationToken::new();
            // How it ends is the client's matter here; that it ends is checked.
            let _ = server::serve(far, small(), window, Duration::from_secs(10), &drain, |connect| {
                tasks.spawn(echo_heard(connect, heard.clone()));
            })
            .await;
        });
        let wrong = if first { self.wrong } else { Wrong::Nothing };
        Ok(Dialled {
            io: Link::new(near, wrong),
            peer: None,
            proof: Proof::default(),
        })
    }

    /// Opens a stream, sends `data` and the end, and reads to the end. What came back; `None` if there was no stream.
    async fn transfer(&self, data: &[u8]) -> Option<Heard> {
        let request = request("10.1.2.3:80");
        let key = key();
        let opened = self.pool.open(&key, &request, || self.dial());
        // Its turn, two handshakes, and two answers.
        let opened = timeout(Duration::from_secs(120), opened)
            .await
            .expect("a request ends in its time");
        let mut stream = opened.ok()?;
        let send = async {
            for chunk in data.chunks(700) {
                if stream.sink.send(Bytes::copy_from_slice(chunk)).await.is_err() {
                    return;
                }
            }
            let _ = stream.sink.finish();
        };
        let both = async { tokio::join!(send, hear(&mut stream.source, |_| {})) };
        let ((), heard) = timeout(Duration::from_secs(120), both)
            .await
            .expect("a stream ends when its connection is dead");
        Some(heard)
    }

    /// Nothing is left: not in the pool once its time is over, and no task once the pod ends.
    async fn ends(self) {
        tokio::time::sleep(Duration::from_secs(601)).await;
        assert_eq!(self.pool.peer_count(), 0);
        self.kill.cancel();
        drop(self.pool);
        self.tasks.close();
        timeout(Duration::from_secs(60), self.tasks.wait())
            .await
            .expect("no task is left");
    }
}

async fn hear(source: &mut impl Source, mut on_chunk: impl FnMut(Bytes)) -> Heard {
    let mut all = Vec::new();
    loop {
        match source.chunk().await {
            Ok(Some(chunk)) => {
                all.extend_from_slice(&chunk);
                on_chunk(chunk);
            }
            Ok(None) => return (all, true),
            Err(_) => return (all, false),
        }
    }
}

/// Sends back what comes, and keeps it.
async fn echo_heard(connect: Connect, log: Arc<Mutex<Vec<Heard>>>) {
    let Ok(mut stream) = connect.accept(HeaderMap::new()) else {
        return;
    };
    let (sender, mut queue) = tokio::sync::mpsc::unbounded_channel();
    let (source, sink) = (&mut stream.source, &mut stream.sink);
    let back = async {
        while let Some(chunk) = queue.recv().await {
            if sink.send(chunk).await.is_err() {
                return;
            }
        }
        let _ = sink.finish();
    };
    let listen = async {
        // The channel closes at the end of what is heard.
        let sender = sender;
        let heard = hear(source, |chunk| drop(sender.send(chunk))).await;
        let clean = heard.1;
        log.lock().unwrap().push(heard);
        if !clean {
            // As the relay does: what is broken at one end is broken off at the other.
            std::future::pending::<()>().await;
        }
    };
    let broken = async {
        // A dead connection ends both; the answer that nobody takes must not hold this up.
        tokio::time::sleep(Duration::from_secs(180)).await;
    };
    tokio::select! {
        _ = async { tokio::join!(back, listen) } => {}
        () = broken => {}
    }
}

fn check(wrong: Wrong, data: &[u8], heard: &Heard) {
    let (bytes, clean) = heard;
    assert!(data.starts_with(bytes), "{wrong:?}: other bytes than were sent");
    assert!(
        !clean || bytes == data,
        "{wrong:?}: an end that was none, after {} bytes",
        bytes.len()
    );
}

/// Two transfers one after the other, and a third or fourth, which goes by another link if the first is dead.
async fn try_out(wrong: Wrong) -> [bool; 2] {
    let data = pattern(5000);
    let trial = Trial::new(wrong);
    let mut whole = [false; 2];
    for whole in &mut whole {
        if let Some(heard) = trial.transfer(&data).await {
            check(wrong, &data, &heard);
            *whole = heard.1;
        }
    }
    tokio::time::sleep(Duration::from_secs(60)).await;
    // The link may fail only now, or while nothing is sent.
    let serves = async || trial.transfer(&data).await.is_some_and(|(_, clean)| clean);
    assert!(
        serves().await || serves().await,
        "{wrong:?}: another connection serves"
    );
    for heard in trial.heard.lock().unwrap().iter() {
        check(wrong, &data, heard);
    }
    trial.ends().await;
    whole
}

/// Each byte of the first few hundred, where handshake and headers are, and some of those after.
fn offsets() -> impl Iterator<Item = usize> {
    (0..400).chain((400..12_000).step_by(311))
}

async fn fails_at_any_byte(fault: Fault) {
    let (mut broken, mut whole) = (0, 0);
    for way in [Way::ToServer, Way::ToClient] {
        for after in offsets() {
            let ends = try_out(Wrong::Bytes { fault, way, after }).await;
            broken += usize::from(!ends[0]);
            whole += usize::from(ends[0]);
        }
    }
    // The offsets are before, within and after the first transfer.
    assert!(broken > 400 && whole > 10, "{broken} {whole}");
}

#[tokio::test(start_paused = true)]
async fn a_link_may_stall_at_any_byte() {
    fails_at_any_byte(Fault::Stall).await;
}

#[tokio::test(start_paused = true)]
async fn a_link_may_be_cut_short_at_any_byte() {
    fails_at_any_byte(Fault::Truncate).await;
}

#[tokio::test(start_paused = true)]
async fn a_link_may_break_at_any_byte() {
    fails_at_any_byte(Fault::Reset).await;
}

#[tokio::test(start_paused = true)]
async fn a_peer_may_say_goaway_at_any_frame() {
    const NO_ERROR: u32 = 0;
    const ENHANCE_YOUR_CALM: u32 = 11;
    const ALL: u32 = (1 << 31) - 1;
    for before in 0..40 {
        for (last_stream, reason) in [
            (ALL, NO_ERROR),
            (0, NO_ERROR),
            (1, NO_ERROR),
            (0, ENHANCE_YOUR_CALM),
        ] {
            try_out(Wrong::Goaway {
                before,
                last_stream,
                reason,
            })
            .await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_sound_link_carries_all() {
    assert_eq!(try_out(Wrong::Nothing).await, [true, true]);
}
