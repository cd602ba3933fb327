use std::{fs, io::Write, net::SocketAddr, time::Duration};

use proptest::prelude::*;

use super::*;
use crate::discovery::state::State;
use crate::mesh::{
    pod::{Home, Local, PodInfo},
    route::{Route, outbound},
    service::{IpFamilies, LoadBalancerMode, Scope},
    workload::{ApplicationTunnel, GatewayDestination, Protocol},
};

const FULL: &str = r#"
workloads:
- workloadIps: ["10.0.0.1", "::ffff:10.0.0.2", "fd00::1"]
  namespace: shop
  uid: Kubernetes//Pod/shop/cart-0
  name: cart-0
  serviceAccount: cart
  trustDomain: cluster.local
  network: ""
  protocol: HBONE
  networkMode: Standard
  workloadName: cart
  workloadType: deployment
  canonicalName: cart
  canonicalRevision: v1
  hostname: ""
  node: n1
  nativeTunnel: false
  authorizationPolicies: []
  status: Healthy
  clusterId: Kubernetes
  locality: {region: r, zone: z, subzone: s}
  capacity: 3
  services:
    shop/cart.shop.svc.cluster.local: {80: 8080}
- workloadIps: ["10.0.0.9"]
  namespace: shop
  name: web-0
  serviceAccount: web
  trustDomain: cluster.local
  services: {}
  waypoint: {destination: "/10.0.0.7", hboneMtlsPort: 15008}
  networkGateway: {destination: "gateways/gw.example.org"}
  applicationTunnel: {protocol: PROXY, port: 15088}
  status: Unhealthy
services:
- name: cart
  namespace: shop
  hostname: cart.shop.svc.cluster.local
  vips: ["/10.96.0.1", "net2/fd96::1"]
  ports: {80: 8080, 81: 0}
  cidrVips: [{cidr: 10.97.0.0/16}, {cidr: "fd97::/64", network: net2}]
  endpoints: {}
  weightedWaypoints:
  - {destination: {destination: "shop/way.example.org", hboneMtlsPort: 16008}, weight: 3}
  - {destination: "/10.0.0.7", weight: 0}
  subjectAltNames: ["spiffe://cluster.local/ns/shop/sa/alias"]
  loadBalancer:
    routingPreferences: [Region, Node]
    mode: Failover
    healthPolicy: AllowAll
  ipFamilies: IPv4
  canonical: true
  visibility: Namespace
policies: []
"#;

fn error(text: &str) -> String {
    parse(text, "mesh.yaml").unwrap_err().to_string()
}

#[test]
fn every_key_arrives() {
    let mesh = parse(FULL, "mesh.yaml").unwrap();
    assert_eq!(mesh.len(), (2, 1));
    let cart = mesh.pod("shop", "cart-0", &Home::default()).unwrap();
    assert_eq!(
        cart.addresses,
        ["10.0.0.1", "10.0.0.2", "fd00::1"].map(crate::mesh::testing::ip)
    );
    assert_eq!(
        cart.identity().unwrap().to_string(),
        "spiffe://cluster.local/ns/shop/sa/cart"
    );
    assert_eq!(
        (cart.protocol, cart.capacity, cart.healthy),
        (Protocol::Hbone, 3, true)
    );
    assert_eq!(
        (
            &*cart.locality.region,
            &*cart.locality.zone,
            &*cart.locality.subzone
        ),
        ("r", "z", "s")
    );
    assert!(mesh.workload_at("", "10.0.0.2".parse().unwrap()).is_some());
    let web = mesh.pod("shop", "web-0", &Home::default()).unwrap();
    assert_eq!(&*web.uid.0, "Kubernetes//Pod/shop/web-0");
    assert_eq!((web.protocol, web.healthy), (Protocol::Tcp, false));
    assert_eq!(
        web.application_tunnel,
        Some(ApplicationTunnel {
            proxy_protocol: true,
            port: Some(15088)
        })
    );
    let [waypoint, gateway] = [&web.waypoint, &web.network_gateway].map(|at| at.clone().unwrap());
    assert!(matches!(&waypoint.destination, GatewayDestination::Address(at) if at.address.is_ipv4()));
    assert!(matches!(&gateway.destination, GatewayDestination::Hostname(at) if &*at.namespace == "gateways"));
    assert_eq!(gateway.hbone_mtls_port, 15008);
    let service = mesh.service_at("", "10.96.0.1".parse().unwrap(), "shop").unwrap();
    assert!(
        mesh.service_at("net2", "fd96::1".parse().unwrap(), "shop")
            .is_some()
    );
    for (network, address) in [("", "10.97.4.5"), ("net2", "fd97::9")] {
        assert!(
            mesh.service_at(network, address.parse().unwrap(), "shop")
                .is_some()
        );
    }
    let weighted: Vec<_> = service
        .weighted_waypoints
        .iter()
        .map(|one| {
            (
                one.destination.to_string(),
                one.destination.hbone_mtls_port,
                one.weight,
            )
        })
        .collect();
    assert_eq!(
        weighted,
        [
            ("shop/way.example.org".to_owned(), 16008, 3),
            ("/10.0.0.7".to_owned(), 15008, 0)
        ]
    );
    assert_eq!(service.subject_alt_names[0].service_account(), "alias");
    assert_eq!(service.load_balancer.mode, LoadBalancerMode::Failover);
    assert_eq!(
        service.load_balancer.routing_preferences,
        [Scope::Region, Scope::Node]
    );
    assert!(service.load_balancer.allow_unhealthy && service.canonical && service.namespace_only);
    assert_eq!((service.ip_families, service.ports[&81]), (IpFamilies::V4, 0));
    assert_eq!(mesh.endpoints(&service.host).len(), 1);
}

