//! Programs for pods that are still to come, loaded ahead: the verifier takes some milliseconds that a pod then does not wait for.
//!
//! A spare has its slot, which nobody else gets, and goes with this agent if no pod has taken it.

use std::sync::{Mutex, MutexGuard, PoisonError};

use redirector_common::maps::MAX_SLOTS;

use super::{Ebpf, slots::Unavailable};
use crate::{mesh::pod::PodUid, redirect::Error};

/// How many are kept. Pods come one by one or few at a time; in a greater burst the others are loaded as they come.
const WANTED: usize = 8;

/// A pod's own programs, in the kernel.
pub(super) struct Spare {
    /// The slot that they are for.
    pub(super) slot: u32,
    /// Them.
    pub(super) programs: aya::Ebpf,
}

/// Those that are ready.
#[derive(Default)]
pub(super) struct Spares {
    ready: Mutex<Vec<Spare>>,
    making: Mutex<()>,
}

impl Spares {
    fn with<T>(&self, f: impl FnOnce(&mut Vec<Spare>) -> T) -> T {
        f(&mut self.ready.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// None is being made as long as the guard is held by somebody else.
    fn making(&self) -> MutexGuard<'_, ()> {
        self.making.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ebpf {
    /// A slot and programs for a new instance: those that are ready, or else new ones.
    pub(super) fn programs_for(&self, uid: &PodUid) -> Result<Spare, Error> {
        self.store().admit(uid)?;
        if let Some(spare) = self.spares.with(Vec::pop) {
            self.store().give(spare.slot, uid)?;
            return Ok(spare);
        }
        let slot = self.allocate()?;
        let spare = self.load(slot)?;
        self.store().give(slot, uid)?;
        Ok(spare)
    }

    /// Makes as many ready as are wanted; fewer where the slots are scarce.
    pub(super) fn fill_spares(&self) -> Result<(), Error> {
        let _making = self.spares.making();
        if self.spares.with(|spares| spares.len()) < WANTED {
            self.shared.pin_again()?;
        }
        while self.spares.with(|spares| spares.len()) < WANTED {
            let Some(slot) = self.store().take_for_later() else {
                return Ok(());
            };
            let spare = self.load(slot)?;
            self.spares.with(|spares| spares.push(spare));
        }
        Ok(())
    }

    /// Reads anew who has which slot, and gives up the spares: to another agent their slots were free.
    pub(super) fn reread_slots(&self) -> Result<(), Error> {
        let _none_is_made = self.spares.making();
        self.spares.with(Vec::clear);
        self.store().reread(&self.build)
    }

    /// A slot for a new instance. Waits where all that are free have just become so.
    fn allocate(&self) -> Result<u32, Error> {
        /// Another pod may be faster.
        const ATTEMPTS: usize = 3;
        for _ in 0..ATTEMPTS {
            let taken = self.store().take();
            match taken {
                Ok(slot) => return Ok(slot),
                Err(Unavailable::Resting(time)) => std::thread::sleep(time),
                Err(Unavailable::Full) => break,
            }
        }
        Err(Error::new(
            "taking a slot for a pod",
            format!("all {MAX_SLOTS} are in use, or have just been: it is tried again"),
        ))
    }

    /// Loads a pod's own programs for a slot, which is free again if that fails.
    fn load(&self, slot: u32) -> Result<Spare, Error> {
        let load = || {
            let mut programs = self.object.load(slot)?;
            self.object.load_own(&mut programs)?;
            Ok(Spare { slot, programs })
        };
        load().inspect_err(|_| self.store().take_back(slot))
    }
}
