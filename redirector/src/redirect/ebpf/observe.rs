//! The programs on a namespace without a proxy: they count what they would do, and let everything pass. An agent may serve pods
//! meanwhile: of what is pinned, only the tags of its proxies' sockets are used, if there are any, to tell those as it does.

use std::sync::Arc;

use redirector_common::maps::{self as layout, FLAG_LOOKUP_HAS_IFINDEX, FLAG_OBSERVE, PodEntry};

use super::{
    Config,
    hooks::{self, Earlier, Hook, TcMode},
    in_netns,
    object::{self, DialRule, Object},
    pins::Pins,
    plan::Plan,
    store::{address_key, read_counts},
};
use crate::{
    redirect::{
        Count, Error, PodNetwork,
        maps::{AddressMap, CounterMap, PodMap},
    },
    sys::netns::Netns,
};

/// The only slot in an observation's maps.
const SLOT: u32 = 0;

/// Programs that observe a namespace for as long as this value lives. Nothing is pinned.
pub struct Observation {
    counters: CounterMap,
    interfaces: Vec<String>,
    netns: Arc<Netns>,
    hooks: Vec<Hook>,
    programs: aya::Ebpf,
}

impl Observation {
    /// Observes the namespace of `pod`. Blocking.
    ///
    /// # Errors
    /// Those of an attachment.
    pub fn begin(config: &Config, pod: &PodNetwork) -> Result<Self, Error> {
        object::check_embedded(object::OBJECT)?;
        let plan = Plan::of(pod, false)?;
        let tc_mode = TcMode::of_kernel(config.force_clsact);
        // Maps of its own: nothing that serves pods is touched.
        let tags = Pins::existing(&config.bpffs_dir).shared().join(layout::TAGS);
        let pinned = tags.exists().then_some((layout::TAGS, tags));
        let object = Object::prepare(pinned, config.force_source_port)?;
        let mut ebpf = object.load(SLOT)?;
        object.load_own(&mut ebpf)?;
        object::load_shared(&mut ebpf)?;
        let mut map = |name: &str| {
            let missing = || Error::new(format!("finding the map {name}"), "not in the object");
            match ebpf.take_map(name).ok_or_else(missing)? {
                aya::maps::Map::Array(map)
                | aya::maps::Map::HashMap(map)
                | aya::maps::Map::PerCpuArray(map) => Ok(map),
                _ => Err(missing()),
            }
        };
        let failed = |error| Error::new("filling the pod's maps", error);
        let flags = FLAG_OBSERVE
            | if object.dial_rule == DialRule::Device {
                FLAG_LOOKUP_HAS_IFINDEX
            } else {
                0
            };
        PodMap::new(map(layout::PODS)?)
            .and_then(|mut pod| {
                let entry = PodEntry {
                    flags,
                    ..bytemuck::Zeroable::zeroed()
                };
                pod.write(SLOT, entry)
            })
            .map_err(failed)?;
        AddressMap::new(map(layout::ADDRESSES)?)
            .and_then(|mut addresses| {
                let mut all = plan.addresses.iter();
                all.try_for_each(|address| addresses.insert(address_key(SLOT, *address)))
            })
            .map_err(failed)?;
        let counters = CounterMap::new(map(layout::COUNTERS)?).map_err(failed)?;
        let lookup = hooks::attach_lookup(&mut ebpf, object.dial_rule, &pod.netns)?;
        // From here on, a failure drops what is attached as the end of an observation does.
        let mut observation = Observation {
            counters,
            interfaces: plan
                .interfaces
                .iter()
                .map(|interface| interface.name.clone())
                .collect(),
            netns: Arc::clone(&pod.netns),
            hooks: vec![lookup],
            programs: ebpf,
        };
        in_netns(&pod.netns, || {
            if tc_mode == TcMode::Clsact {
                // It stays: by the end of an observation somebody else may use it.
                hooks::add_clsact(&plan.interfaces)?;
            }
            for interface in &plan.interfaces {
                let attached =
                    hooks::attach_tc(&mut observation.programs, tc_mode, interface, Earlier::Refused)?;
                observation.hooks.extend(attached);
            }
            Ok(())
        })?;
        Ok(observation)
    }
    /// What has been counted so far.
    pub fn counts(&self) -> Result<Vec<Count>, Error> {
        read_counts(&self.counters, SLOT)
    }

    /// The interfaces that are observed.
    pub fn interfaces(&self) -> &[String] {
        &self.interfaces
    }
}

impl Drop for Observation {
    fn drop(&mut self) {
        let hooks = std::mem::take(&mut self.hooks);
        // Dropping a filter removes it by its interface's index, which means something only in its own namespace.
        if let Err(error) = self.netns.run(|| drop(hooks)) {
            tracing::error!(%error, netns = %self.netns.id(), "the programs stay attached");
        }
    }
}
