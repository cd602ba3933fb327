//! 15001: the connections that the pod's application makes. They go to their destination over HBONE where the mesh says so,
//! and plain elsewhere; one that should go over HBONE and cannot is reset, never sent in plain.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    os::fd::AsFd,
    sync::Arc,
};

use http::{HeaderValue, Method, Request, Uri, Version};
use redirector_common::consts::PROXY_PORTS;
use rustls_pki_types::ServerName;
use tokio::{net::TcpStream, time::timeout};
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::{
    Pod,
    copy::Leg,
    dial,
    hbone::{
        client,
        pool::{Dialled, Key},
    },
    plaintext,
    record::{Direction, Reason, Record, Security},
    relay,
};
use crate::{
    identity::tls,
    mesh::{
        index::Mesh,
        route::{self, HboneRoute, NoRoute, PlainRoute, Route},
        workload::Workload,
    },
    sys::socket,
};

/// Why a connection goes nowhere.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("{0} is neither an address of this pod nor of anybody whose traffic it reroutes")]
    Stranger(SocketAddr),
    #[error("cannot tell where the connection was going")]
    OriginalDst(#[source] io::Error),
    #[error("no route")]
    NoRoute(#[source] NoRoute),
    #[error("{0} is a listener of the proxy itself")]
    Loop(SocketAddr),
    #[error("{0} is on another network: tunnels through network gateways are not supported yet")]
    OtherNetwork(String),
    #[error("the application gave up before the connection stood")]
    Abandoned,
}

/// Serves one accepted connection to its end. Whatever goes wrong, the application's leg is reset when it is dropped.
pub(super) async fn connection(pod: Arc<Pod>, application: TcpStream, peer: SocketAddr) {
    let application = Leg::new(application);
    let mut record = Record::new(pod.shared.metrics.clone(), Direction::Outbound, peer);
    // The listener is open to all that reach the pod; the pod's identity is for the pod alone, and those for whom it answers.
    let rerouted = || pod.shared.redirector.is_rerouted(application.as_fd());
    if !pod.has_address(peer.ip()) && !rerouted().unwrap_or(false) {
        return record.fail(&Error::Stranger(peer));
    }
    let destination = match pod.shared.redirector.original_dst(application.as_fd()) {
        Ok(destination) => destination,
        Err(error) => return record.fail(&Error::OriginalDst(error)),
    };
    record.dst = Some(destination);
    record.source = (&pod.info).into();
    let mut choose = |weights: u64| {
        if weights == 0 {
            0
        } else {
            rand::random_range(0..weights)
        }
    };
    let decide = |mesh: &Mesh| route::outbound(mesh, pod.local(), peer.ip(), destination, &mut choose);
    let decided = tokio::select! {
        decided = pod.settled(decide, NoRoute::is_transient) => decided,
        _ = application.broken() => return record.fail(&Error::Abandoned),
    };
    match decided {
        Ok(Route::Hbone(route)) if route.inner.is_some() => {
            record.fail(&Error::OtherNetwork(route.workload.uid.to_string()));
        }
        Ok(Route::Hbone(route)) => hbone(&pod, application, peer, route, record).await,
        Ok(Route::Plain(route)) => plain(&pod, application, route, record).await,
        Err(error) => record.fail(&Error::NoRoute(error)),
    }
}

async fn plain(pod: &Pod, application: Leg, route: PlainRoute, mut record: Record) {
    let target = route.target;
    record.dst = Some(target);
    record.service = route.service;
    record.destination = route.workload.as_deref().map(Into::into).unwrap_or_default();
    // It would reach this very listener, and so on until the files run out. Ports first: they are cheaper to compare.
    let is_here = |ip: IpAddr| ip.is_loopback() || ip.is_unspecified() || pod.has_address(ip);
    if PROXY_PORTS.contains(&target.port()) && is_here(target.ip()) {
        return record.fail(&Error::Loop(target));
    }
    let on_wire = !pod.is_self(target.ip());
    if on_wire && pod.plaintext.is_refused() {
        return record.refuse(Reason::plaintext, &plaintext::Refused);
    }
    record.plain = on_wire.then(|| pod.plaintext.clone());
    record.open(Security::unknown);
    let carried = async {
        let dialled = tokio::select! {
            dialled = dial::upstream(pod, target) => dialled,
            _ = application.broken() => return record.fail(&Error::Abandoned),
        };
        let upstream = match dialled {
            Ok(upstream) => Leg::new(upstream),
            Err(error) => return record.fail(&error),
        };
        relay::plain(application, upstream, record, pod.shared.config.tail_deadline).await;
    };
    tokio::select! {
        biased;
        // Both legs are reset, and the record says why.
        () = pod.plaintext.refused(), if on_wire => {}
        () = carried => {}
    }
}

async fn hbone(pod: &Pod, application: Leg, peer: SocketAddr, route: HboneRoute, mut record: Record) {
    let request = request(pod, peer, &route);
    record.dst = Some(route.tunnel);
    record.hbone_dst = Some(route.authority.to_string());
    record.source.identity = Some(pod.identity.id().clone());
    record.destination = route.workload.as_ref().into();
    record.service = route.service.clone();
    record.open(Security::mutual_tls);

    let key = Key {
        source: pod.identity.id().clone(),
        expected: route.expected.clone(),
        tunnel: route.tunnel,
    };
    let opened = tokio::select! {
        opened = pod.pool.open(&key, &request, || dial_tunnel(pod, &route)) => opened,
        _ = application.broken() => return record.fail(&Error::Abandoned),
    };
    let mut stream = match opened {
        Ok(stream) => stream,
        Err(error) => return record.fail(&error),
    };
    record.destination.identity = stream.peer().cloned();
    let stream = (&mut stream.source, &mut stream.sink);
    relay::tunnelled(application, stream, record, pod.shared.config.tail_deadline).await;
}

/// TCP and mutual TLS to a tunnel's far end.
async fn dial_tunnel(pod: &Pod, route: &HboneRoute) -> Result<Dialled<TlsStream<TcpStream>>, client::Error> {
    let tunnel = route.tunnel;
    let config = pod.identity.client_config(&route.expected).await;
    let config = config.map_err(|source| client::Error::Identity { tunnel, source })?;
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
    let after = pod.shared.config.pool.handshake_deadline;
    // An address is never sent as SNI; who the peer must be is in the configuration.
    let name = ServerName::IpAddress(tunnel.ip().into());
    let io = timeout(after, TlsConnector::from(config).connect(name, tcp))
        .await
        .map_err(|_| client::Error::HandshakeTimeout { tunnel, after })?
        .map_err(|source| client::Error::Tls { tunnel, source })?;
    let peer = io.get_ref().1.peer_certificates().and_then(tls::peer_identity);
    Ok(Dialled { io, peer })
}

/// The CONNECT request for a route.
fn request(pod: &Pod, client: SocketAddr, route: &HboneRoute) -> Request<()> {
    let mesh = pod.mesh();
    let caller = mesh.pod(&pod.info.namespace, &pod.info.name);
    let host = route
        .service
        .as_ref()
        .map(|service| service.host.hostname.as_ref());
    connect_request(
        &route.authority.to_string(),
        client,
        host,
        caller.map(AsRef::as_ref),
    )
}

fn connect_request(
    authority: &str,
    client: SocketAddr,
    host: Option<&str>,
    caller: Option<&Workload>,
) -> Request<()> {
    let mut request = Request::new(());
    *request.method_mut() = Method::CONNECT;
    *request.version_mut() = Version::HTTP_2;
    // Only an authority: CONNECT has neither scheme nor path.
    *request.uri_mut() =
        Uri::try_from(authority).expect("an address or a host name, with a port, is an authority");
    let forwarded = match host {
        Some(host) => format!("for=\"{client}\";host={host}"),
        None => format!("for=\"{client}\""),
    };
    let trace = format!(
        "00-{:032x}-{:016x}-00",
        rand::random::<u128>().max(1),
        rand::random::<u64>().max(1)
    );
    let baggage = caller.map(baggage).unwrap_or_default();
    for (name, value) in [
        ("forwarded", forwarded),
        ("traceparent", trace),
        ("baggage", baggage),
    ] {
        // Names from the mesh that cannot be in a header are left out: they serve labels only.
        if let Ok(value) = HeaderValue::try_from(value)
            && !value.is_empty()
        {
            request.headers_mut().insert(name, value);
        }
    }
    request
}

/// Who calls, for the far end's labels.
fn baggage(caller: &Workload) -> String {
    let workload_key = format!("k8s.{}.name", caller.workload_type);
    [
        ("k8s.cluster.name", &caller.cluster_id),
        ("k8s.namespace.name", &caller.namespace),
        (workload_key.as_str(), &caller.workload_name),
        ("service.name", &caller.canonical_name),
        ("service.version", &caller.canonical_revision),
    ]
    .into_iter()
    .filter(|(_, value)| !value.is_empty())
    .map(|(key, value)| format!("{key}={value}"))
    .collect::<Vec<_>>()
    .join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workload() -> Workload {
        use crate::mesh::workload::{Protocol, WorkloadUid};
        Workload {
            uid: WorkloadUid("Kubernetes//Pod/shop/web-0".into()),
            name: "web-0".into(),
            namespace: "shop".into(),
            trust_domain: "cluster.local".into(),
            service_account: "web".into(),
            addresses: Vec::new(),
            hostname: "".into(),
            network: "".into(),
            protocol: Protocol::Hbone,
            host_network: false,
            node: "".into(),
            locality: Default::default(),
            cluster_id: "Kubernetes".into(),
            waypoint: None,
            network_gateway: None,
            application_tunnel: None,
            healthy: true,
            capacity: 1,
            services: Default::default(),
            canonical_name: "web".into(),
            canonical_revision: "".into(),
            workload_name: "web".into(),
            workload_type: "deployment",
            authorization_policies: Vec::new(),
        }
    }

    #[test]
    fn the_request_has_an_authority_and_nothing_that_connect_forbids() {
        for (authority, text) in [
            ("10.1.2.3:8080", "10.1.2.3:8080"),
            ("[fd00::1]:80", "[fd00::1]:80"),
        ] {
            let request = connect_request(authority, "10.1.9.9:4242".parse().unwrap(), None, None);
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
        let host = Some("cart.shop.svc.cluster.local");
        let caller = workload();
        let request = connect_request(
            "[fd00::1]:80",
            "[fd00::9]:4242".parse().unwrap(),
            host,
            Some(&caller),
        );
        assert_eq!(
            request.headers()["forwarded"],
            "for=\"[fd00::9]:4242\";host=cart.shop.svc.cluster.local"
        );
        assert_eq!(
            request.headers()["baggage"],
            "k8s.cluster.name=Kubernetes,k8s.namespace.name=shop,k8s.deployment.name=web,service.name=web"
        );
    }

    #[test]
    fn names_that_no_header_can_hold_are_left_out() {
        let mut caller = workload();
        caller.canonical_name = "we\nb".into();
        let request = connect_request("10.1.2.3:80", "10.1.9.9:1".parse().unwrap(), None, Some(&caller));
        assert!(!request.headers().contains_key("baggage"));
        assert!(request.headers().contains_key("forwarded"));
    }
}
