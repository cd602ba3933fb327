//! `redirector status` and `redirector pods`.

use std::{fmt::Write as _, net::SocketAddr};

use anyhow::Context;
use serde_json::{Map, Value};

use super::{
    Question,
    output::{Cell, Form, Screen, Table, Tone, harmless, print, structured},
};
use crate::{
    admin::PodsView,
    pods::status::{Missed, PodStatus, State},
};

#[derive(Debug, clap::Args)]
pub(super) struct StatusArguments {
    #[command(flatten)]
    question: Question,
}

#[derive(Debug, clap::Args)]
pub(super) struct PodsArguments {
    #[command(flatten)]
    question: Question,
    #[command(flatten)]
    wanted: Wanted,
}

/// Which pods.
#[derive(Debug, Default, clap::Args)]
struct Wanted {
    /// Only pods of this name, as NAME or NAMESPACE/NAME
    #[arg(value_name = "POD")]
    pod: Option<String>,
    /// Only pods of this namespace
    #[arg(short, long)]
    namespace: Option<String>,
    /// Only pods in this state; may be given again
    #[arg(long, value_enum)]
    state: Vec<Shown>,
}

/// A state, as it is named on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Shown {
    Starting,
    Captured,
    /// Captured, and not as it should be
    Impaired,
    NotCaptured,
    Stopping,
}

impl From<&PodStatus> for Shown {
    fn from(pod: &PodStatus) -> Self {
        match pod.state {
            State::Starting => Self::Starting,
            State::Captured if pod.impaired => Self::Impaired,
            State::Captured => Self::Captured,
            State::NotCaptured => Self::NotCaptured,
            State::Stopping => Self::Stopping,
        }
    }
}

impl Shown {
    fn cell(self) -> Cell {
        match self {
            Self::Starting => Cell::toned("starting", Tone::Warning),
            Self::Captured => Cell::toned("captured", Tone::Good),
            Self::Impaired => Cell::toned("IMPAIRED", Tone::Bad),
            Self::NotCaptured => Cell::toned("NOT CAPTURED", Tone::Bad),
            Self::Stopping => Cell::toned("stopping", Tone::Warning),
        }
    }
}

impl Wanted {
    fn has(&self, namespace: &str, name: &str, state: Shown) -> bool {
        let is_named = self
            .pod
            .as_deref()
            .is_none_or(|pod| super::is_pod(pod, namespace, name));
        is_named
            && self.namespace.as_deref().is_none_or(|wanted| wanted == namespace)
            && (self.state.is_empty() || self.state.contains(&state))
    }

    fn of(&self, mut view: PodsView) -> PodsView {
        let status = &mut view.status;
        status
            .pods
            .retain(|pod| self.has(&pod.namespace, &pod.name, pod.into()));
        view.missed
            .retain(|pod| self.has(&pod.namespace, &pod.name, Shown::NotCaptured));
        view
    }
}

pub(super) fn status(arguments: &StatusArguments) -> anyhow::Result<()> {
    let Question { asked, output } = arguments.question;
    let client = asked.client();
    let view: Value = client.json("/pods")?;
    let metrics = client.get("/metrics")?;
    print(match output.form {
        Form::Table | Form::Wide => {
            let view =
                serde_json::from_value(view).context("the agent is of another version than this program")?;
            render(client.address, &view, &metrics, output.form, Screen::of_stdout())
        }
        Form::Json | Form::Yaml => structured(&with_counters(client.address, view, &metrics), output.form)?,
    })?;
    Ok(())
}

pub(super) fn pods(arguments: &PodsArguments) -> anyhow::Result<()> {
    let PodsArguments { question, wanted } = arguments;
    let Question { asked, output } = question;
    let view: PodsView = asked.client().json("/pods")?;
    let view = wanted.of(view);
    print(match output.form {
        Form::Table | Form::Wide => {
            table(&view.status.pods, &view.missed, output.form).render(Screen::of_stdout())
        }
        Form::Json | Form::Yaml => {
            let shown = serde_json::json!({ "pods": view.status.pods, "missed": view.missed });
            structured(&shown, output.form)?
        }
    })?;
    Ok(())
}

