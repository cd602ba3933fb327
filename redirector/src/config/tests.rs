use std::collections::BTreeMap;

use clap::Parser;

use super::*;
use crate::telemetry::Chain;

#[derive(Debug, Parser)]
struct Flags {
    #[command(flatten)]
    settings: Settings,
}

/// Loads a configuration from a file's text, variables and flags.
fn load(file: &str, variables: &[(&str, &str)], flags: &[&str]) -> Result<Config, String> {
    let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
    let variables = variables.iter().map(owned).collect();
    let flags = Flags::try_parse_from([&["x"], flags].concat()).map_err(|error| error.to_string())?;
    let path = tempfile::NamedTempFile::new().unwrap();
    fs::write(path.path(), file).unwrap();
    Config::load(flags.settings, Some(path.path()), &variables).map_err(|error| Chain(&error).to_string())
}

#[test]
fn defaults_are_those_of_the_help() {
    use clap::CommandFactory;
    let shown = |config: Config| serde_json::to_value(config).unwrap();
    let expected = shown(load("", &[], &[]).unwrap());
    let mut checked = 0;
    for argument in Flags::command().get_arguments() {
        let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
        let Some((_, rest)) = help.split_once("[default: ") else {
            continue;
        };
        // An address has brackets of its own.
        let end = rest.find("] [env").unwrap_or(rest.trim_end().len() - 1);
        let flag = format!("--{}={}", argument.get_long().unwrap(), &rest[..end]);
        assert_eq!(shown(load("", &[], &[&flag]).unwrap()), expected, "{flag}");
        checked += 1;
    }
    assert!(checked > 20, "{checked}");
}

#[test]
fn defaults_are_those_of_the_documentation() {
    let config = load("", &[], &[]).unwrap();
    assert_eq!(config.redirect, Redirect::Ebpf);
    assert_eq!(config.pods, PodSource::Cni("/run/redirector/cni.sock".into()));
    assert_eq!(config.mesh, MeshSource::None);
    assert_eq!(config.state_dir, Path::new("/run/redirector"));
    assert_eq!(config.ca_dir, Path::new("/run/redirector/ca"));
    assert_eq!(config.bpffs_dir, Path::new("/sys/fs/bpf/redirector"));
    assert_eq!(config.trust_domain, "cluster.local");
    assert_eq!(config.cluster_id, "Kubernetes");
    assert_eq!(config.admin_addr.to_string(), "127.0.0.1:15000");
    assert_eq!(config.metrics_addr.to_string(), "[::]:15020");
    assert_eq!(config.readiness_addr.to_string(), "[::]:15021");
    assert_eq!(config.shutdown_grace.0, Duration::from_secs(5));
    assert_eq!(config.release_grace.0, Duration::ZERO);
    assert_eq!(config.http2.stream_window_bytes, 4 << 20);
    assert_eq!(config.http2.connection_window_bytes, 16 << 20);
    assert_eq!(
        config.keepalive.as_ref().unwrap().idle.0,
        Duration::from_secs(180)
    );
    assert!(dev_ca(&config, true) && config.ipv6_enabled && !config.release_on_exit);
    assert!(config.worker_threads >= 2);
}

#[test]
fn flags_win_over_the_environment_and_that_over_the_file() {
    let file = "trust-domain: file\nnetwork: file\ncluster-id: file\n";
    let both = [("TRUST_DOMAIN", "environment"), ("NETWORK", "environment")];
    let config = load(file, &both, &["--trust-domain", "flag"]).unwrap();
    let found = [
        config.trust_domain.as_str(),
        &config.network,
        &config.cluster_id,
        &config.node_name,
    ];
    assert_eq!(found, ["flag", "environment", "file", ""]);
    // An empty variable is none; of two names the first wins.
    let config = load(
        file,
        &[
            ("TRUST_DOMAIN", ""),
            ("CLUSTER_ID", "b"),
            ("ISTIO_META_CLUSTER_ID", "a"),
        ],
        &[],
    );
    let config = config.unwrap();
    assert_eq!(
        (config.trust_domain.as_str(), config.cluster_id.as_str()),
        ("file", "a")
    );
}

