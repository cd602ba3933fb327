//! What the iptables backend leaves: rules in the pods on its records. They go as they came, by the programs that wrote them.

use std::{fs, io};

use super::{Config, all_or, records::Records, records_dir, removal::Removal, run::Tools, write::Writer};
use crate::{
    mesh::pod::PodUid,
    redirect::{Error, Leftovers},
    sys::{netns::Netns, process},
};

/// The pods on record in a state directory.
pub struct Recorded {
    config: Config,
    records: Records,
    writer: Writer,
}

impl Recorded {
    /// Those of an agent with these settings that runs no more, or with another backend.
    pub fn new(config: Config) -> Self {
        Self {
            records: Records::existing(&records_dir(&config.state_dir)),
            config,
            writer: Writer::default(),
        }
    }
}

impl Leftovers for Recorded {
    fn backend(&self) -> &'static str {
        "iptables"
    }

    fn pods(&self) -> Result<Vec<PodUid>, Error> {
        self.records.uids()
    }

    fn remove(&self, uid: &PodUid, netns: Option<&Netns>) -> Result<(), Vec<Error>> {
        // Not tried, and perhaps not those that wrote the rules.
        let tools = Tools::find(self.config.backend).ok();
        let removal = Removal {
            records: &self.records,
            writer: &self.writer,
            tools: tools.as_ref(),
            sees_all: process::sees_all(),
        };
        removal.of_pod(uid, netns)
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
