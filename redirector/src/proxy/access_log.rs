//! The access log: a line for each connection that ends, at DEBUG for each that opens, with the target `access`.
//!
//! `record` calls it. Names, order and quoting of the fields are ztunnel's, and ours come after those; `telemetry::logs` writes them
//! (docs/access-log.md). Those that ended well may be sampled, and all together have a bound for each second, since strangers can have
//! lines written; what is left out is counted.

use std::{
    fmt,
    num::ParseFloatError,
    str::FromStr,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};
use tokio::time::Instant;
use tracing::{Level, field};

use super::{
    failure::Flag,
    flows::{Flow, Redirect},
    record::Party,
};

/// The target of its lines.
const TARGET: &str = "access";

/// The time of which lines are counted.
const WINDOW: Duration = Duration::from_secs(1);

/// Which lines are written.
#[derive(Debug, Clone, Copy)]
pub struct Config {
    /// Of the connections that end well; the others are all told.
    pub sample: Share,
    /// Lines in a second, of whatever kind; 0: no bound.
    pub lines_per_second: u32,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            sample: Share(1.0),
            lines_per_second: 5_000,
        }
    }
}

/// A part of a whole, from 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Share(f64);

/// Why a text is not a [`Share`].
#[derive(Debug, thiserror::Error)]
pub enum InvalidShare {
    /// No number.
    #[error("{text:?} is not a number from 0 to 1")]
    NotANumber {
        /// What it is.
        text: String,
        /// Why.
        #[source]
        source: ParseFloatError,
    },
    /// Another number.
    #[error("{0:?} is not from 0 to 1")]
    OutOfRange(String),
}

impl FromStr for Share {
    type Err = InvalidShare;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let share: f64 = text.parse().map_err(|source| InvalidShare::NotANumber {
            text: text.to_owned(),
            source,
        })?;
        match (0.0..=1.0).contains(&share) {
            true => Ok(Self(share)),
            false => Err(InvalidShare::OutOfRange(text.to_owned())),
        }
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Share {
    /// Whether the one with this number is of it. Of numbers in a row, any few hundred are divided as all are.
    fn has(self, number: u64) -> bool {
        // Multiples of the golden ratio are spread evenly.
        let place = number.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        (place as f64) < self.0 * 2_f64.powi(32)
    }
}

/// Writes the lines of all pods.
#[derive(Debug)]
pub(super) struct AccessLog {
    config: Config,
    window: Mutex<Window>,
    family: Family<Left, Counter>,
    not_sampled: Counter,
    too_many: Counter,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Left {
    reason: &'static str,
}

impl Default for AccessLog {
    fn default() -> Self {
        Self::new(Config::default())
    }
}

impl AccessLog {
    pub(super) fn new(config: Config) -> Self {
        let family = Family::default();
        let counter = |reason| family.get_or_create_owned(&Left { reason });
        Self {
            config,
            window: Mutex::new(Window {
                began: Instant::now(),
                written: 0,
                left_out: 0,
            }),
            not_sampled: counter("sample"),
            too_many: counter("rate"),
            family,
        }
    }

    /// Names its counters in `registry`.
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register(
            "redirector_access_lines_left_out",
            "Lines of the access log that were not written: the connection is not of the sample, or there were too many (rate)",
            self.family.clone(),
        );
    }

    /// It is open from now on.
    pub(super) fn opened(&self, flow: &Flow) {
        if tracing::enabled!(target: TARGET, Level::DEBUG) && self.is_of_sample(flow) && self.may_write() {
            write(flow, &Told::Opened);
        }
    }

    /// It has ended, by `error` if there is one.
    pub(super) fn ended(&self, flow: &Flow, flag: Flag, error: Option<&str>) {
        let is_logged = match error {
            None => tracing::enabled!(target: TARGET, Level::INFO),
            Some(_) if flow.open.is_none() => tracing::enabled!(target: TARGET, Level::WARN),
            Some(_) => tracing::enabled!(target: TARGET, Level::ERROR),
        };
        if is_logged && (error.is_some() || self.is_of_sample(flow)) && self.may_write() {
            write(flow, &Told::Ended { flag, error });
        }
    }

