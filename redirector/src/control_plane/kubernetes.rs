//! The client of Kubernetes' API: where the API server is, and what each request shows.
//!
//! [`Kubernetes`] makes a client of the library kube when it is first asked for one, and another when address, roots or client
//! certificate have changed; the token is read anew for each request. TLS is this program's, not the library's, which
//! would choose a provider of cryptography for the whole process. What is asked of the API is the caller's matter.

use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use base64::Engine as _;
use http::Uri;
use kube::config::{AuthInfo, Cluster as NamedCluster, Kubeconfig, KubeconfigError};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject};
use secrecy::{ExposeSecret, SecretString};

use super::{Error, Token, address::host_and_port, tls};

mod connection;

/// Where Kubernetes puts what a pod reaches the API server with (`rest.InClusterConfig` of client-go).
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// Time from a request to the head of its answer. The API server gives a request a minute, and each webhook ten seconds of it.
const ANSWER_DEADLINE: Duration = Duration::from_secs(15);

/// Which cluster, and who we are there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cluster {
    /// The one that the agent is a pod of, by its service account.
    Own {
        /// Host and port of the API server.
        server: String,
        /// Where token and roots are.
        directory: PathBuf,
    },
    /// The current context of a kubeconfig file.
    Kubeconfig(PathBuf),
}

impl Cluster {
    /// The one of the pod, as Kubernetes names it in the environment.
    pub fn own(host: &str, port: &str) -> Self {
        let server = match host.contains(':') {
            true => format!("[{host}]:{port}"),
            false => format!("{host}:{port}"),
        };
        Self::Own {
            server,
            directory: SERVICE_ACCOUNT.into(),
        }
    }
}

impl fmt::Display for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Own { server, .. } => write!(f, "https://{server}"),
            Self::Kubeconfig(path) => write!(f, "kubeconfig {}", path.display()),
        }
    }
}

/// The API of one cluster.
#[derive(Debug)]
pub struct Kubernetes {
    cluster: Cluster,
    made: Mutex<Option<Made>>,
}

struct Made {
    from: Target,
    client: kube::Client,
}

impl Kubernetes {
    /// Of this cluster. Reads nothing yet.
    pub fn new(cluster: Cluster) -> Self {
        Self {
            cluster,
            made: Mutex::new(None),
        }
    }

    /// A client; it connects with its first request, and again after a loss. A request has a deadline for the head of its
    /// answer; how long the rest may take is the caller's matter. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// When what it needs cannot be read or used.
    pub async fn client(&self) -> Result<kube::Client, Error> {
        let cluster = self.cluster.clone();
        let target = tokio::task::spawn_blocking(move || Target::read(&cluster)).await;
        let target = target.expect("reading files does not panic")?;
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(made) = &*made
            && made.from == target
        {
            return Ok(made.client.clone());
        }
        let client = connection::client(&target)?;
        *made = Some(Made {
            from: target,
            client: client.clone(),
        });
        Ok(client)
    }
}

impl fmt::Debug for Made {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Made").finish_non_exhaustive()
    }
}

/// What a client is made from.
#[derive(PartialEq)]
struct Target {
    server: Uri,
    /// The name that its certificate has.
    name: ServerName<'static>,
    roots: Vec<CertificateDer<'static>>,
    /// Where the roots are from, for errors.
    origin: String,
    certificate: Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>,
    token: Option<Token>,
}

impl Target {
    /// As the files are now. Blocking.
    fn read(cluster: &Cluster) -> Result<Self, Error> {
        match cluster {
            Cluster::Own { server, directory } => Self::own(server, directory),
            Cluster::Kubeconfig(path) => Self::of_kubeconfig(path),
        }
    }

    fn own(server: &str, directory: &Path) -> Result<Self, Error> {
        let uri = format!("https://{server}/").parse::<Uri>();
        let uri = uri.map_err(|_| Error::Name(server.to_owned()))?;
        let path = directory.join("ca.crt");
        let roots = fs::read(&path).map_err(|source| Error::Read {
            what: "the API server's root certificates in",
            path: path.clone(),
            source,
        })?;
        Ok(Self {
            name: name(host_and_port(&uri).0)?,
            server: uri,
            roots: certificates(&roots),
            origin: path.display().to_string(),
            certificate: None,
            token: Some(Token::File(directory.join("token"))),
        })
    }

