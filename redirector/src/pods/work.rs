//! The steps by which one pod is captured and released. `lifecycle` calls them, never two at one time for one pod.
//!
//! Capture: look into the namespace, identity and listeners, attach, record. Release: capture nothing new, stop the proxy,
//! detach, forget the record. The listeners exist before any packet is steered to them, new captures end before they close, and
//! what carries the packets of captured connections goes last. A step that fails undoes those
//! before it, except that a pod which was captured before (by an earlier agent) stays so: it fails closed.

use std::{
    io,
    net::IpAddr,
    os::fd::{BorrowedFd, OwnedFd},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{sync::watch, task::spawn_blocking, time::timeout};
use tracing::{debug, error, info, warn};

use super::{
    Error, PodAdd,
    launch::{Launch, NewPod, Served},
    records::{Record, Records},
    rules::NodeRules,
    status::Durations,
};
use crate::{
    mesh::pod::PodUid,
    redirect::{Attached, PodNetwork, Redirector, Serving, overrides::Overrides, rules::Rules},
    sys::{
        interfaces::InterfaceAddress,
        netns::{Netns, NetnsId},
        process,
    },
    telemetry::Chain,
};

/// Time beyond its grace that a proxy gets to stop.
const STOP_MARGIN: Duration = Duration::from_secs(10);

/// What the steps work with.
pub(super) struct Worker<L: Launch> {
    pub(super) launch: L,
    pub(super) redirector: Arc<dyn Redirector>,
    pub(super) records: Records,
    /// The namespaces that are the node's own.
    pub(super) node: Vec<NetnsId>,
    /// Time for the connections of a pod that is released.
    pub(super) release_grace: Duration,
    /// The rules for all pods.
    pub(super) rules: watch::Receiver<Arc<NodeRules>>,
    /// What holds where the rules say nothing.
    pub(super) weakest: Overrides,
    /// How long the backend took.
    pub(super) durations: Durations,
}

/// A pod that is captured.
pub(super) struct Captured<P> {
    pub(super) add: PodAdd,
    pub(super) network: PodNetwork,
    proxy: P,
    /// What the backend said of it last.
    pub(super) attached: Attached,
}

/// What a job leaves: the pod, if it is captured now, and how it went.
pub(super) struct Done<P> {
    pub(super) pod: Option<Captured<P>>,
    pub(super) result: Result<(), Error>,
}

impl<L: Launch> Worker<L> {
    /// Captures a pod, in place of an older namespace of it.
    pub(super) async fn add(self: Arc<Self>, old: Option<Captured<L::Proxy>>, add: PodAdd) -> Done<L::Proxy> {
        let worker = Arc::clone(&self);
        let (add, network) = match blocking("look into the pod", move || worker.inspect(add)).await {
            Ok(inspected) => inspected,
            Err(error) => {
                return Done {
                    pod: old,
                    result: Err(error),
                };
            }
        };
        let mut before = None;
        if let Some(mut old) = old {
            // Its proxy has the UID, too.
            let renamed = old.add.info.uid != add.info.uid;
            if renamed {
                if let Err(error) = self.rename(&old.add, &add.info.uid).await {
                    return Done {
                        pod: Some(old),
                        result: Err(error),
                    };
                }
                old.add.info.uid = add.info.uid.clone();
                old.network.uid = add.info.uid.clone();
            }
            if !renamed && old.add.netns.id() == add.netns.id() && old.add.info == add.info {
                if old.add.rules != add.rules {
                    return self.change_rules(old, add, network).await;
                }
                return Done {
                    pod: Some(old),
                    result: Ok(()),
                };
            }
            info!(
                uid = %add.info.uid, old = %old.add.netns.id(), new = %add.netns.id(),
                "the pod has a new namespace or identity"
            );
            if old.add.netns.id() == add.netns.id() {
                // It stays captured, and is refused until its new proxy listens: nothing leaves in plain in between.
                self.stop(&add.info.uid, old.proxy, Duration::ZERO).await;
                before = Some((old.add, old.network));
            } else if let Err(error) = self.release(old, Duration::ZERO).await {
                warn!(uid = %add.info.uid, error = %Chain(&error), "the pod's old namespace was not released in full");
            }
        }
        match self.capture(&add, &network, true).await {
            Ok((proxy, attached)) => {
                info!(
                    uid = %add.info.uid, pod = %format_args!("{}/{}", add.info.namespace, add.info.name),
                    netns = %add.netns.id(), backend = self.redirector.name(), addresses = ?network.addresses,
                    "pod captured"
                );
                Done {
                    pod: Some(Captured {
                        add,
                        network,
                        proxy,
                        attached,
                    }),
                    result: Ok(()),
                }
            }
            Err(error) => Done {
                pod: match before {
                    Some((add, network)) => self.bring_back(add, network).await,
                    None => None,
                },
                result: Err(error),
            },
        }
    }

    /// Gives what is in place for a pod, and its record, another UID: it stays captured all the while.
    async fn rename(self: &Arc<Self>, add: &PodAdd, to: &PodUid) -> Result<(), Error> {
        let (worker, from, to) = (Arc::clone(self), add.info.uid.clone(), to.clone());
        let mut add = add.clone();
        add.info.uid = to.clone();
        let rename = move || {
            // First, so that whenever it is cut off there is a record.
            worker.records.save(&Record::of(&add)).map_err(Error::Record)?;
            worker.redirector.rename(&from, &to).map_err(Error::Rename)?;
            if let Err(error) = worker.records.remove(&from) {
                // The next agent finds both, and that they are of one pod.
                warn!(uid = %from, error = %Chain(&error), "the record under the pod's former UID stays");
            }
            Ok(())
        };
        blocking("give the pod its real UID", rename).await
    }

    /// Captures a pod as it was before a change that failed.
    async fn bring_back(self: &Arc<Self>, add: PodAdd, network: PodNetwork) -> Option<Captured<L::Proxy>> {
        // Its record was not touched: a new one is written as a whole or not at all.
        match self.capture(&add, &network, false).await {
            Ok((proxy, attached)) => Some(Captured {
                add,
                network,
                proxy,
                attached,
            }),
            Err(error) => {
                error!(uid = %add.info.uid, error = %Chain(&error), "the pod stays captured without a proxy: its connections are refused");
                None
            }
        }
    }

    /// What applies to a pod now.
    pub(super) fn rules_of(&self, add: &PodAdd) -> Rules {
        let nothing = Overrides::default();
        let own = add.rules.as_deref().unwrap_or(&nothing);
        self.rules.borrow().of(&add.info, own, &self.weakest)
    }

    /// Puts new rules of a captured pod in force. If that fails, the old ones stay.
    async fn change_rules(
        self: Arc<Self>,
        old: Captured<L::Proxy>,
        add: PodAdd,
        network: PodNetwork,
    ) -> Done<L::Proxy> {
        const STEP: &str = "change the rules of the pod";
        let change = move || {
            let result = guarded(STEP, || {
                let serving = self.launch.serving(&old.proxy);
                let attached = self.redirector.attach(&network, serving).map_err(Error::Attach)?;
                self.records.save(&Record::of(&add)).map_err(Error::Record)?;
                Ok(attached)
            });
            Ok(match result {
                Ok(attached) => {
                    self.launch.set_strict(&old.proxy, network.rules.strict);
                    info!(uid = %add.info.uid, rules = ?network.rules, "the pod has new rules");
                    let changed = Captured {
                        add,
                        network,
                        attached,
                        ..old
                    };
                    (changed, Ok(()))
                }
                Err(error) => (old, Err(error)),
            })
        };
        Self::guarded_done(STEP, change).await
    }

    /// Runs a step that keeps its pod whatever happens, a panic between its guarded parts excepted.
    async fn guarded_done(
        step: &'static str,
        work: impl FnOnce() -> Result<(Captured<L::Proxy>, Result<(), Error>), Error> + Send + 'static,
    ) -> Done<L::Proxy> {
        match blocking(step, work).await {
            Ok((pod, result)) => Done {
                pod: Some(pod),
                result,
            },
            Err(error) => Done {
                pod: None,
                result: Err(error),
            },
        }
    }

    /// Looks whether a captured pod is still so, and puts back what is gone; rules that have changed come into force. A pod that cannot
    /// have the new ones is kept whole with those it has, and they are tried again at each look.
    pub(super) async fn check(self: Arc<Self>, mut pod: Captured<L::Proxy>) -> Done<L::Proxy> {
        const STEP: &str = "check the capture of the pod";
        let look = move || {
            // Guarded by itself: a panic must not lose the pod, and its connections with it.
            let attach = |network: &PodNetwork| {
                guarded(STEP, || {
                    let serving = self.launch.serving(&pod.proxy);
                    self.redirector.attach(network, serving).map_err(Error::Attach)
                })
            };
            let wanted = PodNetwork {
                rules: self.rules_of(&pod.add),
                ..pod.network.clone()
            };
            // The proxy can always have this, whatever the backend says of the rest.
            self.launch.set_strict(&pod.proxy, wanted.rules.strict);
            pod.network.rules.strict = wanted.rules.strict;
            let result = guarded(STEP, || still_there(&pod.add)).and_then(|()| match attach(&wanted) {
                Err(error) if wanted.rules != pod.network.rules => {
                    attach(&pod.network).map(|attached| (attached, Err(Error::NewRules(Box::new(error)))))
                }
                attached => attached.map(|attached| (attached, Ok(()))),
            });
            Ok(match result {
                Ok((attached, result)) => {
                    pod.attached = attached;
                    if result.is_ok() {
                        pod.network = wanted;
                    }
                    (pod, result)
                }
                Err(error) => (pod, Err(error)),
            })
        };
        Self::guarded_done(STEP, look).await
    }

    /// Releases a pod; one that is not here is what an earlier agent may have left.
    pub(super) async fn delete(
        self: Arc<Self>,
        old: Option<Captured<L::Proxy>>,
        uid: PodUid,
    ) -> Done<L::Proxy> {
        let result = match old {
            Some(old) => self.release(old, self.release_grace).await,
            None => {
                let worker = Arc::clone(&self);
                info!(%uid, "asked to release a pod that is not captured here: removing what may be left of it");
                self.launch.forget(&uid).await;
                let forget = move || {
                    worker.redirector.forget(&uid).map_err(Error::Detach)?;
                    worker.records.remove(&uid).map_err(Error::Record)
                };
                blocking("forget the pod", forget).await
            }
        };
        Done { pod: None, result }
    }

    /// Stops a pod's proxy at the end of the agent. Its capture stays, and so does its record, unless `release`.
    pub(super) async fn shut_down(self: Arc<Self>, pod: Captured<L::Proxy>, grace: Duration, release: bool) {
        let uid = pod.add.info.uid.clone();
        if release {
            if let Err(error) = self.release(pod, grace).await {
                error!(%uid, error = %Chain(&error), "the pod was not released in full");
            }
        } else {
            let left = timeout(grace + STOP_MARGIN, self.launch.leave(pod.proxy, grace)).await;
            if left.is_err() {
                error!(%uid, "the pod's proxy did not stop in time and was dropped");
            }
        }
    }

    /// The listeners of a captured pod's proxy, if they are this agent's.
    pub(super) fn served(&self, pod: &Captured<L::Proxy>) -> Option<io::Result<Served>> {
        let Serving::Own(listeners) = self.launch.serving(&pod.proxy) else {
            return None;
        };
        let duplicate = |listener: BorrowedFd<'_>| -> io::Result<OwnedFd> { listener.try_clone_to_owned() };
        let duplicates = || {
            Ok([
                duplicate(listeners.outbound)?,
                duplicate(listeners.inbound)?,
                duplicate(listeners.hbone)?,
            ])
        };
        Some(duplicates().map(|listeners| Served {
            uid: pod.add.info.uid.clone(),
            netns: pod.add.netns.id(),
            listeners,
        }))
    }

    /// The pods for which something is in place or recorded. Blocking.
    pub(super) fn known(&self) -> Result<Vec<PodUid>, Error> {
        let mut uids = self.redirector.attached().map_err(Error::Attach)?;
        uids.extend(self.records.uids().map_err(Error::Record)?);
        uids.sort();
        uids.dedup();
        Ok(uids)
    }

    /// Checks that the namespace is a pod's and this pod's, and finds its addresses, and its rules if nobody knows them any more.
    /// Blocking.
    fn inspect(&self, mut add: PodAdd) -> Result<(PodAdd, PodNetwork), Error> {
        let netns = add.netns.id();
        if self.node.contains(&netns) {
            return Err(Error::NodeNamespace { netns });
        }
        if let Some(path) = &add.netns_path {
            // It may have been deleted since, or in the time of a retry.
            match Netns::open(path) {
                Ok(there) if there.id() == netns => {}
                Err(source) if !is_absence(&source) => return Err(Error::Inspect { netns, source }),
                _ => {
                    return Err(Error::NamespaceGone {
                        path: path.clone(),
                        netns,
                    });
                }
            }
        }
        let found = self
            .launch
            .addresses(&add.netns)
            .map_err(|source| Error::Inspect { netns, source })?;
        let addresses = pod_addresses(netns, &add.addresses, &found)?;
        let recorded = || self.records.rules_of(&add.info.uid, &add.netns);
        add.rules = Some(add.rules.clone().or_else(recorded).unwrap_or_default());
        let network = PodNetwork {
            uid: add.info.uid.clone(),
            netns: Arc::clone(&add.netns),
            addresses,
            rules: self.rules_of(&add),
        };
        Ok((add, network))
    }

    async fn capture(
        self: &Arc<Self>,
        add: &PodAdd,
        network: &PodNetwork,
        record: bool,
    ) -> Result<(L::Proxy, Attached), Error> {
        let uid = &add.info.uid;
        let worker = Arc::clone(self);
        let pod = NewPod {
            info: add.info.clone(),
            netns: Arc::clone(&add.netns),
            addresses: network.addresses.clone(),
            strict: network.rules.strict,
        };
        let start = move || {
            let captured_before = worker
                .redirector
                .attached()
                .map_err(Error::Attach)?
                .contains(&pod.info.uid);
            Ok((worker.launch.start(pod)?, captured_before))
        };
        let (proxy, captured_before) = blocking("start the pod's proxy", start).await?;

        let (worker, network, record_of) = (Arc::clone(self), network.clone(), add.clone());
        let attach = move || {
            let steps = || {
                let serving = worker.launch.serving(&proxy);
                let begin = Instant::now();
                let attached = guarded("attach to the pod", || {
                    worker.redirector.attach(&network, serving).map_err(Error::Attach)
                })?;
                let elapsed = begin.elapsed();
                worker.durations.attach.observe(elapsed.as_secs_f64());
                debug!(uid = %network.uid, elapsed_us = elapsed.as_micros(), "redirection attached");
                if record {
                    guarded("record the pod", || {
                        worker
                            .records
                            .save(&Record::of(&record_of))
                            .map_err(Error::Record)
                    })?;
                }
                Ok(attached)
            };
            let result = steps();
            if result.is_err() && !captured_before {
                let undo = guarded("detach from the pod", || {
                    worker.redirector.detach(&network).map_err(Error::Detach)
                });
                if let Err(error) = undo {
                    error!(uid = %network.uid, error = %Chain(&error), "cannot undo the capture of the pod");
                }
            }
            Ok((proxy, result))
        };
        let (proxy, result) = blocking("attach to the pod", attach).await?;
        match result {
            Ok(attached) => Ok((proxy, attached)),
            Err(error) => {
                self.stop(uid, proxy, Duration::ZERO).await;
                Err(error)
            }
        }
    }

    async fn release(self: &Arc<Self>, pod: Captured<L::Proxy>, grace: Duration) -> Result<(), Error> {
        let uid = pod.add.info.uid.clone();
        let (worker, network) = (Arc::clone(self), pod.network.clone());
        let release = move || {
            let begin = Instant::now();
            worker.redirector.release(&network).map_err(Error::Attach)?;
            Ok(begin.elapsed())
        };
        let released = blocking("release the pod", release)
            .await
            .unwrap_or_else(|error| {
                // Detaching ends the capture all the same, only less gently.
                warn!(%uid, error = %Chain(&error), "new connections are captured to the end");
                Duration::ZERO
            });
        self.stop(&uid, pod.proxy, grace).await;
        let (worker, network) = (Arc::clone(self), pod.network);
        let detach = move || {
            let begin = Instant::now();
            worker.redirector.detach(&network).map_err(Error::Detach)?;
            let elapsed = released + begin.elapsed();
            worker.durations.detach.observe(elapsed.as_secs_f64());
            debug!(uid = %network.uid, elapsed_us = elapsed.as_micros(), "redirection detached");
            Ok(())
        };
        let detached = blocking("detach from the pod", detach).await;
        let worker = Arc::clone(self);
        let removed = uid.clone();
        let forgotten = blocking("remove the pod's record", move || {
            worker.records.remove(&removed).map_err(Error::Record)
        })
        .await;
        info!(%uid, netns = %pod.add.netns.id(), "pod released");
        detached.and(forgotten)
    }

    async fn stop(&self, uid: &PodUid, proxy: L::Proxy, grace: Duration) {
        if timeout(grace + STOP_MARGIN, self.launch.stop(proxy, grace))
            .await
            .is_err()
        {
            error!(%uid, "the pod's proxy did not stop in time and was dropped");
        }
    }
}

/// Runs a blocking step where it may block. A panic in it is an error, and ends nothing else.
pub(super) async fn blocking<T: Send + 'static>(
    step: &'static str,
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    spawn_blocking(move || guarded(step, work))
        .await
        .unwrap_or(Err(Error::Panicked { step }))
}

