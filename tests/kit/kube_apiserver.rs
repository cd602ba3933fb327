//! The real API server of Kubernetes, and etcd behind it, in a node's namespace: what the agent is deployed by is in it, and the agent shows
//! the token of its own service account, with the rights that the chart gives it and no others.
//!
//! It is asked by curl, as an administrator. There is no kubelet and no controller: a pod that is gone is deleted at once, and who
//! signs is the test.

use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
    time::Duration,
};

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use nix::sys::signal::Signal;
use rcgen::{CertifiedIssuer, KeyPair};
use serde_json::{Value, json};

use crate::{
    api_server::{kubeconfig, sign},
    ca,
    chart::text,
    cluster::{Cluster, NODE},
    grpc::{Credentials, NAME},
    kube_api::{environment, merge, object},
    netns::Namespace,
    node::{Node, Pod},
    process::{self, Process, command},
    wait,
};

/// The variable that names its program.
pub const PROGRAM: &str = "REDIRECTOR_KUBE_APISERVER";

/// Whose token the agent has: account and namespace.
pub const ACCOUNT: (&str, &str) = ("redirector", "redirector-system");

const ADMINISTRATOR: &str = "administrator-secret";
const PORT: u16 = 6443;
const ETCD: &str = "http://127.0.0.1:2379";

/// It makes its roles and services when it starts first, which takes some seconds.
const START_DEADLINE: Duration = Duration::from_secs(120);

/// Time for an answer.
const ANSWER_DEADLINE: Duration = Duration::from_secs(40);

const CSRS: &str = "/apis/certificates.k8s.io/v1/certificatesigningrequests";

/// What is written down of requests: of the agent's all, with the bodies of its patches.
const AUDIT: &str = r#"{"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"], "rules": [
  {"level": "Request", "users": ["USER"], "resources": [{"group": "", "resources": ["pods/status"]}]},
  {"level": "Metadata", "users": ["USER"]},
  {"level": "None"}]}"#;

/// An API server.
#[derive(Debug)]
pub struct KubeApiserver {
    server: Option<Process>,
    ns: Namespace,
    advertised: String,
    directory: PathBuf,
    credentials: Credentials,
    _etcd: Process,
}

impl KubeApiserver {
    /// One whose namespace has these objects of ours, each file's text as the chart renders it.
    ///
    /// # Panics
    /// When it does not start, or does not take an object.
    pub fn with(node: &Node, manifests: &[String]) -> Self {
        let directory = node.directory().join("apiserver");
        fs::create_dir(&directory).unwrap();
        let path = |name: &str| directory.join(name);
        let credentials = Credentials::create(&directory, "kubernetes");
        let (certificate, key) = credentials.pem();
        // It makes service accounts' tokens by a key of its own.
        let tokens = KeyPair::generate().unwrap();
        for (name, text) in [
            ("server.pem", certificate),
            ("server.key", key),
            ("tokens.key", &tokens.serialize_pem()),
            ("tokens.pem", &tokens.public_key_pem()),
            (
                "administrators",
                &format!("{ADMINISTRATOR},administrator,0,system:masters\n"),
            ),
            ("audit.json", &AUDIT.replace("USER", &user())),
        ] {
            fs::write(path(name), text).unwrap();
        }
        let addr = (std::net::Ipv4Addr::LOCALHOST, PORT).into();
        fs::write(path("kubeconfig"), kubeconfig(addr, &credentials)).unwrap();
        let mut etcd = command(&node.host.ns, "etcd");
        etcd.arg("--data-dir").arg(path("etcd"));
        for (flag, url) in [
            ("--listen-client-urls", ETCD),
            ("--advertise-client-urls", ETCD),
            ("--listen-peer-urls", "http://127.0.0.1:2380"),
        ] {
            etcd.args([flag, url]);
        }
        let mut api = Self {
            _etcd: Process::start(&mut etcd, &path("etcd.log")).unwrap(),
            server: None,
            ns: node.host.ns.again(),
            advertised: node.host.v4.to_string(),
            credentials,
            directory,
        };
        api.start_server();
        for manifest in manifests {
            for document in serde_yaml::Deserializer::from_str(manifest) {
                let document: Value = serde::Deserialize::deserialize(document).expect("YAML");
                if !document.is_null() {
                    api.apply(&document);
                }
            }
        }
        api.give_token();
        api.namespace("demo", &json!({}));
        api
    }

