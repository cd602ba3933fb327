//! Against an API server of their own on loopback, made with hyper and rustls alone.

use std::convert::Infallible;

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::Namespace;
use kube::Api;
use rustls::ServerConfig;
use tokio::{net::TcpListener, sync::mpsc, time::timeout};
use tokio_rustls::TlsAcceptor;
use tokio_util::task::AbortOnDropHandle;

use super::{
    super::tests::{DEADLINE, server},
    *,
};

/// Takes TLS connections, tells path and headers of each request, and answers with a namespace.
async fn serve(
    config: Arc<ServerConfig>,
) -> (u16, mpsc::Receiver<(String, HeaderMap)>, AbortOnDropHandle<()>) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (seen, requests) = mpsc::channel(16);
    let task = tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let Ok(stream) = TlsAcceptor::from(Arc::clone(&config)).accept(stream).await else {
                continue;
            };
            let seen = seen.clone();
            let answer = service_fn(move |request: Request<Incoming>| {
                let seen = seen.clone();
                async move {
                    let path = request.uri().path().to_owned();
                    let is_there = path.ends_with("/here");
                    let _ = seen.send((path, request.headers().clone())).await;
                    let (status, text) = match is_there {
                        true => (StatusCode::OK, r#"{"metadata":{"name":"here"}}"#),
                        false => (
                            StatusCode::NOT_FOUND,
                            r#"{"kind":"Status","code":404,"message":"not there","reason":"NotFound"}"#,
                        ),
                    };
                    let answer = Response::builder().status(status);
                    Ok::<_, Infallible>(
                        answer
                            .body(Full::new(Bytes::from_static(text.as_bytes())))
                            .unwrap(),
                    )
                }
            });
            tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), answer));
        }
    });
    (port, requests, AbortOnDropHandle::new(task))
}

/// An error with its causes.
fn told(error: impl Into<anyhow::Error>) -> String {
    format!("{:#}", error.into())
}

async fn ask(kubernetes: &Kubernetes, name: &str) -> Result<(), String> {
    let client = kubernetes.client().await;
    let client = client.map_err(told)?;
    let api: Api<Namespace> = Api::all(client);
    let answer = timeout(DEADLINE, api.get(name)).await.expect("an answer");
    answer.map(|_| ()).map_err(told)
}

fn authorization(headers: &HeaderMap) -> &str {
    headers["authorization"].to_str().unwrap()
}

#[tokio::test]
async fn a_pod_s_own_cluster_is_asked_with_the_newest_token_and_the_newest_roots() {
    let directory = tempfile::tempdir().unwrap();
    let (root, tls) = server("127.0.0.1", b"http/1.1");
    let (port, mut requests, _server) = serve(tls).await;
    let Cluster::Own { server: address, .. } = Cluster::own("127.0.0.1", &port.to_string()) else {
        panic!("another kind of cluster");
    };
    let kubernetes = Kubernetes::new(Cluster::Own {
        server: address,
        directory: directory.path().to_owned(),
    });
    let put = |name: &str, text: &str| fs::write(directory.path().join(name), text).unwrap();

    let error = ask(&kubernetes, "here").await.unwrap_err();
    assert!(error.contains("ca.crt: No such file"), "{error}");
    put("ca.crt", "");
    let error = ask(&kubernetes, "here").await.unwrap_err();
    assert!(error.contains("no usable root certificate"), "{error}");
    put("ca.crt", &root);
    let error = ask(&kubernetes, "here").await.unwrap_err();
    assert!(error.contains("token: No such file"), "{error}");

    for token in ["first\n", "second"] {
        put("token", token);
        assert_eq!(ask(&kubernetes, "here").await, Ok(()));
        let (path, headers) = requests.recv().await.unwrap();
        assert_eq!(path, "/api/v1/namespaces/here");
        assert_eq!(authorization(&headers), format!("Bearer {}", token.trim()));
    }
    // A client that is held for long has the newest token too.
    let held: Api<Namespace> = Api::all(kubernetes.client().await.unwrap());
    put("token", "third");
    held.get("here").await.unwrap();
    assert_eq!(authorization(&requests.recv().await.unwrap().1), "Bearer third");

    let error = ask(&kubernetes, "elsewhere").await.unwrap_err();
    assert!(error.contains("not there"), "{error}");
    put("ca.crt", &server("127.0.0.1", b"http/1.1").0);
    let error = ask(&kubernetes, "here").await.unwrap_err();
    assert!(error.contains("UnknownIssuer"), "{error}");
    put("ca.crt", &root);
    assert_eq!(ask(&kubernetes, "here").await, Ok(()));
    assert!(!format!("{kubernetes:?}").contains("third"));
}

/// A kubeconfig of one cluster and one user, whose keys are given.
fn kubeconfig(cluster: &str, user: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{{name: c, context: {{cluster: c, user: u}}}}]\n\
         clusters: [{{name: c, cluster: {{{cluster}}}}}]\nusers: [{{name: u, user: {{{user}}}}}]\n"
    )
}

