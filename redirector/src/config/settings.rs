//! The settings as they are given: each with its flag, its key in the file, its environment variables and its meaning, in one
//! table. All may be absent; defaults are in [`super::Config`].

use std::{any::type_name, fmt, marker::PhantomData, net::SocketAddr, path::PathBuf, str::FromStr};

use serde::de::{Deserializer, Error as _, Visitor};

use super::{
    Error,
    values::{Redirect, Span, Workers},
};
use crate::telemetry::{
    Chain,
    logs::{Filter, Format},
};

macro_rules! settings {
    ($($help:literal $field:ident: $type:ty, [$($variable:literal),*] $(, switch $default:literal)?;)*) => {
        /// Settings as one source gives them: the file, the environment, or the command line.
        #[derive(Debug, Clone, Default, PartialEq, clap::Args, serde::Deserialize)]
        #[serde(deny_unknown_fields, rename_all = "kebab-case")]
        pub struct Settings {
            $(
                #[doc = $help]
                #[arg(
                    long,
                    help = concat!($help $(, " [env: ", $variable, "]")*)
                    $(, num_args(0..=1), default_missing_value = $default)?
                )]
                #[serde(default, deserialize_with = "from_text")]
                pub $field: Option<$type>,
            )*
        }

        impl Settings {
            /// What the environment gives. An empty variable is as good as none.
            pub(super) fn from_environment(variable: &dyn Fn(&str) -> Option<String>) -> Result<Self, Error> {
                let mut settings = Self::default();
                $(
                    for name in [$($variable),*] as [&'static str; 0 $(+ { let _ = $variable; 1 })*] {
                        let Some(text) = variable(name).filter(|text| !text.is_empty()) else { continue };
                        let parsed = text.parse::<$type>();
                        let value = parsed.map_err(|source| Error::Variable { name, problem: describe(&text, &source) })?;
                        settings.$field = settings.$field.or(Some(value));
                    }
                )*
                Ok(settings)
            }

            /// These, and for what they lack those of `weaker`.
            pub(super) fn or(self, weaker: Self) -> Self {
                Self { $($field: self.$field.or(weaker.$field)),* }
            }
        }
    };
}

settings! {
    "How the pods' traffic is redirected: ebpf or none"
        redirect: Redirect, [];
    "Socket on which CNI plugins tell of pods"
        cni_socket: PathBuf, [];
    "Directory of the agent's state: records of pods, development CA"
        state_dir: PathBuf, [];
    "Directory of the bpffs where programs and maps are pinned"
        bpffs_dir: PathBuf, [];
    "Socket of a node agent that speaks ZDS; pods come from there, and the CNI socket is not served"
        inpod_uds: PathBuf, ["INPOD_UDS"];
    "File of workloads and services"
        workloads: PathBuf, ["LOCAL_XDS_PATH"];
    "Workloads and services, as text"
        workloads_inline: String, ["LOCAL_XDS"];
    "Control plane; not supported yet, leave it empty"
        xds_address: String, ["XDS_ADDRESS"];
    "Certificate authority; not supported yet, leave it empty"
        ca_address: String, ["CA_ADDRESS"];
    "Use the built-in development CA, whatever --ca-address says"
        fake_ca: bool, ["FAKE_CA"], switch "true";
    "Directory of the development CA; by default the directory ca in the state directory"
        ca_dir: PathBuf, [];
    "How long workload certificates are valid"
        svid_ttl: Span, ["SECRET_TTL"];
    "Name of the cluster"
        cluster_id: String, ["ISTIO_META_CLUSTER_ID", "CLUSTER_ID"];
    "Name of the node"
        node_name: String, ["NODE_NAME"];
    "Trust domain of pods that the mesh does not know"
        trust_domain: String, ["TRUST_DOMAIN"];
    "Network of the node"
        network: String, ["NETWORK"];
    "Listen on IPv6 as well"
        ipv6_enabled: bool, ["IPV6_ENABLED"], switch "true";
    "Streams on one HBONE connection"
        pool_max_streams_per_connection: u16, ["POOL_MAX_STREAMS_PER_CONNECTION"];
    "Time after which an unused HBONE connection is closed"
        pool_unused_release_timeout: Span, ["POOL_UNUSED_RELEASE_TIMEOUT"];
    "HTTP/2 window of a stream, in bytes"
        http2_stream_window_size: u32, ["HTTP2_STREAM_WINDOW_SIZE"];
    "HTTP/2 window of a connection, in bytes"
        http2_connection_window_size: u32, ["HTTP2_CONNECTION_WINDOW_SIZE"];
    "Longest HTTP/2 frame, in bytes"
        http2_frame_size: u32, ["HTTP2_FRAME_SIZE"];
    "TCP keepalive on all connections"
        keepalive_enabled: bool, ["KEEPALIVE_ENABLED"], switch "true";
    "Silence before the first keepalive probe"
        keepalive_time: Span, ["KEEPALIVE_TIME"];
    "Time between keepalive probes"
        keepalive_interval: Span, ["KEEPALIVE_INTERVAL"];
    "Unanswered keepalive probes that end a connection"
        keepalive_retries: u32, ["KEEPALIVE_RETRIES"];
    "End connections whose data stays unacknowledged for the time of all probes"
        user_timeout_enabled: bool, ["USER_TIMEOUT_ENABLED"], switch "true";
    "Time that connections get to end when the agent stops"
        connection_termination_deadline: Span, ["CONNECTION_TERMINATION_DEADLINE"];
    "Kubernetes' grace period in seconds, from which the time above is taken if it is not given"
        termination_grace_period_seconds: u64, ["TERMINATION_GRACE_PERIOD_SECONDS"];
    "Time that the connections of a deleted pod get to end"
        drain: Span, [];
    "Release all pods when the agent stops; else their capture stays and they fail closed"
        release_on_exit: bool, [], switch "true";
    "Worker threads: a number, or a percentage of the CPUs"
        worker_threads: Workers, ["ZTUNNEL_WORKER_THREADS"];
    "Log level, or a list of module=level"
        log_level: Filter, ["RUST_LOG"];
    "Form of the log: plain or json"
        log_format: Format, ["LOG_FORMAT"];
    "Address of the admin endpoint"
        admin_addr: SocketAddr, [];
    "Address of /metrics"
        metrics_addr: SocketAddr, [];
    "Address of /healthz/ready"
        readiness_addr: SocketAddr, [];
    "Attach with clsact filters even where the kernel has TCX links"
        force_clsact: bool, [], switch "true";
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
