//! The pods of this node, as pod events name them.

use std::{fmt, str::FromStr, sync::Arc};

/// A pod's UID. It names files under the state directory and the bpffs, so its characters are checked.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PodUid(Arc<str>);

/// Why a text is not a [`PodUid`].
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "pod UID {uid:?} is not usable: 1 to {max} letters, digits, '-', '_' or '.', not starting with '.'",
    max = PodUid::MAX_LEN
)]
pub struct InvalidPodUid {
    uid: String,
}

impl PodUid {
    /// Longest accepted UID, in bytes. Kubernetes' own are 36; a file name may have 255.
    pub const MAX_LEN: usize = 200;

    /// The UID given to a pod whose event names none: namespace and name, which Kubernetes keeps unique at
    /// any one time. `_` is in neither, so no real pair can collide with another.
    pub fn from_name(namespace: &str, name: &str) -> Result<Self, InvalidPodUid> {
        format!("{namespace}_{name}").parse()
    }

    /// The UID as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for PodUid {
    type Err = InvalidPodUid;

    fn from_str(uid: &str) -> Result<Self, Self::Err> {
        let usable = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if uid.is_empty() || uid.len() > Self::MAX_LEN || uid.starts_with('.') || !uid.chars().all(usable) {
            return Err(InvalidPodUid {
                uid: uid.chars().take(Self::MAX_LEN).collect(),
            });
        }
        Ok(Self(uid.into()))
    }
}

impl fmt::Display for PodUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for PodUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Who a pod is, as its event says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodInfo {
    /// Kubernetes pod UID.
    pub uid: PodUid,
    /// Pod name.
    pub name: String,
    /// Kubernetes namespace.
    pub namespace: String,
    /// Kubernetes service account: with the namespace, the pod's identity.
    pub service_account: String,
}

/// Where this node is: what tells its pods from others of the same names, which the mesh may hold too.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Home {
    /// Its network; empty is the default one.
    pub network: String,
    /// Its Kubernetes cluster; empty when that is not known.
    pub cluster: String,
    /// Its name; empty when that is not known.
    pub node: String,
}

/// The local pod that a decision is for.
#[derive(Debug, Clone, Copy)]
pub struct Local<'a> {
    /// Who it is.
    pub info: &'a PodInfo,
    /// Where it is.
    pub home: &'a Home,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uids_that_could_leave_their_directory_are_refused() {
        for bad in [
            "",
            ".",
            "..",
            "../x",
            "a/b",
            "a b",
            "a\0",
            ".hidden",
            &"x".repeat(201),
        ] {
            assert!(bad.parse::<PodUid>().is_err(), "{bad:?}");
        }
        for good in ["7bdbcf1e-9a4c-4b0a-8f6d-0f3f5a1d2c3b", "shop_web-0", "a.b"] {
            assert_eq!(good.parse::<PodUid>().unwrap().as_str(), good);
        }
    }
}
