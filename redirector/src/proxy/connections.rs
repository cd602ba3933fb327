//! The inbound connections of a pod that are open, under the policies that permit them.
//!
//! `inbound` and `passthrough` have each connection [admitted](Connections::admit) before the application is dialled, and end
//! it when it is [revoked](Admitted::revoked). One task for each pod [follows](Connections::follow) the mesh and revokes what
//! is no longer permitted.
//!
//! No change is missed by a connection that comes while it happens. The pod's policies are numbered, and a connection enters
//! the table together with the number of those that it is about to be asked of, under one lock. Whatever the table holds with
//! another number than the newest is asked again by the task, which wakes after every change of the mesh.

use std::{
    collections::HashMap,
    future::{Future, poll_fn},
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    task::Poll,
};

use futures_util::task::AtomicWaker;
use tokio::sync::watch;

use super::failure::{Failure, Flag};
use crate::mesh::{
    index::Mesh,
    pod::{Home, Local, PodInfo},
    policy::{self, Connection, Denial, PolicyName, PolicySet},
    spiffe::SpiffeId,
    wanted::Unanswered,
};

/// Why a connection is not let in, or does not stay.
#[derive(Debug, thiserror::Error)]
pub(super) enum Denied {
    /// By the policies that it met.
    #[error("denied by policy")]
    ByPolicy(#[source] Denial),
    /// By policies that came later.
    #[error("closed due to policy change")]
    ByChange(#[source] Denial),
    /// Nobody knows which policies there are.
    #[error("the control plane has not told its policies yet: one may be against this")]
    PoliciesAwaited,
    /// Nobody knows which policies it would meet.
    #[error(
        "the mesh has policies that are for single workloads, and no workload for the local pod {namespace}/{name} with \
         service account {service_account}: they may be for it"
    )]
    UnknownWorkload {
        namespace: String,
        name: String,
        service_account: String,
    },
    #[error(transparent)]
    Unanswered(#[from] Unanswered),
}

impl Failure for Denied {
    fn flag(&self) -> Flag {
        Flag::Deny
    }

    fn policy(&self) -> Option<&PolicyName> {
        match self {
            Self::ByPolicy(Denial::Matched(policy)) | Self::ByChange(Denial::Matched(policy)) => Some(policy),
            _ => None,
        }
    }
}

impl Denied {
    /// Whether a newer snapshot of the mesh is likely to have the answer: worth waiting for, for a bounded time.
    pub(super) fn is_transient(&self) -> bool {
        matches!(self, Self::PoliciesAwaited | Self::UnknownWorkload { .. })
    }
}

/// What policies see of a connection. Connections that are equal in it share their fate.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Flow {
    /// Address of the TCP peer.
    pub(super) source: IpAddr,
    /// Who it proved to be.
    pub(super) identity: Option<SpiffeId>,
    /// The pod's address, and the port of its application.
    pub(super) destination: SocketAddr,
}

impl Flow {
    /// Where `domains` are names of one trust domain.
    fn connection<'a>(&'a self, domains: &'a [Arc<str>]) -> Connection<'a> {
        Connection::new(self.source, self.identity.as_ref(), self.destination).in_one_domain(domains)
    }
}

/// The open inbound connections of a pod.
#[derive(Debug)]
pub(super) struct Connections {
    info: PodInfo,
    home: Home,
    /// All names of the pod's trust domain, where it has several.
    domains: Arc<[Arc<str>]>,
    mesh: watch::Receiver<Arc<Mesh>>,
    table: Mutex<Table>,
}

#[derive(Debug)]
struct Table {
    /// The snapshot that the policies are of.
    mesh: Arc<Mesh>,
    /// Whether it knows the pod.
    is_known: bool,
    /// The policies that the pod's workload names; as last known, since a workload that is gone revokes nothing.
    selected: Vec<PolicyName>,
    policies: Arc<PolicySet>,
    /// Counts the changes of `policies`.
    number: u64,
    open: HashMap<u64, Open>,
    next: u64,
}

#[derive(Debug)]
struct Open {
    entry: Arc<Entry>,
    /// Of the policies that it was asked of last.
    number: u64,
}

/// A connection, as long as somebody holds it.
#[derive(Debug)]
pub(super) struct Entry {
    flow: Flow,
    revoked: OnceLock<Denial>,
    /// Of whoever is to end it.
    waker: AtomicWaker,
}

/// A connection that is let in, until it is dropped.
#[derive(Debug)]
pub(super) struct Admitted {
    connections: Arc<Connections>,
    key: u64,
    entry: Arc<Entry>,
    /// The ALLOW policy that it matched; none where there was none to ask.
    policy: Option<PolicyName>,
}

impl Connections {
    /// Of the pod that `info` tells of, on the node at `home`; none are open.
    pub(super) fn new(info: PodInfo, home: Home, mesh: watch::Receiver<Arc<Mesh>>) -> Self {
        let now = mesh.borrow().clone();
        let mut table = Table {
            mesh: Arc::default(),
            is_known: false,
            selected: Vec::new(),
            policies: Arc::default(),
            number: 0,
            open: HashMap::new(),
            next: 0,
        };
        table.update(
            now,
            Local {
                info: &info,
                home: &home,
            },
        );
        Self {
            info,
            home,
            domains: Arc::default(),
            mesh,
            table: Mutex::new(table),
        }
    }

    /// The same, of a pod whose trust domain has all these names.
    pub(super) fn in_one_domain(self, domains: Arc<[Arc<str>]>) -> Self {
        Self { domains, ..self }
    }

