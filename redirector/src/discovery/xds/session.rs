//! What is asked, what is here, and what is answered: the protocol without its connection.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use super::{
    super::{
        demand::{Answers, Changes},
        proto::{
            self, ADDRESS, AUTHORIZATION,
            messages::{DeltaDiscoveryRequest, DeltaDiscoveryResponse, Status},
        },
    },
    node::Identity,
};
use crate::mesh::{index::Update, strings::Strings, wanted};

/// What is asked for.
const TYPES: [&str; 2] = [ADDRESS, AUTHORIZATION];

/// `INVALID_ARGUMENT` of google.rpc.Code.
const INVALID_ARGUMENT: i32 = 3;

/// All names, where names are asked for.
const WILDCARD: &str = "*";

/// Longest text, in bytes, by which a refusal is explained: a response of bad resources alone has no end of them.
const MAX_EXPLANATION: usize = 16 << 10;

/// Fewer resources are decoded at once; more where they hold up no other task.
const FEW: usize = 256;

/// Longest list of names and versions, in bytes, that a connection begins with. gRPC's libraries take 4 MiB unless they are told
/// otherwise, and istiod does not tell them (ISTIO_GPRC_MAXRECVMSGSIZE): a longer one would be refused for ever.
const MAX_VERSIONS: usize = 3 << 20;

/// Longest list of names, in bytes, that a request has, for the same reason.
const MAX_NAMES: usize = 1 << 20;

/// What outlives a connection.
#[derive(Debug)]
pub(super) struct Session {
    identity: Identity,
    /// Workloads and services are asked for by their names alone.
    on_demand: bool,
    /// Version of each resource, by type and name; empty of what is here in part, so that it is sent again.
    versions: BTreeMap<&'static str, BTreeMap<String, String>>,
    /// The types of which a server could not be told what is here: its first response is all that there is.
    untold: BTreeSet<&'static str>,
    /// Policies have come, be it that there are none.
    has_policies: bool,
    /// The types that have been taken whole once.
    accepted: BTreeSet<&'static str>,
    /// What resources have in common.
    strings: Strings,
}

/// What a response comes to.
#[derive(Debug)]
pub(super) struct Outcome {
    /// What is to be sent for it.
    pub(super) answer: DeltaDiscoveryRequest,
    /// What it changes.
    pub(super) updates: Vec<Update>,
    /// What it says of names, where these are asked for.
    pub(super) answers: Answers,
}

/// What is made of a response.
#[derive(Debug, Default)]
struct Taken {
    updates: Vec<Update>,
    /// Of what was understood: name and version.
    good: Vec<(String, String)>,
    /// Of what counts though not all of it was understood: name.
    partly: Vec<String>,
    removed: Vec<String>,
    /// Of what does not count at all: name and aliases.
    refused: Vec<String>,
    /// `name: reason`
    problems: Vec<String>,
    /// Nothing was decoded, and that is our own fault.
    has_failed: bool,
}

impl Session {
    pub(super) fn new(identity: &Identity, on_demand: bool) -> Self {
        Self {
            identity: identity.clone(),
            on_demand,
            versions: TYPES.into_iter().map(|url| (url, BTreeMap::new())).collect(),
            untold: BTreeSet::new(),
            has_policies: false,
            accepted: BTreeSet::new(),
            strings: Strings::default(),
        }
    }

    /// With what a connection begins: without names, everything is asked for; what is here needs not be sent again. Where names count,
    /// there are none yet.
    pub(super) fn first_requests(&mut self) -> impl Iterator<Item = DeltaDiscoveryRequest> {
        let too_long = self.versions.iter().filter(|(_, versions)| {
            let bytes: usize = versions
                .iter()
                .map(|(name, version)| entry_bytes(name, version))
                .sum();
            bytes > MAX_VERSIONS
        });
        self.untold = too_long.map(|(url, _)| *url).collect();
        let this = &*self;
        this.versions.iter().map(move |(url, versions)| {
            let mut request = DeltaDiscoveryRequest {
                node: Some(this.identity.node()),
                type_url: (*url).to_owned(),
                ..DeltaDiscoveryRequest::default()
            };
            if !this.untold.contains(url) {
                request.initial_resource_versions = versions.clone();
            }
            if this.is_by_name(url) {
                // No names at all would be all of them. So says ztunnel that it wants none yet.
                request.resource_names_subscribe = vec![WILDCARD.to_owned()];
                request.resource_names_unsubscribe = vec![WILDCARD.to_owned()];
            }
            request
        })
    }

