//! The eBPF backend: small programs of each pod's own, on its interfaces and its namespace, that go on to programs which all pods
//! share. All are pinned, so that they outlive the agent and are adopted by the next.
//!
//! - `object`: the embedded object and its loading; `shared`: what all pods have of it
//! - `store`: the maps, and the pods' slots in them; `slots`: which are free
//! - `trie`: rules as the programs look them up; `generations`: their change
//! - `dns`: the DNS listeners of a pod, of whatever process
//! - `hooks`: TC and SK_LOOKUP attachment; `filters`: others' clsact filters, and ours among them
//! - `nsid`: the id of the node's namespace in the pod's
//! - `reroute`: interfaces of which what arrives is outbound
//! - `routes`: which policy routes and sysctls it wants in the pod
//! - `facts`: what is known of the pods' instances, of whatever build
//! - `plan`: what an attachment is made from
//! - `look`: whether a pod is still as it was left
//! - [`leftovers`]: what is left of all that, and its removal
//! - `pins`: the bpffs
//! - [`observe`]: the programs on a namespace without a proxy
//! - [`trace`]: debug records of the programs

mod dns;
mod facts;
mod filters;
mod generations;
mod hooks;
pub mod leftovers;
mod look;
mod nsid;
pub mod object;
pub mod observe;
mod pins;
mod plan;
mod reroute;
mod routes;
mod shared;
mod slots;
mod store;
pub mod trace;
mod trie;

use std::{
    collections::HashMap,
    fs, io,
    net::SocketAddr,
    os::fd::{AsFd as _, BorrowedFd},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use aya::{maps::MapData, programs::SchedClassifier};
use redirector_common::{
    consts::{MARK_APP, MARK_MASK, MARK_PROXY, MARK_REROUTED},
    maps::{
        self as layout, FACT_ADDED_CLSACT, FACT_CLSACT, FACT_DNS_CAPTURE, FLAG_BYPASS_INBOUND,
        FLAG_DNS_CAPTURE, FLAG_LOOKUP_HAS_IFINDEX, FLAG_RELEASING, Facts, MAX_PODS, MAX_REROUTED, PodEntry,
        Tag,
    },
};

use self::{
    facts::{Found, Place},
    hooks::{Earlier, Programs, TcMode},
    look::Known,
    object::{DialRule, Object},
    pins::{Build, Instance, Pins},
    plan::Plan,
    routes::ROUTING,
    shared::Shared,
    store::{Last, Store},
};
use super::{
    Count, Error, Listeners, Marks, PodNetwork, Redirector,
    maps::{ProberMap, TagMap},
    probers::{Search, Sources, View},
};
use crate::{
    mesh::pod::PodUid,
    sys::{netlink::Netlink, netns::Netns, socket},
};

/// Settings of the backend.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where programs, maps and links are pinned; a bpffs is mounted if there is none.
    pub bpffs_dir: PathBuf,
    /// Attach with clsact filters even where the kernel has TCX links.
    pub force_clsact: bool,
    /// Tell the proxy's own dials by their source port even where the kernel tells their device.
    pub force_source_port: bool,
    /// Whose connections from this node are left alone.
    pub probes: Sources,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            bpffs_dir: "/sys/fs/bpf/redirector".into(),
            force_clsact: false,
            force_source_port: false,
            probes: Sources::None,
        }
    }
}

/// The eBPF backend.
pub struct Ebpf {
    pins: Pins,
    build: Build,
    object: Object,
    shared: Shared,
    tc_mode: TcMode,
    tags: Mutex<TagMap>,
    store: Mutex<Store>,
    /// The pods that were attached and not yet detached; their namespaces are held open by the pods' owner as long.
    known: Mutex<HashMap<PodUid, Arc<Known>>>,
    probers: Mutex<Probers>,
    /// The namespace whose processes may probe; `None` if nobody may.
    node: Option<Netns>,
}

/// Who probes, as looked for and as the programs know it.
struct Probers {
    search: Search,
    map: ProberMap,
}

