//! `redirector certs`: the identities in use on the node, and until when their certificates are good.

use std::time::Duration;

use base64::Engine as _;
use serde::Deserialize;
use serde_json::Value;
use time::OffsetDateTime;
use x509_parser::pem::Pem;

use super::{
    Asked,
    output::{Cell, Form, Output, Screen, Table, Tone, print, structured},
    words,
};
use crate::{admin::client::Error, config::values::Span};

#[derive(Debug, clap::Args)]
pub(super) struct CertsArguments {
    #[command(flatten)]
    asked: Asked,
    #[command(flatten)]
    output: Output,
    /// End with 4 also where a certificate, or one that it leads to, ends within this time
    #[arg(long, value_name = "SPAN", default_value = "0s")]
    warn_within: Span,
}

/// What is read of an identity; what else the agent says goes on as it is.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Identity {
    identity: String,
    state: String,
    renewal_error: Option<String>,
    cert_chain: Vec<Certificate>,
    root_certs: Vec<Certificate>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Certificate {
    pem: String,
    serial_number: String,
    valid_from: String,
    expiration_time: String,
}

#[derive(Debug, Deserialize)]
struct Dump {
    certificates: Vec<Value>,
}

impl Certificate {
    fn issuer(&self) -> Option<String> {
        let pem = base64::engine::general_purpose::STANDARD.decode(&self.pem).ok()?;
        let pem = Pem::iter_from_buffer(&pem).next()?.ok()?;
        Some(pem.parse_x509().ok()?.issuer().to_string())
    }

    fn ends(&self) -> Option<OffsetDateTime> {
        words::moment(&self.expiration_time)
    }
}

/// How it stands with an identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    Good,
    /// Something ends within the time that was asked for, or there is no certificate yet.
    Soon,
    /// There is none that is good.
    Bad,
}

impl Identity {
    fn standing(&self, now: OffsetDateTime, within: Duration) -> Standing {
        let Some(leaf) = self.cert_chain.first() else {
            let is_new = self.state == "Initializing";
            return if is_new { Standing::Soon } else { Standing::Bad };
        };
        if self.state != "Available" || leaf.ends().is_none_or(|end| end <= now) {
            return Standing::Bad;
        }
        let all = self.cert_chain.iter().chain(&self.root_certs);
        let mut ends = all.filter_map(Certificate::ends);
        match ends.any(|end| end <= now + within) {
            true => Standing::Soon,
            false => Standing::Good,
        }
    }
}

/// Whether all is well.
pub(super) fn certs(arguments: &CertsArguments) -> anyhow::Result<bool> {
    let CertsArguments {
        asked,
        output,
        warn_within,
    } = arguments;
    let client = asked.client();
    let path = "/config_dump";
    let Dump { certificates } = client.json(path)?;
    let read = certificates
        .iter()
        .map(Identity::deserialize)
        .collect::<Result<Vec<_>, _>>();
    let identities = read.map_err(|error| Error::Unreadable {
        address: client.address,
        path: path.to_owned(),
        why: error.to_string(),
    })?;
    let now = OffsetDateTime::now_utc();
    print(match output.form {
        Form::Table | Form::Wide => {
            table(&identities, now, warn_within.0, output.form).render(Screen::of_stdout())
        }
        form => structured(&serde_json::json!({ "certificates": certificates }), form)?,
    })?;
    let is_good = |identity: &Identity| identity.standing(now, warn_within.0) == Standing::Good;
    Ok(identities.iter().all(is_good))
}

