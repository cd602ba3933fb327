//! The client of a running agent's admin endpoint: bounded, blocking, without tokio.

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use super::PodsView;

/// Time for one request.
const DEADLINE: Duration = Duration::from_secs(5);

/// Longest answer.
const MAX_ANSWER_BYTES: u64 = 16 * 1024 * 1024;

/// Why an agent could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It does not answer.
    #[error("no agent answers at {address}: is it running, and is this its --admin-addr?")]
    Unreachable {
        /// Where.
        address: SocketAddr,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It answers something else.
    #[error("{address}{path} answers {status}")]
    Status {
        /// Where.
        address: SocketAddr,
        /// What was asked.
        path: &'static str,
        /// The first line of the answer.
        status: String,
    },
    /// It answers something that cannot be read.
    #[error("{address} answers what is not an agent's status")]
    Unreadable {
        /// Where.
        address: SocketAddr,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
}

/// The state of the agent at `address`: its pods, and its metrics as text.
pub fn status(address: SocketAddr) -> Result<(PodsView, String), Error> {
    let pods = get(address, "/pods")?;
    let view = serde_json::from_str(&pods).map_err(|source| Error::Unreadable { address, source })?;
    Ok((view, get(address, "/metrics")?))
}

fn get(address: SocketAddr, path: &'static str) -> Result<String, Error> {
    let answer = exchange(address, path).map_err(|source| Error::Unreachable { address, source })?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let status = head.lines().next().unwrap_or_default();
    if status.split(' ').nth(1) != Some("200") {
        return Err(Error::Status {
            address,
            path,
            status: status.chars().take(100).collect(),
        });
    }
    Ok(body.to_owned())
}

/// HTTP/1.0, so that the answer ends with the connection.
fn exchange(address: SocketAddr, path: &str) -> io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, DEADLINE)?;
    stream.set_read_timeout(Some(DEADLINE))?;
    stream.set_write_timeout(Some(DEADLINE))?;
    write!(stream, "GET {path} HTTP/1.0\r\nhost: {address}\r\n\r\n")?;
    let mut answer = String::new();
    stream.take(MAX_ANSWER_BYTES).read_to_string(&mut answer)?;
    Ok(answer)
}
