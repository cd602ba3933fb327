use std::{fs, future::Future, os::unix::fs::PermissionsExt as _};

use tokio::{sync::Notify, task::JoinHandle, time::timeout};

use super::{connection::MAX_MESSAGE_BYTES, *};
use crate::{
    mesh::pod::{PodInfo, PodUid},
    sys::{
        netns::Netns,
        pidfd::Process,
        seqpacket::testing::{open_on, pair},
    },
};

const HELLO: &[u8] = b"\x08\x01";
const ACK: &[u8] = b"\x0a\x00";
const NACK: &[u8] = b"\x0a\x04\x0a\x02no";
const SNAPSHOT_SENT: &[u8] = b"\x1a\x00";

/// Bytes by the rules of protobuf, field numbers by zds.proto.
fn add(uid: &str) -> Vec<u8> {
    [
        b"\x0a\x14\x0a\x03",
        uid.as_bytes(),
        b"\x12\x0d\x0a\x03web\x12\x02ns\x1a\x02sa",
    ]
    .concat()
}

fn keep(uid: &str) -> Vec<u8> {
    [b"\x2a\x05\x0a\x03", uid.as_bytes()].concat()
}

fn del(uid: &str) -> Vec<u8> {
    [b"\x12\x05\x12\x03", uid.as_bytes()].concat()
}

fn info(uid: &str) -> PodInfo {
    PodInfo {
        uid: uid.parse().unwrap(),
        name: "web".into(),
        namespace: "ns".into(),
        service_account: "sa".into(),
    }
}

fn uid(text: &str) -> PodUid {
    text.parse().unwrap()
}

fn proxies() -> Arc<Proxies> {
    Arc::new(Proxies::new(Arc::new(Notify::new())))
}

/// Longer than any deadline. The clock is paused, so nothing waits in earnest.
async fn within<F: Future>(future: F) -> F::Output {
    timeout(Duration::from_secs(600), future).await.unwrap()
}

/// A proxy: the other end of a connection.
struct Client {
    socket: Seqpacket,
    task: JoinHandle<End>,
}

impl Client {
    fn connect(proxies: &Arc<Proxies>, number: u64) -> Self {
        let (ours, socket) = pair();
        let peer = Peer {
            process: Process::open(std::process::id()).unwrap(),
            cgroup: Some(number),
        };
        let registered = proxies.register(peer);
        let proxies = Arc::clone(proxies);
        let task = tokio::spawn(async move {
            let (id, close) = (registered.id, registered.close.clone());
            let end = tokio::select! {
                () = close.cancelled() => End::Replaced,
                end = connection::talk(&ours, registered, &proxies) => end,
            };
            proxies.unregister(id);
            end
        });
        Self { socket, task }
    }

    /// One that has said hello and acknowledged a snapshot of so many pods.
    async fn synced(proxies: &Arc<Proxies>, number: u64, pods: usize) -> Self {
        let before = proxies.synced_ever();
        let client = Self::connect(proxies, number);
        client.say(HELLO).await;
        for _ in 0..pods {
            client.receive().await;
            client.say(ACK).await;
        }
        client.expect(SNAPSHOT_SENT, ACK).await;
        known(proxies, before).await;
        client
    }

    async fn say(&self, bytes: &[u8]) {
        self.socket.send(bytes, &[]).await.unwrap();
    }

    /// The next message, and whether a namespace is with it.
    async fn receive(&self) -> (Vec<u8>, bool) {
        let message = within(self.socket.recv(MAX_MESSAGE_BYTES)).await.unwrap();
        assert!(message.fds.len() <= 1);
        (message.bytes, message.fds.len() == 1)
    }

    async fn expect(&self, message: &[u8], answer: &[u8]) {
        let (bytes, with_netns) = self.receive().await;
        assert_eq!(bytes, message);
        assert_eq!(with_netns, message[0] == 0x0a, "namespaces come with adds alone");
        self.say(answer).await;
    }

    async fn end(self) -> End {
        within(self.task).await.unwrap()
    }
}

fn adding(proxies: &Arc<Proxies>, uid: &str) -> JoinHandle<Result<(), Error>> {
    let (proxies, info) = (Arc::clone(proxies), info(uid));
    tokio::spawn(async move {
        let netns = Arc::new(Netns::current().unwrap());
        proxies.add(&info, &netns).await
    })
}

