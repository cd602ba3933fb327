//! What kubelet's container runtime runs: a CNI plugin that tells the agent of pods.

pub mod entry;
pub mod plugin;
