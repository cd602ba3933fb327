//! A browser without a window, driven by WebDriver (W3C): Chromium and its driver, as Debian has them.

use std::{
    io::{self, BufRead, BufReader, Write},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    path::Path,
    time::Duration,
};

use base64::Engine as _;
use serde_json::{Value, json};

use crate::{
    netns::Namespace,
    process::{Process, command},
    wait,
};

/// Tab, as WebDriver writes it.
pub const TAB: char = '\u{e004}';
/// Enter.
pub const ENTER: char = '\u{e007}';

/// One command; the first one starts the browser.
const DEADLINE: Duration = Duration::from_secs(60);

/// Nothing but the pages that a test opens, and nothing of it left.
const FLAGS: &[&str] = &[
    "--headless",
    // Its commands come by pipe: it ends with its driver, and needs no port of its own.
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1300,1000",
];

/// A browser in a namespace. It ends when it is dropped.
#[derive(Debug)]
pub struct Browser<'a> {
    ns: &'a Namespace,
    driver: SocketAddr,
    /// The path of its session.
    session: String,
    _process: Process,
}

impl<'a> Browser<'a> {
    /// Starts one, with its files below `directory`.
    ///
    /// # Panics
    /// When it does not start.
    pub fn start(ns: &'a Namespace, directory: &Path) -> Self {
        let mut driver = command(ns, "chromedriver");
        driver.arg("--port=0").env("HOME", directory);
        let process = Process::start(&mut driver, &directory.join("browser.log")).unwrap();
        let port = wait::until("the browser's driver to listen", || {
            let output = process.output();
            let (_, rest) = output.split_once("started successfully on port ")?;
            rest.split_once('.')?.0.parse().ok()
        });
        let mut browser = Self {
            ns,
            driver: (Ipv4Addr::LOCALHOST, port).into(),
            session: String::new(),
            _process: process,
        };
        let profile = format!("--user-data-dir={}", directory.join("browser").display());
        let flags: Vec<_> = FLAGS.iter().copied().chain([&*profile]).collect();
        let wanted = json!({"capabilities": {"alwaysMatch": {
            "goog:chromeOptions": {"args": flags},
            "goog:loggingPrefs": {"browser": "ALL"},
        }}});
        let session = browser.command("POST", "/session", Some(&wanted));
        browser.session = format!("/session/{}", session["sessionId"].as_str().unwrap());
        browser
    }

    /// Opens a page.
    ///
    /// # Panics
    /// When it cannot.
    pub fn open(&self, url: &str) {
        self.post("/url", &json!({"url": url}));
    }

    /// What a script in the page returns.
    ///
    /// # Panics
    /// When it fails.
    pub fn run(&self, script: &str) -> Value {
        self.post("/execute/sync", &json!({"script": script, "args": []}))
    }

    /// The texts of what a selector finds.
    ///
    /// # Panics
    /// When the page is not there.
    pub fn texts(&self, selector: &str) -> Vec<String> {
        let found = self.run(&format!(
            "return [...document.querySelectorAll({})].map((one) => one.innerText);",
            json!(selector)
        ));
        serde_json::from_value(found).unwrap()
    }

    /// Presses and releases keys, one after the other.
    ///
    /// # Panics
    /// When the browser refuses.
    pub fn press(&self, keys: &[char]) {
        let pressed = |key: &char| {
            [
                json!({"type": "keyDown", "value": key}),
                json!({"type": "keyUp", "value": key}),
            ]
        };
        let actions: Vec<_> = keys.iter().flat_map(pressed).collect();
        self.post(
            "/actions",
            &json!({"actions": [{"type": "key", "id": "keys", "actions": actions}]}),
        );
    }

    /// As for somebody who prefers this (`light`, `dark`).
    ///
    /// # Panics
    /// When the browser refuses.
    pub fn prefer(&self, scheme: &str) {
        let features = json!([{"name": "prefers-color-scheme", "value": scheme}]);
        self.post(
            "/goog/cdp/execute",
            &json!({"cmd": "Emulation.setEmulatedMedia", "params": {"features": features}}),
        );
    }

    /// What it looks like, as PNG.
    ///
    /// # Panics
    /// When the browser refuses.
    pub fn screenshot(&self) -> Vec<u8> {
        let path = format!("{}/screenshot", self.session);
        let picture = self.command("GET", &path, None);
        base64::engine::general_purpose::STANDARD
            .decode(picture.as_str().unwrap())
            .unwrap()
    }

    /// The errors that the page made, and what it was refused, since the last look.
    ///
    /// # Panics
    /// When the browser refuses.
    pub fn errors(&self) -> Vec<String> {
        let log = self.post("/se/log", &json!({"type": "browser"}));
        let entries = log.as_array().unwrap().iter();
        entries
            .filter(|entry| entry["level"] == "SEVERE")
            .map(|entry| entry["message"].to_string())
            .collect()
    }

    fn post(&self, path: &str, body: &Value) -> Value {
        self.command("POST", &format!("{}{path}", self.session), Some(body))
    }

    fn command(&self, method: &str, path: &str, body: Option<&Value>) -> Value {
        let answer = self.exchange(method, path, body);
        let (status, mut answer) = answer.unwrap_or_else(|error| panic!("{method} {path}: {error}"));
        assert_eq!(status, 200, "{method} {path}: {answer}");
        answer["value"].take()
    }

    fn exchange(&self, method: &str, path: &str, body: Option<&Value>) -> io::Result<(u16, Value)> {
        let mut stream = self.ns.run(|| TcpStream::connect(self.driver))?;
        stream.set_read_timeout(Some(DEADLINE))?;
        stream.set_write_timeout(Some(DEADLINE))?;
        let body = body.map(Value::to_string).unwrap_or_default();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nContent-Length: {}\r\n\r\n{body}",
            self.driver,
            body.len()
        )?;
        read_answer(&mut BufReader::new(stream))
    }
}

/// The driver keeps its connections open, whatever it is asked: an answer ends by its length.
fn read_answer(from: &mut impl BufRead) -> io::Result<(u16, Value)> {
    let invalid = || io::Error::new(io::ErrorKind::InvalidData, "no HTTP answer");
    let mut line = String::new();
    from.read_line(&mut line)?;
    let status = line.split(' ').nth(1).and_then(|status| status.parse().ok());
    let status = status.ok_or_else(invalid)?;
    let mut length = None;
    loop {
        line.clear();
        from.read_line(&mut line)?;
        match line.trim_end().split_once(':') {
            Some((name, value)) if name.eq_ignore_ascii_case("content-length") => {
                length = value.trim().parse().ok();
            }
            Some(_) => {}
            // An empty line, or the end.
            None => break,
        }
    }
    let mut body = vec![0; length.ok_or_else(invalid)?];
    from.read_exact(&mut body)?;
    Ok((status, serde_json::from_slice(&body)?))
}

impl Drop for Browser<'_> {
    fn drop(&mut self) {
        // Ends the browser itself; the driver ends with its process.
        if !self.session.is_empty() {
            let _ = self.exchange("DELETE", &self.session, None);
        }
    }
}
