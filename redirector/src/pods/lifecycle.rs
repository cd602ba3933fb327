//! The pod table and its single owner: a task that takes pod events, runs each pod's steps (`work`) in order and different
//! pods' at one time, and answers.
//!
//! The end state is the desired set, whatever the order of events: a pod that fails stops no other, what is asked while its
//! steps run waits in its own queue, and what an earlier agent left for pods that are gone is released after the snapshot.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::{Notify, mpsc, watch},
    task::{self, JoinError, JoinSet},
    time::{Instant, MissedTickBehavior, interval, interval_at, timeout, timeout_at},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, info, warn};

use super::{
    Error, OnFailure, PodAdd, PodDelete, PodEvent, Reply,
    launch::{Launch, Served},
    pause::{Pause, Pauses},
    records::Records,
    rules::NodeRules,
    status::{Metrics, State, Status},
    work::{Done, Worker, blocking},
};
use crate::{
    mesh::pod::PodUid,
    redirect::{Redirector, overrides::Overrides},
    sys::netns::NetnsId,
    telemetry::Chain,
};

mod entry;
mod owners;

use self::entry::{Entry, Fault, Job, Request};

/// Time between tries to capture a pod that failed. ztunnel's.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// Time that steps which are running get to end when the agent stops.
const STOP_DEADLINE: Duration = Duration::from_secs(20);

/// Looks at captured pods that run at one time. Each takes a thread for a millisecond or so; all pods' at once would take as
/// many threads as there are pods.
const CHECKS_AT_ONCE: usize = 4;

/// Settings of the lifecycle.
#[derive(Debug, Clone)]
pub struct Config {
    /// The namespaces that are the node's own.
    pub node: Vec<NetnsId>,
    /// Time that the connections of a released pod get to end.
    pub release_grace: Duration,
    /// Time that all connections get to end when the agent stops.
    pub shutdown_grace: Duration,
    /// Time between looks at whether each pod's capture is still whole; what is gone is put back.
    pub check_interval: Duration,
    /// Notified when all pods are to be looked at and tried again at once.
    pub look: Arc<Notify>,
    /// Pods are strict where the rules say nothing of it.
    pub strict: bool,
    /// The rules for all pods; what changes in them is put in force.
    pub rules: watch::Receiver<Arc<NodeRules>>,
    /// Pods are released when the agent stops. Otherwise their capture stays, and they fail closed until an agent is back. What
    /// it is then counts: some agents find out only when they are stopped.
    pub release_on_exit: Arc<AtomicBool>,
}

/// The owner of the pod table.
pub struct Lifecycle<L: Launch> {
    worker: Arc<Worker<L>>,
    config: Config,
    table: BTreeMap<PodUid, Entry<L::Proxy>>,
    jobs: JoinSet<Finished<L::Proxy>>,
    /// The pods of `jobs`.
    running: HashMap<task::Id, PodUid>,
    snapshot: Snapshot,
    /// What is left of pods that are gone is to be looked for.
    sweep: Sweep,
    /// Pods that are still to be looked at in this round, and how many are being looked at.
    due: VecDeque<PodUid>,
    looking: usize,
    status: watch::Sender<Status>,
    metrics: Metrics,
}

enum Finished<P> {
    Pod(Box<Done<P>>),
    Swept(Result<Vec<PodUid>, Error>),
}

/// What the source of events has named, since it began or began anew.
enum Snapshot {
    Receiving(BTreeSet<PodUid>),
    /// The pods of which only the existence is known stay here.
    Received(BTreeSet<PodUid>),
}

#[derive(PartialEq, Eq)]
enum Sweep {
    Wanted,
    Running,
    Done,
}

