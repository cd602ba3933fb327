//! Logs: one line per event, in ztunnel's plain form (tab-separated) or as JSON, with a level that can be changed at run
//! time. `main` starts them; `admin` changes the level.

use std::{
    fmt::{self, Write as _},
    str::FromStr,
    time::SystemTime,
};

use serde::{
    Serialize,
    ser::{SerializeMap, Serializer as _},
};
use time::OffsetDateTime;
use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{
    EnvFilter, Registry,
    fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter, format::Writer},
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
    let (subscriber, control) = subscriber(filter, format, std::io::stderr);
    subscriber.try_init()?;
    Ok(control)
}

/// What writes lines to `writer`.
pub(crate) fn subscriber<W>(filter: &Filter, format: Format, writer: W) -> (impl Subscriber + use<W>, Control)
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let start = filter.clone();
    let (filter, reload) = reload::Layer::new(EnvFilter::new(&filter.0));
    let lines = tracing_subscriber::fmt::layer()
        .event_format(Line(format))
        .with_writer(writer);
    let subscriber = tracing_subscriber::registry().with(filter).with(lines);
    (subscriber, Control { reload, start })
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
                let mut text = Plain::new();
                event.record(&mut text);
                let Plain { message, fields } = text;
                writeln!(writer, "{time}\t{level}\t{scope}\t{message}\t{fields}")
            }
            Format::Json => {
                let line = json(event, &[("level", level), ("time", &time), ("scope", scope)]);
                writeln!(writer, "{}", line.map_err(|_| fmt::Error)?)
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

/// `key=value`, with spaces between; texts are quoted.
struct Plain {
    message: String,
    fields: String,
}

impl Plain {
    fn new() -> Self {
        Self {
            message: String::new(),
            // A line of the access log has some 400 bytes.
            fields: String::with_capacity(512),
        }
    }

    fn key(&mut self, field: &Field) {
        let gap = if self.fields.is_empty() { "" } else { " " };
        self.fields.extend([gap, field.name(), "="]);
    }
}

impl Visit for Plain {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a String does not fail.
        let _ = match field.name() {
            "message" => write!(OneLine(&mut self.message), "{value:?}"),
            _ => {
                self.key(field);
                write!(OneLine(&mut self.fields), "{value:?}")
            }
        };
    }

    /// Most fields are short names, which are the same when they are quoted.
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "message" || value.contains(['"', '\\']) || !is_plain(value) {
            return self.record_debug(field, &value);
        }
        self.key(field);
        self.fields.extend(["\"", value, "\""]);
    }
}

/// Whether a text has ASCII's printable characters alone.
fn is_plain(text: &str) -> bool {
    text.bytes().all(|byte| (b' '..=b'~').contains(&byte))
}

/// A text from outside must not start a line or a column of its own, nor speak to a terminal.
struct OneLine<'a>(&'a mut String);

impl fmt::Write for OneLine<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if is_plain(text) {
            self.0.push_str(text);
            return Ok(());
        }
        for c in text.chars() {
            match c.is_control() {
                true => self.0.extend(c.escape_default()),
                false => self.0.push(c),
            }
        }
        Ok(())
    }
}

/// An object of `first`, the message, and the event's fields, in this order.
fn json(event: &Event<'_>, first: &[(&str, &str)]) -> Result<String, serde_json::Error> {
    let mut line = Vec::with_capacity(512);
    let mut serializer = serde_json::Serializer::new(&mut line);
    let mut map = serializer.serialize_map(None)?;
    for (key, value) in first {
        map.serialize_entry(key, value)?;
    }
    let mut fields = Json { map, result: Ok(()) };
    event.record(&mut fields);
    fields.result?;
    fields.map.end()?;
    // It is JSON.
    Ok(String::from_utf8(line).unwrap_or_default())
}

struct Json<M: SerializeMap> {
    map: M,
    result: Result<(), M::Error>,
}

impl<M: SerializeMap> Json<M> {
    fn entry(&mut self, field: &Field, value: &(impl Serialize + ?Sized)) {
        if self.result.is_ok() {
            self.result = self.map.serialize_entry(field.name(), value);
        }
    }
}

impl<M: SerializeMap> Visit for Json<M> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.entry(field, &format_args!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.entry(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.entry(field, &value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.entry(field, &value);
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.entry(field, &value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.entry(field, &value);
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io,
        sync::{Arc, Mutex},
        time::Duration,
    };

    use serde_json::Value;

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
        let subscriber = subscriber(&Filter::default(), format, move || writer.clone()).0;
        let address = std::net::SocketAddr::from(([10, 0, 0, 1], 5));
        tracing::subscriber::with_default(subscriber, || {
            let told = "x\ny\t\u{1b}[2J";
            tracing::info!(
                target: "access",
                { src.addr = %address, bytes = 7_u64, text = "a\nb", name = "a b", quote = "é\"\\", %told },
                "done"
            );
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
            "info\taccess\tdone\tsrc.addr=10.0.0.1:5 bytes=7 text=\"a\\nb\" name=\"a b\" quote=\"é\\\"\\\\\" told=x\\ny\\t\\u{1b}[2J\n"
        );
    }

    #[test]
    fn json_lines_are_objects() {
        let line = logged(Format::Json);
        let order = [
            "level", "time", "scope", "message", "src.addr", "bytes", "text", "name", "quote", "told",
        ];
        let places = order.map(|key| line.find(&format!("\"{key}\":")).unwrap());
        assert!(places.is_sorted(), "{line}");
        let value: Value = serde_json::from_str(&line).unwrap();
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
