//! What the kernel knows of its clock.

use std::io;

/// Whether somebody (an NTP client, the hypervisor) keeps the clock right, as far as the kernel has been told.
///
/// # Errors
/// Those of adjtimex(2).
#[expect(unsafe_code, reason = "adjtimex(2), which nix does not have")]
pub fn is_synchronised() -> io::Result<bool> {
    /// `TIME_ERROR` of include/uapi/linux/timex.h, which the kernel answers while `STA_UNSYNC` is set.
    const TIME_ERROR: libc::c_int = 5;
    // SAFETY: it is of numbers alone, of which zero is one.
    let mut clock: libc::timex = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel reads and writes one such struct, which lives until it returns; no mode is set, so that nothing is changed.
    match unsafe { libc::adjtimex(&raw mut clock) } {
        -1 => Err(io::Error::last_os_error()),
        state => Ok(state != TIME_ERROR),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_tells_one_or_the_other() {
        is_synchronised().unwrap();
    }
}
