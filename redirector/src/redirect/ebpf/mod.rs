//! The eBPF backend: one instance of the programs per pod, on its interfaces and its namespace, pinned so that it outlives the
//! agent and is adopted by the next.
//!
//! - `object`: the embedded object and its loading
//! - `hooks`: TC and SK_LOOKUP attachment
//! - `routes`: policy routes and sysctls in the pod
//! - `pins`: the bpffs
//! - [`observe`]: the programs on a namespace without a proxy
//! - [`trace`]: debug records of the programs

mod hooks;
pub mod object;
pub mod observe;
mod pins;
mod routes;
pub mod trace;

use std::{
    collections::HashMap,
    fs, io,
    net::{IpAddr, SocketAddr},
    os::fd::{AsRawFd, BorrowedFd},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use aya::maps::{MapData, SockMap};
use redirector_common::{
    consts::{MARK_APP, MARK_PROXY},
    maps::{
        self as layout, FLAG_LOOKUP_HAS_IFINDEX, FLAG_RELEASING, FLAG_TRACE, Listener, MAX_ADDRESSES,
        PodEntry, Tag,
    },
    verdict::Counter,
};

use self::{
    hooks::TcMode,
    object::{DialRule, Object},
    pins::Pins,
};
use super::{
    Count, Error, Listeners, Marks, PodNetwork, Redirector,
    maps::{AddressMap, CounterMap, PodMap, TagMap},
};
use crate::{
    mesh::pod::PodUid,
    sys::{
        interfaces::{Interface, interfaces},
        netns::Netns,
        socket,
    },
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
}

impl Default for Config {
    fn default() -> Self {
        Self {
            bpffs_dir: "/sys/fs/bpf/redirector".into(),
            force_clsact: false,
            force_source_port: false,
        }
    }
}

/// The eBPF backend.
pub struct Ebpf {
    pins: Pins,
    object: Object,
    tc_mode: TcMode,
    tags: Mutex<TagMap>,
    /// The listeners that each pod's sockmap has been given, by socket cookie. The same socket is never put into its place
    /// again: kernels differ in what that leaves of the link by which a socket leaves the map when it closes.
    given: Mutex<HashMap<PodUid, [u64; 3]>>,
}

/// The maps of one pod.
const MAPS: [&str; 4] = [
    layout::POD,
    layout::ADDRESSES,
    layout::LISTENERS,
    layout::COUNTERS,
];

/// What an attachment is made from.
struct Plan {
    interfaces: Vec<Interface>,
    addresses: Vec<IpAddr>,
    v6: bool,
}

impl Ebpf {
    /// Opens the backend: mounts the bpffs if needed and tries the programs on this kernel.
    ///
    /// # Errors
    /// A missing right, a kernel without a needed feature, a binary built without eBPF: each says what to do.
    pub fn open(config: &Config) -> Result<Self, Error> {
        object::check_embedded(object::OBJECT)?;
        let pins = Pins::prepare(&config.bpffs_dir)?;
        let object = Object::open(&pins.shared(), config.force_source_port)?;
        let tc_mode = if config.force_clsact || !tcx_supported() {
            TcMode::Clsact
        } else {
            TcMode::Tcx
        };
        let tags = open_map(&pins.shared(), layout::TAGS, TagMap::new)?;
        tracing::info!(?tc_mode, dial_rule = ?object.dial_rule, "eBPF programs accepted by this kernel");
        Ok(Self {
            pins,
            object,
            tc_mode,
            tags: Mutex::new(tags),
            given: Mutex::default(),
        })
    }

    fn plan(pod: &PodNetwork) -> Result<Plan, Error> {
        let found = pod
            .netns
            .run(interfaces)
            .and_then(|interfaces| interfaces)
            .map_err(|error| Error::new(format!("reading the interfaces of {}", pod.netns.id()), error))?;
        let mut addresses = pod.addresses.clone();
        addresses.extend(found.iter().flat_map(|interface| &interface.addresses));
        let mut addresses: Vec<_> = addresses
            .iter()
            .map(IpAddr::to_canonical)
            .filter(|ip| !ip.is_loopback())
            .collect();
        addresses.sort_unstable();
        addresses.dedup();
        let refused = |text: String| {
            Err(Error::new(
                format!("planning the capture of {}", pod.uid),
                io::Error::other(text),
            ))
        };
        if addresses.len() > MAX_ADDRESSES {
            return refused(format!(
                "it has {} addresses; at most {MAX_ADDRESSES} are supported",
                addresses.len()
            ));
        }
        let mut interfaces = Vec::new();
        for interface in found {
            if interface.loopback || interface.addresses.is_empty() {
                continue;
            }
            if !interface.ethernet {
                return refused(format!(
                    "its interface {} has addresses but no Ethernet header, and its traffic can't be captured",
                    interface.name
                ));
            }
            interfaces.push(interface);
        }
        if interfaces.is_empty() {
            return refused("none of its interfaces has an address".to_owned());
        }
        let v6 = addresses.iter().any(IpAddr::is_ipv6);
        Ok(Plan {
            interfaces,
            addresses,
            v6,
        })
    }

    fn entry(&self, pod: &PodNetwork, changed_sysctls: u32) -> PodEntry {
        let mut flags = 0;
        if self.object.dial_rule == DialRule::Device {
            flags |= FLAG_LOOKUP_HAS_IFINDEX;
        }
        if self.tc_mode == TcMode::Clsact {
            flags |= layout::FLAG_CLSACT;
        }
        PodEntry {
            build: self.object.build,
            netns_ino: pod.netns.id().ino,
            flags,
            changed_sysctls,
        }
    }

    /// Takes over the pod's instance if it is of this build and in place; `None` means that there is none to take over.
    fn adopt(&self, pod: &PodNetwork, plan: &Plan, listeners: Listeners<'_>) -> Result<Option<()>, Error> {
        let directory = self.pins.pod(&pod.uid);
        let Ok(mut map) = open_map(&directory, layout::POD, PodMap::new) else {
            return Ok(None);
        };
        let Ok(before) = map.read() else { return Ok(None) };
        let entry = self.entry(pod, before.changed_sysctls);
        let comparable = |e: &PodEntry| {
            (
                e.build,
                e.netns_ino,
                e.flags & (FLAG_LOOKUP_HAS_IFINDEX | layout::FLAG_CLSACT),
            )
        };
        if comparable(&before) != comparable(&entry) {
            tracing::info!(uid = %pod.uid, ?before, wanted = ?entry, "replacing an instance of another build, kind or namespace");
            return Ok(None);
        }
        let in_place = pod.netns.run(|| {
            plan.interfaces.iter().all(|interface| match self.tc_mode {
                TcMode::Tcx => hooks::tcx_in_place(&directory, interface),
                TcMode::Clsact => hooks::filters_in_place(&directory, interface),
            })
        });
        let pinned = MAPS.iter().all(|name| directory.join(name).exists());
        if !in_place.unwrap_or(false) || !pinned || !hooks::lookup_in_place(&directory) {
            tracing::warn!(uid = %pod.uid, "hooks or pins of the capture are gone, or the pod has new interfaces: attaching anew");
            return Ok(None);
        }
        let changed = in_netns(&pod.netns, || routes::set_sysctls(plan.v6))?;
        let added = routes_in(&pod.netns, plan.v6)?;
        if changed != 0 || added != 0 {
            tracing::warn!(uid = %pod.uid, added, "rules, routes or sysctls of the capture were gone, and are put back");
        }
        set_addresses(&directory, plan)?;
        self.give_listeners(&pod.uid, &directory, listeners)?;
        let flags = entry.flags | before.flags & FLAG_TRACE;
        let changed_sysctls = before.changed_sysctls | changed;
        map.write(PodEntry {
            flags,
            changed_sysctls,
            ..entry
        })
        .map_err(|error| Error::new("updating the pod's map entry", error))?;
        tracing::debug!(uid = %pod.uid, "the programs are in place");
        Ok(Some(()))
    }

    /// Makes a new instance in `directory`; `before` is the entry of the one that it replaces, if that serves the same
    /// namespace.
    fn install(
        &self,
        pod: &PodNetwork,
        plan: &Plan,
        listeners: Listeners<'_>,
        directory: &Path,
        before: Option<&PodEntry>,
    ) -> Result<(), Error> {
        let mut ebpf = self.object.load()?;
        self.object.load_programs(&mut ebpf)?;
        fs::create_dir(directory)
            .map_err(|error| Error::new(format!("making {}", directory.display()), error))?;
        for name in MAPS {
            let path = directory.join(name);
            let failed = format!("pinning {}", path.display());
            let map = ebpf
                .map_mut(name)
                .ok_or_else(|| Error::new(failed.clone(), "no such map in the object"))?;
            map.pin(&path).map_err(|error| Error::new(failed, error))?;
        }
        for name in [object::EGRESS, object::INGRESS] {
            let path = directory.join(name);
            object::program::<aya::programs::SchedClassifier>(&mut ebpf, name)?
                .pin(&path)
                .map_err(|error| Error::new(format!("pinning {}", path.display()), error))?;
        }
        // Everything that a packet may need is there before the first is steered.
        let changed = in_netns(&pod.netns, || routes::set_sysctls(plan.v6))?;
        let entry = self.entry(pod, changed | before.map_or(0, |before| before.changed_sysctls));
        open_map(directory, layout::POD, PodMap::new)?
            .write(entry)
            .map_err(|error| Error::new("writing the pod's map entry", error))?;
        set_addresses(directory, plan)?;
        self.given().remove(&pod.uid);
        self.give_listeners(&pod.uid, directory, listeners)?;
        routes_in(&pod.netns, plan.v6)?;
        hooks::attach_lookup(&mut ebpf, self.object.dial_rule, &pod.netns)?.keep(directory)?;
        let filters_before = before.is_some_and(|before| before.has(layout::FLAG_CLSACT));
        in_netns(&pod.netns, || {
            for interface in &plan.interfaces {
                let replaced = (filters_before && self.tc_mode == TcMode::Clsact)
                    .then(|| hooks::replace_filters(&mut ebpf, interface).ok())
                    .flatten();
                let hooks = match replaced {
                    Some(hooks) => hooks,
                    None => hooks::attach_tc(&mut ebpf, self.tc_mode, interface)?,
                };
                hooks.into_iter().try_for_each(|hook| hook.keep(directory))?;
            }
            Ok(())
        })
    }

    /// Puts the listeners into the pod's sockmap, unless it has them.
    fn give_listeners(&self, uid: &PodUid, directory: &Path, listeners: Listeners<'_>) -> Result<(), Error> {
        let Listeners {
            outbound,
            inbound,
            hbone,
        } = listeners;
        let cookie = |listener| {
            socket::cookie(listener).map_err(|error| Error::new("reading a listener's cookie", error))
        };
        let cookies = [cookie(outbound)?, cookie(inbound)?, cookie(hbone)?];
        if self.given().get(uid) == Some(&cookies) {
            return Ok(());
        }
        let mut map = open_map(directory, layout::LISTENERS, sockmap)?;
        for (index, listener) in [
            (Listener::Outbound, outbound),
            (Listener::Inbound, inbound),
            (Listener::Hbone, hbone),
        ] {
            map.set(index as u32, &listener.as_raw_fd(), 0)
                .map_err(|error| Error::new(format!("putting the {index:?} listener into its map"), error))?;
        }
        self.given().insert(uid.clone(), cookies);
        Ok(())
    }

    fn given(&self) -> MutexGuard<'_, HashMap<PodUid, [u64; 3]>> {
        self.given.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes all instances of a pod, and what they changed in its namespace if that is still there.
    fn remove(&self, uid: &PodUid, netns: Option<&Netns>) -> Vec<Error> {
        self.given().remove(uid);
        let directories = [self.pins.pod(uid), self.pins.replaced(uid)];
        let entries: Vec<_> = directories
            .iter()
            .filter_map(|directory| read_entry(directory))
            .collect();
        let mut errors: Vec<_> = directories
            .iter()
            .flat_map(|directory| hooks::unpin(directory))
            .collect();
        let Some(netns) = netns else { return errors };
        let inside = netns.run(|| {
            let mut errors = Vec::new();
            let mine = |entry: &&PodEntry| entry.netns_ino == netns.id().ino;
            if entries
                .iter()
                .filter(mine)
                .any(|entry| entry.has(layout::FLAG_CLSACT))
            {
                errors.extend(
                    interfaces()
                        .unwrap_or_default()
                        .iter()
                        .flat_map(hooks::detach_filters),
                );
            }
            errors.extend(routes::remove());
            let changed = entries
                .iter()
                .filter(mine)
                .fold(0, |changed, entry| changed | entry.changed_sysctls);
            errors.extend(routes::restore_sysctls(changed));
            errors
        });
        match inside {
            Ok(more) => errors.extend(more),
            Err(error) => errors.push(Error::new(format!("entering {}", netns.id()), error)),
        }
        errors
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
        let plan = Self::plan(pod)?;
        for listener in [listeners.outbound, listeners.inbound, listeners.hbone] {
            self.own_socket(listener)
                .map_err(|error| Error::new("tagging a listener", error))?;
        }
        if self.adopt(pod, &plan, listeners)?.is_some() {
            return Ok(());
        }
        let (directory, replaced) = (self.pins.pod(&pod.uid), self.pins.replaced(&pod.uid));
        if directory.exists() {
            report(hooks::unpin(&replaced));
            fs::rename(&directory, &replaced)
                .map_err(|error| Error::new(format!("setting {} aside", directory.display()), error))?;
        }
        let before = read_entry(&replaced);
        let same_netns = before.filter(|before| before.netns_ino == pod.netns.id().ino);
        if let Err(error) = self.install(pod, &plan, listeners, &directory, same_netns.as_ref()) {
            if same_netns.is_some() {
                // The earlier instance stays: its pod fails closed.
                report(hooks::unpin(&directory));
            } else {
                report(self.remove(&pod.uid, Some(&pod.netns)));
            }
            return Err(error);
        }
        if same_netns.is_some_and(|before| before.has(layout::FLAG_CLSACT)) && self.tc_mode == TcMode::Tcx {
            let detached = pod
                .netns
                .run(|| plan.interfaces.iter().flat_map(hooks::detach_filters).collect());
            report(detached.unwrap_or_default());
        }
        report(hooks::unpin(&replaced));
        Ok(())
    }

    fn release(&self, pod: &PodNetwork) -> Result<(), Error> {
        let failed = |error| Error::new(format!("releasing {}", pod.uid), error);
        let mut map = open_map(&self.pins.pod(&pod.uid), layout::POD, PodMap::new)?;
        let mut entry = map.read().map_err(failed)?;
        entry.flags |= FLAG_RELEASING;
        map.write(entry).map_err(failed)
    }

    fn detach(&self, pod: &PodNetwork) -> Result<(), Vec<Error>> {
        all_or(self.remove(&pod.uid, Some(&pod.netns)))
    }

    fn forget(&self, uid: &PodUid) -> Result<(), Vec<Error>> {
        let entry = read_entry(&self.pins.pod(uid)).or_else(|| read_entry(&self.pins.replaced(uid)));
        let netns = entry.and_then(|entry| find_netns(entry.netns_ino));
        all_or(self.remove(uid, netns.as_ref()))
    }

    fn attached(&self) -> Result<Vec<PodUid>, Error> {
        self.pins.pods()
    }

    fn original_dst(&self, connection: BorrowedFd<'_>) -> io::Result<SocketAddr> {
        // The socket was made for the packet as it was sent: its local end is the destination.
        socket::local_addr(connection)
    }

    fn counts(&self, uid: &PodUid) -> Result<Vec<Count>, Error> {
        let map = open_map(&self.pins.pod(uid), layout::COUNTERS, CounterMap::new)?;
        read_counts(&map)
    }

    fn own_socket(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        let mut tags = self.tags.lock().unwrap_or_else(PoisonError::into_inner);
        tags.set(&socket, Tag::Proxy).map_err(io::Error::other)
    }
}

/// The kernel has TCX from 6.6 on.
fn tcx_supported() -> bool {
    aya::util::KernelVersion::current().is_ok_and(|version| version >= aya::util::KernelVersion::new(6, 6, 0))
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

fn read_entry(directory: &Path) -> Option<PodEntry> {
    open_map(directory, layout::POD, PodMap::new).ok()?.read().ok()
}

fn sockmap(map: MapData) -> Result<SockMap<MapData>, aya::maps::MapError> {
    SockMap::try_from(aya::maps::Map::SockMap(map))
}

fn set_addresses(directory: &Path, plan: &Plan) -> Result<(), Error> {
    open_map(directory, layout::ADDRESSES, AddressMap::new)?
        .replace(&plan.addresses)
        .map_err(|error| Error::new("writing the pod's addresses", error))
}

fn read_counts(map: &CounterMap) -> Result<Vec<Count>, Error> {
    let read = |counter: Counter| {
        let (program, verdict) = counter.label();
        let packets = map
            .read(counter)
            .map_err(|error| Error::new("reading a packet counter", error))?;
        Ok(Count {
            program: program.as_str(),
            verdict,
            packets,
        })
    };
    Counter::ALL.into_iter().map(read).collect()
}

fn in_netns<T>(netns: &Netns, f: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    netns
        .run(f)
        .map_err(|error| Error::new(format!("entering {}", netns.id()), error))?
}

fn routes_in(netns: &Netns, v6: bool) -> Result<usize, Error> {
    in_netns(netns, || routes::add(v6))
}

/// The namespace of this inode, if somebody still has it: by name, or a process in it.
fn find_netns(ino: u64) -> Option<Netns> {
    let named = fs::read_dir("/run/netns")
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path());
    let of_processes = fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path().join("ns/net"));
    named.chain(of_processes).find_map(|path| {
        use std::os::unix::fs::MetadataExt;
        let found = fs::metadata(&path)
            .ok()
            .filter(|metadata| metadata.ino() == ino)
            .and_then(|_| Netns::open(&path).ok());
        found.filter(|netns| netns.id().ino == ino)
    })
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
