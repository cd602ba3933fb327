use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use tokio::time::timeout;
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

use super::*;
use crate::mesh::{
    policy::{Action, Match, Policy, Scope, StringMatch},
    testing::{id, info, ip, policy_name, with_policies, workload},
};

/// Longer than any step takes on a machine that is busy.
const DEADLINE: Duration = Duration::from_secs(60);

fn policy(name: &str, scope: Scope, action: Action, rules: Vec<Match>) -> Policy {
    Policy {
        key: policy_name("shop", name),
        scope,
        action,
        dry_run: false,
        rules: rules.into_iter().map(|one| vec![vec![one]]).collect(),
    }
}

fn deny_port(name: &str, scope: Scope, port: u16) -> Policy {
    let one = Match {
        destination_ports: vec![port],
        ..Match::default()
    };
    policy(name, scope, Action::Deny, vec![one])
}

fn allow(account: &str) -> Policy {
    let one = Match {
        principals: vec![StringMatch::suffix(&format!("/sa/{account}")).unwrap()],
        ..Match::default()
    };
    policy("allow", Scope::Namespace, Action::Allow, vec![one])
}

/// The mesh with the pod `web`, which names policies.
fn mesh(policies: &[Policy], selected: &[&str]) -> Arc<Mesh> {
    let mut web = workload("web", "10.0.0.1");
    web.authorization_policies = selected.iter().map(|name| policy_name("shop", name)).collect();
    Arc::new(with_policies(
        Mesh::new(vec![web], vec![]),
        policies.iter().cloned(),
    ))
}

/// The mesh before it knows of the pod.
fn without_web(policies: &[Policy]) -> Arc<Mesh> {
    Arc::new(with_policies(Mesh::default(), policies.iter().cloned()))
}

fn flow(account: &str, port: u16) -> Flow {
    Flow {
        source: ip("10.0.1.1"),
        identity: Some(id(account)),
        destination: SocketAddr::new(ip("10.0.0.1"), port),
    }
}

fn plain(port: u16) -> Flow {
    Flow {
        identity: None,
        ..flow("nobody", port)
    }
}

/// Of the pod `web`, followed.
struct Followed {
    mesh: watch::Sender<Arc<Mesh>>,
    connections: Arc<Connections>,
    _task: AbortOnDropHandle<()>,
}

impl Followed {
    fn new(first: Arc<Mesh>) -> Self {
        let (mesh, receiver) = watch::channel(first);
        let connections = Arc::new(Connections::new(info("web"), Home::default(), receiver));
        let task = tokio::spawn(connections.clone().follow());
        Self {
            mesh,
            connections,
            _task: AbortOnDropHandle::new(task),
        }
    }

    fn admit(&self, flow: Flow) -> Result<Admitted, Denied> {
        self.connections.admit(flow)
    }

    /// Gives the task its turn until it has caught up with the mesh.
    async fn settle(&self) {
        timeout(DEADLINE, async {
            let is_settled = || {
                let table = self.connections.lock();
                let is_asked = table.open.values().all(|open| open.number == table.number);
                is_asked && Arc::ptr_eq(&table.mesh, &self.mesh.borrow())
            };
            while !is_settled() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        })
        .await
        .unwrap();
    }
}

async fn reason(admitted: &Admitted) -> String {
    let denied = timeout(DEADLINE, admitted.revoked()).await.unwrap();
    crate::proxy::record::chain(&denied)
}

#[tokio::test]
async fn policies_take_the_names_of_the_pod_s_trust_domain_for_one() {
    let allowed = Match {
        principals: vec![StringMatch::exact("cluster.local/ns/shop/sa/a").unwrap()],
        ..Match::default()
    };
    let allow = policy("a", Scope::Global, Action::Allow, vec![allowed]);
    let (_mesh, receiver) = watch::channel(mesh(&[allow], &[]));
    let old = Flow {
        identity: Some(SpiffeId::new("old.domain", "shop", "a").unwrap()),
        ..flow("a", 80)
    };
    let made = || Connections::new(info("web"), Home::default(), receiver.clone());
    let named = made().in_one_domain(["old.domain", "cluster.local"].map(Arc::from).into());
    assert!(Arc::new(named).admit(old.clone()).is_ok());
    assert!(Arc::new(made()).admit(old).is_err());
}