#[test]
fn a_file_gives_routes() {
    let direct: String = FULL
        .lines()
        .filter(|line| !line.contains("eight"))
        .map(|line| format!("{line}\n"))
        .collect();
    let mesh = parse(&direct, "mesh.yaml").unwrap();
    let info = PodInfo {
        uid: "u".parse().unwrap(),
        name: "web-0".into(),
        namespace: "shop".into(),
        service_account: "web".into(),
    };
    let client = "10.0.0.9".parse().unwrap();
    let to: SocketAddr = "10.96.0.1:80".parse().unwrap();
    let route = outbound(
        &mesh,
        Local {
            info: &info,
            home: &Home::default(),
        },
        client,
        to,
        &mut |_| 0,
    )
    .unwrap();
    let Route::Hbone(route) = route else {
        panic!("{route:?}")
    };
    assert_eq!(route.authority.to_string(), "10.0.0.1:8080");
    assert_eq!(route.expected.len(), 2);
}

/// Replaces a piece of [`FULL`] and has the error.
fn broken(from: &str, to: &str) -> String {
    assert!(FULL.contains(from), "{from}");
    error(&FULL.replacen(from, to, 1))
}

#[test]
fn errors_name_file_line_and_field() {
    for (from, to, expected) in [
        (
            "protocol: HBONE",
            "protocol: HBNE",
            "mesh.yaml, line 10, column 13: workloads[0].protocol: unknown variant `HBNE`",
        ),
        (
            "  node: n1",
            "  noed: n1",
            "mesh.yaml, line 17, column 3: workloads[0].noed: unknown field `noed`",
        ),
        (
            "\"fd00::1\"",
            "\"fd00::x\"",
            "mesh.yaml, line 3, column 48: workloads[0].workloadIps[2]: invalid IP address",
        ),
        (
            "{80: 8080}",
            "{80: 80800}",
            "mesh.yaml, line 25, column 44: workloads[0].services.shop/cart.shop.svc.cluster.local.80: invalid value: integer `80800`",
        ),
        ("{80: 8080}", "{80: 8080, 80: 9090}", "key 80 comes twice"),
        ("{80: 8080}", "{80: 0}", "expected a nonzero u16"),
        (
            "shop/cart.shop.svc",
            "cart.shop.svc",
            "is not of the form namespace/hostname",
        ),
        (
            "/10.96.0.1",
            "10.96.0.1",
            "services[0].vips[0]: \"10.96.0.1\" is not of the form network/address",
        ),
        (
            "spiffe://cluster.local/ns",
            "spiffe:///ns",
            "services[0].subjectAltNames[0]: \"spiffe:///ns/shop/sa/alias\" is not of the form",
        ),
        (
            "  trustDomain: cluster.local\n",
            "",
            "line 3, column 3: workloads[0]: workload \"Kubernetes//Pod/shop/cart-0\" has protocol HBONE, and so needs a trustDomain",
        ),
        ("  serviceAccount: cart\n", "", "needs a serviceAccount"),
        (
            "  namespace: shop\n",
            "",
            "workloads[0]: missing field `namespace`",
        ),
        (
            "  namespace: shop\n",
            "  namespace: ''\n",
            "workloads[0].namespace: must not be empty",
        ),
        (
            "cidr: 10.97.0.0/16",
            "cidr: 10.97.0.0",
            "services[0].cidrVips[0]: cidr \"10.97.0.0\" is not of the form address/length",
        ),
        (
            "cidr: 10.97.0.0/16",
            "cidr: 10.97.0.0/33",
            "services[0].cidrVips[0]: cidr \"10.97.0.0/33\" is not",
        ),
        (
            "{cidr: 10.97.0.0/16}",
            "10.97.0.0/16",
            "services[0].cidrVips[0]: invalid type: string \"10.97.0.0/16\", expected a range",
        ),
        (
            "endpoints: {}",
            "endpoints: {a: {}}",
            "services[0].endpoints: endpoints are named by the workloads",
        ),
        (
            ", weight: 3",
            "",
            "services[0].weightedWaypoints[0]: missing field `weight`",
        ),
        (
            "{destination: \"/10.0.0.7\", weight",
            "{destination: 10.0.0.7, weight",
            "services[0].weightedWaypoints[1].destination: \"10.0.0.7\" is neither",
        ),
        (
            "[Region, Node]",
            "[Planet]",
            "services[0].loadBalancer.routingPreferences[0]: unknown variant `Planet`",
        ),
        (
            "/10.0.0.7",
            "nowhere",
            "workloads[1].waypoint.destination: \"nowhere\" is neither",
        ),
        (
            "  name: web-0",
            "  uid: Kubernetes//Pod/shop/cart-0",
            "workloads[1].uid: Kubernetes//Pod/shop/cart-0 is there twice",
        ),
        ("policies: []", "polices: []", "unknown field `polices`"),
    ] {
        let error = broken(from, to);
        assert!(error.contains(expected), "{from} -> {to}: {error}");
        assert!(error.starts_with("mesh.yaml"), "{error}");
    }
}

