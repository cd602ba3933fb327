use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd, BorrowedFd},
    path::PathBuf,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{sync::oneshot, task::JoinHandle};

use super::{
    super::{
        NetnsRef,
        launch::NewPod,
        pause::{Pauser, pauses},
        records::Record,
    },
    *,
};
use crate::{
    mesh::pod::PodInfo,
    redirect::{self, Attached, Count, Listeners, Marks, PodNetwork, Serving, rules::Rules},
    sys::{interfaces::InterfaceAddress, netns::Netns},
};

mod looks;
mod owners;
mod retries;
mod stopping;

const NODE: u64 = 1;

/// What was done to whom, and what is to go wrong.
#[derive(Default)]
struct World {
    log: Mutex<Vec<String>>,
    attached: Mutex<BTreeSet<PodUid>>,
    /// `step uid` that fail, and `step uid!` that panic.
    faults: Mutex<BTreeSet<String>>,
    /// The `start` of this pod waits for a message.
    gate: Mutex<Option<(String, std::sync::mpsc::Receiver<()>)>>,
    /// The ports that no pod may be told to leave alone.
    refused: Mutex<Option<&'static str>>,
    /// The ports that are left alone in each pod.
    excluded: Mutex<BTreeMap<PodUid, String>>,
    strict: Mutex<BTreeMap<PodUid, bool>>,
    /// What every pod lacks.
    lacks: Mutex<Option<&'static str>>,
    /// Pods that are being attached to, and the most that there were at one time.
    attaching: Mutex<(usize, usize)>,
}

impl World {
    fn step(&self, step: &str, uid: &PodUid) -> Result<(), redirect::Error> {
        self.log.lock().unwrap().push(format!("{step} {uid}"));
        let faults = self.faults.lock().unwrap().clone();
        assert!(
            !faults.contains(&format!("{step} {uid}!")),
            "a fault that the test wants"
        );
        match faults.contains(&format!("{step} {uid}")) {
            true => Err(redirect::Error {
                operation: format!("{step} {uid}"),
                source: "no".into(),
            }),
            false => Ok(()),
        }
    }

    fn fault(&self, fault: &str) {
        self.faults.lock().unwrap().insert(fault.to_owned());
    }

    fn mend(&self) {
        self.faults.lock().unwrap().clear();
    }

    fn log(&self) -> Vec<String> {
        std::mem::take(&mut *self.log.lock().unwrap())
    }
}

impl Redirector for World {
    fn name(&self) -> &'static str {
        "test"
    }

    fn marks(&self) -> Marks {
        unreachable!()
    }

    fn refuses(&self, _: &Rules) -> Option<String> {
        unreachable!()
    }

    fn attach(&self, pod: &PodNetwork, _: Serving<'_>) -> Result<Attached, redirect::Error> {
        {
            let (now, most) = &mut *self.attaching.lock().unwrap();
            *now += 1;
            *most = (*most).max(*now);
        }
        std::thread::yield_now();
        let attached = self.step("attach", &pod.uid);
        self.attaching.lock().unwrap().0 -= 1;
        attached?;
        let ports = pod.rules.outbound.not_ports.to_string();
        if self
            .refused
            .lock()
            .unwrap()
            .is_some_and(|refused| refused == ports)
        {
            return Err(redirect::Error::new(format!("leaving {ports} alone"), "never"));
        }
        self.excluded.lock().unwrap().insert(pod.uid.clone(), ports);
        self.attached.lock().unwrap().insert(pod.uid.clone());
        Ok(Attached {
            lacks: self.lacks.lock().unwrap().map(str::to_owned),
        })
    }

    fn release(&self, pod: &PodNetwork) -> Result<(), redirect::Error> {
        self.step("release", &pod.uid)
    }

    fn is_rerouted(&self, _: BorrowedFd<'_>) -> io::Result<bool> {
        Ok(false)
    }

    fn counts(&self, _: &PodUid) -> Result<Vec<Count>, redirect::Error> {
        unreachable!()
    }

    fn detach(&self, pod: &PodNetwork) -> Result<(), Vec<redirect::Error>> {
        self.attached.lock().unwrap().remove(&pod.uid);
        self.step("detach", &pod.uid).map_err(|error| vec![error])
    }

    fn forget(&self, uid: &PodUid) -> Result<(), Vec<redirect::Error>> {
        self.attached.lock().unwrap().remove(uid);
        self.step("forget", uid).map_err(|error| vec![error])
    }

    fn rename(&self, from: &PodUid, to: &PodUid) -> Result<(), redirect::Error> {
        self.step("rename", from)?;
        let mut attached = self.attached.lock().unwrap();
        if attached.remove(from) {
            attached.insert(to.clone());
        }
        Ok(())
    }

    fn attached(&self) -> Result<Vec<PodUid>, redirect::Error> {
        Ok(self.attached.lock().unwrap().iter().cloned().collect())
    }

    fn original_dst(&self, _: BorrowedFd<'_>) -> io::Result<SocketAddr> {
        unreachable!()
    }

    fn reread(&self) -> Result<(), redirect::Error> {
        self.step("reread", &"all".parse().unwrap())
    }

    fn own_socket(&self, _: BorrowedFd<'_>) -> io::Result<()> {
        unreachable!()
    }
}

