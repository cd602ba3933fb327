//! What the mesh knows: the discovery seam. Sources bring changes; [`state`] owns the mesh and hands snapshots to the proxy.
//!
//! What a source cannot understand, or what this proxy does not enforce, is refused here: nothing further in has to doubt
//! a snapshot.

use std::{fmt, io, path::PathBuf};

pub mod demand;
pub mod file;
pub mod proto;
pub mod state;
pub mod xds;

/// Why there is no snapshot of the mesh.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The workload file could not be read.
    #[error("reading workload file {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why it could not be read.
        #[source]
        source: io::Error,
    },
    /// The workloads are not what they should be.
    #[error("{origin}{}: {field}: {message}", location.map(|at| at.to_string()).unwrap_or_default())]
    Invalid {
        /// Where they come from: a path, or the name of a setting.
        origin: String,
        /// Where in the text, when that is known.
        location: Option<Location>,
        /// Path of the value, e.g. `workloads[0].protocol`.
        field: String,
        /// What is wrong, and what would be right.
        message: String,
    },
}

/// A place in a text, both counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Location {
    /// Line.
    pub line: usize,
    /// Column.
    pub column: usize,
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, ", line {}, column {}", self.line, self.column)
    }
}
