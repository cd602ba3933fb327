//! What this program and the agent say of themselves: `dump`, `version`, `completions` and `man`.

use std::{
    fs, io,
    io::Write as _,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use anyhow::Context;
use clap::{Command, CommandFactory};
use clap_complete::Shell;
use serde_json::{Value, json};

use super::{
    Arguments, Asked, Question,
    output::{Form, print, structured},
};
use crate::admin::client::Error;

#[derive(Debug, clap::Args)]
pub(super) struct DumpArguments {
    #[command(flatten)]
    asked: Asked,
    /// Write it to this file, which nobody else may read, instead of to standard output
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
pub(super) struct VersionArguments {
    #[command(flatten)]
    question: Question,
}

#[derive(Debug, clap::Args)]
pub(super) struct ManArguments {
    /// Write the pages of all commands into this directory, instead of the first one to standard output
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

pub(super) fn dump(arguments: &DumpArguments) -> anyhow::Result<()> {
    let client = arguments.asked.client();
    let path = "/config_dump";
    let dump = client.get(path)?;
    // It comes in pieces, and its end alone says that it is whole.
    client.check_json(path, &dump)?;
    match &arguments.file {
        Some(path) => write(path, &dump).with_context(|| format!("cannot write {}", path.display())),
        None => Ok(print(dump)?),
    }
}

/// Whole or not at all: a file beside it takes its name at the end.
fn write(path: &Path, text: &str) -> io::Result<()> {
    let Some(name) = path.file_name() else {
        return Err(io::ErrorKind::IsADirectory.into());
    };
    let mut partial = name.to_owned();
    partial.push(".partial");
    let partial = path.with_file_name(partial);
    let mut options = fs::OpenOptions::new();
    let file = options
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&partial);
    let written = file
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .and_then(|()| fs::rename(&partial, path));
    if written.is_err() {
        let _ = fs::remove_file(&partial);
    }
    written
}

pub(super) fn version(arguments: &VersionArguments) -> anyhow::Result<()> {
    let Question { asked, output } = arguments.question;
    let own = env!("CARGO_PKG_VERSION");
    let client = asked.client();
    // No agent is no fault here.
    let agent = match client.json::<Value>("/version") {
        Ok(built) => built["version"].as_str().map(str::to_owned),
        Err(Error::Unreachable { .. }) => None,
        Err(error) => return Err(error.into()),
    };
    print(match output.form {
        Form::Table | Form::Wide => {
            let agent = agent.unwrap_or_else(|| format!("none at {}", client.address));
            format!("redirector {own}\nagent      {agent}\n")
        }
        form => structured(&json!({ "version": own, "agent": agent }), form)?,
    })?;
    Ok(())
}

pub(super) fn completions(shell: Shell) -> anyhow::Result<()> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut Arguments::command(), "redirector", &mut text);
    Ok(print(text)?)
}

pub(super) fn man(arguments: &ManArguments) -> anyhow::Result<()> {
    let mut command = Arguments::command().disable_help_subcommand(true);
    command.build();
    match &arguments.dir {
        Some(dir) => {
            fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
            for (name, page) in pages(&command)? {
                let path = dir.join(name);
                fs::write(&path, page).with_context(|| format!("cannot write {}", path.display()))?;
            }
            Ok(())
        }
        None => Ok(print(page(&command)?)?),
    }
}

/// The page of a command and those of all below it.
fn pages(command: &Command) -> io::Result<Vec<(String, Vec<u8>)>> {
    let name = command.get_display_name().unwrap_or(command.get_name());
    let mut pages = vec![(format!("{name}.1"), page(command)?)];
    for below in command.get_subcommands().filter(|command| !command.is_hide_set()) {
        pages.extend(self::pages(below)?);
    }
    Ok(pages)
}

fn page(command: &Command) -> io::Result<Vec<u8>> {
    let mut page = Vec::new();
    clap_mangen::Man::new(command.clone()).render(&mut page)?;
    Ok(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_a_page() {
        let mut command = Arguments::command().disable_help_subcommand(true);
        command.build();
        let pages = pages(&command).unwrap();
        let named = |name: &str| pages.iter().find(|(page, _)| page == name);
        for name in [
            "redirector.1",
            "redirector-agent.1",
            "redirector-install-cni.1",
            "redirector-flows.1",
        ] {
            let (_, page) = named(name).unwrap_or_else(|| panic!("{name} is not among them"));
            assert!(String::from_utf8_lossy(page).contains(".TH redirector"), "{name}");
        }
    }

    #[test]
    fn a_dump_is_written_whole_or_not_at_all() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("dump.json");
        fs::write(&path, "before").unwrap();
        write(&path, "after").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "after");
        let occupied = directory.path().join("directory");
        fs::create_dir(&occupied).unwrap();
        assert!(write(&occupied, "x").is_err());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
    }
}
