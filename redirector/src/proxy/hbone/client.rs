//! One HTTP/2 connection to a peer: opens streams on it, and drives it to its end.

use std::{
    io,
    net::SocketAddr,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use h2::{Reason, client::SendRequest};
use http::{HeaderMap, Request, StatusCode};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::Notify,
    time::{Instant, timeout},
};

use super::{
    Http2Config,
    stream::{H2Sink, H2Source, Queued},
    until_dead,
    window::WindowShare,
};
use crate::{
    identity::{self, tls::Proof},
    mesh::spiffe::SpiffeId,
    proxy::{
        dial,
        failure::{self, Failure, Fate, Flag},
    },
};

/// Why there is no tunnelled connection.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// No TLS configuration.
    #[error("no certificate to call {tunnel} with")]
    Identity {
        tunnel: SocketAddr,
        #[source]
        source: identity::Error,
    },
    /// The tunnel's TCP connection.
    #[error("cannot open a tunnel to {tunnel}")]
    Connect {
        tunnel: SocketAddr,
        #[source]
        source: dial::Error,
    },
    /// The far end, or the way to it, does not answer.
    #[error(
        "connection to {tunnel} timed out after {after:?}: maybe a NetworkPolicy is blocking HBONE port {}",
        tunnel.port()
    )]
    ConnectTimeout { tunnel: SocketAddr, after: Duration },
    /// TLS: usually the wrong identity.
    #[error("TLS handshake with {tunnel} failed")]
    Tls {
        tunnel: SocketAddr,
        #[source]
        source: io::Error,
    },
    /// TLS or HTTP/2 did not come about in time.
    #[error("handshake with {tunnel} was not over after {after:?}")]
    HandshakeTimeout { tunnel: SocketAddr, after: Duration },
    /// HTTP/2, of the connection or of the stream.
    #[error("HTTP/2 with {tunnel} failed")]
    Http2 {
        tunnel: SocketAddr,
        #[source]
        source: h2::Error,
    },
    /// Refused by the far end. The text is what Istio's tools look for.
    #[error("http status: {0}")]
    Status(StatusCode),
    /// No answer to the request.
    #[error("no answer from {tunnel} to CONNECT after {after:?}")]
    ResponseTimeout { tunnel: SocketAddr, after: Duration },
    /// Too many others wait for a tunnel to the same peer.
    #[error("no tunnel to {tunnel} after {after:?}: others are still waiting for theirs")]
    Busy { tunnel: SocketAddr, after: Duration },
}

impl Failure for Error {
    fn flag(&self) -> Flag {
        match self {
            Self::Identity { .. } => Flag::Identity,
            Self::ConnectTimeout { .. } => Flag::NetworkPolicy,
            Self::Tls { source, .. } => failure::of_tls(source),
            Self::HandshakeTimeout { .. } => Flag::TlsFailure,
            Self::Http2 { .. } => Flag::Http2Failure,
            Self::Connect { .. } | Self::Status(_) | Self::ResponseTimeout { .. } | Self::Busy { .. } => {
                Flag::Connect
            }
        }
    }

    fn advice(&self) -> Option<&'static str> {
        match self {
            Self::Tls { source, .. } => failure::advice_of_tls(source),
            Self::Status(status) => Some(match *status {
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                    "a policy at the destination does not permit this caller; the access log there names it"
                }
                StatusCode::BAD_REQUEST => {
                    "the destination does not serve what was asked for: the meshes of both sides may differ; the access log there says why"
                }
                StatusCode::SERVICE_UNAVAILABLE => {
                    "the destination's proxy could not reach its application; the access log there says why"
                }
                _ => return None,
            }),
            _ => None,
        }
    }
}

impl Error {
    /// Whether the HTTP/2 connection is of no more use; the request can be made again on another, since CONNECT is answered
    /// before the application's first byte is sent.
    pub(super) fn is_connection_lost(&self) -> bool {
        match self {
            Self::Http2 { source, .. } => {
                !source.is_reset() || source.reason() == Some(Reason::REFUSED_STREAM)
            }
            _ => false,
        }
    }
}

