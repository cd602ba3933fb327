//! What is true of the mesh: values and pure functions. No I/O, no async, no protobuf.
//!
//! Sources in `discovery` fill it; `proxy` and `pods` read it.

mod balance;
pub mod index;
pub mod pod;
pub mod policy;
pub mod route;
pub mod service;
pub mod spiffe;
pub mod strings;
pub mod wanted;
pub mod workload;

#[cfg(test)]
pub(crate) mod testing;
