//! Policy routes in a pod's namespace, without which marked packets are not delivered to the pod itself.
//!
//! Per pod and family: a rule for each mark to a table, and in that table `local default dev lo`. Each backend says which, in
//! a [`Routing`]. Everything here runs in the pod's namespace, blocking.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use redirector_common::consts::{MARK_MASK, Mark};
use rtnetlink::{
    RouteMessageBuilder,
    packet_core::{NLM_F_CREATE, NLM_F_EXCL, Parseable as _},
    packet_route::{
        AddressFamily, RouteNetlinkMessage,
        route::{RouteAddress, RouteAttribute, RouteMessage, RouteScope, RouteType},
        rule::{RuleAction, RuleAttribute, RuleMessage},
    },
};

use super::{Error, sysctls::Sysctl};
use crate::sys::netlink::Netlink;

/// The routes and sysctls that a backend wants in a pod.
#[derive(Debug)]
pub(super) struct Routing {
    /// The table that delivers everything locally.
    pub(super) table: u32,
    /// Priority of the rules that select it.
    pub(super) priority: u32,
    /// The marks of the packets that it is for, under [`MARK_MASK`].
    pub(super) marks: &'static [Mark],
    /// The mark of packets for which it is on some interfaces only, as they arrive there.
    pub(super) arriving: Option<Mark>,
    /// Switches; which ones were changed is told by a bit each, in this order.
    pub(super) sysctls: &'static [Sysctl],
}

/// lo's, in every namespace.
const LOOPBACK_IFINDEX: u32 = 1;

/// Most rules for interfaces that are removed, per family: the pod's present ones, and those of earlier rules.
const MAX_INTERFACE_RULES: usize = 1024;

impl Routing {
    /// Whether rules and routes are in place, the rules of the `interfaces` too; cheap, for looks that mostly find it so.
    pub(super) fn in_place(&self, netlink: &mut Netlink, v6: bool, interfaces: &[String]) -> bool {
        families(v6).all(|family| {
            self.marks.iter().all(|mark| delivered(netlink, family, *mark))
                && self.has_interface_rules(netlink, family, interfaces)
        })
    }

    /// Whether there is a rule for what arrives by each of the interfaces. What the kernel would do with such a packet can't be asked,
    /// as for the other marks: it depends on who is behind the interface.
    fn has_interface_rules(&self, netlink: &mut Netlink, family: IpAddr, interfaces: &[String]) -> bool {
        let mut wanted = interfaces
            .iter()
            .zip(self.arriving.iter().cycle())
            .map(|(interface, mark)| self.interface_rule(family, *mark, interface))
            .peekable();
        if wanted.peek().is_none() {
            return true;
        }
        let mut question = RuleMessage::default();
        question.header.family = address_family(family);
        let Ok(answers) = netlink.dump(RouteNetlinkMessage::GetRule(question)) else {
            return false;
        };
        // Others' rules may be newer than this reader of them.
        let found: Vec<_> = answers
            .iter()
            .filter_map(|answer| RuleMessage::parse(answer.as_slice()).ok())
            .collect();
        let is = |wanted: &RuleMessage, found: &RuleMessage| {
            let mut attributes = wanted.attributes.iter();
            wanted.header.action == found.header.action
                && attributes.all(|attribute| found.attributes.contains(attribute))
        };
        wanted.all(|wanted| found.iter().any(|found| is(&wanted, found)))
    }

    /// Sees to it that packets with the marks go to lo: adds rules and routes where they are not delivered so. Returns how
    /// many there were not.
    ///
    /// What it looks at is what the kernel would do with such a packet, which costs the same however many rules and routes
    /// others have, and tells of a route or a rule of theirs that comes before ours as well. The rules of the `interfaces`, those of
    /// [`Self::arriving`], are added in any case; the interfaces need not be there.
    pub(super) fn add(&self, v6: bool, interfaces: &[String]) -> Result<usize, Error> {
        let mut netlink = open()?;
        let mut added = 0;
        for family in families(v6) {
            for (interface, mark) in interfaces.iter().zip(self.arriving.iter().cycle()) {
                let rule = RouteNetlinkMessage::NewRule(self.interface_rule(family, *mark, interface));
                let result = netlink.change(rule, NLM_F_CREATE | NLM_F_EXCL);
                added += usize::from(was_absent(result, || {
                    format!("adding the rule for what arrives by {interface}")
                })?);
            }
            let undelivered = |netlink: &mut Netlink| {
                let marks = self.marks.iter();
                marks
                    .copied()
                    .filter(|mark| !delivered(netlink, family, *mark))
                    .count()
            };
            if undelivered(&mut netlink) == 0 {
                continue;
            }
            added += usize::from(self.add_route(&mut netlink, family)?);
            for mark in self.marks {
                let rule = RouteNetlinkMessage::NewRule(self.rule(family, *mark));
                // Of two that are equal the kernel would keep both, without NLM_F_EXCL.
                let result = netlink.change(rule, NLM_F_CREATE | NLM_F_EXCL);
                added += usize::from(was_absent(result, || {
                    format!("adding the rule for mark {:#x}", mark.0)
                })?);
            }
            if undelivered(&mut netlink) > 0 {
                // Somebody's route stands before ours, in our table: ours goes to the front.
                unless_absent(
                    netlink.change(RouteNetlinkMessage::DelRoute(self.local_default(family)), 0),
                    || format!("moving the local route for {family}"),
                )
                .map_or(Ok(()), Err)?;
                added += usize::from(self.add_route(&mut netlink, family)?);
            }
            let left = undelivered(&mut netlink);
            if left > 0 {
                return Err(Error::new(
                    format!("routing marked packets for {family} to the pod itself"),
                    io::Error::other(format!(
                        "{left} of the {} marks still go elsewhere: a rule with a priority below {} that somebody else has \
                         added comes first (`ip rule` in the pod shows it)",
                        self.marks.len(),
                        self.priority
                    )),
                ));
            }
        }
        Ok(added)
    }

