//! A control plane that tells of a mesh: delta ADS by tonic and the tests' own messages.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, SocketAddr},
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard},
};

use prost::Message as _;
use prost_types::Any;
use tokio::sync::{mpsc, watch};
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tonic::{Request, Response, Status, Streaming};

use crate::{
    grpc::{Credentials, Server},
    netns::Namespace,
    node::{Family, Pod},
    proto::{
        discovery::{
            DeltaDiscoveryRequest, DeltaDiscoveryResponse,
            aggregated_discovery_service_server::{
                AggregatedDiscoveryService, AggregatedDiscoveryServiceServer,
            },
        },
        security::{self, Authorization},
        workload::{self, Address, Workload, address},
    },
    wait,
};

mod subscription;

use self::subscription::Subscription;

/// Types.
pub const ADDRESS: &str = "type.googleapis.com/istio.workload.Address";
/// Types.
pub const AUTHORIZATION: &str = "type.googleapis.com/istio.security.Authorization";

/// A control plane. Its state outlives its server.
#[derive(Debug)]
pub struct Ads {
    shared: Arc<Shared>,
    server: Option<Server>,
    addr: SocketAddr,
}

#[derive(Debug)]
struct Shared {
    credentials: Credentials,
    state: Mutex<State>,
    /// Changes with the state.
    changed: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct State {
    /// By type and name: version and value.
    resources: BTreeMap<(String, String), (u64, Any)>,
    version: u64,
    /// Types of which nothing is said.
    withheld: BTreeSet<String>,
    /// How many resources of a type are told at most.
    most: Option<usize>,
    /// Every request in its order.
    requests: Vec<DeltaDiscoveryRequest>,
    connections: usize,
}

impl Ads {
    /// Starts one on loopback of `ns`, with nothing in it.
    pub fn start(ns: &Namespace, credentials: &Credentials) -> Self {
        Self::start_at(ns, Ipv4Addr::LOCALHOST.into(), credentials)
    }

    /// Starts one at an address of `ns`, with nothing in it.
    pub fn start_at(ns: &Namespace, ip: IpAddr, credentials: &Credentials) -> Self {
        let shared = Arc::new(Shared {
            credentials: credentials.clone(),
            state: Mutex::default(),
            changed: watch::Sender::default(),
        });
        let mut ads = Self {
            shared,
            server: None,
            addr: (ip, 0).into(),
        };
        ads.up(ns);
        ads
    }

    /// Serves again, at the same port.
    pub fn up(&mut self, ns: &Namespace) {
        let service = AggregatedDiscoveryServiceServer::new(Handler(self.shared.clone()));
        let service = service.max_encoding_message_size(200 << 20);
        let server = Server::start(ns, self.addr, &self.shared.credentials, service);
        self.addr = server.addr;
        self.server = Some(server);
    }

    /// Serves nobody any more; what is changed meanwhile is told later.
    pub fn down(&mut self) {
        self.server = None;
    }

    /// The environment of an agent that asks it.
    pub fn environment(&self) -> Vec<(String, String)> {
        self.shared.credentials.environment("XDS", self.addr)
    }

    /// Says nothing of a type.
    pub fn withhold(&self, type_url: &str) {
        self.shared.state().withheld.insert(type_url.to_owned());
    }

    /// Tells no more than so many resources of a type.
    pub fn hold_back(&self, after: usize) {
        self.shared.state().most = Some(after);
    }

    /// Tells what was withheld and held back.
    pub fn release(&self) {
        {
            let mut state = self.shared.state();
            state.withheld.clear();
            state.most = None;
        }
        self.shared.changed.send_replace(());
    }

    /// Changes several resources in one step.
    pub fn edit(&self, edit: impl FnOnce(&mut Edit<'_>)) {
        edit(&mut Edit(self.shared.state()));
        self.shared.changed.send_replace(());
    }

    /// Every request so far.
    pub fn requests(&self) -> Vec<DeltaDiscoveryRequest> {
        self.shared.state().requests.clone()
    }

    /// How often it was connected to.
    pub fn connections(&self) -> usize {
        self.shared.state().connections
    }

    /// Waits until the newest state of `type_url` has been answered, and returns why it was refused, if it was.
    ///
    /// # Panics
    /// When there is no answer.
    pub fn answered(&self, type_url: &str) -> Option<String> {
        wait::until("an answer to the newest state", || {
            let state = self.shared.state();
            let nonce = state.version.to_string();
            let answer = |request: &&DeltaDiscoveryRequest| {
                request.type_url == type_url && request.response_nonce == nonce
            };
            let answer = state.requests.iter().find(answer)?;
            Some(answer.error_detail.as_ref().map(|status| status.message.clone()))
        })
    }
}

/// A change of the state.
pub struct Edit<'a>(MutexGuard<'a, State>);

impl Edit<'_> {
    /// Puts a resource.
    pub fn put(&mut self, type_url: &str, name: &str, value: Vec<u8>) {
        self.0.version += 1;
        let version = self.0.version;
        let any = Any {
            type_url: type_url.to_owned(),
            value,
        };
        self.0
            .resources
            .insert((type_url.to_owned(), name.to_owned()), (version, any));
    }

