//! How the control planes are reached: certificate authority and discovery. Names and defaults are ztunnel's.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use serde::{Serialize, Serializer, ser::SerializeStruct};

use super::{Error, values::Span};
use crate::{
    control_plane::{Address, Auth, Config, Roots, Token, kubernetes::Cluster},
    discovery::xds,
    identity::kubernetes_csr,
};

/// Where the roots of Istio's control plane are mounted.
const DEFAULT_ROOT: &str = "./var/run/secrets/istio/root-cert.pem";
/// Where the token for it is mounted.
const DEFAULT_TOKEN: &str = "./var/run/secrets/tokens/istio-token";

/// The environment: every variable by its name.
pub type Environment = BTreeMap<String, String>;

/// A control plane. What is shown of it has no secrets.
#[derive(Debug, Clone)]
pub struct Plane(pub Config);

/// What the settings say of one.
pub(super) struct Given<'a> {
    /// The variables' names begin so: `XDS`, `CA`.
    pub(super) prefix: &'static str,
    pub(super) address: Option<String>,
    pub(super) roots: Option<String>,
    pub(super) alt_hostname: Option<String>,
    pub(super) token: Option<&'a str>,
    pub(super) cluster_id: &'a str,
    pub(super) environment: &'a Environment,
}

impl Given<'_> {
    /// The plane; none when its address is empty.
    pub(super) fn plane(self) -> Result<Option<Plane>, Error> {
        let Some(address) = self.address.filter(|address| !address.is_empty()) else {
            return Ok(None);
        };
        let prefix = self.prefix;
        let problem =
            |name: String, error: &dyn std::fmt::Display| Error::Setting(format!("{name}: {error}"));
        let address: Address = address
            .parse()
            .map_err(|error| problem(format!("{prefix}_ADDRESS"), &error))?;
        let token = match self.token {
            Some(token) => Some(Token::from_setting(token)),
            None => Path::new(DEFAULT_TOKEN)
                .exists()
                .then(|| Token::File(DEFAULT_TOKEN.into())),
        };
        let cluster_id = self.cluster_id.parse();
        let mut auth = Auth {
            token,
            cluster_id: Some(cluster_id.map_err(|error| problem("CLUSTER_ID".to_owned(), &error))?),
            headers: Vec::new(),
        };
        let header_prefix = format!("{prefix}_HEADER_");
        for (name, value) in self.environment {
            if let Some(header) = name.strip_prefix(&header_prefix) {
                auth.add_header(header, value)
                    .map_err(|error| problem(name.clone(), &error))?;
            }
        }
        let roots = self.roots.as_deref().unwrap_or(DEFAULT_ROOT);
        Ok(Some(Plane(Config {
            address,
            roots: Roots::from_setting(roots),
            alt_hostname: self.alt_hostname,
            auth,
        })))
    }
}

impl Serialize for Plane {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Config {
            address,
            roots,
            alt_hostname,
            auth,
        } = &self.0;
        let roots = match roots {
            Roots::File(path) => path.display().to_string(),
            Roots::System => "SYSTEM".to_owned(),
            Roots::Inline(_) => "inline".to_owned(),
        };
        let token = auth.token.as_ref().map(|token| match token {
            Token::File(path) => path.display().to_string(),
            Token::Literal(_) => "literal".to_owned(),
        });
        let headers: Vec<_> = auth.headers.iter().map(|(name, _)| name.as_str()).collect();
        let mut shown = serializer.serialize_struct("Plane", 5)?;
        shown.serialize_field("address", &address.to_string())?;
        shown.serialize_field("roots", &roots)?;
        shown.serialize_field("altHostname", alt_hostname)?;
        shown.serialize_field("token", &token)?;
        shown.serialize_field("headers", &headers)?;
        shown.end()
    }
}

/// What a control plane is told of the agent beside its names: `ISTIO_META_x` is the text x, `ISTIO_METAJSON_x` is any JSON.
pub(super) fn identity(names: xds::Identity, environment: &Environment) -> Result<xds::Identity, Error> {
    let mut identity = names;
    for (name, value) in environment {
        if let Some(name) = name.strip_prefix("ISTIO_META_") {
            identity.metadata.insert(name.to_owned(), value.as_str().into());
        } else if let Some(key) = name.strip_prefix("ISTIO_METAJSON_") {
            let json = serde_json::from_str(value).map_err(|error| {
                Error::Setting(format!(
                    "{name}: it must be JSON, a text in quotes for example: {error}"
                ))
            })?;
            identity.metadata.insert(key.to_owned(), json);
        }
    }
    Ok(identity)
}

/// A signer of a Kubernetes cluster.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Signer {
    /// The cluster.
    #[serde(serialize_with = "super::as_text")]
    pub cluster: Cluster,
    /// The signer's name there.
    pub name: String,
    /// File of what its certificates lead to.
    pub roots: PathBuf,
    /// Whether its requests are approved by us.
    pub approve: bool,
}

/// What the settings say of it.
pub(super) struct GivenSigner<'a> {
    pub(super) name: Option<String>,
    pub(super) roots: Option<PathBuf>,
    pub(super) approve: Option<bool>,
    pub(super) kubeconfig: Option<PathBuf>,
    pub(super) lifetime: Span,
    pub(super) environment: &'a Environment,
}

