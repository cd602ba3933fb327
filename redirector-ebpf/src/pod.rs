//! The maps, and what they hold for one pod.

use aya_ebpf::{
    Global,
    btf_maps::{Array, HashMap, LpmTrie, ProgramArray, SockMap, lpm_trie::Key},
    macros::btf_map,
    programs::TcContext,
};
use redirector_common::{
    maps::{
        AddressKey, DECIDER_COUNT, Facts, LISTENER_STRIDE, Listener, MAX_ALL_ADDRESSES, MAX_ALL_RULES,
        MAX_SLOTS, PodEntry, RULE_KEY_PREFIX, RuleKey, listener_index,
    },
    net::Addr,
    rules::{self, Match, Rules, Subject},
    verdict::Addresses,
};

/// `BPF_F_NO_PREALLOC`, as a map's parameter.
const NO_PREALLOC: usize = aya_ebpf::bindings::BPF_F_NO_PREALLOC as usize;

/// The pod that this program is a pod's own for. Set when the program is loaded.
#[unsafe(no_mangle)]
static SLOT: Global<u32> = Global::new(0);

#[btf_map]
static PODS: Array<PodEntry, MAX_SLOTS> = Array::new();

/// The agents' own: no program reads it.
#[btf_map]
static FACTS: Array<Facts, MAX_SLOTS> = Array::new();

#[btf_map]
static TRACED: Array<u32, MAX_SLOTS> = Array::new();

#[btf_map]
static ADDRESSES: HashMap<AddressKey, u32, MAX_ALL_ADDRESSES, NO_PREALLOC> = HashMap::new();

#[btf_map]
static RULES: LpmTrie<RuleKey, u32, MAX_ALL_RULES> = LpmTrie::new();

#[btf_map]
pub(crate) static LISTENERS: SockMap<{ MAX_SLOTS * LISTENER_STRIDE as usize }> = SockMap::new();

#[btf_map]
pub(crate) static DECIDERS: ProgramArray<DECIDER_COUNT> = ProgramArray::new();

/// A pod: its slot and its entry. What it knows of addresses and rules is looked up when it is asked.
#[derive(Clone, Copy)]
pub(crate) struct Pod {
    pub(crate) slot: u32,
    pub(crate) entry: &'static PodEntry,
}

impl Pod {
    /// The pod whose own program this is.
    #[inline(always)]
    pub(crate) fn own() -> Option<Self> {
        Self::at(SLOT.load())
    }

    /// The pod whose own program has handed the packet on.
    #[inline(always)]
    pub(crate) fn of(ctx: &TcContext) -> Option<Self> {
        // SAFETY: a valid context; TC programs may use the control buffer.
        Self::at(unsafe { (&raw const (*ctx.skb.skb).cb[0]).read_volatile() })
    }

    /// Leaves the slot with the packet, for the program that is handed it.
    #[inline(always)]
    pub(crate) fn leave_with(self, ctx: &TcContext) {
        // SAFETY: as in `of`.
        unsafe { (&raw mut (*ctx.skb.skb).cb[0]).write_volatile(self.slot) }
    }

    #[inline(always)]
    fn at(slot: u32) -> Option<Self> {
        PODS.get(slot).map(|entry| Self { slot, entry })
    }

    /// Whether somebody reads records of its new connections.
    #[inline(always)]
    pub(crate) fn is_traced(self) -> bool {
        TRACED.get(self.slot).is_some_and(|traced| *traced != 0)
    }

    /// Where the sockmap has a listener of the pod's.
    #[inline(always)]
    pub(crate) fn listener(self, listener: Listener) -> u32 {
        listener_index(self.slot, listener)
    }

    #[inline(always)]
    fn ask(self, subject: Subject, bits: u32, value: [u8; 16]) -> Match {
        let key = RuleKey {
            slot: self.slot,
            subject: subject as u8,
            generation: rules::generation(self.entry.rules),
            zero: [0; 2],
            value,
        };
        RULES
            .get(&Key::new(RULE_KEY_PREFIX + bits, key))
            .copied()
            .unwrap_or(0)
    }
}

impl Addresses for Pod {
    #[inline(always)]
    fn owns(&self, address: &Addr) -> bool {
        let key = AddressKey {
            slot: self.slot,
            address: *address,
        };
        ADDRESSES.get_ptr(key).is_some()
    }
}

impl Rules for Pod {
    #[inline(always)]
    fn port(&self, subject: Subject, port: u16) -> Match {
        let [high, low] = port.to_be_bytes();
        let value = [high, low, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        self.ask(subject, u16::BITS, value)
    }

    #[inline(always)]
    fn address(&self, subject: Subject, address: &Addr) -> Match {
        self.ask(subject, u128::BITS, address.to_bytes())
    }
}
