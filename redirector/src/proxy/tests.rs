//! Two relays and a tunnel of mutual TLS between them, from one TCP connection to another: what either application does,
//! the other sees.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use http::{HeaderMap, Method, Request};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::{ClientConfig, RootCertStore, ServerConfig, server::WebPkiClientVerifier};
use rustls_pki_types::{PrivateKeyDer, ServerName};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
};
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    connections::{Connections, Flow},
    copy::Leg,
    flows::Flows,
    hbone::{
        Http2Config,
        client::{Dialled, Error},
        pool::{Key, Pool, PoolConfig},
        server,
        window::WindowBudget,
    },
    metrics::Metrics,
    record::{Direction, Record, Recorder, Security},
    relay,
};
use crate::{
    identity::tls::Proof,
    mesh::{
        index::Mesh,
        pod::Home,
        policy::{Action, Policy, Scope},
        testing::{info, policy_name, with_policies},
        workload::WorkloadUid,
    },
};

const TAIL: Duration = Duration::from_secs(5);

/// TLS for both ends, of one authority.
fn tls() -> (Arc<ServerConfig>, Arc<ClientConfig>) {
    let mut authority = CertificateParams::default();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate().unwrap()).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(authority.der().clone()).unwrap();
    let roots = Arc::new(roots);
    let party = || {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        let cert = params.signed_by(&key, &authority).unwrap();
        (
            vec![cert.der().clone()],
            PrivateKeyDer::try_from(key.serialize_der()).unwrap(),
        )
    };
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone())
        .build()
        .unwrap();
    let (chain, key) = party();
    let mut server = ServerConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key)
        .unwrap();
    server.alpn_protocols = vec![b"h2".to_vec()];
    let (chain, key) = party();
    let mut client = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_client_auth_cert(chain, key)
        .unwrap();
    client.alpn_protocols = vec![b"h2".to_vec()];
    (Arc::new(server), Arc::new(client))
}

/// The way from `entry` to `exit`.
struct Path {
    entry: SocketAddr,
    exit: TcpListener,
    metrics: Arc<Metrics>,
    recorder: Arc<Recorder>,
    kill: CancellationToken,
    /// With the policies of the exit.
    mesh: watch::Sender<Arc<Mesh>>,
}

