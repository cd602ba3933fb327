use std::{net::IpAddr, time::Duration};

use proptest::prelude::*;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

use super::*;
use crate::mesh::{
    index::Key,
    policy::{Action, Policy, Scope},
    testing::{ip, policy_name, service, with_policies, workload},
};

/// Nothing here takes this long.
const DEADLINE: Duration = Duration::from_secs(60);

fn workload_update(name: &str, address: &str) -> Update {
    Update::Workload(Arc::new(workload(name, address)))
}

fn policy(name: &str, action: Action) -> Policy {
    Policy {
        key: policy_name("shop", name),
        scope: Scope::Namespace,
        action,
        dry_run: false,
        rules: vec![],
    }
}

struct World {
    handle: Handle,
    readers: watch::Receiver<Arc<Mesh>>,
    stop: CancellationToken,
    _owner: AbortOnDropHandle<()>,
}

impl World {
    fn new(file: Option<Mesh>) -> Self {
        let (state, handle, readers) = State::new(file);
        let stop = CancellationToken::new();
        Self {
            handle,
            readers,
            _owner: AbortOnDropHandle::new(tokio::spawn(state.run(stop.clone()))),
            stop,
        }
    }

    async fn apply(&self, updates: Vec<Update>) -> Result<(), Stopped> {
        timeout(DEADLINE, self.handle.apply(updates)).await.unwrap()
    }

    async fn file(&self, mesh: Mesh) {
        timeout(DEADLINE, self.handle.replace_file(mesh))
            .await
            .unwrap()
            .unwrap();
    }

    /// The name of whoever is at an address.
    fn at(&self, address: &str) -> Option<String> {
        let mesh = self.readers.borrow();
        mesh.workload_at("", ip(address)).map(|one| one.name.to_string())
    }
}

#[tokio::test]
async fn a_change_is_visible_when_it_is_answered_and_old_snapshots_stay() {
    let world = World::new(None);
    world.apply(vec![workload_update("a", "10.0.0.1")]).await.unwrap();
    assert_eq!(world.at("10.0.0.1").as_deref(), Some("a"));
    let before = world.readers.borrow().clone();
    let removal = Update::RemoveAddress("Kubernetes//Pod/shop/a".into());
    world
        .apply(vec![removal, workload_update("b", "10.0.0.1")])
        .await
        .unwrap();
    assert_eq!(world.at("10.0.0.1").as_deref(), Some("b"));
    assert_eq!(&*before.workload_at("", ip("10.0.0.1")).unwrap().name, "a");
    world.stop.cancel();
    // The one change that the owner may still have taken is answered, or it is not.
    let _ = world.apply(vec![]).await;
    assert!(world.apply(vec![]).await.is_err());
}

