//! At start without a node agent above: the pods that an earlier agent of ours captured, as a snapshot from its records.
//!
//! `app` runs it before the socket of `cni_server` is served.

use std::{path::PathBuf, sync::Arc, time::Duration};

use tokio::{
    sync::{mpsc, oneshot},
    task::JoinSet,
    time::timeout,
};
use tracing::{info, warn};

use super::{
    Error, OnFailure, PodAdd, PodEvent,
    records::{Records, Remembered},
    work::blocking,
};
use crate::mesh::pod::PodUid;

/// Time after which new pods no longer wait for old ones.
const DEADLINE: Duration = Duration::from_secs(30);

/// A pod that may still be there, and of which no more is known: its record cannot be used, or its namespace not be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unknown {
    /// Which.
    pub uid: PodUid,
    /// The file of its record.
    pub record: PathBuf,
}

/// What became of a recorded pod.
enum Found {
    /// It is still there.
    Pod(Box<PodAdd>),
    /// It may still be there; nothing of it is touched.
    Unknown(PodUid),
    /// It is gone.
    Gone,
}

/// Sends the recorded pods, and returns when each was captured or failed, with those that could not be tried. A failed one is tried
/// again by the lifecycle; one whose namespace is gone is released by it, since it is not named.
///
/// # Errors
/// When the records cannot be had. Then no end of the snapshot is sent: all pods would be taken for gone, and released.
pub async fn restore(records: Records, events: mpsc::Sender<PodEvent>) -> Result<Vec<Unknown>, Error> {
    let find = move || {
        let remembered = records.load().map_err(Error::Record)?;
        let found: Vec<_> = remembered.into_iter().map(find).collect();
        let unknown = found.iter().filter_map(|found| match found {
            Found::Unknown(uid) => Some(Unknown {
                uid: uid.clone(),
                record: records.file(uid),
            }),
            _ => None,
        });
        let unknown: Vec<_> = unknown.collect();
        Ok((found, unknown))
    };
    let (found, unknown) = blocking("read the records of pods", find).await?;
    let mut answers = JoinSet::new();
    for found in found {
        let (reply, answer) = oneshot::channel();
        let event = match found {
            Found::Pod(add) => PodEvent::Add(*add, reply),
            Found::Unknown(uid) => PodEvent::Keep(uid, reply),
            Found::Gone => continue,
        };
        if events.send(event).await.is_err() {
            return Ok(unknown);
        }
        answers.spawn(answer);
    }
    let of = answers.len();
    let mut restored = 0;
    let all = async {
        while let Some(answered) = answers.join_next().await {
            restored += usize::from(matches!(answered, Ok(Ok(Ok(())))));
        }
    };
    if timeout(DEADLINE, all).await.is_err() {
        warn!(
            "some pods of an earlier agent are still being captured after {DEADLINE:?}; going on without waiting"
        );
    }
    info!(restored, of, "pods of an earlier agent");
    let (reply, answer) = oneshot::channel();
    if events.send(PodEvent::SnapshotSent(reply)).await.is_ok() {
        let _: Result<Result<(), Error>, _> = answer.await;
    }
    Ok(unknown)
}

