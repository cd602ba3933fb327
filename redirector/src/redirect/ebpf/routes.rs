//! Policy routes and sysctls in a pod's namespace, without which marked packets are not delivered to the pod itself.
//!
//! Per pod and family: a rule for [`MARK_LOOP`] and one for [`MARK_APP`] to [`ROUTE_TABLE`], and in that table
//! `local default dev lo`. Everything here runs in the pod's namespace, blocking.

use std::{
    fs, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use redirector_common::consts::{MARK_APP, MARK_LOOP, MARK_MASK, ROUTE_TABLE, RULE_PRIORITY};
use rtnetlink::{
    Handle, RouteMessageBuilder,
    packet_route::{
        AddressFamily,
        route::{RouteMessage, RouteScope, RouteType},
        rule::{RuleAction, RuleAttribute, RuleMessage},
    },
};

use crate::redirect::Error;

/// The sysctls that enrolment needs, the value it needs, and whether they are for IPv6. A bit of
/// `PodEntry::changed_sysctls` each, in this order.
const SYSCTLS: [(&str, &str, bool); 5] = [
    // The application's accepted sockets take the mark of the proxy's dial, so that their answers come back by lo.
    ("net/ipv4/tcp_fwmark_accept", "1", false),
    // Resets and other packets without a socket take the mark of what they answer.
    ("net/ipv4/fwmark_reflect", "1", false),
    ("net/ipv6/fwmark_reflect", "1", true),
    // A turned-back packet arrives on lo with the pod's own address as its source.
    ("net/ipv4/conf/lo/accept_local", "1", false),
    // lo must receive what the pod's interface sends.
    ("net/ipv6/conf/lo/disable_ipv6", "0", true),
];

/// Sets the sysctls; `v6` as well if the pod has IPv6 addresses. Returns which ones it changed.
pub(super) fn set_sysctls(v6: bool) -> Result<u32, Error> {
    let mut changed = 0;
    for (bit, (name, wanted, for_v6)) in SYSCTLS.into_iter().enumerate() {
        if for_v6 && !v6 {
            continue;
        }
        let path = format!("/proc/sys/{name}");
        let failed = |operation: &str, error: io::Error| Error::new(format!("{operation} {path}"), error);
        let current = fs::read_to_string(&path).map_err(|error| failed("reading", error))?;
        if current.trim() != wanted {
            if let Err(error) = fs::write(&path, wanted) {
                restore_sysctls(changed);
                return Err(failed("writing", error));
            }
            changed |= 1 << bit;
        }
    }
    Ok(changed)
}

/// Puts back what [`set_sysctls`] changed. All of them are switches.
pub(super) fn restore_sysctls(changed: u32) -> Vec<Error> {
    let mut errors = Vec::new();
    for (bit, (name, wanted, _)) in SYSCTLS.into_iter().enumerate() {
        if changed & (1 << bit) == 0 {
            continue;
        }
        let path = format!("/proc/sys/{name}");
        let before = if wanted == "1" { "0" } else { "1" };
        if let Err(error) = fs::write(&path, before) {
            errors.push(Error::new(format!("writing {path}"), error));
        }
    }
    errors
}

/// Adds rules and routes; those that are there already are fine. Returns how many were not.
pub(super) fn add(v6: bool) -> Result<usize, Error> {
    with_netlink(async |handle| {
        let mut added = 0;
        for address in families(v6) {
            let route = handle.route().add(local_default(address)).execute().await;
            added += usize::from(was_absent(route, || {
                format!("adding the local route for {address}")
            })?);
            for mark in [MARK_LOOP.0, MARK_APP.0] {
                let mut request = handle.rule().add();
                *request.message_mut() = rule(address, mark);
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

/// Removes rules and routes; those that are gone already are fine.
pub(super) fn remove() -> Vec<Error> {
    let removed = with_netlink(async |handle| {
        let mut errors = Vec::new();
        for address in families(true) {
            for mark in [MARK_LOOP.0, MARK_APP.0] {
                let gone = handle.rule().del(rule(address, mark)).execute().await;
                errors.extend(unless_absent(
                    gone,
                    format!("removing the rule for mark {mark:#x}"),
                ));
            }
            let gone = handle.route().del(local_default(address)).execute().await;
            errors.extend(unless_absent(
                gone,
                format!("removing the local route for {address}"),
            ));
        }
        errors
    });
    removed.unwrap_or_else(|error| vec![error])
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

fn local_default(address: IpAddr) -> RouteMessage {
    const LOOPBACK_IFINDEX: u32 = 1;
    let mut message = RouteMessageBuilder::<IpAddr>::new()
        .table_id(ROUTE_TABLE)
        .kind(RouteType::Local)
        .scope(RouteScope::Host)
        .output_interface(LOOPBACK_IFINDEX)
        .build();
    message.header.address_family = family(address);
    message
}

fn rule(address: IpAddr, mark: u32) -> RuleMessage {
    let mut message = RuleMessage::default();
    message.header.family = family(address);
    message.header.action = RuleAction::ToTable;
    message.attributes = vec![
        RuleAttribute::Table(ROUTE_TABLE),
        RuleAttribute::Priority(RULE_PRIORITY),
        RuleAttribute::FwMark(mark),
        RuleAttribute::FwMask(MARK_MASK),
    ];
    message
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
