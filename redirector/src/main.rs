//! The daemon and its tools: all of it is in `cli`.
#![deny(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    redirector::cli::main()
}