#[test]
fn every_source_reads_the_same_texts() {
    let by_file = load(
        "pool-unused-release-timeout: 90s\nkeepalive-retries: 3\nipv6-enabled: false\nadmin-addr: 127.0.0.1:1\n\
         worker-threads: 3\nlog-format: json\nredirect: none\n# a comment\n",
        &[],
        &[],
    );
    let by_environment = load(
        "",
        &[
            ("POOL_UNUSED_RELEASE_TIMEOUT", "1m30s"),
            ("KEEPALIVE_RETRIES", "3"),
            ("IPV6_ENABLED", "false"),
            ("ZTUNNEL_WORKER_THREADS", "3"),
            ("LOG_FORMAT", "json"),
        ],
        &["--admin-addr", "127.0.0.1:1", "--redirect", "none"],
    );
    let view = |config: Result<Config, String>| serde_json::to_value(config.unwrap()).unwrap();
    let view = (view(by_file), view(by_environment));
    assert_eq!(view.0, view.1);
    assert_eq!(view.0["pool"]["unusedRelease"], "90s");
    assert_eq!(view.0["logFormat"], "json");
}

#[test]
fn ztunnels_environment_for_local_use_is_understood() {
    let config = load(
        "",
        &[
            ("FAKE_CA", "true"),
            ("LOCAL_XDS_PATH", "/etc/workloads.yaml"),
            ("INPOD_UDS", "/var/run/ztunnel/ztunnel.sock"),
            ("XDS_ADDRESS", ""),
            ("CA_ADDRESS", ""),
        ],
        &[],
    )
    .unwrap();
    assert_eq!(
        config.pods,
        PodSource::Zds("/var/run/ztunnel/ztunnel.sock".into())
    );
    assert_eq!(config.mesh, MeshSource::File("/etc/workloads.yaml".into()));
    assert!(dev_ca(&config, false));
    load("", &[("FAKE_CA", "true"), ("CA_ADDRESS", "istiod:15012")], &[]).unwrap();
}

#[test]
fn aliases_of_the_trust_domain_are_a_list_in_every_source() {
    let names = |file: &str, variables: &[(&str, &str)], flags: &[&str]| {
        let config = load(file, variables, flags)?;
        Ok::<_, String>(
            config
                .trust_domain_aliases
                .aliases()
                .collect::<Vec<_>>()
                .join(" "),
        )
    };
    let file = "trust-domain-alias: [c.d, e.f]\n";
    let variables = [("TRUST_DOMAIN_ALIASES", "a.b, old"), ("CRL_PATH", "/etc/crl.pem")];
    assert_eq!(names("", &[], &[]).unwrap(), "");
    assert_eq!(names(file, &[], &[]).unwrap(), "c.d e.f");
    assert_eq!(names(file, &variables, &[]).unwrap(), "a.b old");
    let flags = ["--trust-domain-alias", "x", "--trust-domain-alias", "y,z"];
    assert_eq!(names(file, &variables, &flags).unwrap(), "x y z");
    for bad in ["a,,b", "a b", "spiffe://a"] {
        let error = names("", &[("TRUST_DOMAIN_ALIASES", bad)], &[]).unwrap_err();
        assert!(
            error.contains("TRUST_DOMAIN_ALIASES (--trust-domain-alias)"),
            "{error}"
        );
    }
    let shown = serde_json::to_value(load("", &variables, &[]).unwrap()).unwrap();
    assert_eq!(shown["trustDomainAliases"], serde_json::json!(["a.b", "old"]));
    assert_eq!(shown["crlFile"], "/etc/crl.pem");
}

#[test]
fn switches_need_no_value() {
    let config = load(
        "",
        &[],
        &["--release-on-exit", "--force-clsact", "--ipv6-enabled", "false"],
    )
    .unwrap();
    assert!(config.release_on_exit && config.force_clsact && !config.ipv6_enabled);
}

