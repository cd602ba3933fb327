use std::{
    collections::VecDeque,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use super::*;
use crate::identity::testing::{TestCa, id};

/// An issuer that takes its time and fails as it is told.
struct Scripted {
    ca: TestCa,
    takes: Duration,
    /// Identities that it never answers: those whose text has this in it.
    silent_for: &'static str,
    /// How it spoils what it makes.
    spoils: fn(&mut Svid),
    lifetime: Duration,
    /// Whether it fails, at each request; then for ever as the last one.
    fails: Mutex<VecDeque<bool>>,
    asked: AtomicUsize,
    open: AtomicUsize,
    most: AtomicUsize,
}

impl Scripted {
    fn new(fails: &[bool]) -> Self {
        Self {
            ca: TestCa::new(),
            takes: Duration::from_millis(100),
            silent_for: "nobody",
            spoils: |_| {},
            lifetime: Duration::from_secs(3600),
            fails: Mutex::new(fails.iter().copied().collect()),
            asked: AtomicUsize::new(0),
            open: AtomicUsize::new(0),
            most: AtomicUsize::new(0),
        }
    }
}

impl Issuer for Arc<Scripted> {
    async fn issue(&self, id: &SpiffeId) -> Result<Svid, Error> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let open = self.open.fetch_add(1, Ordering::Relaxed) + 1;
        self.most.fetch_max(open, Ordering::Relaxed);
        if id.to_string().contains(self.silent_for) {
            std::future::pending::<()>().await;
        }
        tokio::time::sleep(self.takes).await;
        self.open.fetch_sub(1, Ordering::Relaxed);
        let fails = {
            let mut fails = self.fails.lock().unwrap();
            match fails.len() {
                0 => false,
                1 => fails[0],
                _ => fails.pop_front().unwrap(),
            }
        };
        if fails {
            return Err(Error::new("asking", "it does not want to"));
        }
        let mut svid = self.ca.svid(id);
        svid.not_after = SystemTime::now() + self.lifetime;
        (self.spoils)(&mut svid);
        Ok(svid)
    }
}

fn renewing(scripted: Scripted) -> (Arc<Scripted>, Renewing<Arc<Scripted>>) {
    let scripted = Arc::new(scripted);
    (scripted.clone(), Renewing::new(scripted))
}