#[tokio::test]
async fn what_a_change_denies_is_revoked_with_the_policy_s_name_and_the_rest_stays() {
    let followed = Followed::new(mesh(&[], &[]));
    let [denied, permitted] = [81, 80].map(|port| followed.admit(flow("a", port)).unwrap());
    followed
        .mesh
        .send_replace(mesh(&[deny_port("no-81", Scope::Global, 81)], &[]));
    assert_eq!(
        reason(&denied).await,
        "closed due to policy change: DENY policy shop/no-81 matches"
    );
    followed.settle().await;
    assert!(permitted.entry.denied().is_none());
    let again = followed.admit(flow("a", 81)).unwrap_err();
    assert_eq!(
        crate::proxy::record::chain(&again),
        "denied by policy: DENY policy shop/no-81 matches"
    );
    // Only those who come to be allowed, from now on.
    followed.mesh.send_replace(mesh(&[allow("b")], &[]));
    assert_eq!(
        reason(&permitted).await,
        "closed due to policy change: none of the ALLOW policies matches: shop/allow"
    );
    assert!(followed.admit(flow("b", 81)).is_ok());
}

#[tokio::test]
async fn what_a_workload_names_counts_from_when_it_names_it() {
    let policies = [deny_port("no-81", Scope::WorkloadSelector, 81)];
    let followed = Followed::new(mesh(&policies, &[]));
    let open = followed.admit(flow("a", 81)).unwrap();
    followed
        .mesh
        .send_replace(mesh(&policies, &["no-81", "no-such-policy"]));
    assert!(
        reason(&open)
            .await
            .starts_with("closed due to policy change: DENY policy shop/no-81")
    );
}

#[tokio::test]
async fn a_pod_whose_policies_cannot_be_known_takes_nothing() {
    let (everywhere, selected) = (
        deny_port("no-81", Scope::Global, 81),
        deny_port("no-82", Scope::WorkloadSelector, 82),
    );
    // All that could be for it is known.
    let followed = Followed::new(without_web(&[]));
    let _open = followed.admit(plain(81)).unwrap();
    followed
        .mesh
        .send_replace(without_web(std::slice::from_ref(&everywhere)));
    assert!(matches!(followed.admit(plain(81)), Err(Denied::ByPolicy(_))));
    let open = followed.admit(plain(82)).unwrap();

    // Something might be for it, or not: nothing is let in, and nothing is closed.
    let both = [everywhere, selected];
    followed.mesh.send_replace(without_web(&both));
    let unknown = followed.admit(plain(80)).unwrap_err();
    assert!(unknown.is_transient(), "{unknown}");
    followed.settle().await;
    assert!(open.entry.denied().is_none());

    followed.mesh.send_replace(mesh(&both, &["no-82"]));
    assert!(reason(&open).await.contains("shop/no-82"));
    let open = followed.admit(plain(80)).unwrap();
    // A workload that is gone revokes nothing by that, and what it named still counts for what is open.
    followed.mesh.send_replace(without_web(&both));
    followed.settle().await;
    assert!(open.entry.denied().is_none());
    followed
        .mesh
        .send_replace(without_web(&[deny_port("no-82", Scope::WorkloadSelector, 80)]));
    assert!(reason(&open).await.contains("shop/no-82"));
}

#[tokio::test]
async fn a_dry_run_revokes_nothing() {
    let followed = Followed::new(mesh(&[], &[]));
    let open = followed.admit(plain(80)).unwrap();
    let mut dry = deny_port("no-80", Scope::Global, 80);
    dry.dry_run = true;
    let mut allow = allow("b");
    allow.dry_run = true;
    followed.mesh.send_replace(mesh(&[dry, allow], &[]));
    followed.settle().await;
    assert!(open.entry.denied().is_none());
    assert!(followed.admit(plain(80)).is_ok());
}

#[tokio::test]
async fn connections_that_end_leave_the_table() {
    let followed = Followed::new(mesh(&[deny_port("no-81", Scope::Global, 81)], &[]));
    let held = followed.admit(plain(80)).unwrap();
    drop(followed.admit(plain(80)));
    assert!(followed.admit(plain(81)).is_err());
    assert_eq!(followed.connections.lock().open.len(), 1);
    held.run(async {}).await;
    drop(held);
    assert!(followed.connections.lock().open.is_empty());
}

#[tokio::test]
async fn changes_that_do_not_touch_the_pod_s_policies_ask_nobody() {
    let others = Policy {
        key: policy_name("bank", "deny"),
        ..deny_port("deny", Scope::Namespace, 80)
    };
    let own = deny_port("no-81", Scope::Global, 81);
    let followed = Followed::new(mesh(std::slice::from_ref(&own), &[]));
    let _open = followed.admit(plain(80)).unwrap();
    let number = followed.connections.lock().number;
    // Made anew, as when a file is read again, and with what is not for this pod.
    followed
        .mesh
        .send_replace(mesh(&[own, others], &["no-such-policy"]));
    followed.settle().await;
    assert_eq!(followed.connections.lock().number, number);
}