    /// Starts the server, on what it knew before, and waits until it is ready.
    ///
    /// # Panics
    /// When it does not become ready.
    pub fn start_server(&mut self) {
        assert!(self.server.is_none(), "it runs");
        let program = env::var_os(PROGRAM).expect("the suite needs it");
        let path = |name: &str| self.directory.join(name).display().to_string();
        let mut server = command(&self.ns, PathBuf::from(program));
        for (flag, value) in [
            ("etcd-servers", ETCD.to_owned()),
            ("bind-address", "127.0.0.1".to_owned()),
            ("secure-port", PORT.to_string()),
            ("insecure-port", "0".to_owned()),
            ("advertise-address", self.advertised.clone()),
            ("endpoint-reconciler-type", "none".to_owned()),
            ("service-cluster-ip-range", "10.96.0.0/16".to_owned()),
            ("cert-dir", path("made")),
            ("tls-cert-file", path("server.pem")),
            ("tls-private-key-file", path("server.key")),
            ("token-auth-file", path("administrators")),
            ("authorization-mode", "RBAC".to_owned()),
            ("service-account-issuer", "https://tests.example".to_owned()),
            ("service-account-signing-key-file", path("tokens.key")),
            ("service-account-key-file", path("tokens.pem")),
            // It is for a controller's work, which nobody does here.
            ("disable-admission-plugins", "ServiceAccount".to_owned()),
            // For pods with an address of each family.
            ("feature-gates", "IPv6DualStack=true".to_owned()),
            ("audit-policy-file", path("audit.json")),
            ("audit-log-path", path("audit.log")),
        ] {
            server.arg(format!("--{flag}={value}"));
        }
        let mut server = Process::start(&mut server, &self.directory.join("server.log")).unwrap();
        wait::within(START_DEADLINE, "the API server to be ready", || {
            assert!(server.ended().is_none(), "it ended:\n{}", server.output());
            (self.try_ask(ADMINISTRATOR, "GET", "/readyz", None)?.0 == 200).then_some(())
        });
        self.server = Some(server);
    }

    /// Ends the server as a crash would.
    ///
    /// # Panics
    /// When it does not run.
    pub fn kill_server(&mut self) {
        let mut server = self.server.take().expect("it runs");
        server.signal(Signal::SIGKILL);
        server.wait(ANSWER_DEADLINE).expect("a killed process ends");
    }

    /// Forgets all changes but the newest: a watch that begins before it cannot be.
    ///
    /// # Panics
    /// When etcd refuses.
    pub fn compact(&self) {
        let newest = self.ask("GET", "/api/v1/namespaces?limit=1", None);
        let mut curl = command(&self.ns, "curl");
        let revision = &newest["metadata"]["resourceVersion"];
        curl.args(["--silent", "--show-error", "--fail", "--data"])
            .arg(json!({ "revision": revision, "physical": true }).to_string())
            .arg(format!("{ETCD}/v3/kv/compaction"));
        let (status, said) = process::output(&mut curl, ANSWER_DEADLINE);
        assert!(status.success(), "{said}");
    }

    /// Gives the agent another token, which is good until [`Self::end_token`] names what is returned.
    ///
    /// # Panics
    /// When it cannot be had.
    pub fn give_token(&self) -> String {
        let (account, namespace) = ACCOUNT;
        let secrets = format!("/api/v1/namespaces/{namespace}/secrets");
        let secret = self.ask(
            "POST",
            &secrets,
            Some(&json!({
                "kind": "Secret", "apiVersion": "v1", "metadata": { "generateName": "bound-" },
            })),
        );
        let name = text(&secret["metadata"]["name"]).to_owned();
        let request = json!({
            "kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1",
            "spec": { "expirationSeconds": 3600, "audiences": [], "boundObjectRef": {
                "kind": "Secret", "apiVersion": "v1", "name": name, "uid": secret["metadata"]["uid"],
            } },
        });
        let path = format!("/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token");
        let made = self.ask("POST", &path, Some(&request));
        fs::write(&self.credentials.token, text(&made["status"]["token"])).unwrap();
        format!("{secrets}/{name}")
    }

    /// Waits until a token is no longer good.
    ///
    /// # Panics
    /// When it stays so.
    pub fn end_token(&self, given: &str) {
        let token = fs::read_to_string(&self.credentials.token).unwrap();
        self.ask("DELETE", given, None);
        // The server remembers for some seconds whose it was.
        wait::until("the token to be refused", || {
            (self.as_agent(&token, "GET", "/api/v1/namespaces").0 == 401).then_some(())
        });
    }

    /// What somebody with the agent's token is answered.
    ///
    /// # Panics
    /// When there is no answer.
    pub fn as_agent(&self, token: &str, method: &str, path: &str) -> (u16, Value) {
        self.try_ask(token, method, path, None).expect("an answer")
    }

