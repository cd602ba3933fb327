//! The commands that do something on this node: `agent`, `install-cni`, `uninstall`, `load` and `trace`.

use std::{
    io::{self, Write},
    path::PathBuf,
    pin::Pin,
};

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    app,
    cni::install::{self, Installation, Whose},
    config::{self, Config, PodSource, planes::Environment, settings::Settings},
    debug,
    mesh::pod::PodUid,
    redirect::ebpf,
    sys::cgroups,
    telemetry::logs,
    uninstall,
};

#[derive(Debug, clap::Args)]
pub(super) struct Load {
    /// The namespace: a name of `ip netns`, the PID of a process in it, or a path
    #[arg(long)]
    netns: String,
    /// Where programs and maps are pinned
    #[arg(long, default_value = "/sys/fs/bpf/redirector")]
    bpffs_dir: PathBuf,
    /// Attach with clsact filters even where the kernel has TCX links
    #[arg(long)]
    force_clsact: bool,
}

#[derive(Debug, clap::Args)]
pub(super) struct Trace {
    /// UID of the pod; all pods of the agent without it
    #[arg(long)]
    pod: Option<PodUid>,
    /// Where the agent pins programs and maps
    #[arg(long, default_value = "/sys/fs/bpf/redirector")]
    bpffs_dir: PathBuf,
}

#[derive(Debug, clap::Args)]
pub(super) struct Agent {
    /// File of settings (YAML; its keys are the flags' names). The environment wins over it, and flags win over both
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    settings: Settings,
}

#[derive(Debug, clap::Args)]
pub(super) struct Run {
    /// Read the configuration and the files that it names, print it as JSON, and end: 0 if it is right, 1 if not
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    agent: Agent,
}

#[derive(Debug, clap::Args)]
pub(super) struct Uninstall {
    /// Remove the development CA too. Pods on other nodes that have its certificates are no longer trusted by a new one
    #[arg(long)]
    remove_ca: bool,
    #[command(flatten)]
    agent: Agent,
}

#[derive(Debug, clap::Args)]
pub(super) struct InstallCni {
    /// Take the plugin away: what leads to this agent's socket, from wherever it is, and the binary if nobody else needs it
    #[arg(long)]
    remove: bool,
    #[command(flatten)]
    agent: Agent,
}

impl Agent {
    /// The settings, checked.
    pub(super) fn config(self) -> Result<Config, config::Error> {
        Config::load(self.settings, self.config.as_deref(), &environment())
    }
}

/// Variables that are no text are nobody's here.
fn environment() -> Environment {
    let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
        Some((name.into_string().ok()?, value.into_string().ok()?))
    };
    std::env::vars_os().filter_map(text).collect()
}

pub(super) fn agent(run: Run) -> anyhow::Result<()> {
    match run.check {
        true => check(run.agent),
        false => start(run.agent),
    }
}

fn check(agent: Agent) -> anyhow::Result<()> {
    let config = agent.config()?;
    app::check_files(&config)?;
    let text = serde_json::to_string_pretty(&config).context("cannot show the configuration")?;
    writeln!(io::stdout(), "{text}").context("cannot write to standard output")
}

fn start(agent: Agent) -> anyhow::Result<()> {
    let config = agent.config()?;
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

pub(super) fn uninstall(arguments: Uninstall) -> anyhow::Result<()> {
    let Uninstall { remove_ca, agent } = arguments;
    let config = agent.config()?;
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

pub(super) fn install_cni(arguments: InstallCni) -> anyhow::Result<()> {
    let InstallCni { remove, agent } = arguments;
    let config = agent.config()?;
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

pub(super) fn load(arguments: Load) -> anyhow::Result<()> {
    let Load {
        netns,
        bpffs_dir,
        force_clsact,
    } = arguments;
    let config = ebpf::Config {
        bpffs_dir,
        force_clsact,
        ..ebpf::Config::default()
    };
    until_signal(async |signal| debug::load(&netns, config, signal).await)
}

pub(super) fn trace(arguments: &Trace) -> anyhow::Result<()> {
    let Trace { pod, bpffs_dir } = arguments;
    until_signal(async |signal| debug::trace(bpffs_dir, pod.as_ref(), signal).await)
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
