//! Applications of the pods, and their clients. Sockets are made in a namespace and then used from any thread.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    net::{Shutdown, SocketAddr, TcpStream},
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};

use aws_lc_rs::digest::{Context as Digest, SHA256};
use socket2::{Domain, Socket, Type};

use crate::{
    cni::{Answer, parse_answer},
    netns::Namespace,
    wait,
};

/// No single operation of a test's connection takes longer than this.
pub const IO_DEADLINE: Duration = Duration::from_secs(30);
/// A connect that takes longer counts as a hang: the kernel's first retry of a SYN is after one second.
pub const CONNECT_DEADLINE: Duration = Duration::from_secs(15);
const WORKERS: usize = 48;

/// What an application does with a connection.
pub type Handler = fn(TcpStream, SocketAddr) -> io::Result<()>;

/// An application that listens in a namespace until it is dropped.
#[derive(Debug)]
pub struct App {
    /// Where it listens.
    pub addr: SocketAddr,
    socket: Arc<Socket>,
    workers: Vec<JoinHandle<()>>,
}

impl App {
    /// Starts an application.
    ///
    /// # Panics
    /// When the port is taken.
    pub fn start(ns: &Namespace, addr: SocketAddr, handler: Handler) -> Self {
        let socket = ns
            .run(|| listen(addr))
            .unwrap_or_else(|error| panic!("listening on {addr}: {error}"));
        let addr = socket
            .local_addr()
            .ok()
            .and_then(|addr| addr.as_socket())
            .expect("a TCP socket has one");
        let socket = Arc::new(socket);
        let workers = (0..WORKERS).map(|_| {
            let socket = Arc::clone(&socket);
            thread::spawn(move || serve(&socket, handler))
        });
        Self {
            addr,
            workers: workers.collect(),
            socket,
        }
    }
}

impl Drop for App {
    fn drop(&mut self) {
        // Wakes every worker that waits for a connection; those that serve one end with it, by their deadline at the latest.
        let _ = self.socket.shutdown(Shutdown::Both);
        self.workers.clear();
    }
}

fn listen(addr: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, None)?;
    if addr.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.set_reuse_address(true)?;
    socket.bind(&addr.into())?;
    socket.listen(1024)?;
    Ok(socket)
}

fn serve(socket: &Socket, handler: Handler) {
    while let Ok((stream, peer)) = socket.accept() {
        let Some(peer) = peer.as_socket() else { continue };
        let stream = TcpStream::from(stream);
        let served = deadlines(&stream).and_then(|()| handler(stream, peer));
        // A client that goes away is the client's matter.
        let _ = served;
    }
}

fn deadlines(stream: &TcpStream) -> io::Result<()> {
    stream.set_read_timeout(Some(IO_DEADLINE))?;
    stream.set_write_timeout(Some(IO_DEADLINE))
}

/// Sends back what comes.
pub fn echo(mut stream: TcpStream, _peer: SocketAddr) -> io::Result<()> {
    let mut writer = stream.try_clone()?;
    io::copy(&mut stream, &mut writer)?;
    writer.shutdown(Shutdown::Write)
}

/// Tells the client's address as seen here, and closes first.
pub fn who(mut stream: TcpStream, peer: SocketAddr) -> io::Result<()> {
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line)?;
    write!(stream, "{} {}", line.trim(), peer.ip())
}

/// Answers one HTTP request with the client's address, and closes.
pub fn http(mut stream: TcpStream, peer: SocketAddr) -> io::Result<()> {
    let mut request = Vec::new();
    for line in BufReader::new(&stream).take(64 << 10).lines() {
        let line = line?;
        if line.is_empty() {
            break;
        }
        request.push(line);
    }
    let body = format!(
        "{}\nyou are {}\n",
        request.first().map_or("", String::as_str),
        peer.ip()
    );
    write!(
        stream,
        "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )
}

/// Reads to the end, and answers with the hash of what came.
pub fn hash(mut stream: TcpStream, _peer: SocketAddr) -> io::Result<()> {
    let digest = read_hashed(&mut stream)?;
    stream.write_all(digest.as_bytes())
}

/// Reads a number, and sends as many bytes.
pub fn source(mut stream: TcpStream, _peer: SocketAddr) -> io::Result<()> {
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line)?;
    let bytes = line
        .trim()
        .parse()
        .map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
    write_hashed(&mut stream, bytes)?;
    stream.shutdown(Shutdown::Write)
}

