//! One tunnelled connection: an HTTP/2 stream as the source and the sink of `proxy::copy`.
//!
//! - End of bytes is END_STREAM, both ways, each by itself.
//! - The reset of an application's connection goes to the peer as RST_STREAM with CONNECT_ERROR (RFC 9113, section 8.5),
//!   after what has been queued before it. A stream that is dropped before its end is reset with CANCEL.
//! - Any RST_STREAM that comes before END_STREAM is a reset (RFC 9113, section 8.5), other than NO_ERROR: that is the end of
//!   the bytes to whoever reads, and says to whoever writes that no more is wanted.
//! - The end of the HTTP/2 connection itself is an error of the kind `ConnectionAborted`.

use std::{
    io,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Buf, Bytes};
use h2::{Reason, RecvStream, SendStream};

use crate::proxy::copy::{Cut, Refused, Sink, Source};

/// Receives the bytes of a stream.
#[derive(Debug)]
pub(crate) struct H2Source(pub(super) RecvStream);

impl Source for H2Source {
    fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Bytes>>> {
        loop {
            match ready!(self.0.poll_data(cx)) {
                None => return Poll::Ready(Ok(None)),
                Some(Ok(chunk)) => {
                    // As soon as they are taken the peer may send as many more: then one chunk at most is under way to the
                    // application beside the window.
                    // The stream may have been reset since; its window is given back then by h2.
                    let _ = self.0.flow_control().release_capacity(chunk.len());
                    if !chunk.is_empty() {
                        return Poll::Ready(Ok(Some(chunk)));
                    }
                }
                Some(Err(error)) if error.is_reset() && error.reason() == Some(Reason::NO_ERROR) => {
                    return Poll::Ready(Ok(None));
                }
                Some(Err(error)) => return Poll::Ready(Err(to_io(error))),
            }
        }
    }
}

/// Bytes in an HTTP/2 connection's queue; gone when they have been written.
#[derive(Debug)]
pub(super) struct Queued {
    bytes: Bytes,
    /// As many as there are of the stream in the queue, and the sink's own.
    _queued: Arc<()>,
}

impl Buf for Queued {
    fn remaining(&self) -> usize {
        self.bytes.remaining()
    }

    fn chunk(&self) -> &[u8] {
        self.bytes.chunk()
    }

    fn advance(&mut self, bytes: usize) {
        self.bytes.advance(bytes);
    }
}

/// Sends the bytes of a stream.
#[derive(Debug)]
pub(crate) struct H2Sink {
    stream: SendStream<Queued>,
    queued: Arc<()>,
}

impl H2Sink {
    pub(super) fn new(stream: SendStream<Queued>) -> Self {
        Self {
            stream,
            queued: Arc::new(()),
        }
    }

    pub(super) fn queue(&mut self, bytes: Bytes, end: bool) -> Result<(), Refused> {
        let queued = Queued {
            bytes,
            _queued: self.queued.clone(),
        };
        self.stream
            .send_data(queued, end)
            .map_err(|error| Refused::Broken(to_io(error)))
    }

    /// Ends the stream as [`copy::both`](crate::proxy::copy::both) did.
    pub(crate) async fn end(&mut self, result: &Result<(), Cut>) {
        if result.is_err() {
            // Rare, and so not among what an idle connection holds.
            Box::pin(self.reset()).await;
        }
    }

    /// Breaks the stream off: the peer is to reset its connection. What is queued would be discarded by that, so it is given
    /// a moment to get out: the bytes came before the reset.
    pub(crate) async fn reset(&mut self) {
        const STEP: Duration = Duration::from_millis(2);
        for _ in 0..500 {
            if Arc::strong_count(&self.queued) == 1 {
                break;
            }
            tokio::time::sleep(STEP).await;
        }
        self.stream.send_reset(Reason::CONNECT_ERROR);
    }

    /// Waits for room for some of `bytes`. Asks for no more than is at hand: what a stream is granted of the connection's
    /// window and does not use is missing to the others.
    pub(super) fn poll_capacity(
        &mut self,
        cx: &mut Context<'_>,
        bytes: usize,
    ) -> Poll<Result<usize, Refused>> {
        self.stream.reserve_capacity(bytes);
        loop {
            // Asked first: what was granted before is not announced again.
            let granted = self.stream.capacity();
            if granted > 0 {
                return Poll::Ready(Ok(granted.min(bytes)));
            }
            match ready!(self.stream.poll_capacity(cx)) {
                Some(Ok(_)) => {}
                Some(Err(error)) => return Poll::Ready(Err(Refused::Broken(to_io(error)))),
                None => return self.poll_refused(cx, false).map(Err),
            }
        }
    }
}

impl Sink for H2Sink {
    fn poll_send(&mut self, cx: &mut Context<'_>, chunk: &mut Bytes) -> Poll<Result<(), Refused>> {
        while !chunk.is_empty() {
            let granted = ready!(self.poll_capacity(cx, chunk.len()))?;
            self.queue(chunk.split_to(granted), false)?;
        }
        Poll::Ready(Ok(()))
    }

    fn finish(&mut self) -> Result<(), Refused> {
        self.queue(Bytes::new(), true)
    }

    fn poll_refused(&mut self, cx: &mut Context<'_>, _is_read: bool) -> Poll<Refused> {
        self.stream.poll_reset(cx).map(|end| match end {
            Ok(Reason::NO_ERROR) => Refused::Unwanted,
            Ok(reason) => Refused::Broken(io::Error::new(
                io::ErrorKind::ConnectionReset,
                h2::Error::from(reason),
            )),
            Err(error) => Refused::Broken(to_io(error)),
        })
    }
}

/// A reset stream is a reset connection; anything else has befallen the HTTP/2 connection.
fn to_io(error: h2::Error) -> io::Error {
    let kind = if error.is_reset() {
        io::ErrorKind::ConnectionReset
    } else {
        io::ErrorKind::ConnectionAborted
    };
    io::Error::new(kind, error)
}