struct Surroundings(Arc<World>);

struct Proxy {
    uid: PodUid,
    socket: std::fs::File,
}

impl Launch for Surroundings {
    type Proxy = Proxy;

    fn addresses(&self, netns: &Netns) -> io::Result<Vec<InterfaceAddress>> {
        let address = address_of(netns.id().ino);
        Ok(vec![InterfaceAddress {
            interface: "eth0".into(),
            address,
            loopback: false,
        }])
    }

    fn start(&self, pod: NewPod) -> Result<Proxy, Error> {
        let uid = pod.info.uid;
        self.0.step("start", &uid).map_err(Error::Attach)?;
        self.0.strict.lock().unwrap().insert(uid.clone(), pod.strict);
        let gate = self
            .0
            .gate
            .lock()
            .unwrap()
            .take_if(|(gated, _)| *gated == uid.as_str());
        if let Some((_, gate)) = gate {
            let _ = gate.recv_timeout(Duration::from_secs(10));
        }
        Ok(Proxy {
            uid,
            socket: std::fs::File::open("/dev/null").unwrap(),
        })
    }

    fn serving<'a>(&self, proxy: &'a Proxy) -> Serving<'a> {
        let socket = proxy.socket.as_fd();
        Serving::Own(Listeners {
            outbound: socket,
            inbound: socket,
            hbone: socket,
            inherited: false,
        })
    }

    fn set_strict(&self, proxy: &Proxy, strict: bool) {
        self.0.strict.lock().unwrap().insert(proxy.uid.clone(), strict);
    }

    async fn stop(&self, proxy: Proxy, grace: Duration) {
        let _ = self.0.step(&format!("stop {}s", grace.as_secs()), &proxy.uid);
    }
}

fn address_of(ino: u64) -> IpAddr {
    IpAddr::from([10, 0, 0, ino as u8])
}

struct Agent {
    world: Arc<World>,
    records: Records,
    events: mpsc::Sender<PodEvent>,
    rules: watch::Sender<Arc<NodeRules>>,
    status: watch::Receiver<Status>,
    look: Arc<Notify>,
    stop: CancellationToken,
    task: JoinHandle<()>,
    pauser: Pauser<io::Result<Vec<Served>>>,
    state: tempfile::TempDir,
}

type Answer = oneshot::Receiver<Result<(), Error>>;

impl Agent {
    /// An agent that has not seen a snapshot.
    fn fresh(release_on_exit: bool) -> Self {
        Self::begin(release_on_exit, Duration::from_secs(3600))
    }

