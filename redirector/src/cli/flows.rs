//! `redirector connections`: what is open in the pods. `redirector flows`: what has ended there, as a line each.

use std::{
    fmt::Write as _,
    io::{self, Write as _},
    thread,
    time::Duration,
};

use serde::Deserialize;
use serde_json::Value;

use super::{
    Asked, Question, is_pod,
    output::{Cell, Form, Screen, Table, Tone, harmless, print, structured},
    words,
};
use crate::admin::client::{Client, Error};

/// As many as one answer has.
const MOST: usize = 10_000;

/// How long an agent may wait for something to tell.
const WAIT: Duration = Duration::from_secs(15);

/// Between questions of whom the agent has no place to wait at.
const PAUSE: Duration = Duration::from_secs(1);

#[derive(Debug, clap::Args)]
pub(super) struct ConnectionsArguments {
    #[command(flatten)]
    question: Question,
    #[command(flatten)]
    wanted: Wanted,
}

#[derive(Debug, clap::Args)]
pub(super) struct FlowsArguments {
    #[command(flatten)]
    asked: Asked,
    #[command(flatten)]
    wanted: Wanted,
    /// Form of the output
    #[arg(short, long, value_enum, default_value_t, value_name = "FORM")]
    output: Lines,
    /// Go on with what ends from now on, until Ctrl-C or until the agent stops
    #[arg(short, long)]
    follow: bool,
    /// Only what has failed or was refused
    #[arg(long)]
    failed: bool,
    /// Only so many of the last that the agent remembers
    #[arg(long, value_name = "COUNT", default_value_t = MOST, hide_default_value = true)]
    last: usize,
}

/// The form of lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
enum Lines {
    /// A line for each connection
    #[default]
    Text,
    /// A line for each connection: an object, as the agent says it
    Json,
}

