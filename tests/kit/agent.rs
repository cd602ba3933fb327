//! The real daemon, in a node's namespace, with directories and sockets of its own.

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
    process::ExitStatus,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;

use crate::{
    app,
    cgroup::command_in,
    cni::{self, Answer},
    counters::{Sample, parse_metrics},
    node::{Node, Pod},
    process::{self, Process, command},
    wait,
    workloads::Workloads,
};

const ADMIN_PORT: u16 = 15000;
const METRICS_PORT: u16 = 15020;
const READINESS_PORT: u16 = 15021;
/// Longest time to stop in: the daemon's own limit for draining is shorter.
const STOP_DEADLINE: Duration = Duration::from_secs(30);

/// In a mount namespace of its own: unmounts the hierarchy of version 2, and gives way to the command.
const WITHOUT_CGROUP2: &str = r#"for at in $(awk '$3 == "cgroup2" { print $2 }' /proc/mounts); do umount -l "$at" || exit; done; exec "$@""#;

/// How traffic is redirected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Redirect {
    /// By eBPF programs.
    #[default]
    Ebpf,
    /// By iptables rules in nftables.
    IptablesNft,
    /// By iptables rules in the tables of before.
    IptablesLegacy,
    /// By somebody else.
    None,
}

impl Redirect {
    fn arguments(self) -> &'static [&'static str] {
        match self {
            Self::Ebpf => &["--redirect", "ebpf"],
            Self::IptablesNft => &["--redirect", "iptables", "--iptables-backend", "nft"],
            Self::IptablesLegacy => &["--redirect", "iptables", "--iptables-backend", "legacy"],
            Self::None => &["--redirect", "none"],
        }
    }
}

/// How to start the daemon.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Attach by clsact where TCX could be had.
    pub force_clsact: bool,
    /// Tell the proxy's dials by source port where their device could be had.
    pub force_source_port: bool,
    /// How traffic is redirected.
    pub redirect: Redirect,
    /// Take pods from a ZDS server at this socket.
    pub zds: Option<PathBuf>,
    /// Being there is enough: it is not waited for until it is ready.
    pub unready: bool,
    /// As on a machine whose cgroups are all of version 1.
    pub without_cgroup2: bool,
    /// The mount namespace to be in, as a file.
    pub mounts: Option<PathBuf>,
    /// The directory of a cgroup that it runs in, with a cgroup namespace of its own, as containers have.
    pub cgroup: Option<PathBuf>,
    /// A directory of programs that come before those of PATH.
    pub programs: Option<PathBuf>,
    /// More arguments.
    pub arguments: Vec<String>,
    /// Variables of its environment; the last of a name counts.
    pub environment: Vec<(String, String)>,
}

impl Options {
    /// As on a kernel before 5.17, without TCX links and without the device in SK_LOOKUP.
    pub fn old_kernel() -> Self {
        Self {
            force_clsact: true,
            force_source_port: true,
            ..Self::default()
        }
    }
}

/// A daemon.
#[derive(Debug)]
pub struct Agent {
    options: Options,
    directory: PathBuf,
    process: Process,
    metrics: std::net::SocketAddr,
    node: PathBuf,
}

/// The daemon's binary: what xtask says, or what lies beside this one's directory.
pub fn binary() -> Option<PathBuf> {
    env::var_os("REDIRECTOR_BIN").map(PathBuf::from).or_else(|| {
        let own = env::current_exe().ok()?;
        own.ancestors()
            .skip(1)
            .take(2)
            .map(|directory| directory.join("redirector"))
            .find(|path| path.is_file())
    })
}

impl Agent {
    /// Starts it with the workload file that names `workloads`, and waits until it is ready.
    ///
    /// # Panics
    /// When it does not become ready.
    pub fn start(node: &Node, workloads: &Workloads, options: Options) -> Self {
        Self::try_start(node, workloads, options)
            .unwrap_or_else(|error| panic!("starting the agent: {error:#}"))
    }

    /// Starts it, and waits until it is ready; what it said is in the error.
    pub fn try_start(node: &Node, workloads: &Workloads, options: Options) -> Result<Self> {
        let directory = node.directory().to_owned();
        workloads.write(&directory.join("workloads.yaml"))?;
        Self::launch(node, &directory, options)
    }

    fn launch(node: &Node, directory: &Path, options: Options) -> Result<Self> {
        let mut agent = Self::spawn(node, directory, options)?;
        agent.wait_ready(node)?;
        Ok(agent)
    }

