//! The ways to install, and what each is to have and no more.

/// A way to install.
pub(crate) struct Way {
    pub(crate) name: &'static str,
    pub(crate) values: &'static str,
    /// The capabilities beyond those that every agent needs.
    pub(crate) capabilities: &'static [&'static str],
    /// What the service account may do, as `VERB RESOURCE`.
    pub(crate) rights: &'static [&'static [&'static str]],
    /// The node's directories that the container has.
    pub(crate) node_paths: &'static [&'static str],
}

const STATE: &str = "/run/redirector";
const BPFFS: &str = "/sys/fs/bpf";
const CGROUPS: &str = "/sys/fs/cgroup";
pub(crate) const PROC: &str = "/proc";
pub(crate) const RCU_EXPEDITED: &str = "/sys/kernel/rcu_expedited";
pub(crate) const NETNS: &str = "/var/run/netns";
const CNI: [&str; 2] = ["/etc/cni/net.d", "/opt/cni/bin"];
const ZTUNNEL: &str = "/var/run/ztunnel";
const CAPTURING: &[&str] = &[STATE, BPFFS, CGROUPS, PROC, RCU_EXPEDITED, NETNS, CNI[0], CNI[1]];

const OF_PODS: &[&str] = &[
    "list pods",
    "watch pods",
    "get namespaces",
    "list namespaces",
    "watch namespaces",
    "get nodes",
    "patch pods/status",
    "get daemonsets redirector",
    "list daemonsets redirector",
    "watch daemonsets redirector",
];
const OF_SIGNER: &[&str] = &[
    "create certificatesigningrequests",
    "get certificatesigningrequests",
    "delete certificatesigningrequests",
];
const OF_APPROVER: &[&str] = &[
    "patch certificatesigningrequests/approval",
    "approve signers example.com/mesh",
];
const OF_CNI: &[&str] = &["CAP_DAC_OVERRIDE", "CAP_SYS_PTRACE"];

