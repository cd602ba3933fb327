//! The eBPF maps, typed: one line of `unsafe` for all value types that both sides share.

use std::{
    collections::BTreeSet,
    os::fd::{AsFd as _, AsRawFd as _},
};

use aya::{
    maps::{
        Array, HashMap, MapData, MapError, PerCpuArray, PerCpuValues, SkStorage,
        lpm_trie::{Key, LpmTrie},
    },
    programs::ProgramFd,
};
use redirector_common::{
    maps::{AddressKey, Decider, Facts, PodEntry, RuleKey, Tag, counter_index},
    rules::Match,
    verdict::Counter,
};

/// A value shared with the programs, as aya wants it.
#[repr(transparent)]
#[derive(Clone, Copy)]
struct Raw<T>(T);

#[expect(
    unsafe_code,
    reason = "the one bridge between bytemuck's and aya's plain data"
)]
// SAFETY: bytemuck::Pod promises what aya::Pod asks for (any bit pattern valid, no padding), and repr(transparent) keeps
// the layout.
unsafe impl<T: bytemuck::Pod> aya::Pod for Raw<T> {}

/// The map `PODS`.
pub(super) struct PodMap(Array<MapData, Raw<PodEntry>>);

impl PodMap {
    /// From the map's handle.
    pub(super) fn new(map: MapData) -> Result<Self, MapError> {
        Array::try_from(aya::maps::Map::Array(map)).map(Self)
    }

    /// A pod's entry.
    pub(super) fn read(&self, slot: u32) -> Result<PodEntry, MapError> {
        self.0.get(&slot, 0).map(|Raw(entry)| entry)
    }

    /// Replaces a pod's entry.
    pub(super) fn write(&mut self, slot: u32, entry: PodEntry) -> Result<(), MapError> {
        self.0.set(slot, Raw(entry), 0)
    }
}

/// The map `FACTS`, of whatever build.
pub(super) struct FactsMap(Array<MapData, Raw<Facts>>);

impl FactsMap {
    /// From the map's handle.
    pub(super) fn new(map: MapData) -> Result<Self, MapError> {
        Array::try_from(aya::maps::Map::Array(map)).map(Self)
    }

    /// What is known of a pod; `None` where nobody has written anything.
    pub(super) fn read(&self, slot: u32) -> Result<Option<Facts>, MapError> {
        self.0
            .get(&slot, 0)
            .map(|Raw(facts)| (facts.version != 0).then_some(facts))
    }

    /// Replaces what is known of a pod.
    pub(super) fn write(&mut self, slot: u32, facts: Facts) -> Result<(), MapError> {
        self.0.set(slot, Raw(facts), 0)
    }
}

/// The map `TRACED`.
pub(super) struct TracedMap(Array<MapData, u32>);

impl TracedMap {
    /// From the map's handle.
    pub(super) fn new(map: MapData) -> Result<Self, MapError> {
        Array::try_from(aya::maps::Map::Array(map)).map(Self)
    }

    /// Whether records are written for a pod from now on.
    pub(super) fn set(&mut self, slot: u32, traced: bool) -> Result<(), MapError> {
        self.0.set(slot, u32::from(traced), 0)
    }
}

/// The map `ADDRESSES`.
pub(super) struct AddressMap(HashMap<MapData, Raw<AddressKey>, u32>);

impl AddressMap {
    /// From the map's handle.
    pub(super) fn new(map: MapData) -> Result<Self, MapError> {
        HashMap::try_from(aya::maps::Map::HashMap(map)).map(Self)
    }

    /// Adds an address.
    pub(super) fn insert(&mut self, key: AddressKey) -> Result<(), MapError> {
        self.0.insert(Raw(key), 1, 0)
    }

    /// Removes an address; one that is not there is fine.
    pub(super) fn remove(&mut self, key: AddressKey) -> Result<(), MapError> {
        absent_is_fine(self.0.remove(&Raw(key)))
    }

    /// All addresses of all pods.
    pub(super) fn keys(&self) -> Result<Vec<AddressKey>, MapError> {
        self.0.keys().map(|key| key.map(|Raw(key)| key)).collect()
    }
}

/// The map `RULES`.
pub(super) struct RuleMap(LpmTrie<MapData, Raw<RuleKey>, u32>);

impl RuleMap {
    /// From the map's handle.
    pub(super) fn new(map: MapData) -> Result<Self, MapError> {
        LpmTrie::try_from(aya::maps::Map::LpmTrie(map)).map(Self)
    }

    /// Says something about the first `length` bits of a key.
    pub(super) fn insert(&mut self, length: u32, key: RuleKey, what: Match) -> Result<(), MapError> {
        self.0.insert(&Key::new(length, Raw(key)), what, 0)
    }

