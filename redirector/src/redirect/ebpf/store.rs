//! The maps of this build, and the pods' slots in them. What a pod has is keyed by its slot.

use std::{
    collections::{BTreeSet, HashMap, HashSet, hash_map},
    io,
    net::IpAddr,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    time::Instant,
};

use aya::maps::{MapData, MapError, SockMap};
use redirector_common::{
    maps::{
        self as layout, AddressKey, FLAG_RELEASING, Facts, Listener, MAX_ALL_ADDRESSES, MAX_ALL_RULES,
        MAX_PODS, MAX_SLOTS, PodEntry, listener_index,
    },
    net::Addr,
    rules::{self, GENERATION},
    verdict::Counter,
};

use super::{
    dns,
    facts::FREED,
    generations::Generations,
    open_map,
    others::Sockets,
    pins::{Build, Instance},
    slots::{FreeSlots, Unavailable},
    trie::Compiled,
};
use crate::{
    mesh::pod::PodUid,
    redirect::{
        Count, Error,
        maps::{AddressMap, CounterMap, FactsMap, PodMap, RuleMap, TracedMap},
        metrics::Occupancy,
    },
    sys::{listening::Listening, socket},
};

/// The maps, and who has which slot.
pub(super) struct Store {
    pods: PodMap,
    facts: FactsMap,
    addresses: AddressMap,
    rules: RuleMap,
    listeners: SockMap<MapData>,
    counters: CounterMap,
    slots: HashMap<u32, Held>,
    free: FreeSlots,
    traced: TracedMap,
}

/// What a slot holds, as far as this agent knows: what an earlier one wrote is read back where it matters.
struct Held {
    /// Whose it is, even when its pins are lost.
    owner: PodUid,
    addresses: BTreeSet<IpAddr>,
    rules: Option<Compiled>,
    /// What is in the trie.
    keys: Generations,
    /// What waited on the DNS port when its listeners were last looked for.
    dns_candidates: Option<Vec<Listening>>,
    /// The DNS listeners that the slot has been given, by socket cookie.
    dns: HashMap<u32, u64>,
    /// The listeners that the slot has been given, by socket cookie. The same socket is never put into its place again: kernels
    /// differ in what that leaves of the link by which a socket leaves the map when it closes.
    listeners: HashMap<u32, u64>,
    /// Listeners of this agent's, by socket cookie, that are in their places or not: another agent has had the pod meanwhile.
    unsure: HashSet<u64>,
}

impl Held {
    fn by(owner: PodUid) -> Self {
        Self {
            owner,
            addresses: BTreeSet::new(),
            rules: None,
            keys: Generations::default(),
            dns_candidates: None,
            dns: HashMap::new(),
            listeners: HashMap::new(),
            unsure: HashSet::new(),
        }
    }
}

/// Who has which slot. Of several pods that have the same one, as is left where two agents wrote at one time, none has it: each gets
/// another, and this one is nobody's until the maps are opened again.
fn claims(instances: Vec<Instance>) -> HashMap<u32, Option<PodUid>> {
    let mut claims = HashMap::new();
    for Instance { slot, uid, .. } in instances {
        match claims.entry(slot) {
            hash_map::Entry::Vacant(free) => {
                free.insert(Some(uid));
            }
            hash_map::Entry::Occupied(mut taken) => {
                tracing::warn!(slot, %uid, "several pods have the same slot: they are attached to anew");
                taken.insert(None);
            }
        }
    }
    claims
}

/// What becomes of the new connections that the programs of an emptied slot may still see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Last {
    /// The pod is released: they pass.
    Pass,
    /// The pod is to stay captured, and could not be: without addresses and listeners they are refused.
    Refused,
}

