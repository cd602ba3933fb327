//! A netlink socket of the calling thread's network namespace, used in turns: one request, and its whole answer. Of rtnetlink as a rule;
//! `rulesets` has one of nftables.
//!
//! The kernel answers within the call that asks (both are synchronous), so a blocking socket is all it takes: opening one
//! and asking costs some microseconds.

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd},
};

use nix::sys::{
    socket::{
        AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, setsockopt, socket,
        sockopt::ReceiveTimeout,
    },
    time::TimeVal,
};
use rtnetlink::{
    packet_core::{
        ErrorBuffer, NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkBuffer, NetlinkHeader, NetlinkMessage,
        NetlinkPayload, Parseable,
    },
    packet_route::RouteNetlinkMessage,
};

/// Room for what the kernel puts into one datagram of a dump at most: NLMSG_GOODSIZE-limited, 32 KiB since Linux 4.4
/// (`netlink_dump`).
const BUFFER_BYTES: usize = 32 * 1024;

/// Longest wait for an answer, in seconds. The kernel waits for its own lock at most.
const ANSWER_SECONDS: i64 = 5;

// include/uapi/linux/netlink.h
const HEADER_BYTES: usize = 16;
const NLMSG_NOOP: u16 = 1;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;

/// A socket. It stays in the namespace in which it was opened.
#[derive(Debug)]
pub struct Netlink {
    socket: OwnedFd,
    sequence: u32,
    buffer: Vec<u8>,
}

impl Netlink {
    /// Opens a socket of rtnetlink in the calling thread's namespace.
    ///
    /// # Errors
    /// Those of socket(2).
    pub fn open() -> io::Result<Self> {
        Self::of(SockProtocol::NetlinkRoute)
    }

    /// Opens a socket of another protocol.
    pub(super) fn of(protocol: SockProtocol) -> io::Result<Self> {
        let socket = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC,
            protocol,
        )?;
        setsockopt(&socket, ReceiveTimeout, &TimeVal::new(ANSWER_SECONDS, 0))?;
        Ok(Self {
            socket,
            sequence: 0,
            buffer: vec![0; BUFFER_BYTES],
        })
    }

    /// Asks for a change, with `flags` (`NLM_F_CREATE` and the like) beside those of every request.
    ///
    /// # Errors
    /// The kernel's refusal; those of send(2) and recv(2), `WouldBlock` when there is no answer in time.
    pub fn change(&mut self, message: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        self.ask(message, NLM_F_ACK | flags).map(drop)
    }

    /// Asks for one thing: a route, say.
    ///
    /// # Errors
    /// As [`Self::change`]; `NotFound` when the kernel has nothing to say.
    pub fn get<R: Parseable<[u8]>>(&mut self, message: RouteNetlinkMessage) -> io::Result<R> {
        let mut answers = self.ask(message, NLM_F_ACK)?;
        let answer = answers.pop().ok_or(io::ErrorKind::NotFound)?;
        R::parse(&answer).map_err(invalid)
    }

    /// Asks for all there are. The answers are told as they came, without the netlink header: what others have made may be
    /// newer than any reader of it here, and what is not of interest must not be in the way.
    ///
    /// # Errors
    /// As [`Self::change`].
    pub fn dump(&mut self, message: RouteNetlinkMessage) -> io::Result<Vec<Vec<u8>>> {
        self.ask(message, NLM_F_DUMP)
    }

    /// Asks for one thing by a message of another protocol; the answer comes without the netlink header.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub(super) fn get_raw(&mut self, kind: u16, payload: &[u8]) -> io::Result<Vec<u8>> {
        let length = u32::try_from(HEADER_BYTES + payload.len()).map_err(invalid)?;
        let flags = NLM_F_REQUEST | NLM_F_ACK;
        let sequence = self.next();
        let mut bytes = [
            &length.to_ne_bytes()[..],
            &kind.to_ne_bytes(),
            &flags.to_ne_bytes(),
        ]
        .concat();
        // The sender's port, which the kernel fills in, comes last.
        bytes.extend([sequence.to_ne_bytes(), [0; 4]].concat());
        bytes.extend(payload);
        send(self.socket.as_raw_fd(), &bytes, MsgFlags::empty())?;
        self.answers()?
            .pop()
            .ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn next(&mut self) -> u32 {
        self.sequence = self.sequence.wrapping_add(1);
        self.sequence
    }

    fn ask(&mut self, message: RouteNetlinkMessage, flags: u16) -> io::Result<Vec<Vec<u8>>> {
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags;
        header.sequence_number = self.next();
        let mut request = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(message));
        request.finalize();
        let mut bytes = vec![0; request.buffer_len()];
        request.serialize(&mut bytes);
        send(self.socket.as_raw_fd(), &bytes, MsgFlags::empty())?;
        self.answers()
    }

    /// Reads up to the end of the answer: an acknowledgement, the end of a dump, or an error.
    fn answers(&mut self) -> io::Result<Vec<Vec<u8>>> {
        let mut answers = Vec::new();
        loop {
            let length = recv(self.socket.as_raw_fd(), &mut self.buffer, MsgFlags::empty())?;
            let mut rest = &self.buffer[..length];
            while !rest.is_empty() {
                let message = NetlinkBuffer::new_checked(rest).map_err(invalid)?;
                let payload = message.payload();
                // What is left of an answer that was given up is passed over.
                if message.sequence_number() == self.sequence {
                    match message.message_type() {
                        NLMSG_NOOP => {}
                        NLMSG_DONE => return Ok(answers),
                        NLMSG_ERROR => {
                            let error = ErrorBuffer::new_checked(payload).map_err(invalid)?;
                            return match error.code() {
                                None => Ok(answers),
                                Some(code) => Err(io::Error::from_raw_os_error(-code.get())),
                            };
                        }
                        _ => answers.push(payload.to_vec()),
                    }
                }
                // Messages are aligned to 4 bytes: include/uapi/linux/netlink.h, NLMSG_ALIGN.
                let end = (message.length() as usize).next_multiple_of(4);
                rest = rest.get(end..).unwrap_or_default();
            }
        }
    }
}

fn invalid(error: impl std::error::Error + Send + Sync + 'static) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

#[cfg(test)]
mod tests {
    use rtnetlink::packet_route::link::{LinkAttribute, LinkMessage};

    use super::*;

    #[test]
    fn all_interfaces_are_told() {
        let mut netlink = Netlink::open().unwrap();
        let links = netlink
            .dump(RouteNetlinkMessage::GetLink(LinkMessage::default()))
            .unwrap();
        let is_lo = |answer: &Vec<u8>| {
            let link = LinkMessage::parse(answer.as_slice()).unwrap();
            link.attributes.contains(&LinkAttribute::IfName("lo".into()))
        };
        assert!(links.iter().any(is_lo));
    }

    #[test]
    fn a_refusal_is_an_error_and_the_socket_goes_on() {
        let mut netlink = Netlink::open().unwrap();
        let mut by_index = LinkMessage::default();
        by_index.header.index = i32::MAX as u32;
        let error = netlink
            .get::<LinkMessage>(RouteNetlinkMessage::GetLink(by_index.clone()))
            .unwrap_err();
        assert!(error.raw_os_error() == Some(libc::ENODEV), "{error}");
        by_index.header.index = 1;
        let lo: LinkMessage = netlink.get(RouteNetlinkMessage::GetLink(by_index)).unwrap();
        assert_eq!(lo.header.index, 1);
    }
}
