//! One round: an empty mesh that is filled, changed and read.

use std::{
    fs, hint,
    net::{IpAddr, Ipv4Addr},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use redirector::{
    discovery::state::State,
    mesh::{
        index::{Mesh, Update},
        service::{IpFamilies, LoadBalancer, Service},
        strings::Strings,
        workload::{Locality, NamespacedHostname, NetworkAddress, Protocol, Workload, WorkloadUid},
    },
    sys::process::release_memory,
};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::Sizes;
use crate::{stats::quantile, table::Goal};

/// A figure of one round.
type Figure = (&'static str, &'static str, Option<Goal>, f64);

const NAMESPACES: u32 = 500;
const NODES: u32 = 1000;

/// Look-ups between two looks at the clock, which costs as much as one of them.
const LOOKUPS: u32 = 16;

pub(super) fn round(sizes: Sizes) -> Result<Vec<Figure>> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let figures = runtime.block_on(filled(sizes));
    runtime.shutdown_timeout(Duration::from_secs(5));
    figures
}

async fn filled(sizes: Sizes) -> Result<Vec<Figure>> {
    release_memory();
    let before = resident_bytes()?;
    let (state, handle, readers) = State::new(None);
    let stop = CancellationToken::new();
    let owner = tokio::spawn(state.run(stop.clone()));
    let updates = everything(sizes);
    let start = Instant::now();
    handle.apply(updates).await?;
    let load = start.elapsed();
    ensure!(readers.borrow().len() == (sizes.workloads as usize, sizes.services as usize));
    // What making the updates has taken, and the old snapshot.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    release_memory();
    let bytes = resident_bytes()?.saturating_sub(before);

    let alone = reading(&readers, sizes, || thread::sleep(Duration::from_millis(500)));
    let mut single = Vec::new();
    let (reading_on, mut writes) = (Reader::start(&readers, sizes), 0_u32);
    let begun = Instant::now();
    for number in 0..sizes.updates {
        let mut changed = workload(number % sizes.workloads, sizes);
        changed.canonical_revision = format!("v{}", number % 7).into();
        let update = vec![Update::Workload(Arc::new(changed))];
        let start = Instant::now();
        handle.apply(update).await?;
        single.push(start.elapsed().as_secs_f64() * 1e6);
        writes += 1;
    }
    let rate = f64::from(writes) / begun.elapsed().as_secs_f64();
    let beside = reading_on.stop();
    let in_place = applied(&readers.borrow().clone(), sizes);
    stop.cancel();
    owner.await.context("the owner of the mesh")?;

    single.sort_by(f64::total_cmp);
    Ok(vec![
        (
            "load of everything in one message",
            "s",
            Some(Goal::AtMost(5.0)),
            load.as_secs_f64(),
        ),
        (
            "memory per workload, services and indexes included",
            "bytes",
            Some(Goal::AtMost(1536.0)),
            bytes as f64 / f64::from(sizes.workloads),
        ),
        (
            "one update applied to a snapshot's clone, median",
            "us",
            Some(Goal::AtMost(100.0)),
            in_place,
        ),
        (
            "one update from its source to its visibility, median",
            "us",
            None,
            quantile(&single, 0.5),
        ),
        (
            "one update from its source to its visibility, p99",
            "us",
            None,
            quantile(&single, 0.99),
        ),
        ("updates one by one", "1/s", None, rate),
        (
            "look-up by address, no writer, median",
            "ns",
            None,
            quantile(&alone, 0.5),
        ),
        (
            "look-up by address, no writer, p99",
            "ns",
            None,
            quantile(&alone, 0.99),
        ),
        (
            "look-up by address, beside a writer at full speed, median",
            "ns",
            None,
            quantile(&beside, 0.5),
        ),
        (
            "look-up by address, beside a writer at full speed, p99",
            "ns",
            None,
            quantile(&beside, 0.99),
        ),
    ])
}

/// What a change of a mesh costs whose snapshot others hold, microseconds.
fn applied(mesh: &Arc<Mesh>, sizes: Sizes) -> f64 {
    let times = (0..1000.min(sizes.workloads)).map(|number| {
        let update = Update::Workload(Arc::new(workload(number, sizes)));
        let start = Instant::now();
        let mut changed = Mesh::clone(mesh);
        changed.apply(update);
        hint::black_box(&changed);
        start.elapsed().as_secs_f64() * 1e6
    });
    let mut times: Vec<_> = times.collect();
    times.sort_by(f64::total_cmp);
    quantile(&times, 0.5)
}

/// Looks addresses up until it is stopped.
struct Reader {
    stop: Arc<AtomicBool>,
    thread: thread::JoinHandle<Vec<f64>>,
}

