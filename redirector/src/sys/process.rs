//! What this process may do, and which network namespaces are the node's own.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use nix::sys::{
    resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit},
    statvfs::{FsFlags, statvfs},
};

use super::netns::{Netns, NetnsId};

/// The user as whom this process runs.
pub fn user() -> u32 {
    nix::unistd::geteuid().as_raw()
}

/// The capabilities without which no pod can be captured, by number: include/uapi/linux/capability.h.
const NEEDED: [(u32, &str); 3] = [(12, "CAP_NET_ADMIN"), (13, "CAP_NET_RAW"), (21, "CAP_SYS_ADMIN")];

/// Where the switches of the kernel are.
const SYSCTLS: &str = "/proc/sys";

/// Where they are too in a container with the node's /proc mounted: container runtimes make its own /proc/sys read-only (OCI's
/// `readonlyPaths`), whatever its capabilities are. Whose switches of the network these are, the namespace of the thread that opens
/// them decides, not the mount.
const NODE_SYSCTLS: &str = "/host/proc/sys";

/// The directory in which the switches of the kernel can be set, found once.
pub fn sysctls() -> &'static str {
    static DIRECTORY: OnceLock<&'static str> = OnceLock::new();
    DIRECTORY.get_or_init(|| choose_sysctls(sysctls_are_read_only(), Path::new(NODE_SYSCTLS).is_dir()))
}

/// Whether they can be set there.
pub fn switches_can_be_set() -> bool {
    statvfs(sysctls()).is_ok_and(|found| !found.flags().contains(FsFlags::ST_RDONLY))
}

fn sysctls_are_read_only() -> bool {
    statvfs(SYSCTLS).is_ok_and(|found| found.flags().contains(FsFlags::ST_RDONLY))
}

/// Where they cannot be set anywhere, errors are to name the place that everybody knows.
fn choose_sysctls(read_only: bool, node_is_mounted: bool) -> &'static str {
    if read_only && node_is_mounted {
        NODE_SYSCTLS
    } else {
        SYSCTLS
    }
}

/// A switch below /sys that is the whole node's, where this process can write it: container runtimes mount a container's own /sys
/// read-only, so the node's file may be mounted below /host/sys.
pub fn sysfs_file(name: &str) -> PathBuf {
    let node = Path::new("/host/sys").join(name);
    if node.exists() {
        node
    } else {
        Path::new("/sys").join(name)
    }
}

/// Lifts the limit of locked memory, or as much of it as may be: kernels before 5.11 count eBPF maps against it.
///
/// # Errors
/// Those of setrlimit(2). Without CAP_SYS_RESOURCE the limit is what the process was started with.
pub fn raise_memlock_limit() -> io::Result<()> {
    if setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY).is_ok() {
        return Ok(());
    }
    let (_, hard) = getrlimit(Resource::RLIMIT_MEMLOCK)?;
    Ok(setrlimit(Resource::RLIMIT_MEMLOCK, hard, hard)?)
}

/// The user that this process acts as.
pub fn own_uid() -> u32 {
    nix::unistd::geteuid().as_raw()
}

/// The capabilities that are needed and missing.
///
/// # Errors
/// Those of reading `/proc/self/status`.
pub fn missing_capabilities() -> io::Result<Vec<&'static str>> {
    let status = fs::read_to_string("/proc/self/status")?;
    missing_of(&status)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no CapEff line in /proc/self/status"))
}

fn missing_of(status: &str) -> Option<Vec<&'static str>> {
    let effective = effective(status)?;
    let missing = NEEDED.iter().filter(|(number, _)| effective & (1 << number) == 0);
    Some(missing.map(|(_, name)| *name).collect())
}

/// Gives memory that is free again back to the system. The C library keeps what lies between what is still in use, so that one
/// burst of connections would count as the agent's for ever.
#[expect(unsafe_code, reason = "malloc_trim")]
pub fn release_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it may be called at any time, from any thread, and touches only memory that nobody has.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// The effective capabilities, a bit each.
fn effective(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(line.trim(), 16).ok()
}

