//! The daemon: arguments, configuration, logs, and then `app`.
#![deny(unsafe_code)]

use std::{
    io::{self, Write},
    net::SocketAddr,
    path::PathBuf,
    pin::Pin,
    process::ExitCode,
};

use anyhow::Context;
use clap::{Parser, Subcommand};
use redirector::{
    admin, app,
    cni::install::{self, Installation, Whose},
    config::{Config, PodSource, planes::Environment, settings::Settings},
    debug,
    mesh::pod::PodUid,
    redirect::ebpf,
    sys::cgroups,
    telemetry::{Chain, logs},
    uninstall,
};
use tokio::signal::unix::{SignalKind, signal};

/// The node agent of a service mesh: takes the TCP connections of enrolled pods through a local proxy, by eBPF programs in
/// the pods, and gives them mutual TLS between nodes (HBONE).
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the agent
    Agent(Box<Run>),
    /// Show the pods, their capture and the counters of the agent that runs on this node
    Status {
        /// Address of the agent's admin endpoint
        #[arg(long, default_value = "127.0.0.1:15000")]
        admin_addr: SocketAddr,
    },
    /// Install the CNI plugin on this node, or with --remove take it away; an agent with --cni-install does so by itself
    #[command(
        long_about = "Install the CNI plugin on this node: its binary among the CNI's, and its entry in the CNI's configuration, which \
                      is left as it was otherwise. The settings are those of `agent`; docs/install.md says what is written."
    )]
    InstallCni(Box<InstallCni>),
    /// Remove from this node whatever agents with these directories have left; the settings are those of `agent`
    #[command(
        long_about = "Remove from this node whatever agents with these directories have left: programs, filters, rules, routes and \
                      sysctls in all pods, pins, records, sockets. The settings are those of `agent`. What cannot be removed is \
                      told, and the rest goes on.\n\n\
                      Exit codes: 0 nothing of ours is left; 1 something is, or nothing could be done; 2 bad usage; 3 an agent \
                      runs on these directories, and nothing was touched."
    )]
    Uninstall(Box<Uninstall>),
    /// Attach the eBPF programs to a namespace without a proxy: they count, and everything passes; Ctrl-C detaches
    Load {
        /// The namespace: a name of `ip netns`, the PID of a process in it, or a path
        #[arg(long)]
        netns: String,
        #[command(flatten)]
        backend: Backend,
    },
    /// Print the debug records of the programs of a pod, or of all pods, until Ctrl-C
    Trace {
        /// UID of the pod; all pods of the agent without it
        #[arg(long)]
        pod: Option<PodUid>,
        /// Where the agent pins programs and maps
        #[arg(long, default_value = "/sys/fs/bpf/redirector")]
        bpffs_dir: PathBuf,
    },
}

/// Settings of the eBPF backend for `load`.
#[derive(Debug, clap::Args)]
struct Backend {
    /// Where programs and maps are pinned
    #[arg(long, default_value = "/sys/fs/bpf/redirector")]
    bpffs_dir: PathBuf,
    /// Attach with clsact filters even where the kernel has TCX links
    #[arg(long)]
    force_clsact: bool,
}

#[derive(Debug, clap::Args)]
struct Agent {
    /// File of settings (YAML; its keys are the flags' names). The environment wins over it, and flags win over both
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    settings: Settings,
}

#[derive(Debug, clap::Args)]
struct Run {
    /// Read the configuration and the files that it names, print it as JSON, and end: 0 if it is right, 1 if not
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    agent: Agent,
}

#[derive(Debug, clap::Args)]
struct Uninstall {
    /// Remove the development CA too. Pods on other nodes that have its certificates are no longer trusted by a new one
    #[arg(long)]
    remove_ca: bool,
    #[command(flatten)]
    agent: Agent,
}

#[derive(Debug, clap::Args)]
struct InstallCni {
    /// Take the plugin away: what leads to this agent's socket, from wherever it is, and the binary if nobody else needs it
    #[arg(long)]
    remove: bool,
    #[command(flatten)]
    agent: Agent,
}

/// Exit code of `uninstall` where an agent runs.
const AGENT_RUNS: u8 = 3;

fn main() -> ExitCode {
    // Bad usage is told by clap, with exit code 2.
    let result = match Arguments::parse().command {
        Command::Agent(run) if run.check => check(run.agent),
        Command::Agent(run) => run_agent(run.agent),
        Command::Uninstall(arguments) => uninstall(*arguments),
        Command::InstallCni(arguments) => install_cni(*arguments),
        Command::Status { admin_addr } => print_status(admin_addr),
        Command::Load { netns, backend } => until_signal(async |signal| {
            let Backend {
                bpffs_dir,
                force_clsact,
            } = backend;
            debug::load(
                &netns,
                ebpf::Config {
                    bpffs_dir,
                    force_clsact,
                    ..ebpf::Config::default()
                },
                signal,
            )
            .await
        }),
        Command::Trace { pod, bpffs_dir } => {
            until_signal(async |signal| debug::trace(&bpffs_dir, pod.as_ref(), signal).await)
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let error: &dyn std::error::Error = error.as_ref();
            let line = match error.downcast_ref::<app::Error>() {
                Some(error) => app::explain(error),
                None => Chain(error).to_string(),
            };
            let _ = writeln!(io::stderr(), "redirector: {line}");
            match error.downcast_ref::<uninstall::Error>() {
                Some(uninstall::Error::AgentRuns { .. }) => AGENT_RUNS.into(),
                _ => ExitCode::FAILURE,
            }
        }
    }
}

