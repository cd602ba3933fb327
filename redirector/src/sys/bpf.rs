//! What bpf(2) tells and aya does not: which programs are attached somewhere, by id and in their order.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

/// Somewhere that programs are attached to.
#[derive(Debug, Clone, Copy)]
pub enum Hook<'a> {
    /// What arrives at an interface of the calling thread's namespace, by TCX.
    TcxIngress(u32),
    /// What an interface of the calling thread's namespace sends, by TCX.
    TcxEgress(u32),
    /// New connections of a network namespace.
    SkLookup(BorrowedFd<'a>),
}

/// `struct { ... } query` of `union bpf_attr` as in Linux 6.6: include/uapi/linux/bpf.h. For TCX hooks the kernel writes `revision`
/// whatever size is told, so all of it must be there; older kernels want what they don't know to be zero.
#[repr(C)]
#[derive(Default)]
struct Query {
    target: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    programs: u64,
    count: u32,
    zero: u32,
    program_attach_flags: u64,
    link_ids: u64,
    link_attach_flags: u64,
    revision: u64,
}

const _: () = assert!(size_of::<Query>() == 64);

/// Programs that a hook can have: BPF_MPROG_MAX, include/linux/bpf_mprog.h; SK_LOOKUP's hooks have as many (MAX_SK_LOOKUP is 64
/// as well: `netns_bpf_max_progs`).
const MAX_PROGRAMS: usize = 64;

/// The ids of the programs of a hook, first to last.
///
/// # Errors
/// Those of bpf(2) with BPF_PROG_QUERY: EINVAL where the kernel has no such hook, EPERM without CAP_NET_ADMIN.
pub fn attached(hook: Hook<'_>) -> io::Result<Vec<u32>> {
    // enum bpf_attach_type
    let (target, attach_type) = match hook {
        Hook::TcxIngress(interface) => (interface, 46),
        Hook::TcxEgress(interface) => (interface, 47),
        Hook::SkLookup(netns) => (netns.as_raw_fd() as u32, 36),
    };
    let mut programs = [0_u32; MAX_PROGRAMS];
    let mut query = Query {
        target,
        attach_type,
        programs: programs.as_mut_ptr() as u64,
        count: MAX_PROGRAMS as u32,
        ..Query::default()
    };
    prog_query(&mut query)?;
    let count = usize::try_from(query.count).unwrap_or_default();
    Ok(programs.get(..count).unwrap_or_default().to_vec())
}

#[expect(unsafe_code, reason = "a command of bpf(2) that aya keeps to itself")]
fn prog_query(query: &mut Query) -> io::Result<()> {
    const BPF_PROG_QUERY: libc::c_int = 16;
    // SAFETY: the kernel reads and writes `query`, of the size that is told, and writes at most `query.count` ids to where
    // `query.programs` points; the caller's array has room for as many and outlives the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            BPF_PROG_QUERY,
            std::ptr::from_mut(query),
            size_of::<Query>(),
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
