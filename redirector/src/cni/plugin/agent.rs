//! The plugin's side of the agent's socket: one HTTP request per connection, each bounded in time.

use std::{
    io::{self, Read, Write},
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::Path,
    time::{Duration, Instant},
};

use socket2::{Domain, SockAddr, Socket, Type};

use super::error::Error;

/// Longest answer of the agent.
const MAX_ANSWER_BYTES: usize = 64 * 1024;

/// Posts to the agent and waits for its 200.
pub(super) fn post(socket: &Path, path: &str, body: &str, deadline: Duration) -> Result<(), Error> {
    let unreachable = |source| Error::Unreachable {
        socket: socket.to_owned(),
        source,
    };
    let answer = exchange(socket, path, body, Instant::now() + deadline).map_err(unreachable)?;
    let (head, text) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let status = head
        .strip_prefix("HTTP/1.")
        .and_then(|rest| rest.get(2..5))
        .and_then(|status| status.parse().ok());
    match status {
        Some(200) => Ok(()),
        Some(status) => Err(Error::Refused {
            status,
            text: text.trim().to_owned(),
        }),
        None => Err(unreachable(invalid("the answer is not HTTP"))),
    }
}

/// Posts to the agent what it need not answer, without waiting for anything.
pub(super) fn tell(socket: &Path, path: &str, body: &str) -> io::Result<()> {
    let connection = Socket::new(Domain::UNIX, Type::STREAM.nonblocking(), None)?;
    connection.connect(&SockAddr::unix(socket)?)?;
    UnixStream::from(OwnedFd::from(connection)).write_all(request(path, body).as_bytes())
}

fn exchange(socket: &Path, path: &str, body: &str, deadline: Instant) -> io::Result<String> {
    let late = || io::Error::new(io::ErrorKind::TimedOut, "it does not answer in time");
    // What the kernel says when the time of a socket is over.
    let in_time = |error: io::Error| match error.kind() {
        io::ErrorKind::WouldBlock => late(),
        _ => error,
    };
    let left = || {
        deadline
            .checked_duration_since(Instant::now())
            .filter(|left| !left.is_zero())
            .ok_or_else(late)
    };
    let connection = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    // It bounds connect(2) as well, which waits when the agent's queue is full.
    connection.set_write_timeout(Some(left()?))?;
    connection.connect(&SockAddr::unix(socket)?).map_err(in_time)?;
    let mut stream = UnixStream::from(OwnedFd::from(connection));
    stream
        .write_all(request(path, body).as_bytes())
        .map_err(in_time)?;
    let (mut answer, mut buffer) = (Vec::new(), [0; 4096]);
    loop {
        stream.set_read_timeout(Some(left()?))?;
        match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => answer.extend_from_slice(&buffer[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(in_time(error)),
        }
        if answer.len() > MAX_ANSWER_BYTES {
            return Err(invalid("the answer is too long"));
        }
    }
    String::from_utf8(answer).map_err(|_| invalid("the answer is not text"))
}

/// HTTP/1.0: the answer ends with the connection, and is never chunked.
fn request(path: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "POST {path} HTTP/1.0\r\nhost: unix\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )
}

fn invalid(problem: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem)
}
