//! Keeps the plugin installed while an agent runs: looks once a second, and puts back what is missing.
//!
//! It reads all configurations at each look, some files of some kilobytes, instead of being told of changes: inotify says
//! nothing of what happens below an overlay or on the other side of a mount, and a look that is done anyway cannot miss one.
//!
//! Who rewrites the configuration whenever it changes would be fought at that pace. So after some repairs in a short time each
//! next one waits longer, and the agent says what to set.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use tokio::{sync::watch, task::spawn_blocking, time::timeout};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use super::{Config, Error, Installation, Installed};
use crate::telemetry::Chain;

/// Time between two looks: what somebody takes away is back within 2 s, the repair included.
const INTERVAL: Duration = Duration::from_secs(1);

/// Repairs that are made at once.
const PROMPT_REPAIRS: u32 = 4;

/// The wait before the next one, which doubles, and the longest.
const WAITS: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(60));

/// So long without a repair, and what was before is forgotten.
const QUIET: Duration = Duration::from_secs(180);

/// What stands in the way is said again after this time.
const REMINDER: Duration = Duration::from_secs(600);

/// Where the plugin is installed, or why it is not.
pub type State = Result<PathBuf, String>;

/// What an agent's status shows of it before the first look.
const AT_FIRST: &str = "the agent is not yet ready for pods";

/// Keeps an installation in order.
#[derive(Debug)]
pub struct Keeper {
    installation: Installation,
    repairs: Repairs,
    view: watch::Sender<State>,
    said: Option<(State, Instant)>,
    warned: Option<String>,
}

impl Keeper {
    /// Of this configuration, and how it stands.
    pub fn new(config: Config) -> (Self, watch::Receiver<State>) {
        let (view, receiver) = watch::channel(Err(AT_FIRST.to_owned()));
        let keeper = Self {
            installation: Installation::new(config),
            repairs: Repairs::default(),
            view,
            said: None,
            warned: None,
        };
        (keeper, receiver)
    }

    /// Goes on until `stop`. What is under way then is brought to its end first.
    pub async fn run(mut self, stop: CancellationToken) {
        let view = self.view.clone();
        loop {
            let looked = spawn_blocking(move || {
                let state = self.look(Instant::now());
                (self, state)
            });
            let Ok((keeper, state)) = looked.await else {
                error!("internal fault: the CNI plugin is no longer looked after");
                let _ = view.send_replace(Err("internal fault: it is no longer looked after".to_owned()));
                return;
            };
            self = keeper;
            self.tell(state, Instant::now());
            if timeout(INTERVAL, stop.cancelled()).await.is_ok() {
                return;
            }
        }
    }

    /// Looks, and repairs if that is due. Blocking.
    fn look(&mut self, now: Instant) -> Result<Installed, String> {
        let told = |error: Error| Chain(&error).to_string();
        if let Some(wait) = self.repairs.wait(now) {
            let missing = self.installation.look().map_err(told)?;
            if !missing.nothing() {
                let file = self.installation.config.conf_dir.join(&missing.plan.file);
                let advice = match missing.cilium_is_exclusive {
                    true => "Cilium sets others' files aside: set its cni.exclusive to false",
                    false => {
                        "find what writes there and let it be, or set ISTIO_OWNED_CNI_CONFIG (--cni-owned-config), which leaves others' files alone"
                    }
                };
                return Err(format!(
                    "somebody undoes what is written to {} again and again ({advice}); next try in {} s",
                    file.display(),
                    wait.as_secs().max(1)
                ));
            }
        }
        let installed = self.installation.install();
        if installed.as_ref().is_ok_and(|installed| installed.changed) {
            self.repairs.made(now);
        }
        installed.map_err(told)
    }

    /// Says what has changed.
    fn tell(&mut self, looked: Result<Installed, String>, now: Instant) {
        if let Ok(installed) = &looked {
            if installed.changed {
                info!(file = %installed.file.display(), "CNI plugin installed");
            }
            if let Some(warning) = installed
                .warning
                .clone()
                .filter(|text| self.warned.as_ref() != Some(text))
            {
                warn!("{warning}");
                self.warned = Some(warning);
            }
        }
        let state = looked.map(|installed| installed.file);
        let is_news = match &self.said {
            Some((said, at)) => !is_alike(said, &state) || now.duration_since(*at) > REMINDER,
            None => true,
        };
        if is_news {
            if let Err(why) = &state {
                warn!(why, "the CNI plugin is not installed; trying again");
            }
            self.said = Some((state.clone(), now));
        }
        self.view.send_if_modified(|shown| {
            let changed = *shown != state;
            *shown = state;
            changed
        });
    }
}

