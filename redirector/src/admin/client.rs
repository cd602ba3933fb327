//! The client of a running agent's admin endpoint: bounded, blocking, without tokio.

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use serde::de::DeserializeOwned;

use crate::telemetry::Chain;

/// Time for one request, where nothing else is asked for.
pub const TIMEOUT: Duration = Duration::from_secs(5);

/// Longest answer: several times what a dump of the largest mesh takes. Tests have less.
const MAX_ANSWER_BYTES: usize = if cfg!(test) { 4 << 20 } else { 512 << 20 };

/// Why an agent could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nobody listens there.
    #[error("no agent answers at {address}: is it running, and is this its --admin-addr?")]
    Unreachable {
        /// Where.
        address: SocketAddr,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Somebody does, and says nothing, or not all of it.
    #[error(
        "the agent at {address} has not answered {path} within {timeout:?}: it stands still or has too much to do; --timeout gives it \
         more time"
    )]
    Silent {
        /// Where.
        address: SocketAddr,
        /// What was asked.
        path: String,
        /// For how long it was waited.
        timeout: Duration,
    },
    /// The connection ended in the midst of the answer.
    #[error("the connection to the agent at {address} broke before {path} was answered: did it stop?")]
    Broken {
        /// Where.
        address: SocketAddr,
        /// What was asked.
        path: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// More than is read.
    #[error("{address} answers {path} with more than {MAX_ANSWER_BYTES} bytes: ask for less")]
    TooLong {
        /// Where.
        address: SocketAddr,
        /// What was asked.
        path: String,
    },
    /// It does not know what it is asked for.
    #[error("the agent at {address} has no {path}: it is of another version than this program")]
    Missing {
        /// Where.
        address: SocketAddr,
        /// What was asked.
        path: String,
    },
    /// It answers something else.
    #[error("{address} answers {path} with {status}{}{said}", if .said.is_empty() { "" } else { ": " })]
    Status {
        /// Where.
        address: SocketAddr,
        /// What was asked.
        path: String,
        /// The code.
        status: u16,
        /// The first line of what it says.
        said: String,
    },
    /// It answers something that cannot be read.
    #[error("{address} answers {path} with what is not an agent's: {why}")]
    Unreadable {
        /// Where.
        address: SocketAddr,
        /// What was asked.
        path: String,
        /// Why.
        why: String,
    },
}

/// Asks the agent at an address.
#[derive(Debug, Clone, Copy)]
pub struct Client {
    /// Where its admin endpoint is.
    pub address: SocketAddr,
    /// Time for one request, from connecting to the last byte.
    pub timeout: Duration,
}

impl Client {
    /// What is at `path`, query included.
    pub fn get(&self, path: &str) -> Result<String, Error> {
        self.ask("GET", path)
    }

    /// The same, out of JSON.
    pub fn json<T: DeserializeOwned>(&self, path: &str) -> Result<T, Error> {
        let body = self.get(path)?;
        serde_json::from_str(&body).map_err(|error| self.unreadable(path, Chain(&error).to_string()))
    }

    /// Whether an answer is JSON, and whole.
    pub fn check_json(&self, path: &str, body: &str) -> Result<(), Error> {
        serde_json::from_str::<serde::de::IgnoredAny>(body)
            .map(drop)
            .map_err(|error| self.unreadable(path, Chain(&error).to_string()))
    }

    /// Asks for something to be done.
    pub fn post(&self, path: &str) -> Result<String, Error> {
        self.ask("POST", path)
    }

    fn ask(&self, method: &str, path: &str) -> Result<String, Error> {
        let answer = self.exchange(method, path)?;
        let end = answer.windows(4).position(|window| window == b"\r\n\r\n");
        let (head, body) = match end {
            Some(end) => (&answer[..end], &answer[end + 4..]),
            None => return Err(self.unreadable(path, "it does not speak HTTP".to_owned())),
        };
        let head = String::from_utf8_lossy(head);
        let mut lines = head.lines();
        let status = lines.next().and_then(|line| line.split(' ').nth(1)?.parse().ok());
        let Some(status) = status else {
            return Err(self.unreadable(path, "it does not speak HTTP".to_owned()));
        };
        let length = lines.find_map(|line| {
            let (name, value) = line.split_once(':')?;
            let is_length = name.eq_ignore_ascii_case("content-length");
            is_length.then(|| value.trim().parse::<usize>().ok())?
        });
        if length.is_some_and(|length| body.len() < length) {
            return Err(self.broken(path, io::ErrorKind::UnexpectedEof.into()));
        }
        let body = String::from_utf8(body.to_vec())
            .map_err(|error| self.unreadable(path, Chain(&error).to_string()))?;
        let (address, path) = (self.address, path.to_owned());
        match status {
            200 => Ok(body),
            404 => Err(Error::Missing {
                address,
                path: path.split('?').next().unwrap_or_default().to_owned(),
            }),
            status => Err(Error::Status {
                address,
                path,
                status,
                said: body
                    .lines()
                    .next()
                    .unwrap_or_default()
                    .chars()
                    .take(200)
                    .collect(),
            }),
        }
    }

