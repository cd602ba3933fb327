//! What the eBPF backend leaves: pins, and what was changed in the pods' namespaces. Removed by it, and without it.
//!
//! A namespace is cleaned that an instance was made for, and no other: one that has come to have its inode number is told from it by
//! its cookie, and where there are no cookies by the instance that another pod has there.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use nix::mount::{MntFlags, umount2};
use redirector_common::maps::{FACT_ADDED_CLSACT, FACT_CLSACT, Facts};

use super::{
    all_or,
    facts::{self, FREED, Found},
    hooks,
    pins::{self, Instance, Pins},
    rcu,
    routes::ROUTING,
};
use crate::{
    mesh::pod::PodUid,
    redirect::{Error, Leftovers, place_of},
    sys::{
        interfaces::interfaces,
        netns::{Fate, Netns, Place},
        process,
    },
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
        let instances: Vec<_> = instances.into_iter().map(facts::found).collect();
        // Nobody gives slots out.
        remove(&self.pins, uid, &instances, netns, |_| Vec::new())
    }

    fn remove_shared(&self) -> Result<(), Vec<Error>> {
        let mut errors = Vec::new();
        let strangers = || -> Result<Vec<PathBuf>, Error> {
            let builds = self.pins.builds()?;
            let found = builds.iter().map(pins::Build::strangers);
            Ok(found.collect::<Result<Vec<_>, _>>()?.concat())
        };
        for path in strangers().map_err(|error| vec![error])? {
            let text = "is not the directory of a pod as this version makes them: remove it first, by the version that made it if one did";
            errors.push(Error::new(format!("removing {}", path.display()), text));
        }
        if !errors.is_empty() {
            return Err(errors);
        }
        let mut tried = |what: &str, path: &Path, result: io::Result<()>| match result {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                errors.push(Error::new(format!("{what} {}", path.display()), error));
            }
            _ => {}
        };
        if let Err(error) = rcu::put_back(&self.pins.shared()) {
            return Err(vec![error]);
        }
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

/// Removes `instances`, all that there are of a pod, and what they changed in the namespaces that they were made for, as far as those
/// are still there. `given` is the one that the pod is known to have; what is ours there goes even if nothing is known of an instance.
/// `freed` is called for each instance whose programs run no more.
pub(super) fn remove(
    pins: &Pins,
    uid: &PodUid,
    instances: &[Found],
    given: Option<&Netns>,
    mut freed: impl FnMut(&Instance) -> Vec<Error>,
) -> Result<(), Vec<Error>> {
    let others = others(pins, uid).map_err(|error| vec![error])?;
    let given = given
        .map(|netns| Ok((netns, place_of(netns)?)))
        .transpose()
        .map_err(|error| vec![error])?;
    let mut errors = Vec::new();
    for found in instances {
        errors.extend(remove_one(found, given, &others, &mut freed));
    }
    if let (true, Some((netns, place))) = (instances.is_empty(), given)
        && holder(&others, place).is_none()
    {
        // The pins were lost, and filters hold without them.
        errors.extend(detach_filters(netns));
        errors.extend(restore(netns, &FREED));
    }
    all_or(errors)
}

/// Removes one instance. `others` are those of other pods: a namespace that one of them is in stays as it is.
pub(super) fn remove_one(
    (instance, facts): &Found,
    given: Option<(&Netns, Place)>,
    others: &[Found],
    mut freed: impl FnMut(&Instance) -> Vec<Error>,
) -> Vec<Error> {
    let place = facts.as_ref().map(facts::place);
    let (mut netns, elsewhere);
    match given {
        Some((given, at)) if place.is_none_or(|place| place == at) => netns = Some(given),
        _ => {
            let fate = place.map_or(Ok(Fate::Gone), |place| place.fate(process::sees_all()));
            let failed = || format!("looking for the namespace of {}", instance.uid);
            elsewhere = match fate {
                Ok(Fate::There(found)) => Some(found),
                Ok(Fate::Gone) => None,
                Ok(Fate::Unseen) => {
                    let text = "it is not found, and this process does not see all that the node has: run it in the node's PID namespace, \
                                with CAP_SYS_PTRACE";
                    return vec![Error::new(failed(), text)];
                }
                Err(error) => return vec![Error::new(failed(), error)],
            };
            netns = elsewhere.as_ref();
        }
    }
    let mut errors = Vec::new();
    let place = place.or(given.map(|(_, place)| place));
    if let Some((holder, theirs)) = place.and_then(|place| holder(others, place)) {
        netns = None;
        errors.extend(facts.and_then(|facts| hand_over(&facts, holder, theirs)));
    }
    let known = facts.unwrap_or(Facts {
        flags: FACT_CLSACT,
        ..FREED
    });
    if let Some(netns) = netns.filter(|_| known.has(FACT_CLSACT)) {
        let failed = detach_filters(netns);
        if !failed.is_empty() {
            // Programs that still run keep their slot, and the pins by which they are found again.
            errors.extend(failed);
            return errors;
        }
    }
    let failed = hooks::unpin(&instance.directory());
    if failed.is_empty() {
        errors.extend(freed(instance));
    }
    errors.extend(failed);
    errors.extend(netns.into_iter().flat_map(|netns| restore(netns, &known)));
    errors
}

/// The instances of other pods.
pub(super) fn others(pins: &Pins, uid: &PodUid) -> Result<Vec<Found>, Error> {
    let mut all = facts::all(pins)?;
    all.retain(|(instance, _)| instance.uid != *uid);
    Ok(all)
}

/// The instance of another pod in a namespace.
fn holder(others: &[Found], wanted: Place) -> Option<(&Instance, &Facts)> {
    others.iter().find_map(|(instance, facts)| {
        let facts = facts.as_ref()?;
        (facts::place(facts) == wanted).then_some((instance, facts))
    })
}

/// Leaves what was changed in a namespace to another pod's instance, to be put back with that.
fn hand_over(from: &Facts, to: &Instance, theirs: &Facts) -> Option<Error> {
    let facts = Facts {
        flags: theirs.flags | from.flags & FACT_ADDED_CLSACT,
        changed_sysctls: theirs.changed_sysctls | from.changed_sysctls,
        ..*theirs
    };
    (facts != *theirs)
        .then(|| facts::write(to, facts).err())
        .flatten()
}

/// Detaches our filters from all interfaces.
fn detach_filters(netns: &Netns) -> Vec<Error> {
    inside(netns, || match interfaces() {
        Ok(interfaces) => interfaces.iter().flat_map(hooks::detach_filters).collect(),
        Err(error) => {
            let operation = format!("reading the interfaces of {}", netns.id());
            vec![Error::new(operation, error)]
        }
    })
}

/// Takes away rules and routes, and the qdiscs that were added if nobody uses them, and puts sysctls back.
fn restore(netns: &Netns, facts: &Facts) -> Vec<Error> {
    inside(netns, || {
        let mut errors = Vec::new();
        if facts.has(FACT_ADDED_CLSACT) {
            errors.extend(hooks::remove_clsact(&interfaces().unwrap_or_default()));
        }
        errors.extend(ROUTING.remove());
        errors.extend(ROUTING.restore_sysctls(facts.changed_sysctls));
        errors
    })
}

/// Does something in a namespace.
pub(super) fn inside(netns: &Netns, f: impl FnOnce() -> Vec<Error>) -> Vec<Error> {
    netns
        .run(f)
        .unwrap_or_else(|error| vec![Error::new(format!("entering {}", netns.id()), error)])
}
