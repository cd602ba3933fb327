//! The id of a network namespace in a pod's (ip-netns(8), "nsid"), by which the programs look for the node's own sockets.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

use rtnetlink::packet_route::{
    RouteNetlinkMessage,
    nsid::{NsidAttribute, NsidMessage},
};

use crate::sys::netlink::Netlink;

/// The id by which a namespace is known in the calling thread's. The kernel gives it when a veth leads there, else it is given now. It
/// stays as long as both namespaces do, and nothing in the pod can make it mean another.
pub(super) fn in_this_namespace(netns: BorrowedFd<'_>) -> io::Result<u32> {
    let fd = || NsidAttribute::Fd(netns.as_raw_fd().cast_unsigned());
    let mut netlink = Netlink::open()?;
    if let Some(id) = ask(&mut netlink, fd())? {
        return Ok(id);
    }
    let any = NsidAttribute::Id(-1);
    match netlink.change(RouteNetlinkMessage::NewNsId(message(vec![fd(), any])), 0) {
        // Somebody else has given it meanwhile.
        Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {}
        given => given?,
    }
    ask(&mut netlink, fd())?.ok_or_else(|| io::Error::other("the kernel has given none"))
}

/// `None` if there is none: the kernel says -1 (`include/uapi/linux/net_namespace.h`, NETNSA_NSID_NOT_ASSIGNED).
fn ask(netlink: &mut Netlink, fd: NsidAttribute) -> io::Result<Option<u32>> {
    let answer: NsidMessage = netlink.get(RouteNetlinkMessage::GetNsId(message(vec![fd])))?;
    Ok(answer.attributes.iter().find_map(|attribute| match attribute {
        NsidAttribute::Id(id) => u32::try_from(*id).ok(),
        _ => None,
    }))
}

fn message(attributes: Vec<NsidAttribute>) -> NsidMessage {
    let mut message = NsidMessage::default();
    message.attributes = attributes;
    message
}
