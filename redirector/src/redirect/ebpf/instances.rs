//! A pod's instance: taken over from an earlier agent, made, put in the place of another, and removed.

use std::{fs, io, os::fd::AsFd as _};

use redirector_common::maps::{
    FACT_ADDED_CLSACT, FACT_CLSACT, FACT_DNS_CAPTURE, FLAG_BYPASS_INBOUND, FLAG_DNS_CAPTURE,
    FLAG_LOOKUP_HAS_IFINDEX, FLAG_ONE_MARK, Facts, MAX_REROUTED, PodEntry,
};

use super::{
    Ebpf,
    facts::{self, Found},
    hooks::{self, Earlier, Programs, TcMode},
    in_netns, leftovers, nsid,
    object::{self, DialRule},
    others::Sockets,
    pin,
    pins::Instance,
    plan::Plan,
    report,
    routes::ROUTING,
    spares::Spare,
    store::Last,
};
use crate::{
    mesh::pod::PodUid,
    redirect::{Error, PodNetwork, metrics::Repair, place_of},
    sys::{
        netlink::Netlink,
        netns::{Netns, Place},
    },
};

/// What an instance is to serve.
#[derive(Clone, Copy)]
struct Wanted<'a> {
    pod: &'a PodNetwork,
    place: Place,
    plan: &'a Plan,
    listeners: &'a Sockets<'a>,
}

impl Ebpf {
    /// Sees to it that there is one whole instance of a pod: takes over what is there, or makes another in its place.
    pub(super) fn attach_anew(
        &self,
        pod: &PodNetwork,
        plan: &Plan,
        listeners: &Sockets<'_>,
    ) -> Result<(Instance, Programs), Error> {
        let place = place_of(&pod.netns)?;
        let wanted = Wanted {
            pod,
            place,
            plan,
            listeners,
        };
        let earlier = self.instances_of(&pod.uid)?;
        if let [found] = earlier.as_slice()
            && let Some(programs) = self.adopt(wanted, found)?
        {
            return Ok((found.0.clone(), programs));
        }
        let is_here = |(_, facts): &Found| facts.is_none_or(|facts| facts::place(&facts) == place);
        let (here, elsewhere): (Vec<_>, Vec<_>) = earlier.into_iter().partition(is_here);
        let before = facts::together(here.iter().map(|(_, facts)| *facts));
        let Spare { slot, programs } = self.programs_for(&pod.uid)?;
        let instance = Instance {
            build: self.build.clone(),
            slot,
            uid: pod.uid.clone(),
        };
        if instance.directory().exists() {
            // What holds the pod's hooks is not to be taken away with what could not be made.
            return Err(Error::new(
                format!("making {}", instance.directory().display()),
                "it is there: somebody pins beside this agent",
            ));
        }
        match self.install(wanted, &instance, programs, before.as_ref()) {
            Ok((programs, fault)) => {
                report(self.remove_replaced(pod, plan, &here, &elsewhere));
                fault?;
                Ok((instance, programs))
            }
            Err(error) => {
                report(if before.is_some() {
                    // The earlier instance stays: its pod fails closed.
                    self.give_way(pod, plan, &instance, &here)
                } else {
                    let freed = |instance: &Instance| self.free(instance, Last::Pass);
                    let found = facts::found(instance);
                    match leftovers::others(&self.pins, &pod.uid) {
                        Ok(others) => {
                            leftovers::remove_one(&found, Some((&pod.netns, place)), &others, freed)
                        }
                        Err(error) => vec![error],
                    }
                });
                Err(error)
            }
        }
    }