    /// Lets a connection in, if the pod's policies permit it.
    pub(super) fn admit(self: &Arc<Self>, flow: Flow) -> Result<Admitted, Denied> {
        let (mut admitted, policies) = {
            let mut table = self.newest();
            if table.mesh.policies_are_awaited() {
                return Err(Denied::PoliciesAwaited);
            }
            if !table.is_known && table.mesh.has_selected_policies() {
                return Err(Denied::UnknownWorkload {
                    namespace: self.info.namespace.clone(),
                    name: self.info.name.clone(),
                    service_account: self.info.service_account.clone(),
                });
            }
            let entry = Arc::new(Entry {
                flow,
                revoked: OnceLock::new(),
                waker: AtomicWaker::new(),
            });
            let admitted = Admitted {
                connections: self.clone(),
                key: table.enter(entry.clone()),
                entry,
                policy: None,
            };
            (admitted, table.policies.clone())
        };
        let flow = &admitted.entry.flow;
        let decision = policy::evaluate(&policies, &flow.connection(&self.domains));
        if let Some(outcome) = decision.dry_run {
            tracing::debug!(
                uid = %self.info.uid,
                src.addr = %flow.source,
                src.identity = flow.identity.as_ref().map(tracing::field::display),
                dst.addr = %flow.destination,
                %outcome,
                "with the policies in dry run"
            );
        }
        match decision.verdict {
            policy::Verdict::Permitted(policy) => {
                admitted.policy = policy.cloned();
                Ok(admitted)
            }
            policy::Verdict::Denied(denial) => Err(Denied::ByPolicy(denial)),
        }
    }

    /// Revokes what is no longer permitted, after each change of the mesh. Ends with the mesh's source.
    pub(super) async fn follow(self: Arc<Self>) {
        let mut mesh = self.mesh.clone();
        // There may have been a change since `new`.
        mesh.mark_changed();
        while mesh.changed().await.is_ok() {
            self.ask_again().await;
        }
    }

    /// Asks the policies of every open connection that has not been asked of the newest.
    async fn ask_again(&self) {
        let (entries, policies) = {
            let mut table = self.newest();
            (table.not_asked(), table.policies.clone())
        };
        if entries.is_empty() {
            return;
        }
        let mut denials: HashMap<&Flow, Option<Denial>> = HashMap::new();
        let mut revoked = 0_usize;
        for entry in &entries {
            let denial = denials
                .entry(&entry.flow)
                .or_insert_with(|| policies.denial(&entry.flow.connection(&self.domains)));
            if let Some(denial) = denial {
                entry.revoke(denial);
                revoked += 1;
            }
            // Many flows and policies make many milliseconds.
            tokio::task::coop::consume_budget().await;
        }
        tracing::info!(
            uid = %self.info.uid,
            connections = entries.len(),
            revoked,
            "policies have changed; connections that they no longer permit are closed"
        );
    }

    /// The table, with the policies of the mesh as it is now.
    fn newest(&self) -> MutexGuard<'_, Table> {
        let mut table = self.lock();
        // Looked at within the lock, so that nobody goes back to an older one.
        let mesh = self.mesh.borrow().clone();
        if !Arc::ptr_eq(&mesh, &table.mesh) {
            let local = Local {
                info: &self.info,
                home: &self.home,
            };
            table.update(mesh, local);
        }
        table
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn update(&mut self, mesh: Arc<Mesh>, local: Local<'_>) {
        let workload = mesh.local(local);
        self.is_known = workload.is_some();
        let names = workload.map(|workload| &*workload.authorization_policies);
        let same_names = names.is_none_or(|names| *names == *self.selected);
        // Most changes are of workloads, many a second, and every pod's table sees each.
        if same_names && mesh.has_policies_of(&self.mesh) {
            self.mesh = mesh;
            return;
        }
        if let Some(names) = names {
            self.selected = names.to_vec();
        }
        let policies = mesh.policies_for(&local.info.namespace, &self.selected);
        if policies != *self.policies {
            self.policies = Arc::new(policies);
            self.number += 1;
        }
        self.mesh = mesh;
    }

    fn enter(&mut self, entry: Arc<Entry>) -> u64 {
        let (key, number) = (self.next, self.number);
        self.next += 1;
        self.open.insert(key, Open { entry, number });
        key
    }

    /// What has been asked of other policies than the newest; from now on it counts as asked of these.
    fn not_asked(&mut self) -> Vec<Arc<Entry>> {
        let number = self.number;
        let mut entries = Vec::new();
        for open in self.open.values_mut().filter(|open| open.number != number) {
            open.number = number;
            entries.push(open.entry.clone());
        }
        entries
    }
}

impl Entry {
    fn revoke(&self, denial: &Denial) {
        // The first reason is the one that is told.
        let _ = self.revoked.set(denial.clone());
        self.waker.wake();
    }

    /// Why it is revoked, if it is.
    pub(super) fn denied(&self) -> Option<Denied> {
        self.revoked.get().cloned().map(Denied::ByChange)
    }
}

impl Admitted {
    /// Waits until the connection must end. Cancel-safe; one may wait at a time.
    pub(super) async fn revoked(&self) -> Denied {
        poll_fn(|context| {
            // Registered first, so that it is either seen here or woken for.
            self.entry.waker.register(context.waker());
            self.entry.denied().map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }

    /// Runs `connection` to its end, or until it must end. It is to be dropped then: what it holds, its legs and its record, must say so.
    pub(super) async fn run(&self, connection: impl Future<Output = ()>) {
        tokio::select! {
            biased;
            _ = self.revoked() => {}
            () = connection => {}
        }
    }

    /// The policy that let it in.
    pub(super) fn policy(&self) -> Option<&PolicyName> {
        self.policy.as_ref()
    }

    /// For whoever is to tell, at the end, why it ended.
    pub(super) fn entry(&self) -> Arc<Entry> {
        self.entry.clone()
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        self.connections.lock().open.remove(&self.key);
    }
}

#[cfg(test)]
mod tests;
