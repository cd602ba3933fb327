//! The iptables backend: Istio's in-pod rules, written by the node's iptables programs. It is what the eBPF backend is measured
//! against, and what there is for kernels that lack what eBPF needs; it is used only where it is asked for.
//!
//! - `rules`: the rule set as text
//! - `run`: the programs
//! - `write`: from the rules that are there to those that are wanted
//! - `records`: which pods have rules, for the next agent
//! - [`leftovers`]: what is left of that, and its removal
//!
//! Rules outlive the agent. Without one, connections are redirected to ports where nobody listens, and are refused.

pub mod leftovers;
mod records;
mod rules;
mod run;
mod write;

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    os::fd::BorrowedFd,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use redirector_common::consts::MARK_PROXY;

pub use self::run::{Backend, InvalidBackend};
use self::{
    records::{Record, Records},
    rules::{Capture, Chains, Family, MARK_TPROXY, Table},
    run::{Tools, Variant},
    write::Writer,
};
use super::{
    Count, Error, Listeners, Marks, PodNetwork, Redirector,
    routes::{Routing, Sysctl},
    rules::Rules,
};
use crate::{
    mesh::pod::PodUid,
    sys::{interfaces::interfaces, netns::Netns, socket},
};

/// Istio's: `cni/pkg/iptables/iptables.go`, AddInpodMarkIPRule and AddLoopbackRoutes.
const ROUTING: Routing = Routing {
    table: 100,
    priority: 32764,
    marks: &[MARK_TPROXY],
    arriving: None,
    // A redirected connection goes to ::1.
    sysctls: &[Sysctl {
        name: "net/ipv6/conf/lo/disable_ipv6",
        wanted: false,
        v6: true,
    }],
};

/// Time between looks at the rules of a pod that is captured: a look starts two programs, some 10 ms of CPU. Routes and sysctls are
/// looked at each time.
const LOOK_INTERVAL: Duration = Duration::from_secs(30);

/// Settings of the backend.
#[derive(Debug, Clone)]
pub struct Config {
    /// Which programs write the rules.
    pub backend: Backend,
    /// The agent's state directory; the records of pods that have rules are in `iptables` below it.
    pub state_dir: PathBuf,
}

/// The iptables backend.
pub struct Iptables {
    tools: Tools,
    writer: Writer,
    records: Records,
    looked: Mutex<HashMap<PodUid, Look>>,
}

/// A look at a pod that found in place, or put there, what was wanted.
#[derive(Debug)]
struct Look {
    found: Wanted,
    at: Instant,
}

/// What a pod's capture is made from.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Wanted {
    netns_ino: u64,
    rules: Rules,
    /// Routes for IPv6 as well.
    v6: bool,
}

fn records_dir(state_dir: &Path) -> PathBuf {
    state_dir.join("iptables")
}

impl Iptables {
    /// Opens the backend: finds the programs, and tries the rules in a namespace made for that.
    ///
    /// # Errors
    /// Programs or parts of the kernel that are missing: each says what to do.
    pub fn open(config: &Config) -> Result<Self, Error> {
        let tools = Tools::find(config.backend)?;
        let records = Records::open(&records_dir(&config.state_dir))?;
        let writer = Writer::try_out(&tools, &Rules::default())?;
        tracing::info!(
            variant = %tools.variant, version = tools.version, v6 = writer.v6(),
            program = %tools.restore_path(Family::V4).display(), "iptables rules accepted by this kernel"
        );
        Ok(Self {
            tools,
            writer,
            records,
            looked: Mutex::default(),
        })
    }

    fn looked(&self) -> MutexGuard<'_, HashMap<PodUid, Look>> {
        self.looked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The programs that wrote a pod's rules: an earlier agent may have used others.
    fn tools_of(&self, variant: Variant) -> Result<Tools, Error> {
        if variant == self.tools.variant {
            return Ok(self.tools.clone());
        }
        Tools::find(variant.into())
    }

