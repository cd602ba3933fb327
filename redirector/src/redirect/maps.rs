//! The eBPF maps, typed: one line of `unsafe` for all value types that both sides share.

use std::net::IpAddr;

use aya::maps::{Array, HashMap, MapData, MapError, PerCpuArray, SkStorage};
use redirector_common::{
    maps::{PodEntry, Tag},
    net::Addr,
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

/// The map `POD` of one pod.
pub(super) struct PodMap(Array<MapData, Raw<PodEntry>>);

impl PodMap {
    /// From the map's handle.
    pub(super) fn new(map: MapData) -> Result<Self, MapError> {
        Array::try_from(aya::maps::Map::Array(map)).map(Self)
    }

    /// The pod's entry.
    pub(super) fn read(&self) -> Result<PodEntry, MapError> {
        self.0.get(&0, 0).map(|Raw(entry)| entry)
    }

    /// Replaces the pod's entry.
    pub(super) fn write(&mut self, entry: PodEntry) -> Result<(), MapError> {
        self.0.set(0, Raw(entry), 0)
    }
}

/// The map `ADDRESSES` of one pod.
pub(super) struct AddressMap(HashMap<MapData, Raw<Addr>, u32>);

impl AddressMap {
    /// From the map's handle.
    pub(super) fn new(map: MapData) -> Result<Self, MapError> {
        HashMap::try_from(aya::maps::Map::HashMap(map)).map(Self)
    }

    /// Makes the map hold exactly `addresses`: adds first, so that none is missing in between.
    pub(super) fn replace(&mut self, addresses: &[IpAddr]) -> Result<(), MapError> {
        let wanted: Vec<_> = addresses.iter().copied().map(Addr::from).collect();
        for address in &wanted {
            self.0.insert(Raw(*address), 1, 0)?;
        }
        let held = self.0.keys().collect::<Result<Vec<_>, _>>()?;
        for Raw(address) in held {
            if !wanted.contains(&address) {
                self.0.remove(&Raw(address))?;
            }
        }
        Ok(())
    }
}

/// The map `COUNTERS` of one pod.
pub(super) struct CounterMap(PerCpuArray<MapData, u64>);

impl CounterMap {
    /// From the map's handle.
    pub(super) fn new(map: MapData) -> Result<Self, MapError> {
        PerCpuArray::try_from(aya::maps::Map::PerCpuArray(map)).map(Self)
    }

    /// Packets counted since the pod was attached, over all CPUs.
    pub(super) fn read(&self, counter: Counter) -> Result<u64, MapError> {
        Ok(self.0.get(&(counter as u32), 0)?.iter().sum())
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
