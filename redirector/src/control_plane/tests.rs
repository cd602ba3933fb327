//! Against a server of their own on loopback, made with h2 and rustls alone.

use std::{fs, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, uri::PathAndQuery};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use rustls::{ServerConfig, crypto::aws_lc_rs};
use rustls_pki_types::PrivatePkcs8KeyDer;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, UnixListener},
    sync::mpsc,
    time::timeout,
};
use tokio_rustls::TlsAcceptor;
use tokio_util::task::AbortOnDropHandle;
use tonic::{Code, Request, Status};
use tonic_prost::ProstCodec;

use super::*;

/// Nothing here takes this long.
pub(super) const DEADLINE: Duration = Duration::from_secs(60);

/// A root in PEM, and a server's configuration that leads to it.
pub(super) fn server(name: &str, alpn: &[u8]) -> (String, Arc<ServerConfig>) {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    // Else two of them are told apart by their signatures alone.
    let id = rand::random::<u64>().to_string();
    params.distinguished_name.push(DnType::CommonName, id);
    let root = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let leaf = CertificateParams::new([name.to_owned()])
        .unwrap()
        .signed_by(&key, &root)
        .unwrap();
    let mut config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(
            vec![leaf.der().clone()],
            PrivatePkcs8KeyDer::from(key.serialize_der()).into(),
        )
        .unwrap();
    config.alpn_protocols = vec![alpn.to_vec()];
    (root.pem(), Arc::new(config))
}

/// Takes TLS connections, answers each request on them, and tells the headers of each.
async fn serve_tls(config: Arc<ServerConfig>) -> (u16, mpsc::Receiver<HeaderMap>, AbortOnDropHandle<()>) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (seen, requests) = mpsc::channel(16);
    let task = tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            if let Ok(stream) = TlsAcceptor::from(Arc::clone(&config)).accept(stream).await {
                tokio::spawn(serve(stream, seen.clone()));
            }
        }
    });
    (port, requests, AbortOnDropHandle::new(task))
}

/// Answers each request with an empty message.
async fn serve(stream: impl AsyncRead + AsyncWrite + Unpin, seen: mpsc::Sender<HeaderMap>) {
    let Ok(mut connection) = h2::server::handshake(stream).await else {
        return;
    };
    while let Some(Ok((request, mut respond))) = connection.accept().await {
        let _ = seen.send(request.headers().clone()).await;
        let response = http::Response::builder().header("content-type", "application/grpc");
        let mut stream = respond.send_response(response.body(()).unwrap(), false).unwrap();
        stream.send_data(Bytes::from_static(&[0; 5]), false).unwrap();
        let trailers = HeaderMap::from_iter([("grpc-status".parse().unwrap(), HeaderValue::from(0))]);
        stream.send_trailers(trailers).unwrap();
    }
}

fn config(address: &str, roots: Roots) -> Config {
    Config {
        address: address.parse().unwrap(),
        roots,
        alt_hostname: None,
        auth: Auth::default(),
    }
}

async fn ask(channel: &Channel) -> Result<(), String> {
    let metadata = channel.metadata().await.map_err(|error| error.to_string())?;
    let mut service = channel.service().await.map_err(|error| error.to_string())?;
    let asking = async {
        service
            .ready()
            .await
            .map_err(|error| Status::from_error(error.into()))?;
        let request = Request::from_parts(metadata, tonic::Extensions::default(), ());
        let codec = ProstCodec::<(), ()>::default();
        service
            .unary(request, PathAndQuery::from_static("/a.B/C"), codec)
            .await
    };
    let answer = timeout(DEADLINE, asking).await.expect("an answer");
    answer.map(|_| ()).map_err(|status| explain(&status))
}