#[test]
fn what_is_no_mesh_is_refused() {
    for text in [
        "",
        " \n",
        "[]",
        "text",
        "workloads: {}",
        "workloads: [",
        "workloads: [1]",
        "\t",
        "a: &a [*a]",
    ] {
        assert!(error(text).starts_with("mesh.yaml"), "{text:?}");
    }
    for text in ["workloads: []", "{}", "services: []\npolicies:\n"] {
        assert_eq!(parse(text, "mesh.yaml").unwrap().len(), (0, 0), "{text:?}");
    }
}

fn with_capacity(capacity: u32) -> String {
    FULL.replace("capacity: 3", &format!("capacity: {capacity}"))
}

fn capacity(mesh: &Mesh) -> u32 {
    mesh.pod("shop", "cart-0", &Home::default()).unwrap().capacity
}

/// Looks until the file stands still: what a writer that is done may expect of three seconds.
fn settle(follower: &mut Follower) -> Result<Option<u32>, Error> {
    for _ in 0..3 {
        if let Some(mesh) = follower.look()? {
            return Ok(Some(capacity(&mesh)));
        }
    }
    Ok(None)
}

#[test]
fn a_configmap_s_symlinks_are_followed() {
    let dir = tempfile::tempdir().unwrap();
    let version = |name: &str, capacity| {
        fs::create_dir(dir.path().join(name)).unwrap();
        fs::write(dir.path().join(name).join("mesh.yaml"), with_capacity(capacity)).unwrap();
    };
    let point_to = |name: &str| {
        std::os::unix::fs::symlink(name, dir.path().join("..tmp")).unwrap();
        fs::rename(dir.path().join("..tmp"), dir.path().join("..data")).unwrap();
    };
    version("..1", 1);
    point_to("..1");
    let path = dir.path().join("mesh.yaml");
    std::os::unix::fs::symlink("..data/mesh.yaml", &path).unwrap();

    let (source, mesh) = FileSource::open(&path).unwrap();
    assert_eq!(capacity(&mesh), 1);
    let mut follower = Follower::new(source);
    assert_eq!(settle(&mut follower).unwrap(), None);
    version("..2", 2);
    point_to("..2");
    assert_eq!(settle(&mut follower).unwrap(), Some(2));
    assert_eq!(settle(&mut follower).unwrap(), None);
}

