//! The hierarchy of cgroups (version 2): where it is mounted, a process's place in it, and the ids that programs see.
//!
//! The kernel tells paths as our own cgroup namespace sees them. What a container has mounted of the node's hierarchy may begin
//! above or below its own place, so a path is read against the mount's root.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Component, Path, PathBuf},
};

use nix::{
    sched::{CloneFlags, setns},
    sys::statfs::{CGROUP2_SUPER_MAGIC, statfs},
};

/// A mounted hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hierarchy {
    mount_point: PathBuf,
    /// Which cgroup is there.
    root: PathBuf,
}

impl Hierarchy {
    /// The mounted hierarchy that shows most; `None` where there is none, which is so with version 1 alone.
    ///
    /// # Errors
    /// Those of reading `/proc/self/mountinfo`.
    pub fn find() -> io::Result<Option<Self>> {
        let mounts = fs::read_to_string("/proc/self/mountinfo")?;
        Ok(Self::of_mounts(&mounts))
    }

    /// proc(5): id, parent, device, root, mount point, options, optional fields, "-", type, source, options.
    fn of_mounts(mounts: &str) -> Option<Self> {
        let mounted = mounts.lines().filter_map(|line| {
            let (mount, filesystem) = line.split_once(" - ")?;
            let mut fields = mount.split(' ').skip(3);
            let (root, mount_point) = (fields.next()?, fields.next()?);
            (filesystem.split(' ').next()? == "cgroup2").then(|| Self {
                mount_point: mount_point.into(),
                root: root.into(),
            })
        });
        // "/.." is above "/", and more dots are above that.
        let shown = |hierarchy: &Self| {
            let up = hierarchy
                .root
                .components()
                .filter(|c| *c == Component::ParentDir)
                .count();
            let down = hierarchy
                .root
                .components()
                .filter(|c| matches!(c, Component::Normal(_)))
                .count();
            (std::cmp::Reverse(up), down)
        };
        mounted.min_by_key(shown)
    }

    /// The cgroup of a process, as its path in the hierarchy, and as the directory that it has here.
    ///
    /// # Errors
    /// Those of reading `/proc/PID/cgroup`; `NotFound` when the process is in none that is mounted here.
    pub fn of_process(&self, pid: u32) -> io::Result<(PathBuf, PathBuf)> {
        let text = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
        let path = text.lines().find_map(|line| line.strip_prefix("0::"));
        let path = path.ok_or_else(|| io::Error::other("not a process of a cgroup of version 2"))?;
        let path = PathBuf::from(path);
        let directory = self.directory(&path).ok_or_else(|| {
            let (root, mount_point) = (self.root.display(), self.mount_point.display());
            io::Error::new(
                io::ErrorKind::NotFound,
                format!(
                    "{} is not below {root}, which is mounted at {mount_point}",
                    path.display()
                ),
            )
        })?;
        Ok((path, directory))
    }

    /// Where the kernel's path of a cgroup is.
    fn directory(&self, path: &Path) -> Option<PathBuf> {
        let below = path.strip_prefix(&self.root).ok()?;
        let normal = below.components().all(|c| matches!(c, Component::Normal(_)));
        normal.then(|| self.mount_point.join(below))
    }

    /// Where an operator's path of a cgroup is: below the mount point, which it may name or not.
    pub fn resolve(&self, path: &Path) -> PathBuf {
        if path.starts_with(&self.mount_point) {
            return path.to_owned();
        }
        self.mount_point.join(path.strip_prefix("/").unwrap_or(path))
    }
}

/// Brings the calling thread, and those that it starts from now on, into the node's cgroup namespace: PID 1's, or the first of all. A
/// container has one of its own as a rule, whatever it shares of the node, and is told of others' cgroups by paths that lead up and
/// out of it (cgroup_namespaces(7)), from which whose they are can't be read.
///
/// # Errors
/// Those of opening `/proc/1/ns/cgroup` and of setns(2).
pub fn enter_node_namespace() -> io::Result<()> {
    /// PROC_CGROUP_INIT_INO, include/linux/proc_ns.h
    const FIRST: u64 = 0xeffffffb;
    let inode = |file: &fs::File| file.metadata().map(|found| found.ino());
    let own = inode(&fs::File::open("/proc/thread-self/ns/cgroup")?)?;
    if own == FIRST {
        return Ok(());
    }
    let node = fs::File::open("/proc/1/ns/cgroup").or_else(|error| {
        // An init with more rights than ours can't be looked into; kthreadd can, where the node's processes are seen.
        let first = fs::File::open("/proc/2/ns/cgroup").ok();
        first
            .filter(|file| inode(file).is_ok_and(|inode| inode == FIRST))
            .ok_or(error)
    })?;
    if inode(&node)? != own {
        setns(node, CloneFlags::CLONE_NEWCGROUP)?;
    }
    Ok(())
}

