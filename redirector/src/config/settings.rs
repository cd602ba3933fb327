//! The settings as they are given: each with its flag, its key in the file, its environment variables and its meaning, in one
//! table. All may be absent; defaults are in [`super::Config`].

use std::{any::type_name, fmt, marker::PhantomData, net::SocketAddr, path::PathBuf, str::FromStr};

use serde::de::{Deserializer, Error as _, Visitor};

use super::{
    Error,
    planes::Environment,
    values::{Names, Redirect, Span, Takeover, Workers},
};
use crate::{
    proxy::access_log::Share,
    redirect::{iptables, probers::Sources},
    telemetry::{
        Chain,
        logs::{Filter, Format},
    },
};

macro_rules! settings {
    ($($help:literal $field:ident: $type:ty, [$($variable:literal),*] $(, switch $default:literal)?;)*) => {
        /// Settings as one source gives them: the file, the environment, or the command line.
        #[derive(Debug, Clone, Default, PartialEq, clap::Args, serde::Deserialize)]
        #[serde(deny_unknown_fields, rename_all = "kebab-case")]
        pub struct Settings {
            $(
                // As text: brackets of addresses and defaults are not links.
                #[doc = concat!("```text\n", $help, "\n```")]
                #[arg(
                    long,
                    help = concat!($help $(, " [env: ", $variable, "]")*)
                    $(, num_args(0..=1), default_missing_value = $default)?
                )]
                #[serde(default, deserialize_with = "from_text")]
                pub $field: Option<$type>,
            )*
            /// Other names of the pods' trust domain; on the command line and in the environment with commas between, in the file
            /// a list.
            #[arg(
                long,
                value_name = "TRUST_DOMAIN",
                value_delimiter = ',',
                help = "Another name of the pods' trust domain: peers of either are of both; may be given again [env: \
                        TRUST_DOMAIN_ALIASES, with commas between]"
            )]
            #[serde(default)]
            pub trust_domain_alias: Option<Vec<String>>,
        }

        impl Settings {
            /// What the environment gives. An empty variable is as good as none.
            pub(super) fn from_environment(environment: &Environment) -> Result<Self, Error> {
                let mut settings = Self::default();
                $(
                    for name in [$($variable),*] as [&'static str; 0 $(+ { let _ = $variable; 1 })*] {
                        let Some(text) = environment.get(name).filter(|text| !text.is_empty()) else { continue };
                        let parsed = text.parse::<$type>();
                        let value = parsed.map_err(|source| Error::Variable { name, problem: describe(text, &source) })?;
                        settings.$field = settings.$field.or(Some(value));
                    }
                )*
                let aliases = environment.get("TRUST_DOMAIN_ALIASES").filter(|text| !text.is_empty());
                settings.trust_domain_alias = aliases.map(|text| text.split(',').map(str::to_owned).collect());
                Ok(settings)
            }

            /// These, and for what they lack those of `weaker`.
            pub(super) fn or(self, weaker: Self) -> Self {
                Self {
                    $($field: self.$field.or(weaker.$field),)*
                    trust_domain_alias: self.trust_domain_alias.or(weaker.trust_domain_alias),
                }
            }
        }
    };
}

