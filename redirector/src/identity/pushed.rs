//! Certificates that come unasked, all at once: of mounted files, and of the SPIFFE Workload API. A [`Publisher`] tells what there is
//! now; [`Pushed`] is the [`CertSource`] that hands each identity what is its own.

use std::{collections::BTreeMap, sync::Arc};

use futures_util::{
    StreamExt,
    stream::{self, BoxStream},
};
use tokio::sync::watch;

use super::{CertSource, Error, Svid};
use crate::mesh::spiffe::SpiffeId;

/// How many identities a message names: there may be hundreds.
const NAMED: usize = 5;

/// What a source has.
#[derive(Debug, Clone, Default)]
pub(super) struct Snapshot {
    /// The certificates, each as it was first seen.
    pub(super) svids: BTreeMap<SpiffeId, Arc<Svid>>,
    /// What is wrong with the source, or with a part of it.
    pub(super) problem: Option<Arc<str>>,
    /// The source has told something at least once.
    pub(super) told: bool,
}

/// The end that tells.
pub(super) struct Publisher(watch::Sender<Arc<Snapshot>>);

/// The end that is asked.
#[derive(Clone)]
pub(super) struct Pushed {
    /// Where it all comes from, for messages.
    origin: Arc<str>,
    snapshots: watch::Receiver<Arc<Snapshot>>,
}

/// Both ends.
pub(super) fn channel(origin: String) -> (Publisher, Pushed) {
    let (sender, snapshots) = watch::channel(Arc::default());
    let origin = origin.into();
    (Publisher(sender), Pushed { origin, snapshots })
}

impl Publisher {
    pub(super) fn publish(&self, snapshot: Snapshot) {
        self.0.send_replace(Arc::new(snapshot));
    }

    /// What was there stays, and this is wrong.
    pub(super) fn fail(&self, problem: String) {
        self.0.send_modify(|snapshot| {
            let now = Arc::make_mut(snapshot);
            now.problem = Some(problem.into());
            now.told = true;
        });
    }
}

/// One identity's view.
struct View {
    id: SpiffeId,
    origin: Arc<str>,
    snapshots: watch::Receiver<Arc<Snapshot>>,
    given: Option<Arc<Svid>>,
    failure: Option<String>,
}

impl View {
    /// Waits for what this identity has not been told.
    async fn next(&mut self) -> Option<Result<Svid, Error>> {
        loop {
            let snapshot = Arc::clone(&self.snapshots.borrow_and_update());
            if let Some(news) = self.news(&snapshot) {
                return Some(news);
            }
            self.snapshots.changed().await.ok()?;
        }
    }

    fn news(&mut self, snapshot: &Snapshot) -> Option<Result<Svid, Error>> {
        let found = snapshot.svids.get(&self.id);
        // Told again after a failure, so that the failure is known to be over.
        let is_over = self.failure.is_some() && snapshot.problem.is_none();
        if let Some(svid) = found
            && (is_over || !self.given.as_ref().is_some_and(|given| Arc::ptr_eq(given, svid)))
        {
            self.given = Some(Arc::clone(svid));
            self.failure = None;
            return Some(Ok(svid.copy()));
        }
        let failure = match (&snapshot.problem, found) {
            _ if !snapshot.told => return None,
            (None, Some(_)) => None,
            (Some(problem), Some(_)) => Some(problem.to_string()),
            (problem, None) => Some(absent(snapshot, problem.as_deref())),
        };
        if self.failure == failure {
            return None;
        }
        self.failure = failure;
        let failure = self.failure.clone()?;
        let operation = format!("certificate for {} from {}", self.id, self.origin);
        Some(Err(Error::new(operation, failure)))
    }
}

fn absent(snapshot: &Snapshot, problem: Option<&str>) -> String {
    let mut text = match snapshot.svids.len() {
        0 => "there is no certificate at all".to_owned(),
        count => {
            let names: Vec<_> = snapshot
                .svids
                .keys()
                .take(NAMED)
                .map(ToString::to_string)
                .collect();
            let more = if count > NAMED { ", ..." } else { "" };
            format!(
                "there is none for this identity among {count}: {}{more}",
                names.join(", ")
            )
        }
    };
    if let Some(problem) = problem {
        text.push_str("; ");
        text.push_str(problem);
    }
    text
}

impl CertSource for Pushed {
    fn svids(&self, id: &SpiffeId) -> BoxStream<'static, Result<Svid, Error>> {
        let view = View {
            id: id.clone(),
            origin: Arc::clone(&self.origin),
            snapshots: self.snapshots.clone(),
            given: None,
            failure: None,
        };
        stream::unfold(view, |mut view| async move { Some((view.next().await?, view)) }).boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::testing::{TestCa, id};

    #[tokio::test]
    async fn a_failure_is_told_once_and_so_is_its_end() {
        let svid = Arc::new(TestCa::new().svid(&id("web")));
        let good = Snapshot {
            svids: [(id("web"), Arc::clone(&svid))].into(),
            problem: None,
            told: true,
        };
        let (publisher, pushed) = channel("a test".to_owned());
        let mut stream = pushed.svids(&id("web"));
        let mut next = || futures_util::FutureExt::now_or_never(stream.next()).flatten();
        assert!(next().is_none(), "nothing was told");
        publisher.publish(good.clone());
        assert_eq!(next().unwrap().unwrap().chain, svid.chain);
        for _ in 0..3 {
            publisher.publish(good.clone());
            assert!(next().is_none(), "the same is no news");
        }
        publisher.fail("away".to_owned());
        assert!(next().unwrap().unwrap_err().to_string().contains("away"));
        publisher.fail("away".to_owned());
        assert!(next().is_none());
        publisher.publish(good);
        assert_eq!(next().unwrap().unwrap().chain, svid.chain);
        assert!(next().is_none());
        drop(publisher);
        assert!(
            futures_util::FutureExt::now_or_never(stream.next())
                .unwrap()
                .is_none(),
            "it ends with its source"
        );
    }
}
