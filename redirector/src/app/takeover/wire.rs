//! What two agents say to each other: messages of JSON over a Unix socket, with descriptors alongside.
//!
//! Messages are extended, never changed: each version leaves out what it does not know. What cannot be said so has another
//! [`PROTOCOL`].

use std::{
    collections::{BTreeMap, HashMap},
    io,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use tokio::time::timeout;

use crate::sys::seqpacket::Seqpacket;

/// The version of all this.
pub(super) const PROTOCOL: u32 = 1;

/// Longest message. The settings are the longest: paths, of which none is longer than 4 KiB.
const MAX_BYTES: usize = 64 * 1024;

/// Time to send a message, which the other end has room for unless it hangs.
const SEND_DEADLINE: Duration = Duration::from_secs(10);

/// A message. One that takes over says `Hello`, `Pause` and `Commit`, the other one the rest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "camelCase")]
pub(super) enum Message {
    /// Who asks.
    Hello(Terms),
    /// It may: the descriptors that are the node's.
    Welcome {
        /// Version of the agent that runs.
        version: String,
        /// What the descriptors are, in their order.
        holdings: Vec<Holding>,
    },
    /// It may not.
    Refused {
        /// Why, all of it.
        reasons: Vec<String>,
    },
    /// Change nothing from now on, and hand over the pods.
    Pause,
    /// The listeners of a pod: three descriptors.
    #[serde(rename_all = "camelCase")]
    Pod {
        /// Which.
        uid: String,
        /// Device of its namespace.
        netns_dev: u64,
        /// Inode of its namespace.
        netns_ino: u64,
    },
    /// Those were all pods, and nothing changes them.
    Pods {
        /// How many.
        count: usize,
    },
    /// All of them can be served.
    Commit,
    /// They are served by who has asked from now on, and nothing of the node is the other one's any more.
    Yours,
    /// All goes on as before; whoever asked has nothing.
    Withdrawn {
        /// Why.
        reason: String,
    },
}

/// What must be so for one agent to go on where another was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Terms {
    /// [`PROTOCOL`].
    pub(super) protocol: u32,
    /// Version of the agent.
    pub(super) version: String,
    /// Settings that must be equal, by their flags. One that the other side does not know is no difference.
    pub(super) settings: BTreeMap<String, String>,
}

impl Terms {
    /// Why the agent with `other` cannot take over from this one.
    pub(super) fn differences(&self, other: &Self) -> Vec<String> {
        if self.protocol != other.protocol {
            return vec![format!(
                "it (version {}) hands over by protocol {}, and this one (version {}) takes over by protocol {}: stop it first",
                self.version, self.protocol, other.version, other.protocol
            )];
        }
        let both = self.settings.iter().filter_map(|(flag, here)| {
            let there = other.settings.get(flag)?;
            (here != there).then(|| format!("{flag} is {here} there, and {there} here"))
        });
        both.collect()
    }
}

/// What an agent holds for the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(in crate::app) enum Holding {
    /// The locked directory of state.
    StateDir,
    /// The locked directory of pins.
    BpffsDir,
    /// The listener for plugins.
    CniSocket,
    /// The listener for who takes over.
    TakeoverSocket,
    /// The admin listener.
    Admin,
    /// The listener of `/metrics`.
    Metrics,
    /// The listener of `/healthz/ready`.
    Readiness,
}

/// Descriptors of what an agent holds.
#[derive(Debug, Default)]
pub(in crate::app) struct Holdings(HashMap<Holding, OwnedFd>);

impl Holdings {
    /// Keeps a duplicate.
    pub(in crate::app) fn add(&mut self, holding: Holding, of: BorrowedFd<'_>) -> io::Result<()> {
        self.0.insert(holding, of.try_clone_to_owned()?);
        Ok(())
    }

    /// Gives one out, if it is here.
    pub(in crate::app) fn take(&mut self, holding: Holding) -> Option<OwnedFd> {
        self.0.remove(&holding)
    }

    /// The message that hands over duplicates of all.
    pub(super) fn welcome(&self, version: &str) -> (Message, Vec<BorrowedFd<'_>>) {
        let (holdings, fds) = self.0.iter().map(|(holding, fd)| (*holding, fd.as_fd())).unzip();
        let version = version.to_owned();
        (Message::Welcome { version, holdings }, fds)
    }

