use futures_util::stream::BoxStream;
use http_body_util::BodyExt;
use serde_json::json;

use super::*;
use crate::{
    identity::{self, CertSource, Svid, trust::PeerRules},
    mesh::{
        spiffe::SpiffeId,
        testing::{service, workload},
    },
    pods::status::{PodStatus, State},
    redirect::probers::Rule,
    telemetry::metrics,
};

struct Fixture {
    admin: Arc<Admin>,
    pods: watch::Sender<Status>,
    mesh: watch::Sender<Arc<Mesh>>,
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
    let (logs, layer) = logs::Control::detached("warn".parse().unwrap());
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
        registry: Arc::new(metrics::registry()),
        logs,
        backend: "test",
        config: json!({"redirect": "test"}),
        dumps: Default::default(),
        scrapes: Default::default(),
        quit: CancellationToken::new(),
        stopping: CancellationToken::new(),
    };
    Fixture {
        admin: Arc::new(admin),
        pods,
        mesh,
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
        impaired: false,
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
        (Admin, "GET", "/certificates", 200, "\"certificates\": []"),
        (Admin, "POST", "/certificates", 405, "only GET"),
        (Admin, "GET", "/config_dump", 200, "\"redirect\": \"test\""),
        (Admin, "POST", "/config_dump", 405, "only GET"),
        (Readiness, "GET", "/config_dump", 404, "no such path"),
        (Admin, "GET", "/config", 200, "\"redirect\": \"test\""),
        (Metrics, "GET", "/config", 404, "no such path"),
        (Admin, "GET", "/version", 200, env!("CARGO_PKG_VERSION")),
        (Admin, "POST", "/version", 405, "only GET"),
        (Admin, "GET", "/debug/pprof/profile", 501, "perf record"),
        (Admin, "GET", "/debug/pprof/heap", 501, "smaps_rollup"),
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
async fn a_browser_gets_the_dashboard_and_may_take_nothing_from_elsewhere() {
    let admin = fixture().admin;
    for (path, kind) in [
        ("/", "text/html"),
        ("/dashboard.css", "text/css"),
        ("/dashboard.js", "text/javascript"),
    ] {
        let request = Request::builder().uri(path).header("accept", "text/html,*/*");
        let request = request.body(Bytes::new()).unwrap();
        let answer = admin.answer(Endpoint::Admin, &request).await;
        let header = |name| answer.headers()[name].to_str().unwrap();
        assert!(header(header::CONTENT_TYPE).starts_with(kind), "{path}");
        assert!(
            header(header::CONTENT_SECURITY_POLICY).starts_with("default-src 'none'"),
            "{path}"
        );
    }
    let (status, _) = ask(&admin, Endpoint::Metrics, "GET", "/dashboard.js").await;
    assert_eq!(status, 404);
}

#[tokio::test]
async fn a_config_dump_holds_everything_in_the_shape_that_istioctl_reads() {
    let fixture = fixture();
    let mesh = Mesh::new(
        vec![workload("web", "10.0.0.1")],
        vec![service("cart", "10.9.0.1")],
    );
    fixture.mesh.send_replace(Arc::new(mesh));
    let stopping = PodStatus {
        uid: "u-2".into(),
        ..pod(State::Stopping)
    };
    fixture.pods.send_replace(Status {
        synced: true,
        pods: vec![pod(State::Captured), stopping],
    });
    let dump: serde_json::Value = serde_json::from_str(&dumped(&fixture.admin).await).unwrap();
    let endpoint = "/services/0/endpoints/Kubernetes~1~1Pod~1shop~1web";
    for (pointer, expected) in [
        ("/version/version", env!("CARGO_PKG_VERSION").into()),
        ("/config/redirect", "test".into()),
        ("/counts", json!({"workloads": 1, "services": 1, "policies": 0})),
        ("/workloads/0/workloadIps/0", "10.0.0.1".into()),
        (&format!("{endpoint}/port/80"), 8080.into()),
        ("/policies", json!([])),
        ("/stagedServices", json!({})),
        ("/certificates", json!([])),
        ("/pods/pods/0/uid", "u-1".into()),
        ("/workloadState/u-2/state", "Draining".into()),
        (
            "/workloadState/u-1",
            json!({
                "state": "Up",
                "connections": {"inbound": [], "outbound": []},
                "info": {"name": "web-0", "namespace": "shop", "serviceAccount": "web"},
            }),
        ),
    ] {
        assert_eq!(dump.pointer(pointer), Some(&expected), "{pointer}");
    }
}

async fn dumped(admin: &Admin) -> String {
    let (status, dump) = ask(admin, Endpoint::Admin, "GET", "/config_dump").await;
    assert_eq!(status, 200, "{dump}");
    dump
}

/// Somebody who does not read must not keep others from it for ever, nor may many at a time be made.
#[tokio::test(start_paused = true)]
async fn one_config_dump_is_made_at_a_time() {
    let fixture = fixture();
    let many = (0..2_000).map(|number| workload(&format!("web-{number}"), "10.0.0.1"));
    fixture
        .mesh
        .send_replace(Arc::new(Mesh::new(many.collect(), Vec::new())));
    let request = Request::builder().uri("/config_dump").body(Bytes::new()).unwrap();
    let unread = fixture.admin.answer(Endpoint::Admin, &request).await;
    assert_eq!(unread.status(), StatusCode::OK);
    // By hand: the clock does not go on by itself while a thread blocks.
    let clock = tokio::time::advance(Duration::from_secs(15));
    let second = ask(&fixture.admin, Endpoint::Admin, "GET", "/config_dump");
    let ((status, told), ()) = tokio::join!(second, clock);
    assert!(status == 503 && told.contains("ask again"), "{status} {told}");
    drop(unread);
    let dump = dumped(&fixture.admin).await;
    assert!(
        dump.contains("\"web-1999\"") && dump.ends_with("}\n"),
        "{}",
        dump.len()
    );
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
    let view = admin.pods_view();
    assert_eq!(admin.readiness().status(), StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(
        view.pending,
        ["CNI plugin not installed yet: there is no CNI configuration yet"]
    );
    assert_eq!(view.cni_plugin, None);
    let _ = state.send_replace(Ok("/etc/cni/net.d/10-a.conflist".into()));
    let view = admin.pods_view();
    assert_eq!(admin.readiness().status(), StatusCode::OK);
    assert_eq!(
        view.cni_plugin.unwrap().to_str(),
        Some("/etc/cni/net.d/10-a.conflist")
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
        ("", "warn"),
        ("?level=debug", "debug"),
        ("", "debug"),
        ("?level=h2=warn", "h2=warn,debug"),
        ("?redirector%3Dtrace", "redirector=trace,h2=warn,debug"),
        (
            "?h2=off,access=error",
            "redirector=trace,access=error,h2=off,debug",
        ),
        (
            "?level=redirector%3A%3Aproxy%3Dinfo&reset",
            "redirector::proxy=info,warn",
        ),
        ("?reset", "warn"),
    ] {
        assert_eq!(
            post(query).await,
            (200, format!("current log level is {expected}\n")),
            "{query}"
        );
    }
    for wrong in ["?level=h2=loud", "?level=loud&reset", "?level=info,,debug"] {
        let (status, body) = post(wrong).await;
        assert!(status == 400 && body.contains("log level"), "{status} {body}");
    }
    assert_eq!(post("").await.1, "current log level is warn\n");
}

#[tokio::test]
async fn a_running_agent_tells_its_status() {
    let fixture = fixture();
    let refused = PodStatus {
        error: Some("the pod's newest rules are refused".into()),
        strict: true,
        ..pod(State::Captured)
    };
    let impaired = PodStatus {
        impaired: true,
        error: Some("it lacks something".into()),
        ..pod(State::Captured)
    };
    fixture.pods.send_replace(Status {
        synced: true,
        pods: vec![pod(State::Captured), pod(State::NotCaptured), refused, impaired],
    });
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let stop = CancellationToken::new();
    let task = tokio::spawn(Arc::clone(&fixture.admin).serve(Endpoint::Admin, listener, stop.clone()));
    let client = client::Client {
        address,
        timeout: client::TIMEOUT,
    };
    let ask = || tokio::task::spawn_blocking(move || client.json::<PodsView>("/pods"));
    let view = ask().await.unwrap().unwrap();
    assert!(view.ready);
    assert_eq!(view.backend, "test");
    assert_eq!(view.status, *fixture.pods.borrow());
    stop.cancel();
    task.await.unwrap();
    let error = ask().await.unwrap().unwrap_err();
    assert!(error.to_string().contains("no agent answers"), "{error}");
}
