//! The iptables backend: Istio's in-pod rules, written by the node's iptables programs. It is what the eBPF backend is measured
//! against, and what there is for kernels that lack what eBPF needs; it is used only where it is asked for.
//!
//! - `rules`: the rule set as text
//! - `run`: the programs
//! - `write`: from the rules that are there to those that are wanted
//! - `look`: whether a pod is still as it was left
//! - `records`: which pods have rules, for the next agent
//! - `removal`: from such a record to a pod without rules
//! - [`leftovers`]: what is left of that, and its removal
//! - [`strangers`]: Istio's chains, whoever wrote them
//!
//! Rules outlive the agent. Without one, connections are redirected to ports where nobody listens, and are refused.

pub mod leftovers;
mod look;
mod records;
mod removal;
mod rules;
mod run;
pub mod strangers;
mod write;

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    os::fd::BorrowedFd,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use redirector_common::consts::MARK_PROXY;

pub use self::run::{Backend, InvalidBackend};
use self::{
    look::{Look, State, Wanted},
    records::{Loaded, Record, Records},
    removal::Removal,
    rules::{Capture, Chains, MARK_TPROXY, Table},
    run::Tools,
    write::Writer,
};
use super::{
    Attached, Count, Error, Marks, PodNetwork, Redirector, Serving,
    metrics::{Repair, Repairs},
    routes::Routing,
    rules::Rules,
    sysctls::Sysctl,
};
use crate::{
    mesh::pod::PodUid,
    sys::{interfaces::interfaces, process, socket},
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
    repairs: Repairs,
}

/// What was not in place.
#[derive(Debug, Clone, Copy)]
struct PutBack {
    routes: bool,
    rules: bool,
}

fn records_dir(state_dir: &Path) -> PathBuf {
    state_dir.join("iptables")
}

impl Iptables {
    /// Opens the backend: finds the programs, and tries the rules in a namespace made for that. A node without IPv6, or without the
    /// programs for it, has rules for IPv4 only.
    ///
    /// # Errors
    /// Programs or parts of the kernel that are missing: each says what to do.
    pub fn open(config: &Config) -> Result<Self, Error> {
        let tools = Tools::find(config.backend)?;
        let records = Records::open(&records_dir(&config.state_dir))?;
        let writer = Writer::try_out(&tools, &Rules::default())?;
        for programs in tools.families() {
            tracing::info!(
                variant = %tools.variant, version = tools.version, family = ?programs.family,
                program = %programs.restore_path().display(), "iptables rules accepted by this kernel"
            );
        }
        if let Some(reason) = tools.without_v6() {
            tracing::warn!(
                reason,
                "no rules for IPv6: pods that have IPv6 addresses can't be captured"
            );
        }
        Ok(Self {
            tools,
            writer,
            records,
            looked: Mutex::default(),
            repairs: Repairs::default(),
        })
    }

