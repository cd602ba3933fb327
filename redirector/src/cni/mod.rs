//! What kubelet's container runtime runs, a CNI plugin that tells the agent of pods; and what installs it.

pub mod entry;
pub mod install;
pub mod plugin;
