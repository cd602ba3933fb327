//! What the iptables backend leaves: rules in the pods on its records. They go as they came, by the programs that wrote them.

use std::{
    fs, io,
    sync::{Arc, Mutex, PoisonError},
};

use super::{Config, Iptables, all_or, records::Records, records_dir};
use crate::{
    mesh::pod::PodUid,
    redirect::{Error, Leftovers, Redirector as _},
    sys::netns::Netns,
};

/// The pods on record in a state directory.
pub struct Recorded {
    config: Config,
    /// Opened for the first pod, if there is one: it needs the programs, and tries them.
    backend: Mutex<Option<Arc<Iptables>>>,
}

impl Recorded {
    /// Those of an agent with these settings that runs no more, or with another backend.
    pub fn new(config: Config) -> Self {
        Self {
            config,
            backend: Mutex::default(),
        }
    }

    fn backend(&self) -> Result<Arc<Iptables>, Error> {
        let mut backend = self.backend.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(backend) = &*backend {
            return Ok(Arc::clone(backend));
        }
        let opened = Arc::new(Iptables::open(&self.config)?);
        *backend = Some(Arc::clone(&opened));
        Ok(opened)
    }
}

impl Leftovers for Recorded {
    fn backend(&self) -> &'static str {
        "iptables"
    }

    fn pods(&self) -> Result<Vec<PodUid>, Error> {
        Records::existing(&records_dir(&self.config.state_dir)).uids()
    }

    fn remove(&self, uid: &PodUid, _: Option<&Netns>) -> Result<(), Vec<Error>> {
        // The record says better than anybody which namespace it was.
        if !self.pods().map_err(|error| vec![error])?.contains(uid) {
            return Ok(());
        }
        self.backend().map_err(|error| vec![error])?.forget(uid)
    }

    fn remove_shared(&self) -> Result<(), Vec<Error>> {
        let directory = records_dir(&self.config.state_dir);
        match fs::remove_dir(&directory) {
            // Records of pods that could not be released.
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
            Err(error) if error.kind() != io::ErrorKind::NotFound => all_or(vec![Error::new(
                format!("removing {}", directory.display()),
                error,
            )]),
            _ => Ok(()),
        }
    }
}
