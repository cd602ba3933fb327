//! Times and sizes as people say them.

use std::time::Duration;

use time::OffsetDateTime;

/// The two biggest units of a length of time: `3 d 4 h`, `12 s`, `5 ms`.
pub(super) fn span(span: Duration) -> String {
    const UNITS: [(&str, u64); 4] = [("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)];
    let seconds = span.as_secs();
    let Some(first) = UNITS.iter().position(|(_, unit)| seconds >= *unit) else {
        return format!("{} ms", span.subsec_millis());
    };
    let (name, unit) = UNITS[first];
    let mut text = format!("{} {name}", seconds / unit);
    if let Some((smaller, size)) = UNITS.get(first + 1)
        && let count @ 1.. = seconds % unit / size
    {
        text.push_str(&format!(" {count} {smaller}"));
    }
    text
}

/// How far `then` is from `now`: `in 3 h`, or `5 min ago`.
pub(super) fn distance(then: OffsetDateTime, now: OffsetDateTime) -> String {
    match Duration::try_from(then - now) {
        Ok(ahead) => format!("in {}", span(ahead)),
        Err(_) => format!("{} ago", span((then - now).unsigned_abs())),
    }
}

/// `512 B`, `4.0 KiB`, `1.5 GiB`.
pub(super) fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let (mut amount, mut unit) = (bytes as f64 / 1024.0, 0);
    while amount >= 1023.95 && unit + 1 < UNITS.len() {
        (amount, unit) = (amount / 1024.0, unit + 1);
    }
    format!("{amount:.1} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::certificates::moment;

    #[test]
    fn times_and_sizes_are_short_and_true() {
        for (millis, text) in [
            (0, "0 ms"),
            (999, "999 ms"),
            (1_000, "1 s"),
            (61_000, "1 min 1 s"),
            (3_600_000, "1 h"),
            (86_399_000, "23 h 59 min"),
            (90_000_000, "1 d 1 h"),
        ] {
            assert_eq!(span(Duration::from_millis(millis)), text);
        }
        let now = moment("2026-01-02T03:04:05Z").unwrap();
        assert_eq!(distance(moment("2026-01-02T04:04:05.5Z").unwrap(), now), "in 1 h");
        assert_eq!(
            distance(moment("2026-01-02T03:03:05Z").unwrap(), now),
            "1 min ago"
        );
        assert_eq!(moment("yesterday"), None);
        for (count, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1536, "1.5 KiB"),
            (1024 * 1024 - 1, "1.0 MiB"),
            (5 << 40, "5.0 TiB"),
            (u64::MAX, "16777216.0 TiB"),
        ] {
            assert_eq!(bytes(count), text);
        }
    }
}