    fn begin(release_on_exit: bool, check_interval: Duration) -> Self {
        let state = tempfile::tempdir().unwrap();
        let records = Records::open(state.path()).unwrap();
        let world = Arc::new(World::default());
        let (rules, followed) = watch::channel(Arc::default());
        let look = Arc::new(Notify::new());
        let config = Config {
            node: vec![NetnsId { dev: 0, ino: NODE }],
            release_grace: Duration::ZERO,
            shutdown_grace: Duration::from_secs(5),
            check_interval,
            look: Arc::clone(&look),
            strict: false,
            rules: followed,
            release_on_exit: Arc::new(release_on_exit.into()),
        };
        let launch = Surroundings(Arc::clone(&world));
        let redirector = Arc::clone(&world) as Arc<dyn Redirector>;
        let (lifecycle, status) =
            Lifecycle::new(launch, redirector, records.clone(), config, Metrics::default());
        let (events, receiver) = mpsc::channel(8);
        let stop = CancellationToken::new();
        let (pauser, pauses) = pauses();
        let task = tokio::spawn(lifecycle.run(receiver, pauses, stop.clone()));
        Self {
            world,
            records,
            events,
            rules,
            status,
            look,
            stop,
            task,
            pauser,
            state,
        }
    }

    /// One that has, and had nothing to restore.
    async fn synced() -> Self {
        let agent = Self::fresh(false);
        agent.snapshot_sent().await.unwrap();
        agent
    }

    async fn ask(&self, event: impl FnOnce(Reply) -> PodEvent) -> Result<(), Error> {
        let answer = self.send(event).await;
        tokio::time::timeout(Duration::from_secs(30), answer)
            .await
            .unwrap()
            .unwrap()
    }

    async fn send(&self, event: impl FnOnce(Reply) -> PodEvent) -> Answer {
        let (reply, answer) = oneshot::channel();
        self.events.send(event(reply)).await.unwrap();
        answer
    }

    /// A pod `a` whose add is being carried out until the first of these is told, and whose delete waits; and their answers.
    async fn busy(&self) -> (std::sync::mpsc::Sender<()>, Answer, Answer) {
        let (open, gate) = std::sync::mpsc::channel();
        *self.world.gate.lock().unwrap() = Some(("a".into(), gate));
        let first = self.send(|reply| PodEvent::Add(pod("a", 2), reply)).await;
        let delete = PodDelete {
            uid: "a".parse().unwrap(),
            netns: None,
        };
        let second = self.send(|reply| PodEvent::Delete(delete, reply)).await;
        (open, first, second)
    }

    async fn add(&self, add: PodAdd) -> Result<(), Error> {
        self.ask(|reply| PodEvent::Add(add, reply)).await
    }

    async fn keep(&self, uid: &str) -> Result<(), Error> {
        self.ask(|reply| PodEvent::Keep(uid.parse().unwrap(), reply))
            .await
    }

    async fn delete(&self, uid: &str, netns: Option<NetnsRef>) -> Result<(), Error> {
        self.ask(|reply| {
            PodEvent::Delete(
                PodDelete {
                    uid: uid.parse().unwrap(),
                    netns,
                },
                reply,
            )
        })
        .await
    }

    async fn snapshot_sent(&self) -> Result<(), Error> {
        self.ask(PodEvent::SnapshotSent).await
    }

    /// Waits until the pods are these, as `uid state`.
    async fn until(&mut self, expected: &[&str]) {
        let describe = |status: &Status| -> Vec<String> {
            status
                .pods
                .iter()
                .map(|pod| format!("{} {:?}", pod.uid, pod.state))
                .collect()
        };
        let reached = self.status.wait_for(|status| describe(status) == expected);
        if tokio::time::timeout(Duration::from_secs(30), reached)
            .await
            .is_err()
        {
            panic!(
                "{:?} did not become {expected:?}",
                describe(&self.status.borrow())
            );
        }
    }