    fn spawn(node: &Node, directory: &Path, options: Options) -> Result<Self> {
        let binary = binary().context("there is no redirector binary: cargo xtask test builds it")?;
        let mut command = if options.without_cgroup2 {
            let mut unshare = command(&node.host.ns, "unshare");
            unshare
                .args(["--mount", "sh", "-c", WITHOUT_CGROUP2, "sh"])
                .arg(binary);
            unshare
        } else if let Some(mounts) = &options.mounts {
            let mut enter = command(&node.host.ns, "nsenter");
            enter.arg(format!("--mount={}", mounts.display())).arg(binary);
            enter
        } else if let Some(cgroup) = &options.cgroup {
            let mut unshare = command(&node.host.ns, "unshare");
            unshare.arg("--cgroup").arg(binary);
            command_in(cgroup, &unshare)
        } else {
            command(&node.host.ns, binary)
        };
        command.arg("agent");
        // Pods come from one source.
        match &options.zds {
            Some(zds) => command.arg("--inpod-uds").arg(zds),
            None => command.arg("--cni-socket").arg(directory.join("cni.sock")),
        };
        for (flag, file) in [
            ("--state-dir", "state"),
            ("--bpffs-dir", "bpf"),
            ("--workloads", "workloads.yaml"),
        ] {
            command.arg(flag).arg(directory.join(file));
        }
        command.args(["--admin-addr", &format!("127.0.0.1:{ADMIN_PORT}")]);
        command.args(["--metrics-addr", &format!("127.0.0.1:{METRICS_PORT}")]);
        command.args(["--readiness-addr", &format!("127.0.0.1:{READINESS_PORT}")]);
        command.args(options.redirect.arguments());
        if options.force_clsact {
            command.arg("--force-clsact");
        }
        if options.force_source_port {
            command.arg("--force-source-port");
        }
        command.args(&options.arguments);
        command
            .env("XDS_ADDRESS", "")
            .env("CA_ADDRESS", "")
            .env("FAKE_CA", "true")
            .env("RUST_BACKTRACE", "1")
            .envs(options.environment.iter().cloned());
        if let Some(programs) = &options.programs {
            let path = env::var("PATH").unwrap_or_default();
            command.env("PATH", format!("{}:{path}", programs.display()));
        }
        let process = Process::start(&mut command, &directory.join("agent.log"))?;
        let metrics = (std::net::Ipv4Addr::LOCALHOST, METRICS_PORT).into();
        Ok(Self {
            options,
            directory: directory.to_owned(),
            process,
            metrics,
            node: node.host.ns.path(),
        })
    }

    fn wait_ready(&mut self, node: &Node) -> Result<()> {
        let readiness = (std::net::Ipv4Addr::LOCALHOST, READINESS_PORT).into();
        // With ZDS it is ready when the snapshot has come, which the test sends later; being there is enough.
        let enough = |status: u16| status == 200 || self.options.zds.is_some() || self.options.unready;
        let ended = wait::until("the agent to be ready", || {
            if let Some(status) = self.process.ended() {
                return Some(Some(status));
            }
            let (status, _) = app::http_get(&node.host.ns, readiness, "/healthz/ready").ok()?;
            enough(status).then_some(None)
        });
        if let Some(status) = ended {
            bail!("it ended ({status}); it printed:\n{}", self.log());
        }
        Ok(())
    }

    /// Where its Unix socket is.
    pub fn cni_socket(&self) -> PathBuf {
        self.directory.join("cni.sock")
    }

    /// Where it keeps the root of its certificates.
    pub fn state_dir(&self) -> PathBuf {
        self.directory.join("state")
    }

