//! The CNI plugin, chained after the one that makes the pod's network: ADD tells the agent of the pod and waits until it is
//! captured; DEL tells it that the pod goes. The result of the plugins before is passed on unchanged. docs/cni.md has the rest.
//!
//! `bin/redirector-cni` runs it. No tokio and no threads: one bounded exchange over the agent's socket. When the agent cannot
//! be reached ADD fails, so that no pod runs outside the mesh unnoticed.

use std::{
    any::Any,
    io::Read,
    panic::{AssertUnwindSafe, catch_unwind},
    path::PathBuf,
    time::{Duration, Instant},
};

use serde_json::json;

use self::{
    error::Error,
    log::{Level, Log},
    network::{DEFAULT_VERSION, Network, Pod, VERSIONS, required},
};
use super::entry::Entry;
use crate::telemetry::Chain;

mod agent;
mod error;
mod log;
mod network;

/// Time for an ADD: longer than the agent's own (30 s), shorter than kubelet's (4 min).
const ADD_DEADLINE: Duration = Duration::from_secs(40);

/// Time for what is not worth waiting for: a DEL, and the agent's word in a CHECK.
const SHORT_DEADLINE: Duration = Duration::from_secs(5);

/// The agent's answer to a CHECK of a pod that it has and does not capture.
const NOT_CAPTURED: u16 = 409;

/// What the runtime passes: environment, by name.
pub type Environment<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Runs one command. What is returned, success or failure, belongs on standard output, where nothing else may be.
pub fn run(environment: Environment<'_>, input: &mut dyn Read) -> Result<String, String> {
    let mut call = Call {
        environment,
        command: String::new(),
        version: DEFAULT_VERSION.to_owned(),
        log: None,
    };
    let result = catch_unwind(AssertUnwindSafe(|| call.dispatch(input)))
        .unwrap_or_else(|panic| Err(Error::Panic(panic_text(&*panic))));
    let Call {
        command,
        version,
        log,
        ..
    } = call;
    let answer = match &result {
        Ok(answer) => Ok(answer.clone()),
        // Whatever is wrong, a pod must be able to go.
        Err(_) if command == "DEL" => Ok(String::new()),
        Err(error) => Err(error.to_json(&version)),
    };
    let told = catch_unwind(AssertUnwindSafe(|| {
        let Some(mut log) = log else { return };
        if let Err(error) = &result {
            let level = if answer.is_ok() { Level::Warn } else { Level::Error };
            let code = error.code().to_string();
            log.record(level, &Chain(error).to_string(), &[("code", &code)]);
        }
        log.tell_agent();
    }));
    // Its panic is on standard error; the command's own answer stands.
    drop(told);
    answer
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("it has no text")
        .to_owned()
}

/// One call of the runtime, as far as it is understood.
struct Call<'a> {
    environment: Environment<'a>,
    command: String,
    /// The CNI version of what is answered.
    version: String,
    /// There from when the configuration is read.
    log: Option<Log>,
}

