//! What is asked of a control plane by name, where the mesh is not fetched as a whole: the proxy asks, the xDS client carries the
//! questions, and whoever asked waits for the answer.
//!
//! What the mesh lacks is asked for again, though it was asked for before: istiod tells unasked of what it has told by its own names, and
//! never that an address has come to be somebody's (`pilot/pkg/xds/workload.go`: only resources whose own name is subscribed to). So an
//! answer counts for a moment alone; without a connection the last one does, as the mesh does. What was asked for stays subscribed to; of
//! names with nothing behind them only the youngest: a pod that calls many strange addresses must not fill the agent, nor the control plane.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    sync::{Notify, Semaphore, watch},
    time::{Instant, timeout_at},
};

use crate::mesh::wanted::{ResourceName, Unanswered};

/// Names that a pod may wait for at a time; more wait for these.
const PER_POD: usize = 64;

/// Names that all its peers together may have it wait for.
const PER_PEERS: usize = 16;

/// For so long an answer counts for whoever asks next.
const FRESH: Duration = Duration::from_secs(1);

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
    /// There is somebody to ask.
    is_connected: bool,
    /// In the order of their answers. One that has come to be stays in here; it is passed over.
    empty: VecDeque<ResourceName>,
    /// Not sent yet.
    subscribe: Vec<ResourceName>,
    unsubscribe: Vec<ResourceName>,
}

#[derive(Debug)]
enum State {
    Asked {
        /// Dropped with the answer.
        done: watch::Sender<()>,
        /// The answer before, when it is asked for again.
        before: Option<(Answer, Instant)>,
    },
    Answered(Answer, Instant),
}

/// What a control plane has by a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    /// Something, which the mesh has then.
    Something,
    Nothing,
    /// Something that is not understood, and so not in the mesh.
    Refused,
}

/// What a response says of names.
#[derive(Debug, Default)]
pub(super) struct Answers {
    pub(super) present: HashSet<String>,
    pub(super) absent: Vec<String>,
    pub(super) refused: HashSet<String>,
}

/// What the control plane is to be told: first the names that are given up, then those that are asked for.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Changes {
    pub(super) unsubscribe: Vec<String>,
    pub(super) subscribe: Vec<String>,
}

/// The way to ask for one pod, or for its peers.
#[derive(Debug)]
pub struct Asker {
    demand: Demand,
    turns: Semaphore,
}