    /// The token that the agent is given.
    ///
    /// # Panics
    /// When it cannot be read.
    pub fn token(&self) -> String {
        fs::read_to_string(&self.credentials.token).unwrap()
    }

    /// What the agent has asked, as `VERB RESOURCE`, or with the name where one only was asked for; and what of it was refused.
    ///
    /// # Panics
    /// When there is no log.
    pub fn asked(&self) -> (BTreeSet<String>, Vec<Value>) {
        let mut asked = BTreeSet::new();
        let mut refused = Vec::new();
        for event in self.audit() {
            let object = &event["objectRef"];
            let part = object["subresource"].as_str();
            let part = part.map(|part| format!("/{part}")).unwrap_or_default();
            let resource = format!("{} {}{part}", text(&event["verb"]), text(&object["resource"]));
            if event["annotations"]["authorization.k8s.io/decision"] == "allow" {
                asked.extend(object["name"].as_str().map(|name| format!("{resource} {name}")));
                asked.insert(resource);
            } else {
                refused.push(event);
            }
        }
        (asked, refused)
    }

    /// The requests of agents, in their order.
    fn audit(&self) -> Vec<Value> {
        let log = fs::read_to_string(self.directory.join("audit.log")).unwrap_or_default();
        // Of the last line, a part may be there.
        log.lines()
            .filter_map(|line| serde_json::from_str(line).ok())
            .collect()
    }

    /// Signs what is approved for the signer, as its own program would; returns how many requests there are.
    ///
    /// # Panics
    /// When the server refuses.
    pub fn sign(&self, root: &CertifiedIssuer<'static, KeyPair>) -> usize {
        let mut list = self.ask("GET", CSRS, None);
        let requests: Vec<Value> = serde_json::from_value(list["items"].take()).unwrap();
        for mut request in requests.clone() {
            let status = &mut request["status"];
            let mut conditions = status["conditions"].as_array().into_iter().flatten();
            let is_approved = conditions.any(|one| one["type"] == "Approved");
            if !is_approved || status["certificate"].is_string() {
                continue;
            }
            // Before 1.22 the server knows of no lifetime.
            let mut spec = request["spec"].clone();
            merge(&mut spec, json!({ "expirationSeconds": 3600 }));
            let pem = sign(root, &spec, None);
            let status = json!({ "status": { "certificate": BASE64.encode(pem) } });
            let path = format!("{CSRS}/{}/status", text(&request["metadata"]["name"]));
            // It may have been removed meanwhile.
            self.try_ask(ADMINISTRATOR, "PATCH", &path, Some(&status));
        }
        requests.len()
    }

