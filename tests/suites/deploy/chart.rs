//! What the chart makes of its values.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use redirector_common::consts::PORT_HBONE;
use redirector_tests::{
    agent::binary,
    chart::{self, items, rights, text},
    envoy::python,
    netns::{Directory, unique_prefix},
    process,
};
use serde_json::{Map, Value, json};

use crate::{
    objects::{only, parse},
    ways::{NETNS, PROC, RCU_EXPEDITED, WAYS, Way},
};

/// Where the agent's own files are, in its container.
const CONFIG: &str = "/etc/redirector/config";
const DEADLINE: Duration = Duration::from_secs(60);

/// The objects that values give.
///
/// # Panics
/// When there are none, or Helm's linter or the strict reader minds something.
pub(crate) fn render(values: &Value) -> Vec<Value> {
    let rendered = chart::render(values).unwrap_or_else(|error| panic!("{error}\n{values:#}"));
    // 2 is a warning.
    let minded = rendered
        .lint
        .iter()
        .filter(|message| message["severity"].as_u64() > Some(1));
    assert_eq!(minded.collect::<Vec<_>>(), Vec::<&Value>::new());
    rendered.objects.iter().flat_map(|text| parse(text)).collect()
}

pub(crate) fn objects_are_right(way: &Way) {
    let values: Value = serde_json::from_str(way.values).unwrap();
    let objects = render(&values);
    let daemonset = only(&objects, "DaemonSet");
    let pod = &daemonset["spec"]["template"]["spec"];
    let [container] = pod["containers"].as_array().unwrap().as_slice() else {
        panic!("one container is wanted: {pod:#}");
    };
    names_lead_somewhere(&objects, daemonset);
    let config = configuration(&objects, container);
    let config = config.unwrap_or_else(|error| panic!("{error}\n{:#}", only(&objects, "ConfigMap")["data"]));
    mounts_are_used(way, pod, container, &config);
    ports_are_the_agents(&objects, daemonset, container, &config);
    assert_eq!(
        capabilities(container),
        needed_and(way.capabilities),
        "{container:#}"
    );
    assert_eq!(rights(&objects), set(&way.rights.concat()));
    let token = pod["automountServiceAccountToken"].as_bool().unwrap();
    assert_eq!(
        token,
        !way.rights.is_empty(),
        "a token is for whoever may do something"
    );
    // Whoever cannot look into processes has no use for seeing them.
    let ptrace = way.capabilities.contains(&"CAP_SYS_PTRACE");
    assert_eq!(pod["hostPID"].as_bool().unwrap(), ptrace);
}

fn set<'a>(names: impl IntoIterator<Item = &'a &'a str>) -> BTreeSet<String> {
    names.into_iter().map(|name| (*name).to_owned()).collect()
}

/// The capabilities that a container has.
pub(crate) fn capabilities(container: &Value) -> BTreeSet<String> {
    let context = &container["securityContext"];
    assert_eq!(context["capabilities"]["drop"], json!(["ALL"]));
    assert_eq!(context["readOnlyRootFilesystem"], true);
    assert_eq!(context["privileged"], false);
    let added = items(&context["capabilities"]["add"]);
    added.map(|name| format!("CAP_{}", text(name))).collect()
}

/// Those that the agent itself says it lacks when it has none, and these.
fn needed_and(more: &[&str]) -> BTreeSet<String> {
    let mut agent = Command::new("setpriv");
    agent
        .args(["--bounding-set", "-all", "--"])
        .arg(binary().unwrap());
    agent.args(["agent", "--fake-ca"]);
    let (status, said) = process::output(&mut agent, DEADLINE);
    assert!(!status.success());
    let words = said.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let needed: BTreeSet<_> = words
        .filter(|word| word.starts_with("CAP_"))
        .map(str::to_owned)
        .collect();
    assert!(needed.len() >= 3, "{said}");
    needed.into_iter().chain(set(more)).collect()
}

