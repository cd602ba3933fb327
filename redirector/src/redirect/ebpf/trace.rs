//! Debug records of the programs: off by default, switched on for a pod while somebody reads them.

use std::path::Path;

use aya::programs::SchedClassifier;
use aya_log::EbpfLogger;
use redirector_common::maps::{self as layout, FLAG_TRACE};

use super::{PodMap, object, open_map, pins::Pins};
use crate::{mesh::pod::PodUid, redirect::Error};

/// Tracing of some pods; it ends with this value.
pub struct Trace {
    pods: Vec<PodMap>,
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
        let pins = Pins::existing(bpffs_dir);
        let uids = match uid {
            Some(uid) => vec![uid.clone()],
            None => pins.pods()?,
        };
        let first = uids.first().ok_or_else(|| {
            Error::new(
                format!("tracing the pods of {}", bpffs_dir.display()),
                "no pod is attached there",
            )
        })?;
        let program = pins.pod(first).join(object::EGRESS);
        let id = SchedClassifier::from_pin(&program)
            .and_then(|program| program.info())
            .map_err(|error| Error::new(format!("opening {}", program.display()), error))?
            .id();
        // All instances write to one ring, so any program leads to it.
        let logger = EbpfLogger::init_from_id_with_logger(id, logger)
            .map_err(|error| Error::new("opening the debug ring", error))?;
        let mut trace = Self {
            pods: Vec::new(),
            logger,
        };
        for uid in &uids {
            trace
                .pods
                .push(open_map(&pins.pod(uid), layout::POD, PodMap::new)?);
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
        for map in &mut self.pods {
            let result = map.read().and_then(|mut entry| {
                entry.flags = if on {
                    entry.flags | FLAG_TRACE
                } else {
                    entry.flags & !FLAG_TRACE
                };
                map.write(entry)
            });
            result.map_err(|error| Error::new("switching the trace flag", error))?;
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