impl Reader {
    fn start(readers: &watch::Receiver<Arc<Mesh>>, sizes: Sizes) -> Self {
        let (stop, readers) = (Arc::new(AtomicBool::new(false)), readers.clone());
        let stopped = stop.clone();
        let thread = thread::spawn(move || {
            let (mut times, mut number) = (Vec::new(), 0_u32);
            while !stopped.load(Ordering::Relaxed) {
                let start = Instant::now();
                for _ in 0..LOOKUPS {
                    number = number.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    let mesh = readers.borrow().clone();
                    hint::black_box(mesh.workload_at("", address(number % sizes.workloads)));
                }
                times.push(start.elapsed().as_secs_f64() * 1e9 / f64::from(LOOKUPS));
            }
            times.sort_by(f64::total_cmp);
            times
        });
        Self { stop, thread }
    }

    fn stop(self) -> Vec<f64> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap_or_default()
    }
}

fn reading(readers: &watch::Receiver<Arc<Mesh>>, sizes: Sizes, meanwhile: impl FnOnce()) -> Vec<f64> {
    let reader = Reader::start(readers, sizes);
    meanwhile();
    reader.stop()
}

fn everything(sizes: Sizes) -> Vec<Update> {
    let services = (0..sizes.services).map(|number| Update::Service(Arc::new(service(number))));
    let workloads = (0..sizes.workloads).map(|number| Update::Workload(Arc::new(workload(number, sizes))));
    // As a source does it.
    let mut strings = Strings::default();
    let shared = services.chain(workloads).map(|mut update| {
        update.share(&mut strings);
        update
    });
    shared.collect()
}

fn namespace(number: u32) -> Arc<str> {
    format!("team-{:03}-production", number % NAMESPACES).into()
}

fn host(number: u32) -> NamespacedHostname {
    let namespace = namespace(number);
    let hostname = format!("service-{number:05}.{namespace}.svc.cluster.local");
    NamespacedHostname {
        namespace,
        hostname: hostname.into(),
    }
}

fn service(number: u32) -> Service {
    Service {
        host: host(number),
        name: format!("service-{number:05}").into(),
        vips: vec![NetworkAddress {
            network: Arc::default(),
            address: IpAddr::from((0x0a60_0000 + number).to_be_bytes()),
        }],
        cidr_vips: vec![],
        ports: [(80, 8080), (443, 8443)].into_iter().collect(),
        subject_alt_names: vec![],
        waypoint: None,
        weighted_waypoints: vec![],
        load_balancer: LoadBalancer::default(),
        ip_families: IpFamilies::Any,
        canonical: false,
        namespace_only: false,
    }
}

fn address(number: u32) -> IpAddr {
    Ipv4Addr::from(0x6440_0000 + number).into()
}

/// As a control plane tells of a deployment's pod: texts of usual lengths, each made anew.
fn workload(number: u32, sizes: Sizes) -> Workload {
    let (own, other) = (number % sizes.services, (number + NAMESPACES) % sizes.services);
    let namespace = namespace(own);
    let name = format!("service-{own:05}-5d4f8c7b9d-{number:05x}");
    let ports = || Arc::new([(80, 8080), (443, 8443)].into_iter().collect());
    let app: Arc<str> = format!("service-{own:05}").into();
    Workload {
        uid: WorkloadUid(format!("Kubernetes//Pod/{namespace}/{name}").into()),
        name: name.into(),
        service_account: app.to_string().into(),
        namespace,
        trust_domain: "cluster.local".into(),
        addresses: vec![address(number)],
        hostname: Arc::default(),
        network: Arc::default(),
        protocol: Protocol::Hbone,
        host_network: false,
        node: format!("ip-10-0-{}.eu-west-1.compute.internal", number % NODES).into(),
        cluster_id: "Kubernetes".into(),
        locality: Locality {
            region: "eu-west-1".into(),
            zone: format!("eu-west-1{}", ["a", "b", "c"][number as usize % 3]).into(),
            subzone: Arc::default(),
        },
        waypoint: None,
        network_gateway: None,
        application_tunnel: None,
        healthy: true,
        capacity: 1,
        services: [(host(own), ports()), (host(other), ports())]
            .into_iter()
            .collect(),
        canonical_name: app.to_string().into(),
        canonical_revision: "v1".into(),
        workload_name: app,
        workload_type: "deployment",
        authorization_policies: vec![],
    }
}

/// Resident memory of this process, bytes.
fn resident_bytes() -> Result<u64> {
    let statm = fs::read_to_string("/proc/self/statm").context("reading /proc/self/statm")?;
    let pages: u64 = statm.split(' ').nth(1).unwrap_or_default().parse()?;
    Ok(pages * u64::from(nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE)?.unwrap_or(4096) as u32))
}