#[tokio::test]
async fn what_the_file_holds_hides_the_control_plane_s_until_it_gives_it_up() {
    let file = |address: &str| Mesh::new(vec![workload("web", address)], vec![service("cart", "10.96.0.1")]);
    let world = World::new(Some(file("10.0.0.1")));
    let policies = |mesh| with_policies(mesh, [policy("p", Action::Deny)]);
    let of_plane = vec![
        workload_update("web", "10.0.0.9"),
        workload_update("other", "10.0.0.2"),
        Update::Service(Arc::new(service("cart", "10.96.0.9"))),
        Update::Policy(Arc::new(policy("p", Action::Allow))),
    ];
    world.apply(of_plane).await.unwrap();
    let seen = |address| world.at(address);
    let vips = || {
        let mesh = world.readers.borrow();
        ["10.96.0.1", "10.96.0.9"].map(|vip| mesh.service_at("", ip(vip), "shop").is_some())
    };
    let policy_is = |action| {
        let wanted = with_policies(Mesh::default(), [policy("p", action)]);
        let mesh = world.readers.borrow();
        mesh.policies_for("shop", &[]) == wanted.policies_for("shop", &[])
    };
    assert_eq!(
        (seen("10.0.0.1").as_deref(), seen("10.0.0.9")),
        (Some("web"), None)
    );
    assert_eq!(
        (seen("10.0.0.2").as_deref(), vips()),
        (Some("other"), [true, false])
    );
    assert!(policy_is(Action::Allow));

    // An edit, and what the control plane says of the hidden meanwhile.
    world.file(policies(file("10.0.0.3"))).await;
    assert_eq!(
        (seen("10.0.0.3").as_deref(), seen("10.0.0.1")),
        (Some("web"), None)
    );
    assert!(policy_is(Action::Deny));
    world
        .apply(vec![workload_update("web", "10.0.0.8")])
        .await
        .unwrap();
    assert_eq!(
        (seen("10.0.0.3").as_deref(), seen("10.0.0.8")),
        (Some("web"), None)
    );

    // Given up: the newest of the control plane comes back.
    world.file(Mesh::default()).await;
    assert_eq!(
        (seen("10.0.0.8").as_deref(), seen("10.0.0.3")),
        (Some("web"), None)
    );
    assert_eq!(vips(), [false, true]);
    assert!(policy_is(Action::Allow));

    // Removed below, and then above.
    world.file(file("10.0.0.3")).await;
    let host = "shop/cart.shop.svc.cluster.local";
    for key in ["Kubernetes//Pod/shop/web", host, "Kubernetes//Pod/shop/other"] {
        world
            .apply(vec![Update::RemoveAddress(key.into())])
            .await
            .unwrap();
    }
    assert_eq!(
        (seen("10.0.0.3").as_deref(), seen("10.0.0.2")),
        (Some("web"), None)
    );
    assert_eq!(vips(), [true, false]);
    world.file(Mesh::default()).await;
    assert_eq!((seen("10.0.0.3"), vips()), (None, [false, false]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn readers_and_other_tasks_go_on_while_very_many_workloads_come() {
    const WORKLOADS: u32 = 100_000;
    let world = World::new(None);
    world
        .apply(vec![workload_update("first", "192.0.2.1")])
        .await
        .unwrap();
    let updates = (0..WORKLOADS).map(|number| {
        let address = IpAddr::from(0x0a00_0000_u32.wrapping_add(number).to_be_bytes());
        workload_update(&format!("w{number}"), &address.to_string())
    });
    let updates: Vec<_> = updates.collect();
    let handle = world.handle.clone();
    let loading = AbortOnDropHandle::new(tokio::spawn(async move { handle.apply(updates).await }));
    // With the one worker in the hands of the load, this task would have no turn before its end.
    let mut turns = 0_u32;
    while !loading.is_finished() {
        assert!(world.at("192.0.2.1").is_some());
        turns += 1;
        tokio::task::yield_now().await;
    }
    assert!(turns > 1, "{turns}");
    loading.await.unwrap().unwrap();
    assert_eq!(world.readers.borrow().len(), (WORKLOADS as usize + 1, 0));
    assert_eq!(world.at("10.1.134.159").as_deref(), Some("w99999"));
}

#[tokio::test]
async fn an_old_snapshot_ends_with_the_owner_and_not_with_its_last_reader() {
    let world = World::new(None);
    let several = |prefix: &str| {
        let number = u16::try_from(MANY).unwrap() + 1;
        let make = |n: u16| workload_update(&format!("{prefix}{n}"), &format!("10.0.{}.{}", n >> 8, n & 255));
        (0..number).map(make).collect::<Vec<_>>()
    };
    for large in [false, true] {
        world.apply(vec![workload_update("a", "10.0.0.1")]).await.unwrap();
        let held = world.readers.borrow().clone();
        let old = Arc::downgrade(&held);
        let change = if large {
            several("b")
        } else {
            vec![workload_update("b", "10.0.0.2")]
        };
        world.apply(change).await.unwrap();
        // The reader's, and the owner's.
        assert_eq!(old.strong_count(), 2, "large: {large}");
        drop(held);
        let gone = async {
            while old.strong_count() > 0 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(DEADLINE, gone)
            .await
            .expect("nobody has it, and it is still there");
    }
}

#[tokio::test]
async fn of_old_snapshots_that_readers_hold_on_to_a_bounded_number_is_kept() {
    let world = World::new(None);
    let mut held = Vec::new();
    for number in 0..2 * OUTDATED {
        held.push(world.readers.borrow().clone());
        world
            .apply(vec![workload_update("a", &format!("10.0.0.{number}"))])
            .await
            .unwrap();
    }
    let with_owner = held.iter().filter(|one| Arc::strong_count(one) > 1).count();
    // One more may be on its way, since a change is answered before.
    assert!((OUTDATED..=OUTDATED + 1).contains(&with_owner), "{with_owner}");
}

#[derive(Debug, Clone)]
enum Step {
    Plane(Update),
    File(Vec<Update>),
}

fn update() -> impl Strategy<Value = Update> {
    let name = prop::sample::select(vec!["a", "b", "c"]);
    let address = prop::sample::select(vec!["10.0.0.1", "10.0.0.2"]);
    prop_oneof![
        (name.clone(), address).prop_map(|(name, address)| workload_update(name, address)),
        (name.clone(), any::<bool>()).prop_map(|(name, canonical)| {
            let mut made = service(name, "10.96.0.1");
            made.canonical = canonical;
            Update::Service(Arc::new(made))
        }),
        (name.clone(), any::<bool>()).prop_map(|(name, denies)| {
            let action = if denies { Action::Deny } else { Action::Allow };
            Update::Policy(Arc::new(policy(name, action)))
        }),
        name.clone()
            .prop_map(|name| Update::RemoveAddress(format!("Kubernetes//Pod/shop/{name}").into())),
        name.clone()
            .prop_map(|name| { Update::RemoveAddress(format!("shop/{name}.shop.svc.cluster.local").into()) }),
        name.prop_map(|name| Update::Remove(Key::Policy(policy_name("shop", name)))),
    ]
}

fn of_updates(updates: impl IntoIterator<Item = Update>) -> Mesh {
    let mut mesh = Mesh::default();
    updates.into_iter().for_each(|update| mesh.apply(update));
    mesh
}

proptest! {
    /// After any steps, the mesh holds under each key what the file has, else what the control plane has.
    #[test]
    fn the_file_lies_over_the_control_plane(
        steps in prop::collection::vec(
            prop_oneof![
                update().prop_map(Step::Plane),
                prop::collection::vec(update(), 0..4).prop_map(Step::File),
            ],
            0..30,
        ),
    ) {
        let mut layers = Layers::new(Some(Mesh::default()));
        let (mut plane, mut file) = (Mesh::default(), Mesh::default());
        for step in steps {
            match step {
                Step::Plane(update) => {
                    plane.apply(update.clone());
                    layers.change(Change::Updates(vec![update]));
                }
                Step::File(updates) => {
                    file = of_updates(updates);
                    layers.change(Change::File(Box::new(file.clone())));
                }
            }
            for key in plane.keys().chain(file.keys()).chain(layers.mesh.keys()) {
                let expected = file.get(&key).or_else(|| plane.get(&key));
                prop_assert_eq!(layers.mesh.get(&key), expected);
            }
        }
    }
}

#[tokio::test]
async fn policies_are_awaited_until_they_have_been_told_whatever_else_comes() {
    let (mut state, handle, readers) = State::new(Some(Mesh::default()));
    state.await_policies();
    let _owner = AbortOnDropHandle::new(tokio::spawn(state.run(CancellationToken::new())));
    let mut are_awaited = vec![readers.borrow().policies_are_awaited()];
    handle
        .apply(vec![workload_update("web", "10.0.0.1")])
        .await
        .unwrap();
    are_awaited.push(readers.borrow().policies_are_awaited());
    let mut file = Mesh::default();
    file.apply(Update::Policy(Arc::new(policy("file", Action::Deny))));
    handle.replace_file(file).await.unwrap();
    are_awaited.push(readers.borrow().policies_are_awaited());
    handle
        .apply(vec![Update::Policy(Arc::new(policy("plane", Action::Deny)))])
        .await
        .unwrap();
    handle.policies_told().await.unwrap();
    are_awaited.push(readers.borrow().policies_are_awaited());
    assert_eq!(are_awaited, [true, true, true, false]);
    assert_eq!(readers.borrow().policies(), 2);
}
