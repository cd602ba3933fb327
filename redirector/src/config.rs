//! The agent's configuration: defaults, then a file, then the environment, then flags; the later win.
//!
//! `main` reads it, `app` hands the parts to the modules. Everything is checked here, before anything is done.

use std::{
    collections::BTreeMap,
    fs, io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

use serde::Serialize;

use crate::{
    cni::{entry::DEFAULT_AGENT_SOCKET, install::leave},
    discovery::xds,
    mesh::{
        pod::Home,
        spiffe::{Aliases, SpiffeId},
    },
    proxy::{
        self, PeerConfig,
        access_log::{self, Share},
    },
    redirect::{iptables, probers::Sources},
    sys::socket::Keepalive,
    telemetry::logs,
};

pub mod cluster;
pub mod cni;
pub mod planes;
pub mod reference;
pub mod settings;
pub mod values;

use self::{
    planes::{Certificates, Environment, Plane},
    settings::Settings,
    values::{Names, Redirect, Span, Takeover, Workers},
};

/// The configuration of an agent.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Config {
    /// The backend.
    pub redirect: Redirect,
    /// The programs that write the rules, where iptables rules redirect.
    pub iptables_backend: iptables::Backend,
    /// Attach with clsact filters even where the kernel has TCX links.
    pub force_clsact: bool,
    /// Tell the proxy's dials to applications by source port even where the kernel tells their device.
    pub force_source_port: bool,
    /// Cut the kernel's waiting short while TCX links are attached and removed.
    pub rcu_expedited: bool,
    /// Whose connections from this node are left alone.
    pub probe_sources: Sources,
    /// Where programs and maps are pinned.
    pub bpffs_dir: PathBuf,
    /// Where records of pods are.
    pub state_dir: PathBuf,
    /// Where pods come from.
    pub pods: PodSource,
    /// Kubernetes says which of them are enrolled.
    pub kubernetes_pods: Option<cluster::Pods>,
    /// The CNI plugin on this node.
    pub cni: cni::Cni,
    /// Namespaces of Kubernetes whose pods are not enrolled.
    pub exclude_namespaces: Names,
    /// The agent's DaemonSet.
    pub daemonset: Option<leave::Config>,
    /// Where proxies that are other processes are told of the pods, which they serve then.
    pub ztunnel_uds: Option<PathBuf>,
    /// File of rules for the pods.
    pub rules: Option<PathBuf>,
    /// What pods would send or get in plain is refused, where the rules say nothing else.
    pub strict: bool,
    /// Where the mesh comes from.
    pub mesh: MeshSource,
    /// The control plane that tells of the mesh.
    pub xds: Option<Plane>,
    /// What it is told of this agent.
    #[serde(skip)]
    pub xds_identity: xds::Identity,
    /// It is asked for what is needed alone.
    pub xds_on_demand: bool,
    /// Where certificates come from.
    pub certificates: Certificates,
    /// Directory of the development CA.
    pub ca_dir: PathBuf,
    /// How long workload certificates are valid.
    pub svid_ttl: Span,
    /// Name of the cluster.
    pub cluster_id: String,
    /// Name of the node.
    pub node_name: String,
    /// Trust domain of pods that the mesh does not know.
    pub trust_domain: String,
    /// Names that are as good as `trust_domain`; shown without it.
    #[serde(serialize_with = "as_list")]
    pub trust_domain_aliases: Aliases,
    /// File of revocation lists.
    pub crl_file: Option<PathBuf>,
    /// Network of the node.
    pub network: String,
    /// Whether to listen on IPv6.
    pub ipv6_enabled: bool,
    /// HBONE connections.
    pub pool: Pool,
    /// Connections of a pod, on each of its listeners.
    pub max_connections_per_pod: u32,
    /// HTTP/2.
    pub http2: Http2,
    /// TCP keepalive; absent when it is off.
    pub keepalive: Option<TcpKeepalive>,
    /// Whether applications that want PROXY protocol headers are called on loopback.
    pub localhost_app_tunnel: bool,
    /// Whether HBONE callers are told of the workload that they have reached.
    pub response_baggage: bool,
    /// Whether connections between two pods of this node are joined in the agent, without TLS.
    pub same_node_direct: bool,
    /// Time that connections get to end when the agent stops.
    pub shutdown_grace: Span,
    /// Time that the connections of a deleted pod get to end.
    pub release_grace: Span,
    /// Release all pods when the agent stops.
    pub release_on_exit: bool,
    /// Whether to take over from an agent that runs.
    pub takeover: Takeover,
    /// Worker threads.
    pub worker_threads: usize,
    /// What is logged.
    #[serde(serialize_with = "as_text")]
    pub log_level: logs::Filter,
    /// The form of the log.
    #[serde(serialize_with = "as_text")]
    pub log_format: logs::Format,
    /// Of the connections that end well, which have a line in the access log.
    #[serde(serialize_with = "as_text")]
    pub access_log_sample: Share,
    /// Lines of the access log in a second; 0: no bound.
    pub access_log_rate: u32,
    /// Address of the admin endpoint.
    pub admin_addr: SocketAddr,
    /// Address of `/metrics`.
    pub metrics_addr: SocketAddr,
    /// Address of `/healthz/ready`.
    pub readiness_addr: SocketAddr,
}

