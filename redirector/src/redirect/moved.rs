//! Pods that an earlier agent captured by another backend: each is captured by the one of now, and then let go by the one of before,
//! so that nothing leaves it in plain in between.
//!
//! `app` puts it in place where it finds such pods.

use std::{io, net::SocketAddr, os::fd::BorrowedFd};

use super::{
    Attached, Count, Error, Leftovers, Marks, PodNetwork, Redirector, Serving,
    metrics::{Occupancy, Repairs},
    probers::View,
    rules::Rules,
};
use crate::{mesh::pod::PodUid, sys::netns::Netns};

/// A backend, with what is left of others.
pub struct Moved {
    now: Box<dyn Redirector>,
    before: Vec<Box<dyn Leftovers>>,
}

impl Moved {
    /// All pods are `now`'s from here on.
    pub fn new(now: Box<dyn Redirector>, before: Vec<Box<dyn Leftovers>>) -> Self {
        Self { now, before }
    }

    /// Removes what is left for a pod, and tells whether there was anything.
    fn let_go(&self, uid: &PodUid, netns: Option<&Netns>) -> Result<bool, Vec<Error>> {
        let (mut any, mut errors) = (false, Vec::new());
        for before in &self.before {
            let removed = match before.pods() {
                Ok(pods) if !pods.contains(uid) => continue,
                Ok(_) => before.remove(uid, netns),
                Err(error) => Err(vec![error]),
            };
            match removed {
                Ok(()) => {
                    any = true;
                    tracing::info!(%uid, from = before.backend(), to = self.now.name(), "the pod has moved to another backend");
                }
                Err(more) => errors.extend(more),
            }
        }
        if errors.is_empty() { Ok(any) } else { Err(errors) }
    }
}

impl Redirector for Moved {
    fn name(&self) -> &'static str {
        self.now.name()
    }

    fn marks(&self) -> Marks {
        self.now.marks()
    }

    fn refuses(&self, rules: &Rules) -> Option<String> {
        self.now.refuses(rules)
    }

    fn attach(&self, pod: &PodNetwork, serving: Serving<'_>) -> Result<Attached, Error> {
        let attached = self.now.attach(pod, serving.clone())?;
        let moved = self.let_go(&pod.uid, Some(&pod.netns)).map_err(|errors| {
            let texts: Vec<_> = errors.iter().map(ToString::to_string).collect();
            let operation = format!("removing what another backend left in {}", pod.uid);
            Error::new(operation, texts.join("; "))
        })?;
        if moved {
            // Both may want the same sysctl, and the other has put it back to what it was before.
            return self.now.attach(pod, serving);
        }
        Ok(attached)
    }

    fn release(&self, pod: &PodNetwork) -> Result<(), Error> {
        self.now.release(pod)
    }

    fn detach(&self, pod: &PodNetwork) -> Result<(), Vec<Error>> {
        both(self.now.detach(pod), self.let_go(&pod.uid, Some(&pod.netns)))
    }

    fn forget(&self, uid: &PodUid) -> Result<(), Vec<Error>> {
        both(self.now.forget(uid), self.let_go(uid, None))
    }

    fn rename(&self, from: &PodUid, to: &PodUid) -> Result<(), Error> {
        self.now.rename(from, to)
    }

    fn attached(&self) -> Result<Vec<PodUid>, Error> {
        let mut uids = self.now.attached()?;
        for before in &self.before {
            uids.extend(before.pods()?);
        }
        uids.sort();
        uids.dedup();
        Ok(uids)
    }

    fn original_dst(&self, connection: BorrowedFd<'_>) -> io::Result<SocketAddr> {
        self.now.original_dst(connection)
    }

    fn is_rerouted(&self, connection: BorrowedFd<'_>) -> io::Result<bool> {
        self.now.is_rerouted(connection)
    }

    fn counts(&self, uid: &PodUid) -> Result<Vec<Count>, Error> {
        self.now.counts(uid)
    }

    fn occupancy(&self) -> Vec<Occupancy> {
        self.now.occupancy()
    }

    fn repairs(&self) -> Option<&Repairs> {
        self.now.repairs()
    }

    fn look_for_probers(&self) -> Result<Option<View>, Error> {
        self.now.look_for_probers()
    }

    fn make_ready(&self) -> Result<(), Error> {
        self.now.make_ready()
    }

    fn reread(&self) -> Result<(), Error> {
        self.now.reread()
    }

    fn own_socket(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        self.now.own_socket(socket)
    }
}

/// All that went wrong in two steps of which neither needs the other.
fn both(first: Result<(), Vec<Error>>, second: Result<bool, Vec<Error>>) -> Result<(), Vec<Error>> {
    match (first, second) {
        (Ok(()), Ok(_)) => Ok(()),
        (Err(errors), Ok(_)) | (Ok(()), Err(errors)) => Err(errors),
        (Err(mut errors), Err(more)) => {
            errors.extend(more);
            Err(errors)
        }
    }
}
