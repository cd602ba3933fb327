//! The ways between two pods that are compared.

use clap::ValueEnum;
use redirector_tests::{agent::Options, mesh::Mesh, workloads::Workloads};

use crate::results::Compared;

/// A way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Mode {
    /// The pods are not enrolled
    Direct,
    /// Through both proxies, in plain
    Plain,
    /// Through both proxies, over HBONE
    Hbone,
    /// Through the agent, which joins both pods' ends (--same-node-direct)
    SameNode,
    /// Over HBONE, by an agent that has no access log: what that costs
    Silent,
}

impl Compared for Mode {
    fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Plain => "plain",
            Self::Hbone => "HBONE",
            Self::SameNode => "same node",
            Self::Silent => "HBONE, no access log",
        }
    }

    fn colour(self) -> (u8, u8, u8) {
        match self {
            Self::Direct => (0x9e, 0x9e, 0x9e),
            Self::Plain => (0xe6, 0x9f, 0x00),
            Self::Hbone => (0x00, 0x5a, 0xa0),
            Self::SameNode => (0x00, 0x9e, 0x73),
            Self::Silent => (0xcc, 0x79, 0xa7),
        }
    }
}

impl Mode {
    /// Those of the page in docs/benchmarks.
    pub(crate) const BY_DEFAULT: [Self; 4] = [Self::Direct, Self::Plain, Self::Hbone, Self::SameNode];

    /// A node with an agent and two pods between which it goes this way.
    pub(crate) fn mesh(self, mut options: Options) -> Mesh {
        match self {
            Self::Direct => Mesh::started(options, |client, server| Workloads::hbone([client, server])),
            Self::Plain => Mesh::plaintext(options),
            Self::Hbone => Mesh::hbone(options),
            Self::SameNode => {
                options.arguments.push("--same-node-direct".to_owned());
                Mesh::hbone(options)
            }
            Self::Silent => {
                let arguments = ["--log-level", "info,access=off"];
                options.arguments.extend(arguments.map(str::to_owned));
                Mesh::hbone(options)
            }
        }
    }
}
