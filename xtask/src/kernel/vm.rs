//! One boot of a kernel in QEMU, emulated: it needs no rights, and works where the processor offers no virtualisation.

use std::{
    fs::File,
    io::{BufWriter, Write},
    path::Path,
    time::Duration,
};

use anyhow::{Context, Result};

use super::report::Report;
use crate::process;

/// The clock is one that ticks outside of the machine: on a busy host, the kernel measures its own processor's counter wrongly
/// at boot, and lives many times too fast.
const CMDLINE: &str = "console=ttyS0 quiet loglevel=3 panic=-1 mitigations=off random.trust_cpu=on \
                       tsc=unstable clocksource=hpet";

/// Boots, and reads the console into `report` until the machine powers off; all of it goes into the file `console` too.
///
/// A machine that has not ended at the deadline is ended, and its report has the gap: that is no error here.
pub(crate) fn run(
    image: &Path,
    initramfs: &Path,
    deadline: Duration,
    console: &Path,
    report: &mut Report,
) -> Result<()> {
    let file = File::create(console).with_context(|| format!("writing {}", console.display()))?;
    let mut file = BufWriter::new(file);
    // It passes our signals on, and ends the machine even if we are killed.
    let mut command = process::command("timeout");
    command
        .args(["--kill-after=5", &deadline.as_secs().to_string()])
        .arg("qemu-system-x86_64")
        .args([
            "-accel",
            "tcg,thread=multi",
            "-cpu",
            "max",
            "-smp",
            "2",
            "-m",
            "1024",
        ])
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
        .args(["-serial", "stdio", "-append", CMDLINE, "-kernel"])
        .arg(image)
        .arg("-initrd")
        .arg(initramfs);
    let ended = process::run_lines(&mut command, |line| {
        // The copy is for people; what is read here is what counts.
        let _ = writeln!(file, "{}", line.trim_end_matches('\r'));
        if let Some(shown) = report.read(line) {
            println!("  {shown}");
        }
    });
    file.flush()
        .with_context(|| format!("writing {}", console.display()))?;
    match ended {
        Err(error) if process::interrupted() => Err(error),
        Err(error) => {
            println!("  {error:#}; its deadline is {} s", deadline.as_secs());
            Ok(())
        }
        Ok(()) => Ok(()),
    }
}
