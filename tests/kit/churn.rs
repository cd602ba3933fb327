//! Pod events in every order in which they have been seen to come: twice, late, for namespaces that are gone or new, and at one
//! time with others.
//!
//! A [`Visitor`] has a name of the mesh to itself, and makes pods of it come and go, each with a new UID. What it leaves at
//! the end is known, whatever was in between.

use std::{
    collections::BTreeSet,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::{
    agent::Agent,
    cni::{self, Answer},
    node::{Node, Pod},
    wait,
};

/// Orders of events.
pub const ORDERS: usize = 10;

/// Lets so many cycles begin in a second, and counts events.
#[derive(Debug)]
pub struct Pace {
    begun: Instant,
    cycles: AtomicUsize,
    events: AtomicUsize,
    interval: Duration,
}

impl Pace {
    /// At most `per_second`, from now on.
    pub fn new(per_second: u32) -> Self {
        Self {
            begun: Instant::now(),
            cycles: AtomicUsize::new(0),
            events: AtomicUsize::new(0),
            interval: Duration::from_secs(1) / per_second,
        }
    }

    fn next(&self) {
        let number = self.cycles.fetch_add(1, Ordering::Relaxed);
        let due = self.begun + self.interval * u32::try_from(number).expect("few cycles");
        thread::sleep(due.saturating_duration_since(Instant::now()));
        assert!(!wait::interrupted(), "interrupted");
    }

    /// What there was, in a line.
    pub fn line(&self) -> String {
        let (cycles, seconds) = (
            self.cycles.load(Ordering::Relaxed),
            self.begun.elapsed().as_secs_f64(),
        );
        format!(
            "{cycles} enrolments and removals, {} events, in {seconds:.1} s ({:.0} a second)",
            self.events.load(Ordering::Relaxed),
            cycles as f64 / seconds,
        )
    }
}

/// Makes pods come and go.
#[derive(Debug)]
pub struct Visitor<'a> {
    agent: &'a Agent,
    node: &'a Node,
    pace: &'a Pace,
    name: String,
    /// The pod of the mesh; the UID changes.
    pod: Pod,
    /// Another namespace with the same addresses.
    twin: Pod,
    visits: usize,
}

impl<'a> Visitor<'a> {
    /// A visitor with two namespaces of its own.
    pub fn new(agent: &'a Agent, node: &'a Node, pace: &'a Pace, pod: Pod) -> Self {
        let name = pod.name.clone();
        let mut twin = node.twin(&pod, &format!("{name}-twin"));
        twin.name.clone_from(&name);
        Self {
            agent,
            node,
            pace,
            name,
            pod,
            twin,
            visits: 0,
        }
    }

    /// Goes on at another pace.
    pub fn set_pace(&mut self, pace: &'a Pace) {
        self.pace = pace;
    }

    /// The pod as it is after [`Visitor::stay`].
    pub fn pod(&self) -> &Pod {
        &self.pod
    }

    fn new_uid(&mut self) -> String {
        self.visits += 1;
        format!("{}-{}", self.name, self.visits)
    }

    /// One or two pods come and go, in one of the [`ORDERS`]. Nothing of them is to be left.
    pub fn visit(&mut self, order: usize) {
        self.pace.next();
        self.pod.uid = self.new_uid();
        match order {
            0 => {
                self.add(&self.pod);
                self.delete(&self.pod);
            }
            1 => self.twice(),
            2 => self.moves(),
            3 => self.address_is_used_again(),
            4 => self.namespace_goes_first(),
            5 => self.deleted_before_it_comes(),
            6 => self.deleted_while_it_comes_again(),
            7 => self.deleted_when_another_has_come(),
            8 => self.namespace_goes_while_it_comes(),
            9 => self.namespace_of_another(),
            _ => unreachable!("there are {ORDERS} orders"),
        }
    }

    /// A pod comes, after a delete for the one before that is late, and stays.
    pub fn stay(&mut self) {
        self.pace.next();
        let before = self.pod.uid.clone();
        self.pod.uid = self.new_uid();
        self.add(&self.pod);
        // The same namespace; the UID tells them apart.
        self.ok("/cmddel", &self.event(&self.pod, &before));
    }

    /// Asks for the pod's release.
    pub fn leave(&self) {
        self.delete(&self.pod);
    }

    /// The same pod is told twice, and twice at one time.
    fn twice(&self) {
        self.add(&self.pod);
        thread::scope(|scope| {
            scope.spawn(|| self.add(&self.pod));
            self.add(&self.pod);
        });
        self.delete(&self.pod);
        self.delete(&self.pod);
    }

    /// The pod gets another namespace; the delete for the old one is late, and must not end the new one's capture.
    fn moves(&mut self) {
        let uid = self.pod.uid.clone();
        self.add(&self.pod);
        self.twin.uid.clone_from(&uid);
        self.add(&self.twin);
        self.delete(&self.pod);
        assert_eq!(
            namespace_of(self.agent, &uid),
            Some(self.twin.ns.netns().id().ino),
            "a late delete has released {uid}"
        );
        self.delete(&self.twin);
    }

