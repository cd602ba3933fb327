//! An agent takes over from one that runs, and nothing is lost: no connection is refused, and those that are open end by themselves.
//!
//! The one that runs listens at `takeover.sock` in the state directory ([`give`]); the other asks there ([`take`]). What is handed
//! over are descriptors: the locks of the directories, the listeners of the node's, and those in the pods. These stay in the pods'
//! maps all the while, so a connection waits in their queues at worst. The steps, each with a deadline:
//!
//! 1. `Hello`: the settings are compared. `Welcome`: the descriptors of the node's.
//! 2. The new agent gets its mesh. `Pause`: the old one finishes the events that have begun, takes no more, leaves the pods as they
//!    are, and hands over their listeners; it goes on accepting connections.
//! 3. The new one opens its backend and makes each pod ready, from the records, as after a restart; it accepts nothing yet. `Commit`.
//! 4. `Yours`: the old one stops accepting, and drains what it has; the new one begins.
//!
//! Until the old one has sent `Yours` it is the one: it goes on as before when the new one is gone, slow or wrong, and puts right what
//! that one has done to the pods. It says so (`Withdrawn`), where it lives. If it dies, at whatever step, the new one goes on
//! with what it has, as after a crash.

mod give;
mod take;
mod wire;

use std::{
    collections::BTreeMap,
    sync::{Arc, atomic::AtomicBool},
};

pub(super) use self::{
    give::{Given, Giver, resting},
    take::{Error, made},
    wire::{Holding, Holdings},
};
use self::{
    take::Taking,
    wire::{PROTOCOL, Terms},
};
use super::start::Known;
use crate::{
    config::{Config, PodSource},
    pods::launch::Inherited,
};

/// What is had from another agent, if there is one to take over from.
pub(super) struct Succession {
    pub(super) taking: Option<Taking>,
    /// What that one holds and nobody here has taken yet.
    pub(super) before: Holdings,
    /// As long as it is another agent that serves the pods, what is in place is left to it.
    pub(super) foreign: Arc<AtomicBool>,
    pub(super) inherited: Arc<Inherited>,
}

impl Succession {
    pub(super) async fn begin(config: &Config) -> Result<Self, Error> {
        let (taking, before) = take::begin(config).await?.unzip();
        Ok(Self {
            foreign: Arc::new(AtomicBool::new(taking.is_some())),
            taking,
            before: before.unwrap_or_default(),
            inherited: Arc::default(),
        })
    }

    /// Gets the pods' listeners, when what is to be known is here.
    pub(super) async fn pods(&mut self, known: &Known) -> Result<(), Error> {
        if let Some(taking) = &mut self.taking {
            taking.pods(known.awaited.clone(), &self.inherited).await?;
        }
        Ok(())
    }
}

/// Why an agent with these settings neither hands over nor takes over.
fn impossible(config: &Config) -> Option<&'static str> {
    if matches!(config.pods, PodSource::Zds(_)) {
        Some("with --inpod-uds the node agent names the pods anew, and an agent hands over none")
    } else if config.ztunnel_uds.is_some() {
        Some("with --ztunnel-uds the listeners are other proxies', and an agent hands over none")
    } else {
        None
    }
}

/// What is to be equal.
fn terms(config: &Config) -> Terms {
    let mut settings = BTreeMap::new();
    let mut set = |flag: &str, value: String| settings.insert(flag.to_owned(), value);
    set("--redirect", config.redirect.to_string());
    set("--state-dir", config.state_dir.display().to_string());
    set("--bpffs-dir", config.bpffs_dir.display().to_string());
    if let PodSource::Cni(path) = &config.pods {
        set("--cni-socket", path.display().to_string());
    }
    set("--admin-addr", config.admin_addr.to_string());
    set("--metrics-addr", config.metrics_addr.to_string());
    set("--readiness-addr", config.readiness_addr.to_string());
    set("--ipv6-enabled", config.ipv6_enabled.to_string());
    Terms {
        protocol: PROTOCOL,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        settings,
    }
}
