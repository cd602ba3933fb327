//! What a client wants of a type: everything, or what it names.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    net::IpAddr,
};

use prost::Message as _;
use prost_types::Any;

use crate::proto::{
    discovery::{DeltaDiscoveryRequest, Resource},
    workload::{Address, address},
};

/// Resources of a type by name: version and value.
type Resources<'a> = BTreeMap<&'a String, &'a (u64, Any)>;

#[derive(Debug, Default)]
pub(super) struct Subscription {
    /// Everything.
    is_wildcard: bool,
    /// Or what has one of these names, or is an endpoint of it.
    names: BTreeSet<String>,
    /// Names that it has been told nothing for yet.
    unanswered: BTreeSet<String>,
    /// The versions that it has, by name.
    told: BTreeMap<String, String>,
}

impl Subscription {
    /// Takes a request that is no answer.
    pub(super) fn take(&mut self, is_first: bool, request: DeltaDiscoveryRequest) {
        let wildcard = "*".to_owned();
        let asked = request.resource_names_subscribe;
        if is_first {
            self.told = request.initial_resource_versions.into_iter().collect();
            self.is_wildcard = asked.is_empty();
        }
        self.is_wildcard |= asked.contains(&wildcard);
        let new = asked.into_iter().filter(|name| *name != wildcard);
        for name in new {
            self.unanswered.insert(name.clone());
            self.names.insert(name);
        }
        for name in request.resource_names_unsubscribe {
            self.is_wildcard &= name != wildcard;
            self.names.remove(&name);
            self.told.remove(&name);
        }
    }

    /// What it lacks, though it is told of no more than `most`; and the names that are gone or that nothing has.
    pub(super) fn lack(&mut self, all: &Resources<'_>, most: Option<usize>) -> (Vec<Resource>, Vec<String>) {
        let unanswered = mem::take(&mut self.unanswered);
        let mut chosen: Vec<(&String, Vec<String>)> = Vec::new();
        if self.is_wildcard {
            chosen.extend(all.keys().map(|name| (*name, Vec::new())));
        } else {
            let facets: Vec<_> = all
                .iter()
                .map(|(name, (_, any))| (*name, facets(name, any)))
                .collect();
            // As istiod does: an address counts in a request alone, and what was told for it is wanted by its own name from then on. With
            // a service, its endpoints.
            let mut before = None;
            while before != Some(self.names.len()) {
                before = Some(self.names.len());
                for (name, facets) in &facets {
                    let is_asked = facets.names.iter().any(|name| unanswered.contains(name));
                    if is_asked || facets.services.iter().any(|name| self.names.contains(name)) {
                        self.names.insert((*name).clone());
                    }
                }
            }
            let wanted = facets.into_iter().filter(|(name, _)| self.names.contains(*name));
            chosen.extend(wanted.map(|(name, facets)| (name, facets.names)));
        }
        let mut resources = Vec::new();
        for (name, aliases) in &chosen {
            if most.is_some_and(|most| self.told.len() >= most) {
                break;
            }
            let (version, any) = all[name];
            let version = version.to_string();
            // Whoever asks by name has an answer, even to what it has.
            let is_asked = aliases.iter().any(|alias| unanswered.contains(alias));
            if self.told.insert((*name).clone(), version.clone()).as_ref() != Some(&version) || is_asked {
                resources.push(Resource {
                    name: (*name).clone(),
                    version,
                    resource: Some(any.clone()),
                    aliases: aliases.clone(),
                });
            }
        }
        let mut gone: Vec<_> = self
            .told
            .keys()
            .filter(|name| !all.contains_key(name))
            .cloned()
            .collect();
        for name in &gone {
            self.told.remove(name);
        }
        let has = |name: &String| chosen.iter().any(|(_, aliases)| aliases.contains(name));
        gone.extend(unanswered.into_iter().filter(|name| !has(name)));
        (resources, gone)
    }
}

/// What a resource can be asked for by.
struct Facets {
    /// Its own name, and its addresses.
    names: Vec<String>,
    /// The services that it is an endpoint of.
    services: Vec<String>,
}

fn facets(name: &str, any: &Any) -> Facets {
    let decoded = Address::decode(&*any.value)
        .ok()
        .and_then(|address| address.r#type);
    let text = |network: &str, bytes: &[u8]| {
        let address: Option<IpAddr> = match *bytes {
            [a, b, c, d] => Some([a, b, c, d].into()),
            _ => <[u8; 16]>::try_from(bytes).ok().map(Into::into),
        };
        address.map(|address| format!("{network}/{address}"))
    };
    let (mut names, services) = match decoded {
        Some(address::Type::Workload(one)) => {
            let addresses = one.addresses.iter();
            let names = addresses.filter_map(|bytes| text(&one.network, bytes)).collect();
            (names, one.services.into_keys().collect())
        }
        Some(address::Type::Service(one)) => {
            let addresses = one.addresses.iter();
            let names = addresses.filter_map(|vip| text(&vip.network, &vip.address));
            (names.collect(), Vec::new())
        }
        None => (Vec::new(), Vec::new()),
    };
    names.push(name.to_owned());
    Facets { names, services }
}
