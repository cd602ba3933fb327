//! What a socket is known to be, kept in the socket itself (socket-local storage).

use core::{ffi::c_void, ptr};

use aya_ebpf::{
    bindings::{
        BPF_F_CLONE, BPF_F_NO_PREALLOC, BPF_SK_STORAGE_GET_F_CREATE, bpf_map_type::BPF_MAP_TYPE_SK_STORAGE,
        bpf_sock,
    },
    helpers::{bpf_sk_fullsock, bpf_sk_storage_get},
    macros::btf_map,
    programs::TcContext,
};
use redirector_common::maps::Tag;

/// A socket storage map whose values pass from a listener to the sockets it accepts. aya's `SkStorage` has neither this flag
/// nor a look-up by a packet's socket.
#[repr(C)]
pub(crate) struct ClonedSocketStorage {
    r#type: *const [i32; BPF_MAP_TYPE_SK_STORAGE as usize],
    key: *const i32,
    value: *const u32,
    max_entries: *const [i32; 0],
    map_flags: *const [i32; (BPF_F_NO_PREALLOC | BPF_F_CLONE) as usize],
}

// SAFETY: only its address is used; the kernel guards the contents.
unsafe impl Sync for ClonedSocketStorage {}

#[btf_map]
static TAGS: ClonedSocketStorage = ClonedSocketStorage {
    r#type: ptr::null(),
    key: ptr::null(),
    value: ptr::null(),
    max_entries: ptr::null(),
    map_flags: ptr::null(),
};

/// The full socket that sends a packet, or null.
pub(crate) type SenderSocket = *mut bpf_sock;

/// The full socket that sends a packet. A forwarded packet has none, and a reset or an answer of the handshake has one that
/// is not full.
#[inline(always)]
pub(crate) fn sender(ctx: &TcContext) -> SenderSocket {
    // SAFETY: the context is valid; the helper takes what `sk` holds once it is not null.
    unsafe {
        let sk = (*ctx.skb.skb).__bindgen_anon_2.sk;
        if sk.is_null() {
            ptr::null_mut()
        } else {
            bpf_sk_fullsock(sk)
        }
    }
}

#[inline(always)]
fn storage(socket: SenderSocket, value: *mut u32, flags: u64) -> *mut u32 {
    let map = (&raw const TAGS).cast_mut().cast::<c_void>();
    // SAFETY: callers have checked the socket; `value` is null or points to a u32 on the caller's stack.
    unsafe { bpf_sk_storage_get(map, socket.cast(), value.cast(), flags) }.cast()
}

/// The socket's tag.
#[inline(always)]
pub(crate) fn tag(socket: SenderSocket) -> Option<Tag> {
    if socket.is_null() {
        return None;
    }
    let value = storage(socket, ptr::null_mut(), 0);
    if value.is_null() {
        return None;
    }
    // SAFETY: not null, hence the storage of a live socket.
    Tag::from_value(unsafe { *value })
}

/// Tags a TCP socket; false if that failed. A raw socket that forges a SYN stays as it is, since it may send other protocols too,
/// and so does nobody's packet.
#[inline(always)]
pub(crate) fn set(socket: SenderSocket, tag: Tag) -> bool {
    const IPPROTO_TCP: u32 = 6;
    const SOCK_STREAM: u32 = 1;
    if socket.is_null() {
        return true;
    }
    // SAFETY: a full socket; the fields are read at their declared width.
    if unsafe { (*socket).protocol != IPPROTO_TCP || (*socket).type_ != SOCK_STREAM } {
        return true;
    }
    let mut value = tag as u32;
    !storage(socket, &raw mut value, u64::from(BPF_SK_STORAGE_GET_F_CREATE)).is_null()
}
