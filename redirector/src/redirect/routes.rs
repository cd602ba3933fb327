//! Policy routes and sysctls in a pod's namespace, without which marked packets are not delivered to the pod itself.
//!
//! Per pod and family: a rule for each mark to a table, and in that table `local default dev lo`. Each backend says which, in
//! a [`Routing`]. Everything here runs in the pod's namespace, blocking.

use std::{
    fs, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use redirector_common::consts::{MARK_MASK, Mark};
use rtnetlink::{
    Handle, RouteMessageBuilder,
    packet_route::{
        AddressFamily,
        route::{RouteMessage, RouteScope, RouteType},
        rule::{RuleAction, RuleAttribute, RuleMessage},
    },
};

use super::Error;

/// The routes and sysctls that a backend wants in a pod.
#[derive(Debug)]
pub(super) struct Routing {
    /// The table that delivers everything locally.
    pub(super) table: u32,
    /// Priority of the rules that select it.
    pub(super) priority: u32,
    /// The marks of the packets that it is for, under [`MARK_MASK`].
    pub(super) marks: &'static [Mark],
    /// Switches; which ones were changed is told by a bit each, in this order.
    pub(super) sysctls: &'static [Sysctl],
}

/// A switch below /proc/sys.
#[derive(Debug)]
pub(super) struct Sysctl {
    /// Its path there.
    pub(super) name: &'static str,
    /// The value that is wanted; what it was before is the other one.
    pub(super) wanted: bool,
    /// Needed for IPv6 only.
    pub(super) v6: bool,
}

impl Sysctl {
    fn path(&self) -> String {
        format!("/proc/sys/{}", self.name)
    }
}

fn digit(value: bool) -> &'static str {
    if value { "1" } else { "0" }
}

impl Routing {
    /// Sets the sysctls; those of IPv6 as well if the pod has IPv6 addresses. Returns which ones it changed.
    pub(super) fn set_sysctls(&self, v6: bool) -> Result<u32, Error> {
        let mut changed = 0;
        for (bit, sysctl) in self.sysctls.iter().enumerate() {
            if sysctl.v6 && !v6 {
                continue;
            }
            let path = sysctl.path();
            let failed = |operation: &str, error: io::Error| Error::new(format!("{operation} {path}"), error);
            let current = fs::read_to_string(&path).map_err(|error| failed("reading", error))?;
            if current.trim() != digit(sysctl.wanted) {
                if let Err(error) = fs::write(&path, digit(sysctl.wanted)) {
                    self.restore_sysctls(changed);
                    return Err(failed("writing", error));
                }
                changed |= 1 << bit;
            }
        }
        Ok(changed)
    }

    /// Puts back what [`Self::set_sysctls`] changed.
    pub(super) fn restore_sysctls(&self, changed: u32) -> Vec<Error> {
        let mut errors = Vec::new();
        for (bit, sysctl) in self.sysctls.iter().enumerate() {
            if changed & (1 << bit) == 0 {
                continue;
            }
            let path = sysctl.path();
            if let Err(error) = fs::write(&path, digit(!sysctl.wanted)) {
                errors.push(Error::new(format!("writing {path}"), error));
            }
        }
        errors
    }

    /// Adds rules and routes; those that are there already are fine. Returns how many were not.
    pub(super) fn add(&self, v6: bool) -> Result<usize, Error> {
        with_netlink(async |handle| {
            let mut added = 0;
            for address in families(v6) {
                let route = handle.route().add(self.local_default(address)).execute().await;
                added += usize::from(was_absent(route, || {
                    format!("adding the local route for {address}")
                })?);
                for Mark(mark) in self.marks {
                    let mut request = handle.rule().add();
                    *request.message_mut() = self.rule(address, *mark);
                    let rule = request.execute().await;
                    added += usize::from(was_absent(rule, || {
                        format!("adding the rule for mark {mark:#x}")
                    })?);
                }
            }
            Ok(added)
        })
        .and_then(|result| result)
    }

    /// Removes rules and routes; those that are gone already are fine.
    pub(super) fn remove(&self) -> Vec<Error> {
        let removed = with_netlink(async |handle| {
            let mut errors = Vec::new();
            for address in families(true) {
                for Mark(mark) in self.marks {
                    let gone = handle.rule().del(self.rule(address, *mark)).execute().await;
                    errors.extend(unless_absent(
                        gone,
                        format!("removing the rule for mark {mark:#x}"),
                    ));
                }
                let gone = handle.route().del(self.local_default(address)).execute().await;
                errors.extend(unless_absent(
                    gone,
                    format!("removing the local route for {address}"),
                ));
            }
            errors
        });
        removed.unwrap_or_else(|error| vec![error])
    }

    fn local_default(&self, address: IpAddr) -> RouteMessage {
        const LOOPBACK_IFINDEX: u32 = 1;
        let mut message = RouteMessageBuilder::<IpAddr>::new()
            .table_id(self.table)
            .kind(RouteType::Local)
            .scope(RouteScope::Host)
            .output_interface(LOOPBACK_IFINDEX)
            .build();
        message.header.address_family = family(address);
        message
    }

    fn rule(&self, address: IpAddr, mark: u32) -> RuleMessage {
        let mut message = RuleMessage::default();
        message.header.family = family(address);
        message.header.action = RuleAction::ToTable;
        message.attributes = vec![
            RuleAttribute::Table(self.table),
            RuleAttribute::Priority(self.priority),
            RuleAttribute::FwMark(mark),
            RuleAttribute::FwMask(MARK_MASK),
        ];
        message
    }
}

fn was_absent(
    added: Result<(), rtnetlink::Error>,
    operation: impl FnOnce() -> String,
) -> Result<bool, Error> {
    match added {
        Ok(()) => Ok(true),
        Err(error) if errno(&error) == Some(libc::EEXIST) => Ok(false),
        Err(error) => Err(Error::new(operation(), error)),
    }
}

fn families(v6: bool) -> impl Iterator<Item = IpAddr> {
    let v4 = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    [Some(v4), v6.then_some(IpAddr::V6(Ipv6Addr::UNSPECIFIED))]
        .into_iter()
        .flatten()
}

fn family(address: IpAddr) -> AddressFamily {
    if address.is_ipv4() {
        AddressFamily::Inet
    } else {
        AddressFamily::Inet6
    }
}

fn errno(error: &rtnetlink::Error) -> Option<i32> {
    match error {
        rtnetlink::Error::NetlinkError(message) => Some(-message.raw_code()),
        _ => None,
    }
}

fn unless_absent(result: Result<(), rtnetlink::Error>, operation: String) -> Option<Error> {
    let error = result.err()?;
    match errno(&error) {
        Some(libc::ENOENT | libc::ESRCH | libc::EAFNOSUPPORT) => None,
        _ => Some(Error::new(operation, error)),
    }
}

/// Runs `f` with a netlink socket of the calling thread's namespace.
fn with_netlink<T>(f: impl AsyncFnOnce(Handle) -> T) -> Result<T, Error> {
    let failed = |error: io::Error| Error::new("opening a netlink socket", error);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()
        .map_err(failed)?;
    runtime.block_on(async {
        let (connection, handle, _) = rtnetlink::new_connection().map_err(failed)?;
        let driver = tokio::spawn(connection);
        let result = f(handle).await;
        driver.abort();
        Ok(result)
    })
}
