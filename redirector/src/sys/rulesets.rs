//! Whether somebody has changed the packet filter's rules in the calling thread's network namespace: nftables counts its changes, and
//! of the tables of before (ip_tables, ip6_tables) there is a digest. Some microseconds each, where the programs take milliseconds.

use std::{
    hash::{DefaultHasher, Hasher as _},
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
};

use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};
use rtnetlink::packet_core::NlasIterator;

use super::netlink::Netlink;

/// How often nftables' rules were changed, all families' together (`NFT_MSG_GETGEN`). It takes CAP_NET_ADMIN.
///
/// # Errors
/// Those of netlink; the kernel's, which may be without nftables.
pub fn nftables_generation() -> io::Result<u32> {
    let mut netlink = Netlink::of(SockProtocol::NetlinkNetFilter)?;
    let answer = netlink.get_raw(NFT_MSG_GETGEN, &[0; NFGENMSG])?;
    generation(&answer)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no generation in the answer"))
}

// include/uapi/linux/netfilter/{nfnetlink,nf_tables}.h
const NFT_MSG_GETGEN: u16 = 10 << 8 | 16;
const NFTA_GEN_ID: u16 = 1;
/// Length of a `struct nfgenmsg`: of no family and of version 0, all its bytes are zero.
const NFGENMSG: usize = 4;

fn generation(answer: &[u8]) -> Option<u32> {
    let attributes = NlasIterator::new(answer.get(NFGENMSG..)?);
    let mut values = attributes
        .flatten()
        .filter(|attribute| attribute.kind() == NFTA_GEN_ID)
        .filter_map(|attribute| attribute.value().try_into().ok());
    values.next().map(u32::from_be_bytes)
}

/// Where things are in the tables of a family, and how they are asked for.
#[derive(Debug, Clone, Copy)]
pub struct Layout {
    family: AddressFamily,
    level: libc::c_int,
    /// In a `struct ipt_entry` or `ip6t_entry`: `next_offset`, a u16.
    next: usize,
    /// And the two u64 of its counters.
    counters: usize,
}

/// IPv4's: include/uapi/linux/netfilter_ipv4/ip_tables.h
pub const V4: Layout = Layout {
    family: AddressFamily::Inet,
    level: libc::SOL_IP,
    next: 90,
    counters: 96,
};

/// IPv6's: include/uapi/linux/netfilter_ipv6/ip6_tables.h
pub const V6: Layout = Layout {
    family: AddressFamily::Inet6,
    level: libc::SOL_IPV6,
    next: 142,
    counters: 152,
};

/// Most bytes of a table that is read: some ten thousand rules.
const MAX_TABLE: usize = 4 << 20;

