//! The messages and services of tests/proto, as build.rs makes them.
#![allow(missing_docs, clippy::all, reason = "made by a program")]

pub mod discovery {
    tonic::include_proto!("envoy.service.discovery.v3");
}

pub mod workload {
    tonic::include_proto!("istio.workload");
}

pub mod security {
    tonic::include_proto!("istio.security");
}

pub mod auth {
    tonic::include_proto!("istio.v1.auth");
}

/// SPIFFE's has no package.
pub mod spiffe {
    tonic::include_proto!("_");
}

pub mod cri {
    tonic::include_proto!("runtime.v1");
}
