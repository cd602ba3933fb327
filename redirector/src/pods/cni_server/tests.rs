use std::{fs, os::unix::fs::PermissionsExt as _};

use socket2::{Domain, SockAddr, Socket, Type};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    sync::watch,
    task::JoinHandle,
};

use super::*;
use crate::{
    mesh::{
        index::{Mesh, Update},
        pod::Home,
        testing::workload,
        workload::Workload,
    },
    pods::{
        pause::{Pauser, pauses},
        status::PodStatus,
    },
};

struct Server {
    path: PathBuf,
    events: mpsc::Receiver<PodEvent>,
    pods: watch::Sender<Status>,
    stop: CancellationToken,
    task: JoinHandle<()>,
    pauser: Pauser<()>,
    _directory: tempfile::TempDir,
}

impl Server {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("made/cni.sock");
        let (sender, events) = mpsc::channel(4);
        let stop = CancellationToken::new();
        let mut mesh = Mesh::default();
        mesh.apply(Update::Workload(Arc::new(Workload {
            service_account: "from-mesh".into(),
            ..workload("known", "10.0.0.1")
        })));
        let admission = Admission::Sender {
            mesh: watch::channel(Arc::new(mesh)).1,
            home: Home::default(),
            excluded: vec!["kube-system".to_owned()],
        };
        let server = CniServer::bind(&path).unwrap();
        let (pods, view) = watch::channel(Status::default());
        let (pauser, pauses) = pauses();
        let task = tokio::spawn(server.run(sender, view, admission, pauses, stop.clone()));
        Self {
            path,
            events,
            pods,
            stop,
            task,
            pauser,
            _directory: directory,
        }
    }

    async fn send(&self, method: &str, path: &str, body: &str) -> tokio::net::UnixStream {
        let mut stream = tokio::net::UnixStream::connect(&self.path).await.unwrap();
        let length = body.len();
        let request =
            format!("{method} {path} HTTP/1.1\r\nhost: unix\r\ncontent-length: {length}\r\n\r\n{body}");
        stream.write_all(request.as_bytes()).await.unwrap();
        stream
    }

    /// Status and body of the answer to a request that needs no lifecycle.
    async fn exchange(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        read(self.send(method, path, body).await).await
    }

    async fn event(&mut self) -> PodEvent {
        timeout(Duration::from_secs(20), self.events.recv())
            .await
            .unwrap()
            .unwrap()
    }

    async fn stop(self) {
        self.stop.cancel();
        timeout(Duration::from_secs(20), self.task)
            .await
            .unwrap()
            .unwrap();
    }
}

async fn read(mut stream: tokio::net::UnixStream) -> (u16, String) {
    let mut answer = String::new();
    timeout(Duration::from_secs(20), stream.read_to_string(&mut answer))
        .await
        .unwrap()
        .unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

const OWN: &str = "/proc/self/ns/net";

fn event(name: &str, more: &str) -> String {
    format!(
        r#"{{"Netns":"{OWN}","PodName":"{name}","PodNamespace":"shop",
            "IPs":[{{"Address":{{"IP":"10.4.1.9","Mask":"////AA=="}}}}]{more}}}"#
    )
}

