//! What was on the wire: a packet socket, and as much of a parser as TCP in a pod's network needs.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::{AsRawFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use nix::{
    errno::Errno,
    sys::{
        socket::{
            AddressFamily, LinkAddr, SockFlag, SockProtocol, SockType, recvfrom, setsockopt, socket, sockopt,
        },
        time::TimeVal,
    },
};

use crate::netns::Namespace;

/// Bytes of segments that are kept; a capture is for tests of a few connections.
const MAX_BYTES: usize = 64 << 20;
/// Longest time from a stop to its end, where there is no pause in the traffic.
const STOP_DEADLINE: Duration = Duration::from_secs(5);

/// A TCP segment that was seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// From.
    pub src: SocketAddr,
    /// To.
    pub dst: SocketAddr,
    /// SYN without ACK: somebody opens a connection.
    pub opens: bool,
    /// RST.
    pub resets: bool,
    /// What it carries.
    pub payload: Vec<u8>,
}

/// A capture under way.
#[derive(Debug)]
pub struct Capture {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Vec<Segment>>>,
}

impl Capture {
    /// Starts to record the TCP segments of one interface.
    pub fn start(ns: &Namespace, ifindex: u32) -> Result<Self> {
        let socket = ns.run(|| {
            socket(
                AddressFamily::Packet,
                SockType::Raw,
                SockFlag::SOCK_CLOEXEC,
                SockProtocol::EthAll,
            )
        });
        let socket = socket.context("opening a packet socket")?;
        setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::new(0, 50_000))?;
        setsockopt(&socket, sockopt::RcvBufForce, &(32 << 20))?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || record(&socket, ifindex, &stopped));
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }

    /// Ends it and returns what was seen.
    ///
    /// # Panics
    /// When the recording thread did.
    pub fn stop(mut self) -> Vec<Segment> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread
            .take()
            .map(|thread| thread.join().expect("the recording thread ends"))
            .unwrap_or_default()
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn record(socket: &OwnedFd, ifindex: u32, stop: &AtomicBool) -> Vec<Segment> {
    let mut segments = Vec::new();
    let mut bytes = 0;
    let mut stopped = None;
    let mut frame = vec![0; 128 << 10];
    loop {
        if stop.load(Ordering::Relaxed) && stopped.get_or_insert_with(Instant::now).elapsed() > STOP_DEADLINE
        {
            return segments;
        }
        match recvfrom::<LinkAddr>(socket.as_raw_fd(), &mut frame) {
            Ok((length, Some(from))) if from.ifindex() == usize::try_from(ifindex).unwrap_or_default() => {
                if bytes < MAX_BYTES
                    && let Some(segment) = parse(&frame[..length])
                {
                    bytes += segment.payload.len();
                    segments.push(segment);
                }
            }
            Ok(_) | Err(Errno::EINTR) => {}
            // Nothing for a while: all that was sent before the stop has been read.
            Err(Errno::EAGAIN) if stop.load(Ordering::Relaxed) => return segments,
            Err(Errno::EAGAIN) => {}
            Err(error) => panic!("reading from a packet socket: {error}"),
        }
    }
}

/// Reads an Ethernet frame; `None` for what is not TCP over plain IP. IPv6 extension headers are not walked.
fn parse(frame: &[u8]) -> Option<Segment> {
    let packet = frame.get(14..)?;
    let (src, dst, tcp): (IpAddr, IpAddr, &[u8]) = match frame.get(12..14)? {
        [0x08, 0x00] => {
            let header = usize::from(packet.first()? & 0xf) * 4;
            let total = usize::from(u16::from_be_bytes([*packet.get(2)?, *packet.get(3)?]));
            if *packet.get(9)? != 6 {
                return None;
            }
            // Padding of short frames is cut off; a super-packet of more than 64 KiB says 0.
            let end = if total == 0 {
                packet.len()
            } else {
                total.min(packet.len())
            };
            let ip = |at: usize| Some(Ipv4Addr::from(<[u8; 4]>::try_from(packet.get(at..at + 4)?).ok()?));
            (ip(12)?.into(), ip(16)?.into(), packet.get(header..end)?)
        }
        [0x86, 0xdd] => {
            if *packet.get(6)? != 6 {
                return None;
            }
            let ip = |at: usize| {
                Some(Ipv6Addr::from(
                    <[u8; 16]>::try_from(packet.get(at..at + 16)?).ok()?,
                ))
            };
            (ip(8)?.into(), ip(24)?.into(), packet.get(40..)?)
        }
        _ => return None,
    };
    let port = |at: usize| Some(u16::from_be_bytes([*tcp.get(at)?, *tcp.get(at + 1)?]));
    let flags = *tcp.get(13)?;
    let offset = usize::from(tcp.get(12)? >> 4) * 4;
    Some(Segment {
        src: (src, port(0)?).into(),
        dst: (dst, port(2)?).into(),
        opens: flags & 0x12 == 0x02,
        resets: flags & 0x04 != 0,
        payload: tcp.get(offset..)?.to_vec(),
    })
}