/// The namespaces that are never a pod's: this process's, and the one of PID 1 where it can be seen.
///
/// # Errors
/// When the own namespace cannot be opened.
pub fn node_namespaces() -> io::Result<Vec<NetnsId>> {
    let mut namespaces = vec![Netns::current()?.id()];
    if let Ok(init) = Netns::open(Path::new("/proc/1/ns/net")) {
        namespaces.push(init.id());
    }
    namespaces.dedup();
    Ok(namespaces)
}

/// Whether all processes of the node are in our `/proc`: we are in the first PID namespace, and CAP_SYS_PTRACE sees through
/// hidepid (proc(5)).
pub fn sees_all() -> bool {
    /// PROC_PID_INIT_INO, include/linux/proc_ns.h
    const FIRST: u64 = 0xeffffffc;
    const CAP_SYS_PTRACE: u32 = 19;
    let first = fs::metadata("/proc/self/ns/pid").is_ok_and(|found| found.ino() == FIRST);
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    first && effective(&status).is_some_and(|effective| effective & (1 << CAP_SYS_PTRACE) != 0)
}

/// Whether we are in a container, as far as can be told: its runtime has made /proc/sys read-only, or PID 1 has other mounts. What a
/// container mounts ends with it.
pub fn in_container() -> bool {
    let namespace = |of: &str| fs::read_link(format!("/proc/{of}/ns/mnt"));
    let other_mounts = || matches!((namespace("self"), namespace("1")), (Ok(own), Ok(init)) if own != init);
    sysctls_are_read_only() || other_mounts()
}

/// Whether a process is, or may be, in this network namespace, as far as [`sees_all`] holds. PID 1 is in none of a pod's.
pub fn any_in(netns: NetnsId) -> bool {
    let Ok(processes) = fs::read_dir("/proc") else {
        return true;
    };
    processes
        .flatten()
        .any(|process| match fs::metadata(process.path().join("ns/net")) {
            Ok(found) => found.ino() == netns.ino && found.dev() == netns.dev,
            Err(error) => error.kind() == io::ErrorKind::PermissionDenied && process.file_name() != "1",
        })
}

/// Keeps the process's memory, in which keys are, out of core files, whatever writes those (prctl(2), PR_SET_DUMPABLE).
///
/// # Errors
/// Those of prctl(2).
pub fn forbid_core_files() -> io::Result<()> {
    Ok(nix::sys::prctl::set_dumpable(false)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_capabilities_are_named() {
        let status = |effective: &str| format!("Name:\tx\nCapPrm:\tffff\nCapEff:\t{effective}\nCapBnd:\t0\n");
        for (effective, missing) in [
            ("000001ffffffffff", &[][..]),
            (
                "0000000000000000",
                &["CAP_NET_ADMIN", "CAP_NET_RAW", "CAP_SYS_ADMIN"],
            ),
            ("0000000000203000", &[]),
            ("0000000000003000", &["CAP_SYS_ADMIN"]),
        ] {
            assert_eq!(missing_of(&status(effective)).unwrap(), missing, "{effective}");
        }
        assert_eq!(missing_of("Name:\tx\n"), None);
        missing_capabilities().unwrap();
    }

    #[test]
    fn the_nodes_switches_are_taken_where_the_own_are_read_only() {
        for (read_only, node_is_mounted, taken) in [
            (false, false, SYSCTLS),
            (false, true, SYSCTLS),
            (true, true, NODE_SYSCTLS),
            (true, false, SYSCTLS),
        ] {
            let chosen = choose_sysctls(read_only, node_is_mounted);
            assert_eq!(chosen, taken, "{read_only} {node_is_mounted}");
        }
    }

    #[test]
    fn the_limit_of_locked_memory_is_as_high_as_it_may_be() {
        raise_memlock_limit().unwrap();
        let (soft, hard) = getrlimit(Resource::RLIMIT_MEMLOCK).unwrap();
        assert_eq!(soft, hard);
    }

    #[test]
    fn the_own_namespace_is_the_nodes() {
        assert!(
            node_namespaces()
                .unwrap()
                .contains(&Netns::current().unwrap().id())
        );
    }

    #[test]
    fn we_are_in_our_own_namespace() {
        let own = Netns::current().unwrap().id();
        assert!(any_in(own));
        if sees_all() {
            assert!(!any_in(NetnsId { ino: 1, ..own }));
        }
    }
}
