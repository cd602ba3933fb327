//! `redirector doctor`: prints what `doctor` has looked at.

use std::fmt::Write as _;

use serde_json::json;

use super::{
    node::Agent,
    output::{Form, Output, Screen, Tone, harmless, print, structured},
};
use crate::{
    app,
    config::{Config, values::Span},
    doctor::{self, Check, DEADLINE, State},
    telemetry::Chain,
};

#[derive(Debug, clap::Args)]
pub(super) struct DoctorArguments {
    #[command(flatten)]
    output: Output,
    /// Longest time for each group of checks; they are made at one time
    #[arg(long, value_name = "SPAN", default_value_t = Span(DEADLINE))]
    deadline: Span,
    #[command(flatten)]
    agent: Agent,
}

/// Whether nothing has failed.
pub(super) fn doctor(arguments: DoctorArguments) -> anyhow::Result<bool> {
    let DoctorArguments {
        output,
        deadline,
        agent,
    } = arguments;
    let config = agent.config()?;
    let mut checks = vec![files(&config)];
    checks.extend(doctor::run(&config, deadline.0));
    print(match output.form {
        Form::Table | Form::Wide => render(&checks, Screen::of_stdout()),
        form => structured(&json!({ "checks": checks }), form)?,
    })?;
    Ok(checks.iter().all(|check| check.state != State::Failed))
}

/// Those that the settings name, read as an agent reads them at its start.
fn files(config: &Config) -> Check {
    let id = "settings.files";
    match app::check_files(config) {
        Ok(()) => Check::ok(
            id,
            "the files of workloads and rules that the settings name can be read",
        ),
        Err(error) => Check::failed(
            id,
            Chain(&error).to_string(),
            "mend the file, or name another with --workloads or --rules",
        ),
    }
}

fn render(checks: &[Check], screen: Screen) -> String {
    let mut out = String::new();
    let width = checks
        .iter()
        .map(|check| check.id.len())
        .max()
        .unwrap_or_default();
    for Check {
        id,
        state,
        seen,
        hint,
    } in checks
    {
        let (word, tone) = match state {
            State::Ok => ("ok", Tone::Good),
            State::Warning => ("warning", Tone::Warning),
            State::Failed => ("FAILED", Tone::Bad),
            State::NotAsked => ("not asked", Tone::Faint),
        };
        let word = tone.paint(&format!("{word:9}"), screen);
        // Writing to a String does not fail.
        let _ = writeln!(out, "{word}  {id:width$}  {}", harmless(seen));
        if let Some(hint) = hint {
            let _ = writeln!(out, "{:11}{:width$}  -> {}", "", "", harmless(hint));
        }
    }
    let count = |wanted: State| checks.iter().filter(|check| check.state == wanted).count();
    let _ = writeln!(
        out,
        "{} ok, {} warnings, {} failed, {} not asked",
        count(State::Ok),
        count(State::Warning),
        count(State::Failed),
        count(State::NotAsked)
    );
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_check_is_a_line_with_its_hint_below() {
        let check = |id, state, hint: Option<&str>| Check {
            id,
            state,
            seen: "seen\nas it is".to_owned(),
            hint: hint.map(str::to_owned),
        };
        let checks = [
            check("kernel.version", State::Ok, None),
            check("clock", State::Failed, Some("set it")),
            check("remote.ca", State::NotAsked, None),
        ];
        assert_eq!(
            render(&checks, Screen::default()),
            "ok         kernel.version  seen\u{fffd}as it is\n\
             FAILED     clock           seen\u{fffd}as it is\n           \u{20}               -> set it\n\
             not asked  remote.ca       seen\u{fffd}as it is\n\
             1 ok, 0 warnings, 1 failed, 1 not asked\n"
        );
    }
}
