//! The structs whose fields programs read by name: the contexts, and the sockets to which they lead.
//!
//! Offsets and widths are those of `include/uapi/linux/bpf.h`, compared with the type information of 5.10.262, 6.1.192 and
//! 6.18; what may be written is from `tc_cls_act_is_valid_access` and `sk_lookup_is_valid_access` (net/core/filter.c). What a
//! field is not listed for, no kernel allows or nobody has looked up: add it with its version.

use super::Version;

/// A struct with fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Object {
    /// `struct __sk_buff`, the context of classifiers.
    SkBuff,
    /// `struct bpf_sk_lookup`, the context of lookups.
    SkLookup,
    /// `struct bpf_sock`, of a socket that may be a request or in TIME_WAIT.
    SockCommon,
    /// `struct bpf_sock`, of a full socket.
    Sock,
    /// `struct bpf_tcp_sock`.
    TcpSock,
}

impl Object {
    /// Its name in C.
    pub fn name(self) -> &'static str {
        match self {
            Self::SkBuff => "__sk_buff",
            Self::SkLookup => "bpf_sk_lookup",
            Self::SockCommon => "bpf_sock (common)",
            Self::Sock => "bpf_sock",
            Self::TcpSock => "bpf_tcp_sock",
        }
    }

    fn fields(self) -> &'static [Field] {
        match self {
            Self::SkBuff => SK_BUFF,
            Self::SkLookup => SK_LOOKUP,
            Self::SockCommon | Self::Sock => SOCK,
            Self::TcpSock => TCP_SOCK,
        }
    }
}

