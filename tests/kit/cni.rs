//! Pod events over the agent's Unix socket: what the CNI plugin sends, by a client of our own.

use std::{
    io::{Read, Write},
    net::IpAddr,
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

use anyhow::{Context, Result};
use base64::{Engine, engine::general_purpose::STANDARD};
use serde_json::{Value, json};

use crate::node::{Family, Pod};

/// Longest wait for an answer: enrolling waits for a certificate and for the kernel.
const DEADLINE: Duration = Duration::from_secs(30);

/// An answer of the agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// HTTP status.
    pub status: u16,
    /// Its text.
    pub body: String,
}

/// The event for a pod, as the CNI plugin sends it.
pub fn event(pod: &Pod) -> Value {
    json!({
        "Netns": pod.ns.path(),
        "PodName": pod.name,
        "PodNamespace": pod.namespace,
        "IPs": Family::BOTH.map(|family| address(pod.ip(family))),
        "PodUID": pod.uid,
        "ServiceAccount": pod.name,
    })
}

/// An item of the event's `IPs`: Go's encoding of an address with its mask.
fn address(ip: IpAddr) -> Value {
    let (mask, gateway): (&[u8], _) = match ip {
        IpAddr::V4(_) => (&[255, 255, 0, 0], "10.77.0.1"),
        IpAddr::V6(_) => (
            &[255, 255, 255, 255, 255, 255, 255, 255, 0, 0, 0, 0, 0, 0, 0, 0],
            "fd77::1",
        ),
    };
    json!({"Interface": 2, "Address": {"IP": ip, "Mask": STANDARD.encode(mask)}, "Gateway": gateway})
}

/// Sends a POST over a Unix socket.
pub fn post(socket: &Path, path: &str, body: &str) -> Result<Answer> {
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: unix\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    exchange(socket, &[head.as_bytes(), body.as_bytes()].concat())
}

/// Sends bytes over a Unix socket, and reads an HTTP answer.
pub fn exchange(socket: &Path, request: &[u8]) -> Result<Answer> {
    let mut stream =
        UnixStream::connect(socket).with_context(|| format!("connecting to {}", socket.display()))?;
    stream.set_read_timeout(Some(DEADLINE))?;
    stream.set_write_timeout(Some(DEADLINE))?;
    // One that refuses what it has read so far may close before it has read all: its answer counts.
    let sent = stream.write_all(request);
    let mut answer = Vec::new();
    let read = stream.read_to_end(&mut answer);
    parse_answer(&String::from_utf8_lossy(&answer)).with_context(|| {
        format!(
            "no HTTP answer (writing: {sent:?}, reading: {read:?}): {:?}",
            String::from_utf8_lossy(&answer)
        )
    })
}

/// Reads an answer that ends with its connection.
pub(crate) fn parse_answer(text: &str) -> Option<Answer> {
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.strip_prefix("HTTP/1.")?.split(' ').nth(1)?.parse().ok()?;
    let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    let body = if chunked { dechunk(body)? } else { body.to_owned() };
    Some(Answer { status, body })
}

fn dechunk(mut rest: &str) -> Option<String> {
    let mut body = String::new();
    loop {
        let (size, after) = rest.split_once("\r\n")?;
        let size = usize::from_str_radix(size.split(';').next()?.trim(), 16).ok()?;
        if size == 0 {
            return Some(body);
        }
        body.push_str(after.get(..size)?);
        rest = after.get(size..)?.strip_prefix("\r\n")?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read() {
        let plain = parse_answer("HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\nno").unwrap();
        assert_eq!(
            plain,
            Answer {
                status: 400,
                body: "no".into()
            }
        );
        let chunked = parse_answer(
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n",
        );
        assert_eq!(chunked.unwrap().body, "abc");
        assert_eq!(parse_answer(""), None);
    }
}