    /// Puts a workload.
    pub fn workload(&mut self, workload: Workload) {
        let name = workload.uid.clone();
        let kind = Some(address::Type::Workload(workload));
        self.put(ADDRESS, &name, Address { r#type: kind }.encode_to_vec());
    }

    /// Puts pods as they are.
    pub fn pods<'p>(&mut self, pods: impl IntoIterator<Item = &'p Pod>) {
        for pod in pods {
            self.workload(workload(pod));
        }
    }

    /// Puts a service.
    pub fn service(&mut self, service: workload::Service) {
        let name = format!("{}/{}", service.namespace, service.hostname);
        let kind = Some(address::Type::Service(service));
        self.put(ADDRESS, &name, Address { r#type: kind }.encode_to_vec());
    }

    /// Puts a policy.
    pub fn policy(&mut self, policy: &Authorization) {
        let name = format!("{}/{}", policy.namespace, policy.name);
        self.put(AUTHORIZATION, &name, policy.encode_to_vec());
    }

    /// Removes a resource.
    pub fn remove(&mut self, type_url: &str, name: &str) {
        self.0.version += 1;
        self.0.resources.remove(&(type_url.to_owned(), name.to_owned()));
    }
}

/// A pod as the control plane tells of it: it takes HBONE.
pub fn workload(pod: &Pod) -> Workload {
    let octets = |family: Family| match pod.ip(family) {
        std::net::IpAddr::V4(ip) => ip.octets().to_vec(),
        std::net::IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    Workload {
        uid: format!("Kubernetes//Pod/demo/{}", pod.name),
        name: pod.name.clone(),
        namespace: "demo".into(),
        service_account: pod.name.clone(),
        addresses: Family::BOTH.map(octets).into(),
        tunnel_protocol: workload::TunnelProtocol::Hbone.into(),
        ..Workload::default()
    }
}

/// A policy that keeps out whoever comes from a namespace.
pub fn deny(namespace: &str) -> security::Authorization {
    let text = security::StringMatch {
        match_type: Some(security::string_match::MatchType::Exact(namespace.into())),
    };
    let one = security::Match {
        namespaces: vec![text],
        ..Default::default()
    };
    security::Authorization {
        name: "deny".into(),
        namespace: "demo".into(),
        scope: security::Scope::Namespace.into(),
        action: security::Action::Deny.into(),
        rules: vec![security::Rule {
            clauses: vec![security::Clause { matches: vec![one] }],
        }],
        ..Default::default()
    }
}

/// A policy that keeps out a pod, by its account.
pub fn deny_account(pod: &Pod) -> security::Authorization {
    let mut policy = deny("demo");
    policy.name = "deny-account".into();
    let text = security::StringMatch {
        match_type: Some(security::string_match::MatchType::Exact(
            pod.identity().trim_start_matches("spiffe://").into(),
        )),
    };
    policy.rules[0].clauses[0].matches[0] = security::Match {
        principals: vec![text],
        ..Default::default()
    };
    policy
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no test holds it in a panic")
    }
}

struct Handler(Arc<Shared>);

type Responses = Pin<Box<dyn Stream<Item = Result<DeltaDiscoveryResponse, Status>> + Send>>;

#[tonic::async_trait]
impl AggregatedDiscoveryService for Handler {
    type DeltaAggregatedResourcesStream = Responses;

    async fn delta_aggregated_resources(
        &self,
        request: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Responses>, Status> {
        self.0.credentials.check(&request)?;
        self.0.state().connections += 1;
        let (responses, outgoing) = mpsc::channel(16);
        let connection = Connection {
            shared: self.0.clone(),
            responses,
            subscriptions: BTreeMap::new(),
            owed: BTreeSet::new(),
        };
        tokio::spawn(connection.run(request.into_inner()));
        Ok(Response::new(Box::pin(ReceiverStream::new(outgoing))))
    }
}

struct Connection {
    shared: Arc<Shared>,
    responses: mpsc::Sender<Result<DeltaDiscoveryResponse, Status>>,
    /// By type.
    subscriptions: BTreeMap<String, Subscription>,
    /// The types that have had no response.
    owed: BTreeSet<String>,
}

impl Connection {
    async fn run(mut self, mut requests: Streaming<DeltaDiscoveryRequest>) {
        let mut changed = self.shared.changed.subscribe();
        loop {
            tokio::select! {
                request = requests.message() => {
                    let Ok(Some(request)) = request else { return };
                    self.shared.state().requests.push(request.clone());
                    if !request.response_nonce.is_empty() {
                        continue;
                    }
                    let type_url = request.type_url.clone();
                    let is_first = !self.subscriptions.contains_key(&type_url);
                    if is_first {
                        self.owed.insert(type_url.clone());
                    }
                    self.subscriptions.entry(type_url).or_default().take(is_first, request);
                }
                _ = changed.changed() => {}
            }
            for type_url in self.subscriptions.keys().cloned().collect::<Vec<_>>() {
                let Some(response) = self.response(&type_url) else {
                    continue;
                };
                if self.responses.send(Ok(response)).await.is_err() {
                    return;
                }
            }
        }
    }

    /// What the client lacks of a type; the first response comes even if that is nothing.
    fn response(&mut self, type_url: &str) -> Option<DeltaDiscoveryResponse> {
        let state = self.shared.state();
        if state.withheld.contains(type_url) {
            return None;
        }
        let is_first = self.owed.remove(type_url);
        let subscription = self.subscriptions.get_mut(type_url)?;
        let of_type = state.resources.iter().filter(|((url, _), _)| url == type_url);
        let of_type = of_type.map(|((_, name), value)| (name, value)).collect();
        let (resources, removed_resources) = subscription.lack(&of_type, state.most);
        let response = DeltaDiscoveryResponse {
            type_url: type_url.to_owned(),
            nonce: state.version.to_string(),
            resources,
            removed_resources,
            ..DeltaDiscoveryResponse::default()
        };
        let is_empty = response.resources.is_empty() && response.removed_resources.is_empty();
        (is_first || !is_empty).then_some(response)
    }
}
