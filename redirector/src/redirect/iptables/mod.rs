//! The iptables backend: Istio's in-pod rules, written by the node's iptables programs. It is what the eBPF backend is measured
//! against, and what there is for kernels that lack what eBPF needs; it is used only where it is asked for.
//!
//! - `rules`: the rule set as text
//! - `run`: the programs
//! - `records`: which pods have rules, for the next agent
//!
//! Rules outlive the agent. Without one, connections are redirected to ports where nobody listens, and are refused.

mod records;
mod rules;
mod run;

use std::{
    collections::{BTreeMap, HashMap},
    io,
    net::{IpAddr, SocketAddr},
    os::fd::BorrowedFd,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use redirector_common::consts::MARK_PROXY;

pub use self::run::{Backend, InvalidBackend};
use self::{
    records::{Record, Records},
    rules::{Capture, Chains, Family, Found, MARK_TPROXY, Table},
    run::{Tools, Variant},
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

/// Rule sets of which it is remembered how the programs print them. Pods have the same, but for a few.
const MAX_PRINTED: usize = 64;

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
    /// Whether rules for IPv6 can be had.
    v6: bool,
    records: Records,
    /// How the programs print a rule set, where that is not as it was written.
    printed: Mutex<BTreeMap<(Family, Chains), Chains>>,
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

/// Whether pods have rules of an agent with this state directory.
///
/// # Errors
/// When the records can't be listed.
pub fn has_pods(state_dir: &Path) -> Result<bool, Error> {
    Ok(!Records::existing(&records_dir(state_dir)).uids()?.is_empty())
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
        let mut backend = Self {
            tools: Tools::find(config.backend)?,
            v6: false,
            records: Records::open(&records_dir(&config.state_dir))?,
            printed: Mutex::default(),
            looked: Mutex::default(),
        };
        let scratch =
            Netns::create().map_err(|error| Error::new("making a namespace to try the rules in", error))?;
        let rules = Rules::default();
        let chains = |family| Capture::from(&rules).chains(family);
        backend.write(&backend.tools, &scratch, Family::V4, &chains(Family::V4))?;
        match backend.write(&backend.tools, &scratch, Family::V6, &chains(Family::V6)) {
            Ok(()) => backend.v6 = true,
            Err(error) => {
                tracing::warn!(%error, "no rules for IPv6: pods that have IPv6 addresses can't be captured");
            }
        }
        tracing::info!(
            variant = %backend.tools.variant, version = backend.tools.version, v6 = backend.v6,
            program = %backend.tools.restore_path(Family::V4).display(), "iptables rules accepted by this kernel"
        );
        Ok(backend)
    }

    fn families(&self) -> impl Iterator<Item = Family> {
        [Some(Family::V4), self.v6.then_some(Family::V6)]
            .into_iter()
            .flatten()
    }

    /// What of ours is in a namespace, by family.
    fn look(&self, tools: &Tools, netns: &Netns) -> Result<Vec<(Family, Found)>, Error> {
        let families: Vec<_> = self.families().collect();
        let runs: Vec<_> = families.iter().map(|family| tools.save(*family)).collect();
        let saved = run::run(netns, &runs);
        families
            .into_iter()
            .zip(saved)
            .map(|(family, saved)| Ok((family, Found::parse(&saved?))))
            .collect()
    }

    /// Writes rules where none of ours are, or others, and looks whether they are there then.
    fn write(&self, tools: &Tools, netns: &Netns, family: Family, chains: &Chains) -> Result<(), Error> {
        let saved = run::run(netns, &[tools.save(family)]).remove(0)?;
        let input = Found::parse(&saved).to(chains);
        run::run(netns, &[tools.restore(family, &input)]).remove(0)?;
        self.learn(tools, netns, family, chains)
    }

    /// Looks how rules are printed that were just written, unless that is known.
    fn learn(&self, tools: &Tools, netns: &Netns, family: Family, chains: &Chains) -> Result<(), Error> {
        let key = (family, chains.clone());
        if self.printed().contains_key(&key) {
            return Ok(());
        }
        let saved = run::run(netns, &[tools.save(family)]).remove(0)?;
        let found = Found::parse(&saved);
        if !found.has_form_of(chains) {
            return Err(Error::new(
                format!("reading back the {family:?} rules in {}", netns.id()),
                format!("other rules than those that were written: {found:?}"),
            ));
        }
        let mut printed = self.printed();
        if printed.len() >= MAX_PRINTED {
            printed.clear();
        }
        printed.insert(key, found.chains);
        Ok(())
    }

    /// Whether rules are in place as they were written.
    fn in_place(&self, family: Family, found: &Found, chains: &Chains) -> bool {
        found.is(chains)
            || self
                .printed()
                .get(&(family, chains.clone()))
                .is_some_and(|printed| found.is(printed))
    }

    /// Brings all families to their wanted rules, and tells whether they had others; what was changed before a failure is changed
    /// back.
    fn bring(&self, tools: &Tools, netns: &Netns, wanted: impl Fn(Family) -> Chains) -> Result<bool, Error> {
        let before = self.look(tools, netns)?;
        let wanted: Vec<_> = before.iter().map(|(family, _)| wanted(*family)).collect();
        let pending: Vec<_> = before
            .iter()
            .zip(&wanted)
            .filter(|((family, found), chains)| !self.in_place(*family, found, chains))
            .map(|((family, found), chains)| (*family, found, chains, found.to(chains)))
            .collect();
        let runs: Vec<_> = pending
            .iter()
            .map(|(family, _, _, input)| tools.restore(*family, input))
            .collect();
        let mut results = run::run(netns, &runs);
        for (result, (family, _, chains, _)) in results.iter_mut().zip(&pending) {
            if result.is_ok()
                && let Err(error) = self.learn(tools, netns, *family, chains)
            {
                *result = Err(error);
            }
        }
        let Some(error) = results.into_iter().find_map(Result::err) else {
            return Ok(!pending.is_empty());
        };
        if let Err(undo) = self.undo(tools, netns, &before) {
            tracing::error!(error = %undo, netns = %netns.id(), "cannot undo a change of rules that failed");
        }
        Err(error)
    }

    fn undo(&self, tools: &Tools, netns: &Netns, before: &[(Family, Found)]) -> Result<(), Error> {
        let now = self.look(tools, netns)?;
        for ((family, now), (_, before)) in now.iter().zip(before) {
            if now != before {
                let input = now.to(&before.chains);
                run::run(netns, &[tools.restore(*family, &input)]).remove(0)?;
            }
        }
        Ok(())
    }

    fn printed(&self) -> MutexGuard<'_, BTreeMap<(Family, Chains), Chains>> {
        self.printed.lock().unwrap_or_else(PoisonError::into_inner)
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
        let refused = |reason: &str| Err(Error::new(format!("planning the capture of {}", pod.uid), reason));
        if !self.v6
            && pod
                .addresses
                .iter()
                .any(|address| address.to_canonical().is_ipv6())
        {
            return refused(
                "it has an IPv6 address, and this node has no ip6tables with nat, mangle and raw: the agent said at its start why",
            );
        }
        let found = pod
            .netns
            .run(interfaces)
            .and_then(|interfaces| interfaces)
            .map_err(|error| Error::new(format!("reading the interfaces of {}", pod.netns.id()), error))?;
        let is_v6 = |address: &IpAddr| address.is_ipv6() && !address.is_loopback();
        Ok(self.v6 && found.iter().flat_map(|interface| &interface.addresses).any(is_v6))
    }

    /// Removes all of ours from a namespace.
    fn clear(&self, netns: &Netns, record: &Record) -> Vec<Error> {
        let cleared = self
            .tools_of(record.variant)
            .and_then(|tools| self.bring(&tools, netns, |_| Chains::new()));
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
            Ok((changed, ROUTING.add(v6)?))
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
        let rewritten = self.bring(&self.tools, netns, |family| capture.chains(family))?;
        if record.variant != self.tools.variant {
            // Only now: nothing leaves in plain in between.
            let others = self.tools_of(record.variant)?;
            self.bring(&others, netns, |_| Chains::new())?;
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
        let before = self.look(&self.tools, &pod.netns)?;
        for (family, found) in before {
            let mut without = found.chains.clone();
            without.retain(|(table, _), _| *table != Table::Nat);
            let input = found.to(&without);
            run::run(&pod.netns, &[self.tools.restore(family, &input)]).remove(0)?;
        }
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
