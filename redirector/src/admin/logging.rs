//! `POST /logging`: what is logged, told and changed.

use http::StatusCode;
use tracing::level_filters::LevelFilter;

use crate::{
    serve::{Answer, text},
    telemetry::{
        Chain,
        logs::{Control, Filter},
    },
};

/// The answer: what is logged from now on. With `level=` or `MODULE=` it is changed, module by module; with `reset`, before that, put back
/// to what it was at the start.
pub(super) fn answer(logs: &Control, query: &str) -> Answer {
    let asked = match Asked::parse(query) {
        Ok(asked) => asked,
        Err(error) => return text(StatusCode::BAD_REQUEST, error),
    };
    if asked.reset {
        logs.reset();
    }
    if let Some(filter) = asked.filter {
        logs.add(&filter);
    }
    // ztunnel's words, which scripts look for.
    text(
        StatusCode::OK,
        format!("current log level is {}\n", logs.filter()),
    )
}

struct Asked {
    reset: bool,
    filter: Option<Filter>,
}

impl Asked {
    fn parse(query: &str) -> Result<Self, String> {
        let (mut reset, mut directives) = (false, Vec::new());
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            match (&*name, &*value) {
                ("reset", _) => reset = true,
                ("level", directive) | (directive, "") => directives.push(directive.to_owned()),
                (module, level) => directives.push(format!("{module}={level}")),
            }
        }
        if directives.is_empty() {
            return Ok(Self { reset, filter: None });
        }
        let directives = directives.join(",");
        // A word alone would be the name of a module, and none at all a level.
        let is_level = |word: &str| !word.is_empty() && word.parse::<LevelFilter>().is_ok();
        let is_wrong = |word: &&str| !word.contains('=') && !is_level(word);
        if let Some(word) = directives.split(',').find(is_wrong) {
            return Err(format!(
                "{word:?} is no log level: error, warn, info, debug, trace, off, or MODULE=LEVEL of these\n"
            ));
        }
        let filter = directives.parse().map(Some);
        let filter = filter.map_err(|error| format!("{}\n", Chain(&error)))?;
        Ok(Self { reset, filter })
    }
}