    /// Whether the pod needs routes for IPv6.
    fn plan(&self, pod: &PodNetwork) -> Result<bool, Error> {
        let found = pod
            .netns
            .run(interfaces)
            .and_then(|interfaces| interfaces)
            .map_err(|error| Error::new(format!("reading the interfaces of {}", pod.netns.id()), error))?;
        let of_interfaces = found.iter().flat_map(|interface| &interface.addresses);
        let v6: Vec<&Ipv6Addr> = of_interfaces
            .filter_map(|address| match address {
                IpAddr::V6(v6) if !v6.is_loopback() => Some(v6),
                _ => None,
            })
            .collect();
        if self.writer.v6() {
            return Ok(!v6.is_empty());
        }
        match v6.iter().find(|address| !address.is_unicast_link_local()) {
            None => Ok(false),
            Some(address) => Err(Error::new(
                format!("planning the capture of {}", pod.uid),
                format!(
                    "it has the address {address}, and the rules for IPv6 can't be written on this node: the agent said at \
                     its start why"
                ),
            )),
        }
    }

    /// Removes all of ours from a namespace.
    fn clear(&self, netns: &Netns, record: &Record) -> Vec<Error> {
        let cleared = self
            .tools_of(record.variant)
            .and_then(|tools| self.writer.bring(&tools, netns, |_| Chains::new()));
        let mut errors: Vec<_> = cleared.err().into_iter().collect();
        let inside = netns.run(|| {
            let mut errors = ROUTING.remove();
            errors.extend(ROUTING.restore_sysctls(record.changed_sysctls));
            errors
        });
        match inside {
            Ok(more) => errors.extend(more),
            Err(error) => errors.push(Error::new(format!("entering {}", netns.id()), error)),
        }
        errors
    }

    /// Sees to it that routes and sysctls are in place, and tells whether they were not.
    fn route(&self, pod: &PodNetwork, record: &mut Record, v6: bool) -> Result<bool, Error> {
        let netns = &pod.netns;
        let entered = netns.run(|| {
            let changed = ROUTING.set_sysctls(v6)?;
            Ok((changed, ROUTING.add(v6, &[])?))
        });
        let (changed_sysctls, routes) =
            entered.map_err(|error| Error::new(format!("entering {}", netns.id()), error))??;
        if changed_sysctls & !record.changed_sysctls != 0 {
            record.changed_sysctls |= changed_sysctls;
            self.records.save(&pod.uid, record)?;
        }
        Ok(routes != 0 || changed_sysctls != 0)
    }

    /// Sees to it that the rules are in place, and tells whether they were not.
    fn capture(&self, pod: &PodNetwork, record: &mut Record) -> Result<bool, Error> {
        let netns = &pod.netns;
        let capture = Capture::from(&pod.rules);
        let rewritten = self
            .writer
            .bring(&self.tools, netns, |family| capture.chains(family))?;
        if record.variant != self.tools.variant {
            // Only now: nothing leaves in plain in between.
            let others = self.tools_of(record.variant)?;
            self.writer.bring(&others, netns, |_| Chains::new())?;
            tracing::info!(uid = %pod.uid, old = %record.variant, new = %self.tools.variant, "rules moved");
            record.variant = self.tools.variant;
            self.records.save(&pod.uid, record)?;
        }
        Ok(rewritten)
    }
}

