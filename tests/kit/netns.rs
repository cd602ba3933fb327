//! One network namespace, with a name that `ip netns` knows. Names start with the process id of their maker, so that
//! what a killed process left can be told from what another one uses.

use std::{
    fs, io,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio, id},
    sync::atomic::{AtomicU32, Ordering},
};

use anyhow::{Context, Result, ensure};
use redirector::sys::netns::Netns;

const DIRECTORY: &str = "/run/netns";
const PREFIX: &str = "rdr";
static COUNT: AtomicU32 = AtomicU32::new(0);

/// A name for a group of namespaces, and for files that belong to them, that nothing else on this machine has.
pub fn unique_prefix() -> String {
    format!("{PREFIX}{}x{}", id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

/// A namespace, removed on drop if it was made here.
#[derive(Debug)]
pub struct Namespace {
    name: String,
    netns: Netns,
    made_by_others: bool,
}

impl Namespace {
    /// Makes it, with lo up and without IPv6's wait for duplicate addresses.
    pub fn create(name: &str) -> Result<Self> {
        run(Command::new("ip").args(["netns", "add", name]))?;
        let netns = Netns::open(&Path::new(DIRECTORY).join(name));
        let netns = netns
            .with_context(|| format!("opening namespace {name}"))
            .inspect_err(|_| remove(name))?;
        let namespace = Self {
            name: name.to_owned(),
            netns,
            made_by_others: false,
        };
        for which in ["all", "default", "lo"] {
            // Absent where the kernel has no IPv6.
            let _ = namespace.set_sysctl(&format!("net/ipv6/conf/{which}/accept_dad"), "0");
        }
        namespace.ip(&["link set lo up"])?;
        Ok(namespace)
    }

    /// The namespace that a process of others is in.
    pub fn of_process(pid: u32) -> Result<Self> {
        // A path that `ip` finds below its own directory.
        let name = format!("../../proc/{pid}/ns/net");
        let netns = Netns::open(&Path::new(DIRECTORY).join(&name));
        Ok(Self {
            netns: netns.with_context(|| format!("opening the network namespace of process {pid}"))?,
            name,
            made_by_others: true,
        })
    }

    /// The same one, for whoever is not to end it.
    ///
    /// # Panics
    /// When it cannot be opened.
    pub fn again(&self) -> Self {
        Self {
            name: self.name.clone(),
            netns: Netns::open(&self.path()).expect("it is there"),
            made_by_others: true,
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its file.
    pub fn path(&self) -> PathBuf {
        Path::new(DIRECTORY).join(&self.name)
    }

    /// The open namespace.
    pub fn netns(&self) -> &Netns {
        &self.netns
    }

    /// Runs `f` with the calling thread in it.
    ///
    /// # Panics
    /// When the namespace cannot be entered.
    pub fn run<T>(&self, f: impl FnOnce() -> T) -> T {
        self.netns
            .run(f)
            .unwrap_or_else(|error| panic!("entering namespace {}: {error}", self.name))
    }

    /// Runs `ip` commands in it, one per item, without the word `ip`.
    pub fn ip(&self, commands: &[impl AsRef<str>]) -> Result<()> {
        let text: String = commands
            .iter()
            .map(|command| format!("{}\n", command.as_ref()))
            .collect();
        let mut ip = Command::new("ip")
            .args(["-n", &self.name, "-batch", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .context("starting ip")?;
        ip.stdin.take().context("piped")?.write_all(text.as_bytes())?;
        let output = ip.wait_with_output()?;
        ensure!(
            output.status.success(),
            "ip in {}: {}: {text}",
            self.name,
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Ok(())
    }

    /// What an `ip` command prints in it.
    ///
    /// # Panics
    /// When it fails.
    pub fn ip_output(&self, command: &str) -> String {
        let output = Command::new("ip")
            .args(["-n", &self.name])
            .args(command.split_whitespace())
            .output();
        let output = output.expect("ip runs");
        assert!(
            output.status.success(),
            "ip {command}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// The hardware address of one of its interfaces.
    ///
    /// # Panics
    /// When there is no such interface.
    pub fn mac(&self, interface: &str) -> [u8; 6] {
        let text = self.ip_output(&format!("-o link show dev {interface}"));
        let address = text.split("link/ether ").nth(1).and_then(|rest| rest.get(..17));
        let bytes = address.map(|address| {
            address
                .split(':')
                .filter_map(|byte| u8::from_str_radix(byte, 16).ok())
                .collect::<Vec<u8>>()
        });
        bytes
            .and_then(|bytes| bytes.try_into().ok())
            .unwrap_or_else(|| panic!("no hardware address in {text}"))
    }

    /// Reads a file below /proc/net of it. The thread's own: /proc/net shows the namespace of the main thread.
    pub fn proc_net(&self, file: &str) -> io::Result<String> {
        self.run(|| fs::read_to_string(Path::new("/proc/thread-self/net").join(file)))
    }

    /// Reads a sysctl, by its path below /proc/sys.
    pub fn sysctl(&self, path: &str) -> io::Result<String> {
        self.run(|| {
            Ok(fs::read_to_string(Path::new("/proc/sys").join(path))?
                .trim()
                .to_owned())
        })
    }

    /// Sets a sysctl.
    pub fn set_sysctl(&self, path: &str, value: &str) -> io::Result<()> {
        self.run(|| fs::write(Path::new("/proc/sys").join(path), value))
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        if !self.made_by_others {
            remove(&self.name);
        }
    }
}

fn remove(name: &str) {
    if let Err(error) = run(Command::new("ip").args(["netns", "del", name])) {
        eprintln!("{error:#}");
    }
}

/// Runs a command to its end; its standard error is in the error.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("starting {command:?}"))?;
    ensure!(
        output.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(())
}

/// Removes what processes left that are no longer here: namespaces, mounts and directories.
pub fn sweep() {
    let names = |directory: &Path| -> Vec<String> {
        let entries = fs::read_dir(directory).into_iter().flatten().flatten();
        entries
            .filter_map(|entry| entry.file_name().into_string().ok())
            .filter(|name| left_by_the_dead(name))
            .collect()
    };
    for name in names(Path::new(DIRECTORY)) {
        remove(&name);
    }
    let temporary = std::env::temp_dir();
    for name in names(&temporary) {
        remove_directory(&temporary.join(name));
    }
}

/// Whether a name is of [`unique_prefix`], made by a process that is no longer here.
pub(crate) fn left_by_the_dead(name: &str) -> bool {
    let pid = name
        .strip_prefix(PREFIX)
        .and_then(|rest| rest.split_once('x'))
        .map(|(pid, _)| pid);
    pid.is_some_and(|pid| pid.parse::<u32>().is_ok() && !Path::new("/proc").join(pid).exists())
}

/// Removes a directory, and what is mounted below it.
pub(crate) fn remove_directory(directory: &Path) {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    for mounted in mounts.lines().rev().filter_map(|line| line.split(' ').nth(1)) {
        if Path::new(mounted).starts_with(directory)
            && let Err(error) = nix::mount::umount2(mounted, nix::mount::MntFlags::MNT_DETACH)
        {
            eprintln!("unmounting {mounted}: {error}");
        }
    }
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            eprintln!("removing {}: {error}", directory.display())
        }
        _ => {}
    }
}

/// A directory of our own, removed on drop together with what is mounted in it.
#[derive(Debug)]
pub struct Directory(PathBuf);

impl Directory {
    /// Makes it in the directory for temporary files.
    pub fn create(name: &str) -> Result<Self> {
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).with_context(|| format!("making {}", path.display()))?;
        Ok(Self(path))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        remove_directory(&self.0);
    }
}
