//! A ZDS server, as a node agent is one: SOCK_SEQPACKET, a protobuf message per packet, the namespace by SCM_RIGHTS.
//! The few messages are encoded by hand, so that they do not share a mistake with the client under test.

use std::{
    io::{self, IoSlice, Read},
    os::fd::{AsFd, AsRawFd},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::socket::{ControlMessage, MsgFlags, UnixAddr, sendmsg};
use socket2::{Domain, SockAddr, Socket, Type};

use crate::{node::Pod, wait};

/// The listening end.
#[derive(Debug)]
pub struct ZdsServer {
    socket: Socket,
    path: PathBuf,
}

/// A client's connection, after its hello.
#[derive(Debug)]
pub struct ZdsConnection {
    socket: Socket,
}

impl ZdsServer {
    /// Listens at `path`.
    pub fn listen(path: &Path) -> Result<Self> {
        let socket = Socket::new(Domain::UNIX, Type::SEQPACKET, None).context("making a seqpacket socket")?;
        socket
            .bind(&SockAddr::unix(path)?)
            .with_context(|| format!("binding {}", path.display()))?;
        socket.listen(8)?;
        socket.set_nonblocking(true)?;
        Ok(Self {
            socket,
            path: path.to_owned(),
        })
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Takes a client, and its hello.
    pub fn accept(&self) -> Result<ZdsConnection> {
        let end = Instant::now() + wait::DEADLINE;
        let socket = loop {
            match self.socket.accept() {
                Ok((socket, _)) => break socket,
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error.into()),
                Err(_) => ensure!(Instant::now() < end, "no ZDS client has come"),
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        socket.set_nonblocking(false)?;
        socket.set_read_timeout(Some(wait::DEADLINE))?;
        let connection = ZdsConnection { socket };
        let hello = connection.receive()?;
        // version = V1
        ensure!(hello == [0x08, 0x01], "the hello is {hello:02x?}");
        Ok(connection)
    }
}

impl ZdsConnection {
    /// Sends a pod with its namespace; the inner result is the client's answer.
    pub fn add(&self, pod: &Pod) -> Result<Result<(), String>> {
        let info = [
            field(1, pod.name.as_bytes()),
            field(2, pod.namespace.as_bytes()),
            field(3, pod.name.as_bytes()),
        ]
        .concat();
        let add = [field(1, pod.uid.as_bytes()), field(2, &info)].concat();
        let fds = [pod.ns.netns().as_fd().as_raw_fd()];
        self.request(&field(1, &add), &[ControlMessage::ScmRights(&fds)])
    }

    /// Tells that a pod exists.
    pub fn keep(&self, uid: &str) -> Result<Result<(), String>> {
        self.request(&field(5, &field(1, uid.as_bytes())), &[])
    }

    /// Tells that a pod is gone. Its UID is field 2 here.
    pub fn del(&self, uid: &str) -> Result<Result<(), String>> {
        self.request(&field(2, &field(2, uid.as_bytes())), &[])
    }

    /// Tells that all pods have been named.
    pub fn snapshot_sent(&self) -> Result<Result<(), String>> {
        self.request(&field(3, &[]), &[])
    }

    fn request(&self, message: &[u8], control: &[ControlMessage<'_>]) -> Result<Result<(), String>> {
        let iov = [IoSlice::new(message)];
        sendmsg::<UnixAddr>(
            self.socket.as_raw_fd(),
            &iov,
            control,
            MsgFlags::MSG_NOSIGNAL,
            None,
        )
        .context("sending a ZDS message")?;
        let answer = self.receive()?;
        let (1, ack) = read_field(&answer)? else {
            bail!("answer {answer:02x?} is not an ack")
        };
        if ack.is_empty() {
            return Ok(Ok(()));
        }
        let (1, error) = read_field(ack)? else {
            bail!("ack {ack:02x?}")
        };
        Ok(Err(String::from_utf8_lossy(error).into_owned()))
    }

    fn receive(&self) -> Result<Vec<u8>> {
        let mut packet = vec![0; 1025];
        let length = (&self.socket)
            .read(&mut packet)
            .context("waiting for the ZDS client")?;
        ensure!(length > 0, "the ZDS client has closed");
        ensure!(
            length <= 1024,
            "the ZDS client's packet is longer than 1024 bytes"
        );
        packet.truncate(length);
        Ok(packet)
    }
}

/// A length-delimited field of protobuf.
fn field(number: u8, content: &[u8]) -> Vec<u8> {
    let mut out = vec![number << 3 | 2];
    let mut length = content.len();
    while length >= 0x80 {
        out.push((length & 0x7f) as u8 | 0x80);
        length >>= 7;
    }
    out.push(length as u8);
    out.extend_from_slice(content);
    out
}

/// The only field of a message.
fn read_field(message: &[u8]) -> Result<(u8, &[u8])> {
    let (&tag, mut rest) = message.split_first().context("an empty message")?;
    let (mut length, mut shift) = (0_usize, 0);
    loop {
        let (&byte, after) = rest.split_first().context("cut in its length")?;
        rest = after;
        length |= usize::from(byte & 0x7f) << shift;
        shift += 7;
        if byte & 0x80 == 0 {
            break;
        }
        ensure!(shift < 28, "a length of more than four bytes");
    }
    ensure!(
        rest.len() == length,
        "{} bytes, where {length} were announced",
        rest.len()
    );
    Ok((tag >> 3, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_survive_being_written_and_read() {
        for length in [0, 1, 127, 128, 300, 1000] {
            let content = vec![7; length];
            let message = field(5, &content);
            assert_eq!(read_field(&message).unwrap(), (5, content.as_slice()));
        }
        assert_eq!(field(1, b"ab"), [0x0a, 2, b'a', b'b']);
        assert!(read_field(&[0x0a]).is_err());
        assert!(read_field(&[0x0a, 3, 0]).is_err());
    }
}