impl Ebpf {
    /// Makes the directory for pins, on a bpffs that is mounted if there is none. Nothing else is touched: whoever goes on to
    /// [`Self::open`] locks it first.
    ///
    /// # Errors
    /// A missing right.
    pub fn prepare(bpffs_dir: &Path) -> Result<(), Error> {
        Pins::prepare(bpffs_dir).map(drop)
    }

    /// Opens the backend in a directory that is prepared and locked: tries all programs on this kernel, and loads those that all pods
    /// share. What is left of builds that serve no pod is removed.
    ///
    /// # Errors
    /// A missing right, a kernel without a needed feature, a binary built without eBPF: each says what to do.
    pub fn open(config: &Config) -> Result<Self, Error> {
        object::check_embedded(object::OBJECT)?;
        let pins = Pins::existing(&config.bpffs_dir);
        let build = pins.build(object::build_hash())?;
        let pinned = object::pins_of(&pins.shared(), &build);
        let object = Object::prepare(pinned, config.force_source_port)?;
        let mut trial = object.load(0)?;
        object.load_own(&mut trial)?;
        let deciders = shared::load(&mut trial, &build)?;
        let shared = Shared::hold(object::pins_of(&pins.shared(), &build), &build, deciders)?;
        for build in pins.builds()? {
            // Told once: they are passed over each time that somebody looks for a pod's.
            for path in build.strangers()? {
                tracing::warn!(path = %path.display(), "not the directory of a pod");
            }
        }
        for other in pins.builds()?.iter().filter(|other| **other != build) {
            if let Err(error) = other.remove_if_unused() {
                tracing::warn!(%error, "an older build's maps stay");
            }
        }
        let tc_mode = TcMode::of_kernel(config.force_clsact);
        let tags = open_map(&pins.shared(), layout::TAGS, TagMap::new)?;
        let store = Store::open(&build)?;
        let node =
            Netns::current().map_err(|error| Error::new("opening the node's network namespace", error))?;
        let probers = Probers {
            search: Search::new(config.probes.clone(), node.id())
                .map_err(|error| Error::new("looking for the hierarchy of cgroups", error))?,
            map: open_map(&build.maps(), layout::PROBERS, ProberMap::new)?,
        };
        tracing::info!(?tc_mode, dial_rule = ?object.dial_rule, "eBPF programs accepted by this kernel");
        Ok(Self {
            pins,
            build,
            object,
            shared,
            tc_mode,
            tags: Mutex::new(tags),
            store: Mutex::new(store),
            known: Mutex::default(),
            probers: Mutex::new(probers),
            node: (config.probes != Sources::None).then_some(node),
        })
    }

    /// What the programs know as the node's namespace, in the pod's.
    fn node_nsid(&self, pod: &Netns) -> Result<u32, Error> {
        let Some(node) = &self.node else { return Ok(0) };
        let asked = in_netns(pod, || {
            nsid::in_this_namespace(node.as_fd())
                .map_err(|error| Error::new("asking for the id of the node's namespace in the pod's", error))
        });
        Ok(asked? + 1)
    }

    fn entry(&self, pod: &PodNetwork, plan: &Plan, node_nsid: u32) -> PodEntry {
        let mut rerouted = [0; MAX_REROUTED];
        for (place, interface) in rerouted.iter_mut().zip(&plan.rerouted) {
            *place = interface.index;
        }
        PodEntry {
            flags: flag(self.object.dial_rule == DialRule::Device, FLAG_LOOKUP_HAS_IFINDEX)
                | flag(pod.rules.bypass_inbound, FLAG_BYPASS_INBOUND)
                | flag(pod.rules.dns_capture, FLAG_DNS_CAPTURE),
            node_nsid,
            rerouted,
            ..bytemuck::Zeroable::zeroed()
        }
    }