fn removing(proxies: &Arc<Proxies>, text: &str) -> JoinHandle<()> {
    let (proxies, uid) = (Arc::clone(proxies), uid(text));
    tokio::spawn(async move { proxies.remove(&uid).await })
}

/// Waits until one more snapshot has been acknowledged than there were.
async fn known(proxies: &Proxies, before: u64) {
    within(async {
        while proxies.synced_ever() == before {
            sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
}

async fn done<T>(task: JoinHandle<T>) -> T {
    within(task).await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_names_all_pods_and_then_adds_and_deletes_follow() {
    let proxies = proxies();
    proxies.expect([uid("u-0")]);
    // It waits for a proxy, and is in the snapshot meanwhile.
    let first = adding(&proxies, "u-1");
    tokio::task::yield_now().await;
    let client = Client::connect(&proxies, 7);
    assert!(
        proxies.peers().is_empty(),
        "whoever has not said hello is no proxy"
    );
    client.say(HELLO).await;
    client.expect(&keep("u-0"), ACK).await;
    client.expect(&add("u-1"), ACK).await;
    client.expect(SNAPSHOT_SENT, ACK).await;
    assert_eq!(proxies.peers()[0].cgroup, Some(7));
    client.expect(&add("u-1"), ACK).await;
    done(first).await.unwrap();

    let second = adding(&proxies, "u-2");
    client.expect(&add("u-2"), ACK).await;
    done(second).await.unwrap();
    let removed = removing(&proxies, "u-1");
    client.expect(&del("u-1"), ACK).await;
    done(removed).await;
    drop(client.socket);
    assert!(matches!(done(client.task).await, End::Closed));
    assert!(proxies.peers().is_empty());

    // The next hears of what there is then.
    let client = Client::connect(&proxies, 8);
    client.say(HELLO).await;
    client.expect(&keep("u-0"), ACK).await;
    client.expect(&add("u-2"), ACK).await;
    client.expect(SNAPSHOT_SENT, ACK).await;
}

#[tokio::test(start_paused = true)]
async fn adds_go_to_the_newest_and_deletes_to_all() {
    let proxies = proxies();
    let old = Client::synced(&proxies, 1, 0).await;
    let new = Client::synced(&proxies, 2, 0).await;
    let numbers: Vec<_> = proxies.peers().iter().map(|peer| peer.cgroup).collect();
    assert_eq!(numbers, [Some(2), Some(1)]);
    let added = adding(&proxies, "u-1");
    new.expect(&add("u-1"), ACK).await;
    done(added).await.unwrap();
    let removed = removing(&proxies, "u-1");
    // The first message that the old one gets.
    old.expect(&del("u-1"), ACK).await;
    new.expect(&del("u-1"), ACK).await;
    done(removed).await;
    // With the newest gone, the one before it is the newest.
    drop(new.socket);
    assert!(matches!(done(new.task).await, End::Closed));
    let added = adding(&proxies, "u-2");
    old.expect(&add("u-2"), ACK).await;
    done(added).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_proxy_that_hangs_at_its_start_holds_up_no_other() {
    let proxies = proxies();
    let old = Client::synced(&proxies, 1, 0).await;
    let silent = Client::connect(&proxies, 2);
    let hanging = Client::connect(&proxies, 3);
    hanging.say(HELLO).await;
    assert_eq!(hanging.receive().await.0, SNAPSHOT_SENT);
    let added = adding(&proxies, "u-1");
    old.expect(&add("u-1"), ACK).await;
    done(added).await.unwrap();
    let removed = removing(&proxies, "u-1");
    old.expect(&del("u-1"), ACK).await;
    done(removed).await;
    assert!(matches!(silent.end().await, End::NoHello));
    assert!(matches!(hanging.end().await, End::NoAnswer));
    let added = adding(&proxies, "u-2");
    old.expect(&add("u-2"), ACK).await;
    done(added).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_late_answer_is_taken_for_no_other_request() {
    let proxies = proxies();
    let client = Client::synced(&proxies, 1, 0).await;
    let added = adding(&proxies, "u-1");
    assert_eq!(client.receive().await.0, add("u-1"));
    assert!(matches!(done(added).await, Err(Error::NoAnswer)));
    let Client { socket, task } = client;
    assert!(matches!(done(task).await, End::NoAnswer));
    // It is told so by the end of its connection.
    assert!(within(socket.recv(16)).await.unwrap().bytes.is_empty());
    assert!(matches!(done(adding(&proxies, "u-2")).await, Err(Error::NoProxy)));
}

#[tokio::test(start_paused = true)]
async fn who_speaks_out_of_turn_is_closed() {
    for (what, before_hello, after_snapshot) in [
        ("no protobuf for a hello", Some(&b"\xff"[..]), None),
        ("another answer", None, Some(&b"\x0a\x00"[..])),
        ("garbage", None, Some(&b"\xff\xff"[..])),
    ] {
        let proxies = proxies();
        let client = match before_hello {
            Some(bytes) => {
                let client = Client::connect(&proxies, 1);
                client.say(bytes).await;
                client
            }
            None => Client::synced(&proxies, 1, 0).await,
        };
        if let Some(bytes) = after_snapshot {
            client.say(bytes).await;
        }
        assert!(matches!(client.end().await, End::Protocol(_)), "{what}");
        assert!(proxies.peers().is_empty());
    }
    // Two answers at once: the second is the answer to nothing.
    let proxies = proxies();
    let client = Client::connect(&proxies, 1);
    proxies.expect([uid("u-0")]);
    client.say(HELLO).await;
    assert_eq!(client.receive().await.0, keep("u-0"));
    client.say(ACK).await;
    client.say(ACK).await;
    assert!(matches!(client.end().await, End::Protocol(_)));
    // What does not fit.
    let client = Client::connect(&proxies, 1);
    client.say(&[0; MAX_MESSAGE_BYTES + 1]).await;
    assert!(matches!(client.end().await, End::Socket(_)));
}

#[tokio::test(start_paused = true)]
async fn a_refusal_concerns_its_pod_alone() {
    let proxies = proxies();
    proxies.expect([uid("u-0"), uid("u-1")]);
    let client = Client::connect(&proxies, 1);
    client.say(HELLO).await;
    client.expect(&keep("u-0"), NACK).await;
    client.expect(&keep("u-1"), ACK).await;
    client.expect(SNAPSHOT_SENT, ACK).await;
    known(&proxies, 0).await;
    let added = adding(&proxies, "u-2");
    client.expect(&add("u-2"), NACK).await;
    // It would be tried again there, and for nobody.
    client.expect(&del("u-2"), ACK).await;
    let Err(Error::Refused(text)) = done(added).await else {
        panic!("it was refused")
    };
    assert_eq!(text, "no");
    // One that was expected stays so.
    let added = adding(&proxies, "u-1");
    client.expect(&add("u-1"), NACK).await;
    assert!(done(added).await.is_err());
    drop(client);
    let client = Client::connect(&proxies, 1);
    client.say(HELLO).await;
    client.expect(&keep("u-0"), ACK).await;
    client.expect(&keep("u-1"), ACK).await;
    client.expect(SNAPSHOT_SENT, ACK).await;
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_comes_while_a_snapshot_is_told_of_is_told_of_too() {
    let proxies = proxies();
    let old = Client::synced(&proxies, 1, 0).await;
    let new = Client::connect(&proxies, 2);
    let before = proxies.synced_ever();
    new.say(HELLO).await;
    assert_eq!(new.receive().await.0, SNAPSHOT_SENT);
    let added = adding(&proxies, "u-1");
    old.expect(&add("u-1"), ACK).await;
    done(added).await.unwrap();
    new.say(ACK).await;
    new.expect(&add("u-1"), ACK).await;
    known(&proxies, before).await;
    let added = adding(&proxies, "u-2");
    new.expect(&add("u-2"), ACK).await;
    done(added).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_delete_that_has_waited_does_not_take_away_a_pod_that_is_back() {
    let proxies = proxies();
    let old = Client::synced(&proxies, 1, 0).await;
    let new = Client::connect(&proxies, 2);
    let before = proxies.synced_ever();
    new.say(HELLO).await;
    assert_eq!(new.receive().await.0, SNAPSHOT_SENT);
    // It waits behind the snapshot of the new one.
    let removed = removing(&proxies, "u-1");
    old.expect(&del("u-1"), ACK).await;
    let added = adding(&proxies, "u-1");
    old.expect(&add("u-1"), ACK).await;
    done(added).await.unwrap();
    new.say(ACK).await;
    new.expect(&add("u-1"), ACK).await;
    known(&proxies, before).await;
    done(removed).await;
    let added = adding(&proxies, "u-2");
    new.expect(&add("u-2"), ACK).await;
    done(added).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn without_a_proxy_a_pod_waits_for_a_while_and_leaves_nothing() {
    let proxies = proxies();
    let netns = Netns::current().unwrap().id();
    let before = open_on(netns.dev, netns.ino);
    let error = done(adding(&proxies, "u-1")).await.unwrap_err();
    assert!(error.to_string().contains("INPOD_UDS"), "{error}");
    assert_eq!(open_on(netns.dev, netns.ino), before);
    let client = Client::synced(&proxies, 1, 0).await;
    let long = "x".repeat(MAX_MESSAGE_BYTES);
    let named = PodInfo {
        name: long,
        ..info("u-1")
    };
    let netns = Arc::new(Netns::current().unwrap());
    assert!(matches!(
        proxies.add(&named, &netns).await,
        Err(Error::TooLong(_))
    ));
    drop(client);
}

#[tokio::test(start_paused = true)]
async fn of_too_many_connections_the_oldest_gives_way() {
    let proxies = proxies();
    let oldest = Client::synced(&proxies, 1, 0).await;
    let mut others = Vec::new();
    for number in 2..=17 {
        others.push(Client::synced(&proxies, number, 0).await);
    }
    assert!(matches!(oldest.end().await, End::Replaced));
    assert_eq!(proxies.peers().len(), 16);
    assert_eq!(proxies.peers()[0].cgroup, Some(17));
    assert!(others.iter().all(|client| !client.task.is_finished()));
}

#[test]
fn answers_are_read_or_refused() {
    for (bytes, expected) in [
        (ACK, Ok(())),
        (b"\x0a\x02\x0a\x00", Ok(())),
        (NACK, Err("no")),
        // A field of a later version beside it.
        (b"\x0a\x00\x12\x00", Ok(())),
        (b"\x12\x00", Err("payload")),
        (b"", Err("payload")),
        (b"\x0a\x04\x0a\x02n", Err("decoded")),
        (b"\x0a\x04\x0a\x02\xff\xfe", Err("decoded")),
    ] {
        match (check(bytes), expected) {
            (Ok(()), Ok(())) => {}
            (Err(text), Err(part)) => assert!(text.contains(part), "{text}"),
            (result, _) => panic!("{bytes:02x?}: {result:?}"),
        }
    }
}

#[tokio::test]
async fn a_socket_that_nobody_serves_is_replaced_and_no_other() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("below/ztunnel.sock");
    let server = ZdsServer::bind(&path, proxies()).unwrap();
    let mode = fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o660);
    let second = ZdsServer::bind(&path, proxies());
    assert!(matches!(second, Err(BindError::InUse { .. })), "{second:?}");
    // As a killed process leaves it.
    std::mem::forget(server.file);
    drop(server.listener);
    let server = ZdsServer::bind(&path, proxies()).unwrap();
    drop(server);
    assert!(!path.exists());
    fs::write(&path, "").unwrap();
    let file = ZdsServer::bind(&path, proxies());
    assert!(matches!(file, Err(BindError::NotASocket { .. })), "{file:?}");
}

#[tokio::test]
async fn proxies_are_taken_and_known_by_their_process() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ztunnel.sock");
    let proxies = proxies();
    let server = ZdsServer::bind(&path, Arc::clone(&proxies)).unwrap();
    let stop = CancellationToken::new();
    let task = tokio::spawn(server.run(stop.clone()));
    let storm: Vec<_> = (0..5).map(|_| Seqpacket::connect(&path).unwrap()).collect();
    drop(storm);
    let socket = Seqpacket::connect(&path).unwrap();
    socket.send(HELLO, &[]).await.unwrap();
    let wait = Duration::from_secs(60);
    let message = timeout(wait, socket.recv(16)).await.unwrap().unwrap();
    assert_eq!(message.bytes, SNAPSHOT_SENT);
    assert_eq!(proxies.peers()[0].process.pid(), std::process::id());
    stop.cancel();
    timeout(wait, task).await.unwrap().unwrap();
    assert!(!path.exists());
}
