//! The installer of the CNI plugin: its binary among the CNI's, and its entry in the CNI's configuration.
//!
//! [`Installation::install`] does once what is missing, [`remove`] undoes it; both are for `redirector install-cni` and
//! `uninstall`. [`watch`] keeps it in order while an agent runs, and [`leave`] finds out whether an agent that stops is to
//! take it away. Which text goes where is decided in `plan` and `conflist`; `files` alone changes something.
//!
//! An order holds throughout: the binary is there before an entry names it, and goes after the last one.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use serde::Serialize;

use self::{
    files::{Disk, Stamp, System, failed},
    plan::{Attributes, Plan, Problem},
};
use super::entry::{Entry, TYPE};
use crate::sys::lock::{DirectoryLock, LockError};

mod conflist;
mod files;
pub mod leave;
mod plan;
pub mod watch;

pub use plan::Mode;

/// Rounds of looking and doing: each brings nearer what is wanted unless somebody else changes the directory meanwhile.
const ROUNDS: usize = 5;

/// How long another installer may be at work, and the time between two looks.
const LOCK_DEADLINE: Duration = Duration::from_secs(5);
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// Settings of the installer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Config {
    /// The CNI's configurations.
    pub conf_dir: PathBuf,
    /// The CNI's binaries.
    pub bin_dir: PathBuf,
    /// The plugin, as it comes with us.
    pub plugin: PathBuf,
    /// How it gets into the configuration.
    pub mode: Mode,
    /// What it is told.
    pub entry: Entry,
}

/// Why the plugin is not installed, or not removed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The system refuses.
    #[error("cannot {operation} {}{}", path.display(), advice(source))]
    Io {
        /// What was tried.
        operation: &'static str,
        /// On what.
        path: PathBuf,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// The configuration that is there cannot take our entry.
    #[error("{}: {problem}", directory.display())]
    Configuration {
        /// Where it is.
        directory: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// Another installer is at work.
    #[error("another installer is at work in {}", .0.display())]
    Busy(PathBuf, #[source] LockError),
    /// Somebody changes the directory as fast as we do.
    #[error("{} changes all the time", .0.display())]
    Restless(PathBuf),
}

/// What is to be done about an error of the system.
fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::ReadOnlyFilesystem => {
            " (the file system is read-only: mount the node's directory so that it can be written)"
        }
        io::ErrorKind::PermissionDenied => {
            " (this process may not: run it as root, and where SELinux is enforcing, with a type that may write there, spc_t for example)"
        }
        io::ErrorKind::NotFound => {
            " (it is not there: mount the node's directory, or name the right one with --cni-conf-dir, --cni-bin-dir or --cni-plugin)"
        }
        io::ErrorKind::StorageFull => " (the disk is full)",
        _ => "",
    }
}

/// What an installer finds in order, or has brought about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Installed {
    /// The file that has our entry.
    pub file: PathBuf,
    /// Whether something had to be changed for that.
    pub changed: bool,
    /// What whoever chose the settings should know.
    pub warning: Option<String>,
}

/// The plugin on this node, as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Look {
    /// The file that has our entry, or is to have it.
    pub file: PathBuf,
    /// The program that the runtime calls.
    pub binary: PathBuf,
    /// The file has the entry, where it must be.
    pub has_entry: bool,
    /// The program is there.
    pub has_binary: bool,
    /// What whoever chose the settings should know.
    pub warning: Option<String>,
}

/// The plugin's place on this node.
#[derive(Debug)]
pub struct Installation {
    config: Config,
    /// The plugin as it comes with us and as it lies there, when both were last found to be the same.
    same: Option<(Stamp, Stamp)>,
    /// What others have left unfinished is gone.
    is_tidy: bool,
}

/// What is missing.
struct Missing {
    binary: bool,
    plan: Plan,
    cilium_is_exclusive: bool,
}

impl Missing {
    fn nothing(&self) -> bool {
        !self.binary && self.plan.steps.is_empty()
    }
}

impl Installation {
    /// Of this configuration. Touches nothing yet.
    pub fn new(config: Config) -> Self {
        Self {
            config,
            same: None,
            is_tidy: false,
        }
    }