/// Where pods come from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum PodSource {
    /// From CNI plugins, which post to this socket.
    Cni(PathBuf),
    /// From a node agent that speaks ZDS on this socket.
    Zds(PathBuf),
}

/// Where the mesh comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum MeshSource {
    /// From a file.
    File(PathBuf),
    /// From the configuration itself.
    Inline(#[serde(skip)] String),
    /// From nowhere: no pod is known, and all their connections are refused.
    None,
}

/// HBONE connections.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Pool {
    /// Streams on one connection.
    pub max_streams_per_connection: u16,
    /// Time after which an unused connection is closed.
    pub unused_release: Span,
}

/// HTTP/2.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Http2 {
    /// Window of a stream.
    pub stream_window_bytes: u32,
    /// Window of a connection.
    pub connection_window_bytes: u32,
    /// Longest frame.
    pub frame_bytes: u32,
}

/// TCP keepalive.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TcpKeepalive {
    /// Silence before the first probe.
    pub idle: Span,
    /// Time between probes.
    pub interval: Span,
    /// Unanswered probes that end the connection.
    pub probes: u32,
    /// Unacknowledged data ends it after the same time.
    pub user_timeout: bool,
}

/// What is wrong with the configuration.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read.
    #[error("cannot read the configuration file {path}", path = .path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The file has an error; its text says where.
    #[error("configuration file {path}: {field}{problem}", path = .path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// The key, and a colon.
        field: String,
        /// What is wrong, and where.
        problem: String,
    },
    /// An environment variable has a value that cannot be.
    #[error("environment variable {name}: {problem}")]
    Variable {
        /// Which.
        name: &'static str,
        /// What is wrong.
        problem: String,
    },
    /// A setting has a value that cannot be, or contradicts another.
    #[error("{0}")]
    Setting(String),
}

impl Config {
    /// Reads it. `flags` win over the environment, and that wins over the file.
    pub fn load(flags: Settings, file: Option<&Path>, environment: &Environment) -> Result<Self, Error> {
        let file = file.map(read).transpose()?.unwrap_or_default();
        let settings = flags.or(Settings::from_environment(environment)?).or(file);
        Self::from_settings(settings, environment)
    }

    /// Where the agent listens for one that is to take over.
    pub fn takeover_socket(&self) -> PathBuf {
        self.state_dir.join("takeover.sock")
    }