impl<L: Launch> Lifecycle<L> {
    /// A lifecycle without pods, and a view of its table.
    pub fn new(
        launch: L,
        redirector: Arc<dyn Redirector>,
        records: Records,
        config: Config,
        metrics: Metrics,
    ) -> (Self, watch::Receiver<Status>) {
        let (status, view) = watch::channel(Status::default());
        let worker = Worker {
            launch,
            redirector,
            records,
            node: config.node.clone(),
            release_grace: config.release_grace,
            rules: config.rules.clone(),
            weakest: Overrides {
                strict: Some(config.strict),
                ..Overrides::default()
            },
            durations: metrics.durations.clone(),
        };
        let lifecycle = Self {
            worker: Arc::new(worker),
            config,
            table: BTreeMap::new(),
            jobs: JoinSet::new(),
            running: HashMap::new(),
            snapshot: Snapshot::Receiving(BTreeSet::new()),
            sweep: Sweep::Done,
            due: VecDeque::new(),
            looking: 0,
            status,
            metrics,
        };
        (lifecycle, view)
    }

    /// Carries out events until `stop`, and then stops all proxies. When it is asked to rest it tells which listeners it has, and
    /// changes nothing until it goes on; events wait meanwhile.
    pub async fn run(
        mut self,
        mut events: mpsc::Receiver<PodEvent>,
        mut pauses: Pauses<io::Result<Vec<Served>>>,
        stop: CancellationToken,
    ) {
        let mut retry = interval(RETRY_INTERVAL);
        retry.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let every = self.config.check_interval;
        let mut check = interval_at(Instant::now() + every, every);
        check.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let look = Arc::clone(&self.config.look);
        loop {
            let mut changed = true;
            tokio::select! {
                () = stop.cancelled() => break,
                event = events.recv() => match event {
                    Some(event) => self.event(event),
                    None => break,
                },
                Some(finished) = self.jobs.join_next_with_id() => changed = self.finished(finished),
                _ = retry.tick() => self.retry(),
                _ = check.tick() => {
                    self.check();
                    changed = false;
                }
                () = look.notified() => {
                    self.retry();
                    self.check();
                }
                Ok(()) = self.config.rules.changed() => {
                    self.check();
                }
                pause = pauses.next() => self.pause(pause, &stop).await,
            }
            // Telling the whole table after each look at each pod would be the agent's main work.
            if changed {
                self.publish();
            }
        }
        events.close();
        while let Ok(event) = events.try_recv() {
            refuse(event);
        }
        self.shut_down().await;
    }

    /// Finishes what has begun, and rests. What another agent did to the pods meanwhile is put right after that, unless they are its own
    /// by then.
    async fn pause(&mut self, mut pause: Pause<io::Result<Vec<Served>>>, stop: &CancellationToken) {
        self.due.clear();
        loop {
            tokio::select! {
                finished = self.jobs.join_next_with_id() => match finished {
                    Some(finished) => self.finished(finished),
                    None => break,
                },
                () = pause.given_up() => return,
                () = stop.cancelled() => return,
            };
        }
        self.publish();
        let pods = self.table.values().filter_map(|entry| entry.pod.as_ref());
        let served = pods.filter_map(|pod| self.worker.served(pod)).collect();
        let goes_on = pause.rest(served, stop).await;
        if goes_on || self.config.release_on_exit.load(Ordering::Relaxed) {
            self.reread(stop).await;
        }
        if goes_on {
            self.retry();
            self.check();
        }
    }

    /// Has the backend find out what is in place. Until it has, nothing may be done to the pods by what it remembers.
    async fn reread(&self, stop: &CancellationToken) {
        loop {
            let worker = Arc::clone(&self.worker);
            let reread = move || worker.redirector.reread().map_err(Error::Attach);
            let Err(error) = blocking("read again what is in place", reread).await else {
                return;
            };
            error!(error = %Chain(&error), "cannot read again what is in place, and changes nothing until then");
            if timeout(RETRY_INTERVAL, stop.cancelled()).await.is_ok() {
                return;
            }
        }
    }

