//! The plugin's log: JSON records, a line each in a file, and all of them told to the agent at the end. Neither is waited for, and
//! neither is a reason to fail.

use std::{
    ffi::OsString,
    fs::{self, File, Metadata, OpenOptions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::SystemTime,
};

use nix::fcntl::OFlag;
use serde_json::{Map, Value};

use super::agent;
use crate::{cni::entry::Entry, telemetry::logs::timestamp};

/// Size at which the file is renamed to `<name>.1`, in the place of an older one.
const MAX_FILE_BYTES: u64 = 10 * 1024 * 1024;

/// Most records of one call, so that they are one request that the agent takes.
const MAX_RECORDS: usize = 16;

/// Longest text in a record; what another made, such as an answer of the agent, may be of any length.
const MAX_TEXT_BYTES: usize = 2048;

/// How much a record matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Level {
    Error,
    Warn,
    Info,
    Debug,
}

impl Level {
    const ALL: [(&str, Self); 4] = [
        ("error", Self::Error),
        ("warn", Self::Warn),
        ("info", Self::Info),
        ("debug", Self::Debug),
    ];

    fn parse(name: &str) -> Option<Self> {
        let found = Self::ALL
            .iter()
            .find(|(known, _)| known.eq_ignore_ascii_case(name));
        found.map(|(_, level)| *level)
    }

    fn name(self) -> &'static str {
        Self::ALL[self as usize].0
    }
}

/// The log of one call.
pub(super) struct Log {
    file: Option<PathBuf>,
    socket: PathBuf,
    level: Level,
    /// What every record says.
    fields: Map<String, Value>,
    records: Vec<String>,
}

impl Log {
    /// Writes where the configuration says. A level that is none is told and taken for `info`: no pod has to wait for its repair.
    pub(super) fn new(entry: &Entry, fields: &[(&str, &str)]) -> Self {
        let level = entry.log_level.as_deref().map(Level::parse);
        let mut log = Self {
            file: entry.log_file.clone(),
            socket: entry.socket().to_owned(),
            level: level.flatten().unwrap_or(Level::Info),
            fields: object(fields),
            records: Vec::new(),
        };
        if level == Some(None) {
            log.record(
                Level::Warn,
                "logLevel is none of error, warn, info, debug: info is taken",
                &[],
            );
        }
        log
    }

    pub(super) fn record(&mut self, level: Level, message: &str, fields: &[(&str, &str)]) {
        if level > self.level {
            return;
        }
        let mut record = object(fields);
        record.extend(self.fields.clone());
        record.insert("level".to_owned(), level.name().into());
        record.insert("time".to_owned(), timestamp(SystemTime::now()).into());
        record.insert("msg".to_owned(), short(message).into());
        let line = Value::Object(record).to_string();
        if let Some(file) = &self.file {
            // There is no place to tell it: standard output is the result's, and standard error may be nowhere.
            let _ = append(file, &format!("{line}\n"));
        }
        if self.records.len() < MAX_RECORDS {
            self.records.push(line);
        }
    }

    /// Tells the agent. One that is away or busy does not get to know.
    pub(super) fn tell_agent(self) {
        if !self.records.is_empty() {
            let _ = agent::tell(&self.socket, "/log", &Value::from(self.records).to_string());
        }
    }
}

fn object(fields: &[(&str, &str)]) -> Map<String, Value> {
    let pairs = fields
        .iter()
        .map(|(key, value)| ((*key).to_owned(), short(value).into()));
    pairs.collect()
}

fn short(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_TEXT_BYTES)]
}

/// Appends a line by one write(2), which other processes' lines do not get into.
fn append(path: &Path, line: &str) -> io::Result<()> {
    let mut file = open(path)?;
    if file.metadata()?.len() > MAX_FILE_BYTES && rotate(path, &file)? {
        file = open(path)?;
    }
    // Half a line is what a full disk leaves; another attempt would not be one line either.
    file.write(line.as_bytes()).map(drop)
}

fn open(path: &Path) -> io::Result<File> {
    if let Some(directory) = path.parent() {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o750)
            .create(directory)?;
    }
    let file = OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o640)
        // A pipe without a reader would be waited for.
        .custom_flags(OFlag::O_NONBLOCK.bits())
        .open(path)?;
    let opened = file.metadata()?;
    let is_stdout = || fs::metadata("/dev/stdout").is_ok_and(|stdout| id(&stdout) == id(&opened));
    match opened.is_file() && !is_stdout() {
        true => Ok(file),
        // Such as /dev/stdout, which is the result's whatever it leads to.
        false => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "not a file for a log",
        )),
    }
}

