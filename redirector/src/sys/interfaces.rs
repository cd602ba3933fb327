//! The interfaces of a network namespace, and their addresses.

use std::{collections::BTreeMap, io, net::IpAddr};

use nix::{
    ifaddrs::getifaddrs,
    libc::{ARPHRD_ETHER, ARPHRD_LOOPBACK},
};

use super::netns::Netns;

/// A network interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// Name.
    pub name: String,
    /// Index within its namespace.
    pub index: u32,
    /// Its frames have an Ethernet header.
    pub ethernet: bool,
    /// It is lo.
    pub loopback: bool,
    /// Its addresses, in canonical form.
    pub addresses: Vec<IpAddr>,
}

/// All interfaces of the calling thread's network namespace, by index.
///
/// # Errors
/// Those of getifaddrs(3).
pub fn interfaces() -> io::Result<Vec<Interface>> {
    let mut found = BTreeMap::<String, Interface>::new();
    for entry in getifaddrs()? {
        let interface = found
            .entry(entry.interface_name.clone())
            .or_insert_with(|| Interface {
                name: entry.interface_name.clone(),
                index: 0,
                ethernet: false,
                loopback: false,
                addresses: Vec::new(),
            });
        let Some(address) = entry.address else { continue };
        if let Some(link) = address.as_link_addr() {
            interface.index = u32::try_from(link.ifindex()).unwrap_or_default();
            interface.ethernet = link.hatype() == ARPHRD_ETHER;
            interface.loopback = link.hatype() == ARPHRD_LOOPBACK;
        } else if let Some(v4) = address.as_sockaddr_in() {
            interface.addresses.push(IpAddr::V4(v4.ip()));
        } else if let Some(v6) = address.as_sockaddr_in6() {
            interface.addresses.push(IpAddr::V6(v6.ip()).to_canonical());
        }
    }
    let mut interfaces: Vec<_> = found.into_values().collect();
    interfaces.sort_by_key(|interface| interface.index);
    Ok(interfaces)
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
    let of = |Interface {
                  name,
                  loopback,
                  addresses,
                  ..
              }: Interface| {
        let named = move |address| InterfaceAddress {
            interface: name.clone(),
            address,
            loopback,
        };
        addresses.into_iter().map(named)
    };
    Ok(netns.run(interfaces)??.into_iter().flat_map(of).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lo_is_found_with_its_address() {
        let found = interfaces().unwrap();
        let lo = found.iter().find(|interface| interface.loopback).unwrap();
        assert_eq!((lo.name.as_str(), lo.index), ("lo", 1));
        assert!(lo.addresses.contains(&"127.0.0.1".parse().unwrap()));
    }

    #[test]
    fn loopback_addresses_are_not_global() {
        let found = interface_addresses(&Netns::current().unwrap()).unwrap();
        let lo = found
            .iter()
            .find(|found| found.address == std::net::Ipv4Addr::LOCALHOST)
            .unwrap();
        assert!(lo.loopback && !lo.is_global(), "{lo:?}");
    }
}
