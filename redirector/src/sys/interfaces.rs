//! The interfaces of a network namespace, and their addresses.

use std::{collections::BTreeMap, fs, io, net::IpAddr};

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

/// Names of the interfaces by which the calling thread's network namespace has a default route, in its main tables.
///
/// # Errors
/// Those of reading `/proc/thread-self/net`.
pub fn with_default_route() -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    // The columns of a destination and its length, and where the name is: proc_pid_net(5), net/ipv6/route.c.
    for (file, zeros, name) in [("route", [1, 7], 0), ("ipv6_route", [0, 1], 9)] {
        let table = match fs::read_to_string(format!("/proc/thread-self/net/{file}")) {
            Ok(table) => table,
            // A kernel without IPv6.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        names.extend(default_routes(&table, zeros, name));
    }
    Ok(names)
}

fn default_routes(table: &str, zeros: [usize; 2], name: usize) -> impl Iterator<Item = String> {
    table.lines().filter_map(move |line| {
        let fields: Vec<_> = line.split_ascii_whitespace().collect();
        let zero = |at: usize| {
            fields
                .get(at)
                .is_some_and(|text| text.bytes().all(|byte| byte == b'0'))
        };
        let default = zeros.into_iter().all(zero);
        default.then(|| fields.get(name).copied().map(str::to_owned))?
    })
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
    fn default_routes_are_told_from_others() {
        let v4 = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n\
                  eth0\t00000000\t01004D0A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
                  virt0\t0000580A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n";
        assert_eq!(default_routes(v4, [1, 7], 0).collect::<Vec<_>>(), ["eth0"]);
        let zeros = "0".repeat(32);
        let line = |to: &str, bits: &str, name: &str| {
            format!("{to} {bits} {zeros} 00 {zeros} 00000400 00000001 00000000 00450003 {name:>8}\n")
        };
        let v6 = line(&zeros, "00", "eth0") + &line(&format!("fd88{}", &zeros[4..]), "40", "virt0");
        assert_eq!(default_routes(&v6, [0, 1], 9).collect::<Vec<_>>(), ["eth0"]);
        assert!(with_default_route().is_ok());
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