    /// HTTP/1.0, so that the answer ends with the connection.
    fn exchange(&self, method: &str, path: &str) -> Result<Vec<u8>, Error> {
        let Self { address, timeout } = *self;
        let end = Instant::now() + timeout;
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => Error::Silent {
                address,
                path: path.to_owned(),
                timeout,
            },
            _ => self.broken(path, source),
        };
        let remaining = || match end.saturating_duration_since(Instant::now()) {
            Duration::ZERO => Err(failed(io::ErrorKind::TimedOut.into())),
            remaining => Ok(remaining),
        };
        let mut stream =
            TcpStream::connect_timeout(&address, timeout).map_err(|source| match source.kind() {
                io::ErrorKind::TimedOut => failed(source),
                _ => Error::Unreachable { address, source },
            })?;
        stream.set_write_timeout(Some(remaining()?)).map_err(failed)?;
        // In one piece: a server that has read enough to answer may close.
        let request = format!("{method} {path} HTTP/1.0\r\nhost: {address}\r\ncontent-length: 0\r\n\r\n");
        stream.write_all(request.as_bytes()).map_err(failed)?;
        let mut answer = Vec::new();
        let mut piece = vec![0; 64 * 1024];
        loop {
            stream.set_read_timeout(Some(remaining()?)).map_err(failed)?;
            match stream.read(&mut piece) {
                Ok(0) => return Ok(answer),
                Ok(read) => answer.extend_from_slice(&piece[..read]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(failed(error)),
            }
            if answer.len() > MAX_ANSWER_BYTES {
                return Err(Error::TooLong {
                    address,
                    path: path.to_owned(),
                });
            }
        }
    }

    fn broken(&self, path: &str, source: io::Error) -> Error {
        Error::Broken {
            address: self.address,
            path: path.to_owned(),
            source,
        }
    }

    fn unreadable(&self, path: &str, why: String) -> Error {
        Error::Unreadable {
            address: self.address,
            path: path.to_owned(),
            why,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{net::TcpListener, thread};

    use super::*;

    /// What a client makes of a server that says this, in pieces, and then closes the connection; or holds it, as long as it is asked.
    fn told(pieces: &'static [&'static [u8]], holds: bool) -> Result<String, Error> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = Client {
            address: listener.local_addr().unwrap(),
            timeout: if holds { Duration::from_millis(50) } else { TIMEOUT },
        };
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 512];
            let read = stream.read(&mut request).unwrap();
            for piece in pieces {
                // Whoever has had enough closes.
                let _ = stream.write_all(piece);
            }
            if holds {
                let _ = stream.read(&mut request);
            }
            String::from_utf8_lossy(&request[..read]).into_owned()
        });
        let answer = client.get("/x?a=1");
        let request = server.join().unwrap();
        assert!(
            request.starts_with("GET /x?a=1 HTTP/1.0\r\nhost: 127.0.0.1:"),
            "{request}"
        );
        answer
    }

    #[test]
    fn an_answer_is_whole_or_refused_with_the_reason() {
        let whole = told(
            &[b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n", b"\r\nh", b"i"],
            false,
        );
        assert_eq!(whole.unwrap(), "hi");
        let error = |pieces, holds| told(pieces, holds).unwrap_err();
        assert!(matches!(
            error(&[b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nhi"], false),
            Error::Broken { .. }
        ));
        assert!(matches!(
            error(&[b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nhi"], true),
            Error::Silent { .. }
        ));
        assert!(matches!(
            error(&[b"SSH-2.0-x\r\n"], false),
            Error::Unreadable { .. }
        ));
        assert!(matches!(
            error(&[b"SSH-2.0-x\r\n\r\n"], false),
            Error::Unreadable { .. }
        ));
        assert!(matches!(
            error(&[b"HTTP/1.1 200 OK\r\n\r\n\xff"], false),
            Error::Unreadable { .. }
        ));
        let missing = error(&[b"HTTP/1.1 404 Not Found\r\n\r\nno such path\n"], false).to_string();
        assert!(
            missing.contains("has no /x: it is of another version"),
            "{missing}"
        );
        let refused = error(&[b"HTTP/1.1 400 Bad Request\r\n\r\nwait is wrong\nx"], false).to_string();
        assert!(
            refused.ends_with("answers /x?a=1 with 400: wait is wrong"),
            "{refused}"
        );
    }

    #[test]
    fn an_answer_without_end_is_cut_with_a_word() {
        const PIECE: &[u8] = &[b'x'; 1024 * 1024];
        static ENDLESS: [&[u8]; MAX_ANSWER_BYTES / PIECE.len() + 1] =
            [PIECE; MAX_ANSWER_BYTES / PIECE.len() + 1];
        assert!(matches!(told(&ENDLESS, false), Err(Error::TooLong { .. })));
    }

    #[test]
    fn nobody_is_told_from_one_who_says_nothing() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let client = Client {
            address,
            timeout: Duration::from_millis(50),
        };
        let error = client.get("/").unwrap_err();
        assert!(matches!(error, Error::Silent { .. }), "{error}");
        drop(listener);
        let error = client.get("/").unwrap_err();
        assert!(error.to_string().contains("no agent answers"), "{error}");
    }
}
