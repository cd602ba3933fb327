//! The backend: its directory, kept to this agent, and itself, with what an earlier agent left of another.

use std::{io, sync::Arc};

use tokio::task::spawn_blocking;
use tracing::info;

use super::{
    Error,
    bind::{hold, lock},
    takeover::{Holding, Holdings},
};
use crate::{
    config::{Config, values::Redirect},
    redirect::{self, Redirector, ebpf, iptables, moved::Moved, none::NoRedirect},
    sys::lock::{DirectoryLock, LockError},
};

/// Makes the directory of pins, if need be, and keeps it to this agent; `None` where there is none. Before anything is changed there, and
/// whatever the backend: the pins of an earlier agent are removed pod by pod, those of another one must not be.
pub(super) async fn lock_pins(
    config: &Config,
    before: &mut Holdings,
    holdings: &mut Holdings,
) -> Result<Option<DirectoryLock>, Error> {
    in_background(config, prepare).await?;
    let given = before.take(Holding::BpffsDir);
    let pins = match lock(&config.bpffs_dir, "--bpffs-dir", given) {
        Err(Error::Lock {
            source: LockError::System(error),
            ..
        }) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        locked => locked?,
    };
    hold(holdings, Holding::BpffsDir, &pins)?;
    Ok(Some(pins))
}

/// Opens the backend.
pub(super) async fn open(config: &Config) -> Result<Arc<dyn Redirector>, Error> {
    in_background(config, build).await
}

async fn in_background<T: Send + 'static>(
    config: &Config,
    work: fn(&Config) -> Result<T, Error>,
) -> Result<T, Error> {
    let config = config.clone();
    spawn_blocking(move || work(&config))
        .await
        .map_err(|_| Error::Ended)?
}

/// Makes what is to be locked before the backend may change it. Blocking.
fn prepare(config: &Config) -> Result<(), Error> {
    if config.redirect == Redirect::Ebpf {
        ebpf::Ebpf::prepare(&config.bpffs_dir).map_err(Error::Redirect)?;
    }
    Ok(())
}

/// The backend that the configuration names, with what an earlier agent left of another. Blocking.
fn build(config: &Config) -> Result<Arc<dyn Redirector>, Error> {
    let build = || -> Result<Arc<dyn Redirector>, redirect::Error> {
        let now: Box<dyn Redirector> = match config.redirect {
            Redirect::None => Box::new(NoRedirect),
            Redirect::Ebpf => Box::new(ebpf::Ebpf::open(&ebpf::Config {
                bpffs_dir: config.bpffs_dir.clone(),
                force_clsact: config.force_clsact,
                force_source_port: config.force_source_port,
                rcu_expedited: config.rcu_expedited,
                probes: config.probe_sources.clone(),
            })?),
            Redirect::Iptables => Box::new(iptables::Iptables::open(&config.iptables())?),
        };
        let mut before = Vec::new();
        for other in redirect::leftovers(&config.bpffs_dir, config.iptables()) {
            if other.backend() == now.name() {
                continue;
            }
            let pods = other.pods()?.len();
            if pods > 0 {
                info!(
                    pods,
                    from = other.backend(),
                    to = now.name(),
                    "pods were captured by an earlier agent otherwise, and are moved"
                );
                before.push(other);
            }
        }
        Ok(if before.is_empty() {
            now.into()
        } else {
            Arc::new(Moved::new(now, before))
        })
    };
    build().map_err(Error::Redirect)
}