#[tokio::test(start_paused = true)]
async fn a_certificate_is_renewed_about_half_way() {
    let (_, source) = renewing(Scripted::new(&[]));
    let mut svids = source.svids(&id("web"));
    svids.next().await.unwrap().unwrap();
    for _ in 0..10 {
        let start = Instant::now();
        svids.next().await.unwrap().unwrap();
        let waited = start.elapsed().as_secs_f64();
        assert!((1439.0..2161.0).contains(&waited), "{waited}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_first_failure_is_told_at_once_and_without_a_certificate_the_next_try_is_near() {
    let (_, source) = renewing(Scripted::new(&[true]));
    let mut svids = source.svids(&id("web"));
    let start = Instant::now();
    assert!(svids.next().await.unwrap().is_err());
    assert!(start.elapsed() < Duration::from_secs(1));
    let mut waits = Vec::new();
    for _ in 0..8 {
        let start = Instant::now();
        assert!(svids.next().await.unwrap().is_err());
        waits.push(start.elapsed().as_secs_f64());
    }
    assert!((0.4..0.8).contains(&waits[0]), "{waits:?}");
    assert!((0.9..1.4).contains(&waits[1]), "{waits:?}");
    assert!(
        waits[5..].iter().all(|wait| (4.0..6.2).contains(wait)),
        "{waits:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn with_a_certificate_tries_become_rare_but_go_on() {
    let (_, source) = renewing(Scripted::new(&[false, true]));
    let mut svids = source.svids(&id("web"));
    svids.next().await.unwrap().unwrap();
    let mut last = 0.0;
    for _ in 0..12 {
        let start = Instant::now();
        assert!(svids.next().await.unwrap().is_err());
        last = start.elapsed().as_secs_f64();
    }
    assert!((119.0..181.0).contains(&last), "{last}");
}

#[tokio::test(start_paused = true)]
async fn no_more_than_eight_are_asked_for_at_once() {
    let (scripted, source) = renewing(Scripted::new(&[]));
    let all = (0..500).map(|number| {
        let mut svids = source.svids(&id(&format!("w{number}")));
        async move { svids.next().await.unwrap().unwrap().id }
    });
    let ids = futures_util::future::join_all(all).await;
    assert_eq!(ids.len(), 500);
    assert_eq!(scripted.most.load(Ordering::Relaxed), REQUESTS.0);
    assert_eq!(scripted.asked.load(Ordering::Relaxed), 500);
}

#[tokio::test(start_paused = true)]
async fn an_answer_to_one_wakes_all_others() {
    // With a certificate each, and failing for a long time.
    let (scripted, source) = renewing(Scripted::new(&[false, false, true]));
    let mut streams = [source.svids(&id("a")), source.svids(&id("b"))];
    for svids in &mut streams {
        svids.next().await.unwrap().unwrap();
    }
    for _ in 0..12 {
        for svids in &mut streams {
            assert!(svids.next().await.unwrap().is_err());
        }
    }
    // Both wait for more than a minute now, and by turns: what one finds out helps the other.
    *scripted.fails.lock().unwrap() = VecDeque::from([false]);
    let [mut a, mut b] = streams;
    let start = Instant::now();
    let (first, second) = tokio::join!(
        async {
            a.next().await.unwrap().unwrap();
            start.elapsed()
        },
        async {
            b.next().await.unwrap().unwrap();
            start.elapsed()
        },
    );
    assert!(
        first.abs_diff(second) < Duration::from_secs(2),
        "{first:?} {second:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_request_without_an_answer_ends_and_holds_up_nobody_for_ever() {
    let mut scripted = Scripted::new(&[]);
    scripted.takes = Duration::from_secs(24 * 3600);
    let (_, source) = renewing(scripted);
    let all = (0..2 * REQUESTS.0).map(|number| {
        let mut svids = source.svids(&id(&format!("w{number}")));
        async move { svids.next().await.unwrap().unwrap_err().to_string() }
    });
    let start = Instant::now();
    for error in futures_util::future::join_all(all).await {
        assert!(error.contains("no answer within 30s"), "{error}");
    }
    assert!(start.elapsed() < Duration::from_secs(61));
}

#[tokio::test(start_paused = true)]
async fn those_that_are_never_answered_do_not_keep_out_who_comes_new() {
    let mut scripted = Scripted::new(&[]);
    scripted.silent_for = "silent";
    let (_, source) = renewing(scripted);
    let hung = (0..40).map(|number| {
        let mut svids = source.svids(&id(&format!("silent{number}")));
        tokio::spawn(async move { while svids.next().await.is_some_and(|svid| svid.is_err()) {} })
    });
    let hung: Vec<_> = hung.collect();
    // By then all have asked once; from then on some of them are always asking again.
    tokio::time::sleep(Duration::from_secs(400)).await;
    for number in 0..20 {
        let start = Instant::now();
        let mut svids = source.svids(&id(&format!("new{number}")));
        svids.next().await.unwrap().unwrap();
        assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
        tokio::time::sleep(Duration::from_secs(7)).await;
    }
    for task in hung {
        assert!(!task.is_finished());
        task.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_used_is_asked_for_again_soon_whatever_its_times_say() {
    type Spoils = fn(&mut Svid);
    let cases: [(Spoils, &str); 4] = [
        (
            |svid| svid.key = TestCa::new().svid(&svid.id).key,
            "cannot be used",
        ),
        (
            |svid| svid.chain = TestCa::new().svid(&id("other")).chain,
            "cannot be used",
        ),
        (
            |svid| svid.roots = vec![TestCa::new().certificate()],
            "UnknownIssuer",
        ),
        (
            |svid| svid.not_after = SystemTime::now() - Duration::from_secs(1),
            "a clock is wrong",
        ),
    ];
    for (spoils, told) in cases {
        let mut scripted = Scripted::new(&[]);
        scripted.spoils = spoils;
        let (_, source) = renewing(scripted);
        let mut svids = source.svids(&id("web"));
        let start = Instant::now();
        for _ in 0..5 {
            let error = svids.next().await.unwrap().unwrap_err();
            let error = crate::telemetry::Chain(&error).to_string();
            assert!(error.contains(told), "{told:?} is not in {error:?}");
        }
        assert!(start.elapsed() < Duration::from_secs(15), "{:?}", start.elapsed());
        assert!(start.elapsed() > Duration::from_secs(5), "{:?}", start.elapsed());
    }
}
