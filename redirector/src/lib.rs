//! The node daemon: pods in, captured and mutually authenticated TCP out.
//!
//! The layers, lowest first; a module uses only lines above its own, and not its neighbours on the same line
//! (`tests/layers.rs` holds this list and fails on any other edge):
//!
//! ```text
//! mesh
//! sys | telemetry | serve | control_plane
//! redirect | identity | discovery
//! proxy
//! pods
//! admin | cni | debug
//! config
//! app | uninstall | doctor
//! cli
//! ```
#![deny(unsafe_code)]

pub mod admin;
pub mod app;
pub mod cli;
pub mod cni;
pub mod config;
pub mod control_plane;
pub mod debug;
pub mod discovery;
pub mod doctor;
pub mod identity;
pub mod mesh;
pub mod pods;
pub mod proxy;
pub mod redirect;
pub mod serve;
pub mod sys;
pub mod telemetry;
pub mod uninstall;
