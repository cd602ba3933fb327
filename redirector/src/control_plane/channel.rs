//! The connection.

use std::{
    io,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use http::Uri;
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls_pki_types::{CertificateDer, ServerName};
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tonic::{client::Grpc, metadata::MetadataMap, transport};
use tower::service_fn;

use super::{Address, Config, Error, address::host_and_port, tls};

/// Time for name, TCP and TLS together.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);

/// Silence before the first keepalive probe of TCP, time between them, and how many remain unanswered.
const TCP_KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(300), Duration::from_secs(75), 9);

/// Time between pings of HTTP/2, and how long the answer may take: a server that is gone without a word is noticed by them.
const PING: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(10));

/// What may be under way in one answer, and on the connection, in bytes: a whole mesh is tens of megabytes.
const WINDOWS: (u32, u32) = (4 << 20, 8 << 20);

/// A connection to a control plane, made when it is first used. Clones share it.
#[derive(Debug, Clone)]
pub struct Channel {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    config: Config,
    /// The connection, and the roots that it was made with.
    made: Mutex<Option<(Vec<CertificateDer<'static>>, transport::Channel)>>,
}

impl Channel {
    /// Does not connect yet.
    pub fn new(config: Config) -> Self {
        let shared = Shared {
            config,
            made: Mutex::new(None),
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    /// Where it leads to.
    pub fn address(&self) -> &Address {
        &self.shared.config.address
    }

    /// A client on the connection. It connects with the first request and again after a loss; when the roots have changed, what
    /// is asked from now on goes by a new connection. Requests have no deadline of their own.
    ///
    /// # Errors
    /// When the roots cannot be read or used.
    pub async fn service(&self) -> Result<Grpc<transport::Channel>, Error> {
        let roots = match &self.shared.config.address {
            Address::Tls(_) => self.shared.config.roots.load().await?,
            Address::Plain(_) | Address::Unix(_) => Vec::new(),
        };
        let mut made = self.shared.made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((with, channel)) = &*made
            && *with == roots
        {
            return Ok(Grpc::new(channel.clone()));
        }
        let channel = self.shared.config.connect(&roots)?;
        *made = Some((roots, channel.clone()));
        Ok(Grpc::new(channel))
    }

    /// Metadata of one request: token, cluster and the settings' headers.
    ///
    /// # Errors
    /// When there is to be a token and it cannot be read or sent.
    pub async fn metadata(&self) -> Result<MetadataMap, Error> {
        self.shared.config.auth.metadata().await
    }
}

impl Config {
    /// Whether a connection can be made, with TLS where it is to have it; it is closed again.
    ///
    /// # Errors
    /// Why not.
    pub async fn reach(&self) -> Result<(), Error> {
        let connected = match &self.address {
            Address::Tls(uri) => {
                let config = tls::client_config(self, &self.roots.load().await?)?;
                let name = server_name(uri)?;
                in_time(http2_stream(uri.clone(), config, name)).await.map(drop)
            }
            Address::Plain(uri) => in_time(tcp_stream(uri.clone())).await.map(drop),
            Address::Unix(path) => in_time(UnixStream::connect(path)).await.map(drop),
        };
        connected.map_err(Error::Connect)
    }

    fn connect(&self, roots: &[CertificateDer<'static>]) -> Result<transport::Channel, Error> {
        let endpoint = |uri: &Uri| {
            transport::Endpoint::from(uri.clone())
                .connect_timeout(CONNECT_DEADLINE)
                .initial_stream_window_size(WINDOWS.0)
                .initial_connection_window_size(WINDOWS.1)
                .http2_keep_alive_interval(PING.0)
                .keep_alive_timeout(PING.1)
                .keep_alive_while_idle(true)
        };
        Ok(match &self.address {
            Address::Tls(uri) => {
                let config = tls::client_config(self, roots)?;
                let (host, _) = host_and_port(uri);
                let name = server_name(uri)?;
                // Told as http to the library, which else wants to do TLS itself where another crate has switched its TLS on.
                let plain = Uri::builder().scheme("http").path_and_query("/");
                let authority = uri.authority().cloned();
                let plain = authority.and_then(|authority| plain.authority(authority).build().ok());
                let plain = plain.ok_or_else(|| Error::Name(host.to_owned()))?;
                let endpoint = endpoint(&plain).origin(uri.clone());
                endpoint.connect_with_connector_lazy(service_fn(move |uri| {
                    in_time(http2_stream(uri, Arc::clone(&config), name.clone()))
                }))
            }
            Address::Plain(uri) => {
                endpoint(uri).connect_with_connector_lazy(service_fn(|uri| in_time(tcp_stream(uri))))
            }
            Address::Unix(path) => {
                let path: Arc<Path> = Arc::from(path.as_path());
                // What gRPC says of a server without a host name.
                let uri = Uri::from_static("http://localhost");
                endpoint(&uri).connect_with_connector_lazy(service_fn(move |_| {
                    let path = Arc::clone(&path);
                    in_time(async move { UnixStream::connect(path).await })
                }))
            }
        })
    }
}

fn server_name(uri: &Uri) -> Result<ServerName<'static>, Error> {
    let (host, _) = host_and_port(uri);
    ServerName::try_from(host.to_owned()).map_err(|_| Error::Name(host.to_owned()))
}

/// A connection as the HTTP library wants it, or a failure when the deadline has passed.
pub(super) async fn in_time<T>(connecting: impl Future<Output = io::Result<T>>) -> io::Result<TokioIo<T>> {
    let connected = tokio::time::timeout(CONNECT_DEADLINE, connecting).await;
    let late = || {
        io::Error::new(
            io::ErrorKind::TimedOut,
            format!("not connected within {CONNECT_DEADLINE:?}"),
        )
    };
    connected.map_err(|_| late())?.map(TokioIo::new)
}

async fn tcp_stream(uri: Uri) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(host_and_port(&uri)).await?;
    stream.set_nodelay(true)?;
    let (time, interval, retries) = TCP_KEEPALIVE;
    let keepalive = TcpKeepalive::new()
        .with_time(time)
        .with_interval(interval)
        .with_retries(retries);
    SockRef::from(&stream).set_tcp_keepalive(&keepalive)?;
    Ok(stream)
}

/// A connection with TLS, whatever is spoken in it.
pub(super) async fn tls_stream(
    uri: Uri,
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
) -> io::Result<TlsStream<TcpStream>> {
    let stream = tcp_stream(uri).await?;
    TlsConnector::from(config).connect(name, stream).await
}

async fn http2_stream(
    uri: Uri,
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
) -> io::Result<TlsStream<TcpStream>> {
    let stream = tls_stream(uri, config, name).await?;
    if stream.get_ref().1.alpn_protocol() != Some(b"h2") {
        return Err(io::Error::other("the server does not speak HTTP/2 (by ALPN)"));
    }
    Ok(stream)
}
