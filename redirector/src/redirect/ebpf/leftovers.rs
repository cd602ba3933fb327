//! What the eBPF backend leaves: pins, and what was changed in the pods' namespaces. Removed by it, and without it.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use nix::mount::{MntFlags, umount2};
use redirector_common::maps::{self as layout, FLAG_ADDED_CLSACT, FLAG_CLSACT, PodEntry};

use super::{
    all_or, hooks, open_map,
    pins::{self, Instance, Pins},
    routes::ROUTING,
};
use crate::{
    mesh::pod::PodUid,
    redirect::{Error, Leftovers, maps::PodMap},
    sys::{interfaces::interfaces, netns::Netns},
};

/// What is pinned in a directory, by whichever build.
pub struct Pinned {
    root: PathBuf,
    pins: Pins,
}

impl Pinned {
    /// In the bpffs directory of an agent that runs no more, or with another backend.
    pub fn new(bpffs_dir: &Path) -> Self {
        Self {
            root: bpffs_dir.to_owned(),
            pins: Pins::existing(bpffs_dir),
        }
    }
}

impl Leftovers for Pinned {
    fn backend(&self) -> &'static str {
        "ebpf"
    }

    fn pods(&self) -> Result<Vec<PodUid>, Error> {
        let instances = self.pins.instances()?;
        let mut uids: Vec<_> = instances.into_iter().map(|instance| instance.uid).collect();
        uids.sort();
        uids.dedup();
        Ok(uids)
    }

    fn remove(&self, uid: &PodUid, netns: Option<&Netns>) -> Result<(), Vec<Error>> {
        let instances = self.pins.of(uid).map_err(|error| vec![error])?;
        let entries: Vec<_> = instances.iter().filter_map(entry).collect();
        let found = if netns.is_none() {
            entries.iter().find_map(|entry| Netns::find(entry.netns_ino))
        } else {
            None
        };
        let mut errors: Vec<_> = instances
            .iter()
            .flat_map(|instance| hooks::unpin(&instance.directory()))
            .collect();
        if let Some(netns) = netns.or(found.as_ref()) {
            errors.extend(clean(netns, &entries));
        }
        all_or(errors)
    }

    fn remove_shared(&self) -> Result<(), Vec<Error>> {
        let mut errors = Vec::new();
        let mut tried = |what: &str, path: &Path, result: io::Result<()>| match result {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                errors.push(Error::new(format!("{what} {}", path.display()), error));
            }
            _ => {}
        };
        for directory in self.pins.directories() {
            tried("removing", &directory, fs::remove_dir_all(&directory));
        }
        if pins::is_own_mount(&self.root) {
            tried(
                "unmounting the bpffs at",
                &self.root,
                // Lazily: the caller has it locked, by an open descriptor.
                umount2(&self.root, MntFlags::MNT_DETACH).map_err(io::Error::from),
            );
        }
        match fs::remove_dir(&self.root) {
            // Somebody else's pins.
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {}
            // Somebody else's mount.
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {}
            result => tried("removing", &self.root, result),
        }
        all_or(errors)
    }
}

/// What the maps hold for an instance.
fn entry(instance: &Instance) -> Option<PodEntry> {
    let map = open_map(&instance.build.maps(), layout::PODS, PodMap::new).ok()?;
    map.read(instance.slot).ok()
}

/// Removes from a namespace what instances changed there; the links went with their pins. `entries` are those of a pod's
/// instances, of which only some may have been in this namespace.
pub(super) fn clean(netns: &Netns, entries: &[PodEntry]) -> Vec<Error> {
    let mine = |entry: &&PodEntry| entry.netns_ino == netns.id().ino;
    // Without an entry nobody knows what was attached: the pins were lost, and filters hold without them.
    let filters = entries.is_empty() || entries.iter().filter(mine).any(|entry| entry.has(FLAG_CLSACT));
    let added = entries
        .iter()
        .filter(mine)
        .any(|entry| entry.has(FLAG_ADDED_CLSACT));
    let changed = entries
        .iter()
        .filter(mine)
        .fold(0, |changed, entry| changed | entry.changed_sysctls);
    let inside = netns.run(|| {
        let mut errors = Vec::new();
        if filters {
            let interfaces = interfaces().unwrap_or_default();
            errors.extend(interfaces.iter().flat_map(hooks::detach_filters));
            if added {
                errors.extend(hooks::remove_clsact(&interfaces));
            }
        }
        errors.extend(ROUTING.remove());
        errors.extend(ROUTING.restore_sysctls(changed));
        errors
    });
    inside.unwrap_or_else(|error| vec![Error::new(format!("entering {}", netns.id()), error)])
}
