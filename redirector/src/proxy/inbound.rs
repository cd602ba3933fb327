//! 15008: HBONE from other pods. Mutual TLS, then any number of CONNECT requests, each a connection to the application that
//! the pod's policies permit.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::AsFd,
    pin::pin,
    sync::Arc,
    time::Duration,
};

use http::{HeaderMap, StatusCode};
use tokio::{
    net::TcpStream,
    sync::{Semaphore, SemaphorePermit},
    time::{Instant, timeout},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use super::{
    Config, FORWARDED, FORWARDED_NETWORK, Pod,
    baggage::{BAGGAGE, Told},
    connections::{Admitted, Denied, Flow},
    copy::{Leg, Refused, Sink},
    dial,
    failure::{self, Failure, Fate, Flag},
    flows::Redirect,
    hbone::server::{self, Connect},
    metrics::Reason,
    proxy_protocol,
    record::{Direction, Party, Record, Security},
    relay,
};
use crate::{
    identity::{
        self,
        tls::{self, Proof},
    },
    mesh::{
        index::Mesh,
        pod::Local,
        policy::PolicyName,
        route::{self, Refusal, Upstream},
        service::Service,
        spiffe::SpiffeId,
        wanted,
        workload::NamespacedHostname,
    },
    sys::socket,
};

/// Why a tunnel, or a connection in it, did not come about.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("cannot tell on which address the tunnel came in")]
    LocalAddress(#[source] io::Error),
    #[error("no certificate to show")]
    Identity(#[source] identity::Error),
    #[error("TLS handshake failed")]
    Tls(#[source] io::Error),
    #[error("TLS handshake was not over after {after:?}")]
    TlsTimeout { after: Duration },
    #[error("the peer's certificate holds no SPIFFE identity")]
    NoPeerIdentity,
    #[error("request refused with {status}")]
    Refused {
        status: StatusCode,
        #[source]
        source: Refusal,
    },
    #[error(transparent)]
    Denied(Denied),
    #[error("{max} connections are tunnelled to the pod already")]
    TooMany { max: usize },
    #[error("{max} connections of this peer are tunnelled to the pod already")]
    TooManyOfPeer { max: usize },
    #[error("the application did not take its PROXY protocol header")]
    ProxyHeader(#[source] io::Error),
    #[error("the peer gave up before the application answered")]
    Abandoned,
    #[error(transparent)]
    Dial(dial::Error),
    #[error(transparent)]
    Http2(server::Error),
}

impl Failure for Error {
    fn flag(&self) -> Flag {
        match self {
            Self::Identity(_) | Self::NoPeerIdentity => Flag::Identity,
            Self::Tls(error) => failure::of_tls(error),
            Self::TlsTimeout { .. } => Flag::TlsFailure,
            Self::Denied(denied) => denied.flag(),
            Self::Http2(_) => Flag::Http2Failure,
            _ => Flag::Connect,
        }
    }

    fn policy(&self) -> Option<&PolicyName> {
        match self {
            Self::Denied(denied) => denied.policy(),
            _ => None,
        }
    }

    fn advice(&self) -> Option<&'static str> {
        match self {
            Self::Tls(error) => failure::advice_of_tls(error),
            _ => None,
        }
    }
}

/// A tunnel's ends.
pub(super) struct Tunnel {
    /// The peer's TCP address.
    pub(super) peer: SocketAddr,
    /// Who is there.
    pub(super) identity: SpiffeId,
    /// The pod's address that it came in on.
    pub(super) local: SocketAddr,
    /// How many more requests this peer may have open, over all its tunnels.
    pub(super) streams: Arc<Semaphore>,
    /// Of all that is in it.
    pub(super) fate: Arc<Fate>,
}

/// Serves one accepted connection, a tunnel, to its end. Its streams are tasks of their own and may outlive it by the time
/// they take to notice.
pub(super) async fn connection(pod: Arc<Pod>, stream: TcpStream, peer: SocketAddr) {
    let left = pod.peers.at(peer.ip());
    let refuse = |reason| {
        let metrics = &pod.shared.metrics;
        pod.peers.refuse(&pod.info.uid, metrics, reason, &stream, peer);
    };
    let Ok(_tunnel) = left.tunnels.try_acquire() else {
        return refuse(Reason::tunnels);
    };
    // The peer's own first: one that has too many takes none from the others.
    let Ok(handshake) = left.handshakes.try_acquire() else {
        return refuse(Reason::handshakes);
    };
    let Ok(of_all) = pod.peers.handshakes.try_acquire() else {
        return refuse(Reason::handshakes);
    };
    let mut record = Record::new(&pod.recorder, Direction::Inbound, peer);
    record.facts().redirect = Some(Redirect::Hbone);
    let (io, tunnel, mut proof) = match accept(&pod, stream, peer).await {
        Ok(accepted) => accepted,
        Err(error) => return record.fail(&error),
    };
    drop((handshake, of_all));
    record.into_tunnel();
    let tunnel = Arc::new(tunnel);
    let config = &pod.shared.config;
    let served = server::serve(
        io,
        config.http2,
        pod.inbound_windows.share(),
        config.handshake_deadline,
        &pod.drain,
        |connect| {
            pod.spawn(request(pod.clone(), tunnel.clone(), Box::new(connect)));
        },
    );
    let revoked = async {
        let error = proof.revoked().await;
        // Before the tunnel is dropped with all that is in it.
        tunnel.fate.revoke(&error);
        error
    };
    let served = tokio::select! {
        served = served => served,
        error = revoked => {
            tracing::warn!(uid = %pod.info.uid, src.addr = %peer, src.identity = %tunnel.identity, %error, "tunnel closed");
            return;
        }
    };
    if let Err(error) = served {
        tracing::debug!(src.addr = %peer, src.identity = %tunnel.identity, error = %super::record::chain(&error), "tunnel ended");
    }
}

async fn accept(
    pod: &Pod,
    stream: TcpStream,
    peer: SocketAddr,
) -> Result<(TlsStream<TcpStream>, Tunnel, Proof), Error> {
    let local = socket::local_addr(stream.as_fd()).map_err(Error::LocalAddress)?;
    // Asked for each tunnel, so that a new certificate serves from the next on.
    let config = pod.identity.server_config().await.map_err(Error::Identity)?;
    let after = pod.shared.config.handshake_deadline;
    let began = Instant::now();
    let shaken = timeout(after, TlsAcceptor::from(config).accept(stream)).await;
    pod.count_handshake(Direction::Inbound, began, &shaken);
    let io = shaken
        .map_err(|_| Error::TlsTimeout { after })?
        .map_err(Error::Tls)?;
    let chain = io.get_ref().1.peer_certificates().unwrap_or_default();
    let identity = tls::peer_identity(chain).ok_or(Error::NoPeerIdentity)?;
    let proof = pod.identity.proof(chain);
    let streams = pod.peers.streams_of(&identity);
    Ok((
        io,
        Tunnel {
            streams,
            peer,
            identity,
            local,
            fate: Arc::default(),
        },
        proof,
    ))
}

/// Serves one CONNECT request to the end of its connection.
async fn request(pod: Arc<Pod>, tunnel: Arc<Tunnel>, connect: Box<Connect>) {
    let mut record = record_of(&pod, &tunnel, connect.authority(), connect.headers());
    record.facts().redirect = Some(Redirect::Hbone);
    record.open(Security::MutualTls);

    let _permits = match permits(&pod, &tunnel) {
        Ok(permits) => permits,
        Err(error) => {
            connect.refuse(error.status());
            return record.refuse(Reason::streams, &error);
        }
    };
    // Boxed, since it takes many times what lives as long as the connection.
    let (application, mut stream, admitted) = match Box::pin(answer(&pod, &tunnel, connect)).await {
        Ok(answered) => answered,
        Err(error) => return record.fail(&error),
    };
    record.admitted(&admitted);
    let stream = (&mut stream.source, &mut stream.sink);
    let relayed = relay::tunnelled(application, stream, record, pod.shared.config.tail_deadline);
    // By reference: what is handed to an async fn by value is held twice.
    admitted.run(pin!(relayed)).await;
}

/// Answers a request: the connection to the application stands, or the peer has been told that there is none.
async fn answer(
    pod: &Pod,
    tunnel: &Tunnel,
    mut connect: Box<Connect>,
) -> Result<(Leg, server::Stream, Admitted), Error> {
    let authority = connect.authority().to_owned();
    let (mut application, upstream, admitted) =
        match application(pod, tunnel, &authority, connect.abandoned()).await {
            Ok(found) => found,
            Err(error) => {
                connect.refuse(error.status());
                return Err(error);
            }
        };
    let mut headers = HeaderMap::new();
    if pod.shared.config.response_baggage
        && let Some(own) = pod.baggage.header(&upstream.workload)
    {
        headers.insert(BAGGAGE, own);
    }
    let mut stream = connect.accept(headers).map_err(Error::Http2)?;
    if let Err(error) = introduce(&mut application, tunnel, &upstream).await {
        stream.sink.reset().await;
        return Err(error);
    }
    Ok((application, stream, admitted))
}

/// The record of a request for `authority`, not opened yet.
pub(super) fn record_of(pod: &Pod, tunnel: &Tunnel, authority: &str, headers: &HeaderMap) -> Box<Record> {
    let mut record = Record::new(&pod.recorder, Direction::Inbound, tunnel.peer);
    record.in_tunnel(tunnel.fate.clone());
    let facts = record.facts();
    facts.dst = Some(tunnel.local);
    facts.service = called(&pod.mesh(), pod.local(), authority, headers);
    facts.hbone_dst = Some(authority.into());
    facts.source = source(&pod.mesh(), &pod.shared.config, tunnel, headers);
    facts.source.identity = Some(tunnel.identity.clone());
    facts.destination = pod.own_party();
    facts.destination.identity = Some(pod.identity.id().clone());
    record
}

/// What a request needs of that which the peer, and all peers together, may have open; to be held as long as it is.
pub(super) fn permits<'a>(
    pod: &'a Pod,
    tunnel: &'a Tunnel,
) -> Result<(SemaphorePermit<'a>, SemaphorePermit<'a>), Error> {
    let of_peer = tunnel.streams.try_acquire().map_err(|_| Error::TooManyOfPeer {
        max: pod.shared.config.peers.max_streams_per_identity,
    })?;
    let of_all = pod.tunnelled.try_acquire().map_err(|_| Error::TooMany {
        max: pod.shared.config.max_connections,
    })?;
    Ok((of_peer, of_all))
}

/// Tells the application who calls, if it wants to be told.
pub(super) async fn introduce(
    application: &mut Leg,
    tunnel: &Tunnel,
    upstream: &Upstream,
) -> Result<(), Error> {
    let Some(destination) = upstream.proxied else {
        return Ok(());
    };
    let header = proxy_protocol::header(tunnel.peer, destination, &tunnel.identity);
    let sent = application.split().1.send(header.into()).await;
    sent.map_err(|refused| {
        Error::ProxyHeader(match refused {
            Refused::Broken(error) => error,
            Refused::Unwanted => io::ErrorKind::BrokenPipe.into(),
        })
    })
}

/// Who calls, as far as that can be told. On another network addresses mean something else, and its own word is all there is.
fn source(mesh: &Mesh, config: &Config, tunnel: &Tunnel, headers: &HeaderMap) -> Party {
    let network = &config.home.network;
    let is_foreign = headers
        .get(FORWARDED_NETWORK)
        .is_some_and(|other| other.as_bytes() != network.as_bytes());
    if is_foreign {
        let told = config.response_baggage.then(|| Told::by(headers));
        return Party {
            workload: told.and_then(|told| told.workload).map(Into::into),
            namespace: Some(tunnel.identity.namespace().into()),
            identity: None,
            of: None,
        };
    }
    mesh.workload_at(network, tunnel.peer.ip())
        .map(|workload| workload.into())
        .unwrap_or_default()
}

/// The service that was called, of which the pod is an endpoint: the one that the caller names, or the first that leads to the port.
/// For labels alone: a caller may say what it likes.
fn called(mesh: &Mesh, local: Local<'_>, authority: &str, headers: &HeaderMap) -> Option<Arc<Service>> {
    let services = &mesh.local(local)?.services;
    let told = headers.get(FORWARDED).and_then(|value| value.to_str().ok());
    let told = told.and_then(|value| value.split(';').find_map(|part| part.strip_prefix("host=")));
    let (host, port) = authority.rsplit_once(':')?;
    let port: u16 = port.parse().ok()?;
    let is_named = |name: &&NamespacedHostname| Some(&*name.hostname) == told || *name.hostname == *host;
    let named = services.iter().map(|(name, _)| name).find(is_named);
    let leads = || {
        services
            .iter()
            .find(|(_, ports)| ports.values().any(|&target| target == port))
    };
    let found = named.or_else(|| leads().map(|(name, _)| name))?;
    mesh.service(found).cloned()
}

/// The connection to the application that a request for `authority` asks for, if the pod's policies permit it. Is not made when
/// the request is `abandoned` meanwhile.
pub(super) async fn application<T>(
    pod: &Pod,
    tunnel: &Tunnel,
    authority: &str,
    abandoned: impl Future<Output = T>,
) -> Result<(Leg, Upstream, Admitted), Error> {
    let decide = |mesh: &Mesh| route::inbound(mesh, pod.local(), tunnel.local.ip(), authority);
    let wanted = |mesh: &Mesh, decided: &Result<Upstream, Refusal>| match decided {
        Ok(_) => Vec::new(),
        Err(refusal) => wanted::inbound(mesh, pod.local(), tunnel.local.ip(), refusal),
    };
    let decided = pod
        .settled(pod.asker_of_peers.as_ref(), decide, Refusal::is_transient, wanted)
        .await;
    let upstream = decided.map_err(|source| {
        // The statuses of a refusal are constants; one that is none is our own fault.
        let status = StatusCode::from_u16(source.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        Error::Refused { status, source }
    })?;
    // Always the pod itself: what the authority names beside the port has been judged.
    let destination = SocketAddr::new(tunnel.local.ip(), upstream.port);
    let flow = Flow {
        source: tunnel.peer.ip(),
        identity: Some(tunnel.identity.clone()),
        destination,
    };
    let admit = |_: &Mesh| pod.connections.admit(flow.clone());
    let admitted = pod
        .settled(
            pod.asker_of_peers.as_ref(),
            admit,
            Denied::is_transient,
            |_, _| Vec::new(),
        )
        .await;
    let admitted = admitted.map_err(Error::Denied)?;
    let on_loopback = upstream.proxied.is_some() && pod.shared.config.loopback_application_tunnel;
    let dialled = async {
        if on_loopback {
            let loopback: IpAddr = match tunnel.local.ip() {
                IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
                IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
            };
            dial::loopback(pod, SocketAddr::new(loopback, upstream.port)).await
        } else {
            dial::application(pod, tunnel.peer, destination).await
        }
    };
    let dialled = tokio::select! {
        // Both asked first: whoever sends requests and takes them back at once makes no connections.
        biased;
        denied = admitted.revoked() => return Err(Error::Denied(denied)),
        _ = abandoned => return Err(Error::Abandoned),
        dialled = dialled => dialled.map_err(Error::Dial)?,
    };
    Ok((Leg::new(dialled), upstream, admitted))
}

impl Error {
    /// The status that says so to the peer.
    pub(super) fn status(&self) -> StatusCode {
        match self {
            Self::Refused { status, .. } => *status,
            // 401 and not 403: what Istio's peers know for a refusal by policy.
            Self::Denied(Denied::ByPolicy(_) | Denied::ByChange(_)) => StatusCode::UNAUTHORIZED,
            _ => StatusCode::SERVICE_UNAVAILABLE,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::{
        pod::Home,
        testing::{id, info, service, workload},
    };

    #[test]
    fn a_request_takes_a_kilobyte_while_it_is_open() {
        // Thousands are idle at a time. An async fn that takes another's future by value holds it twice: pin it, or box what ends before.
        let bytes = size_of_task(request);
        assert!(bytes <= 1_024, "{bytes} bytes");
    }

    /// Of what a function that is started for each of them leaves to run.
    fn size_of_task<A, B, C, F: Future>(_: fn(A, B, C) -> F) -> usize {
        size_of::<F>()
    }

    #[test]
    fn an_address_of_another_network_names_nobody_here() {
        let mesh = Mesh::new(vec![workload("web", "10.0.0.1")], vec![]);
        let tunnel = Tunnel {
            peer: "10.0.0.1:999".parse().unwrap(),
            identity: id("caller"),
            local: "10.0.0.2:15008".parse().unwrap(),
            streams: Arc::new(Semaphore::new(1)),
            fate: Arc::default(),
        };
        const BAGGAGE_OF_CALLER: &str = "k8s.namespace.name=elsewhere,k8s.deployment.name=far-web";
        for (network, used, workload, namespace) in [
            (None, true, Some("web"), Some("shop")),
            (Some(""), true, Some("web"), Some("shop")),
            // The namespace is as proven, not as told.
            (Some("far"), true, Some("far-web"), Some("shop")),
            (Some("far"), false, None, Some("shop")),
        ] {
            let config = Config {
                response_baggage: used,
                ..Config::default()
            };
            let mut headers = HeaderMap::new();
            headers.insert(BAGGAGE, BAGGAGE_OF_CALLER.parse().unwrap());
            if let Some(network) = network {
                headers.insert(FORWARDED_NETWORK, network.parse().unwrap());
            }
            let found = source(&mesh, &config, &tunnel, &headers);
            assert_eq!(
                (found.workload.as_deref(), found.namespace.as_deref()),
                (workload, namespace),
                "{network:?} {used}"
            );
        }
    }

    #[test]
    fn the_service_that_was_called_is_the_one_named_or_one_that_leads_there() {
        let mut web = workload("web", "10.0.0.1");
        let services = [service("a", "10.9.0.1"), service("b", "10.9.0.2")];
        for (service, target) in services.iter().zip([8080, 9090]) {
            let ports = [(80, target)].into_iter().collect();
            web.services.insert(service.host.clone(), Arc::new(ports));
        }
        let [a, b] = services
            .each_ref()
            .map(|service| service.host.hostname.to_string());
        let mesh = Mesh::new(vec![web], services.into());
        let (info, home) = (info("web"), Home::default());
        let local = Local {
            info: &info,
            home: &home,
        };
        for (authority, told, expected) in [
            ("10.0.0.1:8080", None, Some(&a)),
            ("10.0.0.1:9090", None, Some(&b)),
            (
                "10.0.0.1:9090",
                Some(format!("for=\"10.0.0.9:1\";host={a}")),
                Some(&a),
            ),
            (
                "10.0.0.1:9090",
                Some("for=\"10.0.0.9:1\";host=elsewhere".to_owned()),
                Some(&b),
            ),
            (&format!("{b}:80"), None, Some(&b)),
            ("10.0.0.1:1", None, None),
            ("nonsense", None, None),
        ] {
            let mut headers = HeaderMap::new();
            if let Some(told) = &told {
                headers.insert(FORWARDED, told.parse().unwrap());
            }
            let found = called(&mesh, local, authority, &headers);
            let found = found.map(|service| service.host.hostname.to_string());
            assert_eq!(found.as_ref(), expected, "{authority} {told:?}");
        }
    }
}
