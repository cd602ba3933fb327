//! Why an agent does not run.

use std::{io, net::SocketAddr, path::PathBuf};

use super::takeover;
use crate::{
    discovery,
    identity::dev_ca,
    pods::{records, rules, socket_file::BindError},
    redirect,
    sys::lock::LockError,
    telemetry::Chain,
};

/// Why the agent does not run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The process lacks rights.
    #[error(
        "this process lacks {}: run it as root, or give it these capabilities",
        .missing.join(", ")
    )]
    Capabilities {
        /// Which.
        missing: Vec<&'static str>,
    },
    /// Something about this process or the node cannot be found out.
    #[error("cannot {operation}")]
    System {
        /// What was tried.
        operation: &'static str,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// The state directory cannot be made.
    #[error("cannot make the state directory {path} (--state-dir)", path = .path.display())]
    StateDir {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Another agent has it.
    #[error("{path} ({flag}) is in use by another agent: stop that one, or give this one a directory of its own", path = .path.display())]
    InUse {
        /// Which.
        path: PathBuf,
        /// The flag that chooses another.
        flag: &'static str,
        /// Who has it.
        #[source]
        source: LockError,
    },
    /// A directory cannot be locked.
    #[error("cannot lock {path} ({flag})", path = .path.display())]
    Lock {
        /// Which.
        path: PathBuf,
        /// The flag that chooses another.
        flag: &'static str,
        /// Why.
        #[source]
        source: LockError,
    },
    /// An address cannot be listened on.
    #[error("cannot listen on {address} ({flag})")]
    Listen {
        /// Which.
        address: SocketAddr,
        /// The flag that chooses another.
        flag: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The CNI socket.
    #[error("cannot serve the CNI socket")]
    CniSocket(#[source] BindError),
    /// The ZDS socket.
    #[error("cannot serve the ZDS socket")]
    ZdsSocket(#[source] BindError),
    /// The workload file.
    #[error("cannot use the workload file")]
    Workloads(#[source] discovery::Error),
    /// The development CA.
    #[error("cannot use the development CA")]
    DevCa(#[source] dev_ca::Error),
    /// The rules file.
    #[error("cannot use the rules file (--rules)")]
    Rules(#[source] rules::Error),
    /// The records of pods.
    #[error("cannot keep records of pods")]
    Records(#[source] records::Error),
    /// The backend.
    #[error("cannot redirect traffic")]
    Redirect(#[source] redirect::Error),
    /// Another agent is not taken over.
    #[error("cannot take over (--takeover)")]
    Takeover(#[from] takeover::Error),
    /// The socket of those who take over.
    #[error("cannot listen for who takes over")]
    TakeoverSocket(#[source] BindError),
    /// A part of the agent ended by itself.
    #[error("internal fault: a part of the agent ended")]
    Ended,
}

/// The one line that says why an agent does not run.
pub fn explain(error: &Error) -> String {
    let mut line = Chain(error).to_string();
    if let Error::Listen { source, .. } = error
        && source.kind() == io::ErrorKind::AddrInUse
    {
        line.push_str(": another process, perhaps another agent, listens there");
    }
    line
}
