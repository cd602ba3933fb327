//! The eBPF backend: small programs of each pod's own, on its interfaces and its namespace, that go on to programs which all pods
//! share. All are pinned, so that they outlive the agent and are adopted by the next.
//!
//! - `object`: the embedded object and its loading; `shared`: what all pods have of it
//! - `spares`: programs for pods that are still to come
//! - `store`: the maps, and the pods' slots in them; `slots`: which are free
//! - `trie`: rules as the programs look them up; `generations`: their change
//! - `dns`: the DNS listeners of a pod, of whatever process
//! - `hooks`: TC and SK_LOOKUP attachment; `filters`: others' clsact filters, and ours among them
//! - `nsid`: the id of the node's namespace in the pod's
//! - `reroute`: interfaces of which what arrives is outbound
//! - `routes`: which policy routes and sysctls it wants in the pod
//! - `instances`: a pod's own programs and what they rest on, made and replaced
//! - `facts`: what is known of the pods' instances, of whatever build
//! - `rcu`: the kernel's waiting while links are attached, cut short
//! - `plan`: what an attachment is made from
//! - `look`: whether a pod is still as it was left
//! - [`leftovers`]: what is left of all that, and its removal
//! - `others`: listeners and cgroups of proxies that other processes are
//! - `pins`: the bpffs
//! - [`observe`]: the programs on a namespace without a proxy
//! - [`trace`]: debug records of the programs
//! - [`trial`]: whether the kernel takes the programs; [`strangers`]: what others have attached

mod dns;
mod facts;
mod filters;
mod generations;
mod hooks;
mod instances;
pub mod leftovers;
mod look;
mod nsid;
pub mod object;
pub mod observe;
mod others;
mod pins;
mod plan;
mod rcu;
mod reroute;
mod routes;
mod shared;
mod slots;
mod spares;
mod store;
pub mod strangers;
pub mod trace;
pub mod trial;
mod trie;