/// Which connections.
#[derive(Debug, Default, clap::Args)]
struct Wanted {
    /// Only those of this pod of the node, as NAME or NAMESPACE/NAME
    #[arg(long)]
    pod: Option<String>,
    /// Only those of pods of this namespace
    #[arg(short, long)]
    namespace: Option<String>,
    /// Only those that a pod opens, or that it gets
    #[arg(long, value_enum)]
    direction: Option<Direction>,
    /// Only those that are protected so, or not at all; may be given again
    #[arg(long, value_enum)]
    security: Vec<Security>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Direction {
    Outbound,
    Inbound,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Security {
    #[value(name = "mutual_tls", alias = "mutual-tls")]
    MutualTls,
    Plaintext,
    #[value(name = "same_node", alias = "same-node")]
    SameNode,
}

/// What is read of a connection; what else the agent says goes on as it is.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Flow {
    direction: String,
    started: String,
    duration_ms: u64,
    state: String,
    security: Option<String>,
    src: End,
    dst: End,
    pod: Pod,
    bytes_sent: u64,
    bytes_received: u64,
    protocol: String,
    policy: Option<String>,
    response_flags: String,
    error: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct End {
    addr: Option<String>,
    hbone_addr: Option<String>,
    service: Option<String>,
    workload: Option<String>,
    namespace: Option<String>,
    identity: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Pod {
    namespace: String,
    name: String,
}

#[derive(Debug, Deserialize)]
struct Open {
    connections: Vec<Value>,
    total: usize,
}

#[derive(Debug, Deserialize)]
struct Ended {
    next: u64,
    lost: u64,
    flows: Vec<Value>,
}

impl Wanted {
    fn has(&self, flow: &Flow) -> bool {
        let Pod { namespace, name } = &flow.pod;
        let direction = self.direction.is_none_or(|wanted| {
            flow.direction
                == match wanted {
                    Direction::Outbound => "outbound",
                    Direction::Inbound => "inbound",
                }
        });
        let is = |wanted: &Security| {
            flow.security.as_deref()
                == Some(match wanted {
                    Security::MutualTls => "mutual_tls",
                    Security::Plaintext => "plaintext",
                    Security::SameNode => "same_node",
                })
        };
        direction
            && self.pod.as_deref().is_none_or(|pod| is_pod(pod, namespace, name))
            && self.namespace.as_ref().is_none_or(|wanted| wanted == namespace)
            && (self.security.is_empty() || self.security.iter().any(is))
    }

    /// Those that are wanted, as they were said and as they are read.
    fn of(&self, client: Client, path: &str, said: Vec<Value>) -> Result<Vec<(Value, Flow)>, Error> {
        let mut chosen = Vec::new();
        for value in said {
            let flow = Flow::deserialize(&value).map_err(|error| Error::Unreadable {
                address: client.address,
                path: path.to_owned(),
                why: error.to_string(),
            })?;
            if self.has(&flow) {
                chosen.push((value, flow));
            }
        }
        Ok(chosen)
    }
}

impl End {
    /// The workload where it is known, and where it is called.
    fn shown(&self, is_wide: bool) -> String {
        let named = match (&self.namespace, &self.workload) {
            (Some(namespace), Some(workload)) => Some(format!("{namespace}/{workload}")),
            (_, workload) => workload.clone(),
        };
        let addr = self.hbone_addr.as_ref().or(self.addr.as_ref());
        let mut words: Vec<String> = named.into_iter().chain(addr.cloned()).collect();
        if let Some(service) = &self.service {
            words.push(format!("({service})"));
        }
        if let Some(identity) = self.identity.as_ref().filter(|_| is_wide) {
            words.push(identity.clone());
        }
        words.join(" ")
    }
}

pub(super) fn connections(arguments: &ConnectionsArguments) -> anyhow::Result<()> {
    let ConnectionsArguments { question, wanted } = arguments;
    let Question { asked, output } = question;
    let client = asked.client();
    let path = format!("/connections?limit={MOST}");
    let open: Open = client.json(&path)?;
    let told = open.connections.len();
    let chosen = wanted.of(client, &path, open.connections)?;
    if told < open.total {
        let _ = writeln!(
            io::stderr(),
            "redirector: {told} of {} connections are looked at: the agent tells of no more at a time",
            open.total
        );
    }
    print(match output.form {
        Form::Table | Form::Wide => table(&chosen, output.form).render(Screen::of_stdout()),
        form => {
            let values: Vec<_> = chosen.into_iter().map(|(value, _)| value).collect();
            structured(
                &serde_json::json!({ "connections": values, "total": open.total }),
                form,
            )?
        }
    })?;
    Ok(())
}

fn table(connections: &[(Value, Flow)], form: Form) -> Table {
    let is_wide = form == Form::Wide;
    let mut heads = vec![
        "POD",
        "DIRECTION",
        "SOURCE",
        "DESTINATION",
        "SECURITY",
        "AGE",
        "SENT",
        "RECEIVED",
    ];
    if is_wide {
        heads.extend(["PROTOCOL", "POLICY", "STARTED"]);
    }
    let mut table = Table::new(&heads, form);
    for (_, flow) in connections {
        let mut row = vec![
            Cell::from(format!("{}/{}", flow.pod.namespace, flow.pod.name)),
            Cell::from(&flow.direction),
            Cell::from(flow.src.shown(is_wide)),
            Cell::from(flow.dst.shown(is_wide)),
            Cell::toned(flow.security(), flow.tone()),
            Cell::from(words::span(Duration::from_millis(flow.duration_ms))),
            Cell::from(words::bytes(flow.bytes_sent)),
            Cell::from(words::bytes(flow.bytes_received)),
        ];
        if is_wide {
            row.push(Cell::from(&flow.protocol));
            row.push(Cell::from(flow.policy.as_deref().unwrap_or_default()));
            row.push(Cell::from(&flow.started));
        }
        table.row(row, Vec::new());
    }
    table
}

pub(super) fn flows(arguments: &FlowsArguments) -> anyhow::Result<()> {
    let client = arguments.asked.client();
    let screen = Screen::of_stdout();
    let path = format!("/flows?limit={MOST}");
    let ended: Ended = client.json(&path)?;
    let mut chosen = arguments.chosen(client, &path, ended.flows)?;
    chosen.drain(..chosen.len().saturating_sub(arguments.last));
    arguments.print(&chosen, screen)?;
    let mut next = ended.next;
    if !arguments.follow {
        return Ok(());
    }
    loop {
        let ended = news(client, next)?;
        if ended.lost > 0 {
            let _ = writeln!(
                io::stderr(),
                "redirector: {} connections are left out: they ended faster than they were read",
                ended.lost
            );
        }
        next = ended.next;
        let chosen = arguments.chosen(client, "/flows", ended.flows)?;
        arguments.print(&chosen, screen)?;
    }
}

/// What has ended since; waits for it where it can.
fn news(client: Client, after: u64) -> Result<Ended, Error> {
    let patient = Client {
        timeout: client.timeout + WAIT,
        ..client
    };
    let path = format!("/flows?after={after}&limit={MOST}");
    match patient.json(&format!("{path}&wait={}", WAIT.as_secs())) {
        // Too many wait already.
        Err(Error::Status { status: 503, .. }) => {
            thread::sleep(PAUSE);
            client.json(&path)
        }
        answer => answer,
    }
}

impl FlowsArguments {
    fn chosen(&self, client: Client, path: &str, said: Vec<Value>) -> Result<Vec<(Value, Flow)>, Error> {
        let mut chosen = self.wanted.of(client, path, said)?;
        chosen.retain(|(_, flow)| !self.failed || flow.state == "failed");
        Ok(chosen)
    }

    fn print(&self, flows: &[(Value, Flow)], screen: Screen) -> anyhow::Result<()> {
        let mut out = String::new();
        for (value, flow) in flows {
            // Writing to a String does not fail.
            let _ = match self.output {
                Lines::Text => writeln!(out, "{}", flow.line(screen)),
                Lines::Json => writeln!(out, "{value}"),
            };
        }
        Ok(print(out)?)
    }
}

impl Flow {
    fn security(&self) -> &str {
        self.security.as_deref().unwrap_or_default()
    }

    fn tone(&self) -> Tone {
        match self.security() {
            "mutual_tls" => Tone::Good,
            "plaintext" => Tone::Warning,
            _ => Tone::Plain,
        }
    }

    fn line(&self, screen: Screen) -> String {
        let Pod { namespace, name } = &self.pod;
        let security = match self.security() {
            "" => "-",
            security => security,
        };
        let outcome = match self.state.as_str() {
            "failed" => {
                let flag = &self.response_flags;
                let why = self.error.as_deref().unwrap_or_default();
                Tone::Bad.paint(&harmless(&format!("failed [{flag}] {why}")), screen)
            }
            state => harmless(state),
        };
        let policy = self.policy.as_ref().map(|policy| format!("  policy {policy}"));
        format!(
            "{}  {}  {}  {}  {}, sent {}, received {}  {outcome}",
            harmless(&self.started),
            harmless(&format!("{namespace}/{name} {}", self.direction)),
            harmless(&format!("{} -> {}", self.src.shown(false), self.dst.shown(false))),
            self.tone().paint(&harmless(security), screen),
            words::span(Duration::from_millis(self.duration_ms)),
            words::bytes(self.bytes_sent),
            words::bytes(self.bytes_received),
        ) + &harmless(&policy.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn said() -> Value {
        json!({
            "id": 7, "direction": "outbound", "started": "2026-12-03T06:35:30.123Z", "durationMs": 1500, "state": "complete",
            "security": "mutual_tls",
            "src": { "addr": "10.0.0.1:4000", "workload": "web", "namespace": "shop", "identity": "spiffe://td/ns/shop/sa/web" },
            "dst": { "addr": "10.0.0.2:15008", "hboneAddr": "10.0.0.2:80", "service": "db.shop.svc", "workload": null },
            "pod": { "uid": "u", "namespace": "shop", "name": "web" },
            "bytesSent": 5, "bytesReceived": 2048, "protocol": "HBONE", "policy": null, "responseFlags": "-", "error": null,
        })
    }

    fn with(changes: Value) -> Flow {
        let mut value = said();
        for (key, change) in changes.as_object().unwrap() {
            value[key] = change.clone();
        }
        Flow::deserialize(&value).unwrap()
    }

    #[test]
    fn a_flow_is_a_line() {
        assert_eq!(
            with(json!({})).line(Screen::default()),
            "2026-12-03T06:35:30.123Z  shop/web outbound  shop/web 10.0.0.1:4000 -> 10.0.0.2:80 (db.shop.svc)  mutual_tls  \
             1 s, sent 5 B, received 2.0 KiB  complete"
        );
        let failed = with(json!({
            "state": "failed", "security": null, "responseFlags": "DENY", "policy": "shop/no", "error": "refused\nby \u{1b}[2J",
        }));
        let line = failed.line(Screen::default());
        assert!(
            line.ends_with("  -  1 s, sent 5 B, received 2.0 KiB  failed [DENY] refused\u{fffd}by \u{fffd}[2J  policy shop/no"),
            "{line}"
        );
    }

    #[test]
    fn connections_are_chosen_by_all_that_is_asked() {
        let flow = with(json!({}));
        let plain = with(json!({ "security": "plaintext", "direction": "inbound" }));
        let none = Wanted::default();
        assert!(none.has(&flow) && none.has(&plain));
        let pod = |pod: &str| Wanted {
            pod: Some(pod.to_owned()),
            ..Wanted::default()
        };
        assert!(pod("web").has(&flow) && pod("shop/web").has(&flow));
        assert!(!pod("bank/web").has(&flow) && !pod("we").has(&flow));
        let outbound = Wanted {
            direction: Some(Direction::Outbound),
            ..Wanted::default()
        };
        assert!(outbound.has(&flow) && !outbound.has(&plain));
        let security = Wanted {
            security: vec![Security::Plaintext, Security::SameNode],
            namespace: Some("shop".to_owned()),
            ..Wanted::default()
        };
        assert!(!security.has(&flow) && security.has(&plain));
    }
}