    /// A new pod has the addresses of one that is not deleted yet.
    fn address_is_used_again(&mut self) {
        self.add(&self.pod);
        self.twin.uid = self.new_uid();
        self.add(&self.twin);
        self.delete(&self.pod);
        let new = &self.twin.uid;
        assert!(
            namespace_of(self.agent, new).is_some(),
            "a late delete has released {new}"
        );
        self.delete(&self.twin);
    }

    fn namespace_goes_first(&self) {
        let pod = self.fleeting("brief");
        self.add(&pod);
        let event = self.event(&pod, &pod.uid);
        drop(pod);
        self.ok("/cmddel", &event);
    }

    fn deleted_before_it_comes(&self) {
        self.delete(&self.pod);
        self.add(&self.pod);
        self.delete(&self.pod);
    }

    fn deleted_while_it_comes_again(&self) {
        self.add(&self.pod);
        thread::scope(|scope| {
            scope.spawn(|| self.delete(&self.pod));
            self.add(&self.pod);
        });
        // Whichever was first: it is to be there now.
        self.add(&self.pod);
        let uid = &self.pod.uid;
        assert!(namespace_of(self.agent, uid).is_some(), "{uid} is not there");
        thread::scope(|scope| {
            scope.spawn(|| self.post("/cmdadd", &self.event(&self.pod, &self.pod.uid)));
            self.delete(&self.pod);
        });
        self.delete(&self.pod);
    }

    /// The delete of a pod whose namespace is gone comes when another pod has the addresses, and maybe the namespace's inode.
    fn deleted_when_another_has_come(&mut self) {
        let first = self.fleeting("first");
        let event = self.event(&first, &first.uid);
        self.add(&first);
        drop(first);
        let mut second = self.fleeting("second");
        second.uid = self.new_uid();
        self.add(&second);
        self.ok("/cmddel", &event);
        let uid = &second.uid;
        assert!(
            namespace_of(self.agent, uid).is_some(),
            "a late delete has released {uid}"
        );
        self.delete(&second);
    }

    fn namespace_goes_while_it_comes(&self) {
        let pod = self.fleeting("haste");
        let event = self.event(&pod, &pod.uid);
        thread::scope(|scope| {
            // Either it was in time, or it is told that the namespace is gone.
            scope.spawn(|| self.post("/cmdadd", &event));
            drop(pod);
        });
        self.ok("/cmddel", &event);
        let gone = self.post("/cmdadd", &event);
        assert_ne!(gone.status, 200, "a pod without a namespace was enrolled");
    }

    /// A pod is told in the namespace of one that is still there.
    fn namespace_of_another(&mut self) {
        self.add(&self.pod);
        let another = self.new_uid();
        let event = self.event(&self.pod, &another);
        let refused = self.post("/cmdadd", &event);
        assert!(
            refused.status == 500 && refused.body.contains(&self.pod.uid),
            "{refused:?}"
        );
        self.delete(&self.pod);
        self.ok("/cmdadd", &event);
        self.ok("/cmddel", &event);
    }

    /// A pod for this visit only, under the visitor's name.
    fn fleeting(&self, what: &str) -> Pod {
        let mut pod = self
            .node
            .twin(&self.pod, &format!("{}-{what}-{}", self.name, self.visits));
        pod.name.clone_from(&self.name);
        pod.uid.clone_from(&self.pod.uid);
        pod
    }

    fn event(&self, pod: &Pod, uid: &str) -> String {
        let mut event = cni::event(pod);
        event["PodUID"] = uid.into();
        event.to_string()
    }

    fn add(&self, pod: &Pod) {
        self.ok("/cmdadd", &self.event(pod, &pod.uid));
    }

    fn delete(&self, pod: &Pod) {
        self.ok("/cmddel", &self.event(pod, &pod.uid));
    }

    fn ok(&self, path: &str, event: &str) {
        let answer = self.post(path, event);
        assert_eq!(answer.status, 200, "{path} {event}: {}", answer.body);
    }

    fn post(&self, path: &str, event: &str) -> Answer {
        self.pace.events.fetch_add(1, Ordering::Relaxed);
        self.agent.post(path, event)
    }
}

/// UIDs of the pods that the agent has captured.
///
/// # Panics
/// When it has a pod in another state.
pub fn captured(agent: &Agent) -> BTreeSet<String> {
    let pods = agent.pods();
    let uid = |pod: &Value| {
        assert_eq!(pod["state"], "captured", "{pod}");
        pod["uid"].as_str().expect("a text").to_owned()
    };
    pods.iter().map(uid).collect()
}

/// The namespace in which the agent has a pod captured.
fn namespace_of(agent: &Agent, uid: &str) -> Option<u64> {
    let pods = agent.pods();
    let pod = pods.iter().find(|pod| pod["uid"] == uid)?;
    (pod["state"] == "captured")
        .then(|| pod["netns"].as_u64())
        .flatten()
}
