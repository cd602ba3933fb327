//! Whether a pod is still as the last look at it found it: what is asked of every pod all the time, and so what must be cheap. The
//! programs, which take some 10 ms of CPU, are started only where the kernel says that rules were changed, whosever they are.

use std::{
    hash::{DefaultHasher, Hash as _, Hasher as _},
    io,
    time::{Duration, Instant},
};

use super::{
    rules::{Family, Table},
    run::{Tools, Variant},
};
use crate::{
    redirect::rules::Rules,
    sys::{netns::Netns, rulesets},
};

/// Time between looks by the programs where the kernel can't be asked.
const LOOK_INTERVAL: Duration = Duration::from_secs(30);

/// What a pod's capture is made from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) netns_ino: u64,
    pub(super) rules: Rules,
    /// Routes for IPv6 as well.
    pub(super) v6: bool,
}

/// A look at a pod that found in place, or put there, what was wanted.
#[derive(Debug)]
pub(super) struct Look {
    found: Wanted,
    /// When the rules were found in place; `None` if they were written, and others may have been just after.
    rules: Option<(Instant, State)>,
}

/// What changes with the rules of a namespace; `None` if the kernel can't be asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct State(Option<u64>);

impl Look {
    /// One that has written rules.
    pub(super) fn written(found: Wanted) -> Self {
        Self { found, rules: None }
    }

    /// One that found the rules in place, and before that this state.
    pub(super) fn in_place(found: Wanted, state: State) -> Self {
        Self {
            found,
            rules: Some((Instant::now(), state)),
        }
    }

    /// Whether it was for the same.
    pub(super) fn was_for(&self, wanted: &Wanted) -> bool {
        self.found == *wanted
    }

    /// Whether rules are as they were found, now that the state is `now`.
    pub(super) fn rules_hold(&self, now: State) -> bool {
        self.rules.is_some_and(|(at, then)| match (then, now) {
            (State(Some(then)), State(Some(now))) => then == now,
            _ => at.elapsed() < LOOK_INTERVAL,
        })
    }
}

impl State {
    /// That of a namespace, for rules that these programs write.
    pub(super) fn of(tools: &Tools, netns: &Netns) -> Self {
        let asked = netns.run(|| match tools.variant {
            Variant::Nft => rulesets::nftables_generation().map(u64::from),
            Variant::Legacy => tables_digest(tools),
        });
        let state = asked.flatten().inspect_err(
            |error| tracing::debug!(netns = %netns.id(), %error, "the state of rules can't be asked for"),
        );
        Self(state.ok())
    }
}

fn tables_digest(tools: &Tools) -> io::Result<u64> {
    let mut digest = DefaultHasher::new();
    for programs in tools.families() {
        let layout = match programs.family {
            Family::V4 => rulesets::V4,
            Family::V6 => rulesets::V6,
        };
        // Without DNS capture there is nothing of ours in the others.
        for table in [Table::Mangle, Table::Nat] {
            rulesets::table_digest(layout, table.name())?.hash(&mut digest);
        }
    }
    Ok(digest.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_hold_as_long_as_their_state_does() {
        let wanted = |v6| Wanted {
            netns_ino: 1,
            rules: Rules::default(),
            v6,
        };
        let [known, other, unknown] = [Some(1), Some(2), None].map(State);
        let mut look = Look::in_place(wanted(true), known);
        assert!(look.was_for(&wanted(true)) && !look.was_for(&wanted(false)));
        assert!(look.rules_hold(known) && !look.rules_hold(other) && look.rules_hold(unknown));
        let old = Instant::now().checked_sub(LOOK_INTERVAL).unwrap();
        look.rules = Some((old, known));
        assert!(look.rules_hold(known) && !look.rules_hold(unknown));
        look.rules = Some((old, unknown));
        assert!(!look.rules_hold(known) && !look.rules_hold(unknown));
        assert!(!Look::written(wanted(true)).rules_hold(known));
    }
}
