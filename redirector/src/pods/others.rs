//! Pods whose proxy is another process, driven over ZDS: what `launch` asks of a pod's surroundings, by `zds_server`.

use std::{io, sync::Arc, time::Duration};

use tokio::runtime::Handle;
use tracing::warn;

use super::{
    Error,
    launch::{Launch, NewPod},
    zds_server::Proxies,
};
use crate::{
    mesh::pod::PodUid,
    redirect::Serving,
    sys::{
        interfaces::{self, InterfaceAddress},
        netns::Netns,
    },
};

/// The proxies that are connected serve all pods.
pub struct OtherProxies(Arc<Proxies>);

impl OtherProxies {
    /// By these connections.
    pub fn new(proxies: Arc<Proxies>) -> Self {
        Self(proxies)
    }
}

/// A pod that a proxy has acknowledged.
pub struct Served(PodUid);

impl Launch for OtherProxies {
    type Proxy = Served;

    fn addresses(&self, netns: &Netns) -> io::Result<Vec<InterfaceAddress>> {
        interfaces::interface_addresses(netns)
    }

    fn start(&self, pod: NewPod) -> Result<Served, Error> {
        if pod.strict {
            return Err(Error::StrictByAnother);
        }
        let added = Handle::current().block_on(self.0.add(&pod.info, &pod.netns));
        added.map_err(Error::OtherProxy)?;
        Ok(Served(pod.info.uid))
    }

    fn serving<'a>(&self, _: &'a Served) -> Serving<'a> {
        Serving::Others(self.0.peers())
    }

    fn set_strict(&self, Served(uid): &Served, strict: bool) {
        if strict {
            warn!(%uid, "the rules want the pod to be strict, which its proxy, another process, is not told: that is for the mesh's policies");
        }
    }

    // A proxy ends a pod's connections at once when the pod is deleted: to hold the delete back would serve them no longer.
    async fn stop(&self, Served(uid): Served, _grace: Duration) {
        self.0.remove(&uid).await;
    }

    // Proxies outlive the agent, and so do their pods' connections.
    async fn leave(&self, _: Served, _grace: Duration) {}

    async fn forget(&self, uid: &PodUid) {
        self.0.remove(uid).await;
    }
}
