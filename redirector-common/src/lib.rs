//! What the eBPF programs and the daemon must agree on, and every decision that the programs take.
//!
//! - [`consts`]: ports, marks and routing numbers
//! - [`net`]: addresses as the programs hold them
//! - [`maps`]: key and value of every map
//! - [`rules`]: include and exclude rules
//! - [`probes`]: the node's own probes
//! - [`packet`]: headers to [`packet::TcpMeta`]
//! - [`verdict`]: what becomes of a packet or of a new connection
//!
//! Everything here is pure and total, so that it is tested on the host; the eBPF crate only loads and acts.
#![cfg_attr(not(test), no_std)]

pub mod consts;
pub mod maps;
pub mod net;
pub mod packet;
pub mod probes;
pub mod rules;
pub mod verdict;
