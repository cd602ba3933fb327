//! What this process may do, and which network namespaces are the node's own.

use std::{fs, io, path::Path};

use super::netns::{Netns, NetnsId};

/// The capabilities without which no pod can be captured, by number: include/uapi/linux/capability.h.
const NEEDED: [(u32, &str); 3] = [(12, "CAP_NET_ADMIN"), (13, "CAP_NET_RAW"), (21, "CAP_SYS_ADMIN")];

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
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    let effective = u64::from_str_radix(line.trim(), 16).ok()?;
    let missing = NEEDED.iter().filter(|(number, _)| effective & (1 << number) == 0);
    Some(missing.map(|(_, name)| *name).collect())
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
    fn the_own_namespace_is_the_nodes() {
        assert!(
            node_namespaces()
                .unwrap()
                .contains(&Netns::current().unwrap().id())
        );
    }
}
