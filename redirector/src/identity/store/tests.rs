use std::{
    collections::VecDeque,
    sync::atomic::{AtomicUsize, Ordering},
};

use futures_util::stream::BoxStream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::*;
use crate::identity::{
    dev_ca,
    renew::Renewing,
    testing::{TestCa, id},
};

type Answer = Result<Svid, Error>;

/// A source whose answers the test sends; each stream ends when its sender does.
#[derive(Default)]
struct Scripted {
    streams: Mutex<VecDeque<mpsc::Receiver<Answer>>>,
    asked: AtomicUsize,
}

impl Scripted {
    fn stream(&self) -> mpsc::Sender<Answer> {
        let (sender, receiver) = mpsc::channel(4);
        self.streams.lock().unwrap().push_back(receiver);
        sender
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }
}

impl CertSource for Scripted {
    fn svids(&self, _: &SpiffeId) -> BoxStream<'static, Answer> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        match self.streams.lock().unwrap().pop_front() {
            Some(receiver) => ReceiverStream::new(receiver).boxed(),
            None => futures_util::stream::pending().boxed(),
        }
    }
}

fn failure(text: &str) -> Answer {
    Err(Error::new("asking the CA", text.to_owned()))
}

/// A store, its source, and the hands of its clock.
struct World {
    store: Arc<Store>,
    source: Arc<Scripted>,
    later: Arc<Mutex<Duration>>,
    ca: TestCa,
}

impl World {
    fn new() -> Self {
        let source = Arc::new(Scripted::default());
        let later = Arc::new(Mutex::new(Duration::ZERO));
        let clock = {
            let later = Arc::clone(&later);
            Arc::new(move || SystemTime::now() + *later.lock().unwrap())
        };
        let store = Store::with_clock(
            Arc::clone(&source) as Arc<dyn CertSource>,
            PeerRules::default(),
            clock,
        );
        Self {
            store,
            source,
            later,
            ca: TestCa::new(),
        }
    }

    /// A certificate of one hour.
    fn svid(&self, name: &str) -> Svid {
        self.ca.svid(&id(name))
    }

    fn advance(&self, by: Duration) {
        *self.later.lock().unwrap() += by;
    }
}

