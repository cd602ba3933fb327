//! The command line: what can be asked, what is printed, and how it ends. `main` is this.
//!
//! `node` holds the commands that do something on this node, the agent itself among them; the others ask a running agent on its admin port.
//! docs/cli.md tells of all of them.

use std::{
    io::{self, Write},
    net::SocketAddr,
    process::ExitCode,
};

use clap::{Parser, Subcommand};
use clap_complete::Shell;

use crate::{
    admin::client::{Client, TIMEOUT},
    app,
    config::{reference, values::Span},
    telemetry::Chain,
    uninstall,
};

mod about;
mod certs;
mod doctor;
mod drain;
mod flows;
mod node;
mod output;
mod pods;
mod words;

/// The node agent of a service mesh: takes the TCP connections of enrolled pods through a local proxy, by eBPF programs in
/// the pods, and gives them mutual TLS between nodes (HBONE).
#[derive(Debug, Parser)]
#[command(name = "redirector", version, max_term_width = 100, after_help = EXIT_CODES)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

const EXIT_CODES: &str = "Exit codes: 0 done; 1 it failed, and why is on standard error; 2 wrong arguments; of `uninstall` 3, an agent \
                          runs; of `certs` 4, a certificate ends soon or is not there";

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the agent
    Agent(Box<node::Run>),
    /// Show the pods, their capture and the counters of the agent that runs on this node
    Status(pods::StatusArguments),
    /// Show the pods of this node and their capture
    Pods(pods::PodsArguments),
    /// Show the connections that are open in the pods of this node
    Connections(flows::ConnectionsArguments),
    /// Show the connections that have ended in the pods of this node, and with --follow those that end from now on
    Flows(flows::FlowsArguments),
    /// Show the identities in use on this node, and until when their certificates are good
    #[command(
        long_about = "Show the identities in use on this node, and until when their certificates are good.\n\n\
                      Exit codes: 0 all are good; 1 the agent cannot be asked; 2 bad usage; 4 an identity has no good certificate, \
                      or a certificate ends within --warn-within."
    )]
    Certs(certs::CertsArguments),
    /// Print all that the agent tells of itself: mesh, pods, certificates and settings, as JSON
    Dump(about::DumpArguments),
    /// Look at what an agent with these settings needs of this node, and say what mends it
    #[command(
        long_about = "Look at what an agent with these settings needs of this node: the kernel and its features, rights, limits, mounts, \
                      ports, the CNI plugin, what others have in the pods, whom it asks over the network, certificates. Each is ok, a \
                      warning, failed, or not asked where these settings don't need it, with what was seen and what mends it. The \
                      settings are those of `agent`. Nothing is changed.\n\n\
                      Exit codes: 0 nothing has failed; 1 something has; 2 bad usage."
    )]
    Doctor(Box<doctor::DoctorArguments>),
    /// Stop the agent of this node gracefully, and wait until it is gone
    #[command(
        long_about = "Stop the agent of this node gracefully, and wait until it is gone: open connections get the time to end that the \
                      agent was given (--connection-termination-deadline), new ones are refused. Its pods stay captured unless it \
                      has --release-on-exit, so that nothing goes out in plain; `uninstall` lets go of them afterwards. Whoever \
                      supervises the agent may start it again at once: what is waited for is the end of this one.\n\n\
                      Exit codes: 0 it is gone; 1 it is not, or cannot be asked; 2 bad usage."
    )]
    Drain(drain::DrainArguments),
    /// Install the CNI plugin on this node, or with --remove take it away; an agent with --cni-install does so by itself
    #[command(
        long_about = "Install the CNI plugin on this node: its binary among the CNI's, and its entry in the CNI's configuration, which \
                      is left as it was otherwise. The settings are those of `agent`; docs/install.md says what is written."
    )]
    InstallCni(Box<node::InstallCni>),
    /// Remove from this node whatever agents with these directories have left; the settings are those of `agent`
    #[command(
        long_about = "Remove from this node whatever agents with these directories have left: programs, filters, rules, routes and \
                      sysctls in all pods, pins, records, sockets. The settings are those of `agent`. What cannot be removed is \
                      told, and the rest goes on.\n\n\
                      Exit codes: 0 nothing of ours is left; 1 something is, or nothing could be done; 2 bad usage; 3 an agent \
                      runs on these directories, and nothing was touched."
    )]
    Uninstall(Box<node::Uninstall>),
    /// Attach the eBPF programs to a namespace without a proxy: they count, and everything passes; Ctrl-C detaches
    Load(node::Load),
    /// Print the debug records of the programs of a pod, or of all pods, until Ctrl-C
    Trace(node::Trace),
    /// Show the version of this program, and of the agent if one answers
    Version(about::VersionArguments),
    /// Print a script by which a shell completes commands and flags
    Completions {
        /// Which shell
        #[arg(value_enum)]
        shell: Shell,
    },
    /// Print docs/configuration.md
    #[command(hide = true)]
    Reference,
    /// Print the manual page, or write those of all commands into a directory
    Man(about::ManArguments),
}

