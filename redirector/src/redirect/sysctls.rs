//! Switches below /proc/sys that a backend wants in a pod's namespace. What names them by their path runs in that namespace.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::FileExt as _,
};

use super::{Error, routes::Routing};
use crate::sys::process;

/// A switch.
#[derive(Debug)]
pub(super) struct Sysctl {
    /// Its path below /proc/sys.
    pub(super) name: &'static str,
    /// The value that is wanted; what it was before is the other one.
    pub(super) wanted: bool,
    /// Needed for IPv6 only.
    pub(super) v6: bool,
}

impl Sysctl {
    fn path(&self) -> String {
        format!("{}/{}", process::sysctls(), self.name)
    }
}

/// What failed, and what to do where a container's /proc/sys is why.
fn failed(operation: &str, path: &str, error: io::Error) -> Error {
    let advice = match error.kind() {
        io::ErrorKind::ReadOnlyFilesystem => " (in a container, mount the node's /proc at /host/proc)",
        _ => "",
    };
    Error::new(format!("{operation} {path}{advice}"), error)
}

fn digit(value: bool) -> &'static str {
    if value { "1" } else { "0" }
}

impl Routing {
    /// Sets the sysctls; those of IPv6 as well if the pod has IPv6 addresses. Returns which ones it changed.
    pub(super) fn set_sysctls(&self, v6: bool) -> Result<u32, Error> {
        let mut changed = 0;
        for (bit, sysctl) in self.sysctls.iter().enumerate() {
            if sysctl.v6 && !v6 {
                continue;
            }
            let path = sysctl.path();
            let current = fs::read_to_string(&path).map_err(|error| failed("reading", &path, error))?;
            if current.trim() != digit(sysctl.wanted) {
                if let Err(error) = fs::write(&path, digit(sysctl.wanted)) {
                    self.restore_sysctls(changed);
                    return Err(failed("writing", &path, error));
                }
                changed |= 1 << bit;
            }
        }
        Ok(changed)
    }

    /// Puts back what [`Self::set_sysctls`] changed.
    pub(super) fn restore_sysctls(&self, changed: u32) -> Vec<Error> {
        let mut errors = Vec::new();
        for (bit, sysctl) in self.sysctls.iter().enumerate() {
            if changed & (1 << bit) == 0 {
                continue;
            }
            let path = sysctl.path();
            if let Err(error) = fs::write(&path, digit(!sysctl.wanted)) {
                errors.push(failed("writing", &path, error));
            }
        }
        errors
    }

    /// Holds open those that are wanted.
    pub(super) fn open_sysctls(&self, v6: bool) -> Result<OpenSysctls, Error> {
        let wanted = self.sysctls.iter().filter(|sysctl| v6 || !sysctl.v6);
        let open = |sysctl: &Sysctl| {
            let path = sysctl.path();
            let file = File::open(&path).map_err(|error| failed("opening", &path, error))?;
            Ok((file, sysctl.wanted))
        };
        wanted.map(open).collect::<Result<_, _>>().map(OpenSysctls)
    }
}

/// The sysctls of a namespace. A file of these is its namespace's wherever it is read, and the way to it through /proc is most of what
/// reading one costs.
#[derive(Debug)]
pub(super) struct OpenSysctls(Vec<(File, bool)>);

impl OpenSysctls {
    /// Whether all have the values that are wanted.
    pub(super) fn are_set(&self) -> bool {
        self.0.iter().all(|(file, wanted)| {
            let mut value = [0];
            file.read_at(&mut value, 0).is_ok() && value == digit(*wanted).as_bytes()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_only_switch_says_what_to_do() {
        let read_only = failed("writing", "/proc/sys/x", io::ErrorKind::ReadOnlyFilesystem.into());
        assert!(read_only.to_string().contains("/host/proc"), "{read_only}");
        let other = failed("writing", "/proc/sys/x", io::ErrorKind::NotFound.into());
        assert!(!other.to_string().contains("/host/proc"), "{other}");
    }
}
