//! The dashboard: one page for browsers, which asks the other paths of the admin port for all that it shows.
//!
//! It needs nothing from elsewhere, and the browser is told to let it have nothing from there: a name that somebody gave a pod is
//! text in it, whatever is in that name.

use http::{
    HeaderMap, HeaderValue,
    header::{self, HeaderName},
};

use crate::serve::{Answer, text};

const PAGE: &str = include_str!("dashboard/index.html");
const STYLE: &str = include_str!("dashboard/dashboard.css");
const SCRIPT: &str = include_str!("dashboard/dashboard.js");

/// What goes with each part of it.
const HEADERS: [(HeaderName, &str); 6] = [
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::X_FRAME_OPTIONS, "DENY"),
    (header::REFERRER_POLICY, "no-referrer"),
    // It is a part of the agent, which may be another one a moment later.
    (header::CACHE_CONTROL, "no-store"),
    (header::VARY, "accept"),
];

/// Whether a page is wanted: browsers say so, programs don't.
pub(super) fn is_for(headers: &HeaderMap) -> bool {
    let accepted = headers.get_all(header::ACCEPT).iter();
    let texts = accepted.filter_map(|value| value.to_str().ok());
    let mut kinds = texts.flat_map(|text| text.split(','));
    kinds.any(|kind| kind.split(';').next().map(str::trim) == Some("text/html"))
}

/// The page itself.
pub(super) fn page() -> Answer {
    part(PAGE, "text/html; charset=utf-8")
}

/// What it looks like.
pub(super) fn style() -> Answer {
    part(STYLE, "text/css; charset=utf-8")
}

/// What it does.
pub(super) fn script() -> Answer {
    part(SCRIPT, "text/javascript; charset=utf-8")
}

fn part(body: &'static str, kind: &'static str) -> Answer {
    let mut answer = text(http::StatusCode::OK, body);
    let headers = answer.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    for (name, value) in HEADERS {
        headers.insert(name, HeaderValue::from_static(value));
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn browsers_get_the_page_and_programs_the_list() {
        for (accept, page) in [
            (&[][..], false),
            (&["*/*"], false),
            (&["application/json, text/*"], false),
            (&["text/html,application/xhtml+xml,*/*;q=0.8"], true),
            (&["application/json", "text/plain, text/html;q=0.9"], true),
        ] {
            let headers = accept
                .iter()
                .map(|value| (header::ACCEPT, value.parse().unwrap()))
                .collect();
            assert_eq!(is_for(&headers), page, "{accept:?}");
        }
    }

    /// With what the policy forbids the page would not work, and nobody would see why.
    #[test]
    fn the_page_takes_nothing_from_elsewhere_and_makes_no_html_of_texts() {
        for text in [PAGE, STYLE, SCRIPT] {
            for forbidden in ["http:", "https:", "//cdn", "@import", "url("] {
                assert!(!text.contains(forbidden), "{forbidden}");
            }
        }
        for forbidden in ["style=", "onclick", "onload", "<script>", "<style"] {
            assert!(!PAGE.contains(forbidden), "{forbidden}");
        }
        for forbidden in [
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            ".style",
        ] {
            assert!(!SCRIPT.contains(forbidden), "{forbidden}");
        }
    }
}