/// Connects from a namespace.
pub fn connect(ns: &Namespace, addr: SocketAddr) -> io::Result<TcpStream> {
    ns.run(|| connect_here(addr))
}

fn connect_here(addr: SocketAddr) -> io::Result<TcpStream> {
    go_on()?;
    let stream = TcpStream::connect_timeout(&addr, CONNECT_DEADLINE)?;
    deadlines(&stream)?;
    Ok(stream)
}

/// Connects, sends, shuts down writing, and reads to the end.
pub fn ask(ns: &Namespace, addr: SocketAddr, request: &str) -> io::Result<String> {
    let mut stream = connect(ns, addr)?;
    stream.write_all(request.as_bytes())?;
    stream.shutdown(Shutdown::Write)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// Asks the [`who`] application: who do you see?
pub fn ask_who(ns: &Namespace, addr: SocketAddr) -> io::Result<String> {
    let answer = ask(ns, addr, "hello\n")?;
    answer
        .strip_prefix("hello ")
        .map(str::to_owned)
        .ok_or_else(|| io::Error::other(format!("answer {answer:?}")))
}

/// An HTTP GET from a namespace: status and body.
pub fn http_get(ns: &Namespace, addr: SocketAddr, path: &str) -> io::Result<(u16, String)> {
    ns.run(|| http_get_here(addr, path))
}

/// An HTTP GET from the namespace of the calling thread.
pub fn http_get_here(addr: SocketAddr, path: &str) -> io::Result<(u16, String)> {
    let mut stream = connect_here(addr)?;
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: {addr}\r\nConnection: close\r\n\r\n"
    )?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let answer = parse_answer(&text).ok_or_else(|| io::Error::other(format!("no HTTP answer: {text:?}")))?;
    let Answer { status, body } = answer;
    Ok((status, body))
}

/// Writes `bytes` bytes that no two blocks have in common, and returns their hash.
pub fn write_hashed(to: &mut impl Write, mut bytes: u64) -> io::Result<String> {
    let mut digest = Digest::new(&SHA256);
    let mut block = vec![0_u8; 256 << 10];
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    while bytes > 0 {
        go_on()?;
        for word in block.chunks_exact_mut(8) {
            // xorshift64: fast, and not compressible by anything on the way.
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            word.copy_from_slice(&state.to_le_bytes());
        }
        let length = usize::try_from(bytes).map_or(block.len(), |left| left.min(block.len()));
        to.write_all(&block[..length])?;
        digest.update(&block[..length]);
        bytes -= length as u64;
    }
    Ok(hex(digest))
}

/// Reads to the end, and returns the hash.
pub fn read_hashed(from: &mut impl Read) -> io::Result<String> {
    let mut digest = Digest::new(&SHA256);
    let mut block = vec![0; 256 << 10];
    loop {
        go_on()?;
        match from.read(&mut block)? {
            0 => return Ok(hex(digest)),
            length => digest.update(&block[..length]),
        }
    }
}

/// An error when we were asked to end.
fn go_on() -> io::Result<()> {
    if wait::interrupted() {
        Err(io::Error::other("interrupted"))
    } else {
        Ok(())
    }
}

fn hex(digest: Digest) -> String {
    digest
        .finish()
        .as_ref()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_hashes_agree() {
        let mut bytes = Vec::new();
        let written = write_hashed(&mut bytes, 300_001).unwrap();
        assert_eq!(bytes.len(), 300_001);
        assert_eq!(read_hashed(&mut bytes.as_slice()).unwrap(), written);
        bytes[7] ^= 1;
        assert_ne!(read_hashed(&mut bytes.as_slice()).unwrap(), written);
    }
}