    /// What follows where names count: those that are `demanded`, and those of what is here, by whatever name that was asked for. In
    /// requests of a bounded size.
    pub(super) fn names(&self, demanded: Vec<String>) -> impl Iterator<Item = DeltaDiscoveryRequest> + use<> {
        let mut names: BTreeSet<_> = demanded.into_iter().collect();
        if self.on_demand {
            names.extend(self.versions[ADDRESS].keys().cloned());
        }
        Self::name_changes(Changes {
            unsubscribe: Vec::new(),
            subscribe: names.into_iter().collect(),
        })
    }

    /// What tells a control plane that other names count now. One that is given up and asked for anew is given up first, or there
    /// would be no answer.
    pub(super) fn name_changes(changes: Changes) -> impl Iterator<Item = DeltaDiscoveryRequest> {
        let Changes {
            unsubscribe,
            subscribe,
        } = changes;
        let request = || DeltaDiscoveryRequest {
            type_url: ADDRESS.to_owned(),
            ..DeltaDiscoveryRequest::default()
        };
        let gone = parts(unsubscribe)
            .into_iter()
            .map(move |names| DeltaDiscoveryRequest {
                resource_names_unsubscribe: names,
                ..request()
            });
        let new = parts(subscribe)
            .into_iter()
            .map(move |names| DeltaDiscoveryRequest {
                resource_names_subscribe: names,
                ..request()
            });
        gone.chain(new)
    }

    fn is_by_name(&self, url: &str) -> bool {
        self.on_demand && url == ADDRESS
    }

    /// Takes a response.
    pub(super) async fn take(&mut self, mut response: DeltaDiscoveryResponse) -> Outcome {
        let mut answer = DeltaDiscoveryRequest {
            type_url: response.type_url.clone(),
            response_nonce: response.nonce.clone(),
            ..DeltaDiscoveryRequest::default()
        };
        let Some(url) = TYPES.into_iter().find(|url| *url == response.type_url) else {
            tracing::error!(type_url = %response.type_url, "the control plane sends what it was not asked for; it is passed over");
            return Outcome {
                answer,
                updates: Vec::new(),
                answers: Answers::default(),
            };
        };
        let mut answers = Answers::default();
        if self.is_by_name(url) {
            answers.present = named(&response);
            answers.absent = response.removed_resources.clone();
        }
        // By name, each name has an answer of its own.
        if self.untold.remove(url) && !self.is_by_name(url) {
            response.removed_resources.extend(self.missing(url, &response));
        }
        let taken = if response.resources.len() <= FEW {
            decode(url, response, &mut self.strings)
        } else {
            let mut strings = std::mem::take(&mut self.strings);
            let decoded = tokio::task::spawn_blocking(move || {
                let taken = decode(url, response, &mut strings);
                (taken, strings)
            });
            match decoded.await {
                Ok((taken, strings)) => {
                    self.strings = strings;
                    taken
                }
                Err(error) => Taken {
                    problems: vec![format!("internal fault: {error}")],
                    has_failed: true,
                    ..Taken::default()
                },
            }
        };
        self.has_policies |= url == AUTHORIZATION && !taken.has_failed;
        let versions = self.versions.entry(url).or_default();
        versions.extend(taken.good);
        for name in taken.partly {
            versions.insert(name, String::new());
        }
        for name in &taken.removed {
            versions.remove(name);
        }
        if taken.problems.is_empty() {
            self.accepted.insert(url);
        } else {
            let message = explanation(&taken.problems);
            tracing::warn!(type_url = %url, refused = taken.problems.len(), problems = %message, "resources of the control plane are refused");
            answer.error_detail = Some(Status {
                code: INVALID_ARGUMENT,
                message,
            });
        }
        if self.is_by_name(url) {
            answers.refused = match taken.has_failed {
                true => std::mem::take(&mut answers.present),
                false => taken.refused.into_iter().collect(),
            };
            answers
                .present
                .extend(taken.updates.iter().flat_map(wanted::names_of));
        }
        Outcome {
            answer,
            updates: taken.updates,
            answers,
        }
    }

