//! Short RCU grace periods for the time that TCX links are attached and removed.
//!
//! The kernel lets a grace period pass for each link, with the lock of all network configuration held (`tcx_entry_sync` under
//! `rtnl_lock`, kernel/bpf/tcx.c): 8 to 17 ms where it was measured, one link after another for the whole node. Elsewhere under that
//! lock it asks the processors for theirs instead (`synchronize_net`, net/core/dev.c), which takes a fraction of a millisecond. This
//! does the same by the switch that the kernel has for it, `/sys/kernel/rcu_expedited`. It is the whole node's: so it is set only as
//! long as somebody attaches or removes, and never where somebody else has set it. `rcu_normal`, which real-time nodes set, wins over
//! it in the kernel.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use crate::{redirect::Error, sys::process};

/// A directory beside the pins, there as long as the switch is on because of this agent. Like the switch it does not survive a reboot.
const MARK: &str = "rcu_expedited";

/// The switch, where it can be turned.
pub(super) struct GracePeriods {
    switch: Option<Switch>,
    holders: Mutex<Holders>,
}

#[derive(Default)]
struct Holders {
    count: usize,
    /// The switch was off, and is on because of them.
    turned: bool,
}

/// The grace periods are short as long as this is there.
pub(super) struct Shortened<'a>(&'a GracePeriods);

impl GracePeriods {
    /// Those of this node, with the mark in `shared`; `wanted` is false where they are to stay as they are.
    pub(super) fn of_node(shared: &Path, wanted: bool) -> Self {
        let switch = Switch::new(process::sysfs_file("kernel/rcu_expedited"), shared);
        if let Err(error) = switch.put_back_marked() {
            tracing::warn!(%error, "an earlier agent has left the grace periods of RCU short");
        }
        let switch = match (wanted, switch.check()) {
            (false, _) => None,
            (true, Ok(())) => Some(switch),
            (true, Err(error)) => {
                tracing::info!(%error, "pods are enrolled some tens of milliseconds slower: each TCX link waits for a grace period");
                None
            }
        };
        Self::by(switch)
    }

    fn by(switch: Option<Switch>) -> Self {
        Self {
            switch,
            holders: Mutex::default(),
        }
    }

    /// Makes them short, unless they are.
    pub(super) fn shorten(&self) -> Shortened<'_> {
        if let Some(switch) = &self.switch {
            let mut holders = self.holders.lock().unwrap_or_else(PoisonError::into_inner);
            holders.count += 1;
            if holders.count == 1 {
                holders.turned = switch.turn_on().unwrap_or_else(|error| {
                    tracing::debug!(%error, "the grace periods of RCU stay as they are");
                    false
                });
            }
        }
        Shortened(self)
    }
}

impl Drop for Shortened<'_> {
    fn drop(&mut self) {
        let Some(switch) = &self.0.switch else { return };
        let mut holders = self.0.holders.lock().unwrap_or_else(PoisonError::into_inner);
        holders.count -= 1;
        if holders.count == 0
            && std::mem::take(&mut holders.turned)
            && let Err(error) = switch.turn_off()
        {
            tracing::warn!(%error, "the grace periods of RCU stay short until the next pod, or the next start");
        }
    }
}

/// Turns the switch off where an agent that was killed has left it on; `shared` is where its mark would be.
pub(super) fn put_back(shared: &Path) -> Result<(), Error> {
    Switch::new(process::sysfs_file("kernel/rcu_expedited"), shared).put_back_marked()
}

struct Switch {
    file: PathBuf,
    mark: PathBuf,
}

impl Switch {
    fn new(file: PathBuf, shared: &Path) -> Self {
        Self {
            file,
            mark: shared.join(MARK),
        }
    }

    /// Whether it can be turned.
    fn check(&self) -> Result<(), Error> {
        let opened = fs::OpenOptions::new().read(true).write(true).open(&self.file);
        opened.map(drop).map_err(|error| {
            let advice = match error.kind() {
                io::ErrorKind::ReadOnlyFilesystem => {
                    " (in a container, mount the node's at /host/sys/kernel/rcu_expedited)"
                }
                _ => "",
            };
            Error::new(format!("opening {}{advice}", self.file.display()), error)
        })
    }

    /// Returns whether it was off.
    fn turn_on(&self) -> Result<bool, Error> {
        let is = fs::read_to_string(&self.file)
            .map_err(|error| Error::new(format!("reading {}", self.file.display()), error))?;
        // Off, or left on by this agent when it could not be turned off.
        if is.trim() != "0" && !self.mark.exists() {
            return Ok(false);
        }
        // Before it is on: whoever ends in between has left at most the mark.
        match fs::create_dir(&self.mark) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(Error::new(format!("making {}", self.mark.display()), error));
            }
            _ => {}
        }
        self.write("1").map(|()| true)
    }

    fn turn_off(&self) -> Result<(), Error> {
        self.write("0")?;
        fs::remove_dir(&self.mark)
            .map_err(|error| Error::new(format!("removing {}", self.mark.display()), error))
    }

    fn put_back_marked(&self) -> Result<(), Error> {
        if self.mark.exists() {
            self.turn_off()?;
        }
        Ok(())
    }

    fn write(&self, value: &str) -> Result<(), Error> {
        fs::write(&self.file, value)
            .map_err(|error| Error::new(format!("writing {value} to {}", self.file.display()), error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn switch(value: &str) -> (tempfile::TempDir, PathBuf, GracePeriods) {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("switch");
        fs::write(&file, value).unwrap();
        let periods = GracePeriods::by(Some(Switch::new(file.clone(), directory.path())));
        (directory, file, periods)
    }

    fn is(file: &Path) -> String {
        fs::read_to_string(file).unwrap().trim().to_owned()
    }

    #[test]
    fn it_is_on_from_the_first_to_the_last() {
        let (directory, file, periods) = switch("0\n");
        let mark = directory.path().join(MARK);
        let first = periods.shorten();
        assert!(is(&file) == "1" && mark.exists());
        let second = periods.shorten();
        drop(first);
        assert_eq!(is(&file), "1");
        drop(second);
        assert!(is(&file) == "0" && !mark.exists());
        drop(periods.shorten());
        assert_eq!(is(&file), "0");
    }

    #[test]
    fn what_somebody_else_has_turned_on_stays_on() {
        let (directory, file, periods) = switch("1\n");
        drop(periods.shorten());
        assert!(is(&file) == "1" && !directory.path().join(MARK).exists());
    }

    #[test]
    fn what_a_killed_agent_has_left_is_put_back() {
        let (directory, file, periods) = switch("0\n");
        std::mem::forget(periods.shorten());
        let next = Switch::new(file.clone(), directory.path());
        next.put_back_marked().unwrap();
        assert!(is(&file) == "0" && !next.mark.exists());
        next.put_back_marked().unwrap();
        // Between the mark and the switch.
        fs::create_dir(&next.mark).unwrap();
        assert!(next.turn_on().unwrap());
        assert_eq!(is(&file), "1");
        next.put_back_marked().unwrap();
        assert_eq!(is(&file), "0");
    }

    #[test]
    fn without_the_switch_nothing_is_done() {
        let directory = tempfile::tempdir().unwrap();
        let missing = Switch::new(directory.path().join("missing"), directory.path());
        assert!(missing.check().is_err());
        let periods = GracePeriods::by(Some(missing));
        drop(periods.shorten());
        assert!(!directory.path().join(MARK).exists());
        drop(GracePeriods::by(None).shorten());
    }
}