    /// What is to be known of an instance in `place`, before anything is changed there.
    fn facts(&self, pod: &PodNetwork, place: Place) -> Facts {
        let flags =
            flag(self.tc_mode == TcMode::Clsact, FACT_CLSACT) | flag(pod.rules.dns_capture, FACT_DNS_CAPTURE);
        place.facts(flags)
    }

    fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes over an instance of the pod's if it is of this build and in place, and tells its programs; `None` means that it is not
    /// to be taken over.
    fn adopt(
        &self,
        pod: &PodNetwork,
        place: Place,
        plan: &Plan,
        listeners: Listeners<'_>,
        (instance, facts): &Found,
    ) -> Result<Option<Programs>, Error> {
        if instance.build != self.build {
            tracing::info!(uid = %pod.uid, "replacing an instance of another build");
            return Ok(None);
        }
        let before = self.store().entry(instance.slot)?;
        let entry = self.entry(pod, plan, self.node_nsid(&pod.netns)?);
        let wanted = self.facts(pod, place);
        let same_kind = |facts: &&Facts| {
            facts::place(facts) == place
                && facts.has(FACT_CLSACT) == wanted.has(FACT_CLSACT)
                && before.has(FLAG_LOOKUP_HAS_IFINDEX) == entry.has(FLAG_LOOKUP_HAS_IFINDEX)
        };
        let Some(facts) = facts.as_ref().filter(same_kind) else {
            tracing::info!(uid = %pod.uid, ?before, ?facts, wanted = ?entry, "replacing an instance of another kind or namespace");
            return Ok(None);
        };
        let Some(programs) = self.in_place(pod, plan, instance) else {
            tracing::warn!(uid = %pod.uid, "hooks or pins of the capture are gone, or the pod has new interfaces: attaching anew");
            return Ok(None);
        };
        let (changed, added) = in_netns(&pod.netns, || {
            Ok((
                ROUTING.set_sysctls(plan.v6)?,
                ROUTING.add(plan.v6, &pod.rules.reroute_interfaces.0)?,
            ))
        })?;
        if changed != 0 || added != 0 {
            tracing::warn!(uid = %pod.uid, added, "rules, routes or sysctls of the capture were gone, and are put back");
        }
        let had_dns = before.has(FLAG_DNS_CAPTURE);
        let mut known;
        {
            let mut store = self.store();
            store.set_addresses(instance.slot, &plan.addresses)?;
            store.set_listeners(instance.slot, listeners)?;
            // What is new to it comes when it has its listeners.
            let new_dns = |bit| flag(entry.has(FLAG_DNS_CAPTURE) && !had_dns, bit);
            let flags = entry.flags & !new_dns(FLAG_DNS_CAPTURE);
            store.set_entry_and_rules(instance.slot, PodEntry { flags, ..entry }, &plan.rules)?;
            let flags = wanted.flags & !new_dns(FACT_DNS_CAPTURE);
            known = Facts {
                flags: flags | facts.flags & FACT_ADDED_CLSACT,
                changed_sysctls: facts.changed_sysctls | changed,
                ..*facts
            };
            if known != *facts {
                store.set_facts(instance.slot, known)?;
            }
        }
        // Last, so that whatever becomes of the DNS, the rest is whole.
        self.give_dns(pod, plan, instance.slot, had_dns)?;
        if entry.has(FLAG_DNS_CAPTURE) && !had_dns {
            let mut store = self.store();
            store.set_entry(instance.slot, entry)?;
            known.flags |= FACT_DNS_CAPTURE;
            store.set_facts(instance.slot, known)?;
        }
        tracing::debug!(uid = %pod.uid, "the programs are in place");
        Ok(Some(programs))
    }