impl Store {
    /// Opens the maps, and reads them.
    pub(super) fn open(build: &Build) -> Result<Self, Error> {
        let maps = build.maps();
        let mut store = Self {
            pods: open_map(&maps, layout::PODS, PodMap::new)?,
            facts: open_map(&maps, layout::FACTS, FactsMap::new)?,
            addresses: open_map(&maps, layout::ADDRESSES, AddressMap::new)?,
            rules: open_map(&maps, layout::RULES, RuleMap::new)?,
            listeners: open_map(&maps, layout::LISTENERS, |map| {
                SockMap::try_from(aya::maps::Map::SockMap(map))
            })?,
            counters: open_map(&maps, layout::COUNTERS, CounterMap::new)?,
            slots: HashMap::new(),
            free: FreeSlots::default(),
            traced: open_map(&maps, layout::TRACED, TracedMap::new)?,
        };
        store.reread(build)?;
        Ok(store)
    }

    /// Reads anew who has which slot and what it holds, and forgets what was known of that; what the maps hold for slots that have no
    /// pod is removed. After a failure all is as before.
    pub(super) fn reread(&mut self, build: &Build) -> Result<(), Error> {
        let failed = |error| Error::new("reading the pods' maps", error);
        let mut given = HashMap::<&PodUid, HashSet<u64>>::new();
        for held in self.slots.values() {
            let listeners = held.listeners.values().chain(&held.unsure);
            given.entry(&held.owner).or_default().extend(listeners);
        }
        let claims = claims(build.instances()?);
        let mut slots: HashMap<u32, Held> = HashMap::new();
        for (slot, owner) in &claims {
            if let Some(owner) = owner {
                let unsure = given.get(owner).cloned().unwrap_or_default();
                let held = Held::by(owner.clone());
                slots.insert(*slot, Held { unsure, ..held });
            }
        }
        let mut stale = (Vec::new(), Vec::new());
        for key in self.addresses.keys().map_err(failed)? {
            match slots.get_mut(&key.slot) {
                Some(held) => {
                    held.addresses.insert(key.address.into());
                }
                None => stale.0.push(key),
            }
        }
        for (length, key) in self.rules.keys().map_err(failed)? {
            match slots.get_mut(&key.slot) {
                Some(held) => held.keys.note(length, key),
                None => stale.1.push((length, key)),
            }
        }
        let (mut free, now) = (FreeSlots::default(), Instant::now());
        for slot in (0..MAX_SLOTS as u32).rev() {
            if claims.contains_key(&slot) {
                continue;
            }
            // Nobody knows when another agent freed it.
            match self.facts.read(slot).map_err(failed)? {
                Some(_) => free.add_freed(slot, now),
                None => free.add_unused(slot),
            }
        }
        for key in stale.0 {
            self.addresses.remove(key).map_err(failed)?;
        }
        for (length, key) in stale.1 {
            self.rules.remove(length, key).map_err(failed)?;
        }
        (self.slots, self.free) = (slots, free);
        Ok(())
    }

    /// Whether a pod may have an instance: one that has none is one more.
    pub(super) fn admit(&self, pod: &PodUid) -> Result<(), Error> {
        let owners: HashSet<&PodUid> = self.slots.values().map(|held| &held.owner).collect();
        if owners.len() < MAX_PODS || owners.contains(pod) {
            return Ok(());
        }
        Err(Error::new(
            "enrolling one more pod",
            format!("a node may have {MAX_PODS} enrolled pods, and has them: release some"),
        ))
    }

    /// A slot for a new instance, or how long it takes until one can be had.
    pub(super) fn take(&mut self) -> Result<u32, Unavailable> {
        self.free.take(Instant::now())
    }

    /// A slot for an instance that is not needed yet, if one can be had.
    pub(super) fn take_for_later(&mut self) -> Option<u32> {
        self.free.take(Instant::now()).ok()
    }

    /// Takes back a slot that was taken and given to nobody.
    pub(super) fn take_back(&mut self, slot: u32) {
        self.free.add_unused(slot);
    }

    /// The pod `from` is known as `to` from now on.
    pub(super) fn rename(&mut self, from: &PodUid, to: &PodUid) {
        for held in self.slots.values_mut().filter(|held| held.owner == *from) {
            held.owner = to.clone();
        }
    }