/// A digest of all rules of a table of before (`nat`, say), without what they have counted. A table that is not there is made, as by the
/// programs. It takes CAP_NET_ADMIN and CAP_NET_RAW.
///
/// # Errors
/// Those of socket(2) and getsockopt(2); EAGAIN where somebody changes the table at the same time.
pub fn table_digest(layout: Layout, table: &str) -> io::Result<u64> {
    // XT_TABLE_MAXNAMELEN; a name ends with a zero.
    const NAME: usize = 32;
    // struct ipt_getinfo ends with the size of the entries; struct ipt_get_entries has them after name and size, aligned for u64.
    const INFO: usize = 84;
    const ENTRIES: usize = 40;
    const SO_GET_INFO: libc::c_int = 64;
    const SO_GET_ENTRIES: libc::c_int = 65;
    let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
    let socket = socket(
        layout.family,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::Raw,
    )?;
    let mut info = vec![0; INFO];
    info.get_mut(..table.len().min(NAME))
        .filter(|name| name.len() < NAME)
        .ok_or_else(invalid)?
        .copy_from_slice(table.as_bytes());
    ask(socket.as_fd(), layout.level, SO_GET_INFO, &mut info)?;
    let size: [u8; 4] = info[INFO - 4..].try_into().map_err(|_| invalid())?;
    let bytes = u32::from_ne_bytes(size) as usize;
    if bytes > MAX_TABLE {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    let mut entries = vec![0; ENTRIES + bytes];
    entries[..NAME].copy_from_slice(&info[..NAME]);
    entries[NAME..NAME + 4].copy_from_slice(&size);
    ask(socket.as_fd(), layout.level, SO_GET_ENTRIES, &mut entries)?;
    let mut digest = DefaultHasher::new();
    // Hooks and policies too.
    digest.write(&info);
    digest.write(without_counters(layout, &mut entries[ENTRIES..]));
    Ok(digest.finish())
}

fn without_counters(layout: Layout, entries: &mut [u8]) -> &[u8] {
    let mut at = 0;
    while let Some(entry) = entries.get_mut(at..)
        && let Some(counters) = entry.get_mut(layout.counters..layout.counters + 16)
    {
        counters.fill(0);
        let next = u16::from_ne_bytes([entry[layout.next], entry[layout.next + 1]]);
        if next == 0 {
            break;
        }
        at += usize::from(next);
    }
    entries
}

/// Has the kernel fill `buffer`, part of which is the question.
#[expect(unsafe_code, reason = "getsockopt of options that nix does not have")]
fn ask(socket: BorrowedFd<'_>, level: libc::c_int, option: libc::c_int, buffer: &mut [u8]) -> io::Result<()> {
    let mut length = libc::socklen_t::try_from(buffer.len()).map_err(io::Error::other)?;
    // SAFETY: the kernel reads and writes at most `length` bytes at `buffer`, which is that long and of bytes, and `length` itself.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            level,
            option,
            buffer.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    if length as usize != buffer.len() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_generation_is_read_or_there_is_none() {
        // nfgenmsg; the id, and the process that made it.
        let whole = [0, 0, 0, 0, 8, 0, 1, 0, 0, 0, 1, 2, 8, 0, 2, 0, 0, 0, 0, 9];
        assert_eq!(generation(&whole), Some(258));
        for bad in [
            &[][..],
            &[0; 3],
            &[0; 4],
            &whole[..9],
            &[0, 0, 0, 0, 5, 0, 1, 0, 7, 0, 0, 0],
        ] {
            assert_eq!(generation(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn the_kernel_tells_the_same_generation_or_an_error_of_its_own() {
        // It may be without nftables, and wants a right.
        match (nftables_generation(), nftables_generation()) {
            (Ok(first), Ok(second)) => assert!(second >= first),
            (first, _) => assert!(first.unwrap_err().raw_os_error().is_some()),
        }
    }

    #[test]
    fn counters_are_left_out_and_nothing_else() {
        for layout in [V4, V6] {
            let length = layout.counters + 16 + 40;
            let table = |byte: usize, value: u8| {
                let mut bytes = vec![1; 2 * length];
                for entry in bytes.chunks_mut(length) {
                    entry[layout.next..layout.next + 2].copy_from_slice(&(length as u16).to_ne_bytes());
                }
                bytes[byte] = value;
                without_counters(layout, &mut bytes).to_vec()
            };
            let whole = table(0, 1);
            for entry in [0, length] {
                for byte in layout.counters..layout.counters + 16 {
                    assert_eq!(table(entry + byte, 7), whole);
                }
                for byte in [0, layout.counters - 1, layout.counters + 16, length - 1] {
                    assert_ne!(table(entry + byte, 7), whole);
                }
            }
            // One that never ends, and one that is cut off.
            without_counters(layout, &mut vec![0; length]);
            without_counters(layout, &mut vec![255; length]);
            without_counters(layout, &mut []);
        }
    }

    #[test]
    fn names_that_are_too_long_are_refused() {
        for name in ["x".repeat(32), "x".repeat(200)] {
            // Without the right to ask, that is the error.
            let error = table_digest(V4, &name).unwrap_err();
            assert!(
                matches!(
                    error.kind(),
                    io::ErrorKind::InvalidInput | io::ErrorKind::PermissionDenied
                ),
                "{error}"
            );
        }
    }
}
