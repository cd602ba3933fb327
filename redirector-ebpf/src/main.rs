//! The eBPF programs. Each entry point loads, asks `redirector_common::verdict`, and acts; nothing is decided here.
//!
//! - `programs`: a pod's own three
//! - `deciders`: those that all pods share
//! - `pod`: the maps, and what they hold for a pod
//! - `packet`: header bytes out of a `__sk_buff`
//! - `others`: proxies that other processes are
//! - `probes`: where a new connection comes from
//! - `steer`: the only place that turns packets back, refuses, assigns or drops
//! - `tags`: what a socket is known to be
//! - `stats`: packet counters
//!
//! On the host this is an empty program, so that the whole workspace checks on plain stable Rust.
#![cfg_attr(target_arch = "bpf", no_std, no_main)]

#[cfg(target_arch = "bpf")]
mod deciders;
#[cfg(target_arch = "bpf")]
mod others;
#[cfg(target_arch = "bpf")]
mod packet;
#[cfg(target_arch = "bpf")]
mod pod;
#[cfg(target_arch = "bpf")]
mod probes;
#[cfg(target_arch = "bpf")]
mod programs;
#[cfg(target_arch = "bpf")]
mod stats;
#[cfg(target_arch = "bpf")]
mod steer;
#[cfg(target_arch = "bpf")]
mod tags;

#[cfg(not(target_arch = "bpf"))]
fn main() {}

#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // The verifier rejects a program that could come here.
    loop {}
}

/// The kernel's licence gate: some helpers are for GPL-compatible programs only.
#[cfg(target_arch = "bpf")]
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
