use futures_util::stream::BoxStream;
use http_body_util::BodyExt;

use super::*;
use crate::{
    identity::{self, CertSource, Svid, trust::PeerRules},
    mesh::spiffe::SpiffeId,
    pods::status::PodStatus,
    redirect::probers::Rule,
    telemetry::metrics,
};

struct Fixture {
    admin: Arc<Admin>,
    pods: watch::Sender<Status>,
    _mesh: watch::Sender<Arc<Mesh>>,
    awaited: watch::Sender<Vec<&'static str>>,
    _logs: Box<dyn std::any::Any>,
}

/// A source that says nothing.
struct Nobody;

impl CertSource for Nobody {
    fn svids(&self, _: &SpiffeId) -> BoxStream<'static, Result<Svid, identity::Error>> {
        Box::pin(futures_util::stream::pending())
    }
}

fn fixture() -> Fixture {
    let (pods, pods_view) = watch::channel(Status::default());
    let (mesh, mesh_view) = watch::channel(Arc::new(Mesh::default()));
    let (awaited, awaited_view) = watch::channel(Vec::new());
    let (logs, layer) = logs::Control::detached();
    let admin = Admin {
        pods: pods_view,
        directory: None,
        missed: watch::channel(Vec::new()).1,
        cni: None,
        probers: watch::channel(Some(probers())).1,
        mesh: mesh_view,
        awaited: awaited_view,
        flows: Arc::default(),
        identities: Store::new(Arc::new(Nobody), PeerRules::default()),
        registry: metrics::registry(),
        logs,
        backend: "test",
        config: json!({"redirect": "test"}),
        quit: CancellationToken::new(),
        stopping: CancellationToken::new(),
    };
    Fixture {
        admin: Arc::new(admin),
        pods,
        _mesh: mesh,
        awaited,
        _logs: Box::new(layer),
    }
}

fn pod(state: State) -> PodStatus {
    PodStatus {
        uid: "u-1".into(),
        name: "web-0".into(),
        namespace: "shop".into(),
        service_account: "web".into(),
        netns: 7,
        netns_path: None,
        addresses: vec![[10, 0, 0, 1].into()],
        state,
        strict: false,
        error: (state == State::NotCaptured).then(|| "cannot look".into()),
    }
}

fn probers() -> View {
    View {
        rule: Rule::Cgroups,
        cgroups: vec!["/sys/fs/cgroup/k".into()],
        reason: "kubelet's, found by its unit".to_owned(),
        as_asked: true,
    }
}

async fn ask(admin: &Admin, endpoint: Endpoint, method: &str, path: &str) -> (u16, String) {
    let request = Request::builder()
        .method(method)
        .uri(path)
        .body(Bytes::new())
        .unwrap();
    let answer = admin.answer(endpoint, &request).await;
    let status = answer.status().as_u16();
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8(body.to_vec()).unwrap())
}

#[tokio::test]
async fn each_endpoint_has_its_paths_and_methods() {
    let fixture = fixture();
    use Endpoint::{Admin, Metrics, Readiness};
    let table = [
        (Admin, "GET", "/", 200, "/quitquitquit"),
        (Admin, "GET", "/pods", 200, "\"backend\": \"test\""),
        (Admin, "GET", "/pods", 200, "\"rule\": \"cgroups\""),
        (Admin, "GET", "/connections?pod=shop/web-0", 200, "\"total\": 0"),
        (Admin, "GET", "/flows?after=0", 200, "\"next\": 0"),
        (Admin, "GET", "/flows?since=0", 400, "no parameter \"since\""),
        (Admin, "POST", "/flows", 405, "only GET"),
        (Metrics, "GET", "/flows", 404, "no such path"),
        (Admin, "GET", "/metrics", 200, "# EOF"),
        (
            Admin,
            "GET",
            "/healthz/ready",
            500,
            "not ready, pending: workload proxy manager\n",
        ),
        (Admin, "GET", "/healthz/live", 200, "alive\n"),
        (Readiness, "GET", "/healthz/live", 200, "alive\n"),
        (Metrics, "GET", "/healthz/live", 404, "no such path"),
        (Admin, "GET", "/logging", 405, "only POST"),
        (Admin, "GET", "/quitquitquit", 405, "only POST"),
        (Admin, "POST", "/pods", 405, "only GET"),
        (Admin, "GET", "/other", 404, "no such path"),
        (Metrics, "GET", "/metrics", 200, "process_open_fds"),
        (Metrics, "GET", "/stats/prometheus", 200, "process_open_fds"),
        (Metrics, "GET", "/pods", 404, ""),
        (Metrics, "POST", "/quitquitquit", 404, ""),
        (Readiness, "POST", "/healthz/ready", 405, ""),
        (Readiness, "GET", "/metrics", 404, ""),
    ];
    for (endpoint, method, path, status, expected) in table {
        let (found, body) = ask(&fixture.admin, endpoint, method, path).await;
        assert!(
            found == status && body.contains(expected),
            "{endpoint:?} {method} {path}: {found} {body}"
        );
    }
    assert!(!fixture.admin.quit.is_cancelled());
    assert_eq!(
        ask(&fixture.admin, Admin, "POST", "/quitquitquit").await,
        (200, "shutdown now\n".to_owned())
    );
    assert!(fixture.admin.quit.is_cancelled());
}

