//! Waiting with a deadline, and with an ear for Ctrl-C.

use std::{
    io,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// Longest wait for something that takes milliseconds on an idle machine.
pub const DEADLINE: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(20);

static INTERRUPTED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// From now on a request to end does not end this process: it ends every wait, by a panic, so that all that was made is
/// dropped on the way out. Programs that are started still have the signals' usual meaning.
pub fn watch_signals() -> io::Result<()> {
    let flag = INTERRUPTED.get_or_init(Arc::default);
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(flag))?;
    }
    Ok(())
}

/// Whether we were asked to end.
pub fn interrupted() -> bool {
    INTERRUPTED.get().is_some_and(|flag| flag.load(Ordering::Relaxed))
}

/// Asks until there is an answer.
///
/// # Panics
/// After [`DEADLINE`], with what was waited for; and when we were asked to end.
pub fn until<T>(what: &str, ask: impl FnMut() -> Option<T>) -> T {
    within(DEADLINE, what, ask)
}

/// Asks until there is an answer, for as long as `deadline`.
///
/// # Panics
/// After the deadline, with what was waited for; and when we were asked to end.
pub fn within<T>(deadline: Duration, what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + deadline;
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(!interrupted(), "interrupted while waiting for {what}");
        assert!(Instant::now() < end, "waited {deadline:?} for {what}");
        thread::sleep(PAUSE);
    }
}

/// Waits until we are asked to end.
pub fn until_interrupted() {
    while !interrupted() {
        thread::sleep(PAUSE);
    }
}

/// Says at its end, also by a panic, that it is over: for threads that go on until then.
#[derive(Debug)]
pub struct Ends<'a>(pub &'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