    /// Removes an entry; one that is not there is fine.
    pub(super) fn remove(&mut self, length: u32, key: RuleKey) -> Result<(), MapError> {
        absent_is_fine(self.0.remove(&Key::new(length, Raw(key))))
    }

    /// All entries of all pods: length and key.
    pub(super) fn keys(&self) -> Result<Vec<(u32, RuleKey)>, MapError> {
        let read = |key: Result<Key<Raw<RuleKey>>, MapError>| {
            let key = key?;
            let Raw(data) = key.data();
            Ok((key.prefix_len(), data))
        };
        self.0.keys().map(read).collect()
    }
}

/// The map `COUNTERS`.
pub(super) struct CounterMap(PerCpuArray<MapData, u64>);

impl CounterMap {
    /// From the map's handle.
    pub(super) fn new(map: MapData) -> Result<Self, MapError> {
        PerCpuArray::try_from(aya::maps::Map::PerCpuArray(map)).map(Self)
    }

    /// Packets counted since the pod was attached, over all CPUs.
    pub(super) fn read(&self, slot: u32, counter: Counter) -> Result<u64, MapError> {
        Ok(self.0.get(&counter_index(slot, counter), 0)?.iter().sum())
    }

    /// Begins anew for the next pod of a slot.
    pub(super) fn clear(&mut self, slot: u32) -> Result<(), MapError> {
        let cpus = aya::util::nr_cpus().map_err(|(_, error)| MapError::from(error))?;
        for counter in Counter::ALL {
            let zeros = PerCpuValues::try_from(vec![0; cpus]).map_err(MapError::from)?;
            self.0.set(counter_index(slot, counter), zeros, 0)?;
        }
        Ok(())
    }
}

/// The map `DECIDERS`.
pub(super) struct DeciderMap(Array<MapData, u32>);

impl DeciderMap {
    /// From the map's handle.
    pub(super) fn new(map: MapData) -> Result<Self, MapError> {
        // aya's type for arrays of programs does not read. The system calls are an array's: one reads the number of a program, and
        // writes a descriptor.
        Array::try_from(aya::maps::Map::Array(map)).map(Self)
    }

    /// The number of the program in a place.
    pub(super) fn program(&self, decider: Decider) -> Result<Option<u32>, MapError> {
        match self.0.get(&(decider as u32), 0) {
            Ok(id) => Ok(Some(id)),
            Err(error) => absent_is_fine(Err(error)).map(|()| None),
        }
    }

    /// Puts a program into a place.
    pub(super) fn set(&mut self, decider: Decider, program: &ProgramFd) -> Result<(), MapError> {
        let fd = program.as_fd().as_raw_fd();
        self.0.set(decider as u32, fd as u32, 0)
    }
}

/// The map `PROBERS`, or `PROXIES`.
pub(super) struct CgroupSet(HashMap<MapData, u64, u32>);

impl CgroupSet {
    /// From the map's handle.
    pub(super) fn new(map: MapData) -> Result<Self, MapError> {
        HashMap::try_from(aya::maps::Map::HashMap(map)).map(Self)
    }

    /// Its members.
    pub(super) fn members(&self) -> Result<BTreeSet<u64>, MapError> {
        self.0.keys().collect()
    }

    /// Makes the set have exactly these members: removes first, so that there is room.
    pub(super) fn set(&mut self, wanted: &BTreeSet<u64>) -> Result<(), MapError> {
        let present = self.members()?;
        for cgroup in present.difference(wanted) {
            absent_is_fine(self.0.remove(cgroup))?;
        }
        for cgroup in wanted.difference(&present) {
            self.0.insert(cgroup, 1, 0)?;
        }
        Ok(())
    }
}

/// The map `TAGS` of the node.
pub(super) struct TagMap(SkStorage<MapData, u32>);

impl TagMap {
    /// From the map's handle.
    pub(super) fn new(map: MapData) -> Result<Self, MapError> {
        SkStorage::try_from(aya::maps::Map::SkStorage(map)).map(Self)
    }

    /// Tags a socket.
    pub(super) fn set(&mut self, socket: &impl std::os::fd::AsRawFd, tag: Tag) -> Result<(), MapError> {
        self.0.insert(socket, tag as u32, 0)
    }
}

fn absent_is_fine(removed: Result<(), MapError>) -> Result<(), MapError> {
    match removed {
        Err(MapError::KeyNotFound | MapError::ElementNotFound) => Ok(()),
        Err(MapError::SyscallError(error)) if error.io_error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