    /// Gives a slot that was taken to a pod. From here on it is the pod's, and is freed with what else is made for it.
    pub(super) fn give(&mut self, slot: u32, owner: &PodUid) -> Result<(), Error> {
        self.slots.insert(slot, Held::by(owner.clone()));
        self.clear_listeners(slot);
        let cleared = self
            .counters
            .clear(slot)
            .and_then(|()| self.traced.set(slot, false));
        cleared.map_err(|error| Error::new("clearing what the slot's last pod had", error))
    }

    /// Whether a slot is this pod's.
    pub(super) fn is_of(&self, slot: u32, owner: &PodUid) -> bool {
        self.slots.get(&slot).is_some_and(|held| held.owner == *owner)
    }

    /// Takes all listeners out of their places.
    fn clear_listeners(&mut self, slot: u32) {
        let own = [Listener::Outbound, Listener::Inbound, Listener::Hbone];
        for listener in own.into_iter().chain(dns::PLACES) {
            let _ = self.listeners.clear_index(&listener_index(slot, listener));
        }
    }

    /// Empties a slot, if it is this pod's. Goes on after a failure and reports every one.
    pub(super) fn free(&mut self, slot: u32, owner: &PodUid, last: Last) -> Vec<Error> {
        let hash_map::Entry::Occupied(held) = self.slots.entry(slot) else {
            return Vec::new();
        };
        if held.get().owner != *owner {
            return Vec::new();
        }
        let held = held.remove();
        let mut errors = Vec::new();
        let mut note = |result: Result<(), MapError>| {
            errors.extend(
                result
                    .err()
                    .map(|error| Error::new("removing a pod from the maps", error)),
            );
        };
        note(self.pods.write(
            slot,
            PodEntry {
                flags: match last {
                    Last::Pass => FLAG_RELEASING,
                    Last::Refused => 0,
                },
                ..bytemuck::Zeroable::zeroed()
            },
        ));
        note(self.facts.write(slot, FREED));
        note(self.traced.set(slot, false));
        for address in held.addresses {
            note(self.addresses.remove(address_key(slot, address)));
        }
        for error in held.keys.remove(&mut self.rules) {
            note(Err(error));
        }
        // Listeners leave the map as they close; those of an agent that lives on are taken out.
        self.clear_listeners(slot);
        // What could not be emptied is found when the maps are opened again, and is nobody's until then.
        if errors.is_empty() {
            self.free.add_freed(slot, Instant::now());
        }
        errors
    }

    /// A pod's entry.
    pub(super) fn entry(&self, slot: u32) -> Result<PodEntry, Error> {
        let entry = self.pods.read(slot);
        entry.map_err(|error| Error::new("reading the pod's map entry", error))
    }

    /// The slots that are a pod's, pinned or not.
    pub(super) fn slots_of(&self, owner: &PodUid) -> Vec<u32> {
        let own = self.slots.iter().filter(|(_, held)| held.owner == *owner);
        own.map(|(slot, _)| *slot).collect()
    }

    /// Replaces what is known of a pod.
    pub(super) fn set_facts(&mut self, slot: u32, facts: Facts) -> Result<(), Error> {
        let written = self.facts.write(slot, facts);
        written.map_err(|error| Error::new("writing what is known of the pod", error))
    }

    /// Replaces a pod's entry; its rules stay as they are.
    pub(super) fn set_entry(&mut self, slot: u32, entry: PodEntry) -> Result<(), Error> {
        let rules = self.entry(slot)?.rules;
        self.write(slot, PodEntry { rules, ..entry })
    }

    fn write(&mut self, slot: u32, entry: PodEntry) -> Result<(), Error> {
        let written = self.pods.write(slot, entry);
        written.map_err(|error| Error::new("writing the pod's map entry", error))
    }