    /// Where it pins programs, maps and links.
    pub fn bpffs_dir(&self) -> PathBuf {
        self.directory.join("bpf")
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Enrols a pod by the Unix socket.
    ///
    /// # Panics
    /// When it is refused.
    pub fn enrol(&self, pod: &Pod) {
        let answer = self.cmdadd(pod);
        assert_eq!(
            answer.status,
            200,
            "enrolling {}: {}\n{}",
            pod.name,
            answer.body,
            self.log()
        );
    }

    /// Releases a pod by the Unix socket.
    ///
    /// # Panics
    /// When it is refused.
    pub fn release(&self, pod: &Pod) {
        let answer = self.cmddel(pod);
        assert_eq!(
            answer.status,
            200,
            "releasing {}: {}\n{}",
            pod.name,
            answer.body,
            self.log()
        );
    }

    /// Asks to enrol a pod.
    pub fn cmdadd(&self, pod: &Pod) -> Answer {
        self.post("/cmdadd", &cni::event(pod).to_string())
    }

    /// Asks to release a pod.
    pub fn cmddel(&self, pod: &Pod) -> Answer {
        self.post("/cmddel", &cni::event(pod).to_string())
    }

    /// Posts to its Unix socket.
    ///
    /// # Panics
    /// When there is no answer.
    pub fn post(&self, path: &str, body: &str) -> Answer {
        cni::post(&self.cni_socket(), path, body)
            .unwrap_or_else(|error| panic!("POST {path}: {error:#}\n{}", self.log()))
    }

    /// Ends it as a crash would.
    pub fn kill(&mut self) {
        self.process.signal(Signal::SIGKILL);
        self.process.wait(STOP_DEADLINE).expect("a killed process ends");
    }

    /// Holds it up, listeners and all, until [`Self::resume`].
    ///
    /// # Panics
    /// When it does not stand still in time.
    pub fn pause(&self) {
        self.process.signal(Signal::SIGSTOP);
        let status = format!("/proc/{}/status", self.pid());
        wait::until("the agent to stand still", || {
            let status = fs::read_to_string(&status).expect("the agent is there");
            status.contains("State:\tT").then_some(())
        });
    }

    /// Lets it go on.
    pub fn resume(&self) {
        self.process.signal(Signal::SIGCONT);
    }

    /// Asks it to end, and waits.
    ///
    /// # Panics
    /// When it has not ended in time.
    pub fn stop(&mut self) -> ExitStatus {
        self.process.signal(Signal::SIGTERM);
        let status = self.process.wait(STOP_DEADLINE);
        status.unwrap_or_else(|| panic!("the agent has not stopped in {STOP_DEADLINE:?}:\n{}", self.log()))
    }

    /// Starts a new one on the same directories. The old one must have ended.
    ///
    /// # Panics
    /// When it does not become ready.
    pub fn restart(&mut self, node: &Node) {
        self.restart_with(node, self.options.clone());
    }

    /// Starts a new one on the same directories, with other options. The old one must have ended.
    ///
    /// # Panics
    /// When it does not become ready.
    pub fn restart_with(&mut self, node: &Node, options: Options) {
        assert!(self.process.ended().is_some(), "the agent still runs");
        let directory = self.directory.clone();
        *self = Self::launch(node, &directory, options)
            .unwrap_or_else(|error| panic!("restarting the agent: {error:#}"));
    }

    /// Starts a new one beside it, which takes over from it, and returns the one that was there. What became of that is not waited for.
    ///
    /// # Panics
    /// When it cannot be started.
    #[must_use]
    pub fn succeed(&mut self, node: &Node) -> Self {
        self.succeed_with(node, self.options.clone())
    }

    /// The same, with other options.
    ///
    /// # Panics
    /// When it cannot be started.
    #[must_use]
    pub fn succeed_with(&mut self, node: &Node, mut options: Options) -> Self {
        options
            .environment
            .push(("TAKEOVER".to_owned(), "auto".to_owned()));
        let successor = Self::spawn(node, &self.directory, options)
            .unwrap_or_else(|error| panic!("starting the agent's successor: {error:#}"));
        std::mem::replace(self, successor)
    }

    /// How often an agent has taken over from another one here.
    pub fn takeovers(&self) -> usize {
        self.log().matches("taken over from the running agent").count()
    }

    /// Starts a new one that takes over from it, and waits until it has; returns the one that was there, which ends by itself.
    ///
    /// # Panics
    /// When it has not taken over in time.
    #[must_use]
    pub fn taken_over(&mut self, node: &Node) -> Self {
        let before = self.takeovers();
        let old = self.succeed(node);
        wait::until("the agent to take over", || {
            assert!(self.ended().is_none(), "it has ended:\n{}", self.log());
            (self.takeovers() > before).then_some(())
        });
        old
    }

    /// Whether and how it has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.process.ended()
    }

    /// Waits until it has ended by itself.
    ///
    /// # Panics
    /// When it has not in time.
    pub fn end(&mut self) -> ExitStatus {
        let status = self.process.wait(STOP_DEADLINE);
        status.unwrap_or_else(|| panic!("the agent has not ended in {STOP_DEADLINE:?}:\n{}", self.log()))
    }

