//! The reference of the settings, as docs/configuration.md has it: made of what the command line says of them.

use std::fmt::Write as _;

use clap::{Arg, Args, Command};

use super::settings::Settings;

/// What is above the table.
const HEAD: &str = "\
# Configuration

This file is made by `cargo xtask docs` of what the program says of its settings; a test fails where it is not as they are.

Every setting can be given in three ways, and the first of these that gives it wins:

1. the flag, as `--redirect ebpf` or `--redirect=ebpf`; of switches the flag alone means `true`
2. the environment; an empty variable is as good as none, and of two variables the first counts
3. a file in YAML, named by `--config FILE`, whose keys are the flags' names without the dashes before them; unknown keys are refused

`redirector agent --check` reads all of that and the files that it names, prints what came out as JSON, and ends with 1 where something is
wrong. The same settings are those of `doctor`, `install-cni` and `uninstall`. Times are written as `5m`, `90s`, `1h30m` or `200ms`.

A file that says the same as the flags `--state-dir /var/lib/redirector --strict --trust-domain-alias a,b`:

    state-dir: /var/lib/redirector
    strict: true
    trust-domain-alias: [a, b]

";

/// Variables that no flag has.
const ENVIRONMENT: [(&str, &str); 5] = [
    (
        "XDS_HEADER_*",
        "Header of the requests to the control plane, by the name that follows",
    ),
    (
        "CA_HEADER_*",
        "Header of the requests to the certificate authority, by the name that follows",
    ),
    (
        "ISTIO_META_*",
        "What the control plane is told of this agent by the name that follows, as text",
    ),
    ("ISTIO_METAJSON_*", "The same, as JSON"),
    (
        "KUBERNETES_SERVICE_HOST, KUBERNETES_SERVICE_PORT",
        "Where the API server is, as Kubernetes tells its pods; without a kubeconfig",
    ),
];

/// The whole file.
pub fn markdown() -> String {
    let mut out = HEAD.to_owned();
    out.push_str("| flag and key | environment | default | meaning |\n|---|---|---|---|\n");
    let command = Settings::augment_args(Command::new("agent"));
    for argument in command.get_arguments() {
        let Setting {
            variables,
            default,
            meaning,
        } = Setting::of(argument);
        let name = argument.get_long().unwrap_or_default();
        let variables: Vec<_> = variables.iter().map(|variable| code(variable)).collect();
        // Writing to a String does not fail.
        let _ = writeln!(
            out,
            "| `{name}` | {} | {} | {} |",
            variables.join(", "),
            default.as_deref().map(code).unwrap_or_default(),
            cell(&meaning)
        );
    }
    out.push_str(
        "\nVariables beside these, which have no flag and no key:\n\n| environment | meaning |\n|---|---|\n",
    );
    for (variable, meaning) in ENVIRONMENT {
        let _ = writeln!(out, "| {} | {meaning} |", code(variable));
    }
    out
}

fn code(text: &str) -> String {
    format!("`{text}`")
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

/// A setting as its help says it: `MEANING [default: VALUE] [env: NAME] [env: NAME]`.
#[derive(Debug, PartialEq)]
struct Setting {
    variables: Vec<String>,
    default: Option<String>,
    meaning: String,
}

impl Setting {
    fn of(argument: &Arg) -> Self {
        let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
        let mut setting = Self::parse(&help);
        // A switch that says nothing else is off.
        let is_switch = argument
            .get_num_args()
            .is_some_and(|values| values.min_values() == 0);
        if is_switch && setting.default.is_none() {
            setting.default = Some("false".to_owned());
        }
        setting
    }

    fn parse(help: &str) -> Self {
        let mut parts = help.split(" [env: ");
        let text = parts.next().unwrap_or_default();
        // What follows a comma is on how it is written.
        let name = |part: &str| part.split([']', ',']).next().unwrap_or_default().to_owned();
        let variables = parts.map(name).collect();
        // An address has brackets of its own.
        let (meaning, default) = match text.split_once(" [default: ") {
            Some((meaning, default)) => (meaning, default.strip_suffix(']')),
            None => (text, None),
        };
        Self {
            variables,
            default: default.map(str::to_owned),
            meaning: meaning.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_help_text_is_taken_apart() {
        let setting = |variables: &[&str], default: Option<&str>| Setting {
            variables: variables.iter().map(ToString::to_string).collect(),
            default: default.map(str::to_owned),
            meaning: "What it is".to_owned(),
        };
        for (help, expected) in [
            ("What it is", setting(&[], None)),
            ("What it is [default: [::]:1]", setting(&[], Some("[::]:1"))),
            ("What it is [env: A] [env: B]", setting(&["A", "B"], None)),
            ("What it is [default: x y] [env: A]", setting(&["A"], Some("x y"))),
            ("What it is [env: A, with commas between]", setting(&["A"], None)),
        ] {
            assert_eq!(Setting::parse(help), expected, "{help}");
        }
    }

    #[test]
    fn the_documentation_is_what_the_program_says() {
        let written = include_str!("../../../docs/configuration.md");
        let mut lines = written.lines();
        for line in markdown().lines() {
            assert_eq!(
                lines.next(),
                Some(line),
                "docs/configuration.md is not as the settings are: cargo xtask docs makes it anew"
            );
        }
        assert_eq!(
            lines.next(),
            None,
            "docs/configuration.md: cargo xtask docs makes it anew"
        );
    }

    #[test]
    fn every_setting_has_a_meaning_and_none_holds_what_a_table_does_not() {
        let command = Settings::augment_args(Command::new("agent"));
        let mut count = 0;
        for argument in command.get_arguments() {
            let setting = Setting::of(argument);
            assert!(setting.meaning.len() > 8, "{setting:?}");
            assert!(!setting.meaning.contains(['[', '\n']), "{setting:?}");
            count += 1;
        }
        assert!(count > 60, "{count}");
    }
}