    /// Makes a new instance; `before` is what is known of those that it replaces in the same namespace. A pod that is captured already
    /// is made whole even if its DNS can't be: that is told beside.
    fn install(
        &self,
        pod: &PodNetwork,
        place: Place,
        plan: &Plan,
        listeners: Listeners<'_>,
        instance: &Instance,
        before: Option<&Facts>,
    ) -> Result<(Programs, Result<(), Error>), Error> {
        let directory = instance.directory();
        let mut facts = self.facts(pod, place);
        if let Some(before) = before {
            facts.flags |= before.flags & FACT_ADDED_CLSACT;
            facts.changed_sysctls = before.changed_sysctls;
        }
        let had_dns = before.is_some_and(|before| before.has(FACT_DNS_CAPTURE));
        let dns = match self.give_dns(pod, plan, instance.slot, had_dns) {
            Err(error) if before.is_none() => return Err(error),
            dns => dns,
        };
        let without_dns = dns.is_err() && !had_dns;
        facts.flags &= !flag(without_dns, FACT_DNS_CAPTURE);
        // Known from the first moment that something is to be found.
        self.store().set_facts(instance.slot, facts)?;
        let mut ebpf = self.object.load(instance.slot)?;
        self.object.load_own(&mut ebpf)?;
        fs::create_dir(&directory)
            .map_err(|error| Error::new(format!("making {}", directory.display()), error))?;
        for name in [object::EGRESS, object::INGRESS] {
            pin(&mut ebpf, name, &directory.join(name))?;
        }
        // Everything that a packet may need is there before the first is steered.
        let node_nsid = self.node_nsid(&pod.netns)?;
        let (changed, added_clsact) = in_netns(&pod.netns, || {
            let added = self.tc_mode == TcMode::Clsact && hooks::add_clsact(&plan.interfaces)?;
            let changed = ROUTING.set_sysctls(plan.v6).inspect_err(|_| {
                if added {
                    report(hooks::remove_clsact(&plan.interfaces));
                }
            })?;
            Ok((changed, added))
        })?;
        facts.changed_sysctls |= changed;
        facts.flags |= flag(added_clsact, FACT_ADDED_CLSACT);
        {
            let mut store = self.store();
            store.set_facts(instance.slot, facts)?;
            let mut entry = self.entry(pod, plan, node_nsid);
            entry.flags &= !flag(without_dns, FLAG_DNS_CAPTURE);
            store.set_entry_and_rules(instance.slot, entry, &plan.rules)?;
            store.set_addresses(instance.slot, &plan.addresses)?;
            store.set_listeners(instance.slot, listeners)?;
        }
        in_netns(&pod.netns, || {
            ROUTING.add(plan.v6, &pod.rules.reroute_interfaces.0)
        })?;
        hooks::attach_lookup(&mut ebpf, self.object.dial_rule, &pod.netns)?.keep(&directory)?;
        in_netns(&pod.netns, || {
            for interface in &plan.interfaces {
                let hooks = hooks::attach_tc(&mut ebpf, self.tc_mode, interface, Earlier::Replaced)?;
                hooks.into_iter().try_for_each(|hook| hook.keep(&directory))?;
            }
            Ok(())
        })?;
        let programs = Programs::pinned(&directory).ok_or_else(|| {
            let operation = format!("reading what was pinned in {}", directory.display());
            Error::new(operation, io::Error::from(io::ErrorKind::NotFound))
        })?;
        Ok((programs, dns))
    }

    /// The programs of an instance, if they are where they should be.
    fn in_place(&self, pod: &PodNetwork, plan: &Plan, instance: &Instance) -> Option<Programs> {
        let directory = instance.directory();
        let programs = Programs::pinned(&directory).filter(|_| self.shared.serve(&directory))?;
        let attached = pod.netns.run(|| {
            let mut netlink = Netlink::open().ok()?;
            let mut interfaces = plan.interfaces.iter();
            interfaces
                .all(|interface| programs.are_on(&mut netlink, self.tc_mode, interface))
                .then_some(programs)
        });
        attached
            .ok()
            .flatten()
            .filter(|programs| programs.look_up_in(&pod.netns))
    }