    fn add_route(&self, netlink: &mut Netlink, family: IpAddr) -> Result<bool, Error> {
        // Without NLM_F_EXCL, so that it comes beside a route that somebody has put there, and before it.
        let route = RouteNetlinkMessage::NewRoute(self.local_default(family));
        was_absent(netlink.change(route, NLM_F_CREATE), || {
            format!("adding the local route for {family}")
        })
    }

    /// Removes rules and routes; those that are gone already are fine.
    pub(super) fn remove(&self) -> Vec<Error> {
        let mut netlink = match open() {
            Ok(netlink) => netlink,
            Err(error) => return vec![error],
        };
        let mut errors = Vec::new();
        for family in families(true) {
            for mark in self.marks {
                let rule = RouteNetlinkMessage::DelRule(self.rule(family, *mark));
                errors.extend(unless_absent(netlink.change(rule, 0), || {
                    format!("removing the rule for mark {:#x}", mark.0)
                }));
            }
            // A rule that is named without an interface stands for those of any.
            for mark in self.arriving.iter().cycle().take(MAX_INTERFACE_RULES) {
                let rule = RouteNetlinkMessage::DelRule(self.rule(family, *mark));
                if let Err(error) = netlink.change(rule, 0) {
                    errors.extend(unless_absent(Err(error), || {
                        "removing a rule for what arrives by an interface".to_owned()
                    }));
                    break;
                }
            }
            let route = RouteNetlinkMessage::DelRoute(self.local_default(family));
            errors.extend(unless_absent(netlink.change(route, 0), || {
                format!("removing the local route for {family}")
            }));
        }
        errors
    }

    fn local_default(&self, family: IpAddr) -> RouteMessage {
        let mut message = RouteMessageBuilder::<IpAddr>::new()
            .table_id(self.table)
            .kind(RouteType::Local)
            .scope(RouteScope::Host)
            .output_interface(LOOPBACK_IFINDEX)
            .build();
        message.header.address_family = address_family(family);
        if family.is_ipv6() {
            // The first of all: the kernel's own choice, 1024, is that of everybody's routes. IPv4's is 0.
            message.attributes.push(RouteAttribute::Priority(1));
        }
        message
    }

    fn rule(&self, family: IpAddr, mark: Mark) -> RuleMessage {
        let mut message = RuleMessage::default();
        message.header.family = address_family(family);
        message.header.action = RuleAction::ToTable;
        message.attributes = vec![
            RuleAttribute::Table(self.table),
            RuleAttribute::Priority(self.priority),
            RuleAttribute::FwMark(mark.0),
            RuleAttribute::FwMask(MARK_MASK),
        ];
        message
    }

    fn interface_rule(&self, family: IpAddr, mark: Mark, interface: &str) -> RuleMessage {
        let mut rule = self.rule(family, mark);
        rule.attributes.push(RuleAttribute::Iifname(interface.to_owned()));
        rule
    }
}

/// Whether a packet with `mark` that goes to the rest of the world is delivered to the pod itself.
fn delivered(netlink: &mut Netlink, family: IpAddr, mark: Mark) -> bool {
    // Addresses for documentation, which no pod has: RFC 5737 and RFC 3849.
    let (somewhere, bits) = match family {
        IpAddr::V4(_) => (RouteAddress::Inet(Ipv4Addr::new(203, 0, 113, 1)), 32),
        IpAddr::V6(_) => {
            let address = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);
            (RouteAddress::Inet6(address), 128)
        }
    };
    let mut question = RouteMessage::default();
    question.header.address_family = address_family(family);
    question.header.destination_prefix_length = bits;
    question.attributes = vec![
        RouteAttribute::Destination(somewhere),
        RouteAttribute::Mark(mark.0),
    ];
    let answer = netlink.get::<RouteMessage>(RouteNetlinkMessage::GetRoute(question));
    // An error is, for one, that it is unreachable.
    answer.is_ok_and(|route| {
        route.header.kind == RouteType::Local
            && route.attributes.contains(&RouteAttribute::Oif(LOOPBACK_IFINDEX))
    })
}

fn open() -> Result<Netlink, Error> {
    Netlink::open().map_err(|error| Error::new("opening a netlink socket", error))
}

/// The wildcard address of each family.
fn families(v6: bool) -> impl Iterator<Item = IpAddr> {
    let v4 = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    [Some(v4), v6.then_some(IpAddr::V6(Ipv6Addr::UNSPECIFIED))]
        .into_iter()
        .flatten()
}

fn address_family(address: IpAddr) -> AddressFamily {
    if address.is_ipv4() {
        AddressFamily::Inet
    } else {
        AddressFamily::Inet6
    }
}

fn was_absent(added: io::Result<()>, operation: impl FnOnce() -> String) -> Result<bool, Error> {
    match added {
        Ok(()) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(false),
        Err(error) => Err(Error::new(operation(), error)),
    }
}

fn unless_absent(result: io::Result<()>, operation: impl FnOnce() -> String) -> Option<Error> {
    let error = result.err()?;
    match error.raw_os_error() {
        Some(libc::ENOENT | libc::ESRCH | libc::EAFNOSUPPORT) => None,
        _ => Some(Error::new(operation(), error)),
    }
}