/// An HTTP/2 connection to a peer, as long as streams may be opened on it.
#[derive(Debug)]
pub(super) struct Connection {
    /// Which one: later ones have higher numbers.
    pub(super) number: u64,
    pub(super) tunnel: SocketAddr,
    /// Who is there, by its certificate.
    pub(super) peer: Option<SpiffeId>,
    /// `None` after the last stream has been opened; the connection then ends with its streams.
    sender: Mutex<Option<SendRequest<Queued>>>,
    usage: Mutex<Usage>,
    /// Streams were opened.
    grown: Notify,
    /// Of all its streams.
    fate: Arc<Fate>,
}

#[derive(Debug)]
struct Usage {
    streams: usize,
    last: Instant,
}

/// The right to one stream on a connection.
#[derive(Debug)]
pub(super) struct Lease(pub(super) Arc<Connection>);

impl Drop for Lease {
    fn drop(&mut self) {
        let mut usage = lock(&self.0.usage);
        usage.streams -= 1;
        usage.last = Instant::now();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every critical section leaves the value whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Connection {
    /// A lease, unless the connection carries as many streams as it may (`limit`, or fewer if the peer says so), or takes no
    /// more.
    pub(super) fn lease(self: &Arc<Self>, limit: usize) -> Option<Lease> {
        let limit = lock(&self.sender)
            .as_ref()
            .map(|sender| limit.min(sender.current_max_send_streams()))?;
        let mut usage = lock(&self.usage);
        if usage.streams >= limit {
            return None;
        }
        usage.streams += 1;
        drop(usage);
        self.grown.notify_one();
        Some(Lease(self.clone()))
    }

    /// Lets no more streams be opened. Those that are open go on.
    pub(super) fn retire(&self) {
        lock(&self.sender).take();
    }

    pub(super) fn is_retired(&self) -> bool {
        lock(&self.sender).is_none()
    }

    /// Since when it has had no stream; `None` while it has.
    pub(super) fn idle_since(&self) -> Option<Instant> {
        let usage = lock(&self.usage);
        (usage.streams == 0).then_some(usage.last)
    }
}

/// A tunnelled connection.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) source: H2Source,
    pub(crate) sink: H2Sink,
    /// Those of the answer, if it has any, until somebody takes them: they would be a third of what is held of an idle stream.
    pub(crate) headers: Option<Box<HeaderMap>>,
    lease: Lease,
}

impl Stream {
    /// Who is at the far end of the tunnel.
    pub(crate) fn peer(&self) -> Option<&SpiffeId> {
        self.lease.0.peer.as_ref()
    }