    /// Starts a new one on the same directories, and ends it as a crash would after `life`, wherever it is by then.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn restart_for(&mut self, node: &Node, life: Duration) {
        assert!(self.process.ended().is_some(), "the agent still runs");
        let (directory, options) = (self.directory.clone(), self.options.clone());
        *self = Self::spawn(node, &directory, options)
            .unwrap_or_else(|error| panic!("restarting the agent: {error:#}"));
        std::thread::sleep(life);
        self.kill();
    }

    /// Runs `redirector uninstall` on its directories; returns how it ended, and what it printed.
    ///
    /// # Panics
    /// When it has not ended in time.
    pub fn uninstall(&self, node: &Node, arguments: &[&str]) -> (ExitStatus, String) {
        let mut command = command(&node.host.ns, binary().expect("the agent runs by it"));
        command.arg("uninstall");
        for (flag, file) in [
            ("--state-dir", "state"),
            ("--bpffs-dir", "bpf"),
            ("--cni-socket", "cni.sock"),
            ("--cni-conf-dir", "net.d"),
            ("--cni-bin-dir", "cni-bin"),
        ] {
            command.arg(flag).arg(self.directory.join(file));
        }
        process::output(command.args(arguments), STOP_DEADLINE)
    }

    /// Everything it printed since its first start.
    pub fn log(&self) -> String {
        self.process.output()
    }

    /// The file that [`Self::log`] reads.
    pub fn log_file(&self) -> &Path {
        self.process.log()
    }

    /// Its access log: a map of fields per finished connection.
    pub fn access_log(&self) -> Vec<BTreeMap<String, String>> {
        let log = self.log();
        log.lines()
            .filter(|line| line.contains("connection complete"))
            .map(fields)
            .collect()
    }

    /// Its metrics.
    ///
    /// # Panics
    /// When they cannot be had.
    pub fn metrics(&self) -> Vec<Sample> {
        let node = redirector::sys::netns::Netns::open(&self.node).expect("the node is there");
        let (status, body) = node
            .run(|| app::http_get_here(self.metrics, "/metrics"))
            .expect("the node can be entered")
            .unwrap_or_else(|error| panic!("reading metrics: {error}\n{}", self.log()));
        assert_eq!(status, 200, "{body}");
        parse_metrics(&body)
    }

    /// Its table of pods, as its admin address tells it.
    ///
    /// # Panics
    /// When it cannot be had.
    pub fn pods(&self) -> Vec<serde_json::Value> {
        let node = redirector::sys::netns::Netns::open(&self.node).expect("the node is there");
        let admin = (std::net::Ipv4Addr::LOCALHOST, ADMIN_PORT).into();
        let (status, body) = node
            .run(|| app::http_get_here(admin, "/pods"))
            .expect("the node can be entered")
            .unwrap_or_else(|error| panic!("reading pods: {error}\n{}", self.log()));
        assert_eq!(status, 200, "{body}");
        let mut view: serde_json::Value = serde_json::from_str(&body).expect("JSON");
        serde_json::from_value(view["pods"].take()).expect("a list")
    }

    /// Waits until it holds what it does at rest: the programs for its next pods, which it loads every 1.5 s, are there.
    ///
    /// # Panics
    /// When it comes to no rest.
    pub fn settle(&self) {
        let mut last = None;
        wait::until("the agent to come to rest", || {
            let now = self.descriptors().len();
            let same = last.replace(now) == Some(now);
            if !same {
                std::thread::sleep(Duration::from_secs(2));
            }
            same.then_some(())
        });
    }

    /// What its descriptors are: a sorted list of kinds, e.g. `socket`, `anon_inode:bpf-prog`, `net`.
    ///
    /// # Panics
    /// When it has ended.
    pub fn descriptors(&self) -> Vec<String> {
        let entries = fs::read_dir(format!("/proc/{}/fd", self.pid())).expect("the agent runs");
        let mut kinds: Vec<String> = entries
            .flatten()
            .filter_map(|entry| fs::read_link(entry.path()).ok())
            .map(|target| {
                target
                    .to_string_lossy()
                    .split(":[")
                    .next()
                    .unwrap_or_default()
                    .to_owned()
            })
            .collect();
        kinds.sort();
        kinds
    }
}

/// `key=value` and `key="value"` of a log line.
pub fn fields(line: &str) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut rest = line;
    while let Some((before, after)) = rest.split_once('=') {
        let key = before.rsplit([' ', '\t']).next().unwrap_or_default();
        let (value, next) = match after.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"').unwrap_or((quoted, "")),
            None => after.split_once([' ', '\t']).unwrap_or((after, "")),
        };
        found.insert(key.to_owned(), value.to_owned());
        rest = next;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_a_log_line_are_read() {
        let line = "t info access connection complete src.addr=10.0.0.1:5 src.identity=\"spiffe://a/b\" duration=\"18 ms\" x=1";
        let fields = fields(line);
        assert_eq!(fields["src.addr"], "10.0.0.1:5");
        assert_eq!(fields["src.identity"], "spiffe://a/b");
        assert_eq!(fields["duration"], "18 ms");
        assert_eq!(fields["x"], "1");
    }
}