impl Asker {
    /// Returns when the control plane has said whether there is something of this name: what there is, the mesh has by then. At
    /// once when it has only just said so, or did before and cannot be asked now.
    ///
    /// # Errors
    /// When there is no answer before `deadline`, too much is asked already, or what there is is not understood.
    pub async fn ask(&self, name: &ResourceName, deadline: Instant) -> Result<(), Unanswered> {
        let unanswered = |reason| Unanswered {
            name: name.clone(),
            reason,
        };
        let answered = async {
            if let Some(answer) = self.demand.names().answer(name) {
                return Ok(Some(answer));
            }
            // Never closed.
            let _turn = self.turns.acquire().await;
            match self.demand.subscribe(name)? {
                Ok(answer) => return Ok(Some(answer)),
                // An error is the answer: nobody sends anything else.
                Err(mut answer) => while answer.changed().await.is_ok() {},
            }
            // Given up already where very many were answered meanwhile.
            Ok(self.demand.names().answer(name))
        };
        match timeout_at(deadline, answered).await {
            Ok(Ok(Some(Answer::Refused))) => Err(unanswered("what it has is not understood here")),
            Ok(Ok(_)) => Ok(()),
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
        self.with_turns(PER_POD)
    }

    /// For its peers, who must not take the pod's own turns.
    pub fn asker_of_peers(&self) -> Asker {
        self.with_turns(PER_PEERS)
    }

    fn with_turns(&self, turns: usize) -> Asker {
        Asker {
            demand: self.clone(),
            turns: Semaphore::new(turns),
        }
    }

    fn names(&self) -> MutexGuard<'_, Names> {
        // No step within panics halfway.
        self.0.names.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The answer, or what ends with it.
    fn subscribe(&self, name: &ResourceName) -> Result<Result<Answer, watch::Receiver<()>>, TooMany> {
        let mut names = self.names();
        if let Some(answer) = names.answer(name) {
            return Ok(Ok(answer));
        }
        let before = match names.all.get(name) {
            Some(State::Asked { done, .. }) => return Ok(Err(done.subscribe())),
            _ if names.asked >= MAX_ASKED => return Err(TooMany),
            Some(State::Answered(answer, at)) => Some((*answer, *at)),
            None => None,
        };
        if before.is_some() {
            // Nothing would be new in a subscription that is there already.
            names.unsubscribe.push(name.clone());
        }
        let (done, receiver) = watch::channel(());
        names.all.insert(name.clone(), State::Asked { done, before });
        names.asked += 1;
        names.subscribe.push(name.clone());
        self.0.changed.notify_one();
        Ok(Err(receiver))
    }

    /// All names, for a new connection; they count as sent.
    pub(super) fn connected(&self) -> Vec<String> {
        let mut names = self.names();
        names.is_connected = true;
        names.subscribe.clear();
        names.unsubscribe.clear();
        names.all.keys().map(ResourceName::to_string).collect()
    }

    /// There is nobody to ask. Whoever waits for an answer that was there before has that one.
    pub(super) fn disconnected(&self) {
        let mut names = self.names();
        names.is_connected = false;
        let mut restored = 0;
        for state in names.all.values_mut() {
            if let State::Asked {
                before: Some((answer, at)),
                ..
            } = state
            {
                *state = State::Answered(*answer, *at);
                restored += 1;
            }
        }
        names.asked -= restored;
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

    /// Takes what a response says, once the mesh has it.
    pub(super) fn answer(&self, answers: &Answers) {
        let mut names = self.names();
        let Answers {
            present,
            absent,
            refused,
        } = answers;
        for name in present.difference(refused) {
            names.settle(name, Answer::Something);
        }
        // Of several things with one name, the one that is not understood may be what is called.
        for name in refused {
            names.settle(name, Answer::Refused);
        }
        let is_there = |name: &&String| present.contains(*name) || refused.contains(*name);
        for name in absent.iter().filter(|name| !is_there(name)) {
            names.settle(name, Answer::Nothing);
        }
        if !names.unsubscribe.is_empty() {
            self.0.changed.notify_one();
        }
    }
}

impl Names {
    /// The answer, if it counts still.
    fn answer(&self, name: &ResourceName) -> Option<Answer> {
        match self.all.get(name) {
            Some(State::Answered(answer, at)) if !self.is_connected || at.elapsed() < FRESH => Some(*answer),
            _ => None,
        }
    }

    /// What nobody has asked for by this name is nobody's here.
    fn settle(&mut self, name: &str, answer: Answer) {
        let Some((key, before)) = self.all.get_key_value(name) else {
            return;
        };
        let key = key.clone();
        if let State::Asked { .. } = before {
            self.asked -= 1;
        }
        // Then it is in the list already.
        let was_empty = before.is_empty();
        self.all
            .insert(key.clone(), State::Answered(answer, Instant::now()));
        if answer != Answer::Nothing || was_empty {
            return;
        }
        self.empty.push_back(key);
        while self.empty.len() > MAX_EMPTY {
            let Some(oldest) = self.empty.pop_front() else {
                return;
            };
            match self.all.get_mut(&oldest) {
                Some(State::Answered(Answer::Nothing, _)) => {
                    self.all.remove(&oldest);
                    self.unsubscribe.push(oldest);
                }
                // Somebody waits for it: its answer puts it there again.
                Some(State::Asked { before, .. }) => *before = None,
                _ => {}
            }
        }
    }
}

impl State {
    /// There was nothing when it was last answered.
    fn is_empty(&self) -> bool {
        let answered = match self {
            Self::Asked { before, .. } => *before,
            Self::Answered(answer, at) => Some((*answer, *at)),
        };
        matches!(answered, Some((Answer::Nothing, _)))
    }
}

#[cfg(test)]
mod tests;