    /// What it shares with all in the tunnel.
    pub(crate) fn fate(&self) -> Arc<Fate> {
        self.lease.0.fate.clone()
    }
}

impl Lease {
    /// Sends a CONNECT request and waits for its answer.
    pub(super) async fn request(self, request: Request<()>, deadline: Duration) -> Result<Stream, Error> {
        let tunnel = self.0.tunnel;
        let http2 = |source| Error::Http2 { tunnel, source };
        // A connection that was retired meanwhile is as good as one that has gone away.
        let sender = lock(&self.0.sender)
            .clone()
            .ok_or_else(|| http2(Reason::REFUSED_STREAM.into()))?;
        let answer = async {
            let mut sender = sender.ready().await?;
            let (response, sink) = sender.send_request(request, false)?;
            // Holding a sender would keep a retired connection open.
            drop(sender);
            Ok((response.await?, sink))
        };
        let (response, sink) = match timeout(deadline, answer).await {
            Ok(answer) => answer.map_err(http2)?,
            Err(_) => {
                // A peer answers within the time it has to reach its application, which is less. New streams had better not
                // wait for this one.
                self.0.retire();
                return Err(Error::ResponseTimeout {
                    tunnel,
                    after: deadline,
                });
            }
        };
        if response.status() != StatusCode::OK {
            return Err(Error::Status(response.status()));
        }
        let (answer, body) = response.into_parts();
        Ok(Stream {
            source: H2Source(body),
            sink: H2Sink::new(sink),
            headers: (!answer.headers.is_empty()).then(|| Box::new(answer.headers)),
            lease: self,
        })
    }
}

/// A byte stream to a peer, on which HTTP/2 is to be spoken.
pub(crate) struct Dialled<IO> {
    pub(crate) io: IO,
    /// Who is there, by its certificate.
    pub(crate) peer: Option<SpiffeId>,
    /// By which that is known.
    pub(crate) proof: Proof,
}

/// Performs the HTTP/2 handshake with whom was `dialled`. The connection lives as long as the returned driver is run.
pub(super) async fn handshake<IO>(
    dialled: Dialled<IO>,
    number: u64,
    tunnel: SocketAddr,
    max_streams: usize,
    config: Http2Config,
    window: WindowShare,
) -> Result<(Arc<Connection>, Driver<IO>), h2::Error>
where
    IO: AsyncRead + AsyncWrite + Unpin,
{
    let Dialled { io, peer, proof } = dialled;
    let (sender, connection) = h2::client::Builder::new()
        .initial_window_size(config.stream_window_bytes)
        .initial_connection_window_size(config.connection_window_bytes)
        .max_frame_size(config.frame_bytes)
        .max_header_list_size(config.response_header_bytes)
        .max_send_buffer_size(config.stream_window_bytes as usize)
        // What the peer allows is not known before its SETTINGS come.
        .initial_max_send_streams(max_streams)
        // Remembered for as long as the peer may still send on them. The default of 50 is less than one connection's streams.
        .max_concurrent_reset_streams(1024)
        // A guard of servers against their clients: it would end a long-lived connection for its age.
        .max_local_error_reset_streams(None)
        .enable_push(false)
        .handshake::<_, Queued>(io)
        .await?;
    let shared = Arc::new(Connection {
        number,
        tunnel,
        peer,
        sender: Mutex::new(Some(sender)),
        usage: Mutex::new(Usage {
            streams: 0,
            last: Instant::now(),
        }),
        grown: Notify::new(),
        fate: Arc::default(),
    });
    Ok((
        shared.clone(),
        Driver {
            shared,
            connection,
            proof,
            config,
            window,
        },
    ))
}

/// Drives a connection.
pub(super) struct Driver<IO: AsyncRead + AsyncWrite + Unpin> {
    shared: Arc<Connection>,
    connection: h2::client::Connection<IO, Queued>,
    proof: Proof,
    config: Http2Config,
    window: WindowShare,
}

impl<IO: AsyncRead + AsyncWrite + Unpin> Driver<IO> {
    /// Runs the connection to its end; its streams end with it.
    pub(super) async fn run(mut self) {
        let tunnel = self.shared.tunnel;
        let mut dead = pin!(until_dead(self.connection.ping_pong(), self.config));
        let mut revoked = pin!(self.proof.revoked());
        loop {
            tokio::select! {
                end = &mut self.connection => {
                    if let Err(error) = end {
                        tracing::debug!(%tunnel, %error, "tunnel ended");
                    }
                    break;
                }
                () = &mut dead => {
                    tracing::info!(%tunnel, deadline = ?self.config.ping_deadline, "tunnel is dead: no answer to PING");
                    break;
                }
                error = &mut revoked => {
                    self.shared.fate.revoke(&error);
                    tracing::warn!(%tunnel, %error, "tunnel closed");
                    break;
                }
                () = self.shared.grown.notified() => {
                    let streams = lock(&self.shared.usage).streams;
                    if let Some(window) = self.window.grow(&self.config, streams) {
                        self.connection.set_target_window_size(window);
                    }
                }
            }
        }
        self.shared.retire();
    }
}