/// Selectors, accounts, volumes and ConfigMaps are those that are there.
fn names_lead_somewhere(objects: &[Value], daemonset: &Value) {
    let namespace = "redirector-system";
    let template = &daemonset["spec"]["template"];
    for (key, value) in daemonset["spec"]["selector"]["matchLabels"].as_object().unwrap() {
        assert_eq!(&template["metadata"]["labels"][key], value);
    }
    let account = &only(objects, "ServiceAccount")["metadata"]["name"];
    assert_eq!(&template["spec"]["serviceAccountName"], account);
    for binding in objects
        .iter()
        .filter(|object| text(&object["kind"]).ends_with("RoleBinding"))
    {
        assert_eq!(
            binding["subjects"],
            json!([{"kind": "ServiceAccount", "name": account, "namespace": namespace}])
        );
        let role = objects.iter().find(|object| {
            object["kind"] == binding["roleRef"]["kind"]
                && object["metadata"]["name"] == binding["roleRef"]["name"]
        });
        assert!(role.is_some(), "{binding:#}");
    }
    for selecting in objects {
        let (selector, wanted) = match text(&selecting["kind"]) {
            "Service" => (&selecting["spec"]["selector"], true),
            "PodMonitor" => (&selecting["spec"]["selector"]["matchLabels"], true),
            _ => (&Value::Null, false),
        };
        if wanted {
            assert_eq!(selector, &daemonset["spec"]["selector"]["matchLabels"]);
        }
    }
    let mut seen = BTreeSet::new();
    for object in objects {
        let metadata = &object["metadata"];
        let name = format!(
            "{} {} {}",
            object["kind"], metadata["namespace"], metadata["name"]
        );
        assert!(seen.insert(name.clone()), "{name} is there twice");
    }
    let cluster_wide = ["Namespace", "ClusterRole", "ClusterRoleBinding", "NetworkPolicy"];
    for object in objects
        .iter()
        .filter(|object| !cluster_wide.contains(&text(&object["kind"])))
    {
        assert_eq!(object["metadata"]["namespace"], namespace, "{object:#}");
    }
}

