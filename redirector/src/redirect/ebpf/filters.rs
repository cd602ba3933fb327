//! The filters of clsact qdiscs: which are ours, and where there is room for one. Others have theirs beside ours, at any
//! priority, of any kind; none of them is touched.
//!
//! Everything here is about an interface of the calling thread's namespace. `hooks` calls it.

use std::io;

use aya::programs::TcAttachType;
use rtnetlink::{
    packet_core::{NlasIterator, parse_string, parse_u32},
    packet_route::{
        RouteNetlinkMessage,
        tc::{TcAttribute, TcHandle, TcMessage},
    },
};

use crate::sys::netlink::Netlink;

/// Priority of our filters, or the next above it that nobody has: before those that the kernel numbers itself (from 49152
/// down), and none that is known to be another's.
const PRIORITY: u16 = 1337;

/// A filter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Filter {
    /// Lower ones run first.
    pub(super) priority: u16,
    /// Its number within a priority; 0 is what all filters of the priority have in common.
    pub(super) handle: u32,
    /// Of an eBPF filter: the name that it was given.
    pub(super) name: Option<String>,
    /// Of an eBPF filter: the program's id.
    pub(super) program: Option<u32>,
}

/// All filters of one direction; none where there is no qdisc.
///
/// # Errors
/// Those of rtnetlink.
pub(super) fn filters(
    netlink: &mut Netlink,
    interface: u32,
    direction: TcAttachType,
) -> io::Result<Vec<Filter>> {
    let index = i32::try_from(interface).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    let mut question = TcMessage::with_index(index);
    question.header.parent = TcHandle {
        major: TcHandle::CLSACT.major,
        minor: match direction {
            TcAttachType::Egress => TcHandle::MIN_EGRESS,
            _ => TcHandle::MIN_INGRESS,
        },
    };
    let answers = netlink.dump(RouteNetlinkMessage::GetTrafficFilter(question))?;
    Ok(answers.iter().filter_map(|answer| read(answer)).collect())
}

/// Length of `struct tcmsg`: include/uapi/linux/rtnetlink.h. Its members: family and padding, then interface, handle, parent
/// and info, 4 bytes each.
const HEADER_BYTES: usize = 20;

fn read(answer: &[u8]) -> Option<Filter> {
    // include/uapi/linux/rtnetlink.h and pkt_cls.h
    const TCA_KIND: u16 = 1;
    const TCA_OPTIONS: u16 = 2;
    const TCA_BPF_NAME: u16 = 7;
    const TCA_BPF_ID: u16 = 11;
    let number = |at: usize| Some(u32::from_ne_bytes(answer.get(at..at + 4)?.try_into().ok()?));
    let mut filter = Filter {
        // The lower half is the protocol.
        priority: (number(16)? >> 16) as u16,
        handle: number(8)?,
        name: None,
        program: None,
    };
    let attributes = NlasIterator::new(answer.get(HEADER_BYTES..)?).flatten();
    let is_bpf = |kind: &[u8]| kind == b"bpf\0";
    let (mut bpf, mut options) = (false, Vec::new());
    for attribute in attributes {
        match attribute.kind() {
            TCA_KIND => bpf = is_bpf(attribute.value()),
            TCA_OPTIONS => options = attribute.value().to_vec(),
            _ => {}
        }
    }
    if bpf {
        for option in NlasIterator::new(options.as_slice()).flatten() {
            match option.kind() {
                TCA_BPF_NAME => filter.name = parse_string(option.value()).ok(),
                TCA_BPF_ID => filter.program = parse_u32(option.value()).ok(),
                _ => {}
            }
        }
    }
    Some(filter)
}

/// Whether an interface has a clsact qdisc. One of the older kind, ingress, stands at the same place, has room for filters of what
/// arrives only, and takes those of what is sent for such.
///
/// # Errors
/// Those of rtnetlink.
pub(super) fn has_clsact(netlink: &mut Netlink, interface: u32) -> io::Result<bool> {
    const TCA_KIND: u16 = 1;
    // The kernel tells those of all interfaces.
    let question = RouteNetlinkMessage::GetQueueDiscipline(TcMessage::default());
    let is_it = |answer: &Vec<u8>| {
        let mut attributes = NlasIterator::new(answer.get(HEADER_BYTES..).unwrap_or_default()).flatten();
        answer.get(4..8) == Some(&interface.to_ne_bytes()[..])
            && attributes.any(|attribute| attribute.kind() == TCA_KIND && attribute.value() == b"clsact\0")
    };
    Ok(netlink.dump(question)?.iter().any(is_it))
}

/// Those of `filters` that are ours: eBPF filters with our program's name.
pub(super) fn ours<'a>(filters: &'a [Filter], program: &'a str) -> impl Iterator<Item = &'a Filter> {
    filters
        .iter()
        .filter(move |filter| filter.name.as_deref() == Some(program))
}

/// Removes a clsact qdisc that has no filter; one with filters, or of another kind, stays.
///
/// Between the look and the removal somebody may add a filter, or find the qdisc there and rely on it: hence this is only for a
/// qdisc that we have added.
///
/// # Errors
/// Those of rtnetlink.
pub(super) fn remove_empty_qdisc(netlink: &mut Netlink, interface: u32) -> io::Result<()> {
    for direction in [TcAttachType::Ingress, TcAttachType::Egress] {
        if !filters(netlink, interface, direction)?.is_empty() {
            return Ok(());
        }
    }
    let index = i32::try_from(interface).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    let mut qdisc = TcMessage::with_index(index);
    qdisc.header.parent = TcHandle::CLSACT;
    qdisc.attributes = vec![TcAttribute::Kind("clsact".to_owned())];
    let removed = netlink.change(RouteNetlinkMessage::DelQueueDiscipline(qdisc), 0);
    match removed.as_ref().map_err(io::Error::raw_os_error) {
        // There is none, or one of another kind.
        Err(Some(libc::ENOENT | libc::EINVAL | libc::ENODEV)) => Ok(()),
        _ => removed,
    }
}

/// The priority for a new filter of ours.
pub(super) fn free_priority(filters: &[Filter]) -> io::Result<u16> {
    (PRIORITY..u16::MAX)
        .find(|priority| filters.iter().all(|filter| filter.priority != *priority))
        .ok_or_else(|| io::Error::other(format!("no priority above {PRIORITY} is free")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filter(priority: u16, name: Option<&str>) -> Filter {
        Filter {
            priority,
            handle: 1,
            name: name.map(str::to_owned),
            program: name.map(|_| 5),
        }
    }

    #[test]
    fn ours_are_told_by_their_name() {
        let all = [
            filter(1, Some("theirs")),
            filter(1337, None),
            filter(1338, Some("ours")),
            filter(1339, Some("ours")),
        ];
        let found: Vec<_> = ours(&all, "ours").map(|filter| filter.priority).collect();
        assert_eq!(found, [1338, 1339]);
    }

    #[test]
    fn a_priority_that_somebody_has_is_left_to_them() {
        assert_eq!(free_priority(&[]).unwrap(), 1337);
        assert_eq!(
            free_priority(&[filter(1, None), filter(49152, None)]).unwrap(),
            1337
        );
        assert_eq!(
            free_priority(&[filter(1337, None), filter(1338, Some("theirs"))]).unwrap(),
            1339
        );
    }
}
