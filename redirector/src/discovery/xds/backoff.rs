//! How long to wait before the next connection.

use std::time::Duration;

/// First and longest wait. ztunnel's (`xds/client.rs`).
const FIRST: Duration = Duration::from_millis(10);
const LONGEST: Duration = Duration::from_secs(15);

/// The wait, which grows with each connection that comes to nothing.
#[derive(Debug)]
pub(super) struct Backoff {
    next: Duration,
    /// The connection before ended in good order, and at once.
    was_short: bool,
}

impl Default for Backoff {
    fn default() -> Self {
        Self {
            next: FIRST,
            was_short: false,
        }
    }
}

impl Backoff {
    /// The wait after a connection that `lasted` so long. One that was of use begins anew: it stood for longer than the longest
    /// wait, or has ended in good order. Only the first of those that do so at once counts: each takes a whole mesh, and a server that
    /// sends that and hangs up would be asked for it a hundred times a second.
    pub(super) fn after(&mut self, lasted: Duration, is_ordinary: bool) -> Duration {
        let is_short = lasted < LONGEST;
        if !is_short || is_ordinary && !self.was_short {
            self.next = FIRST;
        }
        self.was_short = is_short && is_ordinary;
        let pause = self.next;
        self.next = (pause * 2).min(LONGEST);
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(1);

    fn pauses(connections: &[(Duration, bool)]) -> Vec<u128> {
        let mut backoff = Backoff::default();
        let pauses = connections
            .iter()
            .map(|(lasted, is_ordinary)| backoff.after(*lasted, *is_ordinary));
        pauses.map(|pause| pause.as_millis()).collect()
    }

    #[test]
    fn failures_are_ever_longer_apart() {
        let pauses = pauses(&[(SHORT, false); 13]);
        assert_eq!(pauses[..4], [10, 20, 40, 80]);
        assert_eq!(pauses[10..], [10_240, 15_000, 15_000]);
    }

    #[test]
    fn what_was_of_use_begins_anew() {
        let failed = (SHORT, false);
        assert_eq!(pauses(&[failed, failed, (SHORT, true), failed]), [10, 20, 10, 20]);
        assert_eq!(
            pauses(&[failed, failed, (LONGEST, false), failed]),
            [10, 20, 10, 20]
        );
        assert_eq!(
            pauses(&[failed, failed, (LONGEST, true), (LONGEST, true)]),
            [10, 20, 10, 10]
        );
    }

    #[test]
    fn a_server_that_hangs_up_again_and_again_is_asked_ever_more_seldom() {
        assert_eq!(pauses(&[(SHORT, true); 5]), [10, 20, 40, 80, 160]);
    }
}
