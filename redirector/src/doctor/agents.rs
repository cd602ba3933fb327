//! Agents that run on this node, and what this one would listen on.

use std::{
    io,
    net::{SocketAddr, TcpListener},
    os::unix::{fs::FileTypeExt, net::UnixStream},
    path::Path,
};

use super::Check;
use crate::{
    admin::{
        PodsView,
        client::{Client, Error, TIMEOUT},
    },
    config::{Config, PodSource},
    pods::status::{PodStatus, State},
    sys::lock::{self, Holder},
};

pub(super) fn checks(config: &Config) -> Vec<Check> {
    let state = lock::holder(&config.state_dir);
    let is_running = matches!(state, Ok(Holder::Process(_) | Holder::Hidden));
    let mut checks = vec![directories(
        held(state),
        held(lock::holder(&config.bpffs_dir)),
        config,
    )];
    checks.push(match is_running {
        true => answer(config.admin_addr, &view(config.admin_addr)),
        false => Check::not_asked("agent.ready", "no agent runs with these directories"),
    });
    let addresses = [
        ("ports.admin", "--admin-addr", config.admin_addr),
        ("ports.metrics", "--metrics-addr", config.metrics_addr),
        ("ports.readiness", "--readiness-addr", config.readiness_addr),
    ];
    for (id, flag, address) in addresses {
        checks.push(port(
            id,
            flag,
            address,
            is_running,
            TcpListener::bind(address).map(drop),
        ));
    }
    checks.push(match &config.pods {
        PodSource::Cni(path) => socket("sockets.cni", "--cni-socket", path, is_running, Served::of(path)),
        PodSource::Zds(path) => source(path, Served::of(path)),
    });
    checks
}

/// Nobody has what is not there.
fn held(holder: io::Result<Holder>) -> io::Result<Holder> {
    match holder {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Holder::Nobody),
        holder => holder,
    }
}

fn directories(state: io::Result<Holder>, pins: io::Result<Holder>, config: &Config) -> Check {
    let id = "agent.directories";
    let (state, pins) = match (state, pins) {
        (Ok(state), Ok(pins)) => (state, pins),
        (Err(error), _) | (_, Err(error)) => {
            return Check::failed(
                id,
                format!("cannot look who has the directories: {error}"),
                "run it as root, where the agent runs",
            );
        }
    };
    let name = |holder| match holder {
        Holder::Nobody => "nobody".to_owned(),
        Holder::Process(pid) => format!("process {pid}"),
        Holder::Hidden => "a process that is not seen from here".to_owned(),
    };
    // With other backends there may be no bpffs to hold.
    match (state, pins) {
        (Holder::Nobody, Holder::Nobody) => Check::ok(id, "no agent runs with these directories"),
        (state, pins) if state == pins || pins == Holder::Nobody => {
            Check::ok(id, format!("an agent runs: {}", name(state)))
        }
        (state, pins) => Check::failed(
            id,
            format!(
                "{} has {}, and {} has {}",
                name(state),
                config.state_dir.display(),
                name(pins),
                config.bpffs_dir.display()
            ),
            "two agents on a node need directories of their own: --state-dir and --bpffs-dir",
        ),
    }
}

fn view(address: SocketAddr) -> Result<PodsView, Error> {
    let client = Client {
        address,
        timeout: TIMEOUT,
    };
    client.json("/pods")
}

fn answer(address: SocketAddr, view: &Result<PodsView, Error>) -> Check {
    let id = "agent.ready";
    match view {
        Ok(view) if view.ready => {
            let is_missing = |pod: &&PodStatus| pod.state == State::NotCaptured || pod.impaired;
            let missing = view.status.pods.iter().filter(is_missing).count() + view.missed.len();
            let seen = format!("the agent is ready, with {} pods", view.status.pods.len());
            match missing {
                0 => Check::ok(id, seen),
                missing => Check::failed(
                    id,
                    format!("{seen}, of which {missing} are not captured, or not as they should be"),
                    "redirector pods --state not-captured --state impaired says why",
                ),
            }
        }
        Ok(view) => Check::failed(
            id,
            format!("the agent is not ready: {}", view.pending.join(", ")),
            "its log says what it waits for",
        ),
        Err(error) => Check::failed(
            id,
            format!("an agent runs, and at {address}: {error}"),
            "name its address with --admin-addr, or look whether it stands still",
        ),
    }
}

fn port(
    id: &'static str,
    flag: &'static str,
    address: SocketAddr,
    is_running: bool,
    bound: io::Result<()>,
) -> Check {
    match bound {
        Ok(()) if is_running => Check::warning(
            id,
            format!("an agent runs, and does not listen on {address}"),
            format!("it has another {flag}: name the same here"),
        ),
        Ok(()) => Check::ok(id, format!("{address} is free")),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_running => Check::ok(
            id,
            format!("{address} is in use, as it must be while an agent runs"),
        ),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => Check::failed(
            id,
            format!("another process listens on {address}"),
            format!("end it (ss -ltnp shows it), or choose another {flag}"),
        ),
        Err(error) => Check::failed(
            id,
            format!("{address} cannot be listened on: {error}"),
            format!("choose another {flag}"),
        ),
    }
}

