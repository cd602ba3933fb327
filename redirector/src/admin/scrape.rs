//! `GET /metrics`: in the form that the caller accepts, and packed if it can unpack it.

use std::io::Write as _;

use flate2::{Compression, write::GzEncoder};
use http::{
    HeaderMap, HeaderName, HeaderValue, StatusCode,
    header::{ACCEPT, ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_TYPE, VARY},
};
use http_body_util::{BodyExt as _, Full};
use prometheus_client::registry::Registry;

use crate::{
    serve::{Answer, text},
    telemetry::metrics,
};

/// Smaller texts are not worth it.
const PACKED_FROM: usize = 1024;

/// The metrics, as `headers` ask for them.
pub(super) fn answer(registry: &Registry, headers: &HeaderMap) -> Answer {
    let body = metrics::text(registry);
    let packed =
        (body.len() >= PACKED_FROM && accepts(headers, &ACCEPT_ENCODING, "gzip")).then(|| pack(&body));
    let mut answer = text(StatusCode::OK, body);
    let kind = match accepts(headers, &ACCEPT, "application/openmetrics-text") {
        true => metrics::OPEN_METRICS,
        false => metrics::PLAIN,
    };
    let own = answer.headers_mut();
    own.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    own.insert(VARY, HeaderValue::from_static("accept, accept-encoding"));
    if let Some(packed) = packed {
        own.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        *answer.body_mut() = Full::from(packed).boxed_unsync();
    }
    answer
}

/// Whether a header lists `wanted` and does not give it the weight 0 (RFC 9110, section 12.4.2). Wildcards count for nothing: whoever
/// can read a form says so.
fn accepts(headers: &HeaderMap, name: &HeaderName, wanted: &str) -> bool {
    let lists = headers
        .get_all(name)
        .iter()
        .filter_map(|value| value.to_str().ok());
    lists.flat_map(|list| list.split(',')).any(|one| {
        let mut parts = one.split(';').map(str::trim);
        let is_it = parts.next().is_some_and(|it| it.eq_ignore_ascii_case(wanted));
        let weight = parts.find_map(|part| part.strip_prefix("q=").or_else(|| part.strip_prefix("Q=")));
        is_it && weight.is_none_or(|weight| weight.trim().parse::<f32>().is_ok_and(|weight| weight > 0.0))
    })
}

fn pack(text: &str) -> Vec<u8> {
    let mut packer = GzEncoder::new(Vec::with_capacity(text.len() / 8), Compression::fast());
    // Writing to a Vec does not fail.
    let _ = packer.write_all(text.as_bytes());
    packer.finish().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use flate2::read::GzDecoder;

    use super::*;

    #[tokio::test]
    async fn the_form_is_the_one_that_is_asked_for() {
        let registry = metrics::registry();
        for (accept, encoding, kind, is_packed) in [
            (None, None, metrics::PLAIN, false),
            (Some("*/*"), Some("*"), metrics::PLAIN, false),
            (
                Some("text/plain;version=0.0.4"),
                Some("identity"),
                metrics::PLAIN,
                false,
            ),
            (
                Some("application/openmetrics-text;version=1.0.0;q=0.8,text/plain;q=0.5,*/*;q=0.1"),
                Some("gzip"),
                metrics::OPEN_METRICS,
                true,
            ),
            (
                Some("application/openmetrics-text;q=0"),
                Some("gzip;q=0, br"),
                metrics::PLAIN,
                false,
            ),
            (None, Some("deflate, GZIP;q=0.5"), metrics::PLAIN, true),
        ] {
            let mut headers = HeaderMap::new();
            for (name, value) in [(ACCEPT, accept), (ACCEPT_ENCODING, encoding)] {
                if let Some(value) = value {
                    headers.insert(name, HeaderValue::from_static(value));
                }
            }
            let answer = answer(&registry, &headers);
            let case = format!("{accept:?} {encoding:?}");
            assert_eq!(answer.headers()[CONTENT_TYPE], kind, "{case}");
            assert_eq!(
                answer.headers().contains_key(CONTENT_ENCODING),
                is_packed,
                "{case}"
            );
            let body = answer.into_body().collect().await.unwrap().to_bytes();
            let mut text = String::new();
            match is_packed {
                true => GzDecoder::new(&*body).read_to_string(&mut text).map(drop),
                false => (&*body).read_to_string(&mut text).map(drop),
            }
            .unwrap();
            assert!(
                text.contains("istio_build{") && text.ends_with("# EOF\n"),
                "{case}: {text}"
            );
        }
    }
}
