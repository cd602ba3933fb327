//! ZDS as the node agent's side of it: we listen, as istio-cni does, and proxies that are other processes connect (ztunnel, or another
//! agent with `--inpod-uds`). They are told of the pods and given each pod's network namespace.
//!
//! The socket and the taking of connections are here; `connection` is the talk with one proxy, `proxies` what all of them are told, and
//! `pods::others` starts and stops a pod's proxy by it. Each connection has a task of its own, so that one that hangs holds up no other.

use std::{io, path::Path, sync::Arc, time::Duration};

use tokio::{
    task::{JoinSet, spawn_blocking},
    time::sleep,
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use self::connection::End;
use super::socket_file::{self, BindError, SocketFile};
use crate::{
    redirect::Peer,
    sys::{
        cgroups::{self, Hierarchy},
        pidfd::Process,
        seqpacket::{Listener, Seqpacket},
    },
};

mod connection;
mod proxies;

pub use self::connection::check;
pub use self::proxies::{Error, Proxies};

/// The flag that chooses another path.
const FLAG: &str = "--ztunnel-uds";

/// Time between two connections that are taken: istio-cni takes 5 a second.
const ACCEPT_INTERVAL: Duration = Duration::from_millis(200);

/// Time to wait when no connection can be taken, as when files run out.
const ACCEPT_BACKOFF: Duration = Duration::from_secs(1);

/// The listening socket.
#[derive(Debug)]
pub struct ZdsServer {
    listener: Listener,
    file: SocketFile,
    proxies: Arc<Proxies>,
}

impl ZdsServer {
    /// Listens at `path`, with mode 0660. A socket that nobody serves any more is replaced. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// When somebody serves it (istio-cni, say), it is no socket, or the system refuses.
    pub fn bind(path: &Path, proxies: Arc<Proxies>) -> Result<Self, BindError> {
        let (listener, file) = socket_file::bind(path, FLAG, 0o660, Listener::bind)?;
        Ok(Self {
            listener,
            file,
            proxies,
        })
    }

    /// Serves until `stop`, then removes the socket.
    pub async fn run(self, stop: CancellationToken) {
        let Self {
            listener,
            file,
            proxies,
        } = self;
        let mut connections = JoinSet::new();
        loop {
            let accepted = tokio::select! {
                () = stop.cancelled() => break,
                Some(_) = connections.join_next() => continue,
                accepted = listener.accept() => accepted,
            };
            let pause = match accepted {
                Ok(socket) => {
                    connections.spawn(serve(socket, Arc::clone(&proxies), stop.clone()));
                    ACCEPT_INTERVAL
                }
                Err(error) => {
                    warn!(path = %file.path().display(), %error, "cannot take a proxy's connection");
                    ACCEPT_BACKOFF
                }
            };
            tokio::select! {
                () = stop.cancelled() => break,
                () = sleep(pause) => {}
            }
        }
        // Proxies keep their pods when a connection ends.
        connections.shutdown().await;
        drop(file);
    }
}

async fn serve(socket: Seqpacket, proxies: Arc<Proxies>, stop: CancellationToken) {
    let process = match socket.peer() {
        Ok(process) => process,
        // By its mark alone a pod that sets the same would pass for it.
        Err(error) => {
            warn!(%error, "a proxy whose process can't be told is refused");
            return;
        }
    };
    let pid = process.pid();
    let told = {
        let process = process.clone();
        spawn_blocking(move || cgroup_of(&process)).await
    };
    let cgroup = match told.unwrap_or_else(|_| Err(io::Error::other("internal fault"))) {
        Ok(cgroup) => cgroup,
        Err(error) => {
            warn!(pid, %error, "a proxy whose cgroup can't be told is refused");
            return;
        }
    };
    if cgroup.is_none() {
        warn!(
            pid,
            "no cgroup2 is mounted, by which the proxy could be told: what has its mark (0x539) is taken for the proxy's, though pods \
             with CAP_NET_ADMIN or CAP_NET_RAW can set that too"
        );
    }
    let registered = proxies.register(Peer { process, cgroup });
    let (id, close) = (registered.id, registered.close.clone());
    info!(connection = id, pid, ?cgroup, "a proxy has connected");
    let end = tokio::select! {
        () = stop.cancelled() => End::Stopping,
        () = close.cancelled() => End::Replaced,
        end = connection::talk(&socket, registered, &proxies) => end,
    };
    proxies.unregister(id);
    match end {
        End::Stopping => {}
        End::Closed => info!(connection = id, pid, "the proxy has closed its connection"),
        end => {
            warn!(connection = id, pid, reason = %end, "the connection to the proxy is closed; it is to connect again")
        }
    }
}

/// The id of a process's cgroup; nothing on a machine without cgroups of version 2.
fn cgroup_of(process: &Process) -> io::Result<Option<u64>> {
    let Some(hierarchy) = Hierarchy::find()? else {
        return Ok(None);
    };
    let (_, directory) = process.read(|pid| hierarchy.of_process(pid))?;
    cgroups::id(&directory).map(Some)
}

#[cfg(test)]
mod tests;
