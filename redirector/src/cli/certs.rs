//! `redirector certs`: the identities in use on the node, and until when their certificates are good.

use std::time::Duration;

use time::OffsetDateTime;

use super::{
    Question,
    output::{Cell, Form, Screen, Table, Tone, print, structured},
    words,
};
use crate::{
    admin::certificates::{Certificate, Identity, Standing},
    config::values::Span,
};

#[derive(Debug, clap::Args)]
pub(super) struct CertsArguments {
    #[command(flatten)]
    question: Question,
    /// End with 4 also where a certificate, or one that it leads to, ends within this time
    #[arg(long, value_name = "SPAN", default_value = "0s")]
    warn_within: Span,
}

/// Whether all is well.
pub(super) fn certs(arguments: &CertsArguments) -> anyhow::Result<bool> {
    let CertsArguments {
        question,
        warn_within,
    } = arguments;
    let Question { asked, output } = question;
    let (certificates, identities) = Identity::all(asked.client())?;
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
    use base64::Engine as _;

    use super::*;
    use crate::{
        admin::certificates::{moment, testing::identity},
        identity::testing::{TestCa, id},
    };

    const NOW: &str = "2026-03-04T00:00:00Z";

    #[test]
    fn the_table_has_the_issuer_and_the_reasons() {
        let now = moment(NOW).unwrap();
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
