//! Where an agent keeps things: the bpffs, the hierarchy of cgroups, the state directory.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use nix::{
    sys::{
        statfs::{BPF_FS_MAGIC, statfs},
        statvfs::statvfs,
    },
    unistd::{AccessFlags, access},
};

use super::Check;
use crate::{
    config::{Config, values::Redirect},
    sys::{cgroups::Hierarchy, process},
};

/// Room for the records of a full node, several times.
const LITTLE_SPACE: u64 = 64 << 20;
const FEW_INODES: u64 = 4_096;

pub(super) fn checks(config: &Config) -> Vec<Check> {
    let bpffs = match config.redirect {
        Redirect::Ebpf => bpffs(&config.bpffs_dir, Pins::of(&config.bpffs_dir)),
        _ => Check::not_asked("mounts.bpffs", "only --redirect ebpf pins anything"),
    };
    let state = existing(&config.state_dir);
    vec![
        bpffs,
        cgroup2(Hierarchy::find().map(|found| found.is_some())),
        state_dir(&config.state_dir, State::of(&config.state_dir)),
        space(&state, Space::of(&state)),
    ]
}

/// The directory that is there, or the nearest one above it that is.
fn existing(path: &Path) -> PathBuf {
    let mut above = path.ancestors();
    above
        .find(|path| path.is_dir())
        .unwrap_or(Path::new("/"))
        .to_owned()
}

/// What is there for pins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pins {
    Mounted,
    /// The agent mounts one.
    ToMount,
    /// The agent may not: what a container mounts ends with it.
    InContainer,
}

impl Pins {
    fn of(root: &Path) -> Self {
        // As the agent looks for one.
        match statfs(&existing(root)).is_ok_and(|found| found.filesystem_type() == BPF_FS_MAGIC) {
            true => Self::Mounted,
            false if process::in_container() && root.starts_with("/sys/fs/bpf") => Self::InContainer,
            false => Self::ToMount,
        }
    }
}

fn bpffs(root: &Path, found: Pins) -> Check {
    let id = "mounts.bpffs";
    let root = root.display();
    match found {
        Pins::Mounted => Check::ok(id, format!("{root} is on a bpffs")),
        Pins::ToMount => Check::warning(
            id,
            format!("{root} is not on a bpffs; the agent mounts one when it starts"),
            "mount -t bpf bpf /sys/fs/bpf, and let the node do so at its start",
        ),
        Pins::InContainer => Check::failed(
            id,
            format!("{root} is not on a bpffs, and what a container mounts ends with it"),
            "on the node: mount -t bpf bpf /sys/fs/bpf, and mount that into the container with mountPropagation HostToContainer",
        ),
    }
}

fn cgroup2(found: io::Result<bool>) -> Check {
    let id = "mounts.cgroup2";
    match found {
        Ok(true) => Check::ok(id, "cgroups of version 2 are mounted"),
        Ok(false) => Check::warning(
            id,
            "there are no cgroups of version 2: kubelet is not told from other processes of the node, which all reach the pods directly",
            "mount -t cgroup2 none /sys/fs/cgroup/unified, or mount the node's /sys/fs/cgroup into the container",
        ),
        Err(error) => Check::warning(id, format!("cannot look for cgroups: {error}"), "mount /proc"),
    }
}

/// How it is with the state directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// With its mode.
    Writable(u32),
    Missing {
        /// It can be made.
        can_be_made: bool,
    },
    NotADirectory,
    ReadOnly,
}

impl State {
    fn of(path: &Path) -> Self {
        let may_write = |path: &Path| access(path, AccessFlags::W_OK | AccessFlags::X_OK).is_ok();
        match fs::metadata(path) {
            Ok(found) if !found.is_dir() => Self::NotADirectory,
            Ok(found) if may_write(path) => Self::Writable(found.mode() & 0o777),
            Ok(_) => Self::ReadOnly,
            Err(_) => Self::Missing {
                can_be_made: may_write(&existing(path)),
            },
        }
    }
}

fn state_dir(path: &Path, state: State) -> Check {
    let id = "state.directory";
    let path = path.display();
    match state {
        State::Writable(mode) if mode & 0o007 == 0 => Check::ok(id, format!("{path} can be written")),
        State::Writable(mode) => Check::warning(
            id,
            format!("{path} can be written, and everybody has rights there (mode {mode:o})"),
            format!("chmod o= {path}: records of pods, and perhaps the development CA's key, are in it"),
        ),
        State::Missing { can_be_made: true } => Check::ok(
            id,
            format!("{path} is not there; the agent makes it when it starts"),
        ),
        State::Missing { can_be_made: false } => Check::failed(
            id,
            format!("{path} is not there and cannot be made"),
            "make it, or name another with --state-dir",
        ),
        State::NotADirectory => Check::failed(
            id,
            format!("{path} is no directory"),
            "remove it, or name another with --state-dir",
        ),
        State::ReadOnly => Check::failed(
            id,
            format!("{path} cannot be written"),
            "run as its owner, mount it for writing, or name another with --state-dir",
        ),
    }
}