    /// A slot for a new instance. Waits where all that are free have just become so.
    fn allocate(&self, uid: &PodUid) -> Result<u32, Error> {
        /// Another pod may be faster.
        const ATTEMPTS: usize = 3;
        for _ in 0..ATTEMPTS {
            let taken = self.store().allocate(uid);
            match taken? {
                Ok(slot) => return Ok(slot),
                Err(resting) => std::thread::sleep(resting),
            }
        }
        Err(Error::new(
            "enrolling one more pod",
            format!(
                "nearly all of the {MAX_PODS} pods that a node may have are there, or are just being released: try again"
            ),
        ))
    }

    /// What there is for a pod, of all builds: what is pinned, and what has lost its pins.
    fn instances_of(&self, uid: &PodUid) -> Result<Vec<Found>, Error> {
        // What is looked for by its path from here on is there.
        self.shared.pin_again()?;
        let mut instances = self.pins.of(uid)?;
        for slot in self.store().slots_of(uid) {
            let instance = Instance {
                build: self.build.clone(),
                slot,
                uid: uid.clone(),
            };
            if !instances.contains(&instance) {
                instances.push(instance);
            }
        }
        Ok(instances.into_iter().map(facts::found).collect())
    }

    /// Removes what there is for a pod.
    fn remove(&self, uid: &PodUid, netns: Option<&Netns>) -> Result<(), Vec<Error>> {
        let instances = self.instances_of(uid).map_err(|error| vec![error])?;
        let freed = |instance: &Instance| self.free(instance, Last::Pass);
        leftovers::remove(&self.pins, uid, &instances, netns, freed)
    }

    /// Takes an instance's pins away, the hooks with them, and empties its slot.
    fn dispose(&self, instance: &Instance, last: Last) -> Vec<Error> {
        let errors = hooks::unpin(&instance.directory());
        if errors.is_empty() {
            self.free(instance, last)
        } else {
            // Programs that still run keep their slot.
            errors
        }
    }

    /// Empties the slot of an instance whose programs run no more.
    fn free(&self, instance: &Instance, last: Last) -> Vec<Error> {
        if instance.build == self.build {
            self.store().free(instance.slot, last)
        } else {
            Vec::new()
        }
    }

    /// Takes away an instance that could not be made whole, in favour of those that are `here` from before.
    fn give_way(&self, pod: &PodNetwork, plan: &Plan, instance: &Instance, here: &[Found]) -> Vec<Error> {
        if self.tc_mode == TcMode::Clsact {
            let filters = |(_, facts): &&Found| facts.is_none_or(|facts| facts.has(FACT_CLSACT));
            let mut errors = Vec::new();
            let undone = pod.netns.run(|| {
                let mut earlier = here.iter().filter(filters).peekable();
                if earlier.peek().is_none() {
                    errors.extend(plan.interfaces.iter().flat_map(hooks::detach_filters));
                    return errors.is_empty();
                }
                // Of several, one that was not made whole either may lack its programs.
                earlier.any(|(earlier, _)| {
                    let put_back = |interface| hooks::put_back(&earlier.directory(), interface);
                    let result = plan.interfaces.iter().try_for_each(put_back);
                    result.map_err(|error| errors.push(error)).is_ok()
                })
            });
            if !undone.unwrap_or(false) {
                // Its programs still run: it stays, and the next attempt finds it.
                return errors;
            }
        }
        self.dispose(instance, Last::Refused)
    }

