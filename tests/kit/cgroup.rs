//! A cgroup of a test's own, in the machine's hierarchy of version 2, and commands in it.

use std::{
    ffi::OsStr,
    fs, io,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};

use crate::netns::{left_by_the_dead, unique_prefix};

/// How long the kernel may take to take leave of the processes of a cgroup that have ended.
const LEAVE_DEADLINE: Duration = Duration::from_secs(5);

/// A cgroup, removed on drop. All that runs in it must have ended by then.
#[derive(Debug)]
pub struct Cgroup(PathBuf);

/// Where the hierarchy is mounted; `None` on a machine with version 1 alone.
pub fn mount_point() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (at, kind) = (fields.next()?, fields.next()?);
        (kind == "cgroup2").then(|| at.into())
    })
}

impl Cgroup {
    /// Makes one below the root; first removes what dead processes left.
    ///
    /// # Panics
    /// When it cannot.
    pub fn new() -> Self {
        Self::create().unwrap_or_else(|error| panic!("making a cgroup: {error:#}"))
    }

    fn create() -> Result<Self> {
        let root = mount_point().context("no cgroup2 is mounted on this machine")?;
        for entry in fs::read_dir(&root)?.flatten() {
            if entry.file_name().to_str().is_some_and(left_by_the_dead) {
                let _ = remove(&entry.path());
            }
        }
        let path = root.join(unique_prefix());
        fs::create_dir(&path).with_context(|| format!("making {}", path.display()))?;
        Ok(Self(path))
    }

    /// A cgroup below this one; to be dropped before it.
    ///
    /// # Panics
    /// When it cannot be made.
    pub fn child(&self) -> Self {
        let path = self.0.join("child");
        fs::create_dir(&path).unwrap_or_else(|error| panic!("making {}: {error}", path.display()));
        Self(path)
    }

    /// Its directory.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The same command, in this cgroup.
    pub fn command(&self, inner: &Command) -> Command {
        command_in(&self.0, inner)
    }
}

/// The same command, in the cgroup of this directory: a shell enters it and gives way.
pub fn command_in(directory: &Path, inner: &Command) -> Command {
    let mut command = Command::new("sh");
    command
        .args(["-c", r#"echo $$ > "$0/cgroup.procs" && exec "$@""#])
        .arg(directory)
        .arg(inner.get_program())
        .args(inner.get_args().map(OsStr::to_owned));
    command
}

impl Default for Cgroup {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        if let Err(error) = remove(&self.0) {
            eprintln!("removing {}: {error}", self.0.display());
        }
    }
}

/// Removes a cgroup and one level below it.
fn remove(path: &Path) -> io::Result<()> {
    let _ = fs::remove_dir(path.join("child"));
    let end = Instant::now() + LEAVE_DEADLINE;
    loop {
        match fs::remove_dir(path) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && Instant::now() < end => {
                thread::sleep(Duration::from_millis(10));
            }
            removed => return removed,
        }
    }
}
