//! The certificates of the agent that runs.

use std::time::Duration;

use time::OffsetDateTime;

use super::Check;
use crate::{
    admin::{
        certificates::{Identity, Standing},
        client::{Client, Error, TIMEOUT},
    },
    config::Config,
};

/// A root that ends within this time is to be looked at now.
const SOON: Duration = Duration::from_secs(7 * 24 * 3600);

pub(super) fn checks(config: &Config) -> Vec<Check> {
    let client = Client {
        address: config.admin_addr,
        timeout: TIMEOUT,
    };
    let identities = Identity::all(client).map(|(_, identities)| identities);
    vec![judged(identities, OffsetDateTime::now_utc())]
}

fn judged(identities: Result<Vec<Identity>, Error>, now: OffsetDateTime) -> Check {
    let id = "certificates";
    let identities = match identities {
        Ok(identities) => identities,
        Err(error) => return Check::not_asked(id, format!("no agent tells of any: {error}")),
    };
    let of = |standing: Standing, within: Duration| {
        let those = identities
            .iter()
            .filter(move |one| one.standing(now, within) == standing);
        those.map(|one| one.identity.as_str()).collect::<Vec<_>>()
    };
    let count = identities.len();
    let bad = of(Standing::Bad, Duration::ZERO);
    if let [first, ..] = bad[..] {
        return Check::failed(
            id,
            format!(
                "{} of {count} identities have no good certificate, {first} for one",
                bad.len()
            ),
            "redirector certs says why",
        );
    }
    let is_new = |one: &&Identity| one.cert_chain.is_empty();
    let asked: Vec<_> = identities.iter().filter(is_new).collect();
    if let [first, ..] = asked[..] {
        return Check::warning(
            id,
            format!(
                "{} of {count} identities have no certificate yet, {} for one: they are asked for",
                asked.len(),
                first.identity
            ),
            "ask again in a few seconds; redirector certs tells what becomes of them",
        );
    }
    // A leaf lives for hours: what counts of it is whether it is renewed.
    let ending = |one: &&Identity| one.renewal_error.is_some() || one.roots_end_within(now, SOON);
    let soon: Vec<_> = identities.iter().filter(ending).collect();
    match soon[..] {
        [] => Check::ok(id, format!("all of {count} identities have a good certificate")),
        [first, ..] => Check::warning(
            id,
            format!(
                "{} of {count} identities have a certificate that is not renewed, or a root that ends within a week, {} for one",
                soon.len(),
                first.identity
            ),
            "redirector certs -o wide says which; look at the authority",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{admin::certificates::testing::identity, doctor::State};

    #[test]
    fn what_is_not_renewed_is_a_warning_and_what_has_ended_a_failure() {
        let now = crate::admin::certificates::moment("2026-03-04T00:00:00Z").unwrap();
        let (hour, day, year) = (
            "2026-03-04T01:00:00Z",
            "2026-03-05T00:00:00Z",
            "2027-01-01T00:00:00Z",
        );
        let good = || identity("Available", &[hour], &[year]);
        let failing = Identity {
            renewal_error: Some("no answer".to_owned()),
            ..good()
        };
        for (identities, state) in [
            (vec![], State::Ok),
            (vec![good()], State::Ok),
            (vec![good(), failing], State::Warning),
            (vec![identity("Available", &[hour], &[day])], State::Warning),
            (vec![good(), identity("Initializing", &[], &[])], State::Warning),
            (
                vec![good(), identity("Unavailable: no answer", &[], &[])],
                State::Failed,
            ),
            (
                vec![identity("Available", &["2026-03-03T00:00:00Z"], &[year])],
                State::Failed,
            ),
        ] {
            let check = judged(Ok(identities), now);
            assert_eq!(check.state, state, "{check:?}");
        }
    }
}