/// What is free.
#[derive(Debug, Clone, Copy)]
struct Space {
    bytes: u64,
    /// `None` where the file system does not count them.
    inodes: Option<u64>,
}

impl Space {
    fn of(path: &Path) -> io::Result<Self> {
        let found = statvfs(path)?;
        Ok(Self {
            bytes: found.blocks_available() * found.fragment_size(),
            inodes: (found.files() > 0).then(|| found.files_available()),
        })
    }
}

fn space(path: &Path, space: io::Result<Space>) -> Check {
    let id = "state.space";
    let path = path.display();
    let hint = "make room there, or name another directory with --state-dir";
    match space {
        Ok(Space { bytes: 0, .. } | Space { inodes: Some(0), .. }) => {
            Check::failed(id, format!("the file system of {path} is full"), hint)
        }
        Ok(Space { bytes, inodes }) => {
            let seen = format!("{} MiB are free at {path}", bytes >> 20);
            match bytes < LITTLE_SPACE || inodes.is_some_and(|inodes| inodes < FEW_INODES) {
                true => {
                    let inodes = inodes.map_or_else(String::new, |inodes| format!(", for {inodes} files"));
                    Check::warning(id, seen + &inodes, hint)
                }
                false => Check::ok(id, seen),
            }
        }
        Err(error) => Check::warning(
            id,
            format!("cannot find out what is free at {path}: {error}"),
            hint,
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::State as Standing;

    #[test]
    fn each_place_has_its_hint() {
        let path = Path::new("/x/y");
        let free = |bytes, inodes| Ok(Space { bytes, inodes });
        for (check, state, told) in [
            (bpffs(path, Pins::Mounted), Standing::Ok, "/x/y is on"),
            (bpffs(path, Pins::ToMount), Standing::Warning, "mounts one when"),
            (bpffs(path, Pins::InContainer), Standing::Failed, "ends with it"),
            (cgroup2(Ok(true)), Standing::Ok, "version 2"),
            (cgroup2(Ok(false)), Standing::Warning, "no cgroups"),
            (
                cgroup2(Err(io::ErrorKind::NotFound.into())),
                Standing::Warning,
                "cannot look",
            ),
            (
                state_dir(path, State::Writable(0o750)),
                Standing::Ok,
                "can be written",
            ),
            (
                state_dir(path, State::Writable(0o755)),
                Standing::Warning,
                "mode 755",
            ),
            (
                state_dir(path, State::Missing { can_be_made: true }),
                Standing::Ok,
                "makes it",
            ),
            (
                state_dir(path, State::Missing { can_be_made: false }),
                Standing::Failed,
                "cannot be made",
            ),
            (
                state_dir(path, State::NotADirectory),
                Standing::Failed,
                "no directory",
            ),
            (
                state_dir(path, State::ReadOnly),
                Standing::Failed,
                "cannot be written",
            ),
            (
                space(path, free(1 << 30, Some(1 << 20))),
                Standing::Ok,
                "1024 MiB",
            ),
            (space(path, free(1 << 30, None)), Standing::Ok, "1024 MiB"),
            (
                space(path, free(1 << 20, Some(1 << 20))),
                Standing::Warning,
                "1 MiB",
            ),
            (
                space(path, free(1 << 30, Some(5))),
                Standing::Warning,
                "for 5 files",
            ),
            (space(path, free(0, Some(1 << 20))), Standing::Failed, "full"),
            (space(path, free(1 << 30, Some(0))), Standing::Failed, "full"),
            (
                space(path, Err(io::ErrorKind::NotFound.into())),
                Standing::Warning,
                "cannot find out",
            ),
        ] {
            assert_eq!(check.state, state, "{check:?}");
            assert!(check.seen.contains(told), "{check:?}");
            assert_eq!(check.hint.is_some(), state != Standing::Ok, "{check:?}");
        }
    }

    #[test]
    fn places_are_seen_as_they_are() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        assert_eq!(existing(&path.join("a/b")), path);
        assert_eq!(State::of(&path.join("a")), State::Missing { can_be_made: true });
        fs::write(path.join("file"), "").unwrap();
        assert_eq!(State::of(&path.join("file")), State::NotADirectory);
        assert!(matches!(State::of(path), State::Writable(_)));
        assert!(Space::of(path).unwrap().bytes > 0);
    }
}
