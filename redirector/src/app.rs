//! The agent as a whole: builds every part, hands it over, starts and stops them in order.
//!
//! Start: rights, sockets, mesh, identities, backend (`Foundation`), pods (`Agent`). Where an agent runs that is to be taken over
//! (`takeover`), what it holds comes before all that, and goes into each part. The CNI socket is bound first of all, so that a second
//! agent touches no pod of the first, and served last, when the pods of an earlier agent are back. Stop: not ready, no new events,
//! proxies drain, the rest. Where the agent is uninstalled, the CNI plugin goes first of all, and the pods are released.

mod agent;
mod backend;
mod bind;
mod error;
mod installer;
mod start;
mod table;
mod takeover;
mod upkeep;

use std::sync::Arc;

use prometheus_client::registry::Registry;
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    task::JoinSet,
    time::{Duration, timeout},
};
use tracing::{info, warn};

use self::{
    agent::Agent,
    bind::Bound,
    start::{Known, Serving, prepare_process},
    takeover::{Giver, Succession},
};
pub use self::{
    error::{Error, explain},
    start::{check_files, check_rights},
};
use crate::{
    config::Config,
    redirect::Redirector,
    sys::lock::DirectoryLock,
    telemetry::{logs, metrics},
};

/// Time that the tasks which only serve get to end, after the pods have.
const STOP_DEADLINE: Duration = Duration::from_secs(5);

/// Time between looks at whether each pod's capture is still whole: what somebody takes away is back within 2 s, looks and
/// repairs included. A look at a pod that is as it was costs about a tenth of a millisecond.
const CHECK_INTERVAL: Duration = Duration::from_millis(1500);

/// Runs an agent until a signal, or until `/quitquitquit`.
pub async fn run(config: Config, logs: logs::Control) -> Result<(), Error> {
    let mut signals = Signals::new()?;
    prepare_process()?;
    info!(config = %serde_json::to_string(&config).unwrap_or_default(), "effective configuration");

    let Some(foundation) = Foundation::lay(&config, &mut signals).await? else {
        return Ok(());
    };
    let (mut agent, mut opening) = Agent::start(config, logs, foundation).await?;
    let why = agent.until(&mut signals, &mut opening).await;
    agent.stop(why).await
}

/// What is there before an agent touches a pod.
struct Foundation {
    succession: Succession,
    bound: Bound,
    known: Known,
    serving: Serving,
    registry: Registry,
    pins: Option<DirectoryLock>,
    giver: Giver,
    redirector: Arc<dyn Redirector>,
}

impl Foundation {
    /// `None` when the agent is stopped while it waits for another one, which goes on then.
    async fn lay(config: &Config, signals: &mut Signals) -> Result<Option<Self>, Error> {
        let Some(succession) = signals.unless(Succession::begin(config)).await else {
            return Ok(None);
        };
        let mut succession = succession?;
        let mut bound = Bound::bind(config, &mut succession).await?;

        let (mut serving, mut registry) = (Serving::default(), metrics::registry());
        let known = Known::start(config, &mut registry, &mut serving)?;
        let Some(pods) = signals.unless(succession.pods(&known)).await else {
            return Ok(None);
        };
        pods?;

        let Succession { before, foreign, .. } = &mut succession;
        let pins = backend::lock_pins(config, before, &mut bound.holdings).await?;
        let holdings = std::mem::take(&mut bound.holdings);
        let giver = Giver::bind(config, before, foreign, holdings).map_err(Error::TakeoverSocket)?;
        let redirector = backend::open(config).await?;
        Ok(Some(Self {
            succession,
            bound,
            known,
            serving,
            registry,
            pins,
            giver,
            redirector,
        }))
    }
}

/// The signals that stop an agent.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> Result<Self, Error> {
        let listen = |kind| {
            signal(kind).map_err(|source| Error::System {
                operation: "listen for signals",
                source,
            })
        };
        Ok(Self {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
        })
    }

    /// The next one, which is told.
    async fn next(&mut self) {
        let name = tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        };
        info!(signal = name, "stopping");
    }

    /// What is waited for; `None` when a signal comes first.
    async fn unless<T>(&mut self, wait: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            done = wait => Some(done),
            () = self.next() => None,
        }
    }
}

async fn end(mut tasks: JoinSet<()>) {
    let all = async { while tasks.join_next().await.is_some() {} };
    if timeout(STOP_DEADLINE, all).await.is_err() {
        warn!("some tasks did not end in time and are aborted");
    }
    tasks.shutdown().await;
}