    fn is_of_sample(&self, flow: &Flow) -> bool {
        let is_of_it = self.config.sample.has(flow.id);
        if !is_of_it {
            self.not_sampled.inc();
        }
        is_of_it
    }

    /// Takes a place for a line. That there were too many is told by the first line after.
    fn may_write(&self) -> bool {
        let most = match self.config.lines_per_second {
            0 => return true,
            most => most,
        };
        let mut window = self.window.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(left_out) = window.place(Instant::now(), most) else {
            self.too_many.inc();
            return false;
        };
        drop(window);
        if left_out > 0 {
            tracing::warn!(target: TARGET, left_out, most_per_second = most, "lines left out");
        }
        true
    }
}

#[derive(Debug)]
struct Window {
    began: Instant,
    written: u32,
    left_out: u64,
}

impl Window {
    /// A place among the `most` lines of this second, and how many have found none in those before; `None` if none is left.
    fn place(&mut self, now: Instant, most: u32) -> Option<u64> {
        if now.duration_since(self.began) >= WINDOW {
            (self.began, self.written) = (now, 0);
        }
        if self.written >= most {
            self.left_out += 1;
            return None;
        }
        self.written += 1;
        Some(std::mem::take(&mut self.left_out))
    }
}

/// What a line tells.
enum Told<'a> {
    Opened,
    Ended { flag: Flag, error: Option<&'a str> },
}

/// Texts are quoted, addresses and numbers are not: as ztunnel has them.
fn write(flow: &Flow, told: &Told<'_>) {
    let facts = &flow.facts;
    let (source, destination) = (&facts.source, flow.destination());
    let service = facts.service.as_deref();
    let identity = |party: &Party| party.identity.as_ref().map(ToString::to_string);
    let redirect = facts.redirect.map(Redirect::as_str);
    // Level and names are a call's static data, so the line is written out once for each. What is not known is left out.
    macro_rules! line {
        ($level:ident, $message:literal, $($field:tt)*) => {
            tracing::event!(
                target: TARGET,
                parent: None,
                Level::$level,
                src.addr = %flow.src,
                src.workload = source.workload.as_deref(),
                src.namespace = source.namespace.as_deref(),
                src.identity = identity(source),
                src.cluster = cluster(source),
                dst.addr = facts.dst.map(field::display),
                dst.hbone_addr = facts.hbone_dst.as_ref().map(field::display),
                dst.service = service.map(|service| &*service.host.hostname),
                dst.workload = destination.workload.as_deref(),
                dst.namespace = destination.namespace.as_deref(),
                dst.identity = identity(destination),
                dst.cluster = cluster(destination),
                direction = flow.direction.as_str(),
                $($field)*
                $message
            )
        };
    }
    let Some(open) = &flow.open else {
        if let Told::Ended { flag, error } = told {
            let policy = flow.policy.get().map(ToString::to_string);
            tracing::event!(
                target: TARGET,
                parent: None,
                Level::WARN,
                src.addr = %flow.src,
                dst.addr = facts.dst.map(field::display),
                direction = flow.direction.as_str(),
                error,
                policy,
                redirect,
                response_flags = flag.as_str(),
                "connection failed"
            );
        }
        return;
    };
    let security = facts.security_of(open.security);
    match told {
        Told::Opened => line!(DEBUG, "connection opened", security, redirect,),
        Told::Ended { flag, error } => {
            let policy = flow.policy.get().map(ToString::to_string);
            let (sent, received) = (open.sent.bytes(), open.received.bytes());
            let duration = format!("{}ms", flow.elapsed().as_millis());
            macro_rules! complete {
                ($level:ident) => {
                    line!(
                        $level,
                        "connection complete",
                        bytes_sent = sent,
                        bytes_recv = received,
                        duration,
                        error,
                        security,
                        policy,
                        redirect,
                        response_flags = error.map(|_| flag.as_str()),
                    )
                };
            }
            match error {
                None => complete!(INFO),
                Some(_) => complete!(ERROR),
            }
        }
    }
}

fn cluster(party: &Party) -> Option<&str> {
    let workload = party.of.as_deref()?;
    Some(&*workload.cluster_id).filter(|cluster| !cluster.is_empty())
}

#[cfg(test)]
mod tests;
