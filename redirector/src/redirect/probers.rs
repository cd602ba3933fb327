//! Who probes the pods of this node: kubelet's cgroup, as it is found, or what the operator names.
//!
//! `config` makes [`Sources`], a backend with programs owns a `search`, `app` has it look every few seconds, and `admin` shows the
//! [`View`].

use std::{
    fmt,
    path::{Component, Path, PathBuf},
    str::FromStr,
};

use serde::{Deserialize, Serialize, Serializer};

mod search;

pub(in crate::redirect) use search::Search;

/// Whose connections from this node to an enrolled pod are left alone.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Sources {
    /// Those of kubelet's cgroup; of any process of the node as long as no kubelet has been found that can be told from others.
    Auto,
    /// Those of any process in the node's network namespace.
    Node,
    /// Nobody's.
    #[default]
    None,
    /// Those of processes in these cgroups and below.
    Cgroups(Vec<PathBuf>),
}

impl Sources {
    /// Most cgroups.
    pub const MAX_CGROUPS: usize = 8;
}

/// Why a text is not [`Sources`].
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum InvalidSources {
    /// Not a word of ours and not a path.
    #[error("{0:?} is neither auto, node or none, nor a cgroup like /system.slice/kubelet.service")]
    Path(String),
    /// Too many paths.
    #[error("{0} cgroups are named; at most {max} are supported", max = Sources::MAX_CGROUPS)]
    TooMany(usize),
}

impl FromStr for Sources {
    type Err = InvalidSources;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => return Ok(Self::Auto),
            "node" => return Ok(Self::Node),
            "none" => return Ok(Self::None),
            _ => {}
        }
        let path = |text: &str| {
            let path = Path::new(text);
            let plain = |c: Component<'_>| matches!(c, Component::RootDir | Component::Normal(_));
            if path.is_absolute() && path.components().all(plain) {
                Ok(path.to_owned())
            } else {
                Err(InvalidSources::Path(text.to_owned()))
            }
        };
        let paths = text
            .split(',')
            .map(|text| path(text.trim()))
            .collect::<Result<Vec<_>, _>>()?;
        if paths.len() > Self::MAX_CGROUPS {
            return Err(InvalidSources::TooMany(paths.len()));
        }
        Ok(Self::Cgroups(paths))
    }
}

impl fmt::Display for Sources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Node => f.write_str("node"),
            Self::None => f.write_str("none"),
            Self::Cgroups(paths) => {
                let paths: Vec<_> = paths.iter().map(|path| path.to_string_lossy()).collect();
                f.write_str(&paths.join(","))
            }
        }
    }
}

impl Serialize for Sources {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Which rule is in force.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rule {
    /// Processes of the node in some cgroups.
    Cgroups,
    /// All processes of the node.
    Node,
    /// Nobody.
    None,
}

/// Which rule is in force, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct View {
    /// The rule.
    pub rule: Rule,
    /// Its cgroups that exist.
    pub cgroups: Vec<PathBuf>,
    /// How they were found, or why the rule is not another.
    pub reason: String,
    /// The rule is what was asked for, and lacks nothing.
    pub as_asked: bool,
}

impl fmt::Display for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, reason) = (self.rule, &self.reason);
        match what {
            Rule::None => write!(f, "captured like everything else ({reason})"),
            Rule::Node => write!(f, "those of any process of the node ({reason})"),
            Rule::Cgroups => {
                let cgroups: Vec<_> = self.cgroups.iter().map(|path| path.to_string_lossy()).collect();
                let cgroups = if cgroups.is_empty() {
                    "no cgroup at present".to_owned()
                } else {
                    cgroups.join(", ")
                };
                write!(f, "those of {cgroups} ({reason})")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_read_and_told() {
        let path = |text: &str| Sources::Cgroups(text.split(',').map(PathBuf::from).collect());
        for (text, expected) in [
            ("auto", Sources::Auto),
            ("node", Sources::Node),
            ("none", Sources::None),
            ("/a/b.service", path("/a/b.service")),
            ("/a,/b", path("/a,/b")),
        ] {
            let sources: Sources = text.parse().unwrap();
            assert_eq!(sources, expected);
            assert_eq!(sources.to_string(), text);
        }
        for bad in ["", "kubelet", "Auto", "/a,", "/a/../b", "a/b", "/a,node"] {
            assert!(
                matches!(bad.parse::<Sources>(), Err(InvalidSources::Path(_))),
                "{bad}"
            );
        }
        assert_eq!(
            ["/a"; 9].join(",").parse::<Sources>(),
            Err(InvalidSources::TooMany(9))
        );
    }
}