/// What is at the path of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Served {
    Yes,
    /// A file without anybody behind it.
    Stale,
    Missing,
    NotASocket,
    /// It cannot be asked.
    Denied,
}

impl Served {
    fn of(path: &Path) -> Self {
        match std::fs::symlink_metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Self::Missing,
            Err(_) => return Self::Denied,
            Ok(found) if !found.file_type().is_socket() => return Self::NotASocket,
            Ok(_) => {}
        }
        match UnixStream::connect(path) {
            Ok(_) => Self::Yes,
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Self::Stale,
            // Sockets of another type: unix(7).
            Err(error) if error.raw_os_error() == Some(libc::EPROTOTYPE) => Self::Yes,
            Err(_) => Self::Denied,
        }
    }
}

fn socket(id: &'static str, flag: &'static str, path: &Path, is_running: bool, served: Served) -> Check {
    let path = path.display();
    match (served, is_running) {
        (Served::Yes, true) => Check::ok(id, format!("{path} answers")),
        (Served::Missing | Served::Stale, false) => Check::ok(id, format!("{path} is free")),
        (Served::Yes, false) => Check::failed(
            id,
            format!("another process serves {path}"),
            format!("end it, or choose another {flag}"),
        ),
        (Served::Missing | Served::Stale, true) => Check::failed(
            id,
            format!("an agent runs, and {path} does not answer: CNI plugins cannot tell of pods"),
            format!("name the agent's {flag}, or restart the agent: somebody has removed its socket"),
        ),
        (Served::NotASocket, _) => Check::failed(
            id,
            format!("{path} is there and is no socket"),
            format!("remove it, or choose another {flag}"),
        ),
        (Served::Denied, _) => Check::failed(
            id,
            format!("{path} cannot be asked"),
            "run it as root, where the agent runs",
        ),
    }
}

fn source(path: &Path, served: Served) -> Check {
    let id = "sockets.zds";
    let path = path.display();
    match served {
        Served::Yes => Check::ok(id, format!("{path}, where pods are told of, answers")),
        _ => Check::failed(
            id,
            format!("{path}, where pods are to be told of, does not answer"),
            "start the node agent that serves it, or name its socket with --inpod-uds",
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::{net::Ipv4Addr, os::unix::net::UnixListener};

    use super::*;
    use crate::{
        config::{planes::Environment, settings::Settings},
        doctor::State as Standing,
    };

    #[test]
    fn two_agents_are_told_from_one() {
        let config = Config::load(Settings::default(), None, &Environment::new()).unwrap();
        let one = Holder::Process(5);
        for (state, pins, standing) in [
            (Holder::Nobody, Holder::Nobody, Standing::Ok),
            (one, one, Standing::Ok),
            (one, Holder::Nobody, Standing::Ok),
            (Holder::Hidden, Holder::Hidden, Standing::Ok),
            (one, Holder::Process(6), Standing::Failed),
            (Holder::Nobody, one, Standing::Failed),
        ] {
            let check = directories(Ok(state), Ok(pins), &config);
            assert_eq!(check.state, standing, "{check:?}");
        }
        let denied = || Err(io::ErrorKind::PermissionDenied.into());
        assert_eq!(directories(denied(), Ok(one), &config).state, Standing::Failed);
        assert_eq!(held(Err(io::ErrorKind::NotFound.into())).unwrap(), Holder::Nobody);
    }

    #[test]
    fn a_port_is_judged_by_whether_an_agent_runs() {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 7));
        let taken = || Err(io::ErrorKind::AddrInUse.into());
        let absent = || Err(io::ErrorKind::AddrNotAvailable.into());
        for (is_running, bound, state) in [
            (false, Ok(()), Standing::Ok),
            (false, taken(), Standing::Failed),
            (true, taken(), Standing::Ok),
            (true, Ok(()), Standing::Warning),
            (false, absent(), Standing::Failed),
        ] {
            let check = port("ports.x", "--x-addr", address, is_running, bound);
            assert_eq!(check.state, state, "{check:?}");
            assert_eq!(
                check.hint.is_some_and(|hint| hint.contains("--x-addr")),
                state != Standing::Ok
            );
        }
    }

    #[test]
    fn sockets_are_seen_as_they_are_and_judged() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.sock");
        assert_eq!(Served::of(&path), Served::Missing);
        let listener = UnixListener::bind(&path).unwrap();
        assert_eq!(Served::of(&path), Served::Yes);
        drop(listener);
        assert_eq!(Served::of(&path), Served::Stale);
        assert_eq!(Served::of(directory.path()), Served::NotASocket);
        for (served, is_running, state) in [
            (Served::Yes, true, Standing::Ok),
            (Served::Yes, false, Standing::Failed),
            (Served::Missing, true, Standing::Failed),
            (Served::Missing, false, Standing::Ok),
            (Served::Stale, false, Standing::Ok),
            (Served::NotASocket, false, Standing::Failed),
            (Served::Denied, true, Standing::Failed),
        ] {
            let check = socket("sockets.cni", "--cni-socket", &path, is_running, served);
            assert_eq!(check.state, state, "{check:?}");
        }
        assert_eq!(source(&path, Served::Yes).state, Standing::Ok);
        assert_eq!(source(&path, Served::Stale).state, Standing::Failed);
    }
}
