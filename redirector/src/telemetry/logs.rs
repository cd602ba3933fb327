//! Logs: one line per event, in ztunnel's plain form (tab-separated) or as JSON, with a level that can be changed at run
//! time. `main` starts them; `admin` changes the level.

use std::{
    fmt::{self, Write as _},
    str::FromStr,
    time::SystemTime,
};

use serde_json::{Map, Value};
use time::OffsetDateTime;
use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{
    EnvFilter, Registry,
    fmt::{FmtContext, FormatEvent, FormatFields, format::Writer},
    layer::SubscriberExt,
    registry::LookupSpan,
    reload,
    util::{SubscriberInitExt, TryInitError},
};

/// How a line looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Format {
    /// Time, level, scope, message and fields, separated by tabs.
    #[default]
    Plain,
    /// An object with the keys `level`, `time`, `scope`, `message` and the fields.
    Json,
}

/// Why a text is not a [`Format`].
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is neither plain nor json")]
pub struct InvalidFormat(String);

impl FromStr for Format {
    type Err = InvalidFormat;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "plain" => Ok(Self::Plain),
            "json" => Ok(Self::Json),
            _ => Err(InvalidFormat(text.to_owned())),
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plain => "plain",
            Self::Json => "json",
        })
    }
}

/// What is logged: a level, or a list of `module=level` (tracing's directives).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filter(String);

/// Why a text is not a [`Filter`].
#[derive(Debug, thiserror::Error)]
#[error("{text:?} is not a log level or a list of module=level")]
pub struct InvalidFilter {
    text: String,
    #[source]
    source: tracing_subscriber::filter::ParseError,
}

impl Default for Filter {
    fn default() -> Self {
        Self("info".to_owned())
    }
}

impl FromStr for Filter {
    type Err = InvalidFilter;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match EnvFilter::try_new(text) {
            Ok(_) => Ok(Self(text.to_owned())),
            Err(source) => Err(InvalidFilter {
                text: text.to_owned(),
                source,
            }),
        }
    }
}

impl fmt::Display for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Changes what is logged.
#[derive(Debug, Clone)]
pub struct Control {
    reload: reload::Handle<EnvFilter, Registry>,
    start: Filter,
}

impl Control {
    /// What is logged now.
    pub fn filter(&self) -> String {
        self.reload.with_current(ToString::to_string).unwrap_or_default()
    }

    /// Logs what `filter` says from now on; where it says nothing of a module, as before.
    pub fn add(&self, filter: &Filter) {
        // Of two directives for one module the later counts. They were parsed before, and the subscriber lives as long as the process.
        let _ = self
            .reload
            .modify(|now| *now = EnvFilter::new(format!("{now},{filter}")));
    }

    /// Logs what was logged at the start.
    pub fn reset(&self) {
        let _ = self.reload.reload(EnvFilter::new(&self.start.0));
    }

    /// A control that controls nothing.
    #[cfg(test)]
    pub(crate) fn detached(start: Filter) -> (Self, impl Sized) {
        let (layer, reload) = reload::Layer::new(EnvFilter::new(&start.0));
        (Self { reload, start }, layer)
    }
}

/// Starts to log to standard error.
///
/// # Errors
/// When something else in the process has done so before.
pub fn start(filter: &Filter, format: Format) -> Result<Control, TryInitError> {
    let start = filter.clone();
    let (filter, reload) = reload::Layer::new(EnvFilter::new(&filter.0));
    let lines = tracing_subscriber::fmt::layer()
        .event_format(Line(format))
        .with_writer(std::io::stderr);
    tracing_subscriber::registry()
        .with(filter)
        .with(lines)
        .try_init()?;
    Ok(Control { reload, start })
}

struct Line(Format);

