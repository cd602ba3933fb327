//! Copies a connection's bytes both ways, its ends as they are: FIN stays FIN, reset stays reset.
//!
//! Called by the three paths once both legs stand. Bytes move as [`Bytes`], so that what HTTP/2 delivers is written, and what
//! is read is queued, without another copy. Closing the legs is left to the caller: normally after `Ok`, by reset
//! ([`Leg::reset`]) after a [`Cut`].
//!
//! Each direction runs to its own end. What ends both is a leg that breaks:
//! - a source that breaks (reset by its peer) has nothing more to give, so the other leg is broken off too;
//! - a sink that breaks may have sent bytes before it did: these are still delivered, for a bounded time, and the other leg
//!   is broken off after that.

use std::{
    future::{Future, poll_fn},
    io,
    os::fd::AsFd,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Buf, Bytes, BytesMut};
use tokio::{io::Interest, net::TcpStream, time::timeout};

use crate::sys::socket;

/// Where bytes come from.
pub(crate) trait Source: Send {
    /// The next bytes, `None` after the last.
    fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Bytes>>>;

    /// The next bytes, `None` after the last. Cancel-safe.
    #[cfg(test)]
    fn chunk(&mut self) -> impl Future<Output = io::Result<Option<Bytes>>> + Send {
        poll_fn(|cx| self.poll_chunk(cx))
    }
}

