//! Where programs, maps and links are pinned, so that they outlive the agent:
//!
//! ```text
//! <bpffs>/shared/TAGS, AYA_LOGS             one of each per node
//! <bpffs>/builds/<build>/maps/              the maps of a build of the object, for all pods
//! <bpffs>/builds/<build>/deciders/          the programs that all pods share
//! <bpffs>/builds/<build>/pods/<slot>-<uid>/ a pod's own programs and their links
//! ```
//!
//! Names in a bpffs may hold no dot, so a UID's dots are written as `+`, which no UID has.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use nix::{
    mount::{MsFlags, mount},
    sys::statfs::{BPF_FS_MAGIC, statfs},
};
use redirector_common::maps::MAX_SLOTS;

use crate::{mesh::pod::PodUid, redirect::Error, sys::process};

/// The usual mount point of a bpffs.
const BPFFS: &str = "/sys/fs/bpf";

/// By this a bpffs that we have mounted is told from others: its source means nothing to the kernel.
const MOUNT_SOURCE: &str = "redirector";

/// The directories of pins.
#[derive(Debug, Clone)]
pub(crate) struct Pins {
    root: PathBuf,
}

/// The directories of one build of the object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Build(PathBuf);

/// A pod's own programs, and what holds them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Instance {
    /// The build that it is of.
    pub(crate) build: Build,
    /// Where the maps of the build keep what is the pod's.
    pub(crate) slot: u32,
    /// Whose.
    pub(crate) uid: PodUid,
}

impl Pins {
    /// Makes the directories; mounts a bpffs if there is none: at its usual place if `root` is below that, else at `root`.
    pub(crate) fn prepare(root: &Path) -> Result<Self, Error> {
        let failed = |operation: String| move |error: io::Error| Error::new(operation, error);
        let mount_point = if root.starts_with(BPFFS) {
            Path::new(BPFFS)
        } else {
            root
        };
        if !on_bpffs(root) {
            fs::create_dir_all(mount_point).map_err(failed(format!("making {}", mount_point.display())))?;
            if !on_bpffs(mount_point) {
                if mount_point == Path::new(BPFFS) && process::in_container() {
                    // What is pinned there would go with the container, and the pods' capture with it: they would go on in plain.
                    let error = io::Error::other(
                        "the node has none, and one that a container mounts ends with it; on the node: mount -t bpf bpf /sys/fs/bpf",
                    );
                    return Err(failed(format!("using the bpffs at {BPFFS}"))(error));
                }
                tracing::info!(path = %mount_point.display(), "mounting a bpffs");
                mount(
                    Some(MOUNT_SOURCE),
                    mount_point,
                    Some("bpf"),
                    MsFlags::empty(),
                    Some("mode=0700"),
                )
                .map_err(|errno| {
                    failed(format!("mounting a bpffs at {}", mount_point.display()))(errno.into())
                })?;
            }
        }
        let pins = Self::existing(root);
        make(&[&pins.shared(), &root.join("builds")])?;
        Ok(pins)
    }

    /// The directories of an agent that has prepared them.
    pub(crate) fn existing(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
        }
    }

    /// What all pods share, whatever build serves them.
    pub(crate) fn shared(&self) -> PathBuf {
        self.root.join("shared")
    }

    /// All directories that there may be.
    pub(crate) fn directories(&self) -> [PathBuf; 2] {
        [self.shared(), self.root.join("builds")]
    }

    /// The directories of a build, made if need be.
    pub(crate) fn build(&self, hash: u64) -> Result<Build, Error> {
        let build = Build(self.root.join("builds").join(format!("{hash:016x}")));
        make(&[&build.maps(), &build.deciders(), &build.pods()])?;
        Ok(build)
    }

    /// All builds that something is pinned for.
    pub(crate) fn builds(&self) -> Result<Vec<Build>, Error> {
        let names = list(&self.root.join("builds"))?;
        Ok(names
            .iter()
            .map(|name| Build(self.root.join("builds").join(name)))
            .collect())
    }

    /// What there is for all pods, of all builds.
    pub(crate) fn instances(&self) -> Result<Vec<Instance>, Error> {
        let mut instances = Vec::new();
        for build in self.builds()? {
            instances.extend(build.instances()?);
        }
        Ok(instances)
    }

    /// What there is for one pod, of all builds.
    pub(crate) fn of(&self, uid: &PodUid) -> Result<Vec<Instance>, Error> {
        let mut instances = self.instances()?;
        instances.retain(|instance| instance.uid == *uid);
        Ok(instances)
    }
}

impl Build {
    /// Its maps.
    pub(crate) fn maps(&self) -> PathBuf {
        self.0.join("maps")
    }

    /// The programs that its pods share.
    pub(crate) fn deciders(&self) -> PathBuf {
        self.0.join("deciders")
    }

    fn pods(&self) -> PathBuf {
        self.0.join("pods")
    }

