//! Values of settings that have a form of their own.

use std::{convert::Infallible, fmt, num::NonZeroUsize, str::FromStr, time::Duration};

use serde::{Serialize, Serializer};

/// Which backend redirects the pods' traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Redirect {
    /// eBPF programs in the pod.
    Ebpf,
    /// Istio's iptables rules in the pod.
    Iptables,
    /// Nobody, or rules that are in the pod already.
    None,
}

impl fmt::Display for Redirect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ebpf => "ebpf",
            Self::Iptables => "iptables",
            Self::None => "none",
        })
    }
}

/// Why a text is not a [`Redirect`].
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is not a way of redirection: there are ebpf, iptables and none")]
pub struct InvalidRedirect(String);

impl FromStr for Redirect {
    type Err = InvalidRedirect;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "ebpf" => Ok(Self::Ebpf),
            "iptables" => Ok(Self::Iptables),
            "none" => Ok(Self::None),
            _ => Err(InvalidRedirect(text.to_owned())),
        }
    }
}

/// Whether an agent asks one that runs to let it take over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Takeover {
    /// If there is one.
    Auto,
    /// No: it ends when there is one.
    #[default]
    Never,
}

/// Why a text is not a [`Takeover`].
#[derive(Debug, thiserror::Error)]
#[error("{0:?} does not say whether to take over: there are auto and never")]
pub struct InvalidTakeover(String);

impl FromStr for Takeover {
    type Err = InvalidTakeover;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            "never" => Ok(Self::Never),
            _ => Err(InvalidTakeover(text.to_owned())),
        }
    }
}

/// Names with commas between; none where there is nothing between.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Names(pub Vec<String>);

impl FromStr for Names {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
        Ok(Self(names.map(str::to_owned).collect()))
    }
}

/// A length of time, as text: `1h30m`, `5m`, `1.5s`, `200ms`; Go's form, as Istio's settings have it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Span(pub Duration);

/// Why a text is not a [`Span`].
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is not a length of time like 5m, 90s, 1h30m or 200ms")]
pub struct InvalidSpan(String);

impl FromStr for Span {
    type Err = InvalidSpan;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse_span(text)
            .map(Self)
            .ok_or_else(|| InvalidSpan(text.to_owned()))
    }
}

fn parse_span(text: &str) -> Option<Duration> {
    if text == "0" {
        return Some(Duration::ZERO);
    }
    let (mut rest, mut total) = (text, Duration::ZERO);
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, tail) = rest.split_at(digits);
        let unit_length = tail.find(|c: char| c.is_ascii_digit()).unwrap_or(tail.len());
        let (unit, next) = tail.split_at(unit_length);
        let unit_seconds = match unit {
            "ns" => 1e-9,
            "us" => 1e-6,
            "ms" => 1e-3,
            "s" => 1.0,
            "m" => 60.0,
            "h" => 3600.0,
            _ => return None,
        };
        let seconds = number.parse::<f64>().ok()? * unit_seconds;
        total = total.checked_add(Duration::try_from_secs_f64(seconds).ok()?)?;
        rest = next;
    }
    (!text.is_empty()).then_some(total)
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Number of worker threads: `4`, or `50%` of the CPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Workers {
    /// So many.
    Count(NonZeroUsize),
    /// A share of the CPUs, in percent.
    Percent(u32),
}

/// Why a text is not a number of [`Workers`].
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is neither a number of threads nor a percentage of the CPUs")]
pub struct InvalidWorkers(String);

impl Workers {
    /// How many threads that are on a machine with `cpus`.
    pub fn count(self, cpus: usize) -> usize {
        match self {
            Self::Count(count) => count.get(),
            Self::Percent(percent) => (cpus * percent as usize).div_ceil(100).max(1),
        }
    }
}

impl FromStr for Workers {
    type Err = InvalidWorkers;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid = || InvalidWorkers(text.to_owned());
        match text.strip_suffix('%') {
            Some(percent) => match percent.parse() {
                Ok(percent @ 1..=100) => Ok(Self::Percent(percent)),
                _ => Err(invalid()),
            },
            None => text
                .parse()
                .ok()
                .filter(|count: &NonZeroUsize| count.get() <= 1024)
                .map(Self::Count)
                .ok_or_else(invalid),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_read() {
        for (text, millis) in [
            ("5m", 300_000),
            ("1h30m", 5_400_000),
            ("1.5s", 1500),
            ("200ms", 200),
            ("0s", 0),
            ("0", 0),
            ("24h", 86_400_000),
        ] {
            assert_eq!(
                text.parse::<Span>().unwrap().0,
                Duration::from_millis(millis),
                "{text}"
            );
        }
        for bad in ["", "5", "m", "5 m", "-5m", "5x", "1.2.3s", "5m3", "1e300h", "∞s"] {
            assert!(bad.parse::<Span>().is_err(), "{bad}");
        }
    }

    #[test]
    fn workers_are_counted() {
        for (text, cpus, count) in [("3", 8, 3), ("50%", 8, 4), ("1%", 8, 1), ("100%", 3, 3)] {
            assert_eq!(text.parse::<Workers>().unwrap().count(cpus), count, "{text}");
        }
        for bad in ["0", "0%", "101%", "-1", "many", ""] {
            assert!(bad.parse::<Workers>().is_err(), "{bad}");
        }
    }
}