    /// Takes over an instance of the pod's if it is of this build and in place, and tells its programs; `None` means that it is not
    /// to be taken over.
    fn adopt(&self, wanted: Wanted<'_>, (instance, facts): &Found) -> Result<Option<Programs>, Error> {
        let Wanted {
            pod,
            place,
            plan,
            listeners,
        } = wanted;
        if instance.build != self.build {
            tracing::info!(uid = %pod.uid, "replacing an instance of another build");
            return Ok(None);
        }
        if !self.store().is_of(instance.slot, &pod.uid) {
            tracing::warn!(uid = %pod.uid, slot = instance.slot, "replacing an instance whose slot is not its own");
            return Ok(None);
        }
        let before = self.store().entry(instance.slot)?;
        let entry = self.entry(wanted, self.node_nsid(&pod.netns)?);
        let facts_wanted = self.facts(pod, place);
        let same_kind = |facts: &&Facts| {
            facts::place(facts) == place
                && facts.has(FACT_CLSACT) == facts_wanted.has(FACT_CLSACT)
                && [FLAG_LOOKUP_HAS_IFINDEX, FLAG_ONE_MARK]
                    .iter()
                    .all(|flag| before.has(*flag) == entry.has(*flag))
        };
        let Some(facts) = facts.as_ref().filter(same_kind) else {
            tracing::info!(uid = %pod.uid, ?before, ?facts, wanted = ?entry, "replacing an instance of another kind or namespace");
            return Ok(None);
        };
        let Some(programs) = self.in_place(pod, plan, instance) else {
            self.repairs.add(Repair::Hooks);
            tracing::warn!(uid = %pod.uid, "hooks or pins of the capture are gone, or the pod has new interfaces: attaching anew");
            return Ok(None);
        };
        let mut known = *facts;
        let set = in_netns(&pod.netns, || ROUTING.set_sysctls(plan.v6));
        if let Ok(changed @ 1..) = set {
            known.changed_sysctls |= changed;
            self.store().set_facts(instance.slot, known)?;
        }
        let routed = in_netns(&pod.netns, || {
            ROUTING.add(plan.v6, &pod.rules.reroute_interfaces.0)
        });
        if let (Ok(1..), _) | (_, Ok(1..)) = (&set, &routed) {
            self.repairs.add(Repair::Routing);
            tracing::warn!(uid = %pod.uid, "rules, routes or sysctls of the capture were gone, and are put back");
        }
        {
            let mut store = self.store();
            store.set_addresses(instance.slot, &plan.addresses)?;
            store.set_listeners(instance.slot, listeners)?;
        }
        set.and(routed)?;
        // Before anything of the rules is changed: a pod that can't have them keeps those that it has.
        self.give_dns(pod, plan, instance.slot, before.has(FLAG_DNS_CAPTURE))?;
        let mut store = self.store();
        store.set_entry_and_rules(instance.slot, entry, &plan.rules)?;
        let flags = facts_wanted.flags | facts.flags & FACT_ADDED_CLSACT;
        if known.flags != flags {
            known.flags = flags;
            store.set_facts(instance.slot, known)?;
        }
        tracing::debug!(uid = %pod.uid, "the programs are in place");
        Ok(Some(programs))
    }