    /// What there is for its pods.
    pub(crate) fn instances(&self) -> Result<Vec<Instance>, Error> {
        let names = list(&self.pods())?;
        Ok(names.iter().filter_map(|name| self.parse(name)).collect())
    }

    /// What is among its pods and is none: somebody else's, and left to them.
    pub(crate) fn strangers(&self) -> Result<Vec<PathBuf>, Error> {
        let mut names = list(&self.pods())?;
        names.retain(|name| self.parse(name).is_none());
        Ok(names.iter().map(|name| self.pods().join(name)).collect())
    }

    fn parse(&self, name: &str) -> Option<Instance> {
        let (slot, uid) = name.split_once('-')?;
        Some(Instance {
            build: self.clone(),
            slot: slot.parse().ok().filter(|slot| (*slot as usize) < MAX_SLOTS)?,
            uid: uid.replace('+', ".").parse().ok()?,
        })
    }

    /// Removes all of it, unless there are pods.
    pub(crate) fn remove_if_unused(&self) -> Result<(), Error> {
        if !self.instances()?.is_empty() {
            return Ok(());
        }
        let failed = |error| Error::new(format!("removing {}", self.0.display()), error);
        for directory in [self.pods(), self.deciders(), self.maps()] {
            for name in list(&directory)? {
                fs::remove_file(directory.join(name)).map_err(failed)?;
            }
            fs::remove_dir(&directory).map_err(failed)?;
        }
        fs::remove_dir(&self.0).map_err(failed)
    }
}

impl Instance {
    /// Where it is pinned.
    pub(crate) fn directory(&self) -> PathBuf {
        let uid = self.uid.as_str().replace('.', "+");
        self.build.pods().join(format!("{}-{uid}", self.slot))
    }
}

fn make(directories: &[&Path]) -> Result<(), Error> {
    for directory in directories {
        fs::create_dir_all(directory)
            .map_err(|error| Error::new(format!("making {}", directory.display()), error))?;
    }
    Ok(())
}

/// The names in a directory; none if it is not there.
fn list(directory: &Path) -> Result<Vec<String>, Error> {
    let failed = |error| Error::new(format!("listing {}", directory.display()), error);
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(error)),
    };
    entries
        .map(|entry| {
            entry
                .map(|entry| entry.file_name().to_string_lossy().into_owned())
                .map_err(failed)
        })
        .collect()
}

/// Whether a bpffs of ours is mounted at `path`. One at the usual place stays for others.
pub(crate) fn is_own_mount(path: &Path) -> bool {
    let Some(path) = path.to_str().filter(|_| path != Path::new(BPFFS)) else {
        return false;
    };
    // proc_mounts(5): what would break the line is written as octal numbers.
    let written: String = path
        .chars()
        .map(|c| match c {
            ' ' | '\t' | '\n' | '\\' => format!("\\{:03o}", c as u32),
            c => c.to_string(),
        })
        .collect();
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let wanted = format!("{MOUNT_SOURCE} {written} bpf ");
    mounts.lines().any(|line| line.starts_with(&wanted))
}

/// Whether `path`, or its nearest ancestor that exists, is on a bpffs.
fn on_bpffs(path: &Path) -> bool {
    path.ancestors()
        .find(|ancestor| ancestor.exists())
        .and_then(|ancestor| statfs(ancestor).ok())
        .is_some_and(|found| found.filesystem_type() == BPF_FS_MAGIC)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instance_is_found_by_its_directory() {
        let root = tempfile::tempdir().unwrap();
        let pins = Pins::existing(root.path());
        let build = pins.build(0xabc).unwrap();
        let instance = |slot: u32, uid: &str| Instance {
            build: build.clone(),
            slot,
            uid: uid.parse().unwrap(),
        };
        let made = [instance(7, "7bdb-1"), instance(1535, "shop_web.0")];
        for instance in &made {
            fs::create_dir(instance.directory()).unwrap();
        }
        let strange = ["x-y", "1536-a", "-1-a", "5"].map(|name| build.pods().join(name));
        for path in &strange {
            fs::create_dir(path).unwrap();
        }
        let mut strangers = build.strangers().unwrap();
        strangers.sort_by_key(|path| strange.iter().position(|other| other == path));
        assert_eq!(strangers, strange);
        let mut found = pins.instances().unwrap();
        found.sort_by_key(|instance| instance.slot);
        assert_eq!(found, made);
        assert_eq!(pins.of(&made[1].uid).unwrap(), made[1..]);
        build.remove_if_unused().unwrap();
        assert_eq!(pins.builds().unwrap(), [build]);
    }

    #[test]
    fn a_build_without_pods_is_removed() {
        let root = tempfile::tempdir().unwrap();
        let pins = Pins::existing(root.path());
        let build = pins.build(1).unwrap();
        fs::write(build.maps().join("PODS"), "").unwrap();
        build.remove_if_unused().unwrap();
        assert_eq!(pins.builds().unwrap(), []);
    }
}