    fn looked(&self) -> MutexGuard<'_, HashMap<PodUid, Look>> {
        self.looked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn removal(&self) -> Removal<'_> {
        Removal {
            records: &self.records,
            writer: &self.writer,
            tools: Some(&self.tools),
            sees_all: process::sees_all(),
        }
    }

    /// A pod's record, if it has one in this namespace.
    fn record_of(&self, pod: &PodNetwork) -> Result<Option<Record>, Error> {
        match self.records.load(&pod.uid)? {
            Loaded::Nothing => Ok(None),
            Loaded::Record(record) => Ok(record.is_of(&pod.netns)?.then_some(record)),
            Loaded::Unknown(error) => Record::unknown(&pod.uid, &pod.netns, &error).map(Some),
        }
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
        let Some(reason) = self.tools.without_v6() else {
            return Ok(!v6.is_empty());
        };
        match v6.iter().find(|address| !address.is_unicast_link_local()) {
            None => Ok(false),
            Some(address) => Err(Error::new(
                format!("planning the capture of {}", pod.uid),
                format!(
                    "it has the address {address}, and there are no rules for IPv6 on this node: {reason}"
                ),
            )),
        }
    }

    /// Sees to it that routes and sysctls are in place, and tells whether they were not.
    fn route(&self, pod: &PodNetwork, record: &mut Record, v6: bool) -> Result<bool, Error> {
        let netns = &pod.netns;
        let failed = |error| Error::new(format!("entering {}", netns.id()), error);
        let changed_sysctls = netns.run(|| ROUTING.set_sysctls(v6)).map_err(failed)??;
        if changed_sysctls & !record.changed_sysctls != 0 {
            record.changed_sysctls |= changed_sysctls;
            self.records.save(&pod.uid, record)?;
        }
        let routes = netns.run(|| ROUTING.add(v6, &[])).map_err(failed)??;
        Ok(routes != 0 || changed_sysctls != 0)
    }

    /// Sees to it that the rules are in place, and tells whether they were not.
    fn capture(&self, pod: &PodNetwork, record: &mut Record) -> Result<bool, Error> {
        let netns = &pod.netns;
        let capture = Capture::from(&pod.rules);
        let rewritten = self
            .writer
            .bring(&self.tools, netns, |family| capture.chains(family))?;
        if record.variant != Some(self.tools.variant) {
            // Only now: nothing leaves in plain in between.
            let removal = self.removal();
            for tools in removal.tools_of(record)? {
                if tools.variant != self.tools.variant {
                    removal.clear_rules(netns, &tools)?;
                }
            }
            tracing::info!(uid = %pod.uid, old = ?record.variant, new = %self.tools.variant, "rules moved");
            record.variant = Some(self.tools.variant);
            self.records.save(&pod.uid, record)?;
        }
        Ok(rewritten)
    }

    /// Sees to it that everything is in place, and tells what was not.
    fn put_back(
        &self,
        pod: &PodNetwork,
        record: &mut Record,
        v6: bool,
        is_new: bool,
        look_at_rules: bool,
    ) -> Result<PutBack, Error> {
        let routed = self.route(pod, record, v6);
        if is_new && let Err(error) = routed {
            return Err(error);
        }
        // Whatever is wrong with a captured pod's routes, without its rules it would be captured no more.
        let captured = if look_at_rules {
            self.capture(pod, record)
        } else {
            Ok(false)
        };
        match (routed, captured) {
            (Ok(routes), Ok(rules)) => Ok(PutBack { routes, rules }),
            (Ok(_), Err(error)) | (Err(error), Ok(_)) => Err(error),
            (Err(error), Err(other)) => {
                tracing::warn!(uid = %pod.uid, error = %other, "nor can the rules be put back");
                Err(error)
            }
        }
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

    fn refuses(&self, rules: &Rules) -> Option<String> {
        let unknown = rules.dns_capture || !rules.reroute_interfaces.0.is_empty();
        unknown.then(|| {
            "DNS capture and interfaces to reroute are not for iptables mode: take them out of the rules, or use --redirect ebpf"
                .to_owned()
        })
    }

    fn attach(&self, pod: &PodNetwork, _: Serving<'_>) -> Result<Attached, Error> {
        if let Some(why) = self.refuses(&pod.rules) {
            return Err(Error::new(format!("planning the capture of {}", pod.uid), why));
        }
        let wanted = Wanted {
            netns_ino: pod.netns.id().ino,
            rules: pod.rules.clone(),
            v6: self.plan(pod)?,
        };
        let captured_before = self.looked().contains_key(&pod.uid);
        // Before the rules are: what is changed after that is found by the next look.
        let state = State::of(&self.tools, &pod.netns);
        let before = self.record_of(pod)?;
        let mut record = match before {
            Some(record) => record,
            None => Record::of(&pod.netns, self.tools.variant)?,
        };
        if before.is_none() {
            self.records.save(&pod.uid, &record)?;
        }
        // A record that somebody has removed does not make the pod a new one.
        let is_new = before.is_none() && !captured_before;
        let look = self
            .looked()
            .remove(&pod.uid)
            .filter(|look| look.was_for(&wanted));
        let rules_hold = record.variant == Some(self.tools.variant)
            && look.as_ref().is_some_and(|look| look.rules_hold(state));
        match self.put_back(pod, &mut record, wanted.v6, is_new, !rules_hold) {
            Ok(PutBack { routes, rules }) => {
                if (routes || rules) && look.is_some() {
                    self.repairs.add(Repair::Routing);
                    tracing::warn!(
                        uid = %pod.uid,
                        "rules, routes or sysctls of the capture were gone or changed, and are put back"
                    );
                }
                let look = match look {
                    Some(look) if rules_hold => look,
                    _ if rules => Look::written(wanted),
                    _ => Look::in_place(wanted, state),
                };
                self.looked().insert(pod.uid.clone(), look);
                Ok(Attached::default())
            }
            Err(error) => {
                // What an earlier capture left stays: its pod fails closed.
                if is_new {
                    let mut left = self.removal().clear(&pod.netns, &record);
                    // As in `detach`: what is left stays on record.
                    if left.is_empty() {
                        left.extend(self.records.remove(&pod.uid).err());
                    }
                    for error in left {
                        tracing::warn!(uid = %pod.uid, %error, "clean-up incomplete");
                    }
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
        let record = self.record_of(pod).and_then(|record| match record {
            Some(record) => Ok(record),
            None => Record::of(&pod.netns, self.tools.variant),
        });
        let record = record.map_err(|error| vec![error])?;
        let mut errors = self.removal().clear(&pod.netns, &record);
        // With a record that is left, the next agent tries again.
        if errors.is_empty() {
            errors.extend(self.records.remove(&pod.uid).err());
        }
        all_or(errors)
    }

    fn forget(&self, uid: &PodUid) -> Result<(), Vec<Error>> {
        self.looked().remove(uid);
        self.removal().of_pod(uid, None)
    }

    fn rename(&self, from: &PodUid, to: &PodUid) -> Result<(), Error> {
        self.looked().remove(from);
        self.records.rename(from, to)
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

    fn repairs(&self) -> Option<&Repairs> {
        Some(&self.repairs)
    }

    fn reread(&self) -> Result<(), Error> {
        self.looked().clear();
        Ok(())
    }

    fn own_socket(&self, _: BorrowedFd<'_>) -> io::Result<()> {
        // They are known by their mark.
        Ok(())
    }
}

fn all_or(errors: Vec<Error>) -> Result<(), Vec<Error>> {
    if errors.is_empty() { Ok(()) } else { Err(errors) }
}