impl Redirector for Iptables {
    fn name(&self) -> &'static str {
        "iptables"
    }

    fn marks(&self) -> Marks {
        // The rules know the proxy by one mark, listeners included.
        let mark = Some(MARK_PROXY);
        Marks {
            outbound_listener: mark,
            inbound_listeners: mark,
            upstream: mark,
            application: mark,
            application_over_lo: false,
        }
    }

    fn attach(&self, pod: &PodNetwork, _: Listeners<'_>) -> Result<(), Error> {
        if pod.rules.dns_capture || !pod.rules.reroute_interfaces.0.is_empty() {
            return Err(Error::new(
                format!("planning the capture of {}", pod.uid),
                "its rules ask for DNS capture or name interfaces to reroute, which iptables mode does not do: take them away, or \
                 use --redirect ebpf",
            ));
        }
        let wanted = Wanted {
            netns_ino: pod.netns.id().ino,
            rules: pod.rules.clone(),
            v6: self.plan(pod)?,
        };
        let look = self.looked().remove(&pod.uid).filter(|look| look.found == wanted);
        let lately = look
            .as_ref()
            .map(|look| look.at)
            .filter(|at| at.elapsed() < LOOK_INTERVAL);
        let before = self
            .records
            .load(&pod.uid)?
            .filter(|record| record.is_of(&pod.netns));
        let mut record = before.unwrap_or_else(|| Record::of(&pod.netns, self.tools.variant));
        if before.is_none() {
            self.records.save(&pod.uid, &record)?;
        }
        let mut put_back = || -> Result<bool, Error> {
            let routes = self.route(pod, &mut record, wanted.v6)?;
            Ok(routes | (lately.is_none() && self.capture(pod, &mut record)?))
        };
        match put_back() {
            Ok(put_back) => {
                if put_back && look.is_some() {
                    tracing::warn!(
                        uid = %pod.uid,
                        "rules, routes or sysctls of the capture were gone or changed, and are put back"
                    );
                }
                let look = Look {
                    found: wanted,
                    at: lately.unwrap_or_else(Instant::now),
                };
                self.looked().insert(pod.uid.clone(), look);
                Ok(())
            }
            Err(error) => {
                // What an earlier capture left stays: its pod fails closed.
                if before.is_none() {
                    for error in self.clear(&pod.netns, &record) {
                        tracing::warn!(%error, "clean-up incomplete");
                    }
                    self.records.remove(&pod.uid)?;
                }
                Err(error)
            }
        }
    }

    fn release(&self, pod: &PodNetwork) -> Result<(), Error> {
        self.looked().remove(&pod.uid);
        // What is redirected already is so by conntrack's memory, and needs no rule; but marks and routes bring the answers of
        // the pod's application back to the proxy.
        let nothing_redirected = |mut found: Chains| {
            found.retain(|(table, _), _| *table != Table::Nat);
            found
        };
        self.writer.change(&self.tools, &pod.netns, |_, found| {
            nothing_redirected(found.chains.clone())
        })?;
        Ok(())
    }

    fn detach(&self, pod: &PodNetwork) -> Result<(), Vec<Error>> {
        self.looked().remove(&pod.uid);
        let record = match self.records.load(&pod.uid) {
            Ok(record) => record.filter(|record| record.is_of(&pod.netns)),
            Err(error) => {
                tracing::warn!(%error, "detaching without the pod's record");
                None
            }
        };
        let record = record.unwrap_or_else(|| Record::of(&pod.netns, self.tools.variant));
        let mut errors = self.clear(&pod.netns, &record);
        // With a record that is left, the next agent tries again.
        if errors.is_empty() {
            errors.extend(self.records.remove(&pod.uid).err());
        }
        all_or(errors)
    }

    fn forget(&self, uid: &PodUid) -> Result<(), Vec<Error>> {
        self.looked().remove(uid);
        let record = self.records.load(uid).map_err(|error| vec![error])?;
        let mut errors = Vec::new();
        if let Some(record) = record {
            // Another pod's record with this namespace means that the number has come back.
            let taken = self
                .records
                .others_have(uid, record.netns_ino)
                .map_err(|error| vec![error])?;
            let netns = Netns::find(record.netns_ino).filter(|netns| !taken && record.is_of(netns));
            errors.extend(netns.into_iter().flat_map(|netns| self.clear(&netns, &record)));
        }
        if errors.is_empty() {
            errors.extend(self.records.remove(uid).err());
        }
        all_or(errors)
    }

    fn attached(&self) -> Result<Vec<PodUid>, Error> {
        self.records.uids()
    }

    fn original_dst(&self, connection: BorrowedFd<'_>) -> io::Result<SocketAddr> {
        socket::so_original_dst(connection)?.ok_or_else(|| {
            io::Error::other("connection tracking does not know the connection: no rule redirected it")
        })
    }

    fn is_rerouted(&self, _: BorrowedFd<'_>) -> io::Result<bool> {
        Ok(false)
    }

    fn counts(&self, _: &PodUid) -> Result<Vec<Count>, Error> {
        Ok(Vec::new())
    }

    fn own_socket(&self, _: BorrowedFd<'_>) -> io::Result<()> {
        // They are known by their mark.
        Ok(())
    }
}

fn all_or(errors: Vec<Error>) -> Result<(), Vec<Error>> {
    if errors.is_empty() { Ok(()) } else { Err(errors) }
}
