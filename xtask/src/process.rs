//! Running other programs: output streamed, a line per step with its time, signals passed on so that what runs can clean up.

use std::{
    env,
    ffi::OsStr,
    io::{BufRead, BufReader, Write},
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::atomic::{AtomicI32, Ordering},
    time::Instant,
};

use anyhow::{Context, Result, bail};
use nix::{
    libc::c_int,
    sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, kill, sigaction},
    unistd::Pid,
};

/// Process id of what runs now, for the signal handler; 0 when nothing does.
static CHILD: AtomicI32 = AtomicI32::new(0);
/// The last signal that asked us to end; 0 when none did.
static SIGNAL: AtomicI32 = AtomicI32::new(0);

/// From now on a request to end is passed to what runs, and kept for [`interrupted`]: the child cleans up, then we end.
/// A handler, not SIG_IGN, because children inherit the latter.
pub(crate) fn watch_signals() {
    let action = SigAction::new(SigHandler::Handler(pass_on), SaFlags::SA_RESTART, SigSet::empty());
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        // SAFETY: `pass_on` does only what a handler may: atomics and kill(2).
        unsafe { sigaction(signal, &action) }.expect("these signals can be caught");
    }
}

extern "C" fn pass_on(signal: c_int) {
    SIGNAL.store(signal, Ordering::SeqCst);
    forward();
}

fn forward() {
    let child = CHILD.load(Ordering::SeqCst);
    if child > 0
        && let Ok(signal) = Signal::try_from(SIGNAL.load(Ordering::SeqCst))
    {
        // It may have ended by now; then there is nothing to tell.
        let _ = kill(Pid::from_raw(child), signal);
    }
}

/// Whether we were asked to end.
pub(crate) fn interrupted() -> bool {
    SIGNAL.load(Ordering::SeqCst) != 0
}

/// A part of the work, told with the time it took.
pub(crate) struct Step {
    what: String,
    start: Instant,
}

impl Step {
    pub(crate) fn start(what: impl Into<String>) -> Self {
        let what = what.into();
        eprintln!("==> {what}");
        Self {
            what,
            start: Instant::now(),
        }
    }

    pub(crate) fn done(self) {
        eprintln!("<== {} ({:.1} s)", self.what, self.start.elapsed().as_secs_f64());
    }
}

/// The workspace.
pub(crate) fn root() -> PathBuf {
    // Cargo tells where the package is now; what was compiled in is for a binary that is started by hand.
    let package =
        env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    package.parent().expect("xtask lies in the workspace").to_owned()
}

/// A command in the workspace, without what the cargo that started us told us about ourselves: a child cargo would
/// rebuild for it, or take the wrong compiler.
pub(crate) fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.current_dir(root());
    if let Ok(path) = env::join_paths(path()) {
        command.env("PATH", path);
    }
    for (name, _) in env::vars_os() {
        if name.to_str().is_some_and(inherited_from_cargo) {
            command.env_remove(name);
        }
    }
    command
}

fn inherited_from_cargo(name: &str) -> bool {
    name == "CARGO"
        || name == "RUST_RECURSION_COUNT"
        || [
            "CARGO_PKG_",
            "CARGO_MANIFEST_",
            "CARGO_BIN_",
            "CARGO_CRATE_",
            "CARGO_PRIMARY_",
        ]
        .iter()
        .any(|prefix| name.starts_with(prefix))
}

/// Cargo, of the toolchain that the workspace names.
pub(crate) fn cargo() -> Command {
    command("cargo")
}

/// Runs a command with its output on ours.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let shown = show(command);
    let child = command
        .stdin(Stdio::null())
        .spawn()
        .with_context(|| format!("starting {shown}"))?;
    check(wait(child)?, &shown)
}

/// Runs a command with its standard error on ours, and gives each line of its standard output to `line`.
pub(crate) fn run_lines(command: &mut Command, mut line: impl FnMut(&str)) -> Result<()> {
    let shown = show(command);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("starting {shown}"))?;
    let output = child.stdout.take().expect("piped");
    watch(&child);
    for text in BufReader::new(output).split(b'\n') {
        line(&String::from_utf8_lossy(
            &text.with_context(|| format!("reading from {shown}"))?,
        ));
    }
    check(wait(child)?, &shown)
}

/// What a command prints; `None` when it is not there or fails.
pub(crate) fn output(command: &mut Command) -> Option<String> {
    let output = command.stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    output
        .status
        .success()
        .then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

fn watch(child: &Child) {
    CHILD.store(
        i32::try_from(child.id()).expect("process ids are positive"),
        Ordering::SeqCst,
    );
    if interrupted() {
        forward(); // It came between the start and the line above.
    }
}

fn wait(mut child: Child) -> Result<ExitStatus> {
    watch(&child);
    let status = child.wait();
    CHILD.store(0, Ordering::SeqCst);
    Ok(status?)
}

fn check(status: ExitStatus, shown: &str) -> Result<()> {
    let _ = std::io::stdout().flush();
    if interrupted() {
        bail!("interrupted");
    }
    match (status.code(), status.signal()) {
        (Some(0), _) => Ok(()),
        (Some(code), _) => bail!("{shown} failed with code {code}"),
        (None, signal) => bail!("{shown} was ended by signal {}", signal.unwrap_or_default()),
    }
}

fn show(command: &Command) -> String {
    let program = Path::new(command.get_program())
        .file_name()
        .unwrap_or(command.get_program());
    let words = std::iter::once(program).chain(command.get_args());
    format!(
        "`{}`",
        words
            .map(|word| word.to_string_lossy())
            .collect::<Vec<_>>()
            .join(" ")
    )
}

/// Where a program is.
pub(crate) fn find(program: &str) -> Option<PathBuf> {
    path()
        .into_iter()
        .map(|directory| directory.join(program))
        .find(|file| file.is_file())
}

/// PATH, and after it what we installed ourselves, and where Debian keeps the programs of the administrator.
fn path() -> Vec<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let ours = [tools().join("bin"), "/usr/sbin".into(), "/sbin".into()];
    env::split_paths(&path).chain(ours).collect()
}

/// Where programs go that were built for us.
pub(crate) fn tools() -> PathBuf {
    root().join("target/tools")
}
