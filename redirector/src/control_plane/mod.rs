//! How a control plane is reached: the gRPC connection that certificate authority, discovery and Workload API share, and the
//! client of Kubernetes' API ([`kubernetes`]).
//!
//! [`Channel`] connects when it is first used and again when the connection is lost or the roots have changed; who is asked,
//! for what, is the caller's matter. Values of time-outs and names of headers are Istio's (ztunnel `tls/control_plane.rs` and
//! `identity/auth.rs`).

mod address;
mod auth;
mod channel;
pub mod kubernetes;
mod tls;

pub use address::{Address, InvalidAddress};
pub use auth::{Auth, InvalidHeader, Token};
pub use channel::Channel;
pub use tls::Roots;

use std::{error, io, path::PathBuf};

/// Where a control plane is and how it is asked.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where.
    pub address: Address,
    /// Whom the server's certificate must lead to.
    pub roots: Roots,
    /// A name that the server may have beside the one in its address.
    pub alt_hostname: Option<String>,
    /// What each request shows.
    pub auth: Auth,
}

/// Why a control plane cannot be asked; [`explain`] tells why it did not answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file cannot be read.
    #[error("reading {what} {}", path.display())]
    Read {
        /// What the file is.
        what: &'static str,
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The roots hold no certificate.
    #[error("there is no usable root certificate in {0}: it must hold certificates in PEM")]
    NoRoots(String),
    /// The token is not one.
    #[error("the token in {0} {1}: it is sent as a bearer token")]
    Token(String, &'static str),
    /// The server's name cannot be one of a certificate.
    #[error("{0:?} is no name that a certificate could have")]
    Name(String),
    /// A kubeconfig that cannot be used.
    #[error("kubeconfig {}: {problem}", path.display())]
    Kubeconfig {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// No connection can be made.
    #[error("no connection")]
    Connect(#[source] io::Error),
    /// TLS refuses its configuration.
    #[error("TLS to the control plane cannot be set up")]
    Tls(#[source] rustls::Error),
}

/// An answer that is a failure, with all that is known of why: `Unavailable: tcp connect error: connection refused`.
pub fn explain(status: &tonic::Status) -> String {
    let mut text = format!("{:?}", status.code());
    let mut add = |part: String| {
        // Errors repeat the text of their sources more often than not.
        if !part.is_empty() && !text.contains(&part) {
            text.push_str(": ");
            text.push_str(&part);
        }
    };
    add(status.message().to_owned());
    let mut cause = error::Error::source(status);
    while let Some(error) = cause {
        add(error.to_string());
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests;