/// Where bytes go.
pub(crate) trait Sink: Send {
    /// Hands over `chunk` from its begin on; ready when it is empty. Waits while the far end does not take it.
    fn poll_send(&mut self, cx: &mut Context<'_>, chunk: &mut Bytes) -> Poll<Result<(), Refused>>;

    /// Says that no more comes.
    fn finish(&mut self) -> Result<(), Refused>;

    /// Waits until the far end can take no more, which is otherwise noticed by sending only. `is_read`: somebody waits for the
    /// next bytes of the same leg, and would notice that it broke.
    fn poll_refused(&mut self, cx: &mut Context<'_>, is_read: bool) -> Poll<Refused>;

    /// Hands over all of `chunk`.
    fn send(&mut self, mut chunk: Bytes) -> impl Future<Output = Result<(), Refused>> + Send {
        poll_fn(move |cx| self.poll_send(cx, &mut chunk))
    }

    /// Waits until the far end can take no more. Cancel-safe.
    #[cfg(test)]
    fn refused(&mut self) -> impl Future<Output = Refused> + Send {
        poll_fn(|cx| self.poll_refused(cx, false))
    }
}

/// Why a [`Sink`] takes no more.
#[derive(Debug)]
pub(crate) enum Refused {
    /// The far end has all that it wants, and says so without an error.
    Unwanted,
    /// The leg is broken.
    Broken(io::Error),
}

impl From<io::Error> for Refused {
    fn from(error: io::Error) -> Self {
        Self::Broken(error)
    }
}

/// Counts the bytes of one direction, while they move.
pub(crate) trait Meter: Sync {
    /// `bytes` more have been handed over.
    fn add(&self, bytes: u64);
}

/// How a connection ended that did not end by FIN both ways.
#[derive(Debug)]
pub(crate) enum Cut {
    /// The first leg broke.
    Local(io::Error),
    /// The second leg broke.
    Remote(io::Error),
}

impl Cut {
    /// The failure to report, if it is one: that an application resets its connection is its own affair.
    pub(crate) fn failure(self) -> Option<io::Error> {
        let (Self::Local(error) | Self::Remote(error)) = self;
        let usual = [
            io::ErrorKind::ConnectionReset,
            io::ErrorKind::BrokenPipe,
            io::ErrorKind::NotConnected,
        ];
        (!usual.contains(&error.kind())).then_some(error)
    }
}

/// Copies from `local` to `remote`, counted by `sent`, and back, counted by `received`, until both directions have ended.
/// After one leg broke, what it had sent is delivered for `tail_deadline` at most.
///
/// Thousands of connections are idle in here at a time: what it holds meanwhile is small.
pub(crate) async fn both(
    local: (&mut impl Source, &mut impl Sink),
    remote: (&mut impl Source, &mut impl Sink),
    (sent, received): (&impl Meter, &impl Meter),
    tail_deadline: Duration,
) -> Result<(), Cut> {
    let (mut up, mut down) = (Way::default(), Way::default());
    let (first, is_up) = poll_fn(|cx| {
        if let Poll::Ready(end) = up.poll(cx, local.0, remote.1, sent) {
            return Poll::Ready((end, true));
        }
        if let Poll::Ready(end) = down.poll(cx, remote.0, local.1, received) {
            return Poll::Ready((end, false));
        }
        // After both, when it is known which legs are being read.
        if let Poll::Ready(end) = up.poll_refused(cx, remote.1, down.is_waiting) {
            return Poll::Ready((end, true));
        }
        let end = down.poll_refused(cx, local.1, up.is_waiting);
        end.map(|end| (end, false))
    })
    .await;
    let is_cut = matches!(first, Err(Broken::Sink(_)));
    (up.is_cut, down.is_cut) = (is_cut, is_cut);
    let mut rest = poll_fn(|cx| {
        if is_up {
            down.poll_alone(cx, remote.0, local.1, received)
        } else {
            up.poll_alone(cx, local.0, remote.1, sent)
        }
    });
    let (end, is_up) = match first {
        Ok(()) => (rest.await, !is_up),
        Err(broken) => {
            if is_cut {
                // How the rest ends does not matter: its leg is broken off either way. Rare, and so not among what an idle
                // connection holds.
                let _ = Box::pin(timeout(tail_deadline, &mut rest)).await;
            }
            (Err(broken), is_up)
        }
    };
    end.map_err(|broken| match (broken, is_up) {
        (Broken::Source(error), true) | (Broken::Sink(error), false) => Cut::Local(error),
        (Broken::Source(error), false) | (Broken::Sink(error), true) => Cut::Remote(error),
    })
}

/// Which end of a direction broke.
enum Broken {
    Source(io::Error),
    Sink(io::Error),
}

impl Refused {
    /// How it ends a direction.
    fn end(self) -> Result<(), Broken> {
        match self {
            Self::Unwanted => Ok(()),
            Self::Broken(error) => Err(Broken::Sink(error)),
        }
    }
}

/// Chunks after which a busy direction lets others have their turn: neither readiness nor an HTTP/2 queue does that by itself.
const CHUNKS_AT_A_TIME: usize = 32;

/// One direction.
#[derive(Default)]
struct Way {
    /// Read, and not handed over yet.
    chunk: Bytes,
    /// For the source's next bytes.
    is_waiting: bool,
    /// The connection was cut: the end of the bytes is not their sender's word.
    is_cut: bool,
}

impl Way {
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        source: &mut impl Source,
        sink: &mut impl Sink,
        meter: &impl Meter,
    ) -> Poll<Result<(), Broken>> {
        self.is_waiting = false;
        for _ in 0..CHUNKS_AT_A_TIME {
            if !self.chunk.is_empty() {
                let before = self.chunk.len();
                let sent = sink.poll_send(cx, &mut self.chunk);
                meter.add((before - self.chunk.len()) as u64);
                if let Err(refused) = ready!(sent) {
                    return Poll::Ready(refused.end());
                }
                // Empty, it may still hold its buffer.
                self.chunk = Bytes::new();
            }
            match source.poll_chunk(cx) {
                Poll::Ready(Ok(Some(chunk))) => self.chunk = chunk,
                Poll::Ready(Ok(None)) if self.is_cut => return Poll::Ready(Ok(())),
                Poll::Ready(Ok(None)) => return Poll::Ready(sink.finish().or_else(Refused::end)),
                Poll::Ready(Err(error)) => return Poll::Ready(Err(Broken::Source(error))),
                Poll::Pending => {
                    self.is_waiting = true;
                    return Poll::Pending;
                }
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Waits for the sink's end; the source's bytes are waited for by [`Self::poll`].
    fn poll_refused(
        &mut self,
        cx: &mut Context<'_>,
        sink: &mut impl Sink,
        is_read: bool,
    ) -> Poll<Result<(), Broken>> {
        if self.is_waiting {
            sink.poll_refused(cx, is_read).map(Refused::end)
        } else {
            Poll::Pending
        }
    }

    /// Both, when the other direction has ended.
    fn poll_alone(
        &mut self,
        cx: &mut Context<'_>,
        source: &mut impl Source,
        sink: &mut impl Sink,
        meter: &impl Meter,
    ) -> Poll<Result<(), Broken>> {
        match self.poll(cx, source, sink, meter) {
            Poll::Pending => self.poll_refused(cx, sink, false),
            end => end,
        }
    }
}

/// A TCP leg. Dropped before [`Leg::close`], it is reset: whoever is at its far end must not take a connection that was cut
/// off for one that ended.
pub(crate) struct Leg {
    stream: TcpStream,
    closed: bool,
}

impl Leg {
    pub(crate) fn new(stream: TcpStream) -> Self {
        Self {
            stream,
            closed: false,
        }
    }

    /// Both halves, for [`both`].
    pub(crate) fn split(&mut self) -> (TcpSource<'_>, TcpSink<'_>) {
        (
            TcpSource {
                stream: &self.stream,
                buffer: BytesMut::new(),
                read_bytes: READ_BYTES_FIRST,
            },
            TcpSink {
                stream: &self.stream,
                breaks: None,
            },
        )
    }

    /// Waits until the connection breaks: for the time in which nothing is read from it or written to it.
    pub(crate) async fn broken(&self) -> io::Error {
        broken(&self.stream).await
    }

    /// Ends the connection in the usual way.
    pub(crate) fn close(mut self) {
        // A dialled socket is made so that it is reset if nobody comes to own it. Cannot fail on a TCP socket.
        let _ = socket::reset_when_dropped(self.stream.as_fd(), false);
        self.closed = true;
    }

    /// Ends the connection by a reset, after giving the far end a moment to take what has been written: as with a connection
    /// without a proxy, bytes that came before a reset have mostly arrived before it.
    pub(crate) async fn reset(self) {
        const STEP: Duration = Duration::from_millis(10);
        for _ in 0..100 {
            match socket::unacknowledged_bytes(self.stream.as_fd()) {
                Ok(0) | Err(_) => break,
                Ok(_) => tokio::time::sleep(STEP).await,
            }
        }
    }

    /// Ends the connection as [`both`] did.
    pub(crate) async fn end(self, result: &Result<(), Cut>) {
        match result {
            Ok(()) => self.close(),
            // Rare, and so not among what an idle connection holds.
            Err(_) => Box::pin(self.reset()).await,
        }
    }
}

impl Drop for Leg {
    fn drop(&mut self) {
        if !self.closed {
            // Cannot fail on a TCP socket; were it to, a FIN is what is left.
            let _ = self.stream.set_zero_linger();
        }
    }
}

impl AsFd for Leg {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// The pending error is not fetched, so that whoever reads next still sees it.
async fn broken(stream: &TcpStream) -> io::Error {
    match stream.ready(Interest::ERROR).await {
        Ok(_) => io::ErrorKind::ConnectionReset.into(),
        Err(error) => error,
    }
}

/// Size of a connection's first reads; most are small.
const READ_BYTES_FIRST: usize = 4 << 10;
/// Size that reads grow to while they come full.
const READ_BYTES_MOST: usize = 256 << 10;

/// The reading half of a [`Leg`]. Idle, it holds no buffer.
pub(crate) struct TcpSource<'a> {
    stream: &'a TcpStream,
    buffer: BytesMut,
    read_bytes: usize,
}

impl Source for TcpSource<'_> {
    fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Bytes>>> {
        loop {
            match self.stream.poll_read_ready(cx) {
                Poll::Ready(ready) => ready?,
                Poll::Pending => {
                    self.buffer = BytesMut::new();
                    return Poll::Pending;
                }
            }
            if self.buffer.capacity() < READ_BYTES_FIRST {
                self.buffer = BytesMut::with_capacity(self.read_bytes);
            }
            match socket::try_read(self.stream, &mut self.buffer) {
                Ok(0) => return Poll::Ready(Ok(None)),
                Ok(bytes) => {
                    if bytes == self.read_bytes {
                        self.read_bytes = (bytes * 2).min(READ_BYTES_MOST);
                    } else if bytes < READ_BYTES_FIRST {
                        self.read_bytes = (self.read_bytes / 2).max(READ_BYTES_FIRST);
                    }
                    // Many small messages may wait in a queue that counts their bytes: they must not have a large buffer each.
                    if bytes <= self.buffer.capacity() / 4 {
                        let chunk = Bytes::copy_from_slice(&self.buffer);
                        self.buffer.clear();
                        return Poll::Ready(Ok(Some(chunk)));
                    }
                    return Poll::Ready(Ok(Some(self.buffer.split().freeze())));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

/// The writing half of a [`Leg`].
pub(crate) struct TcpSink<'a> {
    stream: &'a TcpStream,
    /// Waits for the leg to break. Only there once it was needed: as a rule whoever reads from the leg notices.
    breaks: Option<Pin<Box<dyn Future<Output = io::Error> + Send + 'a>>>,
}

impl Sink for TcpSink<'_> {
    fn poll_send(&mut self, cx: &mut Context<'_>, chunk: &mut Bytes) -> Poll<Result<(), Refused>> {
        while !chunk.is_empty() {
            match self.stream.try_write(chunk) {
                Ok(bytes) => chunk.advance(bytes),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    ready!(self.stream.poll_write_ready(cx))?;
                }
                Err(error) => return Poll::Ready(Err(error.into())),
            }
        }
        Poll::Ready(Ok(()))
    }

    fn finish(&mut self) -> Result<(), Refused> {
        Ok(socket::shutdown_write(self.stream.as_fd())?)
    }

    fn poll_refused(&mut self, cx: &mut Context<'_>, is_read: bool) -> Poll<Refused> {
        if is_read && self.breaks.is_none() {
            return Poll::Pending;
        }
        let stream = self.stream;
        let breaks = self.breaks.get_or_insert_with(|| Box::pin(broken(stream)));
        breaks.as_mut().poll(cx).map(Refused::Broken)
    }
}

#[cfg(test)]
mod tests;