    /// Takes away those that a new instance has replaced, `here` and in other namespaces.
    fn remove_replaced(
        &self,
        pod: &PodNetwork,
        plan: &Plan,
        here: &[Found],
        elsewhere: &[Found],
    ) -> Vec<Error> {
        let mut errors = Vec::new();
        let before = facts::together(here.iter().map(|(_, facts)| *facts));
        if let Some(before) = before.filter(|before| before.has(FACT_CLSACT)) {
            // The others have become the new instance's.
            let left: Vec<_> = plan
                .all_interfaces
                .iter()
                .filter(|interface| self.tc_mode == TcMode::Tcx || !plan.interfaces.contains(interface))
                .cloned()
                .collect();
            errors.extend(leftovers::inside(&pod.netns, || {
                let errors: Vec<_> = left.iter().flat_map(hooks::detach_filters).collect();
                if before.has(FACT_ADDED_CLSACT) {
                    report(hooks::remove_clsact(&left));
                }
                errors
            }));
        }
        if errors.is_empty() {
            errors.extend(
                here.iter()
                    .flat_map(|(instance, _)| self.dispose(instance, Last::Pass)),
            );
        }
        if !elsewhere.is_empty() {
            match leftovers::others(&self.pins, &pod.uid) {
                Ok(others) => errors.extend(elsewhere.iter().flat_map(|found| {
                    leftovers::remove_one(found, None, &others, |instance| self.free(instance, Last::Pass))
                })),
                Err(error) => errors.push(error),
            }
        }
        errors
    }
}

impl Ebpf {
    fn attach_anew(
        &self,
        pod: &PodNetwork,
        plan: &Plan,
        listeners: Listeners<'_>,
    ) -> Result<(Instance, Programs), Error> {
        let place = Place::of(&pod.netns)?;
        let earlier = self.instances_of(&pod.uid)?;
        if let [found] = earlier.as_slice()
            && let Some(programs) = self.adopt(pod, place, plan, listeners, found)?
        {
            return Ok((found.0.clone(), programs));
        }
        let is_here = |(_, facts): &Found| facts.is_none_or(|facts| facts::place(&facts) == place);
        let (here, elsewhere): (Vec<_>, Vec<_>) = earlier.into_iter().partition(is_here);
        let before = facts::together(here.iter().map(|(_, facts)| *facts));
        let instance = Instance {
            build: self.build.clone(),
            slot: self.allocate(&pod.uid)?,
            uid: pod.uid.clone(),
        };
        match self.install(pod, place, plan, listeners, &instance, before.as_ref()) {
            Ok((programs, dns)) => {
                report(self.remove_replaced(pod, plan, &here, &elsewhere));
                dns?;
                Ok((instance, programs))
            }
            Err(error) => {
                report(if before.is_some() {
                    // The earlier instance stays: its pod fails closed.
                    self.give_way(pod, plan, &instance, &here)
                } else {
                    let others = leftovers::others(&self.pins, &pod.uid)?;
                    let freed = |instance: &Instance| self.free(instance, Last::Pass);
                    let found = facts::found(instance);
                    leftovers::remove_one(&found, Some((&pod.netns, place)), &others, freed)
                });
                Err(error)
            }
        }
    }