    /// Puts the plugin where it is missing. Blocking.
    ///
    /// # Errors
    /// What stands in its way, and what to do about it. All that could be done is.
    pub fn install(&mut self) -> Result<Installed, Error> {
        self.install_on(&System)
    }

    fn install_on(&mut self, disk: &dyn Disk) -> Result<Installed, Error> {
        let missing = self.look();
        if let Ok(missing) = &missing
            && missing.nothing()
            && self.is_tidy
        {
            return Ok(self.installed(&missing.plan, false));
        }
        let _locks = lock(&self.config.conf_dir, &self.config.bin_dir)?;
        for directory in [&self.config.conf_dir, &self.config.bin_dir] {
            files::remove_unfinished(disk, directory)?;
        }
        self.is_tidy = true;
        let mut changed = false;
        for _ in 0..ROUNDS {
            let missing = self.look()?;
            if missing.nothing() {
                return Ok(self.installed(&missing.plan, changed));
            }
            if missing.binary {
                self.copy_binary(disk)?;
            }
            for step in &missing.plan.steps {
                files::carry_out(disk, &self.config.conf_dir, step)?;
            }
            changed = true;
        }
        Err(Error::Restless(self.config.conf_dir.clone()))
    }

    fn installed(&self, plan: &Plan, changed: bool) -> Installed {
        Installed {
            file: self.config.conf_dir.join(&plan.file),
            changed,
            warning: plan.warning.clone(),
        }
    }

    /// Whether the plugin is in its place. Changes nothing.
    ///
    /// # Errors
    /// Those of looking, and what would keep it from being installed.
    pub fn is_installed(&mut self) -> Result<Look, Error> {
        let Missing { binary, plan, .. } = self.look()?;
        Ok(Look {
            file: self.config.conf_dir.join(&plan.file),
            binary: self.config.binary(),
            has_entry: plan.steps.is_empty(),
            has_binary: !binary,
            warning: plan.warning,
        })
    }

    /// What is missing. Changes nothing.
    fn look(&mut self) -> Result<Missing, Error> {
        let listing = files::list(&self.config.conf_dir)?;
        let plan = plan::install(&listing, &self.config.mode, &self.config.entry);
        Ok(Missing {
            binary: !self.has_binary()?,
            plan: plan.map_err(|problem| self.config.problem(&problem))?,
            cilium_is_exclusive: listing.cilium_is_exclusive(),
        })
    }

    /// Whether the binary is there. It is compared only when one of the two has changed.
    fn has_binary(&mut self) -> Result<bool, Error> {
        let (ours, theirs) = (&self.config.plugin, self.config.binary());
        let stamp = Stamp::of(ours).and_then(|stamp| stamp.ok_or_else(|| io::ErrorKind::NotFound.into()));
        let stamp = stamp.map_err(failed("read", ours))?;
        let there = Stamp::of(&theirs).map_err(failed("read", &theirs))?;
        let Some(there) = there.filter(Stamp::is_executable) else {
            return Ok(false);
        };
        if self.same == Some((stamp, there)) {
            return Ok(true);
        }
        let wanted = fs::read(ours).map_err(failed("read", ours))?;
        let found = fs::read(&theirs).map_err(failed("read", &theirs))?;
        self.same = (wanted == found).then_some((stamp, there));
        Ok(self.same.is_some())
    }

    fn copy_binary(&self, disk: &dyn Disk) -> Result<(), Error> {
        let ours = &self.config.plugin;
        let bytes = fs::read(ours).map_err(failed("read", ours))?;
        let attributes = Attributes {
            mode: 0o755,
            owner: None,
        };
        files::replace(disk, &self.config.binary(), &bytes, attributes)
    }
}

impl Config {
    /// Where the runtime looks for the plugin.
    fn binary(&self) -> PathBuf {
        self.bin_dir.join(TYPE)
    }

    /// What the plugin writes: its log, and the one before.
    fn logs(&self) -> Vec<PathBuf> {
        let Some(log) = &self.entry.log_file else {
            return Vec::new();
        };
        let mut before = log.clone().into_os_string();
        before.push(".1");
        vec![log.clone(), before.into()]
    }