/// Whom to ask.
#[derive(Debug, Clone, Copy, clap::Args)]
struct Asked {
    /// Address of the agent's admin endpoint
    #[arg(long, default_value = "127.0.0.1:15000")]
    admin_addr: SocketAddr,
    /// Longest time for one answer of it
    #[arg(long, value_name = "SPAN", default_value_t = Span(TIMEOUT), value_parser = timeout)]
    timeout: Span,
}

impl Asked {
    fn client(self) -> Client {
        Client {
            address: self.admin_addr,
            timeout: self.timeout.0,
        }
    }
}

/// What to ask, and in which form to tell the answer.
#[derive(Debug, Clone, Copy, clap::Args)]
struct Question {
    #[command(flatten)]
    asked: Asked,
    #[command(flatten)]
    output: output::Output,
}

fn timeout(text: &str) -> Result<Span, String> {
    match text.parse::<Span>() {
        Ok(span) if span.0.is_zero() => Err("nothing is answered in no time".to_owned()),
        Ok(span) => Ok(span),
        Err(error) => Err(error.to_string()),
    }
}

/// Whether a pod is meant by `NAME` or `NAMESPACE/NAME`.
fn is_pod(wanted: &str, namespace: &str, name: &str) -> bool {
    match wanted.split_once('/') {
        Some(wanted) => wanted == (namespace, name),
        None => wanted == name,
    }
}

/// Exit code of `uninstall` where an agent runs.
const AGENT_RUNS: u8 = 3;

/// Exit code of `certs` where something ends soon.
const EXPIRING: u8 = 4;

/// Does what the arguments say. Bad usage is told by clap, with exit code 2.
pub fn main() -> ExitCode {
    let done = |result: anyhow::Result<()>| result.map(|()| ExitCode::SUCCESS);
    let result = match Arguments::parse().command {
        Command::Agent(run) => done(node::agent(*run)),
        Command::Status(arguments) => done(pods::status(&arguments)),
        Command::Pods(arguments) => done(pods::pods(&arguments)),
        Command::Connections(arguments) => done(flows::connections(&arguments)),
        Command::Flows(arguments) => done(flows::flows(&arguments)),
        Command::Certs(arguments) => certs::certs(&arguments).map(|is_good| match is_good {
            true => ExitCode::SUCCESS,
            false => EXPIRING.into(),
        }),
        Command::Doctor(arguments) => doctor::doctor(*arguments).map(|is_well| match is_well {
            true => ExitCode::SUCCESS,
            false => ExitCode::FAILURE,
        }),
        Command::Dump(arguments) => done(about::dump(&arguments)),
        Command::Drain(arguments) => done(drain::drain(&arguments)),
        Command::InstallCni(arguments) => done(node::install_cni(*arguments)),
        Command::Uninstall(arguments) => done(node::uninstall(*arguments)),
        Command::Load(arguments) => done(node::load(arguments)),
        Command::Trace(arguments) => done(node::trace(&arguments)),
        Command::Version(arguments) => done(about::version(&arguments)),
        Command::Completions { shell } => done(about::completions(shell)),
        Command::Reference => done(output::print(reference::markdown()).map_err(Into::into)),
        Command::Man(arguments) => done(about::man(&arguments)),
    };
    result.unwrap_or_else(|error| failed(&error))
}

fn failed(error: &anyhow::Error) -> ExitCode {
    // Whoever read it has had enough, and did not ask for more.
    if error
        .downcast_ref::<output::Unwritten>()
        .is_some_and(output::Unwritten::is_closed)
    {
        return ExitCode::SUCCESS;
    }
    let line = match error.downcast_ref::<app::Error>() {
        Some(error) => app::explain(error),
        None => Chain(error.as_ref()).to_string(),
    };
    let _ = writeln!(io::stderr(), "redirector: {line}");
    match error.downcast_ref::<uninstall::Error>() {
        Some(uninstall::Error::AgentRuns { .. }) => AGENT_RUNS.into(),
        _ => ExitCode::FAILURE,
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_arguments_are_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn a_pod_is_meant_by_its_name_with_or_without_its_namespace() {
        for (wanted, expected) in [
            ("web", true),
            ("shop/web", true),
            ("bank/web", false),
            ("shop/", false),
            ("", false),
        ] {
            assert_eq!(is_pod(wanted, "shop", "web"), expected, "{wanted}");
        }
    }

    #[test]
    fn what_cannot_be_meant_is_refused() {
        for wrong in [
            &["status", "-o", "xml"][..],
            &["status", "--timeout", "0s"],
            &["pods", "--state", "gone"],
            &["flows", "--security", "tls"],
            &["certs", "--warn-within", "soon"],
            &["completions"],
            &["drain", "now"],
        ] {
            let arguments = std::iter::once("redirector").chain(wrong.iter().copied());
            let error = Arguments::try_parse_from(arguments).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{wrong:?}: {error}");
        }
    }
}
