//! Where programs, maps and links are pinned, so that they outlive the agent:
//!
//! ```text
//! <bpffs>/shared/TAGS, AYA_LOGS        one of each per node
//! <bpffs>/pods/<uid>/                  the instance that serves a pod
//! <bpffs>/replaced/<uid>/              an instance of another build, until its successor is in place
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

use crate::{mesh::pod::PodUid, redirect::Error};

/// The usual mount point of a bpffs.
const BPFFS: &str = "/sys/fs/bpf";

/// The directories of pins.
#[derive(Debug, Clone)]
pub(crate) struct Pins {
    root: PathBuf,
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
                tracing::info!(path = %mount_point.display(), "mounting a bpffs");
                mount(
                    Some("bpf"),
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
        let pins = Self {
            root: root.to_owned(),
        };
        for directory in [pins.shared(), pins.root.join("pods"), pins.root.join("replaced")] {
            fs::create_dir_all(&directory).map_err(failed(format!("making {}", directory.display())))?;
        }
        Ok(pins)
    }

    /// The directories of an agent that has prepared them.
    pub(crate) fn existing(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
        }
    }

    /// What all pods share.
    pub(crate) fn shared(&self) -> PathBuf {
        self.root.join("shared")
    }

    /// The pod's instance.
    pub(crate) fn pod(&self, uid: &PodUid) -> PathBuf {
        self.root.join("pods").join(encode(uid))
    }

    /// The pod's earlier instance.
    pub(crate) fn replaced(&self, uid: &PodUid) -> PathBuf {
        self.root.join("replaced").join(encode(uid))
    }

    /// The pods that have an instance, or an earlier one.
    pub(crate) fn pods(&self) -> Result<Vec<PodUid>, Error> {
        let mut uids = Vec::new();
        for directory in ["pods", "replaced"] {
            let path = self.root.join(directory);
            let failed = |error| Error::new(format!("listing {}", path.display()), error);
            for entry in fs::read_dir(&path).map_err(failed)? {
                let name = entry.map_err(failed)?.file_name();
                match name.to_string_lossy().replace('+', ".").parse::<PodUid>() {
                    Ok(uid) if !uids.contains(&uid) => uids.push(uid),
                    Ok(_) => {}
                    Err(error) => {
                        tracing::warn!(path = %path.display(), ?name, %error, "not a pod's directory")
                    }
                }
            }
        }
        Ok(uids)
    }
}

fn encode(uid: &PodUid) -> String {
    uid.as_str().replace('.', "+")
}

/// Whether `path`, or its nearest ancestor that exists, is on a bpffs.
fn on_bpffs(path: &Path) -> bool {
    path.ancestors()
        .find(|ancestor| ancestor.exists())
        .and_then(|ancestor| statfs(ancestor).ok())
        .is_some_and(|found| found.filesystem_type() == BPF_FS_MAGIC)
}