settings! {
    "How the pods' traffic is redirected: ebpf, iptables or none [default: ebpf]"
        redirect: Redirect, [];
    "Programs that --redirect iptables writes its rules with: auto (the node's iptables-restore), nft or legacy [default: auto]"
        iptables_backend: iptables::Backend, [];
    "Socket on which CNI plugins tell of pods [default: /run/redirector/cni.sock]"
        cni_socket: PathBuf, [];
    "Keep the CNI plugin installed on this node while the agent runs (docs/install.md) [default: false]"
        cni_install: bool, ["CNI_INSTALL"], switch "true";
    "The CNI's directory of configurations [default: /etc/cni/net.d]"
        cni_conf_dir: PathBuf, ["MOUNTED_CNI_NET_DIR"];
    "The CNI's configuration file that the plugin is chained in; by default the one that the container runtime uses. With \
     --cni-chained=false the plugin's own, by default YYY-redirector-cni.conf"
        cni_conf_name: String, ["CNI_CONF_NAME"];
    "The CNI's directory of binaries [default: /opt/cni/bin]"
        cni_bin_dir: PathBuf, [];
    "Chain the plugin after those of the CNI's configuration; else it gets a file of its own, for Multus [default: true]"
        cni_chained: bool, ["CHAINED_CNI_PLUGIN"], switch "true";
    "Chain the plugin in a copy of the CNI's configuration that sorts before it, and leave the CNI's own alone [default: false]"
        cni_owned_config: bool, ["ISTIO_OWNED_CNI_CONFIG"], switch "true";
    "Name of that copy [default: 02-redirector.conflist]"
        cni_owned_config_filename: String, ["ISTIO_OWNED_CNI_CONFIG_FILENAME"];
    "The plugin that is installed; by default redirector-cni beside this program"
        cni_plugin: PathBuf, [];
    "The agent's own DaemonSet, in the namespace of its pod: once that is gone or no longer wants this node, an agent that stops \
     releases its pods and removes the CNI plugin"
        daemonset: String, [];
    "Directory of the agent's state: records of pods, development CA [default: /run/redirector]"
        state_dir: PathBuf, [];
    "Directory of the bpffs where programs and maps are pinned [default: /sys/fs/bpf/redirector]"
        bpffs_dir: PathBuf, [];
    "Socket of a node agent that speaks ZDS; pods come from there, and the CNI socket is not served"
        inpod_uds: PathBuf, ["INPOD_UDS"];
    "Socket on which this agent speaks ZDS, as istio-cni does, to a proxy that is another process (ztunnel): that serves the pods, \
     and this agent redirects their traffic; only with --redirect ebpf"
        ztunnel_uds: PathBuf, ["ZTUNNEL_UDS_ADDRESS"];
    "File of rules for the pods: which of their connections are captured"
        rules: PathBuf, [];
    "Refuse what enrolled pods would send or get in plain, what the rules leave alone excepted; the rules may say otherwise of \
     pods [default: false]"
        strict: bool, [], switch "true";
    "File of workloads and services"
        workloads: PathBuf, ["LOCAL_XDS_PATH"];
    "Workloads and services, as text"
        workloads_inline: String, ["LOCAL_XDS"];
    "Control plane that tells of the mesh, as https://HOST:PORT; empty: none"
        xds_address: String, ["XDS_ADDRESS"];
    "Whom the control plane's certificate must lead to: a file, SYSTEM for the node's roots, or certificates in PEM \
     [default: ./var/run/secrets/istio/root-cert.pem]"
        xds_root_ca: String, ["XDS_ROOT_CA"];
    "Name that the control plane may have beside the one in its address"
        alt_xds_hostname: String, ["ALT_XDS_HOSTNAME"];
    "Ask the control plane for the workloads and services that are called, instead of all"
        xds_on_demand: bool, ["XDS_ON_DEMAND"], switch "true";
    "Certificate authority of Istio's kind, as https://HOST:PORT; empty: the built-in development CA"
        ca_address: String, ["CA_ADDRESS"];
    "Whom the certificate authority's certificate must lead to, as for the control plane [default: \
     ./var/run/secrets/istio/root-cert.pem]"
        ca_root_ca: String, ["CA_ROOT_CA"];
    "Name that the certificate authority may have beside the one in its address"
        alt_ca_hostname: String, ["ALT_CA_HOSTNAME"];
    "Directory with certificates that somebody else keeps fresh, instead of an authority: tls.crt, tls.key and ca.crt, or \
     cert-chain.pem, key.pem and root-cert.pem; in it, or in a directory below for each identity"
        cert_dir: PathBuf, [];
    "Socket of a SPIFFE Workload API that gives the pods' certificates, instead of an authority, as unix:///PATH"
        spiffe_socket: String, ["SPIFFE_ENDPOINT_SOCKET"];
    "File of revocation lists (CRL), PEM or DER: peers whose certificate is on one are refused"
        crl_file: PathBuf, ["CRL_PATH"];
    "Signer of Kubernetes' CertificateSigningRequest API that signs the pods' certificates, instead of an authority, as \
     DOMAIN/NAME"
        kubernetes_signer: String, ["CERT_SIGNER_NAME"];
    "File of the root certificates that the signer's certificates lead to"
        kubernetes_signer_roots: PathBuf, ["CERT_SIGNER_ROOT_CA"];
    "Approve the requests to the signer, which takes the right to; else somebody else must [default: false]"
        kubernetes_signer_approve: bool, [], switch "true";
    "File that tells how the API server of Kubernetes is reached [default: as Kubernetes tells its pods]"
        kubeconfig: PathBuf, ["KUBECONFIG"];
    "Ask Kubernetes' API which pods of this node (NODE_NAME) are in the mesh, and enrol and release them as it says [default: false]"
        kubernetes_pods: bool, ["KUBERNETES_PODS"], switch "true";
    "Which pods are in the mesh, by Kubernetes' API: a list in YAML of podSelector and namespaceSelector, of which one pair must match; \
     Istio's labels without it"
        enablement_selectors: String, ["AMBIENT_ENABLEMENT_SELECTOR"];
    "Namespaces of Kubernetes whose pods are never enrolled, with commas between"
        exclude_namespaces: Names, ["EXCLUDE_NAMESPACES"];
    "Annotation by which pods tell whether they are captured; empty: none [default: ambient.istio.io/redirection]"
        status_annotation: String, [];
    "Namespace of Istio [default: istio-system]"
        system_namespace: String, ["SYSTEM_NAMESPACE"];
    "File of the token that control plane and certificate authority are shown, or the token [default: \
     ./var/run/secrets/tokens/istio-token, if it is there]"
        auth_token: String, ["AUTH_TOKEN"];
    "Name of the agent's own pod"
        pod_name: String, ["POD_NAME"];
    "Namespace of the agent's own pod"
        pod_namespace: String, ["POD_NAMESPACE"];
    "Address of the agent's own pod"
        instance_ip: String, ["INSTANCE_IP"];
    "Use the built-in development CA, whatever --ca-address says"
        fake_ca: bool, ["FAKE_CA"], switch "true";
    "Directory of the development CA; by default the directory ca in the state directory"
        ca_dir: PathBuf, [];
    "How long workload certificates are valid [default: 24h]"
        svid_ttl: Span, ["SECRET_TTL"];
    "Name of the cluster [default: Kubernetes]"
        cluster_id: String, ["ISTIO_META_CLUSTER_ID", "CLUSTER_ID"];
    "Name of the node"
        node_name: String, ["NODE_NAME"];
    "Trust domain of pods that the mesh does not know [default: cluster.local]"
        trust_domain: String, ["TRUST_DOMAIN"];
    "Network of the node"
        network: String, ["NETWORK"];
    "Listen on IPv6 as well [default: true]"
        ipv6_enabled: bool, ["IPV6_ENABLED"], switch "true";
    "Connections that a pod may have open at a time on each of its listeners; what one peer may have of them follows \
     (docs/limits.md) [default: 16384]"
        max_connections_per_pod: u32, [];
    "Streams on one HBONE connection [default: 100]"
        pool_max_streams_per_connection: u16, ["POOL_MAX_STREAMS_PER_CONNECTION"];
    "Time after which an unused HBONE connection is closed [default: 5m]"
        pool_unused_release_timeout: Span, ["POOL_UNUSED_RELEASE_TIMEOUT"];
    "HTTP/2 window of a stream, in bytes [default: 4194304]"
        http2_stream_window_size: u32, ["HTTP2_STREAM_WINDOW_SIZE"];
    "HTTP/2 window of a connection, in bytes [default: 16777216]"
        http2_connection_window_size: u32, ["HTTP2_CONNECTION_WINDOW_SIZE"];
    "Longest HTTP/2 frame, in bytes [default: 1048576]"
        http2_frame_size: u32, ["HTTP2_FRAME_SIZE"];
    "TCP keepalive on all connections [default: true]"
        keepalive_enabled: bool, ["KEEPALIVE_ENABLED"], switch "true";
    "Silence before the first keepalive probe [default: 180s]"
        keepalive_time: Span, ["KEEPALIVE_TIME"];
    "Time between keepalive probes [default: 180s]"
        keepalive_interval: Span, ["KEEPALIVE_INTERVAL"];
    "Unanswered keepalive probes that end a connection [default: 9]"
        keepalive_retries: u32, ["KEEPALIVE_RETRIES"];
    "End connections whose data stays unacknowledged for the time of all probes [default: false]"
        user_timeout_enabled: bool, ["USER_TIMEOUT_ENABLED"], switch "true";
    "Call applications that want PROXY protocol headers on loopback, not on the pod's address [default: true]"
        localhost_app_tunnel: bool, ["LOCALHOST_APP_TUNNEL"], switch "true";
    "Tell HBONE callers of the workload that they have reached, and log what they tell of themselves [default: true]"
        enable_response_baggage: bool, ["ENABLE_RESPONSE_BAGGAGE"], switch "true";
    "Join connections between two pods of this node in the agent, without TLS, after the same checks as over HBONE [default: false]"
        same_node_direct: bool, [], switch "true";
    "Time that connections get to end when the agent stops [default: 5s]"
        connection_termination_deadline: Span, ["CONNECTION_TERMINATION_DEADLINE"];
    "Kubernetes' grace period in seconds, from which the time above is taken if it is not given"
        termination_grace_period_seconds: u64, ["TERMINATION_GRACE_PERIOD_SECONDS"];
    "Time that the connections of a deleted pod get to end [default: 0s]"
        drain: Span, [];
    "Release all pods when the agent stops; else their capture stays and they fail closed [default: false]"
        release_on_exit: bool, [], switch "true";
    "Take over from the agent that runs with this state directory, so that no connection is lost: auto (if there is one) or never; \
     either hands over to one that asks [default: never]"
        takeover: Takeover, ["TAKEOVER"], switch "auto";
    "Worker threads: a number, or a percentage of the CPUs"
        worker_threads: Workers, ["ZTUNNEL_WORKER_THREADS"];
    "Log level, or a list of module=level [default: info]"
        log_level: Filter, ["RUST_LOG"];
    "Form of the log: plain or json [default: plain]"
        log_format: Format, ["LOG_FORMAT"];
    "Share of the connections that end well which have a line in the access log, from 0 to 1; those that fail all have [default: 1]"
        access_log_sample: Share, [];
    "Lines of the access log in a second; more are left out and counted; 0: no bound [default: 5000]"
        access_log_rate: u32, [];
    "Address of the admin endpoint [default: 127.0.0.1:15000]"
        admin_addr: SocketAddr, [];
    "Address of /metrics [default: [::]:15020]"
        metrics_addr: SocketAddr, [];
    "Address of /healthz/ready [default: [::]:15021]"
        readiness_addr: SocketAddr, [];
    "Whose connections from this node reach enrolled pods directly, as kubelet's probes must: auto (of kubelet's cgroup, or while \
     none is found of any process in the node's network namespace), node (of any such process), none, or cgroups like \
     /system.slice/kubelet.service, with commas between; only with --redirect ebpf [default: auto]"
        probe_sources: Sources, [];
    "Attach with clsact filters even where the kernel has TCX links"
        force_clsact: bool, [], switch "true";
    "Cut the kernel's waiting short while TCX links are attached and removed, by its switch /sys/kernel/rcu_expedited [default: true]"
        rcu_expedited: bool, [], switch "true";
    "Tell the proxy's dials to applications by source port even where the kernel tells their device"
        force_source_port: bool, [], switch "true";
}

