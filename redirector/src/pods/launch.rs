//! What the lifecycle asks of a pod's surroundings: its addresses, its identity, its proxy. A trait, so that tests of the
//! lifecycle need neither namespaces nor sockets.

use std::{
    collections::HashMap,
    future::Future,
    io,
    net::IpAddr,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tracing::warn;

use super::Error;
use crate::{
    mesh::{
        pod::{Local, PodInfo, PodUid},
        spiffe::SpiffeId,
    },
    proxy::{PodContext, PodProxy, Shared},
    redirect::Serving,
    sys::{
        interfaces::{self, InterfaceAddress},
        netns::{Netns, NetnsId},
    },
};

/// A pod whose proxy is to start.
#[derive(Debug, Clone)]
pub struct NewPod {
    /// Who it is.
    pub info: PodInfo,
    /// Its namespace.
    pub netns: Arc<Netns>,
    /// All its addresses.
    pub addresses: Vec<IpAddr>,
    /// Whether it is refused to speak in plain.
    pub strict: bool,
}

/// A pod's surroundings.
pub trait Launch: Send + Sync + 'static {
    /// A running proxy.
    type Proxy: Send + Sync + 'static;

    /// All addresses in a namespace. Blocking.
    fn addresses(&self, netns: &Netns) -> io::Result<Vec<InterfaceAddress>>;

    /// Starts the proxy of a pod: its identity first, then its listeners. Blocking; called within a tokio runtime.
    fn start(&self, pod: NewPod) -> Result<Self::Proxy, Error>;

    /// The proxy's listeners.
    fn serving<'a>(&self, proxy: &'a Self::Proxy) -> Serving<'a>;

    /// Whether what the pod would send or get in plain is refused from now on. Open connections in plain end with it.
    fn set_strict(&self, proxy: &Self::Proxy, strict: bool);

    /// Stops a proxy. Its connections have `grace` to end; then they are closed.
    fn stop(&self, proxy: Self::Proxy, grace: Duration) -> impl Future<Output = ()> + Send;

    /// The agent ends, and the pod stays captured: its connections have `grace` to end with the agent.
    fn leave(&self, proxy: Self::Proxy, grace: Duration) -> impl Future<Output = ()> + Send {
        self.stop(proxy, grace)
    }

    /// A pod that has no proxy here is gone.
    fn forget(&self, _uid: &PodUid) -> impl Future<Output = ()> + Send {
        std::future::ready(())
    }
}

/// The listeners of a pod's proxy: duplicates of them, for another agent.
#[derive(Debug)]
pub struct Served {
    /// Which pod.
    pub uid: PodUid,
    /// Its namespace.
    pub netns: NetnsId,
    /// Those on ports 15001, 15006 and 15008.
    pub listeners: [OwnedFd; 3],
}

/// Listeners that another agent has handed over, for the pods that are to come.
#[derive(Debug, Default)]
pub struct Inherited(Mutex<HashMap<PodUid, Served>>);

impl Inherited {
    /// Keeps those of a pod.
    pub fn put(&self, served: Served) {
        self.pods().insert(served.uid.clone(), served);
    }

    /// Those of a pod in this namespace.
    fn take(&self, uid: &PodUid, netns: NetnsId) -> Option<[OwnedFd; 3]> {
        let served = self.pods().remove(uid)?;
        (served.netns == netns).then_some(served.listeners)
    }

    /// Closes those that no pod has taken, and tells whose they were.
    pub fn close(&self) -> Vec<PodUid> {
        let mut left: Vec<_> = self.pods().drain().map(|(uid, _)| uid).collect();
        left.sort_unstable();
        left
    }

    fn pods(&self) -> MutexGuard<'_, HashMap<PodUid, Served>> {
        // Each change is one call: a panic elsewhere leaves it whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The real surroundings.
pub struct PodProxies {
    shared: Arc<Shared>,
    trust_domain: String,
    inherited: Arc<Inherited>,
}

impl PodProxies {
    /// Proxies that share `shared`. Pods that the mesh does not know are in `trust_domain`; those that others have served go on with
    /// the listeners that are `inherited`.
    pub fn new(shared: Arc<Shared>, trust_domain: String, inherited: Arc<Inherited>) -> Self {
        Self {
            shared,
            trust_domain,
            inherited,
        }
    }

    /// A pod that the mesh does not know is captured all the same: its connections are refused, and not sent in plain.
    fn warn_if_unknown(&self, info: &PodInfo) {
        let mesh = Arc::clone(&self.shared.mesh.borrow());
        if mesh.local(self.local(info)).is_none() {
            warn!(
                uid = %info.uid, name = info.name, namespace = info.namespace, service_account = info.service_account,
                "the mesh has no workload of this name, namespace and service account: the pod's connections are refused \
                 until it has"
            );
        }
    }

    fn local<'a>(&'a self, info: &'a PodInfo) -> Local<'a> {
        Local {
            info,
            home: &self.shared.config.home,
        }
    }

    /// Namespace and service account are the event's; the trust domain is the mesh's.
    fn identity(&self, info: &PodInfo) -> Result<SpiffeId, Error> {
        let mesh = Arc::clone(&self.shared.mesh.borrow());
        let home = &self.shared.config.home;
        let workload = mesh.local(self.local(info));
        let workload = workload.or_else(|| mesh.pod(&info.namespace, &info.name, home));
        let trust_domain = workload.map_or(self.trust_domain.as_str(), |workload| &workload.trust_domain);
        SpiffeId::new(trust_domain, &info.namespace, &info.service_account).map_err(|source| {
            Error::Identity {
                pod: format!("{}/{}", info.namespace, info.name),
                source,
            }
        })
    }
}

impl Launch for PodProxies {
    type Proxy = PodProxy;

    fn addresses(&self, netns: &Netns) -> io::Result<Vec<InterfaceAddress>> {
        interfaces::interface_addresses(netns)
    }

    fn start(&self, pod: NewPod) -> Result<PodProxy, Error> {
        let NewPod {
            info,
            netns,
            addresses,
            strict,
        } = pod;
        let identity = self.shared.identities.hold(&self.identity(&info)?);
        if self.shared.demand.is_none() {
            self.warn_if_unknown(&info);
        }
        let listeners = self.inherited.take(&info.uid, netns.id());
        PodProxy::start(
            Arc::clone(&self.shared),
            PodContext {
                info,
                identity,
                netns,
                addresses,
                strict,
                listeners,
            },
        )
        .map_err(Error::Start)
    }

    fn serving<'a>(&self, proxy: &'a PodProxy) -> Serving<'a> {
        Serving::Own(proxy.listeners())
    }

    fn set_strict(&self, proxy: &PodProxy, strict: bool) {
        proxy.set_strict(strict);
    }

    async fn stop(&self, proxy: PodProxy, grace: Duration) {
        proxy.stop(grace).await;
    }
}