    /// The root of a signer, in the file that [`Self::signer_environment`] names.
    ///
    /// # Panics
    /// When it cannot be written.
    pub fn signer(&self) -> CertifiedIssuer<'static, KeyPair> {
        let root = ca::authority("signer");
        fs::write(self.directory.join("signer-root.pem"), root.pem()).unwrap();
        root
    }

    /// The settings of an agent whose certificates come from the signer.
    pub fn signer_environment(&self, signer: &str) -> Vec<(String, String)> {
        let root = self.directory.join("signer-root.pem").display().to_string();
        [
            ("CERT_SIGNER_NAME", signer.to_owned()),
            ("CERT_SIGNER_ROOT_CA", root),
            ("FAKE_CA", "false".to_owned()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into()
    }

    /// Makes an object, at the place that it names.
    ///
    /// # Panics
    /// When it is refused.
    pub fn apply(&self, object: &Value) {
        let version = text(&object["apiVersion"]);
        let kind = text(&object["kind"]).to_lowercase();
        let root = if version == "v1" { "/api" } else { "/apis" };
        let namespace = object["metadata"]["namespace"].as_str();
        let within = namespace.map(|name| format!("/namespaces/{name}"));
        let path = format!("{root}/{version}{}/{kind}s", within.unwrap_or_default());
        self.ask("POST", &path, Some(object));
    }

    /// What an administrator is answered.
    ///
    /// # Panics
    /// When it is an error.
    pub fn ask(&self, method: &str, path: &str, body: Option<&Value>) -> Value {
        let answer = self.try_ask(ADMINISTRATOR, method, path, body);
        let (status, body) = answer.unwrap_or_else(|| panic!("{method} {path}: no answer"));
        assert!((200..300).contains(&status), "{method} {path}: {status} {body}");
        body
    }

    fn try_ask(&self, token: &str, method: &str, path: &str, body: Option<&Value>) -> Option<(u16, Value)> {
        let mut curl = command(&self.ns, "curl");
        let kind = match (method, body) {
            ("PATCH", Some(Value::Array(_))) => "application/json-patch+json",
            ("PATCH", _) => "application/merge-patch+json",
            _ => "application/json",
        };
        curl.args(["--silent", "--globoff", "--max-time", "30", "--request", method])
            .args(["--header", &format!("Authorization: Bearer {token}")])
            .args(["--header", &format!("Content-Type: {kind}")])
            .args(["--write-out", "\n%{http_code}"])
            .args(["--connect-to", &format!("::127.0.0.1:{PORT}")])
            .arg("--cacert")
            .arg(&self.credentials.root);
        if let Some(body) = body {
            curl.args(["--data-binary", &body.to_string()]);
        }
        curl.arg(format!("https://{NAME}:{PORT}{path}"));
        let (status, said) = process::output(&mut curl, ANSWER_DEADLINE);
        let (body, code) = said.trim_end().rsplit_once('\n')?;
        let answered = status.success().then(|| code.parse().ok()).flatten()?;
        Some((answered, serde_json::from_str(body).unwrap_or_default()))
    }
}

impl Cluster for KubeApiserver {
    fn start(node: &Node) -> Self {
        let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/manifests/redirector.yaml");
        let manifest = fs::read_to_string(&manifest)
            .unwrap_or_else(|error| panic!("reading {}: {error}", manifest.display()));
        let api = Self::with(node, &[manifest]);
        api.apply(&json!({
            "kind": "Node", "apiVersion": "v1",
            "metadata": { "name": NODE, "labels": { "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64" } },
        }));
        api
    }

    fn namespace(&self, name: &str, labels: &Value) {
        let path = format!("/api/v1/namespaces/{name}");
        let patch = json!([{ "op": "add", "path": "/metadata/labels", "value": labels }]);
        let answer = self.try_ask(ADMINISTRATOR, "PATCH", &path, Some(&patch));
        match answer.expect("an answer") {
            (200, _) => {}
            (404, _) => self.apply(&json!({
                "kind": "Namespace", "apiVersion": "v1", "metadata": { "name": name, "labels": labels },
            })),
            (status, body) => panic!("PATCH {path}: {status} {body}"),
        }
    }

    fn pod(&self, pod: &mut Pod, more: Value) {
        let mut wanted = object(pod);
        merge(&mut wanted, more);
        let path = path(pod);
        let (pods, _) = path.rsplit_once('/').expect("it has one");
        let made = self.ask("POST", pods, Some(&wanted));
        pod.uid = text(&made["metadata"]["uid"]).to_owned();
        self.change(pod, json!({ "status": wanted["status"] }));
    }

    fn change(&self, pod: &Pod, mut patch: Value) {
        let path = path(pod);
        let status = patch.as_object_mut().and_then(|patch| patch.remove("status"));
        if patch.as_object().is_some_and(|patch| !patch.is_empty()) {
            self.ask("PATCH", &path, Some(&patch));
        }
        if let Some(status) = status {
            let patch = json!({ "status": status });
            self.ask("PATCH", &format!("{path}/status"), Some(&patch));
        }
    }

    fn replace(&self, old: &Pod, new: &mut Pod, more: Value) {
        // The first only marks it: kubelet is to end it.
        let marked = self.ask("DELETE", &path(old), None);
        assert!(marked["metadata"]["deletionTimestamp"].is_string(), "{marked}");
        self.delete(old);
        self.pod(new, more);
    }

    fn delete(&self, pod: &Pod) {
        self.ask("DELETE", &format!("{}?gracePeriodSeconds=0", path(pod)), None);
    }

    fn annotation(&self, pod: &Pod, name: &str) -> Option<String> {
        let object = self.ask("GET", &path(pod), None);
        Some(object["metadata"]["annotations"][name].as_str()?.to_owned())
    }

    fn patches(&self) -> Vec<Value> {
        let events = self.audit().into_iter();
        let patches = events.filter(|event| event["verb"] == "patch");
        patches.map(|mut event| event["requestObject"].take()).collect()
    }

    fn environment(&self) -> Vec<(String, String)> {
        environment(&self.directory.join("kubeconfig"))
    }
}

impl Drop for KubeApiserver {
    fn drop(&mut self) {
        // Before etcd, without which it would end in its own time.
        self.server = None;
    }
}

/// Whose the agent's requests are.
fn user() -> String {
    format!("system:serviceaccount:{}:{}", ACCOUNT.1, ACCOUNT.0)
}

fn path(pod: &Pod) -> String {
    format!("/api/v1/namespaces/{}/pods/{}", pod.namespace, pod.name)
}