/// What is wrong with a text. Types of the standard library do not say which text it was.
fn describe(text: &str, source: &dyn std::error::Error) -> String {
    let reason = Chain(source).to_string();
    if reason.contains(text) {
        reason
    } else {
        format!("{text:?}: {reason}")
    }
}

/// Reads a value of the file as a flag is read: by its text. `5`, `"5"` and `true` are all one here.
fn from_text<'de, D: Deserializer<'de>, T: FromStr>(deserializer: D) -> Result<Option<T>, D::Error>
where
    T::Err: std::error::Error,
{
    struct Text<T>(PhantomData<T>);

    impl<T: FromStr> Visitor<'_> for Text<T>
    where
        T::Err: std::error::Error,
    {
        type Value = Option<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            let name = type_name::<T>();
            write!(f, "a value of type {}", name.rsplit("::").next().unwrap_or(name))
        }

        fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Self::Value, E> {
            text.parse()
                .map(Some)
                .map_err(|error| E::custom(describe(text, &error)))
        }

        fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<Self::Value, E> {
            self.visit_str(if value { "true" } else { "false" })
        }

        fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<Self::Value, E> {
            self.visit_str(&value.to_string())
        }

        fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<Self::Value, E> {
            self.visit_str(&value.to_string())
        }

        fn visit_unit<E: serde::de::Error>(self) -> Result<Self::Value, E> {
            Err(E::custom("the value is missing"))
        }
    }

    deserializer
        .deserialize_any(Text(PhantomData))
        .map_err(D::Error::custom)
}
