//! The edge to the kernel: the only module, with `redirect::maps`, that may hold `unsafe`, nix or libc.

pub mod bpf;
pub mod cgroups;
pub mod clock;
pub mod follow;
pub mod interfaces;
pub mod listening;
pub mod lock;
pub mod netlink;
pub mod netns;
pub mod pidfd;
pub mod process;
pub mod rulesets;
pub mod seqpacket;
pub mod socket;