#[test]
fn errors_name_the_place_and_the_reason() {
    /// File, environment, flags, and parts of the error.
    type Case<'a> = (&'a str, &'a [(&'a str, &'a str)], &'a [&'a str], &'a [&'a str]);
    let table: [Case<'_>; 45] = [
        (
            "cert-dir: /certificates\n",
            &[("CA_ADDRESS", "istiod:15012")],
            &[],
            &["CA_ADDRESS", "--cert-dir", "one place only", "leave out"],
        ),
        (
            "",
            &[
                ("FAKE_CA", "true"),
                ("SPIFFE_ENDPOINT_SOCKET", "unix:///run/spire.sock"),
            ],
            &[],
            &["FAKE_CA", "SPIFFE_ENDPOINT_SOCKET", "leave out"],
        ),
        (
            "",
            &[("SPIFFE_ENDPOINT_SOCKET", "tcp://127.0.0.1:8080")],
            &[],
            &["SPIFFE_ENDPOINT_SOCKET", "tcp://127.0.0.1:8080", "unix:///PATH"],
        ),
        (
            "network: a\nno-such-key: 1\n",
            &[],
            &[],
            &["no-such-key", "line 2"],
        ),
        (
            "network: a\nkeepalive-time: soon\n",
            &[],
            &[],
            &["keepalive-time: ", "\"soon\"", "line 2"],
        ),
        (
            "keepalive-retries: -1\n",
            &[],
            &[],
            &["keepalive-retries: ", "\"-1\": invalid digit", "line 1"],
        ),
        (
            "ipv6-enabled: yes\n",
            &[],
            &[],
            &["ipv6-enabled: ", "\"yes\"", "line 1"],
        ),
        ("network: [a]\n", &[], &[], &["network: ", "line 1"]),
        ("network:\n", &[], &[], &["network: ", "missing"]),
        ("network: a\n  b: c\n", &[], &[], &["line 2"]),
        ("network: a\nnetwork: b\n", &[], &[], &["duplicate", "network"]),
        ("", &[("FAKE_CA", "yes")], &[], &["FAKE_CA", "\"yes\""]),
        (
            "",
            &[("IPV6_ENABLED", "True")],
            &[],
            &["IPV6_ENABLED", "\"True\""],
        ),
        (
            "",
            &[("POOL_UNUSED_RELEASE_TIMEOUT", "5")],
            &[],
            &["POOL_UNUSED_RELEASE_TIMEOUT", "\"5\"", "5m"],
        ),
        (
            "",
            &[("KEEPALIVE_TIME", "0s")],
            &[],
            &["KEEPALIVE_TIME", "from 1s"],
        ),
        (
            "",
            &[("KEEPALIVE_RETRIES", "200")],
            &[],
            &["KEEPALIVE_RETRIES", "127"],
        ),
        (
            "",
            &[("HTTP2_FRAME_SIZE", "100")],
            &[],
            &["HTTP2_FRAME_SIZE", "16384"],
        ),
        (
            "",
            &[("HTTP2_STREAM_WINDOW_SIZE", "16777216")],
            &[],
            &["HTTP2_CONNECTION_WINDOW_SIZE: must be more"],
        ),
        (
            "",
            &[("CERT_SIGNER_ROOT_CA", "/roots")],
            &[],
            &["CERT_SIGNER_ROOT_CA", "give CERT_SIGNER_NAME"],
        ),
        (
            "",
            &[],
            &["--max-connections-per-pod", "15"],
            &["--max-connections-per-pod", "from 16 to 1048576"],
        ),
        (
            "",
            &[("POOL_MAX_STREAMS_PER_CONNECTION", "0")],
            &[],
            &["at least 1"],
        ),
        (
            "",
            &[("ZTUNNEL_WORKER_THREADS", "0")],
            &[],
            &["ZTUNNEL_WORKER_THREADS", "\"0\""],
        ),
        (
            "",
            &[("ZTUNNEL_UDS_ADDRESS", "/z")],
            &["--redirect", "iptables"],
            &["ZTUNNEL_UDS_ADDRESS", "--redirect ebpf"],
        ),
        (
            "",
            &[("ZTUNNEL_UDS_ADDRESS", "/z"), ("INPOD_UDS", "/z")],
            &[],
            &["ZTUNNEL_UDS_ADDRESS", "INPOD_UDS", "give one"],
        ),
        (
            "",
            &[("ZTUNNEL_UDS_ADDRESS", "/z")],
            &["--strict"],
            &["--strict", "--ztunnel-uds", "PeerAuthentication"],
        ),
        ("", &[("LOG_FORMAT", "xml")], &[], &["LOG_FORMAT", "\"xml\""]),
        ("", &[("RUST_LOG", "a=loud")], &[], &["RUST_LOG", "\"a=loud\""]),
        ("", &[("SECRET_TTL", "1s")], &[], &["SECRET_TTL", "at least 2s"]),
        (
            "",
            &[("CERT_SIGNER_NAME", "mesh")],
            &[],
            &["CERT_SIGNER_NAME", "\"mesh\"", "DOMAIN/NAME"],
        ),
        (
            "",
            &[],
            &["--kubernetes-signer", "kubernetes.io/kubelet-serving"],
            &["--kubernetes-signer", "a signer of your own"],
        ),
        (
            "",
            &[("CERT_SIGNER_NAME", "example.com/mesh")],
            &[],
            &["CERT_SIGNER_ROOT_CA", "--kubernetes-signer-roots", "is missing"],
        ),
        (
            "",
            &[
                ("CERT_SIGNER_NAME", "example.com/mesh"),
                ("CERT_SIGNER_ROOT_CA", "/r"),
            ],
            &[],
            &["no Kubernetes is known", "KUBECONFIG"],
        ),
        (
            "",
            &[
                ("CERT_SIGNER_NAME", "example.com/mesh"),
                ("CERT_SIGNER_ROOT_CA", "/r"),
                ("SECRET_TTL", "5m"),
            ],
            &[],
            &["SECRET_TTL", "at least 10m", "CERT_SIGNER_NAME"],
        ),
        (
            "",
            &[
                ("CERT_SIGNER_NAME", "example.com/mesh"),
                ("CERT_SIGNER_ROOT_CA", "/r"),
                ("KUBECONFIG", "/k"),
                ("CA_ADDRESS", "istiod:15012"),
            ],
            &[],
            &["CA_ADDRESS", " and CERT_SIGNER_NAME", "leave out all but one"],
        ),
        ("", &[("TRUST_DOMAIN", "a/b")], &[], &["TRUST_DOMAIN", "a/b"]),
        (
            "",
            &[("XDS_ADDRESS", "istiod")],
            &[],
            &[
                "XDS_ADDRESS",
                "\"istiod\"",
                "there is no port",
                "https://HOST:PORT",
            ],
        ),
        (
            "",
            &[("CA_ADDRESS", "ftp://istiod:15012")],
            &[],
            &["CA_ADDRESS", "ftp://istiod:15012", "https://HOST:PORT"],
        ),
        (
            "",
            &[("CA_ADDRESS", "istiod:15012"), ("CA_HEADER_x y", "1")],
            &[],
            &["CA_HEADER_x y", "cannot be sent"],
        ),
        (
            "",
            &[("ISTIO_METAJSON_LABELS", "{a")],
            &[],
            &["ISTIO_METAJSON_LABELS", "must be JSON"],
        ),
        (
            "",
            &[("XDS_ON_DEMAND", "true")],
            &[],
            &["XDS_ON_DEMAND", "XDS_ADDRESS", "leave it out"],
        ),
        (
            "",
            &[("LOCAL_XDS_PATH", "/a"), ("LOCAL_XDS", "b")],
            &[],
            &["LOCAL_XDS_PATH", "LOCAL_XDS", "give one"],
        ),
        (
            "",
            &[],
            &["--redirect", "nftables"],
            &["nftables", "ebpf, iptables and none"],
        ),
        (
            "",
            &[],
            &["--iptables-backend", "xtables"],
            &["xtables", "auto, nft and legacy"],
        ),
        (
            "probe-sources: kubelet\n",
            &[],
            &[],
            &[
                "probe-sources",
                "\"kubelet\"",
                "auto, node or none",
                "a cgroup like",
            ],
        ),
        (
            "",
            &[],
            &["--probe-sources", "/a/../b"],
            &["/a/../b", "auto, node or none"],
        ),
    ];
    for (file, variables, flags, expected) in table {
        let error = load(file, variables, flags).unwrap_err();
        for part in expected {
            assert!(
                error.contains(part),
                "{file:?} {variables:?}: {part:?} is not in {error:?}"
            );
        }
    }
    let absent = Config::load(
        Settings::default(),
        Some(Path::new("/nonexistent.yaml")),
        &BTreeMap::new(),
    );
    let error = Chain(&absent.unwrap_err()).to_string();
    assert!(error.contains("/nonexistent.yaml: No such file"), "{error}");
}

#[test]
fn the_grace_is_a_little_less_than_kubernetes_gives() {
    for (given, seconds) in [
        (None, 5),
        (Some(30), 25),
        (Some(11), 6),
        (Some(10), 9),
        (Some(1), 1),
        (Some(0), 1),
    ] {
        assert_eq!(shutdown_grace(given), Duration::from_secs(seconds), "{given:?}");
    }
    let variables = [
        ("TERMINATION_GRACE_PERIOD_SECONDS", "30"),
        ("CONNECTION_TERMINATION_DEADLINE", "7s"),
    ];
    assert_eq!(
        load("", &variables, &[]).unwrap().shutdown_grace.0,
        Duration::from_secs(7)
    );
    assert_eq!(
        load("", &variables[..1], &[]).unwrap().shutdown_grace.0,
        Duration::from_secs(25)
    );
}

#[test]
fn control_planes_are_reached_as_ztunnel_s_variables_say_and_their_secrets_are_not_shown() {
    let config = load(
        "",
        &[
            ("XDS_ADDRESS", "istiod.istio-system.svc:15012"),
            ("XDS_ROOT_CA", "SYSTEM"),
            ("XDS_HEADER_X-Key", "hidden"),
            ("CA_ADDRESS", "http://localhost:1"),
            ("ALT_CA_HOSTNAME", "ca.example"),
            ("CA_ROOT_CA", "/roots.pem"),
            ("AUTH_TOKEN", "hidden"),
            ("ISTIO_META_CLUSTER_ID", "east"),
            ("ISTIO_METAJSON_LABELS", "{\"a\": 1}"),
            ("NODE_NAME", "node-1"),
            ("POD_NAME", "agent-x"),
        ],
        &[],
    );
    let config = config.unwrap();
    let shown = serde_json::to_value(&config).unwrap();
    assert_eq!(
        shown["xds"],
        serde_json::json!({
            "address": "https://istiod.istio-system.svc:15012", "roots": "SYSTEM", "altHostname": null,
            "token": "literal", "headers": ["x-key"],
        })
    );
    assert_eq!(
        shown["certificates"]["authority"],
        serde_json::json!({
            "address": "http://localhost:1", "roots": "/roots.pem", "altHostname": "ca.example",
            "token": "literal", "headers": [],
        })
    );
    assert!(!shown.to_string().contains("hidden") && !format!("{config:?}").contains("hidden"));
    let identity = &config.xds_identity;
    assert_eq!((&*identity.node_name, &*identity.pod_name), ("node-1", "agent-x"));
    assert_eq!(identity.metadata["CLUSTER_ID"], "east");
    assert_eq!(identity.metadata["LABELS"]["a"], 1);

    let off = [("XDS_ADDRESS", ""), ("CA_ADDRESS", "")];
    let config = load("", &off, &[]).unwrap();
    assert!(config.xds.is_none() && dev_ca(&config, true));
    let fake = [("CA_ADDRESS", "istiod:15012"), ("FAKE_CA", "true")];
    assert!(dev_ca(&load("", &fake, &[]).unwrap(), false));
}

fn dev_ca(config: &Config, by_default: bool) -> bool {
    matches!(config.certificates, Certificates::DevCa { by_default: found } if found == by_default)
}

#[test]
fn certificates_come_from_files_or_from_a_socket() {
    let config = load("", &[("CA_ADDRESS", "")], &["--cert-dir", "/certificates"]).unwrap();
    assert!(
        matches!(config.certificates, Certificates::Directory(path) if path == Path::new("/certificates"))
    );
    for socket in [
        "unix:///run/spire.sock",
        "unix:/run/spire.sock",
        "/run/spire.sock",
    ] {
        let config = load("", &[("SPIFFE_ENDPOINT_SOCKET", socket)], &[]).unwrap();
        let shown = serde_json::to_value(&config).unwrap();
        let expected = serde_json::json!({ "workloadApi": "unix:///run/spire.sock" });
        assert_eq!(shown["certificates"], expected);
    }
}

#[test]
fn certificates_come_from_a_signer_of_the_own_cluster_or_of_a_kubeconfig_s() {
    let signer = [
        ("CERT_SIGNER_NAME", "example.com/mesh"),
        ("CERT_SIGNER_ROOT_CA", "/roots.pem"),
    ];
    let own = [
        ("KUBERNETES_SERVICE_HOST", "fd00::1"),
        ("KUBERNETES_SERVICE_PORT", "443"),
    ];
    let config = load("", &[&signer[..], &own[..]].concat(), &[]).unwrap();
    assert_eq!(
        serde_json::to_value(&config).unwrap()["certificates"],
        serde_json::json!({ "signer": {
            "cluster": "https://[fd00::1]:443", "name": "example.com/mesh", "roots": "/roots.pem", "approve": false,
        } })
    );
    let flags = [
        "--kubeconfig",
        "/kubeconfig",
        "--kubernetes-signer-approve",
        "--svid-ttl",
        "10m",
    ];
    let config = load("", &[&signer[..], &own[..]].concat(), &flags).unwrap();
    let shown = &serde_json::to_value(&config).unwrap()["certificates"]["signer"];
    assert_eq!(
        (&shown["cluster"], &shown["approve"]),
        (&"kubeconfig /kubeconfig".into(), &true.into())
    );
    // Without a signer, a kubeconfig means nothing.
    let alone = load("", &[("KUBECONFIG", "/kubeconfig"), ("FAKE_CA", "true")], &[]);
    assert!(dev_ca(&alone.unwrap(), false));
}