    fn from_settings(s: Settings, environment: &Environment) -> Result<Self, Error> {
        let setting = |text: &str| Err(Error::Setting(text.to_owned()));
        let fake_ca = s.fake_ca.unwrap_or(false);
        let cluster_id = s.cluster_id.unwrap_or_else(|| "Kubernetes".to_owned());
        let xds = planes::Given {
            prefix: "XDS",
            address: s.xds_address,
            roots: s.xds_root_ca,
            alt_hostname: s.alt_xds_hostname,
            token: s.auth_token.as_deref(),
            cluster_id: &cluster_id,
            environment,
        };
        let ca = planes::Given {
            prefix: "CA",
            address: s.ca_address.filter(|_| !fake_ca),
            roots: s.ca_root_ca,
            alt_hostname: s.alt_ca_hostname,
            token: s.auth_token.as_deref(),
            cluster_id: &cluster_id,
            environment,
        };
        let (xds, ca) = (xds.plane()?, ca.plane()?);
        let svid_ttl = s.svid_ttl.unwrap_or(Span(Duration::from_secs(24 * 3600)));
        let signer = planes::GivenSigner {
            name: s.kubernetes_signer,
            roots: s.kubernetes_signer_roots,
            approve: s.kubernetes_signer_approve,
            kubeconfig: s.kubeconfig.clone(),
            lifetime: svid_ttl,
            environment,
        };
        let signer = signer.signer()?;
        let kubeconfig = s.kubeconfig;
        let xds_on_demand = s.xds_on_demand.unwrap_or(false);
        if xds_on_demand && xds.is_none() {
            return setting(
                "XDS_ON_DEMAND (--xds-on-demand) is for a control plane, and there is none: give XDS_ADDRESS (--xds-address), or leave \
                 it out",
            );
        }
        let node_name = s.node_name.unwrap_or_default();
        let exclude_namespaces = s.exclude_namespaces.unwrap_or_default();
        let pods = cluster::Given {
            wanted: s.kubernetes_pods.unwrap_or(false),
            selectors: s.enablement_selectors,
            excluded: &exclude_namespaces,
            annotation: s.status_annotation,
            system_namespace: s.system_namespace,
            own_namespace: s.pod_namespace.as_deref().unwrap_or_default(),
            node: &node_name,
            kubeconfig: kubeconfig.clone(),
            environment,
        };
        let kubernetes_pods = pods.pods()?;
        if kubernetes_pods.is_some() && s.inpod_uds.is_some() {
            return setting(
                "KUBERNETES_PODS (--kubernetes-pods) and INPOD_UDS (--inpod-uds) are both given: the node agent behind INPOD_UDS says \
                 itself which pods are enrolled; leave one out",
            );
        }
        let names = xds::Identity {
            pod_name: s.pod_name.unwrap_or_default(),
            pod_namespace: s.pod_namespace.unwrap_or_default(),
            instance_ip: s.instance_ip.unwrap_or_default(),
            node_name: node_name.clone(),
            metadata: BTreeMap::new(),
        };
        let xds_identity = planes::identity(names, environment)?;
        let mesh = match (s.workloads, s.workloads_inline) {
            (Some(_), Some(_)) => {
                return setting(
                    "LOCAL_XDS_PATH (--workloads) and LOCAL_XDS (--workloads-inline) are both given: give one",
                );
            }
            (Some(path), None) => MeshSource::File(path),
            (None, Some(text)) => MeshSource::Inline(text),
            (None, None) => MeshSource::None,
        };
        let trust_domain = s.trust_domain.unwrap_or_else(|| "cluster.local".to_owned());
        if let Err(error) = SpiffeId::new(&trust_domain, "default", "default") {
            return Err(Error::Setting(format!("TRUST_DOMAIN (--trust-domain): {error}")));
        }
        let aliases = s.trust_domain_alias.unwrap_or_default();
        let aliases = Aliases::of(&trust_domain, aliases.iter().map(|name| name.trim()));
        let trust_domain_aliases = aliases.map_err(|error| {
            Error::Setting(format!("TRUST_DOMAIN_ALIASES (--trust-domain-alias): {error}"))
        })?;
        let state_dir = s.state_dir.unwrap_or_else(|| "/run/redirector".into());
        let cni_socket = s.cni_socket.unwrap_or_else(|| DEFAULT_AGENT_SOCKET.into());
        let cni_given = cni::Given {
            install: s.cni_install,
            conf_dir: s.cni_conf_dir,
            conf_name: s.cni_conf_name,
            bin_dir: s.cni_bin_dir,
            chained: s.cni_chained,
            owned: s.cni_owned_config,
            owned_name: s.cni_owned_config_filename,
            plugin: s.cni_plugin,
            daemonset: s.daemonset.as_deref(),
            socket: &cni_socket,
            state_dir: &state_dir,
            has_other_source: s.inpod_uds.is_some(),
            exclude_namespaces: &exclude_namespaces.0,
            pod: &xds_identity,
        };
        let cni = cni_given.cni()?;
        let daemonset = cni::daemonset(s.daemonset, &xds_identity, || {
            planes::cluster(kubeconfig, environment, "--daemonset")
        })?;
        let access_log = access_log::Config::default();
        let proxy::Config {
            max_connections,
            pool,
            http2,
            keepalive,
            loopback_application_tunnel,
            response_baggage,
            same_node_direct,
            ..
        } = proxy::Config::default();
        let config = Self {
            redirect: s.redirect.unwrap_or(Redirect::Ebpf),
            iptables_backend: s.iptables_backend.unwrap_or_default(),
            force_clsact: s.force_clsact.unwrap_or(false),
            force_source_port: s.force_source_port.unwrap_or(false),
            rcu_expedited: s.rcu_expedited.unwrap_or(true),
            probe_sources: s.probe_sources.unwrap_or(Sources::Auto),
            bpffs_dir: s.bpffs_dir.unwrap_or_else(|| "/sys/fs/bpf/redirector".into()),
            pods: s.inpod_uds.map_or(PodSource::Cni(cni_socket), PodSource::Zds),
            kubernetes_pods,
            cni,
            exclude_namespaces,
            daemonset,
            ztunnel_uds: s.ztunnel_uds,
            rules: s.rules,
            strict: s.strict.unwrap_or(false),
            mesh,
            ca_dir: s.ca_dir.unwrap_or_else(|| state_dir.join("ca")),
            xds,
            xds_identity,
            xds_on_demand,
            certificates: Certificates::choose(fake_ca, ca, signer, s.cert_dir, s.spiffe_socket)?,
            state_dir,
            svid_ttl,
            cluster_id,
            node_name,
            trust_domain,
            trust_domain_aliases,
            crl_file: s.crl_file,
            network: s.network.unwrap_or_default(),
            ipv6_enabled: s.ipv6_enabled.unwrap_or(true),
            max_connections_per_pod: s.max_connections_per_pod.unwrap_or(max_connections as u32),
            pool: Pool {
                max_streams_per_connection: s
                    .pool_max_streams_per_connection
                    .unwrap_or(pool.max_streams_per_connection as u16),
                unused_release: s.pool_unused_release_timeout.unwrap_or(Span(pool.unused_release)),
            },
            http2: Http2 {
                stream_window_bytes: s.http2_stream_window_size.unwrap_or(http2.stream_window_bytes),
                connection_window_bytes: s
                    .http2_connection_window_size
                    .unwrap_or(http2.connection_window_bytes),
                frame_bytes: s.http2_frame_size.unwrap_or(http2.frame_bytes),
            },
            keepalive: s.keepalive_enabled.unwrap_or(true).then(|| TcpKeepalive {
                idle: s.keepalive_time.unwrap_or(Span(keepalive.idle)),
                interval: s.keepalive_interval.unwrap_or(Span(keepalive.interval)),
                probes: s.keepalive_retries.unwrap_or(keepalive.probes),
                user_timeout: s.user_timeout_enabled.unwrap_or(keepalive.user_timeout),
            }),
            localhost_app_tunnel: s.localhost_app_tunnel.unwrap_or(loopback_application_tunnel),
            response_baggage: s.enable_response_baggage.unwrap_or(response_baggage),
            same_node_direct: s.same_node_direct.unwrap_or(same_node_direct),
            shutdown_grace: s
                .connection_termination_deadline
                .unwrap_or_else(|| Span(shutdown_grace(s.termination_grace_period_seconds))),
            release_grace: s.drain.unwrap_or_default(),
            release_on_exit: s.release_on_exit.unwrap_or(false),
            takeover: s.takeover.unwrap_or_default(),
            worker_threads: worker_threads(s.worker_threads),
            log_level: s.log_level.unwrap_or_default(),
            log_format: s.log_format.unwrap_or_default(),
            access_log_sample: s.access_log_sample.unwrap_or(access_log.sample),
            access_log_rate: s.access_log_rate.unwrap_or(access_log.lines_per_second),
            admin_addr: s.admin_addr.unwrap_or((Ipv4Addr::LOCALHOST, 15000).into()),
            metrics_addr: s.metrics_addr.unwrap_or((Ipv6Addr::UNSPECIFIED, 15020).into()),
            readiness_addr: s.readiness_addr.unwrap_or((Ipv6Addr::UNSPECIFIED, 15021).into()),
        };
        config.check()?;
        Ok(config)
    }

