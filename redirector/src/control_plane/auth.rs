//! What a request shows of its sender.

use std::{fmt, path::PathBuf};

use tonic::metadata::{Ascii, MetadataKey, MetadataMap, MetadataValue};

use super::Error;

/// What each request shows. Its `Debug` tells no secrets.
#[derive(Clone, Default)]
pub struct Auth {
    /// Sent as a bearer token.
    pub token: Option<Token>,
    /// Name of the cluster, sent as `clusterid`.
    pub cluster_id: Option<MetadataValue<Ascii>>,
    /// More headers, from settings.
    pub headers: Vec<(MetadataKey<Ascii>, MetadataValue<Ascii>)>,
}

/// A token, or where it is.
#[derive(Clone, PartialEq, Eq)]
pub enum Token {
    /// A file, read anew for each request: Kubernetes replaces it.
    File(PathBuf),
    /// Itself.
    Literal(String),
}

/// A setting that cannot be a header.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("header {0:?} cannot be sent: names are of letters, digits and -_., values of visible ASCII")]
pub struct InvalidHeader(String);

impl Token {
    /// A path, if there is such a file or if no token looks like that; else the token.
    pub fn from_setting(text: &str) -> Self {
        let path = PathBuf::from(text);
        let is_path = text.starts_with(['/', '.']);
        match is_path || path.exists() {
            true => Self::File(path),
            false => Self::Literal(text.to_owned()),
        }
    }

    /// As it is sent.
    pub(super) async fn header(&self) -> Result<MetadataValue<Ascii>, Error> {
        let (text, origin) = match self {
            Self::Literal(text) => (text.clone(), "the settings".to_owned()),
            Self::File(path) => {
                let text = tokio::fs::read_to_string(path).await;
                let text = text.map_err(|source| Error::Read {
                    what: "the token",
                    path: path.clone(),
                    source,
                })?;
                (text, path.display().to_string())
            }
        };
        let token = text.trim();
        if token.is_empty() {
            return Err(Error::Token(origin, "is empty"));
        }
        let header = format!("Bearer {token}").parse();
        let mut header: MetadataValue<Ascii> =
            header.map_err(|_| Error::Token(origin, "has characters that cannot be sent"))?;
        // Not into h2's tables of headers, nor into its logs.
        header.set_sensitive(true);
        Ok(header)
    }
}

impl Auth {
    /// Adds a header.
    ///
    /// # Errors
    /// When it cannot be one.
    pub fn add_header(&mut self, name: &str, value: &str) -> Result<(), InvalidHeader> {
        let invalid = || InvalidHeader(name.to_owned());
        let key = name.to_ascii_lowercase().parse().map_err(|_| invalid())?;
        let mut value: MetadataValue<Ascii> = value.parse().map_err(|_| invalid())?;
        value.set_sensitive(true);
        self.headers.push((key, value));
        Ok(())
    }

    /// Metadata of one request.
    pub(super) async fn metadata(&self) -> Result<MetadataMap, Error> {
        let mut metadata = MetadataMap::new();
        if let Some(token) = &self.token {
            metadata.insert("authorization", token.header().await?);
        }
        if let Some(cluster_id) = &self.cluster_id {
            metadata.insert("clusterid", cluster_id.clone());
        }
        for (name, value) in &self.headers {
            metadata.insert(name.clone(), value.clone());
        }
        Ok(metadata)
    }
}

impl fmt::Debug for Auth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.headers.iter().map(|(name, _)| name.as_str()).collect();
        f.debug_struct("Auth")
            .field("token", &self.token)
            .field("cluster_id", &self.cluster_id)
            .field("headers", &names)
            .finish()
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => f.debug_tuple("File").field(path).finish(),
            Self::Literal(_) => f.write_str("Literal"),
        }
    }
}