/// What the agent says of itself, with its address and counters.
fn with_counters(address: SocketAddr, mut view: Value, metrics: &str) -> Value {
    let counters: Map<String, Value> = told(metrics)
        .filter_map(|line| {
            let (name, value) = line.rsplit_once(' ')?;
            let number: serde_json::Number = value.parse().ok()?;
            Some((name.to_owned(), Value::Number(number)))
        })
        .collect();
    if let Value::Object(fields) = &mut view {
        fields.insert("address".to_owned(), address.to_string().into());
        fields.insert("counters".to_owned(), counters.into());
    }
    view
}

/// The metrics that are not zero.
fn told(metrics: &str) -> impl Iterator<Item = &str> {
    metrics
        .lines()
        .filter(|line| !line.starts_with('#') && !line.is_empty() && !line.ends_with(" 0"))
}

fn render(address: SocketAddr, view: &PodsView, metrics: &str, form: Form, screen: Screen) -> String {
    let mut out = String::new();
    // Writing to a String does not fail.
    let ready = match view.ready {
        true => Tone::Good.paint("ready", screen),
        false => {
            let pending = harmless(&view.pending.join(", "));
            Tone::Bad.paint(&format!("not ready: {pending}"), screen)
        }
    };
    let _ = writeln!(
        out,
        "agent at {address}: {ready}; backend {}; pods {}",
        harmless(&view.backend),
        view.status.pods.len()
    );
    if let Some(file) = &view.cni_plugin {
        let _ = writeln!(out, "CNI plugin installed in {}", file.display());
    }
    if let Some(probes) = &view.probes {
        let _ = writeln!(
            out,
            "connections from this node that reach the pods directly: {probes}"
        );
    }
    if !view.status.pods.is_empty() || !view.missed.is_empty() {
        out.push_str(&table(&view.status.pods, &view.missed, form).render(screen));
    }
    let _ = writeln!(out, "counters that are not zero:");
    for line in told(metrics) {
        let _ = writeln!(out, "  {}", harmless(line));
    }
    out
}

fn table(pods: &[PodStatus], missed: &[Missed], form: Form) -> Table {
    let is_wide = form == Form::Wide;
    let mut heads = vec![
        "NAMESPACE",
        "NAME",
        "STATE",
        "STRICT",
        "ADDRESSES",
        "SERVICE-ACCOUNT",
        "UID",
    ];
    if is_wide {
        heads.extend(["NETNS", "NETNS-PATH"]);
    }
    let mut table = Table::new(&heads, form);
    for pod in pods {
        let state = Shown::from(pod);
        let addresses: Vec<_> = pod.addresses.iter().map(ToString::to_string).collect();
        let mut row = vec![
            Cell::from(&pod.namespace),
            Cell::from(&pod.name),
            state.cell(),
            Cell::from(if pod.strict { "strict" } else { "" }),
            Cell::from(addresses.join(",")),
            Cell::from(&pod.service_account),
            Cell::from(&pod.uid),
        ];
        if is_wide {
            let path = pod.netns_path.as_ref();
            row.push(Cell::from(format!("net:[{}]", pod.netns)));
            row.push(Cell::from(
                path.map_or_else(String::new, |path| path.display().to_string()),
            ));
        }
        table.row(row, note(pod.error.as_deref(), state));
    }
    for pod in missed {
        let mut row = vec![
            Cell::from(&pod.namespace),
            Cell::from(&pod.name),
            Shown::NotCaptured.cell(),
            Cell::from(""),
            Cell::from(""),
            Cell::from(""),
            Cell::from(&pod.uid),
        ];
        row.resize(heads.len(), Cell::from(""));
        table.row(row, note(Some(&pod.error), Shown::NotCaptured));
    }
    table
}

