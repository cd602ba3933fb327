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
    future::Future,
    io,
    os::fd::AsFd,
    pin::pin,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use tokio::{
    io::{AsyncWriteExt, Interest},
    net::{
        TcpStream,
        tcp::{ReadHalf, WriteHalf},
    },
};

use crate::sys::socket;

/// Where bytes come from.
pub(crate) trait Source: Send {
    /// The next bytes, `None` after the last. Cancel-safe.
    fn chunk(&mut self) -> impl Future<Output = io::Result<Option<Bytes>>> + Send;
}

/// Where bytes go.
pub(crate) trait Sink: Send {
    /// Hands over all of `chunk`; waits while the far end does not take it.
    fn send(&mut self, chunk: Bytes) -> impl Future<Output = Result<(), Refused>> + Send;

    /// Says that no more comes.
    fn finish(&mut self) -> impl Future<Output = Result<(), Refused>> + Send;

    /// Waits until the far end can take no more, which is otherwise noticed by sending only. Cancel-safe.
    fn refused(&mut self) -> impl Future<Output = Refused> + Send;
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
pub(crate) async fn both(
    local: (&mut impl Source, &mut impl Sink),
    remote: (&mut impl Source, &mut impl Sink),
    (sent, received): (&impl Meter, &impl Meter),
    tail_deadline: Duration,
) -> Result<(), Cut> {
    let cut = AtomicBool::new(false);
    let mut up = pin!(one_way(local.0, remote.1, sent, &cut));
    let mut down = pin!(one_way(remote.0, local.1, received, &cut));
    let (end, first_is_up) = tokio::select! {
        end = &mut up => (end, true),
        end = &mut down => (end, false),
    };
    let (end, is_up) = match (end, first_is_up) {
        (Ok(()), true) => (down.await, false),
        (Ok(()), false) => (up.await, true),
        (Err(broken), _) => {
            cut.store(true, Ordering::Relaxed);
            if let Broken::Sink(_) = broken {
                // How the rest ends does not matter: its leg is broken off either way.
                let _ = if first_is_up {
                    tokio::time::timeout(tail_deadline, down).await
                } else {
                    tokio::time::timeout(tail_deadline, up).await
                };
            }
            (Err(broken), first_is_up)
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

async fn one_way(
    source: &mut impl Source,
    sink: &mut impl Sink,
    meter: &impl Meter,
    cut: &AtomicBool,
) -> Result<(), Broken> {
    let refused = |refused| match refused {
        Refused::Unwanted => Ok(()),
        Refused::Broken(error) => Err(Broken::Sink(error)),
    };
    loop {
        let chunk = tokio::select! {
            biased;
            chunk = source.chunk() => chunk.map_err(Broken::Source)?,
            end = sink.refused() => return refused(end),
        };
        let Some(chunk) = chunk else {
            // After a cut the end of the bytes is not their sender's word.
            return if cut.load(Ordering::Relaxed) {
                Ok(())
            } else {
                sink.finish().await.or_else(refused)
            };
        };
        let bytes = chunk.len() as u64;
        if let Err(end) = sink.send(chunk).await {
            return refused(end);
        }
        meter.add(bytes);
        // Neither readiness nor an HTTP/2 queue makes a busy connection yield by itself.
        tokio::task::coop::consume_budget().await;
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
        let (read, write) = self.stream.split();
        (
            TcpSource {
                stream: read,
                buffer: BytesMut::new(),
                read_bytes: READ_BYTES_FIRST,
            },
            TcpSink(write),
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
            Err(_) => self.reset().await,
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
    stream: ReadHalf<'a>,
    buffer: BytesMut,
    read_bytes: usize,
}

impl Source for TcpSource<'_> {
    async fn chunk(&mut self) -> io::Result<Option<Bytes>> {
        loop {
            if self.buffer.capacity() < READ_BYTES_FIRST {
                self.buffer = BytesMut::with_capacity(self.read_bytes);
            }
            match self.stream.try_read_buf(&mut self.buffer) {
                Ok(0) => return Ok(None),
                Ok(bytes) => {
                    if bytes == self.read_bytes {
                        self.read_bytes = (bytes * 2).min(READ_BYTES_MOST);
                    }
                    return Ok(Some(self.buffer.split().freeze()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.buffer = BytesMut::new();
                    self.stream.readable().await?;
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// The writing half of a [`Leg`].
pub(crate) struct TcpSink<'a>(WriteHalf<'a>);

impl Sink for TcpSink<'_> {
    async fn send(&mut self, chunk: Bytes) -> Result<(), Refused> {
        Ok(self.0.write_all(&chunk).await?)
    }

    async fn finish(&mut self) -> Result<(), Refused> {
        Ok(self.0.shutdown().await?)
    }

    async fn refused(&mut self) -> Refused {
        Refused::Broken(broken(self.0.as_ref()).await)
    }
}

#[cfg(test)]
mod tests;