/// Waits until the keeper has taken everything sent.
async fn taken(held: &Held) {
    let mut state = held.entry.state.clone();
    state.mark_unchanged();
    tokio::time::timeout(Duration::from_secs(300), state.changed())
        .await
        .unwrap()
        .unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_connection_waits_for_the_first_certificate() {
    let world = World::new();
    let answers = world.source.stream();
    let held = world.store.hold(&id("web"));
    assert_eq!(*held.id(), id("web"));
    let send = async {
        tokio::time::sleep(Duration::from_secs(4)).await;
        answers.send(failure("busy")).await.unwrap();
        answers.send(Ok(world.svid("web"))).await.unwrap();
    };
    let (config, ()) = tokio::join!(held.server_config(), send);
    config.unwrap();
    held.client_config(&[id("cart")]).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn the_wait_ends_and_tells_the_source_s_failure() {
    let world = World::new();
    let answers = world.source.stream();
    let held = world.store.hold(&id("web"));
    let start = tokio::time::Instant::now();
    let error = held.server_config().await.unwrap_err().to_string();
    assert_eq!(start.elapsed(), FIRST_CERTIFICATE_DEADLINE);
    assert!(
        error.contains("first certificate of spiffe://cluster.local/ns/shop/sa/web"),
        "{error}"
    );
    assert!(error.contains("did not answer"), "{error}");

    answers.send(failure("token expired")).await.unwrap();
    let error = held.client_config(&[id("cart")]).await.unwrap_err().to_string();
    assert!(error.contains("token expired"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_new_certificate_is_used_by_the_next_connection() {
    let world = World::new();
    let answers = world.source.stream();
    let held = world.store.hold(&id("web"));
    answers.send(Ok(world.svid("web"))).await.unwrap();
    let first = held.server_config().await.unwrap();
    assert!(
        Arc::ptr_eq(&first, &held.server_config().await.unwrap()),
        "made once for each certificate"
    );
    answers.send(Ok(world.svid("web"))).await.unwrap();
    taken(&held).await;
    assert!(!Arc::ptr_eq(&first, &held.server_config().await.unwrap()));
}

#[tokio::test(start_paused = true)]
async fn a_bad_answer_never_replaces_a_good_certificate() {
    let world = World::new();
    let answers = world.source.stream();
    let held = world.store.hold(&id("web"));
    answers.send(Ok(world.svid("web"))).await.unwrap();
    let first = held.server_config().await.unwrap();

    let mut mislabelled = world.svid("cart");
    mislabelled.id = id("web");
    let mut expired = world.svid("web");
    expired.not_after = SystemTime::now();
    let mut other_key = world.svid("web");
    other_key.key = world.svid("web").key;
    let mut rootless = world.svid("web");
    rootless.roots.clear();
    let bad = [
        failure("down"),
        Ok(world.svid("cart")),
        Ok(mislabelled),
        Ok(expired),
        Ok(other_key),
        Ok(rootless),
    ];
    for answer in bad {
        answers.send(answer).await.unwrap();
        taken(&held).await;
        assert!(held.entry.state.borrow().failure.is_some());
        assert!(Arc::ptr_eq(&first, &held.server_config().await.unwrap()));
    }
    answers.send(Ok(world.svid("web"))).await.unwrap();
    taken(&held).await;
    assert!(held.entry.state.borrow().failure.is_none());
    assert!(!Arc::ptr_eq(&first, &held.server_config().await.unwrap()));
}

#[tokio::test(start_paused = true)]
async fn an_old_certificate_serves_to_its_end_and_not_longer() {
    let world = World::new();
    let answers = world.source.stream();
    let held = world.store.hold(&id("web"));
    assert!(held.current().is_none());
    answers.send(Ok(world.svid("web"))).await.unwrap();
    held.server_config().await.unwrap();
    answers.send(failure("CA is down")).await.unwrap();
    taken(&held).await;
    world.advance(Duration::from_secs(3590));
    assert!(held.current().is_some());
    held.server_config().await.unwrap();
    world.advance(Duration::from_secs(20));
    for error in [
        held.server_config().await.unwrap_err(),
        held.client_config(&[id("cart")]).await.unwrap_err(),
    ] {
        let error = error.to_string();
        assert!(
            error.contains("has expired") && error.contains("CA is down"),
            "{error}"
        );
    }
    assert!(held.current().is_none());
}

#[tokio::test(start_paused = true)]
async fn the_end_of_a_stream_is_survived() {
    let world = World::new();
    let [first, second] = [world.source.stream(), world.source.stream()];
    let held = world.store.hold(&id("web"));
    first.send(Ok(world.svid("web"))).await.unwrap();
    let config = held.server_config().await.unwrap();
    drop(first);
    assert!(Arc::ptr_eq(&config, &held.server_config().await.unwrap()));
    second.send(Ok(world.svid("web"))).await.unwrap();
    taken(&held).await;
    assert_eq!(world.source.asked(), 2);
    assert!(!Arc::ptr_eq(&config, &held.server_config().await.unwrap()));
}

#[tokio::test(start_paused = true)]
async fn a_source_that_ends_at_once_is_not_asked_in_a_loop() {
    let world = World::new();
    for _ in 0..100 {
        drop(world.source.stream());
    }
    let held = world.store.hold(&id("web"));
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert!(
        (10..20).contains(&world.source.asked()),
        "{}",
        world.source.asked()
    );
    drop(held);
}

#[tokio::test(start_paused = true)]
async fn guards_of_one_identity_share_one_certificate_and_the_last_one_ends_it() {
    let world = World::new();
    let answers = world.source.stream();
    let guards = [world.store.hold(&id("web")), world.store.hold(&id("web"))];
    answers.send(Ok(world.svid("web"))).await.unwrap();
    let configs = [
        guards[0].server_config().await.unwrap(),
        guards[1].server_config().await.unwrap(),
    ];
    assert!(Arc::ptr_eq(&configs[0], &configs[1]));
    assert_eq!(world.source.asked(), 1);

    let [one, two] = guards;
    drop(one);
    two.server_config().await.unwrap();
    drop(two);
    assert!(world.store.entries().is_empty());
    // The task has ended, and its stream with it.
    tokio::time::timeout(Duration::from_secs(300), answers.closed())
        .await
        .unwrap();

    let _again = world.store.hold(&id("web"));
    let _other = world.store.hold(&id("cart"));
    assert_eq!(world.store.entries().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn the_development_ca_s_certificates_are_rotated_through_the_store() {
    let dir = tempfile::tempdir().unwrap();
    let config = dev_ca::Config {
        lifetime: Duration::from_secs(1000),
    };
    let ca = dev_ca::DevCa::load_or_create(dir.path(), config).unwrap();
    let held = Store::new(Arc::new(Renewing::new(ca)), PeerRules::default()).hold(&id("web"));
    let mut before = held.server_config().await.unwrap();
    for _ in 0..3 {
        // Longer than a certificate is ever kept when all goes well.
        tokio::time::sleep(Duration::from_secs(610)).await;
        let after = held.server_config().await.unwrap();
        assert!(!Arc::ptr_eq(&before, &after));
        before = after;
    }
}

#[tokio::test(start_paused = true)]
async fn states_say_what_there_is_and_why_there_is_nothing_newer() {
    let world = World::new();
    let answers = world.source.stream();
    let _held = world.store.hold(&id("web"));
    let state = || {
        let states = world.store.states();
        assert_eq!(states.len(), 1);
        let one = &states[0];
        assert_eq!(one.identity, id("web").to_string());
        (
            one.state.clone(),
            one.cert_chain.len(),
            one.root_certs.len(),
            one.renewal_error.clone(),
        )
    };
    let settled = || tokio::time::sleep(Duration::from_millis(1));
    assert_eq!(state(), ("Initializing".into(), 0, 0, None));
    answers.send(failure("connection refused")).await.unwrap();
    settled().await;
    assert_eq!(
        state(),
        (
            "Unavailable: asking the CA: connection refused".into(),
            0,
            0,
            None
        )
    );
    answers.send(Ok(world.ca.svid(&id("web")))).await.unwrap();
    settled().await;
    assert_eq!(state(), ("Available".into(), 1, 1, None));
    answers.send(failure("down")).await.unwrap();
    settled().await;
    assert_eq!(
        state(),
        ("Available".into(), 1, 1, Some("asking the CA: down".into()))
    );
    *world.later.lock().unwrap() = Duration::from_secs(4000);
    assert_eq!(state(), ("Unavailable: asking the CA: down".into(), 0, 0, None));
}

#[tokio::test(start_paused = true)]
async fn a_certificate_that_begins_later_replaces_a_good_one_when_its_time_has_come() {
    let world = World::new();
    let answers = world.source.stream();
    let held = world.store.hold(&id("web"));
    let ahead = Duration::from_secs(120);
    let later = || {
        let mut svid = world.ca.svid(&id("web"));
        svid.not_before = SystemTime::now() + ahead;
        svid.not_after = SystemTime::now() + 2 * ahead;
        svid
    };
    // The first one is taken as it is: there is nothing better.
    answers.send(Ok(later())).await.unwrap();
    let first = held.server_config().await.unwrap();
    answers.send(Ok(world.ca.svid(&id("web")))).await.unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let good = held.server_config().await.unwrap();
    assert!(!Arc::ptr_eq(&first, &good));
    answers.send(Ok(later())).await.unwrap();
    tokio::time::sleep(ahead - Duration::from_secs(10)).await;
    assert!(Arc::ptr_eq(&good, &held.server_config().await.unwrap()));
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert!(!Arc::ptr_eq(&good, &held.server_config().await.unwrap()));
}

#[tokio::test(start_paused = true)]
async fn the_time_that_is_left_is_a_metric_for_as_long_as_the_identity_is_held() {
    let world = World::new();
    let (answers, _silent) = (world.source.stream(), world.source.stream());
    let mut registry = prometheus_client::registry::Registry::default();
    crate::identity::metrics::register(&mut registry, Arc::clone(&world.store));
    let value = |name: &str, identity: &str| {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let start = format!("redirector_certificate_{name}{{identity=\"{}\"}} ", id(identity));
        let line = text.lines().find_map(|line| line.strip_prefix(&start))?;
        Some(line.parse::<i64>().unwrap())
    };
    let web = world.store.hold(&id("web"));
    answers.send(Ok(world.svid("web"))).await.unwrap();
    web.server_config().await.unwrap();
    let _cart = world.store.hold(&id("cart"));
    let left = value("expires_in_seconds", "web").unwrap();
    assert!((3500..=3600).contains(&left), "{left}");
    assert_eq!(value("valid", "web"), Some(1));
    assert_eq!(
        (value("valid", "cart"), value("expires_in_seconds", "cart")),
        (Some(0), None)
    );
    world.advance(Duration::from_secs(3700));
    assert_eq!(value("valid", "web"), Some(0));
    assert!(value("expires_in_seconds", "web").unwrap() < 0);
    drop(web);
    assert_eq!(value("valid", "web"), None);
}