    /// Values that parse and still cannot be.
    fn check(&self) -> Result<(), Error> {
        /// RFC 9113, section 6.5.2.
        const FRAME_BYTES: std::ops::RangeInclusive<u32> = 16_384..=16_777_215;
        /// Fewer leave nothing to share; more than files a process can have by default on any kernel (fs.nr_open) mean nothing.
        const CONNECTIONS: std::ops::RangeInclusive<u32> = 16..=1 << 20;
        /// RFC 9113, section 6.9.1.
        const MAX_WINDOW_BYTES: u32 = (1 << 31) - 1;
        let Http2 {
            stream_window_bytes,
            connection_window_bytes,
            frame_bytes,
        } = self.http2;
        let keepalive = self.keepalive.as_ref();
        let whole_seconds = |span: Span| (1..=32_767).contains(&span.0.as_secs());
        let others = self.ztunnel_uds.is_some();
        let problems = [
            (others && self.redirect != Redirect::Ebpf)
                .then_some("ZTUNNEL_UDS_ADDRESS (--ztunnel-uds): only with --redirect ebpf"),
            (others && matches!(self.pods, PodSource::Zds(_))).then_some(
                "ZTUNNEL_UDS_ADDRESS (--ztunnel-uds) and INPOD_UDS (--inpod-uds): an agent stands in for istio-cni or for ztunnel; give one",
            ),
            (others && self.strict).then_some(
                "--strict: a proxy that is another process (--ztunnel-uds) is not told; leave it to the mesh's policies \
                 (PeerAuthentication)",
            ),
            (!CONNECTIONS.contains(&self.max_connections_per_pod))
                .then_some("--max-connections-per-pod: must be from 16 to 1048576"),
            (self.pool.max_streams_per_connection == 0)
                .then_some("POOL_MAX_STREAMS_PER_CONNECTION: must be at least 1"),
            (!FRAME_BYTES.contains(&frame_bytes))
                .then_some("HTTP2_FRAME_SIZE: must be from 16384 to 16777215"),
            (stream_window_bytes == 0 || connection_window_bytes > MAX_WINDOW_BYTES)
                .then_some("HTTP2_STREAM_WINDOW_SIZE and HTTP2_CONNECTION_WINDOW_SIZE: must be from 1 to 2147483647"),
            (connection_window_bytes <= stream_window_bytes).then_some(
                "HTTP2_CONNECTION_WINDOW_SIZE: must be more than HTTP2_STREAM_WINDOW_SIZE, or one stream that is not \
                 read stops all others",
            ),
            keepalive
                .is_some_and(|k| !whole_seconds(k.idle) || !whole_seconds(k.interval))
                .then_some("KEEPALIVE_TIME and KEEPALIVE_INTERVAL: must be from 1s to 32767s"),
            keepalive
                .is_some_and(|k| !(1..=127).contains(&k.probes))
                .then_some("KEEPALIVE_RETRIES: must be from 1 to 127"),
            (self.svid_ttl.0 < Duration::from_secs(2)).then_some("SECRET_TTL (--svid-ttl): must be at least 2s"),
        ];
        match problems.into_iter().flatten().next() {
            Some(problem) => Err(Error::Setting(problem.to_owned())),
            None => Ok(()),
        }
    }