    fn event(&mut self, event: PodEvent) {
        match event {
            PodEvent::Add(add, reply) => {
                if let Snapshot::Receiving(named) = &mut self.snapshot {
                    named.insert(add.info.uid.clone());
                }
                self.enqueue_add(add, Some(reply));
            }
            PodEvent::Keep(uid, reply) => {
                let result = match &mut self.snapshot {
                    Snapshot::Receiving(named) => {
                        named.insert(uid);
                        Ok(())
                    }
                    Snapshot::Received(_) => Err(Error::Protocol("keep after the end of the snapshot")),
                };
                answer(Some(reply), result);
            }
            PodEvent::Delete(delete, reply) => match &mut self.snapshot {
                // What is really there is released at the end of the snapshot.
                Snapshot::Receiving(named) => {
                    named.remove(&delete.uid);
                    if let Some(entry) = self.table.get_mut(&delete.uid) {
                        entry.retry = None;
                    }
                    self.settle(&delete.uid);
                    answer(Some(reply), Ok(()));
                }
                Snapshot::Received(named) => {
                    named.remove(&delete.uid);
                    self.enqueue(delete.uid.clone(), Request::Delete(delete), Some(reply));
                }
            },
            PodEvent::SnapshotSent(reply) => {
                let result = self.snapshot_sent();
                answer(Some(reply), result);
            }
            PodEvent::Resync => self.snapshot = Snapshot::Receiving(BTreeSet::new()),
        }
    }

    /// Releases the pods that were not named. Their answers are nobody's.
    fn snapshot_sent(&mut self) -> Result<(), Error> {
        let Snapshot::Receiving(named) = &mut self.snapshot else {
            return Err(Error::Protocol("a second end of the snapshot"));
        };
        let named = std::mem::take(named);
        let gone: Vec<_> = self
            .table
            .keys()
            .filter(|uid| !named.contains(*uid))
            .cloned()
            .collect();
        info!(
            named = named.len(),
            gone = gone.len(),
            "snapshot of pods received"
        );
        self.snapshot = Snapshot::Received(named);
        for uid in gone {
            self.enqueue(uid.clone(), Request::Delete(PodDelete { uid, netns: None }), None);
        }
        self.sweep = Sweep::Wanted;
        self.start_sweep();
        Ok(())
    }

    /// Asks for all pods that something is in place for. What an earlier agent left is among them.
    fn start_sweep(&mut self) {
        if self.sweep == Sweep::Wanted {
            self.sweep = Sweep::Running;
            let worker = Arc::clone(&self.worker);
            self.jobs.spawn(async move {
                Finished::Swept(blocking("list what is attached", move || worker.known()).await)
            });
        }
    }

    fn swept(&mut self, known: Result<Vec<PodUid>, Error>) {
        let Snapshot::Received(named) = &self.snapshot else {
            // The source has begun anew meanwhile; the end of its next snapshot asks again.
            self.sweep = Sweep::Done;
            return;
        };
        match known {
            Ok(known) => {
                self.sweep = Sweep::Done;
                let gone = |uid: &PodUid| !named.contains(uid) && !self.table.contains_key(uid);
                for uid in known.into_iter().filter(gone).collect::<Vec<_>>() {
                    info!(%uid, "releasing what an earlier agent left for a pod that is gone");
                    self.enqueue(uid.clone(), Request::Delete(PodDelete { uid, netns: None }), None);
                }
            }
            Err(error) => {
                self.sweep = Sweep::Wanted;
                warn!(error = %Chain(&error), "cannot look for what an earlier agent left; trying again");
            }
        }
    }

    fn enqueue(&mut self, uid: PodUid, request: Request, reply: Option<Reply>) {
        self.table
            .entry(uid.clone())
            .or_default()
            .queue
            .push_back((request, reply));
        self.settle(&uid);
    }

