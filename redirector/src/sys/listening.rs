//! Who waits for what comes to a port of a namespace, and descriptors of those sockets, whichever process has them.
//!
//! `redirect` takes hold of a pod's DNS listeners with it, and of those of a proxy that another process is.

use std::{
    collections::HashMap,
    fs,
    io::{self, BufRead as _, BufReader},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
};

use nix::libc;
use socket2::SockRef;

use super::{netns::NetnsId, pidfd::Process};

/// A socket that takes what comes to a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Listening {
    /// UDP, not TCP.
    pub udp: bool,
    /// Of the family of IPv6; it may take IPv4 as well.
    pub v6: bool,
    /// Its inode: while the socket is open, no other has it.
    pub inode: u64,
}

/// The sockets that listen on TCP `port`, or wait on UDP `port` for anybody, in the calling thread's namespace; sorted.
///
/// # Errors
/// Those of reading `/proc/thread-self/net`.
pub fn listening(port: u16) -> io::Result<Vec<Listening>> {
    let mut found = Vec::new();
    for (file, udp, v6) in [
        ("tcp", false, false),
        ("tcp6", false, true),
        ("udp", true, false),
        ("udp6", true, true),
    ] {
        match fs::read_to_string(Path::new("/proc/thread-self/net").join(file)) {
            Ok(table) => found.extend(
                table
                    .lines()
                    .filter_map(|line| inode(line, port, udp))
                    .map(|inode| Listening { udp, v6, inode }),
            ),
            // A kernel without IPv6.
            Err(error) if v6 && error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    found.sort_unstable();
    Ok(found)
}

/// The sockets that listen on these TCP ports, in the calling thread's namespace, with their ports; sorted.
///
/// # Errors
/// Those of reading `/proc/thread-self/net`.
pub fn tcp_listening(ports: &[u16]) -> io::Result<Vec<(u16, Listening)>> {
    let mut found = Vec::new();
    for (file, v6) in [("tcp", false), ("tcp6", true)] {
        let table = match fs::File::open(Path::new("/proc/thread-self/net").join(file)) {
            Ok(table) => BufReader::new(table),
            // A kernel without IPv6.
            Err(error) if v6 && error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        for line in table.lines().skip(1) {
            let line = line?;
            // Listeners come first (net/ipv4/tcp_ipv4.c, tcp_get_idx), and the rest may be long.
            if line.split_ascii_whitespace().nth(3) != Some("0A") {
                break;
            }
            found.extend(ports.iter().filter_map(|port| {
                let inode = inode(&line, *port, false)?;
                Some((
                    *port,
                    Listening {
                        udp: false,
                        v6,
                        inode,
                    },
                ))
            }));
        }
    }
    found.sort_unstable();
    Ok(found)
}

/// The inode in a line of `/proc/net/tcp` and its like, if it is of a socket that waits on `port`: proc_pid_net(5).
fn inode(line: &str, port: u16, udp: bool) -> Option<u64> {
    /// TCP_LISTEN, and TCP_CLOSE for a UDP socket that is not connected: include/net/tcp_states.h
    const STATES: [&str; 2] = ["0A", "07"];
    let mut fields = line.split_ascii_whitespace();
    let local = fields.nth(1)?;
    let state = fields.nth(1)?;
    let inode = fields.nth(5)?.parse().ok()?;
    let (_, local_port) = local.rsplit_once(':')?;
    let here = u16::from_str_radix(local_port, 16).ok()? == port && state == STATES[usize::from(udp)];
    (here && inode != 0).then_some(inode)
}

/// Descriptors of sockets that other processes have: of each inode in `wanted` that somebody is seen to have. This process is looked
/// at first, then those in the namespace `near`, and then all others. Blocking; reads the descriptors of many processes.
///
/// # Errors
/// Those of reading `/proc`, and of pidfd_open(2) and pidfd_getfd(2): EPERM without CAP_SYS_PTRACE.
pub fn take(wanted: &[u64], near: NetnsId) -> io::Result<HashMap<u64, OwnedFd>> {
    let mut taken = HashMap::new();
    let mut processes = Vec::new();
    for entry in fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse::<u32>().ok())
        else {
            continue;
        };
        let is_near = || fs::metadata(entry.path().join("ns/net")).is_ok_and(|found| found.ino() == near.ino);
        let own = pid == std::process::id();
        processes.push((!own, own || !is_near(), pid, entry.path()));
    }
    processes.sort_unstable();
    for (_, _, pid, path) in processes {
        if taken.len() == wanted.len() {
            break;
        }
        let descriptor = |number| Process::open(pid)?.descriptor(number);
        take_of(&path, descriptor, wanted, &mut taken)?;
    }
    Ok(taken)
}

/// The same of one process. One that is gone has none.
///
/// # Errors
/// Those of pidfd_getfd(2): EPERM without CAP_SYS_PTRACE.
pub fn take_from(process: &Process, wanted: &[u64]) -> io::Result<HashMap<u64, OwnedFd>> {
    let mut taken = HashMap::new();
    // What another process's directory tells by now, if that is so, `descriptor` does not find.
    let directory = PathBuf::from(format!("/proc/{}", process.pid()));
    let descriptor = |number| process.descriptor(number);
    take_of(&directory, descriptor, wanted, &mut taken)?;
    Ok(taken)
}

fn take_of(
    directory: &Path,
    descriptor: impl Fn(i32) -> io::Result<OwnedFd>,
    wanted: &[u64],
    taken: &mut HashMap<u64, OwnedFd>,
) -> io::Result<()> {
    for (inode, number) in descriptors(directory) {
        if !wanted.contains(&inode) || taken.contains_key(&inode) {
            continue;
        }
        match descriptor(number) {
            // The number may stand for another file by now.
            Ok(fd) if inode_of(fd.as_fd())? == inode => {
                taken.insert(inode, fd);
            }
            Ok(_) => {}
            Err(error) if gone(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The sockets among a process's descriptors: inode and number. A process that is gone, or not to be looked into, has none.
fn descriptors(process: &Path) -> Vec<(u64, i32)> {
    let socket = |path: PathBuf| {
        let target = fs::read_link(&path).ok()?;
        let inode = target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?;
        Some((inode.parse().ok()?, path.file_name()?.to_str()?.parse().ok()?))
    };
    let entries = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
    entries.filter_map(|entry| socket(entry.path())).collect()
}

fn gone(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ESRCH | libc::EBADF | libc::EINVAL)
    )
}

fn inode_of(fd: BorrowedFd<'_>) -> io::Result<u64> {
    let status = nix::sys::stat::fstat(fd)?;
    Ok(status.st_ino)
}

/// What a socket may do that decides what can be given to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Abilities {
    /// It may answer in the name of others (IP_TRANSPARENT).
    pub transparent: bool,
    /// It takes IPv4.
    pub v4: bool,
}

/// Reads them; `v6` is the socket's family.
///
/// # Errors
/// Those of getsockopt(2).
pub fn abilities(socket: BorrowedFd<'_>, v6: bool) -> io::Result<Abilities> {
    let socket = SockRef::from(&socket);
    Ok(if v6 {
        Abilities {
            transparent: socket.ip_transparent_v6()?,
            v4: !socket.only_v6()?,
        }
    } else {
        Abilities {
            transparent: socket.ip_transparent_v4()?,
            v4: true,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::netns::Netns;
    use std::net::{TcpListener, UdpSocket};

    #[test]
    fn lines_of_the_kernels_tables_are_read() {
        const TCP: &str = "   0: 0100007F:3ACD 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 23123 1 0000000000000000 100 0 0 10 0";
        const UDP6: &str = " 2571: 00000000000000000000000000000000:3ACD 00000000000000000000000000000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 8431 2 0000000000000000 0";
        for (line, port, udp, expected) in [
            (TCP, 15053, false, Some(23123)),
            (TCP, 15053, true, None),
            (TCP, 15054, false, None),
            (UDP6, 15053, true, Some(8431)),
            (&TCP.replace("0A", "01"), 15053, false, None),
            ("  sl  local_address rem_address   st", 15053, false, None),
            ("", 15053, true, None),
        ] {
            assert_eq!(inode(line, port, udp), expected, "{line}");
        }
    }

    #[test]
    fn sockets_are_found_and_taken() {
        // One number for both protocols: the kernel's choice for one may be taken for the other.
        let (tcp, udp) = (0..50)
            .find_map(|_| {
                let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
                let udp = UdpSocket::bind(tcp.local_addr().unwrap()).ok()?;
                Some((tcp, udp))
            })
            .unwrap();
        let found = listening(tcp.local_addr().unwrap().port()).unwrap();
        let kinds: Vec<_> = found.iter().map(|found| (found.udp, found.v6)).collect();
        assert_eq!(kinds, [(false, false), (true, false)]);
        let wanted: Vec<_> = found.iter().map(|found| found.inode).collect();
        let taken = take(&wanted, Netns::current().unwrap().id()).unwrap();
        let cookie = |fd: BorrowedFd<'_>| SockRef::from(&fd).cookie().unwrap();
        assert_eq!(cookie(taken[&wanted[0]].as_fd()), cookie(tcp.as_fd()));
        assert_eq!(cookie(taken[&wanted[1]].as_fd()), cookie(udp.as_fd()));
        let expected = Abilities {
            transparent: false,
            v4: true,
        };
        assert_eq!(abilities(tcp.as_fd(), false).unwrap(), expected);
    }

    #[test]
    fn the_listeners_of_several_ports_are_found_and_taken_of_their_process_alone() {
        let sockets = ["127.0.0.1:0", "127.0.0.1:0"].map(|any| TcpListener::bind(any).unwrap());
        let ports = sockets
            .each_ref()
            .map(|socket| socket.local_addr().unwrap().port());
        // One that is connected from such a port is none.
        let _open = std::net::TcpStream::connect(sockets[0].local_addr().unwrap()).unwrap();
        let found = tcp_listening(&ports).unwrap();
        let mut expected = ports;
        expected.sort_unstable();
        assert_eq!(found.iter().map(|(port, _)| *port).collect::<Vec<_>>(), expected);
        let inodes: Vec<_> = found.iter().map(|(_, socket)| socket.inode).collect();
        let from = |pid| take_from(&Process::open(pid).unwrap(), &inodes).unwrap().len();
        assert_eq!((from(std::process::id()), from(1)), (2, 0));
    }

    #[test]
    fn a_socket_that_nobody_has_is_not_found() {
        assert!(take(&[0], Netns::current().unwrap().id()).unwrap().is_empty());
    }
}