    /// The part of the iptables backend.
    pub fn iptables(&self) -> iptables::Config {
        iptables::Config {
            backend: self.iptables_backend,
            state_dir: self.state_dir.clone(),
        }
    }

    /// Where this node is.
    pub fn home(&self) -> Home {
        Home {
            network: self.network.clone(),
            cluster: self.cluster_id.clone(),
            node: self.node_name.clone(),
        }
    }

    /// What of the connections is logged.
    pub fn access_log(&self) -> access_log::Config {
        access_log::Config {
            sample: self.access_log_sample,
            lines_per_second: self.access_log_rate,
        }
    }

    /// The part of the data path.
    pub fn proxy(&self) -> proxy::Config {
        let mut config = proxy::Config {
            home: self.home(),
            ..proxy::Config::default()
        };
        config.max_connections = self.max_connections_per_pod as usize;
        config.peers = PeerConfig::of(config.max_connections);
        config.pool.max_streams_per_connection = self.pool.max_streams_per_connection.into();
        config.pool.unused_release = self.pool.unused_release.0;
        config.http2.stream_window_bytes = self.http2.stream_window_bytes;
        config.http2.connection_window_bytes = self.http2.connection_window_bytes;
        config.http2.frame_bytes = self.http2.frame_bytes;
        config.ipv6 = self.ipv6_enabled;
        config.loopback_application_tunnel = self.localhost_app_tunnel;
        config.response_baggage = self.response_baggage;
        config.same_node_direct = self.same_node_direct;
        config.keepalive.enabled = self.keepalive.is_some();
        if let Some(keepalive) = &self.keepalive {
            config.keepalive = Keepalive {
                enabled: true,
                idle: keepalive.idle.0,
                interval: keepalive.interval.0,
                probes: keepalive.probes,
                user_timeout: keepalive.user_timeout,
            };
        }
        config
    }
}

