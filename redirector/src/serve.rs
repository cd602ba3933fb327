//! A bounded HTTP/1.1 server over TCP or a Unix socket.
//!
//! `pods::cni_server` and `admin` answer through it. It bounds the number of connections, the size and the time of a
//! request; what a request means is its handler's matter. One request per connection, so that nobody can hold one.

use std::{
    borrow::Borrow,
    convert::Infallible,
    future::Future,
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, UnixListener},
    sync::Semaphore,
    task::JoinSet,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

/// What a server takes on.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Connections at one time; others wait in the listener's queue.
    pub connections: usize,
    /// Bytes of a request's body.
    pub body_bytes: usize,
    /// Time to the end of the request's head.
    pub header_deadline: Duration,
    /// Time from there to the end of its body.
    pub body_deadline: Duration,
    /// Time for everything, the answer included.
    pub connection_deadline: Duration,
    /// How long answers that are being made may take when the server is asked to stop.
    pub stop_deadline: Duration,
}

/// Bytes of a request's head.
const HEADER_BYTES: usize = 16 * 1024;

/// A listening socket.
#[derive(Debug)]
pub enum Listener {
    /// TCP.
    Tcp(TcpListener),
    /// Unix stream.
    Unix(UnixListener),
}

/// Who is at the other end of a Unix socket, as it was when it connected. Requests that come over one have it among their extensions.
#[derive(Debug, Clone, Copy)]
pub struct Caller {
    /// Its user, as this process's user namespace knows it.
    pub uid: u32,
}

impl Listener {
    async fn accept(&self) -> io::Result<(Box<dyn Stream>, Option<Caller>)> {
        Ok(match self {
            Self::Tcp(listener) => (Box::new(listener.accept().await?.0), None),
            Self::Unix(listener) => {
                let (stream, _) = listener.accept().await?;
                let uid = stream.peer_cred()?.uid();
                (Box::new(stream), Some(Caller { uid }))
            }
        })
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(listener) => listener.as_fd(),
            Self::Unix(listener) => listener.as_fd(),
        }
    }
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// An answer, whole or made as it is read.
pub type Answer = Response<UnsyncBoxBody<Bytes, Infallible>>;

/// An answer of plain text; an empty one has no type.
pub fn text(status: StatusCode, body: impl Into<String>) -> Answer {
    let body = body.into();
    let is_empty = body.is_empty();
    let mut answer = Response::new(Full::from(body).boxed_unsync());
    *answer.status_mut() = status;
    if !is_empty {
        let kind = header::HeaderValue::from_static("text/plain; charset=utf-8");
        answer.headers_mut().insert(header::CONTENT_TYPE, kind);
    }
    answer
}

/// The refusal of any method but `allowed`.
pub fn method_not_allowed(allowed: &Method) -> Answer {
    let mut answer = text(
        StatusCode::METHOD_NOT_ALLOWED,
        format!("only {allowed} is allowed here\n"),
    );
    if let Ok(value) = header::HeaderValue::from_str(allowed.as_str()) {
        answer.headers_mut().insert(header::ALLOW, value);
    }
    answer
}

/// Serves until `stop`; then no new connection is taken, and those there are get a moment to finish. Of a listener that is lent the
/// others wait for whoever serves it next.
pub async fn serve<H, F>(listener: impl Borrow<Listener>, limits: Limits, stop: CancellationToken, handler: H)
where
    H: Fn(Request<Bytes>) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Answer> + Send + 'static,
{
    let free = Arc::new(Semaphore::new(limits.connections));
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            Some(_) = connections.join_next(), if !connections.is_empty() => continue,
            accepted = async {
                let permit = Arc::clone(&free).acquire_owned().await;
                (permit, listener.borrow().accept().await)
            } => accepted,
        };
        match accepted {
            (Ok(permit), Ok((stream, caller))) => {
                let handler = handler.clone();
                connections.spawn(async move {
                    connection(stream, caller, limits, handler).await;
                    drop(permit);
                });
            }
            (_, Err(error)) => {
                // Mostly EMFILE: to try at once again would only burn the CPU.
                warn!(%error, "cannot accept a connection");
                sleep(Duration::from_millis(100)).await;
            }
            // The semaphore is never closed.
            (Err(_), _) => break,
        }
    }
    drop(listener);
    // Not told to end: what was accepted last may not even have been read.
    let finish = async { while connections.join_next().await.is_some() {} };
    let _ = timeout(limits.stop_deadline, finish).await;
    connections.shutdown().await;
}