    /// What a [`Message::Welcome`] has brought, with as many descriptors as it names.
    pub(super) fn of(holdings: Vec<Holding>, fds: Vec<OwnedFd>) -> Self {
        Self(holdings.into_iter().zip(fds).collect())
    }
}

/// Why a talk cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket.
    #[error("cannot {operation}")]
    Socket {
        /// What was tried.
        operation: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Nothing comes.
    #[error("no answer within {0:?}")]
    Late(Duration),
    /// It is no message.
    #[error("what came is no message that this version knows: {0}")]
    Malformed(String),
    /// A message has not the descriptors that it should.
    #[error("a message came with {found} descriptors, and not with {wanted}")]
    Descriptors {
        /// How many there are.
        found: usize,
        /// How many there should be.
        wanted: usize,
    },
    /// It is not what should come now.
    #[error("a message came out of turn: {0}")]
    Unexpected(String),
}

impl Error {
    /// That `message` is not what should come.
    pub(super) fn unexpected(message: &Message) -> Self {
        Self::Unexpected(format!("{message:?}"))
    }
}

/// A connection between two agents.
#[derive(Debug)]
pub(in crate::app) struct Talk(Seqpacket);

impl Talk {
    pub(super) fn over(socket: Seqpacket) -> Self {
        Self(socket)
    }

    /// The user as whom the process at the other end runs.
    pub(super) fn peer_uid(&self) -> Result<u32, Error> {
        self.0.peer_uid().map_err(|source| Error::Socket {
            operation: "find out who is at the other end",
            source,
        })
    }

    /// Sends a message; `false` when nobody is there any more. It is sent whole or not at all.
    pub(super) async fn send(&self, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<bool, Error> {
        let failed = |source| Error::Socket {
            operation: "send a message",
            source,
        };
        let bytes = serde_json::to_vec(message).map_err(|error| failed(error.into()))?;
        match timeout(SEND_DEADLINE, self.0.send(&bytes, fds)).await {
            Ok(Ok(())) => Ok(true),
            Ok(Err(error)) if is_end(&error) => Ok(false),
            Ok(Err(error)) => Err(failed(error)),
            Err(_) => Err(Error::Late(SEND_DEADLINE)),
        }
    }

    /// The next message within `deadline`.
    pub(super) async fn recv(&self, deadline: Duration) -> Result<Option<(Message, Vec<OwnedFd>)>, Error> {
        timeout(deadline, self.next())
            .await
            .map_err(|_| Error::Late(deadline))?
    }

    /// The next message; `None` when nobody is there any more. One that is there is found at once. Cancel-safe.
    pub(super) async fn next(&self) -> Result<Option<(Message, Vec<OwnedFd>)>, Error> {
        let packet = loop {
            match self.0.recv(MAX_BYTES).await {
                // The other end has closed with something of ours unread. What it has said before comes after this.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {}
                received => break received,
            }
        };
        let packet = packet.map_err(|source| Error::Socket {
            operation: "receive a message",
            source,
        })?;
        if packet.bytes.is_empty() {
            return Ok(None);
        }
        let message: Message = serde_json::from_slice(&packet.bytes).map_err(|error| {
            let start: String = String::from_utf8_lossy(&packet.bytes).chars().take(80).collect();
            Error::Malformed(format!("{start:?}: {error}"))
        })?;
        let wanted = match &message {
            Message::Welcome { holdings, .. } => holdings.len(),
            Message::Pod { .. } => 3,
            _ => 0,
        };
        let found = packet.fds.len();
        if found != wanted {
            return Err(Error::Descriptors { found, wanted });
        }
        Ok(Some((message, packet.fds)))
    }
}

fn is_end(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::NotConnected
    )
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;
    use crate::sys::seqpacket::testing::pair;

    const DEADLINE: Duration = Duration::from_secs(10);

    fn talks() -> (Talk, Talk) {
        let (one, other) = pair();
        (Talk::over(one), Talk::over(other))
    }

    fn terms(settings: &[(&str, &str)]) -> Terms {
        Terms {
            protocol: PROTOCOL,
            version: "1.2.3".into(),
            settings: settings
                .iter()
                .map(|(flag, value)| ((*flag).to_owned(), (*value).to_owned()))
                .collect(),
        }
    }

