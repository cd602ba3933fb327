//! What the backend does beside the pods' events, before the first pod and then again and again: it looks who probes the pods,
//! makes ready for pods that are still to come, and keeps what all pods share.

use std::sync::Arc;

use tokio::{sync::watch, task::spawn_blocking, time::sleep};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use super::CHECK_INTERVAL;
use crate::{
    pods::pause::Pauses,
    redirect::{Error, Redirector, probers::View},
    telemetry::Chain,
};

pub(super) struct Upkeep {
    redirector: Arc<dyn Redirector>,
    probers: watch::Sender<Option<View>>,
    looking: Step,
    making_ready: Step,
}

/// A step, and how it failed last. It is told again only when it fails otherwise.
struct Step {
    what: &'static str,
    failure: Option<String>,
}

impl Upkeep {
    /// Does all of it once, so that no pod has to do without. Also returns where it shows who probes.
    pub(super) async fn begin(redirector: Arc<dyn Redirector>) -> (Self, watch::Receiver<Option<View>>) {
        let step = |what| Step { what, failure: None };
        let (probers, view) = watch::channel(None);
        let mut upkeep = Self {
            redirector,
            probers,
            looking: step("look for the node's probers"),
            making_ready: step("make ready for the next pods"),
        };
        upkeep.once().await;
        (upkeep, view)
    }

    /// Goes on until it is told to stop. A kubelet that is restarted may have another cgroup.
    pub(super) async fn run(mut self, mut pauses: Pauses<()>, stop: CancellationToken) {
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = sleep(CHECK_INTERVAL) => {}
                pause = pauses.next() => if !pause.rest((), &stop).await { return },
            }
            self.once().await;
        }
    }

    async fn once(&mut self) {
        let redirector = Arc::clone(&self.redirector);
        let both = move || (redirector.look_for_probers(), redirector.make_ready());
        match spawn_blocking(both).await {
            Ok((found, ready)) => {
                if let Some(found) = self.looking.tell(found) {
                    show(&self.probers, found);
                }
                self.making_ready.tell(ready);
            }
            Err(error) => error!(%error, "what is done beside the pods' events ended early"),
        }
    }
}

impl Step {
    fn tell<T>(&mut self, result: Result<T, Error>) -> Option<T> {
        let failure = match result {
            Ok(done) => {
                self.failure = None;
                return Some(done);
            }
            Err(error) => Chain(&error).to_string(),
        };
        if self.failure.as_ref() != Some(&failure) {
            error!(error = failure, "cannot {}", self.what);
        }
        self.failure = Some(failure);
        None
    }
}

/// Shows who probes, and says so when that has changed.
fn show(view: &watch::Sender<Option<View>>, found: Option<View>) {
    view.send_if_modified(|shown| {
        let changed = *shown != found;
        if changed && let Some(found) = &found {
            let (rule, cgroups) = (found.rule, &found.cgroups);
            let reason = found.reason.as_str();
            if found.as_asked {
                info!(?rule, ?cgroups, reason, "probes of the node's");
            } else {
                warn!(?rule, ?cgroups, reason, "probes of the node's");
            }
        }
        *shown = found;
        changed
    });
}