impl Call<'_> {
    fn dispatch(&mut self, input: &mut dyn Read) -> Result<String, Error> {
        self.command = required(self.environment, "CNI_COMMAND")?;
        match self.command.as_str() {
            "VERSION" => {
                let asked = network::read(input)
                    .ok()
                    .and_then(|text| network::asked_version(&text));
                let version = asked.as_deref().unwrap_or(VERSIONS[VERSIONS.len() - 1]);
                Ok(json!({ "cniVersion": version, "supportedVersions": VERSIONS }).to_string())
            }
            // Nothing to collect: of what is gone, the agent lets go by itself.
            "GC" => Ok(String::new()),
            "DEL" => {
                let text = network::read(input).unwrap_or_default();
                self.delete(Network::parse(&text).map(|network| network.entry))
            }
            "ADD" | "CHECK" | "STATUS" => {
                let text = network::read(input)?;
                let network = Network::parse(&text)?;
                self.version.clone_from(&network.version);
                match self.command.as_str() {
                    "ADD" => self.add(&network),
                    "CHECK" => self.check(&network),
                    // Not whether the agent is there: the runtime would take the node for one without network.
                    _ => network.check().map(|()| String::new()),
                }
            }
            other => Err(Error::Environment {
                name: "CNI_COMMAND",
                problem: format!("has the unknown value {other:?}"),
            }),
        }
    }

    fn add(&mut self, network: &Network<'_>) -> Result<String, Error> {
        let pod = self.begin(&network.entry)?;
        let result = network.result()?;
        let Some(pod) = self.told(&network.entry, pod) else {
            return Ok(result);
        };
        network.check()?;
        let netns = required(self.environment, "CNI_NETNS")?.into();
        let event = pod.event(Some(netns), network.addresses()?).to_json();
        let start = Instant::now();
        agent::post(network.entry.socket(), "/cmdadd", &event, ADD_DEADLINE)?;
        let took = start.elapsed().as_millis().to_string();
        self.record(Level::Info, "the agent has taken the pod", &[("ms", &took)]);
        Ok(result)
    }

    /// An agent that is away releases the pod when it is back, since its namespace is gone.
    fn delete(&mut self, entry: Result<Entry, Error>) -> Result<String, Error> {
        // The agent is told by the defaults of a configuration that cannot be read.
        let (entry, unread) = match entry {
            Ok(entry) => (entry, None),
            Err(error) => (Entry::default(), Some(error)),
        };
        let pod = self.begin(&entry)?;
        if let Some(error) = unread {
            self.record(Level::Warn, &Chain(&error).to_string(), &[]);
        }
        if let Some(pod) = self.told(&entry, pod) {
            let netns = (self.environment)("CNI_NETNS").filter(|path| !path.is_empty());
            let event = pod.event(netns.map(PathBuf::from), Vec::new()).to_json();
            agent::post(entry.socket(), "/cmddel", &event, SHORT_DEADLINE)?;
            self.record(Level::Info, "the agent has let go of the pod", &[]);
        }
        Ok(String::new())
    }

    /// Fails when the agent says that it wants to capture the pod and cannot. An agent that is away is no failure of the pod, which
    /// stays captured.
    fn check(&mut self, network: &Network<'_>) -> Result<String, Error> {
        let pod = self.begin(&network.entry)?;
        network.check()?;
        network.prev_result()?.ok_or(Error::NoPrevResult)?;
        let Some(pod) = self.told(&network.entry, pod) else {
            return Ok(String::new());
        };
        let netns = required(self.environment, "CNI_NETNS")?.into();
        let event = pod.event(Some(netns), Vec::new()).to_json();
        match agent::post(network.entry.socket(), "/cmdcheck", &event, SHORT_DEADLINE) {
            Err(Error::Refused {
                status: NOT_CAPTURED,
                text,
            }) => Err(Error::NotCaptured(text)),
            Err(error) => {
                let error = Chain(&error).to_string();
                self.record(Level::Warn, "the pod was not checked", &[("error", &error)]);
                Ok(String::new())
            }
            Ok(()) => Ok(String::new()),
        }
    }

    /// The pod, and a log that speaks of it.
    fn begin(&mut self, entry: &Entry) -> Result<Option<Pod>, Error> {
        let variable = |name| (self.environment)(name).unwrap_or_default();
        let pod = Pod::parse(self.environment);
        let (namespace, name) = match &pod {
            Ok(Some(pod)) => (pod.namespace.as_str(), pod.name.as_str()),
            _ => ("", ""),
        };
        let fields = [
            ("command", self.command.as_str()),
            ("container", &variable("CNI_CONTAINERID")),
            ("netns", &variable("CNI_NETNS")),
            ("namespace", namespace),
            ("pod", name),
        ];
        self.log = Some(Log::new(entry, &fields));
        pod
    }

    /// The pod, unless it is one that the agent is not told of.
    fn told(&mut self, entry: &Entry, pod: Option<Pod>) -> Option<Pod> {
        let reason = match &pod {
            None => Some("CNI_ARGS names no pod of Kubernetes"),
            Some(pod) if entry.exclude_namespaces.contains(&pod.namespace) => {
                Some("its namespace is excluded")
            }
            Some(pod)
                if entry.agent_pod.as_ref().is_some_and(|agent| {
                    agent.namespace == pod.namespace && pod.name.starts_with(&agent.name_prefix)
                }) =>
            {
                Some("it is the agent's own")
            }
            Some(_) => None,
        };
        let Some(reason) = reason else { return pod };
        self.record(Level::Info, "passed through", &[("reason", reason)]);
        None
    }

    fn record(&mut self, level: Level, message: &str, fields: &[(&str, &str)]) {
        if let Some(log) = &mut self.log {
            log.record(level, message, fields);
        }
    }
}

#[cfg(test)]
mod tests;
