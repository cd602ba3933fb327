//! The agent that serves pods: its parts, from their start to their end.

use std::{
    future::pending,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use futures_util::{
    FutureExt as _,
    future::{Fuse, FusedFuture as _},
};
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::{JoinError, JoinHandle, JoinSet},
    time::{Duration, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{error, info, warn};

use super::{
    CHECK_INTERVAL, Error, Foundation, STOP_DEADLINE, Signals,
    bind::Bound,
    end,
    installer::Installer,
    start::{Known, Serving, release_memory, start_rules},
    table::Table,
    takeover::{self, Given, Rests, Succession, resting},
    upkeep::Upkeep,
};
use crate::{
    admin::Admin,
    config::Config,
    control_plane::kubernetes::Kubernetes,
    identity::store::Store,
    pods::{
        admission::Admission,
        kubernetes::{Follower, Turn},
        launch::PodProxies,
        lifecycle,
        others::OtherProxies,
        restore::Unknown,
        status::{self, PodStatus, Status},
    },
    proxy::{self, Shared, flows::Flows},
    redirect,
    sys::{lock::DirectoryLock, process},
    telemetry::logs,
};

/// Events on their way to the lifecycle. Each sender waits for its answer, so there are never more than their number.
const EVENTS: usize = 64;

/// An agent that runs.
pub(super) struct Agent {
    lifecycle: JoinHandle<()>,
    /// What tells of pods: ended first.
    sources: JoinSet<()>,
    endpoints: JoinSet<()>,
    serving: Serving,
    installer: Installer,
    giving: Fuse<JoinHandle<Option<Given>>>,
    stop_giving: CancellationToken,
    /// It was asked to end.
    quit: CancellationToken,
    /// Ends what takes and carries out events.
    stopping: CancellationToken,
    /// What is told of the pods is another agent's to tell from now on.
    over: CancellationToken,
    /// Ends `endpoints`: before the proxies when another agent goes on.
    answering: CancellationToken,
    /// The tasks that have the pods' listeners open.
    listening: TaskTracker,
    /// It is another agent that serves the pods.
    foreign: Arc<AtomicBool>,
    release_on_exit: Arc<AtomicBool>,
    grace: Duration,
    /// Of the directories of state and of pins.
    locks: Option<(DirectoryLock, Option<DirectoryLock>)>,
}

impl Agent {
    pub(super) async fn start(
        config: Config,
        logs: logs::Control,
        foundation: Foundation,
    ) -> Result<(Self, Opening), Error> {
        let Foundation {
            succession,
            bound,
            known,
            mut serving,
            mut registry,
            pins,
            giver,
            redirector,
        } = foundation;
        let Bound {
            endpoints,
            pod_source,
            others,
            proxies,
            look,
            state,
            records,
            holdings: _,
        } = bound;
        let Known {
            mesh,
            awaited,
            demand,
            identities,
        } = known;
        let (upkeep, probers) = Upkeep::begin(Arc::clone(&redirector)).await;

        let flows = Arc::<Flows>::default();
        let listening = TaskTracker::new();
        // Cancelled when it is this agent that serves.
        let open = CancellationToken::new();
        if succession.taking.is_none() {
            open.cancel();
        }
        let over = CancellationToken::new();
        let metrics = Arc::new(proxy::Metrics::new(config.access_log()));
        metrics.register(&mut registry);
        let shared = Arc::new(Shared {
            mesh: mesh.clone(),
            identities: Arc::clone(&identities),
            redirector: Arc::clone(&redirector),
            config: config.proxy(),
            metrics,
            flows: Arc::clone(&flows),
            residents: proxy::Residents::default(),
            demand,
            names: proxy::Names::default(),
            open: open.clone(),
            listening: listening.clone(),
        });
        let pod_metrics = status::Metrics::default();
        pod_metrics.register(&mut registry);
        let release_on_exit = Arc::new(AtomicBool::new(config.release_on_exit));
        let settings = lifecycle::Config {
            node: process::node_namespaces().map_err(|source| Error::System {
                operation: "open the node's network namespace",
                source,
            })?,
            release_grace: config.release_grace.0,
            shutdown_grace: config.shutdown_grace.0,
            check_interval: CHECK_INTERVAL,
            look,
            release_on_exit: Arc::clone(&release_on_exit),
            strict: config.strict,
            rules: start_rules(&config, &redirector, &mut serving)?,
        };
        let backend = redirector.name();
        let (parts, resting) = resting();
        serving.spawn(|stop| upkeep.run(resting.upkeep, stop));
        let (quit, stopping) = (CancellationToken::new(), CancellationToken::new());
        let (events, receiver) = mpsc::channel(EVENTS);
        let table = Table {
            redirector: Arc::clone(&redirector),
            records: records.clone(),
            settings,
            metrics: pod_metrics,
            events: receiver,
            pauses: resting.pods,
            stop: stopping.clone(),
        };
        let (lifecycle, pods_status) = match others {
            Some(server) => {
                proxies.register_metrics(&mut registry);
                // Before the first proxy comes: it goes on with the pods that an earlier agent has told it of.
                proxies.expect(records.uids().map_err(Error::Records)?);
                serving.spawn(|stop| server.run(stop));
                table.of(OtherProxies::new(proxies))
            }
            None => table.of(PodProxies::new(
                shared,
                config.trust_domain.clone(),
                Arc::clone(&succession.inherited),
            )),
        };
        let named = pods_status.clone();
        redirect::metrics::register(&mut registry, redirector, move || {
            let pods = &named.borrow().pods;
            let name = |pod: &PodStatus| (pod.uid.clone(), (pod.namespace.clone(), pod.name.clone()));
            pods.iter().map(name).collect()
        });
        let follower = config.kubernetes_pods.as_ref().map(|pods| {
            let follower = Follower::new(Kubernetes::new(pods.cluster.clone()), pods.config.clone());
            follower.watch(&mut serving.tasks, &serving.stop);
            let turn = Turn {
                begin: open.clone(),
                over: over.clone(),
                stop: serving.stop.clone(),
            };
            follower.annotate(pods_status.clone(), &mut serving.tasks, turn);
            follower
        });
        let missed = follower
            .as_ref()
            .map_or_else(|| watch::channel(Vec::new()).1, Follower::missed);
        status::register_states(&mut registry, pods_status.clone(), missed.clone());
        let (installer, cni) = Installer::begin(&config, pods_status.clone(), open.clone());
        let admin = Arc::new(Admin {
            directory: follower.as_ref().map(Follower::directory),
            missed,
            pods: pods_status.clone(),
            cni,
            probers,
            mesh: mesh.clone(),
            awaited,
            flows,
            identities: Arc::clone(&identities),
            registry: Arc::new(registry),
            logs,
            backend,
            config: serde_json::to_value(&config).unwrap_or_default(),
            dumps: Default::default(),
            scrapes: Default::default(),
            quit: quit.clone(),
            stopping: stopping.clone(),
        });
        let answering = serving.stop.child_token();
        let endpoints = endpoints.serve(&admin, &open, &answering);
        serving.spawn(release_memory);

        let lifecycle = tokio::spawn(lifecycle);
        let mut sources = JoinSet::new();
        let admission = match &follower {
            Some(follower) => Admission::Kubernetes(follower.decider()),
            None => Admission::Sender {
                mesh,
                home: config.home(),
                excluded: config.exclude_namespaces.0.clone(),
            },
        };
        // Cancelled when the pods of an earlier agent are back, too.
        let ready = CancellationToken::new();
        let (restored, back) = oneshot::channel();
        sources.spawn(pod_source.run(
            records,
            (events, pods_status.clone()),
            admission,
            follower,
            (restored, ready.clone(), resting.cni),
            stopping.clone(),
        ));
        let stop_giving = CancellationToken::new();
        info!(backend, "agent started");
        let agent = Self {
            lifecycle,
            sources,
            endpoints,
            serving,
            installer,
            giving: tokio::spawn(giver.run(parts, ready.clone(), stop_giving.clone())).fuse(),
            stop_giving,
            quit,
            stopping,
            over,
            answering,
            listening,
            foreign: Arc::clone(&succession.foreign),
            release_on_exit,
            grace: config.shutdown_grace.0,
            locks: Some((state, pins)),
        };
        let opening = Opening {
            back,
            succession,
            pods: pods_status,
            identities,
            open,
            ready,
        };
        Ok((agent, opening))
    }

    /// Runs until there is a reason to end.
    pub(super) async fn until(&mut self, signals: &mut Signals, opening: &mut Opening) -> End {
        tokio::select! {
            () = signals.next() => End::Asked,
            () = self.quit.cancelled() => {
                info!("asked to stop");
                End::Asked
            }
            given = &mut self.giving => match given {
                Ok(Some(given)) => End::Given(given),
                given => End::fault(given.map(drop)),
            },
            Err(error) = opening.run() => End::Fault(Error::Takeover(error)),
            ended = &mut self.lifecycle => End::fault(ended),
            Some(ended) = self.sources.join_next() => End::fault(ended),
            Some(ended) = self.endpoints.join_next() => End::fault(ended),
            Some(ended) = self.serving.tasks.join_next() => End::fault(ended),
        }
    }

    /// Ends, in order. Whoever is about to take over goes on alone, unless the pods are to be released.
    pub(super) async fn stop(mut self, why: End) -> Result<(), Error> {
        self.stop_giving.cancel();
        let (mut result, mut given) = match why {
            End::Asked => (Ok(()), None),
            End::Fault(error) => (Err(error), None),
            End::Given(given) => (Ok(()), Some(given)),
        };
        if !self.giving.is_terminated() {
            given = (&mut self.giving).await.ok().flatten();
        }
        // It may have handed over in the meantime.
        if given.as_ref().is_some_and(Given::is_over) {
            result = Ok(());
        }
        // While it is asked for, all goes on as before; whoever is about to take over waits.
        let is_ours = !self.foreign.load(Ordering::Relaxed);
        let is_gone = is_ours && result.is_ok() && self.installer.is_gone().await;
        let releases = is_ours && (is_gone || self.release_on_exit.load(Ordering::Relaxed));
        self.release_on_exit.store(releases, Ordering::Relaxed);
        let _rests = match given {
            Some(given) if releases => {
                given.withdraw("it is being stopped, and releases its pods").await;
                None
            }
            Some(given) => self.leave_to(given).await,
            None => None,
        };
        if is_gone {
            self.installer.leave().await;
        } else {
            self.installer.end().await;
        }
        self.stopping.cancel();
        if !self.lifecycle.is_finished() {
            // It has deadlines of its own, for each of its steps.
            let _ = self.lifecycle.await;
        }
        self.serving.stop.cancel();
        end(self.sources).await;
        end(self.endpoints).await;
        self.serving.end().await;
        info!("agent stopped");
        result
    }

    /// Has nothing any more, so that another agent may go on with it, but the connections that are open.
    async fn leave_to(&mut self, given: Given) -> Option<Rests> {
        let grace = self.grace;
        if given.is_over() {
            info!(
                ?grace,
                "another agent has taken over: this one ends with its connections"
            );
        } else {
            info!(
                ?grace,
                "another agent is about to take over, and goes on alone: this one ends with its connections"
            );
        }
        self.foreign.store(true, Ordering::Relaxed);
        self.over.cancel();
        self.installer.rest();
        self.stopping.cancel();
        self.answering.cancel();
        self.listening.close();
        if timeout(STOP_DEADLINE, self.listening.wait()).await.is_err() {
            warn!("some listeners are still open");
        }
        if !given.is_over() {
            // It may have to bind them anew.
            end(std::mem::take(&mut self.sources)).await;
            end(std::mem::take(&mut self.endpoints)).await;
        }
        // Closed, and not unlocked: a lock lasts as long as one of its descriptors is open, and the other agent has them. If that one dies,
        // the next one does not have to wait for the connections of this one.
        self.locks = None;
        given.let_go()
    }
}

/// How the agent begins to serve.
pub(super) struct Opening {
    /// The pods of an earlier agent are back, but for those of which no more than this is known.
    back: oneshot::Receiver<Vec<Unknown>>,
    succession: Succession,
    pods: watch::Receiver<Status>,
    identities: Arc<Store>,
    /// To be cancelled when it is this agent that serves.
    open: CancellationToken,
    /// To be cancelled when events may come, too.
    ready: CancellationToken,
}

impl Opening {
    /// Has this agent serve, when the pods of an earlier one are back. Returns only when that one goes on.
    async fn run(&mut self) -> Result<(), takeover::Error> {
        // A source that has ended tells nothing.
        if let Ok(unknown) = (&mut self.back).await {
            let Succession {
                taking,
                foreign,
                inherited,
                ..
            } = &mut self.succession;
            // It lives as long as the pods' table where that fails: the other agent goes on when nothing is done here any more.
            if let Some(taking) = taking {
                taking
                    .commit(self.pods.clone(), &unknown, &self.identities, inherited)
                    .await?;
                foreign.store(false, Ordering::Relaxed);
                self.open.cancel();
                taking.closed().await;
            }
            self.ready.cancel();
        }
        pending().await
    }
}

/// Why an agent ends.
pub(super) enum End {
    /// It was asked to.
    Asked,
    /// Another one has taken over; what it has taken rests.
    Given(Given),
    /// It cannot go on.
    Fault(Error),
}

impl End {
    /// A part has ended that should not.
    fn fault(ended: Result<(), JoinError>) -> Self {
        error!(?ended, "a part of the agent ended by itself");
        Self::Fault(Error::Ended)
    }
}
