//! What lies below the library's client: connections with this program's TLS, the token in each request, and a deadline.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use http::{Request, Uri, header::AUTHORIZATION, uri::PathAndQuery};
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::{
    client::legacy::{
        Client,
        connect::{Connected, Connection},
    },
    rt::{TokioExecutor, TokioIo, TokioTimer},
};
use kube::client::Body;
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;
use tower::{BoxError, service_fn};

use super::{ANSWER_DEADLINE, Target};
use crate::control_plane::{
    Error,
    channel::{in_time, tls_stream},
};

/// Connections that are kept for the next request.
const IDLE_CONNECTIONS: usize = 8;

/// A client for `target`.
pub(super) fn client(target: &Target) -> Result<kube::Client, Error> {
    let (config, name) = (target.tls()?, target.name.clone());
    let connector = service_fn(move |uri: Uri| {
        let connecting = tls_stream(uri, Arc::clone(&config), name.clone());
        Box::pin(async move { in_time(connecting).await.map(Stream) })
    });
    let http = Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .pool_max_idle_per_host(IDLE_CONNECTIONS)
        .build(connector);
    let (server, token) = (target.server.clone(), target.token.clone());
    let service = service_fn(move |mut request: Request<Body>| {
        let (server, token, http) = (server.clone(), token.clone(), http.clone());
        async move {
            *request.uri_mut() = absolute(&server, request.uri())?;
            if let Some(token) = &token {
                let header = token.header().await?;
                let mut value = http::HeaderValue::from_bytes(header.as_bytes())?;
                value.set_sensitive(true);
                request.headers_mut().insert(AUTHORIZATION, value);
            }
            let answer = tokio::time::timeout(ANSWER_DEADLINE, http.request(request)).await;
            let late = || {
                let text = format!("no answer within {ANSWER_DEADLINE:?}");
                io::Error::new(io::ErrorKind::TimedOut, text)
            };
            Ok::<_, BoxError>(answer.map_err(|_| late())??)
        }
    });
    Ok(kube::Client::new(service, "default"))
}

/// Where a request goes: the API may be below a path of the server.
fn absolute(server: &Uri, wanted: &Uri) -> Result<Uri, http::Error> {
    let below = server.path().trim_end_matches('/');
    let rest = wanted.path_and_query().map_or("/", PathAndQuery::as_str);
    let mut parts = server.clone().into_parts();
    parts.path_and_query = Some(format!("{below}{rest}").parse()?);
    Ok(Uri::from_parts(parts)?)
}

/// A connection, as the HTTP library wants it.
struct Stream(TokioIo<TlsStream<TcpStream>>);

impl Connection for Stream {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl Read for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buffer)
    }
}

impl Write for Stream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_go_below_the_server_s_path() {
        for (server, expected) in [
            ("https://10.0.0.1:6443", "https://10.0.0.1:6443/apis/x?a=b"),
            ("https://[fd00::1]/", "https://[fd00::1]/apis/x?a=b"),
            (
                "https://proxy/k8s/clusters/c/",
                "https://proxy/k8s/clusters/c/apis/x?a=b",
            ),
        ] {
            let made = absolute(&server.parse().unwrap(), &"/apis/x?a=b".parse().unwrap());
            assert_eq!(made.unwrap().to_string(), expected);
        }
    }
}