impl Path {
    async fn new() -> Self {
        let (server_tls, client_tls) = tls();
        let listen = async || TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (entry, tunnel, exit) = (listen().await, listen().await, listen().await);
        let (tunnel_addr, exit_addr) = (tunnel.local_addr().unwrap(), exit.local_addr().unwrap());
        let metrics = Arc::<Metrics>::default();
        let path = Self {
            recorder: Recorder::new(metrics.clone(), Arc::<Flows>::default(), &info("web")),
            entry: entry.local_addr().unwrap(),
            exit,
            metrics,
            kill: CancellationToken::new(),
            mesh: watch::Sender::default(),
        };

        let kill = path.kill.clone();
        let tasks = TaskTracker::new();
        let pool = Arc::new(Pool::new(
            Http2Config::default(),
            PoolConfig::default(),
            tasks.clone(),
            kill.clone(),
        ));
        let recorder = path.recorder.clone();
        tokio::spawn(kill.clone().run_until_cancelled_owned(async move {
            loop {
                let (application, peer) = entry.accept().await.unwrap();
                let (pool, tls, recorder) = (pool.clone(), client_tls.clone(), recorder.clone());
                tokio::spawn(kill.clone().run_until_cancelled_owned(async move {
                    let mut record = Record::new(&recorder, Direction::Outbound, peer);
                    record.open(Security::MutualTls);
                    let application = Leg::new(application);
                    let key = Key {
                        source: "spiffe://td/ns/a/sa/b".parse().unwrap(),
                        workload: WorkloadUid("c//Pod/a/b-0".into()),
                        expected: Arc::new([]),
                        tunnel: tunnel_addr,
                    };
                    let request = Request::builder()
                        .method(Method::CONNECT)
                        .uri("10.0.0.1:80")
                        .body(())
                        .unwrap();
                    let dial = async || {
                        let tcp = TcpStream::connect(tunnel_addr).await.unwrap();
                        let name = ServerName::IpAddress(tunnel_addr.ip().into());
                        let io = TlsConnector::from(tls.clone()).connect(name, tcp).await;
                        let io = io.map_err(|source| Error::Tls {
                            tunnel: tunnel_addr,
                            source,
                        })?;
                        Ok(Dialled {
                            io,
                            peer: None,
                            proof: Proof::default(),
                        })
                    };
                    let mut stream = match pool.open(&key, &request, dial).await {
                        Ok(stream) => stream,
                        Err(error) => return record.fail(&*error),
                    };
                    relay::tunnelled(application, (&mut stream.source, &mut stream.sink), record, TAIL).await;
                }));
            }
        }));

        let (recorder, kill) = (path.recorder.clone(), path.kill.clone());
        let connections = Connections::new(info("exit"), Home::default(), path.mesh.subscribe());
        let connections = Arc::new(connections);
        tokio::spawn(
            kill.clone()
                .run_until_cancelled_owned(connections.clone().follow()),
        );
        tokio::spawn(async move {
            while let Ok((tcp, peer)) = tunnel.accept().await {
                let io = TlsAcceptor::from(server_tls.clone()).accept(tcp).await.unwrap();
                let (recorder, kill, connections) = (recorder.clone(), kill.clone(), connections.clone());
                tokio::spawn(async move {
                    let drain = CancellationToken::new();
                    let window = WindowBudget::new(&Http2Config::default()).share();
                    server::serve(io, Http2Config::default(), window, TAIL, &drain, |connect| {
                        let (recorder, connections) = (recorder.clone(), connections.clone());
                        tokio::spawn(kill.clone().run_until_cancelled_owned(async move {
                            let mut record = Record::new(&recorder, Direction::Inbound, peer);
                            record.open(Security::MutualTls);
                            let application = Leg::new(TcpStream::connect(exit_addr).await.unwrap());
                            let flow = Flow {
                                source: peer.ip(),
                                identity: None,
                                destination: exit_addr,
                            };
                            let admitted = connections.admit(flow).unwrap();
                            record.admitted = Some(admitted.entry());
                            let mut stream = connect.accept(HeaderMap::new()).unwrap();
                            let stream = (&mut stream.source, &mut stream.sink);
                            admitted
                                .run(relay::tunnelled(application, stream, record, TAIL))
                                .await;
                        }));
                    })
                    .await
                });
            }
        });
        path
    }

    /// A connection through it: the client's end, and the server's.
    async fn connect(&self) -> (TcpStream, TcpStream) {
        let client = TcpStream::connect(self.entry).await.unwrap();
        (client, self.exit.accept().await.unwrap().0)
    }
}

pub(super) fn is_reset(result: std::io::Result<usize>) -> bool {
    matches!(result, Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset)
}