    /// Makes a pod have exactly these addresses: adds first, so that none is missing in between.
    pub(super) fn set_addresses(&mut self, slot: u32, addresses: &[IpAddr]) -> Result<(), Error> {
        let failed = |error| Error::new("writing the pod's addresses", error);
        let wanted: BTreeSet<_> = addresses.iter().copied().collect();
        let held = held(&mut self.slots, slot)?;
        for address in wanted.difference(&held.addresses) {
            self.addresses
                .insert(address_key(slot, *address))
                .map_err(failed)?;
        }
        for address in held.addresses.difference(&wanted) {
            self.addresses
                .remove(address_key(slot, *address))
                .map_err(failed)?;
        }
        held.addresses = wanted;
        Ok(())
    }

    /// Puts rules in force: the new ones are made beside the old, and one write of the entry changes over. The old ones stay until
    /// the next change, for programs that have read the entry and are still looking up. `entry` is the pod's as it should be then.
    pub(super) fn set_entry_and_rules(
        &mut self,
        slot: u32,
        entry: PodEntry,
        wanted: &Compiled,
    ) -> Result<(), Error> {
        let before = self.entry(slot)?.rules;
        let held = held(&mut self.slots, slot)?;
        if held.rules.as_ref() == Some(wanted) {
            return self.set_entry(slot, entry);
        }
        let failed = |error| Error::new("writing the pod's rules", error);
        let rules = wanted.bits | (before & GENERATION ^ GENERATION);
        let generation = rules::generation(rules);
        held.keys
            .renew(slot, generation, wanted, &mut self.rules)
            .map_err(failed)?;
        self.pods
            .write(slot, PodEntry { rules, ..entry })
            .map_err(|error| Error::new("writing the pod's map entry", error))?;
        held.rules = Some(wanted.clone());
        Ok(())
    }

    /// Puts listeners into their places of the pod's in the sockmap, unless they are there. A place for which there is none stays as
    /// it is: a socket that is closed has left it.
    pub(super) fn set_listeners(&mut self, slot: u32, listeners: &Sockets<'_>) -> Result<(), Error> {
        let held = held(&mut self.slots, slot)?;
        for (place, socket) in listeners.places() {
            let index = listener_index(slot, place);
            let cookie = listener_cookie(socket)?;
            let before = held.listeners.get(&index);
            if before == Some(&cookie) {
                continue;
            }
            let failed = |error| Error::new(format!("putting the {place:?} listener into its map"), error);
            if before.is_none() && (listeners.inherited || held.unsure.contains(&cookie)) {
                // What is in its place is itself, put there by another agent or before that one came.
                match self.listeners.set(index, &socket.as_raw_fd(), BPF_NOEXIST) {
                    Err(error) if !is_taken(&error) => return Err(failed(error)),
                    _ => held.listeners.insert(index, cookie),
                };
                continue;
            }
            // Another process's may be there since before this agent began.
            if listeners.of_others && before.is_none() {
                let _ = self.listeners.clear_index(&index);
            }
            held.listeners.remove(&index);
            self.listeners
                .set(index, &socket.as_raw_fd(), 0)
                .map_err(failed)?;
            held.listeners.insert(index, cookie);
        }
        Ok(())
    }

    /// What waited on the DNS port when the slot was given its DNS listeners; `None` if it was not.
    pub(super) fn dns_candidates(&self, slot: u32) -> Option<&[Listening]> {
        self.slots.get(&slot)?.dns_candidates.as_deref()
    }

