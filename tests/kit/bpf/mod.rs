//! What the eBPF object asks of a kernel, read from its instructions.
//!
//! The verifier of the kernel at hand shows only that this one takes the programs. Here every helper call, every access to the
//! context and to what it leads to, every kind of instruction, map and program is looked up in tables of kernel versions, so
//! that what the oldest supported kernel refuses is told before one is booted. `tests/suites/object.rs` is the caller.
//!
//! - [`object`]: programs and maps of an object file, linked as they are loaded
//! - [`insn`]: one instruction; [`walk`]: where pointers go in a program, and what it uses
//! - [`helpers`], [`fields`], [`features`]: the tables
//! - [`check`]: uses against tables

pub mod check;
pub mod features;
pub mod fields;
pub mod helpers;
pub mod insn;
pub mod object;
mod state;
pub mod walk;

use std::fmt;

/// A release of Linux.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u8, pub u8);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

/// The types of program that we have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `BPF_PROG_TYPE_SCHED_CLS`.
    Classifier,
    /// `BPF_PROG_TYPE_SK_LOOKUP`.
    Lookup,
}

impl Kind {
    /// When the type came, and what brought it.
    pub fn since(self) -> (Version, &'static str) {
        match self {
            Self::Classifier => (Version(4, 1), "96be4325f443"),
            Self::Lookup => (Version(5, 9), "e9ddbb7707ff"),
        }
    }

    /// When it could first be attached in a way that we know, and what brought that: the clsact qdisc, and links on a network
    /// namespace. TCX links (6.6, e420bed02507) are the backend's better way, which it takes after a probe.
    pub fn attached_since(self) -> (Version, &'static str) {
        match self {
            Self::Classifier => (Version(4, 5), "1f211a1b929c"),
            Self::Lookup => (Version(5, 9), "e9ddbb7707ff"),
        }
    }

    /// What its context is.
    pub fn context(self) -> fields::Object {
        match self {
            Self::Classifier => fields::Object::SkBuff,
            Self::Lookup => fields::Object::SkLookup,
        }
    }
}