/// Variables that are no text are nobody's here.
fn environment() -> Environment {
    let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
        Some((name.into_string().ok()?, value.into_string().ok()?))
    };
    std::env::vars_os().filter_map(text).collect()
}

fn check(agent: Agent) -> anyhow::Result<()> {
    let config = Config::load(agent.settings, agent.config.as_deref(), &environment())?;
    app::check_files(&config)?;
    let text = serde_json::to_string_pretty(&config).context("cannot show the configuration")?;
    writeln!(io::stdout(), "{text}").context("cannot write to standard output")
}

fn run_agent(agent: Agent) -> anyhow::Result<()> {
    let config = Config::load(agent.settings, agent.config.as_deref(), &environment())?;
    // Before there is another thread.
    let entered = cgroups::enter_node_namespace();
    let logs = logs::start(&config.log_level, config.log_format).context("cannot start logging")?;
    if let Err(error) = entered {
        tracing::warn!(
            %error,
            "cannot enter the node's cgroup namespace: where this is not the agent's own, pods of which no plugin has told are not found"
        );
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(config.worker_threads)
        .thread_name("redirector")
        // Shorter than the time between looks, which would each keep another of the threads that a burst has left.
        .thread_keep_alive(std::time::Duration::from_secs(1))
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let result = runtime.block_on(app::run(config, logs));
    // A step that blocks in the kernel must not hold up the exit.
    runtime.shutdown_timeout(std::time::Duration::from_secs(5));
    Ok(result?)
}

fn uninstall(arguments: Uninstall) -> anyhow::Result<()> {
    let Uninstall { remove_ca, agent } = arguments;
    let config = Config::load(agent.settings, agent.config.as_deref(), &environment())?;
    app::check_rights()?;
    logs::start(&"warn".parse()?, logs::Format::Plain).context("cannot start logging")?;
    let report = uninstall::run(&config, remove_ca)?;
    let mut err = io::stderr();
    for failure in &report.failures {
        let _ = writeln!(err, "redirector: {failure}");
    }
    let _ = writeln!(io::stdout(), "pods released: {}", report.released);
    anyhow::ensure!(
        report.failures.is_empty(),
        "{} things could not be removed; what stands in their way above, run it again without that",
        report.failures.len()
    );
    Ok(())
}

fn install_cni(arguments: InstallCni) -> anyhow::Result<()> {
    let InstallCni { remove, agent } = arguments;
    let config = Config::load(agent.settings, agent.config.as_deref(), &environment())?;
    anyhow::ensure!(
        matches!(config.pods, PodSource::Cni(_)),
        "INPOD_UDS (--inpod-uds) is given, and an agent that has it serves no CNI plugin"
    );
    let installation = config.cni.installation;
    let mut out = io::stdout();
    if remove {
        let removed = install::patiently(|| install::remove(&installation, Whose::Socket))?;
        for file in removed.left {
            let _ = writeln!(out, "{}: left, it is another agent's", file.display());
        }
        let _ = writeln!(out, "CNI plugin removed");
        return Ok(());
    }
    let mut installation = Installation::new(installation);
    let installed = install::patiently(|| installation.install())?;
    if let Some(warning) = &installed.warning {
        let _ = writeln!(io::stderr(), "redirector: {warning}");
    }
    let was = if installed.changed {
        "installed"
    } else {
        "is installed"
    };
    let _ = writeln!(out, "CNI plugin {was} in {}", installed.file.display());
    Ok(())
}

/// Runs a tool that ends at SIGINT or SIGTERM. Warnings go to standard error.
fn until_signal(
    tool: impl AsyncFnOnce(Pin<Box<dyn Future<Output = ()>>>) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    app::check_rights()?;
    logs::start(&"warn".parse()?, logs::Format::Plain).context("cannot start logging")?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    runtime.block_on(async {
        let mut terminated = signal(SignalKind::terminate()).context("cannot wait for SIGTERM")?;
        let mut interrupted = signal(SignalKind::interrupt()).context("cannot wait for SIGINT")?;
        let ended = async move {
            tokio::select! { _ = terminated.recv() => {}, _ = interrupted.recv() => {} }
        };
        tool(Box::pin(ended)).await
    })
}

fn print_status(admin_addr: SocketAddr) -> anyhow::Result<()> {
    let (view, metrics) = admin::client::status(admin_addr)?;
    let text = admin::render(admin_addr, &view, &metrics);
    io::stdout()
        .write_all(text.as_bytes())
        .context("cannot write to standard output")
}