fn guarded<T>(step: &'static str, work: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    // What the step held is dropped with it or, as the redirector's state, guarded by its owner.
    catch_unwind(AssertUnwindSafe(work)).unwrap_or(Err(Error::Panicked { step }))
}

/// Whether somebody beside us still has a captured pod's namespace: it lives on, with its interfaces, as long as we hold it.
fn still_there(add: &PodAdd) -> Result<(), Error> {
    let Some(path) = &add.netns_path else {
        return Ok(());
    };
    let named = !Netns::open(path).is_err_and(|error| is_absence(&error));
    // A name alone proves nothing: it may be that of a process, and the pod has others. Where we don't see all processes, the
    // pod is taken to be there, and stays captured.
    if named || !process::sees_all() || process::any_in(add.netns.id()) {
        return Ok(());
    }
    Err(Error::NamespaceGone {
        path: path.clone(),
        netns: add.netns.id(),
    })
}

/// Whether an error of [`Netns::open`] says that there is no namespace, and not only that it cannot be opened now. `ip netns`
/// and container runtimes mount namespaces on files, which may outlive the mount.
pub(super) fn is_absence(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory | io::ErrorKind::InvalidInput
    )
}

/// The addresses of a pod: those its event names, each of which must be there, and the others that its interfaces have.
fn pod_addresses(netns: NetnsId, named: &[IpAddr], found: &[InterfaceAddress]) -> Result<Vec<IpAddr>, Error> {
    let describe = || {
        let outside: Vec<_> = found.iter().filter(|found| !found.loopback).collect();
        match outside.is_empty() {
            true => "none".to_owned(),
            false => outside
                .iter()
                .map(|f| format!("{} on {}", f.address, f.interface))
                .collect::<Vec<_>>()
                .join(", "),
        }
    };
    let mut addresses: Vec<IpAddr> = Vec::new();
    for address in named.iter().map(IpAddr::to_canonical) {
        // Loopback addresses are in every namespace, and prove nothing.
        if address.is_loopback() || !found.iter().any(|found| found.address == address) {
            return Err(Error::AddressNotFound {
                address,
                netns,
                found: describe(),
            });
        }
        addresses.push(address);
    }
    addresses.extend(
        found
            .iter()
            .filter(|found| found.is_global())
            .map(|found| found.address),
    );
    if addresses.is_empty() {
        return Err(Error::NoAddress {
            netns,
            found: describe(),
        });
    }
    let mut seen = std::collections::BTreeSet::new();
    addresses.retain(|address| seen.insert(*address));
    Ok(addresses)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_addresses_of_a_pod_are_those_of_its_interfaces() {
        let interface = |interface: &str, address: &str| InterfaceAddress {
            interface: interface.into(),
            address: address.parse().unwrap(),
            loopback: interface == "lo",
        };
        let eth0 = [
            interface("lo", "127.0.0.1"),
            interface("lo", "::1"),
            interface("lo", "10.9.9.9"),
            interface("eth0", "10.0.0.1"),
            interface("eth0", "fd00::1"),
            interface("eth0", "fe80::1"),
        ];
        let netns = NetnsId { dev: 4, ino: 7 };
        type Case<'a> = (
            &'a [&'a str],
            &'a [InterfaceAddress],
            Result<&'a [&'a str], &'a str>,
        );
        let table: [Case<'_>; 8] = [
            (&[], &eth0, Ok(&["10.0.0.1", "fd00::1"])),
            (&["fd00::1"], &eth0, Ok(&["fd00::1", "10.0.0.1"])),
            (&["::ffff:10.0.0.1"], &eth0, Ok(&["10.0.0.1", "fd00::1"])),
            (&["10.9.9.9"], &eth0, Ok(&["10.9.9.9", "10.0.0.1", "fd00::1"])),
            (
                &["10.0.0.1", "10.0.0.2"],
                &eth0,
                Err(
                    "address 10.0.0.2 is on no interface in net:[7], which has 10.0.0.1 on eth0, fd00::1 on eth0, \
                     fe80::1 on eth0",
                ),
            ),
            (
                &["127.0.0.1"],
                &eth0[..1],
                Err("address 127.0.0.1 is on no interface in net:[7], which has none"),
            ),
            (
                &["10.0.0.1"],
                &eth0[..3],
                Err("address 10.0.0.1 is on no interface in net:[7], which has none"),
            ),
            (
                &[],
                &eth0[..3],
                Err("net:[7] has no address yet that others could reach: its interfaces have none"),
            ),
        ];
        for (named, found, expected) in table {
            let named: Vec<IpAddr> = named.iter().map(|text| text.parse().unwrap()).collect();
            let addresses = pod_addresses(netns, &named, found);
            let texts = addresses.map(|list| list.iter().map(ToString::to_string).collect::<Vec<_>>());
            match (texts, expected) {
                (Ok(texts), Ok(expected)) => assert_eq!(texts, expected),
                (Err(error), Err(expected)) => assert_eq!(error.to_string(), expected),
                (result, expected) => panic!("{named:?}: {result:?} is not {expected:?}"),
            }
        }
    }
}