    /// Makes a pod have exactly these DNS listeners.
    pub(super) fn set_dns(
        &mut self,
        slot: u32,
        candidates: Option<Vec<Listening>>,
        sockets: &dns::Sockets,
    ) -> Result<(), Error> {
        let held = held(&mut self.slots, slot)?;
        for place in dns::PLACES {
            let index = listener_index(slot, place);
            let socket = sockets.iter().find(|(wanted, _)| *wanted == place);
            let cookie = socket
                .map(|(_, socket)| socket::cookie(socket.as_fd()))
                .transpose()
                .map_err(|error| Error::new("reading a listener's cookie", error))?;
            if cookie.is_some() && held.dns.get(&index) == cookie.as_ref() {
                continue;
            }
            // The same socket is never put over itself: see `Held::listeners`.
            let _ = self.listeners.clear_index(&index);
            held.dns.remove(&index);
            if let (Some((_, socket)), Some(cookie)) = (socket, cookie) {
                self.listeners
                    .set(index, &socket.as_raw_fd(), 0)
                    .map_err(|error| {
                        Error::new(format!("putting the {place:?} listener into its map"), error)
                    })?;
                held.dns.insert(index, cookie);
            }
        }
        held.dns_candidates = candidates;
        Ok(())
    }

    /// How full the maps are that all pods share.
    pub(super) fn occupancy(&self) -> Vec<Occupancy> {
        let owners: HashSet<&PodUid> = self.slots.values().map(|held| &held.owner).collect();
        let sum = |of: fn(&Held) -> usize| self.slots.values().map(of).sum();
        let map = |map, entries, most| Occupancy { map, entries, most };
        vec![
            map("pods", owners.len(), MAX_PODS),
            map("slots", self.slots.len(), MAX_SLOTS),
            map("addresses", sum(|held| held.addresses.len()), MAX_ALL_ADDRESSES),
            map("rules", sum(|held| held.keys.len()), MAX_ALL_RULES),
        ]
    }

    /// What a pod's programs have counted.
    pub(super) fn counts(&self, slot: u32) -> Result<Vec<Count>, Error> {
        read_counts(&self.counters, slot)
    }
}

/// `include/uapi/linux/bpf.h`: only where nothing is.
const BPF_NOEXIST: u64 = 1;

/// Whether something is there.
fn is_taken(error: &MapError) -> bool {
    matches!(error, MapError::SyscallError(error) if error.io_error.kind() == io::ErrorKind::AlreadyExists)
}

fn listener_cookie(socket: BorrowedFd<'_>) -> Result<u64, Error> {
    socket::cookie(socket).map_err(|error| Error::new("reading a listener's cookie", error))
}

fn held(slots: &mut HashMap<u32, Held>, slot: u32) -> Result<&mut Held, Error> {
    slots.get_mut(&slot).ok_or_else(|| {
        Error::new(
            format!("filling slot {slot} of the maps"),
            "it is no pod's: somebody pins beside this agent",
        )
    })
}

/// What is counted in a slot of a map.
pub(super) fn read_counts(counters: &CounterMap, slot: u32) -> Result<Vec<Count>, Error> {
    let read = |counter: Counter| {
        let (program, verdict) = counter.label();
        let packets = counters
            .read(slot, counter)
            .map_err(|error| Error::new("reading a packet counter", error))?;
        Ok(Count {
            program: program.as_str(),
            verdict,
            packets,
        })
    };
    Counter::ALL.into_iter().map(read).collect()
}

/// The key of an address in the map.
pub(super) fn address_key(slot: u32, address: IpAddr) -> AddressKey {
    AddressKey {
        slot,
        address: Addr::from(address),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::redirect::ebpf::pins::Pins;

    #[test]
    fn a_slot_that_several_pods_have_is_nobodys() {
        let root = tempfile::tempdir().unwrap();
        let build = Pins::existing(root.path()).build(1).unwrap();
        let instance = |slot, uid: &str| Instance {
            build: build.clone(),
            slot,
            uid: uid.parse().unwrap(),
        };
        // A pod may have several, as while one replaces another.
        let pinned = [
            instance(1, "a"),
            instance(2, "a"),
            instance(3, "b"),
            instance(3, "c"),
            instance(3, "d"),
        ];
        let a: PodUid = "a".parse().unwrap();
        let expected = HashMap::from([(1, Some(a.clone())), (2, Some(a)), (3, None)]);
        assert_eq!(claims(pinned.into()), expected);
    }
}