/// The configuration as the agent understands it, from the container's own arguments, environment and files; or what it minds.
fn configuration(objects: &[Value], container: &Value) -> Result<Value, String> {
    let directory = Directory::create(&unique_prefix()).unwrap();
    let here = directory.path().to_str().expect("it is a text");
    for (file, content) in only(objects, "ConfigMap")["data"].as_object().unwrap() {
        fs::write(directory.path().join(file), text(content).replace(CONFIG, here)).unwrap();
    }
    let mut agent = Command::new(binary().unwrap());
    agent.args(items(&container["args"]).map(|argument| text(argument).replace(CONFIG, here)));
    agent
        .arg("--check")
        .env_clear()
        .envs(environment(container))
        .stdin(Stdio::null());
    let output = agent.output().expect("the agent starts");
    match output.status.success() {
        true => Ok(serde_json::from_slice(&output.stdout).expect("the agent shows JSON")),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

/// What no schema can know, the agent says without starting.
pub(crate) fn wrong_settings_are_told_by_check() {
    for (values, says) in [
        (json!({"settings": {"no-such-setting": true}}), "no-such-setting"),
        (json!({"settings": {"worker-threads": "many"}}), "worker-threads"),
        (
            json!({"rules": {"node": {"excludeOutboundPorts": [70000]}}}),
            "excludeOutboundPorts",
        ),
        (json!({"workloads": "workloads: [{name: web}]"}), "workloads[0]"),
        (json!({"extraArgs": ["--no-such-flag"]}), "--no-such-flag"),
    ] {
        let objects = render(&values);
        let container = &only(&objects, "DaemonSet")["spec"]["template"]["spec"]["containers"][0];
        match configuration(&objects, container) {
            Ok(_) => panic!("{values} is taken"),
            Err(error) => assert!(error.contains(says), "{values}: {error}"),
        }
    }
}

/// The container's environment on some node, and what Kubernetes adds.
pub(crate) fn environment(container: &Value) -> BTreeMap<String, String> {
    let of_field = |field: &str| match field {
        "spec.nodeName" => "node-1",
        "metadata.name" => "redirector-x7d2k",
        "metadata.namespace" => "redirector-system",
        "status.podIP" => "10.77.0.1",
        _ => panic!("{field} is not known here"),
    };
    let given = items(&container["env"]).map(|variable| {
        let value = match variable["value"].as_str() {
            Some(value) => value,
            None => of_field(text(&variable["valueFrom"]["fieldRef"]["fieldPath"])),
        };
        (text(&variable["name"]).to_owned(), value.to_owned())
    });
    let of_kubernetes = [
        ("KUBERNETES_SERVICE_HOST", "10.96.0.1"),
        ("KUBERNETES_SERVICE_PORT", "443"),
    ];
    let of_kubernetes = of_kubernetes.map(|(name, value)| (name.to_owned(), value.to_owned()));
    of_kubernetes.into_iter().chain(given).collect()
}

/// Each volume is mounted, each path of the node is one that this way needs, and each path that the agent is told of is in a mount.
fn mounts_are_used(way: &Way, pod: &Value, container: &Value, config: &Value) {
    let mounts: Vec<_> = items(&container["volumeMounts"]).collect();
    let volumes: BTreeMap<_, _> = items(&pod["volumes"]).map(|v| (text(&v["name"]), v)).collect();
    let mounted: BTreeSet<_> = mounts.iter().map(|mount| text(&mount["name"])).collect();
    assert_eq!(mounted, volumes.keys().copied().collect::<BTreeSet<_>>());
    assert_eq!(mounts.len(), volumes.len());
    let mut node_paths = BTreeSet::new();
    for mount in &mounts {
        let (name, at) = (text(&mount["name"]), text(&mount["mountPath"]));
        if let Some(path) = volumes[name]["hostPath"]["path"].as_str() {
            node_paths.insert(path.to_owned());
            // As on the node, so that a path means the same in both; but a container's /proc and /sys are its own.
            let expected = match path {
                PROC | RCU_EXPEDITED => format!("/host{path}"),
                _ => path.to_owned(),
            };
            assert_eq!(at, expected);
        } else {
            assert_eq!(mount["readOnly"], true, "{mount}");
        }
        let propagation = mount["mountPropagation"].as_str();
        assert_eq!(propagation, (at == NETNS).then_some("HostToContainer"), "{mount}");
    }
    assert_eq!(node_paths, set(way.node_paths));
    let mut config = config.clone();
    // Where nothing is pinned, and where others see to the plugin, these say nothing.
    for (unused, setting) in [
        (config["redirect"] == "none", "bpffsDir"),
        (config["cni"]["install"] != true, "cni"),
    ] {
        if unused {
            config[setting].take();
        }
    }
    for path in paths(&config) {
        let inside = |mount: &&&Value| Path::new(&path).starts_with(text(&mount["mountPath"]));
        assert!(mounts.iter().any(|mount| inside(&mount)), "{path} is not mounted");
    }
}

/// All that looks like a path below directories that mounts are for.
fn paths(config: &Value) -> Vec<String> {
    match config {
        Value::String(text) => {
            let path = text.strip_prefix("unix://").unwrap_or(text);
            let of_a_mount = [
                "/etc/redirector/",
                "/etc/cni",
                "/opt/cni",
                "/run/",
                "/var/",
                "/sys/",
            ];
            let found = of_a_mount.iter().any(|start| path.starts_with(start));
            found.then(|| path.to_owned()).into_iter().collect()
        }
        Value::Array(values) => values.iter().flat_map(paths).collect(),
        Value::Object(values) => values.values().flat_map(paths).collect(),
        _ => Vec::new(),
    }
}

/// What listens, what is probed, and what is scraped are the same ports.
fn ports_are_the_agents(objects: &[Value], daemonset: &Value, container: &Value, config: &Value) {
    let port = |setting: &str| -> u64 {
        let address = text(&config[setting]);
        address.rsplit_once(':').unwrap().1.parse().unwrap()
    };
    let (metrics, readiness) = (port("metricsAddr"), port("readinessAddr"));
    let named: BTreeMap<_, _> = items(&container["ports"])
        .map(|port| (text(&port["name"]), port["containerPort"].as_u64().unwrap()))
        .collect();
    assert_eq!(
        named,
        BTreeMap::from([("metrics", metrics), ("readiness", readiness)])
    );
    for probe in ["startupProbe", "livenessProbe", "readinessProbe"] {
        assert_eq!(container[probe]["httpGet"]["port"], "readiness");
    }
    let annotations = &daemonset["spec"]["template"]["metadata"]["annotations"];
    assert_eq!(annotations["prometheus.io/port"], metrics.to_string());
    for object in objects {
        match text(&object["kind"]) {
            "Service" => assert_eq!(object["spec"]["ports"][0]["port"], metrics),
            "PodMonitor" => assert_eq!(object["spec"]["podMetricsEndpoints"][0]["port"], "metrics"),
            "PrometheusRule" => assert!(items(&object["spec"]["groups"][0]["rules"]).count() > 8),
            "NetworkPolicy" => assert_eq!(object["spec"]["ingress"][0]["ports"][0]["port"], PORT_HBONE),
            _ => {}
        }
    }
}

pub(crate) fn agents_have_the_rights_that_the_way_needs() {
    // Least of all: who only speaks to istio-cni and istiod asks Kubernetes for nothing.
    let objects = render(&json!({"pods": "zds"}));
    assert!(rights(&objects).is_empty());
    let objects = render(&json!({"enrolment": {"statusAnnotation": ""}}));
    assert!(!rights(&objects).contains("patch pods/status"));
    let objects = render(&json!({"nodeSelector": null}));
    assert!(!rights(&objects).contains("get nodes"));
    // Nothing of secrets, and nothing that changes what runs, whatever is chosen.
    for way in WAYS {
        for right in way.rights.concat() {
            let changes = ["create", "delete", "update", "patch", "approve"]
                .iter()
                .any(|verb| right.starts_with(verb));
            let harmless = right.contains("certificatesigningrequests")
                || right.contains("signers")
                || right == "patch pods/status";
            assert!(!changes || harmless, "{}: {right}", way.name);
            assert!(
                !right.contains("secrets") && !right.contains('*'),
                "{}: {right}",
                way.name
            );
        }
    }
}

pub(crate) fn the_manifest_is_the_chart_with_its_defaults() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/manifests/redirector.yaml");
    let output = Command::new(python())
        .arg(chart::script())
        .arg("--manifest")
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let (made, there) = (
        String::from_utf8(output.stdout).unwrap(),
        fs::read_to_string(file).unwrap(),
    );
    assert!(
        made == there,
        "deploy/manifests/redirector.yaml is not what the chart gives; write it anew: \
         target/tools/python/bin/python3 tests/peers/chart.py --manifest > deploy/manifests/redirector.yaml"
    );
    assert_eq!(
        only(&parse(&there), "Namespace")["metadata"]["name"],
        "redirector-system"
    );
}

pub(crate) fn schema_and_values_name_the_same_settings() {
    let chart = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/chart/redirector");
    let schema = fs::read_to_string(chart.join("values.schema.json")).unwrap();
    let schema: Value = serde_json::from_str(&schema).unwrap();
    let text = fs::read_to_string(chart.join("values.yaml")).unwrap();
    let values: Value = serde_yaml::from_str(&text).unwrap();
    let mut of_schema = BTreeSet::new();
    of_properties(&schema, "", &mut of_schema);
    of_schema.remove(".global");
    let mut of_values = BTreeSet::new();
    keys(values.as_object().expect("a map"), &of_schema, "", &mut of_values);
    // What an empty map may hold, the schema says alone.
    let in_empty = |path: &&String| {
        let parent = path.rsplit_once('.').expect("it begins with a dot").0;
        values.pointer(&parent.replace('.', "/")) == Some(&json!({}))
    };
    let one_sided = of_values.symmetric_difference(&of_schema);
    let one_sided: Vec<_> = one_sided.filter(|path| !in_empty(path)).collect();
    assert_eq!(one_sided, Vec::<&String>::new());
    // Each that has a place of its own is explained: a comment stands above it, or above one of the lines before it.
    let undocumented: Vec<_> = text
        .split("\n\n")
        .filter(|paragraph| !paragraph.lines().any(|line| line.trim_start().starts_with('#')))
        .filter(|paragraph| {
            !["\nserviceAccount", "serviceAccount"]
                .iter()
                .any(|start| paragraph.starts_with(start))
        })
        .collect();
    assert_eq!(undocumented, Vec::<&str>::new());
}

/// The properties that a schema has, as paths.
fn of_properties(schema: &Value, at: &str, found: &mut BTreeSet<String>) {
    for (key, schema) in schema["properties"].as_object().into_iter().flatten() {
        let at = format!("{at}.{key}");
        of_properties(schema, &at, found);
        found.insert(at);
    }
}

/// The keys that values have, as far down as the schema knows them.
fn keys(values: &Map<String, Value>, known: &BTreeSet<String>, at: &str, found: &mut BTreeSet<String>) {
    for (key, value) in values {
        let path = format!("{at}.{key}");
        let deeper = known.iter().any(|known| known.starts_with(&format!("{path}.")));
        if let (true, Some(inner)) = (deeper, value.as_object()) {
            keys(inner, known, &path, found);
        }
        found.insert(path);
    }
}

pub(crate) fn contradictions_are_refused() {
    for (values, says) in [
        (json!({"pods": "zds", "proxy": "ztunnel"}), "nothing is left"),
        (json!({"pods": "zds", "redirect": "ebpf"}), "istio-cni redirects"),
        (json!({"redirect": "none"}), "nobody would redirect"),
        (
            json!({"proxy": "ztunnel", "redirect": "iptables"}),
            "by eBPF only",
        ),
        (json!({"proxy": "ztunnel", "strict": true}), "own proxy"),
        (
            json!({"controlPlane": {"xdsAddress": ""}}),
            "certificates.address",
        ),
        (
            json!({"certificates": {"source": "signer"}}),
            "certificates.signer.name",
        ),
        (
            json!({"certificates": {"source": "files"}}),
            "certificates.files.volume",
        ),
        // The schema.
        (json!({"imagee": {}}), "imagee"),
        (json!({"redirect": "tproxy"}), "redirect"),
        (json!({"cni": {"confDir": "etc/cni"}}), "confDir"),
        (
            json!({"controlPlane": {"xdsAddress": "istiod:15012"}}),
            "xdsAddress",
        ),
        (json!({"extraCapabilities": ["CAP_BPF"]}), "extraCapabilities"),
        (
            json!({"networkPolicy": {"allowHbone": [{"podSelector": {}}]}}),
            "namespace",
        ),
        (json!({"settings": {"kubernetes_pods": true}}), "kubernetes_pods"),
        (
            json!({"terminationGracePeriodSeconds": 0}),
            "terminationGracePeriodSeconds",
        ),
    ] {
        match chart::render(&values) {
            Ok(_) => panic!("{values} is taken"),
            Err(error) => assert!(error.contains(says), "{values}: {error}"),
        }
    }
}
