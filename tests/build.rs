//! Makes code for the tests' own servers, and for the client of a container runtime, from their `.proto` files. They are written apart from the messages of the agent, so that a
//! misunderstanding on one side shows.

use std::error::Error;

const FILES: [&str; 5] = ["authorization", "ca", "discovery", "workload", "workload_api"];

fn main() -> Result<(), Box<dyn Error>> {
    let files = FILES.map(|name| format!("proto/{name}.proto"));
    println!("cargo::rerun-if-changed=proto");
    let descriptors = protox::compile(&files, ["proto"])?;
    tonic_prost_build::configure()
        .build_client(false)
        .compile_fds(descriptors)?;
    tonic_prost_build::configure()
        .build_server(false)
        .compile_fds(protox::compile(["proto/cri.proto"], ["proto"])?)?;
    Ok(())
}