    fn problem(&self, problem: &Problem) -> Error {
        Error::Configuration {
            directory: self.conf_dir.clone(),
            problem: problem.to_string(),
        }
    }

    /// Whether an entry is this agent's, or an earlier one's in its place: it leads to the same socket, and spares the same pods.
    fn owns(&self, entry: &Entry) -> bool {
        entry.socket() == self.entry.socket() && entry.agent_pod == self.entry.agent_pod
    }
}

/// What was removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Removed {
    /// Files that have an entry of another agent's, which stays, as does the binary for it.
    pub left: Vec<PathBuf>,
}

/// Takes the plugin away: our entries wherever they are, and the binary if nobody else's entry needs it. Entries that lead to
/// another agent stay. Blocking.
///
/// # Errors
/// What could not be removed; the binary stays then too.
pub fn remove(config: &Config, whose: Whose) -> Result<Removed, Error> {
    remove_on(&System, config, whose)
}

/// Which entries go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whose {
    /// Those that lead to the agent's socket.
    Socket,
    /// Of these, those that were written for its own DaemonSet: another's agent may have come to the same socket.
    Own,
}

fn remove_on(disk: &dyn Disk, config: &Config, whose: Whose) -> Result<Removed, Error> {
    let (conf_dir, bin_dir) = (&config.conf_dir, &config.bin_dir);
    let mine = |entry: &Entry| match whose {
        Whose::Socket => entry.socket() == config.entry.socket(),
        Whose::Own => config.owns(entry),
    };
    // Without configurations nothing tells whether somebody needs the binary: the settings may be of another place.
    if !conf_dir.is_dir() {
        return Ok(Removed { left: Vec::new() });
    }
    let has_binaries = bin_dir.is_dir();
    let _locks = lock(conf_dir, if has_binaries { bin_dir } else { conf_dir })?;
    files::remove_unfinished(disk, conf_dir)?;
    let left = remove_entries(disk, conf_dir, &mine)?;
    if has_binaries {
        files::remove_unfinished(disk, bin_dir)?;
    }
    if left.is_empty() {
        for file in config.logs().into_iter().chain([config.binary()]) {
            files::remove(disk, &file)?;
        }
    }
    Ok(Removed {
        left: left.iter().map(|name| conf_dir.join(name)).collect(),
    })
}

/// Takes entries out that are `mine`; the files that have others of ours.
fn remove_entries(
    disk: &dyn Disk,
    conf_dir: &Path,
    mine: &dyn Fn(&Entry) -> bool,
) -> Result<Vec<String>, Error> {
    for _ in 0..ROUNDS {
        let (steps, left) = plan::remove(&files::list(conf_dir)?, mine);
        if steps.is_empty() {
            return Ok(left);
        }
        for step in &steps {
            files::carry_out(disk, conf_dir, step)?;
        }
    }
    Err(Error::Restless(conf_dir.to_owned()))
}

/// Does what needs the directories' locks, and waits for them for some seconds: another installer needs milliseconds. Blocking.
///
/// # Errors
/// Those of `work`.
pub fn patiently<T>(mut work: impl FnMut() -> Result<T, Error>) -> Result<T, Error> {
    let end = Instant::now() + LOCK_DEADLINE;
    loop {
        match work() {
            Err(Error::Busy(..)) if Instant::now() < end => std::thread::sleep(LOCK_PAUSE),
            done => return done,
        }
    }
}

/// Both directories, for one installer at a time.
fn lock(conf_dir: &Path, bin_dir: &Path) -> Result<Vec<DirectoryLock>, Error> {
    let mut locks = Vec::new();
    for (at, directory) in [conf_dir, bin_dir].into_iter().enumerate() {
        // With one directory for both, the second lock would wait for the first.
        if at == 1 && fs::canonicalize(conf_dir).ok() == fs::canonicalize(bin_dir).ok() {
            continue;
        }
        let lock = DirectoryLock::take(directory).map_err(|error| match error {
            LockError::System(source) => failed("open", directory)(source),
            held => Error::Busy(directory.to_owned(), held),
        });
        locks.push(lock?);
    }
    Ok(locks)
}

#[cfg(test)]
mod tests;