fn id(of: &Metadata) -> (u64, u64) {
    (of.dev(), of.ino())
}

/// Renames the file, unless another process has done so or is at it. The lock is on the open file: whoever has it and finds that file at
/// `path` is the only one to move it.
fn rotate(path: &Path, file: &File) -> io::Result<bool> {
    if file.try_lock().is_err() {
        return Ok(false);
    }
    if id(&file.metadata()?) == id(&fs::metadata(path)?) {
        let mut old = OsString::from(path);
        old.push(".1");
        fs::rename(path, old)?;
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::{sync::Barrier, thread};

    use super::*;

    fn log(file: &Path, level: Option<&str>) -> Log {
        let entry = Entry {
            log_file: Some(file.to_owned()),
            log_level: level.map(str::to_owned),
            agent_socket: Some(file.with_file_name("absent.sock")),
            ..Entry::default()
        };
        Log::new(&entry, &[("pod", "shop/web-0")])
    }

    fn records(file: &Path) -> Vec<Value> {
        let text = fs::read_to_string(file).unwrap_or_default();
        text.lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }

    #[test]
    fn records_below_the_level_are_left_out() {
        for (level, expected) in [
            (Some("error"), &["e"][..]),
            (Some("WARN"), &["e", "w"]),
            (None, &["e", "w", "i"]),
            (Some("debug"), &["e", "w", "i", "d"]),
            (
                Some("loud"),
                &[
                    "logLevel is none of error, warn, info, debug: info is taken",
                    "e",
                    "w",
                    "i",
                ],
            ),
        ] {
            let directory = tempfile::tempdir().unwrap();
            let file = directory.path().join("made/plugin.log");
            let mut log = log(&file, level);
            for (level, message) in [
                (Level::Error, "e"),
                (Level::Warn, "w"),
                (Level::Info, "i"),
                (Level::Debug, "d"),
            ] {
                log.record(level, message, &[("netns", "/n")]);
            }
            let found = records(&file);
            let messages: Vec<_> = found
                .iter()
                .map(|record| record["msg"].as_str().unwrap())
                .collect();
            assert_eq!(messages, expected, "{level:?}");
            let last = found.last().unwrap();
            assert_eq!(
                (&last["pod"], &last["netns"]),
                (&"shop/web-0".into(), &"/n".into())
            );
            assert_eq!(log.records.len(), found.len());
            log.tell_agent();
        }
    }

    #[test]
    fn many_writers_lose_no_line_when_the_file_is_renamed() {
        const WRITERS: usize = 8;
        const LINES: usize = 50;
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("plugin.log");
        let full = File::create(&file).unwrap();
        full.set_len(MAX_FILE_BYTES + 1).unwrap();
        let start = Barrier::new(WRITERS);
        thread::scope(|scope| {
            for writer in 0..WRITERS {
                let (file, start) = (&file, &start);
                scope.spawn(move || {
                    start.wait();
                    for line in 0..LINES {
                        log(file, None).record(Level::Info, &format!("{writer}-{line}"), &[]);
                    }
                });
            }
        });
        // Writers that had the old file open when it was renamed end in it, behind its zeros.
        let old = fs::read(directory.path().join("plugin.log.1")).unwrap();
        assert!(old.len() as u64 > MAX_FILE_BYTES, "the full file was replaced");
        let late = String::from_utf8(old[MAX_FILE_BYTES as usize + 1..].to_vec()).unwrap();
        let mut found: Vec<String> = late
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap())
            .chain(records(&file))
            .map(|record| record["msg"].as_str().unwrap().to_owned())
            .collect();
        found.sort();
        let mut expected: Vec<String> = (0..WRITERS)
            .flat_map(|writer| (0..LINES).map(move |line| format!("{writer}-{line}")))
            .collect();
        expected.sort();
        assert_eq!(found, expected);
    }

    #[test]
    fn only_a_regular_file_is_written_to() {
        let directory = tempfile::tempdir().unwrap();
        let pipe = directory.path().join("pipe");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        for path in [&pipe, Path::new("/dev/stdout"), directory.path()] {
            log(path, None).record(Level::Info, "nowhere", &[]);
            append(path, "nowhere\n").unwrap_err();
        }
    }

    #[test]
    fn long_texts_are_cut_at_a_character() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("plugin.log");
        log(&file, None).record(Level::Info, &"ö".repeat(5000), &[("error", &"x".repeat(5000))]);
        let record = &records(&file)[0];
        assert_eq!(record["msg"].as_str().unwrap().len(), MAX_TEXT_BYTES);
        assert_eq!(record["error"].as_str().unwrap().len(), MAX_TEXT_BYTES);
    }
}