async fn connection<H, F>(stream: Box<dyn Stream>, caller: Option<Caller>, limits: Limits, handler: H)
where
    H: Fn(Request<Bytes>) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Answer> + Send + 'static,
{
    let service = service_fn(move |request: Request<Incoming>| {
        let handler = handler.clone();
        async move {
            Ok::<_, Infallible>(match whole(request, limits).await {
                Ok(mut request) => {
                    if let Some(caller) = caller {
                        request.extensions_mut().insert(caller);
                    }
                    handler(request).await
                }
                Err(refusal) => refusal,
            })
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header_deadline)
        .max_buf_size(HEADER_BYTES)
        .keep_alive(false)
        .half_close(true)
        .serve_connection(TokioIo::new(stream), service);
    match timeout(limits.connection_deadline, connection).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => debug!(%error, "HTTP connection ended"),
        Err(_) => debug!("HTTP connection ended: it took too long"),
    }
}

/// The request with its whole body, or the refusal of it.
async fn whole(request: Request<Incoming>, limits: Limits) -> Result<Request<Bytes>, Answer> {
    let (head, body) = request.into_parts();
    match timeout(limits.body_deadline, collect(body, limits.body_bytes)).await {
        Ok(Ok(Some(body))) => Ok(Request::from_parts(head, body)),
        Ok(Ok(None)) => Err(text(
            StatusCode::PAYLOAD_TOO_LARGE,
            format!("body of more than {} bytes\n", limits.body_bytes),
        )),
        Ok(Err(error)) => Err(text(
            StatusCode::BAD_REQUEST,
            format!("cannot read the body: {error}\n"),
        )),
        Err(_) => Err(text(
            StatusCode::REQUEST_TIMEOUT,
            "the body did not arrive in time\n",
        )),
    }
}

/// The whole body, or nothing when it is longer than `max_bytes`. Some of the excess is read and thrown away: a connection
/// that closes with unread data in it is reset, and the client may not see the refusal.
async fn collect(mut body: Incoming, max_bytes: usize) -> Result<Option<Bytes>, hyper::Error> {
    const EXCESS_BYTES: usize = 1024 * 1024;
    let (mut whole, mut seen) = (BytesMut::new(), 0);
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame?.into_data() else { continue };
        seen += data.len();
        if seen > max_bytes + EXCESS_BYTES {
            break;
        }
        if seen <= max_bytes {
            whole.extend_from_slice(&data);
        }
    }
    Ok((seen <= max_bytes).then(|| whole.freeze()))
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpStream,
        task::JoinHandle,
    };

    use super::*;

    const LIMITS: Limits = Limits {
        connections: 2,
        body_bytes: 8,
        header_deadline: Duration::from_millis(200),
        body_deadline: Duration::from_millis(200),
        connection_deadline: Duration::from_secs(5),
        stop_deadline: Duration::from_secs(2),
    };

    async fn start() -> (std::net::SocketAddr, CancellationToken, JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let echo = |request: Request<Bytes>| async move {
            text(
                StatusCode::OK,
                String::from_utf8_lossy(request.body()).into_owned(),
            )
        };
        let task = tokio::spawn(serve(Listener::Tcp(listener), LIMITS, stop.clone(), echo));
        (address, stop, task)
    }

    async fn exchange(address: std::net::SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        String::from_utf8(answer).unwrap()
    }

    #[tokio::test]
    async fn requests_are_answered_within_their_bounds() {
        let (address, stop, task) = start().await;
        for (request, expected) in [
            (
                "POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc",
                "HTTP/1.1 200",
            ),
            (
                "POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nabcdefghi",
                "HTTP/1.1 413",
            ),
            (
                "POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n9\r\nabcdefghi\r\n0\r\n\r\n",
                "HTTP/1.1 413",
            ),
            (
                "POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\na",
                "HTTP/1.1 408",
            ),
            ("nonsense\r\n\r\n", "HTTP/1.1 400"),
            ("POST / HTTP/1.1\r\n", ""),
        ] {
            let answer = exchange(address, request).await;
            assert!(answer.starts_with(expected), "{request:?}: {answer:?}");
        }
        stop.cancel();
        task.await.unwrap();
    }

    #[tokio::test]
    async fn connections_that_stay_silent_give_their_place_back() {
        let (address, stop, task) = start().await;
        let _silent = [
            TcpStream::connect(address).await.unwrap(),
            TcpStream::connect(address).await.unwrap(),
        ];
        let answer = exchange(address, "GET / HTTP/1.1\r\nhost: x\r\n\r\n").await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer:?}");
        stop.cancel();
        task.await.unwrap();
    }
}