    /// Starts the next job of a pod, or drops its entry when there is nothing left of it.
    fn settle(&mut self, uid: &PodUid) {
        while let Some(entry) = self.table.get_mut(uid) {
            if entry.job.is_some() {
                return;
            }
            let Some((mut request, reply)) = entry.queue.pop_front() else {
                if entry.pod.is_none() && entry.retry.is_none() {
                    self.table.remove(uid);
                }
                return;
            };
            if let Request::Add(add) = &mut request {
                add.rules = add.rules.take().or_else(|| entry.rules());
            }
            let was_captured = entry.pod.is_some();
            let worker = Arc::clone(&self.worker);
            let spawned = match &request {
                Request::Delete(delete) if entry.is_late(delete) => {
                    info!(%uid, netns = ?delete.netns, "late delete of a namespace that the pod no longer has: ignored");
                    answer(reply, Ok(()));
                    continue;
                }
                Request::Add(add) => {
                    let (old, add) = (entry.pod.take(), add.clone());
                    self.jobs
                        .spawn(async move { Finished::Pod(Box::new(worker.add(old, add).await)) })
                }
                Request::Check(_) => {
                    let Some(pod) = entry.pod.take() else { continue };
                    self.looking += 1;
                    self.jobs
                        .spawn(async move { Finished::Pod(Box::new(worker.check(pod).await)) })
                }
                Request::Delete(_) => {
                    let (old, uid) = (entry.pod.take(), uid.clone());
                    self.jobs
                        .spawn(async move { Finished::Pod(Box::new(worker.delete(old, uid).await)) })
                }
            };
            if matches!(request, Request::Delete(_)) {
                entry.retry = None;
            }
            if !matches!(request, Request::Check(_)) {
                entry.fault = None;
            }
            entry.job = Some(Job {
                request,
                reply,
                began: Instant::now(),
                was_captured,
            });
            self.running.insert(spawned.id(), uid.clone());
        }
    }

