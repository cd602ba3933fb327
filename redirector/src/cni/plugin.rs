//! The CNI plugin, chained after the one that makes the pod's network: ADD tells the agent of the pod and waits until it is
//! captured; DEL tells it that the pod goes. The result of the plugins before is passed on unchanged.
//!
//! `bin/redirector-cni` runs it. No tokio and no threads: one bounded exchange over the agent's socket. When the agent cannot
//! be reached ADD fails, so that no pod runs outside the mesh unnoticed.

use std::{
    io::{self, Read, Write},
    net::IpAddr,
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use serde::Deserialize;
use serde_json::{Map, Value, json};
use socket2::{Domain, SockAddr, Socket, Type};

use super::entry::Entry;
use crate::{
    pods::wire::{Address, Event},
    telemetry::Chain,
};

/// CNI versions that the plugin speaks; the result is another plugin's, so there is little to differ in.
const VERSIONS: [&str; 6] = ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0", "1.2.0"];

/// Time for an ADD: longer than the agent's own (30 s), shorter than kubelet's (4 min).
const ADD_DEADLINE: Duration = Duration::from_secs(40);

/// Time for a DEL, which is never worth waiting for.
const DEL_DEADLINE: Duration = Duration::from_secs(5);

/// Longest configuration, and longest answer of the agent.
const MAX_BYTES: u64 = 1024 * 1024;

/// What the runtime passes: environment, by name.
pub type Environment<'a> = &'a dyn Fn(&str) -> Option<String>;

/// What the plugin does of its configuration's keys. Others are the runtime's and are left alone.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Config {
    #[serde(default)]
    cni_version: String,
    #[serde(flatten)]
    entry: Entry,
    #[serde(default)]
    prev_result: Option<Value>,
}

