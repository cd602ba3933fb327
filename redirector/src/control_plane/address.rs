//! Addresses of control planes.

use std::{fmt, path::PathBuf, str::FromStr};

use http::Uri;

/// Where a control plane is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// Over TLS, in which the server shows a certificate and the client does not: `https://host:port`.
    Tls(Uri),
    /// Without: `http://host:port`, for loopback.
    Plain(Uri),
    /// A Unix socket: `unix:///path`.
    Unix(PathBuf),
}

/// A text that is no address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not an address of a control plane: {1}; write https://HOST:PORT, http://HOST:PORT or unix:///PATH"
)]
pub struct InvalidAddress(String, &'static str);

impl FromStr for Address {
    type Err = InvalidAddress;

    /// Without a scheme, it is https.
    fn from_str(text: &str) -> Result<Self, InvalidAddress> {
        let invalid = |why| InvalidAddress(text.to_owned(), why);
        if let Some(path) = text.strip_prefix("unix:") {
            // Both forms of gRPC's naming: unix:path and unix:///absolute.
            let path = PathBuf::from(path.strip_prefix("//").unwrap_or(path));
            return match path.is_absolute() {
                true => Ok(Self::Unix(path)),
                false => Err(invalid("the path must begin at the root")),
            };
        }
        let url = match text.contains("://") {
            true => text.to_owned(),
            false => format!("https://{text}"),
        };
        let uri: Uri = url.parse().map_err(|_| invalid("it is not a URL"))?;
        let authority = uri.authority().ok_or_else(|| invalid("there is no host"))?;
        if authority.as_str().contains('@') {
            return Err(invalid("there is no room for user names in it"));
        }
        if authority.host().is_empty() {
            return Err(invalid("there is no host"));
        }
        if uri.port_u16().is_none_or(|port| port == 0) {
            return Err(invalid("there is no port"));
        }
        if uri.path_and_query().is_some_and(|rest| rest.as_str() != "/") {
            return Err(invalid("there is no room for a path in it"));
        }
        match uri.scheme_str() {
            Some("https") => Ok(Self::Tls(uri)),
            Some("http") => Ok(Self::Plain(uri)),
            _ => Err(invalid("this scheme is not known")),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tls(uri) | Self::Plain(uri) => {
                let scheme = uri.scheme_str().unwrap_or_default();
                let authority = uri.authority().map(ToString::to_string).unwrap_or_default();
                write!(f, "{scheme}://{authority}")
            }
            Self::Unix(path) => write!(f, "unix://{}", path.display()),
        }
    }
}

/// The host of a URL as names and addresses are written elsewhere, and its port or that of https. IPv6 is in brackets
/// in URLs alone.
pub(super) fn host_and_port(uri: &Uri) -> (&str, u16) {
    let host = uri.host().unwrap_or_default();
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    (bare.unwrap_or(host), uri.port_u16().unwrap_or(443))
}