    /// Takes what a job has left, and tells whether the status may be another one now.
    fn finished(&mut self, finished: Result<(task::Id, Finished<L::Proxy>), JoinError>) -> bool {
        let (id, finished) = match finished {
            Ok((id, finished)) => (id, finished),
            // The steps catch their panics, so this is one between them. What it held is dropped: the proxy is gone.
            Err(error) => {
                error!(%error, "internal fault in a pod's job");
                (
                    error.id(),
                    Finished::Pod(Box::new(Done {
                        pod: None,
                        result: Err(Error::Panicked { step: "pod's job" }),
                    })),
                )
            }
        };
        let done = match (self.running.remove(&id), finished) {
            (Some(uid), Finished::Pod(done)) => (uid, done),
            (_, Finished::Swept(known)) => {
                self.swept(known);
                return true;
            }
            (None, Finished::Pod(_)) => {
                self.swept(Err(Error::Panicked {
                    step: "list what is attached",
                }));
                return true;
            }
        };
        let (uid, done) = done;
        let Done { pod, result } = *done;
        let Some(entry) = self.table.get_mut(&uid) else {
            return true;
        };
        let Some(Job {
            request,
            reply,
            began,
            was_captured,
        }) = entry.job.take()
        else {
            return true;
        };
        entry.pod = pod;
        let looked = matches!(request, Request::Check(_));
        let fault = match (&request, &result) {
            (Request::Delete(_), _) | (Request::Check(_), Err(Error::NamespaceGone { .. })) => None,
            (Request::Check(_), Err(error)) => entry.pod.as_ref().and_then(|pod| Fault::of(pod, Some(error))),
            _ => entry.pod.as_ref().and_then(|pod| Fault::of(pod, None)),
        };
        let fault_before = std::mem::replace(&mut entry.fault, fault);
        let whole_as_before = looked
            && result.is_ok()
            && fault_before.is_none()
            && entry.fault.is_none()
            && entry.queue.is_empty();
        match &entry.fault {
            Some(fault) if fault_before.as_ref() != Some(fault) => {
                warn!(%uid, error = %fault.text, "the pod is not captured as it should be; trying again");
            }
            None if looked && result.is_ok() && fault_before.is_some() => {
                info!(%uid, "the pod is captured as it should be again");
            }
            _ => {}
        }
        match (request, &result) {
            (Request::Add(_), Ok(())) => {
                self.metrics.started.inc();
                if !was_captured {
                    self.metrics.enrolment.0.observe(began.elapsed().as_secs_f64());
                }
                entry.retry = None;
            }
            (Request::Add(add), Err(error)) => {
                self.metrics.failed.inc();
                warn!(%uid, error = %Chain(error), "cannot capture the pod");
                // One that was captured, and could not be brought back, must not stay without a proxy.
                let pending = add.on_failure == OnFailure::Retry || entry.retry.is_some() || was_captured;
                match (add.on_failure, error) {
                    // Nothing to retry; and an earlier agent may have left something.
                    (OnFailure::Retry, Error::NamespaceGone { .. }) if entry.pod.is_none() => {
                        let delete = PodDelete {
                            uid: uid.clone(),
                            netns: None,
                        };
                        entry.queue.push_front((Request::Delete(delete), None));
                    }
                    // A wrong event says nothing of what was wanted before it.
                    (OnFailure::Report, error)
                        if error.is_of_the_event() && (entry.pod.is_some() || !was_captured) => {}
                    // A pod that is captured as before is left so: each try would end its connections.
                    _ if pending && entry.pod.is_none() => {
                        let add = PodAdd {
                            on_failure: OnFailure::Retry,
                            ..add
                        };
                        entry.retry = Some((add, Chain(error).to_string()));
                    }
                    _ => {}
                }
            }
            (Request::Check(_), Err(Error::NamespaceGone { .. })) => {
                info!(%uid, "the pod's namespace is gone: releasing it without a delete event");
                let delete = PodDelete {
                    uid: uid.clone(),
                    netns: None,
                };
                entry.queue.push_front((Request::Delete(delete), None));
            }
            (Request::Check(_), Err(error)) if entry.pod.is_none() => {
                error!(%uid, error = %Chain(error), "the pod was lost in a look at it");
            }
            (Request::Check(_), _) => {}
            (Request::Delete(_), Ok(())) => {
                self.metrics.stopped.inc();
            }
            (Request::Delete(_), Err(error)) => {
                error!(%uid, error = %Chain(error), "the pod was not released in full")
            }
        }
        self.settle(&uid);
        // Who asks after the answer finds what it says.
        let told = reply.is_some();
        if told {
            self.publish();
        }
        answer(reply, result);
        if looked {
            self.looking -= 1;
            self.start_checks();
        }
        !whole_as_before && !told
    }

    fn retry(&mut self) {
        self.start_sweep();
        let idle = |entry: &&mut Entry<L::Proxy>| entry.job.is_none() && entry.queue.is_empty();
        let adds: Vec<_> = self
            .table
            .values_mut()
            .filter(idle)
            .filter_map(|entry| Some(entry.retry.as_ref()?.0.clone()))
            .collect();
        for add in adds {
            debug!(uid = %add.info.uid, "trying again to capture the pod");
            self.enqueue_add(add, None);
        }
    }

    /// Looks at every captured pod: somebody may have removed our hooks or routes, or its interfaces or addresses have changed.
    /// Those that still wait for their look keep their place.
    fn check(&mut self) {
        let due: BTreeSet<PodUid> = self.due.iter().cloned().collect();
        let captured = self.table.iter().filter(|(_, entry)| entry.pod.is_some());
        let new = captured.map(|(uid, _)| uid).filter(|uid| !due.contains(*uid));
        self.due.extend(new.cloned());
        self.start_checks();
    }

