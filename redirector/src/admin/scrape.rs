//! `GET /metrics`: in the form that the caller accepts, and packed if it can unpack it.
//!
//! Thousands of series are megabytes of text, and callers may read slowly. So the text is nowhere whole: it is packed while it is made,
//! which waits for no reader, kept packed until it is read, and unpacked piece by piece for who can't do that.

use std::{
    fmt,
    io::{Read as _, Write as _},
    iter,
};

use bytes::{Buf as _, Bytes};
use flate2::{Compression, bufread::GzDecoder, write::GzEncoder};
use futures_util::stream;
use http::{
    HeaderMap, HeaderName, HeaderValue, StatusCode,
    header::{ACCEPT, ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, VARY},
};
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::Frame;
use prometheus_client::{encoding::text::encode, registry::Registry};

use crate::{
    serve::{Answer, text},
    telemetry::metrics,
};

/// Bytes of text that are packed or unpacked at one time.
const PIECE_BYTES: usize = 16 * 1024;

/// The metrics, as `headers` ask for them.
pub(super) fn answer(registry: &Registry, headers: &HeaderMap) -> Answer {
    let metrics = Packed::of(registry);
    let mut answer = text(StatusCode::OK, "");
    let kind = match accepts(headers, &ACCEPT, "application/openmetrics-text") {
        true => metrics::OPEN_METRICS,
        false => metrics::PLAIN,
    };
    let own = answer.headers_mut();
    own.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    own.insert(VARY, HeaderValue::from_static("accept, accept-encoding"));
    if accepts(headers, &ACCEPT_ENCODING, "gzip") {
        own.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        *answer.body_mut() = Full::from(metrics.bytes).boxed_unsync();
    } else {
        own.insert(CONTENT_LENGTH, metrics.text_bytes.into());
        let pieces = metrics.unpacked().map(|piece| Ok(Frame::data(piece)));
        *answer.body_mut() = StreamBody::new(stream::iter(pieces)).boxed_unsync();
    }
    answer
}

/// The metrics in words, by gzip.
struct Packed {
    bytes: Bytes,
    text_bytes: usize,
}

impl Packed {
    fn of(registry: &Registry) -> Self {
        let mut packer = Packer {
            piece: String::with_capacity(PIECE_BYTES),
            text_bytes: 0,
            out: GzEncoder::new(Vec::new(), Compression::fast()),
        };
        // Neither writing to a Vec nor packing fails.
        let _ = encode(&mut packer, registry);
        packer.pack();
        let mut bytes = packer.out.finish().unwrap_or_default();
        bytes.shrink_to_fit();
        Self {
            bytes: bytes.into(),
            text_bytes: packer.text_bytes,
        }
    }

    /// The text, in pieces that are made when they are asked for.
    fn unpacked(self) -> impl Iterator<Item = Bytes> + Send {
        let mut unpacker = GzDecoder::new(self.bytes.reader());
        iter::from_fn(move || {
            let mut piece = Vec::with_capacity(PIECE_BYTES);
            // If it failed, the text would be shorter than it is said to be.
            let _ = unpacker.by_ref().take(PIECE_BYTES as u64).read_to_end(&mut piece);
            (!piece.is_empty()).then(|| piece.into())
        })
    }
}

/// Packs what is written.
struct Packer {
    /// What waits for more: the registry writes a few bytes at a time.
    piece: String,
    text_bytes: usize,
    out: GzEncoder<Vec<u8>>,
}

impl Packer {
    fn pack(&mut self) {
        self.text_bytes += self.piece.len();
        // Writing to a Vec does not fail.
        let _ = self.out.write_all(self.piece.as_bytes());
        self.piece.clear();
    }
}

impl fmt::Write for Packer {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if self.piece.len() + text.len() > PIECE_BYTES {
            self.pack();
        }
        self.piece.push_str(text);
        Ok(())
    }
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

#[cfg(test)]
mod tests {
    use prometheus_client::metrics::{counter::Counter, family::Family};

    use super::*;

    fn asking_for(encoding: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(ACCEPT_ENCODING, HeaderValue::from_static(encoding))])
    }

    #[tokio::test]
    async fn a_long_text_is_kept_packed_and_read_in_pieces() {
        let mut registry = Registry::default();
        let lines = Family::<Vec<(&str, String)>, Counter>::default();
        registry.register("lines", "Some with more in them than a piece has", lines.clone());
        for length in (1..400).chain([PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES * 3]) {
            lines.get_or_create(&vec![("label", "x".repeat(length))]).inc();
        }
        let mut expected = String::new();
        encode(&mut expected, &registry).unwrap();

        let plain = answer(&registry, &asking_for("identity"));
        assert_eq!(
            plain.headers()[CONTENT_LENGTH],
            expected.len().to_string().as_str()
        );
        let (mut body, mut text) = (plain.into_body(), Vec::new());
        while let Some(frame) = body.frame().await {
            let piece = frame.unwrap().into_data().unwrap();
            assert!((1..=PIECE_BYTES).contains(&piece.len()), "{}", piece.len());
            text.extend_from_slice(&piece);
        }
        assert!(String::from_utf8(text).unwrap() == expected);

        let packed = answer(&registry, &asking_for("gzip")).into_body();
        let packed = packed.collect().await.unwrap().to_bytes();
        assert!(packed.len() < expected.len() / 10, "{}", packed.len());
        let mut text = String::new();
        GzDecoder::new(&*packed).read_to_string(&mut text).unwrap();
        assert!(text == expected);
    }

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