/// The ports to which connections were opened, sorted, each once.
pub fn opened_ports(segments: &[Segment]) -> Vec<u16> {
    let mut ports: Vec<u16> = segments
        .iter()
        .filter(|segment| segment.opens)
        .map(|segment| segment.dst.port())
        .collect();
    ports.sort_unstable();
    ports.dedup();
    ports
}

/// Whether `needle` was on the wire, in any direction of any connection, in one segment or over several.
pub fn contains(segments: &[Segment], needle: &[u8]) -> bool {
    let mut flows: Vec<(SocketAddr, SocketAddr, Vec<u8>)> = Vec::new();
    for segment in segments.iter().filter(|segment| !segment.payload.is_empty()) {
        match flows
            .iter_mut()
            .find(|(src, dst, _)| (*src, *dst) == (segment.src, segment.dst))
        {
            Some((_, _, bytes)) => bytes.extend_from_slice(&segment.payload),
            None => flows.push((segment.src, segment.dst, segment.payload.clone())),
        }
    }
    flows
        .iter()
        .any(|(_, _, bytes)| bytes.windows(needle.len()).any(|window| window == needle))
}

/// What a port carried: TLS records by their headers, and bytes that were none.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct TlsRecords {
    /// Records whose header was at the start of a segment: handshake, or encrypted.
    pub records: usize,
    /// Bytes in all.
    pub bytes: usize,
    /// First flights that were not TLS.
    pub not_tls: usize,
}

/// Looks at the flows from and to `port`. A flow is TLS when its first bytes are a handshake record's header.
pub fn tls_records(segments: &[Segment], port: u16) -> TlsRecords {
    let mut found = TlsRecords::default();
    let mut seen = Vec::new();
    for segment in segments {
        if (segment.dst.port() != port && segment.src.port() != port) || segment.payload.is_empty() {
            continue;
        }
        found.bytes += segment.payload.len();
        let is_record = matches!(segment.payload.as_slice(), [20..=23, 3, 1..=4, ..]);
        found.records += usize::from(is_record);
        let flow = (segment.src, segment.dst);
        if !seen.contains(&flow) {
            seen.push(flow);
            found.not_tls += usize::from(!matches!(segment.payload.as_slice(), [22, 3, ..]));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(payload: &[u8]) -> Vec<u8> {
        let mut frame = vec![0; 12];
        frame.extend([
            0x08, 0x00, 0x45, 0, 0, 0, 0, 0, 0, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2,
        ]);
        let total = u16::try_from(40 + payload.len()).unwrap();
        frame[16..18].copy_from_slice(&total.to_be_bytes());
        frame.extend([
            0x9c, 0x40, 0, 80, 0, 0, 0, 0, 0, 0, 0, 0, 0x50, 0x02, 0, 0, 0, 0, 0, 0,
        ]);
        frame.extend(payload);
        frame
    }

    #[test]
    fn a_segment_is_read_and_its_padding_is_not() {
        let mut padded = frame(b"hello");
        padded.extend([0; 9]);
        let segment = parse(&padded).unwrap();
        assert_eq!(segment.dst, "10.0.0.2:80".parse().unwrap());
        assert!(segment.opens && !segment.resets);
        assert_eq!(segment.payload, b"hello");
    }

    #[test]
    fn cut_frames_are_not_read() {
        let whole = frame(b"");
        for length in 0..whole.len() {
            assert!(parse(&whole[..length]).is_none(), "{length}");
        }
    }

    #[test]
    fn a_text_is_found_over_two_segments() {
        let segments: Vec<_> = [b"hel".as_slice(), b"lo"]
            .iter()
            .filter_map(|part| parse(&frame(part)))
            .collect();
        assert!(contains(&segments, b"hello"));
        assert!(!contains(&segments, b"hullo"));
        assert_eq!(opened_ports(&segments), [80]);
        assert_eq!(
            tls_records(&segments, 80),
            TlsRecords {
                records: 0,
                bytes: 5,
                not_tls: 1
            }
        );
    }
}
