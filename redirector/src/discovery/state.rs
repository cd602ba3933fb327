//! The mesh as all sources together tell of it, owned by one task.
//!
//! Sources hand in changes and wait until they are visible; readers have snapshots, and wait for nobody. What the workload file
//! holds counts before what the control plane says under the same key, and the other comes back when the file gives the key up.

use std::{mem, sync::Arc, time::Duration};

use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

use crate::mesh::index::{Mesh, Update};

/// Changes that wait. Each source waits for its own.
const CHANGES: usize = 4;

/// More updates than these at once are applied where they hold up no other task: some 10 ms of work.
const MANY: usize = 1024;

/// How many old snapshots are kept at most for readers who hold on to them; the oldest is left to its readers then.
const OUTDATED: usize = 64;

/// How soon an old snapshot goes when no change comes after it.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// The owner of the mesh.
#[derive(Debug)]
pub struct State {
    changes: mpsc::Receiver<(Change, oneshot::Sender<()>)>,
    published: watch::Sender<Arc<Mesh>>,
    layers: Layers,
    replaced: Replaced,
}

/// Hands in changes.
#[derive(Debug, Clone)]
pub struct Handle(mpsc::Sender<(Change, oneshot::Sender<()>)>);

/// The agent is stopping.
#[derive(Debug, thiserror::Error)]
#[error("the mesh takes no more changes: the agent stops")]
pub struct Stopped;

#[derive(Debug)]
enum Change {
    /// Of the control plane's part.
    Updates(Vec<Update>),
    /// The file's part as a whole.
    File(Box<Mesh>),
    /// The control plane has told its policies.
    PoliciesTold,
}

impl Handle {
    /// Applies what the control plane says, in one step. Returns when it is visible.
    ///
    /// # Errors
    /// When the agent stops.
    pub async fn apply(&self, updates: Vec<Update>) -> Result<(), Stopped> {
        self.send(Change::Updates(updates)).await
    }

    /// Puts what the file holds now in the place of what it held. Returns when it is visible.
    ///
    /// # Errors
    /// When the agent stops.
    pub async fn replace_file(&self, file: Mesh) -> Result<(), Stopped> {
        self.send(Change::File(Box::new(file))).await
    }

    /// From now on the policies that are here are all that there are. Returns when that counts.
    ///
    /// # Errors
    /// When the agent stops.
    pub async fn policies_told(&self) -> Result<(), Stopped> {
        self.send(Change::PoliciesTold).await
    }

    async fn send(&self, change: Change) -> Result<(), Stopped> {
        let (done, visible) = oneshot::channel();
        self.0.send((change, done)).await.map_err(|_| Stopped)?;
        visible.await.map_err(|_| Stopped)
    }
}

impl State {
    /// A mesh of what the file holds, if there is one.
    pub fn new(file: Option<Mesh>) -> (Self, Handle, watch::Receiver<Arc<Mesh>>) {
        let (sender, changes) = mpsc::channel(CHANGES);
        let layers = Layers::new(file);
        let (published, readers) = watch::channel(Arc::new(layers.mesh.clone()));
        let state = Self {
            changes,
            published,
            layers,
            replaced: Replaced::default(),
        };
        (state, Handle(sender), readers)
    }

    /// There is a control plane, whose policies are not here: until they are, connections to pods are held.
    pub fn await_policies(&mut self) {
        self.layers.mesh.set_policies_awaited(true);
        self.published.send_replace(Arc::new(self.layers.mesh.clone()));
    }

    /// Applies changes until `stop`.
    pub async fn run(mut self, stop: CancellationToken) {
        loop {
            let (change, done) = tokio::select! {
                () = stop.cancelled() => return,
                Some(next) = self.changes.recv() => next,
                () = tokio::time::sleep(SWEEP_INTERVAL), if !self.replaced.0.is_empty() => {
                    self.replaced.sweep().await;
                    continue;
                }
            };
            let is_small = match &change {
                Change::Updates(updates) => updates.len() <= MANY,
                Change::File(_) => false,
                Change::PoliciesTold => true,
            };
            if is_small {
                self.layers.change(change);
            } else {
                let mut layers = mem::take(&mut self.layers);
                let changed = tokio::task::spawn_blocking(move || {
                    layers.change(change);
                    layers
                });
                match changed.await {
                    Ok(layers) => self.layers = layers,
                    Err(error) => {
                        tracing::error!(%error, "the mesh is no longer changed");
                        return;
                    }
                }
            }
            let before = self.published.send_replace(Arc::new(self.layers.mesh.clone()));
            // Whoever gave up waiting has still changed the mesh.
            let _ = done.send(());
            self.replaced.0.push(Outdated {
                snapshot: before,
                is_small,
            });
            self.replaced.sweep().await;
        }
    }
}

/// Snapshots that readers may still have. The last to have one pays for its end, and that must not be a connection: after a
/// large change it is many milliseconds of work.
#[derive(Debug, Default)]
struct Replaced(Vec<Outdated>);

#[derive(Debug)]
struct Outdated {
    snapshot: Arc<Mesh>,
    /// Little is in it alone.
    is_small: bool,
}

impl Replaced {
    /// Drops what no reader has: of that which is large, where it holds up no other task.
    async fn sweep(&mut self) {
        // Nobody else can have it again: there is nobody to have it from.
        let is_unused = |one: &mut Outdated| Arc::strong_count(&one.snapshot) == 1;
        let excess = self.0.len().saturating_sub(OUTDATED);
        let mut unused: Vec<_> = self.0.drain(..excess).collect();
        unused.extend(self.0.extract_if(.., is_unused));
        if unused.iter().all(|one| one.is_small) {
            return;
        }
        if let Err(error) = tokio::task::spawn_blocking(move || drop(unused)).await {
            tracing::error!(%error, "an old snapshot of the mesh was not dropped");
        }
    }
}

/// What the sources say, one over the other.
#[derive(Debug, Default)]
struct Layers {
    mesh: Mesh,
    /// With a file: its part, and that of the control plane alone. Both share their values with `mesh`.
    file: Option<(Mesh, Mesh)>,
}

impl Layers {
    fn new(file: Option<Mesh>) -> Self {
        Self {
            mesh: file.clone().unwrap_or_default(),
            file: file.map(|file| (file, Mesh::default())),
        }
    }

    fn change(&mut self, change: Change) {
        match change {
            Change::Updates(updates) => {
                for update in updates {
                    self.update(update);
                }
            }
            Change::File(file) => self.replace_file(*file),
            Change::PoliciesTold => self.mesh.set_policies_awaited(false),
        }
    }

    fn update(&mut self, update: Update) {
        let Some((file, below)) = &mut self.file else {
            return self.mesh.apply(update);
        };
        let key = below.key_of(&update);
        below.apply(update.clone());
        // What the file has under the same key stays.
        if key.is_some_and(|key| file.get(&key).is_none()) {
            self.mesh.apply(update);
        }
    }

    fn replace_file(&mut self, new: Mesh) {
        let (old, below) = self.file.take().unwrap_or_default();
        for key in old.keys() {
            if new.get(&key).is_none() {
                let update = below.get(&key).unwrap_or_else(|| key.removal());
                self.mesh.apply(update);
            }
        }
        for key in new.keys() {
            let value = new.get(&key);
            if value != self.mesh.get(&key)
                && let Some(value) = value
            {
                self.mesh.apply(value);
            }
        }
        self.file = Some((new, below));
    }
}

#[cfg(test)]
mod tests;