#[tokio::test]
async fn pages_of_others_stop_no_agent_and_scrapes_by_name_go_on() {
    let admin = fixture().admin;
    let answer = async |endpoint, method: &str, path: &str| {
        let request = Request::builder().method(method).uri(path);
        let request = request.header("host", "node-a.example:15000").body(Bytes::new());
        admin.answer(endpoint, &request.unwrap()).await.status()
    };
    for (method, path) in [("POST", "/quitquitquit"), ("GET", "/flows"), ("GET", "/pods")] {
        let status = answer(Endpoint::Admin, method, path).await;
        assert_eq!(status, StatusCode::FORBIDDEN, "{method} {path}");
    }
    assert!(!admin.quit.is_cancelled());
    assert_eq!(answer(Endpoint::Metrics, "GET", "/metrics").await, StatusCode::OK);
}

#[tokio::test(start_paused = true)]
async fn those_that_wait_leave_room_for_others() {
    let admin = fixture().admin;
    let ask = || ask(&admin, Endpoint::Admin, "GET", "/flows?after=0&wait=20");
    let waiting = futures_util::future::join_all((0..8).map(|_| ask()));
    let asked = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        ask().await
    };
    let (answers, (status, body)) = tokio::join!(waiting, asked);
    assert_eq!(status, 503, "{body}");
    assert!(answers.iter().all(|(status, _)| *status == 200), "{answers:?}");
    assert_eq!(ask().await.0, 200, "their places are free again");
}

#[tokio::test]
async fn readiness_follows_the_snapshot_and_not_single_pods() {
    let fixture = fixture();
    let ready = || ask(&fixture.admin, Endpoint::Readiness, "GET", "/healthz/ready");
    assert_eq!(ready().await.0, 500);
    fixture.pods.send_replace(Status {
        synced: true,
        pods: vec![pod(State::NotCaptured)],
    });
    assert_eq!(ready().await, (200, "ready\n".to_owned()));
    for (awaited, told) in [
        (vec!["a.B", "c.D"], "state manager (no a.B, no c.D yet)"),
        (vec!["c.D"], "state manager (no c.D yet)"),
    ] {
        fixture.awaited.send_replace(awaited);
        assert_eq!(ready().await, (500, format!("not ready, pending: {told}\n")));
    }
    fixture.awaited.send_replace(Vec::new());
    fixture.admin.stopping.cancel();
    assert_eq!(ready().await, (500, "not ready, pending: shutdown\n".to_owned()));
}

#[tokio::test]
async fn a_plugin_that_is_not_installed_makes_the_node_unready() {
    let Fixture { admin, pods, .. } = fixture();
    pods.send_replace(Status {
        synced: true,
        pods: Vec::new(),
    });
    let (state, view) = watch::channel(Err("there is no CNI configuration yet".to_owned()));
    let mut admin = Arc::into_inner(admin).unwrap();
    admin.cni = Some(view);
    let shown = || {
        (
            admin.readiness().status(),
            render(([127, 0, 0, 1], 15000).into(), &admin.pods_view(), ""),
        )
    };
    let (status, text) = shown();
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    let why = "not ready: CNI plugin not installed yet: there is no CNI configuration yet";
    assert!(text.contains(why) && !text.contains("installed in"), "{text}");
    let _ = state.send_replace(Ok("/etc/cni/net.d/10-a.conflist".into()));
    let (status, text) = shown();
    assert_eq!(status, StatusCode::OK);
    assert!(
        text.contains("CNI plugin installed in /etc/cni/net.d/10-a.conflist"),
        "{text}"
    );
}

#[tokio::test]
async fn the_log_level_can_be_changed() {
    let fixture = fixture();
    let post = |query: &'static str| {
        let admin = &fixture.admin;
        async move { ask(admin, Endpoint::Admin, "POST", &format!("/logging{query}")).await }
    };
    for (query, expected) in [
        ("", "info"),
        ("?level=debug", "debug"),
        ("", "debug"),
        ("?level=h2=warn", "h2=warn"),
        ("?redirector%3Dtrace", "redirector=trace"),
        ("?reset", "info"),
    ] {
        assert_eq!(
            post(query).await,
            (200, format!("current log level is {expected}\n")),
            "{query}"
        );
    }
    let (status, body) = post("?level=h2=loud").await;
    assert!(status == 400 && body.contains("h2=loud"), "{status} {body}");
}

#[tokio::test]
async fn a_running_agent_tells_its_status() {
    let fixture = fixture();
    let refused = PodStatus {
        error: Some("the pod's newest rules are refused".into()),
        strict: true,
        ..pod(State::Captured)
    };
    fixture.pods.send_replace(Status {
        synced: true,
        pods: vec![pod(State::Captured), pod(State::NotCaptured), refused],
    });
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let stop = CancellationToken::new();
    let task = tokio::spawn(Arc::clone(&fixture.admin).serve(Endpoint::Admin, listener, stop.clone()));
    let (view, metrics) = tokio::task::spawn_blocking(move || client::status(address))
        .await
        .unwrap()
        .unwrap();
    assert!(view.ready);
    assert_eq!(view.status, *fixture.pods.borrow());
    let text = render(address, &view, &metrics);
    for expected in [
        "backend test; pods 3",
        "reach the pods directly: those of /sys/fs/cgroup/k (kubelet's, found by its unit)\n",
        "shop/web-0  captured  10.0.0.1  sa web  uid u-1  net:[7]\n",
        "NOT CAPTURED  10.0.0.1  sa web  uid u-1  net:[7]  cannot look\n",
        "web-0  captured  10.0.0.1  sa web  uid u-1  net:[7]  strict  the pod's newest rules are refused\n",
        "  process_open_fds ",
    ] {
        assert!(text.contains(expected), "{expected} in {text}");
    }
    stop.cancel();
    task.await.unwrap();
    let error = tokio::task::spawn_blocking(move || client::status(address))
        .await
        .unwrap()
        .unwrap_err();
    assert!(error.to_string().contains("no agent answers"), "{error}");
}