/// The id of the cgroup that a directory is, as `bpf_skb_cgroup_id` tells it: since Linux 5.5 the inode's number.
///
/// # Errors
/// `NotFound` when there is no such directory, or when it is none of a cgroup.
pub fn id(directory: &Path) -> io::Result<u64> {
    let metadata = fs::metadata(directory)?;
    if !metadata.is_dir() || statfs(directory)?.filesystem_type() != CGROUP2_SUPER_MAGIC {
        return Err(io::Error::new(
            io::ErrorKind::NotFound,
            "not a cgroup of version 2",
        ));
    }
    Ok(metadata.ino())
}

/// Whether the cgroup that a directory is is the root of all, whatever is mounted where: every other has a type.
pub fn is_root(directory: &Path) -> bool {
    !directory.join("cgroup.type").exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hierarchy(root: &str, mount_point: &str) -> Hierarchy {
        Hierarchy {
            mount_point: mount_point.into(),
            root: root.into(),
        }
    }

    #[test]
    fn the_mount_that_shows_most_is_taken() {
        let line = |root: &str, at: &str, kind: &str| {
            format!("35 24 0:30 {root} {at} rw,nosuid shared:9 master:2 - {kind} cgroup rw\n")
        };
        let v1 = line("/", "/sys/fs/cgroup/cpu", "cgroup");
        let unified = line("/", "/sys/fs/cgroup/unified", "cgroup2");
        let own = line("/", "/sys/fs/cgroup", "cgroup2");
        let host = line("/../../..", "/host/cgroup", "cgroup2");
        let part = line("/kubelet.slice", "/part", "cgroup2");
        for (mounts, expected) in [
            (String::new(), None),
            (v1.clone(), None),
            (v1 + &unified, Some(hierarchy("/", "/sys/fs/cgroup/unified"))),
            (own + &host, Some(hierarchy("/../../..", "/host/cgroup"))),
            (
                part.clone() + &unified,
                Some(hierarchy("/", "/sys/fs/cgroup/unified")),
            ),
            (part, Some(hierarchy("/kubelet.slice", "/part"))),
            ("nonsense\n\n - cgroup2".to_owned(), None),
        ] {
            assert_eq!(Hierarchy::of_mounts(&mounts), expected, "{mounts}");
        }
    }

    #[test]
    fn paths_are_read_against_the_mounts_root() {
        let at = |root: &str, path: &str| hierarchy(root, "/m").directory(Path::new(path));
        for (root, path, expected) in [
            (
                "/",
                "/system.slice/kubelet.service",
                Some("/m/system.slice/kubelet.service"),
            ),
            ("/", "/", Some("/m")),
            ("/../..", "/../../system.slice/k", Some("/m/system.slice/k")),
            ("/", "/../../system.slice/k", None),
            ("/../..", "/../k", None),
            ("/a", "/ab", None),
            ("/a", "/a/b", Some("/m/b")),
        ] {
            assert_eq!(at(root, path), expected.map(PathBuf::from), "{root} {path}");
        }
    }

    #[test]
    fn an_operators_path_may_name_the_mount_point_or_not() {
        for path in ["/sys/fs/cgroup/a/b", "/a/b", "a/b"] {
            let found = hierarchy("/", "/sys/fs/cgroup").resolve(Path::new(path));
            assert_eq!(found, Path::new("/sys/fs/cgroup/a/b"), "{path}");
        }
    }

    #[test]
    fn a_plain_directory_is_no_cgroup() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(id(directory.path()).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(
            id(&directory.path().join("none")).unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
    }
}