#[test]
fn bad_content_and_absence_are_told_once_and_overcome() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("mesh.yaml");
    let replace = |text: &str| {
        fs::write(dir.path().join("new"), text).unwrap();
        fs::rename(dir.path().join("new"), &path).unwrap();
    };
    replace(&with_capacity(1));
    let mut follower = Follower::new(FileSource::open(&path).unwrap().0);

    replace("workloads: [");
    assert!(matches!(settle(&mut follower), Err(Error::Invalid { .. })));
    assert_eq!(settle(&mut follower).unwrap(), None);
    replace(&with_capacity(2));
    assert_eq!(settle(&mut follower).unwrap(), Some(2));

    fs::remove_file(&path).unwrap();
    assert!(matches!(settle(&mut follower), Err(Error::Read { .. })));
    assert_eq!(settle(&mut follower).unwrap(), None);
    replace(&with_capacity(2));
    assert_eq!(
        settle(&mut follower).unwrap(),
        None,
        "the same content again is no change"
    );
    replace(&with_capacity(3));
    assert_eq!(settle(&mut follower).unwrap(), Some(3));
}

#[test]
fn a_file_that_is_still_being_written_is_not_taken() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("mesh.yaml");
    fs::write(&path, with_capacity(1)).unwrap();
    let mut follower = Follower::new(FileSource::open(&path).unwrap().0);

    // Cut off where it is still good YAML: both services gone, one workload left.
    let text = with_capacity(2);
    let (start, end) = text.split_at(text.find("- workloadIps: [\"10.0.0.9\"]").unwrap());
    let mut file = fs::File::create(&path).unwrap();
    assert!(follower.look().unwrap().is_none());
    file.write_all(start.as_bytes()).unwrap();
    assert!(follower.look().unwrap().is_none());
    file.write_all(end.as_bytes()).unwrap();
    assert!(follower.look().unwrap().is_none());
    let mesh = follower.look().unwrap().unwrap();
    assert_eq!((mesh.len(), capacity(&mesh)), ((2, 1), 2));
}

#[tokio::test(start_paused = true)]
async fn the_task_sends_what_changed_and_ends_when_told() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("mesh.yaml");
    fs::write(&path, with_capacity(1)).unwrap();
    let (source, mesh) = FileSource::open(&path).unwrap();
    let (state, handle, mut receiver) = State::new(Some(mesh));
    let shutdown = CancellationToken::new();
    let _owner = tokio::spawn(state.run(shutdown.clone()));
    let task = tokio::spawn(source.run(handle, shutdown.clone()));

    fs::write(dir.path().join("new"), with_capacity(2)).unwrap();
    fs::rename(dir.path().join("new"), &path).unwrap();
    tokio::time::timeout(Duration::from_secs(60), receiver.changed())
        .await
        .unwrap()
        .unwrap();
    assert_eq!(capacity(&receiver.borrow_and_update()), 2);

    shutdown.cancel();
    tokio::time::timeout(Duration::from_secs(60), task)
        .await
        .unwrap()
        .unwrap();
}

proptest! {
    /// A good file with a piece cut out, doubled or replaced: an answer or an error with a place, and no panic.
    #[test]
    fn no_text_is_too_much(at in 0..FULL.len(), length in 0_usize..40, insert in "[ -~\\n]{0,6}") {
        let end = (at + length).min(FULL.len());
        let text = format!("{}{insert}{}", &FULL[..at], &FULL[end..]);
        if let Err(error) = parse(&text, "mesh.yaml") {
            prop_assert!(error.to_string().starts_with("mesh.yaml"));
        }
    }
}