    /// Starts as many looks as may run. A pod that waits for its own holds up none of its events.
    fn start_checks(&mut self) {
        while self.looking < CHECKS_AT_ONCE {
            let Some(uid) = self.due.pop_front() else { return };
            let idle = |entry: &&Entry<L::Proxy>| entry.job.is_none() && entry.queue.is_empty();
            let entry = self.table.get(&uid).filter(idle);
            let Some(pod) = entry.and_then(|entry| entry.pod.as_ref()) else {
                continue;
            };
            // What the status tells while the look has the pod.
            let add = PodAdd {
                addresses: pod.network.addresses.clone(),
                ..pod.add.clone()
            };
            self.enqueue(uid, Request::Check(add), None);
        }
    }

    fn publish(&self) {
        let pods: Vec<_> = self
            .table
            .iter()
            .filter_map(|(uid, entry)| entry.status(uid, |add| self.worker.rules_of(add).strict))
            .collect();
        let count = |state| pods.iter().filter(|pod| pod.state == state).count() as i64;
        self.metrics.active.set(count(State::Captured));
        self.metrics.pending.set(count(State::NotCaptured));
        let impaired = pods.iter().filter(|pod| pod.impaired).count();
        self.metrics.impaired.set(impaired as i64);
        let status = Status {
            synced: matches!(self.snapshot, Snapshot::Received(_)),
            pods,
        };
        self.status.send_if_modified(|old| {
            let changed = *old != status;
            *old = status;
            changed
        });
    }

    async fn shut_down(mut self) {
        self.due.clear();
        for entry in self.table.values_mut() {
            entry.retry = None;
            for (_, reply) in entry.queue.drain(..) {
                answer(reply, Err(Error::Stopping));
            }
        }
        let deadline = Instant::now() + STOP_DEADLINE;
        while let Ok(Some(finished)) = timeout_at(deadline, self.jobs.join_next_with_id()).await {
            self.finished(finished);
        }
        let shutdown_grace = self.config.shutdown_grace;
        let release_on_exit = self.config.release_on_exit.load(Ordering::Relaxed);
        info!(pods = self.table.len(), grace = ?shutdown_grace, release_on_exit, "stopping the proxies of all pods");
        let mut stops = JoinSet::new();
        for pod in std::mem::take(&mut self.table)
            .into_values()
            .filter_map(|entry| entry.pod)
        {
            stops.spawn(Arc::clone(&self.worker).shut_down(pod, shutdown_grace, release_on_exit));
        }
        let deadline = Instant::now() + shutdown_grace + STOP_DEADLINE;
        while let Ok(Some(stopped)) = timeout_at(deadline, stops.join_next()).await {
            if let Err(error) = stopped {
                error!(%error, "internal fault while a pod's proxy was stopped");
            }
        }
        if release_on_exit {
            self.release_leftovers().await;
            // Who tells others of captured pods has to know; of those that stay captured, what was told holds.
            self.publish();
        }
    }

    /// Releases the pods that were captured and not in the table: those whose retries never worked.
    async fn release_leftovers(&self) {
        let worker = Arc::clone(&self.worker);
        let known = blocking("list what is attached", move || worker.known()).await;
        for uid in known.unwrap_or_else(|error| {
            error!(error = %Chain(&error), "cannot look for pods that are still captured");
            Vec::new()
        }) {
            if let Err(error) = Arc::clone(&self.worker).delete(None, uid.clone()).await.result {
                error!(%uid, error = %Chain(&error), "the pod was not released in full");
            }
        }
    }
}

fn answer(reply: Option<Reply>, result: Result<(), Error>) {
    // Who asked may have given up: the pod's state is what it is all the same.
    if let Some(reply) = reply {
        let _ = reply.send(result);
    }
}

fn refuse(event: PodEvent) {
    match event {
        PodEvent::Add(_, reply)
        | PodEvent::Keep(_, reply)
        | PodEvent::Delete(_, reply)
        | PodEvent::SnapshotSent(reply) => answer(Some(reply), Err(Error::Stopping)),
        PodEvent::Resync => {}
    }
}

#[cfg(test)]
mod tests;