#[test]
fn addresses_are_urls_with_a_port_or_unix_sockets() {
    for (text, shown) in [
        (
            "istiod.istio-system.svc:15012",
            Some("https://istiod.istio-system.svc:15012"),
        ),
        ("https://10.0.0.1:443/", Some("https://10.0.0.1:443")),
        ("https://[fd00::1]:443", Some("https://[fd00::1]:443")),
        ("http://localhost:1", Some("http://localhost:1")),
        (
            "unix:///run/spire/agent.sock",
            Some("unix:///run/spire/agent.sock"),
        ),
        ("unix:/run/agent.sock", Some("unix:///run/agent.sock")),
        ("", None),
        ("istiod", None),
        (":15012", None),
        ("istiod:0", None),
        ("istiod:65536", None),
        ("user@istiod:15012", None),
        ("https://istiod:15012/path", None),
        ("https://istiod:15012?x", None),
        ("ftp://istiod:15012", None),
        ("unix:agent.sock", None),
        ("unix://", None),
    ] {
        let parsed = text.parse::<Address>();
        assert_eq!(
            parsed.as_ref().ok().map(ToString::to_string).as_deref(),
            shown,
            "{text}"
        );
        if let Err(error) = parsed {
            assert!(error.to_string().contains("write https://HOST:PORT"), "{error}");
        }
    }
}

#[test]
fn roots_are_told_by_their_text() {
    for (text, roots) in [
        ("SYSTEM", Roots::System),
        ("./var/root-cert.pem", Roots::File("./var/root-cert.pem".into())),
        (
            "-----BEGIN CERTIFICATE-----\n",
            Roots::Inline("-----BEGIN CERTIFICATE-----\n".into()),
        ),
    ] {
        assert_eq!(Roots::from_setting(text), roots);
    }
}

#[tokio::test]
async fn a_server_is_known_by_its_name_or_the_other_one() {
    let (root, tls) = server("istiod.example", b"h2");
    let (port, _requests, _server) = serve_tls(tls).await;
    let address = format!("localhost:{port}");
    for (alt, problem) in [
        (None, Some("localhost")),
        (Some("istiod.example"), None),
        (Some("other.example"), Some("other.example")),
    ] {
        let mut config = config(&address, Roots::Inline(root.clone()));
        config.alt_hostname = alt.map(str::to_owned);
        let answer = ask(&Channel::new(config)).await;
        match problem {
            None => assert_eq!(answer, Ok(())),
            Some(name) => assert!(answer.as_ref().unwrap_err().contains(name), "{answer:?}"),
        }
    }
}

#[tokio::test]
async fn a_server_of_other_roots_or_without_http2_is_refused_with_the_reason() {
    for (alpn, is_its_root, problem) in [
        ("h2", false, "UnknownIssuer"),
        ("http/1.1", true, "NoApplicationProtocol"),
    ] {
        let (root, tls) = server("localhost", alpn.as_bytes());
        let (port, _requests, _server) = serve_tls(tls).await;
        let root = if is_its_root {
            root
        } else {
            server("localhost", b"h2").0
        };
        let address = format!("https://localhost:{port}");
        let answer = ask(&Channel::new(config(&address, Roots::Inline(root)))).await;
        assert!(answer.as_ref().unwrap_err().contains(problem), "{answer:?}");
    }
}

#[tokio::test]
async fn changed_roots_count_from_the_next_request() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("root-cert.pem");
    let (root, tls) = server("localhost", b"h2");
    let (other_root, _) = server("localhost", b"h2");
    let (port, _requests, _server) = serve_tls(tls).await;
    fs::write(&file, &other_root).unwrap();
    let channel = Channel::new(config(&format!("localhost:{port}"), Roots::File(file.clone())));
    assert!(ask(&channel).await.unwrap_err().contains("UnknownIssuer"));
    fs::write(&file, &root).unwrap();
    assert_eq!(ask(&channel).await, Ok(()));
    assert_eq!(ask(&channel).await, Ok(()));
    fs::write(&file, "nothing").unwrap();
    assert!(
        ask(&channel)
            .await
            .unwrap_err()
            .contains("no usable root certificate")
    );
    fs::remove_file(&file).unwrap();
    assert!(ask(&channel).await.unwrap_err().contains("root-cert.pem"));
}