fn find(remembered: Remembered) -> Found {
    let record = match remembered {
        Remembered::Pod(record) => record,
        Remembered::Name(uid) => return Found::Unknown(uid),
    };
    // The records that are loaded have usable UIDs.
    let Ok(info) = record.info() else {
        return Found::Gone;
    };
    // Came over ZDS: nobody is here to name it again.
    let Some(path) = record.netns_path() else {
        return Found::Gone;
    };
    match record.namespace() {
        Ok(Some(netns)) => Found::Pod(Box::new(PodAdd {
            info,
            netns: Arc::new(netns),
            netns_path: Some(path.to_owned()),
            addresses: record.addresses().to_vec(),
            rules: Some(Box::new(record.rules().clone())),
            on_failure: OnFailure::Retry,
        })),
        Ok(None) => {
            info!(uid = %info.uid, netns = %path.display(), "the namespace of a recorded pod is gone");
            Found::Gone
        }
        Err(error) => {
            warn!(uid = %info.uid, netns = %path.display(), %error, "cannot open the namespace of a recorded pod");
            Found::Unknown(info.uid)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::{super::records::Record, *};
    use crate::{mesh::pod::PodInfo, sys::netns::Netns};

    fn save(records: &Records, uid: &str, netns_path: Option<PathBuf>) {
        let info = PodInfo {
            uid: uid.parse().unwrap(),
            name: uid.to_owned(),
            namespace: "shop".into(),
            service_account: "sa".into(),
        };
        let netns = Arc::new(Netns::current().unwrap());
        let addresses = vec![[10, 0, 0, 1].into()];
        let add = PodAdd {
            info,
            netns,
            netns_path,
            addresses,
            rules: None,
            on_failure: OnFailure::Report,
        };
        records.save(&Record::of(&add)).unwrap();
    }

    #[tokio::test]
    async fn recorded_pods_are_named_as_far_as_they_are_there() {
        let state = tempfile::tempdir().unwrap();
        let records = Records::open(state.path()).unwrap();
        let own = Path::new("/proc/thread-self/ns/net");
        let plain_file = state.path().join("left-by-ip-netns");
        std::fs::write(&plain_file, "").unwrap();
        let endless = state.path().join("endless");
        std::os::unix::fs::symlink(&endless, &endless).unwrap();
        save(&records, "there", Some(own.into()));
        save(&records, "gone", Some("/nonexistent/netns".into()));
        save(&records, "unmounted", Some(plain_file));
        save(&records, "unreadable", Some(endless));
        save(&records, "came-over-zds", None);
        std::fs::write(state.path().join("pods/damaged.json"), "{").unwrap();

        let (events, mut receiver) = mpsc::channel(8);
        let task = tokio::spawn(restore(records, events));
        let mut named = Vec::new();
        while let Some(event) = receiver.recv().await {
            let (name, reply) = match event {
                PodEvent::Add(add, reply) => {
                    assert_eq!((add.on_failure, add.addresses.len()), (OnFailure::Retry, 1));
                    assert_eq!(add.netns_path.as_deref(), Some(own));
                    (format!("add {}", add.info.uid), reply)
                }
                PodEvent::Keep(uid, reply) => (format!("keep {uid}"), reply),
                PodEvent::SnapshotSent(reply) => ("end".to_owned(), reply),
                other => panic!("{other:?}"),
            };
            named.push(name);
            reply.send(Ok(())).unwrap();
        }
        let unknown = task.await.unwrap().unwrap();
        let file = |uid: &str, name: &str| Unknown {
            uid: uid.parse().unwrap(),
            record: state.path().join("pods").join(name),
        };
        // The first was put aside.
        assert_eq!(
            unknown,
            [
                file("damaged", "damaged.json.bad"),
                file("unreadable", "unreadable.json")
            ]
        );
        assert_eq!(named, ["keep damaged", "add there", "keep unreadable", "end"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_that_hangs_does_not_hold_up_the_end() {
        let state = tempfile::tempdir().unwrap();
        let records = Records::open(state.path()).unwrap();
        save(&records, "hangs", Some("/proc/thread-self/ns/net".into()));
        let (events, mut receiver) = mpsc::channel(8);
        let task = tokio::spawn(restore(records, events));
        let Some(PodEvent::Add(_, unanswered)) = receiver.recv().await else {
            panic!()
        };
        let Some(PodEvent::SnapshotSent(reply)) = receiver.recv().await else {
            panic!()
        };
        reply.send(Ok(())).unwrap();
        task.await.unwrap().unwrap();
        drop(unanswered);
    }

    #[tokio::test]
    async fn without_records_nobody_is_taken_for_gone() {
        let state = tempfile::tempdir().unwrap();
        let records = Records::open(state.path()).unwrap();
        std::fs::remove_dir(state.path().join("pods")).unwrap();
        std::fs::write(state.path().join("pods"), "").unwrap();
        let (events, mut receiver) = mpsc::channel(8);
        restore(records, events).await.unwrap_err();
        assert!(receiver.recv().await.is_none());
    }
}
