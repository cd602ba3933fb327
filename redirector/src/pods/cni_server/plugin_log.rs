//! What CNI plugins log, taken over into the agent's own log: `POST /log` with a JSON array of texts, each a record in JSON, as
//! istio-cni's plugin sends them too.
//!
//! A record becomes one line, of bounded length, and there are only so many of them in a second.

use std::sync::{Mutex, PoisonError};

use serde_json::{Map, Value};
use tokio::time::Instant;
use tracing::{debug, error, info, warn};

/// Records in one request.
const MAX_RECORDS: usize = 64;

/// Bytes of a record's message, and of the rest of it.
const MAX_TEXT_BYTES: usize = 2048;

/// Records at one time: a node that starts has every pod's at once.
const BURST: f64 = 512.0;

/// Records in a second, in the long run.
const PER_SECOND: f64 = 50.0;

/// Why a request is refused.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("the body is not a JSON array of texts")]
    Json(#[source] serde_json::Error),
    #[error("{0} records are too many: {MAX_RECORDS} at most")]
    TooMany(usize),
}

/// The log of this node's plugins.
#[derive(Debug)]
pub(super) struct PluginLog(Mutex<Budget>);

/// A token bucket.
#[derive(Debug)]
struct Budget {
    records: f64,
    since: Instant,
    dropped: u64,
}

impl PluginLog {
    pub(super) fn new(now: Instant) -> Self {
        Self(Mutex::new(Budget {
            records: BURST,
            since: now,
            dropped: 0,
        }))
    }

    /// Logs what a plugin has sent. What is beyond the rate is counted and left out.
    pub(super) fn take(&self, body: &[u8], now: Instant) -> Result<(), Error> {
        let records: Vec<String> = serde_json::from_slice(body).map_err(Error::Json)?;
        if records.len() > MAX_RECORDS {
            return Err(Error::TooMany(records.len()));
        }
        for record in records {
            let admitted = self.0.lock().unwrap_or_else(PoisonError::into_inner).admit(now);
            match admitted {
                None => {}
                Some(0) => Record::parse(&record).log(),
                Some(dropped) => {
                    warn!(target: "cni_plugin", dropped, "records of CNI plugins were left out: there were too many");
                    Record::parse(&record).log();
                }
            }
        }
        Ok(())
    }
}

impl Budget {
    /// Whether there is room for a record; if so, how many were left out since the last.
    fn admit(&mut self, now: Instant) -> Option<u64> {
        let passed = now.saturating_duration_since(self.since).as_secs_f64();
        self.since = self.since.max(now);
        self.records = (self.records + passed * PER_SECOND).min(BURST);
        if self.records < 1.0 {
            self.dropped += 1;
            return None;
        }
        self.records -= 1.0;
        Some(std::mem::take(&mut self.dropped))
    }
}

/// A record, as it is logged here.
#[derive(Debug, PartialEq, Eq)]
struct Record {
    level: String,
    message: String,
    fields: String,
}

impl Record {
    /// Reads a record; what is none is a message as it is.
    fn parse(text: &str) -> Self {
        let Ok(mut fields) = serde_json::from_str::<Map<String, Value>>(text) else {
            return Self {
                level: "info".to_owned(),
                message: printable(text),
                fields: String::new(),
            };
        };
        // The agent's log has a time of its own, which differs by less than a millisecond.
        fields.remove("time");
        let mut take = |key: &str| match fields.remove(key) {
            Some(Value::String(text)) => Some(text),
            other => other.map(|value| value.to_string()),
        };
        let level = take("level").unwrap_or_default().to_ascii_lowercase();
        let message = take("msg").or_else(|| take("message")).unwrap_or_default();
        Self {
            level,
            message: printable(&message),
            fields: printable(&Value::Object(fields).to_string()),
        }
    }

    fn log(self) {
        let Self {
            level,
            message,
            fields,
        } = self;
        match level.as_str() {
            "error" | "fatal" | "panic" => error!(target: "cni_plugin", %fields, "{message}"),
            "warn" | "warning" => warn!(target: "cni_plugin", %fields, "{message}"),
            "debug" | "trace" => debug!(target: "cni_plugin", %fields, "{message}"),
            _ => info!(target: "cni_plugin", %fields, "{message}"),
        }
    }
}

/// A text of bounded length that moves no cursor and begins no line.
fn printable(text: &str) -> String {
    let short = &text[..text.floor_char_boundary(MAX_TEXT_BYTES)];
    short
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn records_are_read_as_plugins_write_them() {
        let record = |level: &str, message: &str, fields: &str| Record {
            level: level.to_owned(),
            message: message.to_owned(),
            fields: fields.to_owned(),
        };
        for (text, expected) in [
            (
                r#"{"level":"warn","time":"2026-01-05T10:11:12Z","msg":"m","pod":"web-0","n":1}"#,
                record("warn", "m", r#"{"n":1,"pod":"web-0"}"#),
            ),
            (
                r#"{"level":"INFO","message":"a\nb\u001b[31m"}"#,
                record("info", "a b [31m", "{}"),
            ),
            (r#"{"level":7,"msg":null}"#, record("7", "null", "{}")),
            ("plain\ttext", record("info", "plain text", "")),
            ("[1]", record("info", "[1]", "")),
        ] {
            assert_eq!(Record::parse(text), expected, "{text}");
        }
    }

    #[test]
    fn long_records_are_cut() {
        let long = "ö".repeat(5000);
        let record = Record::parse(&serde_json::json!({"msg": long, "more": long}).to_string());
        assert_eq!(record.message.len(), MAX_TEXT_BYTES);
        assert!(record.fields.len() <= MAX_TEXT_BYTES);
        assert_eq!(Record::parse(&long).message.len(), MAX_TEXT_BYTES);
    }

    #[test]
    fn what_is_beyond_the_rate_is_counted() {
        let start = Instant::now();
        let mut budget = Budget {
            records: BURST,
            since: start,
            dropped: 0,
        };
        let admitted = (0..1000).filter(|_| budget.admit(start).is_some()).count();
        assert_eq!(admitted, BURST as usize);
        let later = start + Duration::from_secs(1);
        assert_eq!(budget.admit(later), Some(1000 - BURST as u64));
        assert_eq!(budget.admit(later), Some(0));
        // An hour of silence is no more than the burst.
        let much_later = start + Duration::from_secs(3600);
        let admitted = (0..1000).filter(|_| budget.admit(much_later).is_some()).count();
        assert_eq!(admitted, BURST as usize);
    }

    #[test]
    fn requests_are_bounded() {
        let now = Instant::now();
        let log = PluginLog::new(now);
        let many = |count: usize| serde_json::json!(vec!["{}"; count]).to_string();
        log.take(many(MAX_RECORDS).as_bytes(), now).unwrap();
        for bad in [&many(MAX_RECORDS + 1), "{}", "[1]", ""] {
            log.take(bad.as_bytes(), now).unwrap_err();
        }
    }
}
