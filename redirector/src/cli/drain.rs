//! `redirector drain`: asks the agent to stop, and waits until it is gone.
//!
//! The agent ends its pods' connections as when it gets SIGTERM: those that are open have its time to end, and new ones are refused. It is
//! gone when nobody holds its state directory any more; who held it before is told from an agent that comes after it.

use std::{
    io::{self, IsTerminal, Write as _},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use serde::Deserialize;

use super::{Asked, output::print, words};
use crate::{
    admin::client::{Client, Error},
    config::values::Span,
    sys::lock::{self, Holder},
};

/// What the agent's other parts get to end, beside the connections: its own limits are below.
const REST: Duration = Duration::from_secs(30);

/// Between looks.
const INTERVAL: Duration = Duration::from_millis(100);

/// Between lines on the way, where they are not written over each other.
const TELL: Duration = Duration::from_secs(5);

#[derive(Debug, clap::Args)]
pub(super) struct DrainArguments {
    #[command(flatten)]
    asked: Asked,
    /// Longest time until the agent is gone; by default the time that it gives connections to end, and 30s more
    #[arg(long, value_name = "SPAN")]
    deadline: Option<Span>,
}

/// What is read of the agent's settings.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Settings {
    state_dir: PathBuf,
    shutdown_grace: String,
    release_on_exit: bool,
}

#[derive(Debug, Deserialize)]
struct Pods {
    pods: Vec<serde::de::IgnoredAny>,
}

#[derive(Debug, Deserialize)]
struct Connections {
    total: usize,
}

/// Why the agent is not known to be gone.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(
        "the agent at {address} has been asked to stop and is not gone after {after}: {open}; it goes on stopping, and --deadline waits \
         longer"
    )]
    Deadline {
        address: std::net::SocketAddr,
        after: String,
        open: String,
    },
    #[error("cannot look whether an agent holds {path}", path = .path.display())]
    Look {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

pub(super) fn drain(arguments: &DrainArguments) -> anyhow::Result<()> {
    let client = arguments.asked.client();
    let config: Settings = client.json("/config")?;
    let Pods { pods } = client.json("/pods")?;
    let grace = config.shutdown_grace.parse().unwrap_or(Span::default());
    let deadline = arguments.deadline.map_or(grace.0 + REST, |deadline| deadline.0);
    let gone = Gone::of(client, &config.state_dir)?;
    let start = Instant::now();
    client.post("/quitquitquit")?;
    let mut progress = Progress::new(start);
    progress.say(&format!(
        "asked the agent at {} to stop; its {} pods {}",
        client.address,
        pods.len(),
        match config.release_on_exit {
            true => "are released (--release-on-exit)",
            false => "stay captured, and their connections are refused until an agent is back",
        }
    ));
    while !gone.look()? {
        if start.elapsed() > deadline {
            let open = open(client).unwrap_or_else(|| "it no longer answers".to_owned());
            progress.end();
            return Err(Failure::Deadline {
                address: client.address,
                after: words::span(deadline),
                open,
            }
            .into());
        }
        progress.on_the_way(client);
        thread::sleep(INTERVAL);
    }
    progress.end();
    print(format!(
        "the agent at {} has stopped, after {}\n",
        client.address,
        words::span(start.elapsed())
    ))?;
    Ok(())
}

fn open(client: Client) -> Option<String> {
    let Connections { total } = client.json("/connections?limit=0").ok()?;
    Some(match total {
        1 => "1 connection is open".to_owned(),
        total => format!("{total} connections are open"),
    })
}

/// How it is found out that the agent is gone.
enum Gone {
    /// By whoever holds its state directory.
    Directory { path: PathBuf, before: Holder },
    /// By its admin address: its directory is not seen from here.
    Address(Client),
}

impl Gone {
    fn of(client: Client, state_dir: &Path) -> Result<Self, Failure> {
        let path = state_dir.to_owned();
        match lock::holder(&path) {
            Ok(Holder::Nobody) => Ok(Self::Address(client)),
            Ok(before) => Ok(Self::Directory { path, before }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::Address(client)),
            Err(source) => Err(Failure::Look { path, source }),
        }
    }

    fn look(&self) -> Result<bool, Failure> {
        match self {
            Self::Directory { path, before } => match lock::holder(path) {
                Ok(now) => Ok(now != *before),
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
                Err(source) => Err(Failure::Look {
                    path: path.clone(),
                    source,
                }),
            },
            Self::Address(client) => Ok(matches!(
                client.get("/healthz/live"),
                Err(Error::Unreachable { .. })
            )),
        }
    }
}

/// Tells on standard error how far it is: on a terminal in one line, which is written over.
struct Progress {
    start: Instant,
    is_terminal: bool,
    told: Instant,
    is_in_line: bool,
}

impl Progress {
    fn new(start: Instant) -> Self {
        Self {
            start,
            is_terminal: io::stderr().is_terminal(),
            told: start,
            is_in_line: false,
        }
    }

    fn say(&mut self, text: &str) {
        let _ = writeln!(io::stderr(), "redirector: {text}");
    }

    fn on_the_way(&mut self, client: Client) {
        let interval = if self.is_terminal {
            Duration::from_secs(1)
        } else {
            TELL
        };
        if self.told.elapsed() < interval {
            return;
        }
        self.told = Instant::now();
        let Some(open) = open(client) else { return };
        let text = format!("{}: {open}", words::span(self.start.elapsed()));
        if self.is_terminal {
            let _ = write!(io::stderr(), "\r\x1b[Kredirector: {text}");
            self.is_in_line = true;
        } else {
            self.say(&text);
        }
    }

    fn end(&mut self) {
        if self.is_in_line {
            let _ = writeln!(io::stderr());
        }
    }
}
