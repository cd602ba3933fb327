//! 15001: the connections that the pod's application makes. They go to their destination over HBONE where the mesh says so,
//! and plain elsewhere; one that should go over HBONE and cannot is reset, never sent in plain.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    os::fd::AsFd,
    pin::pin,
    sync::Arc,
    time::Duration,
};

use http::{HeaderValue, Method, Request, Uri, Version, uri::Authority};
use redirector_common::consts::PROXY_PORTS;
use rustls::ClientConfig;
use rustls_pki_types::ServerName;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::{Instant, timeout},
};
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::{
    FORWARDED, FORWARDED_NETWORK, Pod,
    baggage::{BAGGAGE, Told},
    copy::Leg,
    dial,
    draw::Draw,
    failure::{Failure, Flag},
    flows::Redirect,
    hbone::{
        client::{self, Dialled, Stream},
        nested::{self, StreamIo},
        pool::Key,
    },
    metrics::Reason,
    names, plaintext,
    record::{self, Direction, Party, Record, Security},
    relay, same_node,
};
use crate::{
    identity::tls,
    mesh::{
        index::Mesh,
        route::{self, HboneRoute, NoRoute, PlainRoute, Route},
        spiffe::SpiffeId,
        wanted,
    },
    sys::socket,
};

/// Why a connection goes nowhere.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("{0} is neither an address of this pod nor of anybody whose traffic it reroutes")]
    Stranger(SocketAddr),
    #[error("cannot tell where the connection was going")]
    OriginalDst(#[source] io::Error),
    #[error("no route")]
    NoRoute(#[source] NoRoute),
    #[error("no route: {error}")]
    Name {
        error: NoRoute,
        #[source]
        source: names::Error,
    },
    #[error("{0} is a listener of the proxy itself")]
    Loop(SocketAddr),
    #[error("{authority:?} cannot be asked for over HTTP")]
    Authority {
        authority: String,
        #[source]
        source: http::uri::InvalidUri,
    },
    #[error("no tunnel to {authority} within the one to gateway {gateway}")]
    Inner {
        authority: String,
        gateway: SocketAddr,
        #[source]
        source: Box<client::Error>,
    },
    #[error(transparent)]
    Plaintext(#[from] plaintext::Refused),
    #[error(transparent)]
    Dial(#[from] dial::Error),
    #[error(transparent)]
    Tunnel(#[from] Arc<client::Error>),
    #[error("the application gave up before the connection stood")]
    Abandoned,
}

impl Failure for Error {
    fn flag(&self) -> Flag {
        match self {
            Self::Inner { source, .. } => source.flag(),
            Self::Tunnel(error) => error.flag(),
            Self::Plaintext(refused) => refused.flag(),
            _ => Flag::Connect,
        }
    }

    fn advice(&self) -> Option<&'static str> {
        match self {
            Self::Inner { source, .. } => source.advice(),
            Self::Tunnel(error) => error.advice(),
            _ => None,
        }
    }
}

/// What the application is connected to.
enum Way {
    /// Somebody over TCP; and whether that is over a wire.
    Plain { upstream: Leg, on_wire: bool },
    /// Somebody at the far end of a tunnel.
    Tunnel(Stream),
    /// A pod of this node, without a tunnel.
    Neighbour(same_node::Neighbour),
    /// Somebody at the far end of a tunnel within another.
    Nested(Stream, nested::Driver),
}

/// Serves one accepted connection to its end. Whatever goes wrong, the application's leg is reset when it is dropped.
pub(super) async fn connection(pod: Arc<Pod>, application: TcpStream, peer: SocketAddr) {
    let application = Leg::new(application);
    let mut record = Record::new(&pod.recorder, Direction::Outbound, peer);
    // Boxed, since it takes many times what lives as long as the connection.
    let opened = Box::pin(async {
        tokio::select! {
            opened = open(&pod, &application, peer, &mut record) => opened,
            _ = application.broken() => Err(Error::Abandoned),
        }
    });
    let tail = pod.shared.config.tail_deadline;
    match opened.await {
        Ok(Way::Tunnel(mut stream)) => {
            relay::tunnelled(application, (&mut stream.source, &mut stream.sink), record, tail).await;
        }
        Ok(Way::Neighbour(neighbour)) => {
            Box::pin(same_node::join(neighbour, &pod, application, peer, record)).await;
        }
        Ok(Way::Nested(stream, driver)) => {
            Box::pin(nested(application, stream, driver, record, tail)).await;
        }
        Ok(Way::Plain { upstream, on_wire }) => {
            let relayed = relay::plain(application, upstream, record, tail);
            Box::pin(pod.plaintext.unless_refused(on_wire, relayed)).await;
        }
        Err(Error::Plaintext(refused)) => record.refuse(Reason::plaintext, &refused),
        Err(error) => record.fail(&error),
    }
}

/// Finds out where the connection goes, and opens the way there.
async fn open(pod: &Pod, application: &Leg, peer: SocketAddr, record: &mut Record) -> Result<Way, Error> {
    // The listener is open to all that reach the pod; the pod's identity is for the pod alone, and those for whom it answers.
    let rerouted = || pod.shared.redirector.is_rerouted(application.as_fd());
    let redirect = match pod.has_address(peer.ip()) {
        true => Redirect::Outbound,
        false if rerouted().unwrap_or(false) => Redirect::Rerouted,
        false => return Err(Error::Stranger(peer)),
    };
    let destination = pod.shared.redirector.original_dst(application.as_fd());
    let destination = destination.map_err(Error::OriginalDst)?;
    let facts = record.facts();
    facts.original_dst = Some(destination);
    facts.dst = Some(destination);
    facts.source = pod.own_party();
    facts.redirect = Some(redirect);
    let mut draw = Draw::default();
    let route = loop {
        match decided(pod, peer, destination, &mut draw).await {
            Ok(route) => break route,
            Err(error) => match draw.lacks(&error) {
                Some(hostname) => draw.resolve(hostname, &pod.shared.names).await,
                None => {
                    return Err(match draw.failed(&error) {
                        Some(source) => Error::Name { error, source },
                        None => Error::NoRoute(error),
                    });
                }
            },
        }
    };
    match route {
        Route::Hbone(route) => hbone(pod, peer, route, record).await,
        Route::Plain(route) => plain(pod, route, record).await,
    }
}

/// The mesh's decision, as soon as it is more than a guess.
async fn decided(
    pod: &Pod,
    peer: SocketAddr,
    destination: SocketAddr,
    draw: &mut Draw,
) -> Result<Route, NoRoute> {
    let decide = |mesh: &Mesh| route::outbound(mesh, pod.local(), peer.ip(), destination, draw);
    let wanted = |_: &Mesh, decided: &_| {
        let name = wanted::outbound(pod.local(), peer.ip(), destination, decided);
        name.into_iter().collect()
    };
    pod.settled(pod.asker.as_ref(), decide, NoRoute::is_transient, wanted)
        .await
}

async fn plain(pod: &Pod, route: PlainRoute, record: &mut Record) -> Result<Way, Error> {
    let target = route.target;
    let facts = record.facts();
    facts.dst = Some(target);
    facts.service = route.service;
    facts.destination = route.workload.as_ref().map(Into::into).unwrap_or_default();
    // It would reach this very listener, and so on until the files run out. Ports first: they are cheaper to compare.
    let is_here = |ip: IpAddr| ip.is_loopback() || ip.is_unspecified() || pod.has_address(ip);
    if PROXY_PORTS.contains(&target.port()) && is_here(target.ip()) {
        return Err(Error::Loop(target));
    }
    let on_wire = !pod.is_self(target.ip());
    if on_wire && pod.plaintext.is_refused() {
        return Err(plaintext::Refused.into());
    }
    record.plain = on_wire.then(|| pod.plaintext.clone());
    record.open(Security::Unknown);
    tokio::select! {
        biased;
        () = pod.plaintext.refused(), if on_wire => Err(plaintext::Refused.into()),
        dialled = dial::upstream(pod, target) => Ok(Way::Plain { upstream: Leg::new(dialled?), on_wire }),
    }
}

async fn hbone(pod: &Pod, peer: SocketAddr, route: HboneRoute, record: &mut Record) -> Result<Way, Error> {
    let facts = record.facts();
    facts.dst = Some(route.tunnel);
    facts.hbone_dst = Some((&route.authority).into());
    facts.source.identity = Some(pod.identity.id().clone());
    facts.destination = (&route.workload).into();
    facts.service = route.service.clone();
    facts.nested = route.inner.is_some();
    if pod.shared.config.same_node_direct {
        match same_node::find(pod, peer, &route) {
            Ok(neighbour) => return Ok(Way::Neighbour(neighbour)),
            Err(elsewhere) => {
                tracing::debug!(dst.workload = %route.workload.uid, reason = record::chain(&elsewhere), "goes over HBONE");
            }
        }
    }
    record.open(Security::MutualTls);
    let request = request(pod, peer, &route)?;
    let key = Key {
        source: pod.identity.id().clone(),
        workload: route.far_end.uid.clone(),
        expected: route.expected.clone(),
        tunnel: route.tunnel,
    };
    let mut stream = pod.pool.open(&key, &request, || dial_tunnel(pod, &route)).await?;
    record.in_tunnel(stream.fate());
    // Not to be held as long as the connection; here they tell nothing that is not known.
    stream.headers = None;
    let Some(expected) = &route.inner else {
        record.reached(Party {
            identity: stream.peer().cloned(),
            ..record.known().destination.clone()
        });
        return Ok(Way::Tunnel(stream));
    };
    let (mut stream, driver) = Box::pin(within(pod, stream, request, &route, expected)).await?;
    // Nobody here knows more of the far end than it says itself.
    let told = Told::by(&stream.headers.take().unwrap_or_default());
    record.reached(Party {
        workload: told.workload.map(Into::into),
        namespace: told.namespace.map(Into::into),
        identity: stream.peer().cloned(),
        of: None,
    });
    Ok(Way::Nested(stream, driver))
}

/// A tunnel of its own to whom the gateway at the far end of `outer` has chosen, who must show one of the identities `expected`.
async fn within(
    pod: &Pod,
    outer: Stream,
    mut request: Request<()>,
    route: &HboneRoute,
    expected: &[SpiffeId],
) -> Result<(Stream, nested::Driver), Error> {
    let tunnel = route.tunnel;
    let opened = async {
        let config = client_config(pod, expected, tunnel).await?;
        let dialled = handshake(pod, config, StreamIo::new(outer), tunnel).await?;
        // A name that no header can hold leaves it out: then the source is looked up by its address, in vain.
        if let Ok(network) = HeaderValue::try_from(&pod.shared.config.home.network) {
            request.headers_mut().insert(FORWARDED_NETWORK, network);
        }
        pod.pool.open_alone(tunnel, request, dialled).await
    };
    opened.await.map_err(|source| Error::Inner {
        authority: route.authority.to_string(),
        gateway: tunnel,
        source: Box::new(source),
    })
}

/// Time that the last words of a tunnel within another have to leave.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Relays a connection whose tunnel is within another, and runs that tunnel to its end.
async fn nested(
    application: Leg,
    mut stream: Stream,
    mut driver: nested::Driver,
    record: Box<Record>,
    tail: Duration,
) {
    let relayed = async {
        relay::tunnelled(application, (&mut stream.source, &mut stream.sink), record, tail).await;
        // The connection ends when the last that could use it is gone.
        drop(stream);
    };
    let mut relayed = pin!(relayed);
    tokio::select! {
        () = &mut relayed => {
            // Its last words: the end of the stream or its reset, of HTTP/2, of TLS, and of the stream below. Nobody is waited for
            // longer than it takes to pass them on: what waits here counts as a connection of the pod's.
            let _ = timeout(tail.min(LAST_WORDS), driver).await;
        }
        () = &mut driver => relayed.await,
    }
}

/// TCP and mutual TLS to a tunnel's far end.
async fn dial_tunnel(pod: &Pod, route: &HboneRoute) -> Result<Dialled<TlsStream<TcpStream>>, client::Error> {
    let tunnel = route.tunnel;
    let config = client_config(pod, &route.expected, tunnel).await?;
    let tcp = dial::upstream(pod, tunnel).await.map_err(|error| match error {
        dial::Error::TimedOut { after, .. } => client::Error::ConnectTimeout { tunnel, after },
        source => client::Error::Connect { tunnel, source },
    })?;
    // The tunnel is in use from here on, and its last words are to arrive.
    socket::reset_when_dropped(tcp.as_fd(), false).map_err(|source| client::Error::Connect {
        tunnel,
        source: dial::Error::Socket {
            destination: tunnel,
            source,
        },
    })?;
    handshake(pod, config, tcp, tunnel).await
}

/// For a tunnel whose far end must show one of the identities `expected`.
async fn client_config(
    pod: &Pod,
    expected: &[SpiffeId],
    tunnel: SocketAddr,
) -> Result<Arc<ClientConfig>, client::Error> {
    let config = pod.identity.client_config(expected).await;
    config.map_err(|source| client::Error::Identity { tunnel, source })
}

/// Mutual TLS with the far end of `io`.
async fn handshake<IO: AsyncRead + AsyncWrite + Unpin>(
    pod: &Pod,
    config: Arc<ClientConfig>,
    io: IO,
    tunnel: SocketAddr,
) -> Result<Dialled<TlsStream<IO>>, client::Error> {
    let after = pod.shared.config.pool.handshake_deadline;
    // An address is never sent as SNI; who the peer must be is in the configuration.
    let name = ServerName::IpAddress(tunnel.ip().into());
    let began = Instant::now();
    let shaken = timeout(after, TlsConnector::from(config).connect(name, io)).await;
    pod.count_handshake(Direction::Outbound, began, &shaken);
    let io = shaken
        .map_err(|_| client::Error::HandshakeTimeout { tunnel, after })?
        .map_err(|source| client::Error::Tls { tunnel, source })?;
    let chain = io.get_ref().1.peer_certificates().unwrap_or_default();
    let (peer, proof) = (tls::peer_identity(chain), pod.identity.proof(chain));
    Ok(Dialled { io, peer, proof })
}

/// The CONNECT request for a route.
fn request(pod: &Pod, client: SocketAddr, route: &HboneRoute) -> Result<Request<()>, Error> {
    let host = route
        .service
        .as_ref()
        .map(|service| service.host.hostname.as_ref());
    let baggage = pod.baggage.header(&route.caller);
    connect_request(&route.authority.to_string(), client, host, baggage)
}

fn connect_request(
    authority: &str,
    client: SocketAddr,
    host: Option<&str>,
    baggage: Option<HeaderValue>,
) -> Result<Request<()>, Error> {
    let mut request = Request::new(());
    *request.method_mut() = Method::CONNECT;
    *request.version_mut() = Version::HTTP_2;
    // Only an authority: CONNECT has neither scheme nor path.
    *request.uri_mut() =
        Authority::try_from(authority)
            .map(Uri::from)
            .map_err(|source| Error::Authority {
                authority: authority.to_owned(),
                source,
            })?;
    let forwarded = match host {
        Some(host) => format!("for=\"{client}\";host={host}"),
        None => format!("for=\"{client}\""),
    };
    let trace = format!(
        "00-{:032x}-{:016x}-00",
        rand::random::<u128>().max(1),
        rand::random::<u64>().max(1)
    );
    let headers = request.headers_mut();
    for (name, value) in [(FORWARDED, forwarded), ("traceparent", trace)] {
        // A host name that cannot be in a header leaves it out: it serves logs only.
        if let Ok(value) = HeaderValue::try_from(value) {
            headers.insert(name, value);
        }
    }
    if let Some(baggage) = baggage {
        headers.insert(BAGGAGE, baggage);
    }
    Ok(request)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_takes_a_kilobyte_while_it_is_open() {
        // Thousands are idle at a time. An async fn that takes another's future by value holds it twice: pin it, or box what ends before.
        let bytes = size_of_task(connection);
        assert!(bytes <= 1_024, "{bytes} bytes");
    }

    /// Of what a function that is started for each of them leaves to run.
    fn size_of_task<A, B, C, F: Future>(_: fn(A, B, C) -> F) -> usize {
        size_of::<F>()
    }

    #[test]
    fn the_request_has_an_authority_and_nothing_that_connect_forbids() {
        for (authority, text) in [
            ("10.1.2.3:8080", "10.1.2.3:8080"),
            ("[fd00::1]:80", "[fd00::1]:80"),
        ] {
            let request = connect_request(authority, "10.1.9.9:4242".parse().unwrap(), None, None);
            let request = request.unwrap();
            assert_eq!(request.method(), Method::CONNECT);
            assert_eq!(request.uri().authority().unwrap(), text);
            assert_eq!((request.uri().scheme(), request.uri().path()), (None, ""));
            assert_eq!(request.headers()["forwarded"], "for=\"10.1.9.9:4242\"");
            assert!(!request.headers().contains_key("baggage"));
            let trace = request.headers()["traceparent"].to_str().unwrap();
            assert_eq!(trace.len(), 55);
            assert!(trace.starts_with("00-") && trace.ends_with("-00"), "{trace}");
        }
    }

    #[test]
    fn the_request_says_who_calls_and_by_which_name() {
        let request = connect_request(
            "cart.shop.svc.cluster.local:80",
            "[fd00::9]:4242".parse().unwrap(),
            Some("cart.shop.svc.cluster.local"),
            Some(HeaderValue::from_static("k8s.namespace.name=shop")),
        )
        .unwrap();
        assert_eq!(
            request.uri().authority().unwrap(),
            "cart.shop.svc.cluster.local:80"
        );
        assert_eq!(
            request.headers()["forwarded"],
            "for=\"[fd00::9]:4242\";host=cart.shop.svc.cluster.local"
        );
        assert_eq!(request.headers()["baggage"], "k8s.namespace.name=shop");
    }

    #[test]
    fn names_that_no_header_can_hold_are_left_out_and_those_that_no_request_can_are_errors() {
        let client = "10.1.9.9:1".parse().unwrap();
        let request = connect_request("10.1.2.3:80", client, Some("we\nb"), None).unwrap();
        assert!(!request.headers().contains_key("forwarded"));
        for bad in ["we\nb:80", "a b:80", "a/b:80", ""] {
            assert!(
                matches!(
                    connect_request(bad, client, None, None),
                    Err(Error::Authority { .. })
                ),
                "{bad:?}"
            );
        }
    }
}