/// An error as the CNI specification wants it (section 5: error codes; 100 and above are the plugin's own).
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration cannot be read.
    #[error("cannot read the network configuration")]
    Config(#[source] serde_json::Error),
    /// The input cannot be read.
    #[error("cannot read standard input")]
    Input(#[source] io::Error),
    /// The configuration asks for another version.
    #[error("CNI version {0:?} is not supported")]
    Version(String),
    /// An environment variable is missing or cannot be used.
    #[error("{name} {problem}")]
    Environment {
        /// Which.
        name: &'static str,
        /// What is wrong.
        problem: String,
    },
    /// No plugin went before.
    #[error("prevResult is missing: this plugin is to be chained after the one that makes the pod's network")]
    NoPrevResult,
    /// The result of the plugins before cannot be read.
    #[error("{key} in prevResult is not {expected}")]
    PrevResult {
        /// Which part.
        key: String,
        /// What it should be.
        expected: &'static str,
    },
    /// The agent does not answer.
    #[error("the redirector's agent cannot be reached at {socket}", socket = .socket.display())]
    Unreachable {
        /// Where.
        socket: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The agent refuses.
    #[error("the redirector's agent answers {status}: {text}")]
    Refused {
        /// HTTP status.
        status: u16,
        /// Its reason.
        text: String,
    },
}

impl Error {
    fn code(&self) -> u32 {
        match self {
            Self::Version(_) => 1,
            Self::Environment { .. } => 4,
            Self::Input(_) => 5,
            Self::Config(_) => 6,
            Self::NoPrevResult | Self::PrevResult { .. } => 7,
            // "Try again later": the agent may be starting.
            Self::Unreachable { .. } => 11,
            Self::Refused { .. } => 100,
        }
    }

    /// The error as the runtime reads it.
    pub fn to_json(&self, cni_version: &str) -> String {
        let details = std::error::Error::source(self)
            .map(|cause| Chain(cause).to_string())
            .unwrap_or_default();
        let (code, msg) = (self.code(), self.to_string());
        json!({ "cniVersion": cni_version, "code": code, "msg": msg, "details": details }).to_string()
    }
}

/// Runs one command. What is returned, success or failure, belongs on standard output.
pub fn run(environment: Environment<'_>, input: &mut dyn Read) -> Result<String, String> {
    let mut version = VERSIONS[3].to_owned();
    command(environment, input, &mut version).map_err(|error| error.to_json(&version))
}

fn command(
    environment: Environment<'_>,
    input: &mut dyn Read,
    version: &mut String,
) -> Result<String, Error> {
    let command = required(environment, "CNI_COMMAND")?;
    if command == "VERSION" {
        return Ok(
            json!({ "cniVersion": VERSIONS[VERSIONS.len() - 1], "supportedVersions": VERSIONS }).to_string(),
        );
    }
    let mut text = Vec::new();
    input
        .take(MAX_BYTES)
        .read_to_end(&mut text)
        .map_err(Error::Input)?;
    let parsed = serde_json::from_slice::<Config>(&text).map_err(Error::Config);
    match command.as_str() {
        // Whatever is wrong, a pod must be able to go.
        "DEL" => {
            if let Ok(config) = parsed {
                delete(environment, &config);
            }
            Ok(String::new())
        }
        "ADD" => {
            let config = parsed?;
            config.check_version(version)?;
            add(environment, &config)
        }
        "CHECK" => {
            let config = parsed?;
            config.check_version(version)?;
            config
                .prev_result
                .ok_or(Error::NoPrevResult)
                .map(|_| String::new())
        }
        // Nothing to collect: the agent lets go of namespaces that are gone when it starts.
        "GC" | "STATUS" => Ok(String::new()),
        other => Err(Error::Environment {
            name: "CNI_COMMAND",
            problem: format!("has the unknown value {other:?}"),
        }),
    }
}

impl Config {
    fn check_version(&self, version: &mut String) -> Result<(), Error> {
        if !VERSIONS.contains(&self.cni_version.as_str()) {
            return Err(Error::Version(self.cni_version.clone()));
        }
        version.clone_from(&self.cni_version);
        Ok(())
    }
}

fn add(environment: Environment<'_>, config: &Config) -> Result<String, Error> {
    let result = config.prev_result.as_ref().ok_or(Error::NoPrevResult)?;
    let mut event = event(environment)?;
    event.netns = Some(required(environment, "CNI_NETNS")?.into());
    event.addresses = addresses(result)?;
    post(config.entry.socket(), "/cmdadd", &event, ADD_DEADLINE)?;
    Ok(result.to_string())
}

/// Best effort: an agent that is away releases the pod when it is back, since its namespace is gone.
fn delete(environment: Environment<'_>, config: &Config) {
    if let Ok(mut event) = event(environment) {
        event.netns = environment("CNI_NETNS")
            .filter(|path| !path.is_empty())
            .map(PathBuf::from);
        let _ = post(config.entry.socket(), "/cmddel", &event, DEL_DEADLINE);
    }
}

/// The pod, by what kubelet puts into CNI_ARGS.
fn event(environment: Environment<'_>) -> Result<Event, Error> {
    let args = required(environment, "CNI_ARGS")?;
    let arg = |name: &str| {
        let found = args
            .split(';')
            .filter_map(|pair| pair.split_once('='))
            .find(|(key, _)| *key == name);
        found
            .map(|(_, value)| value.to_owned())
            .filter(|value| !value.is_empty())
    };
    let invalid = |problem: String| Error::Environment {
        name: "CNI_ARGS",
        problem,
    };
    let named = |name: &str| arg(name).ok_or_else(|| invalid(format!("has no {name}")));
    Ok(Event {
        netns: None,
        name: named("K8S_POD_NAME")?,
        namespace: named("K8S_POD_NAMESPACE")?,
        addresses: Vec::new(),
        uid: arg("K8S_POD_UID")
            .map(|uid| uid.parse())
            .transpose()
            .map_err(|error| invalid(format!("has an unusable K8S_POD_UID: {error}")))?,
        service_account: None,
        annotations: None,
    })
}

/// The pod's addresses in the result of the plugins before.
fn addresses(result: &Value) -> Result<Vec<Address>, Error> {
    let invalid = |key: String, expected| Error::PrevResult { key, expected };
    let Some(ips) = result
        .as_object()
        .and_then(|result: &Map<_, _>| result.get("ips"))
        .filter(|ips| !ips.is_null())
    else {
        return Ok(Vec::new());
    };
    let ips = ips.as_array().ok_or_else(|| invalid("ips".into(), "a list"))?;
    let parse = |text: &str| {
        let (ip, prefix) = text.split_once('/')?;
        Some(Address {
            ip: ip.parse::<IpAddr>().ok()?.to_canonical(),
            prefix: Some(prefix.parse().ok()?),
        })
    };
    ips.iter()
        .enumerate()
        .map(|(position, ip)| {
            let address = ip.get("address").and_then(Value::as_str).and_then(parse);
            address.ok_or_else(|| invalid(format!("ips[{position}].address"), "an address with a prefix"))
        })
        .collect()
}

fn required(environment: Environment<'_>, name: &'static str) -> Result<String, Error> {
    environment(name)
        .filter(|value| !value.is_empty())
        .ok_or_else(|| Error::Environment {
            name,
            problem: "is not set".to_owned(),
        })
}

/// Posts an event and waits for its 200.
fn post(socket: &Path, path: &str, event: &Event, deadline: Duration) -> Result<(), Error> {
    let unreachable = |source| Error::Unreachable {
        socket: socket.to_owned(),
        source,
    };
    let answer = exchange(socket, path, &event.to_json(), Instant::now() + deadline).map_err(unreachable)?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let status = head
        .strip_prefix("HTTP/1.")
        .and_then(|rest| rest.get(2..5))
        .and_then(|status| status.parse().ok());
    match status {
        Some(200) => Ok(()),
        Some(status) => Err(Error::Refused {
            status,
            text: body.trim().to_owned(),
        }),
        None => Err(unreachable(io::Error::new(
            io::ErrorKind::InvalidData,
            "the answer is not HTTP",
        ))),
    }
}

/// HTTP/1.0: the answer ends with the connection, and is never chunked.
fn exchange(socket: &Path, path: &str, body: &str, deadline: Instant) -> io::Result<String> {
    let late = || io::Error::new(io::ErrorKind::TimedOut, "it does not answer in time");
    let left = || {
        deadline
            .checked_duration_since(Instant::now())
            .filter(|left| !left.is_zero())
            .ok_or_else(late)
    };
    let connection = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    // It bounds connect(2) as well, which waits when the agent's queue is full.
    connection.set_write_timeout(Some(left()?))?;
    connection.connect(&SockAddr::unix(socket)?)?;
    let mut stream = UnixStream::from(OwnedFd::from(connection));
    let length = body.len();
    let head = format!(
        "POST {path} HTTP/1.0\r\nhost: unix\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())?;
    let (mut answer, mut buffer) = (Vec::new(), [0; 4096]);
    loop {
        stream.set_read_timeout(Some(left()?))?;
        match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => answer.extend_from_slice(&buffer[..count]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(late()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        if answer.len() as u64 > MAX_BYTES {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the answer is too long",
            ));
        }
    }
    String::from_utf8(answer)
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "the answer is not text"))
}

#[cfg(test)]
mod tests;