/// Whether two states are the same but for the time that is left.
fn is_alike(one: &State, other: &State) -> bool {
    let text = |state: &State| {
        let text = state
            .as_ref()
            .map_err(|why| why.split("; next try").next().map(str::to_owned));
        text.cloned()
    };
    text(one) == text(other)
}

/// The repairs of late.
#[derive(Debug, Default)]
struct Repairs {
    count: u32,
    last: Option<Instant>,
}

impl Repairs {
    /// How long the next one is to wait; none if it may be made.
    fn wait(&self, now: Instant) -> Option<Duration> {
        let past = now.duration_since(self.last?);
        let excess = self.count.checked_sub(PROMPT_REPAIRS)?;
        let wait = WAITS.0.saturating_mul(1 << excess.min(16)).min(WAITS.1);
        wait.checked_sub(past).filter(|wait| !wait.is_zero())
    }

    fn made(&mut self, now: Instant) {
        let is_old = self.last.is_none_or(|last| now.duration_since(last) > QUIET);
        self.count = if is_old { 1 } else { self.count.saturating_add(1) };
        self.last = Some(now);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::cni::install::{Mode, tests::Node};

    const LIST: &str = r#"{"cniVersion":"1.0.0","name":"net","plugins":[{"type":"bridge"}]}"#;

    #[test]
    fn repairs_are_prompt_at_first_and_then_wait_longer() {
        let begin = Instant::now();
        let mut repairs = Repairs::default();
        let (mut now, mut made) = (begin, Vec::new());
        // Somebody undoes each at once; a look each second, for ten minutes.
        for second in 0..600 {
            now = begin + Duration::from_secs(second);
            if repairs.wait(now).is_none() {
                repairs.made(now);
                made.push(second);
            }
        }
        assert_eq!(made[..5], [0, 1, 2, 3, 5], "{made:?}");
        assert!(made.len() < 20, "{made:?}");
        assert_eq!(repairs.wait(now + QUIET * 2), None);
        repairs.made(now + QUIET * 2);
        assert_eq!(
            repairs.wait(now + QUIET * 2),
            None,
            "what is long ago is forgotten"
        );
    }

    #[test]
    fn who_fights_is_named_and_fought_at_a_bounded_pace() {
        let node = Node::new(Mode::Chained { file: None });
        node.write("10-net.conflist", LIST);
        let (mut keeper, _view) = Keeper::new(node.config.clone());
        let now = Instant::now();
        for _ in 0..PROMPT_REPAIRS {
            assert!(keeper.look(now).unwrap().changed);
            node.write("10-net.conflist", LIST);
        }
        let why = keeper.look(now).unwrap_err();
        assert!(
            why.contains("10-net.conflist") && why.contains("--cni-owned-config"),
            "{why}"
        );
        assert_eq!(node.read("10-net.conflist"), LIST, "it is left alone meanwhile");
        node.write("05-ours.conflist.cilium_bak", "");
        let why = keeper.look(now).unwrap_err();
        assert!(why.contains("cni.exclusive"), "{why}");
        assert!(keeper.look(now + WAITS.1).unwrap().changed);
    }

    #[test]
    fn the_state_says_what_is_missing() {
        let node = Node::new(Mode::Chained { file: None });
        let (mut keeper, view) = Keeper::new(node.config.clone());
        assert_eq!(*view.borrow(), Err(AT_FIRST.to_owned()));
        let now = Instant::now();
        let mut state = || {
            let looked = keeper.look(now);
            keeper.tell(looked, now);
            view.borrow().clone()
        };
        let why = state().unwrap_err();
        assert!(why.contains("there is no CNI configuration yet"), "{why}");
        node.write("10-net.conflist", LIST);
        assert_eq!(state(), Ok(node.config.conf_dir.join("10-net.conflist")));
        fs::remove_dir_all(&node.config.bin_dir).unwrap();
        let why = state().unwrap_err();
        assert!(why.contains("--cni-bin-dir"), "{why}");
    }
}