fn read(path: &Path) -> Result<Settings, Error> {
    let text = fs::read_to_string(path).map_err(|source| Error::Read {
        path: path.to_owned(),
        source,
    })?;
    if text
        .lines()
        .all(|line| line.trim().is_empty() || line.trim_start().starts_with('#'))
    {
        return Ok(Settings::default());
    }
    let document = serde_yaml::Deserializer::from_str(&text);
    serde_path_to_error::deserialize(document).map_err(|error| {
        let field = match error.path().to_string() {
            path if path == "." => String::new(),
            path => format!("{path}: "),
        };
        let problem = error.into_inner().to_string();
        // The YAML reader names the key too.
        let problem = problem.strip_prefix(&field).unwrap_or(&problem).to_owned();
        Error::File {
            path: path.to_owned(),
            field,
            problem,
        }
    })
}

/// ztunnel's rule: a little less than Kubernetes gives, so that the agent ends by itself.
fn shutdown_grace(termination_grace_period_seconds: Option<u64>) -> Duration {
    Duration::from_secs(match termination_grace_period_seconds {
        None => 5,
        Some(seconds) if seconds > 10 => seconds - 5,
        Some(seconds) => seconds.saturating_sub(1).max(1),
    })
}

fn worker_threads(workers: Option<Workers>) -> usize {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    workers.map_or_else(|| cpus.div_ceil(4).max(2), |workers| workers.count(cpus))
}

fn as_text<S: serde::Serializer>(value: &impl std::fmt::Display, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

fn as_list<S: serde::Serializer>(aliases: &Aliases, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(aliases.aliases())
}

#[cfg(test)]
mod tests;
