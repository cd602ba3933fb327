//! HBONE: TCP connections as HTTP/2 CONNECT streams within mutual TLS.
//!
//! - [`stream`]: one tunnelled connection, as the two halves that `proxy::copy` takes
//! - [`client`]: one HTTP/2 connection to a peer, and what can go wrong with it
//! - [`pool`]: the HTTP/2 connections of a pod to its peers
//! - [`nested`]: a connection to a peer within a stream of another
//! - [`server`]: an HTTP/2 connection from a peer
//!
//! All take any byte stream, and leave TLS, identities and dialling to `proxy::outbound` and `proxy::inbound`.

use std::time::Duration;

use h2::{Ping, PingPong};
use tokio::time::{sleep, timeout};

pub(crate) mod client;
pub(crate) mod nested;
pub(crate) mod pool;
pub(crate) mod server;
pub(crate) mod stream;
pub(crate) mod window;

#[cfg(test)]
mod tests;

/// Settings of HTTP/2. The defaults are ztunnel's, the connection's window excepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Http2Config {
    /// Bytes that a peer may send on one stream before they are taken by the application (SETTINGS_INITIAL_WINDOW_SIZE).
    pub stream_window_bytes: u32,
    /// Bytes that a peer may send on all streams of a connection, at least. It grows with the number of open streams, so that
    /// it never is less than what they may hold together: else a few applications that do not read would stop all other
    /// streams of the connection.
    pub connection_window_bytes: u32,
    /// Bytes by which the windows of all connections of a pod, in one direction, may grow.
    pub window_budget_bytes: u64,
    /// Longest frame that is accepted (SETTINGS_MAX_FRAME_SIZE).
    pub frame_bytes: u32,
    /// Longest header list that is accepted in a request (SETTINGS_MAX_HEADER_LIST_SIZE).
    pub request_header_bytes: u32,
    /// Longest header list that is accepted in a response.
    pub response_header_bytes: u32,
    /// Streams that a peer may have open at a time on a connection to us.
    pub max_streams: u32,
    /// Bytes of one stream that wait for a connection from a peer to take them.
    pub server_send_buffer_bytes: usize,
    /// Time from a connection's start, or a PING's answer, to the next PING.
    pub ping_interval: Duration,
    /// Time in which a PING must be answered; else the connection is dead.
    pub ping_deadline: Duration,
}

impl Default for Http2Config {
    fn default() -> Self {
        Self {
            stream_window_bytes: 4 << 20,
            connection_window_bytes: 16 << 20,
            window_budget_bytes: 256 << 20,
            frame_bytes: 1 << 20,
            request_header_bytes: 64 << 10,
            response_header_bytes: 16 << 10,
            max_streams: 200,
            server_send_buffer_bytes: 400 << 10,
            ping_interval: Duration::from_secs(10),
            ping_deadline: Duration::from_secs(20),
        }
    }
}

impl Http2Config {
    /// The connection window for `streams` open streams: one stream's more than they can hold, for the next.
    fn connection_window(&self, streams: usize) -> u32 {
        /// RFC 9113, section 6.9.1.
        const MAX_WINDOW: u64 = (1 << 31) - 1;
        let streams = u64::try_from(streams).unwrap_or(u64::MAX).saturating_add(1);
        let needed = streams.saturating_mul(self.stream_window_bytes.into());
        u32::try_from(needed.min(MAX_WINDOW)).map_or(self.connection_window_bytes, |needed| {
            needed.max(self.connection_window_bytes)
        })
    }
}

/// Pings a peer until it no longer answers in time; then it is dead, whatever TCP still hopes for. Without end on a connection
/// that is closing: that has its own end.
async fn until_dead(ping_pong: Option<PingPong>, config: Http2Config) {
    if let Some(mut ping_pong) = ping_pong {
        loop {
            sleep(config.ping_interval).await;
            match timeout(config.ping_deadline, ping_pong.ping(Ping::opaque())).await {
                Ok(Ok(_)) => {}
                Ok(Err(_)) => break,
                Err(_) => return,
            }
        }
    }
    std::future::pending().await
}
