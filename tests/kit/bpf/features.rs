//! Kernel versions of instructions, of map types and of map flags.

use aya_obj::generated::bpf_map_type;

use super::Version;

/// What not every kernel with eBPF knows of instructions, and of the shape of programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Feature {
    /// Packet loads of classic BPF.
    PacketLoad,
    /// More than 4096 instructions.
    Large,
    /// A function that is called, not inlined.
    Functions,
    /// A jump backwards.
    Loop,
    /// A comparison of 32-bit registers.
    NarrowBranch,
    /// The address of a map's value: constants and statics.
    MapValueAddress,
    /// The address of a variable of the kernel's.
    KernelVariable,
    /// A tail call in a program with functions. On x86-64; other machines came later.
    TailCallAndFunctions,
    /// Fetching and exchanging, and other operations than addition, atomically.
    Atomics,
    /// A function of the kernel that is no helper.
    KernelFunction,
    /// A function as an argument.
    FunctionPointer,
    /// Loads and moves that extend the sign (instruction set 4).
    SignExtension,
    /// Byte swaps whatever the machine's order is (instruction set 4).
    UnconditionalSwap,
    /// Signed division (instruction set 4).
    SignedDivision,
    /// Jumps of more than 32,767 instructions (instruction set 4).
    LongJump,
    /// The jump of open-coded loops.
    MayGoto,
    /// Pointers of arenas.
    AddressSpaces,
    /// Loads that acquire, stores that release.
    AcquireRelease,
}

impl Feature {
    /// When it came, and what brought it.
    pub fn since(self) -> (Version, &'static str) {
        match self {
            Self::PacketLoad => (Version(4, 1), "96be4325f443"),
            Self::Large => (Version(5, 2), "c04c0d2b968a"),
            Self::Functions => (Version(4, 16), "cc8b0b92a169"),
            Self::Loop => (Version(5, 3), "2589726d12a1"),
            Self::NarrowBranch => (Version(5, 1), "092ed0968bb6"),
            Self::MapValueAddress => (Version(5, 2), "d8eca5bbb2be"),
            Self::KernelVariable => (Version(5, 10), "4976b718c355"),
            Self::TailCallAndFunctions => (Version(5, 10), "e411901c0b77"),
            Self::Atomics => (Version(5, 12), "5ffa25502b5a"),
            Self::KernelFunction => (Version(5, 13), "e6ac2450d6de"),
            Self::FunctionPointer => (Version(5, 13), "69c087ba6225"),
            Self::SignExtension => (Version(6, 6), "1f9a1ea821ff"),
            Self::UnconditionalSwap => (Version(6, 6), "0845c3db7bf5"),
            Self::SignedDivision => (Version(6, 6), "ec0e2da95f72"),
            Self::LongJump => (Version(6, 6), "4cd58e9af8b9"),
            Self::MayGoto => (Version(6, 9), "011832b97b31"),
            Self::AddressSpaces => (Version(6, 9), "6082b6c328b5"),
            Self::AcquireRelease => (Version(6, 15), "880442305a39"),
        }
    }
}

/// Types of maps by `enum bpf_map_type`, name, version and what brought it.
const MAP_TYPES: &[(u32, &str, Version, &str)] = &[
    (1, "hash", Version(3, 19), "0f8e4bd8a1fc"),
    (2, "array", Version(3, 19), "28fbcfa08d8e"),
    (3, "prog_array", Version(4, 2), "04fd61ab36ec"),
    (4, "perf_event_array", Version(4, 3), "ea317b267e9d"),
    (5, "percpu_hash", Version(4, 6), "824bd0ce6c7c"),
    (6, "percpu_array", Version(4, 6), "a10423b87a7e"),
    (7, "stack_trace", Version(4, 6), "d5a3b1f69186"),
    (8, "cgroup_array", Version(4, 8), "4ed8ec521ed5"),
    (9, "lru_hash", Version(4, 10), "29ba732acbee"),
    (10, "lru_percpu_hash", Version(4, 10), "8f8449384ec3"),
    (11, "lpm_trie", Version(4, 11), "b95a5c4db09b"),
    (12, "array_of_maps", Version(4, 12), "56f668dfe00d"),
    (13, "hash_of_maps", Version(4, 12), "bcc6b1b7ebf8"),
    (14, "devmap", Version(4, 14), "546ac1ffb70d"),
    (15, "sockmap", Version(4, 14), "174a79ff9515"),
    (16, "cpumap", Version(4, 15), "6710e1126934"),
    (17, "xskmap", Version(4, 18), "fbfc504a24f5"),
    (18, "sockhash", Version(4, 18), "81110384441a"),
    (19, "cgroup_storage", Version(4, 19), "de9cbbaadba5"),
    (20, "reuseport_sockarray", Version(4, 19), "5dc4c4b7d4e8"),
    (21, "percpu_cgroup_storage", Version(4, 20), "b741f1630346"),
    (22, "queue", Version(4, 20), "f1a2e44a3aec"),
    (23, "stack", Version(4, 20), "f1a2e44a3aec"),
    (24, "sk_storage", Version(5, 2), "6ac99e8f23d4"),
    (25, "devmap_hash", Version(5, 4), "6f9d451ab1a3"),
    (26, "struct_ops", Version(5, 6), "85d33df357b6"),
    (27, "ringbuf", Version(5, 8), "457f44363a88"),
    (28, "inode_storage", Version(5, 10), "8ea636848aca"),
    (29, "task_storage", Version(5, 11), "4cf1bc1f1045"),
    (30, "bloom_filter", Version(5, 16), "9330986c0300"),
    (31, "user_ringbuf", Version(6, 1), "583c1f420173"),
    (32, "cgrp_storage", Version(6, 2), "c4bcfb38a95e"),
    (33, "arena", Version(6, 9), "317460317a02"),
];