    fn of_kubeconfig(path: &Path) -> Result<Self, Error> {
        let problem = |problem: &str| Error::Kubeconfig {
            path: path.to_owned(),
            problem: problem.to_owned(),
        };
        let (cluster, user) = current(path)?;
        unsupported(&cluster, &user).map_err(|key| {
            problem(&format!(
                "{key} is not supported: write a token, tokenFile, or client-certificate and client-key, and the server's \
                 certificate-authority"
            ))
        })?;
        let server = cluster.server.unwrap_or_default();
        let uri: Uri = server.parse().map_err(|_| problem("server is not a URL"))?;
        if uri.scheme_str() != Some("https") || uri.host().is_none() {
            return Err(problem("server must be https://HOST:PORT"));
        }
        let data = |key, data: Option<&str>, file: Option<&String>| match (data, file) {
            (Some(data), _) => {
                let decoded = base64::engine::general_purpose::STANDARD.decode(data.trim());
                let decoded = decoded.map_err(|_| problem(&format!("{key}-data is not base64")));
                decoded.map(|bytes| Some(SecretBytes(bytes)))
            }
            (None, Some(file)) => {
                let source = |source: io::Error| problem(&format!("reading {key} {file}: {source}"));
                Ok(Some(SecretBytes(fs::read(file).map_err(source)?)))
            }
            (None, None) => Ok(None),
        };
        let roots = data(
            "certificate-authority",
            cluster.certificate_authority_data.as_deref(),
            cluster.certificate_authority.as_ref(),
        )?;
        let roots = roots.ok_or_else(|| problem("the cluster has no certificate-authority"))?;
        let chain = data(
            "client-certificate",
            user.client_certificate_data.as_deref(),
            user.client_certificate.as_ref(),
        )?;
        let key = user.client_key_data.as_ref().map(SecretString::expose_secret);
        let key = data("client-key", key, user.client_key.as_ref())?;
        let certificate = match (chain, key) {
            (None, None) => None,
            (Some(chain), Some(key)) => {
                let key = PrivateKeyDer::from_pem_slice(&key.0);
                let key = key.map_err(|_| problem("client-key holds no private key in PEM"))?;
                Some((certificates(&chain.0), key))
            }
            _ => return Err(problem("client-certificate and client-key belong together")),
        };
        let token = match (user.token_file, user.token) {
            (Some(file), _) => Some(Token::File(file.into())),
            (None, token) => token.map(|token| Token::Literal(token.expose_secret().to_owned())),
        };
        if token.is_none() && certificate.is_none() {
            return Err(problem(
                "the current context's user has no token, tokenFile or client-certificate",
            ));
        }
        Ok(Self {
            name: name(
                cluster
                    .tls_server_name
                    .as_deref()
                    .unwrap_or(host_and_port(&uri).0),
            )?,
            server: uri,
            roots: certificates(&roots.0),
            origin: format!("certificate-authority of {}", path.display()),
            certificate,
            token,
        })
    }

    /// TLS to it: 1.2 and later, HTTP/1.1.
    fn tls(&self) -> Result<Arc<rustls::ClientConfig>, Error> {
        tls::kubernetes(&self.roots, &self.origin, self.certificate.as_ref())
    }
}

/// Bytes that may be a key.
struct SecretBytes(Vec<u8>);

fn name(host: &str) -> Result<ServerName<'static>, Error> {
    ServerName::try_from(host.to_owned()).map_err(|_| Error::Name(host.to_owned()))
}

fn certificates(pem: &[u8]) -> Vec<CertificateDer<'static>> {
    CertificateDer::pem_slice_iter(pem).flatten().collect()
}

/// Cluster and user of the current context. What the library says of a file that it cannot parse may show its lines, and
/// with them its secrets: it is not repeated.
fn current(path: &Path) -> Result<(NamedCluster, AuthInfo), Error> {
    let problem = |problem: &str| Error::Kubeconfig {
        path: path.to_owned(),
        problem: problem.to_owned(),
    };
    let config = Kubeconfig::read_from(path).map_err(|error| match error {
        KubeconfigError::ReadConfig(source, path) => Error::Read {
            what: "the kubeconfig",
            path,
            source,
        },
        _ => problem("it is no YAML of kind Config; `kubectl config view` with it says more"),
    })?;
    let context = config.current_context.filter(|name| !name.is_empty());
    let context = context.ok_or_else(|| problem("it has no current-context"))?;
    let found = config.contexts.into_iter().find(|named| named.name == context);
    let found = found.and_then(|named| named.context);
    let found = found.ok_or_else(|| problem(&format!("there is no context {context:?}")))?;
    let cluster = config
        .clusters
        .into_iter()
        .find(|named| named.name == found.cluster);
    let cluster = cluster.and_then(|named| named.cluster);
    let cluster = cluster.ok_or_else(|| problem(&format!("there is no cluster {:?}", found.cluster)))?;
    let wanted = found.user.unwrap_or_default();
    let user = config.auth_infos.into_iter().find(|named| named.name == wanted);
    let user = user.and_then(|named| named.auth_info);
    let user = user.ok_or_else(|| problem(&format!("there is no user {wanted:?}")))?;
    Ok((cluster, user))
}

/// What is refused, since to pass it over would be to act as another, or by another way, than is said.
fn unsupported(cluster: &NamedCluster, user: &AuthInfo) -> Result<(), &'static str> {
    let impersonates =
        user.impersonate.is_some() || user.impersonate_uid.is_some() || user.impersonate_groups.is_some();
    let keys = [
        (
            cluster.insecure_skip_tls_verify == Some(true),
            "insecure-skip-tls-verify",
        ),
        (cluster.proxy_url.is_some(), "proxy-url"),
        (user.exec.is_some(), "exec"),
        (user.auth_provider.is_some(), "auth-provider"),
        (user.username.is_some() || user.password.is_some(), "username"),
        (impersonates || user.impersonate_user_extra.is_some(), "as"),
    ];
    match keys.into_iter().find(|(given, _)| *given) {
        Some((_, key)) => Err(key),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
