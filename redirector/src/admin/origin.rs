//! Whether a request comes from a page of somebody else in a browser on the node: such a page must neither stop the agent nor read what it
//! tells. Programs send none of what is looked at here, but for a host that is an address or localhost.

use std::net::IpAddr;

use http::{HeaderMap, HeaderName, header, uri::Authority};

const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Why a request is refused.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(super) enum Foreign {
    /// A name may be made to lead here by whoever owns it (DNS rebinding).
    #[error("the admin port is asked by an IP address or as localhost, not by another name")]
    Host,
    #[error("requests that pages of other origins make are refused here")]
    Page,
}

/// Whether the headers of a request are not those of a page of another origin.
pub(super) fn check(headers: &HeaderMap) -> Result<(), Foreign> {
    let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or_default());
    let host = text(header::HOST);
    if host.is_some_and(|host| !is_local(host)) {
        return Err(Foreign::Host);
    }
    let own = |origin: &str| origin.strip_prefix("http://") == host;
    let is_foreign = text(header::ORIGIN).is_some_and(|origin| !own(origin))
        || text(FETCH_SITE).is_some_and(|site| !matches!(site, "same-origin" | "none"));
    if is_foreign { Err(Foreign::Page) } else { Ok(()) }
}

fn is_local(host: &str) -> bool {
    let Ok(authority) = host.parse::<Authority>() else {
        return false;
    };
    let host = authority.host();
    let address = host.trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost") || address.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_others_are_told_from_programs_and_from_our_own() {
        for (given, expected) in [
            (&[][..], Ok(())),
            (&[("host", "127.0.0.1:15000")], Ok(())),
            (&[("host", "[::1]:15000")], Ok(())),
            (&[("host", "Localhost:8080")], Ok(())),
            (&[("host", "evil.example:15000")], Err(Foreign::Host)),
            (&[("host", "localhost.evil.example")], Err(Foreign::Host)),
            (&[("host", "127.0.0.1.evil.example")], Err(Foreign::Host)),
            (&[("host", "")], Err(Foreign::Host)),
            (
                &[("host", "localhost:15000"), ("origin", "http://localhost:15000")],
                Ok(()),
            ),
            (
                &[("host", "localhost:15000"), ("origin", "http://localhost:8000")],
                Err(Foreign::Page),
            ),
            (&[("host", "localhost"), ("origin", "null")], Err(Foreign::Page)),
            (&[("origin", "http://evil.example")], Err(Foreign::Page)),
            (&[("sec-fetch-site", "cross-site")], Err(Foreign::Page)),
            (&[("sec-fetch-site", "same-site")], Err(Foreign::Page)),
            (&[("sec-fetch-site", "same-origin")], Ok(())),
            (&[("sec-fetch-site", "none")], Ok(())),
        ] {
            let headers = given
                .iter()
                .map(|&(name, value)| (HeaderName::from_static(name), value.parse().unwrap()))
                .collect();
            assert_eq!(check(&headers), expected, "{given:?}");
        }
    }
}
