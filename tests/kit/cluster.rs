//! A cluster with one node, as an agent on that node and a test around it see it: whoever serves its API.

use serde_json::{Value, json};

use crate::{
    agent::{Agent, Options},
    app,
    node::{Node, Pod},
    wait,
    workloads::Workloads,
};

/// The node's name.
pub const NODE: &str = "node-a";

/// The annotation that agents write.
pub const ANNOTATION: &str = "ambient.istio.io/redirection";

/// The one that says what a captured pod's capture lacks.
pub const IMPAIRED: &str = "redirector.io/impaired";

/// What enrols a pod.
pub fn in_mesh() -> Value {
    json!({ "metadata": { "labels": { "istio.io/dataplane-mode": "ambient" } } })
}

/// What takes it out again.
pub fn out_of_mesh() -> Value {
    json!({ "metadata": { "labels": { "istio.io/dataplane-mode": null } } })
}

/// A cluster's API. What cannot be done is a panic.
pub trait Cluster {
    /// One whose API is served in a node's namespace, with the namespace `demo`.
    fn start(node: &Node) -> Self;

    /// Makes a namespace, or gives it these labels and no others.
    fn namespace(&self, name: &str, labels: &Value);

    /// Tells of a pod that runs on the node, with its addresses; `more` is over it. Some clusters give it another UID than it had.
    fn pod(&self, pod: &mut Pod, more: Value);

    /// Changes a pod, as a merge patch does.
    fn change(&self, pod: &Pod, patch: Value);

    /// Deletes `old`, whose containers still run, and tells of another pod of that name.
    fn replace(&self, old: &Pod, new: &mut Pod, more: Value);

    /// Deletes a pod.
    fn delete(&self, pod: &Pod);

    /// What an annotation of the pod says.
    fn annotation(&self, pod: &Pod, name: &str) -> Option<String>;

    /// Whether the pod is captured, as agents tell.
    fn told(&self, pod: &Pod) -> Option<String> {
        self.annotation(pod, ANNOTATION)
    }

    /// The patches that agents have sent.
    fn patches(&self) -> Vec<Value>;

    /// The settings of an agent on the node.
    fn environment(&self) -> Vec<(String, String)>;
}

/// A node in a cluster. The agent is dropped first.
pub struct World<C> {
    /// The node's agent.
    pub agent: Agent,
    /// The cluster's API.
    pub api: C,
    /// The node.
    pub node: Node,
}

impl<C: Cluster> World<C> {
    /// A node with pods, of which the cluster does not know yet.
    pub fn new(names: &[&str]) -> (Self, Vec<Pod>) {
        let node = Node::new();
        let pods: Vec<_> = names.iter().map(|name| node.pod(name)).collect();
        (Self::with(node, &pods, Options::default()), pods)
    }

    /// A node with these pods.
    pub fn with(node: Node, pods: &[Pod], options: Options) -> Self {
        let api = C::start(&node);
        Self::of(node, api, pods, options)
    }

    /// A node with these pods, of a cluster that is there.
    pub fn of(node: Node, api: C, pods: &[Pod], mut options: Options) -> Self {
        options.environment.splice(0..0, api.environment());
        let agent = Agent::start(&node, &Workloads::hbone(pods), options);
        Self { agent, api, node }
    }

    /// What the agent says of a pod.
    pub fn state(&self, pod: &Pod) -> Option<String> {
        let pods = self.agent.pods();
        let found = pods.iter().find(|known| known["uid"] == pod.uid.as_str())?;
        found["state"].as_str().map(str::to_owned)
    }

    /// Waits until the agent has captured a pod.
    pub fn wait_captured(&self, pod: &Pod) {
        wait::until(
            &format!("{} to be captured\n{}", pod.name, self.agent.log()),
            || (self.state(pod).as_deref() == Some("captured")).then_some(()),
        );
    }

    /// Waits until the agent has no such pod.
    pub fn wait_released(&self, pod: &Pod) {
        wait::until(&format!("{} to be released", pod.name), || {
            self.state(pod).is_none().then_some(())
        });
    }

    /// Waits until a pod's annotation tells this.
    pub fn wait_told(&self, pod: &Pod, expected: Option<&str>) {
        wait::until(&format!("{} to be told {expected:?}", pod.name), || {
            (self.api.told(pod).as_deref() == expected).then_some(())
        });
    }

    /// Tells the agent of a pod as its plugin does, and returns what is answered.
    ///
    /// # Panics
    /// When the agent refuses.
    pub fn add(&self, pod: &Pod) -> String {
        let answer = self.agent.cmdadd(pod);
        assert_eq!(answer.status, 200, "{}: {}", pod.name, answer.body);
        answer.body
    }

    /// What is told of pods that could not even be tried.
    ///
    /// # Panics
    /// When the agent does not answer.
    pub fn missed(&self) -> Vec<Value> {
        let (status, body) = app::http_get(&self.node.host.ns, "127.0.0.1:15000".parse().unwrap(), "/pods")
            .expect("the agent answers");
        assert_eq!(status, 200, "{body}");
        let mut view: Value = serde_json::from_str(&body).expect("JSON");
        serde_json::from_value(view["missed"].take()).expect("a list")
    }
}
