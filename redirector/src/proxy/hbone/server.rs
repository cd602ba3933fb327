//! An HTTP/2 connection from a peer: takes its CONNECT requests, keeps it alive, and lets it go on drain.

use std::{
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use h2::{
    Reason, RecvStream,
    server::{Builder, SendResponse},
};
use http::{HeaderMap, Method, Response, StatusCode};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::timeout,
};
use tokio_util::sync::CancellationToken;

use super::{
    Http2Config,
    stream::{H2Sink, H2Source, Queued},
    until_dead,
    window::WindowShare,
};

/// How a connection from a peer ended that did not end in good order.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The peer does not say that it speaks HTTP/2.
    #[error("HTTP/2 handshake was not over after {after:?}")]
    HandshakeTimeout { after: Duration },
    /// An error of protocol or of the byte stream below.
    #[error("HTTP/2 failed")]
    Http2(#[source] h2::Error),
    /// The peer no longer answers.
    #[error("no answer to PING in {deadline:?}")]
    Dead { deadline: Duration },
}

/// A CONNECT request, to be answered.
#[derive(Debug)]
pub(crate) struct Connect {
    authority: String,
    headers: HeaderMap,
    respond: SendResponse<Queued>,
    body: RecvStream,
    open: Open,
}

/// Counts an open stream.
#[derive(Debug)]
struct Open(Arc<AtomicUsize>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A connection that a peer has tunnelled to us.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) source: H2Source,
    pub(crate) sink: H2Sink,
    _open: Open,
}

impl Connect {
    /// Where the peer wants to go, in its words.
    pub(crate) fn authority(&self) -> &str {
        &self.authority
    }

    /// Those of the request.
    pub(crate) fn headers(&self) -> &HeaderMap {
        &self.headers
    }

    /// Answers 200: the connection to the application stands. With these headers.
    pub(crate) fn accept(mut self, headers: HeaderMap) -> Result<Stream, Error> {
        let mut response = Response::new(());
        *response.headers_mut() = headers;
        let sink = self
            .respond
            .send_response(response, false)
            .map_err(Error::Http2)?;
        Ok(Stream {
            source: H2Source(self.body),
            sink: H2Sink::new(sink),
            _open: self.open,
        })
    }

    /// Answers with a failure: status, END_STREAM, and nothing else.
    pub(crate) fn refuse(mut self, status: StatusCode) {
        let mut response = Response::new(());
        *response.status_mut() = status;
        if let Err(error) = self.respond.send_response(response, true) {
            tracing::debug!(%status, %error, "peer does not wait for its answer");
        }
    }

    /// Waits until the peer has given up the request. Cancel-safe.
    pub(crate) async fn abandoned(&mut self) -> Reason {
        std::future::poll_fn(|cx| self.respond.poll_reset(cx))
            .await
            .unwrap_or(Reason::CANCEL)
    }
}

/// Serves the connection until the peer ends it, or it dies. Once `drain` is cancelled no new streams are taken and the
/// connection ends with its last one. `on_connect` must not block: a task of its own is to answer.
pub(crate) async fn serve<IO>(
    io: IO,
    config: Http2Config,
    mut window: WindowShare,
    handshake_deadline: Duration,
    drain: &CancellationToken,
    mut on_connect: impl FnMut(Connect),
) -> Result<(), Error>
where
    IO: AsyncRead + AsyncWrite + Unpin,
{
    let handshake = Builder::new()
        .initial_window_size(config.stream_window_bytes)
        .initial_connection_window_size(config.connection_window_bytes)
        .max_frame_size(config.frame_bytes)
        .max_header_list_size(config.request_header_bytes)
        .max_concurrent_streams(config.max_streams)
        .max_send_buffer_size(config.server_send_buffer_bytes)
        // Clients that give up all their streams at once are no attack; the default of 20 would end the connection.
        .max_pending_accept_reset_streams(config.max_streams as usize)
        .max_concurrent_reset_streams(1024)
        .handshake::<_, Queued>(io);
    let mut connection = timeout(handshake_deadline, handshake)
        .await
        .map_err(|_| Error::HandshakeTimeout {
            after: handshake_deadline,
        })?
        .map_err(Error::Http2)?;
    let open = Arc::new(AtomicUsize::new(0));
    let mut draining = false;
    let mut dead = pin!(until_dead(connection.ping_pong(), config));
    loop {
        let (request, respond) = tokio::select! {
            next = connection.accept() => match next {
                Some(request) => request.map_err(Error::Http2)?,
                None => return Ok(()),
            },
            () = drain.cancelled(), if !draining => {
                draining = true;
                connection.graceful_shutdown();
                continue;
            }
            () = &mut dead => {
                connection.abrupt_shutdown(Reason::NO_ERROR);
                // Its one chance to be sent; whoever is dead will not read it.
                let _ = timeout(Duration::from_millis(100), connection.accept()).await;
                return Err(Error::Dead { deadline: config.ping_deadline });
            }
        };
        let streams = open.fetch_add(1, Ordering::Relaxed) + 1;
        if let Some(window) = window.grow(&config, streams) {
            connection.set_target_window_size(window);
        }
        let (request, body) = request.into_parts();
        let authority = request
            .uri
            .authority()
            .map(|authority| authority.as_str().to_owned());
        let connect = Connect {
            authority: authority.unwrap_or_default(),
            headers: request.headers,
            respond,
            body,
            open: Open(open.clone()),
        };
        if request.method != Method::CONNECT || connect.authority.is_empty() {
            connect.refuse(StatusCode::BAD_REQUEST);
        } else {
            on_connect(connect);
        }
    }
}