#[tokio::test]
async fn a_kubeconfig_leads_below_a_path_and_its_files_lie_beside_it() {
    let directory = tempfile::tempdir().unwrap();
    let (root, tls) = server("kubernetes.example", b"http/1.1");
    let (port, mut requests, _server) = serve(tls).await;
    let file = directory.path().join("kubeconfig");
    let kubernetes = Kubernetes::new(Cluster::Kubeconfig(file.clone()));
    fs::write(directory.path().join("ca.crt"), &root).unwrap();
    fs::write(directory.path().join("token"), "from a file").unwrap();
    let cluster = format!(
        "server: 'https://127.0.0.1:{port}/below', certificate-authority: ca.crt, tls-server-name: kubernetes.example"
    );
    for (user, token) in [
        ("tokenFile: token", "Bearer from a file"),
        ("token: itself", "Bearer itself"),
    ] {
        fs::write(&file, kubeconfig(&cluster, user)).unwrap();
        assert_eq!(ask(&kubernetes, "here").await, Ok(()));
        let (path, headers) = requests.recv().await.unwrap();
        assert_eq!(path, "/below/api/v1/namespaces/here");
        assert_eq!(authorization(&headers), token);
    }
    // As data, and with the name of the address, which the certificate does not have.
    let root = base64::engine::general_purpose::STANDARD.encode(&root);
    let cluster = format!("server: 'https://127.0.0.1:{port}', certificate-authority-data: {root}");
    fs::write(&file, kubeconfig(&cluster, "token: itself")).unwrap();
    let error = ask(&kubernetes, "here").await.unwrap_err();
    assert!(error.contains("certificate not valid for name"), "{error}");
}

#[test]
fn a_kubeconfig_that_cannot_be_used_is_told_without_its_secrets() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("kubeconfig");
    let (root, _) = server("localhost", b"http/1.1");
    fs::write(directory.path().join("ca.crt"), root).unwrap();
    let good = "server: 'https://localhost', certificate-authority: ca.crt";
    let cluster = |cluster: &str| kubeconfig(cluster, "token: hidden");
    let user = |user: &str| kubeconfig(good, user);
    let table = [
        ("token: hidden: hidden".to_owned(), "no YAML of kind Config"),
        (
            cluster(&format!("{good}, server: [hidden]")),
            "no YAML of kind Config",
        ),
        (String::new(), "no current-context"),
        (
            user("token: hidden").replace("current-context: c", "current-context: d"),
            "no context \"d\"",
        ),
        (
            user("token: hidden").replace("{cluster: c,", "{cluster: d,"),
            "no cluster \"d\"",
        ),
        (
            user("token: hidden").replace("user: u}", "user: d}"),
            "no user \"d\"",
        ),
        (cluster("certificate-authority: ca.crt"), "server"),
        (
            cluster("server: 'http://localhost', certificate-authority: ca.crt"),
            "https://HOST:PORT",
        ),
        (cluster("server: 'https://localhost'"), "no certificate-authority"),
        (
            cluster("server: 'https://localhost', certificate-authority: absent"),
            "absent: No such file",
        ),
        (
            cluster("server: 'https://localhost', certificate-authority-data: '!'"),
            "is not base64",
        ),
        (
            cluster(&format!("{good}, insecure-skip-tls-verify: true")),
            "insecure-skip-tls-verify is not supported",
        ),
        (
            cluster(&format!("{good}, proxy-url: 'http://hidden'")),
            "proxy-url is not supported",
        ),
        (user("exec: {command: hidden}"), "exec is not supported"),
        (
            user("auth-provider: {name: x, config: {a: hidden}}"),
            "auth-provider is not supported",
        ),
        (user("username: x, password: hidden"), "username is not supported"),
        (user("token: hidden, as: somebody"), "as is not supported"),
        (user("tokenFile: ''").replace("tokenFile: ''", ""), "no token"),
        (user("client-certificate: ca.crt"), "belong together"),
        (
            user("client-certificate: ca.crt, client-key-data: aGlkZGVu"),
            "no private key",
        ),
    ];
    for (text, problem) in table {
        fs::write(&file, &text).unwrap();
        let Err(error) = Target::read(&Cluster::Kubeconfig(file.clone())) else {
            panic!("taken: {text}");
        };
        let error = told(error);
        assert!(error.contains(problem), "{error:?} without {problem:?}");
        assert!(
            !error.contains("hidden") && error.contains("kubeconfig"),
            "{error}"
        );
    }
    fs::remove_file(&file).unwrap();
    let error = Target::read(&Cluster::Kubeconfig(file)).err().unwrap();
    assert!(told(error).contains("kubeconfig: No such file"));
}

#[tokio::test]
async fn a_client_certificate_is_shown_and_is_enough() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("kubeconfig");
    let (root, tls) = server("localhost", b"http/1.1");
    let client = rcgen::generate_simple_self_signed(["node".to_owned()]).unwrap();
    let mut trusted = rustls::RootCertStore::empty();
    trusted.add(client.cert.der().clone()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let verifier = rustls::server::WebPkiClientVerifier::builder_with_provider(trusted.into(), provider);
    let mut strict = ServerConfig::builder_with_provider(tls.crypto_provider().clone())
        .with_protocol_versions(&[&rustls::version::TLS12])
        .unwrap()
        .with_client_cert_verifier(verifier.build().unwrap())
        .with_cert_resolver(Arc::clone(&tls.cert_resolver));
    strict.alpn_protocols = tls.alpn_protocols.clone();
    let (port, mut requests, _server) = serve(Arc::new(strict)).await;
    for (name, text) in [
        ("ca.crt", root),
        ("node.crt", client.cert.pem()),
        ("node.key", client.signing_key.serialize_pem()),
    ] {
        fs::write(directory.path().join(name), text).unwrap();
    }
    let cluster = format!("server: 'https://localhost:{port}', certificate-authority: ca.crt");
    let user = "client-certificate: node.crt, client-key: node.key";
    fs::write(&file, kubeconfig(&cluster, user)).unwrap();
    let kubernetes = Kubernetes::new(Cluster::Kubeconfig(file));
    assert_eq!(ask(&kubernetes, "here").await, Ok(()));
    assert!(!requests.recv().await.unwrap().1.contains_key("authorization"));
}