#[tokio::test]
async fn what_runs_is_dropped_when_it_is_revoked() {
    let followed = Followed::new(mesh(&[], &[]));
    let dropped = CancellationToken::new();
    let guard = dropped.clone().drop_guard();
    let admitted = followed.admit(plain(80)).unwrap();
    let task = tokio::spawn(async move {
        let running = async move {
            let _guard = guard;
            std::future::pending().await
        };
        admitted.run(running).await;
    });
    // It waits by now, or has still to begin: both must do.
    tokio::task::yield_now().await;
    followed
        .mesh
        .send_replace(mesh(&[deny_port("no-80", Scope::Global, 80)], &[]));
    timeout(DEADLINE, task).await.unwrap().unwrap();
    assert!(dropped.is_cancelled());
}

#[tokio::test]
async fn one_change_closes_thousands() {
    const OPEN: u16 = 4_000;
    let followed = Followed::new(mesh(&[], &[]));
    let admit = |n: u16| {
        let mut flow = flow("a", 80 + n % 2);
        flow.source = IpAddr::from([10, 1, n.to_be_bytes()[0], n.to_be_bytes()[1]]);
        followed.admit(flow).unwrap()
    };
    let tasks: Vec<_> = (0..OPEN)
        .map(|n| {
            let admitted = admit(n);
            tokio::spawn(async move { admitted.run(std::future::pending()).await })
        })
        .collect();
    followed
        .mesh
        .send_replace(mesh(&[deny_port("no-81", Scope::Global, 81)], &[]));
    let ended = async {
        while followed.connections.lock().open.len() > usize::from(OPEN / 2) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(DEADLINE, ended).await.unwrap();
    followed.settle().await;
    for (n, task) in tasks.into_iter().enumerate() {
        assert_eq!(task.is_finished(), n % 2 == 1, "{n}");
        task.abort();
    }
}

/// Connections come while policies come and go, from many threads. In the end nothing is open that the last policies deny,
/// though most of it was let in by others.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_change_and_a_connection_at_the_same_time_leave_nothing_open() {
    let (permitting, denying) = (mesh(&[], &[]), mesh(&[deny_port("no", Scope::Global, 80)], &[]));
    for round in 0..20 {
        let followed = Arc::new(Followed::new(permitting.clone()));
        let stop = Arc::new(AtomicBool::new(false));
        let clients: Vec<_> = (0..4_u16)
            .map(|client| {
                let (followed, stop) = (followed.clone(), stop.clone());
                tokio::task::spawn_blocking(move || {
                    let mut open = Vec::new();
                    while !stop.load(Ordering::Relaxed) && open.len() < 2_000 {
                        open.extend(followed.admit(flow("a", 80 + client % 2)).ok());
                    }
                    open
                })
            })
            .collect();
        let changes = {
            let (followed, permitting, denying) = (followed.clone(), permitting.clone(), denying.clone());
            tokio::task::spawn_blocking(move || {
                for _ in 0..200 {
                    followed.mesh.send_replace(denying.clone());
                    std::thread::yield_now();
                    followed.mesh.send_replace(permitting.clone());
                    std::thread::yield_now();
                }
                followed.mesh.send_replace(denying);
            })
        };
        timeout(DEADLINE, changes).await.unwrap().unwrap();
        stop.store(true, Ordering::Relaxed);
        let mut open = Vec::new();
        for client in clients {
            open.extend(timeout(DEADLINE, client).await.unwrap().unwrap());
        }
        for admitted in &open {
            if admitted.entry.flow.destination.port() == 80 {
                assert!(reason(admitted).await.contains("shop/no"), "round {round}");
            }
        }
        followed.settle().await;
        let untouched = |admitted: &&Admitted| admitted.entry.flow.destination.port() == 81;
        assert!(
            open.iter()
                .filter(untouched)
                .all(|admitted| admitted.entry.denied().is_none())
        );
    }
}

#[tokio::test]
async fn nobody_is_let_in_while_there_may_be_policies_that_are_not_told() {
    let awaited = |are_awaited| {
        let mut now = Mesh::clone(&mesh(&[], &[]));
        now.set_policies_awaited(are_awaited);
        Arc::new(now)
    };
    let followed = Followed::new(awaited(true));
    for flow in [flow("a", 80), plain(80)] {
        let denied = followed.admit(flow).unwrap_err();
        assert!(denied.is_transient(), "{denied}");
        assert!(
            denied.to_string().contains("has not told its policies"),
            "{denied}"
        );
    }
    followed.mesh.send_replace(awaited(false));
    let admitted = [flow("a", 80), plain(80)].map(|flow| followed.admit(flow).unwrap());
    // Who is let in stays: they are asked again of policies alone.
    followed.settle().await;
    assert!(admitted.iter().all(|admitted| admitted.entry.denied().is_none()));
}