    #[tokio::test]
    async fn each_message_comes_as_it_was_sent() {
        let (one, other) = talks();
        let null = File::open("/dev/null").unwrap();
        let pod = Message::Pod {
            uid: "u".into(),
            netns_dev: 4,
            netns_ino: u64::MAX,
        };
        let welcome = Message::Welcome {
            version: "9".into(),
            holdings: vec![Holding::StateDir, Holding::Readiness],
        };
        for (message, fds) in [
            (Message::Hello(terms(&[("--state-dir", "/run")])), 0),
            (welcome, 2),
            (
                Message::Refused {
                    reasons: vec!["no".into()],
                },
                0,
            ),
            (Message::Pause, 0),
            (pod, 3),
            (Message::Pods { count: 1 }, 0),
            (Message::Commit, 0),
            (Message::Yours, 0),
            (Message::Withdrawn { reason: "no".into() }, 0),
        ] {
            assert!(one.send(&message, &vec![null.as_fd(); fds]).await.unwrap());
            let (received, with) = other.recv(DEADLINE).await.unwrap().unwrap();
            assert_eq!((received, with.len()), (message, fds));
        }
        assert_eq!(one.peer_uid().unwrap(), nix::unistd::geteuid().as_raw());
    }

    #[tokio::test]
    async fn what_is_said_before_the_end_is_heard_even_by_who_was_not() {
        let (one, other) = talks();
        let withdrawn = Message::Withdrawn { reason: "no".into() };
        one.send(&withdrawn, &[]).await.unwrap();
        other.send(&Message::Commit, &[]).await.unwrap();
        drop(one);
        assert_eq!(other.recv(DEADLINE).await.unwrap().unwrap().0, withdrawn);
        assert!(other.recv(DEADLINE).await.unwrap().is_none());
        assert!(!other.send(&Message::Commit, &[]).await.unwrap());
    }

    #[tokio::test]
    async fn what_is_no_message_is_an_error_and_leaves_no_descriptor() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = || {
            use std::os::unix::fs::MetadataExt as _;
            let metadata = file.as_file().metadata().unwrap();
            crate::sys::seqpacket::testing::open_on(metadata.dev(), metadata.ino())
        };
        let before = open();
        let pod = r#"{"message":"pod","uid":"u","netnsDev":1,"netnsIno":2}"#;
        let welcome = r#"{"message":"welcome","version":"1","holdings":["admin"]}"#;
        let long = format!(
            r#"{{"message":"withdrawn","reason":"{}"}}"#,
            "x".repeat(MAX_BYTES)
        );
        for (bytes, fds, expected) in [
            (r#"{"message":"pau"#, 0, "no message"),
            (r#"{"message":"dance"}"#, 0, "unknown variant `dance`"),
            (r#"{"message":"pods","count":-1}"#, 0, "no message"),
            (
                r#"{"message":"welcome","version":"1","holdings":["moon"]}"#,
                1,
                "no message",
            ),
            ("\u{0}\u{0}\u{0}", 250, "no message"),
            (r#"{"message":"commit"}"#, 1, "1 descriptors, and not with 0"),
            (pod, 2, "2 descriptors, and not with 3"),
            (pod, 250, "250 descriptors, and not with 3"),
            (welcome, 0, "0 descriptors, and not with 1"),
            (&long, 3, "cannot receive a message"),
        ] {
            let (one, other) = pair();
            let fds = vec![file.as_file().as_fd(); fds];
            one.send(bytes.as_bytes(), &fds).await.unwrap();
            let error = Talk::over(other).recv(DEADLINE).await.unwrap_err();
            assert!(error.to_string().contains(expected), "{bytes:.60}: {error}");
            assert_eq!(open(), before, "{bytes:.60}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn silence_is_an_error() {
        let (one, _other) = talks();
        assert!(matches!(one.recv(DEADLINE).await, Err(Error::Late(DEADLINE))));
    }

    #[test]
    fn settings_that_both_know_must_be_equal() {
        let here = terms(&[("--a", "1"), ("--b", "2"), ("--old", "x")]);
        let mut there = terms(&[("--a", "1"), ("--b", "3"), ("--new", "y")]);
        assert_eq!(here.differences(&there), ["--b is 2 there, and 3 here"]);
        there.settings.insert("--b".into(), "2".into());
        assert_eq!(here.differences(&there), Vec::<String>::new());
        there.protocol = 7;
        let [difference] = here.differences(&there).try_into().unwrap();
        assert!(difference.contains("by protocol 1") && difference.contains("by protocol 7"));
    }
}