impl<S, N> FormatEvent<S, N> for Line
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let time = timestamp(SystemTime::now());
        let level = level_name(*event.metadata().level());
        let target = event.metadata().target();
        let scope = target.strip_prefix("redirector::").unwrap_or(target);
        match self.0 {
            Format::Plain => {
                let mut fields = Plain::default();
                event.record(&mut fields);
                let Plain { message, fields } = fields;
                writeln!(
                    writer,
                    "{time}\t{level}\t{scope}\t{message}\t{}",
                    fields.trim_start()
                )
            }
            Format::Json => {
                let mut fields = Json::default();
                event.record(&mut fields);
                for (key, value) in [("level", level), ("time", time.as_str()), ("scope", scope)] {
                    fields.0.insert(key.to_owned(), value.into());
                }
                writeln!(writer, "{}", Value::Object(fields.0))
            }
        }
    }
}

fn level_name(level: Level) -> &'static str {
    match level {
        Level::ERROR => "error",
        Level::WARN => "warn",
        Level::INFO => "info",
        Level::DEBUG => "debug",
        Level::TRACE => "trace",
    }
}

/// RFC 3339, UTC, microseconds.
pub fn timestamp(now: SystemTime) -> String {
    let t = OffsetDateTime::from(now);
    format!(
        "{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:06}Z",
        t.year(),
        u8::from(t.month()),
        t.day(),
        t.hour(),
        t.minute(),
        t.second(),
        t.microsecond()
    )
}

#[derive(Default)]
struct Plain {
    message: String,
    fields: String,
}

impl Visit for Plain {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // A text from outside must not start a line of its own.
        let text = format!("{value:?}").replace('\n', "\\n").replace('\t', " ");
        match field.name() {
            "message" => self.message = text,
            name => {
                let _ = write!(self.fields, " {name}={text}");
            }
        }
    }
}

#[derive(Default)]
struct Json(Map<String, Value>);

impl Visit for Json {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0
            .insert(field.name().to_owned(), format!("{value:?}").into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.0.insert(field.name().to_owned(), value.into());
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io,
        sync::{Arc, Mutex},
        time::Duration,
    };

    use super::*;

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn logged(format: Format) -> String {
        let sink = Sink::default();
        let writer = sink.clone();
        let lines = tracing_subscriber::fmt::layer()
            .event_format(Line(format))
            .with_writer(move || writer.clone());
        let address = std::net::SocketAddr::from(([10, 0, 0, 1], 5));
        tracing::subscriber::with_default(tracing_subscriber::registry().with(lines), || {
            tracing::info!(target: "access", { src.addr = %address, bytes = 7_u64, text = "a\nb" }, "done");
        });
        let bytes = sink.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn plain_lines_are_separated_by_tabs() {
        let line = logged(Format::Plain);
        let (time, rest) = line.split_once('\t').unwrap();
        assert_eq!(time.len(), "2026-01-05T10:11:12.345678Z".len());
        assert_eq!(
            rest,
            "info\taccess\tdone\tsrc.addr=10.0.0.1:5 bytes=7 text=\"a\\nb\"\n"
        );
    }

    #[test]
    fn json_lines_are_objects() {
        let value: Value = serde_json::from_str(&logged(Format::Json)).unwrap();
        assert_eq!(value["level"], "info");
        assert_eq!(value["scope"], "access");
        assert_eq!(value["message"], "done");
        assert_eq!(value["bytes"], 7);
        assert_eq!(value["text"], "a\nb");
        assert!(value["time"].is_string());
    }

    #[test]
    fn time_is_rfc_3339() {
        let at = SystemTime::UNIX_EPOCH + Duration::from_micros(1_767_607_872_345_678);
        assert_eq!(timestamp(at), "2026-01-05T10:11:12.345678Z");
    }

    #[test]
    fn filters_and_formats_are_checked() {
        for good in ["info", "redirector=debug,h2=warn", "off"] {
            good.parse::<Filter>().unwrap();
        }
        assert!("redirector=loud".parse::<Filter>().is_err());
        assert!("xml".parse::<Format>().is_err());
    }
}
