//! Questions to the kernel about namespaces and interfaces, and the policy routes of a pod.

use std::{
    io,
    net::IpAddr,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
};

use nix::{
    ifaddrs::getifaddrs,
    net::if_::InterfaceFlags,
    sys::socket::{AddressFamily, SockFlag, SockType, SockaddrLike, socket},
};

use super::netns::Netns;

/// The CLONE_NEW* type of a namespace descriptor (NS_GET_NSTYPE, ioctl_ns(2)); `None` for any other file.
#[expect(unsafe_code, reason = "ioctl")]
pub fn namespace_type(fd: BorrowedFd<'_>) -> Option<i32> {
    const NS_GET_NSTYPE: libc::c_ulong = 0xb703;
    // SAFETY: NS_GET_NSTYPE takes no argument and writes no memory; any other kind of file answers ENOTTY.
    let kind = unsafe { libc::ioctl(fd.as_raw_fd(), NS_GET_NSTYPE as _) };
    (kind >= 0).then_some(kind)
}

/// An address of an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InterfaceAddress {
    /// The interface's name.
    pub interface: String,
    /// The address, in canonical form.
    pub address: IpAddr,
    /// Whether the interface is a loopback one.
    pub loopback: bool,
}

impl InterfaceAddress {
    /// Whether others can reach the pod at it: not on loopback, not link-local.
    pub fn is_global(&self) -> bool {
        let link_local = match self.address {
            IpAddr::V4(v4) => v4.is_link_local(),
            IpAddr::V6(v6) => v6.is_unicast_link_local(),
        };
        !self.loopback && !link_local && !self.address.is_loopback()
    }
}

/// All addresses on the interfaces of `netns`. Blocking.
///
/// # Errors
/// Those of setns(2) and getifaddrs(3).
pub fn interface_addresses(netns: &Netns) -> io::Result<Vec<InterfaceAddress>> {
    let addresses = netns.run(getifaddrs)??;
    let address_of = |storage: nix::sys::socket::SockaddrStorage| match storage.family()? {
        AddressFamily::Inet => Some(IpAddr::V4(storage.as_sockaddr_in()?.ip())),
        AddressFamily::Inet6 => Some(IpAddr::V6(storage.as_sockaddr_in6()?.ip()).to_canonical()),
        _ => None,
    };
    Ok(addresses
        .filter_map(|entry| {
            Some(InterfaceAddress {
                address: address_of(entry.address?)?,
                loopback: entry.flags.contains(InterfaceFlags::IFF_LOOPBACK),
                interface: entry.interface_name,
            })
        })
        .collect())
}

/// The cookie of `netns`: a number that the kernel gives to no other namespace until the next boot, while an inode number
/// can come back. `None` before Linux 5.14. Blocking.
///
/// # Errors
/// Those of setns(2) and socket(2).
pub fn netns_cookie(netns: &Netns) -> io::Result<Option<u64>> {
    let datagram = netns.run(|| {
        socket(
            AddressFamily::Unix,
            SockType::Datagram,
            SockFlag::SOCK_CLOEXEC,
            None,
        )
    })??;
    Ok(socket_netns_cookie(datagram.as_fd()))
}

#[expect(unsafe_code, reason = "getsockopt of an option that nix does not have")]
fn socket_netns_cookie(socket: BorrowedFd<'_>) -> Option<u64> {
    /// include/uapi/asm-generic/socket.h
    const SO_NETNS_COOKIE: libc::c_int = 71;
    let mut cookie = 0_u64;
    let mut length = size_of::<u64>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to `cookie`, and both outlive the call.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut length,
        )
    };
    (result == 0).then_some(cookie)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn the_own_namespace_has_its_loopback_address() {
        let addresses = interface_addresses(&Netns::current().unwrap()).unwrap();
        let lo = addresses
            .iter()
            .find(|found| found.address == Ipv4Addr::LOCALHOST)
            .unwrap();
        assert!(lo.loopback && !lo.is_global(), "{lo:?}");
    }

    #[test]
    fn a_namespace_keeps_its_cookie() {
        let own = Netns::current().unwrap();
        assert_eq!(netns_cookie(&own).unwrap(), netns_cookie(&own).unwrap());
    }
}
