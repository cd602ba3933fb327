//! How far the windows of a pod's HTTP/2 connections may grow.
//!
//! A connection's window grows with its streams, so that applications which do not read never stop the others. What such
//! applications have not read lies in the agent's memory, outside the pod's own limits; so all connections of a pod share a
//! budget. When it is spent, that pod's connections keep their first window, and its own stalled streams can stop its others.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use super::Http2Config;

/// What a pod's connections, in one direction, may hold beyond the first window of each.
#[derive(Debug, Clone)]
pub(crate) struct WindowBudget(Arc<AtomicU64>);

impl WindowBudget {
    pub(crate) fn new(config: &Http2Config) -> Self {
        Self(Arc::new(AtomicU64::new(config.window_budget_bytes)))
    }

    /// A connection's part of it, nothing so far.
    pub(crate) fn share(&self) -> WindowShare {
        WindowShare {
            budget: self.clone(),
            held_bytes: 0,
            streams: 0,
        }
    }
}

/// A connection's part of a [`WindowBudget`], given back when it is dropped.
#[derive(Debug)]
pub(crate) struct WindowShare {
    budget: WindowBudget,
    held_bytes: u64,
    /// The most streams that the connection has had.
    streams: usize,
}

impl WindowShare {
    /// The window to set now that the connection has `streams` streams; `None` if it stays as it is.
    pub(super) fn grow(&mut self, config: &Http2Config, streams: usize) -> Option<u32> {
        if streams <= self.streams {
            return None;
        }
        self.streams = streams;
        let first = config.connection_window_bytes;
        let wanted = u64::from(config.connection_window(streams) - first).saturating_sub(self.held_bytes);
        let mut taken = 0;
        // The closure never refuses, so there is always a value from before.
        let _ = self
            .budget
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                taken = wanted.min(left);
                Some(left - taken)
            });
        self.held_bytes += taken;
        (taken > 0).then(|| first + u32::try_from(self.held_bytes).expect("not more than a window"))
    }
}

impl Drop for WindowShare {
    fn drop(&mut self) {
        self.budget.0.fetch_add(self.held_bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_grow_with_their_streams_within_the_budget_and_give_it_back() {
        const MIB: u64 = 1 << 20;
        let config = Http2Config {
            window_budget_bytes: 20 * MIB,
            ..Http2Config::default()
        };
        let budget = WindowBudget::new(&config);
        let (mut first, mut second) = (budget.share(), budget.share());
        let mib = |window: Option<u32>| window.map(|bytes| u64::from(bytes) / MIB);
        assert_eq!(mib(first.grow(&config, 3)), None);
        assert_eq!(mib(first.grow(&config, 4)), Some(20));
        assert_eq!(mib(first.grow(&config, 2)), None);
        assert_eq!(mib(second.grow(&config, 5)), Some(24));
        // 8 MiB are left.
        assert_eq!(mib(first.grow(&config, 100)), Some(28));
        assert_eq!(mib(second.grow(&config, 100)), None);
        drop(first);
        assert_eq!(mib(second.grow(&config, 101)), Some(36));
        drop(second);
        assert_eq!(budget.0.load(Ordering::Relaxed), 20 * MIB);
    }
}
