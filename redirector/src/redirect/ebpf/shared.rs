//! What all pods of a build share: its maps, and the programs that decide. Pins keep them while no agent runs. An agent has
//! descriptors of them as well, so that nothing is lost with a pin that somebody removes: the kernel empties an array of programs when
//! the last descriptor and pin of it go, and a map that is found nowhere would be made anew, apart from the one that pods use.

use std::{
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use aya::{
    maps::MapData,
    pin::PinError,
    programs::{ProgramInfo, SchedClassifier},
};
use redirector_common::maps::{DECIDERS, PODS};

use super::{
    object::{self, EGRESS, Loaded},
    open_map,
    pins::Build,
};
use crate::redirect::{Error, maps::DeciderMap};

/// The maps and programs.
pub(super) struct Shared {
    maps: Vec<(PathBuf, MapData)>,
    deciders: Vec<Loaded>,
    array: Mutex<DeciderMap>,
    /// The programs by their pins.
    pinned: Mutex<Vec<(PathBuf, SchedClassifier)>>,
    /// Numbers of the maps by which this build's programs are told from those that have lost theirs.
    ids: [u32; 2],
}

impl Shared {
    /// Takes hold of maps that are pinned at these paths, and of the programs in their array.
    pub(super) fn hold(
        pinned: Vec<(&'static str, PathBuf)>,
        build: &Build,
        deciders: Vec<Loaded>,
    ) -> Result<Self, Error> {
        let open = |path: PathBuf| match MapData::from_pin(&path) {
            Ok(map) => Ok((path, map)),
            Err(error) => Err(Error::new(format!("opening {}", path.display()), error)),
        };
        let maps = pinned
            .into_iter()
            .map(|(_, path)| open(path))
            .collect::<Result<_, _>>()?;
        let open_program = |(name, _): (&str, _)| {
            let path = build.deciders().join(name);
            match SchedClassifier::from_pin(&path) {
                Ok(program) => Ok((path, program)),
                Err(error) => Err(Error::new(format!("opening {}", path.display()), error)),
            }
        };
        let programs = object::SHARED.into_iter().map(open_program);
        let id = |name: &str| {
            let path = build.maps().join(name);
            let info = MapData::from_pin(&path).and_then(|map| map.info());
            info.map(|info| info.id())
                .map_err(|error| Error::new(format!("opening {}", path.display()), error))
        };
        Ok(Self {
            maps,
            deciders,
            array: Mutex::new(open_map(&build.maps(), DECIDERS, DeciderMap::new)?),
            pinned: Mutex::new(programs.collect::<Result<_, _>>()?),
            ids: [id(PODS)?, id(DECIDERS)?],
        })
    }

    /// Sees to it that the programs that decide are in their array; tells whether some were not.
    pub(super) fn put_back(&self) -> Result<bool, Error> {
        let mut array = self.array.lock().unwrap_or_else(PoisonError::into_inner);
        let failed = |error| Error::new(format!("looking into {DECIDERS}"), error);
        let mut missing = false;
        for Loaded { decider, id, fd } in &self.deciders {
            if array.program(*decider).map_err(failed)? != Some(*id) {
                array.set(*decider, fd).map_err(failed)?;
                missing = true;
            }
        }
        Ok(missing)
    }

    /// Makes the pins that are gone, or are others' by now, anew, before the maps are looked for there.
    pub(super) fn pin_again(&self) -> Result<(), Error> {
        // One at a time: of two that make the same pin, the second would fail.
        let mut programs = self.pinned.lock().unwrap_or_else(PoisonError::into_inner);
        let id = |map: &MapData| map.info().map(|info| info.id()).ok();
        for (path, map) in &self.maps {
            if path.exists() {
                let there = MapData::from_pin(path).ok();
                if there.is_some_and(|there| id(&there) == id(map)) {
                    continue;
                }
                std::fs::remove_file(path)
                    .map_err(|error| Error::new(format!("removing {}", path.display()), error))?;
            }
            tracing::warn!(path = %path.display(), "a map's pin was gone, and is made anew");
            pin(path, |path| map.pin(path))?;
        }
        for (path, program) in programs.iter_mut().filter(|(path, _)| !path.exists()) {
            pin(path, |path| program.pin(path))?;
        }
        Ok(())
    }

    /// Whether the programs of an instance use these maps, and not others that were at the same paths before.
    pub(super) fn serve(&self, instance: &Path) -> bool {
        let used = ProgramInfo::from_pin(instance.join(EGRESS)).and_then(|info| info.map_ids());
        used.is_ok_and(|used| used.is_some_and(|used| self.ids.iter().all(|id| used.contains(id))))
    }
}

/// Pins something, and makes the directory if need be.
fn pin(path: &Path, pin: impl FnOnce(&Path) -> Result<(), PinError>) -> Result<(), Error> {
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory)
            .map_err(|error| Error::new(format!("making {}", directory.display()), error))?;
    }
    pin(path).map_err(|error| Error::new(format!("pinning {}", path.display()), error))
}

/// Loads the programs that decide, and pins them in place of those of an earlier agent.
pub(super) fn load(ebpf: &mut aya::Ebpf, build: &Build) -> Result<Vec<Loaded>, Error> {
    let loaded = object::load_shared(ebpf)?;
    for (name, _) in object::SHARED {
        let path = build.deciders().join(name);
        let _ = std::fs::remove_file(&path);
        object::program::<SchedClassifier>(ebpf, name)?
            .pin(&path)
            .map_err(|error| Error::new(format!("pinning {}", path.display()), error))?;
    }
    Ok(loaded)
}