#[tokio::test]
async fn an_add_is_answered_when_it_is_done() {
    let mut server = Server::start();
    let table = [
        (
            event("web", r#","PodUID":"u-1","ServiceAccount":"sa""#),
            "u-1",
            "sa",
        ),
        (event("web", r#","ServiceAccount":"sa""#), "shop_web", "sa"),
        (event("known", ""), "shop_known", "from-mesh"),
    ];
    for (body, uid, service_account) in table {
        let request = server.send("POST", "/cmdadd", &body).await;
        let PodEvent::Add(add, reply) = server.event().await else {
            panic!()
        };
        assert_eq!(
            (add.info.uid.as_str(), add.info.service_account.as_str()),
            (uid, service_account)
        );
        assert_eq!(add.addresses, ["10.4.1.9".parse::<std::net::IpAddr>().unwrap()]);
        assert_eq!(add.netns_path.as_deref(), Some(Path::new(OWN)));
        assert_eq!(add.on_failure, OnFailure::Report);
        reply.send(Ok(())).unwrap();
        assert_eq!(read(request).await, (200, String::new()));
    }
    let request = server.send("POST", "/cmdadd", &event("known", "")).await;
    let PodEvent::Add(add, reply) = server.event().await else {
        panic!()
    };
    reply
        .send(Err(Error::NodeNamespace {
            netns: add.netns.id(),
        }))
        .unwrap();
    let (status, text) = read(request).await;
    assert!(
        status == 500 && text.contains("the node's own network namespace"),
        "{status} {text}"
    );
    // An answer that never comes, because the lifecycle has ended.
    let request = server.send("POST", "/cmdadd", &event("known", "")).await;
    drop(server.event().await);
    assert_eq!(read(request).await, (500, "the agent is stopping\n".to_owned()));
    server.stop().await;
}

#[tokio::test]
async fn a_delete_names_the_namespace_it_means() {
    let mut server = Server::start();
    let own = Netns::open(Path::new(OWN)).unwrap().id();
    let table = [
        (r#"{"PodName":"web","PodNamespace":"shop"}"#.to_owned(), None),
        (
            r#"{"Netns":"","PodName":"web","PodNamespace":"shop"}"#.to_owned(),
            None,
        ),
        (
            r#"{"Netns":"/gone","PodName":"web","PodNamespace":"shop"}"#.to_owned(),
            Some(NetnsRef {
                path: "/gone".into(),
                id: None,
            }),
        ),
        (
            event("web", ""),
            Some(NetnsRef {
                path: OWN.into(),
                id: Some(own),
            }),
        ),
    ];
    for (body, netns) in table {
        let request = server.send("POST", "/cmddel", &body).await;
        let PodEvent::Delete(delete, reply) = server.event().await else {
            panic!()
        };
        assert_eq!((delete.uid.as_str(), delete.netns), ("shop_web", netns));
        reply.send(Ok(())).unwrap();
        assert_eq!(read(request).await, (200, String::new()));
    }
    server.stop().await;
}

#[tokio::test]
async fn wrong_requests_are_refused_with_a_reason() {
    let mut server = Server::start();
    let file = tempfile::NamedTempFile::new().unwrap();
    let not_netns = event("known", "").replace(OWN, file.path().to_str().unwrap());
    let other_kind = event("known", "").replace(OWN, "/proc/self/ns/mnt");
    let table: [(&str, &str, String, u16, &str); 14] = [
        ("POST", "/cmdadd", String::new(), 400, "the body is empty"),
        ("POST", "/cmddel", String::new(), 400, "the body is empty"),
        ("POST", "/cmdadd", "{nonsense".into(), 400, "not JSON"),
        ("POST", "/cmdadd", "{}".into(), 400, "PodName is missing"),
        (
            "POST",
            "/cmdadd",
            event("known", "").replace(OWN, ""),
            400,
            "Netns is missing",
        ),
        (
            "POST",
            "/cmdadd",
            event("known", "").replace(OWN, "ns/net"),
            400,
            "Netns is not an absolute path",
        ),
        (
            "POST",
            "/cmdadd",
            event("a/b", r#","ServiceAccount":"sa""#),
            400,
            "no usable UID",
        ),
        (
            "POST",
            "/cmdadd",
            event("web", ""),
            500,
            "no workload shop/web: send ServiceAccount, or add",
        ),
        (
            "POST",
            "/cmdadd",
            event("known", "").replace(OWN, "/gone"),
            500,
            "namespace /gone: No such file",
        ),
        ("POST", "/cmdadd", not_netns, 500, "not a network namespace"),
        ("POST", "/cmdadd", other_kind, 500, "not a network namespace"),
        (
            "POST",
            "/cmdadd",
            "x".repeat(64 * 1024 + 1),
            413,
            "more than 65536 bytes",
        ),
        ("GET", "/cmdadd", String::new(), 405, "only POST"),
        ("POST", "/other", String::new(), 404, "no such path"),
    ];
    for (method, path, body, status, expected) in table {
        let (found, text) = server.exchange(method, path, &body).await;
        assert!(
            found == status && text.contains(expected),
            "{method} {path} {body:.80}: {found} {text}"
        );
    }
    assert!(server.events.try_recv().is_err(), "nothing of it came through");
    server.stop().await;
}

#[tokio::test]
async fn the_socket_is_ours_alone() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("cni.sock");
    let server = CniServer::bind(&path).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o660);
    assert!(matches!(CniServer::bind(&path), Err(BindError::InUse { .. })));
    assert!(matches!(
        socket_file::remove_stale(&path, FLAG),
        Err(BindError::InUse { .. })
    ));
    assert!(path.exists());

    // What an agent that was killed leaves.
    std::mem::forget(server.file);
    drop(server.listener);
    assert!(path.exists());
    let server = CniServer::bind(&path).unwrap();

    // Another's socket at our path survives our end.
    fs::remove_file(&path).unwrap();
    let other = CniServer::bind(&path).unwrap();
    drop(server);
    assert!(path.exists());
    drop(other);
    assert!(!path.exists());

    fs::write(&path, "data").unwrap();
    assert!(matches!(
        CniServer::bind(&path),
        Err(BindError::NotASocket { .. })
    ));
    assert_eq!(fs::read_to_string(&path).unwrap(), "data");
}

/// A server that hangs has a queue, which is full some time.
#[test]
fn a_server_that_accepts_nothing_is_one() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("cni.sock");
    let server = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
    let address = SockAddr::unix(&path).unwrap();
    server.bind(&address).unwrap();
    server.listen(0).unwrap();
    let client = || {
        let client = Socket::new(Domain::UNIX, Type::STREAM.nonblocking(), None).unwrap();
        client.connect(&address).map(|()| client)
    };
    let mut clients = Vec::new();
    while let Ok(client) = client() {
        clients.push(client);
    }
    assert!(matches!(
        socket_file::remove_stale(&path, FLAG),
        Err(BindError::InUse { .. })
    ));
    drop(server);
    socket_file::remove_stale(&path, FLAG).unwrap();
    assert!(!path.exists());
}

#[tokio::test]
async fn a_check_is_refused_while_the_capture_fails() {
    let server = Server::start();
    let body = event("web", r#","PodUID":"u-1""#);
    assert_eq!(
        server.exchange("POST", "/cmdcheck", &body).await,
        (200, String::new()),
        "a pod that is not known was not to be captured"
    );
    let of = |state, error: Option<&str>| Status {
        synced: true,
        pods: vec![PodStatus {
            uid: "u-1".to_owned(),
            name: "web".to_owned(),
            namespace: "shop".to_owned(),
            service_account: "sa".to_owned(),
            netns: 1,
            netns_path: None,
            addresses: Vec::new(),
            state,
            impaired: false,
            strict: false,
            error: error.map(str::to_owned),
        }],
    };
    for (state, error, expected) in [
        (State::Starting, None, (200, "")),
        (State::Captured, Some("lacks something"), (200, "")),
        (State::Stopping, None, (200, "")),
        (State::NotCaptured, Some("no device"), (409, "no device\n")),
    ] {
        server.pods.send_replace(of(state, error));
        let (status, text) = server.exchange("POST", "/cmdcheck", &body).await;
        assert_eq!((status, text.as_str()), expected, "{state:?}");
    }
    server.stop().await;
}

#[tokio::test]
async fn what_plugins_log_is_taken() {
    let server = Server::start();
    for (body, expected) in [
        (r#"["{\"level\":\"info\",\"msg\":\"m\"}","text"]"#, 200),
        (r#"{"msg":"m"}"#, 400),
        (r#"[{"msg":"m"}]"#, 400),
        ("", 400),
    ] {
        let (status, text) = server.exchange("POST", "/log", body).await;
        assert_eq!(status, expected, "{body}: {text}");
    }
    // One that does not wait for the answer is heard as well, and disturbs nobody.
    drop(server.send("POST", "/log", r#"["last words"]"#).await);
    assert_eq!(server.exchange("POST", "/log", "[]").await.0, 200);
    server.stop().await;
}

#[tokio::test]
async fn who_comes_while_it_rests_waits_for_whoever_serves_next() {
    let mut server = Server::start();
    let add = |uid: &str| event("web", &format!(r#","PodUID":"{uid}","ServiceAccount":"sa""#));
    let begun = server.send("POST", "/cmdadd", &add("u-1")).await;
    let PodEvent::Add(_, reply) = server.event().await else {
        panic!()
    };
    let pauser = std::mem::replace(&mut server.pauser, pauses().0);
    let resting = tokio::spawn(async move { pauser.rest().await.unwrap() });
    reply.send(Ok(())).unwrap();
    assert_eq!(read(begun).await.0, 200, "what had begun is answered");
    let ((), rest) = resting.await.unwrap();
    let waiting = server.send("POST", "/cmdadd", &add("u-2")).await;
    timeout(Duration::from_millis(50), server.events.recv())
        .await
        .unwrap_err();
    drop(rest);
    let PodEvent::Add(add, reply) = server.event().await else {
        panic!()
    };
    assert_eq!(add.info.uid.as_str(), "u-2");
    reply.send(Ok(())).unwrap();
    assert_eq!(read(waiting).await.0, 200);
    server.stop().await;
}