fn note(error: Option<&str>, state: Shown) -> Vec<Cell> {
    let tone = match state {
        Shown::NotCaptured | Shown::Impaired => Tone::Bad,
        _ => Tone::Warning,
    };
    error.map(|error| Cell::toned(error, tone)).into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pods::status::Status;

    fn pod(namespace: &str, name: &str, state: State) -> PodStatus {
        PodStatus {
            uid: format!("u-{name}"),
            name: name.to_owned(),
            namespace: namespace.to_owned(),
            service_account: "web".to_owned(),
            netns: 7,
            netns_path: None,
            addresses: vec!["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()],
            state,
            impaired: false,
            strict: false,
            error: (state == State::NotCaptured).then(|| "cannot look".to_owned()),
        }
    }

    fn view() -> PodsView {
        let strict = PodStatus {
            strict: true,
            error: Some("its newest rules are refused".to_owned()),
            ..pod("shop", "c", State::Captured)
        };
        PodsView {
            ready: false,
            pending: vec!["shutdown".to_owned()],
            backend: "test".to_owned(),
            cni_plugin: Some("/etc/cni/net.d/10-a.conflist".into()),
            probes: None,
            missed: vec![Missed {
                uid: "u-m".to_owned(),
                namespace: "shop".to_owned(),
                name: "m".to_owned(),
                error: "no namespace".to_owned(),
            }],
            status: Status {
                synced: true,
                pods: vec![
                    pod("shop", "a", State::Captured),
                    pod("bank", "a", State::NotCaptured),
                    strict,
                    PodStatus {
                        impaired: true,
                        error: Some("a listener is missing".to_owned()),
                        ..pod("shop", "d", State::Captured)
                    },
                ],
            },
        }
    }

    #[test]
    fn status_tells_what_is_wrong_and_where() {
        let metrics = "# HELP x\nx 0\ny{z=\"1\"} 5\n# EOF\n";
        let text = render(
            ([127, 0, 0, 1], 15000).into(),
            &view(),
            metrics,
            Form::Wide,
            Screen::default(),
        );
        for expected in [
            "agent at 127.0.0.1:15000: not ready: shutdown; backend test; pods 4\n",
            "CNI plugin installed in /etc/cni/net.d/10-a.conflist\n",
            "shop       a     captured      -       10.0.0.1,fd00::1  web              u-a  net:[7]  -\n",
            "bank       a     NOT CAPTURED  -       10.0.0.1,fd00::1  web              u-a  net:[7]  -\n    cannot look\n",
            "shop       c     captured      strict  10.0.0.1,fd00::1  web              u-c  net:[7]  -\n    its newest rules are refused\n",
            "shop       d     IMPAIRED      -       10.0.0.1,fd00::1  web              u-d  net:[7]  -\n    a listener is missing\n",
            "shop       m     NOT CAPTURED  -       -                 -                u-m  -        -\n    no namespace\n",
            "counters that are not zero:\n  y{z=\"1\"} 5\n",
        ] {
            assert!(text.contains(expected), "{expected} in {text}");
        }
    }

    #[test]
    fn the_counters_are_beside_what_the_agent_says() {
        let view = with_counters(
            ([127, 0, 0, 1], 15000).into(),
            serde_json::json!({ "ready": true, "new": 1 }),
            "y{z=\"a b\"} 5\nh_sum 0.25\nx 0\n",
        );
        let expected = serde_json::json!({
            "ready": true, "new": 1, "address": "127.0.0.1:15000", "counters": { "y{z=\"a b\"}": 5, "h_sum": 0.25 },
        });
        assert_eq!(view, expected);
    }

    #[test]
    fn pods_are_chosen_by_all_that_is_asked() {
        let named = |wanted: Wanted| {
            let view = wanted.of(view());
            let pods = view
                .status
                .pods
                .iter()
                .map(|pod| format!("{}/{}", pod.namespace, pod.name));
            let missed = view
                .missed
                .iter()
                .map(|pod| format!("{}/{}", pod.namespace, pod.name));
            pods.chain(missed).collect::<Vec<_>>()
        };
        assert_eq!(
            named(Wanted::default()),
            ["shop/a", "bank/a", "shop/c", "shop/d", "shop/m"]
        );
        let by_name = Wanted {
            pod: Some("a".to_owned()),
            ..Wanted::default()
        };
        assert_eq!(named(by_name), ["shop/a", "bank/a"]);
        let by_both = Wanted {
            pod: Some("bank/a".to_owned()),
            namespace: Some("shop".to_owned()),
            ..Wanted::default()
        };
        assert!(named(by_both).is_empty());
        let by_state = Wanted {
            state: vec![Shown::NotCaptured, Shown::Stopping],
            ..Wanted::default()
        };
        assert_eq!(named(by_state), ["bank/a", "shop/m"]);
    }
}
