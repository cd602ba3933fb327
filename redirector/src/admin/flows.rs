//! `GET /connections` and `GET /flows`: what is open in the pods of this node, and what has ended there.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Method, Request, StatusCode};
use tokio::time::timeout;

use super::{Admin, blocking, json_answer};
use crate::serve::{Answer, method_not_allowed, text};

/// Connections in one answer, where nothing else is asked for.
const LIMIT: usize = 1_000;

/// And at most.
const MOST: usize = 10_000;

/// For so long an answer may wait for something to tell; well below what a connection to this port may take.
const LONGEST_WAIT: Duration = Duration::from_secs(20);

/// The answer to a request for one of the two paths.
pub(super) async fn answer(admin: &Admin, request: &Request<Bytes>) -> Answer {
    if request.method() != Method::GET {
        return method_not_allowed(&Method::GET);
    }
    let query = request.uri().query().unwrap_or_default();
    match request.uri().path() {
        "/connections" => match Connections::parse(query) {
            Ok(asked) => open(admin, asked).await,
            Err(error) => bad(&error),
        },
        _ => match Ended::parse(query) {
            Ok(asked) => ended(admin, asked).await,
            Err(error) => bad(&error),
        },
    }
}

/// To put thousands into words takes a while, for which others must not wait.
async fn open(admin: &Admin, asked: Connections) -> Answer {
    let flows = Arc::clone(&admin.flows);
    blocking(move || json_answer(&flows.connections(asked.pod.as_deref(), asked.limit))).await
}

async fn ended(admin: &Admin, asked: Ended) -> Answer {
    if let Some(after) = asked.after.filter(|_| !asked.wait.is_zero()) {
        let Some(_place) = admin.flows.waiter() else {
            return text(
                StatusCode::SERVICE_UNAVAILABLE,
                "too many wait for connections already: ask again, or without \"wait\"\n",
            );
        };
        let news = admin.flows.ended_since(after);
        // Nothing new, and the agent's end, are answers too.
        let _ = timeout(asked.wait, admin.stopping.run_until_cancelled(news)).await;
    }
    let flows = Arc::clone(&admin.flows);
    blocking(move || json_answer(&flows.ended(asked.after, asked.limit))).await
}

fn bad(error: &Error) -> Answer {
    text(StatusCode::BAD_REQUEST, format!("{error}\n"))
}

/// Why a query is refused.
#[derive(Debug, thiserror::Error, PartialEq)]
enum Error {
    #[error("there is no parameter {name:?} here, only: {known}")]
    Unknown { name: String, known: &'static str },
    #[error("{name}={value:?} is not {wanted}")]
    Value {
        name: &'static str,
        value: String,
        wanted: &'static str,
    },
}

#[derive(Debug, PartialEq)]
struct Connections {
    pod: Option<String>,
    limit: usize,
}

#[derive(Debug, PartialEq)]
struct Ended {
    after: Option<u64>,
    limit: usize,
    wait: Duration,
}

impl Connections {
    fn parse(query: &str) -> Result<Self, Error> {
        let mut asked = Self {
            pod: None,
            limit: LIMIT,
        };
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            match &*name {
                "limit" => asked.limit = limit(&value)?,
                "pod" if value.split('/').count() == 2 => asked.pod = Some(value.into_owned()),
                "pod" => {
                    return Err(Error::Value {
                        name: "pod",
                        value: value.into_owned(),
                        wanted: "namespace/name",
                    });
                }
                _ => return Err(unknown(&name, "limit, pod")),
            }
        }
        Ok(asked)
    }
}

impl Ended {
    fn parse(query: &str) -> Result<Self, Error> {
        let mut asked = Self {
            after: None,
            limit: LIMIT,
            wait: Duration::ZERO,
        };
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            match &*name {
                "limit" => asked.limit = limit(&value)?,
                "after" => asked.after = Some(number("after", &value, "a number out of \"next\"")?),
                "wait" => {
                    let seconds = number("wait", &value, "a number of seconds")?;
                    asked.wait = Duration::from_secs(seconds).min(LONGEST_WAIT);
                }
                _ => return Err(unknown(&name, "after, limit, wait")),
            }
        }
        Ok(asked)
    }
}

fn unknown(name: &str, known: &'static str) -> Error {
    Error::Unknown {
        name: name.to_owned(),
        known,
    }
}

fn limit(value: &str) -> Result<usize, Error> {
    let limit = number("limit", value, "a number of connections")?;
    Ok(usize::try_from(limit).unwrap_or(MOST).min(MOST))
}

fn number(name: &'static str, value: &str, wanted: &'static str) -> Result<u64, Error> {
    value.parse().map_err(|_| Error::Value {
        name,
        value: value.to_owned(),
        wanted,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_read_and_wrong_ones_are_refused_with_the_reason() {
        assert_eq!(
            Connections::parse("limit=5&pod=shop%2Fweb-0"),
            Ok(Connections {
                pod: Some("shop/web-0".to_owned()),
                limit: 5
            })
        );
        assert_eq!(Connections::parse("limit=999999999").unwrap().limit, MOST);
        assert_eq!(
            Ended::parse("after=7&wait=3600"),
            Ok(Ended {
                after: Some(7),
                limit: LIMIT,
                wait: LONGEST_WAIT
            })
        );
        for (query, told) in [
            ("after=x", "after=\"x\" is not a number out of \"next\""),
            ("wait=-1", "wait=\"-1\" is not a number of seconds"),
            (
                "pod=a",
                "there is no parameter \"pod\" here, only: after, limit, wait",
            ),
        ] {
            assert_eq!(Ended::parse(query).unwrap_err().to_string(), told);
        }
        assert!(
            Connections::parse("pod=web")
                .unwrap_err()
                .to_string()
                .contains("namespace/name")
        );
    }
}
