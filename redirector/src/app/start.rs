//! The start of what pods are served with: rights and limits of the process, the mesh, certificates, rules.

use std::sync::Arc;

use prometheus_client::registry::Registry;
use tokio::{
    sync::watch,
    task::JoinSet,
    time::{Duration, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::{Error, end};
use crate::{
    config::{Config, MeshSource, planes::Certificates},
    control_plane::kubernetes::Kubernetes,
    discovery::{
        demand::Demand,
        file::{self, FileSource},
        state::State,
        xds,
    },
    identity::{
        self, CertSource,
        crl_file::Revocations,
        dev_ca::{self, DevCa},
        files::Files,
        istio_ca::IstioCa,
        kubernetes_csr::{self, KubernetesCsr},
        renew::Renewing,
        store::Store,
        trust::PeerRules,
        workload_api::WorkloadApi,
    },
    mesh::index::Mesh,
    pods::rules::{NodeRules, RulesFile},
    redirect::{Redirector, none::NoRedirect},
    sys::{process, socket},
};

/// The tasks that serve: ended after the pods.
#[derive(Default)]
pub(super) struct Serving {
    pub(super) tasks: JoinSet<()>,
    pub(super) stop: CancellationToken,
}

impl Serving {
    /// Starts a task that ends when the token is cancelled.
    pub(super) fn spawn<T: Future<Output = ()> + Send + 'static>(
        &mut self,
        task: impl FnOnce(CancellationToken) -> T,
    ) {
        self.tasks.spawn(task(self.stop.clone()));
    }

    pub(super) async fn end(self) {
        self.stop.cancel();
        end(self.tasks).await;
    }
}

/// What is known of the mesh and its identities.
pub(super) struct Known {
    pub(super) mesh: watch::Receiver<Arc<Mesh>>,
    /// What the control plane has still to tell.
    pub(super) awaited: xds::Awaited,
    pub(super) demand: Option<Demand>,
    pub(super) identities: Arc<Store>,
}

impl Known {
    pub(super) fn start(
        config: &Config,
        registry: &mut Registry,
        serving: &mut Serving,
    ) -> Result<Self, Error> {
        let demand = config.xds_on_demand.then(Demand::default);
        let (mesh, awaited) = start_mesh(config, demand.clone(), registry, serving)?;
        let rules = PeerRules {
            aliases: config.trust_domain_aliases.clone(),
            revocations: config
                .crl_file
                .as_deref()
                .map(Revocations::follow)
                .unwrap_or_default(),
        };
        let identities = Store::new(certificates(config)?, rules);
        identity::metrics::register(registry, Arc::clone(&identities));
        Ok(Self {
            mesh,
            awaited,
            demand,
            identities,
        })
    }
}

/// Has the process as an agent's is to be: with the rights that it needs, room for files, and no core files.
pub(super) fn prepare_process() -> Result<(), Error> {
    check_rights()?;
    raise_limits();
    if let Err(error) = process::forbid_core_files() {
        warn!(%error, "core files of this process may be written, with the keys of its pods in them");
    }
    Ok(())
}

/// Whether the files that the configuration names, and that end an agent at its start when they are wrong, are right. What they ask
/// of the backend is not looked at.
///
/// # Errors
/// What is wrong with the first.
pub fn check_files(config: &Config) -> Result<(), Error> {
    match &config.mesh {
        MeshSource::File(path) => drop(FileSource::open(path).map_err(Error::Workloads)?),
        MeshSource::Inline(text) => drop(file::parse(text, "LOCAL_XDS").map_err(Error::Workloads)?),
        MeshSource::None => {}
    }
    if let Some(path) = &config.rules {
        RulesFile::open(path, Arc::new(NoRedirect)).map_err(Error::Rules)?;
    }
    Ok(())
}

/// Whether the process may do what capturing pods needs.
///
/// # Errors
/// What it lacks, by name.
pub fn check_rights() -> Result<(), Error> {
    let missing = process::missing_capabilities().map_err(|source| Error::System {
        operation: "find out the process's capabilities",
        source,
    })?;
    if !missing.is_empty() {
        return Err(Error::Capabilities { missing });
    }
    Ok(())
}

fn raise_limits() {
    match socket::raise_file_limit() {
        Ok(limit) => info!(limit, "limit of open files"),
        Err(error) => warn!(%error, "cannot raise the limit of open files"),
    }
    // Where it is too low, loading the programs says so.
    if let Err(error) = process::raise_memlock_limit() {
        debug!(%error, "cannot raise the limit of locked memory");
    }
}

/// The mesh as it is now, and the tasks that follow it; and whether the control plane's part is here.
fn start_mesh(
    config: &Config,
    demand: Option<Demand>,
    registry: &mut Registry,
    serving: &mut Serving,
) -> Result<(watch::Receiver<Arc<Mesh>>, xds::Awaited), Error> {
    let (source, file) = match &config.mesh {
        MeshSource::File(path) => {
            let (source, mesh) = FileSource::open(path).map_err(Error::Workloads)?;
            (Some(source), Some(mesh))
        }
        MeshSource::Inline(text) => {
            let mesh = file::parse(text, "LOCAL_XDS").map_err(Error::Workloads)?;
            (None, Some(mesh))
        }
        MeshSource::None => (None, None),
    };
    if file.is_none() && config.xds.is_none() {
        warn!(
            "neither a workload file (--workloads) nor a control plane (XDS_ADDRESS): no workload is known, so every connection of an \
             enrolled pod is refused"
        );
    }
    let (mut state, handle, receiver) = State::new(file);
    if config.xds.is_some() {
        state.await_policies();
    }
    serving.spawn(|stop| state.run(stop));
    if let Some(source) = source {
        serving.spawn(|stop| source.run(handle.clone(), stop));
    }
    log_mesh(&receiver);
    let Some(plane) = &config.xds else {
        return Ok((receiver, watch::channel(Vec::new()).1));
    };
    let metrics = Arc::new(xds::Metrics::default());
    metrics.register(registry);
    let (client, awaited) = xds::Client::new(
        plane.0.clone(),
        config.xds_identity.clone(),
        handle,
        demand,
        metrics,
    );
    serving.spawn(|stop| client.run(stop));
    Ok((receiver, awaited))
}

/// The rules for the pods, and the task that follows their file.
pub(super) fn start_rules(
    config: &Config,
    redirector: &Arc<dyn Redirector>,
    serving: &mut Serving,
) -> Result<watch::Receiver<Arc<NodeRules>>, Error> {
    let Some(path) = &config.rules else {
        return Ok(watch::channel(Arc::default()).1);
    };
    let (file, rules) = RulesFile::open(path, Arc::clone(redirector)).map_err(Error::Rules)?;
    let (sender, receiver) = watch::channel(Arc::new(rules));
    serving.spawn(|stop| file.run(sender, stop));
    Ok(receiver)
}

fn log_mesh(mesh: &watch::Receiver<Arc<Mesh>>) {
    let mesh = mesh.borrow();
    let ((workloads, services), policies) = (mesh.len(), mesh.policies());
    info!(workloads, services, policies, "mesh loaded");
}

/// Where certificates come from. Sources that tell them unasked begin to be followed.
fn certificates(config: &Config) -> Result<Arc<dyn CertSource>, Error> {
    let lifetime = config.svid_ttl.0;
    let by_default = match &config.certificates {
        Certificates::Authority(plane) => {
            return Ok(Arc::new(Renewing::new(IstioCa::new(plane.0.clone(), lifetime))));
        }
        Certificates::Signer(signer) => {
            let config = kubernetes_csr::Config {
                signer: signer.name.clone(),
                roots: signer.roots.clone(),
                approve: signer.approve,
                lifetime,
            };
            let kubernetes = Kubernetes::new(signer.cluster.clone());
            return Ok(Arc::new(Renewing::new(KubernetesCsr::new(kubernetes, config))));
        }
        Certificates::Directory(path) => return Ok(Arc::new(Files::follow(path))),
        Certificates::WorkloadApi(address) => return Ok(Arc::new(WorkloadApi::follow(address.clone()))),
        Certificates::DevCa { by_default } => *by_default,
    };
    if by_default {
        warn!(
            directory = %config.ca_dir.display(),
            "no CA is configured: certificates come from the built-in development CA, whose key lies on this node; only \
             nodes that share it can talk to each other (FAKE_CA=true says that this is meant)"
        );
    }
    let settings = dev_ca::Config { lifetime };
    let ca = DevCa::load_or_create(&config.ca_dir, settings).map_err(Error::DevCa)?;
    Ok(Arc::new(Renewing::new(ca)))
}

/// Gives back soon what a burst has left.
pub(super) async fn release_memory(stop: CancellationToken) {
    const INTERVAL: Duration = Duration::from_secs(10);
    while timeout(INTERVAL, stop.cancelled()).await.is_err() {
        // It holds up whoever allocates at that moment, for some milliseconds per gigabyte.
        let _ = tokio::task::spawn_blocking(process::release_memory).await;
    }
}
