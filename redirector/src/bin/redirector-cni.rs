//! The CNI plugin: the runtime's call on standard input and in the environment, the result on standard output.
#![deny(unsafe_code)]

use std::{
    io::{self, Write},
    process::ExitCode,
};

use redirector::cni::plugin;

fn main() -> ExitCode {
    // What is no text stays there, and is refused where it is used: it is not the same as a variable that is not set.
    let (text, code) = match plugin::run(
        &|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()),
        &mut io::stdin().lock(),
    ) {
        Ok(text) => (text, ExitCode::SUCCESS),
        Err(text) => (text, ExitCode::FAILURE),
    };
    match io::stdout().write_all(text.as_bytes()) {
        Ok(()) => code,
        Err(_) => ExitCode::FAILURE,
    }
}