#[tokio::test]
async fn each_request_shows_the_token_of_its_time() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("token");
    let (root, tls) = server("localhost", b"h2");
    let (port, mut requests, _server) = serve_tls(tls).await;
    let mut config = config(&format!("localhost:{port}"), Roots::Inline(root));
    config.auth.token = Some(Token::File(file.clone()));
    config.auth.cluster_id = Some("east".parse().unwrap());
    config.auth.add_header("X-Zone", "a").unwrap();
    let channel = Channel::new(config);
    for token in ["one", "two\n"] {
        fs::write(&file, token).unwrap();
        assert_eq!(ask(&channel).await, Ok(()));
        let headers = requests.recv().await.unwrap();
        let header = |name: &str| headers[name].to_str().unwrap().to_owned();
        assert_eq!(header("authorization"), format!("Bearer {}", token.trim()));
        assert_eq!(
            (header("clusterid"), header("x-zone")),
            ("east".into(), "a".into())
        );
    }
    for (token, problem) in [("", "is empty"), (" \n", "is empty"), ("a\nb", "cannot be sent")] {
        fs::write(&file, token).unwrap();
        assert!(ask(&channel).await.unwrap_err().contains(problem));
    }
    fs::remove_file(&file).unwrap();
    assert!(ask(&channel).await.unwrap_err().contains("token"));
}

#[test]
fn a_path_is_no_token_even_if_nothing_is_there() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("token");
    fs::write(&file, "x").unwrap();
    let there = file.to_str().unwrap();
    for (text, token) in [
        (there, Token::File(there.into())),
        ("/not/there", Token::File("/not/there".into())),
        ("./var/token", Token::File("./var/token".into())),
        ("eyJhbGciOi.J9.x", Token::Literal("eyJhbGciOi.J9.x".into())),
    ] {
        assert!(Token::from_setting(text) == token, "{text}");
    }
}

#[test]
fn nothing_secret_is_shown() {
    let mut auth = Auth {
        token: Some(Token::Literal("secret".into())),
        ..Auth::default()
    };
    auth.add_header("x-key", "secret").unwrap();
    assert!(!format!("{auth:?}").contains("secret"), "{auth:?}");
    let header = auth.add_header("x key", "secret").unwrap_err();
    assert!(header.to_string().contains("x key") && !header.to_string().contains("secret"));
}

#[tokio::test]
async fn a_unix_socket_and_a_plain_port_need_no_roots_and_a_missing_server_is_told() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("agent.sock");
    let (seen, mut requests) = mpsc::channel(4);
    let listener = UnixListener::bind(&path).unwrap();
    let unix = tokio::spawn(async move { serve(listener.accept().await.unwrap().0, seen).await });
    let _unix = AbortOnDropHandle::new(unix);
    let channel = Channel::new(config(&format!("unix://{}", path.display()), Roots::System));
    assert_eq!(ask(&channel).await, Ok(()));
    assert!(requests.recv().await.is_some());

    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (seen, _requests) = mpsc::channel(4);
    let channel = Channel::new(config(&format!("http://127.0.0.1:{port}"), Roots::System));
    let (answer, ()) = tokio::join!(ask(&channel), async {
        let (stream, _) = listener.accept().await.unwrap();
        // Ended after one answer, with the listener.
        let _ = timeout(Duration::from_millis(200), serve(stream, seen)).await;
        drop(listener);
    });
    assert_eq!(answer, Ok(()));
    // The first may still find the connection that is being lost.
    let _ = ask(&channel).await;
    let lost = ask(&channel).await.unwrap_err();
    assert!(lost.contains("refused"), "{lost}");
}

#[test]
fn an_answer_is_explained_with_its_causes_once() {
    let status = Status::from_error(Box::new(io::Error::other("no route")));
    assert_eq!(
        explain(&status).matches("no route").count(),
        1,
        "{}",
        explain(&status)
    );
    let status = Status::new(Code::PermissionDenied, "not on this node");
    assert_eq!(explain(&status), "PermissionDenied: not on this node");
}