    /// Makes a new instance of the programs `ebpf`; `before` is what is known of those that it replaces in the same namespace. A pod
    /// that is captured already is made as whole as can be: what failed is told beside.
    fn install(
        &self,
        wanted: Wanted<'_>,
        instance: &Instance,
        mut ebpf: aya::Ebpf,
        before: Option<&Facts>,
    ) -> Result<(Programs, Result<(), Error>), Error> {
        let Wanted {
            pod,
            place,
            plan,
            listeners,
        } = wanted;
        let directory = instance.directory();
        let mut facts = self.facts(pod, place);
        if let Some(before) = before {
            facts.flags |= before.flags & FACT_ADDED_CLSACT;
            facts.changed_sysctls = before.changed_sysctls;
        }
        let had_dns = before.is_some_and(|before| before.has(FACT_DNS_CAPTURE));
        // Whatever else can't be had, a pod that is captured gets its hooks: without them it would not be.
        let mut fault = Ok(());
        let mut put_off = |error: Error| -> Result<(), Error> {
            if before.is_none() {
                return Err(error);
            }
            fault = std::mem::replace(&mut fault, Ok(())).and(Err(error));
            Ok(())
        };
        let dns = self.give_dns(pod, plan, instance.slot, had_dns);
        let without_dns = dns.is_err() && !had_dns;
        dns.or_else(&mut put_off)?;
        facts.flags &= !flag(without_dns, FACT_DNS_CAPTURE);
        // Known from the first moment that something is to be found.
        self.store().set_facts(instance.slot, facts)?;
        fs::create_dir(&directory)
            .map_err(|error| Error::new(format!("making {}", directory.display()), error))?;
        for name in [object::EGRESS, object::INGRESS] {
            pin(&mut ebpf, name, &directory.join(name))?;
        }
        if !self.shared.serve(&directory) {
            return Err(Error::new(
                format!("making the programs of {}", pod.uid),
                "they were loaded while the maps' pins were away, and use others; new ones are made",
            ));
        }
        // Everything that a packet may need is there before the first is steered.
        let node_nsid = self.node_nsid(&pod.netns)?;
        let added_clsact =
            self.tc_mode == TcMode::Clsact && in_netns(&pod.netns, || hooks::add_clsact(&plan.interfaces))?;
        match in_netns(&pod.netns, || ROUTING.set_sysctls(plan.v6)) {
            Ok(changed) => facts.changed_sysctls |= changed,
            Err(error) => put_off(error).inspect_err(|_| {
                if added_clsact {
                    let removed = pod.netns.run(|| hooks::remove_clsact(&plan.interfaces));
                    report(removed.unwrap_or_default());
                }
            })?,
        }
        facts.flags |= flag(added_clsact, FACT_ADDED_CLSACT);
        {
            let mut store = self.store();
            store.set_facts(instance.slot, facts)?;
            let mut entry = self.entry(wanted, node_nsid);
            entry.flags &= !flag(without_dns, FLAG_DNS_CAPTURE);
            store.set_entry_and_rules(instance.slot, entry, &plan.rules)?;
            store.set_addresses(instance.slot, &plan.addresses)?;
            store.set_listeners(instance.slot, listeners)?;
        }
        in_netns(&pod.netns, || {
            ROUTING.add(plan.v6, &pod.rules.reroute_interfaces.0)
        })
        .map(drop)
        .or_else(&mut put_off)?;
        hooks::attach_lookup(&mut ebpf, self.object.dial_rule, &pod.netns)?.keep(&directory)?;
        let shortened = self.grace_periods.shorten();
        in_netns(&pod.netns, || {
            for interface in &plan.interfaces {
                let hooks = hooks::attach_tc(&mut ebpf, self.tc_mode, interface, Earlier::Replaced)?;
                hooks.into_iter().try_for_each(|hook| hook.keep(&directory))?;
            }
            Ok(())
        })?;
        drop(shortened);
        let programs = Programs::pinned(&directory).ok_or_else(|| {
            let operation = format!("reading what was pinned in {}", directory.display());
            Error::new(operation, io::Error::from(io::ErrorKind::NotFound))
        })?;
        Ok((programs, fault))
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

    /// Removes what there is for a pod, in the namespace that it has, or in those that are known.
    pub(super) fn remove(&self, uid: &PodUid, netns: Option<&Netns>) -> Result<(), Vec<Error>> {
        let instances = self.instances_of(uid).map_err(|error| vec![error])?;
        let freed = |instance: &Instance| self.free(instance, Last::Pass);
        let _shortened = self.grace_periods.shorten();
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
            self.store().free(instance.slot, &instance.uid, last)
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

    /// What the programs know as the node's namespace, in the pod's.
    fn node_nsid(&self, pod: &Netns) -> Result<u32, Error> {
        let Some(node) = &self.node else { return Ok(0) };
        let asked = in_netns(pod, || {
            nsid::in_this_namespace(node.as_fd())
                .map_err(|error| Error::new("asking for the id of the node's namespace in the pod's", error))
        });
        Ok(asked? + 1)
    }

    fn entry(&self, wanted: Wanted<'_>, node_nsid: u32) -> PodEntry {
        let Wanted {
            pod, plan, listeners, ..
        } = wanted;
        let mut rerouted = [0; MAX_REROUTED];
        for (place, interface) in rerouted.iter_mut().zip(&plan.rerouted) {
            *place = interface.index;
        }
        PodEntry {
            flags: flag(self.object.dial_rule == DialRule::Device, FLAG_LOOKUP_HAS_IFINDEX)
                | flag(pod.rules.bypass_inbound, FLAG_BYPASS_INBOUND)
                | flag(pod.rules.dns_capture, FLAG_DNS_CAPTURE)
                | flag(listeners.of_others, FLAG_ONE_MARK),
            node_nsid,
            rerouted,
            ..bytemuck::Zeroable::zeroed()
        }
    }

    /// What is to be known of an instance in `place`, before anything is changed there.
    fn facts(&self, pod: &PodNetwork, place: Place) -> Facts {
        let flags =
            flag(self.tc_mode == TcMode::Clsact, FACT_CLSACT) | flag(pod.rules.dns_capture, FACT_DNS_CAPTURE);
        facts::first(place, flags)
    }
}

const fn flag(on: bool, flag: u32) -> u32 {
    if on { flag } else { 0 }
}
