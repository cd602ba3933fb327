//! What a row of the table is, and how the table is written into docs/redirection.md.

use std::fmt::Write as _;

use redirector_tests::{
    agent::{Options, Redirect},
    node::Family,
};

use crate::scene::Scene;

/// A flow class: what it is, what is to become of it, and how that is seen.
pub(crate) struct Row {
    /// Name of its tests, together with backend and family.
    pub(crate) name: &'static str,
    /// Families that have it.
    pub(crate) families: &'static [Family],
    /// What flows, in words.
    pub(crate) what: &'static str,
    /// Makes it flow, and asserts what the row alone knows of it.
    pub(crate) flow: fn(&Scene) -> Answer,
    /// What becomes of it with the programs.
    pub(crate) ebpf: Outcome,
    /// What becomes of it with Istio's rules.
    pub(crate) iptables: Outcome,
    /// What is looked at beside what the outcome itself has looked at ([`Outcome::evidence`]).
    pub(crate) seen: &'static str,
    /// Why the two differ; without a difference, what else there is to say.
    pub(crate) why: &'static str,
}

/// What the two ends of a flow say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The application answered.
    Answered,
    /// A SYN made by hand was acknowledged: a listener has it. There is no connection behind such a SYN.
    HalfOpen,
    /// Refused, or ended without a byte.
    Refused,
    /// Neither.
    Silence,
}

/// What becomes of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// To the proxy, and by HBONE to the other pod.
    Hbone,
    /// To the proxy at 15001, and on in plain.
    Outbound,
    /// To the proxy at 15006, and on to the application.
    Inbound,
    /// Past the proxy.
    Untouched,
    /// Refused, whether by the proxy or in its stead.
    Refused,
    /// Nothing of it arrives, and nobody answers.
    Dropped,
}

impl Outcome {
    pub(crate) const ALL: [Self; 6] = [
        Self::Hbone,
        Self::Outbound,
        Self::Inbound,
        Self::Untouched,
        Self::Refused,
        Self::Dropped,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Hbone => "HBONE",
            Self::Outbound => "captured outbound",
            Self::Inbound => "captured inbound",
            Self::Untouched => "untouched",
            Self::Refused => "refused",
            Self::Dropped => "dropped",
        }
    }

    /// What `judge` looks at for it, in words.
    fn evidence(self) -> &'static str {
        match self {
            Self::Hbone => {
                "the access log has the connection in both directions with both identities; no SYN on the wire but to 15008, \
                 and none of the request's bytes; the lookup gave it to 15001, or its tunnel to 15008"
            }
            Self::Outbound => {
                "the access log has the connection, outbound and without identities; egress counted it as captured, the lookup \
                 gave it to 15001, and egress let the proxy's own connection pass"
            }
            Self::Inbound => {
                "the access log has the connection, inbound and without identities; the lookup gave it to 15006"
            }
            Self::Untouched => {
                "the access log has nothing; neither egress nor the lookup counted anything as captured, refused or given to \
                 a listener of the proxy"
            }
            Self::Refused => {
                "the client has an error, or the end without a byte; none of the request's bytes leave an enrolled pod"
            }
            Self::Dropped => "no answer; nothing of the flow on the wire, or nothing that its target takes",
        }
    }
}

/// A way to redirect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Backend {
    /// The programs, attached by TCX links.
    Tcx,
    /// The programs, attached as clsact filters.
    Clsact,
    /// Istio's rules, by iptables.
    Iptables,
}

impl Backend {
    pub(crate) const ALL: [Self; 3] = [Self::Tcx, Self::Clsact, Self::Iptables];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Tcx => "tcx",
            Self::Clsact => "clsact",
            Self::Iptables => "iptables",
        }
    }

    pub(crate) fn options(self) -> Options {
        Options {
            force_clsact: self == Self::Clsact,
            redirect: if self.is_ebpf() {
                Redirect::Ebpf
            } else {
                Redirect::IptablesNft
            },
            ..Options::default()
        }
    }

    /// Whether there are programs, and their counters.
    pub(crate) fn is_ebpf(self) -> bool {
        matches!(self, Self::Tcx | Self::Clsact)
    }
}

impl Row {
    pub(crate) fn outcome(&self, backend: Backend) -> Outcome {
        if backend.is_ebpf() {
            self.ebpf
        } else {
            self.iptables
        }
    }

    /// The row as the document has it.
    fn line(&self) -> String {
        let family = match self.families {
            [Family::V4] => ", IPv4",
            [Family::V6] => ", IPv6",
            _ => "",
        };
        let (ebpf, iptables) = (self.ebpf.name(), self.iptables.name());
        let outcome = if ebpf == iptables {
            format!("{ebpf} | same")
        } else {
            format!("{ebpf} | **{iptables}**")
        };
        let Self {
            name,
            what,
            seen,
            why,
            ..
        } = self;
        format!("| {name} | {what}{family} | {outcome} | {seen} | {why} |")
    }
}

/// The table as the document has it, between its two marks.
pub(crate) fn render(groups: &[(&str, &[Row])]) -> String {
    let mut text =
        String::from("What each outcome means, and what is looked at in every row that has it:\n\n");
    for outcome in Outcome::ALL {
        let _ = writeln!(text, "- **{}**: {}.", outcome.name(), outcome.evidence());
    }
    for (title, rows) in groups {
        let _ = write!(
            text,
            "\n### {title}\n\n| row | flow | eBPF | Istio's rules | looked at besides | remarks |\n|---|---|---|---|---|---|\n"
        );
        for row in *rows {
            text.push_str(&row.line());
            text.push('\n');
        }
    }
    text
}