/// Flags of maps: bit, name, version and what brought it.
const MAP_FLAGS: &[(u32, &str, Version, &str)] = &[
    (0, "no_prealloc", Version(4, 6), "6c9059817432"),
    (1, "no_common_lru", Version(4, 10), "29ba732acbee"),
    (2, "numa_node", Version(4, 14), "96eabe7a40aa"),
    (3, "rdonly", Version(4, 15), "6e71b04a8224"),
    (4, "wronly", Version(4, 15), "6e71b04a8224"),
    (5, "stack_build_id", Version(4, 17), "615755a77b24"),
    (6, "zero_seed", Version(5, 0), "96b3b6c9091d"),
    (7, "rdonly_prog", Version(5, 2), "591fe9888d78"),
    (8, "wronly_prog", Version(5, 2), "591fe9888d78"),
    (9, "clone", Version(5, 4), "8f51dfc73bf1"),
    (10, "mmapable", Version(5, 5), "fc9702273e2e"),
    (11, "preserve_elems", Version(5, 10), "792caccc4526"),
    (12, "inner_map", Version(5, 10), "4a8f87e60f6d"),
    (13, "link", Version(6, 4), "68b04864ca42"),
];

/// Of a map type: its name, when it came, and what brought it.
pub fn map_type(number: u32) -> Option<(&'static str, Version, &'static str)> {
    let found = MAP_TYPES.iter().find(|row| row.0 == number)?;
    Some((found.1, found.2, found.3))
}

/// Of a map flag, by its bit: its name, when it came, and what brought it.
pub fn map_flag(bit: u32) -> Option<(&'static str, Version, &'static str)> {
    let found = MAP_FLAGS.iter().find(|row| row.0 == bit)?;
    Some((found.1, found.2, found.3))
}

/// Whether a look-up in a map of this type gives a socket.
pub(super) fn holds_sockets(number: u32) -> bool {
    [
        bpf_map_type::BPF_MAP_TYPE_SOCKMAP,
        bpf_map_type::BPF_MAP_TYPE_SOCKHASH,
    ]
    .iter()
    .any(|kind| *kind as u32 == number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_have_the_numbers_of_the_bindings() {
        let table = [
            (bpf_map_type::BPF_MAP_TYPE_PROG_ARRAY, "prog_array"),
            (bpf_map_type::BPF_MAP_TYPE_LPM_TRIE, "lpm_trie"),
            (bpf_map_type::BPF_MAP_TYPE_LRU_HASH, "lru_hash"),
            (bpf_map_type::BPF_MAP_TYPE_SK_STORAGE, "sk_storage"),
            (bpf_map_type::BPF_MAP_TYPE_RINGBUF, "ringbuf"),
        ];
        for (kind, name) in table {
            assert_eq!(map_type(kind as u32).unwrap().0, name);
        }
        assert_eq!(map_flag(9).unwrap().0, "clone");
        assert!(map_type(0).is_none() && map_flag(31).is_none());
    }

    #[test]
    fn numbers_rise_by_one() {
        assert!(MAP_TYPES.iter().zip(1..).all(|(row, number)| row.0 == number));
        assert!(MAP_FLAGS.iter().zip(0..).all(|(row, bit)| row.0 == bit));
    }
}