    /// What is here of a type and not in a response that has all of it.
    fn missing(&self, url: &str, response: &DeltaDiscoveryResponse) -> Vec<String> {
        let there: HashSet<&str> = response
            .resources
            .iter()
            .map(|resource| &*resource.name)
            .collect();
        let here = self.versions.get(url).into_iter().flatten();
        here.map(|(name, _)| name)
            .filter(|name| !there.contains(name.as_str()))
            .cloned()
            .collect()
    }

    /// Whether policies have come, be it that there are none.
    pub(super) fn has_policies(&self) -> bool {
        self.has_policies
    }

    /// The types that have not been taken whole once, of those that are asked for whole.
    pub(super) fn awaited(&self) -> Vec<&'static str> {
        let mut types = TYPES.to_vec();
        types.retain(|url| !self.is_by_name(url) && !self.accepted.contains(url));
        types
    }
}

/// Names in parts of a size that a request may have.
fn parts(names: Vec<String>) -> Vec<Vec<String>> {
    let mut parts: Vec<Vec<String>> = Vec::new();
    let mut bytes = MAX_NAMES;
    for name in names {
        bytes += entry_bytes(&name, "");
        match parts.last_mut() {
            Some(part) if bytes <= MAX_NAMES => part.push(name),
            _ => {
                bytes = entry_bytes(&name, "");
                parts.push(vec![name]);
            }
        }
    }
    parts
}

/// By which names a response has something, whether that is understood or not.
fn named(response: &DeltaDiscoveryResponse) -> HashSet<String> {
    let resources = response.resources.iter();
    resources
        .flat_map(|resource| std::iter::once(&resource.name).chain(&resource.aliases))
        .cloned()
        .collect()
}

/// Pure, and for a whole mesh some seconds of work.
fn decode(url: &'static str, response: DeltaDiscoveryResponse, strings: &mut Strings) -> Taken {
    let mut taken = Taken::default();
    for resource in response.resources {
        let decoded = match &resource.resource {
            Some(any) if any.type_url == url => proto::decode(url, &any.value),
            Some(any) => Err(format!("it is of type {:?} among those of {url:?}", any.type_url)).into(),
            None => Err("it is empty".to_owned()).into(),
        };
        // At once: what is freed here is used by the next one, and not left between those that stay.
        let update = decoded.update.map(|mut update| {
            update.share(strings);
            update
        });
        if let Some(problem) = decoded.problem {
            taken.problems.push(format!("{}: {problem}", resource.name));
            if update.is_some() {
                // The control plane must know of it, or it would not tell that it is gone.
                taken.partly.push(resource.name);
            } else {
                taken.refused.push(resource.name);
                taken.refused.extend(resource.aliases);
            }
        } else {
            taken.good.push((resource.name, resource.version));
        }
        taken.updates.extend(update);
    }
    // After what is new, so that what moves from one name to another is never gone.
    for name in response.removed_resources {
        match proto::removal(url, &name) {
            Ok(update) => {
                taken.updates.push(update);
                taken.removed.push(name);
            }
            Err(problem) => taken.problems.push(format!("{name}: {problem}")),
        }
    }
    taken
}

/// Bytes of an entry in a map of texts: two keys and lengths of no more than three bytes, and those of the entry.
fn entry_bytes(name: &str, version: &str) -> usize {
    name.len() + version.len() + 12
}

fn explanation(problems: &[String]) -> String {
    let mut text = String::new();
    for (at, problem) in problems.iter().enumerate() {
        if text.len() + problem.len() > MAX_EXPLANATION {
            text.push_str(&format!("; and {} more", problems.len() - at));
            break;
        }
        if at > 0 {
            text.push_str("; ");
        }
        text.push_str(problem);
    }
    text
}

#[cfg(test)]
mod tests;
