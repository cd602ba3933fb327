//! Other programs in a namespace: their output in a file, ended by process id when dropped, and by the kernel when the
//! thread that started them dies.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::netns::Namespace;

/// A program that runs in a namespace.
#[derive(Debug)]
pub struct Process {
    child: Child,
    log: PathBuf,
}

/// A command that will run in a namespace: nsenter and setpriv give way to it, so the process id is its own.
pub fn command(ns: &Namespace, program: impl AsRef<Path>) -> Command {
    let mut command = Command::new("nsenter");
    command.arg(format!("--net={}", ns.path().display()));
    command
        .args(["setpriv", "--pdeathsig", "KILL", "--"])
        .arg(program.as_ref())
        .stdin(Stdio::null());
    command
}

impl Process {
    /// Starts a command made by [`command`], with its output appended to `log`.
    pub fn start(command: &mut Command, log: &Path) -> Result<Self> {
        let file = File::options()
            .create(true)
            .append(true)
            .open(log)
            .with_context(|| format!("opening {}", log.display()))?;
        let child = command
            .stdout(file.try_clone()?)
            .stderr(file)
            .spawn()
            .with_context(|| format!("starting {command:?}"))?;
        Ok(Self {
            child,
            log: log.to_owned(),
        })
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).expect("process ids are positive");
        // It is our child and not waited for, so the id is still its own, even when it has ended.
        let _ = kill(Pid::from_raw(pid), signal);
    }

    /// Whether and how it ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("the child can be waited for")
    }

    /// Waits until it has ended.
    pub fn wait(&mut self, deadline: Duration) -> Option<ExitStatus> {
        let end = Instant::now() + deadline;
        loop {
            let status = self.ended();
            if status.is_some() || Instant::now() > end {
                return status;
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Where its output goes.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Everything it printed.
    pub fn output(&self) -> String {
        fs::read(&self.log)
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if thread::panicking() {
            let output = self.output();
            let tail: Vec<&str> = output.lines().rev().take(60).collect();
            eprintln!("---- end of {} ----", self.log.display());
            tail.iter().rev().for_each(|line| eprintln!("{line}"));
            eprintln!("----");
        }
        if self.ended().is_none() {
            self.signal(Signal::SIGKILL);
            let _ = self.child.wait();
        }
    }
}

/// Runs a command made by [`command`] to its end and returns what it printed on both outputs.
///
/// # Panics
/// When it cannot be started, or has not ended in time.
pub fn output(command: &mut Command, deadline: Duration) -> (ExitStatus, String) {
    let log = std::env::temp_dir().join(format!("{}.out", crate::netns::unique_prefix()));
    let mut process = Process::start(command, &log).unwrap_or_else(|error| panic!("{error:#}"));
    let status = process.wait(deadline);
    let text = process.output();
    drop(process);
    let _ = fs::remove_file(&log);
    let status =
        status.unwrap_or_else(|| panic!("{command:?} has not ended in {deadline:?}; it printed: {text}"));
    (status, text)
}
