//! A stream of a tunnel as the byte stream below another TLS session: what goes through a network gateway.
//!
//! The gateway forwards the stream without looking into it. Each tunnelled connection has an HTTP/2 connection of its own in
//! there: the gateway chooses a far end for each stream, and one connection shared by all would always reach the same.

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::{Buf, Bytes};
use h2::Reason;
use http::Request;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::timeout,
};

use super::{
    Http2Config,
    client::{self, Dialled, Error, Stream},
    pool::PoolConfig,
    window::WindowShare,
};
use crate::proxy::copy::{Refused, Source};

/// The bytes of a stream. Its end is END_STREAM, both ways, each by itself; dropped before its own, it is reset.
#[derive(Debug)]
pub(crate) struct StreamIo {
    stream: Stream,
    /// What has come and not been read.
    chunk: Bytes,
    ended: bool,
}

impl StreamIo {
    pub(crate) fn new(stream: Stream) -> Self {
        Self {
            stream,
            chunk: Bytes::new(),
            ended: false,
        }
    }
}

impl AsyncRead for StreamIo {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        while self.chunk.is_empty() {
            match ready!(self.stream.source.poll_chunk(cx))? {
                Some(chunk) => self.chunk = chunk,
                None => return Poll::Ready(Ok(())),
            }
        }
        let bytes = self.chunk.len().min(buffer.remaining());
        buffer.put_slice(&self.chunk[..bytes]);
        self.chunk.advance(bytes);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for StreamIo {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if bytes.is_empty() {
            return Poll::Ready(Ok(0));
        }
        let sink = &mut self.stream.sink;
        let granted = ready!(sink.poll_capacity(cx, bytes.len())).map_err(refused)?;
        let queued = sink.queue(Bytes::copy_from_slice(&bytes[..granted]), false);
        Poll::Ready(queued.map(|()| granted).map_err(refused))
    }

    /// What is written is in the queue of the connection below, which sends it by itself.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// Over only when the far end has ended its side too: the stream is dropped after this, and if that resets it, a gateway may
    /// discard the last bytes that it has not passed on yet.
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.ended {
            self.ended = true;
            // Where nothing more is wanted, the end is not either.
            let _ = self.stream.sink.queue(Bytes::new(), true);
        }
        // Nobody reads any more.
        while let Some(chunk) = ready!(self.stream.source.poll_chunk(cx))? {
            drop(chunk);
        }
        Poll::Ready(Ok(()))
    }
}

fn refused(refused: Refused) -> io::Error {
    match refused {
        Refused::Unwanted => io::ErrorKind::BrokenPipe.into(),
        Refused::Broken(error) => error,
    }
}

/// Runs the inner HTTP/2 connection. It ends when its stream has ended and is dropped, or breaks the stream when it is dropped
/// itself.
pub(crate) type Driver = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Speaks HTTP/2 on `dialled`, and opens the one stream that is to be on it.
pub(super) async fn open<IO>(
    dialled: Dialled<IO>,
    tunnel: SocketAddr,
    request: Request<()>,
    http2: Http2Config,
    window: WindowShare,
    config: PoolConfig,
) -> Result<(Stream, Driver), Error>
where
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let after = config.handshake_deadline;
    let handshake = client::handshake(dialled, 0, tunnel, 1, http2, window);
    let (connection, driver) = timeout(after, handshake)
        .await
        .map_err(|_| Error::HandshakeTimeout { tunnel, after })?
        .map_err(|source| Error::Http2 { tunnel, source })?;
    let lease = Arc::clone(&connection).lease(1).ok_or_else(|| Error::Http2 {
        tunnel,
        source: Reason::REFUSED_STREAM.into(),
    })?;
    let mut driver: Driver = Box::pin(driver.run());
    let stream = {
        let mut answer = std::pin::pin!(lease.request(request, config.response_deadline));
        tokio::select! {
            biased;
            answer = &mut answer => answer,
            // The request knows why.
            () = &mut driver => answer.await,
        }
    }?;
    connection.retire();
    Ok((stream, driver))
}
