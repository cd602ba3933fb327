use serde_json::{Value, json};

use super::{
    super::{enablement::Enablement, pod::tests::pod},
    *,
};

/// A reconciler, with the test in the lifecycle's place.
struct Fixture {
    directory: Arc<Directory>,
    events: mpsc::Receiver<PodEvent>,
    status: watch::Sender<Status>,
    missed: watch::Receiver<Vec<Missed>>,
    stop: CancellationToken,
}

impl Fixture {
    fn start() -> Self {
        let enablement = Enablement {
            selectors: "- podSelector: {matchLabels: {mesh: 'yes'}}".parse().unwrap(),
            excluded: Vec::new(),
            system: Vec::new(),
        };
        let directory = Arc::new(Directory::new(enablement, String::new()));
        directory.replace_pods(BTreeMap::new());
        directory.replace_namespaces(BTreeMap::from([("shop".to_owned(), BTreeMap::new())]));
        let (sender, events) = mpsc::channel(64);
        let (status, view) = watch::channel(Status::default());
        let missed = watch::Sender::default();
        let missed_view = missed.subscribe();
        let stop = CancellationToken::new();
        let reconciler = Reconciler::new(Arc::clone(&directory), sender, view, missed);
        tokio::spawn(reconciler.run(stop.clone()));
        Self {
            directory,
            events,
            status,
            missed: missed_view,
            stop,
        }
    }

    fn put(&self, name: &str, more: Value) {
        self.directory.put_pod(pod(name, more));
    }

    fn captured(&self, names: &[&str]) {
        self.status.send_replace(Status {
            synced: true,
            pods: names.iter().map(|name| status(name, State::Captured)).collect(),
        });
    }

    async fn event(&mut self) -> PodEvent {
        timeout(Duration::from_secs(60), self.events.recv())
            .await
            .expect("an event comes")
            .expect("the reconciler is there")
    }

    /// No event comes although time passes.
    async fn quiet(&mut self) {
        let event = timeout(Duration::from_secs(3), self.events.recv()).await;
        assert!(event.is_err(), "{event:?}");
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

fn status(name: &str, state: State) -> PodStatus {
    let own = Netns::current().unwrap();
    PodStatus {
        uid: format!("uid-{name}"),
        name: name.into(),
        namespace: "shop".into(),
        service_account: "default".into(),
        netns: own.id().ino,
        netns_path: Some("/proc/self/ns/net".into()),
        addresses: vec![[10, 0, 0, 1].into()],
        state,
        impaired: false,
        strict: false,
        error: None,
    }
}

fn wanted() -> Value {
    json!({ "metadata": { "labels": { "mesh": "yes" } } })
}

fn strict() -> Value {
    json!({ "metadata": { "labels": { "mesh": "yes" }, "annotations": { "redirector.io/strict": "true" } } })
}

#[tokio::test]
async fn a_captured_pod_that_leaves_the_mesh_is_released() {
    let mut fixture = Fixture::start();
    fixture.put("web", json!({}));
    fixture.captured(&["web"]);
    let PodEvent::Delete(delete, reply) = fixture.event().await else {
        panic!("no delete");
    };
    assert_eq!((delete.uid.as_str(), delete.netns), ("uid-web", None));
    fixture.captured(&[]);
    reply.send(Ok(())).unwrap();
    fixture.quiet().await;
}

#[tokio::test]
async fn a_pod_whose_processes_may_still_run_is_left_to_its_namespace() {
    for (more, why) in [
        (None, "its object is gone"),
        (
            Some(json!({ "metadata": { "labels": { "mesh": "yes" } }, "status": { "phase": "Failed" } })),
            "it says that it has ended",
        ),
    ] {
        let mut fixture = Fixture::start();
        if let Some(more) = more {
            fixture.put("web", more);
        }
        fixture.captured(&["web"]);
        while let Ok(Some(event)) = timeout(Duration::from_secs(3), fixture.events.recv()).await {
            // It is given its rules once.
            let PodEvent::Add(_, reply) = event else {
                panic!("{why}: {event:?}");
            };
            reply.send(Ok(())).unwrap();
        }
    }
}

#[tokio::test]
async fn a_pod_that_failed_by_its_rules_is_tried_with_others() {
    let mut fixture = Fixture::start();
    fixture.put("web", strict());
    fixture.status.send_replace(Status {
        synced: true,
        pods: vec![status("web", State::NotCaptured)],
    });
    for (expected, answer) in [(Some(true), Err(Error::Protocol("not strict"))), (None, Ok(()))] {
        let PodEvent::Add(add, reply) = fixture.event().await else {
            panic!("no add");
        };
        assert_eq!(add.rules.unwrap().strict, expected);
        fixture.put("web", wanted());
        reply.send(answer).unwrap();
    }
}

#[tokio::test]
async fn a_release_that_fails_is_tried_again() {
    let mut fixture = Fixture::start();
    fixture.put("web", json!({}));
    fixture.captured(&["web"]);
    for _ in 0..2 {
        let PodEvent::Delete(_, reply) = fixture.event().await else {
            panic!("no delete");
        };
        reply.send(Err(Error::Protocol("not now"))).unwrap();
    }
}

#[tokio::test]
async fn new_annotations_become_new_rules() {
    let mut fixture = Fixture::start();
    fixture.put("web", wanted());
    fixture.captured(&["web"]);
    for (more, expected) in [(wanted(), None), (strict(), Some(true)), (wanted(), None)] {
        fixture.put("web", more);
        let PodEvent::Add(add, reply) = fixture.event().await else {
            panic!("no add");
        };
        assert_eq!(add.rules.unwrap().strict, expected);
        assert_eq!(add.info.uid.as_str(), "uid-web");
        reply.send(Ok(())).unwrap();
        fixture.quiet().await;
    }
}

#[tokio::test]
async fn rules_that_cannot_be_read_change_nothing_and_are_retried_quietly() {
    let mut fixture = Fixture::start();
    fixture.put(
        "web",
        json!({ "metadata": { "labels": { "mesh": "yes" }, "annotations": { "redirector.io/strict": "maybe" } } }),
    );
    fixture.captured(&["web"]);
    fixture.quiet().await;
    assert!(fixture.missed.borrow().is_empty(), "it is captured");
}

#[tokio::test]
async fn a_pod_that_cannot_be_found_is_told_and_stops_no_other() {
    let mut fixture = Fixture::start();
    fixture.put("lost", wanted());
    fixture.put("starting", {
        let mut more = wanted();
        more["status"] = json!({ "podIP": null, "podIPs": null });
        more
    });
    let lost = |missed: &Vec<Missed>| missed.iter().any(|pod| pod.name == "lost");
    timeout(Duration::from_secs(60), fixture.missed.wait_for(lost))
        .await
        .expect("it is told")
        .unwrap();
    assert_eq!(fixture.missed.borrow().len(), 1, "the other has no address yet");
    fixture.put("web", json!({}));
    fixture.captured(&["web"]);
    assert!(matches!(fixture.event().await, PodEvent::Delete(..)));
    fixture.captured(&["lost"]);
    timeout(Duration::from_secs(60), fixture.missed.wait_for(Vec::is_empty))
        .await
        .expect("it is no longer told once it is captured")
        .unwrap();
}
