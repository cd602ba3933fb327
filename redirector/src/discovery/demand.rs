//! What is asked of a control plane by name, where the mesh is not fetched as a whole: the proxy asks, the xDS client carries the
//! questions, and whoever asked waits for the answer.
//!
//! What was asked for once stays subscribed to, so that the control plane tells of its changes; of what there is nothing behind, only
//! the youngest: a pod that calls many strange addresses must not fill the agent, nor the control plane.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::{
    sync::{Notify, Semaphore, watch},
    time::{Instant, timeout_at},
};

use crate::mesh::wanted::{ResourceName, Unanswered};

/// Names that a pod may wait for at a time; more wait for these.
const PER_POD: usize = 64;

/// Names without an answer, of all pods.
const MAX_ASKED: usize = 4_096;

/// Names behind which there is nothing; the oldest are given up for new ones.
const MAX_EMPTY: usize = 16_384;

/// The names that all pods have asked for.
#[derive(Debug, Clone, Default)]
pub struct Demand(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    names: Mutex<Names>,
    /// There is something to tell the control plane.
    changed: Notify,
}

#[derive(Debug, Default)]
struct Names {
    all: HashMap<ResourceName, State>,
    asked: usize,
    /// In the order of their answers. One that has come to be stays in here; it is passed over.
    empty: VecDeque<ResourceName>,
    /// Not sent yet.
    subscribe: Vec<ResourceName>,
    unsubscribe: Vec<ResourceName>,
}

#[derive(Debug)]
enum State {
    /// Dropped with the answer.
    Asked(watch::Sender<()>),
    /// There is something, or was: the control plane tells of its changes.
    Known,
    Empty,
}

/// What the control plane is to be told: first the names that are given up, then those that are asked for.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Changes {
    pub(super) unsubscribe: Vec<String>,
    pub(super) subscribe: Vec<String>,
}

/// One pod's way to ask.
#[derive(Debug)]
pub struct Asker {
    demand: Demand,
    turns: Semaphore,
}

impl Asker {
    /// Returns when the control plane has said whether there is something of this name: what there is, the mesh has by then. At
    /// once when it has said so before.
    ///
    /// # Errors
    /// When there is no answer before `deadline`, or too much is asked already.
    pub async fn ask(&self, name: &ResourceName, deadline: Instant) -> Result<(), Unanswered> {
        let unanswered = |reason| Unanswered {
            name: name.clone(),
            reason,
        };
        if self.demand.names().is_answered(name) {
            return Ok(());
        }
        let answered = async {
            // Never closed.
            let _turn = self.turns.acquire().await;
            let Some(mut answer) = self.demand.subscribe(name)? else {
                return Ok(());
            };
            // An error is the answer: nobody sends anything else.
            while answer.changed().await.is_ok() {}
            Ok(())
        };
        match timeout_at(deadline, answered).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(TooMany)) => Err(unanswered("too many names are without an answer")),
            Err(_) => Err(unanswered("there was no answer in time")),
        }
    }
}

/// Names without an answer.
struct TooMany;

impl Demand {
    /// For one pod.
    pub fn asker(&self) -> Asker {
        Asker {
            demand: self.clone(),
            turns: Semaphore::new(PER_POD),
        }
    }

    fn names(&self) -> MutexGuard<'_, Names> {
        // No step within panics halfway.
        self.0.names.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What ends with the answer; none when there is one.
    fn subscribe(&self, name: &ResourceName) -> Result<Option<watch::Receiver<()>>, TooMany> {
        let mut names = self.names();
        match names.all.get(name) {
            Some(State::Asked(answer)) => return Ok(Some(answer.subscribe())),
            Some(State::Known | State::Empty) => return Ok(None),
            None if names.asked >= MAX_ASKED => return Err(TooMany),
            None => {}
        }
        let (sender, receiver) = watch::channel(());
        names.all.insert(name.clone(), State::Asked(sender));
        names.asked += 1;
        names.subscribe.push(name.clone());
        self.0.changed.notify_one();
        Ok(Some(receiver))
    }

    /// All names, for a new connection; they count as sent.
    pub(super) fn all(&self) -> Vec<String> {
        let mut names = self.names();
        names.subscribe.clear();
        names.unsubscribe.clear();
        names.all.keys().map(ResourceName::to_string).collect()
    }

    /// Waits for something to tell. Only one may.
    pub(super) async fn changed(&self) {
        self.0.changed.notified().await;
    }

    /// What there is to tell; it counts as sent.
    pub(super) fn take(&self) -> Changes {
        let mut names = self.names();
        let texts = |all: Vec<ResourceName>| all.iter().map(ResourceName::to_string).collect();
        Changes {
            unsubscribe: texts(std::mem::take(&mut names.unsubscribe)),
            subscribe: texts(std::mem::take(&mut names.subscribe)),
        }
    }

    /// Takes what a response says, once the mesh has it: the names that it has something for, and those that it has nothing for.
    pub(super) fn answer(&self, present: &HashSet<String>, absent: &[String]) {
        let mut names = self.names();
        for name in present {
            names.settle(name, State::Known);
        }
        for name in absent.iter().filter(|name| !present.contains(*name)) {
            names.settle(name, State::Empty);
        }
        if !names.unsubscribe.is_empty() {
            self.0.changed.notify_one();
        }
    }
}

impl Names {
    fn is_answered(&self, name: &ResourceName) -> bool {
        matches!(self.all.get(name), Some(State::Known | State::Empty))
    }

    /// What nobody has asked for by this name is nobody's here.
    fn settle(&mut self, name: &str, state: State) {
        let Some((key, before)) = self.all.get_key_value(name) else {
            return;
        };
        let key = key.clone();
        if let State::Asked(_) = before {
            self.asked -= 1;
        }
        let is_newly_empty = matches!(state, State::Empty) && !matches!(before, State::Empty);
        self.all.insert(key.clone(), state);
        if !is_newly_empty {
            return;
        }
        self.empty.push_back(key);
        while self.empty.len() > MAX_EMPTY {
            if let Some(oldest) = self.empty.pop_front()
                && let Some(State::Empty) = self.all.get(&oldest)
            {
                self.all.remove(&oldest);
                self.unsubscribe.push(oldest);
            }
        }
    }
}

#[cfg(test)]
mod tests;
