//! Why the plugin fails, as the CNI specification wants it told (section 4, "Error": codes from 100 on are the plugin's own).

use std::{io, path::PathBuf};

use serde_json::json;

use crate::telemetry::Chain;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    /// The configuration cannot be read.
    #[error("cannot read the network configuration")]
    Config(#[source] serde_json::Error),
    /// The input cannot be read.
    #[error("cannot read standard input")]
    Input(#[source] io::Error),
    /// The configuration asks for another version.
    #[error("CNI version {0:?} is not supported: this plugin speaks {versions}", versions = super::network::VERSIONS.join(", "))]
    Version(String),
    /// A key of the configuration cannot be used.
    #[error("{key} in the network configuration {problem}")]
    Key { key: &'static str, problem: String },
    /// An environment variable is missing or cannot be used.
    #[error("{name} {problem}")]
    Environment { name: &'static str, problem: String },
    /// No plugin went before.
    #[error("prevResult is missing: this plugin is to be chained after the one that makes the pod's network")]
    NoPrevResult,
    /// The result of the plugins before cannot be read.
    #[error("{key} in prevResult is not {expected}")]
    PrevResult { key: String, expected: &'static str },
    /// The agent does not answer.
    #[error("the redirector's agent cannot be reached at {socket}", socket = .socket.display())]
    Unreachable {
        socket: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The agent refuses.
    #[error("the redirector's agent answers {status}: {text}")]
    Refused { status: u16, text: String },
    /// The agent has the pod and does not capture it.
    #[error("the redirector's agent has not captured the pod: {0}")]
    NotCaptured(String),
    /// A bug.
    #[error("internal fault of the plugin: {0}")]
    Panic(String),
}

impl Error {
    pub(super) fn code(&self) -> u32 {
        match self {
            Self::Version(_) => 1,
            Self::Environment { .. } => 4,
            Self::Input(_) => 5,
            Self::Config(_) => 6,
            Self::Key { .. } | Self::NoPrevResult | Self::PrevResult { .. } => 7,
            // "Try again later": the agent may be starting, and what it refuses now it may take when it knows more.
            Self::Unreachable { .. } | Self::Refused { .. } => 11,
            Self::NotCaptured(_) => 100,
            Self::Panic(_) => 101,
        }
    }

    /// The error as the runtime reads it.
    pub(super) fn to_json(&self, cni_version: &str) -> String {
        let details = std::error::Error::source(self)
            .map(|cause| Chain(cause).to_string())
            .unwrap_or_default();
        let (code, msg) = (self.code(), self.to_string());
        json!({ "cniVersion": cni_version, "code": code, "msg": msg, "details": details }).to_string()
    }
}