/// A field, or an array of fields.
#[derive(Debug)]
pub struct Field {
    /// Its name.
    pub name: &'static str,
    offset: i32,
    /// Width in bytes; of one element.
    pub bytes: u8,
    count: u8,
    /// When it could first be read, and what brought that.
    pub read: (Version, &'static str),
    /// When it could first be written, and what brought that.
    pub write: Option<(Version, &'static str)>,
    /// Whether a part of it, or several elements at once, are as good as the whole.
    pub in_parts: bool,
    /// Whether its first two bytes are as good as the whole.
    port: bool,
}

const fn field(offset: i32, name: &'static str, since: (u8, u8), source: &'static str) -> Field {
    Field {
        name,
        offset,
        bytes: 4,
        count: 1,
        read: (Version(since.0, since.1), source),
        write: None,
        in_parts: false,
        port: false,
    }
}

impl Field {
    const fn wide(mut self) -> Self {
        self.bytes = 8;
        self
    }

    const fn times(mut self, count: u8) -> Self {
        self.count = count;
        self
    }

    const fn writable(mut self, since: (u8, u8), source: &'static str) -> Self {
        self.write = Some((Version(since.0, since.1), source));
        self
    }

    const fn in_parts(mut self) -> Self {
        self.in_parts = true;
        self
    }

    /// Four bytes on old kernels, and two by its type on newer ones, all of which take both.
    const fn port(mut self) -> Self {
        self.port = true;
        self
    }

    fn covers(&self, offset: i32) -> bool {
        let end = self.offset + i32::from(self.bytes) * i32::from(self.count);
        (self.offset..end).contains(&offset)
    }

    /// Whether an access is to the whole of it, or of one element.
    pub fn is_whole(&self, offset: i32, bytes: u8) -> bool {
        let within = offset - self.offset;
        self.in_parts
            || (self.port && within == 0 && bytes == 2)
            || (bytes == self.bytes && within % i32::from(self.bytes) == 0)
    }
}

/// The field at an offset.
pub fn find(object: Object, offset: i32) -> Option<&'static Field> {
    let found = object.fields().iter().find(|field| field.covers(offset))?;
    // Requests and sockets in TIME_WAIT have none of these (`bpf_sock_common_is_valid_access`).
    let full_only = ["type", "protocol", "mark", "priority"].contains(&found.name);
    (object != Object::SockCommon || !full_only).then_some(found)
}

/// What a field points to, if that has fields.
pub(super) fn leads_to(object: Object, offset: i32) -> Option<Object> {
    match (object, find(object, offset)?.name) {
        (Object::SkBuff, "sk") => Some(Object::SockCommon),
        (Object::SkLookup, "sk") => Some(Object::Sock),
        _ => None,
    }
}

/// Of `family` to `local_port` (8a31db561566) a classifier may read nothing, so they are not here; nor is `flow_keys`.
const SK_BUFF: &[Field] = &[
    field(0, "len", (4, 1), "9bac3d6d548e"),
    field(4, "pkt_type", (4, 1), "9bac3d6d548e"),
    field(8, "mark", (4, 1), "9bac3d6d548e").writable((4, 2), "d691f9e8d440"),
    field(12, "queue_mapping", (4, 1), "9bac3d6d548e").writable((5, 1), "74e31ca850c1"),
    field(16, "protocol", (4, 1), "c24973957975"),
    field(20, "vlan_present", (4, 1), "c24973957975"),
    field(24, "vlan_tci", (4, 1), "c24973957975"),
    field(28, "vlan_proto", (4, 1), "27cd54524769"),
    field(32, "priority", (4, 1), "bcad57182425").writable((4, 2), "d691f9e8d440"),
    field(36, "ingress_ifindex", (4, 2), "37e82c2f974b"),
    field(40, "ifindex", (4, 2), "37e82c2f974b"),
    field(44, "tc_index", (4, 2), "d691f9e8d440").writable((4, 2), "d691f9e8d440"),
    field(48, "cb", (4, 2), "d691f9e8d440")
        .times(5)
        .writable((4, 2), "d691f9e8d440")
        .in_parts(),
    field(68, "hash", (4, 3), "ba7591d8b28b"),
    field(72, "tc_classid", (4, 4), "045efa82ff56").writable((4, 4), "045efa82ff56"),
    field(76, "data", (4, 7), "969bf05eb3ce"),
    field(80, "data_end", (4, 7), "969bf05eb3ce"),
    field(84, "napi_id", (4, 12), "b1d9fc41aab1"),
    field(140, "data_meta", (4, 15), "de8f3a83b0a0"),
    field(152, "tstamp", (5, 0), "f11216b24219")
        .wide()
        .writable((5, 0), "f11216b24219"),
    field(160, "wire_len", (5, 0), "e3da08d05700"),
    field(164, "gso_segs", (5, 1), "d9ff286a0f59"),
    field(168, "sk", (5, 1), "46f8bc92758c").wide(),
    field(176, "gso_size", (5, 7), "cf62089b0edd"),
    Field {
        bytes: 1,
        ..field(180, "tstamp_type", (5, 18), "8d21ec0e46ed")
    },
    field(184, "hwtstamp", (5, 16), "f64c4acea51f").wide(),
];

/// The type of `remote_port` has two bytes since 9a69e2b385f4 (5.18).
const SK_LOOKUP: &[Field] = &[
    field(0, "sk", (5, 9), "e9ddbb7707ff").wide(),
    field(8, "family", (5, 9), "e9ddbb7707ff"),
    field(12, "protocol", (5, 9), "e9ddbb7707ff"),
    field(16, "remote_ip4", (5, 9), "e9ddbb7707ff"),
    field(20, "remote_ip6", (5, 9), "e9ddbb7707ff").times(4),
    field(36, "remote_port", (5, 9), "e9ddbb7707ff").port(),
    field(40, "local_ip4", (5, 9), "e9ddbb7707ff"),
    field(44, "local_ip6", (5, 9), "e9ddbb7707ff").times(4),
    field(60, "local_port", (5, 9), "e9ddbb7707ff"),
    field(64, "ingress_ifindex", (5, 17), "f89315650ba3"),
];

/// In a classifier there is no pointer to one before 5.1. The type of `dst_port` has two bytes since 4421a582718a (5.18, and
/// stable releases before it).
const SOCK: &[Field] = &[
    field(0, "bound_dev_if", (5, 1), "46f8bc92758c"),
    field(4, "family", (5, 1), "46f8bc92758c"),
    field(8, "type", (5, 1), "46f8bc92758c"),
    field(12, "protocol", (5, 1), "46f8bc92758c"),
    field(16, "mark", (5, 1), "46f8bc92758c"),
    field(20, "priority", (5, 1), "46f8bc92758c"),
    field(24, "src_ip4", (5, 1), "46f8bc92758c"),
    field(28, "src_ip6", (5, 1), "46f8bc92758c").times(4),
    field(44, "src_port", (5, 1), "46f8bc92758c"),
    field(48, "dst_port", (5, 1), "aa65d6960a98").port(),
    field(52, "dst_ip4", (5, 1), "aa65d6960a98"),
    field(56, "dst_ip6", (5, 1), "aa65d6960a98").times(4),
    field(72, "state", (5, 1), "aa65d6960a98"),
    field(76, "rx_queue_mapping", (5, 8), "c3c16f2ea6d2"),
];

const TCP_SOCK: &[Field] = &[
    field(0, "snd_cwnd to sacked_out", (5, 1), "655a51e536c0").times(20),
    field(80, "bytes_received and bytes_acked", (5, 1), "655a51e536c0")
        .wide()
        .times(2),
    field(96, "dsack_dups to icsk_retransmits", (5, 3), "uapi/linux/bpf.h").times(4),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_in_order_and_nothing_overlaps() {
        for object in [Object::SkBuff, Object::SkLookup, Object::Sock, Object::TcpSock] {
            for pair in object.fields().windows(2) {
                let end = pair[0].offset + i32::from(pair[0].bytes) * i32::from(pair[0].count);
                assert!(
                    end <= pair[1].offset,
                    "{}: {} and {}",
                    object.name(),
                    pair[0].name,
                    pair[1].name
                );
            }
        }
    }

    #[test]
    fn only_full_sockets_have_a_type() {
        assert_eq!(find(Object::Sock, 8).unwrap().name, "type");
        assert!(find(Object::SockCommon, 8).is_none());
        assert_eq!(find(Object::SockCommon, 72).unwrap().name, "state");
    }
}
