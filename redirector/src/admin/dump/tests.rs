use std::io::Write as _;

use serde_json::json;

use super::*;
use crate::{
    discovery::file,
    mesh::{
        index::Update,
        testing::{service, workload},
    },
};

/// All that a workload file can say of each kind of object.
const FILE: &str = r#"
workloads:
- uid: cluster-a//Pod/shop/web-0
  name: web-0
  namespace: shop
  serviceAccount: web
  trustDomain: cluster.local
  workloadIps: [10.0.0.1, "fd00::1"]
  network: near
  networkMode: HostNetwork
  protocol: HBONE
  hostname: web.example
  node: node-a
  clusterId: cluster-a
  locality: {region: r, zone: z, subzone: s}
  status: Unhealthy
  capacity: 3
  workloadName: web
  workloadType: job
  canonicalName: web
  canonicalRevision: v2
  waypoint: {destination: near/10.9.0.9, hboneMtlsPort: 15008}
  networkGateway: {destination: shop/gate.example, hboneMtlsPort: 15009}
  applicationTunnel: {protocol: PROXY, port: 7}
  authorizationPolicies: [shop/some]
  services: {shop/cart.example: {80: 8080}, shop/gone.example: {81: 8081}}
- {name: plain, namespace: shop, workloadIps: [10.0.0.2], services: {}}
services:
- name: cart
  namespace: shop
  hostname: cart.example
  vips: [near/10.9.0.1, /fd00::9]
  cidrVips: [{cidr: 10.8.0.0/16, network: near}]
  ports: {80: 0}
  subjectAltNames: ["spiffe://cluster.local/ns/shop/sa/cart"]
  waypoint: {destination: shop/way.example}
  weightedWaypoints: [{destination: {destination: near/10.9.0.8}, weight: 2}]
  loadBalancer: {routingPreferences: [Region, Zone, Subzone, Node, Cluster, Network], mode: Failover, healthPolicy: AllowAll}
  ipFamilies: IPv6
  canonical: true
  visibility: Namespace
- {name: plain, namespace: shop, hostname: plain.example, vips: [], ports: {}}
policies:
- name: some
  namespace: shop
  scope: WorkloadSelector
  action: Deny
  dryRun: true
  rules:
  - - - namespaces: [{Exact: a}, {Prefix: b}, {Suffix: c}, {Presence: []}]
        notNamespaces: [{Exact: d}]
        principals: [{Exact: cluster.local/ns/shop/sa/web}]
        notPrincipals: [{Suffix: /sa/root}]
        sourceIps: [10.0.0.0/8]
        notSourceIps: [10.1.0.0/16]
        destinationIps: ["fd00::/8"]
        notDestinationIps: [10.2.0.0/16]
        destinationPorts: [80]
        notDestinationPorts: [81]
        serviceAccounts: [{namespace: shop, serviceAccount: web}]
        notServiceAccounts: [{namespace: shop, serviceAccount: root}]
    - []
  - []
- {name: all, namespace: istio-system, scope: Global, action: Allow, rules: []}
"#;

#[derive(Serialize)]
struct Objects<'a> {
    #[serde(serialize_with = "workloads")]
    workloads: &'a Mesh,
    #[serde(serialize_with = "services")]
    services: &'a Mesh,
    #[serde(serialize_with = "policies")]
    policies: &'a Mesh,
}

fn shown(mesh: &Mesh) -> Value {
    serde_json::to_value(objects(mesh)).unwrap()
}

fn objects(mesh: &Mesh) -> Objects<'_> {
    Objects {
        workloads: mesh,
        services: mesh,
        policies: mesh,
    }
}

/// What is shown says all that was read, in the words in which it was written: else a field would be lost or wrong.
#[test]
fn what_is_shown_is_a_workload_file_that_means_the_same() {
    let mesh = file::parse(FILE, "given").unwrap();
    // As YAML: JSON has no numbers for keys.
    let mut shown = serde_yaml::to_value(objects(&mesh)).unwrap();
    for service in shown["services"].as_sequence_mut().unwrap() {
        // The workloads say who is one.
        service.as_mapping_mut().unwrap().remove("endpoints");
    }
    let again = file::parse(&serde_yaml::to_string(&shown).unwrap(), "shown").unwrap();
    let held = |mesh: &Mesh| {
        let (workloads, services) = (mesh.sorted_workloads(), mesh.sorted_services());
        format!("{workloads:#?} {services:#?} {:#?}", mesh.sorted_policies())
    };
    assert_eq!(held(&mesh), held(&again));
}

#[test]
fn endpoints_stand_with_their_service_and_without_one_apart() {
    let mesh = file::parse(FILE, "given").unwrap();
    let shown = shown(&mesh);
    let uid = "cluster-a//Pod/shop/web-0";
    let endpoint = |ports| json!({uid: {"workloadUid": uid, "port": ports, "status": "Unhealthy"}});
    assert_eq!(shown["services"][0]["endpoints"], endpoint(json!({"80": 8080})));
    assert_eq!(shown["services"][1]["endpoints"], json!({}));
    assert_eq!(
        serde_json::to_value(Staged(&mesh)).unwrap(),
        json!({"shop/gone.example": endpoint(json!({"81": 8081}))})
    );
}

#[test]
fn objects_are_in_order() {
    let mut mesh = Mesh::default();
    for name in ["c", "a", "b"] {
        mesh.apply(Update::Workload(Arc::new(workload(name, "10.0.0.1"))));
        mesh.apply(Update::Service(Arc::new(service(name, "10.9.0.1"))));
    }
    let shown = shown(&mesh);
    for kind in ["workloads", "services"] {
        let objects = shown[kind].as_array().unwrap();
        let names: Vec<_> = objects.iter().map(|object| &object["name"]).collect();
        assert_eq!(names, ["a", "b", "c"], "{kind}");
    }
}

#[tokio::test]
async fn pieces_are_bounded_and_end_with_their_reader() {
    let (sender, mut pieces) = mpsc::channel(PIECES);
    let writer = tokio::task::spawn_blocking(move || {
        let mut out = Pieces::to(sender);
        let line = [b'x'; 1000];
        let mut written = 0;
        loop {
            match out.write_all(&line) {
                Ok(()) => written += line.len(),
                Err(error) => return (written, error.kind()),
            }
        }
    });
    let piece = pieces.recv().await.unwrap();
    assert!((PIECE_BYTES..PIECE_BYTES + 1000).contains(&piece.len()));
    drop(pieces);
    let (written, error) = writer.await.unwrap();
    assert_eq!(error, io::ErrorKind::BrokenPipe);
    assert!(written < (PIECES + 2) * (PIECE_BYTES + 1000), "{written}");
}