use std::{
    collections::HashMap,
    fs, io,
    net::SocketAddr,
    os::fd::BorrowedFd,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use aya::{maps::MapData, programs::SchedClassifier};
use redirector_common::{
    consts::{MARK_APP, MARK_MASK, MARK_PROXY, MARK_REROUTED},
    maps::{self as layout, FLAG_RELEASING, Tag},
};

use self::{
    hooks::TcMode,
    look::{Known, Listening},
    object::Object,
    others::{Sockets, Trusted},
    pins::{Build, Instance, Pins},
    plan::Plan,
    rcu::GracePeriods,
    routes::ROUTING,
    shared::Shared,
    spares::Spares,
    store::Store,
    trie::Compiled,
};
use super::{
    Attached, Count, Error, Marks, PodNetwork, Redirector, Serving,
    maps::{CgroupSet, TagMap},
    metrics::{Occupancy, Repair, Repairs},
    probers::{Search, Sources, View},
    rules::Rules,
};
use crate::{
    mesh::pod::PodUid,
    sys::{netns::Netns, socket},
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
    /// Cut the kernel's waiting short while TCX links are attached and removed, by its switch `rcu_expedited`.
    pub rcu_expedited: bool,
    /// Whose connections from this node are left alone.
    pub probes: Sources,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            bpffs_dir: "/sys/fs/bpf/redirector".into(),
            force_clsact: false,
            force_source_port: false,
            rcu_expedited: true,
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
    grace_periods: GracePeriods,
    tags: Mutex<TagMap>,
    store: Mutex<Store>,
    spares: Spares,
    /// The pods that were attached and not yet detached; their namespaces are held open by the pods' owner as long.
    known: Mutex<HashMap<PodUid, Arc<Known>>>,
    probers: Mutex<Probers>,
    trusted: Mutex<Trusted>,
    /// The namespace whose processes may probe; `None` if nobody may.
    node: Option<Netns>,
    repairs: Repairs,
}

/// Who probes, as looked for and as the programs know it.
struct Probers {
    search: Search,
    map: CgroupSet,
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
        let grace_periods =
            GracePeriods::of_node(&pins.shared(), config.rcu_expedited && tc_mode == TcMode::Tcx);
        let tags = open_map(&pins.shared(), layout::TAGS, TagMap::new)?;
        let store = Store::open(&build)?;
        let node =
            Netns::current().map_err(|error| Error::new("opening the node's network namespace", error))?;
        let probers = Probers {
            search: Search::new(config.probes.clone(), node.id())
                .map_err(|error| Error::new("looking for the hierarchy of cgroups", error))?,
            map: open_map(&build.maps(), layout::PROBERS, CgroupSet::new)?,
        };
        let trusted = Trusted::new(open_map(&build.maps(), layout::PROXIES, CgroupSet::new)?)?;
        tracing::info!(?tc_mode, dial_rule = ?object.dial_rule, "eBPF programs accepted by this kernel");
        Ok(Self {
            pins,
            build,
            object,
            shared,
            tc_mode,
            grace_periods,
            tags: Mutex::new(tags),
            store: Mutex::new(store),
            spares: Spares::default(),
            known: Mutex::default(),
            probers: Mutex::new(probers),
            trusted: Mutex::new(trusted),
            node: (config.probes != Sources::None).then_some(node),
            repairs: Repairs::default(),
        })
    }

    fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
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

    fn refuses(&self, rules: &Rules) -> Option<String> {
        plan::too_many(&Compiled::of(rules))
    }

    fn attach(&self, pod: &PodNetwork, serving: Serving<'_>) -> Result<Attached, Error> {
        if let Serving::Others(peers) = &serving {
            // Before its listeners are given anything: what it opens then is to leave.
            let mut trusted = self.trusted.lock().unwrap_or_else(PoisonError::into_inner);
            trusted.add(peers)?;
        }
        let listening = Listening::now(pod, &serving)?;
        let known = self.known().get(&pod.uid).map(Arc::clone);
        if let Some(known) = known
            && known.still_holds(pod, &listening, self.tc_mode)
            && self.still_has_dns(pod, known.slot)?
        {
            return Ok(known.attached.clone());
        }
        self.known().remove(&pod.uid);
        let sockets = match (&serving, &listening) {
            (Serving::Own(listeners), _) => Sockets::own(*listeners),
            (Serving::Others(peers), Listening::Others(found)) => self.take_listeners(pod, peers, found)?,
            (Serving::Others(_), Listening::Own(_)) => unreachable!("Listening::now answers in kind"),
        };
        let plan = Plan::of(pod, sockets.of_others)?;
        for (_, listener) in sockets.places() {
            self.own_socket(listener)
                .map_err(|error| Error::new("tagging a listener", error))?;
        }
        let (instance, programs) = self.attach_anew(pod, &plan, &sockets)?;
        let attached = Attached { lacks: sockets.lack };
        let sysctls = match in_netns(&pod.netns, || ROUTING.open_sysctls(plan.v6)) {
            Ok(sysctls) => sysctls,
            Err(error) => {
                // It is captured, and is only not known to be: each look takes the long way.
                tracing::warn!(uid = %pod.uid, %error, "the pod can't be looked at cheaply");
                return Ok(attached);
            }
        };
        let known = Known {
            pod: pod.clone(),
            directory: instance.directory(),
            slot: instance.slot,
            interfaces: plan.all_interfaces,
            captured: plan.interfaces,
            v6: plan.v6,
            listening,
            programs,
            sysctls,
            attached: attached.clone(),
        };
        self.known().insert(pod.uid.clone(), Arc::new(known));
        Ok(attached)
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

    fn rename(&self, from: &PodUid, to: &PodUid) -> Result<(), Error> {
        self.known().remove(from);
        self.known().remove(to);
        for before in self.pins.of(from)? {
            let after = Instance {
                uid: to.clone(),
                ..before.clone()
            };
            fs::rename(before.directory(), after.directory()).map_err(|error| {
                let (before, after) = (before.directory(), after.directory());
                Error::new(
                    format!("renaming {} to {}", before.display(), after.display()),
                    error,
                )
            })?;
        }
        self.store().rename(from, to);
        Ok(())
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
        // Known without asking the file system, of nearly every pod.
        let slot = self.known().get(uid).map(|known| known.slot);
        if let Some(slot) = slot {
            return self.store().counts(slot);
        }
        let instances = self.pins.of(uid)?;
        let own = instances.iter().find(|instance| instance.build == self.build);
        own.map_or(Ok(Vec::new()), |instance| self.store().counts(instance.slot))
    }

    fn occupancy(&self) -> Vec<Occupancy> {
        self.store().occupancy()
    }

    fn repairs(&self) -> Option<&Repairs> {
        Some(&self.repairs)
    }

    fn look_for_probers(&self) -> Result<Option<View>, Error> {
        let mut probers = self.probers.lock().unwrap_or_else(PoisonError::into_inner);
        let (cgroups, view) = probers.search.look();
        let set = probers.map.set(&cgroups);
        set.map_err(|error| Error::new("writing the set of probers", error))?;
        Ok(Some(view))
    }

    fn make_ready(&self) -> Result<(), Error> {
        if self.shared.put_back()? {
            self.repairs.add(Repair::Shared);
            tracing::warn!("programs that all pods share were gone from their array, and are put back");
        }
        self.fill_spares()
    }

    fn reread(&self) -> Result<(), Error> {
        self.known().clear();
        // Agents of other builds remove what serves no pod.
        self.pins.build(object::build_hash())?;
        self.shared.pin_again()?;
        self.shared.put_back()?;
        if let Err(error) = rcu::put_back(&self.pins.shared()) {
            tracing::warn!(%error, "another agent has left the grace periods of RCU short");
        }
        self.reread_slots()
    }

    fn own_socket(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        let mut tags = self.tags.lock().unwrap_or_else(PoisonError::into_inner);
        tags.set(&socket, Tag::Proxy).map_err(io::Error::other)
    }
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
