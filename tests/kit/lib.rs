//! A node in a box: what the suites and the demonstration are built of.
//!
//! - [`node`]: a node and its pods, made of network namespaces, veths and a bridge; [`netns`] is one namespace
//! - [`agent`]: the real daemon in the node's namespace; [`workloads`] writes its workload file
//! - [`cgroup`]: a cgroup, and commands in it
//! - [`cni`]: pod events over the Unix socket, [`churn`]: in every order; [`zds`]: the same over ZDS, with us as the server
//! - [`containerd`]: a container runtime in the node, with our plugin in its network
//! - [`app`]: applications of the pods, and their clients; [`process`]: other programs in a pod
//! - [`iptables`]: rules in a pod
//! - [`foreign`]: eBPF programs of others; [`footprint`]: all that anybody has put into a namespace
//! - [`capture`]: what was on the wire; [`counters`]: what the kernel and the daemon counted; [`holdings`]: what is held
//! - [`bpf`]: what the eBPF object asks of a kernel
//! - [`packet`]: packets made by hand
//! - [`dns`]: the DNS proxy of a pod, as far as capture needs one; [`inner`]: a namespace behind a pod
//! - [`ca`]: certificates for peers that are not ours; [`envoy`] and [`hbone_client`] are such peers
//! - [`ads`] and [`istio_ca`]: control planes, by [`grpc`] and the messages of [`proto`]; [`workload_api`]: of SPIFFE, ours and one in Python;
//!   [`api_server`]: Kubernetes' API for certificates, [`daemonset_api`]: for the agent's own DaemonSet
//! - [`cluster`]: a node in a cluster, whose API is [`kube_api`]'s or that of the real [`kube_apiserver`]; [`kubelet`]: pods' cgroups; [`chart`]: what
//!   the agent is deployed by
//! - [`mesh`]: what most tests begin with, [`control_plane`]: those of control planes; [`suite`]: the harness
//!
//! Everything made here is removed when its value is dropped; what a killed process left is removed by the next one.
#![forbid(unsafe_code)]

pub mod ads;
pub mod agent;
pub mod api_server;
pub mod app;
pub mod bpf;
pub mod browser;
pub mod ca;
pub mod capture;
pub mod cgroup;
pub mod chart;
pub mod churn;
pub mod cluster;
pub mod cni;
pub mod containerd;
pub mod control_plane;
pub mod counters;
pub mod daemonset_api;
pub mod dns;
pub mod envoy;
pub mod footprint;
pub mod foreign;
pub mod grpc;
pub mod hbone_client;
pub mod holdings;
pub mod inner;
pub mod iptables;
pub mod istio_ca;
pub mod kube_api;
pub mod kube_apiserver;
pub mod kubelet;
pub mod mesh;
pub mod netns;
pub mod node;
pub mod packet;
pub mod process;
pub mod proto;
pub mod suite;
pub mod wait;
pub mod workload_api;
pub mod workloads;
pub mod zds;
