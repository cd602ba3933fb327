//! The ways of redirecting that are compared.

use anyhow::{Context, Result, ensure};
use aya::programs::{SchedClassifier, TcAttachType};
use clap::ValueEnum;
use redirector_tests::{
    agent::{Options, Redirect},
    mesh::Mesh,
};

use crate::{machine, results::Compared};

/// A way of redirecting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Mode {
    /// No agent in the way: the floor
    None,
    /// The in-pod rules, by iptables-nft
    Nft,
    /// The in-pod rules, by iptables-legacy
    Legacy,
    /// eBPF, attached with clsact filters
    Clsact,
    /// eBPF, attached with TCX links
    Tcx,
}

/// The log of the agents that are measured: as it is by default, and how long the backend took with each pod.
const LOG: &str = "info,redirector::pods::work=debug";

impl Compared for Mode {
    fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Nft => "iptables-nft",
            Self::Legacy => "iptables-legacy",
            Self::Clsact => "ebpf, clsact",
            Self::Tcx => "ebpf, TCX",
        }
    }

    fn colour(self) -> (u8, u8, u8) {
        match self {
            Self::None => (0x9e, 0x9e, 0x9e),
            Self::Nft => (0xe6, 0x9f, 0x00),
            Self::Legacy => (0xa6, 0x5a, 0x1e),
            Self::Clsact => (0x56, 0xb4, 0xe9),
            Self::Tcx => (0x00, 0x5a, 0xa0),
        }
    }
}

impl Mode {
    pub(crate) fn is_ebpf(self) -> bool {
        matches!(self, Self::Clsact | Self::Tcx)
    }

    pub(crate) fn is_iptables(self) -> bool {
        matches!(self, Self::Nft | Self::Legacy)
    }

    /// Every mode that this kernel can have.
    pub(crate) fn available() -> Vec<Self> {
        let all = Self::value_variants().iter().copied();
        all.filter(|mode| *mode != Self::Tcx || has_tcx()).collect()
    }

    /// Checks that the pods of a mesh are captured in this mode, and not in one that was fallen back to.
    pub(crate) fn verify(self, mesh: &Mesh) -> Result<()> {
        let programs = match has_tcx() {
            true => mesh
                .client
                .ns
                .run(|| SchedClassifier::query_tcx("eth0", TcAttachType::Egress))
                .context("asking for the TCX programs of a pod")?
                .1
                .len(),
            false => 0,
        };
        let expected = usize::from(self == Self::Tcx);
        ensure!(
            programs == expected,
            "{}: there are {programs} TCX programs at a pod's egress, not {expected}",
            self.name()
        );
        Ok(())
    }

    /// How its agent is started.
    pub(crate) fn options(self) -> Options {
        let mut options = Options {
            force_clsact: self == Self::Clsact,
            redirect: match self {
                Self::None => Redirect::None,
                Self::Nft => Redirect::IptablesNft,
                Self::Legacy => Redirect::IptablesLegacy,
                Self::Clsact | Self::Tcx => Redirect::Ebpf,
            },
            ..Options::default()
        };
        options.arguments = vec!["--log-level".to_owned(), LOG.to_owned()];
        options
    }
}

/// Those of the modes that carry traffic: the programs of clsact filters are those of TCX links, so where both are asked for the
/// filters are measured only where they differ, at enrolment.
pub(crate) fn with_traffic(modes: &[Mode]) -> Vec<Mode> {
    let both = modes.contains(&Mode::Tcx);
    modes
        .iter()
        .copied()
        .filter(|mode| !(both && *mode == Mode::Clsact))
        .collect()
}

/// TCX links came with Linux 6.6.
pub(crate) fn has_tcx() -> bool {
    machine::kernel_is_at_least((6, 6))
}