    /// Waits until these pods are attached, and no others.
    async fn left_attached(&self, expected: &[&str]) {
        let left = || {
            self.world
                .attached
                .lock()
                .unwrap()
                .iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>()
        };
        let reached = async {
            while left() != expected {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        if tokio::time::timeout(Duration::from_secs(30), reached)
            .await
            .is_err()
        {
            panic!("{:?} did not become {expected:?}", left());
        }
    }

    async fn stop(self) -> (Arc<World>, Records, tempfile::TempDir) {
        self.stop.cancel();
        self.task.await.unwrap();
        (self.world, self.records, self.state)
    }
}

fn pod(uid: &str, ino: u64) -> PodAdd {
    PodAdd {
        info: PodInfo {
            uid: uid.parse().unwrap(),
            name: uid.to_owned(),
            namespace: "shop".into(),
            service_account: "sa".into(),
        },
        netns: Arc::new(Netns::stand_in(ino)),
        netns_path: None,
        addresses: vec![address_of(ino)],
        rules: None,
        on_failure: OnFailure::Report,
    }
}

fn retried(add: PodAdd) -> PodAdd {
    PodAdd {
        on_failure: OnFailure::Retry,
        ..add
    }
}

fn uids(records: &Records) -> Vec<String> {
    let uids = records.uids().unwrap();
    uids.iter().map(ToString::to_string).collect()
}

#[tokio::test]
async fn a_pod_is_captured_and_released_in_order() {
    let mut agent = Agent::synced().await;
    agent.add(pod("a", 2)).await.unwrap();
    agent.until(&["a Captured"]).await;
    assert_eq!(uids(&agent.records), ["a"]);
    agent.add(pod("a", 2)).await.unwrap();
    assert_eq!(
        agent.world.log(),
        ["start a", "attach a"],
        "the second add does nothing"
    );
    agent.delete("a", None).await.unwrap();
    agent.until(&[]).await;
    assert_eq!(agent.world.log(), ["release a", "stop 0s a", "detach a"]);
    assert!(uids(&agent.records).is_empty());
}

#[tokio::test]
async fn a_step_that_fails_is_undone_and_reported() {
    let table: [(&str, &str, &[&str]); 4] = [
        ("start a", "start a: no", &["start a"]),
        ("start a!", "panicked", &["start a"]),
        (
            "attach a",
            "attach a: no",
            &["start a", "attach a", "detach a", "stop 0s a"],
        ),
        (
            "attach a!",
            "panicked",
            &["start a", "attach a", "detach a", "stop 0s a"],
        ),
    ];
    for (fault, text, log) in table {
        let mut agent = Agent::synced().await;
        agent.world.fault(fault);
        let error = agent.add(pod("a", 2)).await.unwrap_err();
        assert!(
            Chain(&error).to_string().contains(text),
            "{fault}: {}",
            Chain(&error)
        );
        assert_eq!(agent.world.log(), log, "{fault}");
        agent.until(&[]).await;
        assert!(uids(&agent.records).is_empty(), "{fault}");
        agent.world.mend();
        agent.add(pod("a", 2)).await.unwrap();
        agent.until(&["a Captured"]).await;
    }
}

#[tokio::test]
async fn a_pod_that_was_captured_before_stays_so_when_its_adoption_fails() {
    let agent = Agent::synced().await;
    agent.world.attached.lock().unwrap().insert("a".parse().unwrap());
    agent.world.fault("attach a");
    agent.add(pod("a", 2)).await.unwrap_err();
    assert_eq!(
        agent.world.log(),
        ["start a", "attach a", "stop 0s a"],
        "no detach"
    );
}

#[tokio::test]
async fn namespaces_that_are_not_this_pods_are_refused() {
    let mut agent = Agent::synced().await;
    agent.add(pod("a", 2)).await.unwrap();
    let elsewhere = PodAdd {
        addresses: vec![address_of(9)],
        ..pod("b", 3)
    };
    let gone = PodAdd {
        netns_path: Some("/nonexistent/netns".into()),
        ..pod("b", 3)
    };
    for (add, expected) in [
        (pod("b", 2), "net:[2] already belongs to the pod with UID a"),
        (pod("b", NODE), "net:[1] is the node's own network namespace"),
        (
            elsewhere,
            "address 10.0.0.9 is on no interface in net:[3], which has 10.0.0.3 on eth0",
        ),
        (gone, "/nonexistent/netns is no longer net:[3]"),
        // A bad event of a pod that is captured changes nothing for it.
        (
            PodAdd {
                addresses: vec![address_of(9)],
                ..pod("a", 2)
            },
            "address 10.0.0.9 is on no interface",
        ),
        (pod("a", NODE), "is the node's own network namespace"),
    ] {
        let text = agent.add(add).await.unwrap_err().to_string();
        assert!(text.contains(expected), "{text}");
    }
    agent.until(&["a Captured"]).await;
    assert_eq!(agent.world.log(), ["start a", "attach a"]);
}

#[tokio::test]
async fn a_new_namespace_or_identity_replaces_the_old_one() {
    let mut agent = Agent::synced().await;
    agent.add(pod("a", 2)).await.unwrap();
    agent.add(pod("a", 3)).await.unwrap();
    let replaced = [
        "start a",
        "attach a",
        "release a",
        "stop 0s a",
        "detach a",
        "start a",
        "attach a",
    ];
    assert_eq!(agent.world.log(), replaced);
    let mut other = pod("a", 3);
    other.info.service_account = "other".into();
    agent.add(other).await.unwrap();
    // The namespace stays captured: nothing leaves in plain in between.
    assert_eq!(agent.world.log(), ["stop 0s a", "start a", "attach a"]);
    agent.until(&["a Captured"]).await;
    assert_eq!(agent.status.borrow().pods[0].service_account, "other");
    // The namespace that was left is free again.
    agent.add(pod("b", 2)).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_event_that_does_not_tell_of_rules_changes_none() {
    let mut agent = Agent::synced().await;
    let without = |ports: &str| {
        let text = format!("{{excludeOutboundPorts: '{ports}'}}");
        Some(serde_yaml::from_str(&text).unwrap())
    };
    let excluded =
        |agent: &Agent, uid: &str| agent.world.excluded.lock().unwrap()[&uid.parse().unwrap()].clone();
    let with = |rules, add| PodAdd { rules, ..add };
    // Told, not told, told anew, not told, and told that there are none.
    for (rules, expected) in [
        (without("1"), "1"),
        (None, "1"),
        (without("2"), "2"),
        (None, "2"),
        (Some(Box::default()), ""),
        (None, ""),
    ] {
        agent.add(with(rules, pod("a", 2))).await.unwrap();
        assert_eq!(excluded(&agent, "a"), expected);
    }
    // From the record, if that is of the same namespace.
    for (uid, ino, recorded, expected) in [("b", 3, 3, "1"), ("c", 4, 5, "")] {
        let earlier = with(without("1"), pod(uid, recorded));
        agent.records.save(&Record::of(&earlier)).unwrap();
        agent.add(pod(uid, ino)).await.unwrap();
        assert_eq!(excluded(&agent, uid), expected);
    }
    // From what is still being tried.
    agent.world.fault("attach d");
    agent
        .add(with(without("1"), retried(pod("d", 6))))
        .await
        .unwrap_err();
    agent.add(pod("d", 6)).await.unwrap_err();
    agent.world.mend();
    agent
        .until(&["a Captured", "b Captured", "c Captured", "d Captured"])
        .await;
    assert_eq!(excluded(&agent, "d"), "1");
}

#[tokio::test]
async fn a_late_delete_leaves_the_new_owner_alone() {
    let mut agent = Agent::synced().await;
    let named = |path: &str, ino: Option<u64>| NetnsRef {
        path: PathBuf::from(path),
        id: ino.map(|ino| NetnsId { dev: 0, ino }),
    };
    let own = std::path::Path::new("/proc/thread-self/ns/net");
    let netns = Arc::new(Netns::open(own).unwrap());
    let ino = netns.id().ino;
    let add = PodAdd {
        netns: Arc::clone(&netns),
        netns_path: Some(own.into()),
        addresses: vec![],
        ..pod("a", 2)
    };
    agent.add(add.clone()).await.unwrap();
    for late in [
        named("/run/netns/old", None),
        named("/run/netns/old", Some(ino + 1)),
    ] {
        agent.delete("a", Some(late)).await.unwrap();
    }
    agent.until(&["a Captured"]).await;
    assert_eq!(agent.world.log(), ["start a", "attach a"]);
    let by_id = NetnsRef {
        path: "/var/run/netns/other-spelling".into(),
        id: Some(netns.id()),
    };
    for own in [
        Some(NetnsRef {
            path: own.into(),
            id: None,
        }),
        Some(by_id),
        None,
    ] {
        agent.delete("a", own).await.unwrap();
        agent.until(&[]).await;
        agent.add(add.clone()).await.unwrap();
    }
}

#[tokio::test]
async fn what_is_asked_of_a_busy_pod_waits_and_other_pods_do_not() {
    let mut agent = Agent::synced().await;
    let (open, first, second) = agent.busy().await;
    let third = agent.send(|reply| PodEvent::Add(pod("a", 3), reply)).await;
    agent.add(pod("b", 4)).await.unwrap();
    // The namespaces of what waits are taken.
    for ino in [2, 3] {
        assert!(matches!(
            agent.add(pod("c", ino)).await,
            Err(Error::Duplicate { .. })
        ));
    }
    agent.until(&["a Starting", "b Captured"]).await;
    open.send(()).unwrap();
    for answer in [first, second, third] {
        answer.await.unwrap().unwrap();
    }
    agent.until(&["a Captured", "b Captured"]).await;
    let of_a: Vec<_> = agent
        .world
        .log()
        .into_iter()
        .filter(|line| line.ends_with('a'))
        .collect();
    assert_eq!(
        of_a,
        [
            "start a",
            "attach a",
            "release a",
            "stop 0s a",
            "detach a",
            "start a",
            "attach a"
        ]
    );
}

#[tokio::test]
async fn a_snapshot_releases_what_it_does_not_name() {
    let mut agent = Agent::fresh(false);
    for uid in ["kept", "stray"] {
        agent.world.attached.lock().unwrap().insert(uid.parse().unwrap());
    }
    agent.add(pod("a", 2)).await.unwrap();
    agent.add(pod("b", 3)).await.unwrap();
    agent.add(pod("c", 4)).await.unwrap();
    agent.delete("c", None).await.unwrap();
    agent.keep("kept").await.unwrap();
    agent.until(&["a Captured", "b Captured", "c Captured"]).await;
    assert!(!agent.status.borrow().synced);
    agent.snapshot_sent().await.unwrap();
    agent.until(&["a Captured", "b Captured"]).await;
    assert!(agent.status.borrow().synced);
    agent.left_attached(&["a", "b", "kept"]).await;

    // Against the protocol.
    assert!(matches!(agent.snapshot_sent().await, Err(Error::Protocol(_))));
    assert!(matches!(agent.keep("x").await, Err(Error::Protocol(_))));

    // Another connection: nothing stops until its snapshot is whole.
    agent.events.send(PodEvent::Resync).await.unwrap();
    agent.add(pod("b", 3)).await.unwrap();
    agent.until(&["a Captured", "b Captured"]).await;
    agent.snapshot_sent().await.unwrap();
    agent.until(&["b Captured"]).await;
    agent.delete("unknown", None).await.unwrap();
}

#[tokio::test]
async fn a_release_that_fails_is_reported_and_goes_on() {
    let mut agent = Agent::synced().await;
    agent.add(pod("a", 2)).await.unwrap();
    agent.world.log();
    agent.world.fault("detach a");
    let error = agent.delete("a", None).await.unwrap_err();
    assert!(error.to_string().contains("detach a: no"), "{error}");
    agent.until(&[]).await;
    assert_eq!(agent.world.log(), ["release a", "stop 0s a", "detach a"]);
    assert!(uids(&agent.records).is_empty());
}

#[tokio::test]
async fn what_has_begun_is_finished_before_it_rests_and_events_wait() {
    let mut agent = Agent::synced().await;
    agent.add(pod("b", 3)).await.unwrap();
    let (open, first, second) = agent.busy().await;
    agent.until(&["a Starting", "b Captured"]).await;
    let rest = async {
        let (served, rest) = agent.pauser.rest().await.unwrap();
        let uids: Vec<_> = served.unwrap().iter().map(|pod| pod.uid.to_string()).collect();
        (uids, rest)
    };
    tokio::pin!(rest);
    let early = tokio::time::timeout(Duration::from_millis(50), rest.as_mut()).await;
    assert!(early.is_err(), "it rests while a pod is being captured");
    open.send(()).unwrap();
    let (uids, rest) = rest.await;
    assert!(uids.contains(&"b".to_owned()), "{uids:?}");
    first.await.unwrap().unwrap();
    let before = agent.world.log.lock().unwrap().clone();
    agent.look.notify_one();
    let mut third = agent.send(|reply| PodEvent::Add(pod("c", 4), reply)).await;
    tokio::time::timeout(Duration::from_millis(50), &mut third)
        .await
        .unwrap_err();
    assert_eq!(*agent.world.log.lock().unwrap(), before);
    drop(rest);
    second.await.unwrap().unwrap();
    third.await.unwrap().unwrap();
    // What it remembers is of before.
    assert_eq!(agent.world.log()[before.len()], "reread all");

    // Of one that has taken over nothing is read: the pods are its own.
    let (_, _rest) = agent.pauser.rest().await.unwrap();
    agent.stop.cancel();
    agent.task.await.unwrap();
    assert!(!agent.world.log().contains(&"reread all".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn nothing_is_done_to_a_pod_before_it_is_known_what_is_in_place() {
    let agent = Agent::synced().await;
    agent.add(pod("a", 2)).await.unwrap();
    let (_, rest) = agent.pauser.rest().await.unwrap();
    agent.world.log();
    agent.world.fault("reread all");
    drop(rest);
    let mut add = agent.send(|reply| PodEvent::Add(pod("b", 3), reply)).await;
    tokio::time::timeout(3 * RETRY_INTERVAL, &mut add)
        .await
        .unwrap_err();
    let log = agent.world.log();
    assert!(
        log.len() > 1 && log.iter().all(|step| step == "reread all"),
        "{log:?}"
    );
    agent.world.mend();
    add.await.unwrap().unwrap();
    let log = agent.world.log();
    let first = |step: &str| log.iter().position(|done| done == step).unwrap();
    assert!(
        first("reread all") < first("attach a").min(first("attach b")),
        "{log:?}"
    );
}

#[tokio::test]
async fn an_agent_that_is_stopped_while_it_rests_releases_what_is_in_place() {
    let agent = Agent::fresh(true);
    agent.add(pod("a", 2)).await.unwrap();
    let (_, _rest) = agent.pauser.rest().await.unwrap();
    agent.world.log();
    let (world, ..) = agent.stop().await;
    assert_eq!(world.log(), ["reread all", "release a", "stop 5s a", "detach a"]);
}