impl GivenSigner<'_> {
    /// The signer; none when none is named.
    pub(super) fn signer(self) -> Result<Option<Signer>, Error> {
        let setting = |text: String| Err(Error::Setting(text));
        let Some(name) = self.name.filter(|name| !name.is_empty()) else {
            // Whoever gives these expects no certificates of the development CA.
            if self.roots.is_some() || self.approve == Some(true) {
                return setting(
                    "CERT_SIGNER_ROOT_CA (--kubernetes-signer-roots) and --kubernetes-signer-approve are for a signer, and none is named: \
                     give CERT_SIGNER_NAME (--kubernetes-signer), or leave them out"
                        .to_owned(),
                );
            }
            return Ok(None);
        };
        let (domain, rest) = name.split_once('/').unwrap_or_default();
        if !domain.contains('.') || rest.is_empty() || name.chars().any(char::is_whitespace) {
            return setting(format!(
                "CERT_SIGNER_NAME (--kubernetes-signer): {name:?} is no signer's name; write DOMAIN/NAME, example.com/mesh"
            ));
        }
        // What these sign, Kubernetes says; certificates of pods are not among it.
        if domain == "kubernetes.io" {
            return setting(format!(
                "CERT_SIGNER_NAME (--kubernetes-signer): {name} signs for parts of Kubernetes alone; name a signer of your own"
            ));
        }
        let Some(roots) = self.roots else {
            return setting(
                "CERT_SIGNER_ROOT_CA (--kubernetes-signer-roots) is missing: CERT_SIGNER_NAME (--kubernetes-signer) needs the \
                 file of the signer's root certificates beside it"
                    .to_owned(),
            );
        };
        if self.lifetime.0 < kubernetes_csr::MIN_LIFETIME {
            return setting(
                "SECRET_TTL (--svid-ttl): must be at least 10m with CERT_SIGNER_NAME (--kubernetes-signer)"
                    .to_owned(),
            );
        }
        let cluster = cluster(
            self.kubeconfig,
            self.environment,
            "CERT_SIGNER_NAME (--kubernetes-signer)",
        )?;
        Ok(Some(Signer {
            cluster,
            name,
            roots,
            approve: self.approve.unwrap_or(false),
        }))
    }
}

/// The cluster whose API is asked, as `for_what` wants.
pub(super) fn cluster(
    kubeconfig: Option<PathBuf>,
    environment: &Environment,
    for_what: &str,
) -> Result<Cluster, Error> {
    let variable = |name| environment.get(name).filter(|text| !text.is_empty());
    let pod = variable("KUBERNETES_SERVICE_HOST").zip(variable("KUBERNETES_SERVICE_PORT"));
    match (kubeconfig, pod) {
        (Some(path), _) => Ok(Cluster::Kubeconfig(path)),
        (None, Some((host, port))) => Ok(Cluster::own(host, port)),
        (None, None) => Err(Error::Setting(format!(
            "{for_what}: no Kubernetes is known; run the agent in a pod, or give KUBECONFIG (--kubeconfig)"
        ))),
    }
}

/// Where certificates come from.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Certificates {
    /// The development CA.
    DevCa {
        /// Nobody has chosen.
        by_default: bool,
    },
    /// An authority of Istio's kind.
    Authority(Plane),
    /// Files.
    Directory(PathBuf),
    /// A signer of a Kubernetes cluster.
    Signer(Signer),
    /// A SPIFFE Workload API.
    WorkloadApi(#[serde(serialize_with = "super::as_text")] Address),
}

impl Certificates {
    /// The one that is chosen. An authority's address may be in the environment all the same when `FAKE_CA` is: that is ztunnel's
    /// rule.
    pub(super) fn choose(
        fake_ca: bool,
        authority: Option<Plane>,
        signer: Option<Signer>,
        directory: Option<PathBuf>,
        socket: Option<String>,
    ) -> Result<Self, Error> {
        let socket = socket.filter(|socket| !socket.is_empty());
        let socket = socket.as_deref().map(workload_api).transpose()?;
        let chosen = [
            (fake_ca, "FAKE_CA=true (--fake-ca)"),
            (authority.is_some(), "CA_ADDRESS (--ca-address)"),
            (signer.is_some(), "CERT_SIGNER_NAME (--kubernetes-signer)"),
            (directory.is_some(), "--cert-dir"),
            (socket.is_some(), "SPIFFE_ENDPOINT_SOCKET (--spiffe-socket)"),
        ];
        let chosen: Vec<_> = chosen
            .into_iter()
            .filter(|(given, _)| *given)
            .map(|(_, name)| name)
            .collect();
        if chosen.len() > 1 {
            let text = format!(
                "certificates can come from one place only, and {} are given: leave out all but one",
                chosen.join(" and ")
            );
            return Err(Error::Setting(text));
        }
        Ok(match (authority, signer, directory, socket) {
            (Some(authority), ..) => Self::Authority(authority),
            (_, Some(signer), ..) => Self::Signer(signer),
            (_, _, Some(directory), _) => Self::Directory(directory),
            (.., Some(socket)) => Self::WorkloadApi(socket),
            _ => Self::DevCa { by_default: !fake_ca },
        })
    }
}

/// SPIFFE's `SPIFFE_Workload_Endpoint.md` section 4 knows sockets by TCP as well; by these a caller cannot be told.
fn workload_api(text: &str) -> Result<Address, Error> {
    let address = match text.starts_with('/') {
        true => Ok(Address::Unix(text.into())),
        false => text.parse(),
    };
    match address {
        Ok(address @ Address::Unix(_)) => Ok(address),
        _ => Err(Error::Setting(format!(
            "SPIFFE_ENDPOINT_SOCKET (--spiffe-socket): {text:?} is not a Unix socket; write unix:///PATH"
        ))),
    }
}