    fn known(&self) -> MutexGuard<'_, HashMap<PodUid, Arc<Known>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Redirector for Ebpf {
    fn name(&self) -> &'static str {
        "ebpf"
    }

    fn marks(&self) -> Marks {
        Marks {
            outbound_listener: None,
            inbound_listeners: Some(MARK_PROXY),
            upstream: Some(MARK_PROXY),
            application: Some(MARK_APP),
            application_over_lo: true,
        }
    }

    fn attach(&self, pod: &PodNetwork, listeners: Listeners<'_>) -> Result<(), Error> {
        let listening = look::cookies(listeners)?;
        if self.shared.put_back()? {
            tracing::warn!("programs that all pods share were gone from their array, and are put back");
        }
        let known = self.known().get(&pod.uid).map(Arc::clone);
        if let Some(known) = known
            && known.still_holds(pod, listening, self.tc_mode)
            && self.still_has_dns(pod, known.slot)?
        {
            return Ok(());
        }
        self.known().remove(&pod.uid);
        let plan = Plan::of(pod)?;
        for listener in [listeners.outbound, listeners.inbound, listeners.hbone] {
            self.own_socket(listener)
                .map_err(|error| Error::new("tagging a listener", error))?;
        }
        let (instance, programs) = self.attach_anew(pod, &plan, listeners)?;
        let known = Known {
            pod: pod.clone(),
            directory: instance.directory(),
            slot: instance.slot,
            interfaces: plan.all_interfaces,
            captured: plan.interfaces,
            v6: plan.v6,
            listening,
            programs,
        };
        self.known().insert(pod.uid.clone(), Arc::new(known));
        Ok(())
    }

    fn release(&self, pod: &PodNetwork) -> Result<(), Error> {
        self.known().remove(&pod.uid);
        for instance in self.pins.of(&pod.uid)? {
            if instance.build == self.build {
                let mut store = self.store();
                let mut entry = store.entry(instance.slot)?;
                entry.flags |= FLAG_RELEASING;
                store.set_entry(instance.slot, entry)?;
            }
        }
        Ok(())
    }

    fn detach(&self, pod: &PodNetwork) -> Result<(), Vec<Error>> {
        self.known().remove(&pod.uid);
        self.remove(&pod.uid, Some(&pod.netns))
    }

    fn forget(&self, uid: &PodUid) -> Result<(), Vec<Error>> {
        self.known().remove(uid);
        self.remove(uid, None)
    }

    fn attached(&self) -> Result<Vec<PodUid>, Error> {
        let mut uids: Vec<_> = self
            .pins
            .instances()?
            .into_iter()
            .map(|instance| instance.uid)
            .collect();
        uids.sort_unstable();
        uids.dedup();
        Ok(uids)
    }

    fn original_dst(&self, connection: BorrowedFd<'_>) -> io::Result<SocketAddr> {
        // The socket was made for the packet as it was sent: its local end is the destination.
        socket::local_addr(connection)
    }

    fn is_rerouted(&self, connection: BorrowedFd<'_>) -> io::Result<bool> {
        // Taken over from its SYN, which nobody but the ingress program of such an interface marks so: packets arrive without a mark.
        Ok(socket::mark(connection)? & MARK_MASK == MARK_REROUTED.0)
    }

    fn counts(&self, uid: &PodUid) -> Result<Vec<Count>, Error> {
        let instances = self.pins.of(uid)?;
        let own = instances.iter().find(|instance| instance.build == self.build);
        own.map_or(Ok(Vec::new()), |instance| self.store().counts(instance.slot))
    }

    fn look_for_probers(&self) -> Result<Option<View>, Error> {
        let mut probers = self.probers.lock().unwrap_or_else(PoisonError::into_inner);
        let (cgroups, view) = probers.search.look();
        let set = probers.map.set(&cgroups);
        set.map_err(|error| Error::new("writing the set of probers", error))?;
        Ok(Some(view))
    }

    fn own_socket(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        let mut tags = self.tags.lock().unwrap_or_else(PoisonError::into_inner);
        tags.set(&socket, Tag::Proxy).map_err(io::Error::other)
    }
}

const fn flag(on: bool, flag: u32) -> u32 {
    if on { flag } else { 0 }
}

fn open_map<T>(
    directory: &Path,
    name: &str,
    typed: impl FnOnce(MapData) -> Result<T, aya::maps::MapError>,
) -> Result<T, Error> {
    let path = directory.join(name);
    MapData::from_pin(&path)
        .and_then(typed)
        .map_err(|error| Error::new(format!("opening {}", path.display()), error))
}

fn pin(ebpf: &mut aya::Ebpf, program: &str, path: &Path) -> Result<(), Error> {
    object::program::<SchedClassifier>(ebpf, program)?
        .pin(path)
        .map_err(|error| Error::new(format!("pinning {}", path.display()), error))
}

fn in_netns<T>(netns: &Netns, f: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    netns
        .run(f)
        .map_err(|error| Error::new(format!("entering {}", netns.id()), error))?
}

fn all_or(errors: Vec<Error>) -> Result<(), Vec<Error>> {
    if errors.is_empty() { Ok(()) } else { Err(errors) }
}

/// Failures of an undo or of a clean-up, on the way to something else.
fn report(errors: Vec<Error>) {
    for error in errors {
        tracing::warn!(%error, "clean-up incomplete");
    }
}
