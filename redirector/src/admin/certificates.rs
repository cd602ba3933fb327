//! The certificates of an agent as its clients read them, and how it stands with them.

use std::time::Duration;

use base64::Engine as _;
use serde::Deserialize;
use serde_json::Value;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};
use x509_parser::pem::Pem;

use super::client::{Client, Error};

/// A moment out of RFC 3339.
pub(crate) fn moment(text: &str) -> Option<OffsetDateTime> {
    OffsetDateTime::parse(text, &Rfc3339).ok()
}

/// What is read of an identity; what else the agent says goes on as it is.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Identity {
    pub(crate) identity: String,
    pub(crate) state: String,
    pub(crate) renewal_error: Option<String>,
    pub(crate) cert_chain: Vec<Certificate>,
    pub(crate) root_certs: Vec<Certificate>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Certificate {
    pub(crate) pem: String,
    pub(crate) serial_number: String,
    pub(crate) valid_from: String,
    pub(crate) expiration_time: String,
}

#[derive(Debug, Deserialize)]
struct Told {
    certificates: Vec<Value>,
}

impl Certificate {
    /// Who signed it.
    pub(crate) fn issuer(&self) -> Option<String> {
        let pem = base64::engine::general_purpose::STANDARD.decode(&self.pem).ok()?;
        let pem = Pem::iter_from_buffer(&pem).next()?.ok()?;
        Some(pem.parse_x509().ok()?.issuer().to_string())
    }

    /// When.
    pub(crate) fn ends(&self) -> Option<OffsetDateTime> {
        moment(&self.expiration_time)
    }
}

/// How it stands with an identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standing {
    Good,
    /// Something ends within the time that was asked for, or there is no certificate yet.
    Soon,
    /// There is none that is good.
    Bad,
}

impl Identity {
    /// Those that an agent has, as it says it and as they are read.
    pub(crate) fn all(client: Client) -> Result<(Vec<Value>, Vec<Self>), Error> {
        let mut path = "/certificates";
        let told = match client.json(path) {
            // An agent from before it had that; the dump has the same in it.
            Err(Error::Missing { .. }) => {
                path = "/config_dump";
                client.json(path)
            }
            told => told,
        };
        let Told { certificates } = told?;
        let read = certificates
            .iter()
            .map(Self::deserialize)
            .collect::<Result<_, _>>();
        let identities = read.map_err(|error| Error::Unreadable {
            address: client.address,
            path: path.to_owned(),
            why: error.to_string(),
        })?;
        Ok((certificates, identities))
    }

    /// How it stands, where what ends within this time ends soon.
    pub(crate) fn standing(&self, now: OffsetDateTime, within: Duration) -> Standing {
        if self.cert_chain.is_empty() {
            let is_new = self.state == "Initializing";
            return if is_new { Standing::Soon } else { Standing::Bad };
        }
        let ended = |certificate: &Certificate| certificate.ends().is_none_or(|end| end <= now);
        if self.state != "Available" || self.cert_chain.iter().any(ended) {
            return Standing::Bad;
        }
        let all = self.cert_chain.iter().chain(&self.root_certs);
        let mut ends = all.filter_map(Certificate::ends);
        match ends.any(|end| end <= now + within) {
            true => Standing::Soon,
            false => Standing::Good,
        }
    }

    /// Whether a root that peers must lead to ends so soon.
    pub(crate) fn roots_end_within(&self, now: OffsetDateTime, within: Duration) -> bool {
        let mut ends = self.root_certs.iter().filter_map(Certificate::ends);
        ends.any(|end| end <= now + within)
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    fn certificate(ends: &str) -> Certificate {
        Certificate {
            pem: String::new(),
            serial_number: "5".to_owned(),
            valid_from: "2026-03-03T00:00:00Z".to_owned(),
            expiration_time: ends.to_owned(),
        }
    }

    pub(crate) fn identity(state: &str, chain: &[&str], roots: &[&str]) -> Identity {
        Identity {
            identity: "spiffe://td/ns/a/sa/b".to_owned(),
            state: state.to_owned(),
            renewal_error: None,
            cert_chain: chain.iter().copied().map(certificate).collect(),
            root_certs: roots.iter().copied().map(certificate).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{testing::identity, *};

    const NOW: &str = "2026-03-04T00:00:00Z";

    #[test]
    fn what_ends_soon_is_told_from_what_has_ended() {
        let now = moment(NOW).unwrap();
        let (tomorrow, later) = ("2026-03-05T00:00:00Z", "2030-01-01T00:00:00Z");
        for (state, chain, roots, hours, expected) in [
            ("Available", &[tomorrow][..], &[later][..], 0, Standing::Good),
            ("Available", &[tomorrow], &[later], 23, Standing::Good),
            ("Available", &[tomorrow], &[later], 24, Standing::Soon),
            ("Available", &[later], &[later, tomorrow], 24, Standing::Soon),
            ("Available", &[later, tomorrow], &[later], 24, Standing::Soon),
            ("Available", &[NOW], &[later], 0, Standing::Bad),
            ("Available", &["?"], &[later], 0, Standing::Bad),
            ("Initializing", &[], &[], 0, Standing::Soon),
            ("Unavailable: the CA is away", &[], &[], 0, Standing::Bad),
        ] {
            let found = identity(state, chain, roots).standing(now, Duration::from_secs(hours * 3600));
            assert_eq!(found, expected, "{state} {chain:?} {roots:?} {hours}");
        }
    }
}
