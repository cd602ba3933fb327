//! Which slots are free. The programs of a pod that is gone may still run for a moment, and would use what the slot's next owner has:
//! so the slot that has been free for longest is given out, and none that has just become free.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// What the kernel needs, at most, until a detached program runs no more: grace periods, which take some tens of milliseconds each
/// under load.
const REST: Duration = Duration::from_secs(1);

/// The free slots.
#[derive(Debug, Default)]
pub(super) struct FreeSlots {
    /// Longest free first; with when each was freed, if that was lately.
    waiting: VecDeque<(u32, Option<Instant>)>,
}

/// Why there is no slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unavailable {
    /// All are taken.
    Full,
    /// The next can be had after this time.
    Resting(Duration),
}

impl FreeSlots {
    /// Adds one that nobody has had, as far as anybody knows.
    pub(super) fn add_unused(&mut self, slot: u32) {
        self.waiting.push_front((slot, None));
    }

    /// Adds one that is no longer its pod's.
    pub(super) fn add_freed(&mut self, slot: u32, now: Instant) {
        self.waiting.push_back((slot, Some(now)));
    }

    /// Takes the one that has been free for longest.
    pub(super) fn take(&mut self, now: Instant) -> Result<u32, Unavailable> {
        let (slot, freed) = *self.waiting.front().ok_or(Unavailable::Full)?;
        let rested = freed.map_or(REST, |freed| now.saturating_duration_since(freed));
        if rested < REST {
            return Err(Unavailable::Resting(REST - rested));
        }
        self.waiting.pop_front();
        Ok(slot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slot_that_was_freed_first_is_given_out_first() {
        let start = Instant::now();
        let mut free = FreeSlots::default();
        assert_eq!(free.take(start), Err(Unavailable::Full));
        free.add_freed(7, start);
        free.add_freed(3, start + REST / 2);
        free.add_unused(9);
        let later = start + 2 * REST;
        assert_eq!(
            [free.take(later), free.take(later), free.take(later)],
            [Ok(9), Ok(7), Ok(3)]
        );
        assert_eq!(free.take(later), Err(Unavailable::Full));
    }

    #[test]
    fn no_slot_is_given_out_that_has_just_become_free() {
        let start = Instant::now();
        let mut free = FreeSlots::default();
        free.add_freed(7, start);
        free.add_freed(3, start);
        for now in [start, start + REST / 4] {
            assert_eq!(free.take(now), Err(Unavailable::Resting(start + REST - now)));
        }
        assert_eq!(free.take(start + REST), Ok(7));
        free.add_freed(7, start + REST);
        assert_eq!(free.take(start + REST), Ok(3));
        assert_eq!(free.take(start + REST), Err(Unavailable::Resting(REST)));
    }
}
