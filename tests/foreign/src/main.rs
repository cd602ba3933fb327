//! Programs of somebody else, beside which ours must work: the suites attach them by the kit's `foreign`. They share nothing
//! with our own programs, and are never part of what is delivered.
//!
//! - `foreign_count` counts, and lets the next program decide
//! - `foreign_peer` and `foreign_neigh` deliver what comes out of a pod to another one, as CNIs with eBPF of their own do
//!
//! On the host this is an empty program, so that the whole workspace checks on plain stable Rust.
#![cfg_attr(target_arch = "bpf", no_std, no_main)]

#[cfg(target_arch = "bpf")]
mod programs;

#[cfg(not(target_arch = "bpf"))]
fn main() {}

#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // The verifier rejects a program that could come here.
    loop {}
}

/// The kernel's licence gate.
#[cfg(target_arch = "bpf")]
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
