//! Debug records of the programs: off by default, switched on for a pod while somebody reads them.

use std::path::Path;

use aya::programs::SchedClassifier;
use aya_log::EbpfLogger;
use redirector_common::maps as layout;

use super::{
    object, open_map,
    pins::{Instance, Pins},
};
use crate::{
    mesh::pod::PodUid,
    redirect::{Error, maps::TracedMap},
};

/// Tracing of some pods; it ends with this value.
pub struct Trace {
    pods: Vec<(TracedMap, u32)>,
    logger: EbpfLogger<&'static dyn log::Log>,
}

impl Trace {
    /// Begins to trace `uid`, or every pod attached under `bpffs_dir`. Records go to `logger`.
    ///
    /// # Errors
    /// No such pod, or none at all; no right to open the maps.
    pub fn begin(
        bpffs_dir: &Path,
        uid: Option<&PodUid>,
        logger: &'static dyn log::Log,
    ) -> Result<Self, Error> {
        let mut instances = Pins::existing(bpffs_dir).instances()?;
        instances.retain(|instance| uid.is_none_or(|uid| instance.uid == *uid));
        let Some(Instance { build, .. }) = instances.first() else {
            let which = uid.map_or("no pod".to_owned(), |uid| format!("no pod with UID {uid}"));
            return Err(Error::new(
                format!("tracing the pods of {}", bpffs_dir.display()),
                format!("{which} is attached there"),
            ));
        };
        let program = build.deciders().join(object::SHARED[0].0);
        let id = SchedClassifier::from_pin(&program)
            .and_then(|program| program.info())
            .map_err(|error| Error::new(format!("opening {}", program.display()), error))?
            .id();
        // All write to one ring, so any program leads to it.
        let logger = EbpfLogger::init_from_id_with_logger(id, logger)
            .map_err(|error| Error::new("opening the debug ring", error))?;
        let mut trace = Self {
            pods: Vec::new(),
            logger,
        };
        for Instance { build, slot, .. } in &instances {
            let map = open_map(&build.maps(), layout::TRACED, TracedMap::new)?;
            trace.pods.push((map, *slot));
        }
        trace.switch(true)?;
        Ok(trace)
    }

    /// How many pods are traced.
    pub fn pods(&self) -> usize {
        self.pods.len()
    }

    /// Hands on the records that are there.
    pub fn flush(&mut self) {
        self.logger.flush();
    }

    fn switch(&mut self, on: bool) -> Result<(), Error> {
        for (map, slot) in &mut self.pods {
            map.set(*slot, on)
                .map_err(|error| Error::new("switching the pod's trace", error))?;
        }
        Ok(())
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        if let Err(error) = self.switch(false) {
            tracing::warn!(%error, "tracing stays on");
        }
    }
}
