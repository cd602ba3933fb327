use futures_util::{StreamExt, stream::BoxStream};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
    time::timeout,
};

use super::*;
use crate::{
    identity::{
        CertSource, Error, Svid, crl_file::Revocations, store::Store, testing::TestCa, trust::PeerRules,
    },
    mesh::{
        index::Mesh,
        policy::{Action, Match, Policy, Scope},
        route::{self, Route},
        testing::{id, info, ip, policy_name, service, with_policies, workload},
    },
    proxy::{
        Config, PeerConfig, PodContext, Shared,
        connections::Flow,
        record::Direction,
        tests::{is_reset, until},
    },
    redirect::none::NoRedirect,
    sys::netns::Netns,
};

/// Longer than any step takes on a machine that is busy.
const DEADLINE: Duration = Duration::from_secs(60);
const WEB: &str = "10.0.0.1";
const CART: &str = "10.0.0.2";

/// One certificate, by the authority that is given for the identity's service account, or none at all.
struct Issuer(Vec<(&'static str, Arc<TestCa>)>);

impl CertSource for Issuer {
    fn svids(&self, id: &SpiffeId) -> BoxStream<'static, Result<Svid, Error>> {
        let mut all = self.0.iter();
        let svid = all.find(|(account, _)| *account == id.service_account());
        futures_util::stream::iter(svid.map(|(_, ca)| Ok(ca.svid(id))))
            .chain(futures_util::stream::pending())
            .boxed()
    }
}

/// Pod `web`, which calls, and pod `cart`, which is called.
struct World {
    mesh: watch::Sender<Arc<Mesh>>,
    shared: Arc<Shared>,
    web: Arc<Pod>,
    cart: Arc<Pod>,
    residence: Residence,
}

/// The mesh of both.
fn mesh(policies: &[Policy]) -> Arc<Mesh> {
    let workloads = vec![workload("web", WEB), workload("cart", CART)];
    let services = vec![service("cart", "10.1.0.1")];
    Arc::new(with_policies(
        Mesh::new(workloads, services),
        policies.iter().cloned(),
    ))
}

fn deny_port(port: u16) -> Policy {
    Policy {
        key: policy_name("shop", "deny"),
        scope: Scope::Namespace,
        action: Action::Deny,
        dry_run: false,
        rules: vec![vec![vec![Match {
            destination_ports: vec![port],
            ..Match::default()
        }]]],
    }
}

/// With an address, and a namespace that nothing here enters.
fn pod(shared: &Arc<Shared>, identity: &SpiffeId, address: &str) -> Arc<Pod> {
    let context = PodContext {
        info: info(identity.service_account()),
        identity: shared.identities.hold(identity),
        netns: Arc::new(Netns::stand_in(1)),
        addresses: vec![ip(address)],
        strict: false,
        listeners: None,
    };
    Pod::new(Arc::clone(shared), context)
}

impl World {
    async fn new() -> Self {
        let ca = Arc::new(TestCa::new());
        Self::with(Config::default(), vec![("web", Arc::clone(&ca)), ("cart", ca)]).await
    }

    /// With these authorities.
    async fn with(config: Config, cas: Vec<(&'static str, Arc<TestCa>)>) -> Self {
        Self::under(PeerRules::default(), config, cas).await
    }

    /// And with these rules for peers.
    async fn under(rules: PeerRules, config: Config, cas: Vec<(&'static str, Arc<TestCa>)>) -> Self {
        let certified: Vec<_> = cas.iter().map(|(account, _)| id(account)).collect();
        let mesh = watch::Sender::new(mesh(&[]));
        let shared = Arc::new(Shared {
            mesh: mesh.subscribe(),
            identities: Store::new(Arc::new(Issuer(cas)), rules),
            redirector: Arc::new(NoRedirect),
            config: Config {
                same_node_direct: true,
                ..config
            },
            metrics: Arc::default(),
            flows: Arc::default(),
            residents: Residents::default(),
            demand: None,
            names: crate::proxy::Names::default(),
            open: tokio_util::sync::CancellationToken::new(),
            listening: tokio_util::task::TaskTracker::new(),
        });
        let web = pod(&shared, &id("web"), WEB);
        let cart = pod(&shared, &id("cart"), CART);
        for pod in [&web, &cart] {
            if certified.contains(pod.identity.id()) {
                let config = timeout(DEADLINE, pod.identity.server_config()).await;
                config.unwrap().unwrap();
            }
        }
        Self {
            residence: Residence::of(&cart).unwrap(),
            mesh,
            shared,
            web,
            cart,
        }
    }

    /// From `web` to `cart`.
    fn route(&self) -> HboneRoute {
        let destination = SocketAddr::new(ip(CART), 8080);
        let route = route::outbound(
            &self.web.mesh(),
            self.web.local(),
            ip(WEB),
            destination,
            &mut |_| 0,
        );
        match route {
            Ok(Route::Hbone(route)) => route,
            other => panic!("{other:?}"),
        }
    }

    fn find(&self) -> Result<Neighbour, Elsewhere> {
        find(&self.web, client(), &self.route())
    }

    /// Has `web` connect, joined with `cart`: the application's end, and the connection itself.
    async fn connect(&self) -> (TcpStream, impl Future<Output = ()> + use<'_>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let caller = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let accepted = listener.accept().await.unwrap().0;
        let record = Record::new(&self.web.recorder, Direction::Outbound, client());
        let neighbour = self.find().ok().unwrap();
        (
            caller,
            join(neighbour, &self.web, Leg::new(accepted), client(), record),
        )
    }
}

fn client() -> SocketAddr {
    SocketAddr::new(ip(WEB), 40_000)
}

fn why<T>(found: Result<T, Elsewhere>) -> String {
    found
        .err()
        .map(|elsewhere| format!("{elsewhere:?}"))
        .unwrap_or_default()
}

#[tokio::test]
async fn a_neighbour_is_who_the_mesh_says_and_asks_for() {
    let world = World::new().await;
    assert_eq!(why(world.find()), "");
    let neighbour = world.find().ok().unwrap();
    assert!(Arc::ptr_eq(&neighbour.server, &world.cart));
    assert_eq!(neighbour.destination, "10.0.0.2:8080".parse().unwrap());

    type Change = fn(&mut HboneRoute);
    fn other(route: &mut HboneRoute, change: fn(&mut Workload)) {
        let mut workload = Workload::clone(&route.workload);
        change(&mut workload);
        route.workload = Arc::new(workload);
        route.far_end = Arc::clone(&route.workload);
    }
    let changes: &[(&str, &str, Change)] = &[
        ("a pod that took over the address", "OtherPod", |route| {
            other(route, |workload| workload.name = "cart-1".into());
        }),
        ("another account", "OtherPod", |route| {
            other(route, |workload| workload.service_account = "admin".into());
        }),
        ("another namespace", "OtherPod", |route| {
            other(route, |workload| workload.namespace = "bank".into());
        }),
        ("another network", "OtherPod", |route| {
            other(route, |workload| workload.network = "far".into());
        }),
        ("the node's own network", "OtherPod", |route| {
            other(route, |workload| workload.host_network = true);
        }),
        ("an address that the workload has no more", "NotDirect", |route| {
            other(route, |workload| workload.addresses = vec![]);
        }),
        ("another identity", "OtherIdentity", |route| {
            route.expected = Arc::new([id("admin")]);
        }),
        ("one of several identities", "", |route| {
            route.expected = Arc::new([id("admin"), id("cart")]);
        }),
        ("a tunnel within the tunnel", "NotDirect", |route| {
            route.inner = Some(Arc::new([id("cart")]));
        }),
        ("a service by name", "NotDirect", |route| {
            let service = Arc::new(service("cart", "10.1.0.1"));
            route.authority = Target::Service(service, 80);
        }),
        ("a waypoint's address", "NotDirect", |route| {
            route.authority = Target::Address("10.1.0.1:80".parse().unwrap());
        }),
        ("a waypoint's port", "NotDirect", |route| {
            route.tunnel.set_port(15_009)
        }),
        ("another far end", "NotDirect", |route| {
            route.far_end = Arc::new(workload("waypoint", CART));
        }),
        ("nobody's address", "NotHere", |route| {
            other(route, |workload| workload.addresses.push(ip("10.0.0.9")));
            route.tunnel.set_ip(ip("10.0.0.9"));
            route.authority = Target::Address("10.0.0.9:80".parse().unwrap());
        }),
    ];
    for (name, expected, change) in changes {
        let mut route = world.route();
        change(&mut route);
        let found = why(find(&world.web, client(), &route));
        assert!(
            found.starts_with(expected) && found.is_empty() == expected.is_empty(),
            "{name}: {found}"
        );
    }
    for stranger in ["10.0.0.7:1", "127.0.0.1:1", "[fd00::1]:1"] {
        let found = why(find(&world.web, stranger.parse().unwrap(), &world.route()));
        assert_eq!(found, "ForeignClient", "{stranger}");
    }
}

#[tokio::test]
async fn the_residents_are_the_pods_that_run_and_whoever_shares_an_address_is_not_told_apart() {
    let world = World::new().await;
    let successor = pod(&world.shared, &id("cart"), CART);
    let residence = Residence::of(&successor).unwrap();
    assert_eq!(why(world.find()), "Ambiguous");
    drop(residence);
    assert_eq!(why(world.find()), "");
    // It has begun to stop, and has not left yet.
    world.cart.drain.cancel();
    assert_eq!(why(world.find()), "NotHere");
    let residence = Residence::of(&successor).unwrap();
    let route = world.route();
    drop(world.residence);
    let found = find(&world.web, client(), &route);
    assert!(Arc::ptr_eq(&found.ok().unwrap().server, &successor));
    drop(residence);
    assert!(world.shared.residents.lock().is_empty());
}

#[tokio::test]
async fn nothing_is_kept_of_pods_while_it_is_off() {
    let World { shared, .. } = World::new().await;
    let shared = Arc::new(Shared {
        mesh: shared.mesh.clone(),
        identities: Arc::clone(&shared.identities),
        redirector: Arc::new(NoRedirect),
        config: Config::default(),
        metrics: Arc::default(),
        flows: Arc::default(),
        residents: Residents::default(),
        demand: None,
        names: crate::proxy::Names::default(),
        open: tokio_util::sync::CancellationToken::new(),
        listening: tokio_util::task::TaskTracker::new(),
    });
    assert!(Residence::of(&pod(&shared, &id("cart"), CART)).is_none());
    assert!(shared.residents.lock().is_empty());
}

#[tokio::test]
async fn pods_that_could_have_no_tunnel_are_not_joined() {
    let (one, other) = (Arc::new(TestCa::new()), Arc::new(TestCa::new()));
    for (name, cas, expected) in [
        (
            "the client has none",
            vec![("cart", &one)],
            "NoCertificate(spiffe://cluster.local/ns/shop/sa/web)",
        ),
        (
            "the server has none",
            vec![("web", &one)],
            "NoCertificate(spiffe://cluster.local/ns/shop/sa/cart)",
        ),
        (
            "of two authorities",
            vec![("web", &one), ("cart", &other)],
            "Certificates(",
        ),
    ] {
        let cas = cas.into_iter().map(|(account, ca)| (account, Arc::clone(ca)));
        let world = World::with(Config::default(), cas.collect()).await;
        let found = why(world.find());
        assert!(found.starts_with(expected), "{name}: {found}");
    }
}

#[tokio::test]
async fn a_server_of_another_trust_domain_takes_nobody() {
    let world = World::new().await;
    let foreign = SpiffeId::new("other.domain", "shop", "cart").unwrap();
    let route = world.route();
    drop(world.residence);
    let cart = pod(&world.shared, &foreign, CART);
    timeout(DEADLINE, cart.identity.server_config())
        .await
        .unwrap()
        .unwrap();
    let _residence = Residence::of(&cart).unwrap();
    let route = HboneRoute {
        expected: Arc::new([foreign]),
        ..route
    };
    let found = why(find(&world.web, client(), &route));
    assert!(found.contains("trust domain"), "{found}");
}

#[tokio::test]
async fn refused_by_the_server_it_is_reset_and_both_sides_say_so() {
    let limited = Config {
        peers: PeerConfig {
            max_streams_per_identity: 0,
            ..PeerConfig::of(16_384)
        },
        ..Config::default()
    };
    for (config, policies) in [(Config::default(), vec![deny_port(8080)]), (limited, vec![])] {
        let ca = Arc::new(TestCa::new());
        let world = World::with(config, vec![("web", Arc::clone(&ca)), ("cart", ca)]).await;
        world.mesh.send_replace(mesh(&policies));
        let (mut caller, joined) = world.connect().await;
        timeout(DEADLINE, joined).await.unwrap();
        assert!(is_reset(caller.read(&mut [0]).await));
        for reporter in ["source", "destination"] {
            let failed = format!(
                "connections_failed_total{{reporter=\"{reporter}\",connection_security_policy=\"unknown\"}} 1"
            );
            until(&world.shared.metrics, &failed).await;
        }
        until(&world.shared.metrics, "redirector_connections_same_node_total 1").await;
        if policies.is_empty() {
            let refused = "redirector_connections_refused_total{reason=\"streams\"} 1";
            until(&world.shared.metrics, refused).await;
        }
    }
}

/// The server's workload is gone, so that its side waits.
#[tokio::test]
async fn a_server_that_ends_takes_its_connections_with_it_and_waits_for_them() {
    let world = World::new().await;
    let (mut caller, joined) = world.connect().await;
    let alone = Mesh::new(vec![workload("web", WEB)], vec![]);
    world.mesh.send_replace(Arc::new(alone));
    world.cart.tasks.close();
    let ends = async {
        world.cart.drain.cancel();
        assert_eq!(world.cart.tasks.len(), 1);
        world.cart.kill.cancel();
        world.cart.tasks.wait().await;
        assert!(is_reset(caller.read(&mut [0]).await));
    };
    timeout(DEADLINE, async { tokio::join!(joined, ends) })
        .await
        .unwrap();
}

/// Both applications' ends of a relay under the policies of `cart`, and the relay.
async fn relayed(world: &World) -> (TcpStream, TcpStream, impl Future<Output = ()>) {
    let mut legs = Vec::new();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    for direction in [Direction::Outbound, Direction::Inbound] {
        let end = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let mut record = Record::new(&world.web.recorder, direction, client());
        record.open(Security::Unknown);
        legs.push((end, (Leg::new(listener.accept().await.unwrap().0), record)));
    }
    let flow = Flow {
        source: ip(WEB),
        identity: Some(id("web")),
        destination: SocketAddr::new(ip(CART), 8080),
    };
    let admitted = world.cart.connections.admit(flow).unwrap();
    let (server, application) = legs.pop().unwrap();
    let (caller, client) = legs.pop().unwrap();
    (caller, server, relay(client, application, admitted, DEADLINE))
}

fn total(name: &str, reporter: &str, value: u64) -> String {
    format!(
        "istio_tcp_{name}_total{{reporter=\"{reporter}\",connection_security_policy=\"unknown\"}} {value}"
    )
}

#[tokio::test]
async fn fin_is_fin_and_bytes_count_on_both_sides() {
    let world = World::new().await;
    let (mut caller, mut server, relay) = relayed(&world).await;
    let applications = async {
        caller.write_all(b"question").await.unwrap();
        caller.shutdown().await.unwrap();
        let mut got = Vec::new();
        server.read_to_end(&mut got).await.unwrap();
        assert_eq!(got, b"question");
        server.write_all(&[b'a'; 100_000]).await.unwrap();
        drop(server);
        got.clear();
        caller.read_to_end(&mut got).await.unwrap();
        assert_eq!(got.len(), 100_000);
    };
    timeout(DEADLINE, async { tokio::join!(relay, applications) })
        .await
        .unwrap();
    for reporter in ["source", "destination"] {
        for (name, value) in [
            ("connections_closed", 1),
            ("received_bytes", 8),
            ("sent_bytes", 100_000),
        ] {
            until(&world.shared.metrics, &total(name, reporter, value)).await;
        }
    }
}

#[tokio::test]
async fn a_reset_is_a_reset_at_the_far_end_and_no_failure() {
    for client_resets in [true, false] {
        let world = World::new().await;
        let (caller, server, relay) = relayed(&world).await;
        let (first, mut second) = if client_resets {
            (caller, server)
        } else {
            (server, caller)
        };
        let applications = async {
            first.set_zero_linger().unwrap();
            drop(first);
            assert!(is_reset(second.read(&mut [0]).await));
        };
        timeout(DEADLINE, async { tokio::join!(relay, applications) })
            .await
            .unwrap();
        for reporter in ["source", "destination"] {
            let text = until(&world.shared.metrics, &total("connections_closed", reporter, 1)).await;
            assert!(!text.contains("connections_failed_total{"), "{text}");
        }
    }
}

#[tokio::test]
async fn what_policies_no_longer_permit_is_reset_at_both_ends() {
    let world = World::new().await;
    let (mut caller, mut server, relay) = relayed(&world).await;
    let applications = async {
        caller.write_all(b"x").await.unwrap();
        server.read_exact(&mut [0]).await.unwrap();
        world.mesh.send_replace(mesh(&[deny_port(8080)]));
        assert!(is_reset(caller.read(&mut [0]).await));
        assert!(is_reset(server.read(&mut [0]).await));
    };
    timeout(DEADLINE, async { tokio::join!(relay, applications) })
        .await
        .unwrap();
    // As with a tunnel: at the server it is a failure of the proxy's making, at the client a reset of the far end's.
    until(
        &world.shared.metrics,
        &total("connections_failed", "destination", 1),
    )
    .await;
    let text = until(&world.shared.metrics, &total("connections_closed", "source", 1)).await;
    assert!(
        !text.contains(&total("connections_failed", "source", 1)),
        "{text}"
    );
}

#[test]
fn only_a_new_certificate_is_looked_at_anew() {
    let ca = TestCa::new();
    let made = |account: &str| Arc::new(Credentials::new(&ca.svid(&id(account))).unwrap());
    let (web, cart) = (made("web"), made("cart"));
    let met = Met::default();
    let (client, server) = (id("web"), id("cart"));
    met.check((&client, &web), (&server, &cart)).unwrap();
    let kept = || met.0.lock().unwrap()[&(client.clone(), server.clone())].0.clone();
    let is = |pair: Ends<Weak<Credentials>>, [one, other]: [&Arc<Credentials>; 2]| {
        pair.0.ptr_eq(&Arc::downgrade(one)) && pair.1.ptr_eq(&Arc::downgrade(other))
    };
    assert!(is(kept(), [&web, &cart]));
    let renewed = made("cart");
    met.check((&client, &web), (&server, &renewed)).unwrap();
    assert!(is(kept(), [&web, &renewed]));
    // Not one of the same authority; and a pair that is refused does not stay as one that was not.
    let other = Arc::new(Credentials::new(&TestCa::new().svid(&server)).unwrap());
    met.check((&client, &web), (&server, &other)).unwrap_err();
    assert!(is(kept(), [&web, &renewed]));
}

/// The server's workload is gone, so that its side waits.
#[tokio::test]
async fn a_connection_ends_when_either_end_is_revoked() {
    for revoked in ["web", "cart"] {
        let ca = Arc::new(TestCa::new());
        let (revocations, publisher) = Revocations::fixed(ca.crl(&[], |_| {}).der());
        let rules = PeerRules {
            revocations,
            ..PeerRules::default()
        };
        let cas = vec![("web", Arc::clone(&ca)), ("cart", Arc::clone(&ca))];
        let config = Config {
            mesh_deadline: 10 * DEADLINE,
            ..Config::default()
        };
        let world = World::under(rules, config, cas).await;
        let (mut caller, joined) = world.connect().await;
        let alone = Mesh::new(vec![workload("web", WEB)], vec![]);
        world.mesh.send_replace(Arc::new(alone));
        let pod = if revoked == "web" { &world.web } else { &world.cart };
        let current = pod.identity.current().unwrap();
        let ends = async {
            tokio::task::yield_now().await;
            publisher.publish(ca.crl(&[&current.chain()[0]], |_| {}).der());
            assert!(is_reset(caller.read(&mut [0]).await), "{revoked}");
        };
        timeout(DEADLINE, async { tokio::join!(joined, ends) })
            .await
            .unwrap();
    }
}

#[tokio::test]
async fn new_revocation_lists_are_asked_at_once() {
    let ca = TestCa::new();
    let web = ca.svid(&id("web"));
    let (revocations, publisher) = Revocations::fixed(ca.crl(&[], |_| {}).der());
    let rules = PeerRules {
        revocations,
        ..PeerRules::default()
    };
    let made = |svid: &Svid| Arc::new(Credentials::under(svid, &rules).unwrap());
    let (client, server) = (made(&web), made(&ca.svid(&id("cart"))));
    let met = Met::default();
    let check = || met.check((&id("web"), &client), (&id("cart"), &server));
    check().unwrap();
    publisher.publish(ca.crl(&[], |_| {}).der());
    check().unwrap();
    publisher.publish(ca.crl(&[&web.chain[0]], |_| {}).der());
    let refused = check().unwrap_err();
    assert!(
        crate::proxy::record::chain(&refused).contains("revoked"),
        "{refused:?}"
    );
}