fn table(identities: &[Identity], now: OffsetDateTime, within: Duration, form: Form) -> Table {
    let is_wide = form == Form::Wide;
    let mut heads = vec!["IDENTITY", "STATE", "ENDS", "AT", "ISSUER"];
    if is_wide {
        heads.extend(["FROM", "SERIAL", "ROOTS END"]);
    }
    let mut table = Table::new(&heads, form);
    for identity in identities {
        let leaf = identity.cert_chain.first();
        let standing = identity.standing(now, within);
        let tone = match standing {
            Standing::Good => Tone::Good,
            Standing::Soon => Tone::Warning,
            Standing::Bad => Tone::Bad,
        };
        // `Unavailable: ` has the reason behind it, which is long.
        let (state, reason) = identity.state.split_once(": ").unwrap_or((&identity.state, ""));
        let end = leaf.and_then(Certificate::ends);
        let mut row = vec![
            Cell::from(&identity.identity),
            Cell::toned(state, tone),
            Cell::toned(
                end.map_or_else(String::new, |end| words::distance(end, now)),
                tone,
            ),
            Cell::from(leaf.map_or("", |leaf| &leaf.expiration_time)),
            Cell::from(leaf.and_then(Certificate::issuer).unwrap_or_default()),
        ];
        if is_wide {
            let roots = identity.root_certs.iter().filter_map(Certificate::ends).min();
            row.push(Cell::from(leaf.map_or("", |leaf| &leaf.valid_from)));
            row.push(Cell::from(leaf.map_or("", |leaf| &leaf.serial_number)));
            row.push(Cell::from(
                roots.map_or_else(String::new, |end| words::distance(end, now)),
            ));
        }
        let mut notes = Vec::new();
        if !reason.is_empty() {
            notes.push(Cell::toned(reason, Tone::Bad));
        }
        if let Some(error) = &identity.renewal_error {
            notes.push(Cell::toned(format!("not renewed: {error}"), Tone::Warning));
        }
        let chain = identity
            .cert_chain
            .iter()
            .skip(1)
            .map(|certificate| ("an intermediate", certificate));
        let roots = identity
            .root_certs
            .iter()
            .map(|certificate| ("a root", certificate));
        for (what, certificate) in chain.chain(roots) {
            if let Some(end) = certificate.ends().filter(|end| *end <= now + within) {
                let text = format!("{what} certificate ends {}", words::distance(end, now));
                notes.push(Cell::toned(text, Tone::Warning));
            }
        }
        table.row(row, notes);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::testing::{TestCa, id};

    const NOW: &str = "2026-03-04T00:00:00Z";

    fn certificate(ends: &str) -> Certificate {
        Certificate {
            pem: String::new(),
            serial_number: "5".to_owned(),
            valid_from: "2026-03-03T00:00:00Z".to_owned(),
            expiration_time: ends.to_owned(),
        }
    }

    fn identity(state: &str, chain: &[&str], roots: &[&str]) -> Identity {
        Identity {
            identity: "spiffe://td/ns/a/sa/b".to_owned(),
            state: state.to_owned(),
            renewal_error: None,
            cert_chain: chain.iter().copied().map(certificate).collect(),
            root_certs: roots.iter().copied().map(certificate).collect(),
        }
    }

    #[test]
    fn what_ends_soon_is_told_from_what_has_ended() {
        let now = words::moment(NOW).unwrap();
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

    #[test]
    fn the_table_has_the_issuer_and_the_reasons() {
        let now = words::moment(NOW).unwrap();
        let leaf = TestCa::new().leaf(&[&id("web").to_string()], |_| {});
        let pem = crate::identity::pem("CERTIFICATE", &leaf.certificate);
        let mut good = identity("Available", &["2026-03-05T00:00:00Z"], &["2026-03-04T01:00:00Z"]);
        good.cert_chain[0].pem = base64::engine::general_purpose::STANDARD.encode(pem);
        good.renewal_error = Some("no answer".to_owned());
        let issuer = good.cert_chain[0].issuer().unwrap();
        assert!(issuer.contains('='), "{issuer}");
        let bad = identity("Unavailable: the CA is away", &[], &[]);
        let text = table(&[good, bad], now, Duration::from_secs(7200), Form::Wide).render(Screen::default());
        for expected in [
            &issuer,
            "in 1 d",
            "not renewed: no answer",
            "a root certificate ends in 1 h",
            "Unavailable  ",
            "    the CA is away\n",
        ] {
            assert!(text.contains(expected), "{expected} in {text}");
        }
    }
}
