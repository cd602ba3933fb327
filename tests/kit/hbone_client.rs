//! An HBONE client that shares nothing with ours: Python's h2.

use std::{path::Path, time::Duration};

use crate::{
    ca::Credentials,
    envoy::python,
    node::Pod,
    process::{command, output},
};

const DEADLINE: Duration = Duration::from_secs(60);

/// Makes one request of a server, and returns what came of it: the status and the body, or the fault.
pub fn hbone_client(
    from: &Pod,
    to: (String, u16),
    authority: &str,
    own: &Credentials,
    identity: &str,
    method: &str,
) -> String {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/hbone_client.py");
    let mut client = command(&from.ns, python());
    client.arg(script).args([to.0, to.1.to_string()]).arg(authority);
    client
        .arg(&own.certificate)
        .arg(&own.key)
        .arg(&own.root)
        .args([identity, method]);
    output(&mut client, DEADLINE).1
}