#[tokio::test]
async fn fin_is_fin_each_way_by_itself() {
    let path = Path::new().await;
    for client_first in [true, false] {
        let (client, server) = path.connect().await;
        let (mut first, mut second) = if client_first {
            (client, server)
        } else {
            (server, client)
        };
        first.write_all(b"question").await.unwrap();
        first.shutdown().await.unwrap();
        let mut got = Vec::new();
        second.read_to_end(&mut got).await.unwrap();
        second.write_all(&vec![b'a'; 1 << 20]).await.unwrap();
        second.shutdown().await.unwrap();
        first.read_to_end(&mut got).await.unwrap();
        assert_eq!(got.len(), 8 + (1 << 20));
    }
    let text = until(
        &path.metrics,
        "connections_closed_total{reporter=\"source\",connection_security_policy=\"mutual_tls\"} 2",
    )
    .await;
    for line in [
        "istio_tcp_connections_opened_total{reporter=\"source\",connection_security_policy=\"mutual_tls\"} 2",
        // Requests and responses were eight bytes and a MiB, then the other way round.
        "istio_tcp_received_bytes_total{reporter=\"source\",connection_security_policy=\"mutual_tls\"} 1048584",
        "istio_tcp_sent_bytes_total{reporter=\"source\",connection_security_policy=\"mutual_tls\"} 1048584",
        "istio_tcp_received_bytes_total{reporter=\"destination\",connection_security_policy=\"mutual_tls\"} 1048584",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
    assert!(!text.contains("connections_failed_total{"), "{text}");
}

/// The metrics, once they say `line`: records end a moment after their connections.
pub(super) async fn until(metrics: &Metrics, line: &str) -> String {
    let mut text = String::new();
    for _ in 0..500 {
        text = super::metrics::text(metrics);
        if text.contains(line) {
            return text;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{line} is not in\n{text}");
}

#[tokio::test]
async fn a_reset_is_a_reset_at_the_far_end() {
    let path = Path::new().await;
    for client_resets in [true, false] {
        let (client, server) = path.connect().await;
        let (mut first, mut second) = if client_resets {
            (client, server)
        } else {
            (server, client)
        };
        first.write_all(b"x").await.unwrap();
        second.read_exact(&mut [0; 1]).await.unwrap();
        first.set_zero_linger().unwrap();
        drop(first);
        assert!(
            is_reset(second.read(&mut [0; 1]).await),
            "client_resets: {client_resets}"
        );
    }
}

#[tokio::test]
async fn an_answer_before_a_reset_arrives() {
    let path = Path::new().await;
    for round in 0..20 {
        let (mut client, mut server) = path.connect().await;
        client.write_all(&[1; 100_000]).await.unwrap();
        server.peek(&mut [0; 1]).await.unwrap();
        // Answers, and closes with most of the request unread: the kernel resets.
        server.write_all(&[2; 100_000]).await.unwrap();
        let acknowledged = async {
            use std::os::fd::AsFd;
            while crate::sys::socket::unacknowledged_bytes(server.as_fd()).unwrap() > 0 {
                tokio::task::yield_now().await;
            }
        };
        acknowledged.await;
        drop(server);
        let mut got = vec![0; 100_000];
        client.read_exact(&mut got).await.unwrap();
        let end = client.read(&mut [0; 1]).await;
        assert!(
            matches!(&end, Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset),
            "{round}: {end:?}"
        );
    }
}

#[tokio::test]
async fn connections_that_are_killed_are_reset() {
    let path = Path::new().await;
    let (mut client, mut server) = path.connect().await;
    client.write_all(b"x").await.unwrap();
    server.read_exact(&mut [0; 1]).await.unwrap();
    path.kill.cancel();
    assert!(is_reset(client.read(&mut [0; 1]).await));
    assert!(is_reset(server.read(&mut [0; 1]).await));
    until(
        &path.metrics,
        "connections_failed_total{reporter=\"source\",connection_security_policy=\"mutual_tls\"} 1",
    )
    .await;
}

#[tokio::test]
async fn connections_that_policies_no_longer_permit_are_reset() {
    let path = Path::new().await;
    let (mut client, mut server) = path.connect().await;
    client.write_all(b"x").await.unwrap();
    server.read_exact(&mut [0; 1]).await.unwrap();
    let nobody = Policy {
        key: policy_name("shop", "nobody"),
        scope: Scope::Global,
        action: Action::Allow,
        dry_run: false,
        rules: vec![],
    };
    path.mesh
        .send_replace(Arc::new(with_policies(Mesh::default(), [nobody])));
    assert!(is_reset(client.read(&mut [0; 1]).await));
    assert!(is_reset(server.read(&mut [0; 1]).await));
    // At the exit it is a failure of the proxy's making; at the entry, a connection that the far end reset.
    let failed =
        "connections_failed_total{reporter=\"destination\",connection_security_policy=\"mutual_tls\"} 1";
    until(&path.metrics, failed).await;
}