pub(crate) const WAYS: &[Way] = &[
    Way {
        name: "beside_istio",
        values: "{}",
        capabilities: OF_CNI,
        rights: &[OF_PODS],
        node_paths: CAPTURING,
    },
    Way {
        name: "instead_of_ztunnel_alone",
        values: r#"{"pods": "zds"}"#,
        capabilities: &[],
        rights: &[],
        node_paths: &[STATE, ZTUNNEL],
    },
    Way {
        name: "instead_of_istio_cni_alone",
        values: r#"{"proxy": "ztunnel"}"#,
        capabilities: OF_CNI,
        rights: &[OF_PODS],
        node_paths: &[
            STATE,
            BPFFS,
            CGROUPS,
            PROC,
            RCU_EXPEDITED,
            NETNS,
            CNI[0],
            CNI[1],
            ZTUNNEL,
        ],
    },
    Way {
        name: "without_istio_by_files",
        values: r#"{
            "controlPlane": {"xdsAddress": "", "trustDomain": "example.org", "trustDomainAliases": ["old.org"]},
            "certificates": {"source": "files", "files": {"volume": {"secret": {"secretName": "mesh"}}}},
            "rules": {"node": {"excludeOutboundPorts": [22]},
                      "pods": [{"namespace": "shop", "rules": {"strict": true, "excludeInboundPorts": "5432"}}]},
            "workloads": "services:\n- {name: web, namespace: shop, hostname: web.shop, vips: [/10.9.0.1], ports: {80: 8080}}\n"
        }"#,
        capabilities: OF_CNI,
        rights: &[OF_PODS],
        node_paths: CAPTURING,
    },
    Way {
        name: "by_iptables",
        values: r#"{"redirect": "iptables"}"#,
        capabilities: OF_CNI,
        rights: &[OF_PODS],
        node_paths: &[
            STATE,
            BPFFS,
            CGROUPS,
            PROC,
            NETNS,
            CNI[0],
            CNI[1],
            "/run/xtables.lock",
        ],
    },
    Way {
        name: "with_a_signer",
        values: r#"{"controlPlane": {"xdsAddress": ""},
                    "certificates": {"source": "signer", "lifetime": "12h",
                                     "signer": {"name": "example.com/mesh", "rootConfigMap": "mesh-roots"}}}"#,
        capabilities: OF_CNI,
        rights: &[OF_PODS, OF_SIGNER],
        node_paths: CAPTURING,
    },
    Way {
        name: "with_a_signer_and_as_its_approver",
        values: r#"{"certificates": {"source": "signer",
                                     "signer": {"name": "example.com/mesh", "rootConfigMap": "mesh-roots", "approve": true}}}"#,
        capabilities: OF_CNI,
        rights: &[OF_PODS, OF_SIGNER, OF_APPROVER],
        node_paths: CAPTURING,
    },
    Way {
        name: "with_spire",
        values: r#"{"certificates": {"source": "spiffe"}}"#,
        capabilities: OF_CNI,
        rights: &[OF_PODS],
        node_paths: &[
            STATE,
            BPFFS,
            CGROUPS,
            PROC,
            RCU_EXPEDITED,
            NETNS,
            CNI[0],
            CNI[1],
            "/run/spire/agent-sockets",
        ],
    },
    Way {
        name: "to_try_it_out_on_k3s",
        values: r#"{"controlPlane": {"xdsAddress": ""}, "certificates": {"source": "development"},
                    "cni": {"confDir": "/var/lib/rancher/k3s/agent/etc/cni/net.d", "binDir": "/var/lib/rancher/k3s/data/cni"}}"#,
        capabilities: OF_CNI,
        rights: &[OF_PODS],
        node_paths: &[
            STATE,
            BPFFS,
            CGROUPS,
            PROC,
            RCU_EXPEDITED,
            NETNS,
            "/var/lib/rancher/k3s/agent/etc/cni/net.d",
            "/var/lib/rancher/k3s/data/cni",
        ],
    },
    Way {
        name: "with_the_plugin_installed_by_others",
        values: r#"{"cni": {"install": false}}"#,
        capabilities: &["CAP_SYS_PTRACE"],
        rights: &[OF_PODS],
        node_paths: &[STATE, BPFFS, CGROUPS, PROC, RCU_EXPEDITED, NETNS],
    },
    Way {
        name: "with_everything_said",
        values: r#"{
            "nameOverride": "redirector", "namespace": {"create": true},
            "image": {"repository": "mesh/redirector", "tag": "1.2.3", "pullPolicy": "Always", "pullSecrets": [{"name": "pull"}]},
            "enrolment": {"selectors": [{"podSelector": {"matchLabels": {"mesh": "yes"}},
                                         "namespaceSelector": {"matchExpressions": [{"key": "mesh", "operator": "NotIn", "values": ["no"]}]}}],
                          "excludeNamespaces": ["kube-system", "istio-system"]},
            "cni": {"confName": "10-cilium.conflist", "chained": true, "ownedConfig": true, "ownedConfigFilename": "02-mesh.conflist"},
            "controlPlane": {"network": "n1", "clusterId": "c1", "onDemand": true, "trustDomainAliases": ["a.b", "c.d"]},
            "certificates": {"address": "https://ca.example:15012", "lifetime": "1h",
                             "revocations": {"configMap": "istio-ca-crl"}},
            "strict": true, "sameNodeDirect": true, "logging": {"level": "info,redirector::pods=debug", "format": "json"},
            "settings": {"http2-frame-size": 65536, "drain": "10s", "worker-threads": "50%"},
            "env": [{"name": "ISTIO_META_X", "value": "y"}], "extraArgs": ["--probe-sources", "node"],
            "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "4Gi"}},
            "extraCapabilities": ["SYS_RESOURCE"], "seLinuxOptions": {"type": "spc_t"},
            "resourceQuota": {"create": true, "pods": 100},
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "10%", "maxSurge": 0}},
            "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                {"matchExpressions": [{"key": "mesh", "operator": "Exists"}]}]}}},
            "podLabels": {"a": "b"}, "podAnnotations": {"c": "d"}, "serviceAccount": {"annotations": {"e": "f"}},
            "monitoring": {"service": true, "podMonitor": {"create": true, "labels": {"release": "prometheus"}},
                           "rules": {"create": true, "labels": {"release": "prometheus"}}},
            "networkPolicy": {"allowHbone": [{"namespace": "shop", "podSelector": {"matchLabels": {"app": "web"}}}, {"namespace": "shop"}]}
        }"#,
        capabilities: &["CAP_DAC_OVERRIDE", "CAP_SYS_PTRACE", "CAP_SYS_RESOURCE"],
        rights: &[OF_PODS],
        node_paths: CAPTURING,
    },
];
